"""The command line. Exit codes: 0 done, 1 off the truth, every training failed, or a bug; 2 bad input."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress

from anisoscope import __version__
from anisoscope.commands import data
from anisoscope.commands import profile as looking
from anisoscope.commands import theory as known
from anisoscope.commands import train as training
from anisoscope.commands.common import long_work, measure_lines
from anisoscope.errors import AnisoscopeError, OptionError

app = typer.Typer(
    help="The geometry of learning in language models, with honest error bars.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(data.app, name="data")
for command in (
    training.demo,
    looking.profile,
    training.train,
    looking.sweep,
    looking.compare,
    looking.report,
    looking.export,
    known.theory,
):
    app.command()(command)


@app.callback()
def _root() -> None:
    """The geometry of learning in language models, with honest error bars."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def truth(
    rows: Annotated[int, typer.Option(help="Rows in each cloud.", min=512)] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the clouds.", min=0)] = 0,
    svg: Annotated[Path | None, typer.Option(help="Also save the tables as a picture.")] = None,
) -> None:
    """Run every measure over data of known geometry and print truth beside estimate."""
    long_work()
    from anisoscope.demo import cases, run_demo
    from anisoscope.views.tables import truth_table

    console = Console(record=svg is not None)
    checks = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases(rows, seed)))
        for check in run_demo(rows, seed):
            checks.append(check)
            progress.update(task, advance=1, description=check.record.measure.strip())
    for site, group in groupby(checks, key=lambda check: check.record.site):
        console.print(truth_table(site, list(group)))
    good = sum(check.agrees for check in checks)
    console.print(
        f"{good} of {len(checks)} agree with the truth: within 4 standard errors (se), or within the bias that "
        "docs/measures.md states.\nTry your own: anisoscope measure FILE.npy two_nn spectral_ratio"
    )
    if svg is not None:
        _save(console, svg)
    if good < len(checks):
        raise typer.Exit(1)


@app.command()
def measures() -> None:
    """List the measures with one line on each."""
    for name, line in measure_lines():
        typer.echo(f"{name:<24}{line}")


@app.command()
def measure(
    file: Annotated[Path, typer.Argument(help="A .npy file of rows; the last axis is the width.")],
    names: Annotated[list[str], typer.Argument(help="Measures, as `anisoscope measures` lists them.")],
    seed: Annotated[int, typer.Option(help="Seed of samples and landmarks.", min=0)] = 0,
) -> None:
    """Measure the rows of a file, with error bars. Large files are read in one pass and never held in memory."""
    if "linearity" in names:
        raise OptionError("linearity compares two layers: call anisoscope.linearity(rows, next_rows) from Python")
    rows = _open(file)  # first: what cannot be read is told before torch is imported
    long_work()
    import anisoscope
    from anisoscope.views.tables import estimate_table

    table = anisoscope.measure(rows, names, seed=seed)
    Console().print(estimate_table(table, str(file)))


def _save(console: Console, svg: Path) -> None:
    # rich asks for a font from the net; the picture must open offline, and any monospaced font will do
    text = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="anisoscope truth"), flags=re.DOTALL)
    try:
        svg.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {svg}: {error.strerror}") from error


def _open(file: Path):  # type: ignore[no-untyped-def]
    import numpy as np

    if not file.is_file():
        raise OptionError(f"no such file: {file}")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        # Of a file that is no array numpy only says how to unpickle it, which would run whatever is in it.
        why = "numpy.save writes one" if "allow_pickle" in str(error) else error
        raise OptionError(f"{file} is not a .npy file of numbers: {why}") from error
    if not isinstance(array, np.ndarray):
        raise OptionError(f"{file} is an archive, not a .npy file of one array; save the array by itself with np.save")
    return array


def main() -> None:
    """Run the command that the arguments name: bad input becomes one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without ± gets a question mark, not a traceback
            stream.reconfigure(errors="replace")
    try:
        app()
    except AnisoscopeError as error:
        print("anisoscope:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def program() -> NoReturn:
    """The program itself, which ends with its process."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        leave(ended.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process, soon: to take apart all that torch and transformers have made takes Python most of a second.

    Threads are waited for and functions registered for the end are called, in Python's own order, what was said is
    written, and the system takes the rest. What C libraries have registered is not called.
    """
    if "torch" in sys.modules and not _is_watched():
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, which Python knows how to say
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(code)
    sys.exit(code)


def _is_watched() -> bool:
    """Whether a profiler or a tracer is at work, which has something to say at the end."""
    tools = getattr(sys, "monitoring", None)  # from Python 3.12 on
    found = tools is not None and any(tools.get_tool(number) for number in range(6))
    return found or sys.getprofile() is not None or sys.gettrace() is not None


if __name__ == "__main__":
    program()
