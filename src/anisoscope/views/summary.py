"""The numbers in plain words: what was measured on what, where it peaks, whether the profile is a bell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record, layer_of
from anisoscope.views.layout import stream_sites, unique, unit
from anisoscope.views.numbers import digits_of, shown, with_error
from anisoscope.views.series import Series, is_watched, measure_order, measure_title, slice_order, stream_profile
from anisoscope.views.shape import LEVEL, Shape, profile_shape

LEADING = ("spectral_ratio", "mean_cosine", "isoscore")
DIMENSIONS = ("two_nn", "mle", "gride")
BIASED_ABOVE = 10  # dimensions; docs/measures.md has the curves
MANY_PROFILES = 60  # beyond this, fewer draws: the page should not take minutes
DRAWS, FEWER_DRAWS = 2000, 500
NOTABLE = 0.2  # share of a maximum that a slice must take off before the summary speaks of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile over the residual stream and its shape; ``why_not`` says why there is none."""

    model: str
    measure: str
    slice: str
    records: tuple[Record, ...]
    shape: Shape | None
    why_not: str = ""

    @property
    def highest(self) -> Record:
        """The layer with the largest value."""
        return max(self.records, key=lambda record: record.estimate.value)

    @property
    def lowest(self) -> Record:
        """The layer with the smallest value."""
        return min(self.records, key=lambda record: record.estimate.value)


def read_profiles(series: Sequence[Series]) -> list[Profile]:
    """Every profile of the last step, with its shape where the error bars allow one."""
    wanted = []
    for one in series:
        last = one.last()
        slices = unique((record.slice for record in last), slice_order)
        for measure in unique((record.measure for record in last), measure_order):
            for slice in slices:
                found = stream_profile(last, measure, slice)
                if found:
                    wanted.append((one.label, measure, slice, tuple(found)))
    draws = DRAWS if len(wanted) <= MANY_PROFILES else FEWER_DRAWS
    profiles = []
    for model, measure, slice, records in wanted:
        shape, why = _shape([record.estimate for record in records], draws)
        profiles.append(Profile(model=model, measure=measure, slice=slice, records=records, shape=shape, why_not=why))
    return profiles


def _shape(estimates: Sequence[Estimate], draws: int) -> tuple[Shape | None, str]:
    if len(estimates) < 3:
        return None, "fewer than three layers"
    errors = [e.stderr for e in estimates]
    missing = sum(not error for error in errors)
    if missing:
        return None, f"{missing} of {len(errors)} layers without an error bar"
    dofs = [e.dof for e in estimates if e.dof is not None]
    values = tuple(e.value for e in estimates)
    return _shape_of(values, tuple(error or 0.0 for error in errors), min(dofs, default=None), draws), ""


@lru_cache(maxsize=512)  # the terminal and the report tell the same profiles, one after the other
def _shape_of(values: tuple[float, ...], errors: tuple[float, ...], dof: float | None, draws: int) -> Shape:
    return profile_shape(values, errors, dof=dof, draws=draws)


def headline(series: Sequence[Series]) -> str:
    """One sentence: what was measured on what."""
    series = [one for one in series if one.measured]
    numbers = sum(len(one.records) for one in series)
    if not numbers:
        return "No number was measured."
    if any(map(is_watched, series)):
        return _watched_headline(series, numbers)
    measures = len({record.measure for one in series for record in one.records})
    steps = len({step for one in series for step in one.steps})
    sites = len({record.site for one in series for record in one.records})
    where = f"{len(series)} models" if len(series) > 1 else f"{sites} {'site' if sites == 1 else 'sites'} of one model"
    when = f" at {steps} steps" if steps > 1 else ""
    tokens = unique(f"{one.facts['tokens']:,}" for one in series if isinstance(one.facts.get("tokens"), int))
    corpora = unique(str(one.facts["corpus"]) for one in series if one.facts.get("corpus"))
    text = f", on {tokens[0]} tokens" if len(tokens) == 1 else ""
    text += f"{' of' if text else ', on'} {corpora[0]}" if len(corpora) == 1 else ""
    noun = "measure" if measures == 1 else "measures"
    return f"{measures} {noun} of geometry in {where}{when}{text}: {numbers:,} numbers with their error bars."


