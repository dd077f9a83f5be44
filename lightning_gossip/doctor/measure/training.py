"""What a step of the user's own model costs on this worker, and how curved its loss is: Lightning's loop on one device."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import statistics
import sys
import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from lightning_gossip.callbacks.curvature import measure_curvature, measure_gradient_noise
from lightning_gossip.doctor.report import Landscape, Training
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Deadline, now_s

_WARM_UP, _MOST_STEPS = 3, 50
_LEAST_STEPS = 5
_MOST_MOVES = 20_000  # of a schedule that is followed: a second
_EPOCHS, _WITHOUT_LENGTH = 50, 10_000  # of the run that schedules are made for; its steps, where the data have no length
_GRADIENTS = 4.0  # that a Hessian-vector product costs, for each batch (callbacks/curvature.py)
_LEAST_PRODUCTS, _MOST_PRODUCTS = 20, 300
_LEADING, _BATCHES, _NOISE_BATCHES = 4, 4, 16


def load(model: str, data: str | None) -> tuple[pl.LightningModule, Any]:
    """The user's model and data, each ``module:name`` of a class, a function without arguments, or an object.

    Args:
        model: a LightningModule.
        data: what Trainer.fit takes; the model's own ``train_dataloader`` if None.

    Raises:
        ConfigurationError: for what cannot be found, or is something else.
    """
    module = _made("--model", model)
    if not isinstance(module, pl.LightningModule):
        raise ConfigurationError(f"--model {model} is a {type(module).__name__}, and no LightningModule.")
    if data is not None:
        return module, _made("--data", data)
    if type(module).train_dataloader is pl.LightningModule.train_dataloader:
        raise ConfigurationError(f"--model {model} has no train_dataloader: give its data too, --data user_module:DataModule.")
    return module, module.train_dataloader()


class Trained:
    """A model that is trained for a few steps, and measured.

    Args:
        module, data: of :func:`load`.
        seconds: that steps and curvature may take, each.
    """

    def __init__(self, module: pl.LightningModule, data: Any, seconds: float) -> None:
        self._module = module
        self._data = data
        self._seconds = seconds

    def measure(self, device: torch.device, *, landscape: bool) -> tuple[Training, Landscape | None, list[str]]:
        """Train and measure.

        Args:
            device: where.
            landscape: whether to look at the loss too.

        Returns:
            The steps, the loss, and what was left out, in sentences.

        Raises:
            ConfigurationError: if the model cannot be trained.
        """
        training = self._steps(device)
        if not landscape:
            return training, None, []
        self._module.to(device)
        found, left_out = self._landscape(statistics.median(training.step_s))
        return training, found, left_out

    def _steps(self, device: torch.device) -> Training:
        timer = _StepTimer(self._seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                strategy=SingleDeviceStrategy(device),
                plugins=[LightningEnvironment()],  # whatever has launched this process: it trains alone
                max_epochs=_EPOCHS,  # the timer ends it before; by max_steps a schedule would be as short as that
                limit_val_batches=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[timer],
            )
            trainer.fit(self._module, self._data)
            _go_on(trainer, timer.peak)
        if not timer.step_s:
            raise ConfigurationError("The model was not trained for a step: its data has no batch.")
        tensors = [*self._module.parameters(), *(one for one in self._module.buffers() if one.is_floating_point())]
        return Training(
            step_s=timer.step_s,
            parameters_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            batch_size=timer.batch_size,
            samples=_samples(trainer.train_dataloader),
            optimizer=type(trainer.optimizers[0]).__name__ if trainer.optimizers else "none",
            lr=timer.peak.lr,
            momentum=timer.peak.momentum,
            backward_share=min(1.0, sum(timer.backward_s) / sum(timer.step_s)),
        )

    def _landscape(self, step_s: float) -> tuple[Landscape | None, list[str]]:
        """As far as there is time for."""
        products = self._seconds / (_GRADIENTS * max(step_s, 1e-9))
        batches = min(_BATCHES, int(products / _LEAST_PRODUCTS))
        if batches < 1:
            return None, [f"The curvature was not measured: steps of {step_s:.3g} s leave too little time (--seconds)."]
        most = min(_MOST_PRODUCTS, int(products / batches))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = measure_curvature(self._module, self._data, batches=batches, leading=_LEADING, max_products=most)
            eigenvalues = tuple(value for value in found.eigenvalues if value > 0.0)
            if not eigenvalues:
                return None, ["The loss has no positive curvature where the model is: train it for a while first."]
            if products / _NOISE_BATCHES < 1.0:
                return Landscape(eigenvalues=eigenvalues), []
            noise = measure_gradient_noise(self._module, self._data, batches=_NOISE_BATCHES)
        landscape = Landscape(
            eigenvalues=eigenvalues,
            noise_variance=noise.variance,
            loss=noise.loss,
            noise_curvature=noise.curvature,
            along_loss=noise.along_loss,
        )
        return landscape, []


class _Peak:
    """The first maximum of the learning rate of an optimizer's first group, and the momentum there; None where it has none.

    Not the highest of all: what a schedule says after the end that its author had in mind counts for nothing.
    """

    def __init__(self) -> None:
        self.lr: float | None = None
        self.momentum: float | None = None
        self.is_over = False

    def see(self, trainer: pl.Trainer) -> None:
        """What the next step has."""
        group = trainer.optimizers[0].param_groups[0] if trainer.optimizers else {}
        if self.is_over or group.get("lr") is None:
            return
        lr, momentum = float(group["lr"]), group.get("momentum")
        if self.lr is None or lr > self.lr:
            self.lr, self.momentum = lr, None if momentum is None else float(momentum)
        self.is_over = lr < self.lr


def _go_on(trainer: pl.Trainer, peak: _Peak) -> None:
    """Follow the schedules of a fit that has ended, without training, until the learning rate falls or the run would end."""
    steps = int(trainer.estimated_stepping_batches)
    an_epoch = max(1, steps // _EPOCHS)
    followed = [
        (config.scheduler, config.frequency * (1 if config.interval == "step" else an_epoch))
        for config in trainer.lr_scheduler_configs
        if not config.reduce_on_plateau
    ]
    if not followed:
        return
    each = math.gcd(*(period for _, period in followed))
    first = (trainer.global_step // each + 1) * each
    for step in itertools.islice(range(first, steps, each), _MOST_MOVES):
        if peak.is_over:
            return
        for scheduler, period in followed:
            if step % period == 0:
                trainer.lightning_module.lr_scheduler_step(scheduler, None)
        peak.see(trainer)


class _StepTimer(Callback):
    """Seconds of each step and its backward pass, once it is warm, until there are enough or the time is over; and the peak of
    the learning rate so far."""

    def __init__(self, seconds: float) -> None:
        self.peak = _Peak()
        self.step_s: list[float] = []
        self.backward_s: list[float] = []
        self.batch_size: int | None = None
        self._deadline = Deadline.after(seconds)
        self._began_s = self._backward_began_s = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.estimated_stepping_batches < 0:  # data without a length: a schedule has max_steps from its user then
            trainer.fit_loop.epoch_loop.max_steps = _WITHOUT_LENGTH

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.peak.see(trainer)
        self._began_s = _now_s(pl_module)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._backward_began_s = _now_s(pl_module)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step >= _WARM_UP:
            self.backward_s.append(_now_s(pl_module) - self._backward_began_s)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > _WARM_UP:
            self.step_s.append(_now_s(pl_module) - self._began_s)
        if self.batch_size is None:
            self.batch_size = extract_batch_size(batch)
        least = _LEAST_STEPS if not self._deadline.left_s else _MOST_STEPS
        if len(self.step_s) >= least:
            trainer.should_stop = True


def _now_s(module: pl.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)  # a step is over when its kernels are
    return now_s()


def _samples(loader: Any) -> int | None:
    data = getattr(loader, "dataset", None)
    return len(data) if isinstance(data, Sized) else None


def _made(option: str, name: str) -> Any:
    where, colon, what = name.partition(":")
    if not colon or not what:
        raise ConfigurationError(f"{option} {name} is not module:name. Write for example {option} my_project.model:Model.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(where)
        for part in what.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{option} {name} cannot be found: {error} (looked in {os.getcwd()} and the path).") from error
    if isinstance(found, type) or (callable(found) and not isinstance(found, torch.nn.Module)):
        try:
            return found()
        except TypeError as error:
            raise ConfigurationError(
                f"{option} {name} cannot be called without arguments ({error}). Write a function that gives it them:"
                f" {option} my_module:make."
            ) from error
    return found
