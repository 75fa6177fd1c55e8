"""A shelf: the records of a series laid out so that a figure finds its own, and lines of them with seeds beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from anisoscope.runs.records import Record, layer_of, site_order
from anisoscope.views.layout import family, few, record_line, unique
from anisoscope.views.names import chance_of, proxies_in
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Figure, Line, Panel, Reference, Toggle
from anisoscope.views.seeds import seed_lines, seed_toggles
from anisoscope.views.series import FIRST_SLICE, STREAM, Series

MOST_LAYERS = 8  # layers drawn as ordered colours


class Shelf:
    """The records of one series by measure, slice and site, in the order of steps; ``members`` are its seeds."""

    def __init__(self, series: Series) -> None:
        self.series, self.label = series, series.label
        self.members = tuple(map(Shelf, series.members))
        self.steps = series.steps
        self._table: dict[tuple[str, str, str], list[Record]] = {}
        self._sites: dict[str, dict[str, None]] = {}
        self._slices: dict[str, dict[str, None]] = {}
        for record in series.records:
            self._table.setdefault((record.measure, record.slice, record.site), []).append(record)
            self._sites.setdefault(record.measure, {})[record.site] = None
            self._slices.setdefault(record.measure, {})[record.slice] = None

    @property
    def measures(self) -> list[str]:
        """Every measure, in reading order of its first record."""
        return list(self._sites)

    @property
    def proxies(self) -> list[str]:
        """The proxies that were measured."""
        return proxies_in(self._sites)

    def get(self, measure: str, site: str, slice: str = FIRST_SLICE) -> list[Record]:
        """The records of one measure at one site, by step."""
        return self._table.get((measure, slice, site), [])

    def sites(self, measure: str) -> list[str]:
        """Every site of a measure, in order."""
        return sorted(self._sites.get(measure, {}), key=site_order)

    def slices(self, measure: str) -> list[str]:
        """Every slice of a measure, in the order of their appearance."""
        return list(self._slices.get(measure, {}))

    def last(self, measure: str, slice: str = FIRST_SLICE) -> list[Record]:
        """The records of a measure at the last step that has it, by site."""
        mine = [record for site in self.sites(measure) for record in self.get(measure, site, slice)]
        end = max((record.step for record in mine), default=0)
        return [record for record in mine if record.step == end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a line looks: its name, colour and dash, and the tags that switches ask for."""

    name: str
    role: int = 0
    dash: int = 0
    shade: float | None = None
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(slots=True)
class Pile:
    """What a figure gathers while its panels are made: these, the proxies, kinds of sites and records in them."""

    panels: list[Panel] = field(default_factory=list)
    proxies: dict[str, None] = field(default_factory=dict)
    kinds: dict[str, list[str]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    leading: dict[str, set[str]] = field(default_factory=dict)

    def note(self, proxies: Sequence[str], kinds: Mapping[str, list[str]]) -> None:
        """Take the proxies and kinds of sites of a panel; the first of each is shown until a reader asks for more."""
        self.leading.setdefault("proxy", set()).update(list(proxies)[:1])
        self.leading.setdefault("site", set()).update(list(kinds)[:1])
        self.proxies |= dict.fromkeys(proxies)
        self.kinds = self.kinds | {name: sites for name, sites in kinds.items() if name not in self.kinds}

    @property
    def ends(self) -> tuple[str, str] | None:
        """The first and the last layer of the first kind of sites."""
        first = next((sites for sites in self.kinds.values() if sites), None)
        return (first[0], first[-1]) if first else None

    def switches(self, series: Sequence[Series]) -> tuple[Toggle, ...]:
        """Switches for proxies, kinds of sites and seeds."""
        found: list[Toggle] = []
        for kind, names in (("proxy", list(self.proxies)), ("site", list(self.kinds))):
            on = self.leading.get(kind, set())
            found += [
                Toggle(kind=kind, value=name, role=None, dash=i if kind == "proxy" else None, on=name in on)
                for i, name in enumerate(names)
                if len(names) > 1
            ]
        return (*found, *seed_toggles(series))

    def figure(self, **fields: Any) -> tuple[Figure, ...]:
        """The figure of the panels, its lines shown or hidden as its switches stand; none without panels."""
        if not self.panels:
            return ()
        figure = Figure(panels=(), **fields)
        on: dict[str, set[str]] = {}
        for toggle in figure.toggles:
            on.setdefault(toggle.kind, set()).update({toggle.value} if toggle.on else ())

        def settled(line: Line) -> Line:
            return replace(line, visible=all(kind not in on or tag in on[kind] for kind, tag in line.tags.items()))

        return (replace(figure, panels=tuple(replace(p, lines=tuple(map(settled, p.lines))) for p in self.panels)),)


def drawn(
    shelf: Shelf,
    pick: Callable[[Shelf], list[Record]],
    x: Callable[[Record], float],
    look: Look,
    *,
    joined: bool = True,
    more: Callable[[Record], str] = lambda record: "",
) -> list[Line]:
    """The line through what ``pick`` finds on a shelf, and through what it finds for each seed."""

    def line(of: Shelf) -> Line | None:
        mine = pick(of)
        if not mine:
            return None
        plain = record_line(mine, [x(record) for record in mine], of.label, joined=joined, more=more)
        plain = replace(plain, name=look.name, role=look.role, dash=look.dash, shade=look.shade)
        return replace(plain, tags=look.tags)

    whole = line(shelf)
    if whole is None:
        return []
    return seed_lines(shelf.series, whole, [one for one in map(line, shelf.members) if one])


def families(sites: Iterable[str]) -> dict[str, list[str]]:
    """Sites by their kind, the residual stream first; at most so many of each as ordered colours can tell apart."""
    found: dict[str, list[str]] = {}
    for name in unique(map(family, sites := list(sites)), lambda name: (name != STREAM, name)):
        found[name] = few([site for site in sites if family(site) == name], MOST_LAYERS)
    return found


def shaded(sites: Sequence[str]) -> list[tuple[str, float]]:
    """Each site with its place on the scale of ordered colours."""
    return [(site, number / max(1, len(sites) - 1)) for number, site in enumerate(sites)]


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Records of layers, which a line joins, and those of the two ends, which none does."""
    inner = [record for record in records if layer_of(record.site) is not None]
    return inner, [record for record in records if layer_of(record.site) is None]


def chance_line(records: Iterable[Record]) -> tuple[Reference, ...]:
    """The share of a random basis as a reference line, where all records have the same."""
    known = {chance_of(record.estimate) for record in records}
    (chance,) = known if len(known) == 1 else (None,)
    return (Reference(name=f"chance K/D = {shown(chance, '.3g')}", y=chance),) if chance is not None else ()
