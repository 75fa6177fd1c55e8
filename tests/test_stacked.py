"""Work that several rows or sites share says what the plain, separate computations say."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_kernels import run

from anisoscope.errors import OptionError, SiteError
from anisoscope.measures import later, neighbors_gpu, tridiagonal
from anisoscope.measures import stacked as stacked_measures
from anisoscope.measures.found import Found
from anisoscope.measures.later import Going
from anisoscope.measures.neighbors import by_tiles, nearest_neighbors
from anisoscope.measures.neighbors_fused import _tiles
from anisoscope.measures.neighbors_gpu import mended, nearest_by_tiles, search
from anisoscope.measures.plan import scale_of
from anisoscope.measures.stacked import STACKED, begin
from anisoscope.measures.table import measure
from anisoscope.monitor import DEFAULT_MEASURES, GRADIENT_MEASURES
from anisoscope.monitoring import stacking, tangents_together
from anisoscope.monitoring.measuring import Book, What, _enter_gradients, _enter_states, enter_look, norm_of_squares
from anisoscope.monitoring.stacking import Stacked, summed_by_sequence
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.monitoring.tangents_together import alike
from anisoscope.monitoring.views import Look, SiteView
from anisoscope.stats import gram_matrices
from anisoscope.stats.gram_matrices import gram_in_parts
from anisoscope.stats.precision import full_precision, two_parts
from anisoscope.tangent import stacked, stacked_fits
from anisoscope.tangent.spans import principal_angles
from anisoscope.tangent.stacked import Layout, jackknives, mean_angles, seen_by_halves
from anisoscope.tangent.stacked_types import Types, correlation_estimates
from anisoscope.tangent.units import Halves, jackknife
from anisoscope.text.frequency import TokenCounts, frequency_bins


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(n, d):
    """Twenty heaps of rows that float32 products cannot tell apart."""
    centre = torch.randint(20, (n,), generator=torch.Generator().manual_seed(1))
    return draw(20, d, seed=2)[centre] + 1e-6 * draw(n, d)


CLOUDS = {
    "plain": draw(1500, 48),
    "float64": draw(1000, 16).double(),
    "heaps": clustered(1500, 8),
    "far from the origin": draw(1500, 20) + 1e4,
    "copies": draw(200, 24)[torch.randint(200, (1500,), generator=torch.Generator().manual_seed(3))],
    "one enormous row": torch.cat([draw(1, 24) * 1e20, draw(1200, 24, seed=4)]),
    "tiny": draw(900, 12) * 1e-30,
    "bfloat16": draw(700, 12).bfloat16(),
    "few": draw(6, 5),
}


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_tiles_find_the_same_neighbours(name, k):
    rows = CLOUDS[name]
    here, there = nearest_neighbors(rows, k), nearest_by_tiles(rows, k)
    assert torch.allclose(here.distances, there.distances, rtol=1e-12, atol=0)
    own = torch.arange(len(rows))[:, None]
    assert bool((there.indices != own).all())
    at = rows.double()[there.indices] - rows.double()[:, None]
    scale = scale_of(rows)
    assert torch.allclose((at * scale).norm(dim=2) / scale, there.distances, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["plain", "far from the origin", "tiny", "few"])
def test_rows_in_two_parts_find_the_same_neighbours(name):
    rows = CLOUDS[name]
    found, there = search(rows, 2, scale_of(rows), in_parts=True), nearest_neighbors(rows, 2)
    assert bool(found.settled.all())
    assert torch.allclose(found.distances, there.distances, rtol=1e-12, atol=0)


def test_rows_that_are_not_certain_are_mended():
    rows = torch.stack([draw(700, 20), 3 * draw(700, 20, seed=5)])
    truth = [nearest_neighbors(one, 3) for one in rows]
    broken = []
    for one in truth:
        wrong = torch.rand(700, generator=torch.Generator().manual_seed(6)) < 0.2
        distances = torch.where(wrong[:, None], one.distances + 1, one.distances)
        broken.append(Found(distances, torch.where(wrong[:, None], 0, one.indices), ~wrong))
    for one, found in zip(truth, mended(rows, 3, broken), strict=True):
        assert bool(found.settled.all())
        assert torch.allclose(found.distances, one.distances, rtol=1e-12, atol=0)
        assert torch.equal(found.indices, one.indices)


def test_some_sites_are_mended_a_few_at_a_time(monkeypatch):
    """Sites that do not lie side by side, fewer at once than there are, with rows that are nobody's neighbours."""
    monkeypatch.setattr(neighbors_gpu, "WIDE_CELLS", 2 * 300 * 6)
    rows = torch.stack([draw(300, 6, seed=seed) + seed for seed in range(6)])
    left_out = torch.rand(6, 300, generator=torch.Generator().manual_seed(7)) < 0.1
    places = [0, 1, 3, 5]
    doubtful = Found(torch.ones(300, 2).double(), torch.zeros(300, 2).long(), torch.arange(300) >= 40)
    found = mended(rows, 2, [doubtful] * 4, left_out, 40, places)
    for place, one in zip(places, found, strict=True):
        kept = (~left_out[place]).nonzero().reshape(-1)
        truth, few = nearest_neighbors(rows[place][kept], 2), kept < 40
        assert torch.allclose(one.distances[kept[few]], truth.distances[few], rtol=1e-12, atol=0)
        assert torch.equal(one.indices[kept[few]], kept[truth.indices[few]]) and bool(one.settled.all())
    assert bool((doubtful.distances == 1).all())


