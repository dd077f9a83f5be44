from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES, base, one_peer_exponential
from lightning_gossip.algorithm.topology.generators import (
    TOPOLOGIES,
    complete,
    exponential,
    from_edges,
    make_sequence,
    ring,
    star,
    torus,
)
from lightning_gossip.algorithm.topology.mixing import MixingWeights
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.dpsgd import NeighbourRounds
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.transport.faults import Fault, FaultyTransport
from tests.transport.memory import MemoryNetwork
from tests.workers import run_threads

NUMEL = 20
SHAPES = [(3, 4), (8,)]


class Workers:
    """Rounds on every rank of a topology, each with a model x of float64 in two tensors.

    Args:
        topology: who is whose neighbour.
        weights: see `mixing_matrix`.
        faults: by rank.
        retention: see NeighbourRounds.
    """

    def __init__(
        self,
        topology: Topology | TopologySequence,
        weights: MixingWeights = "metropolis",
        *,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        timeout_s: float = PATIENCE_S,
        retention: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        self.n = topology.n
        sequence = make_sequence(topology, self.n, weights=weights)
        self.matrices = [torch.from_numpy(sequence.matrix(number)) for number in range(len(sequence))]
        self.matrix = self.matrices[0]
        network = MemoryNetwork(self.n)
        self.timelines = [Timeline() for _ in range(self.n)]
        self.generator = torch.Generator().manual_seed(seed)
        self.retention = retention
        self.rounds = []
        for rank in range(self.n):
            transport = FaultyTransport(network.transport(rank), (faults or {}).get(rank, ()))
            self.rounds.append(NeighbourRounds(transport, sequence, timeout_s=timeout_s, timeline=self.timelines[rank]))
        self.x: list[list[Tensor]] = []
        self.open()

    def open(self) -> None:
        """A session, with new independent models."""
        draw = torch.randn(self.n, NUMEL, generator=self.generator, dtype=torch.float64)
        self.x = [split(row.clone()) for row in draw]
        for rounds, x in zip(self.rounds, self.x, strict=True):
            rounds.open(x, retention=self.retention)

    def models(self) -> Tensor:
        """Shape (n, numel)."""
        return torch.stack([torch.cat([t.flatten() for t in x]) for x in self.x])

    def run(self, script: Callable[[int], object]) -> list[object]:
        """On all ranks at once."""
        return run_threads([partial(script, rank) for rank in range(self.n)], PATIENCE_S)

    def step(self, rank: int) -> None:
        self.rounds[rank].begin()
        self.rounds[rank].complete()

    def overlapped(self, rank: int, update: Tensor) -> None:
        """The update is made while the round is under way."""
        self.rounds[rank].begin()
        self.add(rank, update)
        self.rounds[rank].complete()

    def add(self, rank: int, update: Tensor) -> None:
        for x, u in zip(self.x[rank], split(update), strict=True):
            x += u

    def arrive(self, rank: int, *, calling: bool = False) -> int:
        """As the strategy does; returns the rounds that it took."""
        count = 1
        self.rounds[rank].begin(arrived=True, calling=calling)
        while self.rounds[rank].complete():
            self.rounds[rank].begin(arrived=True, calling=calling)
            count += 1
        return count

    def update(self, rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        return torch.randn(NUMEL, generator=generator, dtype=torch.float64)


def split(row: Tensor) -> list[Tensor]:
    return [piece.reshape(shape) for piece, shape in zip(row.split([12, 8]), SHAPES, strict=True)]


def close_to(ours: Tensor, expected: Tensor, rounds: int = 1) -> bool:
    scale = 1 + float(expected.abs().max())
    return float((ours - expected).abs().max()) <= 1e-14 * scale * (1 + rounds)


IRREGULAR = from_edges(6, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (3, 5)])
CASES = [
    *[pytest.param(make(n), "metropolis", id=f"{name} {n}") for name, make in TOPOLOGIES.items() for n in (1, 4, 8)],
    *[pytest.param(make(6), "uniform", id=f"{name} uniform") for name, make in TOPOLOGIES.items() if name != "hypercube"],
    pytest.param(IRREGULAR, "metropolis", id="irregular"),
    pytest.param(IRREGULAR, "uniform", id="irregular uniform"),
    pytest.param(ring(5), "metropolis", id="odd ring"),
    *[pytest.param(make(n), "metropolis", id=f"{name} {n}") for name, make in SEQUENCES.items() for n in (1, 2, 8)],
    *[pytest.param(SEQUENCES[name](7), "metropolis", id=f"{name} 7") for name in ("base_2", "base_3", "one_peer_exponential")],
]


# -- W x -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "weights"), CASES)
def test_rounds_are_w_applied_to_the_stacked_models(topology: Topology | TopologySequence, weights: MixingWeights) -> None:
    workers = Workers(topology, weights)
    x = workers.models()
    for number in range(1, 5):
        workers.run(workers.step)
        x = workers.matrices[(number - 1) % len(workers.matrices)] @ x
        assert close_to(workers.models(), x, number)


@pytest.mark.parametrize(("topology", "weights"), CASES)
def test_an_overlapped_round_adds_the_correction_to_the_update(
    topology: Topology | TopologySequence, weights: MixingWeights
) -> None:
    """X ← W X + U: what is averaged is what the models were when the round began. Nobody waits between the rounds."""
    workers = Workers(topology, weights)
    x = workers.models()
    count = 5

    def train(rank: int) -> None:
        for number in range(count):
            workers.overlapped(rank, workers.update(rank, number))

    workers.run(train)
    for number in range(count):
        x = workers.matrices[number % len(workers.matrices)] @ x + torch.stack(
            [workers.update(rank, number) for rank in range(workers.n)]
        )
    assert close_to(workers.models(), x, count)


@pytest.mark.parametrize(("topology", "weights"), CASES)
def test_the_sum_changes_by_the_local_updates_only(topology: Topology | TopologySequence, weights: MixingWeights) -> None:
    workers = Workers(topology, weights)
    expected = workers.models().sum(0)
    count = 30

    def train(rank: int) -> None:
        for number in range(count):
            if number % 3:
                workers.overlapped(rank, workers.update(rank, number))
            else:
                workers.add(rank, workers.update(rank, number))
                workers.step(rank)

    workers.run(train)
    for rank in range(workers.n):
        expected = expected + sum(workers.update(rank, number) for number in range(count))
    assert close_to(workers.models().sum(0), expected, count)


def test_one_uniform_round_of_a_complete_graph_is_the_mean() -> None:
    workers = Workers(complete(6), "uniform")
    mean = workers.models().mean(0)
    workers.run(workers.step)
    assert close_to(workers.models(), mean.expand(6, -1))


def test_models_approach_the_mean_at_the_rate_of_the_spectral_gap() -> None:
    """From the second eigenspace a round contracts by exactly the second eigenvalue."""
    workers = Workers(ring(8))
    values, vectors = np.linalg.eigh(workers.matrix.numpy())
    second = torch.from_numpy(vectors[:, -2])
    for rank, x in enumerate(workers.x):
        for t in x:
            t.fill_(float(second[rank]))
    for _ in range(10):
        before = workers.models().norm()
        workers.run(workers.step)
        assert float(workers.models().norm() / before) == pytest.approx(float(values[-2]), rel=1e-12)


def test_half_precision_models_keep_the_sum_to_their_own_rounding() -> None:
    workers = Workers(ring(4))
    x = [[torch.randn(64, generator=workers.generator).bfloat16()] for _ in range(4)]
    before = torch.stack([model[0].double() for model in x])
    for rounds, model in zip(workers.rounds, x, strict=True):
        rounds.open(model)
    workers.run(workers.step)
    after = torch.stack([model[0].double() for model in x])
    expected = workers.matrix @ before
    assert bool(((after - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all())


def test_of_the_correction_of_a_running_statistic_the_forward_passes_leave_a_share() -> None:
    workers = Workers(ring(5), retention=[1.0, 0.9])
    before = workers.models()

    def train(rank: int) -> None:
        workers.rounds[rank].begin()
        workers.rounds[rank].complete(forward_passes=2)

    workers.run(train)
    correction = workers.matrix @ before - before
    correction[:, 12:] *= 0.9**2
    assert close_to(workers.models(), before + correction)


# -- early arrivals --------------------------------------------------------------------------------------------------------


def train_and_arrive(workers: Workers, steps: Sequence[int], *, overlap: bool = True) -> list[int]:
    """Rank r makes steps[r] rounds with an update each, then arrives; returns the rounds that the arrivals took."""

    def train(rank: int) -> int:
        for number in range(steps[rank]):
            if overlap:
                workers.overlapped(rank, workers.update(rank, number))
            else:
                workers.add(rank, workers.update(rank, number))
                workers.step(rank)
        return workers.arrive(rank)

    return workers.run(train)  # type: ignore[return-value]


def expected_sum(workers: Workers, before: Tensor, steps: Sequence[int]) -> Tensor:
    total = before.sum(0)
    for rank, count in enumerate(steps):
        for number in range(count):
            total = total + workers.update(rank, number)
    return total


ARRIVALS = [
    pytest.param(ring(4), [0, 0, 0, 0], id="nobody makes a step"),
    pytest.param(ring(4), [0, 7, 0, 0], id="one makes all the steps"),
    pytest.param(ring(6), [1, 2, 3, 4, 5, 6], id="one after the other"),
    pytest.param(star(5), [0, 9, 9, 9, 9], id="the hub first"),
    pytest.param(star(5), [9, 0, 1, 0, 1], id="the hub last"),
    pytest.param(complete(4), [3, 3, 4, 3], id="one step more"),
    pytest.param(from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)]), [9, 0, 0, 0, 9], id="the ends of a path last"),
    pytest.param(complete(1), [5], id="alone"),
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("topology", "steps"), ARRIVALS)
def test_workers_that_arrive_early_wait_for_nobody_in_vain(topology: Topology, steps: list[int], overlap: bool) -> None:
    workers = Workers(topology)
    before = workers.models()
    arrivals = train_and_arrive(workers, steps, overlap=overlap)
    assert close_to(workers.models().sum(0), expected_sum(workers, before, steps), sum(steps) + 1)
    for rank in range(topology.n):
        last = max((steps[peer] for peer in topology.neighbours(rank)), default=0)
        assert arrivals[rank] == max(last - steps[rank], 0) + 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", [[0] * 6, [0, 7, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6], [9, 9, 9, 9, 9, 2]], ids=str)
