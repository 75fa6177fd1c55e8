"""Semi-NMF: rows ``A (N,D) ~ Z C`` with codes ``Z (N,K) >= 0`` and concepts ``C (K,D)`` of any sign.

Block coordinate descent. Given codes, concepts are an exact least-squares solution through the K x K normal equations;
given concepts, codes are improved one column after another, each exactly (HALS). No step can raise the error.

**The error alone says nothing here.** A PCA whose scores are shifted by a constant until they are positive is a
semi-NMF of nearly the least error there is, and has no concepts at all. So a fit never starts from one: it starts from
k-means cells or from random codes, and stops at a relative decrease. Read ``sparsity`` beside ``error`` (such a PCA
has none), and the agreement over seeds (``stability.seminmf_report``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, EmptyInputError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.rows import Rows, as_rows, largest_size, power_of_two_scale
from anisoscope.stats.memory import rows_in_hand
from anisoscope.stats.reservoir import Reservoir
from anisoscope.tangent.descending import MOMENTUM, Limits, Run, descend, descend_few
from anisoscope.tangent.descent import best_concepts, least_squares, reseeded, second_moment, solved
from anisoscope.tangent.kmeans import k_means

BATCH_ROWS = 131_072
"""Rows whose codes are held at once. More rows than this, and files and streams, are taken batch by batch."""

Start = Literal["kmeans", "random"]
STREAM_ROWS = 8192  # rows of a stream coded at a time
START_ROWS, START_STEPS = 8192, 5  # of the k-means to start from: the descent goes on from there
BEGIN_ROWS = 16_384  # rows of a stream that the first concepts are fitted on
BEGIN_ITERATIONS = 20
STREAM_SWEEPS = 60  # a stream forgets its codes, so that each pass must find them from nothing
WARM_SWEEPS = 20  # of the codes that a warm start begins with
STREAM_SETTLED = 1e-4  # until a sweep moves the codes by less than this share of their length


@dataclass(frozen=True)
class SemiNMF:
    """A fit: concepts of unit length, the one with most energy first, and what there is to know about it.

    ``error`` is ``||A - Z C||^2 / ||A||^2``, where A are the rows less ``mean`` if ``centred``, else the rows.
    ``sparsity`` is the share of codes that are exactly zero. ``history`` holds the error after every half step (codes,
    concepts, codes, ...); for a stream, after every pass. ``unused`` concepts are those that no row has a code for.
    ``codes`` are None for a stream: ``encode`` gives them for any rows.
    """

    concepts: Float[Tensor, "k d"]
    codes: Float[Tensor, "n k"] | None
    mean: Float[Tensor, "d"]
    centred: bool
    error: float
    sparsity: float
    history: tuple[float, ...]
    iterations: int
    converged: bool
    unused: int
    n: int
    notes: tuple[str, ...] = ()

    def encode(self, rows: Float[Tensor, "m d"], sweeps: int = STREAM_SWEEPS) -> Float[Tensor, "m k"]:
        """Codes of other rows under these concepts: non-negative least squares, by sweeps until codes settle.

        Concepts that nearly cancel each other need many sweeps.
        """
        wide = rows.double().to(self.concepts.device) - self.mean
        scale = power_of_two_scale(largest_size(wide)) if wide.numel() else 1.0
        concepts = self.concepts.double()
        return solved(wide * scale, concepts, sweeps, 1e-12).T / scale


@dataclass(frozen=True)
class _Plan:
    """What a fit was asked for."""

    rank: int
    centre: bool
    start: Start
    seed: int
    max_iter: int
    tolerance: float
    sweeps: int
    passes: int
    batch_rows: int
    device: torch.device | str | None
    dtype: torch.dtype | None
    momentum: float | None
    coarse: bool

    def check(self) -> None:
        choose("start", self.start, ("kmeans", "random"))
        if isinstance(self.rank, bool) or self.rank < 1:
            raise OptionError(f"rank must be a whole number of at least 1, got {self.rank!r}")
        if min(self.max_iter, self.sweeps, self.passes, self.batch_rows) < 1:
            raise OptionError("max_iter, sweeps, passes and batch_rows must be at least 1")
        if not 0 <= self.tolerance < 1:
            raise OptionError(f"tolerance is a relative decrease between 0 and 1, got {self.tolerance}")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise OptionError(f"momentum is a share of the last change between 0 and 1, got {self.momentum}")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise OptionError(f"products are formed in float32 or float64, not in {self.dtype}")


def fit_seminmf(
    rows: RowsLike | Rows,
    rank: int,
    *,
    mask: MaskLike = None,
    centre: bool = True,
    start: Start = "kmeans",
    seed: int = 0,
    concepts: Float[Tensor, "k d"] | None = None,
    codes: Float[Tensor, "n k"] | None = None,
    max_iter: int = 200,
    tolerance: float = 1e-4,
    sweeps: int = 4,
    passes: int = 10,
    batch_rows: int = BATCH_ROWS,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    momentum: float | None = None,
    coarse: bool = True,
) -> SemiNMF:
    """Fit ``rank`` concepts. ``concepts`` (and ``codes``) of an earlier fit are a warm start.

    ``centre``: take the mean off the rows first, so that concepts say where rows differ and a constant added to all
    rows changes nothing; with False rows are taken as they are, as in the published method, and one concept or more
    goes to their mean. It ends when one iteration lowers the error by less than ``tolerance`` of it; from given
    ``concepts``, for each plain iteration that one with momentum is surely worth. ``dtype`` of the large products:
    float64 for float64 rows, else float32; small matrices are float64 always.

    ``coarse``: 8,192 rows or more (64 times the rank, at least) are descended on an eighth of them first (2,048 and 16
    times the rank, at least), drawn by ``seed``, unless ``concepts`` are given; ``codes`` alone are where that begins.
    Then the codes of all rows are found once, and the descent goes on with all of them: ``history``, ``iterations`` and
    ``max_iter`` are of this second part. ``momentum`` lets codes go on by this share of their last change (to begin
    with) where that lowers the error: fewer iterations, and with 1 an end farther from the cells that concepts started
    as. By default it is 0.5 after a coarse descent and from given ``concepts``, else 0.

    More than ``batch_rows`` rows, files and iterables of chunks are never held: each pass reads them batch by batch,
    keeps ``Z^T Z`` and ``Z^T A`` alone and forgets the codes; at most ``passes`` of them. What can be read only once
    gets one pass, in which concepts follow after every batch.
    """
    plan = _Plan(
        rank, centre, start, seed, max_iter, tolerance, sweeps, passes, batch_rows, device, dtype, momentum, coarse
    )
    plan.check()
    source = as_rows(rows, mask)
    if source.resident:
        held = source.tensor()
        if len(held) <= batch_rows:
            return _fit_held(held, plan, concepts, codes)
        source = as_rows(list(held.split(STREAM_ROWS)))
    if codes is not None:
        raise OptionError(f"codes start at most batch_rows={batch_rows:,} rows held in memory; give concepts alone")
    return _fit_stream(source, plan, concepts)


def _fit_held(held: Tensor, plan: _Plan, concepts: Tensor | None, codes: Tensor | None) -> SemiNMF:
    if len(held) == 0:
        raise EmptyInputError("no row is left to fit")
    scale = power_of_two_scale(largest_size(held))
    mean = _mean(held, scale) if plan.centre else held.new_zeros(held.shape[1], dtype=torch.float64)
    a_ND = _prepared(held, mean, scale, plan)
    size = float(_energy(a_ND))
    # Rounding of the mean leaves something of constant rows behind; it is no spread.
    rounding = 4 * torch.finfo(torch.promote_types(held.dtype, torch.float32)).eps * float(mean.abs().max())
    if size <= a_ND.numel() * rounding**2:
        raise DegenerateError(
            f"all {len(held):,} rows are " + ("equal: less their mean nothing is left" if plan.centre else "zero")
        )
    concepts_KD, codes_KN = _started(a_ND, plan, concepts, codes, scale)
    # An earlier fit has settled once, and is to settle where the plain descent would: beyond, concepts fade.
    limits = Limits(plan.max_iter, plan.tolerance, plan.sweeps, of_plain=concepts is not None)
    few = None
    if plan.coarse and concepts is None:  # an earlier fit is nearer than one of few rows
        few = descend_few(a_ND, concepts_KD, codes_KN, limits, seed=plan.seed)
        concepts_KD, codes_KN = few or (concepts_KD, codes_KN)
    near = few is not None or concepts is not None
    momentum = (MOMENTUM if near else 0.0) if plan.momentum is None else float(plan.momentum)
    run = descend(a_ND, concepts_KD, codes_KN, size, limits, momentum=momentum)
    return _finished(run, a_ND, size, mean, scale, plan)


def _energy(rows: Tensor) -> Tensor:
    """The sum of squares: of each row in its own type, of all rows in float64; nothing of their size is made."""
    return torch.linalg.vector_norm(rows, dim=1).double().square().sum()


def _mean(held: Tensor, scale: float) -> Tensor:
    total = torch.zeros(held.shape[1], dtype=torch.float64, device=held.device)
    first = held[0].double() * scale  # about one of the rows: exact for equal rows, where a mean would be rounded
    for part in held.split(rows_in_hand(STREAM_ROWS, held.shape[1], held.device)):
        total += (part.double() * scale - first).sum(dim=0)
    return first + total / len(held)


def _prepared(held: Tensor, mean: Tensor, scale: float, plan: _Plan) -> Tensor:
    """Rows less the mean, of ordinary size, in the type and on the device of the large products."""
    dtype = plan.dtype or (torch.float64 if held.dtype == torch.float64 else torch.float32)
    if scale == 1 and not plan.centre:
        return held.to(plan.device or held.device, dtype)  # no copy where nothing changes; nothing below writes into it
    out = torch.empty(held.shape, dtype=dtype, device=plan.device or held.device)
    step = rows_in_hand(STREAM_ROWS, held.shape[1], held.device)
    for here, there in zip(held.split(step), out.split(step), strict=True):
        there.copy_(here.double() * scale - mean)
    return out


def _started(
    a_ND: Tensor, plan: _Plan, concepts: Tensor | None, codes: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Concepts and codes to start from, both as ``(K, ...)``; codes alone are followed by concepts, and so on."""
    (n, width), rank = a_ND.shape, plan.rank
    if concepts is not None and tuple(concepts.shape) != (rank, width):
        raise ShapeError(f"concepts to start from have shape {tuple(concepts.shape)}, not {(rank, width)}")
    if codes is not None:
        if tuple(codes.shape) != (n, rank):
            raise ShapeError(f"codes to start from have shape {tuple(codes.shape)}, not {(n, rank)}")
        if bool((codes < 0).any()) or not bool(torch.isfinite(codes).all()):
            raise OptionError("codes to start from must be finite and not negative")
        if concepts is None:
            codes_KN = codes.T.to(a_ND).contiguous()
            return best_concepts(codes_KN, a_ND, a_ND.new_zeros(rank, width, dtype=torch.float64)), codes_KN
    if concepts is not None:
        kept = concepts.to(a_ND.device).double()
        if not bool(torch.isfinite(kept).all()):
            raise OptionError("concepts to start from must be finite")
        if codes is not None:
            return kept, (codes.T.to(a_ND.device).double() * scale).to(a_ND.dtype).contiguous()
        return kept, solved(a_ND, kept, WARM_SWEEPS, STREAM_SETTLED)
    if n < rank:
        raise TooFewRowsError(f"rank {rank} needs at least {rank} rows, got {n}")
    if plan.start == "random":
        generator = torch.Generator().manual_seed(plan.seed)
        codes_KN = torch.rand(n, rank, generator=generator).T.to(a_ND).contiguous()
        return best_concepts(codes_KN, a_ND, a_ND.new_zeros(rank, width, dtype=torch.float64)), codes_KN
    cells = k_means(a_ND, rank, seed=plan.seed, max_iter=START_STEPS, sample_rows=START_ROWS)
    return cells.centres, torch.nn.functional.one_hot(cells.labels, rank).T.to(a_ND.dtype).contiguous()