def _watched_headline(series: Sequence[Series], numbers: int) -> str:
    models = len({(one.run, one.variant or one.label) for one in series})
    steps = sorted({step for one in series for step in one.steps})
    what = f"{models} models" if models > 1 else "One model"
    seeds = max(Counter((one.run, one.variant) for one in series if one.variant).values(), default=1)
    several = f" from {seeds} seeds{' each' if models > 1 else ''}" if seeds > 1 else ""
    when = (
        f"at {len(steps)} steps from {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"once, at step {steps[0]:,}"
    )
    corpora = unique(str(one.facts["corpus"]) for one in series if one.facts.get("corpus"))
    text = f" on {corpora[0]}" if len(corpora) == 1 else ""
    return f"{what} watched while training{several}{text}, {when}: {numbers:,} numbers with their error bars."


def findings(series: Sequence[Series], profiles: Sequence[Profile]) -> dict[str, list[tuple[str, str]]]:
    """What the numbers say, by topic: pairs of a model (empty where there is one only) and its sentences."""
    found: dict[str, list[tuple[str, str]]] = {}
    several = sum(one.measured for one in series) > 1
    for one in series:
        mine = [profile for profile in profiles if profile.model == one.label]
        said = {
            "Anisotropy": _anisotropy(mine),
            "Dimension": _dimension(mine),
            "Paths": _turning(mine),
            "Training": _training(one),
        }
        for topic, sentences in said.items():
            if sentences:
                found.setdefault(topic, []).append((one.label if several else "", " ".join(sentences)))
    failed = sum(len(one.failures) for one in series)
    if failed:
        noun = "measurement" if failed == 1 else "measurements"
        found["Failures"] = [("", f"{failed:,} {noun} failed; they are listed below and appear in no figure.")]
    return found


def _pick(profiles: Sequence[Profile], names: Sequence[str]) -> list[Profile]:
    """The profiles of the first measure of ``names`` that was measured, one for each slice."""
    for name in names:
        chosen = [profile for profile in profiles if profile.measure == name]
        if chosen:
            return chosen
    return []


def _at(record: Record, layers: int) -> str:
    """``resid.5 (0.61 ± 0.02)`` with the share of depth."""
    depth = f", {shown((layer_of(record.site) or 0) / (layers - 1), '.0%')} of depth" if layers > 1 else ""
    return f"{record.site} ({with_error(record.estimate, unit(record.measure))}{depth})"


def _anisotropy(profiles: Sequence[Profile]) -> list[str]:
    chosen = _pick(profiles, LEADING)
    return [*_course(chosen[0]), *_slices(chosen[0], chosen[1:])] if chosen else []


def _dimension(profiles: Sequence[Profile]) -> list[str]:
    chosen = _pick(profiles, DIMENSIONS)
    return _course(chosen[0]) if chosen else []


def _course(profile: Profile) -> list[str]:
    """Where a profile is lowest and highest, and what shape it has."""
    title, count = measure_title(profile.measure), len(profile.records)
    if count == 1:
        return [f"{title} at {_at(profile.highest, 1)}."]
    said = [f"{title} is highest at {_at(profile.highest, count)} and lowest at {_at(profile.lowest, count)}."]
    return [*said, f"Over depth it is {shape_words(profile)}"] if count > 2 else said


def _slices(first: Profile, others: Sequence[Profile]) -> list[str]:
    """The slices whose maximum lies far below that over all tokens, beyond what errors explain."""
    top = first.highest.estimate
    far = []
    for other in others:
        e = other.highest.estimate
        gap = top.value - e.value
        noise = 2 * ((top.stderr or 0.0) ** 2 + (e.stderr or 0.0) ** 2) ** 0.5
        if top.value > 0 and gap > noise and gap > NOTABLE * top.value:
            far.append(f"{with_error(e)} over “{other.slice}”")
    if not far:
        return []
    them = "these slices leave" if len(far) > 1 else "this slice leaves"
    return [f"The maximum is only {' and '.join(far)}: what {them} out makes much of the anisotropy."]


