"""Regularisers against the plain model, seed by seed: loss, geometry and time in a table, and one against the other.

A study is read from the store and its recipe alone: models that differ in nothing but their ``regularizer:``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.estimate import Estimate
from anisoscope.runs.reader import RunReader
from anisoscope.runs.records import layer_of
from anisoscope.views.layout import axis_title, direction
from anisoscope.views.names import MODEL_SITE
from anisoscope.views.numbers import digits_of, interval_words, shown
from anisoscope.views.panels import Axis, Figure, Line, Panel, Table, Toggle
from anisoscope.views.seeds import LEAST_SEEDS, framed, over_seeds
from anisoscope.views.series import FIRST_SLICE, is_stream, measure_title

LOSS = "loss"
MEASURES = ("mean_cosine", "spectral_ratio", "isoscore", "two_nn", "curvature", "turning_angle")
"""Geometry that is shown where it was measured, at most ``MOST_MEASURES`` of it."""
MOST_MEASURES = 4
SPAN = 61  # points of an interval drawn as a line: of so many none gets a mark that could be taken for a seed
WIDE = 3.0  # times the range of the points: intervals that reach farther do not set the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One training at the step where it is compared: its loss, its geometry and how long an update took."""

    step: int
    loss: float
    geometry: Mapping[str, float]
    """Means over the layers of the residual stream, the embedding left out."""
    median_seconds: float | None
    processor_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A model with a regulariser beside the plain one, by the seeds that both have, each pair at one step."""

    name: str
    words: str
    pairs: Mapping[int, tuple[Ended, Ended]]
    """By seed: the model, and the plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plain model and those that differ from it in their regulariser alone."""

    run: str
    plain: str
    ended: Mapping[int, Ended]
    others: tuple[Against, ...]
    measures: tuple[str, ...]


def read_compared(runs: Sequence[RunReader]) -> list[Compared]:
    """Every comparison in the runs: of each plain model of a recipe with those that only add a regulariser."""
    found = []
    for run in runs:
        models = run.recipe.get("models") if isinstance(run.recipe, Mapping) else None
        models = [one for one in models if isinstance(one, Mapping)] if isinstance(models, list) else []
        if not any(one.get("regularizer") for one in models):
            continue
        looks = _looks(run)
        for plain in (one for one in models if not one.get("regularizer")):
            same = [one for one in models if one.get("regularizer") and _rest(one) == _rest(plain)]
            made = _compared(run.name if len(runs) > 1 else "", plain, same, looks)
            if made is not None:
                found.append(made)
    return found


def _rest(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key not in ("name", "regularizer")}


Looks = Mapping[tuple[str, int], Mapping[int, Ended]]
"""By variant and seed, then by step."""


def _looks(run: RunReader) -> Looks:
    with run.snapshot():
        probes, records = run.probes(), run.records(slice=FIRST_SLICE)
    table: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        here = table.setdefault((record.cell, record.step), {"geometry": {}})
        if record.site == MODEL_SITE and record.measure == LOSS:
            here["loss"] = record.estimate.value
        elif is_stream(record.site) and record.measure in MEASURES:
            layer = layer_of(record.site) or 0
            here["geometry"].setdefault(record.measure, {})[layer] = record.estimate.value
    found: dict[tuple[str, int], dict[int, Ended]] = {}
    for probe in probes:
        variant, seed = probe.info.get("variant"), probe.info.get("seed")
        here = table.get((probe.cell, probe.step), {})
        if isinstance(variant, str) and isinstance(seed, int) and "loss" in here:
            pace = probe.info.get("pace")
            pace = pace if isinstance(pace, Mapping) else {}
            found.setdefault((variant, seed), {})[probe.step] = Ended(
                step=probe.step,
                loss=here["loss"],
                geometry={name: _over_layers(values) for name, values in here["geometry"].items()},
                median_seconds=pace.get("median_seconds"),
                processor_seconds=pace.get("processor_seconds"),
            )
    return found


def _over_layers(values: Mapping[int, float]) -> float:
    """The mean over layers; the embedding, which may be of another kind, only where there is nothing else."""
    return statistics.fmean([value for layer, value in values.items() if layer > 0] or values.values())


def _compared(run: str, plain: Mapping[str, Any], same: Sequence[Mapping[str, Any]], looks: Looks) -> Compared | None:
    name = str(plain.get("name"))
    of_plain = {seed: by_step for (variant, seed), by_step in looks.items() if variant == name}
    others = []
    for model in same:
        pairs = {}
        for (variant, seed), by_step in looks.items():
            shared = set(by_step) & set(of_plain.get(seed, {})) if variant == model["name"] else set()
            if max(shared, default=0) > 0:
                pairs[seed] = (by_step[max(shared)], of_plain[seed][max(shared)])
        if pairs:
            words = _said(model["regularizer"])
            others.append(Against(name=str(model["name"]), words=words, pairs=dict(sorted(pairs.items()))))
    if not others:
        return None
    ended = {seed: by_step[max(by_step)] for seed, by_step in sorted(of_plain.items())}
    known = [m for m in MEASURES if all(m in one.geometry for one in ended.values())]
    known = [m for m in known if all(m in mine.geometry for o in others for mine, _ in o.pairs.values())]
    return Compared(run=run, plain=name, ended=ended, others=tuple(others), measures=tuple(known[:MOST_MEASURES]))


def _said(regularizer: Mapping[str, Any]) -> str:
    """``istar, weight 0.1, shrinkage 0.1``; the sites where they are not all of the residual stream."""
    weight = [] if regularizer.get("weight") is None else [f"weight {shown(regularizer['weight'], 'g')}"]
    options = [f"{key} {value}" for key, value in dict(regularizer.get("options") or {}).items()]
    sites = list(regularizer.get("sites") or [])
    where = [] if sites == ["resid.*"] else [f"at {', '.join(map(str, sites))}"]
    return ", ".join([str(regularizer.get("name")), *weight, *options, *where])


def _mean_of(values: Mapping[int, float]) -> Estimate:
    """The mean over seeds with Student's interval; without an error bar where there is one seed."""
    return over_seeds(list(values.values()), f"mean over seeds {', '.join(map(str, values))}")


