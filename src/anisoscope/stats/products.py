"""Products of float32 matrices on a CPU, by the library that forms them soonest."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor

from anisoscope.stats.precision import full_precision


def times_transposed(
    a: Float32[Tensor, "m k"], b: Float32[Tensor, "n k"], plus: Float32[Tensor, "n"] | None = None
) -> Float32[Tensor, "m n"]:
    """``a b^T``, with ``plus`` added to each of its rows, by oneDNN, for matrices that ``served`` has been asked of."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, plus, "none", [], "")
    return found


def served(rows: Tensor) -> bool:
    """Whether products of such rows go to oneDNN; it keeps nothing for gradients."""
    return rows.dtype == torch.float32 and rows.device.type == "cpu" and not rows.requires_grad and onednn_serves()


@cache
def onednn_serves() -> bool:
    """Whether oneDNN is there and multiplies float32 sooner than MKL, which torch asks.

    MKL takes AVX2 where a processor is not Intel's, and oneDNN AVX-512. One product of whole numbers, which nothing
    rounds, must agree.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or processor_maker() != "AuthenticAMD":
        return False
    a = torch.arange(35 * 48, dtype=torch.float32).reshape(35, 48) % 11
    b = torch.arange(21 * 48, dtype=torch.float32).reshape(21, 48) % 7
    try:
        with full_precision(a.device):  # it is asked once, wherever that may be
            return torch.equal(times_transposed(a, b), a @ b.T)
    except (AttributeError, RuntimeError, TypeError):  # another torch, or one that was built without it
        return False


def processor_maker(told: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor, as Linux tells it; nothing elsewhere."""
    try:
        lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
