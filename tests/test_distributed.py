"""merge_across_ranks over real processes: the same bits on every rank, and the value of one process that saw it all."""

import dataclasses
import gc
from datetime import timedelta

import numpy as np
import oracles
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from anisoscope.distributed import merge_across_ranks
from anisoscope.errors import AnisoscopeError
from anisoscope.stats.counts import BinMoments
from anisoscope.stats.moments import Moments
from anisoscope.stats.reservoir import Reservoir
from anisoscope.stats.sketch import Sketch

WIDTH, BINS, RANK, CAPACITY = 6, 3, 2, 8
SIZES = {1: (40,), 2: (0, 40), 4: (25, 0, 1, 30)}
"""Rows of each rank, by number of ranks: a first rank without rows, one in the middle, and one with a single row."""
SOME = {1: (0,), 2: (1,), 4: (1, 3)}
"""Members of a group that is not everybody, and whose ranks are not those of the whole."""
ROUNDING = 64 * np.finfo(np.float64).eps * (1 + 100)
"""As in test_states: sums of fewer than 100 terms, a mean of 100 spreads."""


def shards(world):
    """Rows and bins of each rank."""
    rng = np.random.default_rng(world)
    n = sum(SIZES[world])
    rows = torch.from_numpy(rng.standard_normal((n, WIDTH)) * 0.7 ** np.arange(WIDTH) + 100.0)
    labels = torch.from_numpy(rng.integers(0, BINS, n))
    return list(zip(rows.split(SIZES[world]), labels.split(SIZES[world]), strict=True))


def states(rank, rows, labels):
    """One state of each kind; the bfloat16 reservoir shows that any dtype travels."""
    return {
        "moments": Moments.empty(WIDTH).update(rows),
        "reservoir": Reservoir.empty(CAPACITY, WIDTH, shard=rank, dtype=torch.float64).update(rows),
        "half": Reservoir.empty(CAPACITY, WIDTH, shard=rank, dtype=torch.bfloat16).update(rows),
        "sketch": Sketch.empty(RANK, WIDTH).update(rows),
        "bins": BinMoments.empty(BINS, WIDTH).update(rows, labels),
    }


def message(state, group=None):
    """What a refused merge says."""
    try:
        merge_across_ranks(state, group)
    except AnisoscopeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Watched(Moments):
    """Moments that note how many of their kind are alive when two are about to be merged."""

    most = 0

    def merge(self, other):
        Watched.most = max(Watched.most, sum(type(thing) is Watched for thing in gc.get_objects()))
        both = Moments(*vars(self).values()).merge(Moments(*vars(other).values()))
        return Watched(*vars(both).values())


def work(rank, world, folder):
    """The whole life of one rank; what it got is written to a file of its own."""
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=20)  # a rank left waiting fails, and soon
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=patience)
    mine = shards(world)[rank]
    got = {name: merge_across_ranks(state) for name, state in states(rank, *mine).items()}
    got["misfit"] = message(
        Moments.empty(WIDTH + (rank == world - 1)).update(torch.ones(2, WIDTH + (rank == world - 1)))
    )
    got["stranger"] = message(Sketch.empty(RANK, WIDTH) if rank == world - 1 else Moments.empty(WIDTH))
    got["no state"] = message(3.0)
    got["after errors"] = merge_across_ranks(Moments.empty(WIDTH).update(mine[0]))
    group = dist.new_group(list(SOME[world]))
    one = Moments.empty(WIDTH).update(mine[0])
    got["some"] = merge_across_ranks(one, group) if rank in SOME[world] else message(one, group)
    merge_across_ranks(Watched(*vars(one).values()))
    got["most alive"] = Watched.most
    torch.save(got, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=SIZES, ids=lambda world: f"{world} ranks")
