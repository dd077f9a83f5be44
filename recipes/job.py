"""One run of a recipe: fit, test, and what is left behind. Every worker calls it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

from lightning_gossip import ConfigurationError
from lightning_gossip.callbacks import CollectiveCounter, EpochProgressBar, GossipMonitor
from recipes import plots, summary, tracking
from recipes.record import RunRecord, RunRecorder


def tracked_run(cfg: DictConfig) -> None:
    """:func:`run`, and the end of its W&B run."""
    be_quiet()  # a worker of a sweep begins here
    try:
        run(cfg)
    except BaseException:
        tracking.finish_wandb(exit_code=1)
        raise
    tracking.finish_wandb()


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
                # at the epoch's end, when the record has its row
                ModelCheckpoint(folder, "model", enable_version_counter=False, save_on_train_epoch_end=True),
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


def be_quiet() -> None:
    """Leave out what Lightning and PyTorch say on every run of any program, so that what matters is seen."""
    for message in (".*treespec, LeafSpec.*", ".*does not have many workers.*", ".*Using `DistributedSampler` with the.*"):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*log_every_n_steps.*|.*Checkpoint directory .* exists.*|.*Experiment logs directory.*")
