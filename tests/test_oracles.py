"""Every public measure against a slow, independent definition (oracles.py), over data of many kinds and in every form.

Tolerances. ``EXACT``: float64 input; a value is a short chain of sums over at most a few thousand terms, whose rounding
stays below 1e-13 of the largest term, and no quantity here is a difference of nearly equal ones by more than two
digits. Looser ones stand beside the case with their reason.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import oracles
import pytest
import torch

import anisoscope as an
from anisoscope.errors import DuplicateRowsError, OptionError, UnknownNameError
from anisoscope.measures import base, dimension
from anisoscope.measures import spectrum as spectra
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.measures.plan import Plan, choose_plan
from anisoscope.measures.search import distances_within
from anisoscope.measures.spectrum import spectrum
from anisoscope.measures.table import measure_names
from anisoscope.measures.uncertainty import ErrorRows
from anisoscope.rows import as_rows
from anisoscope.stats.moments import Moments
from anisoscope.theory.manifolds import flat_torus, gaussian

EXACT = 1e-11
SEARCHED = 1e-6  # oracles.gride maximises a likelihood by its values, which is good to 1e-7
MIXED = 5e-6  # products of float32 rows are float32: 2^-24 each, a few times over in ratios of squares


# --- Data ------------------------------------------------------------------------------------------------------------


def generic(rng):
    """Anisotropic Gaussian rows with a mean and mixed columns."""
    return rng.standard_normal((48, 6)) * [4, 2, 1, 1, 0.5, 0.2] @ rng.standard_normal((6, 6)) + rng.normal(0, 3, 6)


def heavy_tailed(rng):
    return rng.standard_t(2.5, (48, 5)) * [3, 1, 1, 1, 0.5] + 1.0


def short(rng):
    """Fewer rows than columns."""
    return rng.standard_normal((15, 24)) * np.linspace(2, 0.3, 24) + 0.7


def rank_deficient(rng):
    """Three dimensions in eight, off the origin."""
    return rng.standard_normal((48, 3)) * [3, 1, 0.5] @ rng.standard_normal((3, 8)) + rng.normal(0, 1, 8)


def six_decades(rng):
    """Singular values from 1 to 1e-6: a Gram matrix alone would lose half the digits of the small ones."""
    return rng.standard_normal((60, 4)) * [1, 1e-2, 1e-4, 1e-6]


def drifting(rng):
    """More rows than one chunk, whose mean moves: chunks must be combined about the common mean."""
    n = 9001
    return rng.standard_normal((n, 5)) * [3, 2, 1, 1, 0.5] + np.outer(np.arange(n) / n * 20, [1, -1, 0.5, 0, 2])


def few(rng):
    """So few rows that all ordered quadruples can be summed over."""
    return rng.standard_normal((9, 4)) * [3, 2, 1, 0.5] + 2.0


DATA = {f.__name__: f for f in (generic, heavy_tailed, short, rank_deficient, six_decades, drifting, few)}
ALWAYS = ("generic", "heavy_tailed", "short", "rank_deficient")


def draw(name, seed):
    return DATA[name](np.random.default_rng([seed, list(DATA).index(name)]))


def second(X):
    """A next layer for X: part linear, part not, of the same shape."""
    rng = np.random.default_rng(X.size)
    return np.tanh(X) @ rng.standard_normal((X.shape[1], X.shape[1])) + 0.5 * X + rng.standard_normal(X.shape) * 0.1


# --- Definitions that are a line away from the oracles ---------------------------------------------------------------


def u_statistics(X):
    """Unbiased (tr Sigma)^2 and tr(Sigma^2): the kernels of oracles.participation_ratio_corrected, by inner products.

    Sums over distinct indices of products of uncentred inner products G; second route of the oracle's self-check.
    """
    G, n = X @ X.T, len(X)
    distinct = np.ones((n, n, n), dtype=bool)
    for a in range(n):
        distinct[a, a, :] = distinct[a, :, a] = distinct[:, a, a] = False
    off = ~np.eye(n, dtype=bool)
    d = np.diag(G)
    pair = (np.outer(d, d) * off).sum() / (n * (n - 1))
    pair_of_squares = (G**2 * off).sum() / (n * (n - 1))
    triple = np.einsum("i,jk,ijk->", d, G, distinct) / (n * (n - 1) * (n - 2))
    triple_of_squares = np.einsum("ij,ik,ijk->", G, G, distinct) / (n * (n - 1) * (n - 2))
    quadruple = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                rest = [a for a in range(n) if a not in (i, j)]
                block = G[np.ix_(rest, rest)]
                quadruple += G[i, j] * (block.sum() - np.trace(block))
    quadruple /= n * (n - 1) * (n - 2) * (n - 3)
    return pair - 2 * triple + quadruple, pair_of_squares - 2 * triple_of_squares + quadruple


def star_corrected(X, zeta, reference):
    """IsoScore of (1-z) S + z R with R fixed: the squares of S alone are biased, and replaced by U-statistics."""
    square, frobenius = u_statistics(X)
    S, keep = oracles.covariance(X), 1 - zeta
    trace = keep**2 * square + 2 * keep * zeta * np.trace(S) * np.trace(reference) + zeta**2 * np.trace(reference) ** 2
    size = keep**2 * frobenius + 2 * keep * zeta * np.sum(S * reference) + zeta**2 * np.sum(reference**2)
    return (trace / size - 1) / (len(S) - 1)


def star_corrected_white(X, zeta):
    """The same with R = (tr S / D) I, which moves with S: |M|^2 = (1-z)^2 tr S^2 + (1 - (1-z)^2) (tr S)^2 / D."""
    D = X.shape[1]
    ratio = 1 / ((1 - zeta) ** 2 / oracles.participation_ratio_corrected(X) + (1 - (1 - zeta) ** 2) / D)
    return (ratio - 1) / (D - 1)


def balls(X, k):
    return [oracles.neighbourhood(X, i, k) for i in range(len(X))]


def local_counts(X, k, rule):
    spectra = oracles.local_pca_spectra(X, range(len(X)), k)
    if rule == "fukunaga_olsen":
        return np.mean([np.sum(v >= 0.05 * v[0]) for v in spectra])
    return np.mean([1 + np.sum(np.cumsum(v) / v.sum() < 0.95) for v in spectra])


def pooled_ratio(X, k):
    """Inverse of the mean over balls of the inverse bias-corrected participation ratio."""
    return 1 / np.mean([1 / oracles.participation_ratio_corrected(P) for P in balls(X, k)])


def corrected_form(X, anchor, k, d):
    """(|II|^2, (|tr II|/d)^2) at one anchor: oracle's II, less the expected squares of its noise.

    The noise of least squares with error variance s^2 per normal direction is s^2 (A^T A)^-1, s^2 = RSS / (rows -
    columns), summed over normals. II_aa is twice its coefficient, and II_ab stands at two places of the sum.
    """
    II = oracles.second_fundamental_form(X, anchor, k, d)
    P = oracles.neighbourhood(X, anchor, k)
    _, _, Vt = np.linalg.svd(oracles.centred(P), full_matrices=False)
    t, z = (P - P[0]) @ Vt[:d].T, (P - P[0]) @ Vt[d:].T
    pairs = [(a, b) for a in range(d) for b in range(a, d)]
    A = np.column_stack([np.ones(k + 1), t, *[t[:, a] * t[:, b] for a, b in pairs]])
    residual = z - A @ np.linalg.lstsq(A, z, rcond=None)[0]
    noise = np.sum(residual**2) / (A.shape[0] - A.shape[1])
    spread = noise * np.linalg.inv(A.T @ A)[1 + d :, 1 + d :]
    weight = [4 if a == b else 2 for a, b in pairs]
    squares = [a == b for a, b in pairs]
    trace = np.trace(II, axis1=1, axis2=2)
    form = np.sum(II**2) - np.diag(spread) @ weight
    return form, (np.sum(trace**2) - 4 * spread[np.ix_(squares, squares)].sum()) / d**2


def root_mean_form(X, k, d, which):
    return math.sqrt(max(np.mean([corrected_form(X, i, k, d)[which] for i in range(len(X))]), 0))


def part(estimate, name):
    return estimate.parts[name]


# --- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One measure with options: ``call`` on anything that holds rows, ``truth`` on a float64 array of the same rows."""

    name: str
    call: object
    truth: object
    on: tuple = ALWAYS
    rtol: float = EXACT
    narrow: float = EXACT
    """Relative tolerance for float32, float16 and bfloat16 input; the oracle gets the same numbers as float64."""
    narrow_atol: float = 0.0

    @property
    def measure(self):
        return self.name.split()[0]


