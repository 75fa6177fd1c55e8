"""Moments: count, mean, scatter and the two radial moments that unbiased estimates of spectra need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import ShapeError
from anisoscope.rows import largest_size, power_of_two_scale
from anisoscope.stats.gram_matrices import PARTED_WIDTH, cell_grams, gram, in_parts, rows_in_parts
from anisoscope.stats.memory import rows_in_hand, scratch
from anisoscope.stats.precision import multiplies_float64_as_fast

Precision: TypeAlias = Literal["mixed", "float64"]
"""How products of rows are formed. ``float64`` keeps ten digits and more of every singular value down to 1e-6 of the
largest. ``mixed`` multiplies in float32 and sums chunks in float64: half the time, seven digits of squared quantities
(traces, the largest eigenvalue, the Frobenius norm), and no claim about small singular values. On a GPU wide rows are
multiplied on tensor cores, in parts: six digits; narrow ones in float64 where that is as fast."""


BLOCK_ROWS = 4096  # rows multiplied at a time: full speed, and still in cache
NARROWED_ROWS = 256  # rows looked at together where nothing is multiplied: they stay in cache
SAFE_SIZE = 2.0**64  # rows between this and its inverse: eighth powers, the highest in use, stay far inside float64


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of rows ``x_i``, about their mean ``m``, with ``y_i = x_i - m``.

    ``scatter = sum y y^T``, ``third = sum |y|^2 y``, ``fourth = sum |y|^4``. Each chunk is centred on its own mean
    before anything is multiplied and chunks are combined about the common mean (Chan, Golub, LeVeque), so a mean of
    any size costs no digits. ``merge`` is associative and commutative up to rounding, with ``empty`` as its unit.

    All of it belongs to the rows divided by ``2**exponent``, which changes no digit. That is 0 for rows of ordinary
    size; where fourth powers would leave the range of float64 it is the exponent of the largest of the rows.
    """

    count: int
    mean: Float[Tensor, "d"]
    scatter: Float[Tensor, "d d"]
    third: Float[Tensor, "d"]
    fourth: Float[Tensor, ""]
    exponent: int = 0

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> Moments:
        """The state of no rows."""
        zeros = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(0, zeros, zeros.new_zeros(width, width), zeros, zeros.new_zeros(()))

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], precision: Precision = "float64") -> Moments:
        """The state of one chunk of rows."""
        if rows.ndim != 2:
            raise ShapeError(f"a chunk of rows has two axes, got shape {tuple(rows.shape)}")
        if len(rows) == 0:
            return cls.empty(rows.shape[1], rows.device)
        state, radius2 = cls._summed(rows, precision, 0)
        if precision == "mixed" and not 1e-24 < radius2 < 1e24:
            state, radius2 = cls._summed(rows, "float64", 0)  # products of float32 could over- or underflow
        # Seen from the sums, which costs no read of the rows; only where it shows something are they read again.
        size = max(math.sqrt(radius2), float(torch.linalg.vector_norm(state.mean, math.inf)))
        if 1 / SAFE_SIZE < size < SAFE_SIZE:
            return state
        exponent = -round(math.log2(power_of_two_scale(largest_size(rows))))
        return cls._summed(rows, "float64", exponent)[0] if exponent else state

    @classmethod
    def _summed(cls, rows: Float[Tensor, "n d"], precision: Precision, exponent: int) -> tuple[Moments, float]:
        """The state in units of ``2**exponent``, and the largest squared distance from a rough centre that was met."""
        count, width = rows.shape
        parted = precision == "mixed" and in_parts(width, rows.device)
        if not parted and multiplies_float64_as_fast(rows.device):
            precision = "float64"
        blocks = rows.split(
            rows_in_parts(width, rows.device) if parted else rows_in_hand(BLOCK_ROWS, width, rows.device)
        )
        # One rough centre for all blocks: what it misses of the mean is summed up and taken off at the end.
        if exponent:
            scale = math.ldexp(1.0, -exponent)
            rough = sum((block.double() * scale).sum(dim=0) for block in blocks) / count
        else:
            rough = rows.mean(dim=0, dtype=torch.promote_types(rows.dtype, torch.float32))
        state = cls.empty(width, rows.device)
        missed, scatter, third, fourth = state.mean.clone(), state.scatter, state.third.clone(), state.fourth.clone()
        units = []
        for block in blocks:
            if precision == "float64":
                y_ND = scratch((len(block), width), rows, torch.float64).copy_(block)
                y_ND = (y_ND.mul_(scale) if exponent else y_ND).sub_(rough.double())
            else:
                y_ND = (block.to(rough.dtype) - rough).float()
            radius2 = torch.linalg.vector_norm(y_ND, dim=1).double().square_()
            unit = radius2.max().clamp_min(torch.finfo(torch.float64).tiny)  # float32 overflows at the third power
            units.append(unit)
            scatter += cell_grams(y_ND[None], (len(y_ND),))[0, 0] if parted else _over_blocks(_gram, y_ND)
            missed += _over_blocks(_sum, y_ND)
            third += _over_blocks(_weighted_sum, (radius2 / unit).to(y_ND.dtype), y_ND) * unit
            fourth += radius2 @ radius2
        about_rough = cls(count, rough.double(), scatter, third, fourth, exponent)
        return about_rough._shifted(missed / count), float(torch.stack(units).max())  # a device is asked once

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.mean.shape[0]

    def update(self, rows: Float[Tensor, "n d"], precision: Precision = "float64") -> Moments:
        """The state after these rows too."""
        return self.merge(Moments.of(rows, precision))

    def merge(self, other: Moments) -> Moments:
        """The state of both sets of rows together."""
        if self.width != other.width:
            raise ShapeError(f"cannot merge moments of width {self.width} and {other.width}")
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        if self.exponent != other.exponent:
            # The unit of the larger rows, beside which the smaller vanish; rows of zeros fit into every unit.
            exponent = max((s.exponent for s in (self, other) if not s._is_zero()), default=0)
            return self._in_unit(exponent).merge(other._in_unit(exponent))
        count = self.count + other.count
        gap = other.mean.to(self.mean.device) - self.mean
        mean = self.mean + gap * (other.count / count)
        # One rank-one update instead of moving both scatters to the common mean first: they are the large part.
        scatter = self.scatter + other.scatter.to(self.scatter.device)
        scatter.addr_(gap, gap, alpha=self.count * other.count / count)
        a, b = self._radial(mean), other._radial(mean)
        third, fourth = a[0] + b[0].to(a[0].device), a[1] + b[1].to(a[1].device)
        return Moments(count, mean, scatter, third, fourth, self.exponent)

    def _is_zero(self) -> bool:
        """Whether all rows were zero."""
        return not (bool(self.mean.any()) or bool(self.fourth))

    def _in_unit(self, exponent: int) -> Moments:
        """The same in a unit as large or larger; rows of zeros in any."""
        scale = math.ldexp(1.0, min(self.exponent - exponent, 0))
        square = scale * scale
        return Moments(
            self.count,
            self.mean * scale,
            self.scatter * square,
            self.third * (square * scale),
            self.fourth * (square * square),
            exponent,
        )

    def _radial(self, point: Float[Tensor, "d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, ""]]:
        """``sum |z|^2 z`` and ``sum |z|^4`` with ``z = x - point``, from the sums about the mean."""
        d = self.mean - point.to(self.mean.device)
        trace, sd, d2, n = self.scatter.trace(), self.scatter @ d, d @ d, self.count
        third = self.third + trace * d + 2 * sd + n * d2 * d
        fourth = self.fourth + 4 * (d @ sd) + n * d2 * d2 + 4 * (self.third @ d) + 2 * trace * d2
        return third, fourth

    def _shifted(self, delta: Float[Tensor, "d"]) -> Moments:
        """Undo a wrong centre: sums were taken about a point that misses the true mean by ``delta``.

        Writes into its own scatter, which nobody else holds yet.
        """
        d, n = delta, self.count
        scatter = self.scatter.addr_(d, d, alpha=-n)
        trace, sd, d2 = scatter.trace(), scatter @ d, d @ d
        third = self.third - trace * d - 2 * sd - n * d2 * d
        fourth = self.fourth - 4 * (d @ sd) - n * d2 * d2 - 4 * (third @ d) - 2 * trace * d2
        return Moments(n, self.mean + d, scatter, third, fourth, self.exponent)

    def narrowed(self, columns: Int[Tensor, "k"], rows: Float[Tensor, "n d"]) -> Moments:
        """The state of the same rows cut to some columns: the scatter is there already, radii are summed anew."""
        scale = math.ldexp(1.0, -self.exponent)
        mean = self.mean[columns]
        third, fourth = torch.zeros_like(mean), self.fourth.new_zeros(())
        for block in rows.split(NARROWED_ROWS):
            y_ND = block.index_select(1, columns).double().mul_(scale).sub_(mean)
            radius2 = torch.linalg.vector_norm(y_ND, dim=1).square_()
            third += radius2 @ y_ND
            fourth += radius2 @ radius2
        scatter = self.scatter.index_select(0, columns).index_select(1, columns)
        return Moments(self.count, mean, scatter, third, fourth, self.exponent)

    def covariance(self) -> Float[Tensor, "d d"]:
        """``scatter / (count - 1)``, in the square of the state's unit."""
        return self.scatter / max(self.count - 1, 1)


def _over_blocks(act: Callable[..., Tensor], *tensors: Float[Tensor, "n ..."]) -> Float[Tensor, "..."]:
    """A sum over rows in float64: within each block in their own precision, as ``act`` forms it of one or of many."""
    count = len(tensors[0])
    whole = count - count % BLOCK_ROWS if count > BLOCK_ROWS else 0
    total = act(*(one[whole:] for one in tensors)).double()
    if whole == 0:
        return total
    return total + act(*(one[:whole].unflatten(0, (-1, BLOCK_ROWS)) for one in tensors)).sum(dim=0, dtype=torch.float64)


def _gram(y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d d"]:
    return gram(y, least=PARTED_WIDTH) if y.is_cuda else gram(y)  # strips are more launches, and pay for large products


def _sum(y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    return y.sum(dim=-2)


def _weighted_sum(weights: Float[Tensor, "*b n"], y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    return weights @ y if y.ndim == 2 else torch.bmm(weights[:, None], y)[:, 0]
