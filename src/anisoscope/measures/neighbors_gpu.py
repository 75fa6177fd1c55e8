"""Nearest neighbours where all pairs are cheap and asking the device is dear: a GPU, on which one plain product wins.

The promise is that of ``measures.search``: float32 products give lower bounds on squared distances, with a proven
allowance for rounding; a few candidates of each row are measured by differences in float64; a row is settled where the
bound of its last candidate reaches its k-th distance. Rows that are not settled (many neighbours within the allowance)
meet float64 products, whose allowance is a billionth of that, and whatever is left then goes to ``neighbors_of``. Where
there are kernels, and few such rows, each is instead measured against all others. Nothing waits for the device before
all rows have been searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.kernels import kernels_run, sent
from anisoscope.measures import row_kernels
from anisoscope.measures.found import Found
from anisoscope.measures.neighbors_fused import GROUP, can_fuse, search_fused
from anisoscope.measures.plan import scale_of
from anisoscope.measures.search import SPARE, Neighbors, neighbors_of
from anisoscope.stats.precision import full_precision, has_tensor_cores, on_tensor_cores, two_parts

TILE_CELLS = 1 << 26  # bounds held at a time: a quarter of a gigabyte in float32
WIDE_CELLS = 1 << 27  # of rows held as float64 at a time
MENDED = 384  # rows searched again without asking whether there are so many; a kernel takes no more of a site
SORTED = 1024  # so many columns are sorted in one kernel, where picking the least of them takes a dozen
TIED = 1e-9  # the k-th squared distance may be so much too long, relative: rows as far as each other to nine digits
MOST_SCALE = 2.0**126  # that a kernel can be given, in float32; rows of subnormal numbers alone want more
PAIR_CELLS = 1 << 25  # differences held at a time, float64


def search(
    rows: Float[Tensor, "n d"],
    k: int,
    scale: float,
    *,
    anchors: Int[Tensor, "m"] | None = None,
    dtype: torch.dtype = torch.float32,
    in_parts: bool | None = None,
) -> Found:
    """One pass over all pairs of ``anchors`` (all rows) with all rows; asks nothing of the device.

    ``scale`` is the power of two of ``plan.scale_of``, ``dtype`` that of the products. ``in_parts`` multiplies float32
    as sums of two TF32 numbers, which tensor cores do three times as fast; by default wherever there are such cores.
    """
    n, width = rows.shape
    own = torch.arange(n, device=rows.device) if anchors is None else anchors
    take = min(k + SPARE, n - 1)
    in_parts = (dtype == torch.float32 and has_tensor_cores(rows.device)) if in_parts is None else in_parts
    # Rounding of a product of float32 rows (Higham, gamma_p, with a margin of four); tensor cores cut off where others
    # round, over three products, and leave out that of the two low parts.
    unit = torch.finfo(dtype).eps / 2
    allowance = 4 * ((3 * width + 16) * 2 * unit + 4 * 2.0**-20) if in_parts else 4 * (width + 16) * unit
    whole, size = _prepared(rows, scale, dtype, allowance)
    left = right = whole
    if in_parts:
        high, low = two_parts(whole)
        left, right = torch.cat([high, high, low], dim=1), torch.cat([high, low, high], dim=1)
    found, index, settled = [], [], []
    for part in own.split(max(GROUP, TILE_CELLS // len(whole))):
        with on_tensor_cores(in_parts and rows.device.type == "cuda"):
            bound = torch.addmm(size[None, :], left[part], right.T, alpha=-2)
        bound.scatter_(1, part[:, None], torch.inf)
        value, near = _least(bound, take, n)
        value = value[:, -1] + size[part]
        d2, here = _measured(rows, part, near, k, scale)
        limit = d2[:, -1]
        # Rounded up, so that a comparison in float32 never settles a row that it should not.
        reach = torch.where(limit > 0, (limit * (1 + 2.0**-22)).to(dtype) + 1e-36, 0.0)
        found.append(d2)
        index.append(here)
        settled.append(value >= reach if take < n - 1 else torch.ones_like(limit, dtype=torch.bool))
    return Found(torch.cat(found).sqrt() / scale, torch.cat(index), torch.cat(settled))


def nearest_by_tiles(rows: Float[Tensor, "n d"], k: int) -> Neighbors:
    """The ``k`` nearest other rows of every row, exact in float64, ties in any order."""
    with full_precision(rows.device):
        scale = scale_of(rows)
        fused = can_fuse(rows, k) and scale <= MOST_SCALE
        found = search_fused(rows[None], k, scale)[0] if fused else search(rows, k, scale)
        return settle(rows, k, scale, found)


def mended(
    rows: Float[Tensor, "s n d"],
    k: int,
    found: Sequence[Found],
    left_out: Bool[Tensor, "s n"] | None = None,
    most: int = MENDED,
    places: Sequence[int] | None = None,
) -> list[Found]:
    """Rows of each site that are not certain, at most ``most`` of them, searched again in float64, all sites at once.

    For rows of ordinary size; asks nothing of the device, not even whether there are such rows. Rows that are
    ``left_out`` are nobody's neighbours, and nothing is to be mended of them. ``found`` is that of sites ``places``,
    ascending, where not of all.
    """
    places = range(len(rows)) if places is None else places
    if k == 2 and most <= MENDED and rows.dtype == torch.float32 and kernels_run(rows.device):
        return _measured_again(rows, found, left_out, most, places)
    step, better = max(1, WIDE_CELLS // rows[0].numel()), list[Found]()
    for at in range(0, len(places), step):
        few = places[at : at + step]
        side_by_side = few[-1] - few[0] == len(few) - 1
        where = slice(few[0], few[-1] + 1) if side_by_side else list(few)  # a slice is no copy
        out = None if left_out is None else left_out[where]
        better += _searched_again(rows[where], k, found[at : at + step], out, most)
    return better


def settle(rows: Float[Tensor, "n d"], k: int, scale: float, found: Found) -> Neighbors:
    """The search made certain for the rows that float32 could not settle."""
    left = (~found.settled).nonzero().reshape(-1)
    distances, indices = found.distances, found.indices
    if len(left):
        again = search(rows, k, scale, anchors=left, dtype=torch.float64)
        distances, indices = distances.index_copy(0, left, again.distances), indices.index_copy(0, left, again.indices)
        left = left[~again.settled]
    if len(left):
        last = neighbors_of(rows, left, k)
        distances, indices = distances.index_copy(0, left, last.distances), indices.index_copy(0, left, last.indices)
    return Neighbors(distances, indices)


def _together(found: Sequence[Found]) -> tuple[Float[Tensor, "s n k"], Int[Tensor, "s n k"], Bool[Tensor, "s n"]]:
    """What was found of all sites, as tables of their own, which may be written to."""
    return (
        torch.stack([one.distances for one in found]),
        torch.stack([one.indices for one in found]),
        torch.stack([one.settled for one in found]),
    )


def _measured_again(
    rows: Float[Tensor, "s n d"],
    found: Sequence[Found],
    left_out: Bool[Tensor, "s n"] | None,
    most: int,
    places: Sequence[int],
) -> list[Found]:
    """By a kernel that measures a few rows against all others: certain, whatever the others are like."""
    distances, indices, settled = _together(found)
    at = sent(places, rows, torch.int64)
    settled = settled if left_out is None else settled | left_out[at]
    row_kernels.nearest_again(rows, left_out, at, most, distances, indices, settled)
    return [Found(*one) for one in zip(distances, indices, settled, strict=True)]


def _searched_again(
    rows: Float[Tensor, "s n d"],
    k: int,
    found: Sequence[Found],
    left_out: Bool[Tensor, "s n"] | None,
    most: int,
) -> list[Found]:
    """By products in float64, which propose candidates and say whether they are certain."""
    sites, n, width = rows.shape
    distances, indices, settled = _together(found)
    settled = settled if left_out is None else settled | left_out
    doubtful = settled.byte().sort(dim=1, stable=True).indices[:, :most]
    wide = rows.to(torch.float64, copy=True)
    wide -= wide.mean(dim=1, keepdim=True)
    allowance = 4 * (width + 16) * torch.finfo(torch.float64).eps / 2
    size = wide.square().sum(dim=2) * (1 - allowance)
    free = size if left_out is None else size.masked_fill(left_out, torch.inf)
    take = min(k + SPARE, n - 1)
    # Rows of all sites as one table, so that one call measures all of them.
    table, first = rows.flatten(0, 1), torch.arange(sites, device=rows.device)[:, None] * n
    flat = [distances.flatten(0, 1), indices.flatten(0, 1), settled.flatten()]
    for part in doubtful.split(max(1, TILE_CELLS // (sites * n)), dim=1):
        own = wide.gather(1, part[:, :, None].expand(-1, -1, width))
        bound = torch.baddbmm(free[:, None], own, wide.mT, alpha=-2)
        bound.scatter_(2, part[:, :, None], torch.inf)
        bound = torch.nn.functional.pad(bound, (0, -n % GROUP), value=torch.inf)
        value, near = _least(bound.flatten(0, 1), take, n)
        value = value[:, -1] + size.gather(1, part).flatten()
        at = (part + first).flatten()
        d2, here = _measured(table, at, near + first.expand_as(part).reshape(-1, 1), k, 1.0)
        sure = value >= d2[:, -1] * (1 - TIED) if take < n - 1 else torch.ones_like(value, dtype=torch.bool)
        for whole, new in zip(flat, (d2.sqrt(), here % n, sure | flat[2][at]), strict=True):
            whole.index_copy_(0, at, new)
    return [Found(*one) for one in zip(*(part.unflatten(0, (sites, n)) for part in flat), strict=True)]


def _prepared(
    rows: Float[Tensor, "n d"], scale: float, dtype: torch.dtype, allowance: float
) -> tuple[Float[Tensor, "p d"], Float[Tensor, "p"]]:
    """Rows about their mean and their shrunken squared lengths, filled up to whole groups with rows infinitely far."""
    n, width = rows.shape
    padded = -(-n // GROUP) * GROUP
    whole = torch.zeros(padded, width, dtype=dtype, device=rows.device)
    wide = rows.double()
    whole[:n] = (wide - wide.mean(dim=0)) * scale  # rounded after the mean is off: the error is local too
    size = torch.linalg.vector_norm(whole, dim=1).square_().mul_(1 - allowance)
    size[n:] = torch.inf
    return whole, size


def _least(bound: Float[Tensor, "m p"], take: int, n: int) -> tuple[Float[Tensor, "m t"], Int[Tensor, "m t"]]:
    """The ``take`` smallest of each row, ascending, and where: they lie in the ``take`` groups of smallest minimum.

    Where squares overflow, what fills up the last group is as near as any of the ``n`` columns before it. Nothing is
    certain there; but an index beyond them would end a process on a GPU, so none is given.
    """
    m, columns = bound.shape
    groups = bound.view(m, columns // GROUP, GROUP)
    if groups.shape[1] <= 2 * take:
        value, at = _smallest(bound, take)
        return value, at.clamp_max(n - 1)
    near = _smallest(groups.amin(dim=2), take)[1]
    some = groups.gather(1, near[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    value, at = _smallest(some, take)
    return value, (near.gather(1, at // GROUP) * GROUP + at % GROUP).clamp_max_(n - 1)


def _smallest(values: Float[Tensor, "m c"], take: int) -> tuple[Float[Tensor, "m t"], Int[Tensor, "m t"]]:
    """The ``take`` smallest of each row, ascending, and where."""
    if values.shape[1] > SORTED:
        return values.topk(take, dim=1, largest=False, sorted=True)
    ascending, at = values.sort(dim=1)
    return ascending[:, :take], at[:, :take]


def _measured(
    rows: Float[Tensor, "n d"], part: Int[Tensor, "m"], near: Int[Tensor, "m t"], k: int, scale: float
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Squared distances to candidates by differences in float64, the k least of them, ascending."""
    found = []
    step = max(1, PAIR_CELLS // (near.shape[1] * rows.shape[1]))
    for own, others in zip(part.split(step), near.split(step), strict=True):
        difference = rows[others].double().sub_(rows[own].double()[:, None])
        difference = difference.mul_(scale) if scale != 1 else difference
        found.append(torch.linalg.vector_norm(difference, dim=2).square_())
    best = torch.cat(found).topk(k, dim=1, largest=False, sorted=True)
    return best.values, near.gather(1, best.indices)
