"""Workers with unlike data: what do a second copy (A²CiD²), quasi-global momentum and exact graphs gain? In the simulator.

Sixteen workers on the digits, each with samples of its own whose labels are drawn from a Dirichlet distribution; links take no
time. Every row is run with several learning rates, and the one of the least mean test loss is shown. Quasi-global momentum
(Lin et al. 2021, arXiv 2102.04761) is not offered by the package: it is here, on the simulator's rounds, so that it can be
judged. What has been measured is kept, so a run that is stopped goes on.

    python -m benchmarks.unlike_data [--quick] [--table]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from benchmarks.harness import RESULTS, best_rate, console, print_table, spread, write_results
from lightning_gossip.simulation import (
    ADPSGD,
    DPSGD,
    SGD,
    AllReduce,
    Classes,
    Cluster,
    Objective,
    Recording,
    Steps,
    Strategy,
    Uniform,
    digits,
    mlp,
    simulate,
)
from lightning_gossip.simulation.problems.batch_assignment import Task
from lightning_gossip.simulation.run import Process, Run
from lightning_gossip.simulation.strategies.dpsgd import NeighbourRounds
from lightning_gossip.simulation.strategies.synchronous import Rounds

WORKERS, HIDDEN, BATCH, STEPS = 16, 32, 8, 600
ALPHAS = (0.1, 1.0)
SEEDS = (0, 1, 2)
LRS = (0.1, 0.2, 0.4)
QUASI_GLOBAL_LRS = (
    0.03,
    0.1,
    0.01,
)  # its momentum multiplies a steady gradient by 10, as SGD's does, but over ten times as long


@dataclass(frozen=True, kw_only=True)
class QuasiGlobal(DPSGD):
    """D-PSGD with quasi-global momentum: m ← μ m̂ + g ; x½ ← x − η m ; x⁺ ← W x½ ; m̂ ← μ m̂ + (1 − μ) (x − x⁺)/η.

    Args:
        momentum: μ.
    """

    momentum: float = 0.9

    @override
    def rounds(self, run: Run) -> Rounds:
        return QuasiGlobalRounds(self, run)


class QuasiGlobalRounds(NeighbourRounds):
    """All workers' rounds, with m̂ of each."""

    def __init__(self, strategy: QuasiGlobal, run: Run) -> None:
        super().__init__(strategy, run)
        self._momentum = strategy.momentum
        self._direction = torch.zeros_like(run.models.x)
        inner, x = run.models.optimizer.step, run.models.x

        def step(row: int | slice, gradient: torch.Tensor, lr: float) -> None:
            inner(row, gradient, lr)
            x[row].add_(self._direction[row], alpha=-lr * self._momentum)

        run.models.optimizer.step = step  # type: ignore[method-assign]

    @override
    def round(self, number: int, tasks: Sequence[Task]) -> Process:
        before, lr = self._run.models.x.clone(), self._run.lr
        yield from super().round(number, tasks)
        moved = before.sub_(self._run.models.x).div_(lr)
        self._direction.mul_(self._momentum).add_(moved, alpha=1.0 - self._momentum)


def gossip(topology: str, *, a2cid2: bool) -> ADPSGD:
    """Exchanges at every step, without a meeting."""
    return ADPSGD(topology=topology, a2cid2=a2cid2, work_sharing=False, at_rendezvous="evaluate")


def neighbours(topology: str) -> DPSGD:
    """(X − γG) W, without a meeting."""
    return DPSGD(topology=topology, overlap=False, at_rendezvous="evaluate")


ROWS: dict[str, Strategy] = {
    "DDP": AllReduce(),
    "adpsgd, ring": gossip("ring", a2cid2=False),
    "adpsgd, ring, A²CiD²": gossip("ring", a2cid2=True),
    "adpsgd, exponential": gossip("exponential", a2cid2=False),
    "adpsgd, exponential, A²CiD²": gossip("exponential", a2cid2=True),
    "dpsgd, ring": neighbours("ring"),
    "dpsgd, ring, quasi-global": QuasiGlobal(topology="ring", overlap=False, at_rendezvous="evaluate"),
    "dpsgd, exponential": neighbours("exponential"),
    "dpsgd, exponential, quasi-global": QuasiGlobal(topology="exponential", overlap=False, at_rendezvous="evaluate"),
    "dpsgd, base_2": neighbours("base_2"),
}


