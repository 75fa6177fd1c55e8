"""Single visits of all rows on a GPU: the kernels of ``kernels.rows`` behind plain functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device

COLUMNS = 128  # entries of a row that a program takes at a time
DEPTH = 64  # products of rows in half precision take so many columns at a time
SUMMED = 512  # columns of such a product that tensor cores sum, where rows in doubt are looked at again
CUT_OFF = 2.0**-22
"""Of a product's terms, relative: what one of them adds to the error of their sum. Tensor cores add some at a time to
the sum so far. They cut each of these off at 2^-23 of the largest, and so the sum: of two or more terms that is twice
2^-23 for each."""
TOP = 14  # the largest value in half precision is made less than two to this
SHARES = 16  # of a site's rows whose columns are summed apart
MEND_ROWS, MEND_DEPTH = 16, 128
AGAIN_TILE = 4, 64, 32  # rows in doubt, rows that they are measured against, and entries of both, at a time
AGAIN_SHARES = 256  # of a site's rows at most: one site alone keeps a GPU busy
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 64, 128, 64  # of a product within a run; columns are a group
BLOCK_WARPS, BLOCK_STAGES = 4, 3
BLOCK_MEASURED = 4, 128  # rows and columns of differences there


@on_its_device
def copies(
    rows: Float[Tensor, "s n d"], weights: Int[Tensor, "d"]
) -> tuple[Bool[Tensor, "s n"], Bool[Tensor, "s"]]:  # fmt: skip
    """Which rows are copies of earlier ones, and whether two different rows of a site have one code."""
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    codes = torch.empty(sites, n, dtype=torch.int64, device=device)
    options = {"R": kernels.ROWS, "K": COLUMNS, "num_warps": 4}
    kernels.codes_of_rows[(-(-sites * n // kernels.ROWS),)](rows, weights, codes, sites * n, width, **options)
    codes, order = codes.sort(dim=1, stable=True)
    copy, clash = torch.zeros(2, sites, n, dtype=torch.bool, device=device)
    kernels.copies_among[(-(-(n - 1) // kernels.ROWS) or 1, sites)](
        rows, codes, order, copy, clash, n, width, **options
    )
    return copy, clash.any(dim=1)


@dataclass(frozen=True)
class ColumnSums:
    """Of each site: sums of columns, float64, and the least and the largest entry."""

    total: Float[Tensor, "s d"]
    ends: Float[Tensor, "two s p b"]
    """The least and the largest, by part."""

    @property
    def least(self) -> Float[Tensor, "s"]:
        """The least entry."""
        return self.ends[0].amin(dim=(1, 2))

    @property
    def most(self) -> Float[Tensor, "s"]:
        """The largest."""
        return self.ends[1].amax(dim=(1, 2))


@on_its_device
def column_sums(rows: Float[Tensor, "s n d"], weights: Float[Tensor, "s n"] | None = None) -> ColumnSums:
    """Sums of the columns of rows of float32 or less, each times its weight where these are given, in one visit.

    Entries that are not numbers make sums NaN; the least and the largest pass over them.
    """
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    share, blocks = -(-n // SHARES), -(-width // COLUMNS)
    total = torch.empty(sites, SHARES, width, dtype=torch.float64, device=device)
    ends = torch.empty(2, sites, SHARES, blocks, dtype=torch.float32, device=device)
    kernels.column_sums[(blocks, SHARES, sites)](
        rows, rows if weights is None else weights.contiguous(), total, *ends, n, width, share,
        rows.stride(0), rows.stride(1), WEIGHTED=weights is not None, R=kernels.ROWS, K=COLUMNS, num_warps=4,
    )  # fmt: skip
    return ColumnSums(total.sum(dim=1), ends)


@dataclass(frozen=True)
class CentredRows:
    """Rows less a mean, their squared lengths, float64, and the lengths of the rows as they were.

    Rows that were given places may stand in another order than their lengths, and others between them.
    """

    rows: Float[Tensor, "s m d"]
    squares: Float[Tensor, "s n"]
    lengths: Float[Tensor, "s n"]


@on_its_device
def centred(
    rows: Float[Tensor, "s n d"], mean: Float[Tensor, "s d"], dtype: torch.dtype,
    out: Float[Tensor, "s n d"] | None = None,
) -> CentredRows:  # fmt: skip
    """Float32 rows less the mean, rounded to a type after that, in one visit; written to ``out``, where that is given:
    of that type, its rows side by side."""
    if out is None:
        out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    assert out.shape == rows.shape and out.dtype == dtype
    mean = mean.contiguous()
    return _centred(rows, mean, mean, rows, rows, out, placed=False)


@on_its_device
def centred_by_cell(
    rows: Float[Tensor, "s n d"], mean: Float[Tensor, "s d"], means: Float[Tensor, "s c d"], number: Int[Tensor, "n"],
    places: Int[Tensor, "n"], out: Float[Tensor, "s m d"],
) -> CentredRows:  # fmt: skip
    """The same less the mean of each row's cell; ``places`` of ``out`` are written to, which is of any type.

    Squared lengths are those of rows less ``mean``, and stand in the order of the rows as they came.
    """
    return _centred(rows, means.contiguous(), mean.contiguous(), number, places, out, placed=True)


def _centred(
    rows: Tensor, means: Tensor, mean: Tensor, number: Tensor, places: Tensor, out: Tensor, *, placed: bool
) -> CentredRows:
    kernels, (sites, n, width) = kernels_of("rows"), rows.shape
    assert out.stride()[1:] == (width, 1)
    squares, lengths = torch.empty(2, sites, n, dtype=torch.float64, device=rows.device)
    kernels.centre_rows[(-(-n // kernels.ROWS), sites)](
        rows, means, mean, number, places, out, squares, lengths, n, width, means.numel() // mean.numel(),
        rows.stride(0), rows.stride(1), out.stride(0), PLACED=placed, R=kernels.ROWS, K=COLUMNS, num_warps=4,
    )  # fmt: skip
    return CentredRows(out, squares, lengths)


@on_its_device
def row_dots(left: Float[Tensor, "s n d"], right: Float[Tensor, "s n d"]) -> Float[Tensor, "s n"]:
    """``sum_k left right`` of each row, float64, in one visit of both."""
    kernels, (sites, n, width) = kernels_of("rows"), left.shape
    out = torch.empty(sites, n, dtype=torch.float64, device=left.device)
    kernels.row_dots[(-(-sites * n // kernels.ROWS),)](
        left.contiguous(), right.contiguous(), out, sites * n, width, R=kernels.ROWS, K=COLUMNS, num_warps=4
    )
    return out


def taken(rows: Float[Tensor, "s n d"], order: Int[Tensor, "m"]) -> Float[Tensor, "s m d"]:
    """Some rows of each site, in this order."""
    return taken_by_kernel(rows, order)[0] if _can_take(rows) else rows.index_select(1, order)


def taken_and_measured(
    rows: Float[Tensor, "s n d"], order: Int[Tensor, "m"]
) -> tuple[Float[Tensor, "s m d"], Float[Tensor, "s m"]]:  # fmt: skip
    """The same, and their squared lengths, float64."""
    if _can_take(rows):
        return taken_by_kernel(rows, order)
    some = rows.index_select(1, order)
    return some, torch.linalg.vector_norm(some, dim=2).double().square_()


def _can_take(rows: Float[Tensor, "s n d"]) -> bool:
    return rows.dtype == torch.float32 and rows.stride(2) == 1 and kernels_run(rows.device)


@on_its_device
def taken_by_kernel(
    rows: Float[Tensor, "s n d"], order: Int[Tensor, "m"]
) -> tuple[Float[Tensor, "s m d"], Float[Tensor, "s m"]]:  # fmt: skip
    """Both of float32 rows in one visit."""
    kernels, (sites, _, width), m = kernels_of("rows"), rows.shape, len(order)
    out = torch.empty(sites, m, width, dtype=rows.dtype, device=rows.device)
    squares = torch.empty(sites, m, dtype=torch.float64, device=rows.device)
    kernels.take_rows[(-(-m // kernels.ROWS), sites)](
        rows, order, out, squares, m, width, rows.stride(0), rows.stride(1), R=kernels.ROWS, K=COLUMNS, num_warps=4
    )
    return out, squares


@on_its_device
def forms_in_half(
    rows: Float[Tensor, "s m d"], matrices: Float[Tensor, "s d d"], level: Float[Tensor, "s"], size: Float[Tensor, "s"]
) -> Float[Tensor, "s m"]:
    """``x^T (C - l) x`` of each row, float64, with l the level of a site: products in half precision, three digits of
    what entries of ``C - l`` add up to by size.

    ``size`` is as large as any entry of the rows, or half of it. Second moments C are symmetric: half of one does.
    """
    kernels, (sites, m, width), device = kernels_of("forms"), rows.shape, rows.device
    filled = -(-width // kernels.COLUMNS) * kernels.COLUMNS
    # Entries come to less than two to the 15; of a second moment none is larger than the largest on its diagonal.
    own = matrices.diagonal(dim1=1, dim2=2)
    of_rows, of_matrices = _power(size.double(), TOP), _power(torch.maximum(own.amax(dim=1), level), TOP)
    near = torch.empty(sites, m, filled, dtype=torch.float16, device=device)
    kernels.rounded[(-(-m * filled // kernels.CELLS), sites)](
        rows.contiguous(), of_rows.float(), near, m, width, filled, B=kernels.CELLS, num_warps=4
    )
    half = torch.empty(sites, filled, filled, dtype=torch.float16, device=device)
    if filled > width:
        half[:, :, width:], half[:, width:] = 0, 0
    torch.mul(matrices, of_matrices[:, None, None], out=half[:, :width, :width])
    half.triu_()
    there = half.diagonal(dim1=1, dim2=2)[:, :width]
    torch.mul(own - level[:, None], of_matrices[:, None] / 2, out=there)
    out = torch.empty(sites, m, dtype=torch.float32, device=device)
    kernels.row_forms[(-(-m // kernels.ROWS), sites)](
        near, half, out, m, filled, R=kernels.ROWS, C=kernels.COLUMNS, K=kernels.DEPTH, num_warps=8, num_stages=3
    )
    return out * (2 / (of_rows.square() * of_matrices))[:, None]


def _power(largest: Float[Tensor, "s"], top: int) -> Float[Tensor, "s"]:
    """A power of two that brings numbers below two to the ``top``."""
    exponent = torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent
    return torch.ldexp(torch.ones_like(largest), top - exponent)


def squared_lengths(rows: Float[Tensor, "s n d"]) -> Float[Tensor, "s n"]:
    """Of each row, float64; by the kernel where there is one, since ``sum`` would copy all rows to float64 first."""
    if rows.dtype == torch.float32 and kernels_run(rows.device):
        return row_dots(rows, rows)
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64).square_()


@dataclass(frozen=True)
class InHalf:
    """Rows in half precision, filled up to whole groups, and what rounding may have done to them."""

    half: Float[Tensor, "s p e"]
    size: Float[Tensor, "s p"]
    """Their squared lengths, shrunken by what rounding of a product's sum may come to."""
    fine: Float[Tensor, "s p"]
    """The same, less shrunken: for products that are summed ``SUMMED`` columns at a time."""
    lengths: Float[Tensor, "s n"]
    """Their lengths, float64, in the order of the rows."""
    worst: Float[Tensor, "s"]
    """Rounding took no more of a row than this share of its length, and ``floor``."""
    floor: float


