"""Products of wide rows from remainders of integers: by Triton's interpreter, and where they are asked for."""

import itertools
import math

import pytest
import torch
from test_kernels import run

from anisoscope.measures import stacked_sums
from anisoscope.stats import gram_matrices, moments, residues


@pytest.fixture(scope="module")
def cases():
    return run(script="residue_cases.py")


def test_products_are_those_of_integers_and_near_those_of_the_rows(cases):
    assert len(cases["shapes"]) == 6 and len(cases["hostile"]) == 5
    for case, found in (cases["shapes"] | cases["hostile"]).items():
        assert found["whole"] < 2**-51, (case, "but for one rounding to float64")
        assert found["error"] < 1e-9 and found["symmetric"], (case, found)
    for case in ("single", "same", "largest"):
        assert cases["hostile"][case]["error"] < 2**-49, (case, "nothing is rounded")


def test_sums_of_many_rows_stay_within_31_bits(cases):
    assert cases["long"] < 2**-51


def test_rows_from_anywhere_to_anywhere(cases):
    assert max(cases["strides"]["errors"].values()) < 1e-9, cases["strides"]
    assert cases["strides"]["nothing else is written"]


def test_small_eigenvalues_are_kept_where_halves_lose_them(cases):
    found = cases["steep"]
    for name in ("plain", "outlier", "flat"):
        assert 1e-9 < found[f"least of {name}"] < 2e-8 and found[name] < 1e-5, (name, found)
    assert found["halves"] > 1e-2, "the rows tell the two apart"


def test_what_is_no_number_spoils_its_column_in_its_own_cell_and_site_alone(cases):
    assert cases["lost"] is True


def test_the_same_bits_twice_and_alone(cases):
    assert cases["same"] == {"twice": True, "alone": True, "few": True}


def test_moduli_have_no_divisor_in_common_and_hold_all_products():
    """Of columns shorter than ``2**31``, and of roundings by half a unit of as many rows as fit anywhere."""
    kernels = pytest.importorskip("anisoscope.kernels.residues")
    moduli = kernels.PRIME_TO_EACH_OTHER
    assert all(math.gcd(a, b) == 1 for a, b in itertools.combinations(moduli, 2)) and max(moduli) <= 256
    assert (2**31 + math.sqrt(2**40) / 2) ** 2 < kernels.WHOLE / 2
    assert kernels.CUT.window % kernels.CUT.rows == 0 and kernels.CUT.window * 2**14 < 2**30
    for value in (0, 1, -1, 12345678901234567, -(2**61), 2**62 + 2**31, -(2**62) - 7):
        sums = sum(value % one * kernels._weight(one) for one in moduli) % 2**64
        told = (sums - 2**64 if sums >> 63 else sums) * kernels.WHOLE / 2**64
        assert abs(told - value) < kernels.WHOLE * 2**-53, value


@pytest.mark.parametrize(
    ("n", "width", "capability", "taken"),
    [(residues.LEAST_ROWS, residues.LEAST_WIDTH, (9, 0), True), (residues.LEAST_ROWS - 1, 4096, (9, 0), False),
     (9999, residues.LEAST_WIDTH - 1, (9, 0), False), (9999, 4096, (8, 0), False), (9999, 4096, (10, 0), False)],
)  # fmt: skip
def test_where_rows_are_taken_as_integers(monkeypatch, n, width, capability, taken):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(residues, "kernels_run", lambda device: True)
    assert residues.fits(n, width, device) == taken
    monkeypatch.setattr(residues, "kernels_run", lambda device: False)
    assert not residues.fits(n, width, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_integers_are_asked_for_where_float32_rows_must_be_exact(monkeypatch, dtype):
    asked = []
    monkeypatch.setattr(residues, "fits", lambda n, width, device: True)
    monkeypatch.setattr(residues, "cell_grams", lambda rows, ends, out: asked.append(rows.dtype) or out.zero_())
    rows = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    right = rows.double().mT @ rows.double()
    for found in (gram_matrices.cell_grams(rows, [30], exact=True)[:, 0], gram_matrices.grams(rows, exact=True)):
        assert torch.equal(found, right * 0) if dtype == torch.float32 else torch.allclose(found, right, rtol=1e-14)
    assert asked == [torch.float32] * 2 * (dtype == torch.float32)
    gram_matrices.cell_grams(rows, [30]), gram_matrices.grams(rows)
    moments.Moments.of(rows[0])
    assert len(asked) == 2 * (dtype == torch.float32), "nobody else is given them"


@pytest.mark.parametrize("exact", [True, False])
def test_sums_of_states_are_centred_before_they_become_float32(monkeypatch, exact):
    """Rows far from zero keep their digits: their mean is taken off in float64, and what is left rounded."""
    given = []

    def products(rows, ends, out):
        given.append(rows.dtype)
        return gram_matrices.cell_grams(rows.double(), ends, out)

    monkeypatch.setattr(residues, "fits", lambda n, width, device: True)
    monkeypatch.setattr(residues, "cell_grams", products)
    rows = torch.randn(3, 900, 8, generator=torch.Generator().manual_seed(0)) + 3000
    found, _ = stacked_sums.Sums.of(rows, directions=False, exact=exact)
    centred = rows.double() - rows.double().mean(dim=1, keepdim=True)
    right = centred.mT @ centred / 899
    assert float((found.covariance - right).abs().max()) < (2**-24 if exact else 1e-13)
    assert given == [torch.float32] * exact
