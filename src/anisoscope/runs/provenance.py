"""Where a run comes from: versions, machine, code, command, seeds; fit to pass on: no names, no private paths."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from anisoscope.errors import OptionError

PACKAGES = (
    "anisoscope",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "datasets",
    "accelerate",
    "gguf",
    "triton",
)
GIT_SECONDS = 5.0

_SECRET_OPTION = re.compile(r"(?:^|[-_])(?:token|secret|password|passwd|key)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_)\w{16,}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Paths that lead out of the working directory, upwards ones too: ../../home/name/x says as much as /home/name/x.
_PATH = re.compile(r"/|~(?=/|[A-Za-z_]|$)|\.\.(?=[\\/]|$)|[A-Za-z]:[\\/]|\\\\")
_HOMES = ("home", "Users", "users")
_HIDDEN = "[hidden]"


def provenance(
    *,
    seeds: Sequence[int] = (),
    device: str = "cpu",
    corpus: Any = None,
    model: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What it takes to say where numbers come from, as plain JSON values.

    ``corpus`` and ``model`` are fingerprints, names or small mappings; ``extra`` is stored beside them. Absolute paths
    are shortened to the part below the working directory, or to their last name; values of options that look like
    secrets are hidden. Versions are read from the installed packages, which are not imported.
    """
    found = {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "versions": versions(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": git_state(Path(_working_directory())),
        "seeds": [int(seed) for seed in seeds],
        "device": str(device),
        "corpus": corpus,
        "model": model,
        "extra": dict(extra or {}),
    }
    clean = {key: _clean(value) for key, value in found.items()}
    try:
        return dict(json.loads(json.dumps(clean, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"the provenance cannot be stored as JSON: {error}; give plain finite values") from None


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on, those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around ``folder``, and whether tracked files differ from it; None outside of one.

    ``dirty`` is None where git could not tell in time.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    # A look at the repository must not take its lock away from a git that the user runs meanwhile.
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def command_line(arguments: Sequence[str]) -> list[str]:
    """The command with private paths shortened and secrets hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            shown.append(_HIDDEN)
        elif equals and _SECRET_OPTION.search(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(shorten(argument))
        hide_next = not equals and argument.startswith("-") and bool(_SECRET_OPTION.search(argument))
    return shown


def shorten(text: str) -> str:
    """``text`` with every absolute path in it made relative to the working directory, or cut to its last name."""
    text = _SECRET_VALUE.sub(_HIDDEN, text)
    # A whole argument may be a path with spaces in it, and so may what follows an option's "=".
    name, equals, value = text.partition("=")
    if _PATH.match(text) and "\n" not in text:
        text = _short_path(text)
    elif equals and re.fullmatch(r"[\w.-]+", name) and _PATH.match(value) and "\n" not in value:
        text = f"{name}={_short_path(value)}"
    else:
        pieces = re.split(r"""([\s"'`=,;<>()\[\]{}|]+)""", text)
        pieces[::2] = [_short_piece(piece) for piece in pieces[::2]]
        text = "".join(pieces)
    # A net under it all, for a home that stands behind a mark that parts nothing above: "@/home/name/x".
    homes = [rf"/(?:{'|'.join(_HOMES)})/[^/\\\s]+", *([re.escape(str(home))] if (home := _home()) else [])]
    return re.sub(rf"(?<![\w.~/])(?:{'|'.join(homes)})(?![\w.-])", "~", text)


def _short_piece(piece: str) -> str:
    if _URL.match(piece):
        scheme, _, rest = piece.partition("://")
        if scheme.lower() == "file":
            return _short_path(rest)
        place, slash, path = rest.partition("/")
        return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"
    # Lists of paths, and a path after a label: "a:/b/c".
    drive = re.match(r"[A-Za-z]:[\\/]", piece)
    if ":" in piece and not drive:
        return ":".join(_short_piece(inner) for inner in piece.split(":"))
    return _short_path(piece) if _PATH.match(piece) else piece


def _short_path(path: str) -> str:
    if re.match(r"[A-Za-z]:[\\/]|\\\\", path):
        windows = PureWindowsPath(path)
        return "~" if windows.parent.name in _HOMES else windows.name or "."
    here, home = _working_directory(), _home()
    posix = PurePosixPath(os.path.normpath(os.path.join(here, path)))
    if path.startswith("~"):
        return "~" if "/" not in path.rstrip("/") else posix.name
    # Below a working directory such as / or /home the relative path would still name the user.
    tells = home is not None and home != here and home.is_relative_to(here)
    if posix.is_relative_to(here) and not tells:
        return str(posix.relative_to(here))
    if posix.parent.name in _HOMES or (home is not None and posix.name == home.name):
        return "~"
    return posix.name or "/"


def _home() -> PurePosixPath | None:
    try:
        home = PurePosixPath(Path.home())
    except RuntimeError:  # a user without an entry and without $HOME, as in some containers
        return None
    return home if home.name else None


def _working_directory() -> PurePosixPath:
    try:
        return PurePosixPath(Path.cwd())
    except OSError:  # it was removed
        return PurePosixPath("/nowhere")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, os.PathLike):
        return shorten(os.fsdecode(value))
    if isinstance(value, Mapping):
        return {shorten(str(key)): _clean(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_clean(inner) for inner in value]
    return value
