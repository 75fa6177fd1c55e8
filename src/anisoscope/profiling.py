"""The profile of one model: every measure at every site, over a sample of tokens that is the same at all of them.

Activations stream through once. Each site keeps a uniform sample of at most ``vectors`` rows (and sums along the token
paths), so memory is bounded by the sample whatever the length of the text. Neighbour measures run on shuffled batches
of ``batch_vectors`` rows, as "The Shape of Learning" does; moment measures on the whole sample, in the order of the
text. Every number keeps both kinds of spread, each by its name: the estimator's own error, and ``sd over batches``.
"""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, OptionError, TooFewTokensError
from anisoscope.estimate import Estimate
from anisoscope.measures.bars import SHARE_SCORES
from anisoscope.measures.base import Needs, Workspace, compute, lookup
from anisoscope.measures.spectrum import spectrum
from anisoscope.measures.table import measure
from anisoscope.models.load import LoadedModel
from anisoscope.models.sites import Site, discover, select
from anisoscope.rows import all_finite, non_finite_rows
from anisoscope.runs.records import Curve, Failure, Record
from anisoscope.sampling import Progress, Sample, collect_sample
from anisoscope.slices import (
    ALL,
    NO_MASSIVE,
    NO_POSITION_0,
    Sliced,
    States,
    chosen_rows,
    gathered,
    kept_columns,
    massive_dimensions,
    no_rows,
)
from anisoscope.stats.reservoir import Reservoir
from anisoscope.stats.turns import Turns
from anisoscope.text.batches import Batch

DEFAULT_MEASURES = (
    "spectral_ratio",
    "mean_cosine",
    "isoscore",
    "effective_rank",
    "two_nn",
    "gride",
    "local_pca_dimension",
    "turning_angle",
)
ONE_BATCH = ("gride", "local_pca_dimension", "local_isotropy", "curvature", "partition_isotropy")
"""Measured on the first batch alone: they cost as much as all others together, and carry an error of their own."""

WHOLE_SPECTRUM = ("effective_rank", "effective_rank_lambda", "spectral_ratio_l1")

OPTIONS: Mapping[str, Mapping[str, Any]] = {"gride": {"scales": (1, 2, 4, 8, 16)}}
DEFAULT_SITES = ("embed", "resid.*", "final_norm")
SPECTRUM_POINTS = 256  # a curve for the eye: ranks beyond are thinned out evenly on a log scale


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to measure, where, and on how much. ``vectors`` are kept of ``tokens`` that run through the model."""

    measures: tuple[str, ...] = DEFAULT_MEASURES
    sites: tuple[str, ...] = DEFAULT_SITES
    tokens: int = 16_384
    vectors: int = 8_192
    batch_vectors: int = 4_096
    sequence_length: int = 256
    sequences_per_pass: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "vectors", "sequence_length", "sequences_per_pass"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_vectors < 128:
            raise OptionError(f"batch_vectors must be at least 128 to say anything, got {self.batch_vectors}")
        if min(self.tokens, self.vectors) < self.batch_vectors:
            raise OptionError(
                f"a batch of {self.batch_vectors:,} vectors needs as many tokens and vectors, got {self.tokens:,} and "
                f"{self.vectors:,}; raise those or lower batch_vectors"
            )
        for name in self.measures:
            lookup(name)
        if not self.measures:
            raise OptionError("no measure was named")

    def describe(self) -> dict[str, Any]:
        """As plain values, for a recipe."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in ((key, getattr(self, key)) for key in self.__dataclass_fields__)
        }


@dataclass(frozen=True)
class Findings:
    """What one profile found. Everything in it can be sent between processes."""

    records: tuple[Record, ...]
    failures: tuple[Failure, ...]
    curves: tuple[Curve, ...]
    info: Mapping[str, Any]

    @cached_property
    def estimates(self) -> dict[tuple[str, str, str], Estimate]:
        """Estimates by measure, site and slice; the first where several share them."""
        return {(one.measure, one.site, one.slice): one.estimate for one in reversed(self.records)}


