"""Pairs of a measure of geometry and one of quality: over the looks of each model, and over trainings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from anisoscope.runs.records import Record, site_order
from anisoscope.views.associations import (
    LEAST_LOOKS,
    LEAST_UNITS,
    Association,
    adjusted,
    changes,
    levels,
    units,
    within,
)
from anisoscope.views.layout import unique
from anisoscope.views.names import MODEL_SITE
from anisoscope.views.seeds import cells_of
from anisoscope.views.series import (
    BASELINE,
    FIRST_SLICE,
    QUALITY,
    Series,
    is_quality,
    is_stream,
    measure_group,
    measure_order,
    measure_title,
)

ACCURACY = f"{QUALITY}accuracy"
OF_MODEL = ("loss", ACCURACY)
GEOMETRY = ("anisotropy", "rank", "dimension", "local", "paths")
MIDDLE, LAST = "middle layer", "last layer"
SIGNIFICANT = 0.05
CONSTANT = "constant label"  # how the note begins of a probe whose every row has the same label


@dataclass(frozen=True, slots=True)
class Training:
    """One training with a battery of quality: its numbers over steps by measure and place (a layer, or the model).

    ``targets`` tells the tokens that its accuracy is over: trainings are compared only where these are the same.
    ``constant`` names probes that are no course, since their label is the same in every row: nothing can go with them.
    """

    label: str
    model: str
    seed: object
    sites: dict[str, str]
    courses: dict[tuple[str, str], dict[int, Record]]
    targets: tuple[float, int] | None
    constant: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        """The step of the last look."""
        return max(step for course in self.courses.values() for step in course)

    def last(self, measure: str, place: str) -> Record | None:
        """The record of the last look; None where it has none."""
        return self.courses.get((measure, place), {}).get(self.last_step)


@dataclass(frozen=True, slots=True)
class Pair:
    """A measure of geometry and one of quality, at a layer."""

    geometry: str
    quality: str
    place: str

    @property
    def quality_place(self) -> str:
        """Where the quality is found: in the whole model, or in the layer."""
        return MODEL_SITE if self.quality in OF_MODEL else self.place

    @property
    def title(self) -> str:
        """For people."""
        return f"{measure_title(self.geometry)} of the {self.place} with {short_title(self.quality)}"


@dataclass(frozen=True, slots=True)
class Looks:
    """What the looks of one model say of a pair: plainly, and in changes without the common course.

    ``change`` is None where looks are too few. The adjusted p-values are over all pairs of the model.
    """

    pair: Pair
    level: Association
    change: Association | None
    level_q: float
    change_q: float


@dataclass(frozen=True, slots=True)
class Between:
    """What the last looks of different trainings say of a pair: over units, and over seeds within models.

    The adjusted p-values are over all pairs.
    """

    pair: Pair
    over: Association | None
    inside: Association | None
    over_q: float
    inside_q: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison over trainings: those compared, what a unit is, those left out, and each pair."""

    trainings: list[Training]
    unit: str
    count: int
    left_out: list[str]
    pairs: list[Between]


def read_trainings(series: Iterable[Series]) -> list[Training]:
    """Every single training that has a battery of quality, seeds apart."""
    return [found for one in series for cell in cells_of(one) if (found := _training(cell, one)) is not None]


def is_constant(record: Record) -> bool:
    """Whether a probe had nothing to tell: every row has the same label."""
    return is_quality(record.measure) and any(note.startswith(CONSTANT) for note in record.estimate.notes)


def short_title(measure: str) -> str:
    """``held-out loss``, ``token 1 back``."""
    title = measure_title(measure)
    return title[:1].lower() + title[1:]


def pairs_of(trainings: Sequence[Training]) -> list[Pair]:
    """Every pair that all of some trainings have: geometry by layer, with the model's quality and the layer's own."""
    keys = set.intersection(*(set(one.courses) for one in trainings)) if trainings else set()
    geometry = sorted((k for k in keys if _is_geometry(k[0])), key=lambda k: (k[1] != MIDDLE, measure_order(k[0])))
    battery = [k for k in keys if is_quality(k[0]) or k[0] in OF_MODEL]
    return [
        Pair(measure, quality, place)
        for measure, place in geometry
        for quality in unique((name for name, at in battery if at in (place, MODEL_SITE)), quality_order)
    ]


def read_looks(trainings: Sequence[Training]) -> list[Looks]:
    """Every pair over the looks of one model's seeds; none where there are too few looks for any correlation."""
    found: list[tuple[Pair, Association, Association | None]] = []
    for pair in pairs_of(trainings):
        series = course_of(trainings, pair)
        if series is None:
            continue
        a, b = series
        enough = a.shape[1] >= LEAST_LOOKS
        found.append((pair, levels(a, b), changes(a, b) if enough else None))
    plain = _adjusted([level for _, level, _ in found])
    honest = _adjusted([change for _, _, change in found])
    return [Looks(pair, level, change, p, q) for (pair, level, change), p, q in zip(found, plain, honest)]


def course_of(
    trainings: Sequence[Training], pair: Pair
) -> tuple[Float[np.ndarray, "s n"], Float[np.ndarray, "s n"]] | None:
    """Both series of a pair, a row a seed, at the steps that all seeds have; None below four of them."""
    keys = ((pair.geometry, pair.place), (pair.quality, pair.quality_place))
    every = [one.courses[key] for one in trainings for key in keys]
    steps = sorted(set.intersection(*(set(course) for course in every)))
    if len(steps) < LEAST_UNITS:
        return None
    a, b = (np.array([[one.courses[key][s].estimate.value for s in steps] for one in trainings]) for key in keys)
    return a, b


