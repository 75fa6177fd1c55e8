"""The database of a run: its tables, its version, and how values become rows and come back."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anisoscope.errors import CorruptRunError, NotARunError, OptionError, RunVersionError
from anisoscope.estimate import Estimate

VERSION = 1

# How to take a database from the version of the key to the next one. Each runs inside the writer's one transaction.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}

# Columns of one Estimate, the same in records and in parts.
ESTIMATE_COLUMNS = ("value", "stderr", "dof", '"over"', "n", "method", "notes")
_ESTIMATE_TYPES = (
    'value REAL NOT NULL, stderr REAL, dof REAL, "over" TEXT, n INTEGER NOT NULL, method TEXT NOT NULL, '
    "notes TEXT NOT NULL"
)

# `store` keeps its name and its columns in every version: it is how a reader learns which one it has before it.
# Parts have a table of their own: a plain SELECT over records then never counts a companion as a result, and a part is
# still a row of plain columns, not a JSON document. The view `results` lays all three out as one long table.
TABLES = (
    "CREATE TABLE store (version INTEGER NOT NULL, run TEXT NOT NULL, created TEXT NOT NULL)",
    "CREATE TABLE probes (id INTEGER PRIMARY KEY, cell TEXT NOT NULL, step INTEGER NOT NULL, began TEXT NOT NULL, "
    "seconds REAL NOT NULL, info TEXT NOT NULL, UNIQUE (cell, step))",
    "CREATE TABLE records (id INTEGER PRIMARY KEY, probe INTEGER NOT NULL REFERENCES probes, site TEXT NOT NULL, "
    f"measure TEXT NOT NULL, slice TEXT NOT NULL, {_ESTIMATE_TYPES}, UNIQUE (probe, site, measure, slice))",
    "CREATE TABLE parts (id INTEGER PRIMARY KEY, record INTEGER NOT NULL REFERENCES records, path TEXT NOT NULL, "
    f"{_ESTIMATE_TYPES}, UNIQUE (record, path))",
    "CREATE TABLE failures (id INTEGER PRIMARY KEY, probe INTEGER NOT NULL REFERENCES probes, site TEXT NOT NULL, "
    "measure TEXT NOT NULL, slice TEXT NOT NULL, error TEXT NOT NULL, UNIQUE (probe, site, measure, slice))",
    "CREATE TABLE curves (id INTEGER PRIMARY KEY, probe INTEGER NOT NULL REFERENCES probes, site TEXT NOT NULL, "
    "name TEXT NOT NULL, slice TEXT NOT NULL, x TEXT NOT NULL, y TEXT NOT NULL, stderr TEXT, x_label TEXT NOT NULL, "
    "y_label TEXT NOT NULL, notes TEXT NOT NULL, UNIQUE (probe, site, name, slice))",
    "CREATE INDEX records_by_measure ON records (measure, site)",
    """CREATE VIEW results AS
    SELECT run, cell, step, site, measure, slice, value, stderr, dof, "over", n, method, notes, NULL AS error
    FROM records JOIN probes ON probes.id = probe JOIN store
    UNION ALL
    SELECT run, cell, step, site, measure || '/' || path, slice, parts.value, parts.stderr, parts.dof, parts."over",
           parts.n, parts.method, parts.notes, NULL
    FROM parts JOIN records ON records.id = record JOIN probes ON probes.id = probe JOIN store
    UNION ALL
    SELECT run, cell, step, site, measure, slice, NULL, NULL, NULL, NULL, NULL, NULL, '[]', error
    FROM failures JOIN probes ON probes.id = probe JOIN store""",
)


def read_version(connection: sqlite3.Connection, where: str) -> int | None:
    """The schema version of an open database; None for an empty one; an error for one that is not of a run."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    columns = {row[1] for row in connection.execute("PRAGMA table_info(store)")}
    if not {"version", "run"} <= columns:
        raise NotARunError(f"{where} is a database, but not of a run: it has no table 'store'; choose another folder")
    versions = [version for (version,) in connection.execute("SELECT version FROM store")]
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < 1:
        raise CorruptRunError(f"{where} does not say its schema version (got {versions}); restore it from a copy")
    if versions[0] > VERSION:
        raise RunVersionError(
            f"{where} has schema version {versions[0]}, this anisoscope knows versions up to {VERSION}; "
            "upgrade anisoscope to read it"
        )
    return versions[0]


