"""Exact nearest neighbours of every row among the others: which search serves, by a rule that can be read.

``search`` says how it stays exact and fast on a CPU, ``neighbors_gpu`` how on a GPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import OptionError, TooFewRowsError
from anisoscope.measures.all_pairs import sweep_all
from anisoscope.measures.integers import integers_serve
from anisoscope.measures.neighbors_gpu import nearest_by_tiles
from anisoscope.measures.plan import Plan
from anisoscope.measures.search import FEW_ROWS, Neighbors, neighbors_of
from anisoscope.stats.precision import in_full_precision

SWEPT_ROWS, SWEPT_COLUMNS, SWEPT_NEIGHBORS = 4096, 256, 4  # more rows, such width, no more neighbours: a sweep pays


@in_full_precision
def nearest_neighbors(rows: Float[Tensor, "n d"], k: int, *, plan: Plan | None = None, seed: int = 0) -> Neighbors:
    """The ``k`` nearest other rows of every row, exact in float64. Which of rows at equal distances are told may
    depend on the number of cores.

    ``seed`` drives the choice of landmarks and of the sample for planning, which change the time taken and not the
    result. Memory beyond the rows themselves: a few tiles, and the kept axes in float32; or a few tiles for each core,
    a byte for each entry and some hundred for each neighbour asked for.
    """
    n, rows = len(rows), rows.detach()
    if k < 1:
        raise OptionError(f"k must be at least 1, got {k}")
    if n < k + 1:
        raise TooFewRowsError(f"{k} neighbours need at least {k + 1} distinct rows, got {n}")
    if plan is None and by_tiles(rows.device):
        return nearest_by_tiles(rows, k)
    if plan is None and n <= few_rows(k, rows.shape[1]):
        return neighbors_of(rows, torch.arange(n, device=rows.device), k)
    return sweep_all(rows, k, plan, seed)


def few_rows(k: int, width: int) -> int:
    """Up to how many rows all bounds of a row are looked at together: fewer where a sweep in integers is cheaper."""
    return SWEPT_ROWS if k <= SWEPT_NEIGHBORS and width >= SWEPT_COLUMNS and integers_serve() else FEW_ROWS


def by_tiles(device: torch.device) -> bool:
    """Whether one plain product of all pairs is the way: where products are cheap and waiting for them is dear."""
    return device.type == "cuda"
