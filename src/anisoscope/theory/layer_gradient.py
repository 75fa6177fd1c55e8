"""Tangent and normal parts of a linear layer's gradient ``dW = E[g x^T]`` against the radius t of the cloud.

x is measured from the base, as a bias would have it. For a signal g of size G_rms the tangent part is at most of order
``G_rms t`` and the normal part of order ``kappa G_rms t^2``. These are upper bounds, so their ratio follows only where
the tangent part does not cancel: ``c = |E[g x_T^T]| / (G_rms t)`` must stay away from zero. Each signal below is one
answer to the question whether it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.theory.experiment import Check, Experiment, Outcome, Series, loglog_slopes, over_repeats, series_of
from anisoscope.theory.surfaces import Base, Surface, make_surface

REPEATS, ROWS, OUTPUTS = 24, 2000, 4
RADII = torch.logspace(-3, -1.5, 6, dtype=torch.float64)  # t times kappa
NEXT_ORDER = 5e-3  # relative size of what the expansion leaves out at the largest radius
TRAINED_ROWS = 1000
TRAINING = (0, 3, 10, 30)  # updates of the layer after which its gradient is looked at
RATE = 1.0  # learning rate times t^2: the layer then learns as much from a small cloud as from a large one
R_LABEL = "radius t × kappa"


@dataclass(frozen=True)
class Clouds:
    """For each repeat and radius a cloud: unit coordinates z, tangent part ``t z`` and normal part of the points."""

    kappa: float
    radius: Float[Tensor, "m"]
    z: Float[Tensor, "r m n d"]
    tangent: Float[Tensor, "r m n d"]
    normal: Float[Tensor, "r m n w"]


@dataclass(frozen=True)
class Parts:
    """Norms of the two parts of dW and G_rms over ``rows``, for each repeat and radius; ``radius`` is t."""

    rows: int
    kappa: float
    radius: Float[Tensor, "m"]
    tangent: Float[Tensor, "r m"]
    normal: Float[Tensor, "r m"]
    signal: Float[Tensor, "r m"]

    @property
    def c(self) -> Float[Tensor, "r m"]:
        """The constant that says whether the tangent part cancels."""
        return self.tangent / (self.signal * self.radius)


def surfaces(seed: int) -> dict[str, Surface]:
    """Three surfaces with a mean curvature that does not vanish."""
    return {
        "2-sphere": make_surface("sphere", dimension=2, radius=2.0),
        "Veronese surface": make_surface("veronese"),
        "random quadratic graph": make_surface("quadratic", dimension=4, normals=6, kappa=3.0, seed=seed),
    }


def clouds(surface: Surface, seed: int, *, rows: int = ROWS, symmetric: bool = False) -> Clouds:
    """Independent clouds; a symmetric one holds -z for every z, so that odd moments vanish exactly."""
    generator = torch.Generator().manual_seed(seed)
    base = surface.base
    rows = rows // 2 if symmetric else rows
    z = torch.randn(REPEATS, len(RADII), rows, surface.dimension, generator=generator, dtype=torch.float64)
    z = torch.cat([z, -z], dim=2) if symmetric else z
    radius = RADII / base.kappa
    v = radius[:, None, None] * z
    away = surface.x_over(v.reshape(-1, surface.dimension)) - base.x
    normal = away - (away @ base.tangent) @ base.tangent.T
    return Clouds(base.kappa, radius, z, v, normal.reshape(*z.shape[:3], surface.width))


def averages(cloud: Clouds, g: Float[Tensor, "r m n o"]) -> tuple[Float[Tensor, "r m o d"], Float[Tensor, "r m o w"]]:
    """``E[g x_T^T]`` and ``E[g x_N^T]`` over the rows of each cloud."""
    turned = g.transpose(2, 3) / g.shape[2]
    return turned @ cloud.tangent, turned @ cloud.normal


def gradient_parts(cloud: Clouds, g: Float[Tensor, "r m n o"]) -> Parts:
    """Their lengths, and G_rms."""
    tangent, normal = (part.square().sum(dim=(2, 3)).sqrt() for part in averages(cloud, g))
    return Parts(g.shape[2], cloud.kappa, cloud.radius, tangent, normal, g.square().sum(dim=3).mean(dim=2).sqrt())


def independent(cloud: Clouds, generator: torch.Generator) -> Tensor:
    """Signals that know nothing of x: white noise."""
    return torch.randn(*cloud.z.shape[:3], OUTPUTS, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Teacher:
    """A signal that changes across the cloud whatever its size, ``linear z + square(z, z)``, one for each repeat."""

    linear: Float[Tensor, "r 1 d o"]
    square: Float[Tensor, "r 1 d d o"]

    def __call__(self, z: Float[Tensor, "r m n d"]) -> Float[Tensor, "r m n o"]:
        """The signal at unit coordinates."""
        pairs = (z[..., :, None] * z[..., None, :]).flatten(3)
        return z @ self.linear + pairs @ self.square.flatten(2, 3)

    def truths(self, base: Base) -> tuple[Float[Tensor, "r 1 o d"], Float[Tensor, "r 1 o w"]]:
        """``E[g x_T^T] / t`` and, to leading order, ``E[g x_N^T] / t^2``: normal moments of order two and four."""
        bent = 2 * torch.einsum("rabo,wab->row", self.square[:, 0], base.second)
        trace = torch.einsum("raao,wbb->row", self.square[:, 0], base.second)
        return self.linear.transpose(2, 3), (bent + trace)[:, None] / 2


def teacher(dimension: int, generator: torch.Generator) -> Teacher:
    """Normal coefficients, symmetric in the quadratic part."""
    linear = torch.randn(REPEATS, 1, dimension, OUTPUTS, generator=generator, dtype=torch.float64)
    square = torch.randn(REPEATS, 1, dimension, dimension, OUTPUTS, generator=generator, dtype=torch.float64)
    return Teacher(linear / dimension**0.5, (square + square.transpose(2, 3)) / (2 * dimension))


def within(cloud: Clouds, generator: torch.Generator) -> Tensor:
    """A teacher's signal with white noise on top."""
    return teacher(cloud.z.shape[3], generator)(cloud.z) + independent(cloud, generator)


