"""Moments: count, mean, scatter and the two radial moments that unbiased estimates of spectra need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import ShapeError

Precision: TypeAlias = Literal["mixed", "float64"]
"""How products of rows are formed. ``float64`` keeps ten digits and more of every singular value down to 1e-6 of the
largest. ``mixed`` multiplies in float32 and sums chunks in float64: half the time, seven digits of squared quantities
(traces, the largest eigenvalue, the Frobenius norm), and no claim about small singular values."""


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of rows ``x_i``, about their mean ``m``, with ``y_i = x_i - m``.

    ``scatter = sum y y^T``, ``third = sum |y|^2 y``, ``fourth = sum |y|^4``. Each chunk is centred on its own mean
    before anything is multiplied and chunks are combined about the common mean (Chan, Golub, LeVeque), so a mean of
    any size costs no digits. ``merge`` is associative and commutative up to rounding, with ``empty`` as its unit.
    """

    count: int
    mean: Float[Tensor, "d"]
    scatter: Float[Tensor, "d d"]
    third: Float[Tensor, "d"]
    fourth: Float[Tensor, ""]

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
        count, width = rows.shape
        if count == 0:
            return cls.empty(width, rows.device)
        rough = rows.mean(dim=0, dtype=torch.float64)
        if precision == "float64":
            y_ND = rows.to(torch.float64) - rough
        else:
            y_ND = (rows.double() - rough).float() if rows.dtype == torch.float64 else rows.float() - rough.float()
        # What rounding left of the mean: in float32 the subtracted mean is itself rounded.
        delta = y_ND.mean(dim=0, dtype=torch.float64)
        radius2 = (y_ND * y_ND).sum(dim=1, dtype=torch.float64)
        raw = cls(
            count,
            rough if precision == "float64" or rows.dtype == torch.float64 else rough.float().double(),
            gram(y_ND).double(),
            (radius2.to(y_ND.dtype) @ y_ND).double(),
            (radius2 * radius2).sum(),
        )
        return raw._shifted(delta)

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
        count = self.count + other.count
        gap = other.mean.to(self.mean.device) - self.mean
        mean = self.mean + gap * (other.count / count)
        a, b = self._about(mean), other._about(mean)
        return Moments(count, mean, a.scatter + b.scatter, a.third + b.third, a.fourth + b.fourth)

    def _about(self, point: Float[Tensor, "d"]) -> Moments:
        """The same sums about another point than the mean (``mean`` then holds that point)."""
        point = point.to(self.mean.device)
        d = self.mean - point
        trace, sd, d2, n = self.scatter.trace(), self.scatter @ d, d @ d, self.count
        return Moments(
            n,
            point,
            self.scatter + n * torch.outer(d, d),
            self.third + trace * d + 2 * sd + n * d2 * d,
            self.fourth + 4 * (d @ sd) + n * d2 * d2 + 4 * (self.third @ d) + 2 * trace * d2,
        )

    def _shifted(self, delta: Float[Tensor, "d"]) -> Moments:
        """Undo a wrong centre: sums were taken about a point that misses the true mean by ``delta``."""
        d, n = delta, self.count
        scatter = self.scatter - n * torch.outer(d, d)
        trace, sd, d2 = scatter.trace(), scatter @ d, d @ d
        third = self.third - trace * d - 2 * sd - n * d2 * d
        fourth = self.fourth - 4 * (d @ sd) - n * d2 * d2 - 4 * (third @ d) - 2 * trace * d2
        return Moments(n, self.mean + d, scatter, third, fourth)

    def covariance(self) -> Float[Tensor, "d d"]:
        """``scatter / (count - 1)``."""
        return self.scatter / max(self.count - 1, 1)


def gram(y_ND: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """``y^T y`` in the precision of ``y``. On CPU numpy recognises the product with its own transpose (BLAS syrk)."""
    if y_ND.device.type == "cpu":
        array = y_ND.numpy()
        return torch.from_numpy(np.ascontiguousarray(array.T @ array))
    return y_ND.T @ y_ND
