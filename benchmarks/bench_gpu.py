"""Speed on a GPU beside the alternatives and the limit of the machine, in one run: `make bench-gpu`.

Each line is the least of a few repeats after a warm-up, with the device waited for. Exactness is checked in the same
run. One table of all comes first on the page, then one for each part. Parts can be chosen:
python benchmarks/bench_gpu.py neighbours spectrum matrices products seminmf look overhead [--write FILE]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from page import Line, summary
from published import multiplicative, rounds_to

import anisoscope as an
from anisoscope.measures import tridiagonal
from anisoscope.measures.banded import banded
from anisoscope.measures.chased import chased
from anisoscope.stats.gram_matrices import cell_grams

DEVICE = "cuda"
WIDTH = 768
WORDS = "The limit is work that every way has to do, done once and alone in this run by plain products."


def clock(function: Callable[[], object], repeats: int = 3) -> float:
    """Least seconds after a warm-up."""
    function()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass
class Table:
    """One table of the page."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    words: str = ""
    lines: list[Line] = field(default_factory=list)
    """Of the table at the head of the page."""

    def add(self, *cells: str) -> None:
        """One more line, printed at once."""
        self.rows.append(cells)
        print(" | ".join(cells), flush=True)

    def text(self) -> str:
        """As Markdown."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.words, ""] if self.words else [*lines, ""])


def seconds(value: float) -> str:
    """Milliseconds below a second."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def clouds(n: int) -> dict[str, torch.Tensor]:
    """What the search is tried on: nothing to hold on to, a curved sheet, a huge mean, copies."""
    z = torch.rand(n, 12, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    features = torch.cat([z @ draw(12, 32, seed=2), torch.sin(z @ draw(12, 64, seed=3))], dim=1)
    copies = draw(n, WIDTH, seed=6)
    copies[n // 2 : n // 2 + n // 8] = copies[: n // 8]
    return {
        "isotropic": draw(n, WIDTH),
        "manifold": features @ draw(96, WIDTH, seed=4) / 96**0.5,
        "huge mean": draw(n, WIDTH, seed=5) + 1000,
        "copies": copies,
    }


def by_cdist(x: torch.Tensor) -> torch.Tensor:
    """What people write: distances to all rows, the three least (a row is its own nearest)."""
    return torch.cat([torch.cdist(part, x).topk(3, dim=1, largest=False).values[:, 1:] for part in x.split(8192)])


def by_tiles(x: torch.Tensor) -> torch.Tensor:
    """The same with a product."""
    square = x.square().sum(dim=1)
    out = []
    for part, own in zip(x.split(8192), square.split(8192), strict=True):
        d2 = torch.addmm(square[None], part, x.T, alpha=-2)
        out.append((d2.topk(3, dim=1, largest=False).values[:, 1:] + own[:, None]).clamp_min(0).sqrt())
    return torch.cat(out)


def worst_error(x: torch.Tensor, found: torch.Tensor, sampled: int) -> float:
    """Largest relative error of r1 and r2 on sampled rows against float64: all pairs by products of centred rows, the
    sixteen nearest of them by differences."""
    worst, wide = 0.0, x.double()
    wide -= wide.mean(dim=0)
    square = wide.square().sum(dim=1)
    for at in torch.randperm(len(x), device=DEVICE)[:sampled].split(512):
        d2 = torch.addmm(square[None], wide[at], wide.T, alpha=-2)
        d2[torch.arange(len(at)), at] = torch.inf
        near = d2.topk(16, dim=1, largest=False).indices
        exact = (x[near].double() - x[at].double()[:, None]).square().sum(dim=2)
        truth = exact.sort(dim=1).values[:, :2].sqrt()
        error = torch.where(truth > 0, (found[at] - truth).abs() / truth, found[at].abs())
        worst = max(worst, float(error.max()))
    return worst


def ceiling(dtype: torch.dtype, inner: int = WIDTH, precise: bool = True) -> float:
    """Operations a second of a plain product."""
    torch.set_float32_matmul_precision("highest" if precise else "high")
    a = draw(16_384, inner).to(dtype)
    taken = clock(lambda: a @ a.T, 5)
    torch.set_float32_matmul_precision("highest")
    return 2 * len(a) ** 2 * inner / taken


def neighbours() -> list[Table]:
    limits = {name: ceiling(kind) for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16))}
    limits["TF32"] = ceiling(torch.float32, precise=False)
    words = "Products of 16,384 x 768 in this run: " + ", ".join(
        f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in limits.items()
    )
    table = Table(
        "Nearest two neighbours, exact, D = 768",
        ("N", "rows", "how", "time", "against ours", "share of the bfloat16 product", "largest error of r1, r2"),
        words=words + ". The share counts 2 N^2 D operations; each pair is multiplied once, so it may exceed 100 %. "
        "Errors are those of 10,000 sampled rows (200 for the alternatives and the last line).",
    )
    for n, sampled in ((65_536, 10_000), (262_144, 10_000)):
        for name, x in clouds(n).items():
            ours = clock(lambda x=x: an.nearest_neighbors(x, 2))
            found = an.nearest_neighbors(x, 2).distances
            share = 2 * n * n * WIDTH / ours / limits["bfloat16"]
            error = worst_error(x, found, sampled)
            table.add(f"{n:,}", name, "ours", seconds(ours), "1", f"{share:.0%}", f"{error:.1e}")
            what = f"two nearest neighbours, {name}, N = {n:,}, D = {WIDTH}"
            limit, least = "all products, 2 N^2 D in bfloat16", 2 * n * n * WIDTH / limits["bfloat16"]
            if name != "isotropic":
                table.lines.append(Line(what, ours, limit=limit, least=least, error=error))
                continue
            exact = error
            for other, function in (("cdist and topk", by_cdist), ("tiled product and topk", by_tiles)):
                taken = clock(lambda f=function, x=x: f(x), 1)
                error = worst_error(x, function(x), 200)
                share = 2 * n * n * WIDTH / taken / limits["bfloat16"]
                table.add(f"{n:,}", name, other, seconds(taken), f"{taken / ours:.1f}x", f"{share:.0%}", f"{error:.1e}")
                table.lines.append(Line(what, ours, f"{other}, errors {error:.0e}", taken, limit, least, exact))
            torch.set_float32_matmul_precision("high")
            taken, error = clock(lambda x=x: by_tiles(x), 1), worst_error(x, by_tiles(x), 200)
            torch.set_float32_matmul_precision("highest")
            share = 2 * n * n * WIDTH / taken / limits["bfloat16"]
            ratio = f"{taken / ours:.1f}x"
            other = "tiled product in TF32"
            table.add(f"{n:,}", name, other, seconds(taken), ratio, f"{share:.0%}", f"{error:.1e}")
            table.lines.append(Line(what, ours, f"{other}, errors {error:.0e}", taken, limit, least, exact))
        del x, found
    n, x = 1_048_576, draw(1_048_576, WIDTH)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    taken = clock(lambda: an.two_nn(x), 1)
    peak = torch.cuda.max_memory_allocated() / 1e9
    share = 2 * n * n * WIDTH / taken / limits["bfloat16"]
    error = worst_error(x, an.nearest_neighbors(x, 2).distances, 200)
    table.add(
        f"{n:,}", "isotropic", f"`two_nn`, peak {peak:.0f} GB", seconds(taken), "", f"{share:.0%}", f"{error:.1e}"
    )
    what, least = f"`two_nn`, isotropic, N = {n:,}, D = {WIDTH}", 2 * n * n * WIDTH / limits["bfloat16"]
    table.lines.append(Line(what, taken, limit="all products, 2 N^2 D in bfloat16", least=least, error=error))
    return [table]


