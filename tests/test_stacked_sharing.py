"""What measures and analyses of a look share is made once, and says what each of them would have said by itself."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_stacked import asked, draw, looked, same

from anisoscope.errors import ShapeError
from anisoscope.estimate import Estimate
from anisoscope.measures import stacked_sums
from anisoscope.measures.cells import Cells
from anisoscope.measures.later import Handover
from anisoscope.measures.stacked import STACKED, begin, begin_summed
from anisoscope.monitor import DEFAULT_MEASURES, GRADIENT_MEASURES
from anisoscope.monitoring import measuring, stacking, tangents_together
from anisoscope.monitoring.measuring import Book, What, enter_look, norm_of_squares
from anisoscope.monitoring.sharing import Shared, Sharing, wanted_cells
from anisoscope.monitoring.stacking import Stacked, summed_by_sequence
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.monitoring.views import Look
from anisoscope.stats import gram_matrices
from anisoscope.tangent.stacked_fits import Centred

SUMMED = tuple(name for name in DEFAULT_MEASURES if name != "two_nn")


def parted(n, share=0.3):
    """Two cells of different sizes, made of runs of rows here and there."""
    first = (torch.rand(n // 20 + 1, generator=torch.Generator().manual_seed(4)) < share).repeat_interleave(20)[:n]
    return Cells.of([first.nonzero().reshape(-1), (~first).nonzero().reshape(-1)], n)


def hostile(n=700, width=12):
    """By name: sites whose sums lose digits where they are formed carelessly."""
    cells, plain = parted(n), draw(n, width)
    side = cells.number.float()[:, None]
    turned = plain @ torch.linalg.qr(draw(width, width, seed=2)).Q * torch.logspace(0, -2, width)
    return cells, {
        "plain": plain,
        "a huge mean": plain + 1e5,
        "constant columns": plain * (torch.arange(width) > 3) + 7,
        "halves far apart": plain + 3e4 * (side - 0.5),
        "one half tiny": turned * torch.where(side > 0, 1.0, 1e-4),
        "one half tiny and far": turned * torch.where(side > 0, 1.0, 1e-2) - 1e4 * (1 - side),
        "one half is all alike": plain * side,
    }


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_cells_say_where_rows_stand(share):
    cells = parted(230, share)
    order = torch.cat(cells.rows)
    assert (len(cells.rows[0]) < len(cells.rows[1])) == (share < 0.5), "either may be the longer one"
    rows = draw(230, 3)
    side_by_side, filled = torch.zeros(230, 3), torch.zeros(2, max(map(len, cells.rows)), 3)
    side_by_side[cells.place] = rows
    filled.view(-1, 3)[cells.filled] = rows
    assert torch.equal(side_by_side, rows[order])
    for cell, at in enumerate(cells.rows):
        assert torch.equal(filled[cell, : len(at)], rows[at]) and not filled[cell, len(at) :].any()
        assert torch.equal(cells.inside[cell].nonzero().reshape(-1), at) and bool((cells.number[at] == cell).all())
    assert cells.ends == (len(cells.rows[0]), 230) and cells.counts.tolist() == [len(one) for one in cells.rows]
    for wrong in ([torch.arange(5), torch.arange(4, 9)], [torch.arange(5)], [torch.arange(9), torch.arange(0)]):
        with pytest.raises(ShapeError, match="9 rows"):
            Cells.of(wrong, 9)


@pytest.mark.parametrize("parts", ["float64", "in parts"])
def test_sums_by_cell_are_those_of_each_and_of_all(parts, monkeypatch):
    """Against a plain scatter in float64 of rows about their own mean; nothing is taken off a larger sum."""
    cells, sites = hostile()
    if parts == "in parts":  # as tensor cores multiply wide rows: six digits
        monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 8)
        monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(stacked_sums, "WIDE_CELLS", 2 * 700 * 12)  # a few sites at a time
    rows = torch.stack(list(sites.values()))
    whole, by_cell = stacked_sums.Sums.of(rows, directions=False, exact=parts == "float64", cells=cells)
    alone, none = stacked_sums.Sums.of(rows, directions=False, exact=parts == "float64")
    limit = 1e-13 if parts == "float64" else 1e-6
    assert none is None
    for site, name in enumerate(sites):
        wide = rows[site].double()
        assert torch.allclose(by_cell.mean[site], wide.mean(dim=0), rtol=1e-14, atol=1e-13), name
        for cell, at in enumerate(cells.rows):
            own = wide[at] - wide[at].mean(dim=0)
            truth, found = own.T @ own, by_cell.scatter[site, cell]
            assert float((found - truth).abs().max()) <= limit * float(truth.trace()), name
            assert torch.allclose(by_cell.means[site, cell], wide[at].mean(dim=0), rtol=1e-14, atol=1e-13), name
        centred = wide - wide.mean(dim=0)
        truth = centred.T @ centred / (len(wide) - 1)
        assert float((whole.covariance[site] - truth).abs().max()) <= limit * float(truth.trace()), name
    assert torch.equal(whole.covariance, whole.covariance.mT)
    for name in ("size", "mean", "fourth", "rows", "total"):
        rel = 1e-12 if name != "total" else 10 * limit
        assert torch.allclose(getattr(whole, name), getattr(alone, name), rtol=rel, atol=1e-6 * (name == "rows")), name


def test_measures_are_the_same_whether_sums_are_formed_by_cell():
    cells, sites = hostile(1400, 16)
    rows = torch.stack([sites[name] for name in ("plain", "one half tiny", "one half tiny and far")] + [draw(1400, 16)])
    rows[3, 5, 2] = torch.nan
    finish, sums = begin_summed(rows, STACKED, cells)
    plain = begin(rows, STACKED)()
    assert plain[3] is None and any(one is not None for one in plain)
    for mine, one in zip(finish(), plain, strict=True):
        assert (mine is None) == (one is None)
        for name in one or ():
            same(mine[name], one[name], 1e-9, name)
    assert bool(sums.size[3].isnan()) and torch.equal(sums.size[:3], rows[:3].abs().amax(dim=(1, 2)))
    assert begin_summed(rows, ["two_nn"], cells)[1] is None, "nothing is summed for it"
    assert begin_summed(rows.double(), STACKED, cells)[1] is None


def test_fits_start_from_sums_that_are_given():
    cells, sites = hostile()
    rows = torch.stack(list(sites.values()))
    sums = stacked_sums.Sums.of(rows, directions=False, exact=True, cells=cells)[1]
    given, made = Centred.of(rows, cells.rows, sums), Centred.of(rows, cells.rows)
    assert given.scatter.data_ptr() == sums.scatter.data_ptr(), "no copy"
    assert torch.equal(given.counts, made.counts) and torch.equal(given.spread, made.spread)
    assert torch.allclose(given.mean, made.mean, rtol=1e-14, atol=1e-13)
    # Products were those of rows rounded to float32.
    size = made.total[:, None, None] + 1e-12
    assert float(((given.scatter - made.scatter) / size).abs().max()) < 1e-7
    step = torch.finfo(torch.float32).eps * made.rows.abs().clamp_min(1e-9)
    assert bool(((given.rows - made.rows).abs() <= step).all())


def shared_of(views, analysis):
    """As a look on a GPU has it."""
    cells = wanted_cells([lambda view: {}, analysis], views)
    begun = Stacked.begin(views, SUMMED, GRADIENT_MEASURES, norm_of_squares, cells)
    return begun, begun.taken()


def agree(found, plain, rel=1e-6):
    assert list(found) == list(plain)
    for site, told in plain.items():
        assert list(found[site]) == list(told)
        for name, result in told.items():
            loose = "sparsity" in str(name) or "angle" in str(name) or "drift" in str(name) or "seminmf" in str(name)
            same(found[site][name], result, 3e-4 if loose else rel, f"{site} {name}")


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**30])
@pytest.mark.parametrize("drop", [0, 133])
def test_an_analysis_says_the_same_of_what_is_shared(scale, drop, monkeypatch):
    looks = [[replace(view, g=view.g * scale) for view in looked(step, drop=drop)] for step in (1, 2)]
    alone, together = asked(looks[0]), asked(looks[0])
    plain = [alone.stacked(views) for views in looks]
    monkeypatch.setattr(tangents_together, "_stacked", None)  # nothing is stacked again,
    monkeypatch.setattr(tangents_together, "largest_sizes", None)  # nor looked through for what is largest,
    monkeypatch.setattr("anisoscope.tangent.stacked_fits._summed", None)  # nor summed
    for views, told in zip(looks, plain, strict=True):
        begun, shared = shared_of(views, together)
        before = shared.x.clone(), shared.gradients.rows.clone()
        agree(together.begin_stacked(views, shared)(), told)
        assert torch.equal(shared.x, before[0]) and torch.equal(shared.gradients.rows, before[1]), "nobody writes to it"
        states, gradients = begun.finish()
        assert begun.shared is None and len(states) == len(gradients) == len(views)
        by_itself = Stacked.begin(views, SUMMED, GRADIENT_MEASURES, norm_of_squares).finish()[1]
        agree(gradients, by_itself, 1e-9)


@pytest.mark.parametrize("together", [False, True])
def test_measures_of_gradients_take_second_moments_that_an_analysis_forms(together, monkeypatch):
    """Rows of zeros count in neither; a mean that is most of the moments would cost digits, and the site is left."""
    if not together:
        monkeypatch.setattr("anisoscope.tangent.stacked.TOGETHER_CELLS", 0)  # one half after the other
    views = [replace(view, g=view.g.clone()) for view in looked(1)]
    for view in views:
        view.g[::7] = 0
    views[1].g.add_((views[1].g != 0) * 30 * views[1].g.std())
    plain = Stacked.begin(views, SUMMED, GRADIENT_MEASURES, norm_of_squares).finish()[1]
    analysis = asked(views)
    begun, shared = shared_of(views, analysis)
    formed = []
    monkeypatch.setattr(stacked_sums, "grams", lambda rows, exact: formed.append(rows))
    analysis.begin_stacked(views, shared)
    found = begun.finish()[1]
    assert not formed and set(plain) == {view.site for view in views}
    assert list(found) == [views[0].site, views[2].site]
    agree(found, {site: plain[site] for site in found}, 1e-9)
    assert "rows of the gradient are zero" in found[views[0].site]["gradient_isoscore"].notes[-1]


def test_without_second_moments_gradients_are_left_to_the_plain_measures():
    views = looked(1)
    begun, shared = shared_of(views, asked(views))
    assert shared.gradients.second is not None and len(begun.finish()[0]) == len(views)
    assert begun.finish()[1] == {}
    handed, made = Handover(), draw(3, 4)
    assert handed.taken(3) is None
    handed.give([0, 1, 2], made)
    assert handed.taken(3) is made and handed.taken(3) is None, "it is held by nobody then"
    handed.give([2], made[:1])
    handed.give([0], made[1:2])
    found = handed.taken(3)
    assert torch.equal(found[[2, 0]], made[:2]) and bool(found[1].isnan().all())


@pytest.mark.parametrize("why", ["states out of range", "a site that is new"])
def test_one_site_that_is_not_ordinary_does_not_keep_moments_from_the_others(why):
    views, analysis = looked(2), asked(looked(2))
    if why == "a site that is new":
        analysis.stacked(looked(1)[1:])
    else:
        views[1] = replace(views[1], x=views[1].x * 1e9)
    begun, shared = shared_of(views, analysis)
    analysis.begin_stacked(views, shared)()
    found = begun.finish()[1]
    plain = Stacked.begin(views, SUMMED, GRADIENT_MEASURES, norm_of_squares).finish()[1]
    there = [view.site for view in views if why == "a site that is new" or view.site != views[1].site]
    assert list(found) == there
    agree(found, {site: plain[site] for site in there}, 1e-9)


def test_squares_are_summed_by_sequence_in_order():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(-3, 40, (200,), generator=generator)
    for names in (torch.tensor([4, 4, 7, 9, 9]), mixed, torch.tensor([5]), mixed.sort().values):
        squares = torch.rand(3, len(names), generator=generator, dtype=torch.float64).numpy()
        right = [[one[names.numpy() == name].sum() for name in sorted(set(names.tolist()))] for one in squares]
        assert np.allclose(summed_by_sequence(squares, names), right, rtol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30, "no gradient", "bad gradient"])
def test_sites_that_are_not_ordinary_are_left_out_of_what_is_shared(bad):
    views = looked(1)
    if bad == "no gradient":
        views[1] = replace(views[1], g=torch.zeros_like(views[1].g))
    elif bad == "bad gradient":
        views[1] = replace(views[1], g=views[1].g.clone().index_fill_(0, torch.tensor([3]), torch.inf))
    else:
        views[1] = replace(views[1], x=views[1].x.clone().index_fill_(0, torch.tensor([3]), bad))
    rest = [views[0], views[2]]
    analysis = asked(views)
    found = analysis.begin_stacked(views, shared_of(views, analysis)[1])()
    agree(found, asked(views).stacked(rest))


def test_sites_with_and_without_a_start_take_their_part_of_what_is_shared():
    first, views = looked(1), looked(2)
    alone, together = asked(views), asked(views)
    for analysis in (alone, together):
        analysis.stacked(first[1:])  # the first site has nothing to start from
    agree(together.begin_stacked(views, shared_of(views, together)[1])(), alone.stacked(views))


@pytest.mark.parametrize("what", ["other cells", "no cells", "no gradients", "no measures", "float64"])
def test_what_is_not_shared_is_made(what):
    dtype = torch.float64 if what == "float64" else torch.float32
    views = looked(1, dtype=dtype)
    analysis = asked(views)
    cells = {"other cells": parted(len(views[0].x)), "no cells": None}.get(what, analysis.shared_cells(views))
    measures = () if what == "no measures" else SUMMED
    of_gradients = ("mle",) if what == "no gradients" else GRADIENT_MEASURES  # which is not measured together
    shared = Stacked.begin(views, measures, of_gradients, norm_of_squares, cells).taken()
    assert (shared is None) == (what in ("no measures", "float64"))
    if shared is not None:
        assert (shared.gradients is None) == (what == "no gradients") and shared.sums.size.shape == (3,)
    agree(analysis.begin_stacked(views, shared)(), asked(views).stacked(views))


def test_gradients_are_brought_near_one_where_they_are_far_from_it():
    rows = torch.stack([draw(50, 8) * size for size in (1e-30, 1e-3, 1.0, 100.0, 1e9, 0.0)])
    rows = torch.cat([rows, torch.full_like(rows[:1], torch.nan), torch.full_like(rows[:1], 1e-41)])
    before = rows.clone()
    longest = rows.double().norm(dim=2).amax(dim=1).tolist()
    stacking._bring_near(rows, longest)
    assert torch.equal(rows[[2, 3, 5]], before[[2, 3, 5]]) and bool(rows[6].isnan().all())
    for at in (0, 1, 4):
        assert 0.5 <= float(rows[at].double().norm(dim=1).max()) < 1
        ratio = (rows[at].double() / before[at].double()).unique()
        assert len(ratio) == 1 and float(ratio.log2()) == round(float(ratio.log2())), "one power of two"
    assert bool(rows[7].isfinite().all()) and float(rows[7].max()) > 1e-6
    same_place = rows[2:4].clone()
    stacking._bring_near(same_place, [1.0, 100.0])
    assert torch.equal(same_place, rows[2:4])


@pytest.mark.parametrize("size", [1e-9, 1.0, 300.0])
def test_measures_of_gradients_do_not_see_their_size(size):
    views = [replace(view, g=view.g * 2.0 ** round(torch.tensor(size).log2().item())) for view in looked(1)]
    plain = looked(1)
    one, two = (
        Stacked.begin(some, (), GRADIENT_MEASURES, norm_of_squares).finish()[1] for some in (plain, views)
    )  # fmt: skip
    assert set(one) == set(two) == {view.site for view in views}
    for site, told in one.items():
        for name in told:
            if name != "gradient_norm":
                same(two[site][name], told[name], 1e-12, name)


class Taking:
    """An analysis of somebody's own that says what it was given."""

    def __init__(self, cells=None):
        self.cells, self.given = cells, []

    def __call__(self, view):
        raise AssertionError("nobody asks site by site")

    def shared_cells(self, views):
        if isinstance(self.cells, Exception):
            raise self.cells
        return self.cells

    def begin_together(self, views, shared=None):
        self.given.append(shared)
        return lambda: {view.site: {"one": Estimate(value=1.0, stderr=None, n=3, method="m")} for view in views}


