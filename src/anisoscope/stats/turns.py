"""Turns: angles between successive steps along paths, summed over short blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.rows import Chunk

TURNS_PER_BLOCK = 64  # consecutive angles share steps; blocks of this many keep that dependence inside


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
    if paths.shape[0] == 0 or paths.shape[1] < 3:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    # Padding may hold anything: it is zeroed before it is subtracted, and its angles are not counted.
    clean = torch.where(keep[..., None], paths, 0.0)
    steps = clean.double().diff(dim=1)
    steps = steps / steps.abs().max().clamp_min(torch.finfo(torch.float64).tiny)  # squares stay in range
    length = torch.linalg.vector_norm(steps, dim=-1, keepdim=True)
    unit = steps / torch.where(length > 0, length, 1.0)
    a, b = unit[:, :-1], unit[:, 1:]
    # Stable at 0 and at 180 degrees, where the arc cosine is not.
    angle = 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))
    moves = length[..., 0] > 0
    counted = keep[:, :-2] & keep[:, 1:-1] & keep[:, 2:] & moves[:, :-1] & moves[:, 1:]
    degrees = torch.rad2deg(angle.double()) * counted
    sums = torch.cat([part.sum(dim=1) for part in degrees.split(TURNS_PER_BLOCK, dim=1)])
    counts = torch.cat([part.sum(dim=1).double() for part in counted.split(TURNS_PER_BLOCK, dim=1)])
    used = counts > 0
    return sums[used].cpu(), counts[used].cpu()
