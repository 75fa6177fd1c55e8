"""The run store: what goes in comes out, whole probes only, one writer, and a named error for everything else."""

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import (
    AnisoscopeError,
    CorruptRunError,
    NonFiniteError,
    NotARunError,
    OptionError,
    RunBusyError,
    RunError,
    RunNotFoundError,
    RunVersionError,
    RunWriteError,
    ShapeError,
    UnknownNameError,
)
from anisoscope.estimate import Estimate
from anisoscope.runs import schema
from anisoscope.runs.records import Curve, Failure, Record, layer_of, site_order
from anisoscope.runs.store import RunReader, RunWriter, open_runs

PLAIN = Estimate(value=1 / 3, stderr=0.1, n=7, method="mean", over="tokens")
# A name of any text that UTF-8 can hold; a float of any size, since no digit may be lost.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text("~/01", max_size=5)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def recipes_of_estimates(draw, depth=2):
    """Arguments of an Estimate, parts and parts of parts included."""
    stderr = draw(st.none() | st.floats(0, 1e300))
    return {
        "value": draw(FLOATS),
        "stderr": stderr,
        "n": draw(st.integers(0, 2**63 - 1)),
        "method": draw(NAMES),
        "notes": tuple(draw(st.lists(NAMES, max_size=3))),
        "over": draw(NAMES if stderr is not None else st.none() | NAMES),
        "dof": draw(st.none() | st.floats(min_value=0, exclude_min=True)),
        "parts": draw(st.dictionaries(NAMES, recipes_of_estimates(depth=depth - 1), max_size=3)) if depth else {},
    }


def build(fields):
    return Estimate(**(fields | {"parts": {name: build(inner) for name, inner in fields["parts"].items()}}))


def same(one, two):
    """Equal in every bit that matters: == on floats, and parts in the same order."""
    assert one == two
    assert list(one.parts) == list(two.parts)
    for name in one.parts:
        same(one.parts[name], two.parts[name])


def fill(writer, step, cell="", count=3):
    with writer.probe(step=step, cell=cell, info={"tokens": 512}) as probe:
        for layer in range(count):
            probe.add_estimate(PLAIN, site=f"resid.{layer}", measure="two_nn", slice="all")
        probe.fail(site="embed", measure="mle", slice="rare", error=ValueError("no rows"))
        x = tuple(float(i) for i in range(1, 4))
        probe.add_curve(
            Curve(run=writer.name, step=step, cell=cell, site="embed", name="spectrum", slice="all", x=x, y=x)
        )


@pytest.fixture
def run(tmp_path):
    with RunWriter.create(tmp_path / "run", recipe={"seed": 1, "rates": [0.1, 1e-05]}) as writer:
        fill(writer, 0)
        fill(writer, 50)
    return tmp_path / "run"


# ---- round trips


@given(
    fields=recipes_of_estimates(), names=st.tuples(NAMES, NAMES, NAMES, NAMES), step=st.integers(-(2**63), 2**63 - 1)
)
def test_a_record_comes_back_exactly(fields, names, step, tmp_path_factory):
    estimate = build(fields)
    site, measure, slice, cell = names
    folder = tmp_path_factory.mktemp("run")
    record = Record(run=folder.name, cell=cell, step=step, site=site, measure=measure, slice=slice, estimate=estimate)
    with RunWriter.create(folder) as writer, writer.probe(step=step, cell=cell) as probe:
        probe.add(record)
    with RunReader(folder) as reader:
        (back,) = reader.records()
    assert back == record
    same(back.estimate, estimate)
    shutil.rmtree(folder)


