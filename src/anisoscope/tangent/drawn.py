"""Shares of a gradient in many random spans at once, with no orthonormal basis formed.

The share of span(Z) in a second moment S is ``tr((Z^T Z)^-1 Z^T S Z) / tr S``. Projecting Z off a basis Q changes both
small matrices by terms in ``c = Q^T Z``, ``Q^T S Z`` and ``Q^T S Q`` only. So one product with Z serves random
controls and the normal controls of any number of bases. The spans are those of ``control_bases`` with the same seed.

S is symmetric, and all that is asked of ``Z^T S Z`` are sums against symmetric matrices. So ``Z^T U Z`` does as well, U
the upper half of S with all but its diagonal doubled. In strips of columns that is little more than half of the
multiplications of ``S Z``. Products with Q and ``S Q`` go along with the last strip.

Draws lie as rows, a control after another, so that each small matrix is a product of two contiguous blocks.

Letters: S second moments, P bases, B draws, K the rank, D the width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.controls import gaussian_draws

STRIP_COLUMNS = 128  # of the half of a second moment; narrower strips save less than they lose in speed
CHUNK_ROWS = 2048  # rows of draws multiplied at a time on a CPU
HELD_BYTES = 80 << 20  # of draws kept for the next call: the two halves of a test with 199 controls of rank 64 at 768
EVERY = slice(None)


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

    def against(self, columns: Float[Tensor, "s d k"]) -> Float[Tensor, "s b k k"]:
        """``columns^T Z`` of each draw."""
        return (self.z @ columns[:, None]).mT

    def random(self, form: Float[Tensor, "s b k k"], at: slice = EVERY) -> Float[Tensor, "s b"]:
        """``tr((Z^T Z)^-1 form)`` of some draws, where ``Z^T S Z`` is the symmetric part of ``form``; float64."""
        return (self.gaussians.inverse[at] * form).sum(dim=(2, 3))

    def normal(
        self,
        within: Float[Tensor, "b k k"],
        form: Float[Tensor, "s b k k"],
        across: Float[Tensor, "s b k k"],
        at: slice = EVERY,
    ) -> Float[Tensor, "s b"]:
        """The same off a basis with ``c = Q^T Z`` within and ``across = Q^T S Z - Q^T S Q c / 2``.

        ``tr(off (form - c^T across - across^T c))`` with ``off = (Z^T Z - c^T c)^-1``, that of the draws projected off
        the basis; each term as a sum over entries.
        """
        off = _inverse(self.gaussians.inner[at] - within.mT @ within)
        mixer = within @ off.to(within.dtype)
        return (off * form).sum(dim=(2, 3)) - 2 * (mixer * across).sum(dim=(2, 3), dtype=torch.float64)

    def of_moments(self, seconds: Float[Tensor, "s d d"]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "p s b"]]:
        """Energies (not yet shares) of random and of normal controls in each of several second moments.

        A few draws at a time on a CPU: what is made of them is still in its cache when it is used.
        """
        rights, (draws, rank, _) = self._rights(seconds.to(self.z.dtype)), self.z.shape
        step = max(CHUNK_ROWS // rank, 1) if self.z.device.type == "cpu" else draws
        found = [self._energies(slice(at, at + step), rights) for at in range(0, draws, step)]
        random, normal = zip(*found, strict=True)
        return torch.cat(random, dim=1), torch.cat(normal, dim=2)

    def _rights(self, moments: Float[Tensor, "s d d"]) -> list[Tensor]:
        """What draws are multiplied with, for each moment: the moment, the bases (once) and what it makes of them."""
        rights = []
        for number, moment in enumerate(moments):
            held = moment @ self.q
            # Half of Q^T S Q is taken off on both sides of the draws: no product with each of them is left for it.
            lean = held - self.q @ (self.q.mT @ held) / 2
            part = moment
            if moment.device.type == "cpu":
                part = moment.triu(1).mul_(2)
                part.diagonal().copy_(moment.diagonal())
            rights.append(torch.cat([part, *(() if number else self.q), *lean], dim=1))
        return rights

    def _energies(self, at: slice, rights: Sequence[Tensor]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "p s b"]]:
        """``of_moments`` of some draws."""
        z, bases = self.z[at], len(self.q)
        width, forms, columns = z.shape[2], list[Tensor](), list[Tensor]()
        for right in rights:
            images = _times_half(z, right) if z.device.type == "cpu" else z @ right
            forms.append(z @ images[:, :, :width].mT)
            # A copy, or these few columns would keep all images of all moments.
            columns.extend(images[:, :, width:].mT.contiguous().split(z.shape[1], dim=1))
        form = torch.stack(forms)
        random = self.random(form, at)
        within, across = columns[:bases], columns[bases:]
        normal = [self.normal(c, form, torch.stack(across[p::bases]), at) for p, c in enumerate(within)]
        return random, torch.stack(normal) if normal else random.new_zeros(0, *random.shape)


def _times_half(rows: Float[Tensor, "c k d"], right: Float[Tensor, "d w"]) -> Float[Tensor, "c k w"]:
    """``rows @ right``, whose first D columns are upper triangular: strip by strip down to the diagonal.

    The columns behind them go with the last strip, which is as deep as they are.
    """
    flat, (width, whole) = rows.flatten(0, 1), right.shape
    out = torch.empty(len(flat), whole, dtype=flat.dtype)
    for at in range(0, width, STRIP_COLUMNS):
        end = min(at + STRIP_COLUMNS, width)
        to = end if end < width else whole
        torch.mm(flat[:, :end], right[:end, at:to], out=out[:, at:to])
    return out.view(*rows.shape[:2], whole)


def _inverse(inner: Float[Tensor, "*lead k k"]) -> Float[Tensor, "*lead k k"]:
    return torch.cholesky_inverse(torch.linalg.cholesky(inner))
