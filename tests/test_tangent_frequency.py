"""Energy and distance by frequency, and correlations over token types, against slow loops and scipy."""

import inspect
import math

import numpy as np
import pytest
import torch
from scipy import stats

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, UnknownNameError
from anisoscope.tangent.energy import energy_test
from anisoscope.tangent.frequency import (
    centroid_distances,
    correlation,
    energy_by_frequency,
    frequency_correlations,
)
from anisoscope.text.frequency import TokenCounts, frequency_bins

WIDTH = 9


def case(seed, n=240, vocab=40):
    """Tokens of a Zipf law; frequent types spread less around their own centre and lie nearer to the middle."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab + 1)
    ids = torch.from_numpy(rng.choice(vocab, n, p=weights / weights.sum()))
    centres = rng.standard_normal((vocab, WIDTH)) * np.sqrt(np.arange(1, vocab + 1))[:, None]
    rows = torch.from_numpy(centres[ids.numpy()] + rng.standard_normal((n, WIDTH)))
    gradients = torch.from_numpy(rng.standard_normal((n, WIDTH)))
    return gradients, rows, ids, TokenCounts.of(ids, vocab)


def basis():
    return torch.linalg.qr(torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_what_is_kept_of_one_side_serves_the_same_numbers_alone(kind, seed):
    """Against the other order of the two sides, of which nothing is kept from the call before."""
    draw = torch.Generator().manual_seed(seed)
    one, two, y = (torch.randn(30, generator=draw, dtype=torch.float64).mul_(3).round_() for _ in range(3))
    with torch.inference_mode():  # what is kept there serves outside too
        first = correlation(one, y, kind, bootstraps=50)
    assert correlation(one, y, kind, bootstraps=50) == first
    for x in (two, one):
        found, turned = (correlation(*pair, kind, bootstraps=50) for pair in ((x, y), (y, x)))
        assert found.value == pytest.approx(turned.value, abs=1e-12)
        assert found.stderr == pytest.approx(turned.stderr, rel=1e-9)
    assert correlation(two, y, kind, bootstraps=50).stderr != first.stderr


def test_distances_are_the_slow_ones(seed):
    _, rows, ids, _ = case(seed)
    own, overall = centroid_distances(rows, ids)
    n, middle = len(rows), rows.mean(dim=0)
    for i in range(n):
        same = rows[ids == ids[i]]
        count = len(same)
        assert float(overall[i]) == pytest.approx(math.dist(rows[i], middle) * math.sqrt(n / (n - 1)), rel=1e-10)
        if count == 1:
            assert math.isnan(own[i])
        else:
            expected = math.dist(rows[i], same.mean(dim=0)) * math.sqrt(count / (count - 1))
            assert float(own[i]) == pytest.approx(expected, rel=1e-10)


def test_rare_types_do_not_read_as_tight():
    """Types of 2 and of 50 tokens with the same spread have the same mean squared distance; plainly they have not."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.arange(600).repeat_interleave(2), torch.arange(600, 624).repeat_interleave(50)])
    rows = torch.randn(len(ids), 8, generator=generator, dtype=torch.float64)
    own, _ = centroid_distances(rows, ids)
    rare, frequent = own[:1200].square(), own[1200:].square()
    stderr = math.hypot(float(rare.std()) / math.sqrt(600), float(frequent.std()) / math.sqrt(1200))
    assert abs(float(rare.mean() - frequent.mean())) < 5 * stderr
    assert float(rare.mean()) / 2 < float(frequent.mean()) - 15 * stderr, "the plain distance of two is half as large"


def test_distances_do_not_see_the_mean_and_scale_with_the_rows(one_seed):
    _, rows, ids, _ = case(one_seed)
    own, overall = centroid_distances(rows, ids)
    far_own, far_overall = centroid_distances(3 * rows + 1e6, ids)
    assert torch.allclose(far_own, 3 * own, rtol=1e-7, equal_nan=True)
    assert torch.allclose(far_overall, 3 * overall, rtol=1e-7)


def test_bins_are_the_tests_of_their_tokens(seed):
    gradients, rows, ids, counts = case(seed)
    bins = frequency_bins(counts, 4)
    labels = torch.arange(len(ids)) // 12
    found = energy_by_frequency(gradients, rows, ids, bins, basis(), draws=19, seed=seed, groups=labels)
    assert [one.label for one in found] == list(bins.labels) and sum(one.tokens for one in found) == len(ids)
    own, overall = centroid_distances(rows, ids)
    for number, one in enumerate(found):
        here = bins.bin_of(ids) == number
        assert one.tokens == int(here.sum()) == int(bins.mass[number]) and one.types == len(ids[here].unique())
        expected = energy_test(gradients[here], basis(), draws=19, seed=seed, groups=labels[here])
        assert one.energy.share == expected.share and one.energy.p == expected.p
        assert one.energy.ratio.value == expected.ratio.value and "sequences" in one.energy.share.over
        assert one.overall.value == pytest.approx(float(overall[here].mean()), rel=1e-10)
        known = here & ~own.isnan()
        assert one.own.value == pytest.approx(float(own[known].mean()), rel=1e-10)
        types = ids[known].unique().tolist()
        if len(types) >= 3:
            left = [float(own[known & (ids != name)].mean()) for name in types]
            stderr = math.sqrt((len(left) - 1) / len(left) * sum((v - np.mean(left)) ** 2 for v in left))
            assert one.own.stderr == pytest.approx(stderr, rel=1e-8) and one.own.over == f"{len(types)} token types"


