"""Control bases: orthonormal, off the basis, uniform in the complement, the right eigenvectors, and named refusals."""

import inspect

import numpy as np
import pytest
import torch
from scipy import stats

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, UnknownNameError
from anisoscope.tangent.controls import control_bases, mirrors, orthonormal
from anisoscope.tangent.crossed import crossed_tests
from anisoscope.tangent.energy import energy_test
from anisoscope.tangent.units import Halves


def haar(width, rank, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.linalg.qr(torch.randn(width, rank, generator=generator, dtype=torch.float64)).Q.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "rank"), [(9, 3), (64, 5), (40, 20), (300, 1)])
def test_normal_controls_are_orthonormal_and_normal(width, rank, dtype, seed):
    basis = haar(width, rank, seed, dtype)
    found = control_bases(basis, "normal", 30, seed=seed)
    assert found.shape == (30, width, rank) and found.dtype == dtype
    unit = torch.eye(rank, dtype=torch.float64)
    for one in found.double():  # a slow look, one basis at a time
        assert float((one.T @ one - unit).abs().max()) < 1e-6
        assert float((one.T @ basis.double()).abs().max()) < 1e-6


def test_random_controls_are_orthonormal_and_not_projected(seed):
    basis = haar(30, 6, seed)
    found = control_bases(basis, "random", 400, seed=seed)
    gram = found.transpose(1, 2) @ found
    assert float((gram - torch.eye(6, dtype=torch.float64)).abs().max()) < 1e-12
    # |Q^T C|^2 of a uniform C is a sum of K Beta(K/2, (D-K)/2): mean K^2/D
    overlap = (basis.T @ found).square().sum(dim=(1, 2))
    assert abs(float(overlap.mean()) - 36 / 30) < 5 * float(overlap.std()) / 20


def test_the_same_seed_is_the_same_span_in_any_precision():
    basis = haar(50, 4)
    for kind in ("normal", "random"):
        wide, narrow = control_bases(basis, kind, 7, seed=3), control_bases(basis.float(), kind, 7, seed=3)
        assert float((wide - narrow.double()).abs().max()) < 1e-5
        assert not torch.equal(wide, control_bases(basis, kind, 7, seed=4))


def test_normal_controls_are_uniform_in_the_complement(seed):
    """Haar measure by its moments: E[C C^T] = K/(D-K) P, and u^T C C^T u ~ Beta(K/2, (D-2K)/2) for unit u off Q."""
    width, rank, draws = 12, 3, 4000
    basis = haar(width, rank, seed)
    found = control_bases(basis, "normal", draws, seed=seed)
    mean = (found @ found.transpose(1, 2)).mean(dim=0)
    other = torch.eye(width, dtype=torch.float64) - basis @ basis.T
    share = rank / (width - rank)
    assert float((mean - share * other).abs().max()) < 5 * 0.5 / np.sqrt(draws)
    u = other @ torch.arange(1.0, width + 1, dtype=torch.float64)
    along = ((u / u.norm()) @ found).square().sum(dim=1)
    assert stats.kstest(along.numpy(), stats.beta(rank / 2, (width - 2 * rank) / 2).cdf).pvalue > 1e-4
    # No column is special, and signs are even: first moments vanish, all columns have the same second moment.
    assert float(found.mean(dim=0).abs().max()) < 5 / np.sqrt(draws * (width - rank)) * 1.5
    first, last = found[:, :, 0].square().mean(dim=0), found[:, :, -1].square().mean(dim=0)
    assert float((first - last).abs().max()) < 5 * 0.3 / np.sqrt(draws)


