"""What Triton does once in a process can be begun early: once, without a device touched, and waited for."""

import subprocess
import sys
import threading

import pytest
import torch

from anisoscope.kernels import early
from anisoscope.watching import watcher


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(early, "_begun", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(early.importlib.util, "find_spec", lambda name: name)


def test_it_is_begun_once_and_waited_for(fresh, monkeypatch):
    gate, done = threading.Event(), []

    def slow():
        gate.wait(10)
        done.append(threading.current_thread().daemon)

    monkeypatch.setattr(early, "_get_ready", slow)
    early.begin_early()
    early.begin_early()
    assert len(early._begun) == 1 and not done
    gate.set()
    early.await_early()
    assert done == [True], "a process that ends does not wait for it"


@pytest.mark.parametrize("missing", ["device", "triton"])
def test_nothing_is_begun_where_no_kernel_runs(fresh, monkeypatch, missing):
    if missing == "device":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        monkeypatch.setattr(early.importlib.util, "find_spec", lambda name: None)
    early.begin_early()
    early.await_early()
    assert not early._begun


def test_a_watcher_begins_it(monkeypatch):
    begun = []
    monkeypatch.setattr(watcher, "begin_early", lambda: begun.append(True))
    watcher.Watcher(watcher.MonitorSpec())
    assert begun


def test_all_that_a_first_launch_reads_is_read():
    """In a process of its own: kernels are imported, the key is known, and CUDA was never started."""
    pytest.importorskip("triton")
    code = """
import sys, torch
from anisoscope.kernels import early
early._get_ready()
import triton.runtime.cache as cache
kernels = {"band", "codes", "controls", "factors", "grams", "jacobi", "nearest", "pairs", "residues", "rows", "visits"}
assert {f"anisoscope.kernels.{one}" for one in kernels} <= set(sys.modules)
assert cache.triton_key.cache_info().currsize == 1
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
