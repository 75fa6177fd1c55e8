"""Quality beside geometry: probes against a slow oracle, planted signals and noise, labels of real text, a real run."""

import time

import numpy as np
import pytest
import torch

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.errors import (
    EmptyInputError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TooFewRowsError,
)
from anisoscope.models.build import build_model
from anisoscope.monitoring.linear_probes import PENALTIES, QUARTERS, Classes, Quantity, ratio_over_sequences, tell
from anisoscope.monitoring.quality import HIDDEN, Pages, QualityAnalysis, Spelling, TokenAccuracy
from anisoscope.monitoring.views import SiteView
from anisoscope.runs.store import RunReader
from anisoscope.text.batches import Batch
from anisoscope.text.tokens import CharTokenizer, train_bpe
from anisoscope.train.recipe import override, parse_recipe
from anisoscope.train.watch import MonitorSpec
from anisoscope.watching.study import prepare_all, run_study

PROBES = ("quality.token_back_1", "quality.token_back_4", "quality.position", "quality.casing", "quality.word_start")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def rows(n=600, d=12, length=20, seed=0):
    """Rows that are correlated, anisotropic and far from zero, in sequences."""
    g = generator(seed)
    mix = torch.randn(d, d, generator=g) * torch.logspace(0, -2, d)
    return torch.randn(n, d, generator=g) @ mix + 5, torch.arange(n) // length


def everything(n):
    return torch.ones(n, dtype=torch.bool)


# --- the probe against a slow one -------------------------------------------------------------------------------------


def slow_fit(x, y, penalty):
    """Ridge regression with an intercept, by least squares on rows that were made longer."""
    mean, d = x.mean(axis=0), x.shape[1]
    left, centre = x - mean, y.mean(axis=0)
    unit = penalty * (left**2).sum() / d
    long_x = np.concatenate([left, np.sqrt(unit) * np.eye(d)])
    long_y = np.concatenate([y - centre, np.zeros((d, y.shape[1]))])
    weights = np.linalg.lstsq(long_x, long_y, rcond=None)[0]
    return lambda rows: centre + (rows - mean) @ weights


def slow_answers(x, y, sequences):
    """Each row's answer by a probe of the other half; the penalty of a half is found on its two quarters."""
    order = {number: i for i, number in enumerate(sorted(set(sequences.tolist())))}
    quarter = np.array([order[number] % 4 for number in sequences.tolist()])
    answers, constant, chosen = np.empty_like(y), np.empty_like(y), []
    for half in ((0, 2), (1, 3)):
        a, b = quarter == half[0], quarter == half[1]
        errors = []
        for penalty in PENALTIES:
            one, other = slow_fit(x[a], y[a], penalty), slow_fit(x[b], y[b], penalty)
            errors.append(((one(x[b]) - y[b]) ** 2).sum() + ((other(x[a]) - y[a]) ** 2).sum())
        chosen.append(PENALTIES[int(np.argmin(errors))])
        rest = ~(a | b)
        answers[rest] = slow_fit(x[a | b], y[a | b], chosen[-1])(x[rest])
        constant[rest] = y[a | b].mean(axis=0)
    return answers, constant, tuple(chosen)


def test_classes_are_told_as_by_a_slow_probe(seed):
    x, sequences = rows(seed=seed)
    noise = torch.randn(len(x), generator=generator(seed + 1))
    labels = (x[:, 0] + 0.3 * x[:, 5] + noise).argsort().argsort() * 5 // len(x)
    scored = torch.rand(len(x), generator=generator(seed + 2)) < 0.8
    told = tell(x, sequences, {"label": Classes(labels, 5, scored)})["label"]
    one_hot = np.eye(5)[labels.numpy()]
    answers, constant, penalties = slow_answers(x.double().numpy(), one_hot, sequences)
    right = [one.argmax(axis=1) == labels.numpy() for one in (answers, constant)]
    keep = scored.numpy()
    assert told.penalties == penalties
    assert told.probe.value == right[0][keep].mean() and told.baseline.value == right[1][keep].mean()
    assert told.gain.value == pytest.approx(told.probe.value - told.baseline.value, abs=1e-12)
    assert told.probe.n == keep.sum() and told.probe.value > told.baseline.value + 0.1


