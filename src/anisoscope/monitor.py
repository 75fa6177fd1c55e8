"""The monitor: geometry and gradients of a model while it trains, in one line of the loop, without disturbing it.

    with Monitor(model, probe=batch, schedule=every(50), run="runs/my-run") as monitor:
        for step, batch in enumerate(loader):
            ...; optimizer.step(); monitor.step(step)

See docs/monitor.md for what it promises, what it costs and where to plug in.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.gradients import LossFunction
from anisoscope.capture.losses import loss_for
from anisoscope.capture.ride import Ride
from anisoscope.errors import OptionError, choose
from anisoscope.estimate import Estimate
from anisoscope.monitoring.early import Early
from anisoscope.monitoring.keeping import Keeper
from anisoscope.monitoring.looks import probe_look, ride_look
from anisoscope.monitoring.measuring import MODEL, Book, enter_look, enter_model
from anisoscope.monitoring.planning import (
    as_batches,
    check_analyses,
    check_probe,
    kinds_asked,
    make_plan,
    needed_rows,
    present,
    what_to_measure,
)
from anisoscope.monitoring.untouched import is_compiled, same_random_numbers, uncollected, untouched, unwrapped
from anisoscope.monitoring.views import Analysis, Look, OfModel
from anisoscope.profiling import Findings
from anisoscope.runs.store import RunWriter
from anisoscope.schedule import Last, Schedule, every
from anisoscope.slices import ALL
from anisoscope.text.batches import Batch

LOG = logging.getLogger("anisoscope.monitor")

DEFAULT_SITES = ("resid.*", "final_norm")
"""Looked at where a model has them; BERT has no final norm."""
DEFAULT_MEASURES = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
GRADIENT_MEASURES = ("mean_cosine", "isoscore")
EVERY = every(50)
LOOK = "look"
"""Stands for the measure where a look failed as a whole."""


class Monitor:
    """Looks at a model in training when its schedule says so, and stores what it finds.

    ``mode="probe"`` runs a forward and backward pass of its own over ``probe``, fixed held-out batches, after the
    optimiser's step. ``mode="ride"`` samples rows from the training step's own passes and runs none.
    ``gradients`` are the kinds to fetch (``activation``, ``reader``, ``writer``, ``embedding``, ``update``, and
    ``signal`` for dL/dy of readers); a ride has ``activation`` and ``update``. ``analyses`` are plugged in by name.
    ``slices`` are what global measures are told of beside all tokens: "no position 0", "no massive dimensions".
    ``info`` is stored with every look, and what ``of_model`` gives at each is entered at site "model".

    Nothing that goes wrong in a look reaches the training: it is a failure in the store and in ``problems``. Bad
    arguments raise at construction, before any step is lost; with ``strict=True`` later errors raise too.
    """

    @same_random_numbers()
    def __init__(
        self,
        model: nn.Module,
        *,
        probe: Batch | Iterable[Batch] | None = None,
        schedule: Schedule = EVERY,
        run: str | os.PathLike[str] | RunWriter | None = None,
        sites: str | Iterable[str] | None = None,
        measures: str | Iterable[str] = DEFAULT_MEASURES,
        slices: str | Iterable[str] = ALL,
        gradient_measures: str | Iterable[str] = GRADIENT_MEASURES,
        gradients: str | Iterable[str] = ("activation",),
        analyses: Mapping[str, Analysis] | None = None,
        loss: LossFunction | str | None = None,
        mode: str = "probe",
        optimizer: torch.optim.Optimizer | None = None,
        vectors: int = 4096,
        autocast: torch.dtype | None = None,
        cell: str = "",
        exist: str = "error",
        seed: int = 0,
        strict: bool = False,
        info: Mapping[str, Any] | None = None,
        of_model: OfModel | None = None,
    ) -> None:
        self.mode = _checked_mode(mode, schedule, model)
        self.strict, self.problems = strict, list[str]()
        self.last: Findings | None = None
        self._schedule, self._optimizer, self._autocast = schedule, optimizer, autocast
        self._extra_info, self._of_model = dict(info or {}), of_model
        self._whole, model = model, unwrapped(model)
        kinds = kinds_asked(gradients, analyses or {}, mode)
        self._what = what_to_measure(measures, gradient_measures, analyses or {}, mode, seed, slices)
        chosen = present(model, DEFAULT_SITES) if sites is None else sites
        self._plan, self._embeds = make_plan(model, chosen, kinds, self._what, mode=mode, vectors=vectors)
        self._batches, self._loss = ((), None) if mode == "ride" else self._probe_of(model, probe, loss, seed)
        self._ride: Ride | None = None
        self._before: dict[str, Tensor] = {}
        self._armed = self._closed = False
        self._previous: tuple[int, int | None] | None = None
        self._last: Last | None = None
        self._spent, self._began = 0.0, time.perf_counter()
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._keeper = Keeper.at(
            run,
            cell=cell,
            exist=exist,
            recipe={"monitor": self.describe()},
            seed=seed,
            device=str(self._device),
            model=type(model).__name__,
            complain=self._complain,
        )

    def _probe_of(
        self, model: nn.Module, probe: Batch | Iterable[Batch] | None, loss: LossFunction | str | None, seed: int
    ) -> tuple[tuple[Batch, ...], LossFunction | None]:
        """The batches of every look and their loss; what no look could read or measure is told now."""
        batches = as_batches(probe)
        chosen = loss_for(model, loss, seed=seed)
        check_probe(model, batches, self._plan, needed_rows(self._what))
        check_analyses(self._what.analyses, batches, self._plan)
        return batches, chosen

    def describe(self) -> dict[str, Any]:
        """What is looked at, and how, as plain values."""
        return {
            "mode": self.mode,
            "schedule": repr(self._schedule),
            "sites": [site.name for site in self._plan.sites],
            "measures": list(self._what.measures),
            "slices": list(self._what.slices),
            "gradient_measures": list(self._what.gradient_measures),
            "gradients": sorted(self._plan.kinds),
            "analyses": list(self._what.analyses),
            "loss": None if self._loss is None else getattr(self._loss, "__name__", repr(self._loss)),
            "vectors": self._plan.vectors,
            "seed": self._plan.seed,
            "probe_tokens": sum(batch.tokens for batch in self._batches),
            "probe_fingerprints": [batch.fingerprint for batch in self._batches],
        }

    def __enter__(self) -> Monitor:
        if self._looks_ahead:
            self._safely("before the first step", self._arm)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @same_random_numbers()
    def close(self) -> None:
        """Take off what hooks there are, and close the store if it was opened here. May be called twice."""
        if not self._closed:
            self._closed = True
            self._disarm()
            self._safely("at the end", self._keeper.close)

    def before_step(self, step: int, tokens: int | None = None) -> None:
        """Not needed where ``step`` is called after every step; says beforehand which step comes where it is not."""
        if self._looks_ahead and not self._closed:
            self._disarm()
            self._safely(f"before step {step}", lambda: self._arm() if self._due(step, tokens) else None)
            self._previous = (step - 1, tokens)

    def step(self, step: int, tokens: int | None = None) -> None:
        """Call after ``optimizer.step()``; ``tokens`` are those of the training so far. Looks if a look is due."""
        if self._closed:
            self._complain("monitor.step was called after the monitor was closed")
            return
        self._safely(f"at step {step}", lambda: self._step(int(step), None if tokens is None else int(tokens)))

    def look(self, step: int, tokens: int | None = None) -> None:
        """Look now, whether due or not, as before the first step. The change of weights is not known then."""
        if self.mode == "ride":
            raise OptionError("a ride sees a training step; use mode='probe' to look in between")
        if not self._closed and not self._keeper.has(step):
            self._disarm()
            self._safely(f"at step {step}", lambda: self._look(step, tokens))

    def latest(self, measure: str, site: str = MODEL) -> Estimate | None:
        """What the last look found in all tokens, or None: for a line of progress."""
        return None if self.last is None else self.last.estimates.get((measure, site, ALL))

    @property
    def seconds_spent(self) -> float:
        """Seconds in looks so far."""
        return self._spent

    @property
    def _looks_ahead(self) -> bool:
        """Whether a look must be prepared before the step it is about."""
        return self.mode == "ride" or "update" in self._plan.kinds

    def _due(self, step: int, tokens: int | None) -> bool:
        total = time.perf_counter() - self._began
        return self._schedule.due(step, tokens, self._spent, total, last=self._last)

    def _step(self, step: int, tokens: int | None) -> None:
        first, previous, self._previous = self._previous is None, self._previous, (step, tokens)
        if self.mode == "ride":
            # Whether to look was settled before the step began, but for the first one, whose number nobody knew.
            wanted = self._armed and (not first or self._due(step, tokens))
        else:
            wanted = self._due(step, tokens) or (self._armed and not first)
        try:
            if wanted and not self._keeper.has(step):
                self._look(step, tokens)
        finally:
            self._disarm()
            if self._looks_ahead:
                stride = 1 if previous is None else max(1, step - previous[0])
                ahead = (
                    tokens if previous is None or previous[1] is None or tokens is None else 2 * tokens - previous[1]
                )
                if self._due(step + stride, ahead):
                    self._arm()

    @same_random_numbers()
    def _arm(self) -> None:
        self._armed = True
        began = time.perf_counter()
        self._before = self._plan.snapshot()
        if self.mode == "ride":
            plan = self._plan
            self._ride = Ride(plan.model, plan.sites, self._embeds, vectors=plan.vectors, seed=plan.seed)
        self._spent += time.perf_counter() - began

    def _disarm(self) -> None:
        ride, self._ride, self._before, self._armed = self._ride, None, {}, False
        if ride is not None:
            ride.drop()

    @same_random_numbers()
    @uncollected()
    def _look(self, step: int, tokens: int | None) -> None:
        """One look, entered and stored whatever comes of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what the training has queued is not the cost of the look
        began = time.perf_counter()
        book = Book(self._keeper.run, step, self._keeper.cell, self.strict)
        look: Look | None = None
        early = Early(self._what.measures, self._what.analyses)
        with untouched(self._whole, autocast=self._autocast), early:
            try:
                look = self._see(step, early)
                enter_look(book, look, self._what, early)
                if self._of_model is not None:
                    enter_model(book, self._of_model, self._device)
            except Exception as error:  # out of memory, a silent site, a loss of the user's own: all are told
                book.fail(MODEL, LOOK, error)
                self._complain(f"the look at step {step} failed: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - began + (look.hook_seconds if look else 0.0)
        self._spent += seconds
        self._last = Last(step, tokens, seconds)
        info = self._info(look, tokens, seconds)
        self.last = Findings(tuple(book.records), tuple(book.failures), tuple(book.curves), info)
        for failure in book.failures:
            self._complain(f"{failure.measure} at {failure.site} failed: {failure.error}")
        began = time.perf_counter()
        self._keeper.keep(step, self.last)
        self._spent += time.perf_counter() - began

    def _see(self, step: int, early: Early) -> Look:
        changed = self._plan.updates(self._before)
        if self._ride is not None:
            return ride_look(self._plan, self._ride.end(), step=step, changed=changed)
        assert self._loss is not None
        return probe_look(self._plan, self._batches, self._loss, step=step, changed=changed, meanwhile=early)

    def _info(self, look: Look | None, tokens: int | None, seconds: float) -> dict[str, Any]:
        total = time.perf_counter() - self._began
        rates = [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]
        finite = look is not None and look.loss is not None and math.isfinite(look.loss)
        return self._extra_info | {
            "mode": self.mode,
            "weights": "before the update of this step" if self.mode == "ride" else "after the update of this step",
            "loss": look.loss if look is not None and finite else None,
            "tokens": tokens,
            "look_tokens": 0 if look is None else look.tokens,
            "vectors": 0 if look is None or not look.views else len(look.views[0].ids),
            "learning_rates": rates,
            "seconds": seconds,
            "seconds_in_looks": self._spent,
            "share_of_wall_clock": min(1.0, self._spent / total) if total > 0 else 0.0,
        }

    def _safely(self, when: str, act: Callable[[], Any]) -> None:
        """Do something of ours inside the user's loop: an error is told, and the loop goes on."""
        try:
            act()
        except Exception as error:
            if self.strict:
                raise
            self._complain(f"{when}: {type(error).__name__}: {error}")

    def _complain(self, words: str) -> None:
        if words not in self.problems:
            self.problems.append(words)
            LOG.warning("%s", words)


def _checked_mode(mode: str, schedule: object, model: nn.Module) -> str:
    choose("mode", mode, ("probe", "ride"))
    if not isinstance(schedule, Schedule):
        raise OptionError(f"schedule must be one such as every(50), got {type(schedule).__name__}")
    if mode == "ride" and is_compiled(model):
        raise OptionError("a ride needs hooks, which compiled code passes by; use mode='probe', which runs eagerly")
    return mode
