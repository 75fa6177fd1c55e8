"""Token counts, the exponent of their Zipf law, and bins of frequency that hold equal shares of the text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import DegenerateError, EmptyInputError, OptionError, ShapeError, choose
from anisoscope.estimate import Estimate

ZIPF_METHODS = ("ml", "regression")


@dataclass(frozen=True)
class TokenCounts:
    """How often each id occurs. ``merge`` adds; ``empty`` is its unit."""

    counts: Int[Tensor, "v"]

    @classmethod
    def empty(cls, vocab_size: int) -> TokenCounts:
        """The counts of no text."""
        if vocab_size < 1:
            raise OptionError(f"vocab_size={vocab_size}: there must be one id or more")
        return cls(torch.zeros(vocab_size, dtype=torch.int64))

    @classmethod
    def of(cls, ids: Int[Tensor, "..."], vocab_size: int) -> TokenCounts:
        """The counts of these ids."""
        return cls.empty(vocab_size).update(ids)

    @property
    def vocab_size(self) -> int:
        """The number of ids, seen or not."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """The number of tokens counted."""
        return int(self.counts.sum())

    @property
    def types(self) -> int:
        """The number of ids seen."""
        return int((self.counts > 0).sum())

    def update(self, ids: Int[Tensor, "..."]) -> TokenCounts:
        """The counts after these ids too."""
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        if len(flat) == 0:
            return self
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high >= self.vocab_size:
            raise OptionError(f"ids run from {low} to {high}, the vocabulary from 0 to {self.vocab_size - 1}")
        return TokenCounts(self.counts + torch.bincount(flat, minlength=self.vocab_size))

    def merge(self, other: TokenCounts) -> TokenCounts:
        """The counts of both texts together."""
        if self.vocab_size != other.vocab_size:
            raise ShapeError(f"cannot merge counts of {self.vocab_size} ids with counts of {other.vocab_size}")
        return TokenCounts(self.counts + other.counts)

    def zipf_exponent(self, method: str = "ml") -> Estimate:
        """The s of ``p(rank) ~ rank^-s`` over the types seen, ranked by their own counts.

        ``ml`` maximises the likelihood of the counts, ``sum c_r (-s log r) - n log sum r^-s``; every token weighs the
        same, so the frequent types decide. ``regression`` is the least-squares slope of log count on log rank; every
        type weighs the same, so the rare ones decide. They differ where the law does not hold throughout, as in most
        texts. Ranks come from the same counts, which bends the rarest ones down: both read high in a short text.
        """
        choose("method", method, ZIPF_METHODS)
        seen = self.counts[self.counts > 0].sort(descending=True).values.to(torch.float64)
        if len(seen) < 3:
            raise DegenerateError(f"{len(seen)} types were seen; a Zipf law needs 3 or more")
        rank = torch.arange(1, len(seen) + 1, dtype=torch.float64).log()
        return _ml(seen, rank, self.total) if method == "ml" else _regression(seen, rank)


def _ml(seen: Float[Tensor, "r"], rank: Float[Tensor, "r"], total: int) -> Estimate:
    target = float((seen * rank).sum() / total)

    def law(s: float) -> tuple[float, float]:
        """Mean and variance of log rank under exponent s."""
        p = torch.softmax(-s * rank, dim=0)
        mean = float(p @ rank)
        return mean, float(p @ (rank - mean).square())

    # The mean of log rank falls as s rises: bisection cannot fail where Newton could run away.
    low, high = -20.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if law(middle)[0] > target else (low, middle)
    s = (low + high) / 2
    note = "the error bar takes tokens as independent draws; tokens of a text are not"
    stderr = 1 / math.sqrt(total * max(law(s)[1], 1e-300))
    return Estimate(value=s, stderr=stderr, n=total, method="zipf_exponent ml", over="tokens", notes=(note,))


def _regression(seen: Float[Tensor, "r"], rank: Float[Tensor, "r"]) -> Estimate:
    y, x = seen.log(), rank - rank.mean()
    slope = float((x @ y) / (x @ x))
    left = y - y.mean() - slope * x
    dof = len(seen) - 2
    stderr = math.sqrt(float(left @ left) / dof / float(x @ x))
    note = "counts in order of rank are dependent: the error bar is that of the fit, too small for another text"
    return Estimate(
        value=-slope,
        stderr=stderr,
        n=len(seen),
        method="zipf_exponent regression",
        over="types",
        dof=dof,
        notes=(note,),
    )


@dataclass(frozen=True)
class FrequencyBins:
    """Bins of log count that hold about equal shares of the tokens, rarest first.

    Types of equal count are never parted. A type or a tie that holds more than one bin's share fills a bin alone, and
    there are then fewer bins than asked for; no bin is empty. Ids that were never seen fall into the first bin.
    """

    lowest: Int[Tensor, "b"]
    """The smallest count in each bin."""
    highest: int
    """The largest count of all."""
    mass: Int[Tensor, "b"]
    """Tokens in each bin."""
    bin_by_id: Int[Tensor, "v"]

    def __len__(self) -> int:
        return len(self.lowest)

    @cached_property
    def edges(self) -> Float[Tensor, "b_plus_1"]:
        """Natural logarithms of counts: bin b holds those from edge b to below edge b + 1, the last bin its end too."""
        return torch.cat([self.lowest, torch.tensor([self.highest])]).to(torch.float64).log()

    @property
    def labels(self) -> tuple[str, ...]:
        """``1 (rarest)`` to ``B (most frequent)``."""
        count = len(self)
        if count == 1:
            return ("1 (all)",)
        return ("1 (rarest)", *(str(b) for b in range(2, count)), f"{count} (most frequent)")

    def bin_of(self, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bin of each id, from 0."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= len(self.bin_by_id)):
            raise OptionError(
                f"ids run from {int(ids.min())} to {int(ids.max())}, the vocabulary from 0 to {len(self.bin_by_id) - 1}"
            )
        return self.bin_by_id.to(ids.device)[ids.to(torch.int64)]


def frequency_bins(counts: TokenCounts, bins: int = 10) -> FrequencyBins:
    """Cut the types, in order of count, into bins of about equal mass.

    All types of one count form a group, which goes where the middle of its mass falls: bin
    ``floor(bins * (mass below + half of its own) / total)``. Bins that get nothing are left out.
    """
    if bins < 1:
        raise OptionError(f"bins={bins}: there must be one bin or more")
    if counts.total == 0:
        raise EmptyInputError("no token was counted, so there is no frequency to bin by")
    seen = counts.counts[counts.counts > 0]
    value_G, types_G = seen.unique(sorted=True, return_counts=True)
    mass_G = value_G * types_G
    # Whole numbers throughout: twice the middle of each group's mass, so that no rounding decides a bin.
    middle_G = 2 * mass_G.cumsum(0) - mass_G
    raw_G = (bins * middle_G).div(2 * counts.total, rounding_mode="floor")
    _, bin_G = raw_G.unique(sorted=True, return_inverse=True)
    total_bins = int(bin_G[-1]) + 1
    lowest = torch.stack([value_G[bin_G == b].min() for b in range(total_bins)])
    mass = torch.zeros(total_bins, dtype=torch.int64).index_add_(0, bin_G, mass_G)
    at = torch.searchsorted(value_G, counts.counts.clamp_min(int(value_G[0])))
    return FrequencyBins(lowest, int(value_G[-1]), mass, bin_G[at])
