"""What the measures of a look make of all sites and analyses may use, so that nothing is made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.cells import Cells, SiteSums
from anisoscope.measures.later import Handover
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.runs.records import Curve

OfAll: TypeAlias = Mapping[str, Mapping[Name, Estimate | Curve | Exception] | Exception]
"""Results of all sites by site, an exception where one gave none."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of all sites in one tensor, each site times a power of two that brings its longest row near 1 where it
    was far from that; and how long the longest row of each was before. Both wait for these lengths, by ``brought``, and
    are to be asked for on the stream that the look runs on.

    ``second`` is where second moments of all sites' rows, about zero, are put by whoever forms them: measures of
    gradients wait for them there. None where they do not.
    """

    brought: Callable[[], tuple[Float[Tensor, "s n d"], Sequence[float]]]
    second: Handover | None = None

    @property
    def rows(self) -> Float[Tensor, "s n d"]:
        """The gradients."""
        return self.brought()[0]

    @property
    def longest(self) -> Sequence[float]:
        """Of each site."""
        return self.brought()[1]


@dataclass(frozen=True)
class Shared:
    """Rows of all sites in one tensor, what was summed over them, and gradients. Nobody may write to any of it."""

    sites: tuple[str, ...]
    x: Float[Tensor, "s n d"]
    sums: SiteSums | None = None
    gradients: Gradients | None = None


@runtime_checkable
class Sharing(Protocol):
    """An analysis that takes all sites of a look together and uses what is shared.

    It may ask for sums over cells of the rows, such as halves: those of the first analysis that does are formed. One
    that asks is expected to form second moments of gradients, and to hand them over; see ``Gradients``.
    """

    def shared_cells(self, views: Sequence[SiteView]) -> Cells | None:
        """The cells it would like sums of. Asked with the views, and before that with the same ones while gradients are
        on their way: ``g`` is None then."""
        ...

    def begin_together(self, views: Sequence[SiteView], shared: Shared | None = None) -> Callable[[], OfAll]:
        """Begin; the function returned gives the results by site. ``shared`` is None where nothing is."""
        ...


def wanted_cells(analyses: Iterable[object], views: Sequence[SiteView]) -> Cells | None:
    """The cells that the first of some analyses asks for which does."""
    for one in analyses:
        if isinstance(one, Sharing):
            try:
                found = one.shared_cells(views)
            except Exception:  # of a user's own; what is wrong it will say when it is begun
                found = None
            if found is not None:
                return found
    return None
