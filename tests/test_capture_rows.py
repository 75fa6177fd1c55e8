"""Rows of activations from which nothing masked can leak, and a model that is left as it was."""

from dataclasses import replace

import pytest
import torch
from test_capture import hooks_of
from test_models_llama2c import STORIES, stories
from test_sites import StackOfLSTMs
from tiny_models import T5, VOCABULARY, WIDTH, Known, build, token_ids
from torch import nn

from anisoscope.capture.rows import collect, forward, measured_mask, site_rows
from anisoscope.errors import ShapeError
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover, select, site_by_path
from anisoscope.text.batches import Batch, token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import HFTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
ENCODERS = ["bert", "roberta", "modernbert", "eurobert", "deberta-v2", "distilbert", "electra"]
DECODERS = ["gpt2", "llama", "opt", "gpt_neox", "falcon", "gemma3_text", "bloom"]
PAD, BEGIN, END = 0, 1, 2


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
