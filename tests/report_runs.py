"""Runs as a report meets them, written with the real store: a profile, several models, a sweep, failures only."""

import numpy as np

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Curve
from anisoscope.runs.store import RunReader, RunWriter

SLICES = ("all", "no position 0", "no massive dimensions")
MEASURES = (
    "spectral_ratio", "mean_cosine", "isoscore", "participation_ratio", "effective_rank", "stable_rank", "two_nn",
    "mle", "gride", "local_pca_dimension", "local_isotropy", "curvature", "turning_angle", "linearity",
)  # fmt: skip


HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>{{ 7 * 7 }} & \"quoted\" 'single' %{x}"


def sites(layers):
    return ["embed", *(f"resid.{layer}" for layer in range(layers + 1)), "final_norm"]


def truth(measure, slice, depth, step=1.0):
    """A smooth made-up geometry: a bell of anisotropy, a falling dimension; position 0 makes most of the anisotropy."""
    bell = np.exp(-(((depth - 0.45) / 0.25) ** 2)) * step
    ratio = 0.05 + (0.85 if slice == "all" else 0.2) * bell
    dimension = 20 - 9 * bell + 2 * depth
    return {
        "spectral_ratio": ratio, "mean_cosine": 0.1 + 0.6 * bell, "isoscore": 0.2 - 0.15 * bell,
        "participation_ratio": 60 - 45 * bell, "effective_rank": 300 - 200 * bell, "stable_rank": 1 / ratio,
        "two_nn": dimension, "mle": 0.9 * dimension, "gride": dimension - 1, "local_pca_dimension": 1.3 * dimension,
        "local_isotropy": 0.3 + 0.1 * depth, "curvature": 0.8 - 0.3 * bell, "turning_angle": 112 - 15 * bell,
        "linearity": 0.99 - 0.05 * abs(depth - 0.5),
    }[measure]  # fmt: skip


def estimate(value, rng, *, relative=0.03, batches=16):
    sd = max(1e-3, relative * abs(value))
    draws = value + sd * rng.standard_normal(batches)
    spread = float(draws.std(ddof=1))
    parts = {
        "sd over batches": Estimate(value=spread, stderr=None, n=batches, method="standard deviation over batches")
    }
    return Estimate(
        value=float(draws.mean()),
        stderr=spread / batches**0.5,
        dof=batches - 1.0,
        n=8192,
        over="batches",
        method="mean over batches of 512 tokens",
        parts=parts,
    )


def write_probe(writer, step, layers, rng, *, measures=MEASURES, slices=SLICES, cell="", curves=True, progress=1.0):
    info = {"model": cell or "tiny-decoder", "layers": layers, "width": 768}
    with writer.probe(step=step, cell=cell, info=info) as probe:
        names = sites(layers)
        for number, site in enumerate(names):
            depth = number / (len(names) - 1)
            for measure in measures:
                for slice in slices:
                    value = truth(measure, slice, depth, progress)
                    if (site, measure) == ("embed", "curvature"):
                        error = f"DegenerateError: {slice}: every neighbourhood of the embedding holds one token"
                        probe.fail(site=site, measure=measure, slice=slice, error=error)
                        continue
                    probe.add_estimate(estimate(value, rng), site=site, measure=measure, slice=slice)
            if curves:
                for slice in slices[:2]:
                    _add_curves(probe, writer.name, step, cell, site, slice, depth)


def _add_curves(probe, run, step, cell, site, slice, depth):
    place = {"run": run, "step": step, "cell": cell, "site": site, "slice": slice}
    rank = np.arange(1, 769.0)
    share = rank ** -(0.8 + depth)
    y = tuple((share / share.sum()).tolist())
    names = {"x_label": "rank", "y_label": "share of variance"}
    probe.add_curve(Curve(**place, name="spectrum", x=tuple(rank.tolist()), y=y, **names))
    scale = 2.0 ** np.arange(6)
    y = tuple((20 - 8 * depth - np.log2(scale)).tolist())
    names = {"x_label": "neighbours n", "y_label": "dimension"}
    errors = tuple((0.2 + 0 * scale).tolist())
    x = tuple(scale.tolist())
    probe.add_curve(Curve(**place, name="dimension against scale", x=x, y=y, stderr=errors, **names))


PROVENANCE = {
    "time_utc": "2026-11-15T10:00:00+00:00",
    "versions": {"anisoscope": "0.1.0", "torch": "2.13.0"},
    "seeds": [0],
    "device": "cpu",
    "corpus": {"name": "python documentation", "tokens": 65536},
    "model": {"name": "tiny-decoder", "layers": 12, "width": 768},
}


def profile_run(folder, layers=12, *, name="tiny-decoder", seed=0, **options):
    with RunWriter.create(folder, name=name, provenance=PROVENANCE, recipe={"batches": 16}) as writer:
        write_probe(writer, 0, layers, np.random.default_rng(seed), **options)
    return RunReader(folder)


def sweep_run(folder, layers=12, steps=(0, 1, 8, 64, 512, 1000, 4000, 16000), **options):
    rng = np.random.default_rng(0)
    with RunWriter.create(folder, name="tiny-sweep", provenance=PROVENANCE) as writer:
        for number, step in enumerate(steps):
            chosen = {"curves": step == steps[-1]} | options
            write_probe(writer, step, layers, rng, progress=(number + 1) / len(steps), **chosen)
    return RunReader(folder)


def models_run(folder, measures=("spectral_ratio", "two_nn", "turning_angle")):
    rng = np.random.default_rng(0)
    with RunWriter.create(folder, name="three models", provenance=PROVENANCE) as writer:
        for cell, layers in (("decoder-small", 6), ("decoder-large", 12), ("encoder", 8)):
            write_probe(
                writer, 0, layers, rng, cell=cell, measures=measures, progress=0.3 if cell == "encoder" else 1.0
            )
    return RunReader(folder)


def hostile_run(folder):
    """Every name and text that a user can choose is an attack."""
    part = Estimate(value=2.0, stderr=None, n=3, method=HOSTILE)
    e = Estimate(value=1.0, stderr=0.1, n=100, over=HOSTILE, method=HOSTILE, notes=(HOSTILE,), parts={HOSTILE: part})
    with RunWriter.create(folder, name=HOSTILE, provenance={"model": HOSTILE}, recipe={"a": HOSTILE}) as writer:
        for step in (0, 5):
            with writer.probe(step=step) as probe:
                for site in (HOSTILE, "resid.0", "resid.1", "resid.2"):
                    probe.add_estimate(e, site=site, measure=HOSTILE, slice=HOSTILE)
                    probe.add_estimate(e, site=site, measure="two_nn", slice="all")
                    place = {"run": HOSTILE, "step": step, "site": site, "name": HOSTILE, "slice": HOSTILE}
                    labels = {"x_label": HOSTILE, "y_label": HOSTILE}
                    probe.add_curve(Curve(**place, x=(1.0, 2.0), y=(1.0, 2.0), **labels))
                probe.fail(site=HOSTILE, measure="mle", slice=HOSTILE, error=HOSTILE)
    return RunReader(folder)
