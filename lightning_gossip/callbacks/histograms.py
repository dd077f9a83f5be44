"""Whole histograms, in the loggers that can show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

_BINS = 64


def log_histogram(logger: Logger, name: str, counts: Mapping[int, int], *, step: int, beside: Mapping[str, Any]) -> None:
    """Log how often each value occurred. Loggers other than Weights & Biases and TensorBoard are left alone.

    Args:
        logger: of the run; on ranks other than 0 it does nothing.
        name: of the metric.
        counts: value → how often; not empty. More than 64 different values share bins.
        step: of the logger.
        beside: metrics of the same row (Weights & Biases).
    """
    if not isinstance(logger, TensorBoardLogger | WandbLogger):
        return
    values, times = np.array(list(counts)), np.array(list(counts.values()))
    top = int(values.max()) + 1
    edges = np.arange(top + 1) if top <= _BINS else np.linspace(0, top, _BINS + 1)
    binned, _ = np.histogram(values, edges, weights=times)
    if isinstance(logger, WandbLogger):
        import wandb

        histogram = wandb.Histogram(np_histogram=(binned, edges))
        logger.experiment.log({name: histogram, **beside, "trainer/global_step": step})
    else:
        logger.experiment.add_histogram_raw(
            name,
            min=float(values.min()),
            max=float(values.max()),
            num=int(times.sum()),
            sum=float((values * times).sum()),
            sum_squares=float((values.astype(float) ** 2 * times).sum()),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=binned.tolist(),
            global_step=step,
        )
