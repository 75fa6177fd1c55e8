"""The reservoir: keys, equal chances for all rows and pairs, little copying, ties and refusals.

Its merge laws are tested beside those of the other states, through ``ReservoirCase``.
"""

import dataclasses
import math

import jaxtyping
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anisoscope.errors import OptionError, ShapeError
from anisoscope.stats.reservoir import Reservoir, row_keys

WIDTH, CAPACITY = 3, 7
WORD = 2**64 - 1


def scramble(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def slow_key(seed, shard, index):
    gamma = 0x9E3779B97F4A7C15
    origin = scramble(scramble(seed + gamma & WORD) + shard * gamma & WORD)
    key = scramble(origin + (index + 1) * gamma & WORD)
    return key - 2**64 if key >> 63 else key


def test_keys_are_splitmix64():
    # The published first outputs for seed 1234567 check the oracle, the oracle checks the vectorised keys.
    outputs = [scramble(1234567 + i * 0x9E3779B97F4A7C15 & WORD) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, shard, start in [(0, 0, 0), (3, 1, 10**12), (2**63 - 1, 2**63 - 1, 5)]:
        assert row_keys(seed, shard, start, 4).tolist() == [slow_key(seed, shard, start + i) for i in range(4)]


class ReservoirCase:
    """The state as the merge laws see it, with the slow truth: all keys, sorted."""

    def empty(self, shard=0):
        return Reservoir.empty(CAPACITY, WIDTH, seed=5, shard=shard, dtype=torch.float64)

    def feed(self, state, rows, labels):
        return state.update(rows)

    def facts(self, state):
        return {"rows": state.rows, "numbers": state.numbers, "keys": state.keys, "seen": state.seen}

    def truth(self, parts, labels):
        rows = [(slow_key(5, s, i), s, i, x) for s, part in enumerate(parts) for i, x in enumerate(part)]
        kept = sorted(rows, key=lambda row: row[:3])[:CAPACITY]
        return {
            "rows": np.array([x for *_, x in kept]),
            "numbers": [(s, i) for _, s, i, _ in kept],
            "keys": [key for key, *_ in kept],
            "seen": len(rows),
        }


def merged(states, rng):
    """Merge neighbours in a random order: a random tree over the states."""
    states = list(states)
    while len(states) > 1:
        i = int(rng.integers(len(states) - 1))
        states[i : i + 2] = [states[i].merge(states[i + 1])]
    return states[0]


@pytest.mark.parametrize("sizes", [(30,), (18, 0, 1, 11)], ids=["one stream", "merged"])
def test_every_row_and_every_pair_of_rows_is_equally_likely(sizes):
    n, k, trials = sum(sizes), 6, 2000
    kept = np.zeros((trials, n))
    for seed in range(trials):
        states = [Reservoir.empty(k, 1, seed=seed, shard=s) for s in range(len(sizes))]
        rows = torch.arange(float(n))[:, None].split(sizes)
        states = [state.update(r[:4]).update(r[4:]) for state, r in zip(states, rows, strict=True)]
        sample = merged(states, np.random.default_rng(seed)).rows[:, 0].long()
        assert len(set(sample.tolist())) == k
        kept[seed, sample] = 1
    # For simple random samples the counts have covariance T p (1-p) (I - (J-I)/(n-1)), so this is chi-square with n-1
    # degrees of freedom: mean n-1, variance 2(n-1). Five sigma on both sides: too even would be wrong as well.
    p = k / n
    chi2 = (n - 1) / n * ((kept.sum(axis=0) - trials * p) ** 2).sum() / (trials * p * (1 - p))
    assert abs(chi2 - (n - 1)) < 5 * math.sqrt(2 * (n - 1))
    # Each pair is kept together with probability q, a binomial count; five sigma for each of the n(n-1)/2 pairs. Keys
    # that repeat from shard to shard would show here.
    q = k * (k - 1) / (n * (n - 1))
    z = (kept.T @ kept - trials * q) / math.sqrt(trials * q * (1 - q))
    assert np.abs(z[~np.eye(n, dtype=bool)]).max() < 5


class FloatsMade(TorchDispatchMode):
    """Counts the floating-point numbers that operations write into new memory."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.total += leaf.numel() * (leaf.untyped_storage().data_ptr() not in inputs)
        return out


def test_rows_that_cannot_enter_are_not_copied():
    n, k, width, chunk = 200_000, 200, 16, 2000
    rows = torch.zeros(1, width).expand(chunk, width)
    state = Reservoir.empty(k, width)
    with FloatsMade() as made:
        for _ in range(n // chunk):
            state = state.update(rows)
    # About k (1 + log(n/k)) rows ever enter, each copied once on entering; for each k of them one compaction copies
    # at most k rows twice. Keeping the sample in one block at every update would copy k rows n/chunk times, 3.5 times
    # this bound; copying every row, 35 times.
    entering = k * (1 + math.log(n / k))
    assert made.total < 3 * 1.2 * entering * width
    assert state.seen == n and len(state.rows) == k


@pytest.mark.parametrize("seen", [40, 41, 100])
def test_knowing_how_many_come_changes_nothing_but_the_room_taken(seen, seed):
    rows = torch.randn(seen, WIDTH, generator=torch.Generator().manual_seed(seed))
    plain, told = (Reservoir.empty(CAPACITY, WIDTH, seed=seed, expected=e) for e in (0, 40))
    most = 0
    for part in rows.split(9):
        plain, told = plain.update(part), told.update(part)
        most = max(most, sum(len(block) for block in told.pool))
    assert torch.equal(told.rows, plain.rows) and torch.equal(told.numbers, plain.numbers)
    assert told.seen == plain.seen == seen
    if seen == 40:
        assert most == CAPACITY  # not one row was stored in vain


def test_fewer_rows_than_expected_leave_a_smaller_sample_of_the_same_order():
    rows = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(3))
    plain, told = (Reservoir.empty(CAPACITY, WIDTH, expected=e).update(rows) for e in (0, 240))
    assert 0 < len(told.rows) < CAPACITY
    assert torch.equal(told.rows, plain.rows[: len(told.rows)])


def test_reservoir_goes_on_after_a_merge_and_returns_to_stream_order():
    rows = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = Reservoir.empty(CAPACITY, WIDTH, seed=5, shard=0, dtype=torch.float64).update(rows[:20])
    b = Reservoir.empty(CAPACITY, WIDTH, seed=5, shard=1, dtype=torch.float64).update(rows[20:40])
    got = a.merge(b).update(rows[40:])
    order = [*range(20), *range(40, 60)], [*range(20, 40)]
    want = ReservoirCase().truth([rows[list(o)].numpy() for o in order], None)
    found = ReservoirCase().facts(got)
    assert found.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    numbers = got.numbers[got.stream_order()].tolist()
    assert numbers == sorted(numbers) and numbers != got.numbers.tolist()


def test_equal_keys_of_two_shards_are_settled_by_number():
    """A tie has one chance in 2**64, so it is made by hand: whoever merges with whom, shard 0 comes first."""
    a = Reservoir.empty(2, 1, shard=0).update(torch.zeros(2, 1))
    b = Reservoir.empty(2, 1, shard=1).update(torch.ones(2, 1))
    b = dataclasses.replace(b, keys=a.keys)
    assert a.merge(b).numbers[:, 0].tolist() == b.merge(a).numbers[:, 0].tolist() == [0, 1]
    after = dataclasses.replace(b, keys=torch.tensor([a.keys[0] - 1, a.keys[0]]), shard=0)
    assert after.update(torch.zeros(2, 1)).numbers[:, 0].tolist() == [1, 0]


ROWS, LONG = torch.zeros(4, 2), torch.zeros(4, 3)
FULL, OTHER = Reservoir.empty(4, 2).update(ROWS), Reservoir.empty(4, 2, shard=1).update(ROWS)
REFUSED = [
    (lambda: FULL.merge(Reservoir.empty(5, 2, shard=1)), OptionError, "capacity=4 and capacity=5"),
    (lambda: FULL.merge(Reservoir.empty(4, 2, shard=1, seed=1)), OptionError, "seed=0 and seed=1"),
    (lambda: FULL.merge(Reservoir.empty(4, 2, shard=1, dtype=torch.float64)), OptionError, "dtype"),
    (lambda: FULL.merge(Reservoir.empty(4, 3, shard=1)), ShapeError, "width 2 and 3"),
    (lambda: FULL.merge(Reservoir.empty(4, 2).update(ROWS)), OptionError, "shard 0.*shard="),
    (lambda: FULL.merge(OTHER).merge(OTHER), OptionError, "shard 1.*shard="),  # found through an earlier merge too
    (lambda: FULL.update(LONG), ShapeError, r"\(n, 2\)"),
    (lambda: Reservoir.empty(0, 2), OptionError, "capacity"),
    (lambda: Reservoir.empty(4, 2, seed=-1), OptionError, "seed"),
    (lambda: Reservoir.empty(4, 2, shard=2**63), OptionError, "shard"),
]


@pytest.mark.parametrize("attempt, error, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(attempt, error, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checker of shapes
    with pytest.raises(error, match=message):
        attempt()


def test_an_empty_reservoir_collides_with_nothing():
    assert FULL.merge(Reservoir.empty(4, 2)).seen == 4
