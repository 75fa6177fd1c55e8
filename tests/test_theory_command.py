"""`anisoscope theory`: what it says, what it stores, how its page reads, and what happens when a truth is missed."""

import dataclasses
import io
import json
import re

import pytest
from report_runs import profile_run
from test_cli import run, run_many

from anisoscope.commands.theory import check_table, run_one, theory
from anisoscope.errors import RunVersionError
from anisoscope.estimate import Estimate
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.theory import registry
from anisoscope.theory.experiment import Check, Experiment, Outcome, Series
from anisoscope.theory.registry import experiments
from anisoscope.views.figures import build_figures
from anisoscope.views.report import write_report
from anisoscope.views.sections import build_sections
from anisoscope.views.series import is_theory, read_series
from anisoscope.views.theory import (
    LAW,
    finer,
    theory_figures,
    theory_findings,
    theory_headline,
    theory_tables,
    theory_words,
)

NAMES = ("chords", "counter-example")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of two experiments, and what the command said."""
    folder = tmp_path_factory.mktemp("theory")
    return folder, *run("theory", *reversed(NAMES), "--seed", 3, cwd=folder)


@pytest.fixture(scope="module")
def series(place):
    with RunReader(place[0] / "runs" / "theory") as reader:
        return read_series([reader])


@pytest.mark.parametrize("key", ["site", "measure", "slice", "truth", "agrees", None])
def test_checks_of_another_version_are_one_clear_line(series, key):
    info = dict(series[0].facts["theory"])
    first = {name: value for name, value in info["truths"][0].items() if name != key} if key else "0.5"
    old = dataclasses.replace(series[0], facts=dict(series[0].facts) | {"theory": info | {"truths": [first]}})
    with pytest.raises(RunVersionError) as caught:
        theory_tables([old])
    words = str(caught.value)
    assert "chords" in words and "anisoscope theory chords" in words and (key or "mapping") in words
    assert "\n" not in words


def made(value, truth, *, stderr=0.1, site="plane", measure="number", **more):
    over = None if stderr is None else "repeats"
    return Check(site, measure, Estimate(value=value, stderr=stderr, n=4, method="m", over=over), truth, **more)


def experiment(name, *checks, series=(), notes=("a note",), fail=None):
    def go(seed):
        if fail is not None:
            raise fail
        return Outcome(tuple(checks), tuple(series), tuple(notes))

    return Experiment(name, f"Title of {name}", "Is it so?", go, 1.0)


def stored(folder, *made_up):
    with RunWriter.create(folder) as writer:
        for one in made_up:
            run_one(writer, one, 0)
    with RunReader(folder) as reader:
        return read_series([reader])


def test_it_says_what_agrees_and_where_it_is(place):
    _, code, out, err = place
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[-1].startswith("report:  runs/theory/report.html") and lines[-2] == "run:     runs/theory"
    assert re.fullmatch(r"30 of 30 numbers agree with the truth, within 5 standard errors \(se\)", lines[-3])
    titles = [line for line in lines if line.rstrip().endswith(("(chords)", "(counter-example)"))]
    assert [title.split(" (")[0].strip() for title in titles] == [
        "Chord against arc",
        "The counter-example to the ratio law",
    ]
    assert out.count(" ok") == 30 and " off " not in out.replace("off by", "")


def test_it_stores_numbers_truths_and_laws(place):
    folder = place[0] / "runs" / "theory"
    with RunReader(folder) as reader:
        assert reader.cells() == list(NAMES) and not reader.failures()
        assert reader.recipe == {"theory": {"experiments": list(NAMES), "seed": 3}}
        assert reader.provenance["seeds"] == [3]
        probes = {probe.cell: probe.info for probe in reader.probes()}
        for name in NAMES:
            info = probes[name]
            assert (
                (info["kind"], info["seed"]) == ("theory", 3) and info["title"] and info["question"] and info["notes"]
            )
            records = {(r.site, r.measure, r.slice): r.estimate for r in reader.records(cell=name)}
            assert len(records) == len(info["truths"])
            for truth in info["truths"]:
                estimate = records[truth["site"], truth["measure"], truth["slice"]]
                assert truth["agrees"] is True
                assert estimate.notes[0] == f"truth {truth['truth']:.6g}"
        curves = {(c.site, c.name, c.slice): c for c in reader.curves(cell="chords")}
        measured, law = (curves["circle", f"arc² − chord²{ending}", "all"] for ending in ("", LAW))
        assert measured.x == law.x and measured.stderr is not None and law.stderr is None
        assert law.y == pytest.approx([x**4 / 12 for x in law.x])


def test_a_new_run_goes_beside_an_old_one_and_an_old_one_is_kept(place):
    cases = {
        "beside": ("theory", "counter-example", "--no-report", "--quiet"),
        "same": ("theory", "counter-example", "--out", "runs/theory", "--quiet"),
        "wrong": ("theory", "chord"),
        "list": ("theory", "--list"),
        "few": ("theory", "--list", "chords"),
        "seed": ("theory", "--seed", "-1"),
        "large seed": ("theory", "--seed", "99999999999999999999"),
    }
    found = run_many({case: [*arguments] for case, arguments in cases.items()}, place[0])
    code, out, _ = found["beside"]
    assert code == 0
    assert out.splitlines() == [
        "9 of 9 numbers agree with the truth, within 5 standard errors (se)",
        "run:     runs/theory-2",
    ]
    assert not (place[0] / "runs" / "theory-2" / "report.html").exists()
    code, out, err = found["same"]
    assert code == 2 and "runs/theory already holds a run; choose another folder" in err and err.count("\n") == 1
    code, out, err = found["wrong"]
    assert (code, out) == (2, "") and "unknown experiment 'chord'; did you mean 'chords'?" in err
    code, out, err = found["list"]
    assert code == 0 and all(one.name in out for one in experiments())
    assert not (place[0] / "runs" / "theory-3").exists()
    code, out, _ = found["few"]
    assert "chords" in out and "counter-example" not in out
    assert found["seed"][0] == found["large seed"][0] == 2


def test_a_missed_truth_is_exit_code_one(tmp_path, monkeypatch, capsys):
    wrong = experiment("off", made(2.0, 1.0), made(1.0, 1.0, measure="good"))
    monkeypatch.setattr(registry, "experiments", lambda: (wrong,))
    with pytest.raises(Exception) as ended:
        theory(["off"], out=tmp_path / "run")
    assert ended.value.exit_code == 1
    out = capsys.readouterr().out
    assert "1 of 2 numbers agree" in out and "+10.0 se" in out and re.search(r"\boff\b\s*$", out, re.MULTILINE)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "1 of 2 numbers are off the truth, number (plane) first." in page and "v-bad" in page


def test_an_experiment_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    broken, good = experiment("broken", fail=RuntimeError("it broke")), experiment("good", made(1.0, 1.0))
    monkeypatch.setattr(registry, "experiments", lambda: (broken, good))
    with pytest.raises(Exception) as ended:
        theory(out=tmp_path / "run")
    assert ended.value.exit_code == 1
    assert "broken: failed: RuntimeError: it broke" in capsys.readouterr().out
    with RunReader(tmp_path / "run") as reader:
        (failure,) = reader.failures()
        assert failure.error == "RuntimeError: it broke" and [r.cell for r in reader.records()] == ["good"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "it broke" in page and "It failed and gave no number." in page and "All 0" not in page


def printed(table, width):
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_names_place_once_and_leaves_unjudged_numbers_alone():
    checks = made(1.0, 1.0, slice="b"), made(5.0, None, measure="seen", slice="b"), made(0.5, 0.5, stderr=None)
    text = printed(check_table(experiment("x"), Outcome(checks)), 100)
    assert text.count("plane, b") == 1 and text.count("ok") == 2
    seen = next(line for line in text.splitlines() if "seen" in line)
    assert "se" not in seen.replace("seen", "") and "0.1" in seen


def test_nothing_of_the_table_is_cut_off_in_a_plain_terminal():
    tiny = made(-0.000012345, -0.000012345, stderr=1.1e-07, measure="normal part / its closed form")
    text = printed(check_table(experiment("x"), Outcome((tiny,))), 80)
    assert re.search(r"-1.2345e-05 +-1.2345e-05 +1.1e-07 +\+0.0 se +ok\b", text)


# The page


def test_figures_show_points_and_laws(series):
    chords, counter = theory_figures(series)
    assert [panel.title for panel in chords.panels] == ["Arc² − chord²", "Measured over predicted"]
    first = chords.panels[0]
    assert first.x.log and first.y.log and chords.columns == 2
    points = [line for line in first.lines if not line.joined]
    assert len(points) == 7 and all(low is not None for line in points for low in line.upper)
    # One law for all: with lengths in units of 1/kappa the surfaces share it.
    (law,) = [line for line in first.lines if line.joined]
    assert law.name == "law" and law.y == pytest.approx([x**4 / 12 for x in law.x])
    assert [toggle.value for toggle in chords.toggles] == [line.name for line in points]
    assert len({line.role for line in points}) == 7 and all(toggle.on for toggle in chords.toggles)
    signed = next(panel for panel in counter.panels if panel.title.startswith("Tangent part"))
    assert signed.x.log and not signed.y.log


def test_experiments_are_no_models(series, place, tmp_path):
    assert all(map(is_theory, series)) and build_figures(series) == ()
    page = (place[0] / "runs" / "theory" / "report.html").read_text()
    for word in ("Layer profiles", "Models side by side", "Spectra", "sites of one model"):
        assert word not in page
    assert "Theory: Chord against arc" in page and theory_headline(series) in page
    assert theory_headline(series) == "2 experiments with known answers: 30 of 30 numbers agree with theory."


def test_a_page_of_models_and_experiments_keeps_them_apart(place, tmp_path):
    profile_run(tmp_path / "model", layers=4).close()
    with RunReader(tmp_path / "model") as one, RunReader(place[0] / "runs" / "theory") as other:
        page = write_report([one, other], tmp_path / "page.html").read_text()
        both = read_series([one, other])
    assert sum(map(is_theory, both)) == 2
    assert "Layer profiles" in page and "Theory: Chord against arc" in page
    assert "Models side by side" not in page


def test_sections_can_be_pointed_at(series):
    found = build_sections(theory_figures(series), theory_words(series), theory_tables(series))
    assert [section["name"] for section in found] == [
        "Theory: Chord against arc",
        "Theory: The counter-example to the ratio law",
    ]
    for section in found:
        assert re.fullmatch(r"[a-z][a-z0-9-]*", section["id"])  # a selector, or the page cannot draw
        assert section["figures"] and section["tables"] and "agree with the truth" in section["words"][0]


def test_the_table_holds_every_number_in_order(series):
    (table,) = theory_tables(series)["Theory: Chord against arc"]
    truths = series[0].facts["theory"]["truths"]
    assert [row[:2] for row in table.rows] == [(truth["site"], truth["measure"]) for truth in truths]
    assert {row[-1] for row in table.rows} == {"agrees"}
    assert all(row[-2].endswith(" se") or "e−" in row[-2] for row in table.rows)


def test_verdicts_in_words(tmp_path):
    shown = stored(
        tmp_path / "run",
        experiment("none", made(1.0, 1.0, stderr=None), made(7.0, None, measure="seen")),
        experiment("far", made(1.0, 1.0), made(1.3, 1.0, measure="far one")),
    )
    words = {name: said[0][1] for name, said in theory_findings(shown).items()}
    assert words["Title of none"] == "The one number agrees with the truth."
    assert "far one (plane), by 3.0 standard errors" in words["Title of far"]
    (near,) = theory_tables(stored(tmp_path / "near", experiment("near", made(0.999, 1.0))))["Theory: Title of near"]
    assert near.rows[0][-2] == "+0.0 se"
    (table,) = theory_tables(shown)["Theory: Title of none"]
    assert table.rows[1] == ("plane", "seen", "", "7.00 ± 0.1", "", "shown")
    assert theory_figures(shown) == ()


def test_many_places_get_a_panel_each_and_slices_too(tmp_path):
    def line(site, slice="all", y=(1.0, 2.0, 3.0), law=(1.0, 2.0, 3.0)):
        return Series(site, "curve", (1.0, 2.0, 3.0), y, None, "x", "y", slice, law)

    many = [line(f"place {i}") for i in range(9)]
    sliced = [line("here", "a"), line("here", "b", y=(0.0, -1.0, 2.0), law=None)]
    shown = stored(
        tmp_path / "run", experiment("many", made(1.0, 1.0), series=many), experiment("sliced", series=sliced)
    )
    first, second = theory_figures(shown)
    assert [panel.title for panel in first.panels] == [f"place {i}" for i in range(9)] and not first.toggles
    assert first.columns == 3
    assert [panel.title for panel in second.panels] == ["Curve · a", "Curve · b"]
    assert len(second.panels[0].lines) == 2 and len(second.panels[1].lines) == 1 and not second.panels[1].y.log
    assert "Where points have no line" in second.caption and "Where points have no line" not in first.caption
    assert second.panels[1].lines[0].upper == (None, None, None)


def test_a_law_is_straight_on_its_own_axes():
    x, y = (1.0, 10.0, 100.0), (1.0, 100.0, 10_000.0)
    fine_x, fine_y = finer(x, y, True, True)
    assert len(fine_x) == 64 and fine_y == pytest.approx([value**2 for value in fine_x])
    fine_x, fine_y = finer((3.0, 1.0), (7.0, 3.0), False, False)
    assert fine_y == pytest.approx([2 * value + 1 for value in fine_x])
    assert finer((1.0,), (2.0,), True, True) == ((1.0,), (2.0,))


def test_what_is_stored_is_plain(series):
    info = series[0].facts["theory"]
    assert json.loads(json.dumps(dict(info))) == info
    assert {field.name for field in dataclasses.fields(Check)} - {"estimate"} <= set(info["truths"][0])