def test_rows_in_doubt_are_measured_against_all_others_by_a_kernel():
    found = run("again", script="row_kernel_cases.py")
    for name in ("masked", "whole"):
        *sites, odd = found[name]
        for error, gap, wrong in sites:
            assert error < 1e-12 and gap < 1e-12 and wrong == 0, (name, sites)
        assert odd == [148, 4, 0], "two rows beside an entry that is not finite have no distances and stay in doubt"
    assert found["alone"] == [[False, False], [[False, True], [False, True]], [1, 0]], "one other row is not two"


def test_what_float32_cannot_settle_is_told():
    rows = CLOUDS["heaps"]
    assert not bool(search(rows, 2, 1.0).settled.any())
    assert bool(search(rows, 2, 1.0, dtype=torch.float64).settled.all())
    assert bool(search(CLOUDS["plain"], 2, 1.0).settled.all())


def test_devices_and_precision_are_left_as_they_were():
    assert by_tiles(torch.device("cuda")) and not by_tiles(torch.device("cpu"))
    before = torch.get_float32_matmul_precision()
    with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
        assert (draw(4, 4) @ draw(4, 4)).dtype == torch.float32
    assert torch.get_float32_matmul_precision() == before


SITES, SEQUENCES, LENGTH, WIDTH, RANK = 3, 24, 40, 24, 3
ROWS = SEQUENCES * LENGTH


def looked(step, *, sites=SITES, dtype=torch.float32, drop=0):
    """Views of one look: concepts that are on or off, gradients that follow some of them, Zipfian tokens."""
    made = torch.Generator().manual_seed(7)
    ids = (torch.rand(ROWS, generator=made) ** 4 * 60).long()
    keep = torch.randperm(ROWS, generator=made)[: ROWS - drop].sort().values
    views = []
    for site in range(sites):
        fixed = torch.Generator().manual_seed(100 + site)
        concepts = torch.randn(5, WIDTH, generator=fixed) * 2
        own = torch.Generator().manual_seed(1000 * step + site)
        on = torch.randn(ROWS, 5, generator=fixed).relu()
        x = (
            on @ concepts
            + 0.7 * torch.randn(ROWS, WIDTH, generator=fixed)
            + 0.2 * torch.randn(ROWS, WIDTH, generator=own)
        )
        g = torch.randn(ROWS, WIDTH, generator=own) + (on - 0.3) @ concepts * 0.3
        views.append(
            SiteView(
                site=f"resid.{site}",
                step=step,
                seed=0,
                x=x[keep].to(dtype),
                g=(1e-3 * g[keep]).to(dtype),
                ids=ids[keep],
                positions=keep % LENGTH,
                sequences=keep // LENGTH,
                tokens=ROWS,
            )
        )
    return views


def asked(views, **more):
    options = {"rank": RANK, "draws": 49, "bins": 3, "referee": "never", "counts": TokenCounts.of(views[0].ids, 60)}
    return TangentAnalysis(**options | more)


