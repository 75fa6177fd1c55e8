"""Losses that a model is probed with: its own language-modelling loss, causal or masked, on a fixed batch.

A loss is any callable ``(model, batch) -> scalar tensor``: the mean over the tokens that the model predicts. The two
here also say how many those are, so that batches of a probe can be weighted by them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from anisoscope.capture.gradients import LossFunction
from anisoscope.capture.rows import _check_padding, _inputs
from anisoscope.errors import ModelError, OptionError
from anisoscope.models.sites import model_type
from anisoscope.text.batches import Batch

IGNORED = -100  # the label that cross-entropy leaves out
MASKED_SHARE = 0.15


@dataclass(frozen=True)
class CausalLoss:
    """Cross-entropy of each next token: the model's own loss where it takes labels, else from its logits."""

    def inputs(self, batch: Batch) -> Batch:
        """What the model reads: the batch as it is."""
        return batch

    def predicted(self, batch: Batch) -> int:
        """How many tokens the loss is the mean over."""
        return int((batch.mask[:, 1:]).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """The loss on this batch, with its graph."""
        labels = batch.ids.long().masked_fill(~batch.mask, IGNORED)
        return _loss_of(model, batch, labels, own="MaskedLM" not in type(model).__name__, shift=1)


@dataclass(frozen=True)
class MaskedLoss:
    """Cross-entropy at masked tokens. Which are masked depends on ``seed`` and on the batch alone.

    ``share`` of the measured tokens are replaced by ``mask_id``, all of them: a probe is not training, so none is left
    as it is or replaced at random.
    """

    mask_id: int
    share: float = MASKED_SHARE
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError(f"share of masked tokens must lie above 0 and at most at 1, got {self.share}")

    def chosen(self, batch: Batch) -> Bool[Tensor, "b t"]:
        """The masked tokens: one or more of those that are neither padding nor special."""
        keep = (batch.mask & ~batch.special).cpu()
        generator = torch.Generator().manual_seed(self.seed ^ int(batch.fingerprint[:12], 16))
        draw = torch.rand(keep.shape, generator=generator).masked_fill(~keep, 2.0)
        return ((draw < self.share) | ((draw == draw.min()) & keep)).to(batch.ids.device)

    def inputs(self, batch: Batch) -> Batch:
        """What the model reads: the batch with its mask tokens."""
        return replace(batch, ids=batch.ids.masked_fill(self.chosen(batch), self.mask_id))

    def predicted(self, batch: Batch) -> int:
        """How many tokens the loss is the mean over."""
        return int(self.chosen(batch).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """The loss on this batch, with its graph."""
        labels = batch.ids.long().masked_fill(~self.chosen(batch), IGNORED)
        return _loss_of(model, self.inputs(batch), labels, own="MaskedLM" in type(model).__name__, shift=0)


def loss_for(model: nn.Module, loss: LossFunction | str | None, *, seed: int = 0) -> LossFunction:
    """The loss that is meant: a callable as it is, "causal" or "masked" by name, None by the model's own kind."""
    if callable(loss):
        return loss
    config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    if getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"{type(model).__name__} has two sides, and one text does not say what each should read; "
            "give loss=function(model, batch)"
        )
    kind = loss or ("masked" if "MaskedLM" in type(model).__name__ else "causal")
    if kind == "causal":
        return CausalLoss()
    if kind != "masked":
        raise OptionError(f"loss={loss!r}: give 'causal', 'masked' or a function of model and batch")
    mask_id = getattr(config, "mask_token_id", None)
    if not isinstance(mask_id, int):
        raise OptionError(
            f"the configuration of {model_type(model) or type(model).__name__} does not name its mask token; "
            "give loss=MaskedLoss(mask_id=tokenizer.mask_token_id)"
        )
    return MaskedLoss(mask_id, seed=seed)


def predicted_tokens(loss: LossFunction, batch: Batch) -> int:
    """Over how many tokens the loss of this batch is a mean; for an unknown loss all real tokens are taken."""
    ask = getattr(loss, "predicted", None)
    return int(ask(batch)) if ask is not None else batch.tokens


def _loss_of(model: nn.Module, batch: Batch, labels: Int64[Tensor, "b t"], *, own: bool, shift: int) -> Tensor:
    """The model's own loss where it has one of this kind, else cross-entropy of its logits ``shift`` tokens ahead."""
    _check_padding(batch)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = _inputs(model, batch, device)
    labels = labels.to(device)
    if own and inputs and "labels" in _parameters(model):
        found = model(**inputs, labels=labels)
        value = found["loss"] if isinstance(found, dict) else found[0]
        if isinstance(value, Tensor) and value.ndim == 0:
            return value
    else:
        found = model(**inputs) if inputs else model(batch.ids.to(device).long())
    logits = found if isinstance(found, Tensor) else getattr(found, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ModelError(
            f"{type(model).__name__} gave {type(found).__name__} without a loss or logits of shape (b, t, vocabulary); "
            "give a model with a language-modelling head, or loss=function(model, batch)"
        )
    ahead = labels[:, shift:].reshape(-1)
    logits = logits[:, : logits.shape[1] - shift].float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ahead, ignore_index=IGNORED)


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
