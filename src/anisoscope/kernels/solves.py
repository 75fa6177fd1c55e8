"""Kernels for many symmetric band matrices at once, shifted by many numbers: triangular factors, forms, solutions.

A matrix is cut into blocks of K by K, K its half-bandwidth, A_k the one left of B_kk. One after another,
``M_k = A_k L_(k-1)^-T`` and ``L_k L_k^T = B_kk + shift - M_k M_k^T``. All M_k are upper triangular, as all A_k are.
Numbers and widths of matrices are ordinary arguments: each kernel is compiled once.

This module needs Triton; ``measures.band_forms`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _selected(a, chosen, axis: tl.constexpr):
    """Those of float64 numbers that are chosen, one at most along an axis: by their bits, which takes no sums."""
    bits = tl.where(chosen, a.to(tl.int64, bitcast=True), 0)
    return tl.xor_sum(bits, axis=axis).to(tl.float64, bitcast=True)


@triton.jit
def _inverse_factor(a, small, H: tl.constexpr):
    """``L^-T`` of ``L L^T = a``; a pivot below ``small`` is taken for it.

    Elimination in place, of the transpose: at step k rows before k hold columns of what is sought, but for its diagonal
    and scale, rows after k what is left of the matrix, whose rows are its columns.
    """
    r, c = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    i = tl.arange(0, H)
    scale = tl.zeros((H,), dtype=tl.float64)
    for k in range(H):
        column = _selected(a, c == k, 1)
        pivot = _selected(column, i == k, 0)
        pivot = tl.where(pivot < small, small, pivot)
        scale = tl.where(i == k, pivot, scale)
        share = tl.where(i > k, column * (1.0 / pivot), 0.0)[None, :]
        a = tl.where((r == k) & (c > k), 0.0, a) - tl.where(i == k, 1.0, column)[:, None] * share
    left = tl.where(r < c, a, tl.where(r == c, 1.0, 0.0))
    return left * (1.0 / tl.sqrt(scale))[None, :]


@triton.jit
def _rounded(x):
    """The nearest float32 number of as many digits as tensor cores read, eleven."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _store(place, x, K: tl.constexpr, WIDE: tl.constexpr):
    """Part of a float64 block as it is, or as two of float32, each of eleven digits, in a block and the next."""
    if WIDE:
        tl.store(place, x)
    else:
        high = _rounded(x.to(tl.float32))
        tl.store(place, high)
        tl.store(place + K * K, _rounded((x - high.to(tl.float64)).to(tl.float32)))


@triton.jit
def _own(band, shift, at, D, K: tl.constexpr, H: tl.constexpr):
    """A block of H by H on the diagonal of ``B + shift``, the identity beyond the end."""
    r, c = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    j = at + tl.minimum(r, c)
    found = tl.load(band + j * 2 * K + tl.abs(r - c), mask=j < D, other=0.0)
    return found + tl.where(r == c, tl.where(j < D, shift, 1.0), 0.0)


@triton.jit
def _times(a, b):
    return tl.dot(a, b, out_dtype=tl.float64)


@triton.jit(do_not_specialize=["D", "N"])
def factor_bands(band, shifts, weights, least, out, D, N, K: tl.constexpr, WIDE: tl.constexpr):
    """Factors of ``B + shift``, for N shifts of each matrix that have a weight, pivots below ``least`` taken for it.

    ``band`` is ``[matrices, D, 2 K]``: ``B[j + i, j]`` at ``[j, i]``, zero beyond the band and the end. What fills up
    the last block is the identity. ``out`` is ``[matrices, N, blocks, 2 or 4, K, K]``. Wide: ``L_k^-1`` and ``M_k``,
    float64. Otherwise ``L_k^-1`` and ``-L_k^-1 M_k``, each in two parts, float32.

    Blocks are taken in quarters: elimination, step by step, costs by the square. With ``L^-T = [[t1, t12], [0, t2]]``
    and ``M = [[m1, m12], [0, m2]]``.
    """
    matrix = tl.program_id(1).to(tl.int64)
    pole = tl.program_id(0)
    H: tl.constexpr = K // 2
    r, c = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    band += matrix * D * 2 * K
    shift = tl.load(shifts + matrix * N + pole)
    small = tl.load(least + matrix)
    blocks = tl.cdiv(D, K)
    step: tl.constexpr = (2 if WIDE else 4) * K * K
    out += (matrix * N + pole) * blocks * step + r * K + c
    m1 = tl.zeros((H, H), dtype=tl.float64)
    m12, m2, nothing = m1, m1, m1
    for k in range(0, tl.where(tl.load(weights + matrix * N + pole) == 0, 0, blocks)):
        at = k * K
        t1 = _inverse_factor(
            _own(band, shift, at, D, K, H) - _times(m1, tl.trans(m1)) - _times(m12, tl.trans(m12)), small, H
        )
        beside = tl.load(band + (at + c) * 2 * K + (H + r - c), mask=at + c < D, other=0.0)
        beside = _times(beside - _times(m2, tl.trans(m12)), t1)
        t2 = _inverse_factor(
            _own(band, shift, at + H, D, K, H) - _times(m2, tl.trans(m2)) - _times(beside, tl.trans(beside)), small, H
        )
        t12 = -_times(t1, _times(tl.trans(beside), t2))
        _store(out, tl.trans(t1), K, WIDE)
        _store(out + H, nothing, K, WIDE)
        _store(out + H * K, tl.trans(t12), K, WIDE)
        _store(out + H * K + H, tl.trans(t2), K, WIDE)
        then = out + step // 2
        if WIDE:
            _store(then, m1, K, WIDE)
            _store(then + H, m12, K, WIDE)
            _store(then + H * K, nothing, K, WIDE)
            _store(then + H * K + H, m2, K, WIDE)
        else:
            _store(then, -_times(tl.trans(t1), m1), K, WIDE)
            _store(then + H, -_times(tl.trans(t1), m12), K, WIDE)
            _store(then + H * K, -_times(tl.trans(t12), m1), K, WIDE)
            _store(then + H * K + H, -_times(tl.trans(t12), m12) - _times(tl.trans(t2), m2), K, WIDE)
        out += step
        a1 = tl.load(band + (at + c) * 2 * K + (K + r - c), mask=at + c < D, other=0.0)
        a12 = tl.load(band + (at + H + c) * 2 * K + (H + r - c), mask=at + H + c < D, other=0.0)
        a2 = tl.load(band + (at + H + c) * 2 * K + (K + r - c), mask=at + H + c < D, other=0.0)
        m1 = _times(a1, t1)
        m12 = _times(a1, t12) + _times(a12, t2)
        m2 = _times(a2, t2)