NEAR = ("generic", "heavy_tailed", "rank_deficient")
SPECTRAL = (*ALWAYS, "six_decades", "drifting")
SMALL = ("few",)
LOCAL32 = 1e-4  # local variances of float32 rows are good to 1e-6 of the largest, ratios and entropies of them less
CURVED = 1e-6  # the fit squares a condition number of 1e3 or so between constant and quadratic columns

CASES = [
    Case("spectral_ratio", an.spectral_ratio, oracles.spectral_ratio, SPECTRAL, narrow=MIXED),
    Case("stable_rank", an.stable_rank, oracles.stable_rank, SPECTRAL, narrow=MIXED),
    # sums of unsquared singular values of a rank-deficient cloud: the oracle's own zeros are 1e-16 of the largest each
    Case("spectral_ratio_l1", an.spectral_ratio_l1, oracles.spectral_ratio_l1, SPECTRAL, 1e-10),
    Case("effective_rank", an.effective_rank, oracles.effective_rank, SPECTRAL, 1e-10),
    Case("effective_rank_lambda", an.effective_rank_lambda, oracles.effective_rank_lambda, SPECTRAL),
    Case("mean_cosine", an.mean_cosine, oracles.mean_cosine, narrow=0.0, narrow_atol=2e-7),  # documented: 1e-7 absolute
    Case(
        "participation_ratio plugin",
        functools.partial(an.participation_ratio, bias="plugin"),
        oracles.participation_ratio_plugin,
        SPECTRAL,
        narrow=MIXED,
    ),
    # a sum over quadruples and a combination of moments lose digits to the mean, the latter far fewer
    Case("participation_ratio", an.participation_ratio, oracles.participation_ratio_corrected, SMALL, 1e-9, 1e-4),
    Case("isoscore", an.isoscore, lambda X: (oracles.participation_ratio_corrected(X) - 1) / 3, SMALL, 1e-9, 1e-4),
    Case(
        "isoscore plugin",
        functools.partial(an.isoscore, bias="plugin"),
        oracles.isoscore_published,
        (*ALWAYS, "six_decades"),
        1e-10,  # the published steps take 1 from a number near 1 where one direction rules
        5e-5,
    ),
    Case(
        "isoscore_star plugin",
        functools.partial(an.isoscore_star, zeta=0.3, bias="plugin"),
        lambda X: oracles.isoscore_star(X, 0.3),
        SPECTRAL,
        narrow=5e-5,
    ),
    Case("isoscore_star", an.isoscore_star, lambda X: star_corrected_white(X, 0.1), SMALL, 1e-9, 1e-4),
    Case("partition_isotropy", an.partition_isotropy, oracles.partition_isotropy, ("generic", "heavy_tailed", "short")),
    Case("two_nn facco", an.two_nn, oracles.two_nn_facco, NEAR),
    Case("two_nn ml", functools.partial(an.two_nn, variant="ml"), oracles.two_nn_ml, NEAR),
    Case(
        "two_nn shape_of_learning",
        functools.partial(an.two_nn, variant="shape_of_learning"),
        oracles.two_nn_shape_of_learning,
        NEAR,
        1e-9,  # the lowest ratios: log mu of 1e-3 has lost three digits of a distance
        1e-9,
    ),
    Case(
        "two_nn batches",
        functools.partial(an.two_nn, batch_rows=15),
        lambda X: np.mean([oracles.two_nn_facco(B) for B in np.array_split(X, len(X) // 15)]),
        NEAR,
    ),
    Case("mle pooled", functools.partial(an.mle, k=7), lambda X: oracles.mle(X, 7), NEAR),
    Case("mle mean", functools.partial(an.mle, k=6, pooling="mean"), lambda X: oracles.mle_levina_bickel(X, 6), NEAR),
    Case(
        "mle range",
        functools.partial(an.mle, k=(3, 6)),
        lambda X: np.mean([oracles.mle(X, k) for k in (3, 4, 5, 6)]),
        NEAR,
    ),
    Case(
        "mle mean range",
        functools.partial(an.mle, k=(3, 5), pooling="mean"),
        lambda X: np.mean([oracles.mle_levina_bickel(X, k) for k in (3, 4, 5)]),
        NEAR,
    ),
    Case("gride 1", functools.partial(an.gride, scales=(1,)), oracles.two_nn_ml, NEAR, 1e-10, 1e-10),
    Case("gride 2", functools.partial(an.gride, scales=(2,)), lambda X: oracles.gride(X, 2), NEAR, SEARCHED, SEARCHED),
    Case("gride 5", functools.partial(an.gride, scales=(5,)), lambda X: oracles.gride(X, 5), NEAR, SEARCHED, SEARCHED),
    Case(
        "gride radius",
        lambda rows, **kw: part(an.gride(rows, scales=(1, 3), **kw), "radius n=3"),
        lambda X: oracles.neighbors(X, 6)[0][:, 5].mean(),
        NEAR,
    ),
    Case("turning_angle", an.turning_angle, oracles.turning_angle, ALWAYS, narrow=MIXED),
    Case(
        "local_pca_dimension fukunaga_olsen",
        functools.partial(an.local_pca_dimension, k=12, anchors=10**6),
        lambda X: local_counts(X, 12, "fukunaga_olsen"),
        NEAR,
    ),
    Case(
        "local_pca_dimension explained",
        functools.partial(an.local_pca_dimension, k=12, anchors=10**6, rule="explained"),
        lambda X: local_counts(X, 12, "explained"),
        NEAR,
    ),
    Case(
        "local_pca_dimension participation",
        functools.partial(an.local_pca_dimension, k=6, anchors=10**6, rule="participation"),
        lambda X: pooled_ratio(X, 6),
        ("few", "short"),
        1e-9,
        LOCAL32,
    ),
    Case(
        "local_isotropy isoscore",
        functools.partial(an.local_isotropy, k=6, anchors=10**6),
        lambda X: (pooled_ratio(X, 6) - 1) / (X.shape[1] - 1),
        ("few", "short"),
        1e-9,
        LOCAL32,
    ),
    Case(
        "local_isotropy spectral_ratio",
        functools.partial(an.local_isotropy, measure="spectral_ratio", k=9, anchors=10**6),
        lambda X: np.mean([oracles.spectral_ratio(P) for P in balls(X, 9)]),
        NEAR,
        narrow=LOCAL32,
    ),
    Case(
        "local_isotropy effective_rank",
        functools.partial(an.local_isotropy, measure="effective_rank", k=9, anchors=10**6),
        lambda X: np.mean([oracles.effective_rank(P) for P in balls(X, 9)]),
        (
            "generic",
            "heavy_tailed",
        ),  # not where singular values are zero: the root of a rounded Gram matrix is 1e-8
        1e-9,
        LOCAL32,
    ),
    Case(
        "local_isotropy cells",  # one cell of all rows
        lambda rows, **kw: part(an.local_isotropy(rows, measure="spectral_ratio", k=9, cells=1, **kw), "cells"),
        oracles.spectral_ratio,
        NEAR,
        narrow=MIXED,
    ),
    Case(
        "local_isotropy global",
        lambda rows, **kw: part(an.local_isotropy(rows, measure="effective_rank", k=9, **kw), "global"),
        oracles.effective_rank,
        NEAR,
    ),
    Case(
        "curvature",
        functools.partial(an.curvature, dimension=2, k=20, anchors=10**6),
        lambda X: root_mean_form(X, 20, 2, 0),
        ("generic", "heavy_tailed"),
        CURVED,
        1e-3,  # local coordinates of float32 rows come from a Gram matrix that is good to 1e-7
    ),
    Case(
        "curvature mean",
        lambda rows, **kw: part(an.curvature(rows, dimension=2, k=20, anchors=10**6, **kw), "mean curvature"),
        lambda X: root_mean_form(X, 20, 2, 1),
        ("generic", "heavy_tailed"),
        CURVED,
        1e-2,  # a smaller number from the same squares
    ),
    Case(
        "curvature visible",
        lambda rows, **kw: part(an.curvature(rows, dimension=2, k=20, anchors=10**6, **kw), "visible curvature"),
        lambda X: oracles.visible_curvature(X, range(len(X)), 20, 2),
        NEAR,
        1e-9,
        LOCAL32,
    ),
]

by_name = {"argvalues": CASES, "ids": [case.name.replace(" ", "-") for case in CASES]}
each_case = pytest.mark.parametrize("case", **by_name)


def agree(got, want, rtol, atol=0.0):
    np.testing.assert_allclose(float(got), float(want), rtol=rtol, atol=atol)


def test_the_list_of_measures_can_be_asked_for_twice():
    """A function named like a package below it would be hidden by the first import of that package."""
    assert an.measure_names() == an.measure_names() == measure_names()


def test_the_oracles_give_the_answers_worked_out_by_hand():
    oracles.self_check()


def test_every_registered_measure_has_a_case():
    assert {case.measure for case in CASES} == set(measure_names())


@pytest.mark.parametrize(
    ("case", "data"), [pytest.param(c, d, id=f"{c.name.replace(' ', '-')}-{d}") for c in CASES for d in c.on]
)
def test_value_is_the_oracle(case, data, seed):
    X = draw(data, seed)
    agree(case.call(X), case.truth(X), case.rtol)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_input_is_the_oracle_of_the_same_numbers(case, dtype, one_seed):
    rows = torch.from_numpy(draw(case.on[0], one_seed)).to(dtype)
    agree(case.call(rows), case.truth(rows.double().numpy()), case.narrow, case.narrow_atol)


@each_case
def test_every_form_of_the_same_rows_gives_the_same_value(case, one_seed):
    """Bit for bit where the same sums are formed; views are multiplied, and chunks summed, in another order."""
    X = draw(case.on[0], one_seed)
    want = case.call(X).value
    rows, mask = padded(X, one_seed)
    same = [torch.from_numpy(X), np.asfortranarray(X), X.astype(">f8"), torch.from_numpy(X).requires_grad_()]
    assert [case.call(x).value for x in same] == [want] * len(same)
    if case.measure != "turning_angle":  # whose value depends on where paths end: see below
        assert case.call(rows, mask=mask).value == want
        assert case.call(rows.numpy(), mask=mask.numpy()).value == want
    chunks = np.split(X, sorted(np.random.default_rng(one_seed).integers(0, len(X) + 1, 3).tolist()))
    for other in (torch.from_numpy(np.repeat(X, 2, axis=1))[:, ::2], chunks, map(torch.from_numpy, chunks)):
        np.testing.assert_allclose(case.call(other).value, want, rtol=max(case.rtol, 1e-10))


def padded(X, seed):
    """The rows of X in order, in paths (s, t, d) with masked rows strewn in."""
    rng = np.random.default_rng(seed)
    paths, length = 5, len(X)
    mask = torch.zeros(paths * length, dtype=torch.bool)
    mask[np.sort(rng.choice(paths * length, length, replace=False))] = True
    rows = torch.full((paths * length, X.shape[1]), torch.nan, dtype=torch.float64)
    rows[mask] = torch.from_numpy(X)
    return rows.reshape(paths, length, -1), mask.reshape(paths, length)


def test_turning_angle_stops_at_masked_rows_and_at_the_ends_of_paths(seed):
    rng = np.random.default_rng(seed)
    rows, mask = rng.standard_normal((4, 30, 3)).cumsum(axis=1), rng.random((4, 30)) < 0.9
    total = count = 0
    for path, flags in zip(rows, mask, strict=True):
        ends = np.flatnonzero(~flags).tolist()
        for a, b in zip([-1, *ends], [*ends, 30], strict=True):
            if b - a - 1 >= 3:
                total += oracles.turning_angle(path[a + 1 : b]) * (b - a - 3)
                count += b - a - 3
    got = an.turning_angle(rows, mask=mask)
    assert got.n == count
    agree(got, total / count, EXACT)


# --- Two inputs ------------------------------------------------------------------------------------------------------

LINEARITY = {
    "plugin": ({"bias": "plugin"}, oracles.linearity),
    "corrected": ({}, oracles.linearity_adjusted),
    "orthogonal": ({"map": "orthogonal"}, oracles.linearity_orthogonal),
    "update plugin": ({"bias": "plugin", "target": "update"}, lambda X, Y: oracles.linearity(X, Y - X)),
    "update": ({"target": "update"}, lambda X, Y: oracles.linearity_adjusted(X, Y - X)),
    "update orthogonal": (
        {"map": "orthogonal", "target": "update"},
        lambda X, Y: oracles.linearity_orthogonal(X, Y - X),
    ),
}
each_linearity = pytest.mark.parametrize("option", LINEARITY)


def next_layer(X, seed):
    """A next layer: part linear, part not."""
    rng = np.random.default_rng([seed, 9])
    return np.tanh(X) @ rng.standard_normal((X.shape[1], X.shape[1])) + 0.5 * X + rng.standard_normal(X.shape)


@each_linearity
@pytest.mark.parametrize("data", [*NEAR, "drifting"])
def test_linearity_is_the_oracle(option, data, seed):
    """1e-10: the fit goes through normal equations, which square a condition number of about 1e2."""
    options, truth = LINEARITY[option]
    X = draw(data, seed)
    Y = next_layer(X, seed)
    agree(an.linearity(X, Y, **options), truth(X, Y), 1e-10)


def test_linearity_of_few_rows(seed):
    """With n <= D any next layer is a linear map of this one; the corrected number refuses, the orthogonal one goes."""
    X = draw("short", seed)
    Y = next_layer(X, seed)
    agree(an.linearity(X, Y, bias="plugin"), 1.0, EXACT)
    agree(an.linearity(X, Y, map="orthogonal"), oracles.linearity_orthogonal(X, Y), EXACT)
    with pytest.raises(an.AnisoscopeError, match="fits 15 rows exactly"):
        an.linearity(X, Y)


@each_linearity
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_linearity_of_narrow_rows(option, dtype, one_seed):
    """Widened exactly; but the update is a difference formed in float32, good to 2^-24 of the rows."""
    options, truth = LINEARITY[option]
    X = draw("generic", one_seed)
    x, y = (torch.from_numpy(a).to(dtype) for a in (X, next_layer(X, one_seed)))
    want = truth(x.double().numpy(), y.double().numpy())
    agree(an.linearity(x, y, **options), want, MIXED if "target" in options else 1e-9)


def test_linearity_of_unequal_widths(seed):
    X = draw("generic", seed)
    Y = next_layer(X, seed)[:, :4]
    agree(an.linearity(X, Y), oracles.linearity_adjusted(X, Y), 1e-10)
    agree(an.linearity(X, Y, map="orthogonal"), oracles.linearity_orthogonal(X, Y), 1e-10)


def test_linearity_forms(seed):
    """However the two layers are cut, row i of one belongs to row i of the other."""
    X = draw("generic", seed)
    Y = next_layer(X, seed)
    want = an.linearity(X, Y).value
    assert an.linearity(torch.from_numpy(X), Y).value == want
    rows, mask = padded(X, seed)
    others = torch.zeros_like(rows)
    others[mask] = torch.from_numpy(Y)
    agree(an.linearity(rows, others, mask=mask), want, EXACT)
    agree(an.linearity(np.split(X, [10, 20]), np.split(Y, [10, 20])), want, EXACT)
    agree(an.linearity(np.split(X, [10, 20]), np.split(Y, [5, 33])), want, EXACT)
    agree(an.linearity(X, np.split(Y, [7])), want, EXACT)


def test_linearity_of_paths_against_plain_rows():
    """Paths of 30 cut at another row than plain rows do, once there is more than one chunk."""
    X = draw("drifting", 0)[:9000]
    Y = next_layer(X, 0)
    agree(an.linearity(X.reshape(300, 30, -1), Y), an.linearity(X, Y), EXACT)


@pytest.mark.parametrize("form", ["rows", "moments"])
@pytest.mark.parametrize("zeta", [0.0, 0.25, 1.0])
def test_isoscore_star_with_a_reference(form, zeta, seed):
    rng = np.random.default_rng(seed)
    X, R = draw("few", seed), rng.standard_normal((40, 4)) * [1, 1, 2, 3] - 1
    reference = R if form == "rows" else Moments.of(torch.from_numpy(R))
    S_ref = oracles.covariance(R)
    plugin = an.isoscore_star(X, reference=reference, zeta=zeta, bias="plugin")
    agree(plugin, oracles.isoscore_star(X, zeta, S_ref), EXACT)
    # 1e-9: the second route sums uncentred products, and loses digits to the mean
    agree(an.isoscore_star(X, reference=reference, zeta=zeta), star_corrected(X, zeta, S_ref), 1e-9)


# --- Copies ----------------------------------------------------------------------------------------------------------


def with_copies(X, share, seed):
    """A share of the rows are copies of others, in random places."""
    rng = np.random.default_rng([seed, 3])
    X = X.copy()
    target = rng.permutation(len(X))
    count = int(share * len(X))
    X[target[:count]] = X[rng.choice(target[count:], count)]
    return X


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("data", NEAR)
def test_shape_of_learning_counts_copies_as_published(data, share, seed):
    X = with_copies(np.concatenate([draw(data, 100 * part + seed) for part in range(4)]), share, seed)
    got = an.two_nn(X, variant="shape_of_learning", duplicates="keep")
    agree(got, oracles.two_nn_shape_of_learning(X), 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_kept_copies_have_no_ratio_and_dropped_ones_are_gone(share, seed):
    X = with_copies(draw("generic", seed), share, seed)
    distinct = X[np.sort(np.unique(X, axis=0, return_index=True)[1])]
    dropped = an.two_nn(X, variant="ml")
    assert dropped.n == len(distinct) < len(X)
    agree(dropped, oracles.two_nn_ml(distinct), EXACT)
    agree(an.two_nn(X), oracles.two_nn_facco(distinct), EXACT)
    agree(an.mle(X, k=5), oracles.mle(distinct, 5), EXACT)
    r, _ = oracles.neighbors(X, 2)
    logs = np.log(r[r[:, 0] > 0, 1] / r[r[:, 0] > 0, 0])
    agree(an.two_nn(X, variant="ml", duplicates="keep"), (len(logs) - 1) / logs.sum(), EXACT)
    for name in ("two_nn", "mle", "gride", "local_pca_dimension", "curvature"):
        with pytest.raises(DuplicateRowsError, match="exact copies"):
            getattr(an, name)(X, duplicates="error")


def test_zero_and_minus_zero_are_one_row():
    X = draw("generic", 0)
    X[3] = X[7] = 0.0
    X[7, 2] = -0.0
    assert an.two_nn(X).n == len(X) - 1


# --- Neighbours ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ALWAYS)
def test_small_searches_are_the_oracle(data, seed):
    X = draw(data, seed)
    found = an.nearest_neighbors(torch.from_numpy(X), 5)
    distances, indices = oracles.neighbors(X, 5)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-13)
    np.testing.assert_array_equal(found.indices, indices)


def brute(rows, k):
    """Distances (n, k) by differences of all pairs in float64."""
    x, found = rows.double(), []
    for part in torch.arange(len(x)).split(512):
        every = torch.cdist(x[part], x, compute_mode="donot_use_mm_for_euclid_dist")
        every[torch.arange(len(part)), part] = torch.inf
        found.append(every.topk(k, largest=False).values)
    return torch.cat(found)


def far_clusters(seed):
    """Clusters 1e-3 wide, 1e3 from the origin: float32 products of uncentred rows could tell none of them apart."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((20, 64)) * 1e3 / 8
    return torch.from_numpy(centres[rng.integers(0, 20, 5000)] + rng.standard_normal((5000, 64)) * 1e-3)


def jittered(seed):
    """Rows 2i and 2i + 1 stand 1e-9 apart, all others far."""
    rng = np.random.default_rng(seed)
    X = np.repeat(rng.standard_normal((2500, 64)), 2, axis=0)
    return torch.from_numpy(X + rng.standard_normal(X.shape) * 1e-9)


def massive(seed):
    """A few rows a thousand times as long as the others, one dimension far from zero: as activations of many models."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((5000, 64)).astype(np.float32)
    X[:, 5] += 300
    X[::400] *= 1000
    return torch.from_numpy(X)


def copies(seed):
    """Each row three to forty times."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((200, 64)).astype(np.float32)
    return torch.from_numpy(rng.permutation(X.repeat(rng.integers(3, 40, len(X)), axis=0)))


SHORT, FULL = Plan(axes=8, width=64, survivors=0.0), Plan(axes=64, width=64, survivors=0.0)
INTEGERS = Plan(axes=64, width=64, survivors=0.0, integers=True)
CLOUDS = {
    "manifold": (lambda seed: flat_torus(6000, 3, width=64, seed=seed), (None, SHORT, FULL, INTEGERS)),
    "manifold bfloat16": (lambda seed: flat_torus(5000, 4, width=64, seed=seed).bfloat16(), (SHORT, INTEGERS)),
    "decaying gaussian": (
        lambda seed: gaussian(5000, [1 / i**2 for i in range(1, 65)], seed=seed),
        (SHORT, FULL, INTEGERS),
    ),
    "isotropic gaussian": (lambda seed: gaussian(5000, [1.0] * 64, seed=seed), (FULL, INTEGERS)),
    # eight axes of an isotropic cloud bound nothing, so that every pair is measured: fewer rows will do
    "small isotropic gaussian": (lambda seed: gaussian(1200, [1.0] * 64, seed=seed), (SHORT,)),
    "far clusters": (far_clusters, (SHORT, FULL)),
    # all rows of a cluster have one code, so that every pair in it is measured: fewer rows will do
    "few far clusters": (lambda seed: far_clusters(seed)[:1200], (INTEGERS,)),
    "far clusters float32": (lambda seed: far_clusters(seed).float(), (SHORT, FULL)),
    "jittered copies": (jittered, (FULL, INTEGERS)),
    "massive rows": (massive, (FULL, INTEGERS)),
    "copies": (copies, (FULL, INTEGERS)),
    "few jittered copies": (lambda seed: jittered(seed)[:1200], (SHORT,)),
}
K = 4


@pytest.mark.parametrize("cloud", CLOUDS)
def test_searches_by_every_plan_are_brute_force(cloud, one_seed):
    make, plans = CLOUDS[cloud]
    rows = make(one_seed)
    want = brute(rows, K)
    for plan in plans:
        check_neighbors(rows, nearest_neighbors(rows, K, plan=plan, seed=one_seed), want)


def check_neighbors(rows, found, want):
    """Equal distances, and indices that are distinct, not the row itself, and lie at those distances."""
    np.testing.assert_allclose(found.distances, want, rtol=1e-12)
    again = (rows[found.indices].double() - rows[:, None].double()).norm(dim=2)
    np.testing.assert_allclose(again, want, rtol=1e-12)
    itself = torch.arange(len(rows))[:, None]
    assert not (found.indices == itself).any()
    assert (found.indices.sort(dim=1).values.diff(dim=1) > 0).all()


def test_plan_is_short_on_manifolds_and_full_on_white_data(seed):
    """Axes take so long to begin with that few rows do without."""
    clouds = flat_torus(40_000, 3, width=64, seed=seed), gaussian(5000, [1.0] * 64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    flat, white = (choose_plan(rows, rows.mean(dim=0), K, generator)[0] for rows in clouds)
    assert flat.axes < flat.width == 64
    assert white.is_full


# --- Local frames ----------------------------------------------------------------------------------------------------


def test_local_tangents_span_the_leading_axes_of_each_neighbourhood(seed):
    """1e-7: a vector of a Gram matrix is good to eps over the relative gap, and the worst gap of 10 is small."""
    X = draw("generic", seed)
    frames = an.local_tangents(X, dimension=2, k=20, anchors=10, seed=seed)
    assert len(frames.neighborhoods.anchors.unique()) == 10
    for anchor, tangent in zip(frames.neighborhoods.anchors.tolist(), frames.tangents.numpy(), strict=True):
        P = oracles.neighbourhood(X, anchor, 20)
        _, _, Vt = np.linalg.svd(oracles.centred(P), full_matrices=False)
        np.testing.assert_allclose(tangent @ tangent.T, Vt[:2].T @ Vt[:2], atol=1e-7)
    spectra = oracles.local_pca_spectra(X, frames.neighborhoods.anchors.tolist(), 20)
    np.testing.assert_allclose(frames.variances, spectra, rtol=1e-10)


def test_few_anchors_are_a_sample_of_all_neighbourhoods(seed):
    """The anchors that ``local_tangents`` names are those that the dimension is read from."""
    X = draw("generic", seed)
    anchors = an.local_tangents(X, dimension=1, k=12, anchors=7).neighborhoods.anchors.tolist()
    spectra = oracles.local_pca_spectra(X, anchors, 12)
    counts = [np.sum(v >= 0.05 * v[0]) for v in spectra]
    agree(an.local_pca_dimension(X, k=12, anchors=7), np.mean(counts), EXACT)


def test_threads_do_not_show_in_local_frames():
    """The tests run on one thread; with two, neighbourhoods are shared out between them."""
    X = draw("generic", 0)
    alone = an.local_tangents(X, dimension=2, k=12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = an.local_tangents(X, dimension=2, k=12)
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_allclose(shared.variances, alone.variances, rtol=1e-10)
    np.testing.assert_allclose(shared.tangents.abs(), alone.tangents.abs(), atol=1e-7)


# --- Several at once -------------------------------------------------------------------------------------------------

SMALL_OPTIONS = {
    "mle": {"k": 5},
    "gride": {"scales": (1, 2)},
    "local_pca_dimension": {"k": 12},
    "local_isotropy": {"k": 12},
    "curvature": {"dimension": 2, "k": 20},
}


@pytest.mark.parametrize("data", ALWAYS)
def test_measure_gives_the_single_calls_bit_for_bit_in_any_order(data, seed):
    X = draw(data, seed)
    usable = [name for name in measure_names() if len(X) > 20 or name not in ("curvature", "participation_ratio")]
    single = {name: getattr(an, name)(X, **SMALL_OPTIONS.get(name, {})) for name in usable}
    rng = np.random.default_rng(seed)
    for order in (usable, usable[::-1], rng.permutation(usable).tolist()):
        together = an.measure(X, {name: SMALL_OPTIONS.get(name, {}) for name in order})
        assert list(together) == order
        for name in order:
            assert together[name] == single[name], name


def test_measure_of_float32_rows_agrees_with_the_single_calls(seed):
    """Alone, a measure may multiply in float32; beside one that needs float64 it shares the better product."""
    X = draw("generic", seed).astype(np.float32)
    together = an.measure(X, {name: SMALL_OPTIONS.get(name, {}) for name in measure_names()})
    for name, got in together.items():
        agree(got, getattr(an, name)(X, **SMALL_OPTIONS.get(name, {})), 5e-5)


def test_measure_searches_for_neighbours_once(monkeypatch):
    asked = []

    def counted(rows, k, **options):
        asked.append(k)
        return nearest_neighbors(rows, k, **options)

    monkeypatch.setattr(base, "nearest_neighbors", counted)
    an.measure(draw("generic", 0), {"two_nn": {}, "mle": {"k": 9}, "gride": {"scales": (1, 2)}, "spectral_ratio": {}})
    assert asked == [9]


def test_unknown_names_come_with_a_suggestion():
    X = draw("generic", 0)
    with pytest.raises(UnknownNameError, match="did you mean 'two_nn'"):
        an.measure(X, ["two_n"])
    with pytest.raises(UnknownNameError, match="did you mean 'variant'"):
        an.measure(X, {"two_nn": {"varant": "ml"}})
    with pytest.raises(AttributeError, match="did you mean 'curvature'"):
        _ = an.curvatur


def test_a_registered_measure_stands_beside_the_others():
    X = draw("generic", 0)

    @an.register("largest_norm", an.Needs(points=True))
    def largest_norm(work, *, power=1.0):
        norms = work.points("keep").rows.norm(dim=1)
        return an.Estimate(value=float(norms.max()) ** power, stderr=None, n=work.n, method="largest norm")

    try:
        assert "largest_norm" in measure_names()
        found = an.measure(X, {"largest_norm": {"power": 2.0}, "two_nn": {}})
        agree(found["largest_norm"], (X**2).sum(axis=1).max(), EXACT)
        assert found["two_nn"] == an.two_nn(X)
        with pytest.raises(OptionError, match="registered already"):
            an.register("largest_norm", an.Needs())(largest_norm)
    finally:
        an.unregister("largest_norm")
    assert "largest_norm" not in measure_names()
    with pytest.raises(UnknownNameError):
        an.measure(X, "largest_norm")
    with pytest.raises(UnknownNameError):
        an.unregister("largest_norm")


def test_a_registered_measure_may_ask_for_gradients_inside():
    """Where all measures are the package's own none are kept, which would leave this one without."""
    rows = torch.from_numpy(draw("generic", 0))

    @an.register("steepest", an.Needs(points=True))
    def steepest(work):
        at = work.points("keep").rows.clone().requires_grad_()
        at.square().sum().backward()
        return an.Estimate(value=float(at.grad.abs().max()), stderr=None, n=work.n, method="gradient")

    try:
        found = an.measure(rows, ["steepest", "two_nn"])
    finally:
        an.unregister("steepest")
    agree(found["steepest"], 2 * float(rows.abs().max()), EXACT)
    assert found["two_nn"] == an.measure(rows, "two_nn")["two_nn"]


@pytest.mark.parametrize("n", [12, 200])
def test_eigenvalues_are_those_of_the_covariance_itself(n):
    """Ratios of eigenvalues forgive a common factor; whoever reads the spectrum does not."""
    rows = torch.randn(n, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    found = spectrum(base.Workspace(as_rows(rows), an.Needs(moments="float64")))
    truth = torch.linalg.eigvalsh(torch.cov(rows.T)).flip(0)[: min(n - 1, 20)]
    torch.testing.assert_close(found.values, truth, rtol=1e-10, atol=1e-12)


def test_an_error_bar_shrinks_with_the_rows_that_its_blocks_stand_for():
    blocks = torch.randn(64, 128, 3, generator=torch.Generator().manual_seed(0))
    influence = blocks[..., 0].reshape(-1)
    alone = ErrorRows(blocks, 64 * 128, "rows").bar(influence)
    many = ErrorRows(blocks, 4 * 64 * 128, "rows").bar(influence)
    assert alone.stderr == pytest.approx(float(influence.std()) / math.sqrt(len(influence)), rel=0.3)
    assert many.stderr == pytest.approx(alone.stderr / 2, rel=1e-12)


def test_intervals_use_students_law():
    found = an.Estimate(value=0.0, stderr=1.0, dof=4.0, over="rows", n=5, method="m")
    assert found.interval()[1] == pytest.approx(2.7764451, rel=1e-6)
    known = an.Estimate(value=0.0, stderr=1.0, over="rows", n=5, method="m")
    assert known.interval()[1] == pytest.approx(1.9599640, rel=1e-6)


def test_distances_inside_blocks_are_exact_for_copies_and_near_ones():
    blocks = torch.randn(5, 40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks[:, 1] = blocks[:, 0]
    blocks[:, 3] = blocks[:, 2] + 1e-9 * blocks[:, 4]
    truth = (blocks[:, :, None] - blocks[:, None]).square().sum(dim=3).sqrt()
    truth.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    found = distances_within(blocks, 4)
    torch.testing.assert_close(found, truth.topk(4, dim=2, largest=False).values, rtol=1e-6, atol=0.0)
    assert bool((found[:, :2, 0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [127, 128, 2048, 2048 + 128 + 5, 3 * 2048 + 127])
def test_mean_cosine_over_blocks_parts_and_a_rest(n, dtype, one_seed):
    """Rows are summed in blocks of short parts and what is left over: all of it counts, each row once."""
    rows = (torch.randn(n, 6, generator=torch.Generator().manual_seed(one_seed)) + 0.5).to(dtype)
    rows *= torch.linspace(0.1, 10, n).to(dtype)[:, None]  # directions alone must count
    found = an.mean_cosine(rows)
    unit = torch.nn.functional.normalize(rows.double(), dim=1)  # all pairs at once: the pair by pair oracle is too slow
    truth = (float((unit @ unit.T).sum()) - n) / (n * (n - 1))
    assert found.n == n and found.value == pytest.approx(truth, abs=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("together", [1, 20, 1 << 16])
def test_the_bias_of_a_trace_function_is_its_double_sum(seed, monkeypatch, together):
    """However many pairs are looked at at a time; eigenvalues that meet, nearly meet, and vanish among them."""
    monkeypatch.setattr(spectra, "PAIRS_TOGETHER", together)
    rng = np.random.default_rng(seed)
    values = np.sort(np.r_[rng.uniform(0.1, 3, 9), 1.0, 1.0, 1.0 + 1e-7, 0.0])[::-1].copy()
    slope, bend = (lambda x: 0.5 / x**0.5), (lambda x: -0.25 / x**1.5)
    total = 0.0
    for i, a in enumerate(values[:-1]):
        for j, b in enumerate(values[:-1]):
            divided = (slope(a) - slope(b)) / (a - b) if abs(a - b) > 1e-4 else bend((a + b) / 2)
            total += divided * a * b * (1 + (i == j))
    got = spectra.trace_bias(torch.from_numpy(values), slope, bend, 50)
    agree(got, total / 100, 1e-9)
    assert spectra.trace_bias(torch.zeros(3, dtype=torch.float64), slope, bend, 50) == 0


@pytest.mark.parametrize("scale", [1, 3])
def test_gride_of_tied_distances_is_the_root_of_its_score(seed, scale):
    """Where ``mu`` is 1 a term of the score is the limit of the others: they are counted, and not left out."""
    logs = np.random.default_rng(seed).exponential(0.2, 40)
    logs[:15] = 0.0
    d = dimension._gride_root(torch.from_numpy(logs), scale)
    near = [1 / d if x == 0 else x / (1 - math.exp(-d * x)) for x in logs]
    terms = [39 / d, (scale - 1) * sum(near), -(2 * scale - 1) * logs.sum()]
    agree(sum(terms), 0, 0, 1e-9 * max(map(abs, terms)))


@pytest.mark.parametrize(
    "logs",
    [
        [0.0] * 3000 + [1e-300] * 5,
        [1e-9] + [700.0] * 10,
        [0.0] * 38 + [1e-12, 30.0],
        [1e-4] * 4000,
        [1e-14, 1e-7, 1.0, 1e7, 1e14],
    ],
    ids=["hardly any", "far", "one far", "all alike", "all sizes"],
)
@pytest.mark.parametrize("scale", [1, 2, 32])
def test_the_root_of_gride_is_found_wherever_it_lies(logs, scale):
    """The score changes its sign there."""

    def score(d):  # times d: of the size of the number of rows
        near = math.fsum(1 if x == 0 else d * x / -math.expm1(-d * x) for x in logs)
        return len(logs) - 1 + (scale - 1) * near - (2 * scale - 1) * d * math.fsum(logs)

    d = dimension._gride_root(torch.tensor(logs, dtype=torch.float64), scale)
    assert score(d * (1 - 1e-12)) > 0 > score(d * (1 + 1e-12))
