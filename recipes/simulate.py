"""Simulate a configuration before it is trained: ``python -m recipes.simulate strategies=[ddp,adpsgd] cluster=one_slow``.

The algorithms are the package's own; time, links and compute are virtual. The options that ``recipes.train`` has too mean the
same here. The run's folder gets loss.png, a time line of each strategy, and summary.json, record.json and metrics.csv as a
training run has them (of several strategies: in a folder each, which ``recipes.report`` takes for a sweep).
"""

from __future__ import annotations

if __name__ == "__main__":
    from recipes.light import look

    look("simulate")

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_gossip import ConfigurationError
from lightning_gossip.simulation import ADPSGD, Recording, Result, Strategy, simulate
from lightning_gossip.simulation.problems.label_skew import label_counts
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.work import shares_of
from lightning_gossip.strategies import STRATEGIES
from recipes import overrides, skew
from recipes.commands import one_sentence
from recipes.job import plain_errors
from recipes.simulated import figures, outputs
from recipes.simulated.clusters import take_over_file
from recipes.simulated.scenario import ISLANDS, Scenario, scenario_of, strategy_of
from recipes.sweep import attempt
from recipes.train import CONF

_FEW = 16  # workers whose time line can be read

News = Callable[[float], None]


def run(cfg: DictConfig, strategies: dict[str, Strategy], console: Console | None = None) -> dict[str, Result]:
    """Simulate, print a table, and write what is left behind.

    Args:
        cfg: composed from conf/simulate.yaml.
        strategies: by the names that they have in the table.
        console: where to print; standard output if None.

    Raises:
        ConfigurationError: naming the key, for what cannot work; before anything is simulated.
    """
    console = console or Console()
    with plain_errors():
        scenario = scenario_of(cfg)
    _check(cfg, scenario, strategies)
    _say_what_is_simulated(scenario, console)
    folder = Path(cfg.run_dir)
    timeline = cfg.timeline is True or (cfg.timeline == "auto" and scenario.cluster.workers <= _FEW)
    with progress(console) as step:
        results = {
            name: _simulated(cfg, scenario, strategy, step(name), recording=Recording(spans=timeline))
            for name, strategy in strategies.items()
        }
        for name, result in results.items():
            _leave(result, folder if len(results) == 1 else folder / name, timeline=timeline)
        if scenario.problem.objective is not None:
            figures.draw_loss(results, folder / figures.LOSS)
            _leave_labels(scenario, cfg.seed, folder)
        if cfg.slowdowns:
            _slow_down(cfg, scenario, strategies, folder, step)
    outputs.show(results, console)
    console.print(f"Everything else is in [bold]{folder}[/bold]", soft_wrap=True)
    return results


def _check(cfg: DictConfig, scenario: Scenario, strategies: dict[str, Strategy]) -> None:
    workers = scenario.cluster.workers
    scenario.links.check(workers)
    for strategy in strategies.values():
        strategy.check_on(workers, scenario.links)
    if cfg.timeline not in (True, False, "auto"):
        raise ConfigurationError(f"timeline={cfg.timeline!r} is neither true, false nor auto.")
    if cfg.slowdowns and cfg.slow_rank not in range(workers):
        raise ConfigurationError(f"slow_rank={cfg.slow_rank!r} is not one of the {workers} workers.")


def _say_what_is_simulated(scenario: Scenario, console: Console) -> None:
    """Whether a model is trained, which takes its time."""
    problem = scenario.problem
    if problem.times_only is not None:
        console.print(f"Times only, without a loss: {problem.times_only}", markup=False, highlight=False)
    elif isinstance(problem.objective, ModuleObjective):
        console.print(
            f"Trains {problem.objective.numel:,} values of each of {scenario.cluster.workers} workers on this machine;"
            " objective=none simulates times only, in seconds.",
            markup=False,
            highlight=False,
        )


