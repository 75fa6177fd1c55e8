"""The legend of axis letters. Bodies use these as suffixes: ``x_ND`` is a matrix of rows by width.

| letter | axis |
|---|---|
| N | tokens (rows) |
| D | model width |
| K | neighbours of a row, or rank of a tangent proxy where the text says so |
| M | anchors (rows around which a neighbourhood is looked at) |
| G | blocks of rows (error bars) |
| P | pairs of rows, or leading principal axes kept by a filter |
| B | bins, or control draws |
| R | rows of a sketch, or the rank of a spectrum |

In signatures the same letters are lower case, as jaxtyping strings: ``Float[Tensor, "n d"]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Integer, Num
from torch import Tensor

Matrix: TypeAlias = Num[Tensor, "... _"] | Num[np.ndarray, "... _"]
"""Rows in memory or in a file: the last axis is the width, the others are flattened into rows."""

RowsLike: TypeAlias = Matrix | Iterable[Matrix]
"""What every measure takes: a tensor, an array, a memmap, or an iterable of chunks of rows."""

Flags: TypeAlias = Bool[Tensor, "..."] | Bool[np.ndarray, "..."] | Integer[Tensor, "..."] | Integer[np.ndarray, "..."]
"""Flags of rows: booleans, or integers 0 and 1."""

MaskLike: TypeAlias = Flags | Iterable[Flags] | Sequence[int] | Sequence[Sequence[int]] | None
"""True (or 1) keeps a row. One flag for each row, in the shape of the rows' leading axes; for an iterable of chunks
either one array of flags for all of their rows, or an iterable with the flags of each chunk."""
