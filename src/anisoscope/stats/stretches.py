"""Stretches: short stretches of consecutive rows, evenly spread over a stream of unknown length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

STRETCH_ROWS = 128
"""Rows in a stretch: dependence between neighbouring tokens stays inside it."""

MOST_STRETCHES = 128
"""Once there are more than this, every second one is dropped and the spacing doubles: between half and all remain."""


@dataclass(frozen=True)
class Stretches:
    """Every ``spacing``-th stretch of ``STRETCH_ROWS`` rows seen so far, in order, and how many rows were seen."""

    seen: int
    spacing: int
    rows: Float[Tensor, "n d"]

    @classmethod
    def empty(cls, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Stretches:
        """The state of no rows."""
        return cls(0, 1, torch.zeros(0, width, dtype=dtype, device=device))

    def update(self, rows: Float[Tensor, "n d"]) -> Stretches:
        """The state after these rows too, which follow the ones before."""
        number = torch.arange(self.seen, self.seen + len(rows), device=rows.device) // STRETCH_ROWS
        wanted = (number % self.spacing == 0).nonzero().reshape(-1)
        if len(wanted) == 0:
            return Stretches(self.seen + len(rows), self.spacing, self.rows)
        held = torch.cat([self.rows, rows[wanted].to(self.rows)])
        spacing = self.spacing
        while len(held) > MOST_STRETCHES * STRETCH_ROWS:
            stretch = torch.arange(len(held), device=held.device) // STRETCH_ROWS
            held, spacing = held[stretch % 2 == 0], 2 * spacing
        return Stretches(self.seen + len(rows), spacing, held)
