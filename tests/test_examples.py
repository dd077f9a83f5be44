"""The examples in the docstrings of all modules are right."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import lightning_gossip
import recipes

ROOT = Path(__file__).resolve().parents[1]
MODULES = [
    module.name
    for package in (lightning_gossip, recipes)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


def source_of(name: str) -> str:
    folder = ROOT.joinpath(*name.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return file.read_text(encoding="utf-8")


WITH_EXAMPLES = [name for name in MODULES if ">>>" in source_of(name)]  # to look at the objects of the others takes seconds


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_are_right(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    """Shows that the test above looks at something."""
    modules = [importlib.import_module(name) for name in WITH_EXAMPLES]
    assert sum(len(found.examples) for module in modules for found in doctest.DocTestFinder().find(module)) > 50
