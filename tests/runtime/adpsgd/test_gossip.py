import itertools
import random
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.protocol import Wait
from lightning_gossip.algorithm.compression.pairwise import exchange_bytes
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.topology.generators import complete, exponential, from_edges, ring
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.transport import Kind, Message
from tests.runtime.cluster import PATIENCE_S, Cluster, eventually, training
from tests.transport.faults import Fault
from tests.workers import run_threads

GRAPHS = [
    pytest.param(ring(6), id="ring"),
    pytest.param(exponential(8), id="exponential"),
    pytest.param(complete(5), id="complete"),
    pytest.param(ring(5), id="odd ring"),
]
FAST_S = 1e-4  # a step time that makes the exchanges follow each other at once


def close_to(ours: torch.Tensor, expected: torch.Tensor, models: torch.Tensor) -> bool:
    return float((ours - expected).abs().max()) <= 1e-12 * max(1.0, float(models.abs().max())) * len(models)


# -- the mean --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", GRAPHS)
def test_without_updates_the_sum_of_all_models_stays(topology: Topology) -> None:
    cluster = Cluster(topology)
    before = cluster.total()
    with cluster.running():
        cluster.open_all()
        with training(cluster, lambda rank, _: cluster.gossips[rank].step(cluster.x[rank], step_s=FAST_S)):
            cluster.wait_for_exchanges(300)
        cluster.drain_all()
    assert close_to(cluster.total(), before, cluster.models())
    assert sum(cluster.counts) >= 600
    assert sum(cluster.counts) % 2 == 0  # each exchange was counted at both its ends


@pytest.mark.parametrize("topology", GRAPHS)
def test_local_updates_change_the_sum_by_exactly_themselves(topology: Topology) -> None:
    cluster = Cluster(topology)
    before = cluster.total()
    generators = [torch.Generator().manual_seed(rank) for rank in range(cluster.n)]
    updates = [torch.zeros(40, dtype=torch.float64) for _ in range(cluster.n)]

    def step(rank: int, _: int) -> None:
        update = torch.randn(40, generator=generators[rank], dtype=torch.float64)
        updates[rank] += update
        for x, u in zip(cluster.x[rank], update.split([13, 27]), strict=True):
            x += u
        cluster.gossips[rank].step(cluster.x[rank], step_s=FAST_S)

    with cluster.running():
        cluster.open_all()
        with training(cluster, step):
            cluster.wait_for_exchanges(300)
        cluster.drain_all()
    expected = before + torch.stack(updates).sum(0)
    assert close_to(cluster.total(), expected, cluster.models())


def test_steps_that_are_not_pushed_are_in_the_model_at_the_end() -> None:
    cluster = Cluster(ring(4), push_every=7)
    expected, steps = cluster.total(), [0] * 4

    def step(rank: int, _: int) -> None:
        for x in cluster.x[rank]:
            x += 1.0 + rank
        steps[rank] += 1
        cluster.gossips[rank].step(cluster.x[rank], step_s=FAST_S)

    with cluster.running():
        cluster.open_all()
        with training(cluster, step):
            cluster.wait_for_exchanges(200)
        cluster.drain_all()
    expected += sum((1.0 + rank) * steps[rank] for rank in range(4))
    assert close_to(cluster.total(), expected, cluster.models())
    assert [gossip.counters.staleness.count for gossip in cluster.gossips] == steps


def test_sessions_one_after_the_other_keep_the_mean() -> None:
    cluster = Cluster(exponential(8))
    before = cluster.total()
    distances = [cluster.distance()]
    with cluster.running():
        for _ in range(10):
            cluster.open_all()
            cluster.step_all(FAST_S)
            cluster.wait_for_exchanges(10)
            cluster.drain_all()
            distances.append(cluster.distance())
    assert close_to(cluster.total(), before, cluster.models())
    rounding = 1e-24 * distances[0]  # on a busy machine a session may have hundreds of exchanges
    assert all(later < earlier or later < rounding for earlier, later in itertools.pairwise(distances))


