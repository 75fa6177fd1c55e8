"""Cross-fitted tests that share their work say what the plain ones say."""

import pytest
import torch

from anisoscope.errors import OptionError, ShapeError, TooFewRowsError
from anisoscope.tangent.crossed import crossed_tests
from anisoscope.tangent.energy import energy_test
from anisoscope.tangent.nulls import cross_fit
from anisoscope.tangent.proxies import fit_proxy
from anisoscope.tangent.units import Halves

N, D, K, DRAWS = 600, 24, 3, 49


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def data(request):
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(N, D, generator=draw, dtype=torch.float64) * torch.linspace(3, 0.3, D)
    g = torch.randn(N, D, generator=draw, dtype=torch.float64) + 0.3 * x
    groups = torch.arange(N) // 20
    bins = torch.randint(0, 3, (N,), generator=draw)
    return x.to(request.param), g.to(request.param), groups, bins


def fits(x, halves, kind="pca"):
    return tuple(fit_proxy(x[rows], kind, K).basis for rows in halves.rows)


def close(one, two):
    assert one.value == pytest.approx(two.value, rel=2e-5)
    assert one.stderr == pytest.approx(two.stderr, rel=2e-4)
    assert (one.over, one.dof, one.n, one.method) == (two.over, two.dof, two.n, two.method)


def test_all_tokens_are_as_cross_fit_has_them(data):
    x, g, groups, bins = data
    halves = Halves.of(groups, 7, "cpu")
    bases = {"pca": fits(x, halves), "random": fits(x, halves, "random")}
    found = crossed_tests(g, halves, bases, bins=bins, labels=("a", "b", "c"), draws=DRAWS, seed=7)
    assert list(found) == ["pca", "random"] and list(found["pca"]) == ["a", "b", "c", ""]
    for kind in bases:
        (plain,) = cross_fit(x, g, groups, lambda rows, rank, kind=kind: fit_proxy(rows, kind, rank), ranks=(K,),
                             draws=DRAWS, seed=7)  # fmt: skip
        mine = found[kind][""]
        close(mine.share, plain.share)
        close(mine.ratio, plain.ratio)
        assert mine.p == plain.p
        each = (plain.folds[0].control_shares + plain.folds[1].control_shares) / 2
        assert mine.control.value == pytest.approx(float(each.mean()), rel=2e-5)
        assert mine.control.stderr == pytest.approx(float(each.std()) / DRAWS**0.5, rel=1e-3)
        assert mine.control.dof == DRAWS - 1
        assert mine.control.over == f"{DRAWS} normal controls, the same in both halves"


def test_groups_are_as_energy_tests_of_their_rows(data):
    x, g, groups, bins = data
    halves = Halves.of(groups, 0, "cpu")
    bases = fits(x, halves)
    found = crossed_tests(g, halves, {"pca": bases}, bins=bins, labels=("a", "b", "c"), draws=DRAWS)["pca"]
    for number, label in enumerate("abc"):
        each = []
        for half in (0, 1):
            rows = halves.rows[half]
            rows = rows[bins[rows] == number]
            each.append(energy_test(g[rows], bases[1 - half], draws=DRAWS, groups=groups[rows]))
        for what in ("share", "control", "ratio"):
            mean = sum(getattr(one, what).value for one in each) / 2
            assert getattr(found[label], what).value == pytest.approx(mean, rel=2e-5)
        assert found[label].share.stderr == pytest.approx(sum(t.share.stderr**2 for t in each) ** 0.5 / 2, rel=1e-3)


def test_a_group_without_gradient_says_so(data):
    x, g, groups, bins = data
    halves = Halves.of(groups, 0, "cpu")
    still = g.clone()
    still[bins == 1] = 0
    found = crossed_tests(still, halves, {"pca": fits(x, halves)}, bins=bins, labels=("a", "b", "c"), draws=9)["pca"]
    assert found["b"] == "a half has no gradient in these tokens"
    moving = crossed_tests(g, halves, {"pca": fits(x, halves)}, bins=bins, labels=("a", "b", "c"), draws=9)["pca"]
    assert found["a"].share == moving["a"].share  # the others are as they were
    assert found[""].share.value != moving[""].share.value and found[""].share.n == N
    none = crossed_tests(g, halves, {"pca": fits(x, halves)}, bins=bins * 0, labels=("a", "b"), draws=9)["pca"]
    assert isinstance(none["b"], str) and none["a"].share.value == pytest.approx(none[""].share.value)


def test_a_gradient_inside_the_basis_has_no_control(data):
    x, _, groups, _ = data
    halves = Halves.of(groups, 0, "cpu")
    basis = torch.eye(D, dtype=x.dtype)[:, :K]
    inside = x[:, :K] @ basis.T
    found = crossed_tests(inside, halves, {"mine": (basis, basis)}, draws=9)["mine"][""]
    assert "no gradient lies outside the basis" in found


def test_what_does_not_fit_together_is_named(data):
    x, g, groups, _ = data
    halves = Halves.of(groups, 0, "cpu")
    small, large = fits(x, halves), tuple(fit_proxy(x, "pca", K + 1).basis for _ in range(2))
    with pytest.raises(ShapeError, match="'b' has 4, not 3"):
        crossed_tests(g, halves, {"a": small, "b": large})
    with pytest.raises(OptionError, match="no basis"):
        crossed_tests(g, halves, {})
    with pytest.raises(TooFewRowsError, match="5 sequences cannot be halved"):
        Halves.of(torch.arange(5), 0, "cpu")


def test_a_tight_complement_and_few_draws(data):
    x, g, groups, _ = data
    halves = Halves.of(groups, 3, "cpu")
    bases = tuple(fit_proxy(x[rows], "pca", D // 2).basis for rows in halves.rows)
    (plain,) = cross_fit(
        x, g, groups, lambda rows, rank: fit_proxy(rows, "pca", rank), ranks=(D // 2,), draws=2, seed=3
    )
    mine = crossed_tests(g, halves, {"pca": bases}, draws=2, seed=3)["pca"][""]
    close(mine.share, plain.share)
    assert mine.ratio.value == pytest.approx(plain.ratio.value, rel=2e-5)
    assert mine.control.stderr is None


def test_one_control_stands_without_a_spread(data):
    """A single draw has no spread: nothing is said of it, and nothing warns."""
    x, g, groups, _ = data
    halves = Halves.of(groups, 0, "cpu")
    lone = crossed_tests(g, halves, {"pca": fits(x, halves)}, draws=1)["pca"][""]
    assert lone.control.stderr is None and lone.p in (0.5, 1.0)
    each = [energy_test(g[halves.rows[at]], fits(x, halves)[1 - at], draws=1) for at in (0, 1)]
    assert lone.control.value == pytest.approx(sum(one.control.value for one in each) / 2, rel=2e-5)
