"""Tiny random models of every family, and what is known of each from its own code: the oracle of the site tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

WIDTH, LAYERS, VOCABULARY = 32, 3, 50
TINY = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
GPT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**TINY, "ffn_dim": 48}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
FALCON = {key: value for key, value in TINY.items() if key != "intermediate_size"}
MODERN = {**TINY, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}
MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "state_size": 4}
MAMBA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

QKV = ("q_proj", "k_proj", "v_proj")
BERT_QKV = ("self.query", "self.key", "self.value")


@dataclass(frozen=True)
class Known:
    """A family: how to build it, and where inside a block its projections and norms lie."""

    config: str
    options: dict
    head: str = "CausalLM"
    attn: str = "self_attn"
    qkv: tuple[str, ...] = QKV
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    attn_norm: str | None = "input_layernorm"
    """The norm between the state that enters a block and its attention, or None in post-norm blocks."""
    final_norm: bool = True


LLAMA = {"options": GROUPED}
BERT = {
    "options": TINY,
    "head": "MaskedLM",
    "attn": "attention",
    "qkv": BERT_QKV,
    "mlp": "intermediate",
    "up": ("dense",),
    "attn_norm": None,
    "final_norm": False,
}
DEBERTA_V2 = {**BERT, "qkv": ("self.query_proj", "self.value_proj")}
RELATIVE = {**TINY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
GPT2 = {"options": GPT, "attn": "attn", "qkv": ("c_attn",), "up": ("c_fc",), "attn_norm": "ln_1"}
OPT_PRE = {"mlp": "fc1", "up": ("",), "attn_norm": "self_attn_layer_norm"}
FALCONS = {"attn": "self_attention", "qkv": ("query_key_value",), "up": ("dense_h_to_4h",)}
NEOX = {"options": TINY, "attn": "attention", "qkv": ("query_key_value",), "up": ("dense_h_to_4h",)}

KNOWN = {
    "bert": Known("BertConfig", **BERT),
    "roberta": Known("RobertaConfig", **BERT),
    "xlm-roberta": Known("XLMRobertaConfig", **BERT),
    "camembert": Known("CamembertConfig", **BERT),
    "electra": Known("ElectraConfig", **{**BERT, "options": {**TINY, "embedding_size": 16}}),
    "deberta": Known("DebertaConfig", **{**BERT, "options": RELATIVE, "qkv": ("self.in_proj",)}),
    "deberta-v2": Known("DebertaV2Config", **{**DEBERTA_V2, "options": RELATIVE}),
    "deberta-v2-conv": Known("DebertaV2Config", **{**DEBERTA_V2, "options": {**RELATIVE, "conv_kernel_size": 3}}),
    "distilbert": Known(
        "DistilBertConfig",
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY},
        "MaskedLM",
        attn="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        mlp="ffn",
        up=("lin1",),
        attn_norm=None,
        final_norm=False,
    ),
    "modernbert": Known(
        "ModernBertConfig", MODERN, "MaskedLM", attn="attn", qkv=("Wqkv",), up=("Wi",), attn_norm="attn_norm"
    ),
    "eurobert": Known("EuroBertConfig", {**GROUPED, "mask_token_id": 3}, "MaskedLM"),
    "opt": Known("OPTConfig", OPT, **OPT_PRE),
    "opt-projected": Known("OPTConfig", {**OPT, "word_embed_proj_dim": 16}, **OPT_PRE),
    "opt-post-norm": Known(
        "OPTConfig",
        {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        **{**OPT_PRE, "attn_norm": None, "final_norm": False},
    ),
    "gpt2": Known("GPT2Config", **GPT2),
    "gptj": Known("GPTJConfig", **{**GPT2, "options": {**GPT, "rotary_dim": 4}, "qkv": QKV, "up": ("fc_in",)}),
    "gpt_neo": Known(
        "GPTNeoConfig",
        {
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "attention_types": [[["global"], LAYERS]],
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        attn="attn",
        qkv=tuple(f"attention.{name}" for name in QKV),
        up=("c_fc",),
        attn_norm="ln_1",
    ),
    "gpt_neox": Known("GPTNeoXConfig", **NEOX),
    "gpt_neox-serial": Known("GPTNeoXConfig", **{**NEOX, "options": {**TINY, "use_parallel_residual": False}}),
    "bloom": Known(
        "BloomConfig",
        {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "pad_token_id": 0},
        **FALCONS,
    ),
    "falcon": Known("FalconConfig", FALCON, **FALCONS),
    "falcon-new": Known("FalconConfig", {**FALCON, "new_decoder_architecture": True}, **FALCONS, attn_norm="ln_attn"),
    "falcon-serial": Known("FalconConfig", {**FALCON, "parallel_attn": False, "alibi": True}, **FALCONS),
    "llama": Known("LlamaConfig", **LLAMA),
    "mistral": Known("MistralConfig", **LLAMA),
    "olmo": Known("OlmoConfig", **LLAMA),
    "olmo2": Known("Olmo2Config", **LLAMA, attn_norm=None),
    "olmo3": Known("Olmo3Config", **LLAMA, attn_norm=None),
    "qwen2": Known("Qwen2Config", **LLAMA),
    "qwen3": Known("Qwen3Config", HEADS),
    "gemma": Known("GemmaConfig", HEADS),
    "gemma2": Known("Gemma2Config", HEADS),
    "gemma3_text": Known("Gemma3TextConfig", HEADS),
    "phi": Known("PhiConfig", TINY, up=("fc1",)),
    "phi3": Known("Phi3Config", GROUPED, qkv=("qkv_proj",), up=("gate_up_proj",)),
    "mixtral": Known("MixtralConfig", {**GROUPED, "num_local_experts": 2}, up=("gate",)),
}


def build(name: str, known: Known | None = None, *, head: str | None = None) -> torch.nn.Module:
    """A random model in eval mode. Every weight is drawn, so that no norm and no bias is the identity by chance."""
    known = known or KNOWN[name]
    config = getattr(transformers, known.config)(**known.options)
    auto = "AutoModel" if head == "" else f"AutoModelFor{head or known.head}"
    model = getattr(transformers, auto).from_config(config).eval()
    return randomise(model)


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def token_ids(batch: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Ids of ordinary tokens: none of the special ones of the tiny vocabularies."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def checkpoint(model, **options) -> None:
    """Let a model compute its activations again in the backward pass, by the name that its transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    model.enable_input_require_grads()
