"""Hostile rows: every measure gives the right number or a named error, never NaN, never a warning (they are errors).

Hostile data lie on a dyadic grid, so that a huge mean is added without rounding and float32 holds them exactly: the
reference is then a slow oracle in float64 on the same rows, or on the rows with their mean taken off without rounding.
Every naive formula named here is shown to fail on the same data in the same test.
"""

import math
import threading
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch

import anisoscope as an
from anisoscope.errors import (
    AnisoscopeError,
    DegenerateError,
    DuplicateRowsError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    TooFewRowsError,
    ZeroRowError,
)
from anisoscope.measures import base, local, spectrum, table
from anisoscope.measures.bars import SHARE_SCORES
from anisoscope.measures.plan import Plan
from anisoscope.rows import as_rows, of_unit_size
from anisoscope.stats import precision
from anisoscope.stats.precision import full_precision
from anisoscope.theory import manifolds

N, WIDTH = 150, 6
GRID = 2.0**-9  # a mean of 1e4 spreads leaves float32 ten bits for the fraction
SHIFT = 1e4
K = 20  # neighbours in local measures and in mle
LINEAR_MAP = np.random.default_rng(99).integers(-3, 4, (64, 64)).astype(np.float64)


def cloud(n=N, width=WIDTH, seed=0):
    """Normal rows with unequal spreads, on the grid."""
    rows = np.random.default_rng(seed).standard_normal((n, width)) * np.linspace(1.0, 0.4, width)
    return np.round(rows / GRID) * GRID


def next_layer(rows):
    """Half a linear map of the rows, half noise of its own, with the same mean; rounded to what float32 can hold."""
    rows = np.where(np.isfinite(rows), as_float64(rows), 0.0)
    shift = SHIFT if len(rows) and rows.mean() > SHIFT / 2 else 0.0
    noise = np.random.default_rng(7).integers(-512, 513, rows.shape) * GRID
    width = rows.shape[1]
    return as_float64((((rows - shift) @ LINEAR_MAP[:width, :width]) + noise + shift).astype(np.float32))


# Options make every measure small enough for a slow oracle, and take all rows as anchors, so that nothing is random.
CALLS = {
    "curvature": lambda rows, mask=None: an.curvature(rows, mask=mask, dimension=2, k=K, anchors=len(rows)),
    "effective_rank": an.effective_rank,
    "effective_rank_lambda": an.effective_rank_lambda,
    "gride": lambda rows, mask=None: an.gride(rows, mask=mask, scales=(1, 2)),
    "isoscore": an.isoscore,
    "isoscore_star": an.isoscore_star,
    "local_isotropy": lambda rows, mask=None: an.local_isotropy(
        rows, mask=mask, measure="spectral_ratio", k=K, anchors=len(rows)
    ),
    "local_pca_dimension": lambda rows, mask=None: an.local_pca_dimension(rows, mask=mask, k=K, anchors=len(rows)),
    "mean_cosine": an.mean_cosine,
    "mle": lambda rows, mask=None: an.mle(rows, mask=mask, k=K),
    "participation_ratio": an.participation_ratio,
    "partition_isotropy": an.partition_isotropy,
    "spectral_ratio": an.spectral_ratio,
    "spectral_ratio_l1": an.spectral_ratio_l1,
    "stable_rank": an.stable_rank,
    "turning_angle": an.turning_angle,
    "two_nn": an.two_nn,
    "linearity": lambda rows, mask=None: an.linearity(rows, next_layer(rows).astype(rows.dtype), mask=mask),
}


def as_float64(rows):
    return np.asarray(rows, dtype=np.float64)


def squares(rows):
    """Exact averages over distinct rows i, j, k, l of (|x_i-x_j| |x_k-x_l|)^2 / 4 and ((x_i-x_j).(x_k-x_l))^2 / 4.

    Multiplied out and summed in whole numbers: inner products G, index sets kept apart by inclusion and exclusion.
    """
    whole = [[int(v) for v in row] for row in np.round(rows / GRID)]
    n = len(whole)
    gram = np.array(whole, dtype=object) @ np.array(whole, dtype=object).T
    own = gram.diagonal()
    row_sum, total, trace = gram.sum(axis=1), gram.sum(), own.sum()
    off = total - trace
    pairs_own = trace**2 - (own**2).sum()
    pairs_squared = (gram**2).sum() - (own**2).sum()
    own_times_pair = (own * (total - 2 * row_sum + 2 * own - trace)).sum()
    chains = ((row_sum - own) ** 2).sum() - pairs_squared
    disjoint = off**2 - 4 * chains - 2 * pairs_squared
    two, three = n * (n - 1), n * (n - 1) * (n - 2)
    four = three * (n - 3)
    trace_squared = Fraction(pairs_own, two) - 2 * Fraction(own_times_pair, three) + Fraction(disjoint, four)
    trace_of_square = Fraction(pairs_squared, two) - 2 * Fraction(chains, three) + Fraction(disjoint, four)
    return trace_squared, trace_of_square


def participation(rows):
    square, frobenius = squares(rows)
    return float(square / frobenius)


def isoscore_star(rows):
    """The corrected isoscore of 0.9 S + 0.1 (tr S / D) I, in whole numbers too."""
    square, frobenius = squares(rows)
    width, keep2 = rows.shape[1], Fraction(81, 100)
    ratio = square / (keep2 * frobenius + (1 - keep2) * square / width)
    return float((ratio - 1) / (width - 1))


def local_share(rows):
    spectra = oracles.local_pca_spectra(rows, range(len(rows)), K)
    return float(np.mean([s[0] / s.sum() for s in spectra]))


def local_dimension(rows):
    spectra = oracles.local_pca_spectra(rows, range(len(rows)), K)
    return float(np.mean([np.sum(s >= 0.05 * s[0]) for s in spectra]))


# Of the centred rows, so exact on rows without their mean; the two that see the mean stand below.
REFERENCES = {
    "curvature": lambda rows: CALLS["curvature"](rows).value,  # no oracle takes the noise off: float64, mean taken off
    "effective_rank": oracles.effective_rank,
    "effective_rank_lambda": oracles.effective_rank_lambda,
    "gride": lambda rows: oracles.gride(rows, 1),
    "isoscore": lambda rows: (participation(rows) - 1) / (rows.shape[1] - 1),
    "isoscore_star": isoscore_star,
    "local_isotropy": local_share,
    "local_pca_dimension": local_dimension,
    "mle": lambda rows: oracles.mle(rows, K),
    "participation_ratio": participation,
    "spectral_ratio": oracles.spectral_ratio,
    "spectral_ratio_l1": oracles.spectral_ratio_l1,
    "stable_rank": oracles.stable_rank,
    "turning_angle": oracles.turning_angle,
    "two_nn": oracles.two_nn_facco,
    "linearity": lambda rows: oracles.linearity_adjusted(rows, next_layer(rows)),
}
UNCENTRED = {"mean_cosine": oracles.mean_cosine, "partition_isotropy": oracles.partition_isotropy}

