"""The kernel for band forms, run by Triton's interpreter on the CPU. Run by test_banded.py."""

import json
import os
import signal

import interpreted  # noqa: F401
import numpy as np
import torch
from triton.runtime import interpreter

from anisoscope.kernels import kernels_of
from anisoscope.measures import banded
from anisoscope.measures.banded import Banded, dense

BAND, WIDTH = 8, 21  # two blocks and a bit


def covariance(width, seed=0, steep=0.0):
    draws = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(width, width, generator=draws, dtype=torch.float64))[0]
    values = torch.logspace(0, -steep, width, dtype=torch.float64) if steep else 0.1 + torch.arange(width).double()
    found = (turned * values) @ turned.T
    return (found + found.T) / 2


def matrices():
    plain, narrow = covariance(WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    narrow.diagonal().copy_(torch.linspace(2, 3, WIDTH))
    narrow.diagonal(1).fill_(0.5)
    narrow.diagonal(-1).fill_(0.5)
    blocks = torch.zeros_like(narrow)
    blocks[:5, :5], blocks[12:, 12:] = covariance(5, 1), covariance(9, 2, steep=3)
    # Columns below the block that are nearly their first entry, which is positive: the other sign of what stays of them
    # would cancel.
    near = 3 * torch.eye(WIDTH, dtype=torch.float64) + 1e-7 * (plain - plain.diagonal().diag())
    near.diagonal(BAND).add_(1)
    near.diagonal(-BAND).add_(1)
    ray = torch.linspace(-1, 2, WIDTH, dtype=torch.float64)
    return {
        "plain": plain, "near": near, "steep": covariance(WIDTH, 3, steep=12), "blocks": blocks,
        "nan": plain * torch.nan,
        "identity": torch.eye(WIDTH, dtype=torch.float64), "zero": torch.zeros_like(plain),
        "rank one": torch.outer(ray, ray), "tridiagonal": narrow, "small": plain * 1e-150, "large": plain * 1e155,
    }  # fmt: skip


def errors(t, a):
    """Of the spectrum and of Q, relative to the norm; and what is beyond the band."""
    size = torch.linalg.matrix_norm(a, 2).clamp_min(1e-300)
    eye = torch.eye(a.shape[1], dtype=a.dtype)
    return {
        "values": ((torch.linalg.eigvalsh(dense(t.band)) - torch.linalg.eigvalsh(a)).abs().amax(dim=1) / size).tolist(),
        "orthonormal": (t.q.mT @ t.q - eye).abs().amax(dim=(1, 2)).tolist(),
        "similar": ((t.q.mT @ a @ t.q - dense(t.band)).abs().amax(dim=(1, 2)) / size).tolist(),
        "beyond": t.band[:, :, banded.BAND + 1 :].abs().amax(dim=(1, 2)).tolist(),
    }


def some(t, index):
    return Banded(t.band[index], t.reflectors[index], t.taus[index])


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
    banded._by_kernels = lambda tensor: True
    banded.BAND, banded.MOST_PROGRAMS = BAND, 4
    named = matrices()
    names, a = list(named), torch.stack(list(named.values()))
    t = banded.banded(a, (32, 1))
    finite = [i for i, name in enumerate(names) if name != "nan"]
    parts = (t.band, t.reflectors, t.taus)
    result = {
        "names": [names[i] for i in finite],
        "lost": bool(torch.isnan(t.band[names.index("nan")]).all()),
        "untouched": not any(bool(torch.isnan(one[finite]).any()) for one in parts),
        **errors(some(t, finite), a[finite]),
    }
    alone = banded.banded(a[3:5], (32, 1))
    result["same"] = torch.equal(alone.band[0], t.band[3]) and torch.equal(alone.reflectors[0], t.reflectors[3])

    # A width that is a multiple of the band, in matrices that lie otherwise in memory; and one within the band.
    full = torch.stack([covariance(16, 4), covariance(16, 5, steep=3)], dim=2).permute(2, 0, 1)
    result["full"] = errors(banded.banded(full, (16, 1)), full)
    for width in (2, BAND, BAND + 1):
        few = covariance(width, 6)[None]
        result[f"width {width}"] = errors(banded.banded(few, (16, 1)), few)

    # Programs that share a matrix, and wait for one another.
    wide = covariance(29, 4, steep=2)[None]
    result["alone"] = errors(banded.banded(wide, (32, 1)), wide)
    kernels = kernels_of("band")
    kernels.factor_panel = Together(kernels.factor_panel)
    result["shared"] = errors(banded.banded(wide, (8, 1)), wide)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
