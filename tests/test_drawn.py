"""Energies of many controls through half of a second moment: a slow oracle, bases formed; draws kept within bounds."""

import pytest
import torch

from anisoscope.tangent import drawn
from anisoscope.tangent.controls import control_bases, gaussian_draws
from anisoscope.tangent.drawn import Draws, Gaussians, held_gaussians

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_held():
    drawn._held.clear()
    drawn._projected.clear()
    yield
    drawn._held.clear()
    drawn._projected.clear()


def second_moment(width, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * width, width, generator=generator, dtype=torch.float64)
    return (rows * torch.arange(1, width + 1) ** -0.5).T @ rows  # not symmetric on purpose: made so below


def haar(width, rank, seed):
    return torch.linalg.qr(torch.randn(width, rank, generator=torch.Generator().manual_seed(seed))).Q


@pytest.fixture(params=["forms", "projectors"])
def way(request, monkeypatch):
    """Both ways to energies, each forced."""
    monkeypatch.setattr(Draws, "by_projectors", lambda self, moments: request.param == "projectors")
    return request.param


@pytest.mark.parametrize(
    ("width", "rank", "draws"), [(7, 2, 5), (127, 3, 4), (128, 5, 9), (129, 16, 3), (300, 20, 7), (40, 20, 6)]
)
def test_energies_are_those_of_bases_that_are_formed(width, rank, draws, seed, way):
    """Widths about the strips, ranks on both sides of the switch to float64, more draws than a chunk holds; two sets
    of bases, each with two moments of its own."""
    moments = torch.stack([second_moment(width, seed + 100 * at) for at in range(4)])
    moments = (moments + moments.mT).view(2, 2, width, width) / 2
    bases = torch.stack([haar(width, rank, at) for at in range(4)]).view(2, 2, width, rank)
    for dtype, error in ((torch.float32, 2e-5), (torch.float64, 1e-6)):  # the bases themselves are float32
        random, normal = Draws.of(bases, draws, seed, CPU, dtype).of_moments(moments)
        assert random.dtype == normal.dtype == torch.float64
        assert torch.equal(normal, Draws.of(bases, draws, seed, CPU, dtype).normal_of_moments(moments))
        for half in (0, 1):
            for number, moment in enumerate(moments[half]):
                for found, kind, basis in (
                    (random[half, number], "random", bases[half, 0]),
                    (normal[half, 0, number], "normal", bases[half, 0]),
                    (normal[half, 1, number], "normal", bases[half, 1]),
                ):
                    slow = [
                        float((q.T @ moment @ q).trace()) for q in control_bases(basis.double(), kind, draws, seed=seed)
                    ]
                    scale = float(moment.diagonal().abs().sum())
                    assert found.tolist() == pytest.approx(slow, abs=error * scale)