@dataclass
class _Book:
    """Where findings are entered while the profile is under way."""

    run: str
    step: int
    cell: str
    records: list[Record] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    def enter(self, site: str, measure: str, where: str, estimate: Estimate) -> None:
        self.records.append(Record(**self.place(site), measure=measure, slice=where, estimate=estimate))

    def attempt(self, site: str, measure: str, where: str, make: Callable[[], Estimate]) -> None:
        """Enter what ``make`` gives, or the reason why it cannot: one failed measure must not end the others."""
        try:
            self.enter(site, measure, where, make())
        except (AnisoscopeError, RuntimeError, ArithmeticError) as error:
            self.fail(site, measure, where, f"{type(error).__name__}: {error}")

    def fail(self, site: str, measure: str, where: str, error: str) -> None:
        self.failures.append(Failure(**self.place(site), measure=measure, slice=where, error=error))

    def draw(self, site: str, name: str, x: Sequence[float], y: Sequence[float], **labels: Any) -> None:
        self.curves.append(Curve(**self.place(site), name=name, slice=ALL, x=tuple(x), y=tuple(y), **labels))

    def take(self, other: _Book) -> None:
        self.records += other.records
        self.failures += other.failures
        self.curves += other.curves

    def of_site(self, site: str) -> _Book:
        """The same findings of another site."""
        other = _Book(self.run, self.step, self.cell)
        other.records += (replace(one, site=site) for one in self.records)
        other.failures += (replace(one, site=site) for one in self.failures)
        other.curves += (replace(one, site=site) for one in self.curves)
        return other

    def place(self, site: str) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "cell": self.cell, "site": site}


