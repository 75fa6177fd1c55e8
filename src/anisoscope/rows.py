"""Rows: one face for everything that can hold rows (tensor, array, memmap, iterable of chunks), mask included.

Masked rows are taken out before anything looks at them, so what stands in padding can never leak into a number.
Row numbers in errors count the rows as they came, before the mask.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.errors import EmptyInputError, NonFiniteError, ShapeError, name_rows

CHUNK_ROWS = 4096
"""Rows converted and reduced at a time: large enough for full BLAS speed, small enough to stay in cache."""

MOST_EXPONENT = 1000  # of a power of two to multiply with: it and its inverse are ordinary floats


@dataclass(frozen=True)
class Chunk:
    """Consecutive paths of rows ``(s, t, d)`` with flags for the rows to keep; ``start`` is the number of the first.

    ``continues`` marks plain ``(t, d)`` input, whose chunks are pieces of one path.
    """

    paths: Float[Tensor, "s t d"]
    keep: Bool[Tensor, "s t"] | None
    start: int
    continues: bool

    @property
    def rows(self) -> Float[Tensor, "n d"]:
        """The kept rows, in order."""
        flat = self.paths.reshape(-1, self.paths.shape[-1])
        return flat if self.keep is None else flat[self.keep.reshape(-1)]

    def numbers(self) -> Tensor:
        """The number of each kept row, counted over the input as it came."""
        total = self.paths.shape[0] * self.paths.shape[1]
        numbers = torch.arange(self.start, self.start + total)
        return numbers if self.keep is None else numbers[self.keep.reshape(-1).cpu()]


@dataclass(frozen=True)
class Rows:
    """A checked source of rows. ``resident`` means that the whole of it lies in memory as one array."""

    source: Any
    mask: Any
    resident: bool
    replayable: bool

    def chunks(self, chunk_rows: int = CHUNK_ROWS, *, check: bool = True) -> Iterator[Chunk]:
        """Yield chunks of about ``chunk_rows`` rows in order; whole paths stay together.

        Each is checked to be finite, unless the caller looks at sums over all rows afterwards, which saves a read.
        """
        width: int | None = None
        start = 0
        for number, (block, keep) in enumerate(self._blocks()):
            if width is not None and block.shape[-1] != width:
                raise ShapeError(
                    f"chunk {number} has width {block.shape[-1]}, those before it {width}; chunks must agree"
                )
            width = block.shape[-1]
            for chunk in _split(block, keep, start, chunk_rows):
                if check:
                    _check_finite(chunk)
                yield chunk
                _forget_pages(block)
            start += int(np.prod(block.shape[:-1]))
        if width is None:
            raise EmptyInputError("the iterable of chunks gave no chunk at all; it may have been used up already")

    def tensor(self, *, check: bool = True) -> Float[Tensor, "n d"]:
        """All kept rows as one tensor. Only for resident sources."""
        parts = [chunk.rows for chunk in self.chunks(1 << 62, check=check)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _blocks(self) -> Iterator[tuple[Any, Any]]:
        """Yield (array of two or more axes, flags or None) as the source holds them, unconverted."""
        if not _is_stream(self.source):
            yield self.source, self.mask
            return
        if self.mask is None:
            yield from ((as_matrix(block, f"chunk {i}"), None) for i, block in enumerate(self.source))
            return
        if isinstance(self.mask, Tensor | np.ndarray):
            yield from self._blocks_of_one_mask()
            return
        missing = object()
        for i, (block, keep) in enumerate(zip_longest(self.source, self.mask, fillvalue=missing)):
            if block is missing or keep is missing:
                raise ShapeError(f"chunks and masks differ in number: one of them ended at {i}")
            matrix = as_matrix(block, f"chunk {i}")
            yield matrix, as_mask(keep, tuple(matrix.shape[:-1]), f"mask of chunk {i}")

    def _blocks_of_one_mask(self) -> Iterator[tuple[Any, Any]]:
        flags = _as_flags(self.mask, "the mask").reshape(-1)
        start = 0
        for i, block in enumerate(self.source):
            matrix = as_matrix(block, f"chunk {i}")
            lead = tuple(matrix.shape[:-1])
            keep = flags[start : start + int(np.prod(lead))]
            start += int(np.prod(lead))
            if start > len(flags):
                raise ShapeError(f"the mask has {len(flags):,} flags, the chunks have more rows than that")
            yield matrix, as_mask(keep.reshape(lead), lead, f"mask of chunk {i}")
        if start != len(flags):
            raise ShapeError(f"the mask has {len(flags):,} flags, the chunks have {start:,} rows; they must agree")


def as_rows(source: Any, mask: Any = None) -> Rows:
    """Check ``source`` (and ``mask``, True keeps a row) and wrap it as Rows. Nothing is read or copied yet."""
    if isinstance(source, Rows):
        if mask is not None:
            raise ShapeError("these rows are wrapped already and carry their own mask; give the mask when wrapping")
        return source
    if isinstance(source, list | tuple) and source and not hasattr(source[0], "shape"):
        source = _as_array(source, "the input")
    if _is_stream(source):
        if not isinstance(source, Iterable):
            raise ShapeError(f"rows come as a tensor, an array or an iterable of chunks; got {type(source).__name__}")
        return Rows(source, mask, resident=False, replayable=iter(source) is not source)
    matrix = as_matrix(source, "the input")
    flags = None if mask is None else as_mask(mask, tuple(matrix.shape[:-1]), "the mask")
    return Rows(matrix, flags, resident=not _is_mapped(matrix), replayable=True)


def as_matrix(source: Any, name: str) -> Any:
    """Check the shape and type of one array; the last axis is the width. Files stay unread."""
    if not isinstance(source, Tensor | np.ndarray):
        source = _as_array(source, name)
    if isinstance(source, np.ma.MaskedArray):
        raise ShapeError(f"{name} is a numpy masked array, whose mask would be lost; give x.data and one flag per row")
    if isinstance(source, Tensor) and source.layout != torch.strided:
        raise ShapeError(f"{name} has layout {source.layout}; rows are dense: use x.to_dense()")
    if source.ndim < 2:
        raise ShapeError(
            f"{name} has shape {tuple(source.shape)}; rows need two axes or more, the last one the width: "
            "use x[None, :] for one row, x[:, None] for width 1"
        )
    if source.shape[-1] == 0:
        raise ShapeError(f"{name} has shape {tuple(source.shape)}: width 0")
    is_number = (
        not (source.is_complex() or source.dtype == torch.bool)
        if isinstance(source, Tensor)
        else source.dtype.kind in "fiu"
    )
    if not is_number:
        raise ShapeError(f"{name} has dtype {source.dtype}; rows are real numbers")
    return source


def as_mask(mask: Any, lead: tuple[int, ...], name: str) -> Tensor:
    """Check that ``mask`` holds one flag for each row, and make it boolean."""
    flags = _as_flags(mask, name)
    if tuple(flags.shape) != lead:
        raise ShapeError(f"{name} has shape {tuple(flags.shape)}, the rows {lead}; one flag for each row is needed")
    if flags.dtype != torch.bool:
        if flags.is_floating_point() or bool(((flags != 0) & (flags != 1)).any()):
            raise ShapeError(f"{name} has dtype {flags.dtype}; use booleans, or integers 0 and 1 (1 keeps the row)")
        flags = flags.bool()
    return flags


def as_tensor(block: Any) -> Tensor:
    """A real floating tensor of the block's own precision, detached, without a copy where that is possible."""
    if isinstance(block, Tensor):
        tensor = block.detach()
    else:
        array = np.ascontiguousarray(block)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        with warnings.catch_warnings():  # a read-only array is fine here: nothing below writes into its rows
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
    if not tensor.is_floating_point():
        return tensor.to(torch.float64)
    return tensor.float() if tensor.element_size() == 1 else tensor  # eight-bit floats have no arithmetic of their own


