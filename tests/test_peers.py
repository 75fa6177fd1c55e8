"""Agreement with other packages where definitions agree; where they do not, docs/measures.md says how they differ.

Run by `make peers`, which builds the environments. dadapy pins numpy<2 and is asked through its own interpreter.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import anisoscope as an

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # their warnings are not ours to mend
DADAPY = os.environ.get("ANISOSCOPE_DADAPY")


@pytest.fixture(scope="module", params=["torus", "curved", "gaussian"])
def cloud(request):
    rng = np.random.default_rng(3)
    if request.param == "torus":
        angle = rng.random((1500, 3)) * 2 * np.pi
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    if request.param == "curved":
        z = rng.random((1500, 4))
        return np.tanh(z @ rng.standard_normal((4, 40))) + 1e-3 * rng.standard_normal((1500, 40))
    return rng.standard_normal((1200, 30)) * np.linspace(0.5, 2, 30) + 3


def test_scikit_dimension_two_nn(cloud):
    skdim = pytest.importorskip("skdim")
    assert float(an.two_nn(cloud)) == pytest.approx(skdim.id.TwoNN().fit(cloud).dimension_, rel=1e-6)
    # Its maximum-likelihood variant censors the largest ratios; without censoring the formulas are the same.
    theirs = skdim.id.TwoNN(method="mle", discard_fraction=0).fit(cloud).dimension_
    assert float(an.two_nn(cloud, variant="ml")) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("k", [5, 10, 20])
def test_scikit_dimension_mle(cloud, k):
    skdim = pytest.importorskip("skdim")
    theirs = skdim.id.MLE().fit(cloud, n_neighbors=k, comb="mle").dimension_
    assert float(an.mle(cloud, k=k)) == pytest.approx(theirs, rel=1e-6)
    theirs = skdim.id.MLE().fit(cloud, n_neighbors=k, comb="mean").dimension_
    assert float(an.mle(cloud, k=k, pooling="mean")) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("scale", [1, 2, 4, 8, 16])
def test_scikit_dimension_gride(cloud, scale):
    skdim = pytest.importorskip("skdim")
    theirs = skdim.id.GRIDE(n1=scale).fit(cloud).dimension_
    assert float(an.gride(cloud, scales=[scale])) == pytest.approx(theirs, rel=1e-6)


def test_isoscore(cloud):
    package = pytest.importorskip("IsoScore.IsoScore")
    assert float(an.isoscore(cloud, bias="plugin")) == pytest.approx(float(package.IsoScore(cloud)), rel=1e-6)
    larger = np.random.default_rng(4).standard_normal((5000, cloud.shape[1])) @ np.diag(
        np.linspace(1, 3, cloud.shape[1])
    )
    import torch

    reference = torch.cov(torch.from_numpy(larger).T)
    theirs = package.IsoScore_star(cloud, reference, 0.2)
    assert float(an.isoscore_star(cloud, reference=larger, zeta=0.2, bias="plugin")) == pytest.approx(
        float(theirs), rel=1e-6
    )


ASK_DADAPY = """
import json, sys, numpy as np
from dadapy import Data
data = Data(np.load(sys.argv[1]), verbose=False, n_jobs=1)
data.compute_distances(maxk=70)
base = data.compute_id_2NN(algorithm="base")[0]
ml = data.compute_id_2NN(algorithm="ml")[0]
gride = data.return_id_scaling_gride(range_max=64)[0]
print(json.dumps({"base": float(base), "ml": float(ml), "gride": [float(x) for x in gride]}))
"""


def test_dadapy(cloud, tmp_path):
    if not DADAPY or not Path(DADAPY).exists():
        pytest.skip("ANISOSCOPE_DADAPY names no interpreter with dadapy")
    np.save(tmp_path / "x.npy", cloud)
    answer = subprocess.run(
        [DADAPY, "-c", ASK_DADAPY, str(tmp_path / "x.npy")], capture_output=True, text=True, check=True
    )
    theirs = json.loads(answer.stdout.strip().splitlines()[-1])
    assert float(an.two_nn(cloud)) == pytest.approx(theirs["base"], rel=1e-6)
    assert float(an.two_nn(cloud, variant="ml")) == pytest.approx(theirs["ml"], rel=1e-6)
    ours = an.gride(cloud, scales=(1, 2, 4, 8, 16, 32))
    for at, scale in enumerate((1, 2, 4, 8, 16, 32)):
        assert ours.parts[f"n={scale}"].value == pytest.approx(theirs["gride"][at], rel=1e-6)
