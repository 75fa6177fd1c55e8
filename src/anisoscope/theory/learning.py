"""Small models that learn on a curved cloud: where their gradients and their weight changes point, step by step.

A linear layer, whose whole course is known in closed form (learning_laws.py); the two-layer network stands in
learning_mlp.py. Both read x about the base of a local cloud, in units of its spread. Beside every tangent share stand
others: chance, d/D; ``v``, the tangent share of x itself, which a reader gradient ``sum g x^T`` has BY CONSTRUCTION
where g has mean zero and knows nothing of x; the share of the model's own signals dealt out to other rows, which keeps
the product of the means of g and x; and the least share that the proposition leaves, ``c^2 / (c^2 + visible
curvature)`` with the measured c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.theory.experiment import Check, Experiment, Outcome
from anisoscope.theory.learning_laws import LinearTask, crossing_step, least_share, pairing
from anisoscope.theory.learning_mlp import two_layers
from anisoscope.theory.learning_parts import (
    SHARE,
    dealt_share,
    flat_line,
    mean_check,
    non_cancellation,
    pooled_share,
    share_line,
    shown,
    tangent_share,
    unit_inputs,
)
from anisoscope.theory.recovery_laws import normal_form
from anisoscope.theory.surfaces import Surface, make_surface

D, WIDTH, NORMALS, OUTPUTS = 4, 24, 8, 8
STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
SPREAD, KAPPA, RATE = 0.3, 1.0, 0.4
BATCH = 64
FINITE = 2e-4  # what the noise of so many rows, which adds to the normal part, takes from a share


@dataclass(frozen=True)
class Cloud:
    """Clouds in units of the spread, tangent columns first, with targets and the moments that descent needs."""

    x: Float[Tensor, "r n w"]
    f: Float[Tensor, "r n m"]
    inputs: Float[Tensor, "r w w"]
    both: Float[Tensor, "r m w"]

    @classmethod
    def of(cls, x: Float[Tensor, "r n w"], f: Float[Tensor, "r n m"]) -> Cloud:
        """With ``E[x x^T]`` and ``E[f x^T]``."""
        return cls(x, f, x.mT @ x / x.shape[1], f.mT @ x / x.shape[1])


@dataclass(frozen=True)
class Course:
    """What was read at each step (columns) of each repeat (rows); the change starts at the second step."""

    gradient: Float[Tensor, "r m"]
    change: Float[Tensor, "r k"]
    cosine: Float[Tensor, "r m"]
    dealt: Float[Tensor, "r m"]
    least: Float[Tensor, "r m"]


def linear_task(seed: int) -> tuple[Surface, LinearTask]:
    """A random graph and a target with a linear and a quadratic part on it, in units of the spread."""
    surface = make_surface("quadratic", dimension=D, normals=NORMALS, kappa=KAPPA, width=WIDTH, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    slope = torch.randn(OUTPUTS, D, generator=generator, dtype=torch.float64)
    raw = torch.randn(OUTPUTS, D, D, generator=generator, dtype=torch.float64)
    bend = raw + raw.mT
    return surface, LinearTask(normal_form(surface.base) * SPREAD, slope / slope.norm(), bend / bend.norm(), 1.0)


def descend(cloud: Cloud, rate: float, steps: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Full gradient descent of ``y = W x`` from zero: at each of these steps the gradient and the weights before it."""
    weights, found = torch.zeros_like(cloud.both), {}
    for step in range(max(steps) + 1):
        gradient = weights @ cloud.inputs - cloud.both
        if step in steps:
            found[step] = gradient, weights
        weights = weights - rate * gradient
    return found


def course_of(cloud: Cloud, rate: float, steps: Sequence[int], visible: Float[Tensor, "r"]) -> Course:
    """Descend and read."""
    found = descend(cloud, rate, steps)
    cosines, dealt = [], []
    for gradient, weights in found.values():
        g = cloud.x @ weights.mT - cloud.f
        cosines.append(non_cancellation(gradient, g.square().sum(dim=2).mean(dim=1), cloud.x, D))
        dealt.append(dealt_share(cloud.x, g, D))
    cosine = torch.stack(cosines, dim=1)
    return Course(
        torch.stack([tangent_share(gradient, D) for gradient, _ in found.values()], dim=1),
        torch.stack([tangent_share(weights, D) for step, (_, weights) in found.items() if step], dim=1),
        cosine,
        torch.stack(dealt, dim=1),
        least_share(cosine, visible[:, None]),
    )