def smooth(cloud: Clouds, generator: torch.Generator) -> Tensor:
    """Signals that hardly change across the cloud: a constant and a slope in x itself, the same for every radius."""
    d = cloud.z.shape[3]
    constant = torch.randn(REPEATS, 1, 1, OUTPUTS, generator=generator, dtype=torch.float64)
    slope = cloud.kappa * torch.randn(REPEATS, 1, d, OUTPUTS, generator=generator, dtype=torch.float64)
    return constant + cloud.tangent @ slope


def run_random(seed: int) -> Outcome:
    """Slopes under three kinds of random signals, one of which breaks the law."""
    checks: list[Check] = []
    series: list[Series] = []
    for number, (site, surface) in enumerate(surfaces(seed).items()):
        d = surface.dimension
        for kind, make, slopes in (
            ("independent", independent, (1.0, 2.0, 1.0)),
            ("within the cloud", within, (1.0, 2.0, 1.0)),
            ("smooth", smooth, (2.0, 2.0, 0.0)),
        ):
            cloud = clouds(surface, seed * 100 + number, symmetric=make is smooth)
            generator = torch.Generator().manual_seed(seed * 100 + 50 + number)
            g = make(cloud, generator)
            found = gradient_parts(cloud, g)
            checks += slope_checks(site, kind, found, slopes)
            if make is independent:
                checks += white_checks(site, kind, found, d)
            if make is within:
                generator.manual_seed(seed * 100 + 50 + number)  # the same teacher again
                checks += teacher_checks(site, kind, cloud, g, teacher(d, generator), surface.base)
            series += panels(site, kind, found)
    notes = (
        "Lines have the slopes of the law, 1 for the tangent part, 2 for the normal part, 1 for their ratio, and begin "
        "at the smallest radius.",
        "independent: white noise. Both parts are then the noise of a mean over n tokens: c = sqrt(d/n), and the "
        "ratio of the parts is the root of visible curvature.",
        "within the cloud: the signal changes across the cloud however small it is, as labels of single tokens do. "
        "The law holds.",
        "smooth: the signal is a fixed smooth function of x. Then E[g x_T] is of order t², c falls with t, and the "
        "ratio does not shrink at all: a small cloud alone does not make the tangent part win.",
    )
    return Outcome(tuple(checks), tuple(series), notes)


