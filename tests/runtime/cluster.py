"""Workers of one process: gossip on the memory transport, driven by the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.step_timer import Activity
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.clock import Timeline
from tests.runtime.peers import PATIENCE_S, peers_of
from tests.transport.faults import Fault, FaultyTransport
from tests.transport.memory import MemoryNetwork
from tests.workers import run_threads


class Watch:
    """Counts the exchanges of all workers and wakes whoever waits for more."""

    def __init__(self) -> None:
        self.ended = threading.Condition()
        self.ends = 0  # each exchange has two

    def count(self) -> None:
        with self.ended:
            self.ends += 1
            self.ended.notify_all()

    def wait_for(self, condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> bool:
        with self.ended:
            return self.ended.wait_for(condition, deadline_s)


class WatchedTimeline(Timeline):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def record(self, activity: Activity, start_s: float, end_s: float, peer: int | None = None) -> None:
        super().record(activity, start_s, end_s, peer)
        self._watch.count()


class Cluster:
    """One gossip a rank of a topology, each with a model x of float64, in chunks of a few elements.

    Args:
        topology: who may average with whom.
        numel: elements of a model.
        faults: by rank.
        retention, push_every: see Replica.
        wire: see Gossip.
        chunk: elements.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        numel: int = 40,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        exchanges_per_step: float = 1.0,
        timeout_s: float = PATIENCE_S,
        retention: float = 1.0,
        push_every: int = 1,
        seed: int = 0,
        wire: Wire = "float32",
        chunk: int = 10,
    ) -> None:
        self.n = topology.n
        self.exchanges_per_step = exchanges_per_step
        self.watch = Watch()
        self.timelines = [WatchedTimeline(self.watch) for _ in range(self.n)]
        network = MemoryNetwork(self.n)
        self.transports = [FaultyTransport(network.transport(rank), (faults or {}).get(rank, ())) for rank in range(self.n)]
        self.peers = [peers_of(topology, rank, seed=seed, timeout_s=timeout_s) for rank in range(self.n)]
        self.gossips = [
            Gossip(
                self.transports[rank],
                self.peers[rank],
                timeline=self.timelines[rank],
                chunk_bytes=8 * chunk,
                wire=wire,
            )
            for rank in range(self.n)
        ]
        self.generator = torch.Generator().manual_seed(seed)
        self.retention, self.push_every = [retention, 1.0], push_every
        self.x: list[list[Tensor]] = []
        self.reset(numel)
        self.session = 0
        self.opened_ends = 0  # ends of exchanges before the session opened

    def reset(self, numel: int) -> None:
        """New independent models."""
        first = numel // 3
        draw = torch.randn(self.n, numel, generator=self.generator, dtype=torch.float64)
        self.x = [[row[:first].clone(), row[first:].clone()] for row in draw]

    def start(self) -> None:
        for gossip in self.gossips:
            gossip.start()

    def open(self, rank: int, session: int | None = None, layout: int = 1) -> None:
        replica = replica_of(self.x[rank], retention=self.retention, push_every=self.push_every)
        session = self.session if session is None else session
        self.gossips[rank].open(replica, session=session, layout=layout, exchanges_per_step=self.exchanges_per_step)

    def open_all(self) -> None:
        self.session += 1
        self.opened_ends = self.watch.ends
        for rank in range(self.n):
            self.open(rank)

    def step_all(self, step_s: float | Sequence[float]) -> None:
        """One step of lr 0 for everybody, which also tells the step time."""
        for rank, gossip in enumerate(self.gossips):
            gossip.step(self.x[rank], step_s=step_s if isinstance(step_s, float) else step_s[rank])

    def drain_all(self) -> None:
        for rank, gossip in enumerate(self.gossips):
            gossip.drain(self.x[rank])

    def wait_for_exchanges(self, count: int, *, since_open: bool = False) -> None:
        """So many more from now on; since the session opened, where no more may come than are waited for."""
        goal = (self.opened_ends if since_open else self.watch.ends) + 2 * count
        assert self.watch.wait_for(lambda: self.watch.ends >= goal or self.failed), self.counts
        self.raise_failure()

    @property
    def failed(self) -> bool:
        return any(gossip._protocol.failure is not None for gossip in self.gossips)

    def raise_failure(self) -> None:
        for gossip in self.gossips:
            gossip.raise_failure()

    @property
    def counts(self) -> list[int]:
        return [gossip.counters.exchanges for gossip in self.gossips]

    def models(self) -> Tensor:
        """Shape (n, numel)."""
        return torch.stack([torch.cat(x) for x in self.x])

    def total(self) -> Tensor:
        return self.models().sum(0)

    def distance(self) -> float:
        """Consensus distance: Σ_i ‖x_i − x̄‖²."""
        models = self.models()
        return float((models - models.mean(0)).square().sum())

    def close_together(self) -> None:
        run_threads([lambda gossip=gossip: gossip.close() for gossip in self.gossips], PATIENCE_S)  # type: ignore[misc]
        alive = [thread for gossip in self.gossips for thread in gossip._threads if thread.is_alive()]
        assert not alive

    def abandon(self) -> None:
        """The end after a failure; closing the transports ends the listeners as the end of the process would."""
        for gossip in self.gossips:
            gossip.close()
        for transport in self.transports:
            transport.close()
        for gossip in self.gossips:
            for thread in gossip._threads:
                thread.join(PATIENCE_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Started; closed together at the end, or abandoned if something went wrong."""
        self.start()
        try:
            yield self
            self.close_together()
        finally:
            self.abandon()


@contextlib.contextmanager
def training(cluster: Cluster, step: Callable[[int, int], None]) -> Iterator[None]:
    """A training thread a rank that calls ``step(rank, number)`` until the block ends; their failures are raised."""
    stop = threading.Event()

    def train(rank: int) -> None:
        number = 0
        while not stop.is_set():
            step(rank, number)
            number += 1
            stop.wait(0.0003)

    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            train(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(cluster.n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def eventually(condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> bool:
    """Whether a condition that nobody announces becomes true in time."""
    end_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end_s:
            return False
        pause.wait(0.002)
    return True