# Float64 rows: 1e-6 is promised, and mostly there are 1e-13; the search inside the gride oracle stops at 1e-7.
# Float32 rows: squared quantities come from float32 products ("mixed"), whose rounding is 1e-5 at worst on a grid;
# local covariances are promised to 1e-6 of the largest eigenvalue.
TOLERANCE_64 = dict.fromkeys(CALLS, 1e-7) | {"gride": 1e-6, "curvature": 1e-6}
TOLERANCE_32 = TOLERANCE_64 | dict.fromkeys(
    ["spectral_ratio", "stable_rank", "participation_ratio", "isoscore", "isoscore_star"], 1e-5
)
TOLERANCE_32 |= {"local_isotropy": 1e-5, "curvature": 1e-3, "turning_angle": 1e-6, "mean_cosine": 1e-5}


def outlier_dimension():
    rows = cloud()
    rows[:, 2] *= 1024
    return rows


def outlier_row():
    """A massive activation: one row four thousand times as long as the others."""
    rows = cloud()
    rows[60] *= 4096
    return rows


def rank_deficient():
    rng = np.random.default_rng(5)
    return (rng.integers(-64, 65, (N, 3)) @ rng.integers(-4, 5, (3, WIDTH))) * GRID * 8


FEW = ["local_isotropy", "local_pca_dimension", "curvature", "mle"]  # these need K + 1 rows
SPECTRAL = ["spectral_ratio", "spectral_ratio_l1", "stable_rank", "effective_rank", "effective_rank_lambda"]
RATIOS = ["participation_ratio", "isoscore", "isoscore_star"]
GRAPH = ["two_nn", "gride", "mle", "local_isotropy", "local_pca_dimension", "curvature"]

# name: (rows, mean that was added to them, {measure: error}); whatever is not listed must give the right number.
CASES = {
    "plain": (cloud(), 0.0, {}),
    "huge mean": (cloud(), SHIFT, {}),
    "outlier dimension": (outlier_dimension(), 0.0, {}),
    "outlier row": (outlier_row(), 0.0, {}),
    "rank deficient": (rank_deficient(), 0.0, {}),
    "rank deficient, huge mean": (rank_deficient(), SHIFT, {}),
    "fewer rows than columns": (cloud(40, 64), 0.0, {"linearity": TooFewRowsError}),
    "three rows": (
        cloud(3),
        0.0,
        dict.fromkeys([*FEW, *RATIOS, "linearity"], TooFewRowsError) | {"gride": TooFewRowsError},
    ),
    "two rows": (
        cloud(2),
        0.0,
        dict.fromkeys([*GRAPH, *RATIOS, "linearity"], TooFewRowsError) | {"turning_angle": DegenerateError},
    ),
    "one row": (
        cloud(1),
        0.0,
        dict.fromkeys([*GRAPH, *SPECTRAL, *RATIOS, "mean_cosine"], TooFewRowsError)
        | dict.fromkeys(["turning_angle", "linearity"], DegenerateError),
    ),
    "constant rows": (
        cloud(1).repeat(N, axis=0),
        0.0,
        dict.fromkeys(GRAPH, TooFewRowsError)
        | dict.fromkeys([*SPECTRAL, *RATIOS, "turning_angle", "linearity"], DegenerateError),
    ),
    "all zeros": (
        np.zeros((N, WIDTH)),
        0.0,
        dict.fromkeys(GRAPH, TooFewRowsError)
        | dict.fromkeys([*SPECTRAL, *RATIOS, "turning_angle", "linearity", "partition_isotropy"], DegenerateError)
        | {"mean_cosine": ZeroRowError},
    ),
}


def everything(estimate):
    yield estimate
    for part in estimate.parts.values():
        yield from everything(part)


def test_the_matrix_covers_every_public_measure():
    assert {*table.measure_names(), "linearity"} == CALLS.keys() == REFERENCES.keys() | UNCENTRED.keys()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_right_number_or_named_error(case, name, dtype):
    centred, shift, errors = CASES[case]
    rows = (centred + shift).astype(dtype)
    assert np.array_equal(as_float64(rows) - shift, centred), "the case itself is not exact"
    if name in errors:
        with pytest.raises(errors[name], match=r"\brows?\b|spread"):
            CALLS[name](rows)
        return
    found = CALLS[name](rows)
    reference = UNCENTRED[name](as_float64(rows)) if name in UNCENTRED else REFERENCES[name](centred)
    tolerance = (TOLERANCE_64 if dtype == "float64" else TOLERANCE_32)[name]
    # Measures that may be close to zero by cancellation are promised to an absolute error.
    size = max(1.0, abs(reference)) if name in ("mean_cosine", "isoscore", "linearity") else abs(reference)
    assert abs(found.value - reference) <= tolerance * size, f"{found.value} is not {reference}"
    assert found.n == len(rows) - (2 if name == "turning_angle" else 0)
    for part in everything(found):
        assert math.isfinite(part.value)
        assert part.stderr is None or math.isfinite(part.stderr)


@pytest.mark.parametrize("name", CALLS)
class TestRefusals:
    """What no measure can take, each refused with the rows named; rows are counted as they came, before any mask."""

    def test_empty(self, name):
        with pytest.raises(EmptyInputError, match="no row is left to measure"):
            CALLS[name](np.zeros((0, WIDTH)))

    def test_all_masked(self, name):
        with pytest.raises(EmptyInputError, match="no row is left to measure"):
            CALLS[name](cloud(), mask=np.zeros(N, dtype=bool))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite(self, name, bad):
        rows = cloud()
        rows[17, 3] = bad
        with pytest.raises(NonFiniteError, match=r"^row 17 holds"):
            CALLS[name](rows)

    def test_many_not_finite_in_float32_after_a_mask(self, name):
        rows = cloud().astype(np.float32)
        rows[[3, 40, 41, 60, 61, 62, 100], 0] = np.nan
        rows[99] = np.inf
        mask = np.ones(N, dtype=bool)
        mask[[3, 5, 6]] = False
        with pytest.raises(NonFiniteError, match=r"^rows 40, 41, 60, 61, 62 and 2 more hold"):
            CALLS[name](rows, mask=mask)

    def test_what_is_masked_does_not_matter(self, name):
        rows = cloud()
        mask = np.ones(N, dtype=bool)
        mask[[0, 70, N - 1]] = False
        poisoned = rows.copy()
        poisoned[~mask] = [[math.nan] * WIDTH, [math.inf] * WIDTH, [1e300] * WIDTH]
        if name == "linearity":
            after = next_layer(rows)
            assert an.linearity(poisoned, after, mask=mask) == an.linearity(rows, after, mask=mask)
        else:
            assert CALLS[name](poisoned, mask=mask) == CALLS[name](rows, mask=mask)


