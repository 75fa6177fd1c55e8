"""The small tables of docs/results out of the runs: `python docs/results/tables.py TANGENT_RUN SHAPE_RUN`."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from anisoscope.runs.records import Record
from anisoscope.runs.store import RunReader
from anisoscope.views.series import is_stream as is_stream_site

HERE = Path(__file__).parent
WHATS = ("ratio", "share", "enrichment")


def write(name: str, header: list[str], rows: list[list[object]]) -> None:
    """One CSV file beside this one."""
    with open(HERE / name, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header)
        table.writerows([f"{one:.4g}" if isinstance(one, float) else one for one in row] for row in rows)


def over_seeds(values: dict[int, list[float]]) -> tuple[float, float | None]:
    """Mean over seeds of each seed's mean over sites, and the standard error of that mean over seeds."""
    means = [math.fsum(one) / len(one) for one in values.values()]
    bar = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return math.fsum(means) / len(means), bar


def grouped(records: list[Record], who: dict[str, tuple[str, int]]) -> dict[tuple, dict[int, list[float]]]:
    """Values by model, step, measure, slice, and by seed inside."""
    found: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        variant, seed = who[record.cell]
        found[variant, record.step, record.measure, record.slice][seed].append(record.estimate.value)
    return found


def main() -> None:
    """Write all tables."""
    with RunReader(sys.argv[1]) as run:
        who = {probe.cell: (probe.info["variant"], probe.info["seed"]) for probe in run.probes()}
        records = [one for one in run.records() if is_stream_site(one.site) or one.site == "model"]
        reader = [one for one in run.records() if one.site.startswith("mlp_in") and ".reader." in one.measure]
    table = grouped(records, who)
    rows = []
    for (model, step, measure, slice), values in sorted(table.items()):
        parts = measure.split(".")
        if slice == "all" and (measure in ("loss", "two_nn", "spectral_ratio") or parts[-1] in WHATS):
            rows.append([model, step, measure, *over_seeds(values)])
    write("tangent_over_time.csv", ["model", "step", "measure", "mean over residual sites", "se over seeds"], rows)
    last = max(step for _, step, _, _ in table)
    rows = [
        [model, measure, slice, *over_seeds(values)]
        for (model, step, measure, slice), values in sorted(table.items())
        if step == last and (slice.startswith("frequency") or measure.startswith("frequency"))
    ]
    write("tangent_by_frequency.csv", ["model", "measure", "tokens", "mean over residual sites", "se over seeds"], rows)
    rows = [
        [*who[one.cell], one.site, one.measure, one.estimate.value, one.estimate.stderr]
        for one in reader
        if one.step == last
    ]
    write("tangent_readers.csv", ["model", "seed", "site", "measure", "value", "stderr"], sorted(rows, key=str))
    with RunReader(sys.argv[2]) as run:
        rows = [
            [one.cell, one.step, one.site, one.measure, one.estimate.value, one.estimate.stderr]
            for one in run.records()
            if one.measure in ("two_nn", "spectral_ratio", "mean_cosine", "loss") and one.slice == "all"
        ]
    write("shape_by_layer.csv", ["model", "step", "site", "measure", "value", "stderr"], rows)


if __name__ == "__main__":
    main()
