"""Tiny models with tokenizers as folders on disk, the way people have them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import train_bpe

VOCABULARY, WIDTH, LAYERS = 400, 32, 3


def save_decoder(folder: Path, seed: int = 0, **options) -> Path:
    """A random GPT-2 of three layers with a BPE tokenizer."""
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        # A random model is nearly linear; larger weights give layers that differ.
        for block in model.transformer.h:
            block.mlp.c_fc.weight *= 8
            block.attn.c_proj.weight *= 8
        for name, value in options.items():
            model.get_parameter(name.replace("__", ".")).fill_(value)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


_TOKENIZER: list = []


def tokenizer():
    if not _TOKENIZER:
        corpus = load_corpus(None, max_chars=60_000)
        bpe = train_bpe(corpus, VOCABULARY)
        _TOKENIZER.append(transformers.PreTrainedTokenizerFast(tokenizer_object=bpe.inner, eos_token="<|endoftext|>"))
    return _TOKENIZER[0]
