"""Figures by layer of what could be a construction, and of the referee's checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anisoscope.runs.records import Record
from anisoscope.views.layout import depth_axis, family
from anisoscope.views.names import PROXIES, tangent
from anisoscope.views.panels import Axis, Figure, Line, Panel, Reference, Toggle
from anisoscope.views.seeds import band_words
from anisoscope.views.series import narrowed
from anisoscope.views.shelf import Look, Pile, Shelf, chance_line, drawn, families, split
from anisoscope.views.training import keyed, titled


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A panel by layer: the endings of its measures with their names, which are its colours."""

    key: str
    title: str
    axis: str
    endings: tuple[tuple[str, str], ...]
    references: tuple[Reference, ...] = ()
    chance: bool = False


CONSTRUCTION = (
    Wanted(
        key="enrichment",
        title="Enrichment over variance",
        axis="share / variance share",
        endings=(("activation.enrichment", "activation gradient"),),
        references=(Reference(name="1: follows the variance", y=1.0),),
    ),
    Wanted(
        key="reader-null",
        title="Reader share and its null",
        axis="energy share",
        endings=(("reader.share", "reader share"), ("reader.null", "permuted signals")),
        chance=True,
    ),
    Wanted(
        key="reader-excess",
        title="Reader share beyond its null",
        axis="excess",
        endings=(("reader.excess", "excess"),),
        references=(Reference(name="0: a construction", y=0.0),),
    ),
)
REFEREE = (
    Wanted(
        key="referee-cosines",
        title="Nearer to tangents or normals?",
        axis="mean squared cosine",
        endings=(("tangent_cosine2", "local tangents"), ("normal_cosine2", "leading normals")),
        chance=True,
    ),
    Wanted(
        key="referee-differences",
        title="More than its replacements?",
        axis="difference of shares",
        endings=(("minus_top_variance", "minus top variance"), ("minus_random", "minus random basis")),
        references=(Reference(name="0: no difference", y=0.0),),
    ),
)


def construction_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """Enrichment, the reader share beside its permuted null, and the excess, by layer at the last step."""
    caption = (
        "By layer at the last step. A gradient that followed the variance of the activations and nothing else would "
        "have enrichment 1. A reader gradient is a sum of activations, so that its share lies far above chance by "
        "construction: only what exceeds the same gradient with permuted signals is a finding. The interval of the "
        "excess is over permutations."
    )
    return _layer_figure(shelves, CONSTRUCTION, "construction", "What could be a construction", caption)


def referee_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """Alignment with local tangents and normals, and differences to replacements, by layer."""
    caption = (
        "The referee's numbers by layer, on rows that the proxy was not fitted on. A tangent proxy lies nearer to "
        "local tangents than to the leading normals, and above chance."
    )
    return _layer_figure(shelves, REFEREE, "referee", "The referee's checks", caption)


def _layer_figure(
    shelves: Sequence[Shelf], wanted: Sequence[Wanted], key: str, title: str, caption: str
) -> tuple[Figure, ...]:
    endings = {ending for one in wanted for ending, _ in one.endings}

    def belongs(record: Record) -> bool:
        name = tangent(record.measure)
        return name is not None and ".".join(filter(None, (name.gradient, name.what))) in endings

    place, axis = depth_axis([narrowed(shelf.series, belongs) for shelf in shelves])
    pile = Pile()
    colours: dict[str, int] = {}
    for one in wanted:
        for shelf in shelves:
            lines, records = _layer_lines(shelf, one, place, pile)
            if lines:
                if len(one.endings) > 1:
                    colours |= {words: role for role, (_, words) in enumerate(one.endings)}
                pile.panels.append(
                    Panel(
                        key=keyed(one.key, shelf, shelves),
                        title=titled(one.title, shelf, shelves),
                        x=axis,
                        y=Axis(title=one.axis),
                        lines=tuple(lines),
                        references=one.references + (chance_line(records) if one.chance else ()),
                    )
                )
    series = [shelf.series for shelf in shelves]
    legend = (Toggle(kind="line", value=word, role=role, dash=None, on=True) for word, role in colours.items())
    return pile.figure(
        key=key,
        title=title,
        caption=f"{caption} {band_words(series, pile.records)}".strip(),
        toggles=(*legend, *pile.switches(series)),
    )


def _layer_lines(
    shelf: Shelf, one: Wanted, place: Callable[[str, str], float], pile: Pile
) -> tuple[list[Line], list[Record]]:
    """Lines by layer at the last step, noted in the pile, and the records in them."""
    lines: list[Line] = []
    proxies = [p for p in shelf.proxies if any(f"{p}.{ending}" in shelf.measures for ending, _ in one.endings)]
    records: list[Record] = []
    kinds = families(s for p in proxies for ending, _ in one.endings for s in shelf.sites(f"{p}.{ending}"))
    for number, proxy in enumerate(proxies):
        for role, (ending, words) in enumerate(one.endings):
            measure = f"{proxy}.{ending}"
            found = shelf.last(measure)
            records += found
            step = found[0].step if found else 0
            for place_of_kind, kind in enumerate(kinds):
                for end in (False, True):
                    tags = {"proxy": PROXIES[proxy], "site": kind}
                    look = Look(
                        name=words,
                        role=role,
                        dash=number + place_of_kind,
                        # Panels of one colour have no switch for it: a tag would hide their lines.
                        tags=tags | ({"line": words} if len(one.endings) > 1 else {}),
                    )
                    pick = _picker(measure, step, kind, end)
                    lines += drawn(shelf, pick, lambda r: place(shelf.label, r.site), look, joined=not end)
    pile.note([PROXIES[proxy] for proxy in proxies], kinds)
    pile.records += records
    return lines, records


def _picker(measure: str, step: int, kind: str, end: bool) -> Callable[[Shelf], list[Record]]:
    """Picks a measure at one step at sites of one kind: its layers, or its two ends."""

    def pick(of: Shelf) -> list[Record]:
        mine = [r for site in of.sites(measure) if family(site) == kind for r in of.get(measure, site)]
        return split([record for record in mine if record.step == step])[end]

    return pick
