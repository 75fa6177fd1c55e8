"""The effect of token frequency: what was measured in models that differ in their effective Zipf exponent alone.

An arm is one model with its exponent, over its seeds. Slopes are fitted for each seed through the arms of one method,
the plain model among them, and averaged over seeds: what a seed changes in all arms alike cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record
from anisoscope.views.layout import axis_title, hover_text, references
from anisoscope.views.names import DISTANCES, MODEL_SITE, PROXIES, frequency_bin, tangent
from anisoscope.views.numbers import digits_of, shown
from anisoscope.views.panels import Axis, Figure, Line, Panel, Reference, Toggle
from anisoscope.views.seeds import band_words, cells_of, over_seeds, seed_lines, seed_toggles
from anisoscope.views.series import FIRST_SLICE, Series, is_stream, measure_title
from anisoscope.views.shelf import Pile, Shelf, chance_line

FREQUENCY = "frequency"
SECTION = "Effect of token frequency"
METHODS = {"loss": "loss weights", "resample": "resampled windows", "language": "languages", "placebo": "placebo"}
"""How exponents are changed, in words; a placebo changes none."""
PLAIN = "none"
GEOMETRY = ("spectral_ratio", "mean_cosine", "two_nn", "isoscore")
TIES = {
    "frequency.own_pearson": "Correlation of log count and distance to own type",
    "frequency.global_pearson": "Correlation of log count and distance to all",
}
X = Axis(title="effective Zipf exponent")
Nulls = tuple[Reference, ...]
ONE = (Reference(name="1: as much as controls", y=1.0),)


@dataclass(frozen=True, eq=False)
class Arm:
    """One model of the study. ``told`` is what its looks say of its exponent, ``step`` the last of the study."""

    shelf: Shelf
    told: dict[str, Any]
    step: int

    @property
    def label(self) -> str:
        """The name of the model."""
        return self.shelf.label

    @property
    def method(self) -> str:
        """How its exponent was changed."""
        return str(self.told["method"])

    @property
    def exponent(self) -> float:
        """The effective exponent that was reached; rounding in a solver is no news."""
        return round(float(self.told["exponent"]), 9) + 0.0

    def at_end(self, place: Place, shelf: Shelf | None = None) -> Record | None:
        """What was measured at a place at the last step of the study."""
        shelf = shelf or self.shelf
        slices = [
            name
            for name in shelf.slices(place.measure)
            if (place.bin is None and name == FIRST_SLICE) or (place.bin and frequency_bin(name) == place.bin)
        ]
        found = (record for name in slices for record in shelf.get(place.measure, place.site, name))
        here = next((record for record in found if record.step == self.step), None)
        return self._of_those_there(place) if here is None and shelf is self.shelf and self.partial else here

    @property
    def there(self) -> list[int]:
        """The seeds that are at the last step of the study."""
        mine = [one.series for one in self.shelf.members or (self.shelf,) if self.step in one.steps]
        return [one.seed for one in mine if one.seed is not None]

    @property
    def partial(self) -> bool:
        """Whether some of its seeds are there and some are not."""
        return bool(self.shelf.members) and self.step not in self.shelf.steps

    def _of_those_there(self, place: Place) -> Record | None:
        """The mean over the seeds that are there."""
        mine = [record for one in self.shelf.members if (record := self.at_end(place, one)) is not None]
        values = [record.estimate.value for record in mine]
        return replace(mine[0], estimate=over_seeds(values, "mean over seeds")) if mine else None

    def by_seed(self, place: Place) -> dict[int, float]:
        """The value of each seed."""
        found = {}
        for one in self.shelf.members or (self.shelf,):
            record = self.at_end(place, one)
            if record is not None and one.series.seed is not None:
                found[one.series.seed] = place.value(record, self)
        return found


@dataclass(frozen=True)
class Place:
    """A number that every arm has: a measure at a site, of all tokens or of one bin of frequency.

    ``excess`` is for the loss of a language: the part above the entropy rate.
    """

    measure: str
    site: str
    bin: tuple[int, int] | None = None
    excess: bool = False

    def value(self, record: Record, arm: Arm) -> float:
        """The number itself."""
        return record.estimate.value - (float(arm.told["entropy_rate"]) if self.excess else 0.0)


def title_of(place: Place) -> str:
    """What is measured, for people."""
    return "Loss above the entropy rate" if place.excess else TIES.get(place.measure) or measure_title(place.measure)


def arms_of(shelves: Iterable[Shelf]) -> list[Arm]:
    """The arms of a study at its last step; none unless two of them have different exponents, or one is a placebo.

    A model that is not as far yet, or has not all of its seeds there, is left out: ``behind`` names it. A placebo of
    weights stands alone, in no line that goes through all seeds, and is taken with the seeds it has.
    """
    told, step, _ = _ready(shelves)
    arms = [Arm(shelf, found, step) for shelf, found in told]
    several = len({arm.exponent for arm in arms}) > 1 or {arm.method for arm in arms} >= {PLAIN, "placebo"}
    return sorted(arms, key=lambda arm: arm.exponent) if several else []


def behind(shelves: Iterable[Shelf]) -> list[str]:
    """The models of a study that cannot be compared yet."""
    return _ready(shelves)[2]


def _ready(shelves: Iterable[Shelf]) -> tuple[list[tuple[Shelf, dict[str, Any]]], int, list[str]]:
    """What can be compared, at which step, and the names of what cannot."""
    told = [(shelf, found) for shelf in shelves if (found := _told(shelf.series)) and shelf.steps]
    step = max((shelf.steps[-1] for shelf, _ in told), default=0)
    pooled = any(shelf.members for shelf, _ in told)
    ready = [
        (s, found)
        for s, found in told
        if (step in s.steps and (s.members or not pooled or alone(found)))
        or (alone(found) and any(step in one.steps for one in s.members))
    ]
    late = [shelf.label for shelf, _ in told if not any(shelf is one for one, _ in ready)]
    return ready, step, late


def _told(one: Series) -> dict[str, Any] | None:
    """What the looks of a series say of its exponent, where that is usable."""
    found = one.facts.get(FREQUENCY)
    if not isinstance(found, dict) or found.get("method") not in (*METHODS, PLAIN):
        return None
    exponent = found.get("exponent")
    usable = isinstance(exponent, int | float) and not isinstance(exponent, bool) and math.isfinite(exponent)
    return found if usable else None


def alone(told: Mapping[str, Any]) -> bool:
    """Whether a model is compared with the plain one and nothing else: a placebo of weights."""
    return told.get("method") == "placebo" and told.get("placebo_of") != "resample"


def lines_of_arms(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """The arms of each method, plain models among them: the points of one line. A placebo of weights stands alone.

    Drawn windows are compared with drawn windows: where there is a placebo of them, it stands for the plain model.
    """
    drawn = [arm for arm in arms if arm.method == "placebo" and arm.told.get("placebo_of") == "resample"]
    found = {}
    for method in METHODS:
        own = [arm for arm in arms if arm.method == method]
        plain = [arm for arm in arms if arm.method == PLAIN] if method not in ("language", "placebo") else []
        plain = drawn if drawn and method == "resample" else plain
        if own:
            found[method] = sorted((*own, *plain), key=lambda arm: arm.exponent)
    return found


def slope(arms: Sequence[Arm], place: Place) -> Estimate | None:
    """The change for one unit of exponent: a least-squares slope for each seed, their mean and its error over seeds."""
    tables = [(arm.exponent, arm.by_seed(place)) for arm in arms]
    seeds = sorted(set.intersection(*(set(table) for _, table in tables))) if tables else []
    centre = statistics.fmean(x for x, _ in tables) if tables else 0.0
    spread = sum((x - centre) ** 2 for x, _ in tables)
    if not seeds or spread == 0:
        return None
    values = [sum((x - centre) * table[seed] for x, table in tables) / spread for seed in seeds]
    return over_seeds(values, f"least-squares slope through {len(tables)} exponents, mean over seeds")


def difference(one: Arm, other: Arm, place: Place) -> Estimate | None:
    """How much higher one arm reads than another, paired by seed."""
    first, second = one.by_seed(place), other.by_seed(place)
    values = [first[seed] - second[seed] for seed in sorted(set(first) & set(second))]
    return over_seeds(values, "mean of differences, seed by seed") if values else None


def sites_of(arms: Sequence[Arm], measure: str) -> list[str]:
    """A middle and the last layer that all arms have."""
    shared = _stream(arms, measure)
    # One middle for all measures: distances to the own type are not measured at the embedding.
    whole = max((_stream(arms, name) for name in GEOMETRY), key=len)
    middle = whole[len(whole) // 2] if whole and whole[len(whole) // 2] in shared else None
    return list(dict.fromkeys((middle or shared[len(shared) // 2], shared[-1]))) if shared else []


def _stream(arms: Sequence[Arm], measure: str) -> list[str]:
    shared = [site for site in arms[0].shelf.sites(measure) if is_stream(site)]
    return [site for site in shared if all(site in arm.shelf.sites(measure) for arm in arms)]


def bins_of(arms: Sequence[Arm], measure: str) -> list[tuple[int, int]]:
    """The bins of frequency that all arms have, rarest first."""
    every = [{b for name in arm.shelf.slices(measure) if (b := frequency_bin(name))} for arm in arms]
    return sorted(set.intersection(*every)) if every else []


def energy_measures(arms: Sequence[Arm]) -> list[str]:
    """Ratio and share of the activation gradient along the first proxy that is not a random basis."""
    for proxy in PROXIES:
        names = [f"{proxy}.activation.{what}" for what in ("ratio", "share")]
        if proxy != "random" and all(names[0] in arm.shelf.measures for arm in arms):
            return [name for name in names if all(name in arm.shelf.measures for arm in arms)]
    return []


def causal_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """Geometry, tangent energy, distances and loss against the exponent."""
    arms = arms_of(shelves)
    if not arms:
        return ()
    drawing = _Drawing(arms)
    return (*drawing.geometry(), *drawing.energy(), *drawing.distances(), *drawing.losses())


class _Drawing:
    """The figures of one study."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms, self.groups = arms, lines_of_arms(arms)
        self.series: list[Series] = [arm.shelf.series for arm in arms if not arm.partial]

    def geometry(self) -> tuple[Figure, ...]:
        """Anisotropy and dimension, and how closely distances follow frequency, at two layers."""
        pile, roles = Pile(), dict[str, int]()
        for measure in (*GEOMETRY, *TIES):
            sites = sites_of(self.arms, measure)
            for site in sites:
                roles.setdefault(site, len(roles))
            lines = [line for site in sites for line in self._lines(Place(measure, site), site, role=roles[site])]
            y = "Pearson" if measure in TIES else axis_title(measure)
            nulls = references(measure, self.series)
            self._panel(pile, f"causal-{measure}", title_of(Place(measure, "")), y, lines, nulls)
        switches = [Toggle(kind="site", value=site, role=role, dash=None, on=True) for site, role in roles.items()]
        return self._figure(
            pile,
            "causal-geometry",
            "Geometry against the exponent",
            f"At step {self.arms[0].step:,}, the last: a middle layer and the last one. "
            "Correlations are over token types, of log count with the mean distance to the own centroid and to that "
            "of all tokens.",
            switches if len(switches) > 1 else [],
        )

    def energy(self) -> tuple[Figure, ...]:
        """Energy ratio and share by bin of frequency."""
        pile = Pile()
        for measure in energy_measures(self.arms):
            name = tangent(measure)
            assert name is not None  # chosen by that
            for site in sites_of(self.arms, measure):
                lines = self._by_bin(measure, site)
                known = [record for arm in self.arms if (record := arm.at_end(Place(measure, site)))]
                what = chance_line(known) if name.what == "share" else ONE
                title = f"Energy {name.what} ({PROXIES[name.proxy]}) · {site}"
                self._panel(pile, f"causal-{name.what}-{site}", title, f"energy {name.what}", lines, what)
        return self._figure(
            pile,
            "causal-energy",
            "Tangent energy by frequency against the exponent",
            "The activation gradient of the loss without weights, along the proxy"
            + (", by bins of token frequency in the text as it is." if bins_of(self.arms, "loss") else "."),
        )

    def distances(self) -> tuple[Figure, ...]:
        """Distances to centroids by bin of frequency."""
        pile = Pile()
        for measure in DISTANCES:
            for site in sites_of(self.arms, measure):
                title = f"{measure_title(measure)} · {site}"
                lines = self._by_bin(measure, site)
                self._panel(pile, f"causal-{measure}-{site}".replace("_", "-"), title, axis_title(measure), lines)
        return self._figure(
            pile,
            "causal-distances",
            "Distances by frequency against the exponent",
            "Mean distance of tokens to the centroid of their own type and to that of all, by bins of frequency. They "
            "grow with the scale of the activations; compare bins with each other.",
        )

    def losses(self) -> tuple[Figure, ...]:
        """The held-out loss without weights: of all tokens, by bin, and above the entropy rate."""
        pile = Pile()
        known = [arm for arm in self.arms if arm.told.get("entropy_rate") is not None]
        if known and len(known) == len(self.arms):
            lines = self._lines(Place("loss", MODEL_SITE, excess=True), "excess loss")
            floor = (Reference(name="0: the entropy rate", y=0.0),)
            self._panel(pile, "causal-excess", "Loss above the entropy rate", "nats", lines, floor)
        lines = self._lines(Place("loss", MODEL_SITE), "held-out loss")
        self._panel(pile, "causal-loss", "Held-out loss", "loss (nats)", lines)
        lines = self._by_bin("loss", MODEL_SITE) if bins_of(self.arms, "loss") else []
        self._panel(pile, "causal-loss-bins", "Held-out loss by frequency", "loss (nats)", lines)
        return self._figure(
            pile,
            "causal-losses",
            "Loss on the untouched text against the exponent",
            "Of the probe, whatever the model was trained with: no weights, no drawn windows.",
        )

    def _by_bin(self, measure: str, site: str) -> list[Line]:
        """A line for each bin; one of all tokens where arms have not the same bins, as languages may not."""
        bins: Sequence[tuple[int, int] | None] = bins_of(self.arms, measure) or (None,)
        found: list[Line] = []
        for number, bin in enumerate(bins):
            name = f"frequency {bin[0]} of {bin[1]}" if bin else "all tokens"
            found += self._lines(Place(measure, site, bin), name, shade=number / max(1, len(bins) - 1))
        return found

    def _lines(self, place: Place, name: str, *, role: int = 0, shade: float | None = None) -> list[Line]:
        """One line through the arms of each method, and through each seed."""
        found: list[Line] = []
        for dash, (method, arms) in enumerate(self.groups.items()):
            points = [(arm, record) for arm in arms if (record := arm.at_end(place)) is not None]
            if not points:
                continue
            tags = {"method": METHODS[method]} | ({} if shade is not None else {"site": name})
            look = {"role": role, "dash": dash, "shade": shade, "tags": tags, "name": name}
            whole = _line(place, points, joined=method != "placebo", **look)
            seeds = sorted({cell.seed for arm in arms for cell in cells_of(arm.shelf.series) if cell.seed is not None})
            singles = [
                _line(place, own, joined=method != "placebo", **look)
                for seed in seeds
                if (own := [(a, r) for a, _ in points if (r := _of_seed(a, place, seed)) is not None])
            ]
            pooled = all(arm.shelf.members and not arm.partial for arm, _ in points)
            found += seed_lines(points[0][0].shelf.series, whole, singles) if pooled else [whole]
        return found

    def _panel(self, pile: Pile, key: str, title: str, y: str, lines: Sequence[Line], nulls: Nulls = ()) -> None:
        if lines:
            pile.panels.append(Panel(key=key, title=title, x=X, y=Axis(title=y), lines=tuple(lines), references=nulls))

    def _figure(
        self, pile: Pile, key: str, title: str, caption: str, switches: Sequence[Toggle] = ()
    ) -> tuple[Figure, ...]:
        methods = [
            Toggle(kind="method", value=METHODS[method], role=None, dash=dash, on=True)
            for dash, method in enumerate(self.groups)
            if len(self.groups) > 1
        ]
        records = [record for arm in self.arms for record in arm.shelf.series.last()]
        paired = " Slopes are paired by seed, and can be surer than these bands." if seed_toggles(self.series) else ""
        some = [
            f" {arm.label}: {len(arm.there)} of {len(arm.shelf.members)} seeds." for arm in self.arms if arm.partial
        ]
        said = f"{caption} {band_words(self.series, records)}{paired}{''.join(some)}".strip()
        toggles = (*methods, *switches, *seed_toggles(self.series))
        columns = 2 if len(pile.panels) == 4 else 0
        ordered = any(line.shade for panel in pile.panels for line in panel.lines)  # several bins, and not one alone
        shades = ("rarest", "most frequent") if ordered else None
        return pile.figure(key=key, title=title, caption=said, toggles=toggles, shades=shades, columns=columns)


