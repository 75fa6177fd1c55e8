"""Error bars: from the influence of each row on a smooth functional, summed over blocks of consecutive rows; and from
disjoint subsamples for everything built on neighbours.

Tokens of one text are not independent. Blocks of consecutive rows keep most of that dependence inside a block, so the
spread between blocks is honest for ordered rows and equal to the usual error for shuffled ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.measures.search import distances_within
from anisoscope.stats.stretches import STRETCH_ROWS, Stretches

ERROR_BLOCKS = 64  # blocks for smooth functionals; Student's t with 63 degrees of freedom is nearly normal
SUBSAMPLES = 32  # disjoint subsamples for functionals of neighbours
SUBSAMPLE_ROWS = 512  # rows in each at most


@dataclass(frozen=True)
class Bar:
    """An error bar with its degrees of freedom and what it is over."""

    stderr: float
    dof: float
    over: str

    def scaled(self, factor: float) -> Bar:
        """The bar of a quantity ``factor`` times as large."""
        return Bar(self.stderr * abs(factor), self.dof, self.over)

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of an Estimate."""
        return {"stderr": self.stderr, "dof": self.dof, "over": self.over}


NO_BAR: dict[str, Any] = {"stderr": None, "dof": None, "over": None}


@dataclass(frozen=True)
class ErrorRows:
    """Blocks of equally many rows, standing for ``n`` rows; a view of the data where these lie in memory."""

    blocks: Float[Tensor, "g l d"]
    n: int
    over: str

    @cached_property
    def rows(self) -> Float[Tensor, "m d"]:
        """The rows of all blocks, one after the other."""
        return self.blocks.reshape(-1, self.blocks.shape[2])

    @property
    def enough(self) -> bool:
        """Whether there are blocks enough for an error bar: a spread of two numbers is not worth printing."""
        return len(self.blocks) >= 3

    @classmethod
    def from_stretches(cls, found: Stretches) -> ErrorRows:
        """Blocks from the stretches that a stream left behind; a short stream is cut as an array would be."""
        whole = len(found.rows) // STRETCH_ROWS
        if whole < ERROR_BLOCKS // 2:
            return spread_runs(found.rows, found.seen)
        over = f"rows, in {whole} blocks of consecutive ones"
        return cls(found.rows[: whole * STRETCH_ROWS].unflatten(0, (whole, -1)), found.seen, over)

    def bar(self, influence: Float[Tensor, "..."]) -> Bar | None:
        """The error bar of a functional whose value moves by ``influence_i / n`` when row i is weighted up."""
        if not self.enough:
            return None
        count = len(self.blocks)
        means = influence.double().reshape(count, -1).mean(dim=1)
        # The blocks hold len(rows) of n rows; an error bar of the mean over all shrinks by the root of that share.
        variance = float(means.var(correction=1)) / count * (influence.numel() / self.n)
        return Bar(math.sqrt(variance), count - 1, self.over)


def spread_runs(rows: Float[Tensor, "n d"], n: int) -> ErrorRows:
    """Runs of consecutive rows, evenly spread; single rows where there are too few for runs."""
    if n < 2 * ERROR_BLOCKS:
        return ErrorRows(rows[:, None], n, "rows")
    length = min(STRETCH_ROWS, n // ERROR_BLOCKS)
    stride = n // ERROR_BLOCKS
    blocks = rows[: ERROR_BLOCKS * stride].reshape(ERROR_BLOCKS, stride, -1)[:, :length]
    return ErrorRows(blocks, n, f"rows, in {ERROR_BLOCKS} blocks of consecutive ones")


def subsample_bars(
    rows: Float[Tensor, "n d"],
    k: int,
    estimate: Callable[[Float[Tensor, "l d"], Float[Tensor, "l k"]], Sequence[float]],
    values: Sequence[float],
    min_rows: int,
) -> list[Bar] | None:
    """Error bars of estimators built on ``k`` neighbours, from their spread over disjoint subsamples.

    Neighbours are shared, so the terms of such estimators are dependent and the textbook error is too small. Disjoint
    sets of rows share nothing. Each subsample is a run of consecutive rows, handed to ``estimate`` with the distances
    to its neighbours inside it; the relative spread of the estimates, times the root of (rows in a subsample / all
    rows), is the relative error of the whole. None where fewer than eight subsamples of ``min_rows`` rows fit, or where
    one of them cannot be measured.
    """
    n = len(rows)
    blocks = min(SUBSAMPLES, n // min_rows)
    if blocks < 8:
        return None
    stride = n // blocks
    length = min(max(SUBSAMPLE_ROWS, min_rows), stride)
    parts = rows[: blocks * stride].unflatten(0, (blocks, stride))[:, :length]
    try:
        distances = distances_within(parts, k)
        found = [list(estimate(part, near)) for part, near in zip(parts, distances, strict=True)]
    except AnisoscopeError:
        return None
    logs = torch.tensor(found, dtype=torch.float64).log()
    if not bool(torch.isfinite(logs).all()):
        return None
    relative = (logs.std(dim=0, correction=1) * math.sqrt(length / n)).tolist()
    over = f"rows, from {blocks} disjoint subsamples"
    return [Bar(value * spread, blocks - 1, over) for value, spread in zip(values, relative, strict=True)]


def mean_bar(values: Float[Tensor, "m"], over: str) -> Bar | None:
    """The error bar of a mean of independent values; None for fewer than three, or where they do not differ."""
    if len(values) < 3:
        return None
    stderr = float(values.double().std(correction=1)) / math.sqrt(len(values))
    return Bar(stderr, len(values) - 1, over) if stderr > 0 else None


def fields(bar: Bar | None) -> dict[str, Any]:
    """Keyword arguments of an Estimate for a bar or the lack of one."""
    return NO_BAR if bar is None else bar.fields()
