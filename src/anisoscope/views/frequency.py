"""Figures by token frequency: shares, ratios and distances by bin at the last step, and over training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anisoscope.runs.records import Record
from anisoscope.views.layout import axis_title, few
from anisoscope.views.names import DISTANCES, PROXIES, frequency_bin, tangent
from anisoscope.views.panels import Axis, Figure, Line, Panel, Reference
from anisoscope.views.seeds import band_words
from anisoscope.views.series import measure_title
from anisoscope.views.shelf import Look, Pile, Shelf, chance_line, drawn, families, shaded
from anisoscope.views.training import ONE, common_axis, keyed, titled

FEW_LAYERS = 5
KINDS = ("share", "ratio")


def bins_of(shelf: Shelf, measure: str) -> list[str]:
    """The slices of frequency of a measure, rarest first."""
    found = [slice for slice in shelf.slices(measure) if frequency_bin(slice)]
    return sorted(found, key=lambda slice: frequency_bin(slice) or (0, 0))


def bin_axis(count: int) -> Axis:
    """An axis of bins. Its title says what the ends are: words as labels would be cut off at the margin."""
    return Axis(
        title=f"frequency: 1 rarest, {count} most frequent",
        ticks=tuple(float(i) for i in range(1, count + 1)),
        labels=tuple(str(i) for i in range(1, count + 1)),
    )


def frequency_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """By bin at the last step, over training at a middle layer, and distances to centroids by bin."""
    return (*_by_bin(shelves), *_over_time(shelves), *_distances(shelves))


def _measures(shelf: Shelf, kind: str) -> dict[str, str]:
    """The measures of a kind that have bins, by the name of their proxy: of the activation gradient where there is."""
    found: dict[str, str] = {}
    for measure in shelf.measures:
        name = tangent(measure)
        if name is None or name.what != kind or not bins_of(shelf, measure):
            continue
        if name.gradient == "activation" or PROXIES[name.proxy] not in found:
            found[PROXIES[name.proxy]] = measure
    return {PROXIES[p]: found[PROXIES[p]] for p in shelf.proxies if PROXIES[p] in found}


def _last_step(shelf: Shelf, measure: str) -> int:
    sites, bins = shelf.sites(measure), bins_of(shelf, measure)
    return max((r.step for site in sites for bin in bins for r in shelf.get(measure, site, bin)), default=0)


def _at(measure: str, site: str, bins: Sequence[str], step: int) -> Callable[[Shelf], list[Record]]:
    """Picks the records of all bins at one site and step."""
    return lambda of: [r for bin in bins for r in of.get(measure, site, bin) if r.step == step]


def _bin_number(record: Record) -> float:
    number = frequency_bin(record.slice)
    return float(number[0]) if number else 0.0


def _bin_lines(shelf: Shelf, measure: str, proxy: str = "", dash: int = 0) -> tuple[list[Line], list[str]]:
    """Lines over bins, a few layers as ordered colours, at the last step; and the layers drawn."""
    bins, step = bins_of(shelf, measure), _last_step(shelf, measure)
    kinds = families(shelf.sites(measure))
    sites = few(next(iter(kinds.values()), []), FEW_LAYERS)
    lines: list[Line] = []
    for site, shade in shaded(sites):
        look = Look(name=site, shade=shade, dash=dash, tags={"proxy": proxy} if proxy else {})
        lines += drawn(shelf, _at(measure, site, bins, step), _bin_number, look)
    return lines, sites


def _references(kind: str, records: Sequence[Record]) -> tuple[Reference, ...]:
    return chance_line(records) if kind == "share" else ONE


def _records(shelf: Shelf, measures: Sequence[str]) -> list[Record]:
    return [
        record
        for measure in measures
        for site in shelf.sites(measure)
        for bin in bins_of(shelf, measure)
        for record in shelf.get(measure, site, bin)
    ]


def _by_bin(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    pile, ends = Pile(), ("", "")
    steps: list[int] = []
    for kind in KINDS:
        for shelf in shelves:
            measures = _measures(shelf, kind)
            lines: list[Line] = []
            for dash, (proxy, measure) in enumerate(measures.items()):
                more, sites = _bin_lines(shelf, measure, proxy, dash)
                lines += more
                ends = (sites[0], sites[-1]) if sites else ends
                steps.append(_last_step(shelf, measure))
            if lines:
                pile.note(list(measures), {})
                records = _records(shelf, list(measures.values()))
                pile.records += records
                count = max((frequency_bin(r.slice) or (0, 0))[1] for r in records)
                pile.panels.append(
                    Panel(
                        key=keyed(f"frequency-{kind}", shelf, shelves),
                        title=titled(f"Energy {kind} by frequency", shelf, shelves),
                        x=bin_axis(count),
                        y=Axis(title=f"energy {kind}"),
                        lines=tuple(lines),
                        references=_references(kind, records),
                    )
                )
    series = [shelf.series for shelf in shelves]
    ends_at = [f"{step:,}" for step in sorted(set(steps))]
    when = f"At {'step' if len(ends_at) == 1 else 'steps'} {' and '.join(ends_at)}. "
    return pile.figure(
        key="frequency-bins",
        title="By frequency at the last step",
        caption=f"{when}Tokens in bins of equal mass, from the rarest to the most frequent. Look for a slope "
        "beyond the bands: a gradient that follows the proxy for rare tokens only. " + band_words(series, pile.records),
        toggles=pile.switches(series),
        shades=ends,
    )


def _over_time(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    place, axis = common_axis(shelves)
    pile = Pile()
    middles: dict[str, None] = {}
    for kind in KINDS:
        for shelf in shelves:
            if len(shelf.steps) < 2:
                continue
            lines: list[Line] = []
            measures = _measures(shelf, kind)
            for dash, (proxy, measure) in enumerate(measures.items()):
                sites = next(iter(families(shelf.sites(measure)).values()))
                middle = sites[len(sites) // 2]
                middles[middle] = None
                bins = bins_of(shelf, measure)
                for slice, shade in shaded(bins):
                    look = Look(name=slice, shade=shade, dash=dash, tags={"proxy": proxy})
                    pick = lambda of, m=measure, at=middle, bin=slice: of.get(m, at, bin)  # noqa: E731
                    lines += drawn(shelf, pick, lambda r: place(r.step), look)
            if lines:
                pile.note(list(measures), {})
                records = _records(shelf, list(measures.values()))
                pile.records += records
                pile.panels.append(
                    Panel(
                        key=keyed(f"frequency-{kind}-steps", shelf, shelves),
                        title=titled(f"Energy {kind} over training", shelf, shelves),
                        x=axis,
                        y=Axis(title=f"energy {kind}"),
                        lines=tuple(lines),
                        references=_references(kind, records),
                    )
                )
    series = [shelf.series for shelf in shelves]
    return pile.figure(
        key="frequency-steps",
        title=f"By frequency over training, at {', '.join(middles)}",
        caption="One middle layer, bins of token frequency as ordered colours. Look for bins that part, and when. "
        + band_words(series, pile.records),
        toggles=pile.switches(series),
        shades=("rarest", "most frequent"),
    )


def _distances(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    pile, ends = Pile(), ("", "")
    for measure in DISTANCES:
        for shelf in shelves:
            lines, sites = _bin_lines(shelf, measure)
            if lines:
                ends = (sites[0], sites[-1])
                records = _records(shelf, [measure])
                pile.records += records
                count = max((frequency_bin(r.slice) or (0, 0))[1] for r in records)
                pile.panels.append(
                    Panel(
                        key=keyed(measure.replace("_", "-"), shelf, shelves),
                        title=titled(measure_title(measure), shelf, shelves),
                        x=bin_axis(count),
                        y=Axis(title=axis_title(measure)),
                        lines=tuple(lines),
                    )
                )
    series = [shelf.series for shelf in shelves]
    return pile.figure(
        key="frequency-distances",
        title="Distances to centroids by frequency",
        caption="Mean distance of a token to the centroid of its own type, and to that of all tokens, at the last "
        f"step. {band_words(series, pile.records)}",
        toggles=pile.switches(series),
        shades=ends,
    )
