"""Training: it learns, resumes bit for bit, accumulates without a difference, and survives NaN and its observers."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anisoscope.errors import OptionError, RunError, TooFewTokensError
from anisoscope.models.build import build_model
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover
from anisoscope.sweep import cells_of
from anisoscope.text.tokens import CharTokenizer, HFTokenizer
from anisoscope.train import loop
from anisoscope.train.checkpoints import checkpoints_in, newest_resumable
from anisoscope.train.data import IGNORED, as_transformers, mask_tokens, prepare
from anisoscope.train.loop import train
from anisoscope.train.metrics import METRICS, MetricsWriter, read_metrics
from anisoscope.train.optimise import make_optimiser
from anisoscope.train.recipe import TokenizerSpec, override, parse_recipe

RECIPE = parse_recipe("""
name: tiny
data: {max_chars: 60000, tokenizer: {kind: bpe, vocab_size: 300}, sequence_length: 16}
models:
  - {name: decoder, architecture: gpt2, objective: causal, layers: 2, width: 32, heads: 4, dropout: 0.1}
  - {name: encoder, architecture: bert, objective: masked, layers: 2, width: 32, heads: 4, dropout: 0.1}
  - {name: rotary, architecture: llama, objective: causal, layers: 1, width: 32, heads: 4}
  - {name: characters, architecture: gpt2, objective: causal, layers: 1, width: 32, heads: 4, tokenizer: {kind: char}}
