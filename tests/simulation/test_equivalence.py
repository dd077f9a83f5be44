"""The simulator and the runtime, given one order of events, make the same models to the bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch

from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.topology.generators import complete, exponential, ring, star
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.simulation import (
    ADPSGD,
    APSGD,
    SGD,
    Cluster,
    Exponential,
    Links,
    LogNormal,
    Quadratic,
    Recording,
    Steps,
    simulate,
)
from lightning_gossip.simulation.run import Strategy
from tests.runtime.service import Service
from tests.simulation.replay import PLAYED, replay

SPECTRUM = [0.1, 0.5, 1.0, 2.0, 3.0]
LR = 0.05


def problem(workers: int) -> Quadratic:
    """Without noise, so that a gradient depends on nothing but the model; workers differ."""
    return Quadratic(SPECTRUM, heterogeneity=1.0, workers=workers)


def gradient(rank: int, x: torch.Tensor, workers: int) -> torch.Tensor:
    return problem(workers).gradients(x.unsqueeze(0), [rank], [None], [])[0]


def run(strategy: Strategy, workers: int, *, latency_s: float, seed: int, steps: int = 12):  # type: ignore[no-untyped-def]
    return simulate(
        strategy,
        Cluster(workers, LogNormal(1.0, 0.6), slowdown={workers - 1: 3.0}),
        links=Links(latency_s=latency_s, bandwidth=200.0),
        work=Steps(number=steps),
        objective=problem(workers),
        optimizer=SGD(lr=LR),
        seed=seed,
        recording=Recording(trace=True),
    )


CASES = [
    pytest.param(ring(4), 0.3, 1, id="ring"),
    pytest.param(exponential(8), 0.05, 2, id="exponential"),
    pytest.param(exponential(6), 2.0, 3, id="latency of two steps"),
    pytest.param(star(5), 0.1, 4, id="star: callers wait for the hub"),
    pytest.param(ring(5), 0.2, 5, id="odd ring: busy workers refuse"),
    pytest.param(complete(4), 0.02, 6, id="complete: busy workers refuse"),
]


# every graph, and every wire on one of them and on the one whose workers refuse; all of both: make test-slow
WIRES = ["float32", *(wire for wire in get_args(Wire) if wire != "float32")]
PAIRS = [
    pytest.param(
        *case.values, wire, id=f"{case.id}-{wire}", marks=[] if wire == "float32" or number in (1, 4) else pytest.mark.slow
    )
    for number, case in enumerate(CASES)
    for wire in WIRES
]


@pytest.mark.parametrize(("topology", "latency_s", "seed", "wire"), PAIRS)
def test_one_order_of_events_gives_the_runtime_s_gossip_and_the_simulated_one_the_same_models(
    topology: Topology, latency_s: float, seed: int, wire: Wire
) -> None:
    strategy = ADPSGD(topology=topology, at_rendezvous="evaluate", work_sharing=False, wire=wire)
    result = run(strategy, topology.n, latency_s=latency_s, seed=seed)
    real = replay(
        result.trace,
        topology,
        start=torch.ones(len(SPECTRUM), dtype=torch.float64),
        update=lambda rank, x: gradient(rank, x, topology.n),
        lr=LR,
        seed=seed,
        wire=wire,
    )
    exchanges = sum(worker.exchanges for worker in result.workers)
    assert exchanges >= 2 * topology.n
    assert result.staleness.max >= 1  # merges came between a pull and its push
    assert torch.equal(real, result.models)


OUTER = [
    pytest.param(Outer(0.8, 0.6), 0.0, id="Nesterov, local"),
    pytest.param(Outer(0.8, 0.6, momentum_of="all"), 0.0, id="Nesterov, all"),
    pytest.param(Outer(0.7, 0.5, nesterov=False), 0.3, id="heavy ball, dense start"),
]


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize(("outer", "dense_share"), OUTER)
def test_outer_steps_give_the_same_models_too(outer: Outer, dense_share: float, wire: Wire) -> None:
    topology = exponential(6)
    strategy = ADPSGD(
        topology=topology,
        at_rendezvous="evaluate",
        work_sharing=False,
        wire=wire,
        local_steps=4,
        outer=outer,
        dense_share=dense_share,
    )
    result = run(strategy, topology.n, latency_s=0.3, seed=7, steps=24)
    plain = run(replace(strategy, outer=None), topology.n, latency_s=0.3, seed=7, steps=24)
    assert not torch.equal(result.models, plain.models)
    real = replay(
        result.trace,
        topology,
        start=torch.ones(len(SPECTRUM), dtype=torch.float64),
        update=lambda rank, x: gradient(rank, x, topology.n),
        lr=LR,
        seed=7,
        wire=wire,
        options=strategy,
    )
    assert sum(worker.exchanges for worker in result.workers) >= 2 * topology.n
    assert torch.equal(real, result.models)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_second_copy_gives_the_same_models_too(wire: Wire) -> None:
    strategy = ADPSGD(topology="ring", at_rendezvous="evaluate", work_sharing=False, wire=wire, a2cid2=True)
    result = run(strategy, 6, latency_s=0.3, seed=7, steps=24)
    plain = run(replace(strategy, a2cid2=False), 6, latency_s=0.3, seed=7, steps=24)
    assert not torch.equal(result.models, plain.models)
    real = replay(
        result.trace,
        ring(6),
        start=torch.ones(len(SPECTRUM), dtype=torch.float64),
        update=lambda rank, x: gradient(rank, x, 6),
        lr=LR,
        seed=7,
        wire=wire,
        options=strategy,
    )
    assert torch.equal(real, result.models)


def test_a_step_of_1_without_momentum_gives_the_models_of_none() -> None:
    topology = exponential(6)
    plain, with_it = (
        run(
            ADPSGD(topology=topology, work_sharing=False, local_steps=4, outer=outer, at_rendezvous="evaluate"),
            topology.n,
            latency_s=0.3,
            seed=7,
        )
        for outer in (None, Outer(1.0, 0.0))
    )
    assert torch.equal(plain.models, with_it.models)


def test_refusals_are_part_of_the_order() -> None:
    """Shows that the cases with symmetric roles have any."""
    result = run(ADPSGD(topology="complete", work_sharing=False), 4, latency_s=0.02, seed=6)
    assert sum(worker.refused for worker in result.workers) > 5


@pytest.mark.parametrize("max_staleness", [None, 3])
def test_the_parameter_server_gives_the_same_model(max_staleness: int | None) -> None:
    n = 4
    result = run(APSGD(max_staleness=max_staleness, work_sharing=False), n, latency_s=0.0, seed=8)
    assert result.trace is not None
    service = Service(n=n)
    service.out = [torch.zeros(len(SPECTRUM), dtype=torch.float64) for _ in range(n)]
    service.start = lambda: torch.ones(len(SPECTRUM), dtype=torch.float64)  # type: ignore[method-assign]
    updates: dict[int, torch.Tensor] = {}
    service.server.start()
    try:
        model = service.open(max_staleness=max_staleness)
        for event in result.trace:
            rank = event.rank
            if event.kind == "step":
                x = service.out[rank].clone()
                x.add_(gradient(rank, x, n), alpha=-LR)
                updates[rank] = x - service.out[rank]
            elif event.kind == "pull":
                service.pull(rank, updates.pop(rank, None))
        dropped = sum(not push.applied for push in model.pushes)
        assert dropped == sum(worker.dropped for worker in result.workers)
        assert (dropped > 0) == (max_staleness is not None)
        assert torch.equal(model.model, result.mean)
        service.close_together()
    finally:
        service.abandon()


def test_a_memoryless_law_is_replayed_too() -> None:
    topology = exponential(4)
    result = simulate(
        ADPSGD(topology=topology, at_rendezvous="evaluate", work_sharing=False, exchanges_per_step=2.0),
        Cluster(4, Exponential(1.0)),
        links=Links(latency_s=0.02),
        work=Steps(number=15),
        objective=problem(4),
        optimizer=SGD(lr=LR),
        seed=9,
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    real = replay(
        result.trace,
        topology,
        start=torch.ones(len(SPECTRUM), dtype=torch.float64),
        update=lambda rank, x: gradient(rank, x, 4),
        lr=LR,
        seed=9,
    )
    assert result.models is not None
    assert torch.equal(real, result.models)


def test_another_order_of_two_events_gives_other_models() -> None:
    """Shows that the comparison can fail: a merge and a step of the same worker change places."""
    topology = exponential(4)
    result = run(ADPSGD(topology=topology, at_rendezvous="evaluate", work_sharing=False), 4, latency_s=0.3, seed=1)
    assert result.trace is not None
    trace = [event for event in result.trace if event.kind in PLAYED]
    pairs = list(enumerate(itertools.pairwise(trace)))[3 * topology.n :]  # at first all models are equal
    place = next(k for k, (a, b) in pairs if {a.kind, b.kind} == {"merge", "step"} and a.rank == b.rank)
    trace[place], trace[place + 1] = trace[place + 1], trace[place]
    start = torch.ones(len(SPECTRUM), dtype=torch.float64)
    real = replay(trace, topology, start=start, update=lambda rank, x: gradient(rank, x, 4), lr=LR, seed=1)
    assert not torch.equal(real, result.models)
    assert torch.allclose(real, result.models, atol=0.1)
