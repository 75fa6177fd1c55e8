"""Recipes: what is trained, on what, and how, as YAML that is checked to the last key before anything runs."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anisoscope.errors import AnisoscopeError, OptionError, unknown_name
from anisoscope.models.build import Architecture, Attention, Count, ModelSpec, check_heads
from anisoscope.train.interventions import FrequencySpec
from anisoscope.train.languages import LanguageChange, LanguageSpec, check_source
from anisoscope.train.regularizer_spec import RegularizerPart
from anisoscope.train.watch import MonitorPart, MonitorSpec

EMBEDDED = "embedded"
"""The source that needs no file: the documentation inside Python."""
LEAST_BPE = 257
LEAST_IDS = 3

Objective = Literal["causal", "masked"]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Part(BaseModel):
    """A part of a recipe: immutable, and without a key that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenizerSpec(_Part):
    """How text becomes ids: one each character, or byte-level BPE trained on the corpus; a Zipf language has ids."""

    kind: Literal["char", "bpe", "ids"] = "bpe"
    vocab_size: Count | None = None
    """Of BPE and of a language; characters are as many as the corpus has."""

    @model_validator(mode="after")
    def _size(self) -> TokenizerSpec:
        if self.kind == "char" and self.vocab_size is not None:
            raise ValueError("characters are as many as the corpus has; leave vocab_size out")
        if self.kind == "bpe" and (self.vocab_size or 0) < LEAST_BPE:
            raise ValueError(f"byte-level BPE needs vocab_size, {LEAST_BPE} or more")
        if self.kind == "ids" and (self.vocab_size or 0) < LEAST_IDS:
            raise ValueError(f"a language needs vocab_size, {LEAST_IDS} or more")
        return self


class DataSpec(_Part):
    """The corpus and how it is cut. ``held_out`` of its windows are for validation, the same ones for every seed."""

    source: str = EMBEDDED
    """"embedded", a file, a folder or ``hf:OWNER/NAME``, as ``load_corpus`` takes them; "zipf" for a language."""
    kind: Literal["auto", "text", "lines", "wiki"] = "auto"
    max_chars: Count | None = None
    tokenizer: TokenizerSpec
    sequence_length: Annotated[int, Field(strict=True, ge=2)]
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    language: LanguageSpec | None = None
    """Of source "zipf", whose text is drawn and not read."""

    @model_validator(mode="after")
    def _readable(self) -> DataSpec:
        check_source(self.source, self.language is not None, self.tokenizer.kind)
        return self


class VariantSpec(_Part):
    """One model of a recipe. Variants with the same sizes start from the same weights for the same seed."""

    name: Name
    architecture: Architecture
    objective: Objective
    layers: Count
    width: Count
    heads: Count
    dropout: Share = 0.0
    causal: bool
    """Whether a position sees only those before it."""
    attention: Attention = "full"
    tie_embeddings: bool = True
    tokenizer: TokenizerSpec | None = None
    """Where this variant reads the corpus otherwise than ``data`` says."""
    language: LanguageChange | None = None
    """Where this variant's language has another exponent than that of ``data``."""
    frequency: FrequencySpec | None = None
    """Where this variant is trained as if the Zipf law of the text had another exponent."""
    regularizer: RegularizerPart = None
    """A term on its geometry, or damping of its gradient; of its updates alone, not of validation or looks."""

    @model_validator(mode="before")
    @classmethod
    def _mask_of_the_objective(cls, given: Any) -> Any:
        """Unless said otherwise, the causal objective wears the causal mask and the masked one none."""
        if isinstance(given, Mapping) and "causal" not in given and "objective" in given:
            return {**given, "causal": given["objective"] == "causal"}
        return given

    @model_validator(mode="after")
    def _fits(self) -> VariantSpec:
        check_heads(self.architecture, self.width, self.heads)
        if self.objective == "causal" and not self.causal:
            raise ValueError(
                "objective causal with causal: false lets a position see the token it should predict; "
                "use objective masked, or causal: true"
            )
        if self.regularizer is not None:
            self.regularizer.check_model(self.architecture, self.layers, self.width)
        return self

    def model(self, vocab_size: int, context: int) -> ModelSpec:
        """What ``build_model`` takes, for this vocabulary and this longest sequence."""
        own = self.model_dump(exclude={"name", "objective", "tokenizer", "language", "frequency", "regularizer"})
        return ModelSpec(**own, vocab_size=vocab_size, context=context)


