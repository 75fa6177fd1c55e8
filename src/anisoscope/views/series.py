"""Series: the records of one model (a run, or a cell of a sweep) in reading order."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from anisoscope.runs.reader import RunReader
from anisoscope.runs.records import Curve, Failure, Record, layer_of, site_order
from anisoscope.views.names import MODEL_SITE, is_analysis, tangent

STREAM = "resid"
ENDS = ("embed", "final_norm")
FIRST_SLICE = "all"
QUALITY, BASELINE = "quality.", ".baseline"
_BACK = re.compile(r"token_back_([0-9]{1,6})")
GROUPS = {
    "anisotropy": "Anisotropy",
    "rank": "Directions in use",
    "dimension": "Intrinsic dimension",
    "local": "Local geometry",
    "paths": "Paths and maps",
    "gradients": "Gradients",
    "training": "Training",
    "quality": "Quality",
    "tangent": "Tangent analysis",
    "other": "Other measures",
}
NO_ROWS = ("gradients", "training", "quality", "tangent")  # groups whose measures are not of rows alone

# Where layers, width and the like may stand in a recipe, a provenance or the info of a probe.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "name", "path"),
    "layers": ("layers", "n_layers", "num_hidden_layers", "depth"),
    "width": ("width", "hidden_size", "d_model", "n_embd"),
    "tokens": ("tokens", "n_tokens", "measured_tokens"),
    "corpus": ("corpus", "text", "data"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Everything measured on one model, with the facts known of it (model, layers, width, tokens, corpus, date).

    A model trained from several seeds has one series for each, with the same ``variant`` and ``run``. Their mean is a
    series too; ``members`` then holds what it is the mean of.
    """

    label: str
    records: tuple[Record, ...]
    curves: tuple[Curve, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: Mapping[str, Any]
    run: str = ""
    variant: str = ""
    seed: int | None = None
    members: tuple[Series, ...] = ()

    @property
    def steps(self) -> list[int]:
        """Every step with a record, in rising order."""
        return sorted({record.step for record in self.records})

    @property
    def width(self) -> int | None:
        """The width of the model where it is known."""
        width = self.facts.get("width")
        return width if isinstance(width, int) and width > 0 else None

    @property
    def measured(self) -> bool:
        """Whether anything was measured; a cell of a sweep that failed as a whole holds failures only."""
        return bool(self.records or self.curves)

    def last(self) -> list[Record]:
        """The records of the last step."""
        steps = self.steps
        return [record for record in self.records if record.step == steps[-1]] if steps else []


def read_series(runs: Iterable[RunReader]) -> list[Series]:
    """One series for each cell of each run. Labels are as short as they can be and still differ."""
    runs = list(runs)
    found = []
    for number, run in enumerate(runs):
        with run.snapshot():
            records, curves, failures, probes = run.records(), run.curves(), run.failures(), run.probes()
            cells = run.cells() or [""]
        same_name = sum(other.name == run.name for other in runs) > 1
        name = f"{run.name} ({number + 1})" if same_name else run.name
        for cell in cells:
            info = [probe.info for probe in probes if probe.cell == cell]
            facts = find_facts([*info[-1:], run.provenance, run.recipe])
            facts.setdefault("date", next((p.began[:10] for p in probes if p.cell == cell), None))
            facts["frequency"] = info[-1].get("frequency") if info else None
            if len(cells) > 1 and cell:
                facts["model"] = cell
            label = name if len(cells) == 1 else cell or "no cell" if len(runs) == 1 else f"{name} · {cell}"
            mine = [record for record in records if record.cell == cell]
            last = info[-1] if info else {}
            variant, seed = last.get("variant"), last.get("seed")
            if last.get("kind") == "theory":
                facts["theory"] = last
            found.append(
                Series(
                    label=label,
                    run=name if len(runs) > 1 else "",
                    variant=variant if isinstance(variant, str) else "",
                    seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
                    records=tuple(sorted(mine, key=reading_order)),
                    curves=tuple(curve for curve in curves if curve.cell == cell),
                    failures=tuple(failure for failure in failures if failure.cell == cell),
                    facts=facts,
                )
            )
    return found


def narrowed(one: Series, keep: Callable[[Record], bool]) -> Series:
    """A series with some of its records only, and so are the series it is the mean of."""
    members = tuple(narrowed(member, keep) for member in one.members)
    return replace(one, records=tuple(filter(keep, one.records)), members=members)


def plain(one: Series) -> Series:
    """A series without what has figures of its own: the whole model's loss, the tangent analysis, and quality."""
    return narrowed(one, lambda r: not (r.site == MODEL_SITE or is_analysis(r.measure) or is_quality(r.measure)))


def is_quality(measure: str) -> bool:
    """Whether a name belongs to the battery of quality, which has a section of its own."""
    return measure.startswith(QUALITY)


def without_quality(one: Series) -> Series:
    """A series without the battery of quality."""
    return narrowed(one, lambda record: not is_quality(record.measure))


def is_theory(one: Series) -> bool:
    """Whether a series is no model but an experiment with a known answer."""
    return "theory" in one.facts


def is_watched(one: Series) -> bool:
    """Whether a series comes from a training that was watched: it has a loss, or a tangent analysis."""
    return any(record.site == MODEL_SITE or is_analysis(record.measure) for record in one.records)


def find_facts(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Model, layers, width, tokens, corpus and date, from the first source that names them, one level deep."""
    found: dict[str, Any] = {}
    for source in sources:
        inner = [source, *(value for value in source.values() if isinstance(value, Mapping))]
        for fact, names in _NAMES.items():
            for place in inner:
                for name in names:
                    value = place.get(name)
                    # "name" and "path" mean the model only inside the mapping called model.
                    if name in ("name", "path") and place is not source.get(fact):
                        continue
                    if fact not in found and isinstance(value, (str, int)) and not isinstance(value, bool):
                        found[fact] = value
        corpus = source.get("corpus")
        if "corpus" not in found and isinstance(corpus, Mapping):
            named = [str(corpus[key]) for key in ("name", "source", "path", "fingerprint") if corpus.get(key)]
            if named:
                found["corpus"] = named[0]
        if "date" not in found and isinstance(source.get("time_utc"), str):
            found["date"] = source["time_utc"][:10]
    return found


def reading_order(record: Record) -> tuple[Any, ...]:
    """Sort key: step, then group and name of the measure, then slice, then site."""
    return (record.step, measure_order(record.measure), slice_order(record.slice), site_order(record.site))


def slice_order(name: str) -> tuple[bool, str]:
    """Sort key of slices: all tokens first."""
    return (name != FIRST_SLICE, name)


@functools.cache
def glossary() -> dict[str, dict[str, str]]:
    """What each measure means, in words, by name; of rows of activations, and of rows of gradients."""
    known = dict(json.loads((resources.files("anisoscope.views") / "static" / "measures.json").read_text("utf-8")))
    of_rows = [name for name, entry in known.items() if entry["group"] not in NO_ROWS]
    for name in of_rows:
        entry = known[name]
        known[f"gradient_{name}"] = entry | {
            "title": f"{entry['title']} of gradients",
            "group": "gradients",
            "says": f"The same measure, on the rows of dL/dh in place of h. {entry['says']}",
        }
    return known


@functools.cache
def entry_of(name: str) -> dict[str, str]:
    """The entry of a measure in the glossary; a number of the tangent analysis goes by what it is of any proxy.

    A token some places back goes by what it is of any number of places, and a baseline by what it is of any label.
    """
    if is_quality(name):
        return glossary().get("quality.baseline" if name.endswith(BASELINE) else _BACK.sub("token_back", name), {})
    parts = tangent(name)
    return glossary().get(name) or glossary().get(f"tangent.{parts.what}" if parts else "", {})


def measure_group(name: str) -> str:
    """The group of a measure, a key of GROUPS."""
    return entry_of(name).get("group", "other")


@functools.cache
def measure_order(name: str) -> tuple[int, int, str]:
    """Sort key of measures: by group, then as the glossary lists them, then by name."""
    known = list(glossary())
    at = known.index(own) if (own := _BACK.sub("token_back", name)) in known else len(known)
    return (list(GROUPS).index(measure_group(name)), at, name)


def measure_title(name: str) -> str:
    """The name of a measure for people."""
    if is_quality(name):
        return _quality_title(name)
    parts = tangent(name)
    title = entry_of(name).get("title", parts.what if parts else name)
    return f"{title} ({parts.title})" if parts else title


def defined_name(name: str) -> str:
    """How the definition of a measure is headed; one serves every proxy, every baseline and every number of places."""
    parts = tangent(name)
    if is_quality(name):
        return f"…{BASELINE}" if name.endswith(BASELINE) else _BACK.sub("token_back_k", name)
    return f"….{parts.what}" if parts else name


def _quality_title(name: str) -> str:
    own = name.removesuffix(BASELINE)
    title, back = entry_of(own).get("title", own), _BACK.search(own)
    title = title.replace(" k ", f" {back.group(1)} ") if back else title
    return f"{title}, baseline" if own != name else title


def is_stream(site: str) -> bool:
    """Whether a site is a numbered place of the residual stream."""
    return site.startswith(STREAM + ".") and layer_of(site) is not None


def stream_profile(records: Sequence[Record], measure: str, slice: str) -> list[Record]:
    """The records of the residual stream for one measure and slice, from the first layer to the last."""
    mine = [r for r in records if r.measure == measure and r.slice == slice and is_stream(r.site)]
    return sorted(mine, key=lambda record: site_order(record.site))


def population(over: str) -> str:
    """What an error bar is over, in a word or two: ``sequences`` of ``24 sequences and 24 sequences of two halves``."""
    plain = re.sub(r"^[\d,]+ |^normal ", "", re.sub(r"^[\d,]+ ", "", over))
    return re.split(r",| and | of | \(", plain)[0]