def test_draining_takes_over_all_merges_of_running_statistics_too() -> None:
    """No forward pass lies between the last pull and the drain, so nothing fades."""
    cluster = Cluster(ring(2), retention=0.5)
    before = cluster.models()
    with cluster.running():
        cluster.open_all()
        cluster.wait_for_exchanges(1, since_open=True)
        cluster.drain_all()
    assert torch.allclose(cluster.models(), before.mean(0).expand(2, -1), rtol=0, atol=1e-12)


# -- delays ----------------------------------------------------------------------------------------------------------------


def jitter(seed: int, longest_s: float) -> Callable[[int], float]:
    return lambda number: longest_s * random.Random(seed * 10_007 + number).random()


DELAYS = {
    "random": lambda rank: [
        Fault("delay", "request", seconds=jitter(rank, 0.003)),
        Fault("delay", "swap", seconds=jitter(rank + 100, 0.002)),
    ],
    "one end of every exchange late": lambda rank: [Fault("delay", "swap", seconds=0.002)] if rank % 2 else [],
    "the first chunk late": lambda rank: [Fault("delay", "swap", at=lambda number: number % 4 == 0, seconds=0.004)],
    "requests in bursts": lambda rank: [Fault("delay", "request", at=lambda number: number % 5 == 0, seconds=0.01)],
}


@pytest.mark.parametrize("topology", [pytest.param(exponential(6), id="exponential"), pytest.param(ring(5), id="odd")])
@pytest.mark.parametrize("delays", DELAYS)
def test_no_timing_makes_the_largest_model_grow(delays: str, topology: Topology) -> None:
    cluster = Cluster(topology, faults={rank: DELAYS[delays](rank) for rank in range(topology.n)})
    largest = float(cluster.models().abs().max())
    norms = [float(cluster.models().norm(dim=1).max())]

    def step(rank: int, _: int) -> None:
        gossip = cluster.gossips[rank]
        gossip.step(cluster.x[rank], step_s=FAST_S)
        assert max(float(x.abs().max()) for x in cluster.x[rank]) <= largest + 1e-12

    with cluster.running():
        for _ in range(4):
            cluster.open_all()
            with training(cluster, step):
                cluster.wait_for_exchanges(12)
            cluster.drain_all()
            norms.append(float(cluster.models().norm(dim=1).max()))
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(norms))


@st.composite
def connected_graphs(draw: st.DrawFn) -> Topology:
    n = draw(st.integers(2, 7))
    if n >= 3 and draw(st.booleans()):
        return ring(n) if n % 2 else ring(n - 1) if n > 3 else ring(3)
    edges = {(draw(st.integers(0, node - 1)), node) for node in range(1, n)}
    possible = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])
    return from_edges(n, sorted(edges | draw(st.sets(possible, max_size=n))))


@settings(max_examples=25)
@given(topology=connected_graphs(), drop=st.floats(0.0, 0.5), longest_s=st.floats(0.0, 0.003), seed=st.integers(0, 99))
def test_no_graph_deadlocks(topology: Topology, drop: float, longest_s: float, seed: int) -> None:
    def lossy(rank: int) -> list[Fault]:
        return [
            Fault("drop", at=lambda number: random.Random(seed * 1009 + rank * 31 + number).random() < drop),
            Fault("delay", "request", seconds=jitter(seed + rank, longest_s)),
            Fault("delay", "swap", seconds=jitter(seed + rank + 50, longest_s / 4)),
        ]

    cluster = Cluster(topology, faults={rank: lossy(rank) for rank in range(topology.n)}, seed=seed)
    callers = [rank for rank in range(cluster.n) if cluster.peers[rank].picker.initiates]
    before = cluster.total()
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        done = cluster.watch.wait_for(lambda: cluster.failed or min(cluster.counts[rank] for rank in callers) >= 4)
        cluster.raise_failure()
        assert done, (topology, cluster.counts)
        run_threads([lambda r=r: cluster.gossips[r].drain(cluster.x[r]) for r in range(cluster.n)], PATIENCE_S)  # type: ignore[misc]
    assert close_to(cluster.total(), before, cluster.models())


