"""What one look at a model saw, site by site: the only thing that measures and analyses are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxtyping import Float, Int64
from torch import Tensor

from anisoscope.capture.gradients import EmbeddingGradient
from anisoscope.capture.maps import LinearMap
from anisoscope.estimate import Estimate
from anisoscope.runs.records import Curve
from anisoscope.stats.turns import Turns


@dataclass(frozen=True)
class MapView:
    """A linear map that reads or writes the site: its gradient (or its change) as rows in the space of the site.

    ``signal`` is dL/dy at the output of a reader, row i of it for the token of row i of the site; where all tokens
    are held the gradient is ``signal.T @ x``.
    """

    map: LinearMap
    rows: Float[Tensor, "m d"]
    signal: Float[Tensor, "n o"] | None = None


@dataclass(frozen=True)
class SiteView:
    """One site in one look. Row i of ``x``, ``g``, ``ids``, ``positions`` and ``sequences`` is one token.

    Rows are in the order of the text, and the same tokens stand at every site. ``g`` is the gradient of the mean loss;
    it is None where none could be had, and ``no_gradient`` says why. What was not asked for is empty.
    """

    site: str
    step: int
    seed: int
    x: Float[Tensor, "n d"]
    g: Float[Tensor, "n d"] | None
    ids: Int64[Tensor, "n"]
    positions: Int64[Tensor, "n"]
    sequences: Int64[Tensor, "n"]
    no_gradient: str = ""
    tokens: int = 0
    """Tokens out of which the rows were sampled."""
    readers: tuple[MapView, ...] = ()
    writers: tuple[MapView, ...] = ()
    updates: tuple[MapView, ...] = ()
    embedding: EmbeddingGradient | None = None
    turns: Turns | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each absent map or embedding of this site, by the name of its weight, why it is absent."""


@dataclass(frozen=True)
class Look:
    """All sites of one look. ``loss`` is None in a ride, which does not see it; ``silent`` are sites without rows."""

    views: tuple[SiteView, ...]
    loss: float | None
    tokens: int
    silent: Mapping[str, str] = field(default_factory=dict)
    hook_seconds: float = 0.0


Name: TypeAlias = str | tuple[str, str]
"""The name of a result, or (name, slice) where it speaks of some of the tokens only."""

Analysis: TypeAlias = Callable[[SiteView], Mapping[Name, Estimate | Curve | Exception]]
"""Called once for each site and look; gives results by name, an exception where one of them could not be had. It may
keep what it likes between calls (warm starts).

``needs``, where it has such an attribute, is a tuple of kinds of gradients (``anisoscope.capture.gradients.KINDS``, or
"signal") that the monitor should fetch for it. The run, step, cell, site and name of a returned Curve are filled in.
"""

OfModel: TypeAlias = Callable[[int], Mapping[Name, Estimate | Curve | Exception]]
"""Called with the step at the end of each look, before it is stored; gives results about the model as a whole, an
exception for what was due and failed.

It runs in eval mode and outside the autocast of the look: one that calls the model may switch that on itself."""
