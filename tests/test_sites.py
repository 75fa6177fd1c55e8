"""Sites name what they say: each is compared bit for bit with the hidden states that the model itself gives out."""

import contextlib

import pytest
import torch
import transformers
from tiny_models import KNOWN, LAYERS, T5, TINY, VOCABULARY, WIDTH, Known, build, randomise, token_ids
from torch import nn

from anisoscope.capture.hooks import record
from anisoscope.errors import ModelError, OptionError, UnknownNameError
from anisoscope.models.families import FAMILIES
from anisoscope.models.sites import Site, discover, select, site_by_path

# torch deprecates what DeBERTa's code and torch.compile itself still use.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@contextlib.contextmanager
def spy(model, paths):
    """What the modules at ``paths`` are called with, seen without hooks: their ``forward`` is replaced for a while."""
    got = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)

            def forward(*args, _path=path, _forward=module.forward, **kwargs):
                got.setdefault(_path, []).append((args[0] if args else kwargs["hidden_states"]).clone())
                return _forward(*args, **kwargs)

            module.forward = forward
            stack.callback(delattr, module, "forward")
        yield got


@torch.no_grad()
def run(model, sites, **inputs):
    with record(model, sites) as seen:
        output = model(**inputs, output_hidden_states=True)
    return seen, output


def by_name(sites):
    return {site.name: site for site in sites}


def hidden_states_agree(model, sites, seen, states, prefix=""):
    """The model's own hidden states against resid.*, and the last one against final_norm or resid.L."""
    layers = len(states) - 1
    assert f"{prefix}resid.{layers}" in seen and f"{prefix}resid.{layers + 1}" not in seen
    for layer in range(layers):
        assert torch.equal(seen[f"{prefix}resid.{layer}"], states[layer]), layer
    last = seen[f"{prefix}resid.{layers}"]
    if f"{prefix}final_norm" in seen:
        norm = model.get_submodule(by_name(sites)[f"{prefix}final_norm"].module)
        with torch.no_grad():
            assert torch.equal(norm(last), seen[f"{prefix}final_norm"])
        assert not torch.equal(last, seen[f"{prefix}final_norm"])
        last = seen[f"{prefix}final_norm"]
    return last


@pytest.mark.parametrize("name", KNOWN)
def test_sites_are_the_models_own_hidden_states(name):
    known, model = KNOWN[name], build(name)
    sites = discover(model)
    seen, output = run(model, sites, input_ids=token_ids())
    last = hidden_states_agree(model, sites, seen, output.hidden_states)
    assert ("final_norm" in seen) == known.final_norm
    if known.config == "OPTConfig" and "word_embed_proj_dim" in known.options:
        last = model.model.decoder.project_out(last)
    assert torch.equal(last, output.hidden_states[-1])
    with torch.no_grad():
        assert torch.equal(seen["embed"], model.get_input_embeddings()(token_ids()))
    for layer in range(LAYERS):
        assert seen[f"attn_in.{layer}"].shape == seen[f"mlp_in.{layer}"].shape == (2, 7, WIDTH)


@pytest.mark.parametrize("name", KNOWN)
def test_attn_in_and_mlp_in_are_what_the_projections_receive(name):
    known, model = KNOWN[name], build(name)
    sites = discover(model)
    assert set(by_name(sites)) >= {"embed", *(f"{kind}.{i}" for i in range(LAYERS) for kind in ("attn_in", "mlp_in"))}
    # With a convolution, resid.1 is read behind it: the blocks are found through the attention then.
    blocks = [by_name(sites)[f"attn_in.{i}"].module.split(f".{known.attn}")[0] for i in range(LAYERS)]
    expected = {
        "attn_in": lambda i: [f"{blocks[i]}.{known.attn}.{part}" for part in known.qkv],
        "mlp_in": lambda i: [f"{blocks[i]}.{known.mlp}.{part}".rstrip(".") for part in known.up],
    }
    paths = [path for each in expected.values() for i in range(LAYERS) for path in each(i)]
    with spy(model, paths) as got:
        seen, _ = run(model, sites, input_ids=token_ids())
    for kind, each in expected.items():
        for i in range(LAYERS):
            for path in each(i):
                (received,) = got[path]
                assert torch.equal(seen[f"{kind}.{i}"], received.reshape(2, 7, WIDTH)), path
    with torch.no_grad():
        for i, block in enumerate(blocks):
            norm = model.get_submodule(f"{block}.{known.attn_norm}") if known.attn_norm else nn.Identity()
            assert torch.equal(seen[f"attn_in.{i}"], norm(seen[f"resid.{i}"]))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "opt", "gpt_neox", "modernbert", "falcon", "roberta"])
