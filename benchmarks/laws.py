"""Power laws of cost: a fit in logarithms, how well it is known, where it bends and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

At = Mapping[str, int]


@dataclass(frozen=True)
class Law:
    """``overhead + exp(constant) * prod (x / reference)^exponent``, with the covariance of the logarithms."""

    axes: tuple[str, ...]
    reference: dict[str, float]
    overhead: float
    constant: float
    exponents: dict[str, float]
    halves: dict[str, float]
    misfit: float
    covariance: np.ndarray
    scatter: float
    dof: int

    def __call__(self, at: Mapping[str, float]) -> float:
        power = sum(self.exponents[one] * math.log(at[one] / self.reference[one]) for one in self.axes)
        return self.overhead + math.exp(self.constant + power)

    def interval(self, at: Mapping[str, float]) -> tuple[float, float]:
        """95 % for a new measurement there, if the law goes on that far."""
        value = self(at)
        share = 1 - self.overhead / value
        slope = [self.overhead / value, share, *(share * math.log(at[x] / self.reference[x]) for x in self.axes)]
        spread = math.sqrt(float(np.array(slope) @ self.covariance @ slope) + self.scatter**2)
        factor = math.exp(student.ppf(0.975, self.dof) * spread)
        return value / factor, value * factor

    def bend(self, axis: str) -> float:
        """Where overhead and power are equal along one axis, the others at their reference."""
        if self.exponents[axis] <= 0 or self.overhead <= 0:
            return 0.0
        return self.reference[axis] * math.exp((math.log(self.overhead) - self.constant) / self.exponents[axis])


def fit_law(
    at: Sequence[At], values: Sequence[float], axes: Sequence[str], repeat_error: float = 0.0, *, overhead: bool = False
) -> Law:
    """Least squares in logarithms; ``repeat_error`` is the standard error of a logarithm from its repeats alone."""
    x = np.log(np.array([[one[axis] for axis in axes] for one in at], dtype=float))
    y = np.log(np.array(values, dtype=float))
    if len(y) < len(axes) + 2 + overhead:
        raise ValueError(f"a law of {len(axes)} axes needs {len(axes) + 2 + overhead} points or more, got {len(y)}")
    reference = x.mean(axis=0)
    design = np.column_stack([np.ones(len(y)), x - reference])
    start, *_ = np.linalg.lstsq(design, y, rcond=None)
    floor = y.min() - 7.0  # an overhead of a thousandth of the fastest point is none

    def miss(p: np.ndarray) -> np.ndarray:
        return np.logaddexp(p[0], design @ p[1:]) - y if overhead else design @ p[1:] - y

    lower, upper = [floor, *[-np.inf] * len(start)], [y.min() + 0.7, *[np.inf] * len(start)]
    tries = [least_squares(miss, [y.min() - d, *start], bounds=(lower, upper), x_scale="jac") for d in (1.0, 3.0, 6.0)]
    found = min(tries, key=lambda one: one.cost)
    dof = len(y) - len(start) - overhead
    scatter = max(math.sqrt(2 * found.cost / dof), repeat_error)
    covariance = scatter**2 * np.linalg.pinv(found.jac.T @ found.jac, rcond=1e-10)
    half = student.ppf(0.975, dof) * np.sqrt(np.diag(covariance))
    return Law(
        axes=tuple(axes),
        reference=dict(zip(axes, np.exp(reference).tolist(), strict=True)),
        overhead=math.exp(found.x[0]) if overhead and found.x[0] > floor + 0.1 else 0.0,
        constant=float(found.x[1]),
        exponents=dict(zip(axes, found.x[2:].tolist(), strict=True)),
        halves=dict(zip(axes, half[2:].tolist(), strict=True)),
        misfit=float(np.exp(np.abs(found.fun).max()) - 1),
        covariance=covariance,
        scatter=scatter,
        dof=dof,
    )
