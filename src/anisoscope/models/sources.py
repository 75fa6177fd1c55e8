"""Sources: from what the user wrote to files on disk. Nothing is loaded here, and no code of a source is ever run."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anisoscope.errors import ModelError
from anisoscope.meanwhile import GivenUp
from anisoscope.models.llama2c import looks_like_llama2c

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
PIP_PREFIX = "pip:"
HASHED_BYTES = 16 << 20  # at a time: a thread beside a busy one waits for its turn after each


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one model: a folder with ``config.json``, a GGUF file, or a llama2.c file."""

    kind: Literal["folder", "gguf", "llama2c"]
    path: Path
    name: str
    revision: str | None = None


def resolve(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Find the files that ``source`` means: an installed package (``pip:name``), a path, or a Hugging Face name.

    A path that exists wins over a name on the Hub that reads the same.
    """
    text = str(source)
    if text.startswith(PIP_PREFIX):
        _no_revision(text, revision, "the version of the installed package decides")
        return _pip_source(text.removeprefix(PIP_PREFIX))
    path = Path(text).expanduser()
    if path.exists():
        _no_revision(text, revision, "it is a path on this machine")
        return local_source(path)
    if isinstance(source, Path) or _reads_like_a_path(text):
        raise ModelError(f"no file or folder {text!r}{_nearest_neighbour(path)}")
    return _hub_source(text, revision, trust_remote_code)


def local_source(path: Path, name: str | None = None, revision: str | None = None) -> Source:
    """What kind of model lies at a path that exists."""
    name = name or str(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source("folder", path, name, revision)
        inside = sorted(child for child in path.iterdir() if child.is_file())
        models = [child for child in inside if child.suffix == ".gguf" or looks_like_llama2c(child)]
        if len(models) == 1:
            return local_source(models[0], name, revision)
        if models:
            raise ModelError(f"{path} holds {len(models)} models ({_listing(models)}); name one of the files")
        raise ModelError(
            f"{path} has no config.json, no .gguf and no llama2.c .bin; it holds {_listing(inside) or 'no files'}"
        )
    if path.suffix == ".gguf":
        return Source("gguf", path, name, revision)
    if path.suffix == ".bin" and not (path.parent / "config.json").is_file():
        return Source("llama2c", path, name, revision)
    raise ModelError(f"{path} is one file of a model; give its folder, a .gguf file or a llama2.c .bin file")


def fingerprint(paths: Iterable[Path], given_up: GivenUp = lambda: False) -> str:
    """SHA-256 over the names and contents of files, in the order of their names: equal files give equal numbers.

    ``given_up`` is asked now and then whether anybody still wants to know.
    """
    total, room = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
    for path in sorted(paths, key=lambda one: one.name):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(room):
                if given_up():
                    raise CancelledError
                digest.update(room[:size])
        total.update(f"{path.name}\0{digest.hexdigest()}\n".encode())
    return total.hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of a message that has any text, for errors of other libraries that go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _no_revision(text: str, revision: str | None, why: str) -> None:
    if revision is not None:
        raise ModelError(f"revision={revision!r} is for Hugging Face names; {text!r} has none, since {why}")


def _reads_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith((".gguf", ".bin")) or not HUB_NAME.fullmatch(text)


def _nearest_neighbour(path: Path) -> str:
    """A hint: the entry of the nearest existing folder that reads most like the missing one."""
    parent = path.parent
    if not parent.is_dir():
        return f", nor a folder {str(parent)!r}"
    names = [child.name for child in parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {str(parent / near[0])!r}?" if near else ""


def _listing(paths: list[Path], limit: int = 5) -> str:
    shown = ", ".join(path.name for path in paths[:limit])
    return shown if len(paths) <= limit else f"{shown} and {len(paths) - limit} more"


def _pip_source(name: str) -> Source:
    """Model files inside an installed package, found through its list of files: its code is not imported."""
    from importlib import metadata

    try:
        package = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        raise ModelError(f"the package {name!r} is not installed; pip install {name}") from None
    found = [
        file for file in package.files or () if file.name == "config.json" or file.suffix in (".gguf", ".safetensors")
    ]
    folders = {file.parent for file in found if file.name == "config.json"}
    # Packages keep other things under the name config.json too: weights must lie beside it.
    models = [folder for folder in folders if any(f.parent == folder and f.suffix == ".safetensors" for f in found)]
    models += [file for file in found if file.suffix == ".gguf"]
    if len(models) != 1:
        raise ModelError(
            f"the package {name!r} holds {len(models) or 'no'} models {sorted(map(str, models)) or ''}; "
            "one folder with config.json and safetensors, or one .gguf file, is needed"
        )
    return local_source(Path(str(package.locate_file(models[0]))), f"{PIP_PREFIX}{name}", package.version)


def _hub_source(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """A pinned snapshot of a repository on the Hugging Face Hub: downloaded, or from the cache if offline.

    Only configuration, tokenizer and safetensors files are fetched; pickled weights if there is nothing else.
    """
    patterns = [*HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    folder = _snapshot(name, revision, patterns)
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, [*patterns, "pytorch_model*.bin"])
    return Source("folder", folder, name, folder.name)


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    asked = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        raise ModelError(f"{name!r} is gated: accept its terms on its page and log in with `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name!r} has no revision {revision!r}; give a branch, a tag or a commit of it") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no model {name!r}: no such folder here, and none on the Hugging Face Hub (or it is private)"
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"{name!r} is no path here and no Hugging Face name: {first_line(error)}") from None
    except OSError as error:  # no network, offline mode and an empty cache, a full disk
        raise ModelError(
            f"{asked} is neither a path here nor in the cache, and the Hugging Face Hub gave nothing: "
            f"{first_line(error)}; go online, or give a local folder"
        ) from None
    except Exception as error:
        # The Hub's client raises the errors of whichever HTTP library it is built on, which we do not depend on.
        if "connect" not in f"{type(error).__name__} {error}".lower():
            raise
        raise ModelError(f"{asked} is no path here, and the Hugging Face Hub cannot be reached") from None
