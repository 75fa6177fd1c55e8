"""What kernels have in common whose programs share a matrix: how they wait for one another, and a reflection.

This module needs Triton; other kernels import it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1e-280)  # squares of a matrix of entries about one below which a tail counts as zero


@triton.jit
def arrive(counter):
    """Let the other programs of the matrix know that this one has written what they wait for."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    """What any program of the matrix wrote before it arrived is seen from here on.

    One thread asks, and acquires what the others released; all others of its program follow it through the barrier.
    """
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@triton.jit
def reflection(alpha, tail):
    """Of a column below its diagonal, its first entry and the squares of the rest: what stays of it, the factor tau,
    and what makes the first entry of the reflector one."""
    flat = tail <= TINY  # not so for NaN, which must go on
    size = tl.sqrt(tl.where(flat, 1.0, alpha * alpha + tail))
    beta = tl.where(alpha > 0, -size, size)
    tau = tl.where(flat, 0.0, (beta - alpha) / beta)
    scale = tl.where(flat, 0.0, 1.0 / (alpha - beta))
    return tl.where(flat, alpha, beta), tau, scale
