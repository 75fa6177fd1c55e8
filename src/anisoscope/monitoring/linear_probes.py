"""Linear probes in closed form: ridge regression on frozen rows, fitted on half of the sequences, scored on the other.

Sequences are dealt into four quarters. A half is two of them: the penalty is the one whose fit on either quarter
predicts the other best, and the fit with it on both is scored on the two quarters of the other half; then the halves
change places. So every row is scored once, by a probe that saw no row of its sequence. All of it, but for the scores,
is a function of the quarters' second moments: rows are read once for all targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from anisoscope.errors import EmptyInputError, NonFiniteError, ShapeError, TooFewRowsError, name_rows
from anisoscope.estimate import Estimate

PENALTIES = tuple(10.0**power for power in range(-8, 3))
"""Ridge penalties that are tried, in units of the mean variance of the columns: one that the scale does not move."""
QUARTERS = 4
SEQUENCES_FOR_BAR = 8
LEAST_SPREAD = 1e-24  # squared, beside the squared size of the rows: what rounding leaves of rows that are all alike


@dataclass(frozen=True)
class Classes:
    """A label to tell: its number in each row, below ``count``. Only rows of ``scored`` are scored; all are fitted.

    Numbers of -1 belong to none of the classes: such rows teach a probe what no class looks like, and are not scored.
    """

    labels: Int64[Tensor, "n"]
    count: int
    scored: Bool[Tensor, "n"]


@dataclass(frozen=True)
class Quantity:
    """A number to tell."""

    values: Float[Tensor, "n"]


@dataclass(frozen=True)
class Told:
    """How well a probe tells its target, and how well the best constant answer does; ``gain`` is the difference.

    ``penalties`` are those of the two halves, in units of ``PENALTIES``.
    """

    probe: Estimate
    baseline: Estimate
    gain: Estimate
    penalties: tuple[float, float]


@dataclass(frozen=True)
class _Moments:
    """Sums over some rows: their number, the rows, the targets, and products of rows with rows and with targets."""

    n: float
    x_D: Tensor
    y_C: Tensor
    xx_DD: Tensor
    xy_DC: Tensor

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(
            self.n + other.n,
            self.x_D + other.x_D,
            self.y_C + other.y_C,
            self.xx_DD + other.xx_DD,
            self.xy_DC + other.xy_DC,
        )

    def about(self, x_D: Tensor, y_C: Tensor) -> tuple[Tensor, Tensor]:
        """Products of what is left of rows and targets after taking ``x_D`` and ``y_C`` away."""
        cross = torch.outer(self.x_D, x_D)
        xx_DD = self.xx_DD - cross - cross.T + self.n * torch.outer(x_D, x_D)
        xy_DC = self.xy_DC - torch.outer(self.x_D, y_C) - torch.outer(x_D, self.y_C) + self.n * torch.outer(x_D, y_C)
        return xx_DD, xy_DC


@dataclass(frozen=True)
class _Fit:
    """Ridge regression for every penalty at once: coefficients in the axes of the rows' own scatter."""

    x_D: Tensor
    y_C: Tensor
    axes_DD: Tensor
    spread_D: Tensor
    xy_DC: Tensor
    unit: float

    @classmethod
    def of(cls, moments: _Moments, size: float) -> _Fit:
        x_D, y_C = moments.x_D / moments.n, moments.y_C / moments.n
        xx_DD, xy_DC = moments.about(x_D, y_C)
        spread_D, axes_DD = torch.linalg.eigh(xx_DD)
        spread_D = spread_D.clamp_min(0)
        unit = float(spread_D.mean())
        # Rows that are all alike leave rounding alone, which must not be taken for a signal.
        if unit <= LEAST_SPREAD * moments.n * size:
            unit = 0.0
        return cls(x_D, y_C, axes_DD, spread_D, axes_DD.T @ xy_DC, unit)

    def weights(self, penalty: float) -> Tensor:
        """Coefficients in the axes of the scatter."""
        if self.unit == 0.0:
            return torch.zeros_like(self.xy_DC)
        return self.xy_DC / (self.spread_D + penalty * self.unit)[:, None]

    def errors(self, on: _Moments) -> Float[Tensor, "p c"]:
        """For each penalty, the squared error of each target over other rows, less a part that no penalty changes."""
        xx_DD, xy_DC = on.about(self.x_D, self.y_C)
        xx_DD, xy_DC = self.axes_DD.T @ xx_DD @ self.axes_DD, self.axes_DD.T @ xy_DC
        found = []
        for penalty in PENALTIES:
            w_DC = self.weights(penalty)
            found.append((w_DC * (xx_DD @ w_DC - 2 * xy_DC)).sum(dim=0))
        return torch.stack(found)


