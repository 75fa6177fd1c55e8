"""The report of a watched training: planted truths come back as the right sentences, lines, bands and tables."""

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from report_runs import HOSTILE
from rich.console import Console
from scipy import stats
from test_report import Page, program_of

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Curve
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.views.corrected import correct
from anisoscope.views.figures import build_figures
from anisoscope.views.interactive import panel_json
from anisoscope.views.names import chance_of, frequency_bin, noted, tangent
from anisoscope.views.paper import draw, write_figures
from anisoscope.views.report import write_report
from anisoscope.views.seeds import pool_seeds
from anisoscope.views.series import GROUPS, glossary, measure_group, measure_title, population, read_series
from anisoscope.views.shelf import Shelf
from anisoscope.views.story import dimension_words, early_late, loss_words, ratio_words, thirds, training_findings
from anisoscope.views.tables import layer_table
from anisoscope.views.verdicts import construction_words, energy_words, referee_words, verdicts

STEPS = (0, 2, 8, 32, 64, 128, 400, 1000, 2000)
FIRST, LAST = STEPS[:3], STEPS[-3:]  # thirds
PROXIES = ("seminmf", "pca", "random")
BINS = (
    "frequency 1 of 5 (rarest): counts 1-12",
    "frequency 2 of 5: counts 13-80",
    "frequency 3 of 5: counts 81-400",
    "frequency 4 of 5: counts 401-2,000",
    "frequency 5 of 5 (most frequent): counts 2,001-90,000",
)
B, K, D = 199, 16, 128
FACTS = (f"K={K}, D={D}, chance {K / D}, B={B}",)
REASONS = {
    True: ("passed: energy share 0.31 against 0.125 by chance", "said: holds as much as the top-variance directions"),
    False: ("passed: energy share 0.2 against 0.125 by chance", "FAILED: mean squared cosine to local tangents 0.11"),
}


def bar(value, relative=0.03, over="64 sequences", dof=63.0, notes=FACTS, **parts):
    stderr = None if over is None else abs(value) * relative + 1e-3
    return Estimate(
        value=float(value), stderr=stderr, n=4096, over=over, dof=None if over is None else dof, method="planted",
        notes=notes, parts={k: Estimate(value=v, stderr=None, n=1, method="limit") for k, v in parts.items()},
    )  # fmt: skip


class Truth:
    """A planted training. ``rising``: the dimension rises, then falls, and the energy ratio rises; else both fall."""

    def __init__(self, rising=True, layers=4, proxies=PROXIES, excess=(2, 3, 4), survives=(2, 3)):
        self.rising, self.layers, self.proxies, self.excess, self.survives = rising, layers, proxies, excess, survives
        self.sites = [f"resid.{i}" for i in range(layers + 1)] + ["final_norm"]

    def progress(self, step):
        return math.log1p(step) / math.log1p(STEPS[-1])

    def loss(self, step):
        return 5.55 - (3.3 if self.rising else 2.2) * self.progress(step)

    def dimension(self, step, depth):
        t = self.progress(step)
        return 6 + (9 * math.sin(math.pi * t) if self.rising else -3 * t) + 2 * depth

    def ratio(self, proxy, step, depth):
        if proxy == "random":
            return 1.0
        top = {"seminmf": 2.0, "pca": 2.4}.get(proxy, 1.0)
        t = self.progress(step)
        return 1 + top * (t if self.rising else 1 - 0.8 * t) * (0.4 + 0.6 * math.sin(math.pi * depth))

    def p(self, proxy, step, depth):
        """Far from 1 the smallest possible, near it anything."""
        ratio = self.ratio(proxy, step, depth)
        return max(1 / (B + 1), min(1.0, math.exp(-6 * (ratio - 1)) * (0.5 + 0.5 * depth)))


def write_training(writer, cell, truth, *, seed=0, variant=None, steps=STEPS, last=None, noise=0.01, bins=BINS):
    """One training into a store, look by look; ``last`` is the step with the referee's verdict."""
    rng = np.random.default_rng([seed, len(cell)])
    last = steps[-1] if last is None else last
    for step in steps:
        info = {
            "variant": variant or cell, "seed": seed, "tokens": 8192 * step, "loss": truth.loss(step), "width": D,
            "layers": truth.layers, "corpus": "the documentation of Python",
        }  # fmt: skip
        with writer.probe(step=step, cell=cell, info=info) as probe:
            _write_look(probe, truth, step, last, lambda v: v * (1 + noise * rng.standard_normal()), bins)


