"""Kernels of many small matrices and blocks at once, where a library takes several steps for each or many for all.

This module needs Triton; ``measures.leading`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_factors(gram, out, good, least, K: tl.constexpr, P: tl.constexpr):
    """The inverse of the lower triangular factor of each symmetric positive float64 matrix, by elimination on both the
    matrix and the identity. Not good: a pivot below ``least`` of its entry, as where columns depend on one another, is
    taken for that; what is not finite becomes the identity."""
    at = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (rows < K) & (columns < K)
    places = at * K * K + rows * K + columns
    eye = tl.where(rows == columns, 1.0, 0.0).to(tl.float64)
    a = tl.where(inside, tl.load(gram + places, mask=inside, other=0.0), eye)
    left = eye
    own = tl.sum(tl.where(rows == columns, a, 0.0), axis=0)
    pivots = tl.full((P,), 1.0, tl.float64)
    clear = tl.where(tl.arange(0, P) < K, 0, 1)
    for k in range(K):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        turned = tl.sum(tl.where(rows == k, left, 0.0), axis=0)
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(tl.arange(0, P) == k, row, 0.0), axis=0)
        limit = least * tl.sum(tl.where(tl.arange(0, P) == k, own, 0.0), axis=0)
        clear = tl.where(tl.arange(0, P) == k, tl.where(pivot > limit, 1, 0), clear)
        safe = tl.maximum(pivot, limit)
        safe = tl.where(safe > 0, safe, 1.0)
        pivots = tl.where(tl.arange(0, P) == k, safe, pivots)
        share = tl.where(tl.arange(0, P) > k, column / safe, 0.0)[:, None]
        a -= share * row[None, :]
        left -= share * turned[None, :]
    left *= (1 / tl.sqrt(pivots))[:, None]
    size = tl.sum(tl.sum(tl.abs(left), axis=1), axis=0)
    finite = size < float("inf")
    tl.store(out + places, tl.where(finite, left, eye), mask=inside)
    tl.store(good + at, tl.where(finite, tl.min(clear, axis=0), 0) > 0)


@triton.jit(do_not_specialize=["low", "most", "edge", "warm"])
def plan_filter(
    values, residuals, locked, weights, half, degree, nears, lock_at, near_at, growth, low, most, edge, warm,
    K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What a Chebyshev filter of each block does with K Ritz values, largest first: which of them are ``locked``, by
    how much those are taken down, half of the edge, the degree, ``most`` at most, and whether the block was near.

    Locked: a residual up to ``lock_at`` of the value, and a value above ``low`` times the edge. The edge is the last
    value, or the one at ``edge`` where none of the first ``warm`` has a residual above ``near_at`` of it. ``growth`` is
    the logarithm of the most that one column may grow against another, doubled.
    """
    at = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)
    there = p < K
    value = tl.load(values + at * K + p, mask=there, other=0.0)
    left = tl.load(residuals + at * K + p, mask=there, other=1.0)
    near = tl.min(tl.where((p < warm) & ((left <= near_at * value) == 0), 0, 1), axis=0) > 0
    lowest = tl.maximum(tl.load(values + at * K + tl.where(near, edge, K - 1)), 1e-300)
    lock = (left <= lock_at * value) & (value > low * lowest) & there
    top = tl.max(tl.where(lock, lowest, value), axis=0)
    ratio = tl.maximum(2 * top / lowest - 1, 1.0)  # of a flat spectrum: any degree
    steps = tl.floor(growth / tl.log(ratio + tl.sqrt(ratio * ratio - 1)))
    tl.store(locked + at * K + p, lock, mask=there)
    tl.store(weights + at * K + p, tl.where(lock, value - lowest, 0.0), mask=there)
    tl.store(half + at, lowest / 2)
    tl.store(nears + at, near)
    tl.store(degree + at, tl.minimum(tl.maximum(steps, 1.0), most))


@triton.jit(do_not_specialize=["rank"])
def settle(
    values, residuals, half, degree, near, lost, settled, exact_at, least, rank, K: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Which blocks have settled after one cycle of a filter from a start that was ``near`` and is not ``lost``.

    None of the first ``rank`` of K Ritz values, largest first, has a residual above ``exact_at`` of it; and the last of
    them is at most ``least`` of the sum of all these, times the square of what a direction with it has grown by.
    """
    at = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)
    wanted = p < rank
    value = tl.load(values + at * K + p, mask=wanted, other=0.0)
    left = tl.load(residuals + at * K + p, mask=wanted, other=0.0)
    exact = tl.min(tl.where(left <= exact_at * value, 1, 0), axis=0)
    captured = tl.sum(value, axis=0)
    last = tl.load(values + at * K + rank - 1)
    ratio = tl.maximum(last / tl.load(half + at) - 1, 1.0)
    power = tl.exp(tl.load(degree + at) * tl.log(ratio + tl.sqrt(ratio * ratio - 1)))
    growth = (power + 1 / power) / 2
    sure = tl.where(last <= least * captured * growth * growth, exact, 0)
    sure = tl.where(captured < float("inf"), sure, 0)
    sure = tl.where(tl.load(near + at), sure, 0)
    tl.store(settled + at, tl.where(tl.load(lost + at), 0, sure) > 0)
