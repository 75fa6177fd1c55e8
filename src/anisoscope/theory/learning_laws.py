"""Gradient descent of a linear layer on a curved cloud, in closed form.

Inputs ``x = (u, II(u,u)/2)`` with ``u = spread z`` and z standard normal; targets ``f = A z + B(z,z)/2``; the layer
``y = W x`` starts at zero and descends on ``E|y - f|^2 / 2`` over infinitely many rows. The gradient is
``E[g x^T]`` with ``g = W x - f``. Odd moments vanish, so that tangent and normal columns of W never mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor


def pairing(left: Float[Tensor, "m d d"], right: Float[Tensor, "b d d"]) -> Float[Tensor, "m b"]:
    """``E[left(z,z) right(z,z)] = 2 <left, right> + tr left tr right`` for standard normal z."""
    return 2 * torch.einsum("mij,bij->mb", left, right) + torch.einsum("mii,bjj->mb", left, right)


@dataclass(frozen=True)
class LinearTask:
    """A curved cloud and a target on it. ``form`` is II in an orthonormal basis of the normal space."""

    form: Float[Tensor, "b d d"]
    slope: Float[Tensor, "m d"]
    bend: Float[Tensor, "m d d"]
    spread: float

    def targets(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """``A z + B(z,z) / 2``."""
        return z @ self.slope.T + torch.einsum("mij,ni,nj->nm", self.bend, z, z) / 2

    @property
    def tangent_moment(self) -> Float[Tensor, "m d"]:
        """``E[f x_T^T] = spread A``: the first gradient's tangent part, up to sign."""
        return self.spread * self.slope

    @property
    def normal_moment(self) -> Float[Tensor, "m b"]:
        """``E[f x_N^T] = spread^2/4 (2 <B, II> + tr B tr II)``: its normal part, up to sign."""
        return self.spread**2 / 4 * pairing(self.bend, self.form)

    @cached_property
    def normal_modes(self) -> tuple[Float[Tensor, "b"], Float[Tensor, "b b"]]:
        """Eigenvalues and vectors of ``E[x_N x_N^T]``: the speeds at which normal directions learn."""
        values, vectors = torch.linalg.eigh(self.spread**4 / 4 * pairing(self.form, self.form))
        return values.clamp_min(0), vectors

    @property
    def visible_curvature(self) -> float:
        """``E|x_N|^2 / E|x_T|^2 = spread^2/(4d) (2 |II|^2 + |tr II|^2)``."""
        return float(self.normal_modes[0].sum()) / (self.form.shape[1] * self.spread**2)

    @property
    def variance_share(self) -> float:
        """``E|x_T|^2 / E|x|^2``: the tangent share of a reader gradient whose signal knows nothing of x."""
        return 1 / (1 + self.visible_curvature)

    @property
    def first_ratio(self) -> float:
        """``|dW_N| / |dW_T|`` at the first step: of order ``|II| spread``, exactly linear in both."""
        return float(self.normal_moment.norm() / self.tangent_moment.norm())

    def gradient_share(self, step: int, rate: float) -> float:
        """Tangent share of the gradient at a step: ``C (I - rate S)^step``, ``C = E[f x^T]`` and ``S = E[x x^T]``.

        Tangent columns learn at the speed spread^2, normal ones at |II|^2 spread^4: what is left to learn turns normal.
        """
        speeds, modes = self.normal_modes
        tangent = (self.tangent_moment * (1 - rate * self.spread**2) ** step).square().sum()
        normal = ((self.normal_moment @ modes) * (1 - rate * speeds) ** step).square().sum()
        return float(tangent / (tangent + normal))

    def change_share(self, step: int, rate: float) -> float:
        """Tangent share of the weights' change up to a step, ``rate`` times the sum of the gradients before it."""
        speeds, modes = self.normal_modes
        powers = torch.arange(step, dtype=torch.float64)
        tangent = (self.tangent_moment * ((1 - rate * self.spread**2) ** powers).sum()).square().sum()
        grown = ((1 - rate * speeds)[:, None] ** powers).sum(dim=1)
        normal = ((self.normal_moment @ modes) * grown).square().sum()
        return float(tangent / (tangent + normal))

    def turning_step(self, rate: float, most: int = 1000) -> float:
        """The step at which the gradient's tangent share falls through one half."""
        return crossing_step([self.gradient_share(step, rate) for step in range(most)])


def crossing_step(shares: Sequence[float]) -> float:
    """The first step, counted from 0, at which a share falls through one half, interpolated on its log-odds.

    Infinite where it never does.
    """
    for step, (last, share) in enumerate(pairwise(shares), start=1):
        if share < 0.5 <= last:
            above, below = (math.log(one / (1 - one)) for one in (last, max(share, 1e-300)))
            return step - 1 + above / (above - below)
    return math.inf


def least_share(cosine: float | Tensor, visible: float | Tensor) -> Tensor:
    """The least tangent share that a gradient can have: ``c^2 / (c^2 + visible curvature)``.

    ``c = |E[g x_T^T]| / (g_rms t)``, t the root mean square length of x_T, says how little the tangent part cancels.
    The normal part is at most ``g_rms`` times the size of x_N (Cauchy and Schwarz), so this holds for every g and every
    sample, with its own moments.
    """
    square = torch.as_tensor(cosine, dtype=torch.float64) ** 2
    return square / (square + torch.as_tensor(visible, dtype=torch.float64))
