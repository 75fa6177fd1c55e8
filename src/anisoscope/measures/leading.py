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
WARM_DEGREES = (24, 16)  # from a block near the wanted ones: one long cycle costs less than two
CYCLES = (4, 9)  # from the first number on it is asked whether all have settled
WARM_CYCLES = 1  # from a block near the wanted ones: after it, it is asked as well whether it was enough
CHANCE = 0.1  # of the part that a drawn column has in each direction: one that has less is not worth a thought
NEAR = 1e-3  # residual, relative to its Ritz value, of a column that was a good start
IDLE = 0.9  # of the edge: a drawn column with a Ritz value below has found nothing that the old ones lack
FRESH = 4  # columns that are drawn anyway: an old block may know nothing of a new direction
GROWTH = 1e13  # of one column against another in a cycle: more would leave the largest in all of them
LOCKED = 1e-10  # residual, relative to its Ritz value, of a column that is taken out of the growth
LOW = 4  # times the edge: columns below it may grow, but for those of a block that was a start
EXACT = 1e-7  # residual of a wanted column, relative to its Ritz value
FACTOR_WIDTH = 64  # of matrices that one program factors in registers
DEPENDENT = 1e-14  # of the square of a column: what is left of it without others is rounding
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
    leading ``rank`` columns. After the first cycle from a ``start`` it is asked instead whether directions with the
    eigenvalues that are wanted have grown so much that any that were missing stand in the columns drawn anew, which all
    directions have a part in; where all of those found something, there may be more, and nothing settles. What does not
    settle wants a full decomposition.
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
    first, (least, most) = (DEGREES, CYCLES) if start is None else (WARM_DEGREES, (WARM_CYCLES, CYCLES[1]))
    degrees = (*first, *first[-1:] * (most - len(first)))
    ritz = _Ritz.of(matrices, columns)
    state = _State(ritz, ritz.values, 0 if start is None else rank)
    for degree in degrees[:least]:
        state = state.after(matrices, degree)
    first_asked = state.settled(rank)  # begun here: nobody waits for it yet

    def finish() -> Leading:
        last, settled = state, first_asked
        for cycle in range(least, most):
            if bool(last.over(settled).all()):
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
    """A block after some cycles, and its Ritz values one cycle earlier.

    ``warm`` are the columns wanted of a block that is a start from elsewhere. After a cycle from there the ``plan`` of
    it tells how much directions grew. Matrices are ``lost`` whose drawn columns have all found something: there may be
    more, of which the block would never know.
    """

    ritz: _Ritz
    earlier: Float[Tensor, "m b"]
    warm: int = 0
    plan: _Filter | None = None
    lost: Bool[Tensor, "m"] | None = None

    def after(self, matrices: Float[Tensor, "m d d"], degree: int) -> _State:
        """One cycle more."""
        plan = _Filter.of(self.ritz, degree, self.warm)
        ritz = _Ritz.of(matrices, self.ritz.filtered(matrices, plan, degree))
        if not self.warm:
            return _State(ritz, self.ritz.values, lost=self.lost)
        return _State(ritz, self.ritz.values, 0, plan, plan.near & (ritz.values[:, -1] >= IDLE * 2 * plan.half))

    def settled(self, rank: int) -> Bool[Tensor, "m"]:
        """For which matrices; what is no number has not."""
        if self.plan is not None and self.lost is not None and by_kernels(self.ritz.values):
            return settled(
                self.ritz.values, self.ritz.residuals, self.plan, self.lost, rank, self.ritz.columns.shape[1]
            )
        values = self.ritz.values[:, :rank]
        captured = values.sum(dim=1)
        exact = (self.ritz.residuals[:, :rank] <= EXACT * values).all(dim=1)
        if self.plan is None:
            none_missing = captured - self.earlier[:, :rank].sum(dim=1) <= CAPTURED * captured
        else:
            # A direction that is missing from the old columns stands in a drawn one, and the others there beside it.
            others = math.sqrt(self.ritz.columns.shape[1]) / (CHANCE * self.plan.growth(values[:, -1]))
            none_missing = self.plan.near & (values[:, -1] * others.square() <= CAPTURED * captured)
        if self.lost is not None:
            none_missing &= ~self.lost
        return exact & none_missing & (captured < torch.inf)

    def over(self, settled: Bool[Tensor, "m"]) -> Bool[Tensor, "m"]:
        """For which matrices more cycles would change nothing."""
        done = settled | ~self.ritz.sound
        return done if self.lost is None else done | self.lost


