"""Hooks that only look, always go and must fire."""

import pytest
import torch
from tiny_models import LAYERS, T5, VOCABULARY, WIDTH, Known, build, checkpoint, token_ids
from torch import nn

from anisoscope.capture.hooks import record
from anisoscope.errors import OptionError, SiteError, SiteSilentError, UnknownNameError
from anisoscope.models.sites import Site, discover, select, site_by_path

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def hooks_of(model):
    """Everything that registering a hook could leave behind."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    kinds += ("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (sorted(vars(module)), [list(getattr(module, kind)) for kind in kinds])
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("keep_graph", [False, True])
def test_hooks_only_look(keep_graph):
    model = build("gpt2")
    plain = model(token_ids()).logits
    before = hooks_of(model)
    with record(model, discover(model), keep_graph=keep_graph) as seen:
        watched = model(token_ids()).logits
    assert torch.equal(plain, watched)
    assert hooks_of(model) == before
    assert all(seen[name].requires_grad == keep_graph for name in seen)


def test_a_training_step_is_the_same_with_and_without_hooks():
    def train(watch):
        torch.manual_seed(0)
        model = build("gpt2").train()  # dropout draws random numbers
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            with record(model, discover(model) if watch else [], keep_graph=watch):
                loss = model(token_ids(), labels=token_ids()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, list(model.parameters())

    (plain, weights), (watched, again) = train(False), train(True)
    assert plain == watched
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_hooks_go_when_the_forward_raises():
    model = build("gpt2")
    before = hooks_of(model)
    with pytest.raises(IndexError), record(model, discover(model)):
        model(torch.full((1, 3), VOCABULARY + 1))
    assert hooks_of(model) == before


def test_hooks_go_when_a_site_is_silent_or_unknown():
    model = build("gpt2")
    before = hooks_of(model)
    silent = r"site 'embed' \(output of module 'transformer\.wte'\) did not fire"
    with pytest.raises(SiteSilentError, match=silent), record(model, discover(model)):
        model(inputs_embeds=torch.zeros(1, 3, WIDTH))
    wrong = Site("resid.9", "resid", 9, "transformer.h.9", "output")
    with pytest.raises(UnknownNameError, match=r"transformer\.h\.9"), record(model, [*discover(model), wrong]):
        raise AssertionError("the body must not run")
    twice = discover(model)[:1] * 2
    with pytest.raises(OptionError, match="asked for twice"), record(model, twice):
        raise AssertionError("the body must not run")
    assert hooks_of(model) == before


def test_an_error_in_the_body_is_not_hidden_by_silent_sites():
    model = build("gpt2")
    with pytest.raises(RuntimeError, match="mine"), record(model, discover(model)):
        raise RuntimeError("mine")


def test_two_forward_passes_in_one_record_are_refused():
    model = build("gpt2")
    with pytest.raises(SiteSilentError, match="fired 2 times where 1 was expected"), record(model, discover(model)):
        model(token_ids())
        model(token_ids())


def test_sites_of_the_side_that_did_not_run_are_named():
    model = build("t5", Known("T5Config", T5, "Seq2SeqLM"))
    with pytest.raises(SiteSilentError, match=r"'decoder\.embed'.*another side"), record(model, discover(model)):
        model.encoder(token_ids())


def test_a_compiled_model_that_skips_hooks_is_noticed():
    model = build("llama", head="")
    compiled = torch.compile(model, backend="eager", fullgraph=False)
    with torch.no_grad():
        compiled(token_ids(), use_cache=False)
        try:
            with record(compiled, discover(compiled)) as seen:
                compiled(token_ids(), use_cache=False)
        except SiteSilentError as error:
            assert "compiled" in str(error)
        else:  # this torch runs hooks that come after compiling: then they must have seen the truth
            with record(model, discover(model)) as plain:
                model(token_ids(), use_cache=False)
            assert all(torch.equal(seen[s], plain[t]) for s, t in zip(seen, plain, strict=True))


class Overwriter(nn.Module):
    """Doubles in place what its child returned: what was seen there must not change."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.child(x)
        y.mul_(2)
        return y


def test_values_overwritten_later_are_kept_as_they_stood():
    model, x = Overwriter(), torch.randn(1, 3, WIDTH)
    site = site_by_path(model, "child")
    with torch.no_grad(), record(model, [site]) as seen:
        model(x)
    with torch.no_grad():
        assert torch.equal(seen["child"], model.child(x))
    with pytest.raises(SiteError, match="overwritten in place"), record(model, [site], keep_graph=True):
        model(x)