def _finished(run: Run, a_ND: Tensor, size: float, mean: Tensor, scale: float, plan: _Plan) -> SemiNMF:
    lost = torch.zeros((), dtype=torch.float64, device=a_ND.device)
    small, step = run.concepts.to(a_ND.dtype), rows_in_hand(STREAM_ROWS, a_ND.shape[1], a_ND.device)
    for rows, codes in zip(a_ND.split(step), run.codes.split(step, dim=1), strict=True):
        lost += _energy(torch.addmm(rows, codes.T, small, alpha=-1))
    second = second_moment(run.codes).diagonal()
    concepts, length, order = _ordered(run.concepts, second)
    stretch = (length / scale)[:, None]
    codes = run.codes[order].double() * stretch if scale != 1 else run.codes[order] * stretch.to(run.codes.dtype)
    unused = int((second <= 0).sum())
    return SemiNMF(
        concepts=concepts,
        codes=codes.T.contiguous(),
        mean=mean.to(a_ND.device) / scale,
        centred=plan.centre,
        error=float(lost) / size,
        sparsity=float((run.codes == 0).double().mean()),
        history=run.history,
        iterations=run.iterations,
        converged=run.converged,
        unused=unused,
        n=len(a_ND),
        notes=fit_notes(run.converged, f"max_iter={plan.max_iter}", unused, plan.rank),
    )


