"""`anisoscope train` as a process: what it says, what it leaves, how bad input looks, and a kill in the middle."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import ENVIRONMENT, run, run_many

from anisoscope.commands.lines import clock, line_of, results_table, short, training_lines
from anisoscope.commands.train import changed
from anisoscope.errors import AnisoscopeError
from anisoscope.runs.store import RunReader
from anisoscope.train.loop import Progress, train
from anisoscope.train.metrics import METRICS, read_metrics
from anisoscope.train.recipe import load_recipe, parse_recipe
from anisoscope.watching.study import Cell, CellResult, News, cells_of

TEXT = """\
name: tiny
data: {max_chars: 40000, tokenizer: {kind: bpe, vocab_size: 300}, sequence_length: 16}
models:
  - {name: decoder, architecture: gpt2, objective: causal, layers: 1, width: 32, heads: 4}
  - {name: encoder, architecture: bert, objective: masked, layers: 1, width: 32, heads: 4}
optimisation: {steps: 16, batch_size: 8, lr: 0.003, warmup_steps: 4}
checkpoints: {every: 4}
evaluation: {every: 8, sequences: 16}
device: cpu
monitor:
  schedule: {every: 5}
  sequences: 24
  measures: [spectral_ratio, two_nn]
  tangent: {rank: 4, draws: 19, bins: 2, referee: never}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a finished run of it."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.yaml").write_text(TEXT)
    code, out, err = run("train", "tiny.yaml", "--out", "runs/whole", cwd=folder)
    return folder, code, out, err


def test_a_validation_loss_says_at_which_step_it_was_taken(tmp_path):
    """Evaluated at 0, 4, 8 and the end: between these the line shows an old number, and says how old."""
    recipe, told = parse_recipe(TEXT), []
    short_one = changed(recipe, ["evaluation.every=4", "monitor=false"], models="decoder", steps=10)
    train(short_one, "decoder", 0, folder=tmp_path, progress=told.append)
    assert [one.val_step for one in told] == [0, 0, 0, 4, 4, 4, 4, 8, 8, 10]
    cell = Cell(variant=recipe.models[0], seed=0, name="decoder", folder=tmp_path)
    lines = [line_of(News(cell=cell, progress=one, geometry="", looks=0), None) for one in told]
    assert f"val {told[3].val_loss:.3f}  " in lines[3] and f"val {told[5].val_loss:.3f} (step 4)  " in lines[5]
    none = Progress(step=5, steps=9, loss=1.0, val_loss=None, val_step=None, lr=0.1, tokens=1, tokens_per_second=1.0)
    assert "val" not in line_of(News(cell=cell, progress=none, geometry="", looks=0), None)


def numbers(folder):
    with RunReader(folder) as reader:
        assert not reader.failures()
        return {(r.cell, r.step, r.site, r.measure, r.slice): r.estimate for r in reader.records()}


def test_a_run_says_what_it_did_and_where_it_is(place):
    folder, code, out, err = place
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for name in ("decoder", "encoder"):
        last = next(line for line in lines if line.startswith(f"{name}  16/16"))
        assert re.search(r"loss \d\.\d+  val \d\.\d+  [\d,]+ tok/s  dim [\d.]+ · aniso 0\.\d+ · ratio [\d.]+", last)
        row = next(line for line in lines if re.match(rf" *{name} +finished", line))
        assert re.search(r"16 +2\.05 k +\d\.\d{3} +\d\.\d{3} +[\d.]+ +5 \(\d+%\)", row)
    assert any(line.startswith("run:     runs/whole") for line in lines)
    assert lines[-1] == "report:  runs/whole/report.html  (open it in a browser; it needs no network)"
    run_folder = folder / "runs" / "whole"
    assert (run_folder / "report.html").stat().st_size > 10_000
    about = json.loads((run_folder / "provenance.json").read_text())
    assert about["corpus"]["fingerprint"] and about["model"] == "tiny"
    assert {path.name for path in (run_folder / "cells").iterdir()} == {"decoder-s0", "encoder-s0"}


