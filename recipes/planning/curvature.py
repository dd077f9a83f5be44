"""The spectrum of the loss that a plan is made for: given, logged by the measured run, or measured now."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_choice, check_integer, check_positive, is_finite
from lightning_gossip.analysis.mean.stability import spectrum
from lightning_gossip.callbacks.curvature import measure_curvature
from recipes.record import METRICS
from recipes.tracking import environment_kept

_LOGGED = "analysis/curvature_max"
_FILLED = 3  # eigenvalues below those that are known: directions that a leading eigenvalue does not tell of


@dataclass(frozen=True)
class Curvature:
    """Eigenvalues, and where they are from.

    Args:
        eigenvalues: descending, all above 0.
        source: in words.
    """

    eigenvalues: Sequence[float]
    source: str

    @property
    def largest(self) -> float:
        """h_max."""
        return self.eigenvalues[0]


def check(cfg: DictConfig) -> None:
    """Refuse what cannot be a curvature, before any work.

    Args:
        cfg: the node ``curvature`` of the configuration.
    """
    check_choice("curvature.source", cfg.source, ("auto", "measured"))
    if not is_finite(cfg.condition) or cfg.condition < 1.0:
        raise ConfigurationError(f"curvature.condition={cfg.condition!r} is not a number of at least 1. Write for example 100.")
    check_integer("curvature.epochs", cfg.epochs, at_least=0, example=1)
    check_integer("curvature.batches", cfg.batches, example=8)
    check_integer("curvature.leading", cfg.leading, example=4)
    if cfg.ckpt_path is not None and not Path(cfg.ckpt_path).is_file():
        raise ConfigurationError(
            f"curvature.ckpt_path={cfg.ckpt_path} is not a file. Write a checkpoint, for example model.ckpt."
        )
    if cfg.eigenvalues is not None:
        if not isinstance(cfg.eigenvalues, Sequence) or isinstance(cfg.eigenvalues, str):
            raise ConfigurationError(f"curvature.eigenvalues={cfg.eigenvalues!r} is not a list. Write for example [10.0, 1.0].")
        for value in cfg.eigenvalues:
            if not is_finite(value):
                raise ConfigurationError(f"curvature.eigenvalues holds {value!r}, which is no finite number.")
        spectrum(cfg.eigenvalues)
    elif cfg.largest is not None:
        check_positive("curvature.largest", cfg.largest)


def curvature_of(
    cfg: DictConfig, *, workers: int, run: Path | None, on_progress: Callable[[str], object] = lambda _: None
) -> Curvature:
    """The spectrum.

    Args:
        cfg: the whole configuration.
        workers: whose batches together are a batch here.
        run: folder of the measured run.
        on_progress: told what takes its time.

    Raises:
        ConfigurationError: if there is no positive eigenvalue.
    """
    options = cfg.curvature
    if options.eigenvalues is not None:
        return Curvature(spectrum(options.eigenvalues)[::-1], "given")
    if options.largest is not None:
        return Curvature(_filled([options.largest], options.condition), "given: the largest")
    logged = _logged(run) if run is not None and options.source == "auto" else None
    if logged is not None:
        check_positive(f"{_LOGGED} of {run}", logged)
        return Curvature(_filled([logged], options.condition), f"logged by {run}: the largest")
    on_progress("curvature")
    leading = _measured(cfg, workers)
    spectrum([leading[0]])
    at = f"in {options.ckpt_path}" if options.ckpt_path is not None else f"after {options.epochs} epoch(s)"
    return Curvature(_filled([h for h in leading if h > 0.0], options.condition), f"measured {at}")


def _filled(leading: Sequence[float], condition: float) -> list[float]:
    """Some smaller eigenvalues, evenly in their logarithm, down to the largest over the condition number."""
    lowest = leading[0] / condition
    if lowest >= leading[-1]:
        return list(leading)
    return [*leading, *np.geomspace(leading[-1], lowest, _FILLED + 1)[1:].tolist()]


def _logged(run: Path) -> float | None:
    """The last value that a CurvatureProbe has logged in this folder."""
    for path in (run / METRICS, run / "lightning" / METRICS):
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                values = [row[_LOGGED] for row in csv.DictReader(file) if row.get(_LOGGED)]
            if values:
                return float(values[-1])
    return None


@environment_kept()
def _measured(cfg: DictConfig, workers: int) -> Sequence[float]:
    options = cfg.curvature
    seed_everything(cfg.seed, workers=True, verbose=False)
    model: LightningModule = instantiate(cfg.recipe.model)
    data: LightningDataModule = instantiate(cfg.recipe.data, batch_size=cfg.recipe.data.batch_size * workers)
    if options.ckpt_path is not None:
        try:
            model.load_state_dict(torch.load(options.ckpt_path, map_location="cpu", weights_only=True)["state_dict"])
        except (KeyError, RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"curvature.ckpt_path={options.ckpt_path} is no checkpoint of this recipe's model: {str(error).splitlines()[0]}"
            ) from error
    elif options.epochs:
        _train(model, data, cfg.recipe.epochs, options.epochs)
    found = measure_curvature(model, data, batches=options.batches, leading=options.leading, tolerance=1e-2)
    return found.eigenvalues


class _StopAfter(Callback):
    """Ends a fit before the end that its learning rate schedule is made for."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self._epochs


def _train(model: LightningModule, data: LightningDataModule, epochs: int, stop_after: int) -> None:
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=max(epochs, stop_after),
        callbacks=[_StopAfter(stop_after)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(model, datamodule=data)
    finally:
        log.setLevel(level)
    if not all(math.isfinite(float(parameter.detach().sum())) for parameter in model.parameters()):
        raise ConfigurationError("the recipe diverges while it trains for the curvature: lower its learning rate.")
