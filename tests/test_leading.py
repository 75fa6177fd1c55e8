"""Leading eigenspaces of many matrices at once, against full decompositions."""

import math
from dataclasses import replace

import pytest
import torch

from anisoscope.measures import later
from anisoscope.measures.later import _led
from anisoscope.measures.leading import BLOCK, CAPTURED, CHANCE, _Filter, _Ritz, _State, can_lead, leading_spaces

WIDTH, RANK = 160, 16
PLACES = torch.arange(1, WIDTH + 1, dtype=torch.float64)


def scatter(deviations, seed=0):
    rows = torch.randn(1200, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * deviations
    return rows.T @ rows


def massive():
    deviations = PLACES**-0.5
    deviations[:3] = torch.tensor([1e4, 1e3, 300.0])
    return deviations


FALLING = {
    "flat": torch.ones(WIDTH, dtype=torch.float64),
    "slowly": PLACES**-0.25,
    "as one over rank": PLACES**-0.5,
    "fast": 1 / PLACES,
    "massive dimensions": massive(),
}


def gap(matrix, vectors):
    """The sine of the largest angle between the leading eigenvectors and these."""
    truth = torch.linalg.eigh(matrix).eigenvectors.flip(1)[:, :RANK]
    return float(torch.linalg.matrix_norm(vectors - truth @ (truth.T @ vectors), ord=2))


@pytest.mark.parametrize("name", FALLING)
def test_leading_spaces_are_those_of_a_full_decomposition(name):
    matrices = torch.stack([scatter(FALLING[name], seed) for seed in (0, 1)])
    found = leading_spaces(matrices, RANK)
    assert bool(found.settled.all())
    for matrix, values, vectors in zip(matrices, found.values, found.vectors, strict=True):
        truth = torch.linalg.eigvalsh(matrix).flip(0)[:RANK]
        torch.testing.assert_close(values[:RANK], truth, rtol=1e-9, atol=0)
        assert gap(matrix, vectors[:, :RANK]) < 1e-6
        eye = torch.eye(BLOCK, dtype=torch.float64)
        torch.testing.assert_close(vectors.T @ vectors, eye, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["flat", "slowly", "fast"])
def test_an_old_block_is_a_start_and_no_prison(name):
    old = leading_spaces(scatter(FALLING[name])[None], RANK).vectors
    matrix = scatter(FALLING[name], seed=1)
    new = torch.linalg.eigh(matrix).eigenvectors[:, :1]
    new = new - old[0] @ (old[0].T @ new)  # a direction that the old block does not hold
    matrix = matrix + 2 * matrix.diagonal().max() * new @ new.T
    found = leading_spaces(matrix[None], RANK, old)
    assert bool(found.settled.all())
    assert gap(matrix, found.vectors[0, :, :RANK]) < 1e-6


def test_a_wide_spectrum_that_falls_slowly_settles():
    places = torch.arange(1, 385, dtype=torch.float64)
    rows = torch.randn(4096, 384, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * places**-0.15
    assert bool(leading_spaces((rows.T @ rows)[None], RANK).settled.all())


def test_what_does_not_settle_says_so():
    broken = scatter(FALLING["flat"])
    broken[3, 3] = torch.nan
    found = leading_spaces(torch.stack([broken, scatter(FALLING["fast"])]), RANK)
    assert found.settled.tolist() == [False, True]


@pytest.mark.parametrize("rank", [12, 16, 20, 31])
def test_a_spectrum_that_ends_within_the_block(rank):
    matrix = scatter((PLACES - rank <= 0).double())
    found = leading_spaces(matrix[None], RANK)
    truth = torch.linalg.eigvalsh(matrix).flip(0)[:RANK]
    assert bool(found.settled) and torch.allclose(found.values[0, :RANK], truth, rtol=1e-9, atol=1e-9)


def test_matrices_that_do_not_settle_are_decomposed():
    matrices = torch.stack([scatter(FALLING["flat"]), scatter(FALLING["fast"])])
    found = leading_spaces(matrices, RANK)
    wrong = replace(
        found, values=found.values.clone(), vectors=found.vectors.clone(), settled=torch.tensor([False, True])
    )
    wrong.values[0], wrong.vectors[0] = torch.nan, torch.nan
    values, vectors = _led(matrices, wrong)
    for matrix, own, columns in zip(matrices, values, vectors, strict=True):
        torch.testing.assert_close(own[:RANK], torch.linalg.eigvalsh(matrix).flip(0)[:RANK], rtol=1e-9, atol=0)
        assert gap(matrix, columns[:, :RANK]) < 1e-6


def test_one_broken_matrix_does_not_touch_the_others():
    good = scatter(FALLING["as one over rank"])
    alone = leading_spaces(good[None], RANK)
    beside = leading_spaces(torch.stack([torch.full_like(good, torch.inf), good]), RANK)
    torch.testing.assert_close(beside.values[1], alone.values[0], rtol=1e-10, atol=0)


def test_cores_take_small_matrices_where_there_are_many(monkeypatch):
    monkeypatch.setattr(later, "CORES", 16)
    assert later.better_on_host(384) and not later.better_on_host(896)
    monkeypatch.setattr(later, "CORES", 4)
    assert not later.better_on_host(384)


def test_the_rule_can_be_read():
    assert can_lead(384, 16) and not can_lead(384, 25) and not can_lead(100, 16)


@pytest.mark.parametrize("seed", range(4))
def test_a_new_direction_just_above_the_last_wanted_one_is_found(seed):
    """The rest of the block is exact and stands still, and many values are nearly as large."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(256, 256, generator=generator, dtype=torch.float64)).Q
    values = torch.cat([torch.linspace(2, 1.9, 40), torch.linspace(1, 0.5, 216)]).double()
    old = leading_spaces((turn * values @ turn.T)[None], RANK).vectors
    values[200] = values[RANK - 1] + 1e-3
    matrix = turn * values @ turn.T
    found = leading_spaces(matrix[None], RANK, old)
    truth = torch.linalg.eigvalsh(matrix).flip(0)[:RANK]
    assert not bool(found.settled) or torch.allclose(found.values[0, :RANK], truth, rtol=1e-6)


def cycles(matrix, start, monkeypatch):
    """What is found from a start, and in how many cycles."""
    seen, after = [], _State.after
    with monkeypatch.context() as patch:
        patch.setattr(_State, "after", lambda self, *given: seen.append(1) or after(self, *given))
        return leading_spaces(matrix[None], RANK, start), len(seen)


@pytest.mark.parametrize("name", ["as one over rank", "fast"])
def test_where_little_has_changed_one_cycle_is_enough(name, monkeypatch):
    """If values fall fast enough behind the wanted ones. New directions are found all the same: one just above the
    last wanted, one so large that all drawn columns point along it after a cycle, and as many as are drawn."""
    matrix = scatter(FALLING[name])
    old = leading_spaces(matrix[None], RANK).vectors
    found, count = cycles(matrix, old, monkeypatch)
    assert bool(found.settled) and count == 1
    values, vectors = torch.linalg.eigh(matrix)
    for more in ([values[-RANK] * 1.001], [values[-1] * 2], [values[-3] * 1.1, *(values[-8:-5] * 1.2)]):
        changed = matrix + (vectors[:, : len(more)] * torch.tensor(more)) @ vectors[:, : len(more)].T
        found, count = cycles(changed, old, monkeypatch)
        assert bool(found.settled) and count <= 3
        truth = torch.linalg.eigvalsh(changed).flip(0)[:RANK]
        torch.testing.assert_close(found.values[0, :RANK], truth, rtol=1e-9, atol=0)


@pytest.mark.parametrize("many", [5, 8, 20])
@pytest.mark.parametrize("apart", [0.0, 1e-7])
@pytest.mark.parametrize("power", [1, 2])
def test_more_new_directions_than_drawn_columns_are_not_overlooked(many, apart, power):
    """Of equal ones any mixture is an exact pair, while others like it are missing."""
    turn = torch.linalg.qr(torch.randn(512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    values = torch.arange(1, 513, dtype=torch.float64) ** -power
    old = leading_spaces((turn * values @ turn.T)[None], RANK).vectors
    values[300 : 300 + many] = 1.5 * values[2] * (1 + apart * torch.arange(many))
    found = leading_spaces((turn * values @ turn.T)[None], RANK, old)
    truth = values.sort().values.flip(0)[:RANK]
    assert not bool(found.settled) or torch.allclose(found.values[0, :RANK], truth, rtol=1e-9, atol=0)


def test_what_has_not_grown_enough_is_not_sure():
    """Exact pairs from a start, whose drawn columns hold what is missing only if it grew."""
    matrix = torch.diag(torch.linspace(2, 1, 200, dtype=torch.float64))[None]
    ritz = _Ritz.of(matrix, torch.eye(200, dtype=torch.float64)[None, :, :BLOCK])
    values, half, yes = ritz.values[0, :RANK], ritz.values[:, -1] / 2, torch.tensor([True])
    enough = float((values[-1] / (CAPTURED * values.sum())).sqrt()) * 200**0.5 / CHANCE
    for growth, near, lost, sure in (
        (1.01, yes, ~yes, 1),
        (0.99, yes, ~yes, 0),
        (1.01, ~yes, ~yes, 0),
        (1.01, yes, yes, 0),
    ):
        degree = math.acosh(growth * enough) / torch.acosh(values[-1:] / half - 1)
        plan = _Filter(ritz.values > 9, ritz.values, half, degree, near)
        state = _State(ritz, ritz.values * 0.9, 0, plan, lost)
        assert state.settled(RANK).tolist() == [bool(sure)], (growth, near, lost)
    plan = _Filter.of(ritz, 7, 0)
    wanted = ritz.values[:, RANK - 1]
    image = ritz.filtered(matrix, plan, 7)[0, :, RANK - 1]
    torch.testing.assert_close(plan.growth(wanted), torch.linalg.vector_norm(image)[None])
    assert plan.growth(ritz.values[:, -1] / 2).tolist() == [1.0], "below the edge nothing grows"


def test_what_a_first_cycle_has_told_is_kept():
    """That drawn columns have all found something is never forgotten; what grew is asked of the first cycle alone."""
    matrix = scatter(FALLING["fast"])[None]
    began = _Ritz.of(matrix, leading_spaces(matrix, RANK).vectors)
    first = _State(began, began.values, RANK).after(matrix, 24)
    second = first.after(matrix, 16)
    assert first.plan is not None and second.plan is None and second.lost is first.lost
    lost = replace(first, lost=torch.tensor([True])).after(matrix, 16)
    assert bool(second.settled(RANK)) and not bool(lost.settled(RANK)) and bool(lost.over(lost.settled(RANK)))
    assert first.warm == 0 and _State(began, began.values).after(matrix, 16).lost is None


def test_what_still_grows_has_not_settled():
    """Exact pairs alone say nothing: a leading one may be missing among them while there is more each cycle."""
    matrix = torch.diag(torch.linspace(2, 1, 200, dtype=torch.float64))[None]
    ritz = _Ritz.of(matrix, torch.eye(200, dtype=torch.float64)[None, :, :BLOCK])
    assert float(ritz.residuals.max()) < 1e-12
    assert _State(ritz, ritz.values).settled(RANK).tolist() == [True]
    assert _State(ritz, ritz.values * (1 - 1e-8)).settled(RANK).tolist() == [False]
