"""Kernels of products ``y^T y`` of float32 rows: all sites and cells in one launch, on tensor cores.

These multiply numbers of few bits, so each entry is taken apart. Either where it is loaded: into three bfloat16, which
hold a float32 exactly and are multiplied in six products. Or beforehand, in a pass over the rows: into two float16,
three products, in units of each column that bring its largest entry to the upper end of their range; the product of the
two lesser halves is left out, so that entries on the diagonal are too small by up to 2e-7. Sums of the large products
are taken out of the tensor cores every few rows, since these cut off where others round, and kept in two float32, whose
second takes what the first loses and all the small products. One program writes a tile above the diagonal and its
mirror image; nobody else writes there, so the same rows give the same bits.

This module needs Triton; ``stats.gram_matrices`` imports it where Triton is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work is cut."""

    columns: int
    """On each side of a tile."""
    warps: int
    rows: int = 32
    """Multiplied in one step."""
    window: int = 256
    """Rows, a multiple of ``rows``, whose products are added up on tensor cores."""
    kind: Literal["bfloat16", "float16"] = "bfloat16"
    """Of parts: three of bfloat16, or two of float16."""
    stages: int = 3


HALVES = Tiling(columns=128, warps=8, rows=64, kind="float16")
SMALL = Tiling(columns=64, warps=4)


def tiling(device: torch.device) -> Tiling:
    """Large tiles of halves where several warps multiply together; elsewhere registers would not hold their sums, and
    small ones of three parts are formed."""
    return HALVES if torch.cuda.get_device_capability(device)[0] in (9, 10) else SMALL


PART = tl.bfloat16
"""The type in which three parts are multiplied."""


@triton.jit
def _parts(x, PART: tl.constexpr):
    """Three bfloat16 whose sum is ``x``: what each leaves is exact, and 24 bits are three times eight."""
    first = x.to(tl.bfloat16)
    x -= first.to(tl.float32)
    second = x.to(tl.bfloat16)
    third = (x - second.to(tl.float32)).to(tl.bfloat16)
    return first.to(PART), second.to(PART), third.to(PART)


@triton.jit
def _add(new, rest, a, b, PART: tl.constexpr):
    """``a b`` of float32 tiles: the product of the leading parts to ``new``, the others to ``rest``."""
    a0, a1, a2 = _parts(a, PART)
    b0, b1, b2 = _parts(b, PART)
    new = tl.dot(a0, b0, new)
    rest = tl.dot(a0, b2, rest)
    rest = tl.dot(a2, b0, rest)
    rest = tl.dot(a1, b1, rest)
    rest = tl.dot(a0, b1, rest)
    rest = tl.dot(a1, b0, rest)
    return new, rest