def decay_per_exchange(latency_s: float, step_s: float, runs: int) -> float:
    """Mean over independent models of log(distance before / after) per exchange, 4 exchanges a worker."""
    faults = {rank: [Fault("delay", "swap", at=lambda k: k % 4 == 0, seconds=latency_s)] for rank in range(8)}
    cluster = Cluster(exponential(8), faults=faults if latency_s else None, seed=1)
    rates = []
    with cluster.running():
        for _ in range(runs):
            cluster.reset(40)
            before, started = cluster.distance(), sum(cluster.counts)
            cluster.open_all()
            cluster.step_all(step_s)
            cluster.wait_for_exchanges(16)
            cluster.drain_all()
            exchanges = (sum(cluster.counts) - started) // 2
            rates.append(np.log(before / cluster.distance()) / exchanges)
    return statistics.mean(rates)


@pytest.mark.alone
def test_a_latency_of_two_steps_hardly_slows_the_decay_of_an_exchange() -> None:
    """Partners drawn among the free ones only would freeze the pairing: then the decay is 10 to 100 times smaller."""
    without = decay_per_exchange(0.0, 0.003, runs=25)
    late = decay_per_exchange(0.006, 0.003, runs=25)
    assert without / 1.5 <= late <= without * 1.5, (without, late)


# -- the pace --------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("topology", [pytest.param(exponential(8), id="exponential"), pytest.param(ring(5), id="odd")])
def test_a_slow_worker_exchanges_nearly_as_often_as_the_others(topology: Topology, slow: int) -> None:
    cluster = Cluster(topology)
    step_times = [0.004 * (10 if rank == slow else 1) for rank in range(cluster.n)]
    with cluster.running():
        cluster.open_all()
        cluster.step_all(step_times)
        cluster.wait_for_exchanges(3 * cluster.n)  # until all know their neighbours' step times
        begun = cluster.counts
        cluster.wait_for_exchanges(40 * cluster.n)
        seen = [later - earlier for earlier, later in zip(begun, cluster.counts, strict=True)]
        cluster.drain_all()
    assert seen[slow] >= 0.5 * statistics.median(seen), seen


@pytest.mark.parametrize(
    ("topology", "rate"),
    [
        pytest.param(ring(4), 1.0, id="ring"),
        pytest.param(ring(4), 2.0, id="ring, twice a step"),
        pytest.param(ring(4), 0.5, id="ring, every other step"),
        pytest.param(complete(5), 1.0, id="all start and answer"),
    ],
)
def test_no_thread_starts_an_exchange_before_it_is_due_or_spins_until_then(topology: Topology, rate: float) -> None:
    """How soon it comes after that is the machine's; that the pace itself is right is seen on clocks that tests move."""
    cluster, step_s, waits = Cluster(topology, exchanges_per_step=rate), 0.004 * rate, [0] * topology.n
    for rank, gossip in enumerate(cluster.gossips):
        gossip._wait = counted(gossip._wait, waits, rank)  # type: ignore[method-assign]
    with cluster.running():
        opened_s = now_s()
        cluster.open_all()
        cluster.step_all(step_s)
        cluster.wait_for_exchanges(60)
        cluster.drain_all()
    begun = sorted(interval.start_s for timeline in cluster.timelines for interval in timeline.intervals())[::2]
    starts = [peers.start_share * rate / step_s for peers in cluster.peers if peers.start_share > 0.0]  # a second
    assert all(number <= sum(1 + each * (at_s - opened_s) for each in starts) for number, at_s in enumerate(begun, 1))
    refused = sum(gossip.counters.refused for gossip in cluster.gossips)
    at_both_ends = 2 * (len(begun) + refused)  # the one waits for its time, the other for a request; a busy one waits again
    assert sum(waits) <= 2 * at_both_ends + 4 * topology.n, (waits, len(begun), refused)


def counted(wait: Callable[[Wait], None], waits: list[int], rank: int) -> Callable[[Wait], None]:
    def counts(effect: Wait) -> None:
        waits[rank] += 1
        wait(effect)

    return counts


def test_no_exchange_at_rate_0() -> None:
    cluster = Cluster(ring(4), exchanges_per_step=0.0)
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        assert not cluster.watch.wait_for(lambda: cluster.watch.ends > 0, deadline_s=0.15)
        cluster.drain_all()
    assert cluster.counts == [0] * 4


