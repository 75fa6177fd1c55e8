"""Several measures at once, from the whole table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from anisoscope.axes import MaskLike, RowsLike
from anisoscope.errors import unknown_name
from anisoscope.estimate import Estimate

# Importing a module of measures enters them in the table.
from anisoscope.measures import anisotropy, curvature, dimension, local, partition, paths  # noqa: F401
from anisoscope.measures.base import Measure, Needs, Workspace, compute, lookup, registered
from anisoscope.rows import as_rows
from anisoscope.stats.precision import in_full_precision, unrecorded

OWN = __name__.partition(".")[0] + "."


def measure_names() -> tuple[str, ...]:
    """The names in the table, sorted."""
    return tuple(sorted(registered()))


class Table(dict[str, Estimate]):
    """Estimates by name, printed one a line."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {str(value).removeprefix('Estimate: ')}" for name, value in self.items())


@in_full_precision
def measure(
    rows: RowsLike,
    names: str | Iterable[str] | Mapping[str, Mapping[str, Any]],
    *,
    mask: MaskLike | Iterable[Any] = None,
    seed: int = 0,
) -> Table:
    """Compute several measures over the same rows, sharing one pass of moments and one neighbour search.

    ``names`` is a name, a list of names, or a mapping from name to options, as in
    ``{"two_nn": {"variant": "ml"}, "mle": {"k": 10}}``.
    """
    if isinstance(names, str):
        names = [names]
    wanted = {name: dict(names[name]) if isinstance(names, Mapping) else {} for name in names}
    chosen = [(lookup(name), options) for name, options in wanted.items()]
    needs = Needs()
    for entry, options in chosen:
        _check_options(entry, options)
        needs = needs | entry.needs(**options)
    # A measure of the user's own may want gradients inside.
    own = all((entry.compute.__module__ or "").startswith(OWN) for entry, _ in chosen)
    with unrecorded(rows.device) if own and isinstance(rows, Tensor) else nullcontext():
        work = Workspace(as_rows(rows, mask), needs, seed)
        return Table((entry.name, compute(entry, work, options)) for entry, options in chosen)


def _check_options(entry: Measure, options: Mapping[str, Any]) -> None:
    known = [p.name for p in inspect.signature(entry.compute).parameters.values() if p.kind == p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {entry.name}", option, known)
