"""GGUF files without waiting: the format's own library, with its slow loops replaced while a model is loaded.

``gguf`` makes views of a memory map for every token and every merge of a vocabulary, and unpacks weights sixteen rows
at a time; that took longer than all the rest of loading a small model. Here arrays are walked in one go and short rows
unpacked many at a time. Values and weights are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import importlib
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

ROWS_TOGETHER = 16  # that gguf unpacks at a time, whatever their length
BYTES_TOGETHER = 160_000
"""Packed bytes to unpack at a time: enough that Python does not count, few enough that they stay in cache."""

_ASKING = threading.Lock()  # one load at a time stands between transformers and gguf


@contextlib.contextmanager
def quick_gguf() -> Iterator[None]:
    """Inside, files are read quickly, and one question is asked once, by one load at a time.

    transformers has all fields of a file read three times, for configuration, weights and tokenizer, and names of
    tensors once for every module. For as long the names in ``_slow`` mean something else to everybody.
    """
    before: list[tuple[Any, str, Any]] = []
    with _ASKING:
        try:
            for place, name, quicker in _slow():
                module = _module(place)
                if hasattr(module, name):  # some are names of one version of transformers
                    before.append((module, name, getattr(module, name)))
                    setattr(module, name, quicker(before[-1][2]))
            yield
        finally:
            for module, name, plain in before:
                setattr(module, name, plain)


def _slow() -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Modules, names in them, and what makes of each function one that gives the same sooner."""
    return (
        ("gguf", "GGUFReader", lambda plain: cache(quick_reader(plain))),
        ("gguf", "get_tensor_name_map", cache),
        ("gguf", "dequantize", in_wide_rows),
        ("transformers.modeling_gguf_pytorch_utils", "_gguf_parse_value", texts_at_once),
        ("transformers.integrations.gguf.reader", "_mapped", as_plain_array),
    )


def _module(name: str) -> Any:
    """A module, or None where this version has no such."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def quick_reader(plain: Any) -> Any:
    """The library's reader, but that arrays of text and of numbers are walked in one go."""
    from gguf import GGUFValueType

    class Reader(plain):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            ours = raw_type == GGUFValueType.ARRAY and self.byte_order == "I" and sys.byteorder == "little"
            items = _items(self, orig_offs) if ours else None
            if items is None:
                return super()._get_field_parts(orig_offs, raw_type)
            size, kind, found = items
            at = self.data[orig_offs : orig_offs + 12]
            head = [at[:4].view("<u4"), at[4:].view("<u8")]
            return size, [*head, *found], list(range(2, 2 + len(found))), [GGUFValueType.ARRAY, kind]

    return Reader


def _items(reader: Any, at: Any) -> tuple[int, Any, list[Any]] | None:
    """Bytes, type and items of the array at a place; None for one that is empty, nested or goes beyond the file."""
    from gguf import GGUFValueType

    raw = memoryview(reader.data)
    if at + 12 > len(raw):
        return None
    kind, length = struct.unpack_from("<IQ", raw, at)
    start = at + 12
    scalar = {int(key): np.dtype(value) for key, value in reader.gguf_scalar_to_np.items()}.get(kind)
    if not length or (scalar is None and kind != GGUFValueType.STRING):
        return None
    if scalar is None:
        found, end = _texts(raw, start, length)
    else:
        end = start + length * scalar.itemsize
        numbers = np.frombuffer(raw[start:end], scalar) if end <= len(raw) else np.empty(0)
        found = [numbers[i : i + 1] for i in range(len(numbers))]
    return (end - at, GGUFValueType(kind), found) if len(found) == length and end <= len(raw) else None


def _texts(raw: Any, at: Any, length: int) -> tuple[list[Any], int]:
    """So many texts, each behind its number of bytes, and where they end; fewer where the file ends before."""
    found: list[Any] = []
    size_of = struct.Struct("<Q").unpack_from
    for _ in range(length):
        if at + 8 > len(raw):
            break
        end = at + 8 + size_of(raw, at)[0]
        found.append(raw[at + 8 : end])
        at = end
    return found, at


def in_wide_rows(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function, but that it is given many short rows as one. Blocks never reach over the end of a row."""

    def quick(data: Any, qtype: Any) -> Any:
        rows = np.asarray(data).reshape(-1, data.shape[-1]) if data.dtype == np.uint8 and data.ndim > 1 else None
        joined = 0 if rows is None else min(len(rows), BYTES_TOGETHER // ROWS_TOGETHER // max(rows.shape[1], 1))
        if rows is None or joined < 2:
            return dequantize(data, qtype)
        whole = len(rows) // joined * joined
        parts = [dequantize(rows[:whole].reshape(whole // joined, -1), qtype)]
        parts += [dequantize(rows[whole:], qtype)] if whole < len(rows) else []
        flat = [part.reshape(-1) for part in parts]
        return (flat[0] if len(flat) == 1 else np.concatenate(flat)).reshape(*data.shape[:-1], -1)

    return quick


def texts_at_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes values of the items of arrays, but that texts and numbers, of which there are a hundred
    thousand, take one step each."""

    def quick(value: Any, types: Any) -> Any:
        if type(value) is memoryview:
            return str(value, "utf-8")
        if type(value) is np.ndarray and value.dtype != np.uint8:  # text, where it is not ours
            return value.item()
        return parse(value, types)

    return quick


def as_plain_array(mapped: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that maps a file into memory, but that pieces of the map cost nothing but themselves."""
    return lambda path: np.asarray(mapped(path))
