"""Tridiagonal forms of many symmetric band matrices at once, for a GPU (``kernels.chase``)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device
from anisoscope.measures.banded import dense, unit_of

ROWS, COLUMNS = 8, 4  # of a block next to each other that the threads of a warp have
WARPS = 1
TOGETHER = 8  # programs on a processor: of one warp, they always fit
APART = 2  # steps that a sweep is behind the one before it


def programs_each(many: int, width: int, band: int, processors: int) -> int:
    """Programs that share a matrix: as many as have a sweep to do at a time, and no more than run at once."""
    return max(1, min(-(-width // (APART * band)), TOGETHER * processors // many))


@on_its_device
def chased(
    band: Float[Tensor, "m d w"], programs: int | None = None
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m e"]]:
    """Diagonals of tridiagonal matrices with the eigenvalues of these, and what is beside the diagonals.

    ``band[:, j, i]`` is entry j + i, j of a symmetric float64 matrix for i up to half of w, and zero from there on and
    beyond the matrix. What is not finite stays in its matrix. ``programs`` share a matrix on a GPU, by default as many
    as are of use.
    """
    scale, lost = unit_of(band)
    diagonal, off = (_chased if _by_kernels(band) else _plain_chased)(band * scale, programs)
    return diagonal / scale[:, 0] + lost, off / scale[:, 0] + lost


def _chased(band: Float[Tensor, "m d w"], programs: int | None) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m e"]]:
    many, width, room = band.shape
    size = room // 2
    work = band.new_zeros(many, width + room, room)
    work[:, size : size + width] = band
    each = programs or 1
    if programs is None and band.is_cuda:
        processors = torch.cuda.get_device_properties(band.device).multi_processor_count
        each = programs_each(many, width, size, processors)
    options: dict[str, Any] = {"num_warps": WARPS}
    if each > 1 and band.is_cuda:
        options["launch_cooperative_grid"] = True  # refused, not begun, where not all of them can run at once
    counter = torch.zeros(many, width, dtype=torch.int32, device=band.device)
    kernels_of("chase").chase[(many * each,)](
        work, counter, width, width + room, each, B=size, R=min(ROWS, size), C=min(COLUMNS, size), **options
    )
    found = work[:, size : size + width]
    return found[:, :, 0], found[:, :-1, 1]


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _plain_chased(
    band: Float[Tensor, "m d w"], programs: int | None = None
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m e"]]:
    """By LAPACK, of full matrices, where there is no GPU."""
    from scipy import linalg

    many, width, _ = band.shape
    diagonal, off = band.new_zeros(many, width), band.new_zeros(many, width - 1)
    for i, one in enumerate(dense(torch.nan_to_num(band)).numpy()):
        _, d, e, _, _ = linalg.lapack.dsytrd(one, lower=1)
        diagonal[i], off[i] = torch.from_numpy(d), torch.from_numpy(e)
    return diagonal, off
