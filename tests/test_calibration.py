"""Error bars mean what they say: a 95 % interval covers its target in 93 to 97 % of repeated draws.

Each case draws fresh data from numbered seeds, so a run is reproducible. Coverage over R draws has a sampling error of
sqrt(.95 * .05 / R); the band is widened by two of these, and no more. Errors in units of their bars tell more with as
many draws, so that those of neighbours, which are dear, need fewer: normal errors are covered in 97 to 93 % where their
root mean square is 0.903 to 1.082, and that band is widened by two of its sampling errors, sqrt(1 / 2R).

The target is the population value where the estimator is consistent for it at this size, and otherwise
(``target=None``: neighbourhoods of finite size) the estimator's own mean, since an error bar speaks of spread and the
bias is documented apart.
"""

import functools
import math

import jaxtyping
import numpy as np
import pytest
import torch

import anisoscope as an

pytestmark = pytest.mark.calibration

LAMBDA = np.array([10, 3, 2, 1, 1, 0.5, 0.3, 0.2])
TOTAL = LAMBDA.sum()
SIGMA = np.sqrt(LAMBDA)
RATIO = TOTAL**2 / (LAMBDA**2).sum()
ZETA = 0.3
MAP = np.random.default_rng(5).standard_normal((4, 3))


def entropy_rank(weights):
    p = weights / weights.sum()
    return math.exp(-(p * np.log(p)).sum())


def isoscore_of(variances):
    return (variances.sum() ** 2 / (variances**2).sum() - 1) / (len(variances) - 1)


def normal(n, variances=LAMBDA, mean=0.0):
    return lambda rng: rng.standard_normal((n, len(variances))) * np.sqrt(variances) + mean


def heavy(n, variances=LAMBDA):
    return lambda rng: rng.standard_t(10, (n, len(variances))) / math.sqrt(10 / 8) * np.sqrt(variances)


