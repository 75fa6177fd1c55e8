"""Measures of all sites of a look begun together, where their rows have one shape; see ``measures.stacked``.

Sites that are not ordinary are missing from what comes out, and are then measured one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.kernels import sent, sent_on
from anisoscope.measures.base import with_notes
from anisoscope.measures.cells import Cells, SiteSums
from anisoscope.measures.later import Going, Handover, fetched_later, no_room
from anisoscope.measures.row_kernels import squared_lengths, taken
from anisoscope.measures.stacked import STACKED, begin, begin_summed
from anisoscope.measures.stacked import Found as OfSites
from anisoscope.monitoring.sharing import Gradients, Shared
from anisoscope.monitoring.views import SiteView

T = TypeVar("T")

GRADIENT = "gradient_"
NEAR = (0.5, 2.0**13)
"""Lengths of the longest row of a gradient that are left as they are. From the lower one on the other rows may be as
short beside it as if it had been brought to 1, and below the upper one no square is too large for measures."""
MOST_EXPONENT = 126  # of a power of two that float32 rows are multiplied with

Found: TypeAlias = dict[str, Mapping[str, Estimate]]
Norm: TypeAlias = Callable[[np.ndarray, int, int], Estimate]
"""Makes the norm of a gradient from its rows' squared lengths summed by sequence, their number and that of tokens."""


def with_room(act: Callable[[], T], otherwise: T) -> T:
    """What ``act`` gives, or ``otherwise`` where the device has no room for all sites at once: beside a large training
    there may be room for one."""
    try:
        return act()
    except Exception as error:
        if not no_room(error):
            raise
    torch.cuda.empty_cache()  # not above, where frames of the exception still hold what had been made
    return otherwise


def gradient_names(measures: Sequence[str]) -> tuple[str, ...]:
    """What is told of a gradient: its norm, and these measures of it."""
    return (f"{GRADIENT}norm", *(f"{GRADIENT}{name}" for name in measures))


def still_note(still: int, n: int) -> tuple[str, ...]:
    """Said where rows of zeros were left out."""
    return (f"{still:,} of {n:,} rows of the gradient are zero and were left out",) if still else ()


def _nothing() -> Going[Found]:
    return Going(lambda: dict)


@dataclass(frozen=True)
class States:
    """The rows of all sites in one tensor, the cells of them that somebody wants sums of, their measures under way, and
    what was summed for these."""

    x: Float[Tensor, "s n d"]
    cells: Cells | None
    going: Going[OfSites]
    sums: SiteSums | None

    @classmethod
    def begin(cls, views: Sequence[SiteView], measures: Sequence[str], cells: Cells | None) -> States | None:
        """Begin them, where these views are alike and the device has room."""
        if not _alike(views) or not (names := _stacked_names(views, measures)):
            return None
        return with_room(lambda: cls.of(views, names, cells), None)

    @classmethod
    def of(cls, views: Sequence[SiteView], names: Sequence[str], cells: Cells | None) -> States:
        """Of views that are alike."""
        x = torch.stack([view.x for view in views])
        return cls(x, cells, *begin_summed(x, names, cells))


def _alike(views: Sequence[SiteView]) -> bool:
    first = views[0].x
    return all((v.x.shape, v.x.dtype, v.x.device) == (first.shape, first.dtype, first.device) for v in views)


def _stacked_names(views: Sequence[SiteView], measures: Sequence[str]) -> list[str]:
    """Which of the measures are taken together."""
    return [name for name in measures if name in STACKED] if views[0].x.dtype == torch.float32 else []


@dataclass
class Stacked:
    """Measures under way. Without anything begun, nothing comes out.

    ``shared`` is what was made for them; it is to be taken out by whom it is for, so that it is not held for longer.
    """

    states: Going[Found] = field(default_factory=_nothing)
    gradients: Going[Found] = field(default_factory=_nothing)
    shared: Shared | None = None

    @classmethod
    def begin(
        cls,
        views: Sequence[SiteView],
        measures: Sequence[str],
        gradient_measures: Sequence[str],
        norm: Norm,
        cells: Cells | None = None,
        states: States | None = None,
    ) -> Stacked:
        """Begin what these views have in common; ``norm`` makes the norm of a gradient. Sums over ``cells`` of the rows
        of states are shared, where they are formed. ``states`` are what was begun of the same rows before gradients
        were there."""
        # Without room for gradients of all sites, their states are still measured.
        rest = cls() if states is None else cls(_followed(states.going, lambda found: _by_site(views, found)))
        return with_room(lambda: cls._begin(views, measures, gradient_measures, norm, cells, states), rest)

    @classmethod
    def _begin(
        cls,
        views: Sequence[SiteView],
        measures: Sequence[str],
        gradient_measures: Sequence[str],
        norm: Norm,
        cells: Cells | None,
        states: States | None,
    ) -> Stacked:
        if not _alike(views):
            return cls()
        names = _stacked_names(views, measures)
        # Whoever asks for cells of the rows forms second moments of gradients on the way; one measure is made of them.
        second = Handover() if names and cells is not None and "isoscore" in gradient_measures else None
        gradients, rows = _begin_gradients(views, gradient_measures, norm, second)
        if not names:
            return cls(gradients=gradients)
        states = states or States.of(views, names, cells)
        shared = Shared(tuple(view.site for view in views), states.x, states.sums, rows)
        return cls(_followed(states.going, lambda found: _by_site(views, found)), gradients, shared)

    def taken(self) -> Shared | None:
        """What is shared, handed over."""
        shared, self.shared = self.shared, None
        return shared

    def go_on(self) -> None:
        """Begin what is left to be done, which may use what others have been handed meanwhile."""
        self.states, self.gradients = (
            with_room(partial(_gone_on, one), _nothing()) for one in (self.states, self.gradients)
        )

    def finish(self) -> tuple[Found, Found]:
        """Results by site: of states by measure, of gradients by the names of their records."""
        return with_room(self.states, {}), with_room(self.gradients, {})


