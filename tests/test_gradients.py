"""Gradients of real models, against ordinary backward on a copy, difference quotients and the maps' own inputs."""

import copy

import pytest
import torch
from test_capture import hooks_of
from tiny_models import KNOWN, LAYERS, VOCABULARY, WIDTH, build, token_ids
from torch import nn

from anisoscope.capture.gradients import gradient_pass, maps_for, snapshot, updates
from anisoscope.capture.hooks import record
from anisoscope.capture.losses import CausalLoss, MaskedLoss, loss_for, predicted_tokens
from anisoscope.capture.maps import find_maps, is_linear
from anisoscope.errors import ModelError, OptionError, SiteError
from anisoscope.models.sites import discover, select
from anisoscope.text.batches import Batch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
MASK = 3
PARALLEL = ("gptj", "falcon", "phi")  # attention and MLP read one tensor: each map is listed under its own site


def batch_of(batch=2, length=7, seed=0, padding=0):
    ids = token_ids(batch, length, seed)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if padding:
        mask[-1, -padding:] = False
        ids[-1, -padding:] = 0
    positions = torch.arange(length).expand(batch, length) * mask
    return Batch(ids, mask, torch.zeros_like(mask), positions)


def loss_of(name):
    return MaskedLoss(MASK) if KNOWN[name].head == "MaskedLM" else CausalLoss()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_every_kind_equals_backward_on_a_copy(name):
    model, batch, loss = build(name), batch_of(padding=2), loss_of(name)
    sites = discover(model)
    embed = next(site for site in sites if site.kind == "embed")
    maps = maps_for(model, sites, ("reader", "writer"))
    # Gradients from the user's own step must stay as they are.
    loss(model, batch_of(seed=5)).backward()
    before = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    hooks = hooks_of(model)
    found = gradient_pass(model, batch, sites, loss, maps=maps, embedding=embed, signals=True)
    assert all(torch.equal(model.get_parameter(key).grad, grad) for key, grad in before.items())
    assert hooks_of(model) == hooks

    twin = copy.deepcopy(model)
    twin.zero_grad()
    with record(twin, sites, keep_graph=True) as seen:
        value = loss(twin, batch)
    for key in seen:
        seen[key].retain_grad()
    value.backward()
    assert found.loss == value.item() and not found.missing
    for site in sites:
        assert torch.equal(found.states[site.name], seen[site.name].detach())
        assert torch.equal(found.gradients[site.name], seen[site.name].grad)
        assert not found.states[site.name].requires_grad and found.gradients[site.name].grad_fn is None
    assert {one.map for one in found.maps} == set(maps)
    for one in found.maps:
        grad = twin.get_parameter(one.map.parameter).grad
        module = twin.get_submodule(one.map.path)
        plain = grad if isinstance(module, nn.Linear) else grad.T  # (out, in)
        assert torch.equal(one.rows, plain if one.map.role == "reader" else plain.T)
        assert one.rows.shape[1] == WIDTH
    table = twin.get_parameter(f"{embed.module}.weight").grad
    assert torch.equal(found.embedding.rows, table[found.embedding.ids])
    assert found.embedding.tied == (name in ("gpt2", "bert"))
    assert found.embedding.ids.tolist() == sorted(set(batch.ids[batch.mask].tolist()))


