"""What every test shares: shape and type checks on the whole package, seeds, Hypothesis settings, `import oracles`.

The hook must come before the first import of anisoscope, so nothing above it may import the package.
"""

import os
import sys
from pathlib import Path

from jaxtyping import install_import_hook

# Kernels are left out: Triton reads their source, and finds nothing of it in what wraps them.
PACKAGE = Path(__file__).parent.parent / "src" / "anisoscope"
PARTS = [f"anisoscope.{one.stem}" for one in PACKAGE.iterdir() if one.stem != "kernels"]
# The tower lets an int stand for a float, as type checkers do (PEP 484).
install_import_hook(PARTS, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# Thousands of small calls: on a busy machine more threads cost more than they give.
torch.set_num_threads(1)
settings.register_profile("anisoscope", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("anisoscope")

FEW = [0, 42]


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
    """For tests that go through many forms of the same data: one seed unless more are asked for."""
    return request.param
