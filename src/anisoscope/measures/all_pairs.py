"""The nearest neighbours of many rows by one sweep over all pairs: in float32 by ``search``, or in integers.

In integers each pair of tiles is multiplied once and serves both sides, as there. Squared distances of codes bound true
distances from both sides: the least of each group of columns says within which distance k neighbours surely lie, and
pairs whose lower bound is beyond it are dropped without a look at the rows. The others wait: limits fall as the
sweep goes on, and of most pairs that wait nothing needs to be measured in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from anisoscope.measures.integers import MOST_COLUMNS, ROUNDING, TINY, Codes
from anisoscope.measures.plan import Plan, choose_plan, principal_axes, project
from anisoscope.measures.search import TILE_COLUMNS, TILE_ROWS, Neighbors, Search
from anisoscope.rows import mean_row
from anisoscope.stats.precision import threads

GROUP = 64  # rows or columns of a tile of which the least is looked at first; a power of two
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
    """One sweep under way, over places in the order of the search, in which the codes lie.

    ``within`` are the k smallest upper bounds known of the distances of each place to others.
    """

    def __init__(self, search: Search, codes: Codes) -> None:
        typical = codes.errors.median()
        kinds = torch.stack([codes.errors <= times * typical for times in OCTAVES]).sum(dim=0)
        ends = torch.bincount(kinds, minlength=len(OCTAVES) + 1).cumsum(0).tolist()
        self._stretches = list(zip([0, *ends], ends, strict=False))
        self._search, self._order, self._codes = search, search.order, codes
        if len(kinds.unique()) > 1:
            apart = kinds.argsort(stable=True)
            self._order, self._codes = search.order[apart], codes.at(apart)
        self._within = torch.full_like(search.best, torch.inf)
        self._waiting: list[_Pairs] = []
        self._cores = torch.get_num_threads()
        self._count, self._most = 0, max(WAITING, WAITING_EACH * search.best.numel())

    def run(self) -> None:
        """Visit every pair of tiles once, those on the diagonal first: rows in the order lie beside rows nearby."""
        tiles, parts = list(self._cut(TILE_ROWS)), list(self._cut(TILE_COLUMNS))
        pairs = [(rows, columns) for rows in tiles for columns in parts if columns.stop > rows.start]
        # A second thread saves little of many small operations, and each waits for it where its core has other work.
        with threads(1):
            for near in (True, False):
                for rows, columns in pairs:
                    if (columns.start < rows.stop) == near:
                        self._visit(rows, columns, near)
                        if self._count > self._most:
                            self._settle(self._most // 2)
                self._settle(self._most // 2 if near else 0)

    def _cut(self, size: int) -> Iterator[slice]:
        for begin, end in self._stretches:
            yield from (slice(at, min(at + size, end)) for at in range(begin, end, size))

    def _visit(self, rows: slice, columns: slice, overlap: bool) -> None:
        with threads(self._cores):
            tile = self._codes.squared(rows, columns)
        if overlap:  # each pair once: only columns after the row
            later, own = torch.arange(columns.start, columns.stop), torch.arange(rows.start, rows.stop)
            tile.masked_fill_(later[None, :] <= own[:, None], torch.inf)
        short = [-size % GROUP for size in tile.shape]
        if any(short):
            tile = torch.nn.functional.pad(tile, (0, short[1], 0, short[0]), value=torch.inf)
        height, width = tile.shape
        self._look(rows, columns, tile.view(height, GROUP, -1), _least(tile, 1))
        self._look(columns, rows, tile.view(GROUP, -1, width).permute(2, 0, 1), _least(tile, 0).T)

    def _look(self, own: slice, others: slice, tile: Float32[Tensor, "m w g"], least: Float32[Tensor, "m g"]) -> None:
        """What the rows ``own`` may find among others, whose squared distances lie in groups with a ``least`` each."""
        codes, size = self._codes, own.stop - own.start
        errors = codes.errors[own] + codes.errors[others].max()
        rounding = (codes.squares[own] + codes.squares[others].max()) * ROUNDING + TINY
        least = least[:size]
        hot = (least.amin(dim=1) <= _reach(self._limit(own), errors, rounding)).nonzero().reshape(-1)
        if not len(hot):
            return
        least, errors, rounding, at = least[hot], errors[hot], rounding[hot], hot + own.start
        most = (least + rounding[:, None]).clamp_min_(0).double().sqrt_().add_(errors[:, None])
        both = torch.cat([self._within[at], most], dim=1)
        self._within[at] = both.topk(self._search.k, dim=1, largest=False, sorted=True).values
        reach = _reach(self._limit(at), errors, rounding)
        row, group = (least <= reach[:, None]).nonzero(as_tuple=True)
        some = tile[hot[row], :, group]
        which, member = (some <= reach[row][:, None]).nonzero(as_tuple=True)
        found = others.start + member * tile.shape[2] + group[which]
        self._waiting.append(_Pairs(at[row[which]], found, some[which, member]))
        self._count += len(which)

    def _limit(self, places: slice | Tensor) -> Float64[Tensor, "m"]:
        """Within which distance k others surely lie; below any distance where k copies are known."""
        known = self._search.best[self._order[places], -1].sqrt()
        return torch.minimum(known, self._within[places, -1]).masked_fill_(known == 0, -torch.inf)

    def _settle(self, spare: int) -> None:
        """Drop pairs that limits leave out which have fallen since. Of the others measure those that are surely within
        what is known of k others, and all, if more than ``spare`` are left under the limits which that gave."""
        if not self._waiting:
            return
        left = self._possible(_Pairs.joined(self._waiting))
        likely = self._between(left, 1) <= self._within[left.i, -1]
        self._measure(left.where(likely))
        left = self._possible(left.where(~likely))
        self._waiting, self._count = ([left], len(left)) if len(left) <= spare else ([], 0)
        if not self._waiting:
            self._measure(left)

    def _possible(self, pairs: _Pairs) -> _Pairs:
        return pairs.where(self._between(pairs, -1) <= self._limit(pairs.i))

    def _between(self, pairs: _Pairs, sign: int) -> Float64[Tensor, "m"]:
        """The most (``sign`` 1) or least (-1) that the rows of a pair may lie apart."""
        errors, squares, i, j = self._codes.errors, self._codes.squares.double(), pairs.i, pairs.j
        rounding = ROUNDING * (squares[i] + squares[j]) + TINY
        codes = (pairs.squared.double() + sign * rounding).clamp_min_(0).sqrt_()
        return codes + sign * (errors[i] + errors[j])

    def _measure(self, pairs: _Pairs) -> None:
        with threads(self._cores):
            self._search.measure(self._order[pairs.i], self._order[pairs.j])


def _least(tile: Float32[Tensor, "m c"], dim: int) -> Tensor:
    """The least of each group of ``GROUP`` along a dimension. Halves beat a minimum over so few by far."""
    for _ in range(GROUP.bit_length() - 1):
        half = tile.shape[dim] // 2
        tile = torch.minimum(tile.narrow(dim, 0, half), tile.narrow(dim, half, half))
    return tile


def _reach(limit: Float64[Tensor, "m"], errors: Float64[Tensor, "m"], rounding: Tensor) -> Float32[Tensor, "m"]:
    """What the squared distance of two codes must not exceed if their rows may lie within the limit; finite, so that
    what stands for no pair is always beyond."""
    squared = (limit + errors).square_().add_(rounding).mul_(1 + 2.0**-22)  # more than float32 takes off
    return squared.float().clamp_(max=torch.finfo(torch.float32).max).masked_fill_(limit < 0, -torch.inf)