def _of_seed(arm: Arm, place: Place, seed: int) -> Record | None:
    found = [one for one in arm.shelf.members or (arm.shelf,) if one.series.seed == seed]
    return arm.at_end(place, found[0]) if found else None


def _line(place: Place, points: Sequence[tuple[Arm, Record]], **look: Any) -> Line:
    """The line through some arms, in the order of their exponents."""
    shift: Callable[[Arm, Record], float] = lambda arm, record: place.value(record, arm) - record.estimate.value  # noqa: E731
    ends = [record.estimate.interval() for _, record in points]
    moved = [shift(arm, record) for arm, record in points]
    return Line(
        x=tuple(arm.exponent for arm, _ in points),
        y=tuple(place.value(record, arm) for arm, record in points),
        lower=tuple(None if end is None else end[0] + by for end, by in zip(ends, moved)),
        upper=tuple(None if end is None else end[1] + by for end, by in zip(ends, moved)),
        hover=tuple(hover_text(record, arm.label, exponent_words(arm)) for arm, record in points),
        **look,
    )


def with_bar(value: float, error: float) -> str:
    """``0.741 ± 0.005``, with the decimals that the error deserves."""
    return f"{digits_of(value, error)} ± {digits_of(error, error)}"


def exponent_words(arm: Arm) -> str:
    """``exponent 0.741 ± 0.005, 0 asked for``."""
    error, asked = arm.told.get("stderr"), arm.told.get("asked")
    value = with_bar(arm.exponent, error) if isinstance(error, float) else shown(arm.exponent, "g")
    short = f", {shown(asked, 'g')} asked for" if arm.told.get("short") and isinstance(asked, int | float) else ""
    return f"exponent {value}{short}"
