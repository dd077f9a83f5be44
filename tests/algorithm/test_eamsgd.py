"""Elastic averaging alone: what an exchange keeps, closed forms, and a worker's effects in each order of events."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.eamsgd import (
    Effects,
    ElasticCentre,
    ElasticProtocol,
    Exchange,
    Follow,
    Move,
    Refused,
)
from lightning_gossip.algorithm.eamsgd_options import EAMSGDOptions
from lightning_gossip.errors import ConfigurationError

SERVED, NOT_FINITE = Served(3, 2, False), Served(3, None, False, refused=True)


def exchange(centre: ElasticCentre, rank: int, x: Tensor) -> int | None:
    """One exchange of a worker with the centre, as a driver does it."""
    staleness = centre.push(rank, x.clone())
    x.add_(centre.answer(rank))
    return staleness


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(
    alpha=st.floats(0.0, 0.5),
    order=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40),
    seed=st.integers(0, 2**31),
)
def test_exchanges_keep_the_sum_of_all_models_and_the_centre(alpha: float, order: list[tuple[int, bool]], seed: int) -> None:
    """Whoever exchanges when, with local steps in between: only these change it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    centre = ElasticCentre(torch.randn(3, dtype=torch.float64, generator=generator), alpha=alpha)
    total = x.sum(0) + centre.model
    for rank, steps in order:
        if steps:
            update = torch.randn(3, dtype=torch.float64, generator=generator)
            x[rank] += update
            total += update
        exchange(centre, rank, x[rank])
    torch.testing.assert_close(x.sum(0) + centre.model, total, rtol=0, atol=1e-12)


def test_in_whole_numbers_not_a_bit_of_the_sum_is_lost() -> None:
    """Both ends use the same change, in float32 too: what one adds the other subtracts."""
    x, centre = torch.tensor([3.0, 1e7, -5.0]), ElasticCentre(torch.tensor([1.0, 2.0, 7.0]), alpha=0.25)
    exchange(centre, 0, x)
    assert x.tolist() == [2.5, 7500000.5, -2.0]
    assert (x + centre.model).tolist() == [4.0, 10000002.0, 2.0]


def test_an_exchange_multiplies_the_difference() -> None:
    for alpha in (0.0, 0.1, 0.5):
        x, centre = vector(3.0), ElasticCentre(vector(1.0), alpha=alpha)
        exchange(centre, 0, x)
        assert float(x - centre.model) == pytest.approx((1.0 - 2.0 * alpha) * 2.0, abs=1e-15)


@pytest.mark.parametrize("workers", [2, 4, 64])
def test_a_round_of_all_moves_the_centre_by_the_same_share_for_any_number_of_workers(workers: int) -> None:
    alpha = EAMSGDOptions().moving_rate(workers)
    centre = ElasticCentre(vector(0.0), alpha=alpha)
    for rank in range(workers):
        exchange(centre, rank, vector(1.0))
    assert float(centre.model) == pytest.approx(1.0 - (1.0 - alpha) ** workers, abs=1e-12)
    assert 0.59 < float(centre.model) < 0.70  # 1 − e^−0.9 in the limit


@pytest.mark.parametrize("period", [1, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.225, 0.5])
def test_one_worker_on_a_quadratic_follows_the_closed_form(period: int, alpha: float) -> None:
    eta, h = 0.3, 0.7
    x, centre = vector(2.0), ElasticCentre(vector(2.0), alpha=alpha)
    worker, rounds = ElasticProtocol(period), 6
    for _ in range(rounds * period):
        x -= eta * h * x
        drive(worker.step(), centre, x)
    r = (1.0 - eta * h) ** period
    expected = np.linalg.matrix_power(np.array([[(1 - alpha) * r, alpha], [alpha * r, 1 - alpha]]), rounds) @ [2.0, 2.0]
    assert [float(x), float(centre.model)] == pytest.approx(expected.tolist(), rel=1e-12)
    assert worker.exchanges == rounds


def drive(effects: Effects, centre: ElasticCentre, x: Tensor) -> None:
    outcome: Any = None
    while True:
        try:
            effect = effects.send(outcome)
        except StopIteration:
            return
        outcome = None
        if isinstance(effect, Exchange):
            outcome = Served(centre.version, centre.push(0, x.clone()), False)
        else:
            assert effect == Move()
            x.add_(centre.answer(0))


def test_without_a_force_every_worker_trains_alone() -> None:
    x, centre = vector(2.0), ElasticCentre(vector(5.0), alpha=0.0)
    exchange(centre, 0, x)
    assert (float(x), float(centre.model)) == (2.0, 5.0)


def test_staleness_counts_the_exchanges_of_others() -> None:
    centre = ElasticCentre(vector(0.0), alpha=0.1)
    assert [exchange(centre, rank, vector(1.0)) for rank in (0, 1, 1, 2, 0)] == [0, 1, 0, 3, 3]
    assert centre.version == 5


def test_a_model_that_is_refused_is_answered_by_the_centre() -> None:
    centre = ElasticCentre(vector(4.0), alpha=0.1)
    centre.refuse(1)
    assert float(centre.answer(1)) == 4.0
    assert centre.version == 0


def done(effects: Effects, served: Served = SERVED) -> list[Any]:
    seen: list[Any] = []
    outcome: Any = None
    while True:
        try:
            effect = effects.send(outcome)
        except StopIteration:
            return seen
        seen.append(effect)
        outcome = served if isinstance(effect, Exchange) else None


def test_a_worker_exchanges_after_every_period_of_its_own_steps() -> None:
    worker = ElasticProtocol(3)
    assert [done(worker.step()) for _ in range(7)] == [[], [], [Exchange(), Move()], [], [], [Exchange(), Move()], []]
    worker.restart()
    assert [done(worker.step()) for _ in range(3)] == [[], [], [Exchange(), Move()]]
    assert (worker.exchanges, worker.refused, worker.staleness.count) == (3, 0, 3)


def test_a_refused_model_is_replaced_and_counted() -> None:
    worker = ElasticProtocol(1)
    assert done(worker.step(), NOT_FINITE) == [Exchange(), Refused(), Follow()]
    assert (worker.exchanges, worker.refused, worker.staleness.count) == (1, 1, 0)


def test_a_worker_goes_on_in_the_middle_of_a_period() -> None:
    worker, resumed = ElasticProtocol(3), ElasticProtocol(3)
    for _ in range(5):
        done(worker.step())
    resumed.load_state_dict(json.loads(json.dumps(worker.state_dict())))
    assert resumed.state_dict() == worker.state_dict()
    assert done(resumed.step()) == [Exchange(), Move()]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"period": 0}, "period=0"),
        ({"alpha": 0.6}, "alpha=0.6"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": True}, "alpha=True"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"server_rank": -1}, "server_rank=-1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        EAMSGDOptions(**options)


def test_the_centre_is_on_a_rank_that_there_is() -> None:
    with pytest.raises(ConfigurationError, match="server_rank=2 of 2 workers"):
        EAMSGDOptions(server_rank=2).check(2)
