"""A sample of tokens, the same at every site of a model, from one pass over batches; bounded whatever the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anisoscope.capture.rows import forward, measured_mask
from anisoscope.models.sites import Site
from anisoscope.rows import Chunk
from anisoscope.stats.reservoir import Reservoir
from anisoscope.stats.turns import Turns
from anisoscope.text.batches import Batch

Progress = Callable[[str, int, int], None]
"""Told what is under way, how much of it is done, and how much there is."""


@dataclass
class Sample:
    """The same sampled tokens at every site: rows in random order, where in its sequence each token stood."""

    states: dict[str, Reservoir]
    turns: dict[str, Turns]
    widths: dict[str, int]
    positions: Float[Tensor, "n"]
    order: Tensor
    seen: int
    forward_seconds: float


def collect_sample(
    model: nn.Module,
    batches: Iterable[Batch],
    sites: Sequence[Site],
    *,
    tokens: int,
    vectors: int,
    turns: bool,
    seed: int,
    tell: Progress,
) -> Sample:
    """Stream batches through the model and keep a uniform sample of ``vectors`` measured tokens at every site.

    It ends once ``tokens`` were measured. With ``turns`` the angles along the token paths are summed on the way.
    A site that holds the same as the one before it, as the first layer's input does where nothing is done to the
    embedding, shares its state.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = len(batches) if isinstance(batches, Sized) else 0
    expected = _measured(batches, tokens) if isinstance(batches, Sized) else 0
    states: dict[str, Reservoir] = {}
    angles = {site.name: Turns.empty() for site in sites}
    places = Reservoir.empty(vectors, 1, seed=seed, dtype=torch.float64)
    seconds = 0.0
    alike = {site.name for site in sites[1:]}
    for number, batch in enumerate(batches):
        tell("running the model", number, total)
        mask = measured_mask(batch)
        began = time.perf_counter()
        seen = forward(model, batch, sites, device=device)
        seconds += time.perf_counter() - began
        places = places.update(batch.positions[mask].double()[:, None])
        for before, site in zip((*sites[:1], *sites), sites, strict=False):
            paths = seen[site.name]
            if site.name in alike and _same(paths, seen[before.name]):
                states[site.name], angles[site.name] = states[before.name], angles[before.name]
                continue
            alike.discard(site.name)
            if site.name not in states:
                dtype = torch.float64 if paths.dtype == torch.float64 else torch.float32
                width = paths.shape[-1]
                states[site.name] = Reservoir.empty(vectors, width, seed=seed, dtype=dtype, expected=expected)
            states[site.name] = states[site.name].update(_kept(paths, mask).to("cpu"))
            if turns:
                chunk = Chunk(paths.cpu(), mask.cpu(), 0, continues=False)
                angles[site.name] = angles[site.name].update(chunk)
        if places.seen >= tokens:
            break
    tell("running the model", total, total)
    widths = {name: state.width for name, state in states.items()}
    return Sample(states, angles, widths, places.rows[:, 0], places.stream_order(), places.seen, seconds)


def _same(one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> bool:
    """Whether two tensors are the same, bit for bit; torch asks neither for the type nor across devices."""
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _measured(batches: Iterable[Batch], tokens: int) -> int:
    """How many tokens will be measured: of whole batches, up to the one in which ``tokens`` are reached."""
    seen = 0
    for batch in batches:
        seen += int(measured_mask(batch).sum())
        if seen >= tokens:
            break
    return seen


def _kept(paths: Float[Tensor, "s t d"], mask: Bool[Tensor, "s t"]) -> Float[Tensor, "n d"]:
    """The rows where the mask is True; without a copy where that is all of them."""
    flat = paths.reshape(-1, paths.shape[-1])
    return flat if bool(mask.all()) else flat[mask.reshape(-1).to(paths.device)]