def bent():
    """A curved surface with a little noise: the cloud itself is flat, and zero is zero in every unit."""
    rows = cloud()
    rows[:, 2] = rows[:, 0] ** 2 - rows[:, 0] * rows[:, 1]
    rows[:, 3:] *= 2.0**-10
    return rows


@pytest.mark.parametrize("name", CALLS)
class TestScales:
    """Rows may come in any unit: the same number and the same error bar (curvature in the inverse unit)."""

    def measured(self, name, dtype, scale):
        rows = ((bent() if name == "curvature" else cloud()) * scale).astype(dtype)
        if name == "linearity":
            return an.linearity(rows, (next_layer(cloud()) * scale).astype(dtype))
        return CALLS[name](rows)

    def check(self, name, dtype, scales, tolerance):
        truth = self.measured(name, dtype, 1.0)
        assert name in ("partition_isotropy", "curvature") or abs(truth.value) > 1e-3
        for scale in scales:
            found = self.measured(name, dtype, scale)
            if name == "partition_isotropy":  # that one is a matter of scale
                continue
            unit = {"curvature": 1 / scale, "mean curvature": 1 / scale}
            pairs = [(name, found, truth), *((part, found.parts[part], truth.parts[part]) for part in truth.parts)]
            for part, got, want in pairs:
                by = scale if part.startswith("radius") else unit.get(part, 1.0)
                assert got.value / by == pytest.approx(want.value, rel=tolerance, abs=0.1 * tolerance), (part, scale)
                assert (got.stderr is None) == (want.stderr is None)
                assert got.stderr is None or got.stderr / by == pytest.approx(want.stderr, rel=10 * tolerance)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_where_float32_squares_overflow(self, name, dtype):
        self.check(name, dtype, [2.0**-100, 2.0**-70, 2.0**70, 2.0**100], 1e-3 if name == "curvature" else 1e-5)

    def test_where_float64_squares_overflow(self, name):
        self.check(name, "float64", [2.0**-1000, 2.0**-500, 2.0**-250, 2.0**250, 2.0**500, 2.0**1000], 1e-9)

    def test_where_float64_fourth_powers_lose_digits(self, name):
        """Not powers of two: the rows themselves are rounded anew."""
        self.check(name, "float64", [1e-160, 1e-100, 1e-60, 1e40, 1e100], 1e-9)


class TestPowers:
    """What the plain formulas give beyond the range of their powers, and how states of different units mix."""

    @pytest.mark.parametrize("scale", [2.0**-300, 2.0**300])
    @pytest.mark.parametrize("shape", ["array", "stream", "few rows"])
    def test_the_plain_participation_ratio_leaves_float64(self, scale, shape):
        rows = cloud(40, 64) if shape == "few rows" else cloud()
        with np.errstate(all="ignore"):
            values = np.linalg.eigvalsh(np.cov(rows.T * scale))
            assert not np.sum(values) ** 2 / np.sum(values**2) > 0, "the plain formula should be lost"
        for name in (*RATIOS, *SPECTRAL):
            x = rows * scale
            # A chunk of zeros fits every unit; a chunk of one row has no spread to tell its size by.
            chunks = [x[:0], x[:1], *np.array_split(x[1:], 5), np.zeros((2, x.shape[1]))]
            with_zeros = np.concatenate([rows, np.zeros((2, x.shape[1]))])
            found = CALLS[name](iter(chunks) if shape == "stream" else x)
            truth = CALLS[name](with_zeros if shape == "stream" else rows)
            assert found.value == pytest.approx(truth.value, rel=1e-9)

    @pytest.mark.parametrize("scale", [2.0**-900, 2.0**-300, 2.0**300, 2.0**900])
    def test_a_reference_of_another_size(self, scale):
        """Shrinking towards what is immensely larger gives the reference, towards what is smaller the rows alone."""
        rows, other = cloud(), cloud(400, seed=1) * np.linspace(0.2, 1, WIDTH)
        alone, target = an.isoscore_star(rows, zeta=0), an.isoscore(other, bias="plugin").value
        expected = alone.value if scale < 1 else target
        for reference in (other * scale, an.Moments.of(torch.from_numpy(other * scale))):
            assert an.isoscore_star(rows, reference=reference).value == pytest.approx(expected, rel=1e-9)
            assert an.isoscore_star(rows, reference=reference, zeta=1).value == pytest.approx(target, rel=1e-9)
            plain = an.isoscore_star(rows, reference=reference, zeta=0)
            assert (plain.value, plain.stderr) == pytest.approx((alone.value, alone.stderr), rel=1e-9)
        both = an.isoscore_star(rows * scale, reference=other * scale)
        near = an.isoscore_star(rows, reference=other)
        assert (both.value, both.stderr) == pytest.approx((near.value, near.stderr), rel=1e-9)

    def test_lengths_that_share_no_unit(self):
        """Beside the longest rows the shortest vanish from moments; their directions must not."""
        rows = (cloud() + 0.5) * 10.0 ** np.random.default_rng(0).choice([-300, 0, 300], (N, 1))
        found = an.measure(rows, ["mean_cosine", "spectral_ratio"])
        assert found["mean_cosine"] == an.mean_cosine(rows)
        assert found["spectral_ratio"].value == pytest.approx(oracles.spectral_ratio(rows * 1e-300), rel=1e-9)

    def test_one_row_far_beyond_the_others(self):
        """It sets the unit of the rows; the neighbourhoods of the others are then tiny, and still have their shapes."""
        rows = bent()
        alone = np.delete(rows, 60, axis=0)
        rows[60] *= 1e3
        curved = an.curvature(rows, dimension=2, k=K, anchors=9)
        rows[60] *= 1e12
        assert an.curvature(rows, dimension=2, k=K, anchors=9).value == pytest.approx(curved.value, rel=1e-9)
        ball = an.local_pca_dimension(rows, rule="participation", k=K, anchors=N)
        assert any("1 of 150 neighbourhoods left out" in note for note in ball.notes)
        expected = an.local_pca_dimension(alone, rule="participation", k=K, anchors=N).value
        assert ball.value == pytest.approx(expected, rel=1e-9)
        frames = local.local_frames(torch.from_numpy(alone), local.neighborhoods(torch.from_numpy(alone), K, 9), 1)
        tiny = local.inverse_participation(of_unit_size(frames.coordinates * 2.0**-300))
        assert tiny.tolist() == pytest.approx(local.inverse_participation(frames.coordinates).tolist(), rel=1e-12)
        share = (CALLS["local_isotropy"](alone).value * (N - 1) + 1) / N  # its own neighbourhood is a needle
        assert CALLS["local_isotropy"](rows).value == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted({*CALLS} - {"isoscore", "isoscore_star"}))
