"""Fetching: a real server on this machine that cuts connections, ignores ranges or sends something else."""

import hashlib
import io
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from anisoscope.errors import ChecksumError, SourceError
from anisoscope.text import fetch
from anisoscope.text.fetch import ENWIK8, Expected, download, fetch_enwik8

CONTENT = np.random.default_rng(0).bytes(1_500_000)
SMALL = Expected("enwik8", len(CONTENT), hashlib.md5(CONTENT).hexdigest(), hashlib.sha1(CONTENT).hexdigest())


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("UP", ".."), data)
    return out.getvalue()


ZIP = zipped(enwik8=CONTENT)


class Server(ThreadingHTTPServer):
    """Serves ``data``; cuts the connection after each number of bytes in ``cuts``, one a request, then no more."""

    daemon_threads = True

    def __init__(self, data, *, ranges=True, cuts=(), status=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.ranges, self.cuts, self.status = data, ranges, list(cuts), status
        self.asked = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/enwik8.zip"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, data = self.server, self.server.data
        asked = self.headers.get("Range")
        server.asked.append(asked)
        start = int(re.match(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if server.status:
            self.send_error(server.status)
            return
        if asked and server.ranges and start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = start + server.cuts.pop(0) if server.cuts else len(data)
        self.wfile.write(data[start:end])


def test_fetch(tmp_path):
    seen = []
    with Server(ZIP) as server:
        found = fetch_enwik8(tmp_path / "new", url=server.url, expected=SMALL, progress=lambda *a: seen.append(a))
        assert found.path.read_bytes() == CONTENT and found.notes == ()
        assert seen[-1] == (len(ZIP), len(ZIP)) and len(seen) > 10
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["enwik8"]
        again = fetch_enwik8(tmp_path / "new", url=server.url, expected=SMALL)
        assert again.path == found.path and len(server.asked) == 1, "a good copy is not fetched again"


def test_connection_cut_twice_goes_on_where_it_stopped(tmp_path):
    with Server(ZIP, cuts=[400_000, 300_000]) as server:
        assert fetch_enwik8(tmp_path, url=server.url, expected=SMALL).path.read_bytes() == CONTENT
        assert server.asked == [None, "bytes=400000-", "bytes=700000-"]


def test_a_part_of_an_earlier_run_is_used(tmp_path):
    (tmp_path / "enwik8.zip.part").write_bytes(ZIP[:1_000_000])
    with Server(ZIP) as server:
        assert fetch_enwik8(tmp_path, url=server.url, expected=SMALL).path.read_bytes() == CONTENT
        assert server.asked == ["bytes=1000000-"]


def test_server_without_ranges(tmp_path):
    """It sends everything again; appending that to the part would spoil the file."""
    (tmp_path / "enwik8.zip.part").write_bytes(ZIP[:1_000_000])
    with Server(ZIP, ranges=False, cuts=[1_200_000]) as server:
        assert fetch_enwik8(tmp_path, url=server.url, expected=SMALL).path.read_bytes() == CONTENT
        assert server.asked == ["bytes=1000000-", "bytes=1200000-"]


@pytest.mark.parametrize(("part", "requests"), [(ZIP, 1), (ZIP + b"junk", 2)])
def test_part_that_is_whole_or_too_long(tmp_path, part, requests):
    (tmp_path / "enwik8.zip.part").write_bytes(part)
    with Server(ZIP) as server:
        assert download(server.url, tmp_path / "enwik8.zip").read_bytes() == ZIP
        assert len(server.asked) == requests


def test_a_server_that_never_sends_a_byte_more(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "RETRIES", 2)
    with Server(ZIP, cuts=[100_000, 0, 0, 0]) as server, pytest.raises(SourceError, match=r"100,000 bytes are kept"):
        download(server.url, tmp_path / "enwik8.zip")
    assert (tmp_path / "enwik8.zip.part").stat().st_size == 100_000


def test_no_server_and_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "RETRIES", 1)
    with Server(ZIP, status=404) as server, pytest.raises(SourceError, match=r"answers 404 .*from_file"):
        download(server.url, tmp_path / "x")
    with pytest.raises(SourceError, match=r"cannot be fetched .*from_file"):
        download(server.url, tmp_path / "x")


def test_wrong_content_names_both_checksums_and_leaves_nothing(tmp_path):
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    with Server(zipped(enwik8=wrong)) as server, pytest.raises(ChecksumError) as caught:
        fetch_enwik8(tmp_path, url=server.url, expected=SMALL)
    assert hashlib.md5(wrong).hexdigest() in str(caught.value) and SMALL.md5 in str(caught.value)
    assert not (tmp_path / "enwik8").exists() and not (tmp_path / "enwik8.unpacked").exists()


@pytest.mark.parametrize("packed", [True, False])
def test_from_file(tmp_path, packed):
    (tmp_path / "copy").write_bytes(ZIP if packed else CONTENT)
    found = fetch_enwik8(tmp_path / "to", from_file=tmp_path / "copy", expected=SMALL)
    assert found.path.read_bytes() == CONTENT and (tmp_path / "copy").exists()


def test_prefix_only_when_allowed(tmp_path):
    (tmp_path / "copy").write_bytes(CONTENT[:1000])
    with pytest.raises(ChecksumError, match=r"has 1,000 bytes, enwik8 has 1,500,000; allow_prefix=True"):
        fetch_enwik8(tmp_path / "to", from_file=tmp_path / "copy", expected=SMALL)
    found = fetch_enwik8(tmp_path / "to", from_file=tmp_path / "copy", expected=SMALL, allow_prefix=True)
    assert found.path.read_bytes() == CONTENT[:1000]
    assert "1,000 of 1,500,000 bytes" in found.notes[0]
    (tmp_path / "copy").write_bytes(b"")
    with pytest.raises(ChecksumError):
        fetch_enwik8(tmp_path / "to", from_file=tmp_path / "copy", expected=SMALL, allow_prefix=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zipped(UP__enwik8=CONTENT), "not enwik8"),  # a name that climbs out of the folder
        (zipped(other=b"x"), "holds other, not enwik8"),
        (
            zipped(enwik8=CONTENT + b"x" * 10_000_000),
            "has 1,500,001 bytes or more",
        ),  # more than it may hold: unpacking stops
        (ZIP[: len(ZIP) // 2] + bytes(1000) + ZIP[len(ZIP) // 2 + 1000 :], "damaged zip"),
    ],
)
def test_hostile_zip(tmp_path, data, reason):
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(SourceError, match=reason):
        fetch_enwik8(tmp_path / "to", from_file=tmp_path / "x.zip", expected=SMALL)
    assert list((tmp_path / "to").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to", "x.zip"]


def test_missing_file_and_the_real_numbers(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        fetch_enwik8(tmp_path, from_file=tmp_path / "none")
    assert (
        Expected("enwik8", 100_000_000, "a1fa5ffddb56f4953e226637dabbb36a", "57b8363b814821dc9d47aa4d41f58733519076b2")
        == ENWIK8
    )
