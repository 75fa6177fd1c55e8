"""Energy and distance by token frequency: equal-mass bins of log count, and correlations over token types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.tangent.energy import DRAWS, EnergyTest, energy_test
from anisoscope.tangent.units import Units, in_range, ratio, stream
from anisoscope.text.frequency import FrequencyBins, TokenCounts

BOOTSTRAPS = 999
BLOCK_CELLS = 4_000_000  # of bootstrap weights held at a time
KEPT_CELLS = 500_000  # up to so many are kept for the next call, 4 MB
CORRELATIONS = ("pearson", "spearman")
SAME = 1e-12  # of the distance to the global centroid: nothing but rounding
CENTROIDS = ("own-type centroid", "global centroid")
Distances = tuple[Float[Tensor, "n"], Float[Tensor, "n"]]
"""Of each row to the centroid of its own type, and to that of all rows."""


@dataclass(frozen=True)
class FrequencyBin:
    """One bin: its energy test, and its tokens' mean distance to two centroids (error bars over token types).

    ``energy`` is None where the bin has no gradient to test, ``own`` and ``overall`` are None where it has no tokens
    to measure; ``notes`` say why.
    """

    label: str
    tokens: int
    types: int
    energy: EnergyTest | None
    own: Estimate | None
    overall: Estimate | None
    notes: tuple[str, ...] = ()


def energy_by_frequency(
    gradients: Float[Tensor, "n d"],
    activations: Float[Tensor, "n d"],
    ids: Int[Tensor, "n"],
    bins: FrequencyBins,
    basis: Float[Tensor, "d k"],
    *,
    controls: str = "normal",
    draws: int = DRAWS,
    seed: int = 0,
    groups: Int[Tensor, "g"] | None = None,
) -> tuple[FrequencyBin, ...]:
    """The energy test and the distances to centroids in each bin of frequency, rarest first.

    All bins meet the same controls (one seed), so that bins differ by their tokens and not by the draw.
    """
    if not len(gradients) == len(activations) == len(ids):
        raise ShapeError(
            f"{len(gradients)} gradients, {len(activations)} activations and {len(ids)} ids; one of each for each token"
        )
    bin_N = bins.bin_of(ids).to(ids.device)
    found = []
    for number, (label, means) in enumerate(
        zip(bins.labels, distances_by_frequency(activations, ids, bins), strict=True)
    ):
        at = (bin_N == number).nonzero().reshape(-1)
        here, notes = at.to(gradients.device), []
        energy = None
        try:
            some = None if groups is None else groups.to(gradients.device)[here]
            energy = energy_test(gradients[here], basis, controls=controls, draws=draws, seed=seed, groups=some,
                                 activations=activations[here] if controls == "normal_top" else None)  # fmt: skip
        except (DegenerateError, TooFewRowsError) as error:
            notes.append(f"no energy test: {error}")
        for name, value in zip(CENTROIDS, means, strict=True):
            if value is None:
                notes.append(f"no distance to the {name}: no type stands here twice")
        types = len(ids[at].unique())
        found.append(FrequencyBin(label, len(at), types, energy, means[0], means[1], tuple(notes)))
    return tuple(found)


def distances_by_frequency(
    activations: Float[Tensor, "n d"], ids: Int[Tensor, "n"], bins: FrequencyBins, *, distances: Distances | None = None
) -> list[tuple[Estimate | None, Estimate | None]]:
    """Mean distance to the centroid of the own type and to that of all rows, in each bin; None where there is none.

    ``distances`` are those of ``centroid_distances`` where they are known already.
    """
    both = [one.cpu() for one in distances or centroid_distances(activations, ids)]
    ids = ids.cpu()
    bin_N = bins.bin_of(ids)
    found = []
    for number in range(len(bins)):
        at = (bin_N == number).nonzero().reshape(-1)
        own, overall = (
            _mean_distance(distance[at], ids[at], f"mean distance to the {name}")
            for name, distance in zip(CENTROIDS, both, strict=True)
        )
        found.append((own, overall))
    return found


def centroid_distances(
    activations: Float[Tensor, "n d"], ids: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Distance of each row to the centroid of its own token type, and to that of all rows.

    A row is part of its own centroid, which draws the two together: of n rows with variance s^2 the mean squared
    distance is ``s^2 (n-1)/n``. Distances are multiplied by ``sqrt(n/(n-1))`` to undo this, so that rare types do not
    read as tight. A type seen once has no distance to its own centroid: NaN. Where all rows of a type are one row, as
    at an embedding without positions, the distance is 0 and not the rounding of its centroid.
    """
    if len(ids) != len(activations):
        raise ShapeError(f"{len(ids)} ids for {len(activations)} rows; one id for each row is needed")
    rows = activations.double()
    in_range(activations, "activations")  # for its checks; distances keep the rows' own unit
    n = len(rows)
    if n < 2:
        raise TooFewRowsError("distances to a centroid need two rows or more")
    rows = rows - rows.mean(dim=0)
    _, index, count = ids.to(rows.device).unique(return_inverse=True, return_counts=True)
    centres = rows.new_zeros(len(count), rows.shape[1]).index_add_(0, index, rows) / count[:, None]
    of_type = count[index].double()
    own, overall = centres[index].sub_(rows).norm(dim=1), rows.norm(dim=1)
    own = torch.where(own > SAME * overall, own * (of_type / (of_type - 1)).sqrt(), 0.0)
    own[of_type == 1] = math.nan
    return own, overall * math.sqrt(n / (n - 1))


