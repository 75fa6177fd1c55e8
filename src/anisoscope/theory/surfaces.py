"""Surfaces with tangents, normals and second fundamental form in closed form, in a space of any width.

Locally a surface is a graph over its tangent space, ``x = p + v + II(v, v)/2 + O(|v|^3)``. A local cloud takes v normal
with a chosen spread. Everything is float64 on the CPU and fixed by its ``seed``.

**kappa** is one number for how curved a surface is at a point: the root mean square, over unit tangent directions t,
of the curvature ``|II(t, t)|`` of the geodesic in that direction; 1/R on every sphere of radius R. In terms of II it is
``kappa^2 = (2 |II|^2 + |tr II|^2) / (d (d + 2))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import OptionError, choose, unknown_name
from anisoscope.theory.shapes import Ellipsoid, Graph, Jet, Shape, SwissRoll, Veronese


@dataclass(frozen=True)
class Base:
    """The point that a local cloud lies about, with its tangent space and second fundamental form."""

    x: Float[Tensor, "w"]
    tangent: Float[Tensor, "w d"]
    second: Float[Tensor, "w d d"]

    @property
    def kappa(self) -> float:
        """Root mean square curvature of the geodesics through the base."""
        return float(kappa_squared(self.second[None])[0]) ** 0.5


@dataclass(frozen=True)
class Points:
    """Points of a surface with the truth about each.

    ``tangent`` holds an orthonormal basis of each tangent space, ``second`` the second fundamental form in that basis:
    ``second[n, :, a, b]`` is the normal vector ``II(e_a, e_b)``. ``coordinates`` are those of the surface, or v for a
    local cloud, in the basis of ``base``.
    """

    x: Float[Tensor, "n w"]
    tangent: Float[Tensor, "n w d"]
    second: Float[Tensor, "n w d d"]
    coordinates: Float[Tensor, "n d"]
    base: Base

    def split(self) -> tuple[Float[Tensor, "n w"], Float[Tensor, "n w"]]:
        """What lies along the tangent space of the base and what lies off it, both measured from the base."""
        away = self.x - self.base.x
        along = away @ self.base.tangent @ self.base.tangent.T
        return along, away - along


@dataclass(frozen=True)
class Surface:
    """A shape placed in a space of ``width`` dimensions by a random rotation, which changes no distance."""

    name: str
    shape: Shape
    frame: Float[Tensor, "w natural"]

    @property
    def dimension(self) -> int:
        """Dimension of the surface."""
        return self.shape.dimension

    @property
    def width(self) -> int:
        """Dimension of the space around it."""
        return int(self.frame.shape[0])

    @property
    def base(self) -> Base:
        """The base point of local clouds."""
        found = self._placed(self.shape.jet(self.shape.base[None]))
        return Base(found.x[0], found.tangent[0], found.second[0])

    def sample(self, n: int, *, seed: int, spread: float | None = None) -> Points:
        """Points over the whole surface, or a local cloud.

        Without a spread they are uniform by area; on graphs uniform in the ball of tangent coordinates. With one, the
        tangent coordinates v about the base are normal with that standard deviation, and x is the point of the
        surface over v.
        """
        if n < 1:
            raise OptionError(f"a sample needs one point or more, got n={n}")
        generator = torch.Generator().manual_seed(seed)
        if spread is None:
            return self._points(self.shape.draw(n, generator), None)
        if not 0 < spread < float("inf"):
            raise OptionError(f"the spread of a local cloud is a length above 0, got {spread}")
        return self.over(spread * torch.randn(n, self.dimension, generator=generator, dtype=torch.float64))

    def over(self, v: Float[Tensor, "n d"]) -> Points:
        """The points over these tangent coordinates at the base."""
        return self._points(self.shape.near(v), v)

    def x_over(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n w"]:
        """As `over`, without tangents and curvature at each point."""
        return self.shape.near(v) @ self.frame.T

    def geodesics(
        self, points: Points, direction: Float[Tensor, "n d"], lengths: Sequence[float]
    ) -> Float[Tensor, "m n w"]:
        """Points at these ascending lengths along the geodesics that leave ``points`` in these directions.

        Directions are coordinates in each point's tangent basis; their length does not matter.
        """
        way = torch.einsum("nwd,nd->nw", points.tangent, direction / direction.norm(dim=1, keepdim=True))
        places = torch.tensor(lengths, dtype=torch.float64)
        return self.shape.geodesics(points.x @ self.frame, way @ self.frame, places) @ self.frame.T

    def _points(self, x: Tensor, v: Tensor | None) -> Points:
        jet = self._placed(self.shape.jet(x))
        return Points(jet.x, jet.tangent, jet.second, self.shape.coordinates(x) if v is None else v, self.base)

    def _placed(self, jet: Jet) -> Jet:
        return Jet(
            jet.x @ self.frame.T,
            torch.einsum("wk,nkd->nwd", self.frame, jet.tangent),
            torch.einsum("wk,nkab->nwab", self.frame, jet.second),
        )


@dataclass(frozen=True)
class ZipfTokens:
    """Tokens of many types: which type each is, its tangent coordinates, and each type's frequency and spread."""

    token: Int[Tensor, "n"]
    coordinates: Float[Tensor, "n d"]
    frequency: Float[Tensor, "types"]
    spread: Float[Tensor, "types"]


@dataclass(frozen=True)
class ZipfClouds:
    """Tokens of many types in local clouds about one base; a type's spread follows its frequency."""

    points: Points
    token: Int[Tensor, "n"]
    frequency: Float[Tensor, "types"]
    spread: Float[Tensor, "types"]


