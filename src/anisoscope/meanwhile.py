"""Work in a thread of its own while something else is done, for work that hardly needs Python; and how many cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar, TypeVarTuple

GivenUp = Callable[[], bool]
"""Asked now and then by work under way: whether anybody still wants to know."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Meanwhile:
    """A thread for the length of a ``with``. On leaving, work that nobody waits for is told to give up: an error inside
    then waits for the piece under way alone."""

    def __init__(self, name: str) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"anisoscope-{name}")

    def __enter__(self) -> Meanwhile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, work: Callable[[*Ts, GivenUp], T], *arguments: *Ts) -> Callable[[], T]:
        """Begin ``work(*arguments, given_up)``; the function returned waits for what it gives."""
        return self._pool.submit(work, *arguments, self._over.is_set).result