def same(mine, plain, rel, name):
    assert mine.value == pytest.approx(plain.value, rel=rel, abs=1e-9), name
    assert (mine.stderr is None) == (plain.stderr is None), name
    if plain.stderr is not None:
        assert mine.stderr == pytest.approx(plain.stderr, rel=100 * rel), name
    assert (mine.n, mine.method, mine.over, mine.dof) == (plain.n, plain.method, plain.over, plain.dof), name
    assert mine.notes == plain.notes and list(mine.parts) == list(plain.parts), name
    for part in plain.parts:
        same(mine.parts[part], plain.parts[part], 10 * rel, f"{name}: {part}")


@pytest.mark.parametrize("options", [{}, {"proxies": ("pca",)}, {"proxies": ("pca", "seminmf"), "counts": None}])
@pytest.mark.parametrize(("dtype", "drop"), [(torch.float32, 0), (torch.float32, 133), (torch.float64, 50)])
def test_sites_together_say_what_each_says_alone(options, dtype, drop):
    looks = [looked(step, dtype=dtype, drop=drop) for step in (1, 2, 3)]
    alone, together = asked(looks[0], **options), asked(looks[0], **options)
    for view in looks[0]:
        alone(view), together(view)
    for views in looks[1:]:
        found = together.stacked(views)
        assert list(found) == [view.site for view in views]
        for view in views:
            plain = alone(view)
            assert list(found[view.site]) == list(plain)
            for name, result in plain.items():
                # Semi-NMF stops at a decrease of 1e-4: rounding moves where it stands by less than that.
                rel = 1e-5 if "pca" in str(name)[:7] or "distance" in str(name) else 3e-4
                loose = any(word in str(name) for word in ("angle", "drift", "sparsity"))  # one code is 1 in 3,000
                same(found[view.site][name], result, 5e-2 if loose else rel, f"{view.site} {name}")
    for key, tracker in alone._trackers.items():
        other = together._trackers[key]
        assert other.step == tracker.step and list(other.proxy.facts) == list(tracker.proxy.facts)
        for fact, value in tracker.proxy.facts.items():
            if fact == "iterations":  # the last decrease may lie next to the tolerance
                assert abs(other.proxy.facts[fact] - value) <= 1
                continue
            assert other.proxy.facts[fact] == pytest.approx(
                value, rel=2e-3, abs=3e-3 if fact == "sparsity" else 1e-4
            ), fact
    assert set(together.state()) == set(alone.state())


def test_the_size_of_the_gradients_is_seen_by_nobody():
    """Gradients of a mean over a billion tokens are tiny; squares of them would leave float32."""
    views = looked(1)
    tiny = [replace(view, g=view.g * 2.0**-90) for view in views]
    found, scaled = (asked(some).stacked(some) for some in (views, tiny))
    assert set(scaled) == set(found) == {view.site for view in views}
    for site, told in found.items():
        for name, one in told.items():
            if not isinstance(one, Exception):
                assert scaled[site][name] == one, name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_rows_that_are_not_ordinary_are_left_out_alone(bad):
    views = looked(1)
    views[1] = replace(views[1], x=views[1].x.clone().index_fill_(0, torch.tensor([3]), bad))
    found, alone = asked(views).stacked(views), asked(views).stacked([views[0], *views[2:]])
    assert set(found) == {view.site for view in views} - {views[1].site}
    assert {site: found[site]["pca.explained"] for site in found} == {
        site: alone[site]["pca.explained"] for site in alone
    }


@pytest.mark.parametrize("apart", [0.0, 1e-12, 1e-8, 1e-4, 0.1, 1.0, "right"])
def test_mean_angles_are_those_of_principal_angles(apart):
    draw = torch.Generator().manual_seed(0)
    whole = torch.linalg.qr(torch.randn(40, 12, generator=draw, dtype=torch.float64)).Q
    one, other = whole[:, :5], whole[:, 5:10]
    if apart == "right":
        two = torch.cat([one[:, :2], other[:, :3]], dim=1)  # some shared, some at right angles
    else:
        two = one * math.cos(apart) + other * math.sin(apart)
    two = two @ torch.linalg.qr(torch.randn(5, 5, generator=draw, dtype=torch.float64)).Q
    (found,) = mean_angles(one[None], two[None])
    truth = 54.0 if apart == "right" else math.degrees(apart)
    assert float(found) == pytest.approx(truth, rel=1e-6, abs=2e-7)
    assert float(found) == pytest.approx(float(principal_angles(one, two).mean()), rel=1e-6, abs=2e-6)
    nan = mean_angles(torch.stack([one, one * torch.nan]), torch.stack([two, two]))
    assert float(nan[0]) == float(found) and bool(nan[1].isnan())


