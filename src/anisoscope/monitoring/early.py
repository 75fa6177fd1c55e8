"""Measures of states that are begun while the gradients of a look are on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from anisoscope.measures.later import one_thread_each
from anisoscope.monitoring.sharing import Sharing, wanted_cells
from anisoscope.monitoring.stacking import States
from anisoscope.monitoring.views import Analysis, SiteView
from anisoscope.stats.gram_matrices import PARTED_WIDTH
from anisoscope.stats.precision import full_precision, left_alone

EARLY_CELLS = 1 << 26
"""Entries of all rows up to which they are measured beside a backward pass: their stack takes a quarter of a gigabyte
then, and what is made of it on the way several times as much."""


@dataclass
class Early:
    """Of one look, which goes on inside it: what is to be begun, and what was."""

    measures: Sequence[str]
    analyses: Mapping[str, Analysis]
    states: States | None = None
    _until_the_end: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()
        self._until_the_end.close()

    def begin(self, views: Sequence[SiteView]) -> None:
        """Begin it. Wide rows are left for later, since a GPU that is busy gains nothing; so are many, for which the
        backward pass may leave no room; and rows for an analysis that cannot yet say which sums of them it wants."""
        x = views[0].x
        if x.shape[1] >= PARTED_WIDTH or len(views) * x.numel() > EARLY_CELLS:
            return
        cells = wanted_cells(self.analyses.values(), views)
        if cells is None and any(isinstance(one, Sharing) for one in self.analyses.values()):
            return
        # Threads that decompose take their number of cores when they begin, which may be after this.
        self._until_the_end.enter_context(one_thread_each(x.device))
        with full_precision(x.device), left_alone():
            self.states = States.begin(views, self.measures, cells)

    def drop(self) -> None:
        """Hold nothing that was begun."""
        self.states = None

    def taken(self) -> States | None:
        """What was begun, handed over."""
        states, self.states = self.states, None
        return states
