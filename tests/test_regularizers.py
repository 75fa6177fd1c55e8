"""Regularisers: their values and gradients, what must not change them, what they refuse, and the loop with them."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.autograd import gradcheck

import anisoscope as an
from anisoscope.capture.hooks import record, steer
from anisoscope.errors import (
    AnisoscopeError,
    DegenerateError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    RunError,
    ShapeError,
    SiteError,
    TooFewRowsError,
    UnknownNameError,
    ZeroRowError,
)
from anisoscope.models.build import build_model
from anisoscope.models.sites import discover, select
from anisoscope.stats.moments import Moments
from anisoscope.train import loop, penalised
from anisoscope.train import regularizers as reg
from anisoscope.train.data import prepare
from anisoscope.train.local_fits import bent_share
from anisoscope.train.loop import train
from anisoscope.train.metrics import read_metrics
from anisoscope.train.penalised import Regularized
from anisoscope.train.recipe import load_recipe, override, parse_recipe
from anisoscope.train.regularizer_spec import site_names

LOCAL = {"dimension": 2, "k": 12, "anchors": 6}
CASES = {
    "cosreg": {},
    "istar": {"shrinkage": 0.2},
    "spectral": {},
    "path_curvature": {},
    "local_curvature": LOCAL,
}
ALL = pytest.mark.parametrize("name", list(CASES))


def cloud(*shape, seed=0, dtype=torch.float64):
    """Rows about a mean, with a spectrum that falls: nothing in them is special."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * torch.linspace(2.0, 0.3, shape[-1], dtype=torch.float64) + 0.4).to(dtype)


def term(name, h, weight=1.0, **more):
    return reg.penalty(name, h, weight, **CASES[name], **more)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50, 7), (6, 40)], ids=["tall", "wide"])
def test_terms_are_the_measures_of_the_package(seed, shape):
    h = cloud(*shape, seed=seed)
    n = len(h)
    assert float(reg.cosreg(h, 1)) == pytest.approx(an.mean_cosine(h).value * (n - 1) / n, abs=1e-10)
    plain, star = an.isoscore(h, bias="plugin").value, an.isoscore_star(h, zeta=0.3, bias="plugin").value
    assert float(reg.istar(h, 1, shrinkage=0)) == pytest.approx(1 - plain, abs=1e-10)
    assert float(reg.istar(h, 1, shrinkage=0.3)) == pytest.approx(1 - star, abs=1e-10)
    assert float(reg.spectral(h, 1)) == pytest.approx(an.spectral_ratio(h).value, abs=1e-10)
    assert float(reg.istar(h, 0.25)) == pytest.approx(float(reg.istar(h, 1)) / 4, rel=1e-12)


def test_a_reference_is_a_covariance_or_moments_of_a_larger_sample():
    h, larger = cloud(20, 6), cloud(400, 6, seed=1) * 1.7
    value = 1 - an.isoscore_star(h, zeta=0.4, reference=larger, bias="plugin").value
    assert float(reg.istar(h, 1, shrinkage=0.4, reference=torch.cov(larger.T))) == pytest.approx(value, abs=1e-10)
    assert float(reg.istar(h, 1, shrinkage=0.4, reference=Moments.of(larger))) == pytest.approx(value, abs=1e-10)
    assert float(reg.istar(h, 1, shrinkage=1.0, reference=torch.eye(6).double())) == pytest.approx(0, abs=1e-12)
    assert abs(value - float(reg.istar(h, 1, shrinkage=0.4))) > 0.01
    with pytest.raises(ShapeError, match=r"covariance \(6, 6\)"):
        reg.istar(h, 1, reference=torch.eye(5).double())


def test_nulls_and_ends_of_the_ranges():
    white = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(reg.cosreg(white, 1)) == pytest.approx(
        0, abs=5 / (4000 * 4)
    )  # sd of a mean of cosines is 1/(N sqrt D)
    mean = sum(float(reg.istar(part, 1, shrinkage=0)) for part in white.split(100)) / 40
    assert mean == pytest.approx(16**2 / (15 * (16 + 99)), rel=0.05)  # exact in the mean up to 1/N; about D/(N + D)
    assert 1 / 16 < float(reg.spectral(white, 1)) < 1.3 / 16
    line = torch.outer(torch.linspace(1, 3, 30, dtype=torch.float64), cloud(1, 5)[0])
    assert float(reg.cosreg(line, 1)) == pytest.approx(29 / 30, abs=1e-12)
    assert float(reg.istar(line, 1, shrinkage=0)) == pytest.approx(1, abs=1e-12)
    assert float(reg.spectral(line, 1)) == pytest.approx(1, abs=1e-12)
    opposite = torch.cat([white[:50], -white[:50]])
    assert float(reg.cosreg(opposite, 1)) == pytest.approx(-1 / 100, abs=1e-12)


