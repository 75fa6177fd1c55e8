"""Figures from records: layer profiles, series over steps, layer by step, and curves.

The values are in panels.py. `interactive.py` draws them with plotly, `paper.py` with matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from anisoscope.runs.records import Record, layer_of, site_order
from anisoscope.views.causal import causal_figures
from anisoscope.views.construction import construction_figures, referee_figures
from anisoscope.views.corrected import correct
from anisoscope.views.frequency import frequency_figures
from anisoscope.views.layout import (
    Style,
    axis_title,
    curve_line,
    depth_axis,
    direction,
    family,
    few,
    record_line,
    references,
    spans,
    step_axis,
    stream_sites,
    unique,
    unit,
)
from anisoscope.views.names import PROXIES
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Axis, Figure, Heatmap, Line, Panel, Reference, Toggle
from anisoscope.views.quality_figures import quality_figures
from anisoscope.views.seeds import band_words, framed, pool_seeds, seed_lines, seed_toggles
from anisoscope.views.series import (
    GROUPS,
    STREAM,
    Series,
    is_theory,
    is_watched,
    measure_group,
    measure_order,
    measure_title,
    narrowed,
    plain,
    slice_order,
    without_quality,
)
from anisoscope.views.shelf import Shelf
from anisoscope.views.training import drift_figures, energy_figures, loss_figures

__all__ = ["Axis", "Figure", "Heatmap", "Line", "Panel", "Reference", "Toggle", "build_figures"]

STEP_LINES = 5  # layers drawn in a series over steps
MOST_COLUMNS = 3  # models whose panels still fit side by side
MOST_TICKS = 8  # a curve with so few places gets a tick at each
RANKS = " ratio against rank"  # how the name of a curve over ranks of a proxy ends
CURVES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "dimension against scale": (
            "Dimension against scale",
            "From the nearest neighbours (left) to wide neighbourhoods (right), with 95 % bands. A level stretch is a "
            "dimension that holds over scales; a fall says that noise fills more dimensions than the shape does; a "
            "rise is what rows in tight clusters give.",
        ),
        "spectrum": (
            "Spectra",
            "Share of the variance by rank, largest first. A first point far above the rest is one dominant direction; "
            "a straight line on these axes is a power law.",
        ),
    }
)


def build_figures(series: Sequence[Series]) -> tuple[Figure, ...]:
    """Every figure that the records can fill, in the order of the report; seeds of one variant are pooled."""
    series = pool_seeds([one for one in series if one.measured and not is_theory(one)])
    quality = quality_figures(series)
    series = [without_quality(one) for one in series]
    shelves = [Shelf(one) for one in series if is_watched(one)]
    rest = [one for one in map(plain, series) if one.measured]
    geometry = (*profiles(rest), *over_steps(rest), *heatmaps(rest))
    if not shelves:
        return (*geometry, *curves(series))
    figures = (
        *loss_figures(shelves),
        *causal_figures(shelves),
        *geometry,
        *energy_figures(shelves, correct(series)),
        *frequency_figures(shelves),
        *construction_figures(shelves),
        *drift_figures(shelves),
        *referee_figures(shelves),
        *curves(series),
    )
    # Models side by side where each has its own panel.
    together = len(series) if 1 < len(series) <= MOST_COLUMNS else 0
    placed = tuple(
        replace(
            figure,
            panels=tuple(panel if isinstance(panel, Heatmap) else framed(panel) for panel in figure.panels),
            columns=figure.columns or (0 if figure.key.startswith(("loss", "profiles-", "causal")) else together),
        )
        for figure in figures
    )
    return (*placed, *quality)


def by_subject(series: Sequence[Series]) -> list[tuple[str, list[Series]]]:
    """The geometry of states, and that of gradients, apart: pairs of the ending of a figure's key and its series."""
    found = []
    for ending, wanted in (("", False), ("-gradients", True)):
        mine = [narrowed(one, lambda r, w=wanted: (measure_group(r.measure) == "gradients") == w) for one in series]  # type: ignore[misc]
        mine = [one for one in mine if len(one.steps) > 1]
        if mine:
            found.append((ending, mine))
    return found


