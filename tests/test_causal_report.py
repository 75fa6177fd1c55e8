"""The report of a study of token frequency: slopes are those of a plain fit, and it says what they do not show."""

import math

import numpy as np
import pytest
from scipy import stats

from anisoscope.estimate import Estimate
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.train.recipe import parse_recipe
from anisoscope.views.causal import Place, arms_of, behind, causal_figures, difference, lines_of_arms, slope
from anisoscope.views.causal_words import causal_tables, causal_words, places_of, slopes_of
from anisoscope.views.report import write_report
from anisoscope.views.seeds import pool_seeds
from anisoscope.views.series import read_series
from anisoscope.views.shelf import Shelf
from anisoscope.views.training import loss_figures
from anisoscope.watching.study import run_study

SIZES = "architecture: llama, objective: causal, layers: 2, width: 16, heads: 2"
RECIPE = parse_recipe(f"""
name: tiny
data: {{max_chars: 60000, tokenizer: {{kind: bpe, vocab_size: 300}}, sequence_length: 16}}
models:
  - {{name: plain, {SIZES}}}
  - {{name: even, {SIZES}, frequency: {{method: loss, exponent: 0.0}}}}
  - {{name: steep, {SIZES}, frequency: {{method: loss, exponent: 1.5}}}}
  - {{name: dealt, {SIZES}, frequency: {{method: loss, exponent: 0.0, placebo: true}}}}
  - {{name: drawn, {SIZES}, frequency: {{method: resample, exponent: 1.5}}}}
optimisation: {{steps: 6, batch_size: 8, lr: 0.003}}
seeds: [0, 1]
evaluation: {{every: 6, sequences: 8}}
device: cpu
monitor:
  schedule: {{log_spaced: 2}}
  sequences: 12
  sites: [resid.*]
  measures: [spectral_ratio, two_nn]
  gradient_measures: []
  tangent: {{proxies: [pca], rank: 4, draws: 19, bins: 2, referee: never}}
""")
LANGUAGES = parse_recipe(f"""
name: tiny-languages
data:
  source: zipf
  tokenizer: {{kind: ids, vocab_size: 40}}
  language: {{exponent: 1.0, order: 1, tokens: 6000}}
  sequence_length: 16
models:
  - {{name: even, {SIZES}, language: {{exponent: 0.0}}}}
  - {{name: zipf, {SIZES}, language: {{exponent: 1.0}}}}
optimisation: {{steps: 4, batch_size: 8, lr: 0.003}}
evaluation: {{every: 4, sequences: 8}}
device: cpu
monitor: {{schedule: {{log_spaced: 2}}, sequences: 16, measures: [spectral_ratio], gradient_measures: []}}
""")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frequency") / "run"
    run_study(RECIPE, folder)
    return folder


def shelves(folder):
    with RunReader(folder) as reader:
        return [Shelf(one) for one in pool_seeds(read_series([reader]))]


@pytest.fixture(scope="module")
def found(run):
    return shelves(run)


@pytest.fixture(scope="module")
def values(run):
    """Values of the last step by cell, site, measure and the first words of the slice."""
    with RunReader(run) as reader:
        return {
            (r.cell, r.site, r.measure, r.slice.split(":")[0]): r.estimate.value
            for r in reader.records()
            if r.step == RECIPE.optimisation.steps
        }


def test_every_look_tells_its_exponent(run):
    with RunReader(run) as reader:
        told = {probe.cell: probe.info["frequency"] for probe in reader.probes()}
    assert len(told) == 10
    own = told["plain seed 0"]["own_exponent"]
    assert all(one["own_exponent"] == own and one["own_stderr"] > 0 for one in told.values())
    assert told["plain seed 0"]["exponent"] == own and told["plain seed 0"]["method"] == "none"
    assert told["even seed 1"]["exponent"] == pytest.approx(0.0, abs=1e-9)
    assert told["steep seed 0"]["exponent"] == pytest.approx(1.5) and told["steep seed 0"]["stderr"] > 0
    assert told["dealt seed 0"]["exponent"] == own and told["dealt seed 0"]["method"] == "placebo"
    assert own < told["drawn seed 0"]["exponent"] < 1.5 and told["drawn seed 0"]["short"]