def test_width_one(name, dtype):
    """A number or a named error in the narrowest space there is."""
    if name == "curvature":
        with pytest.raises(AnisoscopeError, match="a space that is filled has no normal"):
            an.curvature(cloud(width=1).astype(dtype))
        return
    if name == "local_isotropy":
        with pytest.raises(DegenerateError, match="width 1"):
            an.local_isotropy(cloud(width=1).astype(dtype))
        return
    found = CALLS[name](cloud(width=1).astype(dtype))
    assert math.isfinite(found.value)
    if name in [*SPECTRAL, "participation_ratio", "local_pca_dimension"]:
        assert found.value == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["isoscore", "isoscore_star"])
def test_width_one_has_no_isoscore(name):
    with pytest.raises(DegenerateError, match="width 1"):
        CALLS[name](cloud(width=1))


def naive_spectrum(rows):
    """Square roots of the eigenvalues of E[x x^T] - m m^T, formed in the rows' own precision."""
    mean = rows.mean(axis=0)
    second = rows.T @ rows / rows.dtype.type(len(rows)) - np.outer(mean, mean)
    return np.sqrt(np.linalg.eigvalsh(second.astype(np.float64)).clip(0))[::-1]


def readings(sigma):
    return {
        "spectral_ratio": sigma[0] ** 2 / np.sum(sigma**2),
        "spectral_ratio_l1": sigma[0] / np.sum(sigma),
        "effective_rank": oracles.exp_entropy(sigma.tolist()),
    }


def errors_of(found, truth):
    return {name: abs(found[name] / truth[name] - 1) for name in truth}


def work_of_spectra(rows, share):
    """Error bar of isoscore after effective_rank, with what that found on the way or without."""
    work = base.Workspace(as_rows(rows), base.Needs(moments="float64"))
    if share:
        work.cache[SHARE_SCORES] = True
    base.compute(base.lookup("effective_rank"), work, {})
    return base.compute(base.lookup("isoscore"), work, {}).stderr


