"""Honest nulls: the reader gradient with its signal permuted, and proxies tested on sequences they never saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.tangent.controls import check_basis
from anisoscope.tangent.energy import DRAWS, EnergyTest, Gradients, run_test
from anisoscope.tangent.units import FEWEST, Halves, Units, in_range, mean_of_halves, p_value, stream

SCHEMES = ("tokens", "within", "sequences")
GATHER = 150  # multiplications of a matrix product in the time that one element is gathered and summed
GRAM_ROWS = 12_288  # rows whose three Gram matrices still fit in memory (1.8 GB of float32)


@dataclass(frozen=True)
class PermutedNull:
    """A reader gradient's share beside that of the same signals dealt out to other tokens.

    ``share`` has its error bar over rows or sequences. ``excess`` is share minus ``null_mean``; its error bar is the
    spread of a share under the null, over permutations, so that its interval covers 0 where signal and activation are
    independent.
    """

    share: Estimate
    excess: Estimate
    null_shares: Float[Tensor, "b"]
    null_mean: float
    p: float
    scheme: str


def reader_share(
    activations: Float[Tensor, "n d"],
    signals: Float[Tensor, "n m"],
    basis: Float[Tensor, "d k"],
    *,
    groups: Int[Tensor, "g"] | None = None,
) -> Estimate:
    """Input-side share of the reader gradient ``dW = sum_i g_i x_i^T``: ``|dW Q|^2 / |dW|^2``.

    For signals g independent of x this is the activations' share in Q by construction; see ``permuted_signal_null``.
    The error bar leaves out one row or group at a time from the sum. Where the signals' sum is mostly noise, shares
    of it vary more than any error bar from one draw can tell, and the bar is rough.
    """
    x, g, units = _checked(activations, signals, basis, groups)
    return _reader_share(x, g, basis.to(x), units)


def _checked(
    activations: Tensor, signals: Tensor, basis: Tensor, groups: Tensor | None
) -> tuple[Tensor, Tensor, Units]:
    x, g = in_range(activations, "activations"), in_range(signals, "signals")
    if len(x) != len(g):
        raise ShapeError(f"{len(x)} rows of activations and {len(g)} of signals; one signal for each token is needed")
    check_basis(basis, x.shape[1])
    dtype = torch.promote_types(x.dtype, g.dtype)
    return x.to(dtype), g.to(dtype), Units.of(groups, len(x), x.device)


def _reader_share(x: Tensor, g: Tensor, q: Tensor, units: Units) -> Estimate:
    whole = g.T @ x
    xq = x @ q
    part = whole @ q
    bottom, top = float(whole.double().square().sum()), float(part.double().square().sum())
    if not bottom > 0:
        raise DegenerateError("the reader gradient is zero: signals and activations cancel")
    method = "|dW Q|^2 / |dW|^2, input side"
    if units.count < FEWEST:
        return Estimate(value=top / bottom, stderr=None, n=len(x), method=method)
    # |dW - dW_u|^2 = |dW|^2 - 2 <dW, dW_u> + |dW_u|^2, and <dW, dW_u> is a sum over the rows of u.
    left_top = top - 2 * units.sum(((g @ part) * xq).sum(dim=1)) + _own(g, xq, units)
    left_bottom = bottom - 2 * units.sum(((g @ whole) * x).sum(dim=1)) + _own(g, x, units)
    without = left_top / left_bottom
    count = units.count
    stderr = math.sqrt((count - 1) / count * float((without - without.mean()).square().sum()))
    bar = Bar(stderr, count - 1, units.over) if math.isfinite(stderr) else None
    return Estimate(value=top / bottom, n=len(x), method=method, notes=units.notes, **fields(bar))


def _own(g: Tensor, x: Tensor, units: Units) -> Float[Tensor, "u"]:
    """``|sum_{i in u} g_i x_i^T|^2`` of each unit, by the product of the unit's two Gram matrices."""
    if units.count == len(x):
        return units.sum(g.double().square().sum(dim=1) * x.double().square().sum(dim=1))
    order = units.index.argsort()
    sizes = torch.bincount(units.index, minlength=units.count).tolist()
    pieces = order.split(sizes)
    return torch.stack([((g[at] @ g[at].T).double() * (x[at] @ x[at].T)).sum() for at in pieces])


