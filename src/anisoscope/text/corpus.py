"""Corpora: a name, documents and a fingerprint, read from files, folders, standard input, datasets or inside Python."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from anisoscope.errors import OptionError, SourceError, choose
from anisoscope.text.embedded import embedded_documents
from anisoscope.text.streams import SUFFIXES, as_text, open_bytes, read_bytes

KINDS = ("auto", "text", "lines", "wiki")
END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 100_000  # a longer plain text is cut at a line end, so that no tokenizer meets it in one piece
HEAD_CHARACTERS = 1_000_000  # what is looked at to find out how documents are parted


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    ``fingerprint`` is the SHA-256 of the documents in UTF-8, each preceded by its length: the same text under another
    name, or read another way, has the same one. ``notes`` say what was left out.
    """

    name: str
    documents: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        """The number of characters of all documents."""
        return sum(map(len, self.documents))

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[str]:
        return iter(self.documents)

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self):,} documents, {self.characters:,} characters, {self.fingerprint[:12]}…)"
        )


def load_corpus(
    source: str | Path | Iterable[str] | None = None, *, kind: str = "auto", max_chars: int | None = None
) -> Corpus:
    """Read a corpus.

    ``source`` is a file, a folder (its text files in the order of their names), ``"-"`` for standard input,
    ``"hf:OWNER/NAME[/CONFIG][:SPLIT]"`` for a dataset of the Hugging Face hub, an iterable of documents, or None for
    the documentation inside Python. Files may be compressed (.xz .gz .bz2 .zst) and must be UTF-8.

    ``kind`` says how a file is cut into documents. ``"text"``: the file is one document (a long one is cut at line
    ends). ``"lines"``: documents are parted by ``<|endoftext|>``, else by blank lines, else each line is one.
    ``"wiki"``: a MediaWiki dump such as enwik8, cleaned. ``"auto"``: wiki for dumps, lines where ``<|endoftext|>``
    occurs near the start, else text. ``max_chars`` stops reading after that many characters of documents.
    """
    choose("kind", kind, KINDS)
    if max_chars is not None and max_chars < 1:
        raise OptionError(f"max_chars={max_chars}: a corpus has one character or more")
    seen: Counter[str] = Counter()
    if source is None:
        name, documents = _embedded_name(), iter(embedded_documents())
    elif isinstance(source, str) and source.startswith("hf:"):
        name, documents = source, _dataset(source)
    elif isinstance(source, str | Path):
        name, documents = _of_path(source, kind, seen)
    else:
        name, documents = "documents", _checked(source)
    kept, fingerprint, cut = _gather(documents, max_chars)
    if not kept:
        raise SourceError(f"{name}: no text in it; every document is empty or blank")
    notes = [f"{count:,} pages left out: {what}" for what, count in sorted(seen.items()) if what != "article"]
    if cut:
        notes.append(f"cut after max_chars={max_chars:,} characters")
    return Corpus(name, kept, fingerprint, tuple(notes))


def _embedded_name() -> str:
    return f"documentation of Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"


def _gather(documents: Iterator[str], max_chars: int | None) -> tuple[tuple[str, ...], str, bool]:
    """Documents that are not blank, their fingerprint, and whether reading stopped early."""
    digest = hashlib.sha256()
    kept: list[str] = []
    room = sys.maxsize if max_chars is None else max_chars
    cut = False
    for document in documents:
        if room <= 0:
            cut = True
            break
        if not document.strip():
            continue
        if len(document) > room:
            document, cut = document[:room], True
        room -= len(document)
        try:
            data = document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SourceError(
                f"document {len(kept)} holds half of a surrogate pair at character {error.start:,}, which is no text"
            ) from None
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        kept.append(document)
    return tuple(kept), digest.hexdigest(), cut


def _checked(documents: Iterable[str]) -> Iterator[str]:
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            raise SourceError(f"document {number} is a {type(document).__name__}; an iterable of str is needed")
        yield document


def _of_path(source: str | Path, kind: str, seen: Counter[str]) -> tuple[str, Iterator[str]]:
    if str(source) == "-":
        return "standard input", _documents("standard input", read_bytes(sys.stdin.buffer), kind, seen)
    path = Path(source)
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder; {_likely(path)}")
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if _is_text(file, path)]
        if not files:
            raise SourceError(f"{path}: no text in this folder; names must end in {', '.join(SUFFIXES)}")
        return path.name, (text for file in files for text in _file(file, kind, seen))
    return path.name, _file(path, kind, seen)


