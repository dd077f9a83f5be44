"""The trace of a simulated run as a script for the runtime's gossip: real threads, each held until it is its turn.

Where a worker's threads are held, and the event of the trace that each place stands for:

| event | thread | held | has happened |
|---|---|---|---|
| request i, j | caller of i | before it becomes busy | when the message is in j's inbox |
| answer j, i | listener of j | before it decides | when the reply is on its way |
| refused i, j | caller of i | before it learns of it | when it may draw again |
| snapshot i, j | caller or listener of i | before it copies its model | when the copy is on its way |
| merge i, j | caller or listener of i | when j's copy has come | when it is free again |
| step i | the test's | | when its update has been pushed |
| close | the test's | | when every worker is told to drain |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.protocol import Answer, Averaged, GossipProtocol, Phase, Steps, Verdict
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.simulation import TraceEvent
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.base import Pending
from tests.runtime.peers import peers_of
from tests.transport.memory import MemoryNetwork, MemoryTransport
from tests.workers import run_threads

PATIENCE_S = 20.0
AT_ONCE_S = 2e-6  # a step time with which the next exchange is due at once; messages tell it in whole microseconds
PLAYED = ("request", "answer", "refused", "snapshot", "merge", "step", "close")

Turn = tuple[str, int, int]


class Director:
    """Lets the events of a script happen one at a time."""

    def __init__(self, trace: Sequence[TraceEvent]) -> None:
        begin: Turn = ("begin", -1, -1)  # nothing happens before all have opened their session
        self.script = [begin, *((event.kind, event.rank, event.peer) for event in trace if event.kind in PLAYED)]
        self._position = 0
        self._condition = threading.Condition()

    @property
    def now(self) -> Turn | None:
        return self.script[self._position] if self._position < len(self.script) else None

    def await_turn(self, kind: str, rank: int, peer: int | None = None) -> None:
        """Blocks until this is next; for good once the script is over."""

        def is_next() -> bool:
            return self.now is not None and self.now[:2] == (kind, rank) and peer in (None, self.now[2])

        with self._condition:
            if not self._condition.wait_for(lambda: is_next() or self.now is None, PATIENCE_S):
                raise AssertionError(f"{(kind, rank, peer)} does not come; the script stands at {self.now}")

    def is_turn(self, kind: str, rank: int) -> bool:
        return self.now is not None and self.now[:2] == (kind, rank)

    def done(self) -> None:
        with self._condition:
            self._position += 1
            self._condition.notify_all()

    def play(self, act: Callable[[Turn], None]) -> None:
        """The test's own events, until the script is over."""
        while (turn := self.now) is not None:
            if turn[0] in ("begin", "step", "close"):
                act(turn)
                self.done()
                continue
            with self._condition:
                moved = self._condition.wait_for(lambda turn=turn: self.now is not turn, PATIENCE_S)  # type: ignore[misc]
            assert moved, f"the script stands still at {turn}, event {self._position} of {len(self.script)}"


class HeldTransport(MemoryTransport):
    """Of a worker whose codec may greet before it copies its model."""

    def __init__(self, network: MemoryNetwork, rank: int, director: Director, *, greets: bool) -> None:
        super().__init__(network, rank)
        self._director = director
        self._greets = greets
        self._greeted = False

    def post(self, peer: int, message: Message) -> None:
        if message.kind is not Kind.EXCHANGE:
            return super().post(peer, message)
        assert self._director.now == ("request", self.rank, peer), "the partner is not the one that the simulation drew"
        super().post(peer, message)
        return self._director.done()

    def next_message(self) -> tuple[int, Message]:
        peer, message = super().next_message()
        if message.kind is Kind.EXCHANGE:
            self._director.await_turn("answer", self.rank, peer)
        return peer, message

    def reply(self, peer: int, message: Message) -> None:
        super().reply(peer, message)
        self._director.done()
        if message.kind is Kind.ACCEPT and not self._greets:
            self._director.await_turn("snapshot", self.rank, peer)

    def tell(self, peer: int, message: Message) -> None:
        super().reply(peer, message)  # the script knows no answer before the answer

    def await_reply(self, peer: int, timeout_s: float) -> Message:
        message = super().await_reply(peer, timeout_s)
        if message.kind is Kind.QUEUED:
            return message
        if message.kind is Kind.REFUSE:
            self._director.await_turn("refused", self.rank, peer)
        elif not self._greets:
            self._director.await_turn("snapshot", self.rank, peer)
        return message

    def swap(self, peer: int, mine: Tensor, theirs: Tensor) -> Pending:
        swap = super().swap(peer, mine, theirs)
        self._greeted = self._greets and not self._greeted
        if not self._greeted:
            self._director.done()
        director, rank, turn = self._director, self.rank, "snapshot" if self._greeted else "merge"

        class Held:
            def wait(self, timeout_s: float) -> None:
                swap.wait(timeout_s)
                director.await_turn(turn, rank, peer)

        return Held()


