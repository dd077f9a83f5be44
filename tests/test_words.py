"""Words: what the package logs is for users, and its names and docstrings are in the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_gossip
import recipes

_PRIVATE = re.compile(
    r"\b(door\w*|knock\w*|board|meeting|beats?|reborn|forsaken|orphan\w*|inheritance|the watch|a round|inbox)\b", re.IGNORECASE
)
_REMOVED = re.compile(
    r"doors?|doorsteps?|knock(s|ed|ing)?|boards?|beats?|reborn|forsaken|orphan(s|ed)?|inheritances?|journals?|appendix|handouts?",
    re.IGNORECASE,
)  # each has a word of the field instead (docs/design.md)
_LOGS = {
    "info",
    "warning",
    "error",
    "exception",
    "rank_zero_info",
    "rank_zero_warn",
    "warn",
}  # what is seen without asking for it
FILES = [
    path
    for package in (lightning_gossip, recipes)
    for folder in package.__path__
    for path in sorted(Path(folder).rglob("*.py"))
]


def _logged(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in _LOGS:
                yield node


def test_log_lines_have_no_private_words_and_no_private_names() -> None:
    read, bad = 0, []
    for path in FILES:
        for call in _logged(path):
            read += 1
            where = f"{'/'.join(path.parts[-2:])}:{call.lineno}"
            strings = [part.value for argument in call.args for part in ast.walk(argument) if isinstance(part, ast.Constant)]
            bad += [f"{where}: {text}" for text in strings if isinstance(text, str) and _PRIVATE.search(text)]
            arguments = [ast.unparse(argument) for argument in call.args]
            bad += [f"{where}: {shown} is shown as 0.1" for shown in arguments if re.search(r"\b(me|worker)$", shown)]
    assert read > 30
    assert not bad


def _names(node: ast.AST) -> Iterator[str]:
    """The identifiers of a node: what it defines, reads, imports or passes."""
    for field in ("id", "attr", "name", "asname", "arg", "module"):
        if isinstance(name := getattr(node, field, None), str):
            yield name
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names


def _words(text: str) -> list[str]:
    """The words of a text or an identifier: ``_LastBeat_s`` has Last, Beat and s. TensorBoard is a name."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text.replace("TensorBoard", ""))


def removed_words(source: str) -> list[str]:
    """Names and docstrings of a module, as ``line: word``, that have a word which was replaced by one of the field."""
    found = []
    for node in ast.walk(ast.parse(source)):
        texts = list(_names(node))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            texts.append(ast.get_docstring(node) or "")
        line = getattr(node, "lineno", 1)
        found += [f"{line}: {word}" for text in texts for word in _words(text) if _REMOVED.fullmatch(word)]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "class Board: ...",
        "class WorkerBeats: ...",
        "def be_reborn(): ...",
        "def wait(knocking): ...",
        "from here import door",
        "import here as DOORSTEP",
        "made = orphans",
        "made.find_orphans()",
        "made(beat_s=1)",
        '"""A worker whose batches are orphaned."""',
        'def f():\n    """Its inheritance."""',
        'class A:\n    def f(self):\n        """Has been forsaken."""',
    ],
)
def test_a_removed_word_is_found(source: str) -> None:
    assert len(removed_words(source)) == 1


@pytest.mark.parametrize(
    "source", ["heartbeats = 1", "keyboard.outdoor()", "class Onboarding: ...", "TensorBoardLogger()", "# a door", "x = 'beat'"]
)
def test_other_words_are_not_taken_for_a_removed_one(source: str) -> None:
    assert removed_words(source) == []


def test_names_and_docstrings_have_no_removed_words() -> None:
    files = [path for folder in lightning_gossip.__path__ for path in sorted(Path(folder).rglob("*.py"))]
    assert len(files) > 100
    bad = [f"{path.name}:{found}" for path in files for found in removed_words(path.read_text(encoding="utf-8"))]
    assert not bad


_CONTINUES = re.compile(
    r"(Of|Its?|The same|As (for|in|on|at|the|torch)|Th[eo]se|That|Theirs|Likewise|Whoever|How many there|Until|Into|From|To"
    r"|After|Before|With|By|In the order)\b|As :|One,|In \["
)


def continued(source: str) -> list[str]:
    """Docstrings of public names and of classes that only the line above makes clear, as ``line: first words``."""
    found = []

    def look(node: ast.Module | ast.ClassDef) -> None:
        for inner in node.body:
            is_class = isinstance(inner, ast.ClassDef)
            if is_class or (isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")):
                said = (ast.get_docstring(inner) or "").splitlines()
                found.extend(f"{inner.lineno}: {said[0]}" for _ in said[:1] if _CONTINUES.match(said[0]))
                if is_class:
                    look(inner)

    look(ast.parse(source))
    return found


def test_public_docstrings_read_alone() -> None:
    def found(said: str) -> list[list[str]]:
        return [continued(f'{name}:\n    """{said}"""') for name in ("def f()", "class _C")]

    for said in ("Of a rank.", "One, made by a thread.", "As torch's.", "In [0, 1].", "How many there are."):
        assert found(said) == [[f"1: {said}"], [f"1: {said}"]]
    for said in ("The rank.", "Offer a rank.", "Withdraw it.", "Assign batches."):
        assert found(said) == [[], []]
    assert [f"{path.name}:{found}" for path in FILES for found in continued(path.read_text(encoding="utf-8"))] == []
