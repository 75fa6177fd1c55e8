"""Band forms of many matrices: the kernel in Triton's interpreter, and the plain way."""

import pytest
import torch
from test_kernels import run

from anisoscope.measures import banded as module
from anisoscope.measures.banded import banded, dense, share_of


@pytest.fixture(scope="module")
def kernels():
    """What the kernel gave, all cases in one process: most of its time is the interpreter's."""
    return run(script="banded_cases.py")


def test_kernels_find_a_similar_band_matrix(kernels):
    assert len(kernels["names"]) == 10
    for quantity in ("values", "orthonormal", "similar"):
        for name, error in zip(kernels["names"], kernels[quantity], strict=True):
            assert error < 1e-13, (quantity, name)
    assert not any(kernels["beyond"])


@pytest.mark.parametrize("case", ["full", "width 2", "width 8", "width 9", "alone", "shared"])
def test_widths_and_programs(kernels, case):
    """Two blocks and nothing over, one block and less; four programs, which really wait for each other."""
    for quantity, errors in kernels[case].items():
        assert max(errors) < 1e-13, quantity


def test_what_is_not_finite_stays_with_its_matrix(kernels):
    assert kernels["lost"] and kernels["untouched"]


def test_the_same_matrix_gives_the_same_bits(kernels):
    assert kernels["same"], "alone and among others"


def covariances(many, width, seed=0, steep=4.0):
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(many, 3 * width, width, generator=draws, dtype=torch.float64)
    rows *= torch.logspace(0, -steep / 2, width, dtype=torch.float64)
    return rows.mT @ rows / (3 * width)


@pytest.mark.parametrize("width", [2, 31, 32, 33, 64, 150])
@pytest.mark.parametrize("size", [50, 64, 200])
def test_the_plain_way(seed, width, size, monkeypatch):
    """With products of reflectors that are all full, that are not, and with one that never is."""
    monkeypatch.setattr(module, "WY", size)
    a = covariances(3, width, seed)
    a[2] = torch.outer(a[0, 0], a[0, 0])
    t = banded(a)
    eye = torch.eye(width, dtype=torch.float64).expand(3, -1, -1)
    torch.testing.assert_close(t.q.mT @ a @ t.q, dense(t.band), rtol=0, atol=1e-13)
    torch.testing.assert_close(t.q.mT @ t.q, eye, rtol=0, atol=1e-13)
    torch.testing.assert_close(t.back(a.clone()), t.q @ a, rtol=0, atol=1e-12)


def test_the_edges():
    a = torch.stack([torch.zeros(40, 40), torch.eye(40) * 3, torch.full((40, 40), torch.nan), torch.eye(40)]).double()
    a[3, 2, 39] = a[3, 39, 2] = torch.inf
    found = dense(banded(a).band)
    assert torch.equal(found[:2], a[:2]) and torch.isnan(found[2:]).any(dim=2).all()
    one = covariances(1, 40)
    for scale in (2.0**-900, 2.0**900):
        assert torch.equal(banded(one * scale).band / scale, banded(one).band)


def test_the_rule_can_be_read():
    assert share_of(2016, 25, 132) == (128, 4) and share_of(2016, 40, 132) == (256, 8)
    assert share_of(4064, 25, 132) == (256, 8) and share_of(1, 1000, 132) == (256, 8)
