"""The propositions as experiments with known answers: `anisoscope theory`."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from anisoscope.commands.common import long_work, report_of, source_of
from anisoscope.errors import AnisoscopeError, RunError, unknown_name

if TYPE_CHECKING:
    from anisoscope.runs.store import ProbeWriter, RunWriter
    from anisoscope.theory.experiment import Check, Experiment, Outcome, Series

RUNS = Path("runs")

Names = Annotated[list[str] | None, typer.Argument(help="Experiments, as --list names them. Default: all.")]
List = Annotated[bool, typer.Option("--list", help="List the experiments and run none.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**32 - 1)]
Out = Annotated[Path | None, typer.Option(help="Folder of the run. Default: a new one, runs/theory.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Run only; `anisoscope report` makes the page later.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No tables and no progress: how many agree, and where it is.")]


def theory(
    names: Names = None,
    list_: List = False,
    seed: Seed = 0,
    out: Out = None,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Watch each proposition of the theory hold on surfaces of known curvature, and see where it fails.

    `anisoscope theory --list`, `anisoscope theory chords counter-example`. Exit code 1 if a number is off its truth.
    """
    console = Console()
    if list_:
        console.print(list_table(listed(names or ())))
        return
    long_work()
    from anisoscope.runs.files import DATABASE
    from anisoscope.runs.provenance import provenance
    from anisoscope.runs.store import RunWriter
    from anisoscope.theory.registry import choose_experiments

    chosen = choose_experiments(names or ())
    folder = out or _new_run()
    if (folder / DATABASE).exists():
        raise RunError(f"{folder} already holds a run; choose another folder")
    recipe = {"theory": {"experiments": [one.name for one in chosen], "seed": seed}}
    off, judged, failed = 0, 0, 0
    origin = provenance(seeds=(seed,))
    with (
        RunWriter.create(folder, recipe=recipe, provenance=origin) as writer,
        progress(console, chosen, quiet) as begin,
    ):
        for one in chosen:
            begin(one)
            outcome = run_one(writer, one, seed)
            if isinstance(outcome, Exception):
                failed += 1
                _line(console, f"{one.name}: failed: {type(outcome).__name__}: {outcome}")
                continue
            off += len(outcome.off)
            judged += sum(check.truth is not None for check in outcome.checks)
            if not quiet:
                console.print(check_table(one, outcome))
                for words in (one.question, *outcome.notes):
                    console.print(Padding(Text(words, style="dim"), (0, 2)))
                console.print()
    _line(console, f"{judged - off} of {judged} numbers agree with the truth, within 5 standard errors (se)")
    _line(console, f"run:     {folder}")
    if not no_report:
        try:
            report_of(console, [folder], folder / "report.html")
        except AnisoscopeError as error:  # the numbers are safe, and a page can be made of them at any time
            _line(console, f"no report: {error}")
    if off or failed:
        raise typer.Exit(1)


