"""The referee's checks: multiple comparisons, angles to tangents and normals, curvature along a basis, verdicts."""

import inspect
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from anisoscope.errors import OptionError, TooFewRowsError
from anisoscope.measures.frames import local_tangents
from anisoscope.tangent.energy import energy_share
from anisoscope.tangent.nulls import permuted_signal_null
from anisoscope.tangent.verify import (
    benjamini_hochberg,
    compare_replacements,
    curvature_along,
    referee,
    tangent_alignment,
    top_variance,
    verdict,
)


def slow_benjamini_hochberg(p, level):
    """The step-up rule as written: reject the smallest i with p_(i) <= i level / m, and all below."""
    order = np.argsort(p)
    most = max((i + 1 for i, at in enumerate(order) if p[at] <= (i + 1) * level / len(p)), default=0)
    rejected = np.zeros(len(p), bool)
    rejected[order[:most]] = True
    return rejected


def test_benjamini_hochberg_is_the_step_up_rule_and_scipys(seed):
    rng = np.random.default_rng(seed)
    for size in (1, 2, 7, 40):
        p = np.where(rng.random(size) < 0.5, rng.random(size) * 0.02, rng.random(size))
        adjusted, rejected = benjamini_hochberg(p.tolist(), 0.05)
        assert adjusted.tolist() == pytest.approx(stats.false_discovery_control(p).tolist(), rel=1e-12)
        assert rejected.tolist() == slow_benjamini_hochberg(p, 0.05).tolist()
    adjusted, rejected = benjamini_hochberg([0.01, 0.04, 0.03, 0.005], 0.05)
    assert adjusted.tolist() == pytest.approx([0.02, 0.04, 0.04, 0.02]) and bool(rejected.all())
    assert benjamini_hochberg([], 0.05)[0].shape == (0,)


def test_benjamini_hochberg_holds_its_level():
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(400):
        null = rng.random(30)
        true = rng.random(10) * 1e-4
        _, rejected = benjamini_hochberg(np.concatenate([null, true]).tolist(), 0.2)
        shares.append(float(rejected[:30].sum()) / max(1, int(rejected.sum())))
    # exactly level * m0 / m for independent tests
    assert abs(np.mean(shares) - 0.2 * 0.75) < 5 * np.std(shares) / 20


def test_benjamini_hochberg_refuses():
    with pytest.raises(OptionError, match="between 0 and 1"):
        benjamini_hochberg([0.2, 1.2])
    with pytest.raises(OptionError, match="failed"):
        benjamini_hochberg([0.2, math.nan])
    with pytest.raises(OptionError, match="strictly"):
        benjamini_hochberg([0.2], 0.0)


def bowl(seed, n=1600, bend=0.4, width=20, noise=0.01):
    """A sheet over axes 0 and 1 that bends into axes 2 and 3: x_2 = bend (u^2 + v^2) / 2, x_3 = bend u v / 2."""
    rng = np.random.default_rng(seed)
    u, v = rng.uniform(-0.5, 0.5, (2, n))
    rows = noise * rng.standard_normal((n, width))
    rows[:, 0], rows[:, 1] = u, v
    rows[:, 2] += bend * (u * u + v * v) / 2
    rows[:, 3] += bend * u * v / 2
    return torch.from_numpy(rows)


def axes(*which, width=20):
    return torch.eye(width, dtype=torch.float64)[:, list(which)]


def slow_alignment(rows, basis, k, anchors, seed):
    """Local PCA by hand around the same anchors: mean squared cosines to tangents, and angles."""
    found = local_tangents(rows, dimension=4, k=k, anchors=anchors, seed=seed).neighborhoods
    cosines, smallest, largest = [], [], []
    for members in found.members:
        local = rows[members].numpy()
        vectors = np.linalg.svd(local - local.mean(axis=0))[2][:2].T
        each = np.linalg.svd(basis.numpy().T @ vectors, compute_uv=False)
        cosines.append((each**2).sum() / 2)
        smallest.append(math.degrees(math.acos(min(1, each[0]))))
        largest.append(math.degrees(math.acos(min(1, each[-1]))))
    return np.mean(cosines), np.mean(smallest), np.mean(largest)


