"""The same numbers on a CUDA device as on the CPU. Skips itself where there is none; also runs as a plain script."""

import torch

import anisoscope as an

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ]
except ImportError:  # as a script, where pytest need not be
    pytest = None

OPTIONS = {"mle": {"k": 10}, "curvature": {"dimension": 3}, "local_isotropy": {"cells": 4}}


def cloud(n=6000, width=64):
    g = torch.Generator().manual_seed(0)
    z = torch.rand(n, 3, generator=g)
    return torch.sin(z @ torch.randn(3, 48, generator=g)) @ torch.randn(48, width, generator=g) + 3.0


def check(rows, tolerance):
    names = {name: OPTIONS.get(name, {}) for name in an.measure_names()}
    here, there = an.measure(rows, names), an.measure(rows.cuda(), names)
    for name in names:
        gap = abs(here[name].value - there[name].value) / abs(here[name].value)
        assert gap <= tolerance, f"{name}: {here[name].value} on the CPU, {there[name].value} on the device"
        assert (here[name].stderr is None) == (there[name].stderr is None), name
        if here[name].stderr:
            spread = abs(here[name].stderr - there[name].stderr) / here[name].stderr
            assert spread <= max(1e-2, tolerance), f"{name}: stderr {here[name].stderr} and {there[name].stderr}"


def test_float64_agrees():
    check(cloud().double(), 1e-8)


def test_float32_agrees():
    # float32 products are summed in another order there; spectra keep six digits, neighbours are decided in float64
    check(cloud(), 1e-5)


def test_half_precision_agrees():
    check(cloud().bfloat16(), 1e-5)


def test_neighbors_agree_exactly():
    rows = cloud(9000)
    here, there = an.nearest_neighbors(rows, 5), an.nearest_neighbors(rows.cuda(), 5)
    assert torch.allclose(here.distances, there.distances.cpu(), rtol=1e-12, atol=0)


def test_linearity_and_states_agree():
    x = cloud().double()
    y = x @ torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert abs(an.linearity(x, y).value - an.linearity(x.cuda(), y.cuda()).value) < 1e-9
    here, there = an.Moments.of(x), an.Moments.of(x.cuda())
    assert torch.allclose(here.scatter, there.scatter.cpu(), rtol=1e-9, atol=1e-6)
    merged = there.merge(there)
    assert merged.count == 2 * len(x)
    many = cloud(90_000)
    for precision, within in (("float64", 1e-12), ("mixed", 1e-6)):
        here, there = an.Moments.of(many.double()), an.Moments.of(many.cuda(), precision)
        for name in ("mean", "scatter", "third", "fourth"):
            one, other = getattr(here, name), getattr(there, name).cpu()
            assert float((one - other).abs().max()) <= 10 * within * float(one.abs().max()), (precision, name)
    assert abs(an.mean_cosine(many).value - an.mean_cosine(many.cuda()).value) < 1e-7


def test_tensor_cores_find_the_same_neighbours():
    from anisoscope.measures.neighbors_gpu import nearest_by_tiles, search

    rows = torch.cat([cloud(5000), torch.randn(4000, 64, generator=torch.Generator().manual_seed(2)) * 2])
    before = torch.get_float32_matmul_precision()
    for setting in ("high", "highest"):
        torch.set_float32_matmul_precision(setting)
        with torch.autocast("cuda", torch.bfloat16):
            there = nearest_by_tiles(rows.cuda(), 3)
        assert torch.get_float32_matmul_precision() == setting
    torch.set_float32_matmul_precision(before)
    here = an.nearest_neighbors(rows, 3)
    assert torch.allclose(here.distances, there.distances.cpu(), rtol=1e-12, atol=0)
    for in_parts in (False, True):
        found = search(rows.cuda(), 3, 1.0, in_parts=in_parts)
        settled = found.settled.cpu()
        assert float(settled.double().mean()) > 0.9
        assert torch.allclose(here.distances[settled], found.distances.cpu()[settled], rtol=1e-12, atol=0)


