"""Is the profile over depth a bell? The answer in numbers, with p-values and intervals from the error bars.

Five shapes are fitted to the values of the layers by weighted least squares, weights one over the squared errors: flat,
rising, falling (isotonic), bell (rising, then falling) and U. ``misfit`` is the weighted sum of squares a shape leaves.
A bell is claimed only where a rising AND a falling profile are both rejected in its favour, each at the same level: an
intersection-union test, so the larger of the two p-values is the p-value. The least favourable monotone profile is the
flat one (any step in it leaves fewer layers that could look like a bell by chance), so the null law is drawn from it.

Errors of different layers are taken as independent. Layers measured on the same tokens err together; what they share
cancels in every comparison of layers, so the p-values are then too large rather than too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from anisoscope.errors import NonFiniteError, OptionError, ShapeError, TooFewRowsError

LEVEL = 0.05
Z = 1.96  # standard errors on each side of an interval at that level
FITTING_SHARE = 0.8  # a verdict names a shape only if it explains this share of what a flat profile leaves
# With small errors every real profile has bends that chance does not explain. One that makes the profile a bell or a U
# must also be the main thing that a monotone profile misses, and stand out against the range of the profile.
BEND_OF_MISFIT, BEND_OF_RANGE = 0.5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a profile over layers looks like.

    ``peak`` and the ends of ``peak_interval`` are layer numbers, 0 to ``layers - 1``. ``prominence`` is the peak minus
    the higher of the two ends, in the unit of the values; for the verdict ``U`` both describe the valley (the lower
    end minus the bottom). Both come from the fit of a bell (or U), the prominence with the bias of a maximum over noisy
    layers taken off. ``p_monotone`` is against a monotone profile in favour of a bell, ``p_monotone_valley`` in favour
    of a U. ``p_fit`` is against the shape of the verdict itself: small where a profile departs from it by more than its
    errors, as profiles with small errors often do. ``explained`` is the share of the variation about a flat profile
    that a shape explains, noise taken off.
    """

    verdict: str
    layers: int
    peak: int
    peak_interval: tuple[int, int]
    prominence: float
    prominence_stderr: float
    prominence_interval: tuple[float, float]
    p_flat: float
    p_monotone: float
    p_monotone_valley: float
    p_fit: float
    misfits: Mapping[str, float]
    explained: Mapping[str, float]
    draws: int

    @property
    def rough(self) -> bool:
        """Whether the profile departs from the shape of its verdict by more than the errors explain."""
        return self.p_fit <= LEVEL

    @property
    def peak_share(self) -> float:
        """Position of the peak as a share of depth, 0 at the first layer and 1 at the last."""
        return self.peak / (self.layers - 1)

    @property
    def prominence_in_stderrs(self) -> float:
        """The prominence in units of its standard error."""
        return self.prominence / self.prominence_stderr if self.prominence_stderr else math.inf