def shape_words(profile: Profile) -> str:
    """The verdict on one profile with its numbers, to follow "it is"."""
    shape = profile.shape
    if shape is None:
        return f"not tested for its shape ({profile.why_not})."
    against_flat = f"flat: {p_words(shape.p_flat, shape.draws)}"
    if shape.verdict in ("bell", "U"):
        p = shape.p_monotone if shape.verdict == "bell" else shape.p_monotone_valley
        low, high = shape.prominence_interval
        size, *ends = (digits_of(x, shape.prominence_stderr) for x in (shape.prominence, low, high))
        words = {"bell": ("a bell", "above the higher end"), "U": ("a U", "below the lower end")}
        name, beyond = words[shape.verdict]
        place = {"bell": "peak", "U": "bottom"}[shape.verdict]
        name += " with departures that the errors do not explain" if shape.rough else ""
        return (
            f"{name} ({against_flat}; monotone: {p_words(p, shape.draws)}), with its {place} {peak_words(profile)}, "
            f"{size} {beyond} ({ends[0]} to {ends[1]})."
        )
    if shape.verdict == "flat":
        return f"flat as far as the errors can tell ({p_words(shape.p_flat, shape.draws)})."
    if shape.verdict == "undecided":
        return f"not flat ({p_words(shape.p_flat, shape.draws)}), and no bell, U, rise or fall describes it."
    going = "rising" if "rising" in shape.verdict else "falling"
    if shape.rough:
        going = f"mostly {going}, with departures that the errors do not explain"
    against_monotone = p_words(shape.p_monotone, shape.draws)
    if shape.p_monotone <= LEVEL:  # "no bell (p ≤ 0.0005)" would read as if the p-value spoke against a bell
        return f"{going} ({against_flat}); it bends (monotone: {against_monotone}), too little to be called a bell."
    return f"{going} ({against_flat}); no bell is seen ({against_monotone})."


def peak_words(profile: Profile) -> str:
    """``at resid.5 (95 % interval resid.4 to resid.6)``."""
    if profile.shape is None:
        return ""
    low, high = (profile.records[at].site for at in profile.shape.peak_interval)
    if low == high:
        return f"at {low} (95 % interval: no other layer)"
    return f"at {profile.records[profile.shape.peak].site} (95 % interval {low} to {high})"


def p_words(p: float, draws: int) -> str:
    """A p-value; the smallest that so many draws can give is written as a bound."""
    return f"p ≤ {shown(p, '.1g')}" if p <= 1.5 / (draws + 1) else f"p = {shown(p, '.2g')}"


def _turning(profiles: Sequence[Profile]) -> list[str]:
    chosen = _pick(profiles, ("turning_angle",))
    if not chosen:
        return []
    low, high = chosen[0].lowest.estimate.value, chosen[0].highest.estimate.value
    reads = (
        f"is {shown(low, '.1f')}°" if low == high else f"lies between {shown(low, '.1f')}° and {shown(high, '.1f')}°"
    )
    return [f"Turning angle {reads}; independent points read 120° and a random walk 90°."]


def _training(one: Series) -> list[str]:
    if len(one.steps) < 2:
        return []
    first, last = one.steps[0], one.steps[-1]
    sites = stream_sites(one.records)
    middle = sites[len(sites) // 2]
    table = {(r.measure, r.step): r.estimate for r in reversed(one.records) if r.site == middle}
    said = []
    for measure in (*LEADING[:1], *DIMENSIONS[:1]):
        ends = [table.get((measure, step)) for step in (first, last)]
        if ends[0] is not None and ends[1] is not None:
            name = measure_title(measure)
            name = name if name[:3] == "Two" else name.lower()
            said.append(f"{name} goes from {with_error(ends[0])} to {with_error(ends[1])}")
    return [f"From step {first:,} to step {last:,}, at {middle}: {'; '.join(said)}."] if said else []


def comparison(series: Sequence[Series], profiles: Sequence[Profile]) -> list[tuple[str, list[dict[str, str]]]]:
    """Models side by side: for each measure the range and the shape in every model, over the first slice."""
    found = []
    for measure in unique((profile.measure for profile in profiles), measure_order):
        rows = []
        for one in series:
            mine = [p for p in profiles if p.model == one.label and p.measure == measure]
            if mine:
                low, high = mine[0].lowest, mine[0].highest
                rows.append(
                    {
                        "model": one.label,
                        "lowest": f"{with_error(low.estimate)} at {low.site}",
                        "highest": f"{with_error(high.estimate)} at {high.site}",
                        "shape": mine[0].shape.verdict if mine[0].shape else "not tested",
                    }
                )
        found.append((measure_title(measure), rows))
    return found
