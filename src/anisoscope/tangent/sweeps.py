"""Rounds of semi-NMF's codes for many fits at once: one kernel on a GPU, a few products for each concept elsewhere.

A row's codes depend on no other row's, so that a GPU can hold those of a row in registers through all rounds; launched
concept by concept the same work is a hundred small kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_COLUMNS = 128
MOST_CONCEPTS = 64  # more of them no longer fit into registers


def swept_all(
    codes: Float[Tensor, "f k n"], cross: Float[Tensor, "f k n"], gram: Float[Tensor, "f k k"], sweeps: int
) -> Float[Tensor, "f k n"]:
    """``descent.swept`` of several fits. Concepts of length zero must not be among them."""
    own = gram.diagonal(dim1=1, dim2=2)
    weights = gram / own[:, :, None]
    weights.diagonal(dim1=1, dim2=2).zero_()
    weights = weights.to(codes.dtype)
    target = cross * own.reciprocal().to(codes.dtype)[:, :, None]
    fits, rank, n = codes.shape
    launch = _launcher() if codes.device.type == "cuda" and rank <= MOST_CONCEPTS else None
    if launch is not None:
        out = torch.empty_like(target)
        launch(codes.contiguous(), out, target, weights, fits, rank, n, sweeps)
        return out
    z = codes.clone()
    for _ in range(sweeps):
        for k in range(rank):
            at = slice(k, k + 1)
            z[:, at] = torch.baddbmm(target[:, at], weights[:, at], z, alpha=-1).clamp_min_(0)
    return z


@functools.cache
def _launcher() -> Callable[..., None] | None:
    """The kernel, or None where torch came without Triton."""
    try:
        triton: Any = importlib.import_module("triton")  # comes with torch where torch knows CUDA
        tl: Any = importlib.import_module("triton.language")
    except ImportError:
        return None

    def rounds(codes, out, target, weights, n, K: tl.constexpr, P: tl.constexpr, S: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
        fit = tl.program_id(1).to(tl.int64)
        columns = tl.program_id(0) * B + tl.arange(0, B)
        concepts = tl.arange(0, P)
        inside = (concepts[:, None] < K) & (columns[None, :] < n)
        places = fit * K * n + concepts[:, None] * n + columns[None, :]
        z = tl.load(codes + places, mask=inside, other=0.0)
        aim = tl.load(target + places, mask=inside, other=0.0)
        for _ in range(S):
            for k in range(K):
                row = tl.load(weights + fit * K * K + k * K + concepts, mask=concepts < K, other=0.0)
                here = (concepts == k)[:, None]
                value = tl.sum(tl.where(here, aim, 0.0) - row[:, None] * z, axis=0)
                z = tl.where(here, tl.maximum(value, 0.0)[None, :], z)
        tl.store(out + places, z, mask=inside)

    # A kernel looks its names up among those of its module.
    rounds.__globals__["tl"] = tl
    kernel: Any = triton.jit(rounds)

    def launch(
        codes: Tensor, out: Tensor, target: Tensor, weights: Tensor, fits: int, rank: int, n: int, sweeps: int
    ) -> None:
        grid = (triton.cdiv(n, BLOCK_COLUMNS), fits)
        padded = triton.next_power_of_2(rank)
        kernel[grid](codes, out, target, weights, n, K=rank, P=padded, S=sweeps, B=BLOCK_COLUMNS)

    return launch
