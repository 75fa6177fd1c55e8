"""Products of integers by Triton's interpreter on the CPU, against whole numbers. Run by test_residues.py."""

import json

import gram_cases  # first: it says that kernels are interpreted
import numpy as np
import torch
from gram_cases import draw, error, truth

from anisoscope.kernels import residues as kernels
from anisoscope.stats import gram_matrices, residues

residues.fits = lambda n, width, device: True
SMALL = kernels.Tiling(columns=32, rows=16, window=48, block=16, joined=16)
ONE = kernels.Tiling(columns=64, rows=16, window=48, block=32, joined=64)
LONG = kernels.Tiling(columns=32, rows=128, window=1024, joined=32)


def found_of(rows, ends, out=None, cut=SMALL):
    kernels.CUT = cut
    return gram_matrices.cell_grams(rows, ends, out, exact=True)


def whole(rows, ends):
    """The same from integers of the units, multiplied as such; relative lengths are those of rows as they came."""
    kernels.CUT = SMALL
    units = residues.column_units(rows, [0, *ends])
    found = torch.empty(*units.shape, units.shape[2], dtype=torch.float64)
    for site, cell in np.ndindex(*units.shape[:2]):
        part = rows[site, ([0, *ends])[cell] : ends[cell]].double() / units[site, cell]
        integers = part.round().to(torch.int64).numpy()
        unit = units[site, cell]
        found[site, cell] = torch.from_numpy((integers.T @ integers).astype(np.float64)) * unit[:, None] * unit
    return found


def told(rows, ends, cut=SMALL):
    """Errors relative to the lengths of both columns: against float64, and against the integers."""
    found = found_of(rows, ends, cut=cut)
    size = truth(rows, ends).diagonal(dim1=2, dim2=3).sqrt()
    apart = (found - whole(rows, ends)).abs() / (size[..., :, None] * size[..., None, :]).clamp_min(1e-300)
    return {"error": error(found, rows, ends), "whole": float(apart.max()), "symmetric": torch.equal(found, found.mT)}


def shapes():
    """Whole tiles and not, an even and an odd number of them, cells of every kind."""
    uneven = [0, 1, 1, 18, 66, 130]  # empty, of one row, of less than a step and more than a window, and a rest
    sizes = {
        "one tile": (1, 32, 32, [32]),
        "part of a tile": (1, 5, 7, [5]),
        "two lines": (2, 64, 64, [16, 64]),
        "three lines": (2, 50, 70, [13, 50]),
        "uneven": (2, 131, 45, uneven),
        "nothing at all": (2, 9, 40, [0, 0]),
    }
    return {name: told(draw(s, n, d), ends) for name, (s, n, d, ends) in sizes.items()}


def strides():
    """Some of the sites, rows and columns of something larger, columns first, and a place among others to write to."""
    big = draw(3, 36, 50)
    views = {"sites": big[::2], "rows": big[:, ::2], "columns": big[:, :, 3:40], "turned": big.mT, "none": big[:0]}
    found = {}
    for name, rows in views.items():
        ends = [13, rows.shape[1]]
        got = found_of(rows, ends, cut=ONE)
        found[name] = error(got, rows, ends) if len(rows) else 0.0
    out = torch.full((3, 2, 3, 50, 50), torch.nan, dtype=torch.float64)
    mine = found_of(big, [13, 36], out[:, :, 1], ONE)
    found["place"] = error(out[:, :, 1], big, [13, 36])
    alone = bool(out[:, :, [0, 2]].isnan().all()) and mine.data_ptr() == out[:, :, 1].data_ptr()
    return {"errors": found, "nothing else is written": alone}


