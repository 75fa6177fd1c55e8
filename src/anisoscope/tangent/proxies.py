"""Tangent proxies: an orthonormal basis ``Q (D,K)`` fitted to rows, by six named fits.

| kind | the span |
|---|---|
| ``seminmf`` | of the K concepts of a semi-NMF |
| ``pca`` | of the K directions of largest variance |
| ``local_pca`` | of the K directions that local tangent frames, averaged as projectors, share most |
| ``ica`` | of the mixing directions of the K least Gaussian among 2K independent components |
| ``kmeans`` | of K + 1 centroids about the mean (their weighted sum is zero there, so that they span K) |
| ``random`` | of K Gaussian directions: uniform (Haar), whatever the rows |

Rows are held in memory; of a file or a stream a uniform sample is (``measures.base.CLOUD_ROWS`` rows at most).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.measures.dimension import two_nn
from anisoscope.rows import Rows
from anisoscope.stats.precision import in_full_precision
from anisoscope.tangent.cloud import Cloud
from anisoscope.tangent.ica import fast_ica
from anisoscope.tangent.kmeans import k_means
from anisoscope.tangent.seminmf import fit_seminmf
from anisoscope.tangent.spans import check_rank, orthonormal, principal_angles, with_fixed_sign

Kind = Literal["seminmf", "pca", "local_pca", "ica", "kmeans", "random"]
Mode = Literal["refit", "frozen", "drift"]
RankRule = Literal["fixed", "explained", "dimension"]


@dataclass(frozen=True)
class Proxy:
    """A fitted basis with orthonormal columns, float64.

    ``facts``: ``explained`` (share of the rows' variance inside the span), ``mean_share`` (share of the squared length
    of their mean inside it: near 1, the span holds the mean itself), and what belongs to the fit: ``error``,
    ``sparsity``, ``iterations`` and so on. ``state`` is what a warm start of the same kind needs.
    """

    kind: str
    basis: Float[Tensor, "d k"]
    rank: int
    facts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    state: Any = None

    @property
    def width(self) -> int:
        """Columns of the rows it was fitted to."""
        return self.basis.shape[0]


@in_full_precision
def fit_proxy(
    rows: RowsLike | Rows | Cloud,
    kind: str,
    rank: int,
    *,
    mask: MaskLike = None,
    seed: int = 0,
    warm: Proxy | None = None,
    centre: bool = True,
) -> Proxy:
    """Fit one proxy. ``warm`` is an earlier one of the same kind and rank, from which the fit goes on.

    ``centre=False`` lets ``seminmf``, ``pca`` and ``kmeans`` see the rows with their mean, which the span then holds
    for the most part; the other kinds look at differences of rows or at none. Rows that several proxies are fitted to
    may come as a ``Cloud`` with the same seed and centre: what fits share is then computed once.
    """
    _check(kind, centre)
    cloud = rows if isinstance(rows, Cloud) else Cloud(rows, mask, seed=seed, centre=centre)
    if cloud is rows and (cloud.seed != seed or cloud.centre != centre or mask is not None):
        raise OptionError(
            f"the cloud has seed {cloud.seed} and centre {cloud.centre}, asked for are seed {seed} and centre {centre}"
            + ("" if mask is None else ", and a mask comes too late; mask the rows before")
        )
    return _fit(cloud, kind, rank, warm)


def fit_ranks(
    rows: RowsLike | Rows,
    kind: str,
    ranks: Iterable[int],
    *,
    mask: MaskLike = None,
    seed: int = 0,
    centre: bool = True,
) -> dict[int, Proxy]:
    """Proxies of several ranks, as ``fit_proxy`` makes each; what they share is computed once.

    That is the rows' mean and centred copy, the decomposition behind ``pca`` and ``ica``, the frames of ``local_pca``.
    """
    _check(kind, centre)
    wanted = list(ranks)
    if not wanted:
        raise OptionError("a sweep over ranks needs at least one rank")
    cloud = Cloud(rows, mask, seed=seed, centre=centre)
    for rank in wanted:  # before the first dear fit
        check_rank(rank, cloud.width)
    # The largest first, so that its decomposition serves the smaller ones.
    found = {rank: _fit(cloud, kind, rank, None) for rank in sorted(set(wanted), reverse=True)}
    return {rank: found[rank] for rank in wanted}


def _check(kind: str, centre: bool) -> None:
    choose("proxy", kind, _FITS)
    if not centre and kind not in ("seminmf", "pca", "kmeans"):
        raise OptionError(f"a proxy {kind!r} never sees the mean of the rows; leave centre=True")


def _fit(cloud: Cloud, kind: str, rank: int, warm: Proxy | None) -> Proxy:
    check_rank(rank, cloud.width)
    if warm is not None and (warm.kind, warm.width, warm.rank) != (kind, cloud.width, rank):
        raise ShapeError(
            f"a warm start needs a proxy {kind!r} of width {cloud.width} and rank {rank}; "
            f"got {warm.kind!r} of width {warm.width} and rank {warm.rank}"
        )
    cloud.require_spread()
    found = _FITS[kind](cloud, rank, None if warm is None else warm.state)
    shares = {"explained": cloud.explained(found.basis), "mean_share": cloud.mean_share(found.basis)}
    facts = MappingProxyType({**shares, **found.facts})
    return replace(found, facts=facts, notes=(*cloud.notes, *found.notes))


def _seminmf(cloud: Cloud, rank: int, state: Any) -> Proxy:
    # Centred already, and in float64 where a mean matters; the fit takes the rows as they are.
    start = None if state is None else state.to(cloud.rows.device)
    fit = fit_seminmf(cloud.fitted, rank, centre=False, seed=cloud.seed, concepts=start)
    facts = {"error": fit.error, "sparsity": fit.sparsity, "iterations": float(fit.iterations)}
    return Proxy("seminmf", orthonormal(fit.concepts.T), rank, facts, fit.notes, fit.concepts)


def _pca(cloud: Cloud, rank: int, state: Any) -> Proxy:
    values, vectors = _leading(cloud, rank, rank)
    total = float(cloud.fitted.square().sum(dtype=torch.float64))
    facts = {"error": max(1 - float(values.sum()) / total, 0.0)}
    return Proxy("pca", with_fixed_sign(vectors), rank, facts)


def _leading(cloud: Cloud, count: int, at_least: int) -> tuple[Tensor, Tensor]:
    values, vectors = cloud.leading(count)
    if len(values) < at_least:
        raise DegenerateError(
            f"the rows span {len(values)} directions where {at_least} were asked for; "
            f"take a rank of at most {len(values)}, or more rows"
        )
    return values, vectors


def _local_pca(cloud: Cloud, rank: int, state: Any) -> Proxy:
    frames = cloud.pooled_frames
    values, vectors = torch.linalg.eigh(frames.projector)
    real = int((values > 1e-6 * values[-1]).sum())
    if real < rank:
        raise DegenerateError(f"local frames span {real} directions where {rank} were asked for; take a smaller rank")
    facts = {
        "local_dimension": float(frames.dimension),
        "frames_held": float(values[-rank:].sum()) / frames.dimension,
    }
    notes = (f"{frames.anchors:,} local frames of {frames.dimension} columns",)
    return Proxy("local_pca", with_fixed_sign(vectors[:, -rank:].flip(1)), rank, facts, notes)


def _ica(cloud: Cloud, rank: int, state: Any) -> Proxy:
    # The span of K components out of K whitened ones is PCA's, whatever the components: twice as many leave a choice.
    values, vectors = _leading(cloud, min(2 * rank, cloud.width), rank)
    spread = (values / cloud.n).sqrt()
    white = cloud.centred @ (vectors / spread).to(cloud.centred.dtype)
    start = None
    if state is not None and len(state.T) == len(values):
        start = (vectors.T @ state.to(vectors) / spread[:, None]).T
    parts = fast_ica(white, seed=cloud.seed, start=start)
    mixing = vectors @ (spread[:, None] * parts.unmixing.T)
    facts = {"negentropy": float(parts.negentropy[:rank].mean()), "iterations": float(parts.iterations)}
    notes = () if parts.converged else (f"FastICA stopped after {parts.iterations} iterations before it settled",)
    if len(values) == rank:
        notes = (*notes, f"the rows have only {rank} directions: this is the span of PCA")
    return Proxy("ica", orthonormal(mixing[:, :rank]), rank, facts, notes, mixing)


def _kmeans(cloud: Cloud, rank: int, state: Any) -> Proxy:
    cells = rank + 1 if cloud.centre else rank
    if cloud.n < cells:
        raise TooFewRowsError(f"a k-means proxy of rank {rank} needs at least {cells} rows, got {cloud.n}")
    start = None if state is None else state.to(cloud.rows.device)
    if start is not None and len(start) != cells:
        raise OptionError("a warm start of a k-means proxy must be centred as this one is")
    found = k_means(cloud.fitted, cells, seed=cloud.seed, centres=start)
    counts = torch.bincount(found.labels, minlength=cells).double()
    order = (counts * found.centres.square().sum(dim=1)).argsort(descending=True, stable=True)
    # About the weighted mean of the centroids, which a sample of the rows leaves a little off zero.
    middle = counts @ found.centres / counts.sum() if cloud.centre else 0.0
    columns = (found.centres - middle)[order[:rank]].T
    facts = {"error": found.error, "iterations": float(found.iterations)}
    return Proxy("kmeans", orthonormal(columns.to(cloud.centred.dtype)), rank, facts, (), found.centres)


def _random(cloud: Cloud, rank: int, state: Any) -> Proxy:
    generator = torch.Generator().manual_seed(cloud.seed)  # on the CPU: the same draw on every device
    columns = torch.randn(cloud.width, rank, generator=generator, dtype=torch.float64)
    return Proxy("random", orthonormal(columns.to(cloud.rows.device)), rank)


_FITS: dict[str, Callable[[Cloud, int, Any], Proxy]] = {
    "seminmf": _seminmf,
    "pca": _pca,
    "local_pca": _local_pca,
    "ica": _ica,
    "kmeans": _kmeans,
    "random": _random,
}
KINDS = tuple(_FITS)
"""The names of the fits."""


@dataclass(frozen=True)
class RankChoice:
    """A rank and the number behind it: the share of variance it explains, or the dimension that was rounded up."""

    rank: int
    rule: str
    value: float
    notes: tuple[str, ...] = ()


def choose_rank(
    rows: RowsLike | Rows,
    rule: RankRule = "fixed",
    *,
    mask: MaskLike = None,
    rank: int = 16,
    share: float = 0.9,
    most: int | None = None,
    seed: int = 0,
) -> RankChoice:
    """A rank K for proxies of these rows.

    - ``fixed``: ``rank``. ``value`` is the rank.
    - ``explained``: the fewest principal directions that hold ``share`` of the variance. ``value`` is what they hold.
    - ``dimension``: the TwoNN dimension, rounded up. ``value`` is the dimension.

    ``most`` is a limit, and never more than the width is chosen; a note says where a limit was met.
    """
    choose("rule", rule, ("fixed", "explained", "dimension"))
    if most is not None and most < 1:
        raise OptionError(f"most must be at least 1, got {most}")
    cloud = Cloud(rows, mask, seed=seed)
    if rule == "fixed":
        return RankChoice(check_rank(rank, cloud.width), rule, float(rank))
    cloud.require_spread()
    if rule == "explained":
        if not 0 < share <= 1:
            raise OptionError(f"share must lie between 0 and 1, got {share}")
        values, _ = cloud.leading(cloud.width)
        held = values.cumsum(0) / values.sum()
        found = min(int((held < share * (1 - 1e-12)).sum()) + 1, len(held))
        value = float(held[found - 1])
    else:
        value = two_nn(cloud.rows, seed=seed).value
        found = max(1, math.ceil(value))
    limit = cloud.width if most is None else min(most, cloud.width)
    notes = (*cloud.notes, f"{found} directions by the rule, cut to {limit}") if found > limit else cloud.notes
    return RankChoice(min(found, limit), rule, value, notes)


def drift(before: Proxy, after: Proxy) -> Float[Tensor, "k"]:
    """Principal angles between two proxies in degrees, ascending."""
    return principal_angles(before.basis, after.basis)


@dataclass(frozen=True)
class ProxyTracker:
    """A proxy followed through training. ``update`` returns the next tracker; this one stays as it was.

    Modes: ``refit`` fits at every probe, from the last fit on; ``frozen`` does so during the first ``freeze_share`` of
    training and then keeps the last of these; ``drift`` is ``refit`` and says how far the span turned since the last
    probe.
    """

    kind: str
    rank: int
    mode: Mode = "refit"
    freeze_share: float = 0.3
    seed: int = 0
    centre: bool = True
    proxy: Proxy | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        choose("mode", self.mode, ("refit", "frozen", "drift"))
        _check(self.kind, self.centre)
        if not 0 < self.freeze_share <= 1:
            raise OptionError(f"freeze_share is a share of training between 0 and 1, got {self.freeze_share}")

    def update(
        self, step: int, rows: RowsLike | Rows | Cloud, progress_share: float | None = None, *, mask: MaskLike = None
    ) -> tuple[ProxyTracker, Proxy, Float[Tensor, "k"] | None]:
        """The tracker after a probe at ``step``, the proxy to use there, and in mode ``drift`` the angles it turned by.

        ``progress_share`` is the share of training that is done, from 0 to 1; mode ``frozen`` needs it.
        """
        if self.step is not None and step <= self.step:
            raise OptionError(f"probes come in order: step {step} after step {self.step}")
        if self.mode == "frozen":
            if progress_share is None or not 0 <= progress_share <= 1:
                raise OptionError(f"mode 'frozen' needs the share of training done, from 0 to 1; got {progress_share}")
            if self.proxy is not None and progress_share > self.freeze_share:
                return replace(self, step=step), self.proxy, None
        found = fit_proxy(rows, self.kind, self.rank, mask=mask, seed=self.seed, warm=self.proxy, centre=self.centre)
        if self.mode == "frozen" and progress_share is not None and progress_share > self.freeze_share:
            late = f"first fitted at {progress_share:.0%} of training, after the {self.freeze_share:.0%} asked for"
            found = replace(found, notes=(*found.notes, late))
        turned = drift(self.proxy, found) if self.mode == "drift" and self.proxy is not None else None
        return replace(self, proxy=found, step=step), found, turned
