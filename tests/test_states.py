"""Merge laws, batch values, guarantees and hostile numerics of the mergeable states (the reservoir's own: see there).

Rows come from ``draw``: spread 1 along the widest column, and a mean of ``ratio`` spreads. Tolerances are multiples of
``rounding(ratio)``: a field is a sum of n < 200 terms, whose rounding grows like sqrt(n) < 15, a few such sums follow
one another (hence 64), and a mean known to eps * |mean| enters the gaps between means linearly (hence 1 + ratio). They
are absolute, in units of the field's size for n rows of spread 1, because one row alone has a spread of 0.
"""

import dataclasses
from itertools import pairwise

import jaxtyping
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reservoir import ReservoirCase, merged
from torch.utils._pytree import tree_leaves

from anisoscope.errors import DegenerateError, EmptyInputError, OptionError, ShapeError
from anisoscope.stats import moments, precision
from anisoscope.stats.counts import BinMoments
from anisoscope.stats.memory import rows_in_hand
from anisoscope.stats.moments import Moments
from anisoscope.stats.sketch import Sketch

WIDTH, BINS = 3, 4
EPS, EPS32 = np.finfo(np.float64).eps, np.finfo(np.float32).eps
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 8, 30]), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32 - 1)
RATIOS = st.sampled_from([0.0, 1.0, 1e4])
UNITS = st.sampled_from([0.0, 2.0**-1000, 2.0**-300, 2.0**-70, 1.0, 2.0**70, 2.0**300, 2.0**1000])
few = settings(max_examples=30, deadline=None, derandomize=True)


def rounding(ratio):
    return 64 * EPS * (1 + ratio)


def draw(seed, n, ratio, width=WIDTH, spectrum=None):
    """(rows (n, width) float64, bin of each row); the last bin is never used, so one is always empty."""
    rng = np.random.default_rng(seed)
    spread = 0.5 ** np.arange(width) if spectrum is None else np.asarray(spectrum)
    rows = rng.standard_normal((n, width)) * spread + ratio * np.sign(rng.standard_normal(width))
    return torch.from_numpy(rows), torch.from_numpy(rng.integers(0, BINS - 1, n))


class MomentsCase:
    def empty(self, shard=0):
        return Moments.empty(WIDTH)

    def feed(self, state, rows, labels):
        return state.update(rows)

    def facts(self, state):
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}

    def truth(self, parts, labels):
        return {**oracles.moments(np.concatenate(parts)), "exponent": 0}


class SketchCase(MomentsCase):
    """With rank >= width nothing is lost; shrinking is tested further down."""

    def empty(self, shard=0):
        return Sketch.empty(WIDTH, WIDTH)

    def facts(self, state):
        scatter = state.rows_RD.T @ state.rows_RD
        lost = state.shrinkage
        return {"count": state.count, "mean": state.mean, "scatter": scatter, "trace": state.trace, "lost": lost}

    def truth(self, parts, labels):
        m = oracles.moments(np.concatenate(parts))
        return {k: m[k] for k in ("count", "mean", "scatter")} | {"trace": np.trace(m["scatter"]), "lost": 0.0}


class BinMomentsCase(MomentsCase):
    def empty(self, shard=0):
        return BinMoments.empty(BINS, WIDTH)

    def feed(self, state, rows, labels):
        return state.update(rows, labels)

    def truth(self, parts, labels):
        rows, labels = np.concatenate(parts), np.concatenate(labels)
        groups = [rows[labels == b] for b in range(BINS)]
        mean = [g.mean(axis=0) if len(g) else np.zeros(WIDTH) for g in groups]
        spread = [((g - m) ** 2).sum() for g, m in zip(groups, mean, strict=True)]
        return {"count": [len(g) for g in groups], "mean": mean, "spread": spread}


CASES = {"moments": MomentsCase(), "sketch": SketchCase(), "bins": BinMomentsCase(), "reservoir": ReservoirCase()}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def assert_same(case, got, want, n, ratio):
    """Equal facts: exactly for the reservoir, within rounding (see above) for sums."""
    assert got.keys() == want.keys()
    for name in want:
        atol = 0.0 if isinstance(case, ReservoirCase) or name in ("count", "seen", "exponent") else rounding(ratio)
        atol *= 1.0 if name == "mean" else max(n, 1)
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=atol, err_msg=name)


