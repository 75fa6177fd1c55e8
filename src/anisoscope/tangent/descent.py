"""The two half steps of semi-NMF, each of which lowers ``||A - Z C||^2`` or leaves it. Codes lie here as ``(K,N)``.

Rows and codes are multiplied in the type they come in; everything of size K x K is float64.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.stats.precision import threads
from anisoscope.tangent.sweeps import has_kernels, rounds

CACHE_CODES = 524_288  # codes swept at a time on a CPU, so that they stay in its cache
CACHE_ROWS, MOST_ROWS = 1024, 8192  # of so many rows at least, and at most
SLIVER = 8  # an eighth of a part is no part of its own
PRODUCT_ROWS = 1024  # rows of one product on a CPU: longer ones leave its cache
BLOCK_CONCEPTS = 16  # what all concepts hold is taken off the rows of so many at once, in one product
BLOCK_ROWS = 8192
SPLIT_COLUMNS = 1024  # codes squared at a time on a GPU, where long thin products leave most of it idle
WINDOW = 4  # sweeps on a GPU between two questions to it
RESEED_ROWS = 4096  # rows looked at for a new direction


def nearly_one(n: int, step: int) -> bool:
    """Whether rows are hardly more than one part: what is beyond would cost as many calls as the part itself."""
    return n <= step + step // SLIVER


class Scratch(threading.local):
    """Memory for sweeps with all views of it, which each thread keeps from round to round.

    For short rows making them anew would cost as much as the arithmetic.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, torch.dtype, torch.device], _Sweeps] = {}

    def of(self, codes: Float[Tensor, "k n"]) -> _Sweeps:
        """What codes of this shape are swept in."""
        key = (*codes.shape, codes.dtype, codes.device)
        if key not in self._kept:
            self._kept[key] = _Sweeps.of(codes)
        return self._kept[key]


def swept(
    codes: Float[Tensor, "k n"],
    cross: Float[Tensor, "k n"],
    gram: Float[Tensor, "k k"],
    sweeps: int,
    scratch: Scratch | None = None,
) -> Float[Tensor, "k n"]:
    """``sweeps`` rounds over the codes, those of one concept after another set to their optimum, the others fixed.

    ``cross = C A^T`` and ``gram = C C^T``. Codes of a concept of length zero become zero. Give a ``scratch`` to calls
    for codes of the same shape.
    """
    if has_kernels(codes.device, len(codes)):
        return rounds(codes[None], cross[None], gram[None], sweeps)[0]
    return _sweep_until(codes, cross, gram, sweeps, 0.0, scratch)


def against(concepts: Float[Tensor, "k d"], rows: Float[Tensor, "n d"]) -> Float[Tensor, "k n"]:
    """``C A^T``."""
    if rows.device.type != "cpu" or nearly_one(len(rows), PRODUCT_ROWS):
        return concepts @ rows.T
    out = torch.empty(len(concepts), len(rows), dtype=rows.dtype)
    for part, place in zip(rows.split(PRODUCT_ROWS), out.split(PRODUCT_ROWS, dim=1), strict=True):
        torch.mm(concepts, part.T, out=place)
    return out


def pulled(codes: Float[Tensor, "k n"], rows: Float[Tensor, "n d"]) -> Float[Tensor, "k d"]:
    """``Z^T A``."""
    if rows.device.type != "cpu" or nearly_one(len(rows), PRODUCT_ROWS):
        return codes @ rows
    out = torch.zeros(len(codes), rows.shape[1], dtype=rows.dtype)
    for few, part in zip(codes.split(PRODUCT_ROWS, dim=1), rows.split(PRODUCT_ROWS), strict=True):
        out.addmm_(few, part)
    return out


