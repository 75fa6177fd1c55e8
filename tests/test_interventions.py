"""Interventions on token frequency: exponents are those asked for, nothing else changes, and runs resume exactly."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.errors import DegenerateError, OptionError, RunError
from anisoscope.models.build import build_model
from anisoscope.text.frequency import TokenCounts, frequency_bins
from anisoscope.text.synthetic import ZipfLanguage
from anisoscope.train.data import IGNORED, as_transformers, prepare
from anisoscope.train.interventions import (
    LEAST_WINDOWS,
    FrequencySpec,
    plan_frequency,
    zipf_exponent,
    zipf_weights,
)
from anisoscope.train.languages import LanguageChange
from anisoscope.train.loop import train
from anisoscope.train.metrics import read_metrics
from anisoscope.train.recipe import load_recipe, override, parse_recipe
from anisoscope.watching.binned import _mean_of, losses_by_frequency
from anisoscope.watching.study import prepare_all
from anisoscope.watching.watcher import probe_of

SIZES = "architecture: llama, layers: 1, width: 16, heads: 2"
RECIPE = parse_recipe(f"""
name: tiny
data: {{max_chars: 60000, tokenizer: {{kind: bpe, vocab_size: 300}}, sequence_length: 16}}
models:
  - {{name: plain, objective: causal, {SIZES}}}
  - {{name: loss, objective: causal, {SIZES}, frequency: {{method: loss, exponent: 0.3}}}}
  - {{name: placebo, objective: causal, {SIZES}, frequency: {{method: loss, exponent: 0.3, placebo: true}}}}
  - {{name: resample, objective: causal, {SIZES}, frequency: {{method: resample, exponent: 2.0}}}}
  - {{name: masked, objective: masked, {SIZES}, frequency: {{method: loss, exponent: 1.2}}}}
optimisation: {{steps: 12, batch_size: 8, lr: 0.003, warmup_steps: 4}}
checkpoints: {{every: 6}}
evaluation: {{every: 6, sequences: 16}}
device: cpu
monitor: false
""")
LANGUAGE = parse_recipe(f"""
name: tiny-language
data:
  source: zipf
  tokenizer: {{kind: ids, vocab_size: 50}}
  language: {{exponent: 1.0, order: 1, tokens: 20000}}
  sequence_length: 16
models:
  - {{name: even, objective: causal, {SIZES}, language: {{exponent: 0.0}}}}
  - {{name: zipf, objective: causal, {SIZES}}}
  - {{name: weighted, objective: causal, {SIZES}, frequency: {{method: loss, exponent: 0.5}}}}
