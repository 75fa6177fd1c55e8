"""The two half steps of semi-NMF, each of which lowers ``||A - Z C||^2`` or leaves it. Codes lie here as ``(K,N)``.

Rows and codes are multiplied in the type they come in; everything of size K x K is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.tangent.sweeps import has_kernels, rounds

CACHE_CODES = 524_288  # codes swept at a time on a CPU, so that they stay in its cache
CACHE_ROWS, MOST_ROWS = 1024, 8192  # of so many rows at least, and at most
PRODUCT_ROWS = 1024  # rows of one product on a CPU: longer ones leave its cache
BLOCK_CONCEPTS = 16  # what all concepts hold is taken off the rows of so many at once, in one product
BLOCK_ROWS = 8192
SPLIT_COLUMNS = 1024  # codes squared at a time on a GPU, where long thin products leave most of it idle
WINDOW = 4  # sweeps on a GPU between two questions to it
RESEED_ROWS = 4096  # rows looked at for a new direction


def swept(
    codes: Float[Tensor, "k n"], cross: Float[Tensor, "k n"], gram: Float[Tensor, "k k"], sweeps: int
) -> Float[Tensor, "k n"]:
    """``sweeps`` rounds over the codes, those of one concept after another set to their optimum, the others fixed.

    ``cross = C A^T`` and ``gram = C C^T``. Codes of a concept of length zero become zero.
    """
    if has_kernels(codes.device, len(codes)):
        return rounds(codes[None], cross[None], gram[None], sweeps)[0]
    return _sweep_until(codes, cross, gram, sweeps, 0.0)


def against(concepts: Float[Tensor, "k d"], rows: Float[Tensor, "n d"]) -> Float[Tensor, "k n"]:
    """``C A^T``."""
    if rows.device.type != "cpu" or len(rows) <= PRODUCT_ROWS:
        return concepts @ rows.T
    out = torch.empty(len(concepts), len(rows), dtype=rows.dtype)
    for part, place in zip(rows.split(PRODUCT_ROWS), out.split(PRODUCT_ROWS, dim=1), strict=True):
        torch.mm(concepts, part.T, out=place)
    return out


def pulled(codes: Float[Tensor, "k n"], rows: Float[Tensor, "n d"]) -> Float[Tensor, "k d"]:
    """``Z^T A``."""
    if rows.device.type != "cpu" or len(rows) <= PRODUCT_ROWS:
        return codes @ rows
    out = torch.zeros(len(codes), rows.shape[1], dtype=rows.dtype)
    for few, part in zip(codes.split(PRODUCT_ROWS, dim=1), rows.split(PRODUCT_ROWS), strict=True):
        out.addmm_(few, part)
    return out


def part_rows(n: int, rank: int, device: torch.device) -> int:
    """How many rows are taken at a time: as many as have their codes in the cache of a CPU, half of them at most.

    Elsewhere all of them. Never by the number of cores: sums would be rounded in another order.
    """
    if device.type != "cpu":
        return max(n, 1)
    return max(CACHE_ROWS, min(MOST_ROWS, CACHE_CODES // rank, -(-n // 2)))


def _sweep_until(codes: Tensor, cross: Tensor, gram: Tensor, sweeps: int, settled: float) -> Tensor:
    own = gram.diagonal()
    usable = own > 0
    own = torch.where(usable, own, 1.0)[:, None]
    blocks = _blocks((gram / own).fill_diagonal_(0).to(codes.dtype))
    flags = usable.to(codes.dtype)[:, None]
    scale = flags / own.to(codes.dtype)
    rank, n = codes.shape
    step = part_rows(n, rank, codes.device)
    parts = [(codes, cross)] if n <= step else zip(codes.split(step, dim=1), cross.split(step, dim=1), strict=True)
    found = []
    for some, aims in parts:
        z = (some * flags).contiguous()
        work = _Sweeps.of(z, aims * scale, blocks)
        for _ in range(sweeps):
            before = z.clone() if settled else z
            work.sweep()
            if settled and float((z - before).norm()) <= settled * float(z.norm()):
                break
        found.append(z)
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


@dataclass(frozen=True)
class _Block:
    """Weights of a few concepts: on all codes as they are before the block, and on those that it has changed by then.

    Concept j of the block meets the new codes of concepts 0 to j - 1 of it, and the old ones of all others. Where one
    block holds all concepts nothing is taken off before, and each meets all others at once: one rounding less.
    """

    concepts: slice
    before: Tensor | None
    changed: Sequence[Tensor]


def _blocks(weights: Tensor) -> list[_Block]:
    if len(weights) <= BLOCK_CONCEPTS:
        return [_Block(slice(0, len(weights)), None, weights.unbind())]
    found = []
    for at in range(0, len(weights), BLOCK_CONCEPTS):
        own = slice(at, min(at + BLOCK_CONCEPTS, len(weights)))
        before, inside = weights[own].clone(), weights[own, own]
        before[:, own] = inside.triu(1)
        found.append(_Block(own, before, [inside[j, :j] for j in range(len(inside))]))
    return found


@dataclass(frozen=True)
class _Sweeps:
    """Codes to be swept in place. Views of them are made once: for short rows they cost as much as the arithmetic.

    ``views``: for each block, for each concept, what it aims at, codes that have changed, the weights on them, and its
    own codes. ``spare`` is memory for aims, or for one of them.
    """

    z: Tensor
    target: Tensor
    blocks: Sequence[_Block]
    views: Sequence[Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]]
    spare: Tensor

    @classmethod
    def of(cls, z: Tensor, target: Tensor, blocks: Sequence[_Block]) -> _Sweeps:
        codes = z.unbind()
        if blocks[0].before is None:
            (block,), whole = blocks, z.T
            views = [[(aim, whole, w, own) for aim, w, own in zip(target.unbind(), block.changed, codes, strict=True)]]
            return cls(z, target, blocks, views, torch.empty_like(codes[0]))
        spare = torch.empty_like(z[:BLOCK_CONCEPTS])
        aims, views = spare.unbind(), []
        for block in blocks:
            first = block.concepts.start
            views.append([
                (aims[j], z[first : first + j].T, weights, codes[first + j])
                for j, weights in enumerate(block.changed)
            ])  # fmt: skip
        return cls(z, target, blocks, views, spare)

    def sweep(self) -> None:
        """One round over all codes, concept after concept; within a block nothing but the block has changed."""
        for block, views in zip(self.blocks, self.views, strict=True):
            if block.before is None:
                spare, addmv, clamp_min = self.spare, torch.addmv, torch.clamp_min
                for aim, changed, weights, codes in views:
                    addmv(aim, changed, weights, alpha=-1, out=spare)
                    clamp_min(spare, 0, out=codes)
                continue
            aims = self.spare[: len(views)]
            torch.addmm(self.target[block.concepts], block.before, self.z, alpha=-1, out=aims)
            for number, (aim, changed, weights, codes) in enumerate(views):
                if number:  # before its first concept nothing of the block has changed
                    aim.addmv_(changed, weights, alpha=-1)
                torch.clamp_min(aim, 0, out=codes)


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
        full = torch.nn.functional.pad(codes, (0, parts * SPLIT_COLUMNS - codes.shape[1]))
        wide = full.view(len(codes), parts, SPLIT_COLUMNS).transpose(0, 1).double()
        return (wide @ wide.mT).sum(dim=0)
    total = torch.zeros(len(codes), len(codes), dtype=torch.float64, device=codes.device)
    for part in codes.split(BLOCK_ROWS, dim=1):
        wide = part.double()
        total += wide @ wide.T
    return total


def best_concepts(
    codes: Float[Tensor, "k n"], a_ND: Float[Tensor, "n d"], before: Float[Tensor, "k d"]
) -> Float[Tensor, "k d"]:
    """The concepts that fit these codes best; the same bits for any number of cores, since a descent begins here."""
    second, pull, cores = second_moment(codes), pulled(codes, a_ND).double(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return least_squares(second, pull, before, a_ND.dtype)
    finally:
        torch.set_num_threads(cores)


def least_squares(
    second: Float[Tensor, "k k"], pull: Float[Tensor, "k d"], before: Float[Tensor, "k d"], dtype: torch.dtype
) -> Float[Tensor, "k d"]:
    """Concepts that solve ``Z^T Z C = Z^T A``, as a step from ``before``; ``dtype`` is that of the products behind it.

    Where codes of two concepts are the same up to rounding, the step leaves their difference as it was: it still
    lowers the error, and nothing grows without bound.
    """
    size = second.diagonal().sqrt()
    size = torch.where(size > 0, size, 1.0)
    column = size[:, None]
    values, vectors = torch.linalg.eigh(second / column / size)
    keep = values > len(values) * torch.finfo(dtype).eps * values[-1]
    gap = vectors.T @ ((pull - second @ before) / column)
    return before + vectors @ (gap / torch.where(keep, values, torch.inf)[:, None]) / column


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
