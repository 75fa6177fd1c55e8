"""The descent of semi-NMF: half steps by turns until the error settles, with momentum where it helps.

On a CPU rows are taken in parts that fit into a cache, side by side where there are cores. The parts and the order of
their sums do not depend on how many cores there are. On a GPU a few rounds are launched before their errors are asked
for, as if all of them went well; the first that did not is done again with care. Codes lie here as ``(K,N)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.stats.precision import crew
from anisoscope.tangent.descent import (
    Scratch,
    against,
    all_positive,
    least_squares,
    part_rows,
    pulled,
    reseeded,
    second_moment,
    solved,
    swept,
)
from anisoscope.tangent.sweeps import has_kernels, inverses

RESEEDS = 10  # rounds in which concepts without rows get a new direction
BEGIN, GROW, SHRINK, GROW_LIMIT = 0.9, 1.2, 1.2, 1.01  # of the momentum; its rule is that of Ang and Gillis (2019)
MOMENTUM = 0.5  # after a descent on few rows or an earlier fit: more of it fills codes that were zero
SURE = 0.8  # of what an iteration with momentum is worth; counted in full, some fits would end at higher errors
WINDOW = 4  # rounds launched on a GPU between two questions to it
FEW_SHARE, FEW_ROWS, FEW_EACH = 8, 2048, 16  # a descent on few rows: an eighth of them, so many, so many a concept
FEW_TOLERANCE, FEW_ITERATIONS, FEW_SWEEPS = 1e-3, 60, 2  # it only has to come near
CODE_SWEEPS, CODE_SETTLED = 4, 1e-3  # of the codes of all rows under its concepts
FEW_PRODUCTS = 2**23  # multiplications of all rows by all concepts that a second core does not hasten

Parts: TypeAlias = Sequence[Tensor]
Each: TypeAlias = Callable[[Callable[[int], Any]], list[Any]]


@dataclass(frozen=True)
class Limits:
    """When a descent ends: after so many iterations, or when one lowers the error by less than ``tolerance`` of it.

    ``of_plain``: for each plain iteration that it is surely worth. Where a share b of a change goes on, the next is
    worth 1 + b of it, the one after 1 + b (1 + b), and so forth: with the same tolerance for all, momentum would go on
    for long where the plain descent ends.
    """

    max_iter: int
    tolerance: float
    sweeps: int  # over the codes in each iteration
    of_plain: bool = False


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
        return cls(second_moment(codes), pulled(codes, rows).double())

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(self.second + other.second, self.pull + other.pull)

    def concepts(self, before: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        """The concepts that fit these codes best, and the error with them."""
        found = least_squares(self.second, self.pull, before, dtype)
        return found, max(size + self.lost(found), 0.0) / size

    def lost(self, concepts: Tensor) -> float:
        """``|Z C|^2 - 2 <A, Z C>``, which is ``<Z^T Z C - 2 Z^T A, C>``."""
        return float(torch.addmm(self.pull, self.second, concepts, beta=-2).mul_(concepts).sum())


@dataclass(frozen=True)
class _Swept:
    """Codes of one part after their half step, ``lost = |Z C|^2 - 2 <A, Z C>``, and sums of them or of those beyond."""

    codes: Tensor
    lost: float
    beyond: Tensor | None
    sums: _Sums


@dataclass(frozen=True)
class _Pace:
    """How far to go on along the last change, and the most that it may become."""

    now: float
    limit: float

    @classmethod
    def begun(cls, momentum: float) -> _Pace:
        return cls(min(BEGIN, momentum), momentum)

    def told(self, helped: bool) -> _Pace:
        if helped:
            return _Pace(min(self.limit, GROW * self.now), min(1.0, GROW_LIMIT * self.limit))
        return _Pace(self.now / SHRINK, self.now)


@dataclass(frozen=True)
class _State:
    """Factors between two rounds; ``last`` are the codes of the round before, where momentum may go on from them."""

    concepts: Tensor
    codes: Parts
    last: Parts | None
    pace: _Pace
    reseeds: int = 0
    worth: float = 0.0  # of the round before, in plain ones

    @property
    def ahead(self) -> float:
        return self.pace.now if self.last is not None else 0.0


@dataclass(frozen=True)
class _Done:
    """A round: where it led, the errors after its half steps, and whether concepts were given new directions."""

    state: _State
    errors: tuple[float, float]
    renewed: bool = False


def descend(
    a_ND: Float[Tensor, "n d"],
    concepts: Float[Tensor, "k d"],
    codes: Float[Tensor, "k n"],
    size: float,
    limits: Limits,
    *,
    momentum: float,
) -> Run:
    """Half steps from these factors until the error settles.

    ``size`` is the sum of squares of the rows. With ``momentum`` the concepts follow codes that went on by that share
    (to begin with) of their last change, if the error is not above what the half step of the codes had reached; else,
    and without it, they follow the codes as they are. Either way no half step raises the error.
    """
    with _side_by_side(a_ND, len(codes)) as (rows, each):
        most = part_rows(len(a_ND), len(codes), a_ND.device)
        work = _Work(a_ND, rows, each, size, limits.sweeps, momentum, most)
        z = [part.contiguous() for part in codes.split(len(rows[0]), dim=1)]
        state = _State(concepts, z, None, _Pace.begun(momentum))
        history, converged = list[float](), False
        rounds = _in_windows if has_kernels(a_ND.device, len(codes)) else _one_by_one
        for done in rounds(work, state, limits.max_iter):
            state = done.state
            history += done.errors
            before = history[-3] if len(history) > 2 else 1.0
            least = limits.tolerance * (max(sure_of(momentum) * state.worth, 1.0) if limits.of_plain else 1.0)
            if not done.renewed and before - history[-1] <= least * before:
                converged = True
                break
        return Run(state.concepts, torch.cat(list(state.codes), dim=1), tuple(history), len(history) // 2, converged)


def sure_of(momentum: float) -> float:
    """What of an iteration's worth is counted: with more than the usual momentum it grows without bound, and nothing
    is."""
    return SURE if momentum <= MOMENTUM else 0.0


def descend_few(
    a_ND: Float[Tensor, "n d"],
    concepts: Float[Tensor, "k d"],
    codes: Float[Tensor, "k n"],
    limits: Limits,
    *,
    seed: int,
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k n"]] | None:
    """Concepts after a plain descent on a few of the rows, drawn at random, and the codes of all rows under them.

    Most of the way goes as well on an eighth of the rows, at an eighth of the cost; None for too few rows. Of these
    iterations eight are allowed for each of ``max_iter``.
    """
    n, rank = codes.shape[1], len(codes)
    few = max(FEW_ROWS, FEW_EACH * rank, n // FEW_SHARE)
    if n < 4 * few:
        return None
    picks = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:few].sort().values.to(a_ND.device)
    sample = a_ND[picks]
    size = float(sample.square().sum(dtype=torch.float64))
    if size == 0:
        return None
    most, tolerance = min(FEW_ITERATIONS, FEW_SHARE * limits.max_iter), max(FEW_TOLERANCE, limits.tolerance)
    coarse = Limits(most, tolerance, min(FEW_SWEEPS, limits.sweeps))
    run = descend(sample, concepts, codes[:, picks].contiguous(), size, coarse, momentum=0.0)
    with _side_by_side(a_ND, rank) as (rows, each):
        found = each(lambda at: solved(rows[at], run.concepts, CODE_SWEEPS, CODE_SETTLED))
    return run.concepts, torch.cat(found, dim=1)


class _Hope(NamedTuple):
    """What the errors of a round on a GPU are made of, and whether its concepts could be had from an inverse."""

    own: Tensor
    gram: Tensor
    fit: Tensor
    second: Tensor
    fresh: Tensor
    pull: Tensor
    good: Tensor


@dataclass(frozen=True)
class _Work:
    """What the rounds of one descent share."""

    a_ND: Tensor
    rows: Parts
    each: Each
    size: float
    sweeps: int
    momentum: float
    part: int  # rows of one sum
    scratch: Scratch = field(default_factory=Scratch)

    def round(self, state: _State, final: bool) -> _Done:
        """One round with care for everything: momentum that does not help, lost ranks, concepts without rows."""
        concepts, dtype, ahead = state.concepts, self.a_ND.dtype, state.ahead
        small, gram = concepts.to(dtype), concepts @ concepts.T
        step = _Step(
            self.rows, state.codes, state.last if ahead else None, concepts, small, gram, self.sweeps, ahead, self.part,
            self.scratch,
        )  # fmt: skip
        found: list[_Swept] = self.each(step)
        last = [one.codes for one in found]
        codes_error = max(self.size + sum(one.lost for one in found), 0.0) / self.size
        sums = reduce(add, [one.sums for one in found])
        fresh, error = sums.concepts(concepts, self.size, dtype)
        z = [one.codes if one.beyond is None else one.beyond for one in found]
        pace = state.pace.told(error <= codes_error) if ahead else state.pace
        worth = 1 + ahead * state.worth
        if ahead and error > codes_error:
            z, worth = last, 1.0
            sums = reduce(add, self.each(_Followed(self.rows, z, self.part)))
            fresh, error = sums.concepts(concepts, self.size, dtype)
        after = _State(fresh, z, last if self.momentum else None, pace, state.reseeds, worth)
        energy = sums.second.diagonal()
        if state.reseeds < RESEEDS and not final and not all_positive(energy) and bool((dead := energy <= 0).any()):
            after = replace(after, reseeds=state.reseeds + 1)
            renewed = reseeded(self.a_ND, fresh, torch.cat(z, dim=1), dead)
            if renewed is not None:
                return _Done(replace(after, concepts=renewed, last=None), (codes_error, error), True)
        return _Done(after, (codes_error, error))

    def hoped(self, state: _State) -> tuple[_State, _Hope]:
        """The same round on a GPU if nothing is unusual, without a question to it; and what tells whether it was so."""
        concepts, (rows,), (codes,), ahead = state.concepts, self.rows, state.codes, state.ahead
        small, gram = concepts.to(rows.dtype), concepts @ concepts.T
        cross = against(small, rows)
        new = swept(codes, cross, gram, self.sweeps)
        fit = (cross * new).sum(dtype=torch.float64)
        own = second = second_moment(new)
        beyond = new
        if ahead and state.last is not None:
            beyond = torch.lerp(state.last[0], new, 1 + ahead).clamp_min_(0)
            second = second_moment(beyond)
        pull = pulled(beyond, rows).double()
        limit = 1 / (len(codes) * torch.finfo(rows.dtype).eps)
        inverse, good = inverses(second[None], torch.ones(1, dtype=torch.bool, device=rows.device), limit)
        fresh = torch.addmm(concepts, inverse[0], torch.addmm(pull, second, concepts, alpha=-1))
        pace = state.pace.told(True) if ahead else state.pace
        worth = 1 + ahead * state.worth
        after = _State(fresh, [beyond], [new] if self.momentum else None, pace, state.reseeds, worth)
        return after, _Hope(own, gram, fit, second, fresh, pull, good)

    def told(self, hopes: Sequence[_Hope]) -> list[list[float]]:
        """Both errors of each round, and whether its concepts could be had from an inverse; one question for all."""
        own, gram, fit, second, fresh, pull, good = map(torch.stack, zip(*hopes, strict=True))
        codes, concepts = (own * gram).sum(dim=(1, 2)) - 2 * fit, ((second @ fresh - 2 * pull) * fresh).sum(dim=(1, 2))
        errors = (torch.stack([codes, concepts], dim=1) + self.size).clamp_min_(0) / self.size
        return torch.cat([errors, good.double()], dim=1).tolist()


def _one_by_one(work: _Work, state: _State, most: int) -> Iterator[_Done]:
    for at in range(most):
        done = work.round(state, at == most - 1)
        yield done
        state = done.state


def _in_windows(work: _Work, state: _State, most: int) -> Iterator[_Done]:
    """The same rounds; a window's are launched as if each went well, and those behind one that did not are dropped."""
    at = 0
    while at < most:
        window, began = list[tuple[_State, _State, _Hope]](), state
        for _ in range(min(WINDOW, most - at)):
            after, hope = work.hoped(began)
            window.append((began, after, hope))
            began = after
        for (before, after, _), (first, second, good) in zip(
            window, work.told([hope for _, _, hope in window]), strict=True
        ):
            at += 1
            usual = good > 0 and (not before.ahead or second <= first)
            done = _Done(after, (first, second)) if usual else work.round(before, at == most)
            yield done
            state = done.state
            if not usual:
                break


