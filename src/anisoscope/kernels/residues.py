"""Kernels of exact products ``y^T y`` of float32 rows, of integers on tensor cores: see ``stats.residues``.

Each entry is rounded to an integer of its column's unit, a power of two. A product of two columns of integers is known
from its remainders by several moduli, as long as it is smaller than half of what these come to together (the Chinese
remainder theorem); and remainders of products are those of products of remainders, which fit into eight bits. So there
is one product of rows for each modulus, summed without any error, and one pass that puts remainders together.

This module needs Triton; ``stats.residues`` imports it where Triton is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from anisoscope.kernels.grams import _block, _tile, _write


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work is cut."""

    columns: int = 128
    """On each side of a tile of products."""
    rows: int = 128
    """Multiplied in one step, of as many bytes as a line of shared memory."""
    window: int = 1 << 15
    """Rows, a multiple of ``rows``, whose products are added up: 31 bits hold those of ``2**16``."""
    squared: int = 16
    """Rows whose squares are formed together."""
    block: int = 32
    """Columns of which remainders are formed together."""
    joined: int = 64
    """On each side of a tile of what is put together."""
    warps: int = 4
    """Two programs stand on a processor then: one multiplies while the other has to wait."""
    stages: int = 3


CUT = Tiling()

PRIME_TO_EACH_OTHER = (256, 255, 253, 251, 247, 241, 239, 233)
"""The moduli: none has a divisor in common with another, and all remainders are numbers of eight bits."""

WHOLE = math.prod(PRIME_TO_EACH_OTHER)
"""Products are told apart up to half of it, on either side of zero."""


def _weight(modulus: int) -> int:
    """What a remainder counts for: a fraction of the whole, in units of ``2**-64`` and as a signed number.

    The fractions add up to the product over the whole, but for whole numbers, which sums of 64 bits do not hold.
    """
    others = WHOLE // modulus
    fraction = (pow(others, -1, modulus) << 64) + modulus // 2
    found = fraction // modulus % (1 << 64)
    return found - (1 << 64) if found >> 63 else found


