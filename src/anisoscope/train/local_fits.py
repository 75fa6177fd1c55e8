"""Curvature of neighbourhoods as a differentiable term: local quadratic fits, with the gradient through the planes."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, TooFewRowsError
from anisoscope.train.penalty_rows import Mask, check_weight, rows_of, unit_size, weighted

RIDGE = 1e-12  # of the mean square of a quadratic column: only columns that are no columns at all feel it
GAP = 1e-12  # of the largest eigenvalue: plane and normal that cannot be told apart have no finite gradient


def local_curvature(
    h: Float[Tensor, "*lead d"],
    weight: float,
    *,
    dimension: int = 3,
    k: int = 32,
    anchors: int = 32,
    seed: int = 0,
    mask: Mask = None,
) -> Float[Tensor, ""]:
    """``weight`` times the share of a neighbourhood's variance that bends away from its plane quadratically.

    Around each of ``anchors`` tokens, drawn with ``seed``, its ``k`` nearest other tokens: local PCA gives the plane of
    ``dimension`` directions, and what lies normal to it is regressed on ``1, t_a, t_a t_b``, t the coordinates in the
    plane. The term is the energy of the quadratic part over that of the neighbourhood about its mean, averaged over
    neighbourhoods: on a curve of curvature kappa cut to arc length 2a it is ``(kappa a)^2 / 15``.

    Range 0 (flat, or bent by no quadratic) to 1. Noise about a plane of dimension d reads q/(k - d) of the noise's own
    share, ``q = d (d + 1)/2``: the term is relative to that, not to 0. Which tokens are neighbours is held
    fixed in the gradient; the planes are not. Copies of a token count once. Small products are in float64.
    """
    weight = check_weight("local_curvature", weight)
    columns = dimension * (dimension + 1) // 2
    if dimension < 1 or anchors < 1 or k < 1 + dimension + columns:
        raise OptionError(
            f"local_curvature needs a dimension and anchors of at least 1, and k of at least "
            f"{1 + max(dimension, 1) * (max(dimension, 1) + 3) // 2} for a quadratic fit in dimension "
            f"{max(dimension, 1)}; got dimension {dimension}, anchors {anchors}, k {k}"
        )
    with torch.autocast(h.device.type, enabled=False):
        rows = rows_of("local_curvature", h, mask)
        if rows.shape[1] <= dimension:
            raise OptionError(
                f"local_curvature: a plane of dimension {dimension} fills activations of width {rows.shape[1]}; "
                "take a smaller dimension"
            )
        if not bool(torch.isfinite(rows.detach()).all()):  # else a broken token would only have no neighbours
            return weighted("local_curvature", weight, rows.new_tensor(torch.nan), h, mask)
        rows, _ = unit_size(rows)
        members = _neighbourhoods(rows.detach(), k, anchors, seed)
        # Differences to the anchor: small against the rows themselves, so they keep their digits.
        local = (rows[members] - rows[members[:, :1]]).double()
        return weighted("local_curvature", weight, bent_share(local, dimension).mean(), h, mask)


def bent_share(local: Float[Tensor, "m k1 d"], dimension: int) -> Float[Tensor, "m"]:
    """The share of each neighbourhood's variance that quadratics of its plane's coordinates explain beyond the plane.

    Everything is read from the small Gram matrix of members: its leading eigenvectors u are the coordinates, and the
    energy along a pattern b over members is ``b^T gram b``. The fit does not ask which axes the plane was given.
    """
    local = local - local.mean(dim=1, keepdim=True)
    gram = local @ local.transpose(1, 2)
    plane = _TopVectors.apply(gram, dimension)  # centred, orthonormal over the members
    first, second = torch.triu_indices(dimension, dimension)
    quadratic = plane[:, :, first] * plane[:, :, second] * plane.shape[1]
    quadratic = quadratic - quadratic.mean(dim=1, keepdim=True)
    quadratic = quadratic - plane @ (plane.transpose(1, 2) @ quadratic)
    size = quadratic.transpose(1, 2) @ quadratic
    ridge = RIDGE * size.diagonal(dim1=1, dim2=2).mean(dim=1).detach()
    lower = torch.linalg.cholesky_ex(size + torch.diag_embed(ridge[:, None].expand(-1, size.shape[1])))[0]
    patterns = torch.linalg.solve_triangular(lower, quadratic.transpose(1, 2), upper=False)
    return ((patterns @ gram) * patterns).sum(dim=(1, 2)) / gram.diagonal(dim1=1, dim2=2).sum(dim=1)


class _TopVectors(torch.autograd.Function):
    """Leading eigenvectors of symmetric matrices, for functions of their span alone.

    The gradient of a span has only the gaps between what is inside and what is outside in it. ``eigh`` itself would
    divide by the gaps inside too, which are zero wherever a neighbourhood is round.
    """

    @staticmethod
    def forward(ctx: Any, matrices: Float[Tensor, "m k k"], count: int) -> Float[Tensor, "m k r"]:
        values, vectors = torch.linalg.eigh(matrices)
        ctx.save_for_backward(values, vectors)
        ctx.count = count
        return vectors[:, :, -count:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        values, vectors = ctx.saved_tensors
        inside, outside = vectors[:, :, -ctx.count :], vectors[:, :, : -ctx.count]
        gaps = values[:, None, -ctx.count :] - values[:, : -ctx.count, None]
        gaps = gaps.clamp_min(GAP * values[:, -1:, None].clamp_min(torch.finfo(values.dtype).tiny))
        turned = outside @ ((outside.transpose(1, 2) @ grads[0]) / gaps) @ inside.transpose(1, 2)
        return (turned + turned.transpose(1, 2)) / 2, None


def _neighbourhoods(rows: Float[Tensor, "n d"], k: int, anchors: int, seed: int) -> Int[Tensor, "m k1"]:
    """Numbers of the anchors and of their nearest other rows, the anchor first; of equal rows one is there."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draw on every device
    line = torch.randn(rows.shape[1], generator=generator).to(rows)
    # Row by row, not as a matrix product: copies must come out equal to the last bit.
    place = (rows * line).sum(dim=1)
    order = place.argsort(stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = place[order][1:] != place[order][:-1]
    distinct = order[new].sort().values
    if len(distinct) < k + 1:
        raise TooFewRowsError(
            f"local_curvature: neighbourhoods of {k} tokens need at least {k + 1} different ones, got {len(distinct)}; "
            "give a smaller k and dimension, or more tokens"
        )
    picks = torch.randperm(len(distinct), generator=generator)[:anchors].sort().values.to(rows.device)
    distance = torch.cdist(rows[distinct[picks]], rows[distinct])
    distance[torch.arange(len(picks), device=rows.device), picks] = torch.inf
    near = distance.topk(k, dim=1, largest=False).indices
    return distinct[torch.cat([picks[:, None], near], dim=1)]