def replay(
    trace: Sequence[TraceEvent],
    topology: Topology,
    *,
    start: Tensor,
    update: Callable[[int, Tensor], Tensor],
    lr: float,
    seed: int,
    wire: Wire = "float32",
    options: GossipOptions | None = None,
) -> Tensor:
    """Play a trace of one session with the runtime's gossip.

    Args:
        trace: of a simulated run.
        topology: its graph.
        start: the model that all begin with, shape (d,).
        update: the gradient of a rank at a model.
        lr: learning rate.
        seed: of the partner choice.
        wire: see Gossip.
        options: of local steps and outer steps.

    Returns:
        The models at the end, shape (n, d).
    """
    n, director = topology.n, Director(trace)
    network = MemoryNetwork(n)
    transports = [HeldTransport(network, rank, director, greets=wire in ("int8", "int16")) for rank in range(n)]
    gossips = [Gossip(transports[rank], peers_of(topology, rank, seed=seed), wire=wire) for rank in range(n)]
    for gossip in gossips:
        gossip._peers.__class__ = HeldPeers
        gossip._protocol.__class__ = HeldProtocol
        gossip._protocol.director = director  # type: ignore[attr-defined]
    x = [start.clone() for _ in range(n)]
    drains: list[threading.Thread] = []
    local_steps = [LocalSteps(GossipOptions() if options is None else options) for _ in range(n)]
    steps, all_steps = 0, sum(event.kind == "step" for event in trace)

    def act(turn: Turn) -> None:
        kind, rank, _ = turn
        if kind == "step":
            nonlocal steps
            x[rank].add_(update(rank, x[rank]), alpha=-lr)
            gossip, tensors = gossips[rank], [x[rank]]
            local_steps[rank].step(
                tensors,
                progress=steps / all_steps,
                push_pull=lambda: gossip.step(tensors, step_s=AT_ONCE_S),
                publish=lambda: gossip._open_replica().publish(tensors),
            )
            gossip._open_replica().followers = local_steps[rank].followers
            steps += 1
            return
        if kind == "begin":
            for rank, gossip in enumerate(gossips):
                local_steps[rank].open(["x"], [x[rank]], topology)
                replica = replica_of([x[rank]])
                replica.followers = local_steps[rank].followers
                gossip.open(replica, session=1, layout=1)
            return
        for rank, gossip in enumerate(gossips):
            drains.append(threading.Thread(target=gossip.drain, args=([x[rank]],), daemon=True))
            drains[-1].start()
        for gossip in gossips:
            while gossip._protocol.phase is Phase.OPEN:
                drains[0].join(0.001)

    try:
        for gossip in gossips:
            gossip.start()
        director.play(act)
        for drain in drains:
            drain.join(PATIENCE_S)
            assert not drain.is_alive()
        for gossip in gossips:
            gossip.raise_failure()
        run_threads([lambda g=gossip: g.close() for gossip in gossips], PATIENCE_S)  # type: ignore[misc]
    finally:
        for gossip in gossips:
            gossip.close()
    return torch.stack(x)


class HeldPeers(ChangingPeers[Any]):
    """Waits as long as the script does; nobody tells a worker of the script's next event."""

    @property
    @override
    def looks_again_s(self) -> float:
        return 0.001

    @property
    @override
    def answer_s(self) -> float:
        return PATIENCE_S


class HeldProtocol(GossipProtocol):
    """Starts an exchange when the script says so, and tells when one or a refusal has been dealt with."""

    director: Director

    @override
    def _due_s(self) -> float:
        due_s = super()._due_s()
        return due_s if self.director.now is None or self.director.is_turn("request", self._rank) else math.inf

    @override
    def initiate(self) -> Steps:
        return self._told(super().initiate())

    @override
    def respond(self) -> Steps:
        return self._told(super().respond())

    def _told(self, steps: Steps) -> Steps:
        effect = next(steps)
        while True:
            result = yield effect
            try:
                effect = steps.send(result)
            except StopIteration:
                return
            finally:
                refused = isinstance(result, Answer) and result.verdict is Verdict.REFUSED
                kind = "refused" if refused else "merge" if isinstance(result, Averaged) else None
                if kind is not None and self.director.is_turn(kind, self._rank):
                    self.director.done()
