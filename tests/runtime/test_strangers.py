"""Malformed messages to a running gossip listener and a running parameter server: training goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.runtime.apsgd.client import RemoteServer, Update
from lightning_gossip.runtime.apsgd.server import Server
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.messages import WORDS
from tests.runtime.cluster import PATIENCE_S, Cluster, eventually
from tests.transport.memory import MemoryNetwork

FAST_S = 1e-4
COUNT = 10_000
Letter = tuple[int, list[int]]


def malformed(chance: random.Random, *, session: int, layout: int, workers: int) -> Letter:
    """Noise of any length, or a right message with one or two words wrong; never one that is right."""
    if chance.random() < 0.3:
        return chance.randrange(-3, 2 * workers), [chance.randrange(-(2**63), 2**63) for _ in range(chance.randrange(64))]
    words = Message(Kind.SYNC, session, layout).words()
    for place in chance.sample([0, 1, 2, 8, 9, 10, 11], chance.randrange(1, 3)):
        words[place] = chance.choice([chance.randrange(-(2**63), 0), chance.randrange(100, 2**63), -1])
    return chance.randrange(workers), words[: chance.choice([WORDS, WORDS, WORDS, 3])]


def flood(put: Callable[[Letter], None], letters: list[Letter]) -> threading.Thread:
    thread = threading.Thread(target=lambda: [put(letter) for letter in letters], daemon=True)
    thread.start()
    return thread


def test_10000_malformed_messages_do_not_disturb_the_gossip() -> None:
    chance = random.Random(17)
    cluster = Cluster(ring(4))
    before = cluster.total()
    letters = [malformed(chance, session=1, layout=1, workers=4) for _ in range(COUNT)]
    network = cluster.transports[0]._inner._network  # type: ignore[attr-defined]
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(5)
        resident = psutil.Process().memory_info().rss
        flooding = flood(network.inbox[0].put, letters)
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(20)
        flooding.join(PATIENCE_S)
        assert eventually(lambda: cluster.transports[0]._inner.refused == COUNT)  # each was read, and refused
        cluster.wait_for_exchanges(5)
        assert psutil.Process().memory_info().rss - resident < 20 << 20
        assert not cluster.gossips[0].sync_requested
        cluster.drain_all()
    assert torch.allclose(cluster.total(), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Kind.ACCEPT, Kind.REFUSE, Kind.PULL, Kind.LEAVE, Kind.FAILED])
def test_a_listener_refuses_what_is_not_for_it(kind: Kind) -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open_all()
        cluster.transports[0].post(1, Message(kind, 1))
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(2)
        assert cluster.transports[1].refused + cluster.transports[1]._inner.refused == 1  # type: ignore[attr-defined]
        cluster.drain_all()


def test_a_sync_request_in_the_far_future_hides_no_other() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open_all()
        cluster.transports[1].post(0, Message(Kind.SYNC, 2**62))
        cluster.transports[1].post(0, Message(Kind.SYNC, cluster.session))
        assert eventually(lambda: cluster.gossips[0].sync_requested)
        cluster.drain_all()


def test_10000_malformed_messages_do_not_disturb_the_parameter_server() -> None:
    chance = random.Random(18)
    network = MemoryNetwork(3)
    server = Server(network.transport(0), timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
    server.start()
    letters = [malformed(chance, session=1, layout=7, workers=3) for _ in range(COUNT)]
    try:
        server.open(1, 7, ParameterServer(torch.zeros(5), workers=3))
        remote = RemoteServer(network.transport(1), 0, timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
        out = torch.empty(5)
        remote.pull(1, 7, out)
        resident = psutil.Process().memory_info().rss
        flooding = flood(network.inbox[0].put, letters)
        for _ in range(50):
            remote.pull(1, 7, out, Update(torch.ones(5)))
        flooding.join(PATIENCE_S)
        assert eventually(lambda: server._transport.refused == COUNT)
        assert remote.leave(1).version == 50
        server.raise_failure()
        assert not server.sync_requested
        assert psutil.Process().memory_info().rss - resident < 20 << 20
    finally:
        network.transport(1).post(0, Message(Kind.STOP))
        server.close(together=True)


WRONG = {
    "an exchange": Message(Kind.EXCHANGE, 1, 7),
    "an acceptance": Message(Kind.ACCEPT, 1, 7),
    "a session that is over": Message(Kind.PULL, 0, 7),
    "a session in the far future": Message(Kind.LEAVE, 10**9),
    "an update of a billion passes": Message(Kind.PULL, 1, 7, value=10**9),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_server_refuses_what_it_cannot_serve(name: str, caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork(2)
    transport = network.transport(0)
    server = Server(transport, timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
    server.start()
    try:
        server.open(1, 7, ParameterServer(torch.zeros(5), workers=2))
        network.transport(1).post(0, WRONG[name])
        remote = RemoteServer(network.transport(1), 0, timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
        assert remote.pull(1, 7, torch.empty(5)).version == 0
        assert transport.refused == 1
        assert "refused a message from rank 1 (1 refused so far)" in caplog.text
    finally:
        network.transport(1).post(0, Message(Kind.STOP))
        server.close(together=True)
