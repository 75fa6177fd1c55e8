"""Numbers for people: one minus sign in reports, the hyphen in files and terminals, no sign before a zero."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.estimate import Estimate
from anisoscope.views.numbers import MINUS, digits_of, interval_words, shown, typed, with_error, worded

VIEWS = Path(__file__).parent.parent / "src" / "anisoscope" / "views"
TERMINAL = {"tables.py"}
FLOAT = re.compile(r"[eEfFgGn%]$")


@given(st.floats(-1e9, 1e9), st.sampled_from([".2f", "+.3g", ".4g", "+.1e", ".0%", "g"]))
def test_shown_is_format_with_another_minus(value, spec):
    words, plain = shown(value, spec), format(value, spec)
    assert "-" not in words
    zero = not re.search("[1-9]", plain.split("e")[0])
    assert typed(words) == (plain.replace("-0", ("+" if "+" in spec else "") + "0", 1) if zero else plain)


@pytest.mark.parametrize(
    ("value", "stderr", "words"),
    [(-0.41234, 0.013, "−0.412"), (-3e-6, 2e-6, "−3.000e−06"), (-0.0001, 0.02, "0.000"), (2, None, "2")],
)
def test_digits(value, stderr, words):
    assert digits_of(value, stderr) == words


def test_words_of_an_estimate():
    e = Estimate(value=-0.1, stderr=0.1, n=9, method="mean", over="9 rows")
    assert with_error(e) == "−0.10 ± 0.10"
    assert interval_words(e) == "−0.30 … 0.10" and interval_words(e, plus=True) == "−0.30 … +0.10"
    assert digits_of(0.5, 0.1, plus=True) == "+0.50"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("passed: -0.3 (-.2 to -1e-05), by = -2", "passed: −0.3 (−.2 to −1e−05), by = −2"),
        ("gpt-2 of 2026-11-15, k-means, 3-4, phase-2, [-1]", "gpt-2 of 2026-11-15, k-means, 3-4, phase-2, [−1]"),
    ],
)
def test_stored_sentences(stored, words):
    assert worded(stored) == words


def float_formats(path: Path) -> list[str]:
    """Floats that an f-string of a file formats itself."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            last = node.format_spec.values[-1]
            if isinstance(last, ast.Constant) and FLOAT.search(str(last.value)):
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_views_format_floats_in_one_place():
    """A number with a hyphen for a minus would stand beside others with a minus."""
    paths = [path for path in VIEWS.glob("*.py") if path.name not in TERMINAL | {"numbers.py"}]
    assert len(paths) > 20
    assert [place for path in paths for place in float_formats(path)] == []
    assert float_formats(VIEWS / "tables.py"), "the rule must see what it forbids"


def test_no_minus_sign_of_its_own():
    """The sign is written once; formulas of the glossary are HTML."""
    assert [p.name for p in VIEWS.glob("*.py") if f'"{MINUS}"' in p.read_text()] == []