@pytest.mark.parametrize("name", KNOWN)
def test_maps_are_those_that_read_the_site_itself(name):
    """By the tensors that pass through: every map listed is given what stands at its site, and none is left out."""
    model = build(name)
    sites = [site for site in discover(model) if site.kind in ("attn_in", "mlp_in", "mixer_in", "final_norm")]
    given, handles = {}, []
    for path, module in model.named_modules():
        if is_linear(module):

            def see(_, args, path=path):
                given[path] = args[0].detach().clone()

            handles.append(module.register_forward_pre_hook(see))
    with torch.no_grad(), record(model, sites) as seen:
        model(token_ids())
    for handle in handles:
        handle.remove()
    readers = {one.path: one.site for one in find_maps(model, discover(model)) if one.role == "reader"}
    assert readers
    for path, site in readers.items():
        assert torch.equal(given[path].reshape(-1, WIDTH), seen[site].reshape(-1, WIDTH)), path
    blocks = {path for path in given if any(part.isdigit() for part in path.split("."))}
    for path in blocks - set(readers):
        same = [
            site.name
            for site in sites
            if site.kind != "final_norm" and given[path].numel() == seen[site.name].numel()
            and torch.equal(given[path].reshape(seen[site.name].shape), seen[site.name])
        ]  # fmt: skip
        assert not same, (path, same)


@pytest.mark.parametrize("name", KNOWN)
def test_every_block_has_its_writers(name):
    model = build(name)
    writers = [one for one in find_maps(model, discover(model)) if one.role == "writer"]
    per_block = 1 if name == "mixtral" else 2  # fused experts are no linear maps
    sites = [f"resid.{layer + 1}" for layer in range(LAYERS)]
    if name == "deberta-v2-conv":
        sites.remove("resid.1")  # a convolution writes it
    for site in sites:
        assert len([one for one in writers if one.site == site]) == per_block
    for one in writers:
        weight = model.get_parameter(one.parameter)
        assert (weight.shape[1] if one.transposed else weight.shape[0]) == WIDTH
        assert "pos" not in one.path


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gpt_neox", "falcon", "phi", "gptj"])
def test_what_the_last_map_writes_has_the_gradient_of_the_stream(name):
    """A pre-norm block adds what its maps write: dL/dy of a writer is dL/dh of the stream behind the block."""
    model, batch = build(name), batch_of()
    stream = select(discover(model), "resid.2")
    parallel = name in (*PARALLEL, "gpt_neox")
    writers = [one for one in find_maps(model, stream) if one.role == "writer"]
    for one in writers if parallel else writers[-1:]:
        outputs = []
        handle = model.get_submodule(one.path).register_forward_hook(lambda _, args, y, out=outputs: out.append(y))
        with record(model, stream, keep_graph=True) as seen:
            value = CausalLoss()(model, batch)
        handle.remove()
        at_map, at_stream = torch.autograd.grad(value, [outputs[0], seen["resid.2"]])
        torch.testing.assert_close(at_map.reshape(at_stream.shape), at_stream)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert"])
def test_signals_make_the_reader_gradient(name):
    model, batch = build(name), batch_of(padding=2)
    sites = select(discover(model), ["attn_in.*", "mlp_in.*"])
    found = gradient_pass(model, batch, sites, loss_of(name), maps=maps_for(model, sites, ("reader",)), signals=True)
    for one in found.maps:
        x = found.states[one.map.site].reshape(-1, WIDTH)
        g = one.signal.reshape(len(x), -1)
        torch.testing.assert_close(g.T @ x, one.rows, rtol=1e-4, atol=1e-6)


def test_scale_and_weights_make_the_cut_into_batches_invisible():
    model, loss = build("gpt2"), CausalLoss()
    whole = batch_of(4, 7, padding=3)
    halves = [Batch(*(part[cut] for part in vars_of(whole))) for cut in (slice(0, 3), slice(3, 4))]
    sites = select(discover(model), "resid.*")
    maps = maps_for(model, sites, ("writer",))
    total = predicted_tokens(loss, whole)
    one = gradient_pass(model, whole, sites, loss, maps=maps)
    parts = [
        gradient_pass(model, half, sites, loss, maps=maps, scale=predicted_tokens(loss, half) / total)
        for half in halves
    ]
    for name, grad in one.gradients.items():
        torch.testing.assert_close(torch.cat([part.gradients[name] for part in parts]), grad, rtol=1e-4, atol=1e-7)
    for number, together in enumerate(one.maps):
        rows = sum(part.maps[number].rows for part in parts)
        torch.testing.assert_close(rows, together.rows, rtol=1e-4, atol=1e-7)


