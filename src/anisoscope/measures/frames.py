"""Neighbourhoods of rows and their tangent frames, by local PCA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, OptionError, TooFewRowsError
from anisoscope.measures.base import Duplicates, Needs, Workspace
from anisoscope.measures.neighbors import neighbors_of
from anisoscope.rows import as_rows

BATCH_NUMBERS = 1 << 23  # numbers gathered at a time: about 170 neighbourhoods of 64 rows at width 768


@dataclass(frozen=True)
class Neighborhoods:
    """The k nearest rows around each anchor. ``members`` holds the anchor itself first, then the others by distance."""

    anchors: Int[Tensor, "m"]
    members: Int[Tensor, "m k1"]
    distances: Float[Tensor, "m k"]

    @property
    def k(self) -> int:
        """Neighbours of each anchor."""
        return self.distances.shape[1]


@dataclass(frozen=True)
class LocalFrames:
    """Local PCA around each anchor, about the mean of its neighbourhood.

    ``tangents`` are orthonormal columns, leading one first; ``variances`` the eigenvalues of the local covariance
    (divided by k), descending; ``scores`` the members' coordinates along all principal axes, scaled to unit length.
    """

    tangents: Float[Tensor, "m d r"]
    variances: Float[Tensor, "m j"]
    scores: Float[Tensor, "m k1 j"]
    neighborhoods: Neighborhoods

    @property
    def coordinates(self) -> Float[Tensor, "m k1 j"]:
        """The members of each neighbourhood along all its principal axes."""
        return self.scores.double() * (self.variances * self.neighborhoods.k).sqrt()[:, None, :]


def local_tangents(
    rows: RowsLike,
    *,
    dimension: int,
    k: int = 64,
    anchors: int = 1024,
    mask: MaskLike = None,
    duplicates: Duplicates = "drop",
    seed: int = 0,
) -> LocalFrames:
    """Tangent frames ``(anchors, D, dimension)`` at randomly chosen rows, by local PCA of their k nearest rows."""
    points = Workspace(as_rows(rows, mask), Needs(points=True), seed).points(duplicates)
    found = neighborhoods(points.rows, k, anchors, seed)
    if not 1 <= dimension <= min(k, points.rows.shape[1]):
        raise OptionError(f"dimension must lie between 1 and min(k, width), got {dimension}")
    return local_frames(points.rows, found, dimension)


def neighborhoods(rows: Float[Tensor, "n d"], k: int, anchors: int, seed: int = 0) -> Neighborhoods:
    """Neighbourhoods of ``anchors`` rows drawn without replacement (all of them if there are fewer)."""
    if k < 2:
        raise OptionError(f"a neighbourhood needs k >= 2, got {k}")
    if anchors < 1:
        raise OptionError(f"at least one anchor is needed, got {anchors}")
    if len(rows) < k + 1:
        raise TooFewRowsError(f"neighbourhoods of {k} rows need at least {k + 1} distinct rows, got {len(rows)}")
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randperm(len(rows), generator=generator)[:anchors].sort().values.to(rows.device)
    found = neighbors_of(rows, picks, k)
    return Neighborhoods(picks, torch.cat([picks[:, None], found.indices], dim=1), found.distances)


def local_frames(
    rows: Float[Tensor, "n d"], found: Neighborhoods, dimension: int, dtype: torch.dtype | None = None
) -> LocalFrames:
    """Local PCA through the Gram matrix of each neighbourhood, which is small where the width is large.

    Differences to the anchor are multiplied in ``dtype`` (by default the rows' own, float32 at least) and centred in
    float64: variances are good to about 1e-6 of the largest in float32, 1e-13 in float64.
    """
    dtype = dtype or torch.promote_types(rows.dtype, torch.float32)
    count, members, width = *found.members.shape, rows.shape[1]
    rank = min(members - 1, width)
    make = partial(torch.empty, device=rows.device)
    tangents = make((count, width, dimension), dtype=dtype)
    variances, scores = make((count, rank), dtype=torch.float64), make((count, members, rank), dtype=dtype)
    # One core for each worker: LAPACK on matrices this small only loses time by sharing one among cores.
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        batch = max(1, BATCH_NUMBERS // (members * width))
        for at in range(0, count, batch):
            here = slice(at, at + batch)
            # index_select gathers at twice the speed of rows[...]
            local = rows.index_select(0, found.members[here].reshape(-1)).unflatten(0, (-1, members)).to(dtype)
            local -= local[:, :1].clone()
            unit = _unit(local)
            gram = torch.bmm(local, local.transpose(1, 2)).double()
            gram -= gram.mean(dim=1, keepdim=True)  # about the mean: the anchor was only a near point to start from
            gram -= gram.mean(dim=2, keepdim=True)
            values = _batched_eigh(gram.to(dtype), pool, scores[here]).double().clamp_min(0)
            if not bool((values[:, 0] > 0).all()):
                raise DegenerateError("a neighbourhood holds copies of one row only: it has no shape; drop duplicates")
            variances[here] = values * unit.double().square() / (members - 1)
            # Scores sum to zero along each axis, so that these columns do not see which point was taken off.
            tangents[here] = _orthonormal(torch.bmm(local.transpose(1, 2), scores[here, :, :dimension]))
    return LocalFrames(tangents, variances, scores, found)


def _unit(local: Float[Tensor, "m k1 d"]) -> Float[Tensor, "m 1"]:
    """Bring differences, in place, to a size whose squares stay in range where they are not; the unit they are in."""
    size = torch.linalg.vector_norm(local[:, 1:], dim=2)
    small, large = (1e-140, 1e140) if local.dtype == torch.float64 else (1e-15, 1e15)
    low, high = size[:, -1].aminmax()  # the farthest member: nearer ones may lie as near as they like
    if small < float(low) and float(high) < large:
        return size.new_ones(len(size), 1)
    unit = local.abs().amax(dim=(1, 2))[:, None]
    unit = torch.where(unit > 0, unit, 1)
    local /= unit[:, :, None]
    return unit


def _orthonormal(columns: Float[Tensor, "m d r"]) -> Float[Tensor, "m d r"]:
    """Orthonormal columns of the same spans, leading one kept, by Cholesky of the small Gram matrices.

    Twice, since once leaves the square of the condition behind. A span that is smaller than asked is refused.
    """
    unit = torch.eye(columns.shape[2], dtype=columns.dtype, device=columns.device)
    for _ in range(2):
        small = columns.transpose(1, 2) @ columns
        length = small.diagonal(dim1=1, dim2=2).sqrt()
        if not bool((length > 1e-6 * length[:, :1]).all()):
            raise DegenerateError(
                f"some neighbourhoods have fewer than {columns.shape[2]} dimensions; ask for a smaller dimension"
            )
        small = small / length[:, :, None] / length[:, None, :]
        columns = columns / length[:, None, :]
        if float((small - unit).abs().max()) <= 16 * torch.finfo(columns.dtype).eps:
            return columns  # eigenvectors of well separated size come out orthonormal: nothing to mend
        factor = torch.linalg.cholesky(small.double())
        columns = torch.linalg.solve_triangular(factor.transpose(1, 2), columns.double(), upper=True, left=False).to(
            columns.dtype
        )
    return columns


def _batched_eigh(
    gram: Float[Tensor, "m k k"], pool: ThreadPoolExecutor, vectors: Float[Tensor, "m k r"]
) -> Float[Tensor, "m r"]:
    """Leading eigenvalues of many small matrices, descending; their vectors are written into ``vectors``.

    LAPACK takes them one by one, so threads share them out. It sorts upwards, so matrices go in with their sign turned.
    """
    rank = vectors.shape[2]
    shares = torch.get_num_threads() if gram.device.type == "cpu" else 1

    def solve(part: tuple[Tensor, Tensor]) -> Tensor:
        values, found = torch.linalg.eigh(part[0])
        part[1].copy_(found[:, :, :rank])
        return values[:, :rank].neg_()

    parts = zip(gram.neg_().tensor_split(shares), vectors.tensor_split(shares), strict=True)
    return torch.cat(list(pool.map(solve, parts)))
