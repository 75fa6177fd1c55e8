"""The largest eigenvalues of a symmetric matrix by Lanczos with full orthogonalisation, for a GPU: no step waits."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

STEPS = (96, 192, 384)  # tried one after another; each goes on where the one before stopped
EXACT = 1e-9  # what is left of the first eigenvector, relative to its eigenvalue: a bound on the eigenvalue's error
ROUGH = 1e-3  # of the others
NOTHING = 1e-11


def leading(
    matrix: Float[Tensor, "d d"], count: int, *, seed: int = 0
) -> tuple[Float[Tensor, "c"], Float[Tensor, "d"]] | None:
    """The ``count`` largest eigenvalues, largest first, and the first eigenvector; None where they did not settle.

    The residual of a Ritz pair bounds the distance to an eigenvalue: ``EXACT`` for the first, ``ROUGH`` for the others.
    An eigenvalue that stands there several times is found once: one start sees one direction of its space.
    """
    width, device = len(matrix), matrix.device
    if width <= STEPS[0] or count > STEPS[0]:
        return None
    most = min(STEPS[-1], width - 1)
    basis = matrix.new_zeros(most + 1, width)
    start = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype).to(device)
    basis[0] = start / torch.linalg.vector_norm(start)
    along, beside = matrix.new_zeros(most), matrix.new_zeros(most)
    done = 0
    for stop in (min(steps, most) for steps in STEPS):
        for step in range(done, stop):
            image = matrix @ basis[step]
            held = basis[: step + 1]
            first = held @ image
            image = image - first @ held
            second = held @ image  # once is not enough: rounding would bring old directions back
            image = image - second @ held
            along[step] = first[step] + second[step]
            length = torch.linalg.vector_norm(image)
            # Where nothing but rounding is left, all that the matrix does to the start has been seen.
            length = torch.where(length > NOTHING * along[: step + 1].abs().amax(), length, 0.0)
            beside[step] = length
            basis[step + 1] = torch.where(length > 0, image / length, 0.0)
        done = stop
        a, b = along[:done].cpu(), beside[:done].cpu()
        if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
            return None
        small = torch.diag(a) + torch.diag(b[:-1], 1) + torch.diag(b[:-1], -1)
        values, vectors = torch.linalg.eigh(small)
        residual = (b[-1] * vectors[-1].abs()).flip(0)[:count]
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        if residual[0] <= EXACT * values[0] and bool((residual <= ROUGH * values[0]).all()):
            lead = vectors[:, 0].to(device) @ basis[:done]
            return values.to(device), lead / torch.linalg.vector_norm(lead)
    return None
