"""Seeds: the mean over models that differ in their seed only, with Student's interval over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record
from anisoscope.views.names import UNPOOLED, tangent
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Line, Panel, Toggle
from anisoscope.views.series import Series, population, reading_order

EACH = "each seed"
LEVEL = 0.05
LEAST_SEEDS = 3
"""Below this nothing is tested: two seeds leave one degree of freedom, and no way to see whether they are normal."""
ENOUGH_SEEDS = 5  # what a reader with too few is told of
WIDE = 3.0  # times the range of its lines: bands that reach farther do not set the scale of a panel


def pool_seeds(series: Sequence[Series]) -> list[Series]:
    """The series, with those of one variant that differ in their seed replaced by one series of their means.

    A mean is taken only at steps that all seeds share, and only of numbers that all of them have there. Seeds with
    hardly a step in common (the last one has just begun) stay as they are.
    """
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        if one.variant and one.seed is not None and one.records:
            groups.setdefault((one.run, one.variant), []).append(one)
    found: list[Series] = []
    for one in series:
        mine = groups.get((one.run, one.variant), [])
        if not any(one is other for other in mine) or not _poolable(mine):
            found.append(one)
        elif one is mine[0]:
            found.append(_pooled(mine))
    return found


def _poolable(mine: Sequence[Series]) -> bool:
    different = len({one.seed for one in mine}) == len(mine) > 1
    return different and len(_common(mine)) >= min(2, max(len(one.steps) for one in mine))


def _common(mine: Sequence[Series]) -> set[int]:
    return set.intersection(*(set(one.steps) for one in mine))


def _pooled(mine: Sequence[Series]) -> Series:
    tables = [{(r.step, r.site, r.measure, r.slice): r for r in one.records} for one in mine]
    seeds = [one.seed for one in mine if one.seed is not None]
    records = []
    for key, record in tables[0].items():
        name = tangent(record.measure)
        if (name is None or name.what not in UNPOOLED) and all(key in table for table in tables):
            values = [table[key].estimate for table in tables]
            records.append(replace(record, estimate=mean_over_seeds(values, seeds), cell=""))
    first = mine[0]
    return Series(
        label=f"{first.run} · {first.variant}" if first.run else first.variant,
        records=tuple(sorted(records, key=reading_order)),
        curves=first.curves,
        failures=tuple(failure for one in mine for failure in one.failures),
        facts=dict(first.facts) | {"model": first.variant},
        run=first.run,
        variant=first.variant,
        members=tuple(mine),
    )


def over_seeds(values: Sequence[float], method: str) -> Estimate:
    """A mean with its error over seeds; without one where there is one seed."""
    n = len(values)
    if n == 1:
        return Estimate(value=values[0], stderr=None, n=1, method=method, notes=("one seed: no error bar",))
    stderr = statistics.stdev(values) / math.sqrt(n)
    return Estimate(value=statistics.fmean(values), stderr=stderr, n=n, method=method, over=f"{n} seeds", dof=n - 1)


def can_test(estimate: Estimate) -> bool:
    """Whether a mean over seeds may be tested: it has an error, of at least ``LEAST_SEEDS`` seeds."""
    return bool(estimate.stderr) and estimate.n >= LEAST_SEEDS


def too_few_seeds(seeds: int, tests: int, what: str) -> str:
    """That so few seeds decide nothing, and what would: the least distance from 0 that could be told, with more too."""
    noun = what if tests == 1 else f"{what}s"
    if seeds == 1:
        return f"One seed: {noun} without an error bar, and nothing is decided."
    few, many = (shown(_least_distance(n, tests), ".3g") for n in (seeds, ENOUGH_SEEDS))
    return (
        f"Two seeds: nothing is decided. After the correction for {tests:,} {noun}, one would have to lie {few} "
        f"standard errors from 0; with {ENOUGH_SEEDS} seeds {many} would do. Below {LEAST_SEEDS} seeds none is tested."
    )


def _least_distance(seeds: int, tests: int) -> float:
    """Standard errors from 0 at which the first of so many tests passes the correction."""
    from scipy.special import stdtrit  # here, not above: scipy is slow to import

    return float(stdtrit(seeds - 1, 1 - LEVEL / (2 * tests)))


def mean_over_seeds(estimates: Sequence[Estimate], seeds: Sequence[int]) -> Estimate:
    """The mean of one number over seeds; its error bar is over seeds, whatever the single ones are over."""
    # Parts such as chance are the same for every seed; those that differ would be of one seed only.
    shared = {
        name: part
        for name, part in estimates[0].parts.items()
        if all(name in one.parts and one.parts[name].value == part.value for one in estimates)
    }
    notes = tuple(note for note in estimates[0].notes if all(note in one.notes for one in estimates))
    method = f"mean over seeds {', '.join(map(str, seeds))}"
    mean = over_seeds([one.value for one in estimates], method)
    return replace(mean, notes=(*notes, *mean.notes), parts=shared)


def cells_of(one: Series) -> tuple[Series, ...]:
    """The single trainings behind a series: those it is the mean of, or itself."""
    return one.members or (one,)


def mean_tag(one: Series) -> str:
    """What a switch calls the mean of this series."""
    return f"mean of {len(one.members)} seeds"


def seed_lines(one: Series, line: Line, singles: Iterable[Line]) -> list[Line]:
    """A line of means and, hidden at first, those of the single seeds; only the line itself where there is one seed."""
    if not one.members:
        return [line]
    found = [replace(line, tags=dict(line.tags) | {"seeds": mean_tag(one)})]
    for single in singles:
        none = (None,) * len(single.x)
        tags = dict(line.tags) | {"seeds": EACH}
        single = replace(single, name=line.name, lower=none, upper=none, tags=tags, visible=False)
        found.append(replace(single, role=line.role, dash=2, shade=line.shade))
    return found


def seed_toggles(series: Iterable[Series]) -> tuple[Toggle, ...]:
    """The switches between means and single seeds; none where no series is a mean."""
    means = dict.fromkeys(mean_tag(one) for one in series if one.members)
    if not means:
        return ()
    names = [(name, True) for name in means] + [(EACH, False)]
    return tuple(Toggle(kind="seeds", value=name, role=None, dash=None, on=on) for name, on in names)


def band_words(series: Sequence[Series], records: Iterable[Record], *, switch: bool = True) -> str:
    """What the bands of a figure are over, in a sentence; ``switch`` where the figure can show each seed."""
    counts = sorted({len(one.members) for one in series if one.members})
    said = []
    if counts:
        several = " or ".join(map(str, counts))
        each = "; the button shows each seed" if switch else ""
        said.append(
            f"Lines and bands: mean and 95 % interval over {several} seeds (Student's t), at the steps that all seeds "
            f"share{each}."
        )
        if counts[0] == 2:
            said.append(
                "Two seeds say little: their interval is 12.7 standard errors to either side, and may leave the panel."
            )
    if any(not one.members for one in series):
        overs = {record.estimate.over for record in records if record.estimate.over}
        plain = sorted(set(map(population, overs)) - {"seeds"})
        if plain:
            one_seed = "One seed: bands" if not counts else "Where there is one seed, bands"
            said.append(f"{one_seed} are 95 % intervals over {', '.join(plain)}.")
        elif not counts:
            said.append("One seed, and no error bar.")
    return " ".join(said)


def framed(panel: Panel) -> Panel:
    """A panel of means whose bands dwarf its lines, as those of two seeds do, is drawn around the lines."""
    if not any("seeds" in line.tags for line in panel.lines):
        return panel
    y = [value for line in panel.lines for value in line.y] + [reference.y for reference in panel.references]
    bands = [end for line in panel.lines for end in (*line.lower, *line.upper) if end is not None]
    low, high = min(y), max(y)
    if high > low and bands and max(bands) - min(bands) > WIDE * (high - low):
        margin = (high - low) / 2
        return replace(panel, y=replace(panel.y, range=(low - margin, high + margin)))
    return panel