def test_paths_read_what_turning_angles_read():
    """Independent tokens 1.5 (120 degrees), a random walk 1 (90), a straight line 0, to and fro 2."""
    steps = torch.randn(40, 200, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spread = 5 / math.sqrt(40 * 200 * 24 / 3)
    assert float(reg.path_curvature(steps, 1)) == pytest.approx(1.5, abs=spread)
    assert float(reg.path_curvature(steps.cumsum(1), 1)) == pytest.approx(1.0, abs=spread)
    straight = torch.arange(9.0)[:, None] * torch.ones(4)
    assert float(reg.path_curvature(straight, 1)) == pytest.approx(0, abs=1e-12)
    swing = (torch.arange(9) % 2)[:, None] * torch.ones(4)
    assert float(reg.path_curvature(swing, 1)) == pytest.approx(2, rel=1e-6)
    one = steps[0, :3]
    slow = (one[2] - 2 * one[1] + one[0]).square().sum() / (
        (one[1] - one[0]).square().sum() + (one[2] - one[1]).square().sum()
    )
    assert float(reg.path_curvature(one, 1)) == pytest.approx(float(slow), rel=1e-12)


def test_local_curvature_of_a_circle_and_of_a_plane():
    """An arc of half length a on a circle of radius R bends by (a/R)^2 / 15 of its variance."""
    angle = torch.linspace(-0.2, 0.2, 401, dtype=torch.float64)
    arc = 3 * torch.stack([angle.sin(), angle.cos()], dim=1)
    exact = (0.2**2) / 15
    assert float(bent_share(arc[None], 1)) == pytest.approx(exact, rel=0.02)
    ring = torch.arange(600, dtype=torch.float64) * (2 * math.pi / 600)
    circle = torch.stack([ring.sin(), ring.cos(), 0 * ring], dim=1)
    at = torch.arange(-20, 21, dtype=torch.float64) * 2 * math.pi / 600  # 40 neighbours are 20 to either side
    value = float(reg.local_curvature(circle, 1, dimension=1, k=40, anchors=50))
    assert value == pytest.approx(float(at.square().var() / (4 * at.var())), rel=0.002)
    assert value == pytest.approx(float(at[-1]) ** 2 / 15, rel=0.05)  # so many points are not yet a whole arc
    flat = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ cloud(2, 5)
    assert float(reg.local_curvature(flat, 1, **LOCAL)) < 1e-10
    noise = torch.randn(400, 31, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01
    plane = torch.randn(400, 31, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    local = torch.cat([plane, noise], dim=2)
    along = torch.linalg.eigvalsh(torch.stack([one.T.cov() for one in local]))
    outside = along[:, :-2].sum(dim=1) / along.sum(dim=1)  # the noise's own share, off each fitted plane
    bent = bent_share(local, 2) / outside
    assert abs(float(bent.mean()) - 3 / (30 - 2)) < 5 * float(bent.std()) / 20 < 0.03 * 3 / (30 - 2)


# --- gradients --------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_gradients_are_those_of_the_values(name, one_seed, masked):
    h = cloud(4, 9, 6, seed=one_seed).requires_grad_()
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, 6:], mask[3, 2] = False, False
    assert gradcheck(lambda x: term(name, x, 0.7, mask=mask if masked else None), (h,))


def test_the_gradient_of_a_reference_and_of_a_wide_batch():
    target = torch.cov(cloud(50, 6, seed=3).T)
    assert gradcheck(lambda x: reg.istar(x, 1, shrinkage=0.5, reference=target), (cloud(9, 6).requires_grad_(),))
    wide = cloud(5, 12).requires_grad_()
    assert gradcheck(lambda x: reg.istar(x, 1), (wide,)) and gradcheck(lambda x: reg.spectral(x, 1), (wide,))


def test_ties_have_finite_gradients():
    """Two leading directions of one variance, and round neighbourhoods: where eigh's own gradient is infinite."""
    square = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 0.5], [0, 0, -0.5]]).double()
    h = square.clone().requires_grad_()
    reg.spectral(h, 1).backward()
    assert torch.isfinite(h.grad).all() and 0 < h.grad.norm() < 1
    ring = torch.arange(8, dtype=torch.float64) * math.pi / 4
    bowl = torch.stack([ring.cos(), ring.sin(), 0.3 * (2 * ring).cos()], dim=1)[None].requires_grad_()
    bent_share(bowl, 2).sum().backward()
    assert torch.isfinite(bowl.grad).all() and bowl.grad.abs().max() > 1e-3
    scatter = (square.T @ square).requires_grad_()
    naive = torch.autograd.grad(torch.linalg.eigh(scatter)[1][:, -1].sum(), scatter)[0]
    assert not torch.isfinite(naive).all()


