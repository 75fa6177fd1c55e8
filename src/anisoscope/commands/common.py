"""What commands share: the console, a progress bar, and the last lines that say where the result is."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anisoscope.errors import AnisoscopeError
from anisoscope.meanwhile import cores

COLLECT_AFTER = 1_000_000
"""New objects after which Python looks for cyclic garbage. Its own 700 makes it look a thousand times while torch and
transformers are imported, and at all they left behind several times more: a tenth of the time of a small profile. They
leave half a million objects, none of which is garbage."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # numbers of mallopt(3)
OF_ITS_OWN_BYTES = 32 << 20
"""Blocks from this size on are given back as soon as they are free: where the allocator itself ends up, in time."""
KEPT_BYTES = 512 << 20
"""Free memory that is kept for the next block. By itself the allocator gives back all but twice the largest block, and
asks for it anew a moment later: two million page faults in a profile, a fifteenth of its time."""
ALLOCATOR_WISHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
SPINS = 1000
"""Turns in which a thread of torch's looks whether the others have done their part, before it sleeps until they have.
By itself the OpenMP library looks some hundred times as long, which keeps from the processor the very thread that is
waited for wherever other processes want it: beside two of them a training took fifty times as long, in place of
three."""
FEW_CORES = 8  # measured on two; where there are many, other work may find one of its own, and nothing is changed
WAITING_WISHES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def long_work() -> None:
    """Set this process up for a command that computes for long. For commands alone: a library leaves this to others."""
    collect_less()
    keep_memory()
    wait_asleep()


def collect_less() -> None:
    """Let Python look for cyclic garbage less often. Tensors do not wait for it: they go with their last name."""
    first, *others = gc.get_threshold()
    if 0 < first < COLLECT_AFTER:  # 0 means never, which is somebody's wish
        gc.set_threshold(COLLECT_AFTER, *others)


def keep_memory() -> bool:
    """Let freed memory stay with the process. Whether the C library took the wish: glibc does, others have no such."""
    if any(name in os.environ for name in ALLOCATOR_WISHES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # All or none: trimming alone ends the allocator's own search for a good size, and a part of the memory for each
    # thread would be kept where another thread cannot have it.
    wishes = {M_MMAP_THRESHOLD: OF_ITS_OWN_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1}
    return all(mallopt(name, value) for name, value in wishes.items())


def wait_asleep() -> bool:
    """Let threads of torch's that wait for one another sleep soon. Whether it was wished: the OpenMP library of GNU,
    with which torch comes on Linux, asks for it once, when it is loaded."""
    if "torch" in sys.modules or cores() > FEW_CORES or any(name in os.environ for name in WAITING_WISHES):
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    return True


class Ticker:
    """Turns what a profile tells of itself into bars: one for the cells of a sweep, one for the step under way."""

    def __init__(self, bars: Progress, cells: int) -> None:
        self._bars = bars
        self._cells = bars.add_task("models", total=cells) if cells > 1 else None
        self._step = bars.add_task("starting", total=None)

    def step(self, what: str, done: int, total: int) -> None:
        """What is under way, and how far it is."""
        self._bars.update(self._step, description=escape(what), completed=done, total=total or None)

    def cell(self) -> None:
        """One more cell is done."""
        if self._cells is not None:
            self._bars.advance(self._cells)


@contextmanager
def ticking(console: Console, cells: int) -> Iterator[Ticker]:
    """Bars while something runs, gone when it is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield Ticker(bars, cells)


def report_of(console: Console, folders: list[Path], target: Path, figures: Path | None = None) -> None:
    """Write the report and say where it is; where the packages for it are missing, say which."""
    from anisoscope.runs.store import open_runs
    from anisoscope.views.report import write_report

    readers = open_runs(folders)
    try:
        path = write_report(readers, target, figures=figures)
    finally:
        for reader in readers:
            reader.close()
    if figures is not None:
        console.print(f"figures: {figures}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"report:  {path}  (open it in a browser; it needs no network)", markup=False, highlight=False, soft_wrap=True
    )


def split_names(names: str | None) -> tuple[str, ...] | None:
    """Names parted by commas, or None where none were given."""
    if names is None:
        return None
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if not found:
        raise AnisoscopeError("a list of names is empty; part names with commas")
    return found


PACKAGE = Path(__file__).parents[1]


def source_of(module: str) -> list[ast.stmt]:
    """The statements of a module of this package, such as "theory.chords", read and not run.

    Lists of names would otherwise import torch, which takes ten times as long as printing them.
    """
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body


def measure_lines() -> list[tuple[str, str]]:
    """Every measure in the table and ``linearity``, with the first line of what its function says of itself."""
    said, entered = {}, set()
    for path in (PACKAGE / "measures").glob("*.py"):
        for node in source_of(f"measures.{path.stem}"):
            if isinstance(node, ast.FunctionDef):
                said[node.name] = (ast.get_docstring(node) or " ").splitlines()[0]
                calls = (one for one in node.decorator_list if isinstance(one, ast.Call))
                entered |= {ast.literal_eval(one.args[0]) for one in calls if ast.unparse(one.func) == "register"}
    return [(name, said[name]) for name in (*sorted(entered), "linearity")]