@dataclass(frozen=True)
class _Frame:
    """What the rows of a stream are measured from, and some of them to begin with."""

    mean: Tensor
    scale: float
    begin: Tensor


def _parts(source: Rows) -> Iterator[Tensor]:
    return (chunk.rows for chunk in source.chunks(STREAM_ROWS) if len(chunk.rows))


def _frame(parts: Iterator[Tensor], plan: _Plan) -> _Frame:
    """One pass for the mean, the size of the rows and a uniform sample of them."""
    total: Tensor | None = None
    sample, first, largest = None, None, 0.0
    for part in parts:
        if sample is None or first is None or total is None:
            kept = torch.float64 if part.dtype == torch.float64 else torch.float32
            most = min(max(BEGIN_ROWS, 8 * plan.rank), plan.batch_rows)
            sample = Reservoir.empty(most, part.shape[1], seed=plan.seed, dtype=kept, device=part.device)
            first, total, count = part[0].double(), torch.zeros_like(part[0], dtype=torch.float64), 0
        sample = sample.update(part)
        total += (part.double() - first).sum(dim=0)
        count += len(part)
        largest = max(largest, largest_size(part))
    if sample is None or first is None or total is None:
        raise EmptyInputError("no row is left to fit")
    scale = power_of_two_scale(largest)
    mean = (first * scale + total * scale / count) if plan.centre else torch.zeros_like(total)
    return _Frame(mean, scale, sample.rows[sample.stream_order().to(sample.rows.device)])


