from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    EAMSGD,
    SGD,
    Cluster,
    Constant,
    Epochs,
    Exponential,
    Links,
    PeriodicAveraging,
    Quadratic,
    Recording,
    Result,
    Steps,
    simulate,
)


def quadratic(strategy: EAMSGD | PeriodicAveraging, workers: int = 4, steps: int = 40, **options: object) -> Result:
    options = {"optimizer": SGD(lr=0.1), **options}
    return simulate(
        strategy,
        Cluster(workers, Exponential(1.0)),
        work=Steps(number=steps),
        objective=Quadratic([0.5, 1.0], noise=0.05),
        seed=3,
        **options,  # type: ignore[arg-type]
    )


def test_without_a_force_it_is_local_sgd_to_the_bit() -> None:
    alone = quadratic(EAMSGD(period=4, alpha=0.0, work_sharing=False, at_rendezvous="evaluate"))
    local = quadratic(PeriodicAveraging(period=10**6, at_rendezvous="evaluate"))
    assert alone.models is not None
    assert local.models is not None
    assert torch.equal(alone.models, local.models)


def test_one_worker_and_the_centre_follow_the_closed_form() -> None:
    lr, alpha, period, rounds = 0.1, 0.2, 3, 7
    eigenvalues = [0.5, 1.0]
    result = simulate(
        EAMSGD(period=period, alpha=alpha, at_rendezvous="evaluate"),
        Cluster(1, Constant(1.0)),
        work=Steps(number=rounds * period),
        objective=Quadratic(eigenvalues),
        optimizer=SGD(lr=lr),
    )
    assert result.models is not None
    assert result.mean is not None  # of what counts: the centre
    start = Quadratic(eigenvalues).start(torch.Generator().manual_seed(1))
    for direction, h in enumerate(eigenvalues):
        r = (1 - lr * h) ** period
        moves = np.linalg.matrix_power(np.array([[(1 - alpha) * r, alpha], [alpha * r, 1 - alpha]]), rounds)
        worker, centre = moves @ np.full(2, float(start[direction]))
        assert float(result.models[0, direction]) == pytest.approx(worker, rel=1e-5)
        assert float(result.mean[direction]) == pytest.approx(centre, rel=1e-5)


def test_it_learns_and_under_adopt_all_leave_with_one_model() -> None:
    result = simulate(
        EAMSGD(period=2),
        Cluster(8, Exponential(1.0)),
        work=Epochs(number=3, batches=400),
        objective=Quadratic([0.5, 1.0], noise=0.05),
        optimizer=SGD(lr=0.1),
    )
    assert result.loss is not None
    assert result.loss < 1e-3
    assert result.models is not None
    assert result.mean is not None
    assert torch.equal(result.models, result.mean.expand_as(result.models))


def test_the_option_s_momentum_takes_the_place_of_the_optimizer_s() -> None:
    given = quadratic(EAMSGD(period=4), optimizer=SGD(lr=0.02, momentum=0.9, nesterov=True))
    as_option = quadratic(EAMSGD(period=4, momentum=0.9), optimizer=SGD(lr=0.02))
    none = quadratic(EAMSGD(period=4, momentum=0.0), optimizer=SGD(lr=0.02, momentum=0.9))
    plain = quadratic(EAMSGD(period=4), optimizer=SGD(lr=0.02))
    assert given.loss == as_option.loss
    assert none.loss == plain.loss
    assert given.loss != plain.loss


def test_an_exchange_costs_a_model_each_way_over_the_server_s_port() -> None:
    links = Links(bandwidth=1e4)
    result = simulate(
        EAMSGD(period=5, at_rendezvous="evaluate"),
        Cluster(4, Constant(1.0)),
        work=Steps(number=20),
        links=links,
        model_bytes=1000,
        recording=Recording(),
    )
    # every fifth step the other three share the port, 0.1 s each way and each; then the last models go in and out
    assert result.time_s == pytest.approx(20 + 4 * (0.3 + 0.3) + 0.6, rel=0.02)
    assert [worker.exchanges for worker in result.workers] == [4, 4, 4, 4]
    assert result.workers[0].bytes_sent == 3 * 4 * 1000
    assert result.workers[1].bytes_sent == 4 * 1000


def test_a_worker_that_fails_ends_all_as_the_runtime_s_does() -> None:
    result = simulate(EAMSGD(), Cluster(4, Constant(1.0), failures={1: 7.5}), work=Steps(number=50))
    assert result.ended == "stalled"


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="server_rank"):
        simulate(EAMSGD(server_rank=2), Cluster(2, Constant(1.0)), work=Steps(number=1))