def spectrum() -> list[Table]:
    table = Table(
        "Spectra, N = 65,536",
        ("D", "what", "time", "full SVD", "ratio", "product and eigvalsh", "ratio", "its error", "product alone",
         "ours / product", "relative error"),
        words="What people write: singular values of the centred rows, or eigenvalues of their product in float32. "
        "Measures of the largest eigenvalue need that product or less, the others the whole spectrum.",
    )  # fmt: skip
    for width in (768, 4096):
        scale = torch.arange(1, width + 1, device=DEVICE) ** -0.5
        x = draw(65_536, width) * scale
        y = x - x.mean(dim=0)
        svd = clock(lambda y=y: torch.linalg.svdvals(y), 1)
        product = clock(lambda y=y: y.T @ y)
        gram = clock(lambda y=y: torch.linalg.eigvalsh(y.T @ y))
        truths, rough = shares(torch.linalg.svdvals(y.double())), shares(torch.linalg.eigvalsh(y.T @ y).double().sqrt())
        del y
        for name, truth in truths.items():
            options = {"bias": "plugin"} if name == "participation_ratio" else {}
            taken = clock(lambda n=name, x=x, o=options: getattr(an, n)(x, **o))
            error, theirs = (abs(one / truth - 1) for one in (getattr(an, name)(x, **options).value, rough[name]))
            table.add(
                f"{width:,}", f"`{name}`", seconds(taken), seconds(svd), f"{svd / taken:.1f}x", seconds(gram),
                f"{gram / taken:.1f}x", f"{theirs:.0e}", seconds(product), f"{taken / product:.1f}", f"{error:.1e}",
            )  # fmt: skip
            what, limit = f"`{name}`, N = 65,536, D = {width:,}", "one product x^T x in float32"
            others = (("full SVD", svd), (f"product and eigvalsh, error {theirs:.0e}", gram))
            table.lines += [Line(what, taken, other, time, limit, product, error) for other, time in others]
    return [table]