optimisation: {steps: 20, batch_size: 8, lr: 0.003, warmup_steps: 4}
checkpoints: {every: 10}
evaluation: {every: 10, sequences: 16}
device: cpu
""")


@pytest.fixture(scope="module")
def data():
    return prepare(RECIPE.data)


def change(**values):
    return override(RECIPE, {key.replace("__", "."): value for key, value in values.items()})


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["decoder", "encoder", "rotary"])
def test_the_loss_falls_below_what_token_frequencies_give(tmp_path, data, variant):
    """The entropy of single tokens is the best that a model without context can do."""
    recipe = change(
        optimisation__steps=150, optimisation__batch_size=32, optimisation__lr=0.01, evaluation__sequences=64,
        models__0__dropout=0.0, models__1__dropout=0.0,
    )  # fmt: skip
    result = train(recipe, variant, 0, folder=tmp_path, data=data)
    share = torch.bincount(data.stream.long()).double() / len(data.stream)
    entropy = float(-(share[share > 0] * share[share > 0].log()).sum())
    curve = [line["val_loss"] for line in read_metrics(tmp_path) if "val_loss" in line]
    assert result.status == "finished" and result.step == 150 and len(curve) == 16
    assert curve[0] == pytest.approx(math.log(data.vocab_size), abs=0.2)  # knows nothing at the start
    # Context is learnt late under the masked objective; frequencies at least must be.
    assert curve[-1] < (entropy - 0.1 if variant != "encoder" else entropy + 0.1)


@pytest.mark.parametrize("variant", ["decoder", "encoder"])
def test_the_first_update_is_that_of_plain_adamw(tmp_path, data, variant):
    """Loss and weights after one update, against the textbook: mean cross-entropy, clipping, Adam with decay."""
    plan = {"optimisation__steps": 1, "optimisation__warmup_steps": 0, "optimisation__grad_clip": 0.05}
    recipe = change(models__0__dropout=0.0, models__1__dropout=0.0, **plan)
    result = train(recipe, variant, 0, folder=tmp_path, data=data)
    chosen = recipe.variant(variant)
    model = build_model(chosen.model(data.vocab_size, 16), 0)
    batch = data.batch(1, 8, chosen.objective, 0)
    at = batch.targets != IGNORED
    loss = -model(input_ids=batch.ids).logits.log_softmax(-1)[at].gather(1, batch.targets[at][:, None]).mean()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert norm > 0.05  # so that clipping is at work
    lr = 0.1 * 0.003  # the only step is the last one, with the smallest rate
    after = load_model(result.checkpoint).model.state_dict()
    for name, p in model.named_parameters():
        g = p.grad * 0.05 / norm
        decay = 0.1 if p.ndim == 2 and not any(word in name for word in ("emb", "wte", "wpe")) else 0.0
        expected = p * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)
        torch.testing.assert_close(after[name], expected.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("variant", ["decoder", "encoder"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, data, variant):
    """With dropout, which draws from the generators, and with a run that looks at validation at other moments."""
    straight = train(RECIPE, variant, 1, folder=tmp_path / "straight", data=data)
    halted = train(RECIPE, variant, 1, folder=tmp_path / "halted", data=data, until=7)
    assert (halted.status, halted.step, halted.checkpoint.name) == ("paused", 7, "step000007")
    torch.manual_seed(99)  # whatever the program does in between
    resumed = train(RECIPE, variant, 1, folder=tmp_path / "halted", data=data, resume=True)
    assert (resumed.status, resumed.step, resumed.tokens) == ("finished", 20, straight.tokens)
    assert (resumed.loss, resumed.val_loss) == (straight.loss, straight.val_loss)
    assert same(weights(straight.checkpoint), weights(resumed.checkpoint))
    states = [load_file(result.checkpoint / "training" / "states.safetensors") for result in (straight, resumed)]
    assert len(states[0]) > 50 and same(*states)
    curves = [[(m["step"], m.get("loss")) for m in read_metrics(tmp_path / name)] for name in ("straight", "halted")]
    assert curves[0] == curves[1] and len(curves[0]) == 21
    # And the test can fail: the state of the generators matters here.
    other = train(RECIPE, variant, 2, folder=tmp_path / "other", data=data)
    assert not same(weights(straight.checkpoint), weights(other.checkpoint))


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, data):
    class Kill:
        def before_step(self, step):
            if step == 15:
                raise KeyboardInterrupt

        def after_backward(self, step): ...

        def after_step(self, step, loss, tokens): ...

        def close(self): ...

    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, "decoder", 0, folder=tmp_path / "killed", data=data, observers=[Kill()])
    with open(tmp_path / "killed" / METRICS, "a") as file:
        file.write('{"step": 15, "tok')  # torn in the middle of a line
    (tmp_path / "killed" / ".step000020.1.tmp").mkdir()  # torn in the middle of a checkpoint
    resumed = train(RECIPE, "decoder", 0, folder=tmp_path / "killed", data=data, resume=True)
    straight = train(RECIPE, "decoder", 0, folder=tmp_path / "straight", data=data)
    assert same(weights(straight.checkpoint), weights(resumed.checkpoint))
    lines = read_metrics(tmp_path / "killed")
    assert [line["step"] for line in lines] == list(range(21))


def test_resuming_something_else_is_refused(tmp_path, data):
    train(RECIPE, "decoder", 0, folder=tmp_path, data=data, until=2)
    with pytest.raises(RunError, match="holds a training already; resume it, or choose another folder"):
        train(RECIPE, "decoder", 0, folder=tmp_path, data=data)
    with pytest.raises(RunError, match=r"was trained with optimisation\.lr=0\.003, the recipe says 0\.1"):
        train(change(optimisation__lr=0.1), "decoder", 0, folder=tmp_path, data=data, resume=True)
    with pytest.raises(RunError, match="was trained with seed=0, the recipe says 1"):
        train(RECIPE, "decoder", 1, folder=tmp_path, data=data, resume=True)
    with pytest.raises(RunError, match="holds no training to resume"):
        train(RECIPE, "decoder", 0, folder=tmp_path / "empty", data=data, resume=True)
    states = newest_resumable(tmp_path) / "training" / "states.safetensors"
    states.write_bytes(states.read_bytes()[:100])
    with pytest.raises(RunError, match="cannot be resumed from: SafetensorError"):
        train(RECIPE, "decoder", 0, folder=tmp_path, data=data, resume=True)


def test_resuming_a_finished_run_changes_nothing(tmp_path, data):
    first = train(RECIPE, "rotary", 0, folder=tmp_path, data=data)
    before = weights(first.checkpoint)
    again = train(RECIPE, "rotary", 0, folder=tmp_path, data=data, resume=True)
    assert (again.status, again.step, again.checkpoint) == ("finished", 20, first.checkpoint)
    assert same(before, weights(again.checkpoint))


@pytest.mark.parametrize("variant", ["decoder", "encoder"])
def test_accumulation_changes_rounding_only(tmp_path, data, variant):
    """8 x 1 = 1 x 8; under the masked objective parts have unequal numbers of scored positions."""
    plain = {"models__0__dropout": 0.0, "models__1__dropout": 0.0, "optimisation__steps": 5,
             "optimisation__warmup_steps": 0}  # fmt: skip
    found = []
    for parts in (1, 8):
        recipe = change(optimisation__accumulation=parts, **plain)
        found.append(train(recipe, variant, 0, folder=tmp_path / str(parts), data=data))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    one, two = (weights(result.checkpoint) for result in found)
    for name in one:
        # Adam divides by the gradient's own size, so where a gradient is rounding alone the update is not.
        assert (one[name] - two[name]).abs().mean() < 1e-5, name


def test_a_run_leaves_the_generators_alone(tmp_path, data):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(change(optimisation__steps=4), "decoder", 0, folder=tmp_path, data=data)
    assert torch.equal(torch.get_rng_state(), before)


# --- trouble ----------------------------------------------------------------------------------------------------------


class Recorder:
    """An observer that writes down what it was told, and may break the model or fail."""

    def __init__(self, poison=None, fail=None):
        self.calls, self.poison, self.fail, self.setting = [], poison, fail, None

    def attach(self, setting):
        self.setting = setting
        self.calls.append("attach")

    def before_step(self, step):
        self._called("before", step)
        if step == self.poison:
            with torch.no_grad():
                next(self.setting.model.parameters()).fill_(float("nan"))

    def after_backward(self, step):
        self._called("backward", step)
        assert all(p.grad is not None for p in self.setting.model.parameters())

    def after_step(self, step, loss, tokens):
        self._called("after", step)
        assert math.isfinite(loss) and tokens == step * 8 * 16

    def close(self):
        self.calls.append("close")

    def _called(self, name, step):
        self.calls.append((name, step))
        if (name, step) == self.fail:
            raise ZeroDivisionError("a measurement went wrong")


@pytest.mark.parametrize("variant", ["decoder", "encoder"])
def test_nan_stops_with_a_record_and_keeps_checkpoints(tmp_path, data, variant):
    result = train(RECIPE, variant, 0, folder=tmp_path, data=data, observers=[Recorder(poison=13)])
    assert (result.status, result.step) == ("diverged", 12)
    assert "the loss was nan at update 13" in result.notes[0] and "try a lower lr" in result.notes[0]
    last = read_metrics(tmp_path)[-1]
    assert (last["step"], last["event"], last["loss"]) == (13, "diverged", None)
    assert [step for step, _ in checkpoints_in(tmp_path)] == [10]
    assert all(value.isfinite().all() for value in weights(tmp_path / "step000010").values())
    assert result.checkpoint == tmp_path / "diverged" and not all(
        value.isfinite().all() for value in weights(result.checkpoint).values()
    )
    assert [cell.step for cell in cells_of([str(tmp_path)])] == [10]
    # The last good checkpoint still has its optimiser, so the run can be taken up from there.
    assert train(RECIPE, variant, 0, folder=tmp_path, data=data, resume=True).status == "finished"


def test_a_gradient_that_overflows_stops_before_it_spoils_the_weights(tmp_path, data):
    class Overflow(Recorder):
        def after_backward(self, step):
            if step == 3:
                next(self.setting.model.parameters()).grad.fill_(float("inf"))

    result = train(RECIPE, "decoder", 0, folder=tmp_path, data=data, observers=[Overflow()])
    assert (result.status, result.step) == ("diverged", 2)
    assert "the norm of the gradient was inf at update 3" in result.notes[0]
    assert all(value.isfinite().all() for value in weights(result.checkpoint).values())


def test_observers_are_told_everything_in_order(tmp_path, data):
    seen = Recorder()
    train(change(optimisation__steps=4), "decoder", 0, folder=tmp_path, data=data, observers=[seen])
    steps = [(name, step) for step in range(1, 5) for name in ("before", "backward", "after")]
    assert seen.calls == ["attach", *steps, "close"]
    assert (seen.setting.step, seen.setting.seed, seen.setting.variant.name) == (0, 0, "decoder")
    assert {site.name for site in discover(seen.setting.model)} >= {"resid.0", "resid.2"}


def test_an_observer_that_cannot_be_attached_is_told_before_training(tmp_path, data):
    class Wrong(Recorder):
        def attach(self, setting):
            raise OptionError("no such site")

    first, wrong = Recorder(), Wrong()
    with pytest.raises(OptionError, match="no such site"):
        train(RECIPE, "decoder", 0, folder=tmp_path, data=data, observers=[first, wrong])
    assert first.calls == ["attach", "close"] and wrong.calls == ["close"]
    assert train(RECIPE, "decoder", 0, folder=tmp_path, data=data).status == "finished"  # the folder is still free


@pytest.mark.parametrize("when", ["before", "backward", "after"])
def test_an_observer_that_fails_does_not_disturb(tmp_path, data, when):
    alone = train(RECIPE, "decoder", 0, folder=tmp_path / "alone", data=data)
    bad, good = Recorder(fail=(when, 3)), Recorder()
    watched = train(RECIPE, "decoder", 0, folder=tmp_path / "watched", data=data, observers=[bad, good])
    assert same(weights(alone.checkpoint), weights(watched.checkpoint)) and watched.status == "finished"
    assert bad.calls[-2:] == [(when, 3), "close"] and good.calls[-2:] == [("after", 20), "close"]
    assert len(watched.notes) == 1
    assert "Recorder failed in" in watched.notes[0] and "ZeroDivisionError: a measurement" in watched.notes[0]


def test_gradients_that_an_observer_leaves_change_nothing(tmp_path, data):
    class Leaves(Recorder):
        def after_step(self, step, loss, tokens):
            super().after_step(step, loss, tokens)
            assert all(p.grad is None for p in self.setting.model.parameters()), "a look has their room"
            for parameter in self.setting.model.parameters():
                parameter.grad = torch.ones_like(parameter)

    alone = train(RECIPE, "decoder", 0, folder=tmp_path / "alone", data=data)
    watched = train(RECIPE, "decoder", 0, folder=tmp_path / "watched", data=data, observers=[Leaves()])
    assert same(weights(alone.checkpoint), weights(watched.checkpoint)) and not watched.notes


def test_compile_that_fails_is_named_or_noted(tmp_path, data):
    """A real failure: no compiler where the compiler should be. torch's own patch gives back what setattr would not."""
    import torch._inductor.config

    with torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": ("no-such-compiler",)}):
        torch._dynamo.reset()
        recipe = change(optimisation__steps=4, compile=True)
        with pytest.raises(OptionError, match=r"torch\.compile does not work here: .*; use compile: false"):
            train(recipe, "rotary", 0, folder=tmp_path / "asked", data=data)
        torch._dynamo.reset()
        auto = train(change(optimisation__steps=4, compile="auto"), "rotary", 0, folder=tmp_path / "auto", data=data)
    torch._dynamo.reset()
    assert torch.compiler.config.force_disable_caches is False
    plain = train(change(optimisation__steps=4), "rotary", 0, folder=tmp_path / "plain", data=data)
    assert "trained without it" in auto.notes[0] and auto.status == "finished"
    assert same(weights(auto.checkpoint), weights(plain.checkpoint))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile of some versions uses what it deprecates
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["decoder", "encoder", "rotary"])
def test_on_a_gpu(tmp_path, data, variant):
    """Autocast, torch.compile, checkpoints and resume; generators of the device are given back too."""
    recipe = change(device="cuda", dtype="bfloat16", compile="auto")
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    result = train(recipe, variant, 0, folder=tmp_path / "gpu", data=data)
    assert result.status == "finished" and result.notes == ()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    exact = change(device="cuda")
    straight = train(exact, variant, 0, folder=tmp_path / "straight", data=data)
    train(exact, variant, 0, folder=tmp_path / "halted", data=data, until=7)
    resumed = train(exact, variant, 0, folder=tmp_path / "halted", data=data, resume=True)
    assert resumed.loss == pytest.approx(straight.loss, rel=1e-4)
    on_cpu = train(RECIPE, "rotary", 0, folder=tmp_path / "cpu", data=data)
    if variant == "rotary":  # no dropout, whose draws differ between devices
        assert straight.loss == pytest.approx(on_cpu.loss, rel=1e-3)
        assert result.loss == pytest.approx(on_cpu.loss, rel=0.05)