class TestSpectra:
    @pytest.mark.parametrize("decay", [0, 1, 5])
    @pytest.mark.parametrize("spikes", [0, 3])
    def test_error_bars_of_float32_rows_are_those_of_float64_to_three_digits(self, decay, spikes, seed):
        """All that is multiplied for them is float32: spreads over ``decay`` powers of ten, and a few huge rows."""
        rows = np.random.default_rng(seed).standard_normal((1200, 24)) * np.logspace(0, -decay, 24)
        rows[:spikes, 0] *= 300
        short = rows.astype(np.float32)
        for name in ("spectral_ratio", "effective_rank", "effective_rank_lambda", "spectral_ratio_l1", "isoscore"):
            got, want = (getattr(an, name)(one).stderr for one in (short, short.astype(np.float64)))
            assert got == (None if want is None else pytest.approx(want, rel=1e-3)), name
        together, alone = work_of_spectra(short, True), work_of_spectra(short.astype(np.float64), False)
        assert together == pytest.approx(alone, rel=1e-4)

    @pytest.mark.parametrize("shape", ["array", "stream"])
    @pytest.mark.parametrize(("dtype", "shift"), [(np.float64, 2.0**30), (np.float32, 1e4)])
    def test_one_pass_uncentred_moments_drown_in_a_huge_mean(self, seed, dtype, shift, shape):
        """In float64 the mean must be larger still before E[x x^T] - m m^T is lost; here too nothing is rounded."""
        centred = cloud(2000, 16, seed)
        rows = (centred + shift).astype(dtype)
        assert np.array_equal(as_float64(rows) - shift, centred)
        truth = readings(np.linalg.svd(centred - centred.mean(axis=0), compute_uv=False))
        assert min(errors_of(readings(naive_spectrum(rows)), truth).values()) > 1e-2
        for name, value in truth.items():
            squared = name == "spectral_ratio" and dtype == np.float32  # float32 products: see TOLERANCE_32
            held = getattr(an, name)(rows if shape == "array" else iter(np.array_split(rows, 7))).value
            assert held == pytest.approx(value, rel=1e-5 if squared else 1e-6)

    def test_float64_loses_digits_at_a_mean_of_ten_thousand_spreads(self):
        """At the mean named in the documentation the naive formula still has its leading digits, but not ours."""
        centred = cloud(2000, 16)
        truth = readings(np.linalg.svd(centred - centred.mean(axis=0), compute_uv=False))
        ours = {name: getattr(an, name)(centred + SHIFT).value for name in truth}
        naive = errors_of(readings(naive_spectrum(centred + SHIFT)), truth)
        assert max(errors_of(ours, truth).values()) < 1e-13
        assert min(naive.values()) > 1e-10

    @pytest.mark.parametrize("shape", ["array", "stream"])
    @pytest.mark.parametrize("width", [48, 200])
    def test_a_float32_gram_matrix_loses_small_singular_values(self, seed, width, shape):
        """Singular values over six decades, float32 rows: the reference is the SVD of exactly these rows."""
        rng = np.random.default_rng(seed)
        left, right = (np.linalg.qr(rng.standard_normal((m, width)))[0] for m in (1500, width))
        rows = (left * np.logspace(0, -6, width) @ right.T).astype(np.float32)
        centred = as_float64(rows) - as_float64(rows).mean(axis=0)
        sigma = np.linalg.svd(centred, compute_uv=False)
        assert 5e5 < sigma[0] / sigma[-1] < 2e6
        single = rows - rows.mean(axis=0)
        naive = np.sqrt(np.linalg.eigvalsh((single.T @ single).astype(np.float64)).clip(0))[::-1]
        assert abs(naive.sum() / sigma.sum() - 1) > 2e-5
        truth = readings(sigma)
        for name in ("spectral_ratio_l1", "effective_rank"):
            assert abs(readings(naive)[name] / truth[name] - 1) > 2e-5
            held = getattr(an, name)(rows if shape == "array" else iter(np.array_split(rows, 7))).value
            assert held == pytest.approx(truth[name], rel=1e-6)

    @pytest.mark.parametrize("tail", [(1e-7,) * 9, (3e-6, 1e-7, 1e-9, 0.0), (0.0,), tuple(np.logspace(-5, -8, 12))])
    @pytest.mark.parametrize("shift", [0.0, 1e3])
    def test_a_few_small_singular_values_are_had_without_factoring_all_rows(self, seed, tail, shift, monkeypatch):
        """As after a LayerNorm, which takes a direction away. Squares know 1e-8 of the largest, this 1e-10."""
        rng = np.random.default_rng(seed)
        sigma = np.r_[np.logspace(0, -5, 48 - len(tail)), tail]
        left, right = (np.linalg.qr(rng.standard_normal((m, 48)))[0] for m in (2000, 48))
        left = np.linalg.qr(left - left.mean(axis=0))[0]
        rows = left * sigma @ right.T + shift * 2.0**-20 * rng.standard_normal(48)
        truth = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
        factored, plain = [], spectrum._triangle
        monkeypatch.setattr(spectrum, "_triangle", lambda *given: (factored.append(plain(*given)), factored[-1])[1])
        found = spectrum.spectrum(base.Workspace(as_rows(rows), an.Needs(moments="float64")))
        assert len(factored) == 1 and len(factored[0]) < 14
        held = found.values.mul(1999).sqrt().numpy()
        assert abs(held - truth).max() < 1e-10 * truth[0]
        scatter = (rows - rows.mean(axis=0)).T @ (rows - rows.mean(axis=0))
        if 1e-9 in tail:
            assert abs(np.sqrt(np.linalg.eigvalsh(scatter)[::-1].clip(0)) - truth).max() > 1e-9 * truth[0]
        assert (np.diff(held) <= 0).all() and found.values.shape == (48,)
        basis = found.vectors.numpy()
        np.testing.assert_allclose(basis.T @ basis, np.eye(48), atol=1e-13)
        lengths = np.linalg.norm((rows - rows.mean(axis=0)) @ basis, axis=0)
        assert abs(lengths - held).max() < 2e-10 * truth[0], "each value has its own direction"

    @pytest.mark.parametrize("shift", [0.0, SHIFT])
    @pytest.mark.parametrize("shape", ["array", "stream", "fewer rows than columns"])
    def test_roots_of_eigenvalue_noise_add_up_where_rank_is_missing(self, seed, shape, shift):
        """Rank 5 in width 200, exact whole numbers: the other 195 eigenvalues are rounding noise, its root 1e-8."""
        rng = np.random.default_rng(seed)
        n = 150 if shape == "fewer rows than columns" else 1500
        codes, axes = rng.integers(-8, 9, (n, 5)).astype(float), rng.integers(-8, 9, (5, 200)).astype(float)
        rows = codes @ axes + shift
        triangle = np.linalg.qr(axes.T)[1]
        truth = readings(np.linalg.svd((codes - codes.mean(axis=0)) @ triangle.T, compute_uv=False))
        for dtype, loss in ((np.float64, 5e-7), (np.float32, 1e-2)):
            x = rows.astype(dtype)
            assert np.array_equal(as_float64(x), rows)
            centred = x - x.mean(axis=0)
            naive = np.sqrt(np.linalg.eigvalsh((centred.T @ centred).astype(np.float64)).clip(0))[::-1]
            assert abs(readings(naive)["effective_rank"] / truth["effective_rank"] - 1) > loss
            for name in ("spectral_ratio_l1", "effective_rank"):
                held = getattr(an, name)(iter(np.array_split(x, 7)) if shape == "stream" else x).value
                assert held == pytest.approx(truth[name], rel=1e-9)


def exact_distances(rows, which, k):
    """Float64 distances by differences to the k nearest other rows, of some rows."""
    rows = as_float64(rows)
    found = []
    for i in which:
        d2 = ((rows - rows[i]) ** 2).sum(axis=1)
        d2[i] = np.inf
        found.append(np.sort(d2)[:k])
    return np.sqrt(np.array(found))


def squares_trick(rows):
    """Squared distances as |a|^2 + |b|^2 - 2 a.b in the rows' own precision, self left out."""
    norms = (rows * rows).sum(axis=1)
    d2 = norms[:, None] + norms[None, :] - 2 * rows @ rows.T
    np.fill_diagonal(d2, np.inf)
    return d2


