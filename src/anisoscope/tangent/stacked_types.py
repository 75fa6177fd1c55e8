"""Distances to centroids by token frequency, and their correlation with it, for all sites of a look at once.

Types, bins and the draws of the bootstrap are those of the probe, the same at every site and look: they are made once.
Results are those of ``frequency``. Letters: S sites, T token types, B draws with the data themselves as the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import OptionError
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.tangent.frequency import CENTROIDS, CORRELATIONS, SAME
from anisoscope.tangent.stacked import jackknives
from anisoscope.tangent.units import FEWEST, stream
from anisoscope.text.frequency import FrequencyBins, TokenCounts

WIDE_CELLS = RANK_CELLS = 1 << 27


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

    @property
    def ordinary(self) -> bool:
        """Whether there are types enough, and of counts that differ, for correlations of both kinds."""
        x = self.log_count
        own = x[self.twice]
        return len(own) >= 4 and all(float(one.max()) > float(one.min()) for one in (x, own))


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
    sites, n, width = x.shape
    t = len(types.size)
    own, overall = (x.new_empty(sites, n, dtype=torch.float64) for _ in range(2))
    of_type = types.size[types.index]
    stretch = (of_type / (of_type - 1).clamp_min(1)).sqrt()
    step = max(1, WIDE_CELLS // (n * width))  # sites whose rows are held as float64 at a time
    for first in range(0, sites, step):
        few = slice(first, first + step)
        wide = x[few].double()
        wide = wide - wide.mean(dim=1, keepdim=True)
        length = torch.linalg.vector_norm(wide, dim=2)
        overall[few] = length * math.sqrt(n / (n - 1))
        centres = wide.new_zeros(len(wide), t, width).index_add_(1, types.index, wide) / types.size[:, None]
        away = torch.linalg.vector_norm(wide.sub_(centres.index_select(1, types.index)), dim=2)
        own[few] = torch.where(away > SAME * length, away * stretch, 0.0)
    sums = x.new_zeros(2, sites, t, dtype=torch.float64)
    sums.view(-1, t).index_add_(1, types.index, torch.stack([own, overall]).flatten(0, 1))
    means = sums / types.size
    drawn = [
        _correlations(types.log_count[keep], mean[:, keep], weights)
        for keep, mean, weights in (
            (types.twice.nonzero().reshape(-1), means[0], types.weights[0]),
            (torch.arange(t, device=x.device), means[1], types.weights[1]),
        )
    ]
    return TypeSums(sums, torch.stack(drawn))


def _correlations(
    x: Float[Tensor, "t"], y: Float[Tensor, "s t"], weights: Float[Tensor, "b t"]
) -> Float[Tensor, "two s b"]:
    """Pearson's and Spearman's correlation of each site under each weighting; NaN where a side is constant."""
    total = weights.sum(dim=1)
    x, y = x - x.mean(), y - y.mean(dim=1, keepdim=True)
    # About the plain means: sums of products lose no digits to the means of the draws.
    m = weights @ torch.cat([x[None], x.square()[None], y, y.square(), y * x]).T
    sites = len(y)
    sx, sxx = m[:, 0], m[:, 1]
    sy, syy, sxy = m[:, 2:].T.unflatten(0, (3, sites))
    pearson = (sxy - sx * sy / total) / ((sxx - sx**2 / total) * (syy - sy**2 / total)).sqrt()
    a = _centred_ranks(x[None], weights, total)[0]
    spread = (weights * a * a).sum(dim=1)
    step = max(1, RANK_CELLS // weights.numel())
    spearman = []
    for some in y.split(step):
        b = _centred_ranks(some, weights, total)
        weighted = weights * b
        spearman.append((weighted * a).sum(dim=2) / (spread * (weighted * b).sum(dim=2)).sqrt())
    return torch.stack([pearson, torch.cat(spearman)])


def _centred_ranks(
    values: Float[Tensor, "s t"], weights: Float[Tensor, "b t"], total: Tensor
) -> Float[Tensor, "s b t"]:
    """Mid-ranks inside each weighting, less their mean; equal values share the middle of their places."""
    ascending, order = values.sort(dim=1, stable=True)
    reach = torch.nn.functional.pad(weights[:, order].transpose(0, 1).cumsum(dim=2), (1, 0))
    first, last = (torch.searchsorted(ascending, values.contiguous(), right=side) for side in (False, True))
    places = [one[:, None].expand(-1, len(weights), -1) for one in (first, last)]
    # The mean of mid-ranks, weighted, is half of the total whatever the ties.
    return (reach.gather(2, places[0]) + reach.gather(2, places[1])) / 2 - (total / 2)[:, None]


def distance_estimates(
    sums: Float[np.ndarray, "two s t"], types: Types
) -> list[list[tuple[Estimate | None, Estimate | None]]]:
    """``frequency.distances_by_frequency`` of each site: own and overall, by bin."""
    found: list[list[list[Estimate | None]]] = [[[] for _ in range(types.number)] for _ in range(sums.shape[1])]
    for which, (name, values) in enumerate(zip(CENTROIDS, sums, strict=True)):
        for number in range(types.number):
            at = types.bins == number
            once = int((at & (types.sizes < 2)).sum()) if which == 0 else 0
            at = at & (types.sizes > 1) if which == 0 else at
            for site, one in enumerate(_means(values[:, at], types.sizes[at], name, once)):
                found[site][number].append(one)
    return [[(one, two) for one, two in bins] for bins in found]


def _means(tops: np.ndarray, sizes: np.ndarray, name: str, once: int) -> Sequence[Estimate | None]:
    if len(sizes) == 0:
        return [None] * len(tops)
    bottoms = np.broadcast_to(sizes, tops.shape)
    stderr, count, there = jackknives(tops, bottoms)
    over, tokens = f"{len(sizes)} token types", int(sizes.sum())
    found = []
    for site, top in enumerate(tops):
        bar = Bar(float(stderr[site]), int(count[site]) - 1, over) if there[site] else None
        notes = () if bar else (f"no error bar: fewer than {FEWEST} independent units with energy",)
        notes = (*notes, f"{once:,} tokens whose type stands here once are left out") if once else notes
        value, method = float(top.sum() / sizes.sum()), f"mean distance to the {name}"
        found.append(Estimate(value=value, n=tokens, method=method, notes=notes, **fields(bar)))
    return found


def correlation_estimates(drawn: Float[np.ndarray, "two two s b"], types: Types) -> list[list[list[Estimate | None]]]:
    """``frequency.correlation`` by centroid, kind and site; None where one side is constant."""
    sizes = [weights.shape[1] for weights in types.weights]
    return [
        [[_correlation(one, kind, t) for one in sites] for kind, sites in zip(CORRELATIONS, kinds, strict=True)]
        for t, kinds in zip(sizes, drawn, strict=True)
    ]


def _correlation(drawn: Float[np.ndarray, "b"], kind: str, t: int) -> Estimate | None:
    value, spread = float(drawn[0]), drawn[1:]
    if not math.isfinite(value):
        return None
    bootstraps = len(spread)
    spread = np.clip(spread[np.isfinite(spread)], -1 + 1e-12, 1 - 1e-12)
    bar, parts = None, {}
    if len(spread) >= bootstraps / 2 and abs(value) < 1 - 1e-12:
        stderr = float(spread.std(ddof=1))
        bar = Bar(stderr, t - 2, f"{t:,} token types (bootstrap)") if stderr > 0 else None
        reach = 1.959964 * float(np.arctanh(spread).std(ddof=1))
        for name, side in (("low", -reach), ("high", reach)):
            limit = math.tanh(math.atanh(value) + side)
            parts[name] = Estimate(value=limit, stderr=None, n=t, method="95 % limit on Fisher's scale, bootstrap")
        textbook = (1 - value**2) / math.sqrt(t - 3)
        parts["fisher stderr"] = Estimate(value=textbook, stderr=None, n=t, method="normal pairs")
    return Estimate(value=value, n=t, method=kind, parts=parts, **fields(bar))