def _simulated(
    cfg: DictConfig, scenario: Scenario, strategy: Strategy, on_progress: News, recording: Recording | None = None
) -> Result:
    return simulate(
        strategy,
        scenario.cluster,
        work=scenario.work,
        links=scenario.links,
        objective=scenario.problem.objective,
        optimizer=scenario.problem.optimizer,
        model_bytes=scenario.model_bytes,
        seed=cfg.seed,
        recording=recording,
        target_loss=cfg.target_loss if scenario.problem.objective is not None else None,
        on_progress=on_progress,
    )


def _leave(result: Result, folder: Path, *, timeline: bool) -> None:
    summary = outputs.save(result, folder)
    if timeline:
        figures.draw_timeline(result, summary, folder / "timeline.png")


def _leave_labels(scenario: Scenario, seed: int, folder: Path) -> None:
    """Where each worker has samples of its own."""
    objective, alpha = scenario.problem.objective, scenario.work.skew
    if objective is not None and objective.labels is not None and alpha is not None:
        shares = shares_of(scenario.work, objective.labels, scenario.cluster.workers, seed=seed)
        assert shares is not None
        skew.leave(label_counts(objective.labels, shares), alpha, folder)


def _slow_down(
    cfg: DictConfig, scenario: Scenario, strategies: dict[str, Strategy], folder: Path, step: Callable[[str], News]
) -> None:
    """The figure of epoch times: times only, so that it is quick."""
    times: dict[str, list[tuple[float, float]]] = {}
    for name, strategy in strategies.items():
        for factor in cfg.slowdowns:
            slowed = scenario.slowed(cfg.slow_rank, factor)
            result = _simulated(cfg, slowed, strategy, step(f"{name} {factor:g}×"))
            times.setdefault(name, []).append((float(factor), result.time_s / max(1, len(result.epochs))))
    path, workers = folder / figures.SLOWDOWN, scenario.cluster.workers
    figures.draw_slowdowns(times, path, workers=workers, rank=cfg.slow_rank, work=scenario.work)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], News]]:
    """A bar; the function begins a new part of the work and gives what is to be told of it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def step(name: str) -> News:
            bar.reset(task, description=name)
            return lambda share: bar.update(task, completed=share)

        yield step


def compose_strategies(
    cfg: DictConfig, names: Sequence[str], overrides: Sequence[str], *, config: str = "simulate"
) -> dict[str, Strategy]:
    """Each strategy as ``strategy=NAME`` would make it; the call's own options of a strategy are for one strategy only.

    Args:
        cfg: the call's own.
        names: of the configurations in the group ``strategy``.
        overrides: that the call was made with.
        config: that the call's was composed from.

    Raises:
        ConfigurationError: for an unknown name.
    """
    if not names:
        strategy = strategy_of(cfg)
        return {strategy.name: strategy}
    known = ("ddp", *STRATEGIES, *(() if ISLANDS in STRATEGIES else (ISLANDS,)))
    for name in names:
        if name not in known:
            raise ConfigurationError(f"strategies names {name!r}; the known ones are {', '.join(known)}.")
    common = [override for override in overrides if re.split(r"[.=]", override.lstrip("+~"))[0] != "strategy"]
    found = {
        name: strategy_of(compose(config, [*common, f"strategy={'adpsgd' if name == ISLANDS else name}"])) for name in names
    }
    flat = found.get(ISLANDS)
    if isinstance(flat, ADPSGD) and flat.island == 1:
        found[ISLANDS] = replace(flat, island="node")
    return found


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="simulate")
def main(cfg: DictConfig) -> float | None:
    """Hydra's entry: one call, or one of a sweep.

    Returns:
        In a sweep: the virtual seconds that the last strategy took, which a sweeper may minimize; infinity if the job failed.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return attempt(lambda: _last_time_s(cfg), Path(cfg.run_dir), otherwise=math.inf)
    with one_sentence():
        return _last_time_s(cfg)


def _last_time_s(cfg: DictConfig) -> float:
    given = list(HydraConfig.get().overrides.task)
    with plain_errors():
        overrides.check(cfg, given, CONF / "simulate.yaml")
        take_over_file(cfg, given)
        strategies = compose_strategies(cfg, cfg.strategies or (), given)
    return list(run(cfg, strategies).values())[-1].time_s


if __name__ == "__main__":
    main()
