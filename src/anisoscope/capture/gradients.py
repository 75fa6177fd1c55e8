"""Gradients of a model's loss on one batch, by one forward and one backward pass that leave no trace.

``torch.autograd.grad`` hands gradients back and never adds them to ``.grad``. Five kinds, which answer different
questions:

| kind | what it is | rows |
|---|---|---|
| ``activation`` | dL/dh at a site | a row for each token |
| ``reader`` | dL/dW of a map that reads the site | a row for each output of the map |
| ``writer`` | dL/dW of a map that writes the residual stream | a row for each input of the map |
| ``embedding`` | dL/dE of the token embedding | a row for each distinct token of the batch |
| ``update`` | the change of these weights in one step of the optimiser | as those of the weight it belongs to |

All rows live in the space of the site, so a basis found there applies to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from anisoscope.capture import beside
from anisoscope.capture.hooks import _arrange, record
from anisoscope.capture.maps import LinearMap, find_maps
from anisoscope.errors import SiteError
from anisoscope.measures.later import fetched_later
from anisoscope.models.sites import Site
from anisoscope.text.batches import Batch

KINDS = ("activation", "reader", "writer", "embedding", "update")

LossFunction: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""Gives the mean loss of a model over the predicted tokens of a batch, with its graph."""

SIGNAL = "signal of "
FROZEN = "carries no gradient: the forward ran under no_grad, or no parameter before it requires one (frozen)"
UNUSED = "takes no part in the loss"


@dataclass(frozen=True)
class MapGradient:
    """The gradient of one linear map, or its change, as rows in the space of the site.

    ``signal`` holds dL/dy at the output of the map for each token, where it was asked for: for a reader the gradient
    is ``signal.T @ x``, so permuting its rows gives the null of a signal that knows nothing of the token.
    """

    map: LinearMap
    rows: Float[Tensor, "m d"]
    signal: Float[Tensor, "*tokens o"] | None = None


