"""Run something beside a training without a trace: random numbers, modes, precision and gradients stay as they were."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from anisoscope.errors import OptionError

WRAPPERS = ("DistributedDataParallel", "DataParallel")


@contextlib.contextmanager
def untouched(model: nn.Module, *, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Inside: eval mode, gradients enabled, autocast off (or as asked for), nothing compiled. Afterwards: as before.

    Random numbers are not seen to here: whoever looks does, by ``same_random_numbers``, around all that it does.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_modes(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", device}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if autocast is not None:
            # Without its cache: casts of weights must not outlive the look, nor may stale ones enter it.
            stack.enter_context(torch.autocast(device, dtype=autocast, cache_enabled=False))
        if is_compiled(model):
            # Hooks do not fire in compiled code; run as written, the same modules compute the same things.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Whatever is drawn inside, afterwards the generators of Python, NumPy and torch stand where they stood."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's collector of garbage waits: a full pass over a large process takes longer than a look."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Each module's own mode again afterwards: parts of a model may differ in it, and ``train()`` would not know."""
    before = [(module, module.training) for module in model.modules()]
    _set_modes((module, False) for module, _ in before)
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Put modules into modes, those that are not in them already."""
    for module, mode in modes:
        if module.training is mode:
            continue
        # Of all that a module does on setting an attribute, a mode needs the last step alone.
        if type(module).__setattr__ is nn.Module.__setattr__:
            object.__setattr__(module, "training", mode)
        else:
            module.training = mode


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it runs as compiled code."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers of data parallelism and compilation: the same modules, entered without their work."""
    while True:
        inner = getattr(model, "module" if type(model).__name__ in WRAPPERS else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    sharded = any(type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for module in model.modules())
    if sharded or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise OptionError(
            "the model is cut into shards, and a look by one process would wait for the others for ever; "
            "monitor an unsharded model"
        )
    return model
