"""Tridiagonal forms of many matrices: kernels in Triton's interpreter, the plain way, and what is built on both."""

import pytest
import torch
from test_kernels import run

from anisoscope.measures import tridiagonal
from anisoscope.measures.tridiagonal import eigenvalues, fits, floor, leading_vector, poles, programs_each, reduced


@pytest.fixture(scope="module")
def kernels():
    """What the kernels gave, all cases in one process: most of its time is the interpreter's."""
    return run(script="tridiagonal_cases.py")


def test_kernels_find_a_similar_tridiagonal_matrix(kernels):
    assert len(kernels["names"]) == 9
    for quantity in ("values", "orthonormal", "similar"):
        for name, error in zip(kernels["names"], kernels[quantity], strict=True):
            assert error < 1e-13, (quantity, name)


def test_programs_that_share_a_matrix(kernels):
    """Two of them, which really wait for each other; and one that takes all blocks of rows, one after another."""
    for case in ("shared", "alone"):
        for quantity, (error,) in kernels[case].items():
            assert error < 1e-13, (case, quantity)


def test_matrices_that_fill_their_tile_and_lie_otherwise_in_memory(kernels):
    for quantity, errors in kernels["full"].items():
        assert len(errors) == 2 and max(errors) < 1e-13, quantity


def test_what_is_not_finite_stays_with_its_matrix(kernels):
    assert all(kernels["lost"]) and kernels["untouched"], kernels["lost"]


def test_the_same_matrix_gives_the_same_bits(kernels):
    assert kernels["same"], "alone and among others"


def test_bisection(kernels):
    assert max(kernels["bisected"]) < 4e-15 and kernels["ascending"], kernels["bisected"]
    assert kernels["vanishing"] < 4e-15, "points where minors are exactly zero"


def test_forms_and_leading_vectors_by_kernels(kernels):
    assert kernels["forms"] < 5e-5
    for name, residual, unit in zip(kernels["names"], kernels["residual"], kernels["unit"], strict=True):
        assert residual < 2e-14 and unit < 1e-14, name


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariances(many, width, seed=0, steep=4.0):
    rows = drawn(many, 3 * width, width, seed=seed) * torch.logspace(0, -steep / 2, width, dtype=torch.float64)
    return rows.mT @ rows / (3 * width), rows


@pytest.mark.parametrize("size", [50, 64, 200])
def test_plain_forms_are_those_of_a_library(seed, size, monkeypatch):
    """With products of reflectors that are all full, that are not, and with one that never is."""
    monkeypatch.setattr(tridiagonal, "WY", size)
    a, _ = covariances(3, 150, seed)
    t = reduced(a)
    dense = torch.diag_embed(t.diagonal) + torch.diag_embed(t.off, 1) + torch.diag_embed(t.off, -1)
    torch.testing.assert_close(t.q.mT @ a @ t.q, dense, rtol=0, atol=1e-13)
    torch.testing.assert_close(t.q.mT @ t.q, torch.eye(150, dtype=torch.float64).expand(3, -1, -1), rtol=0, atol=1e-13)
    columns = drawn(3, 150, 2, seed=seed)
    torch.testing.assert_close(t.back(columns.clone()), t.q @ columns, rtol=0, atol=1e-12)
    truth, vectors = torch.linalg.eigh(a)
    values = eigenvalues(t.diagonal, t.off)
    torch.testing.assert_close(values, truth, rtol=0, atol=1e-13)
    cosines = (leading_vector(t, values[:, -1]) * vectors[:, :, -1]).sum(dim=1).abs()
    torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-12)


def test_plain_eigenvalues_at_the_edges():
    a = torch.stack([torch.zeros(6, 6), torch.eye(6) * 3, torch.full((6, 6), torch.nan), torch.eye(6)]).double()
    a[3, 2, 3] = a[3, 3, 2] = torch.inf
    t = reduced(a)
    values = eigenvalues(t.diagonal, t.off)
    assert values[:2].tolist() == [[0.0] * 6, [3.0] * 6]
    assert torch.isnan(values[2:]).all()
    assert torch.isnan(leading_vector(t, values[:, -1])[2:]).all()
    for scale in (1e-100, 1e100):
        t = reduced(covariances(1, 20)[0] * scale)
        truth = torch.linalg.eigvalsh(covariances(1, 20)[0])
        torch.testing.assert_close(eigenvalues(t.diagonal, t.off) / scale, truth, rtol=1e-10, atol=0)


