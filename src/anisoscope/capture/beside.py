"""A backward pass in a thread of its own: it hardly needs Python, so something else can be done meanwhile.

What is done meanwhile must leave alone what torch has one of for all threads, such as the precision of products.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


def begun(act: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Begin ``act`` in another thread, on the stream and under the autocast of this one; the function returned waits
    for what it gives."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {"cpu", device.type}]
    cached = torch.is_autocast_cache_enabled()

    def there() -> T:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            return act()

    return _THREAD.submit(there).result
