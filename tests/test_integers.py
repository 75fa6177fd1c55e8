"""Neighbours by way of small integers: products, bounds and the sweep, on processors with and without instructions."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from test_oracles import INTEGERS, brute, check_neighbors, copies, massive

from anisoscope.measures import all_pairs, integers, neighbors, plan
from anisoscope.measures.integers import LARGEST, ROUNDING, Codes, Room, integer_products
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.measures.plan import Plan, choose_plan
from anisoscope.measures.search import FEW_ROWS, Search
from anisoscope.stats.precision import crew


def gaussian_rows(n, width, seed, spread=0.0):
    """Rows with variances that fall as ``rank ** -spread``, about a mean of length 30."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, width + 1) ** (-spread / 2)
    return torch.from_numpy(rng.standard_normal((n, width)) * scale + 30 / width**0.5).float()


ROWS = {
    "white": lambda seed: gaussian_rows(300, 96, seed),
    "decaying": lambda seed: gaussian_rows(300, 96, seed, spread=2.0),
    "width 1": lambda seed: gaussian_rows(40, 1, seed),
    "odd width": lambda seed: gaussian_rows(150, 37, seed).double(),
    "massive": lambda seed: massive(seed)[:600],
    "copies": copies,
    "half precision": lambda seed: gaussian_rows(200, 64, seed).half(),
    "all one row": lambda seed: gaussian_rows(1, 48, seed).repeat(50, 1),
}


@pytest.mark.parametrize("shape", [(1, 1, 1), (40, 40, 1), (7, 5, 33), (64, 48, 257), (130, 70, 768)])
def test_products_are_exact_by_instructions_and_without(shape, seed, monkeypatch):
    m, n, width = shape
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-LARGEST, LARGEST + 1, (rows, width)) for rows in (m, n))
    a[0], b[0] = LARGEST, -LARGEST  # the largest sum there is
    want = a @ b.T
    given = [torch.from_numpy(one.astype(np.int8)) for one in (a, b)]
    room = torch.full((m, n), 7, dtype=torch.int32)
    assert integer_products(*given, room) is room
    np.testing.assert_array_equal(room, want)
    monkeypatch.setattr(integers, "integers_serve", lambda: False)
    np.testing.assert_array_equal(integer_products(*given, room.fill_(7)), want)


def test_wrong_instructions_are_not_trusted(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True}, raising=False)
    asked = integers.integers_serve.__wrapped__  # not the answer that is kept
    for right, product in ((True, integers._by_float64), (False, one_more), (False, missing)):
        monkeypatch.setattr(integers, "_by_instructions", product)
        assert asked() == right
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(integers, "_by_instructions", integers._by_float64)
    assert not asked()


def one_more(a, b, out):
    return integers._by_float64(a, b, out) + 1


def missing(a, b, out):
    raise RuntimeError("no such instruction")


def bounds(codes):
    """Both bounds of all pairs, slowly."""
    n = len(codes.values)
    squared = codes.squared(slice(0, n), slice(0, n), Room.of(n * n)).double()
    rounding = ROUNDING * (codes.squares.double()[:, None] + codes.squares.double())
    errors = codes.errors[:, None] + codes.errors
    return (squared - rounding).clamp_min(0).sqrt() - errors, (squared + rounding).clamp_min(0).sqrt() + errors


@pytest.mark.parametrize("rows", ROWS)
def test_distances_of_codes_bound_those_of_rows(rows, seed):
    X = ROWS[rows](seed)
    codes = Codes.of(X, X.double().mean(dim=0), seed)
    low, high = bounds(codes)
    true = torch.cdist(X.double(), X.double(), compute_mode="donot_use_mm_for_euclid_dist")
    slack = 1e-13 * X.double().norm(dim=1).max()  # of the mean taken off and of the distances here, in float64
    assert (low <= true + slack).all()
    assert (high >= true - slack).all()


