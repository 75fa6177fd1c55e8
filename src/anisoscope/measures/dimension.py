"""Intrinsic dimension from ratios of neighbour distances.

All of these are biased above about ten dimensions, since no affordable number of rows fills such a space: clouds with
an edge (a ball) read low, closed ones (a flat torus) high. The curves are in docs/measures.md. Error bars come from
disjoint subsamples, because neighbours are shared between rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, OptionError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Duplicates, Needs, Points, Workspace, register, run
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.measures.uncertainty import Bar, fields, mean_bar, subsample_bars
from anisoscope.rows import mean_row

Variant = Literal["facco", "shape_of_learning", "ml"]
Pooling = Literal["pooled", "mean"]

FACCO_KEPT = 0.9  # share of ratios kept, smallest first
SHAPE_KEPT = 5  # "The Shape of Learning" keeps one ratio in five, smallest first
SHAPE_ZERO = 1e-8  # and takes distances below this share of the mean row length, and ratios this close to 1, as copies
DEFAULT_SCALES = (1, 2, 4, 8, 16, 32)
ROOT_TOLERANCE, MOST_STEPS = 1e-14, 200


def two_nn(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    variant: Variant = "facco",
    duplicates: Duplicates = "drop",
    batch_rows: int | None = None,
    seed: int = 0,
) -> Estimate:
    """Dimension d from ``mu_i = r_2 / r_1``, whose law is ``P(mu > t) = t^-d`` wherever density is locally even.

    - ``facco``: the slope through the origin of ``-log(1 - F)`` on ``log mu``, with ``F_i = i / N`` from i = 1 and the
      largest 10 % of ratios dropped (Facco et al. 2017).
    - ``ml``: ``(N - 1) / sum log mu``, the unbiased maximum-likelihood estimate.
    - ``shape_of_learning``: the published code of that paper: slope through the origin over the lowest fifth of the
      ratios; rows at distance zero from another and ratios of one are left out of the fit and yet counted in F. With
      ``duplicates="keep"`` this is the published procedure to the letter; by default copies are dropped first.

    ``duplicates``: "drop" measures one of each distinct row; "keep" leaves copies in the cloud, where a row at distance
    zero from its nearest has no ratio and is left out; "error" refuses. ``batch_rows`` cuts the rows into consecutive
    batches of at least that many and returns the mean over batches, with the standard deviation over them as a part.
    """
    return run("two_nn", rows, mask, seed, variant=variant, duplicates=duplicates, batch_rows=batch_rows)


def _two_nn_needs(variant: Variant = "facco", duplicates: Duplicates = "drop", batch_rows: int | None = None) -> Needs:
    return Needs(points=True, neighbors=2 if batch_rows is None else 0)


@register("two_nn", _two_nn_needs)
def _two_nn(
    work: Workspace,
    *,
    variant: Variant = "facco",
    duplicates: Duplicates = "drop",
    batch_rows: int | None = None,
) -> Estimate:
    choose("variant", variant, _FITS)
    points = work.points(duplicates)
    fit = _FITS[variant]
    if batch_rows is not None:
        return _over_batches(points, fit, batch_rows, variant)
    distances = work.neighbors(2, duplicates).distances
    ratios, left_out = _log_ratios(distances, _length(points.rows, variant))
    value = fit(ratios, left_out)
    bars = subsample_bars(points.rows, 2, lambda part, near: [_two_nn_of(part, near, variant)], [value], min_rows=64)
    return Estimate(
        value=value,
        n=points.n,
        method=f"TwoNN, {variant}",
        notes=(*points.notes, *_left_out_note(left_out), *_no_bar_note(bars, 8 * 64)),
        **fields(bars[0] if bars else None),
    )


def _over_batches(points: Points, fit: Callable[[Tensor, int], float], batch_rows: int, variant: Variant) -> Estimate:
    if batch_rows < 3:
        raise OptionError(f"batch_rows must be at least 3, got {batch_rows}")
    batches = points.n // batch_rows
    if batches < 1:
        raise TooFewRowsError(f"one batch needs {batch_rows:,} rows, got {points.n:,}")
    parts = points.rows.tensor_split(batches)
    each = [_two_nn_of(part, nearest_neighbors(part, 2).distances, variant) for part in parts]
    values = torch.tensor(each, dtype=torch.float64)
    over = f"{batches} batches of {points.n // batches:,} rows or more"
    bar = mean_bar(values, over)
    beside = {}
    if batches > 1:
        spread = float(values.std(correction=1))
        beside["sd over batches"] = Estimate(value=spread, stderr=None, n=batches, method="standard deviation")
    mean = float(values.mean())
    method = f"TwoNN, {variant}, mean over {over}"
    return Estimate(value=mean, n=points.n, method=method, notes=points.notes, parts=beside, **fields(bar))


def _two_nn_of(rows: Tensor, distances: Tensor, variant: Variant) -> float:
    ratios, left_out = _log_ratios(distances, _length(rows, variant))
    return _FITS[variant](ratios, left_out)


def _length(rows: Tensor, variant: Variant) -> float | None:
    """The mean length of centred rows, which scales what that variant calls zero; None for the others."""
    if variant != "shape_of_learning":
        return None
    mean = mean_row(rows)
    return float(torch.cat([(part.double() - mean).norm(dim=1) for part in rows.split(8192)]).mean())


def _log_ratios(distances: Float[Tensor, "n k"], length: float | None) -> tuple[Float[Tensor, "m"], int]:
    """Ascending ``log(r_2 / r_1)`` of the rows that have one, and how many have none."""
    r1, r2 = distances[:, 0], distances[:, 1]
    usable = r1 > 0 if length is None else r1 >= SHAPE_ZERO * length
    if not bool(usable.all()):
        r1, r2 = r1[usable], r2[usable]
    ratios = (r2 / r1).log_()
    if length is not None:
        ratios = ratios[ratios > math.log1p(SHAPE_ZERO)]
    return ratios.sort().values, len(distances) - len(ratios)


def _facco(ratios: Tensor, left_out: int) -> float:
    heights = _facco_heights(len(ratios), ratios.device)
    return _slope(ratios[: len(heights)], heights)


@lru_cache(maxsize=8)
def _facco_heights(n: int, device: torch.device) -> Float[Tensor, "m"]:
    """``-log(1 - i / n)`` of the ratios that are kept; the same for all subsamples and sites. Nobody writes into it."""
    ecdf = torch.arange(1, int(FACCO_KEPT * n) + 1, dtype=torch.float64, device=device) / max(n, 1)
    return -torch.log1p(-ecdf)


def _shape_of_learning(ratios: Tensor, left_out: int) -> float:
    n = len(ratios)
    kept = max(min(n // SHAPE_KEPT, n - 1), 0)
    rank = torch.arange(1 + left_out, 1 + left_out + kept, dtype=torch.float64, device=ratios.device)
    return _slope(ratios[:kept], -torch.log1p(-rank / (n + left_out)))


def _ml(ratios: Tensor, left_out: int) -> float:
    total = float(ratios.sum())
    if len(ratios) < 2 or total <= 0:
        raise _no_ratios()
    return (len(ratios) - 1) / total


_FITS: dict[str, Callable[[Tensor, int], float]] = {
    "facco": _facco,
    "shape_of_learning": _shape_of_learning,
    "ml": _ml,
}


def _slope(x: Tensor, y: Tensor) -> float:
    """Least-squares slope of a line through the origin."""
    denominator = float(x @ x)
    slope = float(x @ y) / denominator if denominator > 0 else 0.0
    if slope <= 0:
        raise _no_ratios()
    return slope


def _no_ratios() -> DegenerateError:
    return DegenerateError(
        "too few rows have two neighbours at different distances (a lattice, copies, or a handful of rows): "
        "no dimension can be fitted"
    )


def mle(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    k: int | tuple[int, int] = 20,
    pooling: Pooling = "pooled",
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> Estimate:
    """Levina and Bickel's maximum-likelihood dimension from the k nearest neighbours of every row.

    Each row gives ``m_i = (1/(k-1)) sum_{j<k} log(r_k / r_j)``. "pooled" is ``1 / mean_i m_i`` (MacKay and Ghahramani),
    "mean" is ``mean_i 1/m_i`` as first published, which reads high by (k-1)/(k-2). A pair ``k=(first, last)`` averages
    the estimates over that range of k.
    """
    return run("mle", rows, mask, seed, k=k, pooling=pooling, duplicates=duplicates)


def _k_range(k: int | tuple[int, int]) -> range:
    first, last = k if isinstance(k, tuple | list) else (int(k), int(k))
    if not 2 <= first <= last:
        raise OptionError(f"k must be at least 2, and a range must not descend; got {k}")
    return range(first, last + 1)


def _mle_needs(k: int | tuple[int, int] = 20, pooling: Pooling = "pooled", duplicates: Duplicates = "drop") -> Needs:
    return Needs(points=True, neighbors=_k_range(k)[-1])


@register("mle", _mle_needs)
def _mle(
    work: Workspace,
    *,
    k: int | tuple[int, int] = 20,
    pooling: Pooling = "pooled",
    duplicates: Duplicates = "drop",
) -> Estimate:
    choose("pooling", pooling, ("pooled", "mean"))
    ks = _k_range(k)
    points = work.points(duplicates)
    found = work.neighbors(ks[-1], duplicates)
    value, left_out = _mle_value(found.distances, ks, pooling)

    def of_part(_: Tensor, near: Tensor) -> list[float]:
        return [_mle_value(near, ks, pooling)[0]]

    min_rows = max(64, 8 * ks[-1])
    bars = subsample_bars(points.rows, ks[-1], of_part, [value], min_rows)
    span = str(ks[0]) if len(ks) == 1 else f"{ks[0]}..{ks[-1]}"
    return Estimate(
        value=value,
        n=points.n,
        method=f"Levina-Bickel, k={span}, {pooling}",
        notes=(*points.notes, *_left_out_note(left_out), *_no_bar_note(bars, 8 * min_rows)),
        **fields(bars[0] if bars else None),
    )


def _mle_value(distances: Float[Tensor, "n k"], ks: range, pooling: Pooling) -> tuple[float, int]:
    usable = distances[:, 0] > 0
    logs = distances[usable].log()
    if len(logs) == 0:
        raise _no_ratios()
    values = []
    for k in ks:
        inverse = logs[:, k - 1] - logs[:, : k - 1].mean(dim=1)
        if pooling == "mean":
            inverse = inverse[inverse > 0].reciprocal()
        mean = float(inverse.mean()) if len(inverse) else 0.0
        if mean <= 0:
            raise _no_ratios()
        values.append(mean if pooling == "mean" else 1 / mean)
    return sum(values) / len(values), int((~usable).sum())


def gride(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    scales: Sequence[int] | None = None,
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> Estimate:
    """Dimension against scale from ``mu = r_2n / r_n`` (Denti et al. 2022).

    For each n of ``scales`` the root of the score of the density
    ``d (mu^d - 1)^(n-1) / (B(n, n) mu^((2n-1) d + 1))``, with (N - 1) in place of N so that n = 1 is the unbiased
    ``two_nn(variant="ml")``. ``value`` is the dimension at the first scale; ``parts`` holds every scale, and the mean
    distance to the 2n-th neighbour, which is where on the data that scale lies.
    """
    return run("gride", rows, mask, seed, scales=scales, duplicates=duplicates)


def _gride_needs(scales: Sequence[int] | None = None, duplicates: Duplicates = "drop") -> Needs:
    return Needs(points=True, neighbors=2 * max(_scales(scales)))


def _scales(scales: Sequence[int] | None) -> tuple[int, ...]:
    chosen = DEFAULT_SCALES if scales is None else tuple(scales)
    if not chosen or min(chosen) < 1:
        raise OptionError(f"scales are whole numbers of at least 1, got {scales}")
    return chosen


@register("gride", _gride_needs)
def _gride(work: Workspace, *, scales: Sequence[int] | None = None, duplicates: Duplicates = "drop") -> Estimate:
    points = work.points(duplicates)
    wanted = _scales(scales)
    chosen = wanted if scales is not None else tuple(n for n in wanted if 2 * n < points.n) or (1,)
    found = work.neighbors(2 * max(chosen), duplicates)
    values = _gride_values(found.distances, chosen)
    # Large scales need large subsamples; where they do not fit, the small scales still get their error bars.
    fitting = [scale for scale in chosen if points.n >= 8 * _gride_min_rows(scale)]

    def of_part(_: Tensor, near: Tensor) -> list[float]:
        return _gride_values(near, fitting)

    bars: dict[int, Bar] = {}
    if fitting:
        at_fitting = [value for scale, value in zip(chosen, values, strict=True) if scale in fitting]
        found_bars = subsample_bars(points.rows, 2 * max(fitting), of_part, at_fitting, _gride_min_rows(max(fitting)))
        bars = dict(zip(fitting, found_bars or (), strict=False))
    parts = {}
    for scale, value in zip(chosen, values, strict=True):
        bar = fields(bars.get(scale))
        radius = float(found.distances[:, 2 * scale - 1].mean())
        parts[f"n={scale}"] = Estimate(value=value, n=points.n, method=f"GRIDE, r_{2 * scale}/r_{scale}", **bar)
        parts[f"radius n={scale}"] = Estimate(value=radius, stderr=None, n=points.n, method=f"mean r_{2 * scale}")
    return Estimate(
        value=values[0],
        n=points.n,
        method=f"GRIDE, r_{2 * chosen[0]}/r_{chosen[0]}",
        notes=(*points.notes, *_no_bar_note(bars, 8 * _gride_min_rows(chosen[0]))),
        parts=parts,
        **fields(bars.get(chosen[0])),
    )


def _gride_min_rows(scale: int) -> int:
    return max(64, 8 * 2 * scale)


def _gride_values(distances: Float[Tensor, "n k"], scales: Sequence[int]) -> list[float]:
    values = []
    for scale in scales:
        near, far = distances[:, scale - 1], distances[:, 2 * scale - 1]
        usable = near > 0
        values.append(_gride_root((far[usable] / near[usable]).log(), scale))
    return values


def _gride_root(x: Float[Tensor, "m"], n: int) -> float:
    """Root of the score in d; it falls from +infinity to ``-n sum log mu``, so there is exactly one.

    Newton's steps, which meet it from the mean of log mu on in three or four; where one would leave the interval that
    is known to hold the root, that is halved instead.
    """
    from scipy.special import digamma

    total = float(x.sum())
    if len(x) < 2 or total <= 0:
        raise _no_ratios()
    if n == 1:
        return (len(x) - 1) / total
    apart = x[x > 0]
    tied = len(x) - len(apart)

    def score(d: float) -> tuple[float, float]:
        """The score times d, and its slope times d^2: both of the size of the number of rows, whatever d is."""
        # d log mu / (1 - exp(-d log mu)), whose limit for tied distances (log mu = 0) is 1
        steps = apart * -d
        falling = steps.expm1()
        rising = steps.div_(falling)
        value = len(x) - 1 + (n - 1) * (tied + float(rising.sum())) - (2 * n - 1) * total * d
        bend = float(rising.square_() @ falling.add_(1))
        return value, -(len(x) - 1) - (n - 1) * (tied + bend)

    d, low, high = float((digamma(2 * n) - digamma(n)) * len(x) / total), 0.0, math.inf
    for _ in range(MOST_STEPS):
        value, slope = score(d)
        low, high = (d, high) if value > 0 else (low, d)
        after = d * (1 - value / slope)
        if abs(after - d) <= ROOT_TOLERANCE * d:
            break
        d = after if low < after < high else (low + high) / 2 if high < math.inf else 2 * d
    return d


def _left_out_note(left_out: int) -> tuple[str, ...]:
    return (
        (f"{left_out:,} rows have no usable ratio (copies or ties) and were left out of the fit",) if left_out else ()
    )


def _no_bar_note(bars: Sized | None, needed: int) -> tuple[str, ...]:
    return () if bars else (f"no error bar: disjoint subsamples need {needed:,} measurable rows or more",)
