"""Work that several rows or sites share says what the plain, separate computations say."""

import pytest
import torch

from anisoscope.measures.neighbors import by_tiles, nearest_neighbors
from anisoscope.measures.neighbors_gpu import full_precision, nearest_by_tiles, search
from anisoscope.measures.plan import scale_of


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(n, d):
    """Twenty heaps of rows that float32 products cannot tell apart."""
    centre = torch.randint(20, (n,), generator=torch.Generator().manual_seed(1))
    return draw(20, d, seed=2)[centre] + 1e-6 * draw(n, d)


CLOUDS = {
    "plain": draw(1500, 48),
    "float64": draw(1000, 16).double(),
    "heaps": clustered(1500, 8),
    "far from the origin": draw(1500, 20) + 1e4,
    "copies": draw(200, 24)[torch.randint(200, (1500,), generator=torch.Generator().manual_seed(3))],
    "one enormous row": torch.cat([draw(1, 24) * 1e20, draw(1200, 24, seed=4)]),
    "tiny": draw(900, 12) * 1e-30,
    "bfloat16": draw(700, 12).bfloat16(),
    "few": draw(6, 5),
}


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_tiles_find_the_same_neighbours(name, k):
    rows = CLOUDS[name]
    here, there = nearest_neighbors(rows, k), nearest_by_tiles(rows, k)
    assert torch.allclose(here.distances, there.distances, rtol=1e-12, atol=0)
    own = torch.arange(len(rows))[:, None]
    assert bool((there.indices != own).all())
    at = rows.double()[there.indices] - rows.double()[:, None]
    scale = scale_of(rows)
    assert torch.allclose((at * scale).norm(dim=2) / scale, there.distances, rtol=1e-12, atol=0)


def test_what_float32_cannot_settle_is_told():
    rows = CLOUDS["heaps"]
    assert not bool(search(rows, 2, 1.0).settled.any())
    assert bool(search(rows, 2, 1.0, dtype=torch.float64).settled.all())
    assert bool(search(CLOUDS["plain"], 2, 1.0).settled.all())


def test_devices_and_precision_are_left_as_they_were():
    assert by_tiles(torch.device("cuda")) and not by_tiles(torch.device("cpu"))
    before = torch.get_float32_matmul_precision()
    with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
        assert (draw(4, 4) @ draw(4, 4)).dtype == torch.float32
    assert torch.get_float32_matmul_precision() == before
