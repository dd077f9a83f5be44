from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice
from lightning_gossip.algorithm.topology.generators import exponential, from_edges
from lightning_gossip.algorithm.topology.mixing import mean_square_gap
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Exponential,
    Links,
    LogNormal,
    Objective,
    Quadratic,
    Recording,
    Result,
    Steps,
    Strategy,
    TraceEvent,
    Uniform,
    simulate,
)

WORKERS = 16
# 200 steps of each equal worker: longer than the one batch that the slowest worker is sure of
EPOCHS = Epochs(number=2, batches=200 * WORKERS)


def epoch_s(strategy: str | Strategy, cluster: Cluster, links: Links | None = None, model_bytes: int = 0) -> float:
    """Of the second epoch, in which every worker's step time is known from the first."""
    result = simulate(strategy, cluster, work=EPOCHS, links=links, model_bytes=model_bytes)
    assert result.ended == "done"
    return result.epoch_times_s[-1]


@cache
def equal_epoch_s(strategy: str, law: str = "constant") -> float:
    """Where all workers are equal."""
    return epoch_s(strategy, Cluster(WORKERS, LAWS[law]))


# -- one slow worker -------------------------------------------------------------------------------------------------------


SLOWED = [(2.0, 1.05, 1.032), (10.0, 1.10, 1.060), (100.0, 1.10, 1.066)]


LAWS = {"constant": Constant(1.0), "uniform": Uniform(1.0, 0.1)}
QUICK = [(2.0, "constant"), (10.0, "uniform"), (100.0, "constant")]


@pytest.mark.parametrize(
    ("slowdown", "at_most", "ideal", "law"),
    [
        pytest.param(*slowed, law, marks=[] if (slowed[0], law) in QUICK else pytest.mark.slow)
        for slowed in SLOWED
        for law in LAWS
    ],
)
def test_one_slow_worker_hardly_slows_the_epoch(slowdown: float, at_most: float, ideal: float, law: str) -> None:
    slowed = epoch_s("adpsgd", Cluster.one_slow(WORKERS, LAWS[law], rank=5, factor=slowdown))
    ratio = slowed / equal_epoch_s("adpsgd", law)
    assert ideal - 0.005 <= ratio <= at_most


@pytest.mark.parametrize("strategy", ["ddp", "dpsgd", "qsgd", "periodic_averaging"])
@pytest.mark.parametrize("slowdown", [2.0, 10.0, 100.0])
def test_one_slow_worker_slows_the_synchronous_ones_as_much_as_it_is_slow(strategy: str, slowdown: float) -> None:
    slow = epoch_s(strategy, Cluster.one_slow(WORKERS, Constant(1.0), rank=5, factor=slowdown))
    assert slow / equal_epoch_s(strategy) == pytest.approx(slowdown, rel=0.01)


def test_without_shared_work_the_epoch_waits_for_the_slow_worker() -> None:
    slow = Cluster.one_slow(WORKERS, Constant(1.0), rank=5, factor=10.0)
    assert epoch_s(ADPSGD(work_sharing=False), slow) == pytest.approx(10.0 * 200.0)


def test_a_slow_worker_takes_fewer_batches_and_is_no_more_stale_than_the_exchanges_in_its_step() -> None:
    result = simulate("adpsgd", Cluster.one_slow(WORKERS, Constant(1.0), rank=5, factor=10.0), work=EPOCHS)
    steps = [worker.steps for worker in result.workers]
    assert steps[5] == min(steps) <= 1.2 * max(steps) / 10
    others = [worker.staleness.mean for worker in result.workers if worker.rank not in (4, 5, 6)]
    assert result.workers[5].staleness.mean > 4 * np.mean(others)  # ten steps of its neighbours' exchanges


