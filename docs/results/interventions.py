"""The tables of interventions.md out of its runs.

python docs/results/interventions.py FREQUENCY LANGUAGES REGULARIZERS LOCAL [CPU_REGULARIZERS]
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from anisoscope import Estimate, RunReader
from anisoscope.views.associations import adjusted, units
from anisoscope.views.quality_pairs import by_model, passes, read_looks, read_trainings, stands
from anisoscope.views.series import read_series

HERE = Path(__file__).parent
GEOMETRY = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
WHATS = ("share", "ratio", "enrichment", "control")
ENERGY = (*(f"seminmf.activation.{what}" for what in WHATS), "seminmf.variance_share")
BATTERY = ("accuracy", "token_back_1", "token_back_4", "position", "casing", "word_start")
QUALITY = ("loss", *(f"quality.{name}" for name in BATTERY))

Values = dict[tuple[str, str, str], dict[str, dict[int, float]]]
"""Measure, site and tokens; then model and seed."""


def write(name: str, header: list[str], rows: list[list[object]]) -> None:
    """One CSV file beside this one."""
    with open(HERE / name, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header)
        table.writerows([f"{one:.4g}" if isinstance(one, float) else one for one in row] for row in rows)


def read(folder: str) -> tuple[Values, dict[str, dict]]:
    """All values of trainings that reached the last step, and what the looks tell of each model's exponent."""
    with RunReader(folder) as run:
        probes, records = run.probes(), run.records()
    last = max(probe.step for probe in probes)
    who = {p.cell: (p.info["variant"], p.info["seed"]) for p in probes if p.step == last}
    told = {p.info["variant"]: dict(p.info.get("frequency") or {}) for p in probes}
    for facts in told.values():
        facts["exponent"] = round(facts.get("exponent") or 0.0, 6) + 0.0  # rounding in a solver is no news
    values: Values = defaultdict(lambda: defaultdict(dict))
    stream: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.step != last or record.cell not in who:
            continue
        model, seed = who[record.cell]
        found = re.match(r"frequency (\d+) of (\d+)", record.slice)
        tokens = f"{found[1]} of {found[2]}" if found else record.slice
        values[record.measure, record.site, tokens][model][seed] = record.estimate.value
        if re.fullmatch(r"resid\.\d+", record.site):
            stream[record.measure, tokens][model, seed].append(record.estimate.value)
    for (measure, tokens), table in stream.items():
        for (model, seed), mine in table.items():
            values[measure, "all resid", tokens][model][seed] = statistics.fmean(mine)
    return values, told


def over_seeds(values: list[float]) -> list[object]:
    """Mean, both ends of Student's 95 % interval, number of seeds."""
    n = len(values)
    if n == 1:
        return [values[0], "", "", 1]
    bar = statistics.stdev(values) / math.sqrt(n)
    mean = Estimate(value=statistics.fmean(values), stderr=bar, n=n, method="mean", over="seeds", dof=n - 1)
    low, high = mean.interval() or ("", "")
    return [mean.value, low, high, n]


