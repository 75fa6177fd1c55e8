"""The kernel of controls, run by Triton's interpreter, says what plain products say."""

import numpy as np
import pytest
import torch
from test_kernels import run

from anisoscope.tangent import stacked_controls
from anisoscope.tangent.anisotropy import LeftOver, unit_covariance
from anisoscope.tangent.drawn import Draws, held_gaussians
from anisoscope.tangent.stacked import resolved
from anisoscope.tangent.stacked_controls import Moments, of_controls


@pytest.fixture(scope="module")
def cases():
    return run(script="control_kernel_cases.py")


def test_the_kernel_says_what_plain_products_say(cases):
    for case, found in cases["shapes"].items():
        assert max(found.values()) < 1e-10, (case, found)


def test_products_with_groups_in_float32_leave_all_rows_as_close(cases):
    found = cases["narrow"]
    groups = found.pop("random"), found.pop("normal")
    assert max(found.values()) < 1e-10, found
    assert max(groups) < 1e-5, groups


def test_products_of_wide_rows_in_half_precision(cases):
    found = cases["halves"]
    for case, gaps in found["gaps"].items():
        assert max(gaps.values()) < 1e-6, (case, gaps)
    assert found["nothing"] == 0, found
    assert found["lost"] == [[False, False, True, True], [False] * 4], "a group and all rows, not what stands beside it"


def test_sites_few_at_a_time(cases):
    found = cases["few"]
    assert max(found.values()) < 1e-10, found


def test_bases_without_one_reflection_are_left_to_the_plain_path(cases):
    found = cases["unclear"]
    assert max(found["gaps"].values()) < 1e-10, found
    assert not found["random"], "no basis is in them"
    for name in ("normal", "traces"):
        assert found[name] == [[False, False], [True, False], [False, True]], name


def test_rows_without_a_spread(cases):
    found = cases["constant"]
    assert max(found[name] for name in ("random", "normal")) < 1e-10, found
    assert found["nothing left"], "there is no covariance to take shares of"


def test_the_kernel_is_asked_for_small_matrices_alone(monkeypatch):
    """Larger ones, and no basis at all, are left to plain products even where there are kernels."""
    asked, plain = [], stacked_controls._of_few

    def by_kernel(*given):
        asked.append(True)
        return plain(*given)

    monkeypatch.setattr(stacked_controls, "_by_kernel", by_kernel)
    eye, nine = torch.eye(80).double(), torch.full((1,), 9.0).double()
    moments = Moments(torch.zeros(1, 0, 80, 80).double(), 9 * eye[None], torch.zeros(1, 80).double(), nine)
    for rank, bases, small in ((32, 1, True), (33, 1, False), (32, 0, False)):
        for here in (True, False):
            monkeypatch.setattr(stacked_controls, "has_kernels", lambda device, rank, here=here: here)
            asked.clear()
            drawn = held_gaussians(80, rank, 3, seed=0, device=torch.device("cpu"), dtype=torch.float64)
            of_controls(moments, eye[None, None, :, :rank].expand(1, bases, 80, rank), drawn, torch.float64)
            assert bool(asked) == (small and here), (rank, bases, here)


def slanted(bases, small=(1e-4, 1e-6)):
    """The same spans' neighbours with some directions nearly at right angles to the first axes."""
    rank = bases.shape[3]
    left, values, right = torch.linalg.svd(bases[:, :, :rank].double())
    values[0, 0, -1], values[1, 1, -2:], values[2, 0, -1] = 1e-5, torch.tensor(small), 1e-7
    below = torch.linalg.qr(bases[:, :, rank:].double()).Q * (1 - values**2).sqrt()[:, :, None]
    return torch.cat([left * values[:, :, None] @ right, below @ right], dim=2)


@pytest.mark.parametrize("turn", [lambda bases: bases, slanted], ids=["orthonormal to float32", "slanted"])
def test_many_sites_meet_the_controls_of_each_alone(turn):
    """Random and normal ones, of groups and of all rows, and what is left."""
    sites, bases, width, rank, draws, n = 3, 2, 30, 4, 9, 50
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(3)
    rows = torch.randn(sites, 2, n, width, generator=generator, dtype=torch.float64) + 0.5
    groups, flat = rows.mT @ rows, rows.flatten(1, 2)
    moments = Moments(groups, groups.sum(dim=1), flat.mean(dim=1), torch.full((sites,), 2.0 * n).double())
    q = turn(torch.linalg.qr(torch.randn(sites, bases, width, rank, generator=generator)).Q)
    gaussians = held_gaussians(width, rank, draws, seed=5, device=device, dtype=torch.float64)
    found = of_controls(moments, q, gaussians, torch.float64)
    alone = Draws.of(q, draws, 5, device, torch.float64)
    random, normal = alone.of_moments(torch.cat([groups, groups.sum(dim=1, keepdim=True)], dim=1))
    torch.testing.assert_close(found.random, random, rtol=1e-10, atol=0)
    # A direction at nearly a right angle makes the choice of a reflection as uncertain, not the reflection itself.
    torch.testing.assert_close(found.normal, normal, rtol=1e-7 if turn is slanted else 1e-10, atol=0)
    left = LeftOver.of(torch.stack([unit_covariance(one) for one in flat]), q.double(), draws, 5)
    for name in ("traces", "squares", "whole"):  # float32 there
        torch.testing.assert_close(getattr(found, name), getattr(left, name), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("small", [(1e-4, 1e-6), (1e-6, 1e-7), (1e-7, 2e-8), (3e-8, 2e-8)])
def test_reflections_of_slanted_bases_are_reflections(small):
    q = slanted(torch.linalg.qr(torch.randn(3, 2, 60, 4, generator=torch.Generator().manual_seed(1))).Q, small)
    x = stacked_controls._mirrors(q)[:, :-1]
    assert float((x.mT @ x - 2 * torch.eye(4)).abs().max()) < 1e-8
    assert float((q - x @ (x.mT @ q))[:, :, 4:].abs().max()) < 1e-9, "not swapped with the first axes"


def test_hardly_a_basis_is_left_to_the_plain_path_by_chance():
    """Of wide rows one basis in sixty has a direction within 1e-4 of a right angle to the first axes."""
    q = torch.linalg.qr(torch.randn(1, 600, 1024, 16, generator=torch.Generator().manual_seed(0)).double()).Q
    least = torch.linalg.svdvals(q[:, :, :16])[0, :, -1]
    assert int((least < 1e-4).sum()) >= 2
    x = stacked_controls._mirrors(q)[:, :-1]
    away = (q - x @ (x.mT @ q))[:, :, 16:]
    assert float(away.abs().max()) < 1e-10, "not swapped with the first axes"


def test_what_halves_cannot_tell_is_left_to_the_plain_path():
    rank, width = 16, 2048
    chance = rank / width
    # By site, basis and group: all that there is by chance; hardly anything in one group; a group without tokens.
    shares = np.array([[[1.0, 1.0]], [[1.0, 5e-5]], [[1.0, 0.0]]]) * chance
    bottoms = np.ones((3, 4, 2)) * 5
    bottoms[2, :, 1] = 0
    normal = shares[..., None] * bottoms.sum(axis=1)[:, None, :, None] * np.array([0.9, 1.0, 1.1])
    half = {"normal": normal, "bottoms": bottoms}
    assert resolved(half, rank, width).tolist() == [True, False, True]
    assert resolved(half, rank, 1024).tolist() == [True] * 3, "float32 has more digits"
    half["normal"] = normal * 3
    assert resolved(half, rank, width).all(), "a hundredth of a hundredth of chance is the limit"