def test_a_number_is_told_as_by_a_slow_probe(seed):
    x, sequences = rows(seed=seed)
    values = x[:, 1] - 2 * x[:, 3] + torch.randn(len(x), generator=generator(seed + 9))
    told = tell(x, sequences, {"other": Quantity(x[:, 2] * 3), "number": Quantity(values)})["number"]
    y = values.double().numpy()[:, None]
    answers, constant, penalties = slow_answers(x.double().numpy(), y, sequences)
    expected = 1 - ((y - answers) ** 2).sum() / ((y - constant) ** 2).sum()
    assert told.penalties == penalties and told.probe.value == pytest.approx(expected, abs=1e-9)
    left, spread = (y - answers)[:, 0] ** 2, (y - constant)[:, 0] ** 2
    parts = [
        sum(spread[i] - left[i] - expected * spread[i] for i in range(len(y)) if sequences[i] == number)
        for number in range(30)
    ]
    stderr = np.sqrt(sum(part**2 for part in parts) * 30 / 29) / spread.sum()
    assert told.probe.stderr == pytest.approx(stderr, rel=1e-6) and told.probe.dof == 29


def test_a_planted_signal_has_its_known_share(seed):
    """y = s + e of variances 4 and 1 with s linear in the rows: R² is 0.8, less what fitting 20 columns costs."""
    n, d = 8000, 20
    x = torch.randn(n, d, generator=generator(seed))
    weights = torch.randn(d, generator=generator(seed + 1))
    y = 2 * x @ (weights / weights.norm()) + torch.randn(n, generator=generator(seed + 2))
    told = tell(x, torch.arange(n) // 20, {"y": Quantity(y)})["y"]
    assert abs(told.probe.value - (1 - 0.2 * (1 + d / (n / 2)))) < 5 * told.probe.stderr
    assert told.baseline.value == 0 and told.baseline.stderr is None


def test_a_planted_class_has_its_known_share(seed):
    """A coin that shows in one column, with errors: the probe is right as often as the column is."""
    n = 8000
    coin = torch.randint(0, 2, (n,), generator=generator(seed))
    shown = torch.where(torch.rand(n, generator=generator(seed + 1)) < 0.9, coin, 1 - coin)
    x = torch.cat([shown[:, None].float(), torch.randn(n, 7, generator=generator(seed + 2))], dim=1)
    told = tell(x, torch.arange(n) // 20, {"coin": Classes(coin, 2, everything(n))})["coin"]
    assert abs(told.probe.value - 0.9) < 5 * told.probe.stderr
    assert abs(told.baseline.value - 0.5) < 5 * told.baseline.stderr


def test_noise_is_told_no_better_than_the_baseline(seed):
    n = 4000
    x = torch.randn(n, 30, generator=generator(seed))
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), n, replacement=True, generator=generator(seed + 1))
    values = torch.randn(n, generator=generator(seed + 2))
    targets = {"label": Classes(labels, 3, everything(n)), "number": Quantity(values)}
    told = tell(x, torch.arange(n) // 20, targets)
    assert abs(told["label"].gain.value) < 5 * (told["label"].gain.stderr or 1e-3)
    assert abs(told["label"].probe.value - 0.5) < 5 * told["label"].probe.stderr
    assert abs(told["number"].probe.value) < 5 * told["number"].probe.stderr
    assert max(told["number"].penalties) >= 1  # it learned not to listen


def test_the_error_bar_covers_the_spread_over_texts():
    """Labels that sequences share: over many draws the error bar over sequences is as large as the spread."""
    values, bars = [], []
    for draw in range(80):
        g = generator(draw)
        common = torch.randn(40, 1, generator=g).repeat_interleave(15, dim=0)
        x = torch.randn(600, 6, generator=g) + common
        labels = ((x[:, 0] + torch.randn(600, generator=g)) > 0).long()
        told = tell(x, torch.arange(600) // 15, {"y": Classes(labels, 2, everything(600))})["y"]
        values.append(told.probe.value)
        bars.append(told.probe.stderr)
    assert 0.7 < np.mean(bars) / np.std(values, ddof=1) < 1.4


def test_what_does_not_change_the_answer(seed):
    x, sequences = rows(seed=seed)
    labels = (x[:, 0] > x[:, 0].median()).long()
    target = {"y": Classes(labels, 2, everything(len(x)))}
    first = tell(x, sequences, target)["y"]
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=generator(seed)))[0]
    again = tell(1000 * (x.double() @ turn) + 77, sequences, target)["y"]
    assert again.probe.value == pytest.approx(first.probe.value, abs=2 / len(x))
    order = torch.randperm(len(x), generator=generator(seed))
    mixed = {"y": Classes(labels[order], 2, everything(len(x)))}
    assert tell(x[order], sequences[order], mixed)["y"].probe.value == pytest.approx(first.probe.value, abs=1e-12)
    assert tell(x, sequences, target)["y"] == first
    # What must change it: rows that belong to other tokens.
    assert tell(x[order], sequences, target)["y"].probe.value < first.probe.value - 0.2


