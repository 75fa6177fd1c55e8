"""Tangent proxies: known subspaces with predicted angles, what tells the fits apart, invariances, ranks, tracking."""

import math

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
from anisoscope.tangent.cloud import Cloud
from anisoscope.tangent.proxies import KINDS, ProxyTracker, choose_rank, drift, fit_proxy, fit_ranks
from anisoscope.tangent.spans import orthonormal, overlap, principal_angles

FITTED = [kind for kind in KINDS if kind != "random"]
ITERATED = ["seminmf", "ica", "kmeans"]


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def subspace(seed, d, k):
    return torch.linalg.qr(normal(seed + 1000, d, k)).Q


def on_a_subspace(seed, n=2000, d=20, k=4, noise=0.01):
    """Rows with k independent sparse coordinates of unit variance in a subspace, white noise about it, a mean."""
    truth = subspace(seed, d, k)
    generator = torch.Generator().manual_seed(seed)
    signal = normal(seed, n, k) * (torch.rand(n, k, generator=generator) < 0.5) * math.sqrt(2)
    return signal @ truth.T + noise * normal(seed + 1, n, d) + 3 * normal(seed + 2, d), truth


def sines2(a, b):
    return torch.sin(torch.deg2rad(principal_angles(a, b))).square()


def test_proxies_of_one_cloud_are_those_of_its_rows(seed):
    rows, _ = on_a_subspace(seed, n=300)
    cloud = Cloud(rows, seed=seed)
    for kind in KINDS:
        shared, alone = (fit_proxy(given, kind, 4, seed=seed) for given in (cloud, rows))
        assert torch.equal(shared.basis, alone.basis) and shared.facts == alone.facts
    for wrong in ({"seed": seed + 1}, {"seed": seed, "centre": False}, {"seed": seed, "mask": torch.ones(300).bool()}):
        with pytest.raises(OptionError, match="the cloud has seed"):
            fit_proxy(cloud, "pca", 4, **wrong)


def test_pca_misses_a_subspace_by_as_much_as_theory_says(seed):
    """Leading order: each of K (D - K) tilts has variance s2 (1 + s2) / N for unit signal and noise of variance s2."""
    n, d, k, noise = 2000, 20, 4, 0.3
    truth = subspace(seed, d, k)
    rows = normal(seed, n, k) @ truth.T + noise * normal(seed + 1, n, d)
    each = noise**2 * (1 + noise**2) / n
    tilts = k * (d - k)
    got = float(sines2(fit_proxy(rows, "pca", k).basis, truth).sum())
    assert abs(got - tilts * each) < 5 * math.sqrt(2 * tilts) * each


@pytest.mark.parametrize("kind", FITTED)
def test_every_fit_finds_a_subspace_that_holds_the_rows(kind, seed):
    """The largest angle is of the order of the noise of a direction averaged over few rows.

    A direction made of m rows, of signal near 1, is off by noise * sqrt((D - K) / m); 16 rows are a weak demand on any
    of the fits, and local frames see the noise against a neighbourhood's radius, here not below a fifth of the spread.
    """
    rows, truth = on_a_subspace(seed)
    found = fit_proxy(rows, kind, 4, seed=seed)
    bound = 5 * 0.01 * math.sqrt(16 / 16) / (0.2 if kind == "local_pca" else 1)
    assert float(sines2(found.basis, truth).max()) < bound**2
    assert found.facts["explained"] > 0.998
    assert fit_proxy(rows, "random", 4).facts["explained"] < 0.7


def test_explained_and_mean_share_are_what_they_say(seed):
    rows, _ = on_a_subspace(seed)
    found = fit_proxy(rows, "random", 4, seed=seed)
    mean, centred = rows.mean(dim=0), rows - rows.mean(dim=0)
    inside = found.basis @ found.basis.T
    assert found.facts["explained"] == pytest.approx(float((centred @ inside).square().sum() / centred.square().sum()))
    assert found.facts["mean_share"] == pytest.approx(float((inside @ mean) @ mean / (mean @ mean)))
    pca = fit_proxy(rows, "pca", 3)
    assert pca.facts["error"] == pytest.approx(1 - pca.facts["explained"], abs=1e-9)


