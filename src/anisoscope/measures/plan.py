"""How to search for neighbours: in integers or by how many principal axes, chosen on a sample before the sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import NonFiniteError, name_rows
from anisoscope.measures.integers import MOST_COLUMNS, integers_serve, survivors_in_integers
from anisoscope.rows import largest_size, non_finite_rows, power_of_two_scale

MIN_ROWS_TO_PLAN = 4096  # below this one sweep costs less than choosing how to do it
SAMPLED_ROWS, SAMPLED_COLUMNS = 128, 4096  # what ``choose_plan`` looks at
FEWEST_AXES = 8
BASIS_SAMPLE = 8192  # rows that principal axes are taken from
# Costs of a pair in units of one multiply-add in float32, roughly, from 16,384 to 262,144 rows on two cores of a Zen 5.
SCAN, INTEGER_SCAN = 62.0, 88.0
INTEGER = 0.1  # a multiply-add of small integers
MOST_IN_INTEGERS = 32  # neighbours: as many as a tile has groups of rows, or its first look leaves every pair in doubt
EIGH = 12.0  # of each entry of the cube: eigenvectors in float64
ROW = 400_000.0  # of each row, where axes are used: coordinates, and first bounds from more cells
BENEFIT = 0.95  # of the doubt, for the full product
PAIR, MEASURE = 100_000.0, 120.0
"""Of a pair that survives on the sample, and of each of its columns. Hardly any of it is arithmetic: early in a sweep,
when limits are not what they will be, some three pairs are found for one, each is looked for and entered from both
sides, and whole rows move through memory."""


@dataclass(frozen=True)
class Plan:
    """How the sweep bounds distances: from ``axes`` leading principal axes (all of them: the full product), or of
    integers."""

    axes: int
    width: int
    survivors: float
    """Expected share of pairs that must be measured exactly."""
    integers: bool = False
    """Whether the bounds come of rows as small integers, of all axes."""

    @property
    def is_full(self) -> bool:
        """Whether the bound uses every axis."""
        return self.axes >= self.width


def choose_plan(
    rows: Float[Tensor, "n d"], mean: Float[Tensor, "d"], k: int, generator: torch.Generator
) -> tuple[Plan, Float[Tensor, "d d"] | None]:
    """Choose how to bound, by the pairs that would survive on a sample; the axes come along.

    Costs per pair: the product, a scan of the tile, for each survivor one measurement, and of axes what comes first.
    """
    n, width = rows.shape
    full = Plan(axes=width, width=width, survivors=k / n)
    if n < MIN_ROWS_TO_PLAN or width < 32:
        return full, None
    if scale_of(rows) != 1:
        return full, None  # the short look below is in float32
    picks = torch.randperm(n, generator=generator)
    some, others = picks[:SAMPLED_ROWS].to(rows.device), picks[-SAMPLED_COLUMNS:].to(rows.device)
    limit = _sampled_limits(rows, mean, some, k)
    best, best_cost = full, (width + SCAN) * BENEFIT
    if k <= MOST_IN_INTEGERS and width <= MOST_COLUMNS and rows.device.type == "cpu" and integers_serve():
        survivors = survivors_in_integers(rows[some], rows[others], mean, limit.sqrt())
        cost = INTEGER * width + INTEGER_SCAN + survivors * (PAIR + MEASURE * width)
        if cost < best_cost:
            best, best_cost = Plan(axes=width, width=width, survivors=survivors, integers=True), cost
    look = (BASIS_SAMPLE * width**2 + EIGH * width**3) / (n * n / 2)
    begin = look + ROW * n / (n * n / 2)
    if best_cost < FEWEST_AXES + SCAN + begin + look:
        return best, None  # axes could not save what it takes to look for them
    basis = principal_axes(rows, mean, generator)
    a, b = (_about(rows[which], mean) @ basis.float() for which in (some, others))
    axes = FEWEST_AXES
    while axes <= width // 2:
        lead = torch.cdist(a[:, :axes], b[:, :axes])
        rest = a[:, axes:].norm(dim=1)[:, None] - b[:, axes:].norm(dim=1)[None, :]
        survivors = float((lead.square() + rest.square() < limit[:, None]).double().mean())
        cost = axes + SCAN + begin + survivors * (PAIR + MEASURE * width)
        if cost < best_cost:
            best, best_cost = Plan(axes=axes, width=width, survivors=survivors), cost
        axes *= 2
    return best, basis


def principal_axes(
    rows: Float[Tensor, "n d"], mean: Float[Tensor, "d"], generator: torch.Generator
) -> Float[Tensor, "d d"]:
    """Orthonormal principal axes of a sample of rows, leading one first (any orthonormal basis keeps bounds valid)."""
    picks = torch.randperm(len(rows), generator=generator)[:BASIS_SAMPLE].to(rows.device)
    sample = _about(rows[picks], mean)
    vectors = torch.linalg.eigh((sample.T @ sample).double()).eigenvectors
    return vectors.flip(1)


def project(rows: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    """Leading coordinates of each row, and the length of what is left of it as one more coordinate (float64).

    By the triangle inequality the lengths of two residuals differ by no more than the residuals do, so Euclidean
    distance between these short vectors never exceeds the true one.
    """
    out = rows.new_empty((len(rows), basis.shape[1] + 1), dtype=torch.float64)
    for start in range(0, len(rows), 4096):
        centred = rows[start : start + 4096].double() - mean
        lead = centred @ basis
        out[start : start + 4096, :-1] = lead
        # Not from the difference of squared lengths: that would lose half the digits where little is left.
        out[start : start + 4096, -1] = torch.linalg.vector_norm(centred.sub_(lead @ basis.T), dim=1)
    return out


def _sampled_limits(rows: Tensor, mean: Tensor, some: Tensor, k: int) -> Tensor:
    """Squared k-th neighbour distances of a few rows among all, good to float32: only used to plan."""
    a = _about(rows[some], mean)
    best = a.new_full((len(a), k + 1), torch.inf)
    for part in rows.split(2048):
        b = _about(part, mean)
        d2 = torch.addmm(torch.linalg.vector_norm(b, dim=1).square_()[None, :], a, b.T, alpha=-2)
        best = torch.cat([best, d2.topk(min(k + 1, len(b)), dim=1, largest=False).values], dim=1)
        best = best.topk(k + 1, dim=1, largest=False).values
    return (best[:, -1] + torch.linalg.vector_norm(a, dim=1).square_()).clamp_min_(0).double()


def _about(rows: Tensor, mean: Tensor) -> Float[Tensor, "n d"]:
    """Rows about their mean, or about what float32 makes of it, in float32."""
    return (rows - mean).float() if rows.dtype == torch.float64 else rows.float() - mean.float()


def scale_of(rows: Tensor) -> float:
    """The power of two at which no square of these rows leaves float32; rows that are not finite are named."""
    largest = largest_size(rows)
    if not math.isfinite(largest):
        raise NonFiniteError(f"{name_rows(non_finite_rows(rows).tolist())} hold NaN or infinity; mask them")
    return power_of_two_scale(largest)
