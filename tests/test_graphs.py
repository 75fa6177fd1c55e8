"""Work that is recorded once and replayed: when it is, when it is not, and that nobody can tell from the numbers.

There is no GPU here; a recorder takes its place that does again what a graph would do. Graphs themselves are in
``test_gpu``.
"""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from anisoscope.measures import graphs, leading
from anisoscope.measures.graphs import CudaRecorder, Graphed, Recording

BYTES = 1000


@dataclass
class Again:
    """Does the work again in place of a replay, into the same outputs, and counts."""

    kept_bytes: int = BYTES
    there: bool = True
    recorded: int = 0
    replayed: int = 0
    error: Exception | None = None
    lost: bool = False
    outputs: list = field(default_factory=list)

    def serves(self, device):
        return self.there

    def record(self, act, device):
        self.recorded += 1
        if self.error is not None:
            raise self.error
        outputs = act()
        self.outputs.append(outputs)

        def replay():
            self.replayed += 1
            if self.lost:
                raise RuntimeError("out of memory")
            for own, new in zip(outputs, act(), strict=True):
                own.copy_(new)

        return Recording(outputs, replay, self.kept_bytes)


def summed(a, b, *more, power=1):
    return (a + b) ** power + sum(more), a - b


def pair(seed, shape=(3, 4)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def made(recorder, function=summed):
    return Graphed(function, recorder, graphs._Budget())


def same(found, wanted):
    return all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_the_second_call_records_and_the_third_replays():
    recorder = Again()
    graphed = made(recorder)
    counts = []
    for seed in range(5):
        given = pair(seed)
        assert same(graphed(*given, power=2), summed(*given, power=2))
        counts.append((recorder.recorded, recorder.replayed))
    assert counts == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_what_came_out_once_is_not_changed_by_what_comes_out_later():
    graphed = made(Again())
    for seed in range(2):
        graphed(*pair(seed))
    first = graphed(*pair(7))
    before = [one.clone() for one in first]
    graphed(*pair(8))
    assert same(first, before)


def test_what_was_given_is_left_alone_and_may_be_changed_afterwards():
    graphed = made(Again())
    for seed in range(4):
        given = pair(seed)
        before = [one.clone() for one in given]
        graphed(*given)
        assert same(given, before)
        given[0].zero_()
    given = pair(9)
    assert same(graphed(*given), summed(*given))


@pytest.mark.parametrize(
    "other",
    [
        lambda graphed: graphed(*pair(5, (4, 3)), power=1),
        lambda graphed: graphed(*pair(5), power=3),
        lambda graphed: graphed(*(one.double() for one in pair(5)), power=1),
        lambda graphed: graphed(*(one.T.contiguous().T for one in pair(5)), power=1),
    ],
    ids=["shape", "what is fixed", "type", "strides"],
)
def test_calls_of_another_kind_have_a_recording_of_their_own(other):
    recorder = Again()
    graphed = made(recorder)
    for seed in range(3):
        graphed(*pair(seed), power=1)
    other(graphed)
    assert (recorder.recorded, recorder.replayed) == (1, 1)
    other(graphed)
    other(graphed)
    assert (recorder.recorded, recorder.replayed) == (2, 2)


def test_what_is_held_is_not_copied_and_told_apart_by_what_it_is():
    recorder = Again()
    graphed = made(recorder)
    one, two = torch.ones(4), torch.full((4,), 2.0)
    for seed in range(3):
        graphed(*pair(seed), held=(one,))
    one.fill_(5.0)  # where it lies: a recording sees it
    given = pair(3)
    assert same(graphed(*given, held=(one,)), summed(*given, one))
    assert same(graphed(*given, held=(two,)), summed(*given, two))
    assert (recorder.recorded, recorder.replayed) == (1, 2)


@pytest.mark.parametrize("error", [RuntimeError("not permitted when stream is capturing"), ValueError("anything")])
def test_what_cannot_be_recorded_goes_on_plainly_and_is_not_tried_again(error):
    recorder = Again(error=error)
    graphed = made(recorder)
    for seed in range(5):
        given = pair(seed)
        assert same(graphed(*given), summed(*given))
    assert (recorder.recorded, recorder.replayed) == (1, 0)


def test_a_replay_that_fails_gives_way_to_the_plain_way_for_good():
    recorder = Again(lost=True)
    graphed = made(recorder)
    for seed in range(5):
        given = pair(seed)
        assert same(graphed(*given), summed(*given))
    assert (recorder.recorded, recorder.replayed) == (1, 1)
    assert graphed.budget.spent == 0, "its room is there for others"


def test_errors_of_the_function_are_the_callers():
    def broken(a):
        raise ValueError("of the function")

    recorder = Again()
    graphed = made(recorder, broken)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the function"):
            graphed(torch.ones(2))
    assert recorder.recorded == 0


def test_a_recording_that_keeps_too_much_is_not_kept():
    heavy = Again(kept_bytes=graphs.KEPT_BYTES)
    graphed = made(heavy)
    for seed in range(4):
        graphed(*pair(seed))
    assert (heavy.recorded, heavy.replayed) == (1, 0)
    assert graphed.budget.spent == 0


def test_the_bound_is_for_all_of_them_together_and_counts_their_buffers():
    budget, one = graphs._Budget(), torch.ones(4)
    first, second = Again(kept_bytes=graphs.KEPT_BYTES // 2 + 1), Again(kept_bytes=graphs.KEPT_BYTES // 2 + 1)
    for recorder in (first, second):
        graphed = Graphed(summed, recorder, budget)
        for seed in range(4):
            graphed(*pair(seed), held=(one,) if recorder is second else ())
    assert (first.replayed, second.replayed) == (2, 0)
    assert budget.spent == graphs.KEPT_BYTES // 2 + 1 + 2 * 3 * 4 * 4


def test_large_things_are_never_recorded(monkeypatch):
    monkeypatch.setattr(graphs, "GIVEN_BYTES", 2 * 3 * 4 * 4)
    recorder = Again()
    graphed = made(recorder)
    for seed in range(4):
        graphed(*pair(seed))
        graphed(*pair(seed, (3, 5)))
    assert (recorder.recorded, recorder.replayed) == (1, 2)


def test_kinds_of_calls_are_not_remembered_without_end():
    recorder = Again()
    graphed = made(recorder)
    for size in range(1, graphs.MOST_KEYS + 20):
        for seed in range(2):
            graphed(*pair(seed, (size,)))
    assert recorder.recorded == len(graphed._known) == graphs.MOST_KEYS


def test_nothing_is_recorded_where_the_recorder_does_not_serve_or_gradients_are_wanted():
    recorder = Again(there=False)
    graphed = made(recorder)
    for seed in range(4):
        graphed(*pair(seed))
    recorder.there = True
    for seed in range(4):
        a, b = pair(seed)
        out = graphed(a.requires_grad_(), b)[0]
        out.sum().backward()
        assert a.grad is not None
    assert recorder.recorded == 0


def test_a_call_in_inference_mode_leaves_buffers_that_others_can_use():
    recorder = Again()
    graphed = made(recorder)
    with torch.inference_mode():
        for seed in range(3):
            graphed(*pair(seed))
    given = pair(4)
    assert same(graphed(*given), summed(*given))
    assert recorder.replayed == 2


def test_threads_do_not_mix_their_numbers():
    graphed = made(Again())
    for seed in range(2):
        graphed(*pair(seed, (64, 64)))
    wrong = []

    def work(first):
        for seed in range(first, first + 40):
            given = pair(seed, (64, 64))
            if not same(graphed(*given), summed(*given)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(1000 * at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_graphs_of_a_gpu_are_not_for_other_devices():
    assert not CudaRecorder().serves(torch.device("cpu"))


def test_the_first_cycles_of_leading_spaces_are_recorded_and_say_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(500, 128, generator=generator, dtype=torch.float64) / torch.arange(1, 129) for _ in range(6)]
    matrices = [torch.stack([one.T @ one, 2 * one.T @ one]) for one in rows]
    start = leading.leading_spaces(matrices[0], 16).vectors
    plain = [leading.leading_spaces(one, 16, start) for one in matrices]
    recorder = Again()
    monkeypatch.setattr(leading, "_CYCLES", made(recorder, leading._cycles))
    for one, wanted in zip(matrices, plain, strict=True):
        assert same(vars(leading.leading_spaces(one, 16, start)).values(), vars(wanted).values())
    assert (recorder.recorded, recorder.replayed) == (1, 4)
    # Without a start there are other cycles to do.
    assert bool(leading.leading_spaces(matrices[0], 16).settled.all())
    assert recorder.replayed == 4
