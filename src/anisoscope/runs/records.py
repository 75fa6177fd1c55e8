"""Record: an Estimate with the place and time it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anisoscope.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured number: of which run, at which step, at which site, over which slice of the tokens."""

    run: str
    step: int
    site: str
    measure: str
    slice: str
    estimate: Estimate

    def row(self) -> dict[str, Any]:
        """As one flat row of plain values."""
        e = self.estimate
        return {
            "run": self.run,
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