COUNT = tl.constexpr(len(PRIME_TO_EACH_OTHER))
MODULI = tl.constexpr(PRIME_TO_EACH_OTHER)
WEIGHTS = tl.constexpr(tuple(_weight(one) for one in PRIME_TO_EACH_OTHER))
SHARE = tl.constexpr(WHOLE / 2.0**64)
NEAREST = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 up to ``2**22`` it leaves the nearest integer in the last bits."""


@triton.jit(do_not_specialize=["cells"])
def column_squares(
    rows, bounds, squares, D, cells, row_site, row_stride, R: tl.constexpr, C: tl.constexpr, SHARES: tl.constexpr
):
    """The sum of squares of each column of a cell of a site, float64, in ``SHARES`` parts of the rows."""
    cell, share = tl.program_id(1) // SHARES, tl.program_id(1) % SHARES
    site = tl.program_id(2).to(tl.int64)
    begin, end = tl.load(bounds + cell), tl.load(bounds + cell + 1)
    length = tl.cdiv(end - begin, SHARES)
    end = tl.minimum(end, begin + (share + 1) * length)
    begin = begin + share * length
    r, c = tl.arange(0, R), tl.program_id(0) * C + tl.arange(0, C)
    rows += site * row_site + begin * row_stride
    total = tl.zeros((R, C), dtype=tl.float64)
    for step in range(0, (end - begin).to(tl.int32), R):
        inside = (r < end - begin - step)[:, None] & (c < D)[None, :]
        x = tl.load(rows + (step + r).to(tl.int64)[:, None] * row_stride + c[None, :], mask=inside, other=0.0)
        x = x.to(tl.float64)
        total += x * x
    squares += ((site * cells + cell) * SHARES + share) * D
    tl.store(squares + c, tl.sum(total, axis=0), mask=c < D)


@triton.jit
def _nearest(x):
    return (x + NEAREST) - NEAREST


@triton.jit
def _remainder(high, low, MODULUS: tl.constexpr):
    """The remainder nearest to zero of ``2**16 high + low``, each an integer up to ``2**15``; float32 holds all steps.

    Where two are equally near but for the rounding of a quotient, either will do: both are numbers of eight bits. Not
    so by 255; but its ``step`` is one, so that quotients are small, and their rounding too little for that.
    """
    step: tl.constexpr = (65536 + MODULUS // 2) % MODULUS - MODULUS // 2
    left = high * step + low
    left -= _nearest(left * (1 / MODULUS)) * MODULUS
    return (left + NEAREST).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["cells"])
def residues_of_rows(
    rows, places, units, residues, D, cells, row_site, row_stride, total_rows, part, K: tl.constexpr, C: tl.constexpr
):
    """Entries over the unit of their column, rounded, by each modulus: the remainder nearest to zero.

    Columns stand one after another in ``residues``, with all blocks of their rows, and ``part`` behind each entry is
    its remainder by the next modulus: tensor cores want integers in this order.
    """
    x, cell, c = _block(rows, places, D, row_site, row_stride, K, C)
    site = tl.program_id(2).to(tl.int64)
    unit = tl.load(units + (site * cells + cell) * D + c, mask=c < D, other=1.0)
    x = tl.trans((x.to(tl.float64) * (1 / unit)[None, :]).to(tl.float32))  # exact, but for what is next to zero
    high = _nearest(x * (1 / 65536))
    low = _nearest(x - high * 65536)
    k = tl.program_id(0) * K + tl.arange(0, K)
    part = tl.cast(part, tl.int64)
    residues += site * COUNT * part + c.to(tl.int64)[:, None] * total_rows + k[None, :]
    for m in tl.static_range(COUNT):
        tl.store(residues + m * part, _remainder(high, low, MODULI[m]))


@triton.jit(do_not_specialize=["tiles", "cells"])
def residue_grams(
    residues, bounds, moduli, out, tiles, cells, total_rows, padded, part,
    B: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One tile of a cell of a site by one modulus, from ``residues_of_rows``: the remainder of each product, from zero
    on. ``bounds`` are in blocks of ``K`` rows.

    After ``W`` rows what tensor cores have summed is brought back to remainders, since 31 bits do not hold more.
    """
    site, cell, i, j = _tile(tiles, cells * COUNT)  # all programs of a modulus follow each other
    m = cell % COUNT
    begin, end = tl.load(bounds + cell // COUNT) * K, tl.load(bounds + cell // COUNT + 1) * K
    modulus = tl.load(moduli + m)
    r, c, k = i * B + tl.arange(0, B), j * B + tl.arange(0, B), tl.arange(0, K)
    residues += (site * COUNT + m) * part + begin
    left = residues + r.to(tl.int64)[:, None] * total_rows + k[None, :]
    right = residues + c.to(tl.int64)[:, None] * total_rows + k[None, :]
    found = tl.zeros((B, B), dtype=tl.int32)
    count = (end - begin).to(tl.int32)
    for first in range(0, count, W):
        for step in range(first, tl.minimum(first + W, count), K):
            found = tl.dot(tl.load(left + step), tl.trans(tl.load(right + step)), found, out_dtype=tl.int32)
        found = _from_zero(found, modulus)
    out += (site * cells * COUNT + cell) * padded * padded
    tl.store(out + r.to(tl.int64)[:, None] * padded + c[None, :], found.to(tl.uint8))


@triton.jit
def _from_zero(x, modulus):
    """The remainder, from zero on, of integers up to ``2**30``, by a modulus that is known when the kernel runs."""
    inverse = ((4294967296 + modulus.to(tl.int64) - 1) // modulus).to(tl.uint32)
    x += 1073741824 // modulus * modulus + modulus
    x -= tl.umulhi(x.to(tl.uint32), inverse).to(tl.int32) * modulus  # at most one too many
    return tl.where(x < 0, x + modulus, x)


@triton.jit(do_not_specialize=["tiles", "cells"])
def joined_grams(residues, units, out, D, tiles, cells, padded, out_site, out_cell, B: tl.constexpr):
    """One tile of a cell of a site in float64, from the remainders by all moduli."""
    site, cell, i, j = _tile(tiles, cells)
    r, c = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
    residues += (site * cells + cell) * COUNT * padded * padded + r.to(tl.int64)[:, None] * padded + c[None, :]
    sums = tl.zeros((B, B), dtype=tl.int64)
    for m in tl.static_range(COUNT):
        sums += tl.load(residues + m * tl.cast(padded, tl.int64) * padded).to(tl.int64) * WEIGHTS[m]
    found = sums.to(tl.float64) * tl.full((B, B), SHARE, tl.float64)
    units += (site * cells + cell) * D
    found *= tl.load(units + r, mask=r < D, other=0.0)[:, None]
    found *= tl.load(units + c, mask=c < D, other=0.0)[None, :]
    _write(out + site * out_site + cell.to(tl.int64) * out_cell, found, i, j, D, B)
