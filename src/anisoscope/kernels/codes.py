"""Kernels of semi-NMF for many fits at once: rounds over the codes, the small inverse of a half step, and its account.

A row's codes depend on no other row's, so that those of a row stay in registers through all rounds; launched concept by
concept the same work is a hundred small kernels. Everything of size K x K is float64.

This module needs Triton; ``tangent.sweeps`` and ``tangent.visits`` import it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRIES = 8192
"""Of all concepts of a fit that one program adds up at a time: each answer of the memory is a long way off."""


@triton.jit
def rounds(
    codes, out, cross, gram, inverse, active, n,
    K: tl.constexpr, P: tl.constexpr, S: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """``S`` rounds over the codes of each fit; those of a fit that is not active stay as they are.

    ``inverse`` is one over the squared length of each concept, and zero for one of length zero, whose codes become
    zero. Codes and ``cross`` are of one type, float32 or float64.
    """
    fit = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * B + tl.arange(0, B)
    concepts = tl.arange(0, P)
    inside = (concepts[:, None] < K) & (columns[None, :] < n)
    places = fit * K * n + concepts[:, None] * n + columns[None, :]
    z = tl.load(codes + places, mask=inside, other=0.0)
    if tl.load(active + fit):
        scale = tl.load(inverse + fit * K + concepts, mask=concepts < K, other=0.0)
        aim = tl.load(cross + places, mask=inside, other=0.0) * scale.to(z.dtype)[:, None]
        z = tl.where((scale > 0)[:, None], z, 0.0)
        for _ in range(S):
            for k in range(K):
                row = tl.load(gram + fit * K * K + k * K + concepts, mask=concepts < K, other=0.0)
                row = row * tl.load(inverse + fit * K + k)
                row = tl.where(concepts == k, 0.0, row).to(z.dtype)
                here = (concepts == k)[:, None]
                value = tl.sum(tl.where(here, aim, 0.0) - row[:, None] * z, axis=0)
                z = tl.where(here, tl.maximum(value, 0.0)[None, :], z)
    tl.store(out + places, z, mask=inside)


@triton.jit
def inverses(second, out, good, active, limit, K: tl.constexpr, P: tl.constexpr):
    """The inverse of each symmetric positive matrix, by elimination once its diagonal is one; zero unless it is good.

    Good: no entry of the diagonal is zero, and the condition (in Frobenius norms) is below ``limit``. The inverse of a
    fit that is not active is zero too, so that nothing moves there.
    """
    fit = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (rows < K) & (columns < K)
    places = fit * K * K + rows * K + columns
    a = tl.load(second + places, mask=inside, other=0.0)
    own = tl.sum(tl.where(rows == columns, a, 0.0), axis=1)
    alive = tl.min(tl.where(tl.arange(0, P) < K, own, 1.0), axis=0) > 0
    root = tl.sqrt(tl.where(own > 0, own, 1.0))
    a = tl.where(inside, a / root[:, None] / root[None, :], tl.where(rows == columns, 1.0, 0.0))
    before = tl.sum(tl.sum(tl.where(inside, a * a, 0.0), axis=1), axis=0)
    least = 1.0
    for k in range(K):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(tl.arange(0, P) == k, row, 0.0), axis=0)
        least = tl.minimum(least, pivot.to(tl.float32))
        pivot = tl.where(pivot > 0, pivot, 1.0)
        rest = a - column[:, None] * row[None, :] / pivot
        on_row, on_column = rows == k, columns == k
        rest = tl.where(on_row, row[None, :] / pivot, tl.where(on_column, -column[:, None] / pivot, rest))
        a = tl.where(on_row & on_column, 1.0 / pivot, rest)
    after = tl.sum(tl.sum(tl.where(inside, a * a, 0.0), axis=1), axis=0)
    sound = alive & (least > 0) & (tl.sqrt(before) * tl.sqrt(after) < limit)
    wanted = sound & (tl.load(active + fit) != 0)
    a = tl.where(wanted, a / root[:, None] / root[None, :], 0.0)
    tl.store(out + places, a, mask=inside)
    tl.store(good + fit, sound)


@triton.jit
def account(
    pull, second, own, met, concepts, gram, fresh, fresh_gram, size, good,
    active, sound, error, iterations, pace, limit, ahead, again, worth, D, tolerance,
    K: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    GROW: tl.constexpr, SHRINK: tl.constexpr, GROW_LIMIT: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    """The error ``size - 2 <pull, fresh> + <second, fresh_gram>`` over ``size``, whether it stays, and what is next.

    A round that went ahead is taken back where its error is above that of the round before or that of the codes before
    they went on, ``size - 2 met + <own, gram>`` over ``size``: ``fresh`` and ``fresh_gram`` become what ``concepts``
    and ``gram`` were, the round is to be done again, and nothing else is told of it.

    A fit has settled when a round lowers its error by at most ``tolerance`` of it for each plain round that it is
    surely worth, as in ``descending.Limits``.
    """
    fit = tl.program_id(0).to(tl.int64)
    if tl.load(active + fit):
        rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
        places = fit * K * K + rows * K + columns
        inside = (rows < K) & (columns < K)
        former = tl.load(gram + places, mask=inside, other=0.0)
        held = tl.load(second + places, mask=inside, other=0.0) * tl.load(fresh_gram + places, mask=inside, other=0.0)
        total = tl.sum(tl.sum(held, axis=1), axis=0)
        swept = tl.load(own + places, mask=inside, other=0.0) * former
        reached = tl.sum(tl.sum(swept, axis=1), axis=0) - 2 * tl.load(met + fit)
        both = tl.zeros((P, W), dtype=tl.float64)
        for start in range(0, D, W):
            k = start + tl.arange(0, W)[None, :]
            there = (rows < K) & (k < D)
            at = fit * K * D + rows * D + k
            both += tl.load(pull + at, mask=there, other=0.0) * tl.load(fresh + at, mask=there, other=0.0)
        total -= 2 * tl.sum(tl.sum(both, axis=1), axis=0)
        whole = tl.load(size + fit)
        now = tl.maximum(whole + total, 0.0) / whole
        before = tl.load(error + fit)
        fine = tl.load(good + fit) != 0
        share = tl.load(ahead + fit)
        went = share > 0
        value = 1.0 + share * tl.load(worth + fit)
        least = tolerance * tl.maximum(SURE * value, 1.0) * before
        most = tl.minimum(tl.maximum(whole + reached, 0.0) / whole, before)
        back = went & (now > most)
        if back:
            tl.store(fresh_gram + places, former, mask=inside)
            for start in range(0, D, W):
                k = start + tl.arange(0, W)[None, :]
                there = (rows < K) & (k < D)
                at = fit * K * D + rows * D + k
                tl.store(fresh + at, tl.load(concepts + at, mask=there, other=0.0), mask=there)
        speed, most_speed = tl.load(pace + fit), tl.load(limit + fit)
        faster = tl.where(went, tl.minimum(most_speed, GROW * speed), speed)
        higher = tl.where(went, tl.minimum(1.0, GROW_LIMIT * most_speed), most_speed)
        next_speed = tl.where(back, speed / SHRINK, faster)
        tl.store(pace + fit, next_speed)
        tl.store(limit + fit, tl.where(back, speed, higher))
        tl.store(ahead + fit, tl.where(back, 0.0, next_speed))
        tl.store(again + fit, back)
        tl.store(worth + fit, value)
        tl.store(sound + fit, (tl.load(sound + fit) != 0) & fine)
        tl.store(iterations + fit, tl.load(iterations + fit) + tl.where(back, 0.0, 1.0))
        tl.store(error + fit, tl.where(back, before, now))
        tl.store(active + fit, ((before - now > least) | back) & fine)
