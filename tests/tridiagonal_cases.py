"""Kernels for tridiagonal forms, run by Triton's interpreter on the CPU. Run by test_tridiagonal.py."""

import json
import os
import signal

import interpreted  # noqa: F401
import numpy as np
import torch
from triton.runtime import interpreter

from anisoscope.kernels import kernels_of
from anisoscope.measures import tridiagonal
from anisoscope.measures.tridiagonal import Tridiagonal, eigenvalues, leading_vector, reduced

PANEL, WIDTH = 8, 13  # a panel and a bit, and a multiple of no block


def covariance(width, seed=0, steep=0.0):
    draws = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(width, width, generator=draws, dtype=torch.float64))[0]
    values = torch.logspace(0, -steep, width, dtype=torch.float64) if steep else 0.1 + torch.arange(width).double()
    found = (turned * values) @ turned.T
    return (found + found.T) / 2


def matrices():
    plain, banded = covariance(WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    banded.diagonal().copy_(torch.linspace(2, 3, WIDTH))
    banded.diagonal(1).fill_(0.5)
    banded.diagonal(-1).fill_(0.5)
    blocks = torch.zeros_like(banded)
    blocks[:5, :5], blocks[7:, 7:] = covariance(5, 1), covariance(6, 2, steep=3)
    ray = torch.linspace(-1, 2, WIDTH, dtype=torch.float64)
    return {
        "plain": plain, "steep": covariance(WIDTH, 3, steep=12), "blocks": blocks, "nan": plain * torch.nan,
        "identity": torch.eye(WIDTH, dtype=torch.float64), "zero": torch.zeros_like(plain),
        "rank one": torch.outer(ray, ray), "tridiagonal": banded, "small": plain * 1e-150, "large": plain * 1e155,
    }  # fmt: skip


def dense(t):
    return torch.diag_embed(t.diagonal) + torch.diag_embed(t.off, 1) + torch.diag_embed(t.off, -1)


def errors(t, a):
    """Of the spectrum and of Q, relative to the norm."""
    size = torch.linalg.matrix_norm(a, 2).clamp_min(1e-300)
    eye = torch.eye(a.shape[1], dtype=a.dtype)
    return {
        "values": ((torch.linalg.eigvalsh(dense(t)) - torch.linalg.eigvalsh(a)).abs().amax(dim=1) / size).tolist(),
        "orthonormal": (t.q.mT @ t.q - eye).abs().amax(dim=(1, 2)).tolist(),
        "similar": ((t.q.mT @ a @ t.q - dense(t)).abs().amax(dim=(1, 2)) / size).tolist(),
    }


def some(t, index):
    return Tridiagonal(t.diagonal[index], t.off[index], t.reflectors[index], t.taus[index])


def forms_and_oracle(t, a, values, rows):
    slope = torch.tensor([1.0, -0.4], dtype=torch.float64), torch.tensor([-0.2, 0.5], dtype=torch.float64)
    found = t.forms(rows, values, *slope)
    lam, vectors = torch.linalg.eigh(a)
    f = (slope[0][:, None] + slope[1][:, None] * lam.log()) / lam.sqrt()
    terms = (rows.double() @ vectors).square() * f[:, None]
    return float(((found - terms.sum(dim=2)) / terms.abs().sum(dim=2)).abs().max())


class Together:
    """Launches a kernel with a process for each program, over shared memory: they can wait for each other."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            for one in args:
                if isinstance(one, torch.Tensor):
                    one.share_memory_()
            children = [self.started(program, args, options) for program in range(grid[0])]
            assert all(os.waitpid(child, 0)[1] == 0 for child in children)

        return launch

    def started(self, program, args, options):
        child = os.fork()
        if child:
            return child
        signal.alarm(120)  # one that waits for a program that died would wait for ever
        own = interpreter.TensorHandle(np.array([program], dtype=np.int32), interpreter.tl.int32)
        interpreter.interpreter_builder.create_get_program_id = lambda axis: own
        try:
            self.kernel[(1,)](*args, **options)
        except BaseException:
            os._exit(1)
        os._exit(0)


def main():
    torch.set_num_threads(1)
    tridiagonal._by_kernels = lambda tensor: True
    # Two warps of four columns; two tiles of 8 columns side by side, or of 16.
    tridiagonal.TILE_WIDTHS, tridiagonal.TILE_ROWS, tridiagonal.FEW_PROGRAMS = (8, 16), 8, 2
    tridiagonal.WARPS, tridiagonal.LANES = 2, 4
    kernels = kernels_of("tridiagonal")
    kernels.PANEL = PANEL
    named = matrices()
    names, a = list(named), torch.stack(list(named.values()))
    t = reduced(a, 1)
    finite = [i for i, name in enumerate(names) if name != "nan"]
    result = {
        "names": [names[i] for i in finite],
        "lost": [bool(torch.isnan(x[names.index("nan")]).all()) for x in (t.diagonal, t.off)],
        "untouched": not any(bool(torch.isnan(x[finite]).any()) for x in (t.diagonal, t.off, t.reflectors, t.taus)),
        **errors(some(t, finite), a[finite]),
    }
    alone = reduced(a[2:4], 1)
    result["same"] = torch.equal(alone.diagonal[0], t.diagonal[2]) and torch.equal(alone.reflectors[0], t.reflectors[2])

    values = eigenvalues(t.diagonal[1:4], t.off[1:4])
    truth = torch.linalg.eigvalsh(dense(some(t, [1, 2])))
    result["bisected"] = ((values[:2] - truth).abs().amax(dim=1) / truth[:, -1]).tolist()
    result["ascending"] = bool((values[:2].diff(dim=1) >= 0).all())
    result["lost"] += [bool(torch.isnan(values[2]).all())]

    # The first point asked for is zero, where minors vanish: every other one; or all, with nothing beside.
    even = torch.tensor([[0.0] * 6, [0.0, 0.0, -1.0, -1.0, 0.5, 1.0]], dtype=torch.float64)
    beside = torch.tensor([[1.0] * 5, [0.0] * 5], dtype=torch.float64)
    waves = 2 * torch.cos(torch.arange(6, 0, -1, dtype=torch.float64) * torch.pi / 7)
    result["vanishing"] = float((eigenvalues(even, beside) - torch.stack([waves, even[1].sort().values])).abs().max())

    rows = torch.randn(2, 33, WIDTH, generator=torch.Generator().manual_seed(5))
    result["forms"] = forms_and_oracle(some(t, [0, 1]), a[:2], torch.linalg.eigvalsh(a[:2]), rows)
    top = torch.linalg.eigvalsh(a[finite])[:, -1]
    lead = leading_vector(some(t, finite), top)
    size = top.clamp_min(1e-300)
    result["residual"] = (((a[finite] @ lead[:, :, None])[:, :, 0] - top[:, None] * lead).norm(dim=1) / size).tolist()
    result["unit"] = (lead.norm(dim=1) - 1).abs().tolist()
    lost = leading_vector(some(t, [3]), torch.tensor([torch.nan], dtype=torch.float64))
    result["lost"] += [bool(torch.isnan(lost).all())]

    # Programs that share a matrix, several shares; and a matrix that fills its tile.
    tridiagonal.SHARE, tridiagonal.TILE_STAGES = 8, 3
    full = torch.stack([covariance(16, 4), covariance(16, 5, steep=3)], dim=2).permute(2, 0, 1)  # not row by row
    result["full"] = errors(reduced(full, 1), full)
    wide = covariance(19, 4, steep=2)[None]
    result["alone"] = errors(reduced(wide, 1), wide)
    kernels.reduce_panel = Together(kernels.reduce_panel)
    result["shared"] = errors(reduced(wide, 2), wide)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
