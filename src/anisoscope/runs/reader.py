"""Reading runs: one at a time or several, while they are written, after a crash, or from a read-only place."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from anisoscope.errors import CorruptRunError, NotARunError, RunNotFoundError, RunVersionError
from anisoscope.runs import files, schema
from anisoscope.runs.records import Curve, Failure, Probe, Record, site_order


class RunReader:
    """A run, read-only, also while its writer is at work or after it was killed. Every answer holds whole probes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._turn = threading.RLock()
        _look_for_run(self.folder)
        self._connection, self._frozen = self._open()
        try:
            with files.explained(self.folder, reading=True):
                where = str(self.folder / files.DATABASE)
                version = schema.read_version(self._connection, where)
                if version is None:
                    raise NotARunError(f"{where} is empty: its writer was stopped before it began; resume or remove it")
                if version < schema.VERSION:
                    raise RunVersionError(
                        f"{where} has schema version {version}, this anisoscope reads {schema.VERSION}; "
                        "open it once with RunWriter.create(folder, exist='resume') to bring it up to date"
                    )
                ((self.name,),) = self._connection.execute("SELECT run FROM store").fetchall()
        except BaseException:
            self._connection.close()
            raise

    def records(
        self,
        measure: str | None = None,
        site: str | None = None,
        slice: str | None = None,
        step: int | None = None,
        cell: str | None = None,
    ) -> list[Record]:
        """Records in the order they were committed, those that match every name given."""
        where, given = _filter(measure=measure, site=site, slice=slice, step=step, cell=cell)
        columns = ", ".join(f"records.{column}" for column in schema.ESTIMATE_COLUMNS)
        part_columns = columns.replace("records.", "parts.")
        source = "records JOIN probes ON probes.id = records.probe"
        order = "ORDER BY probes.id, records.id"
        with self.snapshot():
            rows = self._ask(
                f"SELECT records.id, cell, step, site, measure, slice, {columns} FROM {source} {where} {order}", given
            )
            parts: dict[int, list[tuple[Any, ...]]] = {}
            for record, *part in self._ask(
                f"SELECT parts.record, path, {part_columns} FROM {source} JOIN parts ON parts.record = records.id "
                f"{where} ORDER BY parts.id",
                given,
            ):
                parts.setdefault(record, []).append(tuple(part))
        found = []
        for record, cell_, step_, site_, measure_, slice_, *columns_ in rows:
            names = {"run": self.name, "cell": cell_, "step": step_, "site": site_, "measure": measure_}
            with self._sound():
                estimate = schema.rebuild(columns_, parts.get(record, []))
            found.append(Record(**names, slice=slice_, estimate=estimate))
        return found

    def failures(
        self,
        measure: str | None = None,
        site: str | None = None,
        slice: str | None = None,
        step: int | None = None,
        cell: str | None = None,
    ) -> list[Failure]:
        """Measurements that failed, those that match every name given."""
        names = ("cell", "step", "site", "measure", "slice", "error")
        where, given = _filter(measure=measure, site=site, slice=slice, step=step, cell=cell)
        rows = self._ask(
            f"SELECT {', '.join(names)} FROM failures JOIN probes ON probes.id = probe {where} "
            "ORDER BY probes.id, failures.id",
            given,
        )
        return [Failure(run=self.name, **dict(zip(names, row))) for row in rows]

    def curves(
        self,
        name: str | None = None,
        site: str | None = None,
        slice: str | None = None,
        step: int | None = None,
        cell: str | None = None,
    ) -> list[Curve]:
        """Curves, those that match every name given."""
        names = ("cell", "step", "site", "name", "slice", "x_label", "y_label")
        series = ("x", "y", "stderr", "notes")
        where, given = _filter(name=name, site=site, slice=slice, step=step, cell=cell)
        rows = self._ask(
            f"SELECT {', '.join((*names, *series))} FROM curves JOIN probes ON probes.id = probe {where} "
            "ORDER BY probes.id, curves.id",
            given,
        )
        found = []
        for row in rows:
            with self._sound():
                lists = [None if one is None else tuple(json.loads(one)) for one in row[len(names) :]]
                fields: dict[str, Any] = dict(zip((*names, *series), (*row[: len(names)], *lists)))
                found.append(Curve(run=self.name, **fields))
        return found

    def probes(self) -> list[Probe]:
        """Every committed probe, in the order of commits."""
        names = ("cell", "step", "began", "seconds", "records", "failures", "curves")
        counts = ", ".join(f"(SELECT count(*) FROM {table} WHERE probe = probes.id)" for table in names[4:])
        rows = self._ask(f"SELECT cell, step, began, seconds, {counts}, info FROM probes ORDER BY id")
        with self._sound():
            return [Probe(run=self.name, **dict(zip(names, row)), info=json.loads(row[-1])) for row in rows]

    def sites(self) -> list[str]:
        """Every site that was measured or failed: the embedding first, then by name and layer, the final norm last."""
        return sorted(self._distinct("site", "records", "failures", "curves"), key=site_order)

    def measures(self) -> list[str]:
        """Every measure that was measured or failed, sorted by name."""
        return sorted(self._distinct("measure", "records", "failures"))

    def slices(self) -> list[str]:
        """Every slice, sorted by name."""
        return sorted(self._distinct("slice", "records", "failures", "curves"))

    def cells(self) -> list[str]:
        """Every cell, in the order of their first commits."""
        return [cell for (cell,) in self._ask("SELECT cell FROM probes GROUP BY cell ORDER BY min(id)")]

    def steps(self) -> list[int]:
        """Every step that has a probe, in rising order."""
        return sorted(self._distinct("step", "probes"))

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the run; empty where it has none."""
        return files.read_mapping(self.folder / files.RECIPE)

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the run comes from; empty where nothing was recorded."""
        return files.read_mapping(self.folder / files.PROVENANCE)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """All answers inside the block are of one moment, however much the writer adds meanwhile."""
        with self._turn:
            if self._connection.in_transaction:
                yield
                return
            # A frozen file was opened where nobody could write. If a log is there now, somebody else can.
            if self._frozen and (self.folder / f"{files.DATABASE}-wal").exists():
                self._connection.close()
                self._connection, self._frozen = self._open()
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        """A read-only connection, and whether it takes the file for one that cannot change."""
        path = self.folder / files.DATABASE
        log = path.with_name(path.name + "-wal")
        with files.explained(self.folder, reading=True):
            try:
                return _connect(path, "mode=ro"), False
            except sqlite3.OperationalError:
                # SQLite cannot put its shared memory into a folder that cannot be written. Without a log it needs none.
                if os.access(self.folder, os.W_OK) or (log.exists() and log.stat().st_size):
                    raise
                return _connect(path, "immutable=1"), True

    def _ask(self, query: str, given: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with self.snapshot(), files.explained(self.folder, reading=True):
            return self._connection.execute(query, tuple(given)).fetchall()

    def _distinct(self, column: str, *tables: str) -> set[Any]:
        return {row[0] for row in self._ask(" UNION ".join(f"SELECT {column} FROM {table}" for table in tables))}

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """Rows that no writer can have written are damage."""
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptRunError(f"{self.folder} holds a row that makes no sense: {error}") from error


def open_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunReader]:
    """Open several runs. A folder that is no run but holds some stands for those, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        inner = _runs_inside(path)
        found += inner if inner and not (path / files.DATABASE).exists() else [path]
    readers: list[RunReader] = []
    try:
        for path in found:
            readers.append(RunReader(path))
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return readers


def _runs_inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((inner.parent for inner in folder.glob(f"*/{files.DATABASE}")), key=lambda one: site_order(one.name))


def _look_for_run(folder: Path) -> None:
    """Raise the error that fits if there is no run in ``folder``."""
    if not folder.exists():
        near = difflib.get_close_matches(folder.name, [one.name for one in _runs_inside(folder.parent)], n=1)
        hint = f"; did you mean {str(folder.with_name(near[0]))!r}?" if near else ""
        raise RunNotFoundError(f"there is no run at {folder}: no such folder{hint}")
    if not folder.is_dir():
        raise NotARunError(f"{folder} is a file; a run is a folder that holds {files.DATABASE}: give the folder")
    if not (folder / files.DATABASE).is_file():
        inner = ", ".join(one.name for one in _runs_inside(folder)[:5])
        hint = f"it holds the runs {inner}: give one of them" if inner else "give the folder of a run"
        raise NotARunError(f"{folder} is not a run, it holds no {files.DATABASE}; {hint}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=files.WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the file is opened by the first query
    except BaseException:
        connection.close()
        raise
    return connection


def _filter(**given: str | int | None) -> tuple[str, list[str | int]]:
    """The WHERE clause for the names that were given, and their values."""
    chosen = {column: value for column, value in given.items() if value is not None}
    clause = " AND ".join(f"{column} = ?" for column in chosen)
    return (f"WHERE {clause}" if clause else ""), list(chosen.values())