def create(connection: sqlite3.Connection, run: str, created: str) -> None:
    """Make all tables. The caller holds the transaction."""
    for statement in TABLES:
        connection.execute(statement)
    connection.execute("INSERT INTO store VALUES (?, ?, ?)", (VERSION, run, created))


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring an older database to this version, one step at a time. The caller holds the transaction."""
    for old in range(version, VERSION):
        MIGRATIONS[old](connection)
    connection.execute("UPDATE store SET version = ?", (VERSION,))


def text(kind: str, value: str) -> str:
    """``value`` if it can be stored as UTF-8, else a named error."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OptionError(f"the {kind} {value!r} is not valid Unicode and cannot be stored; rename it") from None
    return value


def to_json(kind: str, value: Any) -> str:
    """JSON on one line; floats as the shortest digits that give the same float back."""
    try:
        return text(kind, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"the {kind} cannot be stored as JSON: {error}; use plain finite values") from None


def number_json(numbers: Iterable[float]) -> str:
    """A series of floats as a JSON list."""
    return to_json("curve", [float(number) for number in numbers])


def whole(kind: str, number: int) -> int:
    """``number`` as an integer that SQLite can hold."""
    # int(): NumPy scalars offer a buffer, which sqlite3 would store as a blob without a word.
    number = int(number)
    if not -(2**63) <= number < 2**63:
        raise OptionError(f"the {kind} {number} does not fit into 64 bits")
    return number


def estimate_row(estimate: Estimate) -> tuple[Any, ...]:
    """The columns of one Estimate, without its parts."""
    if estimate.dof is not None and math.isnan(estimate.dof):
        raise OptionError(f"the degrees of freedom of {estimate.method!r} are NaN; give a number, or None")
    return (
        float(estimate.value),
        None if estimate.stderr is None else float(estimate.stderr),
        None if estimate.dof is None else float(estimate.dof),
        None if estimate.over is None else text("word on what the error bar is over", estimate.over),
        whole("count n", estimate.n),
        text("method", estimate.method),
        to_json("notes", list(estimate.notes)),
    )


def part_name(name: str) -> str:
    """The name of a part as it stands in a path: "/" is written "~1" and "~" is written "~0", as in JSON pointers."""
    return text("part", name).replace("~", "~0").replace("/", "~1")


def part_rows(parts: Mapping[str, Estimate], above: str = "") -> list[tuple[Any, ...]]:
    """Rows (path, columns…) of all parts, each before its own parts; a path joins the names with "/"."""
    rows: list[tuple[Any, ...]] = []
    for name, part in parts.items():
        path = above + part_name(name)
        rows.append((path, *estimate_row(part)))
        rows += part_rows(part.parts, path + "/")
    return rows


_Children = dict[tuple[str, ...], dict[tuple[str, ...], Sequence[Any]]]


def rebuild(row: Sequence[Any], parts: Sequence[Sequence[Any]]) -> Estimate:
    """The Estimate that ``estimate_row`` and ``part_rows`` took apart."""
    children: _Children = {}
    for path, *columns in parts:
        names = tuple(name.replace("~1", "/").replace("~0", "~") for name in path.split("/"))
        children.setdefault(names[:-1], {})[names] = columns
    return _build(row, (), children)


def _build(columns: Sequence[Any], at: tuple[str, ...], children: _Children) -> Estimate:
    value, stderr, dof, over, n, method, notes = columns
    fields: dict[str, Any] = {"value": value, "stderr": stderr, "dof": dof, "over": over, "n": n, "method": method}
    below = {names[-1]: _build(inner, names, children) for names, inner in children.get(at, {}).items()}
    if below:
        fields["parts"] = below
    return Estimate(**fields, notes=tuple(json.loads(notes)))
