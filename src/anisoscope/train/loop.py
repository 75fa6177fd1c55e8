"""The training loop: AdamW, warm-up and cosine, accumulation, autocast, validation, checkpoints, observers.

Steps are counted as updates of the weights: update 1 is the first, and "step 100" is the state after 100 of them, in
metrics, checkpoints and observers alike. For one seed and machine a run on the CPU is the same bit for bit, whether it
was stopped and resumed or not, and whether anybody looked or not.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import OptionError, RunError
from anisoscope.models.build import build_model
from anisoscope.runs.files import explained, replacing
from anisoscope.runs.provenance import provenance
from anisoscope.train.checkpoints import (
    Progressed,
    checkpoint_steps,
    checkpoints_in,
    drop_states,
    load_checkpoint,
    newest_resumable,
    save_checkpoint,
    step_folder,
)
from anisoscope.train.data import IGNORED, Sequences, TrainingData, as_transformers, prepare
from anisoscope.train.metrics import METRICS, MetricsWriter
from anisoscope.train.observers import Observer, Onlookers, Setting
from anisoscope.train.optimise import learning_rate, make_optimiser
from anisoscope.train.penalised import Regularized
from anisoscope.train.recipe import Recipe, VariantSpec, changes_frequency

TRAINING_FILE = "training.json"
DIVERGED = "diverged"
"""The folder of the state whose loss or gradient was not finite; without a number, so that no series takes it up."""
DROPOUT_SEED = 1 << 32  # apart from the seeds that weights are drawn with


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One line of news."""

    step: int
    steps: int
    loss: float
    val_loss: float | None
    """The latest one."""
    val_step: int | None
    """At which step that was."""
    lr: float
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended. ``status`` is "finished", "paused" (by ``until`` or ``stop``) or "diverged"."""

    status: str
    step: int
    tokens: int
    loss: float | None
    val_loss: float | None
    seconds: float
    """Of steps and their observers; without validation and checkpoints."""
    tokens_per_second: float
    parameters: int
    folder: Path
    checkpoint: Path | None
    notes: tuple[str, ...] = ()


def train(
    recipe: Recipe,
    variant: str | VariantSpec,
    seed: int,
    *,
    folder: str | Path,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    data: TrainingData | None = None,
    until: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train one model of a recipe for one seed, into ``folder``: metrics, checkpoints, ``training.json``.

    ``resume`` goes on from the newest checkpoint in the folder. ``until`` stops after so many updates in all, with a
    checkpoint, as if the power had been cut at a good moment; ``stop`` is asked after every update whether to do so
    now. ``data`` saves preparing it again for another seed. The global random generators are given back as they were.
    """
    model_spec = recipe.variant(variant) if isinstance(variant, str) else variant
    device = resolve_device(recipe.device)
    place = Path(folder)
    _open_folder(place, resume)
    data = data or prepare(recipe.data, model_spec.tokenizer, model_spec.language)
    if changes_frequency(recipe):
        data = data.with_frequency(model_spec.frequency, model_spec.objective)
    with _own_generators(device):
        run = _Run(recipe, model_spec, seed, place, device, data)
        if resume:
            run.go_on()
        else:
            run.describe()
        onlookers = Onlookers(observers)
        try:
            onlookers.attach(run.setting())
            until = recipe.optimisation.steps if until is None else until
            return run.to_the_end(onlookers, progress, until, stop or (lambda: False))
        finally:
            onlookers.close()