def test_wide_models_get_the_leading_direction_by_powers(monkeypatch):
    h = (torch.randn(300, 80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
         * torch.linspace(1, 0.2, 80, dtype=torch.float64) ** 2)  # fmt: skip
    exact = reg.spectral(h, 1)
    monkeypatch.setattr(reg, "EXACT_SIDE", 8)
    powers = reg.spectral(h, 1)
    assert float(powers) <= float(exact) * (1 + 1e-12) and float(powers) == pytest.approx(float(exact), rel=0.02)


@ALL
@given(scale=st.sampled_from([1e-3, 7.0, 2.0**40, 1e-25]), seed=st.integers(0, 20))
def test_rotation_and_scale_change_nothing(name, scale, seed):
    h = cloud(4, 10, 6, seed=seed)
    q = torch.linalg.qr(cloud(6, 6, seed=seed + 1))[0]
    before, turned = term(name, h), term(name, h @ q * scale)
    assert float(turned) == pytest.approx(float(before), rel=1e-8)


@ALL
def test_what_must_change_them_does(name):
    """A shift matters to cosines alone; the order of tokens to paths alone; a stretched axis to all of them."""
    h = cloud(4, 12, 6)
    assert (abs(float(term(name, h + 5)) - float(term(name, h))) > 1e-6) == (name == "cosreg")
    mixed = h.flatten(0, 1)[torch.randperm(48, generator=torch.Generator().manual_seed(0))].reshape(4, 12, 6)
    if name != "local_curvature":  # which draws other anchors then
        assert (abs(float(term(name, mixed)) - float(term(name, h))) > 1e-6) == (name == "path_curvature")
    stretched = h * torch.tensor([30.0, 1, 1, 1, 1, 1])
    assert abs(float(term(name, stretched)) - float(term(name, h))) > 1e-3


@ALL
def test_padding_is_not_there(name):
    h, mask = cloud(4, 12, 6, dtype=torch.float32), torch.ones(4, 12, dtype=torch.int64)
    mask[0, 8:], mask[2, 5:] = 0, 0
    values, gradients = [], []
    for filling in (0.0, 1e9, math.nan):
        filled = torch.where(mask[..., None] == 1, h, filling).requires_grad_()
        value = term(name, filled, mask=mask)
        value.backward()
        values.append(float(value.detach()))
        gradients.append(filled.grad)
    assert values[0] == values[1] == values[2]
    assert all(torch.equal(gradients[0], one) for one in gradients)
    assert (gradients[0][mask == 0] == 0).all() and (gradients[0][mask == 1] != 0).any()
    if name not in ("path_curvature", "local_curvature"):
        assert values[0] == pytest.approx(float(term(name, h[mask == 1])), rel=1e-6)
    assert values[0] != float(term(name, h))


@ALL
def test_under_autocast_in_half_precision(name):
    """Terms are float32 there, and those of the rows as they stand."""
    linear = torch.nn.Linear(6, 6)
    x = cloud(4, 12, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = linear(x)
        value = term(name, h)
    assert h.dtype == torch.bfloat16 and value.dtype == torch.float32
    assert float(value.detach()) == pytest.approx(float(term(name, h.detach().double())), rel=1e-4)
    value.backward()
    assert torch.isfinite(linear.weight.grad).all() and linear.weight.grad.abs().max() > 0


def test_float32_sums_do_not_lose_a_small_spread():
    """A mean a thousand times the spread: the naive E x^2 - (E x)^2 is off by tens of per cent in float32."""
    h = cloud(2000, 8) + 2000
    exact = float(reg.istar(h, 1))
    assert float(reg.istar(h.float(), 1)) == pytest.approx(exact, rel=1e-3)
    x = h.float()
    naive = x.T @ x / len(x) - torch.outer(x.mean(0), x.mean(0))
    ratio = naive.trace() ** 2 / naive.square().sum()
    assert abs(float(1 - (ratio - 1) / 7) / float(reg.istar(h, 1, shrinkage=0)) - 1) > 0.05


# --- refusals ---------------------------------------------------------------------------------------------------------


@ALL
def test_bad_input_is_named(name):
    h = cloud(4, 12, 6)
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match=f"weight of {name}"):
            term(name, h, weight)
    with pytest.raises(ShapeError, match=r"mask has shape \(4, 11\)"):
        term(name, h, mask=torch.ones(4, 11, dtype=torch.bool))
    with pytest.raises(ShapeError, match=name):
        term(name, torch.ones(6, dtype=torch.float64))
    holed = h.clone()
    holed[1, 3, 2] = math.nan
    with pytest.raises(NonFiniteError, match="row 15"):
        term(name, holed)
    assert math.isfinite(float(term(name, holed, mask=torch.isfinite(holed).all(-1))))
    with pytest.raises((TooFewRowsError, EmptyInputError), match=name):
        term(name, h, mask=torch.zeros(4, 12, dtype=torch.bool))
    with pytest.raises(TooFewRowsError, match=name):
        term(name, h[:1, :1])
    if name != "cosreg":
        with pytest.raises((DegenerateError, TooFewRowsError), match=name):
            term(name, torch.ones(4, 12, 6))


def test_more_refusals():
    h = cloud(40, 6)
    with pytest.raises(ZeroRowError, match="row 3"):
        reg.cosreg(torch.where((torch.arange(40) == 3)[:, None], 0.0, h), 1)
    with pytest.raises(OptionError, match="shrinkage of istar is a share"):
        reg.istar(h, 1, shrinkage=1.5)
    with pytest.raises(ShapeError, match="width 2"):
        reg.istar(h[:, :1], 1)
    with pytest.raises(OptionError, match="k of at least 10"):
        reg.local_curvature(h, 1, dimension=3, k=9)
    with pytest.raises(OptionError, match="fills activations of width 6"):
        reg.local_curvature(h, 1, dimension=6, k=32)
    with pytest.raises(TooFewRowsError, match="need at least 33 different ones, got 20"):
        reg.local_curvature(torch.cat([h[:20], h[:20]]), 1)
    with pytest.raises(UnknownNameError, match="did you mean 'istar'"):
        reg.penalty("ister", h, 1)


# --- damping ----------------------------------------------------------------------------------------------------------


def test_damping_changes_the_gradient_and_nothing_else(seed):
    h, g = cloud(3, 5, 8, seed=seed).requires_grad_(), cloud(3, 5, 8, seed=seed + 1)
    proxy = an.fit_proxy(cloud(100, 8), "pca", 3)
    out = reg.damp(h, proxy, tangent=0.25, normal=2.0)
    assert torch.equal(out, h)
    (found,) = torch.autograd.grad(out, h, g)
    projector = proxy.basis @ proxy.basis.T
    torch.testing.assert_close(found, 0.25 * g @ projector + 2.0 * (g - g @ projector), rtol=1e-12, atol=1e-12)
    turn = torch.linalg.qr(cloud(3, 3))[0]  # another basis of the same span
    (again,) = torch.autograd.grad(reg.damp(h, proxy.basis @ turn, tangent=0.25, normal=2.0), h, g)
    torch.testing.assert_close(again, found, rtol=1e-10, atol=1e-10)
    (same,) = torch.autograd.grad(reg.damp(h, proxy), h, g)
    assert torch.equal(same, g) and gradcheck(lambda x: reg.damp(x, proxy), (h,))


def test_damping_in_half_precision_and_its_refusals():
    basis = an.fit_proxy(cloud(100, 8), "pca", 3).basis
    h = cloud(5, 8, dtype=torch.bfloat16).requires_grad_()
    (g,) = torch.autograd.grad(reg.damp(h, basis, tangent=0.0).float().square().sum(), h)
    assert g.dtype == torch.bfloat16
    assert (g.double() @ basis).norm() < 0.02 * g.double().norm()
    x = cloud(5, 8)
    with pytest.raises(OptionError, match="not orthonormal"):
        reg.damp(x, cloud(8, 3))
    with pytest.raises(ShapeError, match="d = 8"):
        reg.damp(x, basis[:6])
    with pytest.raises(OptionError, match="tangent is a factor"):
        reg.damp(x, basis, tangent=-1)
    for bad in ({"proxy": "pcs"}, {"rank": 0}, {"refit_every": 0}, {"normal": math.nan}):
        with pytest.raises(AnisoscopeError):
            reg.tangent_damping(**bad)


def test_a_proxy_is_fitted_when_it_is_due():
    damping = reg.tangent_damping(rank=2, refit_every=3, tangent=0.0)
    bases = []
    for step in range(1, 8):
        h = cloud(60, 5, seed=step).requires_grad_()
        damping(h, step).square().sum().backward()
        bases.append(damping.basis)
        assert (h.grad @ damping.basis).abs().max() < 1e-6
    assert [bases[i] is bases[i - 1] for i in range(1, 7)] == [True, True, False, True, True, False]
    fitted = an.fit_proxy(cloud(60, 5, seed=4), "pca", 2).basis
    torch.testing.assert_close(bases[3].double(), fitted)
    again = reg.tangent_damping(rank=2, refit_every=3, tangent=0.0)
    again.restore(damping.state())
    assert torch.equal(again.basis, damping.basis) and again.fitted_at == 7 and not again.due(8)
    with pytest.raises(ShapeError, match="fitted to width 5"):
        again(cloud(60, 6), 8)


# --- sites ------------------------------------------------------------------------------------------------------------

RECIPE = parse_recipe("""
name: tiny
data: {max_chars: 60000, tokenizer: {kind: bpe, vocab_size: 300}, sequence_length: 16}
models:
  - {name: plain, architecture: llama, objective: causal, layers: 2, width: 32, heads: 4}
  - {name: decoder, architecture: gpt2, objective: causal, layers: 2, width: 32, heads: 4, dropout: 0.1}
  - {name: encoder, architecture: bert, objective: masked, layers: 2, width: 32, heads: 4, dropout: 0.1}
optimisation: {steps: 12, batch_size: 8, lr: 0.003, warmup_steps: 4}
checkpoints: {every: 6}
evaluation: {every: 6, sequences: 16}
device: cpu
""")
SPECS = {
    "cosreg": {"name": "cosreg", "weight": 0.5},
    "istar": {"name": "istar", "weight": 0.5, "options": {"shrinkage": 0.2}},
    "spectral": {"name": "spectral", "weight": 0.5},
    "path_curvature": {"name": "path_curvature", "weight": 0.5},
    "local_curvature": {"name": "local_curvature", "weight": 0.5, "sites": "resid.[12]", "options": LOCAL},
    "tangent_damping": {"name": "tangent_damping", "sites": "resid.1", "options": {"rank": 4, "refit_every": 5}},
}


@pytest.fixture(scope="module")
def data():
    return prepare(RECIPE.data)


def with_spec(name, model="plain", **changes):
    return override(RECIPE, {f"models.{model}.regularizer": copy.deepcopy(SPECS[name])} | changes)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("variant", ["plain", "decoder", "encoder"])
def test_steering_replaces_what_goes_on_and_leaves_no_hook(variant, data):
    model = build_model(RECIPE.variant(variant).model(data.vocab_size, 16), 0).eval()
    ids = data.batch(1, 2, "causal", 0).ids
    sites = select(discover(model), "resid.*")
    plain = model(input_ids=ids).logits
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with steer(model, sites, lambda name, h: h.view_as(h)):
        same_logits = model(input_ids=ids).logits
    assert torch.equal(plain, same_logits)
    met = []
    with steer(model, sites[1:2], lambda name, h: (met.append(name), h + 1)[1]), record(model, sites) as seen:
        changed = model(input_ids=ids).logits
    assert met == [sites[1].name] and not torch.equal(changed, plain)
    with record(model, sites) as before:
        model(input_ids=ids)
    assert torch.equal(seen[sites[0]], before[sites[0]]) and not torch.equal(seen[sites[2]], before[sites[2]])
    with pytest.raises(SiteError, match="keep it"), steer(model, sites[:1], lambda name, h: h[:1]):
        model(input_ids=ids)
    with pytest.raises(SiteError, match="did not fire"), steer(model, sites[:1], lambda name, h: h):
        pass
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_without_a_regularizer_training_is_as_it_was(tmp_path, data, monkeypatch):
    """Not a line of the regularised way is run; and a term of weight 0 gives the same weights bit for bit."""
    zero = with_spec("istar", **{"models.plain.regularizer.weight": 0.0})
    one = train(zero, "plain", 0, folder=tmp_path / "zero", data=data)
    monkeypatch.setattr(loop, "Regularized", None)
    monkeypatch.setattr(penalised, "record", None)
    plain = train(RECIPE, "plain", 0, folder=tmp_path / "plain", data=data)
    assert "penalty" not in read_metrics(tmp_path / "plain")[-1]
    assert same(weights(plain.checkpoint), weights(one.checkpoint)) and plain.val_loss == one.val_loss
    assert read_metrics(tmp_path / "zero")[-1]["penalty"] == 0.0


@pytest.mark.parametrize("name", list(SPECS))
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, data, name):
    """With dropout, and stopped in between two fits of a proxy."""
    recipe = with_spec(name, "decoder")
    straight = train(recipe, "decoder", 1, folder=tmp_path / "straight", data=data)
    train(recipe, "decoder", 1, folder=tmp_path / "halted", data=data, until=8)
    torch.manual_seed(99)
    resumed = train(recipe, "decoder", 1, folder=tmp_path / "halted", data=data, resume=True)
    assert resumed.status == "finished" and same(weights(straight.checkpoint), weights(resumed.checkpoint))
    keys = ("step", "loss", "penalty", "val_loss")
    told = [
        [[m.get(k) for k in keys] for m in read_metrics(tmp_path / n) if m["step"] > 8] for n in ("straight", "halted")
    ]
    assert told[0] == told[1] and len(told[0]) == 4
    assert (told[0][0][2] is None) == (name == "tangent_damping")
    plain = train(RECIPE, "decoder", 1, folder=tmp_path / "plain", data=data)
    assert not same(weights(plain.checkpoint), weights(straight.checkpoint))