@pytest.mark.parametrize("sequence", [base(6), base(6, 2), one_peer_exponential(6)], ids=repr)
def test_early_arrivals_keep_the_sum_where_the_graph_changes(
    sequence: TopologySequence, steps: list[int], overlap: bool
) -> None:
    workers = Workers(sequence)
    before = workers.models()
    taken = train_and_arrive(workers, steps, overlap=overlap)
    assert close_to(workers.models().sum(0), expected_sum(workers, before, steps), sum(steps) + 1)
    if sequence.is_symmetric:  # a peer is met once more, in the round in which both have arrived
        assert all(steps[rank] + count <= max(steps) + 2 * len(sequence) for rank, count in enumerate(taken))
    else:  # all leave together
        assert {steps[rank] + count for rank, count in enumerate(taken)} == {max(steps) + sequence.spread}


def test_each_round_of_an_exact_graph_is_swapped_with_its_peers_only() -> None:
    """Six workers under Base-2: the mean after four rounds, in which each has sent at most four models."""
    sequence = base(6)
    workers = Workers(sequence)
    mean = workers.models().mean(0)
    for _ in range(len(sequence)):
        workers.run(workers.step)
    assert close_to(workers.models(), mean.expand(6, -1), len(sequence))
    for rank, rounds in enumerate(workers.rounds):
        assert len(rounds._theirs) == 1  # one buffer, though it meets several
        sent = sum(len(sequence.receivers(number, rank)) for number in range(len(sequence)))
        assert rounds.exchanges == sent <= 4
        assert rounds.bytes_sent == sent * (NUMEL + 2) * 8