def vars_of(batch):
    return batch.ids, batch.mask, batch.special, batch.positions


def test_update_is_what_the_optimiser_did():
    model, batch = build("gpt2"), batch_of()
    maps = maps_for(model, discover(model), ("update",))
    before = snapshot(model, {one.parameter for one in maps})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    CausalLoss()(model, batch).backward()
    grads = {one.parameter: model.get_parameter(one.parameter).grad.clone() for one in maps}
    optimizer.step()
    found = updates(model, before, maps)
    assert len(found) == len(maps) > 0
    for one in found:
        # w + u is rounded, so u comes back with the error of w.
        torch.testing.assert_close(one.rows, one.map.rows(-0.5 * grads[one.map.parameter]), rtol=1e-4, atol=1e-6)


def test_frozen_parts_are_named_and_the_rest_is_there():
    model = build("gpt2")
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    sites = discover(model)
    maps = maps_for(model, sites, ("reader",))
    found = gradient_pass(model, batch_of(), sites, CausalLoss(), maps=maps)
    assert "frozen" in found.missing["resid.0"] and "frozen" in found.missing["transformer.h.0.attn.c_attn.weight"]
    assert set(found.gradients) == {s.name for s in sites} - set(found.missing)
    assert {"resid.2", "resid.3", "final_norm"} <= set(found.gradients)
    assert set(found.states) == {s.name for s in sites}
    model.requires_grad_(False)
    with pytest.raises(SiteError, match="frozen"):
        gradient_pass(model, batch_of(), sites, CausalLoss())


def test_own_loss_and_logits_agree():
    for name in ("gpt2", "llama"):
        model, batch = build(name), batch_of(padding=2)
        labels = batch.ids.masked_fill(~batch.mask, -100)
        own = model(batch.ids, attention_mask=batch.mask.long(), labels=labels).loss
        assert torch.equal(CausalLoss()(model, batch), own)
        logits = model(batch.ids, attention_mask=batch.mask.long()).logits[:, :-1]
        by_hand = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        torch.testing.assert_close(own, by_hand)
        assert predicted_tokens(CausalLoss(), batch) == int((labels[:, 1:] != -100).sum())
    # A decoder without its mask is trained to fill in: its own loss would look one token ahead.
    masked = MaskedLoss(MASK)
    read, chosen = masked.inputs(batch), masked.chosen(batch)
    logits = model(read.ids, attention_mask=batch.mask.long()).logits
    torch.testing.assert_close(masked(model, batch), nn.functional.cross_entropy(logits[chosen], batch.ids[chosen]))


def test_masked_tokens_are_the_same_every_time():
    batch = batch_of(8, 20, padding=5)
    loss = MaskedLoss(MASK, seed=4)
    chosen = loss.chosen(batch)
    assert torch.equal(chosen, loss.chosen(batch)) and not (chosen & ~batch.mask).any()
    assert 0.05 < chosen.sum() / batch.mask.sum() < 0.3
    assert (loss.inputs(batch).ids[chosen] == MASK).all()
    assert not torch.equal(chosen, MaskedLoss(MASK, seed=5).chosen(batch))
    assert MaskedLoss(MASK, share=1e-9).chosen(batch).sum() == 1


def test_which_loss_is_meant():
    assert loss_for(build("gpt2"), None) == CausalLoss()
    with pytest.raises(OptionError, match=r"bert does not name its mask token; give loss=MaskedLoss\(mask_id="):
        loss_for(build("bert"), None)
    assert loss_for(build("eurobert"), None) == MaskedLoss(3)
    with pytest.raises(OptionError, match="loss='mse'"):
        loss_for(build("gpt2"), "mse")
    with pytest.raises(ModelError, match="without a loss or logits"):
        CausalLoss()(build("gpt2", head=""), batch_of())