def test_damping_does_not_go_on_without_its_basis(tmp_path, data):
    recipe = with_spec("tangent_damping")
    train(recipe, "plain", 0, folder=tmp_path, data=data, until=8)
    (tmp_path / penalised.FOLDER / "8.safetensors").unlink()
    with pytest.raises(RunError, match="basis"):
        train(recipe, "plain", 0, folder=tmp_path, data=data, resume=True)
    with pytest.raises(RunError, match="regularizer"):
        train(RECIPE, "plain", 0, folder=tmp_path, data=data, resume=True)


def test_the_first_update_has_the_gradient_of_loss_and_term(tmp_path, data):
    """The reported loss is the plain one; what is pushed against is the mean of the term over sites."""
    changes = {"optimisation.steps": 1, "optimisation.warmup_steps": 0, "optimisation.grad_clip": 1000.0}
    result = train(with_spec("istar", **changes), "plain", 0, folder=tmp_path, data=data)
    model = build_model(RECIPE.variant("plain").model(data.vocab_size, 16), 0)
    batch = data.batch(1, 8, "causal", 0)
    with record(model, select(discover(model), "resid.*"), keep_graph=True) as seen:
        logits = model(input_ids=batch.ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    pushed = torch.stack([reg.istar(h, 0.5, shrinkage=0.2) for h in seen.values()]).mean()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert read_metrics(tmp_path)[-1]["penalty"] == pytest.approx(float(pushed.detach()), rel=1e-6)
    (loss + pushed).backward()
    after = weights(result.checkpoint)
    lr = 0.1 * 0.003
    for name, p in model.named_parameters():
        if name in after and "embed" not in name:
            decay = 0.1 if p.ndim == 2 else 0.0
            expected = p * (1 - lr * decay) - lr * p.grad / (p.grad.abs() + 1e-8)
            clear = p.grad.abs() > 1e-5  # the sign of a gradient that is rounding says nothing
            torch.testing.assert_close(after[name][clear], expected.detach()[clear], rtol=1e-4, atol=2e-6)


def test_damping_in_the_loop_is_damping_by_hand(data):
    model = build_model(RECIPE.variant("plain").model(data.vocab_size, 16), 0)
    spec = (
        with_spec("tangent_damping", **{"models.plain.regularizer.options.tangent": 0.0}).variant("plain").regularizer
    )
    damped, ids = Regularized(spec, model, 0), data.batch(1, 8, "causal", 0).ids
    sites = select(discover(model), ("resid.0", "resid.1"))
    gradients = []
    for catch in (True, False):
        with record(model, sites, keep_graph=True) as seen:
            if catch:
                with damped.catching(1):
                    loss = model(input_ids=ids).logits.square().mean()
            else:
                loss = model(input_ids=ids).logits.square().mean()
        gradients.append(seen.gradients(loss))
    basis = damped._damping["resid.1"].basis
    rows = gradients[0]["resid.0"]
    assert not torch.allclose(rows, gradients[1]["resid.0"]) and basis.shape == (32, 4)
    # What is recorded at the site stands before the damping: its gradient has been through it.
    whole, q = gradients[1]["resid.1"], basis.to(torch.float32)
    torch.testing.assert_close(gradients[0]["resid.1"], whole - whole @ q @ q.T)
    assert (whole @ q).norm() > 0.05 * whole.norm()


def test_accumulation_takes_the_mean_over_parts_and_half_precision_trains(tmp_path, data):
    changes = {"optimisation.accumulation": 2, "dtype": "bfloat16", "optimisation.steps": 4}
    for name in ("spectral", "tangent_damping"):
        recipe = with_spec(name, **changes)
        result = train(recipe, "plain", 0, folder=tmp_path / name, data=data)
        assert result.status == "finished"
    model = build_model(RECIPE.variant("plain").model(data.vocab_size, 16), 0)
    halves = []
    for part in data.batch(1, 8, "causal", 0).split(2):
        with record(model, select(discover(model), "resid.*")) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=part.ids)
        halves += [float(reg.spectral(h, 0.5)) for h in seen.values()]
    first = read_metrics(tmp_path / "spectral")[1]["penalty"]
    assert first == pytest.approx(sum(halves) / len(halves), rel=1e-3)


