"""What is looked at while a recipe trains: the recipe's ``monitor:`` part, checked with the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from anisoscope.capture.gradients import KINDS as GRADIENTS
from anisoscope.errors import choose
from anisoscope.measures.table import measure_names
from anisoscope.models.build import Count
from anisoscope.slices import ALL, NO_MASSIVE, NO_POSITION_0
from anisoscope.tangent.proxies import KINDS as PROXIES


def _listed(given: Any) -> Any:
    """One name may stand without brackets, and several parted by commas."""
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()]
    return given


def _on_or_off(given: Any) -> Any:
    """``false`` is nothing, ``true`` everything by default."""
    return None if given is False else {} if given is True else given


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScheduleSpec(_Part):
    """When to look, besides the beginning and the end, which are always looked at. Exactly one of the four."""

    every: Count | None = None
    """Steps that this number divides."""
    log_spaced: Annotated[int, Field(strict=True, ge=2)] | None = None
    """So many looks in the whole run, evenly on a log axis of steps: dense where things move fast."""
    by_tokens: Count | None = None
    """Whenever so many more tokens were trained on."""
    wall_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """As often as this share of the wall-clock allows; at which steps that is depends on the machine."""

    @model_validator(mode="after")
    def _one(self) -> ScheduleSpec:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            came = " and ".join(given) or "nothing"
            raise ValueError(f"give one of every, log_spaced, by_tokens and wall_share; got {came}")
        return self

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class TangentSpec(_Part):
    """Options of the analysis of gradients along tangent proxies. See docs/tangent.md and docs/tangent_energy.md."""

    proxies: Annotated[Names, Field(min_length=1)] = ("seminmf", "pca")
    rank: Count = 16
    gradients: Annotated[Names, Field(min_length=1)] = ("activation",)
    draws: Annotated[int, Field(strict=True, ge=19)] = 199
    """Random bases as controls; with fewer than 19 no p-value can reach 0.05."""
    bins: Count = 5
    """Slices of token frequency."""
    mode: Literal["refit", "frozen"] = "refit"
    freeze_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """With ``mode: frozen``: after this share of the steps proxies stay as they are."""
    ranks: tuple[Count, ...] = ()
    """Ranks of the curve of the energy ratio; none where empty."""
    referee: Literal["last", "never", "always"] = "last"
    """At which looks the dear checks run: is it a tangent at all?"""
    permutations: Count = 99
    """Of the signal, at the looks of the referee, where the reader gradient is asked for."""

    @model_validator(mode="after")
    def _known(self) -> TangentSpec:
        for name in self.proxies:
            choose("proxy", name, PROXIES)
        for name in self.gradients:
            choose("kind of gradient", name, GRADIENTS)
        return self


class QualitySpec(_Part):
    """Options of the battery of quality: accuracy of the model, linear probes of its layers. See docs/quality.md."""

    sites: Annotated[Names, Field(min_length=1)] | None = None
    """Patterns such as ``resid.*`` where probes are fitted; None is the middle and the last layer."""
    back: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 4)
    """How many places back the tokens stand that probes name."""
    types: Annotated[int, Field(strict=True, ge=2)] = 64
    """Among how many of the most frequent types."""


class MonitorSpec(_Part):
    """What is looked at, and when. Without a word about it in the recipe, this is what stands here."""

    schedule: ScheduleSpec = ScheduleSpec(log_spaced=16)
    sequences: Count = 64
    """Held-out windows that every look reads, the same ones each time; at most as many as there are."""
    vectors: Count = 4096
    """Rows that are measured at each site, at most."""
    sites: Names | None = None
    """Patterns such as ``resid.*``; None is the residual stream, and the final norm where the model has one."""
    measures: Names = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
    slices: Names = (ALL,)
    """What global measures are told of: ``all``, ``no position 0`` and ``no massive dimensions``."""
    gradient_measures: Names = ("mean_cosine", "isoscore")
    gradients: Names = ("activation",)
    tangent: Annotated[TangentSpec | None, BeforeValidator(_on_or_off)] = None
    """Gradient energy along tangent proxies; ``true`` for the options as they stand, ``false`` for none."""
    quality: Annotated[QualitySpec | None, BeforeValidator(_on_or_off)] = None
    """How good the model and its layers are beside their geometry; ``true`` and ``false`` as for ``tangent``."""

    @model_validator(mode="after")
    def _known(self) -> MonitorSpec:
        for name in (*self.measures, *self.gradient_measures):
            choose("measure", name, measure_names())
        for name in self.slices:
            choose("slice", name, (ALL, NO_POSITION_0, NO_MASSIVE))
        for name in self.gradients:
            choose("kind of gradient", name, GRADIENTS)
        return self

    def ranks(self) -> Iterator[int]:
        """Every rank that is asked for; none may be above the width of a model."""
        if self.tangent is not None:
            yield self.tangent.rank
            yield from self.tangent.ranks


MonitorPart = Annotated[MonitorSpec | None, BeforeValidator(_on_or_off)]
"""The ``monitor:`` of a recipe: a mapping, or false for a training that nobody looks at."""
