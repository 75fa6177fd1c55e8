"""The kernel of products of rows by Triton's interpreter on the CPU, against float64. Run by test_grams.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import json

import interpreted  # noqa: F401
import torch
import triton.language as tl

from anisoscope.kernels import kernels_of
from anisoscope.stats import gram_matrices

gram_matrices.PARTED_WIDTH = 1
gram_matrices.kernels_run = gram_matrices.has_tensor_cores = lambda device: True
kernels = kernels_of("grams")
kernels.PART = tl.float32  # which holds them too: the interpreter would multiply the bits of bfloat16 as integers


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KINDS = ("bfloat16", "float16")


def by_kernel(rows, ends, out=None, *, kind="bfloat16", columns=32, step=16, window=48):
    kernels.tiling = lambda device: kernels.Tiling(columns=columns, warps=4, rows=step, window=window, kind=kind)
    return gram_matrices.cell_grams(rows, ends, out)


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
    """Whole tiles and not, an even and an odd number of them, cells of every kind, parts of every kind."""
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
        f"{name}, {kind}": told(draw(s, n, d), ends, kind=kind)
        for name, (s, n, d, ends) in sizes.items()
        for kind in KINDS
    }


def strides(kind):
    """Some of the sites, rows and columns of something larger, columns first, and a place among others to write to."""
    whole = draw(3, 36, 50)
    ends, found = [13, 36], {}
    views = {
        "sites": whole[::2],
        "rows": whole[:, ::2],
        "columns": whole[:, :, 3:40],
        "turned": whole.mT,
        "none": whole[:0],
    }
    for name, rows in views.items():
        right = [min(end, rows.shape[1]) for end in ends]
        got = by_kernel(rows, right, kind=kind)
        found[name] = error(got, rows, right) if len(rows) else 0.0
    out = torch.full((3, 2, 3, 50, 50), torch.nan, dtype=torch.float64)
    mine = by_kernel(whole, ends, out[:, :, 1], kind=kind)
    found["place"] = error(out[:, :, 1], whole, ends)
    alone = bool(out[:, :, [0, 2]].isnan().all()) and mine.data_ptr() == out[:, :, 1].data_ptr()
    return {"errors": found, "nothing else is written": alone}


def scales():
    """Columns from 1e-10 to 1e10; and many windows of rows far from zero, whose sum grows and grows.

    ``few`` are entries of eight bits: sums of a window have no error, so that what is lost is lost between windows.
    """
    rows = draw(1, 90, 50) * torch.logspace(-10, 10, 50)
    far = 3 + 0.01 * draw(1, 4096, 20)
    return {
        "scales": {kind: told(rows, [40, 90], kind=kind)["error"] for kind in KINDS},
        "far": {kind: told(far, [4096], step=64, window=64, kind=kind)["error"] for kind in KINDS},
        "few": told(
            (far + draw(1, 4096, 20, seed=1) / 4).bfloat16().float(), [4096], step=64, window=64, kind="float16"
        ),
        "plain": float(((far[0].T @ far[0]).double() / truth(far, [4096])[0, 0] - 1).abs().max()),
    }


def lost(kind):
    """Which cells and columns a row with NaN or an infinity spoils."""
    rows, clean = draw(3, 60, 40), [10, 30, 60]
    rows[0, 9, 4], rows[1, 30, 33], rows[2, 29, 39] = torch.nan, torch.inf, -torch.inf
    found = by_kernel(rows, clean, kind=kind)
    wanted = torch.zeros(found.shape, dtype=torch.bool)
    for site, cell, column in ((0, 0, 4), (1, 2, 33), (2, 1, 39)):
        wanted[site, cell, column], wanted[site, cell, :, column] = True, True
    return torch.equal(~found.isfinite(), wanted)


def same(kind):
    """The same bits twice, those of ``grams`` of each cell alone, and of one site at a time."""
    rows = draw(2, 70, 45) * torch.logspace(-3, 3, 70)[:, None]
    found = by_kernel(rows, [30, 70], kind=kind)
    alone = torch.stack([gram_matrices.grams(part) for part in rows.split([30, 40], dim=1)], dim=1)
    again = by_kernel(rows, [30, 70], kind=kind)
    whole, gram_matrices.HALF_CELLS = gram_matrices.HALF_CELLS, 1
    few = by_kernel(rows, [30, 70], kind=kind)
    gram_matrices.HALF_CELLS = whole
    return {"twice": torch.equal(found, again), "alone": torch.equal(found, alone), "few": torch.equal(found, few)}


def parts():
    """Three of bfloat16 hold a float32 whole, so that products with one, of integers of 24 bits, have no error."""
    rows = torch.tensor([float((1 << 24) - 1 - 7919 * at) for at in range(24)]).view(1, 1, 24)
    rows[0, 0, 0] = 1.0
    return float((by_kernel(rows, [1])[0, 0, 0] - rows[0, 0].double()).abs().max())


def halves():
    """What two of float16 leave of an entry, seen in its product with one.

    ``short`` integers of 22 bits have no error. ``long`` ones, of 24, are told relative to their size. ``small``
    entries stand in one column with a one, and are told relative to that, whatever their own size.
    """
    integers = [float((1 << 24) - 1 - 7919 * at) for at in range(24)]
    short = torch.tensor([1.0, *(one // 4 for one in integers)]).view(1, 1, 25)
    long = torch.tensor([1.0, *integers]).view(1, 1, 25)
    small = torch.zeros(1, 2, 25)
    small[0, 0, 1:] = 1
    small[0, 1] = torch.cat([torch.ones(1), draw(24) * torch.logspace(-1, -12, 24)])
    gaps = {
        name: (by_kernel(rows, [rows.shape[1]], kind="float16")[0, 0, 0] - rows[0, -1].double()).abs()
        for name, rows in {"short": short, "long": long, "small": small}.items()
    }
    return {
        "short": float(gaps["short"].max()),
        "long": float((gaps["long"] / long[0, 0]).max()),
        "small": float((gaps["small"] - small[0, 1].double().abs() / (1 << 22)).max()),
    }


def hostile():
    """Columns at both ends of float32, with one entry of another size, of nothing, and cells that differ in size.

    float64 holds all of their products, some of which float32 does not.
    """
    rows, ends = draw(1, 60, 40), [25, 60]
    for at, size in enumerate((1e-45, 1e-44, 1e-41, 1e-38, 2e-38, 1e-30, 1e30, 5e36)):
        rows[..., 4 * at : 4 * at + 4] *= size
    rows[..., 32:34] = 0
    rows[:, 7, 34], rows[:, 50, 35], rows[..., 36] = 1e20, -3.4028234e38, 3.4028234e38
    rows[..., 37] = torch.finfo(torch.float32).tiny
    rows[:, 25:, 38:] *= 1e-30
    return told(rows, ends, kind="float16")


if __name__ == "__main__":
    cases = {
        "shapes": shapes,
        "strides": lambda: {kind: strides(kind) for kind in KINDS},
        "scales": scales,
        "lost": lambda: {kind: lost(kind) for kind in KINDS},
        "same": lambda: {kind: same(kind) for kind in KINDS},
        "parts": parts,
        "halves": halves,
        "hostile": hostile,
    }
    print(json.dumps({name: one() for name, one in cases.items()}))
