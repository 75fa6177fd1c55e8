"""The tangent analysis of all sites of a look in one go, where they can be stacked; see ``tangent.stacked``.

Sites that are anything but ordinary (sizes out of range, lost ranks, gradients of nothing) are left out,
and ``TangentAnalysis`` takes them one by one as ever: so errors and their words are the same on every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.kernels import sent
from anisoscope.measures.cells import Cells, CellSums
from anisoscope.measures.later import beside, fetched_later, leading_later, side_stream
from anisoscope.measures.leading import BLOCK
from anisoscope.monitoring.sharing import Shared
from anisoscope.monitoring.stacking import with_room
from anisoscope.monitoring.tangent_parts import Asked, labels_of
from anisoscope.monitoring.tangents_told import ByType, Told, told, told_by_type
from anisoscope.monitoring.views import SiteView
from anisoscope.rows import largest_sizes, power_of_two_scale
from anisoscope.tangent.stacked import Layout, mean_angles, seen_by_halves
from anisoscope.tangent.stacked_fits import Centred, Fits, kmeans_starts, pca_fits, seminmf_fits
from anisoscope.tangent.stacked_types import Types, type_sums
from anisoscope.tangent.units import Halves

STACKED = ("seminmf", "pca")


@dataclass(frozen=True)
class Prepared:
    """What depends on the tokens of the probe alone; kept from look to look."""

    ids: Tensor
    sequences: Tensor
    layout: Layout
    cells: Cells
    types: Types | AnisoscopeError | None

    def fits(self, view: SiteView) -> bool:
        """Whether these are the tokens of a view."""
        same = torch.equal(self.ids, view.ids) and torch.equal(self.sequences, view.sequences)
        return same and self.layout.order[0].device == view.x.device


def alike(views: Sequence[SiteView]) -> bool:
    """Whether the rows of all views can stand in one tensor, and gradients beside them in another, as soon as there are
    any."""
    if not views:
        return False
    first, form = views[0], _form(views[0].x)
    return sum(view.g is None for view in views) in (0, len(views)) and all(
        _form(view.x) == form
        and (view.g is None or _form(view.g) == form)
        and view.step == first.step
        and (view.ids is first.ids or torch.equal(view.ids, first.ids))
        and (view.sequences is first.sequences or torch.equal(view.sequences, first.sequences))
        for view in views
    )


def _form(rows: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return rows.shape, rows.dtype, rows.device


def prepared(asked: Asked, views: Sequence[SiteView], known: Prepared | None, bootstraps: int) -> Prepared | None:
    """What there is to prepare for these views, or what is ``known`` from the last look where their tokens are the
    same; None where they cannot be taken together."""
    if asked.mode != "refit" or not set(asked.proxies) <= set(STACKED) or not alike(views):
        return None
    if known is not None and known.fits(views[0]):
        return known
    try:
        return _prepared(asked, views[0], bootstraps)
    except AnisoscopeError:  # too few sequences, unknown ids: told site by site
        return None


def _prepared(asked: Asked, view: SiteView, bootstraps: int) -> Prepared:
    """Halves, groups and types of the tokens of a view."""
    device = view.x.device
    halves = Halves.of(view.sequences, asked.seed, device)
    bins, labels = None, list[str]()
    types: Types | AnisoscopeError | None = None
    if asked._bins is not None and asked.counts is not None:
        bins, labels = asked._bins.bin_of(view.ids), labels_of(asked._bins)
        try:
            types = Types.of(view.ids, asked._bins, asked.counts, bootstraps, asked.seed, device)
        except AnisoscopeError as error:  # told at each site; the other parts have something to say all the same
            types = error
    cells = Cells.of(halves.rows, len(view.x))
    return Prepared(view.ids, view.sequences, Layout.of(halves, bins, labels), cells, types)


def begin_stacked(
    asked: Asked, views: Sequence[SiteView], ready: Prepared, shared: Shared | None = None
) -> Callable[[], Told]:
    """Begin with the sites that are ordinary; the function returned gives their results by site, and moves trackers on
    for these alone. What is ``shared`` is not made again."""
    begun = [
        with_room(partial(_begin, asked, some, ready, shared, first=first), _nothing)
        for some, first in ((_warm(asked, views), False), (_cold(asked, views), True))
    ]

    def finish() -> Told:
        found: Told = {}
        for one in begun:
            found |= with_room(one, _nothing())
        return found

    return finish


def _nothing() -> Told:
    return {}


def _begin(
    asked: Asked, views: Sequence[SiteView], ready: Prepared, shared: Shared | None, *, first: bool
) -> Callable[[], Told]:
    """Of sites that all have a proxy from an earlier look, or all have none (``first``)."""
    while views:
        begun = _attempt(asked, views, ready, Rows.of(views, shared, ready.cells), first=first)
        if callable(begun):
            return begun
        views = begun  # without those that are not ordinary; all else of the attempt is gone
    return _nothing


@dataclass(frozen=True)
class Rows:
    """Rows of some sites, what gives their gradients, sums over halves of the rows where they are known, and what says,
    later, which factor brings each site's gradients into range, as ``units.in_range``: None where the site is not
    ordinary.

    ``second`` takes second moments of these gradients, as they are, to the measures that wait for them.
    """

    x: Float[Tensor, "s n d"]
    g: Callable[[], Float[Tensor, "s n d"]]
    sums: CellSums | None
    scales: Callable[[], list[float | None]]
    second: Callable[[Float[Tensor, "s d d"]], None] | None

    @classmethod
    def of(cls, views: Sequence[SiteView], shared: Shared | None, cells: Cells) -> Rows:
        """What is shared of these views is taken, the rest is made here. Gradients that are shared are in range."""
        places = [] if shared is None else [shared.sites.index(view.site) for view in views]
        of_all = shared is not None and places == list(range(len(shared.sites)))
        some = None if shared is None or of_all else sent(places, shared.x, torch.int64)

        def picked(rows: Tensor) -> Tensor:
            return rows if some is None else rows.index_select(0, some)

        near, sums = (None, None) if shared is None else (shared.gradients, shared.sums)
        x = _stacked([view.x for view in views]) if shared is None else picked(shared.x)
        asked_for = {"x": largest_sizes(x) if sums is None else picked(sums.size)}
        if near is None:
            own = _stacked([view.g for view in views])
            asked_for["g"] = largest_sizes(own)
        later = fetched_later(asked_for)

        def scales() -> list[float | None]:
            found = later()
            if near is not None:
                longest = near.longest
                factors = [1.0 if 0 < longest[place] < math.inf else None for place in places]
            else:
                factors = [power_of_two_scale(one) if 0 < one < math.inf else None for one in found["g"].tolist()]
            fine = [math.isfinite(one) and power_of_two_scale(one) == 1 for one in found["x"].tolist()]
            return [factor if good else None for factor, good in zip(factors, fine, strict=True)]

        by_half = None if sums is None or sums.by_cell is None or sums.by_cell.cells is not cells else sums.by_cell
        if by_half is not None and some is not None:
            by_half = by_half.of_sites(some)
        second = None if near is None or near.second is None else partial(near.second.give, places)
        # Lengths of what is shared are waited for: not before all that asks for states alone is begun.
        return cls(x, (lambda: own) if near is None else lambda: picked(near.rows), by_half, scales, second)


def _stacked(each: Sequence[Tensor | None]) -> Float[Tensor, "s n d"]:
    return torch.stack([one for one in each if one is not None])


def _attempt(
    asked: Asked, views: Sequence[SiteView], ready: Prepared, rows: Rows, *, first: bool
) -> Callable[[], Told] | Sequence[SiteView]:
    """The same if all of these are of ordinary size; those that are, if not all."""
    x, rank, (sites, _, width) = rows.x, asked.rank, rows.x.shape
    layout, types = ready.layout, ready.types
    centred = Centred.of(x, layout.halves.rows, rows.sums)
    later = _begin_pca(asked, views, centred)
    summed = _begin_types(x, types, layout)
    scales = rows.scales()
    if None in scales:
        return [view for view, scale in zip(views, scales, strict=True) if scale is not None]
    g, factors = rows.g(), [scale for scale in scales if scale is not None]
    if any(scale != 1 for scale in factors):
        g *= sent(factors, g)[:, None, None]  # shares do not see the factor; and these are nobody else's
    fits = _seminmf(asked, views, centred, first=first)
    fits |= later()
    # By site, kind, half.
    bases = torch.stack([fits[kind].basis.view(sites, 2, width, rank) for kind in asked.proxies], dim=1)
    table: dict[str, Tensor] = {}
    for half, seen in enumerate(seen_by_halves(g, layout, bases, asked.draws, asked.seed, rows.second)):
        table |= {f"{half} {name}": value for name, value in vars(seen).items()}
    before = None if first else _bases_before(asked, views, x.device)
    table |= _facts(asked, fits, bases, before) | _variances(centred, bases)
    found = fetched_later(table)

    def finish() -> Told:
        by_type = summed()  # while the device goes on with the rest
        return told(asked, views, layout, types, fits, found(), by_type)

    return finish


def _warm(asked: Asked, views: Sequence[SiteView]) -> list[SiteView]:
    """Views whose fits are to be made now and have something to start from."""
    found = []
    for view in views:
        trackers = [asked._trackers.get((view.site, kind, half)) for kind in asked.proxies for half in (0, 1)]
        held = [one for one in trackers if one is not None and one.step is not None and one.step < view.step]
        ready = len(held) == len(trackers) and all(
            one.proxy is not None and (one.kind != "seminmf" or isinstance(one.proxy.state, Tensor))
            and one.proxy.width == view.x.shape[1] and one.mode == "refit"
            for one in held
        )  # fmt: skip
        if ready:
            found.append(view)
    return found


def _cold(asked: Asked, views: Sequence[SiteView]) -> list[SiteView]:
    """Views that nothing was fitted for yet."""
    known = {site for site, _, _ in asked._trackers}
    return [view for view in views if view.site not in known and asked.mode == "refit"]


def _begin_pca(asked: Asked, views: Sequence[SiteView], centred: Centred) -> Callable[[], dict[str, Fits]]:
    """Begin the decompositions, the dearest step there is to wait for, near where those of the last look ended."""
    if "pca" not in asked.proxies:
        return dict
    held = [block for view in views if (block := asked._blocks.get(view.site)) is not None]
    shape = (2, centred.rows.shape[2])
    ready = len(held) == len(views) and all(
        one.shape[:2] == shape and one.device == centred.mean.device for one in held
    )
    # What is not finite would end all decompositions. Nobody has asked yet whether it is; such a site is left out.
    finite, eye = centred.total < torch.inf, torch.eye(shape[1], dtype=torch.float64, device=centred.mean.device)
    scatter = torch.where(finite[:, None, None], centred.scatter, eye)
    later = leading_later(scatter, asked.rank, torch.cat(held) if ready else None)

    def finish() -> dict[str, Fits]:
        found = later()
        if found[1].shape[2] == BLOCK:
            asked._blocks.update(zip((view.site for view in views), found[1].split(2), strict=True))
        return {"pca": pca_fits(centred, asked.rank, found)}

    return finish


def _begin_types(
    x: Float[Tensor, "s n d"], types: Types | AnisoscopeError | None, layout: Layout
) -> Callable[[], list[ByType] | None]:
    """Begin the sums over token types, where there are any to be told; the function returned tells them."""
    if not isinstance(types, Types) or not types.ordinary:
        return lambda: None
    with beside(side_stream("types", x)):
        later = fetched_later(vars(type_sums(x, types)))
    return lambda: told_by_type(later(), types, layout)


def _seminmf(asked: Asked, views: Sequence[SiteView], centred: Centred, *, first: bool) -> dict[str, Fits]:
    if "seminmf" not in asked.proxies:
        return {}
    if first:
        # Without momentum, as a first fit alone: with it fewer codes stay zero.
        return {"seminmf": seminmf_fits(centred, kmeans_starts(centred, asked.rank, asked.seed), momentum=0.0)}
    states = [
        proxy.state.to(centred.mean)
        for view in views
        for half in (0, 1)
        if (proxy := asked._trackers[view.site, "seminmf", half].proxy) is not None
    ]
    return {"seminmf": seminmf_fits(centred, torch.stack(states))}


def _bases_before(asked: Asked, views: Sequence[SiteView], device: torch.device) -> Tensor:
    """The last look's bases, by site, kind and half."""
    found = [
        proxy.basis.to(device)
        for view in views
        for kind in asked.proxies
        for half in (0, 1)
        if (proxy := asked._trackers[view.site, kind, half].proxy) is not None
    ]
    return torch.stack(found).view(len(views), len(asked.proxies), 2, *found[0].shape)


