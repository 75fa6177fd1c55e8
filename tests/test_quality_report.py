"""Geometry and quality in the report: correlations that are wrong as rarely as they say, and what is told of them."""

import itertools

import numpy as np
import pytest
from report_runs import HOSTILE
from scipy import stats
from test_report import Page, program_of

from anisoscope.errors import ShapeError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.views.associations import adjusted, changes, levels, units, within, without_course
from anisoscope.views.figures import build_figures
from anisoscope.views.paper import draw
from anisoscope.views.quality import quality_tables, quality_words
from anisoscope.views.quality_pairs import LAST, MIDDLE, Pair, compare, pairs_of, read_looks, read_trainings
from anisoscope.views.report import write_report
from anisoscope.views.seeds import pool_seeds
from anisoscope.views.series import defined_name, entry_of, glossary, measure_title, plain, read_series

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


def walks(rho, seeds, looks, rng, scale=1.0, e=None):
    """AR(1) series, a row a seed; a random walk where rho is 1."""
    e = rng.standard_normal((seeds, looks)) * scale if e is None else e
    x = np.zeros_like(e)
    for t in range(looks):
        x[:, t] = e[:, t] + (rho * x[:, t - 1] if t else 0)
    return x


# --- correlations -----------------------------------------------------------------------------------------------------


