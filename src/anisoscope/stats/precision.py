"""How torch computes inside a block: in which precision, on how many threads; and products in parts on tensor cores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")


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


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for what torch does on a CPU inside; afterwards as many as before."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def crew(count: int) -> Iterator[Callable[[Callable[[T], R], Iterable[T]], list[R]]]:
    """A ``map`` whose calls are done by so many threads, torch having one core in each of them."""
    with threads(1):
        if count == 1:
            yield lambda act, each: [act(one) for one in each]
            return
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield lambda act, each: list(pool.map(as_here(act), each))


def unrecorded(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Nothing is kept for gradients inside, nor can be had later of what is made there.

    On a CPU that is a seventh of the time of small operations. A GPU, where what is asked is waited for elsewhere, is
    asked as ever.
    """
    return torch.inference_mode() if device.type == "cpu" else contextlib.nullcontext()


def as_here(act: Callable[[T], R]) -> Callable[[T], R]:
    """The same for other threads, with gradients kept or not as in this one: torch asks each thread by itself."""
    off = torch.is_inference_mode_enabled()

    def there(one: T) -> R:
        with torch.inference_mode(off):
            return act(one)

    return there


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