def test_a_slope_is_that_of_a_straight_line_for_each_seed(found, values):
    arms = arms_of(found)
    groups = lines_of_arms(arms)
    assert {method: [arm.label for arm in mine] for method, mine in groups.items()} == {
        "loss": ["even", "plain", "steep"], "resample": ["plain", "drawn"], "placebo": ["dealt"],
    }  # fmt: skip
    x = [arm.exponent for arm in groups["loss"]]
    for place in (Place("spectral_ratio", "resid.1"), Place("loss", "model"), Place("loss", "model", (1, 2))):
        part = "all" if place.bin is None else "frequency 1 of 2 (rarest)"
        fits = []
        for seed in (0, 1):
            cells = [f"{arm.label} seed {seed}" for arm in groups["loss"]]
            fits.append(np.polyfit(x, [values[cell, place.site, place.measure, part] for cell in cells], 1)[0])
        one = slope(groups["loss"], place)
        assert one.value == pytest.approx(np.mean(fits), rel=1e-9)
        assert one.stderr == pytest.approx(np.std(fits, ddof=1) / math.sqrt(2), rel=1e-6)
        assert one.dof == 1 and one.over == "2 seeds"
    dealt, plain = (next(arm for arm in arms if arm.label == name) for name in ("dealt", "plain"))
    apart = difference(dealt, plain, Place("two_nn", "resid.2"))
    each = [
        values[f"dealt seed {seed}", "resid.2", "two_nn", "all"]
        - values[f"plain seed {seed}", "resid.2", "two_nn", "all"]
        for seed in (0, 1)
    ]
    assert apart.value == pytest.approx(np.mean(each)) and apart.over == "2 seeds"


def test_the_page_has_the_section_with_its_figures_and_limits(run, found, values, tmp_path):
    with RunReader(run) as reader:
        page = write_report(reader, tmp_path / "report.html").read_text()
    assert page.count('<h2 id="effect-of-token-frequency-title">Effect of token frequency</h2>') == 1
    assert "It does not show that text with another exponent would do the same" in page
    assert "Out of reach: 1.5; further would leave fewer than 10 % of the windows" in page
    assert "a placebo has the same noise and no change of types" in page
    figures = {figure.key: figure for figure in causal_figures(found)}
    assert list(figures) == ["causal-geometry", "causal-energy", "causal-distances", "causal-losses"]
    panel = figures["causal-geometry"].panels[0]
    line = next(one for one in panel.lines if one.tags["method"] == "loss weights" and one.tags["site"] == "resid.1")
    assert len(line.x) == 3 and line.x == tuple(sorted(line.x)) and all(end is not None for end in line.upper)
    expected = np.mean([values[f"steep seed {seed}", "resid.1", "spectral_ratio", "all"] for seed in (0, 1)])
    assert line.y[-1] == pytest.approx(expected) and "exponent 1.5" in line.hover[-1]
    energy = figures["causal-energy"].panels[0]
    assert {one.shade for one in energy.lines} == {0.0, 1.0} and "mean and 95 % interval over 2 seeds" in (
        figures["causal-energy"].caption
    )


def test_words_and_tables_count_what_is_there(found):
    words = causal_words(found)
    places = places_of(arms_of(found))
    tested = slopes_of(lines_of_arms(arms_of(found))["loss"], places)
    sure = sum(one.sure for one in tested.values())
    # One degree of freedom: nothing is tested, and what would be needed is said, once.
    assert sure == 0 and words[1].startswith("Two seeds: nothing is decided.") and words.count(words[1]) == 1
    t = float(stats.t.isf(0.025 / len(places), 1)), float(stats.t.isf(0.025 / len(places), 4))
    assert f"lie {t[0]:.3g} standard errors from 0; with 5 seeds {t[1]:.3g} would do" in words[1]
    assert any("dealt at random" in one and "is not tested" in one for one in words)
    models, slopes = causal_tables(found)
    assert [row[0] for row in models.rows][:1] == ["even"] and len(models.rows) == 5 and len(slopes.rows) == len(places)
    assert models.head[-1] == "Held-out loss (nats)" and slopes.head[-1] == "dealt minus plain"
    assert all(one.adjusted is None for one in tested.values())
    assert "No star: it takes 3 seeds" in slopes.caption and not any("*" in cell for row in slopes.rows for cell in row)
    place = Place("spectral_ratio", "resid.1")
    even, plain, steep = (arm.at_end(place).estimate.value for arm in lines_of_arms(arms_of(found))["loss"])
    assert tested[place].bent == ((plain - even) * (steep - plain) < 0)
    drawn = slopes_of(lines_of_arms(arms_of(found))["resample"], places)
    assert not any(one.bent for one in drawn.values())  # two points


