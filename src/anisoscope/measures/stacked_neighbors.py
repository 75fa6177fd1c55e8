"""TwoNN of several sites at once, for a GPU: one question about copies, one transfer at the end. See ``stacked``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.dimension import FACCO_KEPT
from anisoscope.measures.found import Found
from anisoscope.measures.later import beside, fetched, side_stream
from anisoscope.measures.neighbors_fused import can_fuse, search_fused
from anisoscope.measures.neighbors_gpu import WIDE_CELLS, mended, search, settle
from anisoscope.measures.uncertainty import SUBSAMPLE_ROWS, SUBSAMPLES

MIN_ROWS = 64  # of a subsample, as ``two_nn`` asks for


def begin_two_nn(rows: Float[Tensor, "s n d"]) -> Callable[[], list[Estimate | None]]:
    """Begin the searches of rows of ordinary size; the function returned gives each estimate, or None where the plain
    measure should be asked. All of it runs beside what comes next on the current stream."""
    stream = side_stream("neighbours", rows)
    with beside(stream):
        copies, clash = _copies(rows)
        searched = list(_searched(rows, copies.cpu().numpy(), clash.cpu().tolist()))

    def finish() -> list[Estimate | None]:
        with beside(stream):
            table = {f"{at} {name}": value for at, one in enumerate(searched) for name, value in one.table.items()}
            numbers = fetched(table) if table else {}
            found: list[Estimate | None] = [None] * len(rows)
            for at, one in enumerate(searched):
                here = {name: numbers[f"{at} {name}"] for name in one.table}
                _make_certain(one, here)
                n = one.points.shape[1]
                for site, estimate in zip(one.sites, told(here, n, rows.shape[1] - n), strict=True):
                    found[site] = estimate
            return found

    return finish


@dataclass(frozen=True)
class _Searched:
    """Sites with equally many rows once copies are gone, and what is to be fetched of them."""

    sites: Sequence[int]
    points: Float[Tensor, "s n d"]
    found: Sequence[Found]
    table: dict[str, Tensor]


def _searched(
    rows: Float[Tensor, "s n d"], copies: Bool[np.ndarray, "s n"], clash: Sequence[bool]
) -> Iterator[_Searched]:
    """Sites with the same copies together, as those of a decoder have: its first tokens."""
    alike: dict[bytes, list[int]] = {}
    for site in range(len(rows)):
        if not clash[site]:
            alike.setdefault(copies[site].tobytes(), []).append(site)
    for sites in alike.values():
        points = rows if len(sites) == len(rows) else rows[sites]
        if copies[sites[0]].any():
            kept = torch.from_numpy(np.flatnonzero(~copies[sites[0]])).to(rows.device)
            points = points.index_select(1, kept)
        if points.shape[1] < 8 * MIN_ROWS:
            continue
        # A few sites at a time: what is not certain is searched in float64, and so are the subsamples.
        parts = [_tabled(some) for some in points.split(max(1, WIDE_CELLS // points[0].numel()))]
        table = {name: torch.cat([part[name] for _, part in parts]) for name in parts[0][1]}
        yield _Searched(sites, points, [one for found, _ in parts for one in found], table)


def _tabled(points: Float[Tensor, "s n d"]) -> tuple[list[Found], dict[str, Tensor]]:
    """What was found of each site; sums of slopes, how many rows are not certain, sums of the subsamples' slopes."""
    if can_fuse(points[0], 2):
        found = mended(points, 2, search_fused(points, 2, 1.0))
    else:
        found = [search(one, 2, 1.0) for one in points]
    return found, {
        **fitted(torch.stack([one.distances for one in found])),
        "unsettled": (~torch.stack([one.settled for one in found])).sum(dim=1),
        "bars": plain_subsamples(points),
    }


def _make_certain(one: _Searched, here: dict[str, np.ndarray]) -> None:
    """Put right what was not certain, at few sites and rows as a rule."""
    for place in np.flatnonzero((here["unsettled"] > 0) & np.isfinite(here["sums"]).all(axis=1)).tolist():
        certain = settle(one.points[place], 2, 1.0, one.found[place])
        for name, value in fetched(fitted(certain.distances[None])).items():
            here[name][place] = value[0]


def _copies(rows: Float[Tensor, "s n d"]) -> tuple[Bool[Tensor, "s n"], Bool[Tensor, "s"]]:
    """Which rows are copies of earlier ones, and whether two different rows have one code, as ``distinct_rows``."""
    bits = (rows + 0.0).view(torch.int64 if rows.dtype == torch.float64 else torch.int32).long()
    code = bits.mul_(copy_weights(rows.shape[2], str(rows.device))).sum(dim=2)
    code, order = code.sort(dim=1, stable=True)
    suspect = code[:, 1:] == code[:, :-1]
    site = torch.arange(len(rows), device=rows.device)[:, None]
    equal = (rows[site, order[:, 1:]] == rows[site, order[:, :-1]]).all(dim=2)
    copy = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    copy.scatter_(1, order[:, 1:], suspect & equal)
    return copy, (suspect & ~equal).any(dim=1)


