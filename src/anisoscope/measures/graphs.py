"""Work of many small steps on a GPU, recorded once and then started as one: steps that take the host longer to ask for
than the device to do.

A recording (a CUDA graph) holds addresses, not tensors, and whatever it is given must lie where it lay. So it gets
buffers of its own, which what is given is copied into, and what comes out is copied out. All of that stays on the
device for as long as the process lives; that, and the training beside which this runs, is what the bounds are for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from anisoscope.kernels import kernels_run

GIVEN_BYTES = 1 << 25  # of what is given: with more of it the device takes longer than the host, and nothing is gained
KEPT_BYTES = 1 << 28  # of all recordings together, with what they work in
FREE_BYTES = 4 * KEPT_BYTES  # left on the device before anything is recorded
MOST_KEYS = 64  # kinds of calls that are told apart

Function: TypeAlias = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recording:
    """Outputs that ``replay`` fills anew, and the bytes that it keeps for itself."""

    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    kept_bytes: int


@runtime_checkable
class Recorder(Protocol):
    """What makes recordings."""

    def serves(self, device: torch.device) -> bool:
        """Whether work on a device can be recorded now."""
        ...

    def record(self, act: Callable[[], tuple[Tensor, ...]], device: torch.device) -> Recording:
        """The recording of what ``act`` does, without doing it; any error where that is not possible."""
        ...


class CudaRecorder:
    """Recordings as CUDA graphs."""

    def serves(self, device: torch.device) -> bool:
        """On a GPU where kernels run, since libraries in their place ask the device questions; unless the caller is
        recording a graph of its own."""
        if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
            return False
        return not torch.cuda.is_current_stream_capturing() and kernels_run(device)

    def record(self, act: Callable[[], tuple[Tensor, ...]], device: torch.device) -> Recording:
        """On a stream that nothing else ever runs on: libraries keep room for each stream, and that of this one lies in
        the recording's memory from then on."""
        if torch.cuda.mem_get_info(device)[0] < FREE_BYTES:
            raise RuntimeError("too little is free on the device")
        before = torch.cuda.memory_reserved(device)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stream = _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _no_collection():
            # Other threads may go on with what they do, which a recording of the process as a whole would forbid.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = act()
            finally:
                _end(graph, device, pool)
        torch.cuda.current_stream(device).wait_stream(stream)
        return Recording(outputs, graph.replay, max(0, torch.cuda.memory_reserved(device) - before))


_BROKEN: list[torch.cuda.CUDAGraph] = []  # the allocator may ask one of them a question still


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except Exception:
        # A recording that broke: the allocator must not go on believing that one is under way.
        _BROKEN.append(graph)
        end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(Exception):  # it was told already
                end(device.index, pool)
        raise


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream. Those of torch are dealt out in turn from a few, and may be somebody else's as well."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        library: Any = torch.cuda.cudart()
        failed = int(library.cudaStreamCreate(ctypes.addressof(handle)))
    if failed or not handle.value:
        raise RuntimeError(f"no stream on {device}: error {failed}")
    return torch.cuda.ExternalStream(handle.value, device=device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: what it frees may be things of the device, and those end a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass
class _Kept:
    """A recording with its own buffers."""

    inputs: tuple[Tensor, ...]
    held: tuple[Tensor, ...]
    recording: Recording
    done: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.done = _event(self.inputs[0].device)

    def run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device = given[0].device
        if self.done is not None:  # what was last done to the buffers may have been on another stream
            torch.cuda.current_stream(device).wait_event(self.done)
        for own, one in zip(self.inputs, given, strict=True):
            own.copy_(one)
        self.recording.replay()
        found = tuple(one.clone() for one in self.recording.outputs)
        self.done = _event(device)
        return found

    @property
    def nbytes(self) -> int:
        """What it keeps on the device."""
        return self.recording.kept_bytes + sum(one.nbytes for one in (*self.inputs, *self.held))


def _event(device: torch.device) -> torch.cuda.Event | None:
    """What the current stream has been asked for until now."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@dataclass
class _Budget:
    """Bytes that all recordings of the process keep."""

    spent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, wanted: int) -> bool:
        with self.lock:
            if self.spent + wanted > KEPT_BYTES:
                return False
            self.spent += wanted
            return True

    def give_back(self, bytes_kept: int) -> None:
        with self.lock:
            self.spent -= bytes_kept


_BUDGET = _Budget()


class Graphed:
    """A function that is recorded when it is called for the second time with tensors of the same kind, and from then on
    replayed. It gives what the function gives; where a recording is not possible, it is the function.

    The function takes tensors and then fixed things by name, gives a tuple of tensors, and does the same steps whatever
    the numbers are: no question to the device, no random numbers, nothing that it changes of what it is given.
    ``held`` are tensors that come after those given and are the same ones from call to call: they are not copied.
    """

    def __init__(self, function: Function, recorder: Recorder | None = None, budget: _Budget | None = None) -> None:
        self.function = function
        self.recorder: Recorder = CudaRecorder() if recorder is None else recorder
        self.budget = _BUDGET if budget is None else budget
        self._known: dict[Hashable, _Kept | bool] = {}  # True: seen once; False: never to be recorded
        self._lock = threading.Lock()

    def __call__(self, *given: Tensor, held: Sequence[Tensor] = (), **fixed: Hashable) -> tuple[Tensor, ...]:
        """What the function gives, in tensors that are the caller's own."""
        if not self._fits(given):
            return self.function(*given, *held, **fixed)
        kinds = tuple((one.shape, one.stride(), one.dtype, one.device) for one in (*given, *held))
        key = (kinds, tuple(one.data_ptr() for one in held), tuple(fixed.items()))
        with self._lock, torch.inference_mode(False), torch.no_grad():
            known = self._known.get(key)
            if isinstance(known, _Kept):
                try:
                    return known.run(given)
                except RuntimeError:  # such as no room to start it in; the plain way says so itself if it fails too
                    self._known[key] = False
                    self.budget.give_back(known.nbytes)
            found = self.function(*given, *held, **fixed)
            if known is True:
                self._known[key] = self._recorded(given, tuple(held), fixed) or False
            elif known is None and len(self._known) < MOST_KEYS:
                self._known[key] = True
        return found

    def _fits(self, given: Sequence[Tensor]) -> bool:
        device = given[0].device
        if any(one.requires_grad or one.device != device for one in given) or not self.recorder.serves(device):
            return False
        return sum(one.numel() * one.element_size() for one in given) <= GIVEN_BYTES

    def _recorded(self, given: Sequence[Tensor], held: tuple[Tensor, ...], fixed: dict[str, Hashable]) -> _Kept | None:
        """A recording, just after the function itself has run: libraries have then set up what they need."""
        device = given[0].device
        try:
            inputs = tuple(torch.empty_like(one).copy_(one) for one in given)
            recording = self.recorder.record(lambda: self.function(*inputs, *held, **fixed), device)
        except Exception:  # of the driver, the allocator or a step that cannot be recorded: it stays as it was
            return None
        kept = _Kept(inputs, held, recording)
        return kept if self.budget.take(kept.nbytes) else None
