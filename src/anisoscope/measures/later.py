"""Work on a GPU that is asked for now and waited for later: decompositions beside other work, one transfer for many."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.meanwhile import cores
from anisoscope.measures.leading import Leading, begin_leading, can_lead
from anisoscope.stats.precision import threads

T = TypeVar("T")

CORES = cores()
ENOUGH_CORES = 8  # from here on the host decomposes many matrices sooner than a GPU, which takes one after another
HOST_WIDTH = 512  # up to here: a core falls behind as the cube of the width

_POOL = ThreadPoolExecutor(max(1, min(CORES - 1, 16)), thread_name_prefix="anisoscope-eigh")
_GPU = ThreadPoolExecutor(1, thread_name_prefix="anisoscope-eigh-gpu")


@contextlib.contextmanager
def one_thread_each(device: torch.device) -> Iterator[None]:
    """Inside, a decomposition on the host keeps to its own thread, so that many of them do not fight over cores."""
    with threads(1 if device.type == "cuda" else torch.get_num_threads()):
        yield


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
    return (_eigh_on_host if better_on_host(matrices.shape[1]) else _eigh_on_gpu)(matrices)


def _eigh_on_host(matrices: Float[Tensor, "m d d"]) -> Callable[[], tuple[Tensor, Tensor]]:
    device = matrices.device
    given, turned = (torch.empty(matrices.shape, dtype=matrices.dtype, pin_memory=True) for _ in range(2))
    values = torch.empty(matrices.shape[:2], dtype=matrices.dtype, pin_memory=True)
    given.copy_(matrices, non_blocking=True)
    ready = torch.cuda.Event(blocking=True)  # threads that wait for it sleep
    ready.record(torch.cuda.current_stream(device))

    def work(at: int) -> None:
        ready.synchronize()
        values[at], vectors = torch.linalg.eigh(given[at])
        turned[at] = vectors.mT  # as they lie in memory

    tasks = [_POOL.submit(work, at) for at in range(len(matrices))]

    def result() -> tuple[Tensor, Tensor]:
        for task in tasks:
            task.result()
        return values.to(device, non_blocking=True), turned.to(device, non_blocking=True).mT

    return result


def _eigh_on_gpu(matrices: Float[Tensor, "m d d"]) -> Callable[[], tuple[Tensor, Tensor]]:
    device = matrices.device
    stream = side_stream("eigh", matrices)
    assert stream is not None

    def work() -> tuple[Tensor, Tensor]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            values, vectors = torch.linalg.eigh(matrices)
            return values, vectors

    task = _GPU.submit(work)

    def result() -> tuple[Tensor, Tensor]:
        found = task.result()
        rejoined(stream, device, found)
        return found

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


class Going(Generic[T]):
    """Work of which a first part is begun: ``go_on`` begins the rest, if it is not, and calling it gives the result."""

    def __init__(self, rest: Callable[[], Callable[[], T]]) -> None:
        self._rest: Callable[[], Callable[[], T]] | None = rest
        self._result: Callable[[], T] | None = None

    def go_on(self) -> None:
        """Begin the rest; what it needs is not held any longer then."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._result = rest()

    def __call__(self) -> T:
        """The result, waited for."""
        self.go_on()
        assert self._result is not None, "the rest failed when it was begun"
        return self._result()


@dataclass
class Handover:
    """What one part of the work makes of some sites for another part, which may be on another stream."""

    _given: list[tuple[Sequence[int], Tensor, torch.cuda.Event | None]] = field(default_factory=list)

    def give(self, places: Sequence[int], made: Tensor) -> None:
        """Hand over what was made of the sites at these places; nobody may write to it from here on."""
        done = torch.cuda.current_stream(made.device).record_event() if made.is_cuda else None
        self._given.append((places, made, done))

    def taken(self, count: int) -> Tensor | None:
        """What was handed over of so many sites, ready for the current stream, NaN for sites of which nothing was; None
        where there is nothing at all. It is not held any longer."""
        given, self._given = self._given, []
        for _, made, done in given:
            if done is not None:
                here = torch.cuda.current_stream(made.device)
                here.wait_event(done)
                made.record_stream(here)
        if not given or (len(given) == 1 and list(given[0][0]) == list(range(count))):
            return given[0][1] if given else None
        out = given[0][1].new_full((count, *given[0][1].shape[1:]), torch.nan)
        for places, made, _ in given:
            for place, one in zip(places, made, strict=True):
                out[place] = one
        return out


@dataclass(frozen=True)
class Answer:
    """Yes or no, on its way from the device."""

    here: Bool[Tensor, ""]
    done: torch.cuda.Event | None

    def there(self) -> bool:
        """Whether it has come; nobody waits."""
        return self.done is None or self.done.query()

    def get(self) -> bool:
        """The answer, waited for."""
        if self.done is not None:
            self.done.synchronize()
        return bool(self.here)


def answered_later(question: Bool[Tensor, ""]) -> Answer:
    """Begin to ask the device for a yes or no."""
    if question.device.type != "cuda":
        return Answer(question, None)
    here = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(question, non_blocking=True)
    return Answer(here, torch.cuda.current_stream(question.device).record_event())


def fetched(found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """All of these on the host, as float64, in one transfer."""
    return fetched_later(found)()


def fetched_later(found: Mapping[str, Tensor]) -> Callable[[], dict[str, np.ndarray]]:
    """Begin that transfer; the function returned waits for it, and not for what is begun after it."""
    shapes = {name: tuple(one.shape) for name, one in found.items()}
    there = torch.cat([one.double().reshape(-1) for one in found.values()])
    on_gpu = there.device.type == "cuda"
    here = torch.empty_like(there, device="cpu", pin_memory=True).copy_(there, non_blocking=True) if on_gpu else there
    done = torch.cuda.current_stream(there.device).record_event() if on_gpu else None

    def finish() -> dict[str, np.ndarray]:
        if done is not None:
            done.synchronize()
        flat, out, at = here.numpy(), {}, 0
        for name, shape in shapes.items():
            out[name] = flat[at : (at := at + math.prod(shape))].reshape(shape)
        return out

    return finish
