"""Distances to centroids by token frequency, and their correlation with it, for all sites of a look at once.

Types, bins and the draws of the bootstrap are those of the probe, the same at every site and look: they are made once.
Results are those of ``frequency``. Letters: S sites, T token types, B draws with the data themselves as the first, C
the centroids, own and overall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import OptionError
from anisoscope.estimate import Estimate
from anisoscope.kernels import kernels_of, kernels_run, on_its_device
from anisoscope.measures.row_kernels import column_sums
from anisoscope.tangent.frequency import CENTROIDS, CORRELATIONS, SAME
from anisoscope.tangent.units import FEWEST, stream
from anisoscope.text.frequency import FrequencyBins, TokenCounts

WIDE_CELLS = RANK_CELLS = 1 << 27
ROW_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows that the kernel takes


@dataclass(frozen=True)
class Types:
    """The token types of a probe: their rows, counts, bins, and bootstrap weights of all of them and of those with a
    centroid of their own, the plain weighting first."""

    index: Int[Tensor, "n"]
    size: Float[Tensor, "t"]
    log_count: Float[Tensor, "t"]
    twice: Bool[Tensor, "t"]
    weights: tuple[Float[Tensor, "b u"], Float[Tensor, "b t"]]
    bins: np.ndarray
    sizes: np.ndarray
    number: int

    @classmethod
    def of(
        cls, ids: Int[Tensor, "n"], bins: FrequencyBins, counts: TokenCounts, bootstraps: int, seed: int,
        device: torch.device,
    ) -> Types:  # fmt: skip
        """Types of these ids, with everything that does not depend on activations."""
        types, index, size = ids.cpu().unique(return_inverse=True, return_counts=True)
        if int(types.min()) < 0 or int(types.max()) >= counts.vocab_size:
            raise OptionError(f"ids reach {int(types.max())}, the counts know {counts.vocab_size} ids")
        count = counts.counts.cpu()[types].double()
        if bool((count == 0).any()):
            raise OptionError("some ids have count 0: the counts are not those of the text that the rows come from")
        twice = size > 1
        weights = [_drawn(t, bootstraps, seed).to(device) for t in (int(twice.sum()), len(types))]
        return cls(
            index.to(device), size.double().to(device), count.log().to(device), twice.to(device),
            (weights[0], weights[1]), bins.bin_of(types).numpy(), size.double().numpy(), len(bins),
        )  # fmt: skip

    @cached_property
    def runs(self) -> Runs:
        """Rows type by type."""
        names = self.size.argsort(descending=True, stable=True)
        place = torch.empty_like(names).scatter_(0, names, torch.arange(len(names), device=names.device))
        begins = torch.nn.functional.pad(self.size[names].long().cumsum(dim=0), (1, 0))
        return Runs(place[self.index].argsort(stable=True), begins, names, int((self.sizes > 1).sum()))

    @cached_property
    def stretch(self) -> Float[Tensor, "n"]:
        """What undoes that a row is part of its type's centroid."""
        size = self.size[self.index]
        return (size / (size - 1).clamp_min(1)).sqrt()

    @cached_property
    def counts(self) -> _Counts:
        """Log counts under the weights of each centroid: types without one of their own weigh nothing there."""
        weights = torch.zeros_like(self.weights[1]).masked_scatter_(
            self.twice.expand_as(self.weights[1]), self.weights[0]
        )
        return _Counts.of(self.log_count, torch.stack([weights, self.weights[1]]))

    @cached_property
    def cells(self) -> tuple[_Cells, _Cells]:
        """Types by bin: those with a centroid of their own, and all of them."""
        return _Cells.of(self, own=True), _Cells.of(self, own=False)

    @cached_property
    def ordinary(self) -> bool:
        """Whether there are types enough, and of counts that differ, for correlations of both kinds."""
        x = self.log_count
        own = x[self.twice]
        return len(own) >= 4 and all(float(one.max()) > float(one.min()) for one in (x, own))


@dataclass(frozen=True)
class Runs:
    """Rows type by type, types with most rows first: the rows, where each type's begin, which type it is, and how many
    of the types have more than one."""

    order: Int[Tensor, "n"]
    begins: Int[Tensor, "t_and_one"]
    names: Int[Tensor, "t"]
    often: int


def _drawn(t: int, bootstraps: int, seed: int) -> Float[Tensor, "b t"]:
    """How often each pair is drawn: once each, and then as ``frequency.correlation`` draws them."""
    picks = torch.randint(max(t, 1), (bootstraps, t), generator=stream(seed, "bootstrap"))
    weights = torch.zeros(bootstraps, t, dtype=torch.float64).scatter_add_(1, picks, torch.ones_like(picks).double())
    return torch.cat([torch.ones(1, t, dtype=torch.float64), weights])


