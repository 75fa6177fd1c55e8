"""Geometry and quality: which measures of a layer go with how good the model and the layer are, and which only seem to.

Reads records alone. The pairs are in quality_pairs.py, the statistics in associations.py, the figures in
quality_figures.py, definitions in docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from anisoscope.views.associations import LEAST_LOOKS, LEAST_UNITS, Association
from anisoscope.views.layout import unique
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Table
from anisoscope.views.quality_pairs import (
    ACCURACY,
    Compared,
    Looks,
    Pair,
    Training,
    by_model,
    compare,
    passes,
    quality_order,
    read_looks,
    read_trainings,
    short_title,
    stands,
)
from anisoscope.views.series import QUALITY, Series, measure_title
from anisoscope.views.verdicts import listed

MOST_TABLES = 4  # models whose looks get a table of their own
MOST_NAMED = 4  # pairs that a sentence names
FIXED = "\u00a0"  # a space at which no line breaks
SHORT = {
    "loss": "Loss",
    ACCURACY: "Accuracy",
    f"{QUALITY}casing": "Casing, next",
    f"{QUALITY}word_start": "Word start, next",
}


def quality_words(series: Sequence[Series]) -> list[str]:
    """What the correlations show and do not show, in sentences; none without a battery of quality."""
    trainings = read_trainings(series)
    if not trainings:
        return []
    return [
        *_constant_words(trainings),
        *_looks_words([(model, mine, read_looks(mine)) for model, mine in by_model(trainings)]),
        *_compared_words(compare(trainings)),
        "None of this says what moves what: geometry and quality both answer to the data, the optimiser and the time. "
        "A cause needs a training in which the one is changed and the rest is not.",
    ]


def _constant_words(trainings: Sequence[Training]) -> list[str]:
    """Which probes are no pair of anything, and why."""
    said: dict[tuple[str, ...], list[str]] = {}
    for one in trainings:
        if one.constant:
            said.setdefault(one.constant, []).append(one.label)
    few = len(said) == 1 and len(next(iter(said.values()))) == len(trainings)
    return [
        f"Left out{'' if few else f' of {listed(labels)}'}: {listed([short_title(name) for name in names])}. Every row "
        "of the looks has the same label, so there is nothing to tell."
        for names, labels in said.items()
    ]


def quality_tables(series: Sequence[Series]) -> list[Table]:
    """Correlations pair by pair: over trainings first, then over the looks of each model."""
    trainings = read_trainings(series)
    compared = compare(trainings) if trainings else None
    tables = [] if compared is None else _between_tables(compared)
    for model, mine in by_model(trainings)[:MOST_TABLES]:
        looks = read_looks(mine)
        if looks:
            caption = f"{_who(model, trainings)}{_looks_caption(looks, len(mine))}"
            tables.append(_table(f"quality-looks-{model}", caption, [(one.pair, _looks_cell(one)) for one in looks]))
    return tables


def _looks_caption(looks: Sequence[Looks], seeds: int) -> str:
    of_seeds = f" of {seeds} seeds" if seeds > 1 else ""
    few = "" if looks[0].change else f" Changes need {LEAST_LOOKS} looks."
    return (
        f"Over {looks[0].level.n // seeds:,} looks{of_seeds}: Pearson's r of levels → of changes without their common "
        "course, with Spearman's ρ of these. * p ≤ 5 % after Benjamini-Hochberg over the table; levels get no star, "
        f"since looks are not independent.{few}"
    )


def _who(model: str, trainings: Sequence[Training]) -> str:
    return f"{model}: " if len({one.model for one in trainings}) > 1 else ""


def _looks_words(models: Sequence[tuple[str, list[Training], list[Looks]]]) -> list[str]:
    """What looks say: how many pairs correlate in their levels, and what is left of them in their changes."""
    models = [one for one in models if one[2]]
    if not models:
        return []
    several = len(models) > 1
    seen = [
        f"{sum(stands(one.level, one.level_q) for one in looks)} of {sum(one.level.known for one in looks)}"
        f"{f' ({model})' if several else ''}"
        for model, _, looks in models
    ]
    said = [
        "Looks of one training follow each other, and whatever has a course over training correlates with whatever "
        "else has one. So a correlation of levels proves nothing; the changes from look to look, without the common "
        "course, are what is judged. Few looks show strong links only.",
        f"{listed(seen)} pairs of a geometry and a quality correlate in their levels, as if beyond chance.",
    ]
    judged = [(model, mine, looks) for model, mine, looks in models if looks[0].change is not None]
    if not judged:
        return [*said, f"Changes from look to look, which would tell more, need {LEAST_LOOKS} looks."]
    seeds = any(len(mine) > 1 for _, mine, _ in judged)
    course = "what the seeds have in common" if seeds else "a smooth course"
    kept = {model: [one for one in looks if stands(one.change, one.change_q)] for model, _, looks in judged}
    lost = sum(
        stands(one.level, one.level_q) and not stands(one.change, one.change_q)
        for _, _, looks in judged
        for one in looks
    )
    found = [
        f"{f'{model}: ' if several else ''}{_named([(one.pair, one.change) for one in mine if one.change])}"
        for model, mine in kept.items()
        if mine
    ]
    these = f"these do: {'; '.join(found)}" if found else "none do"
    words = f"In the changes from look to look, without {course}, {these}."
    rest = f" For {lost} of these correlations nothing beyond a common course was found." if lost else ""
    return [*said[:-1], f"{said[-1]} {words}{rest}"]


def _count(number: int) -> str:
    return "none" if number == 0 else f"{number}"


def _named(found: Sequence[tuple[Pair, Association]]) -> str:
    order = sorted(found, key=lambda one: -abs(one[1].r))
    more = len(order) - MOST_NAMED
    said = [f"{pair.title} (r = {_signed(one.r)})" for pair, one in order[:MOST_NAMED]]
    return listed([*said, f"{more} more"] if more > 0 else said)


def _compared_words(compared: Compared | None) -> list[str]:
    if compared is None:
        return ["One training can be compared with no other: it takes several models or seeds to do so."]
    runs, unit = len(compared.trainings), compared.unit
    said = []
    if compared.left_out:
        were = "it was" if len(compared.left_out) == 1 else "they were"
        names = listed(compared.left_out)
        why = f"since {were} scored on other tokens or looked at last at another step"
        said.append(f"{names}: not compared with the others, {why}.")
    if compared.count < LEAST_UNITS:
        said.append(_too_few(compared))
    else:
        kept = [one for one in compared.pairs if stands(one.over, one.over_q)]
        varied = sum(one.over is not None and one.over.known for one in compared.pairs)
        what = f"{compared.count} models (means over seeds)" if unit == "model" else f"{runs} seeds of one model"
        found = _named([(one.pair, one.over) for one in kept if one.over])
        said.append(
            f"Over {what} at their last look, {_count(len(kept))} of {varied} pairs "
            f"{'correlates' if len(kept) == 1 else 'correlate'} after the Benjamini-Hochberg correction and without "
            f"any one {unit}{': ' + found if kept else _largest(compared)}."
        )
        said += _carried(compared)
    inside = [one for one in compared.pairs if one.inside is not None and one.inside.known]
    if inside and inside[0].inside is not None:
        kept = [one for one in inside if stands(one.inside, one.inside_q)]
        found = _named([(one.pair, one.inside) for one in kept if one.inside])
        said.append(
            f"Within models, over {inside[0].inside.n} seeds, each the mean of what it adds to its models, "
            f"{_count(len(kept))} of {len(inside)} {'does' if len(kept) == 1 else 'do'}{': ' + found if kept else ''}."
        )
    return said


def _carried(compared: Compared) -> list[str]:
    """The correlations that one unit makes: not a link over models, but one model that is unlike the others."""
    found = [one.over for one in compared.pairs if one.over and passes(one.over, one.over_q)]
    carriers = [one.carrier for one in found if one.carrier is not None]
    if not carriers:
        return []
    names = unique(one.model if compared.unit == "model" else one.label for one in compared.trainings)
    who = listed([f"{names[i]} {carriers.count(i)}" for i in sorted(set(carriers), key=lambda i: -carriers.count(i))])
    one = len(carriers) == 1
    return [
        f"{len(carriers)} more {'passes' if one else 'pass'} the correction, but one {compared.unit} makes "
        f"{'it' if one else 'each of them'} (†; {who}): left out, p is above 5 %. That tells how this {compared.unit} "
        "differs, not that the two numbers go together."
    ]


def _largest(compared: Compared) -> str:
    known = [one for one in compared.pairs if one.over is not None and one.over.known]
    if not known or any(passes(one.over, one.over_q) for one in known):
        return ""
    top = max(known, key=lambda one: abs(one.over.r) if one.over else 0.0)
    pair = _named([(top.pair, top.over)] if top.over else [])
    return f"; the largest, {pair}, has p = {shown(top.over_q, '.2g')} after it"


def _too_few(compared: Compared) -> str:
    said = f"Over trainings nothing is claimed: {len(compared.trainings)} "
    if compared.unit == "seed":
        return f"{said}seeds of one model, and a correlation needs {LEAST_UNITS}."
    return (
        f"{said}trainings of {compared.count} models, and a correlation over models needs {LEAST_UNITS}. More seeds "
        "are no substitute: seeds of one model share what makes models differ."
    )


def _between_tables(compared: Compared) -> list[Table]:
    tables = []
    runs, unit = len(compared.trainings), compared.unit
    stars = "middle and last: the layer. * p ≤ 5 % after Benjamini-Hochberg over the table, and without any one"
    if any(one.over for one in compared.pairs):
        what = f"{compared.count} models, each the mean of its seeds" if unit == "model" else f"{runs} seeds"
        caption = f"Over trainings, at their last look: {what}. Pearson's r, Spearman's ρ (95 % interval of r); {stars}"
        caption += f" {unit}; † the first alone: one {unit} makes it."
        cells = [(one.pair, _interval_cell(one.over, one.over_q)) for one in compared.pairs]
        tables.append(_table("quality-over", caption, cells))
    if any(one.inside for one in compared.pairs):
        caption = f"Within models: over seeds, each the mean of what it adds to its models. r and ρ as above; {stars}"
        caption += " seed; † the first alone: one seed makes it."
        cells = [(one.pair, _interval_cell(one.inside, one.inside_q)) for one in compared.pairs]
        tables.append(_table("quality-within", caption, cells))
    return tables


def _table(key: str, caption: str, cells: Sequence[tuple[Pair, str]]) -> Table:
    columns = unique((pair.quality for pair, _ in cells), quality_order)
    rows = list(dict.fromkeys((pair.geometry, pair.place) for pair, _ in cells))
    words = {(pair.geometry, pair.place, pair.quality): said for pair, said in cells}
    return Table(
        key=key,
        caption=caption,
        head=("Geometry", *(SHORT.get(name, measure_title(name)) for name in columns)),
        rows=tuple(
            (f"{measure_title(measure)}, {place.split()[0]}", *(words.get((measure, place, n), "") for n in columns))
            for measure, place in rows
        ),
    )


def _looks_cell(one: Looks) -> str:
    if not one.level.known:
        return "does not vary"
    level = _signed(one.level.r)
    if one.change is None:
        return level
    change = _signed(one.change.r) if one.change.known else "none"
    star = "*" if stands(one.change, one.change_q) else ""
    numbers = f"{level} → {change}{star}".replace(" ", FIXED)
    return f"{numbers} {f'(ρ of changes {_signed(one.change.rank)})'.replace(' ', FIXED)}"


def _interval_cell(one: Association | None, q: float) -> str:
    if one is None or one.low is None or one.high is None:
        return "does not vary"
    star = "*" if stands(one, q) else "†" if passes(one, q) else ""
    # One place to break: the numbers on the first line, the interval on the second.
    numbers = f"r {_signed(one.r)}{star}, ρ {_signed(one.rank)}".replace(" ", FIXED)
    return f"{numbers} {f'({_signed(one.low)} to {_signed(one.high)})'.replace(' ', FIXED)}"


def _signed(number: float) -> str:
    """``−.42``, as correlations are written: they never reach 1; ``0`` has no sign."""
    words = shown(number, ".2f")
    return "0" if words == "0.00" else words.replace("0.", ".", 1)
