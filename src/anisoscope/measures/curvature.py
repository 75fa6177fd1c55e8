"""Curvature: the second fundamental form from quadratic fits in neighbourhoods."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import NonFiniteError, OptionError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Duplicates, Needs, Workspace, register, run
from anisoscope.measures.frames import local_frames, neighborhoods
from anisoscope.measures.local import side_by_side
from anisoscope.measures.uncertainty import Bar, fields, mean_bar

MIN_K = 64
MOST_K = 2048  # beyond this no neighbourhood is local any more; whoever wants it says so with k
ROUNDING = 1e-7  # normal parts below this share of the tangent ones are rounding: the root of a Gram matrix's error
ROWS_PER_COEFFICIENT = 3  # a fit with fewer rows than this for each coefficient follows noise


def curvature(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    dimension: int | None = None,
    k: int | None = None,
    anchors: int | None = None,
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> Estimate:
    """Size of the second fundamental form II, root mean square over neighbourhoods.

    Local PCA splits the k nearest rows of an anchor p into tangent coordinates t and normal ones; each normal
    coordinate is regressed on ``1, t_a, t_a t_b``, whose quadratic coefficients are II (``x = p + v + II(v,v)/2``).
    ``value`` is ``|II| = sqrt(sum II_ab^2)``, sqrt(d)/R on a sphere of radius R. ``parts``: "mean curvature"
    ``|tr II| / d`` (1/R there), "visible curvature" ``E|x_N|^2 / E|x_T|^2`` about the anchor, "dimension" and "radius".

    The noise of the fitted coefficients is taken off the squares; what remains is a bias of order (radius/R)^2, which
    the error bar, over neighbourhoods, does not contain. ``dimension`` defaults to the rounded maximum-likelihood
    dimension of 256 neighbourhoods of 20 rows, ``k`` to 64 or three rows for each coefficient, whichever is more
    (above some 35 dimensions that would be thousands of rows: then ask for a smaller dimension, or give k).
    """
    return run("curvature", rows, mask, seed, dimension=dimension, k=k, anchors=anchors, duplicates=duplicates)


@register("curvature", lambda **_: Needs(points=True))
def _curvature(
    work: Workspace,
    *,
    dimension: int | None = None,
    k: int | None = None,
    anchors: int | None = None,
    duplicates: Duplicates = "drop",
) -> Estimate:
    points, factor = work.points(duplicates).in_range()
    d = _dimension(points.rows, work.seed) if dimension is None else dimension
    if not 1 <= d < points.rows.shape[1]:
        raise OptionError(
            f"curvature needs a dimension of at least 1 and below the width {points.rows.shape[1]} "
            f"(a space that is filled has no normal); got {d}"
        )
    terms = 1 + d + d * (d + 1) // 2
    size = max(MIN_K, ROWS_PER_COEFFICIENT * terms) if k is None else k
    if k is None and size > MOST_K:
        source = "the rows read as" if dimension is None else "you asked for"
        raise OptionError(
            f"{source} dimension {d}, where a quadratic fit wants neighbourhoods of {size:,} rows: hardly local; "
            "give a smaller dimension, or k yourself"
        )
    if size + 1 <= terms:
        raise OptionError(f"a quadratic fit in dimension {d} has {terms} coefficients; k must be at least {terms}")
    if points.n < size + 1:
        raise TooFewRowsError(
            f"curvature in dimension {d} wants neighbourhoods of {size} rows, got {points.n} distinct rows in all; "
            "give a smaller dimension or k"
        )
    found = neighborhoods(points.rows, size, side_by_side(points.n, size, anchors, most=256), work.seed)
    # float64: the normal part of a small neighbourhood is far below the float32 rounding of its Gram matrix
    fit = fit_quadratic(local_frames(points.rows, found, d, torch.float64).coordinates, d)
    radius = found.distances[:, -1]
    over = f"{len(found.anchors)} neighbourhoods"
    value, bar, notes = _root_mean(fit.form2, over, "|II|", factor)
    mean_value, mean_bar_, mean_notes = _root_mean(fit.mean2, over, "the mean curvature", factor)
    visible, visible_bar = _ratio(fit.normal2, fit.tangent2, over)
    radius_bar = mean_bar(radius, over)
    n = points.n
    parts = {
        "mean curvature": Estimate(value=mean_value, n=n, method="|tr II| / d", **fields(mean_bar_)),
        "visible curvature": Estimate(value=visible, n=n, method="E|x_N|^2 / E|x_T|^2", **fields(visible_bar)),
        "dimension": Estimate(value=float(d), stderr=None, n=n, method="tangent dimension used"),
        "radius": Estimate(
            value=float(radius.mean()) / factor,
            n=n,
            method=f"mean r_{size}",
            **fields(radius_bar and radius_bar.scaled(1 / factor)),
        ),
    }
    return Estimate(
        value=value,
        n=n,
        method=f"quadratic fit, d={d}, k={size}",
        notes=(*points.notes, *notes, *mean_notes),
        parts=parts,
        **fields(bar),
    )


@dataclass(frozen=True)
class QuadraticFit:
    """What a fit says of each neighbourhood: |II|^2 and (|tr II|/d)^2 without the noise, and mean squared parts."""

    form2: Float[Tensor, "m"]
    mean2: Float[Tensor, "m"]
    normal2: Float[Tensor, "m"]
    tangent2: Float[Tensor, "m"]


def fit_quadratic(coordinates: Float[Tensor, "m k1 j"], dimension: int) -> QuadraticFit:
    """Regress normal on quadratic tangent coordinates in each neighbourhood; the anchor is the first member."""
    about_anchor = coordinates - coordinates[:, :1]
    t, normal = about_anchor[:, :, :dimension], about_anchor[:, :, dimension:]
    radius = t.square().sum(dim=(1, 2), keepdim=True).div(t.shape[1]).sqrt()
    design, pairs = _design(t / radius)  # unit scale: linear and quadratic columns of equal size
    q, r = torch.linalg.qr(design)
    coefficients = torch.linalg.solve_triangular(r, q.transpose(1, 2) @ normal, upper=True)
    residual = normal - design @ coefficients
    spare = design.shape[1] - design.shape[2]
    noise = residual.square().sum(dim=(1, 2)) / max(spare, 1) if spare > 0 else residual.new_zeros(len(normal))
    inverse = torch.linalg.inv(r)
    covariance = inverse @ inverse.transpose(1, 2)
    first = design.shape[2] - len(pairs)
    quadratic, spread = coefficients[:, first:], covariance[:, first:, first:]
    square = torch.tensor([a == b for a, b in pairs], device=t.device)
    # II_aa = 2 c_aa counts once in the sum over (a, b); II_ab = c_ab counts twice.
    weight = torch.where(square, 4.0, 2.0).double()
    scale = radius.reshape(-1) ** -4
    form2 = (quadratic.square().sum(dim=2) * weight).sum(dim=1)
    form2 = form2 - noise * (spread.diagonal(dim1=1, dim2=2) * weight).sum(dim=1)
    trace = 2 * quadratic[:, square].sum(dim=1)
    mean2 = trace.square().sum(dim=1) - 4 * noise * spread[:, square][:, :, square].sum(dim=(1, 2))
    others = about_anchor.shape[1] - 1
    normal2, tangent2 = normal.square().sum(dim=(1, 2)) / others, t.square().sum(dim=(1, 2)) / others
    flat = normal2 <= ROUNDING**2 * tangent2
    return QuadraticFit(
        torch.where(flat, 0.0, form2 * scale),
        torch.where(flat, 0.0, mean2 * scale / dimension**2),
        normal2,
        tangent2,
    )


def _design(t: Float[Tensor, "m k1 d"]) -> tuple[Float[Tensor, "m k1 q"], list[tuple[int, int]]]:
    """Columns 1, t_a and t_a t_b for a <= b."""
    d = t.shape[2]
    pairs = [(a, b) for a in range(d) for b in range(a, d)]
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    return torch.cat([torch.ones_like(t[:, :, :1]), t, t[:, :, first] * t[:, :, second]], dim=2), pairs


def _root_mean(squares: Tensor, over: str, name: str, factor: float) -> tuple[float, Bar | None, tuple[str, ...]]:
    """``factor`` times the root of a mean of noise-corrected squares; no bar where it is not told apart from zero."""
    mean = float(squares.mean())
    bar = mean_bar(squares, over)
    value = math.sqrt(max(mean, 0.0)) * factor
    if not math.isfinite(value):
        raise NonFiniteError(f"{name} of rows this small is more than a float holds; multiply them by a constant")
    if mean <= 0 or (bar is not None and mean < 2 * bar.stderr):
        limit = "" if bar is None else f"; below {math.sqrt(max(mean, 0.0) + 2 * bar.stderr) * factor:.3g} at 95 %"
        return value, None, (f"no error bar: {name} is not told apart from zero{limit}",)
    return value, None if bar is None else bar.scaled(factor / (2 * math.sqrt(mean))), ()


def _ratio(numerator: Tensor, denominator: Tensor, over: str) -> tuple[float, Bar | None]:
    value = float(numerator.sum() / denominator.sum())
    bar = mean_bar((numerator - value * denominator) / denominator.mean(), over)
    return value, bar


def _dimension(rows: Tensor, seed: int) -> int:
    """The pooled maximum-likelihood dimension of some neighbourhoods of 20 rows, rounded, at least 1."""
    if len(rows) < 3:
        raise TooFewRowsError(f"curvature needs neighbourhoods of several distinct rows, got {len(rows)} rows in all")
    found = neighborhoods(rows, min(20, len(rows) - 1), 256, seed)
    near, far = found.distances[:, :-1], found.distances[:, -1:]
    logs = (far / near)[near > 0].log()  # a copy, where copies are kept, has no ratio
    inverse = float(logs.mean()) if len(logs) else 0.0
    return max(1, min(round(1 / inverse) if inverse > 0 else 1, rows.shape[1] - 1))