@triton.jit
def _added(found, z, place, K: tl.constexpr):
    """``found`` and the product of rows z with the transpose of a block, kept in two parts of eleven digits.

    So are rows taken here; what is left out, the product of two low parts, is as small as the rounding of float32.
    """
    turned = place + tl.arange(0, K)[:, None] + tl.arange(0, K)[None, :] * K
    high, low = tl.load(turned), tl.load(turned + K * K)
    z_high = _rounded(z)
    found = tl.dot(z - z_high, high, found, input_precision="tf32")
    found = tl.dot(z_high, low, found, input_precision="tf32")
    return tl.dot(z_high, high, found, input_precision="tf32")


@triton.jit(do_not_specialize=["quads", "D", "N"])
def sum_band_forms(rows, factors, weights, out, quads, D, N, K: tl.constexpr, R: tl.constexpr):
    """``y^T (B + shift)^-1 y`` for rows y and N shifts, ``[matrices, N, 4 quads]``; zero where a shift has no weight.

    ``rows`` are ``[matrices, D, 4 quads]``: neighbours in memory are entries of different rows. ``factors`` are those
    of ``factor_bands``: ``z_k = L_k^-1 (y_k - M_k z_(k-1))``, and a form is the sum of squares of z.
    """
    pole = tl.program_id(2).to(tl.int64) * N + tl.program_id(1)
    n = quads * 4
    i = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.arange(0, K)[None, :]
    blocks = tl.cdiv(D, K)
    rows += tl.program_id(2).to(tl.int64) * D * n + i[:, None]
    factors += pole * blocks * 4 * K * K
    total = tl.zeros((R, K), dtype=tl.float32)
    z = total
    for k in range(0, tl.where(tl.load(weights + pole) == 0, 0, blocks)):
        at = k * K + j
        y = tl.load(rows + at * n, mask=(i[:, None] < n) & (at < D), other=0.0)
        place = factors + k * 4 * K * K
        z = _added(_added(tl.zeros((R, K), dtype=tl.float32), y, place, K), z, place + 2 * K * K, K)
        total += z * z
    tl.store(out + pole * n + i, tl.sum(total, axis=1), mask=i < n)


@triton.jit(do_not_specialize=["D", "times"])
def solve_bands(factors, vectors, D, times, K: tl.constexpr):
    """``times`` solutions one after another, each divided by its length, of ``L L^T x = vector``, in place.

    ``factors`` are those of ``factor_bands``, wide, for one shift; ``vectors`` are ``[matrices, blocks * K]``. Factors
    of the next step are on their way during each.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K)
    last = tl.cdiv(D, K) - 1
    factors += matrix * (last + 1) * 2 * K * K + i[:, None] * K + i[None, :]
    vectors += matrix * (last + 1) * K + i
    nothing = tl.zeros((K,), dtype=tl.float64)
    inverse, beside = tl.load(factors), tl.load(factors + K * K)
    scale = tl.sum(nothing, axis=0) + 1.0
    for _ in range(0, times):
        z = nothing
        for k in range(0, last + 1):
            place = factors + tl.minimum(k + 1, last) * 2 * K * K
            next_inverse, next_beside = tl.load(place), tl.load(place + K * K)
            left = tl.load(vectors + k * K) * scale - tl.sum(beside * z[None, :], axis=1)
            z = tl.sum(inverse * left[None, :], axis=1)
            tl.store(vectors + k * K, z)
            inverse, beside = next_inverse, next_beside
        tl.debug_barrier()
        coming = nothing
        squares = nothing
        for step in range(0, last + 1):
            k = last - step
            place = factors + tl.maximum(k - 1, 0) * 2 * K * K
            next_inverse, next_beside = tl.load(place), tl.load(place + K * K)
            x = tl.sum(inverse * (tl.load(vectors + k * K) - coming)[:, None], axis=0)
            coming = tl.sum(beside * x[:, None], axis=0)
            squares += x * x
            tl.store(vectors + k * K, x)
            inverse, beside = next_inverse, next_beside
        tl.debug_barrier()
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0))
    for k in range(0, last + 1):
        tl.store(vectors + k * K, tl.load(vectors + k * K) * scale)
