"""Eigenvalues of many symmetric matrices at once from their tridiagonal forms, and functions of them as rational sums.

Libraries decompose matrices one after another. Here all of them go through their columns together, to a band
(``banded``) and from there to three diagonals (``chased``), and nothing asks for eigenvectors: eigenvalues come from
counts of sign changes, ``x^T f(C) x`` from a rational sum of f, one factorisation of the band for each of its poles
(``band_forms``).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device

LEAST_WIDTH, MOST_WIDTH = 256, 4096  # below a library's decomposition is about as fast; above nobody has measured
LEAST_MATRICES = 4  # one matrix alone is better left to a library

HALVINGS = 55  # from twice the norm to less than its rounding
NEGLIGIBLE = 1e-34  # squares beside the diagonal, relative to the squared norm: below its rounding, and not zero
VALUES = 64  # eigenvalues that a program of one warp looks for

POLE_COUNT = 36
STEP = 0.59  # between poles, in log sigma: so many reach over twelve digits
MARGIN = 3.3  # of the poles beyond the spectrum, in log sigma; what is cut off is the fifth power of e^-MARGIN

EPS = torch.finfo(torch.float64).eps


def fits(matrices: Tensor) -> bool:
    """Whether these matrices are better taken together by the kernels than one by one by a library."""
    many, width = matrices.shape[0], matrices.shape[-1]
    right = LEAST_WIDTH <= width <= MOST_WIDTH and many >= LEAST_MATRICES
    return right and matrices.dtype == torch.float64 and kernels_run(matrices.device)


@on_its_device
def eigenvalues(diagonal: Float[Tensor, "m d"], off: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    """Eigenvalues of symmetric tridiagonal matrices, ascending, to some roundings of the largest; NaN gives NaN."""
    around = torch.nn.functional.pad(off.abs(), (1, 1))
    norm = (diagonal.abs() + around[:, 1:] + around[:, :-1]).amax(dim=1, keepdim=True)
    usable = torch.isfinite(norm) & (norm > 0)
    scale = torch.where(usable, norm, 1.0)
    d, e = torch.where(usable, diagonal / scale, 0.0), torch.where(usable, off / scale, 0.0)
    found = (_bisected if _by_kernels(d) else _plain_eigenvalues)(d, e)
    return torch.where(torch.isfinite(norm), found * scale * (norm > 0), torch.nan)


def _bisected(d: Float[Tensor, "m d"], e: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    """Of matrices of norm one."""
    kernels, (many, width) = kernels_of("shifted"), d.shape
    length = -(-width // kernels.GROUP) * kernels.GROUP
    # What fills up the last group is a matrix by itself with eigenvalues above all that are looked for.
    filled = torch.nn.functional.pad(d, (0, length - width), value=4.0)
    squares = torch.zeros_like(filled)
    squares[:, 1:width] = (e * e).clamp_min(NEGLIGIBLE)
    bound = torch.ones(many, dtype=d.dtype, device=d.device) * (1 + 8 * EPS)
    values = torch.empty_like(d)
    kernels.bisect[(-(-width // VALUES), many)](
        filled, squares, -bound, bound, values, width, length, HALVINGS=HALVINGS, G=kernels.GROUP, B=VALUES, num_warps=1
    )
    return values.cummax(dim=1).values  # rounding may put two that are equal the wrong way round


def floor(values: Float[Tensor, "m d"]) -> Float[Tensor, "m"]:
    """What eigenvalues must exceed to count as other than zero: the rounding of the largest, times the width."""
    return values.shape[1] * EPS * values[:, -1]


def poles(
    values: Float[Tensor, "m d"], a: Float[Tensor, "m"], b: Float[Tensor, "m"]
) -> tuple[Float[Tensor, "m p"], Float[Tensor, "m p"]]:
    """Shifts t and weights w such that ``(a + b log l) / sqrt(l)`` is the sum of ``w / (l + t)``, over the spectrum.

    With l = s^2, ``1 / s`` is 2/pi times the integral of ``e^u / (l + e^2u)`` over all u, and ``log(l) / s`` that of
    ``2u e^u / (l + e^2u)``. The trapezoid rule converges geometrically. Its nodes end ``MARGIN`` beyond the spectrum,
    no more than ``STEP`` apart as long as there are enough: those that a narrower spectrum leaves over have no weight.
    All of the rest goes to the two outermost nodes of either side, which match its first two moments.
    """
    counting = torch.where(values > floor(values)[:, None], values, torch.inf).amin(dim=1)
    largest = values[:, -1]
    middle = (counting.log() + largest.log()) / 4  # of log s: u runs about it, so that it is negative at one end only
    half = (largest.log() - counting.log()) / 4 + MARGIN
    # Of a matrix without a spectrum half is no number; places must be within the poles all the same.
    steps = (2 * half / STEP).ceil().nan_to_num_(nan=2.0).clamp_(2, POLE_COUNT - 1)
    step = 2 * half / steps
    k = torch.arange(POLE_COUNT, dtype=values.dtype, device=values.device)
    u = torch.minimum(k * step[:, None] - half[:, None], half[:, None])
    constant, slope = (a + 2 * b * middle)[:, None], (2 * b)[:, None]
    weights = torch.where(k <= steps[:, None], (constant + slope * u) * u.exp(), 0.0)
    last = steps.long()[:, None]
    for sign in (-1, 1):  # moments of t below, of 1/t above: t = e^2u
        beyond = sign * (half[:, None] + torch.arange(1, 129, dtype=u.dtype, device=u.device) * step[:, None])
        w = (constant + slope * beyond) * beyond.exp()
        # The outermost node and the one before it.
        at = torch.cat([last, last - 1] if sign > 0 else [last * 0, last * 0 + 1], dim=1)
        t, others = (-2 * sign * u.gather(1, at)).exp(), (-2 * sign * beyond).exp()
        if sign > 0:
            w = w * others
        zeroth, first = w.sum(dim=1), (w * others).sum(dim=1)
        before = (first - zeroth * t[:, 0]) / (t[:, 1] - t[:, 0])
        ends = torch.stack([zeroth - before, before], dim=1)
        weights = weights.scatter_add(1, at, ends / t if sign > 0 else ends)
    weights = weights * (step * 2 / math.pi)[:, None] * middle.exp()[:, None]
    return (2 * (u + middle[:, None])).exp(), weights


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _plain_eigenvalues(d: Float[Tensor, "m d"], e: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    from scipy import linalg

    found = [linalg.eigvalsh_tridiagonal(one, other) for one, other in zip(d.numpy(), e.numpy(), strict=True)]
    return torch.from_numpy(np.stack(found))