def hostile():
    """Columns at both ends of float32, with one entry of another size, of nothing, of one number alone, and cells that
    differ in size; single rows of 24 bits, the same row many times, the largest integer there is, many windows."""
    rows = draw(1, 60, 40)
    for at, size in enumerate((1e-45, 1e-44, 1e-41, 1e-38, 2e-38, 1e-30, 1e30, 5e36)):
        rows[..., 4 * at : 4 * at + 4] *= size
    rows[..., 32:34] = 0
    rows[:, 7, 34], rows[:, 50, 35], rows[..., 36] = 1e20, -3.4028234e38, 3.4028234e38
    rows[..., 37] = torch.finfo(torch.float32).tiny
    rows[:, 25:, 38:] *= 1e-30
    one = torch.tensor([float((1 << 24) - 1 - 7919 * at) * (-1) ** at for at in range(24)])
    same = torch.stack([one] * 40) * torch.where(torch.arange(40) % 3 == 0, -1.0, 1.0)[:, None]
    largest = torch.full((1, 1, 3), 2.0 - 2.0**-23) * torch.tensor([1.0, -1.0, 1.0])
    return {
        "sizes": told(rows, [25, 60]),
        "single": told(one.view(1, 1, 24), [1]),
        "same": told(same[None], [40]),
        "largest": told(largest, [1]),
        "windows": told(draw(1, 400, 33) * torch.logspace(-9, 9, 33), [400]),
    }


def long():
    """The error where sums of remainders would leave 31 bits: ``3000192`` is 128 by 256, and has the unit one here."""
    rows = torch.full((1, 160_000, 2), 3000192.0) * torch.tensor([1.0, -1.0])
    cut = kernels.Tiling(columns=16, rows=4096, squared=1024, block=16, joined=16)
    found = found_of(rows, [160_000], cut=cut)[0, 0]
    return float((found / (160_000 * 3000192**2) - torch.tensor([[1, -1], [-1, 1]])).abs().max())


def steep():
    """Eigenvalues over eight decades, in all directions; with an entry that is most of its column, with one of zeros,
    and one of a single number. The largest error of one, relative to itself."""
    n, width = 1500, 32
    turned = torch.linalg.qr(draw(width, width, seed=1).double()).Q
    rows = (draw(n, width).double() * torch.logspace(0, -4, width).double() @ turned).float()
    outlier, flat = rows.clone(), rows.clone()
    outlier[77, 5] = 40.0
    flat[:, 3], flat[:, 9] = 0.0, 1e-3
    told = {}
    for name, one in {"plain": rows, "outlier": outlier, "flat": flat}.items():
        right, mine = (
            torch.linalg.eigvalsh(x[0, 0]) for x in (truth(one[None], [n]), found_of(one[None], [n], None, LONG))
        )
        kept = right > 1e-12 * right[-1]
        told[name] = float(((mine - right).abs() / right)[kept].max())
        told[f"least of {name}"] = float(right[kept][0] / right[-1])
    halves = gram_cases.by_kernel(rows[None], [n], kind="float16", step=64, window=256)
    right = torch.linalg.eigvalsh(truth(rows[None], [n])[0, 0])
    told["halves"] = float(((torch.linalg.eigvalsh(halves[0, 0]) - right).abs() / right).max())
    return told


def lost():
    """Whether rows with NaN or an infinity spoil what they would spoil in float64, and nothing else."""
    rows, ends = draw(3, 60, 40), [10, 30, 60]
    rows[0, 9, 4], rows[1, 30, 33], rows[2, 29, 39] = torch.nan, torch.inf, -torch.inf
    rows.view(torch.int32)[2, 31, 6] = -0x400000  # a NaN whose sign is set
    found = found_of(rows, ends, cut=ONE)
    return torch.equal(found.isnan(), ~truth(rows, ends).isfinite()) and not bool(found.isinf().any())


def same():
    """The same bits twice, those of ``grams`` of each cell alone, and of one site at a time."""
    rows = draw(2, 70, 45) * torch.logspace(-3, 3, 70)[:, None]
    found, again = (found_of(rows, [30, 70], cut=ONE) for _ in range(2))
    alone = torch.stack([gram_matrices.grams(part, exact=True) for part in rows.split([30, 40], dim=1)], dim=1)
    most, residues.MOST_ENTRIES = residues.MOST_ENTRIES, 1
    few = found_of(rows, [30, 70], cut=ONE)
    residues.MOST_ENTRIES = most
    return {"twice": torch.equal(found, again), "alone": torch.equal(found, alone), "few": torch.equal(found, few)}


if __name__ == "__main__":
    cases = (shapes, strides, hostile, long, steep, lost, same)
    print(json.dumps({one.__name__: one() for one in cases}))
