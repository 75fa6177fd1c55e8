"""The files of a run beside its database: names, the writer's lock, recipe and provenance, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from anisoscope.errors import CorruptRunError, OptionError, RunBusyError, RunError, RunWriteError

DATABASE = "records.sqlite"
RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
LOCK = "writer.lock"
WAIT_SECONDS = 30.0  # for a reader that repairs the log after a crash; nobody else ever blocks the writer

_SAFE = "the probes committed so far are safe"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well; until then, and else, ``path`` stays as it is.

    It is on the disk before the name points to it, so that not even a loss of power leaves half a file.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.absolute().parent)


def _code(error: OSError | sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or errno.errorcode.get(getattr(error, "errno", None) or 0, "")


def _damaged(error: OSError | sqlite3.Error) -> bool:
    return _code(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "no such" in str(error)


def _not_written(error: OSError | sqlite3.Error, where: Path) -> RunError:
    code = _code(error)
    kind: type[RunError] = RunWriteError
    if code in ("SQLITE_FULL", "ENOSPC", "EDQUOT", "EFBIG"):
        why = f"the disk is full or a quota is reached; free some space and try again, {_SAFE}"
    elif code in ("EACCES", "EPERM", "SQLITE_PERM") or code.startswith("SQLITE_CANTOPEN"):
        why = "no permission to write there; choose a folder of your own"
    elif code == "EROFS" or code.startswith("SQLITE_READONLY"):
        why = "it is read-only; choose a folder that can be written"
    elif code in ("EEXIST", "ENOTDIR"):
        why = "a file is in the way of the folder; choose another path"
    elif code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        kind, why = RunBusyError, f"another process has held it for {WAIT_SECONDS:.0f} s; try again when it is done"
    elif _damaged(error):
        kind, why = CorruptRunError, f"the database is damaged ({error}); restore it from a copy"
    else:
        why = f"{error}; {_SAFE}"
    return kind(f"cannot write {where}: {why}")


def _not_read(error: OSError | sqlite3.Error, where: Path) -> RunError:
    code = _code(error)
    if _damaged(error):
        return CorruptRunError(f"cannot read {where}: the database is damaged ({error}); restore it from a copy")
    if code in ("EACCES", "EPERM") or code.startswith(("SQLITE_PERM", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        # After a crash the log must be folded in, which needs a folder that can be written.
        return RunError(f"cannot read {where}: no permission; copy the folder to a place of your own and read it there")
    return RunError(f"cannot read {where}: {error}")


@contextlib.contextmanager
def explained(where: Path, reading: bool = False) -> Iterator[None]:
    """Turn what the system or SQLite refuses inside the block into a named error of one line."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise (_not_read if reading else _not_written)(error, where) from error


def take_lock(folder: Path) -> int:
    """The descriptor that holds the lock. flock: the system lets go of it when the process dies, however it dies."""
    try:
        import fcntl  # here, not above: readers need it nowhere, and Windows does not have it
    except ImportError:
        raise RunWriteError("writing a run needs file locks (fcntl), which this system does not have") from None
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except BlockingIOError:
        owner = os.read(lock, 20).decode(errors="replace") or "unknown"
        os.close(lock)
        raise RunBusyError(
            f"{folder} is being written by another writer (process {owner}); a run has one at a time: "
            "wait for it, or choose another folder"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def as_yaml(recipe: Mapping[str, Any]) -> str:
    """A recipe as YAML, in its own order."""
    import yaml  # here, not above: it costs more to import than the rest of this file

    try:
        return yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(f"the recipe cannot be written as YAML: {error}; use plain values, lists and maps") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a recipe or a provenance file; empty where the run has none."""
    try:
        words = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            found = json.loads(words)
        else:
            import yaml

            try:
                found = yaml.safe_load(words)
            except yaml.YAMLError as error:
                raise ValueError(str(error).replace("\n", " ")) from None
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CorruptRunError(f"{path} cannot be read: {error}; restore it from a copy") from None
    if not isinstance(found, dict):
        raise CorruptRunError(f"{path} holds no mapping but {type(found).__name__}; restore it from a copy")
    return found


def write_recipe(folder: Path, recipe: str | None) -> None:
    """Write the recipe, or check that it is the one already there. The caller holds the lock."""
    path = folder / RECIPE
    if recipe is None:
        return
    if path.exists():
        import yaml

        # As text: it tells 1 from 1.0 and True, and NaN from nothing.
        same = [yaml.safe_dump(one, sort_keys=True) for one in (read_mapping(path), yaml.safe_load(recipe))]
        if same[0] != same[1]:
            raise RunError(
                f"{path} differs from the recipe given; resume with the recipe of the run, or choose another folder"
            )
        return
    with replacing(path) as file:
        file.write(recipe.encode())


def write_provenance(folder: Path, origin: dict[str, Any] | None) -> None:
    """Write where the run comes from, or add where it was resumed. The caller holds the lock."""
    if origin is None:
        return
    before = read_mapping(folder / PROVENANCE)
    if before:
        origin = before | {"resumed": [*before.get("resumed", []), origin]}
    with replacing(folder / PROVENANCE) as file:
        file.write(json.dumps(origin, indent=2, ensure_ascii=False).encode() + b"\n")


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
