"""Kernels of semi-NMF that visit each row once in a half step: products, rounds over its codes, and what they add.

In separate products the rows are read twice and their codes six times for each half step. Products of float32 are sums
of three TF32 products, which lose as little. K concepts stand in P places, at least the 16 that a product takes.

This module needs Triton; ``tangent.sweeps`` and ``tangent.visits`` import it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 128
"""Rows of the data that one program visits."""
DEPTH = 32
"""Entries of a row that one program takes at a time."""
ADDED = 1024
"""Numbers that one program adds up over tiles."""


@triton.jit
def _against(concepts, base, columns, n, end, D, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """``C A^T`` for the rows of a program, of their entries before ``end``: all of them, or none."""
    p = tl.arange(0, P)
    total = tl.zeros((P, B), dtype=tl.float32)
    for start in range(0, end, W):
        k = start + tl.arange(0, W)
        c = tl.load(concepts + p[:, None] * D + k[None, :], mask=(p < K)[:, None] & (k < D)[None, :], other=0.0)
        rows = tl.load(base + columns[:, None] * D + k[None, :], mask=(columns < n)[:, None] & (k < D)[None, :], other=0.0)  # fmt: skip # noqa: E501
        total = tl.dot(c, tl.trans(rows), total, input_precision="tf32x3")
    return total


@triton.jit
def _round(z, aim, gram, K: tl.constexpr, P: tl.constexpr):
    """The codes of one concept after another set to their optimum; those of a concept of length zero become zero."""
    p = tl.arange(0, P)
    for k in range(K):
        own = tl.load(gram + k * K + k)
        row = tl.load(gram + k * K + p, mask=p < K, other=0.0) * tl.where(own > 0, 1.0 / own, 0.0)
        row = tl.where(p == k, 0.0, row).to(tl.float32)
        here = (p == k)[:, None]
        value = tl.sum(tl.where(here, aim, 0.0) - row[:, None] * z, axis=0)
        z = tl.where(here, tl.maximum(value, 0.0)[None, :], z)
    return z


@triton.jit
def _inverse_sizes(gram, K: tl.constexpr, P: tl.constexpr):
    p = tl.arange(0, P)
    own = tl.load(gram + p * (K + 1), mask=p < K, other=0.0)
    return tl.where(own > 0, 1.0 / own, 0.0).to(tl.float32)


@triton.jit
def warm_codes(
    a, concepts, gram, free, codes, n, D, sweeps, settled,
    K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Codes of rows under given concepts: rounds from the unconstrained solution cut off at zero, or from zero for
    rows where that is better, until one moves the codes of these rows by at most ``settled`` of their length."""
    fit = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    p = tl.arange(0, P)
    gram += fit * K * K
    cross = _against(concepts + fit * K * D, a + fit * n * D, columns, n, D, D, K, P, B, W)
    small = (p < K)[:, None] & (p < K)[None, :]
    square = fit * K * K + p[:, None] * K + p[None, :]
    z = tl.dot(tl.load(free + square, mask=small, other=0.0).to(tl.float32), cross, input_precision="tf32x3")
    z = tl.maximum(z, 0.0)
    held = tl.load(gram + p[:, None] * K + p[None, :], mask=small, other=0.0).to(tl.float32)
    gain = tl.sum(2 * z * cross - z * tl.dot(held, z, input_precision="tf32x3"), axis=0)
    z = tl.where((gain > 0)[None, :], z, 0.0)
    aim = cross * _inverse_sizes(gram, K, P)[:, None]
    moved = 1.0
    size = 0.0
    done = 0
    while (done < sweeps) & (moved > settled * settled * size):
        new = _round(z, aim, gram, K, P)
        moved = tl.sum(tl.sum((new - z) * (new - z), axis=1), axis=0)
        size = tl.sum(tl.sum(new * new, axis=1), axis=0)
        z = new
        done += 1
    inside = (p < K)[:, None] & (columns < n)[None, :]
    tl.store(codes + fit * K * n + p[:, None] * n + columns[None, :], z, mask=inside)


