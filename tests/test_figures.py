"""Figures hold exactly the numbers of the records; the test of shape is calibrated; figures for papers are files."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import report_runs
from matplotlib import image

from anisoscope.errors import NonFiniteError, OptionError, ShapeError, TooFewRowsError, UnknownNameError
from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record
from anisoscope.views import shape, summary
from anisoscope.views.figures import build_figures
from anisoscope.views.interactive import figure_json, panel_json
from anisoscope.views.numbers import digits_of, with_error
from anisoscope.views.paper import write_figures
from anisoscope.views.series import Series, read_series
from anisoscope.views.shape import profile_shape

DEPTH = np.linspace(0, 1, 13)
BELL = 8 * np.exp(-(((DEPTH - 0.4) / 0.2) ** 2))
STEP = np.where(DEPTH > 0, 20.0, 0.0)


def slow_rising(y, w):
    """Isotonic regression by its min-max formula."""
    mean = lambda a, b: np.average(y[a : b + 1], weights=w[a : b + 1])  # noqa: E731
    n = len(y)
    return np.array([max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)])


def test_fits_agree_with_the_min_max_formula(seed):
    rng = np.random.default_rng(seed)
    y, s = rng.standard_normal(9), rng.uniform(0.5, 2, 9)
    w = s**-2
    np.testing.assert_allclose(shape._rising_fit(y, w), slow_rising(y, w), atol=1e-12)
    found = shape._misfits(y[None], s[None])
    np.testing.assert_allclose(found["rising"], (w * (y - slow_rising(y, w)) ** 2).sum())
    np.testing.assert_allclose(found["falling"], (w * (y + slow_rising(-y, w)) ** 2).sum())
    bells = []
    for k in range(10):
        fit = np.r_[slow_rising(y[:k], w[:k]), slow_rising(y[k:][::-1], w[k:][::-1])[::-1]]
        bells.append((w * (y - fit) ** 2).sum())
    np.testing.assert_allclose(found["bell"], min(bells))
    fit = shape._bell_fit(y, s, int(np.argmin(bells)))
    best = shape._best_bell(y[None], s[None])
    np.testing.assert_allclose(best.prominence[0], fit.max() - max(fit[0], fit[-1]), atol=1e-12)
    assert fit[best.peak[0]] == fit.max()


def test_many_profiles_at_once_are_each_fitted_as_if_alone(seed):
    """Every prefix of every row, ties and rows that never fall or never rise among them."""
    rng = np.random.default_rng(seed)
    y, w = rng.standard_normal((7, 6)), rng.uniform(0.3, 3, (7, 6))
    y[1], y[2], y[3], y[4] = np.sort(y[1]), -np.sort(y[2]), np.round(y[3]), 0.0
    found = shape._rising_prefixes(y, w)
    assert (found.misfit[:, 0] == 0).all() and (found.first[:, 0] == -np.inf).all()
    for row, k in itertools.product(range(7), range(1, 7)):
        fit = slow_rising(y[row, :k], w[row, :k])
        left = (w[row, :k] * (y[row, :k] - fit) ** 2).sum()
        got = [part[row, k] for part in found]
        np.testing.assert_allclose(got, [left, fit[0], fit[-1]], rtol=1e-12, atol=1e-12)


def test_a_shape_that_is_told_twice_is_fitted_once(monkeypatch):
    """On the terminal and in the report; another profile, or other errors, are another shape."""
    fitted = []

    def counted(*args, **options):
        fitted.append(args)
        return profile_shape(*args, **options)

    monkeypatch.setattr(summary, "profile_shape", counted)
    summary._shape_of.cache_clear()
    one, other, wider = (
        [Estimate(value=float(value), stderr=bar, over="rows", n=9, method="m") for value in values]
        for values, bar in ((BELL, 0.01), (DEPTH, 0.01), (BELL, 0.02))
    )
    found = [summary._shape(each, 200)[0] for each in (one, other, wider, one)]
    assert len(fitted) == 3 and found[0] is found[3]
    cases = ((BELL, 0.01), (DEPTH, 0.01), (BELL, 0.02))
    assert found[:3] == [profile_shape(y, np.full(13, s), draws=200) for y, s in cases]
    summary._shape_of.cache_clear()


def test_shape_of_exact_profiles():
    small = np.full(13, 0.01)
    bell = profile_shape(BELL, small)
    assert bell.verdict == "bell"
    assert bell.peak == BELL.argmax() == 5
    assert bell.peak_interval == (5, 5)
    assert bell.peak_share == pytest.approx(5 / 12)
    assert bell.prominence == pytest.approx(BELL[5] - BELL[0], abs=0.05)
    assert bell.p_monotone == bell.p_flat == 1 / 2001
    assert profile_shape(-BELL, small).verdict == "U"
    assert profile_shape(-BELL, small).peak == 5
    assert profile_shape(DEPTH, small).verdict == "monotone (rising)"
    assert not profile_shape(DEPTH, small).rough and not bell.rough
    ragged = profile_shape(DEPTH + np.tile([0.1, -0.1], 7)[:13], small)
    assert ragged.verdict == "monotone (rising)" and ragged.rough
    # A dip that chance does not explain, and yet a fiftieth of the range, is no U.
    dip = profile_shape(np.r_[DEPTH[1] + 0.02, DEPTH[1:]], np.full(13, 0.001))
    assert dip.p_monotone_valley <= 0.001 and dip.verdict == "monotone (rising)" and dip.rough
    assert profile_shape(-DEPTH, small).verdict == "monotone (falling)"
    assert profile_shape(-DEPTH, small).peak == 0
    assert profile_shape(np.zeros(13) + 7.0, small).verdict == "flat"
    # High at the first layer, then a bell: neither of the five shapes.
    assert profile_shape(np.r_[10.0, BELL[1:]], small).verdict == "undecided"
    assert profile_shape(BELL, small, seed=3) == profile_shape(BELL, small, seed=3)


def test_shape_does_not_depend_on_the_unit():
    rng = np.random.default_rng(0)
    y = BELL + rng.standard_normal(13)
    one, thousand = profile_shape(y, np.ones(13)), profile_shape(1000 * y + 5e4, np.full(13, 1000.0))
    assert one.verdict == thousand.verdict
    assert one.p_monotone == thousand.p_monotone
    assert thousand.prominence == pytest.approx(1000 * one.prominence, rel=1e-6)


@pytest.mark.calibration
@pytest.mark.parametrize("dof", [None, 5.0])
@pytest.mark.parametrize("truth", [0 * DEPTH, STEP, STEP[::-1], 0.1 * np.arange(13), 10 - 10 * np.exp(-8 * DEPTH)])
def test_no_bell_is_seen_where_there_is_none(truth, dof):
    """A flat or monotone truth passes for a bell in at most 5 % of draws; a step and a plateau come nearest to that."""
    rng, errors, draws = np.random.default_rng(0), np.linspace(0.5, 1.5, 13), 4000
    null = shape._misfits(*shape._draw(0 * DEPTH, errors, dof, draws, rng))
    seen = shape._misfits(*shape._draw(truth, errors, dof, draws, rng))
    for bent in ("bell", "U"):
        # As in profile_shape: a bell needs both a rising and a falling profile rejected.
        passes = np.ones(draws, dtype=bool)
        for monotone in ("rising", "falling"):
            passes &= seen[monotone] - seen[bent] > np.quantile(null[monotone] - null[bent], 0.95)
        # Both the rate and the quantile are of so many draws.
        assert passes.mean() <= 0.05 + 3 * np.sqrt(2 * 0.05 * 0.95 / draws), (bent, passes.mean())


@pytest.mark.calibration
def test_the_verdict_keeps_that_level():
    rng, errors, calls = np.random.default_rng(0), np.linspace(0.5, 1.5, 13), 100
    seen = Counter()
    for draw in range(calls):
        bars = errors * np.sqrt(rng.chisquare(5, 13) / 5)
        seen[profile_shape(STEP + errors * rng.standard_normal(13), bars, dof=5, draws=199, seed=draw).verdict] += 1
    assert seen["bell"] <= calls * (0.05 + 3 * np.sqrt(0.05 * 0.95 / calls)), seen
    assert seen["monotone (rising)"] >= 0.85 * calls, seen


@pytest.mark.calibration
@pytest.mark.parametrize("truth", [BELL, 80 * DEPTH * (1 - DEPTH) + 6 * DEPTH])
def test_planted_bells_are_found_with_honest_intervals(truth):
    rng, calls = np.random.default_rng(1), 100
    found = peak = height = 0
    for draw in range(calls):
        got = profile_shape(truth + rng.standard_normal(13), np.ones(13), draws=199, seed=draw)
        found += got.verdict == "bell"
        peak += got.peak_interval[0] <= truth.argmax() <= got.peak_interval[1]
        low, high = got.prominence_interval
        height += low <= truth.max() - max(truth[0], truth[-1]) <= high
    slack = 3 * np.sqrt(0.05 * 0.95 / calls)
    assert found > 0.95 * calls
    assert peak >= calls * (0.95 - slack)
    assert height >= calls * (0.95 - slack)


def test_too_small_error_bars_would_see_bells_everywhere():
    """The calibration above can fail: with error bars of a third of the true size most flat profiles seem shaped."""
    rng = np.random.default_rng(0)
    flat = sum(
        profile_shape(rng.standard_normal(13), np.full(13, 0.33), draws=199).verdict == "flat" for _ in range(50)
    )
    assert flat < 10


def test_shape_refuses_what_it_cannot_judge():
    with pytest.raises(TooFewRowsError, match="at least 3"):
        profile_shape([1.0, 2.0], [0.1, 0.1])
    with pytest.raises(ShapeError, match="one standard error for each value"):
        profile_shape([1.0, 2.0, 3.0], [0.1, 0.1])
    with pytest.raises(NonFiniteError):
        profile_shape([1.0, float("nan"), 3.0], [0.1] * 3)
    with pytest.raises(OptionError, match="above 0"):
        profile_shape([1.0, 2.0, 3.0], [0.1, 0.0, 0.1])
    with pytest.raises(OptionError, match="dof"):
        profile_shape([1.0, 2.0, 3.0], [0.1] * 3, dof=0.0)
    with pytest.raises(OptionError, match="draws"):
        profile_shape([1.0, 2.0, 3.0], [0.1] * 3, draws=3)


def panels_of(figures, key):
    (found,) = [panel for figure in figures for panel in figure.panels if panel.key == key]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "profile": report_runs.profile_run(folder / "profile", 6),
        "sweep": report_runs.sweep_run(folder / "sweep", 4, (0, 1, 10, 100), measures=("two_nn", "spectral_ratio")),
        "models": report_runs.models_run(folder / "models"),
    }
    yield made
    for run in made.values():
        run.close()


def test_profiles_hold_exactly_the_records(runs):
    records = runs["profile"].records(measure="spectral_ratio")
    panel = panels_of(build_figures(read_series([runs["profile"]])), "profile-spectral_ratio")
    drawn = {}
    for line in panel.lines:
        for x, y, low, high, hover in zip(line.x, line.y, line.lower, line.upper, line.hover):
            drawn[line.tags["slice"], x] = (y, low, high)
            assert line.tags["slice"] in hover
    assert len(drawn) == len(records)
    for record in records:
        x = {"embed": -1.48, "final_norm": 7.48}.get(record.site) or float(record.site.removeprefix("resid."))
        low, high = record.estimate.interval()
        assert drawn[record.slice, x] == (record.estimate.value, low, high)
    assert [line.visible for line in panel.lines if line.tags["slice"] == "all"] == [True, True]
    assert not any(line.visible for line in panel.lines if line.tags["slice"] != "all")
    assert [(reference.name, reference.y) for reference in panel.references] == [("1/D = 1/768", 1 / 768)]


def test_hover_says_value_interval_population_number_and_method(runs):
    (record,) = runs["profile"].records(measure="turning_angle", site="resid.2", slice="all")
    panel = panels_of(build_figures(read_series([runs["profile"]])), "profile-turning_angle")
    (hover,) = [text for line in panel.lines for text in line.hover if text.startswith("resid.2 · all\n")]
    e = record.estimate
    low, high = e.interval()
    assert with_error(e, "°") in hover
    assert f"95 % interval: {digits_of(low, e.stderr)} … {digits_of(high, e.stderr)}, over batches" in hover
    assert "n = 8,192" in hover
    assert "mean over batches of 512 tokens" in hover
    assert {(reference.name, reference.y) for reference in panel.references} == {
        ("independent points", 120.0),
        ("random walk", 90.0),
    }


def test_depths_that_differ_become_shares(runs):
    figures = build_figures(read_series([runs["models"]]))
    panel = panels_of(figures, "profile-two_nn")
    assert panel.x.title == "share of depth"
    for model, layers in (("decoder-small", 6), ("decoder-large", 12), ("encoder", 8)):
        (line,) = [
            one for one in panel.lines if one.joined and (one.tags["model"], one.tags["slice"]) == (model, "all")
        ]
        np.testing.assert_allclose(line.x, np.arange(layers + 1) / layers)
        assert line.visible
    roles = {line.tags["model"]: line.role for line in panel.lines}
    assert sorted(roles.values()) == [0, 1, 2]  # a colour a model, a dash a slice
    assert len({line.dash for line in panel.lines}) == 3
    kinds = [(toggle.kind, toggle.value) for toggle in figures[0].toggles]
    assert ("model", "encoder") in kinds and ("slice", "no position 0") in kinds


def test_sweeps_hold_exactly_the_records(runs):
    run = runs["sweep"]
    figures = build_figures(read_series([run]))
    heat = panels_of(figures, "heatmap-two_nn-all")
    for row, site in enumerate(heat.y.labels):
        for column, step in enumerate(run.steps()):
            (record,) = run.records(measure="two_nn", site=site, slice="all", step=step)
            assert (heat.z[row][column], heat.stderr[row][column], heat.n[row][column]) == (
                record.estimate.value,
                record.estimate.stderr,
                record.estimate.n,
            )
    assert heat.y.labels == ("embed", *(f"resid.{i}" for i in range(5)), "final_norm")
    steps = panels_of(figures, "steps-two_nn")
    line = next(one for one in steps.lines if one.name == "resid.2" and one.visible)
    assert line.y == tuple(r.estimate.value for r in run.records(measure="two_nn", site="resid.2", slice="all"))
    np.testing.assert_allclose(line.x, [-0.5, 0, 1, 2])  # logarithms, zero half a decade before the first
    assert steps.x.labels == ("0", "1", "10", "100")


def test_curves_keep_their_points_and_thin_evenly_in_logarithms(runs):
    figures = build_figures(read_series([runs["profile"]]))
    scale = panels_of(figures, "curve-dimension against scale")
    (curve,) = runs["profile"].curves(name="dimension against scale", site="resid.3", slice="all")
    (line,) = [one for one in scale.lines if one.name == "resid.3" and one.visible]
    assert (line.x, line.y) == (curve.x, curve.y)
    assert line.upper[2] == pytest.approx(curve.y[2] + 1.96 * curve.stderr[2])
    spectrum = panels_of(figures, "curve-spectrum")
    assert spectrum.x.log and spectrum.y.log
    (line,) = [one for one in spectrum.lines if one.name == "resid.3" and one.visible]
    (curve,) = runs["profile"].curves(name="spectrum", site="resid.3", slice="all")
    assert len(line.x) <= 120
    assert (line.x[0], line.x[-1]) == (1, 768)
    assert set(zip(line.x, line.y)) <= set(zip(curve.x, curve.y))
    gaps = np.diff(np.log(line.x[20:]))
    assert gaps.max() < 0.2


def test_missing_error_bars_draw_no_band():
    plain = Estimate(value=2.0, stderr=None, n=5, method="made up")
    sure = Estimate(value=3.0, stderr=0.1, n=5, method="made up", over="rows")
    records = [
        Record(run="r", step=0, site=f"resid.{i}", measure="mystery", slice="all", estimate=plain if i == 2 else sure)
        for i in range(5)
    ]
    panel = panels_of(build_figures([Series(label="m", records=tuple(records), facts={})]), "profile-mystery")
    assert panel.title == "mystery"
    assert panel.lines[0].lower[2] is None and panel.lines[0].lower[1] is not None
    assert "no error bar" in panel.lines[0].hover[2]
    band, line = panel_json(panel)["data"]
    # Two closed shapes with a gap between them, and a line through all five points.
    assert band["x"] == [0, 1, 1, 0, None, 3, 4, 4, 3]
    assert line["y"] == [3, 3, 2, 3, 3]


def test_plotly_takes_every_panel(runs):
    graph = pytest.importorskip("plotly.graph_objects")
    for run in runs.values():
        for figure in build_figures(read_series([run])):
            for panel in figure_json(figure):
                json.dumps(panel, allow_nan=False)
                graph.Figure(data=panel["data"], layout=panel["layout"])  # raises on any unknown or bad property


def test_plotly_text_is_escaped():
    hostile = '<img src=x onerror="alert(1)"> & <b>bold</b>'
    e = Estimate(value=1.0, stderr=0.1, n=5, method=hostile, over=hostile)
    record = Record(run="r", step=0, site=hostile, measure=hostile, slice=hostile, estimate=e)
    text = json.dumps([figure_json(f) for f in build_figures([Series(label=hostile, records=(record,), facts={})])])
    assert "&lt;img" in text
    data = json.loads(text)[0][0]["data"][0]
    for field in (data["name"], *data["hovertext"]):
        assert "<img" not in field.replace("<br>", "") and "<b>" not in field


def test_paper_figures_are_real(runs, tmp_path):
    swept, measured = (build_figures(read_series([runs[name]])) for name in ("sweep", "profile"))
    heat = next(figure for figure in swept if figure.key == "heatmaps")
    figures = [replace(figure, panels=figure.panels[:1]) for figure in (measured[0], heat)]
    written = write_figures(figures, tmp_path / "figures")
    assert len(written) == 6
    for path in written:
        data = path.read_bytes()
        assert len(data) > 5000
        if path.suffix == ".pdf":
            assert data.startswith(b"%PDF")
            assert b"/FontFile2" in data and b"/Type3" not in data  # outlines embedded, none as a bitmap-like Type 3
            width = float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", data).group(1))
            assert width == pytest.approx(3.35 * 72, abs=0.5)
        if path.suffix == ".svg":
            assert b"<svg" in data and b"<text" not in data
        if path.suffix == ".png":
            picture = image.imread(path)
            assert picture.shape[1] == pytest.approx(3.35 * 300, abs=2)
            assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 50
    (again,) = write_figures(figures[:1], tmp_path / "again", formats=("pdf",))
    assert again.read_bytes() == written[0].read_bytes()


def test_paper_figures_survive_any_name(tmp_path):
    name = "../$\\frac{1}$ 模型 <b>"
    e = Estimate(value=1.0, stderr=0.1, n=5, method="m", over="rows")
    records = tuple(
        Record(run="r", step=0, site=f"resid.{i}", measure=name, slice=s, estimate=e) for i in range(3) for s in "ab"
    )
    figures = build_figures([Series(label=name, records=records, facts={})])
    (path,) = write_figures(figures, tmp_path / "out", formats=("svg",))
    assert path.parent == tmp_path / "out"
    assert re.fullmatch(r"[\w.-]+", path.name)
    with pytest.raises(UnknownNameError, match="did you mean 'png'"):
        write_figures(figures, tmp_path, formats=("pngg",))
    with pytest.raises(OptionError, match="width_inches"):
        write_figures(figures, tmp_path, width_inches=0.0)
