"""Cross-fitted tests, anisotropy shares and angles of all sites of a look at once.

What ``crossed``, ``anisotropy`` and ``spans`` say of one site, from the same draws and up to rounding, with products
over all sites and one transfer at the end. Only the ordinary case: sites that are not are flagged for the plain path.

Letters: S sites, H halves, P bases (kinds of proxies), C groups of tokens with all tokens as the last, U sequences,
B draws, K the rank, D the width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.kernels import kernels_run
from anisoscope.measures.row_kernels import column_sums, taken_and_measured
from anisoscope.measures.small_eigh import small_eigh
from anisoscope.stats.gram_matrices import PARTED_WIDTH, cell_grams
from anisoscope.tangent.crossed import LEAST_NULL, CrossedTest
from anisoscope.tangent.drawn import held_gaussians, tight
from anisoscope.tangent.stacked_controls import Moments, of_controls
from anisoscope.tangent.units import FEWEST, GIVEN, Halves, in_both, over_both

WIDE_CELLS = 1 << 27
TOGETHER_CELLS = 1 << 25  # of second moments up to which both halves go in the same steps
ZETA = 0.1  # the default of ``anisotropy_share``
LEAST_IN_HALVES = 1e-4  # of chance: a quarter of a hundredth is lost there


@dataclass(frozen=True)
class Layout:
    """How the rows of a probe fall into halves, sequences and groups: the same for all sites and most looks."""

    halves: Halves
    order: tuple[Int[Tensor, "i"], Int[Tensor, "j"]]
    """Rows of each half, those of a group side by side."""
    number: Int[Tensor, "h g"]
    """Rows of each group, by half."""
    place: tuple[Int[Tensor, "i"], Int[Tensor, "j"]]
    """The cell of sequence and group that each of those rows is in."""
    counts: Float[Tensor, "h"]
    """Rows of each half, where the rows are."""
    labels: tuple[str, ...]

    @classmethod
    def of(cls, halves: Halves, bins: Int[Tensor, "n"] | None, labels: Sequence[str]) -> Layout:
        """From the halves and the group of each row."""
        labels = tuple(labels) if bins is not None else ()
        cells = max(len(labels), 1)
        orders, numbers, places = [], [], []
        for rows in halves.rows:
            at = rows.cpu()
            group = torch.zeros(len(at), dtype=torch.int64) if bins is None else bins.cpu().long()[at]
            order = group.argsort(stable=True)
            numbers.append(torch.bincount(group, minlength=cells))
            orders.append(at[order].to(rows.device))
            places.append((halves.units.index[at[order]] * cells + group[order]).to(rows.device))
        number, there = torch.stack(numbers), halves.rows[0].device
        counts = number.sum(dim=1).double().to(there)
        return cls(halves, (orders[0], orders[1]), number, (places[0], places[1]), counts, labels)


@dataclass(frozen=True)
class Seen:
    """What one half of the sequences shows of all sites, still on the device."""

    bottoms: Float[Tensor, "s u c"]
    tops: Float[Tensor, "s p u c"]
    random: Float[Tensor, "s c b"]
    normal: Float[Tensor, "s p c b"]
    traces: Float[Tensor, "s p one_plus_b"]
    squares: Float[Tensor, "s p one_plus_b"]
    whole: Float[Tensor, "s two"]


def seen_by_halves(
    g: Float[Tensor, "s n d"],
    layout: Layout,
    bases: Float[Tensor, "s p h d k"],
    draws: int,
    seed: int,
    total: Callable[[Float[Tensor, "s d d"]], None] | None = None,
) -> tuple[Seen, Seen]:
    """Energies of each half along the bases of the other, those of their controls, and what is left without each.

    ``total`` is given the second moments of all rows, about zero.
    """
    sites, _, width = g.shape
    rank = bases.shape[4]
    drawn = held_gaussians(width, rank, draws, seed=seed, device=g.device, dtype=torch.float64)
    narrow = torch.float64 if tight(width, rank) else g.dtype
    crossed = bases.flip(2).unbind(dim=2)
    if 2 * sites * layout.number.shape[1] * width**2 > TOGETHER_CELLS:
        found, second = [], None
        for half in (0, 1):
            tables, moments = _by_half(g, layout, half, crossed[half])
            found.append(Seen(*tables, **vars(of_controls(moments, crossed[half], drawn, narrow))))
            if total is not None:
                second = moments.total if second is None else second.add_(moments.total)
            del moments
        if total is not None and second is not None:
            total(second)
        return found[0], found[1]
    (one, of_one), (two, of_two) = (_by_half(g, layout, half, crossed[half]) for half in (0, 1))
    if total is not None:
        total(of_one.total + of_two.total)
    both = of_controls(of_one.beside(of_two), torch.cat(crossed), drawn, narrow)
    return Seen(*one, **vars(both[:sites])), Seen(*two, **vars(both[sites:]))


def _by_half(
    g: Float[Tensor, "s n d"], layout: Layout, half: int, bases: Float[Tensor, "s p d k"]
) -> tuple[tuple[Float[Tensor, "s u c"], Float[Tensor, "s p u c"]], Moments]:
    """Energies by sequence and group, of all and along the bases, and second moments by group."""
    sites, _, width = g.shape
    count, rank = bases.shape[1], bases.shape[3]
    at, number = layout.order[half], layout.number[half].tolist()
    ends = list(itertools.accumulate(number))
    units = layout.halves.units.count
    flat = bases.transpose(1, 2).flatten(2).to(g.dtype)
    moments = g.new_empty(sites, len(number), width, width, dtype=torch.float64)
    energies = g.new_empty(sites, count + 1, len(at), dtype=torch.float64)
    means = g.new_empty(sites, width, dtype=torch.float64)
    step = max(1, WIDE_CELLS // (len(at) * width))  # sites whose rows are held apart, in float64 without kernels
    for first in range(0, sites, step):
        few = slice(first, first + step)
        rows, energies[few, 0] = taken_and_measured(g[few], at)
        means[few] = _means(rows)
        cell_grams(rows, ends, moments[few])
        along = (rows @ flat[few]).unflatten(2, (count, rank)).double().square_().sum(dim=3)
        energies[few, 1:] = along.mT
    table = g.new_zeros(sites * (count + 1), units * len(number), dtype=torch.float64)
    table.index_add_(1, layout.place[half], energies.flatten(0, 1))
    table = table.view(sites, count + 1, units, len(number))
    if layout.labels:
        table = torch.cat([table, table.sum(dim=3, keepdim=True)], dim=3)
    groups = moments if layout.labels else moments[:, :0]
    told = Moments(groups, moments.sum(dim=1), means, layout.counts[half].expand(sites))
    return (table[:, 0], table[:, 1:]), told


def _means(rows: Float[Tensor, "s n d"]) -> Float[Tensor, "s d"]:
    """Of the rows of each site, float64."""
    if rows.dtype == torch.float32 and kernels_run(rows.device):
        return column_sums(rows).total / rows.shape[1]  # ``mean`` would copy all of it to float64 first
    return rows.mean(dim=1, dtype=torch.float64)


def resolved(half: Mapping[str, np.ndarray], rank: int, width: int) -> Bool[np.ndarray, "s"]:
    """Whether controls of a half hold what products in halves can tell, at every basis and group of a site.

    Wide moments are formed in halves and meet the draws so: 22 bits, of which what lies outside a basis is the rest of
    a difference. Where there is some, and less than ``LEAST_IN_HALVES`` of chance, the plain path has more digits.
    """
    if width < PARTED_WIDTH:
        return np.ones(len(half["normal"]), dtype=bool)
    total = half["bottoms"].sum(axis=1)[:, None]
    mean = half["normal"].mean(axis=-1) / np.where(total > 0, total, 1.0)
    return np.asarray(((total == 0) | (mean > LEAST_IN_HALVES * rank / width)).all(axis=(1, 2)))


def tests_of_sites(
    halves: Sequence[Mapping[str, np.ndarray]], layout: Layout, rank: int, width: int, draws: int, notes: Sequence[str]
) -> list[list[dict[str, CrossedTest | str]]]:
    """The tests of each site and basis by label, as ``crossed_tests`` has them; "" stands for all tokens.

    ``notes`` come after those that the estimates have anyway: put in later, each would be made twice.
    """
    one, two = both = [_ready(half, layout.number[at].numpy(), rank, width) for at, half in enumerate(halves)]
    share, null = (one.share.value + two.share.value) / 2, (one.random + two.random) / 2
    sites, bases, _ = share.shape
    # ``units.p_value`` of all of them
    above = (null[:, None] >= (share - 1e-9 * np.abs(share))[:, :, :, None]).sum(axis=3)
    p = ((1 + above) / (null.shape[2] + 1)).reshape(-1).tolist()
    least = LEAST_NULL * rank / width
    good = np.logical_and.reduce([(half.total > 0) & (half.mean > least) for half in both]).reshape(-1).tolist()
    n = (one.n + two.n).tolist() * (sites * bases)
    units = [pair for site in np.stack([one.units, two.units], axis=2).tolist() for pair in map(tuple, site * bases)]
    names = {(a, b): over_both(f"{a} sequences", f"{b} sequences") for a, b in set(units)}  # few, as a rule
    over = [names[pair] for pair in units]
    words, controls = (GIVEN, *notes), [in_both(f"{draws} normal controls")] * len(n)
    told = zip(
        estimates(halved(one.share, two.share), "|G Q|^2 / |G|^2", n, over, words, good),
        estimates(over_draws(one.normal, two.normal), "mean share of normal controls", n, controls, words, good),
        estimates(halved(one.ratio, two.ratio), "e(Q) / mean_b e(Q_b), normal controls", n, over, words, good),
        p,
        strict=True,
    )
    labels = (*layout.labels, "")
    return [
        [{label: _one_test(both, (site, base, group), next(told), least) for group, label in enumerate(labels)}
         for base in range(bases)]
        for site in range(sites)
    ]  # fmt: skip


@dataclass(frozen=True)
class Side:
    """A number of one half or of both, of all sites and bases (and groups) at once: values, and error bars where
    ``there``."""

    value: np.ndarray
    stderr: np.ndarray
    dof: np.ndarray | int
    there: np.ndarray | bool


def halved(one: Side, two: Side) -> Side:
    """``units.mean_of_halves`` of them all."""
    stderr = np.hypot(one.stderr, two.stderr) / 2
    return Side((one.value + two.value) / 2, stderr, one.dof + two.dof, np.logical_and(one.there, two.there))


def over_draws(one: np.ndarray, two: np.ndarray, shift: np.ndarray | float = 0.0) -> Side:
    """``units.mean_of_draws`` of them all; draws come last."""
    mean, sd = _mean_and_sd((one + two) / 2)
    draws = one.shape[-1]
    return Side(shift + mean, sd / draws**0.5, draws - 1, draws >= FEWEST)


def estimates(
    side: Side, method: str, n: Sequence[int], over: Sequence[str], notes: tuple[str, ...], wanted: Sequence[bool]
) -> list[Estimate | None]:
    """As Estimates, one after the other; None where it is not wanted."""
    blank = np.zeros(side.value.shape, dtype=np.int64)
    columns = (side.value, side.stderr, (blank == 0) & side.there, blank + side.dof)
    method = f"{method}, cross-fitted"
    found: list[Estimate | None] = []
    for value, stderr, bar, free, rows, units, want in zip(
        *(column.reshape(-1).tolist() for column in columns), n, over, wanted, strict=True
    ):
        if not want:
            found.append(None)
        elif bar:
            found.append(Estimate(value=value, stderr=stderr, n=rows, method=method, notes=notes, over=units, dof=free))
        else:
            found.append(Estimate(value=value, stderr=None, n=rows, method=method, notes=notes))
    return found


@dataclass(frozen=True)
class _Ready:
    """Numbers of one half: of all sites, bases and groups, where bases do not matter of the first of one alone."""

    n: np.ndarray
    units: np.ndarray
    total: np.ndarray
    mean: np.ndarray
    random: np.ndarray
    normal: np.ndarray
    share: Side
    ratio: Side


def _ready(half: Mapping[str, np.ndarray], number: np.ndarray, rank: int, width: int) -> _Ready:
    """Error bars and totals. Sequences first, so that sums over them add whole tables; those without energy, as all
    of the other half, say nothing."""
    here = np.flatnonzero(half["bottoms"].any(axis=(0, 2)))
    bottom = np.ascontiguousarray(half["bottoms"].transpose(1, 0, 2)[here])[:, :, None]
    top = np.ascontiguousarray(half["tops"].transpose(2, 0, 1, 3)[here])
    total, along = bottom.sum(axis=0), top.sum(axis=0)
    safe = np.where(total > 0, total, 1.0)
    share = along / safe
    stderr, count, there = jackknives(top, bottom)
    normal = half["normal"] / safe[..., None]
    mean = normal.mean(axis=-1)
    under = np.maximum(bottom - top, 0) * (rank / (width - rank))
    beside = under.sum(axis=0)
    limit = np.where(beside > 0, along / np.where(beside > 0, beside, 1.0), 0.0)
    rate = share / np.where(mean > 0, mean, 1.0)
    spread, units, known = jackknives(top, under)
    scale = np.abs(rate / np.where(limit > 0, limit, 1.0))
    return _Ready(
        n=np.append(number, number.sum()) if bottom.shape[3] > len(number) else number,
        units=np.count_nonzero(bottom[:, :, 0] > 0, axis=0),
        total=total,
        mean=mean,
        random=half["random"] / safe[:, 0, :, None],
        normal=normal,
        share=Side(share, stderr, count - 1, there),
        ratio=Side(rate, spread * scale, units - 1, known & (limit > 0)),
    )


def _mean_and_sd(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Along the last axis; no spread of a single one."""
    count = values.shape[-1]
    mean = values.mean(axis=-1)
    away = values - mean[..., None]
    return mean, np.sqrt(np.square(away, out=away).sum(axis=-1) / max(count - 1, 1))


