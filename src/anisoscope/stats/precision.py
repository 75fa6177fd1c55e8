"""How products of float32 are formed on a GPU: plainly, or on tensor cores from two parts that these hold exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 are products of float32 inside: no autocast, no TF32; afterwards both are as they were."""
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    own, other = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = own.fp32_precision, other.fp32_precision
    try:
        plain: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer of torch's two interfaces, which the older one then refuses to read
        plain = None
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if plain is not None:
            torch.set_float32_matmul_precision(plain)
        own.fp32_precision, other.fp32_precision = before


def has_tensor_cores(device: torch.device) -> bool:
    """Whether products in TF32 are several times as fast as those in float32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextlib.contextmanager
def on_tensor_cores(wanted: bool = True) -> Iterator[None]:
    """Products in TF32 inside ``full_precision``, for rows that were split into parts that TF32 holds."""
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if wanted:
            torch.set_float32_matmul_precision("highest")


def two_parts(rows: Float[Tensor, "*rows d"]) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows d"]]:
    """``high`` keeps the ten bits of a TF32 number, ``low`` is the exact rest, of which TF32 keeps ten more.

    A product of two rows is then ``high.high + high.low + low.high`` up to one part in four million of their lengths.
    """
    high = (rows.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, rows - high
