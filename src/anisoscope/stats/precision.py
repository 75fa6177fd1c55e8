"""How torch computes inside a block: in which precision, on how many threads; and products in parts on tensor cores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class _OneSwitch(contextlib.AbstractContextManager["_OneSwitch"]):
    """Products of float32 on a CPU are not made of bfloat16 or TF32 as long as any thread is inside, whatever
    ``torch.set_float32_matmul_precision`` asks for: torch has one switch for all threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, "none"

    def __enter__(self) -> _OneSwitch:
        switch = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            if self._inside == 0:
                self._before = switch.fp32_precision
                if self._before not in ("none", "ieee"):
                    switch.fp32_precision = "ieee"
            self._inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before not in ("none", "ieee"):
                torch.backends.mkldnn.matmul.fp32_precision = self._before  # type: ignore[attr-defined]


_ON_CPU = _OneSwitch()


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 are products of float32 inside: no autocast, no TF32; afterwards both are as they were."""
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False), _ON_CPU:
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


def device_of(rows: object) -> torch.device:
    """Where a tensor lies; the CPU for whatever else rows come as."""
    return rows.device if isinstance(rows, Tensor) else torch.device("cpu")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The same in ``full_precision`` where the first tensor given to it lies: what is measured in the midst of a
    training step must not see how that computes."""

    @wraps(function)
    def precise(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        with full_precision(device_of(next(tensors, None))):
            return function(*args, **kwargs)

    return precise


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for what torch does on a CPU inside; afterwards as many as before.

    A thread that asks torch for something for the first time meanwhile has as many too, and keeps them.
    """
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
    off, kept = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def there(one: T) -> R:
        with torch.inference_mode(off), torch.set_grad_enabled(kept):
            return act(one)

    return there


def has_tensor_cores(device: torch.device) -> bool:
    """Whether products in TF32 are several times as fast as those in float32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def multiplies_float64_as_fast(device: torch.device) -> bool:
    """Whether products of float64 take no longer than those of float32, as on A100, H100, H200 and their kin, which
    have tensor cores for them. By published rates that is so on no other GPU of NVIDIA, nor on two of that kind that
    have next to none of these cores."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0)):
        return False
    return not {"H20", "H800"} & set(torch.cuda.get_device_name(device).replace("-", " ").split())


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Inside, ``on_tensor_cores`` switches nothing, and its products are those of float32, which are slower and no less
    right: another thread computes meanwhile, and torch has one switch for all of them."""
    before = _LEFT_ALONE.set(True)
    try:
        yield
    finally:
        _LEFT_ALONE.reset(before)


_LEFT_ALONE = ContextVar("the switch of products is left alone", default=False)


@contextlib.contextmanager
def on_tensor_cores(wanted: bool = True) -> Iterator[None]:
    """Products in TF32 inside ``full_precision``, for rows that were split into parts that TF32 holds."""
    if not wanted or _LEFT_ALONE.get():
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def two_parts(rows: Float[Tensor, "*rows d"]) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows d"]]:
    """``high`` keeps the ten bits of a TF32 number, ``low`` is the exact rest, of which TF32 keeps ten more.

    A product of two rows is then ``high.high + high.low + low.high`` up to one part in four million of their lengths.
    """
    high = (rows.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, rows - high
