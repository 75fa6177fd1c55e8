"""Sweep: profiles of many models, revisions or checkpoints in one run; resumable; one failing cell stops no other."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.engines import Engine, LocalEngine, Outcome, Progress
from anisoscope.errors import AnisoscopeError, OptionError, RunError
from anisoscope.meanwhile import Meanwhile
from anisoscope.profiling import Findings, ProfileOptions, profile_model
from anisoscope.runs.provenance import provenance, shorten
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.text.corpus import Corpus, load_corpus

if TYPE_CHECKING:
    from anisoscope.models.load import LoadedModel
    from anisoscope.text.batches import TokenBatches

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|global_step)[-_]?([0-9]+)\Z")
WHOLE_CELL = "(whole cell)"
"""Stands for site and measure where a cell failed before anything could be measured."""

SPARE_TOKENS = 1.25  # special tokens and ends of documents are not measured: so many more are prepared


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model at one time: where it comes from, and under which name and step it is entered."""

    source: str
    name: str
    step: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell with everything that a worker needs."""

    cell: Cell
    corpus: Corpus
    """The text itself and not its name: standard input can be read only once."""
    options: ProfileOptions
    run: str


def cells_of(
    sources: Iterable[str],
    *,
    revisions: Sequence[str] = (),
    trust_remote_code: bool = False,
    device: str = "cpu",
) -> tuple[Cell, ...]:
    """Cells of sources: a model each, a model at each revision, or each checkpoint folder (``step1000``) in a folder.

    A name that ends in a number of steps (``checkpoint-500``, ``step1000``) becomes a step of the series before it.
    """
    found: list[Cell] = []
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device": device}
    for source in sources:
        folders = _checkpoints(Path(source))
        if folders:
            name = shorten(str(source)).rstrip("/") or str(source)
            found += [Cell(source=str(one), name=name, step=step, **common) for step, one in folders]
        elif revisions:
            found += [
                Cell(source=source, name=source if step_of(one) is not None else f"{source}@{one}",
                     step=step_of(one) or 0, revision=one, **common)
                for one in revisions
            ]  # fmt: skip
        else:
            found.append(Cell(source=source, name=shorten(source), **common))
    places = [(cell.name, cell.step) for cell in found]
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise OptionError(f"{twice[0][0]!r} at step {twice[0][1]} was named twice; name each model once")
    if not found:
        raise OptionError("no model was named; give a name, a folder or a file")
    return tuple(found)


def step_of(name: str) -> int | None:
    """The number of steps at the end of a name of a checkpoint or a revision, or None."""
    match = STEP.search(name)
    return int(match.group(1)) if match else None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Folders inside that are checkpoints of a model, by step; none where the folder is a model itself."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return []
    steps = [(step_of(one.name), one) for one in folder.iterdir() if (one / "config.json").exists()]
    return sorted((step, one) for step, one in steps if step is not None)


def run_sweep(
    cells: Sequence[Cell],
    folder: str | Path,
    *,
    text: str | None = None,
    options: ProfileOptions | None = None,
    engine: Engine | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    on_cell: Callable[[Cell, str | None], None] | None = None,
) -> RunReader:
    """Profile every cell into the run at ``folder`` and return the run. Cells that are there already are not redone.

    A cell that fails leaves a visible failure and the others go on; where every cell fails, the first error is raised
    and no folder is left behind. ``on_cell`` is told of each finished cell, with the error that ended it or None.
    """
    options = options or ProfileOptions()
    corpus = load_corpus(text)  # here first: bad text should be told before any model is loaded or folder made
    recipe = {"profile": options.describe(), "text": corpus.name, "models": [_recipe(cell) for cell in cells]}
    origin = provenance(
        seeds=[options.seed],
        device=cells[0].device,
        corpus={"name": corpus.name, "characters": corpus.characters, "fingerprint": corpus.fingerprint},
        model=cells[0].name if len({cell.name for cell in cells}) == 1 else None,
    )
    exist = "resume" if resume else "error"
    errors: list[str] = []
    made = _to_be_made(Path(folder))
    with RunWriter.create(folder, recipe=None if resume else recipe, provenance=origin, exist=exist) as writer:
        if resume:
            _same_recipe(folder, recipe)
        done = writer.done()
        tasks = [
            Task(cell=cell, corpus=corpus, options=options, run=writer.name)
            for cell in cells
            if (cell.name, cell.step) not in done
        ]
        for outcome in (engine or LocalEngine()).run(profile_cell, tasks, progress or (lambda *_: None)):
            _store(writer, outcome)
            if outcome.error:
                errors.append(f"{outcome.task.cell.name}: {outcome.error}")
            if on_cell is not None:
                on_cell(outcome.task.cell, outcome.error)
    if errors and len(errors) == len(tasks) and not done:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise RunError(errors[0])
    return RunReader(folder)


def _to_be_made(folder: Path) -> Path | None:
    """The outermost folder that does not exist yet, which goes again where nothing at all could be measured."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    return missing[-1] if missing else None


def _recipe(cell: Cell) -> dict[str, Any]:
    return {"source": shorten(cell.source), "name": cell.name, "step": cell.step, "revision": cell.revision}


