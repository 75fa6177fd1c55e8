"""TwoNN of several sites at once, for a GPU: one question about copies, one transfer at the end. See ``stacked``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.dimension import FACCO_KEPT
from anisoscope.measures.later import beside, fetched, side_stream
from anisoscope.measures.neighbors_gpu import search, settle
from anisoscope.measures.uncertainty import SUBSAMPLE_ROWS, SUBSAMPLES, Bar, fields

MIN_ROWS = 64  # of a subsample, as ``two_nn`` asks for


def begin_two_nn(rows: Sequence[Float[Tensor, "n d"]]) -> Callable[[], list[Estimate | None]]:
    """Begin the searches of rows of ordinary size; the function returned gives each estimate, or None where the plain
    measure should be asked. All of it runs beside what comes next on the current stream."""
    stream = side_stream(rows[0].device)
    with beside(stream):
        kept, table = _searched(rows)

    def finish() -> list[Estimate | None]:
        with beside(stream):
            numbers = fetched(table) if table else {}
            return [_estimate(site, points, len(rows[site]), numbers) for site, points in enumerate(kept)]

    return finish


def _searched(rows: Sequence[Float[Tensor, "n d"]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Rows without copies, and what is to be fetched of each site, by its number."""
    flags = [_copies(one) for one in rows]
    copies = torch.stack([flag for flag, _ in flags]).cpu().numpy()
    same = torch.stack([clash for _, clash in flags]).cpu().tolist()
    kept: list[Tensor] = []
    table: dict[str, Tensor] = {}
    for site, one in enumerate(rows):
        few = copies[site].any()
        points = one[torch.from_numpy(np.flatnonzero(~copies[site])).to(one.device)] if few else one
        kept.append(points)
        if same[site] or len(points) < 8 * MIN_ROWS:
            continue
        found = search(points, 2, 1.0)
        table |= {f"{site} {name}": value for name, value in _fitted(points, found.distances).items()}
        table[f"{site} unsettled"] = (~found.settled).sum()[None]
        table[f"{site} bars"] = _subsamples(points)
    return kept, table


def _estimate(site: int, points: Tensor, n: int, numbers: Mapping[str, np.ndarray]) -> Estimate | None:
    here = {name.split(" ", 1)[1]: value for name, value in numbers.items() if name.startswith(f"{site} ")}
    if here and int(here["unsettled"][0]) and np.isfinite(here["sums"]).all():
        # Few rows, as a rule: they are searched again in float64.
        certain = settle(points, 2, 1.0, search(points, 2, 1.0))
        here |= fetched(_fitted(points, certain.distances))
    return _told(here, len(points), n - len(points)) if here else None


def _copies(rows: Float[Tensor, "n d"]) -> tuple[Bool[Tensor, "n"], Bool[Tensor, ""]]:
    """Which rows are copies of earlier ones, and whether two different rows have one code, as ``distinct_rows``."""
    bits = (rows + 0.0).view(torch.int64 if rows.dtype == torch.float64 else torch.int32).long()
    code = bits.mul_(_weights(rows.shape[1], str(rows.device))).sum(dim=1)
    code, order = code.sort(stable=True)
    suspect = code[1:] == code[:-1]
    equal = (rows[order[1:]] == rows[order[:-1]]).all(dim=1)
    copy = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    copy[order[1:]] = suspect & equal
    return copy, (suspect & ~equal).any()


@functools.lru_cache(maxsize=8)
def _weights(width: int, device: str) -> Int[Tensor, "d"]:
    weights = torch.randint(-(2**62), 2**62, (width,), generator=torch.Generator().manual_seed(1))
    return (2 * weights + 1).to(device)


def _fitted(points: Float[Tensor, "n d"], distances: Float[Tensor, "n two"]) -> dict[str, Tensor]:
    """The two sums behind the slope of ``facco``, and whether every row has a ratio."""
    near, far = distances.T
    ratios = (far / near).log().sort().values
    return {"sums": _slope_sums(ratios[None])[0], "least": near.min()[None]}


def _slope_sums(ratios: Float[Tensor, "b m"]) -> Float[Tensor, "b two"]:
    m = ratios.shape[1]
    kept = int(FACCO_KEPT * m)
    y = -torch.log1p(-torch.arange(1, kept + 1, dtype=torch.float64, device=ratios.device) / m)
    x = ratios[:, :kept]
    return torch.stack([x @ y, x.square().sum(dim=1)], dim=1)


def _subsamples(points: Float[Tensor, "n d"]) -> Float[Tensor, "b three"]:
    """The same sums of disjoint runs of rows, and the least distance met in each."""
    parts, _ = _runs(points)
    x = parts.double()
    x = x - x.mean(dim=1, keepdim=True)
    size = torch.linalg.vector_norm(x, dim=2).square_()
    d2 = torch.baddbmm(size[:, :, None] + size[:, None, :], x, x.transpose(1, 2), alpha=-2)
    d2.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    near = d2.topk(2, dim=2, largest=False).indices
    # By differences, all of them: whether any pair is close is a question that would have to wait for the device.
    there = x.gather(1, near.flatten(1)[:, :, None].expand(-1, -1, x.shape[2])).unflatten(1, near.shape[1:])
    distances = torch.linalg.vector_norm(x[:, :, None] - there, dim=3).sort(dim=2).values
    ratios = (distances[:, :, 1] / distances[:, :, 0]).log().sort(dim=1).values
    return torch.cat([_slope_sums(ratios), distances[:, :, 0].amin(dim=1, keepdim=True)], dim=1)


def _runs(points: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "b l d"], int]:
    """As ``subsample_bars`` cuts them, and rows in each."""
    n = len(points)
    blocks = min(SUBSAMPLES, n // MIN_ROWS)
    stride = n // blocks
    length = min(max(SUBSAMPLE_ROWS, MIN_ROWS), stride)
    return points[: blocks * stride].unflatten(0, (blocks, stride))[:, :length], length


def _told(here: dict[str, np.ndarray], n: int, copies: int) -> Estimate | None:
    """The estimate, or None where some row has no ratio or some slope is not positive."""
    bars = here["bars"]
    if not all(np.isfinite(value).all() for value in here.values()):
        return None
    if here["least"][0] <= 0 or (bars <= 0).any() or (here["sums"] <= 0).any():
        return None
    value = float(here["sums"][0] / here["sums"][1])
    logs = np.log(bars[:, 0] / bars[:, 1])
    length = _runs(torch.empty(n, 0))[1]
    spread = float(logs.std(ddof=1)) * math.sqrt(length / n)
    bar = Bar(value * spread, len(bars) - 1, f"rows, from {len(bars)} disjoint subsamples")
    notes = (f"{copies:,} of {n + copies:,} rows were exact copies of earlier ones and were dropped",) if copies else ()
    return Estimate(value=value, n=n, method="TwoNN, facco", notes=notes, **fields(bar))
