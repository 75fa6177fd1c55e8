"""Eigenvalues of tridiagonal matrices, run by Triton's interpreter on the CPU. Run by test_tridiagonal.py."""

import json

import interpreted  # noqa: F401
import torch

from anisoscope.measures import tridiagonal
from anisoscope.measures.tridiagonal import eigenvalues

WIDTH = 13


def dense(d, e):
    return torch.diag_embed(d) + torch.diag_embed(e, 1) + torch.diag_embed(e, -1)


def main():
    torch.set_num_threads(1)
    tridiagonal._by_kernels = lambda tensor: True
    draws = torch.Generator().manual_seed(1)
    d = torch.rand(3, WIDTH, generator=draws, dtype=torch.float64)
    e = torch.randn(3, WIDTH - 1, generator=draws, dtype=torch.float64)
    steep = torch.logspace(0, -12, WIDTH, dtype=torch.float64)
    d[1], e[1] = steep, 0.3 * (steep[1:] * steep[:-1]).sqrt()
    d[2, 5] = torch.nan
    values = eigenvalues(d, e)
    truth = torch.linalg.eigvalsh(dense(d[:2], e[:2]))
    result = {
        "bisected": ((values[:2] - truth).abs().amax(dim=1) / truth.abs().amax(dim=1)).tolist(),
        "ascending": bool((values[:2].diff(dim=1) >= 0).all()),
        "lost": bool(torch.isnan(values[2]).all()),
    }
    # The first point asked for is zero, where minors vanish: every other one; or all, with nothing beside.
    even = torch.tensor([[0.0] * 6, [0.0, 0.0, -1.0, -1.0, 0.5, 1.0]], dtype=torch.float64)
    beside = torch.tensor([[1.0] * 5, [0.0] * 5], dtype=torch.float64)
    waves = 2 * torch.cos(torch.arange(6, 0, -1, dtype=torch.float64) * torch.pi / 7)
    result["vanishing"] = float((eigenvalues(even, beside) - torch.stack([waves, even[1].sort().values])).abs().max())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
