"""What is told of the sites whose tangent analysis was made in one go, from the numbers that came off the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.estimate import Estimate
from anisoscope.monitoring.tangent_parts import DRIFT, OVERLAP, P_VALUE, SPLIT, Asked, Here, Result, plain
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.tangent.crossed import CrossedTest
from anisoscope.tangent.energy import VARIANCE, VARIANCE_KNOWN, enrichment_of
from anisoscope.tangent.proxies import Proxy
from anisoscope.tangent.seminmf import fit_notes
from anisoscope.tangent.stacked import Layout, isoscore_shares, resolved, tests_of_sites
from anisoscope.tangent.stacked_fits import MAX_ITER, Fits
from anisoscope.tangent.stacked_types import Types, correlation_estimates, distance_estimates
from anisoscope.tangent.units import GIVEN

Told: TypeAlias = dict[str, Mapping[Name, Result]]
ByType: TypeAlias = dict[Name, Result] | None


def told(
    asked: Asked, views: Sequence[SiteView], layout: Layout, types: Types | AnisoscopeError | None,
    fits: Mapping[str, Fits], found: Mapping[str, np.ndarray], by_type: Sequence[ByType] | None,
) -> Told:  # fmt: skip
    """Results by site of those that are ordinary; their trackers are moved on. ``by_type`` is what ``told_by_type``
    has said of all sites, None where there is nothing to be told together."""
    halves = [{name[2:]: value for name, value in found.items() if name.startswith(f"{half} ")} for half in (0, 1)]
    assert views[0].g is not None
    here = Here(views[0], views[0].g, layout.halves, {}, {}, False)  # as all of them are: of one shape and one probe
    rank, width = asked.rank, views[0].x.shape[1]
    tests = tests_of_sites(halves, layout, rank, width, asked.draws, (asked._note(here),))
    clear = np.logical_and.reduce([resolved(half, rank, width) for half in halves])
    good = [at for at in _ordinary(found, halves, tests) if clear[at] and (by_type is None or by_type[at] is not None)]
    if not good:
        return {}
    shares = isoscore_shares(halves, [len(rows) for rows in layout.halves.rows], width, good)
    results = [dict[Name, Result]() for _ in good]
    _tell_facts(results, asked, here, fits, found, good)
    _tell_energy(results, asked, here, [tests[site] for site in good], shares, found, good)
    pairs = _proxies(asked, fits, found, good)
    for place, (one, site) in enumerate(zip(results, good, strict=True)):
        view = views[site]
        assert view.g is not None
        here = Here(view, view.g, layout.halves, pairs[place], asked._known(view.site), False)
        for part in (asked._reader, asked._matrices):
            one |= asked._attempted(part, here)
        if isinstance(types, AnisoscopeError):
            one["tangent: by_type"] = types
        else:
            known = None if by_type is None else by_type[site]
            one |= asked._attempted(asked._by_type, here) if known is None else known
    # Last of all: sites whose results are lost to a full device are fitted again, and must not be ahead of themselves.
    for pair_of, site in zip(pairs, good, strict=True):
        for kind, pair in pair_of.items():
            asked._keep(views[site], kind, pair)
    return {views[site].site: one for one, site in zip(results, good, strict=True)}


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
    results: Sequence[dict[Name, Result]], asked: Asked, here: Here, fits: Mapping[str, Fits],
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
            for one, site in zip(results, sites, strict=True):
                one[name] = plain(numbers[site], n, method)


def _tell_energy(
    results: Sequence[dict[Name, Result]], asked: Asked, here: Here,
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
        for one, site, own, share in zip(results, sites, tests, shares, strict=True):
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


def told_by_type(found: Mapping[str, np.ndarray], types: Types, layout: Layout) -> list[ByType]:
    """``TangentAnalysis._by_type`` of all sites, None where sums are not finite or nothing varies."""
    own, overall = ([(name, where) for where in layout.labels] for name in ("own_distance", "global_distance"))
    sums, drawn = found["sums"], found["drawn"]
    ordinary = np.isfinite(drawn[1, :, :, 0]).all(axis=0)
    if not ordinary.any():
        return [None] * len(ordinary)
    if not ordinary.all():
        sums, drawn = sums[:, ordinary], drawn[:, :, ordinary]
    results: list[dict[Name, Result]] = []
    for bins in distance_estimates(sums, types):
        pairs = [pair for keys in zip(zip(own, overall, strict=True), bins, strict=True) for pair in zip(*keys)]
        results.append({key: one for key, one in pairs if one is not None})
    correlations = correlation_estimates(drawn, types)
    for centroid, kinds in zip(("own", "global"), correlations, strict=True):
        for kind, column in zip(("pearson", "spearman"), kinds, strict=True):
            name = f"frequency.{centroid}_{kind}"
            for one, value in zip(results, column, strict=True):
                if value is not None:
                    one[name] = value
    each = iter(results)
    return [next(each) if good else None for good in ordinary.tolist()]
