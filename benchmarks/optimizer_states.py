"""Does it pay to average Adam's moments with the models, and how often? At equal bytes, on a language model, in the simulator.

DES-LOC averages the second moments more seldom than the parameters. The small model of benchmarks.time_to_loss with AdamW on
four workers: each row sends as many bytes as one vector of the model's size every eight steps, so that whoever averages the
moments as well averages the models more seldom; two rows aside. Every row is run with two learning rates, and the one of the
lesser mean loss is shown. What has been measured is kept, so a run that is stopped goes on.

    python -m benchmarks.optimizer_states [--table]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.harness import RESULTS, console, print_table, spread, write_results
from benchmarks.time_to_loss.language import CHAR_GPT
from lightning_gossip.simulation import Cluster, Constant, Epochs, PeriodicAveraging, Recording, simulate
from lightning_gossip.simulation.problems.torch_optimizers import StackedTorch, TorchOptimizer

HOSTS, STEPS, SEEDS, LRS = 4, 320, (0, 1, 2), (0.004, 0.002)


@dataclass(frozen=True)
class Row:
    """What is averaged, and when.

    Args:
        period: steps between two averagings of the models.
        every: of so many of them one is of the moments too; None for none.
        second_only: whether first moments stay each worker's own.
    """

    period: int
    every: int | None = None
    second_only: bool = False


ROWS = {
    "no moments": Row(8),
    "both, always": Row(24, every=1),
    "both, every second time": Row(16, every=2),
    "both, every fourth time": Row(12, every=4),
    "second moments, always": Row(16, every=1, second_only=True),
    "second moments, every second time": Row(12, every=2, second_only=True),
    "both, always; three times the bytes": Row(8, every=1),
    "no moments; a third of the bytes": Row(24),
}


@dataclass(frozen=True, kw_only=True)
class Seldom(TorchOptimizer):
    """Moments take part in some of the averagings.

    Args:
        row: in which.
    """

    row: Row

    @override
    def stacked(self, models: Tensor) -> _Stacked:
        return _Stacked(self, models)


class _Stacked(StackedTorch):
    def __init__(self, options: Seldom, models: Tensor) -> None:
        super().__init__(options, models)
        self._row, self._averagings = options.row, 0

    @override
    def states(self) -> list[Tensor]:
        self._averagings += 1
        if self._row.every is None or self._averagings % self._row.every:
            return []
        return super().states()[1 if self._row.second_only else 0 :: 2 if self._row.second_only else 1]


def learn(row: Row, lr: float, seed: int) -> dict[str, Any]:
    """One run: the loss of the mean model at the end, and what a worker has sent."""
    objective, optimizer = CHAR_GPT.problem(lr=lr, steps=STEPS, hosts=HOSTS)
    options = {name: getattr(optimizer, name) for name in ("kind", "groups", "lrs", "clip_norm")}
    result = simulate(
        PeriodicAveraging(period=row.period, optimizer_state="average", at_rendezvous="evaluate"),
        Cluster(HOSTS, Constant(1.0)),
        work=Epochs(number=1, batches=HOSTS * STEPS, batch_size=CHAR_GPT.batch_size),
        objective=objective,
        optimizer=Seldom(**options, row=row),
        seed=seed,
        recording=Recording(evaluate_every=HOSTS * STEPS // 8),
    )
    sent = statistics.fmean(worker.bytes_sent for worker in result.workers)
    return {
        "losses": [round(point.loss, 5) for point in result.points],
        "averagings": result.averagings,
        "bytes": sent / objective.numel / STEPS,
    }


def show(results: dict[str, Any]) -> None:
    """The table."""
    lines = []
    for name, runs in results["runs"].items():
        whole = {lr: of for lr, of in runs.items() if len(of) == len(SEEDS)}
        if whole:
            lr, best = min(whole.items(), key=lambda item: statistics.fmean(run["losses"][-1] for run in item[1]))
            loss = spread([run["losses"][-1] for run in best])
            each = ", ".join(f"{run['losses'][-1]:.3f}" for run in best)
            lines.append([name, str(ROWS[name].period), lr, loss, each, f"{best[0]['bytes']:.3f}"])
    columns = ("moments averaged", "period", "lr", "loss at the end", "seeds", "bytes a step and parameter")
    print_table(f"{HOSTS} workers, {STEPS} steps, AdamW", columns, lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Adam's moments: averaged with the models, more seldom, or never.")
    parser.add_argument("--table", action="store_true", help="show what was measured before")
    kept = RESULTS / "optimizer_states.json"
    done = json.loads(kept.read_text())["runs"] if kept.exists() else {}
    results: dict[str, Any] = {**CHAR_GPT.settings(), "hosts": HOSTS, "steps": STEPS, "runs": done}
    if not parser.parse_args().table:
        torch.set_num_threads(1)
        for lr in LRS:
            for seed in SEEDS:
                for name, row in ROWS.items():
                    runs = results["runs"].setdefault(name, {}).setdefault(f"{lr:g}", [])
                    if len(runs) <= seed:
                        runs.append(learn(row, lr, seed))
                        console.print(f"{name}, lr {lr:g}, seed {seed}: {runs[-1]['losses'][-1]:.4f}")
                        write_results("optimizer_states", results)
    show(results)


if __name__ == "__main__":
    main()
