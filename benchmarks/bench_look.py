"""Parts of `make bench-gpu`: what a look of the monitor costs, and a training with and without the monitor."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import probe
import torch
from bench_gpu import DEVICE, Table, seconds

from anisoscope.capture.losses import CausalLoss
from anisoscope.models.build import ModelSpec, build_model
from anisoscope.monitor import Monitor
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.schedule import every
from anisoscope.text.frequency import TokenCounts
from anisoscope.train.loop import train
from anisoscope.train.observers import Setting
from anisoscope.train.recipe import parse_recipe
from anisoscope.watching.study import prepare_all
from anisoscope.watching.watcher import Watcher

LOOKS = 12

RECIPE = """
name: overhead
data: {tokenizer: {kind: bpe, vocab_size: 8000}, sequence_length: 256}
models: [{name: decoder, architecture: gpt2, objective: causal, layers: 12, width: 896, heads: 14}]
optimisation: {steps: STEPS, batch_size: 64, lr: 0.0003, warmup_steps: 50}
evaluation: {every: 100000, sequences: 64}
dtype: bfloat16
"""


def look() -> list[Table]:
    """Looks at fixed weights: all sites, default measures, two proxies, 199 controls."""
    table = Table(
        "One look of the monitor at 16,384 tokens: default measures, two proxies of rank 16, 199 controls",
        ("sites", "D", "rows a site", "first", "then, median", "least"),
        words="The first look starts proxies from nothing and, once on a machine, compiles kernels.",
    )
    for layers, width, vectors in ((8, 384, 16_384), (8, 384, 4096), (24, 2048, 16_384)):
        taken = look_seconds(layers, width, vectors, LOOKS if width < 1024 else 4)
        row = (taken[0], statistics.median(taken[2:]), min(taken[2:]))
        table.add(f"{layers + 1}", f"{width:,}", f"{vectors:,}", *map(seconds, row))
    return [table]


def look_seconds(layers: int, width: int, vectors: int, looks: int) -> list[float]:
    """Seconds of each look."""
    spec = ModelSpec(architecture="gpt2", layers=layers, width=width, heads=width // 64,
                     vocab_size=probe.VOCABULARY, context=probe.LENGTH, causal=True)  # fmt: skip
    model = build_model(spec, 0).to(DEVICE)
    probe.trained(model, torch.device(DEVICE), 20)
    ids = probe.zipf_ids(16_384).view(-1, probe.LENGTH)
    counts = TokenCounts.of(probe.zipf_ids(2_000_000, 9), probe.VOCABULARY).update(ids)
    monitor = Monitor(
        model, probe=[probe.batch_of(ids)], schedule=every(1), loss=CausalLoss(), sites="resid.*", vectors=vectors,
        analyses={"tangent": TangentAnalysis(counts=counts, referee="never")}, autocast=torch.bfloat16, strict=True,
    )  # fmt: skip
    found = []
    for step in range(looks):
        monitor.step(step)
        found.append(float(monitor.last.info["seconds"]))
    monitor.close()
    return found


def overhead(steps: int = 3000) -> list[Table]:
    """The same training twice, without the monitor and with it as a recipe has it by default: 16 looks."""
    recipe = parse_recipe(RECIPE.replace("STEPS", str(steps)))
    assert recipe.monitor is not None  # the default
    data = next(iter(prepare_all(recipe).values()))
    table = Table(
        f"A training with and without the monitor, {steps:,} updates of 16,384 tokens in bfloat16",
        ("", "weights", "seconds", "a step, median", "peak memory", "looks", "a look, median", "seconds in looks"),
    )
    found = []
    with tempfile.TemporaryDirectory() as place:  # libraries of the device start once, and in neither of the two
        train(recipe, "decoder", 0, folder=Path(place) / "cell", data=data, until=20)
    kernels = tempfile.TemporaryDirectory()
    os.environ["TRITON_CACHE_DIR"] = kernels.name  # where there are none yet: what they cost once is told apart
    fresh = float(subprocess.check_output([sys.executable, __file__], text=True).splitlines()[-1])
    for watched in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        timer, looks = _Timer(), [0.0]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "cell"
            if watched:
                run = Path(place) / "run"
                with RunWriter.create(run, recipe=recipe.describe()) as writer:
                    watcher = Watcher(recipe.monitor, writer, "decoder")
                    ended = train(
                        recipe, "decoder", 0, folder=folder, observers=[_Start(timer), watcher, timer], data=data
                    )
                with RunReader(run) as reader:
                    looks = [float(one.info["seconds"]) for one in reader.probes()]
            else:
                ended = train(recipe, "decoder", 0, folder=folder, observers=[_Start(timer), timer], data=data)
        step, look, peak = statistics.median(timer.steps), statistics.median(looks), torch.cuda.max_memory_allocated()
        found.append((step, look, peak, timer.whole))
        count = str(len(looks)) if watched else "0"
        table.add("with" if watched else "without", f"{ended.parameters / 1e6:.0f} M", f"{timer.whole:.1f}",
                  seconds(step), f"{peak / 1e9:.2f} GB", count, seconds(look), f"{sum(looks):.1f}")  # fmt: skip
    (step, _, peak, alone), (watched_step, look, watched_peak, watched) = found
    table.words = (
        f"Up to the last step the training takes {watched / alone - 1:+.2%} longer with the monitor, all of its looks "
        f"counted, the first of which, before the first step, took {seconds(looks[0])}; steps without a look "
        f"{watched_step / step - 1:+.2%}; peak memory is {watched_peak / peak - 1:+.1%}. A look of {seconds(look)} is "
        f"{look / step:.1f} steps. Not counted: kernels are compiled once on a machine; where none of them was, the "
        f"first look of a process took {seconds(fresh)}."
    )
    return [table]


def first_look() -> float:
    """Seconds of the first look of a process at the model of ``overhead``."""
    recipe = parse_recipe(RECIPE.replace("STEPS", "60"))
    assert recipe.monitor is not None
    data = next(iter(prepare_all(recipe).values()))
    with tempfile.TemporaryDirectory() as place:
        watcher = Watcher(recipe.monitor)
        train(recipe, "decoder", 0, folder=Path(place) / "cell", observers=[watcher], data=data, until=1)
        assert watcher.monitor is not None
        return float(watcher.monitor.last.info["seconds_in_looks"]) - float(watcher.monitor.last.info["seconds"])


class _Timer:
    """An observer that notes how long steps took, from the first to the last thing that happens in them."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._first = self._began = self._ended = 0.0

    @property
    def whole(self) -> float:
        """Seconds from the start of the clock to the last step, looks and all."""
        return self._ended - self._first

    def start(self) -> None:
        """Start the clock."""
        self._first = time.perf_counter()

    def before_step(self, step: int) -> None:
        self._began = time.perf_counter()

    def after_backward(self, step: int) -> None:
        pass

    def after_step(self, step: int, loss: float, tokens: int) -> None:
        self._ended = time.perf_counter()
        self.steps.append(self._ended - self._began)

    def close(self) -> None:
        pass


class _Start(_Timer):
    """Starts the clock of a timer. It stands before the watcher, whose first look comes before the first step."""

    def __init__(self, timer: _Timer) -> None:
        super().__init__()
        self._timer = timer

    def attach(self, setting: Setting) -> None:
        self._timer.start()


if __name__ == "__main__":
    print(first_look())
