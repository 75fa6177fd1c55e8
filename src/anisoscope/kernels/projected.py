"""Kernels of energies ``<P_b, M>`` of controls in wide second moments, with P_b a control's projector.

A projector is formed tile by tile, on and above the diagonal, and meets the same tiles of all moments at once: with
projectors and moments as rows, one product of very long rows. Both are taken apart into two float16 and multiplied in
three products on tensor cores; these cut off where others round, so that sums of the large product are taken out of
them every few entries. Sums over tiles are for those who launch: nothing is added in an order of chance.

This module needs Triton; ``tangent.wide_controls`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 64
"""Rows and columns of a tile."""
SIDE, DEPTH = 128, 64
"""Rows on either side whose products one program forms, and entries that it multiplies in one step."""
WINDOW = 256
"""Entries whose large products are added up on tensor cores: they come out too small by up to 4e-7."""
CHUNK = 128
"""Columns of an image at a time."""


@triton.jit
def _halves(value):
    """Two float16 whose sum is a float32, but for what is too small for the second."""
    high = value.to(tl.float16)
    return high, (value - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _tile(tiles, T: tl.constexpr):
    """Rows and columns of the tile that this program forms."""
    at = tiles + tl.program_id(0) * 2
    r = tl.load(at) * T + tl.arange(0, T)[:, None]
    c = tl.load(at + 1) * T + tl.arange(0, T)[None, :]
    return r.to(tl.int64), c.to(tl.int64)


@triton.jit
def _store(out, value, part, T: tl.constexpr):
    """A tile behind those of the programs before this one, and its second half ``part`` further on."""
    high, low = _halves(value)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    place = out + place * T * T + tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(place, high)
    tl.store(place + part, low)


@triton.jit(do_not_specialize=["draws"])
def projectors(
    left, right, tiles, out, D, draws, part, K: tl.constexpr, P: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """One tile of ``left^T right`` of one draw, as halves: ``left`` may be those of several matrices for each draw."""
    b = tl.program_id(1).to(tl.int64)
    r, c = _tile(tiles, T)
    k = tl.arange(0, P)
    one = tl.load(left + (b * K + k[None, :]) * D + r, mask=(k < K)[None, :] & (r < D), other=0.0)
    two = tl.load(right + (b % draws * K + k[:, None]) * D + c, mask=(k < K)[:, None] & (c < D), other=0.0)
    _store(out, tl.dot(one, two, input_precision="ieee"), part, T)


@triton.jit(do_not_specialize=["groups"])
def moment_tiles(moments, factors, tiles, out, D, groups, part, site_stride, group_stride, T: tl.constexpr):
    """One tile of one float64 moment times its factor, as halves."""
    m = tl.program_id(1)
    r, c = _tile(tiles, T)
    moments += (m // groups).to(tl.int64) * site_stride + (m % groups).to(tl.int64) * group_stride
    value = tl.load(moments + r * D + c, mask=(r < D) & (c < D), other=0.0) * tl.load(factors + m)
    _store(out, value.to(tl.float32), part, T)


@triton.jit(do_not_specialize=["lefts", "rights", "first"])
def long_products(
    left, right, weights, out, lefts, rights, first, left_row, right_row, left_low, right_low,
    L: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Products of some rows with others over one of the pieces that they are long, ``L`` entries, times the weight of
    that piece; written behind what the ``first`` pieces have given.

    Rows are halves, a row of them ``left_row`` or ``right_row`` behind the one before, and the second half of an entry
    ``left_low`` or ``right_low`` behind its first.
    """
    d, m = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    t, k = first + tl.program_id(2).to(tl.int64), tl.arange(0, K)
    # Those beyond the last are read again, and not written.
    own, other = tl.minimum(d, lefts - 1).to(tl.int64) * left_row, tl.minimum(m, rights - 1).to(tl.int64) * right_row
    left += (own + tl.program_id(2) * L)[:, None] + k[None, :]
    right += (other + tl.program_id(2) * L)[None, :] + k[:, None]
    total = tl.zeros((M, N), dtype=tl.float32)
    rest = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, L, W):
        new = tl.zeros((M, N), dtype=tl.float32)
        for step in range(start, start + W, K):
            a, b = tl.load(left + step), tl.load(right + step)
            # In this order two products need not wait for each other.
            rest = tl.dot(a, tl.load(right + right_low + step), rest)
            new = tl.dot(a, b, new)
            rest = tl.dot(tl.load(left + left_low + step), b, rest)
        total += new
    out += (t * lefts + d[:, None]) * rights + m[None, :]
    found = (total + rest) * tl.load(weights + t)
    tl.store(out, found, mask=(d < lefts)[:, None] & (m < rights)[None, :])


@triton.jit(do_not_specialize=["sites", "few", "first"])
def image_forms(
    images, z, sizes, once, twice, D, sites, few, first, K: tl.constexpr, P: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """``Z^T C Z`` and ``Z^T C^2 Z`` of one draw and one of a ``few`` sites, from the images ``C z``, which are too
    large by ``sizes``; of all ``sites`` these are those from the ``first`` on."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    own, draw = images + ((b * K + i) * few + s) * D, z + (b * K + i) * D
    form = tl.zeros((P, P), dtype=tl.float64)
    square = tl.zeros((P, P), dtype=tl.float64)
    for start in range(0, D, C):
        c = start + tl.arange(0, C)[None, :]
        inside = (i < K) & (c < D)
        image = tl.load(own + c, mask=inside, other=0.0)
        drawn = tl.load(draw + c, mask=inside, other=0.0)
        form += tl.dot(image, tl.trans(drawn), input_precision="tf32x3").to(tl.float64)
        square += tl.dot(image, tl.trans(image), input_precision="tf32x3").to(tl.float64)
    size, inside = tl.load(sizes + s), (i < K) & (j < K)
    s = (first + s).to(tl.int64)
    tl.store(once + ((b * K + i) * sites + s) * K + j, form / size, mask=inside)
    tl.store(twice + ((s * tl.num_programs(0) + b) * K + i) * K + j, square / size / size, mask=inside)