def tight_clusters(n, width, dtype, seed):
    """Clusters far from the origin and from one another; inside each, spreads of a hundred units in the last place."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(-100, 101, (5, width))[np.arange(n) % 5]
    unit = np.finfo(dtype).eps * 128
    rows = centres + unit * np.round(100 * rng.standard_normal((n, width)))
    assert np.array_equal(rows.astype(dtype).astype(np.float64), rows)
    return rows.astype(dtype)


class TestDistances:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_products_underflow_into_ties_on_tight_clusters(self, seed, dtype):
        rows = tight_clusters(400, 12, dtype, seed)
        truth = exact_distances(rows, range(len(rows)), 2)
        assert truth.min() > 0
        naive = np.sqrt(np.sort(squares_trick(rows), axis=1)[:, :2].clip(0))
        assert (naive[:, 0] == 0).mean() > 0.5, "the naive formula should lose most nearest distances"
        found = an.nearest_neighbors(torch.from_numpy(rows), 2).distances.numpy()
        np.testing.assert_allclose(found, truth, rtol=1e-12)
        ratios = np.log(truth[:, 1] / truth[:, 0])
        by_hand = (len(rows) - 1) / math.fsum(ratios)
        assert an.two_nn(rows, variant="ml").value == pytest.approx(by_hand, rel=1e-12)
        assert an.mle(rows, k=2).value == pytest.approx(by_hand * len(rows) / (len(rows) - 1), rel=1e-12)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_with_principal_axes_as_well(self, one_seed, dtype):
        """Enough rows and columns for the search to plan: bounds from a few axes must not decide either."""
        rows = tight_clusters(4500, 40, dtype, one_seed)
        which = np.random.default_rng(one_seed).choice(len(rows), 200, replace=False)
        found = an.nearest_neighbors(torch.from_numpy(rows), 3).distances.numpy()[which]
        np.testing.assert_allclose(found, exact_distances(rows, which, 3), rtol=1e-12)

    def test_the_search_itself_refuses_what_is_not_finite(self):
        rows = torch.from_numpy(cloud())
        rows[5] = math.nan
        with pytest.raises(NonFiniteError, match="row 5"):
            an.nearest_neighbors(rows, 2)


class TestPartition:
    def test_exponentials_overflow(self):
        """Rows of length 1e3: exp(1000) is infinite, so that the naive ratio is NaN; the truth is exp(-0.5)."""
        long = np.array([[1000.0, 0], [-1000, 0], [0, 999.5], [0, -999.5]])
        with np.errstate(over="ignore", invalid="ignore"):
            z = [np.exp(long @ c).sum() for c in ([1, 0], [-1, 0], [0, 1], [0, -1])]
            assert math.isnan(min(z) / max(z))
        assert an.partition_isotropy(long).value == pytest.approx(math.exp(-0.5), rel=1e-12)

    def test_many_rows_of_any_length(self, seed):
        """Nearly equal spreads, so that the ratio of overflowing sums is of a size that can be compared."""
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((200, 4))
        rows *= 1000 / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = np.concatenate([rows, 1000 * np.eye(4), -1000 * np.eye(4)])
        rows = np.round(rows @ np.linalg.qr(rng.standard_normal((4, 4)))[0])
        found = an.partition_isotropy(rows)
        truth = oracles.partition_isotropy(rows)
        assert truth > 0
        assert found.value == pytest.approx(truth, rel=1e-8)

    def test_a_ratio_too_small_for_a_float_says_so(self):
        found = an.partition_isotropy(np.array([[1000.0, 0], [0, 1]]))
        assert found.value == 0.0
        assert any("exp(-" in note for note in found.notes)


def arccos_of(path):
    """The naive mean turning angle in degrees: the arc cosine of the cosine."""
    steps = np.diff(path, axis=0)
    unit = steps / np.linalg.norm(steps, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return float(np.degrees(np.arccos((unit[:-1] * unit[1:]).sum(axis=1))).mean())


class TestAngles:
    def arc(self, angle, steps, back=False, dtype=np.float64):
        """A path that turns by ``angle`` (or, with ``back``, by 180 degrees less that) at each step."""
        turned = angle * np.arange(steps)
        sign = np.where(np.arange(steps) % 2, -1.0, 1.0) if back else 1.0
        walk = np.cumsum(np.stack([np.cos(turned), np.sin(turned)], axis=1) * np.reshape(sign, (-1, 1)), axis=0)
        return walk.astype(dtype)

    @pytest.mark.parametrize("back", [False, True])
    def test_the_arc_cosine_is_blind_near_0_and_180_degrees(self, back):
        angle = 1e-7
        truth = math.degrees(angle)
        naive, found = (f(self.arc(angle, 8, back)) for f in (arccos_of, lambda path: an.turning_angle(path).value))
        from_end = [180 - value if back else value for value in (naive, found)]
        assert abs(from_end[0] / truth - 1) > 1e-3
        # 180 is known to 3e-14 in float64, positions to 1e-15 of a step
        assert from_end[1] == pytest.approx(truth, abs=1e-13)

    def test_straight_lines_are_zero_and_not_nan(self, seed):
        direction = np.random.default_rng(seed).standard_normal((300, 7))
        lines = direction[:, None, :] * np.array([0.0, 1.0, 2.0, 4.0])[None, :, None]
        assert math.isnan(sum(arccos_of(line) for line in lines)), "some cosine should exceed one"
        assert an.turning_angle(lines).value == pytest.approx(0.0, abs=1e-13)
        assert an.turning_angle(lines.astype(np.float32)).value == pytest.approx(0.0, abs=1e-5)


class TestCosine:
    @pytest.mark.parametrize("shape", ["array", "stream"])
    def test_lengths_from_1e_minus_30_to_1e30_in_float32(self, seed, shape):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((120, 16)) + 0.5
        rows = (rows * 10.0 ** rng.choice([-30, 0, 30], (120, 1))).astype(np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            unit = rows / np.sqrt((rows * rows).sum(axis=1, keepdims=True))
            assert not np.isfinite(unit).all(axis=1).any() or np.isnan((unit.sum(axis=0) ** 2).sum())
        found = an.mean_cosine(rows if shape == "array" else iter(np.array_split(rows, 5)))
        assert found.value == pytest.approx(oracles.mean_cosine(rows), abs=1e-6)
        assert found.stderr is not None and math.isfinite(found.stderr)

    def test_equal_rows_in_float32_read_one(self):
        found = [an.mean_cosine(torch.full((n, 3), 0.1)).value for n in (10, 100, 400, 512, 5000)]
        assert max(abs(value - 1) for value in found) < 2e-5

    @pytest.mark.parametrize("length", [1e-300, 1e-160, 1e160, 1e300])
    def test_lengths_in_float64(self, length):
        rows = cloud() + 0.5
        assert an.mean_cosine(rows * length).value == pytest.approx(oracles.mean_cosine(rows), abs=1e-12)

    @pytest.mark.parametrize("shape", ["array", "stream"])
    def test_a_zero_row_is_named(self, shape):
        rows = cloud()
        rows[[31, 140]] = 0
        rows[140, 0] = -0.0
        with pytest.raises(ZeroRowError, match="rows 31 and 140") if shape == "array" else pytest.raises(ZeroRowError):
            an.mean_cosine(rows if shape == "array" else iter(np.array_split(rows, 5)))


class TestLocal:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_width_one_has_no_isoscore(self, dtype):
        with pytest.raises(DegenerateError):
            an.local_isotropy(cloud(width=1).astype(dtype), measure="isoscore", k=K)

    def test_too_few_rows_are_counted(self):
        with pytest.raises(TooFewRowsError, match="got 2"):
            an.local_pca_dimension(cloud(2))

    def test_curvature_of_too_few_rows(self):
        with pytest.raises(TooFewRowsError, match="got 1"):
            an.curvature(cloud(1))


DIMENSION = 8
ESTIMATORS = {
    "two_nn facco": an.two_nn,
    "two_nn ml": lambda rows, **options: an.two_nn(rows, variant="ml", **options),
    "two_nn shape_of_learning": lambda rows, **options: an.two_nn(rows, variant="shape_of_learning", **options),
    "mle": an.mle,
    "gride": an.gride,
    "local_pca_dimension": an.local_pca_dimension,
}
LOCAL = {
    "curvature": lambda rows, **options: an.curvature(rows, dimension=2, **options),
    "local_isotropy": an.local_isotropy,
}


@pytest.fixture(scope="module")
def ball():
    """Flat, so that local PCA sees its dimension too; near the edge the others read up to a fifth low."""
    return manifolds.ball(3000, DIMENSION, width=24, seed=0)


@pytest.fixture(scope="module")
def clean(ball):
    return {name: call(ball) for name, call in ESTIMATORS.items()}


@pytest.mark.parametrize("name", ESTIMATORS)
class TestDuplicates:
    @pytest.mark.parametrize("share", [0.1, 0.5])
    def test_copies_do_not_move_a_dimension(self, ball, clean, name, share):
        """Copies anywhere: as the clean cloud within 10 %. Copies at the end: the same rows in the same order."""
        copies = int(share * len(ball))
        picks = torch.randperm(len(ball), generator=torch.Generator().manual_seed(1))[:copies]
        rows = torch.cat([ball, ball[picks]])
        found = ESTIMATORS[name](rows)
        assert found.value == clean[name].value
        assert found.n == len(ball)
        assert any(f"{copies:,} of {len(rows):,} rows were exact copies" in note for note in found.notes)
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))]
        assert ESTIMATORS[name](mixed).value == pytest.approx(clean[name].value, rel=0.1)
        assert clean[name].value == pytest.approx(DIMENSION, rel=0.25)  # a cloud of that dimension, not of its width

    def test_keep_never_gives_nan(self, ball, name):
        """With every row twice no row has a ratio; with one row copied often, its own neighbourhood is a point."""
        one_often = torch.cat([ball[:600], ball[:1].expand(200, -1)])
        for rows in (torch.cat([ball[:600], ball[:60]]), torch.cat([ball[:300], ball[:300]]), one_often):
            try:
                found = ESTIMATORS[name](rows, duplicates="keep")
            except DegenerateError as error:
                assert "two neighbours at different distances" in str(error) or "copies of one row only" in str(error)
                continue
            assert math.isfinite(found.value)
            assert found.value > 0
            assert found.n == len(rows)

    def test_error_names_the_rows(self, ball, name):
        rows = ball[:200].clone()
        rows[12], rows[150] = rows[7], rows[7]
        with pytest.raises(DuplicateRowsError, match=r"^2 of 200 rows .*rows 12 and 150\b"):
            ESTIMATORS[name](rows, duplicates="error")
        assert math.isfinite(ESTIMATORS[name](ball[:200], duplicates="error").value)

    def test_both_zeros_are_one_value(self, ball, name):
        rows = ball[:200].clone()
        rows[:, 0] = 0.0
        copies = rows[:20].clone()
        copies[:, 0] = -0.0
        for x in (torch.cat([rows, copies]), torch.cat([rows, copies]).float()):
            found = ESTIMATORS[name](x)
            assert found.n == 200
            assert any("20 of 220 rows were exact copies" in note for note in found.notes)

    def test_all_rows_equal(self, ball, name):
        for x in (ball[:1].expand(200, -1), torch.zeros(200, 24)):
            with pytest.raises(TooFewRowsError, match="distinct rows, got 1"):
                ESTIMATORS[name](x)
            with pytest.raises(DuplicateRowsError, match="rows 1, 2, 3, 4, 5 and 194 more"):
                ESTIMATORS[name](x, duplicates="error")

    def test_all_rows_equal_and_kept(self, ball, name):
        for x in (ball[:1].expand(200, -1), torch.zeros(200, 24)):
            with pytest.raises(DegenerateError):
                ESTIMATORS[name](x, duplicates="keep")


@pytest.mark.parametrize("name", LOCAL)
class TestLocalDuplicates:
    def test_copies_are_dropped(self, name):
        rows = cloud(400)
        found = LOCAL[name](np.concatenate([rows, rows[:40]]))
        assert found == LOCAL[name](rows) or found.value == LOCAL[name](rows).value
        assert any("40 of 440 rows were exact copies" in note for note in found.notes)

    @pytest.mark.parametrize("distinct", [1, 4, 40])
    @pytest.mark.parametrize("third", [1, 3])
    def test_kept_copies_have_no_extent(self, name, distinct, third):
        """Refused where a neighbourhood is one point, also where its mean is rounded (thirds); else a sane number."""
        rows = np.tile(cloud(distinct) / third, (400 // distinct, 1))
        try:
            found = LOCAL[name](rows, duplicates="keep")
        except DegenerateError:
            return
        assert distinct == 40
        assert all(abs(part.value) < 1e6 for part in everything(found))


def satellites(distinct, dtype):
    """64 copies of each of six rows, then other rows: the 64 nearest of a copy are 63 copies and one row more."""
    six = cloud(6, seed=3) / 3 + 40 * np.arange(6)[:, None]
    return np.concatenate([six.repeat(64, axis=0), cloud(distinct) / 3 - 40]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
class TestOneRowBesideCopies:
    """Two disjoint pairs of rows, both apart: there are none, so the corrected ratio is zero over zero."""

    def test_refused_where_every_neighbourhood_is_like_that(self, dtype):
        rows = satellites(0, dtype)
        frames = local.local_frames(torch.from_numpy(rows), local.neighborhoods(torch.from_numpy(rows), 64, 384), 1)
        noise = local.inverse_participation(frames.coordinates)
        assert not ((noise - noise.median()).abs() < 1e-3).all(), "the plain ratio should be rounding noise"
        with pytest.raises(DegenerateError, match="one row stands apart from copies"):
            an.local_pca_dimension(rows, rule="participation", duplicates="keep", anchors=384)
        with pytest.raises(DegenerateError, match="one row stands apart from copies"):
            an.local_isotropy(rows, duplicates="keep", anchors=384)
        with pytest.raises(DegenerateError, match="a k-means cell holds copies of one row only"):
            an.local_isotropy(rows, measure="spectral_ratio", duplicates="keep")
        assert an.local_pca_dimension(rows, duplicates="keep").value == 1.0

    def test_cells_start_from_distinct_rows(self, dtype):
        labels = local._k_means(torch.from_numpy(satellites(0, dtype)), 6, 0)
        assert labels.reshape(6, 64).unique(dim=1).reshape(-1).unique().tolist() == list(range(6))

    def test_left_out_with_a_note_where_others_remain(self, dtype):
        rows, plain = satellites(400, dtype), (cloud(400) / 3).astype(dtype)
        found = an.local_pca_dimension(rows, rule="participation", duplicates="keep", anchors=len(rows))
        assert any("384 of 784 neighbourhoods left out" in note for note in found.notes)
        alone = an.local_pca_dimension(plain, rule="participation", anchors=len(plain))
        assert found.value == pytest.approx(alone.value, rel=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_at_right_angles_have_no_corrected_ratio(dtype):
    """Differences of disjoint pairs are orthogonal: the unbiased ``tr S^2`` is zero, and its inverse rounding noise."""
    rows = (np.linalg.qr(np.random.default_rng(0).standard_normal((80, 80)))[0] * 3).astype(dtype)
    for measure in ("isoscore", "participation_ratio"):
        with pytest.raises(TooFewRowsError, match="take a larger k"):
            an.local_isotropy(rows, k=6, measure=measure)
    with pytest.raises(TooFewRowsError, match="take a larger k"):
        an.local_pca_dimension(rows, k=6, rule="participation")


def test_a_rounded_mean_hides_no_copies_in_a_cell():
    rows = torch.full((36, 2), 0.1, dtype=torch.float64)
    assert (rows - rows.mean(dim=0)).any(), "the mean should be rounded"
    with pytest.raises(DegenerateError, match="copies of one row only"):
        local._cell_coordinates(rows, 1, 4, 0)


def test_a_message_about_copies_says_how_it_counts():
    """Row 60 of the input, number 50 of those that the mask keeps."""
    rows = cloud(100)
    rows[60] = rows[50]
    mask = np.ones(100, dtype=bool)
    mask[:10] = False
    with pytest.raises(DuplicateRowsError, match=r"row 60\b|row 50 \(counted among the kept rows\)"):
        an.two_nn(rows, mask=mask, duplicates="error")


NEAR = {
    "two_nn facco": oracles.two_nn_facco,
    "two_nn ml": oracles.two_nn_ml,
    "two_nn shape_of_learning": oracles.two_nn_shape_of_learning,
    "mle": lambda rows: oracles.mle(rows, 20),
    "gride": lambda rows: oracles.gride(rows, 1),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_copies_are_rows_of_their_own(name, seed):
    """At 1e-12 of a row's length two float64 rows differ: they are kept, and distances of 1e-12 come out exactly."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((120, 5))
    close = rows[:40] * (1 + 1e-12 * rng.uniform(1, 2, (40, 5)))
    both = np.concatenate([rows, close])
    found = ESTIMATORS[name](both)
    assert found.n == 160
    assert not any("exact copies" in note for note in found.notes)
    assert found.value == pytest.approx(NEAR[name](both), rel=1e-6 if name == "gride" else 1e-9)


