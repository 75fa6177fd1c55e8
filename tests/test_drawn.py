"""Energies of many controls through half of a second moment: a slow oracle, bases formed; draws kept within bounds."""

import pytest
import torch

from anisoscope.tangent import drawn
from anisoscope.tangent.controls import control_bases, gaussian_draws
from anisoscope.tangent.drawn import Draws, held_gaussians

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_held():
    drawn._held.clear()
    yield
    drawn._held.clear()


def second_moment(width, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * width, width, generator=generator, dtype=torch.float64)
    return (rows * torch.arange(1, width + 1) ** -0.5).T @ rows  # not symmetric on purpose: made so below


@pytest.mark.parametrize(
    ("width", "rank", "draws"), [(7, 2, 5), (127, 3, 4), (128, 5, 9), (129, 16, 3), (300, 20, 7), (40, 20, 6)]
)
def test_energies_are_those_of_bases_that_are_formed(width, rank, draws, seed):
    """Widths about the strips, ranks on both sides of the switch to float64, more draws than a chunk holds."""
    moments = torch.stack([second_moment(width, seed), second_moment(width, seed + 100)])
    moments = (moments + moments.mT) / 2
    bases = torch.stack(
        [torch.linalg.qr(torch.randn(width, rank, generator=torch.Generator().manual_seed(at)))[0] for at in (1, 2)]
    )
    for dtype, error in ((torch.float32, 2e-5), (torch.float64, 1e-6)):  # the bases themselves are float32
        random, normal = Draws.of(bases, draws, seed, CPU, dtype).of_moments(moments)
        for number, moment in enumerate(moments):
            for found, kind, basis in (
                (random[number], "random", bases[0]),
                (normal[0, number], "normal", bases[0]),
                (normal[1, number], "normal", bases[1]),
            ):
                slow = [
                    float((q.T @ moment @ q).trace()) for q in control_bases(basis.double(), kind, draws, seed=seed)
                ]
                scale = float(moment.diagonal().abs().sum())
                assert found.tolist() == pytest.approx(slow, abs=error * scale)


@pytest.mark.parametrize("slope", [0.0, -1.0])
def test_products_in_float32_keep_six_digits(slope, seed):
    """Against float64 all through, for a flat second moment and a steep one, at a width of many strips."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(600, 400, generator=generator, dtype=torch.float64) * torch.arange(1, 401) ** slope
    bases = torch.stack([torch.linalg.qr(torch.randn(400, 32, generator=generator))[0] for _ in range(2)])
    moments = torch.stack([rows[:200].T @ rows[:200], rows[200:].T @ rows[200:]])
    single = Draws.of(bases, 13, seed, CPU, torch.float32).of_moments(moments)
    double = Draws.of(torch.linalg.qr(bases.double()).Q, 13, seed, CPU, torch.float64).of_moments(moments)
    for one, two in zip(single, double, strict=True):
        assert one.dtype == torch.float64
        assert float((one / two - 1).abs().max()) < 2e-6


def test_chunks_do_not_show(monkeypatch):
    moment = second_moment(150, 0)
    moment = (moment + moment.T)[None]
    basis = torch.linalg.qr(torch.randn(150, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    whole = Draws.of(basis[None], 11, 0, CPU, torch.float64).of_moments(moment)
    for rows, strip in ((1, 1), (8, 149), (12, 150), (1 << 20, 1 << 20)):
        monkeypatch.setattr(drawn, "CHUNK_ROWS", rows)
        monkeypatch.setattr(drawn, "STRIP_COLUMNS", strip)
        again = Draws.of(basis[None], 11, 0, CPU, torch.float64).of_moments(moment)
        for one, two in zip(whole, again, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11 * float(moment.abs().max()))


def test_draws_are_kept_for_the_next_call_and_within_bounds(monkeypatch):
    def get(seed, dtype=torch.float32):
        return held_gaussians(50, 3, 10, seed=seed, device=CPU, dtype=dtype)

    first = get(0)
    assert torch.equal(first.z, gaussian_draws(50, 3, 10, seed=0).permute(1, 2, 0)) and first.z.is_contiguous()
    assert get(0) is first and get(0, torch.float64) is not first and not torch.equal(get(1).z, first.z)
    monkeypatch.setattr(drawn, "HELD_BYTES", 2 * first.z.nbytes)
    drawn._held.clear()
    one, two = get(1), get(2)
    assert get(1) is one and get(2) is two  # two of them fit
    get(1), get(3)  # of which the one that was not asked for last goes
    assert get(1) is one and get(2) is not two
    assert sum(each.z.nbytes for each in drawn._held.values()) <= drawn.HELD_BYTES
    monkeypatch.setattr(drawn, "HELD_BYTES", 1)
    assert torch.equal(get(5).z, get(5).z) and not drawn._held
