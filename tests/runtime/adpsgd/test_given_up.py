"""An exchange whose peer fails while a chunk is on the wire: the receiver is not held until its deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.runtime.adpsgd.exchange import Exchanger, GivenUpError
from lightning_gossip.transport.base import Pending, Transport
from tests.runtime.cluster import Cluster
from tests.runtime.peers import PATIENCE_S, Everybody
from tests.transport.memory import MemoryNetwork


class Held(Pending):
    """A chunk of which a part has come: nothing ends the wait for it but its deadline, which the test plays."""

    def __init__(self, over: threading.Event) -> None:
        self.over = over
        self.waits = threading.Event()

    def wait(self, timeout_s: float) -> None:
        self.waits.set()
        assert self.over.wait(PATIENCE_S)


def hold(transport: Transport, monkeypatch: pytest.MonkeyPatch, over: threading.Event) -> Held:
    """The next swap of a worker's is held; those after it work."""
    held, swap = Held(over), transport.swap
    swaps = iter([lambda *args: held])
    monkeypatch.setattr(transport, "swap", lambda *args: next(swaps, swap)(*args))
    return held


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the deadline is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_receiver_goes_on_when_the_failure_detector_has_found_that_its_peer_has_failed(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    cluster = Cluster(ring(2), exchanges_per_step=50.0, timeout_s=0.5)
    held = hold(cluster.transports[0], monkeypatch, over)
    monitor = Everybody()
    peers = cluster.peers[0]
    peers._monitor, peers._raises = monitor, False
    before = torch.cat(cluster.x[0]).clone()
    gossip = cluster.gossips[0]
    with cluster.running():
        cluster.open_all()
        cluster.step_all(1e-3)
        assert held.waits.wait(PATIENCE_S)
        gossip.look()
        assert gossip._protocol.busy  # its peer is alive
        monitor.change(peers._members[1], Verdict.FAILED)
        left_behind = gossip._under_way
        gossip.look()
        gossip.drain(cluster.x[0])  # ends, or raises
        assert peers.failed_exchanges == 1
        over.set()  # its deadline: the thread that was left behind ends, and has merged nothing
        assert left_behind is not None
        left_behind.thread.join(PATIENCE_S)
        assert not left_behind.thread.is_alive()
        assert torch.equal(torch.cat(cluster.x[0]), before)


def test_what_comes_after_an_exchange_was_given_up_is_not_merged(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    network = MemoryNetwork(2)
    transport = network.transport(0)
    exchanger = Exchanger(transport, chunk_bytes=16, timeout_s=PATIENCE_S)
    held = hold(transport, monkeypatch, over)
    model = Replica([torch.zeros(4)])
    failed: list[GivenUpError] = []

    def run() -> None:
        try:
            exchanger.run(1, model)
        except GivenUpError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert held.waits.wait(PATIENCE_S)
    theirs = exchanger._buffers[0][1]
    exchanger.give_up()
    theirs.fill_(8.0)  # so late
    over.set()
    thread.join(PATIENCE_S)
    assert failed
    x = [torch.zeros(4)]
    model.push_pull(x, forward_passes=0)
    assert torch.equal(x[0], torch.zeros(4))
