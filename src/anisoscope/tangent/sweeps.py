"""Half steps of semi-NMF for many fits at once: a few kernels on a GPU, a few products for each concept elsewhere."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device

MOST_CONCEPTS = 64  # more of them no longer fit into registers
TILE, COLUMNS_MOST, COLUMNS_LEAST = 2048, 256, 32  # codes and rows that one warp keeps in registers


def has_kernels(device: torch.device, rank: int) -> bool:
    """Whether the kernels serve: a GPU, Triton, and no more concepts than registers hold."""
    return rank <= MOST_CONCEPTS and kernels_run(device)


def swept_all(
    codes: Float[Tensor, "f k n"],
    cross: Float[Tensor, "f k n"],
    gram: Float[Tensor, "f k k"],
    sweeps: int,
    active: Bool[Tensor, "f"] | None = None,
) -> Float[Tensor, "f k n"]:
    """``descent.swept`` of several fits, of the active ones alone."""
    fits, rank, _ = codes.shape
    if active is None:
        active = _all_active(fits, codes.device)
    if has_kernels(codes.device, rank):
        return rounds(codes, cross, gram, sweeps, active)
    inverse = _inverse_sizes(gram)
    weights = gram * inverse[:, :, None]
    weights.diagonal(dim1=1, dim2=2).zero_()
    weights = weights.to(codes.dtype)
    target = cross * inverse.to(codes.dtype)[:, :, None]
    z = codes * (inverse > 0)[:, :, None]
    for _ in range(sweeps):
        for k in range(rank):
            at = slice(k, k + 1)
            z[:, at] = torch.baddbmm(target[:, at], weights[:, at], z, alpha=-1).clamp_min_(0)
    return torch.where(active[:, None, None], z, codes)


@on_its_device
def rounds(
    codes: Float[Tensor, "f k n"],
    cross: Float[Tensor, "f k n"],
    gram: Float[Tensor, "f k k"],
    sweeps: int,
    active: Bool[Tensor, "f"] | None = None,
) -> Float[Tensor, "f k n"]:
    """The same by the kernel: one warp a tile, so that no sum over concepts waits for another warp."""
    fits, rank, n = codes.shape
    places = power_of_two(rank)
    columns = min(COLUMNS_MOST, max(COLUMNS_LEAST, TILE // places))
    out = torch.empty_like(codes, memory_format=torch.contiguous_format)
    if active is None:
        active = _all_active(fits, codes.device)
    kernels_of("codes").rounds[(-(-n // columns), fits)](
        codes.contiguous(), out, cross.contiguous(), gram.contiguous(), _inverse_sizes(gram).contiguous(), active, n,
        K=rank, P=places, S=sweeps, B=columns, num_warps=1,
    )  # fmt: skip
    return out


def _inverse_sizes(gram: Float[Tensor, "f k k"]) -> Float[Tensor, "f k"]:
    """One over the squared length of each concept, zero for one of length zero: its codes become zero."""
    own = gram.diagonal(dim1=1, dim2=2)
    return torch.where(own > 0, own.reciprocal(), 0.0)


@functools.cache
def _all_active(fits: int, device: torch.device) -> Tensor:
    """Nobody writes into it."""
    return torch.ones(fits, dtype=torch.bool, device=device)


@on_its_device
def inverses(
    second: Float[Tensor, "f k k"], active: Bool[Tensor, "f"], limit: float
) -> tuple[Float[Tensor, "f k k"], Bool[Tensor, "f"]]:
    """Inverses of the active fits by the kernel, zero elsewhere; and which matrices are well conditioned."""
    fits, rank, _ = second.shape
    out, good = torch.empty_like(second), torch.empty_like(active)
    kernels_of("codes").inverses[(fits,)](second, out, good, active, limit, K=rank, P=power_of_two(rank))
    return out, good


def power_of_two(rank: int) -> int:
    """The least power of two that holds so many concepts."""
    return 1 << (rank - 1).bit_length()