def zipf_tokens(
    dimension: int,
    n: int,
    *,
    types: int,
    exponent: float,
    contraction: float,
    spread: float,
    seed: int,
    sampling: str = "zipf",
) -> ZipfTokens:
    """Tokens whose type of rank r has frequency ``f = r^-exponent`` and spread ``sigma_f = spread * f^-contraction``.

    Frequencies are in units of the commonest type's, so ``spread`` is that of the commonest type. ``sampling``
    "uniform" draws every type equally often and keeps the spreads: what is left when frequency is taken away.
    """
    if types < 1 or n < 1:
        raise OptionError(f"Zipf clouds need tokens and types, got n={n} and types={types}")
    choose("sampling", sampling, ("zipf", "uniform"))
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.arange(1, types + 1, dtype=torch.float64) ** -exponent
    weight = frequency if sampling == "zipf" else torch.ones_like(frequency)
    token = torch.multinomial(weight, n, replacement=True, generator=generator)
    sigma = spread * frequency**-contraction
    z = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
    return ZipfTokens(token, sigma[token, None] * z, frequency, sigma)


def zipf_clouds(surface: Surface, n: int, *, seed: int, **options: Any) -> ZipfClouds:
    """`zipf_tokens` as points of a surface, in clouds about its base; the options are those of `zipf_tokens`."""
    found = zipf_tokens(surface.dimension, n, seed=seed, **options)
    return ZipfClouds(surface.over(found.coordinates), found.token, found.frequency, found.spread)


def kappa_squared(second: Float[Tensor, "n w d d"]) -> Float[Tensor, "n"]:
    """Mean squared curvature over unit tangent directions: ``(2 |II|^2 + |tr II|^2) / (d (d + 2))``."""
    d = second.shape[-1]
    trace = second.diagonal(dim1=2, dim2=3).sum(dim=2)
    return (2 * second.square().sum(dim=(1, 2, 3)) + trace.square().sum(dim=1)) / (d * (d + 2))


def random_form(dimension: int, normals: int, kappa: float, generator: torch.Generator) -> Float[Tensor, "m d d"]:
    """A random second fundamental form with this kappa: normal entries, symmetric, scaled."""
    raw = torch.randn(normals, dimension, dimension, generator=generator, dtype=torch.float64)
    form = raw + raw.transpose(1, 2)
    return form * kappa / float(kappa_squared(form[None])[0]) ** 0.5


def _ellipsoid(axes: Sequence[float]) -> Ellipsoid:
    if len(axes) < 2 or not all(0 < axis < float("inf") for axis in axes):
        raise OptionError(f"an ellipsoid needs two or more axes above 0, got {list(axes)}")
    return Ellipsoid(torch.tensor(list(axes), dtype=torch.float64))


def _circle(generator: torch.Generator, *, radius: float = 1.0) -> Shape:
    return _ellipsoid([radius] * 2)


def _sphere(generator: torch.Generator, *, dimension: int = 2, radius: float = 1.0) -> Shape:
    return _ellipsoid([radius] * (dimension + 1))


def _general(generator: torch.Generator, *, axes: Sequence[float] = (1.0, 1.5, 2.0)) -> Shape:
    return _ellipsoid(axes)


def _saddle(generator: torch.Generator, *, up: float = 1.0, down: float = 0.5) -> Shape:
    return Graph(torch.tensor([[[up, 0.0], [0.0, -down]]], dtype=torch.float64))


def _swiss_roll(generator: torch.Generator, *, scale: float = 0.1, height: float = 2.0) -> Shape:
    return SwissRoll(scale, height)


def _veronese(generator: torch.Generator, *, radius: float = 1.0) -> Shape:
    return Veronese(radius)


def _graph(
    generator: torch.Generator, *, dimension: int = 3, normals: int = 5, kappa: float = 1.0, extent: float = 1.0
) -> Shape:
    if dimension < 1 or normals < 1:
        raise OptionError(f"a graph needs dimension and normals of 1 or more, got {dimension} and {normals}")
    if not 0 <= kappa < float("inf"):
        raise OptionError(f"kappa is a curvature of 0 or more, got {kappa}")
    return Graph(random_form(dimension, normals, kappa, generator), extent)


SHAPES: Mapping[str, Callable[..., Shape]] = {
    "circle": _circle,
    "sphere": _sphere,
    "ellipsoid": _general,
    "saddle": _saddle,
    "swiss_roll": _swiss_roll,
    "veronese": _veronese,
    "quadratic": _graph,
}


def surface_names() -> tuple[str, ...]:
    """The names that `make_surface` knows."""
    return tuple(SHAPES)


def make_surface(name: str, *, width: int | None = None, seed: int = 0, **options: Any) -> Surface:
    """A surface by name, rotated at random into ``width`` dimensions; without a width in its natural space.

    Options: circle ``radius``; sphere ``dimension, radius``; ellipsoid ``axes`` (any number of them); saddle
    ``up, down``; swiss_roll ``scale, height``; veronese ``radius``; quadratic ``dimension, normals, kappa, extent``, a
    random graph ``x = v + II(v, v)/2`` with that kappa, its II drawn with ``seed``.
    """
    if name not in SHAPES:
        raise unknown_name("surface", name, SHAPES)
    known = list(inspect.signature(SHAPES[name]).parameters)[1:]  # all but the generator
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[name](generator, **options)
    if width is None:
        return Surface(name, shape, torch.eye(shape.width, dtype=torch.float64))
    if width < shape.width:
        raise OptionError(f"{name} needs width {shape.width} or more, got {width}")
    q, _ = torch.linalg.qr(torch.randn(width, shape.width, generator=generator, dtype=torch.float64))
    return Surface(name, shape, q)
