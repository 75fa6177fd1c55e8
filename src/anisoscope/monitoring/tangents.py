"""The tangent analysis as part of a monitor: at every look and site, proxies fitted from activations meet gradients.

    Monitor(model, probe=batch, analyses={"tangent": TangentAnalysis(counts=counts, steps=1000)}, ...)

Names of the results: ``<proxy>.<gradient>.<what>`` and ``<proxy>.<what>``; docs/tangent.md lists them. Bases fitted on
one half of the probe's sequences are tested on the other half, always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from anisoscope.errors import AnisoscopeError, OptionError, SiteError, TooFewRowsError, choose
from anisoscope.estimate import Estimate
from anisoscope.measures.cells import Cells
from anisoscope.monitoring.sharing import OfAll, Shared
from anisoscope.monitoring.tangent_parts import (
    DRIFT,
    OVERLAP,
    P_VALUE,
    SPLIT,
    Anisotropy,
    Here,
    Result,
    labels_of,
    plain,
)
from anisoscope.monitoring.tangents_together import Prepared, begin_stacked, prepared
from anisoscope.monitoring.tangents_told import Told
from anisoscope.monitoring.views import Name, SiteView
from anisoscope.runs.records import Curve
from anisoscope.stats.moments import Moments
from anisoscope.stats.precision import unrecorded
from anisoscope.tangent.cloud import Cloud
from anisoscope.tangent.controls import check_complement
from anisoscope.tangent.crossed import CrossedTest, crossed_tests
from anisoscope.tangent.energy import enrichment_of, side_share, variance_within
from anisoscope.tangent.frequency import centroid_distances, distances_by_frequency, frequency_correlations
from anisoscope.tangent.nulls import PermutedNull, cross_fit, expected_share, permuted_signal_null, reader_share
from anisoscope.tangent.proxies import KINDS as PROXIES
from anisoscope.tangent.proxies import Proxy, ProxyTracker, fit_proxy
from anisoscope.tangent.refereeing import referee_results
from anisoscope.tangent.spans import overlap, principal_angles
from anisoscope.tangent.units import Halves, in_range, mean_of_halves
from anisoscope.text.frequency import FrequencyBins, TokenCounts, frequency_bins

GRADIENTS = ("activation", "reader", "writer", "update", "embedding")
REFEREE = ("last", "always", "never")
BOOTSTRAPS = 199
PERMUTATIONS = 99


@dataclass
class TangentAnalysis:
    """Energy of gradients along tangent proxies against matched controls, at every look.

    ``counts`` are those of the training text, for results by token frequency; without them there are none. ``steps``
    is the length of the training: the look at that step is the last one, and ``freeze_share`` is a share of it.
    ``gradients`` beyond ``activation`` are fetched at their price; ``reader`` brings its permuted-signal null.
    ``referee`` says at which looks the dear checks run: angles to independent local tangents and normals, curvature
    along the proxy, replacements, ``permutations`` of the signal, the spectral share, and proxies of all ``ranks``.
    """

    counts: TokenCounts | None = None
    steps: int | None = None
    proxies: Sequence[str] = ("seminmf", "pca")
    rank: int = 16
    gradients: Sequence[str] = ("activation",)
    draws: int = 199
    bins: int = 5
    mode: str = "refit"
    freeze_share: float = 0.3
    ranks: Sequence[int] = ()
    referee: str = "last"
    permutations: int = PERMUTATIONS
    seed: int = 0
    _trackers: dict[tuple[str, str, int], ProxyTracker] = field(default_factory=dict, repr=False)
    _bins: FrequencyBins | None = field(default=None, repr=False)
    _prepared: Prepared | None = field(default=None, repr=False, compare=False)
    _blocks: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, given, known in (("proxy", self.proxies, PROXIES), ("gradient", self.gradients, GRADIENTS)):
            if isinstance(given, str) or not given:
                raise OptionError(f"give a list of one {name} or more, such as [{known[0]}], got {given!r}")
            for one in given:
                choose(name, one, known)
        choose("mode", self.mode, ("refit", "frozen"))
        choose("referee", self.referee, REFEREE)
        if self.rank < 1 or min(self.ranks, default=1) < 1:
            raise OptionError(f"a rank is 1 or more, got {[self.rank, *self.ranks]}")
        if self.draws < 19:
            raise OptionError(f"draws={self.draws}: with fewer than 19 controls no p-value can reach 0.05")
        if self.steps is None and (self.mode == "frozen" or self.referee == "last"):
            raise OptionError("mode='frozen' and referee='last' need to know the length of the training: give steps=")
        if self.counts is not None:
            self._bins = frequency_bins(self.counts, self.bins)

    @property
    def needs(self) -> tuple[str, ...]:
        """What a monitor should fetch."""
        return tuple(sorted({"activation", *("signal" if one == "reader" else one for one in self.gradients)}))

    def check(self, widths: Mapping[str, int]) -> None:
        """Refuse a rank that does not fit into some site, before anything is trained."""
        for site, width in widths.items():
            for rank in (self.rank, *self.ranks):
                try:
                    check_complement(width, rank)
                except OptionError as error:
                    raise OptionError(f"site {site!r}: {error}") from None

    def check_rows(self, sequences: Int64[Tensor, "n"]) -> None:
        """Refuse rows of these sequences if no look could use them: each half must hold a fit of every rank."""
        halves = Halves.of(sequences, self.seed, "cpu")
        fewest, largest = min(len(rows) for rows in halves.rows), max((self.rank, *self.ranks))
        if fewest <= largest:  # about their mean, so many rows span one direction less
            raise TooFewRowsError(f"half of its sequences hold {fewest} rows; rank {largest} needs {largest + 1}")

    def __call__(self, view: SiteView) -> Mapping[Name, Result]:
        """All results at one site."""
        with unrecorded(view.x.device):
            return self._told(view)

    def _told(self, view: SiteView) -> Mapping[Name, Result]:
        if view.g is None:
            raise SiteError(f"site {view.site!r} {view.no_gradient or 'gave no gradient'}")
        halves = Halves.of(view.sequences, self.seed, view.x.device)
        before = self._known(view.site)
        parts: Sequence[Tensor | Cloud] = [view.x[rows] for rows in halves.rows]
        if self.mode != "frozen":  # which may have nothing to fit
            parts = [Cloud(part, seed=self.seed) for part in parts]
        pairs = {kind: self._fitted(view, parts, kind) for kind in self.proxies}
        here = Here(view, view.g, halves, pairs, before, self._due(view))
        found: dict[Name, Result] = {}
        for part in (self._facts, self._activation, self._reader, self._matrices, self._by_type, self._refereed):
            found |= self._attempted(part, here)
        return found

    def _attempted(self, part: Callable[[Here], Iterator[tuple[Name, Result]]], here: Here) -> dict[Name, Result]:
        found: dict[Name, Result] = {}
        try:
            found.update(part(here))
        except AnisoscopeError as error:  # what one part cannot say, the others still can
            found[f"tangent: {part.__name__.strip('_')}"] = error
        return found

    def together(self, views: Sequence[SiteView]) -> OfAll:
        """All results of all sites by site, an exception where a site gave none.

        On a GPU ordinary sites share their work, and what they say is what each says alone, up to rounding; semi-NMF
        starts from another k-means there.
        """
        return self.begin_together(views)()

    def begin_together(self, views: Sequence[SiteView], shared: Shared | None = None) -> Callable[[], OfAll]:
        """The same in two parts, so that a GPU has work while something else is told."""
        on_gpu = bool(views) and views[0].x.device.type == "cuda"
        stacked = self.begin_stacked(views, shared) if on_gpu else dict

        def finish() -> OfAll:
            found: dict[str, Mapping[Name, Result] | Exception] = dict(stacked())
            for view in views:
                if view.site not in found:
                    try:
                        found[view.site] = self(view)
                    except Exception as error:  # one site must not end the others, nor keep its tensors by their frames
                        found[view.site] = error.with_traceback(None)
            return found

        return finish

    def stacked(self, views: Sequence[SiteView]) -> Told:
        """Results of those sites that can be taken together, on any device."""
        return self.begin_stacked(views)()

    def begin_stacked(self, views: Sequence[SiteView], shared: Shared | None = None) -> Callable[[], Told]:
        """Begin with those sites."""
        ready = self._ready(views)
        there = all(view.g is not None for view in views)
        return begin_stacked(self, views, ready, shared) if ready is not None and there else dict

    def shared_cells(self, views: Sequence[SiteView]) -> Cells | None:
        """The halves of the rows, whose sums fits start from; see ``sharing.Sharing``."""
        ready = self._ready(views)
        return None if ready is None else ready.cells

    def _ready(self, views: Sequence[SiteView]) -> Prepared | None:
        """What depends on the tokens alone; None where these sites cannot be taken together."""
        if any(self._due(view) for view in views):
            return None
        found = prepared(self, views, self._prepared, BOOTSTRAPS)
        self._prepared = found or self._prepared
        return found

    def _due(self, view: SiteView) -> bool:
        """Whether the dear checks are due."""
        return self.referee == "always" or (self.referee == "last" and view.step == self.steps)

    def state(self) -> dict[str, Tensor]:
        """What the next look starts from, as tensors to be saved."""
        found = {}
        for (site, kind, half), tracker in self._trackers.items():
            if tracker.proxy is not None:
                place = f"{site}/{kind}/{half}/{tracker.step}"
                found[f"{place}/basis"] = tracker.proxy.basis.cpu().clone(memory_format=torch.contiguous_format)
                if isinstance(tracker.proxy.state, Tensor):
                    found[f"{place}/state"] = tracker.proxy.state.cpu().clone(memory_format=torch.contiguous_format)
        return found

    def restore(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Go on from a saved state."""
        for name in (one for one in state if one.endswith("/basis")):
            site, kind, half, step, _ = name.rsplit("/", 4)
            basis, rest = state[name].to(device), state.get(name.removesuffix("basis") + "state")
            proxy = Proxy(kind, basis, basis.shape[1], state=None if rest is None else rest.to(device))
            if kind in self.proxies and proxy.rank == self.rank:
                self._trackers[site, kind, int(half)] = replace(self._tracker(kind), proxy=proxy, step=int(step))

    def _tracker(self, kind: str) -> ProxyTracker:
        return ProxyTracker(kind, self.rank, self.mode, self.freeze_share, self.seed)  # type: ignore[arg-type]

    def _known(self, site: str) -> dict[str, tuple[Proxy, Proxy]]:
        found = {}
        for kind in self.proxies:
            pair = [self._trackers.get((site, kind, half)) for half in (0, 1)]
            if pair[0] and pair[1] and pair[0].proxy and pair[1].proxy:
                found[kind] = (pair[0].proxy, pair[1].proxy)
        return found

    def _fitted(self, view: SiteView, parts: Sequence[Tensor | Cloud], kind: str) -> tuple[Proxy, Proxy]:
        progress = None if self.steps is None else min(1.0, view.step / self.steps)
        found = []
        for half, part in enumerate(parts):
            key = (view.site, kind, half)
            tracker = self._trackers.get(key) or self._tracker(kind)
            self._trackers[key], proxy, _ = tracker.update(view.step, part, progress)
            found.append(proxy)
        return found[0], found[1]

    def _keep(self, view: SiteView, kind: str, pair: tuple[Proxy, Proxy]) -> None:
        """Enter fits that were made elsewhere."""
        for half, proxy in enumerate(pair):
            key = (view.site, kind, half)
            tracker = self._trackers.get(key) or self._tracker(kind)
            # Not ``replace``, which takes twice as long: this is done for every site of a look.
            self._trackers[key] = ProxyTracker(
                tracker.kind, tracker.rank, tracker.mode, tracker.freeze_share, tracker.seed, tracker.centre, proxy,
                view.step,
            )  # fmt: skip

    def _note(self, here: Here) -> str:
        width = here.g.shape[1]
        return f"K={self.rank}, D={width}, chance {self.rank / width:.3g}, B={self.draws}"

    def _facts(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """Of the fits themselves: what they explain, how they turn from look to look, how far the halves differ."""
        leading, n = here.pairs.get("pca"), len(here.g)
        for kind, pair in here.pairs.items():
            for fact in ("explained", "sparsity"):
                if all(fact in proxy.facts for proxy in pair):
                    yield f"{kind}.{fact}", plain([proxy.facts[fact] for proxy in pair], n, f"{fact} of the fit")
            if leading is not None and kind != "pca":
                held = [overlap(one.basis, two.basis) for one, two in zip(pair, leading, strict=True)]
                yield f"{kind}.pca_overlap", plain(held, n, OVERLAP)
            apart = float(principal_angles(pair[0].basis, pair[1].basis).mean())
            yield f"{kind}.split_angle", plain([apart], n, SPLIT)
            if kind in here.before:
                turned = [
                    float(principal_angles(a.basis, b.basis).mean())
                    for a, b in zip(here.before[kind], pair, strict=True)
                ]
                yield f"{kind}.drift", plain(turned, n, DRIFT)

    def _activation(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """Energy shares and ratios, of all tokens and by frequency."""
        bins, labels = None, list[str]()
        if self._bins is not None:
            bins, labels = self._bins.bin_of(here.view.ids), labels_of(self._bins)
        found = crossed_tests(
            here.g, here.halves, here.bases, bins=bins, labels=labels, draws=self.draws, seed=self.seed
        )
        scatters = [Moments.of(in_range(here.view.x[rows], "activations")) for rows in here.halves.rows]
        left: Anisotropy | None = None
        for kind, tests in found.items():
            yield from self._told_tests(here, kind, tests)
            whole = tests[""]
            assert isinstance(whole, CrossedTest)
            # The basis of one half against the variance of the other: the same rows that its energy was tested on.
            pair = here.bases[kind]
            shares = [variance_within(scatters[half], pair[1 - half]) for half in (0, 1)]
            variance = replace(mean_of_halves(*shares), notes=(*shares[0].notes, self._note(here)))
            yield f"{kind}.variance_share", variance
            yield f"{kind}.activation.enrichment", enrichment_of(whole.share, variance)
            # Of all proxies at once, and here, so that what cannot be told loses nothing of the above.
            left = left or Anisotropy.of(here, self.draws, self.seed)
            yield f"{kind}.activation.isoscore_share", left.isoscore(kind)
            if here.last:
                yield f"{kind}.activation.spectral_share", left.spectral(here, kind, self.draws, self.seed)

    def _told_tests(
        self, here: Here, kind: str, tests: Mapping[str, CrossedTest | str]
    ) -> Iterator[tuple[Name, Result]]:
        """Share, control and ratio of all tokens and of each group, and the p-value of all tokens."""
        name, note = f"{kind}.activation", self._note(here)
        for label, test in tests.items():
            if isinstance(test, CrossedTest):
                where = label or "all"
                for what in ("share", "control", "ratio"):
                    estimate: Estimate = getattr(test, what)
                    yield (f"{name}.{what}", where), replace(estimate, notes=(*estimate.notes, note))
            elif not label:
                raise SiteError(f"no energy test at {here.view.site!r}: {test}")
        whole = tests[""]
        assert isinstance(whole, CrossedTest)
        yield f"{name}.p", Estimate(value=whole.p, stderr=None, n=whole.share.n, method=P_VALUE, notes=(note,))

    def _reader(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """The reader gradient of all maps that read the site, beside what permuted signals would show."""
        signals = [one.signal for one in here.view.readers if one.signal is not None]
        if "reader" not in self.gradients or not signals:
            return
        signal = torch.cat(signals, dim=1)
        for kind in here.pairs:
            shares, nulls, drawn = [], [], []
            for half, rows in enumerate(here.halves.rows):
                x, s, basis = here.view.x[rows], signal[rows], here.bases[kind][1 - half]
                groups = here.halves.units.index.to(rows.device)[rows]
                shares.append(reader_share(x, s, basis, groups=groups))
                nulls.append(expected_share(x, s, basis))
                if here.last:
                    drawn.append(self._permuted(x, s, basis, groups, half))
            share = mean_of_halves(*shares)
            yield f"{kind}.reader.share", replace(share, notes=(*share.notes, self._note(here)))
            null = sum(nulls) / 2
            method = "expected share of signals dealt out to other tokens"
            yield f"{kind}.reader.null", Estimate(value=null, stderr=None, n=share.n, method=method)
            if drawn:
                yield f"{kind}.reader.excess", mean_of_halves(drawn[0].excess, drawn[1].excess)
                p = min(1.0, 2 * min(one.p for one in drawn))
                rule = f"the smaller of two halves' p, doubled; {self.permutations} permutations each"
                yield f"{kind}.reader.p", Estimate(value=p, stderr=None, n=share.n, method=rule)
            else:
                words = "reader share - expected share of permuted signals"
                why = ("no error bar: permutations are drawn at the looks of the referee",)
                value = share.value - null
                yield f"{kind}.reader.excess", Estimate(value=value, stderr=None, n=share.n, method=words, notes=why)

    def _permuted(self, x: Tensor, s: Tensor, basis: Tensor, groups: Tensor, half: int) -> PermutedNull:
        seed = 2 * self.seed + half
        return permuted_signal_null(x, s, basis, permutations=self.permutations, seed=seed, groups=groups)

    def _matrices(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """Shares of whole matrices: writers, the optimiser's change, embedding rows."""
        view = here.view
        rows: dict[str, Tensor] = {}
        for name, maps in (("writer", view.writers), ("update", view.updates)):
            if name in self.gradients and maps:
                rows[name] = torch.cat([one.rows for one in maps]) if len(maps) > 1 else maps[0].rows
        if "embedding" in self.gradients and view.embedding is not None:
            rows["embedding"] = view.embedding.rows
        for name, matrix in rows.items():
            for kind, pair in here.bases.items():
                each = [side_share(matrix, basis.to(matrix.device)) for basis in pair]
                notes = (*each[0].notes, self._note(here))
                value = (each[0].value + each[1].value) / 2
                yield f"{kind}.{name}.share", replace(each[0], value=value, notes=notes)

    def _by_type(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """Distances to centroids by frequency, and their correlation with it."""
        if self._bins is None or self.counts is None:
            return
        x, ids = here.view.x, here.view.ids
        distances = centroid_distances(x, ids)
        for number, (own, overall) in enumerate(distances_by_frequency(x, ids, self._bins, distances=distances)):
            where = labels_of(self._bins)[number]
            if own is not None:
                yield ("own_distance", where), own
            if overall is not None:
                yield ("global_distance", where), overall
        found = frequency_correlations(x, ids, self.counts, bootstraps=BOOTSTRAPS, seed=self.seed, distances=distances)
        for name in ("own_pearson", "own_spearman", "overall_pearson", "overall_spearman"):
            value: Estimate | None = getattr(found, name)
            if value is not None:
                yield f"frequency.{name.replace('overall', 'global')}", value

    def _refereed(self, here: Here) -> Iterator[tuple[Name, Result]]:
        """The dear checks, where they are due."""
        if not here.last:
            return
        for kind, (first, _) in here.pairs.items():
            results = referee_results(here.view.x, here.g, here.halves, first.basis, draws=self.draws, seed=self.seed)
            for what, estimate in results.items():
                yield f"{kind}.{what}", estimate
            if self.ranks:
                yield f"{kind} ratio against rank", self._over_ranks(here, kind)

    def _over_ranks(self, here: Here, kind: str) -> Curve:
        ranks = tuple(sorted(set(self.ranks)))
        # So that the curve goes through the ratio that is told; other ranks of a frozen proxy are fitted now.
        known = {} if self.mode == "frozen" else {self.rank: here.pairs[kind]}
        found = cross_fit(
            here.view.x, here.g, here.view.sequences, lambda rows, rank: fit_proxy(rows, kind, rank, seed=self.seed),
            ranks=ranks, nested=kind == "pca", known=known, draws=self.draws, seed=self.seed,
        )  # fmt: skip
        bars = [one.ratio.stderr for one in found]
        return Curve(
            run="", step=here.view.step, site=here.view.site, name="", slice="all",
            x=tuple(map(float, ranks)), y=tuple(one.ratio.value for one in found),
            stderr=None if any(bar is None for bar in bars) else tuple(bar or 0.0 for bar in bars),
            x_label="rank of the proxy", y_label="energy ratio",
        )  # fmt: skip
