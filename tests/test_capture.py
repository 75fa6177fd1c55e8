"""Capture: hooks that only look, always go and must fire; rows from which nothing masked can leak."""

from dataclasses import replace

import pytest
import torch
from test_models_llama2c import STORIES, stories
from tiny_models import LAYERS, T5, VOCABULARY, WIDTH, Known, build, token_ids
from torch import nn

from anisoscope.capture.hooks import record
from anisoscope.capture.rows import collect, forward, measured_mask, site_rows
from anisoscope.errors import OptionError, ShapeError, SiteError, SiteSilentError, UnknownNameError
from anisoscope.models.load import load_model
from anisoscope.models.sites import Site, discover, select, site_by_path
from anisoscope.text.batches import Batch, token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import HFTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
ENCODERS = ["bert", "roberta", "modernbert", "eurobert", "deberta-v2", "distilbert", "electra"]
DECODERS = ["gpt2", "llama", "opt", "gpt_neox", "falcon", "gemma3_text", "bloom"]
PAD, BEGIN, END = 0, 1, 2


def hooks_of(model):
    """Everything that registering a hook could leave behind."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    kinds += ("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (sorted(vars(module)), [list(getattr(module, kind)) for kind in kinds])
        for name, module in model.named_modules()
    }


def make_batch(lengths=(9, 5, 2), seed=0):
    """Sequences <begin> tokens <end> of these lengths, padded at the end."""
    longest = max(lengths)
    ids = token_ids(len(lengths), longest, seed)
    positions = torch.arange(longest).expand(len(lengths), -1).clone()
    mask = positions < torch.tensor(lengths)[:, None]
    ids[:, 0] = BEGIN
    for row, length in enumerate(lengths):
        ids[row, length - 1] = END
    ids[~mask] = PAD
    return Batch(ids, mask, (ids <= END) & mask, torch.where(mask, positions, 0))


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


def test_measured_tokens_are_real_and_ordinary():
    batch = make_batch((5, 3))
    assert measured_mask(batch).long().tolist() == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0]]
    plain = replace(batch, special=torch.zeros_like(batch.special))
    assert measured_mask(plain).long().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert measured_mask(plain, skip_first=True).long().tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]


def test_rows_stand_in_the_order_of_the_text():
    model, batch = build("gpt2"), make_batch()
    sites = discover(model)
    mask = measured_mask(batch)
    seen = forward(model, batch, sites, device="cpu")
    (got,) = collect(model, [batch], sites)
    states = seen["resid.2"]
    expected = [states[row, place] for row in range(3) for place in range(9) if mask[row, place]]
    assert torch.equal(got.rows["resid.2"], torch.stack(expected))
    assert torch.equal(got.rows["resid.2"], site_rows(seen, "resid.2", mask))
    assert got.ids.tolist() == [int(i) for row in range(3) for i in batch.ids[row] if i > END]
    assert got.positions.tolist() == [*range(1, 8), *range(1, 4)]
    assert got.sequences.tolist() == [0] * 7 + [1] * 3
    with pytest.raises(ShapeError, match="the mask"):
        site_rows(seen, "resid.2", mask[:, 1:])


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_nothing_leaks_from_padding(name):
    """The ids under the padding are changed, and the rows measured stay what they were, bit for bit."""
    model, batch = build(name), make_batch()
    sites = discover(model)
    other = batch.ids.clone()
    other[~batch.mask] = token_ids(3, 9, seed=5)[~batch.mask]
    (plain,) = collect(model, [batch], sites)
    (changed,) = collect(model, [replace(batch, ids=other)], sites)
    assert torch.equal(plain.ids, changed.ids)
    for site in sites:
        assert torch.equal(plain.rows[site.name], changed.rows[site.name]), site.name


@pytest.mark.parametrize("name", ["bert", "gpt2", "modernbert", "llama"])
@pytest.mark.parametrize("skip_first", [False, True])
def test_masked_rows_never_appear(name, skip_first):
    """A huge value is planted in the embedding of padding, of special tokens and at position 0."""
    model, batch = build(name), make_batch()
    first = batch.ids[0, 0] = 7  # an ordinary token, measured unless position 0 is skipped
    batch = replace(batch, special=(batch.ids <= END) & batch.mask)
    assert not (batch.ids[:, 1:] == first).any()
    with torch.no_grad():
        model.get_input_embeddings().weight[[PAD, BEGIN, END, first]] = 1e6
    (got,) = collect(model, [batch], select(discover(model), ["embed", "resid.*"]), skip_first=skip_first)
    huge = (got.rows["embed"].abs() > 1e5).any(dim=1)
    assert huge.sum() == (0 if skip_first else 1)
    assert len(huge) == len(got.ids) == (7 + 3 if skip_first else 8 + 3)
    assert all(len(rows) == len(huge) for rows in got.rows.values())


def test_padding_in_front_is_refused():
    """Models count positions from the first place on, and what stands there would be padding."""
    batch = make_batch()
    flipped = Batch(batch.ids.flip(1), batch.mask.flip(1), batch.special.flip(1), batch.positions)
    with pytest.raises(ShapeError, match="sequence 1 has padding in front of real tokens"):
        list(collect(build("gpt2"), [flipped], []))


def test_collect_numbers_sequences_and_reports():
    model, done = build("gpt2"), []
    sites = select(discover(model), "resid.1")
    batches = [make_batch((4, 4)), make_batch((2, 2)), make_batch((3,), seed=1)]
    parts = list(collect(model, iter(batches), sites, dtype=torch.float64, on_batch=done.append))
    assert [part.sequences.tolist() for part in parts] == [[0, 0, 1, 1], [], [4]]
    assert parts[1].rows["resid.1"].shape == (0, WIDTH)
    assert parts[0].rows["resid.1"].dtype == torch.float64
    assert done == [1, 2, 3]
    assert list(collect(model, [], sites)) == []


def test_collect_leaves_modes_gradients_and_hooks_alone():
    model = build("gpt2").train()
    model.transformer.h[1].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    before = hooks_of(model)
    for part in collect(model, [make_batch(), make_batch()], discover(model)):
        assert [module.training for module in model.modules()] == modes
        assert hooks_of(model) == before
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        loss = (part.rows["resid.1"] * torch.ones(WIDTH, requires_grad=True)).sum()
        loss.backward()  # rows may enter later graphs
    broken = replace(make_batch(), ids=make_batch().ids + VOCABULARY)
    with pytest.raises(IndexError):
        list(collect(model, [broken], discover(model)))
    assert [module.training for module in model.modules()] == modes
    assert hooks_of(model) == before


def test_collect_uses_no_dropout_and_no_random_numbers():
    model, batch = build("gpt2"), make_batch()
    (calm,) = collect(model, [batch], discover(model))
    state = torch.get_rng_state()
    (training,) = collect(model.train(), [batch], discover(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(calm.rows[name], training.rows[name]) for name in calm.rows)


class Lazy(nn.Module):
    """Builds a table in its first forward pass and keeps it, as some rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.table = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([nn.Linear(WIDTH, WIDTH)]),
            None,
        )

    def forward(self, ids):
        if self.table is None:
            self.table = torch.arange(1.0, WIDTH + 1)
        return self.layers[0](self.embed(ids) * self.table)