def _mean_distance(distance: Float[Tensor, "m"], ids: Int[Tensor, "m"], method: str) -> Estimate | None:
    known = ~torch.isnan(distance)
    if not bool(known.any()):
        return None
    units = Units.of(ids.to(distance.device)[known], int(known.sum()), distance.device, "token types")
    found = ratio(distance[known], torch.ones_like(distance[known]), units, method)
    once = int((~known).sum())
    if not once:
        return found
    note = f"{once:,} tokens whose type stands here once are left out"
    return Estimate(value=found.value, stderr=found.stderr, over=found.over, dof=found.dof, n=found.n, method=method,
                    notes=(*found.notes, note))  # fmt: skip


@dataclass(frozen=True)
class FrequencyCorrelations:
    """Correlation of log count with mean distance, over token types: to the own centroid, and to that of all rows."""

    own_pearson: Estimate | None
    own_spearman: Estimate | None
    overall_pearson: Estimate
    overall_spearman: Estimate


def frequency_correlations(
    activations: Float[Tensor, "n d"],
    ids: Int[Tensor, "n"],
    counts: TokenCounts,
    *,
    bootstraps: int = BOOTSTRAPS,
    seed: int = 0,
    distances: Distances | None = None,
) -> FrequencyCorrelations:
    """Pearson and Spearman of log count (in ``counts``) against the mean distance of a type's tokens to centroids.

    One point is one token type, so rare and frequent types weigh the same. ``distances`` are those of
    ``centroid_distances`` where they are known already.
    """
    own, overall = distances or centroid_distances(activations, ids)
    types, index = ids.to(own.device).unique(return_inverse=True)
    if int(types.min()) < 0 or int(types.max()) >= counts.vocab_size:
        raise OptionError(f"ids reach {int(types.max())}, the counts know {counts.vocab_size} ids")
    count = counts.counts.to(own.device)[types].double()
    if bool((count == 0).any()):
        raise OptionError("some ids have count 0: the counts are not those of the text that the rows come from")
    size = torch.bincount(index, minlength=len(types)).double()

    def both(distance: Tensor) -> list[Estimate]:
        mean = torch.zeros_like(size).index_add_(0, index, distance) / size
        keep = ~torch.isnan(mean)
        x, y = count[keep].log(), mean[keep]
        return [correlation(x, y, kind, bootstraps=bootstraps, seed=seed) for kind in CORRELATIONS]

    try:
        first, second = both(own)
    except (
        DegenerateError,
        TooFewRowsError,
    ):  # hardly any type stands here twice: no own centroids, and nothing to say of them
        first = second = None  # type: ignore[assignment]
    return FrequencyCorrelations(first, second, *both(overall))


def correlation(
    x: Float[Tensor, "t"],
    y: Float[Tensor, "t"],
    kind: str = "pearson",
    *,
    bootstraps: int = BOOTSTRAPS,
    seed: int = 0,
    over: str = "token types",
) -> Estimate:
    """Pearson's r, or Spearman's (r of mid-ranks), with a bootstrap over pairs.

    ``stderr`` is the bootstrap's. Parts "low" and "high" are a 95 % interval made on Fisher's scale, ``atanh r``, with
    the bootstrap's spread there, so that it stays inside [-1, 1]. Part "fisher stderr" is the textbook
    ``(1 - r^2) / sqrt(T - 3)``, right for normal pairs only; it is there to be compared.
    """
    choose("correlation", kind, CORRELATIONS)
    t = len(x)
    if len(y) != t:
        raise ShapeError(f"{t} values against {len(y)}; pairs are needed")
    if t < 4:
        raise TooFewRowsError(f"a correlation with an error bar needs 4 {over} or more, got {t}")
    x, y = x.detach().double(), y.detach().double()
    if not float((x - x.mean()).abs().max()) > 0 or not float((y - y.mean()).abs().max()) > 0:
        raise DegenerateError("one side of the correlation is constant")
    once = torch.ones(1, t, dtype=torch.float64, device=x.device)
    value = float(_correlated(_Side.of(x, once, kind), y, once, kind)[0])
    spread = torch.cat([_correlated(side, y, weights, kind) for side, weights in _sides(x, kind, bootstraps, seed)])
    spread = spread[torch.isfinite(spread)].clamp(-1 + 1e-12, 1 - 1e-12)  # a draw of one point alone has no r
    bar, parts = None, {}
    if len(spread) >= bootstraps / 2 and abs(value) < 1 - 1e-12:
        stderr = float(spread.std(correction=1))
        bar = Bar(stderr, t - 2, f"{t:,} {over} (bootstrap)") if stderr > 0 else None
        reach = 1.959964 * float(spread.atanh().std(correction=1))
        for name, side in (("low", -reach), ("high", reach)):
            limit = math.tanh(math.atanh(value) + side)
            parts[name] = Estimate(value=limit, stderr=None, n=t, method="95 % limit on Fisher's scale, bootstrap")
        textbook = (1 - value**2) / math.sqrt(t - 3)
        parts["fisher stderr"] = Estimate(value=textbook, stderr=None, n=t, method="normal pairs")
    return Estimate(value=value, n=t, method=kind, parts=parts, **fields(bar))


