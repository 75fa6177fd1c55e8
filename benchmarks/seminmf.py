"""Semi-NMF against the published multiplicative updates, as the package overcomplete has them, and controls by number.

python benchmarks/seminmf.py race [--data planted|isotropic|MODEL] [--site resid.3] [--ranks 16 64] [--iterations 500]
python benchmarks/seminmf.py seeds [the same] [--seeds 3]
python benchmarks/seminmf.py controls

``race``: both from the same codes (k-means cells + 0.2); the published updates for so many iterations, then the seconds
to their error here. ``seeds``: error, sparsity and agreement of concepts over seeds (and with those that were planted),
each from its own start. Both need
``pip install overcomplete``. ``MODEL`` is what ``load_model`` takes, run over the embedded text, or a .pt file of rows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.monitoring.views import SiteView
from anisoscope.tangent.crossed import crossed_tests
from anisoscope.tangent.energy import energy_test
from anisoscope.tangent.kmeans import k_means
from anisoscope.tangent.seminmf import fit_seminmf
from anisoscope.tangent.stability import match_cosine
from anisoscope.tangent.units import Halves
from anisoscope.text.frequency import TokenCounts

ROWS, WIDTH = 16_384, 768
WAYS: dict[str, dict[str, object]] = {
    "default": {},
    "plain": {"momentum": 0.0, "coarse": False},
    "momentum": {"momentum": 1.0, "coarse": False},
}


def planted(rank: int) -> Tensor:
    """Few concepts in each row, and noise that falls with the number of the column."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.rand(ROWS, rank, generator=draw) * (torch.rand(ROWS, rank, generator=draw) < 0.15)
    concepts = torch.randn(rank, WIDTH, generator=draw)
    noise = torch.randn(ROWS, WIDTH, generator=draw) * 2.5 / torch.arange(1, WIDTH + 1).sqrt()
    return codes @ concepts + noise


def planted_concepts(rank: int) -> Tensor:
    """The concepts of these rows: the draws of the codes come before theirs."""
    draw = torch.Generator().manual_seed(0)
    torch.rand(ROWS, rank, generator=draw)
    torch.rand(ROWS, rank, generator=draw)
    return torch.randn(rank, WIDTH, generator=draw).double()


def recovery(found: list[tuple[float, float, Tensor]], truth: Tensor) -> float:
    """Mean cosine of fitted concepts with those that made the rows."""
    return statistics.fmean(match_cosine(concepts.double(), truth) for _, _, concepts in found)


