"""The report: one HTML file with everything in it, that opens offline and can be sent to a colleague."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import EmptyInputError, OptionError
from anisoscope.estimate import Estimate
from anisoscope.runs.files import explained, replacing
from anisoscope.runs.reader import RunReader
from anisoscope.runs.records import Record
from anisoscope.views import interactive, paper
from anisoscope.views.causal import SECTION as FREQUENCY_SECTION
from anisoscope.views.causal_words import causal_tables, causal_words
from anisoscope.views.corrected import Tests, correct
from anisoscope.views.figures import build_figures
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Figure, Table
from anisoscope.views.quality import quality_tables, quality_words
from anisoscope.views.regularizers import Compared, read_compared, regularizer_figures, regularizer_parts
from anisoscope.views.sections import QUALITY, REGULARIZERS, build_sections
from anisoscope.views.seeds import pool_seeds
from anisoscope.views.series import (
    GROUPS,
    Series,
    defined_name,
    entry_of,
    is_theory,
    is_watched,
    measure_order,
    measure_title,
    plain,
    population,
    read_series,
)
from anisoscope.views.shelf import Shelf
from anisoscope.views.story import training_findings
from anisoscope.views.summary import (
    BIASED_ABOVE,
    DIMENSIONS,
    Profile,
    comparison,
    findings,
    headline,
    p_words,
    read_profiles,
)
from anisoscope.views.theory import (
    theory_facts,
    theory_figures,
    theory_findings,
    theory_headline,
    theory_tables,
    theory_words,
)
from anisoscope.views.verdicts import (
    construction_words,
    correlation_tables,
    energy_words,
    fact_tables,
    referee_table,
    referee_words,
    verdicts,
)

if TYPE_CHECKING:
    import jinja2

WORDS = ("model", "step", "site", "measure", "slice", "over", "method")
NUMBERS = ("value", "stderr", "half", "n", "part")
MOST_PARTS = 20_000  # companions of values are listed too as long as the table stays below this many rows
MOST_FAILURES = 200


def write_report(
    runs: RunReader | Sequence[RunReader],
    target: str | Path,
    *,
    title: str | None = None,
    figures: str | Path | None = None,
    formats: Sequence[str] = paper.FORMATS,
) -> Path:
    """Write the report of one or several runs to ``target``, whole or not at all, and return its path.

    ``figures`` is a folder that gets every panel as files for a paper, in ``formats``.
    """
    readers = [runs] if isinstance(runs, RunReader) else list(runs)
    if not readers:
        raise EmptyInputError("a report needs at least one run; give the folder of a run")
    series = read_series(readers)
    if not any(one.records or one.curves or one.failures for one in series):
        names = ", ".join(run.name for run in readers)
        raise EmptyInputError(f"nothing was measured in {names}: no record, curve or failure to report")
    compared = read_compared(readers)
    built = (*theory_figures(series), *build_figures(series), *regularizer_figures(compared))
    page = render(series, built, sources=[_source(run) for run in readers], title=title, compared=compared)
    target = Path(target)
    if target.is_dir():
        raise OptionError(f"{target} is a folder; give the file that the report should be, such as report.html in it")
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(page.encode())
        if figures is not None:
            paper.write_figures(built, figures, formats=formats)
    return target


def render(
    series: Sequence[Series],
    figures: Sequence[Figure],
    *,
    sources: Sequence[Mapping[str, Any]],
    title: str | None = None,
    compared: Sequence[Compared] = (),
) -> str:
    """The page as text."""
    template = _template()
    panels = [panel for figure in figures for panel in interactive.figure_json(figure)]
    if panels:  # the largest part of the page is packed while the words are found
        interactive.begin_packing()
    rows, left_out = table_rows(series)
    values = sum(len(one.records) for one in series)
    failures = [(one.label, failure) for one in series for failure in one.failures]
    program = {
        "palettes": interactive.PALETTES,
        "viridis": [interactive.viridis(i / 8) for i in range(9)],
        "panels": panels,
        "table": interactive.columns(rows, WORDS, NUMBERS),
    }
    said = _said(series, figures, compared)
    return template.render(
        said | {"title": title or said["title"]},
        several=len(series) > 1,
        failures=failures[:MOST_FAILURES],
        more_failures=max(0, len(failures) - MOST_FAILURES),
        values=values,
        companions=len(rows) - values,
        left_out=left_out,
        definitions=_definitions(series),
        sources=sources,
        version=_version(),
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        css=_static("report.css"),
        js=_static("report.js"),
        plotly=interactive.packed_plotly() if panels else "",
        program=interactive.pack_json(program),
    )


def _template() -> jinja2.Template:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise OptionError('a report needs jinja2, which is not installed: pip install "anisoscope[report]"') from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_static("report.html.j2"))


def _said(series: Sequence[Series], figures: Sequence[Figure], compared: Sequence[Compared]) -> dict[str, Any]:
    """What the page says of the models: title, summary, tables and sections, by their names in the template."""
    models = [one for one in series if not is_theory(one)]
    pooled = pool_seeds(models)
    rest = [plain(one) for one in pooled]
    profiles = read_profiles(rest)
    measured = [one for one in pooled if one.measured]
    training = [Shelf(one) for one in pooled if is_watched(one)]
    tests = correct(pooled)
    words, tables = _words_and_tables(training, tests)
    words[REGULARIZERS], tables[REGULARIZERS] = regularizer_parts(compared)
    words, tables = theory_words(series) | words, theory_tables(series) | tables
    return {
        "title": _title(measured or models) if models else "Theory, as experiments",
        "headline": headline(models) if models else theory_headline(series),
        "facts": _facts(measured or models) if models else theory_facts(series),
        "findings": training_findings(training, tests) | findings(rest, profiles) | theory_findings(series),
        "overs": _populations([*models, *pooled]),
        "shapes": _shape_rows(profiles, several=len(measured) > 1),
        "tested": sum(profile.shape is not None for profile in profiles),
        "comparison": comparison([one for one in rest if one.measured], profiles) if len(measured) > 1 else [],
        "biased": any(p.measure in DIMENSIONS and p.highest.estimate.value > BIASED_ABOVE for p in profiles),
        "sections": build_sections(figures, words, tables, training=bool(training)),
    }


def _words_and_tables(training: Sequence[Shelf], tests: Tests) -> tuple[dict[str, list[str]], dict[str, list[Table]]]:
    """Sentences and small tables by the section they stand in."""
    found = verdicts(training)
    words = {
        FREQUENCY_SECTION: causal_words(training),
        "Gradient energy along proxies": energy_words(training, tests),
        "What could be a construction": construction_words(training, tests),
        "The referee": referee_words(found),
        QUALITY: quality_words([shelf.series for shelf in training]),
    }
    tables = {
        FREQUENCY_SECTION: causal_tables(training),
        "By token frequency": correlation_tables(training),
        "Drift of proxies": fact_tables(training),
        "The referee": referee_table(found),
        QUALITY: quality_tables([shelf.series for shelf in training]),
    }
    return words, tables


def table_rows(series: Sequence[Series]) -> tuple[list[dict[str, Any]], int]:
    """Every number as a row, companions after their value; and how many companions were left out for their number."""
    records = [(one.label, record) for one in series for record in one.records]
    parts = sum(len(record.estimate.parts) for _, record in records)
    with_parts = len(records) + parts <= MOST_PARTS
    rows = []
    for label, record in records:
        rows.append(_row(label, record, record.measure, record.estimate))
        if with_parts:
            rows += [
                _row(label, record, f"{record.measure} / {name}", part) for name, part in record.estimate.parts.items()
            ]
    return rows, 0 if with_parts else parts


def _row(label: str, record: Record, measure: str, e: Estimate) -> dict[str, Any]:
    interval = e.interval()
    place = {"model": label, "step": record.step, "site": record.site, "measure": measure, "slice": record.slice}
    half = None if interval is None else (interval[1] - interval[0]) / 2
    words = {"over": e.over or "", "method": "; ".join((e.method, *e.notes))}
    return (
        place
        | words
        | {"value": e.value, "stderr": e.stderr, "half": half, "n": e.n, "part": int(measure != record.measure)}
    )


def _title(series: Sequence[Series]) -> str:
    if len(series) == 1:
        return str(series[0].facts.get("model") or series[0].label)
    names = [one.label for one in series]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _facts(series: Sequence[Series]) -> list[tuple[str, str]]:
    """What is known of the models, one line each; several values where models differ."""
    found = []
    for key, name in (
        ("model", "Model"),
        ("layers", "Layers"),
        ("width", "Width"),
        ("tokens", "Training tokens" if any(map(is_watched, series)) else "Tokens"),
        ("corpus", "Text"),
        ("date", "Measured"),
    ):
        values = dict.fromkeys(_fact(one.facts[key]) for one in series if one.facts.get(key) is not None)
        if values:
            found.append((name, ", ".join(values)))
    seeds = sorted({member.seed for one in series for member in one.members or (one,) if member.seed is not None})
    return [*found, ("Seeds", ", ".join(map(str, seeds)))] if seeds else found


def _populations(series: Sequence[Series]) -> list[str]:
    """What error bars are over, in a word each: ``rows`` of ``rows, from 16 disjoint subsamples``."""
    overs = {r.estimate.over for one in series for r in one.records if r.estimate.over}
    return sorted(set(map(population, overs)))


def _fact(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shape_rows(profiles: Sequence[Profile], several: bool) -> list[dict[str, str]]:
    rows = []
    for profile in profiles:
        shape = profile.shape
        row = {
            "profile": measure_title(profile.measure) + (f" · {profile.model}" if several else ""),
            "slice": profile.slice,
            "verdict": shape.verdict if shape else "not tested",
            "rough": "*" if shape and shape.rough and shape.verdict != "undecided" else "",
            "peak": "",
            "prominence": profile.why_not,
            "flat": "",
            "monotone": "",
        }
        if shape:
            row["flat"] = p_words(shape.p_flat, shape.draws)
            p = shape.p_monotone_valley if shape.verdict == "U" else shape.p_monotone
            row["monotone"] = p_words(p, shape.draws)
            if shape.verdict in ("bell", "U"):
                low, high = shape.prominence_interval
                sites = [profile.records[at].site for at in (shape.peak, *shape.peak_interval)]
                row["peak"] = sites[0] + (f" ({sites[1]} … {sites[2]})" if sites[1] != sites[2] else " (only)")
                row["prominence"] = f"{shown(shape.prominence, '.3g')} ({shown(low, '.3g')} … {shown(high, '.3g')})"
        rows.append(row)
    return rows


def _definitions(series: Sequence[Series]) -> list[dict[str, str]]:
    """The glossary of the measures on the page, those that failed too. Formulas are HTML of ours, so marked safe."""
    from markupsafe import Markup

    names = {r.measure for one in series for r in one.records} | {f.measure for one in series for f in one.failures}
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names, key=measure_order):
        entry = entry_of(name)
        if entry:
            known = defined_name(name)
            found[known] = {"name": known, "group": GROUPS[entry["group"]]} | entry
            found[known]["formula"] = Markup(entry["formula"])
    return list(found.values())


def _source(run: RunReader) -> dict[str, Any]:
    """Where a run comes from, as printable text."""
    provenance = json.dumps(run.provenance, indent=2, ensure_ascii=False, default=str)
    recipe = json.dumps(run.recipe, indent=2, ensure_ascii=False, default=str)
    return {"name": run.name, "provenance": provenance, "recipe": recipe if run.recipe else ""}


def _static(name: str) -> str:
    return (resources.files("anisoscope.views") / "static" / name).read_text("utf-8")


def _version() -> str:
    try:
        return metadata.version("anisoscope")
    except metadata.PackageNotFoundError:
        return "unknown"