def _write_look(probe, truth, step, last, shaken, bins):
    def add(site, measure, estimate, slice="all"):
        probe.add_estimate(estimate, site=site, measure=measure, slice=slice)

    add("model", "loss", bar(shaken(truth.loss(step)), 0.004))
    if step:
        add("model", "train_loss", bar(shaken(truth.loss(step) * 0.98), over=None))
    for number, site in enumerate(truth.sites):
        depth = number / (len(truth.sites) - 1)
        for measure, value in (
            ("two_nn", truth.dimension(step, depth)),
            ("spectral_ratio", 0.05 + 0.5 * truth.progress(step) * math.sin(math.pi * depth)),
            ("gradient_isoscore", 0.3 - 0.2 * depth),
            ("gradient_norm", 0.4 / (1 + step) ** 0.2),
        ):
            add(site, measure, bar(shaken(value)))
        for measure in ("writer_norm", "update_norm"):
            add(site, measure, bar(0.1, over=None))
        _write_tangents(add, truth, site, step, depth, shaken, bins)
        if step == last:
            _write_verdicts(add, truth, site, number)
    for layer in range(truth.layers):
        for site in (f"attn_in.{layer}", f"mlp_in.{layer}"):
            for proxy in truth.proxies:
                excess = 0.06 if layer in truth.excess and proxy != "random" else -0.01
                null = 0.125 if proxy == "random" else 0.33
                add(site, f"{proxy}.reader.share", bar(null + excess))
                add(site, f"{proxy}.reader.null", bar(null, 0.001, over="199 permutations"))
                add(site, f"{proxy}.reader.excess", bar(excess, over="199 permutations"))
                add(site, f"{proxy}.reader.p", bar(1 / (B + 1) if excess > 0 else 0.6, over=None))
    if step == last:
        for number, site in enumerate(truth.sites[:-1]):
            x, y = (2.0, 4.0, 8.0, 16.0), tuple(1 + (0.2 + 0.1 * number) * k / 16 for k in (2, 4, 8, 16))
            place = {"run": probe.run, "step": step, "cell": probe.cell, "site": site, "slice": "all"}
            probe.add_curve(
                Curve(**place, name="seminmf ratio against rank", x=x, y=y, x_label="rank", y_label="ratio")
            )


def _write_tangents(add, truth, site, step, depth, shaken, bins):
    for proxy in truth.proxies:
        ratio = shaken(truth.ratio(proxy, step, depth))
        share = ratio * K / (D - K + ratio * K)
        add(site, f"{proxy}.activation.share", bar(share))
        add(site, f"{proxy}.activation.control", bar((1 - share) * K / (D - K), 0.01, over="199 controls"))
        add(site, f"{proxy}.activation.ratio", bar(ratio))
        add(site, f"{proxy}.activation.p", bar(truth.p(proxy, step, depth), over=None))
        add(site, f"{proxy}.activation.enrichment", bar(0.6 + 0.8 * depth))
        add(site, f"{proxy}.variance_share", bar(0.5, over=None))
        add(site, f"{proxy}.activation.isoscore_share", bar(0.02 * ratio - 0.02, over="199 controls"))
        add(site, f"{proxy}.activation.spectral_share", bar(0.01 - 0.01 * ratio, over="199 controls"))
        for gradient in ("writer", "update"):
            add(site, f"{proxy}.{gradient}.share", bar(share * 0.8, over=None))
        if step:
            add(site, f"{proxy}.drift", bar(70 * (1 - 0.8 * truth.progress(step)), over=None))
        add(site, f"{proxy}.explained", bar(0.71, over=None))
        for number, slice in enumerate(bins):
            rare = share * (1.3 - 0.15 * number)
            add(site, f"{proxy}.activation.share", bar(rare), slice)
            add(site, f"{proxy}.activation.control", bar(0.12, 0.01, over="199 controls"), slice)
            add(site, f"{proxy}.activation.ratio", bar(rare / 0.12), slice)
    add(site, "seminmf.sparsity", bar(0.034, over=None))
    add(site, "seminmf.pca_overlap", bar(0.82, over=None))
    for number, slice in enumerate(bins):
        add(site, "own_distance", bar(3 + 0.4 * number + depth, over="412 token types", notes=()), slice)
        add(site, "global_distance", bar(9 - 0.5 * number + depth, over="412 token types", notes=()), slice)
    for name, r in (
        ("own_pearson", 0.41),
        ("own_spearman", 0.44),
        ("global_pearson", -0.52),
        ("global_spearman", -0.6),
    ):
        add(site, f"frequency.{name}", bar(r, 0.1, over="412 token types (bootstrap)", low=r - 0.09, high=r + 0.08))