def test_a_model_measured_before_its_first_step_can_still_be_trained():
    model = Lazy()
    list(collect(model, [make_batch()], discover(model)))
    model(token_ids()).sum().backward()
    assert model.embed.weight.grad is not None


def test_only_the_needed_part_of_a_model_is_run():
    model, batch = build("gpt2"), make_batch()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    list(collect(model, [batch], discover(model)))
    assert calls == []
    list(collect(model, [batch], [site_by_path(model, "lm_head")]))
    assert calls == ["head"]
    t5 = build("t5", Known("T5Config", T5, "Seq2SeqLM"))
    t5.decoder.register_forward_hook(lambda *_: calls.append("decoder"))
    list(collect(t5, [batch], select(discover(t5), "encoder.*")))
    assert calls == ["head"]
    (both,) = collect(t5, [batch], discover(t5))
    assert calls == ["head", "decoder"]
    assert both.rows["decoder.resid.1"].shape == both.rows["encoder.resid.1"].shape


def test_models_that_are_called_with_ids_alone():
    from test_sites import StackOfLSTMs

    model, batch = StackOfLSTMs(batch_first=False).eval(), make_batch()
    (got,) = collect(model, [batch], discover(model))
    with torch.no_grad():
        model(batch.ids)
    assert torch.equal(got.rows["resid.2"], model.states[2].transpose(0, 1)[measured_mask(batch)])


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K files are not here")
@pytest.mark.parametrize("pack", [True, False])
def test_from_a_text_to_the_rows_of_a_real_model(tmp_path, pack):
    """Real text, tokenizer, weights and batches: each row must be what the model says of that token in its window."""
    (tmp_path / "stories.txt").write_text("\n\n\n".join(stories(6)))
    loaded = load_model(STORIES)
    tokenizer = HFTokenizer(loaded.tokenizer)
    batches = token_batches(
        load_corpus(tmp_path / "stories.txt"), tokenizer, sequence_length=32, batch_size=4, tokens=600, pack=pack
    )
    sites = select(discover(loaded.model), ["resid.*", "final_norm"])
    parts = list(collect(loaded.model, batches, sites, skip_first=True))
    assert sum(len(part.ids) for part in parts) == sum(int(measured_mask(b, skip_first=True).sum()) for b in batches)
    for number, (part, batch) in enumerate(zip(parts, batches, strict=True)):
        assert not set(part.ids.tolist()) & {0, 1, 2}
        row = len(part.ids) // 2
        window = batch.ids[int(part.sequences[row]) - 4 * number]
        place = int(part.positions[row])
        assert window[place] == part.ids[row]
        with torch.no_grad():  # the window alone, cut off behind the token: a decoder cannot see further
            alone = loaded.model.model(window[None, : place + 1]).last_hidden_state[0, -1]
        torch.testing.assert_close(part.rows["final_norm"][row], alone, rtol=1e-4, atol=1e-4)