def ordered(n, run):
    """Each independent row stands ``run`` times in a row: the plain standard error would be too small by sqrt(run)."""
    return lambda rng: np.repeat(rng.standard_normal((n // run, len(LAMBDA))) * SIGMA, run, axis=0)


def torus(n, d):
    def draw(rng):
        angle = rng.random((n, d)) * 2 * np.pi
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)

    return draw


def thick_ball(n, d, width):
    def draw(rng):
        rows = rng.standard_normal((n, d))
        rows *= rng.random((n, 1)) ** (1 / d) / np.linalg.norm(rows, axis=1, keepdims=True)
        return np.c_[rows, np.zeros((n, width - d))] + 0.02 * rng.standard_normal((n, width))

    return draw


def noisy_sphere(n):
    def draw(rng):
        rows = rng.standard_normal((n, 3))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return np.c_[rows, np.zeros((n, 3))] + 0.005 * rng.standard_normal((n, 6))

    return draw


def layers(rng):
    x = rng.standard_normal((400, 4))
    return x, x @ MAP + 2 * rng.standard_normal((400, 3))


def expected_cosine(mean, draws=2_000_000):
    rows = np.random.default_rng(99).standard_normal((draws, len(mean))) + mean
    middle = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)
    return middle @ middle


SHIFT = np.r_[2.0, np.zeros(9)]
LINEAR = (MAP**2).sum() / ((MAP**2).sum() + 3 * 4.0)
WHITE = np.ones(20)

# name: (draw, measure, target, number of draws)
SMOOTH = {
    "spectral_ratio": (normal(500), an.spectral_ratio, LAMBDA[0] / TOTAL, 1500),
    "spectral_ratio, heavy tails": (heavy(1000), an.spectral_ratio, LAMBDA[0] / TOTAL, 1500),
    "spectral_ratio, rows in runs of 8": (ordered(8000, 8), an.spectral_ratio, LAMBDA[0] / TOTAL, 1000),
    "stable_rank": (normal(1000), an.stable_rank, TOTAL / LAMBDA[0], 1500),
    "spectral_ratio_l1": (normal(4000), an.spectral_ratio_l1, SIGMA[0] / SIGMA.sum(), 1000),
    "effective_rank": (normal(8000), an.effective_rank, entropy_rank(SIGMA), 1000),
    "effective_rank_lambda": (normal(4000), an.effective_rank_lambda, entropy_rank(LAMBDA), 1000),
    "participation_ratio": (normal(300), an.participation_ratio, RATIO, 1500),
    "participation_ratio, heavy tails": (heavy(1000), an.participation_ratio, RATIO, 1500),
    "participation_ratio, white": (normal(200, WHITE), an.participation_ratio, 20.0, 1500),
    "isoscore": (normal(500), an.isoscore, isoscore_of(LAMBDA), 1500),
    "isoscore_star": (
        normal(500),
        lambda x: an.isoscore_star(x, zeta=ZETA),
        isoscore_of((1 - ZETA) * LAMBDA + ZETA * TOTAL / 8),
        1500,
    ),
    "isoscore_star, white": (normal(200, WHITE), lambda x: an.isoscore_star(x, zeta=ZETA), 1.0, 1500),
    "mean_cosine": (normal(300, np.ones(10), SHIFT), an.mean_cosine, expected_cosine(SHIFT), 1500),
    "mean_cosine, isotropic": (normal(200, np.ones(64)), an.mean_cosine, 0.0, 1500),
    "turning_angle, independent points": (normal(2000, np.ones(5)), an.turning_angle, 120.0, 1000),
    "turning_angle, walk": (lambda rng: rng.standard_normal((2000, 5)).cumsum(0), an.turning_angle, 90.0, 1000),
    "linearity": (layers, lambda xy: an.linearity(*xy), LINEAR, 1000),
    "linearity, orthogonal": (layers, lambda xy: an.linearity(*xy, map="orthogonal"), None, 1000),
}
NEIGHBORS = {
    "two_nn ml": (torus(800, 2), lambda x: an.two_nn(x, variant="ml"), 2.0, 400),
    "two_nn facco": (torus(800, 2), an.two_nn, 2.0, 400),
    "two_nn shape_of_learning": (torus(800, 2), lambda x: an.two_nn(x, variant="shape_of_learning"), None, 300),
    "two_nn facco, d=5": (torus(1000, 5), an.two_nn, None, 300),
    "mle": (torus(1000, 2), lambda x: an.mle(x, k=10), None, 300),
    "gride": (torus(1000, 2), lambda x: an.gride(x, scales=[2]), 2.0, 300),
    "gride, n=8": (torus(1200, 2), lambda x: an.gride(x, scales=[8]), None, 300),
    "local_pca_dimension": (
        thick_ball(2000, 4, 20),
        lambda x: an.local_pca_dimension(x, k=40, rule="participation"),
        None,
        300,
    ),
    "local_isotropy": (thick_ball(2000, 4, 20), lambda x: an.local_isotropy(x, k=40, cells=4), None, 300),
}
CURVED = ("", "mean curvature", "visible curvature")


@pytest.fixture(autouse=True)
def small_calls():
    """These arrays are small: a second thread costs more than it gives, and shapes are checked in other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.set_num_threads(threads)


def check_bars(name, found, target):
    assert all(e.stderr is not None for e in found), f"no error bar in {sum(e.stderr is None for e in found)} draws"
    values, bounds, draws = np.array([e.value for e in found]), np.array([e.interval(0.95) for e in found]), len(found)
    if target is None:
        target = values.mean()
    covered = ((bounds[:, 0] <= target) & (target <= bounds[:, 1])).mean()
    size = math.sqrt(np.square((values - target) / (np.diff(bounds)[:, 0] / 2 / 1.96)).mean())
    print(f"\n{name}: coverage {covered:.3f}, errors of {size:.3f} bars over {draws} draws")
    slack, wide = 2 * math.sqrt(0.95 * 0.05 / draws), 2 * math.sqrt(1 / (2 * draws))
    assert 0.93 - slack <= covered <= 0.97 + slack
    assert 0.903 - wide <= size <= 1.082 + wide


@pytest.mark.parametrize("name", [*SMOOTH, *NEIGHBORS])
def test_intervals_cover(name):
    draw, measure, target, draws = {**SMOOTH, **NEIGHBORS}[name]
    check_bars(name, [measure(draw(np.random.default_rng(seed))) for seed in range(draws)], target)


@functools.cache
def curvatures():
    draw = noisy_sphere(3000)
    return [an.curvature(draw(np.random.default_rng(seed)), dimension=2) for seed in range(300)]


@pytest.mark.parametrize("part", CURVED)
def test_intervals_of_curvature_cover(part):
    check_bars(part or "curvature", [one.parts[part] if part else one for one in curvatures()], None)


def test_the_textbook_error_of_two_nn_would_not():
    """d / sqrt(n) takes the ratios as independent. They share neighbours, and it covers far less than it claims."""
    draw, hits, draws = torus(800, 2), 0, 500
    for seed in range(draws):
        value = an.two_nn(draw(np.random.default_rng(seed)), variant="ml").value
        hits += abs(value - 2.0) <= 1.96 * value / math.sqrt(800)
    assert hits / draws < 0.90


def test_a_plain_standard_error_would_not_cover_ordered_rows():
    """Blocks of consecutive rows see the dependence that a shuffled sample hides."""
    draw, truth, hits, draws = ordered(8000, 8), LAMBDA[0] / TOTAL, 0, 300
    for seed in range(draws):
        rows = draw(np.random.default_rng(seed))
        shuffled = an.spectral_ratio(rows[np.random.default_rng(seed).permutation(len(rows))])
        low, high = shuffled.interval()
        hits += low <= truth <= high
    assert hits / draws < 0.70


def test_biased_settings_get_no_error_bar():
    """White data: the leading eigenvalue is all bias. A bar around it would never cover."""
    found = an.spectral_ratio(np.random.default_rng(0).standard_normal((300, 50)))
    assert found.stderr is None
    assert "bias" in found.notes[0]
