"""Linear maps of a model: which of them read a site, and which write the residual stream.

A **reader** multiplies what stands at a site: query, key and value projections read ``attn_in.l``, up and gate
projections ``mlp_in.l``, an output layer ``final_norm``. A **writer** gives what is added to the residual stream: the
output projection of attention and the down projection of the MLP of block l write ``resid.l+1``.
Modules are found below the sites and blocks, and told apart by their names, which the families share; where a block
has no name that is known, by their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn

from anisoscope.models.site import Site, join

Role: TypeAlias = Literal["reader", "writer"]

READS = {
    "attn_in": re.compile(
        r"(q|k|v|query|key|value)(_?(proj|lin))?|w_?[qkv]|to_[qkv]|w?qkv|(qkv|in)_?proj|c_attn|query_key_value"
    ),
    "mlp_in": re.compile(
        r"up_proj|gate_proj|gate_up_proj|c_fc|fc1|fc_in|wi|wi_[01]|w1|w3|lin1|linear1|dense_h_to_4h|gate|router"
    ),
    "mixer_in": re.compile(r"in_proj"),
}
WRITES = re.compile(
    r"o|o_proj|out_?proj|c_proj|dense|out_lin|wo|down_proj|fc2|fc_out|w2|lin2|linear2|dense_4h_to_h|ffn_output"
)
POSITIONS = re.compile(r"pos_\w+|r|r_net|linear_pos")  # read relative positions, which are not hidden states


@dataclass(frozen=True, slots=True)
class LinearMap:
    """A linear map that reads or writes a site. ``path`` is its module, from the model it was found in."""

    path: str
    role: Role
    site: str
    transposed: bool
    """Whether the weight is stored as (in, out), as ``Conv1D`` of transformers does, and not as (out, in)."""
    tied: bool = False
    """Whether the weight is that of the token embedding too, so that its gradient holds the part of both."""
    shared: int = 1
    """How many layers run this map: its gradient is the sum over all of them."""

    @property
    def parameter(self) -> str:
        """The name of the weight, as ``named_parameters`` has it."""
        return f"{self.path}.weight"

    def rows(self, weight: Float[Tensor, "_ _"]) -> Float[Tensor, "m d"]:
        """A weight, its gradient or its change as rows in the space of the site.

        A reader has a row for each of its outputs, a writer a row for each of its inputs.
        """
        wide_last = self.transposed if self.role == "writer" else not self.transposed
        return weight if wide_last else weight.T


def find_maps(model: nn.Module, sites: Sequence[Site]) -> tuple[LinearMap, ...]:
    """Every linear map that reads or writes one of ``sites``, in the order of the sites, once for each role."""
    tied = _embedding_weights(model)
    found: dict[tuple[str, str], LinearMap] = {}
    for site in sites:
        roles: tuple[tuple[Role, list[str]], ...] = (
            ("reader", reader_paths(model, site)),
            ("writer", writer_paths(model, site)),
        )
        for role, path in ((role, path) for role, paths in roles for path in paths):
            weight, plain = _weight(model, path)
            one = LinearMap(path, role, site.name, not plain, id(weight) in tied, site.calls)
            found.setdefault((role, path), one)
    return tuple(found.values())


def is_linear(module: nn.Module) -> bool:
    """Whether a module is ``x W (+ b)`` with a matrix as its weight."""
    # By name: importing Conv1D would import transformers for models that have nothing to do with it.
    kind = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    weight = getattr(module, "weight", None)
    return kind and isinstance(weight, Tensor) and weight.ndim == 2


def reader_paths(model: nn.Module, site: Site) -> list[str]:
    """Paths of the maps that read a site."""
    if site.kind == "final_norm":
        return list(_output_layer(model, site))
    pattern = READS.get(site.kind)
    if pattern is None:
        return []
    root = site.module
    if is_linear(model.get_submodule(root)):  # the site is read at one map, and its siblings may read it too
        width = _in_width(model, root)
        if site.kind == "mlp_in" and not pattern.fullmatch(_leaf(root)):
            return [root]
        inside = [path for path in _maps_below(model, root.rpartition(".")[0]) if _in_width(model, path) == width]
        return [path for path in inside if path == root or pattern.fullmatch(_leaf(path))]
    inside = list(_maps_below(model, root))
    return inside if len(inside) == 1 else [path for path in inside if pattern.fullmatch(_leaf(path))]


def writer_paths(model: nn.Module, site: Site) -> list[str]:
    """Paths of the maps whose output is added to the residual stream on the way to ``resid.l``; none for l = 0."""
    if site.kind != "resid" or not site.layer:
        return []
    block = site.module
    inside = list(_maps_below(model, block))
    reads = [path for path in inside if any(pattern.fullmatch(_leaf(path)) for pattern in READS.values())]
    rest = [path for path in inside if path not in reads and not POSITIONS.fullmatch(_leaf(path))]
    # An up projection with the plain name "dense" is told by its width: it does not give back the stream's.
    width = min((_in_width(model, path) for path in reads), default=None)
    fitting = [path for path in rest if width is None or _out_width(model, path) == width]
    named = [path for path in fitting if WRITES.fullmatch(_leaf(path))]
    return named or fitting


def _maps_below(model: nn.Module, root: str) -> Iterator[str]:
    for path, module in model.get_submodule(root).named_modules():
        if is_linear(module):
            yield join(root, path)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _weight(model: nn.Module, path: str) -> tuple[Tensor, bool]:
    module = model.get_submodule(path)
    return module.weight, isinstance(module, nn.Linear)  # type: ignore[return-value]


def _in_width(model: nn.Module, path: str) -> int:
    weight, plain = _weight(model, path)
    return weight.shape[1 if plain else 0]


def _out_width(model: nn.Module, path: str) -> int:
    weight, plain = _weight(model, path)
    return weight.shape[0 if plain else 1]


def _output_layer(model: nn.Module, site: Site) -> Iterator[str]:
    """The output layer, where it lies at the root beside the model's core and so reads the final norm itself."""
    norm = getattr(model.get_submodule(site.module), "weight", None)
    for name, module in model.named_children():
        reads = is_linear(module) and isinstance(norm, Tensor) and _in_width(model, name) == norm.shape[-1]
        if reads and re.fullmatch(r"lm_head|output|head|embed_out|unembed", name):
            yield name


def _embedding_weights(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
