"""The tangent analysis of all sites of a look in one go, where they can be stacked; see ``tangent.stacked``.

Sites that are anything but ordinary (sizes out of range, lost ranks, gradients of nothing) are left out,
and ``TangentAnalysis`` takes them one by one as ever: so errors and their words are the same on every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.estimate import Estimate
from anisoscope.measures.later import eigh_later, fetched
from anisoscope.monitoring.tangent_parts import DRIFT, OVERLAP, SPLIT, Asked, Here, Result, labels_of, plain
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.rows import power_of_two_scale
from anisoscope.tangent.crossed import CrossedTest
from anisoscope.tangent.energy import enrichment_of, variance_estimate
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
    correlation_estimates,
    distance_estimates,
    type_sums,
)
from anisoscope.tangent.units import Halves, mean_of_halves

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
        found |= _results(asked, some, ready, first=first)
    return found


def _results(
    asked: Asked, views: Sequence[SiteView], ready: Prepared, *, first: bool
) -> dict[str, Mapping[Name, Result]]:
    """Of sites that all have a proxy from an earlier look, or all have none (``first``)."""
    sizes = [(view, scale) for view, scale in zip(views, _scales(views), strict=True) if scale is not None]
    if not sizes:
        return {}
    views = [view for view, _ in sizes]
    x, g = (torch.stack([getattr(view, name) for view in views]) for name in ("x", "g"))
    for site, (_, scale) in enumerate(sizes):
        if scale != 1:
            g[site] *= scale  # shares do not see the factor
    device, rank, (sites, _, width) = x.device, asked.rank, x.shape
    layout, types = ready.layout, ready.types
    centred = Centred.of(x, layout.halves.rows)
    later = _begin_pca(asked, centred)
    fits = _seminmf(asked, views, centred, first=first)
    sums = type_sums(x, types) if isinstance(types, Types) and types.ordinary else None
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
    tests = tests_of_sites(halves, layout, rank, width, asked.draws)
    shares = [isoscore_shares(one, len(layout.halves.rows[half]), width) for half, one in enumerate(halves)]
    distances = correlations = None
    if sums is not None and isinstance(types, Types):
        distances, correlations = distance_estimates(found["sums"], types), correlation_estimates(found["drawn"], types)
    results: dict[str, Mapping[Name, Result]] = {}
    for site, view in enumerate(views):
        if not _is_ordinary(found, halves, tests[site], site):
            continue
        pairs = _proxies(asked, fits, found, site)
        assert view.g is not None
        here = Here(view, view.g, layout.halves, pairs, asked._known(view.site), False)
        one: dict[Name, Result] = dict(_told_facts(asked, here, found, site))
        one |= dict(_told_energy(asked, here, tests[site], [half[site] for half in shares], found, site))
        for part in (asked._reader, asked._matrices):
            one |= asked._attempted(part, here)
        if isinstance(types, AnisoscopeError):
            one["tangent: by_type"] = types
        elif distances is None or correlations is None:
            one |= asked._attempted(asked._by_type, here)
        else:
            one |= dict(_told_types(distances[site], [[kind[site] for kind in two] for two in correlations], layout))
        results[view.site] = one
        for kind, pair in pairs.items():
            asked._keep(view, kind, pair)
    return results


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


def _scales(views: Sequence[SiteView]) -> list[float | None]:
    """What brings the gradients of each view into range, as ``units.in_range``; None where it is not ordinary."""
    if not views:
        return []
    sizes = []
    for view in views:
        for rows in (view.x, view.g):
            assert rows is not None
            sizes += list(rows.aminmax())
    numbers = torch.stack(sizes).double().cpu().view(len(views), 2, 2).abs().amax(dim=2).tolist()
    return [
        power_of_two_scale(g) if math.isfinite(x) and power_of_two_scale(x) == 1 and 0 < g < math.inf else None
        for x, g in numbers
    ]


def _begin_pca(asked: Asked, centred: Centred) -> Callable[[], dict[str, Fits]]:
    """Begin the decompositions, the dearest step there is to wait for."""
    if "pca" not in asked.proxies:
        return dict
    later = eigh_later(centred.scatter)
    return lambda: {"pca": pca_fits(centred, asked.rank, later())}


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
    """Of each half and kind: variance inside the basis of the other half, all of it, and the same of the mean."""
    sites, _, _, width, _ = bases.shape
    scatter, mean = centred.scatter.view(sites, 1, 2, width, width), centred.mean.view(sites, 1, 2, 1, width)
    other = bases.flip(2)
    return {
        "variance": ((scatter @ other) * other).sum(dim=(3, 4)),
        "variance of all": centred.total.view(sites, 2),
        "mean inside": (mean @ other).square().sum(dim=(3, 4)),
        "mean": mean.square().sum(dim=(1, 3, 4)),
    }


def _is_ordinary(
    found: Mapping[str, np.ndarray], halves: Sequence[Mapping[str, np.ndarray]],
    tests: Sequence[Mapping[str, CrossedTest | str]], site: int,
) -> bool:  # fmt: skip
    flags = [value[2 * site : 2 * site + 2].all() for name, value in found.items() if name.endswith(".ordinary")]
    finite = all(np.isfinite(one[name][site]).all() for one in halves for name in one)
    left = finite and all((one["traces"][site] > 1e-12).all() and one["whole"][site, 0] > 0 for one in halves)
    tested = all(isinstance(one[""], CrossedTest) for one in tests)
    told = "drawn" not in found or bool(np.isfinite(found["drawn"][1, :, site, 0]).all())
    varied = bool((found["variance"][site] > 0).all() and np.isfinite(found["angles"][:, site]).all())
    return bool(all(flags) and left and tested and told and varied)


def _proxies(
    asked: Asked, fits: Mapping[str, Fits], found: Mapping[str, np.ndarray], site: int
) -> dict[str, tuple[Proxy, Proxy]]:
    pairs = {}
    for kind in asked.proxies:
        fit, each = fits[kind], []
        for at in (2 * site, 2 * site + 1):
            facts = {name: float(found[f"{kind}.{name}"][at]) for name in fit.facts}
            settled = fit.settled is None or bool(found[f"{kind}.settled"][at])
            notes = fit_notes(settled, f"max_iter={MAX_ITER}", 0, asked.rank)
            state = None if fit.state is None else fit.state[at]
            each.append(Proxy(kind, fit.basis[at], asked.rank, facts, notes, state))
        pairs[kind] = (each[0], each[1])
    return pairs


def _told_facts(asked: Asked, here: Here, found: Mapping[str, np.ndarray], site: int) -> Iterator[tuple[Name, Result]]:
    for at, (kind, pair) in enumerate(here.pairs.items()):
        for fact in ("explained", "sparsity"):
            if all(fact in proxy.facts for proxy in pair):
                yield f"{kind}.{fact}", plain([proxy.facts[fact] for proxy in pair], here, f"{fact} of the fit")
        if kind != "pca" and "overlap" in found:
            yield f"{kind}.pca_overlap", plain(found["overlap"][site, at].tolist(), here, OVERLAP)
        split, *turned = found["angles"][:, site, at].tolist()
        yield f"{kind}.split_angle", plain([split], here, SPLIT)
        if turned:
            yield f"{kind}.drift", plain(turned, here, DRIFT)


def _told_energy(
    asked: Asked, here: Here, tests: Sequence[Mapping[str, CrossedTest | str]],
    shares: Sequence[Sequence[Estimate]], found: Mapping[str, np.ndarray], site: int,
) -> Iterator[tuple[Name, Result]]:  # fmt: skip
    for at, kind in enumerate(here.pairs):
        yield from asked._told_tests(here, kind, tests[at])
        each = []
        for half, rows in enumerate(here.halves.rows):
            inside, n = float(found["variance"][site, at, half]), len(rows)
            total, size = float(found["variance of all"][site, half]), float(found["mean"][site, half])
            raw = (inside + n * float(found["mean inside"][site, at, half])) / (total + n * size)
            each.append(variance_estimate(inside / total, raw, n))
        variance = replace(mean_of_halves(*each), notes=(*each[0].notes, asked._note(here)))
        whole = tests[at][""]
        assert isinstance(whole, CrossedTest)
        yield f"{kind}.variance_share", variance
        yield f"{kind}.activation.enrichment", enrichment_of(whole.share, variance)
        yield f"{kind}.activation.isoscore_share", mean_of_halves(shares[0][at], shares[1][at])


def _told_types(
    distances: Sequence[tuple[Estimate | None, Estimate | None]], correlations: Sequence[Sequence[Estimate | None]],
    layout: Layout,
) -> Iterator[tuple[Name, Result]]:  # fmt: skip
    for where, (own, overall) in zip(layout.labels, distances, strict=True):
        if own is not None:
            yield ("own_distance", where), own
        if overall is not None:
            yield ("global_distance", where), overall
    for centroid, kinds in zip(("own", "global"), correlations, strict=True):
        for kind, one in zip(("pearson", "spearman"), kinds, strict=True):
            if one is not None:
                yield f"frequency.{centroid}_{kind}", one
