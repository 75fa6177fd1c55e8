"""Products of wide second moments with draws and bases, for the kernel of ``tangent.stacked_controls``.

Energies in the moments of groups are sums ``<P_b, M>`` with P_b the projector of a draw, formed anew each time: of the
same for all sites and groups, B D^2 operations for each moment in place of B K D^2. The covariance of all rows is asked
for more than an energy, and meets the draws themselves.

All numbers are sums of two float16, which are multiplied in three products: 22 bits, as of two of TF32, in half the
time. Wide moments were formed on tensor cores themselves and have no more digits. What is small is float64.

Letters: S sites, G groups, B draws, K the rank, D the width; L lines, K for each basis and for the first axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, sent

BITS = 14  # in half precision rows and moments come to less than two to this
DRAW_SIZE = 256.0  # what draws are multiplied by: some thousand at most
PROJECTOR_SIZE = 2.0**15  # and projectors, of which no entry is larger than one
IMAGE_CELLS = 1 << 26  # images of draws held at a time
TILE_CELLS = 1 << 27  # entries of projectors held at a time, four bytes each


@dataclass(frozen=True)
class Products:
    """What ``kernels.controls.controls`` is given, by the names it has there."""

    against: Float[Tensor, "sh bk"]
    form: Float[Tensor, "b ks k"]
    form_twice: Float[Tensor, "sb k k"]
    across_twice: Float[Tensor, "sl bk"]
    forms: Tensor
    owns: Float[Tensor, "s gl l"]
    acrosses: Float[Tensor, "sgl bk"]


def products_in_halves(
    groups: Float[Tensor, "s g d d"], scatter: Float[Tensor, "s d d"], x: Float[Tensor, "s l d"],
    held: Float[Tensor, "s l d"], columns: Float[Tensor, "s h d"], z: Float[Tensor, "b k d"],
    inverses: Float[Tensor, "two b k k"],
) -> Products:  # fmt: skip
    """All of them. ``held`` is what the scatter makes of X, ``columns`` are those whose products with the draws are
    ``against``; ``inverses`` say whose projectors are meant: those of normal controls and of random ones."""
    through, near = x[:, None] @ groups, z.float()
    rows = [columns.flatten(0, 1), (held @ scatter).flatten(0, 1), through.flatten(0, 2)]
    draws = _apart(near.flatten(0, 1), torch.full_like(scatter[0, 0, :1], DRAW_SIZE), len(z) * z.shape[1], left=True)
    across = _across(torch.cat(rows), draws).split([len(one) for one in rows])
    form, form_twice = _forms(scatter, near, draws)
    forms, owns = _energies(groups, inverses @ z, near), through.flatten(1, 2) @ x.mT
    return Products(across[0], form, form_twice, across[1], forms, owns, across[2])


def _across(rows: Float[Tensor, "n d"], draws: Float[Tensor, "bk three_d"]) -> Float[Tensor, "n bk"]:
    """Rows, each brought into range by itself, times the draws; float64."""
    factors = _factors(torch.linalg.vector_norm(rows, torch.inf, dim=1))
    ours, width = _apart(rows, factors, 1, left=True), draws.shape[1] // 3
    found = torch.empty(1, len(rows), len(draws), device=rows.device)
    once = torch.ones_like(found[0, 0, :1])
    _long_products(ours, draws, once, found, 0, 1, (ours.stride(0), draws.stride(0), width, width), width)
    return found[0] / (factors * DRAW_SIZE)[:, None]


def _long_products(
    left: Tensor, right: Tensor, weights: Float[Tensor, "p"], out: Float[Tensor, "p m n"], first: int, pieces: int,
    steps: tuple[int, int, int, int], long: int,
) -> None:  # fmt: skip
    """``kernels.projected.long_products`` of so many pieces from the ``first`` on."""
    kernels, (_, m, n) = kernels_of("projected"), out.shape
    kernels.long_products[(-(-m // kernels.SIDE), -(-n // kernels.SIDE), pieces)](
        left, right, weights, out, m, n, first, *steps,
        L=long, M=kernels.SIDE, N=kernels.SIDE, K=kernels.DEPTH, W=kernels.WINDOW, num_warps=8, num_stages=3,
    )  # fmt: skip


def _factors(largest: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Powers of two that bring numbers into the range of float16."""
    powers = BITS - torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent
    return torch.ldexp(torch.ones_like(largest), powers)


