"""A ring or the exponential graph: how far apart are the models for the same bytes?

Models are driven apart by noise (all workers' batches are of the same data) and by unlike workers (each has data of its own).
Shown is the mean squared distance of the models to their mean, (1/n) Σ ‖x_i − x̄‖², before each epoch's average, which is
looked at and not adopted; the mean of the last epochs, over that of a ring. Exchanges a step stand beside it: as many bytes.

- simulated: 16 to 128 workers, a quadratic of 20 dimensions with γh = 0.02, once with noise alone and once with unlike minima
  alone, exchanges that take a tenth of a step;
- real: 8 processes on this machine, a perceptron of 9 thousand parameters on the digits, steps of 20 ms.

    python -m benchmarks.graphs [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import console, print_table, rank, repeated, run, trainer, write_results
from lightning_gossip import ADPSGDStrategy
from lightning_gossip.simulation import ADPSGD, SGD, Cluster, Epochs, Links, Quadratic, Uniform, simulate
from recipes.digits import CLASSES, DigitsData

GRAPHS, KINDS = ("ring", "exponential"), ("noise", "unlike")
WORKERS, REAL_WORKERS, EPOCHS, SEEDS = (16, 32, 64, 128), 8, 6, 3
BATCH_SIZE, STEPS, STEP_S, LR, SIMULATED_LR = 16, 60, 0.020, 0.05, 0.02


def simulated(graph: str, kind: str, workers: int, seed: int) -> tuple[float, float]:
    """Distance of the models, and exchanges a worker and step."""
    options: dict[str, float] = {"noise": 1.0} if kind == "noise" else {"heterogeneity": 1.0}
    result = simulate(
        ADPSGD(topology=graph, work_sharing=False, at_rendezvous="evaluate"),
        Cluster(workers, Uniform(1.0, 0.1)),
        work=Epochs(number=EPOCHS, batches=STEPS * workers),
        links=Links(bandwidth=10_000.0),
        objective=Quadratic([1.0] * 20, start_at=0.0, workers=workers, seed=seed, **options),
        optimizer=SGD(lr=SIMULATED_LR),
        model_bytes=1_000,
        seed=seed,
    )
    distances = [epoch.consensus_distance for epoch in result.epochs[EPOCHS // 3 :]]
    return statistics.fmean(filter(None, distances)), sum(w.exchanges for w in result.workers) / result.steps


class Digits(LightningModule):
    """A perceptron whose steps wait as for a device; notes the distance of the models at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        self.distances: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        time.sleep(STEP_S)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.distances.append(self.trainer.strategy.report.consensus_distance)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def real(graph: str, kind: str, seed: int) -> dict[str, Any]:
    """The task of one worker of eight."""
    seed_everything(seed, workers=True, verbose=False)
    data = DigitsData().train
    if kind == "unlike":  # one class each, and two for the first two workers
        images, labels = data.tensors
        own = (labels % REAL_WORKERS == rank()).nonzero().flatten()
        data = TensorDataset(images[own], labels[own])
    loader = DataLoader(repeated(data, STEPS * BATCH_SIZE * REAL_WORKERS), batch_size=BATCH_SIZE, shuffle=True)
    model = Digits()
    strategy = ADPSGDStrategy(topology=graph, work_sharing=False, at_rendezvous="evaluate", seed=seed)
    trainer(strategy=strategy, max_epochs=EPOCHS).fit(model, loader)
    own_report = next(worker for worker in strategy.report.workers if worker.rank == rank())
    return {"distances": model.distances, "exchanges": (own_report.exchanges or 0) / own_report.steps}


def measured(graph: str, kind: str, seed: int) -> tuple[float, float]:
    """As :func:`simulated`, of real workers."""
    workers = run(real, {"graph": graph, "kind": kind, "seed": seed}, hosts=[None] * REAL_WORKERS, timeout_s=300)
    distance = statistics.fmean(workers[0]["distances"][EPOCHS // 3 :])
    return distance, statistics.fmean(worker["exchanges"] for worker in workers)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="A ring or the exponential graph?")
    parser.add_argument("--quick", action="store_true", help="one seed, 16 simulated workers and the real ones")
    quick = parser.parse_args().quick
    counts, seeds = (WORKERS[:1], range(1)) if quick else (WORKERS, range(SEEDS))
    rows, results = [], []
    for workers in (REAL_WORKERS, *counts):
        for kind in KINDS:
            of_graph = {}
            for graph in GRAPHS:
                console.print(f"{workers} workers, {kind}, {graph}")
                each = [
                    measured(graph, kind, seed) if workers == REAL_WORKERS else simulated(graph, kind, workers, seed)
                    for seed in seeds
                ]
                of_graph[graph] = statistics.fmean(d for d, _ in each), statistics.fmean(e for _, e in each)
                results.append({"workers": workers, "kind": kind, "graph": graph, "seeds": each})
            (ring, ring_exchanges), (other, other_exchanges) = (of_graph[graph] for graph in GRAPHS)
            where = "real" if workers == REAL_WORKERS else "simulated"
            exchanges = f"{ring_exchanges:.2f}, {other_exchanges:.2f}"
            rows.append((f"{workers}, {where}, {kind}", f"{ring:.3g}", f"{other:.3g}", f"{ring / other:.1f}", exchanges))
    columns = ("workers, apart by", "ring", "exponential", "less apart", "exchanges a step")
    print_table("Mean squared distance of the models to their mean", columns, rows)
    console.print(f"Written to {write_results('graphs', {'runs': results})}")


if __name__ == "__main__":
    main()
