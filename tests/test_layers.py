"""Imports point one way: between the layers, and between the packages inside each."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_gossip"

# what each layer may import of this package
ALLOWED = {
    "errors": set(),
    "arguments": {"errors"},
    "algorithm": {"errors", "arguments"},
    "analysis": {"errors", "arguments", "algorithm", "simulation"},
    "simulation": {"errors", "arguments", "algorithm"},
    "transport": {"errors"},
    "runtime": {"errors", "arguments", "algorithm", "transport"},
    "strategies": {"errors", "arguments", "algorithm", "transport", "runtime"},
    "callbacks": {"errors", "arguments", "algorithm", "analysis", "runtime", "strategies"},
    "doctor": {"errors", "arguments", "algorithm", "simulation", "transport", "runtime", "callbacks"},
}
# what only some layers may import at all
OUTSIDE = {
    "threading": {"transport", "runtime"},
    "time": {"transport", "runtime", "callbacks", "doctor"},
    "lightning": {"strategies", "callbacks", "doctor"},
    "torch.distributed": {"transport", "runtime", "strategies", "callbacks", "doctor"},
    "socket": {"transport", "runtime", "doctor"},  # where the store listens, and options of its connections
    "hydra": set(),
    "wandb": {"callbacks"},  # where the user's logger is its own
}


# the packages inside a layer, each of which may import those before it
ORDER = {
    "algorithm": ("tensors", "topology", "compression", "islands", "membership", "adpsgd", "periodic_averaging", "apsgd"),
    "runtime": ("membership", "islands", "work_sharing", "adpsgd", "periodic_averaging", "apsgd"),
    "strategies": ("state", "islands", "lightning", "data", "elastic", "fit", "fabric"),
    "simulation": ("cluster", "problems", "strategies"),
    "analysis": ("delays", "mean", "second_moments", "planning", "curvature"),
    "doctor": ("measure",),
}
MOST = 14  # modules of a package beside its own packages


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
    files = [PACKAGE / f"{layer}.py"] if layer in ("errors", "arguments") else sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    for file in files:
        assert violations(layer, file.read_text()) == [], file


def graph_of(sources: dict[str, str]) -> nx.DiGraph:
    """Module → module that it imports when it runs; ``sources`` by module name."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sources)
    for module, source in sources.items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = [ast.Pass()]
        names = imports(ast.unparse(tree))
        graph.add_edges_from((module, name) for name in names if name in sources and name != module)
    return graph


def rooms_of(graph: nx.DiGraph) -> nx.DiGraph:
    """The same between packages: ``lightning_gossip.layer.package``, or a module that stands beside them."""
    rooms = nx.DiGraph()
    for one, other in graph.edges:
        ends = [".".join(name.split(".")[:3]) for name in (one, other)]
        if ends[0] != ends[1]:
            rooms.add_edge(*ends)
    return rooms


@pytest.fixture(scope="module")
def graph() -> nx.DiGraph:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    return graph_of({".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text() for path in files})


def test_no_module_and_no_package_imports_itself_by_way_of_others(graph: nx.DiGraph) -> None:
    assert graph.number_of_edges() > 500
    assert [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []
    assert [circle for circle in nx.strongly_connected_components(rooms_of(graph)) if len(circle) > 1] == []


@pytest.mark.parametrize("layer", ALLOWED)
def test_every_package_of_a_layer_has_its_place_in_the_order(layer: str) -> None:
    assert {path.parent.name for path in (PACKAGE / layer).glob("*/__init__.py")} == set(ORDER.get(layer, ()))


@pytest.mark.parametrize("layer", ORDER)
def test_inside_a_layer_packages_have_an_order(layer: str, graph: nx.DiGraph) -> None:
    rooms = rooms_of(graph)
    names = [f"lightning_gossip.{layer}.{package}" for package in ORDER[layer]]
    assert set(names) <= set(rooms)
    for place, name in enumerate(names):
        assert nx.descendants(rooms, name).isdisjoint(names[place + 1 :])


@pytest.mark.parametrize("package", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_a_package_fits_on_a_page(package: Path) -> None:
    assert len([path for path in package.glob("*.py") if path.name != "__init__.py"]) <= MOST


def test_a_circle_is_seen() -> None:
    circle = graph_of({"a.b.c.d": "import a.b.e.f", "a.b.e.f": "from a.b.c import d"})
    assert [len(found) for found in nx.strongly_connected_components(circle)] == [2]
    typed = graph_of({"a.b.c.d": "import a.b.e.f", "a.b.e.f": "if TYPE_CHECKING:\n    from a.b.c import d"})
    assert [len(found) for found in nx.strongly_connected_components(typed)] == [1, 1]


def test_the_check_sees_a_violation() -> None:
    assert violations("algorithm", "from lightning_gossip.runtime.clock import now_s") != []
    assert violations("algorithm", "import threading") != []
    assert violations("runtime", "from lightning.pytorch import Trainer") != []
    assert violations("runtime", "from lightning_gossip import strategies") != []
    assert violations("strategies", "from lightning_gossip.runtime.clock import now_s") == []