def profile_shape(
    values: Sequence[float] | Float[np.ndarray, "n"],
    stderrs: Sequence[float] | Float[np.ndarray, "n"],
    *,
    dof: float | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Shape:
    """Tell a bell, a U, a monotone and a flat profile apart, given the values of the layers and their standard errors.

    ``dof`` is the number of degrees of freedom behind the standard errors (the smallest, where layers differ); None
    takes the errors as known. The same ``seed`` gives the same answer.
    """
    y, s = _checked(values, stderrs, dof, draws)
    rng = np.random.default_rng(seed)
    flat = np.full(len(y), np.average(y, weights=s**-2))
    observed = _misfits(y[None], s[None])
    null = _misfits(*_draw(flat, s, dof, draws, rng))
    p_flat = _p_value(observed["flat"], null["flat"])
    p_bell = _p_against_monotone("bell", observed, null)
    p_valley = _p_against_monotone("U", observed, null)
    misfits = {name: float(q[0]) for name, q in observed.items()}
    explained = _explained(misfits, len(y) - 1)
    bends = {name: _bend(name, sign * y, s, misfits) for name, sign in (("bell", 1.0), ("U", -1.0))}
    bent = [name for name, p in (("bell", p_bell), ("U", p_valley)) if p <= LEVEL and bends[name]]
    verdict = _verdict(p_flat, bent, misfits, explained)
    fitted = next((name for name in ("rising", "falling", "U", "flat") if name in verdict), "bell")
    sign = -1.0 if verdict == "U" else 1.0
    turned = sign * y[None]
    best = _best_bell(turned, s[None])
    fit = _bell_fit(turned[0], s, int(best.split[0]))
    height, peak = float(best.prominence[0]), int(best.peak[0])
    # Intervals: draws from the fitted bell, fitted again. Their spread is the error, their mean excess the bias of a
    # maximum over noisy layers. The fit of a plateau shows about half of that bias, so the lower end allows for twice.
    again = _best_bell(*_draw(fit, s, dof, draws, rng))
    spread = float(again.prominence.std(ddof=1))
    excess = float(again.prominence.mean()) - height
    first, last = np.quantile(again.peak, (LEVEL / 2, 1 - LEVEL / 2))
    return Shape(
        verdict=verdict,
        layers=len(y),
        peak=peak,
        peak_interval=(min(peak, math.floor(first)), max(peak, math.ceil(last))),
        prominence=height - excess,
        prominence_stderr=spread,
        prominence_interval=(height - 2 * max(0.0, excess) - Z * spread, height + Z * spread),
        p_flat=p_flat,
        p_monotone=p_bell,
        p_monotone_valley=p_valley,
        p_fit=_p_value(observed[fitted], null[fitted]),
        misfits=misfits,
        explained=explained,
        draws=draws,
    )


def _checked(
    values: Sequence[float] | Float[np.ndarray, "n"],
    stderrs: Sequence[float] | Float[np.ndarray, "n"],
    dof: float | None,
    draws: int,
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    y, s = np.asarray(values, dtype=np.float64), np.asarray(stderrs, dtype=np.float64)
    if y.ndim != 1 or y.shape != s.shape:
        raise ShapeError(f"a profile needs one standard error for each value, got shapes {y.shape} and {s.shape}")
    if len(y) < 3:
        raise TooFewRowsError(f"a profile of {len(y)} layers has no shape; at least 3 are needed")
    if not (np.isfinite(y).all() and np.isfinite(s).all()):
        raise NonFiniteError("a profile holds NaN or infinity; leave out the layers that could not be measured")
    if (s <= 0).any():
        raise OptionError("standard errors must be above 0; leave out layers without an error bar")
    if dof is not None and not dof > 0:
        raise OptionError(f"dof must be above 0, or None for errors that are known; got {dof}")
    if draws < 100:
        raise OptionError(f"draws must be at least 100 for p-values and intervals of use, got {draws}")
    return y, s


def _draw(
    centre: Float[np.ndarray, "n"], s: Float[np.ndarray, "n"], dof: float | None, draws: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, "b n"], Float[np.ndarray, "b n"]]:
    """Profiles as they would come again: normal errors, and error bars estimated with dof degrees of freedom."""
    y = centre + s * rng.standard_normal((draws, len(s)))
    if dof is None:
        return y, np.broadcast_to(s, y.shape)
    return y, s * np.sqrt(rng.chisquare(dof, y.shape) / dof)


class _Prefixes(NamedTuple):
    """The best rising profiles to the first k values, k = 0 to n: what they leave, where they start and end."""

    misfit: Float[np.ndarray, "b k"]
    first: Float[np.ndarray, "b k"]
    last: Float[np.ndarray, "b k"]


class _Bells(NamedTuple):
    """The best bells: number of layers in the rising part, misfit, position of the peak, prominence.

    A bell that only rises, or only falls, is among those tried; ``rising`` and ``falling`` are the misfits of these.
    """

    split: Int[np.ndarray, "b"]
    misfit: Float[np.ndarray, "b"]
    peak: Int[np.ndarray, "b"]
    prominence: Float[np.ndarray, "b"]
    rising: Float[np.ndarray, "b"]
    falling: Float[np.ndarray, "b"]


def _misfits(y: Float[np.ndarray, "b n"], s: Float[np.ndarray, "b n"]) -> dict[str, Float[np.ndarray, "b"]]:
    """Weighted sum of squares that each shape leaves, for each of b profiles."""
    w = s**-2.0
    mean = (w * y).sum(1) / w.sum(1)
    bell = _best_bell(y, s)
    return {
        "flat": (w * (y - mean[:, None]) ** 2).sum(1),
        "rising": bell.rising,
        "falling": bell.falling,
        "bell": bell.misfit,
        "U": _best_bell(-y, s).misfit,
    }


def _best_bell(y: Float[np.ndarray, "b n"], s: Float[np.ndarray, "b n"]) -> _Bells:
    """The best rising-then-falling profile: every split is tried, rising before it and falling after it."""
    w, b = s**-2.0, len(y)
    # Falling, read from the last layer on, is rising: both at once.
    both = _rising_prefixes(np.concatenate([y, y[:, ::-1]]), np.concatenate([w, w[:, ::-1]]))
    head, tail = _Prefixes(*(part[:b] for part in both)), _Prefixes(*(part[b:, ::-1] for part in both))
    misfit = head.misfit + tail.misfit
    split = misfit.argmin(1)
    rows = np.arange(b)
    left, right = head.last[rows, split], tail.last[rows, split]
    first = np.where(split > 0, head.first[rows, split], right)
    last = np.where(split < y.shape[1], tail.first[rows, split], left)
    ends = np.maximum(first, last)
    return _Bells(
        split=split,
        misfit=misfit[rows, split],
        peak=np.where(left >= right, split - 1, split),
        prominence=np.maximum(left, right) - ends,
        rising=misfit[:, -1],
        falling=misfit[:, 0],
    )


def _bell_fit(y: Float[np.ndarray, "n"], s: Float[np.ndarray, "n"], split: int) -> Float[np.ndarray, "n"]:
    w = s**-2.0
    return np.array(_rising_fit(y[:split], w[:split]) + _rising_fit(y[split:][::-1], w[split:][::-1])[::-1])


def _rising_prefixes(y: Float[np.ndarray, "b n"], w: Float[np.ndarray, "b n"]) -> _Prefixes:
    """Pool adjacent violators on b rows at once.

    Blocks live on a stack. A new value is a block; while it lies below the block before it, the two are pooled. After
    each value the stack is the fit to all values so far. No values: no misfit, and ends of minus infinity.
    """
    b, n = y.shape
    rows, total = np.arange(b), np.zeros(b)
    # Level by level, each row's stack a column; one number says where in memory a block is. At the bottom lies minus
    # infinity, below which nothing falls.
    means, weights = np.empty((n + 1, b)), np.empty((n + 1, b))
    means[0] = -np.inf
    mean, weight, top = means.reshape(-1), weights.reshape(-1), rows.copy()
    out = _Prefixes(np.zeros((n + 1, b)), np.full((n + 1, b), -np.inf), np.full((n + 1, b), -np.inf))
    for k in range(n):
        top += b
        mean[top], weight[top] = y[:, k], w[:, k]
        live, at = rows, top
        while len(live):
            upper, lower = mean.take(at), mean.take(at - b)
            pool = np.flatnonzero(upper < lower)  # rows by number: several times as fast as by a mask
            live, at, upper, lower = live.take(pool), at.take(pool), upper.take(pool), lower.take(pool)
            below = at - b
            wu, wl = weight.take(at), weight.take(below)
            joint = wu + wl
            total[live] += wu * wl / joint * (upper - lower) ** 2
            mean[below], weight[below] = (wu * upper + wl * lower) / joint, joint
            top[live] = at = below
        out.misfit[k + 1], out.first[k + 1], out.last[k + 1] = total, means[1], mean.take(top)
    return _Prefixes(*(part.T for part in out))


def _rising_fit(y: Float[np.ndarray, "n"], w: Float[np.ndarray, "n"]) -> list[float]:
    """The best rising profile to one row of values."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(y.tolist(), w.tolist()):
        size = 1
        while blocks and blocks[-1][0] > value:
            below, its_weight, its_size = blocks.pop()
            value = (value * weight + below * its_weight) / (weight + its_weight)
            weight, size = weight + its_weight, size + its_size
        blocks.append((value, weight, size))
    return [value for value, _, size in blocks for _ in range(size)]


def _p_value(observed: Float[np.ndarray, "1"], null: Float[np.ndarray, "b"]) -> float:
    return (1 + int((null >= observed[0]).sum())) / (len(null) + 1)


def _p_against_monotone(
    shape: str, observed: Mapping[str, Float[np.ndarray, "1"]], null: Mapping[str, Float[np.ndarray, "b"]]
) -> float:
    """The larger p-value of two tests: rising against ``shape``, and falling against ``shape``."""
    return max(
        _p_value(observed[monotone] - observed[shape], null[monotone] - null[shape])
        for monotone in ("rising", "falling")
    )


def _explained(misfits: Mapping[str, float], dof: int) -> dict[str, float]:
    """Share of what a flat profile leaves beyond noise that each shape explains; 0 where it leaves none."""
    excess = {name: max(0.0, misfit - dof) for name, misfit in misfits.items()}
    return {name: 1 - value / excess["flat"] if excess["flat"] else 0.0 for name, value in excess.items()}


def _bend(name: str, y: Float[np.ndarray, "n"], s: Float[np.ndarray, "n"], misfits: Mapping[str, float]) -> bool:
    """Whether the bend of the best bell matters: against what a monotone profile misses, and against the range."""
    monotone = max(0.0, min(misfits["rising"], misfits["falling"]) - (len(y) - 1))
    mended = monotone - max(0.0, misfits[name] - (len(y) - 1))
    height = float(_best_bell(y[None], s[None]).prominence[0])
    return mended >= BEND_OF_MISFIT * monotone and height >= BEND_OF_RANGE * float(np.ptp(y))


def _verdict(p_flat: float, bent: Sequence[str], misfits: Mapping[str, float], explained: Mapping[str, float]) -> str:
    if bent:
        best = min(bent, key=lambda name: misfits[name])
        return best if explained[best] >= FITTING_SHARE else "undecided"
    if p_flat > LEVEL:
        return "flat"
    monotone = min(("rising", "falling"), key=lambda name: misfits[name])
    return f"monotone ({monotone})" if explained[monotone] >= FITTING_SHARE else "undecided"
