"""The nearest neighbours of many rows by one sweep over all pairs: in float32 by ``search``, or in integers.

In integers each pair of tiles is multiplied once and serves both sides, as there. Squared distances of codes bound true
distances from both sides: the least of each group of columns says within which distance k neighbours surely lie, and
pairs whose lower bound is beyond it are dropped without a look at the rows. The others wait: limits fall as the
sweep goes on, and of most pairs that wait nothing needs to be measured in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from anisoscope.measures.integers import MOST_COLUMNS, ROUNDING, TINY, Codes, Room
from anisoscope.measures.plan import Plan, choose_plan, principal_axes, project
from anisoscope.measures.search import TILE_COLUMNS, TILE_ROWS, Neighbors, Search
from anisoscope.rows import mean_row
from anisoscope.stats.precision import crew

FEW = 8  # rows or columns of a tile whose least is kept, and so many of those again; a power of two
GROUP = FEW * FEW
WAITING = 2**18  # pairs that wait at most,
WAITING_EACH = 4  # or so many for each neighbour asked for
OCTAVES = tuple(2.0**power for power in range(12, -6, -1))
"""Errors between two of these times the median's are swept apart: in a tile the largest counts for all."""


def sweep_all(rows: Float[Tensor, "n d"], k: int, plan: Plan | None, seed: int) -> Neighbors:
    """The ``k`` nearest other rows of every row of many, by landmarks, a plan and one sweep over all pairs."""
    generator = torch.Generator().manual_seed(seed)
    mean = mean_row(rows)
    if plan is None:
        plan, basis = choose_plan(rows, mean, k, generator)
    else:
        basis = None if plan.is_full else principal_axes(rows, mean, generator)
    coordinates = None if basis is None or plan.is_full else project(rows, mean, basis[:, : plan.axes])
    search = Search(rows, coordinates, k)
    search.order_rows(generator)
    # At other scales squares would be too large for float32, in more columns products for int32.
    if plan.integers and search.scale == 1 and rows.shape[1] <= MOST_COLUMNS:
        IntegerSweep(search, Codes.of(rows, mean, seed, search.order)).run()
    else:
        search.first_bounds()
        search.sweep()
    return search.result()


@dataclass(frozen=True)
class _Pairs:
    """Pairs that wait: whose neighbour may be found, which place it may be, and the squared distance of their codes."""

    i: Int[Tensor, "m"]
    j: Int[Tensor, "m"]
    squared: Float32[Tensor, "m"]

    @classmethod
    def joined(cls, parts: Sequence[_Pairs]) -> _Pairs:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("i", "j", "squared")))

    def __len__(self) -> int:
        return len(self.i)

    def where(self, keep: Bool[Tensor, "m"]) -> _Pairs:
        return _Pairs(self.i[keep], self.j[keep], self.squared[keep])


