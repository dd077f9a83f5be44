"""Train a recipe on several workers: ``python -m recipes.train strategy=adpsgd topology=ring``.

Everything is a Hydra option (``--help`` lists them). The run's folder gets summary.json, metrics.csv, record.json, a checkpoint
and two pictures.
"""

from __future__ import annotations

if __name__ == "__main__":
    from recipes.light import look

    look("config")

import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from lightning_gossip import ConfigurationError
from recipes import overrides, ranges
from recipes.commands import one_sentence
from recipes.job import be_quiet, make_trainer, plain_errors, tracked_run
from recipes.processes import run_workers, started_from_outside
from recipes.record import RunRecord
from recipes.summary import SUMMARY
from recipes.sweep import attempt
from recipes.tracking import environment_kept, name_of_sweep

CONF = Path(__file__).resolve().parent.parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Hydra's entry: one run, or one of a sweep.

    Returns:
        Of a job of a sweep: the last validation accuracy, which a sweeper may maximize; 0 if the job failed.
    """
    be_quiet()
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return attempt(lambda: _job_of_sweep(cfg), Path(cfg.run_dir), otherwise=0.0)
    try:
        with environment_kept(), one_sentence():
            look_at_overrides(cfg, "config")
            tracked_run(cfg)
    except SIGTERMException:
        print("Stopped by SIGTERM before the end.", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    return None


def look_at_overrides(cfg: DictConfig, config: str) -> None:
    """Refuse what no command reads, and say what has no effect; in Hydra's own process.

    Args:
        cfg: of a call.
        config: name of the command's own configuration.
    """
    call = HydraConfig.get()
    given = list(call.overrides.task)
    overrides.check(cfg, given, CONF / f"{config}.yaml")
    overrides.warn(cfg, given, str(dict(call.runtime.choices)["strategy"]))


def _job_of_sweep(cfg: DictConfig) -> float:
    folder, hydra_cfg = Path(cfg.run_dir), HydraConfig.get()
    cfg.sweep, cfg.job = name_of_sweep(hydra_cfg.sweep.dir), hydra_cfg.job.override_dirname
    look_at_overrides(cfg, "config")
    with environment_kept():
        if cfg.strategy.start_method == "popen" and not started_from_outside():
            run_workers(tracked_run, cfg, _workers(cfg))
            if not (folder / SUMMARY).exists():
                raise RuntimeError("it was stopped by a signal before its end")
        else:
            tracked_run(cfg)
    return RunRecord.load(folder).epochs[-1].get("val_acc", 0.0)


def _workers(cfg: DictConfig) -> int:
    """How many this machine is to start; what can be refused is refused here, before any process."""
    ranges.check(cfg)
    with plain_errors():
        trainer = make_trainer(cfg, logger=False, enable_checkpointing=False)
        instantiate(cfg.recipe.data)  # looks at the folder
    if trainer.num_nodes > 1:
        raise ConfigurationError(
            f"trainer.num_nodes={trainer.num_nodes}: a sweep starts workers on this machine only. Use a launcher that starts a"
            " process for each worker of a job (SLURM through submitit: docs/sweeps.md)."
        )
    return trainer.num_devices


if __name__ == "__main__":
    main()
