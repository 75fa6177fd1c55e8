"""How a kernel is cut up: of several shapes the one that is fastest on a GPU, tried once and kept where Triton keeps
what it has built."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

FILE = "shape.json"


@dataclass(frozen=True)
class Shape:
    """Columns multiplied at a time, warps of a program, and how many stages of its loads are under way."""

    depth: int
    warps: int
    stages: int


def fastest(shapes: Sequence[Shape], seconds: Callable[[Shape], float], name: str) -> Shape:
    """The shape that takes the fewest ``seconds``; the first where none can be run.

    Kept on disk by ``name``, which says all that the answer depends on. A shape that raises, as one does that asks for
    more memory than a processor has, is passed over.
    """
    found = _kept(name, shapes)
    if found is None:
        taken = {shape: _tried(seconds, shape) for shape in shapes}
        found = min(shapes, key=taken.__getitem__)
        if math.isfinite(taken[found]):
            _keep(name, found, taken)
    return found


def _tried(seconds: Callable[[Shape], float], shape: Shape) -> float:
    try:
        return float(seconds(shape))
    except Exception:  # of the compiler, the driver or the device, each of which has errors of its own
        return math.inf


def _kept(name: str, shapes: Sequence[Shape]) -> Shape | None:
    """What was found before; None where it is none of these shapes, cannot be read or was never looked for."""
    try:
        path = _place(name).get_file(FILE)
        kept = json.loads(Path(path).read_text())["shape"] if path else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return next((one for one in shapes if list(astuple(one)) == kept), None)


def _keep(name: str, found: Shape, taken: dict[Shape, float]) -> None:
    tried = [[*astuple(one), time] for one, time in taken.items() if math.isfinite(time)]
    try:
        _place(name).put(json.dumps({"name": name, "shape": astuple(found), "seconds": tried}), FILE, binary=False)
    except (OSError, RuntimeError):  # a folder that cannot be written: tried again by the next process
        return


def _place(name: str) -> Any:
    cache = importlib.import_module("triton.runtime.cache")
    return cache.get_cache_manager(hashlib.sha256(name.encode()).hexdigest())