def _likely(path: Path) -> str:
    import difflib

    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else "give a path, '-' or hf:OWNER/NAME"


def _is_text(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.is_file() and file.name.lower().endswith(SUFFIXES)


def _file(path: Path, kind: str, seen: Counter[str]) -> Iterator[str]:
    with open_bytes(path) as stream:
        yield from _documents(str(path), read_bytes(stream, str(path)), kind, seen)


def _documents(name: str, chunks: Iterator[bytes], kind: str, seen: Counter[str]) -> Iterator[str]:
    head = next(chunks, b"")
    chunks = chain([head], chunks)
    if kind == "wiki" or (kind == "auto" and head.lstrip()[:10].lower() == b"<mediawiki"):
        from anisoscope.text.dump import read_pages  # here, not above: their patterns take a while to compile
        from anisoscope.text.wiki import clean

        return (clean(page.wikitext) for page in read_pages(chunks, seen, name=name))
    text = as_text(chunks, name)
    start = _take(text, HEAD_CHARACTERS)
    if kind == "lines" or (kind == "auto" and END_OF_TEXT in start):
        return _parted(chain([start], text), _parting(start))
    return _pieces(chain([start], text))


def _take(text: Iterator[str], characters: int) -> str:
    """The first pieces of a stream, together about that long."""
    pieces, length = [], 0
    for piece in text:
        pieces.append(piece)
        length += len(piece)
        if length >= characters:
            break
    return "".join(pieces)


def _parting(start: str) -> str:
    if END_OF_TEXT in start:
        return END_OF_TEXT
    # A blank line at the very end parts nothing.
    return "\n\n" if any(not line.strip() for line in start.strip().split("\n")) else "\n"


def _lines(text: Iterator[str]) -> Iterator[str]:
    rest: list[str] = []
    for piece in text:
        head, *lines = piece.split("\n")
        rest.append(head)
        for line in lines:
            yield "".join(rest)
            rest = [line]
    yield "".join(rest)


def _parted(text: Iterator[str], parting: str) -> Iterator[str]:
    """Documents between the marks, without blanks around them; line by line, so that a file of any size streams."""
    if parting == "\n":
        yield from (line.strip() for line in _lines(text))
        return
    gathered: list[str] = []
    for line in _lines(text):
        if parting == END_OF_TEXT and END_OF_TEXT in line:
            first, *others = line.split(END_OF_TEXT)
            for other in others:
                yield "\n".join([*gathered, first]).strip()
                gathered, first = [], other
            gathered = [first]
        elif parting != END_OF_TEXT and not line.strip():
            yield "\n".join(gathered)
            gathered = []
        else:
            gathered.append(line)
    yield "\n".join(gathered).strip()


def _pieces(text: Iterator[str]) -> Iterator[str]:
    """The whole text, cut at line ends into pieces of about PIECE_CHARACTERS; a longer line stays whole."""
    gathered: list[str] = []
    length = 0
    for line in _lines(text):
        if length and length + len(line) > PIECE_CHARACTERS:
            yield "\n".join(gathered)
            gathered, length = [], 0
        gathered.append(line)
        length += len(line) + 1
    yield "\n".join(gathered)


def parse_dataset(source: str) -> tuple[str, str | None, str]:
    """``hf:OWNER/NAME[/CONFIG][:SPLIT]`` as name, configuration and split (train where none is given)."""
    body, _, split = source.removeprefix("hf:").partition(":")
    parts = body.split("/")
    if not all(parts) or len(parts) > 3:
        raise SourceError(
            f"{source!r} is no dataset: write hf:OWNER/NAME, hf:OWNER/NAME/CONFIG, and :SPLIT after either"
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train"


def _dataset(source: str) -> Iterator[str]:
    name, config, split = parse_dataset(source)
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise SourceError(f"{source}: datasets need the package datasets: pip install 'anisoscope[hf]'") from None
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # of a dozen kinds: no network, no such name, no such split
        raise SourceError(f"{source}: cannot be loaded: {str(error).splitlines()[0]}") from None
    return _column(rows, source)


def _column(rows: Iterable[dict[str, Any]], source: str) -> Iterator[str]:
    column = None
    for row in rows:
        if column is None:
            texts = [key for key, value in row.items() if isinstance(value, str)]
            if not texts:
                raise SourceError(f"{source}: no column of text; it has {', '.join(row)}")
            column = "text" if "text" in texts else texts[0]
        yield row[column]
