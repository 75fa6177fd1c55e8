"""What figure builders share: places on axes, colours and dashes, hover texts, reference values."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from anisoscope.runs.records import Curve, Record, layer_of, site_order
from anisoscope.views.numbers import interval_words, shown, with_error, worded
from anisoscope.views.panels import Axis, Line, Reference, Toggle
from anisoscope.views.series import ENDS, STREAM, Series, entry_of, is_stream, measure_title

WRAP = 58  # characters in a line of hover text
KEPT_WORDS = 4096  # sentences whose lines are kept
CURVE_POINTS = 120  # points of a curve that are drawn; a spectrum has one for each column of the model
LOG_SPAN = 8.0  # an axis whose positive values span more than this is drawn in logarithms
# Values that structureless data read, where they do not depend on the number of rows.
NULLS: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {"turning_angle": (("independent points", 120.0), ("random walk", 90.0)), "mean_cosine": (("no common mean", 0.0),)}
)


class Style:
    """Colours and dashes: the first kind of tag with more than one value gets colours, the next one dashes."""

    def __init__(self, **values: Sequence[str]) -> None:
        self.values = values
        many = [kind for kind, names in values.items() if len(names) > 1]
        self.colour = many[0] if many else None
        self.dash = many[1] if len(many) > 1 else None

    def combinations(self) -> Iterable[dict[str, str]]:
        """Every combination of tags."""
        found: list[dict[str, str]] = [{}]
        for kind, names in self.values.items():
            found = [tags | {kind: name} for tags in found for name in names]
        return found

    def dress(self, line: Line, tags: Mapping[str, str]) -> Line:
        """A line with these tags. Every model is shown at first, and the first slice and kind of site."""
        shown = all(self.values[kind].index(tags[kind]) == 0 for kind in tags if kind != "model")
        role, dash = self._index(self.colour, tags), self._index(self.dash, tags)
        return replace(line, role=role, dash=dash, visible=shown, tags=tags)

    def _index(self, kind: str | None, tags: Mapping[str, str]) -> int:
        return self.values[kind].index(tags[kind]) if kind else 0

    def toggles(self) -> tuple[Toggle, ...]:
        """A switch for every value of every kind that has more than one."""
        return tuple(
            Toggle(
                kind=kind,
                value=name,
                role=number if kind == self.colour else None,
                dash=number if kind == self.dash else None,
                on=kind == "model" or number == 0,
            )
            for kind, names in self.values.items()
            if len(names) > 1
            for number, name in enumerate(names)
        )

    def only(self, kind: str) -> tuple[Toggle, ...]:
        """The switches of one kind, for figures whose colours mean something else."""
        return tuple(replace(one, role=None, dash=None) for one in self.toggles() if one.kind == kind)


def unique(values: Iterable[str], order: Callable[[str], Any] = lambda value: 0) -> list[str]:
    """Distinct values in the given order, those that tie in the order of their first appearance."""
    return sorted(dict.fromkeys(values), key=order)


def few(values: Sequence[str], count: int) -> list[str]:
    """At most ``count`` of the values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def family(site: str) -> str:
    """The kind of a site: ``attn_in`` of ``attn_in.3``. Embedding and final norm belong to the residual stream."""
    return STREAM if site in ENDS else site.rpartition(".")[0] if layer_of(site) is not None else site


def stream_sites(records: Iterable[Record]) -> list[str]:
    """Sites of the residual stream with its two ends, in order; all sites where there is no such stream."""
    sites = unique((record.site for record in records), site_order)
    return [site for site in sites if is_stream(site) or site in ENDS] or sites


def depth_axis(series: Sequence[Series]) -> tuple[Callable[[str, str], float], Axis]:
    """Where a site of a model lies on the axis of layers, and that axis.

    Layers are numbered where all models have the same depth; else they are a share of depth. The embedding lies one
    place before the first layer and the final norm one place after the last; sites without a number come after those.
    """
    sites = {one.label: unique((r.site for r in one.last()), site_order) for one in series}
    deepest = {label: max([layer_of(site) or 0 for site in mine], default=0) for label, mine in sites.items()}
    shared = len(set(deepest.values())) <= 1
    last = max(deepest.values(), default=0)
    loose = unique(s for mine in sites.values() for s in mine if layer_of(s) is None and s not in ENDS)

    def place(label: str, site: str) -> float:
        layer = layer_of(site)
        scale = 1.0 if shared else 1.0 / max(1, deepest.get(label, 1))
        end, gap = (float(last), 1.0 + 0.08 * last) if shared else (1.0, 0.15)
        if layer is not None:
            return (layer + (0.5 if family(site).startswith("mlp") else 0.0)) * scale
        if site in ENDS:
            return -gap if site == ENDS[0] else end + gap
        return end + gap * (2 + loose.index(site))

    every = [site for mine in sites.values() for site in mine]
    stride = max(1, math.ceil((last + 1) / 9))
    stride = next((s for s in (1, 2, 4, 5, 10, 20, 50) if s >= stride), stride)
    if shared:
        ticks = {float(layer): str(layer) for layer in range(0, last + 1, stride)}
    else:
        ticks = {share / 4: shown(share / 4, "g") for share in range(5)}
    ends = {ENDS[0]: "embed", ENDS[1]: "norm"} | {name: name for name in loose}
    ticks |= {place("", name): words for name, words in ends.items() if name in every}
    order = sorted(ticks)
    title = "layer" if shared else "share of depth"
    return place, Axis(title=title, ticks=tuple(order), labels=tuple(ticks[at] for at in order))