def _write_verdicts(add, truth, site, number):
    for proxy in truth.proxies:
        good = number in truth.survives and proxy == "seminmf"
        add(site, f"{proxy}.tangent_cosine2", bar(0.3 if good else 0.11, over="64 neighbourhoods"))
        add(site, f"{proxy}.normal_cosine2", bar(0.15, over="64 neighbourhoods"))
        add(site, f"{proxy}.tangent_p", bar(1 / (B + 1) if good else 0.7, over=None))
        add(site, f"{proxy}.curvature", bar(0.8))
        add(site, f"{proxy}.minus_top_variance", bar(-0.01, 1.0))
        add(site, f"{proxy}.minus_random", bar(0.1 if good else 0.02))
        add(site, f"{proxy}.survives", bar(float(good), over=None, notes=REASONS[good]))


def demo_run(folder, **options):
    with RunWriter.create(folder, name="demo", recipe={"steps": STEPS[-1]}) as writer:
        write_training(writer, "decoder", Truth(), **options)
        encoder = Truth(rising=False, proxies=("seminmf",), excess=(), survives=())
        write_training(writer, "encoder", encoder, **options)
    return RunReader(folder)


def seeds_run(folder, seeds=(0, 1, 2), steps=STEPS, noise=0.03, proxies=("seminmf",), layers=2):
    with RunWriter.create(folder, name="seeds") as writer:
        for seed in seeds:
            cell = f"decoder seed {seed}"
            truth = Truth(proxies=proxies, layers=layers)
            write_training(writer, cell, truth, seed=seed, variant="decoder", steps=steps, noise=noise)
    return RunReader(folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with demo_run(folder / "run") as run:
        text = write_report(run, folder / "report.html").read_text("utf-8")
        return read_series([run]), text, Page(text)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    with seeds_run(folder / "run") as run:
        text = write_report(run, folder / "report.html").read_text("utf-8")
        return read_series([run]), text, Page(text)


BUILT = {}


def built(series):
    """The figures of some series, built once: the type checks of the test run make this slow."""
    if id(series) not in BUILT:
        BUILT[id(series)] = (series, build_figures(series))  # keeps the series alive, and so its id its own
    return BUILT[id(series)][1]


def panels(series):
    return {panel.key: panel for figure in built(series) for panel in figure.panels}


def test_sections_come_in_the_order_a_newcomer_reads(demo):
    _, _, page = demo
    names = (
        "Loss", "Over training", "Layer by step", "Gradient energy along proxies", "By token frequency",
        "What could be a construction", "Drift of proxies", "The referee",
    )  # fmt: skip
    titles = [tags["id"] for tag, tags in page.tags if tag == "h2"]
    at = [titles.index(f"{name.lower().replace(' ', '-')}-title") for name in names]
    assert at == sorted(at) and titles[0] == "summary-title" and titles[1] == "loss-title"
    assert page.headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip(page.headings, page.headings[1:]))
    tables = sum(tag == "table" for tag, _ in page.tags)
    assert tables == sum(tag == "caption" for tag, _ in page.tags) > 4
    assert len(page.ids) == len(set(page.ids))


def test_the_loss_is_one_panel_with_models_as_colours(demo):
    series, _, _ = demo
    panel = panels(series)["loss"]
    lines = {(line.tags["model"], line.tags["loss"]): line for line in panel.lines}
    assert set(lines) == {(m, k) for m in ("decoder", "encoder") for k in ("held-out", "training")}
    assert all(line.visible for line in panel.lines)
    assert {key[0]: line.role for key, line in lines.items()} == {"decoder": 0, "encoder": 1}
    held = {r.step: r.estimate for r in series[0].records if (r.site, r.measure) == ("model", "loss")}
    assert lines["decoder", "held-out"].y == tuple(held[step].value for step in STEPS)
    assert lines["decoder", "held-out"].upper[3] == held[STEPS[3]].interval()[1]
    assert len(lines["decoder", "training"].y) == len(STEPS) - 1  # no training before step 0


def test_the_generic_panels_hold_geometry_only(demo):
    series, _, page = demo
    figures = built(series)
    generic = [p for f in figures if f.key.startswith(("profiles-", "steps", "heatmaps")) for p in f.panels]
    measures = {re.split("-", panel.key)[1] for panel in generic}
    want = {"two_nn", "spectral_ratio", "gradient_isoscore", "gradient_norm", "writer_norm", "update_norm"}
    assert measures == want
    assert not any("model" in panel.y.labels for panel in generic)
    assert not any(line.name == "model" for panel in generic for line in getattr(panel, "lines", ()))
    by_key = {figure.key: figure for figure in figures}
    assert {panel.key.split("-")[1] for panel in by_key["steps"].panels} == {"two_nn", "spectral_ratio"}
    assert "profiles-other" not in by_key and by_key["profiles-gradients"].title == "Gradients by layer"
    for name in want:
        assert measure_group(name) in GROUPS and measure_title(name) != name
        assert glossary()[name]["says"] in page.words
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(layer_table(series[0]))
    table = console.export_text()
    assert "spectral" in table and "seminmf" not in table and "gradient" not in table and "model" not in table