def difference(pairs: Mapping[int, tuple[Ended, Ended]], measure: str) -> Estimate:
    """Regularised less plain, seed by seed: what a seed does to both cancels."""
    return _mean_of({seed: _value(mine, measure) - _value(base, measure) for seed, (mine, base) in pairs.items()})


def slowdown(pairs: Mapping[int, tuple[Ended, Ended]], *, processor: bool = False) -> Estimate | None:
    """How many times as long an update takes as the plain model's, seed by seed; None where no time was noted."""
    ratios = {}
    for seed, (mine, base) in pairs.items():
        own, plain = ((one.processor_seconds if processor else one.median_seconds) for one in (mine, base))
        if own and plain:
            ratios[seed] = own / plain
    return _mean_of(ratios) if ratios else None


def _value(ended: Ended, measure: str) -> float:
    return ended.loss if measure == LOSS else ended.geometry[measure]


def _signed(estimate: Estimate) -> str:
    """``+0.021 (−0.010 … +0.052)``."""
    ends = interval_words(estimate, plus=True)
    return digits_of(estimate.value, estimate.stderr, plus=True) + (f" ({ends})" if ends else "")


def regularizer_tables(compared: Sequence[Compared]) -> list[Table]:
    """Loss and time, then geometry, of every regulariser beside the plain model."""
    found = []
    for one in compared:
        of = f" of {one.run}" if one.run else ""
        seeds = sorted({len(other.pairs) for other in one.others})
        several = f"{' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
        interval = (
            "with the 95 % interval of the differences seed by seed (Student's t); each is for one comparison"
            if seeds[-1] > 1
            else "of one seed, so without an interval: chance and effect cannot be told apart"
        )
        found.append(
            Table(
                key="regularizers",
                caption=f"Held-out cross-entropy (nats) at the last look{of}, {several}; loss less plain {interval}. "
                "Time of an update against the plain model's, looks left out: the median by the clock, which other "
                "work on the machine moves, and the mean of processor time, which says little where a GPU computes.",
                head=("Model", "Regulariser", "Held-out loss", "Loss less plain", "Time", "Processor time"),
                rows=tuple(_loss_rows(one)),
            )
        )
        if one.measures:
            found.append(
                Table(
                    key="regularizers-geometry",
                    caption="Geometry at the same looks: the mean over layers (the embedding left out), "
                    f"and what was added to the plain model's, {interval}.",
                    head=("Model", *(measure_title(measure) for measure in one.measures)),
                    rows=tuple(_geometry_rows(one)),
                )
            )
    return found