def test_normal_top_is_the_leading_space_of_the_complement(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(400, 10, generator=generator, dtype=torch.float64) * torch.arange(10, 0, -1.0) + 100
    basis = torch.eye(10, dtype=torch.float64)[:, [0, 2]]
    found = control_bases(basis, "normal_top", 1, seed=seed, rows=rows)
    assert found.shape == (1, 10, 2)
    off = rows @ (torch.eye(10, dtype=torch.float64) - basis @ basis.T)
    expected = np.linalg.eigh(np.cov(off.numpy().T))[1][:, ::-1][:, :2]
    overlap = np.linalg.svd(expected.T @ found[0].numpy(), compute_uv=False)
    assert overlap.min() > 1 - 1e-9
    assert float((basis.T @ found[0]).abs().max()) < 1e-12
    assert torch.equal(found, control_bases(basis, "normal_top", 1, seed=seed + 1, rows=rows)), "no chance in it"
    more = control_bases(basis, "normal_top", 4, seed=seed, rows=rows)
    assert torch.equal(more[0], found[0]) and float((more[1] - more[0]).abs().max()) > 1e-3
    assert float((basis.T @ more).abs().max()) < 1e-12


def test_naive_gram_schmidt_in_float32_is_not_enough_where_ours_is():
    """Nearly parallel columns: one pass of Cholesky leaves an error of the condition squared."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(1, 200, 1, generator=generator) + 1e-2 * torch.randn(1, 200, 8, generator=generator)
    unit = torch.eye(8)
    small = columns.transpose(1, 2) @ columns
    naive = columns @ torch.linalg.inv(torch.linalg.cholesky(small)).transpose(1, 2)
    assert float((naive.transpose(1, 2) @ naive - unit).abs().max()) > 1e-4
    ours = orthonormal(columns)
    assert float((ours.transpose(1, 2) @ ours - unit).abs().max()) < 2e-6


def test_a_rank_above_half_the_width_is_told_what_else_would_do(seed):
    """The hint of each function is something that very function takes, and that works."""
    basis, gradients = haar(10, 6), torch.randn(40, 10, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(OptionError, match=r"take a rank of at most 5, or controls='random'$"):
        energy_test(gradients, basis, draws=19)
    found = energy_test(gradients, basis, controls="random", draws=19)
    assert found.rank == 6 and found.kind == "random"
    halves = Halves.of(torch.arange(40) // 4, 0, "cpu")
    with pytest.raises(OptionError, match=r"take a rank of at most 5$"):
        crossed_tests(gradients, halves, {"one": (basis, basis)}, draws=19)
    smaller = haar(10, 5)
    assert crossed_tests(gradients, halves, {"one": (smaller, smaller)}, draws=19)["one"][""].share.n == 40


def test_refusals():
    basis = haar(10, 6)
    with pytest.raises(OptionError, match="rank 6 leaves 4 of 10 dimensions"):
        control_bases(basis, "normal", 5)
    with pytest.raises(OptionError, match="too few"):
        control_bases(basis, "normal_top", 1, rows=torch.randn(50, 10))
    with pytest.raises(OptionError, match=r"take a rank of at most 5, or kind='random'$"):
        control_bases(basis, kind="normal", draws=5)
    assert control_bases(basis, kind="random", draws=5).shape == (5, 10, 6)
    assert control_bases(haar(10, 5), "normal", 5).shape == (5, 10, 5), "an exact half still fits"
    with pytest.raises(UnknownNameError, match="did you mean 'normal_top'"):
        control_bases(basis, "normal_tap")
    with pytest.raises(ShapeError, match="not orthonormal"):
        control_bases(basis * 1.01, "random")
    with pytest.raises(ShapeError, match="not orthonormal"):
        control_bases(basis * float("nan"), "random")
    with pytest.raises(ShapeError, match="below the width"):
        control_bases(torch.eye(4), "random")
    with pytest.raises(OptionError, match="give rows"):
        control_bases(haar(10, 2), "normal_top", 1)
    with pytest.raises(OptionError, match="draws=0"):
        control_bases(haar(10, 2), "normal", 0)
    with pytest.raises(ShapeError, match="same space"):
        inspect.unwrap(control_bases)(haar(10, 2), "normal_top", 1, rows=torch.randn(50, 9))
    with pytest.raises(TooFewRowsError, match="3 rows"):
        control_bases(haar(10, 2), "normal_top", 1, rows=torch.randn(3, 10))
    with pytest.raises(DegenerateError, match="fewer dimensions"):
        orthonormal(torch.zeros(1, 5, 2))


@pytest.mark.parametrize(("width", "rank"), [(9, 3), (40, 20), (300, 16)])
def test_mirrors_swap_a_span_with_the_first_axes(width, rank, seed):
    exact = torch.stack([haar(width, rank, seed), haar(width, rank, seed + 1)])
    for bases, error in ((exact, 1e-12), (exact.float(), 1e-6)):
        for basis, mirror in zip(bases, mirrors(bases), strict=True):
            reflection = torch.eye(width, dtype=torch.float64) - mirror @ mirror.T
            assert float((reflection @ reflection - torch.eye(width)).abs().max()) < 1e-12, "whatever the basis was in"
            image = reflection @ basis.double()
            assert float(image[rank:].abs().max()) < error
            assert torch.linalg.matrix_rank(image[:rank]) == rank


def test_mirrors_where_a_whole_family_of_them_would_do(seed):
    """Bases of axes: the first ones themselves, others at right angles to them, some of both."""
    eye = torch.eye(12, dtype=torch.float64)
    for axes in ([0, 1, 2], [7, 5, 9], [1, 8, 0]):
        mirror = mirrors(eye[:, axes][None])[0]
        image = (eye - mirror @ mirror.T)[:, axes]
        assert float(image[3:].abs().max()) < 1e-12
        found = control_bases(eye[:, axes], "normal", 20, seed=seed)
        assert float(found[:, axes].abs().max()) < 1e-12
        assert float((found.mT @ found - torch.eye(3)).abs().max()) < 1e-12


def test_normal_controls_depend_on_the_span_alone(seed):
    basis = haar(60, 5, seed)
    turned = basis @ haar(5, 5, seed)
    one, two = (control_bases(q, "normal", 6, seed=seed) for q in (basis, turned))
    assert float((one - two).abs().max()) < 1e-10
    assert float((one - control_bases(-basis.flip(1), "normal", 6, seed=seed)).abs().max()) < 1e-10
