"""Cross-fitted tests, anisotropy shares and angles of all sites of a look at once.

What ``crossed``, ``anisotropy`` and ``spans`` say of one site, from the same draws and up to rounding, with products
over all sites and one transfer at the end. Only the ordinary case: sites that are not are flagged for the plain path.

Letters: S sites, H halves, P bases (kinds of proxies), C groups of tokens with all tokens as the last, U sequences,
B draws, K the rank, D the width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.tangent.controls import gaussian_draws
from anisoscope.tangent.crossed import LEAST_NULL, CrossedTest
from anisoscope.tangent.units import FEWEST, Halves, halves_joined

WIDE_CELLS = 1 << 27
ZETA = 0.1  # the default of ``anisotropy_share``


@functools.lru_cache(maxsize=4)
def held_draws(width: int, rank: int, draws: int, seed: int, device: str) -> Float[Tensor, "d b k"]:
    """The Gaussian draws of a seed, kept on their device: every look and site meets the same ones."""
    return gaussian_draws(width, rank, draws, seed=seed, device=device)


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
        return cls(halves, (orders[0], orders[1]), torch.stack(numbers), (places[0], places[1]), labels)


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


def seen_by_half(
    g: Float[Tensor, "s n d"],
    layout: Layout,
    half: int,
    bases: Float[Tensor, "s p d k"],
    draws: int,
    seed: int,
) -> Seen:
    """Energies along the bases of the other half, those of their controls, and what is left without each of them."""
    sites, _, width = g.shape
    count, rank = bases.shape[1], bases.shape[3]
    at, number = layout.order[half], layout.number[half].tolist()
    units = layout.halves.units.count
    flat = bases.transpose(1, 2).flatten(2).to(g.dtype)
    moments = g.new_empty(sites, len(number), width, width, dtype=torch.float64)
    energies = g.new_empty(sites, count + 1, len(at), dtype=torch.float64)
    means = g.new_empty(sites, width, dtype=torch.float64)
    step = max(1, WIDE_CELLS // (len(at) * width))  # sites whose rows are held as float64 at a time
    for first in range(0, sites, step):
        few = slice(first, first + step)
        rows = g[few].index_select(1, at)
        wide = rows.double()
        means[few] = wide.mean(dim=1)
        for cell, part in enumerate(wide.split(number, dim=1)):
            moments[few, cell] = part.mT @ part
        energies[few, 0] = torch.linalg.vector_norm(rows, dim=2).double().square()
        along = (rows @ flat[few]).unflatten(2, (count, rank)).double().square().sum(dim=3)
        energies[few, 1:] = along.mT
    table = g.new_zeros(sites * (count + 1), units * len(number), dtype=torch.float64)
    table.index_add_(1, layout.place[half], energies.flatten(0, 1))
    table = table.view(sites, count + 1, units, len(number))
    total = moments.sum(dim=1)
    covariance = (total - len(at) * means[:, :, None] * means[:, None, :]) / (len(at) - 1)
    if layout.labels:
        table = torch.cat([table, table.sum(dim=3, keepdim=True)], dim=3)
        moments = torch.cat([moments, total[:, None]], dim=1)
    z = held_draws(width, rank, draws, seed, str(g.device))
    small = _Small.of(z.double(), bases.double())
    tight = 8 * rank > width  # as ``Draws.of``: float32 would cancel there
    random, normal = small.energies(moments, torch.float64 if tight else g.dtype, z, bases)
    traces, squares, whole = small.left_over(covariance, z.double(), bases.double())
    return Seen(table[:, 0], table[:, 1:], random, normal, traces, squares, whole)


@dataclass(frozen=True)
class _Small:
    """Small matrices of draws and bases, float64: ``c = Q^T Z`` and the inverses of ``Z^T Z`` and of what is off Q."""

    c: Float[Tensor, "s p b k k"]
    inverse: Float[Tensor, "b k k"]
    off: Float[Tensor, "s p b k k"]

    @classmethod
    def of(cls, z: Float[Tensor, "d b k"], q: Float[Tensor, "s p d k"]) -> _Small:
        inner = z.permute(1, 2, 0) @ z.permute(1, 0, 2)
        c = _against(q, z)
        off = inner - c.transpose(3, 4) @ c
        inverses = torch.cat([inner, off.flatten(0, 2)])
        inverses = torch.cholesky_inverse(torch.linalg.cholesky_ex(inverses)[0])
        return cls(c, inverses[: len(inner)], inverses[len(inner) :].view_as(off))

    def energies(
        self, moments: Float[Tensor, "s c d d"], dtype: torch.dtype, z: Tensor, q: Tensor
    ) -> tuple[Float[Tensor, "s c b"], Float[Tensor, "s p c b"]]:
        """Energies of random controls and of controls off each basis."""
        form, across, own = _forms(moments.to(dtype), z.to(dtype), q.to(dtype))
        mixer = self.c @ self.off
        random = (form * self.inverse).sum(dim=(3, 4))
        normal = torch.einsum("scbij,spbij->spcb", form, self.off) - 2 * torch.einsum(
            "spcbij,spbij->spcb", across, mixer
        )
        return random, normal + torch.einsum("spcil,spblj,spbij->spcb", own, self.c, mixer)

    def left_over(
        self, covariance: Float[Tensor, "s d d"], z: Tensor, q: Tensor
    ) -> tuple[Float[Tensor, "s p one_plus_b"], Float[Tensor, "s p one_plus_b"], Float[Tensor, "s two"]]:
        """``tr P C P`` and ``|P C P|^2`` for each basis and its normal controls, and both of C, of trace one."""
        unit = covariance / covariance.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
        both = torch.stack([unit, unit @ unit], dim=1)
        form, across, own = _forms(both, z, q)
        turned = self.c.transpose(3, 4)[:, :, None]
        mixed = turned @ across
        off = form[:, None] - mixed - mixed.transpose(4, 5) + turned @ own[:, :, :, None] @ self.c[:, :, None]
        held = self.off[:, :, None] @ off
        held_trace = held.diagonal(dim1=4, dim2=5).sum(dim=4)
        held_square = (held[:, :, 0] * held[:, :, 0].transpose(3, 4)).sum(dim=(3, 4))
        own_trace = own.diagonal(dim1=3, dim2=4).sum(dim=3)
        one, two = unit.diagonal(dim1=1, dim2=2).sum(dim=1), both[:, 1].diagonal(dim1=1, dim2=2).sum(dim=1)
        inside = torch.cat([own_trace[:, :, :, None], held_trace], dim=3)
        both_squares = torch.cat([own[:, :, 0].square().sum(dim=(2, 3))[:, :, None], held_square], dim=2)
        traces = one[:, None, None] - inside[:, :, 0]
        squares = two[:, None, None] - 2 * inside[:, :, 1] + both_squares
        return traces, squares, torch.stack([one, two], dim=1)


def _against(columns: Float[Tensor, "*lead d k"], z: Float[Tensor, "d b k"]) -> Float[Tensor, "*lead b k k"]:
    """``columns^T Z`` of each draw, float64."""
    _, b, k = z.shape
    flat = columns.transpose(-1, -2) @ z.reshape(len(z), -1)
    return flat.unflatten(-1, (b, k)).transpose(-3, -2).double()


def _forms(
    moments: Float[Tensor, "s c d d"], z: Float[Tensor, "d b k"], q: Float[Tensor, "s p d k"]
) -> tuple[Float[Tensor, "s c b k k"], Float[Tensor, "s p c b k k"], Float[Tensor, "s p c k k"]]:
    """``Z^T M Z``, ``Q^T M Z`` and ``Q^T M Q`` of every moment, draw and basis, float64."""
    _, b, k = z.shape
    images = (moments @ z.reshape(len(z), -1)).unflatten(3, (b, k))
    form = (z.permute(1, 2, 0) @ images.permute(0, 1, 3, 2, 4)).double()
    held = moments[:, None] @ q[:, :, None]
    own = (q.transpose(2, 3)[:, :, None] @ held).double()
    return form, _against(held, z), own


def tests_of_sites(
    halves: Sequence[Mapping[str, np.ndarray]], layout: Layout, rank: int, width: int, draws: int
) -> list[list[dict[str, CrossedTest | str]]]:
    """The tests of each site and basis by label, as ``crossed_tests`` has them; "" stands for all tokens."""
    ready = [_ready(half, layout.number[at].numpy(), rank, width) for at, half in enumerate(halves)]
    sites, bases = halves[0]["tops"].shape[:2]
    labels = (*layout.labels, "")
    share, null = ((ready[0][name] + ready[1][name]) / 2 for name in ("share", "random"))
    # ``units.p_value`` of all of them
    above = (null[:, None] >= (share - 1e-9 * np.abs(share))[:, :, :, None]).sum(axis=3)
    p = ((1 + above) / (null.shape[2] + 1)).tolist()
    return [
        [
            {
                label: _one_test(ready, (site, base, group), rank, width, draws, p[site][base][group])
                for group, label in enumerate(labels)
            }
            for base in range(bases)
        ]
        for site in range(sites)
    ]


def _ready(half: Mapping[str, np.ndarray], number: np.ndarray, rank: int, width: int) -> dict[str, Any]:
    """Error bars and totals of all sites, bases and groups of one half."""
    bottom, top = half["bottoms"].transpose(0, 2, 1), half["tops"].transpose(0, 1, 3, 2)
    total = bottom.sum(axis=2)
    safe = np.where(total > 0, total, 1.0)
    normal = half["normal"] / safe[:, None, :, None]
    under = np.maximum(bottom[:, None] - top, 0) * (rank / (width - rank))
    under_total = under.sum(axis=3)
    return {
        "n": np.append(number, number.sum()) if bottom.shape[1] > len(number) else number,
        "total": total,
        "share": top.sum(axis=3) / safe[:, None],
        "share bar": jackknives(top, np.broadcast_to(bottom[:, None], top.shape)),
        "mean": normal.mean(axis=3),
        "sd": normal.std(axis=3, ddof=1) if normal.shape[3] > 1 else np.zeros(normal.shape[:3]),
        "limit": np.where(under_total > 0, top.sum(axis=3) / np.where(under_total > 0, under_total, 1.0), 0.0),
        "ratio bar": jackknives(top, under),
        "units": (bottom > 0).sum(axis=2),
        "random": half["random"] / safe[:, :, None],
    }


def jackknives(top: np.ndarray, bottom: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``units.jackknife`` along the last axis: standard errors, units that count, and whether there is a bar at all."""
    total, used = bottom.sum(axis=-1, keepdims=True), bottom > 0
    count = used.sum(axis=-1)
    there = (count >= FEWEST) & ~((bottom >= total * (1 - 1e-12)) & used).any(axis=-1)
    left = np.where(used & there[..., None], total - bottom, 1.0)
    without = np.where(used, (top.sum(axis=-1, keepdims=True) - top) / left, 0.0)
    many = np.maximum(count, 1)
    away = np.where(used, without - (without.sum(axis=-1) / many)[..., None], 0.0)
    return np.sqrt((many - 1) / many * np.square(away).sum(axis=-1)), count, there