def test_a_term_that_is_not_finite_ends_as_diverged(tmp_path, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penalised, "penalty", lambda name, h, weight, **o: reg.penalty(name, h * math.inf, weight, **o))
        result = train(with_spec("istar"), "plain", 0, folder=tmp_path, data=data)
    assert result.status == "diverged" and "norm of the gradient was nan" in result.notes[0]


@pytest.mark.parametrize("name", ["istar", "spectral", "cosreg"])
def test_terms_do_to_training_what_they_say(tmp_path, data, name):
    recipe = with_spec(name, **{"optimisation.steps": 24, "models.plain.regularizer.weight": 2.0})
    train(recipe, "plain", 0, folder=tmp_path / "with", data=data)
    told = [line["penalty"] for line in read_metrics(tmp_path / "with") if "penalty" in line]
    plain = train(override(RECIPE, {"optimisation.steps": 24}), "plain", 0, folder=tmp_path / "plain", data=data)
    model = build_model(RECIPE.variant("plain").model(data.vocab_size, 16), 0)
    model.load_state_dict(weights(plain.checkpoint), strict=False)
    with record(model, select(discover(model), "resid.*")) as seen, torch.no_grad():
        model(input_ids=data.batch(24, 8, "causal", 0).ids)
    options = {"shrinkage": 0.2} if name == "istar" else {}
    without = sum(float(reg.penalty(name, h, 2.0, **options)) for h in seen.values()) / len(seen)
    assert told[-1] < 0.9 * without


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_the_recipe_of_the_package_differs_in_the_regularizer_alone():
    recipe = load_recipe("regularizers")
    names = [model.regularizer.name for model in recipe.models if model.regularizer]
    assert sorted(names) == sorted(reg.NAMES) and recipe.models[0].regularizer is None and len(recipe.seeds) >= 3
    rest = [model.model_dump(exclude={"name", "regularizer"}) for model in recipe.models]
    assert all(one == rest[0] for one in rest)
    assert recipe.variant("istar").regularizer.options == {"shrinkage": 0.1}  # written out