optimisation: {{steps: 12, batch_size: 8, lr: 0.003}}
checkpoints: {{every: 6}}
evaluation: {{every: 6, sequences: 16}}
device: cpu
monitor: false
""")


@pytest.fixture(scope="module")
def data():
    return prepare(RECIPE.data)


@pytest.fixture(scope="module")
def corpus():
    """More of the embedded text, for exponents."""
    return prepare(override(RECIPE, {"data.max_chars": 400_000, "data.tokenizer.vocab_size": 600}).data)


def targets_of(data):
    at = torch.from_numpy(data.starts)[:, None] + torch.arange(data.sequence_length)
    return data.stream[at].long()[:, 1:]


def likeliest(mass):
    """The exponent under which types in the order of ``mass`` are likeliest, by a general minimiser."""
    rank = np.log(np.arange(1, len(mass) + 1))
    share = np.asarray(mass) / np.sum(mass)
    found = minimize_scalar(
        lambda s: s * float(share @ rank) + math.log(np.exp(-s * rank).sum()),
        bounds=(-1, 6),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return found.x


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- weights in the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("asked", [0.0, 0.5, 1.0, 2.5])
def test_on_an_exact_zipf_law_the_power_is_the_ratio_of_exponents(own, asked):
    counts = 1e6 * torch.arange(1, 401, dtype=torch.float64) ** -own
    shuffled = counts[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    assert zipf_exponent(shuffled) == pytest.approx(own, abs=1e-9)
    power, table = zipf_weights(shuffled, asked)
    assert power == pytest.approx(asked / own, abs=1e-8)
    assert zipf_exponent(shuffled, table) == pytest.approx(asked, abs=1e-8)
    assert float(shuffled @ table / shuffled.sum()) == pytest.approx(1.0, abs=1e-12)
    law = (shuffled * table).sort(descending=True).values
    assert torch.allclose(law / law[0], torch.arange(1, 401, dtype=torch.float64) ** -asked, rtol=1e-6)


@pytest.mark.parametrize("asked", [0.0, 0.5, 1.0, 1.5])
def test_on_a_text_the_weighted_law_has_the_exponent_asked_for(corpus, asked):
    """By another fit of the same law, on what the batches of one round hold; and the mean weight there is 1."""
    changed = corpus.with_frequency(FrequencySpec(method="loss", exponent=asked), "causal")
    plan, plain = changed.frequency, targets_of(corpus)
    counts = torch.bincount(plain.flatten(), minlength=corpus.vocab_size).double()
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
    batch = changed.batch(1, len(changed.starts), "causal", seed=3)
    scored = batch.targets != IGNORED
    mass = torch.zeros(corpus.vocab_size, dtype=torch.float64)
    mass.index_add_(0, batch.targets[scored], batch.weights[scored].double())
    assert likeliest(mass[order].numpy()) == pytest.approx(asked, abs=1e-4) and plan.reached.stderr < 0.02
    assert abs(plan.reached.value - asked) < min(plan.reached.stderr, 1e-9) and not plan.short
    assert float(batch.weights[scored].double().mean()) == pytest.approx(1.0, abs=1e-6)
    w = batch.weights[scored].double()
    assert plan.effective_share == pytest.approx(float(1 / w.square().mean()), rel=1e-5)
    assert (torch.bincount(batch.targets[scored], minlength=corpus.vocab_size) == counts).all()


def test_the_exponent_of_a_text_is_that_of_its_counts(corpus):
    plan, plain = corpus.with_frequency(None, "causal").frequency, targets_of(corpus)
    expected = TokenCounts.of(plain, corpus.vocab_size).zipf_exponent()
    assert plan.method == "none" and plan.reached == plan.own
    assert plan.own.value == pytest.approx(expected.value, abs=1e-9)
    # Documents are about different things, so stretches of the text know less than as many independent tokens.
    assert plan.own.stderr > expected.stderr and plan.own.over == "stretches of windows"


def test_its_error_is_that_of_other_texts():
    """Tokens drawn independently: the spread of fits over 60 texts is the standard error, and their mean the truth."""
    language = ZipfLanguage(30, 0.8, order=0)
    found = [plan_frequency(None, language.sample(8000, seed).view(-1, 40), 30).own for seed in range(60)]
    values = np.array([one.value for one in found])
    claimed = np.mean([one.stderr for one in found])
    assert 0.7 < values.std(ddof=1) / claimed < 1.35
    assert abs(values.mean() - 0.8) < 5 * values.std(ddof=1) / 60**0.5


def test_the_error_of_a_weighted_law_is_that_of_other_texts():
    """Weights are held, as they are in a training: only the text is another."""
    language = ZipfLanguage(30, 0.8, order=0)
    texts = [language.sample(8000, seed).view(-1, 40) for seed in range(60)]
    plan = plan_frequency(FrequencySpec(method="loss", exponent=0.2), texts[0], 30)
    counts = [torch.bincount(text.flatten(), minlength=30).double() for text in texts]
    values = np.array([zipf_exponent(one, plan.table) for one in counts])
    assert 0.7 < values.std(ddof=1) / plan.reached.stderr < 1.35


def test_the_largest_weight_is_kept_and_what_it_costs_is_told(corpus):
    counts = torch.bincount(targets_of(corpus).flatten(), minlength=corpus.vocab_size).double()
    seen = counts > 0
    free = corpus.with_frequency(FrequencySpec(method="loss", exponent=0.0), "causal").frequency
    for asked, short in ((0.0, True), (0.5, False)):
        spec = FrequencySpec(method="loss", exponent=asked, largest_weight=5.0)
        plan = corpus.with_frequency(spec, "causal").frequency
        assert float(plan.table[seen].max()) <= 5.0 + 1e-9 < float(free.table[seen].max())
        assert float(counts @ plan.table / counts.sum()) == pytest.approx(1.0, abs=1e-9)
        assert plan.short is short and plan.reached.value == pytest.approx(zipf_exponent(counts, plan.table), abs=1e-9)
        assert plan.reached.value >= asked - 1e-9


def test_the_loss_of_an_update_is_the_weighted_mean(tmp_path, data):
    result = train(RECIPE, "loss", 0, folder=tmp_path, data=data, until=1)
    changed = data.with_frequency(RECIPE.variant("loss").frequency, "causal")
    batch = changed.batch(1, 8, "causal", 0)
    model = build_model(RECIPE.variant("loss").model(data.vocab_size, 16), 0)
    logits = model(input_ids=batch.ids).logits[:, :-1].detach()
    expected = total = 0.0
    for row, targets in zip(logits.log_softmax(-1), batch.targets[:, :-1], strict=True):
        for one, target in zip(row, targets, strict=True):
            expected -= float(changed.frequency.table[target]) * float(one[target])
            total += 1
    assert result.loss == pytest.approx(expected / total, rel=1e-5)


def test_a_placebo_has_the_same_weights_and_favours_no_type(corpus):
    spec = FrequencySpec(method="loss", exponent=0.3)
    real = corpus.with_frequency(spec, "causal")
    dealt = corpus.with_frequency(spec.model_copy(update={"placebo": True}), "causal")
    one, two = (d.batch(1, len(d.starts), "causal", seed=0) for d in (real, dealt))
    assert torch.equal(one.targets, two.targets) and dealt.frequency.reached == dealt.frequency.own
    scored = one.targets != IGNORED
    first, second = one.weights[scored].double(), two.weights[scored].double()
    n = len(first)
    assert abs(float(second.mean() - 1)) < 5 * float(first.std()) / n**0.5
    assert abs(float(second.square().mean() - first.square().mean())) < 5 * float(first.square().std()) / n**0.5
    frequent = torch.bincount(one.targets[scored]).double()[one.targets[scored]].log()
    stacked = torch.stack([frequent, first, second])
    assert float(torch.corrcoef(stacked)[0, 1]) < -0.5 and abs(float(torch.corrcoef(stacked)[0, 2])) < 5 / n**0.5


# --- resampled windows ------------------------------------------------------------------------------------------------


def test_an_exponent_within_reach_is_reached_and_one_beyond_is_told(corpus):
    own = corpus.with_frequency(None, "causal").frequency.own.value
    near = corpus.with_frequency(FrequencySpec(method="resample", exponent=own + 0.02), "causal").frequency
    assert near.reached.value == pytest.approx(own + 0.02, abs=1e-7) and not near.short
    assert near.effective_share > 0.5
    for asked in (0.0, 3.0):
        far = corpus.with_frequency(FrequencySpec(method="resample", exponent=asked), "causal").frequency
        assert far.short and far.effective_share == pytest.approx(LEAST_WINDOWS, abs=1e-6)
        assert (far.reached.value < own - 0.02) if asked == 0.0 else (far.reached.value > own + 0.02)
        assert far.reached.stderr > 0 and far.shares.sum() == pytest.approx(1.0)


def test_a_placebo_draws_as_unevenly_and_leaves_the_exponent(corpus):
    spec = FrequencySpec(method="resample", exponent=0.0)
    real = corpus.with_frequency(spec, "causal").frequency
    dealt = corpus.with_frequency(spec.model_copy(update={"placebo": True}), "causal").frequency
    assert np.array_equal(np.sort(real.shares), np.sort(dealt.shares)) and dealt.method == "placebo"
    assert dealt.effective_share == real.effective_share and not dealt.short
    assert abs(dealt.reached.value - real.own.value) < 5 * dealt.reached.stderr
    assert abs(real.reached.value - real.own.value) > 10 * dealt.reached.stderr


def test_the_windows_of_rounds_have_the_exponent_that_is_told(corpus):
    changed = corpus.with_frequency(FrequencySpec(method="resample", exponent=3.0), "causal")
    plan, count = changed.frequency, len(changed.starts)
    plain = torch.bincount(targets_of(corpus).flatten(), minlength=corpus.vocab_size)
    order = plain.argsort(descending=True, stable=True)[: int((plain > 0).sum())]
    drawn = np.zeros(count)
    mass = torch.zeros(corpus.vocab_size, dtype=torch.int64)
    for number in range(1, 5):
        batch = changed.batch(number, count, "causal", seed=1)
        mass += torch.bincount(batch.targets[batch.targets != IGNORED], minlength=corpus.vocab_size)
        own = np.bincount(plan.windows(np.arange(count), number - 1, 1), minlength=count)
        assert (np.abs(own - count * plan.shares) < 1).all()  # as often as its share says, rounded
        drawn += own
    assert drawn.sum() == 4 * count
    assert likeliest(mass[order].double().numpy()) == pytest.approx(plan.reached.value, abs=plan.reached.stderr)


def test_drawn_windows_come_in_the_order_of_a_plain_run(corpus, seed):
    plan = corpus.with_frequency(FrequencySpec(method="resample", exponent=3.0), "causal").frequency
    order = np.random.default_rng(seed).permutation(len(plan.shares))
    equal = replace(plan, shares=np.full(len(order), 1 / len(order)))
    assert np.array_equal(equal.windows(order, 2, seed), order)
    drawn = plan.windows(order, 2, seed)
    # Where a plain run reads the first window of the text, this one reads the first that was drawn, and so on.
    assert (np.diff(drawn[np.argsort(order)]) >= 0).all() and not (np.diff(drawn) >= 0).all()


def test_no_other_shares_with_that_exponent_are_nearer_to_equal_ones(corpus, seed):
    """Shares moved along what changes neither their sum nor the mean log rank have less entropy."""
    plan = corpus.with_frequency(FrequencySpec(method="resample", exponent=3.0), "causal").frequency
    log_share = np.log(plan.shares)  # a straight line in the mean log rank of windows
    kept = np.linalg.qr(np.stack([np.ones(len(log_share)), log_share], axis=1))[0]
    move = np.random.default_rng(seed).standard_normal(len(log_share)) * plan.shares
    move -= kept @ (kept.T @ move)
    move *= 0.3 * np.min(plan.shares / np.maximum(np.abs(move), 1e-300))
    other = plan.shares + move
    entropy = lambda p: -float((p * np.log(p)).sum())  # noqa: E731
    assert other.min() > 0 and other.sum() == pytest.approx(1.0) and entropy(other) < entropy(plan.shares)


# --- nothing else changes ---------------------------------------------------------------------------------------------


def test_without_a_change_of_exponent_a_run_is_the_plain_one_bit_for_bit(tmp_path, data):
    alone = override(RECIPE, {"models": [RECIPE.describe()["models"][0]]})
    plain = train(alone, "plain", 0, folder=tmp_path / "alone", data=data)
    own = data.with_frequency(None, "causal").frequency.own.value
    recipe = override(RECIPE, {"models.loss.frequency.exponent": own, "models.resample.frequency.exponent": own})
    for name in ("plain", "loss", "resample"):
        found = train(recipe, name, 0, folder=tmp_path / name, data=data)
        assert (found.loss, found.val_loss) == (plain.loss, plain.val_loss)
        assert same(weights(found.checkpoint), weights(plain.checkpoint)), name


def test_a_change_of_exponent_changes_the_weights_and_not_what_they_are_judged_by(tmp_path, data):
    found = {}
    for name in ("plain", "loss", "placebo", "resample"):
        result = train(RECIPE, name, 0, folder=tmp_path / name, data=data, until=6)
        found[name] = [line["val_loss"] for line in read_metrics(result.folder) if "val_loss" in line]
    assert len({values[0] for values in found.values()}) == 1  # same initial weights, same windows, no weights
    assert len({values[1] for values in found.values()}) == 4
    changed = data.with_frequency(RECIPE.variant("resample").frequency, "causal")
    assert changed.validation(16, "causal").weights is None
    assert torch.equal(changed.probe(8).ids, data.probe(8).ids)
    one = data.with_frequency(RECIPE.variant("loss").frequency, "causal").batch(3, 8, "causal", 0)
    assert torch.equal(one.ids, data.batch(3, 8, "causal", 0).ids)  # the same text in the same order


@pytest.mark.parametrize("name", ["loss", "placebo", "resample", "masked"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, data, name):
    whole = train(RECIPE, name, 0, folder=tmp_path / "whole", data=data)
    train(RECIPE, name, 0, folder=tmp_path / "cut", data=data, until=5)
    ended = train(RECIPE, name, 0, folder=tmp_path / "cut", data=data, resume=True)
    assert (ended.loss, ended.val_loss) == (whole.loss, whole.val_loss)
    assert same(weights(ended.checkpoint), weights(whole.checkpoint))


def test_going_on_with_another_exponent_is_refused(tmp_path, data):
    train(RECIPE, "loss", 0, folder=tmp_path, data=data, until=2)
    with pytest.raises(RunError, match=r"was trained with model\.frequency=.*'exponent': 0\.3"):
        train(
            override(RECIPE, {"models.loss.frequency.exponent": 0.4}), "loss", 0,
            folder=tmp_path, data=data, resume=True,
        )  # fmt: skip


def test_accumulation_splits_weights_with_their_targets(data):
    changed = data.with_frequency(RECIPE.variant("loss").frequency, "causal")
    whole = changed.batch(1, 8, "causal", 0)
    parts = whole.split(4)
    assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    scored = whole.targets != IGNORED
    assert torch.equal(whole.weights[scored], changed.frequency.table[whole.targets[scored]].float())


# --- languages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
def test_the_text_of_a_language_has_its_exact_law(exponent):
    made = prepare(LANGUAGE.data, None, LanguageChange(exponent=exponent))
    counts = torch.bincount(made.stream.long(), minlength=52).double()
    law = made.language.unigram
    assert counts[0] == 0 and made.mask_id == 51 and made.vocab_size == 52 and made.corpus["characters"] == 20_000
    # Tokens of order 1 are dependent: an effective number of a quarter is what the kernels leave at least here.
    z = (counts[1:51] / 20_000 - law) / (law * (1 - law) / 5_000).sqrt()
    assert float(z.abs().max()) < 5
    plan = made.with_frequency(None, "causal").frequency
    assert plan.method == "language" and plan.reached.value == exponent and plan.reached.stderr is None
    assert plan.entropy_rate == made.language.entropy_rate and plan.describe()["entropy_rate"] > 0


def test_languages_of_two_exponents_share_every_draw():
    one, two = (prepare(LANGUAGE.data, None, LanguageChange(exponent=x)) for x in (1.0, 1.0 + 1e-9))
    assert float((one.stream == two.stream).double().mean()) > 0.999
    assert one.corpus["fingerprint"] != two.corpus["fingerprint"]
    assert np.array_equal(one.held_out, two.held_out)
    models = [LANGUAGE.variant(name).model(52, 16) for name in ("even", "zipf")]
    assert models[0] == models[1]


def test_a_language_is_trained_on_and_goes_on_bit_for_bit(tmp_path):
    data = prepare_all(LANGUAGE)
    assert len(data) == 2  # one for each exponent
    for variant in LANGUAGE.models:
        own = data[LANGUAGE.data.tokenizer, variant.language]
        assert own.language.exponent == (0.0 if variant.name == "even" else 1.0)
        whole = train(LANGUAGE, variant, 0, folder=tmp_path / variant.name, data=own)
        train(LANGUAGE, variant, 0, folder=tmp_path / f"{variant.name}-cut", data=own, until=5)
        ended = train(LANGUAGE, variant, 0, folder=tmp_path / f"{variant.name}-cut", data=own, resume=True)
        assert same(weights(ended.checkpoint), weights(whole.checkpoint))
        text = own.tokenizer.decode(own.stream[:40].tolist())
        assert as_transformers(own)(text)["input_ids"] == own.stream[:40].tolist()
    weighted = data[LANGUAGE.data.tokenizer, None].with_frequency(LANGUAGE.variant("weighted").frequency, "causal")
    assert weighted.frequency.method == "loss" and weighted.frequency.entropy_rate is not None
    assert weighted.frequency.reached.value == pytest.approx(0.5, abs=1e-9)


def test_no_model_goes_below_the_entropy_rate(tmp_path):
    recipe = override(LANGUAGE, {"optimisation.steps": 150, "optimisation.batch_size": 32, "optimisation.lr": 0.01})
    data = prepare_all(recipe)[LANGUAGE.data.tokenizer, None]
    result = train(recipe, "zipf", 0, folder=tmp_path, data=data)
    rate = data.language.entropy_rate.value
    assert rate - 0.15 < result.val_loss < data.language.unigram_entropy  # 16 windows of sampling below it


# --- loss by frequency ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_losses_by_frequency_are_parts_of_the_whole(data, kind):
    model = build_model(RECIPE.variant("plain" if kind == "causal" else "masked").model(data.vocab_size, 16), 0).eval()
    probe = probe_of(data, override(RECIPE, {"monitor": True}).monitor, 8)
    loss = CausalLoss() if kind == "causal" else MaskedLoss(mask_id=data.mask_id)
    found = losses_by_frequency(model, probe, loss, frequency_bins(data.counts, 4))
    weights = [loss.predicted(batch) for batch in probe]
    whole = sum(float(loss(model, batch).detach()) * w for batch, w in zip(probe, weights, strict=True)) / sum(weights)
    assert sum(one.n for one in found.values()) == sum(weights) and len(found) == 4
    assert sum(one.n * one.value for one in found.values()) / sum(weights) == pytest.approx(whole, rel=1e-5)
    assert all(one.over == "sequences" and one.stderr > 0 for one in found.values())


def test_a_bin_in_few_sequences_has_no_error_bar():
    """The loss of one sequence alone has no spread over sequences, and an error of 0 would be a claim."""
    sums, counts = torch.zeros(32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    sums[3], counts[3] = 6.0, 2.0
    alone = _mean_of(sums, counts)
    assert (alone.value, alone.n, alone.stderr) == (3.0, 2, None) and "1 sequences" in alone.notes[0]
    sums[8:24], counts[8:24] = torch.arange(16).double(), 1.0
    some = _mean_of(sums, counts)
    left = (sums - some.value * counts)[counts > 0]
    assert some.dof == 16 and some.n == 18 and some.over == "sequences"
    assert some.stderr == pytest.approx(float(left.square().sum() * 17 / 16) ** 0.5 / 18)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models.loss.frequency.exponent": math.nan}, "models[1].frequency.exponent is nan; input should be a finite"),
        ({"models.loss.frequency.exponent": -1}, "models[1].frequency.exponent is -1; input should be greater than or"),
        ({"models.loss.frequency.exponent": math.inf}, "models[1].frequency.exponent is inf"),
        ({"models.loss.frequency.method": "los"}, "frequency.method is 'los'; input should be 'loss' or 'resample'"),
        ({"models.loss.frequency.expnent": 1}, "unknown key models[1].frequency.expnent; did you mean 'exponent'?"),
        ({"models.plain.frequency": {"method": "loss"}}, "models[0].frequency.exponent is missing"),
        ({"models.loss.frequency.largest_weight": 1.0}, "frequency.largest_weight is 1.0; input should be greater"),
        ({"models.resample.frequency.largest_weight": 9}, "largest_weight is for method loss; resampling has no"),
        ({"models.plain.language": {"exponent": 1}}, "a language is for source zipf, not for 'embedded'"),
        ({"data.language": {"exponent": 1}}, "data: a language is for source zipf, not for 'embedded'"),
        ({"data.source": "zipf", "data.language": {}}, "is ids, which tokenizer bpe cannot read; use tokenizer: {kind"),
        ({"data.tokenizer": {"kind": "ids", "vocab_size": 9}}, "tokenizer ids is for source zipf, whose text is ids"),
    ],
)
def test_bad_input_is_told_in_one_line(changes, message):
    with pytest.raises(OptionError) as error:
        override(RECIPE, changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.language": None}, "source zipf needs a language, such as language: {exponent: 1.0}"),
        ({"data.tokenizer.vocab_size": 2}, "a language needs vocab_size, 3 or more"),
        ({"data.language.order": 3}, "data.language.order is 3; input should be 0, 1 or 2"),
        ({"data.language.fresh": 0}, "data.language.fresh is 0; input should be greater than 0"),
        ({"models.even.tokenizer": {"kind": "char"}}, "is ids, which tokenizer char cannot read"),
        ({"models.even.language.exponent": -0.5}, "models[0].language.exponent is -0.5"),
    ],
)
def test_a_bad_language_is_told_in_one_line(changes, message):
    with pytest.raises(OptionError) as error:
        override(LANGUAGE, changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_two_types_have_no_exponent():
    with pytest.raises(DegenerateError, match="2 types are targets in the training windows; a Zipf law needs 3"):
        plan_frequency(None, torch.tensor([[0, 1, 1, 0]]), 5)


def test_the_recipes_differ_in_frequency_alone():
    for name in ("frequency", "zipf-languages"):
        recipe = load_recipe(name)
        assert len({model.model(100, 8) for model in recipe.models}) == 1
        assert len(recipe.seeds) == 3 and recipe.monitor.tangent is not None
        changed = {f"models.{model.name}.width": 32 for model in recipe.models} | {"monitor.tangent.rank": 8}
        assert {model.width for model in override(recipe, changed).models} == {32}
    asked = {m.name: m.frequency and m.frequency.exponent for m in load_recipe("frequency").models}
    assert asked["plain"] is None and {asked[name] for name in ("loss-00", "loss-05", "loss-15")} == {0.0, 0.5, 1.5}
    assert [m.language.exponent for m in load_recipe("zipf-languages").models] == [0.0, 0.5, 1.0, 1.5]
