"""The table of measures and the work they share.

A measure says beforehand what it needs (``Needs``); the ``Workspace`` then reads the rows once, whatever the number of
measures, and keeps one set of moments, one sample for error bars and one neighbour search for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import (
    DuplicateRowsError,
    EmptyInputError,
    OptionError,
    TooFewRowsError,
    choose,
    name_rows,
    unknown_name,
)
from anisoscope.estimate import Estimate
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.measures.search import Neighbors
from anisoscope.measures.uncertainty import ErrorRows, spread_runs
from anisoscope.rows import Rows, as_rows, largest_size, power_of_two_scale
from anisoscope.stats.directions import Directions
from anisoscope.stats.moments import Moments, Precision
from anisoscope.stats.precision import device_of, full_precision
from anisoscope.stats.reservoir import Reservoir
from anisoscope.stats.stretches import Stretches
from anisoscope.stats.turns import Turns

CLOUD_ROWS = 65_536
"""Rows kept from a file or stream for the measures that must hold points in memory (neighbours, local geometry)."""

CODED_ROWS = 512  # rows coded at a time, so that what is needed on the way stays small

Duplicates = Literal["drop", "keep", "error"]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a measure wants prepared. Needs of several measures are joined with ``|``."""

    moments: Precision | None = None
    directions: bool = False
    points: bool = False
    neighbors: int = 0
    turns: bool = False

    def __or__(self, other: Needs) -> Needs:
        precisions = {self.moments, other.moments}
        precision: Precision | None = (
            "float64" if "float64" in precisions else "mixed" if "mixed" in precisions else None
        )
        return Needs(
            moments=precision,
            directions=self.directions or other.directions,
            points=self.points or other.points,
            neighbors=max(self.neighbors, other.neighbors),
            turns=self.turns or other.turns,
        )


@dataclass(frozen=True)
class Points:
    """Rows held in memory, one copy of each where duplicates were dropped, with what was done to them."""

    rows: Float[Tensor, "n d"]
    copies: int
    notes: tuple[str, ...]

    @property
    def n(self) -> int:
        """Rows held."""
        return len(self.rows)

    def in_range(self) -> tuple[Points, float]:
        """The same with rows times a power of two, and that factor: 1 unless squares could leave a float's range."""
        scale = power_of_two_scale(largest_size(self.rows))
        if scale == 1:
            return self, scale
        return replace(self, rows=(self.rows.double() * scale).to(self.rows.dtype)), scale


class Workspace:
    """Rows and everything derived from them that more than one measure may want. Each thing is made at most once."""

    def __init__(self, rows: Rows, needs: Needs, seed: int = 0) -> None:
        self.rows, self.needs, self.seed = rows, needs, seed
        self._points: dict[str, Points] = {}
        self._neighbors: dict[str, Neighbors] = {}
        self.cache: dict[str, Any] = {}
        """For what measures want to keep for each other."""

    @classmethod
    def of_states(
        cls,
        rows: Float[Tensor, "n d"],
        *,
        count: int,
        moments: Moments | None = None,
        directions: Directions | None = None,
        turns: Turns | None = None,
        needs: Needs | None = None,
        seed: int = 0,
    ) -> Workspace:
        """A workspace of states that were summed up elsewhere, over ``count`` rows.

        ``rows`` are those rows in order, for error bars; with none of them there, no error bar is made.
        """
        work = cls(as_rows(rows), needs or Needs(), seed)
        work.__dict__["_scan"] = _Scan.given(rows, count, moments, directions, turns)
        return work

    @cached_property
    def _scan(self) -> _Scan:
        return _Scan(self.rows, self.needs, self.seed)

    @property
    def n(self) -> int:
        """Rows that count."""
        return self._scan.count

    @property
    def moments(self) -> Moments:
        """Mean, scatter and radial moments of all rows.

        In units of ``2**moments.exponent``, and ``error_rows`` and ``all_rows`` with them. The exponent is 0 unless
        powers of the rows would leave the range of float64, so that measures free of scale need not think of it.
        """
        assert self._scan.moments is not None, "a measure that reads moments must say so in its Needs"
        return self._scan.moments

    @property
    def directions(self) -> Directions:
        """Sum of unit vectors of all rows."""
        assert self._scan.directions is not None, "a measure that reads directions must say so in its Needs"
        return self._scan.directions

    @property
    def turns(self) -> Turns:
        """Turning angles along the paths, summed over blocks."""
        return self._scan.turns

    @cached_property
    def all_rows(self) -> Tensor | None:
        """Every row as one tensor if it lies in memory, else None; in the unit of ``moments``."""
        return None if self._scan.resident is None else self._in_unit(self._scan.resident)

    @cached_property
    def error_rows(self) -> ErrorRows:
        """A few thousand rows in blocks, for the error bars of smooth measures; in the unit of ``moments``."""
        found = self.error_rows_as_they_came
        return replace(found, blocks=self._in_unit(found.blocks))

    def _in_unit(self, rows: Tensor) -> Tensor:
        moments = self._scan.moments
        if moments is None or moments.exponent == 0:
            return rows
        return rows.double() * math.ldexp(1.0, -moments.exponent)

    @cached_property
    def error_rows_as_they_came(self) -> ErrorRows:
        """The same in no unit, for what depends on directions: in a common unit short rows may vanish."""
        if self._scan.resident is not None:
            return spread_runs(self._scan.resident, self.n)
        assert self._scan.stretches is not None
        return ErrorRows.from_stretches(self._scan.stretches)

    def points(self, duplicates: Duplicates = "drop") -> Points:
        """Rows in memory after the named treatment of exact copies."""
        choose("treatment of duplicates", duplicates, ("drop", "keep", "error"))
        if duplicates not in self._points:
            self._points[duplicates] = _treat_copies(self._raw_points, duplicates)
        return self._points[duplicates]

    @cached_property
    def _raw_points(self) -> Points:
        if self._scan.resident is not None:
            return Points(self._scan.resident, 0, ())
        rows = self._scan.sample()
        note = f"a uniform sample of {len(rows):,} of {self.n:,} rows (seed {self.seed})"
        return Points(rows, 0, (note,) if len(rows) < self.n else ())

    def neighbors(self, k: int, duplicates: Duplicates = "drop") -> Neighbors:
        """The k nearest other rows of each of ``points(duplicates)``."""
        points = self.points(duplicates)
        held = self._neighbors.get(duplicates)
        if held is None or held.k < k:
            if points.n < k + 1:
                raise TooFewRowsError(
                    f"{k} neighbours need at least {k + 1} distinct rows, got {points.n}"
                    + (f" ({points.copies:,} exact copies were dropped)" if points.copies else "")
                )
            wanted = min(max(k, self.needs.neighbors), points.n - 1)
            held = nearest_neighbors(points.rows, wanted, seed=self.seed)
            self._neighbors[duplicates] = held
        return held.first(k)