def test_a_bin_without_gradient_says_so():
    gradients, rows, ids, counts = case(0)
    bins = frequency_bins(counts, 3)
    gradients[bins.bin_of(ids) == 0] = 0
    found = energy_by_frequency(gradients, rows, ids, bins, basis(), draws=9)
    assert found[0].energy is None and any("zero everywhere" in note for note in found[0].notes)
    assert found[1].energy is not None and found[0].overall is not None


def test_types_seen_once_are_counted_out():
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.arange(6)
    bins = frequency_bins(TokenCounts.of(ids, 6), 2)
    (found,) = energy_by_frequency(rows, rows, ids, bins, basis(), draws=5)
    assert found.own is None and found.overall is not None and any("stands here twice" in note for note in found.notes)
    correlations = frequency_correlations(rows, ids, TokenCounts(torch.arange(1, 7)), bootstraps=99)
    assert correlations.own_pearson is None and correlations.overall_pearson.n == 6


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_correlations_are_scipys(kind, seed):
    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_normal(50), 1)  # with ties
    y = 0.5 * x + rng.standard_normal(50)
    found = correlation(torch.from_numpy(x), torch.from_numpy(y), kind, bootstraps=1500, seed=seed)
    theirs = (stats.pearsonr if kind == "pearson" else stats.spearmanr)(x, y).statistic
    assert found.value == pytest.approx(theirs, rel=1e-12)
    picks = np.random.default_rng(seed + 1).integers(0, 50, (1500, 50))
    slow = [(stats.pearsonr if kind == "pearson" else stats.spearmanr)(x[p], y[p]).statistic for p in picks]
    assert found.stderr == pytest.approx(np.std(slow, ddof=1), rel=5 * math.sqrt(2) / math.sqrt(2 * 1500))
    assert -1 <= found.parts["low"].value < found.value < found.parts["high"].value <= 1
    reach = math.atanh(found.parts["high"].value) - math.atanh(found.value)
    assert reach == pytest.approx(1.96 * np.std(np.arctanh(slow), ddof=1), rel=0.15)
    assert found.over == "50 token types (bootstrap)"


@pytest.mark.calibration
@pytest.mark.parametrize("heavy", [False, True])
def test_correlation_intervals_cover(heavy):
    """... for normal pairs, and where spread grows with x: there the textbook error is too small, ours is not."""
    truth, covered, textbook, repeats = 0.6 if not heavy else 0.0, 0, 0, 400
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(120)
        y = 0.75 * x + rng.standard_normal(120) if not heavy else x * rng.standard_normal(120)
        found = correlation(torch.from_numpy(x), torch.from_numpy(y), bootstraps=300, seed=seed)
        covered += found.parts["low"].value <= truth <= found.parts["high"].value
        textbook += abs(found.value - truth) <= 1.96 * found.parts["fisher stderr"].value
    sampling = math.sqrt(0.05 * 0.95 / repeats)
    assert 0.93 - 2 * sampling <= covered / repeats <= 0.97 + 2 * sampling
    assert not heavy or textbook / repeats < 0.85


def test_frequency_correlations_find_what_was_planted(seed):
    _, rows, ids, counts = case(seed, 3000, 100)
    found = frequency_correlations(rows, ids, counts, bootstraps=199, seed=seed)
    _, overall = centroid_distances(rows, ids)
    types = ids.unique()
    mean = [float(overall[ids == name].mean()) for name in types]
    log = np.log(counts.counts[types].numpy())
    assert found.overall_pearson.value == pytest.approx(stats.pearsonr(log, mean).statistic, rel=1e-9)
    assert found.overall_spearman.value == pytest.approx(stats.spearmanr(log, mean).statistic, rel=1e-9)
    assert found.overall_pearson.value < -0.5 and found.overall_pearson.parts["high"].value < -0.4
    twice = [name for name in types if int((ids == name).sum()) > 1]
    assert found.own_pearson.n == len(twice)
    assert abs(found.own_pearson.value) < 5 * found.own_pearson.stderr, "all types have the same spread"


def test_refusals():
    gradients, rows, ids, counts = case(0)
    x = torch.arange(5.0)
    with pytest.raises(UnknownNameError, match="did you mean 'spearman'"):
        correlation(x, x, "sperman")
    with pytest.raises(TooFewRowsError, match="got 3"):
        correlation(x[:3], x[:3])
    with pytest.raises(DegenerateError, match="constant"):
        correlation(x, torch.ones(5))
    with pytest.raises(ShapeError, match="pairs"):
        inspect.unwrap(correlation)(x, x[:4])
    with pytest.raises(OptionError, match="counts know 3 ids"):
        frequency_correlations(rows, ids, TokenCounts(torch.ones(3, dtype=torch.int64)))
    with pytest.raises(OptionError, match="count 0"):
        frequency_correlations(rows, ids, TokenCounts(torch.zeros(40, dtype=torch.int64)))
    with pytest.raises(ShapeError, match="one of each"):
        inspect.unwrap(energy_by_frequency)(gradients, rows[:-1], ids, frequency_bins(counts, 2), basis())
    perfect = correlation(x, 2 * x)
    assert perfect.value == pytest.approx(1) and perfect.stderr is None
