"""Measures against values known by mathematics, at generic points.

A sampled value must lie within five standard errors of the truth: its own error bar where that is calibrated (see
test_calibration.py), a derived one where the comment says so. With Student's t of 31 degrees of freedom or more a
correct measure fails such a line once in 50,000. ``within`` also asks that the error bar is small, for a wide bar would
agree with anything. Where a method has a known bias of finite neighbourhoods it stands beside the number.
"""

import math

import numpy as np
import oracles
import pytest
import torch
from scipy import stats
from scipy.special import iv

import anisoscope as an
from anisoscope.measures.curvature import fit_quadratic
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.stats.moments import Moments
from anisoscope.theory import manifolds

SIGMAS = 5


def within(estimate, truth, resolution, bias=0.0):
    """``truth`` lies in reach of the estimate, whose error bar is below ``resolution`` (relative to the truth)."""
    assert estimate.stderr is not None, estimate
    assert 0 < estimate.stderr <= resolution * abs(truth), estimate
    assert abs(estimate.value - truth) <= SIGMAS * estimate.stderr + bias, (estimate, truth)


def rotation(rng, width, columns=None):
    q, r = np.linalg.qr(rng.standard_normal((width, columns or width)))
    return q * np.sign(np.diag(r))


# --- Directions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "concentration"), [(2, 1.5), (3, 0.7), (12, 9.0), (50, 20.0)])
@pytest.mark.parametrize("sampler", ["anisoscope", "scipy"])
def test_mean_cosine_of_von_mises_fisher(sampler, width, concentration, seed):
    """The mean vector has length A = I_{d/2}(k) / I_{d/2-1}(k), and two independent vectors the expected cosine A^2."""
    if sampler == "scipy":
        axis = rotation(np.random.default_rng(seed), width)[0]
        rows = stats.vonmises_fisher(axis, concentration).rvs(4000, random_state=seed)
    else:
        rows = manifolds.von_mises_fisher(4000, width, concentration, seed=seed)
    truth = (iv(width / 2, concentration) / iv(width / 2 - 1, concentration)) ** 2
    lengths = np.random.default_rng(seed).lognormal(size=(4000, 1))
    within(an.mean_cosine(np.asarray(rows) * lengths), truth, 0.1)
    assert manifolds.vmf_mean_cosine(width, concentration) == pytest.approx(truth, rel=1e-12)


def test_mean_cosine_in_three_dimensions_is_elementary(seed):
    """A = coth k - 1/k."""
    k = 2.5
    within(an.mean_cosine(manifolds.von_mises_fisher(8000, 3, k, seed=seed)), (1 / math.tanh(k) - 1 / k) ** 2, 0.05)


def test_mean_cosine_without_a_preferred_direction_is_zero(seed):
    """sd of the mean cosine of n uniform vectors: pairs are uncorrelated with variance 1/d, so sqrt(2/d)/n.

    For d = 400 that is 0.07/n: enough to see the pairs i = j, which would add 1/n.
    """
    n, d = 500, 400
    got = an.mean_cosine(np.random.default_rng(seed).standard_normal((n, d)))
    assert abs(got.value) < SIGMAS * math.sqrt(2 / d) / n


# --- Spectra ---------------------------------------------------------------------------------------------------------

LAMBDA = np.array([7, 3, 2, 1.2, 1, 0.5, 0.3])
TOTAL, SIGMA = LAMBDA.sum(), np.sqrt(LAMBDA)
RATIO = TOTAL**2 / (LAMBDA**2).sum()


def entropy_rank(weights):
    p = weights / weights.sum()
    return math.exp(-(p * np.log(p)).sum())


SPECTRAL = {
    "spectral_ratio": LAMBDA[0] / TOTAL,
    "spectral_ratio_l1": SIGMA[0] / SIGMA.sum(),
    "stable_rank": TOTAL / LAMBDA[0],
    "effective_rank": entropy_rank(SIGMA),
    "effective_rank_lambda": entropy_rank(LAMBDA),
    "participation_ratio": RATIO,
    "isoscore": (RATIO - 1) / (len(LAMBDA) - 1),
}