def _loss_rows(one: Compared) -> Iterable[tuple[str, ...]]:
    losses = _mean_of({seed: ended.loss for seed, ended in one.ended.items()})
    yield one.plain, "none", _with_bar(losses), "", "", ""
    last = max(ended.step for ended in one.ended.values())
    for other in one.others:
        steps = sorted({mine.step for mine, _ in other.pairs.values()})
        when = "" if steps == [last] else f" (at step {', '.join(f'{step:,}' for step in steps)})"
        loss = _mean_of({seed: mine.loss for seed, (mine, _) in other.pairs.items()})
        times = (slowdown(other.pairs), slowdown(other.pairs, processor=True))
        cells = ("not noted" if one is None else _times(one) for one in times)
        yield other.name, other.words, _with_bar(loss) + when, _gap(other, one, LOSS), *cells


def _geometry_rows(one: Compared) -> Iterable[tuple[str, ...]]:
    yield (
        one.plain,
        *(_with_bar(_mean_of({seed: ended.geometry[m] for seed, ended in one.ended.items()})) for m in one.measures),
    )
    for other in one.others:
        cells = []
        for measure in one.measures:
            mean = _mean_of({seed: mine.geometry[measure] for seed, (mine, _) in other.pairs.items()})
            cells.append(f"{digits_of(mean.value, mean.stderr)}, {_gap(other, one, measure)}")
        yield other.name, *cells


def _gap(other: Against, one: Compared, measure: str) -> str:
    """A difference with its interval; where other models have several seeds, the lack of one is said."""
    lone = len(other.pairs) == 1 and any(len(each.pairs) > 1 for each in one.others)
    return _signed(difference(other.pairs, measure)) + (" (one seed)" if lone else "")


def _times(ratio: Estimate) -> str:
    return f"× {shown(ratio.value, '.2f')}" + ("" if ratio.stderr is None else f" ± {shown(ratio.stderr, '.2f')}")


def _with_bar(estimate: Estimate) -> str:
    value = digits_of(estimate.value, estimate.stderr)
    return value if estimate.stderr is None else f"{value} ± {digits_of(estimate.stderr, estimate.stderr)}"


def regularizer_words(compared: Sequence[Compared]) -> list[str]:
    """What can be said of the loss: which models lost by their regulariser, which gained, of which nothing is known."""
    said = []
    for one in compared:
        found: dict[str, list[str]] = {"higher": [], "lower": [], "not told apart from": []}
        for other in one.others:
            gap = difference(other.pairs, LOSS)
            interval = gap.interval()
            if interval is not None and gap.n >= LEAST_SEEDS:
                side = "higher" if interval[0] > 0 else "lower" if interval[1] < 0 else "not told apart from"
                found[side].append(f"{other.name} {digits_of(gap.value, gap.stderr, plus=True)}")
        parts = [f"{side}{' than' if side in ('higher', 'lower') else ''} {one.plain}: {', '.join(names)}"
                 for side, names in found.items() if names]  # fmt: skip
        lone = [other.name for other in one.others if len(other.pairs) < LEAST_SEEDS]
        fewest = "One seed" if min(len(other.pairs) for other in one.others) == 1 else "Two seeds"
        if parts:
            none = f" {fewest}, so nothing is decided: {', '.join(lone)}." if lone else ""
            many = " Each by its own 95 % interval, uncorrected for their number." if len(one.others) > 1 else ""
            said.append(f"Held-out loss at the last look, in nats, {'; '.join(parts)}.{many}{none}")
        else:
            said.append(f"{fewest}: no difference from {one.plain} is told apart from what another seed would do.")
    return said


def regularizer_parts(compared: Sequence[Compared]) -> tuple[list[str], list[Table]]:
    """Sentences and tables of the section."""
    return regularizer_words(compared), regularizer_tables(compared)


