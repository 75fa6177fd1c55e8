"""Lines of progress of a training: one live line for each model on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from anisoscope.watching.study import Cell, CellResult, News

PLAIN_SECONDS = 15.0
"""Between two lines where nobody watches, as in a file."""
LIVE_SECONDS = 0.1
WIDE = 110
"""Columns of a terminal that has room for the bar and the whole line."""


FIRST_ON_GPU = "building, first look (on a new machine some 15 s to compile kernels)"


class Lines:
    """What a study tells while it runs."""

    def __init__(self, console: Console, bars: Progress | None, quiet: bool, before: str = "building") -> None:
        self._console, self._bars, self._quiet, self._before = console, bars, quiet, before
        self._task: TaskID | None = None
        self._began = self._told = 0.0
        self._first = 0

    def begin(self, cell: Cell) -> None:
        """A training begins; if it was over before, nothing more is told of it."""
        self._began, self._told, self._first = time.perf_counter(), 0.0, -1
        if self._bars is not None:
            self._task = self._bars.add_task(escape(cell.name), total=None, news=self._before)

    def tell(self, news: News) -> None:
        """An update was done."""
        now, progress = time.perf_counter(), news.progress
        if self._first < 0:
            self._first, self._began = progress.step, now
        last = progress.step == progress.steps
        wait = PLAIN_SECONDS if self._bars is None else LIVE_SECONDS
        if self._quiet or (now - self._told < wait and not last):
            return
        self._told = now
        done = progress.step - self._first
        left = (now - self._began) / done * (progress.steps - progress.step) if done else None
        words = line_of(news, left, narrow=self._bars is not None and self._console.width < WIDE)
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=progress.step, total=progress.steps, news=escape(words))
        else:
            self._console.print(f"{news.cell.name}  {words}", markup=False, highlight=False, soft_wrap=True)


def line_of(news: News, seconds_left: float | None, narrow: bool = False) -> str:
    """How far a training is, in one line; the most telling half of it where there is no room."""
    p = news.progress
    parts = [f"{p.step:>{len(str(p.steps))}}/{p.steps}", f"loss {p.loss:.3f}"]
    if p.val_loss is not None and not narrow:
        old = "" if p.val_step == p.step else f" (step {p.val_step:,})"
        parts.append(f"val {p.val_loss:.3f}{old}")
    if not narrow:
        parts.append(f"{p.tokens_per_second:,.0f} tok/s")
    if p.step < p.steps and seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    if news.geometry:
        parts.append(news.geometry)
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """``0:07``, ``12:40``, ``3:05:00``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def results_table(name: str, results: Sequence[CellResult]) -> Table:
    """How each training ended and what it cost."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=escape(name),
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("model", overflow="fold")  # a name may take two lines; a number that is cut says nothing
    table.add_column("", no_wrap=True)
    for column in ("weights", "updates", "tokens", "loss", "val", "seconds", "looks"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in results:
        style = {"finished": "green", "diverged": "red", "failed": "red"}.get(one.status, "yellow")
        numbers = [""] * 6
        if one.parameters is not None:
            losses = ["" if loss is None else f"{loss:.3f}" for loss in (one.loss, one.val_loss)]
            counts = [short(one.parameters), f"{one.step:,}", short(one.tokens)]
            numbers = [*counts, *losses, f"{one.seconds:,.1f}"]
        looks = f"{one.looks} ({one.look_share:.0%})" if one.looks else ""
        table.add_row(escape(one.cell.name), f"[{style}]{one.status}[/]", *numbers, looks)
    if any(one.looks for one in results):
        table.caption = "looks: how many, and their share of the seconds"
        table.caption_justify = "left"
    return table


def short(number: int) -> str:
    """``640``, ``61.4 k``, ``1.06 M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


class _Above(logging.Handler):
    """Warnings of looks as lines above the bars, which a plain handler would tear."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextlib.contextmanager
def training_lines(console: Console, quiet: bool, *, compiles: bool = False) -> Iterator[Lines]:
    """Lines of progress while a study runs; what the monitor warns of stands above them.

    ``compiles``: the first look of each process may have kernels to make, and would seem to hang.
    """
    logger = logging.getLogger("anisoscope.monitor")
    handler = _Above(lambda words: console.print(words, markup=False, highlight=False, style="yellow", soft_wrap=True))
    passed_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        if quiet or not console.is_terminal:
            yield Lines(console, None, quiet)
            return
        text = TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        columns = [name, BarColumn(bar_width=16), text] if console.width >= WIDE else [name, text]
        with Progress(*columns, console=console) as bars:
            yield Lines(console, bars, quiet, FIRST_ON_GPU if compiles else "building")
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on
