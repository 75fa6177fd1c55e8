"""The GPU kernels, run by Triton's interpreter: the same programs, on the CPU."""

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import answers
import pytest
import torch

from anisoscope.measures.neighbors_fused import LEAST_ROWS, MOST_K, SHAPES, can_fuse, enough_groups
from anisoscope.tangent.sweeps import has_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
HERE = Path(__file__).parent


def run(*case, script="kernel_cases.py"):
    """What a script of interpreted kernels says; skips where there is no Triton, which comes for Linux alone."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    code, said, complaint = interpreter()(str(HERE / script), *case)
    assert code == 0, complaint[-2000:]
    return json.loads(said.splitlines()[-1])


@functools.cache
def interpreter():
    """A process for all scripts, which need as long for their imports as for most cases. It ends with the tests."""
    command = [sys.executable, str(HERE / "interpreted.py")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as the tests themselves have
    process, ask = answers.begun(command, env=one_thread)
    atexit.register(process.communicate)
    return ask


def test_fused_neighbours_are_those_of_brute_force():
    for name, found in run("neighbours").items():
        assert found["worst"] <= 1e-12, (name, found)  # what is called certain is exact
        assert found["below"] >= -1e-12, (name, found)  # no distance is made up
        assert found["wrong"] == 0, (name, found)
        # Rows a millionth as long as the longest, and distances that rounding can hide, are left to the plain search.
        if name not in ("one far row", "hidden by rounding"):
            assert found["certain"] > 0.5, (name, found)


def test_rows_whose_lists_were_too_short_are_looked_at_again():
    found = run("again")
    for name, one in found.items():
        assert one["worst"] <= 1e-12 and one["below"] >= -1e-12 and one["wrong"] == 0, (name, one)
    assert found["few"]["certain"] < 0.9 and found["crowd"]["certain"] < 0.5, found
    assert found["all"]["certain"] == found["whole"]["certain"] == 1, found


def test_rows_in_other_units_are_as_certain():
    found = run("scaled")
    for name, one in found.items():
        assert one["worst"] <= 1e-12 and one["below"] >= -1e-12 and one["wrong"] == 0, (name, one)
        assert one["certain"] == found["plain"]["certain"] > 0.5, (name, found)


def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    command = [sys.executable, str(HERE / "kernel_compile.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["forgotten"], "kernels that nobody has built"
    shared = found["shared"]
    assert max(shared.values()) <= 160 * 1024, shared  # as large GPUs have; the rules know of kernels that need it
    most = {"80": 163, "89": 99}  # kilobytes that a program may have there
    assert found["products"].keys() == most.keys()
    assert all(size <= most[kind] * 1024 for kind, size in found["products"].items()), found["products"]


@pytest.fixture(scope="module")
def small():
    """Cases that take less than the start of a process, all in one."""
    return run("groups", "shapes", "codes", "inverses", "accounts")


def test_short_cuts_of_the_interpreter_change_no_number():
    assert run(script="interpreted_cases.py") == {"same": [True, True, True], "refused": True, "left": True}


def test_groups_are_those_of_the_kernels(small):
    assert small["groups"] is True


def test_bounds_do_not_depend_on_the_shape_of_the_product(small):
    """But for sums that are added up in other steps, which the allowance for rounding covers."""
    assert len(small["shapes"]) == len(SHAPES) - 1
    assert max(small["shapes"]) <= 2.0**-14, small["shapes"]  # two bounds, each moved by a place in its lowest bits


def test_rounds_over_codes_are_those_of_the_plain_products(small):
    for case, error in small["codes"].items():
        assert error < (1e-12 if "64" in case else 1e-5), case


def test_one_fit_by_the_kernels_is_that_of_plain_products():
    """Errors after every half step and both factors; rounds that are not usual are done again with care."""
    found = run("alone")
    for case, one in found.items():
        assert one["gap"] < 1e-9, (case, one)
    assert found["0 rows"]["careful"] == 0 and found["0 rows"]["iterations"] > 4, found
    assert found["0.5 rows"]["careful"] < found["0.5 rows"]["iterations"], found
    assert 0 < found["0 idle"]["careful"] < found["0 idle"]["iterations"], "a concept without rows"
    assert found["0.5 wild"]["careful"] > 3, "momentum that is taken back"


def test_small_inverses_and_what_has_none(small):
    for found in small["inverses"].values():
        assert found["error"] < 1e-12
        assert found["good"] == [True, False, False]
        assert found["rest"] == 0


def test_the_account_of_a_half_step(small):
    for rank, error in small["accounts"].items():
        assert error < 1e-12, rank


def test_fits_by_the_kernels_are_those_of_plain_products():
    """Without momentum, with it, and with so much of it that rounds are taken back, the last of them too."""
    found = run("descents")
    for momentum, one in found.items():
        assert one["gap"] < 2e-5, (momentum, one)
        assert one["iterations"][0] == one["iterations"][1] and one["ordinary"], (momentum, one)
        taken_back = sum(map(any, one["taken back"]))
        assert (taken_back > 3 and any(one["taken back"][-1])) if momentum == "4.0" else not taken_back, (momentum, one)
    assert max(map(float.__truediv__, found["0.5"]["error"], found["0.0"]["error"])) < 0.97, found


def test_copies_are_those_of_whole_rows():
    found = run("copies", script="row_kernel_cases.py")
    assert found == {"same": True, "number": [20, 0], "clash": [False, False], "forced": [True, True]}


def test_rows_in_half_precision():
    found = run("halves", script="row_kernel_cases.py")
    assert found["half"] and found["rest"] == 0 and found["lengths"] < 1e-14, found
    assert found["far"] > 7e37, "places without a row are nobody's neighbours"
    assert max(found["size"]) < 1 and found["size"][0] < found["size"][1], "shrunken, and less where sums are short"
    below, share, worst = found["lost"]
    assert below >= 0 and share > 0.99 and worst < 2.0**-11, "no row lost more than is allowed, and one as much"


def test_nearest_rows_within_runs():
    found = run("within", script="row_kernel_cases.py")
    assert found["worst"] < 1e-14 and found["beyond"], found
    assert found["hidden"] < 1e-12, "what products cannot tell is measured"
    assert found["tied"] < 1e-14, "rows with many neighbours as near as each other are measured against all of them"


def test_sums_of_sites_in_three_visits():
    found = run("sums", script="row_kernel_cases.py")
    assert max(found["error"].values()) < 1e-12, found
    assert max(found["near"].values()) < 1e-6, found


def test_rows_taken_and_measured_in_one_visit_and_forms_of_them():
    found = run("taken", script="row_kernel_cases.py")
    assert found["same"] and found["squares"] < 1e-14, found
    assert found["forms"] < 5e-3 and found["dtype"], "of error bars, with nearly all in one column of one site"


def test_two_nn_of_sites_whose_copies_are_marked():
    found = run("masked", script="row_kernel_cases.py")
    assert max(map(abs, (*found["value"], *found["stderr"], found["rough"]))) < 1e-9, found
    assert all(found["same"]) and found["copies"] == 220
    assert found["empty"], "too few rows are left to the plain measure"


def test_half_steps_that_visit_each_row_once():
    found = run("visits", script="row_kernel_cases.py")
    assert found["worst"] < 1e-5 and found["warm"] < 1e-4 and found["kept"] and found["idle"] == 0, found
    assert found["again"], "what is done again is not swept"


def test_biases_of_the_effective_rank():
    found = run("biases", script="row_kernel_cases.py")
    assert found["plain"] < 1e-10 and found["slow"] < 1e-10, found


def test_inverses_of_triangular_factors():
    found = run("factors", script="row_kernel_cases.py")
    assert found["good"] == [True, False, False, True] and found["finite"] and found["upper"] == 0, found
    assert found["worst"] < 1e-12 and found["orthonormal"] < 1e-12 and found["plans"] < 1e-14, found
    *errors, sound = found["lengths"]
    assert max(errors) < 1e-12 and sound == [True, False], found
    assert found["settled"] == [[True, False, False, True, *[False] * 5]] * 2, found


def test_the_rule_can_be_read():
    rows = torch.zeros(LEAST_ROWS, 4)
    assert not can_fuse(rows, 2), "no GPU"
    assert not has_kernels(torch.device("cpu"), 4)
    assert enough_groups(LEAST_ROWS, 2) and not enough_groups(LEAST_ROWS - 1, 2)
    assert not enough_groups(16_384, 20), "two of twenty neighbours in one of 128 groups: hardly a row would be certain"
    assert enough_groups(262_144, 20) and not enough_groups(1 << 30, MOST_K + 1)
