"""The laws of cost: fits recover known exponents with honest intervals, and memory and sketches are read rightly."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anisoscope.stats.sketch import Sketch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def cost():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import cost
    finally:
        sys.path.remove(str(BENCHMARKS))
    return cost


SIZES = [{"N": n, "D": 256} for n in (512, 2048, 8192, 65536)] + [{"N": 8192, "D": d} for d in (64, 128, 512, 1024)]


def made(sizes, generator, noise=0.1, overhead=0.0):
    return [
        (overhead + 3e-9 * one["N"] ** 1.2 * one["D"] ** 0.8) * float(np.exp(noise * generator.standard_normal()))
        for one in sizes
    ]


class TestLaws:
    def test_exact_values_give_the_exact_law(self, cost):
        law = cost.fit_law(SIZES, made(SIZES, np.random.default_rng(0), noise=0.0), ("N", "D"))
        assert law.exponents == pytest.approx({"N": 1.2, "D": 0.8}, abs=1e-6)
        assert law.overhead == 0.0 and law.misfit < 1e-6
        far = {"N": 1e6, "D": 8192}
        assert law(far) == pytest.approx(3e-9 * 1e6**1.2 * 8192**0.8, rel=1e-4)

    def test_the_intervals_cover_as_they_claim(self, cost, seed):
        """Of 95 % intervals of exponents and of a new measurement far outside; five standard errors of 200 draws."""
        generator, far = np.random.default_rng(seed), {"N": 200_000, "D": 4096}
        hits = np.zeros(3)
        for _ in range(200):
            law = cost.fit_law(SIZES, made(SIZES, generator), ("N", "D"))
            low, high = law.interval(far)
            hits += [abs(law.exponents["N"] - 1.2) <= law.halves["N"], abs(law.exponents["D"] - 0.8) <= law.halves["D"],
                     low <= made([far], generator)[0] <= high]  # fmt: skip
        assert hits / 200 == pytest.approx(0.95, abs=5 * (0.95 * 0.05 / 200) ** 0.5)

    def test_scatter_of_repeats_widens_an_interval_that_points_alone_make_too_narrow(self, cost):
        values = made(SIZES, np.random.default_rng(0), noise=0.0)
        narrow, wide = (cost.fit_law(SIZES, values, ("N", "D"), error) for error in (0.0, 0.2))
        assert narrow.halves["N"] < 1e-6 and 0.05 < wide.halves["N"] < 0.5

    def test_an_overhead_is_told_from_the_law(self, cost):
        """A plain power would read too small an exponent off the same points."""
        sizes = [{"N": 2**i} for i in range(9, 18)]
        values = [2e-3 + 1e-6 * one["N"] for one in sizes]
        law = cost.fit_law(sizes, values, ("N",), overhead=True)
        assert law.exponents["N"] == pytest.approx(1.0, abs=0.01)
        assert law.overhead == pytest.approx(2e-3, rel=0.03)
        assert law.bend("N") == pytest.approx(2000, rel=0.05)
        assert cost.fit_law(sizes, values, ("N",)).exponents["N"] < 0.9

    def test_too_few_points_are_refused(self, cost):
        with pytest.raises(ValueError, match="needs 4 points or more, got 3"):
            cost.fit_law(SIZES[:3], [1.0, 2.0, 3.0], ("N", "D"))

    def test_laws_over_rows_are_fitted_to_two_decades_of_them(self, cost):
        """Of rows where the law holds, not of all that were measured."""
        for name, family in cost.FAMILIES.items():
            held = [one for one in family.sizes if family.holds(one)]
            assert len(held) >= len(family.axes) + 2 + (not family.above), name
            rows = [one["N"] for one in held if "N" in family.axes]
            assert not rows or max(rows) >= 100 * min(rows), name


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
class TestMeasured:
    def test_the_peak_is_what_the_job_held_at_once(self, cost):
        def job():
            for _ in range(2):  # one after the other: 64 MB, not 128
                torch.ones(16 * 2**20, dtype=torch.float32)

        # The kernel counts pages of a whole process, in which others may be at work: that adds, and never takes away.
        found = min((cost.measured({"N": 1}, job) for _ in range(3)), key=lambda one: one.peak)
        assert 60e6 < found.peak < 85e6
        assert len(found.seconds) >= 3 and min(found.seconds) > 0


class TestSketchReading:
    def test_the_rest_of_the_trace_is_spread_over_the_other_directions(self, cost, seed):
        x = torch.randn(400, 24, generator=torch.Generator().manual_seed(seed)) * torch.linspace(3, 0.2, 24)
        state = Sketch.empty(6, 24).update(x)
        values = cost.completed(state, 24)
        assert len(values) == 24 and float(values.sum()) == pytest.approx(float(state.trace))
        assert (values[6:] == values[6]).all()

    def test_a_sketch_of_full_rank_reads_the_exact_numbers(self, cost, seed):
        x = torch.randn(200, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        exact = cost.shapes(torch.linalg.eigvalsh(torch.cov(x.T)))
        found = cost.shapes(cost.completed(Sketch.empty(8, 8).update(x), 8))
        assert found == pytest.approx(exact, rel=1e-9)

    def test_raised_values_bound_a_decaying_spectrum_from_above(self, cost, seed):
        x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 65) ** -1.0
        exact = torch.linalg.eigvalsh(torch.cov(x.double().T) * 1999).flip(0)
        state = Sketch.empty(16, 64).update(x)
        low, high = (cost.completed(state, 64, raised=one) for one in (False, True))
        assert (low[:16] <= exact[:16] * (1 + 1e-9)).all() and (high[:16] >= exact[:16] * (1 - 1e-9)).all()
        assert float(high.sum()) == pytest.approx(float(state.trace))
