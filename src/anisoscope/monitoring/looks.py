"""Looks: a probe's own forward and backward pass over fixed batches, or what a ride brought home, as one ``Look``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from anisoscope.capture.beside import can_go_beside
from anisoscope.capture.gradients import (
    EmbeddingGradient,
    LossFunction,
    MapGradient,
    Pass,
    gradient_pass,
    maps_for,
    snapshot,
    token_ids,
    updates,
)
from anisoscope.capture.losses import predicted_tokens
from anisoscope.capture.maps import LinearMap
from anisoscope.capture.ride import Taken
from anisoscope.capture.rows import measured_mask
from anisoscope.errors import ShapeError
from anisoscope.models.sites import Site
from anisoscope.monitoring.stacking import with_room
from anisoscope.monitoring.views import Look, MapView, SiteView
from anisoscope.rows import Chunk
from anisoscope.stats.reservoir import row_keys
from anisoscope.stats.turns import Turns
from anisoscope.text.batches import Batch


@runtime_checkable
class Meanwhile(Protocol):
    """What is to be done while the gradients of a look are on their way."""

    def begin(self, views: Sequence[SiteView]) -> None:
        """Begin with all sites as they are before any gradient is known."""
        ...

    def drop(self) -> None:
        """Hold nothing of it: there is no room for both."""
        ...


@dataclass(frozen=True)
class Plan:
    """What every look of a monitor fetches, settled once."""

    model: nn.Module
    sites: tuple[Site, ...]
    kinds: frozenset[str]
    maps: tuple[LinearMap, ...]
    embed: Site | None
    vectors: int
    seed: int
    turns: bool = False
    memory: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What depends on the tokens of a probe alone, from the first look on."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sites: Sequence[Site],
        embed: Site | None,
        kinds: frozenset[str],
        *,
        vectors: int,
        seed: int,
        turns: bool,
    ) -> Plan:
        """The plan for these sites and kinds of gradients."""
        maps = maps_for(model, sites, kinds)
        return cls(model, tuple(sites), kinds, maps, embed, vectors, seed, turns)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the weights whose change is to be told; none unless updates are asked for."""
        return snapshot(self.model, {one.parameter for one in self.maps}) if "update" in self.kinds else {}

    def updates(self, before: Mapping[str, Tensor]) -> tuple[MapGradient, ...]:
        """The change of those weights since."""
        return updates(self.model, before, self.maps)


@dataclass(frozen=True)
class _Gathered:
    """Rows of the states of one site, batch by batch."""

    x: tuple[Tensor, ...] = ()
    turns: Turns = field(default_factory=Turns.empty)


def probe_look(
    plan: Plan,
    batches: Sequence[Batch],
    loss: LossFunction,
    *,
    step: int,
    changed: Sequence[MapGradient] = (),
    meanwhile: Meanwhile | None = None,
) -> Look:
    """One forward and backward pass over each batch. Gradients are those of the mean loss over all of them together.

    Where the last backward pass can go on in a thread of its own, ``meanwhile`` is begun with the states.
    """
    held = _Tokens.of(plan, batches, loss)
    rows: Mapping[str, _Gathered] = {site.name: _Gathered() for site in plan.sites}
    gradients: dict[str, list[Tensor]] = {site.name: [] for site in plan.sites}
    passes: list[Pass] = []
    views: tuple[SiteView, ...] = ()
    for at, batch in enumerate(batches):
        taking, done, where = _Taking(plan, held, rows, step, at), None, held.places[at]
        if meanwhile is not None and at == len(batches) - 1 and can_go_beside(_device_of(plan.model)):
            done = with_room(partial(_pass, plan, batch, loss, held, at, partial(taking.begin, meanwhile)), None)
            if done is None:  # by itself it may have room
                meanwhile.drop()
                taking = _Taking(plan, held, rows, step, at)
        if done is None:
            done = _pass(plan, batch, loss, held, at, None)
            taking.take(done.states)
        rows, views = taking.rows, taking.views
        for name, into in gradients.items():
            if name in done.gradients:
                into.append(_pick(done.gradients[name], where))
        # Rows are taken out here; what stays of a pass must not hold all tokens of all batches.
        kept = tuple(replace(one, signal=None if one.signal is None else _pick(one.signal, where)) for one in done.maps)
        passes.append(replace(done, states={}, gradients={}, maps=kept))
    missing = {name: why for done in passes for name, why in done.missing.items()}
    maps = _summed(passes)
    views = tuple(
        replace(
            view,
            g=_joined(gradients[view.site]),
            no_gradient=missing.get(view.site, ""),
            embedding=_merged([done.embedding for done in passes]) if site == plan.embed else None,
            missing=_of_site(missing, site, plan),
            **_maps_of(site, maps, changed),
        )
        for site, view in zip(plan.sites, views or _of_states(plan, held, rows, step), strict=True)
    )
    weights = held.weights
    value = sum(done.loss * weight for done, weight in zip(passes, weights, strict=True)) / max(1, sum(weights))
    return Look(views, value, sum(batch.tokens for batch in batches))


