"""Elastic averaging against gossip and periodic averaging, each at its best learning rate. (EAMSGD, arXiv 1412.6651.)

A row of the AD-PSGD paper's table.

Digits with a hidden layer of 64, work shared, steps of 1 s ± 10 %; Nesterov momentum 0.9 (none in EASGD), the learning rate
divided by ten at half and at three quarters of the run. Four learning rates (five times as large for EASGD); the one whose
mean loss at the end is the lowest is shown. At an epoch's end nobody takes a mean over: each algorithm is by itself. The
loss is that of the mean of the models, of EAMSGD and EASGD that of the centre.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from benchmarks.reproduction.report import Report, axes_of, mean_and_deviation, progress
from lightning_gossip.simulation import (
    ADPSGD,
    EAMSGD,
    SGD,
    AllReduce,
    Cluster,
    Epochs,
    Objective,
    PeriodicAveraging,
    Recording,
    Strategy,
    Uniform,
    digits,
    mlp,
    simulate,
)

SEEDS = (0, 1, 2)
RATES = (0.02, 0.05, 0.1, 0.2)
SETTINGS = ((4, 8, 20), (16, 4, 12))  # workers, batch size, epochs
STRATEGIES: dict[str, Strategy] = {
    "all-reduce": AllReduce(),
    "AD-PSGD": ADPSGD(topology="exponential", at_rendezvous="evaluate"),
    "AD-PSGD, an exchange in 4 steps": ADPSGD(topology="exponential", at_rendezvous="evaluate", exchanges_per_step=0.25),
    "periodic averaging, 8": PeriodicAveraging(period=8, at_rendezvous="evaluate"),
    "EAMSGD, 1": EAMSGD(period=1, at_rendezvous="evaluate"),
    "EAMSGD, 8": EAMSGD(period=8, at_rendezvous="evaluate"),
    "EASGD, 8": EAMSGD(period=8, at_rendezvous="evaluate", momentum=0.0),
}
"""By name; the number is the period. EAMSGD's of 8 and periodic averaging of 8 send about as much."""

_COLOURS = ("#e5a08f", "#1b7f5c", "#7cc4a6", "#444444", "#8fb5de", "#3b6ea8", "#8a6fb0")


class Outcome(NamedTuple):
    """One run: the loss at its end, the accuracy on the test set, bytes that all workers sent."""

    loss: float
    accuracy: float
    nbytes: int


def train(
    objective: Objective, strategy: Strategy, workers: int, batch_size: int, epochs: int, lr: float, seed: int
) -> Outcome:
    """Train once."""
    result = simulate(
        strategy,
        Cluster(workers, Uniform(1.0, 0.1)),
        work=Epochs(number=epochs, batch_size=batch_size),
        objective=objective,
        optimizer=SGD(lr=lr, momentum=0.9, nesterov=True, milestones=(0.5, 0.75)),
        seed=seed,
        recording=Recording(evaluate_every=10**9),
    )
    last = result.points[-1]
    assert last.accuracy is not None
    return Outcome(last.loss, last.accuracy, sum(worker.bytes_sent for worker in result.workers))


def best(runs: dict[float, list[Outcome]]) -> float:
    """The learning rate of the lowest mean loss."""
    return min(runs, key=lambda lr: statistics.fmean(o.loss if math.isfinite(o.loss) else 1e9 for o in runs[lr]))


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    objective = mlp(digits())
    rows: list[list[str]] = []
    figure, panels = axes_of(len(SETTINGS), width=5.6)
    for axes, (workers, batch_size, epochs) in zip(panels, SETTINGS, strict=True):
        for (name, strategy), colour in zip(STRATEGIES.items(), _COLOURS, strict=True):
            with progress(f"{workers} workers, {name}"):
                rates = [5 * lr if name == "EASGD, 8" else lr for lr in RATES]  # without momentum steps are shorter
                runs = {
                    lr: [train(objective, strategy, workers, batch_size, epochs, lr, seed) for seed in SEEDS] for lr in rates
                }
            rows.append(_row(f"{workers}", name, runs))
            losses = [statistics.fmean(outcome.loss for outcome in runs[lr]) for lr in rates]
            axes.loglog(RATES, losses, "o-", color=colour, label=name, ms=4, lw=1.2)
        axes.set(title=f"{workers} workers", xlabel="learning rate (a fifth of EASGD's)", ylim=(1e-3, 3.0))
    panels[0].set_ylabel("training loss at the end")
    panels[1].legend(frameon=False, fontsize=8)
    report.table(
        "Digits, MLP-64: each at its best learning rate of four",
        ("n", "algorithm", "best lr", "loss", "test accuracy", "MB sent"),
        rows,
        caption=f"{len(SEEDS)} seeds, mean ± standard deviation; loss on the training set, of EAMSGD and EASGD the centre's."
        " MB of all workers.",
    )
    report.figure(figure)
    return {"seeds": SEEDS, "rates": RATES, "settings": SETTINGS, "momentum": 0.9, "milestones": [0.5, 0.75]}


def _row(workers: str, name: str, runs: dict[float, list[Outcome]]) -> list[str]:
    lr = best(runs)
    outcomes = runs[lr]
    return [
        workers,
        name,
        f"{lr:g}",
        mean_and_deviation([outcome.loss for outcome in outcomes], 4),
        f"{statistics.fmean(outcome.accuracy for outcome in outcomes):.3f}",
        f"{statistics.fmean(outcome.nbytes for outcome in outcomes) / 1e6:.0f}",
    ]
