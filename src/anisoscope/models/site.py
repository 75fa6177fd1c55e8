"""Site: a named place in a model, and the module and port at which it is read.

| name | what stands there |
|---|---|
| ``embed`` | output of the token embedding module |
| ``resid.0`` | the hidden state that enters block 0: positions, embedding norm and projection included |
| ``resid.l`` | what leaves block l-1; ``resid.L`` leaves the last block, BEFORE any final norm |
| ``attn_in.l``, ``mlp_in.l``, ``mixer_in.l`` | what the projections of block l read: after a pre-norm |
| ``final_norm`` | after the final norm, where the model has one |

Models with two sides prefix these with ``encoder.`` and ``decoder.``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import nn

from anisoscope.errors import UnknownNameError, unknown_name

Port: TypeAlias = Literal["input", "output"]
Side: TypeAlias = Literal["", "encoder", "decoder"]
Layout: TypeAlias = Literal["btd", "tbd", "flat"]


@dataclass(frozen=True, slots=True)
class Site:
    """A named place in a model. ``module`` is the dotted path from the model that it was discovered in.

    ``call`` says which firing of the module in one forward is meant, and ``calls`` how many there are: models that
    share one block among all layers fire it once for each. ``layout`` is how the module holds its axes: sequences by
    tokens ("btd"), tokens by sequences ("tbd"), or the rows of all sequences glued together ("flat").
    """

    name: str
    kind: str
    layer: int | None
    module: str
    port: Port
    side: Side = ""
    call: int = 0
    calls: int = 1
    layout: Layout = "btd"


def unknown_site(pattern: str, names: Iterable[str]) -> UnknownNameError:
    """The error for a pattern that no site matches: the nearest site, or for a ``*`` the nearest kind of sites."""
    if "*" in pattern:
        parts = [name.rpartition(".") for name in names]
        names = {f"{kind}.*" if layer.isdigit() else f"{kind}{dot}{layer}" for kind, dot, layer in parts}
    return unknown_name("site", pattern, names)


def layout_of(module: nn.Module) -> Layout:
    """How a module holds its axes, where its type tells: recurrent ones put tokens first unless told otherwise."""
    return "tbd" if isinstance(module, nn.RNNBase) and not module.batch_first else "btd"


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Children by name. Unlike ``named_children``, a module that stands there twice is listed twice."""
    return {name: child for name, child in module._modules.items() if child is not None}


def firings(modules: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """For each place in a sequence of modules that are run in turn: (which firing of its module, of how many)."""
    order = [id(module) for module in modules]
    return [(order[:place].count(one), order.count(one)) for place, one in enumerate(order)]


def canonical_path(root: nn.Module, path: str) -> str | None:
    """The path with indices from the end made plain, or None where no module lies there."""
    module: Any = root
    parts: list[str] = []
    for part in path.split(".") if path else ():
        children = children_of(module)
        if part.startswith("-") and part[1:].isdigit() and int(part[1:]) <= len(children):
            part = list(children)[int(part)]
        if part not in children:
            return None
        parts.append(part)
        module = children[part]
    return ".".join(parts)


def join(*parts: str) -> str:
    """Dotted path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def chain(
    *, embed: str | None, blocks: Sequence[Site], readers: Sequence[Sequence[Site]], final_norm: str | None, side: Side
) -> tuple[Site, ...]:
    """Sites in the order of the forward pass. ``blocks`` are the outputs of the blocks, ``readers`` what each reads."""
    prefix = f"{side}." if side else ""
    sites: list[Site] = []
    if embed is not None:
        sites.append(Site("embed", "embed", None, embed, "output", side))
    for layer, (block, inner) in enumerate(zip(blocks, readers, strict=True)):
        if layer == 0:
            sites.append(replace(block, name="resid.0", kind="resid", layer=0, port="input", side=side))
        sites += [replace(site, name=f"{site.kind}.{layer}", layer=layer, side=side) for site in inner]
        sites.append(replace(block, name=f"resid.{layer + 1}", kind="resid", layer=layer + 1, side=side))
    if final_norm is not None:
        sites.append(Site("final_norm", "final_norm", None, final_norm, "output", side))
    return tuple(replace(site, name=prefix + site.name) for site in sites)
