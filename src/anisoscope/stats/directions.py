"""Directions: the sum of unit vectors, all that the mean cosine of all pairs needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import ShapeError, ZeroRowError, name_rows
from anisoscope.stats.memory import rows_in_hand

BLOCK_ROWS = 2048  # a block is read from memory once and then multiplied from cache
SWEEP_ROWS = 1 << 17  # rows whose partial sums are held together: a hundredth of the rows themselves
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
        for at in range(0, len(rows), SWEEP_ROWS):
            total += _unit_sum(rows[at : at + SWEEP_ROWS].detach(), start + at)
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


def _unit_sum(rows: Float[Tensor, "n d"], start: int) -> Float[Tensor, "d"]:
    """``sum x / |x|`` in float64. Each block is read from memory once: for its lengths, and then for its sums."""
    whole, (n, width) = len(rows) - len(rows) % PART_ROWS, rows.shape
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    length = torch.empty(n, dtype=dtype, device=rows.device)
    parts = torch.empty((whole // PART_ROWS, 1, width), dtype=dtype, device=rows.device)
    step = rows_in_hand(BLOCK_ROWS, width, rows.device)
    for at in range(0, whole, step):
        end = min(at + step, whole)
        wide, here = rows[at:end].to(dtype), length[at:end]
        torch.linalg.vector_norm(wide, dim=1, out=here)
        # A batch of short products reads the rows at twice the speed of one long one, and rounds less.
        weights = here.reciprocal().view(-1, 1, PART_ROWS)
        torch.bmm(weights, wide.reshape(-1, PART_ROWS, width), out=parts[at // PART_ROWS : end // PART_ROWS])
    rest = rows[whole:].to(dtype)
    torch.linalg.vector_norm(rest, dim=1, out=length[whole:])
    # Looked at once and afterwards: an infinite or lost square shows in the length, and then nothing above counts.
    if not _is_safe(length):
        blocks = range(0, n, BLOCK_ROWS)
        sums = [unit_rows(rows[at : at + BLOCK_ROWS], start + at).sum(dim=0, dtype=torch.float64) for at in blocks]
        return torch.stack(sums).sum(dim=0)
    return parts.double().sum(dim=(0, 1)) + (length[whole:].reciprocal() @ rest).double()


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
