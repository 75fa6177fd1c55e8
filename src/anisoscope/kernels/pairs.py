"""Kernel of sums over all pairs of eigenvalues, which are never written.

This module needs Triton; ``measures.stacked`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLACES = 32
"""Eigenvalues on either side of a tile of pairs."""


@triton.jit
def bias_sums(values, out, D, B: tl.constexpr):
    """Twice the degrees of freedom times ``spectrum.trace_bias`` of ``sum sigma`` and of ``sum sigma log sigma``, by
    site and by block of eigenvalues; float64. Zeros count for nothing."""
    block, blocks, site = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    i = block * B + tl.arange(0, B)
    a = tl.load(values + site * D + i, mask=i < D, other=0.0)
    safe_a = tl.where(a > 0, a, 1.0)
    root_a = tl.sqrt(safe_a)
    roots, logs = tl.zeros((B,), tl.float64), tl.zeros((B,), tl.float64)
    for start in range(0, D, B):
        j = start + tl.arange(0, B)
        b = tl.load(values + site * D + j, mask=j < D, other=0.0)
        safe_b = tl.where(b > 0, b, 1.0)
        root_b = tl.sqrt(safe_b)
        gap, both = safe_a[:, None] - safe_b[None, :], safe_a[:, None] + safe_b[None, :]
        close = tl.abs(gap) < 1e-5 * both
        apart, middle = tl.where(close, 1.0, gap), both / 2
        weight = a[:, None] * b[None, :] * tl.where(i[:, None] == j[None, :], 2.0, 1.0)
        bend = middle * tl.sqrt(middle)
        first = 0.5 / root_a[:, None] - 0.5 / root_b[None, :]
        second = (tl.log(safe_a) + 2)[:, None] / (4 * root_a)[:, None] - ((tl.log(safe_b) + 2) / (4 * root_b))[None, :]
        roots += tl.sum(tl.where(close, -0.25 / bend, first / apart) * weight, axis=1)
        logs += tl.sum(tl.where(close, -tl.log(middle) / (8 * bend), second / apart) * weight, axis=1)
    place = out + site * 2 * blocks + block
    tl.store(place, tl.sum(roots, axis=0))
    tl.store(place + blocks, tl.sum(logs, axis=0))