def bits(state):
    """Copies of all tensors of a state and its other leaves."""
    leaves = tree_leaves([getattr(state, f.name) for f in dataclasses.fields(state)])
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def same_bits(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def fed(feed, state, rows, labels, rng):
    """Rows in random chunks, some of them empty."""
    cuts = [0, *sorted(rng.integers(0, len(rows) + 1, 3).tolist()), len(rows)]
    for a, b in pairwise(cuts):
        state = feed(state, rows[a:b], labels[a:b])
    return state


@each_case
@few
@given(seed=SEEDS, sizes=st.tuples(*[st.sampled_from([0, 1, 2, 9, 30])] * 3), ratio=RATIOS)
def test_merge_laws(case, seed, sizes, ratio):
    parts = zip(*(block.split(sizes) for block in draw(seed, sum(sizes), ratio)), strict=True)
    a, b, c = (case.feed(case.empty(shard), *part) for shard, part in enumerate(parts))
    n = sum(sizes)
    assert_same(case, case.facts(a.merge(b).merge(c)), case.facts(a.merge(b.merge(c))), n, ratio)
    assert_same(case, case.facts(a.merge(b)), case.facts(b.merge(a)), n, ratio)
    for state in (a, b, c):
        unit = case.empty(shard=9)
        assert same_bits(tree_leaves(case.facts(state.merge(unit))), tree_leaves(case.facts(state)))
        assert same_bits(tree_leaves(case.facts(unit.merge(state))), tree_leaves(case.facts(state)))


@each_case
@few
@given(seed=SEEDS, sizes=SIZES, ratio=RATIOS)
def test_every_cut_and_every_tree_gives_the_batch_value(case, seed, sizes, ratio):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    if n == 0:
        sizes, n = [*sizes, 1], 1
    rows, labels = (block.split(sizes) for block in draw(seed, n, ratio))
    states = [fed(case.feed, case.empty(i), r, k, rng) for i, (r, k) in enumerate(zip(rows, labels, strict=True))]
    truth = case.truth([r.numpy() for r in rows], [k.numpy() for k in labels])
    assert_same(case, case.facts(merged(states, rng)), truth, n, ratio)


@each_case
def test_update_and_merge_leave_old_values_alone(case):
    rows, labels = draw(0, 40, 1.0)
    a, b = case.feed(case.empty(0), rows[:20], labels[:20]), case.feed(case.empty(1), rows[20:30], labels[20:30])
    before = bits(a), bits(b)
    case.feed(a, rows[30:], labels[30:])
    a.merge(b)
    assert same_bits(bits(a), before[0]) and same_bits(bits(b), before[1])
    rows.zero_()  # a state that only looks at the caller's rows would change with them
    assert same_bits(bits(a), before[0])


# --- Moments ---------------------------------------------------------------------------------------------------------


def naive_moments(rows):
    """Sums of raw products, centred at the end: exact in theory."""
    n, mean = len(rows), rows.mean(dim=0)
    square, radius2 = rows.T @ rows, (rows * rows).sum(dim=1)
    scatter = square - n * torch.outer(mean, mean)
    third = radius2 @ rows - radius2.sum() * mean - 2 * square @ mean + 2 * n * (mean @ mean) * mean
    return scatter, third


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "precision, dtype", [("float64", torch.float64), ("mixed", torch.float64), ("mixed", torch.float32)]
)
def test_moments_with_a_mean_of_1e4_spreads(seed, precision, dtype):
    n, ratio = 192, 1e4
    rows = draw(seed, n, ratio)[0].to(dtype)
    want = oracles.moments(rows.numpy())
    state = Moments.empty(WIDTH)
    for chunk in rows.split(50):
        state = state.update(chunk, precision)
    # float32 rows about their float32 mean are exact differences; what is left is the rounding of float32 products and
    # of sums over chunks of 50 (sqrt(50) < 8). Float64 rows are rounded once more on the way.
    atol = n * (rounding(ratio) if precision == "float64" else 8 * EPS32)
    for name in ("scatter", "third", "fourth"):
        np.testing.assert_allclose(getattr(state, name), want[name], rtol=0, atol=atol, err_msg=name)
    # Mixed precision rounds each centred row to float32, half an EPS32 of a spread, and takes the mean of those.
    np.testing.assert_allclose(state.mean, want["mean"], rtol=0, atol=rounding(ratio) + (precision == "mixed") * EPS32)
    scatter, third = naive_moments(rows if precision == "float64" else rows.float())
    wrong = np.abs(scatter.numpy() - want["scatter"]).max(), np.abs(third.numpy() - want["third"]).max()
    assert min(wrong) > 10 * atol, "the data do not tell the naive formula apart"
    assert precision == "float64" or wrong[0] > np.trace(want["scatter"])  # in float32 it is worthless


