"""Kernel of small triangular factors: as many matrices at once as there are, where a library takes several steps each.

This module needs Triton; ``measures.leading`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_factors(gram, out, good, K: tl.constexpr, P: tl.constexpr):
    """The inverse of the lower triangular factor of each symmetric positive float64 matrix, by elimination on both the
    matrix and the identity. Not good: a pivot that is not positive, as where columns depend on one another or are not
    finite; what stands there is finite but of no use."""
    at = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (rows < K) & (columns < K)
    places = at * K * K + rows * K + columns
    eye = tl.where(rows == columns, 1.0, 0.0).to(tl.float64)
    a = tl.where(inside, tl.load(gram + places, mask=inside, other=0.0), eye)
    left = eye
    pivots = tl.full((P,), 1.0, tl.float64)
    for k in range(K):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        turned = tl.sum(tl.where(rows == k, left, 0.0), axis=0)
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(tl.arange(0, P) == k, row, 0.0), axis=0)
        pivots = tl.where(tl.arange(0, P) == k, pivot, pivots)
        safe = tl.where(pivot > 0, pivot, 1.0)
        share = tl.where(tl.arange(0, P) > k, column / safe, 0.0)[:, None]
        a -= share * row[None, :]
        left -= share * turned[None, :]
    sound = tl.min(tl.where(pivots > 0, 1, 0), axis=0) > 0
    scale = 1 / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    tl.store(out + places, tl.where(sound, left * scale[:, None], eye), mask=inside)
    tl.store(good + at, sound)
