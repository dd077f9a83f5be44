"""The pages of docs/: what they show is what runs, what they quote is what is said, and nothing is left out."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md"))
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_PRINTED = re.compile(r"^# (.*)$", re.MULTILINE)


def _blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text())


def _trains(block: str) -> bool:
    return ".fit(" in block or ".launch(" in block


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(_blocks(page))
        if not _trains(block)
    ],
)
def test_the_examples_of_a_page_run_and_print_what_the_page_says(page: Path, number: int) -> None:
    block = _blocks(page)[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, f"{page.name}[{number}]", "exec"), {"__name__": "__main__"})
    if printed.getvalue():
        assert printed.getvalue().splitlines() == _PRINTED.findall(block)


@pytest.mark.processes
@pytest.mark.parametrize(
    "block", [pytest.param(block, id=page.stem) for page in PAGES for block in _blocks(page) if _trains(block)]
)
def test_the_scripts_of_a_page_train(block: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block)
    ended = run("train.py", folder=tmp_path)
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    assert re.search(r"rank 0: [1-9]\d* steps, [1-9]\d* exchanges", ended.output)


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text()], ids=lambda page: page.stem)
def test_the_sessions_of_a_page_are_right(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_there_are_examples() -> None:
    """Shows that the tests above look at something."""
    blocks = [block for page in PAGES for block in _blocks(page)]
    assert sum(map(_trains, blocks)) >= 1
    assert len(blocks) >= 12


def _hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


@cache
def _pieces() -> str:
    """All sources, with a sentence over several lines on one."""
    sources = "\n".join(path.read_text() for path in (ROOT / "lightning_gossip").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", sources)


def _quotes() -> list[str]:
    """What the tables of failures.md quote: the first cell of each row, its pieces apart."""
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "failures.md").read_text(), re.MULTILINE)
    return [piece.strip() for row in rows for piece in re.findall(r"`([^`]+)`", row)]


_OF_LIGHTNING = (
    "You selected an invalid strategy name: strategy='adpsgd'",
    "is not compatible with an interactive environment",
)


@pytest.mark.parametrize("quote", [quote for quote in _quotes() if quote not in _OF_LIGHTNING and "Error" not in quote])
def test_what_is_quoted_as_said_is_said(quote: str) -> None:
    assert quote in _pieces()


def test_errors_that_other_workers_cause_are_all_explained() -> None:
    """A ConfigurationError says itself what to write; why another worker has gone is explained one by one."""
    said = (DOCS / "failures.md").read_text().split("## Every message")[0]
    quotes = [quote for quote in _quotes() if quote in said]
    missing = [
        message.words
        for message in _hooks().messages()
        if message.error in ("PeerError", "NonFiniteError", "StoreLostError")
        and not message.file.startswith("simulation/")
        and re.search("[a-z]{4} [a-z]", re.sub("{[^}]*}", "", message.words))  # some only add to what another says
        and not any(quote in message.words for quote in quotes)
    ]
    assert missing == []


def _warnings() -> list[str]:
    """What the package warns of, with ``{}`` for values: of the calls that have words of their own."""
    found = []
    for path in (ROOT / "lightning_gossip").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and node.args
                and ast.unparse(node.func) in ("rank_zero_warn", "say_once", "warning_cache.warn")
            ):
                parts = [part for part in ast.walk(node.args[-1]) if isinstance(part, ast.Constant)]
                found.append("{}".join(part.value for part in parts if isinstance(part.value, str)))
    return [words for words in found if words]


def test_warnings_are_all_explained() -> None:
    assert len(_warnings()) > 15
    assert [words for words in _warnings() if not any(quote in words for quote in _quotes())] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [path.relative_to(DOCS).as_posix() for path in [*PAGES, *DOCS.glob("reference/*.md")]]
    assert [name for name in missing if f": {name}" not in navigation] == []


def test_every_strategy_and_public_name_is_in_the_reference() -> None:
    import lightning_gossip

    reference = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = [name for name in lightning_gossip.__all__ if name not in ("__version__", "report")]
    assert [name for name in names if not re.search(rf"::: lightning_gossip\.(\w+\.)*{name}$", reference, re.MULTILINE)] == []
