"""Distances by token type: the kernel, run by Triton's interpreter, plain sums and the definition agree."""

import importlib.util

import numpy as np
import pytest
import torch
from test_kernels import run

from anisoscope.tangent import stacked_types
from anisoscope.tangent.stacked_types import Types, distance_estimates, fits
from anisoscope.tangent.units import jackknife
from anisoscope.text.frequency import TokenCounts, frequency_bins


@pytest.fixture(scope="module")
def cases():
    return run(script="type_kernel_cases.py")


def test_the_kernel_says_what_the_definition_says(cases):
    for case, found in cases["shapes"].items():
        assert found["plain"] < 1e-12 and found["slow"] < 1e-12, (case, found)


def test_rows_at_their_centroid_are_at_distance_zero(cases):
    found = cases["copies"]
    assert found["same"] == 0 == found["below"], "what rounding may have made is nothing"
    assert found["changed"] == [3] and found["above"] < 1e-6, found
    assert found["overall"] < 1e-12, found


def test_rows_that_are_no_numbers_spoil_their_own_site_alone(cases):
    found = cases["lost"]
    assert found["finite"] == [False, True, False] and found["same"] and found["other"] < 1e-12, found


def test_all_of_the_sums_by_type(cases):
    found = cases["whole"]
    assert found["calls"] == 2, "the kernel was asked"
    assert found["sums"] < 1e-12 and found["drawn"] < 1e-11 and found["lost"] and found["same"], found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_rule_can_be_read(monkeypatch):
    rows = torch.zeros(2, 10, 4096)
    assert not fits(rows), "no GPU"
    monkeypatch.setattr(stacked_types, "kernels_run", lambda device: True)
    assert fits(rows) and fits(rows.bfloat16()) and fits(rows[:, :, :150]) and fits(rows[::2])
    assert not fits(torch.zeros(2, 10, 4097)), "a mean and a centroid would not fit a program's registers"
    assert not fits(rows.double()) and not fits(rows[:, :1]) and not fits(rows[:, :, ::2])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_tiles_hold_whole_rows():
    from anisoscope.kernels import types

    for width in (1, 16, 37, 64, 768, 2048, 2049, types.WIDEST):
        tile = types.tiling(width)
        assert tile["K"] >= width and tile["R"] * tile["K"] == types.HELD * 32 * tile["num_warps"], (width, tile)
        assert tile["K"] & (tile["K"] - 1) == 0 == tile["R"] & (tile["R"] - 1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rows_stand_type_by_type():
    ids = (draw(300).abs() ** 3 * 20).long()
    counts = TokenCounts.of(ids, int(ids.max()) + 1)
    types = Types.of(ids, frequency_bins(counts, 3), counts, 9, 0, torch.device("cpu"))
    runs, names = types.runs, ids.unique()
    sizes = (runs.begins[1:] - runs.begins[:-1]).tolist()
    assert sizes == sorted(sizes, reverse=True) and runs.begins[-1] == 300
    assert runs.often == sum(size > 1 for size in sizes) and 0 < runs.often < len(sizes)
    assert runs.order.sort().values.tolist() == list(range(300)) and sorted(runs.names) == list(range(len(sizes)))
    for name, first, end in zip(runs.names, runs.begins, runs.begins[1:], strict=False):
        rows = runs.order[first:end]
        assert set(ids[rows].tolist()) == {int(names[name])} and rows.tolist() == sorted(rows.tolist())


@pytest.mark.parametrize("cells", [1, 1 << 27])
def test_correlations_are_those_of_the_drawn_pairs(monkeypatch, cells):
    """Each weighting written out as a sample: values that differ, that are equal in part, and all equal."""
    monkeypatch.setattr(stacked_types, "RANK_CELLS", cells)
    x = (draw(25).abs() * 4).floor()
    y = torch.stack([draw(25, seed=1), draw(25, seed=2) + 1e4, (draw(25, seed=3) * 2).round(), torch.ones(25)])
    drawn = torch.stack([stacked_types._drawn(25, 12, seed) for seed in (0, 1)])
    drawn[0, :, 18:] = 0  # types that one of the centroids does without
    both = stacked_types._correlations(
        stacked_types._Counts.of(x.double(), drawn), torch.stack([y, y.flip(1)]).double()
    )
    assert both.shape == (2, 2, 4, 13)

    def ranked(values):
        return (values[:, None] > values).sum(axis=1) + (values[:, None] == values).sum(axis=1) / 2

    for found, weights, values in zip(both, drawn, (y, y.flip(1)), strict=True):
        for draws, weight in enumerate(weights.long()):
            a = x.repeat_interleave(weight).numpy()
            for site in range(3):
                b = values[site].repeat_interleave(weight).numpy()
                for kind, (one, two) in enumerate(((a, b), (ranked(a), ranked(b)))):
                    assert float(found[kind, site, draws]) == pytest.approx(np.corrcoef(one, two)[0, 1], abs=1e-11)
        assert bool(found[:, 3].isnan().all())


def test_draws_with_equal_counts_have_no_correlation():
    """All counts equal but one: in some draws of it there is none, exactly, whatever rounding leaves of a spread."""
    x, y = torch.tensor([1.1] * 10 + [2.3]).double(), draw(2, 11) + 3  # shares of eleven are rounded
    y[1] = 0.1
    y[1, 3] = 0.7
    weights = stacked_types._drawn(11, 400, 1)
    found = stacked_types._correlations(stacked_types._Counts.of(x, weights[None]), y[None])[0]
    equal = weights[:, 10] == 0
    alike = (weights[:, 3] == 0) | (weights.sum(dim=1) == weights[:, 3])
    assert 50 < int(equal.sum()) < 350 and 50 < int(alike.sum()) < 350
    assert torch.equal(found[:, 0].isnan(), equal.expand(2, -1))
    assert torch.equal(found[:, 1].isnan(), (equal | alike).expand(2, -1))
    assert float(found.nan_to_num().abs().max()) <= 1 + 1e-12


def test_means_by_bin_have_the_error_bars_of_each_bin_alone():
    """Bins with nothing in them, with two types, with one type that is nearly all, and with types that stand once."""
    sizes = {
        0: [],
        1: [4.0, 9.0],
        2: [1.0, 1.0, 1e13, 2.0],
        3: [1.0, 1.0, 5.0, 3.0, 2.0, 7.0],
        4: [1.0, 2.0],
        5: [6.0] * 4,
    }
    bins = np.repeat(list(sizes), [len(of) for of in sizes.values()])
    flat = np.array([size for of in sizes.values() for size in of])
    mixed = np.random.default_rng(0).permutation(len(flat))
    bins, flat = bins[mixed], flat[mixed]
    none, drawn = torch.zeros(0), torch.zeros(1, 0)
    types = Types(none.long(), none, none, none.bool(), (drawn, drawn), bins, flat, len(sizes))
    sums = np.random.default_rng(1).random((2, 3, len(flat))) * flat
    found = distance_estimates(sums, types)
    barred = 0
    for site in range(3):
        for number in sizes:
            for kind in (0, 1):
                here = (bins == number) & ((flat > 1) if kind == 0 else True)
                one, tops, bottoms = found[site][number][kind], sums[kind, site, here], flat[here]
                if not here.any():
                    assert one is None
                    continue
                bar = jackknife(tops, bottoms, "types")
                assert one.value == pytest.approx(tops.sum() / bottoms.sum()) and one.n == int(bottoms.sum())
                assert (one.stderr is None) == (bar is None) == (one.over is None), (number, kind)
                assert any("left out" in note for note in one.notes) == bool(
                    (bins[flat < 2] == number).any() and not kind
                )
                if bar is not None:
                    assert one.stderr == pytest.approx(bar.stderr) and one.dof == bar.dof == here.sum() - 1
                    assert one.over == f"{here.sum()} token types"
                    barred += 1
    assert barred == 3 * 4