class _Run:
    """One training under way: everything that changes from step to step lives here."""

    def __init__(
        self, recipe: Recipe, variant: VariantSpec, seed: int, folder: Path, device: torch.device, data: TrainingData
    ) -> None:
        self.recipe, self.variant, self.seed, self.folder, self.device = recipe, variant, seed, folder, device
        self.plan, self.data = recipe.optimisation, data
        model_spec = variant.model(data.vocab_size, recipe.data.sequence_length)
        self.model = build_model(model_spec, seed).to(device)
        self.weights = list(self.model.parameters())  # held: to walk all modules takes as long as a small model's norm
        self.parameters = sum(parameter.numel() for parameter in self.weights)
        self.optimiser = make_optimiser(self.model, self.plan)
        wanted = variant.regularizer
        self.regularized = None if wanted is None else Regularized(wanted, self.model, seed)
        torch.default_generator.manual_seed(DROPOUT_SEED + seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(DROPOUT_SEED + seed)
        self.forward: Any = self.model
        self.tokenizer = as_transformers(data)
        self.validation = data.validation(recipe.evaluation.sequences, variant.objective)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.val_step: int | None = None
        self.extra: dict[str, float] = {}
        """What an update adds to its loss, for its line of metrics."""
        self.notes: list[str] = []

    def setting(self) -> Setting:
        return Setting(
            model=self.model,
            optimiser=self.optimiser,
            data=self.data,
            recipe=self.recipe,
            variant=self.variant,
            seed=self.seed,
            folder=self.folder,
            device=self.device,
            step=self.step,
        )

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one before, flat, so that a difference can be named."""
        parts = {"data": self.recipe.data, "model": self.variant, "optimisation": self.plan}
        flat: dict[str, Any] = {
            f"{part}.{key}": value
            for part, spec in parts.items()
            for key, value in spec.model_dump(mode="json").items()
        }
        flat.pop("model.name")
        flat["data.source"] = self.data.corpus["fingerprint"]  # the text counts, not the path to it
        return flat | {"seed": self.seed, "dtype": self.recipe.dtype}

    def describe(self) -> None:
        """Write down what is trained here, and with what."""
        about = {
            "recipe": self.recipe.describe(),
            "model": self.variant.name,
            "seed": self.seed,
            "parameters": self.parameters,
            "provenance": provenance(seeds=[self.seed], device=str(self.device), corpus=self.data.corpus),
        }
        with explained(self.folder), replacing(self.folder / TRAINING_FILE) as file:
            file.write(json.dumps(about, indent=1, ensure_ascii=False).encode() + b"\n")

    def go_on(self) -> None:
        """Take up the newest checkpoint."""
        found = load_checkpoint(newest_resumable(self.folder), self.model, self.optimiser, self.settings())
        self.step, self.tokens, self.seconds = found.step, found.tokens, found.seconds
        if self.regularized is not None:
            self.regularized.restore(self.folder, self.step, self.device)

    def to_the_end(
        self,
        onlookers: Onlookers,
        progress: Callable[[Progress], None] | None,
        until: int,
        stop: Callable[[], bool],
    ) -> TrainResult:
        last = min(until, self.plan.steps)
        wanted = checkpoint_steps(self.recipe.checkpoints, self.plan.steps) | {last}
        status = "finished" if last == self.plan.steps else "paused"
        self._compile()
        checkpoint = next((path for step, path in checkpoints_in(self.folder) if step == self.step), None)
        with MetricsWriter(self.folder / METRICS) as metrics:
            if self.step == 0:
                self.val_loss, self.val_step = self._evaluate(), self.step
                metrics.write(step=0, tokens=0, val_loss=self.val_loss, lr=learning_rate(self.plan, 1), seconds=0.0)
                if 0 in wanted:
                    checkpoint = self._save()
            while self.step < last:
                trouble = self._update(onlookers)
                if trouble:
                    status = "diverged"
                    self.notes.append(trouble)
                    metrics.write(step=self.step + 1, tokens=self.tokens, loss=None, event="diverged", message=trouble)
                    checkpoint = self._save(self.folder / DIVERGED)
                    break
                due = self.step % self.recipe.evaluation.every == 0 or self.step == last
                if due:
                    self.val_loss, self.val_step = self._evaluate(), self.step
                lr = learning_rate(self.plan, self.step)
                new = ({"val_loss": self.val_loss} if due else {}) | self.extra
                metrics.write(
                    step=self.step, tokens=self.tokens, loss=self.loss, lr=lr, seconds=round(self.seconds, 4), **new
                )
                if progress is not None:
                    progress(self._news(lr))
                stopped = self.step < last and stop()
                if self.step in wanted or stopped:
                    checkpoint = self._save()
                if stopped:
                    status = "paused"
                    break
        self.notes += onlookers.notes
        return self._result(status, checkpoint)

    def _update(self, onlookers: Onlookers) -> str | None:
        """One update of the weights, or what was not finite and therefore was not done."""
        began, number = time.perf_counter(), self.step + 1
        onlookers.tell("before_step", number)
        whole = self.data.batch(number, self.plan.batch_size, self.variant.objective, self.seed)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.plan, number)
        self.optimiser.zero_grad(set_to_none=True)  # an observer may have left some
        loss = self._backward(whole)
        onlookers.tell("after_backward", number)
        norm = self._clip()
        if not math.isfinite(loss) or not math.isfinite(norm):
            what = "loss" if not math.isfinite(loss) else "norm of the gradient"
            value = loss if not math.isfinite(loss) else norm
            return (
                f"the {what} was {value} at update {number}, so training stopped before it; the state that gave it is "
                f"in {DIVERGED}/: try a lower lr, more warmup_steps or a smaller grad_clip"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)  # here, not before the next one: a look in between has their room
        self.step, self.loss = number, loss
        self.tokens += whole.ids.numel()
        onlookers.tell("after_step", number, loss, self.tokens)
        self.seconds += time.perf_counter() - began
        return None

    def _backward(self, whole: Sequences) -> float:
        """Gradients of the mean loss over all scored positions of the step, whatever passes it is cut into."""
        scored, total = whole.scored, torch.zeros((), device=self.device)
        for part in whole.split(self.plan.accumulation):
            if self.regularized is None:
                loss = self._summed_loss(self.forward, part.to(self.device)) / max(scored, 1)
                loss.backward()
            else:
                with self.regularized.catching(self.step + 1):
                    loss = self._summed_loss(self.forward, part.to(self.device)) / max(scored, 1)
                self.regularized.added(loss, self.step + 1, self.plan.accumulation).backward()
            total += loss.detach()
        if self.regularized is not None:
            self.extra = self.regularized.taken()
        return float(total)

    def _summed_loss(self, forward: Any, part: Sequences) -> Tensor:
        with self._autocast():
            logits = forward(input_ids=part.ids).logits
        logits, targets = logits.float().flatten(0, 1), part.targets.flatten()
        if part.weights is None:
            return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        each = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return (each * part.weights.flatten()).sum()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _clip(self) -> float:
        gradients = [p.grad for p in self.weights if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.plan.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.weights, self.plan.grad_clip, norm)
        return float(norm)

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss over the scored positions of the held-out windows."""
        self.model.eval()
        rows = max(self.plan.batch_size // self.plan.accumulation, 1)
        total = 0.0
        for ids, targets in zip(self.validation.ids.split(rows), self.validation.targets.split(rows), strict=True):
            total += float(self._summed_loss(self.model, Sequences(ids, targets).to(self.device)))
        self.model.train()
        return total / max(self.validation.scored, 1)

    def _save(self, target: Path | None = None) -> Path:
        place = target or step_folder(self.folder, self.step)
        if self.regularized is not None and target is None:
            self.regularized.write(self.folder, self.step, self.recipe.checkpoints.keep_states)
        progressed = Progressed(step=self.step, tokens=self.tokens, seconds=self.seconds, settings=self.settings())
        save_checkpoint(place, self.model, self.optimiser, self.tokenizer, progressed)
        if target is None and not self.recipe.checkpoints.keep_states:
            drop_states(self.folder, but=place)
        return place

    def _compile(self) -> None:
        """torch.compile, tried on one pass forth and back, so that what fails there fails here."""
        if self.recipe.compile is False:
            return
        if self.regularized is not None:  # with compile: true the recipe was refused
            self.notes.append("compiled code passes by the sites that the regularizer needs; trained without it")
            return
        part = self.data.batch(1, self.plan.batch_size, self.variant.objective, self.seed).split(
            self.plan.accumulation
        )[0]
        try:
            compiled = torch.compile(self.model)
            with _own_generators(self.device):
                self._summed_loss(compiled, part.to(self.device)).backward()
        except Exception as error:  # of dynamo, inductor, triton or the C++ compiler
            cause = f"torch.compile does not work here: {type(error).__name__}: {_first_line(error)}"
            if self.recipe.compile is True:
                raise OptionError(f'{cause}; use compile: false, or "auto" to go on without it') from error
            self.notes.append(f"{cause}; trained without it")
        else:
            self.forward = compiled
        finally:
            self.optimiser.zero_grad(set_to_none=True)

    def _news(self, lr: float) -> Progress:
        assert self.loss is not None  # an update was done
        return Progress(
            step=self.step,
            steps=self.plan.steps,
            loss=self.loss,
            val_loss=self.val_loss,
            val_step=self.val_step,
            lr=lr,
            tokens=self.tokens,
            tokens_per_second=self.tokens / max(self.seconds, 1e-9),
        )

    def _result(self, status: str, checkpoint: Path | None) -> TrainResult:
        return TrainResult(
            status=status,
            step=self.step,
            tokens=self.tokens,
            loss=self.loss,
            val_loss=self.val_loss,
            seconds=self.seconds,
            tokens_per_second=self.tokens / max(self.seconds, 1e-9),
            parameters=self.parameters,
            folder=self.folder,
            checkpoint=checkpoint,
            notes=tuple(self.notes),
        )


def resolve_device(name: str) -> torch.device:
    """A device that is really there; "auto" is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # The tensor's own device has its number: "cuda" alone would be whichever is current at the time.
        device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {name!r} cannot be used here: {_first_line(error)}") from None
    return device


def _open_folder(folder: Path, resume: bool) -> None:
    used = (folder / METRICS).exists() or bool(checkpoints_in(folder))
    if used and not resume:
        raise RunError(f"{folder} holds a training already; resume it, or choose another folder")
    if resume and not used:
        raise RunError(f"{folder} holds no training to resume; start one without resume")
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _own_generators(device: torch.device) -> Iterator[None]:
    """Draw as you like inside; torch's generators are given back as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
