"""Semi-NMF: against the slow published updates and row-wise NNLS, planted concepts, the trap of a shifted PCA."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from anisoscope.errors import (
    DegenerateError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TooFewRowsError,
)
from anisoscope.tangent import descending, descent, kmeans, seminmf, stacked_fits, visits
from anisoscope.tangent.descent import swept
from anisoscope.tangent.kmeans import k_means
from anisoscope.tangent.seminmf import fit_seminmf
from anisoscope.tangent.stability import match_cosine, seminmf_report


def planted(seed, n=600, d=24, k=5, noise=0.05, dtype=torch.float64, share=0.4):
    """Rows made of few concepts each, with the codes and concepts that made them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(n, k, generator=generator, dtype=torch.float64)
    codes = codes * (torch.rand(n, k, generator=generator) < share)
    codes[:k] = torch.eye(k)  # a pure row of each concept, so that only these concepts explain the rows
    concepts = torch.randn(k, d, generator=generator, dtype=torch.float64)
    rows = codes @ concepts + noise * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return rows.to(dtype), codes, concepts


def published(rows, codes, iterations):
    """Ding, Li and Jordan's multiplicative updates, as published. Returns the error after the last least squares."""
    A, Z = rows.double().numpy(), codes.double().numpy().copy()
    for _ in range(iterations):
        C = np.linalg.pinv(Z) @ A
        P, G = A @ C.T, C @ C.T
        top = np.maximum(P, 0) + Z @ np.maximum(-G, 0)
        bottom = np.maximum(-P, 0) + Z @ np.maximum(G, 0)
        Z *= np.sqrt(top / np.maximum(bottom, 1e-300))
    C = np.linalg.pinv(Z) @ A
    return float(((A - Z @ C) ** 2).sum() / (A**2).sum())


def slow_error(rows, fit):
    A = rows.double().numpy() - fit.mean.numpy()
    return float(((A - fit.codes.double().numpy() @ fit.concepts.double().numpy()) ** 2).sum() / (A**2).sum())


def shifted_pca(rows, rank):
    """The trap: PCA of one rank less, its scores shifted until all are positive, the shift in a concept of its own."""
    A = (rows - rows.mean(dim=0)).double()
    _, _, right = torch.linalg.svd(A, full_matrices=False)
    scores = A @ right[: rank - 1].T
    shift = -scores.min() + 0.1 * scores.std()
    codes = torch.cat([scores + shift, torch.ones(len(A), 1, dtype=A.dtype)], dim=1)
    concepts = torch.cat([right[: rank - 1], -shift * right[: rank - 1].sum(dim=0, keepdim=True)])
    return codes, concepts


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("start", ["kmeans", "random"])
@pytest.mark.parametrize("centre", [True, False])
def test_no_half_step_raises_the_error(seed, start, centre, momentum):
    rows, _, _ = planted(seed)
    options = {"start": start, "centre": centre, "tolerance": 0, "max_iter": 60, "seed": seed, "momentum": momentum}
    fit = fit_seminmf(rows, 5, **options)
    history = np.array(fit.history)
    assert len(history) == 2 * fit.iterations >= 4
    assert (np.diff(history) <= 64 * np.finfo(float).eps).all()
    single = fit_seminmf(rows.float(), 5, **options)
    # In float32 a sum of n d products, each rounded on its own, over the size of all of them.
    # With momentum concepts come to cancel each other sooner, and what is left is rounded at their size.
    assert (np.diff(single.history) <= (32 if momentum else 4) * np.finfo(np.float32).eps).all()


def test_reported_error_is_that_of_the_factors(seed):
    rows, _, _ = planted(seed)
    for centre in (True, False):
        fit = fit_seminmf(rows + 3, 4, centre=centre, max_iter=7, tolerance=0)
        assert fit.error == pytest.approx(slow_error(rows + 3, fit), rel=1e-10)
        assert fit.history[-1] == pytest.approx(fit.error, rel=1e-8)
        assert bool((fit.codes >= 0).all())
        assert fit.sparsity == float((fit.codes == 0).double().mean())
        assert torch.allclose(fit.concepts.norm(dim=1), torch.ones(4, dtype=torch.float64))
        assert bool((fit.mean == 0).all()) is not centre
        assert fit.centred is centre