def made_study(folder, seeds, values):
    """Three arms with one number each, ``values(exponent, seed)``."""
    with RunWriter.create(folder, name="made") as writer:
        for name, exponent in (("even", 0.0), ("plain", 1.0), ("steep", 2.0)):
            told = {"method": "none" if name == "plain" else "loss", "exponent": exponent, "effective_share": 1.0}
            for seed in range(seeds):
                info = {"variant": name, "seed": seed, "frequency": told}
                with writer.probe(step=1, cell=f"{name} seed {seed}", info=info) as probe:
                    one = Estimate(value=values(exponent, seed), stderr=None, n=8, method="made up")
                    probe.add_estimate(one, site="model", measure="loss", slice="all")
                    probe.add_estimate(one, site="model", measure="train_loss", slice="all")
    return shelves(folder)


@pytest.mark.parametrize(("seeds", "sure"), [(1, False), (2, False), (3, True)])
def test_below_three_seeds_nothing_is_tested(tmp_path, seeds, sure):
    """Slopes that agree to one part in ten thousand pass at one degree of freedom too: that is no reason for a star."""
    found = made_study(tmp_path / "run", seeds, lambda exponent, seed: exponent * (1 + 1e-4 * (-1) ** seed * seed))
    one = slopes_of(arms_of(found), [Place("loss", "model")])[Place("loss", "model")]
    assert one.sure == sure and (one.adjusted is None) == (seeds < 3)
    words = " ".join(causal_words(found))
    assert ("1 of 1 slope differ" in words) == sure and ("nothing is decided" in words) == (seeds < 3)
    (table,) = [table for table in causal_tables(found) if table.key == "causal-slopes"]
    assert ("*" in table.rows[0][-1]) == sure and ("* differs" in table.caption) == sure
    if seeds == 2:
        assert stats.ttest_1samp([1.0, 1 - 1e-4], 0).pvalue < 0.05  # the test that is not made


def test_weighted_training_losses_are_not_held_against_the_held_out_one(tmp_path):
    found = made_study(tmp_path / "run", 2, lambda exponent, seed: exponent + seed)
    (figure,) = loss_figures(found)
    assert "The training loss of even, steep is weighted, as it was trained." in figure.caption
    assert "over 2 seeds (Student's t)" in figure.caption and "12.7 standard errors" in figure.caption
    (plain,) = loss_figures([one for one in found if one.label == "plain"])
    assert "weighted" not in plain.caption


def test_languages_show_what_is_above_the_entropy_rate(tmp_path):
    run_study(LANGUAGES, tmp_path / "run")
    found = shelves(tmp_path / "run")
    arms = arms_of(found)
    assert [(arm.label, arm.method, arm.exponent) for arm in arms] == [
        ("even", "language", 0.0),
        ("zipf", "language", 1.0),
    ]
    (models, slopes) = causal_tables(found)
    assert models.head[-2:] == ("Entropy rate", "Excess")
    with RunReader(tmp_path / "run") as reader:
        rate = {probe.cell: probe.info["frequency"]["entropy_rate"] for probe in reader.probes()}
        (loss,) = [
            r.estimate.value for r in reader.records()
            if (r.cell, r.measure, r.step, r.slice) == ("zipf", "loss", 4, "all")
        ]  # fmt: skip
        page = write_report(reader, tmp_path / "report.html").read_text()
    excess = loss - rate["zipf"]
    assert models.rows[1][-1] == f"{excess:.3f}" and excess > 0 and rate["even"] != rate["zipf"]
    assert slopes.rows and "nothing is decided" in " ".join(causal_words(found))  # one seed
    assert "at exponent 0 the bins of frequency part tokens by chance" in page


def test_a_model_that_is_not_as_far_is_left_out_and_named(tmp_path):
    with RunWriter.create(tmp_path / "run", name="half done") as writer:
        for name, exponent, seeds, steps in (
            ("plain", 0.8, 2, (0, 4)), ("even", 0.0, 2, (0, 4)), ("late", 0.5, 2, (0, 2)), ("lone", 1.5, 1, (0, 4)),
        ):  # fmt: skip
            told = {"method": "none" if name == "plain" else "loss", "exponent": exponent, "effective_share": 1.0}
            for seed in range(seeds):
                for step in steps:
                    info = {"variant": name, "seed": seed, "frequency": told}
                    with writer.probe(step=step, cell=f"{name} seed {seed}", info=info) as probe:
                        one = Estimate(value=exponent + seed * step, stderr=None, n=8, method="made up")
                        probe.add_estimate(one, site="model", measure="loss", slice="all")
    found = shelves(tmp_path / "run")
    assert [arm.label for arm in arms_of(found)] == ["even", "plain"]
    assert behind(found) == ["late", "lone seed 0"]
    assert any("lack a seed there: late and lone seed 0." in words for words in causal_words(found))
    one = slope(arms_of(found), Place("loss", "model"))
    assert one.value == pytest.approx(1.0) and one.stderr == pytest.approx(0.0, abs=1e-12)  # seeds cancel