def profile_model(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    options: ProfileOptions,
    *,
    run: str,
    step: int = 0,
    cell: str = "",
    progress: Progress | None = None,
) -> Findings:
    """Run a model over batches and measure every chosen site."""
    tell = progress or (lambda what, done, total: None)
    sites = select(discover(loaded.model), options.sites)
    began = time.perf_counter()
    sample = collect_sample(
        loaded.model,
        batches,
        sites,
        tokens=options.tokens,
        vectors=options.vectors,
        turns=any(lookup(name).needs().turns for name in options.measures),
        seed=options.seed,
        tell=tell,
    )
    if len(sample.positions) < options.batch_vectors:
        raise TooFewTokensError(
            f"{len(sample.positions):,} tokens were measured, a batch needs {options.batch_vectors:,}; give more text, "
            "or lower batch_vectors"
        )
    book = _Book(run, step, cell)
    for number, part in enumerate(_each_site(book, sites, sample, options)):
        tell("measuring", number + 1, len(sites))
        book.take(part)
    info = {
        "model": loaded.name,
        "family": loaded.family,
        "kind": loaded.kind,
        "parameters": loaded.parameters,
        "layers": sum(site.kind == "resid" for site in sites) - 1,
        "width": max(sample.widths.values()),
        "tokens": sample.seen,
        "vectors": len(sample.positions),
        "forward_seconds": sample.forward_seconds,
        "geometry_seconds": time.perf_counter() - began - sample.forward_seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return Findings(tuple(book.records), tuple(book.failures), tuple(book.curves), info)


def _each_site(book: _Book, sites: Sequence[Site], sample: Sample, options: ProfileOptions) -> Iterator[_Book]:
    """Measure sites side by side, a thread each, and yield their books in the order of the sites.

    Every thread computes on one core. That keeps all cores busy where one measure could not, and makes numbers
    independent of how many there are. Sites that share their state with the one before them are not measured again.
    """
    names = [site.name for site in sites]
    again = {name for before, name in pairwise(names) if sample.states[name] is sample.states[before]}

    def one(site: str) -> _Book:
        torch.set_num_threads(1)  # of this thread
        own = _Book(book.run, book.step, book.cell)
        _measure_site(own, site, sample.states.pop(site), sample, options)
        return own

    sample.states = {name: state for name, state in sample.states.items() if name not in again}
    with (
        ThreadPoolExecutor(torch.get_num_threads()) as pool,
        contextlib.closing(pool.map(one, [name for name in names if name not in again])) as found,  # type: ignore[type-var]
    ):
        last = _Book(book.run, book.step, book.cell)
        for name in names:
            last = last.of_site(name) if name in again else next(found)
            yield last


def _measure_site(book: _Book, site: str, state: Reservoir, sample: Sample, options: ProfileOptions) -> None:
    rows = state.rows
    if not all_finite(rows):
        bad = len(non_finite_rows(rows))
        for name in options.measures:
            book.attempt(site, name, ALL, partial(_not_finite, bad, len(rows)))
        return
    needs = {name: lookup(name).needs(**OPTIONS.get(name, {})) for name in options.measures}
    whole = [name for name, need in needs.items() if not (need.points or need.neighbors or need.turns)]
    clouds = [name for name, need in needs.items() if need.points or need.neighbors]
    for name in (name for name, need in needs.items() if need.turns):
        book.attempt(site, name, ALL, partial(_of_turns, name, sample.turns[site]))
    parts = rows.split(options.batch_vectors)[: len(rows) // options.batch_vectors]
    if whole:
        _measure_moments(book, site, whole, rows, sample, len(parts), options)
    _measure_clouds(book, site, clouds, parts, options)


def _not_finite(count: int, total: int) -> Estimate:
    raise OptionError(f"{count:,} of {total:,} sampled rows hold NaN or infinity; the model itself gives them")


def _of_turns(name: str, turns: Turns) -> Estimate:
    work = Workspace.of_states(torch.zeros(0, 1), count=int(turns.counts.sum()), turns=turns)
    return compute(lookup(name), work, {})


def _measure_moments(
    book: _Book, site: str, names: Sequence[str], rows: Tensor, sample: Sample, batches: int, options: ProfileOptions
) -> None:
    """Moment measures on the whole sample and its slices, from one pass of moments over each batch."""
    needs = Needs()
    for name in names:
        needs = needs | lookup(name).needs()
    order, first = sample.order, sample.positions == 0
    # In the order of the text: consecutive rows are dependent, and error bars must see it.
    in_order, rest = gathered(rows, order), ~first[order]
    cut = Sliced.of(rows, first, needs, options.batch_vectors, batches)
    batch_states = [cut.batch(number, ALL) for number in range(batches)]
    _enter_slice(book, site, ALL, names, cut.whole(ALL), batch_states, in_order, options)
    if cut.has_first:  # the spread over batches is told for all tokens alone; over a slice it would cost as much again
        others = chosen_rows(in_order, rest)
        _enter_slice(book, site, NO_POSITION_0, names, cut.whole(NO_POSITION_0), [], others, options)
    massive = massive_dimensions(rows)
    if len(massive):
        keep = kept_columns(rows.shape[1], massive)
        note = f"without {len(massive)} of {rows.shape[1]} dimensions: {massive.tolist()[:8]}"
        narrow = cut.whole(ALL).narrowed(keep, rows)
        _enter_slice(book, site, NO_MASSIVE, names, narrow, [], gathered(in_order, keep, 1), options, (note,))


def _enter_slice(
    book: _Book,
    site: str,
    where: str,
    names: Sequence[str],
    states: States,
    batch_states: Sequence[States],
    in_order: Tensor,
    options: ProfileOptions,
    notes: tuple[str, ...] = (),
) -> None:
    work = states.workspace(in_order)
    # Those that need the whole spectrum first: what they find on the way serves the error bars of the others.
    names = sorted(names, key=lambda name: name not in WHOLE_SPECTRUM)
    work.cache[SHARE_SCORES] = True
    light = [one.workspace(no_rows(in_order)) for one in batch_states]
    for name in names:

        def make(name: str = name) -> Estimate:
            found = compute(lookup(name), work, {})
            values = [lookup(name).compute(one).value for one in light]
            return _with_sd(replace(found, notes=(*found.notes, *notes)), values, options.batch_vectors)

        book.attempt(site, name, where, make)
    if where == ALL and "spectrum" in work.cache:
        _draw_spectrum(book, site, work)


def _with_sd(found: Estimate, values: Sequence[float], rows: int) -> Estimate:
    """The estimate with the mean and the standard deviation over batches beside it."""
    if len(values) < 2:
        return found
    method = f"over {len(values)} shuffled batches of {rows:,}"
    parts = {
        "mean over batches": Estimate(value=statistics.fmean(values), stderr=None, n=len(values), method=method),
        "sd over batches": Estimate(value=statistics.stdev(values), stderr=None, n=len(values), method=method),
    }
    return replace(found, parts={**parts, **found.parts})


def _draw_spectrum(book: _Book, site: str, work: Workspace) -> None:
    values = spectrum(work).values
    share = (values / values.sum()).tolist()
    last = len(share)
    ranks = sorted({min(last, round(last ** (i / (SPECTRUM_POINTS - 1)))) for i in range(SPECTRUM_POINTS)})
    kept = [(float(rank), share[rank - 1]) for rank in ranks if share[rank - 1] > 0]
    x, y = zip(*kept, strict=True)
    book.draw(site, "spectrum", x, y, x_label="rank", y_label="share of the variance")


def _measure_clouds(
    book: _Book, site: str, names: Sequence[str], parts: Sequence[Tensor], options: ProfileOptions
) -> None:
    """Measures of points and neighbours: on every batch, or on the first alone where they are dear."""
    found: dict[str, list[Estimate]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number, part in enumerate(parts):
        due = [name for name in names if name not in failed and (number == 0 or name not in ONE_BATCH)]
        if not due:
            break
        for name, result in _together(part, due, options.seed).items():
            if isinstance(result, Estimate):
                found[name].append(result)
            else:
                failed[name] = f"batch {number + 1}: {result}"
    for name in names:
        if name in failed:
            book.fail(site, name, ALL, failed[name])
        else:
            book.enter(site, name, ALL, over_batches(found[name], options.batch_vectors))
    if "gride" in found and found["gride"] and "gride" not in failed:
        _draw_scales(book, site, found["gride"][0])


def _together(rows: Tensor, names: Sequence[str], seed: int) -> dict[str, Estimate | str]:
    """Several measures sharing one search; where one of them fails, each by itself, so that the others are had."""
    wanted = {name: OPTIONS.get(name, {}) for name in names}
    try:
        return dict(measure(rows, wanted, seed=seed))
    except (AnisoscopeError, RuntimeError, ArithmeticError) as error:
        if len(names) == 1:
            return {names[0]: f"{type(error).__name__}: {error}"}
    return {name: one for name in names for one in _together(rows, [name], seed).values()}


def over_batches(found: Sequence[Estimate], rows: int) -> Estimate:
    """The mean over batches, with the estimator's own error, joined over disjoint batches, and the spread beside it."""
    if len(found) == 1:
        return found[0]
    values = [one.value for one in found]
    bars = [one.stderr for one in found if one.stderr is not None]
    stderr = math.sqrt(sum(bar**2 for bar in bars)) / len(found) if len(bars) == len(found) else None
    dof = sum(one.dof for one in found if one.dof is not None) or None
    notes = tuple(dict.fromkeys(note for one in found for note in one.notes))
    mean = Estimate(
        value=statistics.fmean(values),
        stderr=stderr,
        dof=dof if stderr is not None else None,
        over=f"{found[0].over}, in each of {len(found)} batches" if stderr is not None else None,
        n=sum(one.n for one in found),
        method=f"{found[0].method}; mean over {len(found)} shuffled batches of {rows:,}",
        notes=notes,
    )
    return _with_sd(mean, values, rows)


def _draw_scales(book: _Book, site: str, estimate: Estimate) -> None:
    """Dimension against scale, from the parts of GRIDE that hold one dimension for each."""
    points = [(_scale(name), part) for name, part in estimate.parts.items() if _scale(name) is not None]
    if len(points) < 2:
        return
    bars = [part.stderr for _, part in points]
    book.draw(
        site,
        "dimension against scale",
        [float(scale) for scale, _ in points if scale is not None],
        [part.value for _, part in points],
        stderr=tuple(bar for bar in bars if bar is not None) if None not in bars else None,
        x_label="n of the ratio r_2n / r_n",
        y_label="dimension",
    )


def _scale(name: str) -> int | None:
    digits = name.removeprefix("n=")
    return int(digits) if digits.isdecimal() else None