def _gone_on(one: Going[Found]) -> Going[Found]:
    one.go_on()
    return one


def _followed(of_sites: Going[OfSites], told: Callable[[OfSites], Found]) -> Going[Found]:
    """What is told of the results of other work, in the same steps as that."""

    def rest() -> Callable[[], Found]:
        of_sites.go_on()
        return lambda: told(of_sites())

    return Going(rest)


def _by_site(views: Sequence[SiteView], each: OfSites) -> Found:
    return {
        view.site: {name: _with_reason(one) for name, one in found.items()}
        for view, found in zip(views, each, strict=False)
        if found is not None
    }


def _with_reason(found: Estimate) -> Estimate:
    """As ``base.compute``: where there is no error bar some note says why."""
    if found.stderr is None and not any("no error bar" in note for note in found.notes):
        return with_notes(found, ("no error bar: too few independent blocks of rows to tell their spread",))
    return found


def _begin_gradients(
    views: Sequence[SiteView], measures: Sequence[str], norm: Norm, second: Handover | None
) -> tuple[Going[Found], Gradients | None]:
    """Ask for the lengths of the rows, which say what is to be measured of them. Beside the measures the gradients
    themselves, where all views have one. Their ``second`` moments are others' to form, if given."""
    whole = [view for view in views if view.g is not None and view.g.dtype == torch.float32 and len(view.g)]
    if not whole or not set(measures) <= set(STACKED):
        return _nothing(), None
    if len({(view.g.shape, view.g.device) for view in whole if view.g is not None}) > 1:
        return _nothing(), None
    rows = torch.stack([view.g for view in whole if view.g is not None])
    lengths = fetched_later({"": squared_lengths(rows)})

    @functools.cache
    def brought() -> tuple[Float[Tensor, "s n d"], list[float]]:
        longest = np.sqrt(lengths()[""].max(axis=1)).tolist()
        _bring_near(rows, longest)
        return rows, longest

    given = Gradients(brought, second) if len(whole) == len(views) else None

    def rest() -> Callable[[], Found]:
        near, squares = brought()[0], lengths()[""]
        going = _begin_moving(whole, near, squares, measures, norm, None if given is None else second)
        going.go_on()
        return going

    return Going(rest), given


def _bring_near(rows: Float[Tensor, "s n d"], longest: Sequence[float]) -> None:
    """Multiply rows of each site, in place, by the power of two that brings the longest of them near 1.

    No measure and no share of energy sees it; digits change only of entries that are nothing beside the longest row, by
    35 decades or so. It keeps squares in range. Where all lengths are ordinary nothing is done.
    """
    near = [NEAR[0] <= one < NEAR[1] or not 0 < one < math.inf for one in longest]
    exponents = [
        0 if fine else min(-math.frexp(one)[1], MOST_EXPONENT) for one, fine in zip(longest, near, strict=True)
    ]
    if any(exponents):
        rows *= sent([math.ldexp(1.0, one) for one in exponents], rows)[:, None, None]


def _begin_moving(
    whole: Sequence[SiteView],
    rows: Float[Tensor, "s n d"],
    squares: Float[np.ndarray, "s n"],
    measures: Sequence[str],
    norm: Norm,
    second: Handover | None,
) -> Going[Found]:
    """Begin to measure the rows that are not zero, by their squared lengths."""
    moving = squares > 0
    # Sums tell of infinities and NaN; those of squares near the end of the range may be one, and are left out as well.
    good = np.isfinite(squares.sum(axis=1)) & moving.any(axis=1) & (moving == moving[0]).all(axis=1)
    if not good.any():
        return _nothing()
    left = len(moving[0]) - int(np.count_nonzero(moving[0]))
    chosen = rows if good.all() else rows[torch.from_numpy(np.flatnonzero(good)).to(rows.device)]
    if left:
        chosen = taken(chosen, sent_on(torch.from_numpy(np.flatnonzero(moving[0])), rows))
    begun = begin(chosen, list(measures), second if good.all() else None)

    def told(results: OfSites) -> Found:
        found: Found = {}
        first, n = whole[0].sequences, squares.shape[1]
        sums, each, notes = summed_by_sequence(squares, first), iter(results), still_note(left, n)
        for site, view in enumerate(whole):
            result = next(each) if good[site] else None
            if result is None or not (view.sequences is first or torch.equal(view.sequences, first)):
                continue
            own = {f"{GRADIENT}norm": norm(sums[site], n, view.tokens)}
            for name, one in result.items():
                one = _with_reason(one)
                own[GRADIENT + name] = replace(one, notes=(*one.notes, *notes)) if notes else one
            found[view.site] = own
        return found

    return _followed(begun, told)


def summed_by_sequence(squares: Float[np.ndarray, "s n"], sequences: Int64[Tensor, "n"]) -> Float[np.ndarray, "s u"]:
    """Numbers of rows added up over each sequence, in ascending order of what sequences are called."""
    here = sequences.cpu().numpy()
    steps = np.diff(here)
    if bool((steps >= 0).all()):  # as a rule: sorting takes longer than all the rest that is told of gradients
        return np.add.reduceat(squares, np.flatnonzero(np.append(True, steps > 0)), axis=1)
    number = np.unique(here, return_inverse=True)[1]
    return np.stack([np.bincount(number, weights=one) for one in squares])