def test_adjusted_p_values_agree_with_a_slow_benjamini_hochberg(demo):
    series, _, page = demo
    tests = correct(series)["decoder"]
    mine = [test for test in tests.values() if test.gradient == "activation"]
    assert len(mine) == len(STEPS) * 6 * len(PROXIES)  # sites x steps x proxies of one training
    order = sorted(mine, key=lambda test: test.p)
    slow, least = {}, 1.0
    for rank in range(len(order), 0, -1):
        least = min(least, order[rank - 1].p * len(order) / rank)
        slow[id(order[rank - 1])] = least
    for test in mine:
        assert test.adjusted == pytest.approx(slow[id(test)])
        assert test.draws == B
    count = sum(adjusted <= 0.05 for adjusted in slow.values())
    assert 0 < count < sum(test.p <= 0.05 for test in mine)  # the planted p-values make the correction matter
    by_proxy = [sum(slow[id(t)] <= 0.05 for t in mine if t.proxy == proxy) for proxy in PROXIES]
    want = (
        f"decoder: {count} of {len(mine)} tests of the activation gradient (sites × steps × proxies) are significant "
        f"at 5 % after the Benjamini-Hochberg correction: Semi-NMF {by_proxy[0]} of 54, PCA {by_proxy[1]} of 54 and "
        f"Random basis {by_proxy[2]} of 54. The smallest possible p is 1/(199+1) = 0.005."
    )
    assert by_proxy[2] == 0 and want in page.words


def test_hovering_a_ratio_tells_p_and_adjusted_p(demo):
    series, _, _ = demo
    panel = panels(series)["ratio-seminmf-activation-decoder"]
    assert [(one.name, one.y) for one in panel.references] == [("1: as much as controls", 1.0)]
    shades = [line.shade for line in panel.lines]
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] == 1 and len(shades) == 6
    (line,) = [line for line in panel.lines if line.name == "resid.3"]
    test = correct(series)["decoder"]["seminmf", "activation", 64, "resid.3"]
    hover = line.hover[STEPS.index(64)]
    assert f"p = {test.p:.3g}, adjusted {test.adjusted:.3g}" in hover and "over 64 sequences" in hover


def test_shares_by_frequency_at_the_last_step_and_over_time(demo):
    series, _, page = demo
    found = panels(series)
    panel = found["frequency-share-decoder"]
    assert panel.x.labels == ("1", "2", "3", "4", "5") and "rarest" in panel.x.title
    assert [one.y for one in panel.references] == [K / D]
    shown = [line for line in panel.lines if line.visible]
    assert {line.tags["proxy"] for line in shown} == {"Semi-NMF"} and len(shown) == 5
    want = {
        frequency_bin(r.slice)[0]: r.estimate.value
        for r in series[0].records
        if (r.measure, r.site, r.step) == ("seminmf.activation.share", "resid.0", STEPS[-1]) and frequency_bin(r.slice)
    }
    assert len(want) == 5 and dict(zip(shown[0].x, shown[0].y)) == want
    over = found["frequency-ratio-steps-encoder"]
    assert [one.y for one in over.references] == [1.0]
    assert [line.name for line in over.lines if line.visible] == list(BINS)
    assert all(line.hover[0].startswith("resid.3") for line in over.lines)  # one middle site
    assert {"own-distance-decoder", "global-distance-encoder"} <= set(found)
    assert "0.41 (0.32 … 0.49)" in page.words and "−0.60 (−0.69 … −0.52)" in page.words


def test_a_construction_is_called_one(demo):
    series, _, page = demo
    decoder, encoder = (Shelf(one) for one in series)
    tests = correct(series)
    said = construction_words([decoder], tests)
    assert said[0].startswith(
        "The reader share exceeds the permuted-signal null (95 % interval of the excess above 0) at 4 of 8 sites for "
        "Semi-NMF (4 after correction), at 4 of 8 sites for PCA (4 after correction) and at 0 of 8 sites for Random"
    )
    assert "than a construction" not in said[0]
    said = construction_words([encoder], tests)
    assert "at 0 of 8 sites for Semi-NMF" in said[0] and said[0].endswith("shown to be more than a construction.")
    assert "reader share of Semi-NMF exceeds the permuted-signal null at 0 of 8 sites (step 2,000)" in page.words
    panel = panels(series)["reader-null-decoder"]
    assert {line.tags["line"] for line in panel.lines} == {"reader share", "permuted signals"}
    assert [one.y for one in panel.references] == [K / D]


