"""How far proxies of each kind recover a known tangent space: against noise, curvature, sample size and rank.

Recovery is ``|T^T Q|^2 / d``, the mean squared cosine between a proxy Q (D,K) and the true tangent space T (D,d);
chance is K/D. Laws stand in recovery_laws.py. Every error bar is over independent clouds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.proxies import KINDS, fit_proxy, fit_ranks
from anisoscope.theory.experiment import Check, Experiment, Outcome, Series, loglog_slopes, over_repeats, series_of
from anisoscope.theory.recovery_curvature import curvature_estimator, repeat_seeds
from anisoscope.theory.recovery_laws import (
    breaking_curvature,
    breaking_noise,
    curved_loss,
    flat_loss,
    normal_form,
    random_recovery,
    random_recovery_variance,
    recovery,
    sphere_recovery,
    sphere_recovery_variance,
)
from anisoscope.theory.surfaces import Surface, make_surface

RECOVERED = "recovered share of the tangent space"
LOST = "lost share of the tangent space"
CLOUDS = "independent clouds"


def noisy_cloud(surface: Surface, n: int, *, spread: float, noise: float, seed: int) -> Float[Tensor, "n w"]:
    """A local cloud about the base with normal noise in every direction of the space."""
    generator = torch.Generator().manual_seed(seed)
    v = spread * torch.randn(n, surface.dimension, generator=generator, dtype=torch.float64)
    x = surface.x_over(v)
    return x + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def recoveries(
    surface: Surface, kind: str, rank: int, *, n: int, spread: float, noise: float, seeds: Sequence[int]
) -> Float[Tensor, "r"]:
    """Recovery of the base's tangent space by a proxy fitted to each of several clouds."""
    tangent, found = surface.base.tangent, []
    for seed in seeds:
        rows = noisy_cloud(surface, n, spread=spread, noise=noise, seed=seed)
        found.append(recovery(fit_proxy(rows, kind, rank, seed=seed).basis, tangent))
    return torch.tensor(found, dtype=torch.float64)


def _swept(
    places: Sequence[float], seed: int, repeats: int, one: Callable[[float, range], Float[Tensor, "r"]]
) -> tuple[Float[Tensor, "m"], Float[Tensor, "r m"]]:
    """Values at each place, from clouds of its own: errors along a sweep are independent."""
    found = [one(place, repeat_seeds(seed, repeats, i)) for i, place in enumerate(places)]
    return torch.tensor(places, dtype=torch.float64), torch.stack(found, dim=1)


def crossing(x: Float[Tensor, "m"], y: Float[Tensor, "m"], level: float) -> float:
    """Where y first passes ``level``, interpolated along log x; an end of x where it never does: the first if below."""
    side = y > level
    change = (side[1:] != side[:-1]).nonzero()
    if len(change) == 0:
        return float(x[-1] if side[0] else x[0])
    at = int(change[0])
    share = float((y[at] - level) / (y[at] - y[at + 1]))
    return float(x[at] * (x[at + 1] / x[at]) ** share)


