"""Engines: where the cells of a sweep are worked on. An engine takes tasks and gives outcomes as they are finished.

``local`` runs them here, in this process or in several. Another engine is a class with the same ``run`` and an entry in
``ENGINES``; it needs tasks and outcomes that can be sent between processes, and they can.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from anisoscope.errors import AnisoscopeError, OptionError, choose

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """What became of a task: a result, or the words of the error that ended it."""

    task: Task
    result: Result | None
    error: str | None = None


@runtime_checkable
class Engine(Protocol):
    """Works on tasks and yields outcomes in the order in which they are finished."""

    def run(
        self, work: Callable[[Task, Progress], Result], tasks: Sequence[Task], progress: Progress
    ) -> Iterator[Outcome[Task, Result]]:
        """Work on every task; an error of one is an outcome and does not end the others."""
        ...


@dataclass(frozen=True)
class LocalEngine:
    """This machine: one process after another task, or ``workers`` processes side by side."""

    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise OptionError(f"workers must be at least 1, got {self.workers}")

    def run(
        self, work: Callable[[Task, Progress], Result], tasks: Sequence[Task], progress: Progress
    ) -> Iterator[Outcome[Task, Result]]:
        """Work on every task; progress inside a task is told only where there is one process."""
        if self.workers == 1 or len(tasks) < 2:
            for task in tasks:
                yield _attempt(work, task, progress)
            return
        # Spawned, not forked: a fork of a process whose thread pools are at work may never wake up.
        context = multiprocessing.get_context("spawn")
        workers = min(self.workers, len(tasks))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_share_cores, initargs=(workers,)) as pool:
            left: dict[Future[Outcome[Task, Result]], Task] = {pool.submit(_attempt, work, t, None): t for t in tasks}
            while left:
                done, _ = wait(left, return_when=FIRST_COMPLETED)
                for future in done:
                    task = left.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        yield Outcome(task, None, "the worker process died, perhaps for lack of memory")


def _attempt(work: Callable[[Task, Progress], Result], task: Task, progress: Progress | None) -> Outcome[Task, Result]:
    tell = progress or (lambda what, done, total: None)
    try:
        return Outcome(task, work(task, tell))
    except AnisoscopeError as error:
        return Outcome(task, None, f"{type(error).__name__}: {error}")
    except Exception as error:  # a bug in one cell must not cost the others; the record says where it was
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(task, None, f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})")


def _share_cores(workers: int) -> None:
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


ENGINES: dict[str, Callable[[int], Engine]] = {"local": LocalEngine}


def engine_named(name: str, workers: int) -> Engine:
    """The engine of a name, with so many workers."""
    return ENGINES[choose("engine", name, ENGINES)](workers)
