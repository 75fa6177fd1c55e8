"""Small eigenproblems: the kernel, run by Triton's interpreter, against what eigenpairs are and the plain library."""

import pytest
import torch
from test_kernels import run

from anisoscope.measures import small_eigh


@pytest.fixture(scope="module")
def cases():
    return run(script="jacobi_cases.py")


@pytest.mark.parametrize("kind", ["covariances", "others"])
def test_the_kernel_finds_eigenpairs(cases, kind):
    for case, found in cases[kind].items():
        assert found["values"] < 5e-15, (case, found)
        assert found["orthonormal"] < 1e-14, (case, found)
        assert found["residual"] < 1e-14, (case, found)
        assert found["ascending"], case


def test_entries_that_are_not_finite_end_and_change_no_other_matrix(cases):
    assert cases["not finite"] is True
    given = symmetric(3, 5)
    given[1, 2, 2] = torch.inf
    values, _ = small_eigh.small_eigh(given)
    assert bool(values[1].isnan().all()), "and so of the library"
    torch.testing.assert_close(values[[0, 2]], torch.linalg.eigvalsh(symmetric(3, 5)[[0, 2]]))


def test_what_rounding_leaves_on_one_side_is_shared_by_both(cases):
    assert cases["symmetric part"] < 1e-5


def symmetric(many, width):
    rows = torch.randn(many, width, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return rows + rows.mT


def test_elsewhere_it_is_the_library():
    for given in (symmetric(3, 5), symmetric(2, 40), symmetric(0, 4), symmetric(2, 0), symmetric(2, 6).float()):
        values, vectors = small_eigh.small_eigh(given)
        assert values.shape == given.shape[:2] and vectors.shape == given.shape and vectors.dtype == given.dtype
        torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, given)
        assert bool((values.diff(dim=1) >= 0).all())


def test_the_kernel_is_asked_for_small_matrices_in_float64_alone(monkeypatch):
    asked, plain = [], torch.linalg.eigh

    def by_kernel(matrices):
        assert matrices.is_contiguous()
        asked.append(True)
        return tuple(plain(matrices))

    monkeypatch.setattr(small_eigh, "by_kernel", by_kernel)
    cases = (
        (symmetric(2, 32), True), (symmetric(1, 1), True), (symmetric(2, 6).mT, True), (symmetric(2, 33), False),
        (symmetric(0, 4), False), (symmetric(2, 0), False), (symmetric(2, 6).float(), False),
    )  # fmt: skip
    for here in (True, False):
        monkeypatch.setattr(small_eigh, "kernels_run", lambda device, here=here: here)
        for given, small in cases:
            asked.clear()
            values, _ = small_eigh.small_eigh(given)
            assert bool(asked) == (small and here), (given.shape, given.dtype, here)
            torch.testing.assert_close(values, plain(given)[0])
