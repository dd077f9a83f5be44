"""Whom a worker of a test exchanges with."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.failure_detector import Verdict
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.runtime.clock import now_s

PATIENCE_S = 30.0  # a deadline that is met with much to spare


class Member(NamedTuple):
    initial_rank: int

    @property
    def spoken(self) -> str:
        return f"rank {self.initial_rank}"


class Everybody:
    """A monitor that hears everybody, except those that the test says."""

    def __init__(self) -> None:
        self.version = 0
        self.verdicts: dict[Any, Verdict] = {}
        self.asked = 0
        self.seen_to_close: list[Any] = []

    def verdict(self, worker: Any) -> Verdict:
        self.asked += 1
        return self.verdicts.get(worker, Verdict.ALIVE)

    def connection_lost(self, worker: Any) -> None:
        self.seen_to_close.append(worker)

    def change(self, worker: Any, verdict: Verdict) -> None:
        self.verdicts[worker] = verdict
        self.version += 1


def peers_of(
    topology: Topology, rank: int, *, seed: int = 0, timeout_s: float = PATIENCE_S, monitor: Everybody | None = None
) -> ChangingPeers[Member]:
    """Peers of which none may fail."""
    return ChangingPeers(
        Everybody() if monitor is None else monitor,
        rank,
        [Member(each) for each in range(topology.n)],
        topology,
        roles="auto",
        picker=PartnerPicker(topology, rank, seed=seed),
        ceiling_s=timeout_s,
        now_s=now_s,
        raises=True,
    )
