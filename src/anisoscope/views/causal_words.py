"""The effect of token frequency in words and small tables: slopes over seeds, what they show and what they do not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from anisoscope.estimate import Estimate
from anisoscope.views.associations import adjusted
from anisoscope.views.causal import (
    GEOMETRY,
    METHODS,
    PLAIN,
    TIES,
    Arm,
    Place,
    arms_of,
    behind,
    bins_of,
    difference,
    energy_measures,
    lines_of_arms,
    sites_of,
    slope,
    title_of,
    with_bar,
)
from anisoscope.views.names import DISTANCES, MODEL_SITE
from anisoscope.views.numbers import digits_of, interval_words, shown
from anisoscope.views.panels import Table
from anisoscope.views.seeds import LEAST_SEEDS, LEVEL, can_test, too_few_seeds
from anisoscope.views.shelf import Shelf
from anisoscope.views.verdicts import listed

SHOWS: Mapping[str, str] = {
    "loss": (
        "Text, order of windows, initial weights and compute are equal in all models of one seed; only the weights of "
        "targets in the loss differ. What moves with the exponent is therefore an effect of these weights. They "
        "change two things at once: how much each type counts, and how noisy the gradient is"
    ),
    "resample": (
        "Drawn windows change more than frequency: a window with many rare types is also about other things. A slope "
        "here says that frequency or what comes with it in the text has an effect, not which of the two."
    ),
    "language": (
        "Languages share vocabulary, shuffles and random draws. With the exponent their entropy and the number of "
        "successors of a token change too, so a slope is the effect of the whole law and not of frequency alone; at "
        "exponent 0 the bins of frequency part tokens by chance."
    ),
}
MOST_NAMED = 6  # slopes that a sentence names
NEVER = (
    "It does not show that text with another exponent would do the same, nor anything about other sizes, texts or "
    "lengths of training; and a slope is a straight line through a few exponents, whatever the curve."
)


@dataclass(frozen=True)
class Slope:
    """One slope with its p-value, adjusted over all slopes of the same method.

    ``bent``: means over seeds do not rise or fall all the way, so a straight line hides what happens.
    """

    place: Place
    estimate: Estimate
    adjusted: float | None
    bent: bool = False

    @property
    def sure(self) -> bool:
        """Whether it stays significant after the correction."""
        return self.adjusted is not None and self.adjusted <= LEVEL


def places_of(arms: Sequence[Arm]) -> list[Place]:
    """Every number that the section speaks of."""
    found = [Place(measure, site) for measure in (*GEOMETRY, *TIES) for site in sites_of(arms, measure)]
    for measure in (*energy_measures(arms), *DISTANCES):
        bins = bins_of(arms, measure)
        whole = () if measure in DISTANCES else (None,)
        ends = (*whole, *bins[:1], *bins[-1:])
        found += [Place(measure, site, bin) for site in sites_of(arms, measure) for bin in ends]
    bins = bins_of(arms, "loss")
    found += [Place("loss", MODEL_SITE), *(Place("loss", MODEL_SITE, bin) for bin in (*bins[:1], *bins[-1:]))]
    if all(arm.told.get("entropy_rate") is not None for arm in arms):
        found.append(Place("loss", MODEL_SITE, excess=True))
    return list(dict.fromkeys(found))


def slopes_of(arms: Sequence[Arm], places: Sequence[Place]) -> dict[Place, Slope]:
    """Slopes of one method with p-values after Benjamini and Hochberg; none of these where seeds are too few."""
    found = {place: value for place in places if (value := slope(arms, place)) is not None}
    tested = [place for place, one in found.items() if can_test(one)]
    p = dict(zip(tested, _corrected([found[place] for place in tested]), strict=True))
    return {place: Slope(place, one, p.get(place), _bent(arms, place)) for place, one in found.items()}


def _bent(arms: Sequence[Arm], place: Place) -> bool:
    means = [statistics.fmean(values) for arm in arms if (values := arm.by_seed(place).values())]
    rises = {after > before for before, after in pairwise(means)}
    return len(rises) > 1


def _corrected(estimates: Sequence[Estimate]) -> list[float]:
    if not estimates:
        return []
    from scipy.special import stdtr  # here, not above: scipy is slow to import

    return adjusted([2 * float(stdtr(one.dof, -abs(one.value / one.stderr))) for one in estimates if one.stderr])


def causal_words(shelves: Sequence[Shelf]) -> list[str]:
    """What was changed, what moved with it, and what that does and does not show."""
    arms = arms_of(shelves)
    if not arms:
        return []
    places, said = places_of(arms), []
    for method, mine in lines_of_arms(arms).items():
        if method != "placebo":
            said.append(_changed(method, mine))
            said += _moved(slopes_of(mine, places))
    said += _placebo(arms, places)
    means = [SHOWS[method] for method in lines_of_arms(arms) if method in SHOWS]
    if "loss" in lines_of_arms(arms):
        has = any(arm.method == "placebo" for arm in arms)
        more = "; a placebo has the same noise and no change of types, and tells the two apart." if has else "."
        means = [words + more if words == SHOWS["loss"] else words for words in means]
    late = behind(shelves)
    left = [f"Left out, as they are not as far or lack a seed there: {listed(late)}."] if late else []
    # Methods with equally few seeds say so in the same words: once is enough.
    return [*dict.fromkeys(said), *left, *means, NEVER]


def _changed(method: str, arms: Sequence[Arm]) -> str:
    """Which exponents there are, and how far the ones asked for were reached."""
    exponents = listed([shown(exponent, ".3g") for exponent in dict.fromkeys(arm.exponent for arm in arms)])
    who = f"{METHODS[method][:1].upper()}{METHODS[method][1:]}: effective exponents {exponents}."
    own = next((arm for arm in arms if arm.method == PLAIN), None)
    if own is not None and isinstance(own.told.get("own_stderr"), float):
        error = own.told["own_stderr"]
        who += f" The text's own is {with_bar(own.exponent, error)} (standard error over stretches of the text)."
    placebo = next((arm for arm in arms if arm.method == "placebo"), None) if method != "placebo" else None
    who += (
        f" {placebo.label} stands for the plain model: drawn as unevenly, with no eye to frequency." if placebo else ""
    )
    short = [arm for arm in arms if arm.told.get("short")]
    if short:
        asked = listed([shown(arm.told["asked"], "g") for arm in short])
        share = min(float(arm.told["effective_share"]) for arm in short)
        who += (
            f" Out of reach: {asked}; further would leave fewer than {shown(100 * share, '.0f')} % of the windows "
            "in effect."
            if method == "resample"
            else f" Out of reach with the largest weight: {asked}."
        )
    return who


def _moved(slopes: Mapping[Place, Slope]) -> list[str]:
    """The slopes of the geometry that the corrected test takes for real, and how many of all are."""
    tested = [one for one in slopes.values() if one.adjusted is not None]
    if not tested:
        most = max((one.estimate.n for one in slopes.values()), default=0)
        return [too_few_seeds(most, len(slopes), "slope")] if most else []
    sure = [one for one in tested if one.sure]
    noun = "slope" if len(tested) == 1 else "slopes"
    seeds = tested[0].estimate.over
    whole = f"{len(sure)} of {len(tested)} {noun} differ from 0 at 5 % after the Benjamini-Hochberg correction."
    bent = sum(one.bent for one in sure)
    whole += f" {bent} of them bend (†): a line says little there." if bent else ""
    named = [one for one in sure if one.place.bin is None and not one.bent]
    if not named:
        return [whole]
    each = [f"{_name(one.place)} by {_signed(one.estimate)}" for one in named[:MOST_NAMED]]
    each += [f"{len(named) - MOST_NAMED} more (in the table)"] if len(named) > MOST_NAMED else []
    return [f"{whole} One unit of exponent more changes {listed(each)} (95 % intervals over {seeds}, paired)."]


def _placebo(arms: Sequence[Arm], places: Sequence[Place]) -> list[str]:
    """Whether noise alone moves anything."""
    plain = next((arm for arm in arms if arm.method == PLAIN), None)
    said = []
    for arm in (one for one in arms if one.method == "placebo" and plain is not None):
        assert plain is not None
        found = [(place, one) for place in places if (one := difference(arm, plain, place)) and one.stderr]
        tested = [pair for pair in found if can_test(pair[1])]
        corrected = _corrected([one for _, one in tested])
        sure = [(place, one) for (place, one), q in zip(tested, corrected, strict=True) if q <= LEVEL]
        if arm.partial:
            has = f"{len(arm.there)} of {len(arm.shelf.members)} seeds"
            bare = "" if found else ". With one seed, what it moves has no error bar (in the table)"
            said.append(f"{arm.label}: {has} at the last step; the others are left out{bare}.")
        if found:
            each = [f"{_name(place)} by {_signed(one)}" for place, one in sure[:4]]
            end = f": {listed(each)}" if each else ""
            share = shown(100 * float(arm.told["effective_share"]), ".0f")
            what = f"what exponent {shown(arm.told['asked'], 'g')} takes, dealt at random (effective share {share} %)"
            moves = f"moves {len(sure)} of {len(tested)} numbers away from the plain model after correction{end}"
            few = f"is not tested against the plain model: it takes {LEAST_SEEDS} seeds that both have"
            said.append(f"{arm.label}: {what}, {moves if tested else few}.")
    return said


def causal_tables(shelves: Sequence[Shelf]) -> list[Table]:
    """The arms with their loss, then every slope."""
    arms = arms_of(shelves)
    if not arms:
        return []
    places = places_of(arms)
    return [_arm_table(arms), *_slope_table(arms, places)]


def _arm_table(arms: Sequence[Arm]) -> Table:
    loss = Place("loss", MODEL_SITE)
    known = all(arm.told.get("entropy_rate") is not None for arm in arms)
    rows = []
    for arm in arms:
        record = arm.at_end(loss)
        own = None if record is None else record.estimate
        error = arm.told.get("stderr")
        asked = arm.told.get("asked")
        row = [
            arm.label,
            METHODS.get(arm.method, "plain"),
            "–" if asked is None else shown(asked, "g"),
            with_bar(arm.exponent, error) if isinstance(error, float) else f"{shown(arm.exponent, 'g')} (exact)",
            f"{shown(100 * float(arm.told['effective_share']), '.0f')} %",
            "–" if own is None else _with_interval(own) + (f" ({_seeds(arm)})" if arm.partial else ""),
        ]
        if known:
            rate = float(arm.told["entropy_rate"])
            bar = arm.told.get("entropy_stderr")
            row.append(with_bar(rate, bar) if isinstance(bar, float) else f"{shown(rate, '.4f')} (exact)")
            row.append("–" if own is None else shown(own.value - rate, ".3f"))
        rows.append(tuple(row))
    head = ("Model", "Method", "Exponent asked", "Reached", "Effective share", "Held-out loss (nats)")
    caption = (
        "The models. Exponents with one standard error over stretches of the text. Effective share: equal weights on "
        "so many of the targets (or windows) would be as noisy. The held-out loss is without weights"
        + (", and stands beside the entropy rate of the language, which no model can go below." if known else ".")
    )
    more = ("Entropy rate", "Excess") if known else ()
    return Table(key="causal-arms", caption=caption, head=(*head, *more), rows=tuple(rows))


def _seeds(arm: Arm) -> str:
    n = len(arm.there)
    return "one seed" if n == 1 else f"{n} seeds"


def _slope_table(arms: Sequence[Arm], places: Sequence[Place]) -> list[Table]:
    groups = {method: mine for method, mine in lines_of_arms(arms).items() if method != "placebo"}
    found = {method: slopes_of(mine, places) for method, mine in groups.items()}
    plain = next((arm for arm in arms if arm.method == PLAIN), None)
    placebos = [arm for arm in arms if arm.method == "placebo" and plain is not None]
    rows = []
    for place in places:
        cells = [_slope_words(found[method].get(place)) for method in groups]
        for arm in placebos:
            assert plain is not None
            apart = difference(arm, plain, place)
            cells.append("–" if apart is None else _signed(apart))
        if any(cell != "–" for cell in cells):
            where = "model" if place.site == MODEL_SITE else place.site
            tokens = "all" if place.bin is None else "rarest" if place.bin[0] == 1 else "most frequent"
            rows.append((title_of(place), where, tokens, *cells))
    if not rows:
        return []
    head = ("Quantity", "Site", "Tokens", *(f"Slope, {METHODS[method]}" for method in groups))
    tested = any(one.adjusted is not None for slopes in found.values() for one in slopes.values())
    star = "* differs from 0 at 5 % after the Benjamini-Hochberg correction over the column"
    caption = (
        "Change for one unit of exponent: a least-squares line for each seed through the models of one method, with "
        "the 95 % interval of the mean over seeds (Student's t). "
        f"{star if tested else f'No star: it takes {LEAST_SEEDS} seeds to test'}; "
        "† bends: its means do not rise or fall all the way."
        + (" Placebo: its difference from the plain model, paired." if placebos else "")
    )
    ends = tuple(f"{arm.label} minus plain" for arm in placebos)
    return [Table(key="causal-slopes", caption=caption, head=(*head, *ends), rows=tuple(rows))]


def _name(place: Place) -> str:
    first, *rest = title_of(place).split(" ")
    name = " ".join((first.lower() if first[1:].islower() else first, *rest))
    return name if place.site == MODEL_SITE else f"{name} at {place.site}"


def _slope_words(one: Slope | None) -> str:
    return "–" if one is None else _signed(one.estimate) + (" *" if one.sure else "") + (" †" if one.bent else "")


def _signed(estimate: Estimate) -> str:
    """``+0.12 (0.05 … 0.19)``."""
    value = digits_of(estimate.value, estimate.stderr, plus=True)
    ends = interval_words(estimate)
    return f"{value} ({ends})" if ends else f"{value} (no error bar)"


def _with_interval(estimate: Estimate) -> str:
    ends = interval_words(estimate)
    return f"{digits_of(estimate.value, estimate.stderr)} ({ends})" if ends else shown(estimate.value, ".3f")
