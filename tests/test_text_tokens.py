"""Tokenizers round-trip, counts merge, Zipf exponents are found again, bins hold equal mass."""

import json
import lzma
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import (
    DegenerateError,
    EmptyInputError,
    OptionError,
    ShapeError,
    SourceError,
    UnknownNameError,
)
from anisoscope.text.corpus import load_corpus
from anisoscope.text.frequency import TokenCounts, frequency_bins
from anisoscope.text.tokens import CharTokenizer, HFTokenizer, Tokenizer, load_tokenizer, save_tokenizer, train_bpe

DATA = Path(__file__).parents[2] / "shared" / "data"
TEXTS = ["The cat sat on the mat.", "Émile ate 漢字 🙂\n\tand the cat sat.", "the the the cat"] * 20


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


def tokenizers():
    return {
        "characters": CharTokenizer.train(TEXTS),
        "bytes": CharTokenizer.train(TEXTS, unit="byte"),
        "bpe": train_bpe(TEXTS, 300),
    }


@pytest.mark.parametrize("name", ["characters", "bytes", "bpe"])
def test_round_trip_save_and_load(tmp_path, name):
    tokenizer = tokenizers()[name]
    assert isinstance(tokenizer, Tokenizer)
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        assert [array.tolist() for array in tokenizer.encode_many([text, ""])] == [ids, []]
    save_tokenizer(tokenizer, tmp_path / "t.json")
    again = load_tokenizer(tmp_path / "t.json")
    assert again.fingerprint == tokenizer.fingerprint and again.special_ids == tokenizer.special_ids
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1]) and again.vocab_size == tokenizer.vocab_size
    assert len({other.fingerprint for other in tokenizers().values()}) == 3


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives_its_own_alphabet(text):
    if text:
        for unit in ("character", "byte"):
            tokenizer = CharTokenizer.train([text], unit=unit)
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert 0 not in tokenizer.encode(text)


def test_alphabet_and_the_unknown():
    tokenizer = CharTokenizer.train(["cab", "é"])
    assert tokenizer.alphabet == (97, 98, 99, 233) and tokenizer.vocab_size == 5
    assert tokenizer.encode("aZc🙂é") == [1, 0, 3, 0, 4]
    assert tokenizer.decode([1, 0]) == "a\ufffd" and tokenizer.special_ids == {"unk": 0}
    assert CharTokenizer.train(["é"], unit="byte").alphabet == (0xA9, 0xC3)
    with pytest.raises(OptionError, match="id 9"):
        tokenizer.decode([9])
    with pytest.raises(SourceError, match="no alphabet"):
        CharTokenizer.train([""])
    with pytest.raises(UnknownNameError, match="did you mean 'byte'"):
        CharTokenizer.train(["a"], unit="bytes")
    for alphabet, unit in (((2, 1), "character"), ((1, 1), "character"), ((1, 256), "byte")):
        with pytest.raises(OptionError):
            CharTokenizer(alphabet, unit)


def test_symbols_of_enwik8():
    """Of the 205 byte values that all of enwik8 is known to hold, its beginning holds these."""
    path = DATA / "enwik8_prefix" / "enwik8_first4154063.xml.xz"
    if not path.exists():
        pytest.skip("the beginning of enwik8 is not here")
    text = lzma.decompress(path.read_bytes()).decode()
    as_bytes, as_characters = CharTokenizer.train([text], unit="byte"), CharTokenizer.train([text])
    assert len(as_bytes.alphabet) == len(set(text.encode())) <= 205
    assert len(as_characters.alphabet) == len(set(text)) > 205
    assert as_bytes.decode(as_bytes.encode(text[:20_000])) == text[:20_000]


def test_bpe_is_the_same_in_another_process(bpe):
    code = f"from anisoscope.text.tokens import train_bpe; print(train_bpe({TEXTS!r}, 300).fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == bpe.fingerprint
    assert 257 < bpe.vocab_size <= 300, "this corpus has no more pairs to merge"
    assert bpe.special_ids == {"eos": 0} and bpe.prefix == bpe.suffix == ()
    assert len(bpe.encode("the cat")) <= 3
    assert bpe.decode(bpe.encode("never seen: ∮ڪ")) == "never seen: ∮ڪ"
    with pytest.raises(OptionError, match="257"):
        train_bpe(TEXTS, 100)


