"""Kernels for many symmetric matrices at once: to tridiagonal form, and what a tridiagonal matrix then gives.

Libraries take matrices one after another, and one matrix of a thousand columns keeps a GPU waiting. Here some programs
share a matrix, so that all matrices go through their columns together. Programs of a matrix wait for one another, so
all of them must be running at once: never more programs than the GPU has multiprocessors, unless each has a matrix of
its own. No sum depends on which program comes first.

This module needs Triton; ``measures.tridiagonal`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

PANEL = 32
"""Columns that are reduced before the rest of a matrix hears of them."""
GROUP = 8
"""Steps of a Sturm sequence between two scalings; the length of what is given must be a multiple."""
POLES = 4
"""Poles that one program takes at a time."""
TINY = tl.constexpr(1e-280)  # squares of a matrix of entries about one below which a tail counts as zero


@triton.jit
def _meet(counter, target, P: tl.constexpr):
    """What any program of a matrix wrote before is seen by all of them after."""
    tl.debug_barrier()
    if P > 1:
        tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        while tl.load(counter, volatile=True) < target:
            pass
        tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
        tl.debug_barrier()


@triton.jit
def _reflection(x, squares, j, D, P: tl.constexpr, PP: tl.constexpr):
    """Of column j below its diagonal: what stays of it, the factor tau, and what makes its first entry one."""
    q = tl.arange(0, PP)
    tail = tl.sum(tl.load(squares + q, mask=q < P, other=0.0, cache_modifier=".cg"), axis=0)
    alpha = tl.load(x + j + 1, mask=j + 1 < D, other=0.0, cache_modifier=".cg")
    flat = tail <= TINY  # not so for NaN, which must go on
    size = tl.sqrt(tl.where(flat, 1.0, alpha * alpha + tail))
    beta = tl.where(alpha > 0, -size, size)
    tau = tl.where(flat, 0.0, (beta - alpha) / beta)
    scale = tl.where(flat, 0.0, 1.0 / (alpha - beta))
    return tl.where(flat, alpha, beta), tau, scale


@triton.jit(do_not_specialize=["columns", "met"])
def reduce_panel(
    a, pairs, diagonal, off, taus, x, across, down, sums, squares, forms, counter, D, first, columns, met,
    P: tl.constexpr, PP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of matrices ``a`` to tridiagonal form, as LAPACK's dlatrd; ``P`` programs a matrix.

    ``pairs``, ``[matrices, 2, K, D]``, gets reflectors v and companions w, for ``a - v w^T - w v^T``; ``a`` stays as it
    is, and of it rows are read up to the diagonal, and row j from there on. All that is left of ``a`` from ``first`` on
    must fit into W columns. Programs of a matrix meet twice a column: when the column is known, of which each updates
    its own share, and when the product of ``a`` with the reflector is, for which each takes every P-th block of R rows.

    Scratch: ``x`` the column; ``down`` sums along rows of ``a`` and ``across`` sums along columns, by program;
    ``sums``, ``squares``, ``forms`` small products, by program.
    """
    matrix = (tl.program_id(0) // P).to(tl.int64)
    own = tl.program_id(0) % P
    a += matrix * D * D
    v = pairs + matrix * 2 * K * D
    w = v + K * D
    x += matrix * D
    down += matrix * D
    across += matrix * P * D
    sums += matrix * P * 2 * K
    squares += matrix * P
    forms += matrix * P
    counter += matrix
    k = tl.arange(0, K)
    q = tl.arange(0, PP)
    share = tl.cdiv(tl.cdiv(D - first, P), B) * B
    start = first + own * share
    stop = tl.minimum(start + share, D)
    blocks = tl.cdiv(D - first, R)
    tau = tl.zeros((), dtype=tl.float64)
    scale = tl.zeros((), dtype=tl.float64)
    with_v = tl.zeros((K,), dtype=tl.float64)
    with_w = tl.zeros((K,), dtype=tl.float64)
    row_v = tl.zeros((K,), dtype=tl.float64)
    row_w = tl.zeros((K,), dtype=tl.float64)
    for done in range(0, columns + 1):
        j = first + done
        # The companion of the column before: its entry at j, which all need, then this program's share.
        known = j > first
        programs = tl.where(known, P, 0)
        bound = tl.where(known, stop, first)
        form = tl.sum(tl.load(forms + q, mask=q < programs, other=0.0, cache_modifier=".cg"), axis=0)
        alpha = -0.5 * tau * tau * (form - 2 * tl.sum(with_v * with_w, axis=0))
        at = tl.minimum(j, D - 1)
        corner = tl.load(down + at, mask=known, other=0.0, cache_modifier=".cg")
        corner += tl.sum(tl.load(across + q * D + at, mask=q < programs, other=0.0, cache_modifier=".cg"), axis=0)
        corner = tau * (corner - tl.sum(row_v * with_w + row_w * with_v, axis=0)) + alpha
        square = tl.zeros((B,), dtype=tl.float64)
        last_v = tl.zeros((B,), dtype=tl.float64)
        last_w = tl.zeros((B,), dtype=tl.float64)
        all_v = tl.zeros((K, B), dtype=tl.float64)
        all_w = tl.zeros((K, B), dtype=tl.float64)
        for low in range(start, stop, B):
            i = low + tl.arange(0, B)
            left = (i < stop) & (i >= j)
            live = (i < bound) & (i >= j)
            earlier = (k < done - 1)[:, None] & left[None, :]
            tile_v = tl.load(v + k[:, None] * D + i[None, :], mask=earlier, other=0.0)
            tile_w = tl.load(w + k[:, None] * D + i[None, :], mask=earlier, other=0.0)
            shared = (q < programs)[:, None] & live[None, :]
            parts = tl.load(across + q[:, None] * D + i[None, :], mask=shared, other=0.0, cache_modifier=".cg")
            product = tl.load(down + i, mask=live, other=0.0, cache_modifier=".cg") + tl.sum(parts, axis=0)
            one_v = tl.load(x + i, mask=live, other=0.0) * scale
            one_v = tl.where(live & (i == j), 1.0, one_v)
            less = tl.sum(tile_v * with_w[:, None] + tile_w * with_v[:, None], axis=0)
            one_w = tau * (product - less) + alpha * one_v
            one_w = tl.where(live, one_w, 0.0)
            tl.store(v + (done - 1) * D + i, one_v, mask=i < bound)
            tl.store(w + (done - 1) * D + i, one_w, mask=i < bound)
            value = tl.load(a + j.to(tl.int64) * D + i, mask=left, other=0.0)
            value -= tl.sum(tile_v * row_w[:, None] + tile_w * row_v[:, None], axis=0)
            value -= one_v * corner + one_w
            more = (i < tl.where(j < first + columns, stop, first)) & (i >= j)
            tl.store(x + i, value, mask=more)
            tl.store(diagonal + matrix * D + i, value, mask=more & (i == j))
            tail = tl.where(left & (i >= j + 2), value, 0.0)
            square += tail * tail
            last_v += one_v * tail
            last_w += one_w * tail
            all_v += tile_v * tail[None, :]
            all_w += tile_w * tail[None, :]
        if done < columns:
            newest = k == done - 1
            place = sums + own * 2 * K + k
            tl.store(place, tl.where(newest, tl.sum(last_v, axis=0), tl.sum(all_v, axis=1)))
            tl.store(place + K, tl.where(newest, tl.sum(last_w, axis=0), tl.sum(all_w, axis=1)))
            tl.store(squares + own, tl.sum(square, axis=0))
            _meet(counter, P * (met + 2 * done + 1), P)

            beta, tau, scale = _reflection(x, squares, j, D, P, PP)
            if own == 0:
                tl.store(off + matrix * D + j, beta)
                tl.store(taus + matrix * D + j, tau)
            # The product of the matrix with the reflector: what is below the diagonal counts for both its places.
            c = first + tl.arange(0, W)
            v_c = tl.load(x + c, mask=(c < D) & (c > j), other=0.0, cache_modifier=".cg") * scale
            v_c = tl.where(c == j + 1, 1.0, v_c)
            below = tl.zeros((W,), dtype=tl.float64)
            form_r = tl.zeros((R,), dtype=tl.float64)
            begin = (done + 1) // R + own
            r = first + begin * R + tl.arange(0, R)
            coming = tl.load(
                a + r[:, None] * D + c[None, :], mask=(r < D)[:, None] & (c[None, :] <= r[:, None]), other=0.0
            )
            x_r = tl.load(x + r, mask=(r < D) & (r > j), other=0.0, cache_modifier=".cg")
            for block in range(begin, blocks, P):
                tile = coming
                v_r = tl.where(r == j + 1, 1.0, x_r * scale)
                now = r
                r = first + (block + P) * R + tl.arange(0, R)
                coming = tl.load(
                    a + r[:, None] * D + c[None, :], mask=(r < D)[:, None] & (c[None, :] <= r[:, None]), other=0.0
                )
                x_r = tl.load(x + r, mask=(r < D) & (r > j), other=0.0, cache_modifier=".cg")
                along = tl.sum(tile * v_c[None, :], axis=1)
                tl.store(down + now, along, mask=now < D)
                form_r += along * v_r
                below += tl.sum(tl.where(c[None, :] < now[:, None], tile, 0.0) * v_r[:, None], axis=0)
            tl.store(across + own * D + c, below, mask=c < D)
            tl.store(forms + own, tl.sum(form_r, axis=0) + tl.sum(below * v_c, axis=0))
            # What the next column needs of the earlier ones, before anything is written over.
            whose = (q < P)[:, None] & (k < done)[None, :]
            place = sums + q[:, None] * 2 * K + k[None, :]
            row = k < tl.where(j + 1 < D, done, 0)
            row_v = tl.load(v + k * D + j + 1, mask=row, other=0.0, cache_modifier=".cg")
            row_w = tl.load(w + k * D + j + 1, mask=row, other=0.0, cache_modifier=".cg")
            with_v = scale * tl.sum(tl.load(place, mask=whose, other=0.0, cache_modifier=".cg"), axis=0) + row_v
            with_w = scale * tl.sum(tl.load(place + K, mask=whose, other=0.0, cache_modifier=".cg"), axis=0) + row_w
            _meet(counter, P * (met + 2 * done + 2), P)


@triton.jit
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


@triton.jit
def factor_shifted(diagonal, off, shifts, weights, least, ratios, shares, D, N, B: tl.constexpr):
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


@triton.jit
def sum_forms(rows, ratios, shares, out, n, D, N, B: tl.constexpr):
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


@triton.jit
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