def _moment_factors(moments: Float[Tensor, "*lead d d"]) -> Float[Tensor, "n"]:
    """The same for moments: no entry of one is larger than the largest on its diagonal."""
    return _factors(moments.diagonal(dim1=-2, dim2=-1).amax(dim=-1).flatten())


def _forms(
    scatter: Float[Tensor, "s d d"], z: Float[Tensor, "b k d"], draws: Float[Tensor, "bk three_d"]
) -> tuple[Float[Tensor, "b ks k"], Float[Tensor, "sb k k"]]:
    """``Z^T C Z`` and ``Z^T C^2 Z`` of each site and draw, from the images of the draws, a few sites at a time."""
    (sites, width, _), (b, k, _), kernels = scatter.shape, z.shape, kernels_of("projected")
    once, twice = scatter.new_empty(b, k * sites, k), scatter.new_empty(sites * b, k, k)
    factors, step = _moment_factors(scatter), max(1, IMAGE_CELLS // z.numel())
    for at in range(0, sites, step):
        few = scatter[at : at + step]
        right = _apart(few.reshape(-1, width), factors[at : at + step], width, left=False)
        kernels.image_forms[(b, len(few))](
            _multiplied(draws, right.mT), z, factors[at : at + step] * DRAW_SIZE, once, twice, width, sites, len(few),
            at, K=k, P=_places(k), C=kernels.CHUNK, num_warps=1,
        )  # fmt: skip
    return once, twice


def _energies(
    groups: Float[Tensor, "s g d d"], left: Float[Tensor, "two b k d"], z: Float[Tensor, "b k d"]
) -> Float[Tensor, "two_b sg"]:
    """``tr(left^T M z)`` of each draw and moment, float64: tiles of projectors and of moments, some at a time."""
    (sites, count, width, _), (b, k, _), kernels = groups.shape, z.shape, kernels_of("projected")
    cells, side, draws, moments = kernels.TILE**2, -(-width // kernels.TILE), 2 * b, sites * count
    if not moments:
        return groups.new_empty(draws, 0)
    assert groups.stride()[2:] == (width, 1)
    places = [(i, j) for i in range(side) for j in range(i, side)]
    tiles = sent([at for pair in places for at in pair], z, torch.int32).view(-1, 2)
    weights = sent([1.0 if i == j else 2.0 for i, j in places], z)  # for both sides of the diagonal
    factors, left = _moment_factors(groups), (left * PROJECTOR_SIZE).float()
    sums, step = z.new_empty(len(tiles), draws, moments), max(1, TILE_CELLS // (draws * cells))
    for at in range(0, len(tiles), step):
        some = tiles[at : at + step]
        ours, theirs = (z.new_empty(2, n, len(some), cells, dtype=torch.float16) for n in (draws, moments))
        kernels.projectors[(len(some), draws)](
            left, z, some, ours, width, b, ours.stride(0), K=k, P=_places(k), T=kernels.TILE, num_warps=4
        )
        kernels.moment_tiles[(len(some), moments)](
            groups, factors, some, theirs, width, count, theirs.stride(0), groups.stride(0), groups.stride(1),
            T=kernels.TILE, num_warps=4,
        )  # fmt: skip
        steps = ours.stride(1), theirs.stride(1), ours.stride(0), theirs.stride(0)
        _long_products(ours, theirs, weights, sums, at, len(some), steps, cells)
        del ours, theirs
    return sums.sum(dim=0, dtype=torch.float64) / (factors * PROJECTOR_SIZE)


def _places(k: int) -> int:
    return int(max(kernels_of("controls").LEAST_PLACES, 1 << (k - 1).bit_length()))


def _apart(
    rows: Float[Tensor, "n d"], factors: Float[Tensor, "f"], each: int, *, left: bool
) -> Float[Tensor, "n three_d"]:
    """``kernels.controls.in_halves`` of these rows, filled up to whole windows."""
    kernels, window, (n, width) = kernels_of("controls"), kernels_of("projected").WINDOW, rows.shape
    filled = -(-width // window) * window
    out = torch.empty(n, 3 * filled, dtype=torch.float16, device=rows.device)
    kernels.in_halves[(-(-n // kernels.ROWS), -(-filled // kernels.COLUMNS))](
        rows, factors, out, n, each, width, filled, LEFT=left, R=kernels.ROWS, B=kernels.COLUMNS
    )
    return out


def _multiplied(left: Float[Tensor, "m d"], right: Float[Tensor, "d n"]) -> Float[Tensor, "m n"]:
    """A product of float16 matrices in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
