"""Eigenvalues of many tridiagonal matrices at once, from signs of minors.

Numbers and widths of matrices are ordinary arguments: the kernel is compiled once.

This module needs Triton; ``measures.tridiagonal`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 8
"""Steps of a Sturm sequence between two scalings; the length of what is given must be a multiple."""


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
