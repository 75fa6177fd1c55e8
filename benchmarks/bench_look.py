"""Parts of `make bench-gpu`: what a look of the monitor costs, and a training with and without the monitor."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import probe
import torch
from bench_gpu import DEVICE, Table, clock, seconds
from page import Line
from torch import nn

from anisoscope.capture.gradients import gradient_pass
from anisoscope.capture.losses import CausalLoss
from anisoscope.models.build import ModelSpec, build_model
from anisoscope.models.sites import discover, select
from anisoscope.monitor import Monitor
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.schedule import every
from anisoscope.text.frequency import TokenCounts
from anisoscope.train.data import TrainingData
from anisoscope.train.loop import TrainResult, train
from anisoscope.train.observers import Observer, Setting
from anisoscope.train.recipe import Recipe, parse_recipe
from anisoscope.watching.study import prepare_all
from anisoscope.watching.watcher import Watcher

T = TypeVar("T")

LOOKS = 12
STRETCH = 25  # updates that one of two trainings does before the other goes on

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
        ("sites", "D", "rows a site", "first", "then, median", "least", "its passes alone"),
        words="The first look starts proxies from nothing and, once on a machine, compiles kernels.",
    )
    for layers, width, vectors in ((8, 384, 16_384), (8, 384, 4096), (24, 2048, 16_384)):
        taken, passes = look_seconds(layers, width, vectors, LOOKS if width < 1024 else 4)
        median = statistics.median(taken[2:])
        row = (taken[0], median, min(taken[2:]), passes)
        table.add(f"{layers + 1}", f"{width:,}", f"{vectors:,}", *map(seconds, row))
        what = f"a look, {layers + 1} sites of width {width:,}, {vectors:,} rows a site"
        table.lines.append(Line(what, median, limit="its forward and backward pass", least=passes))
    return [table]


def look_seconds(layers: int, width: int, vectors: int, looks: int) -> tuple[list[float], float]:
    """Seconds of each look, and of the passes over the probe that each of them takes, alone."""
    model = learned(layers, width)
    monitor = watched(layers, width, vectors, model)
    found = []
    for step in range(looks):
        monitor.step(step)
        found.append(float(monitor.last.info["seconds"]))
    monitor.close()
    ids, sites = probe.zipf_ids(16_384).view(-1, probe.LENGTH).to(DEVICE), select(discover(model), "resid.*")

    def passes() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            gradient_pass(model, probe.batch_of(ids), sites, CausalLoss())

    return found, clock(passes, 5)


def learned(layers: int, width: int) -> nn.Module:
    """A small model that has learned a little."""
    spec = ModelSpec(architecture="gpt2", layers=layers, width=width, heads=width // 64,
                     vocab_size=probe.VOCABULARY, context=probe.LENGTH, causal=True)  # fmt: skip
    model = build_model(spec, 0).to(DEVICE)
    probe.trained(model, torch.device(DEVICE), 20)
    return model


def watched(layers: int, width: int, vectors: int, model: nn.Module | None = None) -> Monitor:
    """A monitor of such a model, due at every step."""
    ids = probe.zipf_ids(16_384).view(-1, probe.LENGTH)
    counts = TokenCounts.of(probe.zipf_ids(2_000_000, 9), probe.VOCABULARY).update(ids)
    return Monitor(
        model or learned(layers, width), probe=[probe.batch_of(ids)], schedule=every(1), loss=CausalLoss(),
        sites="resid.*", vectors=vectors, analyses={"tangent": TangentAnalysis(counts=counts, referee="never")},
        autocast=torch.bfloat16, strict=True,
    )  # fmt: skip


def overhead(steps: int = 3000) -> list[Table]:
    """The same training without the monitor and with it as a recipe has it by default, 16 looks, stretch by stretch.

    Clocks of a device drift by more than the monitor costs: two trainings one after another would tell of the drift.
    """
    recipe = parse_recipe(RECIPE.replace("STEPS", str(steps)))
    assert recipe.monitor is not None and steps % STRETCH == 0  # the default; and no step that no clock sees
    data = next(iter(prepare_all(recipe).values()))
    table = Table(
        f"A training with and without the monitor, {steps:,} updates of 16,384 tokens in bfloat16",
        ("", "weights", "seconds", "a step, median", "peak memory", "looks", "a look, median", "seconds in looks"),
    )
    _trained(recipe, data, [], until=20)  # libraries of the device start once, and in neither of the two
    kernels = tempfile.TemporaryDirectory()
    os.environ["TRITON_CACHE_DIR"] = kernels.name  # where there are none yet: what they cost once is told apart
    fresh = float(subprocess.check_output([sys.executable, __file__], text=True).splitlines()[-1])
    baton = _Baton()
    timers = [_Timer(baton, number) for number in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        plain = threads.submit(baton.held, lambda: _trained(recipe, data, [timers[0]]))
        seen = threads.submit(baton.held, lambda: _watched(recipe, data, timers[1]))
        ended, looks = plain.result(), seen.result()
    peaks = []
    for act in (lambda: _trained(recipe, data, [], until=60), lambda: _watched(recipe, data, None, until=60)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        act()
        peaks.append(torch.cuda.max_memory_allocated())
    look, (step, watched_step) = statistics.median(looks), (statistics.median(timer.steps) for timer in timers)
    for name, timer, peak, told in (("without", timers[0], peaks[0], []), ("with", timers[1], peaks[1], looks)):
        table.add(
            name, f"{ended.parameters / 1e6:.0f} M", f"{timer.whole:.1f}", seconds(statistics.median(timer.steps)),
            f"{peak / 1e9:.2f} GB", str(len(told)), seconds(look) if told else "", f"{sum(told):.1f}",
        )  # fmt: skip
    table.words = (
        f"Both go on in turn, {STRETCH} updates each, the device waited for at every change. With the monitor the "
        f"training takes {timers[1].whole / timers[0].whole - 1:+.2%} longer, all of its looks counted, the first of "
        f"which, before the first step, took {seconds(looks[0])}; steps without a look "
        f"{watched_step / step - 1:+.2%}; peak memory, each alone for 60 updates, is {peaks[1] / peaks[0] - 1:+.1%}. "
        f"A look of {seconds(look)} is {look / step:.1f} steps. Not counted: kernels are compiled once on a machine; "
        f"where none of them was, the first look of a process took {seconds(fresh)}."
    )
    table.lines.append(
        Line(f"a training watched by default, {steps:,} updates", timers[1].whole, limit="unwatched",
             least=timers[0].whole)
    )  # fmt: skip
    return [table]


def _trained(recipe: Recipe, data: TrainingData, observers: list[Observer], until: int | None = None) -> TrainResult:
    with tempfile.TemporaryDirectory() as place:
        return train(recipe, "decoder", 0, folder=Path(place) / "cell", observers=observers, data=data, until=until)


def _watched(recipe: Recipe, data: TrainingData, timer: _Timer | None, until: int | None = None) -> list[float]:
    """Seconds of each look of such a training."""
    assert recipe.monitor is not None
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        with RunWriter.create(run, recipe=recipe.describe()) as writer:
            watcher = Watcher(recipe.monitor, writer, "decoder")
            around = [watcher] if timer is None else [_First(timer), watcher, timer]
            _trained(recipe, data, around, until)
        with RunReader(run) as reader:
            return [float(one.info["seconds"]) for one in reader.probes()]


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


class _Baton:
    """Held by one of two trainings at a time: the first, the second twice, the first twice, and so on."""

    def __init__(self) -> None:
        self._turn, self._alone, self._changed = 0, False, threading.Condition()

    def take(self, who: int) -> None:
        """Wait for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._alone or (self._turn + 1) // 2 % 2 == who)

    def give(self) -> None:
        """To whose turn it is."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def held(self, act: Callable[[], T]) -> T:
        """What a training gives. Whoever ends, well or not, leaves the baton to the other for good."""
        try:
            return act()
        finally:
            with self._changed:
                self._alone = True
                self._changed.notify_all()


class _Timer:
    """An observer that notes how long a training and its steps took while it held the baton."""

    def __init__(self, baton: _Baton, who: int) -> None:
        self.steps: list[float] = []
        self.whole = 0.0
        self._baton, self._who, self._since, self._began = baton, who, 0.0, 0.0

    def attach(self, setting: Setting) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the clock, once."""
        if not self._since:
            self._take()

    def _take(self) -> None:
        self._baton.take(self._who)
        self._since = time.perf_counter()

    def before_step(self, step: int) -> None:
        self._began = time.perf_counter()

    def after_backward(self, step: int) -> None:
        pass

    def after_step(self, step: int, loss: float, tokens: int) -> None:
        self.steps.append(time.perf_counter() - self._began)
        if step % STRETCH == 0:
            torch.cuda.synchronize()
            self.whole += time.perf_counter() - self._since
            self._baton.give()
            self._take()

    def close(self) -> None:
        pass


class _First:
    """Starts a timer's clock. It stands before the watcher, whose first look comes before the first step."""

    def __init__(self, timer: _Timer) -> None:
        self._timer = timer

    def attach(self, setting: Setting) -> None:
        self._timer.begin()

    def before_step(self, step: int) -> None:
        pass

    def after_backward(self, step: int) -> None:
        pass

    def after_step(self, step: int, loss: float, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    print(first_look())
