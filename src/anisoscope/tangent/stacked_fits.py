"""Proxies of all sites and halves fitted together: one product, one decomposition, one sweep for all of them.

Only the ordinary case is taken here: rows of ordinary size, a warm start, no concept without rows, no rank lost. What
is not ordinary is flagged, and the caller fits it alone, where everything is cared for. F counts fits, (site, half) in
this order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_run
from anisoscope.measures.cells import CellSums
from anisoscope.measures.later import Answer, answered_later
from anisoscope.measures.leading import orthonormal_columns
from anisoscope.measures.row_kernels import centred, centred_by_cell, column_sums, squared_lengths
from anisoscope.stats.gram_matrices import cell_grams, in_parts
from anisoscope.tangent.descending import MOMENTUM, sure_of
from anisoscope.tangent.seminmf import STREAM_SETTLED, WARM_SWEEPS
from anisoscope.tangent.sweeps import has_kernels, inverses, swept_all
from anisoscope.tangent.visits import Books, HalfSteps, Step, Sums, account, account_plainly, can_visit, warm_codes

MAX_ITER, TOLERANCE, SWEEPS = 200, 1e-4, 4  # as ``fit_seminmf`` has them
ASK_EVERY = 2  # iterations between two questions to the device whether all fits have settled
CHECK_EVERY = 8  # iterations after which the answer is waited for
WIDE_CELLS = 1 << 27  # half a gigabyte or so
SPLIT_COLUMNS = 1024  # codes multiplied at a time: long thin products leave most of a GPU idle
KMEANS_ROUNDS = 8
EPS = torch.finfo(torch.float64).eps
PARTED_RANGE = 1e-6  # of the largest eigenvalue: below it products in parts leave fewer than three digits
CHOLESKY_CONDITION = 1e10  # of a Gram matrix: its root is lost twice, and digits are left


@dataclass(frozen=True)
class Centred:
    """Rows of each fit about their mean, filled up with rows of zeros to one number, and their sums in float64."""

    rows: Float[Tensor, "f n d"]
    counts: Int[Tensor, "f"]
    mean: Float[Tensor, "f d"]
    scatter: Float[Tensor, "f d d"]
    total: Float[Tensor, "f"]

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "s n d"],
        halves: tuple[Int[Tensor, "i"], Int[Tensor, "j"]],
        sums: CellSums | None = None,
    ) -> Centred:
        """The two halves of each site's rows; their ``sums`` are formed where they are not given."""
        sites, _, width = x.shape
        most = max(len(half) for half in halves)
        rows = x.new_empty(sites, 2, most, width)
        for half, at in enumerate(halves):
            rows[:, half, len(at) :] = 0
        if sums is None:
            mean, scatter = _summed(x, halves, rows)
        else:
            mean, scatter = sums.means, sums.scatter
            _centre_by_half(x, sums, rows)
        total = scatter.diagonal(dim1=2, dim2=3).sum(dim=2)
        counts = _counts((len(halves[0]), len(halves[1])), sites, x.device)
        return cls(rows.flatten(0, 1), counts, mean.flatten(0, 1), scatter.flatten(0, 1), total.flatten())

    @functools.cached_property
    def spread(self) -> Bool[Tensor, "f"]:
        """Whether the rows of a fit differ by more than rounding."""
        largest = torch.linalg.vector_norm(self.mean, torch.inf, dim=1)
        rounding = self.rows.shape[2] * (4 * torch.finfo(self.rows.dtype).eps) ** 2
        return self.total > self.counts * largest.square_() * rounding

    @functools.cached_property
    def distance(self) -> Float[Tensor, "f"]:
        """The length of the mean, or next to nothing where it is zero."""
        return torch.linalg.vector_norm(self.mean, dim=1).clamp_min_(torch.finfo(torch.float64).tiny)

    def facts(self, basis: Float[Tensor, "f d k"]) -> dict[str, Float[Tensor, "f"]]:
        """``explained`` and ``mean_share`` of a basis for each fit."""
        held = (self.scatter @ basis).mul_(basis).sum(dim=(1, 2)).div_(self.total)
        inside = torch.linalg.vector_norm(self.mean[:, None] @ basis, dim=(1, 2))
        return {"explained": held.clamp_max_(1.0), "mean_share": inside.div_(self.distance).square_()}