def test_sites_start_together():
    looks = [looked(step) for step in (1, 2)]
    alone, together = asked(looks[0]), asked(looks[0])
    found = together.stacked(looks[0])
    for view in looks[0]:
        plain, mine = alone(view), found[view.site]
        assert list(mine) == list(plain), "no drift where there is nothing to drift from"
        for name, result in plain.items():
            if str(name).startswith("pca"):
                same(mine[name], result, 1e-5, name)
        # Another k-means, so another local optimum; as good a fit, and nothing that is only shifted.
        assert mine["seminmf.explained"].value > 0.97 * plain["seminmf.explained"].value
        assert mine["seminmf.sparsity"].value > 0.5 * plain["seminmf.sparsity"].value
    assert "seminmf.drift" in together.stacked(looks[1])["resid.0"]


@pytest.mark.parametrize("where", ["cold sites", "the last site"])
def test_sites_lost_to_a_full_device_can_be_told_alone(where, monkeypatch):
    """Those that were told stay told; those that were not are fitted at this step, which must not have been entered."""
    first, views = looked(1), looked(2)
    analysis = asked(views)
    analysis.stacked(first[:2])  # the third has nothing to start from

    def full(*args):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    if where == "cold sites":
        monkeypatch.setattr(tangents_together, "kmeans_starts", full)
        told = ["resid.0", "resid.1"]
    else:
        plain = analysis._matrices
        monkeypatch.setattr(analysis, "_matrices", lambda here: (full if here.view.site == "resid.1" else plain)(here))
        told = ["resid.2"]
    found = analysis.stacked(views)
    assert list(found) == told
    monkeypatch.undo()
    for view in views:
        if view.site not in found:
            assert "seminmf.activation.p" in analysis(view)


def test_starts_are_centres_of_cells(monkeypatch):
    """Each round of k-means moves centres to the means of their cells: rows lie nearer to them than to drawn rows."""
    heaps = 8 * draw(6, WIDTH, seed=1)[torch.arange(600) % 6] + draw(600, WIDTH, seed=2)
    # The first half is filled up with rows of zeros.
    centred = stacked_fits.Centred.of(heaps[None], (torch.arange(90), torch.arange(90, 600)))

    def spreads(centres):
        parts = zip(centred.rows, centred.counts.tolist(), centres, strict=True)
        return [float(torch.cdist(rows[:n].double(), one).amin(dim=1).square().sum()) for rows, n, one in parts]

    starts = stacked_fits.kmeans_starts(centred, 6, 0)
    unfilled = stacked_fits.Centred.of(heaps[None, :180], (torch.arange(90), torch.arange(90, 180)))
    assert torch.allclose(starts[0], stacked_fits.kmeans_starts(unfilled, 6, 0)[0], atol=1e-4), "zeros are no rows"
    found = spreads(starts)
    monkeypatch.setattr(stacked_fits, "KMEANS_ROUNDS", 0)
    drawn = spreads(stacked_fits.kmeans_starts(centred, 6, 0))
    assert all(after < 0.7 * before for after, before in zip(found, drawn, strict=True)), (found, drawn)


def test_a_constant_distance_is_told_at_its_site_alone():
    """As at the embedding of a model without positions: all copies of a token are one row, and its distance is 0."""
    views = looked(1)
    types = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(3))
    views[0] = replace(views[0], x=types[views[0].ids])
    analysis = asked(views)
    found = analysis.stacked(views)
    alone = asked(views)(views[0])
    assert set(found) == {view.site for view in views}
    assert "frequency.own_pearson" in found["resid.1"] and "frequency.own_pearson" not in alone
    for name, result in alone.items():
        if "seminmf" not in str(name):
            same(found["resid.0"][name], result, 1e-5, name)
    assert list(found["resid.0"]) == list(alone)


