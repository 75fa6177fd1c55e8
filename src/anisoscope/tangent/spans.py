"""Spans of columns: orthonormal bases of a fixed sign, the angles between two of them, how far they overlap."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, OptionError, ShapeError


def check_rank(rank: int, width: int) -> int:
    """``rank`` if a basis of that many columns fits into rows of this width, else an error that says so."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise OptionError(f"rank must be a whole number of at least 1, got {rank!r}")
    if rank > width:
        raise OptionError(f"rank {rank} exceeds width {width}; take a rank of at most {width}")
    return rank


def orthonormal(columns: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """An orthonormal basis of the span of ``columns``, by QR in float64, column by column in their order.

    The sign of each column is fixed: its largest entry is positive. Columns that span less than their number allows
    are refused, since any completion would be directions that nobody asked for.
    """
    wide = columns.double()
    length = torch.linalg.vector_norm(wide, dim=0)
    unit = wide / torch.where(length > 0, length, 1.0)
    # Of unit columns: one that is short against the others is still a direction, one that depends on them is not.
    basis, triangle = torch.linalg.qr(unit)
    single = torch.finfo(torch.promote_types(columns.dtype, torch.float32)).eps
    found = int((torch.linalg.svdvals(triangle) > 16 * max(columns.shape) ** 0.5 * single).sum())
    if found < columns.shape[1]:
        raise DegenerateError(
            f"the fit spans {found} directions where {columns.shape[1]} were asked for; take a rank of at most {found}"
        )
    return with_fixed_sign(basis)


def with_fixed_sign(basis: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """The same columns, each with the sign that makes its largest entry positive."""
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0)


def principal_angles(a: Float[Tensor, "d k"], b: Float[Tensor, "e j"]) -> Float[Tensor, "i"]:
    """Principal angles in degrees between the spans of two orthonormal bases, ascending, ``min(k, j)`` of them.

    Cosines are the singular values of ``a^T b``. An angle below 45 degrees is taken from its sine instead (Björck and
    Golub): a cosine next to 1 has lost the digits of a small angle, and two equal spans would read 1e-6 degrees apart.
    """
    if a.shape[0] != b.shape[0]:
        raise ShapeError(f"spans of width {a.shape[0]} and {b.shape[0]} have no angles between them")
    small, large = sorted((a.double(), b.double().to(a.device)), key=lambda basis: basis.shape[1])
    left, cosines, right = torch.linalg.svd(large.T @ small, full_matrices=False)
    away = small @ right.T - large @ left * cosines
    sines = torch.linalg.vector_norm(away, dim=0).clamp(0, 1)
    cosines = cosines.clamp(0, 1)
    angles = torch.where(cosines > 0.5**0.5, torch.asin(sines), torch.acos(cosines))
    return torch.rad2deg(angles).sort().values


def overlap(a: Float[Tensor, "d k"], b: Float[Tensor, "d j"]) -> float:
    """``||a^T b||_F^2 / min(k, j)``: 1 where one span holds the other, ``max(k, j) / D`` for spans at random."""
    return float((a.double().T @ b.double().to(a.device)).square().sum()) / min(a.shape[1], b.shape[1])