# In post-norm blocks what the MLP reads goes on into the residual too, so a nudge at the MLP alone is another thing.
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2", ("resid", "mlp_in")),
        ("opt", ("resid", "mlp_in")),
        ("gpt_neox", ("resid", "attn_in")),
        ("bert", ("resid",)),
    ],
)
def test_gradients_are_those_of_a_nudge_to_the_site(name, kinds):
    """dL/dh by autograd against the slope of the loss when the state itself is moved: in float64, by replacing it."""
    model = build(name).double()
    sites = [s for s in discover(model) if s.kind in kinds]
    ids = token_ids(1, 5)

    def loss_of_model():  # transformers' own losses are in float32, too coarse for a difference quotient
        return nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])

    with record(model, sites, keep_graph=True) as seen:
        loss = loss_of_model()
    gradients = seen.gradients(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    generator = torch.Generator().manual_seed(0)
    for site in sites:
        direction = torch.randn(seen[site].shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-6, -1e-6):
            module = model.get_submodule(site.module)
            nudge = step * direction

            def moved(*args, _forward=module.forward, _nudge=nudge, _port=site.port, **kwargs):
                if _port == "input":
                    return _forward(args[0] + _nudge.reshape(args[0].shape), *args[1:], **kwargs)
                output = _forward(*args, **kwargs)
                return output + _nudge if isinstance(output, torch.Tensor) else (output[0] + _nudge, *output[1:])

            module.forward = moved
            with torch.no_grad():
                losses.append(loss_of_model().item())
            del module.forward
        slope = (losses[0] - losses[1]) / 2e-6
        expected = float((gradients[site.name] * direction).sum())
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-7), site.name


def test_gradients_that_cannot_be_are_named():
    model = build("gpt2")
    with record(model, discover(model)) as seen:
        loss = model(token_ids(), labels=token_ids()).loss
    with pytest.raises(OptionError, match="keep_graph=True"):
        seen.gradients(loss)
    with torch.no_grad(), record(model, discover(model), keep_graph=True) as seen:
        loss = model(token_ids(), labels=token_ids()).loss
    with pytest.raises(SiteError, match="carries no gradient"):
        seen.gradients(loss)
    with record(model, discover(model), keep_graph=True) as seen:
        model(token_ids())
    with pytest.raises(SiteError, match=r"does not depend on site 'attn_in.0'"):
        seen.gradients(seen["resid.0"].sum())


@pytest.mark.parametrize("pattern", ["resid.*", "attn_in.*"])
def test_gradients_under_gradient_checkpointing(pattern):
    ids = token_ids()

    def gradients(**checkpointing):
        model = build("llama").train()
        if checkpointing:
            checkpoint(model, **checkpointing)
        with record(model, select(discover(model), pattern), keep_graph=True) as seen:
            loss = model(ids, labels=ids).loss
        return seen.gradients(loss)

    plain, checkpointed = gradients(), gradients(use_reentrant=False)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    with pytest.raises(SiteError, match="entrant"):
        gradients(use_reentrant=True)


class Odd(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value, self.inner = value, nn.Identity()

    def forward(self, x):
        self.inner(self.value)
        return x


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.arange(3), "gave torch.int64, not real numbers"),
        ("text", "gave str, not a tensor"),
        (None, "gave NoneType"),
        (torch.zeros(3, 4), r"has shape \(3, 4\), not \(b, t, d\); .*layout='flat'"),
        (torch.zeros(2, 3, 4, 5), "not .b, t, d."),
        (torch.eye(3).to_sparse(), "sparse or nested"),
        (nn.utils.rnn.pack_sequence([torch.zeros(3, 2)]), "gave PackedSequence"),
    ],
)
def test_what_is_no_hidden_state_is_named_after_the_forward(value, words):
    model = Odd(value)
    ran = False
    with pytest.raises(SiteError, match=words), record(model, [site_by_path(model, "inner")]):
        ran = torch.equal(model(torch.ones(1)), torch.ones(1))
    assert ran


def test_a_name_that_was_not_recorded():
    model = build("gpt2")
    with record(model, select(discover(model), "resid.*")) as seen:
        model(token_ids())
    assert len(seen) == LAYERS + 1
    with pytest.raises(UnknownNameError, match=r"unknown recorded site 'rezid.2'; did you mean 'resid.2'"):
        seen["rezid.2"]
