"""How much of a gradient lies in a subspace, and whether that is more than chance. See docs/tangent_energy.md.

``e(Q) = |G Q|_F^2 / |G|_F^2`` for rows G (N,D) and an orthonormal Q (D,K); B control draws. Nothing here is centred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import DegenerateError, ShapeError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.stats.gram_matrices import gram
from anisoscope.stats.moments import Moments
from anisoscope.stats.precision import in_full_precision
from anisoscope.tangent.controls import (
    CONTROL_KINDS,
    check_basis,
    check_complement,
    control_bases,
)
from anisoscope.tangent.drawn import Draws
from anisoscope.tangent.units import Units, in_range, p_value, ratio

BLOCK_ROWS = 4096
DRAWS = 199
QUANTILES = (0.05, 0.5, 0.95)
VARIANCE = "tr(Q^T C Q) / tr C"
VARIANCE_KNOWN = "no error bar: taken as known, being far better known than the energy share it divides"
SIDES = ("input", "output")


@dataclass(frozen=True)
class Gradients:
    """Checked gradient rows with what their error bars are over; the second moment is formed once, when first asked."""

    rows: Float[Tensor, "n d"]
    units: Units

    @classmethod
    def of(
        cls, gradients: Float[Tensor, "n d"], groups: Int[Tensor, "g"] | None = None, name: str = "sequences"
    ) -> Gradients:
        """Check rows and bring them into range; ``name`` says what the groups are."""
        rows = in_range(gradients, "gradients")
        found = cls(rows, Units.of(groups, len(rows), rows.device, name))
        if not found.total > 0:
            raise DegenerateError("the gradient is zero everywhere: it has no direction to take a share of")
        return found

    @property
    def width(self) -> int:
        """The width D."""
        return self.rows.shape[1]

    @cached_property
    def energies(self) -> Float[Tensor, "n"]:
        """The squared length of each row, in float64."""
        return _squares(self.rows)

    @cached_property
    def total(self) -> float:
        """``|G|_F^2``."""
        return float(self.energies.sum())

    @cached_property
    def second(self) -> Float[Tensor, "d d"]:
        """``G^T G``: blocks multiplied in the rows' own precision, summed in float64."""
        out = torch.zeros(self.width, self.width, dtype=torch.float64, device=self.rows.device)
        for block in self.rows.split(BLOCK_ROWS):
            out += gram(block)
        return out

    def along(self, basis: Float[Tensor, "d k"]) -> Float[Tensor, "n"]:
        """``|g_i Q|^2`` of each row, in float64."""
        return _squares(self.rows @ basis.to(self.rows))

    def by_moment(self, columns: int) -> bool:
        """Whether ``tr(Q^T (G^T G) Q)`` is cheaper than ``|G Q|^2`` for this many columns in all (multiplications)."""
        n, d = self.rows.shape
        formed = 0 if "second" in self.__dict__ else n * d * d
        return formed + d * d * columns < n * d * columns


