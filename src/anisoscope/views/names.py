"""Names of a watched training: which records are of the tangent analysis, which of the whole model, which of a bin."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from anisoscope.estimate import Estimate

MODEL_SITE = "model"
LOSSES = {"loss": "held-out", "train_loss": "training"}
PROXIES = {
    "seminmf": "Semi-NMF",
    "pca": "PCA",
    "local_pca": "Local PCA",
    "ica": "ICA",
    "kmeans": "k-means",
    "random": "Random basis",
}
GRADIENTS = {
    "activation": "activation gradient",
    "reader": "reader gradient",
    "writer": "writer gradient",
    "update": "update",
    "embedding": "embedding gradient",
}
DISTANCES = ("own_distance", "global_distance")
CORRELATIONS = {
    "frequency.own_pearson": "own type, Pearson",
    "frequency.own_spearman": "own type, Spearman",
    "frequency.global_pearson": "global, Pearson",
    "frequency.global_spearman": "global, Spearman",
}
# Readings whose mean over seeds means nothing: p-values and verdicts.
UNPOOLED = ("p", "tangent_p", "survives")
_BIN = re.compile(r"frequency ([0-9]{1,4}) of ([0-9]{1,4})\b")


@dataclass(frozen=True, slots=True)
class Tangent:
    """The name of a number of the tangent analysis; ``gradient`` is empty where it is of the proxy alone."""

    proxy: str
    gradient: str
    what: str

    @property
    def title(self) -> str:
        """For people: ``Semi-NMF, activation gradient``."""
        return ", ".join(filter(None, (PROXIES[self.proxy], GRADIENTS.get(self.gradient, self.gradient))))


@functools.cache
def tangent(measure: str) -> Tangent | None:
    """``seminmf.activation.ratio`` taken apart; None for the name of any other measure."""
    proxy, *rest = measure.split(".")
    if proxy not in PROXIES or len(rest) not in (1, 2) or not all(rest):
        return None
    return Tangent(proxy, rest[0] if len(rest) == 2 else "", rest[-1])


@functools.cache
def is_analysis(measure: str) -> bool:
    """Whether a name belongs to the tangent analysis, which has figures of its own."""
    return measure in DISTANCES or measure in CORRELATIONS or tangent(measure) is not None


@functools.cache
def frequency_bin(slice: str) -> tuple[int, int] | None:
    """The number of a bin of token frequency and how many there are; None for other slices."""
    match = _BIN.match(slice)
    return (int(match.group(1)), int(match.group(2))) if match else None


def proxies_in(measures: Iterable[str]) -> list[str]:
    """The proxies among the names of measures, in their fixed order."""
    found = {name.proxy for name in map(tangent, measures) if name}
    return [proxy for proxy in PROXIES if proxy in found]


def noted(estimate: Estimate, name: str) -> float | None:
    """A number beside an estimate, such as ``chance``, ``K``, ``D`` or ``B``: among its parts, or in its notes."""
    if name in estimate.parts:
        return estimate.parts[name].value
    for note in estimate.notes:
        match = re.search(rf"\b{name}\s*[= ]\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)", note)
        if match:
            return float(match.group(1))
    return None


def chance_of(estimate: Estimate) -> float | None:
    """The share that a random basis would hold, K/D, where it was noted."""
    known = noted(estimate, "chance")
    rank, width = noted(estimate, "K"), noted(estimate, "D")
    return known if known is not None else rank / width if rank and width else None
