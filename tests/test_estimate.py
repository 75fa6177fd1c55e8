"""An estimate is a frozen record that refuses what it must not hold."""

import copy
import inspect
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from anisoscope.estimate import Estimate

FULL = {
    "value": 1.5,
    "stderr": 0.25,
    "n": 7,
    "method": "a way",
    "notes": ("a note", "another"),
    "over": "blocks",
    "dof": 3.0,
    "parts": {"low": Estimate(value=1.0, stderr=None, n=7, method="a part")},
}


def test_every_field_is_given_by_name_and_kept():
    one = Estimate(**FULL)
    assert {name: getattr(one, name) for name in FULL} == FULL
    assert [field.name for field in fields(Estimate)] == list(inspect.signature(Estimate).parameters) == list(FULL)
    bare = Estimate(value=2, stderr=None, n=1, method="m")
    assert (bare.notes, bare.over, bare.dof, dict(bare.parts)) == ((), None, None, {})


@pytest.mark.parametrize("name", FULL)
def test_estimates_differ_where_a_field_differs_and_cannot_be_changed(name):
    one = Estimate(**FULL)
    other = replace(one, **{name: FULL["parts"]["low"].parts if name == "parts" else type(FULL[name])()})
    assert one != other
    assert replace(other, **{name: FULL[name]}) == one
    with pytest.raises(FrozenInstanceError):
        setattr(one, name, None)


def test_copies_are_the_same():
    one = Estimate(**FULL)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"value": math.nan}, "holds a finite number, got nan from a way"),
        ({"value": -math.inf}, "holds a finite number"),
        ({"stderr": math.nan}, "finite and >= 0, or None; got nan"),
        ({"stderr": math.inf}, "finite and >= 0"),
        ({"stderr": -1e-9}, "finite and >= 0"),
        ({"over": None}, "must say what it is over; a way did not"),
    ],
)
def test_what_an_estimate_refuses(wrong, words):
    with pytest.raises(ValueError, match=words):
        Estimate(**(FULL | wrong))
    with pytest.raises(ValueError, match=words):
        replace(Estimate(**FULL), **wrong)
    assert Estimate(**(FULL | {"stderr": 0.0})).stderr == 0.0