def test_an_excess_without_error_bars_is_not_called_a_construction(demo):
    """Permutations are drawn at the last look only: before it nothing is known, and nothing may be claimed."""
    encoder = demo[0][1]
    bare = tuple(r for r in _bared(encoder.records) if not r.measure.endswith("reader.p"))
    series = replace(encoder, records=bare)
    said = construction_words([Shelf(series)], correct([series]))[0]
    assert "at 0 of 8 sites for Semi-NMF (8 have no error bar yet)" in said and "than a construction" not in said
    found = training_findings([Shelf(series)], correct([series]))["Construction"]
    assert "no error bar yet" in found[0][1] and "than a construction" not in found[0][1]
    # Some looks with bars, later ones without: the last that can tell is told.
    late = tuple(one if r.step == STEPS[-1] else r for r, one in zip(encoder.records, _bared(encoder.records)))
    assert f"at step {STEPS[-2]:,}." in construction_words([Shelf(replace(encoder, records=late))], {})[0]


def _bared(records):
    return [
        replace(r, estimate=replace(r.estimate, stderr=None, dof=None, over=None)) if "excess" in r.measure else r
        for r in records
    ]


def test_switches_and_lines_agree_at_first(demo, seeded):
    """A line that is shown while its switch is off would vanish at the first click on any switch."""
    for series in (demo[0], seeded[0]):
        for figure in built(series):
            on = {}
            for toggle in figure.toggles:
                on.setdefault(toggle.kind, set()).update({toggle.value} if toggle.on else ())
            for panel in figure.panels:
                lines = getattr(panel, "lines", ())
                for line in lines:
                    wanted = all(kind not in on or tag in on[kind] for kind, tag in line.tags.items())
                    assert line.visible == wanted, (figure.key, panel.key, line.tags)
                assert not lines or any(line.visible for line in lines), panel.key


def test_the_referee_speaks_plainly(demo):
    series, _, page = demo
    found = verdicts([Shelf(one) for one in series])
    said = referee_words(found)
    assert said[0] == "The tangent reading survives at 2 of the 24 places the referee looked at."
    assert said[1].startswith(
        "decoder, step 2,000: the tangent reading of Semi-NMF survives at 2 of 6 sites (resid.2, "
    )
    assert referee_words(verdicts([Shelf(series[1])]))[0] == (
        "The tangent reading does not survive at any of the 6 places the referee looked at."
    )
    good = [one for one in found if one.survives]
    assert referee_words(good)[0] == "The tangent reading survives at all 2 places the referee looked at."
    assert "resid.2 survives decoder Semi-NMF passed: energy share 0.31 against 0.125 by chance said:" in page.words
    assert "resid.0 does not survive decoder PCA passed: energy share 0.2" in page.words
    assert "FAILED: mean squared cosine to local tangents 0.11" in page.words


def test_semi_nmf_facts_stand_in_a_small_table(demo):
    assert "resid.0 decoder 71.0 % 3.4 % 82.0 %" in demo[2].words


def test_early_and_late_are_said_with_their_direction(demo):
    series, _, page = demo
    decoder, encoder = (Shelf(one) for one in series)
    for shelf, verb in ((decoder, "rises"), (encoder, "falls")):
        (said,) = ratio_words(shelf)
        mine = [r for r in shelf.series.records if r.measure == "seminmf.activation.ratio" and r.slice == "all"]
        early = np.mean([r.estimate.value for r in mine if r.step in FIRST])
        late = np.mean([r.estimate.value for r in mine if r.step in LAST])
        assert f"{verb}: {early:.3g} early (steps 0 to 8), {late:.3g} late (steps 400 to 2,000)" in said
        assert said in page.words
    assert thirds([3]) is None and thirds([3, 4]) == ([3], [4]) and thirds(range(7)) == ([0, 1], [5, 6])
    still = replace(series[0], records=tuple(_still(r) for r in series[0].records))
    (said,) = ratio_words(Shelf(still))
    assert "neither rises nor falls beyond its error: 0.9 early" in said and "Both are below 1" in said


def _still(record):
    return replace(record, estimate=bar(0.9)) if record.measure.endswith(".ratio") else record