@pytest.mark.parametrize("head", ["", "SequenceClassification"])
def test_bare_models_and_other_heads_have_the_same_sites(name, head):
    bare, headed = build(name, head=head), build(name)
    assert [s.name for s in discover(bare)] == [s.name for s in discover(headed)]
    seen, output = run(bare, discover(bare), input_ids=token_ids())
    last = hidden_states_agree(bare, discover(bare), seen, output.hidden_states)
    assert torch.equal(last, output.hidden_states[-1])


@pytest.mark.parametrize(("groups", "inner"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_albert_counts_the_firings_of_its_shared_block(groups, inner):
    options = {**TINY, "embedding_size": 16, "num_hidden_groups": groups, "inner_group_num": inner}
    model = build("albert", Known("AlbertConfig", options, "MaskedLM"))
    sites = discover(model)
    layers = LAYERS * inner
    attention = sorted({s.module for s in sites if s.kind == "attn_in"})
    ffn = sorted({s.module for s in sites if s.kind == "mlp_in"})
    assert len(attention) == groups * inner
    with spy(model, attention + ffn) as got:
        seen, output = run(model, sites, input_ids=token_ids())
    assert len(output.hidden_states) == layers + 1
    for layer, state in enumerate(output.hidden_states):
        assert torch.equal(seen[f"resid.{layer}"], state)
    for site in sites:
        if site.port == "input" and site.kind != "resid":
            assert torch.equal(seen[site], got[site.module][site.call]), site.name
    assert seen["embed"].shape[-1] == 16
    assert seen["resid.0"].shape[-1] == WIDTH


@pytest.mark.parametrize("head", ["Seq2SeqLM", ""])
def test_t5_has_two_sides(head):
    model = build("t5", Known("T5Config", T5, head or "Seq2SeqLM"), head=head)
    sites = discover(model)
    queries = [s.module + ".q" for s in sites if s.kind == "attn_in"]
    ups = [s.module + ".wi" for s in sites if s.kind == "mlp_in"]
    ids, target = token_ids(), token_ids(2, 5, seed=1)
    with spy(model, queries + ups) as got:
        seen, output = run(model, sites, input_ids=ids, decoder_input_ids=target)
    for side, states in (("encoder", output.encoder_hidden_states), ("decoder", output.decoder_hidden_states)):
        own = [s for s in sites if s.side == side]
        assert all(s.name.startswith(f"{side}.") for s in own)
        assert torch.equal(hidden_states_agree(model, own, seen, states, f"{side}."), states[-1])
    assert seen["encoder.embed"].shape == (2, 7, WIDTH)
    assert seen["decoder.resid.2"].shape == (2, 5, WIDTH)
    for site in sites:
        if site.kind in ("attn_in", "mlp_in"):
            projection = site.module + (".q" if site.kind == "attn_in" else ".wi")
            assert torch.equal(seen[site], got[projection][0]), site.name


def test_encoder_of_t5_alone():
    model = randomise(transformers.T5EncoderModel(transformers.T5Config(**T5)).eval())
    assert {site.side for site in discover(model)} == {"encoder"}
    seen, output = run(model, discover(model), input_ids=token_ids())
    last = hidden_states_agree(model, discover(model), seen, output.hidden_states, "encoder.")
    assert torch.equal(last, output.hidden_states[-1])


def test_mamba_gives_out_its_hidden_states_one_late():
    from tiny_models import MAMBA

    model = build("mamba", Known("MambaConfig", MAMBA))
    sites = discover(model)
    projections = [s.module + ".in_proj" for s in sites if s.kind == "mixer_in"]
    assert len(projections) == LAYERS
    with spy(model, projections) as got:
        seen, output = run(model, sites, input_ids=token_ids())
    assert torch.equal(seen["resid.0"], seen["embed"])
    for layer in range(LAYERS):  # the model's list starts behind the first block and ends behind the final norm
        assert torch.equal(seen[f"resid.{layer + 1}"], output.hidden_states[layer])
        assert torch.equal(seen[f"mixer_in.{layer}"], got[projections[layer]][0])
    assert torch.equal(seen["final_norm"], output.hidden_states[-1])
    assert not torch.equal(seen["final_norm"], seen[f"resid.{LAYERS}"])


def test_every_family_in_the_table_is_tested_or_a_copy_of_one_that_is():
    tested = {KNOWN[name].config for name in KNOWN} | {"AlbertConfig", "T5Config", "MambaConfig"}
    from transformers import CONFIG_MAPPING

    kinds = {FAMILIES[m] for m in FAMILIES if CONFIG_MAPPING[m].__name__ in tested}
    assert set(FAMILIES.values()) == kinds


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2 * LAYERS))  # a longer list than that of blocks

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.fc1(x).relu(), None)


