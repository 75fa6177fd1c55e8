"""Commands that train: `train RECIPE`, and `demo`, which trains a small decoder and a small encoder."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from anisoscope.commands.common import long_work, report_of, split_names
from anisoscope.errors import AnisoscopeError, OptionError, RunNotFoundError, UnknownNameError, choose

if TYPE_CHECKING:
    from anisoscope.train.recipe import Recipe
    from anisoscope.watching.study import CellResult

RUNS = Path("runs")
DEMO = "demo"
MOST_NOTES = 3
INTERRUPTED = 130  # as shells count a process that Ctrl-C ended

RecipeName = Annotated[
    str,
    typer.Argument(help="Name of a recipe of the package, or a YAML file; with --resume also the folder of a run."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run. Default: a new one under runs/.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the recipe: --set optimisation.lr=0.001 --set models.decoder.width=64"),
]
Seeds = Annotated[str | None, typer.Option(help="Seeds parted by commas, in place of those of the recipe.")]
Models = Annotated[str | None, typer.Option(help="Only these models of the recipe, parted by commas.")]
Steps = Annotated[int | None, typer.Option(help="Updates, with the warm-up in proportion.", min=1)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
NoMonitor = Annotated[bool, typer.Option("--no-monitor", help="Train without looking.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... in place of the recipe's.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No lines of progress.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Train only; `anisoscope report` makes the page later.")]


def train(
    recipe: RecipeName,
    out: Out = None,
    change: Changes = None,
    seeds: Seeds = None,
    models: Models = None,
    steps: Steps = None,
    resume: Resume = False,
    no_monitor: NoMonitor = False,
    device: Device = None,
    quiet: Quiet = False,
    no_report: NoReport = False,
) -> None:
    """Train the models of a recipe from scratch, watch their geometry form, and write the report.

    `anisoscope train demo`, `anisoscope train mine.yaml --out runs/mine`, `anisoscope train runs/mine --resume`.
    """
    long_work()
    from anisoscope.train.recipe import load_recipe

    if resume and Path(recipe).is_dir():
        chosen, folder = recipe_of_run(Path(recipe)), out or Path(recipe)
    else:
        try:
            chosen = load_recipe(recipe)
        except UnknownNameError:
            if resume:
                words = f"there is no run at {recipe} to go on with, nor a recipe of this name; give its folder"
                raise RunNotFoundError(words) from None
            raise
        folder = out or (_newest_run(chosen.name) if resume else _new_run(chosen.name))
    chosen = changed(chosen, change or (), seeds=seeds, models=models, steps=steps, device=device)
    if no_monitor:
        chosen = chosen.model_copy(update={"monitor": None})
    _go(chosen, folder, resume=resume, quiet=quiet, no_report=no_report)


def demo(
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Train a small decoder and a small encoder on text that every Python has, and write the report of what formed.

    About three minutes on two cores. For every measure on data of known geometry: `anisoscope truth`.
    """
    train(DEMO, out=out, resume=resume, quiet=quiet)


def changed(
    recipe: Recipe,
    sets: Sequence[str],
    *,
    seeds: str | None = None,
    models: str | None = None,
    steps: int | None = None,
    device: str | None = None,
) -> Recipe:
    """The recipe with what the command line says in place of its own values."""
    from anisoscope.train.recipe import override

    changes: dict[str, Any] = {}
    if steps is not None:
        plan = recipe.optimisation
        changes["optimisation.steps"] = steps
        changes["optimisation.warmup_steps"] = min(round(plan.warmup_steps * steps / plan.steps), steps)
    if seeds is not None:
        changes["seeds"] = [_whole(seed) for seed in split_names(seeds) or ()]
    if device is not None:
        changes["device"] = device
    names = [model.name for model in recipe.models]
    for name in split_names(models) or ():
        choose("model of the recipe", name, names)
    recipe = override(recipe, changes | dict(_parsed(one) for one in sets)) if changes or sets else recipe
    if models is not None:
        kept = [model for model in recipe.describe()["models"] if model["name"] in (split_names(models) or ())]
        recipe = override(recipe, {"models": kept})
    return recipe


