"""A two-layer network by full gradient descent on a curved cloud: its first layer reads x, and is what is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.theory.experiment import Check, Outcome, Series
from anisoscope.theory.learning_laws import least_share
from anisoscope.theory.learning_parts import (
    SHARE,
    dealt_share,
    flat_line,
    mean_check,
    non_cancellation,
    share_line,
    shown,
    tangent_share,
    unit_inputs,
)
from anisoscope.theory.recovery_laws import normal_form
from anisoscope.theory.surfaces import Surface, make_surface

D, WIDTH, NORMALS, OUTPUTS, HIDDEN = 4, 24, 8, 8, 24
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RATE = 0.3
MANY_STARTS, MANY_ROWS = 24, 8000


@dataclass(frozen=True)
class Network:
    """``y = V tanh(W x + b) + a``, one for each repeat. W and the biases start at zero, V at random."""

    first: Float[Tensor, "r h w"]
    bias: Float[Tensor, "r 1 h"]
    last: Float[Tensor, "r m h"]
    shift: Float[Tensor, "r 1 m"]

    @classmethod
    def start(cls, repeats: int, width: int, outputs: int, generator: torch.Generator) -> Network:
        """Columns of V differ, so that hidden units part at the first step though W is zero."""
        last = torch.randn(repeats, outputs, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5
        zeros = [torch.zeros(repeats, *shape, dtype=torch.float64) for shape in ((HIDDEN, width), (1, HIDDEN))]
        return cls(zeros[0], zeros[1], last, torch.zeros(repeats, 1, outputs, dtype=torch.float64))

    def backward(self, x: Float[Tensor, "r n w"], f: Float[Tensor, "r n m"]) -> Backward:
        """Signals and gradients of ``mean |y - f|^2 / 2``."""
        hidden = torch.tanh(x @ self.first.mT + self.bias)
        rest = hidden @ self.last.mT + self.shift - f
        signal = (rest @ self.last) * (1 - hidden.square())
        return Backward(signal, rest, signal.mT @ x / x.shape[1], rest.mT @ hidden / x.shape[1])

    def stepped(self, back: Backward, rate: float) -> Network:
        """The network after one step of descent."""
        return Network(
            self.first - rate * back.first,
            self.bias - rate * back.signal.mean(dim=1, keepdim=True),
            self.last - rate * back.last,
            self.shift - rate * back.rest.mean(dim=1, keepdim=True),
        )


@dataclass(frozen=True)
class Backward:
    """What a backward pass leaves: signals at the first layer, residuals, gradients of both matrices."""

    signal: Float[Tensor, "r n h"]
    rest: Float[Tensor, "r n m"]
    first: Float[Tensor, "r h w"]
    last: Float[Tensor, "r m h"]


@dataclass(frozen=True)
class Reading:
    """Shares of the first layer at some steps (columns) of each repeat (rows); the change starts at the second step."""

    loss: Float[Tensor, "r m"]
    gradient: Float[Tensor, "r m"]
    change: Float[Tensor, "r k"]
    cosine: Float[Tensor, "r m"]
    dealt: Float[Tensor, "r m"]
    least: Float[Tensor, "r m"]
    variance: Float[Tensor, "r"]


def learn(net: Network, x: Float[Tensor, "r n w"], f: Float[Tensor, "r n m"], steps: Sequence[int]) -> Reading:
    """Descend, and read the first layer at these steps."""
    start, columns = net.first, []
    energy = x.square().sum(dim=1)
    variance = energy[:, :D].sum(dim=1) / energy.sum(dim=1)
    scale = f.square().sum(dim=2).mean(dim=1)
    for step in range(max(steps) + 1):
        back = net.backward(x, f)
        if step in steps:
            cosine = non_cancellation(back.first, back.signal.square().sum(dim=2).mean(dim=1), x, D)
            columns.append(
                (
                    back.rest.square().sum(dim=2).mean(dim=1) / scale,
                    tangent_share(back.first, D),
                    tangent_share(net.first - start, D),
                    cosine,
                    dealt_share(x, back.signal, D),
                    least_share(cosine, 1 / variance - 1),
                )
            )
        net = net.stepped(back, RATE)
    loss, gradient, change, cosine, dealt, least = (torch.stack(one, dim=1) for one in zip(*columns, strict=True))
    return Reading(loss, gradient, change[:, 1:], cosine, dealt, least, variance)


def two_layers(seed: int, *, repeats: int = 8, rows: int = 600, last: int = STEPS[-1]) -> Outcome:
    """Waves of a direction at two curvatures, even waves, and the input itself as targets. ``last`` ends training."""
    steps = tuple(step for step in STEPS if step <= last)
    checks: list[Check] = []
    series: list[Series] = []
    surface = make_surface("quadratic", dimension=D, normals=NORMALS, kappa=1.0, width=WIDTH, seed=seed)
    for task, bent in (("waves", 0.1), ("waves", 0.5), ("even waves", 0.5), ("its input", 0.5)):
        where = f"two layers, target {task}, kappa * spread = {bent:g}"
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1))
        a = torch.randn(OUTPUTS, D, generator=generator, dtype=torch.float64) / D**0.5
        b = torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)
        draw = partial(_drawn, surface, task, bent, (a, b), generator)
        x, f = draw(repeats, rows)
        found = learn(Network.start(repeats, WIDTH, f.shape[2], generator), x, f, steps)
        if task == "waves":
            # On many more rows: the law is that of infinitely many, and the noise of few adds to the normal part.
            starts = Network.start(MANY_STARTS, WIDTH, OUTPUTS, generator)
            first = tangent_share(starts.backward(*draw(MANY_STARTS, MANY_ROWS)).first, D)
            expected = first_share(starts, a, b, normal_form(surface.base) * bent)
            checks.append(mean_check(where, "gradient", f"{SHARE}, step 0, less its law", first - expected, 0.0))
        checks += _numbers(where, steps, found)
        series += _lines(where, steps, found)
    return Outcome(tuple(checks), tuple(series), ("step 0 stands at 1/2 on the axis",))


def _drawn(
    surface: Surface,
    task: str,
    bent: float,
    waves: tuple[Float[Tensor, "q d"], Float[Tensor, "q"]],
    generator: torch.Generator,
    repeats: int,
    rows: int,
) -> tuple[Float[Tensor, "r n w"], Float[Tensor, "r n m"]]:
    """Inputs and targets of a task."""
    a, b = waves
    z = torch.randn(repeats, rows, D, generator=generator, dtype=torch.float64)
    x = unit_inputs(surface, bent, z)
    return x, {"waves": torch.sin(z @ a.T + b), "even waves": torch.cos(z @ a.T), "its input": x}[task]


def first_share(
    net: Network, a: Float[Tensor, "m d"], b: Float[Tensor, "m"], form: Float[Tensor, "c d d"]
) -> Float[Tensor, "r"]:
    """Tangent share of the first gradient for targets ``sin(a z + b)``, over infinitely many rows, for each start.

    W is zero, so the signal is ``-V^T f``; and for standard normal z ``E[f z] = a cos(b) e``,
    ``E[f z z^T] = (I - a a^T) sin(b) e`` with ``e = exp(-|a|^2 / 2)``.
    """
    e = torch.exp(-a.square().sum(dim=1) / 2)
    tangent = a * (b.cos() * e)[:, None]
    trace = torch.einsum("cii->c", form)
    along = torch.einsum("mi,cij,mj->mc", a, form, a)
    normal = (trace - along) * (b.sin() * e)[:, None] / 2
    moments = net.last.mT @ torch.cat([tangent, normal], dim=1)
    return tangent_share(moments, a.shape[1])


def _numbers(where: str, steps: Sequence[int], found: Reading) -> list[Check]:
    """Numbers that only a run can tell, at the first step and at the last, and the lowest point on the way."""
    lowest = int(found.gradient.mean(dim=0).argmin())
    under = found.gradient[:, lowest] - found.variance
    return [
        mean_check(where, "gradient", f"{SHARE}, step 0", found.gradient[:, 0]),
        mean_check(where, "gradient", f"{SHARE} where it is lowest, step {steps[lowest]}", found.gradient[:, lowest]),
        mean_check(where, "gradient", f"{SHARE} there, less v", under),
        mean_check(where, "gradient", f"{SHARE}, step {steps[-1]}", found.gradient[:, -1]),
        mean_check(where, "gradient", "non-cancellation c, step 0", found.cosine[:, 0]),
        mean_check(where, "weight change", f"{SHARE}, step {steps[-1]}", found.change[:, -1]),
        mean_check(where, "inputs", f"{SHARE} v", found.variance),
        mean_check(where, "network", f"loss / its start, step {steps[-1]}", found.loss[:, -1]),
    ]


def _lines(where: str, steps: Sequence[int], found: Reading) -> list[Series]:
    return [
        share_line(where, steps, found.gradient, "gradient"),
        share_line(where, steps[1:], found.change, "weight change"),
        flat_line(where, steps, float(found.variance.mean()), "v, share of x"),
        share_line(where, steps, found.dealt, "signals dealt to other rows"),
        share_line(where, steps, shown(found.least, 1e-3), "least share by the proposition"),
        flat_line(where, steps, D / WIDTH, "chance"),
    ]
