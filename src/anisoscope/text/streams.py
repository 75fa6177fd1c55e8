"""Byte streams and their text: compressed files, UTF-8 in pieces, errors that say which byte."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from anisoscope.errors import SourceError

CHUNK_BYTES = 1 << 20
PLAIN = (".txt", ".md", ".xml")
PACKED = (".xz", ".gz", ".bz2", ".zst")
SUFFIXES = PLAIN + PACKED


@runtime_checkable
class ByteStream(Protocol):
    """Anything that bytes can be read from: an open file, an unpacked one, a connection."""

    def read(self, size: int = -1, /) -> bytes:
        """At most that many bytes; none at the end."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """A file as a stream of bytes, unpacked on the way by its suffix."""
    try:
        stream = _opener(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from None
    with closing(stream):
        yield stream


def _opener(path: Path) -> ByteStream:
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return lzma.open(path)
    if suffix == ".gz":
        return gzip.open(path)
    if suffix == ".bz2":
        import bz2  # not part of every build of Python

        return bz2.open(path)
    if suffix == ".zst":
        zstandard = _zstandard(path)
        return zstandard.open(path, "rb")
    return path.open("rb")


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise SourceError(f"{path}: .zst files need the package zstandard: pip install 'anisoscope[zst]'") from None
    return zstandard


def read_bytes(stream: ByteStream, name: str = "standard input") -> Iterator[bytes]:
    """The stream in chunks; a damaged one is an error with its name."""
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            raise SourceError(f"{name}: cannot be read, damaged or cut off: {error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # known only where zstandard is installed
                raise
            raise SourceError(f"{name}: cannot be read, damaged or cut off: {error}") from None
        if not chunk:
            return
        yield chunk


def as_text(chunks: Iterator[bytes], name: str) -> Iterator[str]:
    """UTF-8 decoded in pieces, line ends as newlines, without a byte-order mark."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, first = 0, True
    for chunk in chunks:
        if first and chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise SourceError(f"{name}: this is UTF-16; convert it to UTF-8 first")
        waiting = len(utf8.getstate()[0])  # bytes of a character that the last chunk cut in two
        piece = newlines.decode(_decode(utf8, chunk, offset - waiting, name))
        offset += len(chunk)
        yield piece.removeprefix("\ufeff") if first else piece
        first = False
    yield newlines.decode(_decode(utf8, b"", offset - len(utf8.getstate()[0]), name, final=True), final=True)


def _decode(utf8: codecs.IncrementalDecoder, chunk: bytes, offset: int, name: str, final: bool = False) -> str:
    try:
        return utf8.decode(chunk, final)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SourceError(
            f"{name}: not UTF-8: byte 0x{byte:02x} at offset {offset + error.start:,} ({error.reason})"
        ) from None
