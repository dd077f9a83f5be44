"""One run of a recipe: fit, test, and what is left behind. Every worker calls it."""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from lightning_gossip import ConfigurationError, GossipError
from lightning_gossip.callbacks import CollectiveCounter, EpochProgressBar, GossipMonitor
from lightning_gossip.strategies import DecentralizedStrategy
from recipes import plots, ranges, skew, summary, tracking
from recipes.record import RunRecord, RunRecorder
from recipes.wandb_run import BEST, BEST_BY, LAST


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
    ranges.check(cfg)
    with plain_errors():
        folder = Path(cfg.run_dir)
        seed_everything(cfg.seed, workers=True, verbose=False)
        counter = CollectiveCounter()
        logger = tracking.make_loggers(cfg)
        best = ModelCheckpoint(
            folder, BEST, monitor=BEST_BY, mode="min", enable_version_counter=False, save_on_train_epoch_end=True
        )
        trainer = make_trainer(
            cfg,
            logger=logger,
            default_root_dir=folder,
            callbacks=[
                counter,
                GossipMonitor(),
                RunRecorder(folder, counter),
                EpochProgressBar(),
                # at the epoch's end, when the record has its row
                *([best] if tracking.keeps_best(logger) else []),
                ModelCheckpoint(folder, LAST, enable_version_counter=False, save_on_train_epoch_end=True),
                tracking.LogConfiguration(cfg),
                skew.LabelHistogram(folder),
                *([] if cfg.strategy.start_method == "popen" else [tracking.FinishWandb()]),
                *(instantiate(cfg.recipe.get("callbacks")) or {}).values(),
            ],
        )
        model: LightningModule = instantiate(cfg.recipe.model)
        data: LightningDataModule = instantiate(cfg.recipe.data)
        _check_batches(data, trainer)
        skew.check(data, trainer.strategy)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    if cfg.strategy.start_method != "popen":
        trainer.loggers = []  # their runs ended with the processes that trained
    tested = trainer.test(model, datamodule=data, verbose=False)[0]
    if not trainer.is_global_zero:
        return
    record = RunRecord.load(folder)
    result = summary.summarize(record, strategy=trainer.strategy, tested=tested)
    summary.save(result, folder)
    pictures = plots.draw(record, result, folder)
    plots.trace(record, folder)
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
    ranges.check_numbers(cfg)
    if "nodes" in cfg.cluster:
        raise ConfigurationError(
            f"cluster describes {cfg.cluster.nodes}, for recipes.simulate and recipes.plan: real nodes are as they are. Write"
            " trainer.devices and trainer.num_nodes."
        )
    emulator = instantiate(cfg.cluster) or None
    emulators = [] if emulator is None else [emulator]
    strategy: Strategy = instantiate(cfg.strategy)
    _check_ddp(strategy)
    try:
        trainer: Trainer = instantiate(cfg.trainer)(strategy=strategy, callbacks=[*emulators, *callbacks], **options)
    except (TypeError, ValueError) as error:
        raise refused("trainer", error) from error
    if emulator is not None:
        emulator.check(trainer.world_size)
    return trainer


def _check_ddp(strategy: Strategy) -> None:
    """Lightning keeps options that it does not know for PyTorch's DDP, which refuses them when the workers run."""
    known = inspect.signature(DistributedDataParallel).parameters
    for name in getattr(strategy, "_ddp_kwargs", {}):
        if name not in known:
            raise ConfigurationError(f"strategy.{name}: neither Lightning's DDPStrategy nor DistributedDataParallel has it.")


def _check_batches(data: Any, trainer: Trainer) -> None:
    """The workers would say the same, each for itself, once they run."""
    samples = getattr(data, "training_samples", None)
    if samples is None or not isinstance(trainer.strategy, DecentralizedStrategy):
        return
    size, workers = data.batch_size, trainer.world_size
    if math.ceil(samples / size) < workers:
        raise ConfigurationError(
            f"recipe.data.batch_size={size} leaves fewer batches of {samples} samples than there are workers ({workers})."
            f" Write at most recipe.data.batch_size={math.ceil(samples / (workers - 1)) - 1}, or fewer trainer.devices."
        )


@contextmanager
def plain_errors() -> Iterator[None]:
    """What an object of the configuration raised, and not that Hydra was making it.

    Raises:
        ConfigurationError: for arguments that a class does not take; naming the node.
    """
    try:
        yield
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:
            raise
        if isinstance(cause, (TypeError, ValueError)) and not isinstance(cause, GossipError):
            node = re.search(r"full_key: (\S+)", str(error))
            raise refused("the configuration" if node is None else node[1], cause) from cause
        raise cause from None


def refused(node: str, error: Exception) -> ConfigurationError:
    """What a class says to its arguments, in one sentence with the key of the configuration.

    Args:
        node: of the configuration that the object is made from.
        error: what its class raised.
    """
    unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if unknown is not None:
        return ConfigurationError(f"{node}.{unknown[2]}: {unknown[1]} has no such option.")
    return ConfigurationError(f"{node} has a value that cannot be: {' '.join(str(error).split())}")


def be_quiet() -> None:
    """Leave out what Lightning and PyTorch say on every run of any program, so that what matters is seen."""
    for message in (".*treespec, LeafSpec.*", ".*does not have many workers.*", ".*Using `DistributedSampler` with the.*"):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*log_every_n_steps.*|.*Checkpoint directory .* exists.*|.*Experiment logs directory.*")
