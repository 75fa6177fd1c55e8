"""Nearest neighbours on a GPU by one fused product in half precision that never writes the distances of all pairs.

Half precision proposes, float64 decides, and a proven bound says which rows are certain. With y the rows about their
mean, h their half-precision values and r = |y - h|, for each pair

    |h_i - h_j|^2 >= (1 - g) (|h_i|^2 + |h_j|^2) - 2 h_i . h_j,

where g stands for rounding of the product's sum, since a product of two lengths is at most half the sum of their
squares. So this correction is a factor on the squared lengths and costs nothing. The rounding of rows comes in by the
triangle inequality: with r_j <= c + e |h_j| for all rows of a site, and |h_j| <= |h_i| + |h_i - h_j|,

    |y_i - y_j| >= |h_i - h_j| - r_i - r_j >= (1 - e) |h_i - h_j| - 2 (c + e |h_i|).

Rows are shuffled first and looked at in groups; for each row and group the kernels give the three least bounds, of
which two may be candidates. The least of all of them are measured by differences in float64, and a row is certain where
its k-th distance is not above what the least bound among everything else leaves. The others, of which there are some
where rows lie in heaps far from the mean, are looked at once more: all bounds of a row in a few lists, and from sums of
fewer products, which take a quarter of the allowance g in rows of 2,048. What is left is searched again by
``neighbors_gpu``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device
from anisoscope.kernels.shapes import Shape, fastest
from anisoscope.measures import row_kernels
from anisoscope.measures.found import Found
from anisoscope.measures.row_kernels import DEPTH, Ready

LEAST_ROWS = 2048  # below this one plain product of all pairs is as good
GROUP = 128  # the kernels' tile
MOST_K = 26  # with SPARE the kernels' longest list
SPARE = 6
SHORTEST = 16  # of a list: wide rows have more neighbours within the allowance than narrow ones
AGAIN = 2048  # rows of a site that are looked at once more, without asking whether there are so many
STRIPE_CELLS = 1 << 29  # bounds held at a time, float32: two gigabytes
SHAPES = tuple(Shape(*one) for one in (
    (64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 8, 2), (64, 8, 3), (64, 8, 4), (32, 4, 3), (32, 4, 4), (32, 8, 4),
))  # fmt: skip
"""Of the product; depths divide ``DEPTH``, to multiples of which rows are padded."""
KNOWN = {(9, 0): SHAPES[0]}  # by compute capability: the fastest of nine that were tried on an H200
TRIED_ROWS, TRIED_WIDTH = 16_384, 768
LIST_ROWS = 64  # rows whose lists one program keeps
MEASURED_TILE, MEASURED_WARPS = (1, 256), 1  # rows and columns of differences
AGAIN_TILE, AGAIN_WARPS, AGAIN_STAGES = (32, 128), 4, 3  # of bounds that are looked at again
AGAIN_SHARES = 16  # of all rows, each with lists of its own: few rows in doubt keep a GPU busy
DOUBT_ROWS = 1024  # of a site, looked through for such rows at a time
NEAR = 16  # tiles of so many groups each way follow one another


def can_fuse(rows: Float[Tensor, "n d"], k: int) -> bool:
    """Whether the kernels serve: a GPU with fast half-precision products, Triton, rows enough and a short list."""
    return enough_groups(len(rows), k) and kernels_run(rows.device)


def enough_groups(n: int, k: int) -> bool:
    """Whether at most a quarter of the rows have two of their ``k`` nearest in one group: hardly one has three then."""
    return n >= LEAST_ROWS and k <= MOST_K and k * (k - 1) / 2 <= n / GROUP / 4


def _list_length(k: int) -> int:
    return max(SHORTEST, 1 << (k + SPARE - 1).bit_length())


@on_its_device
def search_fused(
    rows: Float[Tensor, "s n d"],
    k: int,
    scale: float,
    *,
    left_out: Bool[Tensor, "s n"] | None = None,
    ready: Ready | None = None,
) -> list[Found]:
    """The ``k`` nearest other rows of every row of each site, and which rows are certain. Asks nothing of the device,
    but for ``product_shape`` on a GPU that it does not know.

    ``scale`` is the power of two of ``plan.scale_of``. Rows that are ``left_out`` are nobody's neighbours; their own
    distances are infinite, and certain. ``ready`` are these rows in half precision, where somebody has them; sizes
    of what is left out are written into it.
    """
    rows = rows.contiguous()
    ready = ready or Ready.of(rows, scale)
    if left_out is not None:
        for size in (ready.size, ready.fine):
            size[:, : rows.shape[1]].masked_fill_(left_out[:, ready.order], kernels_of("nearest").FAR / 4)
    lists = _Lists.of(ready, _list_length(k))
    for first, last in _stripes(*ready.size.shape):
        _look(ready, lists, first, last)
    found = _Answer.of(len(rows), rows.shape[1], k, rows.device)
    _measure(rows, scale, ready, found, (lists.values, lists.groups, lists.rest[:, None]))
    if left_out is not None:
        found.settled.logical_or_(left_out)
    _look_again(rows, scale, ready, found)
    return [Found(*one) for one in zip(found.distances, found.indices, found.settled, strict=True)]


@dataclass(frozen=True)
class _Answer:
    """What is found of all sites, written to in place."""

    distances: Float[Tensor, "s n k"]
    indices: Int[Tensor, "s n k"]
    settled: Bool[Tensor, "s n"]

    @classmethod
    def of(cls, sites: int, n: int, k: int, device: torch.device) -> _Answer:
        return cls(
            torch.empty(sites, n, k, dtype=torch.float64, device=device),
            torch.empty(sites, n, k, dtype=torch.int64, device=device),
            torch.empty(sites, n, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True)
class _Lists:
    """The least bounds of each row so far, where they stand, and the least of all others."""

    values: Float[Tensor, "s t p"]
    groups: Int[Tensor, "s t p"]
    rest: Float[Tensor, "s p"]

    @classmethod
    def of(cls, ready: Ready, length: int) -> _Lists:
        (sites, padded), device, far = ready.size.shape, ready.size.device, kernels_of("nearest").FAR
        return cls(
            torch.full((sites, length, padded), far, dtype=torch.float32, device=device),
            torch.zeros(sites, length, padded, dtype=torch.int32, device=device),
            torch.full((sites, padded), far, dtype=torch.float32, device=device),
        )


def _stripes(sites: int, padded: int) -> list[tuple[int, int]]:
    """Groups of columns looked at together, so that the bounds of a stripe stay within STRIPE_CELLS."""
    groups = padded // kernels_of("nearest").TILE
    number = min(groups, -(-6 * sites * padded * groups // STRIPE_CELLS))  # three bounds for each side
    count = -(-groups // number)
    return [(first, min(first + count, groups)) for first in range(0, groups, count)]


@functools.lru_cache(maxsize=16)
def _tiles(first: int, last: int, device: torch.device, stream: int) -> Int[Tensor, "t two"]:
    """The tiles (I, J) of a stripe that hold pairs i < j, near ones next to each other so that rows stay in cache.

    Kept for each stream: another one would neither wait until they are made nor be waited for when they go.
    """
    i, j = torch.arange(last, device=device), torch.arange(first, last, device=device)
    rows, columns = (one.reshape(-1) for one in torch.meshgrid(i, j, indexing="ij"))
    rows, columns = rows[rows <= columns], columns[rows <= columns]
    near = (columns // NEAR) * (last // NEAR + 1) + rows // NEAR
    order = (near * NEAR**2 + (rows % NEAR) * NEAR + columns % NEAR).argsort()
    return torch.stack([rows[order], columns[order]], dim=1).int().contiguous()


@functools.cache
def product_shape(device: torch.device) -> Shape:
    """The shape of the product on this device: the one that is known of its kind, or else the fastest of ``SHAPES``,
    which are built and timed there the first time that a machine needs one."""
    if device.type != "cuda":
        return SHAPES[0]
    kind = torch.cuda.get_device_capability(device)
    if kind in KNOWN:
        return KNOWN[kind]
    import triton

    kernel = kernels_of("nearest").three_least_of_tiles
    name = f"{kernel.cache_key} {triton.__version__} {torch.cuda.get_device_name(device)} {kind} {SHAPES}"
    return fastest(SHAPES, functools.partial(_seconds, Ready.of(_tried_rows(device), 1.0)), name)


def _tried_rows(device: torch.device) -> Float[Tensor, "1 n d"]:
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(1, TRIED_ROWS, TRIED_WIDTH, generator=draw, device=device)


def _seconds(ready: Ready, shape: Shape) -> float:
    from triton.testing import do_bench

    groups = ready.size.shape[1] // kernels_of("nearest").TILE
    return do_bench(lambda: _bounds(ready, 0, groups, shape), return_mode="median") / 1000


def _bounds(
    ready: Ready, first: int, last: int, shape: Shape
) -> tuple[Float[Tensor, "three s g end"], Float[Tensor, "three s last c"]]:
    """The three least of all pairs of a stripe of columns with the rows before them, by row and by column."""
    kernels = kernels_of("nearest")
    tile, (sites, padded, depth), device = kernels.TILE, ready.half.shape, ready.half.device
    end, columns = last * tile, (last - first) * tile
    tiles = _tiles(first, last, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    of_rows = torch.empty(3, sites, last - first, end, dtype=torch.float32, device=device)
    of_columns = torch.empty(3, sites, last, columns, dtype=torch.float32, device=device)
    kernels.three_least_of_tiles[(len(tiles), sites)](
        ready.half, ready.size, tiles, *of_rows, *of_columns, padded, end, last - first, first, columns,
        D=depth, B=tile, K=shape.depth, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return of_rows, of_columns


def _look(ready: Ready, lists: _Lists, first: int, last: int) -> None:
    """All pairs of a stripe of columns with the rows before them, sorted into the lists of both."""
    kernels, (sites, padded, _) = kernels_of("nearest"), ready.half.shape
    tile = kernels.TILE
    end, columns = last * tile, (last - first) * tile
    of_rows, of_columns = _bounds(ready, first, last, product_shape(ready.half.device))
    common = {"SHARE": tile, "T": lists.values.shape[1], "P": 8, "B": LIST_ROWS, "num_warps": 2}
    kernels.keep_least[(end // LIST_ROWS, sites)](
        lists.values, lists.groups, lists.rest, *of_rows, padded, 0, end, first, last - first, AHEAD=True, **common
    )
    kernels.keep_least[(columns // LIST_ROWS, sites)](
        lists.values, lists.groups, lists.rest, *of_columns, padded, first * tile, columns, 0, last,
        AHEAD=False, **common,
    )  # fmt: skip


def _look_again(rows: Float[Tensor, "s n d"], scale: float, ready: Ready, found: _Answer) -> None:
    """The first AGAIN rows of each site that are not certain, if there are such: all their bounds with a share of the
    rows in one list."""
    kernels, (sites, padded, depth), (n, k) = kernels_of("nearest"), ready.half.shape, found.distances.shape[1:]
    device, many, (tall, broad) = rows.device, min(AGAIN, n), AGAIN_TILE
    own = torch.empty(sites, many, dtype=torch.int32, device=device)
    count = torch.empty(sites, dtype=torch.int32, device=device)
    kernels.rows_in_doubt[(sites,)](found.settled, own, count, n, many, B=DOUBT_ROWS, num_warps=8)
    length, share = _list_length(k), -(-padded // (broad * AGAIN_SHARES)) * broad
    values = torch.empty(sites, AGAIN_SHARES * length, many, dtype=torch.float32, device=device)
    places, rest = torch.empty_like(values, dtype=torch.int32), torch.empty_like(values[:, :AGAIN_SHARES])
    kernels.nearest_of_rows[(-(-many // tall), AGAIN_SHARES, sites)](
        ready.half, ready.fine, ready.back, own, count, values, places, rest, padded, many, share,
        D=depth, T=length, R=tall, C=broad, K=DEPTH, SUM=row_kernels.SUMMED,
        num_warps=AGAIN_WARPS, num_stages=AGAIN_STAGES,
    )  # fmt: skip
    _measure(rows, scale, ready, found, (values, places, rest), (own, count))


def _measure(
    rows: Float[Tensor, "s n d"],
    scale: float,
    ready: Ready,
    found: _Answer,
    lists: tuple[Float[Tensor, "s t w"], Int[Tensor, "s t w"], Float[Tensor, "s l w"]],
    some: tuple[Int[Tensor, "s w"], Int[Tensor, "s"]] | None = None,
) -> None:
    """Candidates measured in float64, and which rows are certain: of all rows, of which there are ``lists`` in the
    order of ``ready``, or of ``some``, which so many are."""
    kernels, (sites, n, width), (_, count, wide) = kernels_of("nearest"), rows.shape, lists[0].shape
    tall, broad = MEASURED_TILE
    own, number = (ready.order, ready.order) if some is None else some
    kernels.measure_nearest[(-(-(n if some is None else wide) // tall), sites)](
        rows, ready.order, own, number, *lists, ready.lengths, ready.worst, ready.factor,
        found.distances, found.indices, found.settled, scale, ready.floor, n, wide, width, found.distances.shape[2],
        LISTED=some is not None, S=lists[2].shape[1], R=tall, T=count, K=broad, num_warps=MEASURED_WARPS,
    )  # fmt: skip
