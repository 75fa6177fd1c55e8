"""Memory for what is large and short-lived, and how much of it is in hand at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SPREAD_CELLS = 1 << 25  # of rows in hand at a time on a GPU, which a step for each block of rows would leave idle


def scratch(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for something large that is filled at once and dropped soon, on the device of ``like``.

    From numpy where that is the CPU: it asks the system for large pages, and touching fresh small ones costs more time
    than much of what is done to them.
    """
    wanted = dtype or like.dtype
    kinds = {torch.float32: np.float32, torch.float64: np.float64}
    if like.device.type != "cpu" or wanted not in kinds:
        return torch.empty(shape, dtype=wanted, device=like.device)
    return torch.from_numpy(np.empty(shape, dtype=kinds[wanted]))


def rows_in_hand(block: int, width: int, device: torch.device) -> int:
    """Rows that a step is taken for: a block, which stays in a processor's cache, or as many as keep a GPU busy."""
    return block * (1 if device.type == "cpu" else max(1, SPREAD_CELLS // (block * width)))
