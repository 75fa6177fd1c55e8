"""Schedules: pure functions of the state of a run, checked over whole runs."""

import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import OptionError
from anisoscope.schedule import Last, Schedule, by_tokens, either, every, log_spaced, until, wall_share


def steps(schedule, last=2000):
    return [step for step in range(last) if schedule.due(step)]


def test_every():
    assert steps(every(50), 201) == [0, 50, 100, 150, 200]
    assert steps(every(1), 5) == [0, 1, 2, 3, 4]
    assert not every(1).due(-1)


@pytest.mark.parametrize("per_decade", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("first", [1, 3, 10])
def test_log_spaced_is_the_rounded_series_and_nothing_else(per_decade, first):
    series = {round(first * 10 ** (i / per_decade)) for i in range(10 * per_decade)}
    assert steps(log_spaced(per_decade, first)) == sorted({0} | {step for step in series if step < 2000})


def test_log_spaced_ends_each_decade():
    assert steps(log_spaced(1), 1001) == [0, 1, 10, 100, 1000]
    assert steps(log_spaced(2), 101) == [0, 1, 3, 10, 32, 100]


def through_tokens(schedule, per_step, count):
    """The steps looked at in a run of so many tokens a step, the way a monitor asks."""
    last, found = None, []
    for step in range(count):
        tokens = per_step * (step + 1)
        if schedule.due(step, tokens, last=last):
            found.append(step)
            last = Last(step, tokens)
    return found


def test_by_tokens_looks_once_past_each_multiple():
    # 30 tokens a step: multiples of 100 are passed at 120, 210, 300, ...
    assert through_tokens(by_tokens(100), 30, 12) == [0, 3, 6, 9]
    # Steps larger than the interval: every one passes a multiple, and none is looked at twice.
    assert through_tokens(by_tokens(100), 250, 4) == [0, 1, 2, 3]


@given(per_step=st.integers(1, 500), interval=st.integers(1, 2000))
def test_by_tokens_misses_no_multiple(per_step, interval):
    count = 60
    found = set(through_tokens(by_tokens(interval), per_step, count))
    for step in range(1, count):
        passed = per_step * (step + 1) // interval > per_step * step // interval
        assert (step in found) == passed


def test_by_tokens_needs_tokens():
    with pytest.raises(OptionError, match=r"monitor\.step\(step, tokens="):
        by_tokens(10).due(3)


def through_time(schedule, step_seconds, costs, count):
    """Simulate a run: the steps looked at, and the share of time spent after each of them."""
    spent, total, last, found, shares = 0.0, 0.0, None, [], []
    for step in range(count):
        total += step_seconds
        if schedule.due(step, None, spent, total, last=last):
            cost = costs(step)
            spent, total = spent + cost, total + cost
            last = Last(step, None, cost)
            found.append(step)
            shares.append(spent / total)
    return found, shares


def test_wall_share_keeps_within_the_share_after_the_first_look():
    found, shares = through_time(wall_share(0.02), 0.01, lambda step: 0.05, 3000)
    assert found[0] == 0
    assert all(share <= 0.02 + 1e-12 for share in shares[1:])
    # and uses it up: 0.05 s of each 2.5 s, so a look every 245 steps of 0.01 s, once the first one is paid back
    first, *gaps = [after - before for before, after in itertools.pairwise(found)]
    assert first == pytest.approx(490, abs=1) and set(gaps) <= {244, 245, 246}


def test_wall_share_adapts_to_the_cost():
    cheap, _ = through_time(wall_share(0.05), 0.01, lambda step: 0.001, 1000)
    dear, _ = through_time(wall_share(0.05), 0.01, lambda step: 0.1, 1000)
    assert len(cheap) > 10 * len(dear)
    # A look that became dear is paid back before the next one.
    found, shares = through_time(wall_share(0.05), 0.01, lambda step: 1.0 if step > 200 else 0.001, 10_000)
    late = [step for step in found if step > 200]
    assert late[1] - late[0] > 1000
    assert shares[-1] <= 0.05 + 1.0 / 100


def test_wall_share_never_more_often_than_asked():
    found, _ = through_time(wall_share(0.9, at_least_steps=7), 1.0, lambda step: 1e-9, 100)
    assert found == list(range(0, 100, 7))


def test_a_look_that_cost_nothing_is_due_again():
    assert wall_share(0.02).due(1, None, 0.0, 0.0, last=Last(0))


def test_combinations():
    assert steps(either(every(100), log_spaced(1)), 301) == [0, 1, 10, 100, 200, 300]
    assert steps(until(10, every(2)), 100) == [0, 2, 4, 6, 8]
    assert steps(until(10, every(2), then=every(20)), 50) == [0, 2, 4, 6, 8, 20, 40]
    # The state reaches the parts.
    both = either(every(1000), by_tokens(100))
    assert both.due(3, 120, last=Last(0, 30)) and not both.due(2, 90, last=Last(0, 30))
    nested = until(5, wall_share(0.5), then=every(10))
    assert not nested.due(3, None, 9.0, 10.0, last=Last(0, None, 1.0)) and nested.due(10, None, 9.0, 10.0)


@pytest.mark.parametrize(
    "schedule", [every(5), log_spaced(3), by_tokens(9), wall_share(0.1), either(every(2)), until(3, every(1))]
)
def test_a_schedule_is_a_value(schedule):
    assert isinstance(schedule, Schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule and hash(schedule) == hash(schedule)
    with pytest.raises((AttributeError, TypeError)):
        schedule.steps = 3
    asked = [schedule.due(step, 10 * step, 0.1, step + 1.0, last=Last(0, 0, 0.1)) for step in range(40)]
    assert asked == [schedule.due(step, 10 * step, 0.1, step + 1.0, last=Last(0, 0, 0.1)) for step in range(40)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: every(0), "every takes a whole number of steps"),
        (lambda: every(True), "1 or more; got True"),
        (lambda: log_spaced(0), "per_decade"),
        (lambda: log_spaced(2, 0), "first"),
        (lambda: by_tokens(-3), "tokens"),
        (lambda: wall_share(2.0), "0.02 for two per cent; got 2.0"),
        (lambda: wall_share(0.0), "between 0 and 1"),
        (lambda: wall_share(math.nan), "between 0 and 1"),
        (lambda: wall_share(0.1, 0), "at_least_steps"),
        (either, "one schedule or more"),
    ],
)
def test_what_cannot_be_is_named(make, words):
    with pytest.raises(OptionError, match=words):
        make()
