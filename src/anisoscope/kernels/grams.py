"""Kernel of products ``y^T y`` of float32 rows: all sites and cells in one launch, on tensor cores.

These multiply numbers of few bits, so each entry is taken apart where it is loaded: into three bfloat16, which hold a
float32 exactly and are multiplied in six products, or into two of TF32, in three. Sums of the large products are taken
out of the tensor cores every few rows, since these cut off where others round, and kept in two float32, whose second
takes what the first loses and all the small products. One program writes a tile above the diagonal and its mirror
image; nobody else writes there, so the same rows give the same bits.

This module needs Triton; ``stats.moments`` imports it where Triton is.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    parts: int = 3
    """Three of bfloat16 or two of TF32."""
    stages: int = 3


LARGE = Tiling(columns=128, warps=8)
SMALL = Tiling(columns=64, warps=4)


def tiling(device: torch.device) -> Tiling:
    """Large tiles where several warps multiply together; elsewhere registers would not hold their sums."""
    return LARGE if torch.cuda.get_device_capability(device)[0] in (9, 10) else SMALL


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
def _high(x):
    """As ``precision.two_parts``."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add(new, rest, a, b, PARTS: tl.constexpr, PART: tl.constexpr):
    """``a b`` of float32 tiles: the product of the leading parts to ``new``, the others to ``rest``."""
    if PARTS == 3:
        a0, a1, a2 = _parts(a, PART)
        b0, b1, b2 = _parts(b, PART)
        new = tl.dot(a0, b0, new)
        rest = tl.dot(a0, b2, rest)
        rest = tl.dot(a2, b0, rest)
        rest = tl.dot(a1, b1, rest)
        rest = tl.dot(a0, b1, rest)
        rest = tl.dot(a1, b0, rest)
    else:
        a0, b0 = _high(a), _high(b)
        new = tl.dot(a0, b0, new, input_precision="tf32")
        rest = tl.dot(a0, b - b0, rest, input_precision="tf32")
        rest = tl.dot(a - a0, b0, rest, input_precision="tf32")
    return new, rest


@triton.jit(do_not_specialize=["tiles", "cells"])
def cell_grams(
    rows, bounds, out, D, tiles, cells, row_site, row_stride, out_site, out_cell,
    B: tl.constexpr, K: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One of ``tiles`` x ``tiles`` tiles of a cell of a site, from the diagonal on.

    ``bounds`` says where each cell begins, and where the last one ends. The programs of a cell follow each other: they
    read the same rows at the same time.
    """
    wide = tiles + 1 - tiles % 2  # a long line of tiles and the short one that fills it up, side by side
    programs = tiles * (tiles + 1) // 2
    cell, at = tl.program_id(0) // programs, tl.program_id(0) % programs
    line, place = at // wide, at % wide
    i, j = line, line + place
    if j >= tiles:
        i = tiles - 1 + tiles % 2 - line
        j = i + place - (tiles - line)
    site, cell = (cell // cells).to(tl.int64), cell % cells
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
            new, rest = _add(new, rest, a, b, PARTS, PART)
        # Knuth's sum, which tells what it loses; then as much of the rest as the first of the two can hold.
        both = total + new
        back = both - total
        rest += (total - (both - back)) + (new - back)
        total = both + rest
        rest -= total - both
    found = total.to(tl.float64) + rest.to(tl.float64)
    out += site * out_site + cell.to(tl.int64) * out_cell
    first, last = (i * B).to(tl.int64), (j * B).to(tl.int64)
    side = tl.arange(0, B)
    r, c = r[:, None], c[None, :]
    inside = (r <= c) & (c < D)  # the rest of a tile on the diagonal is a copy, as it need not be the same to a bit
    tl.store(out + (first * D + last) + side[:, None] * D + side[None, :], found, mask=inside)
    tl.store(out + (last * D + first) + side[None, :] * D + side[:, None], found, mask=inside & (r < c))
