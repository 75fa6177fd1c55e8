"""The sampler of benchmarks/shares.py: work of known kind is found as that kind. What commands ask of their process:
less collecting of garbage, memory that is kept, threads that sleep while they wait."""

import ctypes
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from shares_cases import WORK, load

from anisoscope.commands import common
from anisoscope.commands.common import (
    ALLOCATOR_WISHES,
    COLLECT_AFTER,
    FEW_CORES,
    SPINS,
    WAITING_WISHES,
    collect_less,
    wait_asleep,
)


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, str(Path(__file__).parent / "shares_cases.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("work", [*WORK, "waiting"])
def test_work_of_a_kind_is_found_as_that_kind(found, work):
    assert found[work] > 0.6, found  # nearly all of it; a busy machine puts pauses anywhere


def test_the_name_of_a_call_is_read_off_the_source():
    shares = load()

    def some(x):
        y = x.abs().matmul(
            x,
        )
        return torch.linalg.eigvalsh(y) + y @ y

    names = {shares.called(some.__code__, at) for at in shares.instructions(some.__code__)}
    assert {"abs", "matmul", "eigvalsh", "@", "op"} <= names


def test_a_sample_counts_as_what_was_under_way_and_not_as_what_came_after():
    shares, kept = load(), []

    def product(a):
        kept.append(sys._getframe())
        return a @ a

    thread = threading.Thread(target=product, args=(torch.eye(2),))  # a stack of its own: no imports below it
    thread.start()
    thread.join()
    (frame,) = kept
    (at,) = [at for at in shares.instructions(frame.f_code) if shares.called(frame.f_code, at) == "@"]
    assert shares.classify(frame, at)[0] == shares.BLAS
    assert shares.classify(frame, frame.f_lasti)[0] == shares.PYTHON, "it has come to its return by now"


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


FAULTS = """
import ctypes, resource, sys
from anisoscope.commands.common import keep_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes, library.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
SIZE = 30 << 20

def some():
    blocks = [library.malloc(SIZE) for _ in range(4)]
    for block in blocks:
        library.memset(block, 1, SIZE)
    for block in blocks:
        library.free(block)

taken = keep_memory() if sys.argv[1] == "kept" else None
some()  # so that the allocator has found its own best size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    some()
print(taken, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_are_small():
    """Whether the C library knows the wish, and memory comes in pages of 4 KiB unless somebody asks for larger ones."""
    large = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    known = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")
    return known and os.sysconf("SC_PAGESIZE") == 4096 and not (large.exists() and "[always]" in large.read_text())


@pytest.mark.skipif(not faults_are_small(), reason="needs glibc and pages of 4 KiB")
def test_commands_keep_memory_that_they_will_want_again():
    def faults(*words, **more):
        environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_WISHES} | more
        command = [sys.executable, "-c", FAULTS, *words]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
        taken, count = done.stdout.split()
        return taken, int(count)

    (taken, kept), (_, plain) = faults("kept"), faults("plain")
    assert taken == "True"
    assert kept < 40_000 < 400_000 < plain, "120 MB are 30,000 pages, and come once and not twenty times"
    assert faults("kept", GLIBC_TUNABLES="glibc.malloc.arena_max=4")[0] == "False", "somebody has a wish already"


def gnu_openmp_is_here():
    """Whether the OpenMP library that torch has loaded is that of GNU."""
    loaded = Path("/proc/self/maps")
    return loaded.exists() and "libgomp" in loaded.read_text()


WAITS = """
import sys
if sys.argv[1] == "late":
    import torch
from anisoscope.commands import common
common.cores = lambda: int(sys.argv[2])
if sys.argv[3:]:
    from anisoscope.cli import app
    app(sys.argv[3:], standalone_mode=False)
else:
    common.long_work()
    import torch
"""
needs_gnu_openmp = pytest.mark.skipif(not gnu_openmp_is_here(), reason="torch came with another OpenMP library")


def gnu_openmp(*words, check=True, **more):
    """What the OpenMP library of GNU says of its turns when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING_WISHES}
    command = [sys.executable, "-c", WAITS, *words]
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **more}
    done = subprocess.run(command, env=environment, check=check, capture_output=True, text=True, timeout=300)
    return re.findall("GOMP_SPINCOUNT = '([0-9]+)'", done.stderr)


@needs_gnu_openmp
def test_threads_of_commands_that_wait_for_one_another_sleep_soon():
    """Beside other processes they would keep from the processor what they wait for."""
    plain, early = gnu_openmp("late", "2"), gnu_openmp("early", "2")
    assert early == [str(SPINS)] and int(plain[0]) > 10 * SPINS
    assert gnu_openmp("early", str(FEW_CORES + 1)) == plain, "others find a core of their own"
    for name, wish in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")):
        assert gnu_openmp("early", "2", **{name: wish}) == gnu_openmp("late", "2", **{name: wish}) != early


@needs_gnu_openmp
@pytest.mark.parametrize("words", [["measure", "rows.npy", "mean_cosine"], ["truth", "--rows", "512"]])
def test_commands_that_measure_ask_for_it_before_torch_is_loaded(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.eye(8, dtype=np.float32))
    assert gnu_openmp("early", "2", *words, check=False) == [str(SPINS)]


def test_what_torch_has_read_already_is_not_wished_for(monkeypatch):
    """Nothing would come of it here, and processes begun from here would get what nobody asked for."""
    monkeypatch.setattr(common, "cores", lambda: 2)
    for name in WAITING_WISHES:
        monkeypatch.delenv(name, raising=False)
    assert "torch" in sys.modules and not wait_asleep()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_package_is_compiled_before_its_imports_are_timed(tmp_path, monkeypatch):
    source = tmp_path / "anisoscope" / "part.py"
    source.parent.mkdir()
    (source.parent / "__init__.py").touch()
    source.write_text("ONE = 1\n")
    place = importlib.util.spec_from_file_location("anisoscope", source.parent / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: place)
    load().compile_package()
    assert Path(importlib.util.cache_from_source(str(source))).exists()
