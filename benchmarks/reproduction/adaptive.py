"""Adaptive against constant period on a communication budget, and the speed-ups at 100 and 10 Gb/s. (ADPSGD, arXiv 2007.06134.)

Digits with a hidden layer of 64, momentum 0.9, a learning rate that falls tenfold at 30 % and 60 % of the run; pairs of runs
with the same seed. ADPSGD starts with p = 1 for an epoch and p = 4 for a quarter of the run, and may then let the period grow.
At an epoch's end the mean is only looked at, so that an averaging is one that the period asked for.

The speed-ups are **calibration**: with c seconds of compute and m of an all-reduce in a step, averaging every p steps is
(c + m)/(c + m/p) times faster than averaging in each. The paper's speed-ups with p = 8 give m/c; the simulator, given links
with just that m, gives the speed-ups back. So its clock follows the formula; about the paper's network it says nothing.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.reproduction.report import Report, axes_of, mean_and_deviation, progress
from lightning_gossip.simulation import (
    QSGD,
    SGD,
    AdaptiveAveraging,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Links,
    Objective,
    PeriodicAveraging,
    Recording,
    Result,
    Steps,
    Strategy,
    digits,
    mlp,
    simulate,
)

SEEDS = (0, 1, 2, 3, 4)
PERIOD = 8
CONSTANT = f"constant {PERIOD}"


class Setting(NamedTuple):
    """What is trained how long."""

    workers: int
    batch_size: int
    epochs: int
    lr: float

    @property
    def name(self) -> str:
        """For a table."""
        return f"lr {self.lr:g}, n = {self.workers}, {self.epochs} epochs"


SETTINGS = (
    Setting(4, 8, 40, 0.2),
    Setting(16, 4, 60, 0.2),
    Setting(4, 8, 20, 0.2),
    Setting(4, 8, 40, 0.05),
    Setting(16, 4, 60, 0.05),
)
STRATEGIES: dict[str, Strategy] = {
    CONSTANT: PeriodicAveraging(period=PERIOD, at_rendezvous="evaluate"),
    "adaptive": AdaptiveAveraging(at_rendezvous="evaluate"),
    "every step": AllReduce(),
}
PAPER = {"100 Gb/s, least": 1.14, "100 Gb/s, most": 1.27, "10 Gb/s, least": 1.46, "10 Gb/s, most": 1.95}
"""Speed-ups over averaging in every step (the paper's abstract)."""


def train(objective: Objective, strategy: Strategy, setting: Setting, *, seed: int) -> Result:
    """One run; time does not matter."""
    return simulate(
        strategy,
        Cluster(setting.workers, Constant(1.0)),
        work=Epochs(number=setting.epochs, batch_size=setting.batch_size),
        objective=objective,
        optimizer=SGD(lr=setting.lr, momentum=0.9, milestones=(0.3, 0.6)),
        seed=seed,
        recording=Recording(evaluate_every=10**9),
    )


def communication_over_compute(speed_up: float, period: float = PERIOD) -> float:
    """m/c at which averaging every ``period`` steps is so much faster: from s = (1 + r)/(1 + r/p)."""
    return (speed_up - 1.0) / (1.0 - speed_up / period)


def simulated_speed_up(ratio: float, *, workers: int = 16, steps: int = 800) -> float:
    """Of the constant period over averaging in every step, where an all-reduce takes ``ratio`` times the compute."""
    nbytes = 1_000_000
    links = Links(bandwidth=2 * (workers - 1) / workers * nbytes / ratio)
    times_s = [
        simulate(strategy, Cluster(workers, Constant(1.0)), work=Steps(number=steps), links=links, model_bytes=nbytes).time_s
        for strategy in (AllReduce(overlap=False), STRATEGIES[CONSTANT])
    ]
    return times_s[0] / times_s[1]


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    objective = mlp(digits())
    rows, ratios, period = [], {}, float("nan")
    for setting in SETTINGS:
        with progress(setting.name):
            strategies = dict(STRATEGIES)
            if setting == SETTINGS[0]:
                strategies["QSGD, 4 bits"] = QSGD(bits=4)
            results = {name: [train(objective, of, setting, seed=seed) for seed in SEEDS] for name, of in strategies.items()}
        rows += _rows(setting, results)
        if setting == SETTINGS[1]:
            period = statistics.fmean(_steps_of(run) / run.averagings for run in results["adaptive"] if run.averagings)
        ratios[setting] = [a / c for a, c in zip(_losses(results["adaptive"]), _losses(results[CONSTANT]), strict=True)]
    report.table(
        "Digits, MLP-64: final training loss",
        ("setting", "period", "loss", f"over {CONSTANT}", "better", "averagings", f"against {CONSTANT}", "MB sent"),
        rows,
        caption=f"{len(SEEDS)} seeds, mean ± standard deviation. Over: ratio of the means. Better: seeds with a lower loss than"
        f" {CONSTANT}'s. MB of all workers. Batches of 8 with 4 workers, of 4 with 16. Every step: all-reduce.",
    )
    report.table(
        "Speed-up over averaging in every step (calibration)",
        ("network", "paper", "m/c if p = 8", "simulated, p = 8", f"formula, p = {period:.2f}"),
        [_calibrated(what, paper, period) for what, paper in PAPER.items()],
        caption=f"p = {period:.2f}: steps over averagings of the adaptive runs with {SETTINGS[1].name}.",
    )
    figure, (axes,) = axes_of(1, width=8.5)
    for place, of in enumerate(ratios.values()):
        axes.plot([place] * len(of), of, "o", color="#1b7f5c", alpha=0.7)
    axes.axhline(1.0, color="#444444", linestyle=":")
    names = [f"lr {s.lr:g}, n = {s.workers},\nbatch {s.batch_size}, {s.epochs} epochs" for s in ratios]
    axes.set_xticks(range(len(ratios)), names, fontsize=8)
    axes.set(ylabel=f"adaptive's loss / {CONSTANT}'s, each seed", ylim=(0, None))
    report.figure(figure)
    return {"seeds": SEEDS, "settings": [setting._asdict() for setting in SETTINGS], "momentum": 0.9, "milestones": [0.3, 0.6]}


def _calibrated(what: str, paper: float, period: float) -> list[str]:
    ratio = communication_over_compute(paper)
    formula = (1.0 + ratio) / (1.0 + ratio / period)
    return [what, f"{paper:.2f}", f"{ratio:.3f}", f"{simulated_speed_up(ratio):.2f}", f"{formula:.2f}"]


def _losses(results: list[Result]) -> list[float]:
    return [result.loss for result in results if result.loss is not None]


def _rows(setting: Setting, results: dict[str, list[Result]]) -> list[list[str]]:
    """One row a strategy, compared with the constant period."""
    constant, base = _losses(results[CONSTANT]), results[CONSTANT][0].averagings
    assert base is not None
    rows = []
    for name, runs in results.items():
        losses = _losses(runs)
        averagings = [_steps_of(run) if run.averagings is None else run.averagings for run in runs]
        mean = statistics.fmean(averagings)
        better = sum(loss < other for loss, other in zip(losses, constant, strict=True))
        rows.append(
            [
                setting.name,
                name,
                mean_and_deviation(losses, 4),
                f"{statistics.fmean(losses) / statistics.fmean(constant):.2f}",
                "–" if name == CONSTANT else f"{better} of {len(losses)}",
                f"{mean:.0f}",
                f"{100 * (mean / base - 1):+.0f} %",
                f"{statistics.fmean(sum(worker.bytes_sent for worker in run.workers) for run in runs) / 1e6:.0f}",
            ]
        )
    return rows


def _steps_of(run: Result) -> int:
    """Steps of each worker: averagings of a strategy that averages in every one."""
    return run.steps // len(run.workers)