def _bar(bars: tuple[np.ndarray, np.ndarray, np.ndarray], at: tuple[int, ...], over: str) -> Bar | None:
    stderr, count, there = bars
    return Bar(float(stderr[at]), int(count[at]) - 1, over) if there[at] else None


def _one_test(
    ready: Sequence[dict[str, Any]], at: tuple[int, int, int], rank: int, width: int, draws: int, p: float
) -> CrossedTest | str:
    site, _, group = at
    shares, controls, ratios = [], [], []
    for one in ready:
        if not one["total"][site, group] > 0:
            return "a half has no gradient in these tokens"
        mean = float(one["mean"][at])
        if not mean > LEAST_NULL * rank / width:
            return "no gradient lies outside the basis, so controls have no energy to compare with"
        n, units = int(one["n"][group]), f"{int(one['units'][site, group])} sequences"
        share, limit = float(one["share"][at]), float(one["limit"][at])
        spread = Bar(float(one["sd"][at]) / draws**0.5, draws - 1, f"{draws} normal controls")
        bar = _bar(one["ratio bar"], at, units) if limit > 0 else None
        shares.append((share, n, _bar(one["share bar"], at, units)))
        controls.append((mean, n, spread if draws >= FEWEST else None))
        ratios.append((share / mean, n, bar and bar.scaled(share / mean / limit)))
    return CrossedTest(
        halves_joined(shares, "|G Q|^2 / |G|^2"),
        halves_joined(controls, "mean share of normal controls"),
        halves_joined(ratios, "e(Q) / mean_b e(Q_b), normal controls"),
        p,
    )


