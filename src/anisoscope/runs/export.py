"""Runs as one long table, CSV or Parquet: a row for each record, for each of its parts, and for each failure."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from anisoscope.errors import OptionError, RunError, choose, unknown_name
from anisoscope.estimate import Estimate
from anisoscope.runs import files, schema
from anisoscope.runs.records import layer_of
from anisoscope.runs.store import RunReader, open_runs

TABLE_VERSION = 1  # of the columns below; it travels in the metadata of Parquet files
TEXT, WHOLE, NUMBER, TEXTS = "text", "whole", "number", "texts"
COLUMNS = {
    "run": TEXT,
    "cell": TEXT,
    "step": WHOLE,
    "site": TEXT,
    "layer": WHOLE,
    "measure": TEXT,
    "slice": TEXT,
    "value": NUMBER,
    "stderr": NUMBER,
    "lower": NUMBER,
    "upper": NUMBER,
    "dof": NUMBER,
    "over": TEXT,
    "n": WHOLE,
    "method": TEXT,
    "notes": TEXTS,
    "error": TEXT,
}
SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}
BATCH_ROWS = 65536

PathLike = str | os.PathLike[str]


def export(
    run_folders: PathLike | Iterable[PathLike] | Mapping[str, PathLike],
    target: PathLike,
    format: str | None = None,
) -> Path:
    """Write the runs as one long table to ``target`` and return its path; the suffix says which format, unless given.

    One row for each record; ``lower`` and ``upper`` bound its 95 % interval. A part of an estimate has a row of its
    own, with "measure/part" as its measure. A failure has a row with its error and without a value. A mapping
    {label: folder} renames runs; two runs of one name are refused. The target appears whole or not at all.
    """
    target = Path(target)
    format = _format(target, format)
    labels: list[str] | None = None
    if isinstance(run_folders, Mapping):
        labels, run_folders = [str(label) for label in run_folders], list(run_folders.values())
    elif isinstance(run_folders, str | os.PathLike):
        run_folders = [run_folders]
    # With labels each folder must be a run: one label cannot stand for a folder of several.
    with contextlib.ExitStack() as stack:
        readers = [RunReader(one) for one in run_folders] if labels else open_runs(run_folders)
        for reader in readers:
            stack.enter_context(reader)
            stack.enter_context(reader.snapshot())
        named = _by_name(readers, labels)
        with files.explained(target), contextlib.ExitStack() as writing:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = writing.enter_context(files.replacing(target))
            (_write_csv if format == "csv" else _write_parquet)(file, named)
    return target


def rows(reader: RunReader, name: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one run as dictionaries over COLUMNS, probe after probe, so that a run need not fit in memory."""
    name = reader.name if name is None else name
    with reader.snapshot():
        for probe in reader.probes():
            head = {"run": name, "cell": probe.cell, "step": probe.step}
            for record in reader.records(step=probe.step, cell=probe.cell):
                place = head | {"site": record.site, "layer": layer_of(record.site), "slice": record.slice}
                yield _row(place, record.measure, record.estimate)
                for path, part in _parts(record.estimate):
                    yield _row(place, f"{record.measure}/{path}", part)
            for failure in reader.failures(step=probe.step, cell=probe.cell):
                place = head | {"site": failure.site, "layer": layer_of(failure.site), "slice": failure.slice}
                blank = dict.fromkeys(COLUMNS) | {"notes": []}
                yield blank | place | {"measure": failure.measure, "error": failure.error}


def _format(target: Path, format: str | None) -> str:
    if format is not None:
        return choose("export format", format, ("csv", "parquet"))
    if target.suffix.lower() not in SUFFIXES:
        raise unknown_name("suffix of an export", target.suffix or target.name, SUFFIXES)
    return SUFFIXES[target.suffix.lower()]


def _by_name(readers: list[RunReader], labels: list[str] | None) -> dict[str, RunReader]:
    """Readers by the name they get in the table."""
    if not readers:
        raise OptionError("no run to export; give the folder of at least one")
    named: dict[str, RunReader] = {}
    for name, reader in zip(labels or [reader.name for reader in readers], readers):
        if name in named:
            raise RunError(
                f"two runs are called {name!r} ({named[name].folder}, {reader.folder}) and would be one in the table; "
                "name them: export({'label': folder, ...}, target)"
            )
        named[name] = reader
    return named


def _parts(estimate: Estimate) -> Iterator[tuple[str, Estimate]]:
    for name, part in estimate.parts.items():
        path = schema.part_name(name)
        yield path, part
        for below, inner in _parts(part):
            yield f"{path}/{below}", inner


def _row(place: Mapping[str, Any], measure: str, e: Estimate) -> dict[str, Any]:
    reach = None if e.stderr is None else _reach(e.dof) * e.stderr
    lower, upper = (None, None) if reach is None else (e.value - reach, e.value + reach)
    numbers = {"value": e.value, "stderr": e.stderr, "lower": lower, "upper": upper, "dof": e.dof, "over": e.over}
    return {**place, "measure": measure, **numbers, "n": e.n, "method": e.method, "notes": list(e.notes), "error": None}


@functools.lru_cache(maxsize=4096)
def _reach(dof: float | None) -> float:
    """Half the width of the 95 % interval, in standard errors. Kept, because the quantile costs more than the row."""
    unit = Estimate(value=0.0, stderr=1.0, n=1, method="quantile", over="itself", dof=dof).interval()
    assert unit is not None
    return unit[1]


def _write_csv(file: BinaryIO, named: Mapping[str, RunReader]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)  # lines end as RFC 4180 has it; with a bare \n a name that holds \r would break its row
    writer.writerow(COLUMNS)
    for name, reader in named.items():
        for row in rows(reader, name):
            writer.writerow([_cell(row[column], kind) for column, kind in COLUMNS.items()])
    text.flush()
    text.detach()  # the file is closed by whoever opened it


def _cell(value: Any, kind: str) -> str | float | int | None:
    """A value for CSV. Text that a spreadsheet would run as a formula gets a quote before it.

    Names of runs and sites come from whoever made them, and a table is made to be passed on. Text that begins with a
    quote gets one more, so that taking one leading quote away always gives the text back.
    """
    if kind == TEXTS:
        value = "; ".join(value)
    if isinstance(value, str):
        first = value.lstrip(" ")[:1]
        return f"'{value}" if first and first in "=+-@\t\r\n'＝＋－＠" else value
    return value


def _write_parquet(file: BinaryIO, named: Mapping[str, RunReader]) -> None:
    try:
        # By name: pyarrow has no types, and is no part of the core.
        pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise OptionError(
            "Parquet needs pyarrow, which is not installed: pip install 'anisoscope[report]', or export to .csv"
        ) from None

    types = {TEXT: pa.string(), WHOLE: pa.int64(), NUMBER: pa.float64(), TEXTS: pa.list_(pa.string())}
    about = {
        "table_version": TABLE_VERSION,
        "schema_version": schema.VERSION,
        "provenance": {name: reader.provenance for name, reader in named.items()},
        "recipe": {name: reader.recipe for name, reader in named.items()},
    }
    columns = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    columns = columns.with_metadata({"anisoscope": json.dumps(about, ensure_ascii=False, default=str)})
    with pq.ParquetWriter(file, columns, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for name, reader in named.items():
            for row in rows(reader, name):
                batch.append(row)
                if len(batch) == BATCH_ROWS:
                    writer.write_table(pa.Table.from_pylist(batch, schema=columns))
                    batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=columns))