# -- one slow link ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [2.0, pytest.param(10.0, marks=pytest.mark.slow), 100.0])
def test_a_slow_link_touches_the_two_workers_at_its_ends_only(slowdown: float) -> None:
    """A model takes a tenth of a step; the slow link's ends wait for it in the background, and nobody's epoch does."""
    cluster, bytes_ = Cluster(WORKERS, Constant(1.0)), 1000
    plain, slow = Links(bandwidth=1e4), Links.one_slow(0, 1, slowdown, bandwidth=1e4)
    ratio = epoch_s("adpsgd", cluster, slow, bytes_) / epoch_s("adpsgd", cluster, plain, bytes_)
    assert ratio <= 1.15
    workers = simulate(ADPSGD(topology="ring"), cluster, work=EPOCHS, links=slow, model_bytes=bytes_).workers
    ends, others = [workers[rank].exchanges for rank in (0, 1)], [worker.exchanges for worker in workers[3:15]]
    assert np.mean(ends) <= np.mean(others) * {2.0: 1.05, 10.0: 1.0, 100.0: 0.6}[slowdown]
    all_reduce = AllReduce(overlap=False)
    moved_s = 2 * (WORKERS - 1) * bytes_ / WORKERS / 1e4
    slowed = epoch_s(all_reduce, cluster, slow, bytes_) / epoch_s(all_reduce, cluster, plain, bytes_)
    assert slowed == pytest.approx((1.0 + slowdown * moved_s) / (1.0 + moved_s))


def test_the_ends_of_a_slow_link_drift_no_further_from_the_mean_than_its_slowness_explains() -> None:
    """The distance of each worker to the mean before an epoch's average is reported."""
    links = Links.one_slow(0, 1, 100.0, bandwidth=1e4)
    work = Epochs(number=2, batches=100 * WORKERS)
    problem = Quadratic([1.0] * 50, noise=1.0, start_at=0.0)
    result = simulate("adpsgd", Cluster(WORKERS, Constant(1.0)), work=work, links=links, model_bytes=1000, objective=problem)
    distances = result.epochs[-1].distances
    assert distances is not None
    assert len(distances) == WORKERS
    assert np.mean(distances) == pytest.approx(result.epochs[-1].consensus_distance)
    assert np.mean(distances[:2]) < 4 * np.mean(distances[3:15])


# -- what an exchange is -----------------------------------------------------------------------------------------------------


