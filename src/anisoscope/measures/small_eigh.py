"""Eigenvalues and eigenvectors of many small symmetric matrices at once: on a GPU in one step that nobody waits for."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device

WIDEST = 32  # rows of a matrix that one program decomposes
LEAST = 8  # rows that it pads to
SWEEPS = 30  # at most; covariances take ten, and the slowest known, graded values of both signs, take twenty


def small_eigh(matrices: Float[Tensor, "m k k"]) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k k"]]:
    """As ``torch.linalg.eigh`` of matrices that are symmetric up to rounding: eigenvalues, ascending, and eigenvectors
    as columns.

    Up to rounding of the largest eigenvalue, and vectors up to sign. Values are NaN of a matrix with entries that are
    not finite, where a library would raise an error for all of them; its vectors are of no use.
    """
    many, width, _ = matrices.shape
    small = 0 < width <= WIDEST and many > 0 and matrices.dtype == torch.float64
    if small and kernels_run(matrices.device):
        return by_kernel(matrices.contiguous())
    finite = torch.isfinite(matrices).all(dim=2).all(dim=1)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], matrices, 0.0))
    return torch.where(finite[:, None], values, torch.nan), vectors


@on_its_device
def by_kernel(matrices: Float[Tensor, "m k k"]) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k k"]]:
    """The same by the kernel; matrices are contiguous."""
    many, width, _ = matrices.shape
    padded = max(LEAST, 1 << (width - 1).bit_length())
    values, vectors = matrices.new_empty(many, width), torch.empty_like(matrices)
    scratch = matrices.new_empty(many, 4, padded, padded)
    kernels_of("jacobi").decompose[(many,)](
        matrices, values, vectors, scratch, SWEEPS=SWEEPS, K=width, P=padded, num_warps=padded // 8, num_stages=1
    )
    return values, vectors
