"""What loggers are told besides metrics, and Weights & Biases without surprises: offline where there is no key."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torchvision.io import decode_image  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from recipes.record import METRICS, RECORD
from recipes.summary import SUMMARY

log = logging.getLogger(__name__)


def wandb_logger(*, project: str, save_dir: str, offline: bool | Literal["auto"] = "auto", **options: Any) -> WandbLogger:
    """Lightning's logger for Weights & Biases.

    Args:
        project: name of the project.
        save_dir: folder in which the run is kept, as ``wandb/``.
        offline: ``"auto"`` asks for a key in the places where wandb keeps it, and never the user.
        options: of Lightning's logger, and through it of ``wandb.init``, as ``group`` and ``name``; those that are None are
            left to wandb.
    """
    check_choice("logger.offline", offline, (True, False, "auto"))
    import wandb

    if offline == "auto":
        offline = getattr(rank_zero_only, "rank", 0) != 0 or not _logged_in()  # only rank 0 writes
    # the mode is said here too: Lightning only sets an environment variable, which wandb does not read twice in a process
    if offline:
        options = {"mode": "offline", "settings": wandb.Settings(silent=True), **options}
    given = {name: value for name, value in options.items() if value is not None}
    return WandbLogger(project=project, save_dir=save_dir, offline=bool(offline), **given)


def _logged_in() -> bool:
    """Whether there is a key, and the server takes it."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, timeout=20))
    except (wandb.errors.Error, OSError) as error:
        log.warning("Weights & Biases cannot be reached with this key (%s): the run is kept offline.", error)
        return False


def name_of_sweep(folder: str | Path) -> str:
    """What the jobs of a sweep have in common: the group of their W&B runs."""
    path = Path(folder)
    return "/".join(path.parts[-2:]) if not path.is_absolute() else path.name


class LogConfiguration(Callback):
    """Gives every logger the whole configuration of the run.

    Args:
        cfg: composed from conf/; resolved here.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._configuration: Any = OmegaConf.to_container(cfg, resolve=True)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:  # rank 0's write
            logger.log_hyperparams(self._configuration)


@rank_zero_only
def publish(loggers: Sequence[Logger], summary: dict[str, Any], folder: Path, pictures: Sequence[Path]) -> None:
    """Put the end of a run where its metrics are: numbers, pictures, and the files that they were made from.

    Args:
        loggers: those that cannot show pictures are left out.
        summary: of the run.
        folder: of the run.
        pictures: PNG files.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _publish_wandb(logger, summary, folder, pictures)
        elif isinstance(logger, TensorBoardLogger):
            for picture in pictures:
                logger.experiment.add_image(f"run/{picture.stem}", decode_image(str(picture), "RGB"), summary["epochs"])


def _publish_wandb(logger: WandbLogger, summary: dict[str, Any], folder: Path, pictures: Sequence[Path]) -> None:
    import wandb

    run = logger.experiment
    run.log({f"run/{picture.stem}": wandb.Image(str(picture)) for picture in pictures})
    run.summary.update({name: value for name, value in summary.items() if name != "workers" and value is not None})
    columns = list(summary["workers"][0])
    table = wandb.Table(columns, [[worker[column] for column in columns] for worker in summary["workers"]])
    run.log({"run/workers": table})
    files = wandb.Artifact(f"run-{run.id}", "run", description="summary, metrics by epoch, time line, pictures")
    for path in (*(folder / name for name in (SUMMARY, METRICS, RECORD)), *pictures):
        files.add_file(str(path))
    run.log_artifact(files)


class FinishWandb(Callback):
    """Ends the run in workers that Lightning starts by spawn or fork: they end without Python's own farewell."""

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if multiprocessing.parent_process() is not None:
            finish_wandb()


def finish_wandb(exit_code: int = 0) -> None:
    """End the run of this process, if there is one: the next job of a sweep must not go into it.

    Args:
        exit_code: other than 0 where the run has failed.
    """
    import sys

    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=exit_code)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put back what a job changes in the environment: offline W&B sets WANDB_MODE, seeds and ports stay otherwise."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
