"""The sections of a report: figures under their headings, with sentences before them and small tables after."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anisoscope.views.panels import Figure, Heatmap, Table

QUALITY = "Geometry and quality"
REGULARIZERS = "Regularisers"
# The section of a figure, by how its key begins; the first that fits.
SECTIONS = (
    ("loss", "Loss"),
    ("causal", "Effect of token frequency"),
    ("profiles-gradients", "Gradients"),
    ("steps-gradients", "Gradients"),
    ("heatmaps-gradients", "Gradients"),
    ("profiles-", "Layer profiles"),
    ("steps", "Over training"),
    ("heatmaps", "Layer by step"),
    ("energy", "Gradient energy along proxies"),
    ("frequency", "By token frequency"),
    ("construction", "What could be a construction"),
    ("drift", "Drift of proxies"),
    ("referee", "The referee"),
    ("regularizers", REGULARIZERS),
    ("quality", QUALITY),
    ("curve-dimension against scale", "Dimension against scale"),
    ("curve-spectrum", "Spectra"),
    ("curve-", "Other curves"),
)
RANKS = "Energy ratio against rank"
# A training is read from its loss on; how the layers of its last step look comes after how they came to be.
TRAINING_ORDER = (
    "Loss",
    "Effect of token frequency",
    REGULARIZERS,
    "Over training",
    "Layer by step",
    "Layer profiles",
    QUALITY,
    "Gradient energy along proxies",
    "By token frequency",
    "What could be a construction",
    "Drift of proxies",
    "The referee",
    RANKS,
    "Gradients",
)


def build_sections(
    figures: Sequence[Figure],
    words: Mapping[str, Sequence[str]],
    tables: Mapping[str, Sequence[Table]],
    *,
    training: bool = False,
) -> list[dict[str, Any]]:
    """Every section in order. Panels are numbered through the page, as the program finds them."""
    number = 0
    found: dict[str, dict[str, Any]] = {}
    for figure in figures:
        name = next((name for start, name in SECTIONS if figure.key.startswith(start)), figure.title)
        name = RANKS if figure.key.endswith("ratio against rank") else name
        panels = []
        for panel in figure.panels:
            heat = isinstance(panel, Heatmap)
            panels.append(
                {
                    "number": number,
                    "title": panel.title,
                    "note": "" if isinstance(panel, Heatmap) else panel.note,
                    "aria": f"{'Heat map' if heat else 'Line chart'} of {panel.title} by {panel.x.title}",
                    "visible": panel.visible if isinstance(panel, Heatmap) else True,
                    "tags": json.dumps(dict(panel.tags)) if isinstance(panel, Heatmap) else "{}",
                }
            )
            number += 1
        _section(found, name)["figures"].append({"figure": figure, "panels": panels})
    for name, sentences in words.items():
        if sentences:
            _section(found, name)["words"] = list(sentences)
    for name, mine in tables.items():
        if mine:
            _section(found, name)["tables"] = list(mine)
    for section in found.values():
        drawn = [entry["figure"] for entry in section["figures"]]
        section["verdict"] = any(table.key == "referee" for table in section["tables"])
        section["shared"] = len({(figure.caption, figure.toggles, figure.shades) for figure in drawn}) == 1
        section["figures"].sort(key=lambda entry: entry["figure"].key.startswith("profiles-gradients"))
    order = list(dict.fromkeys((*(TRAINING_ORDER if training else ()), *(name for _, name in SECTIONS), RANKS)))
    # Experiments with known answers have sections of their own names, in their own order, before everything else.
    return sorted(found.values(), key=lambda section: order.index(section["name"]) if section["name"] in order else -1)


def _section(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    place = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")  # fit for an address and for a selector
    new = {"name": name, "id": place, "figures": [], "words": [], "tables": []}
    return found.setdefault(name, new)
