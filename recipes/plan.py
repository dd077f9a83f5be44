"""Plan a run before it is trained: ``python -m recipes.plan measured=outputs/DATE/TIME``, or from ``cluster=`` and ``links=``.

The simulator says how fast the steps of each strategy are on each number of workers; the staleness analysis says up to which
learning rate the loss falls, and how fast. The folder gets plan.json, pictures, and plan.yaml, which is trained by
``python -m recipes.train --config-dir FOLDER --config-name plan``.
"""

from __future__ import annotations

if __name__ == "__main__":
    from recipes.light import look

    look("planning")

from pathlib import Path

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from lightning_gossip.simulation import Strategy
from recipes import overrides
from recipes.commands import one_sentence
from recipes.job import be_quiet, plain_errors
from recipes.planning import curvature, curves, known, outputs
from recipes.planning.choice import Candidate, Planner, as_it_trained, soonest
from recipes.planning.choices import Choices, choices_of, choices_of_run
from recipes.planning.choices import save as save_choices
from recipes.planning.events import trigger
from recipes.planning.refinement import refined
from recipes.simulate import compose_strategies, progress
from recipes.simulated.clusters import take_over_file, workers_of
from recipes.train import CONF

CONFIG = "planning"


def run(cfg: DictConfig, strategies: dict[str, Strategy], present: Choices, console: Console | None = None) -> Candidate:
    """Plan, print, and write what is left behind.

    Args:
        cfg: composed from conf/planning.yaml.
        strategies: to choose among, by their names.
        present: what the configuration chooses, for plan.yaml.
        console: where to print; standard output if None.

    Returns:
        What is recommended.

    Raises:
        ConfigurationError: naming the key, for what cannot work; before any work.
    """
    console = console or Console()
    known.check(cfg)
    padded = cfg.cluster.get("period_s") is not None
    measured = None if cfg.measured is None else known.measured_run(Path(cfg.measured), padded=padded)
    with plain_errors(), progress(console) as step:
        folder = None if measured is None else measured.folder
        spectrum = curvature.curvature_of(cfg, workers=workers_of(cfg), run=folder, on_progress=step)
        start = known.known_from(cfg, measured, spectrum)
        planner = Planner(start, cfg.target, cfg.margin)
        now = planner.candidate(start.strategy, start.workers, on_progress=step("the present setting"))
        planner, now = as_it_trained(planner, now)
        start = planner.known
        candidates = planner.all(strategies, cfg.workers, step)
        most = start.workers if cfg.most_workers is None else cfg.most_workers
        best = refined(planner, soonest([one for one in candidates if one.workers <= most], now), step)
        along = curves.curves_of(planner, candidates, best, step)
        step("event trigger")
        event = trigger(start, best)
    left = Path(cfg.run_dir)
    left.mkdir(parents=True, exist_ok=True)
    text = outputs.words(best, now, start) + outputs.more_workers(candidates, best) + ("" if event is None else event.words)
    text = f"{text} {outputs.IDEALISED}"
    outputs.save(outputs.as_json(candidates, best, now, start, along), left)
    curves.draw(along, best, now, left / curves.FIGURE)
    save_choices(outputs.choices_for(best, start, present), left, CONF, f"Written by recipes.plan. {text}")
    said = outputs.measured(start, now)
    outputs.show(text if said is None else f"{said}\n{text}", outputs.table(candidates, start, now), outputs.note(now), console)
    console.print(f"Everything else is in [bold]{left}[/bold]; to train it:", soft_wrap=True)
    console.print(f"  python -m recipes.train --config-dir {left} --config-name plan", soft_wrap=True, markup=False)
    return best


def as_measured(cfg: DictConfig, given: list[str]) -> tuple[DictConfig, list[str]]:
    """The configuration, with what the measured run chose where the call does not say otherwise.

    Args:
        cfg: the call's own.
        given: overrides that the call was made with.

    Returns:
        The configuration, and all overrides that it is made with.
    """
    if cfg.measured is None:
        return cfg, given
    measured = known.measured_run(Path(cfg.measured))
    saved = choices_of_run(measured.folder)
    if saved is None:
        chosen = Choices({}, {"trainer.devices": measured.cluster.workers})
    else:  # a simulated run may have another strategy than its configuration's
        chosen = saved.of_strategy(measured.summary["strategy"])
    together = [*chosen.without(given).overrides, *given]
    return compose(CONFIG, [*together, f"run_dir={cfg.run_dir}"]), together


@hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG)
def main(cfg: DictConfig) -> None:
    """Hydra's entry."""
    be_quiet()
    call = HydraConfig.get()
    with one_sentence(), plain_errors():
        overrides.check(cfg, list(call.overrides.task), CONF / f"{CONFIG}.yaml")
        known.check(cfg)
        cfg, together = as_measured(cfg, list(call.overrides.task))
        take_over_file(cfg, list(call.overrides.task))
        strategies = compose_strategies(cfg, cfg.strategies, together, config=CONFIG)
        groups = {**call.runtime.choices, **dict(override.split("=", 1) for override in together if "." not in override)}
        run(cfg, strategies, choices_of(cfg, groups, config=CONFIG).on_real_machines())


if __name__ == "__main__":
    main()
