"""Partition-function isotropy (Mu and Viswanath; Arora et al.)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Needs, Workspace, register, run
from anisoscope.measures.uncertainty import NO_BAR


def partition_isotropy(rows: RowsLike, *, mask: MaskLike = None, seed: int = 0) -> Estimate:
    """``min_c Z(c) / max_c Z(c)`` with ``Z(c) = sum_i exp(c . x_i)``, c over plus and minus the eigenvectors of X^T X.

    Not centred, and not invariant to scale. 1 for a cloud that looks the same in all these directions. Sums of
    exponentials are formed in logarithms, so that no row overflows; a ratio too small for a float reads as 0 with a
    note. No error bar: the minimum and maximum over 2D directions are chosen on the same rows, and the sums hang on the
    few longest of them.
    """
    return run("partition_isotropy", rows, mask, seed)


@register("partition_isotropy", Needs(moments="float64", points=True))
def _partition_isotropy(work: Workspace) -> Estimate:
    points = work.points("keep")
    moments = work.moments
    second = moments.scatter + moments.count * torch.outer(moments.mean, moments.mean)
    if float(second.trace()) == 0:
        raise DegenerateError("all rows are zero: no direction is distinguished")
    axes = torch.linalg.eigh(second).eigenvectors
    logs = _log_partition(points.rows, axes)
    spread = float(logs.min() - logs.max())
    value = math.exp(spread) if spread > -745 else 0.0
    notes = (*points.notes, "no error bar: the directions are chosen on the same rows, and few rows carry the sums")
    if value == 0:
        notes = (*notes, f"the ratio is exp({spread:.1f}), below what a float holds")
    return Estimate(value=value, n=points.n, method="min Z / max Z over +- eigenvectors", notes=notes, **NO_BAR)


def _log_partition(rows: Tensor, axes: Tensor) -> Tensor:
    """log Z of plus and minus each axis."""
    total: Tensor | None = None
    for part in rows.split(4096):
        along = part.double() @ axes
        logs = torch.cat([along.logsumexp(dim=0), (-along).logsumexp(dim=0)])
        total = logs if total is None else torch.logaddexp(total, logs)
    assert total is not None
    return total
