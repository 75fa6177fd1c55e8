"""BinMoments: count, mean and spread of rows by bin, such as bins of token frequency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, ShapeError


@dataclass(frozen=True)
class Pooled:
    """All bins together. ``within + between`` is the trace of the scatter of all rows about their common mean."""

    count: float
    mean: Float[Tensor, "d"]
    within: float
    """``sum |x_i - mean of its bin|^2``."""
    between: float
    """``sum over bins of count * |mean of the bin - common mean|^2``."""


@dataclass(frozen=True)
class BinMoments:
    """For each bin b: ``count``, ``mean`` of its rows, and ``spread = sum |x_i - mean_b|^2`` over its rows.

    Rows are centred on the mean of their bin before anything is squared, and chunks are combined by Chan's formula,
    so a mean of any size costs no digits. ``merge`` is associative and commutative up to rounding, with ``empty`` as
    its unit. An empty bin has mean 0.
    """

    count: Float[Tensor, "b"]
    mean: Float[Tensor, "b d"]
    spread: Float[Tensor, "b"]

    @classmethod
    def empty(cls, bins: int, width: int, device: torch.device | str = "cpu") -> BinMoments:
        """The state of no rows."""
        if bins < 1:
            raise OptionError(f"bins={bins}: there must be one bin or more")
        zeros = torch.zeros(bins, dtype=torch.float64, device=device)
        return cls(zeros, zeros.new_zeros(bins, width), zeros)

    @property
    def bins(self) -> int:
        """The number of bins."""
        return self.mean.shape[0]

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.mean.shape[1]

    def update(self, rows: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> BinMoments:
        """The state after these rows too; ``labels`` holds the bin of each row."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ShapeError(f"bin moments of width {self.width} take (n, {self.width}), got {tuple(rows.shape)}")
        self._check(labels, len(rows))
        if len(rows) == 0:
            return self
        bin_N = labels.to(self.mean.device, torch.int64)
        x_ND = rows.detach().to(self.mean)
        count = torch.bincount(bin_N, minlength=self.bins).to(torch.float64)
        some = count.clamp_min(1.0)[:, None]
        rough = self._sums(x_ND, bin_N) / some
        y_ND = x_ND - rough[bin_N]
        missed = self._sums(y_ND, bin_N) / some  # what rounding left of the mean
        spread = torch.zeros_like(self.spread).index_add_(0, bin_N, (y_ND * y_ND).sum(dim=1))
        spread = (spread - count * (missed * missed).sum(dim=1)).clamp_min(0.0)
        return self.merge(BinMoments(count, rough + missed, spread))

    def merge(self, other: BinMoments) -> BinMoments:
        """The state of both sets of rows together."""
        if self.mean.shape != other.mean.shape:
            raise ShapeError(
                f"cannot merge {self.bins} bins of width {self.width} with {other.bins} bins of width {other.width}"
            )
        theirs, device = other.count.to(self.count.device), self.count.device
        count = self.count + theirs
        share = theirs / count.clamp_min(1.0)
        gap = other.mean.to(device) - self.mean
        between = self.count * share * (gap * gap).sum(dim=1)
        # The mean of an empty side is 0, and so is its weight: a bin seen on one side only keeps every bit.
        return BinMoments(count, self.mean + gap * share[:, None], self.spread + other.spread.to(device) + between)

    def pooled(self) -> Pooled:
        """All bins together: count, mean, and the scatter's trace split into within and between bins."""
        count = self.count.sum()
        share = self.count / count.clamp_min(1.0)
        mean = share @ self.mean
        gap = self.mean - mean
        between = (self.count * (gap * gap).sum(dim=1)).sum()
        return Pooled(float(count), mean, float(self.spread.sum()), float(between))

    def _sums(self, x_ND: Float[Tensor, "n d"], bin_N: Int[Tensor, "n"]) -> Float[Tensor, "b d"]:
        return torch.zeros_like(self.mean).index_add_(0, bin_N, x_ND)

    def _check(self, labels: Int[Tensor, "n"], count: int) -> None:
        if tuple(labels.shape) != (count,):
            raise ShapeError(f"labels have shape {tuple(labels.shape)}, the rows number {count:,}; one label a row")
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise OptionError(f"labels have dtype {labels.dtype}; a bin is an integer from 0 to {self.bins - 1}")
        bad = ((labels < 0) | (labels >= self.bins)).nonzero()
        if len(bad):
            first = int(bad[0, 0])
            raise OptionError(
                f"labels[{first}] = {int(labels[first])} lies outside 0 to {self.bins - 1} (and {len(bad) - 1:,} later "
                "labels); mask those rows out, or make room with bins= in BinMoments.empty"
            )
