"""Interventions on token frequency: the same text, trained on as if its Zipf law had another exponent.

**The exponent.** Types are ranked once, by how often they are targets in the training windows, and keep that rank
whatever is done to them. The exponent of any law q over them is the s of the Zipf law that is likeliest under q, which
is the one with the same mean log rank: ``E_s[log r] = E_q[log r]``. Of the plain text this is the maximum-likelihood
exponent of its counts.

**loss.** Targets of type v weigh ``w(v) ~ f(v)^(power - 1)`` in the loss, f their count. The effective law is
``w f ~ f^power``; ``power`` is solved for, so that its exponent is the one asked for. On an exact Zipf law with
exponent a it is a'/a. The mean weight over the targets of all training windows is 1.

**resample.** Windows are drawn with shares ``~ exp(tilt * mean log rank of the window)``: of all shares that give the
text a certain exponent, those nearest to equal ones in relative entropy. Windows hold frequent and rare types alike, so
the exponent moves a little only; where the effective number of windows would fall below a share of all, it ends there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from anisoscope.errors import DegenerateError
from anisoscope.estimate import Estimate
from anisoscope.text.synthetic import ZipfLanguage

LEAST_WINDOWS = 0.1
"""Resampling goes no further than to this effective share of the windows: beyond, a few of them are the text."""
SAME = 1e-9  # exponents nearer than this are the same, and nothing is changed
MOST_POWER, LOWEST, HIGHEST = 200.0, -20.0, 50.0  # brackets of power and of exponents
HALVINGS = 100
STRETCHES = 64  # of neighbouring windows, for error bars
AT_ONCE = 1 << 14  # windows whose targets are looked up together
ROUNDS, DEALT = 4, 5  # what a generator is for, apart from the numbers that training data use

NONE, LOSS, PLACEBO, RESAMPLE, LANGUAGE = "none", "loss", "placebo", "resample", "language"


class FrequencySpec(BaseModel):
    """How one model of a recipe reads the common text as if its Zipf law had another exponent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["loss", "resample"]
    exponent: Annotated[float, Field(ge=0.0, le=5.0, allow_inf_nan=False)]
    """Of the effective law of targets; 0 is every type alike."""
    largest_weight: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """With ``loss``: no target weighs more. The power is solved for with it; what cannot be reached is told."""
    placebo: bool = False
    """The same weights dealt to positions at random, or the same shares to windows: as noisy, and no change of law."""

    @model_validator(mode="after")
    def _fits(self) -> FrequencySpec:
        if self.method == "resample" and self.largest_weight is not None:
            raise ValueError("largest_weight is for method loss; resampling has no weights in the loss")
        return self


@dataclass(frozen=True, eq=False)
class FrequencyPlan:
    """What is done to token frequency in one training, and what that comes to. Made by ``plan_frequency``.

    ``table`` holds the weight of each type as a target, ``shares`` the share of each training window; where both are
    None nothing is changed.
    """

    method: str
    asked: float | None
    own: Estimate
    """The exponent of the text as it is."""
    reached: Estimate
    """The exponent of the effective law."""
    power: float
    """Of ``loss``: the power of f. Of ``resample``: the tilt."""
    effective_share: float
    """Tokens (``loss``) or windows (``resample``) of equal weight that would be as noisy, as a share of all."""
    table: Float[Tensor, "v"] | None = None
    shares: Float[np.ndarray, "w"] | None = None
    law: Float[np.ndarray, "v"] | None = None
    """Of a placebo with weights: cumulative shares of the types, which they are dealt by."""
    entropy_rate: Estimate | None = None
    """Of a language that is known: nats a token that no model can go below."""

    @property
    def short(self) -> bool:
        """Whether the exponent that was asked for could not be reached."""
        return self.asked is not None and self.method != PLACEBO and abs(self.reached.value - self.asked) > 1e-6

    def windows(self, order: Int[np.ndarray, "w"], number: int, seed: int) -> Int[np.ndarray, "w"]:
        """The windows of round ``number`` in their order, given the order in which a plain run reads them.

        Systematic sampling: a window with share p of W comes p W times, rounded up or down. Equal shares give the plain
        order, and shares near them mostly the windows that a plain run reads at the same step.
        """
        if self.shares is None:
            return order
        offset = np.random.default_rng([ROUNDS, seed, number]).random()
        drawn = np.searchsorted(self._cumulated, offset + np.arange(len(order)), side="right")
        chosen: Int[np.ndarray, "w"] = np.minimum(drawn, len(order) - 1)[order]
        return chosen

    def weights(self, targets: Int[Tensor, "b t"], step: int, seed: int) -> Float[Tensor, "b t"] | None:
        """The weight of each target of update ``step`` in the loss; None where all are 1."""
        if self.table is None:
            return None
        of = targets.clamp_min(0)  # positions that are not scored have a weight too, which nobody asks for
        if self.law is not None:
            random = np.random.default_rng([DEALT, seed, step]).random(tuple(targets.shape))
            of = torch.from_numpy(np.minimum(np.searchsorted(self.law, random, side="right"), len(self.law) - 1))
        return self.table[of].float()

    def describe(self) -> dict[str, Any]:
        """As plain values, for the record."""
        known = self.entropy_rate
        return {
            "method": self.method,
            "placebo_of": None if self.method != PLACEBO else LOSS if self.shares is None else RESAMPLE,
            "asked": self.asked,
            "exponent": self.reached.value,
            "stderr": self.reached.stderr,
            "own_exponent": self.own.value,
            "own_stderr": self.own.stderr,
            "over": self.own.over,
            "power": self.power,
            "effective_share": self.effective_share,
            "short": self.short,
            "entropy_rate": None if known is None else known.value,
            "entropy_stderr": None if known is None else known.stderr,
        }

    @cached_property
    def _cumulated(self) -> Float[np.ndarray, "w"]:
        assert self.shares is not None
        cumulated: Float[np.ndarray, "w"] = np.cumsum(self.shares) * len(self.shares)
        return cumulated


