"""A kernel that brings many symmetric band matrices to tridiagonal form at once, by chasing bulges.

With B diagonals below the main one, sweep s takes column s to tridiagonal form by a reflector on the B rows below its
diagonal. From the right it fills the block below, whose first column the next reflector clears, B rows further down,
and so on to the end of the matrix; what else it filled is left there for sweeps to come, and reaches 2 B - 1 places
below the diagonal at most. Step k of sweep s is all that happens to the B rows from ``s + 1 + k B`` on: to the block
left of that on the diagonal, and to the one on it.

Sweeps follow each other two steps apart, so that many are under way at once. Rows of sweep s - 1 begin one row earlier:
those of step k of sweep s are the rows of its step k but for the first, and the first of its step k + 1. Its later
steps neither read nor write them. So step k may begin when step k + 1 of the sweep before is done, and not before.

This module needs Triton; ``measures.chased`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anisoscope.kernels.meeting import TINY, arrive, wait

BAND = 32
"""Diagonals below the main one of the matrices that are taken."""


@triton.jit
def _reflector(x, r):
    """Of a column x, over places r: what stays of it in the first place, the factor tau, and the vector."""
    tail = tl.sum(tl.where(r > 0, x * x, 0.0), axis=0)
    alpha = tl.sum(tl.where(r == 0, x, 0.0), axis=0)
    flat = tail <= TINY  # not so for NaN, which must go on
    size = tl.sqrt(tl.where(flat, 1.0, alpha * alpha + tail))
    beta = tl.where(alpha > 0, -size, size)
    apart = tl.where(flat, 1.0, alpha - beta)
    both = 1.0 / (beta * apart)  # one division for two
    tau = tl.where(flat, 0.0, -apart * apart * both)
    vector = tl.where(r == 0, 1.0, tl.where(flat, 0.0, x * (beta * both)))
    return tl.where(flat, alpha, beta), tau, vector


@triton.jit
def _parts(B: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Places of a block of B by B, as an array of four axes, and which of them are below the diagonal.

    In a band, columns of a block are one place nearer to each other than columns of the band.
    """
    c = tl.arange(0, C)[:, None, None, None]
    r = tl.arange(0, B // R)[None, :, None, None] * R
    column = tl.arange(0, B // C)[None, None, :, None] * C
    row = tl.arange(0, R)[None, None, None, :]
    # What differs within a thread apart from what differs between threads: so it is known when the kernel is compiled.
    places = (c * (2 * B - 1) + row) + (column * (2 * B - 1) + r)
    return places, r + row > column + c


@triton.jit
def _whole(parts, B: tl.constexpr):
    """The block, columns first, of its four axes."""
    return tl.reshape(tl.permute(parts, (2, 0, 1, 3)), (B, B))


@triton.jit
def _apart(block, B: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The other way round."""
    return tl.permute(tl.reshape(block, (B // C, C, B // R, R)), (1, 2, 0, 3))


@triton.jit(do_not_specialize=["D", "S", "P"])
def chase(band, counter, D, S, P, B: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Band matrices of D columns to tridiagonal form, in place; ``P`` programs a matrix, every P-th sweep is one's own.

    ``band`` is ``[matrices, S, 2 B]``, entry j + i, j of the matrix at place B + j, i, zero before and beyond the
    matrix, and S is D + 2 B at least: no step reaches further. ``counter``, ``[matrices, D]`` and zero, counts the
    steps of each sweep that are done. A sweep waits for the one before it alone, and a program takes its sweeps in
    order: where all programs run, the earliest sweep that is not done can always go on. Nothing that is found depends
    on P.

    A block of B by B is read as an array of four axes, R neighbouring rows and C neighbouring columns two of them, for
    the threads of a warp: a thread has some rows and some columns, so that sums along both are short. Which axis goes
    to threads next to the rows differs between versions of Triton, the first or the third; both are columns.
    """
    matrix = (tl.program_id(0) // P).to(tl.int64)
    own = tl.program_id(0) % P
    band += matrix * S * (2 * B)
    counter += matrix * D
    i = tl.arange(0, B)
    places, below = _parts(B, R, C)
    for sweep in range(own, D - 2, P):
        tau = tl.zeros((), dtype=tl.float64)
        v = tl.zeros((B,), dtype=tl.float64)
        before = tl.cdiv(D - sweep, B)  # steps of the sweep before
        for step in range(0, tl.cdiv(D - 1 - sweep, B)):
            beside = band + (sweep + 1 + step * B) * (2 * B) + B
            on = beside + (2 * B - 1) * B
            # The first block of all has one column, the last: those before it are done, and zero in these rows.
            cleared = beside + tl.where(step > 0, 0, (2 * B - 1) * (B - 1)) + i
            if sweep > 0:
                wait(counter + sweep - 1, tl.minimum(step + 2, before))
            tile = _whole(tl.load(beside + places, cache_modifier=".cg"), B)
            square = _whole(tl.load(on + places, mask=below, other=0.0, cache_modifier=".cg"), B)
            x = tl.load(cleared, cache_modifier=".cg")
            diagonal = tl.load(on + 2 * B * i, cache_modifier=".cg")

            # The reflector of the step before, from the right; of this step's, what it is made of.
            y = tau * tl.sum(tile * v[:, None], axis=0)
            tile -= v[:, None] * y[None, :]
            beta, tau, v = _reflector(x - y, i)
            z = tau * tl.sum(tile * v[None, :], axis=1)
            tile -= z[:, None] * v[None, :]
            tl.store(beside + places, _apart(tile, B, R, C))

            # From both sides: of the symmetric block what is above the diagonal is not kept.
            w = tl.sum(square * v[:, None], axis=0) + tl.sum(square * v[None, :], axis=1) + diagonal * v
            w = tau * w - (0.5 * tau * tau * tl.sum(w * v, axis=0)) * v
            square -= v[:, None] * w[None, :]
            square -= w[:, None] * v[None, :]
            tl.store(on + places, _apart(square, B, R, C), mask=below)
            tl.store(on + 2 * B * i, diagonal - 2 * v * w)
            tl.debug_barrier()  # other threads have written there, with the block
            tl.store(cleared, tl.where(i == 0, beta, 0.0))
            arrive(counter + sweep)