class IntegerSweep:
    """One sweep over places in the order of the search, in which the codes lie; each core visits tiles of its own.

    ``within`` are the k smallest upper bounds known of the distances of each place to others. What one core is about
    to enter there or in the search others may read too early: a limit is then larger than it need be, and still right.
    """

    def __init__(self, search: Search, codes: Codes) -> None:
        typical = codes.errors.median()
        kinds = torch.stack([codes.errors <= times * typical for times in OCTAVES]).sum(dim=0)
        ends = torch.bincount(kinds, minlength=len(OCTAVES) + 1).cumsum(0).tolist()
        self._stretches = list(zip([0, *ends], ends, strict=False))
        self.search, self.order, self.codes = search, search.order, codes
        if len(kinds.unique()) > 1:
            apart = kinds.argsort(stable=True)
            self.order, self.codes = search.order[apart], codes.at(apart)
        self.within = torch.full_like(search.best, torch.inf)
        self._entering = threading.Lock()

    def run(self) -> None:
        """Visit every pair of tiles once, those on the diagonal first: rows in the order lie beside rows nearby."""
        tiles, parts = list(self._cut(TILE_ROWS)), list(self._cut(TILE_COLUMNS))
        pairs = [(rows, columns) for rows in tiles for columns in parts if columns.stop > rows.start]
        cores = min(torch.get_num_threads(), len(pairs))
        room = max(WAITING, WAITING_EACH * self.search.best.numel()) // cores
        # Many of the operations are small: a core each for them, so that none has to wait for another.
        with crew(cores) as each:
            visitors = [_Visitor(self, room) for _ in range(cores)]
            for near in (True, False):
                left = _Turns([pair for pair in pairs if (pair[1].start < pair[0].stop) == near])
                with left:
                    each(partial(_Visitor.visit_all, pairs=left, overlap=near), visitors)
            each(_Visitor.settle_all, visitors)

    def _cut(self, size: int) -> Iterator[slice]:
        for begin, end in self._stretches:
            yield from (slice(at, min(at + size, end)) for at in range(begin, end, size))

    def limit(self, places: slice | Tensor) -> Float64[Tensor, "m"]:
        """Within which distance k others surely lie; below any distance where k copies are known."""
        known = self.search.best[self.order[places], -1].sqrt()
        return torch.minimum(known, self.within[places, -1]).masked_fill_(known == 0, -torch.inf)

    def enter(self, places: Int[Tensor, "m"], most: Float64[Tensor, "m g"]) -> None:
        """Upper bounds of distances of these places to others, of which nothing is known yet."""
        with self._entering:
            both = torch.cat([self.within[places], most], dim=1)
            self.within[places] = both.topk(self.search.k, dim=1, largest=False, sorted=True).values

    def between(self, pairs: _Pairs, sign: int) -> Float64[Tensor, "m"]:
        """The most (``sign`` 1) or least (-1) that the rows of a pair may lie apart."""
        errors, squares, i, j = self.codes.errors, self.codes.squares.double(), pairs.i, pairs.j
        rounding = ROUNDING * (squares[i] + squares[j]) + TINY
        codes = (pairs.squared.double() + sign * rounding).clamp_min_(0).sqrt_()
        return codes + sign * (errors[i] + errors[j])