def permuted_signal_null(
    activations: Float[Tensor, "n d"],
    signals: Float[Tensor, "n m"],
    basis: Float[Tensor, "d k"],
    *,
    permutations: int = DRAWS,
    seed: int = 0,
    groups: Int[Tensor, "g"] | None = None,
    scheme: str = "tokens",
) -> PermutedNull:
    """The reader share against the shares of the same signals dealt out to other tokens.

    ``scheme``: "tokens" deals all signals to all tokens; "within" keeps each signal in its sequence, so what differs
    between sequences stays; "sequences" moves whole sequences of equal length, so what ties neighbours stays. The
    null each tests is independence of what it deals out. The last two need ``groups``.

    Exact. For few rows through Gram matrices: ``|G_pi^T X|^2 = sum_ij (G G^T)_{pi i, pi j} (X X^T)_ij`` costs N^2 a
    permutation, against N M D for the product itself; the cheaper one is taken, the product where N^2 is too much to
    hold.
    """
    choose("scheme", scheme, SCHEMES)
    if permutations < 1:
        raise OptionError(f"permutations={permutations}: at least one is needed")
    if scheme != "tokens" and groups is None:
        raise OptionError(f"scheme={scheme!r} deals out signals by sequence: give groups")
    x, g, units = _checked(activations, signals, basis, groups)
    q = basis.to(x)
    share = _reader_share(x, g, q, units)
    orders = _orders(units, permutations, seed, scheme)
    n, d, m = *x.shape, g.shape[1]
    null = _by_gram(x, g, q, orders) if GATHER * n < m * d and n <= GRAM_ROWS else _by_product(x, g, q, orders)
    mean, b = float(null.mean()), len(null)
    bar = None
    if b >= FEWEST:
        # One more draw from the null differs from the mean of B by this much.
        sd = float(null.std(correction=1)) * math.sqrt(1 + 1 / b)
        bar = Bar(sd, b - 1, f"{b} permutations of the signal ({scheme})")
    excess = Estimate(
        value=share.value - mean, n=n, method=f"reader share - mean over permuted signals, {scheme}", **fields(bar)
    )
    return PermutedNull(share, excess, null, mean, p_value(share.value, null), scheme)


def expected_share(
    activations: Float[Tensor, "n d"], signals: Float[Tensor, "n m"], basis: Float[Tensor, "d k"]
) -> float:
    """The reader share that signals dealt out to tokens at random would show, with no permutation drawn.

    The expectation of ``|G_pi^T X Q|^2`` over all permutations is
    ``tr A tr K / n + (1^T A 1 - tr A)(1^T K 1 - tr K) / (n (n - 1))`` with ``A = G G^T`` and ``K = X Q Q^T X^T``; the
    share is the quotient of two such expectations, from the mean over permutations of the quotient by a term of order
    one over the number of independent directions.
    """
    x, g, _ = _checked(activations, signals, basis, None)
    n = len(x)
    if n < 2:
        raise TooFewRowsError("dealing out signals to other tokens needs two tokens or more")
    own, both = (float(one) for one in (g.double().square().sum(), g.double().sum(dim=0).square().sum()))

    def expected(part: Tensor) -> float:
        wide = part.double()
        each, total = float(wide.square().sum()), float(wide.sum(dim=0).square().sum())
        return own * each / n + (both - own) * (total - each) / (n * (n - 1))

    bottom = expected(x)
    if not bottom > 0:
        raise DegenerateError("the reader gradient of permuted signals is zero: activations or signals are")
    return expected(x @ basis.to(x)) / bottom


def _orders(units: Units, permutations: int, seed: int, scheme: str) -> list[Int[Tensor, "n"]]:
    generator = stream(seed, "permutations")
    n, index = len(units.index), units.index.cpu()
    if scheme == "tokens":
        return [torch.randperm(n, generator=generator) for _ in range(permutations)]
    by_unit = index.argsort(stable=True)
    sizes = torch.bincount(index, minlength=units.count)
    if scheme == "within":
        # Sorting by unit first and by a random number second shuffles inside units only.
        found = []
        for _ in range(permutations):
            shuffled = torch.randperm(n, generator=generator)
            order = torch.empty(n, dtype=torch.int64)
            order[by_unit] = shuffled[index[shuffled].argsort(stable=True)]
            found.append(order)
        return found
    if int(sizes.min()) != int(sizes.max()):
        raise OptionError(
            f"scheme='sequences' swaps whole sequences; these have {int(sizes.min())} to {int(sizes.max())} tokens: "
            "cut them to one length, or use scheme='tokens'"
        )
    table, found = by_unit.view(units.count, -1), []
    for _ in range(permutations):
        order = torch.empty(n, dtype=torch.int64)
        order[by_unit] = table[torch.randperm(units.count, generator=generator)].reshape(-1)
        found.append(order)
    return found