@dataclass(frozen=True)
class _Step:
    """The half step of the codes, and the sums that the concepts follow from, for one part of the rows.

    ``exact`` are the concepts in float64.
    """

    rows: Parts
    codes: Parts
    last: Parts | None
    exact: Tensor
    concepts: Tensor
    gram: Tensor
    sweeps: int
    ahead: float
    part: int
    scratch: Scratch

    def __call__(self, at: int) -> _Swept:
        rows = self.rows[at]
        cross = against(self.concepts, rows)
        new = swept(self.codes[at], cross, self.gram, self.sweeps, self.scratch)
        beyond = None if self.last is None else torch.lerp(self.last[at], new, 1 + self.ahead).clamp_min_(0)
        sums, lost = list[_Sums](), 0.0
        for some, aims, codes, going_on in _cut(self.part, rows, cross, new, new if beyond is None else beyond):
            sums.append(_Sums.of(going_on, some))
            if beyond is not None:
                fit = float((aims * codes).sum(dtype=torch.float64))
                lost += float((second_moment(codes) * self.gram).sum()) - 2 * fit
        total = reduce(add, sums)
        if beyond is None:
            # Not through a product with codes in their own type: concepts that nearly cancel would drown in rounding.
            lost = total.lost(self.exact)
        return _Swept(new, lost, beyond, total)


