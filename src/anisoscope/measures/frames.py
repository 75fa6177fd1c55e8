"""Neighbourhoods of rows and their tangent frames, by local PCA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, OptionError, TooFewRowsError
from anisoscope.measures.base import Duplicates, Needs, Workspace
from anisoscope.measures.search import neighbors_of
from anisoscope.rows import as_rows
from anisoscope.stats.precision import crew, in_full_precision

BATCH_NUMBERS = (1 << 23, 1 << 20)  # numbers gathered at a time; on the CPU so few that they stay in cache


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


@in_full_precision
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

    def fill(here: slice) -> None:
        # index_select gathers at twice the speed of rows[...]
        local = rows.index_select(0, found.members[here, 1:].reshape(-1)).unflatten(0, (-1, members - 1)).to(dtype)
        local -= rows.index_select(0, found.members[here, 0])[:, None].to(dtype)
        unit = _unit(local)
        # Differences to the anchor: its own is zero, and so are its products.
        gram = torch.zeros((len(local), members, members), dtype=torch.float64, device=rows.device)
        gram[:, 1:, 1:] = torch.bmm(local, local.transpose(1, 2))
        gram -= gram.mean(dim=1, keepdim=True)  # about the mean: the anchor was only a near point to start from
        gram -= gram.mean(dim=2, keepdim=True)
        # LAPACK sorts upwards, so matrices go in with their sign turned.
        values, vectors = torch.linalg.eigh(gram.neg_().to(dtype))
        values, scores[here] = values[:, :rank].neg_().double().clamp_min(0), vectors[:, :, :rank]
        if not bool((values[:, 0] > 0).all()):
            raise DegenerateError("a neighbourhood holds copies of one row only: it has no shape; drop duplicates")
        variances[here] = values * unit.double().square() / (members - 1)
        # Scores sum to zero along each axis, so that these columns do not see which point was taken off.
        spans = torch.bmm(vectors[:, 1:, :dimension].transpose(1, 2), local)
        tangents[here] = _orthonormal(spans.transpose(1, 2))

    few = max(1, BATCH_NUMBERS[rows.device.type == "cpu"] // (members * width))
    parts = [slice(at, at + few) for at in range(0, count, few)]
    # One core for each worker: matrices this small only lose time by being shared among cores.
    with crew(torch.get_num_threads()) as each:
        each(fill, parts)
    return LocalFrames(tangents, variances, scores, found)


def _unit(local: Float[Tensor, "m k d"]) -> Float[Tensor, "m 1"]:
    """Bring differences (the largest last), in place, to a size whose squares stay in range; the unit they are in."""
    size = torch.linalg.vector_norm(local[:, -1], dim=1)  # the farthest: nearer ones may lie as near as they like
    small, large = (1e-140, 1e140) if local.dtype == torch.float64 else (1e-15, 1e15)
    low, high = size.aminmax()
    if small < float(low) and float(high) < large:
        return torch.ones_like(size)[:, None]
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
