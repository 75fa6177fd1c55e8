"""Products of rows by cell: the kernel, run by Triton's interpreter, and plain products say what float64 says."""

import itertools

import pytest
import torch
from test_kernels import run

import anisoscope as an
from anisoscope.errors import ShapeError
from anisoscope.measures import search
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.stats import gram_matrices, moments, products
from anisoscope.stats.gram_matrices import cell_grams, grams, in_parts


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def cases():
    return run(script="gram_cases.py")


def test_the_kernel_says_what_float64_says(cases):
    for case, found in cases["shapes"].items():
        assert found["error"] < 1e-6 and found["symmetric"], (case, found)


def test_rows_from_anywhere_to_anywhere(cases):
    for kind, found in cases["strides"].items():
        assert max(found["errors"].values()) < 1e-6, (kind, found)
        assert found["nothing else is written"], kind


def test_columns_of_all_sizes_and_sums_that_grow(cases):
    found = cases["scales"]
    assert max(found["scales"].values()) < 1e-6, found
    assert found["far"]["bfloat16"] < 1e-7 < found["plain"], "what a sum in float32 would lose is kept beside it"
    assert found["far"]["float16"] < 4e-7, "what 22 bits of an entry lose, and no more"
    assert found["few"]["error"] < 1e-12, found["few"]


def test_rows_that_are_no_numbers_spoil_their_own_cell_and_site_alone(cases):
    assert cases["lost"] == {"bfloat16": True, "float16": True}


def test_the_same_bits_twice_and_alone(cases):
    assert len(cases["same"]) == 2
    for kind, found in cases["same"].items():
        assert found == {"twice": True, "alone": True, "few": True}, kind


def test_three_parts_hold_a_float32_whole(cases):
    assert cases["parts"] == 0


def test_two_of_float16_hold_22_bits_of_an_entry_and_39_below_the_largest_of_its_column(cases):
    found = cases["halves"]
    assert found["short"] == 0
    assert 0 < found["long"] <= 2**-22
    assert found["small"] <= 2**-39


def test_halves_of_columns_at_both_ends_of_float32(cases):
    assert cases["hostile"]["error"] < 2**-21 and cases["hostile"]["symmetric"], cases["hostile"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_products_by_cell(dtype):
    rows, ends = draw(2, 30, 6).to(dtype), [0, 4, 4, 5, 29]
    found = cell_grams(rows, ends)
    parts = [rows[:, a:b].double() for a, b in itertools.pairwise([0, *ends])]
    assert found.dtype == torch.float64
    assert torch.allclose(found, torch.stack([one.mT @ one for one in parts], dim=1), rtol=1e-14, atol=1e-14)
    out = torch.full((2, 5, 2, 6, 6), torch.nan, dtype=torch.float64)
    cell_grams(rows, ends, out[:, :, 1])
    assert torch.equal(out[:, :, 1], found) and bool(out[:, :, 0].isnan().all())


def test_wide_rows_in_parts_where_there_are_tensor_cores_and_no_kernels(monkeypatch):
    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 32)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    assert in_parts(32, torch.device("cpu")) and not in_parts(31, torch.device("cpu"))
    rows, ends = draw(2, 1500, 40), [0, 1, 1200, 1500]
    found, right = cell_grams(rows, ends), cell_grams(rows.double(), ends)
    size = right.diagonal(dim1=2, dim2=3).sqrt()
    gap = float(((found - right).abs() / (size[..., None] * size[..., None, :]).clamp_min(1e-300)).max())
    assert 1e-12 < gap < 1e-6, "in parts, which float64 is not"
    assert torch.equal(found[:, 0], torch.zeros(2, 40, 40).double())
    assert torch.equal(grams(rows[:, 1:1200]), found[:, 2])
    assert torch.equal(grams(rows[:, 1:1200], exact=True), right[:, 2])


@pytest.mark.parametrize(
    ("width", "dtype", "taken"),
    [(gram_matrices.PARTED_WIDTH, torch.float32, True), (gram_matrices.PARTED_WIDTH - 1, torch.float32, False),
     (gram_matrices.PARTED_WIDTH, torch.float64, False), (gram_matrices.PARTED_WIDTH, torch.bfloat16, True)],
)  # fmt: skip
def test_the_kernel_is_asked_for_wide_rows_that_need_not_be_exact(monkeypatch, width, dtype, taken):
    asked = []
    monkeypatch.setattr(gram_matrices, "kernels_run", lambda device: True)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(gram_matrices, "_launched", lambda rows, bounds, out: asked.append((rows.shape, list(bounds))))
    cell_grams(draw(1, 3, width).to(dtype), [1, 3])
    assert asked == ([((1, 3, width), [0, 1, 3])] if taken else [])
    assert in_parts(width, torch.device("cpu")) == (width >= gram_matrices.PARTED_WIDTH)


def test_cells_that_cannot_be():
    rows = draw(1, 9, 4)
    for ends in ([3, 2], [10], [-1, 9]):
        with pytest.raises(ShapeError, match="cells of 9 rows end in order"):
            cell_grams(rows, ends)
    for out in (torch.empty(1, 2, 4, 4).double(), torch.empty(1, 1, 4, 4), torch.empty(1, 1, 4, 8).double()[..., ::2]):
        with pytest.raises(ShapeError, match="products are"):
            cell_grams(rows, [9], out)


