"""The same numbers on a CUDA device as on the CPU. Skips itself where there is none; also runs as a plain script."""

import torch

import anisoscope as an

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ]
except ImportError:  # as a script, where pytest need not be
    pytest = None

OPTIONS = {"mle": {"k": 10}, "curvature": {"dimension": 3}, "local_isotropy": {"cells": 4}}


def cloud(n=6000, width=64):
    g = torch.Generator().manual_seed(0)
    z = torch.rand(n, 3, generator=g)
    return torch.sin(z @ torch.randn(3, 48, generator=g)) @ torch.randn(48, width, generator=g) + 3.0


def check(rows, tolerance):
    names = {name: OPTIONS.get(name, {}) for name in an.measure_names()}
    here, there = an.measure(rows, names), an.measure(rows.cuda(), names)
    for name in names:
        gap = abs(here[name].value - there[name].value) / abs(here[name].value)
        assert gap <= tolerance, f"{name}: {here[name].value} on the CPU, {there[name].value} on the device"
        assert (here[name].stderr is None) == (there[name].stderr is None), name
        if here[name].stderr:
            spread = abs(here[name].stderr - there[name].stderr) / here[name].stderr
            assert spread <= max(1e-2, tolerance), f"{name}: stderr {here[name].stderr} and {there[name].stderr}"


def test_float64_agrees():
    check(cloud().double(), 1e-8)


def test_float32_agrees():
    # float32 products are summed in another order there; spectra keep six digits, neighbours are decided in float64
    check(cloud(), 1e-5)


def test_half_precision_agrees():
    check(cloud().bfloat16(), 1e-5)


def test_neighbors_agree_exactly():
    rows = cloud(9000)
    here, there = an.nearest_neighbors(rows, 5), an.nearest_neighbors(rows.cuda(), 5)
    assert torch.allclose(here.distances, there.distances.cpu(), rtol=1e-12, atol=0)


def test_linearity_and_states_agree():
    x = cloud().double()
    y = x @ torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert abs(an.linearity(x, y).value - an.linearity(x.cuda(), y.cuda()).value) < 1e-9
    here, there = an.Moments.of(x), an.Moments.of(x.cuda())
    assert torch.allclose(here.scatter, there.scatter.cpu(), rtol=1e-9, atol=1e-6)
    merged = there.merge(there)
    assert merged.count == 2 * len(x)


if __name__ == "__main__":
    for name, function in list(globals().items()):
        if name.startswith("test_"):
            try:
                function()
                print("passed", name, flush=True)
            except Exception as error:
                print("FAILED", name, type(error).__name__, str(error)[:400], flush=True)
