"""Every face that rows and masks can have gives the same number; what cannot be used gives a named error.

The rows are whole numbers from 0 to 120, which every type down to bfloat16 and eight-bit integers holds exactly.
"""

import mmap
from dataclasses import dataclass
from itertools import pairwise

import beartype
import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anisoscope as an
from anisoscope.errors import EmptyInputError, NonFiniteError, ShapeError
from anisoscope.measures.neighbors import nearest_neighbors
from anisoscope.rows import CHUNK_ROWS, all_finite, as_rows

N, WIDTH = 240, 8
ROWS = np.random.default_rng(0).integers(0, 121, (N, WIDTH)).astype(np.float64)
AFTER = ROWS @ np.random.default_rng(1).integers(-2, 3, (WIDTH, WIDTH)) + np.random.default_rng(2).normal(
    size=(N, WIDTH)
)
KEEP = np.random.default_rng(3).random(N) < 0.8
CUTS = [0, 50, 50, 51, 130, N]  # an empty chunk and one of a single row among them

# One measure for each thing that is made of rows: moments, directions, order, points, pairs of layers.
NAMES = ["spectral_ratio", "effective_rank", "mean_cosine", "turning_angle", "two_nn", "partition_isotropy"]


def pieces(rows):
    return [rows[a:b] for a, b in pairwise(CUTS)]