def test_rows_in_doubt_are_measured_against_all_others():
    """Widths with and without whole tiles; sites far off, with copies, with rows in a grid; some sites of all."""
    import warnings

    from anisoscope.measures import neighbors_gpu
    from anisoscope.measures.found import Found

    draw, n, places, most = torch.Generator("cuda").manual_seed(0), 5003, [0, 1, 3], 45
    for width in (5, 64, 770, 2048):
        rows = torch.randn(4, n, width, generator=draw, device="cuda")
        rows[1] = (2 * rows[1]).round().clamp(-1, 1) * (torch.arange(width, device="cuda") < 5)
        rows[3] += 1000
        rows[0, 4000:4100] = rows[0, :100]
        left_out = torch.zeros(4, n, dtype=torch.bool, device="cuda")
        left_out[0, 4000:4100] = True
        left_out[3] = torch.rand(n, generator=draw, device="cuda") < 0.2
        doubtful = torch.rand(3, n, generator=draw, device="cuda") < 40 / n
        doubtful[:, :3] = doubtful[:, -3:] = True
        doubtful &= (doubtful & ~left_out[places]).cumsum(dim=1) <= most
        nothing = torch.zeros(n, 2, dtype=torch.float64, device="cuda"), torch.zeros(n, 2, dtype=torch.int64).cuda()
        given = [Found(*nothing, ~one) for one in doubtful]
        found = neighbors_gpu.mended(rows, 2, given, left_out, most, places)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this switch is young
            torch.cuda.set_sync_debug_mode("error")
        try:
            again = neighbors_gpu.mended(rows, 2, given, left_out, most, places)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        by_kernel, neighbors_gpu.kernels_run = neighbors_gpu.kernels_run, lambda device: False
        plain = neighbors_gpu.mended(rows, 2, given, left_out, most, places)
        neighbors_gpu.kernels_run = by_kernel
        for place, one, two, old, asked in zip(places, found, again, plain, doubtful, strict=True):
            assert torch.equal(one.distances, two.distances) and torch.equal(one.indices, two.indices), "the same bits"
            assert bool(one.settled.all())
            wide = rows[place].double()
            for row in (asked & ~left_out[place]).nonzero().reshape(-1).tolist():
                apart = (wide - wide[row]).norm(dim=1)
                apart[row] = torch.inf
                truth = apart.masked_fill(left_out[place], torch.inf).topk(2, largest=False).values
                assert torch.allclose(one.distances[row], truth, rtol=1e-12, atol=0), (width, place, row)
                assert torch.allclose(apart[one.indices[row]], truth, rtol=1e-12, atol=0), (width, place, row)
                assert not bool(left_out[place, one.indices[row]].any()), (width, place, row)
                if bool(old.settled[row]):
                    assert torch.allclose(one.distances[row], old.distances[row], rtol=1e-9, atol=0)


def test_on_an_unknown_gpu_the_fastest_shape_of_the_product_is_looked_for(monkeypatch, tmp_path):
    """Each of them finds the same neighbours; one is chosen, kept on disk and read by the next process."""
    from anisoscope.kernels import shapes
    from anisoscope.measures import neighbors_fused

    x = cloud(8192, 96)
    truth = an.nearest_neighbors(x, 2).distances
    asked = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(neighbors_fused, "KNOWN", {})
    seconds = neighbors_fused._seconds
    monkeypatch.setattr(neighbors_fused, "_seconds", lambda *of: asked.append(of[-1]) or seconds(*of))
    neighbors_fused.product_shape.cache_clear()
    try:
        found = neighbors_fused.product_shape(torch.device("cuda", 0))
        assert asked == list(neighbors_fused.SHAPES) and found in asked
        neighbors_fused.product_shape.cache_clear()
        assert neighbors_fused.product_shape(torch.device("cuda", 0)) == found and len(asked) == len(set(asked))
    finally:
        neighbors_fused.product_shape.cache_clear()
    (kept,) = tmp_path.rglob(shapes.FILE)
    print(kept.read_text())
    for shape in neighbors_fused.SHAPES:
        monkeypatch.setattr(neighbors_fused, "product_shape", lambda device, shape=shape: shape)
        again = an.nearest_neighbors(x.cuda(), 2).distances
        torch.testing.assert_close(again.cpu(), truth, rtol=1e-12, atol=0)


