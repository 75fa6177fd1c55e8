"""Products ``y^T y`` of float32 rows from integers, on tensor cores and without rounding: for small singular values.

Entries of a column ``y`` become integers of a unit, a power of two between ``2**-31`` and ``2**-30`` of the length
``|y|`` of the column. So an entry is off by ``2**-31 |y|`` at most, and by nothing where it is larger than
``2**-7 |y|``: float32 holds such entries in units no smaller. Products of these integers are exact until they are
rounded to float64. What is found are then the products of rows near the ones given, and has no negative eigenvalue
but for that last rounding.

With N rows, entries of ``y^T y`` are off by ``sqrt(N) 2**-30`` of the lengths of both columns at most, and by about
``2**-31`` of them where roundings are as good as random. A singular value is off by what the roundings come to as a
matrix: little beside itself as long as its square is well above ``N 2**-63`` of the largest, 2e-15 for 16,384 rows.
Halves of float16, which leave products out, lose all that is below 1e-7 (``kernels.grams``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device, sent

LEAST_WIDTH = 768  # from here on integers win against float64
LEAST_ROWS = 4096
MOST_ENTRIES = 1 << 27  # of rows, or of products, whose remainders are held at a time: eight bytes each
SHARES = 8  # of the rows of a cell that are squared apart


def fits(n: int, width: int, device: torch.device) -> bool:
    """Whether so many float32 rows are multiplied here, where float64 is asked for.

    On GPUs whose tensor cores take integers as fast as anything; later ones have given that up.
    """
    if width < LEAST_WIDTH or n < LEAST_ROWS or not kernels_run(device):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@on_its_device
def cell_grams(
    rows: Float[Tensor, "s n d"], ends: Sequence[int], out: Float[Tensor, "s c d d"]
) -> Float[Tensor, "s c d d"]:
    """``y^T y`` of the rows of each site and cell, written to ``out``, float64; see ``gram_matrices.cell_grams``.

    What is no number in a column of a cell makes all its products there NaN.
    """
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    sites, n, width = rows.shape
    most = max(1, n * width, len(ends) * width * width)
    step = max(1, MOST_ENTRIES // most)
    for few in (slice(at, at + step) for at in range(0, sites, step)):
        _launched(rows[few], [0, *ends], out[few])
    return out


def _launched(rows: Float[Tensor, "s n d"], bounds: Sequence[int], out: Float[Tensor, "s c d d"]) -> None:
    kernels = kernels_of("residues")
    (sites, cells, width, _), cut, count = out.shape, kernels.CUT, len(kernels.PRIME_TO_EACH_OTHER)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    places = [
        (at, min(cut.rows, b - at), cell)
        for cell, (a, b) in enumerate(itertools.pairwise(bounds))
        for at in range(a, b, cut.rows)
    ]
    if not places or out.numel() == 0:
        out.zero_()
        return
    held = [0, *itertools.accumulate(-(-length // cut.rows) for length in lengths)]
    tiles, n = -(-width // cut.columns), held[-1] * cut.rows
    padded, given = tiles * cut.columns, (width, cells, rows.stride(0), rows.stride(1))
    units = column_units(rows, bounds)
    residues = torch.empty(sites, count, padded, n, dtype=torch.int8, device=rows.device)
    kernels.residues_of_rows[(len(places), padded // cut.block, sites)](
        rows, sent([*itertools.chain(*places)], rows, torch.int32), units, residues, *given, n, residues.stride(1),
        K=cut.rows, C=cut.block, num_warps=4, maxnreg=128,
    )  # fmt: skip
    found = torch.empty(sites, cells, count, padded, padded, dtype=torch.uint8, device=rows.device)
    kernels.residue_grams[(sites * cells * count * (tiles * (tiles + 1) // 2),)](
        residues, sent(held, rows, torch.int64), sent(kernels.PRIME_TO_EACH_OTHER, rows, torch.int32), found,
        tiles, cells, n, padded, residues.stride(1),
        B=cut.columns, K=cut.rows, W=cut.window, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    tiles = -(-width // cut.joined)
    kernels.joined_grams[(sites * cells * (tiles * (tiles + 1) // 2),)](
        found, units, out, width, tiles, cells, padded, out.stride(0), out.stride(1), B=cut.joined, num_warps=4
    )


def column_units(rows: Float[Tensor, "s n d"], bounds: Sequence[int]) -> Float[Tensor, "s c d"]:
    """Powers of two, of which the length of each column of each cell is at least ``2**30`` and less than ``2**31``.

    NaN where the length is no number, and anything where it is zero.
    """
    kernels, (sites, _, width) = kernels_of("residues"), rows.shape
    cells, block = len(bounds) - 1, kernels.CUT.columns
    squares = torch.empty(sites, cells, SHARES, width, dtype=torch.float64, device=rows.device)
    kernels.column_squares[(-(-width // block), cells * SHARES, sites)](
        rows, sent(bounds, rows, torch.int64), squares, width, cells, rows.stride(0), rows.stride(1),
        R=kernels.CUT.squared, C=block, SHARES=SHARES, num_warps=4,
    )  # fmt: skip
    # A number with the exponent e is less than 2**(e - 1022); the root of it less than two to half of that, rounded up.
    exponent = squares.sum(dim=2).view(torch.int64) >> 52 & 0x7FF  # of a NaN too whose sign is set
    units = ((exponent - 1021 >> 1) + (1023 - 31) << 52).view(torch.float64)
    return torch.where(exponent < 2047, units, torch.nan)