def bert():
    if not (DATA / "tokenizers" / "bert_uncased_vocab.txt").exists():
        pytest.skip("no vocabulary of BERT here")
    from transformers import BertTokenizerFast

    return BertTokenizerFast(str(DATA / "tokenizers" / "bert_uncased_vocab.txt"))


def test_encoder_tokenizer(tmp_path):
    inner = bert()
    text = "the cat sat on the mat and would not leave it"
    truth = inner(text, add_special_tokens=False)["input_ids"]
    tokenizer = HFTokenizer(inner)
    bare = inner.backend_tokenizer
    bare.enable_truncation(4)  # as some files of tokenizers have it
    bare.enable_padding(length=50)
    assert HFTokenizer(bare).encode(text) == HFTokenizer(bare).encode_many([text])[0].tolist() == truth
    assert HFTokenizer(bare).prefix == tokenizer.prefix and HFTokenizer(bare).special_ids == tokenizer.special_ids
    assert bare.truncation["max_length"] == 4 and bare.padding["length"] == 50, "the tokenizer given was changed"
    assert tokenizer.prefix == (inner.cls_token_id,) and tokenizer.suffix == (inner.sep_token_id,)
    assert set(tokenizer.special_ids) == {"pad", "unk", "cls", "sep", "mask"}
    assert tokenizer.encode(text) == truth
    assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.prefix[0], *tokenizer.encode(text)]) == text
    save_tokenizer(tokenizer, tmp_path / "t.json")
    again = load_tokenizer(tmp_path / "t.json")
    assert (again.prefix, again.suffix, again.fingerprint) == (
        tokenizer.prefix,
        tokenizer.suffix,
        tokenizer.fingerprint,
    )


def test_decoder_tokenizer():
    folder = DATA / "tinystories_656k"
    if not folder.exists():
        pytest.skip("no tokenizer of a decoder here")
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder)
    tokenizer = HFTokenizer(inner)
    plain = inner("Once upon a time", add_special_tokens=False)["input_ids"]
    full = inner("Once upon a time")["input_ids"]
    assert [*tokenizer.prefix, *plain, *tokenizer.suffix] == full
    assert tokenizer.encode("Once upon a time") == plain
    bare = load_tokenizer(folder / "tokenizer.json")
    assert bare.encode("Once upon a time") == plain


def test_bad_tokenizer_files(tmp_path):
    cases = {
        "none.json": (None, "cannot be opened"),
        "broken.json": ("{", "not JSON"),
        "other.json": ("{}", "no tokenizer"),
        "list.json": ("[]", "no tokenizer"),
        "model.json": ('{"model": 1}', "no tokenizer"),
        "later.json": (json.dumps({"format": "anisoscope tokenizer", "version": 99}), "version 99"),
    }
    for name, (content, reason) in cases.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(SourceError, match=reason):
            load_tokenizer(tmp_path / name)


@given(st.lists(st.integers(0, 9), max_size=50), st.integers(0, 50))
def test_counts_merge(ids, cut):
    tensor = torch.tensor(ids, dtype=torch.int64)
    whole = TokenCounts.of(tensor, 10)
    assert {i: int(c) for i, c in enumerate(whole.counts) if c} == Counter(ids)
    parts = TokenCounts.of(tensor[:cut], 10).merge(TokenCounts.of(tensor[cut:], 10))
    assert torch.equal(parts.counts, whole.counts) and parts.total == len(ids)
    assert torch.equal(TokenCounts.empty(10).merge(whole).counts, whole.counts)


def test_bad_counts():
    with pytest.raises(OptionError, match="from 0 to 10, the vocabulary from 0 to 9"):
        TokenCounts.of(torch.tensor([0, 10]), 10)
    with pytest.raises(ShapeError, match="merge"):
        TokenCounts.empty(3).merge(TokenCounts.empty(4))
    with pytest.raises(DegenerateError, match="2 types"):
        TokenCounts(torch.tensor([5, 1, 0])).zipf_exponent()
    with pytest.raises(UnknownNameError):
        TokenCounts(torch.tensor([5, 2, 1])).zipf_exponent("mle")


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.4])
def test_zipf_exponent_is_found_again(exponent, seed):
    """Few enough types that sampling rarely swaps their ranks."""
    p = np.arange(1, 41) ** -exponent
    counts = np.random.default_rng(seed).multinomial(2_000_000, p / p.sum())
    found = TokenCounts(torch.from_numpy(counts)).zipf_exponent()
    assert abs(found.value - exponent) < 5 * found.stderr and found.stderr < 0.005
    slope = TokenCounts(torch.from_numpy(counts)).zipf_exponent("regression")
    assert abs(slope.value - exponent) < 0.01