def isoscore_shares(half: Mapping[str, np.ndarray], n: int, width: int) -> list[list[Estimate]]:
    """``anisotropy_share`` of isoscore_star for each site and basis of one half."""
    keep = 1 - ZETA

    def score(trace: np.ndarray, square: np.ndarray) -> np.ndarray:
        ratio = trace**2 / (keep**2 * square + (1 - keep**2) * trace**2 / width)
        return (ratio - 1) / (width - 1)

    deltas = score(half["traces"], half["squares"])
    whole = score(half["whole"][:, 0], half["whole"][:, 1])
    name = f"isoscore_star, z={ZETA:g}, plugin"
    return [
        [_difference(deltas[site, base] - whole[site], float(whole[site]), name, n) for base in range(deltas.shape[1])]
        for site in range(len(deltas))
    ]


def _difference(deltas: np.ndarray, whole: float, name: str, n: int) -> Estimate:
    own, null = float(deltas[0]), deltas[1:]
    mean, b = float(null.mean()), len(null)
    bar = Bar(float(null.std(ddof=1)) / b**0.5, b - 1, f"{b} controls") if b >= FEWEST else None

    def part(value: float, what: str) -> Estimate:
        return Estimate(value=value, stderr=None, n=n, method=what)

    return Estimate(
        value=own - mean,
        n=n,
        method=f"Delta(Q) - mean_b Delta(Q_b) of {name}",
        notes=("the error bar is that of the controls' mean; the rows are taken as given",),
        parts={"delta": part(own, f"{name} without Q minus with"), "controls": part(mean, "mean over controls"),
               "whole": part(whole, f"{name} of the gradient")},
        **fields(bar),
    )  # fmt: skip


def mean_angles(a: Float[Tensor, "m d k"], b: Float[Tensor, "m d k"]) -> Float[Tensor, "m"]:
    """The mean of ``spans.principal_angles`` of each pair of bases, degrees."""
    left, cosines, right = torch.linalg.svd(a.transpose(1, 2) @ b, full_matrices=False)
    away = b @ right.transpose(1, 2) - a @ left * cosines[:, None]
    sines = torch.linalg.vector_norm(away, dim=1).clamp(0, 1)
    cosines = cosines.clamp(0, 1)
    angles = torch.where(cosines > 0.5**0.5, torch.asin(sines), torch.acos(cosines))
    return torch.rad2deg(angles).mean(dim=1)
