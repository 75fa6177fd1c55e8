"""Metrics of a training: one JSON line a step, appended and never rewritten."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from anisoscope.runs.files import explained

METRICS = "metrics.jsonl"


class MetricsWriter:
    """Appends lines to ``metrics.jsonl``; each is on its way to the disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def __enter__(self) -> MetricsWriter:
        with explained(self.path):
            torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
            self._file = open(self.path, "a", encoding="utf-8")
            if torn and self.path.stat().st_size:
                self._file.write("\n")  # a run was killed in the middle of a line
        return self

    def write(self, *, step: int, tokens: int, **values: Any) -> None:
        """One line. A number that is not finite is written as null, as JSON has no other word for it."""
        assert self._file is not None  # used as a context
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        with explained(self.path):
            self._file.write(json.dumps({"step": step, "tokens": tokens} | clean, allow_nan=False) + "\n")
            self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run by step. Where a run was resumed, the later line of a step counts; a torn one is left out."""
    path = Path(folder) / METRICS
    with explained(path, reading=True):
        lines = path.read_text(encoding="utf-8").splitlines()
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found[values["step"]] = values
    return [found[step] for step in sorted(found)]
