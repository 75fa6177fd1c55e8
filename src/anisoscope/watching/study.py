"""A whole study: every model of a recipe for every seed, one after another, watched, in one run folder.

The store of the run holds the looks, ``cells/<model>-s<seed>/`` metrics and checkpoints of each training. A training
that diverges or fails is told there and the others go on; a study that was stopped goes on bit for bit on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError, RunError
from anisoscope.models.build import build_model
from anisoscope.monitoring.measuring import MODEL
from anisoscope.runs.files import RECIPE, read_mapping
from anisoscope.runs.provenance import provenance
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.slices import ALL
from anisoscope.train.checkpoints import checkpoints_in, newest_resumable, step_folder
from anisoscope.train.data import TrainingData, prepare
from anisoscope.train.languages import LanguageChange
from anisoscope.train.loop import TRAINING_FILE, Progress, resolve_device, train
from anisoscope.train.metrics import METRICS, read_metrics
from anisoscope.train.observers import Setting
from anisoscope.train.optimise import make_optimiser
from anisoscope.train.recipe import Recipe, TokenizerSpec, VariantSpec, changes_frequency, read_recipe_values
from anisoscope.watching.watcher import Watcher

CELLS = "cells"
TRAINING = "training"
"""Stands for the measure where a training itself failed."""
FAILED, FINISHED, PAUSED, WAITING = "failed", "finished", "paused", "not begun"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training of a study: a model for a seed, its name in the store and its folder."""

    variant: VariantSpec
    seed: int
    name: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """How a training of a study stands. ``status`` is "finished", "paused", "diverged", "failed" or "not begun"."""

    cell: Cell
    status: str
    step: int = 0
    parameters: int | None = None
    tokens: int = 0
    loss: float | None = None
    val_loss: float | None = None
    seconds: float = 0.0
    """In training and looks; without validation and checkpoints."""
    looks: int = 0
    look_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def look_share(self) -> float:
        """The share of the seconds that went into looks."""
        return self.look_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class News:
    """One update was done: where, how far, and the geometry of a middle layer at the last look."""

    cell: Cell
    progress: Progress
    geometry: str
    looks: int


DataKey = tuple[TokenizerSpec, LanguageChange | None]
"""What tells the data of two models of a recipe apart."""
Data = Mapping[DataKey, TrainingData]


def cells_of(recipe: Recipe, folder: Path) -> tuple[Cell, ...]:
    """The trainings of a recipe in their order; with one seed a cell has the name of its model alone."""
    return tuple(
        Cell(
            variant=variant,
            seed=seed,
            name=variant.name if len(recipe.seeds) == 1 else f"{variant.name} seed {seed}",
            folder=folder / CELLS / f"{variant.name}-s{seed}",
        )
        for variant in recipe.models
        for seed in recipe.seeds
    )


def prepare_all(recipe: Recipe) -> dict[DataKey, TrainingData]:
    """The data of every model, prepared once for each tokenizer and language."""
    return {key: prepare(recipe.data, *key) for key in dict.fromkeys(_key(recipe, model) for model in recipe.models)}


def check_study(recipe: Recipe, folder: Path, data: Data) -> None:
    """Whatever could not be trained or looked at is told here, before a file is written."""
    resolve_device(recipe.device)
    for cell in cells_of(recipe, folder):
        if cell.seed != recipe.seeds[0] or recipe.monitor is None:
            continue
        own = _data_of(recipe, cell, data)
        if changes_frequency(recipe):
            own = own.with_frequency(cell.variant.frequency, cell.variant.objective)
        # On the CPU: it is looked at and let go, and a GPU has nothing to do with what sites a model has.
        model = build_model(cell.variant.model(own.vocab_size, recipe.data.sequence_length), cell.seed)
        setting = Setting(
            model=model,
            optimiser=make_optimiser(model, recipe.optimisation),
            data=own,
            recipe=recipe,
            variant=cell.variant,
            seed=cell.seed,
            folder=cell.folder,
            device=torch.device("cpu"),
            step=0,
        )
        try:
            Watcher(recipe.monitor).build(setting).close()
        except AnisoscopeError as error:
            raise type(error)(f"model {cell.variant.name}: {error}") from None