def test_bfloat16_keeps_weights_in_full_precision(tmp_path, data):
    result = train(change(dtype="bfloat16"), "decoder", 0, folder=tmp_path / "half", data=data)
    full = train(RECIPE, "decoder", 0, folder=tmp_path / "full", data=data)
    assert {value.dtype for value in weights(result.checkpoint).values()} == {torch.float32}
    assert result.loss != full.loss and result.loss == pytest.approx(full.loss, rel=0.02)


def test_a_device_that_is_not_there_is_named(tmp_path, data):
    with pytest.raises(OptionError, match="device 'qpu' cannot be used here"):
        train(change(device="qpu"), "decoder", 0, folder=tmp_path, data=data)


# --- what lies in the folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["decoder", "encoder", "characters"])
def test_checkpoints_are_models_that_anybody_loads(tmp_path, data, variant):
    recipe = change(checkpoints__log_spaced=True)
    own = prepare(recipe.data, TokenizerSpec(kind="char")) if variant == "characters" else data
    result = train(recipe, variant, 0, folder=tmp_path, data=own)
    assert [cell.step for cell in cells_of([str(tmp_path)])] == [0, 1, 2, 4, 8, 10, 16, 20]
    assert not list(tmp_path.glob(".*"))
    states = [path.name for _, path in checkpoints_in(tmp_path) if (path / "training").exists()]
    assert states == ["step000020"]  # only the newest can be resumed from, unless asked for
    loaded = load_model(result.checkpoint)
    assert loaded.parameters == result.parameters and not loaded.notes
    assert loaded.kind == ("encoder" if variant == "encoder" else "decoder")
    tokenizer = HFTokenizer(loaded.tokenizer)
    text = "The value of x, or None.\n\tNaïve?"
    assert tokenizer.encode(text) == own.tokenizer.encode(text)
    assert tokenizer.special_ids["mask"] == own.mask_id and tokenizer.vocab_size == own.vocab_size
    # The first checkpoint is the fresh model, and the loss of the last one is what the run says.
    fresh = build_model(recipe.variant(variant).model(own.vocab_size, 16), 0).state_dict()
    start = load_model(tmp_path / "step000000").model.state_dict()
    assert all(torch.equal(fresh[name], start[name]) for name in start)
    held = own.validation(16, recipe.variant(variant).objective)
    with torch.no_grad():
        logits = loaded.model(input_ids=held.ids).logits
    at = held.targets != IGNORED
    loss = -logits.log_softmax(-1)[at].gather(1, held.targets[at][:, None]).mean()
    assert float(loss) == pytest.approx(result.val_loss, rel=1e-5)


