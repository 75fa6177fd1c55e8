"""llama2.c files against a slow reading of the same format: its forward pass and its tokenizer, written out plainly."""

import itertools
import lzma
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import ModelError
from anisoscope.models.llama2c import HEADER, halves_from_pairs, load_tokenizer, looks_like_llama2c, read_vocabulary
from anisoscope.models.load import load_model

DATA = Path(__file__).parents[2] / "shared" / "data"
STORIES = DATA / "stories260k"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K files are not here")


def stories(count):
    """The first stories of the sample: paragraphs are parted by an empty line, stories by a line break alone."""
    text = lzma.decompress((DATA / "tinystories_sample" / "tiny_stories.txt.xz").read_bytes()).decode()
    return re.split(r"(?<!\n)\n(?!\n)", text)[:count]


def write_model(path, *, seed=0, shared=True, dim=16, hidden=24, layers=2, heads=4, kv=2, vocabulary=300, context=32):
    """A random model in the legacy layout, tensor by tensor."""
    rng = np.random.default_rng(seed)
    kv_dim = dim // heads * kv
    shapes = [(vocabulary, dim), (layers, dim), (layers, dim, dim), (layers, kv_dim, dim), (layers, kv_dim, dim)]
    shapes += [(layers, dim, dim), (layers, dim), (layers, hidden, dim), (layers, dim, hidden), (layers, hidden, dim)]
    shapes += [(dim,), (context, dim // heads // 2), (context, dim // heads // 2)]
    shapes += [] if shared else [(vocabulary, dim)]
    tensors = [rng.normal(size=shape).astype("<f4") * 0.4 for shape in shapes]
    sign = 1 if shared else -1
    header = struct.pack("<7i", dim, hidden, layers, heads, kv, sign * vocabulary, context)
    path.write_bytes(header + b"".join(tensor.tobytes() for tensor in tensors))
    return path


def slow_logits(path, ids):
    """The forward pass as the C program does it: one token after another, rotating pairs of neighbouring numbers."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv, vocabulary, context = struct.unpack_from("<7i", raw)
    flat, place = np.frombuffer(raw, dtype="<f4", offset=HEADER.size).astype(np.float64), 0
    shared, vocabulary, size = vocabulary > 0, abs(vocabulary), dim // heads

    def take(*shape):
        nonlocal place
        count = math.prod(shape)
        place += count
        return flat[place - count : place].reshape(shape)

    emb, rms_att = take(vocabulary, dim), take(layers, dim)
    wq, wk, wv = take(layers, dim, dim), take(layers, kv * size, dim), take(layers, kv * size, dim)
    wo, rms_ffn = take(layers, dim, dim), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    rms_final, _ = take(dim), take(2, context, size // 2)
    out = emb if shared else take(vocabulary, dim)

    def rms(x, w):
        return w * x / np.sqrt((x * x).mean() + 1e-5)

    def rotate(x, position):
        x = x.copy()
        for i in range(0, len(x), 2):
            angle = position / 10000 ** ((i % size) / size)
            a, b = x[i], x[i + 1]
            x[i], x[i + 1] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
        return x

    keys, values, logits = [[] for _ in range(layers)], [[] for _ in range(layers)], []
    for position, token in enumerate(ids):
        x = emb[token]
        for layer in range(layers):
            h = rms(x, rms_att[layer])
            q = rotate(wq[layer] @ h, position)
            keys[layer].append(rotate(wk[layer] @ h, position))
            values[layer].append(wv[layer] @ h)
            heads_out = []
            for head in range(heads):
                mine = slice(head // (heads // kv) * size, (head // (heads // kv) + 1) * size)
                k, v = np.stack(keys[layer])[:, mine], np.stack(values[layer])[:, mine]
                scores = k @ q[head * size : (head + 1) * size] / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                heads_out.append(weights @ v / weights.sum())
            x = x + wo[layer] @ np.concatenate(heads_out)
            h = rms(x, rms_ffn[layer])
            gate = w1[layer] @ h
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ h))
        logits.append(out @ rms(x, rms_final))
    return np.stack(logits)


def slow_encode(path, text):
    """Encoding as the C program does it: a space in front, characters or their bytes, the best-scored merge first."""
    vocabulary = read_vocabulary(path)
    number = {token: i for i, (token, _) in reversed(list(enumerate(vocabulary)))}
    ids = [number[b" "]] if text else []
    for character in text:
        raw = character.encode()
        ids += [number[raw]] if raw in number else [byte + 3 for byte in raw]
    while True:
        best = None
        for i, (a, b) in enumerate(itertools.pairwise(ids)):
            merged = number.get(vocabulary[a][0] + vocabulary[b][0])
            if merged is not None and (best is None or vocabulary[merged][1] > best[0]):
                best = (vocabulary[merged][1], i, merged)
        if best is None:
            return ids
        ids[best[1] : best[1] + 2] = [best[2]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_the_converted_model_is_the_c_program(tmp_path, shared, kv, seed):
    path = write_model(tmp_path / "m.bin", shared=shared, kv=kv, seed=seed)
    loaded = load_model(path)
    assert (loaded.family, loaded.kind, loaded.tokenizer) == ("llama", "decoder", None)
    assert "tokenizer" in loaded.notes[0]
    ids = np.random.default_rng(seed).integers(0, 300, 20)
    truth = slow_logits(path, ids)
    with torch.no_grad():
        logits = loaded.model.double()(torch.from_numpy(ids)[None]).logits[0].numpy()
    # float32 rotary angles are the only rounding left
    np.testing.assert_allclose(logits, truth, rtol=0, atol=1e-5 * np.abs(truth).max())


def test_the_rotary_permutation_matters(tmp_path, monkeypatch):
    path = write_model(tmp_path / "m.bin")
    ids = np.arange(20)
    truth = slow_logits(path, ids)
    monkeypatch.setattr("anisoscope.models.llama2c.halves_from_pairs", lambda weight, head_dim: weight)
    with torch.no_grad():
        logits = load_model(path).model(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(logits - truth).max() > 0.01 * np.abs(truth).max()


def test_pairs_become_halves():
    rows = torch.arange(8.0)[:, None]
    assert halves_from_pairs(rows, 8)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert halves_from_pairs(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_truncated_and_foreign_files_are_named_errors(tmp_path):
    path = write_model(tmp_path / "m.bin")
    assert looks_like_llama2c(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(ModelError, match=r"m\.bin has .* bytes, its header asks for .*: the file is cut off"):
        load_model(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(ModelError, match="too long"):
        load_model(path)
    path.write_bytes(raw[:20])
    with pytest.raises(ModelError, match="20 bytes, too few for the header"):
        load_model(path)
    path.write_bytes(b"PK\x03\x04 this is a zip file, and it is long enough to hold a header")
    with pytest.raises(ModelError, match=r"is no llama2\.c file"):
        load_model(path)
    assert not looks_like_llama2c(path)
    with pytest.raises(ModelError, match=r"no config.json, no .gguf and no llama2.c .bin; it holds m.bin"):
        load_model(tmp_path)


@needs_stories
def test_a_damaged_tokenizer_is_an_error(tmp_path):
    raw = (STORIES / "tok512.bin").read_bytes()
    for cut in (raw[:-1], raw[:-3], raw[:400], b""):
        (tmp_path / "tok.bin").write_bytes(cut)
        with pytest.raises(ModelError, match=r"tok\.bin"):
            load_tokenizer(tmp_path / "tok.bin")


@pytest.fixture(scope="module")
def stories260k():
    return load_model(STORIES)


@needs_stories
def test_stories260k_tells_its_published_story(stories260k):
    assert (stories260k.parameters, stories260k.family, stories260k.notes) == (260_032, "llama", ())
    ids = torch.tensor([[1]])
    with torch.no_grad():
        for _ in range(40):
            ids = torch.cat([ids, stories260k.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    story = stories260k.tokenizer.decode(ids[0, 1:])
    assert story.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )


@needs_stories
def test_stories260k_reads_stories_as_the_c_program_does(stories260k):
    ids = stories260k.tokenizer(stories(1)[0]).input_ids[:40]
    truth = slow_logits(STORIES / "stories260K.bin", ids)
    with torch.no_grad():
        logits = stories260k.model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, truth, rtol=0, atol=1e-4 * np.abs(truth).max())


@needs_stories
def test_stories260k_predicts_tiny_stories(stories260k):
    """A model of 512 tokens that knew nothing would lose ln 512 = 6.2 a token; a wrong rotary order, 5."""
    total = count = 0
    for story in stories(20):
        ids = stories260k.tokenizer(story, return_tensors="pt").input_ids[:, :512]
        with torch.no_grad():
            total += stories260k.model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert 1.2 < total / count < 1.6


@needs_stories
def test_the_tokenizer_encodes_stories_as_the_c_program_does(stories260k):
    for story in stories(3):
        assert stories260k.tokenizer(story, add_special_tokens=False).input_ids == slow_encode(
            STORIES / "tok512.bin", story
        )
    ids = stories260k.tokenizer(stories(1)[0]).input_ids
    assert ids[0] == 1  # begins with <s>
    assert stories260k.tokenizer.decode(ids, skip_special_tokens=True) == stories(1)[0]


@needs_stories
@given(st.text(alphabet=st.sampled_from("abehost ,.!\n<s>/0x▁éß€😀\0"), max_size=30))
def test_the_tokenizer_encodes_any_text_as_the_c_program_does(text):
    tokenizer = load_tokenizer(STORIES / "tok512.bin")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == slow_encode(STORIES / "tok512.bin", text)
    assert tokenizer.decode(ids) == text
