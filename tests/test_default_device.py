"""``torch.set_default_device``: whatever the user's default is, memory of this package says where it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.topology.generators import ring
from tests.runtime.cluster import Cluster

PACKAGE = Path(__file__).parents[1] / "lightning_gossip"
FACTORIES = {function.__name__ for function in _device_constructors()}


def without_device(source: str) -> list[str]:
    """Calls of what torch makes on the default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [
        call
        for call in calls
        if ast.unparse(call.func).removeprefix("torch.") in FACTORIES and "torch." in ast.unparse(call.func)
    ]
    return [ast.unparse(call) for call in made if not any(keyword.arg == "device" for keyword in call.keywords)]


def test_all_memory_says_where_it_is() -> None:
    assert {"empty", "zeros", "tensor", "as_tensor", "randperm"} <= FACTORIES
    assert without_device("torch.zeros(3, dtype=torch.int64)") == ["torch.zeros(3, dtype=torch.int64)"]
    for path in sorted(PACKAGE.rglob("*.py")):
        assert without_device(path.read_text()) == [], path


@pytest.mark.parametrize("wire", ["float32", "int8", "bfloat16"])
def test_gossip_under_another_default_device(wire: Wire) -> None:
    cluster = Cluster(ring(2), numel=2100, chunk=1024, wire=wire)
    before = cluster.total()
    with torch.device("meta"), cluster.running():
        cluster.open_all()
        cluster.step_all(1e-3)
        cluster.wait_for_exchanges(5)
        cluster.drain_all()
    assert torch.allclose(cluster.total(), before, rtol=0, atol=1e-9)