@pytest.mark.parametrize("variant", ["plain", "decoder", "encoder"])
def test_sites_are_known_without_building_the_model(variant):
    spec = RECIPE.variant(variant)
    found = discover(build_model(spec.model(50, 8), 0))
    assert {site.name for site in found} == set(site_names(spec.architecture, spec.layers))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "istra", "weight": 1.0}, "did you mean 'istar'"),
        ({"name": "istar"}, "istar needs a weight"),
        ({"name": "istar", "weight": -1.0}, "greater than or equal to 0"),
        ({"name": "istar", "weight": 1.0, "zeta": 0.1}, "unknown key models[0].regularizer.zeta"),
        ({"name": "istar", "weight": 1.0, "options": {"shrinkage": 2}}, "options.shrinkage"),
        ({"name": "istar", "weight": 1.0, "options": {"shrinkge": 0.1}}, "did you mean 'shrinkage'"),
        ({"name": "cosreg", "weight": 1.0, "options": {"shrinkage": 0.1}}, "option of cosreg"),
        ({"name": "cosreg", "weight": 1.0, "sites": "resid.7"}, "unknown site 'resid.7'"),
        ({"name": "tangent_damping", "weight": 1.0}, "has no weight"),
        ({"name": "tangent_damping", "options": {"rank": 64}}, "rank 64 exceeds the width 32"),
        ({"name": "tangent_damping", "options": {"proxy": "pcaa"}}, "did you mean 'pca'"),
        ({"name": "local_curvature", "weight": 1.0, "options": {"k": 5}}, "needs k of at least 10"),
        (
            {"name": "local_curvature", "weight": 1.0, "options": {"k": 128}},
            "k 128 of local_curvature needs 129 tokens",
        ),
        ("istar", "regularizer: a mapping, such as {name: istar, weight: 0.1}; got 'istar'"),
        ("i-star", "unknown regularizer 'i-star'; did you mean 'istar'"),
        ("tangent_damping", "such as {name: tangent_damping}"),
        ({"name": "cosreg", "weight": 1.0, "sites": "resd.*"}, "unknown site 'resd.*'; did you mean 'resid.*'"),
    ],
)
def test_a_bad_regularizer_is_one_line(spec, message):
    with pytest.raises(OptionError) as caught:
        override(RECIPE, {"models.plain.regularizer": spec})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_tokens_of_one_pass_bound_the_neighbourhoods():
    """A batch of 8 windows of 16 tokens has 127 others for each; cut in two passes it has 63."""
    most = {"name": "local_curvature", "weight": 1.0, "options": {"k": 127}}
    assert override(RECIPE, {"models.plain.regularizer": most}).variant("plain").regularizer.options["k"] == 127
    with pytest.raises(OptionError, match="needs 128 tokens in a pass, and there are 64"):
        override(RECIPE, {"models.plain.regularizer": most, "optimisation.accumulation": 2})


def test_compile_is_refused_or_left_out(tmp_path, data):
    with pytest.raises(OptionError, match="compile: true with a regularizer"):
        with_spec("istar", compile=True)
    recipe = with_spec("istar", compile="auto", **{"optimisation.steps": 4})
    result = train(recipe, "plain", 0, folder=tmp_path, data=data)
    assert result.status == "finished" and "trained without it" in result.notes[0]


def test_a_mask_that_is_added_to_scores_is_refused_not_turned_around():
    h = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    added = torch.tensor([[0.0, 0, 0, -torch.inf, -torch.inf]]).expand(2, -1)
    with pytest.raises(OptionError, match="1 keeps a token"):
        reg.istar(h, 0.1, mask=added)
    assert reg.istar(h, 0.1, mask=(added == 0).float()) == reg.istar(h, 0.1, mask=added == 0)


def test_an_unknown_option_of_a_term_is_named():
    with pytest.raises(UnknownNameError, match="did you mean 'shrinkage'"):
        reg.penalty("istar", torch.randn(8, 4), 0.1, shrinkag=0.2)
