"""Corpora: every source reads the same text, the fingerprint is of the content, and what cannot be read is named."""

import ast
import bz2
import contextlib
import gzip
import hashlib
import inspect
import io
import lzma
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import zstandard

from anisoscope.errors import OptionError, SourceError, UnknownNameError
from anisoscope.text import corpus as module
from anisoscope.text import embedded
from anisoscope.text.corpus import Corpus, load_corpus, parse_dataset
from anisoscope.text.embedded import docstrings, embedded_documents, prose
from anisoscope.text.streams import as_text

DATA = Path(__file__).parents[2] / "shared" / "data"
TEXT = "Ein kurzer Text,\nzwei Zeilen. é 漢 🙂\n"


def fingerprint(*documents):
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


PACKERS = {
    "x.txt": bytes,
    "x.md": bytes,
    "x.txt.xz": lzma.compress,
    "x.txt.gz": gzip.compress,
    "x.txt.bz2": bz2.compress,
    "x.txt.zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("name", PACKERS)
def test_file(tmp_path, name):
    (tmp_path / name).write_bytes(PACKERS[name](TEXT.encode()))
    found = load_corpus(tmp_path / name)
    assert found.documents == (TEXT,) and found.name == name
    assert found.fingerprint == fingerprint(TEXT) == load_corpus([TEXT]).fingerprint
    assert found.characters == len(TEXT)


def test_folder_is_sorted_and_standard_input_is_read(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "c/d.txt", ".hidden.txt", "e.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert load_corpus(tmp_path).documents == ("text of a.md", "text of b.txt", "text of c/d.txt")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert load_corpus("-").documents == (TEXT,)


def test_fingerprint_tells_documents_apart():
    assert load_corpus(["ab", "c"]).fingerprint != load_corpus(["a", "bc"]).fingerprint
    assert load_corpus(["ab", "c"]).fingerprint != load_corpus(["c", "ab"]).fingerprint
    assert load_corpus(["a", " \n", "b"]).documents == ("a", "b")


LINES = {
    "end of text": ("one\n\ntwo<|endoftext|>\nthree <|endoftext|> four\n", ("one\n\ntwo", "three", "four")),
    "blank lines": ("one\ntwo\n\n \n\nthree\n\n", ("one\ntwo", "three")),
    "one a line": ("one\ntwo\r\nthree\n", ("one", "two", "three")),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_lines(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr("anisoscope.text.streams.CHUNK_BYTES", chunk)
    text, expected = LINES[name]
    (tmp_path / "x.txt").write_bytes(text.encode())
    assert load_corpus(tmp_path / "x.txt", kind="lines").documents == expected
    if name == "end of text":
        assert load_corpus(tmp_path / "x.txt").documents == expected


def test_long_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 20)
    text = "\n".join(["0123456789"] * 5 + ["x" * 50, "end", ""])
    (tmp_path / "x.txt").write_text(text)
    documents = load_corpus(tmp_path / "x.txt").documents
    assert "\n".join(documents) == text
    assert [len(document) for document in documents] == [10, 10, 10, 10, 10, 50, 4]


def test_max_chars(tmp_path):
    found = load_corpus(["abcd", "efgh", "ijkl"], max_chars=6)
    assert found.documents == ("abcd", "ef") and "max_chars=6" in found.notes[0]
    assert load_corpus(["abcd"], max_chars=4).notes == ()

    def endless():
        while True:
            yield "word " * 100

    assert load_corpus(endless(), max_chars=1234).characters == 1234
    with pytest.raises(OptionError, match="max_chars=0"):
        load_corpus(["a"], max_chars=0)


def test_wiki_by_content(tmp_path):
    dump = "<mediawiki><page><title>A</title><text>''Cat'' [[x]]</text></page>"
    dump += "<page><text>#REDIRECT [[A]]</text></page></mediawiki>"
    (tmp_path / "enwik8").write_text(dump)
    found = load_corpus(tmp_path / "enwik8")
    assert found.documents == ("Cat x",) and found.notes == ("1 pages left out: redirect",)
    (tmp_path / "no.xml").write_text("no dump")
    with pytest.raises(SourceError, match=r"no.xml is not a MediaWiki dump"):
        load_corpus(tmp_path / "no.xml", kind="wiki")


def packed_badly(name, data):
    packed = PACKERS[name](data)
    return packed[: len(packed) // 2]


BAD = {
    "latin.txt": ("café".encode("latin-1"), r"not UTF-8: byte 0xe9 at offset 3"),
    "cut.txt": ("a漢".encode()[:-1], r"not UTF-8: byte 0xe6 at offset 1"),
    "wide.txt": ("text".encode("utf-16"), "UTF-16"),
    "empty.txt": (b"", "no text in it"),
    "blank.txt": (b" \n\n\t", "no text in it"),
    "x.txt.xz": (packed_badly("x.txt.xz", TEXT.encode() * 99), "damaged or cut off"),
    "x.txt.gz": (packed_badly("x.txt.gz", TEXT.encode() * 99), "damaged or cut off"),
    "y.txt.gz": (b"no gzip at all", "damaged or cut off"),
    "y.txt.zst": (b"no zstd at all", "damaged or cut off"),
    "y.txt.bz2": (b"no bzip at all", "damaged or cut off"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file(tmp_path, name):
    data, reason = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=reason) as caught:
        load_corpus(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_byte_offset_holds_over_chunks():
    data = "é".encode() * 50 + b"\xff"
    for size in (1, 2, 3, 7):
        with pytest.raises(SourceError, match="0xff at offset 100"):
            list(as_text((data[a : a + size] for a in range(0, len(data), size)), "x"))
    assert "".join(as_text(iter([b"\xef\xbb\xbfa\r", b"\nb\r\nc"]), "x")) == "a\nb\nc"


def test_bad_sources(tmp_path):
    (tmp_path / "corpus.txt").write_text("a")
    with pytest.raises(SourceError, match=r"no such file or folder; did you mean .*corpus\.txt"):
        load_corpus(tmp_path / "corpsu.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match="no text in this folder"):
        load_corpus(tmp_path / "folder")
    with pytest.raises(UnknownNameError, match="did you mean 'lines'"):
        load_corpus(["a"], kind="line")
    with pytest.raises(SourceError, match="document 1 is a int"):
        load_corpus(text for text in ("a", 1))
    with pytest.raises(SourceError, match="surrogate"):
        load_corpus(["a\ud800"])
    with pytest.raises(SourceError, match="no text in it"):
        load_corpus([])


def test_datasets():
    assert parse_dataset("hf:a/b") == ("a/b", None, "train")
    assert parse_dataset("hf:a/b/c:test") == ("a/b", "c", "test")
    assert parse_dataset("hf:b:validation") == ("b", None, "validation")
    for bad in ("hf:", "hf:a/b/c/d", "hf:a//b"):
        with pytest.raises(SourceError, match="is no dataset"):
            load_corpus(bad)


def test_dataset_in_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "train.jsonl").write_text('{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    assert load_corpus("hf:a/b").documents == ("one", "two")


@pytest.mark.parametrize(("package", "source"), [("datasets", "hf:a/b"), ("zstandard", "x.zst")])
def test_missing_package_is_named(tmp_path, monkeypatch, package, source):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "x.zst").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=f"need the package {package}: pip install"):
        load_corpus(source)


def test_embedded_is_prose_and_the_same_every_time():
    found = load_corpus()
    assert isinstance(found, Corpus)
    assert found.characters > 1_200_000 and len(found) > 300
    assert "Python 3." in found.name
    text = "\n".join(found)
    for mark in (">>> ", "``", "::=", ":class:`"):
        assert mark not in text, mark
    assert sum(character.isalpha() or character.isspace() for character in text) > 0.88 * len(text)
    code = "from anisoscope.text.corpus import load_corpus; print(load_corpus().fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == found.fingerprint, "another process, another order of hashes"
    assert embedded_documents() is embedded_documents()


@pytest.fixture
def forgotten(monkeypatch):
    """Nothing has been read yet, before and after, and there is a core to spare."""
    monkeypatch.setattr(embedded, "cores", lambda: 2)
    known = embedded_documents()
    embedded_documents.cache_clear()
    yield known
    embedded._end_reading()
    embedded._READERS.clear()
    embedded_documents.cache_clear()


def test_another_process_reads_the_same(forgotten, tmp_path, monkeypatch):
    """And takes nothing from the folder that it is begun in."""
    (tmp_path / "json.py").write_text("open('run', 'w')")
    monkeypatch.chdir(tmp_path)
    embedded.begin_reading()
    embedded.begin_reading()  # once is enough
    assert len(embedded._READERS) == 1
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_documents", lambda: pytest.fail("it was read here"))
        assert embedded_documents() == forgotten
    embedded.begin_reading()  # it is known by now
    assert not embedded._READERS and [file.name for file in tmp_path.iterdir()] == ["json.py"]


def test_one_core_reads_by_itself(forgotten, monkeypatch):
    monkeypatch.setattr(embedded, "cores", lambda: 1)
    embedded.begin_reading()
    assert not embedded._READERS and embedded_documents() == forgotten


ENDS = {"exit 1": [1], "echo '[\"half'": [0], "echo '[\"some\"]'; exit 1": [1], "exec sleep 60": [-9], None: []}
"""Programs in the place of Python and how each ends: failed, half way, failed after all, too slow, not there."""


@pytest.mark.parametrize("program", ENDS)
def test_where_the_other_process_fails_documents_are_read_here(forgotten, tmp_path, monkeypatch, program):
    monkeypatch.setattr(embedded, "LONGEST_S", 0.1 if program and "sleep" in program else 20)
    other = tmp_path / "python"
    if program is not None:
        other.write_text(f"#!/bin/sh\n{program}\n")
        other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    embedded.begin_reading()
    readers = list(embedded._READERS)
    assert embedded_documents() == forgotten
    assert [reader.returncode for reader in readers] == ENDS[program]


def test_another_process_ends_with_this_one():
    code = "from anisoscope.text import embedded; embedded.cores = lambda: 2; embedded.begin_reading()\n"
    code += "print(embedded._READERS[0].pid)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_embedded_imports_nothing():
    code = "import sys; from anisoscope.text.embedded import embedded_documents as read; before = set(sys.modules)\n"
    code += "read(); print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in ast.literal_eval(done.stdout) if not name.startswith("_sysconfigdata")}  # where it lies
    assert found <= {"pydoc_data", "pydoc_data.topics"}


@pytest.mark.parametrize("name", ["textwrap", "argparse", "json.decoder", "decimal", "_pydecimal", "typing"])
def test_docstrings_are_those_that_the_parser_finds(name):
    import importlib.util

    source = Path(importlib.util.find_spec(name).origin).read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    parsed = {ast.get_docstring(node) for node in nodes}
    triple = {text for text in parsed if text and f'"""{text[:10]}' in source}
    assert triple <= set(docstrings(source))


def test_docstrings_are_not_fooled():
    source = 'x = """no\n"""\n# """ no\ny = "\'\'\'"\ndef f():\n    """yes \\" yes"""\n    return \'"""\'\n'
    source += "\n'''also'''\nb\"\"\"no\"\"\"\n"
    assert list(docstrings(source)) == ['yes " yes', "also"]


SLOW_LITERAL = re.compile(
    r"#[^\n]*|(?P<own>(?:(?<=\n)|^)[ \t]*[rRuU]?)?(?P<string>[rRbBuUfF]{0,2}(?:"
    r"\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+\"\"\"|'''(?:[^'\\]|\\.|'(?!''))*+'''|"
    r"\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'))",
    re.DOTALL,
)


def slow_docstrings(source):
    """Every comment and every literal is a match of its own; those in triple quotes that begin a line are kept."""
    for match in SLOW_LITERAL.finditer(source):
        body = (match["string"] or "").lstrip("rRuU")
        if match["own"] is not None and body[:3] in ('"""', "'''"):
            if "\\" not in body:
                yield inspect.cleandoc(body[3:-3])
                continue
            with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield inspect.cleandoc(ast.literal_eval(match["own"].lstrip() + match["string"]))


PIECES = ('"""', "'''", '"', "'", "\n", "\n    ", "#", "r", "b", "x ", "\\", '\n"""a"""', "\n'''b\n'''", "\tu")


def test_docstrings_are_those_of_one_literal_after_another(seed):
    random, met = np.random.default_rng(seed), 0
    for _ in range(2000):
        source = "".join(random.choice(PIECES, size=random.integers(1, 16)))
        expected = list(slow_docstrings(source))
        assert list(docstrings(source)) == expected, source
        met += len(expected)
    assert met > 300
    assert list(docstrings('r"""first \\d"""\n"""never ended\n')) == ["first \\d"]


@pytest.mark.parametrize(
    "mark, left",
    [
        ("`one`", "one"),
        ("``one``", "one"),
        ("**one**", "one"),
        ("*one*", "one"),
        ("2 * 3", "2 * 3"),
        ("a*b", "a*b"),
        ("one:: two", "one two"),
        ("one::two", "one::two"),
        ("one  two", "one two"),
        ("one  two  three", None),
        ("one\t  two  three", "one two three"),
        ("one ::= two", None),
        ("one -- two --- three", "one -- two --- three"),
        ("one ---- two", None),
        ("one ==== two", None),
        ("one # two", None),
        ("one #two", "one #two"),
    ],
)
def test_marks_and_what_is_no_prose(mark, left):
    around = "Some words of prose that stand before it {} and others that come after it in the same line."
    assert prose(around.format(mark)) == ("" if left is None else around.format(left))


def test_prose_of_a_least_length():
    assert prose("a" * 39) == "" and prose("a" * 40) == "a" * 40
    assert prose(f"{'a' * 20}\n{'a' * 19}") == f"{'a' * 20} {'a' * 19}"


def test_prose():
    text = "Title\n=====\n\nThis :func:`runs` the ``program`` and says what came of it, *always*.\n\n"
    text += ">>> x = 1\n1\n\n.. note:: a\n\nx = 1"
    assert prose(text) == "This runs the program and says what came of it, always."


@pytest.mark.parametrize("name", ["tinystories_sample/tiny_stories.txt.xz", "enwiki2015_text/wiki_heldout.txt.xz"])
def test_real_files(name):
    if not (DATA / name).exists():
        pytest.skip("the text is not here")
    found = load_corpus(DATA / name, max_chars=2_000_000)
    with lzma.open(DATA / name, "rt", encoding="utf-8") as stream:
        truth = stream.read(2_000_000)
    assert "\n".join(found)[: len(truth) - 5] == truth[: len("\n".join(found))][: len(truth) - 5]