@dataclass(frozen=True)
class TypeSums:
    """Sums of distances of each type's tokens, own and overall, and correlations of every weighting; on the device."""

    sums: Float[Tensor, "two s t"]
    drawn: Float[Tensor, "two two s b"]


def type_sums(x: Float[Tensor, "s n d"], types: Types) -> TypeSums:
    """Distances of all sites. Correlations by centroid (own, overall), then by kind (Pearson, Spearman)."""
    sums = sums_by_kernel(x, types) if fits(x) else plain_sums(x, types)
    return TypeSums(sums, _correlations(types.counts, sums / types.size))


def fits(x: Float[Tensor, "s n d"]) -> bool:
    """Whether the kernel takes rows of this kind, where they are."""
    right = x.dtype in ROW_TYPES and x.shape[1] > 1 and x.stride(2) == 1 and kernels_run(x.device)
    return right and x.shape[2] <= int(kernels_of("types").WIDEST)


@on_its_device
def sums_by_kernel(x: Float[Tensor, "s n d"], types: Types) -> Float[Tensor, "two s t"]:
    """Sums of distances of each type's tokens, own and overall, from the rows as they are."""
    kernels, (sites, n, width), runs = kernels_of("types"), x.shape, types.runs
    mean = column_sums(x).total / n
    t, tile = len(runs.names), kernels.tiling(width)
    sums = torch.empty(2, sites, t, dtype=torch.float64, device=x.device)
    programs = runs.often + -(-(t - runs.often) // tile["R"])
    kernels.type_distances[(programs * sites,)](
        x, mean, runs.order, runs.begins, runs.names, sums, n, width, sites, t, runs.often, x.stride(0), x.stride(1),
        SAME=SAME, **tile,
    )  # fmt: skip
    return sums


def plain_sums(x: Float[Tensor, "s n d"], types: Types) -> Float[Tensor, "two s t"]:
    """The same by operations of torch, some sites at a time."""
    sites, n, width = x.shape
    t = len(types.size)
    own, overall = both = x.new_empty(2, sites, n, dtype=torch.float64)
    step = max(1, WIDE_CELLS // (n * width))  # sites whose rows are held as float64 at a time
    for first in range(0, sites, step):
        few = slice(first, first + step)
        wide = x[few].double()
        wide = wide - wide.mean(dim=1, keepdim=True)
        length = torch.linalg.vector_norm(wide, dim=2)
        overall[few] = length * math.sqrt(n / (n - 1))
        centres = wide.new_zeros(len(wide), t, width).index_add_(1, types.index, wide) / types.size[:, None]
        away = torch.linalg.vector_norm(wide.sub_(centres.index_select(1, types.index)), dim=2)
        own[few] = torch.where(away > SAME * length, away * types.stretch, 0.0)
    sums = x.new_zeros(2, sites, t, dtype=torch.float64)
    sums.view(-1, t).index_add_(1, types.index, both.flatten(0, 1))
    return sums


@dataclass(frozen=True)
class _Counts:
    """What correlations with log counts need of the counts' side, under each weighting: it is the same at every look.

    ``moments`` are the weights as shares, and deviations times these over the standard deviation; ``padded`` the
    weights and a zero behind them; ``ranks`` the centred ranks times the weights.
    """

    weights: Float[Tensor, "c b t"]
    moments: Float[Tensor, "c two_b t"]
    padded: Float[Tensor, "c b 1 t_and_one"]
    ranks: Float[Tensor, "c b t"]
    cube: Float[Tensor, "c b 1"]
    rank_unit: Float[Tensor, "c b 1"]

    @classmethod
    def of(cls, x: Float[Tensor, "t"], weights: Float[Tensor, "c b t"]) -> _Counts:
        total = weights.sum(dim=2, keepdim=True)
        x = x - x.mean()
        shares = weights / total
        apart = x - shares @ x[:, None]
        spread = (shares * apart.square()).sum(dim=2, keepdim=True)
        padded = torch.nn.functional.pad(weights, (0, 1))[:, :, None]
        ranks = _mid_ranks(x.repeat(len(weights), 1, 1), padded)[0][:, :, 0] - total / 2
        weighted = weights * ranks
        unit = (weighted * ranks).sum(dim=2, keepdim=True) / 12
        spread = torch.where(unit > 0, spread, torch.nan)  # ranks know exactly whether all are equal
        moments = torch.cat([shares, shares * apart / spread.sqrt()], dim=1)
        return cls(weights, moments, padded, weighted, total**3, unit)


def _correlations(counts: _Counts, y: Float[Tensor, "c s t"]) -> Float[Tensor, "c two s b"]:
    """Pearson's and Spearman's correlation of each site under each weighting; NaN where a side is constant."""
    # Squares lose no digits to the means of the draws then; the first of these are the data themselves.
    y = y - y @ counts.moments[:, 0, :, None]
    found = torch.cat([y, y.square()], dim=1) @ counts.moments.mT
    (mean, across), (square, _) = (one.chunk(2, dim=2) for one in found.chunk(2, dim=1))
    spread = torch.addcmul(square, mean, mean, value=-1)
    step = max(1, RANK_CELLS // counts.weights.numel())
    parts = [_by_ranks(counts, some.contiguous()) for some in y.split(step, dim=1)]
    by_rank, alike = parts[0] if len(parts) == 1 else (torch.cat(one, dim=2) for one in zip(*parts, strict=True))
    pearson = across / spread.masked_fill_(alike.mT, torch.nan).sqrt_()
    return torch.stack([pearson, by_rank.mT], dim=1)


def _by_ranks(counts: _Counts, y: Float[Tensor, "c s t"]) -> tuple[Float[Tensor, "c b s"], Bool[Tensor, "c b s"]]:
    """Spearman's correlation of each site under each weighting, and whether all values that count are equal."""
    middle, equal = _mid_ranks(y, counts.padded)
    across = (middle @ counts.ranks[..., None])[..., 0]  # the means of the ranks meet a sum of zero
    # Of ranks u about their mean ``sum w u^2 = (W^3 - sum w h^2) / 12``, where h is the weight of all equal values
    # and W that of all: of the integral of u^2 over all places each value lacks what its own places spread.
    own = counts.cube - (equal.square_() @ counts.weights[..., None])[..., 0]
    return across / (own * counts.rank_unit).sqrt_(), own == 0


def _mid_ranks(
    values: Float[Tensor, "c s t"], padded: Float[Tensor, "c b 1 t_and_one"]
) -> tuple[Float[Tensor, "c b s t"], Float[Tensor, "c b s t"]]:
    """Ranks inside each weighting, equal values at the middle of the places they share, and how many those are."""
    ascending, order = values.sort(dim=2)
    behind = torch.nn.functional.pad(order, (1, 0), value=values.shape[2])  # a zero to start from
    draws = padded.shape[1]
    reach = (
        padded.expand(-1, -1, values.shape[1], -1).gather(3, behind[:, None].expand(-1, draws, -1, -1)).cumsum_(dim=3)
    )
    below, equal = (
        reach.gather(3, torch.searchsorted(ascending, values, right=side)[:, None].expand(-1, draws, -1, -1))
        for side in (False, True)
    )
    equal -= below
    return below.add_(equal, alpha=0.5), equal


@dataclass(frozen=True)
class _Cell:
    """Types of one bin, of both centroids or of those with an own one alone, and what is told of them at every site."""

    at: Int[np.ndarray, "c"]
    tokens: int
    method: str
    over: str | None
    dof: int | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, types: Types, number: int, *, own: bool) -> _Cell:
        here = types.bins == number
        once = int((here & (types.sizes < 2)).sum()) if own else 0
        at = np.flatnonzero(here & (types.sizes > 1) if own else here)
        notes = (f"{once:,} tokens whose type stands here once are left out",) if once else ()
        sizes, method = types.sizes[at], f"mean distance to the {CENTROIDS[0 if own else 1]}"
        total = sizes.sum()
        if len(at) < FEWEST or sizes.max() >= total * (1 - 1e-12):  # as ``units.jackknife``; every type has tokens
            notes = (f"no error bar: fewer than {FEWEST} independent units with energy", *notes)
            return cls(at, int(total), method, None, None, notes)
        return cls(at, int(total), method, f"{len(at)} token types", len(at) - 1, notes)


@dataclass(frozen=True)
class _Cells:
    """All bins, and of those that have types: the types, bin by bin, where each bin begins, how many it has, how many
    tokens, and one over those that are left without each type."""

    each: tuple[_Cell, ...]
    at: Int[np.ndarray, "u"]
    begins: Int[np.ndarray, "c"]
    count: Int[np.ndarray, "c"]
    tokens: Float[np.ndarray, "c"]
    left: Float[np.ndarray, "u"]

    @classmethod
    def of(cls, types: Types, *, own: bool) -> _Cells:
        each = tuple(_Cell.of(types, number, own=own) for number in range(types.number))
        full = [cell for cell in each if len(cell.at)]
        at = np.concatenate([cell.at for cell in full] or [np.zeros(0, dtype=np.int64)])
        count = np.array([len(cell.at) for cell in full], dtype=np.int64)
        tokens = np.array([cell.tokens for cell in full], dtype=np.float64)
        rest = np.repeat(tokens, count) - types.sizes[at]
        begins = np.append(0, np.cumsum(count))[:-1]
        return cls(each, at, begins, count, tokens, 1 / np.where(rest > 0, rest, 1.0))

    def means(self, values: Float[np.ndarray, "s t"]) -> list[list[Estimate | None]]:
        """Of sums over the tokens of each type, by bin and site, with ``units.jackknife`` over types."""
        if not len(self.at):
            return [[None] * len(values) for _ in self.each]
        tops, count = values.take(self.at, axis=1), self.count
        whole = np.add.reduceat(tops, self.begins, axis=1)
        without = np.subtract(whole.repeat(count, axis=1), tops, out=tops)
        without *= self.left
        without -= (np.add.reduceat(without, self.begins, axis=1) / count).repeat(count, axis=1)
        spread = np.add.reduceat(np.square(without, out=without), self.begins, axis=1)
        stderr = np.sqrt((count - 1) / count * spread).T.tolist()
        told = zip((whole / self.tokens).T.tolist(), stderr, strict=True)
        return [[None] * len(values) if not len(cell.at) else _told_means(cell, *next(told)) for cell in self.each]


def _told_means(cell: _Cell, means: Sequence[float], stderr: Sequence[float]) -> list[Estimate | None]:
    n, method, notes, over, dof = cell.tokens, cell.method, cell.notes, cell.over, cell.dof
    if over is None:
        return [Estimate(value=one, stderr=None, n=n, method=method, notes=notes) for one in means]
    return [
        Estimate(value=one, stderr=bar, n=n, method=method, notes=notes, over=over, dof=dof)
        for one, bar in zip(means, stderr, strict=True)
    ]


def distance_estimates(
    sums: Float[np.ndarray, "two s t"], types: Types
) -> list[list[tuple[Estimate | None, Estimate | None]]]:
    """``frequency.distances_by_frequency`` of each site: own and overall, by bin."""
    own, overall = (cells.means(values) for cells, values in zip(types.cells, sums, strict=True))
    bins = [zip(*pair, strict=True) for pair in zip(own, overall, strict=True)]
    return [list(site) for site in zip(*bins, strict=True)]


def correlation_estimates(drawn: Float[np.ndarray, "two two s b"], types: Types) -> list[list[list[Estimate | None]]]:
    """``frequency.correlation`` by centroid, kind and site; None where one side is constant."""
    found = np.stack([drawn[..., 0], *_spreads(drawn[..., 1:])], axis=-1).tolist()
    return [
        [
            [_correlation(*one, kind=kind, t=weights.shape[1]) for one in sites]
            for kind, sites in zip(CORRELATIONS, kinds, strict=True)
        ]
        for weights, kinds in zip(types.weights, found, strict=True)
    ]


def _spreads(drawn: Float[np.ndarray, "two two s b"]) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations of the draws, as they are and on Fisher's scale; NaN where most had a constant side."""
    finite = np.isfinite(drawn)
    clipped = np.clip(np.where(finite, drawn, 0.0), -1 + 1e-12, 1 - 1e-12)
    plain, turned = (values.std(axis=3, ddof=1) for values in (clipped, np.arctanh(clipped)))
    for at in map(tuple, np.argwhere(~finite.all(axis=3)).tolist()):
        some = clipped[at][finite[at]]
        enough = len(some) >= drawn.shape[3] / 2
        plain[at], turned[at] = (some.std(ddof=1), np.arctanh(some).std(ddof=1)) if enough else (np.nan, np.nan)
    return plain, turned


def _correlation(value: float, stderr: float, on_fishers: float, *, kind: str, t: int) -> Estimate | None:
    if not math.isfinite(value):
        return None
    if math.isnan(stderr) or not abs(value) < 1 - 1e-12:
        return Estimate(value=value, stderr=None, n=t, method=kind)
    middle, reach = math.atanh(value), 1.959964 * on_fishers
    limit, textbook = "95 % limit on Fisher's scale, bootstrap", (1 - value**2) / math.sqrt(t - 3)
    parts = {
        "low": Estimate(value=math.tanh(middle - reach), stderr=None, n=t, method=limit),
        "high": Estimate(value=math.tanh(middle + reach), stderr=None, n=t, method=limit),
        "fisher stderr": Estimate(value=textbook, stderr=None, n=t, method="normal pairs"),
    }
    if not stderr > 0:
        return Estimate(value=value, stderr=None, n=t, method=kind, parts=parts)
    over = f"{t:,} token types (bootstrap)"
    return Estimate(value=value, stderr=stderr, n=t, method=kind, over=over, dof=t - 2, parts=parts)