def test_a_site_that_is_not_ordinary_is_taken_alone():
    looks = [looked(step) for step in (1, 2)]
    analysis = asked(looks[0])
    for view in looks[0]:
        analysis(view)
    views = list(looks[1])
    views[1] = replace(views[1], g=torch.zeros_like(views[1].g))
    found = analysis.stacked(views)
    assert list(found) == ["resid.0", "resid.2"]
    both = analysis.together([*views[:1], replace(views[1], step=3), replace(views[2], step=3)])
    assert isinstance(both["resid.0"], OptionError)  # the same step twice
    assert isinstance(both["resid.1"]["tangent: activation"], SiteError)
    assert "pca.explained" in both["resid.1"] and both["resid.2"]["pca.activation.p"].value > 0
    assert analysis._trackers["resid.1", "pca", 0].step == 3


def test_what_cannot_stand_together_is_not_stacked():
    views = looked(1)
    assert alike(views) and not alike([]) and not alike([*views[:1], replace(views[1], g=None)])
    shorter = replace(views[1], x=views[1].x[:, :-1], g=views[1].g[:, :-1])
    assert not alike([views[0], shorter]) and not alike([views[0], replace(views[1], ids=views[1].ids.flip(0))])
    assert asked(views, referee="always").stacked(views) == {}
    assert asked(views, proxies=("kmeans",)).stacked(views) == {}
    none = asked(views).together([views[0], replace(views[1], g=None, no_gradient="is frozen")])
    assert isinstance(none["resid.1"], SiteError) and "pca.explained" in none["resid.0"]


def test_counts_that_do_not_fit_are_told_at_every_site():
    looks = [looked(step) for step in (1, 2)]
    few = TokenCounts.of(looks[0][0].ids[looks[0][0].ids < 20], 60)
    analysis = asked(looks[0], counts=few)
    for view in looks[0]:
        analysis(view)
    for one in analysis.stacked(looks[1]).values():
        assert "count 0" in str(one["tangent: by_type"])


def clouds(n=1400, width=24):
    """Rows on curved sheets, one site with copies, one with a mean far off."""
    made = torch.Generator().manual_seed(5)
    found = []
    for site in range(4):
        x = torch.sin(torch.rand(n, 4, generator=made) @ torch.randn(4, 30, generator=made) * 2)
        x = x @ torch.randn(30, width, generator=made) + 0.3 * torch.randn(n, width, generator=made) + site
        found.append(x)
    found[1][100:140] = found[1][:40]
    return found


@pytest.fixture(params=["decomposed", "reduced"])
def way(request, monkeypatch):
    """How spectra come about: on a GPU by tridiagonal forms, which LAPACK makes here."""
    monkeypatch.setattr(tridiagonal, "fits", lambda matrices: request.param == "reduced")
    monkeypatch.setattr(later, "CORES", 2)


def test_measures_of_sites_together_are_those_of_each(way):
    rows = clouds()
    for found, one in zip(begin(rows, STACKED)(), rows, strict=True):
        plain = measure(one, STACKED)
        for name in STACKED:
            mine = found[name]
            assert mine.value == pytest.approx(plain[name].value, rel=1e-6), name
            assert (mine.n, mine.method, mine.over, mine.dof) == (
                plain[name].n, plain[name].method, plain[name].over, plain[name].dof
            )  # fmt: skip
            if plain[name].stderr is None:
                assert mine.stderr is None
            else:
                assert mine.stderr == pytest.approx(plain[name].stderr, rel=1e-5) and mine.notes == plain[name].notes
    assert [set(one) for one in begin(rows, ["isoscore"])()] == [{"isoscore"}] * 4


def test_sites_that_are_not_ordinary_are_left_to_the_measures(way):
    rows = clouds()
    rows[0] = rows[0] * 1e12
    rows[1] = torch.ones_like(rows[1])
    rows[2][5, 3] = torch.nan
    found = begin(rows, STACKED)()
    assert [one is None for one in found] == [True, True, True, False]
    steep = clouds()[:1]
    steep[0] = steep[0] * 10.0 ** torch.linspace(0, -9, 24)
    assert begin(steep, ["effective_rank"])() == [None]
    assert begin([one[:20] for one in clouds()], STACKED)() == [None] * 4  # too few
    assert begin([one.double() for one in clouds()], STACKED)() == [None] * 4
    heaps = [clustered(1400, 8), draw(1400, 8)]
    for one, plain in zip(begin(heaps, ["two_nn"])(), heaps, strict=True):
        assert one is None or one["two_nn"].value == pytest.approx(measure(plain, ["two_nn"])["two_nn"].value, rel=1e-6)


