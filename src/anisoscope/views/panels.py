"""Figures as plain frozen values: what is drawn, with no word on how. Nothing here is rounded.

A Panel is one pair of axes; a Figure is a group of panels that share a caption and toggles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis; ``ticks``, ``labels`` and ``range`` are empty where the drawing side may choose them."""

    title: str
    log: bool = False
    ticks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series of points with a 95 % band.

    ``role`` numbers the colour, ``dash`` the line style; ``shade`` from 0 to 1 stands for an ordered colour instead.
    ``tags`` are what toggles ask for. ``joined`` is False for points that no line connects.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    lower: tuple[float | None, ...]
    upper: tuple[float | None, ...]
    hover: tuple[str, ...]
    role: int = 0
    dash: int = 0
    shade: float | None = None
    joined: bool = True
    visible: bool = True
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A horizontal line that structureless data would read."""

    name: str
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes with lines."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    references: tuple[Reference, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """A table of values as colours: rows are sites, columns are steps. None where nothing was measured."""

    key: str
    title: str
    x: Axis
    y: Axis
    z: tuple[tuple[float | None, ...], ...]
    stderr: tuple[tuple[float | None, ...], ...]
    n: tuple[tuple[int | None, ...], ...]
    unit: str = ""
    visible: bool = True
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Toggle:
    """A switch that shows or hides all lines with one tag."""

    kind: str
    value: str
    role: int | None
    dash: int | None
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels with a common caption. ``shades`` names the first and the last of an ordered colour.

    ``columns`` is how many panels stand side by side where there is room, such as one for each model; 0 for any number.
    """

    key: str
    title: str
    caption: str
    panels: tuple[Panel | Heatmap, ...]
    toggles: tuple[Toggle, ...] = ()
    shades: tuple[str, str] | None = None
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A small table of words. The first cell of a row is its head; a cell of several lines is a tuple."""

    key: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | tuple[str, ...], ...], ...]