@pytest.mark.parametrize("topology", [pytest.param(ring(4), id="ring"), pytest.param(ring(5), id="odd ring")])
def test_nothing_spins_before_a_step_time_is_known(topology: Topology) -> None:
    cluster = Cluster(topology)
    callers = sum(peers.picker.initiates for peers in cluster.peers)
    with cluster.running():
        cluster.open_all()
        cluster.wait_for_exchanges(callers, since_open=True)
        assert not cluster.watch.wait_for(lambda: cluster.watch.ends > 2 * callers, deadline_s=0.15)
        cluster.drain_all()


def test_a_responder_starts_no_exchange() -> None:
    cluster = Cluster(ring(4))
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(50)
        cluster.drain_all()
    for rank in range(4):
        asked = cluster.transports[rank]._numbers["request"]
        assert (asked > 0) == cluster.peers[rank].picker.initiates


# -- failures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 5])
def test_a_failure_on_a_gossip_thread_is_raised_on_the_training_thread(number: int) -> None:
    cluster = Cluster(ring(4), faults={0: [Fault("fail", "swap", at=[number])]}, timeout_s=1.0)
    gossip = cluster.gossips[0]
    cluster.start()
    try:
        cluster.open_all()
        assert eventually(lambda: gossip._protocol.failure is not None or stepped(cluster, 0))
        with pytest.raises(PeerError, match=f"injected at swap {number}") as caught:
            gossip.step(cluster.x[0], step_s=FAST_S)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "_strike" in frames
        assert "initiate" in frames
        assert not gossip._protocol.busy
        start_s = time.monotonic()
        with pytest.raises(PeerError, match="injected"):
            gossip.drain(cluster.x[0])
        gossip.close()
        assert time.monotonic() - start_s < PATIENCE_S / 2
        with pytest.raises(PeerError, match="injected"):
            gossip.open(gossip._open_replica(), session=9, layout=1)
    finally:
        cluster.abandon()


def stepped(cluster: Cluster, rank: int) -> bool:
    """Tell the step time again, so that exchanges go on; never true."""
    for other in range(cluster.n):
        if other == rank or cluster.gossips[other]._protocol.failure is None:
            try:
                cluster.gossips[other].step(cluster.x[other], step_s=FAST_S)
            except PeerError:
                continue
    return False


def test_a_peer_that_stops_in_mid_exchange_is_named_within_the_deadline() -> None:
    """Rank 0 fails at its second chunk; rank 1 has merged the first one and waits for the second."""
    cluster = Cluster(ring(2), faults={0: [Fault("fail", "swap", at=[2])]}, timeout_s=0.5)
    cluster.start()
    try:
        cluster.open_all()
        assert eventually(lambda: cluster.gossips[1]._protocol.failure is not None)
        with pytest.raises(PeerError) as caught:
            cluster.gossips[1].step(cluster.x[1], step_s=None)
        assert (caught.value.rank, caught.value.phase) == (0, "exchange")
        with pytest.raises(PeerError):
            cluster.gossips[1].drain(cluster.x[1])
    finally:
        cluster.abandon()


def test_a_worker_that_has_failed_accepts_no_more() -> None:
    cluster = Cluster(ring(5), faults={0: [Fault("fail", "swap", at=[0])]}, timeout_s=1.0)
    cluster.start()
    try:
        cluster.open_all()
        assert eventually(lambda: cluster.gossips[0]._protocol.failure is not None)
        assert eventually(lambda: not cluster.gossips[0]._protocol.busy)
        request = Message(Kind.EXCHANGE, cluster.session, layout=1)
        stranger = cluster.transports[2]  # no neighbour, whose own threads would ask on the same lane
        answer = stranger.request(0, request, PATIENCE_S)
        while answer.kind is Kind.QUEUED:
            answer = stranger.await_reply(0, PATIENCE_S)
        assert answer.kind is Kind.REFUSE
    finally:
        cluster.abandon()


