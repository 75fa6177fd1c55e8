"""Figures of a watched training over its steps: the loss, gradient energy along proxies, their drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from anisoscope.runs.records import Record, site_order
from anisoscope.views.corrected import Tests, p_lines
from anisoscope.views.layout import axis_title, step_axis, unique
from anisoscope.views.names import GRADIENTS, LOSSES, MODEL_SITE, PROXIES
from anisoscope.views.panels import Axis, Figure, Line, Panel, Reference, Toggle
from anisoscope.views.seeds import band_words, seed_toggles
from anisoscope.views.series import measure_order, measure_title
from anisoscope.views.shelf import Look, Pile, Shelf, chance_line, drawn, families, shaded

ONE = (Reference(name="1: as much as controls", y=1.0),)
ZERO = (Reference(name="0: as much as controls", y=0.0),)


def titled(words: str, shelf: Shelf, shelves: Sequence[Shelf]) -> str:
    """A title with the model's name where there are several."""
    return f"{words} · {shelf.label}" if len(shelves) > 1 else words


def keyed(words: str, shelf: Shelf, shelves: Sequence[Shelf]) -> str:
    """A key with the model's name where there are several."""
    return f"{words}-{shelf.label}" if len(shelves) > 1 else words


def common_axis(shelves: Sequence[Shelf]) -> tuple[Callable[[int], float], Axis]:
    """One axis of steps for all models and seeds."""
    every = [one for shelf in shelves for one in (shelf, *shelf.members)]
    return step_axis(sorted({step for one in every for step in one.steps}))


def loss_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """The loss over steps, models as colours, held-out solid and training dashed; then what else the model has."""
    having = [shelf for shelf in shelves if any(MODEL_SITE in shelf.sites(m) for m in shelf.measures)]
    place, axis = common_axis(having)
    names = unique((m for s in having for m in s.measures if MODEL_SITE in s.sites(m)), measure_order)
    losses = [name for name in LOSSES if name in names]
    rest = [[name] for name in names if name not in LOSSES]
    panels = []
    for group in ([losses] if losses else []) + rest:
        lines: list[Line] = []
        for role, shelf in enumerate(having):
            for name in group:
                kind = LOSSES.get(name, measure_title(name))
                dash = list(LOSSES).index(name) if name in LOSSES else 0
                look = Look(name=kind, role=role, dash=dash, tags={"model": shelf.label, "loss": kind})
                lines += drawn(shelf, lambda of, m=name: of.get(m, MODEL_SITE), lambda r: place(r.step), look)  # type: ignore[misc]
        title = "Loss" if group is losses else measure_title(group[0])
        y = Axis(title="loss (nats)" if group is losses else axis_title(group[0]))
        panels.append(Panel(key=title.lower(), title=title, x=axis, y=y, lines=tuple(lines)))
    if not panels:
        return ()
    kinds = [LOSSES[name] for name in losses]
    toggles = [
        *(Toggle(kind="model", value=s.label, role=i, dash=None, on=True) for i, s in enumerate(having)),
        *(Toggle(kind="loss", value=kind, role=None, dash=i, on=True) for i, kind in enumerate(kinds)),
    ]
    toggles = [one for one in toggles if sum(other.kind == one.kind for other in toggles) > 1]
    caption = (
        "Held-out loss (solid) on text that is not trained on, training loss (dashed) since the look before. Look for "
        "where the two part. Losses of different objectives, next token and masked token, are not comparable."
    )
    series = [shelf.series for shelf in having]
    said = band_words(series, [r for shelf in having for name in losses for r in shelf.get(name, MODEL_SITE)])
    caption += _own_losses(having) if "train_loss" in losses else ""
    return (
        Figure(
            key="loss",
            title="Loss",
            caption=f"{caption} {said}".strip(),
            panels=tuple(panels),
            toggles=(*toggles, *seed_toggles(series)),
        ),
    )


def _own_losses(shelves: Sequence[Shelf]) -> str:
    """Which training losses are means over something else than the held-out loss: other weights, other windows."""
    told = [(shelf.label, shelf.series.facts.get("frequency")) for shelf in shelves]
    known = [(label, one.get("placebo_of") or one.get("method")) for label, one in told if isinstance(one, Mapping)]
    said = ""
    for method, what in (("loss", "is weighted"), ("resample", "is over drawn windows")):
        names = [label for label, its in known if its == method]
        said += f" The training loss of {', '.join(names)} {what}, as it was trained." if names else ""
    return f"{said} The held-out loss is not, so these do not compare with it." if said else ""


def course(
    shelf: Shelf,
    measures: Mapping[str, str],
    place: Callable[[int], float],
    pile: Pile,
    *,
    more: Callable[[Record], str] = lambda record: "",
) -> list[Line]:
    """Lines of layers over steps for one or several proxies, ``{tag of the proxy: measure}``, noted in the pile."""
    kinds = families(unique((s for measure in measures.values() for s in shelf.sites(measure)), site_order))
    lines: list[Line] = []
    for dash, (proxy, measure) in enumerate(measures.items()):
        for kind, inside in kinds.items():
            for site, shade in shaded(inside):
                look = Look(
                    name=site,
                    shade=shade,
                    dash=dash,
                    tags={"proxy": proxy, "site": kind},
                )
                pick = lambda of, m=measure, at=site: of.get(m, at)  # noqa: E731
                lines += drawn(shelf, pick, lambda r: place(r.step), look, more=more)
                pile.records += shelf.get(measure, site)
    if lines:
        pile.note(list(measures), kinds)
    return lines


