"""Energies of many random and normal controls at once, without a basis formed for each of them.

``controls.control_bases`` says what the controls are: with Z the Gaussian draws, U their coordinates behind the first K
and ``H = I - X X^T`` the reflection of a basis, random ones span Z and normal ones span ``H [0; U]``. Two ways lead to
their energies in a second moment S, to the same up to rounding (a test holds this):

- *forms*: ``tr(inner^-1 form)`` with small matrices. ``U^T S U`` serves random controls and the normal ones of all
  bases: what the first K coordinates or a reflection add are terms in ``c``, ``X^T S U`` and ``X^T S X``, all K x K.
  B K D^2 operations for each moment, and nothing kept but the draws.
- *projectors*: ``<P_b, S>`` with ``P_b`` the projector onto a control in its own coordinates, the same for all bases
  and looks; S is reflected once for each basis. B D^2 operations for each moment, and B D^2 numbers kept.

S is symmetric, and all that is asked of it are sums against symmetric matrices. So half of it does, strip by strip down
to the diagonal, with what is off the diagonal doubled.

Draws lie as rows, a control after another, so that each small matrix is a product of two contiguous blocks.

Letters: H halves (or other sets of moments with bases of their own), S second moments, P bases, B draws, K the rank,
D the width, E = D - K.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.tangent.controls import gaussian_draws, mirrors, orthonormal

STRIP_COLUMNS = 128  # of the half of a second moment in forms; narrower strips save less than they lose in speed
STRIP_ROWS = 16  # of the half in projectors: sums over a strip are float32, sums over strips float64
CHUNK_ROWS = 2048  # rows of draws multiplied at a time on a CPU
HELD_BYTES = 80 << 20  # of draws kept for the next call
PROJECTED_BYTES = 480 << 20  # of projectors kept: those of 199 controls at a width of 768
REFLECTED = 6  # multiplications to reflect a moment, over K D^2 / 2
LOADED = 20  # multiplications in the time that one number of a projector is read, for the first moment of many


T = TypeVar("T", "Gaussians", "Projectors")


class _Held(Generic[T]):
    """What was made for the latest calls, as far as it fits into so many bytes."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock, self._bytes = Lock(), 0  # counted along: there may be thousands of small ones

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self.kept.clear()
            self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], T], size: int, most: int) -> T:
        """What the key stands for, made if it must be, in so many bytes; room is made for it first."""
        with self._lock:
            found = self.kept.get(key)
            if found is not None:
                self.kept.move_to_end(key)
                return found
            while self.kept and size + self._bytes > most:
                self._bytes -= self.kept.popitem(last=False)[1].nbytes
        with torch.inference_mode(False):  # whoever comes next may not be in this mode
            found = make()
        if size <= most:
            with self._lock:
                if key not in self.kept:  # another thread may have been as far
                    self._bytes += size
                self.kept[key] = found
        return found


@dataclass(frozen=True)
class Gaussians:
    """The Gaussian matrices of one seed, transposed, with what depends on nothing else."""

    head: Float[Tensor, "b k k"]
    """Their first K coordinates, Y^T."""
    tail: Float[Tensor, "b k e"]
    """The others, U^T."""

    @property
    def nbytes(self) -> int:
        """Bytes of the draws, and of the three small matrices that are made of each."""
        return self.head.nbytes + self.tail.nbytes + 3 * self.head.numel() * torch.float64.itemsize

    @cached_property
    def inner(self) -> Float[Tensor, "b k k"]:
        """``U^T U`` of each draw, float64."""
        return _own(self.tail)

    @cached_property
    def of_few(self) -> Float[Tensor, "b k k"]:
        """``(U^T U)^-1``, where U has as many coordinates as columns."""
        return _inverse(self.inner)

    @cached_property
    def of_whole(self) -> Float[Tensor, "b k k"]:
        """``(Z^T Z)^-1``."""
        return _inverse(self.inner + _own(self.head))


def tight(width: int, rank: int) -> bool:
    """Whether ``U^T U`` is far enough from the identity for float32 to lose digits in its inverse."""
    return 3 * rank > width


def _own(rows: Float[Tensor, "b k w"]) -> Float[Tensor, "b k k"]:
    return (rows @ rows.mT).double()


def _inverse(inner: Float[Tensor, "b k k"]) -> Float[Tensor, "b k k"]:
    return torch.cholesky_inverse(torch.linalg.cholesky(inner))


_held: _Held[Gaussians] = _Held()