class OptimisationSpec(_Part):
    """AdamW with warm-up and cosine. A step is one update of the weights, from ``batch_size`` sequences."""

    steps: Count
    batch_size: Count
    accumulation: Count = 1
    """Passes that a batch is cut into, to fit into memory; it changes the result by rounding only."""
    lr: Positive
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of ``lr`` that is left at the last step."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Of matrices; not of norms, biases and embeddings."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    grad_clip: Positive | None = 1.0

    @model_validator(mode="after")
    def _fits(self) -> OptimisationSpec:
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than all {self.steps} steps")
        return self


class CheckpointSpec(_Part):
    """When weights are written. The last step is always written, so that a run can go on or be looked at."""

    every: Count | None = None
    log_spaced: bool = False
    """Steps 0, 1, 2, 4, 8 and so on."""
    keep_states: bool = False
    """Keep optimiser and generators in every checkpoint; else only in the newest, from which a run resumes."""


class EvaluationSpec(_Part):
    """When the loss on held-out windows is taken: before the first step, every so many steps, and at the end."""

    every: Count = 100
    sequences: Count = 128
    """At most so many held-out windows, the same ones every time."""


class Recipe(_Part):
    """A whole study: models side by side, each for every seed."""

    name: Name
    about: str = ""
    data: DataSpec
    models: Annotated[tuple[VariantSpec, ...], Field(min_length=1)]
    optimisation: OptimisationSpec
    seeds: Annotated[tuple[Annotated[int, Field(strict=True, ge=0)], ...], Field(min_length=1)] = (0,)
    checkpoints: CheckpointSpec = CheckpointSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    device: str = "auto"
    """"auto" is a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the products under autocast; weights and optimiser are float32 in either case."""
    compile: bool | Literal["auto"] = False
    """True: torch.compile or an error. "auto": where it works."""
    monitor: MonitorPart = MonitorSpec()
    """What is looked at while training; ``false`` for nothing."""

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        names: list[Any] = [model.name for model in self.models]
        for label, found in (("model name", names), ("seed", list(self.seeds))):
            twice = [one for one in found if found.count(one) > 1]
            if twice:
                raise ValueError(f"{label} {twice[0]!r} stands twice; each once")
        for model in self.models:
            changed = self.data.language is not None or model.language is not None
            check_source(self.data.source, changed, (model.tokenizer or self.data.tokenizer).kind)
            if model.regularizer is not None:
                windows = self.optimisation.batch_size // self.optimisation.accumulation
                model.regularizer.check_tokens(windows * self.data.sequence_length)
            if self.compile is True and model.regularizer is not None:
                raise ValueError(
                    f"compile: true with a regularizer (model {model.name!r}): compiled code passes by the sites that "
                    "it needs; use compile: false, or auto, which trains such models eagerly"
                )
        narrowest = min(self.models, key=lambda model: model.width)
        for rank in self.monitor.ranks() if self.monitor is not None else ():
            if rank > narrowest.width:
                raise ValueError(
                    f"monitor asks for rank {rank}, but model {narrowest.name!r} is {narrowest.width} wide; "
                    "a rank is the width at most"
                )
        return self

    def variant(self, name: str) -> VariantSpec:
        """The model of this name."""
        for model in self.models:
            if model.name == name:
                return model
        raise unknown_name("model of the recipe", name, [model.name for model in self.models])

    def describe(self) -> dict[str, Any]:
        """The whole recipe as plain values, defaults included, fit for YAML."""
        return self.model_dump(mode="json")


def changes_frequency(recipe: Recipe) -> bool:
    """Whether a recipe asks what token frequency does: exponents are then told of all its models."""
    return recipe.data.language is not None or any(model.frequency is not None for model in recipe.models)