@dataclass
class _Taking:
    """Rows of the states of one batch, behind those of the batches before it, and all sites as they are then."""

    plan: Plan
    held: _Tokens
    rows: Mapping[str, _Gathered]
    step: int
    at: int
    views: tuple[SiteView, ...] = ()

    def take(self, states: Mapping[str, Tensor]) -> None:
        """Take them out."""
        mask, where, turns = self.held.masks[self.at], self.held.places[self.at], self.plan.turns
        self.rows = {
            name: _with_states(before, name, states[name], mask, where, turns) for name, before in self.rows.items()
        }

    def begin(self, meanwhile: Meanwhile, states: Mapping[str, Tensor]) -> None:
        """Take them out, and begin with what needs them alone."""
        self.take(states)
        self.views = _of_states(self.plan, self.held, self.rows, self.step)
        meanwhile.begin(self.views)


def _of_states(plan: Plan, held: _Tokens, rows: Mapping[str, _Gathered], step: int) -> tuple[SiteView, ...]:
    """All sites, without anything of gradients."""
    return tuple(
        SiteView(
            site=site.name,
            step=step,
            seed=plan.seed,
            x=_as_one(rows[site.name].x),
            g=None,
            ids=held.ids,
            positions=held.positions,
            sequences=held.sequences,
            tokens=held.measured,
            turns=rows[site.name].turns if plan.turns else None,
        )
        for site in plan.sites
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a probe: which are measured, which rows are held and what is known of those."""

    batches: tuple[Batch, ...]
    loss: LossFunction
    masks: list[Bool[Tensor, "_ _"]]
    places: list[Int64[Tensor, "_"] | None]
    """Rows that are held of each batch, on its device; None where all of them are."""
    weights: list[int]
    tokens: Int64[Tensor, "u"]
    """A tied embedding has a gradient at tokens that a batch does not hold: all batches give the same rows."""
    ids: Int64[Tensor, "n"]
    positions: Int64[Tensor, "n"]
    sequences: Int64[Tensor, "n"]
    measured: int

    @classmethod
    def of(cls, plan: Plan, batches: Sequence[Batch], loss: LossFunction) -> _Tokens:
        """Made once for the batches of a plan, kept in its memory."""
        held = plan.memory.get("tokens")
        if held is not None and held.loss is loss and _same(held.batches, batches):
            return held
        masks = [measured_mask(batch).cpu() for batch in batches]
        chosen = _chosen(masks, plan)
        where = [None if bool(keep.all()) else keep.flatten().nonzero().reshape(-1) for keep in chosen]
        found = cls(
            batches=tuple(batches), loss=loss, masks=masks,
            places=[None if at is None else at.to(batch.ids.device) for at, batch in zip(where, batches, strict=True)],
            weights=[predicted_tokens(loss, batch) for batch in batches],
            tokens=token_ids(batches),
            ids=torch.cat([batch.ids.cpu()[keep] for batch, keep in zip(batches, chosen, strict=True)]).long(),
            positions=torch.cat([b.positions.cpu()[keep] for b, keep in zip(batches, chosen, strict=True)]).long(),
            sequences=_sequences(chosen),
            measured=sum(int(mask.sum()) for mask in masks),
        )  # fmt: skip
        plan.memory["tokens"] = found
        return found


def _same(held: Sequence[Batch], batches: Sequence[Batch]) -> bool:
    return len(held) == len(batches) and all(one is two for one, two in zip(held, batches, strict=True))


def _pass(
    plan: Plan, batch: Batch, loss: LossFunction, held: _Tokens, at: int,
    meanwhile: Callable[[Mapping[str, Tensor]], None] | None,
) -> Pass:  # fmt: skip
    return gradient_pass(
        plan.model,
        batch,
        plan.sites,
        loss,
        maps=[one for one in plan.maps if one.role in plan.kinds],
        signals="signal" in plan.kinds,
        embedding=plan.embed if "embedding" in plan.kinds else None,
        tokens=held.tokens,
        scale=held.weights[at] / max(1, sum(held.weights)),
        meanwhile=meanwhile,
    )


def ride_look(plan: Plan, taken: Taken, *, step: int, changed: Sequence[MapGradient] = ()) -> Look:
    """The same from a training step's own passes."""
    views = tuple(
        SiteView(
            site=site.name,
            step=step,
            seed=plan.seed,
            x=found.x,
            g=found.g,
            ids=found.ids,
            positions=found.positions,
            sequences=found.sequences,
            tokens=taken.tokens,
            **_maps_of(site, [], changed),
        )
        for site in plan.sites
        if (found := taken.sites.get(site.name)) is not None
    )
    return Look(views, None, taken.tokens, taken.missing, taken.seconds)


def _chosen(masks: Sequence[Bool[Tensor, "_ _"]], plan: Plan) -> list[Bool[Tensor, "_ _"]]:
    """The tokens whose rows are held: all that are measured, or a uniform sample that depends on the seed alone."""
    counts = [int(mask.sum()) for mask in masks]
    if sum(counts) <= plan.vectors:
        return list(masks)
    keys = row_keys(plan.seed, 0, 0, sum(counts))
    taken = np.zeros(len(keys), dtype=bool)
    taken[np.argpartition(keys, plan.vectors)[: plan.vectors]] = True
    flags = torch.from_numpy(taken).split(counts)
    return [mask.masked_scatter(mask, flag) for mask, flag in zip(masks, flags, strict=True)]


def sequences_held(masks: Sequence[Bool[Tensor, "_ _"]], plan: Plan) -> Int64[Tensor, "n"]:
    """The number of its sequence for each row that every look of a probe will hold."""
    return _sequences(_chosen(masks, plan))


def _with_states(
    before: _Gathered, name: str, states: Tensor, mask: Tensor, where: Tensor | None, turns: bool
) -> _Gathered:
    if states.shape[:2] != mask.shape:
        raise ShapeError(
            f"site {name!r} holds {tuple(states.shape[:2])} sequences and tokens, the probe {tuple(mask.shape)}"
        )
    found = before.turns.update(Chunk(states.cpu(), mask, 0, continues=False)) if turns else before.turns
    return _Gathered((*before.x, _pick(states, where)), found)


def _pick(states: Tensor, where: Int64[Tensor, "_"] | None) -> Tensor:
    rows = states.flatten(0, 1)
    rows = rows if where is None else rows.index_select(0, where.to(rows.device))
    return rows if rows.dtype == torch.float64 else rows.float()


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    return _as_one(parts) if parts else None


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _sequences(chosen: Sequence[Tensor]) -> Tensor:
    """The number of each row's sequence, counted through all batches."""
    found, before = [], 0
    for keep in chosen:
        found.append(before + keep.nonzero()[:, 0])
        before += len(keep)
    return torch.cat(found)


def _summed(passes: Sequence[Pass]) -> list[MapView]:
    """Gradients of maps added up over batches, the signals of their tokens one after another."""
    parts: dict[LinearMap, list[MapGradient]] = {}
    for done in passes:
        for one in done.maps:
            parts.setdefault(one.map, []).append(one)
    return [
        MapView(
            one,
            torch.stack([part.rows for part in of]).sum(dim=0) if len(of) > 1 else of[0].rows,
            _joined([part.signal for part in of if part.signal is not None]),
        )
        for one, of in parts.items()
    ]


def _merged(parts: Sequence[EmbeddingGradient | None]) -> EmbeddingGradient | None:
    """Rows of all batches, which are of the same tokens, added up."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return replace(found[0], rows=torch.stack([part.rows for part in found]).sum(dim=0))


def _maps_of(site: Site, maps: Sequence[MapView], changed: Sequence[MapGradient]) -> dict[str, Any]:
    here = [one for one in maps if one.map.site == site.name]
    return {
        "readers": tuple(one for one in here if one.map.role == "reader"),
        "writers": tuple(one for one in here if one.map.role == "writer"),
        "updates": tuple(MapView(one.map, one.rows) for one in changed if one.map.site == site.name),
    }


def _of_site(missing: Mapping[str, str], site: Site, plan: Plan) -> dict[str, str]:
    names = {one.parameter for one in plan.maps if one.site == site.name}
    if site == plan.embed:
        names.add(f"{site.module}.weight")
    return {name: missing[name] for name in sorted(names) if name in missing}
