"""Half steps of semi-NMF for many fits by kernels that visit each row once; see ``kernels.visits``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device
from anisoscope.tangent.descending import BEGIN, GROW, GROW_LIMIT, SHRINK
from anisoscope.tangent.sweeps import has_kernels, inverses, power_of_two

LEAST_PLACES = 16  # what a product on tensor cores takes
FEW_CONCEPTS, MANY_BYTES = 32, 160 << 10  # more than so few want so much shared memory, which small GPUs lack


def can_visit(a: Float[Tensor, "f n d"], rank: int) -> bool:
    """Whether the kernels serve these rows."""
    if not has_kernels(a.device, rank) or a.dtype != torch.float32:
        return False
    if rank <= FEW_CONCEPTS or not a.is_cuda:
        return True
    return getattr(torch.cuda.get_device_properties(a.device), "shared_memory_per_block_optin", 0) >= MANY_BYTES


@on_its_device
def warm_codes(
    a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"], sweeps: int, settled: float
) -> Float[Tensor, "f k n"]:
    """``descent.solved`` of all fits; rows settle 128 at a time, each part to the tolerance of all together."""
    kernels, (fits, n, width), rank = kernels_of("visits"), a.shape, concepts.shape[1]
    gram = concepts @ concepts.mT
    active = torch.ones(fits, dtype=torch.bool, device=a.device)
    # Where concepts nearly cancel there is no inverse, and rows start from zero.
    free, _ = inverses(gram, active, 1 / (rank * torch.finfo(a.dtype).eps))
    codes = torch.empty(fits, rank, n, dtype=a.dtype, device=a.device)
    kernels.warm_codes[(-(-n // kernels.ROWS), fits)](
        a.contiguous(), concepts.to(a.dtype).contiguous(), gram, free, codes, n, width, sweeps, settled,
        **_options(rank),
    )  # fmt: skip
    return codes


class Sums(NamedTuple):
    """What concepts and errors follow from. ``pull`` and ``second`` are ``Z^T A`` and ``Z^T Z`` of the codes that
    concepts follow; ``own`` and ``met`` are ``Z^T Z`` and ``<Z, A C^T>`` of those before they went on."""

    pull: Tensor
    second: Tensor
    own: Tensor
    met: Tensor


@dataclass(frozen=True)
class Books:
    """What is told of each fit from round to round; brought up to date in place.

    ``active``: it goes on. ``sound``: nothing unusual was met. ``iterations`` are rounds that were kept. Codes go on by
    ``ahead`` of their last change in the next round: by ``pace``, which grows up to ``limit`` and shrinks as
    in ``descending``, or not at all, where there is no last or the last round is to be done ``again``. The last round
    was ``worth`` so many plain ones.
    """

    active: Bool[Tensor, "f"]
    sound: Bool[Tensor, "f"]
    error: Float[Tensor, "f"]
    iterations: Float[Tensor, "f"]
    pace: Float[Tensor, "f"]
    limit: Float[Tensor, "f"]
    ahead: Float[Tensor, "f"]
    again: Bool[Tensor, "f"]
    worth: Float[Tensor, "f"]

    @classmethod
    def begun(cls, like: Float[Tensor, "f"], momentum: float) -> Books:
        """Nothing has happened yet; ``like`` is float64."""
        active, sound = torch.ones(2, len(like), dtype=torch.bool, device=like.device)
        iterations, ahead, worth = like.new_zeros(3, len(like))
        error, pace, limit = (torch.full_like(like, one) for one in (1.0, min(BEGIN, momentum), momentum))
        return cls(active, sound, error, iterations, pace, limit, ahead, ~active, worth)


@dataclass(frozen=True)
class HalfSteps:
    """Rows of several fits, and room for what each tile of rows adds up to, and for all of them together."""

    a: Float[Tensor, "f n d"]
    parts: Sums
    sums: Sums

    @classmethod
    def of(cls, a: Float[Tensor, "f n d"], rank: int) -> HalfSteps:
        """Room for so many concepts."""
        fits, n, width = a.shape
        tiles = -(-n // kernels_of("visits").ROWS)
        pull, second, own = (a.new_empty(fits, tiles, rank, size) for size in (width, rank, rank))
        parts = Sums(pull, second, own, a.new_empty(fits, tiles, dtype=torch.float64))
        # Zeros: what is not active is never written, and meets an inverse of zero.
        shapes = [one[:, 0].shape for one in parts]
        each = a.new_zeros(sum(map(math.prod, shapes)), dtype=torch.float64).split([*map(math.prod, shapes)])
        return cls(a.contiguous(), parts, Sums(*(one.view(shape) for one, shape in zip(each, shapes, strict=True))))

    @on_its_device
    def take(
        self, codes: Float[Tensor, "f k n"], last: Float[Tensor, "f k n"], concepts: Float[Tensor, "f k d"],
        gram: Float[Tensor, "f k k"], books: Books, sweeps: int,
    ) -> Sums:  # fmt: skip
        """Rounds over the codes of the active fits, in place; ``last`` are the codes before they went on. Gives sums in
        float64, which the next call writes over."""
        kernels, (fits, n, width), (_, tiles, rank, _) = kernels_of("visits"), self.a.shape, self.parts.pull.shape
        kernels.half_step[(tiles, fits)](
            self.a, concepts.to(self.a.dtype).contiguous(), gram.contiguous(), codes, last, books.ahead, books.again,
            *self.parts, books.active, n, width, tiles, S=sweeps, **_options(rank),
        )  # fmt: skip
        # ``sum`` would copy all of it to float64 first, and that of fits that are not active too.
        kernels.add_up[(-(-rank * width // kernels.ADDED) + 2, fits)](
            *self.parts, books.active, *self.sums, tiles, rank * width, K=rank, P=_places(rank), B=kernels.ADDED
        )
        return self.sums


class Step(NamedTuple):
    """Concepts and their inner products before a round and after it; and whether they could be had from an inverse."""

    concepts: Float[Tensor, "f k d"]
    gram: Float[Tensor, "f k k"]
    fresh: Float[Tensor, "f k d"]
    fresh_gram: Float[Tensor, "f k k"]
    good: Bool[Tensor, "f"]


@on_its_device
def account(sums: Sums, step: Step, size: Float[Tensor, "f"], books: Books, tolerance: float, sure: float) -> None:
    """Bring the books up to date by the kernel, and take back what a round did that raised the error.

    ``sure`` is the part of a round's worth that counts; see ``descending``.
    """
    fits, rank, width = sums.pull.shape
    kernels = kernels_of("codes")
    kernels.account[(fits,)](
        *sums, *step[:-1], size, step.good, *vars(books).values(), width, tolerance,
        K=rank, P=power_of_two(rank), W=kernels.ENTRIES // power_of_two(rank), num_warps=8,
        GROW=GROW, SHRINK=SHRINK, GROW_LIMIT=GROW_LIMIT, SURE=sure,
    )  # fmt: skip


def account_plainly(
    sums: Sums, step: Step, size: Float[Tensor, "f"], books: Books, tolerance: float, sure: float
) -> None:
    """The same by plain operations; what is not active goes back to where it was, too."""
    _, _, fresh, fresh_gram, good = step
    rest = (sums.second * fresh_gram).sum(dim=(1, 2)) - 2 * (sums.pull * fresh).sum(dim=(1, 2))
    now = (size + rest).clamp_min(0) / size
    reached = (size + (sums.own * step.gram).sum(dim=(1, 2)) - 2 * sums.met).clamp_min(0) / size
    before, went, active = books.error.clone(), books.ahead > 0, books.active.clone()
    worth = 1 + books.ahead * books.worth
    least = tolerance * (sure * worth).clamp_min(1.0) * before
    back = went & (now > torch.minimum(reached, before))
    stays = back | ~active
    for new, old in ((fresh, step.concepts), (fresh_gram, step.gram)):
        new.copy_(torch.where(stays[:, None, None], old, new))
    grown = torch.where(went, torch.minimum(books.limit, GROW * books.pace), books.pace)
    higher = torch.where(went, (GROW_LIMIT * books.limit).clamp_max(1.0), books.limit)
    pace = torch.where(back, books.pace / SHRINK, grown)
    for book, entry in (
        (books.limit, torch.where(back, books.pace, higher)),
        (books.pace, pace),
        (books.ahead, torch.where(back, 0.0, pace)),
        (books.again, back),
        (books.sound, books.sound & good),
        (books.iterations, books.iterations + ~back),
        (books.error, torch.where(back, before, now)),
        (books.worth, worth),
        (books.active, ((before - now > least) | back) & good),
    ):
        book.copy_(torch.where(active, entry, book))


def _options(rank: int) -> dict[str, int]:
    kernels = kernels_of("visits")
    places = _places(rank)
    return {"K": rank, "P": places, "B": kernels.ROWS, "W": kernels.DEPTH, "num_warps": 4 if places < 64 else 8}


def _places(rank: int) -> int:
    return max(LEAST_PLACES, 1 << (rank - 1).bit_length())
