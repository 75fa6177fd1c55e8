"""Tokenizers: characters or bytes of a corpus, byte-level BPE trained here, and any tokenizer of Hugging Face."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from anisoscope.errors import OptionError, SourceError, choose, unknown_name

FORMAT = "anisoscope tokenizer"
VERSION = 1
UNITS = ("character", "byte")
SPECIAL_ROLES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")
PROBE_TEXT = "a"  # encoded with and without special tokens, to see which ones a tokenizer adds


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus needs to become numbers. ``encode`` adds no special token; ``prefix`` and ``suffix`` are those that
    the tokenizer would put around a sequence."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this number less one."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of special tokens by their role: pad, unk, bos, eos, cls, sep, mask."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """Special tokens before a sequence."""
        ...

    @property
    def suffix(self) -> tuple[int, ...]:
        """Special tokens after a sequence."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides which ids a text gets."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Int[np.ndarray, "_"]]:
        """Ids of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything needed to make it again."""
        ...


@dataclass(frozen=True)
class CharTokenizer:
    """One id a symbol: ``alphabet`` holds code points (unit "character") or values of bytes in UTF-8 (unit "byte").

    Id 0 is the unknown symbol, which stands for everything outside the alphabet (special id "unk"); the alphabet
    follows in ascending order. ``decode`` writes U+FFFD for it.
    """

    alphabet: tuple[int, ...]
    unit: str = "character"

    def __post_init__(self) -> None:
        choose("unit", self.unit, UNITS)
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)):
            raise OptionError(f"an alphabet is ascending and without copies, got {self.alphabet[:5]}…")
        if self.unit == "byte" and not 0 <= self.alphabet[0] <= self.alphabet[-1] <= 255:
            raise OptionError(f"bytes are numbers from 0 to 255, got {self.alphabet[-1]}")

    @classmethod
    def train(cls, documents: Iterable[str], *, unit: str = "character") -> CharTokenizer:
        """The alphabet of a corpus."""
        choose("unit", unit, UNITS)
        found: set[int] = set()
        for document in documents:
            found.update(document.encode("utf-8") if unit == "byte" else map(ord, set(document)))
        if not found:
            raise SourceError("no character in the corpus, so no alphabet")
        return cls(tuple(sorted(found)), unit)

    @property
    def vocab_size(self) -> int:
        """Symbols of the alphabet, and one for the unknown."""
        return len(self.alphabet) + 1

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The unknown symbol."""
        return {"unk": 0}

    @property
    def prefix(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def suffix(self) -> tuple[int, ...]:
        """None."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of unit and alphabet."""
        return _sha256(self.to_json())

    @cached_property
    def _symbols(self) -> Int[np.ndarray, "_"]:
        return np.array(self.alphabet, dtype=np.int64)

    def _array(self, text: str) -> Int[np.ndarray, "_"]:
        if self.unit == "byte":
            units = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        else:
            units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        at = np.searchsorted(self._symbols, units).clip(max=len(self.alphabet) - 1)
        return np.where(self._symbols[at] == units, at + 1, 0).astype(np.int32)

    def encode(self, text: str) -> list[int]:
        """One id a symbol, 0 for unknown ones."""
        return self._array(text).tolist()

    def encode_many(self, texts: Sequence[str]) -> list[Int[np.ndarray, "_"]]:
        """One id a symbol of each text."""
        return [self._array(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; U+FFFD for the unknown symbol and for bytes that are not UTF-8."""
        known = list(ids)
        bad = [number for number in known if not 0 <= number < self.vocab_size]
        if bad:
            raise OptionError(f"id {bad[0]} lies outside 0 to {self.vocab_size - 1}")
        if self.unit == "byte":
            raw = b"".join(bytes([self.alphabet[i - 1]]) if i else "\ufffd".encode() for i in known)
            return raw.decode("utf-8", errors="replace")
        return "".join(chr(self.alphabet[i - 1]) if i else "\ufffd" for i in known)

    def to_json(self) -> dict[str, Any]:
        """Unit and alphabet."""
        return {"format": FORMAT, "version": VERSION, "kind": "characters", "unit": self.unit} | {
            "alphabet": list(self.alphabet)
        }


class HFTokenizer:
    """A tokenizer of the ``tokenizers`` or ``transformers`` library behind the same face. Immutable by convention.

    Roles of special ids are those that transformers knows; of a bare ``tokenizers.Tokenizer`` they are guessed from the
    names of its added tokens (``<s>``, ``[CLS]``, ``<|endoftext|>``…) unless ``special_ids`` says them.
    """

    def __init__(self, tokenizer: Any, *, special_ids: Mapping[str, int] | None = None) -> None:
        self.inner = tokenizer
        self._bare = hasattr(tokenizer, "get_vocab_size")
        self.backend = _whole(getattr(tokenizer, "backend_tokenizer", None) or tokenizer)
        self.special_ids: Mapping[str, int] = dict(sorted((special_ids or self._roles()).items()))
        self.vocab_size: int = tokenizer.get_vocab_size() if self._bare else len(tokenizer)
        self.prefix, self.suffix = self._around()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self._ids(text, special=False)

    def encode_many(self, texts: Sequence[str]) -> list[Int[np.ndarray, "_"]]:
        """Ids of each text; many at once is much faster than one by one."""
        if not texts:
            return []
        if hasattr(self.backend, "encode_batch"):
            # Where the library has it: the same ids, without the places in the text that each came from.
            encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
            found = encode(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in found]
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's own description; of its vocabulary where it has none."""
        if hasattr(self.backend, "to_str"):
            return _sha256(self.to_json())
        return _sha256({"vocabulary": self.inner.get_vocab(), "special": dict(self.special_ids)})

    def to_json(self) -> dict[str, Any]:
        """The tokenizer's own description and the roles of its special ids."""
        if not hasattr(self.backend, "to_str"):
            raise OptionError(
                f"{type(self.inner).__name__} is written in Python and has no JSON; use its save_pretrained"
            )
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": "huggingface",
            "special_ids": dict(self.special_ids),
            "tokenizer": json.loads(self.backend.to_str()),
        }

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._bare or (not special and hasattr(self.backend, "encode_batch")):
            return list(self.backend.encode(text, add_special_tokens=special).ids)
        # No warning about texts longer than the model's window: windows are cut later.
        return list(self.inner.encode(text, add_special_tokens=special, verbose=False))

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plain, full = self._ids(PROBE_TEXT, special=False), self._ids(PROBE_TEXT, special=True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
        raise OptionError(
            f"the tokenizer changes {PROBE_TEXT!r} itself when it adds special tokens; use add_special=False"
        )

    def _roles(self) -> dict[str, int]:
        if not self._bare:
            pairs = ((role, getattr(self.inner, f"{role}_token_id", None)) for role in SPECIAL_ROLES)
            return {role: int(number) for role, number in pairs if number is not None}
        named = {"<s>": "bos", "</s>": "eos", "<|endoftext|>": "eos", "<pad>": "pad", "<unk>": "unk", "<mask>": "mask"}
        named |= {f"[{role.upper()}]": role for role in ("pad", "unk", "cls", "sep", "mask", "bos", "eos")}
        added = self.inner.get_added_tokens_decoder()
        return {named[token.content]: number for number, token in added.items() if token.content in named}


def _whole(backend: Any) -> Any:
    """A copy that neither cuts nor pads: those are settings of somebody's last call, not of the tokenizer."""
    if not hasattr(backend, "to_str"):
        return backend
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def train_bpe(documents: Iterable[str], vocab_size: int, *, end_of_text: str = "<|endoftext|>") -> HFTokenizer:
    """Byte-level BPE of a corpus: 256 bytes, merges by frequency, and one special token that parts documents (eos).

    There is nothing random in it: the same corpus gives the same tokenizer. A small corpus runs out of pairs to merge
    and gives fewer than ``vocab_size``.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise OptionError(f"vocab_size={vocab_size}: byte-level BPE needs 256 bytes and a special token, 257 or more")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(iter(documents), trainer=trainer)
    return HFTokenizer(backend, special_ids={"eos": int(backend.token_to_id(end_of_text) or 0)})


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer as JSON."""
    Path(path).write_text(json.dumps(tokenizer.to_json(), ensure_ascii=False), encoding="utf-8")


def load_tokenizer(path: str | Path) -> CharTokenizer | HFTokenizer:
    """Read a tokenizer that ``save_tokenizer`` wrote, or a ``tokenizer.json`` of the tokenizers library."""
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from None
    except ValueError as error:
        raise SourceError(f"{path}: not JSON: {error}") from None
    if isinstance(found, dict) and "model" in found:
        return HFTokenizer(_backend(found, path))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SourceError(f"{path}: JSON, but no tokenizer")
    if found["version"] != VERSION:
        raise SourceError(f"{path}: version {found['version']} of the format; this anisoscope reads {VERSION}")
    if found["kind"] == "characters":
        return CharTokenizer(tuple(found["alphabet"]), found["unit"])
    if found["kind"] == "huggingface":
        return HFTokenizer(_backend(found["tokenizer"], path), special_ids=found["special_ids"])
    raise unknown_name("kind of tokenizer", found["kind"], ("characters", "huggingface"))


def _backend(body: dict[str, Any], path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(json.dumps(body))
    except Exception as error:  # the library raises a bare Exception
        raise SourceError(f"{path}: no tokenizer: {error}") from None


def _sha256(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
