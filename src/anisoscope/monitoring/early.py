"""Measures of states that are begun while the gradients of a look are on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anisoscope.measures.later import one_thread_each
from anisoscope.monitoring.sharing import wanted_cells
from anisoscope.monitoring.stacking import States
from anisoscope.monitoring.views import Analysis, SiteView
from anisoscope.stats.moments import PARTED_WIDTH
from anisoscope.stats.precision import full_precision

EARLY_CELLS = 1 << 27
"""Entries of all rows up to which they are measured beside a backward pass: their stack takes half a gigabyte then."""


@dataclass
class Early:
    """Of one look: what is to be begun, and what was."""

    measures: Sequence[str]
    analyses: Mapping[str, Analysis]
    states: States | None = None

    def begin(self, views: Sequence[SiteView]) -> None:
        """Begin it. Wide rows are left for later: for some of their products tensor cores are switched to another
        precision, which the backward pass would see, and a GPU that is busy gains nothing. So are many, for which
        that pass may leave no room."""
        x = views[0].x
        if x.shape[1] < PARTED_WIDTH and len(views) * x.numel() <= EARLY_CELLS:
            with full_precision(x.device), one_thread_each(x.device):
                self.states = States.begin(views, self.measures, wanted_cells(self.analyses.values(), views))

    def taken(self) -> States | None:
        """What was begun, handed over."""
        states, self.states = self.states, None
        return states