def _same_recipe(folder: str | Path, recipe: dict[str, Any]) -> None:
    with RunReader(folder) as reader:
        before = dict(reader.recipe or {})
    for key in ("profile", "text"):
        if before.get(key) != recipe[key]:
            raise RunError(
                f"{folder} was measured with {key} = {before.get(key)}, not {recipe[key]}; numbers of both would not "
                "compare: give the same, or another --run"
            )


def _store(writer: RunWriter, outcome: Outcome[Task, Findings]) -> None:
    cell = outcome.task.cell
    found = outcome.result
    info = {"model": cell.name} if found is None else dict(found.info)
    if found is None:
        # Not under its own step: the cell is still to do when the sweep is resumed.
        with writer.probe(step=_next_failure(writer, cell), cell=f"{cell.name} (failed)", info=info) as probe:
            probe.fail(site=WHOLE_CELL, measure=WHOLE_CELL, slice="all", error=outcome.error or "unknown error")
        return
    with writer.probe(step=cell.step, cell=cell.name, info=info) as probe:
        for record in found.records:
            probe.add(record)
        for failure in found.failures:
            probe.fail(site=failure.site, measure=failure.measure, slice=failure.slice, error=failure.error)
        for curve in found.curves:
            probe.add_curve(curve)


def _next_failure(writer: RunWriter, cell: Cell) -> int:
    taken = {step for name, step in writer.done() if name == f"{cell.name} (failed)"}
    step = cell.step
    while step in taken:
        step += 1
    return step


def profile_cell(task: Task, progress: Progress) -> Findings:
    """Load the model of a cell, cut the text into its batches, and profile it."""
    progress(f"loading {task.cell.name}", 0, 1)
    loaded, batches = _loaded(task)  # of the text no more is held than the batches
    options, cell = task.options, task.cell
    return profile_model(loaded, batches, options, run=task.run, step=cell.step, cell=cell.name, progress=progress)


def _loaded(task: Task) -> tuple[LoadedModel, TokenBatches]:
    """The model of a cell, and the text in its tokens, which is cut while weights are read."""
    from anisoscope.models.load import load_model
    from anisoscope.text.batches import encode, token_batches
    from anisoscope.text.tokens import HFTokenizer

    cell, options = task.cell, task.options
    with Meanwhile("text") as encoding:
        known: list[tuple[HFTokenizer, Callable[[], list[Any]]]] = []

        def begin(tokenizer: Any) -> None:  # weights are read by one thread, text is cut into tokens by the others
            ours = HFTokenizer(tokenizer)
            known.append((ours, encoding.begin(encode, task.corpus, ours)))

        loaded = load_model(
            cell.source,
            revision=cell.revision,
            trust_remote_code=cell.trust_remote_code,
            device=cell.device,
            on_tokenizer=begin,
        )
        if not known:
            raise OptionError(f"{cell.name} comes without a tokenizer; put its files beside the weights")
        (tokenizer, ids), *_ = known
        return loaded, token_batches(
            task.corpus,
            tokenizer,
            sequence_length=min(options.sequence_length, longest_sequence(loaded.model)),
            batch_size=options.sequences_per_pass,
            tokens=int(options.tokens * SPARE_TOKENS),
            seed=options.seed,
            ids=ids(),
        )


def longest_sequence(model: Any) -> int:
    """How many tokens the model's positions reach, as its configuration says; without bound where it says nothing."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            # RoBERTa and its kin begin to count after the padding id and have that much less room.
            family = getattr(config, "model_type", "")
            return value - 2 if family in ("roberta", "camembert", "xlm-roberta") else value
    return 1 << 30


def profile(
    *models: str | Path,
    text: str | Path | None = None,
    run: str | Path | None = None,
    options: ProfileOptions | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> RunReader:
    """The geometry of every layer of one or more models over a text, stored as a run that is returned.

    ``models`` are Hugging Face names, folders, GGUF or llama2.c files. ``text`` is a file, a folder or another source
    of ``load_corpus``; without one, the documentation inside Python. ``run`` is the folder; a new one under ``runs/``
    unless given. See ``write_report`` for the picture, ``export`` for a table.
    """
    cells = cells_of(
        [str(model) for model in models],
        revisions=() if revision is None else (revision,),
        trust_remote_code=trust_remote_code,
        device=device,
    )
    folder = Path(run) if run is not None else new_run(cells)
    try:
        return run_sweep(cells, folder, text=None if text is None else str(text), options=options, progress=progress)
    except RunError as error:
        if len(cells) == 1:  # the error itself, not the run that holds it
            raise AnisoscopeError(str(error)) from error
        raise


def new_run(cells: Sequence[Cell], parent: Path = Path("runs")) -> Path:
    """A folder for a new run, named after its model, that does not exist yet."""
    base = "-".join(dict.fromkeys(re.sub(r"[^A-Za-z0-9._]+", "-", Path(cell.name).name).strip("-") for cell in cells))
    base = f"profile-{base[:60] or 'model'}"
    folder, number = parent / base, 2
    while folder.exists():
        folder, number = parent / f"{base}-{number}", number + 1
    return folder
