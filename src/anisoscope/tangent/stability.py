"""What a semi-NMF is worth: its error beside sparsity, agreement over seeds and overlap with PCA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import OptionError
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import fields, mean_bar
from anisoscope.tangent.cloud import Cloud
from anisoscope.tangent.seminmf import Start, fit_seminmf
from anisoscope.tangent.spans import check_rank, orthonormal, overlap, principal_angles


def match_cosine(a: Float[Tensor, "k d"], b: Float[Tensor, "k d"]) -> float:
    """Mean cosine of concepts paired one to one so that it is largest. Concepts have a sign; it counts."""
    from scipy.optimize import linear_sum_assignment

    cosines = _unit(a) @ _unit(b.to(a.device)).T
    left, right = linear_sum_assignment(cosines.cpu().numpy(), maximize=True)
    return float(cosines.cpu()[torch.from_numpy(left), torch.from_numpy(right)].mean())


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1)


def seminmf_report(
    rows: RowsLike,
    rank: int,
    *,
    mask: MaskLike = None,
    centre: bool = True,
    start: Start = "kmeans",
    seeds: Sequence[int] = (0, 1, 2, 3),
    **options: Any,
) -> Mapping[str, Estimate]:
    """The fit from several seeds, in numbers; ``options`` go to ``fit_seminmf``.

    - ``error``, ``sparsity``: mean over seeds. A shifted PCA has a small error and no sparsity.
    - ``match_cosine``: concepts of two seeds paired at best, mean over pairs of seeds; 1 where all seeds agree.
    - ``span_angle``: the largest principal angle between the spans of two seeds in degrees, mean over pairs.
    - ``pca_overlap``: ``||Q^T V||^2 / K`` with the K directions of largest variance; 1 for PCA itself, K/D at random.
    - ``pca_error``: the least error that any factorisation of this rank can have.
    """
    if len(set(seeds)) != len(seeds) or not seeds:
        raise OptionError(f"seeds must be at least one, and different; got {list(seeds)}")
    cloud = Cloud(rows, mask, centre=centre)
    check_rank(rank, cloud.width)
    cloud.require_spread()
    values, top = cloud.leading(rank)
    total = float(cloud.fitted.square().sum(dtype=torch.float64))
    fits = [fit_seminmf(cloud.fitted, rank, centre=False, start=start, seed=seed, **options) for seed in seeds]
    spans = [orthonormal(fit.concepts.T) for fit in fits]
    over = f"{len(fits)} seeds"

    def mean(name: str, each: Sequence[float], bar_over: str | None, *notes: str) -> Estimate:
        numbers = torch.tensor(each, dtype=torch.float64)
        bar = mean_bar(numbers, bar_over) if bar_over and len(each) > 1 else None
        said = notes if bar else (*notes, "no error bar: " + ("one seed" if len(fits) == 1 else "pairs share seeds"))
        return Estimate(value=float(numbers.mean()), n=cloud.n, method=f"semi-NMF, {name}", notes=said, **fields(bar))

    found = {
        "error": mean("relative error, " + ("centred" if centre else "uncentred"), [f.error for f in fits], over),
        "sparsity": mean("share of codes that are zero", [f.sparsity for f in fits], over),
        "pca_overlap": mean("overlap with PCA", [overlap(span, top) for span in spans], over),
        "pca_error": Estimate(
            value=max(1 - float(values.sum()) / total, 0.0),
            stderr=None,
            n=cloud.n,
            method=f"relative error of the SVD of rank {rank}",
            notes=("no error bar: the least error of these very rows",),
        ),
    }
    pairs = list(combinations(range(len(fits)), 2))
    if pairs:
        cosines = [match_cosine(fits[i].concepts, fits[j].concepts) for i, j in pairs]
        angles = [float(principal_angles(spans[i], spans[j])[-1]) for i, j in pairs]
        found["match_cosine"] = mean(f"matched concepts over {len(pairs)} pairs of seeds", cosines, None)
        found["span_angle"] = mean(f"largest angle over {len(pairs)} pairs of seeds, degrees", angles, None)
    return found