def part_rows(n: int, rank: int, device: torch.device) -> int:
    """How many rows are taken at a time: as many as have their codes in the cache of a CPU, half of them at most.

    Elsewhere all of them, and where they are hardly more than one part. Never by the number of cores: sums would be
    rounded in another order.
    """
    step = max(CACHE_ROWS, min(MOST_ROWS, CACHE_CODES // rank, -(-n // 2)))
    return max(n, 1) if device.type != "cpu" or nearly_one(n, step) else step


def _sweep_until(
    codes: Tensor, cross: Tensor, gram: Tensor, sweeps: int, settled: float, scratch: Scratch | None = None
) -> Tensor:
    own = gram.diagonal()
    flags = None if all_positive(own) else (own > 0).to(codes.dtype)[:, None]
    own = (own if flags is None else _or_one(own)).unsqueeze(1)
    weights = (gram / own).fill_diagonal_(0)
    narrow = own.to(codes.dtype)
    scale = narrow.reciprocal() if flags is None else flags / narrow
    scratch = scratch or Scratch()
    rank, n = codes.shape
    step = part_rows(n, rank, codes.device)
    parts = [(codes, cross)] if n <= step else zip(codes.split(step, dim=1), cross.split(step, dim=1), strict=True)
    found = []
    for some, aims in parts:
        work = scratch.of(some)
        work.begin(weights, some, flags, aims, scale)
        for _ in range(sweeps):
            before = work.z.clone() if settled else work.z
            work.sweep()
            if settled and float((work.z - before).norm()) <= settled * float(work.z.norm()):
                break
        found.append(work.z.clone())
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def all_positive(values: Float[Tensor, "k"]) -> bool:
    """Whether a few numbers are all above zero, asked where that costs less than an operation on them."""
    return values.is_cpu and all(one > 0 for one in values.tolist())


def _or_one(values: Tensor) -> Tensor:
    """A few numbers, with one in the place of those that are not above zero."""
    return values if all_positive(values) else torch.where(values > 0, values, 1.0)


_View: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Block:
    """Views for a few concepts out of many.

    What all codes hold before the block is taken off the ``target`` in one product with ``before``, which leaves
    ``aims``. ``inside`` are the weights of the block on itself, and lie in ``before`` at ``place`` as far as they meet
    codes that the block has not changed yet: concept j meets the new codes of concepts 0 to j - 1, and the old ones of
    all others. ``each``: for each concept its aim, codes that have changed, the weights on them, and its own codes.
    """

    rows: Tensor
    inside: Tensor
    before: Tensor
    place: Tensor
    target: Tensor
    aims: Tensor
    each: Sequence[_View]


@dataclass(frozen=True)
class _Sweeps:
    """Codes to be swept in place, what they aim at, the weights of concepts on each other with their signs turned, and
    views of them.

    Up to ``BLOCK_CONCEPTS`` concepts meet all others at once (``whole``: one rounding less), more of them in blocks.
    """

    z: Tensor
    target: Tensor
    weights: Tensor
    whole: Sequence[_View]
    blocks: Sequence[_Block]

    @classmethod
    def of(cls, like: Tensor) -> _Sweeps:
        """Memory for codes of this shape."""
        k, n = like.shape
        z, target, weights = (like.new_empty(shape) for shape in ((k, n), (k, n), (k, k)))
        codes, rows = z.unbind(), weights.unbind()
        if k <= BLOCK_CONCEPTS:
            whole = [(aim, z.T, row, own) for aim, row, own in zip(target.unbind(), rows, codes, strict=True)]
            return cls(z, target, weights, whole, ())
        spare, blocks = like.new_empty(BLOCK_CONCEPTS, n), []
        for at in range(0, k, BLOCK_CONCEPTS):
            own = slice(at, min(at + BLOCK_CONCEPTS, k))
            here, aims, before = z[own], spare[: own.stop - at], torch.empty_like(weights[own])
            each = [(aims[j], here[:j].T, rows[at + j][at : at + j], codes[at + j]) for j in range(len(here))]
            inside = weights[own, own]
            blocks.append(_Block(weights[own], inside, before, before[:, own], target[own], aims, each))
        return cls(z, target, weights, (), blocks)

    def begin(self, weights: Tensor, codes: Tensor, flags: Tensor | None, aims: Tensor, scale: Tensor) -> None:
        """Take up codes and aims, each times its factor; without ``flags`` all codes stay."""
        self.weights.copy_(weights).neg_()
        for block in self.blocks:
            block.before.copy_(block.rows)
            block.place.copy_(block.inside.triu(1))
        if flags is None:
            self.z.copy_(codes)
        else:
            torch.mul(codes, flags, out=self.z)
        torch.mul(aims, scale, out=self.target)

    def sweep(self) -> None:
        """One round over all codes, concept after concept; within a block nothing but the block has changed."""
        addmv, relu_, clamp_min = torch.addmv, torch.relu_, torch.clamp_min
        for aim, changed, weights, codes in self.whole:
            # Straight into the codes, which are among what is summed: their own weight is zero.
            addmv(aim, changed, weights, out=codes)
            relu_(codes)
        for block in self.blocks:
            torch.addmm(block.target, block.before, self.z, out=block.aims)
            for number, (aim, changed, weights, codes) in enumerate(block.each):
                if number:  # before its first concept nothing of the block has changed
                    aim.addmv_(changed, weights)
                clamp_min(aim, 0, out=codes)


def solved(
    a_ND: Float[Tensor, "n d"], concepts: Float[Tensor, "k d"], sweeps: int, settled: float
) -> Float[Tensor, "k n"]:
    """Codes without earlier ones: sweeps until one moves them by at most ``settled`` of their length, or ``sweeps``.

    From the unconstrained solution with its negative part cut off, or from zero for rows where that is better: concepts
    that nearly cancel would take hundreds of sweeps from zero.
    """
    cross = against(concepts.to(a_ND.dtype), a_ND)
    gram = concepts.double() @ concepts.double().T
    free = torch.linalg.pinv(gram, rtol=len(gram) * torch.finfo(a_ND.dtype).eps, hermitian=True).to(a_ND.dtype)
    codes = (free @ cross).clamp_min_(0)
    gain = 2 * (codes * cross).sum(dim=0) - (codes * (gram.to(a_ND.dtype) @ codes)).sum(dim=0)
    settle = _settle_by_kernel if has_kernels(codes.device, len(codes)) else _sweep_until
    return settle(codes * (gain > 0), cross, gram, sweeps, settled)


def _settle_by_kernel(codes: Tensor, cross: Tensor, gram: Tensor, sweeps: int, settled: float) -> Tensor:
    """The same sweeps on a GPU, a few of them between two questions whether one has settled."""
    done = 0
    while done < sweeps:
        window, moved = [codes], list[Tensor]()
        for _ in range(min(WINDOW, sweeps - done)):
            window.append(rounds(window[-1][None], cross[None], gram[None], 1)[0])
            moved.append(torch.stack([(window[-1] - window[-2]).norm(), window[-1].norm()]))
        told = torch.stack(moved).tolist()
        first = next((at for at, (change, size) in enumerate(told, start=1) if change <= settled * size), None)
        if first is not None:
            return window[first]
        codes, done = window[-1], done + len(told)
    return codes


def second_moment(codes: Float[Tensor, "k n"]) -> Float[Tensor, "k k"]:
    """``Z^T Z`` in float64."""
    if codes.device.type != "cpu":
        parts = -(-codes.shape[1] // SPLIT_COLUMNS)
        short = parts * SPLIT_COLUMNS - codes.shape[1]
        full = torch.nn.functional.pad(codes, (0, short)) if short else codes
        wide = full.reshape(len(codes), parts, SPLIT_COLUMNS).transpose(0, 1).double()
        return (wide @ wide.mT).sum(dim=0)
    wide = (codes if codes.shape[1] <= BLOCK_ROWS else codes[:, :BLOCK_ROWS]).double()
    total = wide @ wide.T
    for at in range(BLOCK_ROWS, codes.shape[1], BLOCK_ROWS):
        wide = codes[:, at : at + BLOCK_ROWS].double()
        total += wide @ wide.T
    return total


def best_concepts(
    codes: Float[Tensor, "k n"], a_ND: Float[Tensor, "n d"], before: Float[Tensor, "k d"]
) -> Float[Tensor, "k d"]:
    """The concepts that fit these codes best; the same bits for any number of cores, since a descent begins here."""
    second, pull = second_moment(codes), pulled(codes, a_ND).double()
    with threads(1):
        return least_squares(second, pull, before, a_ND.dtype)


def least_squares(
    second: Float[Tensor, "k k"], pull: Float[Tensor, "k d"], before: Float[Tensor, "k d"], dtype: torch.dtype
) -> Float[Tensor, "k d"]:
    """Concepts that solve ``Z^T Z C = Z^T A``, as a step from ``before``; ``dtype`` is that of the products behind it.

    Where codes of two concepts are the same up to rounding, the step leaves their difference as it was: it still
    lowers the error, and nothing grows without bound.
    """
    size = _or_one(second.diagonal().sqrt())
    column = size.unsqueeze(1)
    values, vectors = torch.linalg.eigh((second / column).div_(size))
    least = len(values) * torch.finfo(dtype).eps
    if not (values.is_cpu and (told := values.tolist())[0] > least * told[-1]):
        values = torch.where(values > least * values[-1], values, torch.inf)
    axes = vectors.div_(column)
    gap = axes.T @ torch.addmm(pull, second, before, alpha=-1)
    return torch.addmm(before, axes, gap.div_(values.unsqueeze(1)))


def reseeded(
    a_ND: Float[Tensor, "n d"], concepts: Float[Tensor, "k d"], codes: Float[Tensor, "k n"], dead: Bool[Tensor, "k"]
) -> Float[Tensor, "k d"] | None:
    """Concepts without rows point at the rows that are fitted worst; None where all are fitted to rounding.

    Their codes are still zero, so that the error does not move.
    """
    step = max(1, a_ND.shape[0] // RESEED_ROWS)
    sample = a_ND[::step]
    left = sample - codes[:, ::step].T @ concepts.to(a_ND.dtype)
    worst = torch.linalg.vector_norm(left, dim=1)
    size = torch.linalg.vector_norm(sample, dim=1)
    order = worst.argsort(descending=True, stable=True)[: int(dead.sum())]
    real = worst[order] > 64 * torch.finfo(a_ND.dtype).eps * max(float(size.max()), 1e-30)
    if not bool(real.any()):
        return None
    new, places = concepts.clone(), dead.nonzero().reshape(-1)[: len(order)]
    new[places[real]] = left[order[real]].double()
    return new
