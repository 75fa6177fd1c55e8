"""Models from scratch: what masks and ablations do, that weights are shared, and that a saved model is the same."""

import pytest
import torch
from pydantic import ValidationError

from anisoscope.models.build import ModelSpec, build_model
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover

ARCHITECTURES = ("gpt2", "llama", "bert")
CHANGED = 5  # the position whose token is exchanged


def spec(architecture="gpt2", **options):
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocab_size": 50, "context": 16}
    return ModelSpec(architecture=architecture, **sizes | options)


def tokens(rows=2, length=9):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(3))


def logits(model, ids, **options):
    with torch.no_grad():
        return model.eval()(input_ids=ids, **options).logits


def reached(model, **options):
    """Positions whose output changes with the token at CHANGED."""
    ids = tokens()
    other = ids.clone()
    other[:, CHANGED] = (other[:, CHANGED] + 1) % 50
    differs = (logits(model, ids, **options) != logits(model, other, **options)).any(dim=-1)
    return set(differs.any(dim=0).nonzero().flatten().tolist())


def loud(model):
    """Random models mix faintly; larger attention makes a leak of any size visible."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name or "attention" in name:
                parameter *= 8
    return model


@pytest.mark.parametrize("attention", ["full", "uniform"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_reaches_exactly_what_the_mask_allows(architecture, causal, attention):
    model = loud(build_model(spec(architecture, causal=causal, attention=attention), 0))
    expected = set(range(CHANGED, 9)) if causal else set(range(9))
    assert reached(model) == expected
    # A padding mask of ones goes another way through transformers and must change nothing.
    mask = torch.ones(2, 9, dtype=torch.long)
    assert reached(model, attention_mask=mask) == expected
    mask[:, -2:] = 0  # real padding goes a third way
    assert reached(model, attention_mask=mask) - {7, 8} == expected - {7, 8}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_attention_a_token_reaches_itself_alone(architecture, causal):
    model = loud(build_model(spec(architecture, causal=causal, attention="none"), 0))
    assert reached(model) == {CHANGED}


@pytest.mark.parametrize("attention", ["full", "uniform", "none"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_is_not_read(architecture, attention):
    model = loud(build_model(spec(architecture, causal=False, attention=attention), 0))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    other = ids.clone()
    other[:, -3:] = (other[:, -3:] + 7) % 50
    one, two = logits(model, ids, attention_mask=mask), logits(model, other, attention_mask=mask)
    assert torch.equal(one[:, :-3], two[:, :-3])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masks_share_modules_and_weights(architecture, seed):
    with_mask, without = (build_model(spec(architecture, causal=causal), seed) for causal in (True, False))
    assert [type(module) for module in with_mask.modules()] == [type(module) for module in without.modules()]
    one, two = with_mask.state_dict(), without.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    other = build_model(spec(architecture), seed + 1).state_dict()
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("attention", "changed"), [("uniform", 2), ("none", 2)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ablations_change_nothing_but_their_own_weights(architecture, attention, changed):
    full = build_model(spec(architecture), 0).state_dict()
    ablated = build_model(spec(architecture, attention=attention), 0).state_dict()
    differing = {name for name in full if not torch.equal(full[name], ablated[name])}
    assert len(differing) == changed  # one matrix a layer; biases are zero from the start
    words = {"uniform": ("c_attn", "q_proj", "query"), "none": ("c_proj", "o_proj", "output.dense")}[attention]
    assert all(any(word in name for word in words) for name in differing)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_uniform_attention_is_the_mean_of_the_allowed_values(architecture, causal):
    """Against a loop over positions, on the values that the module itself projects."""
    model = build_model(spec(architecture, causal=causal, attention="uniform", layers=1), 0).eval()
    seen = {}
    path = {"gpt2": "transformer.h.0.attn", "llama": "model.layers.0.self_attn"}[architecture]
    module = model.get_submodule(path)
    out = module.c_proj if architecture == "gpt2" else module.o_proj
    out.register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0]))
    values = module.c_attn if architecture == "gpt2" else module.v_proj
    values.register_forward_hook(lambda _, args, result: seen.update(value=result[..., -32:]))
    logits(model, tokens())
    for position in range(9):
        allowed = seen["value"][:, : position + 1] if causal else seen["value"]
        torch.testing.assert_close(seen["mixed"][:, position], allowed.mean(dim=1))


@pytest.mark.parametrize("attention", ["uniform", "none"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ablations_survive_training(architecture, attention):
    """After steps with decay, what was zeroed is still zero, and everything that can learn has learnt."""
    model = build_model(spec(architecture, attention=attention, causal=False), 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        model(input_ids=tokens()).logits.square().mean().backward()
        optimiser.step()
    after = model.state_dict()
    if attention == "none":
        assert all(torch.equal(before[n], after[n]) for n in after if "attn." in n or "attention.self" in n)
    queries = [
        value[..., :32] if "c_attn" in name else value
        for name, value in after.items()
        if any(word in name for word in ("c_attn", "q_proj", "query"))
    ]
    assert queries and (attention == "none" or all(not value.any() for value in queries))
    assert reached(model) == (set(range(9)) if attention == "uniform" else {CHANGED})
    assert any(not torch.equal(before[name], after[name]) for name in after if "mlp" in name or "intermediate" in name)


@pytest.mark.parametrize("attention", ["full", "uniform", "none"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_computes_the_same_for_everybody(tmp_path, architecture, causal, attention):
    """load_model knows nothing of our attention: the ablation must be in the weights, the mask in the configuration."""
    model = build_model(spec(architecture, causal=causal, attention=attention, tie_embeddings=causal), 0)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).model
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_are_found(architecture):
    names = [site.name for site in discover(build_model(spec(architecture), 0))]
    assert {"embed", "resid.0", "resid.1", "resid.2", "attn_in.1", "mlp_in.0"} <= set(names)
    assert ("final_norm" in names) == (architecture != "bert")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_building_leaves_the_generators_alone(architecture):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build_model(spec(architecture), 0).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    two = build_model(spec(architecture), 0).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tied_and_untied_heads():
    tied, untied = (build_model(spec("llama", tie_embeddings=tie), 0) for tie in (True, False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert torch.equal(tied.model.embed_tokens.weight, untied.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 5}, "width 32 is not a multiple of heads 5"),
        ({"architecture": "llama", "width": 12, "heads": 4}, "rotary positions need an even number"),
        ({"dropout": 1.0}, "less than 1"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"widht": 3}, "Extra inputs"),
        ({"architecture": "gpt3"}, "'gpt2', 'llama' or 'bert'"),
    ],
)
def test_specs_that_cannot_be_built(options, words):
    with pytest.raises(ValidationError, match=words):
        spec(**options)


def test_specs_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        spec().width = 64
