"""Memory: what one call adds to a process, measured by the kernel in a process of its own, and rows read only once.

The peak is the kernel's high-water mark of resident memory, set back just before the call. One thread and a fixed limit
above which blocks go straight back to the system keep the allocator's own habits out of the comparison of two sizes;
the test at full size leaves both as users have them.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import anisoscope as an

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
slow = pytest.mark.skipif(
    os.environ.get("ANISOSCOPE_SLOW") != "1", reason="minutes and 3 GB: ANISOSCOPE_SLOW=1 runs it"
)

MEGABYTE = 1_000_000
WIDTH = 768
ALL_FROM_MOMENTS = [
    "spectral_ratio",
    "spectral_ratio_l1",
    "stable_rank",
    "effective_rank",
    "effective_rank_lambda",
    "participation_ratio",
    "isoscore",
    "isoscore_star",
    "mean_cosine",
]
LIMIT = 600 * MEGABYTE
"""Above the interpreter with torch and anisoscope, for all of the above at once, whatever the number of rows."""

GROWTH = 30 * MEGABYTE
"""From some rows to twice as many: what the allocator may differ by. Kept pages of the file would be twice this."""

TILES = 64 * MEGABYTE
"""Allowance of the neighbour search, whatever the number of rows: a few tiles of 8 MB, pairs measured in float64 (8 MB
a block), the sample of 8,192 rows from which it plans, and scipy, which is loaded on the way."""

BLOCKS = 48 * MEGABYTE
"""Of a sketch, whatever the chunk: its buffer, a block of its rows in float64, and the small matrices of the two."""

HARNESS = """
import sys, numpy as np, torch
import anisoscope as an
from anisoscope.measures import table

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

def peak_of(call):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    call()
    print(status("VmHWM") - before)

table.measure_names()
"""


STEADY = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}


def peak(code, settings=STEADY):
    """Bytes that ``code`` adds at its peak in a fresh interpreter; it must call ``peak_of`` once."""
    done = subprocess.run(
        [sys.executable, "-c", HARNESS + code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def peaks(*codes):
    """The same for several at once, each a process of one thread."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(peak, codes))


def write_rows(path, rows, block_rows=20_000):
    """A float16 file of ``rows`` by 768, one random block over and over."""
    block = np.random.default_rng(0).standard_normal((block_rows, WIDTH), dtype=np.float32).astype(np.float16)
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(rows, WIDTH))
    for start in range(0, rows, block_rows):
        file[start : start + block_rows] = block[: rows - start]
    file.flush()


def measure_file(path, rows):
    return f"""
rows = np.load({str(path)!r}, mmap_mode="r")[:{rows}]
found = {{}}
peak_of(lambda: found.update(an.measure(rows, {ALL_FROM_MOMENTS!r})))
assert all(e.n == {rows} for e in found.values()), found
assert len(found) == {len(ALL_FROM_MOMENTS)}
"""


class TestOutOfCore:
    def test_memory_does_not_grow_with_the_file(self, tmp_path):
        """Twice as many rows leave as many of them for the error bars, so that nothing at all should differ."""
        write_rows(tmp_path / "rows.npy", 80_000)  # 123 MB
        half, whole = peaks(*(measure_file(tmp_path / "rows.npy", rows) for rows in (40_000, 80_000)))
        assert whole < LIMIT
        assert whole < half + GROWTH

    def test_a_stream_of_chunks_is_not_kept_either(self):
        """Eight chunks of 6 MB against twenty-four, from a generator that makes each anew."""
        few, many = peaks(
            *(
                f"""
block = np.random.default_rng(0).standard_normal((2048, {WIDTH}), dtype=np.float32)
chunks = (block + i for i in range({n}))
peak_of(lambda: an.measure(chunks, ["mean_cosine", "participation_ratio", "turning_angle"]))
"""
                for n in (8, 24)
            )
        )
        assert many < few + GROWTH

    @slow
    def test_full_size(self, tmp_path):
        """2,000,000 x 768 in float16 (3 GB) within 600 MB, with threads and allocator as they come."""
        path = Path(os.environ.get("ANISOSCOPE_SLOW_DIR", tmp_path)) / "rows.npy"
        write_rows(path, 2_000_000)
        start = time.perf_counter()
        added = peak(measure_file(path, 2_000_000), settings={})
        print(f"\npeak {added / MEGABYTE:.0f} MB above the interpreter, {time.perf_counter() - start:.0f} s")
        path.unlink()
        assert added < LIMIT


class TestInMemory:
    def test_two_nn(self):
        """White rows take the full product, a torus the one over leading axes."""
        white = "torch.randn(20_000, 256, generator=torch.Generator().manual_seed(0))"
        torus = "flat_torus(20_000, 4, width=256).float()"
        code = "from anisoscope.theory.manifolds import flat_torus\nrows = {}\npeak_of(lambda: an.two_nn(rows))"
        for added in peaks(code.format(white), code.format(torus)):
            assert added < 1.5 * 20_000 * 256 * 4 + TILES


class Once:
    """An iterable that can be read once, and counts what is read of it."""

    def __init__(self, chunks):
        self.chunks, self.started, self.read = chunks, 0, 0

    def __iter__(self):
        self.started += 1
        assert self.started == 1, "the rows were read a second time"
        for chunk in self.chunks:
            self.read += 1
            yield chunk


def test_all_measures_in_one_pass():
    """Moments, directions, order, sample and neighbours all come from one reading."""
    names = [*ALL_FROM_MOMENTS, "two_nn", "mle", "gride", "local_pca_dimension", "local_isotropy", "turning_angle"]
    rng = np.random.default_rng(0)
    rows, keep = rng.standard_normal((300, 6)) * [3.0, 2, 1, 1, 1, 0.5] + 1, rng.random(300) < 0.9
    stream, masks = Once(np.array_split(rows, 7)), Once(np.array_split(keep, 7))
    found = an.measure(stream, names, mask=masks)
    assert stream.read == masks.read == 7
    for name in names:
        assert found[name].value == pytest.approx(getattr(an, name)(rows, mask=keep).value, rel=1e-6)


def test_a_sketch_makes_no_second_chunk_in_float64():
    """A chunk of 20 million numbers would be 160 MB more in float64, also where only its mean is wanted."""
    code = "rows = torch.randn(10_000, 2048).bfloat16()\n"
    code += "start = an.Sketch.empty(32, 2048).update(rows[:100])\npeak_of(lambda: start.update(rows))"
    assert peak(code) < BLOCKS
