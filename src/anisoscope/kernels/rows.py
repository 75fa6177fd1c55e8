"""Kernels that visit each row once: codes that tell copies, rows in half precision, nearest rows within a block; and
those of a few rows among all.

Written in operations of torch each of these is a dozen passes over all rows in float64. This module needs Triton;
``measures.row_kernels`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anisoscope.kernels.nearest import sorted_in

ROWS = 16
"""Rows that one program visits."""
CANDIDATES = 8
"""Nearest rows proposed within a run; their distances are taken by differences in float64."""


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
def in_half(rows, order, mean, factor, half, squares, lost, n, padded, D, W, R: tl.constexpr, K: tl.constexpr):
    """Row ``order[i]`` less the mean, times ``factor``, in half precision, filled up to ``W`` columns with zeros.

    Beside it its squared length before rounding, and the length of what rounding took, relative to its own.
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
        tl.store(half + (site * padded + at)[:, None] * W + k[None, :], near, mask=there[:, None] & (k < W)[None, :])
        left = wide - near.to(tl.float64)
        square += tl.sum(wide * wide, axis=1)
        gone += tl.sum(left * left, axis=1)
    tl.store(squares + site * padded + at, square, mask=there)
    ratio = tl.sqrt(gone / tl.where(square > 0, square, 1.0))
    tl.store(lost + site * n + at, ratio, mask=there)


@triton.jit
def _apart(rows, here, there, D, mine, R: tl.constexpr, K: tl.constexpr):
    """Squared distances by differences in float64."""
    total = tl.zeros((R,), dtype=tl.float64)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        inside = mine[:, None] & (k < D)[None, :]
        one = tl.load(rows + here[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64)
        two = tl.load(rows + there[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64)
        total += tl.sum((one - two) * (one - two), axis=1)
    return total


@triton.jit
def nearest_within(
    rows, half, size, back, factor, order, strides, lengths, out, sure, n, padded, blocks, most, D,
    W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Squared distances to the two nearest rows of the same run, float64, and whether they are certain.

    Run b of a site holds ``length`` rows, from number ``b * stride`` of ``order`` on; both numbers are the site's own.
    Rows in half precision, of which row i stands at ``back[i]``, and their shrunken squared lengths give lower bounds
    on squared distances times ``factor`` squared, as in ``nearest``. The ``T`` least are measured, nearest bound first,
    as long as they may be among the two; certain is what everything else does not come near. Of ``most`` places for
    each run the first ``length`` are written.
    """
    run = tl.program_id(1).to(tl.int64)
    site = run // blocks
    length = tl.load(lengths + site)
    base = rows + site * n * D
    half += site * padded * W
    size += site * padded
    names = order + site * n + (run % blocks) * tl.load(strides + site)
    r = tl.program_id(0) * R + tl.arange(0, R)
    mine = r < length
    here = tl.load(names + r, mask=mine, other=0)
    own = tl.load(back + here)
    own_size = tl.load(size + own)
    k = tl.arange(0, K)
    held = tl.full((T, R), 3e38, dtype=tl.float32)
    where = tl.zeros((T, R), dtype=tl.int32)
    rest = tl.full((R,), 3e38, dtype=tl.float32)
    for first in range(0, length, C):
        c = first + tl.arange(0, C)
        theirs = c < length
        other = tl.load(back + tl.load(names + c, mask=theirs, other=0))
        left = half + other[:, None] * W + k[None, :]
        right = half + own[None, :] * W + k[:, None]
        total = tl.zeros((C, R), dtype=tl.float32)
        for _ in range(0, W, K):
            total = tl.dot(tl.load(left), tl.load(right), total)
            left += K
            right += K
        bound = (tl.load(size + other)[:, None] + own_size[None, :]) - 2 * total
        bound = tl.where(theirs[:, None] & (r[None, :] != c[:, None]), bound, 3e38)
        held, where, rest = sorted_in(held, where, rest, bound, first, T, C)
    unit = tl.load(factor + site)
    unit = unit * unit
    slots = tl.arange(0, T)[:, None]
    waiting = tl.where(held < 3e37, held.to(tl.float64) / unit, float("inf"))
    least = tl.full((R,), float("inf"), dtype=tl.float64)
    second = least
    for _ in range(T):
        value, slot = tl.min(waiting, axis=0, return_indices=True)
        near = mine & (value < float("inf")) & (value <= second)
        now = slots == slot[None, :]
        there = tl.load(names + tl.sum(tl.where(now, where, 0), axis=0), mask=near, other=0)
        apart = tl.where(near, _apart(base, here, there, D, near, R, K), float("inf"))
        second = tl.minimum(second, tl.maximum(least, apart))
        least = tl.minimum(least, apart)
        waiting = tl.where(now, float("inf"), waiting)
    place = (run * most + r) * 2
    tl.store(out + place, least, mask=mine)
    tl.store(out + place + 1, second, mask=mine)
    tl.store(sure + run * most + r, (rest.to(tl.float64) / unit >= second) | (second <= 0), mask=mine)


@triton.jit
def mend_within(
    rows, order, strides, lengths, out, sure, n, blocks, most, D, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The same by differences in float64 with all rows of the run, where ``nearest_within`` was not certain."""
    run = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0)
    site = run // blocks
    length = tl.load(lengths + site)
    if (r < length) & (tl.load(sure + run * most + r) == 0):
        base = rows + site * n * D
        names = order + site * n + (run % blocks) * tl.load(strides + site)
        here = tl.load(names + r)
        best = tl.full((C,), float("inf"), dtype=tl.float64)
        after = best
        for first in range(0, length, C):
            c = first + tl.arange(0, C)
            theirs = c < length
            there = tl.load(names + c, mask=theirs, other=0)
            total = tl.zeros((C,), dtype=tl.float64)
            for start in range(0, D, K):
                k = start + tl.arange(0, K)
                one = tl.load(base + here * D + k, mask=k < D, other=0.0).to(tl.float64)
                inside = theirs[:, None] & (k < D)[None, :]
                two = tl.load(base + there[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64)
                gap = tl.where(inside, one[None, :] - two, 0.0)
                total += tl.sum(gap * gap, axis=1)
            total = tl.where(theirs & (c != r), total, float("inf"))
            after = tl.minimum(after, tl.maximum(best, total))
            best = tl.minimum(best, total)
        # Of the C least, each with the next of its own column, the two least of all.
        least, place = tl.min(best, axis=0, return_indices=True)
        rest = tl.where(tl.arange(0, C) == place, after, best)
        at = (run * most + r) * 2
        tl.store(out + at, least)
        tl.store(out + at + 1, tl.min(rest, axis=0))


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
