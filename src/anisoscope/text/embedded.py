"""The embedded corpus: the documentation that ships inside Python, so that a first run needs no file and no network.

It is the reference manual (``pydoc_data.topics``) and the docstrings of the standard library, cleaned of examples and
markup. Nothing is imported or run for it: sources are read as text, and a literal is evaluated as a literal.
Another version of Python has another text; the fingerprint of the corpus says so.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from anisoscope.errors import SourceError

# Tests, programs with a window and tables of characters hold little prose; the manual is read on its own.
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "this.py"})
LEAST_LETTERS = 0.72  # share of letters and spaces in a paragraph of prose; programs and tables have fewer
LEAST_CHARACTERS = 40  # shorter paragraphs are labels

# Comments and strings in the order they stand, so that a quote inside one is not taken for the start of another.
_LITERAL = re.compile(
    r"#[^\n]*+|"
    r"(?P<own>(?:(?<=\n)|^)[ \t]*+[rRuU]?+)?+"
    r"(?P<string>[rRbBuUfF]{0,2}+(?:\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+\"\"\"|'''(?:[^'\\]|\\.|'(?!''))*+'''|"
    r"\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'))",
    re.DOTALL,
)
_ROLE = re.compile(r":[a-zA-Z:]{2,20}:(?=`)")
_DIRECTIVE = re.compile(r"^\s*+(?:\.\. |:[a-z]+ ?[\w ]*:)")
_UNDERLINE = re.compile(r"^\s*+([-=*~^\"+#])\1{2,}+\s*+$")
_MARKS = re.compile(r"``|`|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|::(?=\s|$)")
_NO_PROSE = re.compile(r"::=|-{4,}|={4,}| # |\S  ++\S.*\S  ++\S")  # grammars, tables, programs with remarks
_PROSE = re.compile(r"[A-Za-z ]")


@cache
def embedded_documents() -> tuple[str, ...]:
    """The documents in a fixed order: topics of the manual by name, then modules of the library by path."""
    found = tuple(_documents())
    if not found:
        raise SourceError("this Python came without its sources and manual; give a text file or a folder instead")
    return found


def _documents() -> Iterator[str]:
    for text in _topics():
        yield from filter(None, [prose(text)])
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        parts = path.relative_to(library).parts
        if parts[0].removesuffix(".py") in sys.stdlib_module_names and not LEFT_OUT & set(parts):
            yield from filter(None, ["\n\n".join(filter(None, map(prose, docstrings(_source(path)))))])


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics  # a table of strings, nothing else
    except ImportError:  # some distributions leave it out
        return []
    return [topics[name] for name in sorted(topics)]


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError):
        return ""  # a handful of old modules are written in another encoding


def docstrings(source: str) -> Iterator[str]:
    """Strings in triple quotes that stand as a statement of their own, in order: docstrings, read without parsing.

    Parsing the whole library would take several seconds; this takes one.
    """
    for match in _LITERAL.finditer(source):
        literal = match["string"]
        if match["own"] is None or literal is None or literal.lstrip("rRuU")[:3] not in ('"""', "'''"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes that Python has come to dislike are its own affair
                value = ast.literal_eval(match["own"].lstrip() + literal)
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, str):
            yield inspect.cleandoc(value)


def prose(text: str) -> str:
    """The paragraphs of prose in reStructuredText: without examples, literal blocks, directives, tables and marks."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*+\n", text):
        lines = []
        for line in paragraph.split("\n"):
            if line.lstrip().startswith((">>>", "...")):
                break  # the rest of the paragraph is a session and its output
            if not (_UNDERLINE.match(line) or _DIRECTIVE.match(line)):
                lines.append(line.strip())
        if _NO_PROSE.search("\n".join(lines)):
            continue
        joined = _MARKS.sub("", _ROLE.sub("", " ".join(filter(None, lines))))
        joined = re.sub(r"\s{2,}+", " ", joined).strip()
        if len(joined) >= LEAST_CHARACTERS and len(_PROSE.findall(joined)) >= LEAST_LETTERS * len(joined):
            kept.append(joined)
    return "\n\n".join(kept)
