"""Figures of geometry and quality: the battery over training, and the pairs that go together most."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from anisoscope.views.associations import LEAST_LOOKS, without_course
from anisoscope.views.layout import axis_title, unique
from anisoscope.views.names import MODEL_SITE
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Axis, Figure, Line, Panel, Reference, Toggle
from anisoscope.views.quality_pairs import (
    LAST,
    MIDDLE,
    Looks,
    Pair,
    Training,
    by_model,
    compare,
    course_of,
    is_constant,
    last_values,
    quality_order,
    read_looks,
    read_trainings,
)
from anisoscope.views.seeds import band_words, framed, seed_toggles
from anisoscope.views.series import BASELINE, Series, is_quality, measure_title
from anisoscope.views.shelf import Look, Shelf, drawn
from anisoscope.views.training import common_axis

MOST_PAIRS = 4  # pairs with a panel over trainings
PATHS = 2  # pairs with panels over looks
WIDE = 0.02  # baselines that differ by more belong to different labels, and no line stands for them all


def quality_figures(series: Sequence[Series]) -> tuple[Figure, ...]:
    """The battery over steps, then the strongest pairs over trainings, then over looks; none without a battery."""
    shelves = [Shelf(one) for one in series if any(is_quality(record.measure) for record in one.records)]
    if not shelves:
        return ()
    trainings = read_trainings(series)
    return (*_battery(shelves, trainings), *_over_trainings(trainings), *_over_looks(trainings))


def _battery(shelves: Sequence[Shelf], trainings: Sequence[Training]) -> tuple[Figure, ...]:
    """Every number of the battery over steps, models as colours, the middle layer dashed."""
    place, axis = common_axis(shelves)
    battery = (m for s in shelves for m in s.measures if is_quality(m) and not m.endswith(BASELINE))
    names = [name for name in unique(battery, quality_order) if not _flat(shelves, name)]
    layers = {shelf.label: _layers(shelf, trainings) for shelf in shelves}
    panels = []
    for name in names:
        lines: list[Line] = []
        for role, shelf in enumerate(shelves):
            for dash, layer in enumerate((LAST, MIDDLE)):
                site = MODEL_SITE if MODEL_SITE in shelf.sites(name) else layers[shelf.label].get(layer)
                if site is None or (site == MODEL_SITE and dash):
                    continue
                tags = {"model": shelf.label} | ({} if site == MODEL_SITE else {"layer": layer})
                look = Look(name=site, role=role, dash=dash, tags=tags)
                lines += drawn(shelf, lambda of, n=name, at=site: of.get(n, at), lambda r: place(r.step), look)  # type: ignore[misc]
        if lines:
            title, y = measure_title(name), Axis(title=axis_title(name))
            key = f"quality-{name.split('.', 1)[1]}"
            panels.append(
                Panel(key=key, title=title, x=axis, y=y, lines=tuple(lines), references=_baseline(shelves, name))
            )
    if not panels:
        return ()
    several = {layer for places in layers.values() for layer in places}
    toggles = [Toggle(kind="model", value=s.label, role=i, dash=None, on=True) for i, s in enumerate(shelves)]
    switches = [
        Toggle(kind="layer", value=layer, role=None, dash=i, on=True)
        for i, layer in enumerate((LAST, MIDDLE))
        if len(several) > 1
    ]
    own = [shelf.series for shelf in shelves]
    records = [r for shelf in shelves for name in names for site in shelf.sites(name) for r in shelf.get(name, site)]
    caption = (
        "How good the model is, and what a linear probe reads off its last layer (solid) and its middle one (dashed). "
        "Look at the distance to the baseline, which is reached without looking at the model."
    )
    return (
        Figure(
            key="quality-battery",
            title="Quality over training",
            caption=f"{caption} {band_words(own, records)}".strip(),
            panels=tuple(map(framed, panels)),
            toggles=(*(toggles if len(toggles) > 1 else ()), *switches, *seed_toggles(own)),
        ),
    )


def _flat(shelves: Sequence[Shelf], name: str) -> bool:
    """Whether the label of a probe is the same in every row of every model."""
    return all(is_constant(r) for shelf in shelves for site in shelf.sites(name) for r in shelf.get(name, site))


def _layers(shelf: Shelf, trainings: Sequence[Training]) -> dict[str, str]:
    labels = {member.label for member in shelf.members} or {shelf.label}
    return next((one.sites for one in trainings if one.label in labels), {})


def _baseline(shelves: Sequence[Shelf], name: str) -> tuple[Reference, ...]:
    """The baseline as a line where all models have about the same."""
    values = [
        r.estimate.value for s in shelves for site in s.sites(name + BASELINE) for r in s.get(name + BASELINE, site)
    ]
    if not values or max(values) - min(values) > WIDE:
        return ()
    return (Reference(name=f"baseline {shown(fmean(values), '.2g')}", y=fmean(values)),)


def _over_trainings(trainings: Sequence[Training]) -> tuple[Figure, ...]:
    """The pairs with the largest correlation over trainings, a point a training."""
    compared = compare(trainings)
    if compared is None:
        return ()
    known = [(one.pair, one.over) for one in compared.pairs if one.over is not None and one.over.known]
    strongest = sorted(known, key=lambda one: (one[1].carrier is not None, -abs(one[1].r)))[:MOST_PAIRS]
    models = unique(one.model for one in compared.trainings)
    panels = []
    for number, (pair, found) in enumerate(strongest):
        a, b = last_values(compared.trainings, pair)
        lines = []
        for role, model in enumerate(models):
            mine = [i for i, one in enumerate(compared.trainings) if one.model == model]
            words = [
                f"{compared.trainings[i].label}\n{pair.title}\n{shown(a[i], '.4g')}, {shown(b[i], '.4g')}" for i in mine
            ]
            lines.append(_points(model, a[mine], b[mine], words, role))
        alone = "" if found.carrier is None else f"; one {compared.unit} makes it"
        note = f"r = {shown(found.r, '.2f')}{alone}"
        panels.append(_panel(f"quality-over-{number + 1}", pair, lines, note))
    if not panels:
        return ()
    unit = "models, seeds of a model in one colour" if compared.unit == "model" else "seeds"
    return (
        Figure(
            key="quality-over",
            title="Over trainings",
            caption=f"The pairs with the largest correlation over {unit}, at the last look of each training. The "
            "largest of many look large by chance too: the table says which stay after the correction. Those that one "
            f"{compared.unit} makes come last.",
            panels=tuple(panels),
            columns=2,
            toggles=tuple(
                Toggle(kind="model", value=model, role=i, dash=None, on=True)
                for i, model in enumerate(models)
                if len(models) > 1
            ),
        ),
    )


def _over_looks(trainings: Sequence[Training]) -> tuple[Figure, ...]:
    """The pairs with the largest correlation of levels of the first model: levels, and changes beside them."""
    found: list[tuple[Looks, list[Training]]] = []
    for _, mine in by_model(trainings)[:1]:
        looks = [one for one in read_looks(mine) if one.level.known and one.change is not None]
        found += [(one, mine) for one in sorted(looks, key=lambda one: -abs(one.level.r))[:PATHS]]
    panels = []
    for number, (one, mine) in enumerate(found):
        courses = course_of(mine, one.pair)
        if courses is None or courses[0].shape[1] < LEAST_LOOKS or one.change is None:
            continue
        for kind, r in (("levels", one.level.r), ("changes", one.change.r)):
            a, b = courses if kind == "levels" else (without_course(np.diff(x, axis=1)) for x in courses)
            lines = []
            for role, (training, x, y) in enumerate(zip(mine, a, b)):
                words = [
                    f"{training.label}\nlook {i + 1}\n{shown(x[i], '.4g')}, {shown(y[i], '.4g')}" for i in range(len(x))
                ]
                lines.append(_points(training.label, x, y, words, role, joined=kind == "levels"))
            note = f"r = {shown(r, '.2f')}{'' if kind == 'levels' else ' without the common course'}"
            panels.append(_panel(f"quality-{kind}-{number + 1}", one.pair, lines, note, kind))
    if not panels:
        return ()
    model = by_model(trainings)[0][0] if len({one.model for one in trainings}) > 1 else ""
    return (
        Figure(
            key="quality-looks",
            title=f"Over looks{f' of {model}' if model else ''}",
            caption="The pairs whose levels correlate most over training, and beside them their changes from look to "
            "look, without the course that seeds share. Lines follow the training; where the left panel is a line and "
            "the right one a cloud, both have a course over time and nothing else in common.",
            panels=tuple(panels),
            columns=2,
        ),
    )


def _points(name: str, x: np.ndarray, y: np.ndarray, words: Sequence[str], role: int, *, joined: bool = False) -> Line:
    none = (None,) * len(x)
    at, to = tuple(map(float, x)), tuple(map(float, y))
    tags = {"model": name}
    return Line(name=name, x=at, y=to, lower=none, upper=none, hover=tuple(words), role=role, joined=joined, tags=tags)


def _panel(key: str, pair: Pair, lines: Sequence[Line], note: str, kind: str = "") -> Panel:
    change = "change of " if kind == "changes" else ""
    title = f"{measure_title(pair.quality)} against {measure_title(pair.geometry)}, {pair.place}"
    return Panel(
        key=key,
        title=f"{title}: {kind}" if kind else title,
        x=Axis(title=f"{change}{axis_title(pair.geometry)}"),
        y=Axis(title=f"{change}{axis_title(pair.quality)}"),
        lines=tuple(lines),
        note=note,
    )
