"""Eigenvalues from tridiagonal forms, functions of matrices as rational sums, and spectra that are made of both."""

import pytest
import torch
from test_kernels import run

from anisoscope.measures.banded import banded
from anisoscope.measures.chased import chased
from anisoscope.measures.stacked_spectra import Reduced
from anisoscope.measures.tridiagonal import MOST_WIDTH, eigenvalues, fits, floor, poles


def test_bisection():
    found = run(script="shifted_cases.py")
    assert max(found["bisected"]) < 4e-15 and found["ascending"], found["bisected"]
    assert found["vanishing"] < 4e-15, "points where minors are exactly zero"
    assert found["lost"], "what is not finite"


def reduced(a):
    form = banded(a)
    return Reduced(eigenvalues(*chased(form.band)), form)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariances(many, width, seed=0, steep=4.0):
    rows = drawn(many, 3 * width, width, seed=seed) * torch.logspace(0, -steep / 2, width, dtype=torch.float64)
    return rows.mT @ rows / (3 * width), rows


@pytest.mark.parametrize("width", [20, 150])
def test_spectra_are_those_of_a_library(seed, width):
    a, rows = covariances(3, width, seed)
    truth, vectors = torch.linalg.eigh(a)
    found = reduced(a)
    torch.testing.assert_close(found.values, truth, rtol=0, atol=1e-13)
    along = (rows @ vectors[:, :, -1:])[:, :, 0].square()
    torch.testing.assert_close(found.along_first(rows), along, rtol=1e-9, atol=1e-12)


def test_the_edges():
    a = torch.stack([torch.zeros(6, 6), torch.eye(6) * 3, torch.full((6, 6), torch.nan), torch.eye(6)]).double()
    a[3, 2, 3] = a[3, 3, 2] = torch.inf
    found = reduced(a)
    assert found.values[:2].tolist() == [[0.0] * 6, [3.0] * 6]
    assert torch.isnan(found.values[2:]).all()
    assert torch.isnan(found.along_first(torch.ones(4, 1, 6, dtype=torch.float64))[2:]).all()
    for scale in (1e-100, 1e100):
        values = reduced(covariances(1, 20)[0] * scale).values
        truth = torch.linalg.eigvalsh(covariances(1, 20)[0])
        torch.testing.assert_close(values / scale, truth, rtol=1e-10, atol=0)


@pytest.mark.parametrize("digits", [0, 1, 4, 8, 12])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_the_rational_sum_over_the_whole_spectrum(digits, scale):
    """Each function by itself; the logarithm, which crosses zero, relative to the larger of it and one."""
    values = scale * torch.logspace(-digits, 0, 300, dtype=torch.float64)[None]
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for a, b in ((one, none), (none, one), (2 * one, -0.3 * one)):
        shifts, weights = poles(values, a, b)
        assert int((weights != 0).sum()) <= 14 + 2 * digits, "no more than the spectrum needs"
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
    slope = (drawn(2, seed=1).abs(), drawn(2, seed=2).abs() * -0.3)  # a sum without cancellation
    found = reduced(a).forms(rows.float(), *slope)
    truth = oracle(a, rows.float(), slope, torch.ones(2, 60, dtype=torch.bool))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0)


def test_forms_leave_out_a_direction_that_rows_do_not_have():
    """As after a LayerNorm: rows sum to zero but for their rounding, and so does one eigenvalue."""
    _, rows = covariances(2, 60, steep=5.0)
    rows = (rows - rows.mean(dim=2, keepdim=True)).float()
    a = rows.double().mT @ rows.double() / rows.shape[1]
    spectra = reduced(a)
    values = spectra.values
    counted = values > floor(values)[:, None]
    assert counted.sum(dim=1).tolist() == [59, 59]
    slope = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([0.0, -0.2], dtype=torch.float64)
    found, truth = spectra.forms(rows, *slope), oracle(a, rows, slope, counted)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=0)


def test_forms_of_what_is_not_finite_or_nothing():
    a, rows = covariances(3, 20)
    a[0, 3, 3] = torch.nan
    a[2] = 0
    one = torch.ones(3, dtype=torch.float64)
    found = reduced(a).forms(rows.float(), one, one)
    assert torch.isnan(found[0]).all() and torch.isfinite(found[1]).all()


def test_the_rule_can_be_read():
    assert not fits(torch.zeros(8, 512, 512, dtype=torch.float64)), "no GPU"
    assert MOST_WIDTH == 4096
