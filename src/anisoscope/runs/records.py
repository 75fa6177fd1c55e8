"""What a run store holds: Record, Failure, Curve and Probe, and the order of sites."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from anisoscope.errors import NonFiniteError, ShapeError
from anisoscope.estimate import Estimate

FIRST_SITES = ("embed",)
LAST_SITES = ("final_norm",)
KEPT_SITES = 4096  # names whose place in the order is kept


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Record:
    """One measured number: of which run, at which step, at which site, over which slice of the tokens.

    ``cell`` names the part of a sweep it belongs to, such as a model; a run without parts leaves it empty.
    """

    run: str
    step: int
    site: str
    measure: str
    slice: str
    estimate: Estimate
    cell: str

    def __init__(
        self, *, run: str, step: int, site: str, measure: str, slice: str, estimate: Estimate, cell: str = ""
    ) -> None:
        # As a dataclass would write it, in half the time; see ``Estimate``.
        _RUN(self, run)
        _STEP(self, step)
        _SITE(self, site)
        _MEASURE(self, measure)
        _SLICE(self, slice)
        _ESTIMATE(self, estimate)
        _CELL(self, cell)

    def row(self) -> dict[str, Any]:
        """As one flat row of plain values."""
        e = self.estimate
        return {
            "run": self.run,
            "cell": self.cell,
            "step": self.step,
            "site": self.site,
            "measure": self.measure,
            "slice": self.slice,
            "value": e.value,
            "stderr": e.stderr,
            "dof": e.dof,
            "over": e.over,
            "n": e.n,
            "method": e.method,
            "notes": "; ".join(e.notes),
        }


_RUN, _STEP, _SITE, _MEASURE, _SLICE, _ESTIMATE, _CELL = (
    getattr(Record, name).__set__ for name in ("run", "step", "site", "measure", "slice", "estimate", "cell")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A measurement that was due and failed; ``error`` says why. It stands where its Record would have stood."""

    run: str
    step: int
    site: str
    measure: str
    slice: str
    error: str
    cell: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A small series measured at once, such as a spectrum or a dimension against scale.

    ``stderr`` holds one standard error for each point, or None where none was computed.
    """

    run: str
    step: int
    site: str
    name: str
    slice: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...] | None = None
    x_label: str = ""
    y_label: str = ""
    notes: tuple[str, ...] = ()
    cell: str = ""

    def __post_init__(self) -> None:
        lengths = {"x": len(self.x), "y": len(self.y)}
        if self.stderr is not None:
            lengths["stderr"] = len(self.stderr)
        if len(set(lengths.values())) > 1:
            came = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise ShapeError(f"the curve {self.name!r} needs as many x as y: {came}")
        for axis in lengths:
            bad = [i for i, number in enumerate(getattr(self, axis)) if not math.isfinite(number)]
            if bad:
                raise NonFiniteError(
                    f"the curve {self.name!r} is not finite at {axis}[{bad[0]}]; leave such points out"
                )
        if self.stderr is not None and min(self.stderr, default=0) < 0:
            raise NonFiniteError(f"the curve {self.name!r} has a negative stderr; one standard error is >= 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One look at the model, committed as a whole. ``began`` is UTC in ISO form, ``seconds`` how long it took."""

    run: str
    step: int
    cell: str
    began: str
    seconds: float
    records: int
    failures: int
    curves: int
    info: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def layer_of(site: str) -> int | None:
    """The layer number at the end of a site's name (``resid.10`` has 10), or None where it has none (``embed``)."""
    match = re.search(r"\.([0-9]{1,9})\Z", site)
    return int(match.group(1)) if match else None


@lru_cache(maxsize=KEPT_SITES)
def site_order(site: str) -> tuple[Any, ...]:
    """Sort key of sites: the embedding first, the final norm last, ``resid.2`` before ``resid.10`` between them."""
    place = 0 if site in FIRST_SITES else 2 if site in LAST_SITES else 1
    # Words and numbers alternate in the split, so two keys never compare a word with a number. A number is compared
    # by its length and then its digits: int() refuses very long ones.
    pieces = re.split(r"([0-9]+)", site)
    numbers = [piece.lstrip("0") for piece in pieces[1::2]]
    natural = [*pieces[:1], *(part for n, word in zip(numbers, pieces[2::2]) for part in ((len(n), n), word))]
    return (place, tuple(natural), site)
