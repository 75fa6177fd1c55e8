"""The table of model families: under which module paths each of them keeps what the sites name.

Paths are relative to the core: the module that holds the list of blocks (``model`` in a ``LlamaForCausalLM``, the model
itself in a bare ``LlamaModel``). ``attn``, ``mlp`` and ``mixer`` are relative to a block; their *input* is what the
projections read. An index of -1 counts from the end, as in Python. A family not listed goes through ``structure.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where one family of models keeps its parts. ``None`` means that the family has no such part."""

    embed: str
    blocks: str
    attn: str | None = None
    mlp: str | None = None
    mixer: str | None = None
    final_norm: str | None = None
    sides: tuple[str, ...] = ("",)
    """Names of the cores where there are two (encoder and decoder), each with blocks of its own."""
    flat_mlp: bool = False
    """Whether the MLP is given the rows of all sequences glued together, (b*t, d) in place of (b, t, d)."""
    after_block: tuple[tuple[int, str], ...] = ()
    """(block, module): what leaves this block passes through the module, where the model has it, before the next."""
    shared: bool = False
    """Whether few blocks are run many times over, as ALBERT does."""


BERT = Family(
    embed="embeddings.word_embeddings",
    blocks="encoder.layer",
    attn="attention.self",
    mlp="intermediate",
)
GPT2 = Family(embed="wte", blocks="h", attn="attn", mlp="mlp", final_norm="ln_f")
LLAMA = Family(embed="embed_tokens", blocks="layers", attn="self_attn", mlp="mlp", final_norm="norm")
NEOX = Family(embed="embed_in", blocks="layers", attn="attention", mlp="mlp", final_norm="final_layer_norm")
FALCON = Family(embed="word_embeddings", blocks="h", attn="self_attention", mlp="mlp", final_norm="ln_f")
MAMBA = Family(embed="embeddings", blocks="layers", mixer="mixer", final_norm="norm_f")
T5 = Family(
    embed="embed_tokens",
    blocks="block",
    attn="layer.0.SelfAttention",
    mlp="layer.-1.DenseReluDense",
    final_norm="final_layer_norm",
    sides=("encoder", "decoder"),
)
OPT = replace(LLAMA, mlp="fc1", final_norm="final_layer_norm", flat_mlp=True)
ALBERT = Family(
    embed="embeddings.word_embeddings",
    blocks="encoder.albert_layer_groups",
    attn="attention",
    mlp="ffn",
    shared=True,
)
MODERNBERT = Family(embed="embeddings.tok_embeddings", blocks="layers", attn="attn", mlp="mlp", final_norm="final_norm")
DISTILBERT = Family(embed="embeddings.word_embeddings", blocks="transformer.layer", attn="attention", mlp="ffn")

FAMILIES: dict[str, Family] = {
    # encoders
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "camembert": BERT,
    "electra": BERT,
    "deberta": BERT,
    # An optional convolution stands behind the first block, and its output is what the second block reads.
    "deberta-v2": replace(BERT, after_block=((0, "encoder.conv"),)),
    "albert": ALBERT,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
    "eurobert": LLAMA,
    # decoders
    "gpt2": GPT2,
    "gptj": GPT2,
    "gpt_neo": GPT2,
    "gpt_neox": NEOX,
    "opt": OPT,
    "bloom": FALCON,
    "falcon": FALCON,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "olmo3": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": LLAMA,
    "gemma3": LLAMA,
    "gemma3_text": LLAMA,
    "phi": replace(LLAMA, final_norm="final_layernorm"),
    "phi3": LLAMA,
    # both sides
    "t5": T5,
    "mt5": T5,
    # no attention
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "falcon_mamba": MAMBA,
}
