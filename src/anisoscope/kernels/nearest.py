"""Kernels of the nearest-neighbour search: bounds of all pairs, the two least of each group of rows, and what follows.

The matrix of pairs never reaches memory. Each pair of rows is multiplied once, in half precision, and serves both
sides: a tile of bounds gives each of its rows the two least among its columns, and each of its columns the two least
among its rows. The place of a bound within its group stands in its lowest bits, which moves it by ``PACKED`` at most.

This module needs Triton; ``measures.neighbors_fused`` imports it where Triton is, and says what the bounds mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 128
"""Rows and columns of a tile. A row sees its columns as one group, a column its rows; both are numbered alike."""
PACKED = 2.0**-15
"""How far a stored bound may be from the bound, relative."""
FAR = 3e38
"""Stands for "no row here": packing would make NaN of an infinity."""


@triton.jit
def two_least_of_tiles(
    rows, size, tiles, row_least, row_next, column_least, column_next, padded, n, groups, first_group, columns,
    D: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Bounds ``size_i + size_j - 2 rows_i . rows_j`` of the pairs i < j of one tile; the two least of each side.

    Of each site, ``row_least`` is ``[groups, n]`` for groups of columns from ``first_group`` on, and ``column_least``
    is ``[., columns]`` for all groups of rows, with the columns from the first of ``first_group`` on.
    """
    at = tl.program_id(0).to(tl.int64)
    site = tl.program_id(1).to(tl.int64)
    rows += site * padded * D
    size += site * padded
    row_least += site * groups * n
    row_next += site * groups * n
    column_least += site * (n // B) * columns
    column_next += site * (n // B) * columns
    i = tl.load(tiles + 2 * at).to(tl.int64)
    j = tl.load(tiles + 2 * at + 1).to(tl.int64)
    r = i * B + tl.arange(0, B)
    c = j * B + tl.arange(0, B)
    k = tl.arange(0, K)
    left = rows + r[:, None] * D + k[None, :]
    right = rows + c[None, :] * D + k[:, None]
    total = tl.zeros((B, B), dtype=tl.float32)
    for _ in range(0, D, K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += K
        right += K
    bound = (tl.load(size + r)[:, None] + tl.load(size + c)[None, :]) - 2 * total
    if i == j:  # on the diagonal each pair would stand twice
        bound = tl.where(r[:, None] < c[None, :], bound, 3e38)
    bits = bound.to(tl.int32, bitcast=True) & -128
    own = (bits | tl.arange(0, B)[None, :]).to(tl.float32, bitcast=True)
    least = tl.min(own, axis=1)
    after = tl.min(tl.where(own == least[:, None], 3e38, own), axis=1)
    place = (j - first_group) * n + r
    tl.store(row_least + place, least)
    tl.store(row_next + place, after)
    own = (bits | tl.arange(0, B)[:, None]).to(tl.float32, bitcast=True)
    least = tl.min(own, axis=0)
    after = tl.min(tl.where(own == least[None, :], 3e38, own), axis=0)
    place = i * columns + c - first_group * B
    tl.store(column_least + place, least)
    tl.store(column_next + place, after)


@triton.jit
def _sorted_in(held, where, rest, new, first, T: tl.constexpr, P: tl.constexpr):
    """``new`` bounds, of groups from ``first`` on, sorted into the ``T`` least; what has no place goes to rest."""
    slots = tl.arange(0, T)[:, None]
    places = tl.arange(0, P)[:, None]
    top = tl.max(held, axis=0)
    least = tl.min(new, axis=0)
    while tl.max((least < top).to(tl.int32), axis=0) > 0:
        place = tl.argmin(new, axis=0)
        slot = tl.argmax(held, axis=0)
        better = (least < top)[None, :]
        rest = tl.where(least < top, tl.minimum(rest, top), rest)
        hit = (slots == slot[None, :]) & better
        held = tl.where(hit, least[None, :], held)
        where = tl.where(hit, (first + place)[None, :], where)
        new = tl.where((places == place[None, :]) & better, 3e38, new)
        top = tl.max(held, axis=0)
        least = tl.min(new, axis=0)
    return held, where, tl.minimum(rest, least)


@triton.jit
def keep_least(
    values, groups, rest, least, after, padded, first_row, stride, offset, count,
    AHEAD: tl.constexpr, SHARE: tl.constexpr, T: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sort the bounds of groups into the ``T`` least of each row: ``values`` and ``groups`` are ``[T, padded]``.

    ``rest[row]`` becomes the least bound of any pair that is not among them: an evicted bound, or the second of a
    group, beyond which there may be a third. ``least`` and ``after`` are ``[count, stride]``: groups from ``offset``
    on, rows from ``first_row`` on. Rows of group b (of ``SHARE`` rows) have seen groups from number b on as columns
    (``AHEAD``), and up to b as rows: the
    others were never written.
    """
    site = tl.program_id(1).to(tl.int64)
    values += site * T * padded
    groups += site * T * padded
    rest += site * padded
    least += site * count * stride
    after += site * count * stride
    rows = first_row + tl.program_id(0) * B + tl.arange(0, B)
    slots = tl.arange(0, T)[:, None]
    held = tl.load(values + slots * padded + rows[None, :])
    where = tl.load(groups + slots * padded + rows[None, :])
    out = tl.load(rest + rows)
    block = (first_row + tl.program_id(0) * B) // SHARE
    if AHEAD:
        begin = tl.maximum(block, offset)
        end = offset + count
    else:
        begin = offset
        end = tl.minimum(offset + count, block + 1)
    for group in range(begin, end, P):
        these = group + tl.arange(0, P)
        at = (these - offset).to(tl.int64)[:, None] * stride + (rows - first_row)[None, :]
        known = (these < end)[:, None]
        new = tl.load(least + at, mask=known, other=3e38)
        held, where, out = _sorted_in(held, where, out, new, group, T, P)
        new = tl.load(after + at, mask=known, other=3e38)
        out = tl.minimum(out, tl.min(new, axis=0))
        held, where, out = _sorted_in(held, where, out, new, group, T, P)
    tl.store(values + slots * padded + rows[None, :], held)
    tl.store(groups + slots * padded + rows[None, :], where)
    tl.store(rest + rows, out)


@triton.jit
def squared_distances(
    rows, own, other, out, scale, n, D, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``|rows[own] - rows[other]|^2`` by differences in float64, times ``scale`` squared; ``other`` is ``[n, T]``."""
    at = tl.program_id(0).to(tl.int64)
    site = tl.program_id(1).to(tl.int64)
    rows += site * n * D
    slots = (site * n + at) * T + tl.arange(0, T)
    here = tl.load(own + at)
    there = tl.load(other + slots)
    total = tl.zeros((T,), dtype=tl.float64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        a = tl.load(rows + here * D + k, mask=k < D, other=0.0).to(tl.float64)
        b = tl.load(rows + there[:, None] * D + k[None, :], mask=(k < D)[None, :], other=0.0).to(tl.float64)
        gap = (b - a[None, :]) * scale
        total += tl.sum(gap * gap, axis=1)
    tl.store(out + slots, total)