def held_gaussians(
    width: int, rank: int, draws: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Gaussians:
    """The draws of a seed. The last ones are kept: drawing them costs as much as using them, and looks meet them again.

    At most ``HELD_BYTES`` are kept, those of the latest calls.
    """

    def make() -> Gaussians:
        z = gaussian_draws(width, rank, draws, seed=seed).permute(1, 2, 0).to(device).to(dtype)
        return Gaussians(z[:, :, :rank].contiguous(), z[:, :, rank:].contiguous())

    size = draws * rank * (width * dtype.itemsize + 3 * rank * torch.float64.itemsize)
    return _held.get((width, rank, draws, seed, str(device), dtype), make, size, HELD_BYTES)


@dataclass(frozen=True)
class Projectors:
    """``P_b`` of each control, as strips of rows from the diagonal on."""

    width: int
    strips: tuple[Float[Tensor, "b _"], ...]

    @classmethod
    def onto(cls, bases: Float[Tensor, "b d k"]) -> Projectors:
        """Onto the spans of orthonormal bases."""
        width = bases.shape[1]
        return cls(width, tuple((bases[:, at] @ bases[:, behind].mT).flatten(1) for at, behind in _strips(width)))

    @property
    def nbytes(self) -> int:
        """Bytes of all strips."""
        return sum(strip.nbytes for strip in self.strips)

    @staticmethod
    def bytes_of(width: int, draws: int, dtype: torch.dtype) -> int:
        """What they would take."""
        cells = sum((at.stop - at.start) * (width - at.start) for at, _ in _strips(width))
        return draws * cells * dtype.itemsize

    def energies(self, moments: Callable[[slice, slice], Float[Tensor, "s r c"]]) -> Float[Tensor, "s b"]:
        """``<P_b, S>`` of moments that are told by rows and columns, in float64; what is told may be written into."""
        found: Tensor | None = None
        for strip, (at, behind) in zip(self.strips, _strips(self.width), strict=True):
            cells = moments(at, behind)
            cells[:, :, at.stop - at.start :] *= 2
            part = (cells.flatten(1) @ strip.mT).double()
            found = part if found is None else found.add_(part)
        assert found is not None
        return found


def _strips(width: int) -> Iterator[tuple[slice, slice]]:
    for at in range(0, width, STRIP_ROWS):
        yield slice(at, min(at + STRIP_ROWS, width)), slice(at, width)


_projected: _Held[Projectors] = _Held()


@dataclass(frozen=True)
class Draws:
    """The Gaussian matrices of one seed, and the reflections X of the bases whose complement normal controls are in."""

    gaussians: Gaussians
    mirrors: Float[Tensor, "h p d k"]
    seed: int

    @classmethod
    def of(
        cls, bases: Float[Tensor, "h p d k"], draws: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Draws:
        """Draws beside these bases, in the precision that their inverses need."""
        h, p, d, k = bases.shape
        dtype = torch.float64 if tight(d, k) else dtype
        found = mirrors(bases.to(device).flatten(0, 1)) if p else bases.new_zeros(0, d, k)
        gaussians = held_gaussians(d, k, draws, seed=seed, device=device, dtype=dtype)
        return cls(gaussians, found.to(device, dtype).view(h, p, d, k), seed)

    def of_rows(self, rows: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "b"], Float[Tensor, "p b"]]:
        """Energies of random and of normal controls in rows, with no second moment formed; for one set of bases."""
        k, rows = self.mirrors.shape[3], rows.to(self.mirrors.dtype)
        tails = self.gaussians.tail @ rows[:, k:].mT
        normal = [
            _along(tails - (self.gaussians.tail @ mirror[k:]) @ (rows @ mirror).mT, self.gaussians.of_few)
            for mirror in self.mirrors[0]
        ]
        random = _along(tails + self.gaussians.head @ rows[:, :k].mT, self.gaussians.of_whole)
        return random, torch.stack(normal) if normal else random.new_zeros(0, len(random))

    def of_moments(self, seconds: Float[Tensor, "h s d d"]) -> tuple[Float[Tensor, "h s b"], Float[Tensor, "h p s b"]]:
        """Energies (not yet shares) of random and of normal controls in each of several second moments; float64."""
        moments = seconds.to(self.mirrors.dtype)
        if self.by_projectors(moments.shape[0] * moments.shape[1]):
            return self._random_projected(moments), self._normal_projected(moments)
        found = [self._by_forms(own, mirror) for own, mirror in zip(moments, self.mirrors, strict=True)]
        random, normal = zip(*found, strict=True)
        return torch.stack(random), torch.stack(normal)

    def normal_of_moments(self, seconds: Float[Tensor, "h s d d"]) -> Float[Tensor, "h p s b"]:
        """Those of normal controls alone."""
        if self.by_projectors(seconds.shape[0] * seconds.shape[1]):
            return self._normal_projected(seconds.to(self.mirrors.dtype))
        return self.of_moments(seconds)[1]

    def by_projectors(self, moments: int) -> bool:
        """Whether projectors are used for so many moments: on a CPU, where they fit and cost less than forms.

        What is counted are multiplications for one moment over ``D^2 / 2``. A single moment is not worth what is kept.
        """
        (_, bases, width, rank), (draws, _, _) = self.mirrors.shape, self.gaussians.tail.shape
        room = sum(Projectors.bytes_of(one, draws, self.mirrors.dtype) for one in (width, width - rank))
        few = moments < 2 or room > PROJECTED_BYTES or self.mirrors.device.type != "cpu"
        reading = (1 + bases) * draws * (1 + LOADED / moments)
        return not few and bases * REFLECTED * rank + reading < draws * rank

    def _projectors(self, whole: bool) -> Projectors:
        tail, head = self.gaussians.tail, self.gaussians.head
        width = tail.shape[2] + (head.shape[2] if whole else 0)
        key = (width, *head.shape[:2], whole, self.seed, tail.dtype)

        def make() -> Projectors:
            z = torch.cat([head, tail], dim=2) if whole else tail
            return Projectors.onto(orthonormal(z.mT.contiguous()))

        return _projected.get(key, make, Projectors.bytes_of(width, len(tail), tail.dtype), PROJECTED_BYTES)

    def _random_projected(self, moments: Float[Tensor, "h s d d"]) -> Float[Tensor, "h s b"]:
        flat = moments.flatten(0, 1)
        found = self._projectors(True).energies(lambda at, behind: flat[:, at, behind].clone())
        return found.unflatten(0, moments.shape[:2])

    def _normal_projected(self, moments: Float[Tensor, "h s d d"]) -> Float[Tensor, "h p s b"]:
        (h, p, _, k), each = self.mirrors.shape, moments.shape[1]
        if not p:
            return moments.new_zeros(h, 0, each, len(self.gaussians.tail), dtype=torch.float64)
        # X and what a moment makes of it, and the same the other way round: H S H = S - X Y^T - Y X^T.
        held = moments[:, None] @ self.mirrors[:, :, None]
        mirror = self.mirrors[:, :, None].expand_as(held)
        held = held - mirror @ (mirror.mT @ held) / 2
        one, two = (torch.cat(pair, dim=4)[:, :, :, k:] for pair in ((mirror, held), (held, mirror)))
        tails = moments[:, None, :, k:, k:]

        def reflected(at: slice, behind: slice) -> Tensor:
            return (tails[..., at, behind] - one[..., at, :] @ two[..., behind, :].mT).flatten(0, 2)

        return self._projectors(False).energies(reflected).unflatten(0, (h, p, each))

    def lengths(self, seconds: Float[Tensor, "h d d"]) -> Float[Tensor, "h p b"]:
        """``|Q_b^T S Q_b|^2`` of normal controls in one second moment for each set of bases, float64; by forms."""
        found = []
        for moment, mirror in zip(seconds.to(self.mirrors.dtype), self.mirrors, strict=True):
            parts = [
                [_length(self.gaussians.of_few[at], one.form[0], c, across[0]) for c, across in one.bases]
                for at, one in self._smalls(moment[None], mirror)
            ]
            found.append(torch.stack([torch.cat(each) for each in zip(*parts, strict=True)]))
        return torch.stack(found)

    def _by_forms(self, moments: Float[Tensor, "s d d"], mirror: Float[Tensor, "p d k"]) -> tuple[Tensor, Tensor]:
        random, normal, k = list[Tensor](), list[Tensor](), mirror.shape[2]
        for at, one in self._smalls(moments, mirror):
            # The first K coordinates are as a basis of the first axes whose c is -Y.
            head = self.gaussians.head[at].mT
            sides = one.sides + moments[:, None, :k, :k] @ head / 2
            random.append(_energy(self.gaussians.of_whole[at], one.form, -head, sides))
            each = [_energy(self.gaussians.of_few[at], one.form, c, across) for c, across in one.bases]
            normal.append(torch.stack(each) if each else random[-1].new_zeros(0, *random[-1].shape))
        return torch.cat(random, dim=1), torch.cat(normal, dim=2)

    def _smalls(
        self, moments: Float[Tensor, "s d d"], mirror: Float[Tensor, "p d k"]
    ) -> Iterator[tuple[slice, _Small]]:
        """A few draws at a time on a CPU: what is made of them is still in its cache when it is used."""
        draws, rank, _ = self.gaussians.tail.shape
        rights = [self._right(moment, mirror, first=not number) for number, moment in enumerate(moments)]
        step = max(CHUNK_ROWS // rank, 1) if moments.device.type == "cpu" else draws
        for at in range(0, draws, step):
            yield slice(at, at + step), _Small.of(self.gaussians.tail[at : at + step], rights, len(mirror))

    def _right(self, moment: Float[Tensor, "d d"], mirror: Float[Tensor, "p d k"], first: bool) -> Tensor:
        """What tails are multiplied with: the tail of a moment, beside it that of its first K columns, of the mirrors
        (once for all moments) and of what the moment makes of them."""
        k = mirror.shape[2]
        held = moment @ mirror
        # Half of X^T S X is taken off on both sides of the draws: no product with each of them is left for it.
        lean = held - mirror @ (mirror.mT @ held) / 2
        part = moment[k:, k:]
        if moment.device.type == "cpu":
            part = part.triu(1).mul_(2)
            part.diagonal().copy_(moment.diagonal()[k:])
        return torch.cat([part, moment[k:, :k], *(mirror[:, k:] if first else ()), *lean[:, k:]], dim=1)


@dataclass(frozen=True)
class _Small:
    """Of some draws: ``U^T S U`` up to an antisymmetric part, the rows of ``S U`` on the first axes, and for each basis
    ``c = X^T U`` with ``X^T S U - X^T S X c / 2`` of each moment."""

    form: Float[Tensor, "s b k k"]
    sides: Float[Tensor, "s b k k"]
    bases: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, tail: Float[Tensor, "b k e"], rights: list[Tensor], bases: int) -> _Small:
        """From what the tails are multiplied with."""
        width, rank, forms, columns = tail.shape[2], tail.shape[1], list[Tensor](), list[tuple[Tensor, ...]]()
        for right in rights:
            images = _times_half(tail, right) if tail.device.type == "cpu" else tail @ right
            forms.append(tail @ images[:, :, :width].mT)
            # A copy, or these few columns would keep all images of all moments.
            columns.append(images[:, :, width:].mT.contiguous().split(rank, dim=1))
        across = [torch.stack([each[p - bases] for each in columns]) for p in range(bases)]
        pairs = list(zip(columns[0][1 : 1 + bases], across, strict=True))
        return cls(torch.stack(forms), torch.stack([each[0] for each in columns]), pairs)


def _along(images: Float[Tensor, "b k n"], off: Float[Tensor, "b k k"]) -> Float[Tensor, "b"]:
    return (off * (images @ images.mT)).sum(dim=(1, 2))


def _energy(
    off: Float[Tensor, "b k k"], form: Float[Tensor, "s b k k"], c: Float[Tensor, "b k k"],
    across: Float[Tensor, "s b k k"],
) -> Float[Tensor, "s b"]:  # fmt: skip
    """``tr(off (U - X c)^T S (U - X c))`` from ``across = X^T S U - X^T S X c / 2``; float64.

    ``form`` need only have ``U^T S U`` as its symmetric part, since ``off`` is symmetric.
    """
    mixer = c @ off.to(c.dtype)
    return (off * form).sum(dim=(2, 3)) - 2 * (mixer * across).sum(dim=(2, 3), dtype=torch.float64)


def _length(
    off: Float[Tensor, "b k k"], form: Float[Tensor, "b k k"], c: Float[Tensor, "b k k"],
    across: Float[Tensor, "b k k"],
) -> Float[Tensor, "b"]:  # fmt: skip
    """``tr`` of the square of ``off (U - X c)^T S (U - X c)``, from the same; float64."""
    part = form / 2 - c.mT @ across
    held = off @ (part + part.mT).double()
    return (held * held.mT).sum(dim=(1, 2))


def _times_half(rows: Float[Tensor, "c k e"], right: Float[Tensor, "e w"]) -> Float[Tensor, "c k w"]:
    """``rows @ right``, whose first E columns are upper triangular: strip by strip down to the diagonal.

    The columns behind them go with the last strip, which is as deep as they are.
    """
    flat, (width, whole) = rows.flatten(0, 1), right.shape
    out = torch.empty(len(flat), whole, dtype=flat.dtype)
    for at in range(0, width, STRIP_COLUMNS):
        end = min(at + STRIP_COLUMNS, width)
        to = end if end < width else whole
        torch.mm(flat[:, :end], right[:end, at:to], out=out[:, at:to])
    return out.view(*rows.shape[:2], whole)
