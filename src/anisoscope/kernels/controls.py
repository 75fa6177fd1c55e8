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
ROWS, COLUMNS = 4, 512
"""Of what one program takes apart."""


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)


@triton.jit
def _sum(a):
    return tl.sum(tl.sum(a, axis=1), axis=0)


@triton.jit
def _cells(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def _energy(form, across, own, off, mixer, span):
    """``tr(off (Z - Q c)^T M (Z - Q c))`` for ``form = Z^T M Z``, ``across = Q^T M Z`` and ``own = Q^T M Q``."""
    return _sum(form * off - 2 * across * mixer + own * span)


@triton.jit
def _length(form, across, own, c, off):
    """``tr`` of the square of ``off (Z - Q c)^T M (Z - Q c)``."""
    turned = _dot(tl.trans(c), 0.5 * _dot(own, c) - across)
    held = _dot(off, form + turned + tl.trans(turned))
    return _sum(held * tl.trans(held))


@triton.jit
def _left(trace, square, once, twice, both, unit, whole):
    """What is left of a covariance of trace one without a span that holds so much of it, of its square, and twice."""
    tl.store(trace, unit / unit - once / unit)
    tl.store(square, whole + (both - 2 * twice) / unit / unit)


@triton.jit
def _of_groups(
    to, forms, acrosses, owns, groups, draws, across_step, own_step, inside, off, mixer, span,
    SUMMED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Energies in the moments of all groups, written one after another, and their sum."""
    every = 0.0 * _sum(off)
    for g in range(groups):
        across, own = _cells(acrosses + g * across_step, inside), _cells(owns + g * own_step, inside)
        if SUMMED:
            energy = tl.load(forms + g).to(tl.float64) + _sum(own * span - 2 * across * mixer)
        else:
            energy = _energy(_cells(forms + g * K, inside), across, own, off, mixer, span)
        tl.store(to + g * draws, energy)
        every += energy
    return every


@triton.jit
def in_halves(
    source, factors, out, total, each, D, W, LEFT: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Rows times a factor, one for ``each`` of them in turn, as sums of two float16, written beside one another three
    times: high, low and high on the ``LEFT`` of a product, low, high and high on its right; ``W`` entries each time,
    zeros behind those that there are. The small products come first: a sum on tensor cores loses more the longer it is
    large."""
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k = tl.program_id(1) * B + tl.arange(0, B)
    inside = (at < total)[:, None] & (k < D)[None, :]
    factor = tl.load(factors + at // each, mask=at < total, other=0.0).to(tl.float64)
    value = tl.load(source + at[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float64) * factor[:, None]
    value = value.to(tl.float32)
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)).to(tl.float16)
    inside = (at < total)[:, None] & (k < W)[None, :]
    place = out + at[:, None] * 3 * W + k[None, :]
    tl.store(place, high if LEFT else low, mask=inside)
    tl.store(place + W, low if LEFT else high, mask=inside)
    tl.store(place + 2 * W, high, mask=inside)


@triton.jit(do_not_specialize=["sites", "bases", "draws", "groups"])
def controls(
    inverses, against, small, form, form_twice, across_twice, bare, forms, owns, acrosses, level, size,
    energies, traces, squares, whole, numbers, sites, bases, draws, groups,
    SUMMED: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Energies of one draw beside one basis, and what is left without it; the program after the last basis, whose X are
    the first axes, has the energies of the random control.

    With C the scatter around the mean m of all rows of a site, ``numbers`` how many there are, ``level`` its trace and
    ``size`` its length, and for all bases together: ``against`` holds c (``X^T Z``, for the axes what their coordinates
    of a draw are, with the other sign), ``X^T C Z`` and ``m^T Z`` of all draws below each other, ``small`` the products
    of X, ``C X`` and m with each other, ``form`` and ``form_twice`` ``Z^T C Z`` and ``Z^T C^2 Z``, ``across_twice``
    ``X^T C^2 Z``, ``bare`` ``Q^T C Q`` and ``Q^T C^2 Q``; ``forms``, ``owns`` and ``acrosses`` are ``Z^T M Z``,
    ``X^T M X`` and ``X^T M Z`` of each group's second moment M. ``SUMMED``: in place of the first, what the inverses
    make of it, ``tr(off Z^T M Z)``, for bases and then for random controls; and the energies of all rows are those of
    the groups together, where there are groups.
    """
    b, p, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (i < K) & (j < K)
    all_bases, line = (bases + 1) * K, draws * K
    height = 2 * all_bases + 1
    against += s * height * line + b * K
    along = against + 2 * all_bases * line
    along_i, along_j = _cells(along + i, i < K), _cells(along + j, j < K)
    form_at = (b * K + i) * sites + s
    f = _cells(form + form_at * K + j, inside)
    forms += ((tl.where(p == bases, draws, 0) + b) * sites + s) * groups if SUMMED else form_at * groups * K + j
    beside = (p * K + i) * line + j
    square = (p * K + i) * all_bases + p * K + j
    c = _cells(against + beside, inside)
    off = _cells(inverses + (p * draws + b) * K * K + i * K + j, inside)
    mixer = _dot(c, off)
    span = _dot(mixer, tl.trans(c))
    to = energies + (s * (bases + 1) + p) * (groups + 1) * draws + b
    every = _of_groups(
        to, forms, acrosses + s * groups * all_bases * line + b * K + beside,
        owns + s * groups * all_bases * all_bases + square, groups, draws, all_bases * line, all_bases * all_bases,
        inside, off, mixer, span, SUMMED, K,
    )  # fmt: skip
    small += s * height * height
    lines = small + (p * K + i) * height
    own_once = _cells(lines + all_bases + p * K + j, inside)
    across = _cells(against + all_bases * line + beside, inside)
    once = _energy(f, across, own_once, off, mixer, span)
    # The second moment of all rows is C + n m m^T.
    n = tl.load(numbers + s)
    m_i, m_j = _cells(lines + 2 * all_bases, i < K), _cells(small + (p * K + j) * height + 2 * all_bases, j < K)
    mean = _energy(along_i * along_j, m_i * along_j, m_i * m_j, off, mixer, span)
    tl.store(to + groups * draws, tl.where(SUMMED and groups > 0, every, once + n * mean))
    if p < bases:
        both = _length(f, across, own_once, c, off)
        own_twice = _cells(lines + all_bases * height + all_bases + p * K + j, inside)
        across = _cells(across_twice + s * all_bases * line + b * K + beside, inside)
        f = _cells(form_twice + (s * draws + b) * K * K + i * K + j, inside)
        second = _energy(f, across, own_twice, off, mixer, span)
        unit = tl.load(level + s)
        two = tl.load(size + s) / unit * (tl.load(size + s) / unit)
        at = (s * bases + p) * (draws + 1)
        _left(traces + at + 1 + b, squares + at + 1 + b, once, second, both, unit, two)
        if b == 0:  # what is left without the basis itself, and without nothing
            own = bare + (s * bases * K + p * K + i) * 2 * bases * K + p * K + j
            own_once, own_twice = _cells(own, inside), _cells(own + bases * K, inside)
            once, second = _sum(tl.where(i == j, own_once, 0.0)), _sum(tl.where(i == j, own_twice, 0.0))
            _left(traces + at, squares + at, once, second, _sum(own_once * own_once), unit, two)
            if p == 0:
                tl.store(whole + 2 * s, unit / unit)
                tl.store(whole + 2 * s + 1, two)
