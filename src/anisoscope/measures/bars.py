"""Error bars of measures of the spectrum: from the influence of each row, in float32 where that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.base import Workspace
from anisoscope.measures.spectrum import Spectrum
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.stats.memory import scratch

FLOAT32_SPREAD = 1e-11  # variances down to this share of the total are seen well enough in float32 for an error bar
FLOAT32_SIZE = 1e8  # total variances between this and its inverse: their squares stay well inside float32
SHARE_SCORES = "share scores"
"""Set in the cache by whoever computes a fixed list of measures. Not wherever scores happen to be there: the last bits
would then depend on what else is computed."""
RATIO_INFLUENCE = "influence on the participation ratio"
PIECE_ROWS = 512  # rows taken at a time: what is made of them on the way stays in cache
TOLERATED_BIAS = 0.25  # of a standard error: a 95 % interval off by this much still covers 94 %


def ratio_bar(work: Workspace, value: float) -> Bar | None:
    """The error bar of ``tr(S)^2 / |S|^2``."""
    if not work.error_rows.enough:
        return None
    if RATIO_INFLUENCE in work.cache:
        influence = work.cache[RATIO_INFLUENCE]
    else:
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
    work: Workspace, found: Spectrum, value: float, weights: Tensor, bias: Callable[[], float], method: str
) -> Estimate:
    """A function of the eigenvalues with its error bar; ``weights`` are its derivatives by each of them.

    ``bias`` gives the small-sample bias, and is asked only where there is an error bar to hold against it.
    """
    if not work.error_rows.enough:
        return Estimate(value=value, n=work.n, method=method, notes=found.notes, **fields(None))
    if work.cache.get(SHARE_SCORES) and RATIO_INFLUENCE not in work.cache:  # on the way: scores are read once for all
        score, work.cache[RATIO_INFLUENCE] = _on_axes(work, found, weights, _ratio_weights(found.values))
    else:
        (score,) = _on_axes(work, found, weights)
    influence = score - found.values @ weights
    bar, notes = unless_biased(work.error_rows.bar(influence), bias(), "the spectrum of a sample is spread out")
    return Estimate(value=value, n=work.n, method=method, notes=(*found.notes, *notes), **fields(bar))


def _ratio_weights(values: Float[Tensor, "r"]) -> Float[Tensor, "r"]:
    """Derivatives of ``(sum lambda)^2 / sum lambda^2``, at a right angle to the eigenvalues themselves.

    So their sum over squared scores is the influence as it is, and what cancels in it does so before it is rounded.
    """
    total, size = values.sum(), values @ values
    return 2 * total / size * (1 - total / size * values)


def _on_axes(work: Workspace, found: Spectrum, *weights: Float[Tensor, "r"]) -> list[Float[Tensor, "n"]]:
    """``sum_k w_k (u_k . y_i)^2`` of each row i for error bars, for each w of ``weights``: three digits are needed."""
    # A vector at a time: for two or three at once libraries take a way that is made for many, and three times as long.
    sums = [[scores2 @ one.to(scores2.dtype) for one in weights] for scores2 in _squared_scores(work, found)]
    return [torch.cat(parts).double() for parts in zip(*sums, strict=True)]


def _squared_scores(work: Workspace, found: Spectrum) -> Iterator[Float[Tensor, "m r"]]:
    """``(u_k . y_i)^2`` of the rows for error bars, a few at a time; the dear product is made once."""
    if "squared scores" in work.cache:
        yield from _pieces(work.cache["squared scores"])
        return
    y = centred_error_rows(work, float32=float(found.values[-1]) > FLOAT32_SPREAD * found.total)
    axes, scores2 = found.vectors.to(y.dtype), scratch((len(y), found.vectors.shape[1]), y)
    for part, out in zip(_pieces(y), _pieces(scores2), strict=True):
        yield torch.mm(part, axes, out=out).square_()
    work.cache["squared scores"] = scores2


def _pieces(rows: Float[Tensor, "n d"]) -> tuple[Tensor, ...]:
    """Rows by the few, which a processor's cache holds; a GPU takes them as they are."""
    return rows.split(PIECE_ROWS) if rows.device.type == "cpu" else (rows,)


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
        work.cache[key] = _centred(rows, work.moments.mean, torch.float32 if short else torch.float64)
    found: Tensor = work.cache[key]
    return found


def _centred(rows: Float[Tensor, "n d"], mean: Float[Tensor, "d"], dtype: torch.dtype) -> Float[Tensor, "n d"]:
    """Rows about a float64 mean, piece by piece. In float32 the mean is taken off in two parts, so that only the last
    digit of the difference is rounded, as if it had been formed in float64."""
    high = mean.to(dtype)
    low = (mean - high).to(dtype)
    out = scratch((len(rows), rows.shape[1]), rows, dtype)
    for part, here in zip(_pieces(rows), _pieces(out), strict=True):
        torch.sub(part.to(dtype), high, out=here)
        if dtype != torch.float64:
            here.sub_(low)
    return out


def quadratic_forms(work: Workspace, covariance: Float[Tensor, "d d"]) -> tuple[Tensor, Tensor]:
    """``|y|^2`` and ``y^T S y`` of the rows for error bars."""
    y = centred_error_rows(work, float32=True)
    return squared_lengths(y), (y @ covariance.to(y.dtype)).mul_(y).sum(dim=1, dtype=torch.float64)


def squared_lengths(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
    """``|y|^2`` of each row, in float64."""
    return torch.linalg.vector_norm(rows, dim=1).double().square_()
