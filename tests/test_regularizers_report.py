"""Regularisers in the report: pairs of seeds, intervals, what is not compared, and a small study by the command."""

import re

import pytest
import yaml
from scipy.stats import t as student
from typer.testing import CliRunner

from anisoscope.cli import app
from anisoscope.estimate import Estimate
from anisoscope.runs.reader import RunReader
from anisoscope.runs.store import RunWriter
from anisoscope.train.recipe import load_recipe
from anisoscope.views.regularizers import (
    difference,
    read_compared,
    regularizer_figures,
    regularizer_tables,
    regularizer_words,
    slowdown,
)
from anisoscope.views.report import write_report

BASE = {"architecture": "llama", "layers": 2, "width": 32}
MODELS = [
    BASE | {"name": "plain", "regularizer": None},
    BASE | {"name": "even", "regularizer": {"name": "istar", "weight": 0.5, "sites": ["resid.*"], "options": {}}},
    BASE | {"name": "damped", "regularizer": {"name": "tangent_damping", "sites": ["resid.1"], "options": {"rank": 4}}},
    BASE | {"name": "other size", "width": 64, "regularizer": {"name": "cosreg", "weight": 1.0}},
]
SEEDS = {0: 4.0, 1: 5.0, 2: 3.0}  # what a seed does to every model: far more than a regulariser
GAPS = {"plain": (0.0, 0.0, 0.0), "even": (0.10, 0.12, 0.11), "damped": (-0.2, 0.3, 0.1)}


PLANTED = (("resid.0", 5.0), ("resid.1", 0.2), ("resid.2", 0.4), ("final_norm", 9.0))  # an embedding unlike the layers


def one(value):
    return Estimate(value=value, stderr=None, n=10, method="planted")


def write_run(folder, gaps=GAPS, seeds=SEEDS, models=MODELS, stopped=()):
    """A study with known losses; ``stopped`` are cells that have no last look."""
    with RunWriter.create(folder, recipe={"models": models}, provenance={}) as writer:
        for variant, mine in gaps.items():
            for seed, gap in zip(seeds, mine):
                for step in (0, 10, 40):
                    if step == 40 and (variant, seed) in stopped:
                        continue
                    slow = {"plain": 1.0, "even": 1.5, "damped": 1.1}.get(variant, 1.0) * (1 + seed)
                    pace = {"median_seconds": 0.1 * slow, "processor_seconds": 0.2 * slow} if step else {}
                    info = {"variant": variant, "seed": seed, "pace": pace}
                    with writer.probe(step=step, cell=f"{variant} seed {seed}", info=info) as probe:
                        loss = seeds[seed] + gap * (step == 40) + (step == 10)
                        probe.add_estimate(one(loss), site="model", measure="loss", slice="all")
                        for site, value in PLANTED:
                            value = value + gap if site != "final_norm" else value
                            probe.add_estimate(one(value), site=site, measure="isoscore", slice="all")
                            probe.add_estimate(one(7.0), site=site, measure="isoscore", slice="no position 0")
    return RunReader(folder)


def test_differences_are_seed_by_seed(tmp_path):
    """The spread of seeds, a hundred times that of the differences, cancels: Student's interval of the differences."""
    (found,) = read_compared([write_run(tmp_path / "run")])
    assert found.plain == "plain" and [other.name for other in found.others] == ["even", "damped"]
    even, damped = (difference(other.pairs, "loss") for other in found.others)
    assert even.value == pytest.approx(0.11)
    half = student.ppf(0.975, 2) * 0.01 / 3**0.5
    assert even.interval() == pytest.approx((0.11 - half, 0.11 + half)) and even.over == "3 seeds"
    assert damped.interval()[0] < 0 < damped.interval()[1]
    geometry = difference(found.others[0].pairs, "isoscore")
    assert geometry.value == pytest.approx(0.11) and found.ended[1].geometry == {"isoscore": pytest.approx(0.3)}
    assert slowdown(found.others[0].pairs).value == pytest.approx(1.5)
    assert slowdown(found.others[1].pairs, processor=True).value == pytest.approx(1.1)
    (words,) = regularizer_words([found])
    assert "higher than plain: even +0.1100" in words and "not told apart from plain: damped" in words


def test_tables_hold_what_was_planted(tmp_path):
    first, second = regularizer_tables(read_compared([write_run(tmp_path / "run")]))
    rows = {row[0]: row for row in first.rows}
    gap = "+0.1100 (+0.0852 … +0.1348)"
    assert rows["even"][1:] == ("istar, weight 0.5", "4.11 ± 0.58", gap, "× 1.50 ± 0.00", "× 1.50 ± 0.00")
    assert rows["damped"][1] == "tangent_damping, rank 4, at resid.1" and "−" in rows["damped"][3]
    assert rows["plain"][1] == "none" and len({len(row) for row in first.rows} | {len(first.head)}) == 1
    assert second.head == ("Model", "IsoScore") and second.rows[1][1].endswith(gap)


def test_a_stopped_model_is_compared_where_both_stood(tmp_path):
    run = write_run(tmp_path / "run", stopped={("even", seed) for seed in SEEDS})
    (found,) = read_compared([run])
    assert {mine.step for mine, _ in found.others[0].pairs.values()} == {10}
    assert difference(found.others[0].pairs, "loss").value == pytest.approx(0)
    rows = regularizer_tables([found])[0].rows
    assert "(at step 10)" in rows[1][2] and "at step" not in rows[2][2]
    (figure,) = regularizer_figures([found])
    assert {line.tags["model"] for line in figure.panels[0].lines} == {"plain", "damped"}
    assert figure.caption.endswith("Not drawn, as it is not as far: even.")


