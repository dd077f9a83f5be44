"""Train a recipe on several workers: ``python -m recipes.train strategy=adpsgd topology=ring``.

Everything is a Hydra option (``--help`` lists them). The run's folder gets summary.json, metrics.csv, record.json, a checkpoint
and two pictures.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

from lightning_gossip import ConfigurationError, GossipError
from lightning_gossip.callbacks import CollectiveCounter, EpochProgressBar, GossipMonitor
from recipes import plots, summary, tracking
from recipes.processes import run_workers, started_from_outside
from recipes.record import RunRecord, RunRecorder
from recipes.sweep import FAILED, forget, note_failure
from recipes.tracking import environment_kept

CONF = Path(__file__).resolve().parent.parent / "conf"
_FULL_ERROR = "HYDRA_FULL_ERROR"

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> None:
    """One run, as every worker runs it: fit, test, and what is left behind.

    Args:
        cfg: composed from conf/.

    Raises:
        ConfigurationError: for options that cannot work, before any process is started.
    """
    with plain_errors():
        folder = Path(cfg.run_dir)
        seed_everything(cfg.seed, workers=True, verbose=False)
        counter = CollectiveCounter()
        trainer = make_trainer(
            cfg,
            logger=instantiate(cfg.logger) or False,
            default_root_dir=folder,
            callbacks=[
                counter,
                GossipMonitor(),
                RunRecorder(folder, counter),
                EpochProgressBar(),
                ModelCheckpoint(folder, "model", enable_version_counter=False),
                tracking.LogConfiguration(cfg),
                *([] if cfg.strategy.start_method == "popen" else [tracking.FinishWandb()]),
            ],
        )
        model: LightningModule = instantiate(cfg.recipe.model)
        data: LightningDataModule = instantiate(cfg.recipe.data)
    folder.mkdir(parents=True, exist_ok=True)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    if cfg.strategy.start_method != "popen":
        trainer.loggers = []  # their runs ended with the processes that trained
    test_acc = float(trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"])
    if not trainer.is_global_zero:
        return
    record = RunRecord.load(folder)
    result = summary.summarize(record, strategy=trainer.strategy, test_acc=test_acc)
    summary.save(result, folder)
    pictures = plots.draw(record, result, folder)
    tracking.publish(trainer.loggers, result, folder, pictures)
    summary.show(result, folder)


def make_trainer(cfg: DictConfig, *, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """The Trainer of a run; starts nothing.

    Args:
        cfg: composed from conf/.
        callbacks: beside the emulator of slow workers.
        options: of the Trainer.

    Raises:
        ConfigurationError: for options that cannot work.
    """
    if not isinstance(cfg.trainer.max_epochs, int) or cfg.trainer.max_epochs < 1:
        raise ConfigurationError(f"trainer.max_epochs={cfg.trainer.max_epochs!r} is not a whole number of at least 1.")
    emulator = instantiate(cfg.cluster) or None
    emulators = [] if emulator is None else [emulator]
    trainer: Trainer = instantiate(cfg.trainer)(
        strategy=instantiate(cfg.strategy), callbacks=[*emulators, *callbacks], **options
    )
    if emulator is not None:
        emulator.check(trainer.world_size)
    return trainer


@contextmanager
def plain_errors() -> Iterator[None]:
    """What an object of the configuration raised, and not that Hydra was making it."""
    try:
        yield
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Hydra's entry: one run, or one of a sweep.

    Returns:
        Of a job of a sweep: the last validation accuracy, which a sweeper may maximize; NaN if the job failed.
    """
    _be_quiet()
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _job_of_sweep(cfg)
    try:
        with environment_kept():
            _tracked(cfg)
    except (GossipError, MisconfigurationException) as error:
        if os.environ.get(_FULL_ERROR) == "1":
            raise
        print(f"{type(error).__name__}: {error}\n(Set {_FULL_ERROR}=1 for the stack trace.)", file=sys.stderr)
        sys.exit(2)
    return None


def _job_of_sweep(cfg: DictConfig) -> float:
    folder = Path(cfg.run_dir)
    hydra_cfg = HydraConfig.get()
    cfg.sweep, cfg.job = tracking.name_of_sweep(hydra_cfg.sweep.dir), hydra_cfg.job.override_dirname
    forget(folder)
    try:
        with environment_kept():
            if cfg.strategy.start_method == "popen" and not started_from_outside():
                with plain_errors():
                    trainer = make_trainer(cfg, logger=False, enable_checkpointing=False)
                if trainer.num_nodes > 1:
                    raise ConfigurationError(
                        f"trainer.num_nodes={trainer.num_nodes}: a sweep starts workers on this machine only. Use a launcher"
                        " that starts a process for each worker of a job (SLURM through submitit: docs/sweeps.md)."
                    )
                run_workers(_tracked, cfg, trainer.num_devices)
            else:
                _tracked(cfg)
        epochs = RunRecord.load(folder).epochs
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down and the other jobs go on
        log.error("This job failed: %s (see %s)", note_failure(error, folder), folder / FAILED)
        return math.nan
    return epochs[-1].get("val_acc", math.nan)


def _tracked(cfg: DictConfig) -> None:
    _be_quiet()  # a worker of a sweep begins here
    try:
        run(cfg)
    except BaseException:
        tracking.finish_wandb(exit_code=1)
        raise
    tracking.finish_wandb()


def _be_quiet() -> None:
    """Leave out what Lightning and PyTorch say on every run of any program, so that what matters is seen."""
    for message in (".*treespec, LeafSpec.*", ".*does not have many workers.*", ".*Using `DistributedSampler` with the.*"):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*log_every_n_steps.*|.*Checkpoint directory .* exists.*|.*Experiment logs directory.*")


if __name__ == "__main__":
    main()
