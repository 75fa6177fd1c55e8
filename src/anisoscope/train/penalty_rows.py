"""What every penalty on activations does first and last: rows out of a batch, its weight, a finite number."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.axes import Flags
from anisoscope.errors import (
    DegenerateError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TooFewRowsError,
    name_rows,
)

Mask = Flags | Tensor | None
"""True (or 1) keeps a token, as an attention mask does; one flag for each, in the shape of the leading axes."""


def check_weight(name: str, weight: float) -> float:
    """The weight of a penalty if it can be one."""
    if not (math.isfinite(weight) and weight >= 0):
        raise OptionError(f"the weight of {name} must be a number of at least 0, got {weight}")
    return float(weight)


def check_share(name: str, what: str, value: float) -> float:
    """A share between 0 and 1."""
    if not 0 <= value <= 1:
        raise OptionError(f"{what} of {name} is a share between 0 and 1, got {value}")
    return float(value)


def precise(h: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
    """The same in float32 where it was half as precise: products of activations need the digits."""
    return h.to(torch.promote_types(h.dtype, torch.float32))


def flags_of(name: str, h: Float[Tensor, "*lead d"], mask: Mask) -> Tensor | None:
    """The mask as booleans beside the tokens, or None."""
    if mask is None:
        return None
    flags = torch.as_tensor(mask, device=h.device)
    if flags.shape != h.shape[:-1]:
        raise ShapeError(
            f"{name}: the mask has shape {tuple(flags.shape)}, the tokens {tuple(h.shape[:-1])}; give one flag a token"
        )
    if flags.is_floating_point() and not bool(((flags == 0) | (flags == 1)).all()):
        raise OptionError(
            f"{name}: the mask holds other numbers than 0 and 1; 1 keeps a token (a mask that is added to scores, "
            "with 0 for kept ones, is turned by `mask == 0`)"
        )
    return flags != 0


def rows_of(name: str, h: Float[Tensor, "*lead d"], mask: Mask, *, at_least: int = 2) -> Float[Tensor, "n d"]:
    """The tokens that count as rows, float32 at least. A masked one is gone, value and gradient."""
    if h.ndim < 2 or h.shape[-1] < 1:
        raise ShapeError(f"{name} needs activations (tokens, width) or (b, t, width), got shape {tuple(h.shape)}")
    flags = flags_of(name, h, mask)
    rows = h.flatten(0, -2) if flags is None else h[flags]
    if len(rows) == 0:
        raise EmptyInputError(f"{name}: no token is left{' after the mask' if mask is not None else ''}")
    if len(rows) < at_least:
        raise TooFewRowsError(f"{name} needs at least {at_least} tokens, got {len(rows)}")
    return precise(rows)


def unit_size(rows: Float[Tensor, "*lead d"]) -> tuple[Float[Tensor, "*lead d"], Float[Tensor, ""]]:
    """Rows times a power of two that brings the largest entry near 1, and that power: squares then stay in range.

    The power is a constant to the gradient, and exact: what does not depend on the scale of rows keeps every bit.
    """
    with torch.no_grad():
        _, exponent = torch.frexp(rows.abs().amax())
        most = 126  # of float32; rows beyond are infinite or as good as zero
        factor = torch.ldexp(torch.ones((), dtype=rows.dtype, device=rows.device), -exponent.clamp(-most, most))
    return rows * factor, factor


def centred(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rows less their mean, which is summed in float64."""
    return rows - rows.mean(dim=0, dtype=torch.float64).to(rows.dtype)


def energy(x: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Sum of squares: single ones in the precision of ``x``, the sum in float64."""
    return x.square().sum(dtype=torch.float64)


def weighted(
    name: str, weight: float, value: Float[Tensor, ""], h: Float[Tensor, "*lead d"], mask: Mask
) -> Float[Tensor, ""]:
    """``weight * value`` in the precision of the rows, or an error that says what was wrong with them."""
    if not bool(torch.isfinite(value)):
        raise _explained(name, h.detach(), flags_of(name, h, mask))
    return (weight * value).to(torch.promote_types(h.dtype, torch.float32))


def _explained(name: str, h: Tensor, flags: Tensor | None) -> NonFiniteError | DegenerateError:
    # Looked for only now: every step of a training would pay for it.
    bad = ~torch.isfinite(h).all(dim=-1)
    numbers = (bad if flags is None else bad & flags).flatten().nonzero().flatten().tolist()
    if numbers:
        return NonFiniteError(f"{name}: NaN or infinity in {name_rows(numbers)} of the activations, counted through")
    return DegenerateError(f"{name}: the tokens are all alike, so there is no direction or spread to speak of")