@dataclass(frozen=True)
class EmbeddingGradient:
    """Rows of the embedding's gradient for the tokens of the batch, ids ascending."""

    ids: Int64[Tensor, "u"]
    rows: Float[Tensor, "u d"]
    tied: bool
    """Whether the output layer has the same weight, so that the rows hold its gradient too."""


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass gave. ``missing`` says of each absent gradient why it is absent."""

    loss: float
    states: Mapping[str, Float[Tensor, "b t _"]]
    gradients: Mapping[str, Float[Tensor, "b t _"]]
    maps: tuple[MapGradient, ...] = ()
    embedding: EmbeddingGradient | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def gradient_pass(
    model: nn.Module,
    batch: Batch,
    sites: Sequence[Site],
    loss: LossFunction,
    *,
    maps: Sequence[LinearMap] = (),
    signals: bool = False,
    embedding: Site | None = None,
    tokens: Int64[Tensor, "u"] | None = None,
    scale: float = 1.0,
    meanwhile: Callable[[Mapping[str, Float[Tensor, "b t _"]]], None] | None = None,
) -> Pass:
    """States at sites and the gradients of ``scale`` times the loss there, of ``maps`` and of the embedding.

    The model runs in the mode and precision it is in. Parameters' ``.grad`` stay as they are and no graph is kept.
    ``tokens`` are the ids, ascending, whose rows of the embedding's gradient are wanted; those of the batch by default.
    A site or weight that carries no gradient is in ``missing``; a site that did not fire raises ``SiteSilentError``.
    ``meanwhile`` is called with the states while the backward pass goes on in another thread; see ``beside``.
    """
    inner = [_signal_site(one, sites) for one in maps if signals and one.role == "reader"]
    with torch.enable_grad(), record(model, [*sites, *inner], keep_graph=True) as seen:
        value = loss(model, batch)
    if not value.requires_grad:
        raise SiteError(f"the loss {FROZEN}")
    wanted = {name: seen._stored(seen._slots[name]) for name in seen}
    weights = {one.parameter: model.get_parameter(one.parameter) for one in maps}
    table = None if embedding is None else f"{embedding.module}.weight"
    if table is not None:
        weights[table] = model.get_parameter(table)
    told = _begin_loss(value.detach())
    states = {site.name: seen[site.name].detach() for site in sites}
    if meanwhile is None:
        found, missing = _differentiate(value, wanted | weights, scale)
    else:
        backward = beside.begun(lambda: _differentiate(value, wanted | weights, scale))
        try:
            meanwhile(states)
        finally:  # nothing of ours goes on behind the back of whoever called
            found, missing = backward()
    gradients = {name: _arrange(grad, seen._slots[name]) for name, grad in found.items() if name in wanted}
    return Pass(
        loss=told(),
        states=states,
        gradients={name: grad for name, grad in gradients.items() if not name.startswith(SIGNAL)},
        maps=tuple(
            MapGradient(one, one.rows(found[one.parameter]), gradients.get(SIGNAL + one.path))
            for one in maps
            if one.parameter in found
        ),
        embedding=_embedding_rows(
            model, found.get(table or ""), token_ids([batch]) if tokens is None else tokens, table
        ),
        missing=missing,
    )


def _begin_loss(value: Tensor) -> Callable[[], float]:
    """Begin to fetch the loss from a GPU: asked for after the backward pass it would come after all of that."""
    if value.device.type != "cuda":
        return lambda: float(value)
    later = fetched_later({"": value})
    return lambda: float(later()[""].item())


def _signal_site(one: LinearMap, sites: Sequence[Site]) -> Site:
    """The output of a map, which holds its axes as the site that the map reads does."""
    reads = next(site for site in sites if site.name == one.site)
    return Site(SIGNAL + one.path, "signal", None, one.path, "output", "", reads.call, reads.calls, reads.layout)


def _differentiate(
    value: Tensor, wanted: Mapping[str, Tensor], scale: float
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One backward pass. Gives what there is, dense and detached, and says why the rest is not there."""
    missing = {name: FROZEN for name, tensor in wanted.items() if not tensor.requires_grad}
    asked = {name: tensor for name, tensor in wanted.items() if name not in missing}
    if not asked:
        return {}, missing
    weight = torch.full_like(value, scale)
    try:
        grads = torch.autograd.grad(value, list(asked.values()), weight, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise SiteError(
            "re-entrant gradient checkpointing hides what lies inside it; enable it with use_reentrant=False"
        ) from None
    missing |= {name: UNUSED for name, grad in zip(asked, grads, strict=True) if grad is None}
    return {
        name: grad.to_dense() if grad.is_sparse else grad
        for name, grad in zip(asked, grads, strict=True)
        if grad is not None
    }, missing


def token_ids(batches: Iterable[Batch]) -> Int64[Tensor, "u"]:
    """The distinct real tokens of batches, ascending."""
    return torch.cat([batch.ids[batch.mask] for batch in batches]).unique().long()


def _embedding_rows(
    model: nn.Module, grad: Tensor | None, ids: Int64[Tensor, "u"], table: str | None
) -> EmbeddingGradient | None:
    if grad is None or table is None:
        return None
    weight = model.get_parameter(table)
    ids = ids.to(grad.device)
    others = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    tied = any(parameter is weight for module in others for parameter in module._parameters.values())
    return EmbeddingGradient(ids, grad[ids], tied)


def snapshot(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of parameters by name, to be compared with ``updates`` after a step of the optimiser."""
    return {name: model.get_parameter(name).detach().clone() for name in names}


def updates(model: nn.Module, before: Mapping[str, Tensor], maps: Sequence[LinearMap]) -> tuple[MapGradient, ...]:
    """The change of each map's weight since the snapshot ``before``, as rows in the space of its site."""
    return tuple(
        MapGradient(one, one.rows(model.get_parameter(one.parameter).detach() - before[one.parameter]))
        for one in maps
        if one.parameter in before
    )


def maps_for(model: nn.Module, sites: Sequence[Site], kinds: Iterable[str]) -> tuple[LinearMap, ...]:
    """The maps of ``sites`` that gradients of these kinds ask for; an update asks for readers and writers."""
    asked = set(kinds)
    roles = {role for role in ("reader", "writer") if role in asked or "update" in asked}
    return tuple(one for one in find_maps(model, sites) if one.role in roles) if roles else ()
