"""Weights & Biases without surprises: offline where there is no key, and nothing left over for the next run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_gossip.strategies.options import check_choice


def wandb_logger(*, project: str, save_dir: str, offline: bool | Literal["auto"] = "auto", **options: Any) -> WandbLogger:
    """Lightning's logger for Weights & Biases.

    Args:
        project: name of the project.
        save_dir: folder in which the run is kept, as ``wandb/``.
        offline: ``"auto"`` asks for a key in the places where wandb keeps it, and never the user.
        options: of Lightning's logger.
    """
    check_choice("logger.offline", offline, (True, False, "auto"))
    if offline == "auto":
        import wandb

        offline = not wandb.login(prompt=False)
    # the mode is said here too: Lightning only sets an environment variable, which wandb does not read twice in a process
    options = {"mode": "offline", **options} if offline else options
    return WandbLogger(project=project, save_dir=save_dir, offline=bool(offline), **options)


class FinishWandb(Callback):
    """Ends the run in worker processes that end without Python's own farewell (spawn and fork)."""

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if multiprocessing.parent_process() is not None:
            finish_wandb()


def finish_wandb() -> None:
    """End the run of this process, if there is one: the next job of a sweep must not go into it."""
    import sys

    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put back what a job changes in the environment: offline W&B sets WANDB_MODE, seeds and ports stay otherwise."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
