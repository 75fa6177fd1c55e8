"""Shapes in closed form, each in the narrowest space that holds it: points, tangents, normals, curvature, geodesics.

Below, d is the dimension and w the natural width. `surfaces.py` turns a shape into a surface in a space of any width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import OptionError

NEWTON_STEPS = 50
GEODESIC_STEPS = 16  # Runge-Kutta steps between two lengths: their error is far below the rounding of a chord


@dataclass(frozen=True)
class Jet:
    """Points with an orthonormal basis of each tangent space and the second fundamental form in that basis."""

    x: Float[Tensor, "n w"]
    tangent: Float[Tensor, "n w d"]
    second: Float[Tensor, "n w d d"]


class Shape(ABC):
    """A surface patch known in closed form. ``base`` is the point about which local clouds lie."""

    dimension: int
    width: int
    sampling: str  # what `draw` is uniform in

    @property
    @abstractmethod
    def base(self) -> Float[Tensor, "w"]:
        """The base point."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n w"]:
        """Points spread over the whole shape."""

    @abstractmethod
    def near(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """The points whose projection on the tangent space of the base is ``v``, nearest to the base."""

    @abstractmethod
    def jet(self, x: Float[Tensor, "n w"]) -> Jet:
        """Tangents and curvature at points of the shape."""

    @abstractmethod
    def coordinates(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """Intrinsic coordinates of points of the shape."""

    def geodesics(
        self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"], lengths: Float[Tensor, "m"]
    ) -> Float[Tensor, "m n w"]:
        """Points at these lengths along the geodesics that leave ``x`` in unit tangent directions.

        A geodesic accelerates along the normal alone, ``x'' = II(x', x')``: integrated by Runge and Kutta's fourth
        order. Lengths ascend.
        """
        found, at = [], 0.0
        for length in lengths.tolist():
            step = (length - at) / GEODESIC_STEPS
            for _ in range(GEODESIC_STEPS):
                x, direction = _runge_kutta(self, x, direction, step)
            at = length
            found.append(x)
        return torch.stack(found)

    def bend(self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"]) -> Float[Tensor, "n w"]:
        """``II(direction, direction)`` at each point."""
        jet = self.jet(x)
        a = torch.einsum("nwd,nw->nd", jet.tangent, direction)
        return torch.einsum("nwab,na,nb->nw", jet.second, a, a)


def _runge_kutta(shape: Shape, x: Tensor, v: Tensor, h: float) -> tuple[Tensor, Tensor]:
    a1 = shape.bend(x, v)
    a2 = shape.bend(x + h / 2 * v, v + h / 2 * a1)
    a3 = shape.bend(x + h / 2 * v + h * h / 4 * a1, v + h / 2 * a2)
    a4 = shape.bend(x + h * v + h * h / 2 * a2, v + h * a3)
    return x + h * v + h * h / 6 * (a1 + a2 + a3), v + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)


@final
@dataclass(frozen=True)
class Ellipsoid(Shape):
    """``sum (x_i / axis_i)^2 = 1``: circles, spheres and ellipsoids of any dimension. The base is off every axis."""

    axes: Float[Tensor, "w"]
    sampling = "area"

    @property
    def width(self) -> int:  # type: ignore[override]
        """One more than the dimension."""
        return len(self.axes)

    @property
    def dimension(self) -> int:  # type: ignore[override]
        """One less than the width."""
        return len(self.axes) - 1

    @property
    def base(self) -> Float[Tensor, "w"]:
        """The image of the diagonal."""
        return self.axes / len(self.axes) ** 0.5

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n w"]:
        """Uniform by area: points of the unit sphere, kept as often as the map to the ellipsoid stretches area."""
        found, shortest = torch.zeros(0, self.width, dtype=torch.float64), float(self.axes.min())
        while len(found) < n:
            y = _unit(torch.randn(2 * n, self.width, generator=generator, dtype=torch.float64))
            keep = torch.rand(2 * n, generator=generator, dtype=torch.float64) <= shortest * (y / self.axes).norm(dim=1)
            found = torch.cat([found, (y * self.axes)[keep]])
        return found[:n]

    def near(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """The nearer root of a quadratic equation along the normal."""
        jet = self.jet(self.base[None])
        normal = _unit(-self.base / self.axes**2)  # inwards
        q = self.base + v @ jet.tangent[0].T
        a = float((normal / self.axes).square().sum())
        b = (q * normal / self.axes**2).sum(dim=1)
        c = (q / self.axes).square().sum(dim=1) - 1
        inside = b * b - a * c
        if bool((inside <= 0).any() or (b >= 0).any()):
            raise too_wide("the surface bends away below the tangent plane there")
        # b < 0 here: the form c / (...) has no cancellation where the height is small
        height = c / (-b + inside.sqrt())
        return q + height[:, None] * normal

    def jet(self, x: Float[Tensor, "n w"]) -> Jet:
        """From the level set: ``II(s, t) = - s^T M t / |M x| n`` with ``M = diag(axis^-2)`` and ``n = M x / |M x|``."""
        gradient = x / self.axes**2
        size = gradient.norm(dim=1)
        normal = gradient / size[:, None]
        tangent = complement(normal)
        form = torch.einsum("nwa,w,nwb->nab", tangent, self.axes**-2, tangent)
        return Jet(x, tangent, -torch.einsum("nw,nab->nwab", normal / size[:, None], form))

    def bend(self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"]) -> Float[Tensor, "n w"]:
        """As in `jet`, without a basis."""
        gradient = x / self.axes**2
        form = (direction / self.axes).square().sum(dim=1, keepdim=True)
        return -form / gradient.square().sum(dim=1, keepdim=True) * gradient

    def geodesics(
        self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"], lengths: Float[Tensor, "m"]
    ) -> Float[Tensor, "m n w"]:
        """Great circles on a sphere; integrated where the axes differ."""
        radius = float(self.axes[0])
        if bool((self.axes != radius).any()):
            return super().geodesics(x, direction, lengths)
        angle = (lengths / radius)[:, None, None]
        return angle.cos() * x + radius * angle.sin() * direction

    def coordinates(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """Angle and direction from the base, on the unit sphere whose image this is."""
        y = x / self.axes
        start = _unit(self.base / self.axes)
        along = y @ complement(start[None])[0]
        angle = torch.atan2(along.norm(dim=1), y @ start)
        return _unit(along) * angle[:, None]


@final
@dataclass(frozen=True)
class Graph(Shape):
    """``x = (v, II(v, v) / 2)`` over a ball of radius ``extent``: saddles and random quadratic graphs, base at 0."""

    form: Float[Tensor, "m d d"]
    extent: float = 1.0
    sampling = "the tangent coordinates"

    @property
    def dimension(self) -> int:  # type: ignore[override]
        """The width of v."""
        return int(self.form.shape[1])

    @property
    def width(self) -> int:  # type: ignore[override]
        """Tangent and normal coordinates."""
        return int(self.form.shape[0] + self.form.shape[1])

    @property
    def base(self) -> Float[Tensor, "w"]:
        """The origin."""
        return torch.zeros(self.width, dtype=torch.float64)

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n w"]:
        """Uniform in the ball of tangent coordinates, not by area."""
        v = _unit(torch.randn(n, self.dimension, generator=generator, dtype=torch.float64))
        length = torch.rand(n, 1, generator=generator, dtype=torch.float64) ** (1 / self.dimension)
        return self.near(self.extent * length * v)

    def near(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """The definition itself."""
        return torch.cat([v, torch.einsum("mab,na,nb->nm", self.form, v, v) / 2], dim=1)

    def jet(self, x: Float[Tensor, "n w"]) -> Jet:
        """The graph's Jacobian, made orthonormal; its Hessian is constant."""
        v = x[:, : self.dimension]
        eye = torch.eye(self.dimension, dtype=torch.float64).expand(len(v), -1, -1)
        jacobian = torch.cat([eye, torch.einsum("mab,nb->nma", self.form, v)], dim=1)
        hessian = torch.cat([torch.zeros(self.dimension, *self.form.shape[1:], dtype=torch.float64), self.form])
        return chart_jet(x, jacobian, hessian.expand(len(v), -1, -1, -1))

    def bend(self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"]) -> Float[Tensor, "n w"]:
        """The Hessian along the direction less its tangent part ``J (J^T J)^-1 J^T``, J the graph's Jacobian."""
        v, w = x[:, : self.dimension], direction[:, : self.dimension]
        slope = torch.einsum("mab,nb->nma", self.form, v)
        height = torch.einsum("mab,na,nb->nm", self.form, w, w)
        metric = torch.eye(self.dimension, dtype=torch.float64) + slope.transpose(1, 2) @ slope
        along = torch.linalg.solve(metric, torch.einsum("nma,nm->na", slope, height))
        return torch.cat([-along, height - torch.einsum("nma,na->nm", slope, along)], dim=1)

    def coordinates(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """The tangent coordinates at the base."""
        return x[:, : self.dimension]


@final
@dataclass(frozen=True)
class SwissRoll(Shape):
    """``(s t cos t, h, s t sin t)``, t from 1.5 pi to 4.5 pi, h from 0 to ``height``: curved one way, flat inside."""

    scale: float = 0.1
    height: float = 2.0
    dimension = 2
    width = 3
    sampling = "area"
    inner = 1.5 * torch.pi
    outer = 4.5 * torch.pi

    @property
    def base(self) -> Float[Tensor, "w"]:
        """The middle of the roll."""
        return self._at(torch.tensor([3 * torch.pi + 0.5, self.height / 2], dtype=torch.float64)[None])[0]

    def _at(self, u: Tensor) -> Tensor:
        t, h = u[:, 0], u[:, 1]
        return torch.stack([self.scale * t * t.cos(), h, self.scale * t * t.sin()], dim=1)

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n w"]:
        """Uniform by area: t is kept as often as the roll is long there."""
        found = torch.zeros(0, dtype=torch.float64)
        longest = (1 + self.outer**2) ** 0.5
        while len(found) < n:
            t = self.inner + (self.outer - self.inner) * torch.rand(2 * n, generator=generator, dtype=torch.float64)
            keep = torch.rand(2 * n, generator=generator, dtype=torch.float64) * longest <= (1 + t * t).sqrt()
            found = torch.cat([found, t[keep]])
        h = self.height * torch.rand(n, generator=generator, dtype=torch.float64)
        return self._at(torch.stack([found[:n], h], dim=1))

    def near(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """Newton's method for t; the height follows at once."""
        base, start = self.base, self.coordinates(self.base[None])[0]
        along = self.jet(base[None]).tangent[0, :, 0]
        u = torch.stack([start[0].expand(len(v)), start[1] + v[:, 1]], dim=1)
        for _ in range(NEWTON_STEPS):
            miss = v[:, 0] - (self._at(u) - base) @ along
            slope = self._jacobian(u)[:, :, 0] @ along
            if bool((slope <= 0).any()):  # past the place where the roll stands upright on the tangent plane
                break
            if bool((miss.abs() <= 1e-15).all()):
                return self._at(u)
            u = torch.stack([u[:, 0] + (miss / slope).clamp(-0.5, 0.5), u[:, 1]], dim=1)
        if bool((slope <= 0).any()) or bool((miss.abs() > 1e-12).any()):
            raise too_wide("the roll bends away below the tangent plane there")
        return self._at(u)

    def _jacobian(self, u: Tensor) -> Tensor:
        t, zero, one = u[:, 0], torch.zeros_like(u[:, 0]), torch.ones_like(u[:, 0])
        s = self.scale
        turn = torch.stack([s * (t.cos() - t * t.sin()), zero, s * (t.sin() + t * t.cos())], dim=1)
        return torch.stack([turn, torch.stack([zero, one, zero], dim=1)], dim=2)

    def jet(self, x: Float[Tensor, "n w"]) -> Jet:
        """From the chart (t, h)."""
        u = self.coordinates(x)
        t, s = u[:, 0], self.scale
        hessian = torch.zeros(len(x), 3, 2, 2, dtype=torch.float64)
        hessian[:, 0, 0, 0] = s * (-2 * t.sin() - t * t.cos())
        hessian[:, 2, 0, 0] = s * (2 * t.cos() - t * t.sin())
        return chart_jet(x, self._jacobian(u), hessian)

    def coordinates(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """(t, h)."""
        return torch.stack([x[:, [0, 2]].norm(dim=1) / self.scale, x[:, 1]], dim=1)


@final
@dataclass(frozen=True)
class Veronese(Shape):
    """``radius * y y^T`` for unit y in three dimensions, as the six numbers of a symmetric matrix: the same everywhere.

    Its second fundamental form spans both normal directions of the five-dimensional space it fills, so no hyperplane
    section shows it.
    """

    radius: float = 1.0
    dimension = 2
    width = 6
    sampling = "area"

    @property
    def base(self) -> Float[Tensor, "w"]:
        """The image of the diagonal."""
        return self._at(torch.full((1, 3), 3**-0.5, dtype=torch.float64))[0]

    def _at(self, y: Tensor) -> Tensor:
        return self.radius * flat_symmetric(y[:, :, None] * y[:, None, :])

    def _above(self, x: Tensor) -> Tensor:
        """A unit vector over each point: the leading eigenvector, up to sign."""
        return torch.linalg.eigh(symmetric(x / self.radius)).eigenvectors[:, :, -1]

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n w"]:
        """Uniform by area: the map from the sphere stretches all directions alike."""
        return self._at(_unit(torch.randn(n, 3, generator=generator, dtype=torch.float64)))

    def near(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """An angle a from the base projects to ``radius sin(2a) / sqrt(2)``."""
        y = self._above(self.base[None])
        length = v.norm(dim=1, keepdim=True)
        sine = 2**0.5 * length / self.radius
        if bool((sine >= 1).any()):
            raise too_wide("the surface bends away below the tangent plane there")
        angle = sine.asin() / 2
        way = (v / length.clamp_min(1e-300)) @ complement(y)[0].T
        return self._at(angle.cos() * y + angle.sin() * way)

    def jet(self, x: Float[Tensor, "n w"]) -> Jet:
        """``e_a = (t_a y^T + y t_a^T) / sqrt(2)`` and ``II_ab = (t_a t_b^T + t_b t_a^T) / 2 - delta_ab y y^T``."""
        y = self._above(x)
        t = complement(y)
        basis = torch.einsum("nia,nj->nija", t, y)
        tangent = (basis + basis.transpose(1, 2)) / 2**0.5
        pairs = torch.einsum("nia,njb->nijab", t, t)
        eye = torch.eye(2, dtype=torch.float64)
        second = (pairs + pairs.transpose(1, 2)) / 2 - torch.einsum("ni,nj,ab->nijab", y, y, eye)
        flat = [flat_symmetric(part.flatten(3).movedim(3, 1)) for part in (tangent, second)]
        return Jet(x, flat[0].movedim(1, 2), flat[1].movedim(1, 2).unflatten(2, (2, 2)) / self.radius)

    def geodesics(
        self, x: Float[Tensor, "n w"], direction: Float[Tensor, "n w"], lengths: Float[Tensor, "m"]
    ) -> Float[Tensor, "m n w"]:
        """Images of great circles: a length l is an angle ``l / (sqrt(2) radius)``."""
        y = self._above(x)
        way = 2**0.5 * torch.einsum("nij,nj->ni", symmetric(direction), y)
        angle = (lengths / (2**0.5 * self.radius))[:, None, None]
        return torch.stack([self._at(one) for one in angle.cos() * y + angle.sin() * way])

    def coordinates(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """Angle and direction from the base, on the sphere of unit vectors up to sign."""
        y, start = self._above(x), self._above(self.base[None])
        y = y * torch.where(y @ start[0] < 0, -1.0, 1.0)[:, None]
        along = y @ complement(start)[0]
        return _unit(along) * torch.atan2(along.norm(dim=1), y @ start[0])[:, None]


def too_wide(why: str) -> OptionError:
    """The error for a cloud that reaches where the surface is no graph over the tangent plane of the base."""
    return OptionError(f"a local cloud of this spread reaches too far: {why}; give a smaller spread")


def chart_jet(x: Tensor, jacobian: Float[Tensor, "n w d"], hessian: Float[Tensor, "n w d d"]) -> Jet:
    """A jet from the first and second derivatives of any chart: QR, and the normal part of the Hessian."""
    q, r = torch.linalg.qr(jacobian)
    sign = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)  # so that the basis follows the chart
    q, r = q * sign[:, None, :], r * sign[:, :, None]
    inverse = torch.linalg.inv(r)
    second = torch.einsum("nwab,nac,nbd->nwcd", hessian, inverse, inverse)
    along = torch.einsum("nwe,nwcd->necd", q, second)
    return Jet(x, q, second - torch.einsum("nwe,necd->nwcd", q, along))


def complement(normal: Float[Tensor, "n w"]) -> Float[Tensor, "n w d"]:
    """An orthonormal basis of what is orthogonal to each unit vector: the other columns of a Householder reflection."""
    w = normal.shape[1]
    last = torch.zeros(w, dtype=torch.float64)
    last[-1] = 1.0
    # The reflection that takes the last axis to +normal or -normal, whichever lies farther: no cancellation.
    sign = torch.where(normal[:, -1:] > 0, -1.0, 1.0)
    v = _unit(sign * normal - last)
    reflection = torch.eye(w, dtype=torch.float64) - 2 * v[:, :, None] * v[:, None, :]
    return reflection[:, :, :-1]


def symmetric(x: Float[Tensor, "n 6"]) -> Float[Tensor, "n 3 3"]:
    """Six numbers as a symmetric matrix; off-diagonal ones carry the root of two, so lengths agree."""
    a, b, c, d, e, f = x.unbind(dim=1)
    d, e, f = (one / 2**0.5 for one in (d, e, f))
    rows = [torch.stack(row, dim=1) for row in ((a, d, e), (d, b, f), (e, f, c))]
    return torch.stack(rows, dim=1)


def flat_symmetric(matrix: Float[Tensor, "*n 3 3"]) -> Float[Tensor, "*n 6"]:
    """A symmetric matrix as six numbers of the same length."""
    root = 2**0.5
    pairs = ((0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0), (0, 1, root), (0, 2, root), (1, 2, root))
    return torch.stack([weight * matrix[..., i, j] for i, j, weight in pairs], dim=-1)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