def test_the_kernel_of_sweeps_is_the_sweep():
    from anisoscope.tangent.descent import swept

    for rank, n, dtype in ((16, 1000, torch.float32), (3, 130, torch.float64), (33, 700, torch.float32)):
        draw = torch.Generator().manual_seed(rank)
        codes = torch.rand(2, rank, n, generator=draw, dtype=torch.float64).to(dtype)
        concepts = torch.randn(2, rank, 48, generator=draw, dtype=torch.float64)
        cross = (concepts @ torch.randn(2, 48, n, generator=draw, dtype=torch.float64)).to(dtype)
        gram = concepts @ concepts.transpose(1, 2)
        from anisoscope.tangent.sweeps import swept_all

        there = swept_all(codes.cuda(), cross.cuda(), gram.cuda(), 4).cpu()
        here = torch.stack([swept(*one, 4) for one in zip(codes, cross, gram, strict=True)])
        assert torch.allclose(here, there, rtol=1e-4, atol=1e-5), (rank, float((here - there).abs().max()))


def test_sites_together_on_the_device_say_what_each_says_alone():
    from dataclasses import replace

    from anisoscope.monitoring.measuring import norm_of_squares
    from anisoscope.monitoring.stacking import Stacked
    from anisoscope.monitoring.tangents import TangentAnalysis
    from anisoscope.monitoring.views import SiteView
    from anisoscope.text.frequency import TokenCounts

    draw = torch.Generator().manual_seed(0)
    n, sequences = 4096, torch.arange(4096) // 64
    ids = (torch.rand(n, generator=draw) ** 4 * 300).long()
    views = []
    for site in range(3):
        x = cloud(n, 64) * 0.1 + torch.randn(n, 64, generator=draw)
        g = 1e-5 * (torch.randn(n, 64, generator=draw) + 0.2 * x)
        views.append(SiteView(f"resid.{site}", 1, 0, x.cuda(), g.cuda(), ids, ids, sequences, tokens=n))
    one, two = (TangentAnalysis(counts=TokenCounts.of(ids, 300), rank=6, referee="never") for _ in range(2))
    for view in views:
        one(view), two(view)
    views = [replace(view, step=2, x=view.x + 0.05 * view.x.flip(0)) for view in views]
    found = two.stacked(views)
    assert len(found) == 3
    for view in views:
        plain = one(view)
        assert list(plain) == list(found[view.site])
        for name, result in plain.items():
            mine = found[view.site][name]
            loose = "angle" in str(name) or "drift" in str(name) or "sparsity" in str(name)
            assert abs(mine.value - result.value) <= (5e-2 if loose else 2e-3) * abs(result.value) + 1e-9, name
    names = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
    states, gradients = Stacked.begin(views, names, ("mean_cosine", "isoscore"), norm_of_squares).finish()
    assert len(states) == len(gradients) == 3
    for view in views:
        plain = an.measure(view.x.cpu(), names)
        for name in names:
            assert abs(states[view.site][name].value - plain[name].value) <= 1e-5 * abs(plain[name].value), name


def test_spectra_of_many_sites_are_those_of_each(monkeypatch):
    """By band forms; one site comes from a LayerNorm, one falls steeply, one has a mean far off."""
    from anisoscope.measures import later, stacked, tridiagonal
    from anisoscope.measures.banded import banded
    from anisoscope.measures.chased import chased

    monkeypatch.setattr(later, "CORES", 2)  # with more of them the host would take matrices of this width
    draw = torch.Generator().manual_seed(0)
    rows = [
        cloud(3000, 16) @ torch.randn(16, 300, generator=draw) + torch.randn(3000, 300, generator=draw)
        for _ in range(5)
    ]
    rows[1] = torch.nn.functional.layer_norm(rows[1], (300,))
    rows[2] = rows[2] * torch.logspace(0, -3, 300)
    rows[3] = rows[3] + 50
    rows[4] = rows[4] * torch.nan
    names = ("spectral_ratio", "effective_rank", "isoscore")
    found = stacked.begin([one.cuda() for one in rows], names)()
    assert tridiagonal.fits(torch.zeros(5, 300, 300, dtype=torch.float64, device="cuda")) and found[4] is None
    for mine, one in zip(found[:4], rows[:4], strict=True):
        plain = an.measure(one, names)
        for name in names:
            assert abs(mine[name].value - plain[name].value) <= 1e-6 * plain[name].value, name
            bars = mine[name].stderr, plain[name].stderr
            assert (bars[0] is None) == (bars[1] is None), name
            assert bars[1] is None or abs(bars[0] - bars[1]) <= 1e-3 * bars[1], name
    for many, width in ((4, 700), (30, 1024), (5, 1056), (25, 2048), (4, 4096), (600, 260)):
        wide = torch.randn(many, width, width, generator=draw, dtype=torch.float64).cuda()
        wide = wide @ wide.mT
        assert tridiagonal.fits(wide)
        form = banded(wide)
        found = chased(form.band)
        values = tridiagonal.eigenvalues(*found)
        truth = torch.linalg.eigvalsh(wide[:3])
        assert float(((values[:3] - truth).abs() / truth[:, -1:]).max()) < 1e-14, width
        assert torch.equal(form.band, banded(wide).band), width
        assert all(map(torch.equal, found, chased(form.band))), width


