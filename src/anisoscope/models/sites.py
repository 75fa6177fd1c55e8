"""Sites of a model: found by the table of families or by structure, chosen by name, or named by module path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from anisoscope.errors import OptionError, choose, unknown_name
from anisoscope.models.families import FAMILIES, Family
from anisoscope.models.site import (
    Layout,
    Port,
    Site,
    canonical_path,
    chain,
    children_of,
    firings,
    join,
    layout_of,
    unknown_site,
)
from anisoscope.models.structure import structural_sites

__all__ = ["Site", "discover", "model_type", "select", "site_by_path"]


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer as it is run: the module, and which of its firings."""

    path: str
    call: int = 0
    calls: int = 1


def discover(model: nn.Module) -> tuple[Site, ...]:
    """Every site of a model in the order of the forward pass: by the table of families, else by its structure."""
    family = FAMILIES.get(model_type(model) or "")
    if family is not None:
        found = [site for side in family.sides for site in _sites_of_side(model, family, side)]
        if found:
            return tuple(found)
    return structural_sites(model)


def select(sites: Sequence[Site], patterns: str | Iterable[str]) -> tuple[Site, ...]:
    """The sites whose names match one of the glob patterns (``resid.*``), in the order of ``sites``.

    A pattern without a side (``resid.*``) matches the sites of both sides. One that matches nothing is an error.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    names = {site.name: site.name.removeprefix(f"{site.side}." if site.side else "") for site in sites}
    chosen: set[str] = set()
    for pattern in wanted:
        matched = {name for name, bare in names.items() if fnmatchcase(name, pattern) or fnmatchcase(bare, pattern)}
        if not matched:
            raise unknown_site(pattern, names)
        chosen |= matched
    return tuple(site for site in sites if site.name in chosen)


def site_by_path(
    model: nn.Module,
    path: str,
    *,
    port: str = "output",
    name: str | None = None,
    call: int = 0,
    calls: int = 1,
    layout: str | None = None,
) -> Site:
    """A site at any module, by its dotted path: ``site_by_path(model, "transformer.h.3.mlp", port="input")``.

    ``layout`` is read off recurrent modules; elsewhere it is "btd" unless said otherwise.
    """
    choose("port", port, ("input", "output"))
    choose("layout", layout or "btd", ("btd", "tbd", "flat"))
    if not 0 <= call < calls:
        raise OptionError(f"call={call} of calls={calls}: firings are counted from 0 to calls - 1")
    module = _module_or_error(model, path)
    full = name or (path if port == "output" else f"{path}:input")
    layout = layout or layout_of(module)
    return Site(full, "module", None, path, cast(Port, port), "", call, calls, cast(Layout, layout))


def model_type(model: nn.Module) -> str | None:
    """The family name in the first configuration found: the model's own, or that of the model inside a wrapper."""
    for module in model.modules():
        found = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(found, str) and found:
            return found
    return None


def _sites_of_side(model: nn.Module, family: Family, side: str) -> tuple[Site, ...]:
    """The sites of one core, or none where the model is not built as the table says."""
    core = _find_core(model, family, side)
    if core is None:
        return ()
    blocks = list(_run_order(model, core, family))
    outputs = [Site("", "", None, b.path, "output", call=b.call, calls=b.calls) for b in blocks]
    for number, path in family.after_block:
        behind = canonical_path(model, join(core, path))
        if behind is not None:
            outputs[number] = Site("", "", None, behind, "output")
    sites = chain(
        embed=join(core, family.embed),
        blocks=outputs,
        readers=[_readers(model, block, family) for block in blocks],
        final_norm=canonical_path(model, join(core, family.final_norm)) if family.final_norm else None,
        side=side,  # type: ignore[arg-type]
    )
    # The state that enters block 0 is read at the block, also where its output is read elsewhere.
    return tuple(replace(s, module=blocks[0].path) if s.kind == "resid" and s.layer == 0 else s for s in sites)


def _find_core(model: nn.Module, family: Family, side: str) -> str | None:
    """Path of the outermost module that holds the blocks and the embedding where the table says."""
    for prefix, module in model.named_modules():
        if side and prefix.split(".")[-1] != side:
            continue
        path = canonical_path(module, family.blocks)
        if path is None or canonical_path(module, family.embed) is None:
            continue
        if isinstance(module.get_submodule(path), nn.ModuleList | nn.Sequential):
            return prefix
    return None


def _run_order(model: nn.Module, core: str, family: Family) -> Iterator[_Block]:
    """The blocks in the order in which they are run."""
    root = join(core, family.blocks)
    blocks = model.get_submodule(root)
    if not family.shared:
        children = children_of(blocks)
        for name, (call, calls) in zip(children, firings(list(children.values())), strict=True):
            yield _Block(f"{root}.{name}", call, calls)
        return
    # ALBERT: layer i runs group floor(i * groups / layers), and a group is one or more layers in a row.
    config: Any = model.get_submodule(core).config
    layers, groups = config.num_hidden_layers, config.num_hidden_groups
    order = [int(i / (layers / groups)) for i in range(layers)]
    for i, group in enumerate(order):
        for inner in range(config.inner_group_num):
            path = f"{root}.{group}.albert_layers.{inner}"
            yield _Block(path, call=order[:i].count(group), calls=order.count(group))


def _readers(model: nn.Module, block: _Block, family: Family) -> list[Site]:
    """What the parts of one block read, as far as the block has them."""
    sites = []
    for kind, part in (("attn_in", family.attn), ("mlp_in", family.mlp), ("mixer_in", family.mixer)):
        path = None if part is None else canonical_path(model, join(block.path, part))
        if path is not None:
            layout: Layout = "flat" if family.flat_mlp and kind == "mlp_in" else "btd"
            sites.append(Site("", kind, None, path, "input", call=block.call, calls=block.calls, layout=layout))
    return sites


def _module_or_error(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, or an error that names what lies at the deepest part of the path that exists."""
    parts = path.split(".") if path else []
    module: nn.Module = model
    for depth, part in enumerate(parts):
        children = children_of(module)
        if part not in children:
            there = ".".join(parts[:depth])
            known = [join(there, name, *parts[depth + 1 :]) for name in children] or ["(the module has no children)"]
            raise unknown_name("module path", path, known)
        module = children[part]
    return module