def run_study(
    recipe: Recipe,
    folder: str | Path,
    *,
    data: Data | None = None,
    resume: bool = False,
    on_cell: Callable[[Cell], None] | None = None,
    on_news: Callable[[News], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[CellResult]:
    """Train every cell of a recipe into the run at ``folder``, watched as the recipe says; how each one ended.

    With ``resume`` finished cells are left alone and the others go on. ``stop`` is asked after each update whether to
    end here, with a checkpoint.
    """
    place = Path(folder)
    check_folder(place, resume)
    if resume:
        same_recipe(place, recipe)
    data = data or prepare_all(recipe)
    check_study(recipe, place, data)
    corpora = [one.corpus for one in data.values()]
    origin = provenance(
        seeds=recipe.seeds,
        device=str(resolve_device(recipe.device)),
        corpus=corpora[0] if len(corpora) == 1 else corpora,
        model=recipe.name,
    )
    exist = "resume" if resume else "error"
    halt = stop or (lambda: False)
    results = []
    with RunWriter.create(
        place, recipe=None if resume else recipe.describe(), provenance=origin, exist=exist
    ) as writer:
        for cell in cells_of(recipe, place):
            if halt():
                results.append(CellResult(cell=cell, status=WAITING))
                continue
            if on_cell is not None:
                on_cell(cell)
            results.append(_train_cell(recipe, cell, _data_of(recipe, cell, data), writer, on_news, halt))
    with RunReader(place) as reader:
        return [_with_looks(result, reader) for result in results]


def check_folder(folder: Path, resume: bool) -> None:
    """A new run needs a new folder, and one that goes on needs an old one."""
    has_run = (folder / RECIPE).exists()
    if resume and not has_run:
        raise RunError(f"{folder} holds no run to go on with; start one without --resume")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        what = "already holds a run; go on with --resume, or" if has_run else "is not empty;"
        raise RunError(f"{folder} {what} choose another folder")


def same_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse to go on with another recipe than the run has; where it is trained may differ."""
    before, now = (dict(_flat(one.describe())) for one in (read_recipe_values(read_mapping(folder / RECIPE)), recipe))
    for key in dict.fromkeys((*before, *now)):
        if key not in ("device", "about") and before.get(key) != now.get(key):
            raise RunError(
                f"{folder} was begun with {key} = {before.get(key)}, not {now.get(key)}; give the same, or "
                "choose another folder"
            )


def _flat(values: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    inner = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) and values else ()
    )
    if not inner:
        yield at, values
    for key, value in inner:
        yield from _flat(value, f"{at}.{key}".lstrip("."))


def _data_of(recipe: Recipe, cell: Cell, data: Data) -> TrainingData:
    return data[_key(recipe, cell.variant)]


def _key(recipe: Recipe, variant: VariantSpec) -> DataKey:
    return variant.tokenizer or recipe.data.tokenizer, variant.language


def _train_cell(
    recipe: Recipe,
    cell: Cell,
    data: TrainingData,
    writer: RunWriter,
    on_news: Callable[[News], None] | None,
    stop: Callable[[], bool],
) -> CellResult:
    """One training, whatever comes of it."""
    if step_folder(cell.folder, recipe.optimisation.steps).exists():
        return _finished(cell)
    watcher = None if recipe.monitor is None else Watcher(recipe.monitor, writer, cell.name)

    def tell(progress: Progress) -> None:
        if on_news is not None:
            words, looks = ("", 0) if watcher is None else (watcher.geometry(), watcher.looks)
            on_news(News(cell=cell, progress=progress, geometry=words, looks=looks))

    try:
        ended = train(
            recipe,
            cell.variant,
            cell.seed,
            folder=cell.folder,
            observers=[] if watcher is None else [watcher],
            resume=_can_go_on(cell),
            progress=tell,
            data=data,
            stop=stop,
        )
    except Exception as error:  # out of memory, a full disk: the other trainings go on
        words = f"{type(error).__name__}: {error}"
        _tell_failure(writer, f"{cell.name} (failed)", 0, words, cell)
        return CellResult(cell=cell, status=FAILED, notes=(words,))
    if ended.status == "diverged":
        _tell_failure(writer, cell.name, ended.step + 1, ended.notes[0], cell)
    return CellResult(
        cell=cell,
        status=ended.status,
        step=ended.step,
        parameters=ended.parameters,
        tokens=ended.tokens,
        loss=ended.loss,
        val_loss=ended.val_loss,
        seconds=ended.seconds,
        notes=(*ended.notes, *(watcher.problems if watcher is not None else ())),
    )


def _can_go_on(cell: Cell) -> bool:
    """Whether there is a checkpoint to go on from. Where a training was stopped before its first, it begins again."""
    if not (cell.folder / METRICS).exists() and not checkpoints_in(cell.folder):
        return False
    try:
        newest_resumable(cell.folder)
    except RunError:
        if checkpoints_in(cell.folder):
            raise
        for name in (METRICS, TRAINING_FILE):
            (cell.folder / name).unlink(missing_ok=True)
        return False
    return True


def _tell_failure(writer: RunWriter, name: str, step: int, words: str, cell: Cell) -> None:
    """A failed training is a failure in the store, at a step of its own."""
    taken = {at for one, at in writer.done() if one == name}
    while step in taken:
        step += 1
    info = {"variant": cell.variant.name, "model": cell.variant.name, "seed": cell.seed}
    with writer.probe(step=step, cell=name, info=info) as probe:
        probe.fail(site=MODEL, measure=TRAINING, slice=ALL, error=words)


def _finished(cell: Cell) -> CellResult:
    """A training that was over before, from its files."""
    lines = read_metrics(cell.folder)
    about = json.loads((cell.folder / TRAINING_FILE).read_text(encoding="utf-8"))
    validated = [line["val_loss"] for line in lines if line.get("val_loss") is not None]
    last = lines[-1]
    return CellResult(
        cell=cell,
        status=FINISHED,
        step=last["step"],
        parameters=about["parameters"],
        tokens=last["tokens"],
        loss=last.get("loss"),
        val_loss=validated[-1] if validated else None,
        seconds=last["seconds"],
    )


def _with_looks(result: CellResult, reader: RunReader) -> CellResult:
    """The same with the number of looks and their seconds, over all sessions of the run."""
    looks = [probe for probe in reader.probes() if probe.cell == result.cell.name and "seconds" in probe.info]
    # The look before the first update is not in the seconds of the steps.
    first = sum(float(probe.info["seconds"]) for probe in looks if probe.step == 0)
    return replace(
        result,
        looks=len(looks),
        look_seconds=sum(float(probe.info["seconds"]) for probe in looks),
        seconds=result.seconds + first,
    )
