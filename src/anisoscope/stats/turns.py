"""Turns: angles between successive steps along paths, summed over short blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.rows import Chunk

TURNS_PER_BLOCK = 64  # consecutive angles share steps; blocks of this many keep that dependence inside
PIECE_NUMBERS = 1 << 17  # numbers looked at together: all that is made on the way stays in cache


@dataclass(frozen=True)
class Turns:
    """Sum in degrees and number of the angles of each block, and the last two rows of a path that may go on."""

    sums: Float[Tensor, "g"]
    counts: Float[Tensor, "g"]
    tail: Float[Tensor, "1 t d"] | None
    tail_keep: Bool[Tensor, "1 t"] | None

    @classmethod
    def empty(cls) -> Turns:
        """The state of no path."""
        none = torch.zeros(0, dtype=torch.float64)
        return cls(none, none, None, None)

    def update(self, chunk: Chunk) -> Turns:
        """The state after this chunk too: it continues the path before it, or holds whole paths of its own."""
        paths = chunk.paths
        keep = chunk.keep
        flags = torch.ones(paths.shape[:2], dtype=torch.bool, device=paths.device) if keep is None else keep
        if chunk.continues and self.tail is not None and self.tail_keep is not None:
            paths = torch.cat([self.tail, paths], dim=1)
            flags = torch.cat([self.tail_keep, flags], dim=1)
        sums, counts = _blocks(paths, flags)
        tail = (paths[:, -2:].clone(), flags[:, -2:].clone()) if chunk.continues else (None, None)
        return Turns(torch.cat([self.sums, sums]), torch.cat([self.counts, counts]), *tail)


def _blocks(paths: Float[Tensor, "s t d"], keep: Bool[Tensor, "s t"]) -> tuple[Tensor, Tensor]:
    count, length, width = paths.shape
    if count == 0 or length < 3:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    few = max(1, PIECE_NUMBERS // (length * width))
    pieces = [_angles(*piece) for piece in zip(paths.split(few), keep.split(few), strict=True)]
    angle, moves = (torch.cat(part) for part in zip(*pieces, strict=True))
    counted = keep[:, :-2] & keep[:, 1:-1] & keep[:, 2:] & moves[:, :-1] & moves[:, 1:]
    degrees = torch.rad2deg(angle.double()) * counted
    sums = torch.cat([part.sum(dim=1) for part in degrees.split(TURNS_PER_BLOCK, dim=1)])
    counts = torch.cat([part.sum(dim=1).double() for part in counted.split(TURNS_PER_BLOCK, dim=1)])
    used = counts > 0
    return sums[used].cpu(), counts[used].cpu()


def _angles(
    paths: Float[Tensor, "s t d"], keep: Bool[Tensor, "s t"]
) -> tuple[Float[Tensor, "s a"], Bool[Tensor, "s m"]]:
    """Angles between successive steps, and which steps have a length.

    In float32 for rows that have no more digits: a difference of two such rows is rounded in its own last digit, and
    so is all that follows, which leaves 1e-5 degrees of an angle. In float64 where squares would leave float32's range.
    """
    # Padding may hold anything: it is zeroed before it is subtracted, and its angles are not counted.
    clean = paths if bool(keep.all()) else torch.where(keep[..., None], paths, 0.0)
    if clean.dtype != torch.float64:
        steps = clean.float().diff(dim=1)
        length = torch.linalg.vector_norm(steps, dim=-1, keepdim=True)
        if _is_safe(steps, length):
            return _between(steps, length)
    steps = clean.double().diff(dim=1)
    steps = steps / steps.abs().max().clamp_min(torch.finfo(torch.float64).tiny)  # squares stay in range
    return _between(steps, torch.linalg.vector_norm(steps, dim=-1, keepdim=True))


def _between(steps: Float[Tensor, "s m d"], length: Float[Tensor, "s m 1"]) -> tuple[Tensor, Tensor]:
    unit = steps.div_(torch.where(length > 0, length, 1.0))
    a, b = unit[:, :-1], unit[:, 1:]
    # Stable at 0 and at 180 degrees, where the arc cosine is not.
    angle = 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))
    return angle, length[..., 0] > 0


def _is_safe(steps: Float[Tensor, "s m d"], length: Float[Tensor, "s m 1"]) -> bool:
    """Whether no square over- or underflowed in float32; a step of nothing but zeros has length zero and is fine."""
    if not bool((length < 1e15).all()):
        return False
    short = length[..., 0] < 1e-15
    return not bool(short.any()) or not bool(steps[short].any())