def test_a_directed_round_that_fails_is_a_peer_error() -> None:
    workers = Workers(one_peer_exponential(4), timeout_s=0.2)
    workers.rounds[0].begin()
    with pytest.raises(PeerError) as caught:
        workers.rounds[0].complete()
    assert (caught.value.rank, caught.value.phase) == (3, "exchange")


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Topology, list[int], list[float]]:
    n = draw(st.integers(1, 6))
    edges = {(draw(st.integers(0, node - 1)), node) for node in range(1, n)}
    if n > 1:
        possible = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])
        edges |= draw(st.sets(possible, max_size=n))
    steps = draw(st.lists(st.integers(0, 8), min_size=n, max_size=n))
    delays = draw(st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.002]), min_size=n, max_size=n))
    return from_edges(n, sorted(edges)), steps, delays


@settings(max_examples=40)
@given(case=arrivals(), overlap=st.booleans())
def test_no_numbers_of_steps_hang_or_change_the_sum(case: tuple[Topology, list[int], list[float]], overlap: bool) -> None:
    topology, steps, delays = case
    workers = Workers(topology, faults={rank: [Fault("delay", "swap", seconds=delays[rank])] for rank in range(topology.n)})
    before = workers.models()
    taken = train_and_arrive(workers, steps, overlap=overlap)
    assert close_to(workers.models().sum(0), expected_sum(workers, before, steps), sum(steps) + 1)
    for i, j in topology.edges:  # the edge is closed by the round in which both ends have arrived
        assert min(steps[i] + taken[i], steps[j] + taken[j]) >= max(steps[i], steps[j]) + 1


