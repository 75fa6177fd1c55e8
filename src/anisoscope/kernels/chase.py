"""A kernel that brings many symmetric band matrices to tridiagonal form at once, by chasing bulges.

With B diagonals below the main one, sweep s takes column s to tridiagonal form by a reflector on the B rows below its
diagonal. From the right it fills the block below, whose first column the next reflector clears, B rows further down,
and so on to the end of the matrix; what else it filled is left there for sweeps to come. Step k of sweep s is all that
happens to rows ``first = s + 1 + k B`` up to ``first + B``: of the block left of the diagonal and the one on it.

Step k of sweep s may begin when step k + 1 of sweep s - 1 is done, and must not before. The rows of that earlier sweep
begin one row earlier, so that all its steps but this one have rows in common with step k: of step k those above the
last, which it is done with since step k + 1 has begun, and of step k + 1 the last, which is the first of its own. Later
steps neither read nor write these rows. So sweeps follow each other two steps apart, and many are under way at once.

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
    """Columns and rows of a block of B by B, as an array of four axes."""
    column = tl.arange(0, C)[:, None] + tl.arange(0, B // C)[None, :] * C
    row = tl.arange(0, B // R)[:, None] * R + tl.arange(0, R)[None, :]
    return column[:, None, :, None], row[None, :, None, :]


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

    ``band`` is ``[matrices, S, 2 B]``, entry j + i, j of the matrix at place j, i, zero beyond the matrix, and S is
    D + B at least: no step reaches further. ``counter``, ``[matrices, D]`` and zero, counts the steps that are done of
    each sweep. Sweeps are waited for in order, so one program alone waits for nothing, and some that all run always go
    on. What is summed in which order does not depend on P.

    A block of B by B is read as an array of four axes, rows apart by R and columns by C: R times C threads of a warp have
    neighbours, and a thread has some rows and some columns, so that sums along both are short.
    """
    matrix = (tl.program_id(0) // P).to(tl.int64)
    own = tl.program_id(0) % P
    band += matrix * S * (2 * B)
    counter += matrix * D
    i = tl.arange(0, B)
    column, row = _parts(B, R, C)
    places = column * (2 * B - 1) + row
    for sweep in range(own, D - 2, P):
        tau = tl.zeros((), dtype=tl.float64)
        v = tl.zeros((B,), dtype=tl.float64)
        before = tl.cdiv(D - sweep, B)  # steps of the sweep before
        for step in range(0, tl.cdiv(D - 1 - sweep, B)):
            if sweep > 0:
                wait(counter + sweep - 1, tl.minimum(step + 2, before))
            # What the first step clears is one column, next to the block on the diagonal.
            first = sweep + 1 + step * B
            left = tl.where(step > 0, first - B, sweep)
            live = column < tl.where(step > 0, B, 1)
            beside = band + left * (2 * B) + (first - left)
            on = band + first * (2 * B)
            # All at once, and last what must be handed on among threads: that waits for it.
            tile = tl.load(beside + places, mask=live, other=0.0, cache_modifier=".cg")
            square = tl.load(on + places, mask=row >= column, other=0.0, cache_modifier=".cg")
            x = tl.load(beside + i, cache_modifier=".cg")
            tile = _whole(tile, B)
            square = _whole(square, B)

            # The reflector of the step before, from the right; of this step's, what it is made of.
            y = tau * tl.sum(tile * v[:, None], axis=0)
            tile -= v[:, None] * y[None, :]
            beta, tau, v = _reflector(x - y, i)
            z = tau * tl.sum(tile * v[None, :], axis=1)
            tile -= z[:, None] * v[None, :]
            tile = tl.where(i[:, None] == 0, tl.where(i[None, :] == 0, beta, 0.0), tile)
            tl.store(beside + places, _apart(tile, B, R, C), mask=live)

            # From both sides: of the symmetric block what is above the diagonal is not kept.
            below = tl.where(i[None, :] > i[:, None], square, 0.0)
            w = tl.sum(below * v[:, None], axis=0) + tl.sum(square * v[None, :], axis=1)
            w = tau * w - (0.5 * tau * tau * tl.sum(w * v, axis=0)) * v
            square -= v[:, None] * w[None, :] + w[:, None] * v[None, :]
            tl.store(on + places, _apart(square, B, R, C), mask=row >= column)
            arrive(counter + sweep)