def slope_checks(site: str, kind: str, found: Parts, slopes: tuple[float, float, float]) -> list[Check]:
    """Slopes of both parts and of their ratio against the radius; the sizes of c and of the ratio, to be seen."""
    t, ratio = found.radius, found.normal / found.tangent
    rows = (("tangent slope", found.tangent), ("normal slope", found.normal), ("ratio slope", ratio))
    checks = [
        Check(site, name, _slope(found, value), truth, slice=kind, tolerance=NEXT_ORDER)
        for (name, value), truth in zip(rows, slopes)
    ]
    middle = over_repeats(found.c[:, len(t) // 2], "|E[g x_T^T]| / (G_rms t)", n=found.rows)
    largest = over_repeats(ratio[:, -1], "|E[g x_N^T]| / |E[g x_T^T]|", n=found.rows)
    return [
        *checks,
        Check(site, "c at the middle radius", middle, None, slice=kind),
        Check(site, "ratio at the largest radius", largest, None, slice=kind),
    ]


def _slope(found: Parts, values: Tensor) -> Estimate:
    slopes = loglog_slopes(found.radius, values)
    return over_repeats(slopes, f"log-log slope over {len(found.radius)} radii", n=found.rows)


def white_checks(site: str, kind: str, found: Parts, dimension: int) -> list[Check]:
    """Under white noise the mean squares are known: ``c^2 = d / n``, normal ``d (d + 2)/4 kappa^2 G^2 t^4 / n``."""
    t, d = found.radius, dimension
    normal = found.rows * (found.normal / (found.signal * found.kappa * t**2)).square().mean(dim=1)
    return [
        Check(
            site,
            "n c²",
            over_repeats(found.rows * found.c.square().mean(dim=1), "n c²", n=found.rows),
            float(d),
            slice=kind,
        ),
        Check(
            site,
            "n (normal / kappa G t²)²",
            over_repeats(normal, "mean over radii", n=found.rows),
            d * (d + 2) / 4,
            slice=kind,
            tolerance=NEXT_ORDER,
        ),
    ]


def teacher_checks(site: str, kind: str, cloud: Clouds, g: Tensor, made: Teacher, base: Base) -> list[Check]:
    """Both parts beside their closed forms, repeat by repeat.

    ``<part, truth> / <truth, truth>`` has mean 1; the ratio of lengths would not, since noise makes a mean longer.
    """
    t = cloud.radius[:, None, None]
    checks = []
    for name, part, truth, scale in zip(("tangent", "normal"), averages(cloud, g), made.truths(base), (t, t**2)):
        along = (part / scale * truth).sum(dim=(2, 3)) / truth.square().sum(dim=(2, 3))
        estimate = over_repeats(along.mean(dim=1), "<part, truth> / <truth, truth>, mean over radii", n=g.shape[2])
        checks.append(Check(site, f"{name} part / its closed form", estimate, 1.0, slice=kind, tolerance=NEXT_ORDER))
    return checks


def panels(site: str, kind: str, found: Parts) -> list[Series]:
    """Tangent part, normal part and ratio over the radius, beside the slopes 1, 2 and 1 through the smallest radius."""
    x = found.radius * found.kappa
    g = found.signal
    rows = (
        ("tangent part", found.tangent * found.kappa / g, 1, "|E[g x_T]| kappa / G"),
        ("normal part", found.normal * found.kappa / g, 2, "|E[g x_N]| kappa / G"),
        ("ratio", found.normal / found.tangent, 1, "normal / tangent part"),
    )
    return [
        series_of(
            site,
            name,
            x,
            values,
            (R_LABEL, label),
            slice=kind,
            law=values[:, 0].mean() * (x / x[0]) ** power,
        )
        for name, values, power, label in rows
    ]


def run_learned(seed: int) -> Outcome:
    """The gradient of a softmax layer on labelled tokens, before and during its training."""
    checks: list[Check] = []
    series: list[Series] = []
    for number, (site, surface) in enumerate(surfaces(seed).items()):
        cloud = clouds(surface, seed * 100 + number, rows=TRAINED_ROWS)
        looks = train(cloud, seed * 100 + 50 + number)
        for steps, found in looks.items():
            kind = f"after {steps} updates"
            checks += slope_checks(site, kind, found, (1.0, 2.0, 1.0))
            series += panels(site, kind, found)
        seen = torch.tensor([1.0 + step for step in looks], dtype=torch.float64)
        c = torch.stack([found.c.mean(dim=1) for found in looks.values()], dim=1)
        series.append(series_of(site, "c over training", seen, c, ("1 + updates", "c")))
    notes = (
        "Lines have the slopes of the law, 1, 2 and 1, and begin at the smallest radius.",
        "A softmax layer y = W x + b on tokens whose class depends on where they lie in the cloud, trained by gradient "
        "descent; g is the true gradient of its loss. The rate is 1/t², so that every radius learns as much.",
        "Training itself makes the tangent part cancel: it is what the layer learns first. c falls with every update "
        "while the normal part stays, so the law keeps its slopes and loses its constant: in the end the normal part "
        "is the larger one.",
    )
    return Outcome(tuple(checks), tuple(series), notes)


def train(cloud: Clouds, seed: int) -> dict[int, Parts]:
    """Gradients of a layer trained on every cloud at once, after each number of updates in ``TRAINING``."""
    generator = torch.Generator().manual_seed(seed)
    logits = within(cloud, generator)
    noise = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    label = (logits - (-noise.log()).log()).argmax(dim=3)  # Gumbel: a draw from the softmax of the logits
    target = torch.nn.functional.one_hot(label, OUTPUTS).double()
    x = torch.cat([cloud.tangent, cloud.normal], dim=3)
    w = torch.zeros(*x.shape[:2], x.shape[3], OUTPUTS, dtype=torch.float64)
    b = torch.zeros(*x.shape[:2], 1, OUTPUTS, dtype=torch.float64)
    rate = RATE / cloud.radius[:, None, None].square()
    looks = {}
    for step in range(max(TRAINING) + 1):
        g = (x @ w + b).softmax(dim=3) - target
        if step in TRAINING:
            looks[step] = gradient_parts(cloud, g)
        w = w - rate * (x.transpose(2, 3) @ g) / x.shape[2]
        b = b - RATE * g.mean(dim=2, keepdim=True)
    return looks


EXPERIMENTS = (
    Experiment(
        "layer-gradient",
        "Tangent and normal parts of a layer's gradient",
        "Does the normal part of dW shrink faster than the tangent part as the cloud shrinks, and for which signals?",
        run_random,
        3.0,
    ),
    Experiment(
        "learned-gradient",
        "A layer's gradient under a real loss",
        "Does the law hold for the gradient of a layer that is being trained, and what becomes of the constant c?",
        run_learned,
        8.0,
    ),
)
