"""Measures of order and of pairs: turning along token paths, and how linear the step from one layer to the next is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import tee
from typing import Literal

import torch
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, EmptyInputError, ShapeError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.anisotropy import Bias
from anisoscope.measures.base import Needs, Workspace, register, run
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.rows import Rows, as_rows
from anisoscope.stats.precision import in_full_precision


def turning_angle(rows: RowsLike, *, mask: MaskLike = None) -> Estimate:
    """Mean angle in degrees between successive steps ``x_{t+1} - x_t`` and ``x_{t+2} - x_{t+1}`` along token paths.

    Rows ``(t, d)`` are one path in order, and chunks of such rows continue it; ``(s, t, d)`` are s paths. A masked row
    breaks the path: no angle reaches over it. Independent points read 120 and a random walk 90 in every dimension;
    both stand in ``parts``. 0 is a straight line.
    """
    return run("turning_angle", rows, mask)


@register("turning_angle", Needs(turns=True))
def _turning_angle(work: Workspace) -> Estimate:
    sums, counts = work.turns.sums, work.turns.counts
    count, blocks = int(counts.sum()), len(counts)
    if count == 0:
        raise DegenerateError("no three successive rows with two steps of nonzero length: no angle to measure")
    value = float(sums.sum()) / count
    bar = None
    if blocks >= 3:
        residual = float((sums - value * counts).square().sum()) * blocks / (blocks - 1)
        bar = Bar(math.sqrt(residual) / count, blocks - 1, f"angles, in {blocks} blocks along the paths")
    nulls = {
        "independent points": Estimate(value=120.0, stderr=None, n=count, method="exact null"),
        "random walk": Estimate(value=90.0, stderr=None, n=count, method="exact null"),
    }
    return Estimate(value=value, n=count, method="mean turning angle, degrees", parts=nulls, **fields(bar))


Map = Literal["linear", "orthogonal"]
Target = Literal["output", "update"]


@in_full_precision
def linearity(
    rows: RowsLike,
    next_rows: RowsLike,
    *,
    mask: MaskLike = None,
    map: Map = "linear",
    target: Target = "output",
    bias: Bias = "corrected",
) -> Estimate:
    """Centred Procrustes similarity: how much of the next layer's variance a linear map of this layer explains.

    ``1 - min_A |X A - Y|^2 / |Y|^2`` with both centred. ``map="linear"`` lets A be any matrix (the published linearity
    score); "orthogonal" allows a rotation and one scale, which gives ``(nuclear norm of X^T Y)^2 / (|X|^2 |Y|^2)``.
    ``target="update"`` explains Y - X, what the layer adds to the residual stream, instead of Y. A linear map with as
    many columns as X fits chance; "corrected" is the adjusted R^2, ``1 - (1 - R^2)(n - 1)/(n - 1 - rank)``, "plugin"
    the published number, 1 by construction for n <= D. An orthogonal map is not corrected.
    """
    choose("map", map, ("linear", "orthogonal"))
    choose("target", target, ("output", "update"))
    choose("bias", bias, ("corrected", "plugin"))
    # An iterator of masks gives each of them once, and both layers need them all.
    masks = tee(mask) if isinstance(mask, Iterator) else (mask, mask)
    first, second = as_rows(rows, masks[0]), as_rows(next_rows, masks[1])
    width: list[int] = []
    joint = Workspace(as_rows(_side_by_side(first, second, target, width)), Needs(moments="float64"))
    n, scatter = joint.n, joint.moments.scatter
    d = width[0]
    xx, xy, total = scatter[:d, :d], scatter[:d, d:], float(scatter[d:, d:].trace())
    rounding = 4 * torch.finfo(torch.float64).eps * float(joint.moments.mean.abs().max())
    if total <= n * scatter.shape[0] * rounding**2 or float(xx.trace()) <= n * d * rounding**2:
        raise DegenerateError("one of the two layers has no spread: there is nothing to explain or to explain it with")
    y = joint.error_rows.rows.double() - joint.moments.mean
    if map == "orthogonal":
        value, residual = _orthogonal_fit(xx, xy, total, y, d)
        method = f"orthogonal Procrustes, {target}"
    else:
        value, residual = _linear_fit(xx, xy, total, y, d, n, bias)
        method = f"linear Procrustes, {target}, {bias}"
    size = y[:, d:].square().sum(dim=1)
    mean_size = total / n
    influence = -(residual.square().sum(dim=1) - (1 - value) * size) / mean_size
    bar = joint.error_rows.bar(influence)
    notes = () if bar else ("no error bar: too few independent blocks of rows to tell their spread",)
    return Estimate(value=value, n=n, method=method, notes=notes, **fields(bar))


def _linear_fit(xx: Tensor, xy: Tensor, total: float, y: Tensor, d: int, n: int, bias: Bias) -> tuple[float, Tensor]:
    values, vectors = torch.linalg.eigh(xx)
    solid = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    rank = int(solid.sum())
    inverse = torch.where(solid, 1 / torch.where(solid, values, 1.0), 0.0)
    weights = (vectors * inverse) @ (vectors.T @ xy)
    explained = float((weights * xy).sum()) / total
    if bias == "corrected":
        if n - 1 - rank < 1:
            raise TooFewRowsError(
                f"a linear map of rank {rank} fits {n} rows exactly whatever they are; take more than {rank + 1} rows, "
                'or map="orthogonal", or bias="plugin" for the published number'
            )
        explained = 1 - (1 - explained) * (n - 1) / (n - 1 - rank)
    return explained, y[:, d:] - y[:, :d] @ weights


def _orthogonal_fit(xx: Tensor, xy: Tensor, total: float, y: Tensor, d: int) -> tuple[float, Tensor]:
    u, s, vh = torch.linalg.svd(xy, full_matrices=False)
    size = float(xx.trace())
    value = float(s.sum()) ** 2 / (size * total)
    return value, y[:, d:] - y[:, :d] @ (u @ vh) * (float(s.sum()) / size)


def _side_by_side(first: Rows, second: Rows, target: Target, width: list[int]) -> Iterator[Tensor]:
    """Both layers as one wide matrix, chunk by chunk, however each was cut; ``width`` receives that of the first."""
    sources = [(chunk.rows for chunk in layer.chunks()) for layer in (first, second)]
    held: list[Tensor | None] = [None, None]
    while True:
        for side, source in enumerate(sources):
            piece = held[side]
            while piece is None or len(piece) == 0:
                piece = next(source, None)
                if piece is None:
                    break
            held[side] = piece
        x, y = held
        if x is None and y is None:
            if not width:
                raise EmptyInputError(
                    "no row is left to measure" + (" after the mask" if first.mask is not None else "")
                )
            return
        if x is None or y is None:
            raise ShapeError("the two layers differ in number of rows; row i of both must be the same token")
        if target == "update" and x.shape[1] != y.shape[1]:
            raise ShapeError(f"an update needs equal widths, got {x.shape[1]} and {y.shape[1]}")
        if not width:
            width.append(x.shape[1])
        count = min(len(x), len(y))
        held = [x[count:], y[count:]]
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        left, right = x[:count].to(dtype), y[:count].to(device=x.device, dtype=dtype)
        yield torch.cat([left, right - left if target == "update" else right], dim=1)
