"""The monitor as an observer of a training: looks at the beginning, by schedule and at the end, and stores them."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.capture.rows import measured_mask
from anisoscope.errors import OptionError, TooFewRowsError, TooFewTokensError
from anisoscope.estimate import Estimate
from anisoscope.kernels.early import begin_early
from anisoscope.monitor import Monitor
from anisoscope.monitoring.views import Name
from anisoscope.runs.files import explained, replacing
from anisoscope.runs.records import Curve
from anisoscope.runs.store import RunWriter
from anisoscope.schedule import Last
from anisoscope.text.batches import Batch
from anisoscope.text.frequency import frequency_bins
from anisoscope.train.data import TrainingData
from anisoscope.train.metrics import METRICS, read_metrics
from anisoscope.train.observers import Setting
from anisoscope.train.recipe import VariantSpec
from anisoscope.train.watch import MonitorSpec, TangentSpec
from anisoscope.watching.binned import FrequencyLosses
from anisoscope.watching.schedules import schedule_of

if TYPE_CHECKING:
    from anisoscope.monitoring.quality import TokenAccuracy

TANGENT, QUALITY = "tangent", "quality"
KEPT_TIMES = 4096  # updates whose time is remembered: a long training must not grow by them
STATES = "watching"
"""The folder of what analyses remember from look to look, so that a resumed run goes on as if nothing had happened."""
SUFFIX = ".safetensors"
SHOWN = (("dim", "two_nn"), ("aniso", "spectral_ratio"), ("cos", "mean_cosine"))
"""What a line of progress tells of a layer, and how it is called there."""


class Watcher:
    """Watches one training of a recipe, as ``monitor:`` in it says. Give it to ``train`` among its observers.

    ``run`` is the store that looks go to, under ``cell``; None keeps only the last one in memory. Looks that the store
    holds already, in a run that goes on, are not taken again.
    """

    def __init__(
        self, spec: MonitorSpec, run: RunWriter | None = None, cell: str = "", *, strict: bool = False
    ) -> None:
        begin_early()  # while the model is built
        self.spec, self.run, self.cell, self.strict = spec, run, cell, strict
        self.monitor: Monitor | None = None
        self._losses: dict[int, float] = {}
        self._analyses: dict[str, Any] = {}
        self._accuracy: TokenAccuracy | None = None
        self._by_frequency: FrequencyLosses | None = None
        self._looked: list[int] = []
        self._middle = self._ratio = ""
        self._took, self._began = deque[tuple[float, float]](maxlen=KEPT_TIMES), (0.0, 0.0)
        # Stored with every look by reference: what stands in it at that moment is what the look says.
        self._pace: dict[str, float] = {}

    def attach(self, setting: Setting) -> None:
        """Build the monitor; look before the first step. What cannot be looked at raises here."""
        self.monitor = self.build(setting)
        if setting.step == 0:
            self.monitor.look(0, 0)

    def build(self, setting: Setting) -> Monitor:
        """The monitor of a training, which says what it cannot look at."""
        plan = setting.recipe.optimisation
        self._batch_tokens = plan.batch_size * setting.recipe.data.sequence_length
        self._looked = sorted(step for cell, step in (self.run.done() if self.run else ()) if cell == self.cell)
        self._middle = f"resid.{setting.variant.layers // 2}"
        self._folder, self._analyses = setting.folder / STATES, self._make_analyses(setting)
        self._losses = _losses_so_far(setting.folder, setting.step)
        self._device = setting.device
        self._remember()
        before = Last(self._looked[-1], self._looked[-1] * self._batch_tokens) if self._looked else None
        probe = probe_of(setting.data, self.spec, plan.batch_size // plan.accumulation)
        if setting.data.frequency is not None:
            bins = frequency_bins(setting.data.counts, (self.spec.tangent or TangentSpec()).bins)
            self._by_frequency = FrequencyLosses(setting.model, probe, loss_of(setting.variant, setting.data), bins)
        try:
            return self._monitor(setting, probe, before)
        except (TooFewRowsError, TooFewTokensError) as error:
            raise type(error)(f"{error}: {_what_to_raise(setting, self.spec, probe)}") from None

    def _monitor(self, setting: Setting, probe: list[Batch], before: Last | None) -> Monitor:
        plan = setting.recipe.optimisation
        monitor = Monitor(
            setting.model,
            probe=probe,
            schedule=schedule_of(self.spec.schedule, plan.steps, before),
            run=self.run,
            cell=self.cell,
            sites=self.spec.sites,
            measures=self.spec.measures,
            slices=self.spec.slices,
            gradient_measures=self.spec.gradient_measures,
            gradients=self.spec.gradients,
            analyses=self._analyses,
            loss=loss_of(setting.variant, setting.data),
            optimizer=setting.optimiser,
            vectors=self.spec.vectors,
            autocast=torch.bfloat16 if setting.recipe.dtype == "bfloat16" else None,
            seed=setting.seed,
            strict=self.strict,
            info=_info(setting, self._pace),
            of_model=self._at_look,
        )
        self._check_quality(monitor)
        return monitor

    def _check_quality(self, monitor: Monitor) -> None:
        quality, looked = self._analyses.get(QUALITY), monitor.describe()["sites"]
        if quality is not None and not any(map(quality.wants, looked)):
            raise OptionError(
                f"monitor.quality.sites: probes at {', '.join(quality.sites)}, and the monitor looks at none of "
                f"them but at {', '.join(looked)}; name some of these"
            )

    def before_step(self, step: int) -> None:
        """An update is about to begin; where its change of the weights is wanted they are copied now."""
        assert self.monitor is not None  # attached
        self.monitor.before_step(step, step * self._batch_tokens)
        self._began = time.perf_counter(), time.process_time()

    def after_backward(self, step: int) -> None:
        """Nothing: a look has a backward pass of its own."""

    def after_step(self, step: int, loss: float, tokens: int) -> None:
        """Look if a look is due."""
        assert self.monitor is not None
        wall, processor = self._began  # of the update alone: no look is in it
        self._took.append((time.perf_counter() - wall, time.process_time() - processor))
        self._losses[step] = loss
        self.monitor.step(step, tokens)

    def close(self) -> None:
        """The training is over, however it ended."""
        if self.monitor is not None:
            self.monitor.close()

    @property
    def problems(self) -> Sequence[str]:
        """What went wrong in looks, one line each."""
        return () if self.monitor is None else tuple(self.monitor.problems)

    @property
    def looks(self) -> int:
        """How many looks there were, those before a run was resumed among them."""
        return len(self._looked)

    def geometry(self) -> str:
        """The last look at the middle layer in a few words: ``dim 9.1 · aniso 0.21 · ratio 2.3``."""
        if self.monitor is None:
            return ""
        asked = [*SHOWN[:2], ("ratio", self._ratio)] if self._ratio else SHOWN
        found = [(label, self.monitor.latest(name, self._middle)) for label, name in asked if name]
        return " · ".join(f"{label} {one.value:.3g}" for label, one in found if one is not None)

    def _make_analyses(self, setting: Setting) -> dict[str, Any]:
        return self._tangents(setting) | self._qualities(setting)

    def _tangents(self, setting: Setting) -> dict[str, Any]:
        options = self.spec.tangent
        if options is None:
            return {}
        # Here, not above: a training that nobody asks about tangents need not know of them.
        from anisoscope.monitoring.tangents import TangentAnalysis

        self._ratio = f"{options.proxies[0]}.{options.gradients[0]}.ratio"
        steps, seed = setting.recipe.optimisation.steps, setting.seed
        made = TangentAnalysis(counts=setting.data.counts, steps=steps, seed=seed, **options.model_dump())
        made.check({self._middle: setting.variant.width})
        return {TANGENT: made}

    def _qualities(self, setting: Setting) -> dict[str, Any]:
        options = self.spec.quality
        if options is None:
            return {}
        from anisoscope.monitoring.quality import QualityAnalysis, TokenAccuracy

        plan, loss = setting.recipe.optimisation, loss_of(setting.variant, setting.data)
        batches = probe_of(setting.data, self.spec, plan.batch_size // plan.accumulation)
        asked = options.model_dump()
        asked["sites"] = asked["sites"] or (self._middle, f"resid.{setting.variant.layers}")
        self._accuracy = TokenAccuracy(setting.model, batches, loss)
        hidden = setting.variant.objective != "causal"
        return {QUALITY: QualityAnalysis(batches, setting.data.tokenizer, hidden=hidden, **asked)}

    def _at_look(self, step: int) -> dict[Name, Estimate | Curve | Exception]:
        """At the end of a look: the training loss since the one before, and what analyses want to remember."""
        since = self._looked[-1] if self._looked else 0
        losses = [loss for at, loss in self._losses.items() if since < at <= step]
        self._losses = {at: loss for at, loss in self._losses.items() if at > step}
        self._looked.append(step)
        if self._took:
            wall, processor = zip(*self._took, strict=True)
            # A busy machine stretches some updates: a median by the clock. The processor's time it does not, so that a
            # mean can also tell what is done only now and then.
            self._pace["median_seconds"] = statistics.median(wall)
            self._pace["processor_seconds"] = statistics.fmean(processor)
        self._write_states(step)
        found: dict[Name, Estimate | Curve | Exception] = {}
        tellers: tuple[tuple[str, Callable[[], Mapping[Name, Estimate | Curve]] | None], ...] = (
            ("quality.accuracy", self._accuracy),
            ("loss by frequency", self._by_frequency),
        )
        for name, tell in tellers:
            try:
                found |= {} if tell is None else tell()
            except Exception as error:  # out of memory, perhaps: told, and the rest of the look is kept
                found[name] = error
        if not losses:
            return found
        notes = ("no error bar: losses of consecutive updates", f"over {len(losses):,} updates")
        value = math.fsum(losses) / len(losses)
        found["train_loss"] = Estimate(value=value, stderr=None, n=len(losses), method="mean loss", notes=notes)
        return found

    def _write_states(self, step: int) -> None:
        """Before the look is stored: whatever happens in between, there is a state for the last stored look."""
        from safetensors.torch import save

        if self.run is None or not self._analyses:
            return
        states = {f"{name}:{key}": value for name, one in self._analyses.items() for key, value in one.state().items()}
        # The next look starts from what is written, here as in a run that was stopped: not a bit can differ.
        self._restore(states)
        with explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / f"{step}{SUFFIX}") as file:
                file.write(save(states))
            for old in _states_in(self._folder)[:-2]:
                (self._folder / f"{old}{SUFFIX}").unlink(missing_ok=True)

    def _remember(self) -> None:
        """Give analyses back what they knew after the last stored look."""
        from safetensors.torch import load_file

        known = [step for step in _states_in(self._folder) if self._looked and step <= self._looked[-1]]
        if not known or not self._analyses:
            return
        with explained(self._folder, reading=True):
            states = load_file(self._folder / f"{known[-1]}{SUFFIX}")
        self._restore(states)

    def _restore(self, states: Mapping[str, Tensor]) -> None:
        for name, one in self._analyses.items():
            # Copies lie in memory as results of a computation do; views into a file do not, and sums differ by a bit.
            own = {key.partition(":")[2]: value.clone() for key, value in states.items() if key.startswith(f"{name}:")}
            one.restore(own, self._device)


def probe_of(data: TrainingData, spec: MonitorSpec, rows: int) -> list[Batch]:
    """The held-out windows of every look, cut into batches that a training pass would have room for."""
    whole = data.probe(spec.sequences)
    parts = [getattr(whole, name).split(rows) for name in ("ids", "mask", "special", "positions")]
    return [Batch(*part) for part in zip(*parts, strict=True)]


def _what_to_raise(setting: Setting, spec: MonitorSpec, probe: Sequence[Batch]) -> str:
    """What in the recipe gives a larger probe."""
    if sum(int(measured_mask(batch).sum()) for batch in probe) > spec.vectors:
        return f"raise monitor.vectors, which is {spec.vectors:,}"
    have = len(setting.data.held_out)
    if spec.sequences < have:
        return f"raise monitor.sequences, which is {spec.sequences:,}; {have:,} are held out"
    return f"only {have:,} sequences are held out; raise data.held_out or data.max_chars, or give more text"


def loss_of(variant: VariantSpec, data: TrainingData) -> CausalLoss | MaskedLoss:
    """The loss that the variant is trained with, which its class does not always tell: a Llama may wear no mask."""
    return CausalLoss() if variant.objective == "causal" else MaskedLoss(mask_id=data.mask_id)


def _info(setting: Setting, pace: dict[str, float]) -> dict[str, Any]:
    """What every look says of the training it belongs to; ``pace`` is of its latest updates in this session."""
    variant, frequency = setting.variant, setting.data.frequency
    told: dict[str, Any] = {} if frequency is None else {"frequency": frequency.describe()}
    if variant.regularizer is not None:
        told["regularizer"] = variant.regularizer.model_dump(mode="json")
    return told | {
        "pace": pace,
        "model": variant.name,
        "variant": variant.name,
        "seed": setting.seed,
        "family": variant.architecture,
        "kind": "decoder" if variant.causal else "encoder",
        "objective": variant.objective,
        "attention": variant.attention,
        "layers": variant.layers,
        "width": variant.width,
        "parameters": sum(parameter.numel() for parameter in setting.model.parameters()),
        "steps": setting.recipe.optimisation.steps,
    }


def _losses_so_far(folder: Path, step: int) -> dict[int, float]:
    """Losses of the updates before a run was stopped: the next look's mean goes back to the look before."""
    if step == 0 or not (folder / METRICS).exists():
        return {}
    lines = read_metrics(folder)
    return {line["step"]: line["loss"] for line in lines if line["step"] <= step and line.get("loss") is not None}


def _states_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(file.stem) for file in folder.glob(f"*{SUFFIX}") if file.stem.isdigit())