class Old:
    """One that knows nothing of it."""

    def __call__(self, view):
        raise AssertionError("nobody asks site by site")

    def begin_together(self, views):
        return lambda: {view.site: {"two": Estimate(value=2.0, stderr=None, n=3, method="m")} for view in views}


def test_analyses_with_and_without_a_use_for_it_stand_side_by_side():
    views = looked(1)
    cells = parted(len(views[0].x))
    first, second, old = Taking(ValueError("not today")), Taking(cells), Old()
    assert isinstance(first, Sharing) and isinstance(asked(views), Sharing) and not isinstance(old, Sharing)
    assert wanted_cells([old, first, second, Taking(parted(200))], views) is cells
    assert wanted_cells([old, first, Taking()], views) is None
    book = Book("", 1, "")
    analyses = {"first": first, "old": old, "last": lambda view: {}}
    enter_look(book, Look(tuple(views), 1.0, 10), What(("mean_cosine",), ("isoscore",), analyses, 0))
    assert first.given == [None], "nothing is shared on a CPU"
    assert {record.measure for record in book.records} >= {"one", "two", "mean_cosine"} and not book.failures
    shared = Shared(("a",), draw(1, 4, 3))
    begun = measuring._begin(second, views, shared)
    assert second.given == [shared] and set(begun()) == {view.site for view in views}


