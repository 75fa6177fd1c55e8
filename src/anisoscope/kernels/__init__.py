"""Fused GPU kernels (Triton), each behind a plain path that gives the same results."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from anisoscope.kernels.early import await_early

Given = ParamSpec("Given")
Result = TypeVar("Result")


@functools.cache
def kernels_run(device: torch.device) -> bool:
    """Whether the kernels serve on a device: a GPU of NVIDIA with tensor cores, and a Triton that can build for it.

    Triton wants a C compiler and a folder to write to when it first runs; one small kernel tells whether it has them.
    """
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    await_early()
    eye = torch.eye(2, dtype=torch.float64, device=device)[None]
    out, good = torch.empty_like(eye), torch.empty(1, dtype=torch.bool, device=device)
    try:
        with torch.cuda.device(device):
            kernels_of("factors").inverse_factors[(1,)](eye, out, good, 0.0, K=2, P=2)
    except Exception as error:  # of Triton, the C compiler, the driver or the file system
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"GPU kernels cannot be built here, looks will take longer ({why})", RuntimeWarning, stacklevel=2)
        return False
    return True


@functools.cache
def kernels_of(name: str) -> Any:
    """A module of kernels, which cannot be imported without Triton."""
    return importlib.import_module(f"anisoscope.kernels.{name}")


def on_its_device(launch: Callable[Given, Result]) -> Callable[Given, Result]:
    """Triton launches on the current device, whatever it is given: make that the one of the first tensor."""

    @functools.wraps(launch)
    def launched(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        first = next((one for one in args if isinstance(one, Tensor)), None)
        if first is None or not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return launch(*args, **kwargs)
        with torch.cuda.device_of(first):
            return launch(*args, **kwargs)

    return launched


def sent(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers on the device of another tensor, and in its type unless one is given. A plain copy would wait for all
    that is under way there."""
    found = torch.tensor(values, dtype=dtype or like.dtype, pin_memory=like.device.type == "cuda")
    return found.to(like.device, non_blocking=True)


def sent_on(here: Tensor, like: Tensor) -> Tensor:
    """A tensor of the host on the device of another, in the same manner."""
    return (here.pin_memory() if like.device.type == "cuda" else here).to(like.device, non_blocking=True)