def test_drain_ends_by_its_deadline_if_the_peer_never_answers() -> None:
    cluster = Cluster(ring(2), timeout_s=0.3)
    cluster.gossips[0].start()  # rank 1 has no threads: nobody answers
    try:
        cluster.open_all()
        assert eventually(lambda: cluster.gossips[0]._protocol.busy)
        start_s = time.monotonic()
        cluster.gossips[0].drain(cluster.x[0])
        assert time.monotonic() - start_s < PATIENCE_S / 2
        assert cluster.peers[0].failed_exchanges == 1
    finally:
        cluster.abandon()


# -- sessions --------------------------------------------------------------------------------------------------------------


def test_different_layouts_are_a_configuration_error_at_both_ends() -> None:
    cluster = Cluster(ring(2), timeout_s=5.0)
    before = cluster.models()
    cluster.start()
    try:
        cluster.open(0, session=1, layout=1)
        cluster.open(1, session=1, layout=2)
        for rank in range(2):
            # a request may have come before rank 1 had opened; the step time makes rank 0 ask again
            assert eventually(lambda rank=rank: cluster.gossips[rank]._protocol.failure is not None)  # type: ignore[misc]
            with pytest.raises(ConfigurationError, match=f"Rank {1 - rank} publishes other tensors than rank {rank}"):
                cluster.gossips[rank].step(cluster.x[rank], step_s=FAST_S)
        assert torch.equal(cluster.models(), before)
    finally:
        cluster.abandon()


def test_a_worker_that_has_not_opened_yet_refuses_and_has_no_layout_to_compare() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open(0, session=0)
        assert eventually(lambda: cluster.gossips[0].counters.refused >= 3)
        assert not cluster.failed
        cluster.open(1, session=0)
        cluster.wait_for_exchanges(1)
        cluster.drain_all()


def test_a_request_of_another_session_is_refused() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open(1, session=1)
        cluster.open(0, session=2)
        assert eventually(lambda: cluster.gossips[0].counters.refused >= 3)
        assert cluster.counts == [0, 0]
        cluster.gossips[1].drain(cluster.x[1])
        cluster.open(1, session=2)
        cluster.wait_for_exchanges(1)
        cluster.session = 2
        cluster.drain_all()


def test_a_sync_request_reaches_everybody_also_who_opens_later() -> None:
    cluster = Cluster(ring(5))
    with cluster.running():
        for rank in range(4):
            cluster.open(rank, session=1)
        assert not any(gossip.sync_requested for gossip in cluster.gossips)
        cluster.gossips[0].request_sync()
        assert cluster.gossips[0].sync_requested
        assert eventually(lambda: all(gossip.sync_requested for gossip in cluster.gossips[:4]))
        assert not cluster.gossips[4].sync_requested
        cluster.open(4, session=1)
        assert eventually(lambda: cluster.gossips[4].sync_requested)
        cluster.drain_all()
        for rank in range(5):
            cluster.open(rank, session=2)
        assert not any(gossip.sync_requested for gossip in cluster.gossips)
        cluster.drain_all()


def test_requests_by_several_at_once_are_one_synchronisation() -> None:
    cluster = Cluster(ring(4))
    with cluster.running():
        cluster.open_all()
        run_threads([gossip.request_sync for gossip in cluster.gossips], PATIENCE_S)
        assert eventually(lambda: all(gossip.sync_requested for gossip in cluster.gossips))
        cluster.drain_all()


def test_a_sync_can_be_requested_in_session_0() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        for rank in range(2):
            cluster.open(rank, session=0)
        assert not cluster.gossips[1].sync_requested
        cluster.gossips[0].request_sync()
        assert eventually(lambda: cluster.gossips[1].sync_requested)
        cluster.drain_all()


def test_a_session_opens_only_after_the_last_was_drained() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open_all()
        with pytest.raises(ProtocolError, match="while the gossip is open"):
            cluster.open(0, session=5)
        cluster.drain_all()
    with pytest.raises(ProtocolError, match="while the gossip is stopped"):
        cluster.open(0, session=6)


def test_nothing_can_be_drained_before_a_session() -> None:
    cluster = Cluster(ring(2))
    with cluster.running(), pytest.raises(ProtocolError, match="No session"):
        cluster.gossips[0].drain(cluster.x[0])


