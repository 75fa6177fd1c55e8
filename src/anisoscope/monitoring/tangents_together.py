"""The tangent analysis of all sites of a look in one go, where they can be stacked; see ``tangent.stacked``.

Sites that are anything but ordinary (sizes out of range, lost ranks, gradients of nothing) are left out,
and ``TangentAnalysis`` takes them one by one as ever: so errors and their words are the same on every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.estimate import Estimate
from anisoscope.measures.later import beside, fetched, leading_later, rejoined, side_stream
from anisoscope.measures.leading import BLOCK
from anisoscope.monitoring.stacking import with_room
from anisoscope.monitoring.tangent_parts import DRIFT, OVERLAP, P_VALUE, SPLIT, Asked, Here, Result, labels_of, plain
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.rows import power_of_two_scale
from anisoscope.tangent.crossed import CrossedTest
from anisoscope.tangent.energy import VARIANCE, VARIANCE_KNOWN, enrichment_of
from anisoscope.tangent.proxies import Proxy
from anisoscope.tangent.seminmf import fit_notes
from anisoscope.tangent.stacked import (
    Layout,
    isoscore_shares,
    mean_angles,
    seen_by_half,
    tests_of_sites,
)
from anisoscope.tangent.stacked_fits import MAX_ITER, Centred, Fits, kmeans_starts, pca_fits, seminmf_fits
from anisoscope.tangent.stacked_types import (
    Types,
    TypeSums,
    correlation_estimates,
    distance_estimates,
    type_sums,
)
from anisoscope.tangent.units import GIVEN, Halves

STACKED = ("seminmf", "pca")


@dataclass(frozen=True)
class Prepared:
    """What depends on the tokens of the probe alone; kept from look to look."""

    ids: Tensor
    sequences: Tensor
    layout: Layout
    types: Types | AnisoscopeError | None

    def fits(self, view: SiteView) -> bool:
        """Whether these are the tokens of a view."""
        same = torch.equal(self.ids, view.ids) and torch.equal(self.sequences, view.sequences)
        return same and self.layout.order[0].device == view.x.device


def alike(views: Sequence[SiteView]) -> bool:
    """Whether the rows of all views can stand in one tensor, gradients beside them."""
    if not views or any(view.g is None for view in views):
        return False
    first = views[0]
    return all(
        view.x.shape == first.x.shape
        and view.g is not None
        and view.g.shape == first.x.shape
        and view.x.dtype == first.x.dtype == view.g.dtype
        and view.x.device == first.x.device == view.g.device
        and view.step == first.step
        and (view.ids is first.ids or torch.equal(view.ids, first.ids))
        and (view.sequences is first.sequences or torch.equal(view.sequences, first.sequences))
        for view in views
    )


def prepared(asked: Asked, view: SiteView, bootstraps: int) -> Prepared:
    """Halves, groups and types of the tokens of a view."""
    device = view.x.device
    halves = Halves.of(view.sequences, asked.seed, device)
    bins, labels, types = None, list[str](), None
    if asked._bins is not None and asked.counts is not None:
        bins, labels = asked._bins.bin_of(view.ids), labels_of(asked._bins)
        try:
            types = Types.of(view.ids, asked._bins, asked.counts, bootstraps, asked.seed, device)
        except AnisoscopeError as error:  # told at each site; the other parts have something to say all the same
            return Prepared(view.ids, view.sequences, Layout.of(halves, bins, labels), error)
    return Prepared(view.ids, view.sequences, Layout.of(halves, bins, labels), types)


def stacked_results(asked: Asked, views: Sequence[SiteView], ready: Prepared) -> dict[str, Mapping[Name, Result]]:
    """Results of the sites that are ordinary, by site; trackers are moved on for these alone."""
    found: dict[str, Mapping[Name, Result]] = {}
    for some, first in ((_warm(asked, views), False), (_cold(asked, views), True)):
        alone: dict[str, Mapping[Name, Result]] = {}
        found |= with_room(partial(_results, asked, some, ready, first=first), alone)
    return found


def _results(
    asked: Asked, views: Sequence[SiteView], ready: Prepared, *, first: bool
) -> dict[str, Mapping[Name, Result]]:
    """Of sites that all have a proxy from an earlier look, or all have none (``first``)."""
    if not views:
        return {}
    x, g = (torch.stack([getattr(view, name) for view in views]) for name in ("x", "g"))
    scales = _scales(x, g)
    if None in scales:
        views = [view for view, scale in zip(views, scales, strict=True) if scale is not None]
        if not views:
            return {}
        x, g = (torch.stack([getattr(view, name) for view in views]) for name in ("x", "g"))
    factors = [scale for scale in scales if scale is not None]
    if any(scale != 1 for scale in factors):
        g *= torch.tensor(factors, dtype=g.dtype, device=g.device)[:, None, None]  # shares do not see the factor
    device, rank, (sites, _, width) = x.device, asked.rank, x.shape
    layout, types = ready.layout, ready.types
    centred = Centred.of(x, layout.halves.rows)
    later = _begin_pca(asked, views, centred)
    summed = _begin_types(x, types)
    fits = _seminmf(asked, views, centred, first=first)
    sums = summed()
    fits |= later()
    # By site, kind, half.
    bases = torch.stack([fits[kind].basis.view(sites, 2, width, rank) for kind in asked.proxies], dim=1)
    table: dict[str, Tensor] = {}
    for half in (0, 1):
        seed = 2 * asked.seed + 1 - half
        seen = seen_by_half(g, layout, half, bases[:, :, 1 - half], asked.draws, seed)
        table |= {f"{half} {name}": value for name, value in vars(seen).items()}
    if sums is not None:
        table |= {"sums": sums.sums, "drawn": sums.drawn}
    before = None if first else _bases_before(asked, views, device)
    table |= _facts(asked, fits, bases, before) | _variances(centred, bases)
    found = fetched(table)
    halves = [{name[2:]: value for name, value in found.items() if name.startswith(f"{half} ")} for half in (0, 1)]
    assert views[0].g is not None
    here = Here(views[0], views[0].g, layout.halves, {}, {}, False)  # as all of them are: of one shape and one probe
    tests = tests_of_sites(halves, layout, rank, width, asked.draws, (asked._note(here),))
    good = _ordinary(found, halves, tests)
    if not good:
        return {}
    shares = isoscore_shares(halves, [len(rows) for rows in layout.halves.rows], width, good)
    told = [dict[Name, Result]() for _ in good]
    _tell_facts(told, asked, here, fits, found, good)
    _tell_energy(told, asked, here, [tests[site] for site in good], shares, found, good)
    by_type = _of_types(found, types, layout, good) if sums is not None and isinstance(types, Types) else None
    pairs = _proxies(asked, fits, found, good)
    for place, (one, site) in enumerate(zip(told, good, strict=True)):
        view = views[site]
        assert view.g is not None
        here = Here(view, view.g, layout.halves, pairs[place], asked._known(view.site), False)
        for part in (asked._reader, asked._matrices):
            one |= asked._attempted(part, here)
        if isinstance(types, AnisoscopeError):
            one["tangent: by_type"] = types
        else:
            one |= asked._attempted(asked._by_type, here) if by_type is None else by_type[place]
    # Last of all: sites whose results are lost to a full device are fitted again, and must not be ahead of themselves.
    for pair_of, site in zip(pairs, good, strict=True):
        for kind, pair in pair_of.items():
            asked._keep(views[site], kind, pair)
    return {views[site].site: one for one, site in zip(told, good, strict=True)}


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


def _scales(x: Float[Tensor, "s n d"], g: Float[Tensor, "s n d"]) -> list[float | None]:
    """What brings the gradients of each view into range, as ``units.in_range``; None where it is not ordinary."""
    ends = torch.stack([end for rows in (x, g) for end in torch.aminmax(rows.flatten(1), dim=1)])
    of_x, of_g = ends.double().cpu().view(2, 2, -1).abs().amax(dim=1).tolist()
    return [
        power_of_two_scale(g) if math.isfinite(x) and power_of_two_scale(x) == 1 and 0 < g < math.inf else None
        for x, g in zip(of_x, of_g, strict=True)
    ]


def _begin_pca(asked: Asked, views: Sequence[SiteView], centred: Centred) -> Callable[[], dict[str, Fits]]:
    """Begin the decompositions, the dearest step there is to wait for, near where those of the last look ended."""
    if "pca" not in asked.proxies:
        return dict
    held = [block for view in views if (block := asked._blocks.get(view.site)) is not None]
    shape = (2, centred.rows.shape[2])
    ready = len(held) == len(views) and all(
        one.shape[:2] == shape and one.device == centred.mean.device for one in held
    )
    later = leading_later(centred.scatter, asked.rank, torch.cat(held) if ready else None)

    def finish() -> dict[str, Fits]:
        found = later()
        if found[1].shape[2] == BLOCK:
            asked._blocks.update(zip((view.site for view in views), found[1].split(2), strict=True))
        return {"pca": pca_fits(centred, asked.rank, found)}

    return finish


def _begin_types(x: Float[Tensor, "s n d"], types: Types | AnisoscopeError | None) -> Callable[[], TypeSums | None]:
    """Begin the sums over token types, where there are any to be told."""
    if not isinstance(types, Types) or not types.ordinary:
        return lambda: None
    stream = side_stream("types", x)
    with beside(stream):
        found = type_sums(x, types)

    def finish() -> TypeSums:
        rejoined(stream, x.device, vars(found).values())
        return found

    return finish


def _seminmf(asked: Asked, views: Sequence[SiteView], centred: Centred, *, first: bool) -> dict[str, Fits]:
    if "seminmf" not in asked.proxies:
        return {}
    if first:
        return {"seminmf": seminmf_fits(centred, kmeans_starts(centred, asked.rank, asked.seed))}
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
    sites, _, _, width, _ = bases.shape
    scatter = centred.scatter.view(sites, 1, 2, width, width)
    other = bases.flip(2)
    return {
        "variance": ((scatter @ other) * other).sum(dim=(3, 4)),
        "variance of all": centred.total.view(sites, 2),
    }


def _ordinary(
    found: Mapping[str, np.ndarray], halves: Sequence[Mapping[str, np.ndarray]],
    tests: Sequence[Sequence[Mapping[str, CrossedTest | str]]],
) -> list[int]:  # fmt: skip
    """Sites of which everything can be told; the numbers of the others may be anything."""
    sites = len(tests)
    flags = [value.reshape(sites, 2).all(axis=1) for name, value in found.items() if name.endswith(".ordinary")]
    for half in halves:
        flags += [np.isfinite(value.reshape(sites, -1)).all(axis=1) for value in half.values()]
        flags += [(half["traces"] > 1e-12).all(axis=(1, 2)), half["whole"][:, 0] > 0]
    flags += [(found["variance"] > 0).all(axis=(1, 2)), np.isfinite(found["angles"]).all(axis=(0, 2))]
    if "drawn" in found:
        flags.append(np.isfinite(found["drawn"][1, :, :, 0]).all(axis=0))
    good = np.logical_and.reduce(flags).tolist()
    return [at for at in range(sites) if good[at] and all(isinstance(one[""], CrossedTest) for one in tests[at])]


def _proxies(
    asked: Asked, fits: Mapping[str, Fits], found: Mapping[str, np.ndarray], sites: Sequence[int]
) -> list[dict[str, tuple[Proxy, Proxy]]]:
    pairs: list[dict[str, tuple[Proxy, Proxy]]] = [{} for _ in sites]
    notes = [fit_notes(settled, f"max_iter={MAX_ITER}", 0, asked.rank) for settled in (False, True)]
    for kind in asked.proxies:
        fit = fits[kind]
        basis = fit.basis.unbind()
        state = [None] * len(basis) if fit.state is None else fit.state.unbind()
        facts = {name: found[f"{kind}.{name}"].tolist() for name in fit.facts}
        settled = [True] * len(basis) if fit.settled is None else found[f"{kind}.settled"].astype(bool).tolist()
        for pair, site in zip(pairs, sites, strict=True):
            one, two = (
                Proxy(
                    kind, basis[at], asked.rank, {name: values[at] for name, values in facts.items()},
                    notes[settled[at]], state[at],
                )
                for at in (2 * site, 2 * site + 1)
            )  # fmt: skip
            pair[kind] = (one, two)
    return pairs


def _tell_facts(
    told: Sequence[dict[Name, Result]], asked: Asked, here: Here, fits: Mapping[str, Fits],
    found: Mapping[str, np.ndarray], sites: Sequence[int],
) -> None:  # fmt: skip
    """``TangentAnalysis._facts`` of these sites."""
    n = len(here.g)
    for at, kind in enumerate(asked.proxies):
        columns: list[tuple[str, np.ndarray, str]] = [
            (fact, found[f"{kind}.{fact}"].reshape(-1, 2), f"{fact} of the fit")
            for fact in ("explained", "sparsity")
            if fact in fits[kind].facts
        ]
        if kind != "pca" and "overlap" in found:
            columns.append(("pca_overlap", found["overlap"][:, at], OVERLAP))
        angles = found["angles"][:, :, at].T
        columns.append(("split_angle", angles[:, :1], SPLIT))
        if angles.shape[1] > 1:
            columns.append(("drift", angles[:, 1:], DRIFT))
        for what, values, method in columns:
            name, numbers = f"{kind}.{what}", values.tolist()
            for one, site in zip(told, sites, strict=True):
                one[name] = plain(numbers[site], n, method)


def _tell_energy(
    told: Sequence[dict[Name, Result]], asked: Asked, here: Here,
    tests: Sequence[Sequence[Mapping[str, CrossedTest | str]]], shares: Sequence[Sequence[Estimate]],
    found: Mapping[str, np.ndarray], sites: Sequence[int],
) -> None:  # fmt: skip
    """``TangentAnalysis._activation`` of these sites; the estimates of the tests have the note already."""
    note = asked._note(here)
    n = sum(len(rows) for rows in here.halves.rows)
    # By site, kind and half: the share of the variance in the basis of the other half.
    inside = found["variance"] / found["variance of all"][:, None]
    variances = ((inside[:, :, 0] + inside[:, :, 1]) / 2).tolist()
    method, notes, p_notes = f"{VARIANCE}, cross-fitted", (VARIANCE_KNOWN, note), (note,)
    for at, kind in enumerate(asked.proxies):
        name = f"{kind}.activation"
        keys = {
            label: [(f"{name}.{what}", label or "all") for what in ("share", "control", "ratio")]
            for label in tests[0][at]
        }
        for one, site, own, share in zip(told, sites, tests, shares, strict=True):
            for label, test in own[at].items():
                if isinstance(test, CrossedTest):
                    first, second, third = keys[label]
                    one[first], one[second], one[third] = test.share, test.control, test.ratio
            whole = own[at][""]
            assert isinstance(whole, CrossedTest)
            one[f"{name}.p"] = Estimate(value=whole.p, stderr=None, n=whole.share.n, method=P_VALUE, notes=p_notes)
            variance = Estimate(value=variances[site][at], stderr=None, n=n, method=method, notes=notes)
            one[f"{kind}.variance_share"] = variance
            one[f"{name}.enrichment"] = enrichment_of(whole.share, variance, (GIVEN,))
            one[f"{name}.isoscore_share"] = share[at]


def _of_types(
    found: Mapping[str, np.ndarray], types: Types, layout: Layout, sites: Sequence[int]
) -> list[dict[Name, Result]]:
    """``TangentAnalysis._by_type`` of these sites."""
    own, overall = ([(name, where) for where in layout.labels] for name in ("own_distance", "global_distance"))
    told: list[dict[Name, Result]] = []
    sums, drawn = found["sums"], found["drawn"]
    if len(sites) < sums.shape[1]:
        sums, drawn = sums[:, sites], drawn[:, :, sites]
    for bins in distance_estimates(sums, types):
        pairs = [pair for keys in zip(zip(own, overall, strict=True), bins, strict=True) for pair in zip(*keys)]
        told.append({key: one for key, one in pairs if one is not None})
    correlations = correlation_estimates(drawn, types)
    for centroid, kinds in zip(("own", "global"), correlations, strict=True):
        for kind, column in zip(("pearson", "spearman"), kinds, strict=True):
            name = f"frequency.{centroid}_{kind}"
            for one, value in zip(told, column, strict=True):
                if value is not None:
                    one[name] = value
    return told
