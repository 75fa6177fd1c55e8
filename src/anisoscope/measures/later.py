"""Work on a GPU that is asked for now and waited for later: decompositions beside other work, one transfer for many."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.measures.leading import Leading, begin_leading, can_lead

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ENOUGH_CORES = 8  # from here on the host decomposes many matrices sooner than a GPU, which takes one after another
HOST_WIDTH = 512  # up to here: a core falls behind as the cube of the width

_POOL = ThreadPoolExecutor(max(1, min(CORES - 1, 16)), thread_name_prefix="anisoscope-eigh")
_GPU = ThreadPoolExecutor(1, thread_name_prefix="anisoscope-eigh-gpu")


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


def no_room(error: Exception) -> bool:
    """Whether an error says that the device is full; libraries have their own words for it."""
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(one in words for one in ("ALLOC_FAILED", "out of memory"))
    )


def better_on_host(width: int) -> bool:
    """Whether so small matrices of a GPU are decomposed by the host, whose cores then take them all at once."""
    return CORES >= ENOUGH_CORES and width <= HOST_WIDTH


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
    on_host = better_on_host(matrices.shape[1])

    def work(some: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        stream = torch.cuda.Stream(device) if on_host else _stream("eigh", device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            some.record_stream(stream)
            values, vectors = torch.linalg.eigh(some.cpu() if on_host else some)
            values, vectors = values.to(device), vectors.mT.to(device).mT
            return values, vectors, stream.record_event()

    pool = _POOL if on_host else _GPU
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
    stream = side_stream("leading", matrices, start)
    with beside(stream):
        found = begin_leading(matrices, rank, start)

    def result() -> tuple[Tensor, Tensor]:
        with beside(stream):
            values, vectors = _led(matrices, found())
        rejoined(stream, device, (values, vectors))
        return values, vectors

    return result


def _led(matrices: Float[Tensor, "m d d"], found: Leading) -> tuple[Tensor, Tensor]:
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
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    """The one stream for work of a kind. Libraries keep tens of megabytes for each thread and stream they meet."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On another stream, where there is one."""
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield


def side_stream(name: str, given: Tensor, *others: Tensor | None) -> torch.cuda.Stream | None:
    """The stream for work of a kind on these tensors, from where the current one stands; None where there are none.

    Their memory is not given to anyone else before that work is done, even if nobody holds them any more.
    """
    if given.device.type != "cuda":
        return None
    stream = _stream(name, given.device)
    stream.wait_stream(torch.cuda.current_stream(given.device))
    for one in (given, *others):
        if one is not None:
            one.record_stream(stream)
    return stream


def rejoined(stream: torch.cuda.Stream | None, device: torch.device, made: Iterable[Tensor]) -> None:
    """From here on the current stream may use what was ``made`` on another."""
    if stream is not None:
        here = torch.cuda.current_stream(device)
        here.wait_stream(stream)
        for one in made:
            one.record_stream(here)


def fetched(found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """All of these on the host, as float64, in one transfer."""
    flat = torch.cat([one.double().reshape(-1) for one in found.values()]).cpu().numpy()
    out, at = {}, 0
    for name, one in found.items():
        out[name] = flat[at : at + one.numel()].reshape(tuple(one.shape))
        at += one.numel()
    return out
