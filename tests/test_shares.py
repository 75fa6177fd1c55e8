"""The sampler of benchmarks/shares.py: work of known kind is found as that kind. Commands collect garbage less."""

import gc
import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from anisoscope.commands.common import COLLECT_AFTER, collect_less
from anisoscope.measures.neighbors import nearest_neighbors

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "shares.py"
SECONDS = 0.4


@pytest.fixture(scope="module")
def shares():
    spec = importlib.util.spec_from_file_location("shares", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["shares"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["shares"]


def product(a, network):
    return a @ a


def decomposition(a, network):
    return torch.linalg.eigh(a)


def elementwise(a, network):
    return a.sin().exp().add_(1)


def passes(a, network):
    network(a).sum().backward()


def search(a, network):
    return nearest_neighbors(a, 2)


def plain_python(a, network):
    return sum(i * i for i in range(20_000))


KINDS = {
    product: "BLAS",
    decomposition: "BLAS",
    elementwise: "TENSORS",
    passes: "MODEL",
    search: "NEIGHBORS",
    plain_python: "PYTHON",
}


@pytest.mark.parametrize("work", KINDS, ids=lambda work: work.__name__)
def test_work_of_a_kind_is_found_as_that_kind(shares, work):
    a = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    a = a + a.T
    network = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Tanh(), torch.nn.Linear(400, 400))
    over = time.perf_counter() + SECONDS
    watch = shares.Watch(processor=False)

    def go():
        while time.perf_counter() < over:
            work(a, network)

    with watch.watching():
        thread = threading.Thread(target=go)  # not the main thread, whose stack is full of pytest's imports
        thread.start()
        thread.join()
    kinds = dict.fromkeys((getattr(shares, name) for name in KINDS.values()), 0.0)
    for (kind, _, _), seconds in watch.seconds.items():
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    wanted = getattr(shares, KINDS[work])
    assert kinds[wanted] > 0.8 * sum(kinds.values()), kinds
    assert 0.8 * SECONDS < sum(kinds.values()) < 10 * SECONDS


def test_threads_share_an_interval_and_waiting_is_told(shares):
    watch = shares.Watch(processor=False)
    with watch.watching():
        threading.Event().wait(0.2)
    assert max(watch.seconds, key=watch.seconds.get)[0] == shares.WAITING


def test_the_name_of_a_call_is_read_off_the_source(shares):
    def some(x):
        y = x.abs().matmul(
            x,
        )
        return torch.linalg.eigvalsh(y) + y @ y

    names = {shares.called(some.__code__, at) for at in shares.instructions(some.__code__)}
    assert {"abs", "matmul", "eigvalsh", "@", "op"} <= names


def test_commands_collect_garbage_less_often_unless_it_was_switched_off():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 7)
        collect_less()
        assert gc.get_threshold() == (COLLECT_AFTER, 10, 7)
        for wish in (0, 10 * COLLECT_AFTER):
            gc.set_threshold(wish, 10, 10)
            collect_less()
            assert gc.get_threshold()[0] == wish
    finally:
        gc.set_threshold(*before)