def recipe_names() -> tuple[str, ...]:
    """Recipes that come with the package."""
    inside = resources.files("anisoscope").joinpath("recipes")
    return tuple(sorted(file.name.removesuffix(".yaml") for file in inside.iterdir() if file.name.endswith(".yaml")))


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe from a YAML file, or one that comes with the package by its name."""
    path, given = Path(path_or_name), str(path_or_name)
    if path.parent.name == "recipes" and not path.exists():  # where they lie in the package
        given = path.stem
    if given in recipe_names():
        inside = resources.files("anisoscope").joinpath("recipes", f"{given}.yaml")
        return parse_recipe(inside.read_text(encoding="utf-8"), f"recipe {given}")
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
            raise OptionError(f"{path}: no such recipe file; or give a name: {', '.join(recipe_names())}")
        raise unknown_name("recipe", given, recipe_names())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as text: {error}") from None
    return parse_recipe(text, str(path))


def read_recipe_values(values: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """A recipe from plain values, as ``describe`` gives them and a run keeps them."""
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        raise _explained(error, origin, None) from None


def parse_recipe(text: str, origin: str = "recipe") -> Recipe:
    """A recipe from YAML text. ``origin`` stands before the messages of errors."""
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}, line {mark.line + 1}" if mark else origin
        raise OptionError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise OptionError(f"{origin}: a recipe is a mapping of keys to values, got {type(values).__name__}")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _explained(error, origin, tree) from None


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with values changed by dotted keys, checked like the file.

    ``{"optimisation.steps": 50, "models.decoder.width": 64}``: a model is named, or counted from 0. A part that is
    off, such as ``monitor.tangent``, is switched on by setting something in it.
    """
    values = recipe.describe()
    for key, value in changes.items():
        *way, last = key.split(".")
        inside: Any = values
        for part in way:
            place = _inside(key, inside, part)
            if inside[place] is None:
                inside[place] = {}
            inside = inside[place]
        if way[-1:] == ["schedule"]:
            inside.clear()  # one of several: the new one is instead of the old one
        if not isinstance(inside, dict | list):
            raise _nothing_there(key, last, ())
        at: Any = last if isinstance(inside, dict) else _inside(key, inside, last)
        inside[at] = value
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _explained(error, "changed recipe", None) from None


def _inside(key: str, values: Any, part: str) -> Any:
    """Where in a mapping or a list a part of a dotted key leads."""
    names: list[Any] = list(values) if isinstance(values, dict) else []
    if part in names:
        return part
    if isinstance(values, list):
        names = [one.get("name") if isinstance(one, dict) else None for one in values]
        if part in names:
            return names.index(part)
        if part.isdigit() and int(part) < len(values):
            return int(part)
    raise _nothing_there(key, part, names)


def _nothing_there(key: str, part: str, names: Iterable[Any]) -> OptionError:
    near = difflib.get_close_matches(part, [name for name in names if isinstance(name, str)], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return OptionError(f"{key}: the recipe has no {part!r} there{hint}")


def _explained(error: ValidationError, origin: str, tree: Any) -> AnisoscopeError:
    """The first thing that is wrong, in one line: file, line, place, what came, what to do."""
    # An unknown key is often the misspelt form of one that is missing: say it first.
    found = sorted(error.errors(), key=lambda one: (one["type"] != "extra_forbidden", one["type"] == "too_short"))
    first = found[0]
    places = [_place(one["loc"]) for one in found]
    place = places[0]
    line = _line(tree, place)
    where = origin if line is None else f"{origin}, line {line}"
    # A list that lost its bad entry is too short as well; that is no second mistake.
    others = {one for one, what in zip(places, found, strict=True) if what["type"] != "too_short"} - {place}
    more = f" (and {len(others)} more)" if others else ""
    name = _written(place)
    if first["type"] == "extra_forbidden":
        known = _fields(place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        return OptionError(f"{where}: unknown key {name}; {hint}{more}")
    if first["type"] == "missing":
        return OptionError(f"{where}: {name} is missing{more}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return OptionError(f"{where}: {f'{name}: ' if name else ''}{message}{more}")
    came = textwrap.shorten(repr(first["input"]), 60, placeholder=" …")
    message = f"{message[:1].lower()}{message[1:]}".replace("tuple", "list")
    return OptionError(f"{where}: {name} is {came}; {message}{more}")


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The place in the file; pydantic adds which type of several it tried."""
    return tuple(part for part in location if part != "bool" and not str(part).startswith("literal["))


def _written(place: tuple[Any, ...]) -> str:
    """``("models", 0, "width")`` as ``models[0].width``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _line(node: Any, place: tuple[Any, ...]) -> int | None:
    """The line of the file, from 1, where a place stands; that of the nearest thing around it where it does not."""
    line = None
    for part in place:
        inside = getattr(node, "value", None)
        if isinstance(part, int) and isinstance(inside, list) and part < len(inside):
            node = inside[part]
            line = node.start_mark.line + 1
            continue
        pairs = [pair for pair in inside if isinstance(pair, tuple)] if isinstance(inside, list) else []
        match = next(((key, value) for key, value in pairs if key.value == part), None)
        if match is None:
            return line
        line, node = match[0].start_mark.line + 1, match[1]
    return line


@cache
def _fields(place: tuple[Any, ...]) -> frozenset[str]:
    """The keys that a place of a recipe may hold."""
    part: Any = Recipe
    for step in place:
        if isinstance(step, int):
            continue
        inner = part.model_fields[step].annotation
        part = next(kind for kind in _kinds(inner) if isinstance(kind, type) and issubclass(kind, BaseModel))
    return frozenset(part.model_fields)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types inside ``tuple[X, ...]``, ``X | None`` and their like."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
