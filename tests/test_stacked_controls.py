"""The kernel of controls, run by Triton's interpreter, says what plain products say."""

import pytest
import torch
from test_kernels import run

from anisoscope.tangent import stacked_controls
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


def test_sites_few_at_a_time(cases):
    found = cases["few"]
    assert max(found.values()) < 1e-10, found


def test_draws_without_an_inverse_have_no_energy(cases):
    found = cases["singular"]
    assert max(found["gaps"].values()) < 1e-10, found
    assert found["random"] == [[False, True, False, False, True]]
    empty, inside = [False, True, False, False, True], [False, True, False, True, True]
    assert found["normal"] == [[empty, empty], [inside, empty]], "the fourth draw lies inside one basis of one site"
    for name in ("traces", "squares"):
        assert found[name] == [[[False, *one] for one in site] for site in found["normal"]], name


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
    monkeypatch.setattr(stacked_controls, "_inverses", lambda inner, off: (inner, off))
    eye = torch.eye(40).double()
    moments = Moments(torch.zeros(1, 0, 40, 40).double(), 9 * eye[None], torch.zeros(1, 40).double(), 9)
    z = torch.randn(3, 33, 40, generator=torch.Generator().manual_seed(0))
    for rank, bases, small in ((32, 1, True), (33, 1, False), (32, 0, False)):
        for here in (True, False):
            monkeypatch.setattr(stacked_controls, "has_kernels", lambda device, rank, here=here: here)
            asked.clear()
            of_controls(moments, eye[None, None, :, :rank].expand(1, bases, 40, rank), z[:, :rank], torch.float64)
            assert bool(asked) == (small and here), (rank, bases, here)
