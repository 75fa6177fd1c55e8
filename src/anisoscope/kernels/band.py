"""A kernel that factors a block column of many symmetric matrices at once, on their way to band form.

Some programs share a block column, each with its own rows of it in registers. They wait for one another once a column,
so all of them must be running at once: never more programs than fit on the GPU. No sum depends on which program comes
first. Numbers and widths of matrices are ordinary arguments: the kernel is compiled for each share of rows, not more.

This module needs Triton; ``measures.banded`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anisoscope.kernels.meeting import arrive, reflection, wait


@triton.jit(do_not_specialize=["D", "P"])
def factor_panel(
    a, band, trio, factors, taus, sums, counter, D, S, first, P,
    PP: tl.constexpr, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The QR factorisation of what is below the block of K columns from ``first`` on; ``P`` programs a matrix.

    Matrices are ``[matrices, S, S]``, of which D rows and columns count. The block column is read from above the
    diagonal, where its columns are rows in memory. With V the reflectors, a row of K each, ``Q = I - V^T T V``: V takes
    the place of what it was found from and goes to places 0 and 2 of ``trio``, ``[matrices, 3, K, S]``; T goes to
    ``factors``, ``[matrices, K, K]``; the block on the diagonal and the triangle that is left below it go to ``band``,
    ``[matrices, S, W]``, by columns. A reflector that has nothing to do is zero, but for its one.

    Scratch: ``sums``, ``[matrices, 2, PP + 1, K]``, products of the column in hand with all the others, by program, and
    the row of its pivot; those of one column are read while those of the next are written.
    """
    matrix = (tl.program_id(0) // P).to(tl.int64)
    own = tl.program_id(0) % P
    n = D - first - K
    k, i, q = tl.arange(0, K), own * R + tl.arange(0, R), tl.arange(0, PP)
    here = a + matrix * S * S + first * S + first + k[:, None] * S
    band += (matrix * S + first) * W
    sums += matrix * 2 * (PP + 1) * K
    counter += matrix
    there = (i < n)[None, :]
    tile = tl.load(here + K + i[None, :], mask=there, other=0.0)
    if own == 0:
        inside = (first + k < D)[:, None] & (k[None, :] >= k[:, None]) & (first + k < D)[None, :]
        block = tl.load(here + k[None, :], mask=inside, other=0.0)
        tl.store(band + k[:, None] * W + (k[None, :] - k[:, None]), block, mask=inside)
    small = tl.zeros((K, K), dtype=tl.float64)
    for j in range(0, K):
        column = tl.sum(tl.where((k == j)[:, None], tile, 0.0), axis=0)
        tail = tl.where(i > j, column, 0.0)
        now = sums + (j % 2) * (PP + 1) * K
        tl.store(now + own * K + k, tl.sum(tile * tail[None, :], axis=1))
        if own == 0:  # it has all rows of pivots
            tl.store(now + PP * K + k, tl.sum(tl.where((i == j)[None, :], tile, 0.0), axis=1))
        arrive(counter)
        wait(counter, P * (j + 1))
        parts = tl.load(now + q[:, None] * K + k[None, :], mask=(q < P)[:, None], other=0.0, cache_modifier=".cg")
        pivots = tl.load(now + PP * K + k, cache_modifier=".cg")
        products = tl.sum(parts, axis=0)
        pivot = tl.sum(tl.where(k == j, pivots, 0.0), axis=0)
        beta, tau, scale = reflection(pivot, tl.sum(tl.where(k == j, products, 0.0), axis=0))
        along = scale * products + pivots  # of the reflector with those before it, and with the columns after it
        vector = tl.where(i == j, 1.0, tail * scale)
        if own == 0:
            stays = tl.where(i == j, beta, column)
            tl.store(band + j * W + (K + i - j), stays, mask=(i <= j) & (i < n))
            before = tl.sum(small * tl.where(k < j, along, 0.0)[None, :], axis=1)
            last = tl.where(k == j, tau, -tau * before)
            small = tl.where((k == j)[None, :], last[:, None], small)
            tl.store(taus + matrix * S + first + j, tau)
        tile -= tl.where(k > j, tau * along, 0.0)[:, None] * vector[None, :]
        tile = tl.where((k == j)[:, None], vector[None, :], tile)
    tl.store(here + K + i[None, :], tile, mask=there)
    trio += matrix * 3 * K * S + first + K + k[:, None] * S + i[None, :]
    tl.store(trio, tile, mask=there)
    tl.store(trio + 2 * K * S, tile, mask=there)
    if own == 0:
        tl.store(factors + matrix * K * K + k[:, None] * K + k[None, :], small)
