"""What the README shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
def test_the_script_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "script.py"
    script.write_text(blocks[0])
    ended = run(str(script), folder=tmp_path)
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    assert re.findall(r"rank (\d): \d+ steps, [1-9]\d* exchanges", ended.output) == ["0", "1", "2", "3"]


def test_links_and_files_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", text, re.DOTALL)
    assert tree is not None
    for line in tree.group(1).splitlines():
        for name in line.split("  ")[0].split(", "):
            assert (ROOT / name).is_dir(), name
