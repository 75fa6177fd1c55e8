"""What a search for neighbours on a GPU found, before rows that are not certain have been searched again."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Found:
    """Distances to the nearest rows and their numbers, float64 by differences, and which rows are certain."""

    distances: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]
    settled: Bool[Tensor, "n"]
