"""The embedded corpus: the documentation that ships inside Python, so that a first run needs no file and no network.

It is the reference manual (``pydoc_data.topics``) and the docstrings of the standard library, cleaned of examples and
markup. Nothing is imported or run for it: sources are read as text, and a literal is evaluated as a literal.
Another version of Python has another text; the fingerprint of the corpus says so.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import inspect
import json
import os
import re
import string
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from anisoscope.errors import SourceError
from anisoscope.meanwhile import cores

# Tests, programs with a window and tables of characters hold little prose; the manual is read on its own.
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "this.py"})
LEAST_LETTERS = 0.72  # share of letters and spaces in a paragraph of prose; programs and tables have fewer
LONGEST_S = 30  # that another process is waited for
LEAST_CHARACTERS = 40  # shorter paragraphs are labels

# Comments and strings are passed over in the order they stand, so that a quote inside one is not taken for the start of
# another. One match runs to the next string in triple quotes that begins a line, or to the end: one for every literal
# would take several times as long.
_TRIPLE = r"(?:\"\"\"(?:[^\"\\]++|\\.|\"(?!\"\"))*+\"\"\"|'''(?:[^'\\]++|\\.|'(?!''))*+''')"
_SINGLE = r"(?:\"(?:[^\"\\\n]++|\\.)*+\"|'(?:[^'\\\n]++|\\.)*+')"
_OWN = r"[ \t]*+[rRuU]?+"
_STRING = rf"[rRuU]{{0,2}}+{_TRIPLE}"
_LITERAL = re.compile(
    rf"(?:[^\"'#\n]++|#[^\n]*+|\n(?!{_OWN}{_STRING})|{_TRIPLE}|{_SINGLE}|[\"'])*+"
    rf"(?:\n(?P<own>{_OWN})(?P<string>{_STRING}))?+",
    re.DOTALL,
)
_ROLE = re.compile(r":[a-zA-Z:]{2,20}:(?=`)")
_DIRECTIVE = re.compile(r"^\s*+(?:\.\. |:[a-z]+ ?[\w ]*:)")
_UNDERLINE = re.compile(r"^\s*+([-=*~^\"+#])\1{2,}+\s*+$")
# Every branch of the next two begins with a character, not with a look around it: the search then goes from one such
# character to the next.
_MARKS = re.compile(r"`|\*(?:\*|(?<!\w\*)(?=\w)|(?<=\w\*)(?!\w))|::(?=\s|$)")
_NO_PROSE = re.compile(r"::=|-{4}|={4}| (?:# | (?<=\S  ) *+\S.*\S  ++\S)")  # grammars, programs with remarks, tables
_BLANK_LINE, _SPACES = re.compile(r"\n[ \t]*+\n"), re.compile(r"\s{2,}+")
_LETTERS = dict.fromkeys(map(ord, string.ascii_letters + " "))


_READERS: list[subprocess.Popen[bytes]] = []


@cache
def embedded_documents() -> tuple[str, ...]:
    """The documents in a fixed order: topics of the manual by name, then modules of the library by path."""
    found = _read_beside() or tuple(_documents())
    if not found:
        raise SourceError("this Python came without its sources and manual; give a text file or a folder instead")
    return found


def begin_reading() -> None:
    """Let another process read the documents, on another core: they are there once heavy imports are over.

    It is a wish: where that process cannot be had or fails, ``embedded_documents`` reads them as ever.
    """
    if _READERS or embedded_documents.cache_info().currsize or not sys.executable or cores() < 2:
        return
    code = f"import json, sys; from {__name__} import _documents; json.dump(list(_documents()), sys.stdout)"
    paths = {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}  # the same package, however it was found
    with contextlib.suppress(OSError):
        _READERS.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: nothing that this process would not import itself
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | paths,
            )
        )


@atexit.register
def _end_reading() -> None:
    for reader in _READERS:  # nobody has asked for what it reads
        reader.kill()
        reader.communicate()


def _read_beside() -> tuple[str, ...]:
    """What the other process has read, or nothing."""
    if not _READERS:
        return ()
    with _READERS.pop() as reader:
        try:
            said = reader.communicate(timeout=LONGEST_S)[0]
            return tuple(json.loads(said)) if reader.returncode == 0 else ()
        except (subprocess.TimeoutExpired, ValueError):
            reader.kill()
            return ()


def _documents() -> Iterator[str]:
    for text in _topics():
        yield from filter(None, [prose(text)])
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_modules(str(library), "")):
        yield from filter(None, ["\n\n".join(filter(None, map(prose, docstrings(_source(library / path)))))])


def _modules(folder: str, before: str) -> Iterator[str]:
    """Paths of modules below a folder. What is left out is not even listed: installed packages lie there too."""
    for entry in os.scandir(folder):
        if entry.name in LEFT_OUT or not (before or entry.name.removesuffix(".py") in sys.stdlib_module_names):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _modules(entry.path, f"{before}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield before + entry.name


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

    Parsing the whole library would take several seconds; this takes a fraction of one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that Python has come to dislike are its own affair
        # The break before the first line makes it begin as any other.
        literals = (match for match in _LITERAL.finditer("\n" + source) if match["own"] is not None)
        found = [_value(match["own"], match["string"]) for match in literals]
    return (inspect.cleandoc(value) for value in found if value is not None)


def _value(own: str, literal: str) -> str | None:
    """The string that a literal in triple quotes stands for; None where Python takes it for none."""
    body = literal.lstrip("rRuU")
    if "\\" not in body and "\0" not in body:
        return body[3:-3]  # nothing in it stands for anything else
    try:
        value = ast.literal_eval(own.lstrip() + literal)
    except (SyntaxError, ValueError):
        return None
    return value if isinstance(value, str) else None


def prose(text: str) -> str:
    """The paragraphs of prose in reStructuredText: without examples, literal blocks, directives, tables and marks."""
    kept = []
    for paragraph in _BLANK_LINE.split(text):
        if len(paragraph) < LEAST_CHARACTERS:
            continue  # nothing below makes it longer
        lines = []
        for line in paragraph.split("\n"):
            if line.lstrip().startswith((">>>", "...")):
                break  # the rest of the paragraph is a session and its output
            if not (_UNDERLINE.match(line) or _DIRECTIVE.match(line)):
                lines.append(line.strip())
        if _NO_PROSE.search("\n".join(lines)):
            continue
        joined = _MARKS.sub("", _ROLE.sub("", " ".join(filter(None, lines))))
        joined = _SPACES.sub(" ", joined).strip()
        if len(joined) >= LEAST_CHARACTERS:
            letters = len(joined) - len(joined.translate(_LETTERS))
            if letters >= LEAST_LETTERS * len(joined):
                kept.append(joined)
    return "\n\n".join(kept)
