"""Export and provenance: the table says what the store holds, whole or not at all, and nothing private gets out."""

import csv
import getpass
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import NotARunError, OptionError, RunError, RunWriteError, UnknownNameError
from anisoscope.estimate import Estimate
from anisoscope.runs import export as module
from anisoscope.runs import files
from anisoscope.runs.export import COLUMNS, export, rows
from anisoscope.runs.provenance import command_line, git_state, provenance, shorten
from anisoscope.runs.store import RunReader, RunWriter

NULL = Estimate(value=0.125, stderr=None, n=4, method="permuted")
FULL = Estimate(
    value=1 / 3, stderr=0.07, n=2**40, method="mle", over="tokens", dof=4.5, notes=("a, b", "c"), parts={"null": NULL}
)
BARE = Estimate(value=-5e-324, stderr=None, n=1, method="mean")
NORMAL = Estimate(value=10.0, stderr=2.0, n=3, method="mean", over="tokens")


def make(folder, name=None, cell=""):
    with RunWriter.create(folder, name=name, recipe={"seed": 3}, provenance={"versions": {"torch": "2"}}) as writer:
        for step in (0, 100):
            with writer.probe(step=step, cell=cell) as probe:
                probe.add_estimate(FULL, site="resid.11", measure="mle", slice="all")
                probe.add_estimate(BARE, site="embed", measure="mean", slice="rare")
                probe.add_estimate(NORMAL, site="final_norm", measure="mean", slice="rare")
                probe.fail(site="resid.2", measure="two_nn", slice="all", error="no rows\nat all")
    return folder


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---- the table


def test_csv_and_parquet_hold_the_same(tmp_path):
    run = make(tmp_path / "run", cell="c")
    text = read_csv(export(run, tmp_path / "t.csv"))
    table = pa.parquet.read_table(export(run, tmp_path / "t.parquet"))
    assert table.column_names == list(COLUMNS) == list(text[0])
    assert len(text) == table.num_rows == 2 * 5
    for row, typed in zip(text, table.to_pylist()):
        for column, value in typed.items():
            if column == "notes":
                assert row[column] == "; ".join(value)
            elif isinstance(value, float):
                assert float(row[column]) == value  # every digit, the smallest subnormal included
            else:
                assert row[column] == ("" if value is None else str(value))


def test_rows_say_what_the_records_say(tmp_path):
    run = make(tmp_path / "run")
    first = pa.parquet.read_table(export([run], tmp_path / "t.pq")).to_pylist()[:5]
    full, null, bare, normal, failed = first
    lower, upper = FULL.interval()
    assert full == {
        "run": "run", "cell": "", "step": 0, "site": "resid.11", "layer": 11, "measure": "mle", "slice": "all",
        "value": 1 / 3, "stderr": 0.07, "lower": lower, "upper": upper, "dof": 4.5, "over": "tokens", "n": 2**40,
        "method": "mle", "notes": ["a, b", "c"], "error": None,
    }  # fmt: skip
    assert (null["measure"], null["value"], null["layer"], null["method"]) == ("mle/null", 0.125, 11, "permuted")
    assert bare["value"] == -5e-324 and bare["lower"] is None and bare["stderr"] is None and bare["layer"] is None
    assert (normal["lower"], normal["upper"]) == NORMAL.interval()
    assert failed["error"] == "no rows\nat all" and failed["value"] is None and failed["layer"] == 2
    assert failed["measure"] == "two_nn" and failed["n"] is None and failed["method"] is None


@given(value=st.floats(-1e6, 1e6), stderr=st.floats(0, 1e3), dof=st.none() | st.floats(0.5, 1e4))
def test_intervals_are_those_of_the_estimate(value, stderr, dof):
    estimate = Estimate(value=value, stderr=stderr, n=1, method="m", over="o", dof=dof)
    row = module._row({}, "m", estimate)
    assert (row["lower"], row["upper"]) == estimate.interval()


def test_types_and_metadata_of_parquet(tmp_path):
    schema = pa.parquet.read_schema(export(make(tmp_path / "run"), tmp_path / "t.parquet"))
    types = {field.name: str(field.type) for field in schema}
    assert types["step"] == types["layer"] == types["n"] == "int64"
    assert types["value"] == types["dof"] == types["upper"] == "double"
    assert types["site"] == types["error"] == "string" and types["notes"].startswith("list<")
    about = json.loads(schema.metadata[b"anisoscope"])
    assert about["provenance"] == {"run": {"versions": {"torch": "2"}}} and about["recipe"] == {"run": {"seed": 3}}
    assert about["schema_version"] == about["table_version"] == 1