def test_the_bounds_are_close(seed):
    """A code is a hundredth of its row's length away, also where one dimension or their sum is nearly all of it."""
    plain = gaussian_rows(400, 256, seed)
    one, total = plain.clone(), plain + 1000 * plain[:, :1]
    one[:, 3] *= 1000
    for X in (plain, one, total):
        mean = X.double().mean(dim=0)
        codes = Codes.of(X, mean, seed)
        share = codes.errors / (X.double() - mean).norm(dim=1)
        assert float(share.median()) > 0.001 and float(share.max()) < 0.02


def test_squares_and_steps_say_what_the_codes_are(seed):
    X = gaussian_rows(100, 64, seed)
    codes = Codes.of(X, X.double().mean(dim=0), seed)
    np.testing.assert_array_equal(codes.values.abs().amax(dim=1), LARGEST)
    want = codes.values.double().square().sum(dim=1) * codes.steps.double().square()
    np.testing.assert_allclose(codes.squares, want, rtol=1e-6)
    order = torch.randperm(100)
    assert torch.equal(
        codes.at(order).squared(slice(3, 9), slice(0, 50), Room.of(500)),
        codes.squared(slice(0, 100), slice(0, 100), Room.of(10_000))[order[3:9]][:, order[:50]],
    )


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles from few rows, and hardly any room to wait in."""
    monkeypatch.setattr(all_pairs, "TILE_ROWS", 128)
    monkeypatch.setattr(all_pairs, "TILE_COLUMNS", 64)
    monkeypatch.setattr(all_pairs, "WAITING", 200)
    monkeypatch.setattr(all_pairs, "WAITING_EACH", 0)


@pytest.mark.parametrize("serve", [True, False], ids=["as it is", "without instructions"])
@pytest.mark.parametrize("rows", [64, 65, 127, 300, 701])
@pytest.mark.parametrize("k", [1, 2, 20])
def test_small_tiles_of_any_shape(rows, k, serve, one_seed, small_tiles, monkeypatch):
    if not serve:
        monkeypatch.setattr(integers, "integers_serve", lambda: False)
    for make in (lambda: gaussian_rows(rows, 64, one_seed), lambda: massive(one_seed)[:rows]):
        X = make()
        check_neighbors(X, nearest_neighbors(X, k, plan=INTEGERS, seed=one_seed), brute(X, k))


@pytest.mark.parametrize("largest", [1, 3, 10])
def test_coarse_codes_only_cost_time(largest, seed, small_tiles, monkeypatch):
    """With errors as large as distances every one of them must be allowed for."""
    monkeypatch.setattr(integers, "LARGEST", largest)
    X = gaussian_rows(500, 48, seed, spread=1.0)
    check_neighbors(X, nearest_neighbors(X, 3, plan=INTEGERS, seed=seed), brute(X, 3))


def test_the_kth_neighbour_lies_within_what_is_said_of_it(seed, small_tiles):
    X = gaussian_rows(500, 48, seed)
    search = Search(X, None, 3)
    sweep = all_pairs.IntegerSweep(search, Codes.of(X, X.double().mean(dim=0), seed))
    sweep.run()
    want = brute(X, 3)[sweep.order]
    assert (sweep.within >= want).all()
    assert float((sweep.within[:, 0] / want[:, 0]).max()) < 1.1


@pytest.fixture
def measured(monkeypatch):
    """How many pairs each call measured."""
    counts, measure = [], Search.measure
    monkeypatch.setattr(
        Search, "measure", lambda self, i, j, **how: (counts.append(len(i)), measure(self, i, j, **how))
    )
    return counts


def test_hardly_any_pair_is_measured(seed, measured):
    """Otherwise the answer would be right and the integers of no use."""
    X = gaussian_rows(6000, 64, seed, spread=1.0)
    nearest_neighbors(X, 2, plan=INTEGERS, seed=seed)
    assert sum(measured) < 20 * len(X)


def test_of_doubtful_pairs_most_are_dropped_in_float32(seed, monkeypatch):
    counts, apart, measure = Counter(), Search._apart, Search.measure

    def counted(self, i, j, dtype):
        counts[dtype] += len(i)
        return apart(self, i, j, dtype)

    def only_doubtful(self, i, j, *, doubtful):
        monkeypatch.setattr(Search, "_apart", counted if doubtful else apart)
        measure(self, i, j, doubtful=doubtful)

    monkeypatch.setattr(Search, "measure", only_doubtful)
    nearest_neighbors(gaussian_rows(4000, 256, seed), 2, plan=INTEGERS, seed=seed)
    assert counts[torch.float64] < counts[torch.float32] / 2


def test_nor_where_lengths_differ_by_far(seed, measured):
    """The largest error of a tile counts for all of it: long rows must not share one with short ones."""
    X = gaussian_rows(4000, 64, seed) - 30 / 8
    X *= torch.randn(4000, 1, generator=torch.Generator().manual_seed(seed)).mul(1.5).exp()
    nearest_neighbors(X, 2, plan=INTEGERS, seed=seed)
    assert sum(measured) < 20 * len(X)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_what_torch_makes_by_default_is_not_asked(kind, one_seed):
    X = gaussian_rows(200, 64, one_seed).repeat_interleave(3, dim=0)
    X += gaussian_rows(600, 64, one_seed + 1) * 0.05
    want = brute(X, 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        found = nearest_neighbors(X, 3, plan=INTEGERS)
    finally:
        torch.set_default_dtype(before)
    check_neighbors(X, found, want)


def test_rows_that_require_gradients():
    X = gaussian_rows(4500, 256, 0)
    want = nearest_neighbors(X, 2)
    found = nearest_neighbors(X.clone().requires_grad_(), 2)
    assert torch.equal(found.distances, want.distances) and not found.distances.requires_grad


def test_float32_is_trusted_less_the_wider_rows_are():
    """Sums of 133,000 equal squares are off by more than a ten-thousandth, whatever the order of the rest."""
    d, step = 133_000, 1.05859375
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(d, generator=generator) * 256).round() / 256
    other = torch.randn(d, generator=generator)
    other *= (d * step * step * (1 + 6.5e-5)) ** 0.5 / other.norm()
    search, first = Search(torch.stack([x, x + step, x + other]), None, 1), torch.zeros(512, dtype=torch.int64)
    search.measure(first[:1], first[:1] + 2, doubtful=False)
    assert float(search._apart(first[:1], first[:1] + 1, torch.float32)) * (1 - 1e-4) > float(search.best[0, 0])
    search.measure(first, first + 1, doubtful=True)
    assert int(search.index[0]) == 1


@pytest.mark.parametrize("tiles", [(100, 100), (70, 130), (64, 1)])
def test_tiles_of_any_size(tiles, one_seed, monkeypatch):
    monkeypatch.setattr(all_pairs, "TILE_ROWS", tiles[0])
    monkeypatch.setattr(all_pairs, "TILE_COLUMNS", tiles[1])
    X = gaussian_rows(230, 32, one_seed)
    check_neighbors(X, nearest_neighbors(X, 2, plan=INTEGERS), brute(X, 2))


def test_threads_are_as_before_whatever_happens(two_threads, monkeypatch):
    X = gaussian_rows(300, 64, 0)
    nearest_neighbors(X, 2, plan=INTEGERS)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(integers, "integer_products", missing)
    with pytest.raises(RuntimeError, match="no such instruction"):
        nearest_neighbors(X, 2, plan=INTEGERS)
    assert torch.get_num_threads() == 2


def test_each_of_a_crew_has_one_core(two_threads, monkeypatch):
    told, tell = [], torch.set_num_threads
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: (told.append((threading.get_ident(), count)), tell(count))
    )
    both = threading.Barrier(2)
    with crew(2) as each:
        assert each(lambda number: (both.wait(30), torch.get_num_threads(), number)[1:], [5, 6]) == [(1, 5), (1, 6)]
    here = threading.get_ident()
    assert len({who for who, count in told if who != here and count == 1}) == 2
    assert [count for who, count in told if who == here] == [1, 2]


@pytest.mark.parametrize("rows", ["white", "massive", "copies", "half precision"])
def test_several_cores_find_what_one_finds(rows, seed, small_tiles, two_threads):
    X = ROWS[rows](seed)
    found = nearest_neighbors(X, 3, plan=INTEGERS, seed=seed)
    check_neighbors(X, found, brute(X, 3))
    torch.set_num_threads(1)
    assert torch.equal(found.distances, nearest_neighbors(X, 3, plan=INTEGERS, seed=seed).distances)


def test_one_core_at_a_time_enters_what_it_found():
    """Two that read, improve and write at once would lose what one of them found."""
    X = gaussian_rows(100, 8, 0)
    search = Search(X, None, 2)
    sweep = all_pairs.IntegerSweep(search, Codes.of(X, X.double().mean(dim=0), 0))
    one, two = torch.tensor([3]), torch.tensor([5])
    for lock, enter in (
        (sweep._entering, lambda: sweep.enter(one, torch.ones(1, 4, dtype=torch.float64))),
        (search._merging, lambda: search.measure(one, two, doubtful=False)),
    ):
        waits = threading.Thread(target=enter)
        with lock:
            waits.start()
            waits.join(0.3)
            assert waits.is_alive()
            assert sweep.within[3, 0] == torch.inf or search.index[3, 0] == -1
        waits.join(30)
        assert not waits.is_alive()
    assert sweep.within[3].tolist() == [1, 1] and search.index[3].tolist() == [5, -1]


def test_an_error_ends_the_sweep_of_all_cores(two_threads, small_tiles, monkeypatch):
    visits, visit = [], all_pairs._Visitor._visit

    def fails_once(self, rows, columns, overlap):
        visits.append(rows)
        if len(visits) == 3:
            raise RuntimeError("the third one")
        return visit(self, rows, columns, overlap)

    monkeypatch.setattr(all_pairs._Visitor, "_visit", fails_once)
    with pytest.raises(RuntimeError, match="the third one"):
        nearest_neighbors(gaussian_rows(3000, 64, 0), 2, plan=INTEGERS)
    assert len(visits) < 8  # of hundreds; the other core may have one under way


def test_products_too_large_for_int32_are_not_asked_for(seed, monkeypatch):
    monkeypatch.setattr(all_pairs, "MOST_COLUMNS", 63)
    monkeypatch.setattr(integers, "integer_products", missing)
    X = gaussian_rows(300, 64, seed)
    check_neighbors(X, nearest_neighbors(X, 2, plan=INTEGERS, seed=seed), brute(X, 2))


def test_known_copies_leave_nothing_in_doubt(seed, measured, monkeypatch):
    """Ten rows, a hundred times each: once two copies of a row are known, the other 97 are left."""
    monkeypatch.setattr(all_pairs, "WAITING", 2000)
    monkeypatch.setattr(all_pairs, "WAITING_EACH", 0)
    monkeypatch.setattr(all_pairs, "TILE_ROWS", 256)
    monkeypatch.setattr(all_pairs, "TILE_COLUMNS", 64)
    X = gaussian_rows(10, 64, seed).repeat(100, 1)
    found = nearest_neighbors(X, 2, plan=INTEGERS, seed=seed)
    assert float(found.distances.max()) == 0.0
    assert sum(measured) < len(X) * 99 / 2  # of 99 copies each


def test_rows_whose_squares_leave_float32_are_swept_in_float32(seed):
    X = gaussian_rows(900, 64, seed).double() * 1e30
    check_neighbors(X, nearest_neighbors(X, 3, plan=INTEGERS, seed=seed), brute(X, 3))


@pytest.mark.parametrize("size", [1e-19, 1e-21, 1e-22, 3e-23, 2e-23, 1e-23, 1e-30])
def test_rows_so_close_that_squares_lose_their_digits(size, seed, small_tiles):
    """One column is far from zero, so that nothing is scaled; squares of the others are below float32's range."""
    X = gaussian_rows(400, 9, seed) * size
    X[:, 0] = 1.0
    check_neighbors(X, nearest_neighbors(X, 3, plan=INTEGERS, seed=seed), brute(X, 3))


