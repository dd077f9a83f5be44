"""Train a recipe on several workers: ``python -m recipes.train strategy=adpsgd topology=ring``.

Everything is a Hydra option (``--help`` lists them). The run's folder gets summary.json, metrics.csv, record.json, a checkpoint
and two pictures.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig

from lightning_gossip import ConfigurationError, GossipError
from lightning_gossip.callbacks import CollectiveCounter, EpochProgressBar, GossipMonitor
from recipes import plots, summary
from recipes.record import RunRecord, RunRecorder
from recipes.tracking import FinishWandb, environment_kept, finish_wandb

CONF = Path(__file__).resolve().parent.parent / "conf"
_FULL_ERROR = "HYDRA_FULL_ERROR"

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> float | None:
    """One run: fit, test, and what is left behind.

    Args:
        cfg: composed from conf/.

    Returns:
        Accuracy of the mean model on the test images; None on ranks other than 0.

    Raises:
        ConfigurationError: for options that cannot work, before any process is started.
    """
    if not isinstance(cfg.trainer.max_epochs, int) or cfg.trainer.max_epochs < 1:
        raise ConfigurationError(f"trainer.max_epochs={cfg.trainer.max_epochs!r} is not a whole number of at least 1.")
    folder = Path(cfg.run_dir)
    seed_everything(cfg.seed, workers=True, verbose=False)
    strategy: DDPStrategy = instantiate(cfg.strategy)
    counter = CollectiveCounter()
    emulator = instantiate(cfg.cluster) or None
    callbacks: list[Callback] = [
        *([emulator] if emulator is not None else []),
        counter,
        GossipMonitor(),
        RunRecorder(folder, counter),
        EpochProgressBar(),
        ModelCheckpoint(folder, "model", enable_version_counter=False),
        FinishWandb(),
    ]
    trainer: Trainer = instantiate(cfg.trainer)(
        strategy=strategy, callbacks=callbacks, logger=instantiate(cfg.logger) or False, default_root_dir=folder
    )
    if emulator is not None:
        emulator.check(trainer.world_size)
    folder.mkdir(parents=True, exist_ok=True)
    model: LightningModule = instantiate(cfg.recipe.model)
    data: LightningDataModule = instantiate(cfg.recipe.data)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    if cfg.strategy.start_method != "popen":
        trainer.loggers = []  # their runs ended with the processes that trained
    test_acc = float(trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"])
    if not trainer.is_global_zero:
        return None
    record = RunRecord.load(folder)
    result = summary.summarize(record, strategy=strategy, test_acc=test_acc)
    summary.save(result, folder)
    plots.draw(record, result, folder)
    summary.show(result, folder)
    return test_acc


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Hydra's entry: one run, or one of a sweep."""
    _be_quiet()
    if HydraConfig.get().mode == RunMode.MULTIRUN and cfg.strategy.start_method == "popen":
        # popen runs the command line again for each worker, and with it the whole sweep
        cfg.strategy.start_method = "fork" if hasattr(os, "fork") and cfg.trainer.accelerator == "cpu" else "spawn"
        log.info("In a sweep the workers are started by %s instead of popen.", cfg.strategy.start_method)
    try:
        with environment_kept():
            return run(cfg)
    except (GossipError, MisconfigurationException, InstantiationException) as error:
        if os.environ.get(_FULL_ERROR) == "1":
            raise
        reason = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ is not None else error
        print(f"{type(reason).__name__}: {reason}\n(Set {_FULL_ERROR}=1 for the stack trace.)", file=sys.stderr)
        sys.exit(2)
    finally:
        finish_wandb()


def _be_quiet() -> None:
    """Leave out what Lightning and PyTorch say on every run of any program, so that what matters is seen."""
    for message in (".*treespec, LeafSpec.*", ".*does not have many workers.*", ".*Using `DistributedSampler` with the.*"):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*log_every_n_steps.*|.*Checkpoint directory .* exists.*|.*Experiment logs directory.*")


if __name__ == "__main__":
    main()