def energy_figures(shelves: Sequence[Shelf], tests: Tests) -> tuple[Figure, ...]:
    """The energy ratio over steps for each proxy and kind of gradient; then shares of gradients without controls."""
    place, axis = common_axis(shelves)
    pile = Pile()
    for gradient in GRADIENTS:
        for proxy in PROXIES:
            measure = f"{proxy}.{gradient}.ratio"
            for shelf in shelves:
                more = partial(p_lines, tests, shelf)
                lines = course(shelf, {proxy: measure}, place, pile, more=more)
                if lines:
                    title = f"{PROXIES[proxy]}, {GRADIENTS[gradient]}"
                    pile.panels.append(
                        Panel(
                            key=keyed(f"ratio-{proxy}-{gradient}", shelf, shelves),
                            title=titled(title, shelf, shelves),
                            x=axis,
                            y=Axis(title="energy ratio"),
                            lines=tuple(lines),
                            references=ONE,
                        )
                    )
    series = [shelf.series for shelf in shelves]
    pile.proxies.clear()  # a panel each, so no switch
    caption = (
        "How many times more of the gradient lies along the proxy than along random directions beside it. Layers as "
        "ordered colours; 1 means that the gradient knows nothing of the proxy. A random basis must stay at 1."
    )
    ratios = pile.figure(
        key="energy-ratio",
        title="Energy ratio over training",
        caption=f"{caption} {band_words(series, pile.records)}".strip(),
        toggles=pile.switches(series),
        shades=pile.ends,
    )
    return (*ratios, *_weight_shares(shelves, place, axis))


def _weight_shares(shelves: Sequence[Shelf], place: Callable[[int], float], axis: Axis) -> tuple[Figure, ...]:
    """Shares of gradients that are one matrix each: writers, embeddings, updates."""
    pile = Pile()
    for gradient in GRADIENTS:
        for shelf in shelves:
            measures = {
                PROXIES[p]: m
                for p in shelf.proxies
                if (m := f"{p}.{gradient}.share") in shelf.measures
                and not {f"{p}.{gradient}.ratio", f"{p}.{gradient}.null"} & set(shelf.measures)
            }
            lines = course(shelf, measures, place, pile)
            if lines:
                records = [r for m in measures.values() for site in shelf.sites(m) for r in shelf.get(m, site)]
                pile.panels.append(
                    Panel(
                        key=keyed(f"share-{gradient}", shelf, shelves),
                        title=titled(GRADIENTS[gradient].capitalize(), shelf, shelves),
                        x=axis,
                        y=Axis(title="energy share"),
                        lines=tuple(lines),
                        references=chance_line(records),
                    )
                )
    series = [shelf.series for shelf in shelves]
    caption = "Share of gradients of weights, and of what the optimiser changed, along the proxy: one matrix a look."
    return pile.figure(
        key="energy-shares",
        title="Weights and updates along the proxy",
        caption=f"{caption} {band_words(series, pile.records)}".strip(),
        toggles=pile.switches(series),
        shades=pile.ends,
    )


def drift_figures(shelves: Sequence[Shelf]) -> tuple[Figure, ...]:
    """How far proxies turn from look to look, and how much of the gradient's anisotropy they hold."""
    place, axis = common_axis(shelves)
    wanted: tuple[tuple[str, str, str, tuple[Reference, ...]], ...] = (
        ("drift", "Drift of the proxy", "degrees", ()),
        ("split_angle", "Angle between fits of two halves", "degrees", ()),
        ("activation.isoscore_share", "Share of anisotropy, IsoScore*", "above controls", ZERO),
        ("activation.spectral_share", "Share of anisotropy, spectral ratio", "above controls", ZERO),
    )
    pile = Pile()
    for ending, title, words, references in wanted:
        for shelf in shelves:
            measures = {PROXIES[p]: m for p in shelf.proxies if (m := f"{p}.{ending}") in shelf.measures}
            lines = course(shelf, measures, place, pile)
            if lines:
                pile.panels.append(
                    Panel(
                        key=keyed(ending.split(".")[-1].replace("_", "-"), shelf, shelves),
                        title=titled(title, shelf, shelves),
                        x=axis,
                        y=Axis(title=words),
                        lines=tuple(lines),
                        references=references,
                    )
                )
    series = [shelf.series for shelf in shelves]
    caption = (
        "Drift: mean principal angle to the proxy of the look before, in degrees; a falling line settles. It means "
        "little below the angle between proxies fitted on two halves of the same look. Share of "
        "anisotropy: what the gradient's anisotropy loses without the proxy, beyond what it loses without a control. "
        "IsoScore* above 0 and spectral ratio below 0 say that the proxy holds more of it than a control."
    )
    return pile.figure(
        key="drift",
        title="Drift and anisotropy of proxies",
        caption=f"{caption} {band_words(series, pile.records)}".strip(),
        toggles=pile.switches(series),
        shades=pile.ends,
    )