def test_a_killed_run_is_completed_with_the_same_numbers(place):
    """SIGKILL in the middle of the first model, a report meanwhile, then --resume by the folder alone."""
    folder, *_ = place
    command = [sys.executable, "-m", "anisoscope.cli", "train", "tiny.yaml", "--out", "runs/killed", "--quiet"]
    metrics = folder / "runs" / "killed" / "cells" / "decoder-s0" / METRICS
    process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 9:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert len(read_metrics(metrics.parent)) < 17
    with RunReader(folder / "runs" / "killed") as reader:
        assert 1 < len(reader.probes()) < 10
    assert run("report", "runs/killed", cwd=folder)[0] == 0
    code, out, err = run("train", "runs/killed", "--resume", "--no-report", cwd=folder)
    assert (code, err) == (0, "") and "report" not in out
    assert numbers(folder / "runs" / "killed") == numbers(folder / "runs" / "whole")


def test_interrupted_it_leaves_a_checkpoint_and_says_how_to_go_on(place):
    folder, *_ = place
    command = [sys.executable, "-m", "anisoscope.cli", "train", "tiny.yaml", "--out", "runs/stopped", "--no-report"]
    process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = folder / "runs" / "stopped" / "cells" / "decoder-s0" / METRICS
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in process.communicate(timeout=120))
    assert (process.returncode, err) == (130, "")
    assert "stopping after this step" in out and "paused" in out and "not begun" in out
    assert "stopped; go on with: anisoscope train runs/stopped --resume" in out.splitlines()[-1]
    steps = len(read_metrics(metrics.parent)) - 1
    assert steps < 16 and (metrics.parent / f"step{steps:06d}" / "training").is_dir()


def test_every_cell_diverging_is_exit_code_1(place):
    folder, *_ = place
    sets = ["--set", "optimisation.lr=1e30", "--set", "optimisation.grad_clip=null", "--set", "monitor.tangent=false"]
    code, out, err = run(
        "train", "tiny.yaml", "--out", "runs/bad", "--models", "decoder", "--no-report", *sets, cwd=folder
    )
    assert code == 1 and "Traceback" not in err
    assert "diverged" in out and "training stopped before it" in out
    with RunReader(folder / "runs" / "bad") as reader:
        assert [failure.measure for failure in reader.failures(measure="training")] == ["training"]


