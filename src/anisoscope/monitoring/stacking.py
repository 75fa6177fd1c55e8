"""Measures of all sites of a look begun together, where their rows have one shape; see ``measures.stacked``.

Sites that are not ordinary are missing from what comes out, and are then measured one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.kernels import sent, sent_on
from anisoscope.measures.base import with_notes
from anisoscope.measures.later import fetched_later, no_room
from anisoscope.measures.stacked import STACKED, Finish, begin
from anisoscope.monitoring.views import SiteView

T = TypeVar("T")

GRADIENT = "gradient_"

Found: TypeAlias = dict[str, Mapping[str, Estimate]]
Norm: TypeAlias = Callable[[Tensor, Tensor, int], Estimate]


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


@dataclass(frozen=True)
class Stacked:
    """Measures under way. Without anything begun, nothing comes out."""

    states: Callable[[], Found] = field(default=dict)
    gradients: Callable[[], Found] = field(default=dict)

    @classmethod
    def begin(
        cls, views: Sequence[SiteView], measures: Sequence[str], gradient_measures: Sequence[str], norm: Norm
    ) -> Stacked:
        """Begin what these views have in common; ``norm`` makes the norm of squared lengths of rows."""
        return with_room(lambda: cls._begin(views, measures, gradient_measures, norm), cls())

    @classmethod
    def _begin(
        cls, views: Sequence[SiteView], measures: Sequence[str], gradient_measures: Sequence[str], norm: Norm
    ) -> Stacked:
        first = views[0].x
        alike = all((v.x.shape, v.x.dtype, v.x.device) == (first.shape, first.dtype, first.device) for v in views)
        if not alike:
            return cls()
        names = [name for name in measures if name in STACKED]
        gradients = _begin_gradients(views, gradient_measures, norm)
        states = begin([view.x for view in views], names) if names else (lambda: [])
        return cls(lambda: _by_site(views, states), gradients())

    def finish(self) -> tuple[Found, Found]:
        """Results by site: of states by measure, of gradients by the names of their records."""
        return with_room(self.states, {}), with_room(self.gradients, {})


def _by_site(views: Sequence[SiteView], finish: Finish) -> Found:
    return {
        view.site: {name: _with_reason(one) for name, one in found.items()}
        for view, found in zip(views, finish(), strict=False)
        if found is not None
    }


def _with_reason(found: Estimate) -> Estimate:
    """As ``base.compute``: where there is no error bar some note says why."""
    if found.stderr is None and not any("no error bar" in note for note in found.notes):
        return with_notes(found, ("no error bar: too few independent blocks of rows to tell their spread",))
    return found


def _begin_gradients(
    views: Sequence[SiteView], measures: Sequence[str], norm: Norm
) -> Callable[[], Callable[[], Found]]:
    """Ask for the lengths of the rows, which say what is to be measured of them; then begin that; then give it."""
    whole = [view for view in views if view.g is not None and view.g.dtype == torch.float32 and len(view.g)]
    if not whole or not set(measures) <= set(STACKED):
        return lambda: dict
    if len({(view.g.shape, view.g.device) for view in whole if view.g is not None}) > 1:
        return lambda: dict
    rows = torch.stack([view.g for view in whole if view.g is not None])
    lengths = fetched_later({"": torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64).square_()})
    return lambda: _begin_moving(whole, rows, torch.from_numpy(lengths()[""]), measures, norm)


def _begin_moving(
    whole: Sequence[SiteView], rows: Tensor, squares: Tensor, measures: Sequence[str], norm: Norm
) -> Callable[[], Found]:
    """Begin to measure the rows that are not zero, by their squared lengths."""
    moving = squares > 0
    good = (torch.isfinite(squares).all(dim=1) & moving.any(dim=1) & (moving == moving[0]).all(dim=1)).tolist()
    if not any(good):
        return dict
    left = int((~moving[0]).sum())
    # By a power of two, which none of these measures sees.
    largest = squares.amax(dim=1).sqrt().tolist()
    factors = [math.ldexp(1.0, -math.frexp(one)[1]) for one, fine in zip(largest, good, strict=True) if fine]
    scaled = rows if all(good) else rows[torch.tensor(good).nonzero().reshape(-1).to(rows.device)]
    if left:
        scaled = scaled.index_select(1, sent_on(moving[0].nonzero().reshape(-1), rows))
    scaled = scaled * sent(factors, rows)[:, None, None]
    finish = begin(scaled, list(measures))

    def finished() -> Found:
        found: Found = {}
        number = whole[0].sequences.cpu().unique(return_inverse=True)[1]
        each = iter(finish())
        for site, view in enumerate(whole):
            result = next(each) if good[site] else None
            first = whole[0].sequences
            if result is None or not (view.sequences is first or torch.equal(view.sequences, first)):
                continue
            own = {f"{GRADIENT}norm": norm(squares[site], number, view.tokens)}
            notes = still_note(left, len(squares[site]))
            for name, one in result.items():
                one = _with_reason(one)
                own[GRADIENT + name] = replace(one, notes=(*one.notes, *notes)) if notes else one
            found[view.site] = own
        return found

    return finished
