"""The referee's checks of one fitted basis as named numbers, its verdict among them."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.dimension import two_nn
from anisoscope.tangent.energy import DRAWS
from anisoscope.tangent.units import Halves
from anisoscope.tangent.verify import LEAST_K, Referee, judge

MOST_TANGENTS = LEAST_K // 4
"""Local tangents and as many normals are half of a neighbourhood's directions at most: beyond, they are noise."""


def referee_results(
    activations: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    halves: Halves,
    basis: Float[Tensor, "d k"],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Angles to local tangents and normals, curvature along the basis, replacements, and ``survives`` (1 or 0).

    The basis was fitted on the first half. The number of local tangents is the TwoNN dimension of the second half,
    rounded, at most ``MOST_TANGENTS``. The notes of ``survives`` are the reasons of the verdict.
    """
    measured = two_nn(activations[halves.rows[1]], seed=seed).value
    most = min(MOST_TANGENTS, activations.shape[1] // 2)
    dimension = max(1, min(round(measured), most))
    found = judge(activations, gradients, halves, basis, dimension=dimension, draws=draws, seed=seed)
    return dict(_named(found, dimension, measured))


def _named(found: Referee, dimension: int, measured: float) -> list[tuple[str, Estimate]]:
    near = f"{dimension} local tangents (TwoNN dimension {measured:.3g})"
    aligned, replaced = found.alignment, found.replacements
    n = aligned.tangent.share.n
    survives = Estimate(
        value=float(found.verdict.survives),
        stderr=None,
        n=n,
        method="1 where every check is passed, else 0",
        notes=(*found.verdict.reasons, f"said: against {near}", *found.notes),
    )
    rows = [
        ("survives", survives),
        ("tangent_cosine2", _noted(aligned.tangent.share, near)),
        ("normal_cosine2", _noted(aligned.normal.share, near)),
        ("tangent_p", Estimate(value=aligned.tangent.p, stderr=None, n=n, method="random bases of equal rank")),
        ("tangent_angle", aligned.tangent_angles[0]),
        ("normal_angle", aligned.normal_angles[0]),
        ("minus_top_variance", replaced.differences["top variance"]),
        ("minus_random", replaced.differences["random"]),
    ]
    if found.curvature is not None:
        rows.append(("curvature", found.curvature))
    return rows


def _noted(estimate: Estimate, note: str) -> Estimate:
    return Estimate(
        value=estimate.value, stderr=estimate.stderr, n=estimate.n, method="mean squared cosine to the basis",
        notes=(*estimate.notes, note), over=estimate.over, dof=estimate.dof,
    )  # fmt: skip