def compare(trainings: Sequence[Training]) -> Compared | None:
    """Every pair over trainings at their last looks; None without two that can be compared.

    Those can that were scored on the same tokens and looked at last at the same step, as most of them were: one that
    is still under way differs from the others in its time.
    A unit is a model, the mean of its seeds, where there are several models: seeds of one model are alike in what makes
    models differ, and counting each would count that difference many times. Where there is one model a unit is a seed.
    """
    groups: dict[tuple[object, int], list[Training]] = {}
    for one in trainings:
        if one.targets is not None:
            groups.setdefault((one.targets, one.last_step), []).append(one)
    mine = max(groups.values(), key=lambda group: (len(group), group[0].last_step), default=[])
    if len(mine) < 2:
        return None
    models = unique(one.model for one in mine)
    unit = "model" if len(models) > 1 else "seed"
    count = len(models) if unit == "model" else len(mine)
    found = []
    for pair in pairs_of(mine):
        a, b = last_values(mine, pair)
        if len(a) < len(mine) or len(b) < len(mine):
            continue  # it failed at the last look of some
        names, seeds = [one.model for one in mine], [one.seed for one in mine]
        over = units(_means(a, names), _means(b, names)) if unit == "model" and count >= LEAST_UNITS else None
        if unit == "seed" and count >= LEAST_UNITS:
            over = units(a, b)
        found.append((pair, over, within(a, b, names, seeds) if unit == "model" else None))
    over_q, inside_q = _adjusted([one[1] for one in found]), _adjusted([one[2] for one in found])
    pairs = [Between(pair, over, inside, p, q) for (pair, over, inside), p, q in zip(found, over_q, inside_q)]
    left_out = [one.label for one in trainings if all(one is not other for other in mine)]
    return Compared(mine, unit, count, left_out, pairs)


def last_values(trainings: Sequence[Training], pair: Pair) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Both numbers of a pair at the last look of each training."""
    keys = ((pair.geometry, pair.place), (pair.quality, pair.quality_place))
    rows = [[one.last(*key) for one in trainings] for key in keys]
    a, b = (np.array([record.estimate.value for record in row if record is not None]) for row in rows)
    return a, b


def by_model(trainings: Sequence[Training]) -> list[tuple[str, list[Training]]]:
    """Trainings by their model."""
    return [(model, [x for x in trainings if x.model == model]) for model in unique(one.model for one in trainings)]


def stands(association: Association | None, q: float) -> bool:
    """Whether an association stays significant after the correction, and without any one of its units."""
    return passes(association, q) and association is not None and association.carrier is None


def passes(association: Association | None, q: float) -> bool:
    """Whether an association stays significant after the correction, be it made by one unit or by all."""
    return association is not None and association.known and q <= SIGNIFICANT


def _training(cell: Series, of: Series) -> Training | None:
    probes = [r for r in cell.records if is_quality(r.measure)]
    if not probes:
        return None
    layers = sorted({r.site for r in probes if r.site != MODEL_SITE}, key=site_order)
    layers = [site for site in layers if is_stream(site)] or layers
    places = {LAST: layers[-1]} if layers else {}
    if len(layers) > 1:
        places = {MIDDLE: layers[(len(layers) - 1) // 2]} | places
    names = {site: place for place, site in places.items()} | {MODEL_SITE: MODEL_SITE}
    courses: dict[tuple[str, str], dict[int, Record]] = {}
    for record in cell.records:
        if record.site in names and record.slice == FIRST_SLICE:
            courses.setdefault((record.measure, names[record.site]), {})[record.step] = record
    targets = courses.get((ACCURACY + BASELINE, MODEL_SITE), {})
    last = targets[max(targets)].estimate if targets else None
    own = {key: course for key, course in courses.items() if not key[0].endswith(BASELINE)}
    varied = {key: course for key, course in own.items() if not any(map(is_constant, course.values()))}
    if not varied:
        return None
    return Training(
        label=cell.label,
        seed=cell.label if cell.seed is None else cell.seed,
        model=(f"{of.run} · {of.variant}" if of.run else of.variant) or cell.label,
        sites=places,
        courses=varied,
        targets=None if last is None else (last.value, last.n),
        constant=tuple(unique((name for name, _ in own if all(name != other for other, _ in varied)), quality_order)),
    )


def _is_geometry(measure: str) -> bool:
    return measure_group(measure) in GEOMETRY


def quality_order(measure: str) -> tuple[bool, bool, object]:
    """Sort key of qualities: the loss, the accuracy, then the probes."""
    return (measure != "loss", measure != ACCURACY, measure_order(measure))


def _adjusted(found: Sequence[Association | None]) -> list[float]:
    """Adjusted p-values in place; 1 where there is none."""
    known = iter(adjusted([one.p for one in found if one is not None and one.p is not None]))
    return [next(known) if one is not None and one.p is not None else 1.0 for one in found]


def _means(values: Float[np.ndarray, "n"], names: Sequence[str]) -> Float[np.ndarray, "m"]:
    return np.array([values[[name == one for name in names]].mean() for one in unique(names)])