def regularizer_figures(compared: Sequence[Compared]) -> tuple[Figure, ...]:
    """Held-out loss against geometry: a point for each model and seed, and means with 95 % intervals both ways."""
    figures = []
    for number, one in enumerate(compared):
        if not one.measures:
            continue
        last = max(ended.step for ended in one.ended.values())
        models = {one.plain: dict(one.ended)} | {
            other.name: {seed: mine for seed, (mine, _) in other.pairs.items() if mine.step == last}
            for other in one.others
        }
        models = {name: ended for name, ended in models.items() if ended}
        early = [other.name for other in one.others if other.name not in models]
        panels = tuple(framed(_panel(one, models, measure)) for measure in one.measures)
        toggles = tuple(
            Toggle(kind="model", value=name, role=role, dash=None, on=True) for role, name in enumerate(models)
        )
        several = any(len(ended) > 1 for ended in models.values())
        bars = "Circles: one seed each. Diamonds: means over seeds, with 95 % intervals (Student's t) of each model on "
        bars += "its own; differences from the plain model, seed by seed, are in the table. "
        caption = (
            f"{bars if several else 'One seed, and no error bar. '}Geometry is the mean over layers "
            "(the embedding left out) at the last look. A regulariser that costs nothing moves a point sideways; "
            "one that only hurts moves it up."
        )
        caption += f" Not drawn, as it is not as far: {', '.join(early)}." if early else ""
        run = f" · {one.run}" if one.run else ""
        key = "regularizers" if len(compared) == 1 else f"regularizers-{number}"
        figures.append(
            Figure(
                key=key, title=f"Loss against geometry{run}", caption=caption, panels=panels, toggles=toggles, columns=2
            )
        )
    return tuple(figures)


def _panel(one: Compared, models: Mapping[str, Mapping[int, Ended]], measure: str) -> Panel:
    lines: list[Line] = []
    for role, (name, by_seed) in enumerate(models.items()):
        look: Any = {"role": role, "tags": {"model": name, "seeds": "all"}}
        for seed, ended in by_seed.items():
            words = f"{name} · seed {seed} · step {ended.step:,}\nheld-out loss: {shown(ended.loss, '.4g')}\n"
            words += f"{measure_title(measure)}: {shown(ended.geometry[measure], '.4g')}"
            lines.append(_points(name, [ended.geometry[measure]], [ended.loss], [words], **look))
        if len(by_seed) > 1:
            x = _mean_of({seed: ended.geometry[measure] for seed, ended in by_seed.items()})
            y = _mean_of({seed: ended.loss for seed, ended in by_seed.items()})
            lines += _mean(name, x, y, measure, look)
    suffix = f"-{one.run}" if one.run else ""
    return Panel(
        key=f"regularizers-{measure}{suffix}",
        title=measure_title(measure),
        x=Axis(title=axis_title(measure), range=_frame(lines)),
        y=Axis(title="held-out loss (nats)"),
        lines=tuple(lines),
        note=direction(measure),
    )


def _frame(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The axis around the points where intervals, as those of two seeds, would press them into a corner."""
    points = [x for line in lines if len(line.x) == 1 for x in line.x]
    every = [x for line in lines for x in line.x]
    low, high = min(points), max(points)
    if not 0 < WIDE * (high - low) < max(every) - min(every):
        return None
    return low - (high - low) / 2, high + (high - low) / 2


def _mean(name: str, x: Estimate, y: Estimate, measure: str, look: Mapping[str, Any]) -> list[Line]:
    """A mean with its interval in loss, and a line for its interval in geometry."""
    across, up = x.interval(), y.interval()
    assert across is not None and up is not None  # more than one seed
    words = f"{name}, mean over {x.n} seeds\nheld-out loss: {_with_bar(y)}\n{measure_title(measure)}: {_with_bar(x)}"
    middle = _points(name, [x.value], [y.value], [words], **look)
    found = [replace(middle, joined=False, lower=(up[0],), upper=(up[1],))]
    if all(map(math.isfinite, across)) and across[1] > across[0]:
        places = [across[0] + (across[1] - across[0]) * i / (SPAN - 1) for i in range(SPAN)]
        found.append(_points(name, places, [y.value] * SPAN, [f"{words}\n95 % interval"] * SPAN, **look))
    return found


def _points(name: str, x: Sequence[float], y: Sequence[float], hover: Sequence[str], **look: Any) -> Line:
    none = (None,) * len(x)
    return Line(name=name, x=tuple(x), y=tuple(y), lower=none, upper=none, hover=tuple(hover), **look)
