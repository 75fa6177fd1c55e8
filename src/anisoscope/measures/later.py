"""Work on a GPU that is asked for now and waited for later: decompositions beside other work, one transfer for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_POOL = ThreadPoolExecutor(4, thread_name_prefix="anisoscope-eigh")


def eigh_later(matrices: Float[Tensor, "m d d"]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin an eigendecomposition, ascending, beside whatever comes next; the function returned waits for it.

    On a GPU one is a thousand small steps that leave it idle, so that they hide behind other work on other streams.
    """
    if matrices.device.type != "cuda":
        found = torch.linalg.eigh(matrices)
        return lambda: (found[0], found[1])
    device = matrices.device
    ready = torch.cuda.current_stream(device).record_event()

    def work() -> tuple[Tensor, Tensor, torch.cuda.Event]:
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            matrices.record_stream(stream)
            values, vectors = torch.linalg.eigh(matrices)
            return values, vectors, stream.record_event()

    task = _POOL.submit(work)

    def result() -> tuple[Tensor, Tensor]:
        values, vectors, done = task.result()
        here = torch.cuda.current_stream(device)
        here.wait_event(done)
        values.record_stream(here)
        vectors.record_stream(here)
        return values, vectors

    return result


def fetched(found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """All of these on the host, as float64, in one transfer."""
    flat = torch.cat([one.double().reshape(-1) for one in found.values()]).cpu().numpy()
    out, at = {}, 0
    for name, one in found.items():
        out[name] = flat[at : at + one.numel()].reshape(tuple(one.shape))
        at += one.numel()
    return out