def test_rows_say_what_their_second_moment_says(seed):
    rows = torch.randn(30, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bases = torch.stack([haar(50, 4, 1), haar(50, 4, 2)])[None]
    drawn = Draws.of(bases, 9, seed, CPU, torch.float64)
    random, normal = drawn.of_moments((rows.T @ rows)[None, None])
    by_rows = drawn.of_rows(rows)
    torch.testing.assert_close(by_rows[0], random[0, 0], rtol=1e-10, atol=0)
    torch.testing.assert_close(by_rows[1], normal[0, :, 0], rtol=1e-10, atol=0)
    lone, none = Draws.of(bases[:, :0], 9, seed, CPU, torch.float64).of_rows(rows)
    assert torch.equal(lone, by_rows[0]) and none.shape == (0, 9)


@pytest.mark.parametrize(("width", "rank"), [(60, 5), (300, 40)])
def test_lengths_are_those_of_bases_that_are_formed(width, rank, seed):
    moments = torch.stack([second_moment(width, seed), second_moment(width, seed + 1)])
    moments = (moments + moments.mT) / 2
    bases = torch.stack([haar(width, rank, at) for at in range(4)]).view(2, 2, width, rank)
    for dtype, error in ((torch.float32, 2e-5), (torch.float64, 1e-6)):
        found = Draws.of(bases, 6, seed, CPU, dtype).lengths(moments)
        for half in (0, 1):
            for number in (0, 1):
                controls = control_bases(bases[half, number].double(), "normal", 6, seed=seed)
                slow = [float((q.T @ moments[half] @ q).square().sum()) for q in controls]
                assert found[half, number].tolist() == pytest.approx(slow, rel=error)


def test_random_controls_alone_may_have_any_rank(way):
    """No complement is asked for, and none need be large enough."""
    moment = torch.diag(torch.arange(1.0, 11, dtype=torch.float64))
    random, normal = Draws.of(torch.zeros(1, 0, 10, 8), 40, 0, CPU, torch.float64).of_moments(
        moment.expand(1, 2, 10, 10)
    )
    slow = [float((q.T @ moment @ q).trace()) for q in control_bases(haar(10, 8, 0).double(), "random", 40, seed=0)]
    assert random[0, 0].tolist() == pytest.approx(slow, rel=1e-9) and normal.shape == (1, 0, 2, 40)


def test_projectors_are_used_where_they_are_worth_their_room():
    def used(width, rank, draws, moments, bases=2):
        mirrors = torch.zeros(1, bases, width, rank)
        gaussians = Gaussians(torch.zeros(1, rank, rank).expand(draws, -1, -1),
                              torch.zeros(1, rank, 1).expand(draws, -1, width - rank))  # fmt: skip
        return Draws(gaussians, mirrors, 0).by_projectors(moments)

    assert used(768, 64, 199, 2) and used(768, 16, 199, 18) and used(128, 16, 199, 18)
    assert not used(768, 64, 199, 1), "one moment"
    assert not used(768, 64, 1, 18) and not used(768, 64, 10, 18), "reflecting costs more than so few draws"
    assert not used(768, 2, 199, 18), "forms of so low a rank are small"
    assert not used(900, 64, 199, 18) and used(900, 64, 99, 18), "room"


@pytest.mark.parametrize("slope", [0.0, -1.0])
def test_products_in_float32_keep_six_digits(slope, seed, way):
    """Against float64 all through, for a flat second moment and a steep one, at a width of many strips."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(600, 400, generator=generator, dtype=torch.float64) * torch.arange(1, 401) ** slope
    bases = torch.stack([torch.linalg.qr(torch.randn(400, 32, generator=generator))[0] for _ in range(2)])
    moments = torch.stack([rows[:200].T @ rows[:200], rows[200:].T @ rows[200:]])
    single = Draws.of(bases[None], 13, seed, CPU, torch.float32).of_moments(moments[None])
    double = Draws.of(torch.linalg.qr(bases[None].double()).Q, 13, seed, CPU, torch.float64).of_moments(moments[None])
    for one, two in zip(single, double, strict=True):
        assert one.dtype == torch.float64
        assert float((one / two - 1).abs().max()) < 2e-6


def test_chunks_do_not_show(monkeypatch, way):
    moment = second_moment(150, 0)
    moment = (moment + moment.T)[None, None]
    basis = torch.linalg.qr(torch.randn(150, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    whole = Draws.of(basis[None, None], 11, 0, CPU, torch.float64).of_moments(moment)
    for rows, strip in ((1, 1), (8, 149), (12, 150), (1 << 20, 1 << 20)):
        monkeypatch.setattr(drawn, "CHUNK_ROWS", rows)
        monkeypatch.setattr(drawn, "STRIP_COLUMNS", strip)
        monkeypatch.setattr(drawn, "STRIP_ROWS", strip)
        drawn._projected.clear()
        again = Draws.of(basis[None, None], 11, 0, CPU, torch.float64).of_moments(moment)
        for one, two in zip(whole, again, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11 * float(moment.abs().max()))


def test_projectors_are_kept_by_all_they_depend_on(monkeypatch):
    monkeypatch.setattr(Draws, "by_projectors", lambda self, moments: True)
    moment = second_moment(30, 0)
    moments = (moment + moment.T)[None, None]

    def energies(rank=3, draws=5, seed=0, dtype=torch.float32):
        basis = haar(30, rank, 1)[None, None]
        return Draws.of(basis, draws, seed, CPU, dtype).of_moments(moments)

    energies()
    kept = dict(drawn._projected.kept)
    energies()
    assert len(kept) == 2 and all(drawn._projected.kept[key] is one for key, one in kept.items())
    for other in ({"rank": 4}, {"draws": 6}, {"seed": 1}, {"dtype": torch.float64}):
        drawn._projected.clear()
        energies()
        found = energies(**other)
        assert len(drawn._projected.kept) == 4, other
        drawn._projected.clear()
        for one, two in zip(found, energies(**other), strict=True):
            assert torch.equal(one, two)
    assert sum(one.nbytes for one in kept.values()) == sum(
        drawn.Projectors.bytes_of(width, 5, torch.float32) for width in (30, 27)
    )


def test_draws_are_kept_for_the_next_call_and_within_bounds(monkeypatch):
    def get(seed, dtype=torch.float32):
        return held_gaussians(50, 3, 10, seed=seed, device=CPU, dtype=dtype)

    first = get(0)
    z = gaussian_draws(50, 3, 10, seed=0).permute(1, 2, 0)
    assert torch.equal(first.head, z[:, :, :3]) and torch.equal(first.tail, z[:, :, 3:])
    assert get(0) is first and get(0, torch.float64) is not first and not torch.equal(get(1).tail, first.tail)
    held = (first.head, first.tail, first.inner, first.of_few, first.of_whole)
    assert first.nbytes == sum(one.nbytes for one in held)
    monkeypatch.setattr(drawn, "HELD_BYTES", 2 * first.nbytes)
    drawn._held.clear()
    drawn._projected.clear()
    one, two = get(1), get(2)
    assert get(1) is one and get(2) is two  # two of them fit
    get(1), get(3)  # of which the one that was not asked for last goes
    assert get(1) is one and get(2) is not two
    assert sum(each.nbytes for each in drawn._held.kept.values()) == drawn._held._bytes <= drawn.HELD_BYTES
    monkeypatch.setattr(drawn, "HELD_BYTES", 1)
    assert torch.equal(get(5).tail, get(5).tail) and not drawn._held.kept