def test_a_mean_that_dwarfs_the_signal_does_not_hide_it():
    x, sequences = rows()
    values = {"y": Quantity(x[:, 0] - 5)}
    far = x.double() + 1e6
    assert tell(far, sequences, values)["y"].probe.value == pytest.approx(
        tell(x, sequences, values)["y"].probe.value, abs=1e-6
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_the_same():
    batches = text_batches(windows=40)
    seen = view(batches)
    made = QualityAnalysis(batches, LETTERS)
    here, there = made(seen), made(SiteView(**{**vars(seen), "x": seen.x.cuda()}))
    assert set(here) == set(there)
    for name, one in here.items():
        assert there[name].value == pytest.approx(one.value, abs=2 / one.n) and there[name].n == one.n


# --- hostile input ----------------------------------------------------------------------------------------------------


def test_a_constant_label_is_noted_and_no_nan():
    x, sequences = rows()
    one = torch.zeros(len(x), dtype=torch.int64)
    told = tell(x, sequences, {"class": Classes(one, 3, everything(len(x))), "number": Quantity(one + 7.0)})
    assert told["class"].probe.value == told["class"].baseline.value == 1.0 and told["class"].gain.value == 0
    assert told["number"].probe.value == 0
    for found in told.values():
        assert "constant label" in found.probe.notes[0] and found.probe.stderr is None


def test_rows_that_are_all_alike_tell_nothing():
    sequences = torch.arange(400) // 10
    labels = torch.randint(0, 2, (400,), generator=generator(0))
    for x in (torch.zeros(400, 5), torch.full((400, 5), 1e4 + 0.1)):
        told = tell(x, sequences, {"y": Classes(labels, 2, everything(400)), "z": Quantity(labels.float())})
        assert told["y"].probe.value == told["y"].baseline.value and told["z"].probe.value == 0


def test_fewer_rows_than_columns():
    x = torch.randn(60, 100, generator=generator(0))
    told = tell(x, torch.arange(60) // 6, {"y": Quantity(torch.randn(60, generator=generator(1)))})["y"]
    assert -1 < told.probe.value < 0.5 and np.isfinite(told.probe.stderr)


def test_bad_input_is_named():
    x, sequences = rows()
    fine = {"y": Quantity(x[:, 0])}
    with pytest.raises(NonFiniteError, match="row 3"):
        tell(x.index_fill(0, torch.tensor([3]), float("nan")), sequences, fine)
    with pytest.raises(TooFewRowsError, match=f"{QUARTERS} of them at least; got 3"):
        tell(x, torch.arange(len(x)) % 3, fine)
    with pytest.raises(ShapeError, match="5 labels for 600 rows"):
        tell(x, sequences, {"y": Quantity(x[:5, 0])})
    with pytest.raises(EmptyInputError, match="no target"):
        tell(x, sequences, {})
    nobody = Classes(torch.zeros(600, dtype=torch.int64), 2, ~everything(600))
    told = tell(x, sequences, {"nobody": nobody, **fine})
    assert isinstance(told["nobody"], EmptyInputError) and told["y"].probe.value > 0.99


def test_few_sequences_have_no_error_bar():
    one = torch.ones(12, dtype=torch.float64)
    found = ratio_over_sequences(torch.arange(12).double(), one, torch.arange(12) // 2, "mean")
    assert found.value == 5.5 and found.stderr is None and "6 sequences" in found.notes[0]


def test_a_look_of_ordinary_size_takes_well_under_a_second():
    n = 4096
    x, labels = torch.randn(n, 128), torch.randint(0, 64, (n,))
    targets = {f"y{i}": Classes(labels.roll(i), 64, everything(n)) for i in range(2)} | {"p": Quantity(x[:, 0])}
    began = time.process_time()
    tell(x, torch.arange(n) // 64, targets)
    assert time.process_time() - began < 1.5


# --- labels of a text -------------------------------------------------------------------------------------------------

TEXT = "Anna met Bob. They saw 3 cats, no Dogs; the cats_2 ran home and Anna slept well"
BYTES = train_bpe([TEXT * 3, "ümläut Ärger"], 300)
LETTERS = CharTokenizer.train([TEXT])


def spelled(tokenizer, text):
    ids = torch.tensor(tokenizer.encode(text))
    return ids, Spelling.of(tokenizer, ids.unique())


def slow_starts(pieces):
    """Where a word begins in each piece of a text, letter by letter; the first piece of all is left out."""
    found, before = [], None
    for number, piece in enumerate(pieces):
        begins = False
        for mark in piece:
            word = mark.isalnum() or mark in "_\ufffd"
            begins |= word and before is False
            before = word
        found.append(begins if number else None)
    return found[1:]


@pytest.mark.parametrize("tokenizer", [BYTES, LETTERS], ids=["bpe", "characters"])
def test_words_and_capitals_are_those_of_the_text(tokenizer):
    ids, spelling = spelled(tokenizer, TEXT)
    pieces = [tokenizer.decode([one]) for one in ids.tolist()]
    assert "".join(pieces) == TEXT
    after, here = ids[1:], ids[:-1]
    begins = spelling.inside[after] | (spelling.opens[after] & ~spelling.closes[here])
    assert begins.tolist() == slow_starts(pieces) and 10 < begins.sum() < len(after)
    first = [next((mark for mark in piece if mark.isalpha()), "") for piece in pieces]
    assert spelling.letter[ids].tolist() == [bool(mark) for mark in first]
    assert spelling.capital[ids].tolist() == [mark.isupper() for mark in first]


def test_pieces_of_letters_do_not_part_words():
    ids, spelling = spelled(BYTES, "xümläut")
    starts = spelling.inside[ids[1:]] | (spelling.opens[ids[1:]] & ~spelling.closes[ids[:-1]])
    assert not starts.any()


def batch(ids, mask=None):
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0) * mask
    return Batch(ids, mask, torch.zeros_like(mask), positions)


def view(batches, keep=None, d=8, seed=0, site="resid.1"):
    ids = torch.cat([one.ids[one.mask] for one in batches])
    positions = torch.cat([one.positions[one.mask] for one in batches])
    before, numbers = 0, []
    for one in batches:
        numbers.append(before + one.mask.nonzero()[:, 0])
        before += len(one.ids)
    sequences = torch.cat(numbers)
    keep = everything(len(ids)) if keep is None else keep
    x = torch.randn(len(ids), d, generator=generator(seed))
    return SiteView(
        site=site,
        step=0,
        seed=0,
        x=x[keep],
        g=None,
        ids=ids[keep],
        positions=positions[keep],
        sequences=sequences[keep],
    )


def text_batches(windows=24, length=16, seed=0, tokenizer=LETTERS):
    stream = torch.tensor(tokenizer.encode(TEXT * 20))
    starts = torch.randint(0, len(stream) - length, (windows,), generator=generator(seed))
    ids = torch.stack([stream[s : s + length] for s in starts.tolist()])
    return [batch(ids[: windows // 2]), batch(ids[windows // 2 :])]


def test_labels_are_looked_up_in_the_whole_text_not_among_sampled_rows():
    batches = text_batches()
    keep = torch.rand(24 * 16, generator=generator(1)) < 0.4
    made = QualityAnalysis(batches, LETTERS, types=5)
    seen = view(batches, keep)
    used, targets, numbers = made.targets(seen)
    whole = torch.cat([one.ids for one in batches])
    where = list(zip(seen.sequences.tolist(), seen.positions.tolist()))
    assert used.tolist() == [4 <= p < 15 for _, p in where]
    where = [place for place, ok in zip(where, used.tolist()) if ok]
    values, counts = whole.unique(return_counts=True)
    top = sorted(zip((-counts).tolist(), values.tolist()))[:5]
    ranks = {token: rank for rank, (_, token) in enumerate(top)}
    for k in (1, 4):
        expected = [ranks.get(int(whole[s, p - k]), -1) for s, p in where]
        assert targets[f"quality.token_back_{k}"].labels.tolist() == expected
    assert targets["quality.position"].values.tolist() == [p for _, p in where]
    following = [LETTERS.decode([int(whole[s, p + 1])]) for s, p in where]
    expected = [1 if mark.isupper() else 0 if mark.isalpha() else -1 for mark in following]
    assert targets["quality.casing"].labels.tolist() == expected
    current = [LETTERS.decode([int(whole[s, p])]) for s, p in where]
    word = [(b.isalnum() or b == "_") and not (a.isalnum() or a == "_") for a, b in zip(current, following)]
    assert targets["quality.word_start"].labels.bool().tolist() == word
    assert len(numbers) == used.sum()


def test_rows_that_hold_the_token_before_name_it():
    batches = text_batches(windows=40)
    seen = view(batches)
    pages = Pages.of(batches)
    before = pages.at(seen.sequences, seen.positions - 1).clamp_min(0)
    table = torch.randn(LETTERS.vocab_size, 40, generator=generator(3))
    x = table[before] + 0.01 * torch.randn(len(before), 40, generator=generator(4))
    made = QualityAnalysis(batches, LETTERS)
    found = made(SiteView(**{**vars(seen), "x": x}))
    assert found["quality.token_back_1"].value > 0.95
    assert found["quality.token_back_4"].value < found["quality.token_back_4.baseline"].value + 0.25
    assert set(found) == {*PROBES, *(f"{name}.baseline" for name in PROBES)}
    for name in PROBES:
        baseline = found[f"{name}.baseline"].value
        assert any(note == f"baseline {baseline:.6g}" for note in found[name].notes)
        assert found[name].parts["gain"].value == pytest.approx(found[name].value - baseline, abs=1e-9)


def test_copies_of_a_sequence_are_never_on_both_sides():
    """Rows that know nothing, in four copies: a probe that is scored on copies of what it was fitted on knows all."""
    ids = torch.randint(1, LETTERS.vocab_size, (13, 30), generator=generator(0)).repeat(4, 1)
    batches = [batch(ids)]
    assert Pages.of(batches).copies.unique().numel() == 13
    seen = view(batches)
    x = torch.randn(13, 30, 60, generator=generator(1)).repeat(4, 1, 1).reshape(-1, 60)
    made = QualityAnalysis(batches, LETTERS, back=(1,), types=8)
    fair = made(SiteView(**{**vars(seen), "x": x}))["quality.position"]
    naive = tell(x, seen.sequences, {"p": Quantity(seen.positions.double())})["p"].probe
    assert fair.value < 0.05 and fair.dof == 12
    assert naive.value > fair.value + 0.1 and naive.dof == 51


def test_unlike_rows_and_texts_are_refused():
    batches = text_batches()
    made = QualityAnalysis(batches, LETTERS, sites=("resid.*",))
    assert made(view(batches, site="final_norm")) == {}
    seen = view(batches)
    with pytest.raises(ShapeError, match="mode='probe'"):
        made(SiteView(**{**vars(seen), "ids": seen.ids.roll(1)}))
    with pytest.raises(ShapeError, match="24 sequences of text"):
        made(SiteView(**{**vars(seen), "sequences": seen.sequences + 20}))
    with pytest.raises(OptionError, match="1 or more"):
        QualityAnalysis(batches, LETTERS, back=(0,))
    with pytest.raises(OptionError, match="2 or more"):
        QualityAnalysis(batches, LETTERS, types=1)
    with pytest.raises(OptionError, match="no place in sequences of 16"):
        QualityAnalysis(batches, LETTERS, back=(15,))
    with pytest.raises(OptionError, match="got none"):
        Pages.of([])
    with pytest.raises(TooFewRowsError, match="different sequences"):
        QualityAnalysis([batch(batches[0].ids[:1].repeat(9, 1))], LETTERS)


def test_padding_and_symbols_without_letters():
    ids = torch.randint(1, 4, (10, 12), generator=generator(0))
    mask = torch.arange(12) < torch.tensor([12, 7, 3, 9, 12, 12, 6, 8, 12, 2])[:, None]
    digits = CharTokenizer.train(["123"])
    batches = [batch(ids, mask)]
    found = QualityAnalysis(batches, digits, back=(1,))(view(batches))
    assert "quality.casing" not in found and found["quality.token_back_1"].n == int(
        (mask.sum(1) - 2).clamp_min(0).sum()
    )
    assert "constant label" in found["quality.word_start"].notes[0]


# --- the model as a whole ---------------------------------------------------------------------------------------------

RECIPE = parse_recipe("""
name: tiny
data: {max_chars: 60000, tokenizer: {kind: bpe, vocab_size: 300}, sequence_length: 24, held_out: 0.1}
models:
  - {name: decoder, architecture: llama, objective: causal, layers: 2, width: 32, heads: 4}
  - {name: encoder, architecture: bert, objective: masked, layers: 2, width: 32, heads: 4}
optimisation: {steps: 24, batch_size: 8, lr: 0.003, warmup_steps: 4}
checkpoints: {every: 8}
evaluation: {every: 24, sequences: 16}
device: cpu
monitor:
  schedule: {log_spaced: 5}
  sequences: 24
  vectors: 300
  measures: [spectral_ratio, effective_rank]
  gradient_measures: []
  quality: true
""")


@pytest.fixture(scope="module")
def data():
    return prepare_all(RECIPE)


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_accuracy_is_the_share_of_right_tokens(data, objective):
    (own,) = data.values()
    variant = next(one for one in RECIPE.models if one.objective == objective)
    model = build_model(variant.model(own.vocab_size, 24), 0).eval()
    whole = own.probe(20)
    batches = [batch(part) for part in whole.ids.split(8)]
    loss = CausalLoss() if objective == "causal" else MaskedLoss(mask_id=own.mask_id)
    found = TokenAccuracy(model, batches, loss)()
    right, targets = [], []
    with torch.no_grad():
        for one in batches:
            chosen = torch.zeros_like(one.mask) if objective == "causal" else loss.chosen(one)
            logits = model(input_ids=one.ids.masked_fill(chosen, own.mask_id)).logits
            for row in range(len(one.ids)):
                for at in range(24):
                    if objective == "causal" and at < 23:
                        said, truth = int(logits[row, at].argmax()), int(one.ids[row, at + 1])
                    elif objective == "masked" and chosen[row, at]:
                        said, truth = int(logits[row, at].argmax()), int(one.ids[row, at])
                    else:
                        continue
                    right.append(said == truth)
                    targets.append(truth)
    accuracy, baseline = found["quality.accuracy"], found["quality.accuracy.baseline"]
    assert accuracy.n == len(targets) and accuracy.value == pytest.approx(np.mean(right), abs=1e-12)
    assert baseline.value == pytest.approx(max(map(targets.count, targets)) / len(targets), abs=1e-12)


def look_records(folder):
    with RunReader(folder) as reader:
        assert reader.failures() == []
        return {(r.cell, r.step, r.site, r.measure): r.estimate for r in reader.records()}


@pytest.fixture(scope="module")
def watched(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality") / "run"
    results = run_study(RECIPE, folder, data=data)
    assert all(result.status == "finished" for result in results)
    return folder, look_records(folder)


def test_a_watched_training_has_the_whole_battery(watched):
    _, found = watched
    steps = sorted({step for _, step, _, _ in found})
    assert steps[0] == 0 and steps[-1] == 24 and len(steps) == 5
    for cell in ("decoder", "encoder"):
        for step in steps:
            for site in ("resid.1", "resid.2"):
                for name in PROBES:
                    one, base = found[cell, step, site, name], found[cell, step, site, f"{name}.baseline"]
                    assert base.value <= 1 and -1 < one.value <= 1
                    assert (HIDDEN in one.notes) == (cell == "encoder")
            assert 0 <= found[cell, step, "model", "quality.accuracy"].value <= 1
        assert not any(site == "resid.0" and name.startswith("quality") for _, _, site, name in found)
    # Both read the same held-out text, so labels of one look are labels of every look.
    same = {found[c, s, "resid.1", "quality.position.baseline"].n for c in ("decoder", "encoder") for s in steps}
    assert len(same) == 1
    # Learned positions can be read off an encoder from the start; rotary ones of a decoder cannot.
    assert found["encoder", 0, "resid.1", "quality.position"].value > 0.2
    assert found["decoder", 0, "resid.1", "quality.position"].value < 0.1


def test_quality_changes_nothing_in_the_training(watched, data, tmp_path):
    folder, _ = watched
    run_study(override(RECIPE, {"monitor.quality": False}), tmp_path / "plain", data=data)
    for name in ("decoder", "encoder"):
        cells = [next((place / "cells").glob(f"{name}*")) for place in (folder, tmp_path / "plain")]
        weights = [sorted(cell.rglob("step000024/model.safetensors"))[0].read_bytes() for cell in cells]
        assert weights[0] == weights[1]


def test_a_stopped_training_gets_the_same_battery(watched, data, tmp_path):
    _, whole = watched
    recipe = override(RECIPE, {"models": [RECIPE.describe()["models"][0]]})
    asked = iter(range(100))
    run_study(recipe, tmp_path / "run", data=data, stop=lambda: next(asked) > 12)
    run_study(recipe, tmp_path / "run", data=data, resume=True)
    found = look_records(tmp_path / "run")
    quality = {key[1:]: one for key, one in whole.items() if key[0] == "decoder" and "quality" in key[3]}
    assert {key[1:]: one for key, one in found.items() if "quality" in key[3]} == quality


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"monitor.quality": {"sites": ["resid.9"]}}, "probes at resid.9, and the monitor looks at none of them"),
        ({"monitor.quality": {"back": [23]}}, "no place in sequences of 24 tokens"),
        ({"monitor.sequences": 2}, "quality needs 4 different sequences"),
    ],
)  # fmt: skip
def test_what_no_look_could_do_is_told_before_a_file_is_written(data, tmp_path, change, message):
    recipe = override(RECIPE, change)
    with pytest.raises((OptionError, TooFewRowsError), match=message):
        run_study(recipe, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_an_accuracy_that_fails_costs_nothing_else(watched, data, tmp_path, monkeypatch):
    folder, whole = watched

    def out_of_memory(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TokenAccuracy, "__call__", out_of_memory)
    recipe = override(RECIPE, {"models": [RECIPE.describe()["models"][0]]})
    assert [one.status for one in run_study(recipe, tmp_path / "run", data=data)] == ["finished"]
    with RunReader(tmp_path / "run") as reader:
        failures = {(one.step, one.site, one.measure) for one in reader.failures()}
        found = {(r.step, r.site, r.measure): r.estimate for r in reader.records()}
    kept = {key[1:]: one for key, one in whole.items() if key[0] == "decoder" and "accuracy" not in key[3]}
    assert found == kept and any(name == "train_loss" for _, _, name in found)
    assert failures == {(step, "model", "quality.accuracy") for step, _, _ in kept}
    cells = [next((place / "cells").glob("decoder*")) for place in (folder, tmp_path / "run")]
    weights = [next(cell.rglob("step000024/model.safetensors")).read_bytes() for cell in cells]
    assert weights[0] == weights[1]


def test_quality_is_off_unless_asked_for():
    assert MonitorSpec().quality is None
    assert MonitorSpec(quality=True).quality.back == (1, 4)
    assert MonitorSpec(quality={"sites": "resid.1, resid.2"}).quality.sites == ("resid.1", "resid.2")