def recipe_of_run(folder: Path) -> Recipe:
    """The recipe that a run was begun with."""
    from anisoscope.runs.files import RECIPE, read_mapping
    from anisoscope.train.recipe import read_recipe_values

    values = read_mapping(folder / RECIPE)
    if "optimisation" not in values:
        raise OptionError(f"{folder} holds no training to go on with")
    return read_recipe_values(values, str(folder / RECIPE))


def _parsed(given: str) -> tuple[str, Any]:
    import yaml

    key, sign, value = given.partition("=")
    if not sign or not key.strip():
        raise OptionError(f"--set {given}: give KEY=VALUE, such as optimisation.lr=0.001")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise OptionError(f"--set {given}: {value!r} is not a YAML value; quote lists and mappings") from None


def _whole(seed: str) -> int:
    try:
        return int(seed)
    except ValueError:
        raise OptionError(f"--seeds: {seed!r} is not a whole number; give them like 0,1,2") from None


def _new_run(name: str) -> Path:
    folder, number = RUNS / name, 2
    while folder.exists():
        folder, number = RUNS / f"{name}-{number}", number + 1
    return folder


def _newest_run(name: str) -> Path:
    """The run that --resume means without --out: the last one that was begun under this name."""
    folder, number = RUNS / name, 2
    while (RUNS / f"{name}-{number}").exists():
        folder, number = RUNS / f"{name}-{number}", number + 1
    return folder


def _go(recipe: Recipe, folder: Path, *, resume: bool, quiet: bool, no_report: bool) -> None:
    from anisoscope.commands.lines import results_table, training_lines
    from anisoscope.train.loop import resolve_device
    from anisoscope.watching.study import check_folder, prepare_all, run_study, same_recipe

    console = Console()
    check_folder(folder, resume)
    if resume:
        same_recipe(folder, recipe)
    on_gpu = resolve_device(recipe.device).type == "cuda"
    began = time.perf_counter()
    with console.status("reading the text and making the tokenizer"):
        data = prepare_all(recipe)
    prepared = time.perf_counter() - began
    with stopping(console) as stop, training_lines(console, quiet, compiles=on_gpu) as lines:
        results = run_study(
            recipe, folder, data=data, resume=resume, on_cell=lines.begin, on_news=lines.tell, stop=stop
        )
    console.print(results_table(recipe.name, results))
    _say(console, results)
    trained = time.perf_counter() - began - prepared
    _line(console, f"run:     {folder}  (text {prepared:.0f} s, training and looks {trained:.0f} s)")
    if not no_report and any(result.looks for result in results):
        try:
            report_of(console, [folder], folder / "report.html")
        except AnisoscopeError as error:  # the run is safe, and a page can be made of it at any time
            _line(console, f"no report: {error}")
    if any(result.status in ("paused", "not begun") for result in results):
        _line(console, f"stopped; go on with: anisoscope train {folder} --resume")
        raise typer.Exit(INTERRUPTED)
    if all(result.status in ("diverged", "failed") for result in results):
        raise typer.Exit(1)


def _say(console: Console, results: Sequence[CellResult]) -> None:
    """What went wrong, a few lines each; the store holds the rest."""
    for result in results:
        style = "red" if result.status in ("diverged", "failed") else "yellow"
        more = len(result.notes) - MOST_NOTES
        shown = [*result.notes[:MOST_NOTES], *([f"and {more} more, in the report"] if more > 0 else [])]
        for note in shown:
            console.print(f"{result.cell.name}: {note}", markup=False, highlight=False, soft_wrap=True, style=style)


def _line(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def stopping(console: Console) -> Iterator[Any]:
    """Ctrl-C inside ends the training after its step, with a checkpoint; a second one ends it at once."""
    asked = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _line(console, "stopping after this step; once more to stop at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