def plan_frequency(spec: FrequencySpec | None, targets: Int[Tensor, "w t"], vocab_size: int) -> FrequencyPlan:
    """What a specification comes to on a text, given the targets of its training windows, one window a row."""
    counts = torch.bincount(targets.flatten(), minlength=vocab_size).double()
    rank = _log_ranks(counts)
    own = _over_windows(targets, rank, counts, torch.ones_like(counts))
    if spec is None:
        return FrequencyPlan(NONE, None, own, own, 1.0, 1.0)
    method = PLACEBO if spec.placebo else spec.method
    if abs(spec.exponent - own.value) <= SAME:
        return FrequencyPlan(method, spec.exponent, own, own, 0.0 if spec.method == RESAMPLE else 1.0, 1.0)
    if spec.method == RESAMPLE:
        return _resampled(spec, targets, rank, counts, own)
    power, table = zipf_weights(counts, spec.exponent, spec.largest_weight)
    share = float(counts.sum() / (counts @ table.square()))
    if spec.placebo:
        law = (counts.cumsum(0) / counts.sum()).numpy()
        return FrequencyPlan(method, spec.exponent, own, own, power, share, table=table, law=law)
    reached = _over_windows(targets, rank, counts, table)
    return FrequencyPlan(method, spec.exponent, own, reached, power, share, table=table)


def known_exponent(plan: FrequencyPlan, language: ZipfLanguage) -> FrequencyPlan:
    """A plan for the text of a known language: its exponent without error where nothing changes it, its entropy."""
    plan = replace(plan, entropy_rate=language.entropy_rate)
    if plan.method != NONE:
        return plan
    exact = Estimate(
        value=language.exponent, stderr=None, n=language.vocab_size, method="known", notes=("exact: no error bar",)
    )
    return replace(plan, method=LANGUAGE, asked=language.exponent, reached=exact)


def zipf_weights(
    counts: Float[Tensor, "v"], exponent: float, largest: float | None = None
) -> tuple[float, Float[Tensor, "v"]]:
    """The power, and weights of types ``~ counts^(power - 1)``, with which their law has this exponent.

    The mean weight over tokens is 1; types that were not seen weigh 1, as nobody asks for them. With ``largest``,
    weights above it are cut to it and all scaled to mean 1 again; the power goes down to 0 and no further, where all
    types that are not cut have the same mass, and the exponent may then be above the one asked for.
    """
    seen = counts > 0
    f, total = counts[seen].log(), counts.sum()
    rank = _log_ranks(counts)[seen]
    target = _law(exponent, rank)[0]

    def weights(power: float) -> Float[Tensor, "r"]:
        w = torch.exp((power - 1) * f - (torch.logsumexp(power * f, 0) - total.log()))
        return w if largest is None else _cut(w, counts[seen] / total, largest)

    def mean(power: float) -> float:
        return float((counts[seen] * weights(power)) @ rank / total)

    # The mean log rank falls as the power rises.
    power = 0.0 if mean(0.0) <= target else _solve(mean, target, 0.0, MOST_POWER)
    table = torch.ones_like(counts)
    table[seen] = weights(power)
    return power, table


def zipf_exponent(counts: Float[Tensor, "v"], weights: Float[Tensor, "v"] | None = None) -> float:
    """The exponent of the law of counts, each type weighted, over types ranked by their counts without the weights."""
    rank = _log_ranks(counts)[counts > 0]
    mass = (counts if weights is None else counts * weights)[counts > 0]
    return _exponent(float(mass @ rank / mass.sum()), rank)


