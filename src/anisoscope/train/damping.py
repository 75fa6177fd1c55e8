"""Tangent damping: the gradient's part along a tangent proxy, or beside it, scaled; the forward pass as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import NonFiniteError, OptionError, ShapeError, choose
from anisoscope.tangent.proxies import KINDS, Proxy, fit_proxy
from anisoscope.tangent.spans import check_rank
from anisoscope.train.penalty_rows import Mask, rows_of

ORTHONORMAL = 1e-4  # the largest error of Q^T Q that float32 bases and their half-precision copies do not reach
FITTED_ROWS = 4096


def damp(
    h: Float[Tensor, "*lead d"], basis: Float[Tensor, "_ k"] | Proxy, *, tangent: float = 1.0, normal: float = 1.0
) -> Float[Tensor, "*lead d"]:
    """``h`` itself; its gradient g becomes ``tangent g Q Q^T + normal (g - g Q Q^T)`` on the way back.

    ``basis`` is an orthonormal Q, such as ``anisoscope.fit_proxy(rows, "pca", 16)`` gives. 1 and 1 change nothing,
    ``tangent=0`` takes the part along Q out, a factor above 1 amplifies. Of each token on its own, so padding, whose
    gradient is zero, stays there. This is no gradient of any loss: ``gradcheck`` fails on purpose.
    """
    columns = basis.basis if isinstance(basis, Proxy) else basis
    for name, factor in (("tangent", tangent), ("normal", normal)):
        if not (math.isfinite(factor) and factor >= 0):
            raise OptionError(f"damp: {name} is a factor of at least 0, got {factor}")
    if columns.ndim != 2 or h.ndim < 1 or columns.shape[0] != h.shape[-1] or columns.shape[1] > columns.shape[0]:
        raise ShapeError(
            f"damp: a basis (d, k) with k <= d for activations of width d = {h.shape[-1] if h.ndim else 0}, "
            f"got {tuple(columns.shape)}"
        )
    wide = columns.detach().double()
    error = float((wide.T @ wide - torch.eye(wide.shape[1], dtype=wide.dtype, device=wide.device)).abs().max())
    if not error <= ORTHONORMAL:
        raise OptionError(
            f"damp: the columns of the basis are not orthonormal (Q^T Q is off by {error:.2g}); "
            "take those of a proxy, or torch.linalg.qr of yours"
        )
    return _scaled(h, columns, tangent, normal)


def _scaled(h: Tensor, columns: Tensor, tangent: float, normal: float) -> Tensor:
    found: Tensor = _Damped.apply(h, columns.detach(), tangent, normal)
    return found


class _Damped(torch.autograd.Function):
    """Identity forward; tangent and normal part of the gradient scaled backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, columns: Tensor, tangent: float, normal: float) -> Tensor:
        ctx.save_for_backward(columns)
        ctx.factors = (tangent, normal)
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (columns,), (tangent, normal), grad = ctx.saved_tensors, ctx.factors, grads[0]
        if tangent == normal == 1:
            return grad, None, None, None
        with torch.autocast(grad.device.type, enabled=False):
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            q = columns.to(wide)
            along = (wide @ q) @ q.T
            # Not tangent * along + normal * (wide - along): equal factors then scale the gradient to the last bit.
            changed = normal * wide + (tangent - normal) * along
        return changed.to(grad.dtype), None, None, None


class TangentDamping:
    """Damping along a proxy that is fitted to the activations themselves, anew every so many steps.

        damping = TangentDamping(rank=16, tangent=0.5, refit_every=100)
        h = damping(h, step)  # in the forward pass; steps from 1

    The fit at a step is a pure function of its activations and ``seed`` (no warm start). ``state`` and ``restore``
    carry the basis over a checkpoint.
    """

    def __init__(
        self,
        *,
        rank: int = 16,
        proxy: str = "pca",
        tangent: float = 0.5,
        normal: float = 1.0,
        refit_every: int = 100,
        seed: int = 0,
    ) -> None:
        self.proxy = choose("proxy", proxy, KINDS)
        self.rank = check_rank(rank, rank)
        if isinstance(refit_every, bool) or not isinstance(refit_every, int) or refit_every < 1:
            raise OptionError(f"refit_every is a whole number of steps of at least 1, got {refit_every!r}")
        for name, factor in (("tangent", tangent), ("normal", normal)):
            if not (math.isfinite(factor) and factor >= 0):
                raise OptionError(f"tangent damping: {name} is a factor of at least 0, got {factor}")
        self.tangent, self.normal, self.refit_every, self.seed = float(tangent), float(normal), refit_every, seed
        self.basis: Float[Tensor, "d k"] | None = None
        self.fitted_at = 0
        """The step of the last fit; 0 before the first."""

    def due(self, step: int) -> bool:
        """Whether the proxy is fitted at this step: the first, and whenever so many steps have passed."""
        return self.basis is None or (step != self.fitted_at and (step - 1) % self.refit_every == 0)

    def __call__(self, h: Float[Tensor, "*lead d"], step: int, *, mask: Mask = None) -> Float[Tensor, "*lead d"]:
        """``h``, damped on the way back. Where a fit is due these tokens are what it is fitted to."""
        if self.due(step):
            self.fit(h, step, mask=mask)
        assert self.basis is not None  # fitted
        if self.basis.shape[0] != h.shape[-1]:
            raise ShapeError(f"tangent damping was fitted to width {self.basis.shape[0]}, got {h.shape[-1]}")
        return _scaled(h, self.basis, self.tangent, self.normal)

    @torch.no_grad()
    def fit(self, h: Float[Tensor, "*lead d"], step: int, *, mask: Mask = None) -> None:
        """Fit the proxy to these tokens, to ``FITTED_ROWS`` of them at most, evenly spread."""
        rows = rows_of("tangent_damping", h.detach(), mask)
        rows = rows[:: max(1, math.ceil(len(rows) / FITTED_ROWS))]
        if not bool(torch.isfinite(rows).all()):
            raise NonFiniteError(f"tangent_damping: the activations at step {step} hold NaN or infinity")
        with torch.autocast(h.device.type, enabled=False):
            found = fit_proxy(rows, self.proxy, self.rank, seed=self.seed)
        # Contiguous, as it comes back from a file: not a bit may differ after a checkpoint.
        self.basis = found.basis.to(rows.dtype).contiguous()
        self.fitted_at = step

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold; empty before the first fit."""
        return {} if self.basis is None else {"basis": self.basis, "fitted_at": torch.tensor(self.fitted_at)}

    def restore(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Take up a state again."""
        if state:
            # A copy lies in memory as a result of a computation does; a view into a file may not.
            self.basis, self.fitted_at = state["basis"].clone().to(device), int(state["fitted_at"])


def tangent_damping(**options: Any) -> TangentDamping:
    """A ``TangentDamping`` with these options, in the manner of the terms."""
    return TangentDamping(**options)