def profiles(series: Sequence[Series]) -> tuple[Figure, ...]:
    """Layer profiles at the last step: one figure for each group of measures, one panel for each measure."""
    rows = [(one.label, record) for one in series for record in one.last()]
    place, axis = depth_axis(series)
    style = Style(
        model=unique(label for label, _ in rows),
        slice=unique((record.slice for _, record in rows), slice_order),
        site=unique(map(family, (record.site for _, record in rows)), lambda name: (name != STREAM, name)),
    )
    table: dict[tuple[str, ...], list[Record]] = {}
    for label, record in rows:
        table.setdefault((record.measure, label, record.slice, family(record.site)), []).append(record)
    panels: dict[str, list[Panel]] = {}
    for measure in unique((record.measure for _, record in rows), measure_order):
        lines: list[Line] = []
        for tags in style.combinations():
            mine = table.get((measure, tags["model"], tags["slice"], tags["site"]), [])
            inner = [record for record in mine if layer_of(record.site) is not None]
            ends = [record for record in mine if layer_of(record.site) is None]
            for part, joined in ((inner, True), (ends, False)):
                if part:
                    x = [place(tags["model"], record.site) for record in part]
                    lines.append(style.dress(record_line(part, x, tags["model"], joined=joined), tags))
        panels.setdefault(measure_group(measure), []).append(
            Panel(
                key=f"profile-{measure}",
                title=measure_title(measure),
                x=axis,
                y=Axis(title=axis_title(measure)),
                lines=tuple(lines),
                references=references(measure, series),
                note=direction(measure),
            )
        )
    steps = sorted({one.steps[-1] for one in series if one.steps})
    when = f" At step {', '.join(f'{step:,}' for step in steps)}, the last." if steps and steps[-1] else ""
    bands = "Bands are 95 % intervals."
    if any(one.variant for one in series):
        bands = band_words(series, (record for _, record in rows), switch=False)
    caption = (
        f"{bands} Look for where a curve rises or falls by more than its band, and whether the slices "
        "agree: what one token or one dimension makes is no property of the layer."
    )
    return tuple(
        Figure(
            key=f"profiles-{group}",
            title=f"{GROUPS[group]} by layer",
            caption=caption + when,
            panels=tuple(panels[group]),
            toggles=style.toggles(),
        )
        for group in GROUPS
        if group in panels
    )


def over_steps(series: Sequence[Series]) -> tuple[Figure, ...]:
    """Measures over training steps, for a few layers from the first to the last."""
    return tuple(_over_steps(mine, ending) for ending, mine in by_subject(series))


def _over_steps(chosen: Sequence[Series], ending: str) -> Figure:
    every = [one for pooled in chosen for one in (pooled, *pooled.members)]
    place, axis = step_axis(sorted({step for one in every for step in one.steps}))
    slices = unique((record.slice for one in chosen for record in one.records), slice_order)
    style = Style(model=unique(one.label for one in chosen), slice=slices)
    panels = []
    ends = ("", "")
    for one in chosen:
        tables = [_by_place(member) for member in (one, *one.members)]
        sites = few(stream_sites(one.records), STEP_LINES)
        ends = (sites[0], sites[-1])
        for measure in unique((record.measure for record in one.records), measure_order):
            lines: list[Line] = []
            for slice in slices:
                for number, site in enumerate(sites):
                    found = [table.get((measure, slice, site), []) for table in tables]
                    if found[0]:
                        shade = number / max(1, len(sites) - 1)
                        labels = [member.label for member in (one, *one.members)]
                        drawn = [
                            record_line(mine, [place(record.step) for record in mine], label)
                            for mine, label in zip(found, labels)
                        ]
                        tags = {"slice": slice, "model": one.label}
                        line = replace(drawn[0], name=site, shade=shade, tags=tags, visible=slice == slices[0])
                        lines += seed_lines(one, line, drawn[1:])
            title = measure_title(measure) + (f" · {one.label}" if len(chosen) > 1 else "")
            key = f"steps-{measure}" + (f"-{one.label}" if len(chosen) > 1 else "")
            y = Axis(title=axis_title(measure))
            nulls = references(measure, [one])
            panel = Panel(key=key, title=title, x=axis, y=y, lines=tuple(lines), references=nulls)
            panels.append((measure_order(measure), panel))
    bands = "with 95 % bands. " if not any(one.variant for one in chosen) else ""
    said = "" if bands else band_words(chosen, (record for one in chosen for record in one.records))
    return Figure(
        key=f"steps{ending}",
        title="Gradients over training steps" if ending else "Over training steps",
        caption=f"A few layers from the first to the last{', ' if bands else '. '}{bands}Look for when a layer starts "
        f"to move, and whether early and late layers move together. {said}".strip(),
        panels=_models_together(panels),
        toggles=(*style.only("slice"), *seed_toggles(chosen)),
        shades=ends,
    )


def _by_place(one: Series) -> dict[tuple[str, str, str], list[Record]]:
    table: dict[tuple[str, str, str], list[Record]] = {}
    for record in one.records:
        table.setdefault((record.measure, record.slice, record.site), []).append(record)
    return table


def heatmaps(series: Sequence[Series]) -> tuple[Figure, ...]:
    """Layer by step: one panel for each measure, slice and model."""
    return tuple(_heatmaps(mine, ending) for ending, mine in by_subject(series))