def test_200_ends_at_random_moments() -> None:
    """Sessions of any length, all workers at once, ended wherever an exchange happens to be."""
    chance = random.Random(3)
    graphs = [ring(2), ring(3), ring(4), complete(4)]
    for cycle in range(200):
        cluster = Cluster(graphs[cycle % 4], seed=cycle)
        steps = [chance.randrange(6) for _ in range(cluster.n)]
        arrived = threading.Barrier(cluster.n)

        def worker(rank: int, cluster: Cluster = cluster, steps: list[int] = steps, here: threading.Barrier = arrived) -> None:
            gossip = cluster.gossips[rank]
            gossip.start()
            for session in range(1, 3):
                cluster.open(rank, session=session)
                for _ in range(steps[rank]):
                    gossip.step(cluster.x[rank], step_s=FAST_S)
                here.wait(PATIENCE_S)
                gossip.drain(cluster.x[rank])
                here.wait(PATIENCE_S)
            gossip.close()
            gossip.close()

        before = cluster.total()
        try:
            run_threads([lambda r=r: worker(r) for r in range(cluster.n)], PATIENCE_S)  # type: ignore[misc]
        finally:
            cluster.abandon()
        assert not any(thread.is_alive() for gossip in cluster.gossips for thread in gossip._threads)
        assert close_to(cluster.total(), before, cluster.models())


def test_a_thread_that_does_not_end_in_time_finds_the_transport_closed() -> None:
    """The exchange waits for a minute, or until its transport is closed."""
    cluster = Cluster(ring(2), faults={1: [Fault("delay", "swap", seconds=60.0)]}, timeout_s=PATIENCE_S)
    cluster.start()
    try:
        cluster.open_all()
        assert eventually(lambda: cluster.gossips[1]._protocol.busy)
        run_threads([lambda gossip=gossip: gossip.close(timeout_s=0.1) for gossip in cluster.gossips], PATIENCE_S)  # type: ignore[misc]
        threads = cluster.gossips[1]._threads
        assert eventually(lambda: not any(thread.is_alive() for thread in threads), PATIENCE_S / 3)
    finally:
        cluster.abandon()


def test_staleness_counts_the_merges_between_two_steps() -> None:
    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open_all()
        cluster.wait_for_exchanges(1, since_open=True)
        cluster.step_all(10.0)
        cluster.step_all(10.0)
        cluster.drain_all()
    for gossip in cluster.gossips:
        assert gossip.counters.staleness.counts() == {0: 1, 1: 1}
        assert gossip.counters.bytes_sent == 40 * 8


@pytest.mark.parametrize("wire", get_args(Wire))
def test_the_sum_of_the_models_stays_over_hundreds_of_exchanges_however_they_are_written(wire: Wire) -> None:
    cluster = Cluster(ring(4), numel=3000, wire=wire, chunk=1024)
    total, before = cluster.total(), cluster.distance()
    with cluster.running():
        cluster.open_all()
        cluster.step_all(1e-4)
        with training(cluster, lambda rank, _: cluster.gossips[rank].step(cluster.x[rank], step_s=1e-4)):
            cluster.wait_for_exchanges(300)
        cluster.drain_all()
        assert (cluster.total() - total).abs().max() < 1e-9
        assert cluster.distance() < before * (1e-4 if wire == "bfloat16" else 1e-9)
    assert sum(gossip.counters.bytes_sent for gossip in cluster.gossips) == sum(cluster.counts) * exchange_bytes(
        wire, 3000, torch.float64
    )


def test_the_loss_of_the_store_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own error says that bytes are missing, and not what has ended."""

    def lost() -> tuple[int, Message]:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes.")

    cluster = Cluster(ring(2))
    with cluster.running():
        cluster.open_all()
        monkeypatch.setattr(cluster.transports[0], "next_message", lost)
        cluster.transports[1].post(0, Message(Kind.SYNC, 0))  # the last one that it hears
        assert eventually(lambda: cluster.failed)
        with pytest.raises(PeerError, match="The store of the job does not answer") as raised:
            cluster.gossips[0].raise_failure()
    assert isinstance(raised.value.__cause__, dist.DistNetworkError)
