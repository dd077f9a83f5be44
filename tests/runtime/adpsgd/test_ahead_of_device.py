"""Outer steps and a second copy where the host runs ahead of its device: they follow what x takes over, when it does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.emulated_device import EmulatedDevice
from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, staged_replica

D, STEPS = 6, 40


class Ahead:
    """One worker on a device whose streams go on when a seed says so, and merges at any time."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = EmulatedDevice(threads=False)
        self.x = [self.device.tensor(self.draw(2)), self.device.tensor(self.draw(4))]
        self.local_steps = LocalSteps(GossipOptions(**options))
        with self.device:
            self.local_steps.open(["a", "b"], self.x, ring(16))
            for of in self.vectors():
                self.device.tensor(of)
            self.replica = staged_replica(self.x, StagedCopies(self.x, self.device.streams()))
        self.merged = torch.zeros(D, dtype=torch.float64)
        self.updates: list[Tensor] = []

    def draw(self, numel: int = D) -> Tensor:
        return torch.randn(numel, generator=self.generator, dtype=torch.float64)

    def vectors(self) -> list[Tensor]:
        """What is kept beside x, in the device's memory as well."""
        second, state = self.local_steps._second, self.local_steps.state
        if second is not None:
            return second.difference
        return [] if state is None else [state.slow, state.velocity]

    def run(self) -> None:
        """Steps on which nobody waits for the device, merges in between; at the end everything has happened."""
        while len(self.updates) < STEPS:
            self.chance.choice([self.step, self.merge, self.advance, self.advance])()
        with self.device, self.local_steps.merging(self.x):
            self.replica.push_pull(self.x, forward_passes=0)
        with self.device:
            self.replica.settle()
            self.device.synchronize()
        self.device.check()

    def step(self) -> None:
        update = self.draw()
        self.updates.append(update)
        waits = self.device.host_waits
        with self.device:
            self.device.launch(lambda: torch._foreach_add_(self.x, list(update.split([2, 4]))))
            self.local_steps.step(
                self.x,
                progress=0.5,
                push_pull=lambda: self.replica.step(self.x),
                publish=lambda: self.replica.publish(self.x),
            )
        assert self.device.host_waits == waits, "a step has waited for the device"

    def merge(self) -> None:
        d = self.draw()
        self.merged += d
        for chunk in (slice(0, 3), slice(3, D)):
            self.replica.merge(chunk, d[chunk])
        self.replica.exchange_done()

    def advance(self) -> None:
        if waiting := self.device.waiting():
            self.device.advance(self.chance.choice(waiting))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_momentum_sees_own_progress_only_and_x_has_every_merge(seed: int, nesterov: bool) -> None:
    outer = Outer(0.7, 0.6, nesterov)
    worker = Ahead(seed, outer=outer, local_steps=4, dense_share=0.0)
    start = torch.cat(worker.x)
    worker.run()
    velocity, moved = torch.zeros(D, dtype=torch.float64), start.clone()
    for first in range(0, STEPS, 4):  # as it would be by itself
        progress = torch.stack(worker.updates[first : first + 4]).sum(0)
        velocity = 0.6 * velocity + progress
        jump = (0.7 - 1.0) * progress + 0.7 * 0.6 * velocity if nesterov else 0.7 * velocity - progress
        moved += progress + jump
    state = worker.local_steps.state
    assert state is not None
    torch.testing.assert_close(state.velocity, velocity, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(worker.x), moved + worker.merged, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_a_momentum_of_all_sees_merges_when_x_takes_them_over(seed: int) -> None:
    """φ moves at outer steps only, and v is what they have seen: Σ δ = x at the last one − x at the first."""
    worker = Ahead(seed, outer=Outer(1.0, 0.5, momentum_of="all"), local_steps=STEPS, dense_share=0.0)
    start = torch.cat(worker.x)
    worker.run()
    state = worker.local_steps.state
    assert state is not None
    late = torch.cat(worker.x) - state.slow  # merges of after the outer step
    seen = torch.stack(worker.updates).sum(0) + worker.merged - late
    torch.testing.assert_close(state.velocity, seen, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.slow, start + 1.5 * seen, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_a_second_copy_follows_every_merge(seed: int) -> None:
    worker = Ahead(seed, a2cid2=True)
    start = torch.cat(worker.x)
    worker.run()
    second = worker.local_steps._second
    assert second is not None
    kept = 2.0 * torch.cat(worker.x) + torch.cat(second.difference)
    expected = 2.0 * (start + torch.stack(worker.updates).sum(0)) + (2.0 * second.constants.gain + 1.0) * worker.merged
    torch.testing.assert_close(kept, expected, rtol=0, atol=1e-11)
