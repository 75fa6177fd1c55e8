"""enwik8: the first 100,000,000 bytes of the English Wikipedia of 3 March 2006, fetched once and checked.

A download that broke off goes on where it stopped. Nothing is put in place before its size and checksum are right.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from anisoscope.errors import ChecksumError, SourceError
from anisoscope.text.streams import ByteStream

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
CHUNK_BYTES = 1 << 16
RETRIES = 5  # in a row without a single new byte

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and the bytes in all, None where the server does not say."""


@dataclass(frozen=True)
class Expected:
    """What a file must be: its name, size and checksums."""

    name: str
    size: int
    md5: str
    sha1: str


ENWIK8 = Expected("enwik8", 100_000_000, "a1fa5ffddb56f4953e226637dabbb36a", "57b8363b814821dc9d47aa4d41f58733519076b2")


@dataclass(frozen=True)
class Fetched:
    """Where the file lies, and what a reader should know of it."""

    path: Path
    notes: tuple[str, ...] = ()


def fetch_enwik8(
    folder: str | Path,
    *,
    from_file: str | Path | None = None,
    url: str = ENWIK8_URL,
    allow_prefix: bool = False,
    progress: Progress | None = None,
    expected: Expected = ENWIK8,
) -> Fetched:
    """Put enwik8 into ``folder`` and return where it lies; a good copy that is there already is not fetched again.

    ``from_file`` takes a copy at hand, the zip or the file itself, in place of the network. With ``allow_prefix`` a
    shorter beginning of it is accepted and noted: its checksum cannot be checked.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / expected.name
    if target.is_file() and _problem(target, expected) is None:
        return Fetched(target, ("was there already",))
    if from_file is None:
        packed = download(url, folder / f"{expected.name}.zip", progress=progress)
        found = _install(packed, target, expected, allow_prefix=False)
        packed.unlink()
        return found
    given = Path(from_file)
    if not given.is_file():
        raise SourceError(f"{given}: no such file; from_file takes enwik8 or enwik8.zip")
    return _install(given, target, expected, allow_prefix=allow_prefix)


def _install(source: Path, target: Path, expected: Expected, *, allow_prefix: bool) -> Fetched:
    """Copy or unpack beside the target, check, and only then give it its name."""
    fresh = target.with_name(f"{target.name}.unpacked")
    try:
        if zipfile.is_zipfile(source):
            _unpack(source, fresh, expected)
        else:
            shutil.copyfile(source, fresh)
        notes = _verify(fresh, source, expected, allow_prefix)
        os.replace(fresh, target)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{source}: a damaged zip: {error}; delete it and fetch it again") from None
    finally:
        fresh.unlink(missing_ok=True)
    return Fetched(target, notes)


def _unpack(source: Path, fresh: Path, expected: Expected) -> None:
    """One member of the right name, no more than the right size: names inside the zip never become paths."""
    with zipfile.ZipFile(source) as archive:
        names = [info.filename for info in archive.infolist()]
        if expected.name not in names:
            raise SourceError(f"{source}: holds {', '.join(names) or 'nothing'}, not {expected.name}")
        with archive.open(expected.name) as member, fresh.open("wb") as out:
            room = expected.size + 1
            while room and (chunk := member.read(min(CHUNK_BYTES, room))):
                out.write(chunk)
                room -= len(chunk)


def _problem(path: Path, expected: Expected) -> str | None:
    """Why this is not the file, or None if it is."""
    size = path.stat().st_size
    if size != expected.size:
        more = " or more" if size > expected.size else ""
        return f"has {size:,} bytes{more}, {expected.name} has {expected.size:,}"
    md5, sha1 = hashlib.md5(usedforsecurity=False), hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            md5.update(chunk)
            sha1.update(chunk)
    for kind, found, wanted in (("md5", md5.hexdigest(), expected.md5), ("sha1", sha1.hexdigest(), expected.sha1)):
        if found != wanted:
            return f"has {kind} {found}, {expected.name} has {wanted}"
    return None


def _verify(fresh: Path, source: Path, expected: Expected, allow_prefix: bool) -> tuple[str, ...]:
    problem = _problem(fresh, expected)
    if problem is None:
        return ()
    size = fresh.stat().st_size
    if allow_prefix and 0 < size < expected.size:
        return (f"a beginning of {expected.name}: {size:,} of {expected.size:,} bytes, checksum not checked",)
    shorter = "; allow_prefix=True takes a beginning" if size < expected.size and not allow_prefix else ""
    raise ChecksumError(f"{source}: {problem}{shorter}; delete it and fetch it again")


def download(url: str, target: Path, *, progress: Progress | None = None) -> Path:
    """Fetch ``url`` into ``target`` through ``target.part``, going on where an earlier or broken download stopped."""
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        try:
            if _attempt(url, part, had, progress):
                os.replace(part, target)
                return target
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            raise SourceError(f"{url}: the server answers {error.code} {error.reason}; {_offline()}") from None
        except (OSError, http.client.HTTPException) as error:  # URLError among them
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        now = part.stat().st_size if part.exists() else 0
        failures = 0 if now > had else failures + 1
        if failures >= RETRIES:
            raise SourceError(f"{url}: cannot be fetched ({reason}); {now:,} bytes are kept in {part}; {_offline()}")
        time.sleep(0.1 * 2**failures if failures else 0)


def _offline() -> str:
    return "fetch it elsewhere and give its path as from_file"


def _attempt(url: str, part: Path, had: int, progress: Progress | None) -> bool:
    """One request; True when the whole file is there."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={had}-"} if had else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        whole = error.headers.get("Content-Range") == f"bytes */{had}"  # complete, but not yet renamed
        error.close()
        if not whole:
            part.unlink(missing_ok=True)  # longer than the file it should become: begin again
        return whole
    with response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            raise http.client.HTTPException(f"asked from byte {had}, got {response.headers.get('Content-Range')}")
        start = had if resumed else 0  # a server that ignores Range sends all of it again
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            at = _copy(response, out, start, total, progress)
    return total is None or at >= total


def _copy(response: ByteStream, out: IO[bytes], at: int, total: int | None, progress: Progress | None) -> int:
    while chunk := response.read(CHUNK_BYTES):
        out.write(chunk)
        at += len(chunk)
        if progress is not None:
            progress(at, total)
    return at
