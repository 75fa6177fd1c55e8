"""Shares of a gradient in many random spans at once, with no orthonormal basis formed.

The share of span(Z) in a second moment S is ``tr((Z^T Z)^-1 Z^T S Z) / tr S``. Projecting Z off a basis Q changes both
small matrices by terms in ``c = Q^T Z``, ``Q^T S Z`` and ``Q^T S Q`` only. So one product ``S Z`` serves random
controls and the normal controls of any number of bases. The spans are those of ``control_bases`` with the same seed.

Letters: S second moments, P bases, B draws, K the rank, D the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.controls import gaussian_draws


@dataclass(frozen=True)
class Draws:
    """The Gaussian matrices of one seed, and the bases that they are projected off."""

    z: Float[Tensor, "d b k"]
    q: Float[Tensor, "p d k"]

    @classmethod
    def of(
        cls, bases: Float[Tensor, "p d k"], draws: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Draws:
        """Draws beside these bases, in the precision that their projection needs."""
        _, d, k = bases.shape
        # Taking c^T c off Z^T Z cancels where the complement is small; float64 then, and bases orthonormal to float64.
        tight = 8 * k > d
        dtype = torch.float64 if tight else dtype
        q = bases.to(device, dtype)
        q = torch.linalg.qr(q).Q if tight and len(q) else q
        return cls(gaussian_draws(d, k, draws, seed=seed, device=device).to(dtype), q)

    @property
    def flat(self) -> Float[Tensor, "d bk"]:
        """All draws side by side, for one product."""
        return self.z.reshape(len(self.z), -1)

    @cached_property
    def inner(self) -> Float[Tensor, "b k k"]:
        """``Z^T Z`` of each draw, float64."""
        return small(self.z[None], self.z[None])[0]

    @cached_property
    def within(self) -> Float[Tensor, "p b k k"]:
        """``c = Q^T Z`` of each basis and draw, float64."""
        return self._against(self.q)

    def _against(self, columns: Float[Tensor, "s d k"]) -> Float[Tensor, "s b k k"]:
        """``columns^T Z``."""
        _, b, k = self.z.shape
        found = columns.transpose(1, 2) @ self.flat
        return found.unflatten(2, (b, k)).transpose(1, 2).double()

    def random(self, form: Float[Tensor, "s b k k"]) -> Float[Tensor, "s b"]:
        """``tr((Z^T Z)^-1 form)`` with ``form = Z^T S Z``."""
        return _traces(self.inner, form)

    def normal(
        self, at: int, form: Float[Tensor, "s b k k"], across: Float[Tensor, "s b k k"], own: Float[Tensor, "s k k"]
    ) -> Float[Tensor, "s b"]:
        """The same off basis number ``at``, for which ``across = Q^T S Z`` and ``own = Q^T S Q``."""
        c = self.within[at]
        mixed = c.transpose(1, 2) @ across
        inner = self.inner - c.transpose(1, 2) @ c
        form = form - mixed - mixed.transpose(2, 3) + c.transpose(1, 2) @ own[:, None] @ c
        return _traces(inner, form)

    def of_moments(self, seconds: Float[Tensor, "s d d"]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "p s b"]]:
        """Energies (not yet shares) of random and of normal controls in each of several second moments."""
        moments = seconds.to(self.z.dtype)
        _, b, k = self.z.shape
        images = (moments @ self.flat).unflatten(2, (b, k))
        form = small(self.z[None], images)
        normal = []
        for at, q in enumerate(self.q):
            held = moments @ q
            own = (q.T @ held).double()
            normal.append(self.normal(at, form, self._against(held), own))
        random = self.random(form)
        return random, torch.stack(normal) if normal else random.new_zeros(0, *random.shape)


def small(left: Float[Tensor, "one n b k"], right: Float[Tensor, "s n b k"]) -> Float[Tensor, "s b k k"]:
    """``left^T right`` of each draw, float64."""
    return (left.permute(0, 2, 3, 1) @ right.permute(0, 2, 1, 3)).double()


def _traces(inner: Float[Tensor, "b k k"], form: Float[Tensor, "s b k k"]) -> Float[Tensor, "s b"]:
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))
    return (inverse * form.transpose(2, 3)).sum(dim=(2, 3))
