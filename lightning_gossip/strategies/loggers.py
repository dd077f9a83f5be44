"""What a worker that has become rank 0 does with the loggers of the one that died."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger


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
