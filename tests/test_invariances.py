"""What must not change a value, and what must.

Rows are Gaussian with unequal variances, or heavy-tailed, about a mean; sizes and seeds come from Hypothesis.
Tolerances: turning, scaling or moving rows of size s rounds each coordinate by 1e-16 s. A neighbour distance r moves by
1e-16 s/r of itself, and the logarithm of a ratio, 1e-3 at the smallest, by a thousand times that: below ROUND for s up
to 1e3 spreads. Sums taken in another order lose less. A quadratic fit multiplies rounding by the square of its
condition, at most 1e4 or so for twenty rows: CURVED.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anisoscope as an
from anisoscope.measures.table import measure_names

ROUND, CURVED = 1e-9, 1e-5
ALL = 10**6  # anchors: every row, so that a permutation meets the same neighbourhoods
brief = settings(max_examples=8)  # for tests that run once for each measure

MEASURES = {
    "spectral_ratio": an.spectral_ratio,
    "spectral_ratio_l1": an.spectral_ratio_l1,
    "stable_rank": an.stable_rank,
    "effective_rank": an.effective_rank,
    "effective_rank_lambda": an.effective_rank_lambda,
    "participation_ratio": an.participation_ratio,
    "participation_ratio plugin": functools.partial(an.participation_ratio, bias="plugin"),
    "isoscore": an.isoscore,
    "isoscore_star": functools.partial(an.isoscore_star, zeta=0.4),
    "mean_cosine": an.mean_cosine,
    "partition_isotropy": an.partition_isotropy,
    "two_nn": an.two_nn,
    "two_nn ml": functools.partial(an.two_nn, variant="ml"),
    "two_nn shape_of_learning": functools.partial(an.two_nn, variant="shape_of_learning"),
    "mle": functools.partial(an.mle, k=6),
    "mle mean": functools.partial(an.mle, k=(3, 6), pooling="mean"),
    "gride": functools.partial(an.gride, scales=(3,)),
    "turning_angle": an.turning_angle,
    "local_pca_dimension": functools.partial(an.local_pca_dimension, k=12, anchors=ALL),
    "local_pca_dimension participation": functools.partial(
        an.local_pca_dimension, k=12, anchors=ALL, rule="participation"
    ),
    "local_isotropy": functools.partial(an.local_isotropy, k=12, anchors=ALL),
    "curvature": functools.partial(an.curvature, dimension=2, k=20, anchors=ALL),
}
BY_DISTANCE = [name for name in MEASURES if name.split()[0] in ("two_nn", "mle", "gride", "local_pca_dimension")]
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def clouds(draw):
    """Rows (n, d), and the generator that made them."""
    rng = np.random.default_rng(draw(SEEDS))
    n, d = draw(st.integers(28, 50)), draw(st.integers(3, 8))
    rows = rng.standard_normal((n, d)) if draw(st.booleans()) else rng.standard_t(3, (n, d))
    return rows * 0.7 ** np.arange(d) + rng.normal(0, 0.5, d), rng


def turn(rng, d):
    """An orthogonal matrix, a reflection as often as a rotation."""
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def same(got, want, name, factor=1.0):
    rtol = CURVED if name == "curvature" else ROUND
    np.testing.assert_allclose(got.value, want.value * factor, rtol=rtol, atol=rtol * 1e-3, err_msg=name)


def test_every_measure_is_here():
    assert {name.split()[0] for name in MEASURES} == set(measure_names())


@pytest.mark.parametrize("name", MEASURES)
@brief
@given(cloud=clouds(), exponent=st.floats(-12, 12), far=st.floats(0, 3))
def test_turned_scaled_moved_and_shuffled_rows(name, cloud, exponent, far):
    rows, rng = cloud
    call, scale = MEASURES[name], 10.0**exponent
    want = call(rows)
    same(call(rows @ turn(rng, rows.shape[1])), want, name)
    if name != "partition_isotropy":
        same(call(rows * scale), want, name, 1 / scale if name == "curvature" else 1.0)
    if name not in ("mean_cosine", "partition_isotropy"):
        same(call(rows + 10.0**far * rng.standard_normal(rows.shape[1])), want, name)
    if name != "turning_angle":
        same(call(rows[rng.permutation(len(rows))]), want, name)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "partition_isotropy"])
@pytest.mark.parametrize(("dtype", "exponent"), [("float32", -12), ("float32", 12), ("float64", -30), ("float64", 30)])
def test_far_scales_give_the_value_or_an_error_and_never_another_value(name, dtype, exponent, one_seed):
    """Powers of ten round float32 rows anew, at 6e-8 each: 1e-4 holds for ratios of distances and for local fits."""
    rng = np.random.default_rng(one_seed)
    rows = rng.standard_normal((60, 5)) * [3, 2, 1, 1, 0.5] + 0.3
    want = MEASURES[name](rows.astype(dtype)).value
    try:
        got = MEASURES[name]((rows * 10.0**exponent).astype(dtype)).value
    except an.AnisoscopeError:
        return
    factor = 10.0**-exponent if name == "curvature" else 1.0
    np.testing.assert_allclose(got, want * factor, rtol=1e-2 if name == "curvature" else 1e-4)


@pytest.mark.parametrize("name", ["spectral_ratio", "stable_rank", "effective_rank", "participation_ratio", "isoscore"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_error_bars_do_not_see_the_mean(name, dtype, one_seed):
    """Rows on a grid, so that moving them rounds nothing in float32."""
    rng = np.random.default_rng(one_seed)
    rows = np.round(rng.standard_normal((600, 5)) * [300, 200, 100, 90, 50]).astype(dtype)
    here, there = (getattr(an, name)(rows + far).stderr for far in (0, 4096))
    assert here is not None
    np.testing.assert_allclose(there, here, rtol=1e-4)


GARBAGE = (0.0, np.nan, np.inf, -np.inf, 1.7e308, -5e-324, 3.0)


@pytest.mark.parametrize("name", MEASURES)
@brief
@given(cloud=clouds(), paths=st.booleans(), narrow=st.booleans())
def test_padding_content_never_shows(name, cloud, paths, narrow):
    """The whole estimate, with error bar, notes and parts, bit for bit, whatever stands in masked rows."""
    rows, rng = cloud
    n, d = rows.shape
    keep = np.zeros((4, n) if paths else 4 * n, dtype=bool)
    at = np.sort(rng.choice(4 * n, n, replace=False))
    at[: n // 2] = at[0] + np.arange(n // 2)  # a run without gaps, so that a path is left to turn along
    keep.reshape(-1)[np.unique(at)] = True
    count = keep.sum()
    found = []
    for filling in (*GARBAGE, None):
        padded = np.zeros((*keep.shape, d), dtype=np.float32 if narrow else np.float64)
        with np.errstate(over="ignore"):
            padded[~keep] = rng.choice(GARBAGE, (4 * n - count, d)) if filling is None else filling
        padded[keep] = rows[:count]
        found.append(MEASURES[name](padded, mask=keep))
    assert all(got == found[0] for got in found[1:])
    if name != "turning_angle":
        plain = MEASURES[name](rows[:count].astype(padded.dtype))
        assert plain == found[0]


@brief
@given(cloud=clouds())
def test_padding_of_both_layers_never_shows(cloud):
    rows, rng = cloud
    keep = rng.random(2 * len(rows)) < 0.5
    keep[: len(rows) // 2] = True
    a, b = np.resize(rows, (2 * len(rows), rows.shape[1])), rng.standard_normal((2 * len(rows), rows.shape[1]))
    want = an.linearity(a[keep], b[keep])
    for filling in GARBAGE:
        a[~keep], b[~keep] = filling, -filling
        assert an.linearity(a, b, mask=keep) == want


@pytest.mark.parametrize("name", BY_DISTANCE)
@brief
@given(cloud=clouds(), together=st.booleans())
def test_exact_copies_never_show(name, cloud, together):
    """By default one of each distinct row is measured: the value and n are those of the rows without copies."""
    rows, rng = cloud
    if together:
        copied = np.repeat(rows, rng.integers(1, 4, len(rows)), axis=0)
    else:
        copied = np.concatenate([rows, rows[rng.integers(0, len(rows), 30)]])
    want, got = MEASURES[name](rows), MEASURES[name](copied)
    assert (got.value, got.n, got.stderr) == (want.value, want.n, want.stderr)
    assert not want.notes or want.notes == got.notes[1:]
    assert len(copied) == len(rows) or "exact copies" in got.notes[0]


@given(cloud=clouds())
def test_lengths_of_rows_do_not_show_in_mean_cosine_and_do_in_the_spectrum(cloud):
    rows, rng = cloud
    stretched = rows * rng.lognormal(0, 1, (len(rows), 1))
    same(an.mean_cosine(stretched), an.mean_cosine(rows), "mean_cosine")
    assert abs(an.spectral_ratio(stretched).value - an.spectral_ratio(rows).value) > ROUND


@given(cloud=clouds())
def test_linearity(cloud):
    """A linear map of X loses nothing, a rotation of either nothing for "orthogonal"; rows must stay paired."""
    X, rng = cloud
    d = X.shape[1]
    Y = np.tanh(X @ rng.standard_normal((d, d))) + 0.3 * rng.standard_normal(X.shape)
    mixing = turn(rng, d) * np.linspace(1, 3, d) @ turn(rng, d)
    order = rng.permutation(len(X))
    for map_ in ("linear", "orthogonal"):
        call = functools.partial(an.linearity, map=map_)
        want = call(X, Y)
        same(call(5 * X @ turn(rng, d) + 3, Y @ turn(rng, d) / 7 - 2), want, map_)
        same(call(X[order], Y[order]), want, map_)
        assert abs(call(X, Y[order]).value - want.value) > ROUND
        assert abs(call(X, Y @ mixing).value - want.value) > ROUND  # its directions are weighed by their size
    same(an.linearity(X @ mixing, Y), an.linearity(X, Y), "linear")
    assert abs(an.linearity(X @ mixing, Y, map="orthogonal").value - want.value) > ROUND


# --- What must change ------------------------------------------------------------------------------------------------


@given(cloud=clouds())
def test_translation_shows_in_mean_cosine_and_partition_isotropy(cloud):
    """Far from the origin all rows point the same way: with |shift| = 100 and rows below 20, cos > 1 - 2 (0.2)^2."""
    rows, rng = cloud
    rows = rows / max(1.0, np.linalg.norm(rows, axis=1).max() / 20)
    shift = rng.standard_normal(rows.shape[1])
    shift *= 100 / np.linalg.norm(shift)
    assert an.mean_cosine(rows + shift).value > 0.9 > an.mean_cosine(rows - rows.mean(axis=0)).value
    assert an.partition_isotropy(rows + shift).value < an.partition_isotropy(rows).value


@given(cloud=clouds(), factor=st.floats(1.5, 4))
def test_scale_shows_in_partition_isotropy(cloud, factor):
    rows = cloud[0] - cloud[0].mean(axis=0)
    assert an.partition_isotropy(rows * factor).value < an.partition_isotropy(rows).value


@given(cloud=clouds())
def test_order_shows_in_turning_angle(cloud):
    """A walk in order turns by about 90, and its rows in random order by about 120."""
    rows, rng = cloud
    along = (rows + 2 * rows.std(axis=0)).cumsum(axis=0)  # with a drift: hardly turns at all
    assert an.turning_angle(along[rng.permutation(len(along))]).value > an.turning_angle(along).value + 10


@given(cloud=clouds(), factor=st.floats(2, 10))
def test_stretching_the_leading_axis_shows(cloud, factor):
    """More variance along the first principal axis: less isotropy by every name, and other neighbours."""
    rows, _ = cloud
    centred = rows - rows.mean(axis=0)
    axis = np.linalg.svd(centred)[2][0]
    stretched = rows + (factor - 1) * np.outer(centred @ axis, axis)
    for name in ("participation_ratio plugin", "isoscore_star", "stable_rank", "effective_rank_lambda"):
        assert MEASURES[name](stretched).value < MEASURES[name](rows).value, name
    assert an.isoscore(stretched, bias="plugin").value < an.isoscore(rows, bias="plugin").value
    for name in ("spectral_ratio", "spectral_ratio_l1"):
        assert MEASURES[name](stretched).value > MEASURES[name](rows).value, name
    for name in BY_DISTANCE:
        if name != "local_pca_dimension":  # which counts
            assert abs(MEASURES[name](stretched).value - MEASURES[name](rows).value) > ROUND, name


@given(cloud=clouds())
def test_squared_and_unsquared_spectra_differ(cloud):
    """p from sigma is flatter than p from sigma^2, so its entropy is larger and its first share smaller."""
    rows, _ = cloud
    assert an.spectral_ratio_l1(rows).value < an.spectral_ratio(rows).value - ROUND
    assert an.effective_rank(rows).value > an.effective_rank_lambda(rows).value + ROUND


@given(cloud=clouds())
def test_ranges(cloud):
    rows, _ = cloud
    n, d = rows.shape
    rank = min(n - 1, d)
    value = {name: call(rows).value for name, call in MEASURES.items()}
    assert 1 / rank <= value["spectral_ratio_l1"] <= value["spectral_ratio"] <= 1
    assert value["stable_rank"] * value["spectral_ratio"] == pytest.approx(1, rel=1e-12)
    # Renyi entropies fall with their order: 1 of sigma, then of lambda 1, 2 and infinity
    plugin = value["participation_ratio plugin"]
    assert 1 <= value["stable_rank"] <= plugin <= value["effective_rank_lambda"] <= value["effective_rank"] <= rank
    assert 0 <= an.isoscore(rows, bias="plugin").value <= 1
    assert -1 / (n - 1) <= value["mean_cosine"] <= 1
    assert 0 < value["partition_isotropy"] <= 1
    assert 0 <= value["turning_angle"] <= 180
    assert 1 <= value["local_pca_dimension"] <= d


@given(cloud=clouds())
def test_seeds_and_layout_do_not_show_in_neighbours(cloud):
    """The seed chooses landmarks and samples only."""
    rows = torch.from_numpy(cloud[0])
    found = [an.nearest_neighbors(rows, 5, seed=seed) for seed in (0, 1, 99)]
    assert all(torch.equal(found[0].distances, other.distances) for other in found[1:])
