"""Clouds of known geometry: chosen spectra, directions and manifolds, for demonstrations and tests of the measures.

Everything is float64 on the CPU and fixed by its ``seed``. ``width`` embeds a manifold into a wider space by a random
rotation, which changes no distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import OptionError


def gaussian(n: int, variances: Sequence[float], *, seed: int = 0) -> Float[Tensor, "n d"]:
    """Normal rows whose covariance has these eigenvalues, along randomly rotated axes, with mean zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor(variances, dtype=torch.float64).sqrt()
    rows = torch.randn(n, len(scale), generator=generator, dtype=torch.float64) * scale
    return rows @ _rotation(len(scale), generator)


def von_mises_fisher(n: int, width: int, concentration: float, *, seed: int = 0) -> Float[Tensor, "n d"]:
    """Unit vectors with density proportional to ``exp(concentration * x_0)`` (Wood's rejection sampling)."""
    generator = torch.Generator().manual_seed(seed)
    k, d = concentration, width
    b = (d - 1) / (2 * k + (4 * k * k + (d - 1) ** 2) ** 0.5)
    x0 = (1 - b) / (1 + b)
    c = k * x0 + (d - 1) * torch.log(torch.tensor(1 - x0 * x0, dtype=torch.float64)).item()
    found = torch.zeros(0, dtype=torch.float64)
    beta = (d - 1) / 2
    while len(found) < n:
        z = _beta(2 * n, beta, generator)
        w = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        u = torch.rand(2 * n, generator=generator, dtype=torch.float64)
        found = torch.cat([found, w[k * w + (d - 1) * torch.log1p(-x0 * w) - c >= u.log()]])
    w = found[:n, None]
    side = torch.randn(n, d - 1, generator=generator, dtype=torch.float64)
    side = side / side.norm(dim=1, keepdim=True)
    return torch.cat([w, (1 - w * w).clamp_min(0).sqrt() * side], dim=1)


def vmf_mean_cosine(width: int, concentration: float) -> float:
    """The expected cosine of two independent such vectors: ``(I_{d/2}(k) / I_{d/2-1}(k))^2``."""
    from scipy.special import ive

    return float((ive(width / 2, concentration) / ive(width / 2 - 1, concentration)) ** 2)


def flat_torus(n: int, dimension: int, *, width: int | None = None, seed: int = 0) -> Float[Tensor, "n w"]:
    """Uniform points on a product of unit circles: flat, without boundary, in 2 * dimension coordinates."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(n, dimension, generator=generator, dtype=torch.float64)
    return _embed(torch.cat([angle.cos(), angle.sin()], dim=1), width, generator)


def sphere(
    n: int, dimension: int, *, radius: float = 1.0, width: int | None = None, seed: int = 0
) -> Float[Tensor, "n w"]:
    """Uniform points on the sphere of that dimension; |II| = sqrt(dimension) / radius, mean curvature 1 / radius."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dimension + 1, generator=generator, dtype=torch.float64)
    return _embed(radius * rows / rows.norm(dim=1, keepdim=True), width, generator)


def ball(n: int, dimension: int, *, width: int | None = None, seed: int = 0) -> Float[Tensor, "n w"]:
    """Uniform points in the unit ball of that dimension."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
    length = torch.rand(n, 1, generator=generator, dtype=torch.float64) ** (1 / dimension)
    return _embed(length * rows / rows.norm(dim=1, keepdim=True), width, generator)


def random_walk(n: int, width: int, *, seed: int = 0) -> Float[Tensor, "n d"]:
    """Sums of independent normal steps."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator, dtype=torch.float64).cumsum(dim=0)


def _beta(n: int, shape: float, generator: torch.Generator) -> Tensor:
    """Beta(shape, shape) for whole or half shapes, as a ratio of sums of squares of normals."""
    degrees = round(2 * shape)
    a = torch.randn(n, degrees, generator=generator, dtype=torch.float64).square().sum(dim=1)
    b = torch.randn(n, degrees, generator=generator, dtype=torch.float64).square().sum(dim=1)
    return a / (a + b)


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def _embed(rows: Tensor, width: int | None, generator: torch.Generator) -> Tensor:
    if width is None:
        return rows
    if width < rows.shape[1]:
        raise OptionError(f"this manifold needs width {rows.shape[1]} or more, got {width}")
    q, _ = torch.linalg.qr(torch.randn(width, rows.shape[1], generator=generator, dtype=torch.float64))
    return rows @ q.T
