"""Energy shares, tests against controls, anisotropy shares, reader nulls and cross-fitting against slow loops."""

import inspect
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from anisoscope.errors import (
    DegenerateError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TooFewRowsError,
    UnknownNameError,
)
from anisoscope.measures.anisotropy import isoscore_star, spectral_ratio
from anisoscope.tangent import anisotropy as anisotropy_module
from anisoscope.tangent.anisotropy import LeftOver, anisotropy_share, spectral_ratios_without, unit_covariance
from anisoscope.tangent.controls import control_bases
from anisoscope.tangent.energy import (
    Gradients,
    energy_share,
    energy_test,
    shares,
    side_share,
    variance_share,
)
from anisoscope.tangent.nulls import _by_gram, _by_product, _orders, cross_fit, permuted_signal_null, reader_share
from anisoscope.tangent.stacked import isoscore_shares
from anisoscope.tangent.units import Units

WIDTH, RANK, N = 14, 3, 60


def bare(function):
    """Without the type checks of the test run, as users have it: a wrong shape then meets the named error."""
    return inspect.unwrap(function)


def draw(seed, n=N, width=WIDTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    rows = torch.randn(n, width, generator=generator, dtype=torch.float64) @ mix + 0.5
    return rows.to(dtype)


def haar(width=WIDTH, rank=RANK, seed=0):
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.linalg.qr(torch.randn(width, rank, generator=generator, dtype=torch.float64)).Q


def slow_share(gradients, basis):
    """SCIENCE: |G Q|_F^2 / |G|_F^2, by loops."""
    top = bottom = 0.0
    for g in gradients.double().tolist():
        bottom += sum(value * value for value in g)
        for column in basis.double().T.tolist():
            top += sum(a * b for a, b in zip(g, column, strict=True)) ** 2
    return top / bottom


def slow_jackknife(gradients, basis, labels):
    names = sorted(set(labels.tolist()))
    left = [slow_share(gradients[labels != name], basis) for name in names]
    count = len(left)
    return math.sqrt((count - 1) / count * sum((v - sum(left) / count) ** 2 for v in left)), count - 1


def test_share_is_the_slow_one(seed):
    gradients, basis = draw(seed), haar(seed=seed)
    found = energy_share(gradients, basis)
    assert found.value == pytest.approx(slow_share(gradients, basis), rel=1e-12)
    stderr, dof = slow_jackknife(gradients, basis, torch.arange(N))
    assert found.stderr == pytest.approx(stderr, rel=1e-9) and found.dof == dof and found.over == "rows"
    assert any("give groups" in note for note in found.notes)


def test_share_over_sequences(seed):
    gradients, basis = draw(seed), haar(seed=seed)
    labels = torch.tensor([7, 3, 9, 3, 1, 9] * 10)
    found = energy_share(gradients, basis, groups=labels)
    stderr, dof = slow_jackknife(gradients, basis, labels)
    assert found.stderr == pytest.approx(stderr, rel=1e-9) and found.dof == dof and found.over == "4 sequences"
    assert found.notes == ()


def test_share_of_scaled_half_precision_and_padded_gradients(seed):
    gradients, basis = draw(seed, dtype=torch.float32), haar(seed=seed).float()
    plain = energy_share(gradients, basis)
    for factor in (1e-30, 2.0**-100, 1e30):
        assert energy_share(gradients * factor, basis).value == pytest.approx(plain.value, rel=1e-5)
    tiny = gradients * 1e-30
    assert float((tiny @ basis).square().sum()) == 0, "the naive formula underflows here"
    assert energy_share(gradients.bfloat16(), basis).value == pytest.approx(plain.value, rel=2e-2)
    padded = torch.cat([gradients, torch.zeros(40, WIDTH)])
    found = energy_share(padded, basis)
    assert found.value == pytest.approx(plain.value, rel=1e-6)
    assert found.stderr == pytest.approx(plain.stderr, rel=1e-6) and found.dof == plain.dof


def test_share_invariances(seed):
    gradients, basis = draw(seed), haar(seed=seed)
    value = energy_share(gradients, basis).value
    turn = haar(WIDTH, WIDTH - 1, seed + 5)
    turn = torch.linalg.qr(torch.cat([turn, torch.ones(WIDTH, 1, dtype=torch.float64)], dim=1)).Q
    inner = torch.linalg.qr(torch.randn(RANK, RANK, dtype=torch.float64)).Q
    assert energy_share(gradients @ turn, turn.T @ basis).value == pytest.approx(value, rel=1e-10)
    assert energy_share(gradients, basis @ inner).value == pytest.approx(value, rel=1e-10), "only the span counts"
    assert energy_share(gradients.flip(0), basis).value == pytest.approx(value, rel=1e-12)
    assert energy_share(gradients + 1, basis).value != pytest.approx(value, rel=1e-3), "it is not centred"
    rest = torch.linalg.qr(basis, mode="complete").Q[:, RANK:]
    assert energy_share(gradients, rest).value == pytest.approx(1 - value, rel=1e-10)


@pytest.mark.parametrize("n", [5, 400])  # through rows, and through the second moment
@pytest.mark.parametrize("kind", ["normal", "random"])
def test_shares_of_controls_are_the_slow_ones(n, kind, seed):
    gradients, basis = draw(seed, n), haar(seed=seed)
    bases = control_bases(basis, kind, 40, seed=seed)
    expected = [slow_share(gradients, one) for one in bases]
    found = Gradients.of(gradients)
    assert found.by_moment(40 * RANK) == (n == 400)
    assert shares(found, bases).tolist() == pytest.approx(expected, rel=1e-9)
    test = energy_test(gradients, basis, controls=kind, draws=40, seed=seed)
    assert test.control_shares.tolist() == pytest.approx(expected, rel=1e-9)
    mean = sum(expected) / 40
    share = slow_share(gradients, basis)
    assert test.share.value == pytest.approx(share, rel=1e-12) and test.chance == RANK / WIDTH
    assert test.control.value == pytest.approx(mean, rel=1e-9)
    assert test.control.stderr == pytest.approx(np.std(expected, ddof=1) / math.sqrt(40), rel=1e-9)
    assert test.control.over == f"40 {kind} controls"
    assert test.control.parts["q95"].value == pytest.approx(np.quantile(expected, 0.95), rel=1e-9)
    assert test.ratio.value == pytest.approx(share / mean, rel=1e-9)
    assert test.p_controls == (1 + sum(value >= share for value in expected)) / 41
    random = [slow_share(gradients, one) for one in control_bases(basis, "random", 40, seed=seed)]
    assert test.p == (1 + sum(value >= share for value in random)) / 41
    assert test.random_shares.tolist() == pytest.approx(random, rel=1e-9)


def test_float32_controls_agree_with_float64(one_seed):
    gradients, basis = draw(one_seed, 300, 96), haar(96, 8, one_seed)
    wide = energy_test(gradients, basis, draws=50, seed=1)
    narrow = energy_test(gradients.float(), basis.float(), draws=50, seed=1)
    assert narrow.control_shares.tolist() == pytest.approx(wide.control_shares.tolist(), rel=2e-5)
    tight = energy_test(gradients.float(), haar(96, 48, one_seed).float(), draws=50, seed=1)
    exact = energy_test(gradients, haar(96, 48, one_seed), draws=50, seed=1)
    assert tight.control_shares.tolist() == pytest.approx(exact.control_shares.tolist(), rel=1e-4), "no room at all"


def test_expected_control_has_its_closed_form(one_seed):
    """Normal controls hold K/(D-K) of what the basis leaves, random ones K/D, on average over controls."""
    gradients, basis = draw(one_seed, 300), haar(seed=one_seed)
    share = slow_share(gradients, basis)
    for kind, mean in (("normal", (1 - share) * RANK / (WIDTH - RANK)), ("random", RANK / WIDTH)):
        test = energy_test(gradients, basis, controls=kind, draws=3000, seed=one_seed)
        assert abs(test.control.value - mean) < 5 * test.control.stderr
        assert test.ratio.parts["many controls"].value == pytest.approx(share / mean, rel=1e-10)


def test_ratio_error_bars_name_their_populations(seed):
    gradients, basis = draw(seed, 80), haar(seed=seed)
    labels = torch.arange(80) // 8
    test = energy_test(gradients, basis, draws=60, seed=seed, groups=labels)
    assert test.ratio.over == "10 sequences" and test.ratio.parts["over controls"].over == "60 normal controls"

    def limit(keep):
        share = slow_share(gradients[keep], basis)
        return share / ((1 - share) * RANK / (WIDTH - RANK))

    left = [limit(labels != group) for group in range(10)]
    stderr = math.sqrt(0.9 * sum((v - np.mean(left)) ** 2 for v in left))
    assert test.ratio.parts["many controls"].stderr == pytest.approx(stderr, rel=1e-8)
    assert test.ratio.stderr == pytest.approx(stderr * test.ratio.value / limit(labels >= 0), rel=1e-8)
    sd = float(test.control_shares.std())
    expected = test.ratio.value * sd / test.control.value / math.sqrt(60)
    assert test.ratio.parts["over controls"].stderr == pytest.approx(expected, rel=1e-9)
    names = test.estimates()
    assert names["energy p"].value == test.p and names["energy ratio"].value == test.ratio.value


def test_normal_top_compares_with_the_next_directions(seed):
    gradients, activations, basis = draw(seed), draw(seed + 50, 200), haar(seed=seed)
    test = energy_test(gradients, basis, controls="normal_top", draws=30, activations=activations, groups=None)
    top = control_bases(basis, "normal_top", 1, rows=activations)[0]
    assert len(test.control_shares) == 1 and test.control.stderr is None
    assert float(test.control_shares[0]) == pytest.approx(slow_share(gradients, top), rel=1e-9)
    assert test.ratio.value == pytest.approx(slow_share(gradients, basis) / slow_share(gradients, top), rel=1e-9)
    left = [
        slow_share(gradients[torch.arange(N) != i], basis) / slow_share(gradients[torch.arange(N) != i], top)
        for i in range(N)
    ]
    stderr = math.sqrt((N - 1) / N * sum((v - np.mean(left)) ** 2 for v in left))
    assert test.ratio.stderr == pytest.approx(stderr, rel=1e-8)
    assert len(test.random_shares) == 30 and test.p >= 1 / 31


def test_variance_share_and_enrichment(seed):
    gradients, activations, basis = draw(seed), draw(seed + 50, 90) + 3, haar(seed=seed)
    test = energy_test(gradients, basis, draws=5, activations=activations)
    covariance = np.cov(activations.numpy().T)
    expected = np.trace(basis.numpy().T @ covariance @ basis.numpy()) / np.trace(covariance)
    assert test.variance.value == pytest.approx(expected, rel=1e-10)
    assert test.variance.parts["uncentred"].value == pytest.approx(slow_share(activations, basis), rel=1e-10)
    assert test.enrichment.value == pytest.approx(test.share.value / expected, rel=1e-10)
    assert test.enrichment.stderr == pytest.approx(test.share.stderr / expected, rel=1e-10)


def test_side_share(seed):
    weights, basis = draw(seed, 9), haar(seed=seed)
    assert side_share(weights, basis, "input").value == pytest.approx(slow_share(weights, basis), rel=1e-12)
    writer = side_share(weights.T, basis, "output")
    assert writer.value == pytest.approx(slow_share(weights, basis), rel=1e-12) and writer.stderr is None
    with pytest.raises(ShapeError, match="perhaps side='output'"):
        side_share(weights.T, basis, "input")
    with pytest.raises(UnknownNameError, match="did you mean 'input'"):
        side_share(weights, basis, "inputs")


def slow_deltas(gradients, basis, zeta):
    """SCIENCE: T(cov of G (I - Q Q^T)) - T(cov G), through the package's own measures on the projected rows."""
    off = gradients - gradients @ basis @ basis.T
    iso = [isoscore_star(rows, zeta=zeta, bias="plugin").value for rows in (off, gradients)]
    top = [spectral_ratio(rows).value for rows in (off, gradients)]
    return iso[0] - iso[1], top[0] - top[1]


@pytest.mark.parametrize("zeta", [0.0, 0.3])
@pytest.mark.parametrize("exact", [True, False])
def test_anisotropy_share_is_the_slow_one(zeta, exact, one_seed, monkeypatch):
    if not exact:
        monkeypatch.setattr(anisotropy_module, "EXACT_WIDTH", 0)
    gradients, basis = draw(one_seed) + 20, haar(seed=one_seed)
    controls = control_bases(basis, "normal", 6, seed=one_seed)
    own, null = slow_deltas(gradients, basis, zeta), [slow_deltas(gradients, one, zeta) for one in controls]
    found = anisotropy_share(gradients, basis, controls, zeta)
    for at, estimate in ((0, found.isoscore_star), (1, found.spectral_ratio)):
        mean = np.mean([delta[at] for delta in null])
        assert estimate.value == pytest.approx(own[at] - mean, rel=1e-5, abs=1e-9)
        assert estimate.parts["delta"].value == pytest.approx(own[at], rel=1e-5, abs=1e-9)
        assert estimate.stderr == pytest.approx(np.std([d[at] for d in null], ddof=1) / math.sqrt(6), rel=1e-4)
        assert estimate.over == "6 controls"
    assert found.p_isoscore_star == (1 + sum(d[0] >= own[0] for d in null)) / 7
    assert found.p_spectral_ratio == (1 + sum(d[1] <= own[1] for d in null)) / 7


@pytest.mark.parametrize(("width", "rank"), [(30, 3), (60, 20)])
def test_what_is_left_of_both_halves_is_as_each_has_it(width, rank, one_seed):
    """All bases of both halves at once, with no control formed, against shares with controls formed."""
    halves = [draw(one_seed + at, 200 + at, width) for at in (0, 1)]
    bases = torch.stack([torch.stack([haar(width, rank, one_seed + 2 * at + p) for p in (0, 1)]) for at in (0, 1)])
    left = LeftOver.of(torch.stack([unit_covariance(half) for half in halves]), bases, 25, one_seed)
    found = isoscore_shares(left.by_half(), [len(half) for half in halves], width, [0])[0]
    for number, mine in enumerate(found):
        deltas, value = [], 0.0
        for half, basis in zip(halves, bases[:, number], strict=True):
            controls = control_bases(basis, "normal", 25, seed=one_seed)
            whole = anisotropy_share(half, basis, controls, spectral=False).isoscore_star
            value += whole.value / 2
            covariance = unit_covariance(half)
            none = anisotropy_module.isoscores_without(covariance, basis[None, :, :0], 0.1)
            deltas.append(anisotropy_module.isoscores_without(covariance, controls, 0.1) - none)
        assert mine.value == pytest.approx(value, rel=1e-4, abs=1e-7)
        assert mine.stderr == pytest.approx(float((deltas[0] + deltas[1]).std()) / 2 / 5, rel=1e-4)
        assert mine.dof == 24 and mine.over == "25 controls, the same in both halves" and mine.n == 401


def test_a_basis_with_all_the_variance_leaves_nothing():
    rows = torch.zeros(40, 12, dtype=torch.float64)
    rows[:, :2] = draw(0, 40, 2)
    basis = torch.eye(12, dtype=torch.float64)[:, :2].expand(1, 1, 12, 2)
    other = torch.eye(12, dtype=torch.float64)[:, 1:3].expand(1, 1, 12, 2)
    left = LeftOver.of(unit_covariance(rows)[None], torch.cat([other, basis], dim=1), 5, 0)
    kept = left.of_basis(0)
    assert torch.equal(kept.traces, left.traces[:, :1]) and torch.equal(kept.squares, left.squares[:, :1])
    assert math.isfinite(isoscore_shares(2 * kept.by_half(), [40, 40], 12, [0])[0][0].value)
    with pytest.raises(DegenerateError, match="nothing is left"):
        left.of_basis(1)


@pytest.mark.parametrize("width", [3, 4, 8, 63, 64, 100])
def test_what_is_left_in_few_dimensions_is_no_rounding(width, one_seed):
    """One strong direction, which a control may hold nearly all of where there are few others."""
    rows = draw(one_seed, 300, width)
    rows[:, -1] *= 30
    basis, covariance = torch.eye(width, dtype=torch.float64)[:, :1], unit_covariance(rows)
    left = LeftOver.of(covariance[None], basis[None, None], 40, one_seed)
    controls = control_bases(basis, "normal", 40, seed=one_seed)
    wanted = anisotropy_module.isoscores_without(covariance, torch.cat([basis[None], controls]), 0.1)
    trace, square = left.traces[0, 0], left.squares[0, 0]
    found = (trace.square() / (0.81 * square + 0.19 * trace.square() / width) - 1) / (width - 1)
    assert float((found - wanted).abs().max()) < (1e-9 if width < 64 else 2e-5)


def test_a_planted_direction_holds_the_anisotropy(seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(500, 20, generator=generator)
    gradients[:, 0] *= 6
    basis = torch.eye(20)[:, :2]
    found = anisotropy_share(gradients, basis, control_bases(basis, "normal", 99, seed=seed))
    assert found.isoscore_star.value > 0.3 and found.p_isoscore_star == 0.01
    assert found.spectral_ratio.value < -0.3 and found.p_spectral_ratio == 0.01


def test_leading_eigenvalues_without_bases_on_a_wide_flat_spectrum(one_seed):
    """No gap to help the iteration: it still agrees with the whole decomposition."""
    gradients = draw(one_seed, 150, 200)
    covariance = torch.cov(gradients.T)
    bases = control_bases(haar(200, 9, one_seed), "normal", 3, seed=one_seed)
    found, notes = spectral_ratios_without(covariance, bases)
    for one, value in zip(bases, found, strict=True):
        off = gradients - gradients @ one @ one.T
        assert float(value) == pytest.approx(spectral_ratio(off).value, rel=1e-6)
    assert notes == ()


def slow_reader(x, g, basis):
    whole = sum(torch.outer(b, a) for a, b in zip(x, g, strict=True))
    return float((whole @ basis).square().sum() / whole.square().sum())


def reader_case(seed, n=24, m=7):
    return draw(seed, n), draw(seed + 9, n, m), haar(seed=seed)


@pytest.mark.parametrize("grouped", [False, True])
def test_reader_share_is_the_slow_one(grouped, seed):
    x, g, basis = reader_case(seed)
    labels = torch.tensor([4, 1, 2, 1, 0, 0] * 4) if grouped else torch.arange(24)
    found = reader_share(x, g, basis, groups=labels if grouped else None)
    assert found.value == pytest.approx(slow_reader(x, g, basis), rel=1e-10)
    assert found.value == pytest.approx(side_share(g.T @ x, basis, "input").value, rel=1e-10)
    left = [slow_reader(x[labels != name], g[labels != name], basis) for name in labels.unique()]
    count = len(left)
    stderr = math.sqrt((count - 1) / count * sum((v - np.mean(left)) ** 2 for v in left))
    assert found.stderr == pytest.approx(stderr, rel=1e-7)
    assert found.over == ("4 sequences" if grouped else "rows")


def test_both_roads_to_permuted_shares_are_the_slow_one(seed):
    x, g, basis = reader_case(seed)
    orders = _orders(Units.of(None, 24, "cpu"), 9, seed, "tokens")
    expected = [slow_reader(x, g[order], basis) for order in orders]
    assert _by_gram(x, g, basis, orders).tolist() == pytest.approx(expected, rel=1e-8)
    assert _by_product(x, g, basis, orders).tolist() == pytest.approx(expected, rel=1e-8)
    found = permuted_signal_null(x, g, basis, permutations=9, seed=seed)
    assert found.null_shares.tolist() == pytest.approx(expected, rel=1e-8)
    assert found.excess.value == pytest.approx(slow_reader(x, g, basis) - np.mean(expected), rel=1e-7)
    assert found.excess.stderr == pytest.approx(np.std(expected, ddof=1) * math.sqrt(10 / 9), rel=1e-7)
    assert found.p == (1 + sum(value >= found.share.value for value in expected)) / 10


def test_schemes_deal_out_what_they_say():
    labels = torch.tensor([5, 2, 5, 2, 9, 9, 2, 5, 9])
    units = Units.of(labels, 9, "cpu")
    for order in _orders(units, 50, 0, "within"):
        assert sorted(order.tolist()) == list(range(9)) and torch.equal(labels[order], labels)
    assert len({tuple(order.tolist()) for order in _orders(units, 300, 0, "within")}) > 100
    seen = set()
    for order in _orders(units, 50, 0, "sequences"):
        assert sorted(order.tolist()) == list(range(9))
        for name in (2, 5, 9):
            moved = order[labels == name]
            assert len(labels[moved].unique()) == 1 and torch.equal(moved, moved.sort().values), "whole and in order"
        seen.add(tuple(order.tolist()))
    assert len(seen) == 6
    x, g, basis = reader_case(0)
    with pytest.raises(OptionError, match="give groups"):
        permuted_signal_null(x, g, basis, scheme="within")
    with pytest.raises(OptionError, match="1 to 23 tokens"):
        permuted_signal_null(x, g, basis, scheme="sequences", groups=torch.tensor([0] + [1] * 23))


@dataclass(frozen=True)
class Fitted:
    basis: torch.Tensor


def pca(rows, rank):
    rows = rows - rows.mean(dim=0)
    return Fitted(torch.linalg.svd(rows, full_matrices=False).Vh[:rank].T.contiguous())


def test_cross_fit_never_tests_what_it_fitted(seed):
    x, gradients = draw(seed, 96), draw(seed + 3, 96)
    labels = torch.arange(96) % 12
    fitted = []

    def fit(rows, rank):
        fitted.append((rows, rank))
        return pca(rows, rank)

    (found,) = cross_fit(x, gradients, labels, fit, ranks=(3,), draws=19, seed=seed)
    assert [rank for _, rank in fitted] == [3, 3]
    expected = []
    for rows, _ in fitted:
        inside = torch.tensor([bool((rows == row).all(dim=1).any()) for row in x])
        assert int(inside.sum()) == 48 and len(labels[inside].unique()) == 6
        assert not set(labels[inside].tolist()) & set(labels[~inside].tolist()), "whole sequences"
        expected.append(energy_share(gradients[~inside], pca(rows, 3).basis, groups=labels[~inside]))
    assert found.share.value == pytest.approx(np.mean([e.value for e in expected]), rel=1e-9)
    stderr = math.hypot(*(e.stderr for e in expected)) / 2
    assert found.share.stderr == pytest.approx(stderr, rel=1e-9) and "sequences" in found.share.over
    null = (found.folds[0].random_shares + found.folds[1].random_shares) / 2
    assert found.p == (1 + int((null >= found.share.value).sum())) / 20


def test_rank_sweep_of_nested_fits_is_one_fit_a_half(one_seed):
    x, gradients, labels = draw(one_seed, 96), draw(one_seed + 3, 96), torch.arange(96) % 12
    calls = []

    def fit(rows, rank):
        calls.append(rank)
        return pca(rows, rank)

    sweep = cross_fit(x, gradients, labels, fit, ranks=(1, 2, 5), nested=True, draws=9, seed=one_seed)
    assert calls == [5, 5] and [found.rank for found in sweep] == [1, 2, 5]
    assert sweep[0].share.value < sweep[1].share.value < sweep[2].share.value
    apart = cross_fit(x, gradients, labels, fit, ranks=(2,), draws=9, seed=one_seed)
    assert sweep[1].share.value == pytest.approx(apart[0].share.value, rel=1e-9), "principal axes are nested"


def test_known_fits_are_not_made_again(one_seed):
    x, gradients, labels = draw(one_seed, 96), draw(one_seed + 3, 96), torch.arange(96) % 12
    calls = []

    def fit(rows, rank):
        calls.append(pca(rows, rank))
        return calls[-1]

    plain = cross_fit(x, gradients, labels, fit, ranks=(2, 5), draws=9, seed=one_seed)
    second, first = calls[2:]  # half 1 is fitted first
    calls.clear()
    again = cross_fit(x, gradients, labels, fit, ranks=(2, 5), known={5: (first, second)}, draws=9, seed=one_seed)
    assert len(calls) == 2 and [one.ratio.value for one in again] == [one.ratio.value for one in plain]


def test_cross_fit_removes_the_bias_of_testing_on_the_fit(one_seed):
    """Gradients that are noise copies of the activations: fitted on themselves they align, across halves not."""
    generator = torch.Generator().manual_seed(one_seed)
    x = torch.randn(60, 40, generator=generator, dtype=torch.float64)
    own = energy_share(x, pca(x, 5).basis)
    (crossed,) = cross_fit(x, x, torch.arange(60), pca, ranks=(5,), draws=99, seed=one_seed)
    assert own.value > 5 / 40 + 8 * own.stderr
    assert abs(crossed.share.value - 5 / 40) < 5 * crossed.share.stderr


def test_refusals():
    gradients, basis = draw(0), haar()
    with pytest.raises(DegenerateError, match="zero everywhere"):
        energy_share(gradients * 0, basis)
    bad = gradients.clone()
    bad[[3, 7], 2] = float("nan")
    with pytest.raises(NonFiniteError, match="rows 3 and 7 of 60"):
        energy_share(bad, basis)
    with pytest.raises(ShapeError, match="same space"):
        bare(energy_share)(gradients[:, :-1], basis)
    with pytest.raises(ShapeError, match="not orthonormal"):
        energy_share(gradients, 2 * basis)
    with pytest.raises(ShapeError, match="59 labels for 60 rows"):
        energy_share(gradients, basis, groups=torch.arange(59))
    with pytest.raises(TooFewRowsError, match="no row"):
        energy_share(gradients[:0], basis)
    with pytest.raises(OptionError, match="draws=0"):
        energy_test(gradients, basis, draws=0)
    with pytest.raises(UnknownNameError, match="did you mean 'normal'"):
        energy_test(gradients, basis, controls="norml")
    with pytest.raises(OptionError, match="too few"):
        energy_test(gradients, haar(WIDTH, 8))
    with pytest.raises(OptionError, match="give rows"):
        energy_test(gradients, basis, controls="normal_top")
    with pytest.raises(DegenerateError, match="no gradient lies outside"):
        energy_test(gradients @ basis @ basis.T, basis, draws=5)
    with pytest.raises(DegenerateError, match="all equal"):
        variance_share(torch.ones(5, WIDTH), basis)
    with pytest.raises(OptionError, match="zeta"):
        anisotropy_share(gradients, basis, basis[None], 1.5)
    with pytest.raises(ShapeError, match="want"):
        bare(anisotropy_share)(gradients, basis, basis[None, :, :2])
    with pytest.raises(OptionError, match="at least one control"):
        anisotropy_share(gradients, basis, basis[None][:0])
    with pytest.raises(DegenerateError, match="nothing is left"):
        anisotropy_share(gradients @ basis @ basis.T, basis, basis[None])
    with pytest.raises(ShapeError, match="one signal for each token"):
        bare(reader_share)(gradients, gradients[:-1], basis)
    with pytest.raises(OptionError, match="permutations=0"):
        permuted_signal_null(gradients, gradients, basis, permutations=0)
    with pytest.raises(TooFewRowsError, match="5 sequences"):
        cross_fit(gradients, gradients, torch.arange(60) % 5, pca)
    with pytest.raises(OptionError, match="ranks"):
        cross_fit(gradients, gradients, torch.arange(60), pca, ranks=())
    with pytest.raises(ShapeError, match="asked for rank 4"):
        cross_fit(gradients, gradients, torch.arange(60), lambda rows, rank: pca(rows, 3), ranks=(4,))


def test_one_row_has_a_share_and_no_error_bar():
    found = energy_test(draw(0, 1), haar(), draws=9)
    assert found.share.stderr is None and found.ratio.stderr is None and 0 < found.share.value < 1
    assert any("no error bar" in note for note in found.share.notes)
