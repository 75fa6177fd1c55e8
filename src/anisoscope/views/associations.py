"""Does one series go with another? Correlations over the looks of trainings, and over trainings, with honest errors.

Looks of one training are not independent: whatever drifts correlates with whatever drifts. So three readings stand
beside each other. *Levels* is the plain correlation over looks, with the p-value that looks would give were they
independent; it is there to be distrusted. *Changes* correlates the changes from look to look, after the course that
all seeds share (or, of one seed, a smooth course) was taken out of them. *Units* correlates the last looks of
different trainings. docs/quality.md tells how often each is wrong on series that have nothing to do with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from anisoscope.errors import ShapeError, TooFewRowsError

LEVEL = 0.95
TREND = 2
"""Degree of the polynomial that is taken out of the changes of a single training: a cubic course of the levels."""
LEAST_LOOKS = 8
LEAST_UNITS = 4

Array = Float[np.ndarray, "_ _"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """A correlation after Pearson with its 95 % interval and p-value, Spearman's beside it, and over how many of what.

    ``low``, ``high`` and ``p`` are None where one of the two does not vary; ``r`` is 0 then. ``carrier`` is the place
    of the unit that makes the correlation, if one does: without it p is above 5 %.
    """

    r: float
    rank: float
    n: int
    low: float | None
    high: float | None
    p: float | None
    carrier: int | None = None

    @property
    def known(self) -> bool:
        """Whether there was anything to correlate."""
        return self.p is not None


UNVARIED = {"low": None, "high": None, "p": None}


def levels(a: Array, b: Array) -> Association:
    """The correlation over looks as they are, a row a seed, as if every look were independent. It overstates.

    Seeds are put side by side, each about its own mean.
    """
    _check(a, b, LEAST_UNITS)
    u, v = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
    return _independent(u.ravel(), v.ravel(), rows=len(a))


def changes(a: Array, b: Array) -> Association:
    """The correlation of changes from look to look without their common course, a row a seed.

    With several seeds the mean change over seeds goes out at each look, whatever its shape; with one, a polynomial of
    degree ``TREND``. The error is that of the mean product over looks, which need not be equally large: early looks
    move more. Where changes of both series repeat or undo each other it grows by Bartlett's factor of lag one.
    """
    _check(a, b, LEAST_LOOKS)
    u, v = (without_course(np.diff(x, axis=1)) for x in (a, b))
    looks = u.shape[1]
    dof = looks - 1 - (1 if len(a) > 1 else TREND + 1)
    size = math.sqrt(float((u * u).sum() * (v * v).sum()))
    if _still(u, np.diff(a, axis=1)) or _still(v, np.diff(b, axis=1)):
        return Association(r=0.0, rank=0.0, n=looks, **UNVARIED)
    product = (u * v).sum(axis=0) / size
    r = float(np.clip(product.sum(), -1.0, 1.0))
    alike = 1 + 2 * max(0.0, _repeat(u) * _repeat(v))
    spread = float(((product - product.mean()) ** 2).sum()) * looks / (dof + 1) * alike
    return _judged(r, _ranks_agree(u.ravel(), v.ravel()), looks, math.sqrt(spread), dof)


def units(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> Association:
    """The correlation over independent units, with Fisher's interval and Student's p-value.

    Few units are seldom normal: one that is far from all others in both numbers gives r near 1 and a tiny p whatever
    the others do. So each is left out once, and the one without which p is highest, and above 5 %, is its ``carrier``.
    """
    _check(a[None], b[None], LEAST_UNITS)
    whole = _independent(a, b, rows=1)
    if whole.p is None or whole.p > 1 - LEVEL:
        return whole
    others = [_independent(np.delete(a, i), np.delete(b, i), rows=1).p for i in range(len(a))]
    ps = [1.0 if p is None else p for p in others]
    return replace(whole, carrier=int(np.argmax(ps)) if max(ps) > 1 - LEVEL else None)


def within(
    a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"], groups: Sequence[str], seeds: Sequence[object]
) -> Association | None:
    """The correlation over seeds of what a seed adds to the mean of its group; None below ``LEAST_UNITS`` seeds.

    A seed is one unit however many groups it was used in, as the mean over them: the same seed gives the same order of
    the text and often the same first weights, so its trainings are not independent.
    """
    several = {name for name in groups if list(groups).count(name) > 1}
    keep = [i for i, name in enumerate(groups) if name in several]
    names = list(dict.fromkeys(seeds[i] for i in keep))
    if len(names) < LEAST_UNITS:
        return None
    left = []
    for values in (a, b):
        means = {name: values[[i for i in keep if groups[i] == name]].mean() for name in several}
        added = {i: values[i] - means[groups[i]] for i in keep}
        left.append(np.array([np.mean([added[i] for i in keep if seeds[i] == seed]) for seed in names]))
    return units(left[0], left[1])


def adjusted(ps: Sequence[float]) -> list[float]:
    """p-values after Benjamini and Hochberg over all of them: ``min over j >= i of m p_(j) / j``, at most 1.

    By hand: scipy.stats has it, and takes half a second to import.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__, reverse=True)
    found, least = [1.0] * len(ps), 1.0
    for place, at in enumerate(order):
        least = min(least, ps[at] * (len(ps) / (len(ps) - place)))
        found[at] = least
    return found


