"""How a worker that comes back finds the job while its store is being lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.membership import membership
from lightning_gossip.runtime.membership import stores as module
from lightning_gossip.runtime.membership.stores import Stores, parse
from lightning_gossip.strategies.lightning import fault_tolerance
from lightning_gossip.strategies.lightning.fault_tolerance import Survival


def test_a_worker_that_comes_back_as_the_jobs_store_ends_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(fault_tolerance, "call_at_exit", lambda call: None)
    monkeypatch.setattr(membership._Process, "kept", None)
    keeps = [Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)]
    holder, other = keeps[0].own, Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    for each in (keeps[0], other):
        each.adopt(1, holder)
        each.publish(1, holder)
    job = other.connect()
    job.set("keys/members/stores", json.dumps([[0, 1, holder], [2, 1, other.own]]))
    job.set("keys/members/members", json.dumps([[0, 1], [2, 1]]))
    job.set("keys/members/incarnation/1", "1")
    introduced = fault_tolerance._introduced

    def loses(store: Store, *args: Any) -> Any:
        """The process that keeps the store ends after the joiner's first question."""
        if keeps:
            keeps.clear()
            other.adopt(2, other.own)
            next_store = other.connect()
            next_store.set("keys/members/members", json.dumps([[2, 1]]))
            next_store.set("keys/members/incarnation/1", "1")
            other.publish(2, other.own)
        return introduced(store, *args)

    monkeypatch.setattr(fault_tolerance, "_introduced", loses)
    host, port = parse(holder)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    made = fault_tolerance.begin(
        Survival(),
        keys="keys",
        initial_rank=1,
        workers=3,
        make_group=lambda store, rank, size: None,
        timeout_s=20.0,
        collective_timeout_s=20.0,
    )
    assert made.me == WorkerId(1, 2)
    assert made.monitor.stores is not None
    assert (made.monitor.stores.view, made.monitor.stores.address) == (2, other.own)
    assert made.monitor.protocol.hosts[WorkerId(2, 1)] == other.own
    assert not keeps