def spectral_rows(law, seed, n=20_000):
    """Rows of covariance diag(LAMBDA), turned, off the origin, of a law with light or heavier tails."""
    rng = np.random.default_rng(seed)
    if law == "gaussian":
        rows = manifolds.gaussian(n, LAMBDA.tolist(), seed=seed).numpy()
    else:
        rows = rng.laplace(size=(n, len(LAMBDA))) / math.sqrt(2) * SIGMA @ rotation(rng, len(LAMBDA))
    return rows + rng.normal(0, 5, len(LAMBDA))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", SPECTRAL)
def test_chosen_spectrum(name, law, seed):
    within(getattr(an, name)(spectral_rows(law, seed)), SPECTRAL[name], 0.02)


@pytest.mark.parametrize("zeta", [0.1, 0.6])
def test_isoscore_star_of_a_chosen_spectrum(zeta, seed):
    """The eigenvalues of (1-z) S + z (tr S / D) I are (1-z) lambda + z mean(lambda)."""
    mixed = (1 - zeta) * LAMBDA + zeta * LAMBDA.mean()
    truth = (mixed.sum() ** 2 / (mixed**2).sum() - 1) / (len(LAMBDA) - 1)
    within(an.isoscore_star(spectral_rows("gaussian", seed), zeta=zeta), truth, 0.02)


def test_isoscore_star_with_a_reference(seed):
    """Along common axes the eigenvalues simply mix."""
    rng = np.random.default_rng(seed)
    other = LAMBDA[::-1].copy()
    turn = rotation(rng, len(LAMBDA))
    rows = rng.standard_normal((20_000, len(LAMBDA))) * SIGMA @ turn
    corners = np.concatenate([np.diag(np.sqrt(other)), -np.diag(np.sqrt(other))])  # scatter exactly 2 diag(other)
    reference = Moments.of(torch.from_numpy(corners @ turn * math.sqrt((2 * len(other) - 1) / 2)))
    mixed = 0.7 * LAMBDA + 0.3 * other
    truth = (mixed.sum() ** 2 / (mixed**2).sum() - 1) / (len(LAMBDA) - 1)
    within(an.isoscore_star(rows, reference=reference, zeta=0.3), truth, 0.02)


@pytest.mark.parametrize(("n", "d"), [(60, 40), (200, 20), (400, 100)])
def test_white_data_have_a_participation_ratio_of_d_once_corrected(n, d, seed):
    """E (tr S)^2 = d^2 + 2d/m and E |S|^2 = d + d (d+1)/m for m = n - 1: the plain formula reads their ratio, not d.

    Its inverse times d, less 1, is John's statistic, whose sd is 2/m (Ledoit and Wolf 2002).
    """
    rows, m = np.random.default_rng(seed).standard_normal((n, d)) + 3, n - 1
    within(an.participation_ratio(rows), d, 6 / n)
    plugin = an.participation_ratio(rows, bias="plugin").value
    expected = (d + 2 / m) / (1 + (d + 1) / m)
    sd = 2 / m * expected**2 / d
    assert abs(plugin - expected) < SIGMAS * sd
    assert abs(plugin - d) > SIGMAS * sd


def test_partition_isotropy_of_a_gaussian(seed):
    """Z(c)/n estimates E exp(c.x) = exp(c^T S c / 2); log Z has variance (exp(lambda) - 1)/n about it."""
    n, variances = 40_000, np.array([1.0, 0.6, 0.3, 0.1])
    got = an.partition_isotropy(manifolds.gaussian(n, variances.tolist(), seed=seed))
    error = math.sqrt((math.exp(1.0) - 1) / n) + math.sqrt((math.exp(0.1) - 1) / n)
    assert abs(math.log(got.value) - (0.1 - 1.0) / 2) < SIGMAS * error