def values(rows, mask=None):
    """All of them; ``rows`` is called for every measure, since a generator serves only once."""
    return {name: getattr(an, name)(rows(), mask=mask() if callable(mask) else mask).value for name in NAMES}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def check(found, expected):
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.fixture(autouse=True)
def without_type_checks():
    """As users run it. The hook of the test run checks annotations, which are narrower than what may be passed."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def truth():
    return values(lambda: ROWS)


@pytest.fixture(scope="module")
def truth_masked():
    return values(lambda: ROWS, KEEP)


TENSOR = torch.from_numpy(ROWS)
INTEGERS = ["uint8", "int8", "uint16", "int32", "uint64", "int64"]
FACES = {
    "float64 tensor": lambda: TENSOR,
    "float32 tensor": TENSOR.float,
    "float16 tensor": TENSOR.half,
    "bfloat16 tensor": TENSOR.bfloat16,
    "int64 tensor": TENSOR.long,
    "uint8 tensor": lambda: TENSOR.to(torch.uint8),
    "tensor that needs a gradient": lambda: TENSOR.clone().requires_grad_(),
    "tensor inside a graph": lambda: TENSOR.clone().requires_grad_() * 1.0,
    "parameter": lambda: torch.nn.Parameter(TENSOR.float()),
    "tensor, columns apart": lambda: torch.stack([TENSOR, -TENSOR], dim=2)[:, :, 0],
    "tensor, rows apart": lambda: TENSOR.repeat_interleave(2, dim=0)[::2],
    "tensor, transposed": lambda: TENSOR.T.contiguous().T,
    "tensor, expanded axis": lambda: TENSOR.expand(1, N, WIDTH),
    "float64 array": lambda: ROWS,
    "float32 array": lambda: ROWS.astype(np.float32),
    "float16 array": lambda: ROWS.astype(np.float16),
    "long double array": lambda: ROWS.astype(np.longdouble),
    "read-only array": lambda: read_only(ROWS),
    "Fortran order": lambda: np.asfortranarray(ROWS),
    "reversed twice": lambda: np.ascontiguousarray(ROWS[::-1, ::-1])[::-1, ::-1],
    "big-endian": lambda: ROWS.astype(">f8"),
    "big-endian float32": lambda: ROWS.astype(">f4"),
    "big-endian integers": lambda: ROWS.astype(">i2"),
    **{f"{kind} array": lambda kind=kind: ROWS.astype(kind) for kind in INTEGERS},
    "list of lists": ROWS.tolist,
    "tuple of tuples of integers": lambda: tuple(map(tuple, ROWS.astype(int).tolist())),
    "list of chunks": lambda: pieces(ROWS),
    "tuple of tensors": lambda: tuple(pieces(TENSOR)),
    "generator of chunks": lambda: (chunk for chunk in pieces(ROWS)),
    "generator of tensors that need gradients": lambda: (c.clone().requires_grad_() for c in pieces(TENSOR)),
    "generator of lists": lambda: (chunk.tolist() for chunk in pieces(ROWS) if len(chunk)),
    "iterator of one": lambda: iter([ROWS]),
    "chunks of several types": lambda: (
        chunk.astype(kind) for chunk, kind in zip(pieces(ROWS), ["f4", "f8", "f2", "i4", "u1"], strict=True)
    ),
    "chunks, first one empty": lambda: iter([ROWS[:0], ROWS]),
    "chunks, last one empty": lambda: iter([ROWS, ROWS[:0]]),
}


@pytest.mark.parametrize("face", FACES)
class TestFaces:
    def test_same_numbers(self, face, truth):
        check(values(FACES[face]), truth)

    def test_same_numbers_under_a_mask(self, face, truth_masked):
        """One mask for all of it, also where the rows come in chunks."""
        shape = (1, N) if face == "tensor, expanded axis" else (N,)
        check(values(FACES[face], KEEP.reshape(shape)), truth_masked)

    def test_rows_are_not_changed(self, face):
        rows = FACES[face]()
        if isinstance(rows, torch.Tensor | np.ndarray):
            an.measure(rows, ["spectral_ratio", "mean_cosine", "two_nn", "local_isotropy"])
            after = rows.detach().double().numpy() if isinstance(rows, torch.Tensor) else rows.astype(np.float64)
            assert np.array_equal(after.reshape(N, WIDTH), ROWS)


class TestFiles:
    @pytest.fixture
    def saved(self, tmp_path):
        np.save(tmp_path / "rows.npy", ROWS)
        return tmp_path / "rows.npy"

    @pytest.mark.parametrize("mode", ["r", "r+", "c"])
    def test_memmap(self, saved, mode, truth, truth_masked):
        check(values(lambda: np.load(saved, mmap_mode=mode)), truth)
        check(values(lambda: np.load(saved, mmap_mode=mode), KEEP), truth_masked)
        assert np.array_equal(np.load(saved), ROWS)

    def test_slice_of_a_memmap(self, tmp_path, truth):
        """Rows and columns of a larger file, one that does not start at the start."""
        padded = np.full((N + 20, WIDTH + 3), np.nan)
        padded[7 : 7 + N, 2 : 2 + WIDTH] = ROWS
        np.save(tmp_path / "wide.npy", padded)
        check(values(lambda: np.load(tmp_path / "wide.npy", mmap_mode="r")[7 : 7 + N, 2 : 2 + WIDTH]), truth)
        check(
            values(lambda: np.asarray(np.load(tmp_path / "wide.npy", mmap_mode="r"))[7 : 7 + N, 2 : 2 + WIDTH]), truth
        )

    def test_fortran_order_and_float16(self, tmp_path, truth):
        np.save(tmp_path / "rows.npy", np.asfortranarray(ROWS.astype(np.float16)))
        check(values(lambda: np.load(tmp_path / "rows.npy", mmap_mode="r")), truth)

    def test_chunks_of_memmaps(self, saved, truth):
        check(values(lambda: (np.load(saved, mmap_mode="r")[a:b] for a, b in pairwise(CUTS))), truth)

    def test_paths_in_a_file(self, tmp_path):
        paths = ROWS.reshape(4, N // 4, WIDTH)
        np.save(tmp_path / "paths.npy", paths)
        check(values(lambda: np.load(tmp_path / "paths.npy", mmap_mode="r")), values(lambda: paths))

    def test_what_was_written_into_a_private_map_is_measured_and_stays(self, tmp_path):
        """Mode "c": changes live in memory alone. Handing its pages back to the system would undo them."""
        rows = np.random.default_rng(0).standard_normal((3 * CHUNK_ROWS, 16))
        np.save(tmp_path / "rows.npy", rows)
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="c")
        mapped *= np.arange(1, 17)
        expected = an.spectral_ratio(rows * np.arange(1, 17)).value
        for view in (mapped, mapped[:], np.asarray(mapped)):
            assert an.spectral_ratio(view).value == pytest.approx(expected, rel=1e-12)
            assert np.array_equal(mapped, rows * np.arange(1, 17)), "measuring changed the user's data"

    def test_anonymous_private_memory(self):
        rows = np.random.default_rng(0).standard_normal((3 * CHUNK_ROWS, 16))
        memory = mmap.mmap(-1, rows.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        shared = np.frombuffer(memory, dtype=np.float64).reshape(rows.shape)
        shared[:] = rows
        assert an.spectral_ratio(shared).value == pytest.approx(an.spectral_ratio(rows).value, rel=1e-12)
        assert np.array_equal(shared, rows)


PATHS = ROWS.reshape(6, 40, WIDTH)
PATHS_KEEP = KEEP.reshape(6, 40)
MASKS = {
    "bool array": lambda: KEEP,
    "bool tensor": lambda: torch.from_numpy(KEEP),
    "int64": lambda: KEEP.astype(np.int64),
    "uint8": lambda: KEEP.astype(np.uint8),
    "int32 tensor": lambda: torch.from_numpy(KEEP.astype(np.int32)),
    "big-endian": lambda: KEEP.astype(">i4"),
    "read-only": lambda: read_only(KEEP),
    "negative stride": lambda: np.ascontiguousarray(KEEP[::-1])[::-1],
    "every second": lambda: KEEP.repeat(2)[::2],
}


class TestMasks:
    @pytest.mark.parametrize("kind", MASKS)
    def test_types(self, kind, truth_masked):
        check(values(lambda: ROWS, MASKS[kind]()), truth_masked)
        check(values(TENSOR.float, MASKS[kind]()), truth_masked)
        check(values(lambda: (chunk for chunk in pieces(ROWS)), MASKS[kind]()), truth_masked)
        masks = [MASKS[kind]()[a:b] for a, b in pairwise(CUTS)]
        check(values(lambda: (chunk for chunk in pieces(ROWS)), lambda: iter(masks)), truth_masked)
        check(values(lambda: pieces(ROWS), masks), truth_masked)

    @pytest.mark.parametrize("kind", MASKS)
    def test_annotations_say_what_is_accepted(self, kind):
        """With the checker of types on: each kind of flags, for an array, for all chunks at once and for each chunk."""
        jaxtyping.config.update("jaxtyping_disable", False)
        flags = MASKS[kind]()
        masks = [flags[a:b] for a, b in pairwise(CUTS)]
        truth = an.spectral_ratio(ROWS[KEEP]).value
        for rows, mask in (
            (ROWS, flags),
            (TENSOR, flags.tolist()),
            (PATHS, flags.reshape(6, 40).tolist()),
            (pieces(ROWS), flags),
            (pieces(ROWS), masks),
            (tuple(pieces(TENSOR)), tuple(masks)),
            (iter(pieces(ROWS)), iter(masks)),
            (iter(pieces(ROWS)), (mask for mask in masks)),
        ):
            assert an.spectral_ratio(rows, mask=mask).value == pytest.approx(truth, rel=1e-12)

    def test_annotations_refuse_what_is_no_flag(self):
        jaxtyping.config.update("jaxtyping_disable", False)
        for mask in (KEEP.astype(float), TENSOR[:, 0], 1):
            with pytest.raises(jaxtyping.TypeCheckError):
                an.spectral_ratio(ROWS, mask=mask)

    def test_list_of_booleans_for_rows_in_memory(self, truth_masked):
        check(values(lambda: ROWS, KEEP.tolist()), truth_masked)

    def test_masked_rows_are_the_rows_left_out(self, truth_masked):
        without_order = [name for name in NAMES if name != "turning_angle"]
        left = values(lambda: ROWS[KEEP])
        check({name: truth_masked[name] for name in without_order}, {name: left[name] for name in without_order})

    def test_paths_with_a_mask_of_two_axes(self):
        expected = values(lambda: PATHS, PATHS_KEEP)
        flat = values(lambda: ROWS, KEEP)
        assert {k: v for k, v in expected.items() if k != "turning_angle"} == pytest.approx(
            {k: v for k, v in flat.items() if k != "turning_angle"}
        )
        assert expected["turning_angle"] != flat["turning_angle"]  # six paths, not one
        for rows, mask in (
            (lambda: torch.from_numpy(PATHS).bfloat16(), torch.from_numpy(PATHS_KEEP)),
            (lambda: (path[None] for path in PATHS), PATHS_KEEP),
            (lambda: iter([PATHS[:2], PATHS[2:]]), lambda: iter([PATHS_KEEP[:2], PATHS_KEEP[2:]])),
            (lambda: PATHS.reshape(2, 3, 40, WIDTH), PATHS_KEEP.reshape(2, 3, 40)),
            (PATHS.tolist, PATHS_KEEP.tolist()),
        ):
            check(values(rows, mask), expected)

    @pytest.mark.parametrize(
        ("rows", "mask", "message"),
        [
            (ROWS, KEEP[:-1], r"the mask has shape \(239,\), the rows \(240,\)"),
            (ROWS, KEEP[:, None], r"the mask has shape \(240, 1\)"),
            (PATHS, KEEP, r"the mask has shape \(240,\), the rows \(6, 40\)"),
            (ROWS, PATHS_KEEP, r"the mask has shape \(6, 40\), the rows \(240,\)"),
            (ROWS, KEEP.astype(float), "dtype float64; use booleans, or integers 0 and 1"),
            (ROWS, torch.from_numpy(KEEP).half(), "dtype torch.float16; use booleans, or integers 0 and 1"),
            (ROWS, KEEP * 2, "dtype torch.int64; use booleans, or integers 0 and 1"),
            (ROWS, "all", "the mask has dtype"),
            (ROWS, np.array([None] * N), "the mask has dtype object"),
            (ROWS, [[True], [True, False]], "the mask cannot be read"),
        ],
    )
    def test_refused(self, rows, mask, message):
        with pytest.raises(ShapeError, match=message):
            an.spectral_ratio(rows, mask=mask)

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (KEEP[:-1], "the mask has 239 flags, the chunks have more rows than that"),
            (np.append(KEEP, True), "the mask has 241 flags, the chunks have 240 rows"),
            (KEEP.astype(float), "use booleans, or integers 0 and 1"),
            (pieces(KEEP)[:-1], "chunks and masks differ in number: one of them ended at 4"),
            ([*pieces(KEEP), KEEP], "chunks and masks differ in number: one of them ended at 5"),
            ([KEEP, *pieces(KEEP)[1:]], r"mask of chunk 0 has shape \(240,\), the rows \(50,\)"),
            ([*pieces(KEEP)[:4], np.zeros(110)], "mask of chunk 4 has dtype float64"),
        ],
    )
    def test_refused_for_a_stream(self, mask, message):
        with pytest.raises(ShapeError, match=message):
            an.spectral_ratio((chunk for chunk in pieces(ROWS)), mask=mask)

    def test_all_masked(self):
        none = np.zeros(N, dtype=bool)
        for rows, mask in (
            (ROWS, none),
            (pieces(ROWS), none),
            (pieces(ROWS), pieces(none)),
            (PATHS, none.reshape(6, 40)),
        ):
            with pytest.raises(EmptyInputError, match="no row is left to measure after the mask"):
                an.two_nn(rows, mask=mask)

    def test_rows_that_are_wrapped_already_keep_their_own_mask(self, truth_masked):
        assert an.spectral_ratio(as_rows(ROWS, KEEP)).value == pytest.approx(truth_masked["spectral_ratio"])
        with pytest.raises(ShapeError, match="their own mask"):
            an.spectral_ratio(as_rows(ROWS), mask=KEEP)


class TestRefused:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (ROWS[0], r"the input has shape \(8,\); rows need two axes or more"),
            (1.0, "got float"),
            (None, "got NoneType"),
            ("rows.npy", r"chunk 0 has shape \(\)"),
            ([1.0, 2.0], r"the input has shape \(2,\)"),
            ([[1.0, 2.0], [3.0]], "the input cannot be read as an array of numbers"),
            ([["a", "b"], ["c", "d"]], "rows are real numbers"),
            ([[]], "width 0"),
            (np.zeros((5, 0)), "width 0"),
            (ROWS > 60, "dtype bool; rows are real numbers"),
            (TENSOR > 60, "dtype torch.bool; rows are real numbers"),
            (ROWS + 1j, "dtype complex128; rows are real numbers"),
            (TENSOR + 1j, "dtype torch.complex128; rows are real numbers"),
            (ROWS.astype(object), "dtype object; rows are real numbers"),
            (ROWS.astype(str), "rows are real numbers"),
            (TENSOR.to_sparse(), "rows are dense"),
            (np.ma.masked_array(ROWS, ROWS > 60), "masked array"),
            ([ROWS, ROWS[:, :3]], "chunk 1 has width 3, those before it 8"),
            ([ROWS, ROWS, ROWS[0]], r"chunk 2 has shape \(8,\)"),
            (iter([ROWS, [[1.0, 2.0], [3.0]]]), "chunk 1 cannot be read"),
            (iter([ROWS, ROWS > 60]), "chunk 1 has dtype bool"),
        ],
    )
    def test_shapes_and_types(self, rows, message):
        with pytest.raises(ShapeError, match=message):
            an.spectral_ratio(rows)

    @pytest.mark.parametrize(
        "rows", [np.zeros((0, 4)), torch.zeros(0, 4), torch.zeros(3, 0, 4), np.zeros((0, 5, 4)), [ROWS[:0], ROWS[:0]]]
    )
    def test_no_rows(self, rows):
        for name in ("spectral_ratio", "two_nn", "turning_angle", "mean_cosine"):
            with pytest.raises(EmptyInputError, match="no row is left to measure"):
                getattr(an, name)(rows)

    @pytest.mark.parametrize("name", [*NAMES, "gride"])
    def test_a_generator_used_twice(self, name):
        stream = (chunk for chunk in pieces(ROWS))
        getattr(an, name)(stream)
        with pytest.raises(EmptyInputError, match="it may have been used up already"):
            getattr(an, name)(stream)

    def test_no_chunk(self):
        for nothing in ([], (), iter(())):
            with pytest.raises(EmptyInputError, match="gave no chunk at all"):
                an.mean_cosine(nothing)

    def test_the_row_is_named_as_it_came(self):
        """Across chunks, before the mask, over the paths of a (s, t, d) array."""
        bad = ROWS.copy()
        bad[[3, 77, 200]] = np.nan
        keep = np.ones(N, dtype=bool)
        keep[:5] = False
        for rows, mask in (
            (bad, keep),
            (torch.from_numpy(bad).bfloat16(), keep),
            (bad.reshape(6, 40, WIDTH), keep.reshape(6, 40)),
        ):
            with pytest.raises(NonFiniteError, match=r"^rows 77 and 200 hold NaN or infinity"):
                an.two_nn(rows, mask=mask)
        for stream in (iter(pieces(bad)), iter([bad.reshape(6, 40, WIDTH)[:1], bad.reshape(6, 40, WIDTH)[1:]])):
            with pytest.raises(NonFiniteError, match=r"^row(s 77 and 200 hold| 77 holds)"):  # or at the first bad chunk
                an.two_nn(stream, mask=keep)

    def test_whole_numbers_keep_their_digits(self):
        """Differences of one between numbers of twelve digits: lost in float32, held in float64."""
        large = ROWS.astype(np.int64) + 10**12
        assert an.spectral_ratio(large).value == pytest.approx(an.spectral_ratio(ROWS).value, rel=1e-9)
        assert an.two_nn(torch.from_numpy(large)).value == pytest.approx(an.two_nn(ROWS).value, rel=1e-9)

    def test_infinity_beyond_the_range_of_a_narrow_sum_is_not_invented(self):
        """The sum of these float16 and float32 rows overflows; the rows do not."""
        for rows in (torch.full((100, 4), 6e4, dtype=torch.float16), torch.full((100, 4), 3e38)):
            rows[::2, 0] = -rows[::2, 0]
            assert an.mean_cosine(rows).n == 100


class TestTwoLayers:
    def test_faces(self):
        truth = an.linearity(ROWS, AFTER).value
        for x, y in (
            (TENSOR, torch.from_numpy(AFTER)),
            (ROWS.tolist(), AFTER),
            (TENSOR.bfloat16(), AFTER),
            (iter(pieces(ROWS)), iter(pieces(AFTER))),
            (iter(pieces(TENSOR.half())), pieces(AFTER)),
        ):
            assert an.linearity(x, y).value == pytest.approx(truth, rel=1e-9)

    def test_masks(self):
        truth = an.linearity(ROWS[KEEP], AFTER[KEEP]).value
        assert an.linearity(ROWS, AFTER, mask=KEEP).value == pytest.approx(truth, rel=1e-9)
        assert an.linearity(pieces(ROWS), pieces(AFTER), mask=pieces(KEEP)).value == pytest.approx(truth, rel=1e-9)
        assert an.linearity(iter(pieces(ROWS)), iter(pieces(AFTER)), mask=KEEP).value == pytest.approx(truth, rel=1e-9)

    def test_different_numbers_of_rows(self):
        for x, y in ((ROWS, AFTER[:-1]), (ROWS[:-1], AFTER), (ROWS, AFTER[:0])):
            with pytest.raises(ShapeError, match="differ in number of rows"):
                an.linearity(x, y)

    def test_the_two_layers_may_be_cut_differently(self):
        truth = an.linearity(ROWS, AFTER).value
        assert an.linearity(pieces(ROWS), AFTER).value == pytest.approx(truth, rel=1e-9)

    def test_an_iterator_of_masks_serves_both_layers(self):
        truth = an.linearity(ROWS[KEEP], AFTER[KEEP]).value
        found = an.linearity(pieces(ROWS), pieces(AFTER), mask=iter(pieces(KEEP)))
        assert found.value == pytest.approx(truth, rel=1e-9)


def test_every_public_name_stays_what_it_is():
    """Names load on first use; a subpackage of the same name must not take their place afterwards."""
    first = {name: getattr(an, name) for name in an.__all__}
    for name in an.measure_names():
        assert callable(getattr(an, name))
    assert {name: getattr(an, name) for name in an.__all__} == first
    assert an.measure_names() == an.measure_names()


checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)  # as the import hook writes it at each function


class TestChecks:
    """What shape_checks.py checks in every call: types, and shapes by one set of axes."""

    @pytest.fixture(autouse=True)
    def with_type_checks(self, without_type_checks):
        jaxtyping.config.update("jaxtyping_disable", False)

    def test_shapes_of_a_call_are_of_one_set_of_axes(self):
        @checked
        def sums(a: Float[Tensor, "n d"], b: Float[Tensor, "n"], turned: bool = False) -> Float[Tensor, "d"]:
            return b @ a if not turned else a @ a.T @ b

        rows, weights = torch.ones(3, 2), torch.ones(3)
        assert sums(rows, weights).shape == (2,) and sums(rows[:, :1], b=weights).shape == (1,), "axes of each call"
        assert sums(torch.ones(2, 2), torch.ones(2), turned=True).shape == (2,)
        for wrong in ((rows, torch.ones(2)), (rows[0], weights), (rows.long(), weights), (rows, weights, True)):
            with pytest.raises(jaxtyping.TypeCheckError):
                sums(*wrong)
        jaxtyping.config.update("jaxtyping_disable", True)
        assert sums(rows, weights, True).shape == (3,), "unless it is told not to"

    def test_types_and_what_is_returned(self):
        @checked
        def half(n: float, *, what: str = "x") -> float:
            return what if what != "x" else n / 2

        assert half(3) == 1.5, "an int may stand for a float"
        for wrong, named in ((("3",), {}), ((3,), {"what": 3}), ((3,), {"what": "returned"})):
            with pytest.raises(jaxtyping.TypeCheckError):
                half(*wrong, **named)

    def test_axes_of_a_call_are_not_those_of_its_caller(self):
        @checked
        def inner(a: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return a

        @checked
        def outer(a: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return inner(inner(torch.ones(7))[: len(a)])

        assert outer(torch.ones(3)).shape == (3,)

    def test_methods_and_fields(self):
        @checked
        @dataclass(frozen=True)
        class Rows:
            x: Float[Tensor, "n d"]
            size: Float[Tensor, "n"]

            @classmethod
            @checked
            def of(cls, n: int) -> "Rows":
                return cls(torch.ones(n, 2), torch.ones(n))

        assert Rows.of(3).x.shape == (3, 2)
        with pytest.raises(jaxtyping.TypeCheckError):
            Rows.of("3")
        with pytest.raises(jaxtyping.TypeCheckError):
            Rows(torch.ones(3, 2), torch.ones(2))

    def test_the_package_is_checked(self):
        with pytest.raises(jaxtyping.TypeCheckError):
            nearest_neighbors(torch.ones(3), 2)
        with pytest.raises(jaxtyping.TypeCheckError):
            an.Estimate(value="1.0", stderr=None, n=3, method="m")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_are_told_from_others_even_where_their_sum_overflows(dtype):
    rows = torch.full((64, 8), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(rows) and all_finite(-rows) and all_finite(rows[:0])
    for bad in ([torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]):
        for like in (rows, torch.zeros_like(rows)):
            spoilt = like.clone()
            spoilt.view(-1)[5 : 5 + len(bad)] = torch.tensor(bad, dtype=dtype)
            assert not all_finite(spoilt)
