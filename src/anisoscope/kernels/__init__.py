"""Fused GPU kernels (Triton), each behind a plain path that gives the same results."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, as it is with torch where torch knows CUDA, for GPUs on which kernels were tried."""
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


@functools.cache
def kernels_of(name: str) -> Any:
    """A module of kernels, which cannot be imported without Triton."""
    return importlib.import_module(f"anisoscope.kernels.{name}")
