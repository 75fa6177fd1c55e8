"""p-values of energy tests, corrected after Benjamini and Hochberg over sites, steps and proxies of one training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anisoscope.runs.records import Record
from anisoscope.views.associations import adjusted
from anisoscope.views.names import noted, tangent
from anisoscope.views.numbers import shown
from anisoscope.views.seeds import LEVEL, cells_of
from anisoscope.views.series import FIRST_SLICE, Series
from anisoscope.views.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Test:
    """One test: where, its p-value, and that value adjusted over all tests of the same kind of gradient."""

    proxy: str
    gradient: str
    step: int
    site: str
    p: float
    adjusted: float
    draws: int | None


Tests = Mapping[str, Mapping[tuple[str, str, int, str], Test]]  # by training, then by proxy, gradient, step and site


def correct(series: Iterable[Series]) -> Tests:
    """Every p-value of every training, adjusted. A family is one training and one kind of gradient."""
    return {cell.label: _tests(cell) for one in series for cell in cells_of(one)}


def _tests(one: Series) -> dict[tuple[str, str, int, str], Test]:
    families: dict[str, list[tuple[str, Record]]] = {}
    for record in one.records:
        name = tangent(record.measure)
        if name and name.what == "p" and name.gradient and record.slice == FIRST_SLICE:
            families.setdefault(name.gradient, []).append((name.proxy, record))
    found = {}
    for gradient, members in families.items():
        # A p-value outside 0 to 1 comes from no test of ours; it must not end the report.
        qs = adjusted([min(1.0, max(0.0, record.estimate.value)) for _, record in members])
        for (proxy, record), q in zip(members, qs, strict=True):
            draws = noted(record.estimate, "B")
            place = (proxy, gradient, record.step, record.site)
            found[place] = Test(*place, record.estimate.value, q, None if draws is None else int(draws))
    return found


def p_lines(tests: Tests, shelf: Shelf, record: Record) -> str:
    """The p-value behind a point, with its adjusted one; of each seed where the point is a mean."""
    name = tangent(record.measure)
    said = []
    for cell in cells_of(shelf.series):
        place = (name.proxy, name.gradient, record.step, record.site) if name else ("", "", 0, "")
        test = tests.get(cell.label, {}).get(place)
        if test:
            who = f"seed {cell.seed}: " if shelf.series.members else ""
            said.append(f"{who}p = {shown(test.p, '.3g')}, adjusted {shown(test.adjusted, '.3g')}")
    return "\n".join(said)


def significant(tests: Iterable[Test]) -> int:
    """How many tests stay significant after the correction."""
    return sum(test.adjusted <= LEVEL for test in tests)