def _fit_stream(source: Rows, plan: _Plan, concepts: Tensor | None) -> SemiNMF:
    notes: tuple[str, ...] = ()
    parts = _parts(source)
    if source.replayable:
        frame = _frame(parts, plan)
        parts = _parts(source)
    else:
        head = list(islice(parts, -(-max(BEGIN_ROWS, 8 * plan.rank) // STREAM_ROWS)))
        frame = _frame(iter(head), plan)
        parts = chain(head, parts)
        notes = ("one pass over rows that can be read once: each batch is measured before concepts follow it",)
        notes += (f"centred on the mean of the first {len(frame.begin):,} rows",) if plan.centre else ()
    begun = _fit_held(frame.begin, replace(plan, max_iter=min(plan.max_iter, BEGIN_ITERATIONS)), concepts, None)
    sums = _pass(parts, begun.concepts.double(), frame, plan, online=True)
    history, converged = [sums.error], False
    for _ in range(plan.passes - 1 if source.replayable else 0):
        after = _pass(_parts(source), sums.concepts, frame, plan, online=False)
        if after.error > history[-1] * (1 + plan.tolerance) and len(history) > 1:
            converged = True  # codes are solved to a tolerance: where that is all there is to win, nothing is
            break
        converged = len(history) > 1 and history[-1] - after.error <= plan.tolerance * history[-1]
        sums = after
        history.append(after.error)
        if converged:
            break
    second = sums.second.diagonal()
    unused = int((second <= 0).sum())
    settled = converged or not source.replayable
    return SemiNMF(
        concepts=_ordered(sums.concepts, second)[0],
        codes=None,
        mean=frame.mean.to(sums.concepts.device) / frame.scale,
        centred=plan.centre,
        error=sums.error,
        sparsity=sums.zeros / (sums.n * plan.rank),
        history=tuple(history),
        iterations=len(history),
        converged=converged,
        unused=unused,
        n=sums.n,
        notes=(*notes, *fit_notes(settled, f"passes={plan.passes}", unused, plan.rank)),
    )


@dataclass(frozen=True)
class _Sums:
    """What a pass leaves behind: sums over all rows, and the concepts that follow from them."""

    second: Tensor
    concepts: Tensor
    error: float
    zeros: int
    n: int


def _pass(parts: Iterator[Tensor], concepts: Tensor, frame: _Frame, plan: _Plan, *, online: bool) -> _Sums:
    second = torch.zeros(plan.rank, plan.rank, dtype=torch.float64, device=concepts.device)
    pull = torch.zeros_like(concepts)
    size = lost = 0.0
    zeros = n = 0
    for part in parts:
        a_ND = _prepared(part, frame.mean, frame.scale, plan)
        codes = solved(a_ND, concepts, STREAM_SWEEPS, STREAM_SETTLED)
        second += second_moment(codes)
        pull += (codes @ a_ND).double()
        size += float(a_ND.square().sum(dtype=torch.float64))
        zeros, n = zeros + int((codes == 0).sum()), n + len(a_ND)
        if online:
            lost += float((a_ND - codes.T @ concepts.to(a_ND.dtype)).square().sum(dtype=torch.float64))
            concepts = least_squares(second, pull, concepts, a_ND.dtype)
    if size == 0:
        raise DegenerateError(f"all {n:,} rows are " + ("equal" if plan.centre else "zero"))
    if not online:
        concepts = least_squares(second, pull, concepts, a_ND.dtype)
        lost = size - 2 * float((pull * concepts).sum()) + float((second * (concepts @ concepts.T)).sum())
    dead = second.diagonal() <= 0
    if bool(dead.any()):
        renewed = reseeded(a_ND, concepts, codes, dead)
        concepts = concepts if renewed is None else renewed
    return _Sums(second, concepts, max(lost, 0.0) / size, zeros, n)


def _ordered(concepts: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Concepts of unit length by falling energy, their lengths, and the order."""
    length = torch.linalg.vector_norm(concepts, dim=1)
    order = (second * length.square()).argsort(descending=True, stable=True)
    length = length[order]
    return concepts[order] / torch.where(length > 0, length, 1.0)[:, None], length, order


def fit_notes(settled: bool, limit: str, unused: int, rank: int) -> tuple[str, ...]:
    """What a user should know of a fit: that it stopped early, that concepts stand idle."""
    notes = () if settled else (f"stopped at {limit} before the error settled",)
    return (*notes, f"{unused} of {rank} concepts are used by no row") if unused else notes
