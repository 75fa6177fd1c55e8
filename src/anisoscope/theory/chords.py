"""Chord against arc. With ``s`` the length along a geodesic and ``r`` the straight distance between its ends,

``s^2 = r^2 + (kappa^2 / 12) r^4 + ...``    or, solved for the chord,    ``r^2 = s^2 - (kappa^2 / 12) s^4 + ...``,

kappa the curvature ``|II(t, t)|`` of the geodesic. Which letter stands for which length decides the sign.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.theory.experiment import Check, Experiment, Outcome, over_repeats, series_of
from anisoscope.theory.gallery import gallery
from anisoscope.theory.surfaces import Surface

GROUPS, DIRECTIONS = 32, 12  # repeats, and geodesics in each, every one with its opposite
NEAR = torch.logspace(-2, -1, 6, dtype=torch.float64)  # lengths times kappa at which the law is fitted
FAR = torch.logspace(-0.7, 0.5, 7, dtype=torch.float64)  # and at which it is watched to fail
NEXT_ORDER = 1e-3  # the terms beyond the law, relative, over the lengths of the fit
LABELS = ("arc length × kappa", "(arc² − chord²) × kappa²")
SHARE = "measured / predicted"


def both_lengths(
    surface: Surface, lengths: Float[Tensor, "m"], seed: int
) -> tuple[Float[Tensor, "r m"], Float[Tensor, "r m"]]:
    """Means over the geodesics of each group of ``arc^2 - chord^2`` and of ``(arc^2 - chord^2) / chord^4``.

    Geodesics leave the base in random directions. Each has its opposite beside it: the change of curvature along the
    way, odd in the length, then leaves the mean.
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(GROUPS, DIRECTIONS, surface.dimension, generator=generator, dtype=torch.float64)
    way = torch.cat([half, -half], dim=1).reshape(-1, surface.dimension)
    start = surface.over(torch.zeros_like(way))
    ends = surface.geodesics(start, way, lengths.tolist())
    chord2 = (ends - start.x).square().sum(dim=2).T
    lack = lengths.square() - chord2
    in_groups = [one.reshape(GROUPS, -1, len(lengths)).mean(dim=1) for one in (lack, lack / chord2.square())]
    return in_groups[0], in_groups[1]


def limit(lengths: Float[Tensor, "m"], values: Float[Tensor, "r m"]) -> Float[Tensor, "r"]:
    """The value at length zero, from a straight line in the squared length."""
    design = torch.stack([torch.ones_like(lengths), lengths.square()], dim=1)
    return torch.linalg.lstsq(design, values.T).solution[0]


def slope_at_zero(lengths: Float[Tensor, "m"], values: Float[Tensor, "r m"]) -> Float[Tensor, "r"]:
    """The log-log slope at length zero: the squared length, which the next order brings in, is fitted beside it."""
    design = torch.stack([torch.ones_like(lengths), lengths.log(), lengths.square()], dim=1)
    return torch.linalg.lstsq(design, values.log().T).solution[1]


def run(seed: int) -> Outcome:
    """Slopes and coefficients on every surface."""
    checks, series = [], []
    for site, surface in gallery(seed).items():
        kappa = surface.base.kappa
        lengths = torch.cat([NEAR, FAR]) / kappa
        lack, over_chord = both_lengths(surface, lengths, seed)
        near = lengths[: len(NEAR)]
        slope = slope_at_zero(near, lack[:, : len(NEAR)])
        by_chord = limit(near, over_chord[:, : len(NEAR)])
        by_arc = limit(near, -lack[:, : len(NEAR)] / near**4)
        for measure, values, truth in (
            ("slope of arc² − chord²", slope, 4.0),
            ("chord⁴ in arc² − chord²", by_chord, kappa**2 / 12),
            ("arc⁴ in chord² − arc²", by_arc, -(kappa**2) / 12),
        ):
            estimate = told_apart(over_repeats(values, f"{measure}, lengths to zero", what="groups of geodesics"))
            checks.append(Check(site, measure, estimate, truth, tolerance=NEXT_ORDER))
        x = lengths * kappa
        share = 12 * lack * kappa**2 / x**4
        series.append(series_of(site, "arc² − chord²", x, lack * kappa**2, LABELS, law=x**4 / 12))
        series.append(series_of(site, "measured over predicted", x, share, (LABELS[0], SHARE), law=torch.ones_like(x)))
    notes = (
        "arc: length along the geodesic; chord: straight distance. kappa² is the mean of |II(t, t)|² over directions, "
        "known in closed form.",
        "The law is the beginning of an expansion: beyond a length of about 1/kappa the points leave it, to either "
        "side. On a circle the chord cannot exceed the diameter, however long the arc.",
    )
    return Outcome(tuple(checks), tuple(series), notes)


def told_apart(estimate: Estimate) -> Estimate:
    """The estimate, without its error bar where geodesics are all alike: what is left there is rounding."""
    if estimate.stderr is not None and estimate.stderr > 1e-6 * abs(estimate.value):
        return estimate
    note = "no error bar: every direction is alike here, and what is left is rounding"
    return replace(estimate, stderr=None, over=None, dof=None, notes=(note,))


EXPERIMENTS = (
    Experiment(
        "chords",
        "Chord against arc",
        "Does a geodesic of curvature kappa fall short of its length by (kappa²/12) r⁴, and with which sign?",
        run,
        4.0,
    ),
)