def result(request, tmp_path_factory):
    """(number of ranks, what each rank got): one set of processes for all tests of a size."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (world, str(folder)), nprocs=world)
    return world, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def all_rows(world, *ranks):
    """(rows, bins) of these ranks together; of all, where none is named."""
    parts = shards(world)
    parts = [parts[rank] for rank in ranks] if ranks else parts
    return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]


def assert_same_bits(a, b):
    assert type(a) is type(b)
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        for left, right in zip(*((v if isinstance(v, tuple) else (v,)) for v in (x, y)), strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, field.name


def assert_moments(state, rows):
    want = oracles.moments(rows.numpy())
    assert state.count == len(rows)
    np.testing.assert_allclose(state.mean, want["mean"], rtol=0, atol=ROUNDING)
    for name in ("scatter", "third", "fourth"):  # of size n for rows of spread 1
        np.testing.assert_allclose(getattr(state, name), want[name], rtol=0, atol=len(rows) * ROUNDING, err_msg=name)


def test_every_rank_has_the_same_bits(result):
    _, got = result
    for name in ("moments", "reservoir", "half", "sketch", "bins", "after errors"):
        for other in got[1:]:
            assert_same_bits(got[0][name], other[name])


def test_the_merge_is_the_batch_value(result):
    world, got = result
    rows, labels = all_rows(world)
    n, state = len(rows), got[-1]
    assert_moments(state["moments"], rows)
    bins = BinMoments.empty(BINS, WIDTH).update(rows, labels)
    for name in ("count", "mean", "spread"):
        np.testing.assert_allclose(getattr(state["bins"], name), getattr(bins, name), rtol=0, atol=n * ROUNDING)
    for name, dtype in (("reservoir", torch.float64), ("half", torch.bfloat16)):
        # The sample is a function of what each shard holds: no process is needed to say what it must be, bit for bit.
        parts = [states(rank, *shard)[name] for rank, shard in enumerate(shards(world))]
        keys, numbers, x = (torch.cat([getattr(part, f) for part in parts]) for f in ("keys", "numbers", "rows"))
        order = keys.argsort()[:CAPACITY]
        assert torch.equal(state[name].numbers, numbers[order]) and state[name].seen == n
        assert torch.equal(state[name].rows, x[order]) and x.dtype == dtype


def test_the_sketch_keeps_its_guarantee(result):
    world, got = result
    rows, _ = all_rows(world)
    sketch, scatter = got[-1]["sketch"], oracles.moments(rows.numpy())["scatter"]
    trace = np.trace(scatter)
    lost = np.linalg.eigvalsh(scatter - (sketch.rows_RD.T @ sketch.rows_RD).numpy())
    slack = ROUNDING * trace
    assert -slack <= lost[0] and lost[-1] <= sketch.shrinkage + slack and sketch.shrinkage > 0
    assert sketch.shrinkage <= trace / (RANK + 1) + slack
    np.testing.assert_allclose(sketch.trace, trace, rtol=ROUNDING)


def test_an_error_reaches_every_rank_and_the_group_still_works(result):
    world, got = result
    for state in got:
        if world > 1:
            assert state["misfit"] == f"ShapeError: cannot merge moments of width {WIDTH} and {WIDTH + 1}"
            assert state["stranger"] == "OptionError: ranks hold different states: Moments and Sketch"
            assert state["no state"].startswith("OptionError: merge_across_ranks takes a state")
        assert_moments(state["after errors"], all_rows(world)[0])


def test_a_group_of_some_ranks_merges_those_alone(result):
    world, got = result
    members = SOME[world]
    for rank, state in enumerate(got):
        if rank in members:
            assert_moments(state["some"], all_rows(world, *members)[0])
            assert_same_bits(state["some"], got[members[0]]["some"])
        else:
            assert state["some"].startswith("OptionError: this process is not a member")


def test_states_are_not_gathered_all_at_once(result):
    # The rank's own state, what was merged so far and the one that came: three, however many ranks there are.
    world, got = result
    most = [state["most alive"] for state in got]
    assert max(most) == min(world, 3) if world > 1 else most == [0]


def test_without_processes_the_state_is_returned():
    state = Moments.empty(WIDTH).update(torch.ones(2, WIDTH))
    assert merge_across_ranks(state) is state
