"""Spectra of many covariances begun now and waited for later: eigenvalues, and what error bars ask of the vectors.

By tridiagonal forms where these serve, which have no vectors; by a decomposition elsewhere. Letters: S sites, M rows,
D the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.measures import tridiagonal
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
        form = tridiagonal.reduced(matrices)
        values = tridiagonal.eigenvalues(form.diagonal, form.off)

    def finish() -> Spectra:
        rejoined(stream, device, (values, form.diagonal, form.off, form.reflectors, form.taus))
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
        safe = torch.where(self.values > least, self.values, 1.0)
        weights = torch.where(self.values > least, (a[:, None] + b[:, None] * safe.log()) / safe.sqrt(), 0.0)
        scores = (rows @ self.vectors.to(rows.dtype)).square_()
        return (scores.double() @ weights[:, :, None])[:, :, 0]


@dataclass(frozen=True)
class Reduced:
    """From tridiagonal forms."""

    values: Float[Tensor, "s d"]
    form: tridiagonal.Tridiagonal

    def along_first(self, rows: Float[Tensor, "s m d"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``."""
        lead = tridiagonal.leading_vector(self.form, self.values[:, -1])
        return (rows @ lead[:, :, None].to(rows.dtype))[:, :, 0].double().square()

    def forms(self, rows: Float[Tensor, "s m d"], a: Float[Tensor, "s"], b: Float[Tensor, "s"]) -> Float[Tensor, "s m"]:
        """See ``Spectra``."""
        return self.form.forms(rows, self.values, a, b)