def test_an_exchange_takes_the_times_that_the_module_lists() -> None:
    """Latency ℓ = 1, B/b = 3: the answer at 1, copies at 1 and 2, merges at 5 and 6."""
    result = simulate(
        "adpsgd",
        Cluster(2, Constant(100.0)),
        work=Steps(number=1),
        links=Links(latency_s=1.0, bandwidth=1.0),
        model_bytes=3,
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    assert [tuple(event) for event in result.trace[:6]] == [
        (0.0, "request", 0, 1),
        (1.0, "answer", 1, 0),
        (1.0, "snapshot", 1, 0),
        (2.0, "snapshot", 0, 1),
        (5.0, "merge", 0, 1),
        (6.0, "merge", 1, 0),
    ]


class Dyadic(Objective):
    """Gradients that are small multiples of a power of two, different on every worker: halving loses nothing for a while."""

    numel = 3

    def start(self, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.float64)

    def gradients(self, models, ranks, batches, generators):  # type: ignore[no-untyped-def]
        return torch.tensor([[float(rank % 5 - 1), 1.0, float(2**rank)] for rank in ranks], dtype=torch.float64)

    def loss(self, model: torch.Tensor) -> float:
        return 0.0


def test_the_sum_of_all_models_changes_by_local_updates_only_exactly() -> None:
    """In exact arithmetic, as long as no halving leaves the 53 bits: 12 exchanges a worker at most."""
    result = simulate(
        ADPSGD(topology="exponential", at_rendezvous="evaluate", work_sharing=False),
        Cluster(8, LogNormal(1.0, 0.8)),
        links=Links(latency_s=0.3),
        work=Steps(number=5),
        objective=Dyadic(),
        optimizer=SGD(lr=1.0),
        seed=3,
    )
    assert max(worker.exchanges for worker in result.workers) > 3
    assert result.models is not None
    assert result.workers[0].staleness.count == 5
    updates = Dyadic().gradients(None, range(8), None, None).sum(0)  # type: ignore[no-untyped-call]
    assert torch.equal(result.models.sum(0), -5.0 * updates)


def test_without_learning_the_models_come_together_at_least_as_fast_as_by_independent_edges() -> None:
    """By the pace every caller has its turn before any has a second one, which mixes better than edges drawn independently."""
    topology = exponential(8)

    class Spread(Quadratic):
        """Models that begin apart: the first gradient throws them there, and there is no other."""

        def __init__(self) -> None:
            super().__init__([1.0] * 400, workers=8, heterogeneity=1.0)
            self._asked = [0] * 8

        def gradients(self, models, ranks, batches, generators):  # type: ignore[no-untyped-def]
            gradients = super().gradients(torch.zeros_like(models), ranks, batches, generators)
            for row, rank in enumerate(ranks):
                gradients[row] *= float(self._asked[rank] == 0)
                self._asked[rank] += 1
            return gradients

    rates = []
    for seed in range(6):
        result = simulate(
            ADPSGD(topology=topology, at_rendezvous="evaluate", work_sharing=False),
            Cluster(8, Exponential(1.0)),
            work=Steps(number=40),
            objective=Spread(),
            optimizer=SGD(lr=1.0),
            seed=seed,
            recording=Recording(evaluate_every=8, trace=True),
        )
        assert result.trace is not None
        merges = [event.time_s for event in result.trace if event.kind == "merge"]
        points = [point for point in result.points if 6.0 <= point.time_s <= 20.0]
        first, last = points[0], points[-1]
        exchanges = sum(first.time_s < at_s <= last.time_s for at_s in merges) / 2
        rates.append(-np.log(last.consensus_distance / first.consensus_distance) / exchanges)
    theory = -np.log1p(-mean_square_gap(topology))
    assert theory <= np.mean(rates) <= 2.0 * theory


@pytest.mark.parametrize(("topology", "least", "most"), [("ring", 0.0, 0.55), ("exponential", 0.9, 1.1)])
def test_a_second_copy_keeps_models_together_on_a_ring_and_changes_nothing_on_a_dense_graph(
    topology: str, least: float, most: float
) -> None:
    """Consensus distance that unlike data keep up, over that of plain gossip."""

    def distance(a2cid2: bool) -> float:
        result = simulate(
            ADPSGD(topology=topology, at_rendezvous="evaluate", work_sharing=False, a2cid2=a2cid2),
            Cluster(16, Uniform(1.0, 0.1)),
            work=Steps(number=400),
            objective=Quadratic([1.0] * 20, heterogeneity=1.0, workers=16),
            optimizer=SGD(lr=0.05),
            recording=Recording(evaluate_every=160),
        )
        return float(np.mean([point.consensus_distance for point in result.points if point.time_s > 200.0]))

    assert least <= distance(True) / distance(False) <= most


# -- pace, graphs, numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("topology", ["exponential", "complete"])
def test_the_exchanges_keep_their_pace(topology: str, rate: float) -> None:
    result = simulate(
        ADPSGD(topology=topology, exchanges_per_step=rate),
        Cluster(8, Uniform(1.0, 0.2)),
        work=Steps(number=200),
        links=Links(latency_s=0.001),
    )
    assert result.exchanges_per_step == pytest.approx(rate, rel=0.1)


def test_steps_that_are_not_pushed_are_counted_by_the_next_push() -> None:
    often, rarely = (
        simulate(ADPSGD(exchanges_per_step=0.25, push_every=steps), Cluster(4, Constant(1.0)), work=Steps(number=100))
        for steps in (1, 4)
    )
    assert often.staleness.count == often.steps == rarely.staleness.count == rarely.steps
    assert rarely.staleness.mean > 2.0 * often.staleness.mean


def test_a_faster_network_than_the_pace_is_not_spun_on() -> None:
    result = simulate("adpsgd", Cluster(8, Constant(1.0)), work=Steps(number=100))
    assert result.exchanges_per_step == pytest.approx(1.0, abs=0.02)


def test_bytes_are_counted_at_the_end_that_sends_them() -> None:
    result = simulate("adpsgd", Cluster(4, Constant(1.0)), work=Steps(number=50), model_bytes=700)
    assert [worker.bytes_sent for worker in result.workers] == [700 * worker.exchanges for worker in result.workers]


def run(seed: int, workers: int = 8) -> Result:
    return simulate(
        ADPSGD(topology="exponential"),
        Cluster(workers, Exponential(1.0)),
        work=Epochs(number=2, batches=30 * workers),
        links=Links(latency_s=0.05, bandwidth=1e3, shared=4e3),
        objective=Quadratic([0.5, 1.0], noise=0.1),
        optimizer=SGD(lr=0.1, momentum=0.5),
        seed=seed,
        recording=Recording(trace=True, spans=True),
    )


def test_the_same_seed_gives_the_same_trace_to_the_bit() -> None:
    first, second, other = run(1), run(1), run(2)
    assert first.trace == second.trace
    assert first.points == second.points
    assert first.spans == second.spans
    assert first.summary() == second.summary()
    assert torch.equal(first.models, second.models)  # type: ignore[arg-type]
    assert first.trace != other.trace


def test_the_trace_is_in_the_order_of_time() -> None:
    trace = run(3).trace
    assert trace is not None
    assert [event.time_s for event in trace] == sorted(event.time_s for event in trace)
    assert all(isinstance(event, TraceEvent) for event in trace)


def test_one_worker_trains_plainly() -> None:
    result = simulate(
        "adpsgd", Cluster(1, Constant(1.0)), work=Epochs(batches=50), objective=Quadratic([1.0]), optimizer=SGD(lr=0.1)
    )
    assert result.time_s == 50.0
    assert result.loss == pytest.approx(0.5 * 0.9**100)


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_the_speed_up_of_the_time_to_a_loss_is_linear(workers: int) -> None:
    """Without latency an update of one of n moves the mean by 1/n of itself, n times as often."""

    def seconds(n: int) -> float:
        result = simulate(
            ADPSGD(topology="exponential"),
            Cluster(n, Uniform(1.0, 0.1)),
            work=Steps(number=1500 // n),
            objective=Quadratic([0.5, 1.0], noise=0.5),
            optimizer=SGD(lr=0.02 * n / 4),  # linear scaling: the learning rate of the global batch
            target_loss=0.02,
            seed=1,
            recording=Recording(evaluate_every=n),
        )
        assert result.ended == "target"
        return result.time_s

    assert seconds(1) / seconds(workers) == pytest.approx(workers, rel=0.3)


def test_events_grow_with_the_steps_and_not_faster_with_the_workers() -> None:
    def events_per_step(workers: int) -> float:
        cluster = Cluster(workers, Uniform(1.0, 0.3))
        result = simulate("adpsgd", cluster, work=Steps(number=20), links=Links(latency_s=0.01))
        return result.events / result.steps

    assert events_per_step(256) == pytest.approx(events_per_step(16), rel=0.1)


def test_with_fast_links_one_slow_host_leaves_the_others_more_than_half_of_their_exchanges() -> None:
    """Four hosts at 1 Gb/s, one of them at 20 Mb/s, a model of 0.139 Gbit, steps of 0.1 s; either side of the ring."""

    def exchanges(choice: PartnerChoice, slow: dict[int, float]) -> list[int]:
        result = simulate(
            ADPSGD(topology="ring", partner_choice=choice, work_sharing=False),
            Cluster(4, Uniform(0.1, 0.02)),
            links=Links(bandwidth=125e6, latency_s=1e-4, slow=slow),
            work=Steps(number=1000),
            model_bytes=17_400_000,
            seed=3,
        )
        return [worker.exchanges for worker in result.workers]

    undisturbed = exchanges("uniform", {})
    for host in (0, 1):
        others = [rank for rank in range(4) if rank != host]
        before = sum(undisturbed[rank] for rank in others)
        uniform, sharing = (exchanges(choice, {host: 50.0}) for choice in ("uniform", "fast_links"))
        assert sum(uniform[rank] for rank in others) < 0.1 * before
        assert sum(sharing[rank] for rank in others) > 0.5 * before
        assert sharing[host] >= 3


@pytest.mark.parametrize("choice", ["uniform", "fast_links"])
def test_two_sides_whose_only_bridge_is_slow_come_together(choice: PartnerChoice) -> None:
    """0-1-2-3, and 1-2 takes fifteen times as long. Without it each side would go to a minimum of its own."""
    objective = Quadratic([1.0] * 50, heterogeneity=1.0, workers=4, start_at=0.0)
    assert objective._minima is not None
    apart = objective._minima[:2].mean(0) - objective._minima[2:].mean(0)
    result = simulate(
        ADPSGD(
            topology=from_edges(4, [(0, 1), (1, 2), (2, 3)]),
            partner_choice=choice,
            work_sharing=False,
            at_rendezvous="evaluate",
        ),
        Cluster(4, Uniform(1.0, 0.2)),
        links=Links(bandwidth=100.0, slow={(1, 2): 15.0}),
        work=Steps(number=4000),
        objective=objective,
        optimizer=SGD(lr=2e-3),
        model_bytes=50,
        seed=2,
    )
    assert result.models is not None
    left = result.models[:2].mean(0) - result.models[2:].mean(0)
    assert float(left.norm() / apart.norm()) < 0.2  # and 0.95 without
    assert float(result.models.mean(0).norm()) < 0.01 * float(apart.norm())  # the mean is the problem's
