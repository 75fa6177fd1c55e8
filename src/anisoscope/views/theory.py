"""Experiments with known answers: points beside the predicted line, and truth beside estimate. From the store alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.errors import RunVersionError
from anisoscope.estimate import Estimate
from anisoscope.runs.records import Curve
from anisoscope.views.layout import Style, spans, unique
from anisoscope.views.numbers import digits_of, shown, worded
from anisoscope.views.panels import Axis, Figure, Line, Panel, Table
from anisoscope.views.series import FIRST_SLICE, Series, is_theory

KEYS = ("site", "measure", "slice", "truth", "agrees")  # what a stored check must say
LAW = " (law)"  # how the name of the curve ends that a law is stored under
FINE = 64  # places at which a law is drawn: so many that no marker is
MOST_LINES = 7  # places in one panel, as many as there are colours; more get a panel each
COLUMNS = 3
FEWEST_DECADES = 2  # powers of ten along an axis that are enough to read it by
GREY = 6  # the colour of a law that all surfaces share
BAR = 1.96  # standard errors: a 95 % interval where repeats are many


def theory_figures(series: Sequence[Series]) -> tuple[Figure, ...]:
    """One figure for each experiment that has series to draw."""
    found = (_figure(one) for one in series if is_theory(one))
    return tuple(figure for figure in found if figure.panels)


def theory_words(series: Sequence[Series]) -> dict[str, list[str]]:
    """The question of each experiment, how many numbers agree, and its notes, by section."""
    found = {}
    for one in filter(is_theory, series):
        info = one.facts["theory"]
        found[section_of(one)] = [
            f"{info.get('question', '')} {verdict(one)}",
            *(worded(str(note)) for note in info.get("notes", ())),
        ]
    return found


def theory_tables(series: Sequence[Series]) -> dict[str, list[Table]]:
    """Truth beside estimate for each experiment, by section."""
    found = {}
    for one in filter(is_theory, series):
        rows = tuple(_row(truth, estimate) for truth, estimate in checks_of(one))
        head = ("Where", "Number", "Truth", "Estimate", "Distance", "Verdict")
        caption = (
            "Truth beside estimate, with one standard error. Distance is in standard errors (se), or relative where "
            "there is none; the verdict allows five, and beside them what the experiment's expansion leaves out."
        )
        found[section_of(one)] = [Table(key=f"theory-{one.label}", caption=caption, head=head, rows=rows)]
    return found


def theory_findings(series: Sequence[Series]) -> dict[str, list[tuple[str, str]]]:
    """For the summary: how each experiment ended."""
    return {str(one.facts["theory"].get("title", one.label)): [("", verdict(one))] for one in series if is_theory(one)}


def theory_headline(series: Sequence[Series]) -> str:
    """One sentence for a page that holds experiments alone."""
    judged = [truth for one in series if is_theory(one) for truth, _ in checks_of(one) if truth["truth"] is not None]
    good = sum(bool(truth["agrees"]) for truth in judged)
    number = sum(map(is_theory, series))
    noun = "experiment" if number == 1 else "experiments"
    return f"{number} {noun} with known answers: {good} of {len(judged)} numbers agree with theory."


def theory_facts(series: Sequence[Series]) -> list[tuple[str, str]]:
    """What the head of a page of experiments says."""
    mine = [one for one in series if is_theory(one)]
    rows = (
        ("Seed", [one.facts["theory"].get("seed") for one in mine]),
        ("Date", [one.facts.get("date") for one in mine]),
    )
    said = [
        (name, ", ".join(dict.fromkeys(str(value) for value in values if value is not None))) for name, values in rows
    ]
    return [("Experiments", str(len(mine))), *((name, value) for name, value in said if value)]


def section_of(one: Series) -> str:
    """The heading of an experiment."""
    return f"Theory: {one.facts['theory'].get('title', one.label)}"


def verdict(one: Series) -> str:
    """How many numbers agree, and which does so least."""
    judged = [(truth, estimate) for truth, estimate in checks_of(one) if truth["truth"] is not None]
    if not judged:
        ended = "run_seconds" in one.facts["theory"]
        return "It has no number with a known answer." if ended else "It failed and gave no number."
    off = [truth for truth, _ in judged if not truth["agrees"]]
    if off:
        first = f"{off[0]['measure']} ({off[0]['site']})"
        return f"{len(off)} of {len(judged)} numbers are off the truth, {first} first."
    distances = [
        (abs(estimate.value - truth["truth"]) / estimate.stderr, truth) for truth, estimate in judged if estimate.stderr
    ]
    if not distances:
        return f"{_all(len(judged))} the truth."
    far, which = max(distances, key=lambda pair: pair[0])
    return (
        f"{_all(len(judged))} the truth. The farthest from it is {which['measure']} "
        f"({which['site']}), by {shown(far, '.1f')} standard errors."
    )


def _all(count: int) -> str:
    return "The one number agrees with" if count == 1 else f"All {count} numbers agree with"


def checks_of(one: Series) -> list[tuple[Mapping[str, Any], Estimate]]:
    """Each check as it was stored with its estimate, in the order of the experiment."""
    found = {(r.site, r.measure, r.slice): r.estimate for r in one.records}
    stored = one.facts["theory"].get("truths", ())
    for truth in stored:
        lacks = [key for key in KEYS if key not in truth] if isinstance(truth, Mapping) else ["mapping"]
        if lacks:
            raise RunVersionError(
                f"experiment {one.label}: a stored check has no {lacks[0]!r}, so another version of anisoscope wrote "
                f"it; run it again: anisoscope theory {one.label}"
            )
    keyed = [(truth, found.get((truth["site"], truth["measure"], truth["slice"]))) for truth in stored]
    return [(truth, estimate) for truth, estimate in keyed if estimate is not None]


def _row(truth: Mapping[str, Any], e: Estimate) -> tuple[str, ...]:
    known = truth["truth"]
    value = digits_of(e.value, e.stderr) + ("" if e.stderr is None else f" ± {shown(e.stderr, '.2g')}")
    site = str(truth["site"]) if truth["slice"] == FIRST_SLICE else f"{truth['site']}, {truth['slice']}"
    where = (site, str(truth["measure"]))
    if known is None:
        return (*where, "", value, "", "shown")
    if e.stderr:
        distance = f"{shown((e.value - known) / e.stderr, '+.1f')} se"
    else:
        distance = shown((e.value - known) / known, "+.1e") if known else shown(e.value - known, "+.1e")
    return (*where, shown(known, ".5g"), value, distance, "agrees" if truth["agrees"] else "off")


def _figure(one: Series) -> Figure:
    measured = [curve for curve in one.curves if not curve.name.endswith(LAW)]
    laws = {(c.site, c.name.removesuffix(LAW), c.slice): c for c in one.curves if c.name.endswith(LAW)}
    panels, shared_sites = [], []
    slices = unique(curve.slice for curve in measured)
    for slice in slices:
        for name in unique(curve.name for curve in measured if curve.slice == slice):
            mine = [curve for curve in measured if (curve.name, curve.slice) == (name, slice)]
            several = len(slices) > 1
            if len(mine) > MOST_LINES:
                panels += [_panel(one, [curve], laws, curve.site, f" · {slice}" if several else "") for curve in mine]
            else:
                panels.append(_panel(one, mine, laws, name[:1].upper() + name[1:], f" · {slice}" if several else ""))
                shared_sites += [curve.site for curve in mine if len(mine) > 1]
    style = Style(where=unique(shared_sites))
    dressed = tuple(_dressed(panel, style) for panel in panels)
    toggles = style.toggles() if len(style.values["where"]) > 1 else ()
    caption = f"Points are measured, with bars of {BAR} standard errors; lines are what theory predicts."
    if any((curve.site, curve.name, curve.slice) not in laws for curve in measured):
        caption += " Where points have no line, no law foretells them."
    return Figure(
        key=f"theory-{one.label}",
        title=section_of(one),
        caption=caption,
        panels=dressed,
        toggles=_all_on(toggles),
        columns=min(COLUMNS, len(panels)) if len(panels) > 1 else 0,
    )


def _all_on(toggles: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(replace(toggle, on=True) for toggle in toggles)


def _dressed(panel: Panel, style: Style) -> Panel:
    """The panel with a colour for each surface, where surfaces share panels."""
    known = style.values["where"]
    lines = []
    for line in panel.lines:
        site = line.tags.get("where", "")
        if site in known and len(known) > 1:
            lines.append(replace(line, role=known.index(site)))
        else:
            lines.append(replace(line, tags={}))
    return replace(panel, lines=tuple(lines))


def _panel(
    one: Series, curves: Sequence[Curve], laws: Mapping[tuple[str, str, str], Curve], title: str, ending: str
) -> Panel:
    """Points and laws of some curves of one name and slice."""
    first = curves[0]
    mine = {curve.site: laws[key] for curve in curves if (key := (curve.site, curve.name, curve.slice)) in laws}
    log_x = all(x > 0 for c in curves for x in c.x) and spans(x for c in curves for x in c.x)
    heights = [y for c in (*curves, *mine.values()) for y in c.y]
    log_y = all(y > 0 for y in heights) and spans(heights)
    lines = [_points(curve, log_y) for curve in curves]
    shared = len(mine) > 1 and len({tuple(shown(v, ".6g") for v in (*law.x, *law.y)) for law in mine.values()}) == 1
    for site, law in list(mine.items())[: 1 if shared else None]:
        lines.append(_law(law, site, log_x, log_y, shared))
    return Panel(
        key=f"theory-{one.label}-{first.name}-{title}{ending}",
        title=title + ending,
        x=_axis(first.x_label or "x", [x for c in curves for x in c.x], log_x),
        y=_axis(first.y_label or "y", heights, log_y),
        lines=tuple(lines),
    )


def _axis(title: str, values: Sequence[float], log: bool) -> Axis:
    """An axis; in logarithms with ticks at 1, 2 and 5 where powers of ten alone would be too few."""
    if not log:
        return Axis(title=title)
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if sum(low <= 10.0**power <= high for power in decades) >= FEWEST_DECADES:
        return Axis(title=title, log=True)
    ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low * 0.9 <= tick <= high * 1.1]
    return Axis(title=title, log=True, ticks=tuple(ticks), labels=tuple(shown(tick, ".3g") for tick in ticks))


def _points(curve: Curve, log_y: bool) -> Line:
    bars = [None if curve.stderr is None else BAR * error for error in curve.stderr or curve.x]
    lower = [None if bar is None else y - bar for y, bar in zip(curve.y, bars)]
    words = [
        f"{curve.site}\n{curve.x_label or 'x'}: {shown(x, '.4g')}\n{curve.y_label or 'y'}: {shown(y, '.4g')}"
        + ("" if curve.stderr is None else f" ± {shown(curve.stderr[i], '.2g')}")
        for i, (x, y) in enumerate(zip(curve.x, curve.y))
    ]
    return Line(
        name=curve.site,
        x=curve.x,
        y=curve.y,
        lower=tuple(low if low is None or not log_y or low > 0 else None for low in lower),
        upper=tuple(None if bar is None else y + bar for y, bar in zip(curve.y, bars)),
        hover=tuple(words),
        joined=False,
        tags={"where": curve.site},
    )


def _law(law: Curve, site: str, log_x: bool, log_y: bool, shared: bool) -> Line:
    x, y = finer(law.x, law.y, log_x, log_y)
    words = [f"law{'' if shared else ' for ' + site}\n{shown(a, '.4g')}: {shown(b, '.4g')}" for a, b in zip(x, y)]
    nothing = (None,) * len(x)
    return Line(
        name="law" if shared else f"law, {site}",
        x=x,
        y=y,
        lower=nothing,
        upper=nothing,
        hover=tuple(words),
        role=GREY if shared else 0,
        dash=1,
        tags={} if shared else {"where": site},
    )


def finer(
    x: Sequence[float], y: Sequence[float], log_x: bool, log_y: bool, places: int = FINE
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """A line through these points at many places, straight between them on the axes it is drawn on."""
    points = sorted(zip((math.log(v) if log_x else v for v in x), (math.log(v) if log_y else v for v in y)))
    if len(points) < 2:
        return tuple(x), tuple(y)
    low, high = points[0][0], points[-1][0]
    places_x, places_y, at = [], [], 0
    for number in range(places):
        here = low + (high - low) * number / (places - 1)
        while at < len(points) - 2 and points[at + 1][0] < here:
            at += 1
        (a, fa), (b, fb) = points[at], points[at + 1]
        height = fa if a == b else fa + (fb - fa) * (min(max(here, a), b) - a) / (b - a)
        places_x.append(math.exp(here) if log_x else here)
        places_y.append(math.exp(height) if log_y else height)
    return tuple(places_x), tuple(places_y)