def test_a_worker_that_has_arrived_is_averaged_with_by_those_that_have_not() -> None:
    """Two workers of a pair: rank 1 makes no step, yet after each of rank 0's both are at the mean."""
    workers = Workers(complete(2))
    mean = workers.models().mean(0)
    train_and_arrive(workers, [0, 0])
    assert not close_to(workers.models(), mean.expand(2, -1))  # both had arrived: nothing is averaged
    workers.open()
    mean = workers.models().mean(0)

    def train(rank: int) -> None:
        if rank == 0:
            workers.step(0)
        workers.arrive(rank)

    workers.run(train)
    assert close_to(workers.models(), mean.expand(2, -1))


def test_sessions_follow_each_other() -> None:
    workers = Workers(exponential(8))
    for session in range(5):
        before = workers.models()
        steps = [(3 * rank + session) % 5 for rank in range(8)]
        train_and_arrive(workers, steps)
        assert close_to(workers.models().sum(0), expected_sum(workers, before, steps), sum(steps) + 1)
        assert not any(rounds._pending or rounds.sync_requested for rounds in workers.rounds)
        workers.open()


def test_no_worker_is_further_ahead_than_there_are_edges_between() -> None:
    """A path 0 – 1 – 2 – 3 whose end does not begin: rank r begins r rounds and completes all but the last."""
    workers = Workers(from_edges(4, [(0, 1), (1, 2), (2, 3)]))
    completed = [0] * 4
    may_go = threading.Event()

    def train(rank: int) -> None:
        if rank == 0:
            assert may_go.wait(PATIENCE_S)
        for _ in range(6):
            workers.step(rank)
            completed[rank] += 1

    def look() -> None:
        assert eventually(lambda: completed == [0, 0, 1, 2]), completed
        time.sleep(0.05)
        assert completed == [0, 0, 1, 2]
        may_go.set()

    run_threads([*[partial(train, rank) for rank in range(4)], look], PATIENCE_S)
    assert completed == [6] * 4


# -- sync requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", [0, 3])
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(ring(7), id="ring"),
        pytest.param(star(5), id="star"),
        pytest.param(torus(9), id="torus"),
        pytest.param(from_edges(6, [(k, k + 1) for k in range(5)]), id="path"),
    ],
)
def test_a_sync_request_reaches_everybody_within_the_diameter(topology: Topology, caller: int) -> None:
    workers = Workers(topology)
    distances = nx.shortest_path_length(topology.graph, caller)
    for number in range(1, nx.diameter(topology.graph) + 1):

        def step(rank: int, first: bool = number == 1) -> None:
            workers.rounds[rank].begin(calling=first and rank == caller)
            workers.rounds[rank].complete()

        workers.run(step)
        called = [rounds.sync_requested for rounds in workers.rounds]
        assert [called[rank] for rank in range(topology.n) if rank != caller] == [
            distances[rank] <= number for rank in range(topology.n) if rank != caller
        ]


