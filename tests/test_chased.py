"""Tridiagonal forms of band matrices: the kernel in Triton's interpreter, the plain way, and the rule."""

import pytest
import torch
from test_kernels import run

from anisoscope.measures import chased as measured
from anisoscope.measures.chased import chased, programs_each


@pytest.fixture(scope="module")
def kernels():
    """What the kernel gave, all cases in one process: most of its time is the interpreter's."""
    return run(script="chase_cases.py")


def test_the_kernel_keeps_the_spectrum(kernels):
    assert len(kernels["names"]) == 10
    for name, error in zip(kernels["names"], kernels["errors"], strict=True):
        assert error < 1e-14, name


def test_widths_that_fill_their_blocks_and_that_do_not(kernels):
    assert len(kernels["widths"]) == 14
    for name, error in kernels["widths"].items():
        assert error < 1e-14, name


def test_a_diagonal_matrix_stays_as_it_is(kernels):
    assert kernels["diagonal"]


def test_programs_that_share_a_matrix_find_the_same_bits(kernels):
    """Two and three of them, which really wait for each other."""
    assert kernels["shared"] == {"2": True, "3": True}
    assert kernels["slow"], "where each rests when the other begins"


def test_what_is_not_finite_stays_with_its_matrix(kernels):
    assert kernels["lost"] and kernels["alone"], "the one after it, among others and alone"


def test_what_was_given_is_not_changed(kernels):
    assert kernels["given"]


@pytest.mark.parametrize("width", [2, 5, 33, 100])
def test_the_plain_way_keeps_the_spectrum(seed, width):
    draws = torch.Generator().manual_seed(seed)
    full = torch.randn(3, width, width, generator=draws, dtype=torch.float64)
    full = torch.tril(full) - torch.tril(full, -33)
    band = torch.zeros(3, width, 64, dtype=torch.float64)
    for i in range(min(33, width)):
        band[:, : width - i, i] = full.diagonal(-i, 1, 2)
    diagonal, off = chased(band)
    assert diagonal.shape == (3, width) and off.shape == (3, width - 1)
    t = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    truth = torch.linalg.eigvalsh(full + torch.tril(full, -1).mT)
    torch.testing.assert_close(torch.linalg.eigvalsh(t), truth, rtol=0, atol=1e-13 * float(truth.abs().max()))


def test_the_plain_way_of_what_is_not_finite():
    band = torch.zeros(2, 6, 8, dtype=torch.float64)
    band[:, :, 0] = 1.0
    band[0, 2, 1] = torch.nan
    diagonal, off = chased(band)
    assert torch.isnan(diagonal[0]).all() and torch.isfinite(diagonal[1]).all() and torch.isfinite(off[1]).all()


def test_the_rule_can_be_read():
    assert programs_each(25, 2048, 32, 132) == 32, "sweeps two steps apart: no more have anything to do"
    assert programs_each(1, 20, 32, 132) == 1 and programs_each(5000, 2048, 32, 132) == 1
    assert programs_each(100, 2048, 32, 132) == 10
    for many in range(1, 2000, 7):
        each = programs_each(many, 2048, 32, 132)
        assert each == 1 or many * each <= measured.TOGETHER * 132, "all must run at once"
    assert measured.TOGETHER * measured.WARPS * 32 * 256 <= 65_536, "registers of a processor"
    assert measured.ROWS * measured.COLUMNS == 32, "threads of a warp"
