"""What the README shows runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert len(BLOCKS) == 3
    assert "TwoNN, facco" in shown
    assert "participation_ratio" in shown
    assert shown.rstrip().endswith("20000")


def test_commands_of_the_readme_are_targets():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test", "bench"} <= named <= targets


@pytest.mark.parametrize("name", re.findall(r"\]\(([\w/.]+\.(?:md|cff|svg))\)", (ROOT / "README.md").read_text()))
def test_links_lead_somewhere(name):
    assert (ROOT / name).is_file()
