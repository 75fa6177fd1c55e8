"""What the two ways of the tangent analysis share: one site made ready, and the words of what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.estimate import Estimate
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.runs.records import Curve
from anisoscope.tangent.anisotropy import LeftOver, anisotropy_share, unit_covariance
from anisoscope.tangent.controls import control_bases
from anisoscope.tangent.proxies import Proxy, ProxyTracker
from anisoscope.tangent.stacked import isoscore_shares
from anisoscope.tangent.units import Halves, mean_of_draws
from anisoscope.text.frequency import FrequencyBins, TokenCounts

OVERLAP = "share of the span inside that of PCA"
SPLIT = "mean principal angle between the fits of two halves"
DRIFT = "mean principal angle to the last look's fit, degrees"
P_VALUE = "(1 + #random bases with as much) / (B + 1)"

Result: TypeAlias = Estimate | Curve | AnisoscopeError


@dataclass(frozen=True)
class Here:
    """One site in one look, made ready: halves of the sequences, and a fitted pair of bases for each proxy."""

    view: SiteView
    g: Tensor
    halves: Halves
    pairs: Mapping[str, tuple[Proxy, Proxy]]
    before: Mapping[str, tuple[Proxy, Proxy]]
    last: bool
    """Whether the dear checks are due."""

    @property
    def bases(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The pairs' bases alone."""
        return {name: (one.basis, two.basis) for name, (one, two) in self.pairs.items()}


@dataclass(frozen=True)
class Anisotropy:
    """What is left of the gradient's anisotropy without each proxy; gradients and their covariance by half."""

    gradients: tuple[Tensor, ...]
    covariances: Tensor
    left: LeftOver
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, here: Here, draws: int, seed: int) -> Anisotropy:
        """Of all proxies at once, each basis against the half that it was not fitted on."""
        gradients = tuple(here.g[rows] for rows in here.halves.rows)
        covariances = torch.stack([unit_covariance(half) for half in gradients])
        bases = torch.stack([torch.stack([pair[1 - half] for pair in here.bases.values()]) for half in (0, 1)])
        left = LeftOver.of(covariances, bases.to(covariances.device), draws, seed)
        return cls(gradients, covariances, left, tuple(here.bases))

    def isoscore(self, kind: str) -> Estimate:
        """The isoscore share of one proxy; an error where nothing is left without it, whatever is without others."""
        own = self.left.of_basis(self.kinds.index(kind))
        rows, width = [len(half) for half in self.gradients], self.covariances.shape[1]
        return isoscore_shares(own.by_half(), rows, width, [0])[0][0]

    def spectral(self, here: Here, kind: str, draws: int, seed: int) -> Estimate:
        """The spectral share of one proxy; dear, since each control has an eigenvalue to find."""
        each = []
        for half, (gradients, covariance) in enumerate(zip(self.gradients, self.covariances, strict=True)):
            basis = here.bases[kind][1 - half]
            controls = control_bases(basis, "normal", draws, seed=seed)
            found = anisotropy_share(gradients, basis, controls, covariance=covariance).spectral_deltas
            assert found is not None
            each.append(found.cpu())
        own, method = float(each[0][0] + each[1][0]) / 2, "Delta(Q) - mean_b Delta(Q_b) of spectral_ratio"
        return mean_of_draws(-each[0][1:], -each[1][1:], len(here.g), method, "controls", own)


@runtime_checkable
class Asked(Protocol):
    """What the stacked way needs of the analysis: its options, its trackers, and the parts it leaves to it."""

    counts: TokenCounts | None
    proxies: Sequence[str]
    rank: int
    draws: int
    seed: int
    mode: str
    _trackers: dict[tuple[str, str, int], ProxyTracker]
    _blocks: dict[str, Tensor]
    _bins: FrequencyBins | None

    def _known(self, site: str) -> dict[str, tuple[Proxy, Proxy]]: ...
    def _keep(self, view: SiteView, kind: str, pair: tuple[Proxy, Proxy]) -> None: ...
    def _note(self, here: Here) -> str: ...
    def _reader(self, here: Here) -> Iterator[tuple[Name, Result]]: ...
    def _matrices(self, here: Here) -> Iterator[tuple[Name, Result]]: ...
    def _by_type(self, here: Here) -> Iterator[tuple[Name, Result]]: ...
    def _attempted(self, part: Callable[[Here], Iterator[tuple[Name, Result]]], here: Here) -> dict[Name, Result]: ...


def plain(values: Sequence[float], n: int, method: str) -> Estimate:
    """A number of fits to so many rows, the mean of both halves where there are two; it has no error bar."""
    notes = (
        ("no error bar: mean of the fits of two halves",) if len(values) > 1 else ("no error bar: one pair of fits",)
    )
    return Estimate(value=sum(values) / len(values), stderr=None, n=n, method=method, notes=notes)


def labels_of(bins: FrequencyBins) -> list[str]:
    """``frequency 1 of 5 (rarest): counts 1 to 12``, and so on."""
    lows = bins.lowest.tolist()
    highs = [*(low - 1 for low in lows[1:]), bins.highest]
    extremes = {0: " (rarest)", len(bins) - 1: " (most frequent)"} if len(bins) > 1 else {}
    return [
        f"frequency {at + 1} of {len(bins)}{extremes.get(at, '')}: counts {low:,} to {high:,}"
        for at, (low, high) in enumerate(zip(lows, highs, strict=True))
    ]