def test_rows_of_a_layer_norm_which_lost_a_direction_are_ordinary(way):
    """Every GPT-2-like model ends with one: its sites would all be decomposed once more, by singular values."""
    rows = [torch.nn.functional.layer_norm(one * torch.logspace(0, -2, 24), (24,)) for one in clouds()]
    for found, one in zip(begin(rows, STACKED)(), rows, strict=True):
        plain = measure(one, STACKED)
        for name in STACKED:
            same(found[name], plain[name], 1e-5, name)
        assert found["effective_rank"].value == pytest.approx(plain["effective_rank"].value, rel=1e-6)
    flat = [one @ (torch.eye(24) - torch.eye(24)[:, :1] @ torch.eye(24)[:1]) for one in clouds()]  # exactly
    for found, one in zip(begin(flat, ["effective_rank"])(), flat, strict=True):
        same(found["effective_rank"], measure(one, ["effective_rank"])["effective_rank"], 1e-6, "exactly zero")
    small = [one * torch.where(torch.arange(24) < 4, 1.0, 3e-8) for one in clouds()]  # twenty of them add up
    assert begin(small, ["effective_rank"])() == [None] * 4


def test_a_look_measured_together_is_the_look_measured_site_by_site():
    views = looked(1)
    still = torch.zeros(ROWS, 1)
    still[LENGTH - 1 :: LENGTH] = 1  # the last token of each sequence predicts nothing
    views = [replace(view, g=view.g * (1 - still) * 1e-6, x=torch.tanh(view.x)) for view in views]
    views[2] = replace(views[2], g=views[2].g * (torch.arange(ROWS) > 3)[:, None])
    what = What(DEFAULT_MEASURES, GRADIENT_MEASURES, {}, 0)
    plain, mine = Book("", 1, ""), Book("", 1, "")
    enter_look(plain, Look(tuple(views), 1.0, ROWS), what)
    stacked = Stacked.begin(views, what.measures, what.gradient_measures, norm_of_squares)
    states, gradients = stacked.finish()
    assert list(gradients) == ["resid.0", "resid.1"] and len(states) == 3
    for view in views:
        _enter_states(mine, view, what, states.get(view.site, {}))
        _enter_gradients(mine, view, what, gradients.get(view.site))
    assert not plain.failures and not mine.failures
    for one, two in zip(plain.records[1:], mine.records, strict=True):
        assert (one.site, one.measure) == (two.site, two.measure)
        same(two.estimate, one.estimate, 1e-5, f"{one.site} {one.measure}")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("Triton Error [CUDA]: out of memory")])
@pytest.mark.parametrize("when", ["begun", "gone on", "finished"])
def test_sites_without_room_together_are_left_to_be_measured_alone(when, error, monkeypatch):
    """A training may leave room for one site and not for all of them."""

    def full(*args):
        raise error

    going = {"gone on": lambda: Going(full), "finished": lambda: Going(lambda: full)}.get(when, full)
    monkeypatch.setattr(stacking, "begin", lambda *args: going())
    monkeypatch.setattr(stacking, "begin_summed", lambda *args: (going(), None))
    views = looked(1)
    begun = Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares)
    if when == "gone on":
        begun.go_on()
    assert begun.finish() == ({}, {})
    monkeypatch.setattr(stacking, "begin_summed", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # nothing else is kept silent
        Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares)


@pytest.mark.parametrize("n", [700, 3100])
def test_entries_whose_squares_overflow_are_left_to_the_plain_measure(n, recwarn):
    """And give no index beyond the rows, which a GPU would not survive; other sites are searched together as ever."""
    rows = draw(2 * n, 9).view(2, n, 9)
    huge = torch.stack([rows[0], rows[1].index_fill(0, torch.tensor([3]), 1e30)])
    found, alone = begin(huge, ["two_nn"])(), begin(rows, ["two_nn"])()
    assert found[1] is None and not [one for one in recwarn if "one by one" in str(one.message)]
    same(found[0]["two_nn"], alone[0]["two_nn"], 1e-12, "two_nn")
    for again in (huge, huge[1:]):
        near = mended(again, 2, [search(one, 2, 1.0) for one in again])
        assert all(int(one.indices.max()) < n for one in near)