@pytest.mark.parametrize("centre", [True, False])
def test_no_worse_than_the_published_updates_from_the_same_codes(seed, centre):
    rows, _, _ = planted(seed, n=300)
    data = rows - rows.mean(dim=0) if centre else rows
    labels = k_means(data, 5, seed=seed).labels
    codes = torch.nn.functional.one_hot(labels, 5).double() + 0.2
    bar = published(data, codes, 500)
    fit = fit_seminmf(data, 5, centre=False, codes=codes, tolerance=1e-6, max_iter=300)
    assert fit.error <= bar * (1 + 1e-3)
    quick = fit_seminmf(data, 5, centre=False, codes=codes, tolerance=1e-6, max_iter=300, momentum=True)
    assert quick.error <= bar * (1 + 1e-3)
    plain = fit_seminmf(rows, 5, centre=centre, seed=seed, tolerance=1e-6, max_iter=300)
    assert plain.error <= bar * 1.1  # another start, another basin


def test_momentum_needs_fewer_iterations_for_the_same_error(seed):
    """Where nothing is planted and a descent is long: noise. Factors are as exact as without it."""
    rows = torch.randn(800, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain = fit_seminmf(rows, 8, tolerance=0, max_iter=120, seed=seed)
    quick = fit_seminmf(rows, 8, tolerance=0, max_iter=120, seed=seed, momentum=True)
    needed = next(at // 2 + 1 for at, error in enumerate(quick.history) if error <= plain.error)
    assert needed <= 80
    assert quick.error == pytest.approx(slow_error(rows, quick), rel=1e-10)
    assert quick.history[-1] == pytest.approx(quick.error, rel=1e-8) and bool((quick.codes >= 0).all())


def many_rows(seed, k=6, n=9000):
    """Enough rows for a descent on few of them, of which each has few concepts."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.rand(n, k, generator=draw) * (torch.rand(n, k, generator=draw) < 0.3)
    concepts = torch.randn(k, 30, generator=draw)
    return codes @ concepts + 0.1 * torch.randn(n, 30, generator=draw), concepts


def test_a_coarse_descent_comes_first_and_loses_nothing(seed):
    """On an eighth of the rows: then few iterations are left on all of them, planted concepts come back as well."""
    rows, concepts = many_rows(seed)
    plain = fit_seminmf(rows, 6, seed=seed, centre=False, coarse=False)
    fit = fit_seminmf(rows, 6, seed=seed, centre=False)
    assert len(fit.history) == 2 * fit.iterations
    assert fit.history[1] < plain.history[1], "concepts are near already"
    assert fit.iterations < plain.iterations
    assert (np.diff(fit.history) <= 4 * np.finfo(np.float32).eps).all()
    assert fit.error <= plain.error * 1.01
    assert match_cosine(fit.concepts, concepts.double()) > match_cosine(plain.concepts, concepts.double()) - 0.03
    assert fit.error == pytest.approx(slow_error(rows, fit), rel=1e-5)
    again = fit_seminmf(rows, 6, seed=seed, centre=False)
    assert torch.equal(fit.concepts, again.concepts) and torch.equal(fit.codes, again.codes)
    from_codes = fit_seminmf(rows, 6, codes=plain.codes, centre=False, seed=seed)
    assert from_codes.error <= plain.error * 1.01


def test_where_no_coarse_descent_comes_first(monkeypatch):
    """Few rows, an earlier fit, a sample of rows without any length; and never more of it than was asked for."""
    called, most = [], []
    real = descending.descend

    def watched(rows, concepts, codes, size, limits, **rest):
        called.append(len(rows))
        most.append(limits.max_iter)
        return real(rows, concepts, codes, size, limits, **rest)

    monkeypatch.setattr(descending, "descend", watched)  # the coarse one alone: the other is bound in ``seminmf``
    rows, _ = many_rows(0)
    fit = fit_seminmf(rows, 6, max_iter=2)
    assert called == [2048] and most == [16]
    fit_seminmf(rows, 6, concepts=fit.concepts, max_iter=1)
    fit_seminmf(rows, 6, coarse=False, max_iter=1)
    fit_seminmf(rows[:8191], 6, max_iter=1)
    lonely = torch.zeros(9000, 30)
    lonely[-4:] = rows[:4]
    seeds = [seed for seed in range(20) if not (drawn_rows(seed) >= 8996).any()]
    fit_seminmf(lonely, 3, centre=False, max_iter=3, seed=seeds[0])
    assert called == [2048]


def drawn_rows(seed):
    return torch.randperm(9000, generator=torch.Generator().manual_seed(seed))[:2048]


def test_momentum_that_overshoots_is_taken_back(seed, monkeypatch):
    """A pace that always goes much too far: every such step is refused, and the descent is the plain one."""
    rows, codes, _ = planted(seed)
    monkeypatch.setattr(descending._Pace, "told", lambda self, helped: refused.append(not helped) or self)
    monkeypatch.setattr(descending._Pace, "begun", lambda momentum: descending._Pace(1e6 * momentum, 1e6))
    refused = []
    options = {"codes": codes + 0.2, "tolerance": 0, "max_iter": 12}
    wild, plain = (fit_seminmf(rows, 5, momentum=momentum, **options) for momentum in (True, False))
    assert refused == [True] * 11
    assert np.allclose(wild.history, plain.history, rtol=1e-12) and torch.allclose(wild.codes, plain.codes)


def on_cores(each, act):
    """What ``act`` gives with each number of torch's threads, which it must leave as it found it."""
    before, found = torch.get_num_threads(), []
    try:
        for cores in each:
            torch.set_num_threads(cores)
            found.append(act())
            assert torch.get_num_threads() == cores, "as it was"
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("momentum", [False, True])
def test_the_number_of_cores_changes_rounding_alone(momentum):
    """What comes before and after the descent takes all cores and rounds as their library does; on some processors that
    is another float32 rounding of the first concepts with two threads than with one."""
    draw = torch.Generator().manual_seed(0)
    rows, codes = torch.randn(9000, 80, generator=draw), torch.rand(9000, 64, generator=draw)
    options = {"codes": codes, "tolerance": 0, "max_iter": 4, "momentum": momentum, "centre": False}
    first, *others = on_cores((1, 2, 5), lambda: fit_seminmf(rows, 64, **options))
    for other in others:
        assert np.allclose(first.history, other.history, rtol=1e-5)
        assert torch.allclose(first.codes, other.codes, atol=1e-3 * float(other.codes.max()))


@pytest.mark.parametrize(("n", "rank"), [(700, 16), (1060, 16), (1060, 24), (9000, 64)])
def test_a_descent_gives_the_same_bits_on_any_number_of_cores(n, rank, seed):
    """Rows of one part, hardly more than one, and several, which one core takes in turn and two side by side: what is
    dealt out is rounded by one core each."""
    draw = torch.Generator().manual_seed(seed)
    rows, concepts = torch.randn(n, 128, generator=draw), torch.randn(rank, 128, generator=draw, dtype=torch.float64)
    codes, size = torch.rand(rank, n, generator=draw), float(rows.double().square().sum())
    limits = descending.Limits(max_iter=5, tolerance=0, sweeps=3)
    first, *others = on_cores((1, 2, 5), lambda: descending.descend(rows, concepts, codes, size, limits, momentum=0.5))
    for other in others:
        assert first.history == other.history
        assert torch.equal(first.codes, other.codes)
        assert torch.equal(first.concepts, other.concepts)


@pytest.mark.parametrize("rank", [8, 20])
def test_rows_hardly_beyond_one_part_are_one_with_it(monkeypatch, rank, seed):
    """Against the same descent with a part of their own for them."""
    draw = torch.Generator().manual_seed(seed)
    rows, concepts = torch.randn(1060, 40, generator=draw), torch.randn(rank, 40, generator=draw, dtype=torch.float64)
    codes, size = torch.rand(rank, 1060, generator=draw), float(rows.double().square().sum())
    limits = descending.Limits(max_iter=6, tolerance=0, sweeps=3)
    joined = descending.descend(rows, concepts, codes, size, limits, momentum=0.5)
    assert descent.part_rows(1060, rank, rows.device) == 1060 and descent.part_rows(1153, rank, rows.device) == 1024
    monkeypatch.setattr(descent, "nearly_one", lambda n, step: n <= step)
    apart = descending.descend(rows, concepts, codes, size, limits, momentum=0.5)
    assert np.allclose(joined.history, apart.history, rtol=1e-6)
    assert torch.allclose(joined.codes, apart.codes, atol=1e-4 * float(apart.codes.max()))


def test_threads_keep_nothing_for_gradients_where_the_caller_does_not(seed):
    rows, cores = torch.randn(2500, 20, generator=torch.Generator().manual_seed(seed)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = fit_seminmf(rows, 20, seed=seed, max_iter=3, momentum=0.5)
        plain = fit_seminmf(rows, 20, seed=seed, max_iter=3, momentum=0.5)
    finally:
        torch.set_num_threads(cores)
    assert found.concepts.is_inference() and not plain.concepts.is_inference()
    assert torch.equal(found.concepts, plain.concepts) and torch.equal(found.codes, plain.codes)


@pytest.mark.parametrize("rank", [5, 37])
def test_what_was_swept_before_in_the_same_memory_leaves_no_trace(rank, seed):
    draw = torch.Generator().manual_seed(seed)
    scratch, kept = descent.Scratch(), []
    for n in (50, 30, 50, 50):
        codes, cross = torch.rand(rank, n, generator=draw), torch.randn(rank, n, generator=draw)
        concepts = torch.randn(rank, 60, generator=draw, dtype=torch.float64)
        concepts[n % rank] = 0
        found = swept(codes, cross, concepts @ concepts.T, 3, scratch)
        kept.append((found, swept(codes, cross, concepts @ concepts.T, 3)))
    for shared, fresh in kept:  # at the end: later sweeps do not write into codes that were handed out
        assert torch.equal(shared, fresh)


def test_blocks_of_concepts_and_parts_of_rows_are_one_sweep_after_another(seed):
    """Against the plain loop over concepts: more concepts than a block holds, one of them of length zero."""
    draw = torch.Generator().manual_seed(seed)
    concepts = torch.randn(37, 50, generator=draw, dtype=torch.float64)
    concepts[20] = 0
    rows = torch.randn(9001, 50, generator=draw, dtype=torch.float64)
    codes = torch.rand(37, 9001, generator=draw, dtype=torch.float64)
    gram, cross = concepts @ concepts.T, concepts @ rows.T
    slow = codes.clone()
    slow[20] = 0
    for _ in range(3):
        for k in range(37):
            if k != 20:
                pull = cross[k] - gram[k] @ slow + gram[k, k] * slow[k]
                slow[k] = (pull / gram[k, k]).clamp_min(0)
    assert torch.allclose(swept(codes, cross, gram, 3), slow, atol=1e-12)


def test_encode_is_non_negative_least_squares(seed):
    rows, _, concepts = planted(seed, n=60, noise=0.5)
    unit = torch.nn.functional.normalize(concepts, dim=1)
    fit = replace(fit_seminmf(rows, 5, seed=seed, max_iter=1), concepts=unit)  # concepts that lie well apart
    codes = fit.encode(rows[:20], sweeps=2000)
    for row, code in zip((rows[:20] - fit.mean).numpy(), codes.numpy(), strict=True):
        truth, distance = nnls(unit.numpy().T, row)
        assert np.linalg.norm(row - code @ unit.numpy()) <= distance * (1 + 1e-9)
        assert np.allclose(code, truth, atol=1e-6)


def test_concepts_solve_the_normal_equations(seed):
    rows, _, _ = planted(seed)
    fit = fit_seminmf(rows, 5, centre=False, max_iter=3, tolerance=0)
    best = np.linalg.lstsq(fit.codes.numpy(), rows.numpy(), rcond=None)[0]
    assert np.allclose(fit.concepts.numpy(), best, atol=1e-9)


def test_planted_concepts_come_back(seed):
    rows, _, concepts = planted(seed, n=1000, noise=0.01, share=0.25)
    fit = fit_seminmf(rows, 5, centre=False, tolerance=1e-5, max_iter=400, seed=seed)
    noise = 0.01**2 * rows.numel() / float(rows.square().sum())
    assert fit.error < 2 * noise
    assert match_cosine(fit.concepts, concepts) > 0.8  # chance is about 0.2


def test_a_shifted_pca_has_the_error_and_none_of_the_sparsity(seed):
    rows, _, _ = planted(seed, n=800, k=6, noise=0.3)
    codes, concepts = shifted_pca(rows, 6)
    A = (rows - rows.mean(dim=0)).double()
    sigma2 = torch.linalg.svdvals(A).square()
    trap = float((A - codes @ concepts).square().sum() / A.square().sum())
    least, one_less = (float(1 - sigma2[:r].sum() / sigma2.sum()) for r in (6, 5))
    assert bool((codes > 0).all())
    assert trap == pytest.approx(one_less, rel=1e-9)  # as good as an SVD of one rank less
    fit = fit_seminmf(rows, 6, seed=seed)
    assert least <= fit.error
    assert fit.error < trap * 1.25  # the error does not tell them apart
    assert float((codes == 0).double().mean()) == 0
    assert fit.sparsity > 0.05  # sparsity does


def test_stays_in_the_trap_if_started_there():
    """Why no fit may start there: it is a resting point, of no sparsity, that the tolerance takes for the end."""
    rows, _, _ = planted(0, n=800, k=6, noise=0.3)
    codes, concepts = shifted_pca(rows, 6)
    A = rows - rows.mean(dim=0)
    fit = fit_seminmf(A, 6, centre=False, codes=codes, concepts=concepts)
    assert fit.sparsity < 0.01
    assert fit.iterations <= 3


def test_rotation_translation_permutation_scale(seed):
    rows, _, _ = planted(seed)
    start = torch.rand(len(rows), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    options = {"max_iter": 15, "tolerance": 0.0}
    plain = fit_seminmf(rows, 5, codes=start, **options)
    turned = fit_seminmf(rows @ turn, 5, codes=start, **options)
    moved = fit_seminmf(rows + 100 * turn[0], 5, codes=start, **options)
    mixed = fit_seminmf(rows[order], 5, codes=start[order], **options)
    large = fit_seminmf(rows * 2.0**700, 5, codes=start, **options)
    for other in (turned, moved, mixed, large):
        assert other.error == pytest.approx(plain.error, rel=1e-8)
        assert other.sparsity == pytest.approx(plain.sparsity, abs=2e-3)
    assert torch.allclose(turned.concepts, plain.concepts @ turn, atol=1e-6)
    assert torch.allclose(moved.concepts, plain.concepts, atol=1e-6)
    assert torch.allclose(mixed.codes, plain.codes[order], atol=1e-6)
    assert torch.allclose(large.codes / 2.0**700, plain.codes, atol=1e-6)


def test_uncentred_gives_a_concept_to_the_mean():
    """What must not be invariant: uncentred concepts see a constant added to all rows."""
    rows, _, _ = planted(3)
    mean = torch.full((24,), 20.0, dtype=torch.float64)
    for centre, high in ((True, False), (False, True)):
        fit = fit_seminmf(rows + mean, 5, centre=centre)
        span = torch.linalg.qr(fit.concepts.T).Q
        assert (float((span.T @ mean).square().sum() / (mean @ mean)) > 0.99) is high


def test_same_seed_same_bits_and_other_seed_other_start():
    rows, _, _ = planted(0, dtype=torch.float32)
    a, b, c = (fit_seminmf(rows, 4, seed=s, start="random", max_iter=3) for s in (5, 5, 6))
    assert torch.equal(a.concepts, b.concepts)
    assert torch.equal(a.codes, b.codes)
    assert not torch.equal(a.concepts, c.concepts)


def test_warm_start_is_faster_and_no_worse(seed):
    rows, _, _ = planted(seed, n=1200)
    before = fit_seminmf(rows, 5, seed=seed, tolerance=1e-3)
    nearby = rows + 0.01 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(9), dtype=rows.dtype)
    cold = fit_seminmf(nearby, 5, seed=seed, tolerance=1e-3)
    warm = fit_seminmf(nearby, 5, concepts=before.concepts, max_iter=8)
    assert cold.iterations > 8
    assert warm.error <= cold.error * 1.05
    both = fit_seminmf(rows, 5, concepts=before.concepts, codes=before.codes)
    assert both.history[0] <= before.error * (1 + 1e-9)


@pytest.mark.parametrize("centre", [True, False])
def test_a_stream_comes_close_to_rows_held(seed, centre):
    rows, _, _ = planted(seed, n=3000)
    held = fit_seminmf(rows, 5, centre=centre, seed=seed, max_iter=30)
    fit = fit_seminmf(list(rows.split(450)), 5, centre=centre, seed=seed, passes=10)
    assert fit.codes is None
    assert fit.n == 3000
    assert fit.error <= held.error * 1.25
    # After the first pass, in which concepts move under the rows, passes go down to the tolerance of the codes.
    assert (np.diff(fit.history[1:]) <= 1e-3 * np.array(fit.history[1:-1])).all()
    codes = fit.encode(rows, sweeps=100)
    A = rows - fit.mean
    truth = float((A - codes @ fit.concepts).square().sum() / A.square().sum())
    assert truth == pytest.approx(fit.error, rel=0.05)
    assert fit.sparsity == pytest.approx(float((codes == 0).double().mean()), abs=0.1)


def test_a_stream_holds_one_batch_of_codes(monkeypatch):
    rows, _, _ = planted(0, n=4000)
    seen = []
    real = seminmf.solved

    def watched(a_ND, *rest):
        seen.append(len(a_ND))
        return real(a_ND, *rest)

    monkeypatch.setattr(seminmf, "solved", watched)
    monkeypatch.setattr(seminmf, "STREAM_ROWS", 500)
    fit = fit_seminmf(rows, 5, batch_rows=1000, passes=3)
    assert fit.codes is None
    assert max(seen) == 500
    assert sum(seen) == 4000 * fit.iterations


def test_a_stream_that_can_be_read_once():
    rows, _, _ = planted(1, n=3000)
    held = fit_seminmf(rows, 5)
    fit = fit_seminmf((part for part in rows.split(300)), 5)
    assert fit.iterations == 1
    assert fit.n == 3000
    assert "one pass" in fit.notes[0]
    assert fit.error < held.error * 1.5
    with pytest.raises(EmptyInputError):
        fit_seminmf(iter(()), 5)


def test_masked_rows_do_not_count():
    rows, _, _ = planted(2)
    keep = torch.arange(len(rows)) % 3 != 0
    spoiled = torch.where(keep[:, None], rows, torch.full_like(rows, float("nan")))
    fit = fit_seminmf(spoiled, 4, mask=keep)
    assert fit.n == int(keep.sum())
    assert torch.equal(fit.concepts, fit_seminmf(rows[keep], 4).concepts)


def test_concepts_without_rows_get_new_directions():
    """A start with a concept that points away from all rows: its codes are zero at once."""
    rows, _, _ = planted(0)
    rows = rows.abs()
    start = rows[:4].clone()
    start[2] = -1.0
    fit = fit_seminmf(rows, 4, centre=False, concepts=start)
    assert fit.unused == 0
    assert (np.diff(fit.history) <= 64 * np.finfo(float).eps).all()
    assert fit.error < fit_seminmf(rows, 3, centre=False).error


def test_rows_of_lower_rank_leave_concepts_unused_and_say_so():
    row = torch.linspace(1, 2, 8, dtype=torch.float64)
    fit = fit_seminmf(row.repeat(20, 1), 4, centre=False)
    assert fit.error < 1e-20
    assert bool(torch.isfinite(fit.concepts).all())
    with pytest.raises(DegenerateError, match="less their mean nothing is left"):
        fit_seminmf(row.repeat(20, 1), 4)
    with pytest.raises(DegenerateError, match="zero"):
        fit_seminmf(torch.zeros(20, 8), 2, centre=False)


def test_more_concepts_than_columns_is_allowed():
    rows, _, _ = planted(0, n=200, d=3, k=3)
    fit = fit_seminmf(rows, 8, centre=False, max_iter=400)
    assert fit.error < 1e-3
    assert bool(torch.isfinite(fit.codes).all())


def test_zero_rows_have_zero_codes():
    rows, _, _ = planted(0)
    rows[10:20] = 0
    fit = fit_seminmf(rows, 5, centre=False)
    assert bool((fit.codes[10:20] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(dtype):
    rows, _, _ = planted(4, noise=0.2)
    truth = fit_seminmf(rows.to(dtype).double(), 5, max_iter=30, tolerance=0).error
    assert fit_seminmf(rows.to(dtype), 5, max_iter=30, tolerance=0).error == pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("size", [1e-35, 1e30])
def test_sizes_out_of_range_of_squares(size):
    rows, _, _ = planted(4, dtype=torch.float32)
    fit = fit_seminmf(rows * size, 5, max_iter=20)
    assert fit.error == pytest.approx(fit_seminmf(rows, 5, max_iter=20).error, rel=0.02)


def test_bad_input_is_named():
    rows, _, _ = planted(0, n=50)
    with pytest.raises(TooFewRowsError, match="rank 60 needs at least 60 rows, got 50"):
        fit_seminmf(rows, 60)
    with pytest.raises(OptionError, match="rank"):
        fit_seminmf(rows, 0)
    with pytest.raises(OptionError, match="not negative"):
        fit_seminmf(rows, 2, codes=-torch.ones(50, 2))
    with pytest.raises(ShapeError, match="codes to start from"):
        fit_seminmf(rows, 2, codes=torch.ones(50, 3))
    with pytest.raises(ShapeError, match="concepts to start from"):
        fit_seminmf(rows, 2, concepts=torch.ones(2, 3))
    with pytest.raises(OptionError, match="momentum is a share"):
        fit_seminmf(rows, 2, momentum=1.5)
    with pytest.raises(OptionError, match="tolerance"):
        fit_seminmf(rows, 2, tolerance=1.5)
    with pytest.raises(OptionError, match="give concepts alone"):
        fit_seminmf(rows, 2, codes=torch.ones(50, 2), batch_rows=10)
    rows[7, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="row 7"):
        fit_seminmf(rows, 2)


def test_report_over_seeds():
    rows, _, _ = planted(0, n=800, noise=0.02, share=0.25)
    found = seminmf_report(rows, 5, centre=False, seeds=(0, 1, 2), tolerance=1e-5, max_iter=300)
    assert found["error"].value >= found["pca_error"].value * (1 - 1e-6)
    assert found["error"].stderr is not None
    assert found["match_cosine"].value > 0.9
    assert found["span_angle"].value < 5
    assert found["pca_overlap"].value > 0.98  # five concepts of nearly exact rank five: the same span
    assert 0 < found["sparsity"].value < 1
    noise = torch.randn(400, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loose = seminmf_report(noise, 5, seeds=(0, 1, 2))
    assert loose["match_cosine"].value < found["match_cosine"].value
    assert loose["span_angle"].value > 45
    alone = seminmf_report(noise, 5, seeds=(0,))
    assert "match_cosine" not in alone
    assert alone["error"].stderr is None
    with pytest.raises(OptionError, match="seeds"):
        seminmf_report(noise, 5, seeds=(1, 1))


def test_match_cosine_pairs_at_best():
    a = torch.eye(4, 6, dtype=torch.float64)
    assert match_cosine(a, a[[2, 0, 3, 1]]) == pytest.approx(1)
    assert match_cosine(a, -a) == pytest.approx(0)


def test_k_means_finds_far_cells_and_its_error_is_the_share_inside(seed):
    generator = torch.Generator().manual_seed(seed)
    middles = 20 * torch.eye(4, 10, dtype=torch.float64)
    labels = torch.arange(400) % 4
    rows = middles[labels] + torch.randn(400, 10, generator=generator, dtype=torch.float64)
    found = k_means(rows, 4, seed=seed)
    for cell in range(4):
        assert len(set(found.labels[labels == cell].tolist())) == 1
    inside = sum(float((rows[found.labels == c] - rows[found.labels == c].mean(0)).square().sum()) for c in range(4))
    assert found.error == pytest.approx(inside / float(rows.square().sum()), rel=1e-9)
    few = k_means(torch.ones(10, 3), 4)
    assert bool(torch.isfinite(few.centres).all())
    assert few.error == 0


def test_distances_of_all_pairs_are_those_from_one_row():
    """On a GPU seeds are drawn from a table of them; copies are at no distance in either."""
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 3
    rows[30:] = rows[:10]
    size = rows.square().sum(dim=1)
    table = kmeans._gaps(rows, size)
    for at in range(40):
        one = kmeans._gap(rows, size, torch.tensor([at]))
        assert torch.allclose(table[at], one, atol=1e-4) and torch.equal(table[at] == 0, one == 0)


def test_a_cell_that_loses_its_rows_moves_to_the_farthest_row():
    rows = torch.cat([torch.zeros(20, 2), torch.tensor([[10.0, 0.0]])]) + 1e-3 * torch.arange(21)[:, None]
    found = k_means(rows, 2, centres=torch.tensor([[0.0, 0.0], [500.0, 0.0]]))
    assert found.labels.tolist() == [0] * 20 + [1] and found.error < 1e-3


WILD = 4.0  # of momentum: much too far


def many_fits(n=600, width=24, rank=5):
    """Four fits, whose rows are mixtures of more concepts than are fitted, and where they start from."""
    draw = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, n, 16, generator=draw).relu() @ torch.randn(2, 16, width, generator=draw)
    rows = (mixed + torch.randn(2, n, width, generator=draw)).double()
    centred = stacked_fits.Centred.of(rows, (torch.arange(n // 2 - 9), torch.arange(n // 2 - 9, n)))
    return centred, stacked_fits.kmeans_starts(centred, rank, 0)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 1.0, WILD])
def test_fits_together_are_those_alone_whatever_their_momentum(momentum, monkeypatch):
    """Rounds that are taken back count once, as they do alone, where they are mended on the spot."""
    if momentum == WILD:
        monkeypatch.setattr(visits, "BEGIN", WILD)
        monkeypatch.setattr(descending._Pace, "begun", lambda momentum: descending._Pace(WILD, WILD))
    centred, start = many_fits()
    found = stacked_fits.seminmf_fits(centred, start, momentum)
    parts = zip(centred.rows, centred.counts.tolist(), start, strict=True)
    for at, (rows, n, concepts) in enumerate(parts):
        alone = fit_seminmf(rows[:n], 5, centre=False, concepts=concepts, momentum=min(momentum, 1.0))
        assert found.facts["iterations"][at] == alone.iterations and bool(found.settled[at]) == alone.converged
        assert float(found.facts["error"][at]) == pytest.approx(alone.error, rel=1e-9)
        assert torch.allclose(found.state[at], alone.concepts, atol=1e-7)


def rounds_of(monkeypatch, centred, start, momentum, most=200):
    """Rounds of each fit until it has settled, those that are taken back among them; its concepts, and its books."""
    going, real = [], stacked_fits.account_plainly

    def counted(*given):
        going.append(given[3].active.clone())
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stacked_fits, "account_plainly", counted)
        patch.setattr(stacked_fits, "MAX_ITER", most)
        concepts, _, books = stacked_fits._descend(centred.rows, start, centred.total, momentum)
    return torch.stack(going).sum(dim=0), concepts, books


def test_momentum_halves_the_rounds_and_ends_no_higher(monkeypatch):
    monkeypatch.setattr(stacked_fits, "TOLERANCE", 3e-4)
    centred, start = many_fits(1200, 48, 8)
    plain, _, plain_books = rounds_of(monkeypatch, centred, start, 0.0)
    found, _, books = rounds_of(monkeypatch, centred, start, seminmf.MOMENTUM)
    assert not bool((plain_books.active | books.active).any()), "all have settled"
    assert int(found.sum()) < 0.6 * int(plain.sum()) and int(found.max()) < 0.6 * int(plain.max()), (found, plain)
    assert bool((books.error < plain_books.error * (1 + stacked_fits.TOLERANCE)).all())


def test_momentum_settles_on_a_plateau_where_the_plain_descent_does(monkeypatch):
    """The error falls by a little less than the tolerance in each plain round, and would for a long time."""
    centred, start = many_fits(1200, 48, 8)
    _, concepts, _ = rounds_of(monkeypatch, centred, start, 0.0, 60)
    errors = [rounds_of(monkeypatch, centred, concepts, 0.0, most)[2].error for most in (3, 4)]
    monkeypatch.setattr(stacked_fits, "TOLERANCE", 1.4 * float((1 - errors[1] / errors[0]).max()))
    plain, found = (rounds_of(monkeypatch, centred, concepts, momentum)[0] for momentum in (0.0, seminmf.MOMENTUM))
    assert int(plain.max()) < 5 and int(found.max()) < 8, (plain, found)
    monkeypatch.setattr(stacked_fits, "sure_of", lambda momentum: 0.0)
    assert int(rounds_of(monkeypatch, centred, concepts, seminmf.MOMENTUM)[0].max()) > 12, "or it would go on"


@pytest.mark.parametrize("momentum", [0.5, WILD])
def test_no_round_of_many_fits_raises_an_error_and_what_is_taken_back_is_as_it_was(momentum, monkeypatch):
    """Nor does a fit that has settled move any more, in anything that is told of it."""
    monkeypatch.setattr(stacked_fits, "TOLERANCE", 3e-3)
    monkeypatch.setattr(visits, "BEGIN", WILD)
    centred, start = many_fits()
    before, taken_back, settled = None, 0, 0
    for most in range(1, 30):
        monkeypatch.setattr(stacked_fits, "MAX_ITER", most)
        concepts, codes, books = stacked_fits._descend(centred.rows, start, centred.total, momentum)
        lost = (centred.rows - codes.mT @ concepts).square().sum(dim=(1, 2)) / centred.total
        told = {"concepts": concepts, "codes": codes} | vars(books)
        assert bool((codes >= 0).all()) and torch.allclose(lost[~books.again], books.error[~books.again], rtol=1e-9)
        if before is not None:
            assert bool((lost <= before["lost"] * (1 + 1e-12)).all()), most
            as_before = {
                name: [torch.equal(*pair) for pair in zip(told[name], before[name], strict=True)] for name in told
            }
            for fit in books.again.nonzero().flatten().tolist():
                assert all(as_before[name][fit] for name in ("concepts", "error", "iterations", "active")), (most, fit)
            still = (~before["active"]).nonzero().flatten().tolist()
            assert all(same[fit] for fit in still for same in as_before.values()), most
            taken_back, settled = taken_back + int(books.again.sum()), settled + len(still)
        before = told | {"lost": lost}
    assert taken_back > 8 if momentum == WILD else settled > 8, (taken_back, settled)


def test_an_earlier_fit_is_gone_on_from_with_momentum():
    """And as those of many fits are: other starts of so few rows are not."""
    centred, start = many_fits()
    rows = centred.rows[1]
    found, plain, asked = (
        fit_seminmf(rows, 5, centre=False, concepts=start[1], **options)
        for options in ({}, {"momentum": 0.0}, {"momentum": seminmf.MOMENTUM})
    )
    assert torch.equal(found.concepts, asked.concepts) and found.iterations < 0.6 * plain.iterations
    cold, plain = (fit_seminmf(rows, 5, centre=False, **options) for options in ({}, {"momentum": 0.0}))
    assert torch.equal(cold.concepts, plain.concepts)


def test_much_momentum_from_an_earlier_fit_settles_no_sooner_than_a_descent_does():
    """What an iteration is worth would grow without bound."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1500, 40, generator=draw).relu() @ torch.randn(40, 64, generator=draw)
    rows = rows + 0.5 * torch.randn(1500, 64, generator=draw)
    start = torch.randn(16, 64, generator=draw).double()
    found, plain = (fit_seminmf(rows, 16, concepts=start, momentum=momentum) for momentum in (1.0, 0.0))
    assert found.converged and found.iterations > 30 and found.error < plain.error * 1.005, (found, plain)


@pytest.mark.parametrize("what", ["equal rows", "a concept of nothing"])
def test_a_fit_that_is_not_ordinary_does_not_end_the_others(what):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 400, 12, generator=draw).relu() @ torch.randn(3, 12, 24, generator=draw)
    if what == "equal rows":
        rows[1] = 1.0
    centred = stacked_fits.Centred.of(rows, (torch.arange(200), torch.arange(200, 400)))
    start = stacked_fits.kmeans_starts(centred, 5, 0)
    if what == "a concept of nothing":
        start[2:4, 3] = 0
    found = stacked_fits.seminmf_fits(centred, start)
    assert found.ordinary.tolist() == [True, True, False, False, True, True]
    assert torch.isfinite(found.facts["error"][[0, 1, 4, 5]]).all()
