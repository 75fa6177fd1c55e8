"""Cross-fitted energy tests of several bases on several groups of tokens, sharing all their work.

Bases fitted on one half of the sequences meet the gradients of the other half, and the other way round. One product
with the Gaussian draws serves all bases, the whole half and each of its groups; error bars are formed for all of them
at once. The results are those of ``nulls.cross_fit`` (a test holds this).

Letters: H the two halves, P bases, C groups of tokens with all tokens as the last, U sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, ShapeError
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import fields
from anisoscope.stats.gram_matrices import gram
from anisoscope.tangent.controls import check_basis, check_complement
from anisoscope.tangent.drawn import Draws
from anisoscope.tangent.units import Halves, in_range, jackknife, mean_of_draws, mean_of_halves, p_value

LEAST_NULL = 1e-6  # of chance: below this, what controls hold is the rounding of float32


@dataclass(frozen=True)
class CrossedTest:
    """Energy along cross-fitted bases in some of the tokens; ``p`` counts random bases of equal rank that hold more."""

    share: Estimate
    control: Estimate
    ratio: Estimate
    p: float


Pair = tuple[Float[Tensor, "d k"], Float[Tensor, "d k"]]
"""The basis fitted on the first half, and that fitted on the second."""


@dataclass(frozen=True)
class _Tested:
    """What one half shows: numbers by group in float64, for numpy, which takes half the time over so few of them."""

    number: Int[np.ndarray, "c"]
    bottoms: Float[np.ndarray, "u c"]
    tops: Float[np.ndarray, "p u c"]
    random: Float[np.ndarray, "c b"]
    normal: Float[np.ndarray, "p c b"]


def crossed_tests(
    gradients: Float[Tensor, "n d"],
    halves: Halves,
    bases: Mapping[str, Pair],
    *,
    bins: Int[Tensor, "n"] | None = None,
    labels: Sequence[str] = (),
    draws: int = 199,
    seed: int = 0,
) -> dict[str, dict[str, CrossedTest | str]]:
    """Tests by name of the basis and label of the group; "" stands for all tokens.

    ``bins`` numbers the group of each row, ``labels`` names them. Where a group cannot be tested, why stands in place
    of its test. All groups meet the same controls, so that they differ by their tokens and not by the draw.
    """
    names = list(bases)
    if not names:
        raise OptionError("no basis to test")
    rank = bases[names[0]][0].shape[1]
    width = gradients.shape[1]
    for name in names:
        for basis in bases[name]:
            check_basis(basis, width, f"the basis {name!r}")
            if basis.shape[1] != rank:
                raise ShapeError(f"bases tested together have one rank; {name!r} has {basis.shape[1]}, not {rank}")
    check_complement(width, rank)
    rows = in_range(gradients, "gradients")
    groups = torch.zeros(len(rows), dtype=torch.int64) if bins is None else bins.cpu().long()
    labels = labels if bins is not None else ()
    # The basis of one half against the gradients of the other, and the same draws in both: two fits to one model are
    # nearly the same basis, and a null of two independent ones would be too narrow for it.
    fitted = torch.stack([torch.stack([bases[name][1 - half].to(rows.device) for name in names]) for half in (0, 1)])
    sides = [_Side.of(rows, halves, half, fitted[half], groups, len(labels)) for half in (0, 1)]
    drawn = Draws.of(fitted, draws, seed, rows.device, rows.dtype)
    random, normal = drawn.of_moments(torch.stack([side.seconds for side in sides]))
    halves_found = [
        _tested(side, halves, len(labels), random[half].cpu(), normal[half].cpu()) for half, side in enumerate(sides)
    ]
    return {
        name: {label: _test(halves_found, at, group, rank, width, draws) for group, label in enumerate((*labels, ""))}
        for at, name in enumerate(names)
    }


@dataclass(frozen=True)
class _Side:
    """Gradients of one half against the bases of the other: second moments by group, and energies by row."""

    number: Int[Tensor, "c"]
    seconds: Float[Tensor, "c d d"]
    place: Int[Tensor, "n"]
    energies: Float[Tensor, "n"]
    along: Float[Tensor, "p n"]

    @classmethod
    def of(cls, rows: Tensor, halves: Halves, half: int, bases: Tensor, groups: Tensor, count: int) -> _Side:
        """Of the rows of a half."""
        at = halves.rows[half].cpu()
        group = groups[at]
        # Rows of a group side by side, so that its second moment is one product over a slice.
        order = group.argsort(stable=True)
        at = at[order]
        g = rows.index_select(0, at.to(rows.device))
        number = torch.bincount(group, minlength=max(count, 1))
        flat = bases.permute(1, 0, 2).reshape(bases.shape[1], -1).to(g)
        along = (g @ flat).unflatten(1, (len(bases), -1)).double().square().sum(dim=2).T.cpu()
        return cls(
            number,
            torch.stack([gram(part) for part in g.split(number.tolist())]),
            halves.units.index[at] * max(count, 1) + group[order],
            torch.linalg.vector_norm(g, dim=1).double().square().cpu(),
            along,
        )


def _tested(
    side: _Side, halves: Halves, count: int, random: Float[Tensor, "c b"], normal: Float[Tensor, "p c b"]
) -> _Tested:
    """One table of sums over sequence and group: everything after it works on it."""
    number, bases, cells = side.number, len(side.along), halves.units.count * max(count, 1)
    bottoms = torch.zeros(cells, dtype=torch.float64).index_add_(0, side.place, side.energies)
    bottoms = bottoms.view(halves.units.count, -1)
    tops = torch.zeros(bases, cells, dtype=torch.float64).index_add_(1, side.place, side.along)
    tops = tops.view(bases, halves.units.count, -1)
    if count:
        bottoms = torch.cat([bottoms, bottoms.sum(dim=1, keepdim=True)], dim=1)
        tops = torch.cat([tops, tops.sum(dim=2, keepdim=True)], dim=2)
        # Energies are linear in the second moment: those of all tokens need no product of their own.
        random = torch.cat([random, random.sum(dim=0, keepdim=True)])
        normal = torch.cat([normal, normal.sum(dim=1, keepdim=True)], dim=1)
        number = torch.cat([number, number.sum(dim=0, keepdim=True)])
    # Numbers of a group side by side: each group is asked on its own.
    bottoms, tops = bottoms.T.contiguous().T, tops.mT.contiguous().mT
    return _Tested(*(one.numpy() for one in (number, bottoms, tops, random, normal)))


def _test(found: Sequence[_Tested], at: int, group: int, rank: int, width: int, draws: int) -> CrossedTest | str:
    """One test from the tables of both halves."""
    shares, ratios, normals, nulls = [], [], [], []
    for one in found:
        top, bottom = one.tops[at, :, group], one.bottoms[:, group]
        total = float(bottom.sum())
        if not total > 0:
            return "a half has no gradient in these tokens"
        normal, random = one.normal[at, group] / total, one.random[group] / total
        mean = float(normal.mean())
        if not mean > LEAST_NULL * rank / width:
            return "no gradient lies outside the basis, so controls have no energy to compare with"
        n = int(one.number[group])
        units = f"{np.count_nonzero(bottom > 0)} sequences"
        share = float(top.sum()) / total
        # A row's mean energy along infinitely many normal controls goes as |g|^2 - |g Q|^2; its factor cancels below.
        under = np.maximum(bottom - top, 0)
        shares.append(Estimate(value=share, n=n, method="|G Q|^2 / |G|^2", **fields(jackknife(top, bottom, units))))
        beside = float(under.sum())
        limit = float(top.sum()) / beside if beside > 0 else 0.0
        bar = jackknife(top, under, units) if limit > 0 else None
        ratios.append(
            Estimate(
                value=share / mean,
                n=n,
                method="e(Q) / mean_b e(Q_b), normal controls",
                **fields(bar and bar.scaled(share / mean / limit)),
            )
        )
        normals.append(normal)
        nulls.append(random)
    share_both = mean_of_halves(*shares)
    control = mean_of_draws(normals[0], normals[1], share_both.n, "mean share of normal controls", "normal controls")
    p = p_value(share_both.value, (nulls[0] + nulls[1]) / 2)
    return CrossedTest(share_both, control, mean_of_halves(*ratios), p)
