"""Figures hold exactly the numbers of the records; the test of shape is calibrated; figures for papers are files."""

from collections import Counter

import numpy as np
import pytest

from anisoscope.errors import NonFiniteError, OptionError, ShapeError, TooFewRowsError
from anisoscope.views import shape
from anisoscope.views.shape import profile_shape

DEPTH = np.linspace(0, 1, 13)
BELL = 8 * np.exp(-(((DEPTH - 0.4) / 0.2) ** 2))
STEP = np.where(DEPTH > 0, 20.0, 0.0)


def slow_rising(y, w):
    """Isotonic regression by its min-max formula."""
    mean = lambda a, b: np.average(y[a : b + 1], weights=w[a : b + 1])  # noqa: E731
    n = len(y)
    return np.array([max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)])


def test_fits_agree_with_the_min_max_formula(seed):
    rng = np.random.default_rng(seed)
    y, s = rng.standard_normal(9), rng.uniform(0.5, 2, 9)
    w = s**-2
    np.testing.assert_allclose(shape._rising_fit(y, w), slow_rising(y, w), atol=1e-12)
    found = shape._misfits(y[None], s[None])
    np.testing.assert_allclose(found["rising"], (w * (y - slow_rising(y, w)) ** 2).sum())
    np.testing.assert_allclose(found["falling"], (w * (y + slow_rising(-y, w)) ** 2).sum())
    bells = []
    for k in range(10):
        fit = np.r_[slow_rising(y[:k], w[:k]), slow_rising(y[k:][::-1], w[k:][::-1])[::-1]]
        bells.append((w * (y - fit) ** 2).sum())
    np.testing.assert_allclose(found["bell"], min(bells))
    fit = shape._bell_fit(y, s, int(np.argmin(bells)))
    best = shape._best_bell(y[None], s[None])
    np.testing.assert_allclose(best.prominence[0], fit.max() - max(fit[0], fit[-1]), atol=1e-12)
    assert fit[best.peak[0]] == fit.max()


def test_shape_of_exact_profiles():
    small = np.full(13, 0.01)
    bell = profile_shape(BELL, small)
    assert bell.verdict == "bell"
    assert bell.peak == BELL.argmax() == 5
    assert bell.peak_interval == (5, 5)
    assert bell.peak_share == pytest.approx(5 / 12)
    assert bell.prominence == pytest.approx(BELL[5] - BELL[0], abs=0.05)
    assert bell.p_monotone == bell.p_flat == 1 / 2001
    assert profile_shape(-BELL, small).verdict == "U"
    assert profile_shape(-BELL, small).peak == 5
    assert profile_shape(DEPTH, small).verdict == "monotone (rising)"
    assert profile_shape(-DEPTH, small).verdict == "monotone (falling)"
    assert profile_shape(-DEPTH, small).peak == 0
    assert profile_shape(np.zeros(13) + 7.0, small).verdict == "flat"
    # High at the first layer, then a bell: neither of the five shapes.
    assert profile_shape(np.r_[10.0, BELL[1:]], small).verdict == "undecided"
    assert profile_shape(BELL, small, seed=3) == profile_shape(BELL, small, seed=3)


def test_shape_does_not_depend_on_the_unit():
    rng = np.random.default_rng(0)
    y = BELL + rng.standard_normal(13)
    one, thousand = profile_shape(y, np.ones(13)), profile_shape(1000 * y + 5e4, np.full(13, 1000.0))
    assert one.verdict == thousand.verdict
    assert one.p_monotone == thousand.p_monotone
    assert thousand.prominence == pytest.approx(1000 * one.prominence, rel=1e-6)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("truth", "dof"),
    [(0 * DEPTH, None), (0 * DEPTH, 5), (STEP, None), (STEP[::-1], 5), (10 - 10 * np.exp(-8 * DEPTH), 5)],
)
def test_no_bell_is_seen_where_there_is_none(truth, dof):
    """A flat or monotone truth is called a bell in at most 5 % of draws; a step and a plateau come nearest to that."""
    rng, errors = np.random.default_rng(0), np.linspace(0.5, 1.5, 13)
    calls = 150
    seen = Counter()
    for draw in range(calls):
        y = truth + errors * rng.standard_normal(13)
        bars = errors if dof is None else errors * np.sqrt(rng.chisquare(dof, 13) / dof)
        seen[profile_shape(y, bars, dof=dof, draws=199, seed=draw).verdict] += 1
    assert seen["bell"] <= calls * (0.05 + 3 * np.sqrt(0.05 * 0.95 / calls)), seen
    assert seen["U"] <= calls * (0.05 + 3 * np.sqrt(0.05 * 0.95 / calls)), seen


@pytest.mark.calibration
@pytest.mark.parametrize("truth", [BELL, 80 * DEPTH * (1 - DEPTH) + 6 * DEPTH])
def test_planted_bells_are_found_with_honest_intervals(truth):
    rng, calls = np.random.default_rng(1), 150
    found = peak = height = 0
    for draw in range(calls):
        got = profile_shape(truth + rng.standard_normal(13), np.ones(13), draws=199, seed=draw)
        found += got.verdict == "bell"
        peak += got.peak_interval[0] <= truth.argmax() <= got.peak_interval[1]
        low, high = got.prominence_interval
        height += low <= truth.max() - max(truth[0], truth[-1]) <= high
    slack = 3 * np.sqrt(0.05 * 0.95 / calls)
    assert found > 0.95 * calls
    assert peak >= calls * (0.95 - slack)
    assert height >= calls * (0.95 - slack)


def test_too_small_error_bars_would_see_bells_everywhere():
    """The calibration above can fail: with error bars of a third of the true size most flat profiles seem shaped."""
    rng = np.random.default_rng(0)
    flat = sum(
        profile_shape(rng.standard_normal(13), np.full(13, 0.33), draws=199).verdict == "flat" for _ in range(50)
    )
    assert flat < 10


def test_shape_refuses_what_it_cannot_judge():
    with pytest.raises(TooFewRowsError, match="at least 3"):
        profile_shape([1.0, 2.0], [0.1, 0.1])
    with pytest.raises(ShapeError, match="one standard error for each value"):
        profile_shape([1.0, 2.0, 3.0], [0.1, 0.1])
    with pytest.raises(NonFiniteError):
        profile_shape([1.0, float("nan"), 3.0], [0.1] * 3)
    with pytest.raises(OptionError, match="above 0"):
        profile_shape([1.0, 2.0, 3.0], [0.1, 0.0, 0.1])
    with pytest.raises(OptionError, match="dof"):
        profile_shape([1.0, 2.0, 3.0], [0.1] * 3, dof=0.0)
    with pytest.raises(OptionError, match="draws"):
        profile_shape([1.0, 2.0, 3.0], [0.1] * 3, draws=3)
