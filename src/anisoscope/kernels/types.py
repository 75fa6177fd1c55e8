"""Kernel of distances to centroids by token type: rows are read as they are, and nothing is written for a row.

Written in operations of torch it is a dozen passes over float64 copies of all rows. This module needs Triton;
``tangent.stacked_types`` asks for it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDEST = 4096
"""Columns of the widest rows: a program holds a mean and a centroid, float64, in registers."""
HELD = 16
"""Entries of a tile that each thread holds: with the mean and the centroid no more than registers are for."""


def tiling(width: int) -> dict[str, int]:
    """Columns and rows of a tile, and warps, for rows of a width.

    Warps lie side by side along a row, so that sums over rows stay inside a thread.
    """
    columns = max(16, 1 << (width - 1).bit_length())
    warps = max(1, min(columns // 128, 8), columns // 256)
    return {"K": columns, "R": HELD * 32 * warps // columns, "num_warps": warps}


@triton.jit
def _about(rows, order, at, there, k, D, row_stride, mean):
    """Rows number ``at`` of the order less the mean, float64; a row that is not there counts as zeros."""
    here = tl.load(order + at, mask=there, other=0).to(tl.int64)
    inside = there[:, None] & (k < D)[None, :]
    values = tl.load(rows + here[:, None] * row_stride + k[None, :], mask=inside, other=0.0).to(tl.float64)
    return values - mean[None, :]


@triton.jit
def type_distances(
    rows, mean, order, begins, names, out, n, D, sites, types, often, site_stride, row_stride,
    SAME: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of each type of their distances to the type's centroid and to the mean, times what undoes that
    a row is part of either; float64, always in one order.

    ``order`` names the rows type by type, types with most rows first: number r of them is type ``names[r]``, and its
    rows begin at ``begins[r]``. The ``often`` first types have two rows or more, and a program each. Of the others a
    program takes R, which have no distance to a centroid of their own: 0. So have rows no farther from their centroid
    than ``SAME`` times their distance to the mean. ``out`` is by kind, site and type.
    """
    program = tl.program_id(0)
    site = (program % sites).to(tl.int64)
    run = program // sites
    k = tl.arange(0, K)
    r = tl.arange(0, R)
    rows += site * site_stride
    middle = tl.load(mean + site * D + k, mask=k < D, other=0.0)
    out_own = out + site * types
    out_all = out + (site + sites) * types
    part = n.to(tl.float64)
    part = tl.sqrt(part / (part - 1))
    if run < often:
        first = tl.load(begins + run)
        end = tl.load(begins + run + 1)
        size = (end - first).to(tl.float64)
        total = tl.zeros((K,), dtype=tl.float64)
        for start in range(first, end, R):
            at = start + r
            about = _about(rows, order, at, at < end, k, D, row_stride, middle)
            total += tl.sum(tl.where((at < end)[:, None], about, 0.0), axis=0)
        centre = total / size
        own = tl.zeros((R,), dtype=tl.float64)
        overall = tl.zeros((R,), dtype=tl.float64)
        for start in range(first, end, R):
            at = start + r
            about = _about(rows, order, at, at < end, k, D, row_stride, middle)
            apart = about - centre[None, :]
            length = tl.sqrt(tl.sum(about * about, axis=1))
            away = tl.sqrt(tl.sum(apart * apart, axis=1))
            own += tl.where((at < end) & (away > SAME * length), away, 0.0)
            overall += tl.where(at < end, length, 0.0)
        name = tl.load(names + run)
        tl.store(out_own + name, tl.sum(own, axis=0) * tl.sqrt(size / (size - 1)))
        tl.store(out_all + name, tl.sum(overall, axis=0) * part)
    else:
        rank = often + (run - often) * R + r
        there = rank < types
        about = _about(rows, order, rank + (n - types), there, k, D, row_stride, middle)
        length = tl.sqrt(tl.sum(about * about, axis=1))
        which = tl.load(names + rank, mask=there, other=0)
        tl.store(out_own + which, tl.zeros((R,), dtype=tl.float64), mask=there)
        tl.store(out_all + which, length * part, mask=there)
