"""Kernels for many tridiagonal matrices at once, shifted by many numbers: signs of minors, factors, forms, a vector.

Numbers and widths of matrices are ordinary arguments: each kernel is compiled once.

This module needs Triton; ``measures.tridiagonal`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 8
"""Steps of a Sturm sequence between two scalings; the length of what is given must be a multiple."""
POLES = 4
"""Poles that one program takes at a time."""


@triton.jit(do_not_specialize=["D", "length"])
def bisect(diagonal, squares, low, high, values, D, length, HALVINGS: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """Eigenvalues of tridiagonal matrices between ``low`` and ``high``, from numbers of sign changes.

    Minors are followed themselves, scaled every G steps, not their quotients: a step is two multiplications then, and
    no division. ``squares`` are of the entries beside the diagonal, the first of them zero and none of the others so
    small that a product of G / 2 vanishes; ``length``, a multiple of G, is how many there are of both.
    """
    matrix = tl.program_id(1).to(tl.int64)
    which = tl.program_id(0) * B + tl.arange(0, B)
    diagonal += matrix * length
    squares += matrix * length
    lower = tl.zeros((B,), dtype=tl.float64) + tl.load(low + matrix)
    upper = tl.zeros((B,), dtype=tl.float64) + tl.load(high + matrix)
    for _ in range(HALVINGS):
        middle = 0.5 * (lower + upper)
        before = tl.zeros((B,), dtype=tl.float64)
        minor = before + 1.0
        count = tl.zeros((B,), dtype=tl.int32)
        for start in range(0, length, G):
            for step in tl.static_range(G):
                own = tl.load(diagonal + start + step) - middle
                other = tl.load(squares + start + step)
                following = own * minor - other * before
                # A zero counts as positive: its neighbours differ in sign, so one change is seen either way.
                count += ((following < 0) != (minor < 0)).to(tl.int32)
                before, minor = minor, following
            size = tl.maximum(tl.abs(minor), tl.abs(before))
            power = size.to(tl.int64, bitcast=True) & 0x7FF0000000000000
            factor = (0x7FE0000000000000 - power).to(tl.float64, bitcast=True)
            before, minor = before * factor, minor * factor
        above = count > which
        upper = tl.where(above, middle, upper)
        lower = tl.where(above, lower, middle)
    tl.store(values + matrix * D + which, 0.5 * (lower + upper), mask=which < D)


@triton.jit(do_not_specialize=["D"])
def factor_shifted(diagonal, off, shifts, weights, least, ratios, shares, D, N: tl.constexpr, B: tl.constexpr):
    """``L`` and ``weight / D`` of ``L D L^T = T + shift``, for N shifts of a matrix; ``[matrices, D, N]`` each.

    A pivot below ``least``, which rounding alone can make, is taken for it.
    """
    matrix = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, B)
    there = p < N
    shift = tl.load(shifts + matrix * N + p, mask=there, other=1.0)
    weight = tl.load(weights + matrix * N + p, mask=there, other=0.0)
    small = tl.load(least + matrix)
    pivot = shift * 0 + 1.0
    beside = shift * 0
    for i in range(0, D):
        ratio = beside / pivot
        pivot = tl.load(diagonal + matrix * D + i) + shift - ratio * beside
        pivot = tl.where(pivot < small, small, pivot)
        place = (matrix * D + i) * N + p
        tl.store(ratios + place, ratio, mask=there)
        tl.store(shares + place, weight / pivot, mask=there)
        beside = shift * 0 + tl.load(off + matrix * D + i)


@triton.jit(do_not_specialize=["n", "D"])
def sum_forms(rows, ratios, shares, out, n, D, N: tl.constexpr, B: tl.constexpr):
    """Sums over four poles of ``y^T (T + shift)^-1 y`` times their weights, for rows y; ``[matrices, N / 4, n]``.

    ``rows`` are ``[matrices, D, n]``: neighbours in memory are entries of different rows.
    """
    matrix = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1)
    i = tl.program_id(0) * B + tl.arange(0, B)
    rows += matrix * D * n
    ratios += matrix * D * N + group * 4
    shares += matrix * D * N + group * 4
    z0 = tl.zeros((B,), dtype=tl.float64)
    z1, z2, z3 = z0, z0, z0
    s0, s1, s2, s3 = z0, z0, z0, z0
    for step in range(0, D):
        y = tl.load(rows + step * n + i, mask=i < n, other=0.0).to(tl.float64)
        place = step * N
        z0 = y - tl.load(ratios + place) * z0
        z1 = y - tl.load(ratios + place + 1) * z1
        z2 = y - tl.load(ratios + place + 2) * z2
        z3 = y - tl.load(ratios + place + 3) * z3
        s0 += z0 * z0 * tl.load(shares + place)
        s1 += z1 * z1 * tl.load(shares + place + 1)
        s2 += z2 * z2 * tl.load(shares + place + 2)
        s3 += z3 * z3 * tl.load(shares + place + 3)
    tl.store(out + (matrix * (N // 4) + group) * n + i, (s0 + s1) + (s2 + s3), mask=i < n)


@triton.jit(do_not_specialize=["D"])
def twisted_vector(diagonal, off, values, least, ratios, pivots, vectors, D, B: tl.constexpr):
    """Unit eigenvectors of tridiagonal matrices for their largest eigenvalues, ``values``, or a little above.

    ``T - value`` is factored from both ends; where the two pivots leave least, the vector has its largest entry, and
    the rest follows outwards from there. ``ratios`` and ``pivots``, ``[matrices, 2, D]``, are scratch.
    """
    matrix = tl.program_id(0).to(tl.int64)
    diagonal += matrix * D
    off += matrix * D
    ratios += matrix * 2 * D
    pivots += matrix * 2 * D
    vectors += matrix * D
    side = tl.arange(0, 2)
    value = tl.load(values + matrix)
    small = tl.load(least + matrix)
    beside = tl.zeros((2,), dtype=tl.float64)
    pivot = beside + 1.0
    for i in range(0, D):
        at = tl.where(side == 0, i, D - 1 - i)
        pivot = (tl.load(diagonal + at) - value) - beside * beside / pivot
        pivot = tl.where(tl.abs(pivot) < small, -small, pivot)
        # Entry ``at`` of the first side reaches to the one after it, of the second to the one before.
        to = tl.where(side == 0, at, at - 1)
        beside = tl.load(off + to, mask=(to >= 0) & (to < D - 1), other=0.0)
        tl.store(pivots + side * D + at, pivot)
        tl.store(ratios + side * D + at, -beside / pivot)
    tl.debug_barrier()
    best = float("inf") + value * 0
    twist = 0
    for start in range(0, D, B):
        places = start + tl.arange(0, B)
        inside = places < D
        left = tl.load(pivots + places, mask=inside, other=0.0) + tl.load(pivots + D + places, mask=inside, other=0.0)
        left = tl.abs(left - (tl.load(diagonal + places, mask=inside, other=0.0) - value))
        left = tl.where(inside & (left == left), left, float("inf"))
        least_here, place = tl.min(left, axis=0, return_indices=True)
        twist = tl.where(least_here < best, start + place, twist)
        best = tl.where(least_here < best, least_here, best)
    tl.store(vectors + twist, 1.0)
    entry = tl.zeros((2,), dtype=tl.float64) + 1.0
    total = tl.zeros((2,), dtype=tl.float64)
    for step in range(1, D):
        # Upwards by the ratios of the first side, downwards by those of the second.
        at = tl.where(side == 0, twist - step, twist + step)
        within = (at >= 0) & (at < D)
        entry = entry * tl.load(ratios + side * D + at, mask=within, other=0.0)
        total += entry * entry
        tl.store(vectors + at, entry, mask=within)
    tl.debug_barrier()
    length = tl.sqrt(1.0 + tl.sum(total, axis=0)) + value * 0
    for start in range(0, D, B):
        places = start + tl.arange(0, B)
        entries = tl.load(vectors + places, mask=places < D, other=0.0)
        tl.store(vectors + places, entries / length, mask=places < D)
