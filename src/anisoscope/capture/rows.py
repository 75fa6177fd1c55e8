"""Rows: from batches of token ids to rows of activations, with everything that is not measured taken out at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from anisoscope.capture.hooks import Seen, record
from anisoscope.errors import ShapeError
from anisoscope.models.sites import Site
from anisoscope.text.batches import Batch


@dataclass(frozen=True)
class BatchRows:
    """The measured tokens of one batch, in the order of the text: a row for each at every site, and what they are."""

    rows: Mapping[str, Float[Tensor, "n _"]]
    ids: Int64[Tensor, "n"]
    positions: Int64[Tensor, "n"]
    """Place of the token in its sequence, from 0."""
    sequences: Int64[Tensor, "n"]
    """Number of the sequence, counted through all batches: rows of one sequence are not independent of each other."""


def measured_mask(batch: Batch, *, skip_first: bool = False) -> Bool[Tensor, "b t"]:
    """Which tokens are measured: real ones that are not special, and with ``skip_first`` not at position 0 either.

    Position 0 is set apart since many models keep a huge activation there, whatever the token.
    """
    keep = batch.mask & ~batch.special
    return keep & (batch.positions != 0) if skip_first else keep


def site_rows(seen: Seen, site: Site | str, mask: Bool[Tensor, "b t"]) -> Float[Tensor, "n d"]:
    """The rows of a site where the mask is True."""
    states = seen[site]
    if states.shape[:2] != mask.shape:
        name = site if isinstance(site, str) else site.name
        raise ShapeError(
            f"site {name!r} holds {tuple(states.shape[:2])} sequences and tokens, the mask {tuple(mask.shape)}"
        )
    return states[mask.to(states.device)]


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    sites: Sequence[Site],
    *,
    skip_first: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[BatchRows]:
    """Run the model over batches and yield the measured rows of each, one batch in memory at a time.

    The model is in eval mode during each forward pass and as it was between them. Rows come on ``device`` (default:
    where the model put them) as ``dtype`` (default: the model's). ``on_batch`` is told the number of batches done.
    A decoder beside an encoder reads the same ids as the encoder does.
    """
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    sequences = 0
    for number, batch in enumerate(batches, start=1):
        mask = measured_mask(batch, skip_first=skip_first)
        seen = forward(model, batch, sites, device=place)
        rows = {site.name: site_rows(seen, site, mask).to(device=device, dtype=dtype) for site in sites}
        sequence = torch.arange(sequences, sequences + len(mask)).unsqueeze(1).expand(mask.shape)
        sequences += len(mask)
        yield BatchRows(rows, batch.ids[mask].long(), batch.positions[mask].long(), sequence.to(mask.device)[mask])
        if on_batch is not None:
            on_batch(number)


def forward(model: nn.Module, batch: Batch, sites: Sequence[Site], *, device: torch.device | str) -> Seen:
    """One forward pass without gradients, with dropout off, of as much of the model as the sites need."""
    _check_padding(batch)
    runner = _needed_part(model, sites)
    inputs = _inputs(runner, batch, device)
    # Not inference_mode: tensors that a model makes in it and keeps (rotary tables, masks) can never be trained
    # through again, which would break a training run that is measured half-way.
    with torch.no_grad(), _evaluating(model), record(model, sites) as seen:
        runner(**inputs) if inputs else runner(batch.ids.to(device).long())
    return seen


def _check_padding(batch: Batch) -> None:
    """Padding must follow the text: most models count positions from the first place on, whatever stands there."""
    wrong = (batch.mask[:, 1:] & ~batch.mask[:, :-1]).any(dim=1).nonzero().reshape(-1).tolist()
    if wrong:
        raise ShapeError(f"sequence {wrong[0]} has padding in front of real tokens; pad at the end")


def _needed_part(model: nn.Module, sites: Sequence[Site]) -> Any:
    """The encoder alone, or the model without its head, if all sites lie in it: a head may cost more than the rest."""
    candidates = []
    encoder: Any = getattr(model, "get_encoder", None)
    if encoder is not None and sites and all(site.side == "encoder" for site in sites):
        candidates.append(encoder())
    # A model cut into shards over machines must be entered through its root.
    if not type(model).__name__.startswith("FSDP"):
        candidates.append(getattr(model, getattr(model, "base_model_prefix", "") or " ", None))
    for part in candidates:
        if isinstance(part, nn.Module):
            inside = {id(module) for module in part.modules()}
            if all(id(model.get_submodule(site.module)) in inside for site in sites):
                return part
    return model


def _inputs(model: nn.Module, batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Keyword arguments for the model's forward, as far as it takes them; none where it does not know ``input_ids``."""
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known:
        return {}
    ids = batch.ids.to(device).long()
    # As integers: some models multiply by the mask or sum over it.
    mask = batch.mask.to(device).long()
    offered: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    offered |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {name: value for name, value in offered.items() if name in known}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and each module's own mode again afterwards: parts of a model may differ in it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
