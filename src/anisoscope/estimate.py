"""Estimate: one measured number with its error bar. Imports nothing heavy, so that readers of results need no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_NO_PARTS: Mapping[str, Estimate] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Estimate:
    """A value, what its error bar is over, and how it was obtained.

    ``stderr`` is one standard error, or None where none was computed or none would be honest (a note then says why);
    it is never 0.0 as a placeholder. ``over`` names the population that the error bar speaks of. ``dof`` is the number
    of degrees of freedom behind ``stderr``; intervals use Student's t with it, the normal law where it is None.
    ``parts`` holds named companions of the value: other scales, other components, null values.
    """

    value: float
    stderr: float | None
    n: int
    method: str
    notes: tuple[str, ...]
    over: str | None
    dof: float | None
    parts: Mapping[str, Estimate]

    def __init__(
        self, *, value: float, stderr: float | None, n: int, method: str, notes: tuple[str, ...] = (),
        over: str | None = None, dof: float | None = None, parts: Mapping[str, Estimate] = _NO_PARTS,
    ) -> None:  # fmt: skip
        # As a dataclass would write it, in half the time: a look makes hundreds of estimates while its GPU has nothing
        # to do.
        _VALUE(self, value)
        _STDERR(self, stderr)
        _N(self, n)
        _METHOD(self, method)
        _NOTES(self, notes)
        _OVER(self, over)
        _DOF(self, dof)
        _PARTS(self, parts)
        if not _finite(value):
            raise ValueError(f"an Estimate holds a finite number, got {value} from {method}")
        if stderr is None:
            return
        if not (_finite(stderr) and stderr >= 0):
            raise ValueError(f"stderr must be finite and >= 0, or None; got {stderr} from {method}")
        if over is None:
            raise ValueError(f"an error bar must say what it is over; {method} did not")

    def __reduce__(self) -> tuple[object, ...]:
        # A read-only view of a mapping cannot be sent between processes; the mapping itself can.
        return _rebuilt, ({name: getattr(self, name) for name in self.__slots__} | {"parts": dict(self.parts)},)

    def __float__(self) -> float:
        return self.value

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Two-sided confidence interval at ``level``, or None where there is no error bar."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
        if self.stderr is None:
            return None
        from scipy.special import ndtri, stdtrit  # here, not above: scipy costs a third of a second to import

        tail = 0.5 + level / 2
        quantile = float(ndtri(tail) if self.dof is None else stdtrit(self.dof, tail))
        return self.value - quantile * self.stderr, self.value + quantile * self.stderr

    def __repr__(self) -> str:
        if self.stderr is None:
            text = f"{self.value:.6g} (no error bar; n={self.n:,}; {self.method})"
        else:
            digits = _digits(self.value, self.stderr)
            text = f"{self.value:.{digits}f} ± {self.stderr:.2g} (n={self.n:,}; {self.method}; stderr over {self.over})"
        lines = [f"Estimate: {text}"]
        lines += [f"  {name}: {_brief(part)}" for name, part in self.parts.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


_finite = math.isfinite
_VALUE, _STDERR, _N, _METHOD, _NOTES, _OVER, _DOF, _PARTS = (
    getattr(Estimate, name).__set__ for name in ("value", "stderr", "n", "method", "notes", "over", "dof", "parts")
)


def _rebuilt(values: dict[str, Any]) -> Estimate:
    return Estimate(**values)


def _digits(value: float, stderr: float) -> int:
    """Decimals worth printing: two significant digits of the error."""
    if stderr == 0:
        return 6
    return max(0, min(12, 1 - math.floor(math.log10(stderr))))


def _brief(estimate: Estimate) -> str:
    if estimate.stderr is None:
        return f"{estimate.value:.6g}"
    return f"{estimate.value:.{_digits(estimate.value, estimate.stderr)}f} ± {estimate.stderr:.2g}"
