"""Error bars of measures of the spectrum: from the influence of each row, in float32 where that is enough."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.base import Workspace
from anisoscope.measures.spectrum import Spectrum, spectrum
from anisoscope.measures.uncertainty import Bar, fields

FLOAT32_SPREAD = 1e-11  # variances down to this share of the total are seen well enough in float32 for an error bar
FLOAT32_SIZE = 1e8  # total variances between this and its inverse: their squares stay well inside float32
SHARE_SCORES = "share scores"  # set in the cache by whoever computes a fixed list of measures
TOLERATED_BIAS = 0.25  # of a standard error: a 95 % interval off by this much still covers 94 %


def ratio_bar(work: Workspace, value: float) -> Bar | None:
    """The error bar of ``tr(S)^2 / |S|^2``."""
    if not work.error_rows.enough:
        return None
    covariance = work.moments.covariance()
    trace, size = float(covariance.trace()), float(covariance.square().sum())
    radius2, form = quadratic_forms(work, covariance)
    influence = 2 * trace * (radius2 - trace) / size - 2 * trace**2 * (form - size) / size**2
    return second_order(work.error_rows.bar(influence), value, work.n, 1.0)


def second_order(bar: Bar | None, value: float, n: int, share: float) -> Bar | None:
    """Where all variances are equal the first-order influence vanishes and only sampling noise of S is left in it.

    That remainder, ``4/n^2`` of the squared value for rows whose inner products are normal, is counted twice by the
    influence and is the whole error there: take one of the two off, and never go below it.
    """
    if bar is None:
        return None
    rest = share * (2 * value / n) ** 2
    return Bar(math.sqrt(max(bar.stderr**2 - rest, rest)), bar.dof, bar.over)


def spectral_estimate(
    work: Workspace, found: Spectrum, value: float, weights: Tensor, bias: float, method: str
) -> Estimate:
    """A function of the eigenvalues with its error bar; ``weights`` are its derivatives by each of them."""
    if not work.error_rows.enough:
        return Estimate(value=value, n=work.n, method=method, notes=found.notes, **fields(None))
    y = centred_error_rows(work, float32=float(found.values[-1]) > FLOAT32_SPREAD * found.total)
    if "squared scores" not in work.cache:
        work.cache["squared scores"] = (y @ found.vectors.to(y.dtype)).double().square_()
    influence = (work.cache["squared scores"] - found.values) @ weights
    bar, notes = unless_biased(work.error_rows.bar(influence), bias, "the spectrum of a sample is spread out")
    return Estimate(value=value, n=work.n, method=method, notes=(*found.notes, *notes), **fields(bar))


def unless_biased(bar: Bar | None, bias: float, why: str) -> tuple[Bar | None, tuple[str, ...]]:
    """Drop an error bar that the small-sample bias outweighs, and say so."""
    if bar is None or abs(bias) <= TOLERATED_BIAS * bar.stderr:
        return bar, ()
    return None, (
        f"no error bar: {why}, and the small-sample bias (about {bias:+.2g}) is too large beside the sampling error "
        f"({bar.stderr:.2g}) for an interval to cover; more rows would help",
    )


def centred_error_rows(work: Workspace, *, float32: bool) -> Float[Tensor, "n d"]:
    """Rows for error bars about the mean; in float32 where that is asked for and the rows have no more digits anyway.

    An error bar needs three digits, and products of float32 take half the time.
    """
    rows = work.error_rows.rows
    total = float(work.moments.scatter.trace()) / work.n
    short = float32 and rows.dtype != torch.float64 and 1 / FLOAT32_SIZE < total < FLOAT32_SIZE
    key = f"centred error rows, {'float32' if short else 'float64'}"
    if key not in work.cache:
        centred = rows.double() - work.moments.mean
        work.cache[key] = centred.float() if short else centred
    found: Tensor = work.cache[key]
    return found


def quadratic_forms(work: Workspace, covariance: Float[Tensor, "d d"]) -> tuple[Tensor, Tensor]:
    """``|y|^2`` and ``y^T S y`` of the rows for error bars; from their scores on the axes where that is asked for.

    Not wherever scores happen to be there: the last bits would then depend on what else is computed.
    """
    if work.cache.get(SHARE_SCORES) and "squared scores" in work.cache:
        scores2 = work.cache["squared scores"]
        return scores2.sum(dim=1), scores2 @ spectrum(work).values
    y = centred_error_rows(work, float32=True)
    return squared_lengths(y), (y @ covariance.to(y.dtype)).mul_(y).sum(dim=1, dtype=torch.float64)


def squared_lengths(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
    """``|y|^2`` of each row, in float64."""
    return torch.linalg.vector_norm(rows, dim=1).double().square_()
