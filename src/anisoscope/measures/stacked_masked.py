"""TwoNN of several sites at once by kernels, copies and all: nothing is asked of the device before all is searched.

Copies are not taken out, which would need their number: they are marked, are nobody's neighbours, and have no ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures import row_kernels
from anisoscope.measures.dimension import FACCO_KEPT
from anisoscope.measures.found import Found
from anisoscope.measures.later import beside, fetched, side_stream
from anisoscope.measures.neighbors_fused import LEAST_ROWS, can_fuse, search_fused
from anisoscope.measures.neighbors_gpu import MENDED, mended, settle
from anisoscope.measures.row_kernels import Ready
from anisoscope.measures.stacked_neighbors import begin_two_nn, copy_weights, cut, fitted, told
from anisoscope.measures.uncertainty import SUBSAMPLE_ROWS, SUBSAMPLES

SEARCHED_CELLS = 1 << 30  # of rows searched together, which are held once more in half precision


def begin(rows: Float[Tensor, "s n d"]) -> Callable[[], list[Estimate | None]]:
    """Begin TwoNN of each site, by kernels where they serve; see ``begin_two_nn``."""
    if not (rows.dtype == torch.float32 and can_fuse(rows[0], 2)):
        return begin_two_nn(rows)
    stream = side_stream("neighbours", rows)
    with beside(stream):
        step = max(1, SEARCHED_CELLS // rows[0].numel())
        parts = [_Searched.of(some.contiguous()) for some in rows.split(step)]

    def finish() -> list[Estimate | None]:
        with beside(stream):
            here = fetched({name: torch.cat([one.table[name] for one in parts]) for name in parts[0].table})
            _make_certain(parts, here)
            return _estimates(here, rows.shape[1])

    return finish


@dataclass(frozen=True)
class _Searched:
    """Rows of some sites, which of them are copies, what was found, and what is to be fetched of it."""

    rows: Float[Tensor, "s n d"]
    copy: Bool[Tensor, "s n"]
    found: list[Found]
    table: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Float[Tensor, "s n d"]) -> _Searched:
        copy, clash = row_kernels.copies(rows, copy_weights(rows.shape[2], str(rows.device)))
        ready = Ready.of(rows, 1.0)
        found = search_fused(rows, 2, 1.0, left_out=copy, ready=ready)
        row_kernels.build_again(rows, copy)
        kept = (~copy).sum(dim=1)
        bars = _subsamples(rows, ready, copy, kept)
        return cls(rows, copy, found, {"kept": kept, "clash": clash, **_fitted(found, copy), "bars": bars})

    def again(self, places: Sequence[int], most: int) -> list[Found]:
        """What was found of some of these sites, with at most so many rows of each that are not certain searched in
        float64."""
        return mended(self.rows, 2, [self.found[place] for place in places], self.copy, most, places)

    def settled(self, place: int, one: Found) -> dict[str, Tensor]:
        """The sums of one site, of which so much is known, all of it certain."""
        kept = (~self.copy[place]).nonzero().reshape(-1)
        # Places of neighbours are those among all rows; nothing here asks for them.
        left = Found(one.distances[kept], one.indices[kept], one.settled[kept])
        return fitted(settle(self.rows[place][kept], 2, 1.0, left).distances[None])


def _make_certain(parts: Sequence[_Searched], here: dict[str, np.ndarray]) -> None:
    """Put right what was not certain, of all sites with one more question; ``here`` is brought up to date in place."""
    usable = (here["kept"] >= LEAST_ROWS) & np.isfinite(here["sums"]).all(axis=1)
    unsettled, first = here["unsettled"], 0
    again, sites = list[tuple[_Searched, int, Found]](), list[int]()
    for one in parts:
        some = first + np.arange(len(one.rows))
        some = some[usable[some] & (unsettled[some] > 0)]
        # A site with many such rows does not send the others the long way.
        for these in (some[unsettled[some] <= MENDED], some[unsettled[some] > MENDED]):
            if len(these):
                places = (these - first).tolist()
                better = one.again(places, int(unsettled[these].max()))
                again += [(one, place, found) for place, found in zip(places, better, strict=True)]
                sites += these.tolist()
        first += len(one.rows)
    if not again:
        return
    copy = torch.stack([one.copy[place] for one, place, _ in again])
    for name, value in fetched(_fitted([found for _, _, found in again], copy)).items():
        here[name][sites] = value
    # Rows with many neighbours as near as each other to all digits, and what was not finite before.
    for site, (one, place, found) in zip(sites, again, strict=True):
        if here["unsettled"][site]:
            for name, value in fetched(one.settled(place, found)).items():
                here[name][site] = value[0]


def _fitted(found: Sequence[Found], copy: Bool[Tensor, "s n"]) -> dict[str, Tensor]:
    """Sums behind the slope of each site, the least distance, and how many rows are not certain."""
    near, far = torch.stack([one.distances for one in found]).unbind(dim=2)
    ratios = (far / near).log().masked_fill_(copy, torch.inf).sort(dim=1).values
    return {
        "sums": _slope_sums(ratios, (~copy).sum(dim=1)),
        "least": near.masked_fill(copy, torch.inf).amin(dim=1),
        "unsettled": (~torch.stack([one.settled for one in found])).sum(dim=1),
    }


def _slope_sums(ratios: Float[Tensor, "r l"], kept: Int[Tensor, "r"]) -> Float[Tensor, "r two"]:
    """The two sums behind the slope of ``facco``, for rows of ascending ratios of which the first ``kept`` are real."""
    place = torch.arange(1, ratios.shape[1] + 1, dtype=torch.float64, device=ratios.device)
    number = kept.double()[:, None]
    inside = place <= (FACCO_KEPT * number).floor()
    x = torch.where(inside, ratios, 0.0)
    y = torch.where(inside, -torch.log1p(-torch.where(inside, place / number, 0.0)), 0.0)
    return torch.stack([(x * y).sum(dim=1), x.square().sum(dim=1)], dim=1)


def _subsamples(
    rows: Float[Tensor, "s n d"], ready: Ready, copy: Bool[Tensor, "s n"], kept: Int[Tensor, "s"]
) -> Float[Tensor, "s b three"]:
    """The same sums of disjoint runs of the rows that are no copies, and the least distance met in each. Runs are those
    of ``cut`` for SUBSAMPLES runs, which LEAST_ROWS rows have."""
    order = copy.byte().sort(dim=1, stable=True).indices  # rows that are no copies first
    strides = (kept // SUBSAMPLES).int()
    lengths = strides.clamp_max(SUBSAMPLE_ROWS)
    most = min(SUBSAMPLE_ROWS, rows.shape[1] // SUBSAMPLES)
    distances = row_kernels.nearest_within(rows, ready, order, SUBSAMPLES, strides, lengths, most)
    near, far = distances.flatten(0, 1).unbind(dim=2)
    real = torch.arange(most, device=rows.device) < lengths.repeat_interleave(SUBSAMPLES)[:, None]
    ratios = (far / near).log().masked_fill_(~real, torch.inf).sort(dim=1).values
    sums = _slope_sums(ratios, lengths.repeat_interleave(SUBSAMPLES))
    return torch.cat([sums, near.amin(dim=1, keepdim=True)], dim=1).unflatten(0, (len(rows), SUBSAMPLES))


def _estimates(here: dict[str, np.ndarray], n: int) -> list[Estimate | None]:
    """Of each site, None where two different rows have one code or too few rows are left."""
    kept, clash = here.pop("kept").astype(int), here.pop("clash").astype(bool)
    found: list[Estimate | None] = [None] * len(kept)
    for number in sorted(set(kept[~clash].tolist())):
        if number < LEAST_ROWS:
            continue
        assert cut(number)[0] == SUBSAMPLES
        sites = np.flatnonzero((kept == number) & ~clash)
        for site, one in zip(sites, told({name: value[sites] for name, value in here.items()}, number, n - number), strict=True):  # fmt: skip # noqa: E501
            found[int(site)] = one
    return found
