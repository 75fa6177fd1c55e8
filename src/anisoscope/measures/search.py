"""Exact nearest neighbours of every row among the others, fast on unstructured and on manifold data alike.

How it stays exact: products of float32 rows only ever give *lower bounds* on squared distances. The bound subtracts a
proven allowance for rounding, and may leave out all but the leading principal axes (what is left out enters through
the difference of residual lengths, again a lower bound). A pair whose bound lies below the row's current k-th distance
is measured by differences in float64; nothing else can change the answer. So float32 never decides, and close pairs
never underflow into ties.

How it is fast: rows are ordered by the nearest of some landmarks, so that good k-th distances are known from the
nearest cells before the sweep over all pairs begins; each pair of tiles is multiplied once and serves both sides; a
tile is scanned by one minimum per row and column, and touched again only where that minimum beats the threshold; the
number of axes kept is chosen on a sample by counting the pairs that would survive (``plan``). Where the processor
multiplies small integers faster, ``all_pairs`` may sweep over those instead and have measured here what they leave.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import TooFewRowsError
from anisoscope.measures.plan import scale_of
from anisoscope.rows import mean_row
from anisoscope.stats.memory import scratch
from anisoscope.stats.products import served, times_transposed

TILE_ROWS, TILE_COLUMNS = 2048, 1024  # a float32 tile of 8 MB: large enough for BLAS, small enough for cache
PAIR_BLOCK = 512  # pairs measured at a time: larger differences leave the cache
ROUND_PAIRS = 65_536  # pairs after which what was found is entered
ANCHOR_ROWS = 512  # rows searched together in that way
EXACT_PAIRS = 512  # pairs measured together there: their differences stay in cache
FEW_ROWS = 8192  # up to here all bounds of a row are looked at together: no order, no cells, no plan
SQUARE_ROWS = 4096  # up to here the bounds of all pairs are held at once, and each pair is multiplied once
SPARE = 6  # candidates taken beyond k, since bounds may change the order of near equals
CELL_ROWS = 256  # rows per landmark
NEAR_CELLS = 6  # cells searched for the first bounds; with the full product, whose columns are dear, only the own one
FLOAT32_UNIT = 2.0**-24


@dataclass(frozen=True)
class Neighbors:
    """The k nearest other rows of each row, nearest first. ``distances`` are float64, by differences."""

    distances: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]

    @property
    def k(self) -> int:
        """Neighbours held for each row."""
        return self.distances.shape[1]

    def first(self, k: int) -> Neighbors:
        """The same, cut to fewer neighbours."""
        return Neighbors(self.distances[:, :k], self.indices[:, :k])


def neighbors_of(rows: Float[Tensor, "n d"], anchors: Int[Tensor, "m"], k: int) -> Neighbors:
    """The ``k`` nearest other rows of some rows, exact in float64: for few rows, or where not all rows are asked.

    A few more candidates than needed are taken by their lower bounds; where the bound of the last one does not reach
    the k-th distance found, some row may be missing, and the number of candidates is doubled.
    """
    n = len(rows)
    if n < k + 1:
        raise TooFewRowsError(f"{k} neighbours need at least {k + 1} distinct rows, got {n}")
    search = Search(rows, None, k)
    # By oneDNN all pairs twice, a strip at a time, are sooner there than each once and room in memory for them all.
    search.in_pairs = n <= SQUARE_ROWS and len(anchors) > n // 2 and not search.by_onednn
    for part in anchors.split(ANCHOR_ROWS):
        take, left = min(k + SPARE, n - 1), part
        while len(left):
            left = search.search_from(left, take)
            take = min(2 * take, n - 1)
    return Neighbors(search.best[anchors].sqrt() / search.scale, search.index[anchors])


def distances_within(blocks: Float[Tensor, "g l d"], k: int) -> Float[Tensor, "g l k"]:
    """Distances of each row to its ``k`` nearest others of the same block, many small blocks at a time.

    In float64 through products, and by differences where two rows lie so close that products would lose digits: good
    to 1e-8, and copies are at distance zero exactly. For the spread over subsamples, not for the value itself.
    """
    _, length, width = blocks.shape
    scale = scale_of(blocks.reshape(-1, width))
    found = []
    for part in blocks.split(max(1, TILE_ROWS * TILE_COLUMNS // length**2)):
        x = scratch((len(part), length, width), part, torch.float64).copy_(part).mul_(scale)
        x -= x.mean(dim=1, keepdim=True)
        size = torch.linalg.vector_norm(x, dim=2).square_()
        d2 = torch.baddbmm(size[:, :, None] + size[:, None, :], x, x.transpose(1, 2), alpha=-2)
        d2.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        d2, near = d2.topk(k, dim=2, largest=False)
        close = d2 < 1e-7 * (size[:, :, None] + size[:, :, None].expand(-1, -1, k).gather(1, near))
        if bool(close.any()):
            g, i, j = close.nonzero(as_tuple=True)
            pairs = zip(g.split(PAIR_BLOCK), i.split(PAIR_BLOCK), near[g, i, j].split(PAIR_BLOCK), strict=True)
            d2[close] = torch.cat([(x[a, b] - x[a, c]).square().sum(dim=1) for a, b, c in pairs])
            d2 = d2.sort(dim=2).values
        found.append(d2.sqrt() / scale)
    return torch.cat(found)


class Search:
    """One search under way. Holds the best pairs found so far; every method only ever improves them."""

    def __init__(self, rows: Tensor, coordinates: Tensor | None, k: int) -> None:
        n, width = rows.shape
        self.rows, self.coordinates, self.k = rows, coordinates, k
        self.scale = scale_of(rows)
        self.best = torch.full((n, k), torch.inf, dtype=torch.float64, device=rows.device)
        self.index = torch.full((n, k), -1, dtype=torch.int64, device=rows.device)
        self.order = torch.arange(n, device=rows.device)
        self.cell_starts = [0, n]
        self.cell_centers: Tensor | None = None
        self.in_pairs = False
        self._merging = threading.Lock()
        # Rounding of a float32 inner product of length p, products and sums (Higham, gamma_p), with a margin for the
        # rounding of the coordinates themselves and of the three-term sum that makes a squared distance of it.
        axes = width if coordinates is None else coordinates.shape[1]
        self.allowance = 4 * (axes + 16) * FLOAT32_UNIT

    def block(self, which: Tensor, origin: Tensor) -> Tensor:
        """Coordinates of some rows relative to ``origin``, taken off before rounding: the error is then local too."""
        if self.coordinates is not None:
            return ((self.coordinates[which] - origin) * self.scale).float()
        rows = self.rows[which]
        if rows.dtype == torch.float64:
            return ((rows - origin) * self.scale).float()
        block = rows.float() - origin
        return block if self.scale == 1 else block.mul_(self.scale)

    def origin(self, which: Tensor) -> Tensor:
        """The middle of some rows. Any constant would be valid; this one keeps what is multiplied small."""
        if self.coordinates is not None:
            return self.coordinates[which].mean(dim=0)
        middle = mean_row(self.rows[which])
        return middle if self.rows.dtype == torch.float64 else middle.float()

    def order_rows(self, generator: torch.Generator) -> None:
        """Sort rows by their nearest landmark, landmarks along their own leading axis."""
        n = len(self.order)
        cells = n // CELL_ROWS
        if cells < 2 * NEAR_CELLS:
            return
        device = self.rows.device
        picks = torch.randperm(n, generator=generator)[:cells].to(device)
        middle = self.origin(picks)
        marks = self.block(picks, middle)
        axis = torch.linalg.svd(marks - marks.mean(0), full_matrices=False).Vh[0]
        marks = marks[(marks @ axis).argsort()]
        label = torch.cat([_nearest_mark(self.block(part, middle), marks) for part in self.order.split(8192)])
        self.order = label.argsort(stable=True)
        counts = torch.bincount(label, minlength=cells)
        self.cell_starts = [0, *counts.cumsum(0).tolist()]
        self.cell_centers = marks

    def first_bounds(self) -> None:
        """Bound every row's k-th distance from above, by exact distances to its best-looking rows in near cells."""
        starts = self.cell_starts
        if self.cell_centers is None:
            near = torch.zeros((1, 1), dtype=torch.int64)
        else:
            gaps = torch.cdist(self.cell_centers, self.cell_centers)
            near = gaps.topk(1 if self.coordinates is None else NEAR_CELLS, largest=False).indices.cpu()
        for cell, others in enumerate(near.tolist()):
            mine = self.order[starts[cell] : starts[cell + 1]]
            if len(mine) == 0:
                continue
            pool = torch.cat([self.order[starts[c] : starts[c + 1]] for c in others])
            if len(pool) <= self.k:
                continue  # the sweep finds everything; these rows only start without a bound
            for part in mine.split(TILE_ROWS):
                for columns in pool.split(4 * TILE_COLUMNS):
                    self._seed_block(part, columns)

    def _seed_block(self, part: Tensor, columns: Tensor) -> None:
        origin = self.origin(part)
        bound = self._lower_bounds(self.block(part, origin), self.block(columns, origin))
        bound.masked_fill_(part[:, None] == columns[None, :], torch.inf)
        take = min(self.k, len(columns))
        value, position = bound.topk(take, dim=1, largest=False)
        usable = torch.isfinite(value) & (value < self.best[part, -1:])
        i = part[:, None].expand(-1, take)[usable]
        self.measure(i, columns[position[usable]], doubtful=self.coordinates is not None)

    def search_from(self, part: Tensor, take: int) -> Tensor:
        """Measure the ``take`` most promising rows of each row of ``part``; return the rows this did not settle."""
        value, index = self._candidates(part, take)
        few = max(1, EXACT_PAIRS // take)
        d2 = torch.cat([self._exact_block(i, j) for i, j in zip(part.split(few), index.split(few), strict=True)])
        self.best[part], position = d2.topk(self.k, dim=1, largest=False, sorted=True)
        self.index[part] = index.gather(1, position)
        if take >= len(self.rows) - 1:
            return part[:0]
        return part[value[:, -1] < self._limit(part)]

    def _candidates(self, part: Tensor, take: int) -> tuple[Tensor, Tensor]:
        """The ``take`` smallest lower bounds of each row of ``part``, ascending, and whose they are."""
        if self.in_pairs:
            best = self._square.index_select(0, part).topk(take, dim=1, largest=False)
            return best.values, best.indices
        if len(self.rows) <= FEW_ROWS:
            block, size = self._whole
            # The size of the row itself is the same for all its columns: it is added to the few that are chosen.
            if self.by_onednn:
                bound = times_transposed(block[part].mul_(-2), block, size)
            else:
                bound = torch.addmm(size[None, :], block[part], block.T, alpha=-2)
            bound.scatter_(1, part[:, None], torch.inf)
            best = bound.topk(take, dim=1, largest=False)
            return best.values.add_(size[part, None]), best.indices
        origin = self.origin(part)
        block = self.block(part, origin)
        value = block.new_empty((len(part), 0))
        index = part.new_empty((len(part), 0))
        for columns in self.order.split(8 * TILE_COLUMNS):
            bound = self._lower_bounds(block, self.block(columns, origin))
            bound.masked_fill_(part[:, None] == columns[None, :], torch.inf)
            best = bound.topk(min(take, len(columns)), dim=1, largest=False)
            value = torch.cat([value, best.values], dim=1)
            index = torch.cat([index, columns[best.indices]], dim=1)
            value, position = value.topk(min(take, value.shape[1]), dim=1, largest=False, sorted=True)
            index = index.gather(1, position)
        return value, index

    @cached_property
    def by_onednn(self) -> bool:
        """Whether products of few rows go to oneDNN: bounds allow for rounding in whatever order sums are formed."""
        return len(self.rows) <= FEW_ROWS and served(self._whole[0])

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        """All rows relative to their mean, and their shrunken squared lengths: worth the memory where there are few."""
        block = self.block(self.order, self.origin(self.order))
        return block, torch.linalg.vector_norm(block, dim=1).square_().mul_(1 - self.allowance)

    @cached_property
    def _square(self) -> Tensor:
        """Lower bounds of all pairs, infinite on the diagonal; what lies below it is a copy of what lies above."""
        block, size = self._whole
        n = len(block)
        bound = scratch((n, n), block)
        for at in range(0, n, ANCHOR_ROWS):
            end = min(at + ANCHOR_ROWS, n)
            strip = bound[at:end, at:]
            torch.addmm(size[None, at:].expand(len(strip), -1), block[at:end], block[at:].T, alpha=-2, out=strip)
            strip.add_(size[at:end, None])
            bound[end:, at:end] = strip[:, end - at :].T
        bound.fill_diagonal_(torch.inf)
        return bound

    def _exact_block(self, i: Int[Tensor, "m"], j: Int[Tensor, "m t"]) -> Float[Tensor, "m t"]:
        """Squared distances between each row and its own candidates, by differences in float64."""
        difference = self.rows.index_select(0, j.reshape(-1)).double().view(*j.shape, -1)
        difference -= self.rows[i].double()[:, None]
        return torch.linalg.vector_norm(difference.mul_(self.scale) if self.scale != 1 else difference, dim=2).square_()

    def sweep(self) -> None:
        """Visit every pair of tiles once; measure each pair whose lower bound beats the k-th distance of either row."""
        n = len(self.order)
        for start in range(0, n, TILE_ROWS):
            rows = self.order[start : start + TILE_ROWS]
            origin = self.origin(rows)
            block = self.block(rows, origin)
            for column in range(start, n, TILE_COLUMNS):
                columns = self.order[column : column + TILE_COLUMNS]
                bound = self._lower_bounds(block, self.block(columns, origin))
                overlap = column < start + TILE_ROWS
                if overlap:  # each pair once: only columns after the row
                    later = torch.arange(column, column + len(columns), device=bound.device)
                    own = torch.arange(start, start + len(rows), device=bound.device)
                    bound.masked_fill_(later[None, :] <= own[:, None], torch.inf)
                self._visit(bound, rows, columns)

    def _visit(self, bound: Tensor, rows: Tensor, columns: Tensor) -> None:
        row_limit, column_limit = self._limit(rows), self._limit(columns)
        hot_rows = (bound.amin(dim=1) < row_limit).nonzero().reshape(-1)
        hot_columns = (bound.amin(dim=0) < column_limit).nonzero().reshape(-1)
        i, j = [], []
        if len(hot_rows):
            a, b = (bound[hot_rows] < row_limit[hot_rows, None]).nonzero(as_tuple=True)
            i.append(rows[hot_rows[a]])
            j.append(columns[b])
        if len(hot_columns):
            a, b = (bound[:, hot_columns] < column_limit[hot_columns][None, :]).nonzero(as_tuple=True)
            i.append(columns[hot_columns[b]])
            j.append(rows[a])
        if i:
            self.measure(torch.cat(i), torch.cat(j), doubtful=self.coordinates is not None)

    def _limit(self, which: Tensor) -> Tensor:
        """The k-th squared distance, rounded up to float32, so that a comparison in float32 never drops a pair."""
        limit = self.best[which, -1]
        # Beside one enormous row all others are tiny, and their squares would vanish in float32 and hide every pair.
        return torch.where(limit > 0, (limit * (1 + 2.0**-22)).float() + 1e-36, 0.0)

    def _lower_bounds(self, a: Tensor, b: Tensor) -> Tensor:
        """A tile of certified lower bounds on squared distances."""
        shrink = 1 - self.allowance
        a2 = torch.linalg.vector_norm(a, dim=1).square_().mul_(shrink)
        b2 = torch.linalg.vector_norm(b, dim=1).square_().mul_(shrink)
        tile = torch.addmm(b2[None, :].expand(len(a), -1), a, b.T, alpha=-2)
        return tile.add_(a2[:, None])

    def measure(self, i: Tensor, j: Tensor, *, doubtful: bool) -> None:
        """Measure pairs by differences and keep what improves row ``i``; of no pair by two threads at once.

        ``doubtful`` are those of which most will be found to be farther: that is seen in float32 already.
        """
        for a, b in zip(i.split(ROUND_PAIRS), j.split(ROUND_PAIRS), strict=True):
            known = (self.index[a] == b[:, None]).any(dim=1)
            a, b = a[~known], b[~known]
            if doubtful and len(a) >= PAIR_BLOCK and self.rows.dtype != torch.float64:
                # A difference is wrong by half a unit, their sum by no more units than there are columns.
                margin = max(1e-4, self.rows.shape[1] * FLOAT32_UNIT)
                keep = self._apart(a, b, torch.float32) * (1 - margin) < self._limit(a)
                a, b = a[keep], b[keep]
            d2 = self._apart(a, b, torch.float64)
            keep = d2 < self.best[a, -1]
            with self._merging:
                self._merge(a[keep], b[keep], d2[keep])

    def _apart(self, i: Int[Tensor, "m"], j: Int[Tensor, "m"], dtype: torch.dtype) -> Float[Tensor, "m"]:
        """Squared distances of pairs, by differences in this precision."""
        found = self.best.new_empty(len(i), dtype=dtype)
        # One place for all blocks: fresh memory may cost more time than what is done in it.
        shape = (min(PAIR_BLOCK, len(i)), self.rows.shape[1])
        one, other = self.rows.new_empty((2, *shape))
        wide = one if one.dtype == dtype else one.new_empty(shape, dtype=dtype)
        for at in range(0, len(i), PAIR_BLOCK):
            a, b = i[at : at + PAIR_BLOCK], j[at : at + PAIR_BLOCK]
            torch.index_select(self.rows, 0, a, out=one[: len(a)])
            torch.index_select(self.rows, 0, b, out=other[: len(a)])
            difference = wide[: len(a)] if wide is one else wide[: len(a)].copy_(one[: len(a)])
            difference.sub_(other[: len(a)])
            if self.scale != 1:
                difference.mul_(self.scale)
            found[at : at + PAIR_BLOCK] = torch.linalg.vector_norm(difference, dim=1).square_()
        return found

    def _merge(self, i: Tensor, j: Tensor, d2: Tensor) -> None:
        """Fold measured pairs into the k best of each row: the best k new ones of a row meet its k old ones."""
        if len(i) == 0:
            return
        order = d2.argsort()
        order = order[i[order].argsort(stable=True)]
        i, j, d2 = i[order], j[order], d2[order]
        touched, inverse, counts = torch.unique_consecutive(i, return_inverse=True, return_counts=True)
        rank = torch.arange(len(i), device=i.device) - (counts.cumsum(0) - counts)[inverse]
        fits = rank < self.k
        new_d = self.best.new_full((len(touched), self.k), torch.inf)
        new_j = self.index.new_full((len(touched), self.k), -1)
        new_d[inverse[fits], rank[fits]] = d2[fits]
        new_j[inverse[fits], rank[fits]] = j[fits]
        both_d = torch.cat([self.best[touched], new_d], dim=1)
        both_j = torch.cat([self.index[touched], new_j], dim=1)
        self.best[touched], position = both_d.topk(self.k, dim=1, largest=False, sorted=True)
        self.index[touched] = both_j.gather(1, position)

    def result(self) -> Neighbors:
        """What was found."""
        return Neighbors(self.best.sqrt() / self.scale, self.index)


def _nearest_mark(block: Tensor, marks: Tensor) -> Tensor:
    return torch.addmm(marks.square().sum(1)[None, :].expand(len(block), -1), block, marks.T, alpha=-2).argmin(1)
