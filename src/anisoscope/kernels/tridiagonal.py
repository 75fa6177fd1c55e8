"""Kernels that bring many symmetric matrices to tridiagonal form at once.

Libraries take matrices one after another, and one matrix of a thousand columns keeps a GPU waiting. Here some programs
share a matrix, so that all matrices go through their columns together. Programs of a matrix wait for one another, so
all of them must be running at once: never more programs than fit on the GPU, unless each has a matrix of its own. No
sum depends on which program comes first. Numbers and widths of matrices are ordinary arguments: each kernel is compiled
once.

This module needs Triton; ``measures.tridiagonal`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

PANEL = 32
"""Columns that are reduced before the rest of a matrix hears of them."""
TINY = tl.constexpr(1e-280)  # squares of a matrix of entries about one below which a tail counts as zero


@triton.jit
def _arrive(counter):
    """Let the other programs of the matrix know that this one has written what they wait for."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait(counter, target):
    """What any program of the matrix wrote before it arrived is seen from here on.

    One thread asks, and acquires what the others released; all others of its program follow it through the barrier.
    """
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _reflection(alpha, tail):
    """Of a column below its diagonal, its first entry and the squares of the rest: what stays of it, the factor tau,
    and what makes the first entry of the reflector one."""
    flat = tail <= TINY  # not so for NaN, which must go on
    size = tl.sqrt(tl.where(flat, 1.0, alpha * alpha + tail))
    beta = tl.where(alpha > 0, -size, size)
    tau = tl.where(flat, 0.0, (beta - alpha) / beta)
    scale = tl.where(flat, 0.0, 1.0 / (alpha - beta))
    return tl.where(flat, alpha, beta), tau, scale


@triton.jit
def _first_block(row, own, P, R: tl.constexpr):
    """The first block of rows of a program from this row on; a row is always with the same program."""
    begin = row // R
    return begin + (own + P - begin % P) % P


@triton.jit
def _tile(a, block, blocks, c, S, R: tl.constexpr):
    """Columns c of a block of rows, up to the end of the square on the diagonal; nothing beyond the last block."""
    there = tl.minimum(block, blocks - 1) * R
    end = tl.where(block < blocks, there + R, 0)
    places = tl.arange(0, R)[:, None] * S + c[None, :]
    return tl.load(a + there * S + places, mask=(c < end)[None, :], other=0.0)


@triton.jit
def _entries(x, block, blocks, R: tl.constexpr):
    """Of the column in a block of rows."""
    return tl.load(x + tl.minimum(block, blocks - 1) * R + tl.arange(0, R), cache_modifier=".cg")