class _Scan:
    """The one pass over the rows. What lies in memory is taken as it is; files and streams leave a uniform sample."""

    def __init__(self, rows: Rows, needs: Needs, seed: int) -> None:
        self.count = 0
        self.moments: Moments | None = None
        self.directions: Directions | None = None
        self.turns = Turns.empty()
        self.resident: Tensor | None = None
        self.reservoir: Reservoir | None = None
        self.stretches: Stretches | None = None
        if rows.resident:
            # Sums over all rows show afterwards whether every one was finite; without sums, look before.
            summed = needs.moments is not None or needs.directions
            self.resident = rows.tensor(check=not summed)
            self._begin(self.resident, needs)
            self._update(self.resident, needs)
            if summed and not self._finite():
                rows.tensor(check=True)  # names the rows
            if needs.turns:
                for chunk in rows.chunks():
                    self.turns = self.turns.update(chunk)
        else:
            self._read(rows, needs, seed)
        if self.count == 0:
            raise EmptyInputError("no row is left to measure" + (" after the mask" if rows.mask is not None else ""))

    @classmethod
    def given(
        cls, rows: Tensor, count: int, moments: Moments | None, directions: Directions | None, turns: Turns | None
    ) -> _Scan:
        """The outcome of a pass that was made elsewhere."""
        scan = cls.__new__(cls)
        scan.count, scan.moments, scan.directions = count, moments, directions
        scan.turns, scan.reservoir = turns or Turns.empty(), None
        scan.resident = rows if len(rows) == count else None
        scan.stretches = Stretches.empty(rows.shape[1], rows.dtype, rows.device)
        return scan

    def _read(self, rows: Rows, needs: Needs, seed: int) -> None:
        for chunk in rows.chunks():
            kept = chunk.rows
            width, device = kept.shape[1], kept.device
            if self.stretches is None:
                self._begin(kept, needs)
                dtype = torch.float64 if kept.dtype == torch.float64 else torch.float32
                self.stretches = Stretches.empty(width, dtype, device)
                if needs.points or needs.neighbors:
                    self.reservoir = Reservoir.empty(CLOUD_ROWS, width, seed=seed, dtype=dtype, device=device)
            self.stretches = self.stretches.update(kept)
            if self.reservoir is not None:
                self.reservoir = self.reservoir.update(kept)
            self._update(kept, needs)
            if needs.turns:
                self.turns = self.turns.update(chunk)

    def _begin(self, rows: Tensor, needs: Needs) -> None:
        if needs.moments:
            self.moments = Moments.empty(rows.shape[1], rows.device)
        if needs.directions:
            self.directions = Directions.empty(rows.shape[1], rows.device)

    def _finite(self) -> bool:
        sums = [] if self.moments is None else [self.moments.mean, self.moments.fourth]
        sums += [] if self.directions is None else [self.directions.total]
        return all(bool(torch.isfinite(total).all()) for total in sums)

    def _update(self, rows: Tensor, needs: Needs) -> None:
        if self.moments is not None and needs.moments:
            # float64 input asks for float64 care; the fast path is for the precisions that activations come in
            precision = "float64" if rows.dtype == torch.float64 else needs.moments
            self.moments = self.moments.update(rows, precision)
        if self.directions is not None:
            self.directions = self.directions.update(rows, self.count)
        self.count += len(rows)

    def sample(self) -> Tensor:
        """The sampled rows in the order in which they came."""
        assert self.reservoir is not None
        order = self.reservoir.stream_order()
        rows = self.reservoir.rows
        return rows[order.to(rows.device)]


