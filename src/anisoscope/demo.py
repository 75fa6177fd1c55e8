"""The demonstration: every measure over data of known geometry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from anisoscope.estimate import Estimate
from anisoscope.measures.anisotropy import (
    effective_rank,
    effective_rank_lambda,
    isoscore,
    isoscore_star,
    mean_cosine,
    participation_ratio,
    spectral_ratio,
    spectral_ratio_l1,
    stable_rank,
)
from anisoscope.measures.curvature import curvature
from anisoscope.measures.dimension import gride, mle, two_nn
from anisoscope.measures.local import local_isotropy, local_pca_dimension
from anisoscope.measures.partition import partition_isotropy
from anisoscope.measures.paths import linearity, turning_angle
from anisoscope.runs.records import Record
from anisoscope.theory import manifolds
from anisoscope.views.tables import Check

VARIANCES = (8.0, 4.0, 3.0, 2.0, 1.0, 1.0, 0.5, 0.5)
ZETA = 0.3


@dataclass(frozen=True)
class Case:
    """One line of the demonstration. ``tolerance`` is the relative bias that docs/measures.md states for it."""

    measure: str
    data: str
    truth: float
    run: Callable[[], Estimate]
    tolerance: float = 0.0


def cases(rows: int = 8192, seed: int = 0) -> list[Case]:
    """All measures, each on a cloud for which the answer is known."""
    return [*_spectral_cases(rows, seed), *_dimension_cases(rows, seed), *_local_cases(rows, seed)]


def _spectral_cases(n: int, seed: int) -> list[Case]:
    lam = torch.tensor(VARIANCES, dtype=torch.float64)
    sigma, total = lam.sqrt(), float(lam.sum())
    cloud = manifolds.gaussian(n, VARIANCES, seed=seed)
    ratio = total**2 / float(lam @ lam)
    mixed = (1 - ZETA) * lam + ZETA * total / len(lam)
    star = (total**2 / float(mixed @ mixed) - 1) / (len(lam) - 1)
    heads = manifolds.von_mises_fisher(n, 64, 30.0, seed=seed)
    short = manifolds.gaussian(n, (1.0, 0.5, 0.25), seed=seed)
    name = "normal rows with eight chosen variances"
    return [
        Case("spectral_ratio", name, VARIANCES[0] / total, lambda: spectral_ratio(cloud)),
        Case("spectral_ratio_l1", name, float(sigma[0] / sigma.sum()), lambda: spectral_ratio_l1(cloud)),
        Case("stable_rank", name, total / VARIANCES[0], lambda: stable_rank(cloud)),
        Case("effective_rank", name, _entropy_rank(sigma), lambda: effective_rank(cloud), 1e-3),
        Case("effective_rank_lambda", name, _entropy_rank(lam), lambda: effective_rank_lambda(cloud), 1e-3),
        Case("participation_ratio", name, ratio, lambda: participation_ratio(cloud)),
        Case("isoscore", name, (ratio - 1) / (len(lam) - 1), lambda: isoscore(cloud)),
        Case("isoscore_star", name, star, lambda: isoscore_star(cloud, zeta=ZETA)),
        Case(
            "mean_cosine",
            "von Mises-Fisher directions in width 64",
            manifolds.vmf_mean_cosine(64, 30.0),
            lambda: mean_cosine(heads),
        ),
        Case(
            "partition_isotropy",
            "short normal rows in width 3",
            math.exp(-0.375),
            lambda: partition_isotropy(short),
            0.1,
        ),
    ]


def _dimension_cases(n: int, seed: int) -> list[Case]:
    torus = manifolds.flat_torus(n, 2, width=32, seed=seed)
    name = "flat 2-torus in width 32"
    disc = manifolds.ball(n, 8, width=32, seed=seed)
    return [
        Case("two_nn facco", name, 2.0, lambda: two_nn(torus)),
        Case("two_nn ml", name, 2.0, lambda: two_nn(torus, variant="ml")),
        Case("two_nn shape_of_learning", name, 2.0, lambda: two_nn(torus, variant="shape_of_learning")),
        Case("mle k=10", name, 2.0, lambda: mle(torus, k=10)),
        Case("gride n=1", name, 2.0, lambda: gride(torus)),
        Case("gride n=8", name, 2.0, lambda: gride(torus).parts["n=8"]),
        Case("local_pca_dimension", "8-ball in width 32", 8.0, lambda: local_pca_dimension(disc)),
        # Rows near the edge of a ball see half a neighbourhood: the bias that every such estimator has.
        Case("two_nn facco", "8-ball in width 32", 8.0, lambda: two_nn(disc), 0.1),
    ]


def _local_cases(n: int, seed: int) -> list[Case]:
    torus = manifolds.flat_torus(n, 2, seed=seed)
    ball = manifolds.sphere(n, 2, radius=2.0, width=16, seed=seed)
    plane, ball_name = (
        "flat 2-torus in width 4: flat in each neighbourhood, round as a whole",
        "2-sphere of radius 2 in width 16",
    )
    white = manifolds.gaussian(n, (1.0,) * 16, seed=seed)
    walk = manifolds.random_walk(n, 16, seed=seed)
    x = manifolds.gaussian(n, (1.0,) * 8, seed=seed)
    y = torch.cat([x, manifolds.gaussian(n, (1.0,) * 8, seed=seed + 1)], dim=1)
    return [
        Case("local_isotropy", plane, 1 / 3, lambda: local_isotropy(torus), 0.03),
        Case("  its global value", plane, 1.0, lambda: _global(torus), 1e-3),
        Case("curvature", ball_name, math.sqrt(2) / 2, lambda: curvature(ball, dimension=2), 0.02),
        Case("  mean curvature", ball_name, 0.5, lambda: _mean_curvature(ball), 0.02),
        Case("turning_angle", "independent points", 120.0, lambda: turning_angle(white)),
        Case("turning_angle", "random walk", 90.0, lambda: turning_angle(walk)),
        Case("linearity", "half of the target is a linear map of the source", 0.5, lambda: linearity(x, y)),
    ]


def run_demo(rows: int = 8192, seed: int = 0) -> Iterator[Check]:
    """Measure case after case."""
    for case in cases(rows, seed):
        record = Record(run="demo", step=0, site=case.data, measure=case.measure, slice="all", estimate=case.run())
        yield Check(record, case.truth, case.tolerance)


def _entropy_rank(weights: torch.Tensor) -> float:
    p = weights / weights.sum()
    return math.exp(-float(torch.special.xlogy(p, p).sum()))


def _global(rows: torch.Tensor) -> Estimate:
    return local_isotropy(rows).parts["global"]


def _mean_curvature(rows: torch.Tensor) -> Estimate:
    return curvature(rows, dimension=2).parts["mean curvature"]