def test_forms_and_leading_vectors_of_band_matrices():
    """Blocks that the last one does not fill, one block alone, rows that do not fill a tile."""
    from band_cases import banded, kept, leading_errors, rational

    from anisoscope.measures.band_forms import forms, leading_vector

    draw = torch.Generator().manual_seed(0)
    for width, n in ((20, 7), (96, 129), (333, 1001)):
        lam = torch.logspace(0, -10, width, dtype=torch.float64)
        full, vectors = banded(lam, 32)
        rows = torch.randn(n, width, generator=draw, dtype=torch.float64) * lam.sqrt()
        rows = (vectors @ rows.T).float()[None]
        shifts, weights, f = rational(lam, 36)
        band, least = kept(full[None], 32), torch.full((1,), 2e-16, dtype=torch.float64)
        found = forms(*(one.cuda() for one in (band, rows, shifts, weights, least))).cpu()
        truth = ((vectors.T @ rows.double()).square() * f[:, None]).sum(dim=1)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=0)
        top = lam[:1]
        lead = leading_vector(band.cuda(), top.cuda()).cpu()
        assert leading_errors(full[None], top, lead)[0] < 1e-14, width


def test_band_matrices_are_chased_to_tridiagonal_form():
    """The same bits however many programs share a matrix; what is not finite stays with its own."""
    from anisoscope.measures.chased import chased

    draw = torch.Generator().manual_seed(0)
    for many, width in ((3, 2), (3, 33), (40, 300), (25, 2048)):
        full = torch.randn(many, width, width, generator=draw, dtype=torch.float64) / 8
        band = torch.zeros(many, width, 64, dtype=torch.float64)
        for i in range(min(33, width)):
            band[:, : width - i, i] = full.diagonal(-i, 1, 2)
        whole = torch.tril(full) - torch.tril(full, -33)
        truth = torch.linalg.eigvalsh((whole + torch.tril(whole, -1).mT)[:2].cuda())
        diagonal, off = found = chased(band.cuda())
        t = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        assert float((torch.linalg.eigvalsh(t[:2]) - truth).abs().max() / truth.abs().max()) < 1e-14, width
        for each in (1, 2, 7):
            assert all(torch.equal(one, two) for one, two in zip(found, chased(band.cuda(), each), strict=True)), each
        band[1, width // 2, 0] = torch.nan
        spoilt = chased(band.cuda())
        assert not torch.isfinite(spoilt[0][1]).all()
        assert all(torch.equal(one[2:], two[2:]) for one, two in zip(found, spoilt, strict=True)), width


def test_products_of_wide_rows_by_cell():
    from anisoscope.stats.gram_matrices import cell_grams, grams, in_parts

    draw = torch.Generator("cuda").manual_seed(0)
    for width in (2048, 2100):
        rows = torch.randn(3, 5000, width, generator=draw, device="cuda") + 0.5
        rows = rows * torch.logspace(-6, 6, width, device="cuda")
        rows[1, 1700] = torch.nan
        ends = [0, 1, 33, 700, 700, 1701, 4095, 5000]
        found = cell_grams(rows, ends)
        assert in_parts(width, rows.device) and torch.equal(found.nan_to_num(), found.mT.nan_to_num())
        right = cell_grams(rows.double(), ends)
        assert torch.equal(found.isnan(), right.isnan()), "one cell of one site"
        size = right.diagonal(dim1=2, dim2=3).sqrt()
        gap = (found - right).abs() / (size[..., None] * size[..., None, :]).clamp_min(1e-300)
        assert float(gap.nan_to_num().max()) < 2e-6, (width, gap.nan_to_num().amax(dim=(0, 2, 3)).tolist())
        out = torch.empty(3, 8, 2, width, width, dtype=torch.float64, device="cuda")
        again = cell_grams(rows, ends, out[:, :, 1])
        assert torch.equal(found.nan_to_num(), again.nan_to_num()), "the same bits"
        assert torch.equal(found[::2, 6], grams(rows[::2, 1701:4095])), "sites and rows of something larger"


def test_exact_products_of_wide_rows_are_those_of_integers(monkeypatch):
    """Against float64: products, eigenvalues over eight decades, and effective ranks, with what a look asks for."""
    from anisoscope.measures import stacked
    from anisoscope.stats import residues
    from anisoscope.stats.gram_matrices import cell_grams, grams

    if not residues.fits(5000, 1024, torch.device("cuda", 0)):
        pytest.skip("products of integers are for compute capability 9.0")
    draw = torch.Generator("cuda").manual_seed(0)
    for width in (1024, 2100):
        rows = torch.randn(3, 5000, width, generator=draw, device="cuda") + 0.5
        rows = rows * torch.logspace(-6, 6, width, device="cuda")
        rows[1, 1700, 5], rows[2, 40, 7], rows[:, 9, 8], rows[..., 11] = torch.nan, torch.inf, 1e30, 0.0
        ends = [0, 1, 33, 700, 700, 1701, 4095, 5000]
        found, right = cell_grams(rows, ends, exact=True), cell_grams(rows.double(), ends)
        assert torch.equal(found.isnan(), ~right.isfinite()), "as float64 would"
        assert torch.equal(found.nan_to_num(), found.mT.nan_to_num())
        size = right.diagonal(dim1=2, dim2=3).sqrt()
        gap = (found - right).abs() / (size[..., None] * size[..., None, :]).clamp_min(1e-300)
        assert float(gap.nan_to_num().max()) < 2e-9, (width, gap.nan_to_num().amax(dim=(0, 2, 3)).tolist())
        out = torch.empty(3, 8, 2, width, width, dtype=torch.float64, device="cuda")
        again = cell_grams(rows, ends, out[:, :, 1], exact=True)
        assert torch.equal(found.nan_to_num(), again.nan_to_num()), "the same bits"
        large = rows.repeat(1, 2, 1)[::2, 4095:9095]
        assert torch.equal(
            grams(large, exact=True).nan_to_num(), cell_grams(large, [5000], exact=True)[:, 0].nan_to_num()
        )
    turned = torch.linalg.qr(torch.randn(1024, 1024, generator=draw, device="cuda").double()).Q
    rows = torch.randn(2, 8192, 1024, generator=draw, device="cuda").double() * torch.logspace(0, -4, 1024).cuda()
    rows = (rows @ turned).float()
    mine, right = (torch.linalg.eigvalsh(x) for x in (grams(rows, exact=True), grams(rows.double(), exact=True)))
    assert float(((mine - right) / right).abs().max()) < 1e-5
    names = ("spectral_ratio", "isoscore", "effective_rank")
    found = stacked.begin(rows + 3, names)()
    monkeypatch.setattr(residues, "fits", lambda n, width, device: False)
    for mine, one in zip(found, stacked.begin(rows + 3, names)(), strict=True):
        for name in names:
            assert abs(mine[name].value - one[name].value) < 1e-7 * one[name].value, name
            bars = mine[name].stderr, one[name].stderr
            assert (bars[0] is None) == (bars[1] is None), name
            assert bars[1] is None or abs(bars[0] - bars[1]) < 1e-4 * bars[1], name


def test_controls_and_forms_of_wide_rows_in_half_precision():
    """Against float64. In the second site nearly all lies inside a basis, and normal controls hold little of it."""
    from anisoscope.measures.row_kernels import forms_in_half, taken_and_measured
    from anisoscope.stats.gram_matrices import cell_grams
    from anisoscope.tangent.drawn import held_gaussians
    from anisoscope.tangent.stacked_controls import Moments, of_controls

    draw, rank = torch.Generator("cuda").manual_seed(0), 5
    for width in (2048, 2100):
        rows = torch.randn(2, 3000, width, generator=draw, device="cuda")
        rows = rows * torch.logspace(0, -1.5, width, device="cuda") + 0.05
        bases = torch.linalg.qr(torch.randn(2, 2, width, rank, generator=draw, device="cuda")).Q
        rows[1] = 0.5 * rows[1] + torch.randn(3000, rank, generator=draw, device="cuda") * 30 @ bases[1, 0].T
        groups = cell_grams(rows, [700, 700, 3000])
        count = torch.full((2,), 3000.0, dtype=torch.float64, device="cuda")
        moments = Moments(groups, groups.sum(dim=1), rows.mean(dim=1, dtype=torch.float64), count)
        drawn = held_gaussians(width, rank, 20, seed=0, device=rows.device, dtype=torch.float64)
        found, right = (of_controls(moments, bases, drawn, dtype) for dtype in (torch.float32, torch.float64))
        for name, one in vars(right).items():
            gap = (getattr(found, name) - one).abs() / torch.where(one == 0, 1.0, one.abs())
            small = name == "normal"
            assert float(gap[0].max()) < 5e-6 and float(gap[1].max()) < (2e-3 if small else 5e-6), (width, name, gap)
        second = groups[:, 2] / 3000
        level = second.square().sum(dim=(1, 2)) / second.diagonal(dim1=1, dim2=2).sum(dim=1)
        form = forms_in_half(rows, second, level, rows.abs().amax(dim=(1, 2)))
        right = ((rows.double() @ second) * rows).sum(dim=2) - level[:, None] * rows.double().square().sum(dim=2)
        gap = (form - right) / right.square().mean(dim=1, keepdim=True).sqrt()
        assert float(gap.abs().max()) < 5e-3 and float(gap.square().mean().sqrt()) < 5e-4, (width, gap.abs().max())
        order = torch.randperm(3000, generator=draw, device="cuda")[:1111]
        some, squares = taken_and_measured(rows, order)
        assert torch.equal(some, rows[:, order])
        torch.testing.assert_close(squares, some.double().square().sum(dim=2), rtol=1e-12, atol=0)


def test_distances_by_type_are_those_of_plain_sums():
    """Widths of one warp and of many, one with tiles that end beyond the row; a type with a fifth of all rows."""
    from anisoscope.tangent.stacked_types import Types, fits, plain_sums, sums_by_kernel
    from anisoscope.text.frequency import TokenCounts, frequency_bins

    draw = torch.Generator().manual_seed(0)
    ids = (torch.rand(4000, generator=draw) ** 4 * 2000).long()
    ids[:800] = 7
    counts = TokenCounts.of(ids, 2000)
    types = Types.of(ids, frequency_bins(counts, 4), counts, 19, 0, torch.device("cuda"))
    for sites, width, dtype in (
        (1, 16, torch.float32), (3, 64, torch.float32), (2, 770, torch.float32), (2, 1024, torch.float16),
        (3, 2048, torch.float32), (2, 2048, torch.bfloat16), (2, 4096, torch.float32), (1, 4095, torch.float32),
    ):  # fmt: skip
        x = (torch.randn(sites, 4000, width, generator=draw) + 30).to("cuda", dtype)
        x[0, 100:200] = x[0, 100]
        assert fits(x)
        found, plain = sums_by_kernel(x, types), plain_sums(x, types)
        gap = ((found - plain).abs() / torch.where(plain == 0, 1e-300, plain)).max()
        assert float(gap) < 1e-12, (width, dtype, float(gap))
        assert torch.equal(found, sums_by_kernel(x, types)), "the same bits"
    found = sums_by_kernel(x[:, :, 5:90], types)
    assert torch.allclose(found, plain_sums(x[:, :, 5:90], types), rtol=1e-12, atol=0), "columns of something wider"


def test_a_look_without_room_for_all_sites_takes_them_one_by_one(monkeypatch):
    from anisoscope.monitoring import tangents, tangents_together
    from anisoscope.monitoring.views import SiteView

    def full(*args, **options):
        return torch.empty(1 << 50, device="cuda")

    monkeypatch.setattr(tangents_together, "_begin", full)
    draw = torch.Generator().manual_seed(0)
    x, ids, sequences = cloud(2048, 32), torch.arange(2048) % 50, torch.arange(2048) // 64
    g = torch.randn(2048, 32, generator=draw)
    views = [SiteView(f"resid.{at}", 1, 0, x.cuda(), g.cuda(), ids, ids, sequences, tokens=2048) for at in range(2)]
    found = tangents.TangentAnalysis(rank=4, draws=19, referee="never").together(views)
    assert set(found) == {"resid.0", "resid.1"} and all(isinstance(one, dict) for one in found.values())


def test_steps_without_a_look_never_wait_for_the_device():
    import warnings

    from anisoscope.capture.losses import CausalLoss
    from anisoscope.models.build import ModelSpec, build_model
    from anisoscope.schedule import every
    from anisoscope.text.batches import Batch

    spec = ModelSpec(architecture="gpt2", layers=2, width=64, heads=2, vocab_size=50, context=32, causal=True)
    model = build_model(spec, 0).cuda()
    ids = torch.randint(50, (64, 32), generator=torch.Generator().manual_seed(0))
    flags = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, flags, ~flags, torch.arange(32).expand_as(ids).contiguous())
    monitor = an.Monitor(model, probe=[batch], schedule=every(100), loss=CausalLoss(), sites="resid.*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = ids.cuda()
    monitor.step(100)
    assert monitor.last is not None and not monitor.last.failures
    try:
        for step in range(101, 110):
            model(input_ids=inputs).logits.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that this switch is young
                torch.cuda.set_sync_debug_mode("error")
            monitor.step(step)
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monitor.close()


def test_looks_find_the_same_while_a_backward_pass_goes_on(monkeypatch):
    """In a thread of its own, beside the measures of states, on their streams; and nothing of it stays."""
    import gc

    from anisoscope.capture.losses import CausalLoss
    from anisoscope.models.build import ModelSpec, build_model
    from anisoscope.monitoring import looks
    from anisoscope.monitoring.stacking import States
    from anisoscope.monitoring.tangents import TangentAnalysis
    from anisoscope.schedule import every
    from anisoscope.text.batches import Batch

    spec = ModelSpec(architecture="gpt2", layers=4, width=128, heads=2, vocab_size=500, context=64, causal=True)
    model = build_model(spec, 0).cuda()
    ids = torch.randint(500, (96, 64), generator=torch.Generator().manual_seed(0))
    flags, at = torch.ones_like(ids, dtype=torch.bool), torch.arange(64).expand_as(ids).contiguous()
    probe = [Batch(part, flags[: len(part)], ~flags[: len(part)], at[: len(part)]) for part in ids.split(48)]
    began, begin = [], States.begin.__func__
    monkeypatch.setattr(States, "begin", classmethod(lambda cls, *of: began.append(1) or begin(cls, *of)))
    found, held = [], []
    allowed = looks.can_go_beside
    for beside in (False, True, True):
        monkeypatch.setattr(looks, "can_go_beside", allowed if beside else lambda device: False)
        monitor = an.Monitor(
            model, probe=probe, schedule=every(1), loss=CausalLoss(), sites="resid.*", vectors=6144, strict=True,
            analyses={"tangent": TangentAnalysis(rank=8, draws=19, referee="never")}, autocast=torch.bfloat16,
        )  # fmt: skip
        for step in range(3):
            monitor.step(step)
        found.append({(r.site, r.measure, r.slice): r.estimate for r in monitor.last.records})
        monitor.close()
        del monitor
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(began) == 6, "three looks of two monitors"
    assert held[2] <= held[1] + (1 << 20)
    for together in found[1:]:
        assert together.keys() == found[0].keys() and len(together) > 100
        for key, one in found[0].items():
            loose = "seminmf" in key[1] or "angle" in key[1] or "drift" in key[1]
            near = pytest.approx(one.value, rel=2e-2 if loose else 2e-3, abs=2e-3)
            assert together[key].value == near, key


if __name__ == "__main__":
    for name, function in list(globals().items()):
        if name.startswith("test_"):
            try:
                function()
                print("passed", name, flush=True)
            except Exception as error:
                print("FAILED", name, type(error).__name__, str(error)[:400], flush=True)