def linear(seed: int, *, repeats: int = 24, rows: int = 12_000) -> Outcome:
    """A linear layer by full gradient descent, beside its law, chance, the reader null and the proposition."""
    surface, task = linear_task(seed)
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1))
    z = torch.randn(repeats, rows, D, generator=generator, dtype=torch.float64)
    x = unit_inputs(surface, SPREAD, z)
    cloud = Cloud.of(x, task.targets(z.flatten(0, 1)).unflatten(0, (repeats, rows)))
    energy = cloud.inputs.diagonal(dim1=1, dim2=2)
    visible = energy[:, D:].sum(dim=1) / energy[:, :D].sum(dim=1)
    course = course_of(cloud, RATE, STEPS, visible)
    where = f"linear layer, d={D} D={WIDTH}, kappa * spread = {KAPPA * SPREAD:g}"

    law = torch.tensor([task.gradient_share(step, RATE) for step in STEPS], dtype=torch.float64)
    law_change = torch.tensor([task.change_share(step, RATE) for step in STEPS[1:]], dtype=torch.float64)
    at = {step: i for i, step in enumerate(STEPS)}
    read = [("gradient", step, course.gradient[:, at[step]], law[at[step]]) for step in (0, 2, 4, 8)]
    read += [("weight change", step, course.change[:, at[step] - 1], law_change[at[step] - 1]) for step in (8, 64, 256)]
    c, turn = "non-cancellation c", "step that turns half of it normal"
    checks = [
        *(mean_check(where, site, f"{SHARE}, step {step}", y, float(truth), FINITE) for site, step, y, truth in read),
        mean_check(where, "gradient", f"{SHARE}, step {STEPS[-1]}", course.gradient[:, -1]),
        mean_check(where, "gradient", turn, _turnings(cloud), task.turning_step(RATE)),
        mean_check(where, "gradient", f"{c}, step 0", course.cosine[:, 0], _first_cosine(task)),
        mean_check(where, "gradient", f"{c}, step 16", course.cosine[:, at[16]]),
        mean_check(where, "inputs", "visible curvature", visible, task.visible_curvature),
        *_nulls(where, x, task, generator),
    ]
    null = torch.full_like(law, task.variance_share)
    series = (
        share_line(where, STEPS, course.gradient, "gradient", shown(law, 1e-6)),
        share_line(where, STEPS[1:], course.change, "weight change", law_change),
        share_line(where, STEPS, independent_shares(x, len(STEPS), generator), "independent signals", null),
        share_line(where, STEPS, course.dealt, "signals dealt to other rows"),
        share_line(where, STEPS, shown(course.least, 1e-3), "least share by the proposition"),
        flat_line(where, STEPS, D / WIDTH, "chance"),
    )
    return Outcome(tuple(checks), series, ("step 0 stands at 1/2 on the axis",))


def _first_cosine(task: LinearTask) -> float:
    """c at the start, where ``g = -f``: ``|A| / (f_rms sqrt(d))``."""
    slope2 = float(task.slope.square().sum())
    signal2 = slope2 + float(pairing(task.bend, task.bend).diagonal().sum()) / 4
    return math.sqrt(slope2 / signal2 / task.slope.shape[1])


def _turnings(cloud: Cloud) -> Float[Tensor, "r"]:
    found = descend(cloud, RATE, range(65))
    shares = torch.stack([tangent_share(gradient, D) for gradient, _ in found.values()], dim=1)
    return torch.tensor([crossing_step(one.tolist()) for one in shares], dtype=torch.float64)


def independent_shares(
    x: Float[Tensor, "r n w"], times: int, generator: torch.Generator, *, rows: int = 4000, outputs: int = 32
) -> Float[Tensor, "r t"]:
    """Tangent shares of reader gradients whose signals are drawn apart from x, anew each time."""
    few = x[:, :rows]
    shape = (len(few), outputs, few.shape[1])
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) @ few for _ in range(times)]
    return torch.stack([tangent_share(one, D) for one in drawn], dim=1)


def _nulls(where: str, x: Float[Tensor, "r n w"], task: LinearTask, generator: torch.Generator) -> list[Check]:
    """Two gradients that hold ``v`` by construction: of independent signals, and of batches once all is learnt."""
    repeats, rows, _ = x.shape
    v = task.variance_share
    g = torch.randn(repeats, rows, OUTPUTS, generator=generator, dtype=torch.float64)
    drawn = g.mT @ x
    sizes = drawn[..., :D].square().sum(dim=(1, 2)), drawn.square().sum(dim=(1, 2))
    independent = Check("independent signals", SHARE, pooled_share(*sizes, "g drawn apart from x"), v, where)
    # Targets that a linear layer can learn but for their noise: at the optimum the signal is that noise.
    f = x[..., :D] @ task.slope.T + g
    cloud = Cloud.of(x, f)
    # The cloud does not fill its space: least squares through the moments, without the directions it leaves empty.
    best = torch.linalg.pinv(cloud.inputs, rtol=1e-9, hermitian=True) @ cloud.both.mT
    rest = x @ best - f
    count = rows // BATCH * BATCH
    parts = [one[:, :count].unflatten(1, (-1, BATCH)) for one in (rest, x)]
    batches = parts[0].mT @ parts[1] / BATCH
    sizes = batches[..., :D].square().sum(dim=(1, 2, 3)), batches.square().sum(dim=(1, 2, 3))
    late = pooled_share(*sizes, f"gradients of batches of {BATCH} at the least squares")
    target = "linear target with noise"
    return [
        independent,
        Check(f"batches at the optimum, {target}", SHARE, late, v, where),
        mean_check(where, f"gradient, {target}", f"{SHARE}, step 0", tangent_share(cloud.both, D)),
    ]


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "learning-linear",
        "A linear layer learns on a curved cloud",
        "How long does the gradient of a layer that descends stay tangent, and what of that is construction?",
        linear,
        5.0,
    ),
    Experiment(
        "learning-mlp",
        "A two-layer network learns on a curved cloud",
        "Do gradients and weight changes of a network that learns a smooth target, or its input, stay tangent?",
        two_layers,
        10.0,
    ),
)
"""The experiments of this module, in the order of the report."""
