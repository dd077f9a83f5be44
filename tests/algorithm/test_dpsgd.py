"""D-PSGD's rounds alone: when they begin and end, when an edge is closed, and n workers in any order of events."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Generator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.dpsgd import (
    Begin,
    Complete,
    Edges,
    Effects,
    RoundsProtocol,
    StackedCorrection,
    add_term,
    neighbour_weights,
)
from lightning_gossip.algorithm.topology.generators import complete, exponential, from_edges, ring, star
from lightning_gossip.algorithm.topology.mixing import MixingWeights, mixing_matrix
from lightning_gossip.algorithm.topology.topology import Topology

BEGIN, DONE, ARRIVED = Begin(), Complete(), Begin(arrived=True)


def done(effects: Effects, rounds: int = 1) -> list[Begin | Complete]:
    """All effects; after so many rounds in which this worker has arrived its edges are closed."""
    seen: list[Begin | Complete] = []
    outcome: bool | None = None
    while True:
        try:
            effect = effects.send(outcome)  # type: ignore[arg-type]
        except StopIteration:
            return seen
        seen.append(effect)
        outcome = seen.count(ARRIVED) < rounds if isinstance(effect, Complete) else None


ORDERS = [
    # f: a forward pass begins; s: the optimizer steps, after two forward passes; a, 2: arrives, and has one or two rounds left
    (True, "fsfs", [[BEGIN], [Complete(2)], [BEGIN], [Complete(2)]]),
    (True, "ffs", [[BEGIN], [], [Complete(2)]]),  # two batches to a step
    (False, "fsffs", [[], [BEGIN, DONE], [], [], [BEGIN, DONE]]),
    (True, "s", [[BEGIN, DONE]]),  # a step that no forward pass of the trainer's has led to
    (True, "fsa", [[BEGIN], [Complete(2)], [ARRIVED, DONE]]),
    (True, "fs2", [[BEGIN], [Complete(2)], [ARRIVED, DONE] * 2]),
    (True, "fa", [[BEGIN], [DONE, ARRIVED, DONE]]),  # begun for a step that was not made
    (False, "fa", [[], [ARRIVED, DONE]]),
    (True, "aafs", [[ARRIVED, DONE], [ARRIVED, DONE], [BEGIN], [Complete(2)]]),
]


@pytest.mark.parametrize(("overlap", "events", "effects"), ORDERS)
def test_each_order_of_events_has_its_effects(overlap: bool, events: str, effects: list[list[Begin | Complete]]) -> None:
    worker = RoundsProtocol(overlap=overlap)
    told = {
        "f": lambda: done(worker.begin_step()),
        "s": lambda: done(worker.step(2)),
        "a": lambda: done(worker.arrive()),
        "2": lambda: done(worker.arrive(), rounds=2),
    }
    assert [told[event]() for event in events] == effects


@pytest.mark.parametrize(
    ("arrived", "peer_arrived", "calling", "averages"),
    [(False, False, False, True), (True, False, False, True), (False, True, True, True), (True, True, False, False)],
)
def test_the_round_in_which_both_ends_have_arrived_closes_the_edge(
    arrived: bool, peer_arrived: bool, calling: bool, averages: bool
) -> None:
    edges = Edges([3, 1])
    assert edges.heard(3, arrived=arrived, peer_arrived=peer_arrived, calling=calling) == averages
    assert edges.open == ([1, 3] if averages else [1])
    assert edges.sync_requested == calling
    edges.heard(1, arrived=False, peer_arrived=False, calling=False)
    assert edges.sync_requested == calling  # and it stays


@pytest.mark.parametrize("weights", ["metropolis", "uniform"])
@pytest.mark.parametrize(
    "topology",
    [ring(5), star(5), exponential(8), complete(1), from_edges(6, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (3, 5)])],
    ids=["ring", "star", "exponential", "alone", "irregular"],
)
def test_all_corrections_at_once_are_each_worker_s_to_the_bit(topology: Topology, weights: MixingWeights) -> None:
    x = torch.randn(topology.n, 7, generator=torch.Generator().manual_seed(1))
    alone = []
    for rank in range(topology.n):
        correction = torch.zeros(7)
        for peer, weight in neighbour_weights(topology, weights, rank).items():
            add_term(correction, x[rank], x[peer].clone(), weight)
        alone.append(correction)
    together = StackedCorrection(topology, weights)(x)
    assert torch.equal(together, torch.stack(alone))
    matrix = torch.from_numpy(mixing_matrix(topology, weights))
    assert torch.allclose(x.double() + together, matrix @ x.double(), atol=1e-6)


# -- n workers -------------------------------------------------------------------------------------------------------------


class Cluster:
    """n workers with a number for a model, one of which goes on at a time; a message waits until it is read."""

    def __init__(self, topology: Topology, steps: list[int], overlap: bool) -> None:
        n = topology.n
        self.weights = [neighbour_weights(topology, "metropolis", rank) for rank in range(n)]
        self.x = [float(3 * rank) for rank in range(n)]
        self.total = sum(self.x)
        self.edges = [Edges(weights) for weights in self.weights]
        self.begun: dict[int, tuple[float, bool]] = {}
        self.sent: dict[tuple[int, int], deque[tuple[float, bool]]] = defaultdict(deque)
        self.running = {rank: self.work(rank, steps[rank], overlap) for rank in range(n)}

    def work(self, rank: int, steps: int, overlap: bool) -> Generator[None, None, None]:
        worker = RoundsProtocol(overlap=overlap)
        for number in range(steps):
            yield from self.do(rank, worker.begin_step())
            self.x[rank] += number + rank
            self.total += number + rank
            yield from self.do(rank, worker.step())
        yield from self.do(rank, worker.arrive())

    def do(self, rank: int, effects: Effects) -> Generator[None, None, None]:
        """Goes on at any effect and whenever a message is missing."""
        outcome, edges = None, self.edges[rank]
        while True:
            try:
                effect = effects.send(outcome)  # type: ignore[arg-type]
            except StopIteration:
                return
            yield
            outcome = None
            if isinstance(effect, Begin):
                self.begun[rank] = self.x[rank], effect.arrived
                for peer in edges.open:
                    self.sent[rank, peer].append(self.begun[rank])
                continue
            model, arrived = self.begun[rank]
            for peer in list(edges.open):
                while not self.sent[peer, rank]:
                    yield
                theirs, peer_arrived = self.sent[peer, rank].popleft()
                if edges.heard(peer, arrived=arrived, peer_arrived=peer_arrived, calling=False):
                    self.x[rank] += self.weights[rank][peer] * (theirs - model)
            outcome = bool(edges.open)

    def run(self, order: random.Random) -> None:
        idle = 0
        while self.running:
            rank = order.choice(sorted(self.running))
            before = sum(map(len, self.sent.values())), self.x[rank]
            if next(self.running[rank], "ended") == "ended":
                del self.running[rank]
                idle = 0
            idle = 0 if before != (sum(map(len, self.sent.values())), self.x[rank]) else idle + 1
            assert idle < 1000, "all wait for each other"


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    n = draw(st.integers(1, 5))
    edges = {(draw(st.integers(0, node - 1)), node) for node in range(1, n)}
    return from_edges(n, sorted(edges)), draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))


@given(case=cases(), overlap=st.booleans(), seed=st.integers(0, 1000))
def test_no_order_of_events_hangs_or_changes_the_sum(case: tuple[Topology, list[int]], overlap: bool, seed: int) -> None:
    cluster = Cluster(*case, overlap)
    cluster.run(random.Random(seed))
    assert sum(cluster.x) == pytest.approx(cluster.total)
    assert not any(cluster.sent.values())
    assert not any(edges.open for edges in cluster.edges)