def test_batches_add_up(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    whole = pa.parquet.read_table(export(run, tmp_path / "a.parquet"))
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    assert pa.parquet.read_table(export(run, tmp_path / "b.parquet")).equals(whole)


def test_several_runs(tmp_path):
    make(tmp_path / "runs" / "a"), make(tmp_path / "runs" / "b")
    table = read_csv(export(tmp_path / "runs", tmp_path / "t.csv"))
    assert [row["run"] for row in table] == ["a"] * 10 + ["b"] * 10
    make(tmp_path / "other" / "a")
    with pytest.raises(RunError, match=r"two runs are called 'a'.*label"):
        export([tmp_path / "runs", tmp_path / "other" / "a"], tmp_path / "t.csv")
    both = {"first": tmp_path / "runs" / "a", "second": tmp_path / "other" / "a"}
    assert {row["run"] for row in read_csv(export(both, tmp_path / "t.csv"))} == {"first", "second"}
    with pytest.raises(OptionError, match="no run to export"):
        export([], tmp_path / "t.csv")


def test_an_empty_run_is_an_empty_table(tmp_path):
    RunWriter.create(tmp_path / "run").close()
    assert read_csv(export(tmp_path / "run", tmp_path / "t.csv")) == []
    assert pa.parquet.read_table(export(tmp_path / "run", tmp_path / "t.parquet")).num_rows == 0


def test_formats(tmp_path):
    run = make(tmp_path / "run")
    assert export(run, tmp_path / "deep" / "T.CSV").read_text().startswith("run,cell,step,")
    assert pa.parquet.read_table(export(run, tmp_path / "table", format="parquet")).num_rows == 10
    with pytest.raises(UnknownNameError, match="did you mean"):
        export(run, tmp_path / "t.parqet")
    with pytest.raises(UnknownNameError, match="export format"):
        export(run, tmp_path / "t.csv", format="xlsx")
    with pytest.raises(NotARunError):
        export(tmp_path / "deep", tmp_path / "t.csv")


def test_while_a_writer_is_at_work(tmp_path):
    run = make(tmp_path / "run")
    with RunWriter.create(run, exist="resume") as writer, RunReader(run) as reader:
        table = rows(reader)
        first = next(table)
        with writer.probe(step=200) as probe:
            probe.add_estimate(BARE, site="embed", measure="mean", slice="all")
        assert len([first, *table]) == 10, "one table is of one moment"
        assert len(list(rows(reader))) == 11


# ---- whole or not at all


@pytest.mark.parametrize("target", ["t.csv", "t.parquet"])
def test_a_failed_export_leaves_the_old_file(tmp_path, monkeypatch, target):
    run = make(tmp_path / "run")
    (tmp_path / target).write_text("old")
    true_rows = rows

    def broken(*arguments):
        for number, row in enumerate(true_rows(*arguments)):
            if number == 7:
                raise OSError(28, "No space left on device")
            yield row

    monkeypatch.setattr(module, "rows", broken)
    with pytest.raises(RunWriteError, match="disk is full"):
        export(run, tmp_path / target)
    assert (tmp_path / target).read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", target]


def test_a_target_that_cannot_be(tmp_path):
    run = make(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(RunWriteError, match="in the way"):
        export(run, tmp_path / "file" / "t.csv")
    (tmp_path / "t.csv").mkdir()
    with pytest.raises(RunWriteError):
        export(run, tmp_path / "t.csv")
    assert not list(tmp_path.glob(".*"))


def test_replacing_is_atomic_for_readers(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with files.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


# ---- formulas


HOSTILE = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", '=HYPERLINK("http://x","y")', "＝1", "'=1", "'"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_never_become_formulas(tmp_path, name):
    estimate = Estimate(value=-1.5, stderr=None, n=1, method=name, notes=(name,))
    with RunWriter.create(tmp_path / "run", name=name) as writer, writer.probe(step=-3, cell=name) as probe:
        probe.add_estimate(estimate, site=name, measure=name, slice=name)
        probe.fail(site=name, measure="other", slice=name, error=name)
    text = read_csv(export(tmp_path / "run", tmp_path / "t.csv"))
    for row in text:
        for column in ("run", "cell", "site", "slice"):
            assert row[column] == "'" + name
    assert text[0]["measure"] == text[0]["method"] == text[0]["notes"] == text[1]["error"] == "'" + name
    assert text[0]["value"] == "-1.5" and text[0]["step"] == "-3", "numbers are ours and stay numbers"
    table = pa.parquet.read_table(export(tmp_path / "run", tmp_path / "t.parquet")).to_pylist()
    assert table[0]["run"] == table[0]["measure"] == name, "Parquet runs nothing and keeps names as they are"


@given(st.text(max_size=6) | st.text("='+-@ \t", max_size=4))
def test_the_quote_can_be_taken_off_again(name):
    cell = module._cell(name, "text")
    assert cell.removeprefix("'") == name
    assert not cell.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r"))


# ---- provenance


def everything(value):
    """All the text in a nested value, keys included."""
    if isinstance(value, dict):
        return " ".join(everything(inner) for pair in value.items() for inner in pair)
    return " ".join(map(everything, value)) if isinstance(value, list) else str(value)


def test_what_provenance_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/anisoscope", "profile", "--seed", "3"])
    found = provenance(seeds=range(3), device="cuda:0", corpus={"name": "enwik8", "sha": "ab"}, model="org/name")
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == ["anisoscope", "profile", "--seed", "3"]
    assert found["seeds"] == [0, 1, 2] and found["device"] == "cuda:0" and found["model"] == "org/name"
    assert found["corpus"] == {"name": "enwik8", "sha": "ab"}
    assert {"anisoscope", "torch", "numpy", "transformers"} <= set(found["versions"])
    import torch

    assert found["versions"]["torch"] == torch.__version__
    assert found["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert found["git"] is None and found["time_utc"].endswith("+00:00") and found["cpus"] == os.cpu_count()


def test_provenance_imports_nothing_heavy():
    code = (
        "import sys\nfrom anisoscope.runs.provenance import provenance\nprovenance()\n"
        "print(*[name for name in ('torch', 'numpy', 'transformers', 'scipy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_nothing_private_gets_out(tmp_path, monkeypatch):
    home = tmp_path / "home" / "alice"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    monkeypatch.setattr(
        sys, "argv", [f"{home}/bin/tool", f"--out={home}/my runs/x", "../../alice/y", "--hf-token", "abc"]
    )
    found = provenance(
        corpus=home / "secret plans" / "text.txt",
        model=str(home / "work" / "models" / "m"),
        extra={
            "cache": "~/.cache/hub",
            "line": f"read {home}/a.txt, then '{home}/b.txt':{home}/c.txt",
            "url": "https://alice:pass@example.org/data",
            "uri": f"file://{home}/d.txt",
            str(home): [str(home), {"deep": f"@{home}/e"}],
        },
    )
    said = everything(found)
    for leak in ("alice", "pass", "abc", "secret plans", str(tmp_path)):
        assert leak not in said, leak
    assert found["corpus"] == "text.txt" and found["model"] == "models/m" and found["extra"]["cache"] == "hub"
    assert found["command"] == ["tool", "--out=x", "y", "--hf-token", "[hidden]"]
    assert found["extra"]["url"] == "https://example.org/data"


def test_of_this_very_process():
    said = everything(provenance())
    assert str(Path.home()) + "/" not in said and str(Path.cwd()) not in said
    if getpass.getuser() != "root":  # a word that versions and the like may hold by chance
        assert getpass.getuser() not in said


@pytest.mark.parametrize(
    "plain", ["org/name", "3/4", "n=5", "-1e-5", "a:b", "~5 %", "s3://bucket/key", "héllo wörld", ""]
)
def test_what_is_not_private_stays(plain):
    assert shorten(plain) == plain


def test_a_working_directory_above_the_home_does_not_tell(tmp_path, monkeypatch):
    home = tmp_path / "alice"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert shorten(f"{home}/x/y") == "y" and shorten(str(home)) == "~"


def test_secrets_on_the_command_line():
    words = ["x", "--api-key=k", "--token", "t", "--max-tokens", "5", "--tokenizer", "bpe", "--password", "--seed", "1"]
    hidden = ["x", "--api-key=[hidden]", "--token", "[hidden]", *words[4:]]
    assert command_line(words) == hidden
    assert command_line(["hf_" + "a" * 30]) == ["[hidden]"]


def test_what_is_not_json_is_refused():
    for bad in (object(), float("nan"), {1, 2}, b"x"):
        with pytest.raises(OptionError, match="provenance"):
            provenance(extra={"x": bad})


def test_git_state(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None

    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    try:
        git("init")
    except FileNotFoundError:
        pytest.skip("no git here")
    assert git_state(tmp_path) is None, "a repository without a commit"
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "untracked").write_text("1")
    assert git_state(tmp_path)["dirty"] is False, "a folder of runs beside the code is not a change of the code"
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == state | {"dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "no git on this machine"


# ---- the document


def test_the_document_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    document = (Path(__file__).parent.parent / "docs" / "runs.md").read_text()
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL):
        try:
            exec(block, names)
        except ModuleNotFoundError as error:
            assert error.name in ("duckdb", "polars"), error  # not among the dependencies
    for reader in names["everything"]:
        reader.close()
    shown = capsys.readouterr().out
    assert "50 0.4 0.1" in shown and re.search(r"resid\.11 +0\.4 +0\.4 +0\.4", shown)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["first.csv", "first.parquet", "renamed.csv", "runs"]
    (query,) = re.findall(r"```sql\n(.*?)```", document, re.DOTALL)
    plain = sqlite3.connect(tmp_path / "runs" / "first" / "records.sqlite")
    assert len(plain.execute(query).fetchall()) == 36
    for table, columns in re.findall(r"^\| `(\w+)` \| (`id`.*?) \|$", document, re.MULTILINE):
        there = [row[1] for row in plain.execute(f"PRAGMA table_info({table})")]
        said = re.findall(r"`(\w+)`", columns.split(";")[0])
        assert there[: len(said)] == said or table == "parts", table
    plain.close()