@functools.lru_cache(maxsize=8)
def _counts(halves: tuple[int, int], sites: int, device: torch.device) -> Int[Tensor, "f"]:
    """Rows of each fit; nobody writes into it."""
    return torch.tensor(halves * sites, device=device)  # a plain copy: it is there for any stream when this returns


def _summed(
    x: Float[Tensor, "s n d"], halves: tuple[Int[Tensor, "i"], Int[Tensor, "j"]], rows: Float[Tensor, "s two m d"]
) -> tuple[Float[Tensor, "s two d"], Float[Tensor, "s two d d"]]:
    """Means and scatters of both halves, whose centred rows are written to ``rows``."""
    sites, _, width = x.shape
    mean = x.new_empty(sites, 2, width, dtype=torch.float64)
    scatter = x.new_empty(sites, 2, width, width, dtype=torch.float64)
    step = max(1, WIDE_CELLS // rows[0, 0].numel())  # sites whose rows are held apart, in float64 without kernels
    for half, at in enumerate(halves):
        for first in range(0, sites, step):
            few = slice(first, first + step)
            near = rows[few, half, : len(at)]
            mean[few, half] = _centre(x[few].index_select(1, at), near)
            cell_grams(near, (len(at),), scatter[few, half : half + 1])
    return mean, scatter


def _centre(rows: Float[Tensor, "s n d"], out: Float[Tensor, "s n d"]) -> Float[Tensor, "s d"]:
    """Means of rows, float64; rows less their mean are written to ``out``. Rows of float64 are written over."""
    if rows.dtype == torch.float32 and kernels_run(rows.device):
        mean = column_sums(rows).total / rows.shape[1]
        centred(rows, mean, rows.dtype, out)
        return mean
    wide = rows.double()
    mean = wide.mean(dim=1)
    out.copy_(wide.sub_(mean[:, None]))
    return mean


def _centre_by_half(x: Float[Tensor, "s n d"], sums: CellSums, out: Float[Tensor, "s two m d"]) -> None:
    """Rows of each half less their mean, written to ``out``."""
    cells = sums.cells
    if x.dtype == torch.float32 and x.stride(2) == 1 and kernels_run(x.device):
        centred_by_cell(x, sums.mean, sums.means, cells.number, cells.filled, out.flatten(1, 2))
        return
    step = max(1, WIDE_CELLS // out[0, 0].numel())
    for half, at in enumerate(cells.rows):
        for first in range(0, len(x), step):
            few = slice(first, first + step)
            out[few, half, : len(at)] = x[few].index_select(1, at).double().sub_(sums.means[few, half, None])


@dataclass(frozen=True)
class Fits:
    """Bases of one kind, what is to be told of them, and which of the fits are to be believed."""

    basis: Float[Tensor, "f d k"]
    facts: dict[str, Float[Tensor, "f"]]
    ordinary: Bool[Tensor, "f"]
    state: Float[Tensor, "f k d"] | None = None
    settled: Bool[Tensor, "f"] | None = None


def pca_fits(centred: Centred, rank: int, decomposed: tuple[Tensor, Tensor]) -> Fits:
    """The leading directions, from eigenvalues and eigenvectors of the scatters, largest first."""
    values, vectors = decomposed[0][:, : rank + 1], decomposed[1][:, :, :rank]
    _, n, width = centred.rows.shape
    rounding = max(16 * torch.finfo(centred.rows.dtype).eps ** 2, max(n, width) * EPS)
    if centred.rows.dtype != torch.float64 and in_parts(width, centred.rows.device):
        rounding = max(rounding, PARTED_RANGE)
    basis = with_fixed_signs(vectors)
    error = (1 - values[:, :rank].sum(dim=1) / centred.total).clamp_min(0)
    ordinary = centred.spread & (values[:, rank - 1] > rounding * values[:, 0]) & (centred.counts > width)
    return Fits(basis, {**centred.facts(basis), "error": error}, ordinary)


def with_fixed_signs(basis: Float[Tensor, "f d k"]) -> Float[Tensor, "f d k"]:
    """``spans.with_fixed_sign`` of many."""
    largest = basis.gather(1, basis.abs().argmax(dim=1, keepdim=True))
    return basis * largest.sign()  # zero for columns of zeros alone


def seminmf_fits(centred: Centred, start: Float[Tensor, "f k d"], momentum: float = MOMENTUM) -> Fits:
    """Semi-NMF of every fit from the concepts of an earlier one; each stops where it would have stopped alone, but that
    rounds which are taken back count among the MAX_ITER that there are at most."""
    a, concepts = centred.rows, start
    rank = start.shape[1]
    concepts, codes, books = _descend(a, concepts, centred.total, momentum)
    small = concepts.to(a.dtype)
    lost = squared_lengths(torch.baddbmm(a, codes.transpose(1, 2), small, alpha=-1)).sum(dim=1)
    length = torch.linalg.vector_norm(concepts, dim=2)
    used = torch.linalg.vector_norm(codes, dim=2, dtype=torch.float64)
    order = used.mul_(length).argsort(dim=1, descending=True, stable=True)
    unit = concepts / length.clamp_min_(torch.finfo(torch.float64).tiny)[:, :, None]
    unit = unit.gather(1, order[:, :, None].expand_as(unit))
    basis, full = _spanned(unit)
    on = torch.count_nonzero(codes, dim=(1, 2))  # of rows that are there: those of zeros have codes of zero
    facts = {
        **centred.facts(basis),
        "error": lost / centred.total,
        "sparsity": 1 - on.double() / (centred.counts * rank),
        "iterations": books.iterations,
    }
    return Fits(basis, facts, centred.spread & books.sound & full, unit, ~books.active)


def _spanned(unit: Float[Tensor, "f k d"]) -> tuple[Float[Tensor, "f d k"], Bool[Tensor, "f"]]:
    """``spans.basis_of`` of each fit's concepts, and whether they span as many dimensions as they are."""
    if not has_kernels(unit.device, unit.shape[1]):
        basis, triangle = torch.linalg.qr(unit.mT)
        full = torch.linalg.svdvals(triangle)[:, -1] > 16 * max(unit.shape[1:]) ** 0.5 * EPS
        return with_fixed_signs(basis), full
    # By Cholesky, in products over all fits; a condition that would cost it digits is left to the plain path.
    active = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    basis, sound = orthonormal_columns(unit.mT)
    return with_fixed_signs(basis), sound & inverses(unit @ unit.mT, active, CHOLESKY_CONDITION)[1]


def kmeans_starts(centred: Centred, rank: int, seed: int) -> Float[Tensor, "f k d"]:
    """Concepts to start from where there are none yet: centres of a short k-means from drawn rows, for all fits."""
    rows, device = centred.rows, centred.rows.device
    generator = torch.Generator().manual_seed(seed)
    least = int(centred.counts.min())  # the halves differ by a sequence or so
    at = torch.stack([torch.randperm(least, generator=generator)[:rank] for _ in rows]).to(device)
    centres = rows.gather(1, at[:, :, None].expand(-1, -1, rows.shape[2]))
    there = torch.arange(rows.shape[1], device=device) < centred.counts[:, None]
    for _ in range(KMEANS_ROUNDS):
        near = torch.baddbmm(centres.square().sum(dim=2)[:, None], rows, centres.mT, alpha=-2).argmin(dim=2)
        inside = torch.nn.functional.one_hot(near, rank).to(rows.dtype) * there[:, :, None]
        size = inside.sum(dim=1)[:, :, None]
        centres = torch.where(size > 0, inside.mT @ rows / size.clamp_min(1), centres)
    return centres.double()


@dataclass
class _Watch:
    """Asks whether all fits have settled, hardly ever waiting: those that have are not changed by more iterations."""

    asked: Answer | None = None

    def settled(self, active: Bool[Tensor, "f"], iteration: int) -> bool:
        """Whether they are known to have."""
        wait = iteration % CHECK_EVERY == 0
        if self.asked is not None and (wait or self.asked.there()) and not self._going():
            return True
        if not (wait or (self.asked is None and iteration % ASK_EVERY == 0)):
            return False
        self.asked = answered_later(active.any())
        return (wait or self.asked.there()) and not self._going()

    def _going(self) -> bool:
        """What was asked last, waited for."""
        asked, self.asked = self.asked, None
        assert asked is not None
        return asked.get()


def _descend(
    a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"], size: Float[Tensor, "f"], momentum: float
) -> tuple[Float[Tensor, "f k d"], Float[Tensor, "f k n"], Books]:
    """Concepts, codes and what is told of each fit: the rounds of ``descending``, of all fits at once.

    A round that went too far is not mended on the spot, which would need sums of all rows once more while other fits
    wait: its concepts go back, and in the next round they follow the codes as these were before they went on.
    """
    books = Books.begun(size, momentum)
    take = _descend_by_visits if can_visit(a, concepts.shape[1]) else _descend_plainly
    concepts, codes, last = take(a, concepts, size, books, sure_of(momentum))
    return concepts, torch.where(books.again[:, None, None], last, codes), books


def _descend_plainly(
    a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"], size: Float[Tensor, "f"], books: Books, sure: float
) -> tuple[Float[Tensor, "f k d"], Float[Tensor, "f k n"], Float[Tensor, "f k n"]]:
    """Concepts, codes, and the codes before they went on; the books are brought up to date."""
    codes = last = _warm_codes(a, concepts)
    gram, watch = concepts @ concepts.mT, _Watch()
    for iteration in range(1, MAX_ITER + 1):
        cross = concepts.to(a.dtype) @ a.mT
        again, ahead = (one[:, None, None] for one in (books.again, torch.where(books.active, books.ahead, 0.0)))
        new = swept_all(torch.where(again, last, codes), cross, gram, SWEEPS, books.active & ~books.again)
        codes = torch.where(ahead > 0, torch.lerp(last, new, (1 + ahead).to(a.dtype)).clamp_min_(0), new)
        met, last = (cross * new).sum(dim=(1, 2), dtype=torch.float64), new
        sums = Sums((codes @ a).double(), second_moments(codes), second_moments(new), met)
        fresh, good = _least_squares(sums.second, sums.pull, concepts, a.dtype)
        step = Step(concepts, gram, fresh, fresh @ fresh.mT, good)
        account_plainly(sums, step, size, books, TOLERANCE, sure)
        concepts, gram = step.fresh, step.fresh_gram
        if watch.settled(books.active, iteration):
            break
    return concepts, codes, last


def _descend_by_visits(
    a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"], size: Float[Tensor, "f"], books: Books, sure: float
) -> tuple[Float[Tensor, "f k d"], Float[Tensor, "f k n"], Float[Tensor, "f k n"]]:
    """The same with a few launches for each iteration; what is not active has an inverse of zero and does not move."""
    limit = 1 / (concepts.shape[1] * torch.finfo(a.dtype).eps)
    codes = warm_codes(a, concepts, WARM_SWEEPS, STREAM_SETTLED)
    steps, last = HalfSteps.of(a, concepts.shape[1]), torch.empty_like(codes)
    gram, watch = concepts @ concepts.mT, _Watch()
    for iteration in range(1, MAX_ITER + 1):
        sums = steps.take(codes, last, concepts, gram, books, SWEEPS)
        inverse, good = inverses(sums.second, books.active, limit)
        fresh = torch.baddbmm(concepts, inverse, torch.baddbmm(sums.pull, sums.second, concepts, alpha=-1))
        step = Step(concepts, gram, fresh, fresh @ fresh.mT, good)
        account(sums, step, size, books, TOLERANCE, sure)
        concepts, gram = step.fresh, step.fresh_gram
        if watch.settled(books.active, iteration):
            break
    return concepts, codes, last


def _warm_codes(a: Float[Tensor, "f n d"], concepts: Float[Tensor, "f k d"]) -> Float[Tensor, "f k n"]:
    """``descent.solved`` of all fits."""
    cross = concepts.to(a.dtype) @ a.transpose(1, 2)
    gram = concepts @ concepts.transpose(1, 2)
    rank = gram.shape[1]
    free = torch.linalg.pinv(gram, rtol=rank * torch.finfo(a.dtype).eps, hermitian=True).to(a.dtype)
    codes = (free @ cross).clamp_min_(0)
    gain = 2 * (codes * cross).sum(dim=1) - (codes * (gram.to(a.dtype) @ codes)).sum(dim=1)
    codes = codes * (gain > 0)[:, None]
    active = torch.ones(len(a), dtype=torch.bool, device=a.device)
    for sweep in range(WARM_SWEEPS):
        new = swept_all(codes, cross, gram, 1, active)
        sizes = torch.linalg.vector_norm(torch.stack([new - codes, new]), dim=(2, 3))
        codes, active = new, active & (sizes[0] > STREAM_SETTLED * sizes[1])
        if sweep % CHECK_EVERY == CHECK_EVERY - 1 and not bool(active.any()):
            break
    return codes


def second_moments(codes: Float[Tensor, "f k n"]) -> Float[Tensor, "f k k"]:
    """``Z^T Z`` of each fit in float64."""
    fits, rank, n = codes.shape
    parts = -(-n // SPLIT_COLUMNS)
    if n % SPLIT_COLUMNS:
        codes = torch.nn.functional.pad(codes, (0, parts * SPLIT_COLUMNS - n))
    wide = codes.view(fits, rank, parts, SPLIT_COLUMNS).transpose(1, 2).flatten(0, 1).double()
    return (wide @ wide.transpose(1, 2)).view(fits, parts, rank, rank).sum(dim=1)


def _least_squares(
    second: Float[Tensor, "f k k"], pull: Float[Tensor, "f k d"], before: Float[Tensor, "f k d"], dtype: torch.dtype
) -> tuple[Float[Tensor, "f k d"], Bool[Tensor, "f"]]:
    """``descent.least_squares`` where no direction is lost to rounding, and whether that is so."""
    size = second.diagonal(dim1=1, dim2=2)
    alive = (size > 0).all(dim=1)
    size = torch.where(size > 0, size, 1.0).sqrt()
    scaled = second / size[:, :, None] / size[:, None, :]
    factor, failed = torch.linalg.cholesky_ex(scaled)
    # A library raises an error at a zero on the diagonal, which would end all fits.
    factor = torch.where((failed == 0)[:, None, None], factor, torch.eye(factor.shape[1]).to(factor))
    inverse = torch.cholesky_inverse(factor)
    spread = torch.linalg.vector_norm(scaled, dim=(1, 2)) * torch.linalg.vector_norm(inverse, dim=(1, 2))
    good = alive & (failed == 0) & (spread * second.shape[1] * torch.finfo(dtype).eps < 1)
    step = inverse @ ((pull - second @ before) / size[:, :, None])
    return torch.where(good[:, None, None], before + step / size[:, :, None], before), good