def slopes(study: str, values: Values, told: dict[str, dict], sites: list[str]) -> tuple[list[list], list[list]]:
    """Levels by exponent, and slopes for each seed through all models but the placebo."""
    models = sorted((m for m in told if told[m]["method"] != "placebo"), key=lambda m: told[m]["exponent"])
    models = [m for m in models if m in values["loss", "model", "all"]]
    placebo = next((m for m in told if told[m]["method"] == "placebo" and m in values["loss", "model", "all"]), None)
    plain = next((m for m in models if told[m]["method"] == "none"), None)
    x = np.array([told[model]["exponent"] for model in models])
    keys = [(m, site, "all") for m in (*GEOMETRY, *ENERGY) for site in sites]
    keys += [k for k in values if " of " in k[2] and ((k[0] in ENERGY and k[1] in sites) or k[0] == "loss")]
    keys += [("loss", "model", "all")]
    levels, lines = [], []
    for key in sorted(keys):
        table = values[key]
        if any(model not in table for model in models):
            continue  # languages have not all the same bins
        for model in (*models, *([placebo] if placebo else [])):
            levels.append([study, model, float(told[model]["exponent"]), *key, *over_seeds([*table[model].values()])])
        seeds = sorted(set.intersection(*(set(table[model]) for model in models)))
        each = [float(np.polyfit(x, [table[model][seed] for model in models], 1)[0]) for seed in seeds]
        means = [statistics.fmean(table[model].values()) for model in models]
        bends = len({after > before for before, after in pairwise(means)}) > 1
        apart = []
        if placebo and plain:
            same = next(m for m in models if told[m]["asked"] == told[placebo]["asked"])
            apart = [v - table[plain][s] for s, v in table[placebo].items()][:1]
            apart += [table[same][s] - v for s, v in table[placebo].items()][:1]
        lines.append([study, *key, *over_seeds(each), "yes" if bends else "no", *apart])
    return levels, lines


def excess(values: Values, told: dict[str, dict]) -> list[list[object]]:
    """The loss above the entropy rate: the interval holds the spread over seeds and the error of the rate."""
    rows = []
    for model, facts in sorted(told.items(), key=lambda one: one[1]["exponent"]):
        mean, low, high, n = over_seeds([*values["loss", "model", "all"][model].values()])
        rate, error = facts["entropy_rate"], facts["entropy_stderr"] or 0.0
        half = math.hypot((high - low) / 2, 1.96 * error)
        gap = mean - rate
        rows.append([model, facts["exponent"], rate, error, mean, low, high, gap, gap - half, gap + half, n])
    return rows


def regularizers(where: str, values: Values) -> list[list[object]]:
    """Each model less the plain one, seed by seed."""
    keys = [("loss", "model", "all"), *((m, "all resid", "all") for m in GEOMETRY)]
    keys += [(f"quality.{n}", "model" if n == "accuracy" else "resid.4", "all") for n in BATTERY]
    rows = []
    for key in keys:
        table = values[key]
        for model in sorted(table, key=lambda name: (name != "plain", name)):
            pairs = [v - table["plain"][seed] for seed, v in table[model].items() if seed in table["plain"]]
            apart = over_seeds(pairs)[:3] if model != "plain" else ["", "", ""]
            rows.append([where, key[0], key[1], model, *over_seeds([*table[model].values()]), *apart])
    return rows


def paces(folder: str) -> dict[str, dict[int, dict[str, float]]]:
    """How long an update took, by model and seed."""
    with RunReader(folder) as run:
        probes = run.probes()
    last = max(probe.step for probe in probes)
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for probe in probes:
        if probe.step == last:
            found[probe.info["variant"]][probe.info["seed"]] = probe.info["pace"]
    return found


def correlations(study: str, values: Values, places: tuple[str, str], hurt: tuple[str, ...] = ()) -> list[list[object]]:
    """Geometry against quality over models, each the mean of its seeds.

    And without the model that matters most, and without those that the intervention left far behind (``hurt``).
    """
    found = []
    models = sorted(values["loss", "model", "all"])
    for place, site in zip(("middle", "last"), places):
        for geometry in GEOMETRY:
            for quality in QUALITY:
                at = "model" if quality in ("loss", "quality.accuracy") else site
                tables = values[geometry, site, "all"], values[quality, at, "all"]
                a, b = (np.array([statistics.fmean(table[m].values()) for m in models]) for table in tables)
                one = units(a, b)
                rest = [units(np.delete(a, i), np.delete(b, i)).r for i in range(len(a))] if len(a) > 4 else []
                weakest = min(range(len(rest)), key=lambda i: math.copysign(rest[i], rest[i] * one.r), default=None)
                sound = np.array([model not in hurt for model in models])
                near = units(a[sound], b[sound]).r if hurt else ""
                found.append((geometry, place, quality, one, weakest, rest, near))
    qs = adjusted([one.p if one.p is not None else 1.0 for _, _, _, one, *_ in found])
    rows = []
    for (geometry, place, quality, one, weakest, rest, near), q in zip(found, qs):
        verdict = "holds" if stands(one, q) else "one model makes it" if passes(one, q) else "not told"
        left = [models[weakest], rest[weakest]] if weakest is not None else ["", ""]
        ends = [one.low, one.high] if one.low is not None else ["", ""]
        rows.append([study, geometry, place, quality, len(models), one.r, *ends, one.rank, q, *left, verdict, near])
    return rows


