"""Global anisotropy: how unevenly rows fill the directions of their space. Definitions stand in the docstrings.

Every measure here but ``mean_cosine`` is a function T of the covariance spectrum, and its error bar follows from the
influence of one row, ``sum_k dT/dlambda_k ((u_k . y_i)^2 - lambda_k)``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.bars import (
    centred_error_rows,
    ratio_bar,
    second_order,
    spectral_estimate,
    squared_lengths,
    unless_biased,
)
from anisoscope.measures.base import Needs, Workspace, register, run
from anisoscope.measures.spectrum import Spectrum, require_spread, spectrum, top, trace_bias
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.rows import as_rows
from anisoscope.stats.directions import along, unit_rows
from anisoscope.stats.moments import Moments

Bias = Literal["corrected", "plugin"]


def spectral_ratio(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """Share of the variance along the leading direction: ``lambda_1 / sum lambda`` of the centred covariance.

    The anisotropy of "The Shape of Learning". Range 1/min(D, n-1) to 1. Reads high where the leading eigenvalue is not
    separated from the rest; the error bar is then left out and a note says by how much.
    """
    return run("spectral_ratio", rows, mask)


@register("spectral_ratio", Needs(moments="mixed"))
def _spectral_ratio(work: Workspace) -> Estimate:
    require_spread(work)
    lead = top(work)
    value = lead.first / lead.total
    bar, notes = _top_bar(work)
    return Estimate(value=value, n=work.n, method="lambda_1 / sum lambda", notes=notes, **fields(bar))


def stable_rank(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """``sum lambda / lambda_1``: the inverse of ``spectral_ratio``. Range 1 to min(D, n-1)."""
    return run("stable_rank", rows, mask)


@register("stable_rank", Needs(moments="mixed"))
def _stable_rank(work: Workspace) -> Estimate:
    require_spread(work)
    lead = top(work)
    value = lead.total / lead.first
    bar, notes = _top_bar(work)
    bar = None if bar is None else bar.scaled(value**2)
    return Estimate(value=value, n=work.n, method="sum lambda / lambda_1", notes=notes, **fields(bar))


def _top_bar(work: Workspace) -> tuple[Bar | None, tuple[str, ...]]:
    """Error bar of lambda_1 / sum lambda, or a note on why there is none."""
    if not work.error_rows.enough:
        return None, ()
    lead = top(work)
    y = centred_error_rows(work, float32=True)
    along, radius2 = (y @ lead.vector.to(y.dtype)).double().square(), squared_lengths(y)
    influence = (along - lead.first) / lead.total - lead.first * (radius2 - lead.total) / lead.total**2
    bar = work.error_rows.bar(influence)
    bias = min(lead.first_bias(work.n - 1) / lead.total, 1.0)
    return unless_biased(bar, bias, "the leading eigenvalue is not separated from the rest")


def spectral_ratio_l1(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """``sigma_1 / sum sigma`` with the singular values of the centred rows, not squared.

    Another reading of anisotropy in circulation: singular values (10, 2, 1) give 0.769 here and 0.952 squared.
    """
    return run("spectral_ratio_l1", rows, mask)


@register("spectral_ratio_l1", Needs(moments="float64"))
def _spectral_ratio_l1(work: Workspace) -> Estimate:
    require_spread(work)
    found = spectrum(work)
    sigma = found.values.sqrt()
    total = float(sigma.sum())
    value = float(sigma[0]) / total
    slope = -value / total * torch.ones_like(sigma)
    slope[0] += 1 / total
    first = top(work)
    # d(sigma) = d(lambda) / (2 sigma) - d(lambda)^2 / (8 sigma^3), and lambda_1 scatters by 2 lambda_1^2 / m.
    first_bias = first.first_bias(work.n - 1) / (2 * first.first**0.5) - first.first**0.5 / (4 * (work.n - 1))

    def bias() -> float:
        return (first_bias - value * _root_bias(found, work.n - 1)) / total

    return spectral_estimate(work, found, value, _over_root(slope, sigma), bias, "sigma_1 / sum sigma")


def effective_rank(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """``exp(-sum p ln p)`` with ``p = sigma / sum sigma``, singular values unsquared (Roy and Vetterli).

    Range 1 to min(D, n-1). Reads low by about D/(8n) of itself on white data.
    """
    return run("effective_rank", rows, mask)


@register("effective_rank", Needs(moments="float64"))
def _effective_rank(work: Workspace) -> Estimate:
    require_spread(work)
    found = spectrum(work)
    scaled = Spectrum(found.values / found.total, found.vectors, found.notes)
    sigma = scaled.values.sqrt()
    total = float(sigma.sum())
    p = sigma / total
    entropy = -float(torch.special.xlogy(p, p).sum())
    value = math.exp(entropy)
    slope = -value * (torch.log(p.clamp_min(1e-300)) + entropy) / total

    def bias() -> float:
        weighted = float(torch.special.xlogy(sigma, sigma).sum())
        log_bias = trace_bias(
            scaled.values,
            lambda x: (x.log() + 2) / (4 * x.sqrt()),
            lambda x: -x.log() / (8 * x**1.5),
            work.n - 1,
        )
        return value * ((1 / total + weighted / total**2) * _root_bias(scaled, work.n - 1) - log_bias / total)

    weights = _over_root(slope, sigma) / found.total
    return spectral_estimate(work, found, value, weights, bias, "exp entropy of sigma / sum sigma")


def effective_rank_lambda(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """``exp(-sum p ln p)`` with ``p = lambda / sum lambda``: the effective rank read from variances. Range 1 to D."""
    return run("effective_rank_lambda", rows, mask)


@register("effective_rank_lambda", Needs(moments="float64"))
def _effective_rank_lambda(work: Workspace) -> Estimate:
    require_spread(work)
    found = spectrum(work)
    p = found.values / found.total
    entropy = -float(torch.special.xlogy(p, p).sum())
    value = math.exp(entropy)
    slope = torch.where(p > 0, -value * (torch.log(p.clamp_min(1e-300)) + entropy) / found.total, 0.0)

    def bias() -> float:
        return -value * trace_bias(p, lambda x: x.log() + 1, lambda x: 1 / x, work.n - 1)

    return spectral_estimate(work, found, value, slope, bias, "exp entropy of lambda / sum lambda")


def participation_ratio(rows: RowsLike, *, mask: MaskLike = None, bias: Bias = "corrected") -> Estimate:
    """``tr(S)^2 / ||S||_F^2``: how many directions of equal variance would spread the same. Range 1 to D.

    White data of n rows read about ``1/(1/D + 1/(n-1))`` from the plain formula; "corrected" divides the unbiased
    estimates of ``(tr S)^2`` and ``tr S^2`` for rows of any distribution, so that it may exceed D by chance. "plugin"
    is the plain formula. No eigendecomposition.
    """
    return run("participation_ratio", rows, mask, bias=bias)


@register("participation_ratio", Needs(moments="float64"))
def _participation_ratio(work: Workspace, *, bias: Bias = "corrected") -> Estimate:
    choose("bias", bias, ("corrected", "plugin"))
    require_spread(work, 4 if bias == "corrected" else 2)
    square, frobenius = _trace_squares(work.moments, bias)
    value = square / frobenius
    bar = ratio_bar(work, value)
    return Estimate(value=value, n=work.n, method=f"tr(S)^2 / |S|^2, {bias}", **fields(bar))


def isoscore(rows: RowsLike, *, mask: MaskLike = None, bias: Bias = "corrected") -> Estimate:
    """``(PR - 1) / (D - 1)``: the closed form of IsoScore. 0 for one direction, 1 for a sphere.

    "corrected" uses the bias-corrected participation ratio; "plugin" reproduces the published algorithm.
    """
    return run("isoscore", rows, mask, bias=bias)


@register("isoscore", Needs(moments="float64"))
def _isoscore(work: Workspace, *, bias: Bias = "corrected") -> Estimate:
    _require_width(work)
    ratio = _participation_ratio(work, bias=bias)
    scale = 1 / (work.moments.width - 1)
    return Estimate(
        value=(ratio.value - 1) * scale,
        n=work.n,
        method=f"(PR - 1) / (D - 1), {bias}",
        stderr=None if ratio.stderr is None else ratio.stderr * scale,
        over=ratio.over,
        dof=ratio.dof,
    )


def isoscore_star(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    reference: RowsLike | Moments | None = None,
    zeta: float = 0.1,
    bias: Bias = "corrected",
) -> Estimate:
    """IsoScore of the shrunken covariance ``(1 - zeta) S + zeta S_ref``.

    ``reference`` is a larger sample of rows (or its Moments), taken as fixed; by default ``(tr S / D) I``, which unlike
    a plain identity does not depend on the scale of the data. ``zeta`` runs from 0 (isoscore) to 1 (the reference).
    """
    return run("isoscore_star", rows, mask, reference=reference, zeta=zeta, bias=bias)


@register("isoscore_star", Needs(moments="float64"))
def _isoscore_star(
    work: Workspace,
    *,
    reference: RowsLike | Moments | None = None,
    zeta: float = 0.1,
    bias: Bias = "corrected",
) -> Estimate:
    choose("bias", bias, ("corrected", "plugin"))
    if not 0 <= zeta <= 1:
        raise OptionError(f"zeta is a share between 0 and 1, got {zeta}")
    _require_width(work)
    require_spread(work, 4 if bias == "corrected" else 2)
    keep, width, covariance = 1 - zeta, work.moments.width, work.moments.covariance()
    square, frobenius = _trace_squares(work.moments, bias)
    y, trace = centred_error_rows(work, float32=False), float(covariance.trace())
    if reference is None:
        ratio = square / (keep**2 * frobenius + (1 - keep**2) * square / width)
        mixed = keep * covariance + zeta * trace / width * torch.eye(width, dtype=torch.float64).to(covariance)
        name = "(tr S / D) I"
    else:
        other = _reference_moments(reference, width)
        own, theirs = _common_unit((work.moments.exponent, keep), (other.exponent, zeta))
        y, covariance, trace = y * own, covariance * own**2, trace * own**2
        square, frobenius = square * own**4, frobenius * own**4
        target = other.covariance().to(covariance) * theirs**2
        mixed = keep * covariance + zeta * target
        # Where only S is noisy, only its own square is biased.
        total2 = float(mixed.trace()) ** 2 + keep**2 * (square - trace**2)
        frobenius2 = float(mixed.square().sum()) + keep**2 * (frobenius - float(covariance.square().sum()))
        ratio, name = total2 / frobenius2, "a given sample"
    trace_m, size_m = float(mixed.trace()), float(mixed.square().sum())
    radius2, form = y.square().sum(dim=1) - trace, (y @ mixed * y).sum(dim=1) - float((mixed * covariance).sum())
    if reference is None:
        d_trace, d_form = radius2, keep * form + zeta * radius2 * trace_m / width
    else:
        d_trace, d_form = keep * radius2, keep * form
    influence = 2 * trace_m * d_trace / size_m - 2 * trace_m**2 * d_form / size_m**2
    noisy = keep**2 * frobenius / size_m
    bar = second_order(work.error_rows.bar(influence), ratio, work.n, noisy**2)
    scale = 1 / (width - 1)
    return Estimate(
        value=(ratio - 1) * scale,
        n=work.n,
        method=f"isoscore of (1-z) S + z S_ref, z={zeta:g}, S_ref {name}, {bias}",
        **fields(None if bar is None else bar.scaled(scale)),
    )


def mean_cosine(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """Mean of ``cos(x_i, x_j)`` over all pairs i != j, not centred.

    Exact in one pass: ``(|sum x/|x||^2 - n) / (n (n - 1))``; an unbiased estimate of the expected cosine of two
    independent rows. Unit vectors of float32 input are summed in float32 over 128 rows and in float64 beyond: good to
    about 1e-7 absolute for ordinary rows, 1e-6 at worst (all rows equal).
    """
    return run("mean_cosine", rows, mask)


@register("mean_cosine", Needs(directions=True))
def _mean_cosine(work: Workspace) -> Estimate:
    n, total = work.directions.count, work.directions.total
    if n < 2:
        raise TooFewRowsError(f"a pair needs two rows, got {n}")
    value = (float(total @ total) - n) / (n * (n - 1))
    method = "closed form over all pairs"
    blocks = work.error_rows_as_they_came.blocks
    if not work.error_rows_as_they_came.enough:
        return Estimate(value=value, n=n, method=method, **fields(None))
    # The projection of a row on the mean of the *others*; its variance holds the noise of that mean once too often.
    others = (along(blocks, total) - 1) / (n - 1)
    bar = work.error_rows_as_they_came.bar(2 * (others - value))
    if bar is not None:
        some = unit_rows(blocks[:, :: max(1, others.numel() // 256)].flatten(0, 1))
        degenerate = 2 * _variance_of_pairs((some @ some.T).double()) / n**2
        bar = Bar(math.sqrt(max(bar.stderr**2 - degenerate, degenerate / 2)), bar.dof, bar.over)
    return Estimate(value=value, n=n, method=method, **fields(bar))


def _variance_of_pairs(gram: Float[Tensor, "n n"]) -> float:
    """The variance of the entries off the diagonal."""
    n = len(gram)
    pairs = n * (n - 1)
    mean = float(gram.sum() - gram.trace()) / pairs
    spread = (gram - mean).square()
    return float(spread.sum() - spread.diagonal().sum()) / (pairs - 1)


def _trace_squares(moments: Moments, bias: Bias) -> tuple[float, float]:
    """Estimates of ``(tr Sigma)^2`` and ``tr Sigma^2``: plain, or unbiased for any distribution (Himeno and Yamada)."""
    n, trace = moments.count, float(moments.scatter.trace())
    unit = trace / (n - 1)  # in units of the trace of S, whose fourth power could overflow
    frobenius = float((moments.scatter / trace).square_().sum())  # not by a norm, which sums less carefully
    if bias == "plugin":
        return unit**2, frobenius * unit**2
    radial = float(moments.fourth / unit**2) / (n - 1)
    scale = (n - 1) / (n * (n - 2) * (n - 3))
    square = scale * (2 * frobenius + (n * n - 3 * n + 1) - n * radial)
    frobenius = scale * ((n - 1) * (n - 2) * frobenius + 1 - n * radial)
    if not (frobenius > 1e-12 and square > 0):
        raise TooFewRowsError(
            f'{n} rows are too few to correct the bias: the estimate of tr(S^2) is not positive; bias="plugin" '
            "gives the uncorrected number"
        )
    return square * unit**2, frobenius * unit**2


def _root_bias(found: Spectrum, dof: int) -> float:
    """Bias of ``sum sigma``."""
    return trace_bias(found.values, lambda x: 0.5 / x.sqrt(), lambda x: -0.25 / x**1.5, dof)


def _over_root(slope: Float[Tensor, "r"], sigma: Float[Tensor, "r"]) -> Float[Tensor, "r"]:
    """Turn a derivative by sigma into one by lambda; directions without variance do not move to first order."""
    return torch.where(sigma > 0, slope / (2 * sigma.clamp_min(1e-300)), 0.0)


def _reference_moments(reference: RowsLike | Moments, width: int) -> Moments:
    if not isinstance(reference, Moments):
        work = Workspace(as_rows(reference), Needs(moments="float64"))
        require_spread(work)
        reference = work.moments
    if reference.width != width:
        raise ShapeError(f"the reference has width {reference.width}, the rows {width}; they must agree")
    return reference


def _common_unit(*parts: tuple[int, float]) -> list[float]:
    """Factors that bring lengths of several exponents to the largest one that carries weight: 1 where all agree."""
    common = max(exponent for exponent, weight in parts if weight)
    return [math.ldexp(1.0, min(exponent - common, 0)) for exponent, _ in parts]


def _require_width(work: Workspace) -> None:
    if work.moments.width < 2:
        raise DegenerateError("isotropy needs at least two columns; rows of width 1 have one direction only")