# --- Dimension -------------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "facco": an.two_nn,
    "ml": lambda rows: an.two_nn(rows, variant="ml"),
    "shape_of_learning": lambda rows: an.two_nn(rows, variant="shape_of_learning"),
    "mle": lambda rows: an.mle(rows, k=10),
    "gride": lambda rows: an.gride(rows, scales=(1, 2, 4)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("d", [2, 3])
def test_dimension_of_flat_tori(name, d, seed):
    """No boundary and no intrinsic curvature. Chords bend distances by r^2/16 of d at the largest radius used, 0.6.

    That is 2 % at d = 3 for ten neighbours and far less else: allowed for in full.
    """
    got = ESTIMATORS[name](manifolds.flat_torus(4000, d, width=12, seed=seed))
    within(got, d, 0.08, bias=0.02 * d if name == "mle" else 0.005 * d)
    for part in got.parts.values():
        if part.stderr is not None:
            within(part, d, 0.08, bias=0.02 * d)


def test_log_ratios_are_exponential(seed):
    """log(r2/r1) ~ Exp(d). Neighbours are shared between rows, so only far-apart rows are independent.

    Rows on a fixed grid, twenty steps around each circle, see disjoint discs among 12,000 uniform ones (the second
    neighbour stands at 0.05, grid rows 0.31 apart): 400 independent draws. p below 1e-6 is the five-sigma line.
    """
    angle = 2 * np.pi * np.arange(20) / 20
    grid = np.stack(np.meshgrid(angle, angle), axis=-1).reshape(-1, 2)
    grid = torch.from_numpy(np.concatenate([np.cos(grid), np.sin(grid)], axis=1))
    rows = torch.cat([grid, manifolds.flat_torus(12_000, 2, seed=seed)])
    r = nearest_neighbors(rows, 2).distances[:400]
    assert r[:, 1].max() < 0.3 / 2
    assert stats.kstest(2 * (r[:, 1] / r[:, 0]).log().numpy(), "expon").pvalue > 1e-6


def test_mean_pooling_reads_high_as_documented(seed):
    """E[1/m] for a mean m of k - 1 exponentials is (k-1)/(k-2) of 1/E[m]."""
    rows = manifolds.flat_torus(4000, 2, seed=seed)
    pooled, mean = an.mle(rows, k=5), an.mle(rows, k=5, pooling="mean")
    ratio = mean.value / pooled.value
    assert abs(ratio - 4 / 3) < SIGMAS * math.hypot(mean.stderr / mean.value, pooled.stderr / pooled.value) * 4 / 3


def test_dimension_reads_low_above_ten(seed):
    """The documented curve for balls at 4,000 rows: ever further below the truth from ten on; 50 reads about 32."""
    read = [an.two_nn(manifolds.ball(4000, d, seed=seed)) for d in (2, 5, 10, 20, 50)]
    values = [estimate.value for estimate in read]
    assert values == sorted(values)
    within(read[0], 2, 0.05, bias=0.02)
    within(read[1], 5, 0.05, bias=0.25)  # the boundary is already within reach of a twentieth
    assert all(value < d for value, d in zip(values[2:], (10, 20, 50), strict=True))
    assert 25 < values[-1] < 40


@pytest.mark.parametrize("rule", ["fukunaga_olsen", "explained"])
def test_local_pca_counts_the_axes_of_a_surface(rule, seed):
    """64 of 6,000 rows reach to 0.37: the normal variance is r^2/16 = 1 % of the tangent one, below both thresholds."""
    rows = manifolds.flat_torus(6000, 2, width=9, seed=seed)
    assert an.local_pca_dimension(rows, rule=rule).value == 2


def test_local_participation_of_a_surface(seed):
    """Variances (1, 1, e, e) with e = r^2/16 of a disc of radius r on the flat torus have a ratio of 2 + 4e - ..."""
    rows = manifolds.flat_torus(6000, 2, width=9, seed=seed)
    e = 64 / 6000 * (2 * np.pi) ** 2 / np.pi / 16
    within(an.local_pca_dimension(rows, rule="participation"), (2 + 2 * e) ** 2 / (2 + 2 * e * e), 0.02, bias=e / 2)


# --- Curvature -------------------------------------------------------------------------------------------------------


def curve_bias(got, radius_of_curvature=1.0):
    """The documented bias, of relative order (radius/R)^2: the whole of it is allowed for."""
    return got.value * (got.parts["radius"].value / radius_of_curvature) ** 2


@pytest.mark.parametrize("R", [0.3, 20.0])
def test_circle(R, seed):
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * rng.random(3000)
    rows = R * np.stack([np.cos(angle), np.sin(angle)], axis=1) @ rotation(rng, 5, 2).T + rng.normal(0, R, 5)
    got = an.curvature(rows)
    assert got.parts["dimension"].value == 1
    assert got.parts["radius"].value < 0.1 * R
    within(got, 1 / R, 0.01, curve_bias(got, R))
    within(got.parts["mean curvature"], 1 / R, 0.01, curve_bias(got, R))


def test_bias_on_a_circle_is_the_derived_one():
    """Even steps, no sampling noise: t^4/8 under t^2/2 adds (3/14) a^2 for tangent reach a; doubled a, four times."""
    errors = []
    for k in (32, 64):
        angle = 2 * np.pi * np.arange(2000) / 2000
        got = an.curvature(np.stack([np.cos(angle), np.sin(angle)], axis=1), dimension=1, k=k)
        errors.append(got.value - 1)
        reach = math.sin(got.parts["radius"].value)
        assert errors[-1] == pytest.approx(3 / 14 * reach**2, rel=0.15)  # sums over 32 points, not integrals
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.1)


