"""The loss that a plan is made for, its spectrum and its gradients' noise: given, logged by the measured run, or measured now.

Where it is measured matters: a learning rate is too high, or is not, where it is at its highest. A schedule that warms up
begins with rates of a hundredth of that, and networks with BatchNorm with curvatures of ten times what they have later, so the
recipe is trained until its learning rate rises no more.
"""

from __future__ import annotations

import copy
import csv
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from lightning_gossip.analysis.curvature.gradient_noise import GradientNoise
from lightning_gossip.analysis.mean.stability import spectrum
from lightning_gossip.callbacks.curvature import measure_curvature, measure_gradient_noise
from recipes.record import METRICS
from recipes.tracking import environment_kept

_LOGGED = "analysis/curvature_max"
_LEAST_STEPS = 20  # before a loss is measured: with the batches of all workers together an epoch may have three
_FILLED = 3  # eigenvalues below those that are known: directions that a leading eigenvalue does not tell of


@dataclass(frozen=True)
class Curvature:
    """Eigenvalues, and where they are from.

    Args:
        eigenvalues: descending, all above 0.
        source: in words.
        noise: of one worker's gradients at the same point; None where that was not measured.
        along_loss: mean curvature of the directions that the loss is in, each weighted by its part; None if it is not known.
    """

    eigenvalues: Sequence[float]
    source: str
    noise: GradientNoise | None = None
    along_loss: float | None = None

    @property
    def largest(self) -> float:
        """h_max."""
        return self.eigenvalues[0]

    def lowered(self, factor: float, why: str) -> Curvature:
        """All eigenvalues times a factor below 1, and the reason."""
        noise = None if self.noise is None else replace(self.noise, curvature=factor * self.noise.curvature)
        along_loss = None if self.along_loss is None else factor * self.along_loss
        return Curvature([factor * h for h in self.eigenvalues], f"{self.source}; {why}", noise, along_loss)


def check(cfg: DictConfig) -> None:
    """Refuse what cannot be a curvature, before any work.

    Args:
        cfg: the node ``curvature`` of the configuration.
    """
    check_choice("curvature.source", cfg.source, ("auto", "measured"))
    if not is_finite(cfg.condition) or cfg.condition < 1.0:
        raise ConfigurationError(f"curvature.condition={cfg.condition!r} is not a number of at least 1. Write for example 100.")
    if cfg.epochs is not None:
        check_integer(
            "curvature.epochs", cfg.epochs, at_least=0, example=1, otherwise=", or null: until the learning rate is highest"
        )
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
    if cfg.along_loss is not None:
        check_positive("curvature.along_loss", cfg.along_loss)


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
        return Curvature(spectrum(options.eigenvalues)[::-1], "given", along_loss=options.along_loss)
    if options.largest is not None:
        return Curvature(_filled([options.largest], options.condition), "given: the largest", along_loss=options.along_loss)
    logged = _logged(run) if run is not None and options.source == "auto" else None
    if logged is not None:
        check_positive(f"{_LOGGED} of {run}", logged)
        values = _filled([logged], options.condition)
        return Curvature(values, f"logged by {run}: the largest", along_loss=options.along_loss)
    on_progress("curvature")
    leading, noise, at = _measured(cfg, workers)
    spectrum([leading[0]])
    along_loss = noise.along_loss if options.along_loss is None and noise is not None else options.along_loss
    return Curvature(_filled([h for h in leading if h > 0.0], options.condition), f"measured {at}", noise, along_loss)


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
def _measured(cfg: DictConfig, workers: int) -> tuple[Sequence[float], GradientNoise | None, str]:
    """The leading eigenvalues, the noise of one worker's batches unless there is only one, and where that was."""
    options = cfg.curvature
    seed_everything(cfg.seed, workers=True, verbose=False)
    model: LightningModule = _of_all(cfg.recipe.model, workers)
    data: LightningDataModule = _of_all(cfg.recipe.data, workers)
    at = f"in {options.ckpt_path}"
    if options.ckpt_path is not None:
        try:
            model.load_state_dict(torch.load(options.ckpt_path, map_location="cpu", weights_only=True)["state_dict"])
        except (KeyError, RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"curvature.ckpt_path={options.ckpt_path} is no checkpoint of this recipe's model: {str(error).splitlines()[0]}"
            ) from error
    else:
        epochs = _train(model, data, cfg.recipe.epochs, options.epochs, clip_norm=cfg.trainer.get("gradient_clip_val"))
        at = f"after {epochs} epoch(s)"
        if options.epochs is None and epochs > 1:
            at += ", when the learning rate is highest"
    found = measure_curvature(model, data, batches=options.batches, leading=options.leading, tolerance=1e-2)
    own: LightningDataModule = instantiate(cfg.recipe.data)
    return found.eigenvalues, measure_gradient_noise(model, own, batches=cfg.noise.batches), at


def _of_all(node: DictConfig, workers: int) -> Any:
    """What a node makes, for one process that takes the batches of all workers as one: a recipe that scales its learning rate
    by the global batch has the run's, and its warm-up."""
    return instantiate(node, **({"batch_size": node.batch_size * workers} if "batch_size" in node else {}))


class _StopAfter(Callback):
    """Ends a fit before the end that its learning rate schedule is made for.

    Args:
        epochs: after so many; None: after the first in which the learning rate does not rise, and some steps.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        self._first = 0.0  # of an epoch's learning rates

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == 0:
            self._first = _learning_rate(trainer.optimizers)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epochs is None:
            trainer.should_stop = _next_learning_rate(trainer) <= self._first and trainer.global_step >= _LEAST_STEPS
        else:
            trainer.should_stop = trainer.current_epoch + 1 >= self._epochs


def _learning_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    return max(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups)


def _next_learning_rate(trainer: pl.Trainer) -> float:
    """That the next epoch begins with: schedules of epochs go on when the callbacks have been called."""
    rates = [_learning_rate(trainer.optimizers)]
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch" and not config.reduce_on_plateau and (trainer.current_epoch + 1) % config.frequency == 0:
            ahead: Any = copy.deepcopy(config.scheduler)
            ahead.step()
            rates.append(_learning_rate([ahead.optimizer]))
    return max(rates)


def _train(
    model: LightningModule,
    data: LightningDataModule,
    epochs: int,
    stop_after: int | None,
    *,
    clip_norm: float | None = None,
) -> int:
    """Train in one process; returns for how many epochs."""
    if stop_after == 0:
        return 0
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=max(epochs, stop_after or 1),
        callbacks=[_StopAfter(stop_after)],
        limit_val_batches=0,
        gradient_clip_val=clip_norm,
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
    return trainer.current_epoch
