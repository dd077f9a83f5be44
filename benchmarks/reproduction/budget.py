"""Early against late averaging on one budget. (ADPSGD, arXiv 2007.06134: early averaging matters more than late.)

Local SGD on digits with a hidden layer of 64 and momentum 0.9, 960 steps, 120 averagings: every 8 steps, or every 4 in the
first third and every 16 later (early), or every 16 in the first two thirds and every 4 later (late). Two learning rates, with
and without a schedule that divides them by ten at 30 % and at 60 %; pairs of runs with the same seed. No epoch's end is in
them, so an averaging is one that the period asked for.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.reproduction.report import Report, axes_of, mean_and_deviation, progress
from lightning_gossip.algorithm import ConstantPeriod, PeriodController, PiecewisePeriod
from lightning_gossip.simulation import (
    SGD,
    Cluster,
    Constant,
    Objective,
    PeriodicAveraging,
    Recording,
    Result,
    Steps,
    digits,
    mlp,
    simulate,
)

SEEDS = (0, 1, 2)
STEPS = 960
PERIODS: dict[str, PeriodController] = {
    "early: 4, then 16": PiecewisePeriod((4, 16), (1.0 / 3.0,)),
    "constant 8": ConstantPeriod(8),
    "late: 16, then 4": PiecewisePeriod((16, 4), (2.0 / 3.0,)),
}
FALLING = (0.3, 0.6)
_EVERY = 7  # rounds between two looks at the models: no period divides it
_COLOURS = dict(zip(PERIODS, ("#1b7f5c", "#444444", "#c8553d"), strict=True))


class Setting(NamedTuple):
    """What is trained."""

    workers: int
    batch_size: int
    lr: float
    milestones: tuple[float, ...]

    @property
    def name(self) -> str:
        """For a table."""
        return f"lr {self.lr:g}, {'÷ 10 at 30 %, 60 %' if self.milestones else 'constant'}; n = {self.workers}"


SETTINGS = [
    Setting(workers, batch_size, lr, milestones)
    for milestones in (FALLING, ())
    for lr in (0.2, 0.05)
    for workers, batch_size in ((4, 8), (16, 4))
]


def train(objective: Objective, period: PeriodController, setting: Setting, *, seed: int, steps: int = STEPS) -> Result:
    """One run; time does not matter."""
    return simulate(
        PeriodicAveraging(period=period, at_rendezvous="evaluate"),
        Cluster(setting.workers, Constant(1.0)),
        work=Steps(number=steps, batch_size=setting.batch_size),
        objective=objective,
        optimizer=SGD(lr=setting.lr, momentum=0.9, milestones=setting.milestones),
        seed=seed,
        recording=Recording(evaluate_every=_EVERY * setting.workers),
    )


def drift(result: Result) -> float:
    """(1/n) Σ ‖x_i − x̄‖², averaged over the run."""
    return statistics.fmean(point.consensus_distance for point in result.points)


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    objective = mlp(digits())
    runs: dict[Setting, dict[str, list[Result]]] = {}
    for setting in SETTINGS:
        with progress(setting.name):
            runs[setting] = {
                name: [train(objective, period, setting, seed=seed) for seed in SEEDS] for name, period in PERIODS.items()
            }
    report.table(
        "Digits, MLP-64: training loss at the end",
        ("learning rate, workers", *(name for period in PERIODS for name in (period, "drift")), "averagings"),
        [_row(setting, by_period) for setting, by_period in runs.items()],
        caption=f"{len(SEEDS)} seeds, mean ± standard deviation; loss of the mean model. Drift: (1/n) Σ ‖x_i − x̄‖², averaged"
        f" over the run. {STEPS} steps.",
    )
    report.figure(_figure(runs))
    return {"seeds": SEEDS, "steps": STEPS, "momentum": 0.9, "settings": [setting._asdict() for setting in SETTINGS]}


def _row(setting: Setting, by_period: dict[str, list[Result]]) -> list[str]:
    cells = [setting.name]
    for results in by_period.values():
        cells += [mean_and_deviation([_loss(result) for result in results], 4)]
        cells += [f"{statistics.fmean(drift(result) for result in results):.2g}"]
    return [*cells, ", ".join(str(count) for count in sorted({r.averagings or 0 for rs in by_period.values() for r in rs}))]


def _loss(result: Result) -> float:
    assert result.loss is not None
    return result.loss


def _figure(runs: dict[Setting, dict[str, list[Result]]]) -> Any:
    """The loss over the steps, for four settings of 4 workers."""
    shown = [setting for setting in SETTINGS if setting.workers == SETTINGS[0].workers]
    figure, panels = axes_of(len(shown), width=3.6, height=3.4)
    for axes, setting in zip(panels, shown, strict=True):
        for name, results in runs[setting].items():
            points = results[0].points
            losses = [statistics.fmean(at) for at in zip(*([p.loss for p in r.points] for r in results), strict=True)]
            axes.plot([point.steps / setting.workers for point in points], losses, color=_COLOURS[name], label=name, lw=1.2)
        axes.set(title=setting.name.split(";")[0], xlabel="steps", yscale="log")
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("training loss of the mean, 4 workers")
    panels[0].legend(frameon=False, fontsize=8)
    return figure