def shares(sigma: torch.Tensor) -> dict[str, float]:
    """Measures of singular values; NaN, which roots of small negative eigenvalues are, counts as none."""
    s = sigma.nan_to_num().sort(descending=True).values
    p = s / s.sum()
    return {
        "spectral_ratio": float(s[0] ** 2 / (s**2).sum()),
        "effective_rank": float(torch.exp(-torch.special.xlogy(p, p).sum())),
        "stable_rank": float((s**2).sum() / s[0] ** 2),
        "participation_ratio": float((s**2).sum() ** 2 / (s**4).sum()),
    }


def matrices() -> list[Table]:
    """All eigenvalues of many covariances, as a look wants them."""
    table = Table(
        "Many symmetric matrices, float64: all eigenvalues",
        ("matrices", "D", "`torch.linalg.eigvalsh`, one after another", "together, by band forms", "ratio",
         "error, of the largest"),
    )  # fmt: skip
    for many, width in ((9, 384), (14, 896), (25, 2048), (8, 4096)):
        rows = draw(many, 2 * width, width).double()
        a = rows.mT @ rows / (2 * width)
        del rows

        def ours(a: torch.Tensor = a) -> torch.Tensor:
            return tridiagonal.eigenvalues(*chased(banded(a).band))

        library, taken = clock(lambda a=a: torch.linalg.eigvalsh(a), 2), clock(ours)
        truth = torch.linalg.eigvalsh(a)
        error = float(((ours() - truth).abs() / truth[:, -1:]).max())
        table.add(f"{many}", f"{width:,}", seconds(library), seconds(taken), f"{library / taken:.1f}x", f"{error:.0e}")
        what = f"eigenvalues of {many} matrices of {width:,}, float64"
        table.lines.append(Line(what, taken, "`torch.linalg.eigvalsh`, one after another", library, error=error))
    return [table]


