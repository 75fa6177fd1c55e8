"""The energy tests mean what they say: exact laws, uniform p-values, power as computed, intervals that cover.

Seeds are numbered, so a run is reproducible. Levels of goodness-of-fit tests are 1e-4: a true law fails one run in
ten thousand.
"""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from scipy import stats

from anisoscope.tangent.controls import control_bases
from anisoscope.tangent.crossed import crossed_tests
from anisoscope.tangent.energy import Gradients, energy_share, energy_test, shares
from anisoscope.tangent.nulls import permuted_signal_null, reader_share
from anisoscope.tangent.units import Halves

pytestmark = pytest.mark.calibration
LEVEL = 1e-4


@pytest.fixture(autouse=True)
def small_calls():
    """Thousands of them: shapes are checked in other tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def first_axes(width, rank):
    return torch.eye(width, dtype=torch.float64)[:, :rank]


def uniform_on_steps(p_values, draws):
    """Chi-square p of counts over the values 1/(B+1) .. 1 that a p-value with B draws can take."""
    steps = np.rint(np.array(p_values) * (draws + 1)).astype(int)
    assert steps.min() >= 1 and steps.max() <= draws + 1
    return stats.chisquare(np.bincount(steps, minlength=draws + 2)[1:]).pvalue


def test_shares_of_gaussian_rows_are_beta():
    width, rank = 24, 5
    rows, basis = normal(0, 3000, width), torch.linalg.qr(normal(1, width, rank)).Q
    each = np.array([energy_share(row[None], basis).value for row in rows[:200]])
    bulk = (rows @ basis).square().sum(dim=1) / rows.square().sum(dim=1)
    assert each == pytest.approx(bulk[:200].numpy(), rel=1e-9)
    law = stats.beta(rank / 2, (width - rank) / 2)
    assert stats.kstest(bulk.numpy(), law.cdf).pvalue > LEVEL
    assert stats.kstest(bulk.numpy(), stats.beta(rank, width - rank).cdf).pvalue < LEVEL, "the test can fail"


def test_shares_of_controls_are_beta():
    """One gradient row, many controls: Beta(K/2, (D-K)/2), and (1-e) Beta(K/2, (D-2K)/2) for normal ones."""
    width, rank, draws = 20, 4, 3000
    row, basis = normal(3, 1, width), torch.linalg.qr(normal(4, width, rank)).Q
    test = energy_test(row, basis, draws=draws, seed=5)
    assert stats.kstest(test.random_shares.numpy(), stats.beta(2, 8).cdf).pvalue > LEVEL
    left = test.control_shares.numpy() / (1 - test.share.value)
    assert stats.kstest(left, stats.beta(2, 6).cdf).pvalue > LEVEL
    bases = control_bases(basis, "normal", draws, seed=6)
    assert stats.kstest(shares(Gradients.of(row), bases) / (1 - test.share.value), stats.beta(2, 6).cdf).pvalue > LEVEL


def test_p_values_of_isotropic_gradients_are_uniform():
    """... against random bases. Normal controls are fewer than their count says: the literal p is too often small."""
    draws, repeats, width, rank = 19, 1500, 16, 4
    basis, exact, literal = first_axes(width, rank), [], []
    for seed in range(repeats):
        test = energy_test(normal(seed, 12, width), basis, draws=draws, seed=seed)
        exact.append(test.p)
        literal.append(test.p_controls)
    assert uniform_on_steps(exact, draws) > LEVEL
    assert uniform_on_steps(literal, draws) < LEVEL
    assert np.mean(np.array(literal) <= 0.05) > 0.08, "rejects far more than 5 % at K/D = 1/4"


def test_data_drawn_with_the_same_seed_as_the_controls_are_not_the_controls():
    """torch.randn of seed 7 and controls of seed 7 must not be made of the same numbers."""
    width, rank, found = 16, 4, []
    for seed in range(300):
        rows = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
        found.append(energy_test(rows, first_axes(width, rank).float(), draws=19, seed=seed).p)
    assert uniform_on_steps(found, 19) > LEVEL


def test_p_values_hold_for_anisotropic_gradients_and_a_basis_that_knows_nothing():
    draws, repeats, width, rank = 19, 1000, 12, 3
    scale = torch.tensor([6.0, 3.0] + [1.0] * 10, dtype=torch.float64)
    found = []
    for seed in range(repeats):
        basis = torch.linalg.qr(normal(seed + 50_000, width, rank)).Q
        found.append(energy_test(normal(seed, 30, width) * scale, basis, draws=draws, seed=seed).p)
    assert uniform_on_steps(found, draws) > LEVEL


def test_p_values_of_two_halves_with_one_basis_are_uniform():
    """Two fits to one model are nearly one basis. Independent draws for the halves would call twice as many small."""
    draws, repeats, width, rank, found, apart = 19, 600, 12, 3, [], []
    scale, groups = torch.tensor([6.0, 3.0] + [1.0] * 10, dtype=torch.float64), torch.arange(60) // 5
    for seed in range(repeats):
        rows, halves = normal(seed, 60, width) * scale, Halves.of(groups, seed, "cpu")
        one, two = (torch.linalg.qr(normal(seed + at, width, rank)).Q for at in (50_000, 90_000))
        tests = crossed_tests(rows, halves, {"same": (one, one), "apart": (one, two)}, draws=draws, seed=seed)
        found.append(tests["same"][""].p)
        apart.append(tests["apart"][""].p)
    assert uniform_on_steps(found, draws) > LEVEL
    assert np.mean(np.array(apart) <= 0.05) < 0.05, "careful where the fits have nothing to do with each other"


@pytest.mark.parametrize("strength", [1.5, 3.0])
def test_power_is_that_of_the_noncentral_law(strength):
    """g = s q + noise: e/(1-e) (D-K)/K is noncentral F; given e each control beats it with a Beta tail, B times."""
    draws, repeats, width, rank = 39, 700, 20, 4
    basis, limit = first_axes(width, rank), 0.05
    signal = torch.zeros(width, dtype=torch.float64)
    signal[1] = strength
    hits = sum(
        energy_test(normal(seed, 1, width) + signal, basis, controls="random", draws=draws, seed=seed).p <= limit
        for seed in range(repeats)
    )
    law = stats.ncf(rank, width - rank, strength**2)
    f = law.ppf(np.linspace(0.0005, 0.9995, 1000))
    share = f * rank / (f * rank + width - rank)
    tail = stats.beta(rank / 2, (width - rank) / 2).sf(share)
    most = round(limit * (draws + 1)) - 1
    power = float(np.mean(stats.binom(draws, tail).cdf(most)))
    assert 0.1 < power < 0.95
    assert abs(hits / repeats - power) < 5 * math.sqrt(power * (1 - power) / repeats)


def share_of_spectrum(variances, rank):
    return variances[:rank].sum() / variances.sum()


def test_intervals_of_shares_cover():
    """Rows independent, of unequal energy: 95 % intervals cover the population share 93 to 97 % of the time."""
    variances = np.array([4.0, 2, 1, 1, 0.5, 0.5, 0.2, 0.1])
    truth, basis = share_of_spectrum(variances, 2), first_axes(8, 2)
    repeats = covered = 0
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((150, 8)) * np.sqrt(variances) * np.exp(0.3 * rng.standard_normal((150, 1)))
        low, high = energy_share(torch.from_numpy(rows), basis).interval(0.95)
        covered += low <= truth <= high
        repeats += 1
    assert 0.93 <= covered / repeats <= 0.97


def sequences(seed, count=60, length=12):
    """Each sequence leans its own way: tokens of one share most of their direction."""
    rng = np.random.default_rng(seed)
    lean = rng.standard_normal((count, 1, 8)) * np.sqrt([3.0, 2, 1, 1, 1, 1, 1, 1])
    rows = lean + 0.5 * rng.standard_normal((count, length, 8))
    return torch.from_numpy(rows.reshape(-1, 8)), torch.arange(count).repeat_interleave(length)


def test_dependent_tokens_are_covered_over_sequences_only():
    spread = np.array([3.0, 2, 1, 1, 1, 1, 1, 1]) + 0.25
    truth, basis = share_of_spectrum(spread, 2), first_axes(8, 2)
    grouped = naive = 0
    for seed in range(1500):
        rows, labels = sequences(seed)
        for found, right in ((energy_share(rows, basis, groups=labels), True), (energy_share(rows, basis), False)):
            low, high = found.interval(0.95)
            grouped += right and low <= truth <= high
            naive += (not right) and low <= truth <= high
    assert 0.93 <= grouped / 1500 <= 0.97
    assert naive / 1500 < 0.6, "rows taken one by one claim 95 % and do not hold it"


def test_intervals_of_ratios_cover():
    """Over rows, for the ratio to many controls: e (D-K) / (K (1-e)) of the population."""
    variances = np.array([4.0, 2, 1, 1, 0.5, 0.5, 0.2, 0.1])
    truth = share_of_spectrum(variances, 2)
    truth = truth * 6 / (2 * (1 - truth))
    basis, covered = first_axes(8, 2), 0
    for seed in range(1000):
        rows = np.random.default_rng(seed).standard_normal((200, 8)) * np.sqrt(variances)
        low, high = energy_test(torch.from_numpy(rows), basis, draws=3).ratio.parts["many controls"].interval(0.95)
        covered += low <= truth <= high
    assert 0.93 - 0.007 <= covered / 1000 <= 0.97 + 0.007, "the band is widened by one sampling error"


VARIANCES = torch.tensor([5.0, 3, 2, 1, 1, 0.5, 0.5, 0.5], dtype=torch.float64)


def reader_draw(seed, n=40, signals=6, tie=0.0):
    """Activations, and signals of which the share ``tie`` follows the first activation."""
    x = normal(seed, n, 8) * VARIANCES.sqrt()
    g = normal(seed + 1_000_000, n, signals)
    g[:, 0] += tie * x[:, 0]
    return x, g


def test_reader_share_of_independent_signals_is_the_variance_share():
    """By construction, with nothing tangent in it: E|dW Q|^2 / E|dW|^2 = v(Q)."""
    basis, top, bottom = first_axes(8, 2), [], []
    for seed in range(600):
        x, g = reader_draw(seed)
        gradient = g.T @ x
        bottom.append(float(gradient.square().sum()))
        top.append(reader_share(x, g, basis).value * bottom[-1])
    top, bottom = np.array(top), np.array(bottom)
    truth, value = float(VARIANCES[:2].sum() / VARIANCES.sum()), top.sum() / bottom.sum()
    stderr = np.std((top - value * bottom) / bottom.mean(), ddof=1) / math.sqrt(600)
    assert abs(value - truth) < 5 * stderr < 0.05
    assert truth > 2 * 2 / 8, "so the naive reading, chance K/D, sees alignment where there is none"


def test_permuted_signals_find_no_excess_where_there_is_none():
    draws, found, inside = 19, [], 0
    for seed in range(800):
        x, g = reader_draw(seed)
        null = permuted_signal_null(x, g, first_axes(8, 2), permutations=draws, seed=seed)
        low, high = null.excess.interval(0.95)
        inside += low <= 0 <= high
        found.append(null.p)
    assert uniform_on_steps(found, draws) > LEVEL
    assert abs(inside / 800 - 0.95) < 0.02 + 2 * math.sqrt(0.05 * 0.95 / 800)
    # The naive test against random bases rejects nearly always on the same data.
    naive = [
        energy_test(g.T @ x, first_axes(8, 2), controls="random", draws=draws, seed=seed).p
        for seed in range(60)
        for x, g in [reader_draw(seed)]
    ]
    assert np.mean(np.array(naive) <= 0.05) > 0.5


def test_permuted_signals_find_a_planted_excess():
    hits = 0
    for seed in range(60):
        x, g = reader_draw(seed, tie=0.6)
        null = permuted_signal_null(x, g, first_axes(8, 2), permutations=39, seed=seed)
        hits += null.p <= 0.05 and null.excess.value > 0
    assert hits > 50
    x, g = reader_draw(0, 400, tie=0.6)
    away = torch.eye(8, dtype=torch.float64)[:, 5:7]
    assert permuted_signal_null(x, g, away, permutations=99).p > 0.5, "the tie is not there"


def test_signals_that_differ_between_sequences_need_their_own_scheme():
    """x drifts by sequence along Q, and so does g, independently: tokens are not exchangeable, whole sequences are.

    Inside a sequence the drifts add up, which no dealing out of single tokens repeats.
    """
    labels, basis = torch.arange(12).repeat_interleave(6), first_axes(8, 2)
    small = {"tokens": 0, "sequences": 0}
    for seed in range(150):
        x = normal(seed, 72, 8) + (normal(seed + 10**6, 12, 2) @ basis.T)[labels]
        g = normal(seed + 2 * 10**6, 72, 3) + 2 * normal(seed + 3 * 10**6, 12, 3)[labels]
        for scheme in small:
            null = permuted_signal_null(x, g, basis, permutations=19, seed=seed, groups=labels, scheme=scheme)
            small[scheme] += null.p <= 0.05
    assert small["sequences"] / 150 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 150)
    assert small["tokens"] / 150 > 0.3
