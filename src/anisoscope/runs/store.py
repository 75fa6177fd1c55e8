"""The run store: a folder with one database that one process writes, probe by probe, and anyone reads meanwhile.

Everything of a probe is committed in one transaction or not at all. See docs/runs.md for the layout and the promises.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anisoscope.errors import RunError, RunWriteError, choose
from anisoscope.runs import files, schema
from anisoscope.runs.probe import ProbeWriter
from anisoscope.runs.reader import RunReader, open_runs

__all__ = ["ProbeWriter", "RunReader", "RunWriter", "open_runs"]


class RunWriter:
    """The one writer of a run. Make it with ``RunWriter.create`` and use it as a context manager.

    Threads may share it; processes may not: a forked child is refused, and does not hold the lock either.
    """

    def __init__(self, folder: Path, name: str, connection: sqlite3.Connection, lock: int) -> None:
        self.folder = folder
        self.name = name
        self._connection: sqlite3.Connection | None = connection
        self._lock = lock
        self._process = os.getpid()
        self._turn = threading.Lock()
        _forget_in_children()
        _WRITERS.add(self)

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        exist: str = "error",
    ) -> RunWriter:
        """Start a run in ``folder``, or go on with the one that is there if ``exist`` is "resume".

        ``name`` is the folder's own unless given. A resumed run keeps its recipe and its name, so others are refused;
        its provenance is added to the one on disk under "resumed".
        """
        choose("value of exist", exist, ("error", "resume"))
        folder = Path(folder)
        wanted = schema.text("name of the run", name or folder.absolute().name)
        recipe_text = None if recipe is None else files.as_yaml(recipe)
        origin = None if provenance is None else json.loads(schema.to_json("provenance", dict(provenance)))
        with files.explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = files.take_lock(folder)
        connection = None
        try:
            with files.explained(folder):
                connection, stored = _open_database(folder, wanted, exist)
                if name is not None and stored != name:
                    raise RunError(f"{folder} holds the run {stored!r}, not {name!r}; leave the name out to resume it")
                files.write_recipe(folder, recipe_text)
                files.write_provenance(folder, origin)
                files.sync_folder(folder.absolute().parent)
            return cls(folder, stored, connection, lock)
        except BaseException:
            if connection is not None:
                connection.close()
            os.close(lock)
            raise

    @contextlib.contextmanager
    def probe(self, *, step: int, cell: str = "", info: Mapping[str, Any] | None = None) -> Iterator[ProbeWriter]:
        """Collect one probe; it is committed as a whole when the block ends, and not at all if the block raises."""
        probe = ProbeWriter(self.name, step, cell, info or {})
        with self._use() as connection:
            query = "SELECT 1 FROM probes WHERE cell = ? AND step = ?"
            if connection.execute(query, (probe.cell, probe.step)).fetchone():
                raise RunError(
                    f"{self.folder} already holds step {step} of cell {cell!r}; skip what writer.done() names"
                )
        try:
            yield probe
        finally:
            probe.end()
        with self._use() as connection, _transaction(connection):
            probe.write(connection)

    def done(self) -> set[tuple[str, int]]:
        """The (cell, step) of every committed probe."""
        with self._use() as connection:
            return set(connection.execute("SELECT cell, step FROM probes"))

    def close(self) -> None:
        """Fold the log into the database and let the next writer in. Committed probes are safe without it."""
        connection, self._connection = self._connection, None
        if connection is None or os.getpid() != self._process:
            return
        _WRITERS.discard(self)
        with self._turn:
            # Only tidiness: a reader at work may hold the log, and then the next writer folds it in.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
            os.close(self._lock)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A writer dropped without close, as in a notebook, must not keep the run locked for the life of the process.
        if getattr(self, "_connection", None) is not None:
            self.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._process:
            raise RunError(f"the writer of {self.folder} belongs to the process that opened it, not to a forked child")
        if self._connection is None:
            raise RunError(f"the writer of {self.folder} is closed; open it again with exist='resume'")
        with self._turn, files.explained(self.folder):
            yield self._connection


_WRITERS: weakref.WeakSet[RunWriter] = weakref.WeakSet()
_LEFT_OPEN: list[sqlite3.Connection | None] = []


@functools.cache
def _forget_in_children() -> None:
    """From now on a forked child drops the locks it inherits, so that it cannot outlive its parent as a writer."""

    def forget() -> None:
        for writer in list(_WRITERS):
            os.close(writer._lock)  # the parent's own descriptor keeps the lock
            # Closing an inherited connection would touch the parent's log: it is kept alive, unused, to the end.
            _LEFT_OPEN.append(writer._connection)
            writer._connection = None
        _WRITERS.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has rolled back by itself after some errors, such as a full disk
            connection.execute("ROLLBACK")
        raise


def _open_database(folder: Path, name: str, exist: str) -> tuple[sqlite3.Connection, str]:
    """The database, new or resumed, and the name of the run in it. The caller holds the lock."""
    path = folder / files.DATABASE
    connection = sqlite3.connect(path, timeout=files.WAIT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        version = schema.read_version(connection, str(path))
        if version is not None and exist == "error":
            (probes,) = connection.execute("SELECT count(*) FROM probes").fetchone()
            raise RunError(
                f"{folder} already holds a run ({probes} probes); resume it with exist='resume', or choose another"
            )
        if version is None:
            for file in (files.RECIPE, files.PROVENANCE):
                if (folder / file).exists():
                    raise RunError(
                        f"{folder} holds a {file} but no run; it would be overwritten: choose another folder"
                    )
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise RunWriteError(f"{folder} is on a file system without shared memory; choose a folder on a local disk")
        # FULL: each commit is on the disk before it returns, so a loss of power costs no probe either. NORMAL would
        # hold against a killed process only. A probe takes far longer than the one sync that this adds.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS keeps a plain fsync in the drive's cache
        if version != schema.VERSION:
            with _transaction(connection):
                if version is None:
                    schema.create(connection, name, datetime.now(UTC).isoformat(timespec="seconds"))
                else:
                    schema.migrate(connection, version)
        (stored,) = connection.execute("SELECT run FROM store").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection, stored
