"""What is trained, on which hosts, and what it stands for.

The model that learns is small, so that a run is some ten seconds of one core. What takes virtual time, a step's computing and
the bytes of a model on its way, is a large one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gossip.simulation import Cluster, Epochs, Links, Uniform
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.torch_optimizers import TorchOptimizer
from recipes.simulated.modules import PlannedRun

LATENCY_S = 1e-3
SLOW_WORKER, SLOW_LINK = 4.0, 10.0

SCENARIOS = {
    "equal": "equal workers and links",
    "slow_worker": f"one worker {SLOW_WORKER:g} times slower",
    "slow_link": "one host's link at a tenth",
}


@dataclass(frozen=True)
class Condition:
    """Where a run is.

    Args:
        hosts: of one worker each.
        rate_mbit: of their links.
        scenario: a name in `SCENARIOS`; what is slow is the last host's.
    """

    hosts: int
    rate_mbit: float
    scenario: str

    def cluster(self, step_s: Uniform) -> Cluster:
        """The workers, by what a step takes."""
        slow = {self.hosts - 1: SLOW_WORKER} if self.scenario == "slow_worker" else {}
        return Cluster(self.hosts, step_s, slowdown=slow)

    @property
    def links(self) -> Links:
        """Between them."""
        slow: dict[int | tuple[int, int], float] = {self.hosts - 1: SLOW_LINK} if self.scenario == "slow_link" else {}
        return Links(latency_s=LATENCY_S, bandwidth=self.rate_mbit * 1e6 / 8, slow=slow)


@dataclass(frozen=True)
class Task:
    """A recipe's module on its data.

    Args:
        name: of the recipe.
        file: of its results, without its ending.
        title: in help and figures.
        model_bytes: of the model that it stands for.
        compute_s: of that one's step, in seconds.
        spread: of a step: uniform between 1 ± so much of it.
        rates_mbit: of the links.
        lrs: of DDP, that are tried.
        steps: of each worker, if all are equally fast.
        batch_size: samples of a worker's step.
        build: the problem, with this learning rate, of a run of so many steps.
        about: what else must be equal for runs to be compared.
    """

    name: str
    file: str
    title: str
    model_bytes: int
    compute_s: float
    rates_mbit: tuple[int, ...]
    lrs: tuple[float, ...]
    steps: int
    batch_size: int
    build: Callable[[float, PlannedRun], tuple[ModuleObjective, TorchOptimizer]]
    about: Callable[[], dict[str, Any]]
    spread: float = 0.1

    @property
    def step_s(self) -> Uniform:
        """What a step takes, in seconds."""
        return Uniform(self.compute_s, self.spread)

    def problem(self, *, lr: float, steps: int, hosts: int) -> tuple[ModuleObjective, TorchOptimizer]:
        """The recipe's module with its optimizer and its schedule over so many steps."""
        return self.build(lr, PlannedRun(steps, 1, hosts))

    def work(self, *, steps: int, hosts: int, samples: int | None) -> Epochs:
        """So many steps of so many hosts; in several epochs where the data has fewer samples.

        Args:
            steps: of each host.
            hosts: n.
            samples: of the data; None: as many as are needed.
        """
        batches = hosts * steps
        number = 1 if samples is None else math.ceil(batches * self.batch_size / samples)
        return Epochs(number=number, batches=batches // number, batch_size=self.batch_size)

    def settings(self) -> dict[str, Any]:
        """What must be equal for runs to be compared."""
        return {
            **self.about(),
            "model_bytes": self.model_bytes,
            "compute_s": self.compute_s,
            "spread": self.spread,
            "latency_s": LATENCY_S,
            "steps": self.steps,
            "batch_size": self.batch_size,
        }

    def shapes(self) -> list[torch.Size]:
        """Of the small model's parameters, as a flat model has them."""
        return self.problem(lr=1e-3, steps=1, hosts=1)[0].shapes
