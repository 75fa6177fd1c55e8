"""Rows as small integers, whose products nothing rounds: bounds on distances at a quarter of the cost of float32.

A row is taken about the mean, turned by random signs and a Fourier transform, which spread over all dimensions what one
of them holds, and rounded to whole steps between -127 and 127, a step being a length of its own for each row. So its
``code`` lies within a known distance of it, its error, of some hundredth of its length. By the triangle inequality the
distance of two rows is that of their codes, up to both errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int, Int8, Int32
from torch import Tensor

LARGEST = 127
MOST_COLUMNS = (2**31 - 1) // LARGEST**2  # up to here no product of two codes leaves int32
CHUNK_ROWS = 1024
SLACK = 1e-9  # of lengths, for the rounding of the transform in float64, which is some 1e-15 of them
ROUNDING = 2.0**-19  # of the squared lengths of two codes, for that of their squared distance: a dozen units in float32
TINY = 1e-36  # and this much more: squares below it are rounded to few digits, or to none


@cache
def integers_serve() -> bool:
    """Whether this processor has instructions for products of small integers, and torch's use of them is right."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not (known.get("avx512_vnni") or known.get("amx_int8")) or not hasattr(torch, "_int_mm"):
        return False
    a = torch.arange(-LARGEST, LARGEST + 1).to(torch.int8).repeat(33, 3)
    room = torch.zeros((2, 33, 33), dtype=torch.int32)
    try:
        return torch.equal(_by_instructions(a, a, room[0]), _by_float64(a, a, room[1]))
    except RuntimeError:  # a build of torch without them
        return False


def integer_products(a: Int8[Tensor, "m d"], b: Int8[Tensor, "n d"], out: Int32[Tensor, "m n"]) -> Int32[Tensor, "m n"]:
    """``a b^T``, exact, put into ``out``."""
    # Of one column torch 2.13 gives whatever lay in memory.
    return _by_instructions(a, b, out) if a.shape[1] > 1 and integers_serve() else _by_float64(a, b, out)


def _by_instructions(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    found: Tensor = torch._int_mm(a, b.T, out=out)
    return found


def _by_float64(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return out.copy_(a.double() @ b.double().T)


@dataclass(frozen=True)
class Room:
    """Memory for tiles, one after another: asking the system for it each time takes longer than filling it."""

    products: Int32[Tensor, "size"]
    tile: Float32[Tensor, "size"]
    halves: tuple[Float32[Tensor, "_"], ...]
    """For half of a tile, a quarter of it, and so on."""

    @classmethod
    def of(cls, size: int, halves: int = 0) -> Room:
        """Room for a tile of so many pairs."""
        # Not in what torch takes for the default, which may be half precision where a model is built.
        tile, *smaller = (torch.empty(size >> times, dtype=torch.float32) for times in range(halves + 1))
        return cls(torch.empty(size, dtype=torch.int32), tile, tuple(smaller))


@dataclass(frozen=True)
class Codes:
    """Rows as whole numbers of steps. ``squares`` are the codes' squared lengths and ``errors`` the most that each lies
    from its row, both in the units of the rows."""

    values: Int8[Tensor, "n d"]
    steps: Float32[Tensor, "n"]
    squares: Float32[Tensor, "n"]
    errors: Float64[Tensor, "n"]

    @classmethod
    def of(
        cls, rows: Float[Tensor, "n d"], mean: Float[Tensor, "d"], seed: int, order: Int[Tensor, "n"] | None = None
    ) -> Codes:
        """The codes of these rows about their mean, in this order; comparable where seeds are one."""
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (rows.shape[1],), generator=generator, dtype=torch.float64) * 2 - 1
        values = torch.empty(rows.shape, dtype=torch.int8)
        steps, squares, errors = (torch.empty(len(rows), dtype=torch.float64) for _ in range(3))
        for at in range(0, len(rows), CHUNK_ROWS):
            part = slice(at, at + CHUNK_ROWS)
            turned = _turned(rows[part if order is None else order[part]], mean, signs)
            # In float32, as products will be multiplied by it: what that rounds is then part of the error.
            step = (torch.linalg.vector_norm(turned, ord=torch.inf, dim=1) / LARGEST).float().double()
            whole = (turned / torch.where(step > 0, step, 1.0)[:, None]).round_().clamp_(-LARGEST, LARGEST)
            size = torch.linalg.vector_norm(turned, dim=1)
            left = torch.linalg.vector_norm(turned.addcmul_(whole, step[:, None], value=-1), dim=1)
            values[part], steps[part], errors[part] = whole, step, left + SLACK * size
            squares[part] = whole.square_().sum(dim=1) * step.square()
        return cls(values, steps.float(), squares.float(), errors)

    def at(self, order: Int[Tensor, "m"]) -> Codes:
        """The codes of these rows."""
        return Codes(self.values[order], self.steps[order], self.squares[order], self.errors[order])

    def squared(self, rows: slice, columns: slice, room: Room) -> Float32[Tensor, "m c"]:
        """Squared distances of codes, good to ``ROUNDING`` of the sum of their squares and ``TINY``; they stand where
        there is ``room`` for them, until that is used again."""
        a, b = self.values[rows], self.values[columns]
        shape, size = (len(a), len(b)), len(a) * len(b)
        tile = room.tile[:size].view(shape).copy_(integer_products(a, b, room.products[:size].view(shape)))
        tile.mul_(self.steps[columns].mul(-2)).mul_(self.steps[rows][:, None])
        return tile.add_(self.squares[columns]).add_(self.squares[rows][:, None])


def survivors_in_integers(
    rows: Float[Tensor, "m d"], others: Float[Tensor, "c d"], mean: Float[Tensor, "d"], limits: Float64[Tensor, "m"]
) -> float:
    """The share of pairs that codes leave in doubt where neighbours lie within ``limits``."""
    codes = Codes.of(torch.cat([rows, others]), mean, 0)
    own, rest = slice(0, len(rows)), slice(len(rows), None)
    apart = codes.squared(own, rest, Room.of(len(rows) * len(others))).double().clamp_min_(0).sqrt_()
    doubt = codes.errors[own][:, None] + codes.errors[rest]
    return float((apart - doubt <= limits[:, None]).double().mean())


def _turned(rows: Tensor, mean: Tensor, signs: Tensor) -> Float64[Tensor, "n d"]:
    """Rows about the mean in an orthonormal basis of waves: each dimension, with its sign, is in all of them alike."""
    width = rows.shape[1]
    waves = torch.view_as_real(torch.fft.rfft((rows.double() - mean).mul_(signs), norm="ortho")).flatten(1)
    waves[:, 2 : width if width % 2 == 0 else None] *= math.sqrt(2)  # those that stand for two of a complex transform
    return torch.cat([waves[:, :1], waves[:, 2 : width + 1]], dim=1)
