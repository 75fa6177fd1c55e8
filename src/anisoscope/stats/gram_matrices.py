"""Products ``y^T y`` of rows: whole, by site and by cell, in float64 or in parts on tensor cores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import ShapeError
from anisoscope.kernels import kernels_of, kernels_run, on_its_device, sent
from anisoscope.stats import residues
from anisoscope.stats.precision import full_precision, has_tensor_cores, on_tensor_cores, two_parts
from anisoscope.stats.products import served, times_transposed

PARTED_WIDTH = 2048  # from here on tensor cores win
PARTED_ROWS = 1024  # multiplied at a time there
PARTED_CELLS = 1 << 27  # of products held at a time there, float32
KERNEL_CELLS = 1 << 27  # of rows that one launch multiplies
HALF_CELLS = 1 << 28  # of rows that are written down as halves at a time, a gigabyte of them
ONEDNN_ROWS = 1024  # multiplied at a time by oneDNN
STRIP_COLUMNS = 64  # narrower strips than this no longer run at full speed


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


def rows_in_parts(width: int, device: torch.device) -> int:
    """Rows whose products in parts are held at a time: sums in float64 between them cost as much as the products."""
    if _by_kernel(width, device):
        return max(4 * PARTED_ROWS, KERNEL_CELLS // width)
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
