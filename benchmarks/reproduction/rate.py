"""The rate 1/√K, with the theorem's step size. (AD-PSGD, arXiv 1710.06952: O(1/√K), and no n in it.)

K updates of all workers together, each a batch's gradient, at the constant learning rate n/(10L + σ√K) of
``lightning_gossip.analysis.step_size``. What the theorem bounds is measured: (1/K) Σ ‖∇f(x̄_k)‖², x̄ the mean model, the
gradient of the whole loss. On a quadratic of 20 curvatures between 0.01 and 1 with noise of σ² = 20, where L and σ are known,
and on digits with a hidden layer of 16, where L is the largest curvature at a loss of 0.5 and σ² the variance of a batch's
gradient at the start. All-reduce makes K/n steps with the mean of n gradients at the same learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.reproduction.report import COLOURS, Report, axes_of, progress
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.analysis import least_updates, rho_bar, step_size
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    AllReduce,
    Classifier,
    Cluster,
    Objective,
    Quadratic,
    Recording,
    Steps,
    Strategy,
    Uniform,
    digits,
    simulate,
)

WORKERS = (4, 16)
UPDATES = (400, 1_600, 6_400)
SEEDS = (0, 1)
SPECTRUM, NOISE = np.geomspace(0.01, 1.0, 20).tolist(), 1.0
HIDDEN, BATCH_SIZE = 16, 8
STRATEGIES: dict[str, Strategy] = {
    "all-reduce": AllReduce(),
    "AD-PSGD": ADPSGD(topology="exponential", at_rendezvous="evaluate"),
    "AD-PSGD, ring": ADPSGD(topology="ring", at_rendezvous="evaluate"),
}
_POINTS = 200


class SquaredGradient(Objective):
    """Another objective, of which ‖∇f‖² is recorded in place of the loss."""

    def __init__(self, of: Objective) -> None:
        self.of, self.numel, self.dtype, self.samples = of, of.numel, of.dtype, of.samples

    @override
    def start(self, generator: torch.Generator) -> Tensor:
        return self.of.start(generator)

    @override
    def gradients(self, models: Tensor, ranks: Any, batches: Any, generators: Any) -> Tensor:
        return self.of.gradients(models, ranks, batches, generators)

    @override
    def loss(self, model: Tensor) -> float:
        return float(full_gradient(self.of, model).square().sum())


class Problem(NamedTuple):
    """An objective, and what the theorem asks of it."""

    objective: Objective
    lipschitz: float
    variance: float


def full_gradient(objective: Objective, model: Tensor) -> Tensor:
    """∇f without noise, shape (d,)."""
    if isinstance(objective, Quadratic):
        return torch.tensor(SPECTRUM, dtype=model.dtype) * model
    everything = list(range(objective.samples or 0))
    return objective.gradients(model.unsqueeze(0), [0], [everything], [np.random.default_rng(0)])[0]


def network() -> Problem:
    """Digits."""
    objective = Classifier(digits(), hidden=HIDDEN, dtype=torch.float64)
    start = objective.start(torch.Generator().manual_seed(0))
    at_start, later, epsilon = full_gradient(objective, start), start, 1e-4
    while objective.loss(later) > 0.5:
        later = later - 0.2 * full_gradient(objective, later)
    there, curvature = full_gradient(objective, later), 0.0
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=start.dtype)
    for _ in range(40):  # power iteration
        direction /= direction.norm()
        product = (full_gradient(objective, later + epsilon * direction) - there) / epsilon
        curvature, direction = float(product @ direction), product
    rng = np.random.default_rng(0)
    batches = [rng.choice(objective.samples or 0, BATCH_SIZE, replace=False).tolist() for _ in range(500)]
    gradients = objective.gradients(start.expand(500, -1), [0] * 500, batches, [rng] * 500)
    return Problem(objective, curvature, float((gradients - at_start).square().sum(1).mean()))


def mean_square(problem: Problem, strategy: Strategy, workers: int, updates: int, *, seed: int) -> float:
    """(1/K) Σ ‖∇f(x̄_k)‖²."""
    result = simulate(
        strategy,
        Cluster(workers, Uniform(1.0, 0.1)),
        work=Steps(number=updates // workers, batch_size=BATCH_SIZE),
        objective=SquaredGradient(problem.objective),
        optimizer=SGD(lr=step_size(workers, updates, problem.lipschitz, problem.variance)),
        seed=seed,
        recording=Recording(evaluate_every=max(1, updates // _POINTS)),
    )
    return statistics.fmean(point.loss for point in result.points)


def slope(updates: Sequence[int], values: Sequence[float]) -> float:
    """Of the logarithms, by least squares."""
    return float(np.polyfit(np.log(updates), np.log(values), 1)[0])


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    quadratic = Problem(Quadratic(SPECTRUM, noise=NOISE), max(SPECTRUM), NOISE**2 * len(SPECTRUM))
    problems = {"quadratic": quadratic, "digits, MLP-16": network()}
    figure, panels = axes_of(len(problems), width=5.2)
    rows = []
    for (name, problem), axes in zip(problems.items(), panels, strict=True):
        counts = UPDATES
        for workers in WORKERS:
            for algorithm, strategy in STRATEGIES.items():
                with progress(f"{name}, {workers} workers, {algorithm}"):
                    values = [
                        statistics.fmean(mean_square(problem, strategy, workers, k, seed=seed) for seed in SEEDS)
                        for k in counts
                    ]
                label = algorithm if algorithm != "AD-PSGD" else "AD-PSGD, exponential"
                cells = [f"{value:.4f}" for value in values]
                rows.append(
                    [
                        name,
                        f"{workers}",
                        label,
                        *cells,
                        f"{slope(counts, values):.2f}",
                        f"{slope(counts[-2:], values[-2:]):.2f}",
                    ]
                )
                style = "o-" if workers == WORKERS[-1] else "s--"
                axes.loglog(counts, values, style, color=COLOURS[algorithm], ms=4, label=f"{label}, n = {workers}")
        first = statistics.fmean(float(rows[-1][3 + i]) * math.sqrt(k) for i, k in enumerate(counts))
        axes.loglog(counts, [first / math.sqrt(k) for k in counts], ":", color="#444444", label="slope −1/2")
        axes.set(title=name, xlabel="K, updates of all workers")
    panels[0].set_ylabel("(1/K) Σ ‖∇f(x̄_k)‖²")
    panels[0].legend(frameon=False, fontsize=7)
    report.table(
        "Mean squared gradient over K updates, at the theorem's learning rate for each K",
        ("problem", "n", "algorithm", *(f"K = {k:,}" for k in UPDATES), "slope", "of the last two"),
        rows,
        caption=f"{len(SEEDS)} seeds; slopes of the logarithms, −0.5 for 1/√K. At {_POINTS} points of each run.",
    )
    report.table(
        "What the theorem asks for",
        ("problem", "L", "σ²", "graph", "n", "ρ̄", "learning rate at K = 6,400", "least K"),
        [
            _asked(name, problem, graph, n)
            for name, problem in problems.items()
            for graph in ("ring", "exponential")
            for n in WORKERS
        ],
        caption="Least K with a staleness of at most n − 1: recalled, not verified against the paper.",
    )
    report.figure(figure)
    return {"seeds": SEEDS, "updates": UPDATES, "batch_size": BATCH_SIZE, "spectrum": SPECTRUM, "noise": NOISE}


def _asked(name: str, problem: Problem, graph: str, workers: int) -> list[str]:
    topology = make_topology(graph, workers)
    rate = step_size(workers, 6_400, problem.lipschitz, problem.variance)
    least = least_updates(topology, problem.lipschitz, problem.variance)
    mixing = f"{rho_bar(topology):,.0f}"
    return [
        name,
        f"{problem.lipschitz:.2f}",
        f"{problem.variance:.2f}",
        graph,
        f"{workers}",
        mixing,
        f"{rate:.3f}",
        f"{least:.0e}",
    ]
