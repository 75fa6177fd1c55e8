"""What Triton does once in a process, done in another thread before it is needed.

Reading kernels and hashing the compiler takes half a second and a library of some hundred megabytes. Nothing here
touches a device: work of the caller that is being recorded there would be spoiled by it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from threading import Lock, Thread

import torch

_begun: list[Thread] = []
_lock = Lock()


def begin_early() -> None:
    """Begin it, once in a process and only where kernels may run; nobody is told of what goes wrong.

    For a process that is our own: a thread that imports modules is not to be met by somebody's fork.
    """
    with _lock:
        if _begun or not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
            return
        _begun.append(Thread(target=_get_ready, name="anisoscope: kernels", daemon=True))
        _begun[0].start()


def await_early() -> None:
    """Wait for it where it was begun: doing it a second time at once would take longer."""
    for one in _begun:
        one.join()


def _get_ready() -> None:
    package = importlib.import_module(__package__ or "anisoscope.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(Exception):
            importlib.import_module(f"{package.__name__}.{module.name}")
    # Both are asked for by the first launch; where they are differs from version to version, and neither is a promise.
    for name in ("triton.experimental.gluon.nvidia.hopper", "triton.runtime.cache", "triton.compiler.compiler"):
        with contextlib.suppress(Exception):
            key = getattr(importlib.import_module(name), "triton_key", None)
            if key is not None:
                key()
