"""Second moments of AD-PSGD, and of a server with momentum, against the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_gossip.algorithm import ring
from lightning_gossip.algorithm.laws import Exponential
from lightning_gossip.analysis.delays.delays import constant
from lightning_gossip.analysis.mean.discrete import own_limit
from lightning_gossip.analysis.mean.stability import decay_rate
from lightning_gossip.analysis.planning.arrivals import free_arrivals
from lightning_gossip.analysis.second_moments.adpsgd import gossip_limit, gossip_rms_decay
from lightning_gossip.analysis.second_moments.mean_square import random_staleness_limit, rms_decay_rate
from lightning_gossip.analysis.second_moments.memoryless import FloatArray, server_rms_decay
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import ADPSGD, APSGD
from tests.analysis.simulated import rms_rate


@pytest.mark.parametrize(("g", "momentum", "within"), [(0.3, 0.0, 0.06), (0.1, 0.9, 0.06)])
def test_gossips_mean_model_decays_as_its_second_moments_say(g: float, momentum: float, within: float) -> None:
    measured = rms_rate(ADPSGD(), Exponential(1.0), g, momentum=momentum, steps=40 if momentum == 0.0 else 100)
    assert gossip_rms_decay(g, ring(4), momentum=momentum) == pytest.approx(measured, rel=within)


def test_gossip_does_not_decay_as_a_server_of_the_same_staleness_would() -> None:
    """A worker reads its own update at full weight: a look-ahead, which a server's workers lack."""
    as_a_server = 4 * decay_rate(0.3 / 4, free_arrivals(4, Exponential(1.0)).delay)
    measured = rms_rate(ADPSGD(), Exponential(1.0), 0.3, steps=40)
    assert as_a_server > 1.5 * measured
    assert measured == pytest.approx(0.3, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "below", "above"), [(0.0, 1.35, 1.75), (0.9, 1.9, 2.5)])
def test_gossip_diverges_where_its_second_moments_grow(momentum: float, below: float, above: float) -> None:
    limit = gossip_limit(ring(4), momentum=momentum)
    assert below < limit < above
    assert rms_rate(ADPSGD(), Exponential(1.0), below, momentum=momentum, steps=200) > 0.0
    assert rms_rate(ADPSGD(), Exponential(1.0), above, momentum=momentum, steps=200) < 0.0


def test_without_momentum_the_servers_second_moments_are_the_four_of_memoryless_workers() -> None:
    for workers, g in ((1, 0.3), (4, 0.4), (16, 1.0)):
        assert server_rms_decay(g, workers, scale=1 / workers) == pytest.approx(rms_decay_rate(g / workers, workers))


def test_with_momentum_a_servers_model_decays_as_its_second_moments_say() -> None:
    measured = rms_rate(APSGD(), Exponential(1.0), 0.1, momentum=0.9)
    assert 4 * server_rms_decay(0.1, 4, scale=0.25, momentum=0.9) == pytest.approx(measured, rel=0.08)


def test_at_the_limit_of_gossip_the_second_moments_stand_still() -> None:
    for momentum in (0.0, 0.9):
        limit = gossip_limit(ring(4), momentum=momentum)
        assert gossip_rms_decay(1.02 * limit, ring(4), momentum=momentum) < 0.0
        assert gossip_rms_decay(0.98 * limit, ring(4), momentum=momentum) > 0.0


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_torch_s_own_optimizer_converges_below_the_limit_and_not_above(momentum: float, nesterov: bool) -> None:
    limit = own_limit(momentum, nesterov=nesterov)
    assert descended(0.98 * limit, momentum, nesterov) < 1e-3
    assert descended(1.02 * limit, momentum, nesterov) > 10.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: server_rms_decay(-0.1, 4, scale=0.25), "g=-0.1"),
        (lambda: server_rms_decay(0.1, 0, scale=0.25), "workers=0"),
        (lambda: server_rms_decay(0.1, 4, scale=0.25, momentum=1.5), "momentum=1.5"),
        (lambda: gossip_rms_decay(0.0, ring(4)), "g=0.0"),
        (lambda: gossip_rms_decay(0.1, ring(4), exchanges_per_step=-1.0), "exchanges_per_step=-1.0"),
        (lambda: gossip_limit(ring(4), momentum=1.0), "momentum=1.0"),
        (lambda: random_staleness_limit(constant(3.0), momentum=-0.1), "momentum=-0.1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()


def descended(g: float, momentum: float, nesterov: bool) -> float:
    """|x| after many steps on ½ x²."""
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=g, momentum=momentum, nesterov=nesterov)
    for _ in range(2_000):
        x.grad = x.detach().clone()
        optimizer.step()
    return float(x.detach().abs())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("g", [0.05, 0.3, 2.0])
def test_second_moments_are_those_of_the_mean_of_all_events(g: float, nesterov: bool) -> None:
    """Every event is a matrix A of the whole state, as torch's SGD writes its step; E[A ⊗ A] has the factor."""
    n, momentum, scale, edges = 4, 0.9, 0.25, [(0, 1), (1, 2), (2, 3), (3, 0)]

    def step(model: int, read: int, velocity: int, *, size: int, moved: float) -> FloatArray:
        unit, after = np.eye(size), np.eye(size)
        after[velocity] = momentum * unit[velocity] + unit[read]
        after[model] -= moved * (unit[read] + momentum * after[velocity] if nesterov else after[velocity])
        after[read] = after[model]
        return after

    def exchange(i: int, j: int) -> FloatArray:
        after = np.eye(3 * n)
        after[[i, j]] = 0.5 * (after[i] + after[j])
        return after

    def decay(events: list[FloatArray]) -> float:  # per event
        mean = sum(np.kron(event, event) for event in events) / len(events)
        return -0.5 * math.log(np.abs(np.linalg.eigvals(mean)).max())

    # n/2 exchanges beside n steps: each of the four edges half as often as a worker's step
    events = [step(i, n + i, 2 * n + i, size=3 * n, moved=g) for i in range(n)] * 2 + [exchange(i, j) for i, j in edges]
    found = gossip_rms_decay(g, ring(n), momentum=momentum, nesterov=nesterov)
    assert found == pytest.approx(1.5 * n * decay(events), rel=1e-6)
    events = [step(0, 1 + i, 1 + n + i, size=1 + 2 * n, moved=scale * g) for i in range(n)]
    assert server_rms_decay(g, n, scale=scale, momentum=momentum, nesterov=nesterov) == pytest.approx(decay(events), rel=1e-6)


def test_nesterov_s_momentum_lowers_the_limit_of_gossip() -> None:
    assert gossip_limit(ring(4), momentum=0.9, nesterov=True) < 0.75 * gossip_limit(ring(4), momentum=0.9)
