"""Sketch: the leading part of a scatter matrix too wide to hold, with a certificate of what was left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, EmptyInputError, OptionError, ShapeError
from anisoscope.rows import mean_row


@dataclass(frozen=True)
class Sketch:
    """Frequent Directions (Liberty; Ghashami, Liberty, Phillips, Woodruff) of the centred rows.

    Let ``S = sum (x_i - m)(x_i - m)^T`` be the scatter of the rows seen and ``B`` the matrix ``rows_RD`` kept here.
    For every unit vector ``v`` and every tree of updates and merges

        0 <= v^T (S - B^T B) v <= shrinkage <= (trace - |B|_F^2) / (rank + 1) <= trace / (rank + 1),

    up to rounding, a few ``eps * trace``. So each eigenvalue of S exceeds that of ``B^T B`` by at most ``shrinkage``,
    and nothing is lost where S has rank ``rank`` or less. ``count``, ``mean`` and ``trace = tr S`` are exact.

    Why: with d the gap between the means of two sets, the scatter of their union is ``S_a + S_b + (n_a n_b / n) d d^T``
    (Chan, Golub, LeVeque), so the stacked rows of both sketches and one row ``sqrt(n_a n_b / n) d`` stand for it, and
    no row ever has to be centred again. A shrink then takes the (rank + 1)-th squared singular value off each squared
    singular value: off no direction more than that, and off the trace at least rank + 1 times as much.
    """

    rank: int
    count: int
    mean: Float[Tensor, "d"]
    trace: Float[Tensor, ""]
    rows_RD: Float[Tensor, "r d"]
    """At most 2 rank rows: half of them a buffer, so that a shrink comes once in ``rank`` rows and not with each."""
    shrinkage: Float[Tensor, ""]

    @classmethod
    def empty(cls, rank: int, width: int, device: torch.device | str = "cpu") -> Sketch:
        """The state of no rows."""
        if rank < 1:
            raise OptionError(f"rank={rank}: a sketch keeps one direction or more")
        mean = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(rank, 0, mean, mean.new_zeros(()), mean.new_zeros(0, width), mean.new_zeros(()))

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.mean.shape[0]

    def update(self, rows: Float[Tensor, "n d"]) -> Sketch:
        """The state after these rows too."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ShapeError(f"a sketch of width {self.width} takes (n, {self.width}), got {tuple(rows.shape)}")
        if len(rows) == 0:
            return self
        rows = rows.detach()
        mean = mean_row(rows).to(self.mean.device)
        after = self._joined(len(rows), mean)
        if len(rows) == 1:  # it is its own mean; a row of zeros would only fill the buffer
            return after
        # A buffer's worth at a time: a float64 copy of a whole wide chunk could be larger than the sketch itself.
        for block in torch.split(rows, self.rank):
            y_ND = block.to(mean) - mean
            after = replace(after, trace=after.trace + (y_ND * y_ND).sum())._with_rows(y_ND)
        return after

    def merge(self, other: Sketch) -> Sketch:
        """The state of both sets of rows together."""
        if self.width != other.width:
            raise ShapeError(f"cannot merge sketches of width {self.width} and {other.width}")
        if self.rank != other.rank:
            raise OptionError(f"cannot merge sketches with rank={self.rank} and rank={other.rank}")
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        device = self.mean.device
        after = self._joined(other.count, other.mean.to(device))
        after = replace(
            after,
            trace=after.trace + other.trace.to(device),
            shrinkage=after.shrinkage + other.shrinkage.to(device),
        )
        return after._with_rows(other.rows_RD.to(device))

    def eigenvalues(self) -> Float[Tensor, "k"]:
        """Lower bounds of the leading ``min(rank, width)`` eigenvalues of S, descending; each + shrinkage is an upper.

        Of the scatter: divide by ``count - 1`` for the covariance.
        """
        found = torch.linalg.eigvalsh(self.rows_RD @ self.rows_RD.T).flip(0).clamp_min(0.0)
        values = torch.zeros_like(self.mean[: self.rank])  # where fewer rows were seen, the rest are 0
        values[: len(found)] = found[: len(values)]
        return values

    def top_share(self) -> tuple[float, float]:
        """Certified bounds ``(low, high)`` of ``spectral_ratio = lambda_1 / sum lambda``, up to rounding."""
        if self.count == 0:
            raise EmptyInputError("top_share of a sketch that has seen no row")
        trace = float(self.trace)
        if trace <= 0:
            raise DegenerateError(f"the {self.count:,} rows of the sketch are all equal: they have no spectrum")
        largest = float(self.eigenvalues()[0])
        # S has at most count - 1 and at most width eigenvalues, and the largest is no less than their average.
        average = 1 / min(self.count - 1, self.width)
        return max(largest / trace, average), min((largest + float(self.shrinkage)) / trace, 1.0)

    def _joined(self, count: int, mean: Float[Tensor, "d"]) -> Sketch:
        """Count, mean and the spread between the two means after ``count`` rows about ``mean``, not those rows' own."""
        if self.count == 0:
            return replace(self, count=count, mean=mean)
        total = self.count + count
        gap = mean - self.mean
        between = gap * (self.count * count / total) ** 0.5
        after = replace(self, count=total, mean=self.mean + gap * (count / total), trace=self.trace + between @ between)
        return after._with_rows(between[None])

    def _with_rows(self, rows: Float[Tensor, "n d"]) -> Sketch:
        """These centred rows stacked below, shrunk to ``rank`` rows where they overflow the buffer."""
        b_RD = torch.cat([self.rows_RD, rows])
        if len(b_RD) <= 2 * self.rank:
            return replace(self, rows_RD=b_RD)
        # The small matrix B B^T has the squared singular values; the rows are far fewer than the columns.
        values, vectors = torch.linalg.eigh(b_RD @ b_RD.T)
        values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
        delta = values[self.rank]
        top = values[: self.rank]
        # Between 0 and 1 whatever rounding did to the values, so rounding cannot push B^T B above S.
        scale = torch.where(top > delta, (top - delta) / top, torch.zeros_like(top)).sqrt()
        shrunk = scale[:, None] * (vectors[:, : self.rank].T @ b_RD)
        return replace(self, rows_RD=shrunk, shrinkage=self.shrinkage + delta)
