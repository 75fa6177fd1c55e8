"""Spectra of many covariances begun now and waited for later: eigenvalues, and what error bars ask of the vectors.

By band and tridiagonal forms where these serve, which have no vectors; by a decomposition elsewhere. Letters: S sites,
M rows, D the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.measures import band_forms, tridiagonal
from anisoscope.measures.banded import Banded, banded
from anisoscope.measures.chased import chased
from anisoscope.measures.later import beside, better_on_host, eigh_later, rejoined, side_stream


@runtime_checkable
class Spectra(Protocol):
    """Eigenvalues of each site, ascending, and forms of rows."""

    @property
    def values(self) -> Float[Tensor, "s d"]:
        """Ascending, as they were found: those of what has no spread may be below zero by rounding."""
        ...

    def along_first(self, rows: Float[Tensor, "s m d"]) -> Float[Tensor, "s m"]:
        """Squares of what rows have along the leading vector."""
        ...

    def forms(self, rows: Float[Tensor, "s m d"], a: Float[Tensor, "s"], b: Float[Tensor, "s"]) -> Float[Tensor, "s m"]:
        """``x^T f(C) x`` of each row with ``f(l) = (a + b log l) / sqrt(l)``, float64; eigenvalues that are nothing but
        rounding count for nothing."""
        ...


def begin_spectra(matrices: Float[Tensor, "s d d"]) -> Callable[[], Spectra]:
    """Begin with float64 covariances, all of them finite, beside whatever comes next."""
    # Launching the hundred steps of a reduction takes longer than small matrices take cores that have nothing to do.
    if better_on_host(matrices.shape[1]) or not tridiagonal.fits(matrices):
        later = eigh_later(matrices)
        return lambda: Decomposed(*later())
    stream, device = side_stream("spectra", matrices), matrices.device
    with beside(stream):
        form = banded(matrices)
        values = tridiagonal.eigenvalues(*chased(form.band))

    def finish() -> Spectra:
        rejoined(stream, device, (values, form.band, form.reflectors, form.taus))
        return Reduced(values, form)

    return finish


@dataclass(frozen=True)
class Decomposed:
    """From eigenvectors."""

    values: Float[Tensor, "s d"]
    vectors: Float[Tensor, "s d d"]

    def along_first(self, rows: Float[Tensor, "s m d"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``."""
        return (rows @ self.vectors[:, :, -1:].to(rows.dtype))[:, :, 0].double().square()

    def forms(self, rows: Float[Tensor, "s m d"], a: Float[Tensor, "s"], b: Float[Tensor, "s"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``."""
        least = tridiagonal.floor(self.values)[:, None]
        safe = torch.maximum(self.values, least)
        weights = torch.addcmul(a[:, None], b[:, None], safe.log()).mul_(self.values > least).div_(safe.sqrt_())
        scores = (rows @ self.vectors.to(rows.dtype)).square_()
        return (scores.double() @ weights[:, :, None])[:, :, 0]


@dataclass(frozen=True)
class Reduced:
    """From band forms."""

    values: Float[Tensor, "s d"]
    form: Banded

    def along_first(self, rows: Float[Tensor, "s m d"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``."""
        vectors = band_forms.leading_vector(self.form.band, self.values[:, -1])
        return (rows @ self.form.back(vectors[:, :, None]).to(rows.dtype))[:, :, 0].double().square()

    def forms(self, rows: Float[Tensor, "s m d"], a: Float[Tensor, "s"], b: Float[Tensor, "s"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``.

        Eigenvalues below ``tridiagonal.floor`` count as zero. f would be infinite there; here it stays near what it is
        at the least eigenvalue that counts (about ``2 e^MARGIN`` times it at most), times the squares of what rows have
        in such a direction. Rows from which it was projected out have the rounding of float32 there, which is nothing;
        of rows that reach into it the result means little.
        """
        shifts, weights = tridiagonal.poles(self.values, a, b)
        turned = torch.bmm(self.form.q.to(rows.dtype).mT, rows.mT)  # as the kernels read it
        least = tridiagonal.EPS * self.values[:, -1].clamp_min(0)
        return band_forms.forms(self.form.band, turned, shifts, weights, least)
