"""Eigenvalues of the centred covariance, by the cheapest route that keeps the digits a measure needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, TooFewRowsError
from anisoscope.measures.base import Workspace
from anisoscope.measures.leading import leading_spaces
from anisoscope.stats.moments import Moments

LANCZOS_WIDTH = 1536  # wider matrices get their top eigenpairs alone, narrower ones a full decomposition
LANCZOS_VALUES = 8  # the first is wanted, the others bound its bias
GRAM_LIMIT = 5e-13  # eigenvalue ratio below which squaring has cost too many digits of a singular value
SMALL = 1e-11  # and below which, where one is, singular values are taken from rows along their directions,
MOST_SMALL = 4  # if at most one of so many is that small
PAIRS_TOGETHER = 1 << 16  # of eigenvalues, looked at at a time on a CPU: all that is made on the way stays in cache
RESOLVED = 1e-10  # of the largest singular value: what that may be wrong by; less is read as zero there


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the covariance, largest first, with their vectors as columns; both cut to the possible rank.

    There are no vectors where no error bar will be made of them.
    """

    values: Float[Tensor, "r"]
    vectors: Float[Tensor, "d c"]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The total variance."""
        return float(self.values.sum())


@dataclass(frozen=True)
class Top:
    """The few largest eigenvalues, the vector of the first, and the total."""

    values: Float[Tensor, "r"]
    vector: Float[Tensor, "d"]
    total: float

    @property
    def first(self) -> float:
        """The largest eigenvalue."""
        return float(self.values[0])

    def first_bias(self, dof: int) -> float:
        """Lawley's small-sample bias of the largest eigenvalue, from above.

        ``(l_1 / m) sum_j l_j / (l_1 - l_j)``; eigenvalues that were not computed are no larger than the last that was.
        """
        others = self.values[1:]
        if len(others) == 0:
            return 0.0
        rest = max(self.total - float(self.values.sum()), 0.0)
        gaps = (self.first - others).clamp_min(1e-300)
        return self.first / dof * (float((others / gaps).sum()) + rest / float(gaps[-1]))


def require_spread(work: Workspace, at_least: int = 2) -> None:
    """Refuse rows that are too few or all alike."""
    moments = work.moments
    if moments.count < at_least:
        raise TooFewRowsError(f"a spread needs at least {at_least} rows, got {moments.count}")
    rounding = 4 * torch.finfo(torch.float64).eps * float(moments.mean.abs().max())
    if float(moments.scatter.trace()) <= moments.count * moments.width * rounding**2:
        raise DegenerateError(f"all {moments.count:,} rows are equal: they have no spread to measure")


def top(work: Workspace) -> Top:
    """The leading eigenpair of the covariance, by the same route whatever else is computed, so that bits agree."""
    if "top" not in work.cache:
        work.cache["top"] = _top(work)
    found: Top = work.cache["top"]
    return found


def _top(work: Workspace) -> Top:
    moments = work.moments
    covariance = moments.covariance()
    total = float(covariance.trace())
    width = moments.width
    if width > LANCZOS_WIDTH and covariance.device.type == "cpu":
        from scipy.sparse.linalg import ArpackNoConvergence, eigsh

        start = np.random.default_rng(0).standard_normal(width)  # its own start vector: same bits every time
        try:
            values, vectors = eigsh(covariance.numpy(), k=LANCZOS_VALUES, which="LA", v0=start)
            lead = torch.from_numpy(values[::-1].copy())
            return Top(lead, torch.from_numpy(vectors[:, -1].copy()), total)
        except ArpackNoConvergence:
            pass
    if width > LANCZOS_WIDTH and covariance.device.type != "cpu":
        found = leading_spaces(covariance[None], LANCZOS_VALUES)
        if bool(found.settled):
            return Top(found.values[0, :LANCZOS_VALUES], found.vectors[0, :, 0], total)
    every, columns = _decomposed(work, vectors=work.error_rows.enough)
    lead = columns[:, -1] if columns.shape[1] else every.new_zeros(width)
    return Top(every.flip(0).clamp_min(0), lead, total)


def _decomposed(work: Workspace, *, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of the covariance: the dear step, taken once for all measures.

    Vectors serve error bars; where there will be none, eigenvalues alone cost a third (and the matrix is empty).
    """
    key = "eigh" if vectors else "eigvalsh"
    if key not in work.cache:
        covariance = work.moments.covariance()
        solve = torch.linalg.eigh if vectors else lambda matrix: (torch.linalg.eigvalsh(matrix), matrix[:, :0])
        work.cache[key] = tuple(solve(covariance))
    found: tuple[Tensor, Tensor] = work.cache[key]
    return found


def spectrum(work: Workspace) -> Spectrum:
    """The whole spectrum, good to 1e-6 of the sum of singular values even where they span six decades.

    Eigenvalues of the float64 scatter are enough while the smallest is above ``GRAM_LIMIT`` of the largest. Below that
    the square has eaten the digits of small singular values. If the rows lie in memory these are taken from a QR
    factorisation of the centred rows instead, of those along the directions that are small where these are few; from a
    stream they are read as zero below the rounding floor, with a note.
    """
    if "spectrum" not in work.cache:
        work.cache["spectrum"] = _spectrum(work)
    found: Spectrum = work.cache["spectrum"]
    return found


