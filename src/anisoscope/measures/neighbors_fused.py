"""Nearest neighbours on a GPU by one fused product in half precision that never writes the distances of all pairs.

Half precision proposes, float64 decides, and a proven bound says which rows are certain. With y the rows about their
mean, h their half-precision values, r = |y - h| and e the largest r / |y|, for each pair

    |y_i - y_j|^2 >= |y_i|^2 + |y_j|^2 - 2 h_i . h_j - (2 e + e^2 + g) (1 + e)^2 (|y_i|^2 + |y_j|^2),

where g stands for rounding of the product's sum: by Cauchy and Schwarz for the rounding of rows, and since a product of
two lengths is at most half the sum of their squares. So the correction is a factor on the squared lengths and costs
nothing. Rows are shuffled first and looked at in groups; for each row and group the kernels give the three least
bounds, of which two may be candidates. The least of all of them are measured by differences in float64, and a row is
certain where its k-th distance is not above the least bound among everything else. The others, of which there are many
where rows lie in heaps far from the mean, are looked at once more: all bounds of a row in one list, and from sums of
fewer products, which take half of the allowance. What is left is searched again by ``neighbors_gpu``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device
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
WARPS, STAGES = 4, 3  # of the product: the fastest of nine that were tried
LIST_ROWS = 64  # rows whose lists one program keeps
AGAIN_TILE, AGAIN_WARPS = (64, 128), 8  # of bounds that are looked at again
MEASURED_TILE = (4, 128)  # rows and columns of differences
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
    """The ``k`` nearest other rows of every row of each site, and which rows are certain; asks nothing of the device.

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
    distances, indices, settled = _settled(rows, k, scale, ready, lists)
    settled = settled if left_out is None else settled | left_out
    found = _looked_again(rows, k, scale, ready, distances, indices, settled)
    return [Found(*one) for one in zip(*found, strict=True)]


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


