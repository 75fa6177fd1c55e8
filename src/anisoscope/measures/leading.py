"""Leading eigenspaces of many covariances at once, for a GPU: a filtered block iteration.

A full decomposition of D x D is a thousand small steps, and libraries take matrices one after another. Here a block of
columns, more than are wanted, goes through a Chebyshev polynomial that is small on the eigenvalues below the block and
grows fast above; then come orthonormal columns and their Ritz values. Every step is a product over all matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device
from anisoscope.measures.small_eigh import small_eigh

BLOCK = 32  # columns; a batch of decompositions up to this size is one kernel
SPARE = 8  # columns at least beyond those wanted
DEGREES = (2, 4, 16)  # of the polynomial at most, cycle by cycle: the first Ritz values are far below the eigenvalues
CYCLES = (4, 9)  # from the first number on it is asked whether all have settled
WARM_CYCLES = 2  # from a block near the wanted ones: after one, a new direction among near-equal ones may be missing
FRESH = 4  # columns that are drawn anyway: an old block may know nothing of a new direction
GROWTH = 1e13  # of one column against another in a cycle: more would leave the largest in all of them
LOCKED = 1e-10  # residual, relative to its Ritz value, of a column that is taken out of the growth
EXACT = 1e-7  # residual of a wanted column, relative to its Ritz value
FACTOR_WIDTH = 64  # of matrices that one program factors in registers
CAPTURED = 1e-10  # what a last cycle may still add to the captured variance, relative


@dataclass(frozen=True)
class Leading:
    """Ritz values and vectors, largest first, and for which matrices they have settled."""

    values: Float[Tensor, "m b"]
    vectors: Float[Tensor, "m d b"]
    settled: Bool[Tensor, "m"]


def can_lead(width: int, rank: int) -> bool:
    """Whether a block holds the wanted columns with some to spare, and is small against the width."""
    return rank + SPARE <= BLOCK and width >= 4 * BLOCK


def leading_spaces(
    matrices: Float[Tensor, "m d d"], rank: int, start: Float[Tensor, "m d b"] | None = None, *, seed: int = 0
) -> Leading:
    """The leading ``rank`` eigenpairs of positive semidefinite float64 matrices, ``start`` being a block near them.

    Settled: residuals are below ``EXACT``, and the last cycle added less than ``CAPTURED`` to the variance in the
    leading ``rank`` columns. Where the spectrum ends within the block nothing settles, and a full decomposition is
    wanted.
    """
    return begin_leading(matrices, rank, start, seed=seed)()


def begin_leading(
    matrices: Float[Tensor, "m d d"], rank: int, start: Float[Tensor, "m d b"] | None = None, *, seed: int = 0
) -> Callable[[], Leading]:
    """The same in two parts: as many cycles as there are anyway, and then the rest, asking for each if it is needed."""
    many, width, _ = matrices.shape
    columns = _drawn(width, seed, matrices.dtype, matrices.device).repeat(many, 1, 1)
    if start is not None:
        columns[:, :, :-FRESH] = start[:, :, :-FRESH]
    first, (least, most) = (DEGREES, CYCLES) if start is None else (DEGREES[2:], (WARM_CYCLES, CYCLES[1]))
    degrees = (*first, *first[-1:] * (most - len(first)))
    ritz = _Ritz.of(matrices, columns)
    state = _State(ritz, ritz.values)
    for degree in degrees[:least]:
        state = state.after(matrices, degree)
    first_asked = state.settled(rank)  # begun here: nobody waits for it yet

    def finish() -> Leading:
        last, settled = state, first_asked
        for cycle in range(least, most):
            if bool((settled | ~last.ritz.sound).all()):
                break
            last = last.after(matrices, degrees[cycle])
            settled = last.settled(rank)
        return Leading(last.ritz.values, last.ritz.columns, settled)

    return finish


@functools.lru_cache(maxsize=8)
def _drawn(width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d b"]:
    return torch.randn(width, BLOCK, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)


@dataclass(frozen=True)
class _State:
    """A block after some cycles, and its Ritz values one cycle earlier."""

    ritz: _Ritz
    earlier: Float[Tensor, "m b"]

    def after(self, matrices: Float[Tensor, "m d d"], degree: int) -> _State:
        """One cycle more."""
        return _State(_Ritz.of(matrices, self.ritz.filtered(matrices, degree)), self.ritz.values)

    def settled(self, rank: int) -> Bool[Tensor, "m"]:
        """For which matrices; asked of few states only, since it is a dozen small steps."""
        values = self.ritz.values[:, :rank]
        captured = values.sum(dim=1)
        exact = (self.ritz.residuals[:, :rank] <= EXACT * values).all(dim=1)
        still = captured - self.earlier[:, :rank].sum(dim=1) <= CAPTURED * captured
        return self.ritz.sound & exact & still & torch.isfinite(captured)


@dataclass(frozen=True)
class _Ritz:
    """Ritz values of a block, largest first, with their vectors and residuals; ``sound`` where nothing broke down."""

    values: Float[Tensor, "m b"]
    columns: Float[Tensor, "m d b"]
    residuals: Float[Tensor, "m b"]
    sound: Bool[Tensor, "m"]

    @classmethod
    def of(cls, matrices: Float[Tensor, "m d d"], columns: Float[Tensor, "m d b"]) -> _Ritz:
        columns, sound = orthonormal_columns(columns)
        images = matrices @ columns
        small = columns.mT @ images
        # What is not finite would end the decomposition of all of them.
        good = torch.isfinite(small).all(dim=2).all(dim=1)
        eye = torch.eye(BLOCK, dtype=small.dtype, device=small.device)
        values, vectors = small_eigh(torch.where(good[:, None, None], (small + small.mT) / 2, eye))
        values, vectors = values.flip(1), vectors.flip(2)
        columns = columns @ vectors
        left = torch.linalg.vector_norm(images @ vectors - columns * values[:, None], dim=1)
        return cls(values, columns, left, sound & good)

    def filtered(self, matrices: Float[Tensor, "m d d"], most: int) -> Float[Tensor, "m d b"]:
        """A Chebyshev polynomial of each matrix, bounded by one between zero and the least Ritz value, times its
        columns. What is found already, such as a massive dimension, is taken down to that edge; the degree is as high
        as the largest of the rest allows, ``most`` at most."""
        edge = self.values[:, -1:].clamp_min(1e-300)
        locked = (self.residuals <= LOCKED * self.values) & (self.values > 4 * edge)
        weights = torch.where(locked, self.values - edge, 0.0)[:, :, None]
        top = torch.where(locked, edge, self.values).amax(dim=1, keepdim=True)
        degree = (math.log(2 * GROWTH) / torch.acosh((2 * top / edge - 1).clamp_min(1 + 1e-9)))[:, :, None]
        half = (edge / 2)[:, :, None]
        found = (self.columns * weights.mT) @ self.columns.mT
        shifted = torch.sub(matrices, found, out=found).div_(half)  # in one place, the largest that there is here
        shifted.diagonal(dim1=1, dim2=2).sub_(1)
        before, now = self.columns.clone(), shifted @ self.columns
        for going in (degree >= torch.arange(2, most + 1, device=degree.device))[:, :, None].unbind(dim=3):
            before, now = now, torch.where(going, before.baddbmm_(shifted, now, beta=-1, alpha=2), now)
        return torch.where(locked[:, None], self.columns, now)  # they have nothing to gain, and would lose digits


def orthonormal_columns(columns: Float[Tensor, "m d b"]) -> tuple[Float[Tensor, "m d b"], Bool[Tensor, "m"]]:
    """Orthonormal columns of the same spans by Cholesky, twice, and whether both went well."""
    columns = columns / torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_min(1e-300)
    columns, first = _turned(columns)
    columns, second = _turned(columns)
    return columns, first & second


def _turned(columns: Float[Tensor, "m d b"]) -> tuple[Float[Tensor, "m d b"], Bool[Tensor, "m"]]:
    gram = columns.mT @ columns
    if gram.shape[1] <= FACTOR_WIDTH and kernels_run(gram.device):
        factors, good = inverse_factors(gram)
        return columns @ factors.mT, good
    factor, failed = torch.linalg.cholesky_ex(gram)
    return torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False), failed == 0


@on_its_device
def inverse_factors(gram: Float[Tensor, "m b b"]) -> tuple[Float[Tensor, "m b b"], Bool[Tensor, "m"]]:
    """Inverses of lower triangular factors by the kernel, and whether there is one."""
    many, width, _ = gram.shape
    out, good = torch.empty_like(gram), torch.empty(many, dtype=torch.bool, device=gram.device)
    kernels_of("factors").inverse_factors[(many,)](gram, out, good, K=width, P=1 << (width - 1).bit_length())
    return out, good