def _resampled(
    spec: FrequencySpec, targets: Int[Tensor, "w t"], rank: Tensor, counts: Tensor, own: Estimate
) -> FrequencyPlan:
    """Shares of windows by their mean log rank, as far as the exponent asked for or as the effective number allows."""
    mean_W = torch.cat([rank[part].mean(dim=1) for part in targets.split(AT_ONCE)])
    wanted = _law(spec.exponent, rank[counts > 0])[0]
    sign = 1.0 if wanted > float(mean_W.mean()) else -1.0

    def shares(tilt: float) -> Tensor:
        return torch.softmax(sign * tilt * mean_W, dim=0)

    def effective(tilt: float) -> float:
        return 1 / (len(mean_W) * float(shares(tilt).square().sum()))

    furthest = 1.0
    while effective(furthest) > LEAST_WINDOWS and furthest < 1e9:
        furthest *= 2
    if effective(furthest) < LEAST_WINDOWS:
        furthest = _solve(effective, LEAST_WINDOWS, 0.0, furthest)

    def missing(tilt: float) -> float:
        """How far the mean log rank is from the one wanted, falling to 0 and below."""
        return sign * (wanted - float(shares(tilt) @ mean_W))

    tilt = furthest if missing(furthest) >= 0 else _solve(missing, 0.0, 0.0, furthest)
    p = shares(tilt)
    if spec.placebo:
        p = p[torch.from_numpy(np.random.default_rng([DEALT]).permutation(len(p)))]
    mean = float(p @ mean_W)
    value = _exponent(mean, rank[counts > 0])
    reached = _estimate(value, p * (mean_W - mean), rank[counts > 0])
    method = PLACEBO if spec.placebo else RESAMPLE
    return FrequencyPlan(method, spec.exponent, own, reached, sign * tilt, effective(tilt), shares=p.numpy())


def _over_windows(targets: Int[Tensor, "w t"], rank: Tensor, counts: Tensor, table: Tensor) -> Estimate:
    """The exponent of the weighted law, its error by the delta method from the spread of windows, weights held."""
    ranked = table * rank
    sums = [(table[part].sum(dim=1), ranked[part].sum(dim=1)) for part in targets.split(AT_ONCE)]
    mass_W, of_rank_W = (torch.cat(parts) for parts in zip(*sums, strict=True))
    mean = float(of_rank_W.sum() / mass_W.sum())
    left_W = (of_rank_W - mean * mass_W) / mass_W.sum()
    return _estimate(_exponent(mean, rank[counts > 0]), left_W, rank[counts > 0])


def _estimate(value: float, left_W: Float[Tensor, "w"], rank: Float[Tensor, "r"]) -> Estimate:
    """The exponent with its error, from what each window adds to the error of the mean log rank.

    Neighbouring windows are about the same things, so stretches of them are taken together where there are enough.
    """
    spread = _law(value, rank)[1]
    parts = left_W if len(left_W) < 2 * STRETCHES else torch.stack([s.sum() for s in left_W.tensor_split(STRETCHES)])
    n = len(parts)
    stderr = math.sqrt(n / (n - 1) * float(parts.square().sum())) / spread if n > 1 and spread > 0 else None
    over = "windows" if parts is left_W else "stretches of windows"
    return Estimate(
        value=value,
        stderr=stderr,
        n=len(left_W),
        method="Zipf exponent of the same mean log rank",
        over=None if stderr is None else over,
        dof=None if stderr is None else n - 1,
        notes=() if stderr is not None else ("no error bar: one window",),
    )


def _log_ranks(counts: Float[Tensor, "v"]) -> Float[Tensor, "v"]:
    """The log rank of each type by its count, 1 the most frequent; those of one count in the order of their ids."""
    seen = int((counts > 0).sum())
    if seen < 3:
        raise DegenerateError(f"{seen} types are targets in the training windows; a Zipf law needs 3 or more")
    rank = torch.empty_like(counts)
    rank[counts.argsort(descending=True, stable=True)] = torch.arange(1, len(counts) + 1).to(counts)
    return rank.log()


def _law(s: float, rank: Float[Tensor, "r"]) -> tuple[float, float]:
    """Mean and variance of log rank under the Zipf law with exponent s."""
    p = torch.softmax(-s * rank, dim=0)
    mean = float(p @ rank)
    return mean, float(p @ (rank - mean).square())


def _exponent(mean: float, rank: Float[Tensor, "r"]) -> float:
    return _solve(lambda s: _law(s, rank)[0], mean, LOWEST, HIGHEST)


def _solve(falling: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a falling function has this value, by halving: it cannot run away."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def _cut(w: Float[Tensor, "r"], share: Float[Tensor, "r"], largest: float) -> Float[Tensor, "r"]:
    """Weights cut at the largest and scaled so that their mean over tokens is 1 again."""
    if float(w.max()) <= largest:
        return w
    factor = _solve(lambda log: -float(share @ (math.exp(log) * w).clamp_max(largest)), -1.0, 0.0, 700.0)
    return (math.exp(factor) * w).clamp_max(largest)
