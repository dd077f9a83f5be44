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
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torchvision.io import decode_image
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from recipes import wandb_run

log = logging.getLogger(__name__)

_MODELS = "adds_models"  # attribute of a logger


def wandb_logger(
    *,
    project: str,
    save_dir: str,
    offline: bool | Literal["auto"] = "auto",
    log_model: bool = False,
    resume_from: str | None = None,
    **options: Any,
) -> WandbLogger:
    """Lightning's logger for Weights & Biases.

    Args:
        project: name of the project.
        save_dir: folder in which the run is kept, as ``wandb/``.
        offline: ``"auto"`` asks for a key in the places where wandb keeps it, and never the user.
        log_model: whether the run's last and best checkpoints are added at its end, as versions of one artifact with the
            aliases ``latest`` and ``best``. (Lightning's own option of this name does nothing offline.)
        resume_from: a checkpoint: the run that has left it goes on, if its id is beside it.
        options: of Lightning's logger, and through it of ``wandb.init``, as ``group`` and ``name``; those that are None are
            left to wandb.
    """
    check_choice("logger.offline", offline, (True, False, "auto"))
    check_choice("logger.log_model", log_model, (True, False))
    import wandb

    if offline == "auto":
        offline = getattr(rank_zero_only, "rank", 0) != 0 or not _logged_in()  # only rank 0 writes
    # the mode is said here too: Lightning only sets an environment variable, which wandb does not read twice in a process
    if offline:
        options = {"mode": "offline", "settings": wandb.Settings(silent=True), **options}
    given = {name: value for name, value in options.items() if value is not None}
    if resumed := wandb_run.id_to_resume(resume_from):
        given.setdefault("id", resumed)
    logger = WandbLogger(project=project, save_dir=save_dir, offline=bool(offline), **given)
    setattr(logger, _MODELS, log_model)
    return logger


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


def make_loggers(cfg: DictConfig) -> Logger | bool:
    """The logger of a run; False for none.

    A run in W&B has tags, by which runs are filtered: its strategy, its model, its number of workers, that it is of a sweep.

    Args:
        cfg: composed from conf/.
    """
    options = {}
    if cfg.logger.get("_target_") == f"{__name__}.wandb_logger" and cfg.logger.get("tags") is None:
        options["tags"] = tags_of(cfg)
    return instantiate(cfg.logger, **options) or False


def tags_of(cfg: DictConfig) -> list[str]:
    """See :func:`make_loggers`."""
    classes = [str(OmegaConf.select(cfg, key)) for key in ("strategy._target_", "recipe.model._target_")]
    names = [name.rpartition(".")[2] for name in classes]
    workers = [f"{cfg.trainer.devices} workers"] if isinstance(cfg.trainer.devices, int) else []
    return [names[0].removesuffix("Strategy"), names[1], *workers, *([] if cfg.sweep is None else ["sweep"])]


def keeps_best(logger: Logger | bool) -> bool:
    """Whether a logger wants the best checkpoint of a run, beside the last."""
    return bool(getattr(logger, _MODELS, False))


class LogConfiguration(Callback):
    """Gives every logger the whole configuration of the run, and writes the id of a W&B run beside its checkpoints.

    Args:
        cfg: composed from conf/; resolved here.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._configuration: Any = OmegaConf.to_container(cfg, resolve=True)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:  # rank 0's write
            logger.log_hyperparams(self._configuration)
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                wandb_run.note_id(logger, Path(trainer.default_root_dir))


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
            wandb_run.publish(logger, summary, folder, pictures, log_model=getattr(logger, _MODELS, False))
        elif isinstance(logger, TensorBoardLogger):
            for picture in pictures:
                logger.experiment.add_image(f"run/{picture.stem}", decode_image(str(picture), "RGB"), summary["epochs"])


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
