"""How numbers are written for people in a report: a true minus sign, and the digits that the error deserves.

Files and terminals keep the hyphen that programs can read: ``typed`` turns a sentence back.
"""

from __future__ import annotations

import math
import re

from anisoscope.estimate import Estimate

MINUS = "\N{MINUS SIGN}"
_NEGATIVE = re.compile(r"(?<![^\s(\[=])-(?=\.?\d)|(?<=\de)-(?=\d)")


def shown(value: float, spec: str) -> str:
    """``format(value, spec)`` with a true minus sign, in exponents too; what rounds to zero has none."""
    plus = "+" if spec.startswith("+") else ""
    return format(float(value), f"{plus}z{spec.removeprefix('+')}").replace("-", MINUS)


def typed(words: str) -> str:
    """A sentence of a report for the terminal: with the hyphen that programs read as a minus."""
    return words.replace(MINUS, "-")


def worded(stored: str) -> str:
    """A stored sentence for a report: the hyphen before a number that begins there becomes a minus."""
    return _NEGATIVE.sub(MINUS, stored)


def digits_of(value: float, stderr: float | None, *, plus: bool = False) -> str:
    """A value with two significant digits of its error, or four of its own; large and tiny ones with an exponent.

    ``plus`` writes the sign of what is positive too, as of a difference.
    """
    sign = "+" if plus else ""
    if not stderr:
        return shown(value, f"{sign}.4g")
    if abs(value) >= 1e6 or max(abs(value), stderr) < 1e-4:
        return shown(value, f"{sign}.3e")
    return shown(value, f"{sign}.{max(0, 1 - math.floor(math.log10(stderr)))}f")


def error_words(estimate: Estimate) -> str:
    """``± 0.013``, with the decimals of the value where it has plain ones; empty without an error bar."""
    if estimate.stderr is None:
        return ""
    plain = digits_of(estimate.value, estimate.stderr)
    same = estimate.stderr and "e" not in plain
    return f"± {digits_of(estimate.stderr, estimate.stderr) if same else shown(estimate.stderr, '.2g')}"


def with_error(estimate: Estimate, unit: str = "") -> str:
    """``0.412 ± 0.013``, or ``0.4123 (no error bar)``."""
    value = digits_of(estimate.value, estimate.stderr)
    return f"{value}{unit} (no error bar)" if estimate.stderr is None else f"{value} {error_words(estimate)}{unit}"


def interval_words(estimate: Estimate, *, plus: bool = False) -> str | None:
    """``0.386 … 0.438``, or None where there is no error bar."""
    interval = estimate.interval()
    if interval is None:
        return None
    return " … ".join(digits_of(end, estimate.stderr, plus=plus) for end in interval)