def _spectrum(work: Workspace) -> Spectrum:
    moments = work.moments
    n, width = moments.count, moments.width
    rank = min(n - 1, width)
    rows = work.all_rows
    if rows is not None and n <= width:
        return _spectrum_of_few(rows, moments, rank)
    values, vectors = _decomposed(work, vectors=work.error_rows.enough)
    values, vectors = values.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
    floor = float(values[0]) * width * torch.finfo(torch.float64).eps
    if float(values[-1]) > float(values[0]) * GRAM_LIMIT:
        return Spectrum(values, vectors)
    if rows is not None:
        small = int((values < values[0] * SMALL).sum())
        if vectors.shape[1] == width and MOST_SMALL * small <= width:
            return _small_again(rows, moments, values, vectors, small)
        return _from_singular(_triangle(rows, moments.mean), n, rank)
    lost = int((values < floor).sum())
    note = f"{lost:,} singular values lie below the rounding floor of one pass and are read as zero"
    return Spectrum(torch.where(values < floor, 0.0, values), vectors, (note,) if lost else ())


def _spectrum_of_few(rows: Tensor, moments: Moments, rank: int) -> Spectrum:
    centred = rows.double() - moments.mean
    return _from_singular(centred, len(rows), rank)


def _from_singular(factor: Tensor, n: int, rank: int) -> Spectrum:
    """From a matrix with the same singular values and right vectors as the centred rows."""
    _, sigma, right = torch.linalg.svd(factor, full_matrices=False)
    floor = float(sigma[0]) * max(factor.shape) * torch.finfo(torch.float64).eps
    sigma = torch.where(sigma < floor, 0.0, sigma)[:rank]
    return Spectrum(sigma.square() / (n - 1), right.T[:, :rank].contiguous())


def _small_again(
    rows: Float[Tensor, "n d"], moments: Moments, values: Float[Tensor, "d"], vectors: Float[Tensor, "d d"], small: int
) -> Spectrum:
    """A spectrum whose last so many values are taken anew, from the rows along their own directions.

    These lean towards a large direction by rounding times ``largest / large``, in eigenvalues, which brings in no more
    than rounding times ``sqrt(largest / SMALL)``, in singular values: see ``RESOLVED``.
    """
    own, rest = vectors[:, -small:], len(values) - small
    _, sigma, right = torch.linalg.svd(_triangle(rows, moments.mean, own))
    again = sigma.square() / (moments.count - 1)
    again = torch.where(again < values[0] * RESOLVED**2, 0.0, again)
    values, order = torch.cat([values[:rest], again]).sort(descending=True)  # two near the limit may change places
    return Spectrum(values, torch.cat([vectors[:, :rest], own @ right.T], dim=1)[:, order])


def _triangle(rows: Tensor, mean: Tensor, onto: Tensor | None = None) -> Tensor:
    """R of a QR factorisation of the centred rows, or of what they are along some directions, block after block: as
    good as an SVD, in little space."""
    triangle = mean.new_zeros((0, len(mean) if onto is None else onto.shape[1]))
    for part in rows.split(4 * len(mean)):
        centred = part.double() - mean
        along = centred if onto is None else centred @ onto
        triangle = torch.linalg.qr(torch.cat([triangle, along]), mode="r").R
    return triangle


def trace_bias(
    values: Float[Tensor, "r"],
    slope: Callable[[Tensor], Tensor],
    bend: Callable[[Tensor], Tensor],
    dof: int,
) -> float:
    """Leading small-sample bias of ``sum f(lambda)`` for Gaussian rows; ``slope`` is f', ``bend`` is f''.

    Second-order perturbation: ``(1/2m) sum_ij f'[l_i, l_j] l_i l_j (1 + [i=j])`` with the divided difference of f',
    which stays finite where eigenvalues meet.
    """
    positive = values[values > 0]
    fs = slope(positive)
    count = max(len(positive), 1)
    few = max(PAIRS_TOGETHER // count, 1) if positive.device.type == "cpu" else count
    total = positive.new_zeros(())
    for at, (here, fs_here) in enumerate(zip(positive.split(few), fs.split(few), strict=True)):
        # Each pair once: the divided difference is the same from both sides. Rows meet those that follow them.
        there, fs_there, own = positive[at * few :], fs[at * few :], len(here)
        gap, both = here[:, None] - there, here[:, None] + there
        close = (gap.abs() < 1e-5 * both).nonzero(as_tuple=True)
        gap[close] = 1.0
        divided = (fs_here[:, None] - fs_there).div_(gap)
        divided[close] = bend(both[close] / 2)  # few beside the diagonal, and dear
        total += here @ (divided[:, :own] @ here + 2 * (divided[:, own:] @ there[own:]))
        total += divided.diagonal() @ here.square()
    return float(total) / (2 * dof)
