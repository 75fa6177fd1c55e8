"""The kernel of distances by token type, interpreted on the CPU, against the definition. Run by test_type_kernel.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import json
import math

import interpreted  # noqa: F401
import torch

from anisoscope.kernels import kernels_of
from anisoscope.measures import row_kernels
from anisoscope.tangent import stacked_types
from anisoscope.tangent.frequency import SAME
from anisoscope.tangent.stacked_types import Types, plain_sums, sums_by_kernel, type_sums
from anisoscope.text.frequency import TokenCounts, frequency_bins

row_kernels.SHARES = 2  # the interpreter is slow
kernels = kernels_of("types")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def types_of(ids):
    counts = TokenCounts.of(ids, int(ids.max()) + 1)
    return Types.of(ids, frequency_bins(counts, 2), counts, 9, 0, torch.device("cpu"))


def some_ids():
    """One type with most of the rows, some with a few, five seen once; in no order."""
    ids = torch.cat([torch.full((40,), 2), torch.arange(12) % 4 + 3, torch.arange(7, 12), torch.tensor([0, 0, 1, 1])])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]


def slow(x, ids):
    """Row by row as the definition says, sums without rounding."""
    names = ids.unique().tolist()
    out = torch.zeros(2, len(x), len(names), dtype=torch.float64)
    for site, rows in enumerate(x.double().tolist()):
        mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        for at, name in enumerate(names):
            mine = [row for row, other in zip(rows, ids.tolist(), strict=True) if other == name]
            m, n = len(mine), len(rows)
            centre = [math.fsum(column) / m for column in zip(*mine, strict=True)]
            for row in mine:
                own, overall = math.dist(row, centre), math.dist(row, mean)
                if m > 1 and own > SAME * overall:
                    out[0, site, at] += own * math.sqrt(m / (m - 1))
                out[1, site, at] += overall * math.sqrt(n / (n - 1))
    return out


def error(one, other):
    """The largest, relative; what is nothing on one side must be nothing on the other."""
    return float(((one - other).abs() / torch.where(other == 0, 1e-300, other.abs())).max())


def told(x, ids):
    types = types_of(ids)
    found = sums_by_kernel(x, types)
    assert found.dtype == torch.float64
    return {"plain": error(found, plain_sums(x, types)), "slow": error(found, slow(x, ids))}


def shapes():
    ids = some_ids()
    n = len(ids)
    wider = draw(4, n, 41, seed=2)
    found = {
        "several sites": told(draw(3, n, 37), ids),
        "one column": told(draw(1, n, 1), ids),
        "far from the origin": told(draw(1, n, 37) + 3000, ids),
        "sites and rows of something larger": told(wider[1::2, :, 3:40], ids),
        "all types once": told(draw(2, 13, 5), torch.arange(13)),
        "no type once": told(draw(2, 12, 5), torch.arange(12) % 6),
        "one type": told(draw(2, 12, 5), torch.zeros(12, dtype=torch.int64)),
        "bfloat16": told(draw(1, n, 20).bfloat16(), ids),
        "float16": told(draw(1, n, 20).half(), ids),
    }
    plain, kernels.tiling = kernels.tiling, lambda width: {"K": 128, "R": 2, "num_warps": 4}
    found["two rows at a time"] = told(draw(1, n, 65), ids)
    kernels.tiling = plain
    nothing = sums_by_kernel(draw(0, n, 5), types_of(ids))
    return found | {"no sites": {"plain": float(nothing.shape != (2, 0, 12)), "slow": 0.0}}


def copies():
    """Types of which all rows are one row are at their centroid; so is what differs by less than rounding may."""
    ids = some_ids()
    places = draw(int(ids.max()) + 1, 37) * 30 + 1e5
    x = torch.stack([places[ids], places[ids]])
    changed = (ids == 3).nonzero()[0, 0]
    x[1, changed, 0] += 1
    found = sums_by_kernel(x, types_of(ids))
    x = draw(2, len(ids), 5) * 1e-9
    x[:, :, 0] = ids.float() * 1e6  # rows 1e-9 apart, 1e5 and more from the mean
    x[1] += draw(len(ids), 5) * (torch.arange(5) == 2) * 1e-3
    near = sums_by_kernel(x, types_of(ids))
    return {
        "same": float(found[0, 0].abs().max()), "changed": (found[0, 1] > 0).nonzero().flatten().tolist(),
        "below": float(near[0, 0].max()), "above": error(near[0, 1], slow(x, ids)[0, 1]),
        "overall": error(near[1], slow(x, ids)[1]),
    }  # fmt: skip


def lost():
    """What is not a number spoils the sums of its own site alone, as it does in plain sums."""
    ids = some_ids()
    types, x = types_of(ids), draw(3, len(ids), 20)
    x[0, 5, 3], x[2, 7, 0] = torch.inf, torch.nan
    found, plain = sums_by_kernel(x, types), plain_sums(x, types)
    return {
        "finite": torch.isfinite(found[1]).all(dim=1).tolist(), "other": error(found[:, 1], plain[:, 1]),
        "same": torch.equal(found[1].isfinite(), plain[1].isfinite()) and torch.equal(found[0, ::2], plain[0, ::2]),
    }  # fmt: skip


def whole():
    """All of the sums by type with the kernel and without, and the same bits twice."""
    ids = some_ids()
    types, x = types_of(ids), draw(2, len(ids), 20) + ids[:, None] * 0.1
    plain = type_sums(x, types)
    stacked_types.kernels_run = lambda device: True
    asked, calls = stacked_types.column_sums, []
    stacked_types.column_sums = lambda rows: calls.append(rows.shape) or asked(rows)
    found, again = type_sums(x, types), type_sums(x, types)
    return {
        "sums": error(found.sums, plain.sums), "drawn": float((found.drawn - plain.drawn).abs().nan_to_num().max()),
        "lost": torch.equal(found.drawn.isnan(), plain.drawn.isnan()), "calls": len(calls),
        "same": torch.equal(found.sums, again.sums) and torch.equal(found.drawn.nan_to_num(), again.drawn.nan_to_num()),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"shapes": shapes(), "copies": copies(), "lost": lost(), "whole": whole()}))
