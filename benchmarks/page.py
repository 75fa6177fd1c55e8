"""What pages of benchmarks have in common: the one table at their head, and words for the machine."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HEAD = ("what", "ours", "alternative", "its time", "ratio", "limit", "its time", "ours / limit", "error of ours")


@dataclass(frozen=True)
class Line:
    """One hot path beside one alternative and beside work that every way has to do, in seconds."""

    what: str
    ours: float
    alternative: str = ""
    taken: float | None = None
    limit: str = ""
    least: float | None = None
    error: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """As they stand in the table."""
        ratio = "" if self.taken is None else f"{self.taken / self.ours:.1f}x"
        share = "" if self.least is None else f"{self.ours / self.least:.2f}"
        error = "" if self.error is None else f"{self.error:.0e}"
        return (self.what, seconds(self.ours), self.alternative, seconds(self.taken), ratio, self.limit,
                seconds(self.least), share, error)  # fmt: skip


def summary(lines: Sequence[Line]) -> list[str]:
    """All of them in one table."""
    rows = ["| " + " | ".join(line.cells) + " |" for line in lines]
    return ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *rows]


def seconds(value: float | None) -> str:
    """Three digits; milliseconds below a second. Nothing where there is no value."""
    if value is None:
        return ""
    number, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def processor() -> str:
    """Its name, where Linux tells."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def machine(threads: int, dadapy: str | None) -> str:
    """Day, processor and versions; ``dadapy`` is the Python that has it."""
    packages = [f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "scipy", "scikit-dimension"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if dadapy:
        code = "from importlib.metadata import version; print(version('dadapy'))"
        said = subprocess.run([dadapy, "-c", code], capture_output=True, text=True, check=False)
        packages.append(f"dadapy {said.stdout.strip()}")
    return f"{date.today()}, {processor()}, {threads} threads. {', '.join(packages)}."
