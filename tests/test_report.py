"""The report: whole, self-contained, escaped, small; right numbers in words; odd runs do not break it."""

import base64
import gzip
import html
import json
import os
import re
import threading
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import report_runs
from report_runs import HOSTILE

from anisoscope.errors import EmptyInputError, OptionError, RunError
from anisoscope.estimate import Estimate
from anisoscope.runs.records import Record
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.views import interactive, report
from anisoscope.views.figures import build_figures
from anisoscope.views.report import render, write_report
from anisoscope.views.series import Series, find_facts, glossary, read_series
from anisoscope.views.summary import findings, headline, read_profiles

ROOT = Path(__file__).parent.parent
LIMIT = 6_000_000


class Page(HTMLParser):
    """A page taken apart: tags, links, text, and what its script tags hold."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.hrefs, self.sources, self.ids, self.text = [], [], [], [], []
        self.headings = []
        self.feed(text)
        self.close()
        self.words = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.hrefs += [value for name, value in attrs if name == "href"]
        self.sources += [value for name, value in attrs if name in ("src", "srcset", "action", "poster", "data")]
        self.ids += [value for name, value in attrs if name == "id"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text.append(data)


def program_of(text):
    packed = re.search(r'<script type="text/plain" id="program">([A-Za-z0-9+/=]*)</script>', text).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def estimate(value=1.0, stderr=0.1, **fields):
    given = {"n": 100, "method": "made up", "over": None if stderr is None else "rows"} | fields
    return Estimate(value=value, stderr=stderr, **given)


def made(values, *, measure="spectral_ratio", stderr=0.01, step=0, slice="all", **facts):
    records = tuple(
        Record(run="r", step=step, site=f"resid.{i}", measure=measure, slice=slice, estimate=estimate(float(v), stderr))
        for i, v in enumerate(values)
    )
    return Series(label="m", records=records, facts=facts)


def rendered(series, **options):
    return render(series, build_figures(series), sources=[{"name": "r", "provenance": "{}", "recipe": ""}], **options)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with report_runs.profile_run(folder / "run", 6) as run:
        text = write_report(run, folder / "report.html").read_text("utf-8")
        return run.records(), text, Page(text)


def test_everything_is_in_the_file(profile):
    _, text, page = profile
    assert len(text.encode()) < LIMIT
    assert page.sources == []  # no tag loads anything
    assert {href for href in page.hrefs if not href.startswith("#")} == {
        "data:,",
        "https://arxiv.org/abs/2311.05928",
        "https://arxiv.org/abs/2604.08764",
    }
    assert "@import" not in text and "url(" not in text
    policy = next(tags["content"] for tag, tags in page.tags if tags.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src" not in policy
    for href in page.hrefs:
        if href.startswith("#"):
            assert href[1:] in page.ids
    assert len(page.ids) == len(set(page.ids))


def test_headings_and_labels_are_in_order(profile):
    _, _, page = profile
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip(page.headings, page.headings[1:]))
    plots = [tags for _, tags in page.tags if tags.get("class") == "plot"]
    assert plots and all(tags["role"] == "img" and tags["aria-label"] for tags in plots)
    tables = sum(tag == "table" for tag, _ in page.tags)
    assert tables == sum(tag == "caption" for tag, _ in page.tags) > 2
    order = [page.words.index(words) for words in ("Summary", "Shapes over depth", "Directions in use by layer")]
    assert order == sorted(order)


def test_every_number_is_in_the_table(profile):
    records, text, _ = profile
    table = program_of(text)["table"]
    word = lambda name, row: table[name]["words"][table[name]["at"][row]]  # noqa: E731
    found = {}
    for row in range(table["length"]):
        key = (word("measure", row), word("site", row), word("slice", row))
        found[key] = [table[name][row] for name in ("value", "stderr", "half", "n", "part")]
    assert len(found) == table["length"] == 2 * len(records)  # each has one companion, its sd over batches
    for record in records:
        e = record.estimate
        low, high = e.interval()
        value, stderr, half, n, part = found[record.measure, record.site, record.slice]
        assert (n, part) == (e.n, 0)
        np.testing.assert_allclose([value, stderr, half], [e.value, e.stderr, (high - low) / 2], rtol=1e-5)
        companion = found[f"{record.measure} / sd over batches", record.site, record.slice]
        assert companion[0] == pytest.approx(e.parts["sd over batches"].value, rel=1e-5)
        assert companion[1:3] == [None, None] and companion[4] == 1


def test_figures_in_the_page_hold_the_numbers(profile):
    records, text, _ = profile
    panels = {panel["key"]: panel for panel in program_of(text)["panels"]}
    want = {r.site: r.estimate.value for r in records if (r.measure, r.slice) == ("two_nn", "no position 0")}
    got = {}
    for trace in panels["profile-two_nn"]["data"]:
        if trace["meta"]["part"] == "line" and trace["meta"]["tags"]["slice"] == "no position 0":
            assert trace["visible"] is False
            got |= {hover.split(" ")[0]: y for hover, y in zip(trace["hovertext"], trace["y"])}
    assert got == pytest.approx(want, rel=1e-8)


def test_failures_are_visible(profile):
    _, _, page = profile
    assert "3 measurements failed." in page.words
    assert "DegenerateError: no position 0: every neighbourhood of the embedding holds one token" in page.words


def test_definitions_and_citations(profile):
    records, _, page = profile
    for measure in {record.measure for record in records}:
        assert glossary()[measure]["says"] in page.words
    citation = (ROOT / "CITATION.cff").read_text()
    for title in re.findall(r'^ +title: "(.*)"$', citation, re.MULTILINE):
        assert title in page.words
    assert re.search(r'message: "(.*)"', citation).group(1) in page.words


def test_hostile_names_stay_text(tmp_path):
    with report_runs.hostile_run(tmp_path / "run") as run:
        text = write_report(run, tmp_path / "report.html", title=HOSTILE).read_text("utf-8")
    page = Page(text)
    assert not any(tag == "img" for tag, _ in page.tags)
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert not any(name.startswith("on") for _, tags in page.tags for name in tags)
    assert "alert(2)</script>" not in text and "<img" not in text
    assert " ".join(HOSTILE.split()) in page.words  # shown as it is, the template did not read it
    # What plotly draws, it reads as HTML: there it must be escaped once more.
    escaped = 0
    for panel in program_of(text)["panels"]:
        data = [{name: value for name, value in trace.items() if name != "meta"} for trace in panel["data"]]
        drawn = json.dumps([data, panel["layout"]])
        assert "<img" not in drawn and "<script" not in drawn
        escaped += "&lt;img" in drawn
    assert escaped > 4


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers):
    page = Page(rendered([made(np.arange(layers) + 1.0)]))
    assert "Spectral ratio" in page.words
    assert ("not tested" in page.words) == (layers < 3)


def test_failures_only(tmp_path):
    with RunWriter.create(tmp_path / "run") as writer, writer.probe(step=3) as probe:
        probe.fail(site="resid.0", measure="two_nn", slice="all", error="TooFewRowsError: 2 rows")
    with RunReader(tmp_path / "run") as run:
        page = Page(write_report(run, tmp_path / "report.html").read_text("utf-8"))
    assert "No number was measured." in page.words
    assert "1 measurement failed." in page.words and "TooFewRowsError: 2 rows" in page.words
    assert glossary()["two_nn"]["says"] in page.words


def test_nothing_at_all_is_refused(tmp_path):
    with RunWriter.create(tmp_path / "run"):
        pass
    with RunReader(tmp_path / "run") as run, pytest.raises(EmptyInputError, match="nothing was measured"):
        write_report(run, tmp_path / "report.html")
    with pytest.raises(EmptyInputError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_program_is_packed_once_and_begun_when_asked(monkeypatch):
    interactive.begin_packing.cache_clear()
    begun = interactive.begin_packing()
    assert begun is interactive.begin_packing(), "packed twice"
    found = interactive.packed_plotly()
    assert begun.done() and found is begun.result()
    program = gzip.decompress(base64.b64decode(found))
    assert program == (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()


def test_a_missing_program_is_told_of_in_the_report_and_not_before(monkeypatch):
    def gone(name):
        raise ModuleNotFoundError(name)

    packed = interactive.packed_plotly()
    interactive.begin_packing.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(interactive.resources, "files", gone)
        interactive.begin_packing()
        for _ in range(2):
            with pytest.raises(OptionError, match="needs plotly, which is not installed: pip install"):
                interactive.packed_plotly()
    assert interactive.packed_plotly() == packed, "once it is installed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_while_the_program_is_packed_packs_it_by_itself(monkeypatch):
    interactive.begin_packing.cache_clear()
    go_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(interactive, "_pack_plotly", lambda: go_on.wait(60) and "packed by a thread")
        task = interactive.begin_packing()
        patch.setattr(interactive, "_pack_plotly", lambda: "packed anew")
        child = os.fork()
        if child == 0:
            os._exit(0 if interactive.packed_plotly() == "packed anew" else 1)
        go_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert task.result() == "packed by a thread" and interactive.begin_packing() is task
    interactive.begin_packing.cache_clear()


def test_one_step_has_no_sweep_and_many_have(tmp_path):
    assert not any(f.key in ("steps", "heatmaps") for f in build_figures([made([1.0, 2.0, 3.0], step=7)]))
    rng = np.random.default_rng(0)
    e = [estimate(float(value), abs(float(value)) / 50) for value in rng.lognormal(size=1000)]
    records = tuple(
        Record(run="r", step=step, site=site, measure=measure, slice="all", estimate=e[rng.integers(1000)])
        for step in range(0, 3000, 100)
        for measure in ("spectral_ratio", "two_nn", "mle")
        for site in report_runs.sites(38)
    )
    text = rendered([Series(label="m", records=records, facts={})])
    program = program_of(text)
    assert program["table"]["length"] == 30 * 40 * 3 + 30 * 3
    assert len(text.encode()) < LIMIT / 2
    heat = next(panel for panel in program["panels"] if panel["key"] == "heatmap-two_nn")["data"][0]
    assert (len(heat["z"]), len(heat["z"][0])) == (41, 30)
    assert "Layer by step" in Page(text).words


def test_models_side_by_side(tmp_path):
    with report_runs.models_run(tmp_path / "run") as run:
        page = Page(write_report([run], tmp_path / "report.html").read_text("utf-8"))
    assert "Models side by side" in page.words
    assert "decoder-small, decoder-large, encoder" in page.words
    few = {"name": "same", "measures": ("mle",), "curves": False}
    with report_runs.profile_run(tmp_path / "a", 3, **few) as a, report_runs.profile_run(tmp_path / "b", 3, **few) as b:
        labels = [one.label for one in read_series([a, b])]
    assert labels == ["same (1)", "same (2)"]  # two runs of one name stay two


def test_words_follow_the_numbers():
    depth = np.linspace(0, 1, 13)
    bell = 0.1 + 0.8 * np.exp(-(((depth - 0.5) / 0.2) ** 2))

    def say(values, **options):
        series = [made(values, **options)]
        return " ".join(s for pairs in findings(series, read_profiles(series)).values() for _, s in pairs)

    words = say(bell)
    assert "highest at resid.6 (0.900 ± 0.010, 50% of depth)" in words
    assert "a bell" in words and "with its peak at resid.6" in words and "p ≤ 0.0005" in words
    assert "rising" in say(depth) and "no bell is seen" in say(depth)
    bent = say(np.where(depth == 1, 0.9, depth), stderr=0.002)
    assert "it bends (monotone: p ≤ 0.0005), too little to be called a bell" in bent and "no bell is seen" not in bent
    assert "falling" in say(-depth)
    assert "flat as far as the errors can tell" in say(np.full(13, 0.5))
    assert "a U" in say(-bell)
    ragged = say(depth + np.tile([0.1, -0.1], 7)[:13])
    assert "mostly rising, with departures that the errors do not explain" in ragged
    assert "not tested for its shape (13 of 13 layers without an error bar)" in say(bell, stderr=None)
    assert "independent points read 120°" in say(100 + bell, measure="turning_angle")


def test_a_slice_is_named_only_where_it_matters():
    values = np.array([0.2, 0.9, 0.3])
    for other, named in ((values / 3, True), (values - 0.001, False)):
        both = made(values).records + made(other, slice="no position 0").records
        series = [Series(label="m", records=both, facts={})]
        said = json.dumps(findings(series, read_profiles(series)), ensure_ascii=False)
        assert ("over “no position 0”" in said) == named


def test_a_model_that_failed_as_a_whole_is_a_failure_and_no_model(tmp_path):
    few = {"measures": ("mle",), "slices": ("all",), "curves": False}
    with RunWriter.create(tmp_path / "run", name="sweep") as writer:
        report_runs.write_probe(writer, 0, 4, np.random.default_rng(0), cell="good", **few)
        with writer.probe(step=0, cell="bad (failed)", info={"model": "bad"}) as probe:
            probe.fail(site="model", measure="model", slice="all", error="ModelError: no such file")
    with RunReader(tmp_path / "run") as run:
        page = Page(write_report(run, tmp_path / "report.html").read_text("utf-8"))
    assert "7 sites of one model" in page.words and "Models side by side" not in page.words
    assert "bad (failed) model model all 0 ModelError: no such file" in page.words


def test_facts_are_found_where_they_stand():
    facts = find_facts([{}, report_runs.PROVENANCE, {"width": 5}])
    want = {"model": "tiny-decoder", "layers": 12, "width": 768, "tokens": 65536, "date": "2026-11-15"}
    assert facts == want | {"corpus": "python documentation"}
    assert find_facts([{"model": "a/b", "corpus": "enwik8"}]) == {"model": "a/b", "corpus": "enwik8"}
    assert find_facts([{"name": "not a model", "device": {"name": "cpu"}}]) == {}
    series = [made([1.0, 2.0, 3.0], **facts)]
    assert headline(series) == (
        "1 measure of geometry in 3 sites of one model, on 65,536 tokens of python documentation: "
        "3 numbers with their error bars."
    )


def test_the_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    with report_runs.profile_run(tmp_path / "run", 1, measures=("mle",), curves=False) as run:
        target = write_report(run, tmp_path / "deep" / "report.html", title="first")
        before = target.read_bytes()
        monkeypatch.setattr(report, "_static", lambda name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(run, target, title="second")
        assert target.read_bytes() == before
        assert [path.name for path in target.parent.iterdir()] == ["report.html"]
        monkeypatch.undo()
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match="file is in the way"):
            write_report(run, tmp_path / "file" / "report.html")
        written = write_report(run, target, figures=tmp_path / "figures", formats=("svg",))
        assert written == target
        assert [path.name for path in (tmp_path / "figures").iterdir()] == ["profile-mle.svg"]


def test_the_title_is_the_model(profile):
    _, text, page = profile
    assert "<title>tiny-decoder · anisoscope</title>" in text
    assert html.escape("tiny-decoder") in page.words
