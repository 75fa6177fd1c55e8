"""From a look to findings: measures of the activations, numbers of the gradients, and the analyses plugged in.

Nothing here stops at an error: what fails is a ``Failure`` in the place of its record, and the rest goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from anisoscope.errors import NonFiniteError, OptionError, SiteError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Workspace, compute, lookup
from anisoscope.measures.later import one_thread_each
from anisoscope.measures.table import measure
from anisoscope.monitoring.early import Early
from anisoscope.monitoring.sharing import OfAll, Shared, Sharing, wanted_cells
from anisoscope.monitoring.stacking import GRADIENT, Stacked, gradient_names, still_note, summed_by_sequence
from anisoscope.monitoring.views import Analysis, Look, MapView, Name, OfModel, SiteView
from anisoscope.rows import all_finite, non_finite_rows
from anisoscope.runs.records import Curve, Failure, Record
from anisoscope.slices import ALL, NO_POSITION_0, chosen_rows, gathered, kept_columns, massive_dimensions
from anisoscope.stats.precision import full_precision

MODEL = "model"
"""Stands for the site of what belongs to the whole model, such as its loss."""

SEQUENCES_FOR_BAR = 8


@dataclass(frozen=True)
class What:
    """What is measured at every look."""

    measures: tuple[str, ...]
    gradient_measures: tuple[str, ...]
    analyses: Mapping[str, Analysis]
    seed: int
    slices: tuple[str, ...] = (ALL,)

    @cached_property
    def along_turns(self) -> tuple[str, ...]:
        """Measures of the paths of tokens."""
        return tuple(name for name in self.measures if lookup(name).needs().turns)

    @cached_property
    def of_gradients(self) -> tuple[str, ...]:
        """Names of what is told of gradients."""
        return gradient_names(self.gradient_measures)

    @cached_property
    def global_measures(self) -> tuple[str, ...]:
        """Those that slices are measured with: neighbours and token paths are told of all tokens alone."""
        needs = {name: lookup(name).needs() for name in self.measures}
        return tuple(name for name, need in needs.items() if not (need.points or need.neighbors or need.turns))


@dataclass
class Book:
    """Where results are entered. With ``strict`` the first failure is raised in place of being entered."""

    run: str
    step: int
    cell: str
    strict: bool = False
    records: list[Record] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    _taken: set[tuple[str, ...]] = field(default_factory=set)

    def enter(self, site: str, name: Name, result: Estimate | Curve) -> None:
        """Enter a result under its name, or (name, slice)."""
        measure, where = (name, ALL) if isinstance(name, str) else name
        # The store refuses a second result in one place, and with it the whole probe: better to refuse it here.
        if not self._claim(("curve" if isinstance(result, Curve) else "result", site, measure, where)):
            raise OptionError(f"{measure!r} over {where!r} was given twice at site {site!r}; names must differ")
        if isinstance(result, Estimate):
            run, step, cell = self.run, self.step, self.cell
            one = Record(run=run, step=step, site=site, measure=measure, slice=where, estimate=result, cell=cell)
            self.records.append(one)
        elif isinstance(result, Curve):
            place = {"run": self.run, "step": self.step, "cell": self.cell, "site": site, "slice": where}
            self.curves.append(replace(result, name=measure, **place))  # type: ignore[arg-type]
        else:
            raise OptionError(f"{measure!r} gave {type(result).__name__}; give an Estimate or a Curve")

    def enter_all(self, site: str, found: Mapping[Name, Estimate | Curve | Exception]) -> None:
        """Enter all of these, and of what is an exception that it failed: a look has hundreds to be entered."""
        run, step, cell, taken, records = self.run, self.step, self.cell, self._taken, self.records
        for name, result in found.items():
            measure, where = (name, ALL) if isinstance(name, str) else name
            place = ("result", site, measure, where)
            if type(result) is Estimate and place not in taken:
                taken.add(place)
                one = Record(run=run, step=step, site=site, measure=measure, slice=where, estimate=result, cell=cell)
                records.append(one)
            elif isinstance(result, Exception):
                self.fail(site, name if isinstance(name, str) else " · ".join(name), result)
            else:
                self.enter(site, name, result)

    def fail(self, site: str, measure: str, error: Exception | str, where: str = ALL) -> None:
        """Enter that something was due and failed."""
        if self.strict:
            raise error if isinstance(error, Exception) else SiteError(error)
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        while not self._claim(("result", site, measure, where)):
            measure = f"{measure} (failed)"
        place = {"run": self.run, "step": self.step, "cell": self.cell}
        self.failures.append(Failure(**place, site=site, measure=measure, slice=where, error=words))  # type: ignore[arg-type]

    def _claim(self, place: tuple[str, ...]) -> bool:
        if place in self._taken:
            return False
        self._taken.add(place)
        return True

    def attempt(self, site: str, measure: str, make: Callable[[], Estimate]) -> None:
        """Enter what ``make`` gives, or why it cannot."""
        try:
            self.enter(site, measure, make())
        except Exception as error:  # a measure of the user's own may raise anything
            self.fail(site, measure, error)


def enter_look(book: Book, look: Look, what: What, early: Early | None = None) -> None:
    """Enter everything that is to be told of a look, of which some may have begun ``early``."""
    if look.loss is not None:
        book.attempt(MODEL, "loss", lambda: _loss(look))
    for site, why in look.silent.items():
        for name in (*what.measures, *what.of_gradients):
            book.fail(site, name, why)
    if look.views:
        # The model may run in bfloat16 or TF32; what is measured of it must not.
        device = look.views[0].x.device
        with full_precision(device), one_thread_each(device):
            _enter_views(book, look.views, what, early or Early(what.measures, what.analyses))


def enter_model(book: Book, of_model: OfModel, device: torch.device) -> None:
    """Enter what is told of the model as a whole, outside the autocast that the model ran under in the look."""
    with full_precision(device):
        for name, result in of_model(book.step).items():
            if isinstance(result, Exception):
                measure, where = (name, ALL) if isinstance(name, str) else name
                book.fail(MODEL, measure, result, where)
            else:
                book.enter(MODEL, name, result)


def _enter_views(book: Book, views: Sequence[SiteView], what: What, early: Early) -> None:
    stacked, states = Stacked(), early.taken()
    if states is not None or views[0].x.device.type == "cuda":
        cells = wanted_cells(what.analyses.values(), views) if states is None else states.cells
        stacked = Stacked.begin(views, what.measures, what.gradient_measures, norm_of_squares, cells, states)
    del states
    slices = [begin_slice(views, where, what.global_measures) for where in what.slices if where != ALL]
    shared = stacked.taken()
    analyses = {name: begun for name, one in what.analyses.items() if (begun := _begin(one, views, shared)) is not None}
    del shared
    stacked.go_on()
    together = {name: analyses.pop(name)() for name in list(analyses)}  # while a GPU goes on with the measures
    of_states, gradients = stacked.finish()
    sliced = [finish() for finish in slices]
    del stacked, slices  # they hold the rows of all sites, and what is left to measure may need the room
    for view in views:
        _enter_states(book, view, what, of_states.get(view.site, {}))
        for one in sliced:
            _enter_slice(book, view.site, one, what)
        _enter_gradients(book, view, what, gradients.get(view.site))
        _enter_maps(book, view)
        for name, analysis in what.analyses.items():
            _enter_analysis(book, view, name, analysis, together.get(name))


@dataclass(frozen=True)
class Slice:
    """One slice of all sites that have it: rows and notes by site, and what is known of them already."""

    where: str
    rows: Mapping[str, Tensor]
    notes: Mapping[str, tuple[str, ...]]
    known: Mapping[str, Mapping[str, Estimate]]


def begin_slice(views: Sequence[SiteView], where: str, names: Sequence[str]) -> Callable[[], Slice]:
    """Cut a slice out of every site; on a GPU the measures of all sites are begun together."""
    cut = {view.site: found for view in views if (found := _cut(view, where)) is not None}
    parts = [part for part, _ in cut.values()]
    gpu = bool(parts) and parts[0].x.device.type == "cuda"
    begun = Stacked.begin(parts, names, (), norm_of_squares) if gpu else Stacked()

    def finish() -> Slice:
        rows = {site: part.x for site, (part, _) in cut.items()}
        return Slice(where, rows, {site: notes for site, (_, notes) in cut.items()}, begun.finish()[0])

    return finish


def _cut(view: SiteView, where: str) -> tuple[SiteView, tuple[str, ...]] | None:
    """A slice of one site and what to say of it; None where it is all there is."""
    if where == NO_POSITION_0:
        keep = (view.positions != 0).cpu()
        if bool(keep.all()):
            return None
        labels = {name: getattr(view, name)[keep] for name in ("ids", "positions", "sequences")}
        return replace(view, x=chosen_rows(view.x, keep.to(view.x.device)), g=None, **labels), ()
    if not all_finite(view.x):
        return replace(view, g=None), ()  # fails as all tokens do: an infinity is no massive dimension
    massive = massive_dimensions(view.x)
    if not len(massive):
        return None
    width = view.x.shape[1]
    note = f"without {len(massive)} of {width} dimensions: {massive.tolist()[:8]}"
    return replace(view, x=gathered(view.x, kept_columns(width, massive), 1), g=None), (note,)


def _enter_slice(book: Book, site: str, one: Slice, what: What) -> None:
    if site not in one.rows:
        return
    known = one.known.get(site, {})
    names = [name for name in what.global_measures if name not in known]
    for name, result in (dict(known) | _together(one.rows[site], names, what.seed)).items():
        if isinstance(result, Estimate):
            more = one.notes[site]
            told = replace(result, notes=(*result.notes, *more)) if more else result
            book.enter(site, (name, one.where), told)
        else:
            book.fail(site, name, result, one.where)


def _begin(analysis: Analysis, views: Sequence[SiteView], shared: Shared | None) -> Callable[[], OfAll] | None:
    """Begin an analysis that takes all sites of a look together, by its method ``begin_together`` or ``together``."""
    at_once: Any = getattr(analysis, "together", None)
    begin: Any = getattr(analysis, "begin_together", None)
    whose: object = analysis
    if isinstance(whose, Sharing):
        begin = partial(whose.begin_together, shared=shared)
    if at_once is None and begin is None:
        return None

    def attempt(act: Callable[[], OfAll]) -> OfAll:
        try:
            return dict(act())
        except Exception as error:  # no site has anything then
            return _at_each(views, error)

    try:
        return partial(attempt, partial(at_once, views) if begin is None else begin(views))
    except Exception as error:
        return partial(_at_each, views, error.with_traceback(None))  # whose frames would keep what is shared


def _at_each(views: Sequence[SiteView], error: Exception) -> OfAll:
    """An error told at every site, without the frames that would keep the rows of all of them."""
    return {view.site: error.with_traceback(None) for view in views}


def _loss(look: Look) -> Estimate:
    if look.loss is None or not math.isfinite(look.loss):
        raise NonFiniteError(f"the loss on the probe is {look.loss}")
    notes = ("no error bar: the loss of one fixed batch",)
    return Estimate(value=look.loss, stderr=None, n=look.tokens, method="mean loss on the probe", notes=notes)


def _enter_states(book: Book, view: SiteView, what: What, known: Mapping[str, Estimate]) -> None:
    for name in what.along_turns:
        book.attempt(view.site, name, lambda name=name: _of_turns(name, view))  # type: ignore[misc]
    rest = [name for name in what.measures if name not in what.along_turns]
    found = dict(known) | _together(view.x, [name for name in rest if name not in known], what.seed)
    book.enter_all(view.site, {name: found[name] for name in rest})


def _of_turns(name: str, view: SiteView) -> Estimate:
    if view.turns is None:
        raise SiteError(f"{name} needs whole sequences, and this look holds sampled rows; use mode='probe'")
    work = Workspace.of_states(view.x[:0], count=int(view.turns.counts.sum()), turns=view.turns)
    return compute(lookup(name), work, {})


def _together(rows: Tensor, names: Sequence[str], seed: int) -> dict[str, Estimate | Exception]:
    """Several measures sharing their work; where one of them fails, each by itself, so that the others are had."""
    if not names:
        return {}
    try:
        return dict(measure(rows, names, seed=seed))
    except Exception as error:
        if len(names) == 1:
            return {names[0]: error}
    return {name: result for name in names for result in _together(rows, [name], seed).values()}


def _enter_gradients(book: Book, view: SiteView, what: What, known: Mapping[str, Estimate] | None) -> None:
    g = view.g
    if known is not None:
        for name in what.of_gradients:
            book.enter(view.site, name, known[name])
        return
    if g is None:
        for name in what.of_gradients:
            book.fail(view.site, name, f"site {view.site!r} {view.no_gradient or 'gave no gradient'}")
        return
    if not all_finite(g):
        bad = len(non_finite_rows(g))
        for name in what.of_gradients:
            book.fail(view.site, name, f"{bad:,} of {len(g):,} rows of the gradient hold NaN or infinity")
        return
    book.attempt(view.site, f"{GRADIENT}norm", lambda: gradient_norm(g, view.sequences, view.tokens))
    moving = (g != 0).any(dim=1)
    still = int((~moving).sum())
    notes = still_note(still, len(g))
    if still == len(g):
        for name in what.gradient_measures:
            book.fail(view.site, GRADIENT + name, f"every row of the gradient at {view.site!r} is zero")
        return
    for name, result in _together(g[moving], what.gradient_measures, what.seed).items():
        if isinstance(result, Estimate):
            book.enter(view.site, GRADIENT + name, replace(result, notes=(*result.notes, *notes)))
        else:
            book.fail(view.site, GRADIENT + name, result)


def gradient_norm(g: Float[Tensor, "n d"], sequences: Int64[Tensor, "n"], tokens: int) -> Estimate:
    """Frobenius norm of dL/dh over all tokens, from sampled rows; the error bar is over sequences.

    The sum of squares is a sum over sequences, which are taken as independent; its error goes through the root.
    """
    if len(g) == 0:
        raise TooFewRowsError("no row of the gradient is held")
    squares = g.double().square().sum(dim=1).cpu().numpy()
    return norm_of_squares(summed_by_sequence(squares[None], sequences)[0], len(g), tokens)


def norm_of_squares(sums: Float[np.ndarray, "u"], n: int, tokens: int) -> Estimate:
    """The same from the squared lengths of n rows, added up over each sequence."""
    factor = max(1.0, tokens / n)
    total = float(sums.sum())
    value = math.sqrt(factor * total)
    method = "Frobenius norm of the gradient of the mean loss"
    if len(sums) < SEQUENCES_FOR_BAR or value == 0:
        note = f"no error bar: {len(sums)} sequences, {SEQUENCES_FOR_BAR} are needed"
        return Estimate(value=value, stderr=None, n=n, method=method, notes=(note,))
    spread = factor * math.sqrt(float(sums.var(ddof=1)) * len(sums))
    return Estimate(value=value, stderr=spread / (2 * value), n=n, method=method, over="sequences", dof=len(sums) - 1)


def _enter_maps(book: Book, view: SiteView) -> None:
    """The norm of each kind of gradient of the maps at a site, that of each map among its parts."""
    for kind, maps in (("reader", view.readers), ("writer", view.writers), ("update", view.updates)):
        if maps:
            book.attempt(view.site, f"{kind}_norm", lambda kind=kind, maps=maps: _map_norm(kind, maps))  # type: ignore[misc]
    if view.embedding is not None:
        found = view.embedding
        tied = ("the output layer has the same weight: its part is in the rows too",) if found.tied else ()
        notes = ("no error bar: one batch", f"rows of the {len(found.ids):,} tokens of the probe", *tied)
        book.attempt(view.site, "embedding_norm", lambda: _norm(found.rows, "embedding", notes))
    for name, why in view.missing.items():
        book.fail(view.site, f"gradient of {name}", f"{name} {why}")


def _map_norm(kind: str, maps: Sequence[MapView]) -> Estimate:
    parts = {one.map.path: _norm(one.rows, kind, ("no error bar: one batch",)) for one in maps}
    total = math.sqrt(math.fsum(part.value**2 for part in parts.values()))
    notes = ["no error bar: one batch" if kind != "update" else "no error bar: the change of one step"]
    notes += [f"{one.map.path} is tied to the embedding: both parts are in it" for one in maps if one.map.tied]
    notes += [f"{one.map.path} is run by {one.map.shared} layers" for one in maps if one.map.shared > 1]
    n = sum(part.n for part in parts.values())
    return Estimate(value=total, stderr=None, n=n, method=_method(kind), notes=tuple(notes), parts=parts)


def _norm(rows: Tensor, kind: str, notes: tuple[str, ...]) -> Estimate:
    value = float(torch.linalg.vector_norm(rows.double()))
    if not math.isfinite(value):
        raise NonFiniteError(f"the {_method(kind)} is {value}")
    return Estimate(value=value, stderr=None, n=len(rows), method=_method(kind), notes=notes)


def _method(kind: str) -> str:
    return "Frobenius norm of the " + ("change in one step" if kind == "update" else f"{kind} gradient")


def _enter_analysis(
    book: Book,
    view: SiteView,
    name: str,
    analysis: Analysis,
    together: Mapping[str, Mapping[Name, Estimate | Curve | Exception] | Exception] | None,
) -> None:
    try:
        found = analysis(view) if together is None or view.site not in together else together[view.site]
        if isinstance(found, Exception):
            raise found
        book.enter_all(view.site, dict(found))
    except Exception as error:  # an analysis may raise anything, and must not end the others
        book.fail(view.site, name, error)
