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
    NeighbourOptions,
    RoundsProtocol,
    StackedCorrection,
    add_term,
)
from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES, base, one_peer_exponential, one_peer_hypercube
from lightning_gossip.algorithm.topology.generators import complete, exponential, from_edges, make_sequence, ring, star
from lightning_gossip.algorithm.topology.mixing import MixingWeights, mixing_matrix
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.errors import ConfigurationError

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
    edges = Edges(TopologySequence.fixed(from_edges(4, [(0, 1), (2, 1), (3, 2), (0, 3)])), 2)
    edges.begin(arrived=arrived)
    assert list(edges.sources) == list(edges.targets) == [1, 3]
    assert edges.heard(3, arrived=int(peer_arrived), calling=calling) == averages
    assert edges.heard(1, arrived=0, calling=False)
    assert edges.sync_requested == calling  # and it stays
    assert edges.end()
    edges.begin(arrived=arrived)
    assert list(edges.sources) == list(edges.targets) == ([1, 3] if averages else [1])


def test_each_round_has_its_own_peers() -> None:
    edges = Edges(one_peer_hypercube(8), 5)
    seen = []
    for _ in range(4):
        edges.begin(arrived=False)
        seen.append((dict(edges.sources), edges.targets))
        assert edges.end()
    assert seen == [({4: 0.5}, (4,)), ({7: 0.5}, (7,)), ({1: 0.5}, (1,)), ({4: 0.5}, (4,))]


def test_a_closed_edge_is_left_out_when_its_round_comes_again() -> None:
    edges = Edges(one_peer_hypercube(4), 0)
    for peer in (1, 2):
        edges.begin(arrived=True)
        assert edges.heard(peer, arrived=1 - (peer == 2), calling=False) == (peer == 2)
        assert edges.end()
    edges.begin(arrived=True)
    assert edges.sources == {}
    assert edges.targets == ()


def test_in_a_directed_round_a_worker_sends_to_one_and_receives_from_another() -> None:
    edges = Edges(one_peer_exponential(8), 1)
    edges.begin(arrived=False)
    assert (edges.sources, edges.targets) == ({0: 0.5}, (2,))
    edges.begin(arrived=False)
    assert (edges.sources, edges.targets) == ({7: 0.5}, (3,))


def test_a_directed_graph_is_left_when_all_are_known_to_have_arrived() -> None:
    """Three rounds in which this worker sends and hears of at least 1, 2, 3: everybody has been heard of by then."""
    edges = Edges(one_peer_exponential(8), 0)
    said = []
    for theirs in (0, 1, 2, 3):
        edges.begin(arrived=True)
        said.append(edges.arrived)
        assert edges.heard(next(iter(edges.sources)), arrived=theirs, calling=False)  # it averages to the last
        assert edges.end() == (theirs < 3)
    assert said == [1, 1, 2, 3]


FIXED = [
    TopologySequence.fixed(topology, weights)
    for weights in ("metropolis", "uniform")
    for topology in (
        ring(5),
        star(5),
        exponential(8),
        complete(1),
        from_edges(6, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (3, 5)]),
    )
]


@pytest.mark.parametrize("sequence", [*FIXED, base(6), base(7, 2), one_peer_exponential(6)], ids=repr)
def test_all_corrections_at_once_are_each_worker_s_to_the_bit(sequence: TopologySequence) -> None:
    x = torch.randn(sequence.n, 7, generator=torch.Generator().manual_seed(1))
    for number in range(len(sequence) + 1):
        alone = []
        for rank in range(sequence.n):
            correction = torch.zeros(7)
            for peer, weight in sequence.row(number, rank):
                add_term(correction, x[rank], x[peer].clone(), weight)
            alone.append(correction)
        together = StackedCorrection(sequence)(x, number=number)
        assert torch.equal(together, torch.stack(alone))
        assert torch.allclose(x.double() + together, torch.from_numpy(sequence.matrix(number)) @ x.double(), atol=1e-6)


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_options_take_a_graph_that_changes_by_name_and_as_it_is(name: str) -> None:
    assert NeighbourOptions(topology=name).topology_name == name
    sequence = NeighbourOptions(topology=name).sequence(8)
    assert NeighbourOptions(topology=sequence).sequence(8) is sequence
    with pytest.raises(ConfigurationError, match="of 8 ranks for 4 workers"):
        NeighbourOptions(topology=sequence).check(4)


