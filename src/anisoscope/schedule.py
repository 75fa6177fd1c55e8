"""Schedules: at which steps of a training run to look. Each is a frozen value, a pure function of the state of the run.

every(50)                                   # steps 0, 50, 100, ...
log_spaced(8)                               # step 0, then eight steps in each factor of ten
by_tokens(1_000_000)                        # whenever another million tokens has gone by
wall_share(0.02)                            # as often as two per cent of the wall-clock allows
either(log_spaced(8), every(1000))          # where any of them is due
until(10_000, every(50), then=every(1000))  # one up to a step, the other from there on
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from anisoscope.errors import OptionError


@dataclass(frozen=True, slots=True)
class Last:
    """The last look: at which step it was, how many tokens had gone by, and how many seconds it took."""

    step: int
    tokens: int | None = None
    seconds: float = 0.0


@runtime_checkable
class Schedule(Protocol):
    """Says whether a look is due. ``last`` is the look before, or None where there was none."""

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether to look after ``step``, with ``seconds_spent`` on looking so far out of ``seconds_total``."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Steps that ``steps`` divides, 0 among them."""

    steps: int

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether the step is a multiple."""
        return step >= 0 and step % self.steps == 0


@dataclass(frozen=True, slots=True)
class LogSpaced:
    """Step 0, and ``first * 10**(i / per_decade)`` rounded to whole steps, each once."""

    per_decade: int
    first: int

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether the step is one of the series."""
        if step == 0:
            return True
        if step < self.first:
            return False
        near = round(self.per_decade * math.log10(step / self.first))
        # Rounding moves a step by half of one, which far down the series is more than one index.
        reach = math.ceil(self.per_decade / (2 * step * math.log(10))) + 1
        return any(self._at(index) == step for index in range(max(0, near - reach), near + reach + 1))

    def _at(self, index: int) -> int:
        return round(self.first * 10 ** (index / self.per_decade))


@dataclass(frozen=True, slots=True)
class ByTokens:
    """The first step at or past each multiple of ``tokens``, and the first step of all."""

    tokens: int

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether a multiple lies between the last look and now."""
        if tokens is None:
            raise OptionError("by_tokens needs the number of tokens so far; call monitor.step(step, tokens=...)")
        if last is None:
            return True
        return tokens // self.tokens > (last.tokens or 0) // self.tokens


@dataclass(frozen=True, slots=True)
class WallShare:
    """As often as ``share`` of the wall-clock allows, if a look costs what the last one did.

    The first step is always looked at, since nothing is known of the cost before; after that looks come
    ``at_least_steps`` apart or more.
    """

    share: float
    at_least_steps: int

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether one more look would keep within the share."""
        if last is None:
            return True
        if step - last.step < self.at_least_steps:
            return False
        return seconds_spent + last.seconds <= self.share * (seconds_total + last.seconds)


@dataclass(frozen=True, slots=True)
class Either:
    """Wherever one of several schedules is due."""

    schedules: tuple[Schedule, ...]

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether any is due."""
        return any(one.due(step, tokens, seconds_spent, seconds_total, last=last) for one in self.schedules)


@dataclass(frozen=True, slots=True)
class Until:
    """``schedule`` at steps before ``step``, and from there on ``then``, or nothing where that is None."""

    step: int
    schedule: Schedule
    then: Schedule | None = None

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether the schedule of this part of the run is due."""
        now = self.schedule if step < self.step else self.then
        return now is not None and now.due(step, tokens, seconds_spent, seconds_total, last=last)


def every(steps: int) -> Every:
    """Every ``steps`` steps, from step 0 on."""
    return Every(_at_least_one("every", "steps", steps))


def log_spaced(per_decade: int, first: int = 1) -> LogSpaced:
    """Step 0, then ``per_decade`` steps in each factor of ten from ``first`` on: dense where things move fast."""
    return LogSpaced(_at_least_one("log_spaced", "per_decade", per_decade), _at_least_one("log_spaced", "first", first))


def by_tokens(tokens: int) -> ByTokens:
    """Whenever another ``tokens`` tokens of training has gone by; the monitor must be told how many there were."""
    return ByTokens(_at_least_one("by_tokens", "tokens", tokens))


def wall_share(share: float, at_least_steps: int = 1) -> WallShare:
    """Spend at most ``share`` of the wall-clock on looking: dear looks come rarely, cheap ones often."""
    if not 0 < share < 1:
        raise OptionError(f"wall_share takes a share between 0 and 1, such as 0.02 for two per cent; got {share}")
    return WallShare(float(share), _at_least_one("wall_share", "at_least_steps", at_least_steps))


def either(*schedules: Schedule) -> Either:
    """Wherever one of the schedules is due."""
    if not schedules:
        raise OptionError("either needs one schedule or more")
    for one in schedules:
        _is_schedule("either", one)
    return Either(tuple(schedules))


def until(step: int, schedule: Schedule, then: Schedule | None = None) -> Until:
    """``schedule`` before ``step``; from there on ``then``, or no look at all."""
    for one in (schedule, then):
        if one is not None:
            _is_schedule("until", one)
    return Until(_at_least_one("until", "step", step), schedule, then)


def _at_least_one(maker: str, name: str, value: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise OptionError(f"{maker} takes a whole number of {name}, 1 or more; got {value!r}")
    return int(value)


def _is_schedule(maker: str, value: object) -> None:
    if not isinstance(value, Schedule):
        raise OptionError(f"{maker} takes schedules such as every(50), got {type(value).__name__}")