def test_states_can_be_kept(tmp_path, data):
    train(change(checkpoints__keep_states=True), "rotary", 0, folder=tmp_path, data=data)
    assert all((path / "training").exists() for _, path in checkpoints_in(tmp_path))


def test_metrics_and_progress_say_the_same(tmp_path, data):
    news = []
    result = train(RECIPE, "decoder", 3, folder=tmp_path, data=data, progress=news.append)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(21))
    assert [(n.step, n.loss, n.lr, n.tokens) for n in news] == [
        (line["step"], line["loss"], line["lr"], line["tokens"]) for line in lines[1:]
    ]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10, 20]
    assert lines[-1]["tokens"] == 20 * 8 * 16 == result.tokens and lines[-1]["val_loss"] == result.val_loss
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(lines))
    assert news[-1].tokens_per_second > 0 and news[-1].steps == 20
    about = json.loads((tmp_path / loop.TRAINING_FILE).read_text())
    assert about["seed"] == 3 and about["recipe"] == RECIPE.describe()
    assert about["provenance"]["corpus"]["fingerprint"] == data.corpus["fingerprint"]


def test_metrics_know_no_nan(tmp_path):
    with MetricsWriter(tmp_path / METRICS) as metrics:
        metrics.write(step=1, tokens=2, loss=float("nan"))
    assert read_metrics(tmp_path) == [{"step": 1, "tokens": 2, "loss": None}]


