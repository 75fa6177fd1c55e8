"""Zipf languages as training data: an exact exponent, a known entropy rate, and everything else equal.

Two languages that differ in their exponent alone share shuffles, and their texts share every random draw: which tokens
are fresh, which lag and kernel each of the others follows, and the point on the unit interval that decides it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from jaxtyping import Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from anisoscope.models.build import Count
from anisoscope.text.synthetic import ZipfLanguage
from anisoscope.text.tokens import CharTokenizer

ZIPF = "zipf"
"""The source of a recipe whose text is a language of ours."""
FIRST_CHARACTER = 0x20000  # tokens are written as ideographs, one each: a checkpoint's tokenizer can read them
TEXT_SEED = 0

Exponent = Annotated[float, Field(ge=0.0, le=5.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LanguageSpec(_Part):
    """A language as ``ZipfLanguage`` takes it, and how much of it there is. The vocabulary is the tokenizer's."""

    exponent: Exponent = 1.0
    order: Literal[0, 1, 2] = 1
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Of the language, not of its text."""
    shift: Annotated[float, Field(gt=-1.0, allow_inf_nan=False)] = 0.0
    fresh: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    branches: Count = 2
    tokens: Count = 1_000_000

    def language(self, vocab_size: int) -> ZipfLanguage:
        """The language itself."""
        return ZipfLanguage(vocab_size, **self.model_dump(exclude={"tokens"}))


class LanguageChange(_Part):
    """What one model's language has otherwise than that of the recipe."""

    exponent: Exponent

    def of(self, spec: LanguageSpec) -> LanguageSpec:
        """The changed language."""
        return spec.model_copy(update=self.model_dump())


def check_source(source: str, has_language: bool, tokenizer: str) -> None:
    """A language is read as ids and has no other tokenizer; a text is the other way round."""
    if source != ZIPF and has_language:
        raise ValueError(f"a language is for source {ZIPF}, not for {source!r}; leave it out, or say source: {ZIPF}")
    if source != ZIPF and tokenizer == "ids":
        raise ValueError(f"tokenizer ids is for source {ZIPF}, whose text is ids; a text needs bpe or char")
    if source == ZIPF and tokenizer != "ids":
        raise ValueError(
            f"the text of source {ZIPF} is ids, which tokenizer {tokenizer} cannot read; "
            "use tokenizer: {kind: ids, vocab_size: N}"
        )
    if source == ZIPF and not has_language:
        raise ValueError(f"source {ZIPF} needs a language, such as language: {{exponent: 1.0}}")


def write_text(
    spec: LanguageSpec, vocab_size: int, most: int | None = None
) -> tuple[ZipfLanguage, Int[Tensor, "n"], CharTokenizer, dict[str, Any]]:
    """The language, its text as ids, a tokenizer that would read it, and name, size and fingerprint for the record.

    Token i of the language has id i + 1, as a tokenizer of characters keeps id 0 for what it does not know.
    """
    language = spec.language(vocab_size)
    length = spec.tokens if most is None else min(spec.tokens, most)
    ids = language.sample(length, TEXT_SEED).int() + 1
    tokenizer = CharTokenizer(tuple(range(FIRST_CHARACTER, FIRST_CHARACTER + vocab_size)))
    said = json.dumps([spec.model_dump(mode="json"), vocab_size, length, TEXT_SEED], sort_keys=True)
    name = f"Zipf language, exponent {spec.exponent:g}, order {spec.order}, {vocab_size:,} types"
    return language, ids, tokenizer, {"name": name, "characters": length, "fingerprint": _sha256(said)}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
