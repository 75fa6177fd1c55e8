"""Kernel of small symmetric eigenproblems: as many matrices at once as there are, where a library takes many steps.

Cyclic Jacobi: in each of P - 1 rounds of a sweep all P places stand in pairs, as in a tournament, and each pair turns
until it has nothing in common. This module needs Triton; ``measures.small_eigh`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(2e-16)  # off the diagonal, where the largest entry is one or more: not told from zero


@triton.jit
def _pairs(half, p, P: tl.constexpr):
    """The places that meet in one round, the lower first: those whose sum is twice ``half`` modulo P - 1. One meets
    itself there, and plays against the last place instead."""
    one = (half + p) % (P - 1)
    other = tl.where(p == 0, P - 1, (half + (P - 1) - p) % (P - 1))
    return tl.minimum(one, other), tl.maximum(one, other)


@triton.jit
def _turn(a, low, high, P: tl.constexpr):
    """Cosine and sine of the turn of each pair, its diagonal entries and what is left between them afterwards.

    Seven digits of the angle are enough: the next sweep takes what is left. The cosine must belong to it to the last
    digit, or vectors would lose their length. The larger entry goes to the lower place: among equal values that are
    not neighbours, one turn would undo what another did, sweep after sweep.
    """
    first, last = tl.load(a + low * P + low), tl.load(a + high * P + high)
    between = tl.load(a + low * P + high)
    turns = tl.abs(between) > TINY
    apart = last - first
    ratio = apart.to(tl.float32) / tl.where(turns, 2 * between, 1.0).to(tl.float32)
    size = 1 / (tl.abs(ratio) + tl.sqrt(1 + ratio * ratio))
    tangent = tl.where(turns, tl.where(ratio < 0, -size, size), 0.0).to(tl.float64)
    square = 1 + tangent * tangent
    cosine = tl.rsqrt(square.to(tl.float32)).to(tl.float64)
    error = 1 - square * cosine * cosine
    cosine += cosine * error * (0.5 + 0.375 * error)
    sine = tangent * cosine
    change = sine * (sine * apart - 2 * cosine * between)
    between = (cosine * cosine - sine * sine) * between - cosine * sine * apart
    first, last = first + change, last - change
    swap = turns & (apart > 0)
    return (
        tl.where(swap, sine, cosine),
        tl.where(swap, -cosine, sine),
        tl.where(swap, last, first),
        tl.where(swap, first, last),
        tl.where(swap, -between, between),
    )


@triton.jit
def _farthest(a, rows, columns):
    """The largest entry off the diagonal."""
    return tl.max(tl.max(tl.where(rows == columns, 0.0, tl.abs(a)), axis=1), axis=0)


@triton.jit
def _round(old, new, half, P: tl.constexpr):
    """One round: of each two pairs four entries, and of each pair two rows of vectors. What is read is not written, so
    that no thread reads what another has written already."""
    p = tl.arange(0, P // 2)
    low, high = _pairs(half, p[:, None], P)
    left, right = _pairs(half, p[None, :], P)
    c, s, first, last, between = _turn(old, low, high, P)
    d, t, _, _, _ = _turn(old, left, right, P)
    ll, lr = tl.load(old + low * P + left), tl.load(old + low * P + right)
    hl, hr = tl.load(old + high * P + left), tl.load(old + high * P + right)
    ll, lr, hl, hr = c * ll - s * hl, c * lr - s * hr, s * ll + c * hl, s * lr + c * hr
    ll, lr, hl, hr = d * ll - t * lr, t * ll + d * lr, d * hl - t * hr, t * hl + d * hr
    same = p[:, None] == p[None, :]
    tl.store(new + low * P + left, tl.where(same, first, ll))
    tl.store(new + low * P + right, tl.where(same, between, lr))
    tl.store(new + high * P + left, tl.where(same, between, hl))
    tl.store(new + high * P + right, tl.where(same, last, hr))
    for part in tl.static_range(2):
        places = P * P + part * (P // 2) + p[None, :]
        x, y = tl.load(old + places + low * P), tl.load(old + places + high * P)
        tl.store(new + places + low * P, c * x - s * y)
        tl.store(new + places + high * P, s * x + c * y)
    tl.debug_barrier()


@triton.jit
def decompose(matrices, values, vectors, scratch, SWEEPS: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """Eigenvalues, ascending, and eigenvectors of the symmetric part of each float64 matrix of K rows; P is a power of
    two, and ``scratch`` holds 4 P^2 numbers of each. Entries that are not finite end it too: values are NaN then, and
    vectors of no use."""
    at = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    rows, columns = i[:, None], i[None, :]
    inside = (rows < K) & (columns < K)
    matrix = matrices + at * K * K
    a = 0.5 * tl.load(matrix + rows * K + columns, mask=inside, other=0.0)
    a += 0.5 * tl.load(matrix + columns * K + rows, mask=inside, other=0.0)
    finite = tl.sum(tl.sum(tl.where(tl.abs(a) < float("inf"), 0, 1), axis=1), axis=0) == 0
    largest = tl.max(tl.max(tl.abs(a), axis=1), axis=0)
    # A power of two: nothing is rounded, and squares in the turns stay within range.
    exponent = largest.to(tl.int64, bitcast=True) & 0x7FF0000000000000
    unit = tl.maximum(exponent, 0x0010000000000000).to(tl.float64, bitcast=True)
    a = a * (1 / unit)
    tile = scratch + at * 4 * P * P
    tl.store(tile + rows * P + columns, a)
    tl.store(tile + P * P + rows * P + columns, tl.where(rows == columns, 1.0, 0.0).to(tl.float64))
    tl.debug_barrier()
    far = _farthest(a, rows, columns)
    sweep = 0
    now = 0
    while (sweep < SWEEPS) & (far > TINY):
        for turn in range(P - 1):
            _round(tile + now * 2 * P * P, tile + (1 - now) * 2 * P * P, (turn * (P // 2)) % (P - 1), P)
            now = 1 - now
        far = _farthest(tl.load(tile + now * 2 * P * P + rows * P + columns), rows, columns)
        sweep += 1
    tile += now * 2 * P * P
    # Zeros beyond K have met no one, and are not counted.
    own, other = tl.load(tile + rows * (P + 1)), tl.load(tile + columns * (P + 1))
    before = (columns < K) & ((other < own) | ((other == own) & (columns < rows)))
    place = tl.where(finite, tl.sum(tl.where(before, 1, 0), axis=1)[:, None], rows)
    tl.store(values + at * K + place, tl.where(finite, own * unit, float("nan")), mask=rows < K)
    tl.store(vectors + at * K * K + columns * K + place, tl.load(tile + P * P + rows * P + columns), mask=inside)
