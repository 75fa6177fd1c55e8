"""The descent of semi-NMF: half steps by turns until the error settles, with momentum where it helps.

Rows are taken in parts that fit into a cache, side by side where there are cores. The parts and the order of their sums
do not depend on how many cores there are. Codes lie here as ``(K,N)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.descent import least_squares, part_rows, reseeded, second_moment, swept

RESEEDS = 10  # rounds in which concepts without rows get a new direction
BEGIN, GROW, SHRINK, GROW_LIMIT = 0.9, 1.2, 1.2, 1.01  # of the momentum; its rule is that of Ang and Gillis (2019)

Parts: TypeAlias = Sequence[Tensor]
Each: TypeAlias = Callable[[Callable[[int], Any]], list[Any]]


@dataclass(frozen=True)
class Run:
    """Where a descent ended: unscaled factors, the error after every half step, and why it ended."""

    concepts: Float[Tensor, "k d"]
    codes: Float[Tensor, "k n"]
    history: tuple[float, ...]
    iterations: int
    converged: bool


@dataclass(frozen=True)
class _Sums:
    """``Z^T Z`` and ``Z^T A`` of some codes."""

    second: Tensor
    pull: Tensor

    @classmethod
    def of(cls, codes: Tensor, rows: Tensor) -> _Sums:
        return cls(second_moment(codes), (codes @ rows).double())

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(self.second + other.second, self.pull + other.pull)

    def concepts(self, before: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        """The concepts that fit these codes best, and the error with them."""
        found = least_squares(self.second, self.pull, before, dtype)
        lost = size - 2 * float((self.pull * found).sum()) + float((self.second * (found @ found.T)).sum())
        return found, max(lost, 0.0) / size


@dataclass(frozen=True)
class _Swept:
    """Codes of one part after their half step, ``lost = |Z C|^2 - 2 <A, Z C>``, and sums of them or of those beyond."""

    codes: Tensor
    lost: float
    beyond: Tensor | None
    sums: _Sums


@dataclass
class _Momentum:
    """How far to go on along the last change, and the most that it may become."""

    now: float
    limit: float = 1.0

    def told(self, helped: bool) -> None:
        if helped:
            self.now, self.limit = min(self.limit, GROW * self.now), min(1.0, GROW_LIMIT * self.limit)
        else:
            self.now, self.limit = self.now / SHRINK, self.now


def descend(
    a_ND: Float[Tensor, "n d"],
    concepts: Float[Tensor, "k d"],
    codes: Float[Tensor, "k n"],
    size: float,
    *,
    max_iter: int,
    tolerance: float,
    sweeps: int,
    momentum: bool,
) -> Run:
    """Half steps from these factors until an iteration lowers the error by less than ``tolerance`` of it.

    ``size`` is the sum of squares of the rows. With ``momentum`` the concepts follow codes that went on in the
    direction of their last change, if the error is not above what the half step of the codes had reached; else, and
    without it, they follow the codes as they are. Either way no half step raises the error.
    """
    with _side_by_side(a_ND, len(codes)) as (rows, each):
        z = [part.contiguous() for part in codes.split(len(rows[0]), dim=1)]
        last: Parts | None = None
        pace, history = _Momentum(BEGIN), list[float]()
        reseeds, converged, iteration = 0, False, 0
        for iteration in range(1, max_iter + 1):
            small, gram = concepts.to(a_ND.dtype), concepts @ concepts.T
            ahead = pace.now if momentum and last is not None else 0.0
            found: list[_Swept] = each(_Step(rows, z, last if ahead else None, small, gram, sweeps, ahead))
            last = [one.codes for one in found]
            history.append(max(size + sum(one.lost for one in found), 0.0) / size)
            sums = reduce(add, [one.sums for one in found])
            fresh, error = sums.concepts(concepts, size, a_ND.dtype)
            z = [one.codes if one.beyond is None else one.beyond for one in found]
            if ahead:
                pace.told(error <= history[-1])
                if error > history[-1]:
                    z = last
                    sums = reduce(add, each(_Followed(rows, z)))
                    fresh, error = sums.concepts(concepts, size, a_ND.dtype)
            concepts = fresh
            history.append(error)
            dead = sums.second.diagonal() <= 0
            if bool(dead.any()) and reseeds < RESEEDS and iteration < max_iter:
                renewed = reseeded(a_ND, concepts, torch.cat(z, dim=1), dead)
                reseeds += 1
                if renewed is not None:
                    concepts, last = renewed, None
                    continue
            before = history[-3] if len(history) > 2 else 1.0
            if before - history[-1] <= tolerance * before:
                converged = True
                break
        return Run(concepts, torch.cat(z, dim=1), tuple(history), iteration, converged)


@dataclass(frozen=True)
class _Step:
    """The half step of the codes, and the sums that the concepts follow from, for one part of the rows."""

    rows: Parts
    codes: Parts
    last: Parts | None
    concepts: Tensor
    gram: Tensor
    sweeps: int
    ahead: float

    def __call__(self, at: int) -> _Swept:
        rows = self.rows[at]
        cross = self.concepts @ rows.T
        new = swept(self.codes[at], cross, self.gram, self.sweeps)
        fit = float((cross * new).sum(dtype=torch.float64))
        if self.last is None:
            sums = _Sums.of(new, rows)
            return _Swept(new, float((sums.second * self.gram).sum()) - 2 * fit, None, sums)
        # Not through a product with the codes in their own type: concepts that nearly cancel would drown in rounding.
        square = float((second_moment(new) * self.gram).sum())
        beyond = torch.lerp(self.last[at], new, 1 + self.ahead).clamp_min_(0)
        return _Swept(new, square - 2 * fit, beyond, _Sums.of(beyond, rows))


@dataclass(frozen=True)
class _Followed:
    """The sums of codes as they are, for one part of the rows."""

    rows: Parts
    codes: Parts

    def __call__(self, at: int) -> _Sums:
        return _Sums.of(self.codes[at], self.rows[at])


@contextmanager
def _side_by_side(a_ND: Tensor, rank: int) -> Iterator[tuple[Parts, Each]]:
    """Parts of the rows, and how to do something for each of them: one core a part where there are several."""
    rows = a_ND.split(part_rows(len(a_ND), rank, a_ND.device))
    cores = torch.get_num_threads()
    if cores == 1 or len(rows) == 1 or a_ND.device.type != "cpu":
        yield rows, lambda act: [act(at) for at in range(len(rows))]
        return
    # Products of a few codes with many rows gain little from a second core; two of them at once gain all of it.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(cores, len(rows)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield rows, lambda act: list(pool.map(act, range(len(rows))))
    finally:
        torch.set_num_threads(cores)