def tell(
    x: Float[Tensor, "n d"], sequences: Int64[Tensor, "n"], targets: Mapping[str, Classes | Quantity]
) -> dict[str, Told | Exception]:
    """How well each target can be told from the rows by a linear probe; an exception where that has no answer.

    Classes: the share of scored rows whose class is told, against always naming the class that is the most frequent in
    the half that is fitted. A quantity: R² about the mean of the half that is fitted, whose constant answer has 0.
    Error bars are over sequences, with the two probes as fitted.
    """
    sequences = sequences.to(x.device)
    quarter = _quarters(x, sequences)
    y_NC, columns = _columns(targets, len(x), x.device)
    x_ND = x.double()
    x_ND = x_ND - x_ND.mean(dim=0)
    size = float(x.double().square().mean())
    quarters = [_moments(x_ND[quarter == number], y_NC[quarter == number]) for number in range(QUARTERS)]
    answers = torch.empty_like(y_NC)
    constant = torch.empty_like(y_NC)
    penalties: dict[str, list[float]] = {name: [] for name in targets}
    for half in (0, 1):
        # Quarters 0 and 2 make the first half, 1 and 3 the second.
        first, second = quarters[half], quarters[half + 2]
        error_PC = _Fit.of(first, size).errors(second) + _Fit.of(second, size).errors(first)
        fit = _Fit.of(first + second, size)
        rest = quarter % 2 != half
        left = x_ND[rest] - fit.x_D
        for name, at in columns.items():
            penalty = PENALTIES[int(error_PC[:, at].sum(dim=1).argmin())]
            penalties[name].append(penalty)
            answers[rest, at] = left @ (fit.axes_DD @ fit.weights(penalty)[:, at]) + fit.y_C[at]
        constant[rest] = fit.y_C
    number = sequences.unique(return_inverse=True)[1]
    found: dict[str, Told | Exception] = {}
    for name, target in targets.items():
        at, pair = columns[name], (penalties[name][0], penalties[name][1])
        try:
            score = _score_classes if isinstance(target, Classes) else _score_quantity
            found[name] = score(target, answers[:, at], constant[:, at], number, pair)  # type: ignore[arg-type]
        except EmptyInputError as error:
            found[name] = error
    return found


def ratio_over_sequences(
    above: Float[Tensor, "n"], below: Float[Tensor, "n"], sequences: Int64[Tensor, "n"], method: str
) -> Estimate:
    """A ratio of two sums over rows, such as right answers over answers; its error bar is over sequences."""
    count = int(sequences.max()) + 1
    zero = torch.zeros(count, dtype=torch.float64, device=above.device)
    tops, bottoms = zero.index_add(0, sequences, above), zero.index_add(0, sequences, below)
    value = float(tops.sum() / bottoms.sum())
    n, used = int((below != 0).sum()), int((bottoms != 0).sum())
    if used < SEQUENCES_FOR_BAR:
        note = f"no error bar: {used} sequences, {SEQUENCES_FOR_BAR} are needed"
        return Estimate(value=value, stderr=None, n=n, method=method, notes=(note,))
    left = tops - value * bottoms
    stderr = math.sqrt(float(left.square().sum()) * used / (used - 1)) / float(bottoms.sum())
    if stderr == 0:
        note = "no error bar: the same in every sequence"
        return Estimate(value=value, stderr=None, n=n, method=method, notes=(note,))
    return Estimate(value=value, stderr=stderr, n=n, method=method, over="sequences", dof=used - 1)


