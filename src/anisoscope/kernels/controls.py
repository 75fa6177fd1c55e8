"""Kernel of random and normal controls: all that small matrices say of one draw, beside one basis, in one program.

``tangent.stacked_controls`` forms the products with second moments; what follows them are a few products of K x K and
sums over their entries, which launched one by one are a hundred small kernels. Everything is float64 here; what is
loaded may be float32.

This module needs Triton; ``tangent.stacked_controls`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_PLACES = 16
"""What a product of two tiles takes."""
PER_WARP = 512
"""Entries of a small matrix that one warp keeps: few warps, since sums over more of them wait for each other."""


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)


@triton.jit
def _sum(a):
    return tl.sum(tl.sum(a, axis=1), axis=0)


@triton.jit
def _inverse(a, limit, K: tl.constexpr, P: tl.constexpr):
    """As ``codes.inverses``: zero outside K x K, NaN where there is none whose condition is below ``limit``.

    No diagonal without an entry is asked for: the pivot is not above zero there.
    """
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (rows < K) & (columns < K)
    own = tl.sum(tl.where(rows == columns, a, 0.0), axis=1)
    same = tl.sum(tl.where(rows == columns, a, 0.0), axis=0)
    scale = 1.0 / tl.sqrt(tl.where(own > 0, own, 1.0))[:, None] / tl.sqrt(tl.where(same > 0, same, 1.0))[None, :]
    a = tl.where(inside, a * scale, tl.where(rows == columns, 1.0, 0.0))
    before = _sum(tl.where(inside, a * a, 0.0))
    least = 1.0
    for k in range(K):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(tl.arange(0, P) == k, row, 0.0), axis=0)
        least = tl.minimum(least, pivot.to(tl.float32))
        over = 1.0 / tl.where(pivot > 0, pivot, 1.0)
        row = row * over
        rest = tl.where(columns == k, -column[:, None] * over, a - column[:, None] * row[None, :])
        a = tl.where(rows == k, tl.where(columns == k, over, row[None, :]), rest)
    after = _sum(tl.where(inside, a * a, 0.0))
    sound = (least > 0) & (tl.sqrt(before) * tl.sqrt(after) < limit)
    return tl.where(inside, tl.where(sound, a * scale, float("nan")), 0.0)


@triton.jit(do_not_specialize=["n", "sites", "bases", "draws", "groups"])
def controls(
    inner, against, small, form, form_twice, across_twice, forms, owns, acrosses, level, size,
    random, normal, traces, squares, whole, limit, n, sites, bases, draws, groups,
    K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Energies of one draw, and what is left without it: off one basis, or (the program after the last basis) alone.

    With C the scatter around the mean m of all ``n`` rows of a site, ``level`` its trace and ``size`` its length, and
    for all bases together: ``against`` holds ``Q^T Z``, ``Q^T C Z`` and ``m^T Z`` of all draws below each other,
    ``small`` the products of Q, ``C Q`` and m with each other, ``form`` and ``form_twice`` ``Z^T C Z`` and
    ``Z^T C^2 Z``, ``across_twice`` ``Q^T C^2 Z``; ``forms``, ``owns`` and ``acrosses`` are ``Z^T M Z``, ``Q^T M Q`` and
    ``Q^T M Z`` of each group's second moment M.
    """
    b, p, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (i < K) & (j < K)
    all_bases, line = bases * K, draws * K
    height = 2 * all_bases + 1
    against += s * height * line + b * K
    along = against + 2 * all_bases * line
    along_i = tl.load(along + i, mask=i < K, other=0.0)
    along_j = tl.load(along + j, mask=j < K, other=0.0)
    own_draw = tl.load(inner + b * K * K + i * K + j, mask=inside, other=0.0)
    form_at = (b * K + i) * sites + s
    f = tl.load(form + form_at * K + j, mask=inside, other=0.0)
    forms += form_at * groups * K + j
    if p == bases:
        off = _inverse(own_draw, limit, K, P)
        to = random + s * (groups + 1) * draws + b
        for g in range(groups):
            one = tl.load(forms + g * K, mask=inside, other=0.0).to(tl.float64)
            tl.store(to + g * draws, _sum(one * off))
        tl.store(to + groups * draws, _sum((f + n * along_i * along_j) * off))
    else:
        beside = (p * K + i) * line + j
        square = (p * K + i) * all_bases + p * K + j
        c = tl.load(against + beside, mask=inside, other=0.0)
        off = _inverse(own_draw - _dot(tl.trans(c), c), limit, K, P)
        mixer = _dot(c, off)
        span = _dot(mixer, tl.trans(c))
        to = normal + (s * bases + p) * (groups + 1) * draws + b
        for g in range(groups):
            place = s * groups + g
            energy = tl.load(forms + g * K, mask=inside, other=0.0).to(tl.float64) * off
            cell = tl.load(acrosses + place * all_bases * line + b * K + beside, mask=inside, other=0.0)
            energy -= 2 * cell.to(tl.float64) * mixer
            cell = tl.load(owns + place * all_bases * all_bases + square, mask=inside, other=0.0)
            tl.store(to + g * draws, _sum(energy + cell.to(tl.float64) * span))
        lines = small + s * height * height + (p * K + i) * height
        own = tl.load(lines + all_bases + p * K + j, mask=inside, other=0.0)
        across = tl.load(against + all_bases * line + beside, mask=inside, other=0.0)
        once = _sum(f * off - 2 * across * mixer + own * span)
        # The second moment of all rows is C + n m m^T.
        m_i = tl.load(lines + 2 * all_bases, mask=i < K, other=0.0)
        m_j = tl.load(small + s * height * height + (p * K + j) * height + 2 * all_bases, mask=j < K, other=0.0)
        mean = along_i * along_j * off - 2 * m_i * along_j * mixer + m_i * m_j * span
        tl.store(to + groups * draws, once + n * _sum(mean))
        twice = tl.load(form_twice + (s * draws + b) * K * K + i * K + j, mask=inside, other=0.0) * off
        cell = tl.load(across_twice + s * all_bases * line + b * K + beside, mask=inside, other=0.0)
        own_twice = tl.load(lines + all_bases * height + all_bases + p * K + j, mask=inside, other=0.0)
        second = _sum(twice - 2 * cell * mixer + own_twice * span)
        turned = _dot(tl.trans(c), 0.5 * _dot(own, c) - across)
        held = _dot(off, f + turned + tl.trans(turned))
        both = _sum(held * tl.trans(held))
        unit = tl.load(level + s)
        length = tl.load(size + s) / unit
        one, two = unit / unit, length * length
        at = (s * bases + p) * (draws + 1)
        tl.store(traces + at + 1 + b, one - once / unit)
        tl.store(squares + at + 1 + b, two + (both - 2 * second) / unit / unit)
        if b == 0:  # what is left without the basis itself, and without nothing
            second = _sum(tl.where(i == j, own_twice, 0.0))
            tl.store(traces + at, one - _sum(tl.where(i == j, own, 0.0)) / unit)
            tl.store(squares + at, two + (_sum(own * own) - 2 * second) / unit / unit)
            if p == 0:
                tl.store(whole + 2 * s, one)
                tl.store(whole + 2 * s + 1, two)
