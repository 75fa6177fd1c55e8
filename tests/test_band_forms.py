"""Forms and leading vectors of band matrices: kernels in Triton's interpreter, the plain way, and libraries."""

import pytest
import torch
from band_cases import banded, bare, kept, leading_errors, leading_matrices, projected, rational
from test_kernels import run

from anisoscope.measures import band_forms
from anisoscope.measures.band_forms import dense, forms, leading_vector


@pytest.fixture(scope="module")
def kernels():
    """What the kernels gave, all cases in one process: most of its time is the interpreter's."""
    return run(script="solves_cases.py")


def test_forms_by_kernels(kernels):
    """Spectra over twelve digits, of two values as far apart, and with one value far above all others; rows that
    do not fill a tile, poles that have no weight, and matrices that are taken one after another."""
    assert set(kernels["forms"]) == {"steep", "two", "spike", "alone"}
    for name, error in kernels["forms"].items():
        assert error < 5e-6, name


def test_forms_by_kernels_leave_out_a_direction_that_rows_do_not_have(kernels):
    assert kernels["projected"] < 1e-4


def test_a_pivot_that_rounding_makes_negative_is_taken_for_the_least(kernels):
    assert kernels["clamped"] < 1e-6


def test_leading_vectors_by_kernels(kernels):
    assert len(kernels["leading"]) == 12
    for name, error in kernels["leading"].items():
        assert error < 5e-15, name


def test_what_is_not_finite_stays_with_its_matrix(kernels):
    assert kernels["lost"] == [True, True] and kernels["untouched"]


def test_bands_and_full_matrices():
    a = bare(torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 3)
    assert torch.equal(dense(kept(a, 3)), a)
    assert torch.equal(dense(kept(a[:, :2, :2], 3)), a[:, :2, :2])


def test_plain_forms_are_those_of_eigenvectors(seed):
    lam = torch.logspace(0, -8, 40, dtype=torch.float64)
    full, vectors = banded(lam, 4, seed)
    rows = torch.randn(1, 40, 9, generator=torch.Generator().manual_seed(seed))
    shifts, weights, f = rational(lam, 36)
    found = forms(kept(full[None], 4), rows, shifts, weights, torch.zeros(1, dtype=torch.float64))
    truth = (f[:, None] * (vectors.T @ rows.double()).square()).sum(dim=1)
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=0)


def test_plain_forms_leave_out_a_direction_that_rows_do_not_have():
    band, rows, shifts, weights, least, truth = projected(40, 4)
    torch.testing.assert_close(forms(band, rows, shifts, weights, least), truth, rtol=1e-3, atol=0)


def test_the_plain_way_with_what_is_not_finite():
    full, _ = banded(torch.linspace(1, 2, 10, dtype=torch.float64), 2)
    band = kept(torch.stack([full, full]), 2)
    band[0, 3, 1] = torch.nan
    one = torch.ones(2, 1, dtype=torch.float64)
    found = forms(band, torch.ones(2, 10, 3), one, one, one[:, 0])
    assert torch.isnan(found[0]).all() and torch.isfinite(found[1]).all()
    lead = leading_vector(band, one[:, 0])
    assert torch.isnan(lead[0]).all() and torch.isfinite(lead[1]).all()


def test_plain_leading_vectors():
    for name, a in leading_matrices(21, 4).items():
        top = torch.linalg.eigvalsh(a[None])[:, -1]
        assert leading_errors(a[None], top, leading_vector(kept(a[None], 4), top))[0] < 1e-14, name


def test_the_start_of_inverse_iteration_has_a_share_of_every_wave():
    start = band_forms._start(1, 2048, torch.zeros(1))[0]
    share = torch.fft.rfft(start / start.norm(), norm="ortho").abs()
    assert float(share.min()) > 1e-5 and float(share.max()) < 0.2
