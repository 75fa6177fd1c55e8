"""Moments: count, mean, scatter and the two radial moments that unbiased estimates of spectra need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import ShapeError
from anisoscope.kernels import kernels_of, kernels_run, on_its_device, sent
from anisoscope.rows import largest_size, power_of_two_scale
from anisoscope.stats import residues
from anisoscope.stats.memory import scratch
from anisoscope.stats.precision import full_precision, has_tensor_cores, on_tensor_cores, two_parts
from anisoscope.stats.products import served, times_transposed

Precision: TypeAlias = Literal["mixed", "float64"]
"""How products of rows are formed. ``float64`` keeps ten digits and more of every singular value down to 1e-6 of the
largest. ``mixed`` multiplies in float32 and sums chunks in float64: half the time, seven digits of squared quantities
(traces, the largest eigenvalue, the Frobenius norm), and no claim about small singular values. On a GPU wide rows are
multiplied on tensor cores, in parts: six digits."""


BLOCK_ROWS = 4096  # rows multiplied at a time: full speed, and still in cache
SPREAD_CELLS = 1 << 25  # of rows in hand at a time on a GPU, which a step for each block would leave idle
NARROWED_ROWS = 256  # rows looked at together where nothing is multiplied: they stay in cache
PARTED_WIDTH = 2048  # from here on tensor cores win
PARTED_ROWS = 1024  # multiplied at a time there
PARTED_CELLS = 1 << 27  # of products held at a time there, float32
KERNEL_CELLS = 1 << 27  # of rows that one launch multiplies
HALF_CELLS = 1 << 28  # of rows that are written down as halves at a time, a gigabyte of them
ONEDNN_ROWS = 1024  # multiplied at a time by oneDNN
STRIP_COLUMNS = 64  # narrower strips than this no longer run at full speed
SAFE_SIZE = 2.0**64  # rows between this and its inverse: eighth powers, the highest in use, stay far inside float64


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of rows ``x_i``, about their mean ``m``, with ``y_i = x_i - m``.

    ``scatter = sum y y^T``, ``third = sum |y|^2 y``, ``fourth = sum |y|^4``. Each chunk is centred on its own mean
    before anything is multiplied and chunks are combined about the common mean (Chan, Golub, LeVeque), so a mean of
    any size costs no digits. ``merge`` is associative and commutative up to rounding, with ``empty`` as its unit.

    All of it belongs to the rows divided by ``2**exponent``, which changes no digit. That is 0 for rows of ordinary
    size; where fourth powers would leave the range of float64 it is the exponent of the largest of the rows.
    """

    count: int
    mean: Float[Tensor, "d"]
    scatter: Float[Tensor, "d d"]
    third: Float[Tensor, "d"]
    fourth: Float[Tensor, ""]
    exponent: int = 0

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> Moments:
        """The state of no rows."""
        zeros = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(0, zeros, zeros.new_zeros(width, width), zeros, zeros.new_zeros(()))

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], precision: Precision = "float64") -> Moments:
        """The state of one chunk of rows."""
        if rows.ndim != 2:
            raise ShapeError(f"a chunk of rows has two axes, got shape {tuple(rows.shape)}")
        if len(rows) == 0:
            return cls.empty(rows.shape[1], rows.device)
        state, radius2 = cls._summed(rows, precision, 0)
        if precision == "mixed" and not 1e-24 < radius2 < 1e24:
            state, radius2 = cls._summed(rows, "float64", 0)  # products of float32 could over- or underflow
        # Seen from the sums, which costs no read of the rows; only where it shows something are they read again.
        size = max(math.sqrt(radius2), float(torch.linalg.vector_norm(state.mean, math.inf)))
        if 1 / SAFE_SIZE < size < SAFE_SIZE:
            return state
        exponent = -round(math.log2(power_of_two_scale(largest_size(rows))))
        return cls._summed(rows, "float64", exponent)[0] if exponent else state

    @classmethod
    def _summed(cls, rows: Float[Tensor, "n d"], precision: Precision, exponent: int) -> tuple[Moments, float]:
        """The state in units of ``2**exponent``, and the largest squared distance from a rough centre that was met."""
        count, width = rows.shape
        parted = precision == "mixed" and in_parts(width, rows.device)
        blocks = rows.split(_rows_in_parts(width, rows.device) if parted else _rows_in_hand(width, rows.device))
        # One rough centre for all blocks: what it misses of the mean is summed up and taken off at the end.
        if exponent:
            scale = math.ldexp(1.0, -exponent)
            rough = sum((block.double() * scale).sum(dim=0) for block in blocks) / count
        else:
            rough = rows.mean(dim=0, dtype=torch.promote_types(rows.dtype, torch.float32))
        state = cls.empty(width, rows.device)
        missed, scatter, third, fourth = state.mean.clone(), state.scatter, state.third.clone(), state.fourth.clone()
        units = []
        for block in blocks:
            if precision == "float64":
                y_ND = scratch((len(block), width), rows, torch.float64).copy_(block)
                y_ND = (y_ND.mul_(scale) if exponent else y_ND).sub_(rough.double())
            else:
                y_ND = (block.to(rough.dtype) - rough).float()
            radius2 = torch.linalg.vector_norm(y_ND, dim=1).double().square_()
            unit = radius2.max().clamp_min(torch.finfo(torch.float64).tiny)  # float32 overflows at the third power
            units.append(unit)
            scatter += cell_grams(y_ND[None], (len(y_ND),))[0, 0] if parted else _over_blocks(_gram, y_ND)
            missed += _over_blocks(_sum, y_ND)
            third += _over_blocks(_weighted_sum, (radius2 / unit).to(y_ND.dtype), y_ND) * unit
            fourth += radius2 @ radius2
        about_rough = cls(count, rough.double(), scatter, third, fourth, exponent)
        return about_rough._shifted(missed / count), float(torch.stack(units).max())  # a device is asked once

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.mean.shape[0]

    def update(self, rows: Float[Tensor, "n d"], precision: Precision = "float64") -> Moments:
        """The state after these rows too."""
        return self.merge(Moments.of(rows, precision))

    def merge(self, other: Moments) -> Moments:
        """The state of both sets of rows together."""
        if self.width != other.width:
            raise ShapeError(f"cannot merge moments of width {self.width} and {other.width}")
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        if self.exponent != other.exponent:
            # The unit of the larger rows, beside which the smaller vanish; rows of zeros fit into every unit.
            exponent = max((s.exponent for s in (self, other) if not s._is_zero()), default=0)
            return self._in_unit(exponent).merge(other._in_unit(exponent))
        count = self.count + other.count
        gap = other.mean.to(self.mean.device) - self.mean
        mean = self.mean + gap * (other.count / count)
        # One rank-one update instead of moving both scatters to the common mean first: they are the large part.
        scatter = self.scatter + other.scatter.to(self.scatter.device)
        scatter.addr_(gap, gap, alpha=self.count * other.count / count)
        a, b = self._radial(mean), other._radial(mean)
        third, fourth = a[0] + b[0].to(a[0].device), a[1] + b[1].to(a[1].device)
        return Moments(count, mean, scatter, third, fourth, self.exponent)

    def _is_zero(self) -> bool:
        """Whether all rows were zero."""
        return not (bool(self.mean.any()) or bool(self.fourth))

    def _in_unit(self, exponent: int) -> Moments:
        """The same in a unit as large or larger; rows of zeros in any."""
        scale = math.ldexp(1.0, min(self.exponent - exponent, 0))
        square = scale * scale
        return Moments(
            self.count,
            self.mean * scale,
            self.scatter * square,
            self.third * (square * scale),
            self.fourth * (square * square),
            exponent,
        )

    def _radial(self, point: Float[Tensor, "d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, ""]]:
        """``sum |z|^2 z`` and ``sum |z|^4`` with ``z = x - point``, from the sums about the mean."""
        d = self.mean - point.to(self.mean.device)
        trace, sd, d2, n = self.scatter.trace(), self.scatter @ d, d @ d, self.count
        third = self.third + trace * d + 2 * sd + n * d2 * d
        fourth = self.fourth + 4 * (d @ sd) + n * d2 * d2 + 4 * (self.third @ d) + 2 * trace * d2
        return third, fourth

    def _shifted(self, delta: Float[Tensor, "d"]) -> Moments:
        """Undo a wrong centre: sums were taken about a point that misses the true mean by ``delta``.

        Writes into its own scatter, which nobody else holds yet.
        """
        d, n = delta, self.count
        scatter = self.scatter.addr_(d, d, alpha=-n)
        trace, sd, d2 = scatter.trace(), scatter @ d, d @ d
        third = self.third - trace * d - 2 * sd - n * d2 * d
        fourth = self.fourth - 4 * (d @ sd) - n * d2 * d2 - 4 * (third @ d) - 2 * trace * d2
        return Moments(n, self.mean + d, scatter, third, fourth, self.exponent)

    def narrowed(self, columns: Int[Tensor, "k"], rows: Float[Tensor, "n d"]) -> Moments:
        """The state of the same rows cut to some columns: the scatter is there already, radii are summed anew."""
        scale = math.ldexp(1.0, -self.exponent)
        mean = self.mean[columns]
        third, fourth = torch.zeros_like(mean), self.fourth.new_zeros(())
        for block in rows.split(NARROWED_ROWS):
            y_ND = block.index_select(1, columns).double().mul_(scale).sub_(mean)
            radius2 = torch.linalg.vector_norm(y_ND, dim=1).square_()
            third += radius2 @ y_ND
            fourth += radius2 @ radius2
        scatter = self.scatter.index_select(0, columns).index_select(1, columns)
        return Moments(self.count, mean, scatter, third, fourth, self.exponent)

    def covariance(self) -> Float[Tensor, "d d"]:
        """``scatter / (count - 1)``, in the square of the state's unit."""
        return self.scatter / max(self.count - 1, 1)


def _rows_in_hand(width: int, device: torch.device) -> int:
    """Rows that a step is taken for: a block, which stays in a processor's cache, or as many as keep a GPU busy."""
    return BLOCK_ROWS * (1 if device.type == "cpu" else max(1, SPREAD_CELLS // (BLOCK_ROWS * width)))


def _over_blocks(act: Callable[..., Tensor], *tensors: Float[Tensor, "n ..."]) -> Float[Tensor, "..."]:
    """A sum over rows in float64: within each block in their own precision, as ``act`` forms it of one or of many."""
    count = len(tensors[0])
    whole = count - count % BLOCK_ROWS if count > BLOCK_ROWS else 0
    total = act(*(one[whole:] for one in tensors)).double()
    if whole == 0:
        return total
    return total + act(*(one[:whole].unflatten(0, (-1, BLOCK_ROWS)) for one in tensors)).sum(dim=0, dtype=torch.float64)


def _gram(y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d d"]:
    return gram(y, least=PARTED_WIDTH) if y.is_cuda else gram(y)  # strips are more launches, and pay for large products


def _sum(y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    return y.sum(dim=-2)


def _weighted_sum(weights: Float[Tensor, "*b n"], y: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    return weights @ y if y.ndim == 2 else torch.bmm(weights[:, None], y)[:, 0]


def gram(y_ND: Float[Tensor, "*s n d"], *, least: int = 4 * STRIP_COLUMNS) -> Float[Tensor, "*s d d"]:
    """``y^T y`` in the precision of ``y``; from a width of ``least`` on in strips from the diagonal on, so that the
    lower half is a copy of the upper."""
    width = y_ND.shape[-1]
    if width < least:
        return y_ND.mT @ y_ND
    out = y_ND.new_empty((*y_ND.shape[:-2], width, width))
    if y_ND.ndim == 2 and len(y_ND) and served(y_ND):
        return _added_by_onednn(y_ND, out)
    # Of all squares on the diagonal half is multiplied for nothing: more strips where they are still wide.
    strip = -(-width // (8 if y_ND.is_cuda and width >= PARTED_WIDTH else 4))
    for at in range(0, width, strip):
        part = y_ND[..., at : at + strip].mT @ y_ND[..., at:]
        out[..., at : at + strip, at:] = part
        out[..., at:, at : at + strip] = part.mT
    return out


def _added_by_onednn(y_ND: Float[Tensor, "n d"], out: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The same by strips, and some rows at a time: oneDNN adds up all that it is given in one go, and the longer a sum
    the more digits it loses."""
    width, pieces = out.shape[0], [piece.mT.contiguous() for piece in y_ND.split(ONEDNN_ROWS)]
    strip = -(-width // 4)
    for at in range(0, width, strip):
        part = times_transposed(pieces[0][at : at + strip], pieces[0][at:])
        for y_DN in pieces[1:]:
            part += times_transposed(y_DN[at : at + strip], y_DN[at:])
        out[at : at + strip, at:] = part
        out[at:, at : at + strip] = part.T
    return out


def gram_in_parts(y_ND: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """``y^T y`` of float32 rows on tensor cores, float64: two products of parts, one of which serves both sides.

    A few rows are multiplied at a time and added up in float64: tensor cores cut off where others round, and longer
    sums would lose digits.
    """
    count, width = y_ND.shape
    whole = y_ND if count % PARTED_ROWS == 0 else torch.nn.functional.pad(y_ND, (0, 0, 0, -count % PARTED_ROWS))
    rows = whole.reshape(-1, PARTED_ROWS, width)
    high, low = two_parts(rows)
    out = torch.empty(width, width, dtype=torch.float64, device=y_ND.device)
    strip = width if width < 4 * STRIP_COLUMNS else -(-width // 4)
    with full_precision(y_ND.device), on_tensor_cores(y_ND.device.type == "cuda"):
        across = _added_up(high.mT @ low)
        for at in range(0, width, strip):  # as ``gram``: the lower half is a copy of the upper
            part = _added_up(high[:, :, at : at + strip].mT @ high[:, :, at:])
            out[at : at + strip, at:] = part
            out[at:, at : at + strip] = part.T
    return out.add_(across).add_(across.T)


def _added_up(parts: Float[Tensor, "p a b"]) -> Float[Tensor, "a b"]:
    """Their sum in float64, one after another: ``sum`` would copy all of them to float64 first."""
    total = parts[0].double()
    for one in parts[1:]:
        total += one
    return total


def _rows_in_parts(width: int, device: torch.device) -> int:
    """Rows whose products in parts are held at a time: sums in float64 between them cost as much as the products."""
    if _by_kernel(width, device):
        return max(BLOCK_ROWS, KERNEL_CELLS // width)
    return PARTED_ROWS * max(4, PARTED_CELLS // width**2)


def in_parts(width: int, device: torch.device) -> bool:
    """Whether ``grams`` and ``cell_grams`` multiply rows of this width in parts, where they need not be exact."""
    return width >= PARTED_WIDTH and has_tensor_cores(device)


def _by_kernel(width: int, device: torch.device) -> bool:
    """Whether one launch multiplies rows of this width."""
    return width >= PARTED_WIDTH and kernels_run(device)


def grams(rows: Float[Tensor, "s n d"], *, exact: bool = False) -> Float[Tensor, "s d d"]:
    """``y^T y`` of the rows of each site, float64; wide rows on tensor cores as float32 in parts, unless ``exact``.

    Then float32 rows are multiplied as integers, where ``residues.fits``, and all others in float64.
    """
    if _as_integers(rows) if exact else in_parts(rows.shape[2], rows.device):
        return cell_grams(rows.float(), (rows.shape[1],), exact=exact)[:, 0]
    return gram(rows.double(), least=PARTED_WIDTH)  # strips are more launches, and pay where products are large


def _as_integers(rows: Float[Tensor, "s n d"]) -> bool:
    """Whether products of these rows that must be exact are formed of integers."""
    return rows.dtype == torch.float32 and residues.fits(rows.shape[1], rows.shape[2], rows.device)


def cell_grams(
    rows: Float[Tensor, "s n d"],
    ends: Sequence[int],
    out: Float[Tensor, "s c d d"] | None = None,
    *,
    exact: bool = False,
) -> Float[Tensor, "s c d d"]:
    """``y^T y`` of the rows of each site and cell, float64; written to ``out``, where that is given.

    Each cell of rows ends before the row that ``ends`` says, and begins where the one before it ends. Wide rows are
    multiplied in parts, as by ``grams``: all at once where there are kernels. Those of float64 never are, nor any that
    must be ``exact``.
    """
    sites, n, width = rows.shape
    bounds = [0, *ends]
    if any(a > b for a, b in itertools.pairwise(bounds)) or bounds[-1] > n:
        raise ShapeError(f"cells of {n} rows end in order and at {n} at most, got {list(ends)}")
    shape = (sites, len(ends), width, width)
    if out is None:
        out = torch.empty(shape, dtype=torch.float64, device=rows.device)
    elif out.shape != shape or out.dtype != torch.float64 or out.stride()[2:] != (width, 1):
        raise ShapeError(f"products are {shape} of whole float64 matrices, got {tuple(out.shape)} of {out.dtype}")
    if exact and _as_integers(rows):
        return residues.cell_grams(rows, ends, out)
    if exact:
        rows = rows.double()
    if rows.dtype != torch.float64 and _by_kernel(width, rows.device):
        single = rows.float()
        _launched(single if single.stride(2) == 1 else single.contiguous(), bounds, out)
        return out
    narrow = rows.is_cuda and width < PARTED_WIDTH
    if narrow:
        rows = rows.double()  # once for all cells, whose products then go where they belong: a launch for each
    for cell, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = rows[:, a:b]
        if a == b:
            out[:, cell] = 0
        elif narrow:
            torch.bmm(part.mT, part, out=out[:, cell])
        elif rows.dtype != torch.float64 and in_parts(width, rows.device):
            for site, one in enumerate(part):
                out[site, cell] = gram_in_parts(one.float())
        else:
            out[:, cell] = grams(part.double(), exact=True)
    return out


@on_its_device
def _launched(rows: Float[Tensor, "s n d"], bounds: Sequence[int], out: Float[Tensor, "s c d d"]) -> None:
    """All of ``cell_grams`` by the kernels."""
    kernels = kernels_of("grams")
    cut, (sites, cells, width, _) = kernels.tiling(rows.device), out.shape
    tiles = -(-width // cut.columns)
    if out.numel() == 0:
        return
    if cut.kind == "float16":
        step = max(1, HALF_CELLS // max(1, rows[0].numel()))
        for few in (slice(at, at + step) for at in range(0, sites, step)):
            _launched_in_halves(rows[few], bounds, out[few], cut)
        return
    kernels.cell_grams[(sites * cells * (tiles * (tiles + 1) // 2),)](
        rows, sent(bounds, rows, torch.int64), out, width, tiles, cells,
        rows.stride(0), rows.stride(1), out.stride(0), out.stride(1),
        B=cut.columns, K=cut.rows, W=cut.window, PART=kernels.PART,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def _launched_in_halves(
    rows: Float[Tensor, "s n d"], bounds: Sequence[int], out: Float[Tensor, "s c d d"], cut: Any
) -> None:
    """The same from two float16 an entry, which are written down first, the rows of each cell in whole blocks."""
    kernels = kernels_of("grams")
    sites, cells, width, _ = out.shape
    tiles = -(-width // cut.columns)
    places = [
        (at, min(cut.rows, b - at), cell)
        for cell, (a, b) in enumerate(itertools.pairwise(bounds))
        for at in range(a, b, cut.rows)
    ]
    if not places:
        out.zero_()
        return
    held = [0, *itertools.accumulate(-(-(b - a) // cut.rows) * cut.rows for a, b in itertools.pairwise(bounds))]
    blocks, where = (len(places), tiles, sites), sent([*itertools.chain(*places)], rows, torch.int32)
    given = (width, cells, rows.stride(0), rows.stride(1))
    block = {"K": cut.rows, "C": cut.columns, "num_warps": 8}
    sizes = torch.zeros(sites, cells, width, dtype=torch.int32, device=rows.device)
    kernels.column_sizes[blocks](rows, where, sizes, *given, **block)
    # The largest entry of a column comes to 2**14 or more, and below 2**15: float16 ends before 2**16.
    exponent = sizes.view(torch.float32).double().view(torch.int64) >> 52
    units = (exponent.clamp_min(15) - 14 << 52).view(torch.float64)
    halves = torch.empty(2, sites, held[-1], tiles * cut.columns, dtype=torch.float16, device=rows.device)
    kernels.halves_of_rows[blocks](rows, where, units, halves, *given, halves.stride(2), halves.stride(0), **block)
    kernels.half_grams[(sites * cells * (tiles * (tiles + 1) // 2),)](
        halves, sent(held, rows, torch.int64), units, out, width, tiles, cells,
        held[-1], halves.stride(2), halves.stride(0), out.stride(0), out.stride(1),
        B=cut.columns, K=cut.rows, W=cut.window, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
