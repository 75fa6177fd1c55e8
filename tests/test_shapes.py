"""Shapes of kernels: the fastest is found, kept on disk and found there; whatever fails, there is a shape."""

import importlib.util
import json
import math

import pytest
import torch

from anisoscope.kernels import shapes
from anisoscope.kernels.shapes import Shape, fastest
from anisoscope.measures import neighbors_fused
from anisoscope.measures.row_kernels import DEPTH

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
EACH = (Shape(64, 4, 3), Shape(32, 8, 2), Shape(64, 8, 4))
TIMES = dict(zip(EACH, (3.0, 1.0, 2.0), strict=True))


class Clock:
    """Says how long shapes take, and which were tried."""

    def __init__(self, times=TIMES):
        self.times, self.tried = times, []

    def __call__(self, shape):
        self.tried.append(shape)
        if shape not in self.times:
            raise RuntimeError("out of resource: shared memory")
        return self.times[shape]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def kept_in(folder):
    (path,) = folder.rglob(shapes.FILE)
    return path


def test_the_fastest_is_found_once_and_read_afterwards(folder):
    clock = Clock()
    assert fastest(EACH, clock, "a kernel on a GPU") == EACH[1]
    assert clock.tried == list(EACH)
    later = Clock(dict.fromkeys(EACH, 1.0))
    assert fastest(EACH, later, "a kernel on a GPU") == EACH[1] and later.tried == []
    told = json.loads(kept_in(folder).read_text())
    assert told == {"name": "a kernel on a GPU", "shape": [32, 8, 2],
                    "seconds": [[64, 4, 3, 3.0], [32, 8, 2, 1.0], [64, 8, 4, 2.0]]}  # fmt: skip


def test_another_name_is_another_question(folder):
    fastest(EACH, Clock(), "a kernel on a GPU")
    other = Clock({EACH[0]: 1.0, EACH[1]: 2.0, EACH[2]: 3.0})
    assert fastest(EACH, other, "a kernel on another") == EACH[0] and len(other.tried) == 3


def test_a_shape_that_cannot_run_is_passed_over(folder):
    times = {EACH[2]: 5.0}
    assert fastest(EACH, Clock(times), "a small GPU") == EACH[2]
    assert json.loads(kept_in(folder).read_text())["seconds"] == [[64, 8, 4, 5.0]]


def test_where_none_can_run_it_is_the_first_and_nothing_is_kept(folder):
    assert fastest(EACH, Clock({}), "no GPU") == EACH[0]
    assert not list(folder.rglob(shapes.FILE))
    assert fastest(EACH, Clock(dict.fromkeys(EACH, math.inf)), "no GPU") == EACH[0]
    assert not list(folder.rglob(shapes.FILE))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"shape": [64, 4, 99]}', '{"shape": null}', "\x00\xff"])
def test_what_cannot_be_read_is_tried_again(folder, text):
    fastest(EACH, Clock(), "a kernel on a GPU")
    kept_in(folder).write_text(text)
    clock = Clock()
    assert fastest(EACH, clock, "a kernel on a GPU") == EACH[1] and len(clock.tried) == 3
    assert json.loads(kept_in(folder).read_text())["shape"] == [32, 8, 2]


def test_without_a_folder_to_write_to_there_is_a_shape_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        clock = Clock()
        assert fastest(EACH, clock, "a kernel on a GPU") == EACH[1] and len(clock.tried) == 3


class Devices:
    """What torch and Triton would say of a GPU."""

    def __init__(self, monkeypatch, kind):
        self.asked = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kind)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {kind}")
        monkeypatch.setattr(neighbors_fused, "_tried_rows", lambda device: torch.zeros(1, 4, 4))
        monkeypatch.setattr(neighbors_fused.Ready, "of", lambda rows, scale: rows)
        monkeypatch.setattr(neighbors_fused, "fastest", self.fastest)

    def fastest(self, each, seconds, name):
        self.asked.append(name)
        return each[-1]


@pytest.fixture
def forgotten():
    neighbors_fused.product_shape.cache_clear()
    yield
    neighbors_fused.product_shape.cache_clear()


def test_the_rule_of_the_product(monkeypatch, forgotten):
    """A known GPU is not timed; another is, once in a process; and a CPU, which interprets, takes the first."""
    assert neighbors_fused.product_shape(torch.device("cpu")) == neighbors_fused.SHAPES[0]
    known = Devices(monkeypatch, (9, 0))
    assert neighbors_fused.product_shape(torch.device("cuda", 0)) == neighbors_fused.KNOWN[9, 0] and not known.asked
    neighbors_fused.product_shape.cache_clear()
    other = Devices(monkeypatch, (8, 9))
    for _ in range(2):
        assert neighbors_fused.product_shape(torch.device("cuda", 0)) == neighbors_fused.SHAPES[-1]
    (name,) = other.asked
    assert "GPU (8, 9)" in name and str(neighbors_fused.SHAPES) in name, "what the answer depends on"


def test_every_shape_takes_all_columns():
    assert all(DEPTH % one.depth == 0 for one in neighbors_fused.SHAPES)
    assert len(set(neighbors_fused.SHAPES)) == len(neighbors_fused.SHAPES)
    assert set(neighbors_fused.KNOWN.values()) <= set(neighbors_fused.SHAPES)
