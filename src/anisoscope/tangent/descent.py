"""The two half steps of semi-NMF, each of which lowers ``||A - Z C||^2`` or leaves it. Codes lie here as ``(K,N)``.

Rows and codes are multiplied in the type they come in; everything of size K x K is float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CACHE_ROWS = 1024  # codes swept at a time on a CPU, so that K x 1024 of them stay in its cache
BLOCK_ROWS = 8192
RESEED_ROWS = 4096  # rows looked at for a new direction


def swept(
    codes: Float[Tensor, "k n"], cross: Float[Tensor, "k n"], gram: Float[Tensor, "k k"], sweeps: int
) -> Float[Tensor, "k n"]:
    """``sweeps`` rounds over the codes, those of one concept after another set to their optimum, the others fixed.

    ``cross = C A^T`` and ``gram = C C^T``. Codes of a concept of length zero become zero.
    """
    return _sweep_until(codes, cross, gram, sweeps, 0.0)


def _sweep_until(codes: Tensor, cross: Tensor, gram: Tensor, sweeps: int, settled: float) -> Tensor:
    own = gram.diagonal()
    usable = own > 0
    own = torch.where(usable, own, 1.0)
    weights = gram / own[:, None]
    weights.fill_diagonal_(0)
    weights, own = weights.to(codes.dtype), own.to(codes.dtype)
    out = torch.empty_like(codes)
    block = CACHE_ROWS if codes.device.type == "cpu" else max(codes.shape[1], 1)
    for at in range(0, codes.shape[1], block):
        z = (codes[:, at : at + block] * usable[:, None]).contiguous()
        target = cross[:, at : at + block] * (usable.to(codes.dtype) / own)[:, None]
        spare = torch.empty_like(z[0])
        for _ in range(sweeps):
            before = z.clone() if settled else z
            for k in range(len(z)):
                torch.addmv(target[k], z.T, weights[k], alpha=-1, out=spare)
                torch.clamp_min(spare, 0, out=z[k])
            if settled and float((z - before).norm()) <= settled * float(z.norm()):
                break
        out[:, at : at + block] = z
    return out


def solved(
    a_ND: Float[Tensor, "n d"], concepts: Float[Tensor, "k d"], sweeps: int, settled: float
) -> Float[Tensor, "k n"]:
    """Codes without earlier ones: sweeps until one moves them by at most ``settled`` of their length, or ``sweeps``.

    From the unconstrained solution with its negative part cut off, or from zero for rows where that is better: concepts
    that nearly cancel would take hundreds of sweeps from zero.
    """
    cross = concepts.to(a_ND.dtype) @ a_ND.T
    gram = concepts.double() @ concepts.double().T
    free = torch.linalg.pinv(gram, rtol=len(gram) * torch.finfo(a_ND.dtype).eps, hermitian=True).to(a_ND.dtype)
    codes = (free @ cross).clamp_min_(0)
    gain = 2 * (codes * cross).sum(dim=0) - (codes * (gram.to(a_ND.dtype) @ codes)).sum(dim=0)
    return _sweep_until(codes * (gain > 0), cross, gram, sweeps, settled)


def second_moment(codes: Float[Tensor, "k n"]) -> Float[Tensor, "k k"]:
    """``Z^T Z`` in float64."""
    total = torch.zeros(len(codes), len(codes), dtype=torch.float64, device=codes.device)
    for part in codes.split(BLOCK_ROWS, dim=1):
        wide = part.double()
        total += wide @ wide.T
    return total


def best_concepts(
    codes: Float[Tensor, "k n"], a_ND: Float[Tensor, "n d"], before: Float[Tensor, "k d"]
) -> Float[Tensor, "k d"]:
    """The concepts that fit these codes best."""
    return least_squares(second_moment(codes), (codes @ a_ND).double(), before, a_ND.dtype)


def least_squares(
    second: Float[Tensor, "k k"], pull: Float[Tensor, "k d"], before: Float[Tensor, "k d"], dtype: torch.dtype
) -> Float[Tensor, "k d"]:
    """Concepts that solve ``Z^T Z C = Z^T A``, as a step from ``before``; ``dtype`` is that of the products behind it.

    Where codes of two concepts are the same up to rounding, the step leaves their difference as it was: it still
    lowers the error, and nothing grows without bound.
    """
    size = second.diagonal().sqrt()
    size = torch.where(size > 0, size, 1.0)
    values, vectors = torch.linalg.eigh(second / size[:, None] / size[None, :])
    keep = values > len(values) * torch.finfo(dtype).eps * values[-1]
    gap = vectors[:, keep].T @ ((pull - second @ before) / size[:, None])
    return before + vectors[:, keep] @ (gap / values[keep][:, None]) / size[:, None]


def reseeded(
    a_ND: Float[Tensor, "n d"], concepts: Float[Tensor, "k d"], codes: Float[Tensor, "k n"], dead: Bool[Tensor, "k"]
) -> Float[Tensor, "k d"] | None:
    """Concepts without rows point at the rows that are fitted worst; None where all are fitted to rounding.

    Their codes are still zero, so that the error does not move.
    """
    step = max(1, a_ND.shape[0] // RESEED_ROWS)
    sample = a_ND[::step]
    left = sample - codes[:, ::step].T @ concepts.to(a_ND.dtype)
    worst = torch.linalg.vector_norm(left, dim=1)
    size = torch.linalg.vector_norm(sample, dim=1)
    order = worst.argsort(descending=True, stable=True)[: int(dead.sum())]
    real = worst[order] > 64 * torch.finfo(a_ND.dtype).eps * max(float(size.max()), 1e-30)
    if not bool(real.any()):
        return None
    new, places = concepts.clone(), dead.nonzero().reshape(-1)[: len(order)]
    new[places[real]] = left[order[real]].double()
    return new