def _heatmaps(chosen: Sequence[Series], ending: str) -> Figure:
    slices = unique((record.slice for one in chosen for record in one.records), slice_order)
    style = Style(model=[one.label for one in chosen], slice=slices)
    panels = []
    for one in chosen:
        table = {(r.measure, r.slice, r.site, r.step): r.estimate for r in one.records}
        sites, steps = stream_sites(one.records), one.steps
        for measure in unique((record.measure for record in one.records), measure_order):
            for slice in slices:
                cells = [[table.get((measure, slice, site, step)) for step in steps] for site in sites]
                if not any(cell for row in cells for cell in row):
                    continue
                several = " · ".join(x for x, n in ((one.label, len(chosen)), (slice, len(slices))) if n > 1)
                panel = Heatmap(
                    key="-".join(filter(None, ("heatmap", measure, several))),
                    title=measure_title(measure) + (f" · {several}" if several else ""),
                    x=Axis(title="step", labels=tuple(f"{step:,}" for step in steps)),
                    y=Axis(title="site", labels=tuple(sites)),
                    z=tuple(tuple(None if cell is None else cell.value for cell in row) for row in cells),
                    stderr=tuple(tuple(None if cell is None else cell.stderr for cell in row) for row in cells),
                    n=tuple(tuple(None if cell is None else cell.n for cell in row) for row in cells),
                    unit=unit(measure),
                    visible=slice == slices[0],
                    tags={"slice": slice, "model": one.label},
                )
                panels.append(((measure_order(measure), slices.index(slice)), panel))
    caption = "Each row a layer, each column a step; columns are evenly spaced whatever the distance of the steps."
    counts = sorted({len(one.members) for one in chosen if one.members})
    means = f" Values are means over {' or '.join(map(str, counts))} seeds." if counts else ""
    return Figure(
        key=f"heatmaps{ending}",
        title="Gradients by layer and step" if ending else "Layer by step",
        caption=caption + " Look for fronts: changes that begin in some layers and travel." + means,
        panels=_models_together(panels),
        toggles=style.only("slice"),
    )


def _models_together(panels: Sequence[tuple[Any, Panel | Heatmap]]) -> tuple[Panel | Heatmap, ...]:
    """Panels in the order of their keys: what is compared between models stands side by side."""
    return tuple(panel for _, panel in sorted(panels, key=lambda pair: pair[0]))


def curves(series: Sequence[Series]) -> tuple[Figure, ...]:
    """Curves measured at once, such as spectra: one figure a curve, one panel a model, layers as ordered colours."""
    last = [(one, [c for c in one.curves if c.step == max(x.step for x in one.curves)]) for one in series if one.curves]
    figures = []
    for name in unique((c.name for _, mine in last for c in mine), lambda name: (name not in CURVES, name)):
        slices = unique((c.slice for _, mine in last for c in mine if c.name == name), slice_order)
        panels = []
        ends = ("", "")
        for one, mine in last:
            named = sorted((c for c in mine if c.name == name), key=lambda curve: site_order(curve.site))
            if not named:
                continue
            sites = unique((curve.site for curve in named), site_order)
            ends = (sites[0], sites[-1])
            log_x = spans(x for curve in named for x in curve.x)
            log_y = name == "spectrum" and spans(y for curve in named for y in curve.y)
            lines = [curve_line(c, sites.index(c.site) / max(1, len(sites) - 1), log_x, log_y) for c in named]
            places = sorted({x for curve in named for x in curve.x if x > 0 or not log_x})
            ticks = places if len(places) <= MOST_TICKS else []
            panels.append(
                Panel(
                    key=f"curve-{name}" + (f"-{one.label}" if len(last) > 1 else ""),
                    title=(one.label if len(last) > 1 else name[:1].upper() + name[1:]) + _seed_said(one),
                    x=Axis(
                        title=named[0].x_label or "x",
                        log=log_x,
                        ticks=tuple(ticks),
                        labels=tuple(shown(tick, ".3g") for tick in ticks),
                    ),
                    y=Axis(title=named[0].y_label or "y", log=log_y),
                    lines=tuple(replace(line, visible=line.tags["slice"] == slices[0]) for line in lines),
                )
            )
        style = Style(slice=slices)
        title, caption = _curve_words(name)
        figures.append(
            Figure(
                key=f"curve-{name}",
                title=title,
                caption=caption,
                panels=tuple(panels),
                toggles=style.only("slice"),
                shades=ends,
            )
        )
    return tuple(figures)


def _curve_words(name: str) -> tuple[str, str]:
    """The title and the caption of a curve."""
    if name.endswith(RANKS):
        proxy = PROXIES.get(name.removesuffix(RANKS), name.removesuffix(RANKS))
        says = "A ratio that holds over ranks does not hang on the one that was chosen."
        return f"{proxy}: energy ratio against rank", f"For several ranks, at the last step. {says}"
    return CURVES.get(name, (name[:1].upper() + name[1:], "Layers as ordered colours."))


def _seed_said(one: Series) -> str:
    """Curves are not averaged: those of the first seed stand for the others, and say so."""
    return f", seed {one.members[0].seed}" if one.members else ""
