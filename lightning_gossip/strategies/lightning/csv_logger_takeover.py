"""What a fit needs to know of the loggers, and what a worker that has become rank 0 does with those of the one before."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def local_log_dir(trainer: pl.Trainer) -> str | None:
    """What ``trainer.log_dir`` broadcasts, on this worker. May differ over ranks: loggers number their folders themselves."""
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    return logger.log_dir if isinstance(logger, (TensorBoardLogger, CSVLogger)) else logger.save_dir


def take_over(trainer: pl.Trainer) -> None:
    """Write on where the last rank 0 has ended. Called by the new one, before it logs; may be called again.

    A new CSVLogger deletes the metrics that it finds in its folder. Other loggers begin a new file or run.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _take_over_csv(logger)


def _take_over_csv(logger: CSVLogger) -> None:
    metrics = Path(logger.log_dir, "metrics.csv")
    if not metrics.is_file():
        return
    aside = metrics.with_name("metrics.csv.kept")
    os.replace(metrics, aside)
    try:
        writer = logger.experiment
    finally:
        os.replace(aside, metrics)
    with metrics.open(newline="") as file:
        writer.metrics_keys = next(csv.reader(file), [])