def chosen(X, k, seed):
    return choose_plan(X, X.double().mean(dim=0), k, torch.Generator().manual_seed(seed))[0]


def test_the_plan(seed, monkeypatch):
    white, flat = gaussian_rows(5000, 256, seed), gaussian_rows(20_000, 3, seed) @ gaussian_rows(3, 256, seed + 1)
    monkeypatch.setattr(plan, "integers_serve", lambda: True)
    assert chosen(white, 2, seed).integers
    assert not chosen(white * 1e30, 2, seed).integers
    assert not chosen(flat, 2, seed).integers  # neighbours far closer than codes can tell
    monkeypatch.setattr(plan, "integers_serve", lambda: False)
    assert chosen(white, 2, seed) == Plan(axes=256, width=256, survivors=2 / 5000)


def test_more_neighbours_than_groups_in_a_tile_are_not_looked_for_in_integers(one_seed, monkeypatch):
    """The least of each group bounds one distance: of fewer groups than neighbours nothing follows for the last."""
    monkeypatch.setattr(plan, "integers_serve", lambda: True)
    for cost in ("PAIR", "MEASURE"):
        monkeypatch.setattr(plan, cost, 0.0)  # whatever is left to be measured
    groups = all_pairs.TILE_ROWS // all_pairs.GROUP
    white = gaussian_rows(5000, 256, one_seed)
    assert chosen(white, groups, one_seed).integers and not chosen(white, groups + 1, one_seed).integers


