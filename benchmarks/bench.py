"""Speed and memory beside the alternatives, in one run: `make bench` writes docs/benchmarks.md.

Every line is a median over repeats (the slow peers run once), in this process unless said; ratios compare lines of the
same run on the same data. Exactness is checked against float64 on the same data before a time is worth printing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from page import Line, machine, summary

import anisoscope as an
from anisoscope.measures.frames import local_frames, neighborhoods
from anisoscope.measures.integers import integer_products, integers_serve
from anisoscope.stats.precision import crew

WIDTH = 768
SEED = 0
GPU = "## GPU"
PARTS = ("two_nn", "states", "profile", "spectrum", "cosine", "local", "seminmf", "memory", "import")
Part = tuple[list[str], list[Line]]
"""Text of the page, and lines of the table at its head."""


def clock(function: Callable[[], object], repeats: int) -> float:
    """Median seconds; the first call of several is a warm-up."""
    times = []
    for _ in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] if repeats > 1 else times)


def manifold(n: int, dimension: int = 12, noise: float = 0.0) -> torch.Tensor:
    """A smooth curved image of a 12-dimensional cube in 768 dimensions, float32."""
    g = torch.Generator().manual_seed(SEED)
    z = torch.rand(n, dimension, generator=g)
    features = torch.cat(
        [z @ torch.randn(dimension, 32, generator=g), torch.sin(z @ torch.randn(dimension, 64, generator=g))], dim=1
    )
    rows = features @ torch.randn(96, WIDTH, generator=g) / 96**0.5
    return rows + noise * torch.randn(n, WIDTH, generator=g)


def gaussian(n: int) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(SEED))


def tiled_top2(x: torch.Tensor) -> torch.Tensor:
    """The plain way: squared distances tile by tile with a matrix product, the two smallest of each row.

    Tiles of columns into one buffer, so that it pays for arithmetic and not for fresh memory.
    """
    square, tile = x.square().sum(dim=1), 2048
    best = torch.full((len(x), 2), torch.inf)
    buffer = torch.empty(tile, tile)
    for a in range(0, len(x), tile):
        rows = slice(a, a + tile)
        for b in range(0, len(x), tile):
            columns = slice(b, b + tile)
            d2 = torch.addmm(square[None, columns], x[rows], x[columns].T, alpha=-2, out=buffer)
            if a == b:
                d2.fill_diagonal_(torch.inf)
            near = d2.topk(2, dim=1, largest=False).values
            best[rows] = torch.cat([best[rows], near], dim=1).topk(2, dim=1, largest=False).values
    return (best + square[:, None]).clamp_min(0).sqrt()


def products_alone(x: torch.Tensor) -> None:
    """The limit: rows as small integers where the processor multiplies them, each pair of tiles once, nothing else."""
    cores, tile = torch.get_num_threads(), 2048
    pairs = iter([(a, b) for a in range(0, len(x), tile) for b in range(a, len(x), tile)])
    codes = torch.empty(x.shape, dtype=torch.int8).fill_(3) if integers_serve() else x

    def multiply(_: int) -> None:
        room = torch.empty(tile, tile, dtype=torch.int32 if integers_serve() else x.dtype)
        for a, b in pairs:
            one, two = codes[a : a + tile], codes[b : b + tile]
            out = room.view(-1)[: len(one) * len(two)].view(len(one), len(two))
            integer_products(one, two, out) if integers_serve() else torch.mm(one, two.T, out=out)

    with crew(cores) as each:
        each(multiply, range(cores))


def worst_error(x: torch.Tensor, sampled: int = 2000) -> float:
    """Largest relative error of r1 and r2 against float64 on sampled rows.

    Candidates come from a float64 product (sixteen a row, more than rounding could confuse), distances by differences.
    """
    ours = an.nearest_neighbors(x, 2).distances
    picks = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:sampled]
    wide = x.double()
    square = wide.square().sum(dim=1)
    worst = 0.0
    for part in picks.split(250):
        d2 = square[None, :] - 2 * wide[part] @ wide.T
        d2[torch.arange(len(part)), part] = torch.inf
        near = d2.topk(16, dim=1, largest=False).indices
        exact = (wide[near] - wide[part][:, None]).square().sum(dim=2).sqrt().sort(dim=1).values[:, :2]
        worst = max(worst, float(((ours[part] - exact) / exact).abs().max()))
    return worst


ASK_DADAPY = """
import sys, time, numpy as np
from dadapy import Data
x = np.load(sys.argv[1])
start = time.perf_counter()
data = Data(x, verbose=False)
data.compute_distances(maxk=2)
data.compute_id_2NN()
print(time.perf_counter() - start)
"""


def dadapy_seconds(x: torch.Tensor) -> float | None:
    python = os.environ.get("ANISOSCOPE_DADAPY")
    if not python:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, x.numpy())
        answer = subprocess.run([python, "-c", ASK_DADAPY, str(path)], capture_output=True, text=True, check=True)
    return float(answer.stdout.split()[-1])


def skdim_seconds(x: torch.Tensor) -> float | None:
    try:
        from skdim.id import TwoNN
    except ImportError:
        return None
    return clock(lambda: TwoNN().fit(x.numpy()), 1)


def bench_two_nn(sizes: list[int], peers: bool) -> Part:
    told: list[Line] = []
    lines = [
        "## TwoNN, width 768, float32",
        "",
        "| data | N | anisoscope | of that, the search | tiled matmul + top-2 | scikit-dimension | dadapy | "
        "matmul / ours | scikit-dimension / ours | dadapy / ours | products alone | search / products | "
        "worst error of r1, r2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n in sizes:
        for name, rows in (
            ("12-dimensional manifold", manifold(n)),
            ("the same with noise", manifold(n, noise=0.02)),
            ("variances as 1/rank", gaussian(n) * torch.arange(1, WIDTH + 1) ** -0.5),
            ("isotropic Gaussian", gaussian(n)),
        ):
            ours = clock(lambda rows=rows: an.two_nn(rows), 1 if n > 32768 else 3)
            search = clock(lambda rows=rows: an.nearest_neighbors(rows, 2), 1 if n > 32768 else 3)
            plain = clock(lambda rows=rows: tiled_top2(rows), 1)
            ask = peers and name == "12-dimensional manifold"
            sk, da = (skdim_seconds(rows), dadapy_seconds(rows)) if ask else (None, None)
            least, error = clock(lambda rows=rows: products_alone(rows), 3), worst_error(rows)
            if n == sizes[-1]:
                what = f"`two_nn`, {name}, N = {n:,}, D = {WIDTH}"
                others = (("tiled matmul + top-2", plain), ("scikit-dimension", sk), ("dadapy", da))
                limit = "each product once, in int8" if integers_serve() else "each product once"
                told += [Line(what, ours, one, time, limit, least, error) for one, time in others if time is not None]
            lines.append(
                f"| {name} | {n:,} | {ours:.2f} s | {search:.2f} s | {plain:.2f} s | {seconds(sk)} | {seconds(da)} | "
                f"{plain / ours:.1f} | {ratio(sk, ours)} | {ratio(da, ours)} | {least:.2f} s | {search / least:.1f} | "
                f"{error:.0e} |"
            )
            print(lines[-1], flush=True)
    how = "int8" if integers_serve() else "float32"
    words = f"Products alone: each pair of rows multiplied once, in {how}, and nothing done with it."
    return [*lines, "", words], told


def official_anisotropy(x: torch.Tensor) -> float:
    """The procedure of the published code: full SVD of the centred rows."""
    _, s, _ = torch.linalg.svd(x - x.mean(dim=0, keepdim=True), full_matrices=False)
    values = s * s / (len(x) - 1)
    return float(values.max() / values.sum())


def of_spectrum(sigma: torch.Tensor) -> dict[str, float]:
    """Measures of singular values."""
    p, largest = sigma / sigma.sum(), sigma.max()
    return {
        "spectral_ratio": float(largest**2 / sigma.square().sum()),
        "spectral_ratio_l1": float(largest / sigma.sum()),
        "effective_rank": float(torch.exp(-torch.special.xlogy(p, p).sum())),
        "participation_ratio": float(sigma.square().sum() ** 2 / sigma.pow(4).sum()),
    }


def centred_product(x: torch.Tensor) -> torch.Tensor:
    y = x - x.mean(dim=0)
    return y.T @ y


def bench_spectrum(n: int) -> Part:
    told: dict[str, list[list[Line]]] = {}
    g = torch.Generator().manual_seed(SEED)
    spread = torch.logspace(0, -6, WIDTH)
    base = torch.randn(n, WIDTH, generator=g)
    clouds = {
        "decaying spectrum, mean of 5 spreads": base * torch.linspace(1, 0.05, WIDTH) + 5,
        "spectrum over six decades": base * spread,
        "the same, mean of 100 spreads": base * spread + 100,
    }
    lines = [
        f"## Spectra, N = {n:,}, width 768, float32",
        "",
        "| data | measure | anisoscope | full SVD (published code) | svdvals | product and eigvalsh | its error | "
        "one product x^T x | SVD / ours | ours / product | error, float64 SVD |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, x in clouds.items():
        truth = of_spectrum(torch.linalg.svdvals(x.double() - x.double().mean(dim=0)))
        rough = of_spectrum(torch.linalg.eigvalsh(centred_product(x)).double().clamp_min(0).sqrt())
        full = clock(lambda x=x: official_anisotropy(x), 3)
        values = clock(lambda x=x: torch.linalg.svdvals(x - x.mean(dim=0)), 3)
        product = clock(lambda x=x: x.T @ x, 3)
        gram = clock(lambda x=x: torch.linalg.eigvalsh(centred_product(x)), 3)
        for measure, expected in truth.items():
            options = {"bias": "plugin"} if measure == "participation_ratio" else {}
            function = getattr(an, measure)
            ours = clock(lambda f=function, x=x, o=options: f(x, **o), 3)
            error = abs(float(function(x, **options)) - expected) / expected
            what = f"`{measure}`, N = {n:,}, D = {WIDTH}, {name}"
            theirs = abs(rough[measure] - expected) / expected
            others = (("full SVD", full), (f"product and eigvalsh, error {theirs:.0e}", gram))
            told.setdefault(measure, []).append(
                [Line(what, ours, other, time, "one product x^T x", product, error) for other, time in others]
            )
            lines.append(
                f"| {name} | `{measure}` | {ours:.3f} s | {full:.2f} s | {values:.2f} s | {gram:.3f} s | "
                f"{theirs:.0e} | {product:.3f} s | {full / ours:.1f} | {ours / product:.1f} | {error:.0e} |"
            )
            print(lines[-1], flush=True)
    slowest = [max(each, key=lambda one: one[0].ours) for each in told.values()]
    return lines, [line for each in slowest for line in each]


def bench_cosine(n: int) -> Part:
    x = gaussian(n) + 0.3
    read = clock(x.sum, 9)
    weights = torch.ones(n)
    product = clock(lambda: weights @ x, 9)
    columns = clock(lambda: x.sum(dim=0), 9)
    norms = clock(lambda: torch.linalg.vector_norm(x, dim=1), 9)
    ours = clock(lambda: an.mean_cosine(x), 9)

    def all_pairs() -> float:
        unit = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return (sum(float((part @ unit.T).sum(dtype=torch.float64)) for part in unit.split(1024)) / n - 1) / (n - 1)

    pairs = clock(all_pairs, 1)
    unit = x.double() / torch.linalg.vector_norm(x.double(), dim=1, keepdim=True)
    exact = (float(unit.sum(dim=0).square().sum()) / n - 1) / (n - 1)
    error = abs(float(an.mean_cosine(x)) / exact - 1)
    what = f"`mean_cosine` with error bar, N = {n:,}, D = {WIDTH}"
    told = [Line(what, ours, "all pairs by tiled matmul", pairs, "the sum of each column", columns, error)]
    return [
        f"## Mean cosine, N = {n:,}, width 768, float32",
        "",
        "| what | seconds | relative to the sum of all elements | relative to the sum of each column |",
        "|---|---|---|---|",
        *(
            f"| {what} | {took:.4g} | {took / read:.{digits}f} | {took / columns:.{digits}f} |"
            for what, took, digits in (
                ("one read: sum of all elements", read, 1),
                ("one read: row lengths", norms, 1),
                ("one read: sum of each column", columns, 1),
                ("one read: matrix-vector product", product, 1),
                ("`mean_cosine`, with error bar", ours, 1),
                ("all pairs by tiled matmul", pairs, 0),
            )
        ),
        "",
        "Every row is needed twice, for its length and then for its direction; the second time it comes from cache.",
        "The sum of all elements is the fastest read there is, and keeps nothing; a sum of each column, the mean row,",
        "is the simplest read that keeps a vector.",
    ], told


def bench_local() -> Part:
    x = manifold(65536, noise=0.02)
    found = neighborhoods(x, 64, 1024)

    def batched_svd() -> torch.Tensor:
        frames = []
        for part in found.members.split(64):
            local = x[part]
            frames.append(torch.linalg.svd(local - local.mean(dim=1, keepdim=True), full_matrices=False).Vh[:, :12])
        return torch.cat(frames).transpose(1, 2)

    svd = clock(batched_svd, 3)
    ours = clock(lambda: local_frames(x, found, 12), 3)

    def products() -> None:
        for part in found.members.split(64):
            local = x[part]
            torch.bmm(local, local.mT)

    least = clock(products, 3)
    cosines = torch.linalg.svdvals(
        local_frames(x, found, 12).tangents.transpose(1, 2).double() @ batched_svd().double()
    )
    largest = float(torch.acos(cosines.clamp(max=1)).max())
    angle = math.degrees(largest)
    what = f"local tangents of 1,024 points, 64 neighbours, D = {WIDTH}, after their search"
    told = [Line(what, ours, "batched SVD", svd, "products of the rows of each neighbourhood", least, largest)]
    return [
        "## Local tangents, 1,024 points, 64 neighbours, width 768, float32",
        "",
        "| what | seconds | SVD / ours | largest principal angle between the two |",
        "|---|---|---|---|",
        f"| batched SVD, 64 points at a time | {svd:.2f} | {svd / ours:.1f} | |",
        f"| `local_tangents`, after the neighbour search | {ours:.2f} | | {angle:.2g} degrees |",
        f"| products of the rows of each neighbourhood alone | {least:.3f} | | |",
    ], told


PEAK = """
import json, sys, threading, time, torch, anisoscope as an
x = torch.randn({n}, 768, generator=torch.Generator().manual_seed(0))
an.{warm}(x[:2048])
def rss():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
base, peak, done = rss(), [0], []
def watch():
    while not done:
        peak[0] = max(peak[0], rss()); time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
