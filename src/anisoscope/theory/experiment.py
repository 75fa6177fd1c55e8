"""What an experiment with a known answer is made of: checks, series, an outcome, and the experiment itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import OptionError, ShapeError
from anisoscope.estimate import Estimate

SURPRISE = 5.0  # standard errors from the truth at which a check is off
ROUNDING = 1e-12  # what float64 may do to a number that should be exact


@dataclass(frozen=True, slots=True)
class Check:
    """One number beside its known answer; ``truth`` is None for a number that is shown and not judged.

    ``tolerance`` is the relative error that the experiment itself states, such as the next order of an expansion; it
    is allowed beside the standard errors, and is all that is allowed where the estimate has no error bar.
    """

    site: str
    measure: str
    estimate: Estimate
    truth: float | None
    slice: str = "all"
    tolerance: float = 0.0

    @property
    def z(self) -> float | None:
        """Standard errors from the truth; None without a truth or without an error bar above zero."""
        if self.truth is None or not self.estimate.stderr:
            return None
        return (self.estimate.value - self.truth) / self.estimate.stderr

    def agrees(self, k: float = SURPRISE) -> bool:
        """Whether the estimate lies within ``k`` standard errors of the truth; True where there is no truth."""
        if self.truth is None:
            return True
        allowed = k * (self.estimate.stderr or 0.0) + self.tolerance * abs(self.truth)
        return abs(self.estimate.value - self.truth) <= allowed + ROUNDING * max(1.0, abs(self.truth))


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a figure, one standard error each, and the ``law``: what theory predicts at the same places."""

    site: str
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...] | None
    x_label: str
    y_label: str
    slice: str = "all"
    law: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        lengths = {len(one) for one in (self.x, self.y, self.stderr, self.law) if one is not None}
        if len(lengths) > 1:
            raise ShapeError(f"the series {self.name!r} at {self.site!r} has parts of {sorted(lengths)} points")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of an experiment found."""

    checks: tuple[Check, ...]
    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def off(self) -> tuple[Check, ...]:
        """The checks that do not agree with their truth."""
        return tuple(check for check in self.checks if not check.agrees())


@dataclass(frozen=True, slots=True)
class Experiment:
    """A proposition as an experiment: ``run(seed)`` gives its outcome in about ``seconds`` on two cores."""

    name: str
    title: str
    question: str
    run: Callable[[int], Outcome]
    seconds: float


def over_repeats(values: Float[Tensor, "r"], method: str, *, what: str = "independent repeats", n: int = 0) -> Estimate:
    """The mean of independent repeats with its standard error; ``n`` is the number of rows behind it, if known."""
    if len(values) < 2:
        raise OptionError(f"an error bar needs two repeats or more, got {len(values)} of {method}")
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std() / len(values) ** 0.5),
        n=n or len(values),
        method=method,
        over=f"{len(values)} {what}",
        dof=float(len(values) - 1),
    )


def loglog_slopes(x: Float[Tensor, "m"], y: Float[Tensor, "r m"]) -> Float[Tensor, "r"]:
    """The least-squares slope of log y on log x, for each row of ``y``."""
    if not bool((x > 0).all() and (y > 0).all()):
        raise OptionError("a slope on log-log axes needs positive x and y")
    place = x.log() - x.log().mean()
    return (y.log() * place).sum(dim=1) / place.square().sum()


def series_of(
    site: str,
    name: str,
    x: Float[Tensor, "m"],
    y: Float[Tensor, "r m"],
    labels: tuple[str, str],
    *,
    slice: str = "all",
    law: Float[Tensor, "m"] | None = None,
) -> Series:
    """Means over the rows of ``y``, independent repeats, with their standard errors."""
    error = y.std(dim=0) / len(y) ** 0.5
    return Series(
        site,
        name,
        tuple(x.tolist()),
        tuple(y.mean(dim=0).tolist()),
        tuple(error.tolist()),
        *labels,
        slice,
        None if law is None else tuple(law.tolist()),
    )