@dataclass(frozen=True)
class _Filter:
    """A Chebyshev polynomial for each matrix, bounded by one between zero and an edge, twice ``half``.

    The edge is the least Ritz value. In a ``warm`` block the columns that were drawn lie far below the others; where
    as many columns are ``near`` eigenvectors already, it is the least value without the drawn ones, so that these have
    what is missing, if anything is. What is found already, such as a massive dimension, is ``locked`` and taken down to
    the edge, by ``weights``; the degree is as high as the largest of the rest allows.
    """

    locked: Bool[Tensor, "m b"]
    weights: Float[Tensor, "m b"]
    half: Float[Tensor, "m"]
    degree: Float[Tensor, "m"]
    near: Bool[Tensor, "m"]

    @classmethod
    def of(cls, ritz: _Ritz, most: int, warm: int) -> _Filter:
        """Of degree ``most`` at most."""
        if by_kernels(ritz.values):
            return cls(*planned(ritz.values, ritz.residuals, most, warm))
        near = (ritz.residuals[:, :warm] <= NEAR * ritz.values[:, :warm]).all(dim=1, keepdim=True)
        lowest = torch.where(near, ritz.values[:, _edge(warm), None], ritz.values[:, -1:]).clamp_min(1e-300)
        locked = (ritz.residuals <= LOCKED * ritz.values) & (ritz.values > (1 if warm else LOW) * lowest)
        top = torch.where(locked, lowest, ritz.values).amax(dim=1, keepdim=True)
        degree = math.log(2 * GROWTH) / torch.acosh((2 * top / lowest - 1).clamp_min(1 + 1e-9))
        weights = torch.where(locked, ritz.values - lowest, 0.0)
        return cls(locked, weights, lowest[:, 0] / 2, degree[:, 0].floor().clamp(1, most), near[:, 0])

    def growth(self, values: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Of a direction with this eigenvalue of each matrix; those below the edge have one at most."""
        return torch.cosh(self.degree * torch.acosh((values / self.half - 1).clamp_min(1)))


@dataclass(frozen=True)
class _Ritz:
    """Ritz values of a block, largest first, with their vectors and residuals; NaN where they are no numbers."""

    values: Float[Tensor, "m b"]
    columns: Float[Tensor, "m d b"]
    residuals: Float[Tensor, "m b"]

    @classmethod
    def of(cls, matrices: Float[Tensor, "m d d"], columns: Float[Tensor, "m d b"]) -> _Ritz:
        # Columns that depend on one another are made of rounding then, as good as any that are drawn.
        columns, _ = orthonormal_columns(columns)
        images = matrices @ columns
        values, vectors = small_eigh(columns.mT @ images)
        values, vectors = values.flip(1), vectors.flip(2)
        columns = columns @ vectors
        left = torch.linalg.vector_norm(torch.addcmul(images @ vectors, columns, values[:, None], value=-1), dim=1)
        return cls(values, columns, left)

    @property
    def sound(self) -> Bool[Tensor, "m"]:
        """Whether they are numbers: comparisons with what is none are false anyway."""
        return self.values[:, 0].isnan().logical_not_()

    def filtered(self, matrices: Float[Tensor, "m d d"], plan: _Filter, most: int) -> Float[Tensor, "m d b"]:
        """The polynomial of each matrix, of degree ``most`` at most, times its columns."""
        found = (self.columns * plan.weights[:, None]) @ self.columns.mT
        # In one place, the largest that there is here.
        shifted = torch.sub(matrices, found, out=found).div_(plan.half[:, None, None])
        shifted.diagonal(dim1=1, dim2=2).sub_(1)
        before, now = self.columns.clone(), shifted @ self.columns
        for going in (plan.degree[:, None, None, None] >= _steps(most, now.dtype, now.device)).unbind(dim=3):
            before, now = now, torch.where(going, before.baddbmm_(shifted, now, beta=-1, alpha=2), now)
        return torch.where(plan.locked[:, None], self.columns, now)  # they have nothing to gain, and would lose digits


def by_kernels(columns: Float[Tensor, "... b"]) -> bool:
    """Whether the kernels take so many columns, where they are."""
    return columns.shape[-1] <= FACTOR_WIDTH and kernels_run(columns.device)


def _edge(warm: int) -> int:
    return BLOCK - 1 - (FRESH if warm else 0)


@functools.lru_cache(maxsize=8)
def _steps(most: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "k"]:
    """Degrees from the second on; nobody writes into it."""
    return torch.arange(2, most + 1, dtype=dtype, device=device)


@on_its_device
def planned(
    values: Float[Tensor, "m b"], residuals: Float[Tensor, "m b"], most: int, warm: int
) -> tuple[Bool[Tensor, "m b"], Float[Tensor, "m b"], Float[Tensor, "m"], Float[Tensor, "m"], Bool[Tensor, "m"]]:
    """What ``_Filter`` holds by the kernel, in one step for twenty."""
    many, width = values.shape
    locked, weights = torch.empty_like(values, dtype=torch.bool), torch.empty_like(values)
    half, degree = values.new_empty(2, many)
    near = torch.empty_like(half, dtype=torch.bool)
    kernels_of("factors").plan_filter[(many,)](
        values, residuals, locked, weights, half, degree, near, LOCKED, NEAR, math.log(2 * GROWTH), 1 if warm else LOW,
        most, _edge(warm), warm, K=width, P=1 << (width - 1).bit_length(),
    )  # fmt: skip
    return locked, weights, half, degree, near


@on_its_device
def settled(
    values: Float[Tensor, "m b"], residuals: Float[Tensor, "m b"], plan: _Filter, lost: Bool[Tensor, "m"], rank: int,
    width: int,
) -> Bool[Tensor, "m"]:  # fmt: skip
    """``_State.settled`` after a cycle from a start, by the kernel, in one step for two dozen."""
    many, columns = values.shape
    found, least = torch.empty_like(lost), CAPTURED * CHANCE**2 / width
    kernels_of("factors").settle[(many,)](
        values, residuals, plan.half, plan.degree, plan.near, lost, found, EXACT, least, rank, K=columns,
        P=1 << (columns - 1).bit_length(),
    )  # fmt: skip
    return found


def orthonormal_columns(columns: Float[Tensor, "m d b"]) -> tuple[Float[Tensor, "m d b"], Bool[Tensor, "m"]]:
    """Orthonormal columns that span the same, and whether they do: columns that depend on one another to rounding are
    made of what rounding left of them."""
    if by_kernels(columns):
        columns, good = _turned(columns)  # whatever their lengths: a factor of each is one of its pivot
        return _turned(columns)[0], good  # what was next to nothing after the first time has a length after the second
    columns = columns / torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_min(1e-300)
    finite = torch.isfinite(columns).all(dim=2).all(dim=1)
    basis, triangle = torch.linalg.qr(torch.where(finite[:, None, None], columns, 0.0))
    return basis, finite & (triangle.diagonal(dim1=1, dim2=2).square() > DEPENDENT).all(dim=1)


def _turned(columns: Float[Tensor, "m d b"]) -> tuple[Float[Tensor, "m d b"], Bool[Tensor, "m"]]:
    factors, good = inverse_factors(columns.mT @ columns)
    return columns @ factors.mT, good


@on_its_device
def inverse_factors(gram: Float[Tensor, "m b b"]) -> tuple[Float[Tensor, "m b b"], Bool[Tensor, "m"]]:
    """Inverses of lower triangular factors by the kernel, and whether there is one: no square of what is left of a
    column without those before it is below ``DEPENDENT`` of its own."""
    many, width, _ = gram.shape
    out, good = torch.empty_like(gram), torch.empty(many, dtype=torch.bool, device=gram.device)
    kernels_of("factors").inverse_factors[(many,)](gram, out, good, DEPENDENT, K=width, P=1 << (width - 1).bit_length())
    return out, good
