"""From a recipe's schedule to one that the monitor asks, the first and the last step always in it."""

from __future__ import annotations

from dataclasses import dataclass

from anisoscope.schedule import Last, Schedule, by_tokens, either, every, wall_share
from anisoscope.train.watch import ScheduleSpec


@dataclass(frozen=True, slots=True)
class At:
    """Chosen steps."""

    steps: frozenset[int]

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether the step is among them."""
        return step in self.steps


@dataclass(frozen=True, slots=True)
class Resumed:
    """A schedule in a run that goes on: until the first look of its own, the last look is that of the run before."""

    schedule: Schedule
    before: Last

    def due(
        self,
        step: int,
        tokens: int | None = None,
        seconds_spent: float = 0.0,
        seconds_total: float = 0.0,
        *,
        last: Last | None = None,
    ) -> bool:
        """Whether the schedule is due, as it would have been without the break."""
        return self.schedule.due(step, tokens, seconds_spent, seconds_total, last=last or self.before)


def schedule_of(spec: ScheduleSpec, steps: int, before: Last | None = None) -> Schedule:
    """The schedule of a run of so many steps. ``before`` is the last look of a run that is resumed."""
    ends = At(frozenset({0, steps}))
    wanted: Schedule
    if spec.every is not None:
        wanted = either(ends, every(spec.every))
    elif spec.log_spaced is not None:
        wanted = At(frozenset(spread(spec.log_spaced, steps)))
    elif spec.by_tokens is not None:
        wanted = either(ends, by_tokens(spec.by_tokens))
    else:
        assert spec.wall_share is not None  # the recipe was checked
        wanted = either(ends, wall_share(spec.wall_share))
    return wanted if before is None else Resumed(wanted, before)


def spread(looks: int, steps: int) -> list[int]:
    """So many different steps from 0 to the last, evenly on a log axis as far as whole steps allow."""
    if looks > steps:
        return list(range(steps + 1))
    if looks == 2:
        return [0, steps]
    found = [0, 1]
    while len(found) < looks:
        # A fair share of the way that is left: early steps, which cannot be less than one apart, take nothing from
        # the looks of later ones.
        factor = (steps / found[-1]) ** (1 / (looks - len(found)))
        found.append(max(found[-1] + 1, round(found[-1] * factor)))
    return found
