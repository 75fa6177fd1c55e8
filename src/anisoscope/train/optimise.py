"""The optimiser and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from anisoscope.train.recipe import OptimisationSpec


def learning_rate(plan: OptimisationSpec, step: int) -> float:
    """The rate of update ``step`` (from 1): a straight rise to ``lr``, then half a cosine down to its share.

    The last update has exactly ``min_lr_share * lr``; with ``schedule: constant`` the rate stays up.
    """
    if step <= plan.warmup_steps:
        return plan.lr * step / plan.warmup_steps
    if plan.schedule == "constant":
        return plan.lr
    way = (step - plan.warmup_steps) / max(plan.steps - plan.warmup_steps, 1)
    share = plan.min_lr_share + (1 - plan.min_lr_share) * (1 + math.cos(math.pi * way)) / 2
    return plan.lr * share


def make_optimiser(model: nn.Module, plan: OptimisationSpec) -> torch.optim.AdamW:
    """AdamW that decays matrices, and neither norms, biases nor embeddings (a tied head is an embedding)."""
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    device = trained[0].device.type
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.lr,
        betas=plan.betas,
        fused=device in ("cpu", "cuda"),
    )
