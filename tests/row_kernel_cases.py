"""Kernels that visit each row once, run by Triton's interpreter on the CPU. Run by test_kernels.py."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from kernel_cases import brute_force, draw

from anisoscope.measures import row_kernels, stacked_neighbors
from anisoscope.tangent import visits as visits_of
from anisoscope.tangent.descent import solved, swept


def copies():
    """Copies in one site and none in the other, -0.0 among them, against the plain way; and a made-up clash."""
    rows = draw(2, 75, 150)
    rows[0, 40:60] = rows[0, 10:30]
    rows[0, 10, 3], rows[0, 40, 3] = 0.0, -0.0
    weights = stacked_neighbors._weights(150, "cpu")
    found, clash = row_kernels.copies(rows, weights)
    plain, plain_clash = stacked_neighbors._copies(rows)
    _, forced = row_kernels.copies(rows, torch.zeros_like(weights))
    return {
        "same": torch.equal(found, plain) and torch.equal(clash, plain_clash),
        "number": found.sum(dim=1).tolist(), "clash": clash.tolist(), "forced": forced.tolist(),
    }  # fmt: skip


def halves():
    """Against float64, for rows of a width and number that fill no program."""
    rows, order = draw(2, 37, 150) * 5 + 3, torch.randperm(37, generator=torch.Generator().manual_seed(1))
    mean, factor = rows.double().mean(dim=1), torch.tensor([4.0, 8.0], dtype=torch.float64)
    half, squares, lost = row_kernels.in_half(rows, order, mean, factor, 64, 192)
    wide = (rows.double() - mean[:, None])[:, order] * factor[:, None, None]
    near = wide.float().half()
    worst = ((wide - near).norm(dim=2) / wide.norm(dim=2)).amax(dim=1)
    return {
        "half": torch.equal(half[:, :37, :150], near),
        "rest": float(half[:, 37:].abs().max() + half[:, :, 150:].abs().max() + squares[:, 37:].abs().max()),
        "squares": float((squares[:, :37] / wide.square().sum(dim=2) - 1).abs().max()),
        "lost": float((lost / worst - 1).abs().max()),
    }


def within():
    """Runs of rows with copies, with a mean far away, and of a number that fills no program."""
    rows = torch.stack([draw(230, 40), draw(230, 40, seed=1) + 300])
    rows[0, 20] = rows[0, 5]
    found, sure = row_kernels.nearest_within(rows, 3, 75, 70)
    worst = 0.0
    for site in range(2):
        for block in range(3):
            truth = brute_force(rows[site, 75 * block : 75 * block + 70], 2)
            error = (found[site, block] - truth).abs() / truth.clamp_min(1e-300)
            worst = max(worst, float(error[truth > 0].max()), float(found[site, block][truth == 0].sum()))
    tied = torch.ones(1, 70, 8)
    tied[0, :8] = 0.0
    tied[0, :8] += torch.eye(8)  # eight rows all as far from each other
    _, doubt = row_kernels.nearest_within(tied, 1, 70, 70)
    return {"worst": worst, "sure": sure.tolist(), "tied": doubt.tolist()}


def visits():
    """A half step of three fits, one with a concept of length zero, one not active, against plain products."""
    a, concepts = draw(3, 150, 70), draw(3, 5, 70, seed=1, dtype=torch.float64)
    concepts[1, 2] = 0
    gram, active = concepts @ concepts.mT, torch.tensor([True, True, False])
    before = draw(3, 5, 150, seed=2).clamp_min(0)
    codes = before.clone()
    steps = visits_of.HalfSteps.of(a, 5)
    second, pull = steps.take(codes, concepts, gram, active, 3)
    worst = 0.0
    for fit in (0, 1):
        want = swept(before[fit], concepts[fit].float() @ a[fit].T, gram[fit], 3).double()
        for one, other in (
            (codes[fit], want), (second[fit], want @ want.T), (pull[fit], want @ a[fit].double()),
        ):  # fmt: skip
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
    warm = visits_of.warm_codes(a, concepts, 40, 1e-6)
    gap = [float((warm[i] - solved(a[i], concepts[i], 40, 1e-6)).abs().max() / warm[i].max()) for i in (0, 2)]
    kept = torch.equal(codes[2], before[2]) and not bool(second[2].any())
    return {"worst": worst, "kept": kept, "warm": max(gap), "idle": float(codes[1, 2].max() + warm[1, 2].max())}


if __name__ == "__main__":
    print(json.dumps({"copies": copies, "halves": halves, "within": within, "visits": visits}[sys.argv[1]]()))