@triton.jit
def half_step(
    a, concepts, gram, codes, last, ahead, again, pull, second, own, met, active, n, D, tiles,
    K: tl.constexpr, P: tl.constexpr, S: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """``S`` rounds over the codes of some rows, how far they go on, and what these rows add to the sums of their fit.

    Rounds start from ``codes`` and lead to Z, which becomes ``last``; ``codes`` become Z and ``ahead`` of its way from
    the former ``last``, cut off at zero. A fit that is to be done ``again`` takes ``last`` for Z as it is. ``pull``
    (``[fits, tiles, K, D]``) and ``second`` (``[fits, tiles, K, K]``) are the products of these codes with the rows and
    with themselves; ``own`` is ``Z^T Z``, and ``met`` (``[fits, tiles]``) is ``<Z, A C^T>``. A fit that is not active
    stays as it is.
    """
    fit = tl.program_id(1).to(tl.int64)
    if tl.load(active + fit):
        tile = tl.program_id(0).to(tl.int64)
        columns = tile * B + tl.arange(0, B)
        p = tl.arange(0, P)
        gram += fit * K * K
        base = a + fit * n * D
        redo = tl.load(again + fit) != 0
        aim = _against(concepts + fit * K * D, base, columns, n, tl.where(redo, 0, D), D, K, P, B, W)
        scale = _inverse_sizes(gram, K, P)
        aim = aim * scale[:, None]
        inside = (p < K)[:, None] & (columns < n)[None, :]
        places = fit * K * n + p[:, None] * n + columns[None, :]
        z = tl.load(codes + places, mask=inside, other=0.0)
        if redo:
            z = tl.load(last + places, mask=inside, other=0.0)
        for _ in range(tl.where(redo, 0, S)):
            z = _round(z, aim, gram, K, P)
        z = tl.where(inside, z, 0.0)
        reach = tl.sum((aim * z).to(tl.float64), axis=1)
        tl.store(met + fit * tiles + tile, tl.sum(tl.where(scale > 0, reach / scale.to(tl.float64), 0.0), axis=0))
        small = (p < K)[:, None] & (p < K)[None, :]
        at = (fit * tiles + tile) * K * K + p[:, None] * K + p[None, :]
        tl.store(own + at, tl.dot(z, tl.trans(z), input_precision="tf32x3"), mask=small)
        before = tl.load(last + places, mask=inside, other=0.0)
        share = tl.load(ahead + fit).to(tl.float32)
        # Not a product with a share of zero: there is no last before the first round.
        beyond = tl.where(share > 0, tl.maximum(z + share * (z - before), 0.0), z)
        tl.debug_barrier()  # some thread may still have to read what another writes over
        tl.store(last + places, z, mask=inside)
        tl.store(codes + places, beyond, mask=inside)
        tl.store(second + at, tl.dot(beyond, tl.trans(beyond), input_precision="tf32x3"), mask=small)
        for start in range(0, D, W):
            k = start + tl.arange(0, W)
            rows = tl.load(base + columns[:, None] * D + k[None, :], mask=(columns < n)[:, None] & (k < D)[None, :], other=0.0)  # fmt: skip # noqa: E501
            part = tl.dot(beyond, rows, input_precision="tf32x3")
            place = ((fit * tiles + tile) * K + p[:, None]) * D + k[None, :]
            tl.store(pull + place, part, mask=(p < K)[:, None] & (k < D)[None, :])


@triton.jit
def _added(parts, out, fit, first, tiles, size, B: tl.constexpr):
    """Some of the ``size`` numbers that each tile of a fit adds, in float64."""
    at = first + tl.arange(0, B)
    total = tl.zeros((B,), dtype=tl.float64)
    for tile in range(tiles):
        total += tl.load(parts + (fit * tiles + tile) * size + at, mask=at < size, other=0.0).to(tl.float64)
    tl.store(out + fit * size + at, total, mask=at < size)


@triton.jit
def add_up(
    pull, second, own, met, active, pull_sum, second_sum, own_sum, met_sum, tiles, width,
    K: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sums of what all tiles of an active fit add, one after another; what is not active stays as it is.

    ``width`` numbers of ``pull`` for each tile, ``B`` of which a program adds up; the last two programs of a fit add up
    ``second``, and ``own`` and ``met``.
    """
    fit = tl.program_id(1).to(tl.int64)
    if tl.load(active + fit):
        left = tl.num_programs(0) - tl.program_id(0)
        if left > 2:
            _added(pull, pull_sum, fit, tl.program_id(0) * B, tiles, width, B)
        elif left == 2:
            _added(second, second_sum, fit, 0, tiles, K * K, P * P)
        else:
            _added(own, own_sum, fit, 0, tiles, K * K, P * P)
            _added(met, met_sum, fit, 0, tiles, 1, P)