@given(points=st.lists(st.tuples(FLOATS, FLOATS, st.floats(0, 1e300)), max_size=20), bar=st.booleans(), label=NAMES)
def test_a_curve_comes_back_exactly(points, bar, label, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    x, y, stderr = (tuple(column) for column in zip(*points)) if points else ((), (), ())
    curve = Curve(
        run="r",
        step=3,
        site="resid.1",
        name="spectrum",
        slice="all",
        x=x,
        y=y,
        stderr=stderr if bar else None,
        x_label=label,
        notes=(label,),
    )
    with RunWriter.create(folder, name="r") as writer, writer.probe(step=3) as probe:
        probe.add_curve(curve)
    with RunReader(folder) as reader:
        assert repr(reader.curves()) == repr([curve])  # repr tells 0.0 from -0.0, which == does not
    shutil.rmtree(folder)


def test_numpy_numbers_are_stored_as_numbers(tmp_path):
    """sqlite3 takes a NumPy scalar for a buffer and stores its bytes; a reader in SQL would find garbage."""
    # A process of its own: there is no type check in the way, as there is none for users.
    code = """
import numpy as np
from anisoscope.estimate import Estimate
odd = Estimate(value=np.float32(0.1), stderr=np.float32(0.5), n=np.int64(9), method="m", over="o", dof=np.float32(3))
with RunWriter.create(sys.argv[1]) as writer, writer.probe(step=np.int64(2)) as probe:
    probe.add_estimate(odd, site="embed", measure="m", slice="all")
"""
    assert said(child(code, tmp_path)) == ""
    plain = sqlite3.connect(tmp_path / "records.sqlite")
    columns = ("value", "stderr", "dof", "n", "step")
    kinds = plain.execute(f"SELECT {', '.join(f'typeof({one})' for one in columns)}, value FROM results").fetchone()
    plain.close()
    assert kinds == ("real", "real", "real", "integer", "integer", float(np.float32(0.1)))


def test_everything_of_a_probe(run):
    with RunReader(run) as reader:
        first, second = reader.probes()
        assert (first.run, first.step, second.step, first.cell) == ("run", 0, 50, "")
        assert (first.records, first.failures, first.curves) == (3, 1, 1)
        assert first.info == {"tokens": 512}
        assert first.began.endswith("+00:00") and 0 <= first.seconds < 60
        assert reader.recipe == {"seed": 1, "rates": [0.1, 1e-05]} and reader.provenance == {}
        assert reader.failures(step=0) == [
            Failure(run="run", step=0, site="embed", measure="mle", slice="rare", error="ValueError: no rows")
        ]
        assert reader.steps() == [0, 50] and reader.cells() == [""]
        assert reader.measures() == ["mle", "two_nn"], "a measure that only ever failed must show"
        assert reader.sites() == ["embed", "resid.0", "resid.1", "resid.2"]
        assert reader.slices() == ["all", "rare"]


def test_filters(tmp_path):
    with RunWriter.create(tmp_path / "r") as writer:
        for cell in ("a", "b"):
            for step in (0, 10):
                with writer.probe(step=step, cell=cell) as probe:
                    for site in ("embed", "resid.0"):
                        for measure in ("m", "k"):
                            for slice in ("all", "rare"):
                                parts = {"null": PLAIN} if measure == "m" else {}
                                value = Estimate(value=step, stderr=None, n=1, method=cell, parts=parts)
                                probe.add_estimate(value, site=site, measure=measure, slice=slice)
    with RunReader(tmp_path / "r") as reader:
        everything = reader.records()
        assert len(everything) == 32
        choices = {"measure": "m", "site": "resid.0", "slice": "rare", "step": 10, "cell": "b"}
        for name, value in choices.items():
            expected = [record for record in everything if getattr(record, name) == value]
            assert reader.records(**{name: value}) == expected and len(expected) == 16
        (one,) = reader.records(**choices)
        assert list(one.estimate.parts) == ["null"]
        assert reader.records(measure="none such") == []


def test_the_view_holds_records_parts_and_failures(tmp_path):
    nested = Estimate(value=2.0, stderr=None, n=1, method="m", parts={"null": PLAIN, "a/b": PLAIN})
    with RunWriter.create(tmp_path / "r") as writer, writer.probe(step=4, cell="c") as probe:
        probe.add_estimate(nested, site="embed", measure="mle", slice="all")
        probe.fail(site="embed", measure="two_nn", slice="all", error="gone")
    plain = sqlite3.connect(tmp_path / "r" / "records.sqlite")
    rows = plain.execute("SELECT run, cell, step, measure, value, error FROM results ORDER BY measure").fetchall()
    counts = plain.execute("SELECT count(*) FROM records").fetchone()
    plain.close()
    assert rows == [
        ("r", "c", 4, "mle", 2.0, None),
        ("r", "c", 4, "mle/a~1b", 1 / 3, None),
        ("r", "c", 4, "mle/null", 1 / 3, None),
        ("r", "c", 4, "two_nn", None, "gone"),
    ]
    assert counts == (1,), "a companion must not count as a result"


# ---- order of sites


def test_sites_in_natural_order():
    right = ["embed", "attn_in.2", "attn_in.10", *(f"resid.{i}" for i in range(13)), "resid.100", "final_norm"]
    assert sorted(sorted(right), key=site_order) == right
    assert sorted(right, key=str) != right  # what text order would make of it


@given(st.lists(st.text(max_size=8) | st.from_regex(r"(a|resid\.)[0-9]{0,3}", fullmatch=True), max_size=8))
def test_any_names_can_be_ordered(names):
    """Words and numbers never meet in a comparison, and the order does not depend on how the names came."""
    backwards = names[::-1]
    assert sorted(names, key=site_order) == sorted(backwards, key=site_order)


def test_a_number_longer_than_int_takes():
    assert sorted(["a" + "9" * 5000, "a5"], key=site_order)[0] == "a5"


@pytest.mark.parametrize(
    "site, layer", [("resid.10", 10), ("embed", None), ("a.1.mlp", None), ("resid", None), ("x.0", 0)]
)
def test_layer_of(site, layer):
    assert layer_of(site) == layer


# ---- all or nothing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_probe_that_raises_leaves_nothing(run, error):
    with RunWriter.create(run, exist="resume") as writer:
        with pytest.raises(error), writer.probe(step=60) as probe:
            probe.add_estimate(PLAIN, site="embed", measure="m", slice="all")
            raise error("half-way")
        assert writer.done() == {("", 0), ("", 50)}
        fill(writer, 60)  # and the step is free for another try
    with RunReader(run) as reader:
        assert [probe.records for probe in reader.probes()] == [3, 3, 3]


def test_a_full_disk_is_one_line_and_loses_nothing_committed(tmp_path):
    with RunWriter.create(tmp_path / "run") as writer:
        fill(writer, 0)
        writer._connection.execute("PRAGMA max_page_count = 20")  # SQLite itself answers as it does on a full disk
        with pytest.raises(RunWriteError, match="disk is full") as caught:
            fill(writer, 1, count=2000)
        assert "\n" not in str(caught.value) and "free some space" in str(caught.value)
        writer._connection.execute("PRAGMA max_page_count = 100000")
        assert writer.done() == {("", 0)}
        fill(writer, 1, count=2000)  # the same writer goes on once there is room
    with RunReader(tmp_path / "run") as reader:
        assert [probe.records for probe in reader.probes()] == [3, 2000]


def test_records_of_elsewhere_are_refused(run):
    with RunWriter.create(run, exist="resume") as writer, writer.probe(step=60, cell="c") as probe:
        names = {"run": "run", "cell": "c", "step": 60, "site": "embed", "measure": "m", "slice": "all"}
        for wrong in ({"run": "other"}, {"cell": ""}, {"step": 61}):
            with pytest.raises(OptionError, match="does not belong to the probe"):
                probe.add(Record(**(names | wrong), estimate=PLAIN))
        probe.add(Record(**names, estimate=PLAIN))
        with pytest.raises(OptionError, match="added twice"):
            probe.add(Record(**names, estimate=PLAIN))
        with pytest.raises(OptionError, match="added twice"):
            probe.fail(site="embed", measure="m", slice="all", error="a result and a failure at one place")
    with pytest.raises(OptionError, match="is over"):
        probe.add_estimate(PLAIN, site="embed", measure="k", slice="all")


def test_a_step_comes_once(run):
    with RunWriter.create(run, exist="resume") as writer:
        with pytest.raises(RunError, match="already holds step 50"), writer.probe(step=50):
            pytest.fail("the block ran, and would have measured in vain")
        with writer.probe(step=50, cell="other"):
            pass
        assert writer.done() == {("", 0), ("", 50), ("other", 50)}


@pytest.mark.parametrize(
    "bad, error",
    [
        (lambda p: p.add_estimate(PLAIN, site="\ud800", measure="m", slice="all"), OptionError),
        (
            lambda p: p.add_estimate(
                Estimate(value=1, stderr=1, n=1, method="m", over="o", dof=math.nan), site="s", measure="m", slice="a"
            ),
            OptionError,
        ),
        (
            lambda p: p.add_estimate(
                Estimate(value=1, stderr=None, n=2**63, method="m"), site="s", measure="m", slice="a"
            ),
            OptionError,
        ),
        (lambda p: Curve(run="r", step=1, site="s", name="c", slice="a", x=(1.0,), y=()), ShapeError),
        (lambda p: Curve(run="r", step=1, site="s", name="c", slice="a", x=(1.0,), y=(math.nan,)), NonFiniteError),
        (
            lambda p: Curve(run="r", step=1, site="s", name="c", slice="a", x=(1.0,), y=(1.0,), stderr=(-1.0,)),
            NonFiniteError,
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_where_it_comes_in(tmp_path, bad, error):
    with RunWriter.create(tmp_path / "r") as writer, writer.probe(step=1) as probe, pytest.raises(error):
        bad(probe)


def test_a_failure_is_stored_whatever_its_words(tmp_path):
    with RunWriter.create(tmp_path / "r") as writer, writer.probe(step=1) as probe:
        probe.fail(site="s", measure="m", slice="a", error=RuntimeError("odd \ud800 bytes\x00"))
    with RunReader(tmp_path / "r") as reader:
        assert reader.failures()[0].error == "RuntimeError: odd \\ud800 bytes\x00"


@pytest.mark.parametrize("info", [{"x": math.nan}, {"x": object()}, {"x": "\ud800"}])
def test_info_must_be_plain(tmp_path, info):
    with RunWriter.create(tmp_path / "r") as writer, pytest.raises(OptionError), writer.probe(step=1, info=info):
        pass


# ---- one writer, many readers


def child(code, *arguments, **options):
    """A process of its own that imports the store but no torch."""
    head = "import os, sys, time\nfrom anisoscope.runs.store import RunReader, RunWriter\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def said(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def test_a_second_writer_is_refused(run):
    with RunWriter.create(run, exist="resume"):
        with pytest.raises(RunBusyError, match=rf"process {os.getpid()}\)"):
            RunWriter.create(run, exist="resume")
        code = """
try:
    RunWriter.create(sys.argv[1], exist="resume")
except Exception as error:
    print(type(error).__name__, error)
"""
        answer = said(child(code, run))
        assert answer.startswith("RunBusyError") and f"process {os.getpid()})" in answer
    RunWriter.create(run, exist="resume").close()


def test_the_lock_dies_with_the_writer_even_if_its_children_live(run):
    """Workers forked by a killed training process may outlive it; the lock must not live on in them."""
    code = """
writer = RunWriter.create(sys.argv[1], exist="resume")
worker = os.fork()
if worker == 0:
    try:
        writer.done()
    except Exception as error:
        os.write(1, f"{type(error).__name__} {error}\\n".encode())  # print may come in pieces
    writer.close()
    time.sleep(60)
    os._exit(0)
os.write(1, f"{worker}\\n".encode())
time.sleep(60)
"""
    parent = child(code, run)
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    worker = int(next(line for line in lines if line.isdigit()))
    try:
        assert any(line.startswith("RunError the writer of") and "forked child" in line for line in lines)
        with pytest.raises(RunBusyError):  # the worker's close was not the parent's
            RunWriter.create(run, exist="resume")
        parent.kill()
        parent.wait()
        os.kill(worker, 0)  # it is still there
        RunWriter.create(run, exist="resume").close()
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.stdout.close()
        parent.stderr.close()


def test_a_dropped_writer_lets_go(run):
    writer = RunWriter.create(run, exist="resume")
    del writer
    RunWriter.create(run, exist="resume").close()


def test_a_closed_writer_says_so(run):
    writer = RunWriter.create(run, exist="resume")
    writer.close()
    writer.close()
    with pytest.raises(RunError, match="is closed"), writer.probe(step=99):
        pass


def test_readers_see_whole_probes_while_a_process_writes(tmp_path):
    code = """
from anisoscope.estimate import Estimate
e = Estimate(value=1.0, stderr=None, n=1, method="m", parts={"a": Estimate(value=2.0, stderr=None, n=1, method="m")})
with RunWriter.create(sys.argv[1]) as writer:
    print("ready", flush=True)
    for step in range(30):
        with writer.probe(step=step) as probe:
            for layer in range(40):
                probe.add_estimate(e, site=f"resid.{layer}", measure="m", slice="all")
            probe.fail(site="embed", measure="m", slice="all", error="x")
print("over", flush=True)
"""
    process = child(code, tmp_path / "run")
    assert process.stdout.readline() == "ready\n"
    seen = []
    with RunReader(tmp_path / "run") as reader:
        while not seen or seen[-1] < 30:
            with reader.snapshot():
                records, failures, probes = reader.records(), reader.failures(), reader.probes()
            assert len(records) == 40 * len(probes) and len(failures) == len(probes)
            assert all(list(record.estimate.parts) == ["a"] for record in records)
            assert not seen or len(probes) >= seen[-1]
            seen.append(len(probes))
            assert process.poll() in (None, 0)
    assert said(process) == "over"
    assert len(set(seen)) > 2, "the reader never looked while the writer was at work"


def test_threads_share_a_writer(tmp_path):
    with RunWriter.create(tmp_path / "run") as writer:
        threads = [threading.Thread(target=fill, args=(writer, step)) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with RunReader(tmp_path / "run") as reader:
        assert reader.steps() == list(range(8)) and len(reader.records()) == 24


def test_commits_wait_for_the_disk(tmp_path):
    with RunWriter.create(tmp_path / "run") as writer:
        assert writer._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert writer._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_after_close_the_database_file_holds_everything(run, tmp_path):
    """With a reader looking on too: a plain copy of the one file is the run."""
    with RunReader(run):
        with RunWriter.create(run, exist="resume") as writer:
            fill(writer, 60)
        (tmp_path / "copy").mkdir()
        shutil.copy(run / "records.sqlite", tmp_path / "copy")
    with RunReader(tmp_path / "copy") as reader:
        assert reader.steps() == [0, 50, 60]


# ---- starting and resuming


def test_a_run_is_not_started_twice(run):
    with pytest.raises(RunError, match=r"already holds a run \(2 probes\).*resume"):
        RunWriter.create(run)
    with pytest.raises(UnknownNameError, match="did you mean 'resume'"):
        RunWriter.create(run, exist="resum")


def test_resume_keeps_name_and_recipe(run):
    with pytest.raises(RunError, match="holds the run 'run', not 'other'"):
        RunWriter.create(run, exist="resume", name="other")
    for other in ({"seed": 2, "rates": [0.1, 1e-05]}, {"seed": True, "rates": [0.1, 1e-05]}, {}):
        with pytest.raises(RunError, match="differs from the recipe"):
            RunWriter.create(run, exist="resume", recipe=other)
    before = (run / "recipe.yaml").read_bytes()
    moved = run.rename(run.parent / "moved")
    with RunWriter.create(moved, exist="resume", recipe={"rates": (0.1, 1e-05), "seed": 1}) as writer:
        assert writer.name == "run", "a moved folder is still the same run"
    assert (moved / "recipe.yaml").read_bytes() == before


def test_provenance_of_each_start_is_kept(tmp_path):
    for commit in ("a", "b", "c"):
        RunWriter.create(tmp_path / "r", exist="resume", provenance={"commit": commit}).close()
    RunWriter.create(tmp_path / "r", exist="resume").close()
    with RunReader(tmp_path / "r") as reader:
        assert reader.provenance == {"commit": "a", "resumed": [{"commit": "b"}, {"commit": "c"}]}


def test_bad_recipes_touch_nothing(tmp_path):
    with pytest.raises(OptionError, match="recipe"):
        RunWriter.create(tmp_path / "r", recipe={"x": object()})
    with pytest.raises(OptionError, match="provenance"):
        RunWriter.create(tmp_path / "r", provenance={"x": object()})
    assert not (tmp_path / "r").exists()


def test_files_of_others_are_not_overwritten(tmp_path):
    (tmp_path / "recipe.yaml").write_text("mine: 1\n")
    with pytest.raises(RunError, match=r"holds a recipe\.yaml but no run"):
        RunWriter.create(tmp_path, recipe={"seed": 1})
    assert (tmp_path / "recipe.yaml").read_text() == "mine: 1\n"
    (tmp_path / "recipe.yaml").unlink()
    foreign = sqlite3.connect(tmp_path / "records.sqlite")
    foreign.execute("CREATE TABLE people (name)")
    foreign.commit()
    before = (tmp_path / "records.sqlite").read_bytes()
    foreign.close()
    for exist in ("error", "resume"):
        with pytest.raises(NotARunError, match="not of a run"):
            RunWriter.create(tmp_path, exist=exist)
    with pytest.raises(NotARunError, match="not of a run"):
        RunReader(tmp_path)
    assert (tmp_path / "records.sqlite").read_bytes() == before


def test_a_start_that_was_cut_short_can_be_taken_up(tmp_path):
    for name, exist in (("a", "error"), ("b", "resume")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.sqlite").touch()
        with pytest.raises(NotARunError, match="stopped before it began"):
            RunReader(tmp_path / name)
        with RunWriter.create(tmp_path / name, exist=exist) as writer:
            fill(writer, 0)


# ---- named errors


def test_missing_and_not_a_run(tmp_path, run):
    with pytest.raises(RunNotFoundError, match="no such folder"):
        RunReader(tmp_path / "nowhere")
    with pytest.raises(RunNotFoundError, match=r"did you mean '.*run'\?"):
        RunReader(tmp_path / "runn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARunError, match=r"holds no records\.sqlite"):
        RunReader(tmp_path / "empty")
    with pytest.raises(NotARunError, match="holds the runs run: give one of them"):
        RunReader(tmp_path)
    with pytest.raises(NotARunError, match="is a file"):
        RunReader(run / "records.sqlite")
    with pytest.raises(RunWriteError, match="a file is in the way"):
        RunWriter.create(run / "recipe.yaml")


def alter(run, *statements):
    plain = sqlite3.connect(run / "records.sqlite")
    for statement in statements:
        plain.execute(statement)
    plain.commit()
    plain.close()


def test_a_newer_schema_is_refused(run):
    alter(run, "UPDATE store SET version = 99")
    for opening in (lambda: RunReader(run), lambda: RunWriter.create(run, exist="resume")):
        with pytest.raises(RunVersionError, match=r"schema version 99.*upgrade anisoscope"):
            opening()


def test_an_older_schema_is_migrated_by_the_writer(run, monkeypatch):
    monkeypatch.setattr(schema, "VERSION", 3)
    steps = {
        1: lambda connection: connection.execute("ALTER TABLE probes ADD COLUMN loss REAL"),
        2: lambda connection: connection.execute("UPDATE probes SET loss = 0.5"),
    }
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    with pytest.raises(RunVersionError, match=r"schema version 1.*exist='resume'"):
        RunReader(run)
    monkeypatch.setitem(steps, 2, lambda connection: connection.execute("UPDATE nowhere SET loss = 0.5"))
    with pytest.raises(CorruptRunError):
        RunWriter.create(run, exist="resume")
    monkeypatch.setitem(steps, 2, lambda connection: connection.execute("UPDATE probes SET loss = 0.5"))
    RunWriter.create(run, exist="resume").close()  # the migration that failed left nothing half done
    with RunReader(run) as reader:
        assert len(reader.records()) == 6
        assert reader._ask("SELECT loss FROM probes") == [(0.5,), (0.5,)]


def test_every_version_can_be_reached():
    assert sorted(schema.MIGRATIONS) == list(range(1, schema.VERSION))


def spoil(path, at, length):
    data = bytearray(path.read_bytes())
    data[at : at + length] = b"\xff" * length
    path.write_bytes(data)


@pytest.mark.parametrize("at, length", [(0, 100), (100, 4000), (4096 * 2, 4096 * 30)])
def test_a_damaged_database_is_named(run, at, length):
    spoil(run / "records.sqlite", at, length)
    with pytest.raises(CorruptRunError, match="damaged"), RunReader(run) as reader:
        reader.records(), reader.failures(), reader.curves(), reader.probes()
    if at < 4096:
        with pytest.raises(CorruptRunError, match="damaged"):
            RunWriter.create(run, exist="resume")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET stderr = -1",
        "UPDATE records SET notes = '{'",
        "UPDATE curves SET x = '[1]'",
        "UPDATE probes SET info = 'x'",
        "DELETE FROM store",
        "DROP TABLE parts",
    ],
)
def test_rows_that_make_no_sense_are_named(run, statement):
    alter(run, statement)
    with pytest.raises(CorruptRunError) as caught, RunReader(run) as reader:
        reader.records(), reader.curves(), reader.probes()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file, words", [("recipe.yaml", "a: [1"), ("recipe.yaml", "- 1"), ("provenance.json", "{")])
def test_damaged_files_beside_are_named(run, file, words):
    (run / file).write_text(words)
    with RunReader(run) as reader:
        with pytest.raises(CorruptRunError, match=file) as caught:
            print(reader.recipe, reader.provenance)
        assert "\n" not in str(caught.value)
        assert len(reader.records()) == 6


# As another user where the tests run as root, which no permission stops.
AS_NOBODY = """
import yaml, fcntl, json
from pathlib import Path
run = Path(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
def attempt(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__} {error}"
answers = [
    attempt(lambda: RunWriter.create(run / "inner" / "deep")),
    attempt(lambda: RunWriter.create(run, exist="resume")),
    attempt(lambda: len(RunReader(run).records())),
]
print(json.dumps(answers))
"""


def closed_to_others(folder):
    """Nobody may write; others may look, all the way down to it."""
    for path in folder.rglob("*"):
        path.chmod(0o444)
    folder.chmod(0o555)
    for parent in list(folder.parents)[:4]:  # a worker of the test run has a folder of its own, one level deeper
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
            parent.chmod(0o755)


def test_an_unwritable_folder_is_one_line_and_can_still_be_read(run):
    closed_to_others(run)
    try:
        deep, resumed, count = json.loads(said(child(AS_NOBODY, run)))
    finally:
        run.chmod(0o755)
    for line in (deep, resumed):
        assert line.startswith("RunWriteError cannot write") and "no permission" in line and "\n" not in line
    assert count == 6


def test_a_crashed_run_in_an_unwritable_folder_says_to_copy_it(run):
    code = """
writer = RunWriter.create(sys.argv[1], exist="resume")
with writer.probe(step=60) as probe:
    probe.fail(site="s", measure="m", slice="a", error="x")
os.kill(os.getpid(), 9)
"""
    child(code, run).communicate()
    (run / "records.sqlite-shm").unlink()
    closed_to_others(run)
    try:
        *_, answer = json.loads(said(child(AS_NOBODY, run)))
    finally:
        run.chmod(0o755)
    assert answer.startswith("RunError cannot read") and "copy the folder" in answer
    with RunReader(run) as reader:  # the owner reads it, the last probe included
        assert reader.steps() == [0, 50, 60]


def test_files_are_replaced_whole(run):
    """The system refuses to write more than a few bytes: the old provenance stays, and no debris."""
    RunWriter.create(run, exist="resume", provenance={"first": 1}).close()
    before = (run / "provenance.json").read_bytes()
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (40960, 40960))
try:
    RunWriter.create(sys.argv[1], exist="resume", provenance={"long": "x" * 100000})
except Exception as error:
    print(type(error).__name__, error)
"""
    answer = said(child(code, run))
    assert answer.startswith("RunWriteError") and "full" in answer and "\n" not in answer
    assert (run / "provenance.json").read_bytes() == before
    assert not list(run.glob(".*"))


# ---- several runs


def test_open_runs(tmp_path):
    for name in ("model-10", "model-2"):
        RunWriter.create(tmp_path / "runs" / name).close()
    RunWriter.create(tmp_path / "single").close()
    readers = open_runs([tmp_path / "single", tmp_path / "runs"])
    assert [reader.name for reader in readers] == ["single", "model-2", "model-10"]
    for reader in readers:
        reader.close()
    with pytest.raises(RunNotFoundError):
        open_runs([tmp_path / "single", tmp_path / "nowhere"])


def test_every_error_is_of_the_house():
    for error in (RunNotFoundError, NotARunError, RunVersionError, CorruptRunError, RunBusyError, RunWriteError):
        assert issubclass(error, RunError) and issubclass(error, AnisoscopeError)
