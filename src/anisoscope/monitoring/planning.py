"""Settling what a monitor looks at, and saying what is wrong before the first step.

A probe that is too small, too long or of another vocabulary, a site or measure that is not there, gradients that a mode
has not: each is one clear line at construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from anisoscope.capture.gradients import KINDS
from anisoscope.capture.rows import measured_mask
from anisoscope.errors import AnisoscopeError, OptionError, ShapeError, TooFewTokensError, UnknownNameError, choose
from anisoscope.measures.base import lookup
from anisoscope.measures.table import measure_names
from anisoscope.models.sites import Site, discover, select
from anisoscope.monitoring.looks import Plan, sequences_held
from anisoscope.monitoring.measuring import What
from anisoscope.monitoring.views import Analysis
from anisoscope.slices import ALL, NO_MASSIVE, NO_POSITION_0
from anisoscope.text.batches import Batch

SLICES = (ALL, NO_POSITION_0, NO_MASSIVE)
FEWEST_ROWS = 64
"""Below this no measure says anything about a layer."""


def kinds_asked(gradients: str | Iterable[str], analyses: Mapping[str, Analysis], mode: str) -> frozenset[str]:
    """The kinds of gradients that the user and the analyses ask for."""
    asked = {gradients} if isinstance(gradients, str) else set(gradients)
    for analysis in analyses.values():
        asked |= set(getattr(analysis, "needs", ()))
    for kind in sorted(asked):
        choose("kind of gradient", kind, (*KINDS, "signal"))
    beyond = sorted(asked - {"activation", "update"})
    if mode == "ride" and beyond:
        raise OptionError(f"a ride gives activation and update gradients, not {beyond[0]!r}; use mode='probe' for it")
    return frozenset(asked | {"reader"} if "signal" in asked else asked)


def what_to_measure(
    measures: str | Iterable[str],
    gradient_measures: str | Iterable[str],
    analyses: Mapping[str, Analysis],
    mode: str,
    seed: int,
    slices: str | Iterable[str] = ALL,
) -> What:
    """The measures by name, all of them known."""
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    of_gradients = (gradient_measures,) if isinstance(gradient_measures, str) else tuple(gradient_measures)
    for name in (*names, *of_gradients):
        choose("measure", name, measure_names())
    for name in turning(of_gradients) or (turning(names) if mode == "ride" else ()):
        raise OptionError(f"{name} needs whole sequences of activations, which a ride or a gradient has not")
    asked = (slices,) if isinstance(slices, str) else tuple(slices)
    for name in asked:
        choose("slice", name, SLICES)
    what = What(names, of_gradients, dict(analyses), seed, tuple(one for one in SLICES if one == ALL or one in asked))
    if len(what.slices) > 1 and not what.global_measures:
        raise OptionError(f"slices are measured with global measures, and none is among {', '.join(names) or 'none'}")
    return what


def present(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Those of the patterns that match a site of the model; all of them where none does, so that it is told."""
    found = discover(model)
    matching = tuple(pattern for pattern in patterns if _matches(found, pattern))
    return matching or tuple(patterns)


def _matches(sites: Sequence[Site], pattern: str) -> bool:
    try:
        return bool(select(sites, pattern))
    except UnknownNameError:
        return False


def make_plan(
    model: nn.Module,
    sites: str | Iterable[str],
    kinds: frozenset[str],
    what: What,
    *,
    mode: str,
    vectors: int,
) -> tuple[Plan, tuple[Site, ...]]:
    """The plan of every look, and the token embeddings of the model."""
    found = discover(model)
    chosen = select(found, sites)
    embeds = tuple(site for site in found if site.kind == "embed")
    if not embeds and (mode == "ride" or "embedding" in kinds):
        raise OptionError(f"{type(model).__name__} has no token embedding to read; use mode='probe' without it")
    if "embedding" in kinds and embeds[0] not in chosen:
        chosen = (embeds[0], *chosen)
    embed = embeds[0] if embeds else None
    turns = bool(turning(what.measures))
    plan = Plan.of(model, chosen, embed, kinds, vectors=vectors, seed=what.seed, turns=turns)
    if kinds & {"reader", "writer", "update"} and not plan.maps:
        raise OptionError(
            f"no linear map reads or writes {', '.join(site.name for site in chosen)}; choose sites such as "
            "'attn_in.*' and 'mlp_in.*' for readers, 'resid.*' for writers"
        )
    return plan, embeds


def as_batches(probe: Batch | Iterable[Any] | None) -> tuple[Batch, ...]:
    """The batches of a probe."""
    batches = (probe,) if isinstance(probe, Batch) else tuple(probe or ())
    wrong = next((one for one in batches if not isinstance(one, Batch)), None)
    if wrong is not None:
        raise OptionError(f"a probe is a Batch or a list of them, got {type(wrong).__name__}; see token_batches")
    if not batches:
        raise OptionError("mode='probe' needs probe=, a held-out Batch or a list of them; mode='ride' needs none")
    return batches


def needed_rows(what: What) -> int:
    """Rows that the measures need to say anything."""
    neighbors = [lookup(name).needs().neighbors for name in what.measures]
    return max(FEWEST_ROWS, *(k + 2 for k in neighbors), 0)


def check_probe(model: nn.Module, batches: Sequence[Batch], plan: Plan, rows: int) -> None:
    """Refuse a probe that would fail at every look, or worse: ids out of range end a process on a GPU."""
    have = min(plan.vectors, sum(int(measured_mask(batch).sum()) for batch in batches))
    if have < rows:
        raise TooFewTokensError(
            f"the probe gives {have:,} rows, the measures need {rows:,}; give more sequences (or raise vectors=)"
        )
    size = None if plan.embed is None else getattr(model.get_submodule(plan.embed.module), "num_embeddings", None)
    longest = max(batch.ids.shape[1] for batch in batches)
    largest = max(int(batch.ids.max()) for batch in batches)
    if isinstance(size, int) and largest >= size:
        raise OptionError(f"the probe holds token {largest:,}, the model knows {size:,}; use the model's own tokenizer")
    config: Any = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and 0 < limit < longest:
            raise ShapeError(f"the probe has sequences of {longest:,} tokens, the model reads {limit:,}; cut them")


def check_analyses(analyses: Mapping[str, Analysis], batches: Sequence[Batch], plan: Plan) -> None:
    """Refuse a probe that some analysis could use at no look; its method ``check_rows``, where it has one, says so."""
    held = sequences_held([measured_mask(batch).cpu() for batch in batches], plan)
    for name, analysis in analyses.items():
        check = getattr(analysis, "check_rows", None)
        if check is None:
            continue
        try:
            check(held)
        except AnisoscopeError as error:
            raise type(error)(f"the probe is too small for the analysis {name!r}: {error}") from None


def turning(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the measures that go along whole sequences."""
    return tuple(name for name in names if lookup(name).needs().turns)