def test_a_placebo_is_taken_with_the_seeds_it_has(tmp_path):
    with RunWriter.create(tmp_path / "run", name="half done") as writer:
        for name, method, exponent in (("plain", "none", 0.8), ("even", "loss", 0.0), ("dealt", "placebo", 0.8)):
            told = {"method": method, "exponent": exponent, "effective_share": 0.2, "asked": 0.0}
            for seed in (0, 1):
                for step in (0, 1, 4) if (name, seed) != ("dealt", 1) else (0, 1):
                    info = {"variant": name, "seed": seed, "frequency": told}
                    with writer.probe(step=step, cell=f"{name} seed {seed}", info=info) as probe:
                        value = exponent + seed * step + (0.25 if name == "dealt" else 0.0)
                        one = Estimate(value=value, stderr=None, n=8, method="made up")
                        probe.add_estimate(one, site="model", measure="loss", slice="all")
    found = shelves(tmp_path / "run")
    arms = {arm.label: arm for arm in arms_of(found)}
    assert set(arms) == {"even", "plain", "dealt"} and behind(found) == []
    place = Place("loss", "model")
    assert arms["dealt"].partial and arms["dealt"].there == [0] and not arms["plain"].partial
    assert arms["dealt"].by_seed(place) == {0: 1.05} and arms["dealt"].at_end(place).estimate.value == 1.05
    assert slope([arms["even"], arms["plain"]], place).over == "2 seeds"  # the lines keep all seeds
    words = " ".join(causal_words(found))
    assert "dealt: 1 of 2 seeds at the last step" in words and "With one seed, what it moves has no error bar" in words
    models, slopes = causal_tables(found)
    assert any(row[0] == "dealt" and row[5] == "1.050 (one seed)" for row in models.rows)
    assert slopes.rows[0][-1] == "+0.25 (no error bar)"
    (figure,) = causal_figures(found)
    assert [one.value for one in figure.toggles if one.kind == "seeds"] == ["mean of 2 seeds", "each seed"]
    assert any(line.visible and line.y == (1.05,) and line.upper == (None,) for line in figure.panels[0].lines)
    assert "dealt: 1 of 2 seeds." in figure.caption and figure.shades is None


def test_drawn_windows_are_compared_with_drawn_windows(tmp_path):
    with RunWriter.create(tmp_path / "run", name="drawn") as writer:
        for name, method, exponent, loss in (
            ("plain", "none", 0.8, 9.0), ("up", "resample", 0.9, 3.0), ("down", "resample", 0.7, 1.0),
            ("dealt", "placebo", 0.8, 2.0),
        ):  # fmt: skip
            told = {"method": method, "exponent": exponent, "effective_share": 0.1, "asked": 0.0}
            told["placebo_of"] = "resample" if method == "placebo" else None
            info = {"variant": name, "seed": 0, "frequency": told}
            with writer.probe(step=1, cell=name, info=info) as probe:
                one = Estimate(value=loss, stderr=None, n=8, method="made up")
                probe.add_estimate(one, site="model", measure="loss", slice="all")
    found = shelves(tmp_path / "run")
    groups = lines_of_arms(arms_of(found))
    assert [arm.label for arm in groups["resample"]] == ["down", "dealt", "up"]
    assert slope(groups["resample"], Place("loss", "model")).value == pytest.approx(10.0)
    assert any("dealt stands for the plain model" in words for words in causal_words(found))


@pytest.mark.parametrize(
    "told",
    [None, "loss", {}, {"method": "loss"}, {"method": "magic", "exponent": 1.0}, {"method": "loss", "exponent": "one"},
     {"method": "loss", "exponent": True}],
)  # fmt: skip
def test_strange_words_about_frequency_are_no_section(tmp_path, told):
    with RunWriter.create(tmp_path / "run", name="strange") as writer:
        for cell in ("one", "two"):
            with writer.probe(step=1, cell=cell, info={"variant": cell, "seed": 0, "frequency": told}) as probe:
                one = Estimate(value=0.5, stderr=None, n=8, method="made up")
                probe.add_estimate(one, site="model", measure="loss", slice="all")
                probe.add_estimate(one, site="resid.1", measure="spectral_ratio", slice="all")
    found = shelves(tmp_path / "run")
    assert arms_of(found) == [] and causal_words(found) == [] and causal_tables(found) == []
    with RunReader(tmp_path / "run") as reader:
        assert "Effect of token frequency" not in write_report(reader, tmp_path / "report.html").read_text()
