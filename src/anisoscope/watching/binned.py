"""The held-out loss by token frequency: what a model knows of rare and of frequent targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.estimate import Estimate
from anisoscope.monitoring.linear_probes import ratio_over_sequences
from anisoscope.monitoring.tangent_parts import labels_of
from anisoscope.monitoring.views import Name
from anisoscope.runs.records import Curve
from anisoscope.text.batches import Batch
from anisoscope.text.frequency import FrequencyBins

NOT_SCORED = -100


@dataclass(frozen=True, eq=False)
class FrequencyLosses:
    """Takes the held-out loss of a model in bins of token frequency, at every look of a study that changes that."""

    model: nn.Module
    probe: Sequence[Batch]
    loss: CausalLoss | MaskedLoss
    bins: FrequencyBins

    def __call__(self) -> dict[Name, Estimate | Curve]:
        """The losses by name and slice; slices have the names that the tangent analysis gives them."""
        labels = labels_of(self.bins)
        found = losses_by_frequency(self.model, self.probe, self.loss, self.bins)
        return {("loss", labels[at]): one for at, one in found.items()}


@torch.no_grad()
def losses_by_frequency(
    model: nn.Module, batches: Sequence[Batch], loss: CausalLoss | MaskedLoss, bins: FrequencyBins
) -> dict[int, Estimate]:
    """The mean loss of targets in each bin that has some, without any weights; error bars over sequences."""
    device = next(model.parameters()).device
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    for batch in batches:
        ids, targets = _asked(batch, loss)
        logits = model(input_ids=ids.to(device)).logits
        each_BT = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.to(device).flatten(), ignore_index=NOT_SCORED, reduction="none"
        ).view(targets.shape)
        # Targets that are not scored go into a bin of their own, which is dropped.
        in_BT = torch.where(targets == NOT_SCORED, len(bins), bins.bin_of(targets.clamp_min(0)))
        for into, values in ((sums, each_BT.cpu().double()), (counts, torch.ones(targets.shape, dtype=torch.float64))):
            into.append(torch.zeros(len(targets), len(bins) + 1, dtype=torch.float64).scatter_add(1, in_BT, values))
    sum_SB, count_SB = torch.cat(sums), torch.cat(counts)
    found = {b: _mean_of(sum_SB[:, b], count_SB[:, b]) for b in range(len(bins))}
    return {b: estimate for b, estimate in found.items() if estimate is not None}


def _asked(batch: Batch, loss: CausalLoss | MaskedLoss) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """What the model reads, and what it should say at each position."""
    ids = batch.ids.long().cpu()
    if isinstance(loss, MaskedLoss):
        return loss.inputs(batch).ids.long(), torch.where(loss.chosen(batch).cpu(), ids, NOT_SCORED)
    targets = torch.full_like(ids, NOT_SCORED)
    targets[:, :-1] = torch.where(batch.mask[:, 1:].cpu(), ids[:, 1:], NOT_SCORED)
    return ids, targets


def _mean_of(sums: Float[Tensor, "s"], counts: Float[Tensor, "s"]) -> Estimate | None:
    """The mean over targets; sequences that hold none of them know nothing of its error."""
    total = int(counts.sum())
    if total == 0:
        return None
    method = "mean loss of targets by frequency, no weights"
    return replace(ratio_over_sequences(sums, counts, torch.arange(len(sums)), method), n=total)
