"""How far the curvature estimator follows the truth: its excess on large caps, its loss to noise, where it breaks."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.measures.curvature import curvature, fit_quadratic
from anisoscope.measures.frames import neighborhoods
from anisoscope.theory.experiment import Check, Outcome, loglog_slopes, over_repeats, series_of
from anisoscope.theory.recovery_laws import attenuation, ball_attenuation, normal_form, sphere_curvature_excess
from anisoscope.theory.surfaces import make_surface

K, D_SPHERE = 64, 2
SQUARED = "|II|^2 found / true"
BROKEN = 0.9  # share of |II| at which the estimator is called broken
SAMPLES = "independent samples"
NOISY = "noisy unit sphere S^2"
LEVELS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05)  # of noise, in units of the sphere's radius


def curvature_estimator(seed: int, *, repeats: int = 12) -> Outcome:
    """All four questions to the estimator: sample size, noise in a known frame, noise as it comes, curvature."""
    parts = [_gaussian(seed), _sizes(seed, repeats), _noise(seed, repeats), _curvatures(seed, repeats)]
    return Outcome(
        tuple(check for one in parts for check in one.checks),
        tuple(line for one in parts for line in one.series),
        tuple(note for one in parts for note in one.notes),
    )


def repeat_seeds(seed: int, repeats: int, place: int = 0) -> range:
    """Seeds of independent repeats at one of up to 900 places of a sweep, apart from those of every other seed."""
    first = 1_000_003 * (seed + 1) + 1000 * place
    return range(first, first + repeats)


def _gaussian(seed: int, clouds: int = 96, rows: int = 600) -> Outcome:
    """The fit alone, in the true frame of a normal cloud: noise shrinks II by a known factor, whatever II."""
    d, spread, levels = 2, 1.0, (0.05, 0.1, 0.2, 0.4, 0.8)
    surface = make_surface("quadratic", dimension=d, normals=3, kappa=1.0, width=6, seed=seed)
    form = normal_form(surface.base)
    axes = torch.linalg.qr(surface.base.tangent, mode="complete").Q
    axes[:, :d] = surface.base.tangent
    generator = torch.Generator().manual_seed(seed)
    v = spread * torch.randn(clouds * rows, d, generator=generator, dtype=torch.float64)
    clean = surface.x_over(v) @ axes
    kept = []
    for level in levels:
        noisy = clean + level * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
        fit = fit_quadratic(noisy.unflatten(0, (clouds, rows)), d)
        kept.append(fit.form2 / float(form.square().sum()))
    y, x = torch.stack(kept, dim=1), torch.tensor(levels, dtype=torch.float64)
    law = torch.tensor([attenuation(spread, level) ** 2 for level in levels], dtype=torch.float64)
    where = "normal cloud in its true frame, d=2 D=6"
    series = series_of("fit alone", SQUARED, x, y, ("noise / spread", SQUARED), slice=where, law=law)
    checks = []
    for i in (1, 2, 3):
        estimate = over_repeats(y[:, i], "quadratic fit", what="clouds", n=rows)
        checks.append(Check("fit alone", f"{SQUARED}, noise {levels[i]}", estimate, float(law[i]), where))
    return Outcome(tuple(checks), (series,))


def _sizes(seed: int, repeats: int) -> Outcome:
    """Clean spheres: the estimate is too large by a known multiple of the neighbourhood's squared radius."""
    sizes = (1000, 2000, 4000, 8000)
    where, series, checks = "clean unit spheres", [], []
    for d in (2, 3):
        surface = make_surface("sphere", dimension=d, width=d + 3, seed=seed)
        excess, radius = [], []
        for n in sizes:
            found = [
                curvature(surface.sample(n, seed=at).x, dimension=d, k=K, seed=at) for at in repeat_seeds(seed, repeats)
            ]
            excess.append(torch.tensor([one.value / math.sqrt(d) - 1 for one in found], dtype=torch.float64))
            radius.append(sum(one.parts["radius"].value for one in found) / len(found))
        x, y = torch.tensor(radius, dtype=torch.float64), torch.stack(excess, dim=1)
        law = torch.tensor([sphere_curvature_excess(d, one) for one in radius], dtype=torch.float64)
        labels = ("radius of a neighbourhood / R", "relative excess of |II|")
        series.append(series_of(f"S^{d}", labels[1], x, y, labels, slice=where, law=law))
        last = over_repeats(y[:, -1], "|II| R / sqrt(d) - 1", what=SAMPLES, n=sizes[-1])
        # The next order is a multiple of radius^2 of this one.
        order = float(x[-1]) ** 2
        checks.append(Check(f"S^{d}", f"{labels[1]}, n={sizes[-1]}", last, float(law[-1]), where, tolerance=order))
        slope = over_repeats(loglog_slopes(x[-2:], y[:, -2:]), "log-log, the two smallest radii", what=SAMPLES)
        checks.append(Check(f"S^{d}", "slope of the excess in the radius", slope, 2.0, where, tolerance=0.05))
    return Outcome(tuple(checks), tuple(series))


