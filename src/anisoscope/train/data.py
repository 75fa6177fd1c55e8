"""Training data: a token stream cut into windows, and the batch of any step as a pure function of seed and step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import TooFewTokensError
from anisoscope.text.batches import Batch, token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.frequency import TokenCounts
from anisoscope.text.synthetic import ZipfLanguage
from anisoscope.text.tokens import CharTokenizer, HFTokenizer, train_bpe
from anisoscope.train.interventions import FrequencyPlan, FrequencySpec, known_exponent, plan_frequency
from anisoscope.train.languages import LanguageChange, write_text
from anisoscope.train.recipe import EMBEDDED, DataSpec, TokenizerSpec

IGNORED = -100
"""The target of a position that is not scored."""
MASK_TOKEN = "<mask>"
UNKNOWN_TOKEN = "<unk>"
END_OF_TEXT = "<|endoftext|>"

MASKED_SHARE = 0.15  # the shares of BERT: of the chosen positions 80 % hide, 10 % lie, 10 % stay
HIDDEN_SHARE, RANDOM_SHARE = 0.8, 0.1

SPLIT, ORDER, MASKS, HELD_OUT_MASKS = range(4)  # what a generator is for: streams that never meet


@dataclass(frozen=True, eq=False)
class Sequences:
    """What a model reads and what it should say: ``targets`` are ``IGNORED`` where nothing is scored.

    ``weights`` are those of the targets in the loss; None where all are 1.
    """

    ids: Int[Tensor, "b t"]
    targets: Int[Tensor, "b t"]
    weights: Float[Tensor, "b t"] | None = None

    @property
    def scored(self) -> int:
        """The number of positions that the loss is a mean over."""
        return int((self.targets != IGNORED).sum())

    def split(self, parts: int) -> tuple[Sequences, ...]:
        """Cut into equal parts, for gradient accumulation."""
        weights = (None,) * parts if self.weights is None else self.weights.chunk(parts)
        cut = zip(self.ids.chunk(parts), self.targets.chunk(parts), weights, strict=True)
        return tuple(Sequences(i, t, w) for i, t, w in cut)

    def to(self, device: torch.device) -> Sequences:
        """The same on a device; the copy to a GPU does not wait."""
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return Sequences(self.ids.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), weights)


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Windows of a token stream, some of them held out. Made by ``prepare``."""

    stream: Int[Tensor, "n"]
    starts: Int[np.ndarray, "w"]
    """Where the windows for training begin."""
    held_out: Int[np.ndarray, "v"]
    """Where the windows for validation begin; they share no token with the others."""
    sequence_length: int
    tokenizer: CharTokenizer | HFTokenizer
    counts: TokenCounts
    corpus: dict[str, Any]
    """Name, size and fingerprint of the corpus, for the record."""
    language: ZipfLanguage | None = None
    """What the text was drawn from, where that is known."""
    frequency: FrequencyPlan | None = None
    """What is done to token frequency in training; validation and probes are never touched."""

    @property
    def mask_id(self) -> int:
        """The id that hides a token. Every model has it, so that objectives change nothing in a model's shape."""
        return self.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, and the mask."""
        return self.tokenizer.vocab_size + 1

    def batch(self, step: int, batch_size: int, objective: str, seed: int) -> Sequences:
        """The sequences of update ``step`` (from 1): a pure function of its arguments, so a resumed run reads on.

        Every window is read once before any is read again, in an order of its own in each round.
        """
        first = (step - 1) * batch_size
        numbers = np.arange(first, first + batch_size)
        rounds, places = np.divmod(numbers, len(self.starts))
        starts = np.empty(batch_size, dtype=np.int64)
        for one in np.unique(rounds):
            order = _order(seed, int(one), len(self.starts))
            order = order if self.frequency is None else self.frequency.windows(order, int(one), seed)
            starts[rounds == one] = self.starts[order[places[rounds == one]]]
        found = self._sequences(starts, objective, [MASKS, seed, step])
        weights = None if self.frequency is None else self.frequency.weights(found.targets, step, seed)
        return found if weights is None else replace(found, weights=weights)

    def validation(self, sequences: int, objective: str) -> Sequences:
        """Held-out windows, at most so many; the same ones, masked the same way, for every model and seed."""
        return self._sequences(self.held_out[:sequences], objective, [HELD_OUT_MASKS])

    def probe(self, sequences: int) -> Batch:
        """Held-out windows as a batch to look at, at most so many; taken from the other end than those of validation.

        Tokens that part documents count as special, so that no row of theirs is measured.
        """
        starts = self.held_out[::-1][:sequences].copy()  # torch knows no negative strides
        at_BT = torch.from_numpy(starts)[:, None] + torch.arange(self.sequence_length)
        ids = self.stream[at_BT].long()
        eos = self.tokenizer.special_ids.get("eos", IGNORED)
        positions = torch.arange(self.sequence_length).expand_as(ids).contiguous()
        return Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids == eos, positions)

    def with_frequency(self, spec: FrequencySpec | None, objective: str) -> TrainingData:
        """The same with token frequency changed as asked, or with its exponent told where nothing is asked."""
        rows = self.starts // self.sequence_length
        windows = self.stream[: (int(rows.max()) + 1) * self.sequence_length].view(-1, self.sequence_length)[rows]
        targets = windows if objective == "masked" else windows[:, 1:]
        plan = plan_frequency(spec, targets, self.vocab_size)
        return replace(self, frequency=plan if self.language is None else known_exponent(plan, self.language))

    def _sequences(self, starts: Int[np.ndarray, "b"], objective: str, masks: list[int]) -> Sequences:
        """Windows that begin there; ``masks`` is what a generator for them is seeded with, made only where asked."""
        at_BT = torch.from_numpy(starts)[:, None] + torch.arange(self.sequence_length)
        ids = self.stream[at_BT].long()
        if objective == "masked":
            return mask_tokens(ids, self.mask_id, np.random.default_rng(masks))
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        return Sequences(ids, targets)


@lru_cache(maxsize=4)
def _order(seed: int, number: int, windows: int) -> Int[np.ndarray, "w"]:
    return np.random.default_rng([ORDER, seed, number]).permutation(windows)


def mask_tokens(ids: Int[Tensor, "b t"], mask_id: int, random: np.random.Generator) -> Sequences:
    """Choose 15 % of the positions; of these hide 80 %, replace 10 % by a random token, leave 10 %. Score only them.

    Ids below ``mask_id`` are the tokens that a random one is drawn from.
    """
    shape = tuple(ids.shape)
    chosen = torch.from_numpy(random.random(shape) < MASKED_SHARE)
    fate = torch.from_numpy(random.random(shape))
    drawn = torch.from_numpy(random.integers(0, mask_id, shape))
    shown = torch.where(chosen & (fate < HIDDEN_SHARE), mask_id, ids)
    lie = chosen & (fate >= HIDDEN_SHARE) & (fate < HIDDEN_SHARE + RANDOM_SHARE)
    return Sequences(torch.where(lie, drawn, shown), torch.where(chosen, ids, IGNORED))


def prepare(
    spec: DataSpec, tokenizer: TokenizerSpec | None = None, language: LanguageChange | None = None
) -> TrainingData:
    """Read the corpus, train the tokenizer on it, cut windows side by side and hold some out.

    ``tokenizer`` is that of a variant which reads the corpus otherwise than ``spec`` says, ``language`` that of one
    whose language differs.
    """
    wanted = tokenizer or spec.tokenizer
    if spec.language is not None:
        assert wanted.vocab_size is not None
        drawn = spec.language if language is None else language.of(spec.language)
        source, ids, characters, about = write_text(drawn, wanted.vocab_size, spec.max_chars)
        return _cut(spec, ids, characters, TokenCounts.of(ids, characters.vocab_size), about, source)
    corpus = load_corpus(None if spec.source == EMBEDDED else spec.source, kind=spec.kind, max_chars=spec.max_chars)
    made: CharTokenizer | HFTokenizer
    if wanted.kind == "char":
        made = CharTokenizer.train(corpus)
    else:
        assert wanted.vocab_size is not None  # the recipe was checked
        made = train_bpe(corpus, wanted.vocab_size, end_of_text=END_OF_TEXT)
    whole = token_batches(corpus, made, sequence_length=spec.sequence_length, batch_size=1, add_special=False)
    about = {"name": corpus.name, "characters": corpus.characters, "fingerprint": corpus.fingerprint}
    return _cut(spec, whole.stream, made, whole.counts, about)


def _cut(
    spec: DataSpec,
    stream: Int[Tensor, "n"],
    tokenizer: CharTokenizer | HFTokenizer,
    counts: TokenCounts,
    about: dict[str, Any],
    language: ZipfLanguage | None = None,
) -> TrainingData:
    """Windows side by side, some of them held out."""
    windows = len(stream) // spec.sequence_length
    held = max(round(windows * spec.held_out), 1)
    if windows - held < 1:
        raise TooFewTokensError(
            f"{about['name']} gives {windows} window(s) of {spec.sequence_length} tokens; training needs one and "
            "validation another: give more text, or a smaller sequence_length"
        )
    # Not by the seed of a training: losses of different seeds are compared on the same windows.
    starts = spec.sequence_length * np.random.default_rng([SPLIT]).permutation(windows)
    return TrainingData(
        stream=stream,
        starts=np.sort(starts[held:]),
        held_out=starts[:held],
        sequence_length=spec.sequence_length,
        tokenizer=tokenizer,
        counts=counts,
        corpus=about | {"tokenizer": tokenizer.fingerprint},
        language=language,
    )


def as_transformers(data: TrainingData) -> Any:
    """The tokenizer with its mask as transformers has them, to lie beside the weights of a checkpoint."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if isinstance(data.tokenizer, HFTokenizer):
        backend, roles = Tokenizer.from_str(data.tokenizer.backend.to_str()), {"eos_token": END_OF_TEXT}
    else:
        vocabulary = {UNKNOWN_TOKEN: 0} | {chr(code): n for n, code in enumerate(data.tokenizer.alphabet, start=1)}
        backend, roles = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN)), {"unk_token": UNKNOWN_TOKEN}
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token=MASK_TOKEN, model_max_length=data.sequence_length, **roles
    )