BAD = {
    "unknown recipe": (["train", "dmo"], "unknown recipe 'dmo'; did you mean 'demo'?"),
    "no such file": (["train", "nowhere/mine.yaml"], "no such recipe file; or give a name:"),
    "key": (["train", "tiny.yaml", "--set", "optimisation.stps=3"], "unknown key optimisation.stps; did you mean 'ste"),
    "no value": (["train", "tiny.yaml", "--set", "optimisation"], "--set optimisation: give KEY=VALUE"),
    "not yaml": (["train", "tiny.yaml", "--set", "seeds=[1"], "is not a YAML value"),
    "monitor key": (["train", "tiny.yaml", "--set", "monitor.mesures=[two_nn]"], "did you mean 'measures'?"),
    "seeds": (["train", "tiny.yaml", "--seeds", "0,x"], "--seeds: 'x' is not a whole number"),
    "model": (["train", "tiny.yaml", "--models", "decodr"], "unknown model of the recipe 'decodr'; did you mean"),
    "device": (["train", "tiny.yaml", "--device", "abacus", "--out", "runs/new"], "device 'abacus' cannot be used"),
    "site": (["train", "tiny.yaml", "--out", "runs/new", "--set", "monitor.sites=[resid.7]"], "unknown site 'resid.7'"),
    "probe": (["train", "tiny.yaml", "--out", "runs/new", "--set", "monitor.sequences=1"], "give more sequences"),
    "rank": (["train", "tiny.yaml", "--set", "monitor.tangent.rank=64"], "rank 64, but model 'decoder' is 32 wide"),
    "exists": (["train", "tiny.yaml", "--out", "runs/whole"], "already holds a run; go on with --resume"),
    "not empty": (["train", "tiny.yaml", "--out", "full"], "full is not empty; choose another folder"),
    "file": (["train", "tiny.yaml", "--out", "tiny.yaml"], "a file is in the way of the folder"),
    "below a file": (["train", "tiny.yaml", "--out", "tiny.yaml/run"], "a file is in the way of the folder"),
    "no run": (["train", "tiny.yaml", "--out", "runs/new", "--resume"], "holds no run to go on with"),
    "other recipe": (["train", "tiny.yaml", "--out", "runs/whole", "--steps", "9", "--resume"], "steps = 16, not 9"),
    "no training": (["train", "full", "--resume"], "holds no training to go on with"),
    "gone run": (["train", "runs-gone", "--resume"], "there is no run at runs-gone to go on with, nor a recipe"),
    "report folder": (["report", "runs/whole", "--out", "full"], "full is a folder; give the file"),
    "text as a model": (["profile", "tiny.yaml", "--run", "runs/new"], "tiny.yaml is one file of a model"),
    "text": (["train", "tiny.yaml", "--out", "runs/new", "--set", "data.source=gone.txt"], "gone.txt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(place):
    folder, *_ = place
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("dear")
    ahead = (
        "anisoscope.watching.study",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.bert.modeling_bert",
    )
    return folder, run_many({case: arguments for case, (arguments, _) in BAD.items()}, folder, *ahead)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(refused, case):
    code, out, err = refused[1][case]
    assert code == 2, out + err
    assert err.startswith("anisoscope: ") and err.count("\n") == 1 and BAD[case][1] in err
    assert "Error" not in out  # said once


def test_bad_input_leaves_nothing_behind(refused):
    folder, _ = refused
    assert not (folder / "runs" / "new").exists() and not (folder / "runs" / "tiny").exists()
    assert [path.name for path in (folder / "full").iterdir()] == ["letter.txt"]


def test_the_command_line_changes_the_recipe():
    recipe = parse_recipe(TEXT)
    new = changed(recipe, ["optimisation.lr=1e-3", "models.encoder.width=64", "evaluation={every: 2}"], steps=8)
    assert (new.optimisation.steps, new.optimisation.warmup_steps, new.optimisation.lr) == (8, 2, 0.001)
    assert [model.width for model in new.models] == [32, 64] and new.evaluation.every == 2
    new = changed(recipe, [], seeds="3, 4", models="encoder", device="cpu")
    assert new.seeds == (3, 4) and [model.name for model in new.models] == ["encoder"]
    assert changed(recipe, []) == recipe
    with pytest.raises(AnisoscopeError, match="list of names is empty"):
        changed(recipe, [], seeds=",")
    assert load_recipe("demo").monitor.tangent is not None


def test_numbers_are_short():
    assert [short(n) for n in (640, 61_440, 1_060_000, 2_500_000_000)] == ["640", "61.4 k", "1.06 M", "2.5 G"]
    assert [clock(s) for s in (7.4, 760, 11_100)] == ["0:07", "12:40", "3:05:00"]


def test_no_number_of_the_table_is_cut_off_in_a_plain_terminal():
    spec = load_recipe("regularizers").models[-1]
    cell = Cell(variant=spec, seed=0, name="a model with a long name seed 0", folder=Path("x"))
    counts = {"step": 12_400, "parameters": 1_063_296, "tokens": 46_080, "looks": 16, "look_seconds": 520.0}
    result = CellResult(cell=cell, status="finished", loss=6.287, val_loss=6.307, seconds=1041.5, **counts)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(results_table("study", [result]))
    text = console.export_text()
    assert "…" not in text and re.search(r"finished +1.06 M +12,400 +46.1 k +6.287 +6.307 +1,041.5 +16 \(50%\)", text)
    assert " ".join(line[:15].strip() for line in text.splitlines()).count("seed 0") == 1


@pytest.mark.parametrize(("compiles", "words"), [(True, "some 15 s to compile kernels"), (False, "building")])
def test_what_stands_there_before_the_first_update(compiles, words, tmp_path):
    """A first look on a GPU may take a while, and must not seem to hang."""
    (cell, *_) = cells_of(load_recipe("demo"), tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with training_lines(console, quiet=False, compiles=compiles) as lines:
        lines.begin(cell)
    assert words in console.file.getvalue()
