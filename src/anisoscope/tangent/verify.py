"""The referee's checks: is a proxy tangent, is it more than random or top-variance directions, and what survives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Needs, Workspace
from anisoscope.measures.curvature import ROWS_PER_COEFFICIENT, fit_quadratic
from anisoscope.measures.frames import local_tangents, neighborhoods
from anisoscope.measures.local import side_by_side
from anisoscope.measures.uncertainty import fields, mean_bar
from anisoscope.rows import as_rows
from anisoscope.stats.moments import Moments
from anisoscope.tangent.controls import check_basis, control_bases
from anisoscope.tangent.energy import DRAWS, EnergyTest, Gradients, run_test
from anisoscope.tangent.nulls import HasBasis, PermutedNull
from anisoscope.tangent.units import Halves, jackknife

ANGLE_DRAWS = 49  # random bases behind the quantiles of angles: each needs a singular value problem in each place
LEAST_K = 64


def benjamini_hochberg(
    p_values: Sequence[float] | Float[Tensor, "m"], level: float = 0.05
) -> tuple[Float[Tensor, "m"], Bool[Tensor, "m"]]:
    """Adjusted p-values and which are rejected, with false discoveries at most ``level`` of the rejected on average.

    Adjusted: ``min over j >= i of m p_(j) / j``, at most 1. Holds for independent or positively dependent tests, such
    as neighbouring layers and steps.
    """
    if not 0 < level < 1:
        raise OptionError(f"level must lie strictly between 0 and 1, got {level}")
    p = torch.as_tensor(p_values, dtype=torch.float64)
    if len(p) == 0:
        return p, p.bool()
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise OptionError("p-values must lie between 0 and 1; leave out the tests that failed")
    order = p.argsort()
    steps = p[order] * len(p) / torch.arange(1, len(p) + 1, dtype=torch.float64)
    adjusted = torch.empty_like(p)
    adjusted[order] = steps.flip(0).cummin(dim=0).values.flip(0).clamp_max(1.0)
    return adjusted, adjusted <= level


@dataclass(frozen=True)
class Alignment:
    """A basis against local tangents and the leading local normals of rows it was not fitted on.

    ``tangent`` and ``normal`` are energy tests whose "gradients" are the unit vectors of local frames: the share is
    the mean squared cosine to the basis, chance K/D, and p counts random bases that do as well. Angles are in degrees,
    smallest and largest principal angle, means over neighbourhoods; ``null_*`` hold the 5, 50 and 95 % quantiles of
    the same means for random bases.
    """

    tangent: EnergyTest
    normal: EnergyTest
    tangent_angles: tuple[Estimate, Estimate]
    normal_angles: tuple[Estimate, Estimate]
    null_smallest: tuple[float, float, float]
    null_largest: tuple[float, float, float]


def tangent_alignment(
    rows: Float[Tensor, "n d"],
    basis: Float[Tensor, "d k"],
    *,
    dimension: int,
    k: int = LEAST_K,
    draws: int = DRAWS,
    seed: int = 0,
) -> Alignment:
    """Principal angles of ``basis`` to local tangents and normals of ``rows``, against random bases of equal rank.

    Local PCA of the k nearest rows gives ``dimension`` tangents; the next as many axes are the leading normals, along
    which a curved sheet bends first. ``rows`` must not be those that the basis was fitted on.
    """
    check_basis(basis, rows.shape[1])
    if 2 * dimension > min(k, rows.shape[1]):
        raise OptionError(
            f"{dimension} tangents and as many normals do not fit into neighbourhoods of {k} rows in width "
            f"{rows.shape[1]}; take a smaller dimension or a larger k"
        )
    anchors = side_by_side(len(rows), k, None, most=256)
    frames = local_tangents(rows, dimension=2 * dimension, k=k, anchors=anchors, seed=seed).tangents
    parts = frames[:, :, :dimension], frames[:, :, dimension:]
    tests = [_frame_test(part, basis, draws, seed) for part in parts]
    angles = [_angles(part, basis[None])[0] for part in parts]
    random = control_bases(basis, "random", min(draws, ANGLE_DRAWS), seed=seed)
    null = _angles(parts[0], random).mean(dim=1)
    over = f"{len(frames)} neighbourhoods"
    named = [
        tuple(
            Estimate(value=float(end.mean()), n=len(rows), method=f"{what} principal angle, degrees",
                     **fields(mean_bar(end, over)))
            for what, end in (("smallest", found[:, 0]), ("largest", found[:, 1]))
        )
        for found in angles
    ]  # fmt: skip
    return Alignment(
        tests[0], tests[1], (named[0][0], named[0][1]), (named[1][0], named[1][1]), *(_quantiles(end) for end in null.T)
    )


def _frame_test(frames: Float[Tensor, "m d r"], basis: Tensor, draws: int, seed: int) -> EnergyTest:
    m, d, r = frames.shape
    anchor = torch.arange(m, device=frames.device).repeat_interleave(r)
    vectors = frames.transpose(1, 2).reshape(m * r, d)
    return run_test(Gradients.of(vectors, anchor, "neighbourhoods"), basis, "random", draws, seed)


def _angles(frames: Float[Tensor, "m d r"], bases: Float[Tensor, "b d k"]) -> Float[Tensor, "b m 2"]:
    """Smallest and largest principal angle of each basis to each frame."""
    found = []
    for basis in bases:
        cosines = torch.linalg.svdvals(frames.transpose(1, 2).double() @ basis.to(frames).double()).clamp(0, 1)
        found.append(torch.rad2deg(torch.stack([cosines[:, 0], cosines[:, -1]], dim=1).arccos()))
    return torch.stack(found)


def _quantiles(values: Float[Tensor, "b"]) -> tuple[float, float, float]:
    low, middle, high = values.quantile(torch.tensor([0.05, 0.5, 0.95]).to(values)).tolist()
    return low, middle, high


def curvature_along(
    rows: Float[Tensor, "n d"],
    basis: Float[Tensor, "d k"],
    *,
    k: int | None = None,
    anchors: int | None = None,
    seed: int = 0,
) -> Estimate:
    """How much the rows bend away from ``basis``: ``|II|`` of a quadratic fit over its coordinates, near each anchor.

    As ``measures.curvature``, with the basis in place of the local tangents: what lies outside it is regressed on
    ``1, t_a, t_a t_b`` of the coordinates t inside. ``value`` is the root mean square of ``|II|`` over neighbourhoods;
    part "visible curvature" is ``E|x_N|^2 / E|x_T|^2``, part "squared" the mean of ``|II|^2``, noise off. A basis that
    misses tangent directions has their whole variance outside, and a large visible curvature.
    """
    width, rank = basis.shape
    check_basis(basis, rows.shape[1])
    points, factor = Workspace(as_rows(rows), Needs(points=True), seed).points("drop").in_range()
    terms = 1 + rank + rank * (rank + 1) // 2
    size = max(LEAST_K, ROWS_PER_COEFFICIENT * terms) if k is None else k
    if size + 1 <= terms:
        raise OptionError(f"a quadratic fit in rank {rank} has {terms} coefficients; k must be at least {terms}")
    if points.n < size + 1:
        raise TooFewRowsError(
            f"a quadratic fit in rank {rank} wants neighbourhoods of {size} rows, got {points.n} distinct rows; "
            "give fewer columns of the basis, basis[:, :j], or more rows"
        )
    found = neighborhoods(points.rows, size, side_by_side(points.n, size, anchors, most=64), seed)
    frame = torch.linalg.qr(basis.double(), mode="complete").Q
    fits = []
    for members in found.members:  # one at a time: a neighbourhood of a high-rank fit holds hundreds of wide rows
        local = points.rows[members].double()
        fits.append(fit_quadratic(((local - local[:1]) @ frame)[None], rank))
    squares = torch.cat([fit.form2 for fit in fits]) * factor**2
    normal, tangent = torch.cat([fit.normal2 for fit in fits]), torch.cat([fit.tangent2 for fit in fits])
    over, n = f"{len(fits)} neighbourhoods", points.n
    squared = Estimate(
        value=float(squares.mean()), n=n, method="mean |II|^2, noise off", **fields(mean_bar(squares, over))
    )
    visible = Estimate(
        value=float(normal.sum() / tangent.sum()), n=n, method="E|x_N|^2 / E|x_T|^2 along the basis",
        **fields(jackknife(normal, tangent, over)),
    )  # fmt: skip
    value = math.sqrt(max(squared.value, 0.0))
    clear = squared.stderr is not None and squared.value > 2 * squared.stderr
    bar = mean_bar(squares, over) if clear else None
    return Estimate(
        value=value,
        n=n,
        method=f"quadratic fit along a basis of rank {rank} in width {width}, k={size}",
        notes=() if clear else ("no error bar: |II| is not told apart from zero",),
        parts={"visible curvature": visible, "squared": squared},
        **fields(bar and bar.scaled(1 / (2 * value))),
    )


@dataclass(frozen=True)
class Replacements:
    """Energy tests of the proxy and of what could stand in for it, and paired differences of their shares.

    ``differences[name]`` is the proxy's share minus that of the replacement on the same gradients, with an error bar
    over rows or sequences.
    """

    tests: Mapping[str, EnergyTest]
    differences: Mapping[str, Estimate]


def top_variance(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "d k"]:
    """The leading principal axes of rows."""
    vectors = torch.linalg.eigh(Moments.of(rows).covariance()).eigenvectors
    return vectors.flip(1)[:, :rank].to(torch.promote_types(rows.dtype, torch.float32))


def compare_replacements(
    gradients: Float[Tensor, "n d"],
    basis: Float[Tensor, "d k"],
    activations: Float[Tensor, "m d"],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    groups: Int[Tensor, "g"] | None = None,
) -> Replacements:
    """The energy test with ``basis``, with the top-variance directions of ``activations`` and with a random basis.

    For a fair comparison ``activations`` are the rows that the basis was fitted on.
    """
    found = Gradients.of(gradients, groups)
    check_basis(basis, found.width)
    bases = {
        "proxy": basis,
        "top variance": top_variance(activations, basis.shape[1]),
        "random": control_bases(basis, "random", 1, seed=seed + 1)[0],  # not one of the draws behind p
    }
    tests = {name: run_test(found, other, "normal", draws, seed) for name, other in bases.items()}
    own = found.along(basis)
    return Replacements(
        tests,
        {
            name: _difference(own, found.along(bases[name]), found, f"e(proxy) - e({name})")
            for name in ("top variance", "random")
        },
    )


def _difference(own: Tensor, other: Tensor, found: Gradients, method: str) -> Estimate:
    top, bottom = found.units.sum(own - other), found.units.sum(found.energies)
    bar = jackknife(top, bottom, found.units.over)
    return Estimate(value=float(top.sum() / bottom.sum()), n=len(own), method=method, **fields(bar))


@dataclass(frozen=True)
class Verdict:
    """Whether the tangent reading survives its checks, in words. ``reasons`` name each check and its numbers."""

    survives: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        head = "The tangent reading survives." if self.survives else "The tangent reading does not survive."
        return "\n".join((head, *(f"- {reason}" for reason in self.reasons)))


def verdict(
    replacements: Replacements, alignment: Alignment, reader: PermutedNull | None = None, *, level: float = 0.05
) -> Verdict:
    """Put the checks into words.

    The reading survives if the proxy holds more energy than random bases (p at most ``level``), lies along
    independently estimated tangents (p at most ``level``) more than along their normals, and, where a reader gradient
    is given, holds more of it than with permuted signals. That top-variance directions do as well is said, and does
    not count against it: they are a tangent proxy too.
    """
    if not 0 < level < 1:
        raise OptionError(f"level must lie strictly between 0 and 1, got {level}")
    test = replacements.tests["proxy"]
    checks = [
        (
            test.p <= level,
            f"energy share {test.share.value:.3g} against {test.chance:.3g} by chance, "
            f"{test.ratio.value:.3g} times its {test.kind} controls (p = {test.p:.3g})",
        ),
        (
            alignment.tangent.p <= level,
            f"mean squared cosine to local tangents {alignment.tangent.share.value:.3g} against "
            f"{alignment.tangent.chance:.3g} by chance (p = {alignment.tangent.p:.3g})",
        ),
        (
            alignment.tangent.share.value > alignment.normal.share.value,
            f"mean squared cosine to the leading local normals {alignment.normal.share.value:.3g}, "
            f"to tangents {alignment.tangent.share.value:.3g}",
        ),
    ]
    if reader is not None:
        words = f"reader share exceeds that of permuted signals by {reader.excess.value:.3g} (p = {reader.p:.3g})"
        checks.append((reader.p <= level, words))
    reasons = [f"{'passed' if good else 'FAILED'}: {words}" for good, words in checks]
    top = replacements.differences["top variance"]
    limits = top.interval(1 - level)
    if limits is None:
        reasons.append(f"said: {top.value:+.3g} against top-variance directions, with no error bar")
    else:
        word = "more than" if limits[0] > 0 else "less than" if limits[1] < 0 else "as much as"
        reasons.append(
            f"said: holds {word} the top-variance directions of equal rank "
            f"({top.value:+.3g}, {100 * (1 - level):.0f} % from {limits[0]:+.3g} to {limits[1]:+.3g} over {top.over})"
        )
    return Verdict(all(good for good, _ in checks), tuple(reasons))


@dataclass(frozen=True)
class Referee:
    """All checks of one fit: on half of the sequences the fit, on the other half everything else."""

    replacements: Replacements
    alignment: Alignment
    curvature: Estimate | None
    verdict: Verdict
    notes: tuple[str, ...] = ()


def referee(
    activations: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    groups: Int[Tensor, "g"],
    fit: Callable[[Tensor, int], HasBasis],
    *,
    rank: int,
    dimension: int,
    k: int = LEAST_K,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = 0.05,
) -> Referee:
    """Fit on half of the sequences; angles, curvature and energy on the other half; a verdict in words."""
    halves = Halves.of(groups, seed, activations.device)
    basis = fit(activations[halves.rows[0]], rank).basis
    return judge(activations, gradients, halves, basis, dimension=dimension, k=k, draws=draws, seed=seed, level=level)


def judge(
    activations: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    halves: Halves,
    basis: Float[Tensor, "d k"],
    *,
    dimension: int,
    k: int = LEAST_K,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = 0.05,
    reader: PermutedNull | None = None,
) -> Referee:
    """All checks of a basis that was fitted on the first half, on rows of the second."""
    first, second = halves.rows
    other, groups = activations[second], halves.units.index.to(second.device)[second]
    replacements = compare_replacements(
        gradients[second], basis, activations[first], draws=draws, seed=seed, groups=groups
    )
    alignment = tangent_alignment(other, basis, dimension=dimension, k=k, draws=draws, seed=seed)
    notes: tuple[str, ...] = ()
    bent: Estimate | None = None
    try:
        bent = curvature_along(other, basis, seed=seed)
    except TooFewRowsError as error:
        notes = (f"no curvature along the basis: {error}",)
    return Referee(replacements, alignment, bent, verdict(replacements, alignment, reader, level=level), notes)