an.{warm}(x); done.append(1); thread.join()
print(json.dumps([(peak[0] - base) / 1e6, x.numel() * 4 / 1e6]))
"""


def bench_memory(n: int) -> Part:
    lines = [
        f"## Memory beyond the input, N = {n:,}, width 768, float32 (own process)",
        "",
        "| measure | input | peak beyond it | share |",
        "|---|---|---|---|",
    ]
    for name in ("two_nn", "spectral_ratio", "effective_rank", "mean_cosine", "local_pca_dimension"):
        answer = subprocess.run(
            [sys.executable, "-c", PEAK.format(n=n, warm=name)], capture_output=True, text=True, check=True
        )
        peak, size = json.loads(answer.stdout.strip().splitlines()[-1])
        lines.append(f"| `{name}` | {size:.0f} MB | {peak:.0f} MB | {peak / size:.2f} |")
        print(lines[-1], flush=True)
    return lines, []


def bench_import() -> Part:
    code = (
        "import time; t=time.perf_counter(); import torch; u=time.perf_counter(); "
        "import anisoscope as an; an.two_nn; v=time.perf_counter(); print(u-t, v-u)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(5)
    ]
    torch_time = statistics.median(float(run[0]) for run in runs)
    ours = statistics.median(float(run[1]) for run in runs)
    return [
        "## Import",
        "",
        f"torch {torch_time:.2f} s; `import anisoscope` with `an.two_nn` loaded, beyond torch: {ours:.2f} s.",
    ], []


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def ratio(value: float | None, ours: float) -> str:
    return "" if value is None else f"{value / ours:.1f}"


HEADING = (
    "Written by `make bench`. Medians; ratios compare lines of this one run, on the same data in the same process."
)
WORDS = (
    "The limit is work that every way has to do, done once and alone as torch does it; ours is below it where another "
    "library does it sooner (docs/architecture.md). Of spectra and of the states of a model the least favourable of "
    "several data sets or sites; every line is below."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="where to write the page; default: standard output")
    parser.add_argument("--quick", action="store_true", help="small sizes, no peers")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    args = parser.parse_args()
    from published import bench_seminmf  # they take clocks and alternatives from here
    from states import bench_profile, bench_states

    n = 8192 if args.quick else 65536
    parts: dict[str, Callable[[], Part]] = {
        "two_nn": lambda: bench_two_nn([8192] if args.quick else [16384, 65536], peers=not args.quick),
        "states": lambda: bench_states(4096 if args.quick else 32768),
        "profile": bench_profile,
        "spectrum": lambda: bench_spectrum(n),
        "cosine": lambda: bench_cosine(n),
        "local": bench_local,
        "seminmf": lambda: bench_seminmf(n),
        "memory": lambda: bench_memory(n),
        "import": bench_import,
    }
    sections: list[str] = []
    told: list[Line] = []
    for name, part in parts.items():
        if not args.only or name in args.only:
            print(f"... {name}", flush=True)
            section, lines = part()
            sections += [*section, ""]
            told += lines
    page = ["# Benchmarks", "", HEADING, "", machine(torch.get_num_threads(), os.environ.get("ANISOSCOPE_DADAPY")), ""]
    text = "\n".join([*page, "## In one table", "", *summary(told), "", WORDS, "", *sections])
    if args.write:
        before = args.write.read_text(encoding="utf-8") if args.write.exists() else ""
        kept = before[before.index(GPU) :] if GPU in before else ""  # what `make bench-gpu` wrote elsewhere stays
        args.write.write_text(f"{text.rstrip()}\n\n{kept}".rstrip() + "\n", encoding="utf-8")
        print("\n".join([*summary(told), f"written: {args.write}"]))
    else:
        print(text)


if __name__ == "__main__":
    main()
