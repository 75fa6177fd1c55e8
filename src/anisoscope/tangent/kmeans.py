"""k-means on any device: k-means++ seeding and Lloyd's steps, the same bits for the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, TooFewRowsError
from anisoscope.measures.later import no_room
from anisoscope.stats.precision import full_precision

SAMPLE_ROWS = 65_536  # centres are fitted on so many rows drawn at random: more would move them by little
BLOCK_ROWS, GPU_BLOCK_ROWS = 8192, 1 << 17
TABLE_ROWS, TABLE_PART = 8192, 4096  # whose distances from each other are held at once on a GPU, and are made ready


@dataclass(frozen=True)
class KMeans:
    """Centres of cells, the cell of each row, and the share of ``||rows||^2`` that lies inside the cells."""

    centres: Float[Tensor, "c d"]
    labels: Int[Tensor, "n"]
    error: float
    iterations: int


def k_means(
    rows: Float[Tensor, "n d"],
    cells: int,
    *,
    seed: int = 0,
    centres: Float[Tensor, "c d"] | None = None,
    max_iter: int = 25,
    sample_rows: int = SAMPLE_ROWS,
) -> KMeans:
    """Lloyd's k-means of ``rows`` (centred beforehand, if at all) from k-means++ seeds, or from ``centres``.

    Centres are fitted on ``sample_rows`` rows drawn at random (eight a cell at least); all rows are then assigned.
    Where there are fewer distinct rows than cells some cells share a centre and stay empty.
    """
    if cells < 1:
        raise OptionError(f"k-means needs at least one cell, got {cells}")
    if len(rows) < cells:
        raise TooFewRowsError(f"{cells} k-means cells need at least {cells} rows, got {len(rows)}")
    generator = torch.Generator().manual_seed(seed)
    sample = rows
    most = max(sample_rows, 8 * cells)
    if len(rows) > most:
        picks = torch.randperm(len(rows), generator=generator)[:most]
        sample = rows[picks.sort().values.to(rows.device)]
    size = sample.square().sum(dim=1)
    marks = _seeds(sample, size, cells, generator) if centres is None else centres.to(rows)
    labels, distances = _nearest(sample, size, marks)
    iterations, settled = 0, False
    while iterations < max_iter and not settled:
        iterations += 1
        marks, empty = _means(sample, labels, marks)
        moved, gaps = _nearest(sample, size, marks)
        some_empty, settled = torch.stack([empty.any(), (moved == labels).all()]).tolist()  # a device is asked once
        if some_empty:
            far = distances.argsort(descending=True, stable=True)
            marks[empty] = sample[far[: int(empty.sum())]]
            moved, gaps = _nearest(sample, size, marks)
            settled = torch.equal(moved, labels)
        labels, distances = moved, gaps
    if sample is not rows:
        labels, distances = _nearest(rows, rows.square().sum(dim=1), marks)
    total = float(rows.square().sum(dtype=torch.float64))
    inside = float(distances.sum(dtype=torch.float64))
    return KMeans(marks.double(), labels, inside / total if total else 0.0, iterations)


def _seeds(rows: Tensor, size: Tensor, cells: int, generator: torch.Generator) -> Tensor:
    """k-means++: each further centre is a row drawn with probability proportional to its squared distance."""
    first = torch.randint(len(rows), (1,), generator=generator).to(rows.device)
    draws = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for _ in range(cells)]).to(rows.device)
    picks, totals = [first], [torch.ones_like(draws[:1])]
    # On a GPU launches are dear and products are not: all distances at once, and one row of them in each step.
    table = _table(rows, size) if rows.device.type != "cpu" and len(rows) <= TABLE_ROWS else None
    gap = _gap(rows, size, first) if table is None else table[first][0]
    for draw in draws[: cells - 1, None]:  # nothing here asks a device for a number
        reach = gap.cumsum(0, dtype=torch.float64)
        totals.append(reach[-1:])
        picks.append(torch.searchsorted(reach, draw * reach[-1:], right=True).clamp_max_(len(rows) - 1))
        gap = torch.minimum(gap, _gap(rows, size, picks[-1]) if table is None else table[picks[-1]][0])
    # No distance left: every row is a centre already, and further ones can only be copies.
    return rows[torch.where(torch.cat(totals) > 0, torch.cat(picks), first)].clone()


def _table(rows: Tensor, size: Tensor) -> Tensor | None:
    """``_gaps``, or None where there is no room for them."""
    try:
        return _gaps(rows, size)
    except Exception as error:
        if not no_room(error):
            raise
        return None


def _gaps(rows: Tensor, size: Tensor) -> Tensor:
    """``_gap`` of all pairs."""
    with full_precision(rows.device):  # or a row would be at some distance from itself
        gaps = torch.addmm(size, rows, rows.T, alpha=-2)
    for gap, own in zip(gaps.split(TABLE_PART), size.split(TABLE_PART), strict=True):
        gap += own[:, None]
        gap.masked_fill_(gap <= 16 * torch.finfo(rows.dtype).eps * (own[:, None] + size), 0.0)
    return gaps


def _gap(rows: Tensor, size: Tensor, pick: Tensor) -> Tensor:
    """Squared distances to one of the rows; what is no more than rounding is zero, so that copies are never drawn."""
    both = size + size[pick]
    gap = both - 2 * (rows @ rows[pick][0])
    return torch.where(gap > 16 * torch.finfo(rows.dtype).eps * both, gap, 0.0)


def _nearest(rows: Tensor, size: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each row and the squared distance to it; ``size`` are the rows' squared lengths."""
    own = marks.square().sum(dim=1)
    labels, gaps, block = [], [], _block_rows(rows)
    for part, square in zip(rows.split(block), size.split(block), strict=True):
        least, label = torch.addmm(own, part, marks.T, alpha=-2).min(dim=1)
        labels.append(label)
        gaps.append(least.add_(square).clamp_min_(0))
    return torch.cat(labels), torch.cat(gaps)


def _means(rows: Tensor, labels: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each cell, and which are empty: these are to move to rows that lie farthest from their centres."""
    cells, block = len(marks), _block_rows(rows)
    sums = torch.zeros(marks.shape, dtype=torch.float64, device=rows.device)
    counts = torch.zeros(cells, dtype=torch.float64, device=rows.device)
    for part, label in zip(rows.split(block), labels.split(block), strict=True):
        member = torch.nn.functional.one_hot(label, cells).to(rows.dtype)  # a product adds up in one fixed order
        sums += (member.T @ part).double()
        counts += member.sum(dim=0)  # whole numbers
    return (sums / counts.clamp_min(1)[:, None]).to(rows.dtype), counts == 0


def _block_rows(rows: Tensor) -> int:
    """Rows that are taken at a time: as many as a cache holds, or as keep a GPU from waiting for the next launch."""
    return BLOCK_ROWS if rows.device.type == "cpu" else GPU_BLOCK_ROWS