@triton.jit
def _share_of_column(
    a, v, w, diagonal, x, across, down, sums, squares, forms, own, n, room, S, P, done, columns,
    tau, scale, with_v, with_w, row_v, row_w,
    PP: tl.constexpr, K: tl.constexpr, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a program does to its own rows: the companion of the column before, then column ``done``, and their sums."""
    k = tl.arange(0, K)
    q = tl.arange(0, PP)
    part = tl.arange(0, PARTS)
    reach = part // H * C  # where the chunk of a part begins
    share = tl.cdiv(tl.cdiv(n, P), B) * B
    start = own * share
    stop = tl.minimum(start + share, n)
    bound = tl.where(done > 0, stop, 0)
    programs = tl.where(done > 0, P, 0)
    at = tl.minimum(done, n - 1)
    square = tl.zeros((B,), dtype=tl.float64)
    last_v = tl.zeros((B,), dtype=tl.float64)
    last_w = tl.zeros((B,), dtype=tl.float64)
    all_v = tl.zeros((K, B), dtype=tl.float64)
    all_w = tl.zeros((K, B), dtype=tl.float64)
    for low in range(start, stop, B):
        i = low + tl.arange(0, B)
        # Loads are masked by what is aligned; what they bring beyond the share or before the column is left out.
        there = i < room
        earlier = (k < done - 1)[:, None] & there[None, :]
        tile_v = tl.load(v + k[:, None] * S + i[None, :], mask=earlier, other=0.0)
        tile_w = tl.load(w + k[:, None] * S + i[None, :], mask=earlier, other=0.0)
        shared = (q < programs)[:, None] & there[None, :]
        parts = tl.load(across + q[:, None] * S + i[None, :], mask=shared, other=0.0, cache_modifier=".cg")
        before = reach[:, None] <= tl.where(there, i, -1)[None, :]
        along = tl.load(down + part[:, None] * S + i[None, :], mask=before, other=0.0, cache_modifier=".cg")
        one_v = tl.load(x + i, mask=there, other=0.0)
        value = tl.load(a + at * S + i, mask=there, other=0.0)
        # What all programs need of that companion: its entry in the row of this column.
        form = tl.load(forms + q, mask=q < programs, other=0.0, cache_modifier=".cg")
        corner = tl.load(across + q * S + at, mask=q < programs, other=0.0, cache_modifier=".cg")
        central = reach <= tl.where(done > 0, at, -1)
        middle = tl.sum(tl.load(down + part * S + at, mask=central, other=0.0, cache_modifier=".cg"), axis=0)
        alpha = -0.5 * tau * tau * (tl.sum(form, axis=0) - 2 * tl.sum(with_v * with_w, axis=0))
        middle += tl.sum(corner, axis=0) - tl.sum(row_v * with_w + row_w * with_v, axis=0)
        middle = tau * middle + alpha

        live = (i < bound) & (i >= done)
        one_v = tl.where(live, tl.where(i == done, 1.0, one_v * scale), 0.0)
        product = tl.sum(along, axis=0) + tl.sum(parts, axis=0)
        product -= tl.sum(tile_v * with_w[:, None] + tile_w * with_v[:, None], axis=0)
        one_w = tl.where(live, tau * product + alpha * one_v, 0.0)
        tl.store(v + (done - 1) * S + i, one_v, mask=i < bound)
        tl.store(w + (done - 1) * S + i, one_w, mask=i < bound)
        value -= tl.sum(tile_v * row_w[:, None] + tile_w * row_v[:, None], axis=0) + (one_v * middle + one_w)
        more = (i < tl.where(done < columns, stop, 0)) & (i >= done)
        tl.store(x + i, value, mask=more)
        tl.store(diagonal + i, value, mask=more & (i == done))
        tail = tl.where(more & (i >= done + 2), value, 0.0)
        square += tail * tail
        last_v += one_v * tail
        last_w += one_w * tail
        all_v += tile_v * tail[None, :]
        all_w += tile_w * tail[None, :]
    place = sums + own * 2 * K + k
    tl.store(place, tl.where(k == done - 1, tl.sum(last_v, axis=0), tl.sum(all_v, axis=1)))
    tl.store(place + K, tl.where(k == done - 1, tl.sum(last_w, axis=0), tl.sum(all_w, axis=1)))
    tl.store(squares + own, tl.sum(square, axis=0))


@triton.jit
def _earlier_columns(v, w, sums, n, S, P, done, PP: tl.constexpr, K: tl.constexpr):
    """Of reflectors and companions before column ``done``: products with its tail, by program, and their next row."""
    k = tl.arange(0, K)
    q = tl.arange(0, PP)
    whose = (q < P)[:, None] & (k < done)[None, :]
    place = sums + q[:, None] * 2 * K + k[None, :]
    sum_v = tl.load(place, mask=whose, other=0.0, cache_modifier=".cg")
    sum_w = tl.load(place + K, mask=whose, other=0.0, cache_modifier=".cg")
    row = k < tl.where(done + 1 < n, done, 0)
    row_v = tl.load(v + k * S + done + 1, mask=row, other=0.0, cache_modifier=".cg")
    row_w = tl.load(w + k * S + done + 1, mask=row, other=0.0, cache_modifier=".cg")
    return sum_v, sum_w, row_v, row_w


@triton.jit
def _share_of_product(
    a, x, across, down, forms, coming, x_c, x_r, scale, n, own, room, S, P, done,
    R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program's blocks of rows times the reflector: what is below the diagonal counts for both its places.

    By chunks of C columns, L of which one of H warps has at a time. Sums along rows are left apart by warp, so that no
    warp waits for another. ``coming`` is the first tile, ``x_c`` and ``x_r`` what belongs to it. With STAGES, tiles
    after it are on their way in shared memory, so many of them less one; without, one is, in registers. ``a`` does not
    change while a panel is reduced; the column does, and must not come from a cache of the processor's own.
    """
    blocks = tl.cdiv(n, R)
    form = tl.zeros((R, H), dtype=tl.float64)
    beside = tl.zeros((C,), dtype=tl.float64)
    for start in range(0, n, C):
        c = start + tl.arange(0, C)
        begin = _first_block(tl.maximum(done + 1, start), own, P, R)
        if start > 0:
            x_r = _entries(x, begin, blocks, R)
            if STAGES == 1:
                coming = _tile(a, begin, blocks, c, S, R)
        v_c = tl.where(c > done + 1, x_c * scale, tl.where(c == done + 1, 1.0, 0.0))
        x_c = tl.load(x + c + C, mask=c + C < room, other=0.0, cache_modifier=".cg")
        below = tl.zeros((C,), dtype=tl.float64)
        for block in tl.range(begin, blocks, P, num_stages=STAGES):
            r = block * R + tl.arange(0, R)
            v_r = tl.where(r > done + 1, x_r * scale, tl.where(r == done + 1, 1.0, 0.0))
            if STAGES > 1:
                tile = tl.load(
                    a + block * R * S + tl.arange(0, R)[:, None] * S + c[None, :],
                    mask=(c < block * R + R)[None, :], other=0.0,
                )  # fmt: skip
            else:
                tile = coming
                coming = _tile(a, block + P, blocks, c, S, R)
            x_r = _entries(x, block + P, blocks, R)
            along = tl.sum(tl.sum(tl.reshape(tile * v_c[None, :], (R, C // (L * H), H, L)), axis=1), axis=2)
            # All of the square on the diagonal has been counted.
            below += tl.where(c < block * R, tl.sum(tile * v_r[:, None], axis=0), 0.0)
            tl.store(down + (start // C * H + tl.arange(0, H))[None, :] * S + r[:, None], along)
            form += along * v_r[:, None]
        tl.store(across + own * S + c, below, mask=c < room)
        beside += below * v_c
    tl.store(forms + own, tl.sum(tl.sum(form, axis=1), axis=0) + tl.sum(beside, axis=0))


@triton.jit(do_not_specialize=["D", "columns", "met", "P"])
def reduce_panel(
    a, pairs, diagonal, off, taus, x, across, down, sums, squares, forms, counter, D, S, first, columns, met, P,
    PP: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of matrices ``a`` to tridiagonal form, as LAPACK's dlatrd; ``P`` programs a matrix.

    Matrices have S rows and columns, a multiple of 16, and vectors S entries, all of them zero beyond D, so that one
    compiled kernel is right for all widths. ``pairs``, ``[matrices, 2, K, S]``, gets reflectors v and companions w,
    for ``a - v w^T - w v^T``; ``a`` stays as it is, and of it rows are read up to their diagonal, and row j from there
    on. Programs of a matrix, PP at most, meet twice a column: when the column is known, of which each updates its own
    share, and when the product of ``a`` with the reflector is, for which each takes every P-th block of R rows, C of
    their columns at a time.

    Scratch: ``x`` the column; ``down`` sums along rows of ``a``, by chunk and warp, PARTS in all; ``across`` sums along
    columns, by program; ``sums``, ``squares``, ``forms`` small products, by program. Rows and columns count from
    ``first``.
    """
    matrix = (tl.program_id(0) // P).to(tl.int64)
    own = tl.program_id(0) % P
    n = D - first
    room = S - first
    a += matrix * S * S + first * S + first
    v = pairs + matrix * 2 * K * S + first
    w = v + K * S
    diagonal += matrix * S + first
    off += matrix * S + first
    taus += matrix * S + first
    x += matrix * S + first
    down += matrix * PARTS * S + first
    across += matrix * P * S + first
    sums += matrix * P * 2 * K
    squares += matrix * P
    forms += matrix * P
    counter += matrix
    q = tl.arange(0, PP)
    c = tl.arange(0, C)
    blocks = tl.cdiv(n, R)
    tau = tl.zeros((), dtype=tl.float64)
    scale = tl.zeros((), dtype=tl.float64)
    with_v = tl.zeros((K,), dtype=tl.float64)
    with_w, row_v, row_w = with_v, with_v, with_v
    for done in range(0, columns + 1):
        _share_of_column(
            a, v, w, diagonal, x, across, down, sums, squares, forms, own, n, room, S, P, done, columns,
            tau, scale, with_v, with_w, row_v, row_w, PP, K, B, C, H, PARTS,
        )  # fmt: skip
        if done < columns:
            _arrive(counter)
            begin = _first_block(done + 1, own, P, R)
            coming = _tile(a, begin, blocks, c, S, R)  # while the others arrive
            _wait(counter, P * (met + 2 * done + 1))

            # Everything that is asked for at once: each answer is a long way off.
            tail = tl.load(squares + q, mask=q < P, other=0.0, cache_modifier=".cg")
            alpha = tl.load(x + done + 1, mask=done + 1 < n, other=0.0, cache_modifier=".cg")
            x_c = tl.load(x + c, mask=c < room, other=0.0, cache_modifier=".cg")
            x_r = _entries(x, begin, blocks, R)
            sum_v, sum_w, row_v, row_w = _earlier_columns(v, w, sums, n, S, P, done, PP, K)
            beta, tau, scale = _reflection(alpha, tl.sum(tail, axis=0))
            with_v = scale * tl.sum(sum_v, axis=0) + row_v
            with_w = scale * tl.sum(sum_w, axis=0) + row_w
            if own == 0:
                tl.store(off + done, beta)
                tl.store(taus + done, tau)
            _share_of_product(
                a, x, across, down, forms, coming, x_c, x_r, scale, n, own, room, S, P, done, R, C, H, L, STAGES
            )  # fmt: skip
            _arrive(counter)
            _wait(counter, P * (met + 2 * done + 2))