@pytest.mark.parametrize("weights", ["metropolis", "uniform"])
def test_a_graph_that_stays_the_same_has_one_round(weights: MixingWeights) -> None:
    sequence = NeighbourOptions(topology="star", weights=weights).sequence(5)
    assert len(sequence) == 1
    assert (sequence.matrix(3) == mixing_matrix(star(5), weights)).all()


def test_weights_of_a_graph_that_has_its_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'base_2' comes with its own matrices"):
        NeighbourOptions(topology="base_2", weights="uniform")


# -- n workers -------------------------------------------------------------------------------------------------------------


class Cluster:
    """n workers with a number for a model, one of which goes on at a time; a message waits until it is read."""

    def __init__(self, sequence: TopologySequence, steps: list[int], overlap: bool) -> None:
        n = sequence.n
        self.x = [float(3 * rank) for rank in range(n)]
        self.total = sum(self.x)
        self.edges = [Edges(sequence, rank) for rank in range(n)]
        self.begun: dict[int, float] = {}
        self.sent: dict[tuple[int, int], deque[tuple[float, int]]] = defaultdict(deque)
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
                edges.begin(arrived=effect.arrived)
                self.begun[rank] = self.x[rank]
                for peer in edges.targets:
                    self.sent[rank, peer].append((self.begun[rank], edges.arrived))
                continue
            for peer, weight in edges.sources.items():
                while not self.sent[peer, rank]:
                    yield
                theirs, arrived = self.sent[peer, rank].popleft()
                if edges.heard(peer, arrived=arrived, calling=False):
                    self.x[rank] += weight * (theirs - self.begun[rank])
            outcome = edges.end()

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
def cases(draw: st.DrawFn) -> tuple[TopologySequence, list[int]]:
    n = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["graph", "base", "one_peer_exponential"]))
    if kind == "graph":
        edges = {(draw(st.integers(0, node - 1)), node) for node in range(1, n)}
        sequence = make_sequence(sorted(edges), n)
    else:
        sequence = one_peer_exponential(n) if kind == "one_peer_exponential" else base(n, draw(st.integers(1, 2)))
    return sequence, draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))


@given(case=cases(), overlap=st.booleans(), seed=st.integers(0, 1000))
def test_no_order_of_events_hangs_or_changes_the_sum(
    case: tuple[TopologySequence, list[int]], overlap: bool, seed: int
) -> None:
    cluster = Cluster(*case, overlap)
    cluster.run(random.Random(seed))
    assert sum(cluster.x) == pytest.approx(cluster.total)
    assert not any(cluster.sent.values())
    assert not any(edges.is_open for edges in cluster.edges)


@pytest.mark.parametrize("sequence", [base(6), one_peer_exponential(8)], ids=repr)
def test_all_arrive_at_the_mean_if_the_graph_is_exact_and_one_is_late(sequence: TopologySequence) -> None:
    """The rounds that the first make while they wait for the last are a whole cycle, and more."""
    cluster = Cluster(sequence, [0] * (sequence.n - 1) + [2 * len(sequence)], overlap=True)
    cluster.run(random.Random(1))
    waited = [x for rank, x in enumerate(cluster.x) if rank != sequence.n - 1]
    assert max(waited) - min(waited) < abs(cluster.total)  # they have heard of its updates
    assert sum(cluster.x) == pytest.approx(cluster.total)
