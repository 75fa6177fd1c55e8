"""Closed forms for the recovery of a tangent space and of a curvature, each with the limit in which it is exact.

A local cloud is ``x = p + T u + N q(u) + e``: tangent coordinates u, normal with variance ``spread^2``, normal part
``q_b = II_b(u, u) / 2``, noise e of standard deviation ``noise`` in each of the D directions of the space.
*Recovery* of the tangent space T (D,d) by a basis Q (D,K) is ``|T^T Q|^2 / d``, the mean squared cosine; what is lost
is its complement, the mean squared sine where K = d.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import OptionError
from anisoscope.theory.surfaces import Base


def recovery(basis: Float[Tensor, "w k"], tangent: Float[Tensor, "*n w d"]) -> float:
    """``|T^T Q|^2 / d``, averaged over the tangent spaces given: 1 where Q holds them, K/D for Q at random."""
    return float((tangent.double().mT @ basis.double()).square().sum(dim=(-2, -1)).mean()) / tangent.shape[-1]


def normal_form(base: Base) -> Float[Tensor, "b d d"]:
    """The second fundamental form along an orthonormal basis of all D - d normal directions."""
    d = base.tangent.shape[1]
    whole = torch.linalg.qr(base.tangent, mode="complete").Q
    return torch.einsum("wb,wij->bij", whole[:, d:], base.second)


def random_recovery(rank: int, width: int) -> float:
    """K/D: exact for a uniformly random basis, whatever the tangent space."""
    return rank / width


def random_recovery_variance(rank: int, dimension: int, width: int) -> float:
    """Variance of the recovery by a uniformly random basis, exact.

    ``tr(P_Q P_T)`` has variance ``2 d (D-d) K (D-K) / (D^2 (D-1) (D+2))``; for d = 1 that of Beta(K/2, (D-K)/2).
    """
    both = dimension * (width - dimension) * rank * (width - rank)
    return 2 * both / (width**2 * (width - 1) * (width + 2)) / dimension**2


def flat_loss(spread: float, noise: float, *, dimension: int, width: int, n: int) -> float:
    """Mean squared sine of PCA (K = d) on a flat cloud: ``g (l+1) / (l (l+g))``, 1 beyond the breaking noise.

    Signal-to-noise ``l = (spread/noise)^2`` and ``g = (D-d) / (n-d-2)``. Exact as the noise falls (there PCA is a
    regression, whence the d + 2), and the spiked-covariance limit as D and n grow together.
    """
    if noise == 0:
        return 0.0
    strength, ratio = (spread / noise) ** 2, _aspect(dimension, width, n)
    return ratio * (strength + 1) / (strength * (strength + ratio)) if strength**2 > ratio else 1.0


def breaking_noise(spread: float, *, dimension: int, width: int, n: int) -> float:
    """The noise ``spread g^(-1/4)`` above which no direction of the tangent is found in the limit of large D and n."""
    return spread * _aspect(dimension, width, n) ** -0.25


def _aspect(dimension: int, width: int, n: int) -> float:
    if n <= dimension + 2:
        raise OptionError(f"the law of PCA wants more than {dimension + 2} rows in dimension {dimension}, got {n}")
    return (width - dimension) / (n - dimension - 2)


def curved_loss(second: Float[Tensor, "b d d"], spread: float, noise: float, n: int) -> float:
    """Mean squared sine of PCA (K = d) on a curved and noisy cloud, to first order in 1/n.

    Odd moments vanish, so that infinitely many rows show the tangent exactly; of n rows the block between tangent and
    normal has entries of variance ``E[x_a^2 x_b^2] / (n-1)``, and each turns the basis by itself over the gap
    ``spread^2 - lambda_b`` of variances. ``lambda`` are the eigenvalues of the normal part's covariance
    ``spread^4/2 <II_b, II_c>``. For little curvature and no noise: ``(d+4)/(2d) |II|^2 spread^2 / (n-1)``.
    """
    d = second.shape[1]
    values, axes = torch.linalg.eigh(normal_covariance(second, spread))
    turned = torch.einsum("bij,bc->cij", second.double(), axes)
    size2 = turned.square().sum(dim=(1, 2))
    # Normal u: sum_a E[u_a^2 (q_b - E q_b)^2] = spread^6/4 (2d + 8) |II_b|^2
    curved = spread**6 / 4 * (2 * d + 8) * size2
    noisy = d * (noise**2 * values + (spread**2 + noise**2) * noise**2)
    gap = spread**2 - values
    if not bool((gap > 0).all()):
        raise OptionError("the normal part varies more than the tangent one: PCA does not find the tangent at all")
    return float(((curved + noisy) / gap.square()).sum()) / (n - 1) / d


def normal_covariance(second: Float[Tensor, "b d d"], spread: float) -> Float[Tensor, "b b"]:
    """Covariance of ``II(u, u) / 2`` for normal u: ``spread^4/2 <II_b, II_c>``."""
    return spread**4 / 2 * torch.einsum("bij,cij->bc", second.double(), second.double())


def breaking_curvature(second: Float[Tensor, "b d d"], spread: float) -> float:
    """The |II| at which this form, scaled, gives a normal direction the variance of a tangent one: PCA breaks there."""
    unit = second.double() / torch.linalg.vector_norm(second.double())
    largest = float(torch.linalg.eigvalsh(normal_covariance(unit, spread))[-1])
    return math.sqrt(spread**2 / largest)


def sphere_recovery(rank: int, dimension: int) -> float:
    """``K / (d+1)``: what ANY basis inside the d+1 directions of a whole sphere S^d holds of its tangent spaces.

    The tangents of a sphere average to ``d/(d+1)`` of the identity there, so that no single basis does better.
    """
    return min(rank / (dimension + 1), 1.0)


def sphere_recovery_variance(rank: int, dimension: int) -> float:
    """Variance of that share over the points of the sphere, exact: ``|Q^T n|^2`` of a normal n is Beta distributed."""
    m = dimension + 1
    return 2 * rank * (m - rank) / (m**2 * (m + 2)) / dimension**2


def attenuation(spread: float, noise: float) -> float:
    """The factor by which noise in the tangent coordinates shrinks a fitted II: ``(spread^2/(spread^2+noise^2))^2``.

    Errors in variables: given the noisy ``t``, u is normal about ``rho t``, and ``E[II(u,u) | t] = rho^2 II(t,t)`` plus
    a constant. Exact for normal u and known tangent directions, whatever II.
    """
    return (spread**2 / (spread**2 + noise**2)) ** 2


def ball_attenuation(dimension: int, radius: float, noise: float) -> float:
    """The same for u uniform in a ball and ``II`` a multiple of the identity, as on a cap of a sphere.

    ``var s / (var s + 4 noise^2 E s + 2 d noise^4)`` with ``s = |u|^2``; ``1 - (d+2)(d+4) (noise/radius)^2`` for little
    noise. It knows the noise in units of the neighbourhood's radius, and nothing of the curvature.
    """
    d = dimension
    mean = d * radius**2 / (d + 2)
    variance = 4 * d * radius**4 / ((d + 4) * (d + 2) ** 2)
    return variance / (variance + 4 * noise**2 * mean + 2 * d * noise**4)


def sphere_curvature_excess(dimension: int, radius: float) -> float:
    """Relative excess of a quadratic fit's |II| on a cap of that radius of the unit sphere: ``(d+2)/(2(d+6)) r^2``.

    The cap rises as ``s/2 + s^2/8`` in ``s = |t|^2``; least squares on a uniform d-ball takes a slope
    ``2(d+2)/(d+6) r^2`` from ``s^2``. Of leading order in r.
    """
    return (dimension + 2) / (2 * (dimension + 6)) * radius**2