class _Visitor:
    """What one core does of a sweep: it visits tiles, and keeps the pairs that they leave in doubt."""

    def __init__(self, sweep: IntegerSweep, room: int) -> None:
        self._sweep, self._most = sweep, room
        self._waiting: list[_Pairs] = []
        self._count = 0
        height, width = (-(-size // GROUP) * GROUP for size in (TILE_ROWS, TILE_COLUMNS))
        self._room = Room.of(height * width, GROUP.bit_length() - 1)

    def visit_all(self, pairs: _Turns, overlap: bool) -> None:
        """Visit tiles as long as any is left."""
        with pairs:
            for rows, columns in pairs:
                self._visit(rows, columns, overlap)
            self._settle(self._most // 2)

    def settle_all(self) -> None:
        """Decide on all pairs that wait."""
        self._settle(0)

    def _visit(self, rows: slice, columns: slice, overlap: bool) -> None:
        tile = self._sweep.codes.squared(rows, columns, self._room)
        if overlap:  # each pair once: only columns after the row
            later, own = torch.arange(columns.start, columns.stop), torch.arange(rows.start, rows.stop)
            tile.masked_fill_(later[None, :] <= own[:, None], torch.inf)
        short = [-size % GROUP for size in tile.shape]
        if any(short):
            tile = torch.nn.functional.pad(tile, (0, short[1], 0, short[0]), value=torch.inf)
        self._look(rows, columns, _leasts(tile, 1, self._room))
        self._look(columns, rows, [level.T for level in _leasts(tile, 0, self._room)])

    def _look(self, own: slice, others: slice, levels: Sequence[Float32[Tensor, "m _"]]) -> None:
        """What the rows ``own`` may find among others, whose squared distances are the last of the ``levels``: each
        holds the least of every so many of the next one."""
        codes, size = self._sweep.codes, own.stop - own.start
        errors = codes.errors[own] + codes.errors[others].max()
        rounding = (codes.squares[own] + codes.squares[others].max()) * ROUNDING + TINY
        least = levels[0][:size]
        hot = (least.amin(dim=1) <= _reach(self._sweep.limit(own), errors, rounding)).nonzero().reshape(-1)
        if not len(hot):
            return
        least, errors, rounding, at = least[hot], errors[hot], rounding[hot], hot + own.start
        self._sweep.enter(at, (least + rounding[:, None]).clamp_min_(0).double().sqrt_().add_(errors[:, None]))
        reach = _reach(self._sweep.limit(at), errors, rounding)
        row, place = (least <= reach[:, None]).nonzero(as_tuple=True)
        value = least[row, place]
        for level in levels[1:]:
            some = level.unflatten(1, (FEW, -1))[hot[row], :, place]
            which, member = (some <= reach[row][:, None]).nonzero(as_tuple=True)
            row, place, value = row[which], place[which] + member * (level.shape[1] // FEW), some[which, member]
        self._waiting.append(_Pairs(at[row], others.start + place, value))
        self._count += len(row)
        if self._count > self._most:
            self._settle(self._most // 2)

    def _settle(self, spare: int) -> None:
        """Drop pairs that limits leave out which have fallen since. Of the others measure those that are surely within
        what is known of k others, and all, if more than ``spare`` are left under the limits which that gave."""
        if not self._waiting:
            return
        left = self._possible(_Pairs.joined(self._waiting))
        likely = self._sweep.between(left, 1) <= self._sweep.within[left.i, -1]
        self._measure(left.where(likely), doubtful=False)
        left = self._possible(left.where(~likely))
        self._waiting, self._count = ([left], len(left)) if len(left) <= spare else ([], 0)
        if not self._waiting:
            self._measure(left, doubtful=True)

    def _possible(self, pairs: _Pairs) -> _Pairs:
        return pairs.where(self._sweep.between(pairs, -1) <= self._sweep.limit(pairs.i))

    def _measure(self, pairs: _Pairs, *, doubtful: bool) -> None:
        order = self._sweep.order
        self._sweep.search.measure(order[pairs.i], order[pairs.j], doubtful=doubtful)


class _Turns:
    """Pairs of tiles that several threads take, each of them once; where something is raised inside, none is left."""

    def __init__(self, pairs: Sequence[tuple[slice, slice]]) -> None:
        self._left, self._lock = iter(pairs), threading.Lock()

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> tuple[slice, slice]:
        with self._lock:
            return next(self._left)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            list(self)


def _leasts(tile: Float32[Tensor, "m c"], dim: int, room: Room) -> list[Tensor]:
    """The least of each ``GROUP`` along a dimension, of each ``FEW``, and all of them. Those that a least is taken of
    lie apart by the number of leasts that there are: halves beat a minimum over so few by far."""
    levels = [tile]
    for half in room.halves:
        size = tile.shape[dim] // 2
        out = half[: tile.numel() // 2].view(tile.shape[0] >> (dim == 0), tile.shape[1] >> (dim == 1))
        tile = torch.minimum(tile.narrow(dim, 0, size), tile.narrow(dim, size, size), out=out)
        levels.append(tile)
    return levels[:: -(FEW.bit_length() - 1)]


def _reach(limit: Float64[Tensor, "m"], errors: Float64[Tensor, "m"], rounding: Tensor) -> Float32[Tensor, "m"]:
    """What the squared distance of two codes must not exceed if their rows may lie within the limit; finite, so that
    what stands for no pair is always beyond."""
    squared = (limit + errors).square_().add_(rounding).mul_(1 + 2.0**-22)  # more than float32 takes off
    return squared.float().clamp_(max=torch.finfo(torch.float32).max).masked_fill_(limit < 0, -torch.inf)