def _weights(t: int, bootstraps: int, seed: int) -> Iterator[Float[Tensor, "b t"]]:
    """How often each of the pairs is in each bootstrap sample, a block of samples at a time."""
    generator = stream(seed, "bootstrap")
    for at in range(0, bootstraps, step := max(1, BLOCK_CELLS // t)):
        rows = min(step, bootstraps - at)
        picks = torch.randint(t, (rows, t), generator=generator)
        yield torch.zeros(rows, t, dtype=torch.float64).scatter_add_(1, picks, torch.ones_like(picks).double())


@lru_cache(maxsize=4)
def _kept_weights(t: int, bootstraps: int, seed: int) -> tuple[Float[Tensor, "b t"], ...]:
    """The same, kept: a look asks for them at every site, and four times at each."""
    return tuple(_weights(t, bootstraps, seed))


@dataclass(frozen=True)
class _Side:
    """One side of a correlation under each weighting of the pairs: weighted deviations, and the sum of their squares.

    Nobody writes into it.
    """

    weighted: Float[Tensor, "b t"]
    square: Float[Tensor, "b"]

    @classmethod
    def of(cls, values: Float[Tensor, "t"], weights: Float[Tensor, "b t"], kind: str) -> _Side:
        a = _deviations(values, weights, kind)
        weighted = weights * a
        return cls(weighted, (weighted * a).sum(dim=1))


def _sides(
    x: Float[Tensor, "t"], kind: str, bootstraps: int, seed: int
) -> Iterable[tuple[_Side, Float[Tensor, "b t"]]]:
    """One side of a correlation in all bootstrap samples, and the weights of these, a block at a time."""
    if len(x) * bootstraps > KEPT_CELLS:
        return ((_Side.of(x, w, kind), w) for w in (w.to(x.device) for w in _weights(len(x), bootstraps, seed)))
    weights = [w.to(x.device) for w in _kept_weights(len(x), bootstraps, seed)]
    if not x.is_cpu:
        return ((_Side.of(x, w, kind), w) for w in weights)
    return zip(_kept_sides(x.numpy().tobytes(), kind, bootstraps, seed), weights, strict=True)


@lru_cache(maxsize=4)
def _kept_sides(x: bytes, kind: str, bootstraps: int, seed: int) -> tuple[_Side, ...]:
    """A side by its numbers, kept: log counts are the same at every site of every look."""
    values = torch.frombuffer(bytearray(x), dtype=torch.float64)
    return tuple(_Side.of(values, w, kind) for w in _kept_weights(len(values), bootstraps, seed))


def _correlated(side: _Side, y: Tensor, weights: Float[Tensor, "b t"], kind: str) -> Float[Tensor, "b"]:
    """The correlation of each weighting of the pairs (bootstrap counts); NaN where a side is constant."""
    b = _deviations(y, weights, kind)
    cross = (side.weighted * b).sum(dim=1)
    return cross / (side.square * (weights * b).mul_(b).sum(dim=1)).sqrt()


def _deviations(values: Float[Tensor, "t"], weights: Float[Tensor, "b t"], kind: str) -> Float[Tensor, "b t"]:
    """Values or their ranks, less their mean under each weighting."""
    found = values[None] if kind == "pearson" else _mid_ranks(values, weights)
    return found - (weights * found).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)


def _mid_ranks(values: Float[Tensor, "t"], weights: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Ranks inside each bootstrap sample, ties at the middle of the places they share."""
    distinct, place = values.unique(return_inverse=True)
    mass = weights.new_zeros(len(weights), len(distinct)).index_add_(1, place, weights)
    # gather takes a third of the time of an index along the last axis
    return mass.cumsum(dim=1).sub_(mass, alpha=0.5).gather(1, place.expand_as(weights))
