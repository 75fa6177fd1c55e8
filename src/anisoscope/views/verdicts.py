"""The tangent analysis in words and small tables: tests that stay significant, constructions, the referee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record, layer_of
from anisoscope.views.corrected import Test, Tests, significant
from anisoscope.views.layout import family, few, unique
from anisoscope.views.names import CORRELATIONS, GRADIENTS, PROXIES
from anisoscope.views.numbers import digits_of, interval_words, shown, with_error, worded
from anisoscope.views.panels import Table
from anisoscope.views.seeds import LEVEL, cells_of
from anisoscope.views.shelf import Shelf, families

TABLE_LAYERS = 5  # layers of each kind in a small table
FACTS = {
    "seminmf.explained": "Explained variance",
    "seminmf.sparsity": "Sparsity",
    "seminmf.pca_overlap": "Overlap with PCA",
}


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "none"


def places(sites: Sequence[str], count: int | None = None) -> str:
    """``layers``, or ``sites`` where not all are numbered layers of one kind; one alone in the singular."""
    alike = len(set(map(family, sites))) == 1 and all(layer_of(site) is not None for site in sites)
    word = "layer" if alike else "site"
    return word if (len(sites) if count is None else count) == 1 else f"{word}s"


def energy_words(shelves: Sequence[Shelf], tests: Tests) -> list[str]:
    """How many tests of each training stay significant, by proxy, and the smallest p that was possible."""
    said = []
    for shelf in shelves:
        for cell in cells_of(shelf.series):
            mine = list(tests.get(cell.label, {}).values())
            for gradient in unique(test.gradient for test in mine if test.gradient != "reader"):
                found = [test for test in mine if test.gradient == gradient]
                who = f"{cell.label}: " if len(shelves) > 1 or shelf.series.members else ""
                said.append(who + tests_words(found, GRADIENTS.get(gradient, gradient)))
        said += _above_one(shelf, several=len(shelves) > 1)
    return said


def tests_words(tests: Sequence[Test], gradient: str) -> str:
    """``12 of 40 tests are significant at 5 % after correction``, by proxy, with the smallest possible p."""
    proxies = [proxy for proxy in PROXIES if any(test.proxy == proxy for test in tests)]
    by_proxy = [(p, [test for test in tests if test.proxy == p]) for p in proxies]
    counts = listed([f"{PROXIES[p]} {significant(own)} of {len(own)}" for p, own in by_proxy])
    draws = {test.draws for test in tests if test.draws}
    noun = "test" if len(tests) == 1 else "tests"
    words = (
        f"{significant(tests)} of {len(tests):,} {noun} of the {gradient} (sites × steps × proxies) are significant at "
        f"{shown(LEVEL, '.0%')} after the Benjamini-Hochberg correction".replace("5%", "5 %")
    )
    words += f": {counts}." if len(proxies) > 1 else "."
    if draws:
        least = ", ".join(f"1/({b}+1) = {shown(1 / (b + 1), '.2g')}" for b in sorted(draws))
        words += f" The smallest possible p is {least}."
    return words


def _above_one(shelf: Shelf, several: bool) -> list[str]:
    """Where the ratio of the first proxy lies above 1 at the last step, and where below."""
    for proxy in shelf.proxies:
        last = shelf.last(f"{proxy}.activation.ratio")
        sure = [(r, interval) for r in last if (interval := r.estimate.interval()) is not None]
        if last:
            above = sum(low > 1 for _, (low, _) in sure)
            below = sum(high < 1 for _, (_, high) in sure)
            who = f"{shelf.label}: " if several else ""
            rest = f", at {below} below 1: less than along random directions" if below else ""
            over = unique(str(r.estimate.over) for r, _ in sure)
            bars = f" (95 % intervals over {listed(over)})" if over else " (no error bars)"
            noun = places([r.site for r in last])
            return [
                f"{who}At step {last[0].step:,} the ratio of {PROXIES[proxy]} lies above 1 at {above} of {len(last)} "
                f"{noun}{rest}{bars}."
            ]
    return []


class Excess(NamedTuple):
    """Where the reader share of one proxy exceeds that with permuted signals: by its interval, and by corrected p.

    ``bare`` are excesses without an error bar: permutations may be drawn at a few looks only.
    """

    step: int
    sites: list[str]
    above: list[str]
    bare: int
    corrected: tuple[int, int] | None


def reader_excess(shelf: Shelf, tests: Tests, proxy: str) -> Excess | None:
    """The reader share against its null at the last step that has error bars; None where it was not measured."""
    measure = f"{proxy}.reader.excess"
    every = [record for site in shelf.sites(measure) for record in shelf.get(measure, site)]
    if not every:
        return None
    step = max((r.step for r in every if r.estimate.stderr is not None), default=max(r.step for r in every))
    last = [record for record in every if record.step == step]
    above = [r.site for r in last if (interval := r.estimate.interval()) is not None and interval[0] > 0]
    every_test = tests.get(shelf.label, {}).values()
    mine = [test for test in every_test if (test.proxy, test.gradient, test.step) == (proxy, "reader", step)]
    corrected = (significant(mine), len(mine)) if mine else None
    bare = sum(record.estimate.stderr is None for record in last)
    return Excess(step, [r.site for r in last], above, bare, corrected)


def construction_words(shelves: Sequence[Shelf], tests: Tests) -> list[str]:
    """``The reader share exceeds the permuted-signal null at n of m layers``, for each training, proxy by proxy."""
    said = []
    for shelf in shelves:
        for one in shelf.members or (shelf,):
            found = [(proxy, excess) for proxy in one.proxies if (excess := reader_excess(one, tests, proxy))]
            if found:
                who = f"{one.label}: " if len(shelves) > 1 or shelf.members else ""
                counts = listed([_excess_count(proxy, excess) for proxy, excess in found])
                said.append(
                    f"{who}The reader share exceeds the permuted-signal null (95 % interval of the excess above 0) "
                    f"{counts}, at step {found[0][1].step:,}.{verdict_on([excess for _, excess in found])}"
                )
        rich = [words for proxy in shelf.proxies if (words := _enriched(shelf, proxy))]
        if rich:
            who = f"{shelf.label}: " if len(shelves) > 1 else ""
            said.append(f"{who}The activation gradient holds more than its share of the variance {listed(rich)}.")
    return said


def verdict_on(found: Sequence[Excess]) -> str:
    """What is left to say where no excess is shown, or none can be."""
    if any(one.above for one in found):
        return ""
    if any(one.bare for one in found):
        return " Where there is no error bar yet, nothing is decided."
    return " Nothing in it is shown to be more than a construction."


def _excess_count(proxy: str, found: Excess) -> str:
    more = f"{found.corrected[0]} after correction" if found.corrected else ""
    more = f"{found.bare} have no error bar yet" if found.bare else more
    end = f" ({more})" if more else ""
    return f"at {len(found.above)} of {len(found.sites)} {places(found.sites)} for {PROXIES[proxy]}{end}"


def _enriched(shelf: Shelf, proxy: str) -> str:
    last = shelf.last(f"{proxy}.activation.enrichment")
    sure = [interval for r in last if (interval := r.estimate.interval()) is not None]
    if not sure:
        return ""
    above, below = sum(low > 1 for low, _ in sure), sum(high < 1 for _, high in sure)
    return f"at {above} of {len(last)} {places([r.site for r in last])} for {PROXIES[proxy]} (less at {below})"


class Verdict(NamedTuple):
    """What the referee said of one proxy at one site of one training."""

    model: str
    proxy: str
    record: Record

    @property
    def survives(self) -> bool:
        """Whether the tangent reading survives."""
        return self.record.estimate.value > 0.5


def verdicts(shelves: Sequence[Shelf]) -> list[Verdict]:
    """Every verdict at the last step that has one, by model, proxy and site; of each seed where there are several."""
    found = []
    for shelf in shelves:
        for one in shelf.members or (shelf,):
            for proxy in one.proxies:
                found += [Verdict(one.label, proxy, record) for record in one.last(f"{proxy}.survives")]
    return found


def referee_words(found: Sequence[Verdict]) -> list[str]:
    """One sentence over all layers, then one for each model and proxy."""
    if not found:
        return []
    good = sum(one.survives for one in found)
    noun = "place" if len(found) == 1 else "places"
    if good == len(found):
        whole = f"The tangent reading survives at all {len(found)} {noun} the referee looked at."
    elif good:
        whole = f"The tangent reading survives at {good} of the {len(found)} {noun} the referee looked at."
    else:
        whole = f"The tangent reading does not survive at any of the {len(found)} {noun} the referee looked at."
    said = [whole]
    groups: dict[str, dict[str, list[Verdict]]] = {}
    for one in found:
        groups.setdefault(one.model, {}).setdefault(one.proxy, []).append(one)
    for model, by_proxy in groups.items():
        counts = [f"{PROXIES[proxy]} {_survivors(mine)}" for proxy, mine in by_proxy.items()]
        steps = sorted({one.record.step for mine in by_proxy.values() for one in mine})
        when = ", ".join(f"{step:,}" for step in steps)
        said.append(f"{model}, step {when}: the tangent reading of {'; of '.join(counts)}.")
    return said


def _survivors(mine: Sequence[Verdict]) -> str:
    """``survives at 2 of 8 layers (resid.2, resid.3)``."""
    sites, yes = [one.record.site for one in mine], [one.record.site for one in mine if one.survives]
    no = [site for site in sites if site not in yes]
    where = f" ({', '.join(yes)})" if len(yes) <= len(no) else f" (all but {', '.join(no)})" if no else ""
    return f"survives at {len(yes)} of {len(sites)} {places(sites)}{where if yes else ''}"


def referee_table(found: Sequence[Verdict]) -> list[Table]:
    """Every verdict with its reasons."""
    if not found:
        return []
    rows = tuple(
        (
            one.record.site,
            "survives" if one.survives else "does not survive",
            one.model,
            PROXIES[one.proxy],
            tuple(map(worded, one.record.estimate.notes)) or ("no reason was recorded",),
        )
        for one in found
    )
    caption = (
        "A reading survives if every check is passed. What is only said, such as the comparison with top-variance "
        "directions, does not count against it."
    )
    head = ("Site", "Tangent reading", "Model", "Proxy", "Reasons")
    return [Table(key="referee", caption=caption, head=head, rows=rows)]


def correlation_words(estimate: Estimate | None) -> str:
    """``−0.41 (−0.52 … −0.29)``, with the interval on Fisher's scale where it was recorded."""
    if estimate is None:
        return "–"
    low, high = (estimate.parts.get(name) for name in ("low", "high"))
    ends = f"{shown(low.value, '.2f')} … {shown(high.value, '.2f')}" if low and high else interval_words(estimate)
    value = shown(estimate.value, ".2f") if low and high else digits_of(estimate.value, estimate.stderr)
    return f"{value} ({ends})" if ends else f"{value} (no error bar)"