def _check(a: Array, b: Array, least: int) -> None:
    if a.shape != b.shape:
        raise ShapeError(f"series of shapes {a.shape} and {b.shape} do not go together")
    if a.shape[1] < least:
        raise TooFewRowsError(f"a correlation here needs {least} points, got {a.shape[1]}")


def without_course(x: Array) -> Array:
    """Changes, a row a seed, without the mean over seeds at each look; of one seed without a smooth course."""
    if len(x) > 1:
        return x - x.mean(axis=0)
    at = np.linspace(-1.0, 1.0, x.shape[1])
    basis = np.linalg.qr(np.vander(at, TREND + 1))[0]
    return x - (x @ basis) @ basis.T


def _still(left: Array, whole: Array) -> bool:
    """Whether nothing but rounding is left."""
    return bool(np.abs(left).max() <= 1e-9 * np.abs(whole).max())


def _repeat(u: Array) -> float:
    """The correlation of a change with the next one."""
    return float((u[:, 1:] * u[:, :-1]).sum() / (u * u).sum())


def _independent(u: np.ndarray, v: np.ndarray, rows: int) -> Association:
    """Over independent points, after ``rows`` means were taken out."""
    n = len(u)
    x, y = u - u.mean(), v - v.mean()
    dof = n - rows - 1
    flat = min(np.abs(x).max() - 1e-12 * np.abs(u).max(), np.abs(y).max() - 1e-12 * np.abs(v).max()) <= 0
    if flat or dof < 1:
        return Association(r=0.0, rank=0.0, n=n, **UNVARIED)
    r = float(np.clip((x * y).sum() / math.sqrt(float((x * x).sum() * (y * y).sum())), -1.0, 1.0))
    from scipy.special import ndtri, stdtr

    t = r * math.sqrt(dof / max(1e-300, 1 - r * r))
    p = float(2 * stdtr(dof, -abs(t)))
    # Fisher: atanh(r) is about normal with variance 1 / (n - 3), where n counts what the means have left.
    z, half = math.atanh(min(max(r, -1 + 1e-15), 1 - 1e-15)), float(ndtri(0.5 + LEVEL / 2)) / math.sqrt(max(1, dof - 1))
    low, high = math.tanh(z - half), math.tanh(z + half)
    return Association(r=r, rank=_ranks_agree(u, v), n=n, low=low, high=high, p=p)


def _judged(r: float, rank: float, n: int, stderr: float, dof: int) -> Association:
    """p and interval from a standard error under no association; the interval is even on Fisher's scale."""
    from scipy.special import stdtr, stdtrit

    if stderr == 0 or abs(r) >= 1 - 1e-12:
        return Association(r=r, rank=rank, n=n, low=r, high=r, p=0.0)
    p = float(2 * stdtr(dof, -abs(r) / stderr))
    z = math.atanh(r)
    # Stretched with the scale, so that the interval holds 0 exactly where p is above 5 %.
    half = float(stdtrit(dof, 0.5 + LEVEL / 2)) * stderr * (z / r if r else 1.0)
    return Association(r=r, rank=rank, n=n, low=math.tanh(z - half), high=math.tanh(z + half), p=p)


def _ranks_agree(u: np.ndarray, v: np.ndarray) -> float:
    """Spearman's correlation; ties share the mean of their ranks."""
    x, y = _ranks(u), _ranks(v)
    size = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size else 0.0


def _ranks(u: np.ndarray) -> np.ndarray:
    """Ranks about their mean."""
    _, at, counts = np.unique(u, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[at.ravel()]
    return np.asarray(ranks - ranks.mean())
