"""How cost grows: time and peak memory of the hot paths on the CPU, as laws with intervals, and what they predict.

    python benchmarks/cost.py                      # everything, nine minutes on two quiet cores
    python benchmarks/cost.py --quick              # small sizes, for a look at the script and not at the machine
    python benchmarks/cost.py --only moments eigh --save cost.json    # some parts; the file keeps those of earlier runs
    python benchmarks/cost.py --only --save cost.json                 # nothing new: the tables of what the file holds

A law is ``seconds = c N^a D^b ...``, with an overhead where one is told, fitted to the logarithms of medians over
repeats. Its interval is that of Student's t, from the scatter of the points about the law or of the repeats about their
median, whichever is more. It says how well an exponent is known IF the law holds; the misfit says how far it does.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from hot_paths import (
    CHUNK,
    Job,
    crossed,
    decaying,
    eigh,
    gaussian,
    global_measures,
    look,
    manifold,
    moments,
    proxy,
    rank_sweep,
    sketch,
    tangents,
    two_nn_of,
)
from laws import At, Law, fit_law
from merging import merging
from page import processor

from anisoscope.stats.sketch import Sketch

ROWS, WIDTHS = (512, 2048, 8192, 32_768, 131_072, 262_144), (64, 128, 256, 512, 1024, 2048)
LEAST_PEAK = 4e6  # bytes: smaller peaks are the allocator's
LARGE = {"N": 16_384, "D": 8192}  # a site of a model of 70 B weights, at one look
SITES = 82  # its embedding, 80 layers and final norm
CROSSING = {"N": 16_384, "D": 2304}  # where the laws of exact moments and of a sketch of rank 128 meet
CHECKS = (
    ("moments", CROSSING),
    ("sketch", CROSSING | {"r": 128}),
    ("moments", LARGE),
    ("sketch", LARGE | {"r": 128}),
    ("sketch", LARGE | {"r": 256}),
)


@dataclass(frozen=True)
class Point:
    """Seconds of each repeat at one size, and the peak of resident memory beyond what was there before, in bytes."""

    at: dict[str, int]
    seconds: list[float]
    peak: float
    others: float = 0.0
    """Cores that other processes kept busy meanwhile: above a few hundredths the seconds are not worth much."""


def law_of(points: Sequence[Point], family: Family) -> Law:
    """The law of the medians from where it holds."""
    points = [one for one in points if family.holds(one.at)]
    if len(points) < len(family.axes) + 3:
        raise ValueError(f"{len(points)} points are too few for a law")
    errors = [np.std(np.log(one.seconds), ddof=1) / len(one.seconds) ** 0.5 for one in points if len(one.seconds) > 1]
    error = 1.2533 * float(np.sqrt(np.mean(np.square(errors))))  # a median is that much less sharp than a mean
    values = [statistics.median(one.seconds) for one in points]
    return fit_law([one.at for one in points], values, family.axes, error, overhead=not family.above)


def memory_law(points: Sequence[Point], family: Family) -> Law | None:
    """The law of the peaks; None where most are too small to tell."""
    large = [one for one in points if one.peak > LEAST_PEAK and family.holds(one.at)]
    used = [axis for axis in family.axes if len({one.at[axis] for one in large}) > 2]
    if not used or len(large) < len(used) + 3:
        return None
    return fit_law([one.at for one in large], [one.peak for one in large], used)


# --- measuring -----------------------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS, or VmHWM, the peak since it was last reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(field)))


def busy() -> float:
    """Core-seconds in which this machine worked for anyone, since it started."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / 100


