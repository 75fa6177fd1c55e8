"""Rows told apart in cells, and what is summed over each: one pass serves measures of all rows and fits to some."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import ShapeError


@dataclass(frozen=True)
class Cells:
    """Which rows each cell has; every row is in one of them. All of it is where the rows are.

    ``number`` is the cell of each row, ``place`` where the row stands if cells come one after the other, and ``filled``
    the same if each of them is filled up to the number of the longest. ``inside`` is 1 where a row is in a cell, else
    0; ``counts`` are the rows of each.
    """

    rows: tuple[Int[Tensor, "_"], ...]
    number: Int[Tensor, "n"]
    place: Int[Tensor, "n"]
    filled: Int[Tensor, "n"]
    inside: Float[Tensor, "c n"]
    counts: Float[Tensor, "c"]

    @classmethod
    def of(cls, rows: Sequence[Int[Tensor, "_"]], n: int) -> Cells:
        """From the rows of each cell."""
        counts, device = [len(one) for one in rows], rows[0].device
        here = [one.cpu() for one in rows]
        order = torch.cat(here)
        if min(counts) == 0 or not torch.equal(order.sort().values, torch.arange(n)):
            raise ShapeError(f"each of {n} rows is in one of {len(counts)} cells, none of which is empty: got {counts}")
        number, place = torch.empty(2, n, dtype=torch.int64)
        number[order] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        place[order] = torch.arange(n)
        begins = torch.tensor([0, *itertools.accumulate(counts)])
        filled = place - begins[number] + number * max(counts)
        inside = torch.nn.functional.one_hot(number, len(counts)).T.double().contiguous()
        made = (number, place, filled, inside, torch.tensor(counts, dtype=torch.float64))
        return cls(tuple(rows), *(one.to(device) for one in made))

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each cell ends, one after the other."""
        return tuple(itertools.accumulate(len(one) for one in self.rows))


@dataclass(frozen=True)
class CellSums:
    """Of each site: the mean of all rows, and of each cell its mean and the scatter of its rows about that, float64."""

    cells: Cells
    mean: Float[Tensor, "s d"]
    means: Float[Tensor, "s c d"]
    scatter: Float[Tensor, "s c d d"]

    def of_sites(self, places: Int[Tensor, "_"]) -> CellSums:
        """Those of some sites."""
        return CellSums(self.cells, self.mean[places], self.means[places], self.scatter[places])


@dataclass(frozen=True)
class SiteSums:
    """What was found of the rows of each site on the way: the largest of their entries by size, NaN where one is not a
    number, and sums by cell where cells were given."""

    size: Float[Tensor, "s"]
    by_cell: CellSums | None
