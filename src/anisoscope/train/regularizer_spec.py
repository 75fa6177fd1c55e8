"""The ``regularizer:`` of a model in a recipe, checked with the rest of it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from anisoscope.errors import choose
from anisoscope.models.build import Architecture, Count
from anisoscope.models.site import unknown_site
from anisoscope.tangent.proxies import KINDS as PROXIES
from anisoscope.train.regularizers import DAMPING, NAMES
from anisoscope.train.watch import Names

Factor = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NoOptions(_Part):
    """A term with a weight and nothing else to turn."""


class IStarOptions(_Part):
    """Options of ``istar``. In a recipe the covariance is shrunk towards ``(tr S / D) I``."""

    shrinkage: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class LocalCurvatureOptions(_Part):
    """Options of ``local_curvature``; its anchors are drawn anew at every update."""

    dimension: Count = 3
    k: Count = 32
    anchors: Count = 32

    @model_validator(mode="after")
    def _enough(self) -> LocalCurvatureOptions:
        least = 1 + self.dimension * (self.dimension + 3) // 2
        if self.k < least:
            raise ValueError(f"a quadratic fit in dimension {self.dimension} needs k of at least {least}, got {self.k}")
        return self


class DampingOptions(_Part):
    """Options of ``tangent_damping``: factors of the gradient's part along the proxy, and of the rest."""

    rank: Count = 16
    proxy: str = "pca"
    tangent: Factor = 0.5
    normal: Factor = 1.0
    refit_every: Count = 100
    """Updates from one fit of the proxy to the next."""

    @model_validator(mode="after")
    def _known(self) -> DampingOptions:
        choose("proxy", self.proxy, PROXIES)
        return self


OPTIONS: Mapping[str, type[_Part]] = dict.fromkeys(NAMES, NoOptions) | {
    "istar": IStarOptions,
    "local_curvature": LocalCurvatureOptions,
    DAMPING: DampingOptions,
}


class RegularizerSpec(_Part):
    """What is added to the loss of a model's updates, or done to its gradient. See docs/regularizers.md."""

    name: str
    weight: Factor | None = None
    """Of the term, beside a cross-entropy in nats. Damping has none."""
    sites: Annotated[Names, Field(min_length=1)] = ("resid.*",)
    """Patterns of sites; the term is the mean over them. Damping acts at each, one after another."""
    options: dict[str, Any] = {}
    """As the function of this name takes them; those left out are filled in."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        """Check the options against those of the name, and write out the ones that were left out."""
        if isinstance(given, str):
            name = choose("regularizer", given, NAMES)
            words = f"name: {name}" if name == DAMPING else f"name: {name}, weight: 0.1"
            raise ValueError(f"a mapping, such as {{{words}}}; got {given!r}")
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            return given
        name = choose("regularizer", given["name"], NAMES)
        options = given.get("options", {})
        if not isinstance(options, Mapping):
            return given
        kind = OPTIONS[name]
        for key in options:
            choose(f"option of {name}", key, kind.model_fields or {"none": None})
        try:
            checked = kind.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(("options", *map(str, first["loc"])))
            raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}; got {first['input']!r}") from None
        return {**given, "options": checked.model_dump(mode="json")}

    @model_validator(mode="after")
    def _weighed(self) -> RegularizerSpec:
        if self.name == DAMPING and self.weight is not None:
            raise ValueError("tangent_damping adds nothing to the loss and has no weight; its factors are options")
        if self.name != DAMPING and self.weight is None:
            raise ValueError(f"{self.name} needs a weight")
        return self

    def check_model(self, architecture: Architecture, layers: int, width: int) -> None:
        """Refuse what a model of this family, so many layers and this width cannot have."""
        names = site_names(architecture, layers)
        for pattern in self.sites:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise unknown_site(pattern, names)
        if self.name == DAMPING and self.options["rank"] > width:
            raise ValueError(f"regularizer: rank {self.options['rank']} exceeds the width {width} of the model")
        if self.name == "local_curvature" and self.options["dimension"] >= width:
            raise ValueError(f"regularizer: dimension {self.options['dimension']} fills the width {width} of the model")

    def check_tokens(self, tokens: int) -> None:
        """Refuse neighbourhoods that a pass of so many tokens cannot hold."""
        k = self.options.get("k", 0)
        if self.name == "local_curvature" and k >= tokens:
            raise ValueError(
                f"k {k} of local_curvature needs {k + 1} tokens in a pass, and there are {tokens} (batch_size / "
                "accumulation * sequence_length); give a smaller k and dimension, or more of them"
            )


def site_names(architecture: Architecture, layers: int) -> list[str]:
    """The sites of a model that is built from scratch, without building it."""
    kinds = {"resid": layers + 1, "attn_in": layers, "mlp_in": layers}
    ends = ["embed"] if architecture == "bert" else ["embed", "final_norm"]
    return [*ends, *(f"{kind}.{at}" for kind, count in kinds.items() for at in range(count))]


def _none_if_off(given: Any) -> Any:
    return None if given is False else given


RegularizerPart = Annotated[RegularizerSpec | None, BeforeValidator(_none_if_off)]
"""The ``regularizer:`` of a model: a mapping, or false for none."""