def test_what_ica_sees_that_pca_does_not(seed):
    """Two Gaussian directions of large variance, two of heavy tails and less of it."""
    turn = subspace(seed, 8, 8)
    tails = normal(seed, 4000, 2) ** 3 / math.sqrt(15)
    rows = torch.cat([3 * normal(seed + 1, 4000, 2), 1.5 * tails, 0.05 * normal(seed + 2, 4000, 4)], dim=1) @ turn.T
    assert float(sines2(fit_proxy(rows, "ica", 2).basis, turn[:, 2:4]).max()) < 0.02
    assert float(sines2(fit_proxy(rows, "pca", 2).basis, turn[:, :2]).max()) < 0.02
    # With no more directions than components there is nothing to choose, and it says so.
    whole = fit_proxy(rows[:, :2], "ica", 2)
    assert "span of PCA" in whole.notes[-1]


def test_what_local_pca_sees_that_pca_and_k_means_do_not(seed):
    """Five clusters far apart along one line, each spread over a plane: tangents lie in the plane."""
    turn = subspace(seed, 10, 10)
    place = 30.0 * (torch.arange(1500) % 5)
    rows = place[:, None] * turn[:, 0] + normal(seed, 1500, 2) @ turn[:, 1:3].T + 0.01 * normal(seed + 1, 1500, 10)
    local = fit_proxy(rows, "local_pca", 2)
    assert float(sines2(local.basis, turn[:, 1:3]).max()) < 0.01
    assert local.facts["local_dimension"] == 2
    assert local.facts["frames_held"] > 0.98
    for kind in ("pca", "kmeans"):
        assert float(sines2(fit_proxy(rows, kind, 1).basis, turn[:, :1]).max()) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_bases_are_orthonormal_of_fixed_sign_and_the_same_for_a_seed(kind):
    rows, _ = on_a_subspace(0, noise=0.2)
    for data in (rows, rows.float(), rows.to(torch.bfloat16)):
        found = fit_proxy(data, kind, 3, seed=5)
        assert found.basis.shape == (20, 3)
        assert found.basis.dtype == torch.float64
        assert float((found.basis.T @ found.basis - torch.eye(3, dtype=torch.float64)).abs().max()) < 1e-12
        largest = found.basis.gather(0, found.basis.abs().argmax(dim=0, keepdim=True))
        assert bool((largest > 0).all())
        assert torch.equal(found.basis, fit_proxy(data, kind, 3, seed=5).basis)


@pytest.mark.parametrize("kind", FITTED)
def test_rotation_translation_scale(kind, seed):
    """Spans turn with the rows. Fits that end at a tolerance end a little apart, and frames in float64 do not."""
    rows, _ = on_a_subspace(seed, noise=0.02)
    turn = subspace(seed + 5, 20, 20)
    plain = fit_proxy(rows, kind, 4).basis
    for other, back in ((rows @ turn, turn), (rows + 7, None), (rows * 2.0**600, None)):
        found = fit_proxy(other, kind, 4).basis
        assert float(principal_angles(found if back is None else back @ found, plain).max()) < 0.5


@pytest.mark.parametrize("kind", ["pca", "ica"])
def test_the_order_of_rows_does_not_matter(kind, seed):
    rows, _ = on_a_subspace(seed, noise=0.02)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    assert float(drift(fit_proxy(rows, kind, 4), fit_proxy(rows[order], kind, 4)).max()) < 0.1


def test_uncentred_spans_hold_the_mean_and_centred_ones_need_not():
    rows, _ = on_a_subspace(0)
    rows = rows + 50
    for kind in ("seminmf", "pca", "kmeans"):
        assert fit_proxy(rows, kind, 4, centre=False).facts["mean_share"] > 0.99
        assert fit_proxy(rows, kind, 4).facts["mean_share"] < 0.9
    with pytest.raises(OptionError, match="never sees the mean"):
        fit_proxy(rows, "ica", 4, centre=False)