def noise(seed: int, *, repeats: int = 8, many: int = 96, kinds: Sequence[str] = KINDS) -> Outcome:
    """A flat cloud under isotropic noise: PCA follows its law up to the noise that breaks it; other kinds beside it.

    ``repeats`` clouds for each kind and place, ``many`` for the law of PCA; ``kinds`` to leave out dear ones.
    """
    d, width, n = 4, 64, 256
    surface = make_surface("quadratic", dimension=d, normals=8, kappa=0.0, width=width, seed=seed)
    shape = {"dimension": d, "width": width, "n": n}
    at = partial(recoveries, surface, n=n, spread=1.0)
    levels = (0.1, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
    broken = breaking_noise(1.0, **shape)
    where = f"flat cloud, d={d} D={width} n={n}"
    labels = ("noise / spread", RECOVERED)

    x, pca = _swept(levels, seed, many, lambda level, seeds: at("pca", d, noise=level, seeds=seeds))
    law = torch.tensor([1 - flat_loss(1.0, level, **shape) for level in levels], dtype=torch.float64)
    series = [series_of("pca", RECOVERED, x, pca, labels, slice=where, law=law)]
    checks = [_loss(where, 1 - pca[:, i], 1 - float(law[i]), f"noise {levels[i]}", n, tolerance=0.0) for i in (0, 1, 2)]
    # Half of a curve in the limit of large D and n: finite ones round the corner at the breaking noise.
    exact = torch.linspace(0.1, broken, 4001, dtype=torch.float64)
    curve = torch.tensor([1 - flat_loss(1.0, float(level), **shape) for level in exact], dtype=torch.float64)
    checks.append(_half(where, x, pca, "pca", crossing(exact, curve, 0.5)))
    for kind in (one for one in kinds if one != "pca"):
        one = partial(_at_noise, at, kind, d)
        _, found = _swept(levels, seed, repeats, one)
        chance = torch.full_like(x, random_recovery(d, width)) if kind == "random" else None
        series.append(series_of(kind, RECOVERED, x, found, labels, slice=where, law=chance))
        if kind != "random":
            checks.append(_half(where, x, found, kind, None))
    return Outcome(
        (*checks, *_chance(seed, d, width, where)),
        tuple(series),
        (
            f"PCA breaks at a noise of {broken:.3f} spreads: (n-d-2)/(D-d) to the fourth root",
            "ica picks the least Gaussian directions: here all are Gaussian, and nothing tells tangent from noise",
        ),
    )


def sample_size(seed: int, *, repeats: int = 8, many: int = 96, kinds: Sequence[str] = KINDS) -> Outcome:
    """A flat cloud under noise of half its spread, of few and of many rows: every kind against the number of rows."""
    d, width, level = 4, 64, 0.5
    surface = make_surface("quadratic", dimension=d, normals=8, kappa=0.0, width=width, seed=seed)
    numbers = (96, 192, 384, 768, 1536, 3072)
    where = f"flat cloud, d={d} D={width}, noise {level} of the spread"
    labels = ("rows", RECOVERED)

    def at(kind: str, number: float, seeds: range) -> Tensor:
        return recoveries(surface, kind, d, n=int(number), spread=1.0, noise=level, seeds=seeds)

    x, pca = _swept(numbers, seed, many, partial(at, "pca"))
    lost = [flat_loss(1.0, level, dimension=d, width=width, n=n) for n in numbers]
    law = 1 - torch.tensor(lost, dtype=torch.float64)
    series = [series_of("pca", RECOVERED, x, pca, labels, slice=where, law=law)]
    checks = [_loss(where, 1 - pca[:, i], lost[i], f"{n:,} rows", n, tolerance=0.0) for i, n in enumerate(numbers)]
    for kind in (one for one in kinds if one != "pca"):
        _, found = _swept(numbers, seed, repeats, partial(at, kind))
        chance = torch.full_like(x, random_recovery(d, width)) if kind == "random" else None
        series.append(series_of(kind, RECOVERED, x, found, labels, slice=where, law=chance))
        for i in (0, -1):
            estimate = over_repeats(found[:, i], "|T^T Q|^2 / d", what=CLOUDS)
            checks.append(Check(kind, f"{RECOVERED}, {numbers[i]:,} rows", estimate, None, where))
    return Outcome(
        (*checks, *_chance(seed, d, width, where)),
        tuple(series),
        ("ica gains least: all directions are Gaussian here, and more rows give it nothing to hold on to",),
    )


def _at_noise(at: Callable[..., Tensor], kind: str, rank: int, level: float, seeds: range) -> Tensor:
    return at(kind, rank, noise=level, seeds=seeds)


def _half(where: str, x: Tensor, found: Float[Tensor, "r m"], kind: str, truth: float | None) -> Check:
    """The noise at which half of the tangent space is lost, on the curve of each cloud."""
    each = torch.tensor([crossing(x, one, 0.5) for one in found], dtype=torch.float64)
    estimate = over_repeats(each, "noise where recovery is 1/2", what=CLOUDS)
    return Check(kind, "noise that loses half", estimate, truth, where, tolerance=0.0 if truth is None else 0.04)


def _chance(seed: int, d: int, width: int, where: str, draws: int = 400) -> tuple[Check, ...]:
    """Random bases: mean and variance of their recovery, exact."""
    tangent = make_surface("quadratic", dimension=d, width=width, kappa=0.0, seed=seed).base.tangent
    rows, checks = torch.eye(2, width, dtype=torch.float64), []
    for rank in (d, 4 * d):
        bases = (fit_proxy(rows, "random", rank, seed=at).basis for at in repeat_seeds(seed, draws))
        found = torch.tensor([recovery(basis, tangent) for basis in bases], dtype=torch.float64)
        mean = random_recovery(rank, width)
        for measure, values, truth in (
            (f"{RECOVERED}, K={rank}", found, mean),
            (f"its variance over bases, K={rank}", (found - mean).square(), random_recovery_variance(rank, d, width)),
        ):
            estimate = over_repeats(values, "Haar bases", what="random bases")
            checks.append(Check("random", measure, estimate, truth, where))
    return tuple(checks)


def curvature(seed: int, *, repeats: int = 8, many: int = 200, kinds: Sequence[str] = KINDS) -> Outcome:
    """A curved cloud without noise: what PCA loses to curvature grows with its square and falls with the rows."""
    d, width, n = 3, 32, 400

    def curved(kappa: float) -> Surface:
        return make_surface("quadratic", dimension=d, normals=6, kappa=kappa, width=width, seed=seed)

    form = normal_form(curved(1.0).base)
    broken = breaking_curvature(form, 1.0) / float(form.norm())  # as kappa, in units of 1 / spread
    cloud = f"d={d} D={width}"
    little, rows_at, wide = f"little curvature, {cloud} n={n}", f"kappa 0.2, {cloud}", f"much curvature, {cloud} n={n}"

    def lost(kappa: float, rows: int, level: float, seeds: range) -> Tensor:
        return 1 - recoveries(curved(kappa), "pca", d, n=rows, spread=1.0, noise=level, seeds=seeds)

    def law(kappa: float, rows: int = n, level: float = 0.0) -> float:
        return curved_loss(form * kappa, 1.0, level, rows)

    kappas, sizes = (0.02, 0.05, 0.1, 0.2, 0.4), (200.0, 400.0, 800.0, 1600.0)
    x, pca = _swept(kappas, seed, many, lambda kappa, seeds: lost(kappa, n, 0.0, seeds))
    truths = torch.tensor([law(kappa) for kappa in kappas], dtype=torch.float64)
    by_kappa = series_of("pca", LOST, x, pca, ("kappa * spread", LOST), slice=little, law=truths)
    checks = [_loss(little, pca[:, i], float(truths[i]), f"kappa {kappas[i]}", n) for i in (2, 4)]
    both = lost(0.2, n, 0.1, repeat_seeds(seed, many, 20))
    checks.append(_loss(little, both, law(0.2, n, 0.1), "kappa 0.2 and noise 0.1", n))
    # A slope of 2 is the limit of little curvature: on the first three, where the gap of variances is hardly touched.
    checks.append(_slope(little, "slope of the loss in curvature", x[:3], pca[:, :3], 2.0))
    x_n, by_n = _swept(sizes, seed + 500, many, lambda rows, seeds: lost(0.2, int(rows), 0.0, seeds))
    law_n = torch.tensor([law(0.2, int(rows)) for rows in sizes], dtype=torch.float64)
    by_rows = series_of("pca", LOST, x_n, by_n, ("rows", LOST), slice=rows_at, law=law_n)
    checks.append(_slope(rows_at, "slope of the loss in rows", x_n, by_n, -1.0))
    series, shown = _kinds_by_curvature(curved, seed, repeats, broken, wide, n, kinds)
    return Outcome(
        (*checks, *shown),
        (by_kappa, by_rows, *series),
        (f"a normal direction varies as much as a tangent one at kappa * spread = {broken:.2f}: PCA breaks there",),
    )


def _loss(
    where: str, values: Float[Tensor, "r"], truth: float, name: str, n: int, tolerance: float | None = None
) -> Check:
    # The law of curvature is the first order in 1/n; the next one was measured as some -10/n of it.
    estimate = over_repeats(values, "1 - |T^T Q|^2 / d", what=CLOUDS, n=n)
    return Check("pca", f"{LOST}, {name}", estimate, truth, where, tolerance=12 / n if tolerance is None else tolerance)


def _slope(where: str, name: str, x: Tensor, y: Float[Tensor, "r m"], truth: float) -> Check:
    """The slope on log-log axes of means over groups of clouds: the logarithm of a single loss is skewed."""
    groups = torch.stack([part.mean(dim=0) for part in y.chunk(10)])
    estimate = over_repeats(loglog_slopes(x, groups), "log-log least squares", what="groups of clouds")
    return Check("pca", name, estimate, truth, where, tolerance=0.02)


def _kinds_by_curvature(
    curved: Callable[[float], Surface],
    seed: int,
    repeats: int,
    broken: float,
    where: str,
    n: int,
    kinds: Sequence[str],
) -> tuple[list[Series], list[Check]]:
    """Kinds that look at the rows, from nearly flat to beyond the curvature at which PCA breaks."""
    shares = (0.1, 0.25, 0.5, 0.8, 1.25, 2.0)
    labels = ("kappa / kappa that breaks PCA", RECOVERED)
    series, checks = [], []
    for kind in (one for one in kinds if one != "random"):

        def one(share: float, seeds: range, kind: str = kind) -> Tensor:
            surface = curved(share * broken)
            return recoveries(surface, kind, surface.dimension, n=n, spread=1.0, noise=0.0, seeds=seeds)

        x, y = _swept(shares, seed, repeats, one)
        series.append(series_of(kind, RECOVERED, x, y, labels, slice=where))
        for i in (2, 5):
            estimate = over_repeats(y[:, i], "|T^T Q|^2 / d", what=CLOUDS, n=n)
            checks.append(Check(kind, f"{RECOVERED}, {shares[i]} of the breaking kappa", estimate, None, where))
    return series, checks


def rank(seed: int, *, repeats: int = 8, kinds: Sequence[str] = KINDS) -> Outcome:
    """One basis for a whole sphere holds K/(d+1) of its tangent spaces, of whatever kind; a local cloud needs K = d."""
    whole, local = _sphere_ranks(seed, repeats, kinds), _local_ranks(seed, repeats, kinds)
    return Outcome((*whole.checks, *local.checks), (*whole.series, *local.series))


def _sphere_ranks(seed: int, repeats: int, kinds: Sequence[str]) -> Outcome:
    d, width, n = 5, 24, 600
    sphere = make_surface("sphere", dimension=d, width=width, seed=seed)
    clouds = [sphere.sample(n, seed=at).x for at in repeat_seeds(seed, repeats)]
    # Other points than the fit saw: a basis of large variance turns towards the normals of its own points.
    tangents = [sphere.sample(n, seed=at).tangent for at in repeat_seeds(seed, repeats, 1)]
    where, ranks = f"whole sphere S^{d}, D={width}", range(1, d + 2)
    checks, series = [], []
    for kind in kinds:
        found = _by_rank(clouds, tangents, kind, ranks, seed)
        law = torch.tensor([k / width if kind == "random" else sphere_recovery(k, d) for k in ranks]).double()
        x = torch.tensor([float(k) for k in ranks], dtype=torch.float64)
        series.append(series_of(kind, RECOVERED, x, found, ("rank K", RECOVERED), slice=where, law=law))
        middle = over_repeats(found[:, 2], "|T^T Q|^2 / d over fresh points", what=CLOUDS, n=n)
        # Few repeats know their own spread badly; here it is known exactly, of points and of random bases.
        variance = sphere_recovery_variance(3, d) / n
        variance += random_recovery_variance(3, d + 1, width) if kind == "random" else 0.0
        middle = replace(middle, stderr=math.sqrt(variance / repeats), dof=None)
        checks.append(Check(kind, f"{RECOVERED}, K=3", middle, float(law[2]), where))
    return Outcome(tuple(checks), tuple(series))


def _local_ranks(seed: int, repeats: int, kinds: Sequence[str]) -> Outcome:
    d, width, n, level = 4, 24, 400, 0.1
    surface = make_surface("quadratic", dimension=d, normals=6, kappa=0.3, width=width, seed=seed)
    seeds = repeat_seeds(seed, repeats, 2)
    clouds = [noisy_cloud(surface, n, spread=1.0, noise=level, seed=at) for at in seeds]
    ranks = (1, 2, 3, 4, 6, 8)
    x = torch.tensor([float(k) for k in ranks], dtype=torch.float64)
    loss = curved_loss(normal_form(surface.base), 1.0, level, n)
    where = f"local cloud, d={d} D={width}, kappa 0.3, noise {level}"
    checks, series = [], []
    for kind in kinds:
        found = _by_rank(clouds, [surface.base.tangent] * repeats, kind, ranks, seed)
        law = x / width if kind == "random" else None
        if kind == "pca":  # each of the first d directions loses the same share
            law = torch.where(x <= d, x / d * (1 - loss), 1.0)
        series.append(series_of(kind, RECOVERED, x, found, ("rank K", RECOVERED), slice=where, law=law))
        estimate = over_repeats(found[:, 3], "|T^T Q|^2 / d", what=CLOUDS, n=n)
        if kind == "random":
            spread = math.sqrt(random_recovery_variance(d, d, width) / repeats)
            estimate = replace(estimate, stderr=spread, dof=None)
        checks.append(Check(kind, f"{RECOVERED}, K=d", estimate, d / width if kind == "random" else None, where))
    return Outcome(tuple(checks), tuple(series))


def _by_rank(
    clouds: Sequence[Tensor], tangents: Sequence[Tensor], kind: str, ranks: Iterable[int], seed: int
) -> Float[Tensor, "r m"]:
    """Recovery by proxies of each rank (columns) in each cloud (rows)."""
    rows, wanted = [], list(ranks)
    # A place of its own: a random basis must not repeat the draw that turned the surface.
    for cloud, tangent, at in zip(clouds, tangents, repeat_seeds(seed, len(clouds), 3), strict=True):
        proxies = fit_ranks(cloud, kind, wanted, seed=at)
        rows.append([recovery(proxies[k].basis, tangent) for k in wanted])
    return torch.tensor(rows, dtype=torch.float64)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "recovery-noise",
        "Tangent proxies under noise",
        "How much of the true tangent space does each kind of proxy find as noise grows, and where does it break?",
        noise,
        25.0,
    ),
    Experiment(
        "recovery-curvature",
        "Tangent proxies on curved clouds",
        "How much of the tangent space does curvature cost, against rows, and which kinds take normals for tangents?",
        curvature,
        20.0,
    ),
    Experiment(
        "recovery-rows",
        "Tangent proxies of few and many rows",
        "How much of the true tangent space does each kind of proxy find as rows are added?",
        sample_size,
        22.0,
    ),
    Experiment(
        "recovery-rank",
        "Tangent proxies of every rank",
        "What does one basis of rank K hold of a whole curved surface, and of a local cloud?",
        rank,
        15.0,
    ),
    Experiment(
        "recovery-estimator",
        "The curvature estimator",
        "How far does the estimated curvature follow the true one against rows, noise and curvature?",
        curvature_estimator,
        12.0,
    ),
)
"""The experiments of this module, in the order of the report."""