def test_rows_on_tensor_cores_are_multiplied_in_two_parts():
    rows = draw(900, 30) * torch.logspace(-3, 0, 30)
    high, low = two_parts(rows)
    assert torch.equal(high + low, rows)
    assert bool((low.abs() <= rows.abs() * 2.0**-10).all())
    assert torch.equal(high.view(torch.int32) & ((1 << 13) - 1), torch.zeros_like(high, dtype=torch.int32))
    rows = draw(2500, 30) * torch.logspace(-3, 0, 30)  # neither a whole number of parts nor one part
    truth, size = rows.double().T @ rows.double(), rows.double().norm(dim=0)
    assert float(((gram_in_parts(rows) - truth) / size[:, None] / size).abs().max()) < 1e-6
    rows = draw(1100, 270)  # in strips from the diagonal on, of which the last is narrower
    mine, truth, size = gram_in_parts(rows), rows.double().T @ rows.double(), rows.double().norm(dim=0)
    assert torch.equal(mine, mine.T) and float(((mine - truth) / size[:, None] / size).abs().max()) < 1e-6


def test_effective_ranks_of_wide_rows_count_small_singular_values(monkeypatch):
    """Products in parts would lose three digits here: one direction holds nearly everything, and it is no axis."""
    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 32)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    turn = torch.linalg.qr(draw(48, 48, seed=1).double()).Q
    size = torch.cat([torch.ones(1), torch.full((47,), 1e-3)])  # variances of a millionth of the largest
    rows = ((draw(2048, 48).double() * size) @ turn).float()
    names = ["spectral_ratio", "effective_rank"]
    found = begin([rows, rows.flip(0)], names)()
    for one in found:
        for name, plain in measure(rows, names).items():
            assert one is not None and one[name].value == pytest.approx(plain.value, rel=1e-7), name


def test_scatters_of_wide_float64_rows_keep_their_digits(monkeypatch):
    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 32)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    rows = draw(1, 600, 40).double() + 1e-9 * draw(1, 600, 40, seed=1).double()
    centred = stacked_fits.Centred.of(rows, (torch.arange(300), torch.arange(300, 600)))
    truth = torch.stack([part.T.cov(correction=0) * 300 for part in rows[0].split(300)])
    assert torch.allclose(centred.scatter, truth, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_halves_in_the_same_steps_say_what_each_says_alone(monkeypatch, labels):
    """Halves of different sizes, so that neither may be taken for the other."""
    g, groups = draw(2, 330, 20).double(), torch.arange(330) // 30
    bins = torch.randint(2, (330,), generator=torch.Generator().manual_seed(3)) if labels else None
    layout = Layout.of(Halves.of(groups, 0, "cpu"), bins, labels)
    assert layout.counts[0] != layout.counts[1]
    bases = torch.linalg.qr(draw(2, 3, 2, 20, 4).double()).Q
    together = seen_by_halves(g, layout, bases, 7, 1)
    monkeypatch.setattr(stacked, "TOGETHER_CELLS", 0)
    for one, two in zip(together, seen_by_halves(g, layout, bases, 7, 1), strict=True):
        for name, value in vars(one).items():
            torch.testing.assert_close(value, getattr(two, name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("cores", "dtype", "good"), [(True, torch.float32, False), (False, torch.float32, True),
                                                       (True, torch.float64, True)])  # fmt: skip
def test_directions_that_products_in_parts_cannot_tell_are_left_to_the_plain_fit(monkeypatch, cores, dtype, good):
    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 32)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: cores)
    rows = (draw(1, 400, 40).double() * torch.cat([torch.full((1,), 1e4), torch.ones(39)])).to(dtype)
    centred = stacked_fits.Centred.of(rows, (torch.arange(200), torch.arange(200, 400)))
    values, vectors = torch.linalg.eigh(centred.scatter)
    for rank, ordinary in ((1, True), (3, good)):
        found = stacked_fits.pca_fits(centred, rank, (values.flip(1), vectors.flip(2)))
        assert found.ordinary.tolist() == [ordinary] * 2


def test_tiles_of_pairs_are_kept_for_each_stream():
    one, same, other = (_tiles(1, 3, torch.device("cpu"), stream) for stream in (7, 7, 8))
    assert one is same and one is not other and torch.equal(one, other)
    assert sorted(one.tolist()) == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 2]]