def test_two_phases_are_seen_where_they_are_and_denied_where_not(demo):
    series, _, page = demo
    (said,) = dimension_words(Shelf(series[0]))
    assert said.startswith("TwoNN dimension, mean over resid.1 to resid.4: two phases. It rises from ")
    peak = max(STEPS, key=lambda step: Truth().dimension(step, 0.5))
    assert any(f"at step {step}, then falls to" in said for step in STEPS[STEPS.index(peak) - 1 :][:3])
    (said,) = dimension_words(Shelf(series[1]))
    assert "no two phases. It falls from " in said and said in page.words
    (said,) = loss_words(Shelf(series[0]))
    assert re.match(r"Held-out loss falls from 5\.5\d+ ± 0\.\d+ at step 0 to 2\.[23]\d+ ± ", said)


def test_a_loss_that_rises_again_is_said(demo):
    series = demo[0][0]
    worse = {step: 1.2 if step == STEPS[-1] else 1.0 for step in STEPS}
    records = tuple(
        replace(r, estimate=replace(r.estimate, value=r.estimate.value * worse[r.step])) if r.measure == "loss" else r
        for r in series.records
    )
    said = loss_words(Shelf(replace(series, records=records)))
    assert len(said) == 2 and re.match(r"It was lowest at step 1,000 \(.*\) and has risen since\.", said[1])


