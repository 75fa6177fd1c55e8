"""Many symmetric matrices brought to band form at once, block column by block column, for a GPU.

All but the factorisation of block columns are products of matrices, so that a matrix is read twice for each block of
columns; straight to tridiagonal form it would be once for each column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, on_its_device

BAND = 32
"""Entries beside the diagonal on either side, and columns of a block."""
MOST_PROGRAMS = 32  # that share a block column
SHARES = ((128, 4), (256, 8))  # rows of a program, and its warps
REGISTERS = 128  # of a thread, so that
WARPS_AT_ONCE = 16  # fit on a processor
WY = 128  # reflectors that make up one product when they are applied


@dataclass(frozen=True)
class Banded:
    """Matrices ``Q B Q^T``, B of BAND entries on either side of its diagonal, and the reflectors whose product is Q.

    Entry ``[m, j, i]`` of ``band`` is that of B in row j + i of column j; zero beyond BAND and after the last row. Row
    j of ``reflectors`` is the vector of ``I - tau_j v v^T``, one at place j + BAND, zero before.
    """

    band: Float[Tensor, "m d w"]
    reflectors: Float[Tensor, "m d d"]
    taus: Float[Tensor, "m d"]

    @cached_property
    def _factors(self) -> list[tuple[int, Float[Tensor, "m k l"], Float[Tensor, "m k l"]]]:
        """Products of ``WY`` reflectors each, ``I - V^T F V``: where they start, V and ``F^T V``."""
        width = self.reflectors.shape[1]
        whole = width - width % WY
        found = list[tuple[int, Tensor, Tensor]]()
        # All that are full at once, in a few launches; what is zero before a panel's first column is multiplied too.
        for first, end, size in ((0, whole, WY), (whole, width, width - whole)):
            if first < end:
                vectors = self.reflectors[:, first:end].unflatten(1, (-1, size))
                tau = self.taus[:, first:end].unflatten(1, (-1, size))
                inner = torch.triu(vectors @ vectors.mT, diagonal=1) * tau[:, :, :, None]
                small = torch.linalg.solve_triangular(inner, torch.diag_embed(tau), upper=True, unitriangular=True)
                each = zip(range(first, end, size), vectors.unbind(1), (small.mT @ vectors).unbind(1), strict=True)
                found += [(at, one[:, :, at:], two[:, :, at:]) for at, one, two in each]
        return found

    @cached_property
    def q(self) -> Float[Tensor, "m d d"]:
        """The orthogonal matrices Q, float64."""
        many, width = self.taus.shape
        eye = torch.eye(width, dtype=self.taus.dtype, device=self.taus.device)
        return self.back(eye.repeat(many, 1, 1), whole=False)

    def back(self, columns: Float[Tensor, "m d c"], *, whole: bool = True) -> Float[Tensor, "m d c"]:
        """``Q`` times some columns, in place; not ``whole``: they are the identity, which fills up from its end."""
        for first, vectors, turned in reversed(self._factors):
            part = columns[:, first:, 0 if whole else first :]
            part.baddbmm_(turned.mT, vectors @ part, alpha=-1)
        return columns


def dense(band: Float[Tensor, "m d w"]) -> Float[Tensor, "m d d"]:
    """The band matrices in full."""
    width = band.shape[1]
    lower = band.new_zeros(band.shape[0], width, width)
    for i in range(min(width, band.shape[2] // 2 + 1)):
        lower.diagonal(-i, 1, 2).copy_(band[:, : width - i, i])
    return lower + lower.tril(-1).mT


def unit_of(matrices: Float[Tensor, "m d w"]) -> tuple[Float[Tensor, "m 1 1"], Float[Tensor, "m 1"]]:
    """Powers of two that bring entries to one at most, so that squares neither vanish nor overflow, and nothing is
    rounded; and what a result of each matrix is to be spoilt with: nothing, or NaN where an entry is not finite."""
    sizes = torch.linalg.vector_norm(matrices, ord=torch.inf, dim=(1, 2))
    finite = torch.isfinite(sizes)
    exponent = torch.frexp(torch.where(finite & (sizes > 0), sizes, 1.0)).exponent
    scale = torch.ldexp(torch.ones_like(sizes), -exponent)
    return scale[:, None, None], torch.where(finite, 0.0, torch.nan)[:, None]


def share_of(rows: int, many: int, processors: int) -> tuple[int, int]:
    """Rows of a block column that a program has, and its warps: the fewest with which all programs run at once."""
    for share, warps in SHARES[:-1]:
        if -(-rows // share) <= min(MOST_PROGRAMS, WARPS_AT_ONCE // warps * processors // many):
            return share, warps
    return SHARES[-1]


@on_its_device
def banded(matrices: Float[Tensor, "m d d"], share: tuple[int, int] | None = None) -> Banded:
    """Symmetric float64 matrices in band form, all at once; one that is not finite becomes NaN.

    ``share`` sets rows and warps of a program on a GPU.
    """
    scale, lost = unit_of(matrices)
    found = _reduced(matrices, scale, share)
    return Banded(found.band / scale + lost[:, :, None], found.reflectors, found.taus + lost)


def _reduced(matrices: Float[Tensor, "m d d"], scale: Float[Tensor, "m 1 1"], share: tuple[int, int] | None) -> Banded:
    """Block by block, over a copy whose rows become the reflectors."""
    (many, width, _), new = matrices.shape, matrices.new_zeros
    stride = -(-width // BAND) * BAND
    whole = (new if stride > width else matrices.new_empty)(many, stride, stride)
    a = whole[:, :width, :width]
    torch.mul(matrices, scale, out=a)
    band, taus = new(many, stride, 2 * BAND), new(many, stride)
    trio, factor = new(many, 3, BAND, stride), new(many, BAND, BAND)
    work = Work(whole, band, trio, factor, taus, width, share)
    for first in range(0, width, BAND):
        work.panel(first)
        after = first + BAND
        if after + 1 < width:
            both = trio[:, :, :, after:width]
            vectors, companions = both[:, 0], both[:, 1]
            turned = factor.mT @ vectors
            torch.bmm(turned, a[:, after:, after:], out=companions)
            companions.baddbmm_(turned @ companions.mT, vectors, alpha=-0.5)
            left, right = both[:, :2].flatten(1, 2), both[:, 1:].flatten(1, 2)
            a[:, after:, after:].baddbmm_(left.mT, right, alpha=-1)
    return Banded(band[:, :width], a.triu_(BAND), taus[:, :width])


@dataclass(frozen=True)
class Work:
    """What a reduction is done with; see ``kernels.band.factor_panel``."""

    whole: Float[Tensor, "m s s"]
    band: Float[Tensor, "m s w"]
    trio: Float[Tensor, "m 3 k s"]
    factor: Float[Tensor, "m k k"]
    taus: Float[Tensor, "m s"]
    width: int
    share: tuple[int, int] | None

    @cached_property
    def _scratch(self) -> tuple[Tensor, Tensor]:
        many, stride = self.taus.shape
        sums = self.taus.new_empty(many, 2, MOST_PROGRAMS + 1, BAND)
        return sums, torch.zeros(-(-stride // BAND), many, dtype=torch.int32, device=self.taus.device)

    def panel(self, first: int) -> None:
        """Reflectors of the block column from ``first`` on, their factor, and what becomes part of the band."""
        (self._by_kernel if _by_kernels(self.taus) else self._plain)(first)

    def _by_kernel(self, first: int) -> None:
        kernels, (many, stride) = kernels_of("band"), self.taus.shape
        cuda, rows = self.taus.is_cuda, max(1, self.width - first - BAND)
        processors = torch.cuda.get_device_properties(self.taus.device).multi_processor_count if cuda else 1
        share, warps = self.share or share_of(rows, many, processors)
        each, (sums, counters) = -(-rows // share), self._scratch
        options: dict[str, Any] = {"maxnreg": REGISTERS, "launch_cooperative_grid": each > 1} if cuda else {}
        at_once = max(1, WARPS_AT_ONCE // warps * processors // each) if cuda else many
        for begin in range(0, many, at_once):  # all at once, unless there are very many of them
            few = slice(begin, begin + at_once)
            kernels.factor_panel[(len(self.taus[few]) * each,)](
                self.whole[few], self.band[few], self.trio[few], self.factor[few], self.taus[few], sums[few],
                counters[first // BAND, few], self.width, stride, first, each,
                PP=MOST_PROGRAMS, K=BAND, R=share, W=2 * BAND, num_warps=warps, **options,
            )  # fmt: skip

    def _plain(self, first: int) -> None:
        stop, after = min(first + BAND, self.width), first + BAND
        block = self.whole[:, first:stop, first:stop]
        for j in range(stop - first):
            self.band[:, first + j, : stop - first - j] = block[:, j, j:]
        self.factor.zero_()
        if after >= self.width:
            return
        packed, tau = torch.geqrf(self.whole[:, first:after, after : self.width].mT.nan_to_num())
        rows, count = packed.shape[1], tau.shape[1]
        vectors = torch.zeros_like(packed)
        vectors[:, :, :count] = torch.tril(packed[:, :, :count], -1)
        vectors.diagonal(dim1=1, dim2=2).fill_(1)
        for j in range(BAND):
            self.band[:, first + j, BAND - j : BAND - j + min(j + 1, rows)] = packed[:, : j + 1, j]
        vectors, taus = vectors.mT, torch.nn.functional.pad(tau, (0, BAND - count))
        inner = torch.triu(vectors @ vectors.mT, diagonal=1) * taus[:, :, None]
        self.factor.copy_(torch.linalg.solve_triangular(inner, torch.diag_embed(taus), upper=True, unitriangular=True))
        self.taus[:, first:after] = taus
        self.whole[:, first:after, after : self.width] = vectors
        self.trio[:, ::2, :, after : self.width] = vectors[:, None]


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda
