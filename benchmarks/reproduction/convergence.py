"""After the same number of samples: is AD-PSGD's loss all-reduce's? (AD-PSGD: epoch-wise convergence like AllReduce.)

Digits with a hidden layer of 64; every worker draws batches of 4; the learning rate grows with n (0.02 n) up to 0.32, and
falls tenfold at 60 % and 80 % of the run, for both alike. All see the same number of samples, so with more workers each makes
fewer steps. The loss is of the mean of all models on the training set; nothing ever averages the models exactly. Beside it
stands the spectral gap 1 − ρ of an exchange, E[W] = I − L/(n · degree), and how far apart the models are halfway.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.reproduction.report import COLOURS, Report, axes_of, mean_and_deviation, plain_ticks, progress
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.mixing import expected_pair_matrix, spectral_gap
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    AllReduce,
    Cluster,
    Links,
    Objective,
    Recording,
    Steps,
    Strategy,
    Uniform,
    digits,
    mlp,
    simulate,
)

WORKERS = (4, 8, 16, 32, 64, 128)
TOTAL = 24_000  # steps of all workers together: 75 times all samples
LONGER = 4  # times TOTAL, with the most workers
BATCH_SIZE = 4
SEEDS = (0, 1, 2)
MODEL_BYTES, BANDWIDTH = 1_000, 10_000.0  # a model takes a tenth of a step
TOPOLOGIES = ("ring", "exponential")


class Outcome(NamedTuple):
    """One run: the loss and accuracy at its end, and halfway (1/n) Σ ‖x_i − x̄‖²."""

    loss: float
    accuracy: float
    drift: float


def learning_rate(workers: int) -> float:
    """Linear in n up to 16 workers."""
    return min(0.02 * workers, 0.32)


def train(objective: Objective, strategy: Strategy, workers: int, *, seed: int, total: int = TOTAL) -> Outcome:
    """Train on so many batches of all workers together."""
    result = simulate(
        strategy,
        Cluster(workers, Uniform(1.0, 0.1)),
        work=Steps(number=total // workers, batch_size=BATCH_SIZE),
        links=Links(bandwidth=BANDWIDTH),
        objective=objective,
        optimizer=SGD(lr=learning_rate(workers), milestones=(0.6, 0.8)),
        model_bytes=MODEL_BYTES,
        seed=seed,
        recording=Recording(evaluate_every=total // 2),
    )
    last = result.points[-1]
    assert last.accuracy is not None
    return Outcome(last.loss, last.accuracy, result.points[1].consensus_distance)


def gap(topology: str, workers: int) -> float:
    """1 − ρ of one exchange on a graph."""
    return spectral_gap(expected_pair_matrix(make_topology(topology, workers)))


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    objective = mlp(digits())
    rows: list[list[str]] = []
    lines: dict[str, list[list[float]]] = {name: [] for name in ("all-reduce", "AD-PSGD, ring", "AD-PSGD")}
    for workers in WORKERS:
        with progress(f"{workers} workers"):
            reference, by_topology = _compare(objective, workers, SEEDS, TOTAL)
        rows += _rows(workers, TOTAL, reference, by_topology)
        lines["all-reduce"].append([outcome.loss for outcome in reference])
        lines["AD-PSGD, ring"].append([outcome.loss for outcome in by_topology["ring"]])
        lines["AD-PSGD"].append([outcome.loss for outcome in by_topology["exponential"]])
    with progress(f"{WORKERS[-1]} workers, {LONGER} times as long"):
        total = LONGER * TOTAL
        rows += _rows(WORKERS[-1], total, *_compare(objective, WORKERS[-1], SEEDS[:1], total))
    report.table(
        f"Digits, MLP-64: after {TOTAL * BATCH_SIZE:,} samples",
        ("n", "steps", "graph", "gap 1 − ρ", "loss", "all-reduce's", "ratio", "acc.", "its acc.", "drift"),
        rows,
        caption=f"{len(SEEDS)} seeds, mean ± standard deviation; the last rows: one seed, {LONGER} times as many samples."
        " Ratio: of the mean losses. Steps: of each worker. Acc.: on the test set; its acc.: all-reduce's."
        " Drift: (1/n) Σ ‖x_i − x̄‖² halfway.",
    )
    figure, (axes,) = axes_of(1, width=7.0)
    for name, losses in lines.items():
        means = [statistics.fmean(of) for of in losses]
        axes.loglog(WORKERS, means, "o-", color=COLOURS[name], label=name if name != "AD-PSGD" else "AD-PSGD, exponential")
        axes.fill_between(WORKERS, [min(of) for of in losses], [max(of) for of in losses], color=COLOURS[name], alpha=0.2)
    axes.set(xlabel="workers", ylabel=f"training loss after {TOTAL * BATCH_SIZE:,} samples")
    plain_ticks(axes.xaxis, WORKERS)
    plain_ticks(axes.yaxis, (0.02, 0.05, 0.1, 0.2, 0.4))
    axes.legend(frameon=False)
    report.figure(figure)
    return {"total_steps": TOTAL, "batch_size": BATCH_SIZE, "seeds": SEEDS, "lr": "min(0.02 n, 0.32)", "milestones": [0.6, 0.8]}


def _compare(
    objective: Objective, workers: int, seeds: tuple[int, ...], total: int
) -> tuple[list[Outcome], dict[str, list[Outcome]]]:
    reference = [train(objective, AllReduce(), workers, seed=seed, total=total) for seed in seeds]
    by_topology = {
        topology: [train(objective, ADPSGD(topology=topology), workers, seed=seed, total=total) for seed in seeds]
        for topology in TOPOLOGIES
    }
    return reference, by_topology


def _rows(workers: int, total: int, reference: list[Outcome], by_topology: dict[str, list[Outcome]]) -> list[list[str]]:
    all_reduce = [outcome.loss for outcome in reference]
    rows = []
    for topology, outcomes in by_topology.items():
        losses = [outcome.loss for outcome in outcomes]
        rows.append(
            [
                f"{workers}",
                f"{total // workers:,}",
                topology,
                f"{gap(topology, workers):.3g}",
                _spread(losses),
                _spread(all_reduce),
                f"{statistics.fmean(losses) / statistics.fmean(all_reduce):.2f}",
                f"{statistics.fmean(outcome.accuracy for outcome in outcomes):.3f}",
                f"{statistics.fmean(outcome.accuracy for outcome in reference):.3f}",
                f"{statistics.fmean(outcome.drift for outcome in outcomes):.3f}",
            ]
        )
    return rows


def _spread(losses: list[float]) -> str:
    return mean_and_deviation(losses, 4) if len(losses) > 1 else f"{losses[0]:.4f}"