def test_helix(seed):
    """Curvature a / (a^2 + b^2), not the 1/a of its shadow."""
    a, b = 1.0, 0.5
    rng = np.random.default_rng(seed)
    t = 25 * rng.random(8000)
    rows = np.stack([a * np.cos(t), a * np.sin(t), b * t], axis=1) @ rotation(rng, 6, 3).T
    got = an.curvature(rows, dimension=1)
    kappa = a / (a**2 + b**2)
    within(got, kappa, 0.01, curve_bias(got, 1 / kappa))
    assert abs(1 / a - kappa) > 10 * curve_bias(got)


@pytest.mark.parametrize(("d", "R"), [(2, 1.0), (2, 7.0), (3, 0.5)])
def test_spheres(d, R, seed):
    """|II| = sqrt(d)/R, mean curvature 1/R."""
    rows = manifolds.sphere(20_000, d, radius=R, width=8, seed=seed)
    got = an.curvature(rows, dimension=d)
    assert got.parts["radius"].value < 0.3 * R
    within(got, math.sqrt(d) / R, 0.01, curve_bias(got, R))
    within(got.parts["mean curvature"], 1 / R, 0.01, curve_bias(got, R))


def test_flat_torus_bends_in_space(seed):
    """Each unit circle has a normal of its own: II = diag(1, 0), diag(0, 1); |II| = sqrt 2, |tr II|/2 = 1/sqrt 2."""
    got = an.curvature(manifolds.flat_torus(20_000, 2, width=10, seed=seed))
    assert got.parts["dimension"].value == 2
    within(got, math.sqrt(2), 0.01, curve_bias(got))
    within(got.parts["mean curvature"], math.sqrt(0.5), 0.01, curve_bias(got))


def test_saddle(seed):
    """z = kappa (x^2 - y^2)/2: |II| = sqrt 2 kappa and no mean curvature at the origin.

    Over a disc of reach a both change by less than 3 (kappa a)^2 = 0.5 % of kappa.
    """
    kappa, a = 2.0, 0.02
    rng = np.random.default_rng(seed)
    length, angle = a * np.sqrt(rng.random(4000)), 2 * np.pi * rng.random(4000)
    x, y = length * np.cos(angle), length * np.sin(angle)
    rows = np.stack([x, y, kappa * (x**2 - y**2) / 2], axis=1) @ rotation(rng, 5, 3).T
    got = an.curvature(rows, dimension=2)
    bias = 3 * (kappa * a) ** 2
    within(got, math.sqrt(2) * kappa, 0.01, bias * kappa)
    assert got.parts["mean curvature"].value < bias * kappa


def plane(seed, noise, n=6000, width=6):
    rng = np.random.default_rng(seed)
    return rng.random((n, 2)) @ rotation(rng, width, 2).T + noise * rng.standard_normal((n, width))


@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_a_plane_is_not_told_apart_from_zero(noise):
    """The line is drawn at two standard errors, so that one draw in 44 crosses it; five of 24 would be a bias."""
    found = [an.curvature(plane(seed, noise, n=3000), dimension=2) for seed in range(24)]
    silent = [any("|II| is not told apart from zero" in note for note in got.notes) for got in found]
    assert sum(silent) >= 20
    assert all(got.stderr is None for got, quiet in zip(found, silent, strict=True) if quiet)
    for got, quiet in zip(found, silent, strict=True):
        assert quiet or got.value <= 2 * SIGMAS * got.stderr  # mean of squares <= 5 of its errors, 2 value stderr each