def run_one(writer: RunWriter, experiment: Experiment, seed: int) -> Outcome | Exception:
    """Run an experiment and store it as one probe; why, where it failed, which is stored too."""
    began = time.perf_counter()
    head = {"kind": "theory", "title": experiment.title, "question": experiment.question, "seed": seed}
    try:
        with one_thread():
            outcome = experiment.run(seed)
    except Exception as error:
        with writer.probe(step=0, cell=experiment.name, info=head | {"truths": [], "notes": []}) as probe:
            probe.fail(site="experiment", measure=experiment.name, slice="all", error=error)
        return error
    seconds = time.perf_counter() - began
    info = head | {
        "notes": list(outcome.notes),
        "run_seconds": seconds,
        "truths": [truth_of(c) for c in outcome.checks],
    }
    with writer.probe(step=0, cell=experiment.name, info=info) as probe:
        for check in outcome.checks:
            probe.add_estimate(_noted(check), site=check.site, measure=check.measure, slice=check.slice)
        for series in outcome.series:
            _add_series(probe, series)
    return outcome


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: many small steps gain nothing from more, and sums then do not depend on their number."""
    from anisoscope.stats.precision import threads

    with threads(1):
        yield


def truth_of(check: Check) -> dict[str, Any]:
    """What is known of a check beside its estimate, as the store keeps it."""
    return {
        "site": check.site,
        "measure": check.measure,
        "slice": check.slice,
        "truth": check.truth,
        "tolerance": check.tolerance,
        "agrees": check.agrees(),
    }


def _noted(check: Check) -> Any:
    if check.truth is None:
        return check.estimate
    return replace(check.estimate, notes=(f"truth {check.truth:.6g}", *check.estimate.notes))


def _add_series(probe: ProbeWriter, series: Series) -> None:
    """The points as a curve, and the law as another one beside it."""
    from anisoscope.runs.records import Curve
    from anisoscope.views.theory import LAW

    place: dict[str, Any] = {
        "run": probe.run,
        "step": probe.step,
        "cell": probe.cell,
        "site": series.site,
        "slice": series.slice,
        "x_label": series.x_label,
        "y_label": series.y_label,
    }
    probe.add_curve(Curve(**place, name=series.name, x=series.x, y=series.y, stderr=series.stderr))
    if series.law is not None:
        probe.add_curve(Curve(**place, name=series.name + LAW, x=series.x, y=series.law))


def check_table(experiment: Experiment, outcome: Outcome) -> Table:
    """Truth beside estimate, one number a line, under the surface and the slice it belongs to."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=escape(f"{experiment.title} ({experiment.name})"),
        title_justify="left",
        title_style="bold",
    )
    table.add_column("number", min_width=24)
    for name in ("truth", "estimate", "± stderr", "off by", ""):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for check in outcome.checks:
        place = check.site if check.slice == "all" else f"{check.site}, {check.slice}"
        if place != last:
            table.add_row(f"[bold]{escape(place)}[/]")
        last, e = place, check.estimate
        table.add_row(
            f"  {escape(check.measure)}",
            "" if check.truth is None else f"{check.truth:.5g}",
            f"{e.value:.5g}",
            "none" if e.stderr is None else f"{e.stderr:.2g}",
            _distance(check),
            "" if check.truth is None else "[green]ok[/]" if check.agrees() else "[red]off[/]",
        )
    return table


def _distance(check: Check) -> str:
    if check.truth is None:
        return ""
    if check.z is not None:
        return f"{round(check.z, 1) + 0.0:+.1f} se"  # + 0.0: no minus before a zero
    miss = check.estimate.value - check.truth
    return f"{miss / check.truth:+.1e}" if check.truth else f"{miss:+.1e}"


@dataclass(frozen=True, slots=True)
class Listed:
    """An experiment as `--list` tells of it."""

    name: str
    question: str
    seconds: float


def listed(names: Sequence[str] = ()) -> tuple[Listed, ...]:
    """What ``registry.choose_experiments`` would choose, read from the sources without running them (no torch)."""
    known: dict[str, Listed] = {}
    for node in ast.walk(ast.Module(source_of("theory.registry"), [])):
        if isinstance(node, ast.Starred):  # *chords.EXPERIMENTS, in reading order
            module = ast.unparse(node.value).removesuffix(".EXPERIMENTS")
            known |= {one.name: one for one in _stated(module)}
    for name in names:
        if name not in known:
            raise unknown_name("experiment", name, known)
    return tuple(one for name, one in known.items() if not names or name in names)


def _stated(module: str) -> Iterator[Listed]:
    """The experiments in the table at the end of a module."""
    for node in source_of(f"theory.{module}"):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            for call in node.value.elts if ast.unparse(target) == "EXPERIMENTS" else ():
                if isinstance(call, ast.Call):  # Experiment(name, title, question, run, seconds)
                    name, _, question, _, seconds = call.args
                    yield Listed(*(ast.literal_eval(part) for part in (name, question, seconds)))


def list_table(experiments: Sequence[Listed]) -> Table:
    """Names, questions and about how long each takes."""
    table = Table(box=box.SIMPLE_HEAD, title="Experiments", title_justify="left", title_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("question")
    table.add_column("about", justify="right", no_wrap=True)
    for one in experiments:
        table.add_row(escape(one.name), escape(one.question), f"{one.seconds:.0f} s")
    return table


@contextmanager
def progress(console: Console, experiments: Sequence[Experiment], quiet: bool) -> Iterator[Any]:
    """A bar that says which experiment is under way; gives the function to call at the begin of each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
        task = bars.add_task("starting", total=len(experiments))
        started = False

        def begin(one: Experiment) -> None:
            nonlocal started
            bars.update(task, description=escape(f"{one.title}, about {one.seconds:.0f} s"), advance=int(started))
            started = True

        yield begin


def _new_run() -> Path:
    folder, number = RUNS / "theory", 2
    while folder.exists():
        folder, number = RUNS / f"theory-{number}", number + 1
    return folder


def _line(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)