def step_axis(steps: Sequence[int]) -> tuple[Callable[[int], float], Axis]:
    """Where a step lies on an axis: in logarithms where steps span decades, zero half a decade before the first one."""
    positive = [step for step in steps if step > 0]
    if len(positive) < 2 or positive[-1] / positive[0] < LOG_SPAN or min(steps) < 0:
        return float, Axis(title="step")
    zero = math.log10(positive[0]) - 0.5

    def place(step: int) -> float:
        return math.log10(step) if step > 0 else zero

    decades = range(math.floor(place(positive[0])), math.ceil(place(positive[-1])) + 1)
    ticks = {float(d): f"{10**d:,}" for d in decades if place(positive[0]) - 0.01 <= d <= place(positive[-1]) + 0.01}
    if len(ticks) < 2:
        ticks = {place(step): f"{step:,}" for step in (positive[0], positive[-1])}
    if 0 in steps:
        ticks[zero] = "0"
    order = sorted(ticks)
    return place, Axis(title="step (log)", ticks=tuple(order), labels=tuple(ticks[at] for at in order))


def record_line(
    records: Sequence[Record],
    x: Sequence[float],
    label: str,
    *,
    joined: bool = True,
    more: Callable[[Record], str] = lambda record: "",
) -> Line:
    """The line through some records, with 95 % intervals and hover texts; ``more`` adds lines to these."""
    order = sorted(range(len(records)), key=lambda i: x[i])
    intervals = [records[i].estimate.interval() for i in order]
    return Line(
        name=label,
        x=tuple(float(x[i]) for i in order),
        y=tuple(records[i].estimate.value for i in order),
        lower=tuple(interval and interval[0] for interval in intervals),
        upper=tuple(interval and interval[1] for interval in intervals),
        hover=tuple(hover_text(records[i], label, more(records[i])) for i in order),
        joined=joined,
    )


def hover_text(record: Record, label: str, more: str = "") -> str:
    """What a point says of itself: place, value, interval, population, number of rows, method, notes. Lines of text."""
    e = record.estimate
    lines = [
        f"{record.site} · {record.slice}",
        f"{measure_title(record.measure)}: {with_error(e, unit(record.measure))}",
    ]
    interval = interval_words(e)
    if interval:
        lines.append(f"95 % interval: {interval}, over {e.over}")
    lines += filter(None, more.split("\n"))
    lines += [f"{name}: {shown(part.value, '.3g')}" for name, part in e.parts.items() if name.startswith("sd over")]
    lines.append(f"n = {e.n:,}" + (f" · step {record.step:,}" if record.step else ""))
    lines += _first_lines(e.method)
    lines += [line for note in e.notes[:1] for line in _first_lines(f"note: {note}")]
    return "\n".join([*lines, label])


@functools.lru_cache(maxsize=KEPT_WORDS)
def _first_lines(words: str) -> list[str]:
    """The first two lines of a stored sentence, which many points share. Nobody writes into them."""
    return textwrap.wrap(worded(words), WRAP)[:2]


def curve_line(curve: Curve, shade: float, log_x: bool, log_y: bool) -> Line:
    """A curve as a line; points that logarithms cannot show are left out, long curves are thinned evenly in them."""
    keep = [i for i in range(len(curve.x)) if (not log_x or curve.x[i] > 0) and (not log_y or curve.y[i] > 0)]
    if len(keep) > CURVE_POINTS:
        share = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
        at = [len(keep) ** s - 1 if log_x else s * (len(keep) - 1) for s in share]
        keep = [keep[i] for i in sorted({round(place) for place in at})]
    errors = [None if curve.stderr is None else 1.96 * curve.stderr[i] for i in keep]
    lower = [None if e is None else curve.y[i] - e for i, e in zip(keep, errors)]
    words = [
        f"{curve.site} · {curve.slice}\n{curve.x_label or 'x'}: {shown(curve.x[i], '.4g')}\n"
        f"{curve.y_label or 'y'}: {shown(curve.y[i], '.4g')}"
        + ("" if curve.stderr is None else f" ± {shown(curve.stderr[i], '.2g')}")
        for i in keep
    ]
    return Line(
        name=curve.site,
        x=tuple(curve.x[i] for i in keep),
        y=tuple(curve.y[i] for i in keep),
        lower=tuple(low if low is None or not log_y or low > 0 else None for low in lower),
        upper=tuple(None if e is None else curve.y[i] + e for i, e in zip(keep, errors)),
        hover=tuple(words),
        shade=shade,
        tags={"slice": curve.slice},
    )


def spans(values: Iterable[float]) -> bool:
    """Whether positive values span enough for logarithms."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > LOG_SPAN


def references(measure: str, series: Sequence[Series]) -> tuple[Reference, ...]:
    """Reference values of a measure; those that depend on the width only where all models share one."""
    found = [Reference(name=name, y=value) for name, value in NULLS.get(measure, ())]
    widths = {one.width for one in series}
    width = widths.pop() if len(widths) == 1 else None
    if measure == "spectral_ratio" and width:
        found.append(Reference(name=f"1/D = 1/{width:,}", y=1 / width))
    return tuple(found)


def unit(measure: str) -> str:
    """The unit of a measure, empty for most."""
    return entry_of(measure).get("unit", "")


def axis_title(measure: str) -> str:
    """The title of the axis of a measure."""
    words = measure_title(measure).split(" ") if entry_of(measure) else [measure]
    name = " ".join(word.lower() if word[1:].islower() else word for word in words)
    return f"{name} ({unit(measure)})" if unit(measure) else name


def direction(measure: str) -> str:
    """What a higher value means."""
    higher = entry_of(measure).get("higher")
    return f"higher: {higher}" if higher else ""