@pytest.mark.parametrize("digits", [0, 1, 4, 8, 12])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_the_rational_sum_over_the_whole_spectrum(digits, scale):
    """Each function by itself; the logarithm, which crosses zero, relative to the larger of it and one."""
    values = scale * torch.logspace(-digits, 0, 300, dtype=torch.float64)[None]
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for a, b in ((one, none), (none, one), (2 * one, -0.3 * one)):
        shifts, weights = poles(values, a, b)
        found = (weights[:, None] / (values[:, :, None] + shifts[:, None])).sum(dim=2)
        truth = (a + b * values.log()) / values.sqrt()
        size = (a.abs() + b.abs() * values.log().abs().clamp_min(1)) / values.sqrt()
        assert float(((found - truth) / size).abs().max()) < 2e-6


def oracle(a, rows, slope, keep):
    lam, vectors = torch.linalg.eigh(a)
    f = (slope[0][:, None] + slope[1][:, None] * lam.clamp_min(1e-300).log()) / lam.clamp_min(1e-300).sqrt()
    return ((rows.double() @ vectors).square() * torch.where(keep, f, 0.0)[:, None]).sum(dim=2)


def test_forms_are_those_of_eigenvectors(seed):
    a, rows = covariances(2, 60, seed, steep=6.0)
    t, slope = reduced(a), (drawn(2, seed=1).abs(), drawn(2, seed=2).abs() * -0.3)  # a sum without cancellation
    found = t.forms(rows.float(), eigenvalues(t.diagonal, t.off), *slope)
    truth = oracle(a, rows.float(), slope, torch.ones(2, 60, dtype=torch.bool))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0)


def test_forms_leave_out_a_direction_that_rows_do_not_have():
    """As after a LayerNorm: rows sum to zero but for their rounding, and so does one eigenvalue."""
    _, rows = covariances(2, 60, steep=5.0)
    rows = (rows - rows.mean(dim=2, keepdim=True)).float()
    a = rows.double().mT @ rows.double() / rows.shape[1]
    t = reduced(a)
    values = eigenvalues(t.diagonal, t.off)
    counted = values > floor(values)[:, None]
    assert counted.sum(dim=1).tolist() == [59, 59]
    slope = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([0.0, -0.2], dtype=torch.float64)
    found, truth = t.forms(rows, values, *slope), oracle(a, rows, slope, counted)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=0)


def test_forms_of_what_is_not_finite():
    a, rows = covariances(2, 20)
    a[0, 3, 3] = torch.nan
    t = reduced(a)
    one = torch.ones(2, dtype=torch.float64)
    found = t.forms(rows.float(), eigenvalues(t.diagonal, t.off), one, one)
    assert torch.isnan(found[0]).all() and torch.isfinite(found[1]).all()


def test_the_rule_can_be_read():
    a = torch.zeros(8, 512, 512, dtype=torch.float64)
    assert not fits(a), "no GPU"
    assert programs_each(14, 132) == 18 and programs_each(9, 132) == 29 and programs_each(500, 132) == 1
    assert programs_each(1, 132) == tridiagonal.MOST_PROGRAMS
    for many in range(1, 133):
        assert many * programs_each(many, 132) <= tridiagonal.TOGETHER * 132, "all must run at once"
    assert tridiagonal.POLE_COUNT % 4 == 0 and tridiagonal.POLE_COUNT <= 64
    assert tridiagonal.NEGLIGIBLE**4 > 1e-200, "a group of steps of a Sturm sequence must not vanish"


def test_tiles_as_wide_as_half_of_what_is_left_of_a_matrix(monkeypatch):
    monkeypatch.setattr(tridiagonal, "TILE_STAGES", 4)
    for shared, stages in ((232_448, 4), (166_912, 3), (101_376, 2), (0, 1)):  # registers are always there
        assert tridiagonal.tile_of(2048, shared) == {"R": 4, "C": 1024, "STAGES": stages}
    for width, wide in ((1025, 1024), (1024, 512), (16, 512)):
        assert tridiagonal.tile_of(width)["C"] == wide
    for wide in tridiagonal.TILE_WIDTHS:
        assert wide % (tridiagonal.WARPS * tridiagonal.LANES) == 0, "all warps have as many columns"
        assert wide % tridiagonal.TILE_ROWS == 0, "a tile begins where a block of rows does"
    assert tridiagonal.WARPS * tridiagonal.TOGETHER * 32 * 256 <= 65_536, "registers of a processor"
    # Rows are filled up to a multiple of ALIGNED and no further.
    assert tridiagonal.ALIGNED % tridiagonal.TILE_ROWS == 0