def _by_gram(x: Tensor, g: Tensor, q: Tensor, orders: Sequence[Tensor]) -> Float[Tensor, "b"]:
    xq = x @ q
    signal, whole, part = g @ g.T, x @ x.T, xq @ xq.T
    found = []
    for order in orders:
        order = order.to(x.device)
        dealt = signal[order].index_select(1, order)  # three times as fast as indexing columns
        # Row sums first: sums over a row in the rows' precision, sums over rows in float64.
        top, bottom = ((dealt * gram).sum(dim=1).double().sum() for gram in (part, whole))
        found.append(top / bottom)
    return torch.stack(found)


def _by_product(x: Tensor, g: Tensor, q: Tensor, orders: Sequence[Tensor]) -> Float[Tensor, "b"]:
    found = []
    for order in orders:
        dealt = g[order.to(x.device)].T @ x
        found.append((dealt @ q).double().square().sum() / dealt.double().square().sum())
    return torch.stack(found)


@runtime_checkable
class HasBasis(Protocol):
    """What a fit returns: anything with an orthonormal ``basis`` (D,K), a Proxy for one."""

    @property
    def basis(self) -> Tensor:
        """Orthonormal columns."""
        ...


@dataclass(frozen=True)
class CrossFit:
    """Energy of gradients along bases fitted on the other half of the sequences, averaged over both directions."""

    rank: int
    share: Estimate
    ratio: Estimate
    p: float
    folds: tuple[EnergyTest, EnergyTest]


def cross_fit(
    activations: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    groups: Int[Tensor, "g"],
    fit: Callable[[Tensor, int], HasBasis],
    *,
    ranks: Sequence[int] = (16,),
    nested: bool = False,
    known: Mapping[int, tuple[HasBasis, HasBasis]] | None = None,
    controls: str = "normal",
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[CrossFit, ...]:
    """Fit on one half of the sequences, test the gradients of the other, swap, average; one result for each rank.

    ``fit(rows, rank)`` returns something with a ``basis``. With ``nested=True`` it is called once for each half, at
    the largest rank, and smaller ranks take its leading columns (principal axes are nested, concepts are not). Fits of
    a rank to either half that are ``known``, of the same ``groups`` and ``seed``, are not made again.
    """
    if not ranks or min(ranks) < 1:
        raise OptionError(f"ranks={tuple(ranks)}: give one rank or more, each at least 1")
    if activations.shape != gradients.shape:
        raise ShapeError(f"activations {tuple(activations.shape)} and gradients {tuple(gradients.shape)} must agree")
    split = Halves.of(groups, seed, gradients.device)
    halves, sequence = split.rows, split.units.index.to(gradients.device)
    tested = [Gradients.of(gradients[half], sequence[half]) for half in halves]
    largest = max(ranks)
    whole = [fit(activations[half], largest).basis for half in halves] if nested else []
    results = []
    for rank in ranks:
        folds = []
        for other in (1, 0):
            if known and rank in known:
                basis = known[rank][other].basis
            else:
                basis = whole[other][:, :rank] if nested else fit(activations[halves[other]], rank).basis
            if basis.shape[1] != rank:
                raise ShapeError(f"the fit was asked for rank {rank} and gave a basis of shape {tuple(basis.shape)}")
            rows = activations[halves[other]] if controls == "normal_top" else None
            # The same draws for both halves, as in ``crossed_tests``.
            folds.append(run_test(tested[1 - other], basis, controls, draws, seed, rows))
        results.append(_averaged(rank, folds[0], folds[1]))
    return tuple(results)


def _averaged(rank: int, one: EnergyTest, two: EnergyTest) -> CrossFit:
    null = (one.random_shares + two.random_shares) / 2
    share = mean_of_halves(one.share, two.share)
    return CrossFit(rank, share, mean_of_halves(one.ratio, two.ratio), p_value(share.value, null), (one, two))