@pytest.mark.parametrize(("precision", "within"), [("float64", 1e-13), ("mixed", 1e-6)])
def test_moments_of_many_blocks_in_one_step(seed, precision, within, monkeypatch):
    """As a GPU takes them: blocks that are whole together, the rows left over by themselves, no row twice."""
    monkeypatch.setattr(moments, "BLOCK_ROWS", 100)
    monkeypatch.setattr(moments, "rows_in_hand", lambda block, width, device: 3 * block)
    shapes, plain = [], moments._gram
    monkeypatch.setattr(moments, "_gram", lambda y: shapes.append(tuple(y.shape)) or plain(y))
    rows, _ = draw(seed, 1037, 1.0)
    found, right = Moments.of(rows.float(), precision), oracles.moments(rows.float().double().numpy())
    steps = [[(0, 3), (3, 100, 3)]] * 3 + [[(37, 3), (1, 100, 3)]]
    assert shapes == [shape for step in steps for shape in step]
    for name in ("mean", "scatter", "third", "fourth"):
        gap = np.abs(getattr(found, name).numpy() - right[name]).max()
        assert gap <= within * np.abs(right[name]).max() * (10 if name == "third" else 1), name


def test_narrow_rows_are_multiplied_in_float64_where_that_is_as_fast(monkeypatch):
    rows, _ = draw(0, 500, 1.0)
    exact, rough = Moments.of(rows.float()), Moments.of(rows.float(), "mixed")
    monkeypatch.setattr(moments, "multiplies_float64_as_fast", lambda device: True)
    assert torch.equal(Moments.of(rows.float(), "mixed").scatter, exact.scatter)
    assert not torch.equal(rough.scatter, exact.scatter)
    kinds, plain = [], moments.cell_grams
    monkeypatch.setattr(moments, "in_parts", lambda width, device: True)
    monkeypatch.setattr(moments, "cell_grams", lambda y, ends: kinds.append(y.dtype) or plain(y, ends))
    Moments.of(rows.float(), "mixed")
    assert kinds == [torch.float32], "wide rows go to tensor cores in parts"


def test_float64_is_as_fast_on_two_kinds_of_gpu(monkeypatch):
    assert not precision.multiplies_float64_as_fast(torch.device("cpu"))
    kinds = {
        "Tesla T4": ((7, 5), False), "NVIDIA A100-SXM4-80GB": ((8, 0), True), "NVIDIA A10": ((8, 6), False),
        "NVIDIA L4": ((8, 9), False), "NVIDIA H100 PCIe": ((9, 0), True), "NVIDIA H200": ((9, 0), True),
        "NVIDIA H20": ((9, 0), False), "NVIDIA H20-3e": ((9, 0), False), "NVIDIA H800": ((9, 0), False),
        "NVIDIA GeForce RTX 5090": ((12, 0), False),
    }  # fmt: skip
    for name, (kind, fast) in kinds.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, kind=kind: kind)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert precision.multiplies_float64_as_fast(torch.device("cuda")) == fast, name


def test_a_step_is_taken_for_a_block_on_a_cpu_and_for_many_on_a_gpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert rows_in_hand(4096, 768, cpu) == rows_in_hand(4096, 1 << 20, gpu) == 4096
    assert rows_in_hand(4096, 1024, gpu) == rows_in_hand(8192, 1024, gpu) == 32_768


@few
@given(seed=SEEDS, shards=st.lists(st.tuples(st.sampled_from([0, 1, 2, 30]), UNITS), min_size=1, max_size=5))
def test_moments_of_rows_of_any_size(seed, shards):
    """Shards of very different sizes, of zeros, of one row, cut and merged at will: the unit is that of the largest."""
    rng = np.random.default_rng(seed)
    parts = [draw(seed + i, n, 1.0)[0] * size for i, (n, size) in enumerate(shards)]
    rows = torch.cat(parts).numpy()
    states = [fed(lambda s, r, _: s.update(r), Moments.empty(WIDTH), part, part, rng) for part in parts]
    state = merged(states, rng)
    scaled = rows * 2.0**-state.exponent
    largest = np.abs(scaled).max(initial=0.0)
    assert largest == 0 or 2.0**-66 < largest < 2.0**66
    want = oracles.moments(scaled) if len(rows) else MomentsCase().facts(Moments.empty(WIDTH))
    for power, name in enumerate(("mean", "scatter", "third", "fourth"), 1):
        atol = 8 * rounding(1.0) * max(len(rows), 1) * largest**power  # rows are off their mean by their own size
        np.testing.assert_allclose(getattr(state, name), want[name], rtol=0, atol=atol, err_msg=name)


