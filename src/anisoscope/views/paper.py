"""Figures for papers: each panel as PDF, SVG and PNG, one column wide, with embedded fonts. No pyplot."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import OptionError, choose
from anisoscope.runs.files import replacing
from anisoscope.views.interactive import VIRIDIS, clipped, colour_of, short, viridis
from anisoscope.views.numbers import shown
from anisoscope.views.panels import Figure, Heatmap, Line, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("pdf", "svg", "png")
COLUMN_INCHES = 3.35  # one column of the usual two-column page
DPI = 300
MOST_LETTERS = 44  # of a title or a name in a legend, one column wide
MOST_LINES = 6  # lines that a legend can name in one column; more are shown as an ordered colour
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))

# fonttype 42 embeds TrueType outlines, which publishers ask for; SVG text becomes outlines and looks the same anywhere.
# parse_math: a dollar sign in a name is a dollar sign. The salt makes the same figure the same file.
STYLE: Any = {
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "anisoscope",
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "sans-serif",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 2.6,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
}


def write_figures(
    figures: Iterable[Figure],
    folder: str | Path,
    *,
    formats: Sequence[str] = FORMATS,
    width_inches: float = COLUMN_INCHES,
) -> list[Path]:
    """Write every panel of every figure into ``folder``, made if needed; return the files."""
    for name in formats:
        choose("figure format", name, FORMATS)
    if not 1 <= width_inches <= 40:
        raise OptionError(f"width_inches must lie between 1 and 40, got {width_inches}; one column is {COLUMN_INCHES}")
    import matplotlib

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that is no reason to stop.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        for panel in (panel for figure in figures for panel in figure.panels):
            stem = _file_name(panel.key, {path.stem for path in written})
            drawn = draw(panel, width_inches)
            for kind in formats:
                path = folder / f"{stem}.{kind}"
                stamp = {"pdf": "CreationDate", "svg": "Date"}.get(kind)
                with replacing(path) as file:
                    drawn.savefig(file, format=kind, dpi=DPI, metadata={stamp: None} if stamp else {})
                written.append(path)
    return written


def draw(panel: Panel | Heatmap, width_inches: float = COLUMN_INCHES) -> Any:
    """A panel as a matplotlib Figure."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width_inches, 0.72 * width_inches), layout="constrained")
    axes = canvas.add_subplot()
    if isinstance(panel, Heatmap):
        _draw_heatmap(axes, panel)
    else:
        _draw_lines(axes, panel)
    axes.set_title(clipped(panel.title, MOST_LETTERS), loc="left")
    axes.set_xlabel(clipped(panel.x.title, MOST_LETTERS))
    axes.set_ylabel(clipped(panel.y.title, MOST_LETTERS))
    return canvas


def _draw_lines(axes: Axes, panel: Panel) -> None:
    # Single seeds and other proxies are for the page, where a switch shows them; paper has the means.
    paper = [line for line in panel.lines if line.visible or not {"seeds", "proxy"} & set(line.tags)]
    lines = paper if len(paper) <= MOST_LINES else [line for line in paper if line.visible]
    # Layers as ordered colours, slices as toggles: on paper one slice a figure.
    if any(line.shade is not None for line in lines):
        lines = [line for line in lines if line.visible]
    named: set[str] = set()
    for line in lines:
        label = _label(line, lines)
        first = label not in named
        named.add(label)
        _draw_line(axes, line, label if first else "_nolegend_")
    for reference in panel.references:
        axes.axhline(reference.y, color="#777777", linewidth=0.7, linestyle=(0, (1, 2)))
        where = axes.get_yaxis_transform()
        axes.text(
            1.0, reference.y, reference.name, transform=where, ha="right", va="bottom", fontsize=6, color="#555555"
        )
    for axis, spec, scale in ((axes.xaxis, panel.x, axes.set_xscale), (axes.yaxis, panel.y, axes.set_yscale)):
        if spec.log:
            scale("log")
            axis.set_major_formatter(lambda value, _: _power(value))
            axis.set_minor_formatter("")
    if panel.x.ticks:
        axes.set_xticks(panel.x.ticks, panel.x.labels)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    if panel.y.range:
        axes.set_ylim(*panel.y.range)
    axes.grid(True)
    if len(named) > MOST_LINES and all(line.shade is not None for line in lines):
        _shade_bar(axes, lines)
    elif len(named) > 1:
        # Below the axes: inside them it would lie on data sooner or later.
        columns = 3 if max(map(len, named)) < 14 else 2
        axes.figure.legend(loc="outside lower center", ncols=min(columns, len(named)), frameon=False, handlelength=1.8)


def _power(value: float) -> str:
    """A power of ten. The usual formatter writes mathematics, which is off since names may hold dollar signs."""
    exponent = round(math.log10(value)) if value > 0 else 0
    if -2 <= exponent <= 3:
        return shown(value, "g")
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _draw_line(axes: Axes, line: Line, label: str) -> None:
    colour = colour_of(line)
    if not line.joined:
        pairs = [(y if low is None else low, y if high is None else high) for low, high, y in _points(line)]
        errors = [[y - low for (low, _), y in zip(pairs, line.y)], [high - y for (_, high), y in zip(pairs, line.y)]]
        axes.errorbar(line.x, line.y, yerr=errors, fmt="D", color=colour, label=label, elinewidth=0.8)
        return
    style = DASHES[line.dash % len(DASHES)]
    marker = "o" if len(line.x) <= 60 else ""
    axes.plot(line.x, line.y, color=colour, linestyle=style, marker=marker, label=label)
    # NaN breaks a band where a point has no interval; a line of its own would bridge the gap.
    low, high = ([float("nan") if end is None else end for end in ends] for ends in (line.lower, line.upper))
    axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)


def _points(line: Line) -> Iterable[tuple[float | None, float | None, float]]:
    return zip(line.lower, line.upper, line.y)


def _draw_heatmap(axes: Axes, panel: Heatmap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("viridis", VIRIDIS)
    table = [[float("nan") if value is None else value for value in row] for row in panel.z]
    image = axes.imshow(table, aspect="auto", origin="lower", cmap=colours, interpolation="nearest")
    for ticks, labels, most in ((axes.set_xticks, panel.x.labels, 5), (axes.set_yticks, panel.y.labels, 8)):
        places = range(0, len(labels), max(1, -(-len(labels) // most)))
        ticks(list(places), [short(labels[i]) for i in places])
    axes.figure.colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)


def _shade_bar(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("layers", [viridis(i / 20) for i in range(21)])
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=axes, pad=0.02, ticks=[0, 1])
    order = sorted(lines, key=lambda line: line.shade or 0)
    bar.ax.set_yticklabels([order[0].name, order[-1].name])
    bar.outline.set_visible(False)


def _label(line: Line, lines: Sequence[Line]) -> str:
    """What tells a line from the others: its layer where colours mean layers, else the tags that differ."""
    if line.shade is not None:
        return line.name
    differ = [kind for kind in line.tags if len({one.tags.get(kind) for one in lines}) > 1]
    return clipped(", ".join(line.tags[kind] for kind in differ), MOST_LETTERS)


def _file_name(key: str, taken: set[str]) -> str:
    """A name that every file system takes, and that no other panel has."""
    base = re.sub(r"[^A-Za-z0-9_.]+", "-", key).strip("-.")[:80] or "figure"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name