def test_curvature_refuses_dimensions_where_no_neighbourhood_is_local():
    rows = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0))
    with pytest.raises(OptionError, match="hardly local; give a smaller dimension, or k yourself"):
        an.curvature(rows)
    assert an.curvature(rows, dimension=4).value >= 0


@pytest.mark.parametrize("factor", [1e20, 1e30])
def test_neighbours_beside_one_enormous_row(factor):
    rows = torch.randn(300, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = torch.cdist(rows[1:], rows[1:]).fill_diagonal_(torch.inf)
    rows[0] *= factor
    found = an.nearest_neighbors(rows, 3).distances[1:]
    torch.testing.assert_close(found, others.topk(3, largest=False).values, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("k", [1, 2])
def test_neighbours_whose_squares_are_no_float32_are_found(k):
    """Sixty rows so near the centre that their squared lengths are 0 in float32: all bounds tie, none may settle."""
    draw = torch.Generator().manual_seed(4)
    far, near = torch.randint(-9, 9, (30, 6), generator=draw), torch.randn(30, 6, generator=draw, dtype=torch.float64)
    rows = torch.cat([far, -far, 1e-25 * near, -1e-25 * near])  # whole numbers in pairs: the mean is exactly zero
    found = an.nearest_neighbors(rows, k)
    close = rows[60:]
    truth = (close[:, None] - close[None]).norm(dim=2).fill_diagonal_(torch.inf).topk(k, largest=False).values
    assert torch.allclose(found.distances[60:], truth, rtol=1e-9, atol=0.0)


@pytest.fixture
def medium():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield torch.backends.mkldnn.matmul
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", CALLS)
def test_the_precision_of_a_training_step_is_not_that_of_a_measure(name, medium):
    """An autocast around the call, products of float32 that may be made of bfloat16: the same bits all the same."""
    rows = cloud(400, 24).astype(np.float32) + 0.3
    torch.set_float32_matmul_precision("highest")
    want = CALLS[name](rows)
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALLS[name](rows) == want


def test_the_precision_of_a_training_step_is_not_that_of_a_table(medium):
    rows, names = cloud(400, 24).astype(np.float32) + 0.3, ["mean_cosine", "mle", "two_nn"]
    torch.set_float32_matmul_precision("highest")
    want = an.measure(rows, names)
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert an.measure(rows, names) == want


@pytest.mark.parametrize("k", [1, 3])
def test_neighbours_in_the_precision_of_a_training_step(k, medium):
    rows = torch.randn(3000, 40, generator=torch.Generator().manual_seed(0))
    truth = torch.cdist(rows.double(), rows.double(), compute_mode="donot_use_mm_for_euclid_dist")
    truth = truth.fill_diagonal_(torch.inf).topk(k, largest=False).values
    for plan in (None, Plan(axes=40, width=40, survivors=0.0), Plan(axes=8, width=40, survivors=0.0)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = an.nearest_neighbors(rows, k, plan=plan).distances
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=0.0)


def test_precision_is_that_of_where_the_rows_lie_however_they_are_given(monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "full_precision", lambda device: (asked.append(device.type), nullcontext())[1])
    same = precision.in_full_precision(lambda *rows, **named: None)
    same(torch.zeros(1, device="meta"))
    same(rows=torch.zeros(1, device="meta"))
    same([1.0], k=2)
    assert asked == ["meta", "meta", "cpu"]


def test_the_switch_of_precision_is_back_when_the_last_thread_is_out(medium):
    """It is one for all threads: the first to come out must not give it back while another is inside."""
    inside, out = threading.Event(), threading.Event()

    def other():
        with full_precision(torch.device("cpu")):
            inside.set()
            out.wait(30)

    thread = threading.Thread(target=other)
    with full_precision(torch.device("cpu")):
        thread.start()
        assert inside.wait(30) and medium.fp32_precision == "ieee"
    assert medium.fp32_precision == "ieee"
    out.set()
    thread.join(30)
    assert medium.fp32_precision == "bf16" and torch.get_float32_matmul_precision() == "medium"
