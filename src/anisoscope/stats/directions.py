"""Directions: the sum of unit vectors, all that the mean cosine of all pairs needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import ShapeError, ZeroRowError, name_rows

BLOCK_ROWS = 2048  # a block is read from memory once and then multiplied from cache
PART_ROWS = 128  # rows summed in float32 before float64 takes over


@dataclass(frozen=True)
class Directions:
    """``count`` rows and ``total = sum x_i / |x_i|`` in float64. ``merge`` is a plain sum."""

    count: int
    total: Float[Tensor, "d"]

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> Directions:
        """The state of no rows."""
        return cls(0, torch.zeros(width, dtype=torch.float64, device=device))

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.total.shape[0]

    def update(self, rows: Float[Tensor, "n d"], start: int = 0) -> Directions:
        """The state after these rows too; ``start`` is the number of the first one, for messages."""
        total = self.total.clone()
        for at in range(0, len(rows), BLOCK_ROWS):
            total += _unit_sum(rows[at : at + BLOCK_ROWS], start + at)
        return Directions(self.count + len(rows), total)

    def merge(self, other: Directions) -> Directions:
        """The state of both sets of rows together."""
        if self.width != other.width:
            raise ShapeError(f"cannot merge directions of width {self.width} and {other.width}")
        return Directions(self.count + other.count, self.total + other.total.to(self.total.device))


def unit_rows(rows: Float[Tensor, "n d"], start: int = 0) -> Float[Tensor, "n d"]:
    """Rows divided by their lengths, float32 or float64; scaled first so that no square over- or underflows."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    if _is_safe(length):
        return wide / length
    largest = wide.abs().amax(dim=1, keepdim=True)
    _refuse_zero(largest.reshape(-1), start)
    scaled = wide / largest
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)


def _unit_sum(block: Tensor, start: int) -> Tensor:
    wide = block if block.dtype == torch.float64 else block.float()
    length = torch.linalg.vector_norm(wide, dim=1)
    if not _is_safe(length):
        return unit_rows(block, start).sum(dim=0, dtype=torch.float64)
    length.reciprocal_()
    whole = len(wide) - len(wide) % PART_ROWS
    # A batch of short products reads the rows at twice the speed of one long one, and rounds less.
    parts = torch.bmm(length[:whole].view(-1, 1, PART_ROWS), wide[:whole].reshape(-1, PART_ROWS, wide.shape[1]))
    total = parts.sum(dim=(0, 1), dtype=torch.float64)
    return total if whole == len(wide) else total + (length[whole:] @ wide[whole:]).double()


def along(blocks: Float[Tensor, "g l d"], direction: Float[Tensor, "d"]) -> Float[Tensor, "g l"]:
    """``x . direction / |x|`` of each row, in two reads of the rows where their size is ordinary."""
    wide = blocks if blocks.dtype == torch.float64 else blocks.float()
    length = torch.linalg.vector_norm(wide, dim=2)
    if not _is_safe(length):
        flat = unit_rows(blocks.reshape(-1, blocks.shape[2]))
        return (flat @ direction.to(wide.dtype)).double().reshape(length.shape)
    # A batched product takes blocks that lie apart as they are, where a plain one would copy them together.
    line = direction.to(wide.dtype).expand(len(wide), 1, -1)
    return (torch.bmm(line, wide.transpose(1, 2))[:, 0] / length).double()


def _is_safe(length: Tensor) -> bool:
    """Whether no square over- or underflowed on the way to these lengths. NaN passes: sums of rows show it later."""
    small, large = (1e-140, 1e140) if length.dtype == torch.float64 else (1e-15, 1e15)
    low, high = length.aminmax()
    return not (float(low) < small or float(high) > large)


def _refuse_zero(length: Tensor, start: int) -> None:
    zero = (length == 0).nonzero().reshape(-1)
    if len(zero):
        numbers = (zero + start).tolist()
        raise ZeroRowError(
            f"{name_rows(numbers)} (among the kept rows) are all zeros and have no direction; mask them out"
        )
