"""Work on a GPU that is asked for now and waited for later: decompositions beside other work, one transfer for many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

CORES = os.cpu_count() or 1
ENOUGH_CORES = 8  # from here on the host decomposes many matrices sooner than a GPU, which takes one after another

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
    it, a thread for each matrix; otherwise the GPU, on a stream of its own.
    """
    if matrices.device.type != "cuda":
        found = torch.linalg.eigh(matrices)
        return lambda: (found[0], found[1])
    device = matrices.device
    ready = torch.cuda.current_stream(device).record_event()
    on_host = CORES >= ENOUGH_CORES

    def work(some: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            some.record_stream(stream)
            values, vectors = torch.linalg.eigh(some.cpu() if on_host else some)
            values, vectors = values.to(device), vectors.mT.to(device).mT
            return values, vectors, stream.record_event()

    tasks = [_POOL.submit(work, some) for some in (matrices.split(1) if on_host else (matrices,))]

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


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On another stream, where there is one."""
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that begins where the current one stands; None where there are no streams."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
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