def _quarters(x: Tensor, sequences: Tensor) -> Int64[Tensor, "n"]:
    """The quarter of each row: sequences are dealt in turn, in the order of their numbers."""
    if len(x) != len(sequences):
        raise ShapeError(f"{len(x):,} rows, and the sequences of {len(sequences):,}")
    finite = torch.isfinite(x).all(dim=1)
    if not bool(finite.all()):
        raise NonFiniteError(f"NaN or infinity in {name_rows((~finite).nonzero()[:, 0].tolist())} of the probed rows")
    different = sequences.unique()
    if len(different) < QUARTERS:
        raise TooFewRowsError(
            f"a linear probe is fitted and scored on different sequences, {QUARTERS} of them at least; "
            f"got {len(different)}: look at more held-out windows"
        )
    return torch.searchsorted(different, sequences) % QUARTERS


def _columns(
    targets: Mapping[str, Classes | Quantity], rows: int, device: torch.device
) -> tuple[Float[Tensor, "n c"], dict[str, slice]]:
    """All targets side by side, a class a column, and where each stands."""
    parts, places, before = [], {}, 0
    for name, target in targets.items():
        values = target.labels if isinstance(target, Classes) else target.values
        if len(values) != rows:
            raise ShapeError(f"{name}: {len(values):,} labels for {rows:,} rows")
        if isinstance(target, Classes):
            part = (values[:, None] == torch.arange(target.count, device=values.device)).double()
        else:
            part = values.double()[:, None]
        parts.append(part.to(device))
        places[name] = slice(before, before + part.shape[1])
        before += part.shape[1]
    if not parts:
        raise EmptyInputError("a probe needs something to tell: no target was given")
    return torch.cat(parts, dim=1), places


def _moments(x_ND: Tensor, y_NC: Tensor) -> _Moments:
    return _Moments(float(len(x_ND)), x_ND.sum(dim=0), y_NC.sum(dim=0), x_ND.T @ x_ND, x_ND.T @ y_NC)


def _score_classes(
    target: Classes, answers: Tensor, constant: Tensor, sequences: Tensor, penalties: tuple[float, float]
) -> Told:
    scored = (target.scored & (target.labels >= 0)).to(answers.device)
    if not bool(scored.any()):
        raise EmptyInputError("no row has one of the classes that are scored")
    labels = target.labels.to(answers.device)
    right = [((one.argmax(dim=1) == labels) & scored).double() for one in (answers, constant)]
    alike = int(labels[scored].unique().numel()) == 1
    notes = ("constant label: every scored row has the same one, so there is nothing to tell",) if alike else ()
    what = ("share of rows told", "share of rows told by the most frequent class", "probe less baseline")
    return _told(right[0], right[1], scored.double(), sequences, what, notes, penalties)


def _score_quantity(
    target: Quantity, answers: Tensor, constant: Tensor, sequences: Tensor, penalties: tuple[float, float]
) -> Told:
    values = target.values.double().to(answers.device)
    spread, left = (values - constant[:, 0]).square(), (values - answers[:, 0]).square()
    what = ("R² on the other half", "R² of the mean of the half that is fitted", "probe less baseline")
    if bool((values == values[0]).all()):
        notes = ("constant label: the number is the same in every row, so there is nothing to tell and R² is put at 0",)
        zero = torch.zeros_like(spread)
        return _told(zero, zero, torch.ones_like(spread), sequences, what, notes, penalties)
    return _told(spread - left, torch.zeros_like(spread), spread, sequences, what, (), penalties)


def _told(
    probe: Tensor,
    baseline: Tensor,
    below: Tensor,
    sequences: Tensor,
    what: Sequence[str],
    notes: tuple[str, ...],
    penalties: tuple[float, float],
) -> Told:
    found = [
        ratio_over_sequences(above, below, sequences, words)
        for above, words in zip((probe, baseline, probe - baseline), what)
    ]
    if notes:
        # Without a spread of labels there is no error to speak of, and 0.0 would be a claim.
        found = [
            Estimate(value=one.value, stderr=None, n=one.n, method=one.method, notes=(*notes, "so no error bar"))
            for one in found
        ]
    return Told(found[0], found[1], found[2], penalties)
