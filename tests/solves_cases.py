"""Kernels for forms of band matrices, run by Triton's interpreter on the CPU. Run by test_band_forms.py."""

import json

import interpreted  # noqa: F401
import torch
from band_cases import banded, kept, leading_errors, leading_matrices, projected, rational

from anisoscope.measures import band_forms
from anisoscope.measures.band_forms import EPS, forms, leading_vector

HALF, WIDTH = 8, 19  # two blocks and a part of one
POLES = 6
SPECTRA = {
    "steep": torch.logspace(0, -12, WIDTH, dtype=torch.float64),
    "two": torch.tensor([1.0, 1e-12], dtype=torch.float64).repeat(WIDTH)[:WIDTH],
    "spike": torch.cat([torch.tensor([1e3]), torch.logspace(0, -3, WIDTH - 1)]).double(),
    "alone": torch.logspace(0, -5, WIDTH, dtype=torch.float64),
}


def found_forms():
    """Errors relative to the terms that are added up; whether a matrix that is not finite gives NaN, and no other."""
    draws = torch.Generator().manual_seed(0)
    errors = {}
    for name, lam in SPECTRA.items():
        full, vectors = banded(lam, HALF)
        rows = (torch.randn(21, WIDTH, generator=draws, dtype=torch.float64) * lam.sqrt()) @ vectors.T
        rows = rows.T[None].float().contiguous()
        shifts, weights, f = rational(lam, POLES)
        terms = (vectors.T @ rows.double()).square().mT * f
        # A pole without weight, which nothing is to be asked of.
        shifts, weights = (torch.nn.functional.pad(x, (0, 1), value=y) for x, y in ((shifts, torch.nan), (weights, 0)))
        given = [kept(full[None], HALF), rows, shifts, weights, 2e-16 * lam.max().reshape(1)]
        if name == "alone":
            band_forms.SCRATCH_BYTES = 1  # one matrix after another
            given = [torch.cat([one, one * torch.nan if at == 0 else one]) for at, one in enumerate(given)]
        found = forms(*given)
        errors[name] = float(((found[:1] - terms.sum(dim=2)).abs() / terms.abs().sum(dim=2)).max())
    return errors, bool(torch.isnan(found[1]).all()), bool(torch.isfinite(found[0]).all())


def found_clamped():
    """The pivot of a matrix that is singular, and a little less, is the least one; another direction is as it was."""
    one = torch.eye(2, dtype=torch.float64)
    band = kept(torch.diag(torch.tensor([2.0, -1e-18], dtype=torch.float64))[None], HALF)
    number = torch.ones(1, 1, dtype=torch.float64)
    found = forms(band, one.float()[None], 0 * number, number, 0.25 * number[0])
    return float((found - torch.tensor([[0.5, 4.0]])).abs().max())


def found_leading():
    named, errors = leading_matrices(WIDTH, HALF), {}
    for names in (list(named)[:-1], list(named)[-1:]):
        a = torch.stack([named[name] for name in names])
        top = torch.linalg.eigvalsh(a)[:, -1]
        apart = 30 * EPS * torch.linalg.matrix_norm(a, ord=2) * (-1.0) ** torch.arange(len(a))
        errors |= dict(zip(names, leading_errors(a, top, leading_vector(kept(a, HALF), top + apart)), strict=True))
    none = leading_vector(kept(torch.full((1, 5, 5), torch.nan).double(), HALF), torch.full((1,), torch.nan).double())
    return errors, bool(torch.isnan(none).all())


def main():
    torch.set_num_threads(1)
    band_forms._by_kernels = lambda tensor: True
    band_forms.FORM_ROWS = 16
    errors, lost, untouched = found_forms()
    *given, truth = projected(WIDTH, HALF, 12)
    apart = float((forms(*given) / truth - 1).abs().max())
    leading, none = found_leading()
    print(
        json.dumps(
            {
                "forms": errors, "projected": apart, "clamped": found_clamped(), "leading": leading,
                "lost": [lost, none], "untouched": untouched,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
