"""The kernel of products of rows by Triton's interpreter on the CPU, against float64. Run by test_grams.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl

from anisoscope.kernels import kernels_of
from anisoscope.stats import moments

moments.PARTED_WIDTH = 1
moments.kernels_run = moments.has_tensor_cores = lambda device: True
kernels = kernels_of("grams")
kernels.PART = tl.float32  # which holds them too: the interpreter would multiply the bits of bfloat16 as integers


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_kernel(rows, ends, out=None, *, parts=3, columns=32, step=16, window=48):
    kernels.tiling = lambda device: kernels.Tiling(columns=columns, warps=4, rows=step, window=window, parts=parts)
    return moments.cell_grams(rows, ends, out)


def truth(rows, ends):
    parts = [rows[:, a:b].double() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.stack([part.mT @ part for part in parts], dim=1)


def error(found, rows, ends):
    """The largest, relative to the lengths of the two columns; zero where both are nothing."""
    right = truth(rows, ends)
    size = right.diagonal(dim1=2, dim2=3).sqrt()
    apart = (found - right).abs() / (size[..., :, None] * size[..., None, :]).clamp_min(1e-300)
    return float(apart.max())


def told(rows, ends, **how):
    found = by_kernel(rows, ends, **how)
    return {"error": error(found, rows, ends), "symmetric": torch.equal(found, found.mT)}


def shapes():
    """Whole tiles and not, an even and an odd number of them, cells of every kind, three parts and two."""
    uneven = [0, 1, 1, 18, 66, 130]  # empty, of one row, of less than a step and more than a window, and a rest
    sizes = {
        "one tile": (1, 32, 32, [32]),
        "part of a tile": (1, 5, 7, [5]),
        "two lines": (2, 64, 64, [16, 64]),
        "three lines": (2, 50, 70, [13, 50]),
        "four lines": (1, 33, 101, [33]),
        "uneven": (2, 131, 45, uneven),
        "nothing at all": (2, 9, 40, [0, 0]),
    }
    return {
        f"{name}, {parts}": told(draw(s, n, d), ends, parts=parts)
        for name, (s, n, d, ends) in sizes.items()
        for parts in (3, 2)
    }


def strides():
    """Some of the sites, rows and columns of something larger, columns first, and a place among others to write to."""
    whole = draw(5, 60, 80)
    ends, found = [20, 60], {}
    views = {
        "sites": whole[::2],
        "rows": whole[:, ::2],
        "columns": whole[:, :, 3:50],
        "turned": whole.mT,
        "none": whole[:0],
    }
    for name, rows in views.items():
        right = [min(end, rows.shape[1]) for end in ends]
        got = by_kernel(rows, right)
        found[name] = error(got, rows, right) if len(rows) else 0.0
    out = torch.full((5, 2, 3, 80, 80), torch.nan, dtype=torch.float64)
    mine = by_kernel(whole, ends, out[:, :, 1])
    found["place"] = error(out[:, :, 1], whole, ends)
    alone = bool(out[:, :, [0, 2]].isnan().all()) and mine.data_ptr() == out[:, :, 1].data_ptr()
    return {"errors": found, "nothing else is written": alone}


def scales():
    """Columns from 1e-10 to 1e10; and many windows of rows far from zero, whose sum grows and grows."""
    rows = draw(1, 90, 50) * torch.logspace(-10, 10, 50)
    far = 3 + 0.01 * draw(1, 4096, 20)
    return {
        "scales": {parts: told(rows, [40, 90], parts=parts)["error"] for parts in (3, 2)},
        "far": told(far, [4096], step=32, window=32)["error"],
        "plain": float(((far[0].T @ far[0]).double() / truth(far, [4096])[0, 0] - 1).abs().max()),
    }


def lost():
    """Which cells and columns a row with NaN or an infinity spoils."""
    rows, clean = draw(3, 60, 40), [10, 30, 60]
    rows[0, 9, 4], rows[1, 30, 33], rows[2, 29, 39] = torch.nan, torch.inf, -torch.inf
    found = by_kernel(rows, clean)
    wanted = torch.zeros(found.shape, dtype=torch.bool)
    for site, cell, column in ((0, 0, 4), (1, 2, 33), (2, 1, 39)):
        wanted[site, cell, column], wanted[site, cell, :, column] = True, True
    return torch.equal(~found.isfinite(), wanted)


def same():
    """The same bits twice, and those of ``grams`` of each cell alone."""
    rows = draw(2, 70, 45)
    found = by_kernel(rows, [30, 70])
    alone = torch.stack([moments.grams(part) for part in rows.split([30, 40], dim=1)], dim=1)
    return {"twice": torch.equal(found, by_kernel(rows, [30, 70])), "alone": torch.equal(found, alone)}


def parts():
    """Three of bfloat16 hold a float32 whole, so that products with one, of integers of 24 bits, have no error."""
    rows = torch.tensor([float((1 << 24) - 1 - 7919 * at) for at in range(24)]).view(1, 1, 24)
    rows[0, 0, 0] = 1.0
    return float((by_kernel(rows, [1])[0, 0, 0] - rows[0, 0].double()).abs().max())


if __name__ == "__main__":
    cases = {"shapes": shapes, "strides": strides, "scales": scales, "lost": lost, "same": same, "parts": parts}
    print(json.dumps({name: one() for name, one in cases.items()}))