def test_decay_spares_norms_biases_and_embeddings():
    for name in ("decoder", "encoder", "rotary"):
        model = build_model(RECIPE.variant(name).model(300, 16), 0)
        decayed, kept = make_optimiser(model, RECIPE.optimisation).param_groups
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
        assert len(decayed["params"]) + len(kept["params"]) == len(names)
        for parameter in decayed["params"]:
            assert parameter.ndim == 2 and not any(word in names[id(parameter)] for word in ("emb", "wte", "wpe"))
        assert any("emb" in names[id(p)] or "wte" in names[id(p)] for p in kept["params"])


# --- data -------------------------------------------------------------------------------------------------------------


def test_batches_are_a_function_of_seed_and_step(data):
    one, again, next_one, other = (
        data.batch(step, 8, "causal", seed) for step, seed in ((5, 0), (5, 0), (6, 0), (5, 1))
    )
    assert torch.equal(one.ids, again.ids)
    assert not torch.equal(one.ids, next_one.ids) and not torch.equal(one.ids, other.ids)
    torch.testing.assert_close(one.targets[:, :-1], one.ids[:, 1:])
    assert (one.targets[:, -1] == IGNORED).all() and one.scored == 8 * 15


def test_every_window_is_read_once_a_round_and_none_is_held_out(data):
    windows = len(data.starts)
    size = 7  # does not divide the number of windows: batches cross the end of a round
    steps = -(-2 * windows // size)
    read = torch.cat([data.batch(step, size, "causal", 0).ids for step in range(1, steps + 1)])[: 2 * windows]
    expected = data.stream[torch.from_numpy(data.starts)[:, None] + torch.arange(16)].long()

    def sorted_rows(rows):
        return torch.tensor(sorted(rows.tolist()))

    assert torch.equal(sorted_rows(read[:windows]), sorted_rows(expected))
    assert torch.equal(sorted_rows(read[windows:]), sorted_rows(expected))
    assert not torch.equal(read[:windows], read[windows:])
    assert not set(data.starts) & set(data.held_out)
    assert len(data.held_out) == round(0.05 * (len(data.held_out) + windows))


def test_the_masked_objective_scores_masked_positions_only(data):
    ids = torch.randint(0, 300, (400, 250), generator=torch.Generator().manual_seed(0))
    masked = mask_tokens(ids, 300, np.random.default_rng(0))
    chosen = masked.targets != IGNORED
    n = ids.numel()
    assert torch.equal(masked.targets[chosen], ids[chosen])
    assert torch.equal(masked.ids[~chosen], ids[~chosen])
    assert abs(chosen.double().mean() - 0.15) < 5 * math.sqrt(0.15 * 0.85 / n)
    hidden = (masked.ids == 300)[chosen].double()
    kept = (masked.ids == ids)[chosen].double()
    se = math.sqrt(0.25 / len(hidden))
    assert abs(hidden.mean() - 0.8) < 5 * se
    assert abs(kept.mean() - (0.1 + 0.1 / 300)) < 5 * se  # a random token may be the right one
    assert masked.ids.max() == 300
    assert torch.equal(mask_tokens(ids, 300, np.random.default_rng(0)).ids, masked.ids)
    first, second, other = (data.batch(step, 8, "masked", seed) for step, seed in ((1, 0), (2, 0), (1, 1)))
    places = [batch.targets != IGNORED for batch in (first, second, other)]
    assert not torch.equal(places[0], places[1]) and not torch.equal(places[0], places[2])


def test_the_loss_of_an_unscored_position_does_not_matter(tmp_path, data):
    """The gradient of the masked loss with respect to logits is zero wherever nothing is masked."""
    part = data.batch(1, 8, "masked", 0)
    logits = torch.randn(8, 16, data.vocab_size, requires_grad=True)

    class Fixed:
        def __init__(self):
            self.logits = logits

    run = loop._Run(RECIPE, RECIPE.variant("encoder"), 0, tmp_path, torch.device("cpu"), data)
    run._summed_loss(lambda input_ids: Fixed(), part).backward()
    touched = logits.grad.abs().sum(dim=-1) > 0
    assert torch.equal(touched, part.targets != IGNORED) and 0 < part.scored < 8 * 16


def test_probes_are_held_out_and_apart_from_validation(data):
    probe = data.probe(8)
    held = {tuple(row) for row in data.stream[torch.from_numpy(data.held_out)[:, None] + torch.arange(16)].tolist()}
    assert probe.ids.shape == (8, 16) and probe.mask.all()
    assert all(tuple(row) in held for row in probe.ids.tolist())
    validation = {tuple(row) for row in data.validation(8, "causal").ids.tolist()}
    assert not validation & {tuple(row) for row in probe.ids.tolist()}
    whole = data.probe(10**6)
    assert len(whole.ids) == len(data.held_out)
    assert torch.equal(whole.special, whole.ids == data.tokenizer.special_ids["eos"])
    assert torch.equal(whole.positions[0], torch.arange(16))


def test_characters_go_through_transformers_unchanged():
    data = prepare(RECIPE.data, TokenizerSpec(kind="char"))
    assert isinstance(data.tokenizer, CharTokenizer)
    tokenizer = as_transformers(data)
    text = "def f(x):\n\treturn 'é✓' + \"\\n\"  # ok "
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == data.tokenizer.encode(text)
    known = "".join(chr(code) for code in data.tokenizer.alphabet)
    assert tokenizer.decode(data.tokenizer.encode(known)) == known


def test_too_little_text_is_told(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("one short line of text")
    spec = RECIPE.data.model_copy(update={"source": str(path), "tokenizer": TokenizerSpec(kind="char")})
    with pytest.raises(TooFewTokensError, match="gives 1 window"):
        prepare(spec)
