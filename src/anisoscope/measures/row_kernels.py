"""Single visits of all rows on a GPU: the kernels of ``kernels.rows`` behind plain functions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device

COLUMNS = 128  # entries of a row that a program takes at a time
MEND_COLUMNS = 64
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 64, 128, 32  # of a product within a block


@on_its_device
def copies(
    rows: Float[Tensor, "s n d"], weights: Int[Tensor, "d"]
) -> tuple[Bool[Tensor, "s n"], Bool[Tensor, "s"]]:  # fmt: skip
    """Which rows are copies of earlier ones, and whether two different rows of a site have one code."""
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    codes = torch.empty(sites, n, dtype=torch.int64, device=device)
    options = {"R": kernels.ROWS, "K": COLUMNS, "num_warps": 4}
    kernels.codes_of_rows[(-(-sites * n // kernels.ROWS),)](rows, weights, codes, sites * n, width, **options)
    codes, order = codes.sort(dim=1, stable=True)
    copy, clash = torch.zeros(2, sites, n, dtype=torch.bool, device=device)
    kernels.copies_among[(-(-(n - 1) // kernels.ROWS) or 1, sites)](
        rows, codes, order, copy, clash, n, width, **options
    )
    return copy, clash.any(dim=1)


@on_its_device
def in_half(
    rows: Float[Tensor, "s n d"], order: Int[Tensor, "n"], mean: Float[Tensor, "s d"], factor: Float[Tensor, "s"],
    padded: int, depth: int,
) -> tuple[Float[Tensor, "s p e"], Float[Tensor, "s p"], Float[Tensor, "s"]]:  # fmt: skip
    """Rows in ``order`` about the mean, times a factor, in half precision and filled up with zeros; their squared
    lengths, and the largest share of a row's length that rounding took."""
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    half = torch.empty(sites, padded, depth, dtype=torch.float16, device=device)
    half[:, n:] = 0
    squares = torch.zeros(sites, padded, dtype=torch.float64, device=device)
    lost = torch.empty(sites, n, dtype=torch.float64, device=device)
    kernels.in_half[(-(-n // kernels.ROWS), sites)](
        rows, order, mean.contiguous(), factor.contiguous(), half, squares, lost, n, padded, width, depth,
        R=kernels.ROWS, K=COLUMNS, num_warps=4,
    )  # fmt: skip
    return half, squares, lost.amax(dim=1)


@on_its_device
def nearest_within(
    rows: Float[Tensor, "s n d"], order: Int[Tensor, "s n"], blocks: int, strides: Int[Tensor, "s"],
    lengths: Int[Tensor, "s"], most: int,
) -> Float[Tensor, "s b l two"]:  # fmt: skip
    """Distances to the two nearest rows of the same run, float64.

    Run b of a site is ``lengths`` rows, at most ``most``, from number ``b * strides`` of ``order`` on; places beyond
    the length hold infinity. Rows that products in float32 leave in doubt are measured against all of their run.
    """
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    # As ``neighbors_gpu.search`` for products of float32 in parts; the sums of squares are no worse.
    allowance = 4 * ((3 * width + 16) * 2.0**-23 + 4 * 2.0**-20)
    out = torch.full((sites, blocks, most, 2), torch.inf, dtype=torch.float64, device=device)
    sure = torch.ones(sites, blocks, most, dtype=torch.bool, device=device)
    kernels.nearest_within[(-(-most // BLOCK_ROWS), sites * blocks)](
        rows, order, rows.mean(dim=1), strides, lengths, out, sure, allowance, n, blocks, most, width,
        R=BLOCK_ROWS, C=BLOCK_COLUMNS, K=BLOCK_DEPTH, num_warps=4,
    )  # fmt: skip
    kernels.mend_within[(most, sites * blocks)](
        rows, order, strides, lengths, out, sure, n, blocks, most, width, C=MEND_COLUMNS, K=BLOCK_DEPTH, num_warps=4
    )
    return out.sqrt_()