def seminmf() -> list[Table]:
    from anisoscope.tangent.seminmf import fit_seminmf

    table = Table(
        "Semi-NMF, N = 65,536, D = 768",
        (
            "K",
            "500 multiplicative updates",
            "their error",
            "ours, to their error",
            "rounds",
            "ratio",
            "its products alone",
            "ours / products",
            "ours, default",
            "its error",
            "sparsity",
        ),
    )
    parts = torch.rand(65_536, 96, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    a = (parts * (parts > 0.8)) @ draw(96, WIDTH, seed=2) + 0.5 * draw(65_536, WIDTH, seed=3)
    a = a - a.mean(dim=0)
    for rank in (16, 64):
        theirs = clock(lambda r=rank: multiplicative(a, r), 1)
        error = multiplicative(a, rank)
        steps = rounds_to(a, rank, error)
        there = clock(lambda r=rank, s=steps: fit_seminmf(a, r, max_iter=s, tolerance=0.0), 3)
        codes, concepts = draw(len(a), rank), draw(rank, WIDTH)
        least = steps * clock(lambda z=codes, c=concepts: (a @ c.T, z.T @ a), 5)
        ours, found = clock(lambda r=rank: fit_seminmf(a, r), 2), fit_seminmf(a, rank)
        table.add(f"{rank}", seconds(theirs), f"{error:.5f}", seconds(there), f"{steps}", f"{theirs / there:.1f}x",
                  seconds(least), f"{there / least:.1f}", seconds(ours), f"{found.error:.5f}",
                  f"{found.sparsity:.2f}")  # fmt: skip
        what = f"semi-NMF to their error, K = {rank}, N = 65,536, D = {WIDTH}"
        limit = f"products of {steps} rounds in float32"
        table.lines.append(Line(what, there, "500 multiplicative updates", theirs, limit, least))
    return [table]


def products(sites: int = 25, n: int = 8192, width: int = 2048) -> list[Table]:
    """``y^T y`` of wide rows by one launch and in float64, as a look at frequency bins wants them and as a whole."""
    table = Table(
        f"Products of wide rows, {sites} sites of {n:,} rows, D = {width:,}",
        ("cells", "way", "float64", "ours", "ratio", "error, of the lengths of columns"),
    )
    rows = draw(sites, n, width)
    for ends in ([n * cell // 8 for cell in range(1, 9)], [n]):
        wide = rows.double()
        right = cell_grams(wide[:1], ends)
        size = right.diagonal(dim1=2, dim2=3).sqrt()
        alone = clock(lambda some=wide, ends=ends: cell_grams(some, ends))
        del wide
        for way, exact in (("two float16", False), ("remainders of integers", True)):
            found = cell_grams(rows[:1], ends, exact=exact)
            error = float(((found - right).abs() / (size[..., None] * size[..., None, :])).max())
            ours = clock(lambda ends=ends, exact=exact: cell_grams(rows, ends, exact=exact))
            table.add(f"{len(ends)}", way, seconds(alone), seconds(ours), f"{alone / ours:.1f}x", f"{error:.1e}")
            what = f"x^T x of {sites} sites of {n:,} rows of {width:,}, {len(ends)} cells, {way}"
            table.lines.append(Line(what, ours, "the same in float64", alone, error=error))
    return [table]


PARTS: dict[str, Callable[[], list[Table]]] = {
    "neighbours": neighbours, "spectrum": spectrum, "matrices": matrices, "products": products,
    "seminmf": seminmf,
}  # fmt: skip


def main() -> None:
    """Run the parts and write the page."""
    from bench_look import look, overhead

    parts = PARTS | {"look": look, "overhead": overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all of them where none is named")
    parser.add_argument("--write", type=Path, default=None)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu: no GPU here; `make bench` is for the CPU")
    unknown = [name for name in given.parts if name not in parts]
    if unknown:
        sys.exit(f"bench_gpu: no part {unknown[0]!r}; there are {', '.join(parts)}")
    tables: list[Table] = []
    for name in given.parts or parts:
        tables += parts[name]()
        if given.write is not None:  # what is there is there, should the next part fail
            _write(given.write, _page(tables))
    print(_page(tables))


def _write(target: Path, page: str) -> None:
    """Put the page in place of the part of the file that begins with its heading, or behind the file."""
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    start = before.find(page.splitlines()[0])
    target.write_text(f"{before[:start] if start >= 0 else before}{page}", encoding="utf-8")


def _page(tables: list[Table]) -> str:
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    head = [f"{machine}, {datetime.date.today()}. `make bench-gpu`.", ""]
    head += ["### In one table", "", *summary([line for table in tables for line in table.lines]), "", WORDS, ""]
    return "\n".join(["## GPU", "", *head, *(table.text() for table in tables)])


if __name__ == "__main__":
    main()