def _as_array(values: Any, name: str) -> np.ndarray:
    """An array of nested lists, or of whatever else numpy can read."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{name} cannot be read as an array of numbers: {error}") from error


def _as_flags(mask: Any, name: str) -> Tensor:
    """A mask as a tensor of its own type; arrays are copied, since torch takes only some byte orders and strides."""
    if isinstance(mask, Tensor):
        return mask
    array = _as_array(mask, name)
    if array.dtype.kind not in "biu":
        raise ShapeError(f"{name} has dtype {array.dtype}; use booleans, or integers 0 and 1 (1 keeps the row)")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def all_finite(numbers: Float[Tensor, "..."]) -> bool:
    """Whether no number is NaN or infinity."""
    # A sum is not finite if any element is not; the exact look follows only then (or after a harmless overflow).
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    return bool(torch.isfinite(numbers.sum(dtype=wide))) or bool(torch.isfinite(numbers).all())


def non_finite_rows(rows: Float[Tensor, "n d"]) -> Tensor:
    """Positions of the rows that hold NaN or infinity."""
    return (~torch.isfinite(rows).all(dim=1)).nonzero().reshape(-1)


def largest_size(numbers: Float[Tensor, "..."]) -> float:
    """The largest absolute value; NaN or infinity where one of them is not finite."""
    low, high = numbers.aminmax()
    return max(abs(float(low)), abs(float(high)))


def largest_sizes(rows: Float[Tensor, "s n d"]) -> Float[Tensor, "s"]:
    """The same of each site, where the rows are: nothing is asked of a device."""
    return torch.stack(torch.aminmax(rows.flatten(1), dim=1)).abs().amax(dim=0)


def power_of_two_scale(largest: float) -> float:
    """1 where the largest of some numbers is of ordinary size, else the power of two that brings it near 1.

    Squares of the scaled numbers stay in range, and a power of two changes no digit, so results are those of the
    numbers as they came.
    """
    if not math.isfinite(largest) or largest == 0 or 1e-6 < largest < 1e6:
        return 1.0
    exponent = math.frexp(largest)[1] - 1
    return math.ldexp(1.0, -max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT)))


def of_unit_size(groups: Float[Tensor, "m k j"]) -> Float[Tensor, "m k j"]:
    """Each group divided by the power of two next to its largest number, so that its fourth powers stay in range."""
    size = groups.abs().amax(dim=(1, 2), keepdim=True)
    return groups / torch.where(size > 0, size / torch.frexp(size).mantissa, 1.0)


def _is_stream(source: Any) -> bool:
    return not isinstance(source, Tensor | np.ndarray) and not hasattr(source, "__array__")


def _is_mapped(source: Any) -> bool:
    return _mapping(source) is not None


def _mapping(source: Any) -> mmap.mmap | None:
    """The memory map under an array, if a file lies under it."""
    base: object = source
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _forget_pages(block: Any) -> None:
    """Hand a mapped file's pages back after use: they would count as this process's memory until the map is closed.

    Never those of a copy-on-write map (mode "c"): what its owner wrote into it lives in these pages and nowhere else.
    """
    mapping = _mapping(block)
    if mapping is not None and _is_shared(block) and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _is_shared(block: Any) -> bool:
    """Whether the array is known to lie in a numpy map whose pages the file itself backs."""
    base: object = block
    modes = []
    while isinstance(base, np.ndarray):
        modes += [base.mode] if isinstance(base, np.memmap) else []
        base = base.base
    return bool(modes) and "c" not in modes


def _split(block: Any, keep: Tensor | None, start: int, chunk_rows: int) -> Iterator[Chunk]:
    """Cut one block into chunks, along whole paths where it has them."""
    width = block.shape[-1]
    if block.ndim == 2:
        pieces = (slice(a, a + chunk_rows) for a in range(0, max(len(block), 1), chunk_rows))
        length = 1
    else:
        block = block.reshape(math.prod(block.shape[:-2]), block.shape[-2], width)
        keep = None if keep is None else keep.reshape(block.shape[:2])
        length = block.shape[1]
        step = max(1, chunk_rows // max(length, 1))
        pieces = (slice(a, a + step) for a in range(0, max(len(block), 1), step))
    for piece in pieces:
        paths = as_tensor(block[piece])
        flags = None if keep is None else keep[piece].to(paths.device)
        if block.ndim == 2:
            paths, flags = paths[None], None if flags is None else flags[None]
        yield Chunk(paths, flags, start + piece.start * length, continues=block.ndim == 2)


def _check_finite(chunk: Chunk) -> None:
    if all_finite(chunk.rows):
        return
    numbers = chunk.numbers()[non_finite_rows(chunk.rows).cpu()].tolist()
    verb = "holds" if len(numbers) == 1 else "hold"
    raise NonFiniteError(
        f"{name_rows(numbers)} {verb} NaN or infinity (rows counted from 0, before any mask); "
        "mask them or find out where they come from"
    )


def mean_row(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d"]:
    """The mean of the rows in float64, block by block: torch's own would copy all of them into float64 first."""
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for block in rows.split(1024):
        total += block.sum(dim=0, dtype=torch.float64)
    return total / len(rows)
