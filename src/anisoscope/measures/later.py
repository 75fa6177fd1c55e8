"""Work on a GPU that is asked for now and waited for later: decompositions beside other work, one transfer for many."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.measures.leading import can_lead, leading_spaces

T = TypeVar("T")

CORES = os.cpu_count() or 1
ENOUGH_CORES = 8  # from here on the host decomposes many matrices sooner than a GPU, which takes one after another
HOST_WIDTH = 512  # up to here: a core falls behind as the cube of the width

_POOL = ThreadPoolExecutor(max(1, min(CORES - 1, 16)), thread_name_prefix="anisoscope-eigh")


@contextlib.contextmanager
def one_thread_each(device: torch.device) -> Iterator[None]:
    """Inside, a decomposition on the host keeps to its own thread, so that many of them do not fight over cores."""
    before = torch.get_num_threads()
    if device.type != "cuda" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def eigh_later(matrices: Float[Tensor, "m d d"]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin an eigendecomposition, ascending, beside whatever comes next; the function returned waits for it.

    On a GPU one is a thousand small steps that leave it idle and keep others off it. With cores enough the host does
    it where matrices are small, a thread for each; otherwise the GPU, on a stream of its own.
    """
    if matrices.device.type != "cuda":
        found = torch.linalg.eigh(matrices)
        return lambda: (found[0], found[1])
    device = matrices.device
    ready = torch.cuda.current_stream(device).record_event()
    on_host = CORES >= ENOUGH_CORES and matrices.shape[1] <= HOST_WIDTH

    def work(some: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        stream = torch.cuda.Stream(device) if on_host else _stream("eigh", device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            some.record_stream(stream)
            values, vectors = torch.linalg.eigh(some.cpu() if on_host else some)
            values, vectors = values.to(device), vectors.mT.to(device).mT
            return values, vectors, stream.record_event()

    pool = _POOL if on_host else _lane("eigh")
    tasks = [pool.submit(work, some) for some in (matrices.split(1) if on_host else (matrices,))]

    def result() -> tuple[Tensor, Tensor]:
        here, parts = torch.cuda.current_stream(device), []
        for task in tasks:
            values, vectors, done = task.result()
            here.wait_event(done)
            values.record_stream(here)
            vectors.record_stream(here)
            parts.append((values, vectors))
        return torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])

    return result


def leading_later(
    matrices: Float[Tensor, "m d d"], rank: int, start: Float[Tensor, "m d b"] | None = None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin the leading ``rank`` eigenpairs and some more, largest first, beside whatever comes next.

    By ``leading_spaces`` where that serves and settles; matrices that it does not settle are decomposed as a whole.
    ``start`` are the vectors of matrices that were not far from these.
    """
    device = matrices.device
    if device.type != "cuda" or not can_lead(matrices.shape[1], rank):
        whole = eigh_later(matrices)
        return lambda: _largest_first(*whole())
    ready = torch.cuda.current_stream(device).record_event()

    def work() -> tuple[Tensor, Tensor, torch.cuda.Event]:
        stream = _stream("leading", device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            matrices.record_stream(stream)
            values, vectors = _led(matrices, rank, start)
            return values, vectors, stream.record_event()

    task = _lane("leading").submit(work)

    def result() -> tuple[Tensor, Tensor]:
        here = torch.cuda.current_stream(device)
        values, vectors, done = task.result()
        here.wait_event(done)
        values.record_stream(here)
        vectors.record_stream(here)
        return values, vectors

    return result


def _led(matrices: Float[Tensor, "m d d"], rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    found = leading_spaces(matrices, rank, start)
    left = (~found.settled).nonzero().reshape(-1)
    if not len(left):
        return found.values, found.vectors
    values, vectors = _largest_first(*torch.linalg.eigh(matrices[left]))
    count = found.values.shape[1]
    return (
        found.values.index_copy(0, left, values[:, :count]),
        found.vectors.index_copy(0, left, vectors[:, :, :count].contiguous()),
    )


def _largest_first(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return values.flip(1), vectors.flip(2)


@functools.cache
def _lane(name: str) -> ThreadPoolExecutor:
    """The one thread for work of a kind. Libraries keep tens of megabytes for each thread and stream they meet."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"anisoscope-{name}")


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    """The one stream for work of a kind."""
    return torch.cuda.Stream(device)


def in_thread(name: str, device: torch.device, act: Callable[[], T]) -> Callable[[], T]:
    """Begin ``act`` in the thread of its kind, so that two queues are filled at once; the function returned waits.

    On a GPU alone: elsewhere the work itself would compete for cores. What ``act`` does must not lean on switches of
    the whole process, such as those of ``on_tensor_cores``.
    """
    if device.type != "cuda":
        found = act()
        return lambda: found

    def work() -> T:
        with torch.cuda.device(device):
            return act()

    return _lane(name).submit(work).result


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On another stream, where there is one."""
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield


def side_stream(name: str, device: torch.device) -> torch.cuda.Stream | None:
    """The stream for work of a kind, from where the current one stands; None where there are no streams."""
    if device.type != "cuda":
        return None
    stream = _stream(name, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def fetched(found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """All of these on the host, as float64, in one transfer."""
    flat = torch.cat([one.double().reshape(-1) for one in found.values()]).cpu().numpy()
    out, at = {}, 0
    for name, one in found.items():
        out[name] = flat[at : at + one.numel()].reshape(tuple(one.shape))
        at += one.numel()
    return out