def test_exact_products_of_wide_rows_are_formed_in_strips(monkeypatch):
    rows = draw(2, 50, 37).double()
    whole = grams(rows, exact=True)
    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 16)
    strips = grams(rows, exact=True)
    assert torch.allclose(strips, whole, rtol=1e-14, atol=1e-13)
    assert torch.equal(strips[:, :10, 10:], strips[:, 10:, :10].mT), "what is a copy"


def test_moments_of_wide_rows_by_cells(monkeypatch):
    """Rows that are multiplied in parts, a launch at a time, have the moments of those that are not."""
    launched = []

    def launch(rows, bounds, out):
        launched.append(rows.shape[1])
        out[:, 0] = grams(rows.double(), exact=True)

    monkeypatch.setattr(gram_matrices, "PARTED_WIDTH", 16)
    monkeypatch.setattr(gram_matrices, "KERNEL_CELLS", 1 << 17)
    monkeypatch.setattr(gram_matrices, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(gram_matrices, "kernels_run", lambda device: True)
    monkeypatch.setattr(gram_matrices, "_launched", launch)
    rows = draw(9000, 24) + 100
    found, right = moments.Moments.of(rows, "mixed"), moments.Moments.of(rows.double())
    assert launched == [5461, 3539]
    for name in ("mean", "scatter", "third", "fourth"):
        one, two = getattr(found, name), getattr(right, name)
        assert float((one - two).abs().max()) < 2e-5 * float(two.abs().max()), name


# --- float32 on a CPU by oneDNN ---------------------------------------------------------------------------------------


@pytest.fixture
def onednn():
    try:
        products.times_transposed(torch.ones(2, 3), torch.ones(2, 3))
    except (AttributeError, RuntimeError):
        pytest.skip("this torch has no oneDNN")


@pytest.mark.parametrize(("count", "width"), [(1, 256), (7, 300), (1024, 257), (2500, 320)])
def test_products_by_onednn_are_those_of_float64(onednn, monkeypatch, count, width, seed):
    """Errors are of the lengths of two columns: a rounding for each of 1,024 terms at the worst, far less by chance."""
    monkeypatch.setattr(products, "onednn_serves", lambda: True)
    asked = []
    plain = products.times_transposed
    monkeypatch.setattr(gram_matrices, "times_transposed", lambda *both: asked.append(both) or plain(*both))
    y = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * torch.logspace(0, -3, width)
    found, exact = gram_matrices.gram(y), y.double().T @ y.double()
    assert asked and found.dtype == torch.float32 and torch.equal(found, found.T)
    lengths = exact.diagonal().sqrt()
    assert float(((found - exact).abs() / (lengths[:, None] * lengths)).max()) < 2e-6


def test_only_plain_float32_goes_to_onednn(onednn, monkeypatch):
    monkeypatch.setattr(products, "onednn_serves", lambda: True)
    monkeypatch.setattr(gram_matrices, "times_transposed", lambda *both: pytest.fail("not these"))
    rows = torch.randn(9, 300)
    wanted = rows.clone().requires_grad_()
    gram_matrices.gram(wanted).sum().backward()
    assert wanted.grad is not None
    for other in (rows.double(), rows[:, :200], rows[None], rows[:0], rows.bfloat16()):
        right = other.double().mT @ other.double()
        assert torch.allclose(gram_matrices.gram(other).double(), right, rtol=0.05, atol=0.3)


def test_onednn_serves_where_it_is_sooner_and_right(onednn, monkeypatch, tmp_path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: some\n")
    assert products.processor_maker(told) == "AuthenticAMD"
    assert products.processor_maker(tmp_path / "absent") == ""
    asked = products.onednn_serves.__wrapped__

    def serves(maker="AuthenticAMD", has="AVX512", product=products.times_transposed):
        monkeypatch.setattr(products, "processor_maker", lambda: maker)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: has)
        monkeypatch.setattr(products, "times_transposed", product)
        return asked()

    def absent(a, b):
        raise AttributeError

    assert serves()
    with torch.autocast("cpu", torch.bfloat16):
        assert serves()
    assert not (serves(maker="GenuineIntel") or serves(maker="") or serves(has="AVX2"))
    assert not (serves(product=lambda a, b: a @ b.T + 1) or serves(product=absent))


def test_products_by_onednn_do_not_see_the_precision_around_them(onednn, monkeypatch):
    monkeypatch.setattr(products, "onednn_serves", lambda: True)
    rows = draw(600, 300) + 2
    want = an.spectral_ratio(rows)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert an.spectral_ratio(rows) == want
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_neighbours_of_few_rows_are_exact_whoever_multiplies(onednn, monkeypatch, serves, offset, seed):
    """Distances by differences in float64, for rows with copies and with a mean far from zero."""
    monkeypatch.setattr(products, "onednn_serves", lambda: serves)
    asked, plain = [], products.times_transposed
    monkeypatch.setattr(search, "times_transposed", lambda *given: asked.append(given) or plain(*given))
    rows = torch.randn(700, 40, generator=torch.Generator().manual_seed(seed)) + offset
    rows[50:60] = rows[200:210]
    found = nearest_neighbors(rows, 3)
    wide = rows.double()
    apart = torch.stack([(wide - one).norm(dim=1) for one in wide]).fill_diagonal_(torch.inf)
    torch.testing.assert_close(found.distances, apart.topk(3, largest=False).values, rtol=1e-12, atol=0)
    assert [len(given[0]) for given in asked] == ([512, 188] if serves else [])  # a bound that is loose would ask again