def test_independent_units_agree_with_scipy(seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(11)
    b = a + rng.standard_normal(11)
    b[3] = b[4]  # ties
    found, expected = units(a, b), stats.pearsonr(a, b)
    interval = expected.confidence_interval(0.95)
    assert found.r == pytest.approx(expected.statistic) and found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.rank == pytest.approx(stats.spearmanr(a, b).statistic) and found.n == 11


def test_changes_by_hand(seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((3, 12)) for _ in range(2))
    u, v = ([[row[t + 1] - row[t] for t in range(11)] for row in x] for x in (a, b))
    u, v = ([[row[t] - sum(r[t] for r in x) / 3 for t in range(11)] for row in x] for x in (u, v))
    pairs = list(itertools.product(range(3), range(11)))
    size = (sum(u[s][t] ** 2 for s, t in pairs) * sum(v[s][t] ** 2 for s, t in pairs)) ** 0.5
    product = [sum(u[s][t] * v[s][t] for s in range(3)) / size for t in range(11)]
    again = [
        sum(x[s][t] * x[s][t + 1] for s in range(3) for t in range(10)) / sum(x[s][t] ** 2 for s, t in pairs)
        for x in (u, v)
    ]
    factor = 1 + 2 * max(0, again[0] * again[1])
    mean = sum(product) / 11
    stderr = (sum((p - mean) ** 2 for p in product) * 11 / 10 * factor) ** 0.5
    found = changes(a, b)
    assert found.r == pytest.approx(sum(product)) and found.n == 11
    assert found.p == pytest.approx(2 * stats.t.sf(abs(sum(product)) / stderr, 9))
    assert (found.low < 0 < found.high) == (found.p > 0.05)


def test_any_common_course_goes_out_of_the_changes(seed):
    rng = np.random.default_rng(seed)
    a, b = walks(0.8, 3, 14, rng), walks(0.8, 3, 14, rng)
    course = 50 * np.sin(np.arange(14.0)) + np.arange(14.0) ** 2
    assert changes(a + course, b - 3 * course).r == pytest.approx(changes(a, b).r)
    cubic = 4.0 + np.linspace(-2, 3, 14) ** 3
    one = changes(a[:1] + 9 * cubic, b[:1] + cubic)
    assert one.r == pytest.approx(changes(a[:1], b[:1]).r)
    assert abs(levels(a + course, b - 3 * course).r) > 0.9
    assert np.abs(without_course(np.diff(course)[None].repeat(3, axis=0))).max() < 1e-12


@pytest.mark.parametrize(("seeds", "looks"), [(1, 16), (3, 12), (3, 24)])
@pytest.mark.parametrize("rho", [0.5, 0.9, 1.0])
def test_series_with_nothing_in_common_are_found_apart(seeds, looks, rho):
    """Independent AR(1) series around one trend: changes err at most as often as they say, levels nearly always."""
    rng = np.random.default_rng([seeds, looks, round(10 * rho)])
    draws, trend = 400, 6 * (1 - np.exp(-4 * np.arange(looks) / looks))
    wrong = {"changes": 0, "levels": 0, "levels without a trend": 0}
    for _ in range(draws):
        a, b = walks(rho, seeds, looks, rng), walks(rho, seeds, looks, rng)
        wrong["changes"] += changes(a + trend, b - trend).p < 0.05
        wrong["levels"] += levels(a + trend, b - trend).p < 0.05
        wrong["levels without a trend"] += levels(a, b).p < 0.05
    allowed = 0.05 + 3 * (0.05 * 0.95 / draws) ** 0.5
    assert wrong["changes"] / draws < allowed
    assert wrong["levels"] / draws > 0.5
    if rho >= 0.9:
        assert wrong["levels without a trend"] / draws > 0.2


def test_early_looks_that_move_more_do_not_mislead():
    """Changes that shrink alike over training are no association: the error knows that few looks carry the sum."""
    rng = np.random.default_rng(0)
    scale = np.exp(-3 * np.arange(16) / 16)
    wrong = naive = 0
    for _ in range(500):
        a, b = walks(1.0, 3, 16, rng, scale), walks(1.0, 3, 16, rng, scale)
        wrong += changes(a, b).p < 0.05
        u, v = (without_course(np.diff(x, axis=1)).ravel() for x in (a, b))
        naive += stats.pearsonr(u, v).pvalue < 0.05
    assert wrong / 500 < 0.07 < 0.1 < naive / 500


def test_changes_that_go_together_are_found():
    rng = np.random.default_rng(0)
    found = covered = 0
    for _ in range(200):
        e, noise = rng.standard_normal((2, 3, 16))
        one = changes(walks(0.9, 3, 16, rng, e=e), walks(0.9, 3, 16, rng, e=0.8 * e + 0.6 * noise))
        found += one.p < 0.05
        covered += one.low < 0.8 < one.high
    assert found > 180 and covered > 186


def test_seeds_of_one_model_are_not_counted_as_models():
    """Models that differ in both without a link: over models as often wrong as said, over all trainings far more."""
    rng = np.random.default_rng(0)
    wrong = naive = 0
    for _ in range(600):
        a, b = (rng.standard_normal(5).repeat(4) + 0.2 * rng.standard_normal(20) for _ in range(2))
        wrong += units(a.reshape(5, 4).mean(1), b.reshape(5, 4).mean(1)).p < 0.05
        naive += units(a, b).p < 0.05
    assert abs(wrong / 600 - 0.05) < 3 * (0.05 * 0.95 / 600) ** 0.5 and naive / 600 > 0.3


def test_a_seed_is_one_unit_in_however_many_models():
    """What a seed does in every model alike is seen once for each seed, not once for each training."""
    rng = np.random.default_rng(0)
    models = [f"m{i // 5}" for i in range(20)]
    seeds = [i % 5 for i in range(20)]
    wrong = naive = 0
    for _ in range(600):
        own = rng.standard_normal((2, 5))
        a, b = (
            np.tile(own[i], 4) + np.repeat(rng.standard_normal(4), 5) + 0.2 * rng.standard_normal(20) for i in (0, 1)
        )
        wrong += within(a, b, models, seeds).p < 0.05
        apart = [x - np.repeat(x.reshape(4, 5).mean(1), 5) for x in (a, b)]
        naive += stats.pearsonr(*apart).pvalue < 0.05
    assert abs(wrong / 600 - 0.05) < 3 * (0.05 * 0.95 / 600) ** 0.5 and naive / 600 > 0.2
    assert within(a[:9], b[:9], models[:9], [i % 3 for i in range(9)]) is None


def test_a_correlation_that_one_unit_makes_is_told():
    """A cloud without a link and one point far from it: r near 1 and p near 0, and neither means anything."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 6))
    a[2] = b[2] = 40.0
    found = units(a, b)
    assert found.r > 0.98 and found.p < 1e-3 and found.carrier == 2
    x = np.arange(6.0)
    assert units(x, x + 0.1 * rng.standard_normal(6)).carrier is None
    assert units(*np.random.default_rng(1).standard_normal((2, 6))).carrier is None  # nothing to carry


def test_what_cannot_be_correlated():
    flat, sloped = np.ones((2, 10)), np.arange(20.0).reshape(2, 10) ** 2
    for found in (levels(flat, sloped), changes(flat, sloped), changes(sloped[:1], sloped[1:])):
        assert found.r == 0 and not found.known and found.low is None
    same = changes(sloped + np.random.default_rng(0).standard_normal((2, 10)), sloped)
    assert np.isfinite([same.r, same.p, same.low, same.high]).all()
    with pytest.raises(ShapeError):
        levels(flat, flat[:, :5])
    with pytest.raises(TooFewRowsError, match="needs 8 points, got 7"):
        changes(flat[:, :7], flat[:, :7])
    with pytest.raises(TooFewRowsError, match="needs 4 points, got 3"):
        units(np.arange(3.0), np.arange(3.0))
    assert adjusted([]) == []


# --- the section ------------------------------------------------------------------------------------------------------


def bar(value, over="24 sequences", n=1000):
    return Estimate(value=float(value), stderr=0.01, n=n, over=over, dof=23, method="planted")


class Planted:
    """Trainings with a trend in everything. ``link`` ties the changes of rank to those of the accuracy."""

    def __init__(self, link=0.0, steps=STEPS, layers=4, targets=0.05, between=0.0, constant=()):
        self.constant = constant
        self.link, self.steps, self.layers, self.targets, self.between = link, steps, layers, targets, between

    def write(self, writer, cell, variant, seed, rng, model_rank=0.0):
        looks = len(self.steps)
        trend = np.linspace(0, 3, looks)
        e = rng.standard_normal((6, looks)).cumsum(axis=1) * 0.1
        rank = 20 + trend + e[0] + 5 * model_rank
        accuracy = 0.1 + 0.05 * (trend + self.link * e[0] + (1 - self.link) * e[1]) + 0.1 * self.between * model_rank
        for i, step in enumerate(self.steps):
            info = {"variant": variant, "seed": seed, "tokens": 100 * step, "width": 32, "layers": self.layers}
            with writer.probe(step=step, cell=cell, info=info) as probe:

                def add(site, measure, value, n=1000):
                    probe.add_estimate(bar(value, n=n), site=site, measure=measure, slice="all")

                add("model", "loss", 5 - trend[i] - e[2][i] * 0.1 - 0.1 * self.between * model_rank)
                add("model", "quality.accuracy", accuracy[i])
                add("model", "quality.accuracy.baseline", self.targets)
                for layer in range(self.layers + 1):
                    add(f"resid.{layer}", "effective_rank", rank[i] + layer)
                    add(f"resid.{layer}", "two_nn", 5 - trend[i] + e[3][i])
                for layer in (self.layers // 2, self.layers):
                    for measure, k in (("quality.casing", 4), ("quality.token_back_1", 5)):
                        if measure in self.constant:
                            note = ("constant label: every scored row has the same one",)
                            said = Estimate(value=1.0, stderr=None, n=1000, method="planted", notes=note)
                            probe.add_estimate(said, site=f"resid.{layer}", measure=measure, slice="all")
                            continue
                        add(f"resid.{layer}", measure, 0.5 + 0.1 * (trend[i] + e[k][i]))
                        add(f"resid.{layer}", f"{measure}.baseline", 0.5)


def planted(folder, models, seeds=(0, 1, 2), rng_seed=0, **options):
    rng = np.random.default_rng(rng_seed)
    with RunWriter.create(folder, name="planted", provenance={}) as writer:
        for name, own in models.items():
            level = rng.standard_normal()
            for seed in seeds:
                Planted(**{**options, **own}).write(writer, f"{name} seed {seed}", name, seed, rng, level)
    return folder


def read(folder):
    return pool_seeds(read_series([RunReader(folder)]))


def test_pairs_are_of_the_middle_and_the_last_layer(tmp_path):
    trainings = read_trainings(read(planted(tmp_path / "run", {"a": {}})))
    assert [one.seed for one in trainings] == [0, 1, 2] and trainings[0].sites == {MIDDLE: "resid.2", LAST: "resid.4"}
    found = pairs_of(trainings)
    assert len(found) == 2 * 2 * 4 and found[0].place == MIDDLE
    assert Pair("effective_rank", "quality.casing", LAST) in found
    record = trainings[1].last("effective_rank", MIDDLE)
    assert (record.site, record.step, record.cell) == ("resid.2", 1000, "a seed 1")


@pytest.mark.parametrize("models", [1, 5])
def test_a_probe_with_nothing_to_tell_is_no_pair(tmp_path, models):
    """A text in small letters: its casing is told right in every row, and is neither counted nor drawn nor tabled."""
    names = {f"m{i}": {} for i in range(models)}
    series = read(planted(tmp_path / "run", names, seeds=(0, 1), constant=("quality.casing",)))
    trainings = read_trainings(series)
    assert all(one.constant == ("quality.casing",) for one in trainings)
    assert len(pairs_of(trainings)) == 2 * 2 * 3  # layers, geometry, and without the casing three qualities
    words = quality_words(series)
    assert "Left out: casing" in words[0].replace("next token's ", "") and "nothing to tell" in words[0]
    assert ("of 12 " in " ".join(words)) and "16" not in " ".join(words)
    assert all("Casing, next" not in table.head for table in quality_tables(series))
    assert not any(panel.key == "quality-casing" for figure in build_figures(series) for panel in figure.panels)
    mixed = read(planted(tmp_path / "mixed", {"a": {}, "b": {"constant": ("quality.casing",)}}, seeds=(0,)))
    assert "Left out of b seed 0: " in quality_words(mixed)[0]
    assert any(panel.key == "quality-casing" for figure in build_figures(mixed) for panel in figure.panels)


def test_a_trend_is_called_a_trend_and_a_link_a_link(tmp_path):
    trend = read(planted(tmp_path / "trend", {"a": {}}, seeds=(0, 1, 2, 3)))
    looks = read_looks(read_trainings(trend))
    assert all(abs(one.level.r) > 0.7 and one.level_q < 0.05 for one in looks)
    assert sum(one.change_q <= 0.05 for one in looks) == 0
    words = " ".join(quality_words(trend))
    assert "16 of 16 pairs of a geometry and a quality correlate in their levels, as if beyond chance" in words
    assert "without what the seeds have in common, none do" in words
    assert "For 16 of these correlations nothing beyond a common course was found" in words
    linked = read(planted(tmp_path / "link", {"a": {}}, seeds=(0, 1, 2, 3), link=1.0))
    words = " ".join(quality_words(linked))
    assert "these do: Effective rank of the middle layer with token accuracy (r = " in words
    table = next(one for one in quality_tables(linked) if one.key == "quality-looks-a")
    at = table.head.index("Accuracy")
    row = next(row for row in table.rows if row[0] == "Effective rank, last")
    other = next(row for row in table.rows if row[0] == "TwoNN dimension, last")
    assert "*" in row[at] and "→" in row[at] and "*" not in other[at]


def test_a_difference_between_models_is_found_over_models(tmp_path):
    models = {name: {} for name in "abcdefg"}
    found = compare(read_trainings(read(planted(tmp_path / "run", models, seeds=(0, 1), between=1.0, rng_seed=3))))
    assert found.unit == "model" and found.count == 7 and found.left_out == []
    pair = next(one for one in found.pairs if one.pair == Pair("effective_rank", "quality.accuracy", LAST))
    assert pair.over.r > 0.9 and pair.over_q < 0.01 and pair.over.n == 7 and pair.inside is None
    words = " ".join(quality_words(read(tmp_path / "run")))
    assert "Over 7 models (means over seeds) at their last look," in words
    assert "Effective rank of the last layer with token accuracy" in words


def test_one_model_unlike_the_others_is_no_link_over_models(tmp_path):
    folder = tmp_path / "run"
    rng = np.random.default_rng(3)
    with RunWriter.create(folder, name="planted", provenance={}) as writer:
        for name in "abcdef":
            for seed in (0, 1):
                cell = f"{name} seed {seed}"
                Planted(between=1.0).write(writer, cell, name, seed, rng, 60.0 * (name == "c"))
    series = read(folder)
    words = " ".join(quality_words(series))
    pair = Pair("effective_rank", "quality.accuracy", LAST)
    found = next(one for one in compare(read_trainings(series)).pairs if one.pair == pair)
    assert found.over.r > 0.99 and found.over_q < 1e-4 and found.over.carrier == 2
    assert "one model makes each of them (†; c " in words
    assert "Effective rank of the last layer with token accuracy" not in words
    table = next(one for one in quality_tables(series) if one.key == "quality-over")
    row = next(row for row in table.rows if row[0] == "Effective rank, last")
    cell = row[table.head.index("Accuracy")]
    assert "†" in cell and "*" not in cell


def test_seeds_are_the_units_of_one_model(tmp_path):
    few = read(planted(tmp_path / "few", {"a": {}}))
    assert "3 seeds of one model, and a correlation needs 4." in " ".join(quality_words(few))
    many = compare(read_trainings(read(planted(tmp_path / "many", {"a": {}}, seeds=range(6)))))
    assert many.unit == "seed" and all(one.over.n == 6 for one in many.pairs)
    two = planted(tmp_path / "two", {"a": {}, "b": {}}, seeds=range(4))
    words = " ".join(quality_words(read(two)))
    assert "8 trainings of 2 models, and a correlation over models needs 4" in words
    assert "Within models, over 4 seeds" in words
    alone = read(planted(tmp_path / "alone", {"a": {}}, seeds=(0,)))
    words = " ".join(quality_words(alone))
    assert "One training can be compared with no other" in words and "without a smooth course" in words


def test_only_what_was_scored_on_the_same_tokens_at_the_same_step_is_compared(tmp_path):
    models = {"a": {}, "b": {}, "c": {}, "d": {}, "other": {"targets": 0.06}, "under way": {"steps": STEPS[:9]}}
    series = read(planted(tmp_path / "run", models, seeds=(0,)))
    found = compare(read_trainings(series))
    assert found.count == 4 and found.left_out == ["other seed 0", "under way seed 0"]
    assert "other seed 0 and under way seed 0: not compared with the others" in " ".join(quality_words(series))


def test_few_looks_are_said_to_be_few(tmp_path):
    series = read(planted(tmp_path / "run", {"a": {}}, steps=STEPS[:5]))
    words = " ".join(quality_words(series))
    assert "which would tell more, need 8 looks" in words
    assert all("→" not in cell for table in quality_tables(series) for row in table.rows for cell in row[1:])
    single = read(planted(tmp_path / "single", {"a": {}}, steps=(0,)))
    assert not any("levels" in words for words in quality_words(single)) and build_figures(single)


def test_the_section_stands_in_the_report(tmp_path):
    folder = planted(tmp_path / "run", {"a": {}, "b": {}, "c": {}, "d": {}}, seeds=(0, 1))
    target = write_report(RunReader(folder), tmp_path / "report.html")
    page = Page(target.read_text("utf-8"))
    words = "Geometry and quality", "Quality over training", "Over trainings", "Over looks of a", "as if beyond chance"
    assert all(one in page.words for one in words)
    assert glossary()["quality.baseline"]["says"] in page.words
    panels = {panel["key"]: panel for panel in program_of(target.read_text("utf-8"))["panels"]}
    assert {"quality-accuracy", "quality-casing", "quality-over-1", "quality-levels-1", "quality-changes-1"} <= set(
        panels
    )
    lines = [trace for trace in panels["quality-accuracy"]["data"] if trace["meta"]["part"] == "line"]
    assert {trace["meta"]["tags"]["model"] for trace in lines} == {"a", "b", "c", "d"}
    assert any(trace["meta"]["part"] == "reference" for trace in panels["quality-accuracy"]["data"])
    assert len(panels["quality-over-1"]["data"]) == 4
    # The battery stands in its own section and in no other.
    assert not any("quality" in key and key.startswith(("profile-", "steps-", "heatmap-")) for key in panels)
    assert "token accuracy" not in panels


def test_a_report_without_the_battery_has_no_such_section(tmp_path):
    folder = planted(tmp_path / "run", {"a": {}})
    series = [plain(one) for one in read(folder)]
    assert not any(r.measure.startswith("quality") for one in series for r in one.records)
    assert quality_words(series) == [] and quality_tables(series) == []
    assert not any(figure.key.startswith("quality") for figure in build_figures(series))


def test_names_of_the_battery():
    assert measure_title("quality.token_back_12") == "Token 12 back"
    assert measure_title("quality.token_back_12.baseline") == "Token 12 back, baseline"
    assert defined_name("quality.token_back_4") == "quality.token_back_k" and defined_name("two_nn") == "two_nn"
    assert defined_name("quality.casing.baseline") == "….baseline" and defined_name("pca.drift") == "….drift"
    for name in ("accuracy", "token_back_3", "position", "casing", "word_start", "position.baseline"):
        assert entry_of(f"quality.{name}")["group"] == "quality"
    assert entry_of("quality.unheard") == {} and measure_title("quality.unheard") == "quality.unheard"
    assert "gradient_quality.accuracy" not in glossary()


def test_hostile_names_and_flat_numbers_end_nothing(tmp_path):
    with RunWriter.create(tmp_path / "run", name=HOSTILE, provenance={}) as writer:
        for cell in range(5):
            for step in STEPS:
                with writer.probe(step=step, cell=f"{HOSTILE} {cell}", info={"variant": f"{HOSTILE} {cell}"}) as probe:
                    for site, measure in (
                        ("model", "loss"), ("model", "quality.accuracy"), ("model", "quality.accuracy.baseline"),
                        (HOSTILE, "two_nn"), (HOSTILE, f"quality.{HOSTILE}"), (HOSTILE, "quality.casing"),
                    ):  # fmt: skip
                        probe.add_estimate(bar(0.5), site=site, measure=measure, slice="all")
    series = read(tmp_path / "run")
    cells = [cell for table in quality_tables(series) for row in table.rows for cell in row[1:]]
    assert set(cells) == {"does not vary"}
    for figure in build_figures(series):
        for panel in figure.panels:
            draw(panel)
    page = write_report(RunReader(tmp_path / "run"), tmp_path / "report.html").read_text("utf-8")
    assert "<img src=x" not in page