def test_random_bases_are_uniform():
    """E Q Q^T = (K / D) I: each entry of the mean of 400 projectors, against its own spread over draws."""
    rows = normal(0, 5, 6)
    draws = torch.stack([fit_proxy(rows, "random", 2, seed=s).basis for s in range(400)])
    projectors = draws @ draws.transpose(1, 2)
    away = projectors.mean(dim=0) - torch.eye(6, dtype=torch.float64) / 3
    assert float((away.abs() / (projectors.std(dim=0) / 20)).max()) < 5
    assert torch.equal(fit_proxy(rows, "random", 2).basis, fit_proxy(rows + 9, "random", 2).basis)


@pytest.mark.parametrize("kind", ITERATED)
def test_warm_starts_are_faster(kind, seed):
    """Rows that moved a little since: five clusters, and coordinates of heavy tails that a component can settle on."""
    heavy = normal(seed, 1500, 16) ** 3 * torch.linspace(1, 0.5, 16)
    rows = (heavy + 6 * normal(seed + 3, 5, 16)[torch.arange(1500) % 5]) @ subspace(seed, 16, 16).T
    before = fit_proxy(rows, kind, 4, seed=seed)
    later = rows + 0.01 * normal(seed + 9, *rows.shape)
    cold, warm = fit_proxy(later, kind, 4, seed=seed), fit_proxy(later, kind, 4, seed=seed, warm=before)
    assert warm.facts["iterations"] < cold.facts["iterations"]
    assert float(drift(before, warm).max()) < 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_over_ranks_is_the_fits_one_by_one(kind):
    rows, _ = on_a_subspace(3, n=600, noise=0.3)
    found = fit_ranks(rows, kind, [2, 5, 3, 2])
    assert list(found) == [2, 5, 3]
    for rank, proxy in found.items():
        alone = fit_proxy(rows, kind, rank)
        assert float(drift(proxy, alone).max()) < 1e-6
        assert proxy.facts == pytest.approx(alone.facts)
    with pytest.raises(OptionError, match="at least one rank"):
        fit_ranks(rows, kind, [])


def test_wide_rows_by_lanczos_as_by_full_decomposition(monkeypatch):
    from anisoscope.tangent import cloud

    rows = normal(0, 300, 80) * torch.linspace(3, 0.1, 80)
    full = fit_proxy(rows, "pca", 5)
    monkeypatch.setattr(cloud, "LANCZOS_WIDTH", 10)
    assert float(drift(full, fit_proxy(rows, "pca", 5)).max()) < 1e-6
    few = normal(1, 12, 80)
    assert fit_proxy(few, "pca", 11).facts["explained"] == pytest.approx(1)


def test_ranks_by_rule():
    spread = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64).sqrt()
    rows = orthonormal(normal(0, 4000, 5) - normal(0, 4000, 5).mean(dim=0)) * spread  # shares .5 .25 .125 .0625 .0625
    rows = rows - rows.mean(dim=0)
    for share, rank in ((0.4, 1), (0.6, 2), (0.8, 3), (0.93, 4), (1.0, 5)):
        found = choose_rank(rows, "explained", share=share)
        assert found.rank == rank
        assert found.value >= share - 1e-9
    sheet = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ subspace(0, 9, 2).T
    by_dimension = choose_rank(sheet, "dimension")
    assert abs(by_dimension.value - 2) < 0.3
    assert by_dimension.rank == math.ceil(by_dimension.value)
    limited = choose_rank(rows, "explained", share=1.0, most=2)
    assert limited.rank == 2
    assert "cut to 2" in limited.notes[-1]
    assert choose_rank(rows, rank=3).rank == 3
    with pytest.raises(OptionError, match="rank 80 exceeds width 5"):
        choose_rank(rows, rank=80)
    with pytest.raises(OptionError, match="share"):
        choose_rank(rows, "explained", share=1.5)


def test_angles_of_known_planes():
    a = torch.eye(4, dtype=torch.float64)[:, :2]
    for degrees in (1e-9, 1e-3, 30.0, 44.9, 45.1, 89.0, 90.0):
        t = math.radians(degrees)
        b = torch.tensor([[1.0, 0, 0, 0], [0, math.cos(t), math.sin(t), 0]], dtype=torch.float64).T
        got = principal_angles(a, b)
        assert float(got[0]) < 1e-12
        assert float(got[1]) == pytest.approx(degrees, rel=1e-6)
        assert overlap(a, b) == pytest.approx((1 + math.cos(t) ** 2) / 2)
    assert principal_angles(a, a[:, :1]).shape == (1,)
    with pytest.raises(ShapeError, match="width"):
        principal_angles(a, torch.eye(3, dtype=torch.float64))