def _facts(asked: Asked, fits: Mapping[str, Fits], bases: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    sites, kinds = bases.shape[:2]
    found = {f"{kind}.{name}": value for kind, fit in fits.items() for name, value in fit.facts.items()}
    found |= {f"{kind}.ordinary": fit.ordinary for kind, fit in fits.items()}
    found |= {f"{kind}.settled": fit.settled for kind, fit in fits.items() if fit.settled is not None}
    pairs = [(bases[:, :, 0], bases[:, :, 1])]
    if before is not None:
        pairs += [(before[:, :, half], bases[:, :, half]) for half in (0, 1)]
    one, two = (torch.cat(side).flatten(0, 1) for side in zip(*pairs, strict=True))
    found["angles"] = mean_angles(one, two).view(len(pairs), sites, kinds)
    if "pca" in asked.proxies:
        leading = bases[:, list(asked.proxies).index("pca")][:, None]
        found["overlap"] = (bases.transpose(3, 4) @ leading).square().sum(dim=(3, 4)) / bases.shape[4]
    return found


def _variances(centred: Centred, bases: Tensor) -> dict[str, Tensor]:
    """Of each half and kind: variance inside the basis of the other half, and all of it."""
    sites, kinds, _, width, rank = bases.shape
    other = bases.flip(2).permute(0, 2, 3, 1, 4).flatten(3)  # all kinds beside each other: a product of all of them
    inside = (centred.scatter.view(sites, 2, width, width) @ other).mul_(other).unflatten(3, (kinds, rank))
    return {"variance": inside.sum(dim=(2, 4)).mT, "variance of all": centred.total.view(sites, 2)}