@on_its_device
def in_half(
    rows: Float[Tensor, "s n d"], order: Int[Tensor, "n"], mean: Float[Tensor, "s d"], factor: Float[Tensor, "s"],
    padded: int, depth: int,
) -> InHalf:  # fmt: skip
    """Rows in ``order`` about the mean, times a factor, in half precision and filled up with zeros."""
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    half = torch.empty(sites, padded, depth, dtype=torch.float16, device=device)
    size, fine = torch.empty(2, sites, padded, dtype=torch.float32, device=device)
    lengths, lost = torch.empty(2, sites, n, dtype=torch.float64, device=device)
    # Entries too small for whole precision lose 2^-25 at most.
    floor = 1.001 * 2.0**-25 * depth**0.5
    products = depth + 16, min(depth, SUMMED) + 16 + depth // SUMMED
    kernels.in_half[(-(-padded // kernels.ROWS), sites)](
        rows, order, mean.contiguous(), factor.contiguous(), half, size, fine, lengths, lost, n, padded, width, depth,
        *(1 - 2.0**-20 - CUT_OFF * one for one in products), floor, R=kernels.ROWS, K=COLUMNS, num_warps=4,
    )  # fmt: skip
    return InHalf(half, size, fine, lengths, lost.amax(dim=1), floor)


@dataclass(frozen=True)
class Ready(InHalf):
    """The same of shuffled rows."""

    order: Int[Tensor, "n"]
    back: Int[Tensor, "n"]
    """Where each row stands."""
    factor: Float[Tensor, "s"]
    """What rows were multiplied by, beyond ``scale``."""

    @classmethod
    def of(cls, rows: Float[Tensor, "s n d"], scale: float, seed: int = 0) -> Ready:
        """Of rows as they are; ``seed`` shuffles them, which changes no certain result."""
        kernels = kernels_of("nearest")
        (_, n, width), device = rows.shape, rows.device
        padded, depth = -(-n // kernels.TILE) * kernels.TILE, -(-width // DEPTH) * DEPTH
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        order, back = _shuffled(n, seed, device, stream)
        sums = column_sums(rows)
        mean, least, most = sums.total / n, sums.least.double(), sums.most.double()
        # At least as large as any entry once the mean is off.
        largest = torch.maximum(most, -least) + mean.abs().amax(dim=1)
        largest = torch.minimum(largest, most - least) * scale
        factor = _power(largest, TOP)
        made = in_half(rows, order, mean, factor * scale, padded, depth)
        return cls(**vars(made), order=order, back=back, factor=factor)


@functools.lru_cache(maxsize=8)
def _shuffled(n: int, seed: int, device: torch.device, stream: int) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
    """An order of so many rows, and where each of them stands in it; the same at every look.

    Kept for each stream: another one would not wait until they are made.
    """
    order = torch.randperm(n, generator=torch.Generator(device).manual_seed(seed), device=device)
    return order, order.argsort()


@on_its_device
def nearest_within(
    rows: Float[Tensor, "s n d"], ready: Ready, order: Int[Tensor, "s n"], blocks: int, strides: Int[Tensor, "s"],
    lengths: Int[Tensor, "s"], most: int,
) -> Float[Tensor, "s b l two"]:  # fmt: skip
    """Distances to the two nearest rows of the same run, float64.

    Run b of a site is ``lengths`` rows, at most ``most``, from number ``b * strides`` of ``order`` on; places beyond
    the length hold infinity. ``ready`` are all rows in half precision, as they are and in units of one; rows that
    products of these leave in doubt are measured against all of their run.
    """
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    padded, depth = ready.half.shape[1:]
    runs = sites * blocks
    count = 1 << (3 * -(-most // BLOCK_COLUMNS) - 1).bit_length()  # three of each group
    out = torch.empty(sites, blocks, most, 2, dtype=torch.float64, device=device)
    bounds = torch.empty(runs, count, most, dtype=torch.float32, device=device)
    rest = torch.empty(runs, most, dtype=torch.float32, device=device)
    kernels.nearest_within[(-(-most // BLOCK_ROWS), runs)](
        ready.half, ready.size, ready.back, order, strides, lengths, bounds, rest, n, padded, blocks, most, W=depth,
        T=count, R=BLOCK_ROWS, C=BLOCK_COLUMNS, K=BLOCK_DEPTH, num_warps=BLOCK_WARPS, num_stages=BLOCK_STAGES,
    )  # fmt: skip
    tall, broad = BLOCK_MEASURED
    kernels.measure_within[(-(-most // tall), runs)](
        rows, order, strides, lengths, bounds, rest, ready.lengths, ready.worst, ready.factor, out, ready.floor,
        n, blocks, most, width,
        T=count, G=BLOCK_COLUMNS, R=tall, K=broad, C=MEND_ROWS, MEND=MEND_DEPTH, num_warps=4,
    )  # fmt: skip
    return out


_built = set[tuple[torch.device, int, int]]()


def build_again(rows: Float[Tensor, "s n d"], left_out: Bool[Tensor, "s n"]) -> None:
    """Have the kernels of ``nearest_again`` built for rows like these, once in a process.

    A first look builds kernels anyway. That rows are in doubt may show much later, and a training would stand still.
    """
    _, n, width = rows.shape
    if (rows.device, n, width) in _built:
        return
    distances = torch.zeros(1, n, 2, dtype=torch.float64, device=rows.device)
    indices = torch.zeros(1, n, 2, dtype=torch.int64, device=rows.device)
    settled = torch.ones(1, n, dtype=torch.bool, device=rows.device)  # all of them: nothing is looked at
    nearest_again(rows, left_out, indices[0, 0, :1], 1, distances, indices, settled)
    _built.add((rows.device, n, width))


@on_its_device
def nearest_again(
    rows: Float[Tensor, "s n d"], left_out: Bool[Tensor, "s n"] | None, places: Int[Tensor, "m"], most: int,
    distances: Float[Tensor, "m n two"], indices: Int[Tensor, "m n two"], settled: Bool[Tensor, "m n"],
) -> None:  # fmt: skip
    """The two nearest rows of those not ``settled``, of sites ``places``, by differences in float64 with all rows.

    For float32 rows. The first ``most`` of each site are looked at; distances, indices and what is settled are written
    in place. Rows that are ``left_out`` are nobody's neighbours. A row stays in doubt where entries of its site are not
    finite, which makes its distances NaN, and where there are not two others, which leaves them infinite.
    """
    kernels, (sites, n, width), device = kernels_of("rows"), rows.shape, rows.device
    assert rows.dtype == torch.float32 and sites * n > 0
    assert all(one.is_contiguous() for one in (distances, indices, settled))
    # Rows in doubt to the front, in their order, without asking how many there are; the last place is for all others.
    many = most + 1
    rank = (~settled).cumsum(dim=1)
    mine = ~settled & (rank <= most)
    own = torch.full((len(places), many), -1, dtype=torch.int64, device=device)
    own.scatter_(1, torch.where(mine, rank - 1, most), torch.where(mine, torch.arange(n, device=device), -1))
    tall, broad, deep = AGAIN_TILE
    share = -(-n // (broad * AGAIN_SHARES)) * broad
    shares = -(-n // share)
    least = torch.empty(len(places), many, shares, 2, dtype=torch.float64, device=device)
    where = torch.empty(least.shape, dtype=torch.int32, device=device)
    kernels.nearest_again[(-(-many // tall), shares, len(places))](
        rows.contiguous(), places, own, settled if left_out is None else left_out.contiguous(), least, where,
        n, width, many, share, MASKED=left_out is not None, R=tall, C=broad, K=deep, num_warps=4,
    )  # fmt: skip
    kernels.merge_again[(many, len(places))](
        least, where, own, distances, indices, settled, n, many, 2 * shares,
        P=1 << (2 * shares - 1).bit_length(), num_warps=1,
    )  # fmt: skip
