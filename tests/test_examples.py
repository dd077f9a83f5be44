"""The examples in the docstrings of all modules are right."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lightning_gossip
import recipes

MODULES = [
    module.name
    for package in (lightning_gossip, recipes)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_right(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    """Shows that the test above looks at something."""
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(len(found.examples) for module in modules for found in doctest.DocTestFinder().find(module)) > 50