@functools.lru_cache(maxsize=8)
def copy_weights(width: int, device: str) -> Int[Tensor, "d"]:
    """Odd numbers that make the code of a row."""
    weights = torch.randint(-(2**62), 2**62, (width,), generator=torch.Generator().manual_seed(1))
    return (2 * weights + 1).to(device)


def fitted(distances: Float[Tensor, "s n two"]) -> dict[str, Tensor]:
    """The two sums behind the slope of ``facco`` of each site, and whether every row has a ratio."""
    near, far = distances.unbind(dim=2)
    ratios = (far / near).log().sort(dim=1).values
    return {"sums": _slope_sums(ratios), "least": near.amin(dim=1)}


def _slope_sums(ratios: Float[Tensor, "b m"]) -> Float[Tensor, "b two"]:
    m = ratios.shape[1]
    kept = int(FACCO_KEPT * m)
    y = -torch.log1p(-torch.arange(1, kept + 1, dtype=torch.float64, device=ratios.device) / m)
    x = ratios[:, :kept]
    return torch.stack([x @ y, x.square().sum(dim=1)], dim=1)


def plain_subsamples(points: Float[Tensor, "s n d"]) -> Float[Tensor, "s b three"]:
    """The same sums of disjoint runs of rows, and the least distance met in each."""
    x = _runs(points).flatten(0, 1).double()
    x = x - x.mean(dim=1, keepdim=True)
    size = torch.linalg.vector_norm(x, dim=2).square_()
    d2 = torch.baddbmm(size[:, :, None] + size[:, None, :], x, x.transpose(1, 2), alpha=-2)
    d2.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    near = d2.topk(2, dim=2, largest=False).indices
    # By differences, all of them: whether any pair is close is a question that would have to wait for the device.
    there = x.gather(1, near.flatten(1)[:, :, None].expand(-1, -1, x.shape[2])).unflatten(1, near.shape[1:])
    distances = torch.linalg.vector_norm(x[:, :, None] - there, dim=3).sort(dim=2).values
    ratios = (distances[:, :, 1] / distances[:, :, 0]).log().sort(dim=1).values
    found = torch.cat([_slope_sums(ratios), distances[:, :, 0].amin(dim=1, keepdim=True)], dim=1)
    return found.unflatten(0, (len(points), -1))


def _runs(points: Float[Tensor, "s n d"]) -> Float[Tensor, "s b l d"]:
    blocks, stride, length = cut(points.shape[1])
    return points[:, : blocks * stride].unflatten(1, (blocks, stride))[:, :, :length]


def cut(n: int) -> tuple[int, int, int]:
    """As ``subsample_bars`` cuts rows: so many runs, one from every so many rows on, of so many rows."""
    blocks = min(SUBSAMPLES, n // MIN_ROWS)
    stride = n // blocks
    return blocks, stride, min(max(SUBSAMPLE_ROWS, MIN_ROWS), stride)


def told(here: dict[str, np.ndarray], n: int, copies: int) -> Iterator[Estimate | None]:
    """The estimate of each site, or None where some row has no ratio or some slope is not positive."""
    bars, sums = here["bars"], here["sums"]
    good = np.logical_and.reduce(
        [np.isfinite(value.reshape(len(sums), -1)).all(axis=1) for value in here.values()]
        + [here["least"] > 0, (bars > 0).all(axis=(1, 2)), (sums > 0).all(axis=1)]
    )
    bars, sums = np.where(good[:, None, None], bars, 1.0), np.where(good[:, None], sums, 1.0)
    value, blocks = sums[:, 0] / sums[:, 1], bars.shape[1]
    spread = np.log(bars[:, :, 0] / bars[:, :, 1]).std(axis=1, ddof=1) * math.sqrt(cut(n)[2] / n)
    method, over = "TwoNN, facco", f"rows, from {blocks} disjoint subsamples"
    notes = (f"{copies:,} of {n + copies:,} rows were exact copies of earlier ones and were dropped",) if copies else ()
    for told, one, stderr in zip(good.tolist(), value.tolist(), (value * spread).tolist(), strict=True):
        yield (
            Estimate(value=one, stderr=stderr, n=n, method=method, notes=notes, over=over, dof=blocks - 1)
            if told
            else None
        )
