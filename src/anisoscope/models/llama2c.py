"""llama2.c: small Llama models in one binary file, with a tokenizer in another. Read without any code of theirs.

Layout of a legacy model file: seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len), a
negative vocab_size saying that the output matrix is not the embedding; then float32 tensors, those of the layers
stacked: embedding, rms_att, wq, wk, wv, wo, rms_ffn, w1, w2, w3, rms_final, two rotary tables that nobody needs, and
the output matrix where it is not shared. A tokenizer file: int32 longest token; for each token a float32 score, an
int32 length and its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anisoscope.errors import ModelError

HEADER = struct.Struct("<7i")
BYTE_TOKENS = 256
FIRST_BYTE_TOKEN = 3
"""Ids 0, 1 and 2 are unknown, begin and end; then one token for each byte."""


@dataclass(frozen=True, slots=True)
class Header:
    """The seven numbers at the head of a file, checked."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    shared_output: bool

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the file, in the order of the file."""
        dim, hidden, layers, kv = self.dim, self.hidden, self.layers, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocabulary, dim),
            "rms_att": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, kv, dim),
            "wv": (layers, kv, dim),
            "wo": (layers, dim, dim),
            "rms_ffn": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "rms_final": (dim,),
            "rotary": (2, self.context, self.head_dim // 2),
        }
        return shapes if self.shared_output else {**shapes, "output": (self.vocabulary, dim)}

    def file_bytes(self) -> int:
        """How long the file must be."""
        return HEADER.size + 4 * sum(int(np.prod(shape)) for shape in self.shapes().values())


def looks_like_llama2c(path: Path) -> bool:
    """Whether a .bin file has a llama2.c header and the length that goes with it."""
    try:
        return path.suffix == ".bin" and read_header(path).file_bytes() == path.stat().st_size
    except (ModelError, OSError):
        return False


def read_header(path: Path) -> Header:
    """Read and check the head of a file."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise ModelError(f"{path} has {len(raw)} bytes, too few for the header of a llama2.c file")
    dim, hidden, layers, heads, kv_heads, vocabulary, context = HEADER.unpack(raw)
    numbers = (dim, hidden, layers, heads, kv_heads, abs(vocabulary), context)
    sound = all(0 < number < 1 << 24 for number in numbers)
    if not sound or dim % heads or heads % kv_heads or (dim // heads) % 2:
        raise ModelError(f"{path} is no llama2.c file: its first seven numbers {numbers} describe no Llama model")
    return Header(dim, hidden, layers, heads, kv_heads, abs(vocabulary), context, vocabulary > 0)


def read_tensors(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """The header and all tensors of a file."""
    header = read_header(path)
    size, wanted = path.stat().st_size, header.file_bytes()
    if size != wanted:
        state = "cut off" if size < wanted else "too long, or of a later llama2.c format"
        raise ModelError(f"{path} has {size:,} bytes, its header asks for {wanted:,}: the file is {state}")
    flat = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=HEADER.size))
    pieces = flat.split([int(np.prod(shape)) for shape in header.shapes().values()])
    return header, {
        name: piece.reshape(shape) for (name, shape), piece in zip(header.shapes().items(), pieces, strict=True)
    }


def load_llama2c(path: Path) -> nn.Module:
    """The model of a file, as a ``LlamaForCausalLM``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    header, tensors = read_tensors(path)
    config = LlamaConfig(
        vocab_size=header.vocabulary,
        hidden_size=header.dim,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.kv_heads,
        max_position_embeddings=header.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.shared_output,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    outcome = model.load_state_dict(_state(header, tensors), strict=False)
    missing = [key for key in outcome.missing_keys if not (header.shared_output and key == "lm_head.weight")]
    if missing or outcome.unexpected_keys:  # only a change in transformers' names could bring this about
        raise ModelError(f"{path}: weights do not fit transformers' Llama: {missing + outcome.unexpected_keys}")
    return model.eval()


def _state(header: Header, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that transformers uses."""
    state = {"model.embed_tokens.weight": tensors["embedding"], "model.norm.weight": tensors["rms_final"]}
    if not header.shared_output:
        state["lm_head.weight"] = tensors["output"]
    names = {
        "input_layernorm": "rms_att",
        "self_attn.q_proj": "wq",
        "self_attn.k_proj": "wk",
        "self_attn.v_proj": "wv",
        "self_attn.o_proj": "wo",
        "post_attention_layernorm": "rms_ffn",
        "mlp.gate_proj": "w1",
        "mlp.down_proj": "w2",
        "mlp.up_proj": "w3",
    }
    for layer in range(header.layers):
        for name, short in names.items():
            weight = tensors[short][layer]
            if short in ("wq", "wk"):
                weight = halves_from_pairs(weight, header.head_dim)
            state[f"model.layers.{layer}.{name}.weight"] = weight
    return state


def halves_from_pairs(weight: Float[Tensor, "m d"], head_dim: int) -> Float[Tensor, "m d"]:
    """Reorder the rows of each head: rotary pairs (2i, 2i+1) of llama2.c become (i, i + head_dim/2) of transformers."""
    rows, width = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, width).transpose(1, 2).reshape(rows, width)


def read_vocabulary(path: Path) -> list[tuple[bytes, float]]:
    """Bytes and score of each token in a tokenizer file."""
    raw = path.read_bytes()
    tokens: list[tuple[bytes, float]] = []
    place = 4
    while place < len(raw):
        if place + 8 > len(raw):
            raise ModelError(f"{path} is cut off inside token {len(tokens)}")
        score, length = struct.unpack_from("<fi", raw, place)
        place += 8
        if length < 0 or place + length > len(raw):
            raise ModelError(f"{path} is cut off inside token {len(tokens)}, or is no llama2.c tokenizer")
        tokens.append((raw[place : place + length], score))
        place += length
    if len(tokens) < FIRST_BYTE_TOKEN + BYTE_TOKENS:
        raise ModelError(f"{path} holds {len(tokens)} tokens; a llama2.c tokenizer has at least one for each byte")
    return tokens


def find_tokenizer(model_path: Path, vocabulary: int) -> Path | None:
    """The tokenizer file beside a model that has as many tokens as the model."""
    for path in sorted(model_path.parent.glob("tok*.bin")):
        try:
            if len(read_vocabulary(path)) == vocabulary:
                return path
        except ModelError:
            continue
    return None


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, as a transformers tokenizer: a space in front, then merges of the best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [(token.decode("utf-8", "surrogateescape"), score) for token, score in read_vocabulary(path)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS))]
    names += [token for token, _ in tokens[len(names) :]]
    vocabulary = {name: number for number, name in enumerate(names)}
    core = Tokenizer(
        models.BPE(vocabulary, _merges(names, [score for _, score in tokens]), unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Prepend(" ")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        # Text is text: a story that holds the characters "<s>" does not begin anew there.
        split_special_tokens=True,
    )


def _merges(names: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, those of the best score first."""
    plain = set(names[FIRST_BYTE_TOKEN + BYTE_TOKENS :])
    found = []
    for number, name in enumerate(names):
        if name in plain:
            halves = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
            found += [(-scores[number], number, pair) for pair in halves if set(pair) <= plain]
    return [pair for _, _, pair in sorted(found)]
