"""How much of the gradient's anisotropy lies in a subspace: what taking the subspace away changes, against controls.

``Delta(Q) = T(P C P) - T(C)`` with ``P = I - Q Q^T``, C the centred covariance of the gradient and T isoscore_star or
spectral_ratio. Taking any K directions away zeroes K eigenvalues; the mean over matched controls cancels that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError
from anisoscope.estimate import Estimate
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.stats.moments import Moments
from anisoscope.tangent.controls import check_basis
from anisoscope.tangent.drawn import Draws
from anisoscope.tangent.units import in_range, p_value

EXACT_WIDTH = 160  # up to here whole eigendecompositions for all controls cost less than an iteration
LANCZOS_STEPS = 40
LANCZOS_ROUNDS = 12
NARROW = 64  # widths below this are done in float64 throughout
NOTHING = 1e-12
ALL_HELD = "some basis holds all of the gradient's variance: nothing is left to measure without it"
TOLERANCE = 1e-5  # residual over eigenvalue at which the iteration stops; the value's own error is its square or so


@dataclass(frozen=True)
class AnisotropyShare:
    """Delta of a basis minus the mean Delta of its controls, for both measures, with p-values over the controls.

    ``isoscore_star`` above 0: taking the basis away leaves a rounder gradient than taking a control away.
    ``spectral_ratio`` below 0 says the same. The p-values are one-sided in these directions.
    """

    isoscore_star: Estimate
    p_isoscore_star: float
    spectral_ratio: Estimate | None = None
    p_spectral_ratio: float | None = None
    spectral_deltas: Float[Tensor, "one_plus_b"] | None = None
    """Delta of the spectral ratio for the basis, and then for each control."""


def anisotropy_share(
    gradients: Float[Tensor, "n d"],
    basis: Float[Tensor, "d k"],
    controls: Float[Tensor, "b d k"],
    zeta: float = 0.1,
    *,
    spectral: bool = True,
    covariance: Float[Tensor, "d d"] | None = None,
) -> AnisotropyShare:
    """``Delta(Q) - mean_b Delta(Q_b)`` for isoscore_star (shrunken by ``zeta`` to ``(tr S / D) I``) and spectral_ratio.

    Everything after the covariance works on D x D matrices. The plain (plug-in) formulas are used: the bias of few
    rows is nearly the same for basis and controls and cancels in the difference. The spectral ratio needs an
    eigenvalue for each control, which is most of the cost: ``spectral=False`` leaves it out. ``covariance`` is the
    ``unit_covariance`` of the gradients where it is known already, as for the second of two bases.
    """
    if not 0 <= zeta <= 1:
        raise OptionError(f"zeta is a share between 0 and 1, got {zeta}")
    check_basis(basis, gradients.shape[1])
    if controls.shape[1:] != basis.shape:
        raise ShapeError(f"controls have shape {tuple(controls.shape)}, the basis {tuple(basis.shape)}; want (B, D, K)")
    if len(controls) == 0:
        raise OptionError("anisotropy_share needs at least one control")
    covariance = unit_covariance(gradients) if covariance is None else covariance
    bases = torch.cat([basis[None], controls.to(basis)]).to(covariance)
    rounder = isoscores_without(covariance, bases, zeta)
    whole = isoscores_without(covariance, bases[:1, :, :0], zeta)
    n = len(gradients)
    found = AnisotropyShare(
        _difference(rounder - whole, float(whole), f"isoscore_star, z={zeta:g}, plugin", n, ()),
        p_value(float(rounder[0]), rounder[1:]),
    )
    if not spectral:
        return found
    lead, notes = spectral_ratios_without(covariance, bases)
    top = torch.linalg.eigvalsh(covariance)[-1:]
    return replace(
        found,
        spectral_ratio=_difference(lead - top, float(top), "spectral_ratio", n, notes),
        p_spectral_ratio=p_value(-float(lead[0]), -lead[1:]),
        spectral_deltas=lead - top,
    )


@dataclass(frozen=True)
class LeftOver:
    """``tr P C P`` and ``|P C P|^2`` without each basis (first) and each of its normal controls; of C itself ``whole``.

    For two halves, H, whose bases P are fitted on the other.
    """

    traces: Float[Tensor, "h p one_plus_b"]
    squares: Float[Tensor, "h p one_plus_b"]
    whole: Float[Tensor, "h two"]

    @classmethod
    def of(
        cls, covariances: Float[Tensor, "h d d"], bases: Float[Tensor, "h p d k"], draws: int, seed: int
    ) -> LeftOver:
        """From covariances of trace one, in float64. In many dimensions what controls hold is in float32, which leaves
        six digits of it.

        ``tr P C P = tr C - tr Q^T C Q`` and ``|P C P|^2 = |C|^2 - 2 tr Q^T C^2 Q + |Q^T C Q|^2``: all but the last is
        linear in C or its square, as energies are.
        """
        device, q = covariances.device, bases.to(covariances)
        # In few dimensions a control may hold nearly everything, and what is left is then a small difference.
        dtype = torch.float32 if covariances.shape[1] >= NARROW else torch.float64
        drawn = Draws.of(q, draws, seed, device, dtype)
        twice = covariances @ covariances
        normal = drawn.normal_of_moments(torch.stack([covariances, twice], dim=1))
        image = covariances[:, None] @ q
        small = q.mT @ image
        once = torch.cat([small.diagonal(dim1=2, dim2=3).sum(dim=2)[:, :, None], normal[:, :, 0]], dim=2)
        second = torch.cat([image.square().sum(dim=(2, 3))[:, :, None], normal[:, :, 1]], dim=2)
        both = torch.cat([small.square().sum(dim=(2, 3))[:, :, None], drawn.lengths(covariances)], dim=2)
        trace, length = covariances.diagonal(dim1=1, dim2=2).sum(dim=1), covariances.square().sum(dim=(1, 2))
        whole = torch.stack([trace, length], dim=1)
        return cls(trace[:, None, None] - once, length[:, None, None] - 2 * second + both, whole)

    def of_basis(self, number: int) -> LeftOver:
        """Of one basis alone; an error where it, or a control of it, leaves nothing in some half."""
        if not bool((self.traces[:, number] > NOTHING * self.whole[:, :1]).all()):
            raise DegenerateError(ALL_HELD)
        at = slice(number, number + 1)
        return LeftOver(self.traces[:, at], self.squares[:, at], self.whole)

    def by_half(self) -> list[dict[str, np.ndarray]]:
        """As tables of one site, for each half."""
        return [
            {name: getattr(self, name)[half, None].cpu().numpy() for name in ("traces", "squares", "whole")}
            for half in range(len(self.whole))
        ]


def unit_covariance(gradients: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """The covariance of the gradient over its trace, in float64."""
    rows = in_range(gradients, "gradients")
    if len(rows) < 2:
        raise TooFewRowsError(f"a covariance needs two rows, got {len(rows)}")
    covariance = Moments.of(rows).covariance()
    if not float(covariance.trace()) > 0:
        raise DegenerateError("all gradient rows are equal: their covariance is zero")
    return covariance / covariance.trace()


def _difference(deltas: Float[Tensor, "b1"], whole: float, name: str, n: int, notes: tuple[str, ...]) -> Estimate:
    own, null = float(deltas[0]), deltas[1:]
    mean, b = float(null.mean()), len(null)
    bar = Bar(float(null.std(correction=1)) / math.sqrt(b), b - 1, f"{b} controls") if b >= 3 else None

    def part(value: float, what: str) -> Estimate:
        return Estimate(value=value, stderr=None, n=n, method=what)

    return Estimate(
        value=own - mean,
        n=n,
        method=f"Delta(Q) - mean_b Delta(Q_b) of {name}",
        notes=(*notes, "the error bar is that of the controls' mean; the rows are taken as given"),
        parts={"delta": part(own, f"{name} without Q minus with"), "controls": part(mean, "mean over controls"),
               "whole": part(whole, f"{name} of the gradient")},
        **fields(bar),
    )  # fmt: skip


def isoscores_without(
    covariance: Float[Tensor, "d d"], bases: Float[Tensor, "b d k"], zeta: float
) -> Float[Tensor, "b"]:
    """isoscore_star of ``P C P`` for each basis, with no matrix but ``C Q`` formed.

    ``tr P C P = tr C - tr Q^T C Q`` and ``|P C P|^2 = |C|^2 - 2 |C Q|^2 + |Q^T C Q|^2``.
    """
    b, d, k = bases.shape
    flat = bases.permute(1, 0, 2).reshape(d, b * k)
    image = (covariance @ flat).view(d, b, k).permute(1, 0, 2)
    small = bases.transpose(1, 2) @ image
    trace = covariance.trace() - small.diagonal(dim1=1, dim2=2).sum(dim=1)
    square = covariance.square().sum() - 2 * image.square().sum(dim=(1, 2)) + small.square().sum(dim=(1, 2))
    if not bool((trace > NOTHING * covariance.trace()).all()):
        raise DegenerateError(ALL_HELD)
    keep = 1 - zeta
    ratio = trace.square() / (keep**2 * square + (1 - keep**2) * trace.square() / d)
    return (ratio - 1) / (d - 1)


def spectral_ratios_without(
    covariance: Float[Tensor, "d d"], bases: Float[Tensor, "b d k"]
) -> tuple[Float[Tensor, "b"], tuple[str, ...]]:
    """spectral_ratio of ``P C P`` for each basis; a note where the iteration did not settle for all of them."""
    image = (bases.transpose(1, 2) @ covariance * bases.transpose(1, 2)).sum(dim=(1, 2))
    trace = covariance.trace() - image
    if covariance.shape[0] <= EXACT_WIDTH:
        # In place where it can be: one such stack is larger than a cache.
        off = (bases @ (bases.transpose(1, 2) @ covariance)).neg_().add_(covariance)
        off.sub_((off @ bases) @ bases.transpose(1, 2))
        return torch.linalg.eigvalsh((off + off.transpose(1, 2)).div_(2))[:, -1] / trace, ()
    value, residual = _lanczos(covariance, bases)
    worst = float(residual.max())
    late = f"the leading eigenvalue settled to {worst:.1g} of itself only" if worst > TOLERANCE else ""
    return value / trace, (late,) if late else ()


def _lanczos(
    covariance: Float[Tensor, "d d"], bases: Float[Tensor, "b d k"]
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
    """Leading eigenvalue of ``P C P`` for all bases at once, and its residual over it; restarted until it settles."""
    b, d, k = bases.shape
    steps = min(LANCZOS_STEPS, d - k)
    generator = torch.Generator().manual_seed(0)  # a start, not a result: any other gives the same value
    start = torch.randn(b, d, generator=generator, dtype=torch.float64).to(covariance)

    def off(v: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return v - (bases @ (bases.transpose(1, 2) @ v[:, :, None]))[:, :, 0]

    for _ in range(LANCZOS_ROUNDS):
        start = torch.nn.functional.normalize(off(start), dim=1)
        space, images = start[:, None], []
        for step in range(steps):
            image = off(space[:, step] @ covariance)
            images.append(image)
            if step + 1 < steps:
                fresh = image
                for _ in range(2):  # once leaves rounding behind, and Lanczos vectors then repeat themselves
                    fresh = off(fresh - ((space @ fresh[:, :, None]).transpose(1, 2) @ space)[:, 0])
                space = torch.cat([space, torch.nn.functional.normalize(fresh, dim=1)[:, None]], dim=1)
        image_BSD = torch.stack(images, dim=1)
        small = space @ image_BSD.transpose(1, 2)
        values, vectors = torch.linalg.eigh((small + small.transpose(1, 2)) / 2)
        value, mix = values[:, -1], vectors[:, None, :, -1]
        start = (mix @ space)[:, 0]
        residual = ((mix @ image_BSD)[:, 0] - value[:, None] * start).norm(dim=1) / value
        if bool((residual <= TOLERANCE).all()):
            break
    return value, residual
