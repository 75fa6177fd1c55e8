"""The figures of interventions.md out of the tables beside it: `python docs/results/interventions_figures.py`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from anisoscope.views.interactive import viridis
from anisoscope.views.paper import STYLE

HERE = Path(__file__).parent
COLOURS = {
    "plain": "#0072b2",
    "cosreg": "#d55e00",
    "istar": "#009e73",
    "spectral": "#aa4499",
    "path-curvature": "#8a6500",
    "local-curvature": "#444444",
}
TEXT, LANGUAGES = "text, loss weights", "languages"
BINS = [f"{number} of 5" for number in range(1, 6)]


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table beside this file."""
    with open(HERE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def canvas(columns: int) -> tuple[Figure, Any]:
    """A figure as wide as the text, with panels in a row."""
    figure = Figure(figsize=(7, 2.5), layout="constrained")
    return figure, figure.subplots(1, columns)


def course(axes: Any, rows: list[dict[str, str]], colour: str, label: str) -> None:
    """Means and 95 % intervals against the exponent; a placebo, which has one seed, as a cross."""
    line = [row for row in rows if not row["model"].startswith("placebo")]
    x, mean, low, high = ([float(row[key]) for row in line] for key in ("exponent", "mean", "low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, mean, "o-", color=colour, label=label)
    for row in rows:
        if row["model"].startswith("placebo"):
            axes.plot(float(row["exponent"]), float(row["mean"]), "x", color=colour, markersize=4.5)


def finish(figure: Figure, name: str) -> None:
    """Grids, and the file."""
    for axes in figure.axes:
        axes.grid(visible=True)
    figure.savefig(HERE / name, dpi=200)


def frequency() -> None:
    """Tangent share and loss by frequency against the exponent of the weights."""
    levels = [row for row in table("interventions_levels.csv") if row["study"] == TEXT]
    figure, (left, right) = canvas(2)
    for number, tokens in enumerate(BINS):
        mine = [row for row in levels if row["tokens"] == tokens]
        colour = viridis(number / 4)
        label = {0: "rarest fifth", 4: "most frequent fifth"}.get(number, f"{number + 1}")
        share = [r for r in mine if (r["measure"], r["site"]) == ("seminmf.activation.share", "resid.6")]
        course(left, share, colour, label)
        course(right, [r for r in mine if r["measure"] == "loss"], colour, label)
    left.axhline(0.0625, color="#777777", linewidth=0.7, linestyle=(0, (1, 2)))
    left.text(1.5, 0.066, "chance", ha="right", va="bottom", fontsize=6, color="#555555")
    left.set(title="Energy share along the proxy, last layer", ylabel="energy share", ylim=(0, None))
    right.set(title="Loss on the untouched text", ylabel="held-out loss (nats)")
    for axes in (left, right):
        axes.set_xlabel("effective Zipf exponent of the loss")
        axes.set_title(axes.get_title(), loc="left")
        axes.set_title("")
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    finish(figure, "frequency_effect.png")


def geometry() -> None:
    """Weights of the loss and languages: does geometry follow the exponent?"""
    levels = table("interventions_levels.csv")
    figure, panels = canvas(3)
    names = {"mean_cosine": "Mean cosine", "isoscore": "IsoScore", "seminmf.activation.enrichment": "Enrichment"}
    for axes, (measure, title) in zip(panels, names.items()):
        for study, colour, site in ((TEXT, "#0072b2", "resid.6"), (LANGUAGES, "#d55e00", "resid.4")):
            mine = [r for r in levels if (r["study"], r["measure"], r["site"]) == (study, measure, site)]
            course(axes, [r for r in mine if r["tokens"] == "all"], colour, study)
        axes.set_title(f"{title}, last layer", loc="left")
        axes.set_xlabel("Zipf exponent")
        axes.set_ylim(0, None)
    panels[0].legend(frameon=False)
    finish(figure, "geometry_exponent.png")


def regularizers() -> None:
    """What each regulariser does to the loss and to the accuracy, and loss against IsoScore."""
    rows = [row for row in table("interventions_regularizers.csv") if row["run"] == "GPU"]
    figure, panels = canvas(3)
    models = list(COLOURS)[1:]
    what = {"loss": ("Loss less plain", "nats"), "quality.accuracy": ("Accuracy less plain", "share of tokens")}
    for axes, (measure, (title, unit)) in zip(panels, what.items()):
        found = {row["model"]: row for row in rows if row["measure"] == measure}
        for place, model in enumerate(models):
            mean, low, high = (float(found[model][key]) for key in ("less plain", "low_1", "high_1"))
            axes.plot([low, high], [place, place], color=COLOURS[model])
            axes.plot(mean, place, "o", color=COLOURS[model], markersize=3.5)
        axes.axvline(0, color="#777777", linewidth=0.7)
        axes.set_yticks(range(len(models)), models if measure == "loss" else [""] * len(models))
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.set_title(title, loc="left")
        axes.set_xlabel(unit)
    panels[0].set_xscale("symlog", linthresh=0.2)
    panels[0].set_xlim(-0.25, 2)
    panels[0].set_xticks([-0.1, 0, 0.1, 0.5, 1], ["−0.1", "0", "0.1", "0.5", "1"])
    loss = {row["model"]: row for row in rows if row["measure"] == "loss"}
    for row in (row for row in rows if row["measure"] == "isoscore"):
        model = row["model"]
        panels[2].plot(float(row["mean"]), float(loss[model]["mean"]), "o", color=COLOURS[model], markersize=4)
        right = model == "istar"
        at = (-5 if right else 5, 3 if model != "plain" else -7)
        place = (float(row["mean"]), float(loss[model]["mean"]))
        panels[2].annotate(model, place, at, textcoords="offset points", fontsize=6, ha="right" if right else "left")
    panels[2].set_title("Loss against IsoScore", loc="left")
    panels[2].set(xlabel="IsoScore, mean over layers", ylabel="held-out loss (nats)")
    finish(figure, "regularizers.png")


def quality() -> None:
    """The 70 pairs of a geometry and a quality: what is left of their correlation without some models."""
    rows = [row for row in table("interventions_quality.csv") if row["study"] == "regularisers"]
    figure, (left, right) = canvas(2)
    colours = {"holds": "#0072b2", "one model makes it": "#d55e00", "not told": "#bbbbbb"}
    for verdict, colour in colours.items():
        mine = [row for row in rows if row["verdict"] == verdict]
        x = [abs(float(row["r"])) for row in mine]
        then = [float(row["r then"]) * (1 if float(row["r"]) > 0 else -1) for row in mine]
        near = [float(row["r of the four near plain"]) * (1 if float(row["r"]) > 0 else -1) for row in mine]
        left.plot(x, then, "o", color=colour, markersize=3, label=f"{verdict} ({len(mine)})")
        right.plot(x, near, "o", color=colour, markersize=3)
    for axes, title in ((left, "Without the model that matters most"), (right, "Without both curvature terms")):
        axes.plot([0, 1], [0, 1], color="#777777", linewidth=0.7)
        axes.axhline(0, color="#777777", linewidth=0.7, linestyle=(0, (1, 2)))
        axes.set_title(title, loc="left")
        axes.set(xlabel="|r| over all six models", ylim=(-1.05, 1.05))
    left.set_ylabel("r without it, signed as with it")
    right.set_ylabel("r of the other four, signed as of all")
    left.legend(frameon=False, loc="lower right")
    finish(figure, "quality_pairs.png")


if __name__ == "__main__":
    with matplotlib.rc_context(STYLE):
        frequency()
        geometry()
        regularizers()
        quality()