def strings_of(value):
    """Every string in a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in strings_of(one)]


@pytest.mark.parametrize("which", ["demo", "seeded"])
def test_one_sign_for_minus(which, request):
    """Words, tables and hover texts: no hyphen stands before a number that begins there, nor in an exponent."""
    _, text, page = request.getfixturevalue(which)
    words = page.words.rpartition("Provenance")[0]  # what follows quotes files
    said = [words, *strings_of(program_of(text)["panels"])]
    hyphens = [found for one in said for found in re.findall(r".{0,20}(?:(?<![\w.…-])-\.?\d|\de-\d).{0,9}", one)]
    assert hyphens == [] and "−" in words


def test_means_over_seeds_with_students_interval(seeded):
    series, _, page = seeded
    assert [one.label for one in series] == [f"decoder seed {seed}" for seed in (0, 1, 2)]
    (pooled,) = pool_seeds(series)
    assert pooled.label == "decoder" and len(pooled.members) == 3
    tables = [{(r.step, r.site, r.measure, r.slice): r.estimate.value for r in one.records} for one in series]
    assert len(pooled.records) > 500
    for record in pooled.records[::7]:
        values = [table[record.step, record.site, record.measure, record.slice] for table in tables]
        e = record.estimate
        assert e.value == pytest.approx(np.mean(values))
        assert e.over == "3 seeds" and e.dof == 2
        if np.ptp(values):
            low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
            assert e.interval() == pytest.approx((low, high))
    names = {tangent(r.measure).what for r in pooled.records if tangent(r.measure)}
    assert not names & {"p", "survives", "tangent_p"}  # a mean of these would mean nothing
    assert "mean and 95 % interval over 3 seeds" in page.words
    assert "One model watched while training from 3 seeds" in page.words


@pytest.mark.parametrize("key", ["loss", "steps-two_nn", "ratio-seminmf-activation", "frequency-share", "drift"])
def test_single_seeds_are_behind_a_switch(seeded, key):
    series = seeded[0]
    (figure,) = [f for f in built(series) if any(panel.key == key for panel in f.panels)]
    assert [(t.value, t.on) for t in figure.toggles if t.kind == "seeds"] == [
        ("mean of 3 seeds", True),
        ("each seed", False),
    ]
    panel = panels(series)[key]
    mean = [line for line in panel.lines if line.tags["seeds"] == "mean of 3 seeds"]
    each = [line for line in panel.lines if line.tags["seeds"] == "each seed"]
    assert len(each) == 3 * len(mean) and all(line.visible for line in mean) and not any(one.visible for one in each)
    three = [line for line in each if line.name == mean[0].name][:3]
    np.testing.assert_allclose(mean[0].y, np.mean([line.y for line in three], axis=0))
    assert "over 3 seeds" in mean[0].hover[-1]
    assert {line.hover[0].split("\n")[-1] for line in three} == {f"decoder seed {seed}" for seed in (0, 1, 2)}
    if key.startswith("ratio"):
        assert all(f"seed {seed}: p = " in mean[0].hover[2] for seed in (0, 1, 2))


def test_the_change_over_seeds_is_a_paired_t_interval(seeded):
    series = seeded[0]
    (pooled,) = pool_seeds(series)
    changes = []
    for one in series:
        mine = [r for r in one.records if r.measure == "seminmf.activation.ratio" and r.slice == "all"]
        ends = [np.mean([r.estimate.value for r in mine if r.step in part]) for part in (FIRST, LAST)]
        changes.append(ends[1] - ends[0])
    found = early_late(Shelf(pooled), "seminmf.activation.ratio")
    want = stats.t.interval(0.95, 2, np.mean(changes), stats.sem(changes))
    assert found.change.interval() == pytest.approx(want)
    (said,) = ratio_words(Shelf(pooled))
    assert f"(95 % {want[0]:+.2g} to {want[1]:+.2g} over 3 seeds)" in said


def test_only_steps_that_all_seeds_share_are_averaged(tmp_path):
    truth = Truth(proxies=("seminmf",), layers=2)
    with RunWriter.create(tmp_path / "run") as writer:
        for seed, steps in ((0, STEPS), (1, STEPS[:5])):
            write_training(writer, f"a seed {seed}", truth, seed=seed, variant="a", steps=steps)
        write_training(writer, "b", truth, seed=0, steps=STEPS[:3])
    with RunReader(tmp_path / "run") as run:
        series = read_series([run])
        pooled, alone = pool_seeds(series)
        assert pooled.steps == list(STEPS[:5]) and alone.members == ()
        panel = panels(series)["loss"]
        each = [line for line in panel.lines if line.tags.get("seeds") == "each seed"]
        assert max(len(line.x) for line in each) == len(STEPS)  # the switch still shows all of them
        caption = next(f.caption for f in built(series) if f.key == "loss")
        assert "over 2 seeds" in caption
        assert "Where there is one seed, bands are 95 % intervals over sequences." in caption
    with RunWriter.create(tmp_path / "begun") as writer:
        for seed, steps in ((0, STEPS), (1, STEPS[:1])):
            write_training(writer, f"a seed {seed}", truth, seed=seed, variant="a", steps=steps)
    with RunReader(tmp_path / "begun") as run:  # one shared step would hide a whole training
        assert [one.members for one in pool_seeds(read_series([run]))] == [(), ()]


def test_one_seed_says_what_its_bands_are_over(demo):
    captions = {figure.key: figure.caption for figure in built(demo[0])}
    for key, over in (("loss", "sequences"), ("energy-ratio", "sequences"), ("frequency-distances", "token types")):
        assert f"One seed: bands are 95 % intervals over {over}." in captions[key]
    assert not any("seeds" in caption for caption in captions.values())


def test_a_report_in_the_middle_of_a_run(tmp_path):
    """One look, missing sites, failures in place of numbers, a referee that has not spoken."""
    with RunWriter.create(tmp_path / "run") as writer, writer.probe(step=0, cell="decoder", info={"seed": 0}) as probe:
        probe.add_estimate(bar(5.5), site="model", measure="loss", slice="all")
        bare = bar(1.2, over=None, notes=())
        probe.add_estimate(bare, site="resid.1", measure="seminmf.activation.ratio", slice="all")
        probe.add_estimate(bar(0.3), site="resid.1", measure="pca.activation.share", slice=BINS[0])
        probe.fail(site="resid.0", measure="tangent", slice="all", error="TooFewRowsError: 3 rows")
    with RunReader(tmp_path / "run") as run:
        page = Page(write_report(run, tmp_path / "report.html", figures=tmp_path / "figures").read_text("utf-8"))
    assert "Held-out loss is 5.50 ± 0.17 at step 0, the only look." in page.words
    assert "1 measurement failed." in page.words and "TooFewRowsError: 3 rows" in page.words
    assert "One model watched while training, once, at step 0" in page.words
    assert "the-referee" not in page.ids and "loss" in page.ids
    assert (tmp_path / "figures" / "loss.pdf").exists()
    for steps in (STEPS[:1], STEPS[:2]):
        folder = tmp_path / f"{len(steps)} steps"
        with RunWriter.create(folder) as writer:
            write_training(writer, "decoder", Truth(layers=2), steps=steps)
        with RunReader(folder) as run:
            page = Page(write_report(run, folder / "report.html").read_text("utf-8"))
        assert {"gradient-energy-along-proxies", "the-referee", "loss"} <= set(page.ids)


def test_figures_for_papers_include_the_training(demo, seeded, tmp_path):
    wanted = {"loss", "energy-ratio", "frequency-bins", "construction", "drift", "referee"}
    figures = [figure for figure in built(demo[0]) if figure.key in wanted]
    some = [replace(figure, panels=figure.panels[:1]) for figure in figures]
    written = write_figures(some, tmp_path / "demo", formats=("svg",))
    assert {path.stem for path in written} >= {"loss", "ratio-seminmf-activation-decoder", "enrichment-decoder"}
    assert len(written) == len(wanted)
    loss = next(figure for figure in built(seeded[0]) if figure.key == "loss")
    (path,) = write_figures([loss], tmp_path / "seeds", formats=("svg",))
    # The two means with their bands; the six lines of single seeds are for the page.
    assert path.read_text().count('<g id="FillBetweenPolyCollection') == 2


def test_everything_is_escaped(tmp_path):
    with RunWriter.create(tmp_path / "run", name=HOSTILE) as writer:
        for seed in (0, 1):
            for step in (0, 5):
                info = {"variant": HOSTILE, "seed": seed, "corpus": HOSTILE}
                with writer.probe(step=step, cell=f"{HOSTILE} {seed}", info=info) as probe:
                    truth = Truth(proxies=("seminmf",), layers=1)
                    bins = (f"frequency 1 of 2 {HOSTILE}", f"frequency 2 of 2 {HOSTILE}")
                    _write_look(probe, truth, step, 0, lambda value: value, bins)
                    bad = Estimate(value=0.0, stderr=None, n=1, method=HOSTILE, notes=(f"FAILED: {HOSTILE}",))
                    probe.add_estimate(bad, site=HOSTILE, measure="seminmf.survives", slice="all")
                    odd = Estimate(value=7.0, stderr=None, n=1, method=HOSTILE, notes=(HOSTILE,))
                    probe.add_estimate(odd, site=HOSTILE, measure="seminmf.activation.p", slice="all")
                    probe.add_estimate(odd, site=HOSTILE, measure="pca.a<b.ratio", slice="all")
                    probe.add_estimate(odd, site="model", measure=HOSTILE, slice="all")
    with RunReader(tmp_path / "run") as run:
        text = write_report(run, tmp_path / "report.html").read_text("utf-8")
    page = Page(text)
    assert not any(tag == "img" for tag, _ in page.tags)
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert "alert(2)</script>" not in text and "<img" not in text
    assert f"FAILED: {' '.join(HOSTILE.split())}" in page.words
    for panel in program_of(text)["panels"]:
        drawn = str([{k: v for k, v in trace.items() if k != "meta"} for trace in panel["data"]]) + str(panel["layout"])
        assert "<img" not in drawn and "<script" not in drawn


def test_bands_of_two_seeds_do_not_hide_their_lines(tmp_path):
    """Student's interval of two seeds is 12.7 standard errors to either side; scaled to it, every line looks flat."""
    with seeds_run(tmp_path / "run", (0, 1), STEPS[:4], noise=0.2, layers=1) as run:
        series = read_series([run])
    panel = panels(series)["ratio-seminmf-activation"]
    y = [value for line in panel.lines for value in line.y] + [1.0]
    low, high = panel.y.range
    assert low < min(y) and max(y) < high and high - low == pytest.approx(2 * (max(y) - min(y)))
    assert max(end for line in panel.lines for end in line.upper if end is not None) > high
    assert panel_json(panel)["layout"]["yaxis"]["range"] == pytest.approx([low, high])
    caption = next(figure.caption for figure in built(series) if figure.key == "energy-ratio")
    assert "Two seeds say little" in caption
    draw(panel)