class Homemade(nn.Module):
    """A model of nobody's family; ``shared`` runs one block three times over."""

    def __init__(self, shared=False):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.trunk = nn.Module()
        self.trunk.stack = nn.ModuleList([Block()] * LAYERS if shared else [Block() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids) * 2
        self.states = [x]
        for block in self.trunk.stack:
            x, _ = block(x)
            self.states.append(x)
        return self.head(self.ln_f(x))


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_of_no_known_family_is_read_by_its_structure(shared):
    model = randomise(Homemade(shared).eval())
    sites = discover(model)
    assert sites[0] == Site("embed", "embed", None, "tokens", "output")
    assert by_name(sites)["resid.2"].module == "trunk.stack.1"
    with torch.no_grad(), record(model, sites) as seen:
        model(token_ids())
    for layer, state in enumerate(model.states):
        assert torch.equal(seen[f"resid.{layer}"], state)
    with torch.no_grad():
        assert torch.equal(seen["final_norm"], model.ln_f(model.states[-1]))
        assert torch.equal(seen["attn_in.1"], model.trunk.stack[1].norm(model.states[1]))
    assert "mlp_in.2" in seen


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neox", "modernbert", "falcon", "opt", "eurobert"])
def test_the_structure_alone_finds_what_the_table_says(name, monkeypatch):
    model = build(name)
    by_table = discover(model)
    monkeypatch.setattr("anisoscope.models.sites.FAMILIES", {})
    by_structure = discover(model)
    ids = token_ids()
    seen, _ = run(model, by_table, input_ids=ids)
    wanted = [s for s in by_structure if s.kind in ("embed", "resid", "final_norm", "attn_in")]
    assert [s.name for s in wanted] == [s.name for s in by_table if s.kind != "mlp_in"]
    again, _ = run(model, wanted, input_ids=ids)
    for site in wanted:
        assert torch.equal(again[site], seen[site]), site.name


def test_two_sided_models_of_unknown_family_keep_their_sides_apart(monkeypatch):
    model = build("t5", Known("T5Config", T5, "Seq2SeqLM"))
    names = {s.name: s.module for s in discover(model) if s.kind == "resid"}
    monkeypatch.setattr("anisoscope.models.sites.FAMILIES", {})
    assert {s.name: s.module for s in discover(model) if s.kind == "resid"} == names


class StackOfLSTMs(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=batch_first) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        self.states = [x]
        for layer in self.rnn:
            x, _ = layer(x)
            self.states.append(x)
        return self.head(x if self.batch_first else x.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_models_by_layer_and_by_path(batch_first):
    model = randomise(StackOfLSTMs(batch_first).eval())
    sites = discover(model)
    assert [s.name for s in sites] == ["embed", "resid.0", "resid.1", "resid.2"]
    path = site_by_path(model, "rnn.1", name="top")
    with torch.no_grad(), record(model, [*sites, path]) as seen:
        model(token_ids())
    for layer, state in enumerate(model.states):
        state = state if batch_first else state.transpose(0, 1)
        assert seen[f"resid.{layer}"].shape == (2, 7, WIDTH)
        assert torch.equal(seen[f"resid.{layer}"], state)
    assert torch.equal(seen["top"], seen["resid.2"])


def test_a_single_recurrent_layer_is_one_block():
    model = nn.Module()
    model.embed, model.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)
    assert [(s.name, s.module) for s in discover(model)] == [
        ("embed", "embed"),
        ("resid.0", "lstm"),
        ("resid.1", "lstm"),
    ]


@pytest.mark.parametrize("wrap", [torch.compile, nn.Sequential, nn.DataParallel])
def test_wrapped_models_keep_their_names(wrap):
    model = build("gpt2")
    assert [s.name for s in discover(wrap(model))] == [s.name for s in discover(model)]


def test_a_model_without_blocks_is_a_named_error():
    with pytest.raises(ModelError, match=r"Linear has no list of equal blocks.*site_by_path"):
        discover(nn.Linear(2, 2))


def test_select_by_pattern():
    sites = discover(build("gpt2"))
    assert [s.name for s in select(sites, "resid.*")] == [f"resid.{i}" for i in range(LAYERS + 1)]
    assert [s.name for s in select(sites, ["final_norm", "embed", "*_in.1"])] == [
        "embed",
        "attn_in.1",
        "mlp_in.1",
        "final_norm",
    ]
    with pytest.raises(UnknownNameError, match=r"unknown site 'resed.1'; did you mean 'resid.1'"):
        select(sites, ["embed", "resed.1"])
    with pytest.raises(UnknownNameError, match=r"unknown site 'resed\.\*'; did you mean 'resid\.\*'"):
        select(sites, "resed.*")
    with pytest.raises(UnknownNameError, match=r"unknown site 'Resid\.7'; did you mean 'resid\.\d'"):
        select(sites, "Resid.7")
    t5 = discover(build("t5", Known("T5Config", T5, "Seq2SeqLM")))
    assert {s.side for s in select(t5, "resid.*")} == {"encoder", "decoder"}
    assert {s.side for s in select(t5, "decoder.resid.*")} == {"decoder"}


def test_site_by_path_takes_any_module():
    model = build("gpt2")
    into, out = (site_by_path(model, "transformer.h.1.mlp", port=port) for port in ("input", "output"))
    assert (into.name, out.name) == ("transformer.h.1.mlp:input", "transformer.h.1.mlp")
    seen, _ = run(model, [into, out, *discover(model)], input_ids=token_ids())
    assert torch.equal(seen[into], seen["mlp_in.1"])
    with torch.no_grad():
        assert torch.equal(seen[out], model.transformer.h[1].mlp(seen[into]))
    with pytest.raises(UnknownNameError, match=r"'transformer.h.1.mpl'; did you mean 'transformer.h.1.mlp'"):
        site_by_path(model, "transformer.h.1.mpl")
    with pytest.raises(UnknownNameError, match="port"):
        site_by_path(model, "transformer", port="side")
    with pytest.raises(OptionError, match="call=2 of calls=2"):
        site_by_path(model, "transformer", call=2, calls=2)
