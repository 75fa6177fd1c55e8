"""Forms and leading eigenvectors of many symmetric band matrices at once, for a GPU.

A band is kept by columns: ``band[m, j, i] = B[j + i, j]`` for i up to half of the last axis, the half-bandwidth; all
else is zero. Nothing asks for eigenvectors: ``y^T (B + t)^-1 y`` is the square of ``L^-1 y``, with L by blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device
from anisoscope.measures.banded import dense

FORM_ROWS, FORM_WARPS = 128, 8  # of a program of ``sum_band_forms``
SCRATCH_BYTES = 1 << 30  # for the factors of as many matrices as have room there, one at least
ABOVE = 64  # roundings by which a given eigenvalue may be too low: shifted by more, the matrix is definite
SOLVES = 3  # of inverse iteration: one has a residual of some roundings already, unless its start is unlucky

EPS = torch.finfo(torch.float64).eps


@on_its_device
def forms(
    band: Float[Tensor, "m d w"],
    turned: Float[Tensor, "m d n"],
    shifts: Float[Tensor, "m p"],
    weights: Float[Tensor, "m p"],
    least: Float[Tensor, "m"],
) -> Float[Tensor, "m n"]:
    """The sum over poles of ``weight * y^T (B + shift)^-1 y``, float64, of every column y of ``turned``, float32.

    Factors are computed in float64, where a pivot below ``least``, which rounding alone can make, is taken for it; they
    are applied in float32. What this loses is about what the rounding of ``turned`` to float32 does.
    """
    if not _by_kernels(turned):
        return _plain_forms(band, turned, shifts, weights, least)
    many, width, n = turned.shape
    missing = -n % 4
    rows = (torch.nn.functional.pad(turned, (0, missing)) if missing else turned).contiguous()
    half, count = band.shape[2] // 2, shifts.shape[1]
    each = 16 * half * half * -(-width // half) * count
    some = max(1, SCRATCH_BYTES // each)
    given = (band, rows, shifts, weights, least)
    found = [_forms_of_some(*(one[at : at + some].contiguous() for one in given)) for at in range(0, many, some)]
    return torch.cat(found)[:, :n]


def _forms_of_some(
    band: Float[Tensor, "m d w"],
    rows: Float[Tensor, "m d n"],
    shifts: Float[Tensor, "m p"],
    weights: Float[Tensor, "m p"],
    least: Float[Tensor, "m"],
) -> Float[Tensor, "m n"]:
    kernels, (many, width, n) = kernels_of("solves"), rows.shape
    half, count = band.shape[2] // 2, shifts.shape[1]
    factors = rows.new_empty(many, count, -(-width // half), 4, half, half)
    kernels.factor_bands[(count, many)](
        band, shifts, weights, least, factors, width, count, K=half, WIDE=False, num_warps=1
    )
    out = rows.new_empty(many, count, n)
    kernels.sum_band_forms[(-(-n // FORM_ROWS), count, many)](
        rows, factors, weights, out, n // 4, width, count, K=half, R=FORM_ROWS, num_warps=FORM_WARPS
    )
    return (weights[:, :, None] * out).sum(dim=1)


@on_its_device
def leading_vector(band: Float[Tensor, "m d w"], value: Float[Tensor, "m"]) -> Float[Tensor, "m d"]:
    """Unit eigenvectors of band matrices for their largest eigenvalues, which are given to rounding; NaN gives NaN.

    Of equal eigenvalues it is one of their vectors.
    """
    if not _by_kernels(band):
        return _plain_leading(band)
    kernels, (many, width, _) = kernels_of("solves"), band.shape
    half = band.shape[2] // 2
    size = torch.maximum(band.abs().amax(dim=(1, 2)), value.abs())
    size = torch.where(size == 0, 1.0, size)
    above, least = value / size + ABOVE * EPS, torch.full_like(value, EPS)
    blocks = -(-width // half)
    factors = band.new_empty(many, 1, blocks, 2, half, half)
    kernels.factor_bands[(1, many)](
        -band / size[:, None, None], above, least, least, factors, width, 1, K=half, WIDE=True, num_warps=1
    )
    vectors = _start(many, blocks * half, band)
    vectors[:, width:] = 0
    kernels.solve_bands[(many,)](factors, vectors, width, SOLVES, K=half, num_warps=4)
    return vectors[:, :width]


def _start(many: int, width: int, like: Tensor) -> Float[Tensor, "m d"]:
    """A fixed vector for each matrix, as irregular as one that is drawn: all waves have about the same share of it."""
    place = torch.arange(1, width + 1, dtype=torch.float64, device=like.device)
    return (place.square() * (5**0.5 / 2) % 1 - 0.5).repeat(many, 1)


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


# The same by a library's decomposition, where there is no GPU.


def _plain_forms(
    band: Float[Tensor, "m d w"],
    turned: Float[Tensor, "m d n"],
    shifts: Float[Tensor, "m p"],
    weights: Float[Tensor, "m p"],
    least: Float[Tensor, "m"],
) -> Float[Tensor, "m n"]:
    full = dense(band)
    values, vectors = torch.linalg.eigh(torch.nan_to_num(full))
    shifted = torch.maximum(values[:, :, None] + shifts[:, None], least[:, None, None])
    f = (weights[:, None] / shifted).sum(dim=2) + 0 * full.sum(dim=(1, 2))[:, None]
    return torch.einsum("md,mdn->mn", f, (vectors.mT @ turned.to(values.dtype)).square())


def _plain_leading(band: Float[Tensor, "m d w"]) -> Float[Tensor, "m d"]:
    full = dense(band)
    return torch.linalg.eigh(torch.nan_to_num(full)).eigenvectors[:, :, -1] + 0 * full.sum(dim=(1, 2))[:, None]