def _squares(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
    """Squared lengths; a few thousand positive terms each, so that float32 keeps six digits and more."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()


@in_full_precision
def energy_share(
    gradients: Float[Tensor, "n d"], basis: Float[Tensor, "d k"], *, groups: Int[Tensor, "g"] | None = None
) -> Estimate:
    """``e(Q) = |G Q|_F^2 / |G|_F^2``: the share of the gradient's energy in the span of ``basis``. Chance is K/D.

    A ratio of sums, so rows count by their energy. The error bar leaves out one row at a time, or one group of rows
    where ``groups`` labels them (the sequence of each token): tokens of a sequence depend on each other.
    """
    found = Gradients.of(gradients, groups)
    check_basis(basis, found.width)
    return _share(found, found.along(basis))


def _share(found: Gradients, along: Float[Tensor, "n"]) -> Estimate:
    return ratio(along, found.energies, found.units, "|G Q|^2 / |G|^2")


def shares(found: Gradients, bases: Float[Tensor, "b d k"]) -> Float[Tensor, "b"]:
    """Energy shares of many bases in one product, through rows or through the second moment, whichever is cheaper."""
    b, d, k = bases.shape
    flat = bases.permute(1, 0, 2).reshape(d, b * k)
    if found.by_moment(b * k):
        second = found.second.to(torch.promote_types(found.rows.dtype, bases.dtype))
        each = ((second @ flat.to(second)) * flat).double().sum(dim=0)
    else:
        each = torch.zeros(b * k, dtype=torch.float64, device=found.rows.device)
        for block in found.rows.split(BLOCK_ROWS):
            each += (block @ flat.to(block)).square().sum(dim=0)
    return each.view(b, k).sum(dim=1) / found.total


def _drawn(
    found: Gradients, basis: Float[Tensor, "d k"], draws: int, seed: int, normal: bool
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"] | None]:
    """Shares of random and of normal controls, through the second moment or through rows, whichever is cheaper."""
    # Without normal controls there is nothing to reflect, and the rank may be more than half of the width.
    bases = (basis[None] if normal else basis[None][:0])[None]
    drawn = Draws.of(bases, draws, seed, found.rows.device, found.rows.dtype)
    if found.by_moment(draws * basis.shape[1]):
        of_moment = drawn.of_moments(found.second[None, None])
        random, off = of_moment[0][0, 0], of_moment[1][0, :, 0]
    else:
        random, off = drawn.of_rows(found.rows)
    return random / found.total, off[0] / found.total if normal else None


@dataclass(frozen=True)
class EnergyTest:
    """Energy along a basis against matched controls. Every Estimate says what its error bar is over.

    ``p`` compares the share with that of ``draws`` uniformly random bases of equal rank. It is exactly uniform for a
    basis that has nothing to do with the gradient. ``p_controls`` is the same count against the controls asked for.
    Normal controls lie in the complement, where a share above chance leaves less energy: that count is small too
    often, the more so the larger K/D. For ``normal_top`` it is a comparison with few draws, not a test.
    """

    share: Estimate
    chance: float
    rank: int
    kind: str
    control_shares: Float[Tensor, "b"]
    random_shares: Float[Tensor, "r"]
    control: Estimate
    ratio: Estimate
    p: float
    p_controls: float
    variance: Estimate | None = None
    enrichment: Estimate | None = None

    def estimates(self) -> Mapping[str, Estimate]:
        """The numbers for people, by name; p-values carry no error bar."""
        n, draws = self.share.n, len(self.control_shares)
        named = {"energy share": self.share, "control share": self.control, "energy ratio": self.ratio}
        for name, p, null in (("p", self.p, "random"), ("p controls", self.p_controls, self.kind)):
            method = f"(1 + #null >= observed) / (B + 1), {null} bases"
            named[f"energy {name}"] = Estimate(value=p, stderr=None, n=n, method=method)
        if self.variance is not None and self.enrichment is not None:
            named |= {"variance share": self.variance, "enrichment": self.enrichment}
        return {name: replace(value, notes=(*value.notes, f"B={draws}")) for name, value in named.items()}


@in_full_precision
def energy_test(
    gradients: Float[Tensor, "n d"],
    basis: Float[Tensor, "d k"],
    *,
    controls: str = "normal",
    draws: int = DRAWS,
    seed: int = 0,
    activations: Float[Tensor, "m d"] | None = None,
    groups: Int[Tensor, "g"] | None = None,
) -> EnergyTest:
    """Energy share of ``basis``, its ratio to the mean share of ``draws`` controls, and a p-value.

    ``controls`` is a kind of ``control_bases``; ``normal_top`` needs ``activations`` and is one draw, whatever
    ``draws`` says. With activations the share of their variance in the basis and the enrichment
    (energy share / variance share) come too.
    """
    return run_test(Gradients.of(gradients, groups), basis, controls, draws, seed, activations)


def run_test(
    found: Gradients,
    basis: Float[Tensor, "d k"],
    controls: str,
    draws: int,
    seed: int,
    activations: Float[Tensor, "m d"] | None = None,
) -> EnergyTest:
    """The energy test of checked gradients."""
    choose("control", controls, CONTROL_KINDS)
    check_basis(basis, found.width)
    if controls != "random":
        check_complement(found.width, basis.shape[1], "controls='random'")
    along, top = found.along(basis), None
    share = _share(found, along)
    random, normal = _drawn(found, basis, draws, seed, controls == "normal")
    if controls == "normal_top":
        top = control_bases(basis, controls, 1, seed=seed, rows=activations)
        null = shares(found, top)
    else:
        null = random if normal is None else normal
    against = _against(found, along, basis.shape[1], null, controls, top)
    variance = enrichment = None
    if activations is not None:
        variance = variance_share(activations, basis)
        enrichment = enrichment_of(share, variance)
    return EnergyTest(
        share=share,
        chance=basis.shape[1] / found.width,
        rank=basis.shape[1],
        kind=controls,
        control_shares=null,
        random_shares=random,
        control=_control(null, controls, found),
        ratio=against,
        p=p_value(share.value, random),
        p_controls=p_value(share.value, null),
        variance=variance,
        enrichment=enrichment,
    )


def _control(null: Float[Tensor, "b"], kind: str, found: Gradients) -> Estimate:
    """Mean share of the controls, with spread and quantiles as parts."""
    n, b = len(found.rows), len(null)

    def part(value: float, method: str) -> Estimate:
        return Estimate(value=value, stderr=None, n=b, method=method)

    levels = null.quantile(null.new_tensor(QUANTILES)).tolist()
    parts = {
        f"q{round(100 * level):02d}": part(value, "quantile") for level, value in zip(QUANTILES, levels, strict=True)
    }
    bar = None
    if b >= 3:
        sd = float(null.std(correction=1))
        parts["sd"] = part(sd, "standard deviation over controls")
        bar = Bar(sd / math.sqrt(b), b - 1, f"{b} {kind} controls")
    return Estimate(value=float(null.mean()), n=n, method=f"mean share of {kind} controls", parts=parts, **fields(bar))


def _against(
    found: Gradients, along: Float[Tensor, "n"], k: int, null: Float[Tensor, "b"], kind: str, top: Tensor | None
) -> Estimate:
    """``R = e(Q) / mean_b e(Q_b)`` with an error bar over the rows' units, and one over the controls as a part.

    A row's mean energy along infinitely many random controls has a closed form, ``|g|^2 K/D``, or
    ``(|g|^2 - |g Q|^2) K/(D-K)`` for normal ones. The relative error of R over rows is taken from there.
    """
    d, mean = found.width, float(null.mean())
    if not mean > 1e-6 * k / d:  # the rounding of float32 products is below, any real energy far above
        raise DegenerateError(f"no gradient lies outside the basis, so {kind} controls have no energy to compare with")
    if top is not None:
        under = found.along(top[0])
    elif kind == "normal":
        under = (found.energies - along).clamp_min(0) * (k / (d - k))
    else:
        under = found.energies * (k / d)
    limit = ratio(along, under, found.units, "e(Q) / expected share of controls")
    value = float(along.sum()) / found.total / mean
    b = len(null)
    parts = {} if top is not None else {"many controls": limit}
    if b >= 3:
        bar = Bar(value * float(null.std(correction=1)) / mean / math.sqrt(b), b - 1, f"{b} {kind} controls")
        parts["over controls"] = Estimate(value=value, n=b, method="e(Q) / mean_b e(Q_b)", **fields(bar))
    stderr = None if limit.stderr is None or limit.value == 0 else limit.stderr * value / limit.value
    return replace(
        limit, value=value, stderr=stderr, over=limit.over if stderr is not None else None,
        method=f"e(Q) / mean_b e(Q_b), {kind} controls", parts=parts,
    )  # fmt: skip


def variance_share(activations: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Estimate:
    """``v(Q) = tr(Q^T C Q) / tr C``: the share of the activations' variance in a basis.

    Part "uncentred" takes no mean off: it is what a reader gradient of mean-free independent signals would show.
    """
    check_basis(basis, activations.shape[1], "the basis")
    return variance_within(Moments.of(in_range(activations, "activations")), basis)


def variance_within(moments: Moments, basis: Float[Tensor, "d k"]) -> Estimate:
    """``variance_share`` of rows whose moments are known."""
    q = basis.to(moments.scatter)
    total = float(moments.scatter.trace())
    if not total > 0:
        raise DegenerateError("the activations are all equal: they have no variance to take a share of")
    inside = float(((moments.scatter @ q) * q).sum())
    n, size = moments.count, float(moments.mean @ moments.mean)
    raw = (inside + n * float((moments.mean @ q).square().sum())) / (total + n * size)
    return variance_estimate(inside / total, raw, n)


def variance_estimate(value: float, raw: float, n: int) -> Estimate:
    """A variance share as an Estimate; ``raw`` is the one with no mean taken off."""
    part = Estimate(value=raw, stderr=None, n=n, method="|X Q|^2 / |X|^2, not centred")
    notes = (VARIANCE_KNOWN,)
    return Estimate(value=value, stderr=None, n=n, method=VARIANCE, notes=notes, parts={"uncentred": part})


def enrichment_of(share: Estimate, variance: Estimate, notes: tuple[str, ...] | None = None) -> Estimate:
    """Energy share over variance share: above 1, the gradient prefers the basis more than the activations do.

    ``notes`` are those of the share unless they are given.
    """
    if not variance.value > 0:
        raise DegenerateError("the basis holds no variance of the activations: enrichment would divide by zero")
    stderr = None if share.stderr is None else share.stderr / variance.value
    return Estimate(
        value=share.value / variance.value, stderr=stderr, n=share.n, method="energy share / variance share",
        notes=(*(share.notes if notes is None else notes), "the variance share is taken as known"),
        over=share.over, dof=share.dof, parts=share.parts,
    )  # fmt: skip


def side_share(matrix: Float[Tensor, "m n"], basis: Float[Tensor, "d k"], side: str = "input") -> Estimate:
    """Share of a matrix's energy on one side: ``|W Q|^2 / |W|^2`` (input), ``|Q^T W|^2 / |W|^2`` (output).

    For weights stored as (out, in): reader gradients and embedding rows (a row for each token) live on the input side,
    writer gradients on the output side, and the optimiser's change of a matrix on the side that touches the site.
    One matrix is one number, so there is no error bar; see ``nulls.reader_share`` for one over sequences.
    """
    choose("side", side, SIDES)
    inner = matrix.shape[1 if side == "input" else 0]
    if inner != basis.shape[0]:
        raise ShapeError(
            f"the {side} side of a {tuple(matrix.shape)} matrix has width {inner}, the basis {basis.shape[0]}; "
            f"weights are (out, in): perhaps side={SIDES[side == 'input']!r} was meant"
        )
    found = Gradients.of(matrix if side == "input" else matrix.T)
    check_basis(basis, inner)
    value = float(found.along(basis).sum()) / found.total
    note = "no error bar: the rows of one matrix are no sample"
    return Estimate(value=value, stderr=None, n=len(found.rows), method=f"energy share, {side} side", notes=(note,))