def _look(ready: Ready, lists: _Lists, first: int, last: int) -> None:
    """All pairs of a stripe of columns with the rows before them, sorted into the lists of both."""
    kernels = kernels_of("nearest")
    tile, (sites, padded, depth), device = kernels.TILE, ready.half.shape, ready.half.device
    end, columns = last * tile, (last - first) * tile
    tiles = _tiles(first, last, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    of_rows = torch.empty(3, sites, last - first, end, dtype=torch.float32, device=device)
    of_columns = torch.empty(3, sites, last, columns, dtype=torch.float32, device=device)
    kernels.three_least_of_tiles[(len(tiles), sites)](
        ready.half, ready.size, tiles, *of_rows, *of_columns, padded, end, last - first, first, columns,
        D=depth, B=tile, K=DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    common = {"SHARE": tile, "T": lists.values.shape[1], "P": 8, "B": LIST_ROWS, "num_warps": 2}
    kernels.keep_least[(end // LIST_ROWS, sites)](
        lists.values, lists.groups, lists.rest, *of_rows, padded, 0, end, first, last - first, AHEAD=True, **common
    )
    kernels.keep_least[(columns // LIST_ROWS, sites)](
        lists.values, lists.groups, lists.rest, *of_columns, padded, first * tile, columns, 0, last,
        AHEAD=False, **common,
    )  # fmt: skip


def _settled(
    rows: Float[Tensor, "s n d"], k: int, scale: float, ready: Ready, lists: _Lists
) -> tuple[Float[Tensor, "s n k"], Int[Tensor, "s n k"], Bool[Tensor, "s n"]]:
    """Candidates measured in float64, and which rows are certain."""
    kernels, n = kernels_of("nearest"), rows.shape[1]
    values, groups = (one[:, :, :n].mT.contiguous() for one in (lists.values, lists.groups))
    at = groups * kernels.TILE + (values.view(torch.int32) & (kernels.TILE - 1))
    real = (values < kernels.FAR / 8) & (at < n)
    other = ready.order[torch.where(real, at, 0)]
    values = values.masked_fill_(~real, kernels.FAR)
    own, every = ready.order.expand(len(rows), -1), torch.ones_like(real[:, :, 0])
    d2 = _measured(rows, ready, own, other, values, every, k, scale)
    best = d2.topk(k, dim=2, largest=False, sorted=True)
    limit = best.values[:, :, -1]
    floor = lists.rest[:, :n].double()
    floor = floor - floor.abs() * kernels.PACKED
    certain = (floor >= limit * ready.factor.square()) | (limit <= 0)
    back = ready.back
    return best.values.sqrt()[:, back] / scale, other.gather(2, best.indices)[:, back], certain[:, back]


def _looked_again(
    rows: Float[Tensor, "s n d"],
    k: int,
    scale: float,
    ready: Ready,
    distances: Float[Tensor, "s n k"],
    indices: Int[Tensor, "s n k"],
    settled: Bool[Tensor, "s n"],
) -> tuple[Float[Tensor, "s n k"], Int[Tensor, "s n k"], Bool[Tensor, "s n"]]:
    """The same with AGAIN rows of each site that are not certain, if there are such: one list of all their bounds."""
    kernels, (sites, padded, depth), n = kernels_of("nearest"), ready.half.shape, rows.shape[1]
    order = settled.byte().sort(dim=1, stable=True)
    own, wanted = order.indices[:, :AGAIN].contiguous(), order.values[:, :AGAIN] == 0
    many, (tall, broad) = own.shape[1], AGAIN_TILE
    count = _list_length(k)
    value = torch.full((sites, many, count), kernels.FAR, dtype=torch.float32, device=rows.device)
    near = torch.zeros(sites, many, count, dtype=torch.int32, device=rows.device)
    rest = torch.full((sites, many), kernels.FAR, dtype=torch.float32, device=rows.device)
    kernels.nearest_of_rows[(-(-many // tall), sites)](
        ready.half, ready.fine, ready.back[own], wanted, value, near, rest, padded, many,
        D=depth, T=count, R=tall, C=broad, K=DEPTH, SUM=row_kernels.SUMMED, num_warps=AGAIN_WARPS, num_stages=STAGES,
    )  # fmt: skip
    real = (value < kernels.FAR / 8) & (near < n)
    other = ready.order[torch.where(real, near, 0)]
    d2 = _measured(rows, ready, own, other, torch.where(real, value, kernels.FAR), wanted, k, scale)
    best = d2.topk(k, dim=2, largest=False, sorted=True)
    limit = best.values[:, :, -1]
    certain = (rest.double() >= limit * ready.factor.square()) | (limit <= 0)
    old, at = settled.gather(1, own), own[:, :, None].expand(-1, -1, k)
    use = wanted[:, :, None]
    return (
        distances.scatter(1, at, torch.where(use, best.values.sqrt() / scale, distances.gather(1, at))),
        indices.scatter(1, at, torch.where(use, other.gather(2, best.indices), indices.gather(1, at))),
        settled.scatter(1, own, old | certain),
    )


def _measured(
    rows: Float[Tensor, "s n d"],
    ready: Ready,
    own: Int[Tensor, "s m"],
    other: Int[Tensor, "s m t"],
    bounds: Float[Tensor, "s m t"],
    wanted: Bool[Tensor, "s m"],
    k: int,
    scale: float,
) -> Float[Tensor, "s m t"]:
    """Squared distances by differences in float64, times ``scale`` squared; infinite where a bound says that they are
    not among the k least."""
    kernels, (sites, n, width), (_, many, count) = kernels_of("nearest"), rows.shape, other.shape
    d2 = torch.empty(other.shape, dtype=torch.float64, device=rows.device)
    tall, broad = MEASURED_TILE
    kernels.measure_nearest[(-(-many // tall), sites)](
        rows, own, other, bounds, wanted, ready.factor, d2, scale, n, many, own.stride(0), width, k,
        R=tall, T=count, K=broad, num_warps=4,
    )  # fmt: skip
    return d2
