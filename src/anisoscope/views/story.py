"""A training in plain words: how far the loss came, early against late energy, whether the dimension rose and fell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from anisoscope.estimate import Estimate
from anisoscope.runs.records import layer_of
from anisoscope.views.corrected import Tests, significant
from anisoscope.views.names import GRADIENTS, MODEL_SITE, PROXIES
from anisoscope.views.numbers import shown, with_error
from anisoscope.views.seeds import cells_of, mean_over_seeds
from anisoscope.views.series import is_stream, measure_title
from anisoscope.views.shape import Shape, profile_shape
from anisoscope.views.shelf import Shelf
from anisoscope.views.summary import DIMENSIONS, p_words
from anisoscope.views.verdicts import listed, places, reader_excess, referee_words, verdict_on, verdicts


def training_findings(shelves: Sequence[Shelf], tests: Tests) -> dict[str, list[tuple[str, str]]]:
    """What a training shows, by topic: pairs of a model (empty where there is one only) and its sentences."""
    found: dict[str, list[tuple[str, str]]] = {}
    for shelf in shelves:
        said = {
            "Loss": loss_words(shelf),
            "Dimension in time": dimension_words(shelf),
            "Gradient energy": [*ratio_words(shelf), *_significance(shelf, tests)],
            "Construction": _construction(shelf, tests),
            "Referee": referee_words(verdicts([shelf]))[:1],
        }
        for topic, sentences in said.items():
            if sentences:
                found.setdefault(topic, []).append((shelf.label if len(shelves) > 1 else "", " ".join(sentences)))
    order = ("Loss", "Dimension in time", "Gradient energy", "Construction", "Referee")
    return {topic: found[topic] for topic in order if topic in found}


def loss_words(shelf: Shelf) -> list[str]:
    """The held-out loss (or, without one, the training loss) from the first look to the last."""
    for name in ("loss", "train_loss"):
        mine = shelf.get(name, MODEL_SITE)
        if not mine:
            continue
        title, first, last = measure_title(name), mine[0], mine[-1]
        if len(mine) == 1:
            return [f"{title} is {with_error(last.estimate)} at step {last.step:,}, the only look."]
        change = difference(first.estimate, last.estimate)
        verb = {1: "rises", -1: "falls", 0: "does not change beyond its error:"}[direction(change)]
        said = [
            f"{title} {verb} from {with_error(first.estimate)} at step {first.step:,} to "
            f"{with_error(last.estimate)} at step {last.step:,}{_over(last.estimate)}."
        ]
        best = min(mine, key=lambda record: record.estimate.value)
        if best is not last and best is not first and direction(difference(best.estimate, last.estimate)) > 0:
            said.append(f"It was lowest at step {best.step:,} ({with_error(best.estimate)}) and has risen since.")
        return said
    return []


def _over(estimate: Estimate) -> str:
    return f" (± over {estimate.over})" if estimate.over else ""


def difference(first: Estimate, second: Estimate) -> Estimate:
    """The second minus the first, errors taken as independent; no error bar where one of them has none."""
    bars = (first.stderr, second.stderr)
    stderr = None if None in bars else sum((bar or 0.0) ** 2 for bar in bars) ** 0.5
    dofs = [dof for dof in (first.dof, second.dof) if dof is not None]
    return Estimate(
        value=second.value - first.value,
        stderr=stderr,
        n=min(first.n, second.n),
        method="difference",
        over=None if stderr is None else second.over or first.over,
        dof=min(dofs, default=None),
    )


def direction(change: Estimate) -> int:
    """1 for a rise, -1 for a fall, 0 where the 95 % interval holds zero; the bare sign where there is no error bar."""
    interval = change.interval()
    low, high = interval if interval else (change.value, change.value)
    return 1 if low > 0 else -1 if high < 0 else 0


def thirds(steps: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The first and the last third of the steps, one step at least; None for fewer than two steps."""
    if len(steps) < 2:
        return None
    count = max(1, len(steps) // 3)
    return list(steps[:count]), list(steps[-count:])


class Change(NamedTuple):
    """A mean over layers early and late, their difference with its error, and the steps behind them."""

    early: float
    late: float
    change: Estimate
    steps: tuple[list[int], list[int]]
    sites: list[str]


def early_late(shelf: Shelf, measure: str) -> Change | None:
    """The mean of a measure over layers in the first and in the last third of its steps.

    With several seeds the error of the difference is over seeds. With one, errors of layers and steps count as wholly
    dependent, since they are measured on the same tokens: the mean of them is the error of the mean.
    """
    sites = shelf.sites(measure)
    steps = sorted({record.step for site in sites for record in shelf.get(measure, site)})
    parts = thirds(steps)
    if parts is None:
        return None
    cells = shelf.members or (shelf,)
    means: list[list[Estimate]] = []
    for cell in cells:
        both = [[r for site in sites for r in cell.get(measure, site) if r.step in part] for part in parts]
        if not all(both):
            return None
        means.append([_dependent_mean([record.estimate for record in mine]) for mine in both])
    if shelf.members:
        seeds = [member.series.seed or 0 for member in shelf.members]
        ends = [mean_over_seeds([pair[i] for pair in means], seeds) for i in (0, 1)]
        change = mean_over_seeds([difference(*pair) for pair in means], seeds)
    else:
        ends, change = means[0], difference(*means[0])
    return Change(ends[0].value, ends[1].value, change, parts, sites)


def _dependent_mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of numbers that err together: its error is the mean of their errors."""
    bars = [e.stderr for e in estimates]
    known = [bar for bar in bars if bar is not None]
    dofs = [e.dof for e in estimates if e.dof is not None]
    return Estimate(
        value=statistics.fmean(e.value for e in estimates),
        stderr=statistics.fmean(known) if len(known) == len(bars) else None,
        n=min(e.n for e in estimates),
        method="mean over layers",
        over=estimates[0].over if len(known) == len(bars) else None,
        dof=min(dofs, default=None),
    )


def ratio_words(shelf: Shelf) -> list[str]:
    """The energy ratio of the first proxy early and late, and whether it rises or falls."""
    for proxy in shelf.proxies:
        for gradient, words in GRADIENTS.items():
            found = early_late(shelf, f"{proxy}.{gradient}.ratio")
            if found:
                where = f"mean over {len(found.sites)} {places(found.sites)}"
                return [f"The energy ratio of {PROXIES[proxy]} ({words}, {where}) {_change_words(found)}"]
    return []


def _change_words(found: Change) -> str:
    verb = {1: "rises", -1: "falls", 0: "neither rises nor falls beyond its error"}[direction(found.change)]
    early, late = (
        f"steps {part[0]:,} to {part[-1]:,}" if len(part) > 1 else f"step {part[0]:,}" for part in found.steps
    )
    interval = found.change.interval()
    bar = "no error bar"
    if interval:
        bar = f"95 % {shown(interval[0], '+.2g')} to {shown(interval[1], '+.2g')} over {found.change.over}"
    low = "" if max(found.late, found.early) > 1 else " Both are below 1: less than along random directions."
    return (
        f"{verb}: {shown(found.early, '.3g')} early ({early}), {shown(found.late, '.3g')} late ({late}), a change of "
        f"{shown(found.change.value, '+.2g')} ({bar}).{low}"
    )


def _significance(shelf: Shelf, tests: Tests) -> list[str]:
    said = []
    for cell in cells_of(shelf.series):
        mine = [test for test in tests.get(cell.label, {}).values() if test.gradient == "activation"]
        if mine:
            who = f"seed {cell.seed}: " if shelf.series.members else ""
            said.append(f"{who}{significant(mine):,} of {len(mine):,}")
    if not said:
        return []
    return [f"Tests that stay significant at 5 % after correction over sites, steps and proxies: {listed(said)}."]


def _construction(shelf: Shelf, tests: Tests) -> list[str]:
    """Where the reader share of the first proxy exceeds its null, training by training."""
    for proxy in shelf.proxies:
        found = [(one, excess) for one in shelf.members or (shelf,) if (excess := reader_excess(one, tests, proxy))]
        if found:
            counts = listed(
                [
                    (f"seed {one.series.seed}: " if shelf.members else "")
                    + f"at {len(excess.above)} of {len(excess.sites)} {places(excess.sites)} (step {excess.step:,})"
                    for one, excess in found
                ]
            )
            end = verdict_on([excess for _, excess in found])
            comma = "," if shelf.members else ""
            return [f"The reader share of {PROXIES[proxy]} exceeds the permuted-signal null{comma} {counts}.{end}"]
    return []


def dimension_course(shelf: Shelf) -> tuple[str, list[int], list[Estimate]] | None:
    """The mean dimension over the layers of the residual stream at each step, with its error, and its name.

    The first place is left out: before any block a token is one of few points, and reads many times the others.
    """
    for measure in DIMENSIONS:
        stream = [site for site in shelf.sites(measure) if is_stream(site)]
        sites = [site for site in stream if layer_of(site)] or stream
        tables = [
            {(r.step, r.site): r.estimate for site in sites for r in cell.get(measure, site)}
            for cell in shelf.members or (shelf,)
        ]
        steps = [s for s in shelf.steps if sites and all((s, site) in table for table in tables for site in sites)]
        if len(steps) > 1:
            means = [[_dependent_mean([table[s, site] for site in sites]) for table in tables] for s in steps]
            seeds = [member.series.seed or 0 for member in shelf.members]
            where = f"mean over {sites[0]} to {sites[-1]}" if len(sites) > 1 else f"at {sites[0]}"
            values = [mean_over_seeds(one, seeds) if seeds else one[0] for one in means]
            return f"{measure_title(measure)}, {where}", steps, values
    return None


def dimension_words(shelf: Shelf) -> list[str]:
    """Whether the dimension rises and then falls over training."""
    found = dimension_course(shelf)
    if found is None:
        return []
    name, steps, values = found
    first, last = values[0], values[-1]
    ends = f"from {with_error(first)} at step {steps[0]:,} to {with_error(last)} at step {steps[-1]:,}"
    bars = [e.stderr or 0.0 for e in values]
    if len(steps) < 3 or not all(bars):
        why = "too few looks" if len(steps) < 3 else "no error bars"
        return [f"{name}, goes {ends}; whether it rises and falls was not tested ({why})."]
    dofs = [e.dof for e in values if e.dof is not None]
    shape = profile_shape([e.value for e in values], bars, dof=min(dofs, default=None))
    return [f"{name}: {_phases(shape, steps, values, ends)}"]


def _phases(shape: Shape, steps: Sequence[int], values: Sequence[Estimate], ends: str) -> str:
    turn = f"{with_error(values[shape.peak])} at step {steps[shape.peak]:,}"
    first, last = (f"{with_error(values[i])} at step {steps[i]:,}" for i in (0, -1))
    against_flat = p_words(shape.p_flat, shape.draws)
    flat = f"flat: {against_flat}"
    if shape.verdict == "bell":
        p = p_words(shape.p_monotone, shape.draws)
        return f"two phases. It rises from {first} to {turn}, then falls to {last} ({flat}; monotone: {p})."
    if shape.verdict == "U":
        p = p_words(shape.p_monotone_valley, shape.draws)
        course = f"It falls from {first} to {turn}, then rises to {last}"
        return f"no rise and fall, but the reverse. {course} ({flat}; monotone: {p})."
    if shape.verdict == "flat":
        return f"no two phases. It is flat as far as the errors can tell, {ends} ({against_flat})."
    if shape.verdict == "undecided":
        return f"no two phases. It moves ({flat}), and neither a rise and fall nor a plain course describes it: {ends}."
    going = "rises" if "rising" in shape.verdict else "falls"
    return f"no two phases. It {going} {ends} ({flat})."
