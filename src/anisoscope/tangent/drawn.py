"""Shares of a gradient in many random spans at once, with no orthonormal basis formed.

The share of span(Z) in a second moment S is ``tr((Z^T Z)^-1 Z^T S Z) / tr S``. Projecting Z off a basis Q changes both
small matrices by terms in ``c = Q^T Z``, ``Q^T S Z`` and ``Q^T S Q`` only. So one product with Z serves random
controls and the normal controls of any number of bases. The spans are those of ``control_bases`` with the same seed.

S is symmetric: ``Z^T S Z = M + M^T`` with ``M = Z^T U Z``, U the upper half of S with half of its diagonal. In strips
of columns that is little more than half of the multiplications of ``S Z``.

Draws lie as rows, a control after another, so that each small matrix is a product of two contiguous blocks.

Letters: S second moments, P bases, B draws, K the rank, D the width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.controls import gaussian_draws

STRIP_COLUMNS = 128  # of the half of a second moment; narrower strips save less than they lose in speed
CHUNK_ROWS = 1024  # rows of draws multiplied at a time: what is made of them is still in cache when it is used
HELD_BYTES = 80 << 20  # of draws kept for the next call: the two halves of a test with 199 controls of rank 64 at 768


@dataclass(frozen=True)
class Gaussians:
    """The Gaussian matrices of one seed, with what depends on nothing else."""

    z: Float[Tensor, "b k d"]

    @cached_property
    def inner(self) -> Float[Tensor, "b k k"]:
        """``Z^T Z`` of each draw, float64."""
        return (self.z @ self.z.mT).double()

    @cached_property
    def inverse(self) -> Float[Tensor, "b k k"]:
        """Its inverse."""
        return _inverse(self.inner)


_Key = tuple[int, int, int, int, str, torch.dtype]
_held: OrderedDict[_Key, Gaussians] = OrderedDict()
_lock = Lock()


def held_gaussians(
    width: int, rank: int, draws: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Gaussians:
    """The draws of a seed. The last ones are kept: drawing them costs as much as using them, and looks meet them again.

    At most ``HELD_BYTES`` are kept, those of the latest calls.
    """
    key = (width, rank, draws, seed, str(device), dtype)
    with _lock:
        found = _held.get(key)
        if found is not None:
            _held.move_to_end(key)
            return found
    z = gaussian_draws(width, rank, draws, seed=seed).permute(1, 2, 0)
    found = Gaussians(z.to(device).to(dtype).contiguous())
    with _lock:
        _held[key] = found
        while sum(one.z.nbytes for one in _held.values()) > HELD_BYTES:
            _held.popitem(last=False)
    return found


@dataclass(frozen=True)
class Draws:
    """The Gaussian matrices of one seed, and the bases that they are projected off."""

    gaussians: Gaussians
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
        return cls(held_gaussians(d, k, draws, seed=seed, device=device, dtype=dtype), q)

    @property
    def z(self) -> Float[Tensor, "b k d"]:
        """The matrices, transposed."""
        return self.gaussians.z

    @property
    def flat(self) -> Float[Tensor, "d bk"]:
        """All draws side by side, for one product."""
        return self.z.flatten(0, 1).T

    @cached_property
    def within(self) -> Float[Tensor, "p b k k"]:
        """``c = Q^T Z`` of each basis and draw, float64."""
        return self.against(self.q)

    @cached_property
    def off(self) -> Float[Tensor, "p b k k"]:
        """The inverse of ``Z^T Z - c^T c``, that of the draws projected off each basis."""
        return _inverse(self.gaussians.inner - self.within.mT @ self.within)

    def against(self, columns: Float[Tensor, "s d k"]) -> Float[Tensor, "s b k k"]:
        """``columns^T Z`` of each draw, float64."""
        s, d, k = columns.shape
        found = self.z @ columns.permute(1, 0, 2).reshape(d, s * k)
        return found.unflatten(2, (s, k)).permute(2, 0, 3, 1).double()

    def random(self, form: Float[Tensor, "s b k k"]) -> Float[Tensor, "s b"]:
        """``tr((Z^T Z)^-1 form)`` with ``form = Z^T S Z``."""
        return (self.gaussians.inverse * form).sum(dim=(2, 3))

    def normal(
        self, at: int, form: Float[Tensor, "s b k k"], across: Float[Tensor, "s b k k"], own: Float[Tensor, "s k k"]
    ) -> Float[Tensor, "s b"]:
        """The same off basis number ``at``, for which ``across = Q^T S Z`` and ``own = Q^T S Q``.

        ``tr(off (form - c^T across - across^T c + c^T own c))``, each term as a sum over entries.
        """
        c, off = self.within[at], self.off[at]
        mixer = c @ off
        return (off * form).sum(dim=(2, 3)) + (mixer * (own[:, None] @ c - 2 * across)).sum(dim=(2, 3))

    def of_moments(self, seconds: Float[Tensor, "s d d"]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "p s b"]]:
        """Energies (not yet shares) of random and of normal controls in each of several second moments."""
        moments = seconds.to(self.z.dtype)
        form = torch.stack([self._form(moment) for moment in moments])
        normal = []
        for at, q in enumerate(self.q):
            held = moments @ q
            own = (q.T @ held).double()
            normal.append(self.normal(at, form, self.against(held), own))
        random = self.random(form)
        return random, torch.stack(normal) if normal else random.new_zeros(0, *random.shape)

    def _form(self, moment: Float[Tensor, "d d"]) -> Float[Tensor, "b k k"]:
        """``Z^T S Z`` of each draw, float64."""
        if moment.device.type != "cpu":
            return (self.z @ (self.z @ moment).mT).double()
        half = moment.triu()
        half.diagonal().mul_(0.5)
        found = torch.cat([part @ _times_half(part, half).mT for part in self._chunks()]).double()
        return found + found.mT

    def _chunks(self) -> Iterator[Float[Tensor, "c k d"]]:
        return iter(self.z.split(max(CHUNK_ROWS // self.z.shape[1], 1)))


def _times_half(rows: Float[Tensor, "c k d"], half: Float[Tensor, "d d"]) -> Float[Tensor, "c k d"]:
    """``rows @ half`` for an upper triangular half, strip by strip down to its diagonal."""
    flat, width = rows.flatten(0, 1), len(half)
    out = torch.empty_like(flat)
    for at in range(0, width, STRIP_COLUMNS):
        end = min(at + STRIP_COLUMNS, width)
        torch.mm(flat[:, :end], half[:end, at:end], out=out[:, at:end])
    return out.view_as(rows)


def _inverse(inner: Float[Tensor, "*lead k k"]) -> Float[Tensor, "*lead k k"]:
    return torch.cholesky_inverse(torch.linalg.cholesky(inner))
