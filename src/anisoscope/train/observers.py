"""Observers of a training: what they are told, and the promise that none of them can stop it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from anisoscope.train.data import TrainingData
from anisoscope.train.recipe import Recipe, VariantSpec


@runtime_checkable
class Observer(Protocol):
    """Somebody who looks on. It may also have ``attach(setting)``, called once before the first step.

    What ``attach`` raises is raised: nothing is lost yet, and a look that cannot be had should be told at once. Later
    on an observer that raises is closed and left out from there on; the training goes on and the result says so.
    """

    def before_step(self, step: int) -> None:
        """Update ``step`` (from 1) is about to begin; the weights have had one update fewer."""

    def after_backward(self, step: int) -> None:
        """Gradients of the whole step stand in ``.grad``, not clipped yet."""

    def after_step(self, step: int, loss: float, tokens: int) -> None:
        """The weights have had ``step`` updates from ``tokens`` tokens in all; ``loss`` is that of the step's batch."""

    def close(self) -> None:
        """Training is over, however it ended."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an observer may want to know of the run it looks at. ``model`` is never the compiled one."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    data: TrainingData
    recipe: Recipe
    variant: VariantSpec
    seed: int
    folder: Path
    device: torch.device
    step: int
    """Updates done so far: 0, or more in a resumed run."""


class Onlookers:
    """The observers of one run, and notes on those that failed."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self.notes: list[str] = []

    def attach(self, setting: Setting) -> None:
        """Show the run to those who want to see it beforehand."""
        for observer in self._observers:
            method = getattr(observer, "attach", None)
            if method is not None:
                method(setting)

    def tell(self, event: str, *values: Any) -> None:
        """Call a method of every observer; whoever raises is closed and told nothing more."""
        for observer in list(self._observers):
            try:
                getattr(observer, event)(*values)
            except Exception as error:  # the training is never the victim, whatever an observer does
                self._observers.remove(observer)
                self.notes.append(
                    f"{type(observer).__name__} failed in {event} and was left out from there on: "
                    f"{type(error).__name__}: {error}"
                )
                with contextlib.suppress(Exception):
                    observer.close()

    def close(self) -> None:
        """Close those that are left."""
        self.tell("close")
        self._observers = []
