"""The tangent analysis of a monitor: planted truths, the plain functions behind it, warm starts that survive a stop."""

import math

import pytest
import torch

from anisoscope.capture.maps import LinearMap
from anisoscope.errors import AnisoscopeError, OptionError, SiteError
from anisoscope.estimate import Estimate
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.monitoring.views import MapView, SiteView
from anisoscope.runs.records import Curve
from anisoscope.tangent.nulls import cross_fit, expected_share, permuted_signal_null
from anisoscope.tangent.proxies import fit_proxy
from anisoscope.text.frequency import TokenCounts

SEQUENCES, LENGTH, D, K = 24, 32, 20, 3
N = SEQUENCES * LENGTH


def a_map(role="reader"):
    return LinearMap(path="block.0.up", site="mlp_in.0", role=role, transposed=False)


def look(step=0, *, along=0.0, rare=0.0, seed=0, signal=False, **more):
    """Rows with three strong directions; ``along`` is how much of the gradient follows them."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.cat([torch.full((K,), 3.0), torch.full((D - K,), 0.5)])
    x = torch.randn(N, D, generator=draw) * spread
    ids = torch.randint(0, 40, (N,), generator=draw) ** 2 // 40
    inside = torch.zeros(N, D)
    inside[:, :K] = torch.randn(N, K, generator=draw)
    weight = along + rare * (ids > 20).float()[:, None]
    g = torch.randn(N, D, generator=draw) + weight * inside
    readers = ()
    if signal:
        s = torch.randn(N, 7, generator=draw)
        readers = (MapView(a_map(), s.T @ x, s),)
    return SiteView(
        site="mlp_in.0", step=step, seed=0, x=x, g=g, ids=ids, positions=torch.arange(N) % LENGTH,
        sequences=torch.arange(N) // LENGTH, tokens=N, readers=readers, **more,
    )  # fmt: skip


def counts_of(view):
    return TokenCounts.of(view.ids, 40)


def analysis(view, **options):
    options = {"steps": 10, "rank": K, "draws": 49, "bins": 3, "proxies": ("pca",), "counts": counts_of(view)} | options
    return TangentAnalysis(**options)


def test_a_planted_alignment_is_found_and_its_absence_too():
    there = analysis(look())(look(along=2.0))
    ratio, p = there["pca.activation.ratio", "all"], there["pca.activation.p"]
    # Three of twenty directions carry 1 + 4 each, the others 1: share 15 / 32, controls (17 / 32) * 3 / 17.
    share = there["pca.activation.share", "all"]
    assert abs(share.value - 15 / 32) < 4 * share.stderr + 0.01
    assert abs(ratio.value - 5.0) < 4 * ratio.stderr + 0.1 and p.value == 1 / 50
    nothing = analysis(look())(look())
    ratio = nothing["pca.activation.ratio", "all"]
    assert abs(ratio.value - 1) < 4 * ratio.stderr and nothing["pca.activation.p"].value > 0.02
    assert "K=3, D=20, chance 0.15, B=49" in ratio.notes and "sequences" in ratio.over
    # The proxies hold most of the variance, so that chance alone is far below 1 here: what enrichment is for.
    variance = nothing["pca.variance_share"]
    assert variance.value == pytest.approx(27 / (27 + 17 * 0.25), rel=0.02)
    assert nothing["pca.activation.enrichment"].value == pytest.approx(
        nothing["pca.activation.share", "all"].value / variance.value
    )


def test_energy_is_as_cross_fit_has_it():
    view = look(along=1.0)
    found = analysis(view, seed=3)(view)
    (plain,) = cross_fit(view.x, view.g, view.sequences, lambda rows, rank: fit_proxy(rows, "pca", rank, seed=3),
                         ranks=(K,), draws=49, seed=3)  # fmt: skip
    for name, one in (("share", plain.share), ("ratio", plain.ratio)):
        mine = found[f"pca.activation.{name}", "all"]
        assert (mine.value, mine.stderr) == (pytest.approx(one.value, rel=1e-5), pytest.approx(one.stderr, rel=1e-4))
    assert found["pca.activation.p"].value == plain.p


def test_frequency_shows_where_the_alignment_is():
    view = look(rare=2.0)
    found = analysis(view)(view)
    slices = [name[1] for name in found if isinstance(name, tuple) and name[0] == "pca.activation.share"]
    assert slices[0].startswith("frequency 1 of 3 (rarest): counts ") and slices[-1] == "all"
    assert slices[2].startswith("frequency 3 of 3 (most frequent): counts ")
    rare, frequent = (found["pca.activation.share", slices[at]] for at in (0, 2))
    assert rare.value - frequent.value > 4 * math.hypot(rare.stderr, frequent.stderr)
    assert {name[0] for name in found if isinstance(name, tuple)} >= {"own_distance", "global_distance"}
    assert -1 <= found["frequency.global_spearman"].value <= 1
    without = analysis(view, counts=None)(view)
    assert not any("frequency" in str(name) for name in without)


def test_the_expected_share_is_the_mean_over_permutations():
    view = look(signal=True)
    signal, basis = view.readers[0].signal + view.x[:, :7] * 0.3, fit_proxy(view.x, "pca", K).basis
    # Means of both, off the basis, matter far more than one over n: they are what all permutations share.
    for x, g in ((view.x, signal), (view.x + 2 * torch.eye(D)[-1], signal + 0.3)):
        drawn = permuted_signal_null(x, g, basis, permutations=400)
        close = 4 * float(drawn.null_shares.std()) / 400**0.5 + 0.005
        assert expected_share(x, g, basis) == pytest.approx(drawn.null_mean, abs=close)


def test_a_reader_gradient_of_independent_signals_has_no_excess():
    """Though its share is far above chance: that is the variance of the activations, by construction."""
    view = look(step=10, signal=True)
    found = analysis(view, gradients=("activation", "reader"), referee="last")(view)
    share, null, excess = (found[f"pca.reader.{name}"] for name in ("share", "null", "excess"))
    assert share.value > 0.6 and null.value == pytest.approx(found["pca.variance_share"].value, abs=0.05)
    assert abs(excess.value) < 4 * excess.stderr and found["pca.reader.p"].value > 0.02
    early = analysis(view, gradients=("activation", "reader"))(look(step=3, signal=True))
    assert early["pca.reader.excess"].stderr is None and "pca.reader.p" not in early
    assert "pca.reader.share" not in analysis(view)(view)


def test_matrices_have_a_share_each():
    rows = torch.zeros(5, D)
    rows[:, 0] = 1.0
    writers, updates = (MapView(a_map("writer"), rows),), (MapView(a_map("writer"), rows + 1),)
    view = look(writers=writers, updates=updates)
    found = analysis(view, gradients=("writer", "update"))(view)
    assert found["pca.writer.share"].value == pytest.approx(1.0, abs=0.02)
    assert found["pca.update.share"].value == pytest.approx((4 + 2) / (4 + 19), abs=0.03)
    assert found["pca.writer.share"].stderr is None
    assert analysis(view, gradients=("reader", "writer")).needs == ("activation", "signal", "writer")


def test_nothing_kept_for_gradients_is_the_same_to_the_bit_and_leaves_ordinary_tensors_behind():
    view, later = look(along=1.0), look(5, along=1.0, seed=1)
    quick, plain = (analysis(view, proxies=("seminmf", "pca")) for _ in range(2))
    assert quick(view) == plain._told(view)
    assert quick(later) == plain._told(later), "a warm start from what was fitted so"
    kept = quick.state()
    assert kept.keys() == plain.state().keys() and not any(one.is_inference() for one in kept.values())
    assert all(torch.equal(kept[name], one) for name, one in plain.state().items())


def test_drift_and_warm_starts_go_on_from_a_saved_state():
    views = [look(step, seed=step) for step in (0, 1, 2)]
    straight = analysis(views[0], proxies=("seminmf", "pca"))
    results = [straight(view) for view in views]
    assert "seminmf.drift" not in results[0] and 0 < results[1]["seminmf.drift"].value < 90
    stopped = analysis(views[0], proxies=("seminmf", "pca"))
    for view in views[:2]:
        stopped(view)
    resumed = analysis(views[0], proxies=("seminmf", "pca"))
    resumed.restore(stopped.state())
    again = resumed(views[2])
    for name, result in results[2].items():
        assert isinstance(result, Estimate) and again[name].value == pytest.approx(result.value, rel=1e-9), name
    cold = analysis(views[0], proxies=("seminmf", "pca"))(views[2])
    assert cold["seminmf.activation.share", "all"].value != results[2]["seminmf.activation.share", "all"].value


def test_a_frozen_proxy_stays():
    frozen = analysis(look(), mode="frozen", freeze_share=0.2)
    turned = [frozen(look(step, seed=step)).get("pca.drift") for step in (0, 1, 5, 10)]
    assert turned[0] is None and turned[1].value > 0 and turned[2].value == pytest.approx(0, abs=1e-4)
    assert 0 < frozen(look(11))["pca.split_angle"].value < 90


def test_the_referee_comes_when_it_is_due():
    view = look(step=10, along=2.0)
    found = analysis(view, ranks=(2, 5))(view)
    verdict = found["pca.survives"]
    assert verdict.value in (0.0, 1.0) and any(note.startswith("passed: energy share") for note in verdict.notes)
    assert found["pca.tangent_cosine2"].value > K / D and found["pca.minus_random"].value > 0
    assert isinstance(found["pca.activation.spectral_share"], Estimate)
    curve = found["pca ratio against rank"]
    assert isinstance(curve, Curve) and curve.x == (2.0, 5.0) and curve.y[0] > 1
    again = analysis(view, ranks=(2, K), proxies=("seminmf",))
    again(look(step=9))  # from which the next fit goes on, where one by itself would begin anew
    own = again(view)
    told = own["seminmf.activation.ratio", "all"].value
    assert own["seminmf ratio against rank"].y[1] == pytest.approx(told, rel=1e-7), "the curve goes through it"
    early = analysis(view, ranks=(2, 5))(look(step=9))
    assert "pca.survives" not in early and "pca ratio against rank" not in early
    assert "pca.survives" in analysis(view, referee="always", steps=None)(look(step=9))
    assert "pca.survives" not in analysis(view, referee="never")(view)


def test_what_one_part_cannot_say_the_others_still_can():
    view = look()
    found = analysis(view, counts=TokenCounts.of(view.ids[view.ids < 20], 40))(view)
    errors = {name: result for name, result in found.items() if isinstance(result, Exception)}
    assert list(errors) == ["tangent: by_type"] and "count 0" in str(errors["tangent: by_type"])
    assert found["pca.activation.ratio", "all"].value > 0
    still = analysis(view)(look())  # a gradient that is zero everywhere has no direction
    zero = SiteView(**{**vars(view), "g": torch.zeros(N, D)})
    found = analysis(view)(zero)
    assert isinstance(found["tangent: activation"], SiteError) and "pca.explained" in found and still
    with pytest.raises(SiteError, match=r"'mlp_in\.0' is frozen"):
        analysis(view)(SiteView(**{**vars(view), "g": None, "no_gradient": "is frozen"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proxies": ("seminfm",)}, "did you mean 'seminmf'"),
        ({"proxies": "pca"}, "give a list of one proxy or more"),
        ({"gradients": ("readers",)}, "did you mean 'reader'"),
        ({"mode": "froze"}, "did you mean 'frozen'"),
        ({"referee": "lats"}, "did you mean 'last'"),
        ({"rank": 0}, "a rank is 1 or more"),
        ({"draws": 5}, "fewer than 19 controls"),
        ({"steps": None}, "give steps="),
    ],
)
def test_bad_options_are_named(options, words):
    from anisoscope.errors import AnisoscopeError

    with pytest.raises(AnisoscopeError, match=words):
        analysis(look(), **options)


def test_a_rank_that_does_not_fit_is_told_before_the_training():
    asked = analysis(look(), rank=8, ranks=(2, 40))
    with pytest.raises(OptionError, match=r"site 'resid.0': rank 40 leaves 24 of 64"):
        asked.check({"resid.0": 64})
    asked.check({"resid.0": 128})


@pytest.mark.parametrize("proxies", [("random", "pca"), ("pca", "random")])
def test_a_proxy_that_holds_all_of_the_gradient_keeps_nothing_of_others_back(proxies):
    view = look()
    flat, inside = view.x.clone(), torch.zeros(N, D)
    flat[:, K:] = 0
    inside[:, :K] = view.g[:, :K]
    found = analysis(view, proxies=proxies)(SiteView(**{**vars(view), "x": flat, "g": inside}))
    (error,) = {str(one) for one in found.values() if isinstance(one, SiteError)}
    assert "no gradient lies outside the basis" in error
    before = proxies[0] == "random"
    assert ("random.activation.isoscore_share" in found) == before, "what comes before it is told"
    assert "pca.activation.isoscore_share" not in found


def test_correlations_take_numbers_that_want_gradients():
    from anisoscope.tangent.frequency import correlation

    x = torch.arange(30.0, dtype=torch.float64)
    y = x + torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.inference_mode():
        plain = correlation(x, y, over="pairs")  # what is kept from here serves outside as well
    assert correlation(x.requires_grad_(), y.requires_grad_(), over="pairs") == plain


def test_a_gradient_that_varies_inside_one_proxy_alone_still_has_energy_outside_it():
    """A constant outside the proxy is energy and no variance: its tests are told, and that nothing is left to vary."""
    view = look()
    flat, inside = view.x.clone(), torch.zeros(N, D)
    flat[:, K:] = 0
    inside[:, :K] = view.g[:, :K]
    inside[:, K] = 1.0
    found = analysis(view, proxies=("random", "pca"))(SiteView(**{**vars(view), "x": flat, "g": inside}))
    assert isinstance(found["pca.activation.ratio", "all"], Estimate)
    assert isinstance(found["random.activation.isoscore_share"], Estimate)
    assert "pca.activation.isoscore_share" not in found
    (error,) = {str(one) for one in found.values() if isinstance(one, AnisoscopeError)}
    assert "nothing is left" in error