def test_pairs_that_survive_are_dear_however_narrow_rows_are(seed, monkeypatch):
    """Eight axes of eleven leave 4e-4 of all pairs, which take longer than eight more axes; with a cost of each column
    alone they had been taken."""
    monkeypatch.setattr(plan, "integers_serve", lambda: False)
    spread = torch.cat([torch.ones(8), torch.full((3,), 0.5), torch.full((53,), 1e-3)])
    rows = gaussian_rows(40_000, 64, seed) * spread
    assert chosen(rows, 2, seed).axes == 16
    monkeypatch.setattr(plan, "PAIR", 0.0)
    assert chosen(rows, 2, seed).axes == 8


def test_axes_are_paid_for_once(seed, monkeypatch):
    """What comes before the sweep counts: of few rows the full product is as soon."""
    monkeypatch.setattr(plan, "integers_serve", lambda: False)
    flat = gaussian_rows(40_000, 3, seed) @ gaussian_rows(3, 128, seed + 1)
    assert chosen(flat[:9000], 2, seed).is_full and chosen(flat, 2, seed).axes == 8


def test_axes_are_looked_for_where_they_could_pay(monkeypatch):
    asked = []
    axes = plan.principal_axes
    monkeypatch.setattr(plan, "principal_axes", lambda *given: (asked.append(given[0].shape), axes(*given))[1])
    monkeypatch.setattr(plan, "integers_serve", lambda: False)
    for n, width in ((4200, 512), (9000, 64), (9000, 512)):
        chosen(gaussian_rows(n, width, 0), 2, 0)
    assert asked == [(9000, 512)]
    monkeypatch.setattr(plan, "integers_serve", lambda: True)
    assert chosen(gaussian_rows(9000, 512, 0), 2, 0).integers and len(asked) == 1, "integers are as soon"


def test_how_many_rows_are_few(monkeypatch):
    monkeypatch.setattr(neighbors, "integers_serve", lambda: True)
    assert neighbors.few_rows(4, 256) == neighbors.SWEPT_ROWS < FEW_ROWS
    assert neighbors.few_rows(5, 256) == neighbors.few_rows(4, 255) == FEW_ROWS
    monkeypatch.setattr(neighbors, "integers_serve", lambda: False)
    assert neighbors.few_rows(4, 256) == FEW_ROWS