def looks(study: str, folder: str) -> list[list[object]]:
    """How many pairs correlate over looks: in their levels, and in their changes without the common course."""
    with RunReader(folder) as run:
        trainings = read_trainings(read_series([run]))
    rows = []
    for model, mine in by_model(trainings):
        end = max(one.last_step for one in trainings)
        pairs = read_looks([one for one in mine if one.last_step == end])
        if pairs:
            plain = sum(passes(one.level, one.level_q) for one in pairs)
            rows.append([study, model, len(pairs), plain, sum(stands(one.change, one.change_q) for one in pairs)])
    return rows


def joined(first: Values, second: Values) -> Values:
    """Both runs as one: the plain model is the same training in both."""
    return {key: {**first.get(key, {}), **second.get(key, {})} for key in {*first, *second}}


def main() -> None:
    """Write all tables."""
    (freq, told), (lang, spoken), (reg, _), (local, _) = (read(folder) for folder in sys.argv[1:5])
    levels, lines = slopes("text, loss weights", freq, told, ["resid.3", "resid.6", "all resid"])
    more = slopes("languages", lang, spoken, ["resid.2", "resid.4", "all resid"])
    ends = ["mean", "low", "high", "seeds"]
    head = ["study", "model", "exponent", "measure", "site", "tokens", *ends]
    write("interventions_levels.csv", head, levels + more[0])
    head = ["study", "measure", "site", "tokens", "slope", "low", "high", "seeds", "bends"]
    head += ["placebo less plain, seed 0", "exponent 0 less placebo, seed 0"]
    write("interventions_slopes.csv", head, lines + more[1])
    head = ["language", "exponent", "entropy rate", "its standard error", "loss", "low", "high"]
    write("interventions_excess.csv", [*head, "excess", "low", "high", "seeds"], excess(lang, spoken))
    rows = regularizers("GPU", joined(reg, local))
    if len(sys.argv) > 5:
        rows += regularizers("CPU", read(sys.argv[5])[0])
        paced = paces(sys.argv[5])
        for what in ("processor_seconds",):  # by the clock other work on the machine would speak
            for model in sorted(paced):
                both = [s for s in paced[model] if s in paced["plain"]]
                ratio = over_seeds([paced[model][s][what] / paced["plain"][s][what] for s in both])
                rows.append(["CPU", f"{what} of an update, times plain", "", model, *ratio, "", "", ""])
    head = ["run", "measure", "site", "model", *ends, "less plain", "low_1", "high_1"]
    write("interventions_regularizers.csv", head, rows)
    # The placebo has one seed and is a model all the same.
    rows = correlations("text, loss weights", freq, ("resid.3", "resid.6"))
    rows += correlations(
        "regularisers", joined(reg, local), ("resid.2", "resid.4"), ("path-curvature", "local-curvature")
    )
    head = ["study", "geometry", "layer", "quality", "models", "r", "low", "high", "rank r", "adjusted p"]
    write(
        "interventions_quality.csv", [*head, "weakest without", "r then", "verdict", "r of the four near plain"], rows
    )
    names = ("text, loss weights", "languages", "regularisers", "local curvature")
    rows = [row for name, folder in zip(names, sys.argv[1:5]) for row in looks(name, folder)]
    write("interventions_looks.csv", ["study", "model", "pairs", "levels correlate", "changes correlate"], rows)


if __name__ == "__main__":
    main()
