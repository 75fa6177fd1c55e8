"""The documents name what exists: commands and their options, names of the package, its modules and files."""

import functools
import re
from pathlib import Path

import pytest
import typer.main

import anisoscope as an
from anisoscope.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "anisoscope"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
COMMANDS = {
    name: {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for name, command in typer.main.get_command(app).commands.items()
}
USED = re.compile(r"(?:^(?: {4}|\$ )?|`|\$ )anisoscope ([a-z][a-z-]*)([^`|#\n]*)", re.MULTILINE)
NAMED = re.compile(r"(?<![\w./])an\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
FOLDERS = "|".join(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
MODULE = re.compile(rf"`(?:src/anisoscope/)?((?:{FOLDERS})/[a-z_0-9]+)(?:\.py)?`")
FILE = re.compile(r"(?<![\w/.-])((?:src|tests|docs|benchmarks)/[\w/.-]+\.(?:py|md|yaml|json))")
NO_COMMANDS = {"as", "knows", "uses", "beside"}  # sentences about the product


def test_the_patterns_find_something():
    """A pattern that finds nothing would let everything pass."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert len(USED.findall(text)) > 40 and len(NAMED.findall(text)) > 40
    assert len(MODULE.findall(text)) > 5 and len(FILE.findall(text)) > 20
    assert (
        {"train", "profile", "report"}
        <= {command for command, _ in USED.findall(text)}
        <= COMMANDS.keys() | NO_COMMANDS
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text("utf-8")
    wrong = []
    for command, rest in USED.findall(text):
        options = COMMANDS.get(command, set())
        wrong += [f"anisoscope {command}"] if command not in COMMANDS.keys() | NO_COMMANDS else []
        if options:
            given = re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)
            wrong += [f"anisoscope {command} {option}" for option in given if option not in options]
    for name in NAMED.findall(text):
        try:
            functools.reduce(getattr, name.split("."), an)
        except AttributeError:
            wrong.append(f"an.{name}")
    wrong += [f"{name} (module)" for name in MODULE.findall(text) if not _there(PACKAGE / name)]
    wrong += [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert wrong == []


def _there(module: Path) -> bool:
    return module.with_suffix(".py").exists() or module.is_dir()


@pytest.mark.parametrize(
    "words",
    ["    anisoscope trian demo", "`anisoscope train demo --sets a=1`", "`an.twonn(rows)`", "`stats/sketsh.py`",
     "see tests/test_nothing.py"],
)  # fmt: skip
def test_wrong_names_are_found(tmp_path, words):
    page = tmp_path / "page.md"
    page.write_text(f"Some words.\n\n{words}\n")
    with pytest.raises(AssertionError):
        test_what_a_page_names_exists(page)