def probes(count, turn_by):
    """Rows of a plane that turns by a fixed angle between probes."""
    for i in range(count):
        t = math.radians(turn_by * i)
        plane = torch.tensor([[1.0, 0, 0, 0], [0, math.cos(t), math.sin(t), 0]], dtype=torch.float64)
        yield normal(i, 500, 2) @ plane


def test_tracker_drift_reads_the_turn_of_the_plane():
    tracker = ProxyTracker("pca", 2, "drift")
    turns = []
    for step, rows in enumerate(probes(4, 10)):
        tracker, proxy, angles = tracker.update(step, rows)
        assert tracker.proxy is proxy
        turns.append(angles)
    assert turns[0] is None
    for angles in turns[1:]:
        assert float(angles[0]) < 1e-5
        assert float(angles[1]) == pytest.approx(10)


def test_tracker_frozen_keeps_the_last_early_fit():
    start = ProxyTracker("pca", 2, "frozen", freeze_share=0.3)
    tracker, kept = start, []
    for step, rows in enumerate(probes(5, 10)):
        tracker, proxy, angles = tracker.update(step, rows, step / 5)
        assert angles is None
        kept.append(proxy)
    assert start.proxy is None  # a value: the first tracker is what it was
    assert float(drift(kept[0], kept[1]).max()) == pytest.approx(10)
    assert all(proxy is kept[1] for proxy in kept[2:])
    _, late, _ = start.update(0, next(probes(1, 0)), 0.8)
    assert "after the 30%" in late.notes[-1]
    with pytest.raises(OptionError, match="share of training"):
        start.update(0, next(probes(1, 0)))


def test_tracker_refit_is_warm_and_in_order():
    rows, _ = on_a_subspace(0, noise=0.2)
    tracker, first, _ = ProxyTracker("ica", 3).update(10, rows)
    tracker, second, angles = tracker.update(20, rows + 0.001 * normal(5, *rows.shape))
    assert angles is None
    assert second.facts["iterations"] < first.facts["iterations"]
    with pytest.raises(OptionError, match="step 20 after step 20"):
        tracker.update(20, rows)
    with pytest.raises(OptionError, match="freeze_share"):
        ProxyTracker("pca", 2, freeze_share=0)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_rows(kind):
    rows = normal(0, 100, 64)
    with pytest.raises(OptionError, match="rank 80 exceeds width 64; take a rank of at most 64"):
        fit_proxy(rows, kind, 80)
    with pytest.raises(OptionError, match="at least 1"):
        fit_proxy(rows, kind, 0)
    with pytest.raises(DegenerateError, match="equal"):
        fit_proxy(torch.full((50, 8), 0.1), kind, 2)
    with pytest.raises(TooFewRowsError):
        fit_proxy(rows[:1], kind, 2)
    with pytest.raises(ShapeError, match="warm start needs"):
        fit_proxy(rows, kind, 3, warm=fit_proxy(rows, "random", 2))
    rows[3, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="row 3"):
        fit_proxy(rows, kind, 2)


@pytest.mark.parametrize("kind", FITTED)
def test_rows_of_too_low_a_rank_are_refused(kind):
    flat = normal(0, 300, 2) @ subspace(0, 10, 2).T
    with pytest.raises(DegenerateError, match="directions"):
        fit_proxy(flat, kind, 5)


def test_names_and_streams():
    rows, truth = on_a_subspace(0)
    with pytest.raises(UnknownNameError, match="did you mean 'local_pca'"):
        fit_proxy(rows, "local-pca", 2)
    stream = fit_proxy((part for part in rows.split(300)), "pca", 4)
    assert float(principal_angles(stream.basis, fit_proxy(rows, "pca", 4).basis).max()) < 1e-6
    keep = torch.arange(len(rows)) % 2 == 0
    masked = fit_proxy(torch.where(keep[:, None], rows, rows * 100), "pca", 4, mask=keep)
    assert float(sines2(masked.basis, truth).max()) < 1e-3
