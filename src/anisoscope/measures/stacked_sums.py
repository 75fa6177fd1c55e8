"""Sums over the rows of several sites: covariances, and what error bars ask of single rows; see ``measures.stacked``.

Where rows are told apart in cells, the rows of each are multiplied about their own mean and put together about the
common one: a sum of squares, so that cells far from each other cost no digits on either side. S sites, C cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_run
from anisoscope.measures import row_kernels
from anisoscope.measures.cells import Cells, CellSums
from anisoscope.measures.row_kernels import CentredRows
from anisoscope.measures.uncertainty import spread_runs
from anisoscope.rows import largest_sizes
from anisoscope.stats import residues
from anisoscope.stats.gram_matrices import cell_grams, grams, in_parts

WIDE_CELLS = 1 << 27  # entries held as float64 at a time
MOST_MEAN = 0.5  # of second moments about zero that a covariance is made of


@dataclass(frozen=True)
class Sums:
    """Of each site: covariance, its total, fourth powers of the radii, and for error bars centred rows, with their
    squared lengths.

    ``size`` is the largest entry and ``mean`` the largest of the mean, both by size, and NaN where an entry is.
    """

    n: int
    size: Float[Tensor, "s"]
    mean: Float[Tensor, "s"]
    covariance: Float[Tensor, "s d d"]
    total: Float[Tensor, "s"]
    fourth: Float[Tensor, "s"]
    rows: Float[Tensor, "s m d"]
    radius2: Float[Tensor, "s m"]
    groups: int
    cosines: dict[str, Tensor]

    @classmethod
    def of(
        cls, rows: Float[Tensor, "s n d"], *, directions: bool, exact: bool, cells: Cells | None = None
    ) -> tuple[Sums, CellSums | None]:
        """Of all rows, and of each cell where there are cells.

        ``exact``: products in float64 at every width, or, where ``residues.fits``, of integers, from centred rows that
        are rounded to float32: entries are then off by about 1e-8 of the lengths of both columns. Small singular
        values, which an effective rank counts in full, are kept either way; in parts of float16 they drown.
        """
        sites, n, width = rows.shape
        covariance = rows.new_empty(sites, width, width, dtype=torch.float64)
        scatter = None if cells is None else rows.new_empty(sites, len(cells.rows), width, width, dtype=torch.float64)

        def multiply(few: slice, seen: Seen) -> None:
            if cells is None or scatter is None:
                covariance[few] = grams(seen.centred.rows, exact=exact)
            else:
                _put_together(seen, cells, scatter[few], covariance[few], exact=exact)

        joined = _tables(rows, multiply, directions=directions, exact=exact, cells=cells)
        by_cell = None
        if cells is not None and scatter is not None:
            by_cell = CellSums(cells, joined["mean of all"], joined.pop("mean by cell"), scatter)
        del joined["mean of all"]
        return cls._made(n, covariance.div_(n - 1), joined), by_cell

    @classmethod
    def begun(cls, rows: Float[Tensor, "s n d"], *, directions: bool) -> Callable[[Float[Tensor, "s d d"]], Sums]:
        """All but the covariance; the function returned makes it of second moments, about zero, that somebody else
        forms. NaN where the mean is most of them: digits are lost to it."""
        joined, n = _tables(rows, lambda _few, _seen: None, directions=directions, exact=False), rows.shape[1]
        mean = joined.pop("mean of all")

        def made(second: Float[Tensor, "s d d"]) -> Sums:
            whole = second.diagonal(dim1=1, dim2=2).sum(dim=1)
            most = n * mean.square().sum(dim=1) > MOST_MEAN * whole
            apart = (mean * (n / (n - 1))).masked_fill_(most[:, None], torch.nan)[:, None]
            return cls._made(n, torch.baddbmm(second, mean[:, :, None], apart, beta=1 / (n - 1), alpha=-1), joined)

        return made

    @classmethod
    def _made(cls, n: int, covariance: Float[Tensor, "s d d"], joined: dict[str, Tensor]) -> Sums:
        names = ("size", "mean", "fourth", "rows", "radius2")
        size, mean, fourth, some, radius2 = (joined.pop(name) for name in names)
        total = covariance.diagonal(dim1=1, dim2=2).sum(dim=1)
        return cls(n, size, mean, covariance, total, fourth, some, radius2, cut_runs(n)[0], joined)

    @functools.cached_property
    def square(self) -> Float[Tensor, "s"]:
        """``tr C^2`` of the covariance."""
        return torch.linalg.vector_norm(self.covariance.flatten(1), dim=1).square_()

    def means(self, influence: Float[Tensor, "s m"]) -> Float[Tensor, "s g"]:
        """Of each block of rows."""
        return influence.double().unflatten(1, (self.groups, -1)).mean(dim=2)

    def table(self) -> dict[str, Tensor]:
        """What is told of them."""
        return {
            "size": self.size, "total": self.total, "square": self.square, "fourth": self.fourth, "mean": self.mean,
            **self.cosines,
        }  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Rows of a few sites: the largest entry, the mean, and rows without it, those of each cell without its own and
    side by side where there are cells, whose ``means`` these are. Squares are about the mean of all."""

    size: Float[Tensor, "s"]
    mean: Float[Tensor, "s d"]
    centred: CentredRows
    units: Callable[[], Float[Tensor, "s d"]]
    """Gives the sum of unit rows."""
    means: Float[Tensor, "s c d"] | None = None