def test_a_worker_that_arrives_calls_the_others_who_then_arrive_too() -> None:
    workers = Workers(ring(8))
    steps = [0] * 8

    def train(rank: int) -> None:
        while rank != 2 and not workers.rounds[rank].sync_requested:
            workers.step(rank)
            steps[rank] += 1
            assert steps[rank] < 100
        workers.arrive(rank, calling=rank == 2)

    workers.run(train)
    assert max(steps) <= 4  # the diameter
    assert all(rounds.sync_requested for rank, rounds in enumerate(workers.rounds) if rank != 2)
    workers.open()
    assert not any(rounds.sync_requested for rounds in workers.rounds)
    workers.run(workers.step)
    assert not any(rounds.sync_requested for rounds in workers.rounds)


def test_nobody_is_called_if_nobody_calls() -> None:
    workers = Workers(ring(5))
    train_and_arrive(workers, [0, 1, 2, 3, 4])
    assert not any(rounds.sync_requested for rounds in workers.rounds)


# -- trouble, and what is counted ------------------------------------------------------------------------------------------


def test_a_round_that_begins_while_one_is_under_way_is_a_protocol_error() -> None:
    workers = Workers(complete(2))
    assert not workers.rounds[0]._pending
    workers.rounds[0].begin()
    assert workers.rounds[0]._pending
    with pytest.raises(ProtocolError, match="under way"):
        workers.rounds[0].begin()
    workers.rounds[1].begin()
    for rounds in workers.rounds:
        assert rounds.complete()
    assert not workers.rounds[0]._pending


def test_a_swap_that_fails_is_a_peer_error() -> None:
    workers = Workers(ring(4), faults={0: [Fault("fail", "swap", at=[5])]}, timeout_s=1.0)

    def train(rank: int) -> PeerError | None:
        try:
            for _ in range(10):
                workers.step(rank)
        except PeerError as error:
            return error
        return None

    errors = workers.run(train)
    assert "injected at swap 5" in str(errors[0])
    for rank in (1, 2, 3):  # they wait for rank 0, or for one who does
        error = errors[rank]
        assert isinstance(error, PeerError)
        assert error.phase == "exchange"
        assert error.rank in ((rank - 1) % 4, (rank + 1) % 4)
    assert workers.rounds[0].exchanges == 4


@pytest.mark.parametrize("arrived", [True, False])
def test_a_neighbour_that_does_not_come_is_a_peer_error_within_the_deadline(arrived: bool) -> None:
    workers = Workers(complete(2), timeout_s=0.2)
    before = workers.models()
    workers.rounds[0].begin(arrived=arrived)
    began_s = time.monotonic()
    with pytest.raises(PeerError) as caught:
        workers.rounds[0].complete()
    assert 0.15 <= time.monotonic() - began_s < 10
    assert (caught.value.rank, caught.value.phase) == (1, "exchange")
    assert torch.equal(workers.models(), before)


def test_swaps_bytes_and_waits_are_counted() -> None:
    workers = Workers(star(4))
    late_s = 0.1

    def train(rank: int) -> None:
        workers.step(rank)
        if rank == 1:
            time.sleep(late_s)
        workers.step(rank)
        workers.arrive(rank)

    workers.run(train)
    for rank, rounds in enumerate(workers.rounds):
        neighbours = 3 if rank == 0 else 1
        assert rounds.exchanges == 3 * neighbours
        assert rounds.bytes_sent == 3 * neighbours * (NUMEL + 2) * 8  # the model and two numbers, of float64
        intervals = workers.timelines[rank].intervals()
        assert [interval.activity for interval in intervals] == ["wait"] * rounds.exchanges
        assert [interval.peer for interval in intervals] == ([1, 2, 3] if rank == 0 else [0]) * 3
        assert sum(interval.end_s - interval.start_s for interval in intervals) == pytest.approx(rounds.waited_s, abs=1e-5)
    assert workers.rounds[0].waited_s >= 0.5 * late_s


def test_a_worker_alone_makes_rounds_of_nothing() -> None:
    workers = Workers(complete(1))
    before = workers.models()
    workers.rounds[0].begin()
    assert not workers.rounds[0]._pending
    assert not workers.rounds[0].complete()
    assert torch.equal(workers.models(), before)
    assert (workers.rounds[0].exchanges, workers.rounds[0].bytes_sent, workers.rounds[0].waited_s) == (0, 0, 0.0)
