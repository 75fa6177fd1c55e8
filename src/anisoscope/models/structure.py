"""Sites of a model that no table knows: read off the way its modules are nested."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from anisoscope.errors import ModelError
from anisoscope.models.site import Side, Site, chain, children_of, firings, join, layout_of

FINAL_NORM = re.compile(
    r"ln_?f|norm_?f|(final|last|out|output)_?(layer_?)?norm|(layer_?)?norm(_out|_final)?|ln_(final|out)"
)
QUERY = re.compile(r"q|wq|w_q|q_?proj|query|query_proj|q_lin|to_q|c_attn|wqkv|qkv|qkv_?proj|query_key_value|in_?proj")
MLP_UP = re.compile(r"up_proj|gate_proj|gate_up_proj|c_fc|fc1|fc_in|wi|wi_0|w1|lin1|linear1|dense_h_to_4h")


def structural_sites(model: nn.Module) -> tuple[Site, ...]:
    """Sites by structure: the longest list of equal blocks, the token embedding, a norm beside the list.

    ``attn_in`` and ``mlp_in`` are read where a query and an up projection can be told by their names, and left out
    elsewhere: no site is better than one that means something else.
    """
    sides: tuple[Side, ...] = ("encoder", "decoder") if _two_sided(model) else ("",)
    sites = [site for side in sides for site in _side_sites(model, side)]
    if not sites:
        raise ModelError(
            f"{type(model).__name__} has no list of equal blocks and no recurrent layers to read sites from; "
            "name its modules with site_by_path(model, 'path.to.module')"
        )
    return tuple(sites)


def _side_sites(model: nn.Module, side: Side) -> tuple[Site, ...]:
    paths = _block_paths(model, side)
    if not paths:
        return ()
    embed = _embedding_path(model, side)
    modules = [model.get_submodule(path) for path in paths]
    outputs = [
        Site("", "", None, path, "output", call=call, calls=calls, layout=layout_of(module))
        for path, module, (call, calls) in zip(paths, modules, firings(modules), strict=True)
    ]
    return chain(
        embed=embed,
        blocks=outputs,
        readers=[list(_readers(model, block)) for block in outputs],
        final_norm=_final_norm_path(model, paths),
        side=side,
    )


def _two_sided(model: nn.Module) -> bool:
    return any(getattr(getattr(module, "config", None), "is_encoder_decoder", False) for module in model.modules())


def _on_side(path: str, side: str) -> bool:
    return not side or side in path.split(".")


def _block_paths(model: nn.Module, side: str) -> list[str]:
    """Paths of the blocks: the longest list of modules of one type, else recurrent layers in order."""
    best: list[str] = []
    lists: list[str] = []
    for kind in (nn.ModuleList, nn.Sequential):
        for path, module in model.named_modules():
            # A list inside a list (experts, sub-layers) is a part of a block and not a list of blocks.
            if not isinstance(module, kind) or any(path.startswith(f"{outer}.") for outer in lists):
                continue
            lists.append(path)
            children = children_of(module)
            equal = len({type(child) for child in children.values()}) == 1
            if equal and _on_side(path, side) and len(children) > len(best) and _holds_weights(module):
                best = [join(path, name) for name in children]
        if best:
            return best
    return [path for path, module in model.named_modules() if isinstance(module, nn.RNNBase) and _on_side(path, side)]


def _holds_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _embedding_path(model: nn.Module, side: str) -> str | None:
    """Path of the token embedding: what the model says it is, else its first embedding."""
    wanted = None
    for holder in model.modules():
        ask: Any = getattr(holder, "get_input_embeddings", None)
        if ask is not None and not side:
            with contextlib.suppress(NotImplementedError):  # how some models say that they have none to name
                wanted = ask()
            break
    for path, module in model.named_modules(remove_duplicate=False):
        if module is wanted or (wanted is None and isinstance(module, nn.Embedding) and _on_side(path, side)):
            return path
    return None


def _final_norm_path(model: nn.Module, blocks: Sequence[str]) -> str | None:
    """A norm beside the list of blocks, or beside the module that holds nothing else, with the name of a final one."""
    parent = blocks[0].rpartition(".")[0]
    while True:
        parent = parent.rpartition(".")[0]
        for name, child in model.get_submodule(parent).named_children():
            if FINAL_NORM.fullmatch(name.lower()) and "norm" in type(child).__name__.lower():
                return join(parent, name)
        # One level further out is still beside the blocks only where nothing but the blocks lies below.
        if not parent or len(list(model.get_submodule(parent).children())) > 1:
            return None


def _readers(model: nn.Module, block: Site) -> Iterator[Site]:
    for kind, pattern in (("attn_in", QUERY), ("mlp_in", MLP_UP)):
        for path, module in model.get_submodule(block.module).named_modules():
            name = path.rpartition(".")[2].lower()
            if pattern.fullmatch(name) and not list(module.children()):
                yield replace(block, kind=kind, module=join(block.module, path), port="input")
                break
