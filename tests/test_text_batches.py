"""Batches: every token where it should be, the same for the same seed, and nothing lost without a word."""

from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from anisoscope.errors import OptionError, TooFewTokensError
from anisoscope.text import batches as cutting
from anisoscope.text.batches import encode, token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import CharTokenizer, HFTokenizer, train_bpe

DATA = Path(__file__).parents[2] / "shared" / "data"
# Every character of the corpus occurs once, so a token says where it came from.
DOCUMENTS = ["".join(chr(0x4E00 + 100 * d + i) for i in range(n)) for d, n in enumerate([37, 5, 64, 1, 90, 16])]
CORPUS = load_corpus(DOCUMENTS)
CHARACTERS = CharTokenizer.train(CORPUS)
WHOLE = "".join(DOCUMENTS)


class Around(CharTokenizer):
    """A tokenizer like that of an encoder: two further ids around each sequence, one between documents, one to pad."""

    prefix = (300,)
    suffix = (301,)
    special_ids = {"unk": 0, "eos": 302, "pad": 303}
    vocab_size = 304


AROUND = Around(CHARACTERS.alphabet)
PINNED = "83f90d431913c568"


def make(tokenizer=CHARACTERS, corpus=CORPUS, **options):
    return token_batches(corpus, tokenizer, **({"sequence_length": 8, "batch_size": 3} | options))


def rows(batches):
    return [row for batch in batches for row in batch.ids]


