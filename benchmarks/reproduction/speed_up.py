"""Does AD-PSGD reach a loss n times sooner with n workers? (AD-PSGD's corollary: linear speed-up.)

The learning rate is that of one worker times n (linear scaling): an update of one of n workers moves the mean model by 1/n of
itself, n times as often. Ideal is the time of one worker over n. Two problems: a quadratic with gradient noise, and digits with
a hidden layer of 64. Steps take 1 s ± 10 %, a model a tenth of that; each worker has a port of its own, as on nodes of one GPU.
Means over seeds; all-reduce beside it, behind the backward pass as DDP's (overlapped) and after it, needs the same number of
samples at best, so what it loses is the large batch's and not the gossip's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.reproduction.report import COLOURS, Report, axes_of, plain_ticks, progress
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    AllReduce,
    Cluster,
    Links,
    Objective,
    Quadratic,
    Recording,
    Steps,
    Strategy,
    Uniform,
    digits,
    mlp,
    simulate,
)

WORKERS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = (0, 1, 2)
MODEL_BYTES, BANDWIDTH = 1_000, 10_000.0
EVERY = 16  # steps of all workers between two looks at the loss: the resolution of the times


class Problem(NamedTuple):
    """What is minimised down to which loss."""

    objective: Callable[[], Objective]
    lr: float  # of one worker
    batch_size: int
    target: float
    at_most: int  # steps of all workers together


PROBLEMS = {
    "quadratic": Problem(lambda: Quadratic([0.25, 0.5, 0.75, 1.0] * 5, noise=0.5), 0.005, 1, 0.05, 20_000),
    "digits, MLP": Problem(lambda: mlp(digits()), 0.01, 8, 0.3, 40_000),
}


def strategies(workers: int) -> dict[str, Strategy]:
    """What is compared with so many workers; graphs need two."""
    return {
        "AD-PSGD": ADPSGD(topology="exponential") if workers > 1 else ADPSGD(),
        "AD-PSGD, ring": ADPSGD(),
        "all-reduce, overlapped": AllReduce(),
        "all-reduce": AllReduce(overlap=False),
    }


def seconds_to(problem: Problem, objective: Objective, strategy: Strategy, workers: int, *, seed: int) -> float:
    """Virtual seconds until the mean model's loss is at the target; infinite if it is not reached."""
    result = simulate(
        strategy,
        Cluster(workers, Uniform(1.0, 0.1)),
        work=Steps(number=problem.at_most // workers, batch_size=problem.batch_size),
        links=Links(bandwidth=BANDWIDTH),
        objective=objective,
        optimizer=SGD(lr=problem.lr * workers),
        model_bytes=MODEL_BYTES,
        seed=seed,
        recording=Recording(evaluate_every=EVERY),
        target_loss=problem.target,
    )
    return result.time_s if result.ended == "target" else float("inf")


def times(problem: Problem, workers: int, *, seeds: tuple[int, ...] = SEEDS) -> dict[str, float]:
    """Mean seconds to the target, by strategy."""
    objective = problem.objective()
    return {
        name: statistics.fmean(seconds_to(problem, objective, strategy, workers, seed=seed) for seed in seeds)
        for name, strategy in strategies(workers).items()
    }


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    figure, axes = axes_of(len(PROBLEMS))
    for panel, (name, problem) in zip(axes, PROBLEMS.items(), strict=True):
        measured = {}
        for workers in WORKERS:
            with progress(f"{name}, {workers} workers"):
                measured[workers] = times(problem, workers)
        alone = measured[1]["AD-PSGD"]
        report.table(
            f"{name}: seconds until the loss is {problem.target:g}, and speed-up over one worker",
            ("workers", "ideal", *(f"{strategy}" for strategy in measured[1]), "AD-PSGD / ideal"),
            [
                [
                    f"{workers}",
                    f"{alone / workers:.1f}",
                    *(f"{seconds:.1f} ({alone / seconds:.1f}×)" for seconds in by_strategy.values()),
                    f"{alone / by_strategy['AD-PSGD'] / workers:.2f}",
                ]
                for workers, by_strategy in measured.items()
            ],
            caption=f"AD-PSGD on the exponential graph and on the ring; learning rate {problem.lr:g} n; {len(SEEDS)} seeds;"
            " nodes of one worker.",
        )
        panel.loglog(WORKERS, WORKERS, ":", color=COLOURS["ideal"], label="ideal")
        for strategy in measured[1]:
            speed = [alone / measured[workers][strategy] for workers in WORKERS]
            panel.loglog(WORKERS, speed, "o-", color=COLOURS[strategy], label=strategy)
        panel.set(title=f"{name}, to a loss of {problem.target:g}", xlabel="workers", ylabel="speed-up over one worker")
        plain_ticks(panel.xaxis, WORKERS)
        plain_ticks(panel.yaxis, WORKERS)
        panel.legend(frameon=False)
    report.figure(figure)
    with progress("what limits it"):
        _limits(report)
    return {"seeds": SEEDS, "problems": {name: [*problem[1:]] for name, problem in PROBLEMS.items()}, "evaluate_every": EVERY}


def _limits(report: Report) -> None:
    """Digits with the most workers: which change brings it nearer to the ideal?"""
    problem, workers = PROBLEMS["digits, MLP"], WORKERS[-1]
    objective, gossip, seed = problem.objective(), ADPSGD(topology="exponential"), SEEDS[0]
    changes = {
        "as above": (problem, gossip),
        "4 exchanges a step": (problem, ADPSGD(topology="exponential", exchanges_per_step=4.0)),
        "a complete bipartite graph": (problem, ADPSGD(topology="bipartite_complete")),
        "batches of 32": (problem._replace(batch_size=32), gossip),
        "half the learning rate": (problem._replace(lr=problem.lr / 2, at_most=2 * problem.at_most), gossip),
    }
    rows = []
    for what, (changed, strategy) in changes.items():
        alone = seconds_to(changed, objective, ADPSGD(), 1, seed=seed)
        seconds = seconds_to(changed, objective, strategy, workers, seed=seed)
        rows.append([what, f"{alone / workers:.1f}", f"{seconds:.1f}", f"{alone / seconds / workers:.2f}"])
    report.table(
        f"digits, MLP with {workers} workers: what brings AD-PSGD nearer to the ideal",
        ("change", "ideal, s", "AD-PSGD, s", "share of ideal"),
        rows,
        caption="One seed.",
    )