@dataclass(frozen=True)
class _Followed:
    """The sums of codes as they are, for one part of the rows."""

    rows: Parts
    codes: Parts
    part: int

    def __call__(self, at: int) -> _Sums:
        parts = _cut(self.part, self.rows[at], self.codes[at])
        return reduce(add, [_Sums.of(codes, rows) for rows, codes in parts])


def _cut(part: int, rows: Tensor, *codes: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Rows and codes of theirs, so many at a time: sums are rounded part by part, however rows are swept."""
    if len(rows) <= part:
        return [(rows, *codes)]
    return zip(rows.split(part), *(one.split(part, dim=1) for one in codes), strict=True)


@contextmanager
def _side_by_side(a_ND: Tensor, rank: int) -> Iterator[tuple[Parts, Each]]:
    """Parts of the rows, and how to do something for each of them: one core a part where there are several."""
    part = part_rows(len(a_ND), rank, a_ND.device)
    rows = a_ND.split(part)
    cores = torch.get_num_threads()
    alone = len(a_ND) <= part and a_ND.numel() * rank > FEW_PRODUCTS
    if cores == 1 or alone or a_ND.device.type != "cpu":
        yield rows, lambda act: [act(at) for at in range(len(rows))]
        return
    # Products of a few codes with many rows gain little from a second core; two of them at once gain all of it.
    with crew(min(cores, len(rows))) as each:
        yield rows, lambda act: each(act, range(len(rows)))