def test_one_seed_among_models_with_several_is_marked(tmp_path):
    gaps = GAPS | {"even": GAPS["even"][:1]}
    (found,) = read_compared([write_run(tmp_path / "run", gaps)])
    losses, geometry = regularizer_tables([found])
    assert losses.rows[1][3] == "+0.1 (one seed)" and geometry.rows[1][1].endswith(" (one seed)")
    assert "(one seed)" not in losses.rows[2][3]
    assert regularizer_words([found])[0].endswith("One seed, so nothing is decided: even.")


def test_two_seeds_decide_nothing(tmp_path):
    """However well two seeds agree: there is one degree of freedom, and no way to see what a third would do."""
    agreeing = {"plain": (0.0, 0.0), "even": (0.1, 0.1001), "damped": (-0.1, -0.1001)}
    with write_run(tmp_path / "run", gaps=agreeing, seeds={0: 4.0, 1: 5.0}) as reader:
        (found,) = read_compared([reader])
    assert difference(found.others[0].pairs, "loss").interval()[0] > 0  # the test that is not made
    assert regularizer_words([found]) == [
        "Two seeds: no difference from plain is told apart from what another seed would do."
    ]


def test_one_seed_has_no_interval_and_claims_nothing(tmp_path):
    gaps = {name: mine[:1] for name, mine in GAPS.items()}
    (found,) = read_compared([write_run(tmp_path / "run", gaps, {0: 4.0})])
    assert difference(found.others[0].pairs, "loss").stderr is None
    assert "One seed" in regularizer_words([found])[0]
    assert "of one seed, so without an interval" in regularizer_tables([found])[0].caption
    (figure,) = regularizer_figures([found])
    assert "One seed" in figure.caption and all(end is None for line in figure.panels[0].lines for end in line.upper)


def test_the_figure_has_a_point_for_each_seed_and_means(tmp_path):
    (figure,) = regularizer_figures(read_compared([write_run(tmp_path / "run")]))
    (panel,) = figure.panels
    for role, name in enumerate(("plain", "even", "damped")):
        mine = [line for line in panel.lines if line.tags["model"] == name]
        assert {line.role for line in mine} == {role}
        singles = [line for line in mine if line.joined and len(line.x) == 1]
        assert sorted(line.y[0] for line in singles) == sorted(SEEDS[s] + g for s, g in zip(SEEDS, GAPS[name]))
        (mean,) = [line for line in mine if not line.joined]
        assert mean.y[0] == pytest.approx(4 + sum(GAPS[name]) / 3) and mean.lower[0] < mean.y[0] < mean.upper[0]
    assert [toggle.value for toggle in figure.toggles] == ["plain", "even", "damped"]


def test_runs_without_a_comparison_have_no_section(tmp_path):
    alone = [model for model in MODELS if model["name"] != "plain"]
    run = write_run(tmp_path / "alone", models=alone)
    assert read_compared([run]) == [] and regularizer_tables([]) == [] and regularizer_figures([]) == ()
    with (
        RunWriter.create(tmp_path / "bare", recipe={}, provenance={}) as writer,
        writer.probe(step=0, cell="x") as probe,
    ):
        probe.add_estimate(one(1.0), site="resid.0", measure="isoscore", slice="all")
    assert read_compared([RunReader(tmp_path / "bare")]) == []
    page = write_report(run, tmp_path / "page.html").read_text()
    assert 'id="regularisers"' not in page


def tiny_recipe(folder):
    """The recipe of the package, as it stands but for its sizes."""
    values = load_recipe("regularizers").describe()
    for model in values["models"]:
        model |= {"width": 16, "heads": 2, "layers": 2}
        if model["regularizer"] and model["regularizer"]["name"] == "local_curvature":
            model["regularizer"]["sites"] = ["resid.[12]"]
    values["data"] |= {"max_chars": 60_000, "sequence_length": 16, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    values["optimisation"] |= {"batch_size": 8}
    measures = ["mean_cosine", "spectral_ratio", "isoscore"]
    values["monitor"] |= {"schedule": {"log_spaced": 2}, "sequences": 8, "measures": measures, "gradient_measures": []}
    values["evaluation"] |= {"every": 40, "sequences": 16}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_small_study_by_the_command(tmp_path):
    recipe, out = tiny_recipe(tmp_path), tmp_path / "run"
    done = CliRunner().invoke(
        app, ["train", str(recipe), "--steps", "24", "--seeds", "0", "--device", "cpu", "--out", str(out), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    with RunReader(out) as run:
        (found,) = read_compared([run])
        assert len(found.others) == 6 and found.measures == ("mean_cosine", "spectral_ratio", "isoscore")
        pace = [probe.info["pace"] for probe in run.probes() if probe.step == 24]
        assert len(pace) == 7 and all(min(one["median_seconds"], one["processor_seconds"]) > 0 for one in pace)
    values = {other.name: {m: difference(other.pairs, m).value for m in found.measures} for other in found.others}
    assert values["istar"]["isoscore"] > 0 and values["spectral"]["spectral_ratio"] < 0
    assert values["cosreg"]["mean_cosine"] < 0
    page = (out / "report.html").read_text()
    assert 'id="regularisers"' in page and "tangent_damping, rank 16" in page
    assert len(re.findall(r'data-panel="', page)) > 3
