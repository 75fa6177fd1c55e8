"""A backward pass in a thread of its own: it hardly needs Python, so something else can be done meanwhile.

What is done meanwhile must leave alone what torch has one of for all threads; see ``precision.left_alone``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="anisoscope-backward")


def can_go_beside(device: torch.device) -> bool:
    """Whether a backward pass gives the same in another thread, and beside measures, which switch to full precision.

    Modes that see each operation are known to the thread that entered them alone.
    """
    return device.type == "cuda" and _is_exact() and not _is_watched()


def _is_exact() -> bool:
    """Whether products have full precision already, so that nobody who switches to it changes anything."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # another one was set through torch's newer interface, which the older one refuses to read
        return False


def _is_watched() -> bool:
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return bool(modes) or torch.is_anomaly_enabled()


def begun(act: Callable[[], T]) -> Callable[[], T]:
    """Begin ``act`` in another thread, on the streams and under the autocast of this one; the function returned, to be
    called once, waits for what it gives."""
    like_here = _Here()

    def there() -> T:
        like_here.enter()
        return act()

    under_way = [_THREAD.submit(there)]

    def result() -> T:
        task = under_way.pop()
        try:
            return task.result()
        except BaseException:
            wait([task])  # whoever interrupts the one that waits does not end what is waited for
            raise
        finally:
            del task  # an error would keep itself by its frames, and with them the graph

    return result


class _Here:
    """What torch keeps for each thread by itself, as it is in this one."""

    def __init__(self) -> None:
        kinds = ("cpu", "cuda")
        self._casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        on_gpu = torch.cuda.is_initialized()
        self._streams = [torch.cuda.current_stream(at) for at in range(torch.cuda.device_count())] if on_gpu else []
        self._device = torch.cuda.current_device() if on_gpu else None

    def enter(self) -> None:
        """The same in another thread, for good. Not by ``torch.autocast``: the outermost one of a thread empties, when
        it ends, the cache that all threads have together, and a training may be inside one of its own."""
        for kind, enabled, dtype in self._casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(False)
        for stream in self._streams:
            torch.cuda.set_stream(stream)
        if self._device is not None:
            torch.cuda.set_device(self._device)
