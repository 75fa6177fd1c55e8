"""The rows that proxies are fitted to, with what several fits want of them; each thing is made at most once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, TooFewRowsError
from anisoscope.measures.base import Needs, Workspace
from anisoscope.measures.frames import Neighborhoods, local_frames, neighborhoods
from anisoscope.measures.local import FUKUNAGA_OLSEN
from anisoscope.rows import as_rows, largest_size, power_of_two_scale

BLOCK_ROWS = 8192
LOCAL_NEIGHBORS, LOCAL_ANCHORS = 64, 512
EPS = torch.finfo(torch.float64).eps
LANCZOS_WIDTH = 1536  # wider matrices get a few leading eigenvectors by Lanczos, narrower ones all of them


@dataclass(frozen=True)
class PooledFrames:
    """The mean projector ``mean_m T_m T_m^T`` of local tangent frames, and the number of columns of each frame."""

    projector: Float[Tensor, "d d"]
    dimension: int
    anchors: int


class Cloud:
    """Rows in memory, of ordinary size: multiplied by a power of two where squares could leave a float's range.

    Of a file or a stream a uniform sample is held. ``centre`` says whether fits see the rows less their mean.
    """

    def __init__(self, rows: Any, mask: Any = None, *, seed: int = 0, centre: bool = True) -> None:
        points = Workspace(as_rows(rows, mask), Needs(points=True), seed).points("keep")
        self.seed, self.centre, self.notes = seed, centre, points.notes
        scale = power_of_two_scale(largest_size(points.rows))
        self.rows = points.rows if scale == 1 else points.rows.double() * scale
        self.n, self.width = self.rows.shape
        self._lead: tuple[Tensor, Tensor] | None = None

    @cached_property
    def mean(self) -> Float[Tensor, "d"]:
        """The mean row, float64."""
        first = self.rows[0].double()  # about one of them: exact for equal rows, where a sum would be rounded
        total = torch.zeros_like(first)
        for part in self.rows.split(BLOCK_ROWS):
            total += (part.double() - first).sum(dim=0)
        return first + total / self.n

    @cached_property
    def centred(self) -> Float[Tensor, "n d"]:
        """Rows less their mean, float32 at least."""
        out = torch.empty_like(self.rows, dtype=torch.promote_types(self.rows.dtype, torch.float32))
        for at in range(0, self.n, BLOCK_ROWS):
            out[at : at + BLOCK_ROWS] = self.rows[at : at + BLOCK_ROWS].double() - self.mean
        return out

    @property
    def fitted(self) -> Float[Tensor, "n d"]:
        """What a fit sees: centred rows, or rows as they came."""
        return self.centred if self.centre else self.rows.to(self.centred.dtype)

    @cached_property
    def variance(self) -> float:
        """Sum of squares of the centred rows."""
        return float(self.centred.square().sum(dtype=torch.float64))

    def require_spread(self) -> None:
        """Refuse rows that are too few or all alike."""
        if self.n < 2:
            raise TooFewRowsError(f"a proxy needs at least 2 rows, got {self.n}")
        rounding = 4 * torch.finfo(self.centred.dtype).eps * float(self.mean.abs().max())
        if self.variance <= self.n * self.width * rounding**2:
            raise DegenerateError(f"all {self.n:,} rows are equal: they have no directions to fit")

    def explained(self, basis: Float[Tensor, "d k"]) -> float:
        """The share of variance inside the span of an orthonormal basis."""
        small, held = basis.to(self.centred.dtype), 0.0
        for part in self.centred.split(BLOCK_ROWS):
            held += float((part @ small).square().sum(dtype=torch.float64))
        return min(held / self.variance, 1.0)

    def mean_share(self, basis: Float[Tensor, "d k"]) -> float:
        """The share of the mean's squared length inside the span; 0 for rows of mean zero."""
        size = float(self.mean @ self.mean)
        return float((basis.T @ self.mean).square().sum()) / size if size > 0 else 0.0

    def leading(self, count: int) -> tuple[Float[Tensor, "r"], Float[Tensor, "d r"]]:
        """At most ``count`` leading eigenvalues and vectors of ``A^T A`` above the rounding floor, largest first."""
        if self._lead is None or len(self._lead[0]) < count:
            self._lead = self._decomposed(count)
        values, vectors = self._lead
        # Rows are known to their own precision, the decomposition to that of float64.
        rounding = max(16 * torch.finfo(self.rows.dtype).eps ** 2, max(self.n, self.width) * EPS)
        floor = float(values[0]) * rounding
        real = min(count, int((values > floor).sum()))
        return values[:real], vectors[:, :real]

    def _decomposed(self, count: int) -> tuple[Tensor, Tensor]:
        wide = self.fitted.double()
        if self.n <= self.width:
            _, sigma, right = torch.linalg.svd(wide, full_matrices=False)
            values, vectors = sigma.square(), right.T
        else:
            scatter = wide.T @ wide
            if self.width > LANCZOS_WIDTH and count < self.width // 8 and scatter.device.type == "cpu":
                values, vectors = _lanczos(scatter, count)
            else:
                values, vectors = (part.flip(-1) for part in torch.linalg.eigh(scatter))
        short = self.width - len(values)
        # Zeros for directions that rows do not reach, so that a second question is not taken for a larger one.
        values = torch.cat([values.clamp_min(0), values.new_zeros(short)]) if self.n <= self.width else values
        return values, vectors

    @cached_property
    def pooled_frames(self) -> PooledFrames:
        """Local tangent frames, averaged as projectors.

        Their dimension is the median number of axes with a fair share of the largest local variance (Fukunaga and
        Olsen), whatever rank is asked for; neighbourhoods with fewer axes are left out.
        """
        points = Workspace(as_rows(self.rows), Needs(points=True), self.seed).points("drop")
        k = min(LOCAL_NEIGHBORS, points.n - 1)
        found = neighborhoods(points.rows, k, LOCAL_ANCHORS, self.seed)
        variances = local_frames(points.rows, found, 1).variances
        counts = (variances >= FUKUNAGA_OLSEN * variances[:, :1]).sum(dim=1)
        dimension = max(1, min(int(counts.median()), k // 2))
        solid = counts >= dimension
        kept = Neighborhoods(found.anchors[solid], found.members[solid], found.distances[solid])
        tangents = local_frames(points.rows, kept, dimension).tangents.double()
        columns = tangents.permute(1, 0, 2).reshape(self.width, -1)
        return PooledFrames(columns @ columns.T / len(tangents), dimension, len(tangents))


def _lanczos(matrix: Float[Tensor, "d d"], count: int) -> tuple[Tensor, Tensor]:
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(len(matrix))  # its own start vector: same bits every time
    values, vectors = eigsh(matrix.numpy(), k=count, which="LA", v0=start)
    return torch.from_numpy(values[::-1].copy()), torch.from_numpy(vectors[:, ::-1].copy())
