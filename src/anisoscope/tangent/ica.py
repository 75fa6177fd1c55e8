"""FastICA (symmetric, log-cosh) on whitened rows: directions along which rows are least Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

GAUSSIAN_LOGCOSH = 0.3745672075  # E log cosh of a standard normal variable
BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class Components:
    """Unmixing rows ``(j, j)`` in whitened coordinates, the least Gaussian one first, and how far from Gaussian.

    ``negentropy`` is ``(E log cosh s - E log cosh nu)^2`` with nu standard normal, up to a constant the usual
    approximation of a component's negentropy.
    """

    unmixing: Float[Tensor, "j j"]
    negentropy: Float[Tensor, "j"]
    iterations: int
    converged: bool


def fast_ica(
    white: Float[Tensor, "n j"],
    *,
    seed: int = 0,
    start: Float[Tensor, "j j"] | None = None,
    max_iter: int = 200,
    tolerance: float = 1e-4,
) -> Components:
    """Independent components of rows that have mean zero and unit covariance; ``start`` is an earlier unmixing.

    Ends when no component turns by more than ``1 - |cos| <= tolerance`` in one iteration.
    """
    j = white.shape[1]
    if start is None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(j, j, generator=generator, dtype=torch.float64)
    unmixing = _decorrelated(start.to(white.device).double())
    converged, iterations = False, 0
    while iterations < max_iter and not converged:
        iterations += 1
        pull, slope = torch.zeros_like(unmixing), unmixing.new_zeros(j)
        for part in white.split(BLOCK_ROWS):
            bent = torch.tanh(part @ unmixing.T.to(white.dtype))
            pull += (bent.T @ part).double()
            slope += (1 - bent.square()).sum(dim=0).double()
        turned = _decorrelated((pull - slope[:, None] * unmixing) / len(white))
        converged = float((1 - (turned * unmixing).sum(dim=1).abs()).max()) <= tolerance
        unmixing = turned
    negentropy = _negentropy(white, unmixing)
    order = negentropy.argsort(descending=True, stable=True)
    return Components(unmixing[order], negentropy[order], iterations, converged)


def _decorrelated(rows: Tensor) -> Tensor:
    """The nearest orthogonal matrix: ``(W W^T)^-1/2 W``."""
    left, _, right = torch.linalg.svd(rows)
    return left @ right


def _negentropy(white: Tensor, unmixing: Tensor) -> Tensor:
    total = unmixing.new_zeros(len(unmixing))
    for part in white.split(BLOCK_ROWS):
        size = (part @ unmixing.T.to(white.dtype)).abs()
        total += (size + torch.log1p(torch.exp(-2 * size)) - math.log(2)).sum(dim=0).double()  # log cosh, no overflow
    return (total / len(white) - GAUSSIAN_LOGCOSH).square()
