"""A busy worker's queue, over real connections: nobody that waits for its turn gives up, or takes the worker for dead."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import TCPStore
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd import peer_selection
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.topology.generators import star
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.base import Pending
from lightning_gossip.transport.pairwise_groups import Connections, EdgeTransport
from tests.runtime.cluster import eventually
from tests.runtime.peers import PATIENCE_S, Everybody, peers_of
from tests.transport.memory import MemoryNetwork
from tests.workers import run_threads


def test_who_has_to_wait_is_told_at_once_and_how_long() -> None:
    network = MemoryNetwork(4)
    transports = [network.transport(rank) for rank in range(4)]
    gossip = Gossip(transports[0], peers_of(star(4), 0))
    gossip.start()
    try:
        gossip.open(replica_of([torch.zeros(4)]), session=1, layout=1)
        ask = Message(Kind.EXCHANGE, session=1, layout=1, value=7)
        assert transports[1].request(0, ask, PATIENCE_S).kind is Kind.ACCEPT  # and sends nothing yet
        for place, rank in enumerate((2, 3), 1):
            answer = transports[rank].request(0, ask, PATIENCE_S)
            assert (answer.kind, answer.value) == (Kind.QUEUED, 7)
            assert answer.wait_us == place * PATIENCE_S * 1e6
        for rank in (1, 2, 3):
            if rank > 1:
                assert transports[rank].await_reply(0, PATIENCE_S).kind is Kind.ACCEPT
            transports[rank].swap(0, torch.ones(4), torch.zeros(4)).wait(PATIENCE_S)
        assert eventually(lambda: gossip.counters.exchanges == 3)
        gossip.drain([torch.zeros(4)])
    finally:
        gossip.close()


class SlowLink(EdgeTransport):
    CHUNK_S = 0.005

    @override
    def swap(self, peer: int, mine: torch.Tensor, theirs: torch.Tensor) -> Pending:
        threading.Event().wait(self.CHUNK_S)
        return super().swap(peer, mine, theirs)


@pytest.mark.alone
def test_nobody_gives_up_or_takes_for_dead_a_worker_that_is_busy_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight workers call one, at whom each waits for seven exchanges; an exchange takes ten chunks, 0.05 s or more."""
    monkeypatch.setattr(peer_selection, "_FLOOR_S", 0.1)
    chunks, n = 10, 9
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [WorkerId(rank, 1) for rank in range(n)]
    watches = [Everybody() for _ in members]
    drawn, gossips = [], []
    for rank in range(n):
        connections = Connections(another(store), another(store, timeout_s=1e6), another(store), another(store))
        transport = SlowLink(connections, "queue", rank=rank, world_size=n, timeout_s=PATIENCE_S)
        picker = PartnerPicker(star(n), rank)
        drawn.append(
            ChangingPeers(watches[rank], rank, members, star(n), roles="auto", picker=picker, ceiling_s=PATIENCE_S, now_s=now_s)
        )
        gossips.append(Gossip(transport, drawn[rank], chunk_bytes=40))
    models = [[torch.full((10 * chunks,), float(rank))] for rank in range(n)]
    try:
        for rank, gossip in enumerate(gossips):
            gossip.start()
            gossip.open(replica_of(models[rank]), session=1, layout=1)
            gossip.step(models[rank], step_s=0.01)
        assert eventually(lambda: gossips[0].counters.exchanges >= n)
        before, began_s = gossips[0].counters.exchanges, time.monotonic()
        assert eventually(lambda: gossips[0].counters.exchanges >= before + 16)
        per_s = 16 / (time.monotonic() - began_s)
        run_threads([lambda r=r: gossips[r].drain(models[r]) for r in range(n)], PATIENCE_S)  # type: ignore[misc]
        each = [gossip.counters.exchanges for gossip in gossips[1:]]
    finally:
        run_threads([lambda gossip=gossip: gossip.close() for gossip in gossips], PATIENCE_S)  # type: ignore[misc]
    assert [each.failed_exchanges for each in drawn] == [0] * n
    assert [watch.seen_to_close for watch in watches] == [[]] * n
    assert per_s > 0.5 / (chunks * SlowLink.CHUNK_S)
    assert max(each) - min(each) <= 2  # each in its turn
    assert torch.stack([model[0] for model in models]).mean(0) == pytest.approx(torch.full((100,), (n - 1) / 2).numpy())