def correlation_tables(shelves: Sequence[Shelf]) -> list[Table]:
    """Correlations of log count with distances, at the last step, a few layers of each model."""
    names = {name: title for name, title in CORRELATIONS.items() if any(name in s.measures for s in shelves)}
    rows: list[tuple[str, ...]] = []
    for shelf in shelves:
        last = {(name, r.site): r.estimate for name in names for r in shelf.last(name)}
        for site in _table_sites(shelf, list(names)):
            cells = [correlation_words(last.get((name, site))) for name in names]
            rows.append((site, shelf.label, *cells))
    if not rows:
        return []
    overs = unique(str(r.estimate.over) for s in shelves for n in names for r in s.last(n) if r.estimate.over)
    over = "seeds" if overs and all("seeds" in one for one in overs) else "token types"
    caption = (
        "Correlation over token types of log count with the mean distance to the centroid of the own type and to that "
        f"of all tokens, at the last step, with 95 % intervals over {over}. Below 0: frequent tokens lie nearer."
    )
    return [Table(key="correlations", caption=caption, head=("Site", "Model", *names.values()), rows=tuple(rows))]


def fact_tables(shelves: Sequence[Shelf]) -> list[Table]:
    """What a semi-NMF explains, how sparse it is and how much of it is PCA, at the last step."""
    rows: list[tuple[str, ...]] = []
    names = {name: title for name, title in FACTS.items() if any(name in shelf.measures for shelf in shelves)}
    for shelf in shelves:
        last = {(name, r.site): r.estimate for name in names for r in shelf.last(name)}
        for site in _table_sites(shelf, list(names)):
            cells = [fact_words(last.get((name, site))) for name in names]
            rows.append((site, shelf.label, *cells))
    if not rows:
        return []
    caption = (
        "The semi-NMF behind the proxy, at the last step. Where sparsity is near 0 % and the overlap with PCA near "
        "100 %, it says nothing that PCA does not."
    )
    return [Table(key="facts", caption=caption, head=("Site", "Model", *names.values()), rows=tuple(rows))]


def fact_words(estimate: Estimate | None) -> str:
    """A share in percent, with its error where it has one."""
    if estimate is None:
        return "–"
    if estimate.stderr is None:
        return f"{shown(100 * estimate.value, '.1f')} %"
    scaled = Estimate(
        value=100 * estimate.value, stderr=100 * estimate.stderr, n=estimate.n, method="percent", over=estimate.over
    )
    return with_error(scaled, " %")


def _table_sites(shelf: Shelf, names: Sequence[str]) -> list[str]:
    kinds = families(unique(site for name in names for site in shelf.sites(name)))
    return [site for sites in kinds.values() for site in few(sites, TABLE_LAYERS)]