def test_noise_does_not_pass_for_curvature(seed):
    """The plain squares of a quadratic fit read 6 on a noisy plane; with their noise taken off, next to nothing."""
    rows = plane(seed, 0.006)
    got = an.curvature(rows, dimension=2, anchors=30)
    anchors = an.local_tangents(rows, dimension=2, anchors=6).neighborhoods.anchors.tolist()
    naive = math.sqrt(np.mean([np.sum(oracles.second_fundamental_form(rows, i, 64, 2) ** 2) for i in anchors]))
    assert naive > 3
    assert got.value < naive / 2


def test_float32_rows_carry_curvature_as_well(seed):
    """A sagitta of 5e-5, a thousand times what float32 rounds away: what is lost must not exceed the error bar."""
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * rng.random(20_000)
    rows = (np.stack([np.cos(angle), np.sin(angle)], axis=1) @ rotation(rng, 64, 2).T).astype(np.float32)
    got = an.curvature(rows, dimension=1)
    within(got, 1.0, 0.01, curve_bias(got))
    visible = 3 / 20 * got.parts["radius"].value ** 2
    within(
        got.parts["visible curvature"], visible, 0.05, bias=20 / 9 / 64 * visible
    )  # the mean of 64 rows tilts frames


def test_noise_does_not_bias_a_sphere(seed):
    """Normal noise of a tenth of the sagitta: the value moves by its error bar and the bias of the radius only."""
    rng = np.random.default_rng(seed)
    rows = manifolds.sphere(20_000, 2, seed=seed).numpy()
    got = an.curvature(rows * (1 + 5e-4 * rng.standard_normal((len(rows), 1))), dimension=2)
    within(got, math.sqrt(2), 0.02, curve_bias(got))


@pytest.mark.parametrize("R", [0.5, 4.0])
def test_visible_curvature_law(R, seed):
    """Uniform on the arc |u| < a about the anchor, in its tangent: E|x_N|^2 / E|x_T|^2 = 3 a^2 / (20 R^2), small a/R.

    (kappa^2/4) E u^4 over E u^2, with E u^4 = a^4/5, E u^2 = a^2/3; the next term is below (a/R)^2 of it. The error of
    the ratio comes from the spread of its own terms.
    """
    a, k = 0.1 * R, 4000
    angle = np.random.default_rng(seed).uniform(-a / R, a / R, k)
    around = np.concatenate([[0.0], angle])
    coordinates = R * np.stack([np.sin(around), 1 - np.cos(around)], axis=1)
    fit = fit_quadratic(torch.from_numpy(coordinates)[None], 1)
    truth = 3 * a**2 / (20 * R**2)
    tangent, normal = np.sin(angle) ** 2, (1 - np.cos(angle)) ** 2
    error = np.std(normal - truth * tangent) / math.sqrt(k) / tangent.mean()
    got = float(fit.normal2 / fit.tangent2)
    assert abs(got - truth) < SIGMAS * error + truth * (a / R) ** 2
    assert error < 0.05 * truth


