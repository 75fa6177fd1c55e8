"""Quality beside geometry: how often the model names the right token, and what linear probes read off its layers.

Labels come from the text of the looks itself: which token stood some places back, where in the sequence a token
stands, whether the next token is capitalised, whether a word begins there. See docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.errors import ModelError, OptionError, ShapeError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.monitoring.linear_probes import QUARTERS, Classes, Quantity, Told, ratio_over_sequences, tell
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.text.batches import Batch
from anisoscope.text.tokens import Tokenizer

QUALITY = "quality."
ACCURACY = "quality.accuracy"
BASELINE = ".baseline"
NONE = -1
"""The label of a row that has none."""
HIDDEN = "some of the tokens are hidden from the model in a look: it cannot tell them from their own embedding"
UNREADABLE = "\ufffd"  # a piece of a letter in UTF-8, or a symbol outside the alphabet


@dataclass(frozen=True)
class Spelling:
    """What the text of a token says, for each token id: its letters, and where words begin and end in it."""

    letter: Bool[Tensor, "v"]
    """A letter stands in it."""
    capital: Bool[Tensor, "v"]
    """Its first letter is a capital."""
    opens: Bool[Tensor, "v"]
    """Its first character belongs to a word."""
    closes: Bool[Tensor, "v"]
    """Its last character belongs to a word."""
    inside: Bool[Tensor, "v"]
    """A word begins in it after its first character, as after the space of ``_word``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Int64[Tensor, "u"]) -> Spelling:
        """The spelling of some ids; of all others nothing is said."""
        size = int(ids.max()) + 1 if len(ids) else 0
        tables = torch.zeros(5, size, dtype=torch.bool)
        for number in ids.tolist():
            text = tokenizer.decode([number])
            letters = [mark for mark in text if mark.isalpha()]
            words = [is_word(mark) for mark in text]
            begins = any(after and not before for before, after in pairwise(words))
            flags = (letters != [], letters != [] and letters[0].isupper(), words[:1] == [True], words[-1:] == [True])
            tables[:, number] = torch.tensor([*flags, begins])
        return cls(*tables)


def is_word(mark: str) -> bool:
    """Whether a character belongs to a word: letters, digits, and pieces of letters that cannot be read alone."""
    return mark.isalnum() or mark in ("_", UNREADABLE)


