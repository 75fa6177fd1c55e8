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
TILE_ROWS: tl.constexpr = tl.constexpr(TILE)
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
def rows_in_doubt(settled, own, count, n, many, B: tl.constexpr):
    """The first ``many`` rows of each site that are not ``settled``, in their order, and how many these are."""
    site = tl.program_id(0).to(tl.int64)
    total = 0
    for first in range(0, n, B):
        at = first + tl.arange(0, B)
        doubt = (tl.load(settled + site * n + at, mask=at < n, other=1) == 0).to(tl.int32)
        place = total + tl.cumsum(doubt, axis=0) - 1
        tl.store(own + site * many + place, at, mask=(doubt > 0) & (place < many))
        total += tl.sum(doubt, axis=0)
    tl.store(count + site, tl.minimum(total, many))


@triton.jit
def nearest_of_rows(
    rows, size, back, own, count, values, places, rest, padded, many, share,
    D: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The ``T`` least bounds of the first ``count`` rows of ``own`` with each ``share`` of all rows, and where:
    ``[shares, T, many]`` for each site, row i standing at ``back[i]``.

    ``rest`` becomes the least of all others of a share. Products are summed SUM columns at a time, which rounds less.
    Nothing is written where a program has no row to look at.
    """
    site = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    r = tl.program_id(0) * R + tl.arange(0, R)
    number = tl.load(count + site)
    if tl.program_id(0) * R < number:
        rows += site * padded * D
        size += site * padded
        mine = tl.load(back + tl.load(own + site * many + r, mask=r < number, other=0))
        own_size = tl.load(size + mine)
        k = tl.arange(0, K)
        held = tl.full((T, R), 3e38, dtype=tl.float32)
        where = tl.zeros((T, R), dtype=tl.int32)
        out = tl.full((R,), 3e38, dtype=tl.float32)
        for first in range(part * share, tl.minimum((part + 1) * share, padded), C):
            c = first + tl.arange(0, C)
            left = rows + c.to(tl.int64)[:, None] * D + k[None, :]
            right = rows + mine[None, :] * D + k[:, None]
            whole = tl.zeros((C, R), dtype=tl.float32)
            for start in range(0, D, SUM):
                total = tl.zeros((C, R), dtype=tl.float32)
                for _ in range(start, tl.minimum(start + SUM, D), K):
                    total = tl.dot(tl.load(left), tl.load(right), total)
                    left += K
                    right += K
                whole += total
            bound = (tl.load(size + c)[:, None] + own_size[None, :]) - 2 * whole
            bound = tl.where(mine[None, :] == c[:, None], 3e38, bound)
            held, where, out = sorted_in(held, where, out, bound, first, T, C)
        list_at = site * tl.num_programs(1) + part
        place = (list_at * T + tl.arange(0, T))[:, None] * many + r[None, :]
        tl.store(values + place, held, mask=(r < number)[None, :])
        tl.store(places + place, where, mask=(r < number)[None, :])
        tl.store(rest + list_at * many + r, out, mask=r < number)


@triton.jit
def far_at_least(bound, length, site, worst, factor, floor):
    """The least squared distance of two rows, in the units of ``Ready``'s rows (times ``scale`` squared), where that of
    their rounded values, times ``factor`` squared, is at least ``bound``, and one of them has that rounded ``length``:
    see ``neighbors_fused``."""
    share = tl.load(worst + site)
    # Bounds may be a little too large where places stand in their lowest bits.
    near = tl.sqrt(tl.maximum(bound - tl.abs(bound) * 3.0517578125e-05, 0.0))
    near = tl.maximum(near * (1 - share) - 2 * (floor + share * length), 0.0) / tl.load(factor + site)
    return near * near


@triton.jit
def measured(rows, here, there, left, scale, D, k, R: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """``|rows[here] - rows[there]|^2`` by differences in float64, times ``scale`` squared, and the k-th least of them.

    ``there`` is ``[R, T]``, as is ``left``, which distances are at least; nearest first they are measured, as long as
    they may be among the k least. Others stay infinite.
    """
    slots = tl.arange(0, T)
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
    return found, limit


@triton.jit
def measure_nearest(
    rows, order, own, count, bounds, places, rest, lengths, worst, factor, distances, indices, settled,
    scale, floor, n, wide, D, k,
    LISTED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The k nearest of each row among its candidates, by differences in float64, and whether they are certain.

    Candidates have ``bounds`` and stand at ``places`` of the shuffled ``order``, ``[T, wide]``; no other row has a
    bound below ``rest``, ``[S, wide]``. Their rows are those in ``order``, places being groups and the rest of them
    in the lowest bits of bounds; or where they are ``LISTED`` the first ``count`` rows of ``own``.
    """
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    site = tl.program_id(1).to(tl.int64)
    if LISTED:
        asked = at < tl.load(count + site)
        here = tl.load(own + site * wide + at, mask=asked, other=0).to(tl.int64)
    else:
        asked = at < n
        here = tl.load(order + at, mask=asked, other=0)
    slots = tl.arange(0, T)
    place = (site * T + slots)[None, :] * wide + at[:, None]
    bound = tl.load(bounds + place, mask=asked[:, None], other=3e38)
    there = tl.load(places + place, mask=asked[:, None], other=0)
    if not LISTED:
        there = there * TILE_ROWS + (bound.to(tl.int32, bitcast=True) & (TILE_ROWS - 1))
    real = (bound < 3e37) & (there < n)
    there = tl.load(order + tl.where(real, there, 0))
    length = tl.load(lengths + site * n + here)
    left = far_at_least(bound.to(tl.float64), length[:, None], site, worst, factor, floor)
    left = tl.where(real, left, float("inf"))
    found, limit = measured(rows + site * n * D, here, there, left, scale, D, k, R, T, K)
    others = (site * S + tl.arange(0, S))[None, :] * wide + at[:, None]
    others = tl.min(tl.load(rest + others, mask=asked[:, None], other=3e38), axis=1).to(tl.float64)
    others = far_at_least(others, length, site, worst, factor, floor)
    tl.store(settled + site * n + here, (others >= limit) | (limit <= 0), mask=asked)
    for turn in range(k):
        value, slot = tl.min(found, axis=1, return_indices=True)
        now = slots[None, :] == slot[:, None]
        to = (site * n + here) * k + turn
        tl.store(distances + to, tl.sqrt(value) / scale, mask=asked)
        tl.store(indices + to, tl.sum(tl.where(now, there, 0), axis=1), mask=asked)
        found = tl.where(now, float("inf"), found)