@pytest.mark.calibration
def test_error_bar_of_the_exponent():
    """Of 300 independent draws the errors spread as the error bar says: a standard deviation of 1, within 4 sigma."""
    p = np.arange(1, 16) ** -1.0
    draws = np.random.default_rng(5).multinomial(1_000_000, p / p.sum(), size=300)
    found = [TokenCounts(torch.from_numpy(draw)).zipf_exponent() for draw in draws]
    spread = np.std([(one.value - 1.0) / one.stderr for one in found])
    assert abs(spread - 1) < 4 / np.sqrt(2 * 300)


def test_zipf_exponent_of_exact_counts():
    rank = np.arange(1, 1001)
    for exponent in (0.5, 1.0, 2.0):
        counts = TokenCounts(torch.from_numpy((1e15 * rank**-exponent).astype(np.int64)))
        assert counts.zipf_exponent().value == pytest.approx(exponent, abs=1e-6)
        assert counts.zipf_exponent("regression").value == pytest.approx(exponent, abs=1e-6)
    shuffled = TokenCounts(counts.counts[torch.randperm(1000, generator=torch.Generator().manual_seed(0))])
    assert shuffled.zipf_exponent().value == counts.zipf_exponent().value


def test_bins_of_a_zipf_law_hold_equal_mass(seed):
    p = np.arange(1, 20_001) ** -0.8
    counts = TokenCounts(torch.from_numpy(np.random.default_rng(seed).multinomial(1_000_000, p / p.sum())))
    bins = frequency_bins(counts, 10)
    assert len(bins) == 10 and int(bins.mass.sum()) == counts.total
    assert (bins.mass.double() / counts.total - 0.1).abs().max() < 0.02
    assert bins.labels[0] == "1 (rarest)" and bins.labels[4] == "5" and bins.labels[-1] == "10 (most frequent)"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any), st.integers(1, 12))
def test_bins_keep_their_promises(numbers, asked):
    counts = TokenCounts(torch.tensor(numbers))
    bins = frequency_bins(counts, asked)
    found = bins.bin_of(torch.arange(len(numbers))).tolist()
    assert 1 <= len(bins) <= asked and len(bins.labels) == len(bins) and len(bins.edges) == len(bins) + 1
    assert {b for b, c in zip(found, numbers) if c} == set(range(len(bins))), "a bin is empty"
    for number, b in zip(numbers, found):
        assert b == 0 if number == 0 else bins.edges[b] <= torch.tensor(number).double().log() <= bins.edges[b + 1]
    pairs = sorted((c, b) for c, b in zip(numbers, found) if c)
    assert [b for _, b in pairs] == sorted(b for _, b in pairs), "more frequent, lower bin"
    assert len({c for c, _ in pairs}) == len(set(pairs)), "a tie was parted"
    mass = [sum(c for c, b in zip(numbers, found) if b == number) for number in range(len(bins))]
    assert mass == bins.mass.tolist()


def test_bins_at_the_edges():
    alone = frequency_bins(TokenCounts(torch.tensor([1000, 1, 1, 1])), 10)
    assert len(alone) == 2 and alone.bin_of(torch.tensor([[0, 1]])).tolist() == [[1, 0]]
    equal = frequency_bins(TokenCounts(torch.tensor([3, 3, 0])), 5)
    assert len(equal) == 1 and equal.labels == ("1 (all)",)
    with pytest.raises(EmptyInputError):
        frequency_bins(TokenCounts.empty(5))
    with pytest.raises(OptionError, match="bins=0"):
        frequency_bins(TokenCounts(torch.tensor([1])), 0)
    with pytest.raises(OptionError, match="ids run from 0 to 3"):
        equal.bin_of(torch.tensor([0, 3]))


def test_embedded_corpus_follows_a_zipf_law():
    corpus = load_corpus(max_chars=300_000)
    tokenizer = train_bpe(corpus, 2000)
    assert tokenizer.vocab_size == 2000
    ids = torch.from_numpy(np.concatenate(tokenizer.encode_many(corpus.documents)))
    found = TokenCounts.of(ids, tokenizer.vocab_size).zipf_exponent()
    assert 0.5 < found.value < 1.2
