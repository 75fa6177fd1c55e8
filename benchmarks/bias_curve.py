"""Measured bias curves of docs/measures.md: the dimension estimators, and the effective ranks on white data.

    python benchmarks/bias_curve.py dimension
    python benchmarks/bias_curve.py effective_rank

Each prints a Markdown table of means over seeds on standard output and its progress on standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch

import anisoscope as an
from anisoscope.theory import manifolds

CLOUDS = {"unit ball": manifolds.ball, "flat torus": manifolds.flat_torus}
ESTIMATORS = {"two_nn": {"variant": "facco"}, "mle": {"k": 20}, "gride": {"scales": [1]}}


def dimension_table(rows: int, seeds: int, dimensions: list[int]) -> Iterator[str]:
    """Mean reading of each estimator by dimension, on a cloud with an edge and on one without."""
    yield "| d | " + " | ".join(f"{cloud}: {name}" for cloud in CLOUDS for name in ("two_nn", "mle", "gride")) + " |"
    yield "|---" * (1 + len(CLOUDS) * len(ESTIMATORS)) + "|"
    for dimension in dimensions:
        cells = []
        for draw in CLOUDS.values():
            found = [an.measure(draw(rows, dimension, seed=seed), ESTIMATORS) for seed in range(seeds)]
            cells += [f"{sum(table[name].value for table in found) / seeds:.2f}" for name in ESTIMATORS]
        yield f"| {dimension} | " + " | ".join(cells) + " |"


def effective_rank_table(width: int, seeds: int, multiples: list[int]) -> Iterator[str]:
    """Relative error of both effective ranks on white rows, beside the leading-order prediction."""
    yield "| n / D | n | effective_rank | predicted -D/(8n) | effective_rank_lambda | predicted -D/(2n) |"
    yield "|---|---|---|---|---|---|"
    for multiple in multiples:
        n = multiple * width
        off = {"effective_rank": 0.0, "effective_rank_lambda": 0.0}
        for seed in range(seeds):
            found = an.measure(manifolds.gaussian(n, (1.0,) * width, seed=seed), list(off))
            for name in off:
                off[name] += (found[name].value / width - 1) / seeds
        sigma, lam = off.values()
        yield (
            f"| {multiple} | {n:,} | {100 * sigma:+.3f} % | {-100 / (8 * multiple):+.3f} % "
            f"| {100 * lam:+.3f} % | {-100 / (2 * multiple):+.3f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("dimension", "effective_rank"))
    parser.add_argument("--rows", type=int, default=4000, help="rows of each cloud (dimension)")
    parser.add_argument("--width", type=int, default=64, help="columns of the white rows (effective_rank)")
    parser.add_argument("--seeds", type=int, default=5, help="clouds averaged over, seeds 0, 1, ...")
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 5, 10, 15, 20, 30, 50])
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="n / D")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.table == "dimension":
        lines, total = dimension_table(options.rows, options.seeds, options.dimensions), len(options.dimensions)
    else:
        lines, total = effective_rank_table(options.width, options.seeds, options.multiples), len(options.multiples)
    began = time.perf_counter()
    for number, line in enumerate(lines):
        print(line, flush=True)
        seconds = time.perf_counter() - began
        print(f"{max(number - 1, 0)} of {total} lines, {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