def measured(at: At, job: Job, *, once: bool = False) -> Point:
    """The first run warms up and shows the peak; the repeats are timed. ``once``: the first is all there is."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory of the case before would hide what this one asks for
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    whole, worked, own = time.perf_counter(), busy(), time.process_time()
    began = time.perf_counter()
    job()
    first = time.perf_counter() - began
    peak = resident("VmHWM") - before
    taken = [first] if once or first > 2 else []  # nothing to warm up in so long a run
    enough = 1 if once or first > 10 else 2 if first > 2 else 3
    while not once and (len(taken) < enough or (sum(taken) < 0.5 and len(taken) < 9)):
        began = time.perf_counter()
        job()
        taken.append(time.perf_counter() - began)
    others = (busy() - worked - time.process_time() + own) / (time.perf_counter() - whole)
    return Point(dict(at), taken, float(max(peak, 0)), max(others, 0.0))


def grid(rows: Sequence[int], widths: Sequence[int], n: int, d: int, **fixed: int) -> list[dict[str, int]]:
    """Rows at one width, widths at one number of rows, and the corners where small meets large."""
    pairs = {*((m, d) for m in rows), *((n, w) for w in widths), (rows[0], widths[0]), (rows[-1], widths[0])}
    return [{"N": m, "D": w} | fixed for m, w in sorted(pairs)]


@dataclass(frozen=True)
class Family:
    """One hot path over its sizes. ``above``: the least sizes of the law; without them overhead is part of the law."""

    words: str
    axes: tuple[str, ...]
    make: Callable[[At], Job]
    sizes: list[dict[str, int]]
    above: Mapping[str, int] = field(default_factory=dict)

    def holds(self, at: At) -> bool:
        """Whether the law is fitted to this size."""
        return all(at[axis] >= least for axis, least in self.above.items())


MOST = WIDTHS[:5]
LARGE_ROWS = {"N": 2048, "D": 256}
FAMILIES = {
    "moments": Family("exact moments, float64", ("N", "D"), moments,
                      grid(ROWS, (*WIDTHS, 4096), 8192, 512), {"N": 2048, "D": 512}),
    "global": Family("four global measures with error bars, N >= 2 D", ("N", "D"), global_measures,
                     grid((1024, *ROWS[1:]), WIDTHS, 8192, 256), LARGE_ROWS),
    "eigh": Family("eigenvectors of the covariance", ("D",), eigh, [{"D": d} for d in (*WIDTHS, 4096)], {"D": 256}),
    "two_nn": Family("two_nn, curved 12-dimensional cloud with noise", ("N", "D"), two_nn_of(manifold),
                     grid(ROWS, MOST, 8192, 128)[1:], {"N": 2048}),
    "two_nn_white": Family("two_nn, white Gaussian: the worst case", ("N", "D"), two_nn_of(gaussian),
                           grid(ROWS, WIDTHS[:4], 8192, 128), {"N": 2048}),
    "tangents": Family("local_tangents, 256 anchors, 64 neighbours", ("N", "D"), tangents,
                       grid(ROWS, MOST, 8192, 256)),
    "pca": Family("PCA proxy, rank 16", ("N", "D"), proxy("pca"), grid(ROWS, MOST, 8192, 256), LARGE_ROWS),
    "seminmf": Family("semi-NMF proxy", ("N", "D", "K"), proxy("seminmf"),
                      [*grid(ROWS, (64, 128, 256, 512), 8192, 128, K=16),
                       *({"N": 8192, "D": 128, "K": k} for k in (2, 4, 8, 32, 64))]),
    "ranks": Family("sweep over ranks 2, 4, ..., K of semi-NMF, N = 4,096, D = 256", ("K",), rank_sweep,
                    [{"K": k} for k in (2, 4, 8, 16, 32, 64, 128)]),
    "crossed": Family("crossed energy tests, 2 bases, N = 4,096, D = 256", ("B", "K"), crossed,
                      [*({"B": b, "K": 16} for b in (19, 49, 99, 199, 499, 999, 1999)),
                       *({"B": 199, "K": k} for k in (2, 4, 8, 32, 64))]),
    "crossed_size": Family("the same with 199 controls, K = 16", ("N", "D"), crossed, grid(ROWS, MOST, 8192, 256)),
    "look": Family("a look, N = 2,048 tokens, D = 64, by sites", ("sites",), look,
                   [{"sites": s} for s in (2, 3, 5, 9, 17, 33)]),
    "processes": Family("merge_across_ranks of exact moments over P processes, on these cores", ("D", "P"), merging,
                        [{"D": d, "P": p} for d, p in ((64, 2), (256, 4), (512, 4), (1024, 2), (1024, 3), (1024, 4),
                                                       (1024, 6), (1024, 8), (2048, 2), (2048, 4), (2048, 8))]),
    "sketch": Family("sketch of rank r", ("N", "D", "r"), sketch,
                     [*grid(ROWS, (256, 512, 1024, 2048, 4096), 4096, 512, r=32),
                      *({"N": 4096, "D": 2048, "r": r} for r in (8, 16, 64, 128, 256))],
                     {"N": 2048, "D": 512, "r": 32}),
}  # fmt: skip


def quick(sizes: Sequence[At]) -> list[At]:
    """Those that take next to no time."""
    most = {"N": 8192, "D": 512, "K": 32, "B": 499, "sites": 5, "P": 2}
    few = [one for one in sizes if all(value <= most.get(axis, value) for axis, value in one.items())]
    return [one for one in few if one.get("N", 1) * one.get("D", 1) <= 1 << 20]


# --- the sketch beside exact moments -----------------------------------------------------------------------------


def shapes(values: torch.Tensor) -> dict[str, float]:
    """Plain formulas on eigenvalues of a scatter."""
    p, q = values / values.sum(), values.sqrt() / values.sqrt().sum()
    return {
        "spectral_ratio": float(p.max()),
        "participation_ratio": 1 / float(p.square().sum()),
        "effective_rank": math.exp(-float(torch.special.xlogy(q, q).sum())),
        "effective_rank_lambda": math.exp(-float(torch.special.xlogy(p, p).sum())),
    }


def completed(state: Sketch, rank: int, *, raised: bool = False) -> torch.Tensor:
    """All eigenvalues as a sketch tells them: its own, and the rest of the trace spread evenly over the others.

    Its own are lower bounds; ``raised`` by all that shrinking may have taken they are upper ones, which decaying
    spectra lie close to. Where so many upper bounds exceed the trace they are scaled down to it.
    """
    own = state.eigenvalues()
    if raised:
        own = own + state.shrinkage
        own = own * min(1.0, float(state.trace / own.sum()))
    rest = (state.trace - own.sum()).clamp_min(0) / max(rank - len(own), 1)
    return torch.cat([own, rest.expand(rank - len(own))])


def sketch_errors(n: int, d: int, ranks: Sequence[int]) -> list[str]:
    """Relative errors of numbers read from a sketch, and the certificate of the largest share."""
    from anisoscope.stats.moments import Moments

    names = ("spectral_ratio", "participation_ratio", "effective_rank_lambda", "effective_rank")
    lines = [f"| N = {n:,}, D = {d:,} | r | certificate of spectral_ratio | " + " | ".join(names) + " |",
             "|---" * (3 + len(names)) + "|"]  # fmt: skip
    for words, power in (("variances as 1/rank²", 2.0), ("variances as 1/rank", 1.0), ("white", 0.0)):
        x = decaying(n, d, power)
        rank = min(n - 1, d)
        exact = shapes(torch.linalg.eigvalsh(Moments.of(x).scatter).flip(0)[:rank].clamp_min(0))
        lines.append(f"| {words} | exact | | " + " | ".join(f"{exact[one]:.4g}" for one in names) + " |")
        for r in ranks:
            state = Sketch.empty(r, d)
            for part in x.split(CHUNK):
                state = state.update(part)
            low, high = state.top_share()
            found = [shapes(completed(state, rank, raised=one)) for one in (False, True)]
            inside = "" if low - 1e-9 <= exact["spectral_ratio"] <= high + 1e-9 else ", MISSED"
            cells = " | ".join(" / ".join(f"{end[one] / exact[one] - 1:+.1%}" for end in found) for one in names)
            lines.append(f"| | {r} | {low:.5f} to {high:.5f}{inside} | {cells} |")
        print(f"... errors of the sketch, {words}", flush=True)
    return lines


# --- tables ----------------------------------------------------------------------------------------------------------


def exponent(law: Law, axis: str) -> str:
    return f"{axis}^{law.exponents[axis]:.2f} ± {law.halves[axis]:.2f}"


def show_time(value: float) -> str:
    for limit, unit, name in ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 60:.3g} min"


def show_size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def bends(law: Law, points: Sequence[Point], family: Family) -> str:
    """Where the law stops: the overhead that it has, or how far smaller sizes lie from it."""
    if family.above:
        small = [statistics.median(one.seconds) / law(one.at) for one in points if not family.holds(one.at)]
        edge = " or ".join(f"{x} < {least:,}" for x, least in family.above.items())
        return f"{edge}: {min(small):.1f} to {max(small):.1f} times the law" if small else ""
    if not law.overhead:
        return "no overhead seen"
    axis, *others = law.axes
    where = "".join(f", {x} = {law.reference[x]:,.0f}" for x in others)
    return f"overhead {show_time(law.overhead)}: half of the time at {axis} = {law.bend(axis):,.0f}{where}"


def table(found: Mapping[str, Sequence[Point]]) -> list[str]:
    """One line a path."""
    lines = [
        "| path | sizes | law of time | worst misfit | where it bends | at the largest | peak | law of peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, points in found.items():
        family = FAMILIES[name]
        try:
            law, peaks = law_of(points, family), memory_law(points, family)
        except ValueError as error:
            lines.append(f"| `{name}` | {error} |")
            continue
        ranges = [f"{x} {min(p.at[x] for p in points):,} to {max(p.at[x] for p in points):,}" for x in family.axes]
        largest = max(points, key=lambda one: statistics.median(one.seconds))
        cells = (
            f"`{name}`: {family.words}",
            ", ".join(ranges),
            ", ".join(exponent(law, x) for x in law.axes),
            f"{law.misfit:.0%}",
            bends(law, points, family),
            f"{show_time(statistics.median(largest.seconds))} at "
            + ", ".join(f"{x} = {v:,}" for x, v in largest.at.items()),
            show_size(max(one.peak for one in points)),
            ", ".join(exponent(peaks, x) for x in peaks.axes) if peaks else "too small to tell",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def predictions(found: Mapping[str, Sequence[Point]]) -> list[str]:
    """What the laws say of a site of ``LARGE``, what was measured there, and all sites of a look."""
    lines = [
        "| one site | the law, 95 % | measured once | peak by its law | peak measured | 82 sites |",
        "|---|---|---|---|---|---|",
    ]
    checks = {(name, str(at)): point for (name, at), point in zip(CHECKS, found.get("check", ()), strict=False)}
    more = ((name, LARGE) for name in ("global", "pca", "two_nn", "two_nn_white", "crossed_size"))
    for name, at in (*CHECKS, ("eigh", {"D": LARGE["D"]}), *more):
        if name not in found:
            continue
        family, check = FAMILIES[name], checks.get((name, str(at)))
        law, peaks = law_of(found[name], family), memory_law(found[name], family)
        low, high = law.interval(at)
        one = check.seconds[0] if check else law(at)
        cells = (
            f"`{name}`, " + ", ".join(f"{x} = {value:,}" for x, value in at.items()),
            f"{show_time(law(at))} ({show_time(low)} to {show_time(high)})",
            show_time(check.seconds[0]) if check else "",
            show_size(peaks(at)) if peaks else "",
            show_size(check.peak) if check else "",
            show_time(SITES * one) + ("" if check else ", extrapolated"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def crossover(found: Mapping[str, Sequence[Point]], n: int = 16_384) -> list[str]:
    """Widths from which the sketch is cheaper than exact moments, by the two laws."""
    exact, small = (law_of(found[name], FAMILIES[name]) for name in ("moments", "sketch"))
    lines = ["| r | sketch is faster from D, by the laws | its state is smaller from D |", "|---|---|---|"]
    for r in (32, 64, 128, 256, 512):
        widths = [2 ** (i / 16) for i in range(6 * 16, 15 * 16)]
        faster = next((d for d in widths if small({"N": n, "D": d, "r": r}) < exact({"N": n, "D": d})), math.inf)
        lines.append(f"| {r} | {faster:,.0f} | {2 * r:,} |")
    return lines


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    return f"{datetime.date.today()}, {processor()}, {torch.get_num_threads()} threads. {versions}."


def keep(path: Path | None, found: Mapping[str, Sequence[Point]]) -> None:
    """Store after each point, so that a run cut short has not been in vain."""
    if path:
        path.write_text(json.dumps({key: [asdict(one) for one in points] for key, points in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--errors", type=int, nargs="*", metavar="N D", help="errors of the sketch alone, at this size")
    parser.add_argument("--check", action="store_true", help="measure at the large size too: 4 GB, half a minute more")
    parser.add_argument("--save", type=Path, help="JSON file of points; parts measured anew replace those in it")
    given = parser.parse_args()
    if given.errors:
        print("\n".join(sketch_errors(*given.errors, (16, 32, 64, 128, 256, 512))))
        return
    found: dict[str, list[Point]] = {}
    if given.save and given.save.exists():
        found = {name: [Point(**one) for one in kept] for name, kept in json.loads(given.save.read_text()).items()}
    if given.check:
        found["check"] = []
        for name, at in CHECKS:
            found["check"].append(measured(at, FAMILIES[name].make(at), once=True))
            print(f"... {name} {at}: {found['check'][-1].seconds[0]:.1f} s", flush=True)
            keep(given.save, found)
    for name in given.only:
        family, began = FAMILIES[name], time.perf_counter()
        sizes = quick(family.sizes) if given.quick else family.sizes
        found[name] = []
        for at in sizes:
            job = family.make(at)
            found[name].append(measured(at, job))
            getattr(job, "close", lambda: None)()  # of the others memory is all there is to give back
            keep(given.save, found)
        print(f"... {name}, {time.perf_counter() - began:.1f} s", flush=True)
    print(machine())
    print("\n".join(table({name: found[name] for name in FAMILIES if name in found})))
    if {"moments", "sketch"} <= found.keys() and not given.quick:
        print("\n".join(["", *predictions(found), "", *crossover(found)]))
    alone = (kept for name, kept in found.items() if name != "processes")  # its others are its own
    noisy = max((one.others for kept in alone for one in kept), default=0.0)
    print(f"\nOther processes kept at most {noisy:.2f} cores busy while a point was measured.")


if __name__ == "__main__":
    main()