def _noise(seed: int, repeats: int) -> Outcome:
    """Noise on spheres: what it does to the fit alone, by its law, and to the estimator as it is, in two widths."""
    law, fit = _fit_under_noise(seed, repeats)
    n, x = 4000, torch.tensor(LEVELS, dtype=torch.float64)
    checks, series = list(fit.checks), list(fit.series)
    for width in (6, 24):
        surface = make_surface("sphere", dimension=D_SPHERE, width=width, seed=seed)
        rows = []
        for at in repeat_seeds(seed, repeats):
            clean = surface.sample(n, seed=at).x
            e = torch.randn(clean.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            found = [curvature(clean + level * e, dimension=D_SPHERE, k=K, seed=at).value for level in LEVELS]
            rows.append([one**2 / D_SPHERE for one in found])
        y = torch.tensor(rows, dtype=torch.float64)
        site = f"estimator, D={width} n={n} k={K}"
        series.append(series_of(site, SQUARED, x, y, ("noise / R", SQUARED), slice=NOISY, law=law))
        checks.append(Check(site, "noise / R that breaks it", _breaking(x, y), None, NOISY))
    return Outcome(tuple(checks), tuple(series), fit.notes)


def _fit_under_noise(seed: int, repeats: int, n: int = 16_000, k: int = 256) -> tuple[Float[Tensor, "m"], Outcome]:
    """The fit in the true frame, on neighbours of the clean points: large enough neighbourhoods follow the law.

    Of as large a radius as those of the estimator beside it, with four times their rows: among 64 rows the noise of
    the coefficients, which is not the same everywhere once t is noisy, is not quite taken off.
    """
    surface = make_surface("sphere", dimension=D_SPHERE, width=6, seed=seed)
    rows, radii = [], []
    for at in repeat_seeds(seed, repeats, 1):
        points = surface.sample(n, seed=at)
        near = neighborhoods(points.x, k, 128, at)
        axes = torch.linalg.qr(points.tangent[near.anchors], mode="complete").Q
        e = torch.randn(points.x.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
        found = []
        for level in LEVELS:
            noisy = points.x + level * e
            local = (noisy[near.members] - noisy[near.anchors][:, None]) @ axes
            found.append(float(fit_quadratic(local, D_SPHERE).form2.mean()) / D_SPHERE)
        rows.append(found)
        radii.append(float(near.distances[:, -1].mean()))
    radius = sum(radii) / len(radii)
    rise = (1 + sphere_curvature_excess(D_SPHERE, radius)) ** 2
    law = torch.tensor([rise * ball_attenuation(D_SPHERE, radius, level) ** 2 for level in LEVELS], dtype=torch.float64)
    y = torch.tensor(rows, dtype=torch.float64)
    site, x = (
        f"fit alone, neighbours chosen before the noise, D=6 n={n} k={k}",
        torch.tensor(LEVELS, dtype=torch.float64),
    )
    series = series_of(site, SQUARED, x, y, ("noise / R", SQUARED), slice=NOISY, law=law)
    checks = []
    for i in (1, 3, 4):
        estimate = over_repeats(y[:, i], "quadratic fit, true frame", what=SAMPLES, n=n)
        checks.append(Check(site, f"{SQUARED}, noise {LEVELS[i]}", estimate, float(law[i]), NOISY, tolerance=0.02))
    note = f"neighbourhoods have a radius of {radius:.3f} R and rise {radius**2 / 2:.4f} R above their tangent"
    return law, Outcome(tuple(checks), (series,), (note,))


def _breaking(x: Float[Tensor, "m"], squares: Float[Tensor, "r m"]) -> Estimate:
    """The noise at which the mean of |II|^2 falls to the square of BROKEN, with a jackknife over samples."""

    def of(mean: Tensor) -> float:
        below = (mean < BROKEN**2).nonzero()
        if len(below) == 0 or int(below[0]) == 0:
            return float(x[-1] if len(below) == 0 else x[0])
        at = int(below[0])
        share = float((mean[at - 1] - BROKEN**2) / (mean[at - 1] - mean[at]))
        return float(x[at - 1] + share * (x[at] - x[at - 1]))

    r = len(squares)
    without = torch.tensor([of((squares.sum(dim=0) - one) / (r - 1)) for one in squares], dtype=torch.float64)
    stderr = math.sqrt((r - 1) / r * float((without - without.mean()).square().sum()))
    value = of(squares.mean(dim=0))
    method = f"noise where |II| reads {BROKEN:.0%}, jackknife"
    return Estimate(value=value, stderr=stderr, n=r, method=method, over=f"{r} {SAMPLES}", dof=float(r - 1))


def _curvatures(seed: int, repeats: int, n: int = 4000) -> Outcome:
    """Random graphs of growing curvature, little noise: |II| found beside the root mean square of the true ones."""
    kappas, level = (0.1, 0.2, 0.4, 0.8, 1.6), 0.002
    rows = []
    for at in repeat_seeds(seed, repeats):
        ratios = []
        for kappa in kappas:
            surface = make_surface("quadratic", dimension=2, normals=3, kappa=kappa, width=8, seed=seed)
            points = surface.sample(n, seed=at)
            e = torch.randn(points.x.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            truth = float(points.second.square().sum(dim=(1, 2, 3)).mean())
            ratios.append(curvature(points.x + level * e, dimension=2, k=K, seed=at).value ** 2 / truth)
        rows.append(ratios)
    y, x = torch.tensor(rows, dtype=torch.float64), torch.tensor(kappas, dtype=torch.float64)
    site, where = f"estimator, D=8 n={n} k={K}", f"random graphs, d=2, noise {level}"
    series = series_of(site, SQUARED, x, y, ("kappa", SQUARED), slice=where, law=torch.ones_like(x))
    checks = tuple(
        Check(site, f"{SQUARED}, kappa {kappa}", over_repeats(y[:, i], "estimator", what=SAMPLES, n=n), None, where)
        for i, kappa in enumerate(kappas)
    )
    return Outcome(checks, (series,))
