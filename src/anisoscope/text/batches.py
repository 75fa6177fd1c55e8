"""Batches of tokens: deterministic from a seed, re-iterable, with a fingerprint of what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anisoscope.errors import OptionError, TooFewTokensError
from anisoscope.meanwhile import GivenUp
from anisoscope.text.corpus import Corpus
from anisoscope.text.frequency import TokenCounts
from anisoscope.text.tokens import Tokenizer

ENCODED_AT_ONCE = 1 << 18  # characters handed to the tokenizer together: its working memory is far larger than the text


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of token ids.

    ``mask`` is True at real tokens, special ones among them, and False at padding. ``special`` is True at tokens that
    the tokenizer put around or between texts. ``positions`` count from 0 at the first real token of a sequence and are
    0 at padding.
    """

    ids: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    special: Bool[Tensor, "b t"]
    positions: Int[Tensor, "b t"]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of shape and content."""
        digest = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for part, dtype in ((self.ids, "<i8"), (self.mask, "u1"), (self.special, "u1"), (self.positions, "<i8")):
            digest.update(np.ascontiguousarray(part.cpu().numpy(), dtype=dtype).tobytes())
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(*(part.to(device) for part in (self.ids, self.mask, self.special, self.positions)))


@dataclass(frozen=True, eq=False)
class TokenBatches:
    """Windows of a token stream in a shuffled order, cut into batches when asked for. Iterate as often as you like.

    ``counts`` are of the whole tokenised corpus, special tokens apart. ``notes`` say where less came than asked.
    """

    stream: Int[Tensor, "n"]
    """All documents one after another."""
    parting: Bool[Tensor, "n"]
    """True at tokens that part documents."""
    starts: Int[Tensor, "w"]
    """Where each window begins in the stream, in the order of use."""
    lengths: Int[Tensor, "w"]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_id: int
    sequence_length: int
    batch_size: int
    counts: TokenCounts
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.starts) // self.batch_size

    def __repr__(self) -> str:
        shape = f"{self.batch_size} x {self.sequence_length}"
        return f"TokenBatches({len(self):,} batches of {shape}, {self.tokens:,} tokens of {self.counts.total:,})"

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    @property
    def tokens(self) -> int:
        """Real tokens in all batches, special ones among them."""
        return int(self.lengths.sum()) + len(self.lengths) * (len(self.prefix) + len(self.suffix))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the fingerprints of all batches in order: the same exactly where every batch is the same."""
        digest = hashlib.sha256()
        for batch in self:
            digest.update(batch.fingerprint.encode())
        return digest.hexdigest()

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
        start_B1, length_B1 = self.starts[rows, None], self.lengths[rows, None]
        before, after = len(self.prefix), len(self.suffix)
        at_T = torch.arange(self.sequence_length)
        inside_BT = (at_T >= before) & (at_T < before + length_B1)
        source_BT = (start_B1 + at_T - before).clamp(0, len(self.stream) - 1)
        ids = torch.where(inside_BT, self.stream[source_BT].long(), self.pad_id)
        special = torch.where(inside_BT, self.parting[source_BT], False)
        for place, token in enumerate(self.prefix):
            ids[:, place], special[:, place] = token, True
        for place, token in enumerate(self.suffix):
            at = before + length_B1 + place
            ids.scatter_(1, at, token)
            special.scatter_(1, at, True)
        mask = at_T < before + length_B1 + after
        return Batch(ids, mask, special, torch.where(mask, at_T, 0))


def token_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    batch_size: int,
    tokens: int | None = None,
    seed: int = 0,
    pack: bool = True,
    add_special: bool | str = "auto",
    ids: Sequence[Int[np.ndarray, "_"]] | None = None,
) -> TokenBatches:
    """Cut a corpus into windows and deal them into batches of ``batch_size`` sequences of ``sequence_length``.

    Windows do not overlap and come in an order shuffled by ``seed``, so that a small budget covers the whole corpus.
    ``pack``: documents form one stream, parted by the tokenizer's eos where it has one, and every window is full.
    Otherwise no window crosses the end of a document, and short ones are padded on the right.
    ``add_special``: "auto" puts around each window what the tokenizer itself would (``[CLS]`` … ``[SEP]``, ``<s>``);
    True asks for it, and is an error where the tokenizer adds nothing; False leaves it out.
    ``tokens`` stops at the first whole batch that reaches so many real tokens. A last batch that would not be full is
    left out. ``ids`` is what ``encode(corpus, tokenizer)`` gave, where it has been asked already.
    """
    _check(sequence_length, batch_size, tokens)
    prefix, suffix = _around(tokenizer, add_special)
    room = sequence_length - len(prefix) - len(suffix)
    if room < 1:
        raise OptionError(
            f"sequence_length={sequence_length} leaves no room beside {len(prefix) + len(suffix)} special tokens"
        )
    parts = [part for part in (encode(corpus, tokenizer) if ids is None else ids) if len(part)]
    if not parts:
        raise TooFewTokensError(f"{corpus.name} gives no token at all with this tokenizer")
    counts = TokenCounts.of(torch.from_numpy(np.concatenate(parts)), tokenizer.vocab_size)
    eos = tokenizer.special_ids.get("eos") if pack else None
    stream, parting, bounds = _join(parts, eos)
    generator = torch.Generator().manual_seed(seed)
    starts, lengths = _packed(len(stream), room, generator) if pack else _apart(bounds, room)
    order = torch.randperm(len(starts), generator=generator)
    starts, lengths = starts[order], lengths[order]
    windows, notes = _budget(lengths + len(prefix) + len(suffix), batch_size, tokens)
    if windows < batch_size:
        raise TooFewTokensError(
            f"{corpus.name} gives {counts.total:,} tokens, which make {len(starts):,} windows of {sequence_length}; "
            f"one batch needs {batch_size}: give more text, or a smaller sequence_length or batch_size"
        )
    return TokenBatches(
        stream=stream,
        parting=parting,
        starts=starts[:windows],
        lengths=lengths[:windows],
        prefix=prefix,
        suffix=suffix,
        pad_id=int(tokenizer.special_ids.get("pad", 0)),
        sequence_length=sequence_length,
        batch_size=batch_size,
        counts=counts,
        notes=notes,
    )