@dataclass(frozen=True)
class Pages:
    """The whole text of the looks, since rows may be a sample of it: the token at each position of each sequence.

    ``ids`` is -1 where there is none. ``copies`` numbers the sequences by their content: two with the same tokens have
    the same number, so that none is fitted on while the other is scored.
    """

    ids: Int64[Tensor, "s t"]
    copies: Int64[Tensor, "s"]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Pages:
        """The text of batches, in the order in which looks number their sequences."""
        if not batches:
            raise OptionError("quality needs the batches that every look reads; got none")
        length = max(int(batch.positions.max()) + 1 for batch in batches)
        pages = []
        for batch in batches:
            page = torch.full((len(batch.ids), length), NONE, dtype=torch.int64)
            rows = torch.arange(len(batch.ids))[:, None].expand_as(batch.ids)
            real = batch.mask.cpu()
            page[rows[real], batch.positions.cpu()[real].long()] = batch.ids.cpu()[real].long()
            pages.append(page)
        ids = torch.cat(pages)
        return cls(ids, torch.unique(ids, dim=0, return_inverse=True)[1])

    def at(self, sequences: Int64[Tensor, "n"], positions: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """The tokens at some places; -1 outside the text."""
        inside = (positions >= 0) & (positions < self.ids.shape[1])
        found = self.ids[sequences, positions.clamp(0, self.ids.shape[1] - 1)]
        return torch.where(inside, found, NONE)


class QualityAnalysis:
    """An analysis for the monitor: linear probes at some sites, from the batches that every look reads.

    ``sites`` are names or patterns; ``back`` says how far back the tokens stand that are to be named, and ``types``
    among how many of the most frequent ones. Every probe of a look is fitted on the same rows: those with ``max(back)``
    tokens before them and one after.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        tokenizer: Tokenizer,
        *,
        sites: Sequence[str] = ("*",),
        back: Sequence[int] = (1, 4),
        types: int = 64,
        hidden: bool = False,
    ) -> None:
        if not back or min(back) < 1:
            raise OptionError(f"back={list(back)}: give how many places back, each 1 or more")
        if types < 2:
            raise OptionError(f"types={types}: one type is always named right; give 2 or more")
        self.sites, self.back, self.types = tuple(sites), tuple(dict.fromkeys(back)), types
        self.pages = Pages.of(batches)
        self._check()
        known, counts = self.pages.ids[self.pages.ids >= 0].unique(return_counts=True)
        self.spelling = Spelling.of(tokenizer, known)
        # Ties go to the smaller id, so that the classes of two machines are the same.
        frequent = known[counts.argsort(descending=True, stable=True)[:types]]
        self._number = torch.full((int(known.max()) + 2,), NONE, dtype=torch.int64)
        self._number[frequent] = torch.arange(len(frequent))
        self.count = len(frequent)
        self._notes = (HIDDEN,) if hidden else ()

    def _check(self) -> None:
        """What no look could be probed for is told at once."""
        different, length = len(self.pages.copies.unique()), int((self.pages.ids >= 0).sum(dim=1).max())
        if different < QUARTERS:
            raise TooFewRowsError(
                f"quality needs {QUARTERS} different sequences to fit on some and score on others, and the looks read "
                f"{different}: raise monitor.sequences, or hold out more of the text"
            )
        if length < max(self.back) + 2:
            raise OptionError(
                f"back={max(self.back)}: no place in sequences of {length} tokens has so many before and one after it"
            )

    def wants(self, site: str) -> bool:
        """Whether probes are fitted at a site."""
        return any(fnmatchcase(site, pattern) for pattern in self.sites)

    @torch.no_grad()
    def __call__(self, view: SiteView) -> Mapping[Name, Estimate | Exception]:
        """Every probe at a site, each with its baseline."""
        if not self.wants(view.site):
            return {}
        keep, targets, sequences = self.targets(view)
        found: dict[Name, Estimate | Exception] = {}
        told = tell(view.x[keep.to(view.x.device)], sequences.to(view.x.device), targets)
        for name, one in told.items():
            if isinstance(one, Exception):
                found[name] = one
            else:
                found[name], found[name + BASELINE] = self._estimates(name, one)
        return found

    def state(self) -> dict[str, Tensor]:
        """Nothing is remembered from look to look."""
        return {}

    def restore(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Nothing to go on from."""

    def targets(self, view: SiteView) -> tuple[Bool[Tensor, "n"], dict[str, Classes | Quantity], Int64[Tensor, "m"]]:
        """The rows that are used, what is to be told of each, and the numbers of their sequences."""
        sequences, positions = view.sequences.cpu(), view.positions.cpu()
        if len(sequences) and int(sequences.max()) >= len(self.pages.ids):
            raise ShapeError(f"a row of sequence {int(sequences.max())}, and {len(self.pages.ids)} sequences of text")
        here = self.pages.at(sequences, positions)
        if not torch.equal(here, view.ids.cpu()):
            raise ShapeError("the rows are not those of the batches that quality knows; it needs mode='probe'")
        after, before = self.pages.at(sequences, positions + 1), self.pages.at(sequences, positions - max(self.back))
        keep = (after >= 0) & (before >= 0)
        if not bool(keep.any()):
            raise TooFewRowsError(
                f"no row has {max(self.back)} tokens before it and one after it: look at longer sequences, or less far "
                "back"
            )
        sequences, positions, here, after = (one[keep] for one in (sequences, positions, here, after))
        found: dict[str, Classes | Quantity] = {}
        for k in self.back:
            labels = self._number[self.pages.at(sequences, positions - k)]
            found[f"{QUALITY}token_back_{k}"] = Classes(labels, self.count, labels >= 0)
        found[QUALITY + "position"] = Quantity(positions.double())
        spelled = self.spelling
        if bool(spelled.letter.any()):  # a language of bare symbols has no capitals
            kinds = spelled.capital[after].long() + spelled.letter[after].long()  # 0 no letter, 1 small, 2 capital
            found[QUALITY + "casing"] = Classes(kinds - 1, 2, kinds > 0)
        begins = spelled.inside[after] | (spelled.opens[after] & ~spelled.closes[here])
        found[QUALITY + "word_start"] = Classes(begins.long(), 2, torch.ones_like(begins))
        return keep, found, self.pages.copies[sequences]

    def _estimates(self, name: str, told: Told) -> tuple[Estimate, Estimate]:
        low, high = sorted(told.penalties)
        ridge = f"ridge penalty {low:.0e}" + (f" and {high:.0e}" if high > low else "") + " of the mean variance"
        notes = (*told.probe.notes, f"baseline {told.baseline.value:.6g}", ridge, *self._said(name), *self._notes)
        return replace(told.probe, notes=notes, parts={"gain": told.gain}), told.baseline

    def _said(self, name: str) -> tuple[str, ...]:
        if "token_back" in name:
            return (f"among the {self.count:,} most frequent types; rows with another type are not scored",)
        return ("rows whose next token has no letter are not scored",) if name.endswith("casing") else ()


class TokenAccuracy:
    """How often the most probable token is the right one, next or masked, on the batches that every look reads.

    The model is run once more, without gradients, on what its loss reads. The baseline is the best constant answer:
    the share of the most frequent token among those to be named.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], loss: CausalLoss | MaskedLoss) -> None:
        self.model, self.batches, self.loss = model, tuple(batches), loss
        self._copies = Pages.of(batches).copies

    @torch.no_grad()
    def __call__(self) -> dict[Name, Estimate]:
        """The accuracy and its baseline, with error bars over sequences."""
        right, answers, sequences = [], [], []
        before = 0
        for batch in self.batches:
            wanted, shift = self._wanted(batch)
            said = self._said(batch)[:, : wanted.shape[1]]
            truth = batch.ids[:, shift:].long().cpu()
            right.append((said == truth)[wanted])
            answers.append(truth[wanted])
            sequences.append(before + wanted.nonzero()[:, 0])
            before += len(batch.ids)
        truth, number = torch.cat(answers), self._copies[torch.cat(sequences)]
        if not len(truth):
            raise TooFewRowsError("no token of the looks is predicted; look at longer sequences")
        one = torch.ones(len(truth), dtype=torch.float64)
        kind = "next token" if isinstance(self.loss, CausalLoss) else "masked token"
        found = ratio_over_sequences(torch.cat(right).double(), one, number, f"share of {kind}s named right")
        common = (truth == truth.bincount().argmax()).double()
        baseline = ratio_over_sequences(common, one, number, f"share of the most frequent {kind}")
        gain = ratio_over_sequences(torch.cat(right).double() - common, one, number, "accuracy less baseline")
        notes = (*found.notes, f"baseline {baseline.value:.6g}")
        return {ACCURACY: replace(found, notes=notes, parts={"gain": gain}), ACCURACY + BASELINE: baseline}

    def _wanted(self, batch: Batch) -> tuple[Bool[Tensor, "b _"], int]:
        """Where a token is to be named, and how far after the place that names it."""
        if isinstance(self.loss, CausalLoss):
            return batch.mask[:, 1:].cpu(), 1
        return self.loss.chosen(batch).cpu(), 0

    def _said(self, batch: Batch) -> Int64[Tensor, "b t"]:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        read = self.loss.inputs(batch).to(device)
        found: Any = self.model(input_ids=read.ids.long(), attention_mask=read.mask.long())
        logits = getattr(found, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise ModelError(f"{type(self.model).__name__} gave no logits of shape (b, t, vocabulary)")
        return logits.argmax(dim=-1).cpu()
