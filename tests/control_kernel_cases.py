"""The kernel of controls by Triton's interpreter on the CPU, against plain products. Run by test_stacked_controls.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import json
from dataclasses import replace

import interpreted  # noqa: F401
import torch

from anisoscope.tangent import stacked_controls, wide_controls
from anisoscope.tangent.drawn import Gaussians
from anisoscope.tangent.stacked_controls import Moments, of_controls


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(sites, bases, groups, draws, rank, width=40):
    """Rows with a mean and a spectrum, in groups of different sizes; orthonormal bases; draws."""
    parts = [3 + draw(sites, 20 + 9 * g, width, seed=g) * (1 + torch.arange(width) % 7) for g in range(max(groups, 1))]
    rows = torch.cat(parts, dim=1)
    of_groups = torch.stack([x.mT @ x for x in parts], dim=1)[:, :groups]
    moments = Moments(of_groups, rows.mT @ rows, rows.mean(dim=1), counts(sites, rows.shape[1]))
    return moments, torch.linalg.qr(draw(sites, bases, width, rank, seed=100)).Q, drawn(draws, rank, width)


def counts(sites, n):
    """Not the same for all sites, as of two halves; as if some rows were zero."""
    return n + torch.arange(sites, dtype=torch.float64)


def drawn(draws, rank, width):
    z = draw(draws, rank, width, seed=101)
    return Gaussians(z[:, :, :rank].contiguous(), z[:, :, rank:].contiguous())


def both(moments, bases, z, dtype=torch.float64):
    """By plain products, and by the kernel."""
    return of_controls(moments, bases, z, dtype), by_kernel(moments, bases, z, dtype)


def by_kernel(*given):
    before = stacked_controls.has_kernels
    stacked_controls.has_kernels = lambda device, rank: True
    found = of_controls(*given)
    stacked_controls.has_kernels = before
    return found


def gaps(plain, found):
    """The largest relative difference of each quantity; infinite unless the same entries are NaN."""
    told = {}
    for name, one in vars(plain).items():
        other = getattr(found, name)
        assert one.shape == other.shape and one.dtype == other.dtype, name
        there = ~one.isnan()
        same = torch.equal(there, ~other.isnan())
        told[name] = float((other[there] / one[there] - 1).abs().max()) if same else float("inf")
    return told


def shapes():
    sizes = {
        "one of all": (1, 1, 0, 3, 3),
        "groups": (3, 2, 3, 3, 3),
        "no groups": (2, 2, 0, 3, 8),
        "whole places": (2, 2, 3, 4, 16, 150),
        "tight": (1, 2, 3, 5, 16),
        "more places": (1, 1, 2, 3, 17),
    }
    told = {name: gaps(*both(*case(*one))) for name, one in sizes.items()}
    moments, bases, z = case(3, 1, 2, 3, 3)
    # One number for all sites, with others behind it.
    told["one number"] = gaps(*both(replace(moments, n=moments.n.new_tensor([5.0, 1e3, 1e6])[0].expand(3)), bases, z))
    return told


def narrow():
    """Products with groups in float32: all rows are told as closely as ever. Bases come in float32 too."""
    moments, bases, z = case(2, 2, 3, 3, 4)
    plain, found = both(moments, bases.float(), z, torch.float32)
    told = gaps(plain, found)
    of_all = {
        name: getattr(found, name)[..., -1, :] / getattr(plain, name)[..., -1, :] for name in ("random", "normal")
    }
    return told | {f"{name} of all": float((one - 1).abs().max()) for name, one in of_all.items()}


def in_halves():
    """Products of wide rows in half precision, against float64: groups of sizes far apart, one of them of nothing;
    widths that are no whole tiles; all at once and in many steps. What is not finite stays so."""
    before = stacked_controls.PARTED_WIDTH, wide_controls.IMAGE_CELLS, wide_controls.TILE_CELLS
    stacked_controls.PARTED_WIDTH = 40
    told = {}
    sizes = {
        "apart": (2, 2, 3, 3, 4),
        "tiles": (2, 1, 2, 3, 16, 150),
        "no groups": (1, 1, 0, 3, 5),
    }
    scales = torch.tensor([[1e-45, 1e-20, 1.0], [1e45, 1.0, 1.0]], dtype=torch.float64)
    for name, size in sizes.items():
        moments, bases, z = case(*size)
        if name == "apart":
            moments.groups.mul_(scales[:, :, None, None])
            moments.total[:] = moments.groups.sum(dim=1)
            moments.mean[:] = 0
        plain = of_controls(moments, bases, z, torch.float64)
        told[name] = gaps(plain, by_kernel(moments, bases, z, torch.float32))
        wide_controls.IMAGE_CELLS, wide_controls.TILE_CELLS = 1, 1
        told[f"{name} one by one"] = gaps(plain, by_kernel(moments, bases, z, torch.float32))
        wide_controls.IMAGE_CELLS, wide_controls.TILE_CELLS = before[1:]
    moments, bases, z = case(2, 2, 3, 3, 4)
    moments.groups[1, 2] = 0
    nothing = by_kernel(moments, bases, z, torch.float32).random[1, 2].abs().max()
    moments.groups[0, 2, 3, 3] = torch.nan
    lost = by_kernel(moments, bases, z, torch.float32).random.isnan().flatten(2).any(dim=2)
    stacked_controls.PARTED_WIDTH = before[0]
    return {"gaps": told, "nothing": float(nothing), "lost": lost.tolist()}


def few_at_a_time():
    """Sites one by one, against all of them together."""
    given = case(3, 1, 2, 3, 4)
    together, before = of_controls(*given, torch.float64), stacked_controls.IMAGE_CELLS
    stacked_controls.IMAGE_CELLS = 1
    alone = both(*given)
    stacked_controls.IMAGE_CELLS = before
    return {name: max(gaps(together, one)[name] for one in alone) for name in vars(together)}


def unclear():
    """Bases with many reflections, and one that is none, say nothing of their controls, and keep nothing back."""
    moments, bases, z = case(3, 2, 2, 4, 3)
    bases[1, 0] = torch.eye(40, dtype=torch.float64)[:, 5:8]  # at right angles to the first axes
    bases[2, 1] = torch.nan
    plain, found = both(moments, bases, z)
    return {
        "gaps": gaps(plain, found),
        "random": found.random.isnan().any().item(),
        **{name: getattr(found, name).flatten(2).isnan().any(dim=2).tolist() for name in ("normal", "traces")},
    }


def constant():
    """Rows that are all the same have no covariance to take shares of, and all their energy in the mean."""
    moments, bases, z = case(1, 1, 0, 3, 3)
    mean = torch.full_like(moments.mean, 0.5)
    total = moments.n[:, None, None] * mean[:, :, None] * mean[:, None, :]
    plain, found = both(Moments(moments.groups, total, mean, moments.n), bases, z)
    rest = [getattr(one, name) for one in (plain, found) for name in ("traces", "squares", "whole")]
    energies = {name: getattr(found, name) / getattr(plain, name) - 1 for name in ("random", "normal")}
    told = {name: float(one.abs().max()) for name, one in energies.items()}
    return told | {"nothing left": all(bool(one.isnan().all()) for one in rest)}


if __name__ == "__main__":
    cases = {
        "shapes": shapes,
        "narrow": narrow,
        "halves": in_halves,
        "few": few_at_a_time,
        "unclear": unclear,
        "constant": constant,
    }
    print(json.dumps({name: one() for name, one in cases.items()}))