def jackknives(top: np.ndarray, bottom: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``units.jackknife`` along the first axis: standard errors, units that count, and whether there is a bar."""
    total, used = bottom.sum(axis=0), bottom > 0
    count = np.count_nonzero(used, axis=0)
    there = (count >= FEWEST) & (bottom.max(axis=0, initial=0.0) < total * (1 - 1e-12))
    without = (top.sum(axis=0) - top) / np.where(used & there, total - bottom, 1.0)
    all_used, many = bool(used.all()), np.maximum(count, 1)
    if not all_used:
        without *= used
    without -= without.sum(axis=0) / many
    if not all_used:
        without *= used
    return np.sqrt((many - 1) / many * np.square(without, out=without).sum(axis=0)), count, there


def _one_test(
    halves: Sequence[_Ready], at: tuple[int, int, int],
    told: tuple[Estimate | None, Estimate | None, Estimate | None, float], least: float,
) -> CrossedTest | str:  # fmt: skip
    share, control, ratio, p = told
    if share is not None and control is not None and ratio is not None:
        return CrossedTest(share, control, ratio, p)
    site, _, group = at
    for half in halves:
        if not half.total[site, 0, group] > 0:
            break
        if not half.mean[at] > least:
            return "no gradient lies outside the basis, so controls have no energy to compare with"
    return "a half has no gradient in these tokens"


def isoscore_shares(
    halves: Sequence[Mapping[str, np.ndarray]], rows: Sequence[int], width: int, sites: Sequence[int]
) -> list[list[Estimate]]:
    """The mean over both halves of ``anisotropy_share`` of isoscore_star, for each basis of these sites."""
    keep = 1 - ZETA

    def score(trace: np.ndarray, square: np.ndarray) -> np.ndarray:
        ratio = trace**2 / (keep**2 * square + (1 - keep**2) * trace**2 / width)
        return (ratio - 1) / (width - 1)

    deltas = []
    for half in halves:
        traces, squares, whole = (half[name][sites] for name in ("traces", "squares", "whole"))
        deltas.append(score(traces, squares) - score(whole[:, 0], whole[:, 1])[:, None, None])
    one, two = deltas
    side = over_draws(-one[:, :, 1:], -two[:, :, 1:], (one[:, :, 0] + two[:, :, 0]) / 2)
    bases, count, controls = one.shape[1], one.shape[0] * one.shape[1], f"{one.shape[2] - 1} controls"
    method, over = f"Delta(Q) - mean_b Delta(Q_b) of isoscore_star, z={ZETA:g}, plugin", in_both(controls)
    found = estimates(side, method, [sum(rows)] * count, [over] * count, (GIVEN,), [True] * count)
    each = [one for one in found if one is not None]
    return [each[at : at + bases] for at in range(0, count, bases)]


def mean_angles(a: Float[Tensor, "m d k"], b: Float[Tensor, "m d k"]) -> Float[Tensor, "m"]:
    """The mean of ``spans.principal_angles`` of each pair of bases, degrees."""
    inner = a.mT @ b
    _, right = small_eigh(inner.mT @ inner)
    along = inner @ right
    cosines, sines = (torch.linalg.vector_norm(one, dim=1) for one in (along, b @ right - a @ along))
    return torch.rad2deg(torch.atan2(sines, cosines)).mean(dim=1)
