"""Commands that look at models: profile, sweep, compare, report, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from anisoscope.commands.common import long_work, report_of, split_names, ticking
from anisoscope.errors import OptionError

if TYPE_CHECKING:
    from anisoscope.profiling import ProfileOptions
    from anisoscope.runs.store import RunReader
    from anisoscope.sweep import Cell

Models = Annotated[
    list[str],
    typer.Argument(help="Hugging Face names, folders, GGUF or llama2.c files, or pip:PACKAGE.", show_default=False),
]
Text = Annotated[
    str | None,
    typer.Option(help="A file, a folder, - for standard input, hf:DATASET. Default: documentation inside Python."),
]
Run = Annotated[Path | None, typer.Option(help="Folder of the run. Default: a new one under runs/.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a Hugging Face model.")]
Measures = Annotated[str | None, typer.Option(help="Names parted by commas, or `all`. See `anisoscope measures`.")]
Sites = Annotated[str | None, typer.Option(help="Sites parted by commas, as patterns: resid.*,final_norm.")]
Tokens = Annotated[int, typer.Option(help="Tokens to measure.", min=128)]
Vectors = Annotated[
    int | None,
    typer.Option(help="Vectors kept of these tokens at each site: memory and time follow it. Default: 8192.", min=128),
]
BatchVectors = Annotated[int, typer.Option(help="Vectors in each shuffled batch.", min=128)]
SequenceLength = Annotated[int, typer.Option(help="Tokens in a sequence.", min=8)]
Seed = Annotated[int, typer.Option(help="Seed of the sample.", min=0)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Figures = Annotated[Path | None, typer.Option(help="Folder for every figure as PNG, SVG and PDF.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Measure only; `anisoscope report` makes the page later.")]
DEFAULT_TOKENS, DEFAULT_VECTORS, DEFAULT_BATCH, DEFAULT_LENGTH = 16_384, 8_192, 4_096, 256


def profile(
    models: Models,
    text: Text = None,
    run: Run = None,
    revision: Revision = None,
    measures: Measures = None,
    sites: Sites = None,
    tokens: Tokens = DEFAULT_TOKENS,
    vectors: Vectors = None,
    batch_vectors: BatchVectors = DEFAULT_BATCH,
    sequence_length: SequenceLength = DEFAULT_LENGTH,
    seed: Seed = 0,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    figures: Figures = None,
    no_report: NoReport = False,
) -> None:
    """Measure every layer of one or more models and write the report: `anisoscope profile MODEL [MODEL ...]`."""
    long_work()
    _read_early(text)
    from anisoscope.sweep import cells_of, new_run

    options = _options(measures, sites, tokens, vectors, batch_vectors, sequence_length, seed)
    revisions = () if revision is None else (revision,)
    cells = cells_of(models, revisions=revisions, trust_remote_code=trust_remote_code, device=device)
    folder = run or new_run(cells)
    _go(cells, folder, text, options, "local", 1, False, figures, no_report)


def sweep(
    models: Models,
    run: Annotated[Path, typer.Option(help="Folder of the run.")],
    text: Text = None,
    revisions: Annotated[str | None, typer.Option(help="Revisions parted by commas: step1000,step2000.")] = None,
    measures: Measures = None,
    sites: Sites = None,
    tokens: Tokens = DEFAULT_TOKENS,
    vectors: Vectors = None,
    batch_vectors: BatchVectors = DEFAULT_BATCH,
    sequence_length: SequenceLength = DEFAULT_LENGTH,
    seed: Seed = 0,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    engine: Annotated[str, typer.Option(help="Where the cells are worked on.")] = "local",
    workers: Annotated[int, typer.Option(help="Processes side by side.", min=1)] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that is there.")] = False,
    figures: Figures = None,
    no_report: NoReport = False,
) -> None:
    """Profile many models, revisions or folders of checkpoints into one run; a cell that fails stops no other."""
    long_work()
    _read_early(text)
    from anisoscope.sweep import cells_of

    options = _options(measures, sites, tokens, vectors, batch_vectors, sequence_length, seed)
    cells = cells_of(models, revisions=split_names(revisions) or (), trust_remote_code=trust_remote_code, device=device)
    _go(cells, run, text, options, engine, workers, resume, figures, no_report)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold runs.")],
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("comparison.html"),
    figures: Figures = None,
) -> None:
    """Put runs side by side: shapes of their profiles here, everything in one report."""
    console = Console()
    from anisoscope.runs.store import open_runs

    readers = open_runs(runs)
    _show(console, readers)
    for reader in readers:
        reader.close()
    report_of(console, runs, out, figures)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it. Default: report.html in the run.")] = None,
    figures: Figures = None,
) -> None:
    """Write the report of one or more runs as one HTML file."""
    if out is None and len(runs) > 1:
        raise OptionError("several runs were named; say with --out where their common report goes")
    report_of(Console(), runs, out or runs[0] / "report.html", figures)


def export(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="TABLE.parquet or TABLE.csv.")],
) -> None:
    """Write every number of the runs as one long table, Parquet or CSV."""
    from anisoscope.runs.export import export as write

    path = write(runs, out)
    Console().print(f"table: {path}", markup=False, highlight=False, soft_wrap=True)


def _read_early(text: str | None) -> None:
    """Begin to read the text inside Python, where it is wanted, before torch is imported: that takes longer."""
    if text is None:
        from anisoscope.text.embedded import begin_reading

        begin_reading()


def _options(
    measures: str | None,
    sites: str | None,
    tokens: int,
    vectors: int | None,
    batch_vectors: int,
    sequence_length: int,
    seed: int,
) -> ProfileOptions:
    from anisoscope.measures.table import measure_names
    from anisoscope.profiling import DEFAULT_MEASURES, DEFAULT_SITES, ProfileOptions

    wanted = split_names(measures) or DEFAULT_MEASURES
    return ProfileOptions(
        measures=measure_names() if wanted == ("all",) else wanted,
        sites=split_names(sites) or DEFAULT_SITES,
        tokens=tokens,
        vectors=max(batch_vectors, min(tokens, DEFAULT_VECTORS)) if vectors is None else vectors,
        batch_vectors=batch_vectors,
        sequence_length=sequence_length,
        seed=seed,
    )


def _go(
    cells: tuple[Cell, ...],
    folder: Path,
    text: str | None,
    options: ProfileOptions,
    engine: str,
    workers: int,
    resume: bool,
    figures: Path | None,
    no_report: bool,
) -> None:
    from anisoscope.engines import engine_named
    from anisoscope.sweep import run_sweep
    from anisoscope.views.interactive import begin_packing

    if not no_report:  # now, since the libraries of models are imported next, which leaves the other cores idle
        begin_packing()
    console = Console()
    failed: list[str] = []
    with ticking(console, len(cells)) as ticker:

        def tell(cell: Cell, error: str | None) -> None:
            ticker.cell()
            if error:
                failed.append(cell.name)
            if error and len(cells) > 1:  # of one alone it is the error that ends the command
                console.print(f"{cell.name}, step {cell.step}: {error}", style="red", markup=False, highlight=False)

        reader = run_sweep(
            cells,
            folder,
            text=text,
            options=options,
            engine=engine_named(engine, workers),
            resume=resume,
            progress=ticker.step,
            on_cell=tell,
        )
    _show(console, [reader])
    reader.close()
    if failed:
        again = f"anisoscope sweep ... --run {folder} --resume"
        console.print(f"{len(failed)} of {len(cells)} cells failed; go on with: {again}", markup=False, soft_wrap=True)
    console.print(f"run:     {folder}", markup=False, highlight=False, soft_wrap=True)
    if not no_report:
        report_of(console, [folder], folder / "report.html", figures)


def _show(console: Console, readers: list[RunReader]) -> None:
    """Layers by measures for each model, what its profiles look like, and what it cost."""
    from anisoscope.views.numbers import typed
    from anisoscope.views.series import is_theory, read_series
    from anisoscope.views.summary import findings, read_profiles
    from anisoscope.views.tables import cost_line, layer_table

    series = [one for one in read_series(readers) if not is_theory(one)]
    for one in series:
        if one.records:
            console.print(layer_table(one))
    for sentences in findings(series, read_profiles(series)).values():
        for model, words in sentences:
            who = f"{model}: " if len(series) > 1 and model else ""
            console.print(f"· {who}{typed(words)}", markup=False, highlight=False)
    for reader in readers:
        for probe in reader.probes():
            line = cost_line(probe)
            if line:
                console.print(line, markup=False, highlight=False, style="dim")