def test_groups_without_gradient_or_with_few_sequences_are_told_as_alone():
    """No gradient in the rarest tokens, and in the next ones in two sequences alone: no test, and no error bar."""
    views = looked(1)
    counts = TokenCounts.of(views[0].ids, 60)
    group = frequency_bins(counts, 3).bin_of(views[0].ids)
    keep = (group == 2) | ((group == 1) & (views[0].sequences < 2))
    views = [replace(view, g=view.g * keep[:, None]) for view in views]
    alone, together = asked(views, proxies=("pca",)), asked(views, proxies=("pca",))
    found = together.stacked(views)
    for view in views:
        plain = alone(view)
        assert list(found[view.site]) == list(plain)
        assert not any("rarest" in name[1] and "ratio" in name[0] for name in plain if isinstance(name, tuple))
        for name, result in plain.items():
            same(found[view.site][name], result, 1e-5, name)


def test_error_bars_of_a_table_are_those_of_its_columns():
    made = np.random.default_rng(0)
    bottom = made.exponential(size=(12, 6))
    bottom[3:, 1] = 0  # three units left
    bottom[2:, 2] = 0  # two
    bottom[1:, 3] *= 1e-16  # one that is all there is
    bottom[:, 4] = 0
    top = bottom * made.uniform(size=bottom.shape)
    stderr, count, there = jackknives(top, bottom)
    for at in range(6):
        bar = jackknife(torch.from_numpy(top[:, at]), torch.from_numpy(bottom[:, at]), "units")
        assert (bar is not None) == there[at] == (at in (0, 1, 5)), at
        if bar is not None:
            assert stderr[at] == pytest.approx(bar.stderr, rel=1e-12) and count[at] - 1 == bar.dof


def test_correlations_leave_out_draws_with_a_constant_side():
    views = looked(1)
    types = Types.of(views[0].ids, frequency_bins(TokenCounts.of(views[0].ids, 60), 3),
                     TokenCounts.of(views[0].ids, 60), 40, 0, torch.device("cpu"))  # fmt: skip
    drawn = np.random.default_rng(1).uniform(-0.9, 0.9, size=(2, 2, 4, 41))
    drawn[0, 0, 0, 5:11] = np.nan
    drawn[0, 0, 1, 1:30] = np.nan
    drawn[0, 0, 2, 0] = np.nan
    drawn[0, 0, 3, 0] = 1.0
    some, few, none, certain = correlation_estimates(drawn, types)[0][0]
    rest = drawn[0, 0, 0, 1:][np.isfinite(drawn[0, 0, 0, 1:])]
    assert some.stderr == pytest.approx(rest.std(ddof=1)) and len(rest) == 34
    reach = 1.959964 * np.arctanh(rest).std(ddof=1)
    assert some.parts["high"].value == pytest.approx(np.tanh(np.arctanh(some.value) + reach))
    assert few.stderr is None and not few.parts and few.value == drawn[0, 0, 1, 0]
    assert none is None and certain.stderr is None and not certain.parts


def test_the_norm_of_a_gradient_has_the_spread_of_its_sequences():
    squares, number = draw(300).double().square(), torch.arange(300) // 20
    found = norm_of_squares(summed_by_sequence(squares[None].numpy(), number)[0], 300, 600)
    sums = [float(part.sum()) for part in squares.split(20)]
    assert found.value == pytest.approx((2 * sum(sums)) ** 0.5) and found.dof == 14
    assert found.stderr == pytest.approx(2 * statistics.stdev(sums) * 15**0.5 / (2 * found.value))


def test_a_search_that_fails_leaves_its_sites_to_the_plain_measures(monkeypatch):
    def broken(rows):
        def finish():
            raise RuntimeError("out of memory")

        return finish

    monkeypatch.setattr(stacked_measures.stacked_masked, "begin", broken)
    rows = torch.randn(2, 700, 8, generator=torch.Generator().manual_seed(0))
    assert stacked_measures.begin(rows, ["mean_cosine", "two_nn"])() == [None, None]
    assert None not in stacked_measures.begin(rows, ["mean_cosine"])()


def test_mending_leaves_the_rows_as_they_are():
    rows = torch.randn(1, 300, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    before = rows.clone()
    found = search(rows[0], 2, 1.0)
    doubtful = Found(found.distances * 2, found.indices, torch.zeros_like(found.settled))
    (one,) = mended(rows, 2, [doubtful])
    assert torch.equal(rows, before)
    assert torch.allclose(one.distances[one.settled], found.distances[one.settled]) and bool(one.settled.any())