def _treat_copies(points: Points, duplicates: Duplicates) -> Points:
    if duplicates == "keep":
        return points
    keep, copies = distinct_rows(points.rows)
    if len(copies) == 0:
        return points
    if duplicates == "error":
        raise DuplicateRowsError(
            f"{len(copies):,} of {points.n:,} rows are exact copies of earlier ones: {name_rows(copies.tolist())} "
            "(counted among the kept rows); "
            'duplicates="drop" measures one of each'
        )
    note = f"{len(copies):,} of {points.n:,} rows were exact copies of earlier ones and were dropped"
    return Points(points.rows[keep], len(copies), (*points.notes, note))


def distinct_rows(rows: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor]:
    """Positions of the first of each distinct row, ascending, and of the exact copies (0.0 equals -0.0)."""
    code = _row_codes(rows)
    order = code.argsort(stable=True)
    same = code[order][1:] == code[order][:-1]
    is_copy = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    suspects = same.nonzero().reshape(-1)
    if len(suspects):
        equal = (rows[order[suspects]] == rows[order[suspects + 1]]).all(dim=1)
        if bool(equal.all()):  # stable order: whatever follows its equal is a later copy
            is_copy[order[suspects + 1]] = True
        else:  # two different rows with one 64-bit code: compare these few the slow way
            members = torch.cat([order[suspects], order[suspects + 1]]).unique()
            _, inverse = torch.unique(rows[members], dim=0, return_inverse=True)
            seen = torch.full((int(inverse.max()) + 1,), len(rows), device=rows.device)
            seen = seen.scatter_reduce(0, inverse, members, "amin")
            is_copy[members] = seen[inverse] != members
    return (~is_copy).nonzero().reshape(-1), is_copy.nonzero().reshape(-1)


def _row_codes(rows: Tensor) -> Tensor:
    """A 64-bit code for each row, equal for equal rows: a random linear form of its bits, with wrap-around."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    weights = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=torch.Generator().manual_seed(1))
    weights = (2 * weights + 1).to(rows.device)
    codes = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for part, code in zip(rows.split(CODED_ROWS), codes.split(CODED_ROWS), strict=True):
        bits = (part + 0.0).contiguous().view(words).long()  # + 0.0 makes one zero of two
        torch.sum(bits.mul_(weights), dim=1, out=code)
    return codes


@dataclass(frozen=True)
class Measure:
    """An entry of the table: how to compute it and what it needs for given options."""

    name: str
    compute: Callable[..., Estimate]
    needs: Callable[..., Needs]


_TABLE: dict[str, Measure] = {}


def register(name: str, needs: Needs | Callable[..., Needs]) -> Callable[[Callable[..., Estimate]], Any]:
    """Decorator: put ``compute(work, **options) -> Estimate`` into the table of measures under ``name``.

    ``needs`` is what the workspace should prepare, or a function of the options that says so. Registered measures work
    in ``measure`` beside the built-in ones. A name can be taken only once.
    """

    def enter(compute: Callable[..., Estimate]) -> Callable[..., Estimate]:
        if name in _TABLE:
            raise OptionError(f"a measure named {name!r} is registered already; choose another name")
        fixed = needs
        _TABLE[name] = Measure(name, compute, fixed if callable(fixed) else lambda **_: fixed)
        return compute

    return enter


def unregister(name: str) -> None:
    """Take a measure out of the table again."""
    if name not in _TABLE:
        raise unknown_name("measure", name, _TABLE)
    del _TABLE[name]


def run(name: str, rows: Any, mask: Any, seed: int = 0, **options: Any) -> Estimate:
    """One measure over its own workspace: the body of every public function."""
    entry = _TABLE[name]
    with full_precision(device_of(rows)):
        return compute(entry, Workspace(as_rows(rows, mask), entry.needs(**options), seed), options)


def compute(entry: Measure, work: Workspace, options: Mapping[str, Any]) -> Estimate:
    """One measure over a workspace; where it has no error bar, some note must say why."""
    found = entry.compute(work, **options)
    if found.stderr is None and not any("no error bar" in note for note in found.notes):
        return with_notes(found, ("no error bar: too few independent blocks of rows to tell their spread",))
    return found


def with_notes(estimate: Estimate, notes: Iterable[str]) -> Estimate:
    """The same estimate with more notes in front."""
    return replace(estimate, notes=(*notes, *estimate.notes))


def registered() -> tuple[str, ...]:
    """Names entered so far."""
    return tuple(_TABLE)


def lookup(name: str) -> Measure:
    """The entry of a name, or an error that suggests the nearest one."""
    if name not in _TABLE:
        raise unknown_name("measure", name, _TABLE)
    return _TABLE[name]
