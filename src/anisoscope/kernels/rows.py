"""Kernels that visit each row once: codes that tell copies, rows in half precision, nearest rows within a block; and
those of a few rows among all.

Written in operations of torch each of these is a dozen passes over all rows in float64. This module needs Triton;
``measures.row_kernels`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anisoscope.kernels.nearest import far_at_least, measured

ROWS = 16
"""Rows that one program visits."""


@triton.jit
def codes_of_rows(rows, weights, out, total, D, R: tl.constexpr, K: tl.constexpr):
    """The sum of the bits of each row's float32 entries times odd weights, modulo two to the 64; -0.0 counts as 0.0."""
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = at < total
    code = tl.zeros((R,), dtype=tl.int64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        inside = there[:, None] & (k < D)[None, :]
        values = tl.load(rows + at[:, None] * D + k[None, :], mask=inside, other=0.0)
        values = tl.where(values == 0.0, 0.0, values)
        bits = values.to(tl.int32, bitcast=True).to(tl.int64)
        code += tl.sum(bits * tl.load(weights + k, mask=k < D, other=0)[None, :], axis=1)
    tl.store(out + at, code, mask=there)


@triton.jit
def copies_among(rows, codes, order, copy, clash, n, D, R: tl.constexpr, K: tl.constexpr):
    """Rows whose code follows an equal one in ``order``: ``copy`` where they are that row, ``clash`` where not.

    ``codes`` are sorted, ``order`` says whose they are; both of them ``[sites, n]``. Rows with a code of their own are
    not read.
    """
    site = tl.program_id(1).to(tl.int64)
    rows += site * n * D
    at = tl.program_id(0).to(tl.int64) * R + 1 + tl.arange(0, R)
    there = at < n
    place = site * n + at
    same = (tl.load(codes + place, mask=there, other=0) == tl.load(codes + place - 1, mask=there, other=1)) & there
    here = tl.load(order + place, mask=there, other=0)
    before = tl.load(order + place - 1, mask=there, other=0)
    if tl.max(same.to(tl.int32), axis=0) > 0:
        differ = tl.zeros((R,), dtype=tl.int32)
        for start in range(0, D, K):
            k = start + tl.arange(0, K)
            inside = same[:, None] & (k < D)[None, :]
            one = tl.load(rows + here[:, None] * D + k[None, :], mask=inside, other=0.0)
            two = tl.load(rows + before[:, None] * D + k[None, :], mask=inside, other=0.0)
            differ += tl.sum((one != two).to(tl.int32), axis=1)
        tl.store(copy + site * n + here, same & (differ == 0), mask=there & same)
        tl.store(clash + place, same & (differ > 0), mask=there & same)


@triton.jit
def column_sums(
    rows, weights, total, least, most, n, D, share, site_stride, row_stride,
    WEIGHTED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums in float64 of K columns of a share of a site's rows, and the least and the largest of those entries."""
    site = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    k = tl.program_id(0) * K + tl.arange(0, K)
    end = tl.minimum((part + 1) * share, n)
    rows += site * site_stride
    sums = tl.zeros((R, K), dtype=tl.float64)
    low = tl.full((R, K), float("inf"), dtype=tl.float32)
    high = tl.full((R, K), float("-inf"), dtype=tl.float32)
    for first in range(part * share, end, R):
        at = first + tl.arange(0, R)
        inside = (at < end)[:, None] & (k < D)[None, :]
        values = tl.load(rows + at.to(tl.int64)[:, None] * row_stride + k[None, :], mask=inside, other=0.0)
        low = tl.minimum(low, tl.where(inside, values, float("inf")))
        high = tl.maximum(high, tl.where(inside, values, float("-inf")))
        wide = values.to(tl.float64)
        if WEIGHTED:
            wide *= tl.load(weights + site * n + at, mask=at < end, other=0.0).to(tl.float64)[:, None]
        sums += wide
    shares = tl.num_programs(1)
    tl.store(total + (site * shares + part) * D + k, tl.sum(sums, axis=0), mask=k < D)
    place = (site * shares + part) * tl.num_programs(0) + tl.program_id(0)
    tl.store(least + place, tl.min(tl.min(low, axis=0), axis=0))
    tl.store(most + place, tl.max(tl.max(high, axis=0), axis=0))


@triton.jit
def centre_rows(
    rows, mean, about, cell, place, out, squares, lengths, n, D, count, site_stride, row_stride, out_stride,
    PLACED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Rows less the mean, their squared lengths, and the lengths they had before.

    ``PLACED``: each less the mean of its ``cell``, of which a site has ``count``, and written to its ``place``; squared
    lengths are then those of rows less ``about``. These and lengths stand where the rows stood.
    """
    site = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = at < n
    rows += site * site_stride
    out += site * out_stride
    to = at
    own = at
    if PLACED:
        to = tl.load(place + at, mask=there, other=0).to(tl.int64)
        own = site * count + tl.load(cell + at, mask=there, other=0).to(tl.int64)
    square = tl.zeros((R, K), dtype=tl.float64)
    before = tl.zeros((R, K), dtype=tl.float64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        inside = there[:, None] & (k < D)[None, :]
        wide = tl.load(rows + at[:, None] * row_stride + k[None, :], mask=inside, other=0.0).to(tl.float64)
        before += wide * wide
        far = wide - tl.load(about + site * D + k, mask=k < D, other=0.0)[None, :]
        far = tl.where(inside, far, 0.0)
        square += far * far
        if PLACED:
            far = wide - tl.load(mean + own[:, None] * D + k[None, :], mask=inside, other=0.0)
        tl.store(out + to[:, None] * D + k[None, :], far.to(out.dtype.element_ty), mask=inside)
    tl.store(squares + site * n + at, tl.sum(square, axis=1), mask=there)
    tl.store(lengths + site * n + at, tl.sqrt(tl.sum(before, axis=1)), mask=there)


@triton.jit
def row_dots(left, right, out, total, D, R: tl.constexpr, K: tl.constexpr):
    """Products of each row of one table with that of another, summed in float64."""
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = at < total
    sums = tl.zeros((R, K), dtype=tl.float64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        inside = there[:, None] & (k < D)[None, :]
        place = at[:, None] * D + k[None, :]
        one = tl.load(left + place, mask=inside, other=0.0).to(tl.float64)
        sums += one * tl.load(right + place, mask=inside, other=0.0).to(tl.float64)
    tl.store(out + at, tl.sum(sums, axis=1), mask=there)


@triton.jit
def take_rows(rows, order, out, squares, m, D, site_stride, row_stride, R: tl.constexpr, K: tl.constexpr):
    """Row ``order[i]`` of each site at place i of ``m``, and its squared length, summed in float64."""
    site = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = at < m
    own = tl.load(order + at, mask=there, other=0).to(tl.int64)
    sums = tl.zeros((R, K), dtype=tl.float64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        inside = there[:, None] & (k < D)[None, :]
        value = tl.load(rows + site * site_stride + own[:, None] * row_stride + k[None, :], mask=inside, other=0.0)
        tl.store(out + (site * m + at)[:, None] * D + k[None, :], value, mask=inside)
        sums += value.to(tl.float64) * value.to(tl.float64)
    tl.store(squares + site * m + at, tl.sum(sums, axis=1), mask=there)


@triton.jit
def in_half(
    rows, order, mean, factor, half, size, fine, lengths, lost, n, padded, D, W, kept, kept_fine, floor,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Row ``order[i]`` less the mean, times ``factor``, in half precision, filled up to ``W`` columns with zeros, and
    so many rows that there are ``padded``.

    Beside it the squared length of what was rounded, times ``kept`` and ``kept_fine``, far beyond all others where
    there is no row. ``lengths`` are the roots of it, where the row stood; ``lost`` is the length of what rounding took,
    less ``floor``, relative to it.
    """
    site = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = at < n
    own = tl.load(order + at, mask=there, other=0).to(tl.int64)
    times = tl.load(factor + site)
    square = tl.zeros((R,), dtype=tl.float64)
    gone = tl.zeros((R,), dtype=tl.float64)
    for start in range(0, W, K):
        k = start + tl.arange(0, K)
        inside = there[:, None] & (k < D)[None, :]
        wide = tl.load(rows + (site * n + own)[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64)
        wide = (wide - tl.load(mean + site * D + k, mask=k < D, other=0.0)[None, :]) * times
        wide = tl.where(inside, wide, 0.0)
        near = wide.to(tl.float32).to(tl.float16)
        place = (site * padded + at)[:, None] * W + k[None, :]
        tl.store(half + place, near, mask=(at < padded)[:, None] & (k < W)[None, :])
        near = near.to(tl.float64)
        square += tl.sum(near * near, axis=1)
        gone += tl.sum((wide - near) * (wide - near), axis=1)
    tl.store(size + site * padded + at, tl.where(there, square * kept, 7.5e37).to(tl.float32), mask=at < padded)
    tl.store(fine + site * padded + at, tl.where(there, square * kept_fine, 7.5e37).to(tl.float32), mask=at < padded)
    length = tl.sqrt(square)
    tl.store(lengths + site * n + own, length, mask=there)
    # A little more than it is, for roundings in float64.
    share = tl.maximum(tl.sqrt(gone) - floor, 0.0) / tl.where(length > 0, length, 1.0) * 1.000001
    tl.store(lost + site * n + at, share, mask=there)


@triton.jit
def nearest_within(
    half, size, back, order, strides, runs, bounds, rest, n, padded, blocks, most,
    W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The three least bounds of each row with each group of the others of its run, ``[T, most]``, their places in the
    group in the lowest bits, and the least of all others.

    Run b of a site holds ``runs[site]`` rows, from number ``b * stride`` of ``order`` on; of G groups, as few as may be
    of C rows at most, number i belongs to that of i modulo G: rows that follow one another are often alike. Rows in
    half precision, of which row i stands at ``back[i]``, and their shrunken squared lengths give the bounds, as in
    ``nearest``.
    """
    run = tl.program_id(1).to(tl.int64)
    site = run // blocks
    length = tl.load(runs + site)
    if tl.program_id(0) * R < length:
        half += site * padded * W
        size += site * padded
        names = order + site * n + (run % blocks) * tl.load(strides + site)
        r = tl.program_id(0) * R + tl.arange(0, R)
        mine = r < length
        own = tl.load(back + tl.load(names + r, mask=mine, other=0))
        own_size = tl.load(size + own)
        k = tl.arange(0, K)
        out = tl.full((R,), 3e38, dtype=tl.float32)
        groups = tl.cdiv(length, C)
        for group in range(0, groups):
            c = group + groups * tl.arange(0, C)
            theirs = c < length
            other = tl.load(back + tl.load(names + c, mask=theirs, other=0))
            left = half + own[:, None] * W + k[None, :]
            right = half + other[None, :] * W + k[:, None]
            total = tl.zeros((R, C), dtype=tl.float32)
            for _ in range(0, W, K):
                total = tl.dot(tl.load(left), tl.load(right), total)
                left += K
                right += K
            bound = (own_size[:, None] + tl.load(size + other)[None, :]) - 2 * total
            bound = tl.where(theirs[None, :] & (r[:, None] != c[None, :]), bound, 3e38)
            bound = ((bound.to(tl.int32, bitcast=True) & -C) | tl.arange(0, C)[None, :]).to(tl.float32, bitcast=True)
            for turn in tl.static_range(3):
                least = tl.min(bound, axis=1)
                tl.store(bounds + (run * T + 3 * group + turn) * most + r, least, mask=mine)
                bound = tl.where(bound <= least[:, None], 3e38, bound)
            out = tl.minimum(out, tl.min(bound, axis=1))
        tl.store(rest + run * most + r, out, mask=mine)


@triton.jit
def _two_least(rows, names, r, length, D, C: tl.constexpr, K: tl.constexpr):
    """The two least squared distances of number ``r`` of a run to all others of it, by differences in float64."""
    here = tl.load(names + r)
    best = tl.full((C,), float("inf"), dtype=tl.float64)
    after = best
    for first in range(0, length, C):
        c = first + tl.arange(0, C)
        theirs = c < length
        there = tl.load(names + c, mask=theirs, other=0)
        total = tl.zeros((C, K), dtype=tl.float64)
        for start in range(0, D, K):
            k = start + tl.arange(0, K)
            one = tl.load(rows + here * D + k, mask=k < D, other=0.0).to(tl.float64)
            inside = theirs[:, None] & (k < D)[None, :]
            two = tl.load(rows + there[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64)
            gap = tl.where(inside, one[None, :] - two, 0.0)
            total += gap * gap
        apart = tl.where(theirs & (c != r), tl.sum(total, axis=1), float("inf"))
        after = tl.minimum(after, tl.maximum(best, apart))
        best = tl.minimum(best, apart)
    # Of the C least, each with the next of its own column, the two least of all.
    least, place = tl.min(best, axis=0, return_indices=True)
    return least, tl.min(tl.where(tl.arange(0, C) == place, after, best), axis=0)


@triton.jit
def measure_within(
    rows, order, strides, runs, bounds, rest, lengths, worst, factor, out, floor, n, blocks, most, D,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, MEND: tl.constexpr,
):  # fmt: skip
    """Distances to the two nearest rows of the same run, float64, ``most`` for each run: infinite beyond its length.

    Candidates of ``nearest_within``, whose groups are of G rows, are measured, nearest bound first; a row that these
    leave in doubt is measured against all of its run, C rows and MEND columns at a time.
    """
    run = tl.program_id(1).to(tl.int64)
    site = run // blocks
    length = tl.load(runs + site)
    rows += site * n * D
    names = order + site * n + (run % blocks) * tl.load(strides + site)
    r = tl.program_id(0) * R + tl.arange(0, R)
    mine = r < length
    here = tl.load(names + r, mask=mine, other=0)
    slots = tl.arange(0, T)
    place = (run * T + slots)[None, :] * most + r[:, None]
    bound = tl.load(bounds + place, mask=mine[:, None], other=3e38)
    groups = tl.cdiv(length, G)
    real = (bound < 3e37) & (slots < 3 * groups)[None, :]
    number = (slots // 3)[None, :] + groups * (bound.to(tl.int32, bitcast=True) & (G - 1))
    there = tl.load(names + number, mask=real, other=0)
    own = tl.load(lengths + site * n + here)
    left = far_at_least(bound.to(tl.float64), own[:, None], site, worst, factor, floor)
    found, second = measured(rows, here, there, tl.where(real, left, float("inf")), 1.0, D, 2, R, T, K)
    least = tl.min(found, axis=1)
    others = tl.load(rest + run * most + r, mask=mine, other=3e38).to(tl.float64)
    others = far_at_least(others, own, site, worst, factor, floor)
    doubt = (mine & (((others >= second) | (second <= 0)) == 0)).to(tl.int32)
    while tl.max(doubt, axis=0) > 0:
        at = tl.argmax(doubt, axis=0)
        one, two = _two_least(rows, names, tl.program_id(0) * R + at, length, D, C, MEND)
        this = tl.arange(0, R) == at
        least = tl.where(this, one, least)
        second = tl.where(this, two, second)
        doubt = tl.where(this, 0, doubt)
    tl.store(out + (run * most + r) * 2, tl.sqrt(tl.where(mine, least, float("inf"))), mask=r < most)
    tl.store(out + (run * most + r) * 2 + 1, tl.sqrt(tl.where(mine, second, float("inf"))), mask=r < most)


@triton.jit(do_not_specialize=["n", "many", "share"])
def nearest_again(
    rows, places, own, left_out, least, where, n, D, many, share,
    MASKED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The two least squared distances of some rows of each site to a share of its other rows, by differences in
    float64, and whose they are: ``[., many, shares, 2]``.

    Of ``rows`` those of site ``places[i]`` are taken, of them the rows ``own[i]``, as far as those are not negative;
    rows that are ``left_out`` are nobody's neighbours. What is not finite counts as minus infinity, so that it stays
    in sight. Nothing is written where a program has no row to look at.
    """
    at = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    r = tl.program_id(0) * R + tl.arange(0, R)
    here = tl.load(own + at * many + r, mask=r < many, other=-1)
    if tl.max(here, axis=0) >= 0:
        site = tl.load(places + at)
        base = rows + site * n * D
        end = tl.minimum((part + 1) * share, n)
        k = tl.arange(0, K)[None, None, :]
        near = tl.full((R,), float("inf"), dtype=tl.float64)
        far = near
        near_at = tl.zeros((R,), dtype=tl.int32)
        far_at = near_at
        for first in range(part * share, end, C):
            c = first + tl.arange(0, C)
            theirs = c < end
            left = base + tl.maximum(here, 0)[:, None, None] * D + k
            right = base + c.to(tl.int64)[None, :, None] * D + k
            total = tl.zeros((R, C, K), dtype=tl.float64)
            for start in range(0, D, K):
                inside = k < D - start
                one = tl.load(left + start, mask=inside, other=0.0).to(tl.float64)
                two = tl.load(right + start, mask=inside & theirs[None, :, None], other=0.0).to(tl.float64)
                total += (one - two) * (one - two)
            apart = tl.sum(total, axis=2)
            free = theirs
            if MASKED:
                free = theirs & (tl.load(left_out + site * n + c, mask=theirs, other=1) == 0)
            new = tl.where(free[None, :] & (c[None, :] != here[:, None]), apart, float("inf"))
            new = tl.where(theirs[None, :] & ((apart < float("inf")) == 0), float("-inf"), new)
            for _ in tl.static_range(2):
                value, slot = tl.min(new, axis=1, return_indices=True)
                far_at = tl.where(value < near, near_at, tl.where(value < far, first + slot, far_at))
                far = tl.minimum(far, tl.maximum(near, value))
                near_at = tl.where(value < near, first + slot, near_at)
                near = tl.minimum(near, value)
                new = tl.where(tl.arange(0, C)[None, :] == slot[:, None], float("inf"), new)
        place = ((at * many + r) * tl.num_programs(1) + part) * 2
        tl.store(least + place, near, mask=here >= 0)
        tl.store(least + place + 1, far, mask=here >= 0)
        tl.store(where + place, near_at, mask=here >= 0)
        tl.store(where + place + 1, far_at, mask=here >= 0)


@triton.jit(do_not_specialize=["n", "many", "count"])
def merge_again(least, where, own, distances, indices, settled, n, many, count, P: tl.constexpr):
    """The two least of all shares, ``count`` numbers for each row, written to where the row stands among all rows of
    its site; certain where there are two and all is finite."""
    at = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0)
    here = tl.load(own + at * many + r)
    if here >= 0:
        p = tl.arange(0, P)
        place = (at * many + r) * count + p
        values = tl.load(least + place, mask=p < count, other=float("inf"))
        names = tl.load(where + place, mask=p < count, other=0)
        lowest = tl.min(values, axis=0)
        out = at * n + here
        for turn in tl.static_range(2):
            value, slot = tl.min(values, axis=0, return_indices=True)
            value = tl.where(lowest >= 0, tl.sqrt(tl.maximum(value, 0.0)), float("nan"))
            tl.store(distances + out * 2 + turn, value)
            tl.store(indices + out * 2 + turn, tl.sum(tl.where(p == slot, names, 0), axis=0).to(tl.int64))
            values = tl.where(p == slot, float("inf"), values)
        tl.store(settled + out, value < float("inf"))
