"""Figures as plotly JSON, and the plotly program itself, packed so that a report needs no network."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from typing import Any

from anisoscope.errors import OptionError
from anisoscope.views.numbers import digits_of, shown
from anisoscope.views.panels import Axis, Figure, Heatmap, Line, Panel

# Okabe and Ito's colours, told apart with any kind of colour vision; darkened where white paper needs it.
PALETTES: dict[str, tuple[str, ...]] = {
    "light": ("#0072b2", "#d55e00", "#00825f", "#b0508a", "#8f6a00", "#3b8fc2", "#555b61"),
    "dark": ("#62b5ee", "#ff9553", "#37cfa2", "#e69cc8", "#e3bd3e", "#9cd2fa", "#b9c0c7"),
}
# Viridis at nine places: even steps of lightness, readable with any kind of colour vision and in grey.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
LINE_DIGITS, HEAT_DIGITS = 9, 6
TITLE_LETTERS, LABEL_LETTERS = 36, 14
PACK_LEVEL = 5  # of gzip: the program of plotly is a hundredth longer than at 9, in half the time
MOST_STEPS, MOST_SITES = 6, 10  # labels along a heat map


def escape(text: str) -> str:
    """Text for plotly, which reads a subset of HTML in every text field."""
    return html.escape(text, quote=False).replace("\n", "<br>")


def clipped(text: str, letters: int) -> str:
    """Text that leaves room for the figure; hover texts have it whole."""
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"


def rounded(number: float | None, digits: int) -> float | None:
    """A number with so many significant digits; JSON has no infinity, so what is not finite is None."""
    return None if number is None or not math.isfinite(number) else float(format(number, f".{digits}g"))


def viridis(share: float) -> str:
    """The colour at a share from 0 to 1; the palest end, hard to see on white, is not reached."""
    at = min(max(share, 0.0), 1.0) * 0.88 * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    pair = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in VIRIDIS[low : low + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*pair))


def colour_of(line: Line, theme: str = "light") -> str:
    """The colour of a line."""
    palette = PALETTES[theme]
    return viridis(line.shade) if line.shade is not None else palette[line.role % len(palette)]


def figure_json(figure: Figure) -> list[dict[str, Any]]:
    """Each panel as ``{"key", "tags", "data", "layout"}``, in the colours of the light theme.

    ``meta`` of a trace says what it is (``part``), which colour it has (``role`` or ``shade``) and its tags, so that
    the page can switch themes and toggle lines.
    """
    return [heatmap_json(one) if isinstance(one, Heatmap) else panel_json(one) for one in figure.panels]


def panel_json(panel: Panel) -> dict[str, Any]:
    """A panel of lines."""
    data: list[dict[str, Any]] = []
    for line in panel.lines:
        meta = {"role": line.role, "shade": rounded(line.shade, 3), "tags": dict(line.tags)}
        band = _band(line) if line.joined else None
        if band:
            data.append(band | {"meta": {"part": "band"} | meta})
        data.append(_trace(line) | {"meta": {"part": "line"} | meta})
    places = [x for line in panel.lines for x in line.x]
    # The title above a panel names what its axis shows; only a unit adds to that.
    implied = panel.y.title.lower() in panel.title.lower()
    layout = _layout(panel.x, replace(panel.y, title="") if implied else panel.y)
    for reference in panel.references if places else ():
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [min(places), max(places)],
                "y": [reference.y] * 2,
                "line": {"dash": "dot", "width": 1.2, "color": "#6b7280"},
                "hoverinfo": "text",
                "hovertext": escape(f"{reference.name}: {shown(reference.y, '.4g')}"),
                "meta": {"part": "reference"},
            }
        )
        layout["annotations"].append(
            {
                "text": escape(clipped(reference.name, TITLE_LETTERS)),
                "x": 1.0,  # at the right end: lines of a training have left it by then
                "xref": "paper",
                "xanchor": "right",
                "y": math.log10(reference.y) if panel.y.log else reference.y,
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 10.5, "color": "#6b7280"},
            }
        )
    return {"key": panel.key, "tags": {}, "data": data, "layout": layout}


def _trace(line: Line) -> dict[str, Any]:
    colour = colour_of(line)
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": escape(line.name),
        "mode": "lines+markers" if line.joined and len(line.x) <= 60 else "lines" if line.joined else "markers",
        "x": [rounded(x, LINE_DIGITS) for x in line.x],
        "y": [rounded(y, LINE_DIGITS) for y in line.y],
        "hoverinfo": "text",
        "hovertext": [escape(text) for text in line.hover],
        "line": {"color": colour, "width": 2, "dash": DASHES[line.dash % len(DASHES)]},
        "marker": {"color": colour, "size": 5 if line.joined else 8, "symbol": "circle" if line.joined else "diamond"},
        "visible": line.visible,
    }
    if not line.joined and any(end is not None for end in line.upper):
        above = [None if end is None else rounded(end - y, LINE_DIGITS) for end, y in zip(line.upper, line.y)]
        trace["error_y"] = {"type": "data", "array": above, "thickness": 1.5, "width": 4, "color": colour}
    return trace


def _band(line: Line) -> dict[str, Any] | None:
    """The 95 % band as closed shapes, one for each stretch of points that have intervals."""
    stretches: list[list[int]] = [[]]
    for i, (low, high) in enumerate(zip(line.lower, line.upper)):
        if low is None or high is None:
            stretches.append([])
        else:
            stretches[-1].append(i)
    x: list[float | None] = []
    y: list[float | None] = []
    for stretch in stretches:
        if len(stretch) > 1:
            x += [line.x[i] for i in (*stretch, *reversed(stretch))] + [None]
            y += [line.upper[i] for i in stretch] + [line.lower[i] for i in reversed(stretch)] + [None]
    if not x:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [rounded(value, LINE_DIGITS) for value in x[:-1]],
        "y": [rounded(value, LINE_DIGITS) for value in y[:-1]],
        "fill": "toself",
        "fillcolor": _faint(colour_of(line), 0.18 if line.shade is None else 0.1),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "visible": line.visible,
    }


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def heatmap_json(heatmap: Heatmap) -> dict[str, Any]:
    """A heat map; rows from the first site at the bottom to the last at the top."""
    words: list[list[str]] = []
    for row, site in enumerate(heatmap.y.labels):
        words.append([])
        for column, step in enumerate(heatmap.x.labels):
            z, error, n = heatmap.z[row][column], heatmap.stderr[row][column], heatmap.n[row][column]
            if z is None:
                words[-1].append(escape(f"{site} · step {step}\nnot measured"))
                continue
            value = digits_of(z, error) + ("" if error is None else f" ± {shown(error, '.2g')}") + heatmap.unit
            words[-1].append(escape(f"{site} · step {step}\n{value}\nn = {n:,}"))
    trace = {
        "type": "heatmap",
        "z": [[rounded(z, HEAT_DIGITS) for z in row] for row in heatmap.z],
        "text": words,
        "hoverinfo": "text",
        "colorscale": [[i / (len(VIRIDIS) - 1), colour] for i, colour in enumerate(VIRIDIS)],
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}, "xpad": 6},
        "meta": {"part": "heat", "tags": dict(heatmap.tags)},
    }
    axes = (_thinned(heatmap.x, MOST_STEPS), replace(_thinned(heatmap.y, MOST_SITES), title=""))
    return {"key": heatmap.key, "tags": dict(heatmap.tags), "data": [trace], "layout": _layout(*axes)}


def _thinned(axis: Axis, most: int) -> Axis:
    """Numbered places for the labels of an axis, at most so many, in short."""
    ticks = range(0, len(axis.labels), max(1, math.ceil(len(axis.labels) / most)))
    return Axis(title=axis.title, ticks=tuple(map(float, ticks)), labels=tuple(short(axis.labels[i]) for i in ticks))


def short(label: str) -> str:
    """``16,000`` as ``16k`` and ``2,000,000`` as ``2M``; anything else as it is."""
    for zeros, letter in ((",000,000", "M"), (",000", "k")):
        if label.endswith(zeros):
            return label.removesuffix(zeros) + letter
    return label


def _layout(x: Axis, y: Axis) -> dict[str, Any]:
    return {
        "autosize": True,
        "height": 250,
        "margin": {"l": 50, "r": 10, "t": 10, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "hoverdistance": 30,
        "hoverlabel": {"align": "left", "font": {"size": 12}},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1f2933"},
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        "annotations": [],
    }


def _axis(axis: Axis) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "title": {"text": escape(clipped(axis.title, TITLE_LETTERS)), "standoff": 8, "font": {"size": 12}},
        "type": "log" if axis.log else "linear",
        "zeroline": False,
        "automargin": True,
        "gridcolor": "#e5e7eb",
        "linecolor": "#9aa5b1",
        "ticks": "",
    }
    if axis.log:
        drawn |= {"dtick": 1, "exponentformat": "power"}
    if axis.range:
        drawn["range"] = [rounded(end, LINE_DIGITS) for end in axis.range]
    if axis.ticks:
        labels = [escape(clipped(label, LABEL_LETTERS)) for label in axis.labels]
        drawn |= {"tickvals": list(axis.ticks), "ticktext": labels, "tickangle": 0}
    return drawn


def pack(text: bytes) -> str:
    """Text in UTF-8 as gzip in base64: a third of the size, and no character that HTML could misread."""
    return base64.b64encode(gzip.compress(text, PACK_LEVEL, mtime=0)).decode()


def pack_json(value: Any) -> str:
    """A value as packed JSON."""
    return pack(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def packed_plotly() -> str:
    """The plotly program that comes with the installed package, packed."""
    try:
        return begin_packing().result()
    except Exception:
        begin_packing.cache_clear()  # it may be there the next time
        raise


@functools.cache
def begin_packing() -> Future[str]:
    """Let a thread pack the plotly program, once in a process. It needs no interpreter for that: whoever will write a
    report may begin while one core is busy with something else."""
    with_it = ThreadPoolExecutor(1, thread_name_prefix="anisoscope-pack")
    task = with_it.submit(_pack_plotly)
    with_it.shutdown(wait=False)
    return task


if hasattr(os, "register_at_fork"):  # a process that is forked meanwhile has no such thread
    os.register_at_fork(after_in_child=begin_packing.cache_clear)


def _pack_plotly() -> str:
    try:
        return pack((resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes())
    except (ModuleNotFoundError, FileNotFoundError):
        raise OptionError('a report needs plotly, which is not installed: pip install "anisoscope[report]"') from None


def dictionary(values: Iterable[str]) -> tuple[list[str], list[int]]:
    """Distinct values in order of appearance, and the number of each value among them."""
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), column


def columns(rows: Sequence[dict[str, Any]], words: Sequence[str], numbers: Sequence[str]) -> dict[str, Any]:
    """Rows as columns: words as numbers into a dictionary, numbers with six digits."""
    table: dict[str, Any] = {"length": len(rows)}
    for name in words:
        known, column = dictionary(str(row[name]) for row in rows)
        table[name] = {"words": known, "at": column}
    for name in numbers:
        table[name] = [rounded(row[name], HEAT_DIGITS) for row in rows]
    return table