def _check(sequence_length: int, batch_size: int, tokens: int | None) -> None:
    for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size), ("tokens", tokens)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: must be 1 or more")


def _around(tokenizer: Tokenizer, add_special: bool | str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if add_special is False:
        return (), ()
    if add_special not in (True, "auto"):
        raise OptionError(f"add_special={add_special!r}: must be 'auto', True or False")
    prefix, suffix = tuple(tokenizer.prefix), tuple(tokenizer.suffix)
    if add_special is True and not prefix + suffix:
        raise OptionError("add_special=True, but this tokenizer adds no special token; use 'auto'")
    return prefix, suffix


def encode(corpus: Corpus, tokenizer: Tokenizer, given_up: GivenUp = lambda: False) -> list[Int[np.ndarray, "_"]]:
    """Ids of each document. ``given_up`` is asked now and then whether anybody still wants to know."""
    parts: list[Int[np.ndarray, "_"]] = []
    group: list[str] = []
    size = 0
    for document in corpus:
        group.append(document)
        size += len(document)
        if size >= ENCODED_AT_ONCE:
            if given_up():
                raise CancelledError
            parts += tokenizer.encode_many(group)
            group, size = [], 0
    return [*parts, *tokenizer.encode_many(group)]


def _join(
    parts: list[Int[np.ndarray, "_"]], eos: int | None
) -> tuple[Int[Tensor, "n"], Bool[Tensor, "n"], Int[Tensor, "d_plus_1"]]:
    """The stream, where it holds a parting token, and where each document begins and the last one ends."""
    extra = 0 if eos is None else 1
    length = torch.tensor([len(part) + extra for part in parts])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    parting = torch.zeros(int(bounds[-1]), dtype=torch.bool)
    if eos is None:
        return torch.from_numpy(np.concatenate(parts)), parting, bounds
    end = np.array([eos], dtype=parts[0].dtype)
    stream = torch.from_numpy(np.concatenate([piece for part in parts for piece in (part, end)]))
    parting[bounds[1:] - 1] = True
    return stream, parting, bounds


def _packed(total: int, room: int, generator: torch.Generator) -> tuple[Int[Tensor, "w"], Int[Tensor, "w"]]:
    """Full windows side by side; the tokens that fill no window are left at both ends, by chance."""
    windows = total // room
    offset = int(torch.randint(total - windows * room + 1, (1,), generator=generator))
    return offset + room * torch.arange(windows), torch.full((windows,), room)


def _apart(bounds: Int[Tensor, "d_plus_1"], room: int) -> tuple[Int[Tensor, "w"], Int[Tensor, "w"]]:
    """Windows of each document on its own, the last one as long as what is left."""
    length = bounds.diff()
    windows = (length + room - 1) // room
    document = torch.repeat_interleave(torch.arange(len(length)), windows)
    place = torch.arange(len(document)) - (windows.cumsum(0) - windows)[document]
    return bounds[document] + room * place, (length[document] - room * place).clamp_max(room)


def _budget(lengths: Int[Tensor, "w"], batch_size: int, tokens: int | None) -> tuple[int, tuple[str, ...]]:
    """How many windows to use, whole batches only, and a note where they hold fewer tokens than asked for."""
    batches = len(lengths) // batch_size
    if tokens is None or batches == 0:
        return batches * batch_size, ()
    reached = lengths[: batches * batch_size].view(batches, batch_size).sum(dim=1).cumsum(0)
    enough = int(torch.searchsorted(reached, tokens)) + 1
    if enough > batches:
        note = f"{tokens:,} tokens were asked for; the text gives {int(reached[-1]):,} in whole batches"
        return batches * batch_size, (note,)
    return enough * batch_size, ()
