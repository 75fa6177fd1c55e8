"""What the learning experiments share: inputs about a base, shares, the nulls beside them, the lines of a figure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.tangent.nulls import expected_share
from anisoscope.theory.experiment import Check, Series, over_repeats, series_of
from anisoscope.theory.surfaces import Surface

SHARE = "tangent share"
REPEATS = "independent clouds and starts"
NULL_ROWS = 1000  # rows of each cloud that signals are dealt out among


def unit_inputs(surface: Surface, spread: float, z: Float[Tensor, "*r d"]) -> Float[Tensor, "*r w"]:
    """The points over ``spread z`` about the base, tangent coordinates first, divided by the spread."""
    base = surface.base
    axes = torch.linalg.qr(base.tangent, mode="complete").Q
    axes[:, : surface.dimension] = base.tangent  # QR may turn the sign of a column
    x = (surface.x_over(spread * z.flatten(0, -2)) - base.x) @ axes / spread
    return x.reshape(*z.shape[:-1], surface.width)


def tangent_share(matrix: Float[Tensor, "r m w"], d: int) -> Float[Tensor, "r"]:
    """Share of a matrix's energy in its first d columns; zero where the matrix is zero."""
    whole = matrix.square().sum(dim=(1, 2))
    return matrix[..., :d].square().sum(dim=(1, 2)) / whole.clamp_min(1e-300)


def non_cancellation(
    gradient: Float[Tensor, "r m w"], signal: Float[Tensor, "r"], x: Float[Tensor, "r n w"], d: int
) -> Float[Tensor, "r"]:
    """``c = |E[g x_T^T]| / (g_rms t)``; ``signal`` is the mean of |g|^2, t the root mean square length of x_T."""
    size = x[..., :d].square().sum(dim=2).mean(dim=1)
    return gradient[..., :d].flatten(1).norm(dim=1) / (signal * size).sqrt()


def dealt_share(x: Float[Tensor, "r n w"], g: Float[Tensor, "r n m"], d: int) -> Float[Tensor, "r"]:
    """The tangent share that the same signals would show, dealt out to other rows (`tangent.nulls.expected_share`)."""
    basis = torch.eye(x.shape[2], d, dtype=torch.float64)
    some = zip(x[:, :NULL_ROWS], g[:, :NULL_ROWS], strict=True)
    return torch.tensor([expected_share(one, signal, basis) for one, signal in some], dtype=torch.float64)


def mean_check(
    where: str,
    site: str,
    measure: str,
    values: Float[Tensor, "r"],
    truth: float | None = None,
    tolerance: float = 0.0,
) -> Check:
    """A mean over repeats beside its truth."""
    return Check(site, measure, over_repeats(values, "mean", what=REPEATS), truth, where, tolerance)


def pooled_share(tangent: Float[Tensor, "r"], whole: Float[Tensor, "r"], method: str) -> Estimate:
    """``sum tangent / sum whole`` over repeats with the error bar of a ratio: a mean of quotients would be off."""
    value = float(tangent.sum() / whole.sum())
    away = (tangent - value * whole) / whole.mean()
    stderr = float(away.std() / len(away) ** 0.5)
    r = len(away)
    return Estimate(value=value, stderr=stderr, n=r, method=method, over=f"{r} {REPEATS}", dof=float(r - 1))


def share_line(
    where: str, steps: Sequence[int], y: Float[Tensor, "r m"], site: str, law: Float[Tensor, "m"] | None = None
) -> Series:
    """One line of a figure of shares over steps; step 0 stands at 1/2, so that logarithmic axes can show it."""
    x = torch.tensor([max(step, 0.5) for step in steps], dtype=torch.float64)
    return series_of(site, SHARE, x, y, ("step", SHARE), slice=where, law=law)


def flat_line(where: str, steps: Sequence[int], value: float, site: str) -> Series:
    """A constant that is known exactly, such as chance."""
    x = tuple(max(float(step), 0.5) for step in steps)
    return Series(site, SHARE, x, (value,) * len(x), None, "step", SHARE, where)


def shown(share: Tensor, least: float) -> Tensor:
    """The same with zero for what is below ``least``: on an axis of shares it would only ask for logarithms."""
    return torch.where(share < least, 0.0, share)