def isotropic() -> Tensor:
    """Rows without any structure: the hardest to compress, and nothing to find."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100))


def activations(name: str, site: str) -> Tensor:
    """Activations of a model at one site."""
    from anisoscope.models.load import load_model
    from anisoscope.models.sites import discover, select
    from anisoscope.sampling import collect_sample
    from anisoscope.text.batches import token_batches
    from anisoscope.text.corpus import load_corpus
    from anisoscope.text.tokens import HFTokenizer

    loaded = load_model(name)
    tokenizer = HFTokenizer(loaded.tokenizer)
    corpus = load_corpus(None, max_chars=8 * ROWS)
    batches = token_batches(corpus, tokenizer, sequence_length=128, batch_size=8, tokens=ROWS + 4096)
    sites = select(discover(loaded.model), site)
    sample = collect_sample(
        loaded.model, batches, sites, tokens=ROWS, vectors=ROWS, turns=False, seed=0, tell=lambda *_: None
    )
    return sample.states[sites[0].name].rows.float()


def data_of(arguments: argparse.Namespace, rank: int) -> Tensor:
    """The rows asked for, less their mean."""
    made = {"planted": lambda: planted(rank), "isotropic": isotropic}
    if arguments.data.endswith(".pt"):
        made[arguments.data] = lambda: torch.load(arguments.data)
    rows = made.get(arguments.data, lambda: activations(arguments.data, arguments.site))()
    return rows - rows.mean(dim=0)


def error_of(rows: Tensor, codes: Tensor, concepts: Tensor) -> float:
    """``|A - Z C|^2 / |A|^2``."""
    return float((rows - codes @ concepts).double().square().sum() / rows.double().square().sum())


def sparsity_of(codes: Tensor) -> float:
    """The share of codes at zero; multiplicative updates only come near it."""
    return float((codes <= 1e-6 * codes.max()).double().mean())


def timed(act: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def race(arguments: argparse.Namespace) -> None:
    """Seconds of the published updates, and seconds to their error here."""
    from overcomplete.optimization.semi_nmf import snmf_multiplicative_update

    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    for rank in arguments.ranks:
        rows = data_of(arguments, rank)
        cells = k_means(rows, rank, seed=0)
        codes = torch.nn.functional.one_hot(cells.labels, rank).float() + 0.2
        concepts = torch.linalg.lstsq(codes, rows).solution
        snmf_multiplicative_update(rows, codes, concepts, max_iter=2, tol=0)  # memory and threads are there now
        began = time.perf_counter()
        theirs = snmf_multiplicative_update(rows, codes, concepts, max_iter=arguments.iterations, tol=0)
        published = time.perf_counter() - began
        bar = error_of(rows, *theirs)
        head = f"{arguments.data} {tuple(rows.shape)} K={rank}"
        print(
            f"{head}: published {published:.2f} s, error {bar:.6f}, sparsity {sparsity_of(theirs[0]):.3f}", flush=True
        )
        for name, how in WAYS.items():
            options = {"centre": False, "codes": codes, "tolerance": 0.0, **how}
            whole = fit_seminmf(rows, rank, max_iter=arguments.most, **options)
            steps = next((at // 2 + 1 for at, one in enumerate(whole.history) if at % 2 and one <= bar), None)
            # Fewer iterations allow fewer on an eighth of the rows before them.
            while steps and steps < arguments.most and fit_seminmf(rows, rank, max_iter=steps, **options).error > bar:
                steps += 1
            if steps is None:
                print(f"  {name}: {whole.error:.6f} after {whole.iterations} iterations, not there yet", flush=True)
                continue
            fit = partial(fit_seminmf, rows, rank, max_iter=steps, **options)
            seconds, found = min(timed(fit) for _ in range(5)), fit()
            print(
                f"  {name}: {seconds:.2f} s ({published / seconds:.1f} times faster), {steps} iterations, "
                f"error {found.error:.6f}, sparsity {found.sparsity:.3f}", flush=True,
            )  # fmt: skip


def seeds(arguments: argparse.Namespace) -> None:
    """Error, sparsity and agreement over seeds, each method from its own start."""
    from overcomplete.optimization.semi_nmf import SemiNMF

    def published(rows: Tensor, rank: int, seed: int) -> tuple[float, float, Tensor]:
        torch.manual_seed(seed)
        codes, concepts = SemiNMF(rank, tol=0).fit(rows, max_iter=arguments.iterations)
        return error_of(rows, codes, concepts), sparsity_of(codes), concepts

    def here(rows: Tensor, rank: int, seed: int, **options: object) -> tuple[float, float, Tensor]:
        fit = fit_seminmf(rows, rank, seed=seed, **options)
        return fit.error, fit.sparsity, fit.concepts

    ways = {"published": published}
    ways |= {name: partial(here, **how) for name, how in (WAYS | {"max_iter=10": {"max_iter": 10}}).items()}
    for rank in arguments.ranks:
        rows = data_of(arguments, rank)
        for name, fit in ways.items():
            found = [fit(rows, rank, seed) for seed in range(arguments.seeds)]
            errors, zeros = ([one[at] for one in found] for at in (0, 1))
            truth = planted_concepts(rank) if arguments.data == "planted" else None
            told = "" if truth is None else f", planted concepts {recovery(found, truth):.3f}"
            pairs = [match_cosine(a[2].double(), b[2].double()) for a, b in itertools.combinations(found, 2)]
            print(
                f"{arguments.data} K={rank} {name}: error {statistics.fmean(errors):.5f} "
                f"(to {max(errors):.5f}), sparsity {statistics.fmean(zeros):.3f}, "
                f"agreement over seeds {statistics.fmean(pairs):.3f}{told}", flush=True,
            )  # fmt: skip


def controls(arguments: argparse.Namespace) -> None:
    """What 199 controls cost beside one: in all that a look does at a site, in its cross-fitted test (``G^T G`` in
    both), and in a test alone."""
    square = torch.randn(2048, 2048)
    square @ square
    speed = 2 * 2048**3 / min(timed(lambda: square @ square) for _ in range(5)) / 1e9
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, a plain product at {speed:.0f} GFLOP/s")
    for rank in arguments.ranks:
        draw = torch.Generator().manual_seed(0)
        gradients = torch.randn(ROWS, WIDTH, generator=draw)
        basis = torch.linalg.qr(torch.randn(WIDTH, rank, generator=draw)).Q
        groups = torch.arange(ROWS) // 128
        halves = Halves.of(groups, 0, "cpu")
        tests = {
            "cross-fitted": partial(crossed_tests, gradients, halves, {"one": (basis, basis)}),
            "alone": partial(energy_test, gradients, basis, groups=groups),
            "a site of a look": _Site(gradients, groups, rank),
        }
        for name, test in tests.items():
            costs = {1: float("inf"), 199: float("inf")}
            for _ in range(10):  # by turns, so that both meet the same machine; the first makes the draws
                costs = {draws: min(least, timed(partial(test, draws=draws))) for draws, least in costs.items()}
            print(
                f"K={rank} {name}: 1 control {costs[1]:.3f} s, 199 controls {costs[199]:.3f} s, "
                f"{costs[199] / costs[1]:.2f} times"
            )


class _Site:
    """The tangent analysis of one site as at every look but the first: both proxies fitted anew, tests by frequency."""

    def __init__(self, gradients: torch.Tensor, groups: torch.Tensor, rank: int) -> None:
        rows, ids = planted(rank), torch.randint(500, (ROWS,), generator=torch.Generator().manual_seed(1))
        self._view = SiteView("resid.1", 0, 0, rows, gradients, ids, groups, groups, tokens=ROWS)
        counts = TokenCounts.of(ids, 500)
        self._made = {}
        for draws in (1, 199):
            self._made[draws] = TangentAnalysis(counts=counts, rank=rank, referee="never")
            self._made[draws].draws = draws  # asked for one it would refuse: there is no p-value

    def __call__(self, draws: int) -> None:
        self._view = replace(self._view, step=self._view.step + 1)
        found = self._made[draws](self._view)
        assert not [one for one in found.values() if isinstance(one, Exception)]


def main() -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("race", "seeds", "controls"))
    parser.add_argument("--data", default="planted")
    parser.add_argument("--site", default="resid.3")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--most", type=int, default=60, help="iterations here, at which a race is lost")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    {"race": race, "seeds": seeds, "controls": controls}[arguments.what](arguments)


if __name__ == "__main__":
    main()
