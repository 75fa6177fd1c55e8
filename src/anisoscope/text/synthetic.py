"""Languages with a chosen Zipf law: the same law of single tokens at every order, with structure to learn above it.

**The construction.** Lay the tokens on the unit interval, token i on a stretch of length p_i, in order of rank. Lay
them a second time in a shuffled order. Given token i, draw a point uniformly on its stretch in the first layout and
read the token j whose stretch in the second layout holds that point. With S_i and T_j the two stretches,

    K_ij = |S_i ∩ T_j| / p_i,    so    sum_i p_i K_ij = |T_j| = p_j:

every such kernel keeps the law p exactly, whatever the shuffle, and so does every mixture of kernels. At most 2V - 1 of
the V^2 pairs can follow each other (both layouts together have that many cut points), frequent tokens have many
successors and rare ones one or two, as in text.

**The chain.** Token t is drawn afresh from p with probability ``fresh``; otherwise a lag between 1 and ``order`` and
one of the ``branches`` kernels of that lag are drawn uniformly, and the kernel is applied to the token that far back (a
mixture transition model). If tokens t-1 … t-order each have law p, so has token t, since each term of the mixture keeps
p; the first tokens are drawn from p. By induction every single token has exactly the law p, at every order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError
from anisoscope.estimate import Estimate

SMALL_ORDER_1 = 2048  # largest vocabulary whose V x V matrix is made
SMALL_ORDER_2 = 128  # largest vocabulary whose V x V x V table is made
SAMPLE_TOKENS = 400_000  # for the entropy rate where no exact sum is in reach
BLOCKS = 64  # for its error bar: stretches of the sample longer than the chain remembers


@dataclass(frozen=True)
class ZipfLanguage:
    """A stationary source of tokens 0 … V-1 with ``p(rank) ~ (rank + shift)^-exponent``; id 0 is the most frequent.

    ``order`` 0 draws tokens independently; 1 and 2 depend on so many tokens before. ``seed`` fixes the language (its
    shuffles), not the text. ``fresh`` is the share of tokens that depend on nothing, ``branches`` the number of kernels
    at each lag: both raise the entropy rate and leave the law of single tokens as it is.
    """

    vocab_size: int
    exponent: float = 1.0
    order: int = 1
    seed: int = 0
    shift: float = 0.0
    fresh: float = 0.1
    branches: int = 2

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise OptionError(f"vocab_size={self.vocab_size}: a language has two tokens or more")
        if self.order not in (0, 1, 2):
            raise OptionError(f"order={self.order}: must be 0, 1 or 2")
        if not 0 < self.fresh <= 1:
            raise OptionError(f"fresh={self.fresh}: must lie above 0, or text may run in circles, and not above 1")
        if self.branches < 1:
            raise OptionError(f"branches={self.branches}: must be 1 or more")
        if not self.shift > -1:
            raise OptionError(f"shift={self.shift}: must be above -1, or the first rank has no weight")

    @cached_property
    def unigram(self) -> Float[Tensor, "v"]:
        """The law of single tokens."""
        rank = torch.arange(1, self.vocab_size + 1, dtype=torch.float64)
        return torch.softmax(-self.exponent * (rank + self.shift).log(), dim=0)

    @cached_property
    def _starts(self) -> Float[Tensor, "v_plus_1"]:
        """Where each token's stretch begins in the layout by rank, and the end of the last one."""
        return _cuts(self.unigram)

    @cached_property
    def _kernels(self) -> tuple[tuple[_Layout, ...], ...]:
        """The shuffled layouts, by lag and branch."""
        generator = torch.Generator().manual_seed(self.seed)

        def layout() -> _Layout:
            order = torch.randperm(self.vocab_size, generator=generator)
            cuts = _cuts(self.unigram[order])
            first = torch.empty(self.vocab_size, dtype=torch.float64)
            first[order] = cuts[:-1]
            return _Layout(order, cuts, first)

        return tuple(tuple(layout() for _ in range(self.branches)) for _ in range(self.order))

    def lag_kernel(self, lag: int) -> Float[Tensor, "v v"]:
        """The mixture of kernels at a lag, as a matrix: row i is the law of a token that follows i at that lag."""
        if not 1 <= lag <= self.order:
            raise OptionError(f"lag={lag}: a language of order {self.order} has lags 1 to {self.order}")
        if self.vocab_size > SMALL_ORDER_1:
            raise OptionError(f"vocab_size={self.vocab_size}: matrices are made up to {SMALL_ORDER_1}")
        every = torch.arange(self.vocab_size)
        pairs = [self._overlap(layout, every[:, None], every) for layout in self._kernels[lag - 1]]
        return torch.stack(pairs).mean(dim=0) / self.unigram[:, None]

    @cached_property
    def transition(self) -> Float[Tensor, "*past v"]:
        """The law of the next token given the ``order`` tokens before it, the oldest on the first axis."""
        p, stay = self.unigram, 1 - self.fresh
        if self.order == 0:
            return p
        if self.order == 1:
            return self.fresh * p + stay * self.lag_kernel(1)
        if self.vocab_size > SMALL_ORDER_2:
            raise OptionError(f"vocab_size={self.vocab_size}: tables of order 2 are made up to {SMALL_ORDER_2}")
        return self.fresh * p + stay / 2 * (self.lag_kernel(1)[None] + self.lag_kernel(2)[:, None])

    def sample(self, length: int, seed: int = 0) -> Int[Tensor, "n"]:
        """A text of that length from the stationary law.

        Each token depends on one earlier token at most, so the text is a forest: its roots are drawn first, then all
        their children at once, and so on: as many rounds as the forest is deep, some ``log(length) / fresh``.
        """
        if length < 1:
            raise OptionError(f"length={length}: a text has one token or more")
        generator = torch.Generator().manual_seed(seed)
        point = torch.rand(length, generator=generator, dtype=torch.float64)
        if self.order == 0:
            return self._at(point)
        kernel = torch.randint(self.order * self.branches, (length,), generator=generator)
        lag = 1 + kernel // self.branches
        root = torch.rand(length, generator=generator) < self.fresh
        root |= torch.arange(length) < lag
        lag = lag.masked_fill(root, 0)
        ids = torch.zeros(length, dtype=torch.int64)
        level = root.nonzero()[:, 0]
        ids[level] = self._at(point[level])
        while len(level):
            children = []
            for back in range(1, self.order + 1):
                child = level[level < length - back] + back
                children.append(child[lag[child] == back])
            level = torch.cat(children)
            ids[level] = self._follow(ids[level - lag[level]], kernel[level], point[level])
        return ids

    def log_prob(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "m"]:
        """Log probability of each token from the ``order``-th on, given those before it."""
        now = ids[self.order :]
        p = self.fresh * self.unigram[now] if self.order else self.unigram[now]
        for lag in range(1, self.order + 1):
            past = ids[self.order - lag : len(ids) - lag]
            for layout in self._kernels[lag - 1]:
                share = (1 - self.fresh) / (self.order * self.branches)
                p = p + share * self._overlap(layout, past, now) / self.unigram[past]
        return p.log()

    @property
    def unigram_entropy(self) -> float:
        """Entropy of single tokens in nats."""
        return float(-(self.unigram * self.unigram.log()).sum())

    @cached_property
    def entropy_rate(self) -> Estimate:
        """Nats a token that no model can go below: exact for orders 0, 1 and small vocabularies, else from a text."""
        if self.order == 0:
            value, how = self.unigram_entropy, "exact"
        elif self.order == 1:
            value, how = self._entropy_of_order_1(), "exact sum over pairs"
        elif self.vocab_size <= SMALL_ORDER_2:
            value, how = self._entropy_of_order_2(), "exact sum over triples"
        else:
            return self._entropy_of_a_text()
        return Estimate(
            value=value, stderr=None, n=self.vocab_size, method=how, notes=("no sampling, so no error bar",)
        )

    def _at(self, point: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
        return (torch.searchsorted(self._starts, point, right=True) - 1).clamp_(0, self.vocab_size - 1)

    def _follow(self, past: Int[Tensor, "n"], kernel: Int[Tensor, "n"], point: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
        place = self._starts[past] + self.unigram[past] * point
        out = torch.empty_like(past)
        for number, layout in enumerate(layout for layouts in self._kernels for layout in layouts):
            chosen = kernel == number
            found = torch.searchsorted(layout.cuts, place[chosen], right=True) - 1
            out[chosen] = layout.order[found.clamp_(0, self.vocab_size - 1)]
        return out

    def _overlap(self, layout: _Layout, past: Int[Tensor, "..."], now: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The joint probability of the pair: the length that their stretches share."""
        end = torch.minimum(self._starts[past] + self.unigram[past], layout.first[now] + self.unigram[now])
        return (end - torch.maximum(self._starts[past], layout.first[now])).clamp_min(0.0)

    def _entropy_of_order_1(self) -> float:
        """Sum over the pairs that some kernel allows; all others are reached by fresh draws only, in closed form."""
        p, v = self.unigram, self.vocab_size
        keys, masses = [], []
        for layout in self._kernels[0]:
            cuts = torch.cat([self._starts, layout.cuts]).sort().values
            length, middle = cuts.diff(), (cuts[1:] + cuts[:-1]) / 2
            past = self._at(middle)
            now = layout.order[(torch.searchsorted(layout.cuts, middle, right=True) - 1).clamp_(0, v - 1)]
            keys.append(past * v + now)
            masses.append(length * (1 - self.fresh) / self.branches)
        key, where = torch.cat(keys).unique(return_inverse=True)
        mass = torch.zeros(len(key), dtype=torch.float64).index_add_(0, where, torch.cat(masses))
        past, now = key // v, key % v
        joint = mass + self.fresh * p[past] * p[now]
        total = -(joint * (joint / p[past]).log()).sum()
        # sum over all pairs of fresh p_i p_j log(fresh p_j), less the pairs counted above
        alone = self.fresh * (p * (self.fresh * p).log()).sum()
        counted = (self.fresh * p[past] * p[now] * (self.fresh * p[now]).log()).sum()
        return float(total - (alone - counted))

    def _entropy_of_order_2(self) -> float:
        table = self.transition
        pair = self.unigram[:, None] * self.unigram[None]
        for _ in range(10_000):
            new = torch.einsum("ki,kij->ij", pair, table)
            if float((new - pair).abs().sum()) < 1e-14:
                break
            pair = new
        row = -torch.special.xlogy(table, table).sum(dim=2)
        return float((pair * row).sum())

    def _entropy_of_a_text(self) -> Estimate:
        bits = -self.log_prob(self.sample(SAMPLE_TOKENS, seed=self.seed))
        block = bits[: len(bits) // BLOCKS * BLOCKS].view(BLOCKS, -1).mean(dim=1)
        stderr = float(block.std() / BLOCKS**0.5)
        return Estimate(
            value=float(bits.mean()),
            stderr=stderr,
            n=len(bits),
            method="mean of -log p over a text",
            over="blocks of consecutive tokens",
            dof=BLOCKS - 1,
        )


@dataclass(frozen=True)
class _Layout:
    """A second layout of the tokens on the unit interval."""

    order: Int[Tensor, "v"]
    cuts: Float[Tensor, "v_plus_1"]
    first: Float[Tensor, "v"]
    """By token: where its stretch begins."""


def _cuts(lengths: Float[Tensor, "v"]) -> Float[Tensor, "v_plus_1"]:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def zipf_language(
    vocab_size: int, exponent: float = 1.0, *, order: int = 0, length: int, seed: int = 0
) -> Int[Tensor, "n"]:
    """Token ids with exactly the law ``p(rank) ~ rank^-exponent`` at every order; ``seed`` fixes the text, not the
    language: see ZipfLanguage for more languages and what they hold."""
    return ZipfLanguage(vocab_size, exponent, order=order).sample(length, seed)
