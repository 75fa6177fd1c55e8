"""MediaWiki dumps (enwik8 and its kind): a stream of bytes in, articles out, page by page.

The parser is expat, fed in pieces, so a dump that is cut off in the middle of a page (enwik8 is) gives all whole pages.
"""

from __future__ import annotations

import xml.parsers.expat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from anisoscope.errors import SourceError
from anisoscope.text.markup import REDIRECT


@dataclass(frozen=True)
class Page:
    """An article as its author typed it."""

    title: str
    wikitext: str


@dataclass
class _Reader:
    """Handlers of the parser: gathers the title and the text of each page."""

    ready: list[Page] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    namespaces: set[str] = field(default_factory=set)
    inside: str = ""
    title: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    namespace: list[str] = field(default_factory=list)
    in_page: bool = False
    redirect: bool = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        if name == "page":
            self.in_page, self.redirect = True, False
            self.title.clear()
            self.text.clear()
        elif name == "redirect":
            self.redirect = True
        elif name == "text":
            self.text.clear()  # of several revisions the last one counts
        elif name == "namespace":
            self.namespace.clear()
        self.inside = name if name in ("title", "text", "namespace") else ""

    def data(self, piece: str) -> None:
        if self.inside == "text":
            self.text.append(piece)
        elif self.inside == "title":
            self.title.append(piece)
        elif self.inside == "namespace":
            self.namespace.append(piece)

    def end(self, name: str) -> None:
        if self.inside == "namespace":
            self.namespaces.add("".join(self.namespace))
        self.inside = ""
        if name.rpartition(":")[2] != "page":
            return
        self.in_page = False
        title, text = "".join(self.title), "".join(self.text)
        prefix, colon, _ = title.partition(":")
        if self.redirect or REDIRECT.match(text):
            self.seen["redirect"] += 1
        elif colon and prefix in self.namespaces:
            self.seen["not an article"] += 1
        else:
            self.seen["article"] += 1
            self.ready.append(Page(title, text))

    @staticmethod
    def doctype(*_: object) -> None:
        raise SourceError("the dump declares a document type, which no MediaWiki dump does; it is refused")


def read_pages(chunks: Iterable[bytes], seen: Counter[str] | None = None, *, name: str = "the dump") -> Iterator[Page]:
    """Articles of a dump in order, without redirects and pages of other namespaces (``Wikipedia:``, ``Template:``).

    ``seen`` is filled with how many pages there were of each sort ("article", "redirect", "not an article", "cut off").
    """
    reader = _Reader(seen=Counter() if seen is None else seen)
    parser = xml.parsers.expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = reader.data, reader.doctype
    for chunk in chunks:
        try:
            parser.Parse(chunk, False)
        except xml.parsers.expat.ExpatError as error:
            raise SourceError(f"{name} is not a MediaWiki dump: {error}; use kind='text' for plain text") from None
        yield from reader.ready
        reader.ready.clear()
    if reader.in_page:
        reader.seen["cut off"] += 1
    if not reader.seen:
        raise SourceError(f"{name} holds no page of a MediaWiki dump; use kind='text' for plain text")
