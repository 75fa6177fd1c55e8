"""What every test shares: shape and type checks on the whole package, seeds, Hypothesis settings, `import oracles`.

Checks must be in place before the first import of anisoscope, so nothing above them may import the package.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import shape_checks

# Kernels are left out: Triton reads their source, and finds nothing of it in what wraps them.
PACKAGE = Path(__file__).parent.parent / "src" / "anisoscope"
PARTS = [f"anisoscope.{one.stem}" for one in PACKAGE.iterdir() if one.stem != "kernels"]
shape_checks.install(PARTS)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# Thousands of small calls: on a busy machine more threads cost more than they give.
torch.set_num_threads(1)
settings.register_profile("anisoscope", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("anisoscope")

FEW = [0, 42]

# Modules that take longest come first, the longest of all at the head: one begun last would run beside an idle core.
# `make test` gives out whole modules in this order.
DEAR = (
    "calibration", "theory_recovery", "watching", "monitor", "train_command", "kernels", "stacked", "invariances",
    "theory", "regularizers", "seminmf", "oracles", "cli", "store_kill", "tangent_calibration", "train",
    "theory_learning", "hostile", "sites", "quality_report", "interventions", "quality", "tridiagonal", "band_forms",
    "banded", "chased", "stacked_controls", "small_eigh", "grams", "truths", "states", "type_kernel",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": at for at, name in enumerate(DEAR)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def _seeds(few):
    """Tests hold for any seed from 0 to 99: ANISOSCOPE_SEEDS=all runs them all, ANISOSCOPE_SEEDS=7,8 those two."""
    asked = os.environ.get("ANISOSCOPE_SEEDS", "")
    if asked == "all":
        return list(range(100))
    return [int(number) for number in asked.split(",")] if asked else few


@pytest.fixture(params=_seeds(FEW))
def seed(request):
    return request.param


@pytest.fixture(params=_seeds(FEW[:1]))
def one_seed(request):
    """For tests that go through many forms of the same data, and for dear experiments: one unless more are asked."""
    return request.param