def learn(
    strategy: Strategy, *, alpha: float, lr: float, seed: int, train: Objective, test: Objective
) -> dict[str, float] | None:
    """One run; None if it diverged."""
    momentum = 0.0 if isinstance(strategy, QuasiGlobal) else 0.9
    result = simulate(
        strategy,
        Cluster(WORKERS, Uniform(1.0, 0.1)),
        work=Steps(number=STEPS, batch_size=BATCH, skew=alpha),
        objective=train,
        optimizer=SGD(lr=lr, momentum=momentum, weight_decay=1e-4, milestones=(0.5, 0.75)),
        seed=seed,
        recording=Recording(evaluate_every=WORKERS * STEPS // 20),
    )
    if result.ended != "done" or result.mean is None:
        return None
    accuracy = train.accuracy(result.mean)
    assert accuracy is not None
    return {
        "test": test.loss(result.mean),
        "train": train.loss(result.mean),
        "accuracy": accuracy,
        "apart": statistics.fmean(point.consensus_distance for point in result.points[5:11]),  # before the first fall of lr
        "sent": statistics.fmean(worker.bytes_sent for worker in result.workers) / result.model_bytes / STEPS,
    }


def measure(
    seeds: Sequence[int], done: dict[str, dict[str, dict[str, list[dict[str, float] | None]]]]
) -> Iterator[tuple[str, str, str, list[dict[str, float] | None]]]:
    """α, row, learning rate and its runs; of what is not done."""
    data = digits()
    assert data.test_x is not None
    assert data.test_y is not None
    train, test = mlp(data, hidden=HIDDEN), mlp(Classes(data.test_x, data.test_y), hidden=HIDDEN)
    for alpha in ALPHAS:
        for row, strategy in ROWS.items():
            for lr in QUASI_GLOBAL_LRS if isinstance(strategy, QuasiGlobal) else LRS:
                if f"{lr:g}" not in done.get(f"{alpha:g}", {}).get(row, {}):
                    runs = [learn(strategy, alpha=alpha, lr=lr, seed=seed, train=train, test=test) for seed in seeds]
                    yield f"{alpha:g}", row, f"{lr:g}", runs


def show(results: dict[str, Any]) -> None:
    """A table for each α."""
    for alpha, rows in results["runs"].items():
        lines = []
        for row in ROWS:
            found = best_rate(rows.get(row, {}), results["seeds"])
            if found is None:
                continue
            lr, of = found
            columns = [spread([run[kind] for run in of]) for kind in ("test", "train")]
            mean = {kind: statistics.fmean(run[kind] for run in of) for kind in ("accuracy", "apart", "sent")}
            lines.append([row, lr, *columns, f"{mean['accuracy']:.4f}", f"{mean['apart']:.4f}", f"{mean['sent']:.2f}"])
        heading = ("", "lr", "test loss", "train loss", "accuracy", "consensus distance", "models sent a step")
        print_table(f"{WORKERS} workers, α = {alpha}, {STEPS} steps", heading, lines, caption=None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers with unlike data, on the digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, nothing kept")
    parser.add_argument("--table", action="store_true", help="show what was measured before")
    options = parser.parse_args()
    kept = RESULTS / "unlike_data.json"
    if options.table:
        show(json.loads(kept.read_text()))
        return
    torch.set_num_threads(1)
    seeds = SEEDS[:1] if options.quick else SEEDS
    done = json.loads(kept.read_text())["runs"] if kept.exists() and not options.quick else {}
    results: dict[str, Any] = {"seeds": len(seeds), "runs": done}
    for alpha, row, lr, runs in measure(seeds, done):
        results["runs"].setdefault(alpha, {}).setdefault(row, {})[lr] = runs
        console.print(f"α {alpha}: {row}, lr {lr}")
        if not options.quick:
            write_results("unlike_data", results)
    show(results)


if __name__ == "__main__":
    main()
