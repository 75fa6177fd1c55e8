"""Models from scratch: GPT-2-, Llama- and BERT-like, with or without the causal mask, attention uniform or removed.

They are transformers' own modules, so sites, loading and saving are those of any other model. A variant differs from
its neighbour in one thing alone: for one seed the weights are the same bit for bit, whatever mask the model wears.

Ablations of attention are written into the weights, not only into the code that runs them: a saved checkpoint computes
the same in any program that loads it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from anisoscope.errors import ModelError
from anisoscope.models.library import quiet_transformers

Architecture = Literal["gpt2", "llama", "bert"]
Attention = Literal["full", "uniform", "none"]
Count = Annotated[int, Field(strict=True, ge=1)]

UNIFORM, NONE = "anisoscope_uniform", "anisoscope_none"  # names under which transformers finds our attention
WIDEN = 4  # inner width of an MLP over the model's width
LLAMA_WIDEN = 8 / 3  # the same for a gated MLP, which has three matrices in place of two
LLAMA_ROUND = 32


class ModelSpec(BaseModel):
    """What a model is built from. ``vocab_size`` and ``context`` (the longest sequence) come from the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Architecture = "gpt2"
    layers: Count
    width: Count
    heads: Count
    vocab_size: Count
    context: Count
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of a Llama only attention weights are dropped: the architecture has no other place for it."""
    causal: bool = True
    attention: Attention = "full"
    """"uniform" averages over the positions that the mask allows; "none" adds nothing to the residual stream."""
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> ModelSpec:
        check_heads(self.architecture, self.width, self.heads)
        return self


def check_heads(architecture: str, width: int, heads: int) -> None:
    """Refuse, with a ValueError for pydantic, heads that do not share the width."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}; give each head the same share")
    if architecture == "llama" and (width // heads) % 2:
        raise ValueError(f"width {width} over heads {heads} is {width // heads}; rotary positions need an even number")


def build_model(spec: ModelSpec, seed: int) -> nn.Module:
    """A model with fresh weights, in training mode, on the CPU. No random generator outside is touched.

    ``attention="uniform"`` zeroes the query projections, ``"none"`` the output projections (frozen, as is all of the
    attention, which then gets no gradient); everything else has the same weights as the full model of the same seed.
    """
    import transformers

    with torch.random.fork_rng(devices=[]), quiet_transformers():  # which would remark on a causal BERT
        register_attention()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPU's generators too
        if spec.architecture == "gpt2":
            model: Any = transformers.GPT2LMHeadModel(_gpt2(spec))
            # transformers reads the kind of loss off the name of the class, and this name does not say it.
            model.loss_type = "ForCausalLM"
        elif spec.architecture == "llama":
            model = transformers.LlamaForCausalLM(_llama(spec))
        else:
            model = transformers.BertForMaskedLM(_bert(spec))
    if spec.attention != "full":
        _ablate(model, spec.attention)
    if not spec.causal and spec.attention != "none":
        _check_sees_ahead(model.eval(), spec)
    return model.train()


@torch.no_grad()
def _check_sees_ahead(model: Any, spec: ModelSpec) -> None:
    """A transformers that does not know is_causal would build a causal model without a word; ask the model itself."""
    if min(spec.context, spec.vocab_size) < 2:
        return
    before, after = (model(input_ids=torch.tensor([[0, last]])).logits[0, 0] for last in (0, 1))
    if torch.equal(before, after):
        from transformers import __version__

        raise ModelError(
            f"transformers {__version__} does not take the causal mask off a {spec.architecture} model; "
            "install a newer one, or use architecture bert"
        )


def _common(spec: ModelSpec) -> dict[str, Any]:
    """What every configuration is told. Ids of special tokens are the tokenizer's business."""
    plain = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    # BERT has a name of its own for the causal mask, and with is_causal would lose it to a padding mask.
    mask = "is_decoder" if spec.architecture == "bert" else "is_causal"
    return plain | {
        mask: spec.causal,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_embeddings,
        "use_cache": False,
        "attn_implementation": {"full": "sdpa", "uniform": UNIFORM, "none": NONE}[spec.attention],
    }


def _gpt2(spec: ModelSpec) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=spec.width,
        n_layer=spec.layers,
        n_head=spec.heads,
        n_positions=spec.context,
        n_inner=WIDEN * spec.width,
        resid_pdrop=spec.dropout,
        embd_pdrop=spec.dropout,
        attn_pdrop=spec.dropout,
        # The function of "gelu_new" in one kernel: written out, it is a third of the time of a forward pass on a GPU.
        activation_function="gelu_pytorch_tanh",
        **_common(spec),
    )


def _llama(spec: ModelSpec) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=spec.width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        intermediate_size=LLAMA_ROUND * max(round(LLAMA_WIDEN * spec.width / LLAMA_ROUND), 1),
        max_position_embeddings=spec.context,
        attention_dropout=spec.dropout,
        **_common(spec),
    )


def _bert(spec: ModelSpec) -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=spec.width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        intermediate_size=WIDEN * spec.width,
        max_position_embeddings=spec.context,
        type_vocab_size=1,
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        **_common(spec),
    )


def register_attention() -> None:
    """Tell transformers of our two kinds of attention. Doing it twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, function in ((UNIFORM, _uniform_attention), (NONE, _no_attention)):
        AttentionInterface.register(name, function)
        # Without a mask of its own an attention gets none at all, padding included.
        AttentionMaskInterface.register(name, sdpa_mask)


def _uniform_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Equal scores over the allowed positions: queries of zero, so masks, dropout and kernels are the usual ones."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mixed, _ = sdpa_attention_forward(
        module, torch.zeros_like(query), key.detach(), value, attention_mask, **options
    )  # queries and keys get no gradient: they have nothing to learn here
    return mixed, None


def _no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Nothing is mixed in from anywhere."""
    return torch.zeros_like(value).transpose(1, 2).contiguous(), None


@torch.no_grad()
def _ablate(model: nn.Module, attention: str) -> None:
    """Write the ablation into the weights: an ordinary attention over them then computes the same."""
    module: Any
    for module in model.modules():
        match type(module).__name__:
            case "GPT2Attention":
                queries, out, parts = module.c_attn, module.c_proj, [module]
            case "LlamaAttention":
                queries, out, parts = module.q_proj, module.o_proj, [module]
            case "BertAttention":
                # The norm behind the attention belongs to the residual stream and goes on learning.
                queries, out, parts = module.self.query, module.output.dense, [module.self, module.output.dense]
            case _:
                continue
        if attention == "none":
            for parameter in out.parameters():
                parameter.zero_()
            for part in parts:
                part.requires_grad_(False)
        else:
            # GPT-2 keeps queries, keys and values side by side in one matrix of D rows, queries first. Their share of
            # the gradient is exactly zero, so they stay at zero.
            width = queries.weight.shape[0]
            for parameter in queries.parameters():
                parameter[..., :width] = 0.0