# --- Paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 50])
@pytest.mark.parametrize("law", ["normal", "t"])
def test_turning_angle_nulls(law, width, seed):
    """Independent points: the angles of a triangle sum to 180, so each inner one has mean 60, under any law.

    A walk with symmetric steps turns by 90 in the mean, since b and -b are equally likely.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((8000, width)) if law == "normal" else rng.standard_t(3, (8000, width))
    points, walk = an.turning_angle(rows * np.linspace(1, 3, width) + 5), an.turning_angle(rows.cumsum(axis=0))
    within(points, 120, 0.01)
    within(walk, 90, 0.02)
    assert (points.parts["independent points"].value, points.parts["random walk"].value) == (120, 90)


@pytest.mark.parametrize("step", [0.01, 7.0, 90.0, 179.0])
def test_a_circle_in_equal_steps_turns_by_the_step(step, seed):
    """Rounding: coordinates are good to 1e-16, steps of 1e-4 to 1e-12, and angles of 1e-4 to 1e-8 of themselves."""
    rng = np.random.default_rng(seed)
    angle = np.deg2rad(step) * np.arange(300)
    rows = np.stack([np.cos(angle), np.sin(angle)], axis=1) @ rotation(rng, 7, 2).T
    assert an.turning_angle(rows).value == pytest.approx(step, rel=1e-7)


def test_a_straight_line_does_not_turn(seed):
    """However uneven the steps; the way back turns by 180. 1e-6 degrees: steps of 1e-2 and more of size-10 numbers."""
    rng = np.random.default_rng(seed)
    along = (rng.random(200) + 0.01).cumsum()[:, None] * rotation(rng, 5)[:1]
    assert an.turning_angle(along).value < 1e-6
    there_and_back = np.concatenate([along[:3], along[1:2]])
    assert an.turning_angle(there_and_back).value == pytest.approx(90, abs=1e-6)


# --- Linearity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("map_", ["linear", "orthogonal"])
def test_turned_and_scaled_copies_are_linear(map_, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((300, 6)) * [5, 3, 1, 1, 0.3, 0.1] + 2
    assert an.linearity(X, 7 * X @ rotation(rng, 6) - 3, map=map_).value == pytest.approx(1, abs=1e-12)
    assert an.linearity(X, X + 0.2 * X @ rotation(rng, 6), map="linear", target="update").value == pytest.approx(
        1, abs=1e-12
    )


def test_a_shear_is_linear_and_not_orthogonal(seed):
    """White X and Y = X diag(s): nuclear norm sum s, sizes D and sum s^2, so (sum s)^2 / (D sum s^2)."""
    X, s = np.random.default_rng(seed).standard_normal((20_000, 4)), np.array([4, 2, 1, 0.5])
    assert an.linearity(X, X * s).value == pytest.approx(1, abs=1e-12)
    within(an.linearity(X, X * s, map="orthogonal"), s.sum() ** 2 / (4 * (s**2).sum()), 0.01)


@pytest.mark.parametrize("n", [300, 20_000])
def test_planted_r_squared(n, seed):
    """Y = X A + e: R^2 = tr(A^T S A) / (tr(A^T S A) + tr Cov e); rows and columns unequal, so no transpose agrees."""
    rng = np.random.default_rng(seed)
    A, noise = np.random.default_rng(5).standard_normal((6, 3)), np.array([2.0, 1.0, 0.5])
    variances = np.array([4, 2, 1, 1, 0.5, 0.1])
    X = rng.standard_normal((n, 6)) * np.sqrt(variances)
    Y = X @ A + rng.standard_normal((n, 3)) * noise + 1
    signal = (variances[:, None] * A**2).sum()
    joined = np.concatenate([Y, np.zeros((n, 3))], axis=1)  # of equal width; columns of zeros explain themselves
    within(an.linearity(X, joined), signal / (signal + (noise**2).sum()), 0.1)


def test_planted_rotation(seed):
    """White X, Y = 3 (X Q + s e): nuclear norm 3D, sizes D and 9 D (1 + s^2), so 1 / (1 + s^2)."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((20_000, 4))
    Y = 3 * (X @ rotation(rng, 4) + 0.8 * rng.standard_normal(X.shape))
    within(an.linearity(X, Y, map="orthogonal"), 1 / (1 + 0.8**2), 0.02)


def test_adjusted_linearity_of_independent_layers_is_zero(seed):
    """Plain R^2 of each column is Beta(D/2, (n-1-D)/2), mean D/(n-1); D columns of equal variance average it."""
    n, d = 400, 30
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((n, d)), rng.standard_normal((n, d))
    mean = d / (n - 1)
    sd = math.sqrt(2 * mean * (1 - mean) / (n + 1) / d)
    plugin, adjusted = an.linearity(X, Y, bias="plugin").value, an.linearity(X, Y).value
    assert abs(plugin - mean) < SIGMAS * sd
    assert plugin > 0.5 * mean > 5 * sd
    assert abs(adjusted) < SIGMAS * sd * (n - 1) / (n - 1 - d)


# --- The published procedure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_shape_of_learning_with_copies(share, seed):
    """On a torus of dimension 2, step by step as published; copies push F up and the reading with it."""
    rng = np.random.default_rng(seed)
    rows = manifolds.flat_torus(400, 2, width=5, seed=seed).numpy()
    copies = int(share * 400)
    rows[:copies] = rows[rng.integers(copies, 400, copies)]
    rows = rows[rng.permutation(400)]
    kept = an.two_nn(rows, variant="shape_of_learning", duplicates="keep")
    assert kept.value == pytest.approx(oracles.two_nn_shape_of_learning(rows), rel=1e-9)
    dropped = an.two_nn(rows, variant="shape_of_learning")
    assert dropped.n == 400 - copies
    assert dropped.value == kept.value if share == 0 else kept.value > 1.5 * dropped.value
