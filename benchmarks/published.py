"""Semi-NMF as published, beside which ours is timed: multiplicative updates, and how soon we are where they end."""

from __future__ import annotations

import time

import torch
from page import Line

from anisoscope.tangent.seminmf import fit_seminmf

MOST = 80  # rounds


def multiplicative(a: torch.Tensor, rank: int, iterations: int = 500) -> float:
    """The published updates from random codes; the relative squared error at the end."""
    codes = torch.rand(len(a), rank, generator=torch.Generator(a.device).manual_seed(0), device=a.device) + 0.2
    for _ in range(iterations):
        concepts = torch.linalg.lstsq(codes.T @ codes, codes.T @ a).solution
        cross, gram = a @ concepts.T, concepts @ concepts.T
        up = cross.clamp_min(0) + codes @ (-gram).clamp_min(0)
        down = (-cross).clamp_min(0) + codes @ gram.clamp_min(0) + 1e-12
        codes = codes * (up / down).sqrt()
    concepts = torch.linalg.lstsq(codes.T @ codes, codes.T @ a).solution
    return float((a - codes @ concepts).square().sum() / a.square().sum())


def rounds_to(a: torch.Tensor, rank: int, error: float) -> int:
    """How many rounds of ours reach this error; a RuntimeError where MOST do not."""
    history = fit_seminmf(a, rank, max_iter=MOST, tolerance=0.0).history
    rounds = next((at // 2 + 1 for at, one in enumerate(history) if at % 2 and one <= error), MOST)
    while rounds < MOST and fit_seminmf(a, rank, max_iter=rounds, tolerance=0.0).error > error:
        rounds += 1
    if rounds == MOST and history[-1] > error:
        raise RuntimeError(f"semi-NMF of rank {rank} did not reach {error:.5f} in {MOST} rounds")
    return rounds


def bench_seminmf(n: int) -> tuple[list[str], list[Line]]:
    """To the error that 500 published updates reach from the same rows, each from its own random or k-means start."""
    from bench import SEED, WIDTH, clock

    g = torch.Generator().manual_seed(SEED)
    parts = torch.rand(n, 96, generator=g)
    a = (parts * (parts > 0.8)) @ torch.randn(96, WIDTH, generator=g) + 0.5 * torch.randn(n, WIDTH, generator=g)
    a = a - a.mean(dim=0)
    lines = [
        f"## Semi-NMF, N = {n:,}, width 768, float32",
        "",
        "| K | 500 multiplicative updates | their error | ours, to their error | rounds | ratio | its products alone | "
        "ours / products | ours, default | its error | sparsity |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    told = []
    for rank in (16, 64):
        start = time.perf_counter()
        error = multiplicative(a, rank)
        theirs = time.perf_counter() - start
        rounds = rounds_to(a, rank, error)
        ours = clock(lambda r=rank, s=rounds: fit_seminmf(a, r, max_iter=s, tolerance=0.0), 3)
        codes, concepts = torch.rand(n, rank, generator=g), torch.randn(rank, WIDTH, generator=g)
        least = rounds * clock(lambda z=codes, c=concepts: (a @ c.T, z.T @ a), 5)
        whole, found = clock(lambda r=rank: fit_seminmf(a, r), 1), fit_seminmf(a, rank)
        lines.append(
            f"| {rank} | {theirs:.2f} s | {error:.5f} | {ours:.2f} s | {rounds} | {theirs / ours:.1f} | "
            f"{least:.3f} s | {ours / least:.1f} | {whole:.2f} s | {found.error:.5f} | {found.sparsity:.2f} |"
        )
        print(lines[-1], flush=True)
        what = f"semi-NMF to their error, K = {rank}, N = {n:,}, D = {WIDTH}"
        told.append(Line(what, ours, "500 multiplicative updates", theirs, f"products of {rounds} rounds", least))
    words = "Products alone: rows by concepts and codes by rows, once for each round; starts are made besides."
    return [*lines, "", words], told
