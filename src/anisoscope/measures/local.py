"""Local geometry: neighbourhoods, their tangent frames, and the global measures inside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures import anisotropy  # noqa: F401 - enters the measures that are looked up below
from anisoscope.measures.base import Duplicates, Needs, Points, Workspace, distinct_rows, lookup, register, run
from anisoscope.measures.frames import LocalFrames, local_frames, neighborhoods
from anisoscope.measures.uncertainty import Bar, fields, mean_bar
from anisoscope.rows import as_rows, of_unit_size

FUKUNAGA_OLSEN = 0.05  # an axis counts if its variance is at least this share of the largest
EXPLAINED = 0.95  # or as many axes as explain this share

Rule = Literal["fukunaga_olsen", "explained", "participation"]
LocalMeasure = Literal["isoscore", "participation_ratio", "spectral_ratio", "effective_rank"]


def local_pca_dimension(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    k: int = 64,
    anchors: int | None = None,
    rule: Rule = "fukunaga_olsen",
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> Estimate:
    """Mean number of axes that local PCA needs, over neighbourhoods of k rows.

    - ``fukunaga_olsen``: axes with at least 5 % of the largest local variance.
    - ``explained``: the fewest axes that explain 95 % of the local variance.
    - ``participation``: the local participation ratio, corrected for the bias of k + 1 rows and pooled.

    Needs k well above the dimension, and reads low otherwise. ``anchors`` defaults to so many neighbourhoods
    that together they hold half of the rows, at most 1,024.
    """
    return run("local_pca_dimension", rows, mask, seed, k=k, anchors=anchors, rule=rule, duplicates=duplicates)


@register("local_pca_dimension", lambda **_: Needs(points=True))
def _local_pca_dimension(
    work: Workspace,
    *,
    k: int = 64,
    anchors: int | None = None,
    rule: Rule = "fukunaga_olsen",
    duplicates: Duplicates = "drop",
) -> Estimate:
    choose("rule", rule, ("fukunaga_olsen", "explained", "participation"))
    points, _ = work.points(duplicates).in_range()
    frames = _frames(work, points, duplicates, k, anchors)
    values = frames.variances
    left_out: tuple[str, ...] = ()
    if rule == "participation":
        value, bar, left_out = _pooled([frames.coordinates], points, _over(frames))
    else:
        if rule == "fukunaga_olsen":
            counts = (values >= FUKUNAGA_OLSEN * values[:, :1]).sum(dim=1)
        else:
            share = values.cumsum(dim=1) / values.sum(dim=1, keepdim=True)
            counts = (share < EXPLAINED).sum(dim=1) + 1
        value, bar = float(counts.double().mean()), mean_bar(counts.double(), _over(frames))
    notes = (*points.notes, *left_out)
    notes = notes if bar else (*notes, "no error bar: too few neighbourhoods, or all read the same")
    return Estimate(value=value, n=points.n, method=f"local PCA, k={k}, {rule}", notes=notes, **fields(bar))


def local_isotropy(
    rows: RowsLike,
    *,
    mask: MaskLike = None,
    measure: LocalMeasure = "isoscore",
    k: int = 64,
    anchors: int | None = None,
    cells: int = 32,
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> Estimate:
    """A global measure inside neighbourhoods, each centred on its own mean, beside its value over all rows.

    ``value`` is over balls of k nearest neighbours; ``parts`` holds "cells" (k-means cells of at least k rows) and
    "global" (all rows). isoscore and participation_ratio are corrected for the few rows of a neighbourhood and pooled;
    spectral_ratio and effective_rank are plain means and carry the bias of k rows.
    """
    return run(
        "local_isotropy", rows, mask, seed, measure=measure, k=k, anchors=anchors, cells=cells, duplicates=duplicates
    )


@register("local_isotropy", lambda **_: Needs(points=True))
def _local_isotropy(
    work: Workspace,
    *,
    measure: LocalMeasure = "isoscore",
    k: int = 64,
    anchors: int | None = None,
    cells: int = 32,
    duplicates: Duplicates = "drop",
) -> Estimate:
    choose("measure", measure, _LOCAL)
    points, _ = work.points(duplicates).in_range()
    width = points.rows.shape[1]
    if width < 2:
        raise DegenerateError("isotropy needs at least two columns; rows of width 1 have one direction only")
    frames = _frames(work, points, duplicates, k, anchors)
    balls = _summary([frames.coordinates], measure, width, points, f"balls, k={k}", _over(frames))
    spots = _cell_coordinates(points.rows, cells, k, work.seed)
    parts = {}
    if spots:
        parts["cells"] = _summary(spots, measure, width, points, "k-means cells", f"{len(spots)} cells")
    everything = Workspace(as_rows(points.rows), Needs(moments="float64"), work.seed)
    parts["global"] = _global(everything, measure)
    return Estimate(
        value=balls.value,
        stderr=balls.stderr,
        dof=balls.dof,
        over=balls.over,
        n=points.n,
        method=f"{measure} in balls, k={k}",
        notes=(*points.notes, *balls.notes),
        parts=parts,
    )


def _global(work: Workspace, measure: LocalMeasure) -> Estimate:
    return _GLOBAL[measure](work)


def _summary(
    groups: list[Tensor], measure: LocalMeasure, width: int, points: Points, method: str, over: str
) -> Estimate:
    """One measure over neighbourhoods given by their principal coordinates ``(m, k1, j)``."""
    if measure in ("spectral_ratio", "effective_rank"):
        each = torch.cat([_LOCAL[measure](of_unit_size(group)) for group in groups])
        return Estimate(value=float(each.mean()), n=points.n, method=method, **fields(mean_bar(each, over)))
    value, bar, notes = _pooled(groups, points, over)
    if measure == "isoscore":
        value, bar = (value - 1) / (width - 1), None if bar is None else bar.scaled(1 / (width - 1))
    return Estimate(value=value, n=points.n, method=method, notes=notes, **fields(bar))


def _pooled(groups: list[Tensor], points: Points, over: str) -> tuple[float, Bar | None, tuple[str, ...]]:
    """A participation ratio out of inverse ones, whose few-row noise averages out."""
    groups = [of_unit_size(group) for group in groups]
    solid = torch.cat([_spread_on_several_rows(group, points.rows.dtype) for group in groups])
    if not bool(solid.any()):
        raise DegenerateError("in each neighbourhood one row stands apart from copies of another; drop duplicates")
    inverse = torch.cat([inverse_participation(group) for group in groups])[solid]
    mean, bar = float(inverse.mean()), mean_bar(inverse, over)
    if mean <= 16 * torch.finfo(torch.promote_types(points.rows.dtype, torch.float32)).eps:
        raise TooFewRowsError(f"too few rows in {over} to correct the bias: tr(S^2) reads zero; take a larger k")
    lost = len(solid) - len(inverse)
    notes = (f"{lost:,} of {len(solid):,} neighbourhoods left out: their spread is that of one row",) if lost else ()
    return 1 / mean, None if bar is None else bar.scaled(1 / mean**2), notes


def _spread_on_several_rows(coordinates: Float[Tensor, "m k1 j"], dtype: torch.dtype) -> Bool[Tensor, "m"]:
    """Whether ``(tr S)^2`` without bias, a mean over two disjoint pairs of rows, is more than rounding.

    It is zero where all rows but one are equal, and so is the unbiased ``tr S^2``: their ratio would be noise. Bounded
    from above through ``tr S^2 <= (tr S)^2``, which is sharp there.
    """
    n = coordinates.shape[1]
    radius2 = coordinates.square().sum(dim=2)
    radial = n * (n - 1) * radius2.square().sum(dim=1) / radius2.sum(dim=1).square()
    rounding = 256 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return n * n - 3 * n + 3 - radial > rounding * n * n


def inverse_participation(coordinates: Float[Tensor, "m k1 j"]) -> Float[Tensor, "m"]:
    """Unbiased ``tr S^2`` over unbiased ``(tr S)^2`` of each neighbourhood (for the estimators see ``anisotropy``)."""
    n = coordinates.shape[1]
    if n < 4:
        raise TooFewRowsError(f"the bias of {n} rows cannot be corrected; take k of 3 or more")
    values = coordinates.square().sum(dim=1) / (n - 1)  # principal axes: the covariance is diagonal
    trace2, frobenius = values.sum(dim=1).square(), values.square().sum(dim=1)
    radial = coordinates.square().sum(dim=2).square().sum(dim=1) / (n - 1)
    square = 2 * frobenius + (n * n - 3 * n + 1) * trace2 - n * radial
    return ((n - 1) * (n - 2) * frobenius + trace2 - n * radial) / square


def _top_share(coordinates: Tensor) -> Tensor:
    values = coordinates.square().sum(dim=1)
    return values.amax(dim=1) / values.sum(dim=1)


def _entropy_rank(coordinates: Tensor) -> Tensor:
    sigma = coordinates.square().sum(dim=1).sqrt()
    p = sigma / sigma.sum(dim=1, keepdim=True)
    return torch.exp(-torch.special.xlogy(p, p).sum(dim=1))


_GLOBAL: dict[str, Callable[[Workspace], Estimate]] = {
    name: lookup(name).compute for name in ("isoscore", "participation_ratio", "spectral_ratio", "effective_rank")
}
_LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "isoscore": inverse_participation,
    "participation_ratio": inverse_participation,
    "spectral_ratio": _top_share,
    "effective_rank": _entropy_rank,
}


def _cell_coordinates(rows: Tensor, cells: int, min_rows: int, seed: int) -> list[Tensor]:
    """Principal coordinates of each k-means cell of enough rows, capped so that a cell stays small."""
    groups = []
    labels = _k_means(rows, min(cells, max(1, len(rows) // min_rows)), seed)
    for cell in labels.unique().tolist():
        members = (labels == cell).nonzero().reshape(-1)[: 16 * min_rows]
        if len(members) >= max(min_rows, 4):
            local = rows[members].double()
            local = local - local[0]  # exact for equal rows, where a mean would be rounded
            if not bool(local.any()):
                raise DegenerateError("a k-means cell holds copies of one row only: it has no shape; drop duplicates")
            left, sigma, _ = torch.linalg.svd(local - local.mean(dim=0), full_matrices=False)
            groups.append((left * sigma)[None])
    return groups


def _k_means(rows: Tensor, cells: int, seed: int) -> Tensor:
    """Labels from centres fitted on at most 8,192 rows (scipy), all rows assigned to the nearest."""
    from scipy.cluster.vq import kmeans2

    generator = torch.Generator().manual_seed(seed)
    sample = rows[torch.randperm(len(rows), generator=generator)[:8192].to(rows.device)].double()
    mean = sample.mean(dim=0)
    data = (sample - mean).cpu().numpy()
    starts = data[distinct_rows(sample)[0][:cells].cpu().numpy()]  # copies of one start would leave cells empty
    with warnings.catch_warnings():  # a cell may still lose its rows to others; it keeps its centre, and is not used
        warnings.filterwarnings("ignore", message="One of the clusters is empty")
        centres, _ = kmeans2(data, starts, minit="matrix", iter=10, missing="warn")
    marks = torch.as_tensor(centres).to(rows.device)
    parts = [torch.cdist(part.double() - mean, marks).argmin(dim=1) for part in rows.split(8192)]
    return torch.cat(parts)


def side_by_side(n: int, k: int, anchors: int | None, most: int = 1024) -> int:
    """How many neighbourhoods to look at: as asked, or so many that together they hold half of the rows.

    More would share rows, and error bars that take them as independent would be too small.
    """
    return anchors if anchors is not None else max(1, min(most, n // (2 * (k + 1))))


def _frames(work: Workspace, points: Points, duplicates: str, k: int, anchors: int | None) -> LocalFrames:
    count = side_by_side(points.n, k, anchors)
    key = f"frames {duplicates} {k} {count}"
    if key not in work.cache:
        found = neighborhoods(points.rows, k, count, work.seed)
        work.cache[key] = local_frames(points.rows, found, 1)
    frames: LocalFrames = work.cache[key]
    return frames


def _over(frames: LocalFrames) -> str:
    return f"{len(frames.variances)} neighbourhoods"
