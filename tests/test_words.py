"""What the package logs is for users: no words that only its authors know, no worker under the name of a key in the store."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_gossip
import recipes

_PRIVATE = re.compile(r"\b(door\w*|knock\w*|board|meeting|beats?|reborn|the watch|a round|inbox)\b", re.IGNORECASE)
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
