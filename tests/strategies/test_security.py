"""What a job listens on, and whom it refuses at its start."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_gossip import ADPSGDStrategy, APSGDStrategy, ConfigurationError, DPSGDStrategy, version
from lightning_gossip.transport.messages import VERSION
from lightning_gossip.transport.network_interface import address_of, bind, listen, restore
from tests.strategies.launch import launch, outcomes, reserved_port
from tests.strategies.models import Net, loader, trainer

ROOT = Path(__file__).parents[2]


class Listening(Callback):
    """Where this process listens while it trains."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        connections = psutil.Process().net_connections("inet")
        self.addresses |= {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def _listens(kind: Any, options: dict[str, Any]) -> Any:
    seen = Listening()
    before = dict(os.environ)
    trainer(strategy=kind(**options), max_epochs=1, callbacks=[seen]).fit(Net(), loader(64, 8))
    kept = {name: os.environ.get(name) == before.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    # a second one, while the store of the first is still served by this process
    trainer(strategy=kind(**options), max_epochs=1, callbacks=[seen]).fit(Net(), loader(64, 8))
    return sorted(seen.addresses), kept


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ADPSGDStrategy, {}),
        pytest.param(ADPSGDStrategy, {"on_peer_failure": "raise"}, marks=pytest.mark.slow),
        (APSGDStrategy, {}),
        (DPSGDStrategy, {}),
    ],
    ids=["adpsgd", "adpsgd, raising", "apsgd", "dpsgd"],
)
def test_a_job_listens_on_the_interface_that_it_is_given_and_no_other(kind: Any, options: dict[str, Any]) -> None:
    for addresses, kept in launch(_listens, kind, {**options, "interface": "lo"}, workers=2):
        assert addresses == ["127.0.0.1"]
        assert all(kept.values())


def test_an_interface_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"interface='gossip7' is not one of this machine's: .*lo"):
        bind("gossip7")


def test_an_address_that_is_not_the_interfaces_is_refused() -> None:
    refusal = r"look for the store at 192\.0\.2\.77 \(MASTER_ADDR\)\. Set MASTER_ADDR=127"
    with reserved_port() as port, pytest.raises(ConfigurationError, match=refusal):
        listen("lo", "192.0.2.77", port)


def test_what_gloo_reads_is_put_back() -> None:
    before = dict(os.environ)
    changed = bind("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    restore(changed)
    assert dict(os.environ) == before


def test_a_port_that_is_taken_is_left_to_the_store() -> None:
    descriptor = listen("lo", "127.0.0.1", 0)
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as taken:
        assert taken.getsockname()[0] == address_of("lo")
        assert listen("lo", "127.0.0.1", taken.getsockname()[1]) is None


def _of_version(strategy: Any) -> str:
    if os.environ["RANK"] == "1":
        version.__version__ = "9.9.9"
    try:
        trainer(strategy=strategy, max_epochs=1).fit(Net(), loader(64, 8))
    except ConfigurationError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "trained"


@pytest.mark.processes
@pytest.mark.parametrize("make", [ADPSGDStrategy, pytest.param(DPSGDStrategy, marks=pytest.mark.slow)])
def test_workers_of_different_versions_are_told_so_at_setup(make: Any) -> None:
    said = launch(_of_version, make(), workers=2, timeout_s=30)
    assert said[0] == said[1]
    format_ = f"message format {VERSION}"
    assert f"rank 0 has {version.__version__}, {format_}; rank 1 has 9.9.9, {format_}" in said[0]


def _with_a_stranger(strategy: Any) -> Any:
    class Stranger(Callback):
        """Connects to every port of its own process and talks nonsense."""

        def on_train_batch_end(self, *_: Any) -> None:
            for connection in psutil.Process().net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    with socket.create_connection((connection.laddr.ip.replace("::", "127.0.0.1"), connection.laddr.port)) as s:
                        s.sendall(b"GET / HTTP/1.1\r\nHost: gossip\r\n\r\n" + bytes(range(256)))

    t = trainer(strategy=strategy, max_epochs=2, callbacks=[Stranger()])
    t.fit(Net(), loader(128, 8))
    return [worker.exchanges for worker in t.strategy.report.workers]


@pytest.mark.processes
def test_a_strangers_bytes_on_every_port_do_not_disturb_the_job() -> None:
    ok = outcomes(_with_a_stranger, ADPSGDStrategy(), workers=2)
    assert all(good and min(exchanges) > 0 for good, exchanges in ok), ok


EXCHANGE_PATH = [
    *(ROOT / "lightning_gossip" / "transport").glob("*.py"),
    *(ROOT / "lightning_gossip" / "runtime" / "adpsgd").glob("*.py"),
    *(ROOT / "lightning_gossip" / "runtime" / "apsgd").glob("*.py"),
    ROOT / "lightning_gossip" / "runtime" / "dpsgd.py",
]


def _names(source: str) -> set[str]:
    """Everything that a module imports or asks an object for."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def _unpickles(source: str) -> set[str]:
    return {
        name
        for name in _names(source)
        if name in ("pickle", "marshal", "gather") or name.endswith(("_object", "_object_list")) or name == "load"
    }


@pytest.mark.parametrize("path", EXCHANGE_PATH, ids=lambda path: path.name)
def test_nothing_on_the_exchange_path_can_unpickle(path: Path) -> None:
    assert _unpickles(path.read_text()) == set()


def test_the_search_for_pickle_finds_it() -> None:
    assert _unpickles((ROOT / "lightning_gossip" / "runtime" / "membership" / "store_operations.py").read_text()) >= {"pickle"}
    assert _unpickles((ROOT / "lightning_gossip" / "runtime" / "workers.py").read_text()) >= {"all_gather_object"}