def test_populations_are_named_in_a_word():
    assert population("12 sequences and 12 sequences of the two halves") == "sequences"
    assert population("99 normal controls and 99 normal controls of the two halves") == "controls"
    assert population("99 permutations of the signal (tokens)") == "permutations"
    assert population("rows, from 16 disjoint subsamples") == "rows"
    assert population("1,412 token types (bootstrap)") == "token types"


def test_names_are_taken_apart():
    assert tangent("local_pca.writer.share").title == "Local PCA, writer gradient"
    assert [tangent(name) for name in ("two_nn", "pca", "pca.", "pca.a.b.c", "other.activation.ratio")] == [None] * 5
    assert measure_title("seminmf.activation.ratio") == "Energy ratio (Semi-NMF, activation gradient)"
    assert frequency_bin("frequency 12 of 20: counts 3-4") == (12, 20) and frequency_bin("all") is None
    e = bar(0.2)
    assert (noted(e, "K"), noted(e, "D"), noted(e, "B"), chance_of(e)) == (16, 128, 199, 0.125)
    assert chance_of(bar(0.2, notes=("K=8, D=32",))) == 0.25 and chance_of(bar(0.2, notes=())) is None
    assert chance_of(bar(0.2, notes=(), chance=0.5)) == 0.5


def test_a_ratio_below_one_is_said(demo):
    series = demo[0][0]
    low = replace(series, records=tuple(_still(r) for r in series.records))
    said = energy_words([Shelf(low)], correct([low]))
    assert said[-1] == (
        "At step 2,000 the ratio of Semi-NMF lies above 1 at 0 of 6 sites, at 6 below 1: less than along random "
        "directions (95 % intervals over 64 sequences)."
    )
