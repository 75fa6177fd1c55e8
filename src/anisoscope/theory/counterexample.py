"""Where the ratio law fails: ``x = (u, u^2)``, u symmetric, W = 0, g = 1. The tangent part cancels exactly.

Both bounds hold, yet ``E[g x_T] = E[u] = 0`` while ``E[g x_N] = E[u^2] > 0``. A dial ``g = 1 + b u / t`` leads from the
counter-example (b = 0) to the law: the tangent part is then ``b t``, and the ratio ``t / b``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.theory.experiment import Check, Experiment, Outcome, Series, loglog_slopes, over_repeats, series_of

REPEATS, GROUPS = 256, 32
RADII = torch.logspace(-3, -0.5, 6, dtype=torch.float64)
ROWS = torch.tensor([100, 400, 1600, 6400])
DIALS = torch.tensor([0.03, 0.1, 0.3, 1.0, 3.0], dtype=torch.float64)
T = 0.01  # the radius of the panels over tokens and over the dial
SITE = "parabola (u, u²)"


def draw(rows: int, t: float, generator: torch.Generator) -> Float[Tensor, "r n"]:
    """Symmetric u of spread t, one row for each repeat."""
    return t * torch.randn(REPEATS, rows, generator=generator, dtype=torch.float64)


def run(seed: int) -> Outcome:
    """Both parts against the radius, the ratio against the number of tokens, and the dial that mends it."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(ROWS[-1])
    tangent, normal = [], []
    for t in RADII.tolist():
        u = draw(rows, t, generator)
        tangent.append(u.mean(dim=1))
        normal.append(u.square().mean(dim=1))
    both = torch.stack(tangent, dim=1), torch.stack(normal, dim=1)
    c = (both[0] / RADII).mean(dim=1)  # signed: a mean of lengths would never read zero
    checks = [
        Check(SITE, "c, signed", over_repeats(c, "E[g x_T] / (G t)", n=rows), 0.0, slice="g = 1"),
        Check(
            SITE,
            "normal part / t²",
            over_repeats((both[1] / RADII**2).mean(dim=1), "E[g x_N] / t²", n=rows),
            1.0,
            slice="g = 1",
        ),
        Check(
            SITE,
            "normal slope",
            over_repeats(loglog_slopes(RADII, both[1]), "log-log slope in t", n=rows),
            2.0,
            slice="g = 1",
        ),
    ]
    labels = ("radius t", "size of the part")
    series = [
        series_of(SITE, "normal part", RADII, both[1], labels, slice="g = 1", law=RADII**2),
        series_of(SITE, "tangent part, signed", RADII, both[0], labels, slice="g = 1", law=torch.zeros_like(RADII)),
    ]
    for check, line in (_by_tokens(generator), _by_dial(generator)):
        checks += check
        series.append(line)
    notes = (
        "The tangent part is zero in the limit of many tokens, and the noise of a mean before it: the ratio of normal "
        "to tangent part grows as the root of the number of tokens, at any radius. No law in t alone can hold.",
        "With g = 1 + b u/t the tangent part is b t and c = b / sqrt(1 + b²): the ratio is t/b, the law's, and it "
        "worsens without bound as b goes to zero.",
    )
    return Outcome(tuple(checks), tuple(series), notes)


def _by_tokens(generator: torch.Generator) -> tuple[list[Check], Series]:
    """The ratio of the parts against the number of tokens at one radius: slope 1/2, where the law says 0."""
    ratios = []
    for rows in ROWS.tolist():
        u = draw(rows, T, generator)
        # Root mean square over the repeats of a group: the ratio in one sample has no mean.
        tangent = u.mean(dim=1).reshape(GROUPS, -1).square().mean(dim=1).sqrt()
        ratios.append(u.square().mean(dim=1).reshape(GROUPS, -1).mean(dim=1) / tangent)
    values, n = torch.stack(ratios, dim=1), ROWS.double()
    slope = over_repeats(loglog_slopes(n, values), "log-log slope in the number of tokens", what="groups of repeats")
    line = series_of(
        SITE, "normal / tangent against tokens", n, values, ("tokens", "ratio of the parts"), slice="g = 1"
    )
    return [Check(SITE, "ratio slope in tokens", slope, 0.5, slice="g = 1")], line


def _by_dial(generator: torch.Generator) -> tuple[list[Check], Series]:
    """c and the ratio of the parts against b at one radius."""
    rows = int(ROWS[-1])
    ratios, constants = [], []
    for b in DIALS.tolist():
        u = draw(rows, T, generator)
        g = 1 + b * u / T
        tangent = (g * u).mean(dim=1)
        ratios.append((g * u * u).mean(dim=1).mean() / tangent)
        constants.append(tangent / (g.square().mean(dim=1).sqrt() * T))
    values, c = torch.stack(ratios, dim=1), torch.stack(constants, dim=1)
    checks = []
    for number, b in enumerate(DIALS.tolist()):
        truth = b / (1 + b * b) ** 0.5
        checks.append(
            Check(SITE, "c", over_repeats(c[:, number], "E[g x_T] / (G t)", n=rows), truth, slice=f"b = {b:g}")
        )
    line = series_of(
        SITE, "normal / tangent against the dial", DIALS, values, ("dial b", "ratio of the parts"), law=T / DIALS
    )
    return checks, line


EXPERIMENTS = (
    Experiment(
        "counter-example",
        "The counter-example to the ratio law",
        "Can the normal part of a layer's gradient exceed the tangent part at any radius?",
        run,
        2.0,
    ),
)
