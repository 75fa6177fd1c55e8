"""Named errors. Each says what came, why it cannot be used and which knob to turn. See docs/errors.md."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class AnisoscopeError(ValueError):
    """Base of every error raised for bad input. The command line prints it as one line and exits with 2."""


class ShapeError(AnisoscopeError):
    """The array, mask or chunk does not have the shape it needs."""


class EmptyInputError(AnisoscopeError):
    """No row is left to measure."""


class NonFiniteError(AnisoscopeError):
    """Some rows hold NaN or infinity; the message says which."""


class ZeroRowError(AnisoscopeError):
    """Some rows have length zero where a direction is needed; the message says which."""


class TooFewRowsError(AnisoscopeError):
    """There are rows, but fewer than the quantity needs."""


class DegenerateError(AnisoscopeError):
    """The data have no spread where the quantity needs some (constant rows, no triple of tokens)."""


class DuplicateRowsError(AnisoscopeError):
    """Exact copies of rows, met with duplicates="error"; the message says which."""


class OptionError(AnisoscopeError):
    """An option has a value that it cannot take."""


class UnknownNameError(AnisoscopeError, KeyError):
    """A name that nobody registered; the message suggests the nearest one."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


def name_rows(rows: Sequence[int], limit: int = 5) -> str:
    """Render row numbers for a message: ``rows 3, 17 and 40`` or ``rows 3, 17, 40, 41, 52 and 95 more``."""
    if len(rows) == 1:
        return f"row {rows[0]:,}"
    shown = [f"{row:,}" for row in rows[:limit]]
    if len(rows) > limit:
        return f"rows {', '.join(shown)} and {len(rows) - limit:,} more"
    return f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not in ``known``, with the nearest known one where there is one."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return UnknownNameError(f"unknown {kind} {name!r}; {hint}")


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``known``, else raise with a suggestion."""
    known = tuple(known)
    if name not in known:
        raise unknown_name(kind, name, known)
    return name


class RunError(AnisoscopeError):
    """A run folder cannot be used as asked."""


class RunNotFoundError(RunError):
    """There is nothing at the path of the run."""


class NotARunError(RunError):
    """There is something at the path, but not a run."""


class RunVersionError(RunError):
    """The run has another schema version than this anisoscope reads."""


class CorruptRunError(RunError):
    """The files of the run are damaged."""


class RunBusyError(RunError):
    """Another writer holds the run."""


class RunWriteError(RunError):
    """The file system refused: no permission, read-only, disk full."""


class ModelError(AnisoscopeError):
    """A model cannot be loaded or has no sites to read; the message says which file or module, and why."""


class SiteError(AnisoscopeError):
    """A site gave something that is not a batch of hidden states; the message says what came."""


class SiteSilentError(SiteError):
    """A site did not fire in the forward pass, or fired another number of times than it should."""


class SourceError(AnisoscopeError):
    """A text source cannot be read: missing, empty, not UTF-8, damaged, or of a kind that needs another package."""


class ChecksumError(SourceError):
    """A file is not the one it should be; the message names both checksums."""


class TooFewTokensError(AnisoscopeError):
    """There is text, but not enough for one batch."""