@triton.jit
def _tile(tiles, cells):
    """Which tile of which cell of which site this program forms: its line and column of ``tiles`` x ``tiles``, from
    the diagonal on. The programs of a cell follow each other: they read the same rows at the same time."""
    wide = tiles + 1 - tiles % 2  # a long line of tiles and the short one that fills it up, side by side
    programs = tiles * (tiles + 1) // 2
    cell, at = tl.program_id(0) // programs, tl.program_id(0) % programs
    line, place = at // wide, at % wide
    i, j = line, line + place
    if j >= tiles:
        i = tiles - 1 + tiles % 2 - line
        j = i + place - (tiles - line)
    return (cell // cells).to(tl.int64), cell % cells, i, j


@triton.jit
def _kept(total, rest, new):
    """``total + rest + new``, as two: Knuth's sum, which tells what it loses; then as much of the rest as the first of
    the two can hold."""
    both = total + new
    back = both - total
    rest += (total - (both - back)) + (new - back)
    total = both + rest
    return total, rest - (total - both)


@triton.jit
def _write(out, found, i, j, D, B: tl.constexpr):
    """A tile of a symmetric matrix and its mirror image."""
    first, last = (i * B).to(tl.int64), (j * B).to(tl.int64)
    side = tl.arange(0, B)
    r, c = (i * B + side)[:, None], (j * B + side)[None, :]
    inside = (r <= c) & (c < D)  # the rest of a tile on the diagonal is a copy, as it need not be the same to a bit
    tl.store(out + (first * D + last) + side[:, None] * D + side[None, :], found, mask=inside)
    tl.store(out + (last * D + first) + side[None, :] * D + side[:, None], found, mask=inside & (r < c))


@triton.jit(do_not_specialize=["tiles", "cells"])
def cell_grams(
    rows, bounds, out, D, tiles, cells, row_site, row_stride, out_site, out_cell,
    B: tl.constexpr, K: tl.constexpr, W: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One tile of a cell of a site, of rows taken apart where they are loaded.

    ``bounds`` says where each cell begins, and where the last one ends.
    """
    site, cell, i, j = _tile(tiles, cells)
    begin, end = tl.load(bounds + cell).to(tl.int64), tl.load(bounds + cell + 1).to(tl.int64)
    r, c, k = i * B + tl.arange(0, B), j * B + tl.arange(0, B), tl.arange(0, K)
    rows += site * row_site
    left, right = k[None, :] * row_stride + r[:, None], k[:, None] * row_stride + c[None, :]
    count = (end - begin).to(tl.int32)
    inside_left, inside_right = (r < D)[:, None], (c < D)[None, :]
    total = tl.zeros((B, B), dtype=tl.float32)
    rest = tl.zeros((B, B), dtype=tl.float32)
    for first in range(0, count, W):
        new = tl.zeros((B, B), dtype=tl.float32)
        for step in range(first, tl.minimum(first + W, count), K):
            here, there = rows + (begin + step) * row_stride, k < count - step
            a = tl.load(here + left, mask=inside_left & there[None, :], other=0.0)
            b = tl.load(here + right, mask=inside_right & there[:, None], other=0.0)
            new, rest = _add(new, rest, a, b, PART)
        total, rest = _kept(total, rest, new)
    found = total.to(tl.float64) + rest.to(tl.float64)
    _write(out + site * out_site + cell.to(tl.int64) * out_cell, found, i, j, D, B)


@triton.jit
def _block(rows, places, D, row_site, row_stride, K: tl.constexpr, C: tl.constexpr):
    """A block of ``K`` rows of a cell by ``C`` columns, with zeros where there are none; the cell and the columns.

    ``places`` says of each block where its rows begin, how many there are, and of which cell.
    """
    place = places + tl.program_id(0).to(tl.int64) * 3
    begin, count, cell = tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)
    k, c = tl.arange(0, K), tl.program_id(1) * C + tl.arange(0, C)
    rows += tl.program_id(2).to(tl.int64) * row_site + begin * row_stride
    inside = (k < count)[:, None] & (c < D)[None, :]
    return tl.load(rows + k[:, None] * row_stride + c[None, :], mask=inside, other=0.0), cell, c


@triton.jit(do_not_specialize=["cells"])
def column_sizes(rows, places, sizes, D, cells, row_site, row_stride, K: tl.constexpr, C: tl.constexpr):
    """The largest size of an entry in each column of each cell, as its bits, or what is in ``sizes`` already.

    Bits are in the order of the sizes, and a maximum is the same in whatever order blocks come. What is no number is
    larger than all, and spoils all products of that column and cell whatever their unit.
    """
    x, cell, c = _block(rows, places, D, row_site, row_stride, K, C)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    site = tl.program_id(2).to(tl.int64)
    tl.atomic_max(sizes + (site * cells + cell) * D + c, most, mask=c < D, sem="relaxed")


@triton.jit(do_not_specialize=["cells"])
def halves_of_rows(
    rows, places, units, halves, D, cells, row_site, row_stride, padded, part, K: tl.constexpr, C: tl.constexpr
):
    """Entries over the unit of their column, a power of two, as sums of two float16: the second is what the first
    leaves, rounded. All blocks follow each other in ``halves``, ``padded`` columns wide, and ``part`` behind each
    entry is its second half."""
    x, cell, c = _block(rows, places, D, row_site, row_stride, K, C)
    site = tl.program_id(2).to(tl.int64)
    unit = tl.load(units + (site * cells + cell) * D + c, mask=c < D, other=1.0)
    x = (x.to(tl.float64) * (1 / unit)[None, :]).to(tl.float32)  # exact, but for what float16 cannot tell from zero
    high = x.to(tl.float16)
    block = site * tl.num_programs(0) + tl.program_id(0)
    halves += (block * K + tl.arange(0, K))[:, None] * padded + c[None, :]
    tl.store(halves, high)
    tl.store(halves + part, (x - high.to(tl.float32)).to(tl.float16))


@triton.jit(do_not_specialize=["tiles", "cells"])
def half_grams(
    halves, bounds, units, out, D, tiles, cells, total_rows, padded, part, out_site, out_cell,
    B: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One tile of a cell of a site, from ``halves_of_rows``: of whole blocks of rows and whole tiles of columns."""
    site, cell, i, j = _tile(tiles, cells)
    begin, end = tl.load(bounds + cell), tl.load(bounds + cell + 1)
    r, c, k = i * B + tl.arange(0, B), j * B + tl.arange(0, B), tl.arange(0, K)
    halves += site * total_rows * padded
    left, right = k[None, :] * padded + r[:, None], k[:, None] * padded + c[None, :]
    total = tl.zeros((B, B), dtype=tl.float32)
    rest = tl.zeros((B, B), dtype=tl.float32)
    count = (end - begin).to(tl.int32)
    for first in range(0, count, W):
        new = tl.zeros((B, B), dtype=tl.float32)
        for step in range(first, tl.minimum(first + W, count), K):
            here = halves + (begin + step) * padded
            a, b = tl.load(here + left), tl.load(here + right)
            # In this order two products need not wait for each other.
            rest = tl.dot(a, tl.load(here + part + right), rest)
            new = tl.dot(a, b, new)
            rest = tl.dot(tl.load(here + part + left), b, rest)
        total, rest = _kept(total, rest, new)
    units += (site * cells + cell) * D
    found = total.to(tl.float64) + rest.to(tl.float64)
    found *= tl.load(units + r, mask=r < D, other=0.0)[:, None]
    found *= tl.load(units + c, mask=c < D, other=0.0)[None, :]
    _write(out + site * out_site + cell.to(tl.int64) * out_cell, found, i, j, D, B)
