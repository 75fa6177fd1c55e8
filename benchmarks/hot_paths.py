"""The hot paths whose cost `cost.py` measures: how each is set up at one size. Setting up is not measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from laws import At

from anisoscope.stats.sketch import Sketch

Job = Callable[[], object]
GLOBAL = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank")
CHUNK = 1024  # rows given to a sketch at a time


def gaussian(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def decaying(n: int, d: int, power: float = 1.0) -> torch.Tensor:
    """Variances that fall as a power of their rank, about a mean of length 5: like activations, easier to state."""
    x = gaussian(n, d)
    return x.mul_(torch.arange(1, d + 1) ** (-power / 2)).add_(5 / d**0.5)


def manifold(n: int, d: int) -> torch.Tensor:
    """A smooth image of a 12-dimensional cube, with noise of a fiftieth of its spread."""
    g = torch.Generator().manual_seed(0)
    z = torch.rand(n, 12, generator=g)
    features = torch.cat([z @ torch.randn(12, 32, generator=g), torch.sin(z @ torch.randn(12, 64, generator=g))], dim=1)
    return features @ torch.randn(96, d, generator=g) / 96**0.5 + 0.02 * torch.randn(n, d, generator=g)


# --- the hot paths: how each is set up at one size -------------------------------------------------------------------


def moments(at: At) -> Job:
    from anisoscope.stats.moments import Moments

    x = decaying(at["N"], at["D"])
    return lambda: Moments.of(x)


def global_measures(at: At) -> Job:
    from anisoscope.measures.table import measure

    x = decaying(at["N"], at["D"])
    return lambda: measure(x, GLOBAL)


def eigh(at: At) -> Job:
    x = decaying(2 * at["D"], at["D"]).double()
    covariance = x.T @ x
    return lambda: torch.linalg.eigh(covariance)


def two_nn_of(cloud: Callable[[int, int], torch.Tensor]) -> Callable[[At], Job]:
    def make(at: At) -> Job:
        from anisoscope.measures.dimension import two_nn

        x = cloud(at["N"], at["D"])
        return lambda: two_nn(x)

    return make


def tangents(at: At) -> Job:
    from anisoscope.measures.frames import local_tangents

    x = manifold(at["N"], at["D"])
    return lambda: local_tangents(x, dimension=12, k=64, anchors=256)


def proxy(kind: str) -> Callable[[At], Job]:
    def make(at: At) -> Job:
        from anisoscope.tangent.proxies import fit_proxy

        x = decaying(at["N"], at["D"])
        return lambda: fit_proxy(x, kind, at.get("K", 16))

    return make


def rank_sweep(at: At) -> Job:
    from anisoscope.tangent.proxies import fit_ranks

    x, ranks = decaying(4096, 256), [2**i for i in range(1, at["K"].bit_length())]
    return lambda: fit_ranks(x, "seminmf", ranks)


def crossed(at: At) -> Job:
    from anisoscope.tangent.crossed import crossed_tests
    from anisoscope.tangent.units import Halves

    n, d, k = at.get("N", 4096), at.get("D", 256), at.get("K", 16)
    g = decaying(n, d)
    halves = Halves.of(torch.arange(n) // max(n // 64, 1), 0, "cpu")
    bases = {name: tuple(torch.linalg.qr(gaussian(d, k, s + i).double()).Q for i in (0, 1)) for s, name in ((2, "a"), (4, "b"))}  # fmt: skip # noqa: E501
    return lambda: crossed_tests(g, halves, bases, draws=at.get("B", 199))


def sketch(at: At) -> Job:
    x = decaying(at["N"], at["D"])

    def run() -> Sketch:
        state = Sketch.empty(at["r"], at["D"])
        for part in x.split(CHUNK):
            state = state.update(part)
        return state

    return run


def look(at: At) -> Job:
    """A later look at a GPT-2 of width 64 with so many layers: passes, default measures, two proxies, 199 controls."""
    import probe

    from anisoscope.capture.losses import CausalLoss
    from anisoscope.models.build import ModelSpec, build_model
    from anisoscope.monitor import Monitor
    from anisoscope.monitoring.tangents import TangentAnalysis
    from anisoscope.schedule import every

    spec = ModelSpec(architecture="gpt2", layers=at["sites"] - 1, width=64, heads=1, vocab_size=probe.VOCABULARY,
                     context=probe.LENGTH, causal=True)  # fmt: skip
    ids = probe.zipf_ids(2048).view(-1, probe.LENGTH)
    monitor = Monitor(build_model(spec, 0), probe=[probe.batch_of(ids)], schedule=every(1), loss=CausalLoss(),
                      sites="resid.*", analyses={"tangent": TangentAnalysis(referee="never")}, strict=True)  # fmt: skip
    monitor.step(0)
    steps = iter(range(1, 1000))
    return lambda: monitor.step(next(steps))
