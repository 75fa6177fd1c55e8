"""Kernels of the nearest-neighbour search: bounds of all pairs, the three least of each group, and what follows.

The matrix of pairs never reaches memory. Each pair of rows is multiplied once, in half precision, and serves both
sides: a tile of bounds gives each of its rows the three least among its columns, and each of its columns the three
least among its rows. The place of a bound within its group stands in its lowest bits, which moves it by ``PACKED`` at
most.

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
def three_least_of_tiles(
    rows, size, tiles, row_least, row_next, row_third, column_least, column_next, column_third,
    padded, n, groups, first_group, columns, D: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Bounds ``size_i + size_j - 2 rows_i . rows_j`` of the pairs i < j of one tile; the three least of each side.

    Of each site, ``row_least`` is ``[groups, n]`` for groups of columns from ``first_group`` on, and ``column_least``
    is ``[., columns]`` for all groups of rows, with the columns from the first of ``first_group`` on.
    """
    at = tl.program_id(0).to(tl.int64)
    site = tl.program_id(1).to(tl.int64)
    rows += site * padded * D
    size += site * padded
    row_least += site * groups * n
    row_next += site * groups * n
    row_third += site * groups * n
    column_least += site * (n // B) * columns
    column_next += site * (n // B) * columns
    column_third += site * (n // B) * columns
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
    tl.store(row_third + place, tl.min(tl.where(own <= after[:, None], 3e38, own), axis=1))
    own = (bits | tl.arange(0, B)[:, None]).to(tl.float32, bitcast=True)
    least = tl.min(own, axis=0)
    after = tl.min(tl.where(own == least[None, :], 3e38, own), axis=0)
    place = i * columns + c - first_group * B
    tl.store(column_least + place, least)
    tl.store(column_next + place, after)
    tl.store(column_third + place, tl.min(tl.where(own <= after[None, :], 3e38, own), axis=0))


@triton.jit
def sorted_in(held, where, rest, new, first, T: tl.constexpr, P: tl.constexpr):
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
    values, groups, rest, least, after, third, padded, first_row, stride, offset, count,
    AHEAD: tl.constexpr, SHARE: tl.constexpr, T: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sort the bounds of groups into the ``T`` least of each row: ``values`` and ``groups`` are ``[T, padded]``.

    ``rest[row]`` becomes the least bound of any pair that is not among them: an evicted bound, or the third of a
    group, beyond which there may be a fourth. ``least``, ``after`` and ``third`` are ``[count, stride]``: groups from
    ``offset`` on, rows from ``first_row`` on. Rows of group b (of ``SHARE`` rows) have seen groups from number b on as
    columns (``AHEAD``), and up to b as rows: the others were never written.
    """
    site = tl.program_id(1).to(tl.int64)
    values += site * T * padded
    groups += site * T * padded
    rest += site * padded
    least += site * count * stride
    after += site * count * stride
    third += site * count * stride
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
        held, where, out = sorted_in(held, where, out, new, group, T, P)
        new = tl.load(after + at, mask=known, other=3e38)
        held, where, out = sorted_in(held, where, out, new, group, T, P)
        new = tl.load(third + at, mask=known, other=3e38)
        out = tl.minimum(out, tl.min(new, axis=0))
    tl.store(values + slots * padded + rows[None, :], held)
    tl.store(groups + slots * padded + rows[None, :], where)
    tl.store(rest + rows, out)


@triton.jit
def nearest_of_rows(
    rows, size, which, wanted, values, places, rest, padded, many,
    D: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The ``T`` least bounds of some rows of each site, ``which``, with all of them, ``[many, T]``, and where.

    ``rest`` becomes the least of all others. Products are summed SUM columns at a time, which rounds less. Nothing is
    written where none of a program's rows is ``wanted``.
    """
    site = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * R + tl.arange(0, R)
    asked = tl.load(wanted + site * many + r, mask=r < many, other=0) != 0
    if tl.max(asked.to(tl.int32), axis=0) > 0:
        rows += site * padded * D
        size += site * padded
        own = tl.load(which + site * many + r, mask=r < many, other=0)
        own_size = tl.load(size + own)
        k = tl.arange(0, K)
        held = tl.full((T, R), 3e38, dtype=tl.float32)
        where = tl.zeros((T, R), dtype=tl.int32)
        out = tl.full((R,), 3e38, dtype=tl.float32)
        for first in range(0, padded, C):
            c = first + tl.arange(0, C)
            left = rows + c.to(tl.int64)[:, None] * D + k[None, :]
            right = rows + own[None, :] * D + k[:, None]
            whole = tl.zeros((C, R), dtype=tl.float32)
            for start in range(0, D, SUM):
                total = tl.zeros((C, R), dtype=tl.float32)
                for _ in range(start, tl.minimum(start + SUM, D), K):
                    total = tl.dot(tl.load(left), tl.load(right), total)
                    left += K
                    right += K
                whole += total
            bound = (tl.load(size + c)[:, None] + own_size[None, :]) - 2 * whole
            bound = tl.where(own[None, :] == c[:, None], 3e38, bound)
            held, where, out = sorted_in(held, where, out, bound, first, T, C)
        place = (site * many + r)[None, :] * T + tl.arange(0, T)[:, None]
        tl.store(values + place, held, mask=(r < many)[None, :])
        tl.store(places + place, where, mask=(r < many)[None, :])
        tl.store(rest + site * many + r, out, mask=r < many)


@triton.jit
def measure_nearest(
    rows, own, other, bounds, wanted, factor, out, scale, n, many, own_stride, D, k,
    R: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``|rows[own] - rows[other]|^2`` by differences in float64, times ``scale`` squared, in the order of ``bounds``.

    ``other`` and ``bounds`` are ``[many, T]``; bounds are those of distances times ``factor``, squared. What a bound
    says to be farther than the k-th of those measured so far is not measured: it stays infinite, as do all distances
    of a row that is not ``wanted``.
    """
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    site = tl.program_id(1).to(tl.int64)
    rows += site * n * D
    mine = at < many
    slots = tl.arange(0, T)
    place = (site * many + at)[:, None] * T + slots[None, :]
    here = tl.load(own + site * own_stride + at, mask=mine, other=0)
    asked = tl.load(wanted + site * many + at, mask=mine, other=0) != 0
    there = tl.load(other + place, mask=mine[:, None], other=0)
    bound = tl.load(bounds + place, mask=mine[:, None], other=3e38).to(tl.float64)
    unit = tl.load(factor + site)
    # Bounds may be a little too large where places stand in their lowest bits.
    left = (bound - tl.abs(bound) * 3.0517578125e-05) / (unit * unit)
    left = tl.where((bound < 3e37) & asked[:, None], left, float("inf"))
    found = tl.full((R, T), float("inf"), dtype=tl.float64)
    # The k least so far, in any order: the largest of them gives way.
    kept = tl.where((slots < k)[None, :], found, float("-inf"))
    limit, worst = tl.max(kept, axis=1, return_indices=True)
    least, slot = tl.min(left, axis=1, return_indices=True)
    going = (least < float("inf")) & (least <= limit)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        now = (slots[None, :] == slot[:, None]) & going[:, None]
        that = tl.sum(tl.where(now, there, 0), axis=1)
        total = tl.zeros((R, K), dtype=tl.float64)
        for start in range(0, D, K):
            c = start + tl.arange(0, K)
            inside = going[:, None] & (c < D)[None, :]
            one = tl.load(rows + here[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float64)
            two = tl.load(rows + that[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float64)
            gap = (two - one) * scale
            total += gap * gap
        apart = tl.sum(total, axis=1)
        found = tl.where(now, apart[:, None], found)
        left = tl.where(now, float("inf"), left)
        nearer = going & (apart < limit)
        kept = tl.where((slots[None, :] == worst[:, None]) & nearer[:, None], apart[:, None], kept)
        limit, worst = tl.max(kept, axis=1, return_indices=True)
        least, slot = tl.min(left, axis=1, return_indices=True)
        going = (least < float("inf")) & (least <= limit)
    tl.store(out + place, found, mask=mine[:, None])