# --- Sketch ----------------------------------------------------------------------------------------------------------


def assert_guarantee(state, rows, ratio):
    """The sentence of the docstring, against the scatter formed outright; rounding in units of the trace."""
    want = oracles.moments(rows)
    trace = np.trace(want["scatter"])
    slack = rounding(ratio) * max(trace, len(rows))
    lost = np.linalg.eigvalsh(want["scatter"] - (state.rows_RD.T @ state.rows_RD).numpy())
    assert lost[0] >= -slack
    assert lost[-1] <= state.shrinkage + slack
    assert state.shrinkage <= (state.trace - (state.rows_RD**2).sum()) / (state.rank + 1) + slack
    assert state.shrinkage <= trace / (state.rank + 1) + slack
    assert abs(state.trace - trace) <= slack and len(state.rows_RD) <= 2 * state.rank
    spectrum = np.linalg.eigvalsh(want["scatter"])[::-1]
    lower = state.eigenvalues().numpy()
    assert len(lower) == min(state.rank, len(spectrum)) and (np.diff(lower) <= 0).all()
    above = spectrum[: len(lower)] - lower
    assert (above >= -slack).all() and (above <= float(state.shrinkage) + slack).all()
    if trace > slack:
        low, high = state.top_share()
        assert low - slack / trace <= spectrum[0] / trace <= high + slack / trace


@few
@given(seed=SEEDS, sizes=SIZES, ratio=RATIOS, rank=st.integers(1, 5), decay=st.sampled_from([1.0, 0.8, 0.3]))
def test_sketch_keeps_its_guarantee_under_every_tree(seed, sizes, ratio, rank, decay):
    rng = np.random.default_rng(seed)
    sizes = [*sizes, 1]
    rows = draw(seed, sum(sizes), ratio, 12, decay ** np.arange(12))[0]
    states = [fed(lambda s, r, _: s.update(r), Sketch.empty(rank, 12), r, r, rng) for r in rows.split(sizes)]
    assert_guarantee(merged(states, rng), rows.numpy(), ratio)


@pytest.mark.parametrize("seed", range(5))
def test_sketch_is_exact_where_the_rank_suffices_and_useful_where_not(seed):
    rng = np.random.default_rng(seed)
    shape = rng.standard_normal((5, 40))
    flat = rng.standard_normal((200, 5)) @ shape + 3.0
    state = Sketch.empty(5, 40)
    for chunk in torch.from_numpy(flat).split(17):
        state = state.update(chunk)
    trace = float(state.trace)
    # 200 rows went through a buffer of 10, so it was shrunk some forty times, each time by a rounding error.
    assert state.shrinkage <= rounding(3) * trace
    scatter = oracles.moments(flat)["scatter"]
    np.testing.assert_allclose(state.rows_RD.T @ state.rows_RD, scatter, rtol=0, atol=rounding(3) * trace)
    np.testing.assert_allclose(state.top_share(), oracles.spectral_ratio(flat), rtol=rounding(3))
    noisy = torch.from_numpy(flat + 0.3 * rng.standard_normal(flat.shape))
    state = Sketch.empty(8, 40).update(noisy)
    assert_guarantee(state, noisy.numpy(), 3.0)
    low, high = state.top_share()
    # 40 columns of noise of variance 0.09 share out 3.6 of a trace of about 5 * 40 = 200: at most that much can be lost
    # over rank + 1 - 5 directions, the tail bound of Frequent Directions (Ghashami et al., theorem 1.1).
    tail = 0.09 * 40 / 200
    assert 0 < high - low < 2 * tail / (8 + 1 - 5)


def test_the_mean_of_a_sketch_is_exact_over_blocks():
    """More rows than are summed at once, far from zero: as exact as the longest floats there are."""
    rows = 1e4 + torch.randn(3000, 512, generator=torch.Generator().manual_seed(0))
    state = Sketch.empty(4, 512).update(rows)
    want = rows.double().numpy().astype(np.longdouble).mean(axis=0)
    np.testing.assert_allclose(state.mean, want.astype(float), rtol=1e-14)
    assert float(state.trace) == pytest.approx(float(((rows.double() - state.mean) ** 2).sum()), rel=1e-12)


