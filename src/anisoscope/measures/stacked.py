"""The monitor's default measures of several sites at once, for a GPU: hardly a question to the device on the way.

Values, error bars and words are those of the measures themselves (a test holds this); only the ordinary case is taken.
What is not ordinary (sizes out of range, rows that are all alike, spectra too steep for a product, ties) is left to
the plain measures, site by site. Letters: S sites, N rows, D the width, R eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.bars import FLOAT32_SIZE, FLOAT32_SPREAD, second_order, unless_biased
from anisoscope.measures.later import eigh_later, fetched
from anisoscope.measures.spectrum import GRAM_LIMIT, Top
from anisoscope.measures.stacked_neighbors import begin_two_nn
from anisoscope.measures.uncertainty import Bar, fields, spread_runs

STACKED = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
"""What is measured here; the others are measured site by site."""

SAFE = (1e-15, 1e15)  # lengths of rows whose squares stay in float32
ORDINARY = (1e-6, 1e6)
WIDE_CELLS = 1 << 27  # held as float64 at a time
EPS = torch.finfo(torch.float64).eps

Finish = Callable[[], list[dict[str, Estimate] | None]]


def begin(rows: Sequence[Float[Tensor, "n d"]], names: Sequence[str]) -> Finish:
    """Begin to measure float32 rows of several sites, all of one shape; the function returned gives the results.

    A list with the estimates of each site by name, or None where a site is not ordinary.
    """
    n, width = rows[0].shape
    if n <= max(width, 512) or width < 2 or rows[0].dtype != torch.float32:
        return lambda: [None] * len(rows)
    stack = torch.stack(list(rows))
    table: dict[str, Tensor] = {"size": torch.stack(torch.aminmax(stack.flatten(1), dim=1)).abs().amax(dim=0)}
    spectral = any(name in names for name in ("spectral_ratio", "effective_rank", "isoscore"))
    sums = _Sums.of(stack, directions="mean_cosine" in names) if spectral or "mean_cosine" in names else None
    later = None
    if sums is not None and any(name in names for name in ("spectral_ratio", "effective_rank")):
        # What is not finite would end the decomposition of all sites: such sites get the identity, and are left out.
        good = torch.isfinite(sums.covariance).all(dim=2).all(dim=1)[:, None, None]
        later = eigh_later(torch.where(good, sums.covariance, torch.eye(width, device=stack.device).double()))
    neighbours = begin_two_nn(stack) if "two_nn" in names else None

    def finish() -> list[dict[str, Estimate] | None]:
        if sums is not None:
            table.update(sums.table())
            if "isoscore" in names:
                table["isoscore means"] = _isoscore_means(sums)
            if later is not None:
                table.update(_of_spectrum(sums, *later()))
        found = fetched(table)
        dimensions = neighbours() if neighbours is not None else [None] * len(rows)
        over = spread_runs(rows[0], n).over
        out: list[dict[str, Estimate] | None] = []
        for site in range(len(rows)):
            here = {name: np.asarray(value[site]) for name, value in found.items()}
            out.append(_told(here, names, n, width, over, dimensions[site]))
        return out

    return finish


@dataclass(frozen=True)
class _Sums:
    """Of each site: covariance, its total, fourth powers of the radii, and centred rows for error bars."""

    n: int
    mean: Float[Tensor, "s d"]
    covariance: Float[Tensor, "s d d"]
    total: Float[Tensor, "s"]
    fourth: Float[Tensor, "s"]
    rows: Float[Tensor, "s m d"]
    groups: int
    cosines: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Float[Tensor, "s n d"], *, directions: bool) -> _Sums:
        _, n, width = rows.shape
        step = max(1, WIDE_CELLS // (n * width))
        parts = [_sums(some, directions=directions) for some in rows.split(step)]
        joined = {name: torch.cat([one[name] for one in parts]) for name in parts[0]}
        mean, scatter, fourth, some = (joined.pop(name) for name in ("mean", "scatter", "fourth", "rows"))
        covariance = scatter / (n - 1)
        total = covariance.diagonal(dim1=1, dim2=2).sum(dim=1)
        groups = spread_runs(rows[0], n).blocks.shape[0]
        return cls(n, mean, covariance, total, fourth, some, groups, joined)

    def means(self, influence: Float[Tensor, "s m"]) -> Float[Tensor, "s g"]:
        """Of each block of rows."""
        return influence.double().unflatten(1, (self.groups, -1)).mean(dim=2)

    def table(self) -> dict[str, Tensor]:
        """What is told of them."""
        square = self.covariance.square().sum(dim=(1, 2))
        found = {"total": self.total, "square": square, "fourth": self.fourth, "mean": self.mean.abs().amax(dim=1)}
        return found | self.cosines


def _sums(rows: Float[Tensor, "s n d"], *, directions: bool) -> dict[str, Tensor]:
    """Of a few sites, whose rows fit into memory twice as float64."""
    wide = rows.double()
    found = _cosines(rows, wide) if directions else {}
    mean = wide.mean(dim=1)
    wide = wide.sub_(mean[:, None])
    radius2 = wide.square().sum(dim=2)
    return found | {
        "mean": mean,
        "scatter": wide.mT @ wide,
        "fourth": radius2.square().sum(dim=1),
        "rows": _runs(wide).flatten(1, 2).float(),
    }


def _runs(rows: Float[Tensor, "s n d"]) -> Float[Tensor, "s g l d"]:
    """``spread_runs`` of each site."""
    n = rows.shape[1]
    groups, length, _ = spread_runs(torch.empty(n, 0), n).blocks.shape
    stride = n // groups
    return rows[:, : groups * stride].unflatten(1, (groups, stride))[:, :, :length]


def _cosines(rows: Float[Tensor, "s n d"], wide: Float[Tensor, "s n d"]) -> dict[str, Tensor]:
    """Of ``mean_cosine``: the squared sum of unit rows, projections on it by block, and the spread of some cosines."""
    length = torch.linalg.vector_norm(rows, dim=2)
    total = (length.reciprocal().double()[:, None] @ wide)[:, 0]
    blocks, lengths = _runs(rows), _runs(length[:, :, None])[:, :, :, 0]
    along = (blocks @ total.float()[:, None, :, None])[:, :, :, 0] / lengths
    some = blocks[:, :, :: max(1, lengths[0].numel() // 256)].flatten(1, 2)
    some = some / torch.linalg.vector_norm(some, dim=2, keepdim=True)
    gram = (some @ some.mT).double()
    pairs = gram.shape[1] * (gram.shape[1] - 1)
    trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
    mean = (gram.sum(dim=(1, 2)) - trace) / pairs
    spread = (gram - mean[:, None, None]).square()
    return {
        "cosine": total.square().sum(dim=1),
        "along": along.double().mean(dim=2),
        "pairs": (spread.sum(dim=(1, 2)) - spread.diagonal(dim1=1, dim2=2).sum(dim=1)) / (pairs - 1),
        "length": torch.stack(torch.aminmax(length, dim=1), dim=1),
    }


def _isoscore_means(sums: _Sums) -> Float[Tensor, "s g"]:
    trace, size = sums.total[:, None], sums.covariance.square().sum(dim=(1, 2))[:, None]
    radius2 = torch.linalg.vector_norm(sums.rows, dim=2).double().square_()
    form = (sums.rows @ sums.covariance.float()).mul_(sums.rows).sum(dim=2, dtype=torch.float64)
    return sums.means(2 * trace * (radius2 - trace) / size - 2 * trace**2 * (form - size) / size**2)


def _of_spectrum(sums: _Sums, ascending: Float[Tensor, "s d"], columns: Float[Tensor, "s d d"]) -> dict[str, Tensor]:
    """Eigenvalues, error bars of the first and of the effective rank, and the bias of the latter."""
    values, vectors = ascending.flip(1).clamp_min(0), columns.flip(2).float()
    total, first = sums.total[:, None], values[:, :1]
    scores2 = (sums.rows @ vectors).square_()
    radius2 = torch.linalg.vector_norm(sums.rows, dim=2).double().square_()
    lead = (scores2[:, :, 0].double() - first) / total - first * (radius2 - total) / total**2
    scaled = values / values.sum(dim=1, keepdim=True)
    sigma = scaled.sqrt()
    whole = sigma.sum(dim=1, keepdim=True)
    p = sigma / whole
    entropy = -torch.special.xlogy(p, p).sum(dim=1, keepdim=True)
    rank = entropy.exp()
    slope = -rank * (p.clamp_min(1e-300).log() + entropy) / whole
    weights = torch.where(sigma > 0, slope / (2 * sigma.clamp_min(1e-300)), 0.0) / values.sum(dim=1, keepdim=True)
    on_axes = (scores2.double() @ weights[:, :, None])[:, :, 0] - (values * weights).sum(dim=1, keepdim=True)
    weighted = torch.special.xlogy(sigma, sigma).sum(dim=1)
    roots, logs = _biases(scaled, sums.n - 1)
    whole = whole[:, 0]
    bias = rank[:, 0] * ((1 / whole + weighted / whole**2) * roots - logs / whole)
    return {
        "values": values, "lead means": sums.means(lead), "rank": rank[:, 0], "rank means": sums.means(on_axes),
        "rank bias": bias,
    }  # fmt: skip


def _biases(values: Float[Tensor, "s r"], dof: int) -> tuple[Float[Tensor, "s"], Float[Tensor, "s"]]:
    """``spectrum.trace_bias`` of ``sum sigma`` and of ``sum sigma log sigma``, for positive eigenvalues."""
    a, b = values[:, :, None], values[:, None, :]
    gap, middle = a - b, (a + b) / 2
    close = gap.abs() < 1e-5 * (a + b)
    apart = torch.where(close, 1.0, gap)
    eye = torch.eye(values.shape[1], dtype=torch.float64, device=values.device)
    weight = a * b * (1 + eye)
    found = []
    for slope, bend in (
        (0.5 / values.sqrt(), -0.25 / middle**1.5),
        ((values.log() + 2) / (4 * values.sqrt()), -middle.log() / (8 * middle**1.5)),
    ):
        divided = torch.where(close, bend, (slope[:, :, None] - slope[:, None, :]) / apart)
        found.append((divided * weight).sum(dim=(1, 2)) / (2 * dof))
    return found[0], found[1]


def _told(
    here: dict[str, np.ndarray], names: Sequence[str], n: int, width: int, over: str, dimension: Estimate | None
) -> dict[str, Estimate] | None:
    """The estimates of one site, or None where it is not ordinary."""
    if not all(np.isfinite(value).all() for value in here.values()):
        return None
    if not ORDINARY[0] < float(here["size"].max()) < ORDINARY[1]:
        return None
    if "total" in here:
        rounding = 4 * EPS * float(here["mean"])
        if float(here["total"]) * (n - 1) <= n * width * rounding**2:
            return None
        if not 1 / FLOAT32_SIZE < float(here["total"]) * (n - 1) / n < FLOAT32_SIZE:
            return None
    if "values" in here:
        values = here["values"]
        if not values[-1] > max(values[0] * GRAM_LIMIT, FLOAT32_SPREAD * values.sum()):
            return None
    if "length" in here and not SAFE[0] < here["length"][0] <= here["length"][1] < SAFE[1]:
        return None
    makers = {
        "spectral_ratio": _spectral_ratio, "mean_cosine": _mean_cosine, "isoscore": _isoscore,
        "effective_rank": _effective_rank,
    }  # fmt: skip
    found: dict[str, Estimate] = {}
    for name in names:
        one = dimension if name == "two_nn" else makers[name](here, n, width, over)
        if one is None:
            return None
        found[name] = one
    return found


def _bar(means: np.ndarray, n: int, over: str) -> Bar:
    """As ``ErrorRows.bar``, from the means over blocks."""
    count = len(means)
    rows = spread_runs(torch.empty(n, 0), n).blocks.shape[1] * count
    return Bar(math.sqrt(float(means.var(ddof=1)) / count * (rows / n)), count - 1, over)


def _spectral_ratio(here: dict[str, np.ndarray], n: int, width: int, over: str) -> Estimate:
    total = float(here["total"])
    lead = Top(torch.from_numpy(here["values"].copy()), torch.empty(0), total)
    bias = min(lead.first_bias(n - 1) / total, 1.0)
    bar, notes = unless_biased(
        _bar(here["lead means"], n, over), bias, "the leading eigenvalue is not separated from the rest"
    )
    return Estimate(value=lead.first / total, n=n, method="lambda_1 / sum lambda", notes=notes, **fields(bar))


def _effective_rank(here: dict[str, np.ndarray], n: int, width: int, over: str) -> Estimate:
    bar, notes = unless_biased(
        _bar(here["rank means"], n, over), float(here["rank bias"]), "the spectrum of a sample is spread out"
    )
    method = "exp entropy of sigma / sum sigma"
    return Estimate(value=float(here["rank"]), n=n, method=method, notes=notes, **fields(bar))


def _isoscore(here: dict[str, np.ndarray], n: int, width: int, over: str) -> Estimate | None:
    unit = float(here["total"])
    frobenius, radial = float(here["square"]) / unit**2, float(here["fourth"]) / unit**2 / (n - 1)
    scale = (n - 1) / (n * (n - 2) * (n - 3))
    square = scale * (2 * frobenius + (n * n - 3 * n + 1) - n * radial)
    frobenius = scale * ((n - 1) * (n - 2) * frobenius + 1 - n * radial)
    if not (frobenius > 1e-12 and square > 0):
        return None
    ratio = square / frobenius
    bar = second_order(_bar(here["isoscore means"], n, over), ratio, n, 1.0)
    assert bar is not None
    return Estimate(
        value=(ratio - 1) / (width - 1),
        n=n,
        method="(PR - 1) / (D - 1), corrected",
        **fields(bar.scaled(1 / (width - 1))),
    )


def _mean_cosine(here: dict[str, np.ndarray], n: int, width: int, over: str) -> Estimate:
    value = (float(here["cosine"]) - n) / (n * (n - 1))
    bar = _bar(2 * ((here["along"] - 1) / (n - 1) - value), n, over)
    degenerate = 2 * float(here["pairs"]) / n**2
    bar = Bar(math.sqrt(max(bar.stderr**2 - degenerate, degenerate / 2)), bar.dof, bar.over)
    return Estimate(value=value, n=n, method="closed form over all pairs", **fields(bar))
