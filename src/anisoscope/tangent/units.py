"""What an error bar is over: rows taken one by one, or groups of them (sequences) that are independent as wholes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import NonFiniteError, OptionError, ShapeError, TooFewRowsError, name_rows
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.rows import largest_size, non_finite_rows, power_of_two_scale

FEWEST = 3  # a spread of two numbers is not worth printing
GIVEN = "given the two fits: how a fit varies with its half is not in the error bar"
Numbers = Tensor | np.ndarray
ALONE = "rows were taken as independent; tokens of one sequence are not: give groups for an error bar over sequences"


@dataclass(frozen=True)
class Units:
    """The number of its unit for each row, and the name of the population the units are drawn from."""

    index: Int[Tensor, "n"]
    count: int
    over: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, groups: Int[Tensor, "g"] | None, n: int, device: torch.device | str, name: str = "sequences") -> Units:
        """Units from a label for each row; every row its own unit where there are no labels."""
        if groups is None:
            return cls(torch.arange(n, device=device), n, "rows", (ALONE,))
        if len(groups) != n:
            raise ShapeError(f"groups has {len(groups)} labels for {n} rows; one label for each row is needed")
        labels, index = groups.to(device).unique(return_inverse=True)
        return cls(index, len(labels), f"{len(labels)} {name}")

    def sum(self, values: Float[Tensor, "n"]) -> Float[Tensor, "g"]:
        """The total of ``values`` in each unit, in float64."""
        out = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return out.index_add_(0, self.index, values.double())


def as_array(values: Numbers) -> np.ndarray:
    """A few numbers for numpy, which answers small questions several times sooner than torch."""
    return values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()


def jackknife(top: Float[Numbers, "g"], bottom: Float[Numbers, "g"], over: str) -> Bar | None:
    """The error bar of ``sum(top) / sum(bottom)`` from leaving out each unit in turn; None for fewer than three."""
    if len(bottom) < FEWEST:
        return None
    tops, bottoms = as_array(top), as_array(bottom)
    whole, total, used = tops.sum(), bottoms.sum(), bottoms > 0
    # Units without energy (padding alone) say nothing and are no degrees of freedom.
    count = int(np.count_nonzero(used))
    if count < FEWEST or bottoms.max() >= total * (1 - 1e-12):
        return None
    if count < len(bottoms):
        tops, bottoms = tops[used], bottoms[used]
    without = (whole - tops) / (total - bottoms)
    without -= without.sum() / count
    return Bar(math.sqrt((count - 1) / count * float(without @ without)), count - 1, over)


@dataclass(frozen=True)
class Halves:
    """Rows of the two halves of the sequences, and the sequence of every row."""

    rows: tuple[Int[Tensor, "i"], Int[Tensor, "j"]]
    units: Units

    @classmethod
    def of(cls, groups: Int[Tensor, "n"], seed: int, device: torch.device | str) -> Halves:
        """Halves drawn with the seed: the same sequences give the same halves."""
        units = Units.of(groups, len(groups), "cpu")
        if units.count < 2 * FEWEST:
            raise TooFewRowsError(
                f"{units.count} sequences cannot be halved with an error bar; {2 * FEWEST} are needed"
            )
        order = torch.randperm(units.count, generator=stream(seed, "halves"))
        first = torch.isin(units.index, order[: units.count // 2])
        rows = tuple(torch.nonzero(flag).reshape(-1).to(device) for flag in (first, ~first))
        return cls(rows, units)  # type: ignore[arg-type]


def mean_of_halves(one: Estimate, two: Estimate) -> Estimate:
    """The plain mean of what two halves show; their sequences are disjoint, so variances add."""
    stderr, over, dof = None, None, None
    if one.stderr is not None and two.stderr is not None:
        stderr, dof = math.hypot(one.stderr, two.stderr) / 2, (one.dof or 0) + (two.dof or 0)
        over = over_both(one.over or "", two.over or "")
    value, n, method = (one.value + two.value) / 2, one.n + two.n, f"{one.method}, cross-fitted"
    return Estimate(value=value, stderr=stderr, n=n, method=method, notes=(GIVEN,), over=over, dof=dof)


def mean_of_draws(
    one: Float[Numbers, "b"], two: Float[Numbers, "b"], n: int, method: str, name: str, shift: float = 0.0
) -> Estimate:
    """``shift`` plus the mean over draws of what two halves show of each; the same draws in both, so not independent.

    The error bar is over the draws: each counts with the mean of its two numbers.
    """
    each, bar = as_array((one + two) / 2), None
    count, mean = len(each), float(each.sum()) / len(each)
    if count >= FEWEST:
        away = each - mean
        spread = math.sqrt(float(away @ away) / (count - 1))
        bar = Bar(spread / math.sqrt(count), count - 1, in_both(f"{count} {name}"))
    method = f"{method}, cross-fitted"
    return Estimate(value=shift + mean, n=n, method=method, notes=(GIVEN,), **fields(bar))


def in_both(draws: str) -> str:
    """What an error bar is over where both halves meet the same draws."""
    return f"{draws}, the same in both halves"


@functools.lru_cache(maxsize=256)
def over_both(one: str, two: str) -> str:
    """What an error bar of both halves is over; the same few words at every site and look."""
    return f"{one} and {two} of the two halves"


def ratio(
    top: Float[Tensor, "n"],
    bottom: Float[Tensor, "n"],
    units: Units,
    method: str,
    *,
    scale: float = 1.0,
    parts: Mapping[str, Estimate] | None = None,
) -> Estimate:
    """``scale * sum(top) / sum(bottom)`` over rows, with an error bar over the units."""
    tops, bottoms = units.sum(top), units.sum(bottom)
    bar = jackknife(tops, bottoms, units.over)
    notes = units.notes if bar else (f"no error bar: fewer than {FEWEST} independent units with energy",)
    return Estimate(
        value=scale * float(tops.sum() / bottoms.sum()),
        n=len(top),
        method=method,
        notes=notes,
        parts=parts or {},
        **fields(bar and bar.scaled(scale)),
    )


def in_range(rows: Float[Tensor, "n d"], name: str) -> Float[Tensor, "n d"]:
    """Rows as float32 or float64, detached, at a size whose squares stay in range: shares do not see the factor."""
    rows = rows.detach()
    if not rows.is_floating_point():
        raise ShapeError(f"{name} have dtype {rows.dtype}; real numbers are needed")
    if len(rows) == 0:
        raise TooFewRowsError(f"{name} have no row; at least one is needed")
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = largest_size(rows)
    if not math.isfinite(largest):
        bad = non_finite_rows(rows).tolist()
        raise NonFiniteError(f"{name}: {name_rows(bad)} of {len(rows):,} hold NaN or infinity; mask them")
    scale = power_of_two_scale(largest)
    return rows if scale == 1.0 else rows * scale


def stream(seed: int, purpose: str) -> torch.Generator:
    """Random numbers of this seed for one purpose.

    Data are often drawn with the same small seeds: from the plain generator the controls would then be made of the
    very numbers that made the data, and so be no controls at all.
    """
    state = np.random.SeedSequence([seed % 2**64, *purpose.encode()]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def p_value(observed: float, null: Float[Numbers, "b"]) -> float:
    """``(1 + #{null >= observed}) / (B + 1)``: the smallest it can be is 1 / (B + 1), never 0.

    Values equal up to rounding count as equal, against the observed one.
    """
    if len(null) == 0:
        raise OptionError("a p-value needs at least one draw from the null")
    slack = 1e-9 * abs(observed)
    return (1 + int(np.count_nonzero(as_array(null) >= observed - slack))) / (len(null) + 1)