def test_sketch_of_raw_rows_would_see_only_the_mean():
    rows = draw(0, 150, 1e4)[0]
    low, high = Sketch.empty(2, WIDTH).update(rows[:70]).update(rows[70:]).top_share()
    truth = oracles.spectral_ratio(rows.numpy())
    assert low - rounding(1e4) <= truth <= high + rounding(1e4) and high < 0.95
    raw = np.linalg.svd(rows.numpy(), compute_uv=False) ** 2
    assert raw[0] / raw.sum() > 1 - 1e-6


# --- BinMoments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bins_with_a_mean_of_1e4_spreads(seed, dtype):
    n, ratio = 192, 1e4
    rows, labels = draw(seed, n, ratio)
    rows = rows.to(dtype)
    want = BinMomentsCase().truth([rows.double().numpy()], [labels.numpy()])
    state = BinMoments.empty(BINS, WIDTH)
    for chunk, bin_N in zip(rows.split(50), labels.split(50), strict=True):
        state = state.update(chunk, bin_N)
    atol = n * rounding(ratio)  # the state is float64 whatever the rows are
    np.testing.assert_allclose(state.spread, want["spread"], rtol=0, atol=atol)
    one_hot = torch.nn.functional.one_hot(labels, BINS).to(dtype)
    sums, count = one_hot.T @ rows, one_hot.sum(dim=0).clamp_min(1)
    naive = one_hot.T @ (rows * rows).sum(dim=1) - (sums * sums).sum(dim=1) / count
    wrong = np.abs(naive.numpy() - want["spread"]).max()
    assert wrong > 10 * atol if dtype == torch.float64 else wrong > np.max(want["spread"])


@few
@given(seed=SEEDS, ratio=RATIOS)
def test_within_and_between_add_up_to_the_scatter_of_all_rows(seed, ratio):
    rows, labels = draw(seed, 60, ratio)
    rows = rows + labels[:, None]  # bins that differ
    pooled = BinMoments.empty(BINS, WIDTH).update(rows[:25], labels[:25]).update(rows[25:], labels[25:]).pooled()
    want = oracles.moments(rows.numpy())
    within = sum(BinMomentsCase().truth([rows.numpy()], [labels.numpy()])["spread"])
    atol = 60 * rounding(ratio) * (1 + BINS**2)  # the bins' means are up to BINS apart
    assert pooled.count == 60
    np.testing.assert_allclose(pooled.mean, want["mean"], rtol=0, atol=rounding(ratio + BINS))
    np.testing.assert_allclose(pooled.within, within, rtol=0, atol=atol)
    np.testing.assert_allclose(pooled.within + pooled.between, np.trace(want["scatter"]), rtol=0, atol=atol)


# --- Refusals --------------------------------------------------------------------------------------------------------

ROWS, LONG = torch.zeros(4, 2), torch.zeros(4, 3)
BINNED = BinMoments.empty(3, 2)
REFUSED = [
    (lambda: Sketch.empty(2, 3).merge(Sketch.empty(2, 4)), ShapeError, "width 3 and 4"),
    (lambda: Sketch.empty(2, 3).merge(Sketch.empty(3, 3)), OptionError, "rank=2 and rank=3"),
    (lambda: Sketch.empty(2, 2).update(LONG), ShapeError, r"\(n, 2\)"),
    (lambda: Sketch.empty(0, 3), OptionError, "rank"),
    (lambda: Sketch.empty(2, 3).top_share(), EmptyInputError, "no row"),
    (lambda: Sketch.empty(2, 2).update(ROWS).top_share(), DegenerateError, "all equal"),
    (lambda: BINNED.update(ROWS, torch.tensor([0, 3, 1, -1])), OptionError, r"labels\[1\] = 3 .*1 later"),
    (lambda: BINNED.update(ROWS, torch.tensor([0, 1, 2, -1])), OptionError, r"labels\[3\] = -1"),
    (lambda: BINNED.update(ROWS, torch.zeros(4)), OptionError, "dtype"),
    (lambda: BINNED.update(ROWS, torch.tensor([0, 1, 2])), ShapeError, "one label a row"),
    (lambda: BINNED.update(LONG, torch.tensor([0, 1, 2, 0])), ShapeError, r"\(n, 2\)"),
    (lambda: BINNED.merge(BinMoments.empty(4, 2)), ShapeError, "cannot merge"),
    (lambda: BinMoments.empty(0, 2), OptionError, "bins"),
    (lambda: Moments.empty(2).merge(Moments.empty(3)), ShapeError, "width 2 and 3"),
]


@pytest.mark.parametrize("attempt, error, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(attempt, error, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checker of shapes
    with pytest.raises(error, match=message):
        attempt()
