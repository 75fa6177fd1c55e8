"""Kernels that visit each row once: codes that tell copies, rows in half precision, nearest rows within a block.

Written in operations of torch each of these is a dozen passes over all rows in float64. This module needs Triton;
``measures.row_kernels`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 16
"""Rows that one program visits."""
CANDIDATES = 4
"""Nearest rows proposed within a block; their distances are taken by differences in float64."""


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
def _placed(v0, v1, v2, v3, v4, i0, i1, i2, i3, value, index):
    """A bound sorted into the five least, whose places are kept for four of them."""
    lower = value < v0
    v0, value = tl.where(lower, value, v0), tl.where(lower, v0, value)
    i0, index = tl.where(lower, index, i0), tl.where(lower, i0, index)
    lower = value < v1
    v1, value = tl.where(lower, value, v1), tl.where(lower, v1, value)
    i1, index = tl.where(lower, index, i1), tl.where(lower, i1, index)
    lower = value < v2
    v2, value = tl.where(lower, value, v2), tl.where(lower, v2, value)
    i2, index = tl.where(lower, index, i2), tl.where(lower, i2, index)
    lower = value < v3
    v3, value = tl.where(lower, value, v3), tl.where(lower, v3, value)
    i3 = tl.where(lower, index, i3)
    return v0, v1, v2, v3, tl.minimum(v4, value), i0, i1, i2, i3


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
    rows, order, middle, strides, lengths, out, sure, allowance, n, blocks, most, D,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Squared distances to the two nearest rows of the same run, float64, and whether they are certain.

    Run b of a site holds ``length`` rows, from number ``b * stride`` of ``order`` on; both numbers are the site's own.
    Products of float32 rows about ``middle``, a point near the site's, give lower bounds on squared distances;
    ``allowance`` is what rounding may take, relative to the squared lengths. The four least are measured; certain is
    what the fifth does not come near. Of ``most`` places for each run the first ``length`` are written.
    """
    run = tl.program_id(1).to(tl.int64)
    site = run // blocks
    length = tl.load(lengths + site)
    base = rows + site * n * D
    names = order + site * n + (run % blocks) * tl.load(strides + site)
    r = tl.program_id(0) * R + tl.arange(0, R)
    mine = r < length
    here = tl.load(names + r, mask=mine, other=0)
    v0 = tl.full((R,), 3e38, dtype=tl.float32)
    v1, v2, v3, v4 = v0, v0, v0, v0
    i0, i1, i2, i3 = here, here, here, here
    for first in range(0, length, C):
        c = first + tl.arange(0, C)
        theirs = c < length
        there = tl.load(names + c, mask=theirs, other=0)
        total = tl.zeros((R, C), dtype=tl.float32)
        left = tl.zeros((R,), dtype=tl.float32)
        right = tl.zeros((C,), dtype=tl.float32)
        for start in range(0, D, K):
            k = start + tl.arange(0, K)
            shift = tl.load(middle + site * D + k, mask=k < D, other=0.0)
            a = tl.load(base + here[:, None] * D + k[None, :], mask=mine[:, None] & (k < D)[None, :], other=0.0)
            b = tl.load(base + there[:, None] * D + k[None, :], mask=theirs[:, None] & (k < D)[None, :], other=0.0)
            a, b = a - shift[None, :], b - shift[None, :]
            total = tl.dot(a, tl.trans(b), total, input_precision="tf32x3")
            left += tl.sum(a * a, axis=1)
            right += tl.sum(b * b, axis=1)
        bound = (left[:, None] + right[None, :]) * (1 - allowance) - 2 * total
        bound = tl.where(theirs[None, :] & (r[:, None] != c[None, :]), bound, 3e38)
        for _ in range(5):
            value, place = tl.min(bound, axis=1, return_indices=True)
            bound = tl.where(tl.arange(0, C)[None, :] == place[:, None], 3e38, bound)
            index = tl.load(names + first + place, mask=first + place < length, other=0)
            v0, v1, v2, v3, v4, i0, i1, i2, i3 = _placed(v0, v1, v2, v3, v4, i0, i1, i2, i3, value, index)
    d0 = _apart(base, here, i0, D, mine, R, K)
    d1 = _apart(base, here, i1, D, mine, R, K)
    d2 = _apart(base, here, i2, D, mine, R, K)
    d3 = _apart(base, here, i3, D, mine, R, K)
    low, high = tl.minimum(d0, d1), tl.maximum(d0, d1)
    other, last = tl.minimum(d2, d3), tl.maximum(d2, d3)
    least = tl.minimum(low, other)
    # The second is the larger of the two least, or the next of the side that holds the least.
    second = tl.minimum(tl.maximum(low, other), tl.minimum(high, last))
    place = (run * most + r) * 2
    tl.store(out + place, least, mask=mine)
    tl.store(out + place + 1, second, mask=mine)
    tl.store(sure + run * most + r, (v4.to(tl.float64) >= second) | (second <= 0), mask=mine)


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
