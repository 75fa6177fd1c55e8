"""A probe while it is under way: what it measured, checked and turned into rows, ready for one transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from anisoscope.errors import OptionError
from anisoscope.estimate import Estimate
from anisoscope.runs import schema
from anisoscope.runs.records import Curve, Record

COLUMNS = (("records", 11), ("parts", 9))  # beside the number of a row itself


class ProbeWriter:
    """Collects what one probe measured. Values are checked as they come; nothing touches the disk before the end."""

    def __init__(self, run: str, step: int, cell: str, info: Mapping[str, Any]) -> None:
        self.run = run
        self.step = schema.whole("step", step)
        self.cell = schema.text("cell", cell)
        self._info = schema.to_json("info of a probe", dict(info))
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._clock = time.perf_counter()
        self._records: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        self._failures: list[tuple[Any, ...]] = []
        self._curves: list[tuple[Any, ...]] = []
        self._taken: set[tuple[str, str, str, str]] = set()
        self._open = True

    def add(self, record: Record) -> None:
        """Add a record of this run, cell and step."""
        self._belongs(record.run, record.step, record.cell)
        self.add_estimate(record.estimate, site=record.site, measure=record.measure, slice=record.slice)

    def add_estimate(self, estimate: Estimate, *, site: str, measure: str, slice: str) -> None:
        """Add an estimate; the run, cell and step are those of the probe."""
        key = self._claim("result", site, measure, slice)
        self._records.append(((*key, *schema.estimate_row(estimate)), schema.part_rows(estimate.parts)))

    def fail(self, *, site: str, measure: str, slice: str, error: BaseException | str) -> None:
        """Record that a measurement was due and failed."""
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        # Whatever the error says must not make a second error of it.
        words = words.encode("utf-8", "backslashreplace").decode()
        self._failures.append((*self._claim("result", site, measure, slice), words))

    def add_curve(self, curve: Curve) -> None:
        """Add a curve of this run, cell and step."""
        self._belongs(curve.run, curve.step, curve.cell)
        stderr = None if curve.stderr is None else schema.number_json(curve.stderr)
        labels = (schema.text("x label", curve.x_label), schema.text("y label", curve.y_label))
        series = (schema.number_json(curve.x), schema.number_json(curve.y), stderr)
        key = self._claim("curve", curve.site, curve.name, curve.slice)
        self._curves.append((*key, *series, *labels, schema.to_json("notes", list(curve.notes))))

    def _belongs(self, run: str, step: int, cell: str) -> None:
        came, want = (run, cell, step), (self.run, self.cell, self.step)
        if came != want:
            raise OptionError(f"(run, cell, step) = {came} does not belong to the probe {want} it was added to")

    def _claim(self, kind: str, site: str, name: str, slice: str) -> tuple[str, str, str]:
        if not self._open:
            raise OptionError(f"the probe of step {self.step} is over; open a new one with writer.probe(step=...)")
        key = (schema.text("site", site), schema.text("measure", name), schema.text("slice", slice))
        if (kind, *key) in self._taken:
            raise OptionError(f"{name!r} at {site!r} over {slice!r} was added twice to the probe of step {self.step}")
        self._taken.add((kind, *key))
        return key

    def end(self) -> None:
        """Take nothing more."""
        self._open = False

    def write(self, connection: sqlite3.Connection) -> None:
        """Insert everything; the caller holds the transaction."""
        seconds = time.perf_counter() - self._clock
        head = (self.cell, self.step, self._began, seconds, self._info)
        probe = connection.execute(f"INSERT INTO probes VALUES (NULL, {_marks(5)})", head).lastrowid
        insert, insert_part = (f"INSERT INTO {name} VALUES (NULL, {_marks(n)})" for name, n in COLUMNS)
        for row, parts in self._records:
            record = connection.execute(insert, (probe, *row)).lastrowid
            if parts:
                connection.executemany(insert_part, [(record, *part) for part in parts])
        for table, rows in (("failures", self._failures), ("curves", self._curves)):
            for row in rows:
                connection.execute(f"INSERT INTO {table} VALUES (NULL, {_marks(1 + len(row))})", (probe, *row))


def _marks(count: int) -> str:
    return ", ".join("?" * count)