def test_packed_windows_are_disjoint_stretches_of_the_text():
    batches = make()
    texts = [CHARACTERS.decode(row.tolist()) for row in rows(batches)]
    assert len(batches) == (213 // 8) // 3 == 8 and len(texts) == 24
    assert all(text in WHOLE and len(text) == 8 for text in texts)
    assert len(set("".join(texts))) == 8 * 24, "a token came twice"
    for batch in batches:
        assert batch.mask.all() and not batch.special.any()
        assert torch.equal(batch.positions, torch.arange(8).expand(3, 8))
    assert batches.counts.total == 213 and batches.tokens == 192
    assert WHOLE.index(texts[0]) != 0 or WHOLE.index(texts[1]) != 8, "not in the order of the text"


def test_ids_that_are_known_are_not_asked_for_again(monkeypatch):
    known, asked = encode(CORPUS, AROUND), make(AROUND)
    monkeypatch.setattr(Around, "encode_many", lambda *_: pytest.fail("asked again"))
    given = make(AROUND, ids=known)
    assert given.fingerprint == asked.fingerprint and given.counts.total == asked.counts.total
    with pytest.raises(TooFewTokensError, match="no token at all"):
        make(AROUND, ids=[])


def test_encoding_goes_group_by_group_until_nobody_wants_to_know(monkeypatch):
    monkeypatch.setattr(cutting, "ENCODED_AT_ONCE", 60)
    assert [ids.tolist() for ids in encode(CORPUS, CHARACTERS)] == [CHARACTERS.encode(text) for text in DOCUMENTS]
    answers = iter([False, True])
    with pytest.raises(CancelledError):
        encode(CORPUS, CHARACTERS, lambda: next(answers))


def test_same_seed_same_batches():
    one, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert [b.fingerprint for b in one] == [b.fingerprint for b in one], "not the same when read again"
    assert torch.equal(one[2].ids, list(again)[2].ids)
    # Fixed for good: other machines and versions of Python must give this one too.
    assert one.fingerprint.startswith(PINNED), one.fingerprint


def test_apart_windows_stay_in_their_documents():
    batches = make(pack=False, batch_size=1)
    texts = []
    for batch in batches:
        (row,), (mask,) = batch.ids, batch.mask
        length = int(mask.sum())
        assert mask.tolist() == [True] * length + [False] * (8 - length)
        assert batch.positions[0].tolist() == [*range(length), *[0] * (8 - length)]
        texts.append(CHARACTERS.decode(row[:length].tolist()))
        assert any(texts[-1] in document for document in DOCUMENTS)
    expected = sorted(document[a : a + 8] for document in DOCUMENTS for a in range(0, len(document), 8))
    assert sorted(texts) == expected
    assert batches.tokens == 213 == sum(batch.tokens for batch in batches)


@pytest.mark.parametrize("pack", [True, False])
def test_special_tokens_around_each_window(pack):
    batches = make(AROUND, pack=pack, batch_size=1)
    seen = []
    for batch in batches:
        (row,), (mask,), (special,) = batch.ids, batch.mask, batch.special
        length = int(mask.sum())
        assert row[0] == 300 and row[length - 1] == 301 and special[0] and special[length - 1]
        inner, inner_special = row[1 : length - 1], special[1 : length - 1]
        assert torch.equal(inner_special, inner == 302) and not special[length:].any()
        assert (row[length:] == 303).all()
        seen += inner[~inner_special].tolist()
    assert len(set(seen)) == len(seen)
    assert len(seen) == 213 if not pack else len(seen) >= 213 - 6 - 6
    assert batches.counts.total == 213 and int(batches.counts.counts[300:].sum()) == 0
    if pack:
        assert any((batch.ids == 302).any() for batch in batches)


def test_special_can_be_left_out_or_asked_for():
    assert not any(
        (batch.ids >= 300).any()
        for batch in make(AROUND, add_special=False, pack=False, batch_size=1)
        if batch.mask.all()
    )
    assert make(AROUND, add_special=True)[0].ids[0, 0] == 300
    with pytest.raises(OptionError, match="adds no special token"):
        make(add_special=True)
    with pytest.raises(OptionError, match="add_special='yes'"):
        make(add_special="yes")


def test_budget():
    assert make(tokens=1).tokens == 24 and make(tokens=24).tokens == 24 and make(tokens=25).tokens == 48
    assert make(tokens=192).notes == ()
    short = make(tokens=193)
    assert short.tokens == 192 and "193 tokens were asked for; the text gives 192" in short.notes[0]
    assert torch.equal(make(tokens=30)[0].ids, make()[0].ids), "a budget is a beginning of the whole"
    apart = make(tokens=50, pack=False, batch_size=2)
    assert 50 <= apart.tokens < 50 + 16


def test_a_small_budget_covers_the_corpus(seed):
    corpus = load_corpus([chr(0x4E00 + d) * 50 for d in range(200)])
    batches = token_batches(
        corpus, CharTokenizer.train(corpus), sequence_length=10, batch_size=10, tokens=1000, seed=seed
    )
    documents = torch.cat([batch.ids.flatten() for batch in batches]).unique()
    # 100 of 1000 windows, five a document: about 82 of the 200 documents are met
    assert len(documents) > 65 and documents.double().mean().sub(100).abs() < 35


def test_too_few():
    with pytest.raises(TooFewTokensError, match="gives 213 tokens, which make 26 windows of 8; one batch needs 27"):
        make(batch_size=27)
    with pytest.raises(TooFewTokensError, match="make 0 windows"):
        make(sequence_length=500)
    for options in ({"sequence_length": 0}, {"batch_size": 0}, {"tokens": 0}):
        with pytest.raises(OptionError, match="must be 1 or more"):
            make(**options)
    with pytest.raises(OptionError, match="leaves no room"):
        make(AROUND, sequence_length=2)
    with pytest.raises(IndexError):
        make()[8]


def test_fingerprint_sees_everything():
    batch = make()[0]
    for field in ("ids", "mask", "special", "positions"):
        changed = getattr(batch, field).clone()
        changed[1, 3] = not changed[1, 3] if changed.dtype == torch.bool else changed[1, 3] + 1
        parts = {name: getattr(batch, name) for name in ("ids", "mask", "special", "positions")} | {field: changed}
        assert type(batch)(**parts).fingerprint != batch.fingerprint
    assert batch.to("cpu").fingerprint == batch.fingerprint


def test_with_a_trained_tokenizer():
    corpus = load_corpus(max_chars=100_000)
    tokenizer = train_bpe(corpus, 500)
    batches = token_batches(corpus, tokenizer, sequence_length=64, batch_size=4)
    assert batches.counts.total == sum(map(len, tokenizer.encode_many(corpus.documents)))
    text = tokenizer.decode(batches[0].ids[0].tolist())
    assert text.strip("\ufffd")[5:30] in "".join(corpus)


def test_with_an_encoder():
    path = DATA / "tokenizers" / "bert_uncased_vocab.txt"
    if not path.exists():
        pytest.skip("no vocabulary of BERT here")
    from transformers import BertTokenizerFast

    inner = BertTokenizerFast(str(path))
    texts = ["the cat sat on the mat", "a dog", "it rained and rained and rained all day long in the town"]
    batches = token_batches(
        load_corpus(texts), HFTokenizer(inner), sequence_length=32, batch_size=3, pack=False, seed=3
    )
    (batch,) = batches
    truth = inner(texts, padding="max_length", max_length=32, return_tensors="pt", return_special_tokens_mask=True)
    order = [int((truth["input_ids"] == row).all(dim=1).nonzero()[0, 0]) for row in batch.ids]
    assert sorted(order) == [0, 1, 2]
    assert torch.equal(batch.ids, truth["input_ids"][order])
    assert torch.equal(batch.mask, truth["attention_mask"][order].bool())
    assert torch.equal(batch.special, truth["special_tokens_mask"][order].bool() & batch.mask)


def test_the_example_of_the_document_runs():
    page = (Path(__file__).parents[1] / "docs" / "text.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(code, "docs/text.md", "exec"), names)
    assert len(names["bins"]) == 10 and names["batches"].tokens >= 20_000
    assert names["labels"].shape == names["batch"].ids.shape
