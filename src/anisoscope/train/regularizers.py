"""Regularisers: small differentiable terms on the geometry of activations, for any loop and for recipes.

    from anisoscope.train import regularizers
    loss = loss + regularizers.istar(h, weight=0.1, mask=attention_mask)

| name | the term | range | structureless rows read |
|---|---|---|---|
| ``cosreg`` | mean cosine of two tokens | -1/N to 1 - 1/N | 0 |
| ``istar`` | 1 - IsoScore* | 0 to 1 | about D/(N + D) without shrinkage |
| ``spectral`` | share of variance along the first direction | 1/min(D, N-1) to 1 | a little above 1/D |
| ``path_curvature`` | second differences along token paths against first ones | 0 to 2 | 1.5; a random walk 1 |
| ``local_curvature`` | share of local variance that bends away from its plane | 0 to 1 | q/(k - d) of the normal part |
| ``tangent_damping`` | none: the gradient's part along a tangent proxy is scaled (``damp``) | | |

Every term does not change when all activations are rotated or multiplied by a number. Activations come as
``(n, d)`` or ``(b, t, d)`` in any floating type, also under autocast: half precision is raised to float32, sums are in
float64, and the term is float32 (float64 of float64). ``mask`` keeps tokens where it is true; what the others hold,
NaN too, changes neither the term nor a gradient. See docs/regularizers.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import ShapeError, TooFewRowsError, ZeroRowError, choose, name_rows
from anisoscope.stats.moments import Moments
from anisoscope.train.damping import TangentDamping, damp, tangent_damping
from anisoscope.train.local_fits import local_curvature
from anisoscope.train.penalty_rows import (
    Mask,
    centred,
    check_share,
    check_weight,
    energy,
    flags_of,
    precise,
    rows_of,
    unit_size,
    weighted,
)

__all__ = [
    "DAMPING",
    "NAMES",
    "TERMS",
    "TangentDamping",
    "cosreg",
    "damp",
    "istar",
    "local_curvature",
    "path_curvature",
    "penalty",
    "spectral",
    "tangent_damping",
]

EXACT_SIDE = 512
"""Up to this side of the smaller Gram matrix its leading eigenvector is exact; beyond, a block of powers finds it."""
BLOCK, POWERS = 8, 16


def cosreg(h: Float[Tensor, "*lead d"], weight: float, *, mask: Mask = None) -> Float[Tensor, ""]:
    """``weight (|sum_i w_i|^2 - N) / N^2`` with ``w = h / |h|``: the mean cosine of two tokens times (N - 1)/N.

    Range -1/N (directions cancel) to 1 - 1/N (all the same); 0 in the mean for directions drawn independently and
    without a common one. Not centred: a common mean is what it pushes against. A token of length zero has no direction
    and is an error.
    """
    weight = check_weight("cosreg", weight)
    with _full_precision(h):
        rows, _ = unit_size(rows_of("cosreg", h, mask))
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        n = len(rows)
        value = (energy((rows / length).sum(dim=0, dtype=torch.float64)) - n) / n**2
        if not bool(torch.isfinite(value)):
            empty = (length == 0).flatten().nonzero().flatten().tolist()
            if empty:
                raise ZeroRowError(
                    f"cosreg: {name_rows(empty)} of the tokens that count have length zero and so no direction; "
                    "mask them, or use another site"
                )
        return weighted("cosreg", weight, value, h, mask)


def istar(
    h: Float[Tensor, "*lead d"],
    weight: float,
    *,
    shrinkage: float = 0.1,
    reference: Float[Tensor, "_ _"] | Moments | None = None,
    mask: Mask = None,
) -> Float[Tensor, ""]:
    """``weight (1 - IsoScore*)``: I-STAR. IsoScore* is ``(PR - 1)/(D - 1)``, PR = tr(M)^2 / |M|^2 of a shrunken M.

    ``M = (1 - z) S + z S_ref``, S the covariance of these tokens and z the ``shrinkage``. A mini-batch knows S badly:
    its noise reads as anisotropy of its own. ``reference`` is the covariance of a larger sample, or its ``Moments``,
    taken as constant; None shrinks towards ``(tr S / D) I``, which unlike a plain identity does not depend on scale.

    Range 0 (a sphere) to 1 (one direction). White tokens read about D/(N + D) without shrinkage. The closed form
    needs no eigendecomposition, and no gap between eigenvalues stands in its gradient. Same as 1 less
    ``anisoscope.isoscore_star(h, zeta=shrinkage, bias="plugin")``.
    """
    weight, z = check_weight("istar", weight), check_share("istar", "shrinkage", shrinkage)
    with _full_precision(h):
        rows = rows_of("istar", h, mask)
        n, d = rows.shape
        if d < 2:
            raise ShapeError("istar needs activations of width 2 or more; one direction is neither even nor uneven")
        rows, factor = unit_size(rows)
        y = centred(rows)
        trace, keep = energy(y) / (n - 1), 1 - z
        small = y.T @ y if d <= n else y @ y.T  # the same sum of squares either way
        square = energy(small) / (n - 1) ** 2
        if reference is None:
            total = trace
            size = keep**2 * square + (1 - keep**2) * trace**2 / d
        else:
            target = _covariance(reference, d).to(y) * factor**2
            total = keep * trace + z * target.trace().double()
            shared = ((y @ target) * y).sum(dtype=torch.float64) / (n - 1)
            size = keep**2 * square + 2 * keep * z * shared + z**2 * energy(target)
        return weighted("istar", weight, 1 - (total**2 / size - 1) / (d - 1), h, mask)


def spectral(h: Float[Tensor, "*lead d"], weight: float, *, mask: Mask = None) -> Float[Tensor, ""]:
    """``weight lambda_1 / sum lambda``: share of the variance along the leading direction. Range 1/min(D, N-1) to 1.

    The leading direction v is found without a graph, and the term is ``|Y v|^2 / |Y|^2`` with v held fixed. A Rayleigh
    quotient does not move with its vector at the top, so this is the exact gradient where lambda_1 stands alone; where
    eigenvalues tie it is that of one of the tied directions, and no gap is divided by: the gradient is never
    larger than it should be. v comes from ``eigh`` of the smaller of the two Gram matrices, exact also at near ties,
    where powers of a matrix would not settle; only beyond a side of ``EXACT_SIDE``, where that costs more than the
    model's own step, from powers of a block. Their value is never above the true one.
    """
    weight = check_weight("spectral", weight)
    with _full_precision(h):
        rows, _ = unit_size(rows_of("spectral", h, mask))
        y = centred(rows)
        along = y @ _leading(y.detach())
        return weighted("spectral", weight, energy(along) / energy(y), h, mask)


def path_curvature(h: Float[Tensor, "*lead d"], weight: float, *, mask: Mask = None) -> Float[Tensor, ""]:
    """``weight sum |x_{t+1} - 2 x_t + x_{t-1}|^2 / sum (|x_{t+1} - x_t|^2 + |x_t - x_{t-1}|^2)`` along token paths.

    Range 0 (straight, evenly paced) to 2 (to and fro). Independent tokens read 1.5, a random walk 1: for steps of one
    length it is 1 less the cosine of the turning angle, 120 and 90 degrees there. ``h`` is ``(t, d)`` or ``(b, t, d)``;
    a masked token breaks its path, and only triples without one count.
    """
    weight = check_weight("path_curvature", weight)
    with _full_precision(h):
        if h.ndim not in (2, 3):
            raise ShapeError(f"path_curvature needs paths of tokens (t, width) or (b, t, width), got {tuple(h.shape)}")
        flags = flags_of("path_curvature", h, mask)
        whole = h if h.ndim == 3 else h[None]
        if whole.shape[1] < 3:
            raise TooFewRowsError(f"path_curvature needs at least 3 tokens on a path, got {whole.shape[1]}")
        first, middle, last = (whole[:, at : whole.shape[1] - 2 + at] for at in range(3))
        if flags is None:
            triples = [precise(part).flatten(0, 1) for part in (first, middle, last)]
        else:
            kept = flags if flags.ndim == 2 else flags[None]
            inside = kept[:, :-2] & kept[:, 1:-1] & kept[:, 2:]
            triples = [precise(part[inside]) for part in (first, middle, last)]
        if len(triples[0]) == 0:
            raise TooFewRowsError("path_curvature: the mask leaves no three successive tokens")
        scaled, _ = unit_size(torch.stack(triples))
        before, after = scaled[1] - scaled[0], scaled[2] - scaled[1]
        value = energy(after - before) / (energy(before) + energy(after))
        return weighted("path_curvature", weight, value, h, mask)


TERMS: Mapping[str, Callable[..., Float[Tensor, ""]]] = MappingProxyType(
    {
        "cosreg": cosreg,
        "istar": istar,
        "spectral": spectral,
        "path_curvature": path_curvature,
        "local_curvature": local_curvature,
    }
)
"""The terms that are added to a loss, by name."""
DAMPING = "tangent_damping"
"""The one that adds nothing and changes the gradient."""
NAMES = (*TERMS, DAMPING)


def penalty(name: str, h: Float[Tensor, "*lead d"], weight: float, **options: Any) -> Float[Tensor, ""]:
    """The term of this name; ``options`` as its function takes them."""
    term = TERMS[choose("regularizer that adds to a loss", name, TERMS)]
    known = [one for one in inspect.signature(term).parameters if one not in ("h", "weight")]
    for given in options:
        choose(f"option of {name}", given, known)
    return term(h, weight, **options)


def _full_precision(h: Tensor) -> torch.autocast:
    """Autocast off inside: it would bring the products back to half precision."""
    if not isinstance(h, Tensor):
        raise ShapeError(f"a penalty needs a torch tensor that the loss depends on, got {type(h).__name__}")
    return torch.autocast(h.device.type, enabled=False)


def _covariance(reference: Tensor | Moments, width: int) -> Tensor:
    if isinstance(reference, Moments):
        reference = reference.covariance() * 4.0**reference.exponent
    if reference.shape != (width, width):
        raise ShapeError(
            f"istar: the reference is a covariance ({width}, {width}) for activations of width {width}, "
            f"got {tuple(reference.shape)}"
        )
    return reference.detach()


@torch.no_grad()
def _leading(y: Float[Tensor, "n d"]) -> Float[Tensor, "d"]:
    """The leading right singular vector, of length 1."""
    if not bool(torch.isfinite(y).all()) or not bool((y != 0).any()):
        return torch.full((y.shape[1],), torch.nan, dtype=y.dtype, device=y.device)  # told by ``weighted``
    n, d = y.shape
    if min(n, d) > EXACT_SIDE:
        columns = y[:: max(1, n // BLOCK)][:BLOCK].T  # from rows themselves: no draw, so the same every time
        for _ in range(POWERS):
            columns = y.T @ (y @ torch.linalg.qr(columns)[0])
        basis = torch.linalg.qr(columns)[0]
        inner = y @ basis
        return basis @ torch.linalg.eigh(inner.T @ inner)[1][:, -1]
    if d <= n:
        return torch.linalg.eigh(y.T @ y)[1][:, -1]
    vector = y.T @ torch.linalg.eigh(y @ y.T)[1][:, -1]
    return vector / torch.linalg.vector_norm(vector)
