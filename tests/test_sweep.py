"""Sweeps and their commands: resumable, parallel without changing a number, and bad input in one line."""

import dataclasses
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from tiny_checkpoints import save_decoder

import anisoscope as an
from anisoscope import cli, sweep
from anisoscope.commands import profile as looking
from anisoscope.engines import LocalEngine, engine_named
from anisoscope.errors import AnisoscopeError, OptionError, RunError, UnknownNameError
from anisoscope.profiling import ProfileOptions, profile_model
from anisoscope.sweep import WHOLE_CELL, Cell, cells_of, new_run, run_sweep, step_of
from anisoscope.text import batches

OPTIONS = ProfileOptions(
    measures=("spectral_ratio", "two_nn"),
    sites=("resid.*",),
    tokens=1024,
    vectors=1024,
    batch_vectors=512,
    sequence_length=32,
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONWARNINGS": "error", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(list(an.load_corpus(None, max_chars=40_000))))
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    for step in (0, 100, 2000):
        save_decoder(folder / f"checkpoint-{step}", seed=step)
    (folder / "logs").mkdir()
    return folder


def numbers(reader):
    return {(r.cell, r.step, r.site, r.measure, r.slice): r.estimate.value for r in reader.records()}


def test_steps_are_read_from_names():
    assert [step_of(name) for name in ("step1000", "checkpoint-5", "ckpt_07", "global_step12")] == [1000, 5, 7, 12]
    assert step_of("main") is None and step_of("step-one") is None and step_of("gpt2") is None


def test_a_folder_of_checkpoints_is_a_series(checkpoints):
    cells = cells_of([str(checkpoints)])
    assert [cell.step for cell in cells] == [0, 100, 2000]
    assert len({cell.name for cell in cells}) == 1
    alone = cells_of([str(checkpoints / "checkpoint-100")])
    assert len(alone) == 1 and alone[0].step == 0


def test_revisions_with_steps_are_a_series_and_others_are_models():
    cells = cells_of(["owner/model"], revisions=("step1", "step20", "main"))
    assert [(c.name, c.step, c.revision) for c in cells] == [
        ("owner/model", 1, "step1"),
        ("owner/model", 20, "step20"),
        ("owner/model@main", 0, "main"),
    ]


def test_the_same_model_twice_is_refused():
    with pytest.raises(OptionError, match="named twice"):
        cells_of(["a/b", "a/b"])


def test_workers_do_not_change_a_number_and_one_failing_cell_stops_no_other(tmp_path, text, checkpoints):
    cells = [*cells_of([str(checkpoints)]), Cell(source=str(tmp_path / "absent"), name="absent")]
    told = []
    one = run_sweep(
        cells, tmp_path / "one", text=text, options=OPTIONS, on_cell=lambda cell, error: told.append((cell.name, error))
    )
    two = run_sweep(cells, tmp_path / "two", text=text, options=OPTIONS, engine=LocalEngine(workers=2))
    assert {key[2:4] for key in numbers(one)} == {(f"resid.{i}", m) for i in range(4) for m in OPTIONS.measures}
    assert numbers(one) == numbers(two)
    assert {key[1] for key in numbers(one)} == {0, 100, 2000}
    for reader in (one, two):
        (failure,) = reader.failures()
        assert failure.measure == WHOLE_CELL and "absent" in failure.cell and "ModelError" in failure.error
    assert [name for name, error in told if error] == ["absent"]


class _Stops(LocalEngine):
    """An engine that dies after the first cell, as a killed process does."""

    def run(self, work, tasks, progress):
        yield next(iter(super().run(work, tasks, progress)))
        raise KeyboardInterrupt


def test_a_sweep_that_was_cut_off_goes_on_and_gives_the_same_numbers(tmp_path, text, checkpoints):
    cells = cells_of([str(checkpoints)])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(cells, tmp_path / "cut", text=text, options=OPTIONS, engine=_Stops())
    assert len({key[1] for key in numbers(an.RunReader(tmp_path / "cut"))}) == 1
    with pytest.raises(RunError, match="already holds a run"):
        run_sweep(cells, tmp_path / "cut", text=text, options=OPTIONS)
    done = []
    again = run_sweep(
        cells, tmp_path / "cut", text=text, options=OPTIONS, resume=True, on_cell=lambda c, e: done.append(c.step)
    )
    assert done == [100, 2000]  # the first is not done twice
    whole = run_sweep(cells, tmp_path / "whole", text=text, options=OPTIONS)
    assert numbers(again) == numbers(whole)


def test_no_more_of_the_text_is_held_in_a_profile_than_its_batches(tmp_path, text, checkpoints, monkeypatch):
    made, alive, plain = [], [], batches.encode

    def encoded(*arguments):
        found = plain(*arguments)
        made.extend(weakref.ref(one) for one in found)
        return found

    def profiled(*arguments, **options):
        alive.extend(one() is not None for one in made)
        return profile_model(*arguments, **options)

    monkeypatch.setattr(batches, "encode", encoded)
    monkeypatch.setattr(sweep, "profile_model", profiled)
    run_sweep(cells_of([str(checkpoints / "checkpoint-0")]), tmp_path / "run", text=text, options=OPTIONS)
    assert alive and not any(alive)


def test_resuming_with_other_options_is_refused(tmp_path, text, checkpoints):
    cells = cells_of([str(checkpoints)])[:1]
    run_sweep(cells, tmp_path / "run", text=text, options=OPTIONS)
    other = dataclasses.replace(OPTIONS, seed=3)
    with pytest.raises(RunError, match="would not compare"):
        run_sweep(cells, tmp_path / "run", text=text, options=other, resume=True)


def test_a_failed_cell_is_tried_again_on_resume(tmp_path, text):
    cell = Cell(source=str(tmp_path / "model"), name="late")
    good = Cell(source=str(save_decoder(tmp_path / "good")), name="good")
    run_sweep([good, cell], tmp_path / "run", text=text, options=OPTIONS)
    save_decoder(tmp_path / "model", seed=5)
    after = run_sweep([good, cell], tmp_path / "run", text=text, options=OPTIONS, resume=True)
    assert {key[0] for key in numbers(after)} == {"good", "late"}


def test_where_every_cell_fails_the_error_is_raised(tmp_path, text):
    with pytest.raises(AnisoscopeError, match="absent"):
        an.profile(tmp_path / "absent", text=text, run=tmp_path / "run", options=OPTIONS)


def test_bad_text_leaves_no_folder(tmp_path):
    with pytest.raises(AnisoscopeError, match="no such file"):
        an.profile(tmp_path, text=tmp_path / "absent.txt", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_profile_from_python(tmp_path, text, checkpoints):
    a, b = checkpoints / "checkpoint-0", checkpoints / "checkpoint-100"
    with an.profile(a, b, text=text, run=tmp_path / "pair", options=OPTIONS) as run:
        assert len(run.cells()) == 2
        page = an.write_report(run, tmp_path / "pair.html")
    assert page.stat().st_size < 6_000_000
    assert run.provenance["corpus"]["fingerprint"]


def test_new_runs_never_share_a_folder(tmp_path):
    cells = (Cell(source="x", name="owner/Some Model"),)
    first = new_run(cells, tmp_path)
    first.mkdir()
    second = new_run(cells, tmp_path)
    assert first.name == "profile-Some-Model" and second.name == "profile-Some-Model-2"


def test_estimates_can_be_sent_between_processes():
    part = an.Estimate(value=1.0, stderr=None, n=3, method="p")
    whole = an.Estimate(value=2.0, stderr=0.1, n=3, method="w", over="rows", dof=2.0, notes=("n",), parts={"p": part})
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert pickle.loads(pickle.dumps(part)) == part


def test_engines_by_name():
    assert engine_named("local", 3) == LocalEngine(3)
    with pytest.raises(UnknownNameError, match="did you mean 'local'"):
        engine_named("lokal", 1)
    with pytest.raises(OptionError, match="workers"):
        LocalEngine(0)


def run(*arguments, cwd, stdin=None):
    command = [sys.executable, "-m", "anisoscope.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, input=stdin)
    return done.returncode, done.stdout, done.stderr


FEW = ("--tokens", "1024", "--batch-vectors", "512", "--sequence-length", "32")


def test_the_commands_from_model_to_table(tmp_path, text, checkpoints):
    code, out, err = run("profile", checkpoints / "checkpoint-100", "--text", text, *FEW, cwd=tmp_path)
    assert code == 0, err
    folder = tmp_path / "runs" / "profile-checkpoint-100"
    assert "resid.3" in out and "isoscore" in out and "forward passes" in out
    assert str(folder.relative_to(tmp_path)) in out
    page = (folder / "report.html").read_text()
    assert "checkpoint-100" in page and str(tmp_path) not in page
    code, out, err = run("export", folder, "--out", "table.csv", cwd=tmp_path)
    assert code == 0 and (tmp_path / "table.csv").read_text().count("\n") > 20, err
    code, out, err = run("compare", folder, "--out", "side.html", "--figures", "figures", cwd=tmp_path)
    assert code == 0 and (tmp_path / "side.html").exists(), err
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg", ".pdf"}


def test_text_from_standard_input_serves_every_model(tmp_path, text, checkpoints):
    models = [checkpoints / "checkpoint-0", checkpoints / "checkpoint-100"]
    asked = ("--measures", "mean_cosine", "--no-report", "--run", "piped", *FEW)
    code, _, err = run("profile", *models, "--text", "-", *asked, cwd=tmp_path, stdin=Path(text).read_text())
    assert code == 0, err
    with an.RunReader(tmp_path / "piped") as reader:
        assert len(reader.cells()) == 2 and not reader.failures()


def test_the_command_line_shows_the_defaults_of_the_library():
    plain = ProfileOptions()
    shown = (looking.DEFAULT_TOKENS, looking.DEFAULT_VECTORS, looking.DEFAULT_BATCH, looking.DEFAULT_LENGTH)
    assert shown == (plain.tokens, plain.vectors, plain.batch_vectors, plain.sequence_length)


CASES = {
    "missing model": (["profile", "absent-folder/model"], "absent-folder/model"),
    "missing text": (["profile", "{model}", "--text", "absent.txt"], "no such file"),
    "empty text": (["profile", "{model}", "--text", "empty.txt"], "empty.txt"),
    "too few tokens": (["profile", "{model}", "--text", "short.txt"], "tokens"),
    "unknown measure": (["profile", "{model}", "--measures", "two_n"], "did you mean 'two_nn'"),
    "unknown site": (["profile", "{model}", "--sites", "resd.*", *FEW], "resid"),
    "unwritable folder": (["profile", "{model}", "--run", "file/run", *FEW], "file"),
    "no such run": (["report", "absent-run"], "absent-run"),
    "unknown engine": (["sweep", "{model}", "--run", "r", "--engine", "cloud"], "engine"),
    "unknown corpus": (["data", "fetch", "enwik9"], "did you mean 'enwik8'"),
    "corrupt weights": (["profile", "corrupt", *FEW], "corrupt"),
    "revision of a folder": (["profile", "{model}", "--revision", "main", *FEW], "revision"),
}


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory, checkpoints):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("Hardly anything is written here.")
    (folder / "file").write_text("in the way")
    save_decoder(folder / "corrupt")
    (folder / "corrupt" / "model.safetensors").write_bytes(b"\0" * 100)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_exit_code_2(case, bad_folder, checkpoints, monkeypatch, capsys):
    arguments, words = CASES[case]
    before = sorted(path.name for path in bad_folder.iterdir())
    filled = [str(part).replace("{model}", str(checkpoints / "checkpoint-0")) for part in arguments]
    monkeypatch.chdir(bad_folder)
    monkeypatch.setattr(sys, "argv", ["anisoscope", *filled])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as left_with:
        cli.main()
    err = capsys.readouterr().err
    assert left_with.value.code == 2, err
    assert err.startswith("anisoscope: ") and err.count("\n") == 1
    assert words in err
    assert "Traceback" not in err
    left = [name for name in sorted(path.name for path in bad_folder.iterdir()) if name not in before]
    assert not left, f"{left} was left behind"


def test_data_commands(tmp_path):
    code, out, err = run("data", "info", cwd=tmp_path)
    assert code == 0 and "characters" in out, err
    dump = tmp_path / "dump.xml"
    dump.write_text(
        "<mediawiki><page><title>Moss</title><revision><text>'''Moss''' is a [[plant|small plant]].{{cite}}"
        "</text></revision></page></mediawiki>"
    )
    code, out, err = run("data", "clean", dump, "--out", "moss.txt", cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "moss.txt").read_text().strip() == "Moss is a small plant."
    assert "1 articles" in out
