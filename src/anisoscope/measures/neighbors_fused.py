"""Nearest neighbours on a GPU by one fused product in half precision that never writes the distances of all pairs.

Half precision proposes, float64 decides, and a proven bound says which rows are certain. With y the rows about their
mean, h their half-precision values, r = |y - h| and e the largest r / |y|, for each pair

    |y_i - y_j|^2 >= |y_i|^2 + |y_j|^2 - 2 h_i . h_j - (2 e + e^2 + g) (1 + e)^2 (|y_i|^2 + |y_j|^2),

where g stands for rounding of the product's sum: by Cauchy and Schwarz for the rounding of rows, and since a product of
two lengths is at most half the sum of their squares. So the correction is a factor on the squared lengths and costs
nothing. Rows are shuffled first and looked at in groups; for each row and group the kernels give the two least bounds.
The least of all of them are measured by differences in float64, and a row is certain where its k-th distance is not
above the least bound among everything else. The few other rows are searched again by ``neighbors_gpu``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device
from anisoscope.measures.found import Found
from anisoscope.measures.row_kernels import in_half

LEAST_ROWS = 2048  # below this one plain product of all pairs is as good
GROUP = 128  # the kernels' tile
MOST_K = 26  # with SPARE the kernels' longest list
SPARE = 6
DEPTH = 64  # the product takes so many columns at a time
READ_CELLS = 1 << 26  # rows made ready at a time, float64: half a gigabyte
STRIPE_CELLS = 1 << 29  # bounds held at a time, float32: two gigabytes
WARPS, STAGES = 4, 3  # of the product: the fastest of nine that were tried
LIST_ROWS = 64  # rows whose lists one program keeps
NEAR = 16  # tiles of so many groups each way follow one another
TOP = 14  # the largest value in half precision is made less than two to this


def can_fuse(rows: Float[Tensor, "n d"], k: int) -> bool:
    """Whether the kernels serve: a GPU with fast half-precision products, Triton, rows enough and a short list."""
    return enough_groups(len(rows), k) and kernels_run(rows.device)


def enough_groups(n: int, k: int) -> bool:
    """Whether at most a quarter of the rows have two of their ``k`` nearest in one group, and are searched again."""
    return n >= LEAST_ROWS and k <= MOST_K and k * (k - 1) / 2 <= n / GROUP / 4


@on_its_device
def search_fused(
    rows: Float[Tensor, "s n d"], k: int, scale: float, *, left_out: Bool[Tensor, "s n"] | None = None, seed: int = 0
) -> list[Found]:
    """The ``k`` nearest other rows of every row of each site, and which rows are certain; asks nothing of the device.

    ``scale`` is the power of two of ``plan.scale_of``. Rows that are ``left_out`` are nobody's neighbours; their own
    distances are infinite. ``seed`` shuffles the rows, which changes no certain result.
    """
    rows = rows.contiguous()
    ready = _Ready.of(rows, scale, seed)
    if left_out is not None:
        ready.size[:, : rows.shape[1]].masked_fill_(left_out[:, ready.order], kernels_of("nearest").FAR / 4)
    lists = _Lists.of(ready, 1 << (k + SPARE - 1).bit_length())
    for first, last in _stripes(*ready.size.shape):
        _look(ready, lists, first, last)
    return _settled(rows, k, scale, ready, lists)


@dataclass(frozen=True)
class _Ready:
    """Shuffled rows in half precision, filled up to whole groups, and their shrunken squared lengths."""

    half: Float[Tensor, "s p e"]
    size: Float[Tensor, "s p"]
    order: Int[Tensor, "n"]
    factor: Float[Tensor, "s 1"]
    """What rows were multiplied by, beyond ``scale``."""

    @classmethod
    def of(cls, rows: Float[Tensor, "s n d"], scale: float, seed: int) -> _Ready:
        kernels = kernels_of("nearest")
        (sites, n, width), device = rows.shape, rows.device
        padded, depth = -(-n // kernels.TILE) * kernels.TILE, -(-width // DEPTH) * DEPTH
        order = torch.randperm(n, generator=torch.Generator(device).manual_seed(seed), device=device)
        step = max(1, READ_CELLS // (sites * width))
        mean = torch.stack([part.sum(dim=1, dtype=torch.float64) for part in rows.split(step, dim=1)]).sum(dim=0) / n
        least, most = (one.double() for one in torch.aminmax(rows.flatten(1), dim=1))
        # At least as large as any entry once the mean is off.
        largest = torch.maximum(most, -least) + mean.abs().amax(dim=1)
        largest = torch.minimum(largest, most - least) * scale
        factor = torch.ldexp(torch.ones_like(largest), TOP - torch.frexp(torch.where(largest > 0, largest, 1.0))[1])
        factor = factor[:, None]
        half, squares, worst = in_half(rows, order, mean, factor[:, 0] * scale, padded, depth)
        worst = worst[:, None]
        # Rounding of the sum of a product of half-precision rows: tensor cores cut off where others round (factor two),
        # with a margin of four; and of the few float32 operations after it.
        gone = 4 * (depth + 16) * 2.0**-23
        allowance = (2 * worst + worst.square() + gone) * (1 + worst).square() + 2.0**-20
        size = (squares * (1 - allowance)).float()
        size[:, n:] = kernels.FAR / 4
        return cls(half, size, order, factor)


@dataclass(frozen=True)
class _Lists:
    """The least bounds of each row so far, where they stand, and the least of all others."""

    values: Float[Tensor, "s t p"]
    groups: Int[Tensor, "s t p"]
    rest: Float[Tensor, "s p"]

    @classmethod
    def of(cls, ready: _Ready, length: int) -> _Lists:
        (sites, padded), device, far = ready.size.shape, ready.size.device, kernels_of("nearest").FAR
        return cls(
            torch.full((sites, length, padded), far, device=device),
            torch.zeros(sites, length, padded, dtype=torch.int32, device=device),
            torch.full((sites, padded), far, device=device),
        )


def _stripes(sites: int, padded: int) -> list[tuple[int, int]]:
    """Groups of columns looked at together, so that the bounds of a stripe stay within STRIPE_CELLS."""
    groups = padded // kernels_of("nearest").TILE
    number = min(groups, -(-4 * sites * padded * groups // STRIPE_CELLS))  # two bounds for each side
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


def _look(ready: _Ready, lists: _Lists, first: int, last: int) -> None:
    """All pairs of a stripe of columns with the rows before them, sorted into the lists of both."""
    kernels = kernels_of("nearest")
    tile, (sites, padded, depth), device = kernels.TILE, ready.half.shape, ready.half.device
    end, columns = last * tile, (last - first) * tile
    tiles = _tiles(first, last, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    of_rows = torch.empty(2, sites, last - first, end, device=device)
    of_columns = torch.empty(2, sites, last, columns, device=device)
    kernels.two_least_of_tiles[(len(tiles), sites)](
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


def _settled(rows: Float[Tensor, "s n d"], k: int, scale: float, ready: _Ready, lists: _Lists) -> list[Found]:
    """Candidates measured in float64, and which rows are certain."""
    kernels = kernels_of("nearest")
    sites, n, width = rows.shape
    values, groups = (one[:, :, :n].mT.contiguous() for one in (lists.values, lists.groups))
    at = groups * kernels.TILE + (values.view(torch.int32) & (kernels.TILE - 1))
    real = (values < kernels.FAR / 8) & (at < n)
    other = ready.order[torch.where(real, at, 0)]
    d2 = torch.empty(other.shape, dtype=torch.float64, device=rows.device)
    kernels.squared_distances[(n, sites)](
        rows, ready.order, other, d2, scale, n, width, T=other.shape[2], K=128, num_warps=4
    )
    best = d2.masked_fill_(~real, torch.inf).topk(k, dim=2, largest=False, sorted=True)
    limit = best.values[:, :, -1]
    floor = lists.rest[:, :n].double()
    floor = floor - floor.abs() * kernels.PACKED
    certain = (floor >= limit * ready.factor.square()) | (limit <= 0)
    back = torch.empty_like(ready.order)
    back[ready.order] = torch.arange(n, device=rows.device)
    found = best.values.sqrt()[:, back] / scale, other.gather(2, best.indices)[:, back], certain[:, back]
    return [Found(*one) for one in zip(*found, strict=True)]
