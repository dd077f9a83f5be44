"""A²CiD²: its constants, what it keeps, and the recursion of the paper where events come one at a time."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from lightning_gossip.algorithm.adpsgd.a2cid2 import Acceleration, SecondCopy, acceleration
from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.topology.generators import complete, exponential, ring, star, torus
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError

OPTIONS = GossipOptions(a2cid2=True)


@pytest.mark.parametrize("topology", [ring(8), torus(12), exponential(16), star(6), complete(5)], ids=repr)
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_the_constants_are_those_of_the_laplacian_of_rates(topology: Topology, rate: float) -> None:
    laplacian = np.zeros((topology.n, topology.n))
    for i, j in topology.edges:  # each worker starts half of its exchanges, with each neighbour as often
        weight = rate / 2 * (1 / topology.degree(i) + 1 / topology.degree(j))
        laplacian[[i, j], [i, j]] += weight
        laplacian[[i, j], [j, i]] -= weight
    slowest = 1.0 / np.linalg.eigvalsh(laplacian)[1]
    inverse = np.linalg.pinv(laplacian)
    resistance = max((inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]) / 2 for i, j in topology.edges)
    constants = acceleration(topology, rate)
    assert constants.mixing == pytest.approx(0.5 / math.sqrt(slowest * resistance))
    assert constants.gain == pytest.approx(0.5 * math.sqrt(slowest / resistance))


def test_a_ring_has_much_to_gain_and_a_dense_graph_nothing() -> None:
    """α̃ = ½ is plain averaging of x̃ too."""
    assert acceleration(ring(32), 1.0).gain > 3.0
    assert acceleration(exponential(16), 1.0).gain == pytest.approx(0.516, abs=1e-3)
    assert acceleration(complete(1), 1.0) == acceleration(ring(4), 0.0) == (0.0, 0.5)


def test_a_step_boundary_is_the_recursion_of_the_paper() -> None:
    """With x and x̃ written down, and the matrix exponential."""
    generator = torch.Generator().manual_seed(1)
    x, constants = torch.zeros(5, dtype=torch.float64), Acceleration(0.3, 1.7)
    second = SecondCopy([x], constants)
    pair = torch.zeros(2, 5, dtype=torch.float64)
    mixing = torch.from_numpy(expm(np.array([[-0.3, 0.3], [0.3, -0.3]])))
    for _ in range(7):
        update, half_difference = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        x += update
        second.mix([x])
        with second.merging([x]):
            x += half_difference
        pair = mixing @ (pair + update) + torch.stack([half_difference, 2.0 * 1.7 * half_difference])
        torch.testing.assert_close(torch.stack([x, x + second.difference[0]]), pair, rtol=1e-12, atol=1e-14)


class Worker:
    """One of a ring of six: its parameters, its published model, its second copy."""

    def __init__(self) -> None:
        self.x = [torch.zeros(4, dtype=torch.float64)]
        self.local_steps = LocalSteps(OPTIONS)
        self.local_steps.open(["x"], self.x, ring(6))
        self.replica = Replica(self.x)

    def step(self, update: torch.Tensor) -> None:
        self.x[0] += update
        self.local_steps.step(
            self.x,
            progress=None,
            push_pull=lambda: self.replica.push_pull(self.x),
            publish=lambda: self.replica.publish(self.x),
        )

    def kept(self) -> torch.Tensor:
        """2 (x + m) + e + (2α̃ − 1) m; x + m is y, where nothing was stepped since."""
        second = self.local_steps._second
        assert second is not None
        merges = self.replica.published - self.x[0]
        return 2.0 * self.replica.published + second.difference[0] + (2.0 * second.constants.gain - 1.0) * merges


def test_the_sum_changes_by_local_updates_only_in_any_order() -> None:
    order, generator = random.Random(1), torch.Generator().manual_seed(1)
    workers = [Worker() for _ in range(6)]
    updates = torch.zeros(4, dtype=torch.float64)
    for _ in range(400):
        rank = order.randrange(6)
        if order.random() < 0.5:
            update = torch.randn(4, generator=generator, dtype=torch.float64)
            workers[rank].step(update)
            updates += update
            continue
        ends = workers[rank], workers[(rank + 1) % 6]
        half_difference = 0.5 * (ends[1].replica.published - ends[0].replica.published)
        between = order.choice([None, *ends])
        if between is not None:  # a step between the copies and the merge
            between.step(torch.zeros(4, dtype=torch.float64))
        ends[0].replica.merge(slice(0, 4), half_difference)
        ends[1].replica.merge(slice(0, 4), -half_difference)
        kept = torch.stack([worker.kept() for worker in workers]).sum(0)
        torch.testing.assert_close(kept, 2.0 * updates, rtol=1e-12, atol=1e-11)


def test_the_mean_of_all_and_a_model_of_others_leave_no_difference() -> None:
    worker = Worker()
    second = worker.local_steps._second
    assert second is not None
    for begin in ("adopting", "begin_anew"):
        worker.replica.merge(slice(0, 4), torch.ones(4, dtype=torch.float64))
        worker.step(torch.zeros(4, dtype=torch.float64))
        assert second.difference[0].abs().sum() > 0
        if begin == "adopting":
            with worker.local_steps.adopting(worker.x):
                worker.x[0].fill_(3.0)
        else:
            worker.local_steps.begin_anew()
            worker.step(torch.zeros(4, dtype=torch.float64))
        assert second.difference[0].abs().sum() == 0


def test_a_session_follows_the_graph_and_the_parameters_that_there_are() -> None:
    worker = Worker()
    second = worker.local_steps._second
    assert second is not None
    second.difference[0].fill_(1.0)
    worker.local_steps.open(["x"], worker.x, complete(4))
    assert worker.local_steps._second is second
    assert second.constants == acceleration(complete(4), 1.0)
    worker.local_steps.open(["x", "y"], [*worker.x, torch.zeros(2)], complete(4))
    assert len(worker.local_steps._second.difference) == 2


def test_a_worker_that_is_frozen_has_nothing_to_mix() -> None:
    second = SecondCopy([], Acceleration(0.3, 1.7))
    second.mix([])
    with second.merging([]):
        second.begin()


@pytest.mark.parametrize("options", [{"local_steps": 50}, {"local_steps": 50, "dense_share": 0.1}])
def test_it_is_refused_where_exchanges_are_few(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="a2cid2=True accelerates exchanges at every step"):
        GossipOptions(a2cid2=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a2cid2='yes'"):
        GossipOptions(a2cid2="yes")  # type: ignore[arg-type]
