"""Controls: bases of a proxy's own rank that a gradient has no reason to prefer. K is the rank, B the number of draws.

All draws of one call come from one block of Gaussians, drawn on the CPU in float32 whatever the device and precision
asked for: the same seed means the same spans everywhere.

Normal controls are drawn in D - K dimensions, once for all bases, and carried into a basis's complement by the
reflection that swaps the span of the basis with the first K axes. So what a draw needs to become orthonormal does not
depend on the basis, and a second moment is reflected once instead of every draw being projected.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import DegenerateError, OptionError, ShapeError, TooFewRowsError, choose
from anisoscope.stats.moments import Moments
from anisoscope.tangent.units import stream

CONTROL_KINDS = ("normal", "normal_top", "random")
KEPT_NUMBERS = 1 << 20  # draws of up to so many numbers are kept for the next call: eight of them, 32 MB at most
ORTHONORMAL = 1e-4
"""How far ``Q^T Q`` may be from the identity before a basis is refused: far above the rounding of float32."""


def check_basis(basis: Float[Tensor, "d k"], width: int | None = None, name: str = "the basis") -> None:
    """Raise unless the columns are orthonormal, fewer than the width, and as wide as the rows they are used with."""
    d, k = basis.shape
    if width is not None and d != width:
        raise ShapeError(f"{name} has {d} rows, the width of the data is {width}; they must live in the same space")
    if not 1 <= k < d:
        raise ShapeError(f"{name} has rank {k} in width {d}; a rank of at least 1 and below the width is needed")
    gram = (basis.T @ basis).double()
    error = float((gram - torch.eye(k, dtype=torch.float64, device=gram.device)).abs().max())
    if not error <= ORTHONORMAL:  # written so that NaN is refused too
        raise ShapeError(
            f"{name} is not orthonormal: Q^T Q differs from the identity by {error:.2g}; use torch.linalg.qr(Q).Q"
        )


def check_complement(width: int, rank: int, instead: str = "") -> None:
    """Raise where the complement of a rank-K basis holds no other; ``instead`` names what else would do."""
    if width - rank < rank:
        raise OptionError(
            f"rank {rank} leaves {width - rank} of {width} dimensions outside the basis, too few for a control "
            f"of equal rank there; take a rank of at most {width // 2}" + (f", or {instead}" if instead else "")
        )


def gaussian_draws(
    width: int, rank: int, draws: int, *, seed: int, device: torch.device | str = "cpu"
) -> Float[Tensor, "d b k"]:
    """The Gaussian matrices behind every random control, width first, so that one product takes all of them."""
    if draws < 1:
        raise OptionError(f"draws={draws}: at least one control is needed")
    draw = _kept_draws if width * draws * rank <= KEPT_NUMBERS else _draw
    return draw(width, rank, draws, seed).to(device)


@torch.inference_mode(False)  # what is kept serves callers in any mode
def _draw(width: int, rank: int, draws: int, seed: int) -> Float[Tensor, "d b k"]:
    return torch.randn(width, draws, rank, generator=stream(seed, "controls"))


_kept_draws = lru_cache(maxsize=8)(_draw)  # sites and looks meet the same ones; nobody writes into them


def control_bases(
    basis: Float[Tensor, "d k"],
    kind: str = "normal",
    draws: int = 199,
    *,
    seed: int = 0,
    rows: Float[Tensor, "n d"] | None = None,
) -> Float[Tensor, "b d k"]:
    """Orthonormal bases of the same rank to compare ``basis`` with.

    - ``random``: Gaussian columns made orthonormal: uniform (Haar) in the whole space.
    - ``normal``: the same columns without their first K coordinates, made orthonormal and reflected: uniform in the
      complement of ``basis``. They depend on its span alone, not on the vectors that span it.
    - ``normal_top``: the directions of the complement along which ``rows`` vary most. One draw, no chance in it; for
      more draws the rows are drawn anew with replacement (the first draw stays the plain one).

    Precision and device are those of ``basis`` (float32 at least).
    """
    choose("control", kind, CONTROL_KINDS)
    check_basis(basis)
    d, k = basis.shape
    basis = basis.to(torch.promote_types(basis.dtype, torch.float32))
    if kind == "random":
        return orthonormal(_drawn_bases(d, k, draws, seed, basis))
    check_complement(d, k, "kind='random'")
    if kind == "normal_top":
        if rows is None:
            raise OptionError("controls='normal_top' are directions of the activations' variance: give rows")
        if rows.shape[1] != d:
            raise ShapeError(f"rows have width {rows.shape[1]}, the basis {d}; they must live in the same space")
        return _normal_top(basis, rows, draws, seed)
    few = _normal_bases(d, k, draws, seed, basis)
    mirror = mirrors(basis[None])[0].to(few)
    columns = mirror @ (-mirror[k:].T @ few)
    columns[:, k:] += few
    return columns


def mirrors(bases: Float[Tensor, "p d k"]) -> Float[Tensor, "p d k"]:
    """X of each basis Q such that ``I - X X^T`` is the reflection that swaps span(Q) with the first K axes; float64.

    With ``U diag(s) V^T`` the singular value decomposition of the first K rows of Q, X has the rows ``U sqrt(1 + s)``
    and below them those of ``Q V / sqrt(1 + s)``, so that ``X^T X = 2``. Where no s is zero this is the same for every
    basis of a span; where one is, a whole family of reflections does it and one of them is taken.
    """
    q, k = orthonormal(bases.double()), bases.shape[2]
    left, values, right = torch.linalg.svd(q[:, :k])
    return mirrored(q, left, values, right.mT)


def mirrored(
    q: Float[Tensor, "*lead d k"], left: Float[Tensor, "*lead k k"], values: Float[Tensor, "*lead k"],
    right: Float[Tensor, "*lead k k"],
) -> Float[Tensor, "*lead d k"]:  # fmt: skip
    """``mirrors`` from the decomposition of the first K rows of Q."""
    root = (1 + values).sqrt()[..., None, :]
    found = q @ (right / root)
    found[..., : q.shape[-1], :] = left * root
    return found


def _drawn_bases(width: int, rank: int, draws: int, seed: int, like: Tensor) -> Float[Tensor, "b d k"]:
    """``gaussian_draws`` as a stack of matrices, in the type and on the device of ``like``."""
    return _as_bases(gaussian_draws(width, rank, draws, seed=seed, device=like.device), like.dtype)


def _normal_bases(width: int, rank: int, draws: int, seed: int, like: Tensor) -> Float[Tensor, "b e k"]:
    """Orthonormal bases in D - K dimensions, of the draws without their first K coordinates."""
    if like.device.type == "cpu" and width * draws * rank <= KEPT_NUMBERS:
        return _kept_bases(width, rank, draws, seed, like.dtype)
    return orthonormal(_drawn_bases(width, rank, draws, seed, like)[:, rank:])


def _as_bases(draws: Float[Tensor, "d b k"], dtype: torch.dtype) -> Float[Tensor, "b d k"]:
    return draws.permute(1, 0, 2).to(dtype).contiguous()


@lru_cache(maxsize=4)
def _kept_bases(width: int, rank: int, draws: int, seed: int, dtype: torch.dtype) -> Float[Tensor, "b e k"]:
    return orthonormal(_as_bases(gaussian_draws(width, rank, draws, seed=seed), dtype)[:, rank:])


def orthonormal(columns: Float[Tensor, "b d k"]) -> Float[Tensor, "b d k"]:
    """Orthonormal columns of the same spans, all at once, by Cholesky of the small Gram matrices.

    Twice, since once leaves an error of the condition squared; the small matrices are factored in float64.
    """
    for _ in range(2):
        small = (columns.transpose(1, 2) @ columns).double()
        factor, failed = torch.linalg.cholesky_ex(small)
        if bool(failed.any()):
            raise DegenerateError("some control spans fewer dimensions than its rank; take a smaller rank")
        unit = torch.eye(small.shape[1], dtype=torch.float64, device=small.device).expand_as(small)
        # R^-T of a K x K matrix, then one product: far cheaper than triangular solves with D right-hand sides.
        inverse = torch.linalg.solve_triangular(factor, unit, upper=False)
        columns = columns @ inverse.transpose(1, 2).to(columns.dtype)
    return columns


def _normal_top(
    basis: Float[Tensor, "d k"], rows: Float[Tensor, "n d"], draws: int, seed: int
) -> Float[Tensor, "b d k"]:
    n, k = len(rows), basis.shape[1]
    if draws < 1:
        raise OptionError(f"draws={draws}: at least one control is needed")
    if n < 2 * k + 2:
        raise TooFewRowsError(f"{n} rows have fewer than {k} directions of variance beyond a basis of rank {k}")
    generator = stream(seed, "bootstrap of rows")
    found = []
    for draw in range(draws):
        picks = torch.randint(n, (n,), generator=generator).to(rows.device) if draw else slice(None)
        found.append(_top_of_complement(basis, Moments.of(rows[picks]).covariance()))
    return torch.stack(found)


def _top_of_complement(basis: Float[Tensor, "d k"], covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d k"]:
    k, q = basis.shape[1], basis.double()
    # In coordinates of the complement, so that no direction of the basis itself can come back as a zero eigenvalue.
    other = torch.linalg.qr(q, mode="complete").Q[:, k:]
    vectors = torch.linalg.eigh(other.T @ covariance @ other).eigenvectors.flip(1)[:, :k]
    top = other @ vectors
    top = top - q @ (q.T @ top)  # the basis may be orthonormal to float32 only
    return orthonormal(top[None])[0].to(basis.dtype)
