"""The Lanczos iteration that a GPU uses for wide matrices, run on the CPU beside a full decomposition."""

import pytest
import torch

from anisoscope.measures.lanczos import EXACT, ROUGH, STEPS, leading


def matrix_of(values, seed):
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (axes * values) @ axes.T, axes


@pytest.mark.parametrize("decay", [0.5, 1.5])
def test_largest_eigenvalues_are_those_of_a_full_decomposition(seed, decay):
    values = torch.arange(1, 513, dtype=torch.float64) ** -decay
    matrix, axes = matrix_of(values, seed)
    found = leading(matrix, 8, seed=seed)
    assert found is not None
    assert float((found[0] - values[:8]).abs().max()) <= ROUGH * float(values[0])
    assert abs(float(found[0][0] - values[0])) <= EXACT * float(values[0])
    assert abs(float(found[1] @ axes[:, 0])) == pytest.approx(1, abs=1e-12)


def test_what_does_not_settle_is_not_told(seed):
    """Eigenvalues as dense at their end as the zeros of a Chebyshev polynomial: hundreds of steps do not part them."""
    values = 2 + torch.cos(torch.pi * torch.arange(1200, dtype=torch.float64) / 1200)
    assert leading(torch.diag(values), 4, seed=seed) is None
    assert leading(torch.eye(STEPS[0], dtype=torch.float64), 2) is None  # too small to be worth it
    broken = torch.eye(200, dtype=torch.float64)
    broken[3, 5] = torch.nan
    assert leading(broken, 2) is None


def test_few_directions_end_it_early_and_a_double_eigenvalue_is_found_once(seed):
    values = torch.zeros(256, dtype=torch.float64)
    values[:4] = torch.tensor([3.0, 3.0, 2.0, 1.0])
    matrix, axes = matrix_of(values, seed)
    found = leading(matrix, 3, seed=seed)
    assert found is not None
    assert found[0].tolist() == pytest.approx([3.0, 2.0, 1.0], abs=1e-9)
    assert float((axes[:, :2].T @ found[1]).norm()) == pytest.approx(1, abs=1e-9)
