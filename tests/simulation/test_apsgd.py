from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    APSGD,
    SGD,
    Cluster,
    Constant,
    Epochs,
    Erlang,
    Exponential,
    Law,
    Links,
    LogNormal,
    Quadratic,
    Recording,
    Result,
    Steps,
    Uniform,
    simulate,
)

N = 16
ROUNDS, DISCARDED = 3_300, 300


@pytest.mark.parametrize(
    ("law", "deviation"),
    [
        pytest.param(Exponential(1.0), 15.5, id="exponential"),
        pytest.param(Erlang(1.0, 4), 7.9, id="erlang", marks=pytest.mark.slow),
        pytest.param(Uniform(1.0, 0.1), 1.3, id="uniform", marks=pytest.mark.slow),
        pytest.param(Constant(1.0), 0.0, id="constant"),
    ],
)
def test_the_mean_staleness_is_one_less_than_the_workers_for_every_law(law: Law, deviation: float) -> None:
    """Spreads of full asynchrony (derived; docs: papers of the SDDE framework), after the workers have left their phase."""
    result = simulate("apsgd", Cluster(N, law), work=Steps(number=ROUNDS), recording=Recording(staleness=True))
    assert result.staleness_in_order is not None
    staleness = np.concatenate([values[DISCARDED:] for values in result.staleness_in_order])
    assert len(staleness) == N * (ROUNDS - DISCARDED)
    assert staleness.mean() == pytest.approx(N - 1, rel=0.02)
    assert staleness.std() == pytest.approx(deviation, rel=0.05, abs=1e-9)


def test_with_fewer_active_workers_the_mean_staleness_is_theirs() -> None:
    result = simulate(APSGD(active_workers=4), Cluster(N, Exponential(1.0)), work=Steps(number=400))
    assert result.staleness.mean == pytest.approx(3.0, rel=0.02)
    assert result.time_s == pytest.approx(N * 400 / 4.0, rel=0.05)


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_no_update_that_is_applied_is_staler_than_allowed(on_stale: str) -> None:
    strategy = APSGD(max_staleness=20, on_stale=on_stale)  # type: ignore[arg-type]
    result = simulate(strategy, Cluster(N, LogNormal(1.0, 1.0)), work=Steps(number=200))
    dropped = sum(worker.dropped for worker in result.workers)
    assert result.staleness.max <= 20
    assert result.staleness.count + dropped == N * 200
    assert (dropped > 0) == (on_stale == "drop")


def test_a_slow_worker_under_wait_holds_the_others_up() -> None:
    slow = Cluster.one_slow(4, Constant(1.0), factor=10.0)
    waiting = simulate(APSGD(max_staleness=3, on_stale="wait"), slow, work=Steps(number=50))
    free = simulate("apsgd", slow, work=Steps(number=50))
    assert free.time_s == pytest.approx(500.0)
    assert sum(worker.wait_s for worker in waiting.workers[1:]) > 1000.0
    assert waiting.ended == "done"


def test_the_server_s_port_limits_the_updates() -> None:
    """Workers in lock-step: 15 updates share the port in, then 15 models the port out, 0.1 s each; so do the first pull and
    the rendezvous."""
    cluster, links = Cluster(N, Constant(0.01)), Links(bandwidth=1e4)
    result = simulate("apsgd", cluster, work=Steps(number=50), links=links, model_bytes=1000)
    assert result.time_s == pytest.approx(50 * (0.01 + 2 * 1.5) + 2 * 1.5)
    assert result.workers[0].bytes_sent == sum(worker.bytes_sent for worker in result.workers[1:]) + 1000 * (N - 1)


def quadratic(strategy: APSGD, **options: object) -> Result:
    return simulate(
        strategy,
        Cluster(8, Exponential(1.0)),
        work=Epochs(number=3, batches=400),
        objective=Quadratic([0.5, 1.0], noise=0.05),
        optimizer=SGD(lr=0.1),
        **options,  # type: ignore[arg-type]
    )


def test_it_learns_and_all_workers_leave_with_the_server_s_model() -> None:
    result = quadratic(APSGD())
    assert result.loss is not None
    assert result.loss < 1e-3
    assert result.models is not None
    assert result.mean is not None
    assert all(torch.equal(row, result.mean) for row in result.models)


def test_an_event_trigger_saves_messages_and_loses_no_step() -> None:
    often, seldom = quadratic(APSGD()), quadratic(APSGD(event_trigger={"threshold": 0.02}))
    assert seldom.steps == often.steps == 1200
    assert sum(worker.exchanges for worker in seldom.workers) < 0.8 * sum(worker.exchanges for worker in often.workers)
    assert seldom.loss is not None
    assert seldom.loss < 1e-2


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: APSGD(server_rank=-1), "server_rank"),
        (lambda: APSGD(on_stale="wait"), "max_staleness"),
        (lambda: APSGD(active_workers=0), "active_workers"),
        (lambda: APSGD(event_trigger=-1.0), "threshold"),
        (lambda: APSGD(event_trigger={"limit": 1.0}), "EventTrigger has no argument 'limit'"),
        (lambda: simulate(APSGD(server_rank=2), Cluster(2, Constant(1.0)), work=Steps(number=1)), "server_rank"),
        (lambda: simulate(APSGD(active_workers=3), Cluster(2, Constant(1.0)), work=Steps(number=1)), "active_workers"),
        (lambda: simulate(APSGD(event_trigger=1.0), Cluster(2, Constant(1.0)), work=Steps(number=1)), "event_trigger"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()


@pytest.mark.parametrize("law", [Constant(0.03), Uniform(0.03, 0.001)], ids=["all at once", "nearly"])
def test_a_place_that_is_free_is_taken_before_the_next_update_comes(law: Law) -> None:
    """K - 1, also where all of them end at the same moment."""
    result = simulate(APSGD(active_workers=12), Cluster(N, law), work=Epochs(number=1, batches=3200))
    assert result.staleness.mean == pytest.approx(11.0, rel=0.01)