class Failing(Taking):
    """One that cannot begin."""

    def begin_together(self, views, shared=None):
        raise ValueError("not today")


def test_what_is_shared_is_held_by_nobody_afterwards():
    views = looked(1)
    shared = Shared(("a",), draw(1, 4, 3))
    held = weakref.ref(shared.x)
    begun = measuring._begin(Failing(), views, shared)
    del shared
    assert held() is None and {str(one) for one in begun().values()} == {"not today"}
    rows = torch.stack([view.x for view in views])
    held = weakref.ref(rows)
    finish, _ = begin_summed(rows, SUMMED, None)
    del rows
    assert held() is None and len(finish()) == len(views), "error bars need a part of it alone"


def test_halves_are_asked_for_where_sites_can_be_taken_together():
    views = looked(1)
    analysis = asked(views)
    cells = analysis.shared_cells(views)
    assert cells is analysis.shared_cells(views) is analysis._prepared.cells
    assert [one.tolist() for one in cells.rows] == [one.tolist() for one in analysis._prepared.layout.halves.rows]
    assert asked(views, referee="always").shared_cells(views) is None
    assert asked(views, proxies=("kmeans",)).shared_cells(views) is None
    assert asked(views, mode="frozen", steps=10).shared_cells(views) is None, "what is never fitted again needs no sums"
    without = [replace(view, g=None) for view in views]
    assert analysis.shared_cells(without) is cells, "as they are while gradients are on their way"
    assert analysis.begin_stacked(without)() == {}, "and nothing is told of them if none come"
    assert analysis.shared_cells([views[0], *without[1:]]) is None
    few = [replace(view, sequences=torch.zeros_like(view.sequences)) for view in views]
    assert TangentAnalysis(referee="never").shared_cells(few) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("width", [64, 2048])
