"""Eigenvalues and functions of many symmetric matrices at once, by way of their tridiagonal forms, for a GPU.

Libraries decompose matrices one after another. Here all of them go through their columns together (``kernels.
tridiagonal``), and nothing asks for eigenvectors: eigenvalues come from counts of sign changes, ``x^T f(C) x`` from a
rational sum of f, one factorisation of a tridiagonal matrix for each of its poles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import kernels_of, kernels_run, on_its_device

LEAST_WIDTH = 256  # below it a library's decomposition is about as fast
LEAST_MATRICES = 4  # one matrix alone is better left to a library

TILE_ROWS, TILE_WIDTHS = 4, (512, 1024)  # of a matrix that a program holds at a time, and as much is on its way
TILES = 2  # side by side, at most: then they are wider
LANES = 64  # neighbouring columns of a tile that one warp has
TILE_STAGES = 3  # above one, tiles on their way are kept in shared memory, so many less one where there is room
SHARED_BYTES = 8 << 10  # of shared memory for all else
SHARE = 32  # a program's share of a column is a multiple of it
WARPS = 4
TOGETHER = 2  # programs on a processor: while one waits for others the other goes on
FEW_PROGRAMS, MOST_PROGRAMS = 16, 32  # that share a matrix: kernels are made for the one or the other
ALIGNED = 16  # lengths of rows are multiples of it: one compiled kernel for all widths

HALVINGS = 55  # from twice the norm to less than its rounding
NEGLIGIBLE = 1e-34  # squares beside the diagonal, relative to the squared norm: below its rounding, and not zero
VALUES = 64  # eigenvalues that a program of one warp looks for

POLE_COUNT = 36
MARGIN = 3.3  # of the poles beyond the spectrum, in log sigma; what is cut off is the fifth power of e^-MARGIN
FORM_ROWS = 128
WY = 128  # reflectors that make up one product when they are applied

EPS = torch.finfo(torch.float64).eps


def fits(matrices: Tensor) -> bool:
    """Whether these matrices are better taken together by the kernels than one by one by a library."""
    many, width = matrices.shape[0], matrices.shape[-1]
    right = LEAST_WIDTH <= width <= TILES * TILE_WIDTHS[-1] and many >= LEAST_MATRICES
    return right and matrices.dtype == torch.float64 and kernels_run(matrices.device)


def programs_each(many: int, processors: int) -> int:
    """Programs that share a matrix: they wait for one another, so all must run at once, TOGETHER on a processor."""
    return min(MOST_PROGRAMS, max(1, TOGETHER * processors // many))


def tile_of(width: int, shared: int | None = None) -> dict[str, int]:
    """The least tile of which TILES are as wide as what is left of a matrix, and how many are held or on their way: as
    many as a program's part of so much shared memory has room for."""
    wide = next((one for one in TILE_WIDTHS if width <= TILES * one), 0)
    assert wide, "wider than any tiles: ``fits`` says so"
    room = TILE_STAGES if shared is None else 1 + (shared // TOGETHER - SHARED_BYTES) // (8 * TILE_ROWS * wide)
    return {"R": TILE_ROWS, "C": wide, "STAGES": max(1, min(TILE_STAGES, room))}


@dataclass(frozen=True)
class Tridiagonal:
    """Matrices ``Q T Q^T``: entries of T on its diagonal and beside it, and the reflectors whose product is Q.

    Row j of ``reflectors`` is the vector of ``I - tau_j v v^T``, one at place j + 1, zero before.
    """

    diagonal: Float[Tensor, "m d"]
    off: Float[Tensor, "m e"]
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
        many, width = self.diagonal.shape
        eye = torch.eye(width, dtype=self.diagonal.dtype, device=self.diagonal.device)
        return self.back(eye.repeat(many, 1, 1), whole=False)

    def back(self, columns: Float[Tensor, "m d c"], *, whole: bool = True) -> Float[Tensor, "m d c"]:
        """``Q`` times some columns, in place; not ``whole``: they are the identity, which fills up from its end."""
        for first, vectors, turned in reversed(self._factors):
            part = columns[:, first:, 0 if whole else first :]
            part.baddbmm_(turned.mT, vectors @ part, alpha=-1)
        return columns

    @on_its_device
    def forms(
        self,
        rows: Float[Tensor, "m n d"],
        values: Float[Tensor, "m d"],
        a: Float[Tensor, "m"],
        b: Float[Tensor, "m"],
    ) -> Float[Tensor, "m n"]:
        """``x^T f(C) x`` of every row, float64, with ``f(l) = (a + b log l) / sqrt(l)``; ``values`` are eigenvalues.

        Eigenvalues below ``floor(values)`` count as zero. f would be infinite there; here it stays near what it is at
        the least eigenvalue that counts (about ``2 e^MARGIN`` times it at most), times the squares of what rows have in
        such a direction. Rows from which it was projected out have the rounding of float32 there, which is nothing; of
        rows that reach into it the result means little.
        """
        shifts, weights = poles(values, a, b)
        turned = torch.bmm(self.q.to(rows.dtype).mT, rows.mT)  # as the kernels read it
        least = EPS * values[:, -1].clamp_min(0)
        if not _by_kernels(turned):
            return _plain_forms(turned, self.diagonal, self.off, shifts, weights)
        kernels, (many, width, n) = kernels_of("shifted"), turned.shape
        ratios, shares = self.diagonal.new_empty(2, many, width, POLE_COUNT)
        kernels.factor_shifted[(many,)](
            self.diagonal, _filled(self.off), shifts.contiguous(), weights.contiguous(), least.contiguous(),
            ratios, shares, width, N=POLE_COUNT, B=64, num_warps=1,
        )  # fmt: skip
        out = ratios.new_empty(many, POLE_COUNT // kernels.POLES, n)
        kernels.sum_forms[(-(-n // FORM_ROWS), POLE_COUNT // kernels.POLES, many)](
            turned, ratios, shares, out, n, width, N=POLE_COUNT, B=FORM_ROWS, num_warps=2
        )
        return out.sum(dim=1)


@on_its_device
def reduced(matrices: Float[Tensor, "m d d"], programs: int | None = None) -> Tridiagonal:
    """Symmetric float64 matrices in tridiagonal form, all at once; a matrix that is not finite becomes NaN.

    ``programs`` share a matrix on a GPU, by default as many as there are processors for.
    """
    sizes = torch.linalg.vector_norm(matrices, ord=torch.inf, dim=(1, 2))
    # Powers of two, so that squares neither vanish nor overflow, and nothing is rounded.
    usable = torch.isfinite(sizes) & (sizes > 0)
    scale = torch.ldexp(torch.ones_like(sizes), -torch.frexp(torch.where(usable, sizes, 1.0)).exponent)[:, None]
    if _by_kernels(matrices):
        found = _reduced(matrices, scale[:, :, None], programs)
    else:
        found = _plain_reduced(matrices * scale[:, :, None])
    lost = torch.where(torch.isfinite(sizes), 0.0, torch.nan)[:, None]
    return Tridiagonal(found.diagonal / scale + lost, found.off / scale + lost, found.reflectors, found.taus + lost)


def _reduced(matrices: Float[Tensor, "m d d"], scale: Float[Tensor, "m 1 1"], programs: int | None) -> Tridiagonal:
    """The reduction by panels, over a copy whose rows become the reflectors."""
    kernels, (many, width, _), new = kernels_of("tridiagonal"), matrices.shape, matrices.new_zeros
    device = torch.cuda.get_device_properties(matrices.device) if matrices.is_cuda else None
    each = programs or programs_each(many, 1 if device is None else device.multi_processor_count)
    panel, stride = kernels.PANEL, -(-width // ALIGNED) * ALIGNED
    whole = (new if stride > width else matrices.new_empty)(many, stride, stride)
    a = whole[:, :width, :width]
    torch.mul(matrices, scale, out=a)
    pairs, across, sums = new(many, 2, panel, stride), new(many, each, stride), new(many, each, 2, panel)
    diagonal, off, taus, x = (new(many, stride) for _ in range(4))
    down = new(many, TILES * WARPS, stride)
    squares, forms = new(many, each), new(many, each)
    counter = torch.zeros(many, dtype=torch.int32, device=matrices.device)
    options: dict[str, Any] = {"num_warps": WARPS, "PP": FEW_PROGRAMS if each <= FEW_PROGRAMS else MOST_PROGRAMS}
    if each > 1 and matrices.is_cuda:
        options["launch_cooperative_grid"] = True  # refused, not begun, where not all of them can run at once
    shared = None if device is None else getattr(device, "shared_memory_per_block_optin", 0)
    for first in range(0, width, panel):
        columns = min(panel, width - first)
        kernels.reduce_panel[(many * each,)](
            whole, pairs, diagonal, off, taus, x, across, down, sums, squares, forms, counter,
            width, stride, first, columns, 2 * first, each,
            K=panel, B=SHARE, H=WARPS, L=LANES, PARTS=TILES * WARPS, **tile_of(stride - first, shared), **options,
        )  # fmt: skip
        after = first + columns
        if after < width:
            both = pairs[:, :, :, after:width]
            a[:, after:, after:].baddbmm_(both.flatten(1, 2).mT, both.flip(1).flatten(1, 2), alpha=-1)
        a[:, first:after, :first] = 0
        a[:, first:after, first:] = pairs[:, 0, :columns, first:width]
    return Tridiagonal(diagonal[:, :width], off[:, : width - 1], a, taus[:, :width])


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
    ``2u e^u / (l + e^2u)``. The trapezoid rule converges geometrically. Its nodes end ``MARGIN`` beyond the spectrum;
    all of the rest goes to the two outermost nodes of either side, which match its first two moments.
    """
    counting = torch.where(values > floor(values)[:, None], values, torch.inf).amin(dim=1)
    largest = values[:, -1]
    middle = (counting.log() + largest.log()) / 4  # of log s: u runs about it, so that it is negative at one end only
    half = (largest.log() - counting.log()) / 4 + MARGIN
    k = torch.arange(POLE_COUNT, dtype=values.dtype, device=values.device)
    step = 2 * half / (POLE_COUNT - 1)
    u = -half[:, None] + k * step[:, None]
    constant, slope = (a + 2 * b * middle)[:, None], (2 * b)[:, None]
    weights = (constant + slope * u) * u.exp()
    ends = []
    for sign in (-1, 1):  # moments of t below, of 1/t above: t = e^2u
        beyond = sign * (half[:, None] + torch.arange(1, 129, dtype=u.dtype, device=u.device) * step[:, None])
        w = (constant + slope * beyond) * beyond.exp()
        if sign < 0:
            t = (2 * u[:, :2]).exp()
            zeroth, first = w.sum(dim=1), (w * (2 * beyond).exp()).sum(dim=1)
            far = (first - zeroth * t[:, 0]) / (t[:, 1] - t[:, 0])
            ends.append(torch.stack([zeroth - far, far], dim=1))
        else:
            t = (-2 * u[:, -2:]).exp()  # inverse
            w = w * (-2 * beyond).exp()
            zeroth, first = w.sum(dim=1), (w * (-2 * beyond).exp()).sum(dim=1)
            near = (first - zeroth * t[:, 1]) / (t[:, 0] - t[:, 1])
            ends.append(torch.stack([near, zeroth - near], dim=1) / t)
    weights = torch.cat([weights[:, :2] + ends[0], weights[:, 2:-2], weights[:, -2:] + ends[1]], dim=1)
    weights = weights * (step * 2 / math.pi)[:, None] * middle.exp()[:, None]
    return (2 * (u + middle[:, None])).exp(), weights


@on_its_device
def leading_vector(t: Tridiagonal, value: Float[Tensor, "m"]) -> Float[Tensor, "m d"]:
    """Unit eigenvectors of the full matrices for their largest eigenvalues, which are given; NaN gives NaN."""
    if _by_kernels(t.diagonal):
        kernels, (many, width) = kernels_of("shifted"), t.diagonal.shape
        size = torch.where(value == 0, 1.0, value.abs())[:, None]
        # A little above, so that the shifted matrix is definite and no pivot grows.
        above = value / size[:, 0] + 4 * EPS
        least = torch.full_like(value, EPS * EPS)
        ratios, pivots = t.diagonal.new_empty(2, many, 2, width)
        vectors = t.diagonal.new_empty(many, width)
        kernels.twisted_vector[(many,)](
            t.diagonal / size, _filled(t.off) / size, above, least, ratios, pivots, vectors, width, B=256, num_warps=1
        )
    else:
        vectors = _plain_leading(t.diagonal, t.off)
    return t.back(vectors[:, :, None])[:, :, 0]


def _filled(off: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    """A zero after the last, so that rows are as long as diagonals."""
    return torch.nn.functional.pad(off, (0, 1))


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


# The same by LAPACK, one matrix after another, where there is no GPU.


def _plain_reduced(a: Float[Tensor, "m d d"]) -> Tridiagonal:
    from scipy import linalg

    many, width, _ = a.shape
    diagonal, off, taus = a.new_zeros(3, many, width)
    reflectors = torch.zeros_like(a)
    for i, one in enumerate(torch.nan_to_num(a).numpy()):
        below, d, e, tau, _ = linalg.lapack.dsytrd(np.asfortranarray(one), lower=1)
        diagonal[i], off[i, : width - 1], taus[i, : width - 1] = map(torch.from_numpy, (d, e, tau))
        reflectors[i] = torch.from_numpy(np.tril(below, -2).T.copy())
        reflectors[i].diagonal(1).fill_(1)
    return Tridiagonal(diagonal, off[:, :-1], reflectors, taus)


def _plain_eigenvalues(d: Float[Tensor, "m d"], e: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    from scipy import linalg

    found = [linalg.eigvalsh_tridiagonal(one, other) for one, other in zip(d.numpy(), e.numpy(), strict=True)]
    return torch.from_numpy(np.stack(found))


def _plain_forms(
    y: Float[Tensor, "m d n"],
    d: Float[Tensor, "m d"],
    e: Float[Tensor, "m e"],
    shifts: Float[Tensor, "m p"],
    weights: Float[Tensor, "m p"],
) -> Float[Tensor, "m n"]:
    inner = torch.diag_embed(d) + torch.diag_embed(e, 1) + torch.diag_embed(e, -1)
    eye = torch.eye(d.shape[1], dtype=d.dtype, device=d.device)
    wide = y.to(d.dtype)
    total = torch.zeros_like(wide[:, 0])
    for shift, weight in zip(shifts.unbind(1), weights.unbind(1), strict=True):
        solved = torch.linalg.solve(inner + shift[:, None, None] * eye, wide)
        total += weight[:, None] * (wide * solved).sum(dim=1)
    return total


def _plain_leading(d: Float[Tensor, "m d"], e: Float[Tensor, "m e"]) -> Float[Tensor, "m d"]:
    from scipy import linalg

    vectors = torch.full_like(d, torch.nan)
    last = d.shape[1] - 1
    for i, (one, other) in enumerate(zip(d.numpy(), e.numpy(), strict=True)):
        if np.isfinite(one).all() and np.isfinite(other).all():
            found = linalg.eigh_tridiagonal(one, other, select="i", select_range=(last, last))[1]
            vectors[i] = torch.from_numpy(found[:, 0])
    return vectors
