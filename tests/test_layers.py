"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_gossip"

# what each layer may import of this package
ALLOWED = {
    "errors": set(),
    "algorithm": {"errors"},
    "analysis": {"errors", "algorithm", "simulation"},
    "simulation": {"errors", "algorithm"},
    "transport": {"errors"},
    "runtime": {"errors", "algorithm", "transport"},
    "strategies": {"errors", "algorithm", "transport", "runtime"},
    "callbacks": {"errors", "algorithm", "analysis", "runtime", "strategies"},
}
# what only some layers may import at all
OUTSIDE = {
    "threading": {"transport", "runtime"},
    "time": {"transport", "runtime", "callbacks"},
    "lightning": {"strategies", "callbacks"},
    "torch.distributed": {"transport", "runtime", "strategies", "callbacks"},
    "socket": {"transport", "runtime"},  # where the store listens, and options of its connections
    "hydra": set(),
    "wandb": {"callbacks"},  # where the user's logger is its own
}


def imports(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def violations(layer: str, source: str) -> list[str]:
    found = []
    for name in sorted(imports(source)):
        parts = name.split(".")
        inside = parts[0] == "lightning_gossip" and len(parts) > 1
        if inside and parts[1] in ALLOWED and parts[1] != layer and parts[1] not in ALLOWED[layer]:
            found.append(name)
        found += [name for module, layers in OUTSIDE.items() if (name + ".").startswith(module + ".") and layer not in layers]
    return found


@pytest.mark.parametrize("layer", ALLOWED)
def test_each_layer_imports_only_what_lies_below_it(layer: str) -> None:
    files = [PACKAGE / f"{layer}.py"] if layer == "errors" else sorted((PACKAGE / layer).glob("*.py"))
    assert files
    for file in files:
        assert violations(layer, file.read_text()) == [], file


def test_the_check_sees_a_violation() -> None:
    assert violations("algorithm", "from lightning_gossip.runtime.clock import now_s") != []
    assert violations("algorithm", "import threading") != []
    assert violations("runtime", "from lightning.pytorch import Trainer") != []
    assert violations("runtime", "from lightning_gossip import strategies") != []
    assert violations("strategies", "from lightning_gossip.runtime.clock import now_s") == []