def test_alignment_is_the_slow_one(one_seed):
    rows = bowl(one_seed, bend=1.5)
    basis = torch.linalg.qr(torch.randn(20, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    found = tangent_alignment(rows, basis, dimension=2, k=40, draws=19, seed=one_seed)
    cosine, smallest, largest = slow_alignment(rows, basis, 40, 1600 // 82, one_seed)
    assert found.tangent.share.value == pytest.approx(cosine, rel=1e-5)
    assert found.tangent_angles[0].value == pytest.approx(smallest, rel=1e-4)
    assert found.tangent_angles[1].value == pytest.approx(largest, rel=1e-4)
    assert found.tangent.share.over == "19 neighbourhoods" and found.tangent.chance == 3 / 20


def test_alignment_tells_tangents_from_normals(seed):
    rows = bowl(seed, bend=1.0, noise=0.001)
    along = tangent_alignment(rows, axes(0, 1), dimension=2, k=40, draws=99, seed=seed)
    assert along.tangent.p == 0.01 and along.tangent.share.value > 0.5
    assert along.tangent.share.value > 3 * along.normal.share.value
    assert along.tangent_angles[0].value < along.null_smallest[0]
    across = tangent_alignment(rows, axes(2, 3), dimension=2, k=40, draws=99, seed=seed)
    assert across.normal.share.value > across.tangent.share.value and across.normal.p == 0.01
    nowhere = tangent_alignment(rows, axes(10, 11), dimension=2, k=40, draws=99, seed=seed)
    assert nowhere.tangent.p > 0.05 and nowhere.tangent_angles[0].value > along.null_smallest[0]


def test_curvature_along_the_true_tangents_is_that_of_the_sheet(one_seed):
    """|II|^2 = bend^2 (1 + 1) + bend^2 (1/4 + 1/4) at the middle: II_2 = bend I, II_3 = bend/2 off the diagonal."""
    for bend in (0.8, 0.4):
        rows = bowl(one_seed, 3000, bend, noise=0.0005)
        found = curvature_along(rows, axes(0, 1), k=100, seed=one_seed)
        truth = bend * math.sqrt(2.5)
        assert abs(found.value - truth) < 5 * found.stderr < 0.1 * truth, "an exact quadratic: no bias"
        assert "neighbourhoods" in found.over
        squared = found.parts["squared"]
        assert abs(squared.value - truth**2) < 5 * squared.stderr
    scaled = curvature_along(1e-9 * rows, axes(0, 1), k=100, seed=one_seed)
    assert scaled.value == pytest.approx(1e9 * found.value, rel=1e-5), "curvature is one over a length"


def test_a_flat_sheet_has_no_curvature_and_a_wrong_basis_a_visible_one(one_seed):
    rows = bowl(one_seed, 2000, 0.0, noise=0.001)
    flat = curvature_along(rows, axes(0, 1), seed=one_seed)
    assert flat.stderr is None and any("told apart" in note for note in flat.notes)
    assert flat.parts["visible curvature"].value < 0.01
    half = curvature_along(rows, axes(0, 5), seed=one_seed)
    local = rows - rows[:1]  # both sheet axes have the same spread: missing one leaves as much outside as inside
    assert half.parts["visible curvature"].value == pytest.approx(1.0, rel=0.25)
    assert float(local[:, 1].square().mean()) > 0


def gradients_along(seed, n, where, strength, width=20):
    generator = torch.Generator().manual_seed(seed + 77)
    rows = torch.randn(n, width, generator=generator, dtype=torch.float64)
    return rows + strength * torch.randn(n, where.shape[1], generator=generator, dtype=torch.float64) @ where.T


def test_replacements_are_paired(seed):
    rows, labels = bowl(seed), torch.arange(1600) // 100
    gradients = gradients_along(seed, 1600, axes(0, 1), 2)
    basis = axes(0, 7)
    found = compare_replacements(gradients, basis, rows, draws=19, seed=seed, groups=labels)
    top = top_variance(rows, 2)
    expected = np.linalg.eigh(np.cov(rows.numpy().T))[1][:, -2:]
    assert np.linalg.svd(expected.T @ top.numpy(), compute_uv=False).min() > 1 - 1e-9
    own, other = energy_share(gradients, basis, groups=labels), energy_share(gradients, top, groups=labels)
    difference = found.differences["top variance"]
    assert difference.value == pytest.approx(own.value - other.value, rel=1e-9)
    assert found.tests["proxy"].share.value == pytest.approx(own.value, rel=1e-12)
    left = [
        energy_share(gradients[labels != name], basis).value - energy_share(gradients[labels != name], top).value
        for name in range(16)
    ]
    stderr = math.sqrt(15 / 16 * sum((v - np.mean(left)) ** 2 for v in left))
    assert difference.stderr == pytest.approx(stderr, rel=1e-8) and difference.over == "16 sequences"
    assert difference.interval(0.95)[1] < 0, "half of the tangent is missing"


@dataclass(frozen=True)
class Fitted:
    basis: torch.Tensor


def test_the_verdict_is_that_of_the_data(seed):
    rows, labels = bowl(seed), torch.arange(1600) // 40

    def judged(where, proxy):
        gradients = gradients_along(seed, 1600, where, 2)
        return referee(rows, gradients, labels, lambda x, rank: Fitted(proxy), rank=2, dimension=2, k=40, draws=99)

    good = judged(axes(0, 1), axes(0, 1))
    assert good.verdict.survives and str(good.verdict).startswith("The tangent reading survives.")
    assert all(reason.startswith(("passed", "said")) for reason in good.verdict.reasons)
    assert "as much as the top-variance" in str(good.verdict) and good.curvature is not None
    away = judged(axes(8, 9), axes(0, 1))
    assert not away.verdict.survives and "FAILED: energy share" in str(away.verdict)
    normal = judged(axes(2, 3), axes(2, 3))
    assert not normal.verdict.survives and "FAILED: mean squared cosine to the leading local normals" in str(
        normal.verdict
    )


def test_the_referee_fits_and_tests_on_different_sequences(one_seed):
    rows, labels = bowl(one_seed), torch.arange(1600) % 40
    seen = []

    def fit(x, rank):
        seen.append(x)
        return Fitted(top_variance(x, rank))

    found = referee(rows, gradients_along(one_seed, 1600, axes(0, 1), 2), labels, fit, rank=2, dimension=2, draws=19)
    assert len(seen) == 1 and len(seen[0]) == 800 and found.replacements.tests["proxy"].share.n == 800
    used = {tuple(row) for row in seen[0].tolist()}
    inside = torch.tensor([tuple(row) in used for row in rows.tolist()])
    assert not set(labels[inside].tolist()) & set(labels[~inside].tolist())


def test_a_reader_null_counts_in_the_verdict(one_seed):
    rows = bowl(one_seed, 400)
    gradients = gradients_along(one_seed, 400, axes(0, 1), 2)
    replacements = compare_replacements(gradients, axes(0, 1), rows, draws=19)
    alignment = tangent_alignment(rows, axes(0, 1), dimension=2, k=40, draws=19)
    signals = torch.randn(400, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reader = permuted_signal_null(rows - rows.mean(dim=0), signals, axes(0, 1), permutations=19, seed=1)
    assert verdict(replacements, alignment).survives
    assert verdict(replacements, alignment, reader).survives == (reader.p <= 0.05)
    assert any("permuted signals" in reason for reason in verdict(replacements, alignment, reader).reasons)


def test_refusals():
    rows = bowl(0, 200)
    with pytest.raises(OptionError, match="do not fit"):
        tangent_alignment(rows, axes(0, 1), dimension=11)
    with pytest.raises(TooFewRowsError, match="basis\\[:, :j\\]"):
        curvature_along(rows, axes(*range(12)))
    with pytest.raises(OptionError, match="6 coefficients"):
        curvature_along(rows, axes(0, 1), k=5)
    with pytest.raises(TooFewRowsError, match="5 sequences"):
        referee(rows, rows, torch.arange(200) % 5, lambda x, rank: Fitted(axes(0)), rank=1, dimension=1)
    with pytest.raises(OptionError, match="strictly"):
        inspect.unwrap(verdict)(None, None, level=0)
