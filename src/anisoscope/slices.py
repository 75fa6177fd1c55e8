"""Slices of a sample: all tokens, all but position 0, all dimensions but the massive ones.

A few positions or dimensions of huge size push every global measure to its end (SpectralRatio to 1), so each is
reported with and without them. Moments of the tokens at position 0 and of the others are summed apart, batch by batch,
and merged as a slice needs them: one pass over the rows serves all slices, the whole and the batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.measures.base import Needs, Workspace
from anisoscope.stats.directions import Directions
from anisoscope.stats.memory import scratch
from anisoscope.stats.moments import Moments

ALL = "all"
NO_POSITION_0 = "no position 0"
NO_MASSIVE = "no massive dimensions"
MOST_RUNS = 16  # of columns that are copied run by run
PIECE_ROWS = 256  # rows squared at a time, so that they stay in cache
MASSIVE = 100.0
"""A dimension is massive if its mean square is this many times the median one (ten times the typical size)."""


def massive_dimensions(rows: Float[Tensor, "n d"]) -> Int[Tensor, "m"]:
    """Columns whose mean square exceeds ``MASSIVE`` times the median of all columns, ascending; never all of them."""
    size = sum(part.double().square_().sum(dim=0) for part in rows.split(PIECE_ROWS))
    assert isinstance(size, Tensor)
    return (size > MASSIVE * size.median()).nonzero().reshape(-1)


@dataclass(frozen=True)
class States:
    """Moments and directions of the same rows, as far as they are needed."""

    count: int
    moments: Moments | None
    directions: Directions | None

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], needs: Needs) -> States:
        """Of one set of rows."""
        return cls(
            len(rows),
            Moments.of(rows, needs.moments) if needs.moments else None,
            Directions.empty(rows.shape[1], rows.device).update(rows) if needs.directions else None,
        )

    def merge(self, other: States) -> States:
        """Of both sets of rows."""
        return States(
            self.count + other.count,
            None if self.moments is None or other.moments is None else self.moments.merge(other.moments),
            None if self.directions is None or other.directions is None else self.directions.merge(other.directions),
        )

    def narrowed(self, columns: Int[Tensor, "k"], rows: Float[Tensor, "n d"]) -> States:
        """Of the same rows cut to some columns."""
        moments = None if self.moments is None else self.moments.narrowed(columns, rows)
        if self.directions is None:
            return States(self.count, moments, None)
        return States(
            self.count, moments, Directions.empty(len(columns), rows.device).update(gathered(rows, columns, 1))
        )

    def workspace(self, rows: Float[Tensor, "n d"]) -> Workspace:
        """A workspace of these states; ``rows`` serve its error bars, and may be none where no bar is wanted."""
        return Workspace.of_states(
            rows, count=self.count, moments=self.moments, directions=self.directions, needs=Needs(moments="float64")
        )


@dataclass(frozen=True)
class Sliced:
    """States of each batch, position 0 apart from the rest."""

    rest: tuple[States, ...]
    first: tuple[States, ...]
    left_over: States
    """Rows that fill no batch belong to the whole all the same; position 0 among them is in ``left_over_first``."""
    left_over_first: States

    @classmethod
    def of(
        cls, rows: Float[Tensor, "n d"], is_first: Bool[Tensor, "n"], needs: Needs, batch_rows: int, batches: int
    ) -> Sliced:
        """Sum up rows in batches of ``batch_rows``."""
        cuts = [slice(i * batch_rows, (i + 1) * batch_rows) for i in range(batches)]
        tail = slice(batches * batch_rows, None)

        def states(cut: slice, which: Bool[Tensor, "n"]) -> States:
            return States.of(chosen_rows(rows[cut], which[cut]), needs)

        rest, first = (tuple(states(cut, which) for cut in cuts) for which in (~is_first, is_first))
        return cls(rest, first, states(tail, ~is_first), states(tail, is_first))

    def batch(self, number: int, where: str) -> States:
        """One batch of a slice."""
        rest = self.rest[number]
        return rest.merge(self.first[number]) if where == ALL else rest

    def whole(self, where: str) -> States:
        """All rows of a slice."""
        parts = (*self.rest, self.left_over)
        if where == ALL:
            parts = (*parts, *self.first, self.left_over_first)
        return reduce(States.merge, parts)

    @property
    def has_first(self) -> bool:
        """Whether any row stood at position 0."""
        return any(state.count for state in (*self.first, self.left_over_first))


def chosen_rows(rows: Float[Tensor, "n d"], which: Bool[Tensor, "n"]) -> Float[Tensor, "m d"]:
    """The rows where ``which`` is True, by number: several times as fast as by a mask."""
    return gathered(rows, which.nonzero().reshape(-1))


def gathered(rows: Float[Tensor, "n d"], numbers: Int[Tensor, "m"], axis: int = 0) -> Float[Tensor, "k l"]:
    """Rows, or with ``axis=1`` columns, by number."""
    shape = (len(numbers), rows.shape[1]) if axis == 0 else (len(rows), len(numbers))
    out = scratch(shape, rows)
    if axis == 0 or rows.device.type != "cpu":
        return torch.index_select(rows, axis, numbers, out=out)
    # Columns one by one are four times as slow as runs of them, and where a few were left out there are few runs.
    ends = [*((numbers.diff() != 1).nonzero().reshape(-1) + 1).tolist(), len(numbers)]
    if len(ends) > MOST_RUNS or not len(numbers):
        return torch.index_select(rows, axis, numbers, out=out)
    begin = 0
    for end in ends:
        first = int(numbers[begin])
        out[:, begin:end] = rows[:, first : first + end - begin]
        begin = end
    return out


def no_rows(like: Float[Tensor, "n d"]) -> Float[Tensor, "0 d"]:
    """No row of the same width: error bars from it are None, and cost nothing."""
    return like[:0]


def kept_columns(width: int, without: Int[Tensor, "m"]) -> Int[Tensor, "k"]:
    """The columns that are left."""
    keep = torch.ones(width, dtype=torch.bool, device=without.device)
    keep[without] = False
    return keep.nonzero().reshape(-1)