def _seen(rows: Float[Tensor, "s n d"], *, exact: bool, cells: Cells | None) -> Seen:
    _, n, width = rows.shape
    near = residues.fits(n, width, rows.device) if exact else in_parts(width, rows.device)
    visited = visited_by_kernels if kernels_run(rows.device) else visited_plainly
    return visited(rows, torch.float32 if near else torch.float64, cells)


def _put_together(
    seen: Seen, cells: Cells, scatter: Float[Tensor, "s c d d"], whole: Float[Tensor, "s d d"], *, exact: bool
) -> None:
    """Write the scatter of each cell's rows about their own mean, and that of all rows about theirs."""
    assert seen.means is not None
    cell_grams(seen.centred.rows, cells.ends, scatter, exact=exact)
    apart = (seen.means - seen.mean[:, None]) * cells.counts.sqrt()[:, None]
    torch.sum(scatter, dim=1, out=whole)
    whole.baddbmm_(apart.mT, apart)


def _tables(
    rows: Float[Tensor, "s n d"],
    multiply: Callable[[slice, Seen], None],
    *,
    directions: bool,
    exact: bool,
    cells: Cells | None = None,
) -> dict[str, Tensor]:
    """What is kept of all sites. A few of them are seen at a time, and ``multiply`` is given what was seen."""
    sites, n, width = rows.shape
    step = max(1, WIDE_CELLS // (n * width))  # sites whose rows fit into memory twice as float64
    parts = []
    for few in (slice(first, first + step) for first in range(0, sites, step)):
        seen = _seen(rows[few], exact=exact, cells=cells)
        multiply(few, seen)
        parts.append(_table(rows[few], seen, directions=directions))
        del seen
    return parts[0] if len(parts) == 1 else {name: torch.cat([one[name] for one in parts]) for name in parts[0]}


def _table(rows: Float[Tensor, "s n d"], seen: Seen, *, directions: bool) -> dict[str, Tensor]:
    """What is kept of a few sites."""
    centred, largest = seen.centred, torch.linalg.vector_norm(seen.mean, torch.inf, dim=1)
    found = _cosines(rows, centred.lengths.float(), seen.units()) if directions else {}
    blocks = _runs(rows)
    some = torch.empty(blocks.shape, dtype=torch.float32, device=rows.device)
    if seen.means is None:
        some.copy_(_runs(centred.rows))
    else:  # those at hand are in another order
        torch.sub(blocks, seen.mean[:, None, None], out=some)  # in float64, rounded at the end
        found["mean by cell"] = seen.means
    return found | {
        "size": torch.maximum(seen.size, largest.float()),  # entries that are not numbers are told by their mean alone
        "mean": largest,
        "mean of all": seen.mean,
        "fourth": centred.squares.square().sum(dim=1),
        "rows": some.flatten(1, 2),
        "radius2": _runs(centred.squares[:, :, None]).flatten(1),
    }


def visited_plainly(rows: Float[Tensor, "s n d"], dtype: torch.dtype, cells: Cells | None = None) -> Seen:
    """What is seen of rows, which are rounded to a type once they are centred."""
    size = largest_sizes(rows)
    wide = rows.double()
    length = torch.linalg.vector_norm(rows, dim=2)
    units = (length.reciprocal().double()[:, None] @ wide)[:, 0]
    mean, means, own = wide.mean(dim=1), None, None
    if cells is not None:
        own, means = wide.new_empty(wide.shape, dtype=dtype), wide.new_empty(len(wide), len(cells.rows), wide.shape[2])
        for cell, part in enumerate(own.split([len(at) for at in cells.rows], dim=1)):
            some = wide.index_select(1, cells.rows[cell])
            means[:, cell] = some.mean(dim=1)
            part.copy_(some.sub_(means[:, cell, None]))
    wide = wide.sub_(mean[:, None])
    squares = torch.linalg.vector_norm(wide, dim=2).square_()
    centred = CentredRows(wide.to(dtype) if own is None else own, squares, length.double())
    return Seen(size, mean, centred, lambda: units, means)


def visited_by_kernels(rows: Float[Tensor, "s n d"], dtype: torch.dtype, cells: Cells | None = None) -> Seen:
    """The same in three visits of the rows, and one more for each cell but the first."""
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    means = None
    if cells is None:
        sums = row_kernels.column_sums(rows)
        mean = sums.total / rows.shape[1]
        centred = row_kernels.centred(rows, mean, dtype)
    else:
        # Each by itself: the rest of a sum over all would bear the rounding of what was taken off.
        each = [row_kernels.column_sums(rows, one.expand(len(rows), -1)) for one in cells.inside]
        sums, totals = each[0], torch.stack([one.total for one in each], dim=1)
        mean, means = totals.sum(dim=1) / rows.shape[1], totals / cells.counts[:, None]
        out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        centred = row_kernels.centred_by_cell(rows, mean, means, cells.number, cells.place, out)
    size = torch.maximum(sums.most, -sums.least)
    units = functools.partial(_unit_sums, rows, centred)
    return Seen(size, mean, centred, units, means)


def _unit_sums(rows: Float[Tensor, "s n d"], centred: CentredRows) -> Float[Tensor, "s d"]:
    return row_kernels.column_sums(rows, centred.lengths.reciprocal()).total


def _runs(rows: Float[Tensor, "s n d"]) -> Float[Tensor, "s g l d"]:
    """``spread_runs`` of each site."""
    n = rows.shape[1]
    groups, length, _ = cut_runs(n)
    stride = n // groups
    return rows[:, : groups * stride].unflatten(1, (groups, stride))[:, :, :length]


def _cosines(
    rows: Float[Tensor, "s n d"], length: Float[Tensor, "s n"], total: Float[Tensor, "s d"]
) -> dict[str, Tensor]:
    """Of ``mean_cosine``: the squared sum of unit rows, projections on it by block, and the spread of some cosines."""
    blocks, lengths = _runs(rows), _runs(length[:, :, None])[:, :, :, 0]
    along = (blocks @ total.float()[:, None, :, None])[:, :, :, 0] / lengths
    some = blocks[:, :, :: max(1, lengths[0].numel() // 256)].flatten(1, 2)
    some = some / torch.linalg.vector_norm(some, dim=2, keepdim=True)
    count = some.shape[1]
    gram = (some @ some.mT).double().flatten(1)
    # Behind each entry of the diagonal stand as many others as there are rows: the entries of all pairs.
    apart = gram[:, 1:].unflatten(1, (count - 1, count + 1))[:, :, :-1]
    return {
        "cosine": total.square().sum(dim=1),
        "along": along.double().mean(dim=2),
        "pairs": apart.var(dim=(1, 2)),
        "length": torch.stack(torch.aminmax(length, dim=1), dim=1),
    }


@functools.lru_cache(maxsize=16)
def cut_runs(n: int) -> tuple[int, int, str]:
    """How ``spread_runs`` cuts so many rows: blocks, rows in each, and what their spread is over."""
    runs = spread_runs(torch.empty(n, 0), n)
    return runs.blocks.shape[0], runs.blocks.shape[1], runs.over