def test_sums_by_cell_on_a_device(width, exact):
    here = parted(3000)
    cells = Cells.of([one.cuda() for one in here.rows], 3000)
    rows = (draw(2, 3000, width) + 30 * here.number[:, None]).cuda()
    whole, sums = stacked_sums.Sums.of(rows, directions=True, exact=exact, cells=cells)
    alone = stacked_sums.Sums.of(rows, directions=True, exact=exact)[0]
    limit = 1e-13 if exact or width < 2048 else 1e-6
    for one, other in ((whole.covariance, alone.covariance), (whole.fourth, alone.fourth), (whole.rows, alone.rows)):
        assert (
            float((one - other).abs().max()) <= max(limit, 1e-6 * (one is whole.rows)) * float(other.abs().max()) * 10
        )
    given, made = Centred.of(rows, cells.rows, sums), Centred.of(rows, cells.rows)
    for at in range(4):
        part = rows[at // 2][cells.rows[at % 2]].double()
        part = part - part.mean(dim=0)
        assert float((given.scatter[at] - part.T @ part).abs().max()) <= 10 * limit * float(given.total[at])
    assert float((given.rows - made.rows).abs().max()) <= 1e-6 * float(made.rows.abs().max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_look_on_a_device_says_what_its_parts_say_alone():
    views = [replace(view, x=view.x.cuda(), g=view.g.cuda()) for view in looked(1)]
    analysis = asked(views)
    book = Book("", 1, "")
    enter_look(book, Look(tuple(views), 1.0, 10), What(DEFAULT_MEASURES, GRADIENT_MEASURES, {"t": analysis}, 0))
    assert not book.failures
    found = {(one.site, one.measure, one.slice): one.estimate for one in book.records}
    for site, told in asked(views).stacked(views).items():
        for name, result in told.items():
            what, where = (name, "all") if isinstance(name, str) else name
            loose = "seminmf" in what or "angle" in what
            assert found[site, what, where].value == pytest.approx(result.value, rel=1e-3 if loose else 1e-6, abs=1e-6)
