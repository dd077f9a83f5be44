"""How curved the loss of a LightningModule is, on its own data: measured once, or logged while it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice, check_integer, check_positive
from lightning_gossip.analysis.curvature.gradient_noise import GradientNoise, gradient_noise
from lightning_gossip.analysis.curvature.hessian import NotFiniteError, differentiable
from lightning_gossip.analysis.curvature.spectrum import Curvature, curvature
from lightning_gossip.analysis.curvature.unchanged import seed_everything, unchanged_random_state
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.callbacks.training_step import Step, check_step, loss_of
from lightning_gossip.errors import ConfigurationError

Mode = Literal["train", "eval"]


@clear_arguments
class CurvatureProbe(Callback):
    """Measures the largest Hessian eigenvalues of the training loss at the end of every k-th epoch, and logs them.

    On rank 0 alone and without a collective: the others go on, and wait for it where they next meet. So a measurement has to
    take less time than the process group waits (``timeout`` of the strategy, 30 minutes). Its cost: about four gradients of
    ``batches`` batches per Hessian-vector product, 13 to 35 products for one eigenvalue, 20 to 60 for four. Memory: the
    batches, (2·leading + 12) vectors of the model in float64 on the CPU, and the graph of a gradient of one batch.

    The batches are the first of the epoch that rank 0 trains on, as its training steps get them. They are remembered, so that
    the data loader and its random numbers are left alone. The model is measured as it then is, in the mode it trains in
    (BatchNorm: with each batch's own statistics); under this package's strategies it is the mean of all workers' models.
    It is measured in float32 under mixed precision too, and compiled modules as they were written. Training goes on as
    without the probe, to the bit: nothing of the module, its metrics or the random generators is changed, except for plain
    Python attributes that ``training_step`` itself writes.

    | name | what |
    |---|---|
    | ``analysis/curvature_max`` | h_max, the largest eigenvalue |
    | ``analysis/curvature_<i>`` | the i-th largest, for i from 2 to ``leading`` |

    Where the loss or a product is not finite there is a warning, and nothing is logged.

    Args:
        every_n_epochs: k.
        batches: to average the loss over; those of the epoch if it has fewer.
        leading: how many eigenvalues.
        before_training: measure also before the first step of a fit, on its first batch alone.
        tolerance, max_products, seed: see :func:`~lightning_gossip.analysis.curvature.spectrum.curvature`.

    Attributes:
        last: the last measurement, on rank 0; None before the first one and on other ranks. A callback that reads it at an
            epoch's end stands behind this one in ``Trainer(callbacks=...)``.

    Raises:
        ConfigurationError: for a value out of range. When fit begins: for manual optimization, a training step that takes
            the data loader's iterator, parameters of 16 bits, a strategy that shards the parameters. After the first epoch:
            for a loss that cannot be differentiated twice.

    Example::

        Trainer(strategy="adpsgd", devices=4, callbacks=[CurvatureProbe(every_n_epochs=5), GossipMonitor()])
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        batches: int = 2,
        *,
        leading: int = 1,
        before_training: bool = False,
        tolerance: float = 1e-3,
        max_products: int = 300,
        seed: int = 0,
    ) -> None:
        check_integer("every_n_epochs", every_n_epochs, example=1)
        check_integer("batches", batches, example=2)
        check_integer("leading", leading, example=1)
        check_integer("max_products", max_products, example=300)
        check_positive("tolerance", tolerance)
        self.last: Curvature | None = None
        self._every_n_epochs = every_n_epochs
        self._batches = batches
        self._before_training = before_training
        self._options: dict[str, Any] = {
            "leading": leading,
            "tolerance": tolerance,
            "max_products": max_products,
            "seed": seed,
        }
        self._steps: list[Step] = []
        self._may_begin = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
            raise ConfigurationError(
                f"CurvatureProbe needs the whole model on rank 0, and {type(trainer.strategy).__name__} shards it. Use a"
                " strategy that replicates the model, or measure_curvature on a checkpoint."
            )
        check_step(pl_module)
        differentiable(pl_module.parameters())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._may_begin = self._before_training

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = []

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        if self._may_begin:
            self._may_begin = False
            self._measure(trainer, pl_module, [_kept(batch, batch_idx)])
        if self._is_due(trainer) and len(self._steps) < self._batches:
            self._steps.append(_kept(batch, batch_idx))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps, self._steps = self._steps, []
        if steps:
            self._measure(trainer, pl_module, steps)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _measure(self, trainer: pl.Trainer, module: pl.LightningModule, steps: list[Step]) -> None:
        try:
            self.last = curvature(loss_of(module), module.parameters(), steps, module=module, **self._options)
        except NotFiniteError as error:
            rank_zero_warn(f"CurvatureProbe measured nothing in epoch {trainer.current_epoch}. {error}")
            return
        values = {"analysis/curvature_max": self.last.largest, "epoch": trainer.current_epoch}
        values.update({f"analysis/curvature_{i}": value for i, value in enumerate(self.last.eigenvalues[1:], start=2)})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last": None if self.last is None else asdict(self.last)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        last = state_dict["last"]
        self.last = None if last is None else Curvature(**last)


def measure_curvature(
    module: pl.LightningModule,
    data: Any,
    *,
    batches: int = 4,
    mode: Mode = "train",
    leading: int = 1,
    tolerance: float = 1e-3,
    max_products: int = 300,
    seed: int = 0,
) -> Curvature:
    """The largest Hessian eigenvalues of a LightningModule's training loss on its own data, outside of a fit.

    The module stays as it is, on its device. Batches come as a Trainer would give them: through the batch transfer hooks of
    the module or the datamodule.

    Args:
        module: with automatic optimization, whose ``training_step`` needs no ``self.trainer``.
        data: what ``Trainer.fit`` takes: a datamodule, a data loader, or a collection of loaders.
        batches: how many to average the loss over; all if there are fewer. ``seed`` decides which, if the loader shuffles.
        mode: ``"train"``: as training sees it, BatchNorm with each batch's own statistics, dropout with fixed random
            numbers; a module that is in training mode already keeps submodules that are not. ``"eval"``: BatchNorm with its
            running statistics, no dropout.
        leading, tolerance, max_products, seed: see :func:`~lightning_gossip.analysis.curvature.spectrum.curvature`.

    Raises:
        ConfigurationError: for a value out of range; for manual optimization; and for what
            :class:`~lightning_gossip.analysis.curvature.hessian.Hessian` refuses.
    """
    check_integer("batches", batches, example=4)
    check_choice("mode", mode, get_args(Mode))
    check_step(module)
    devices = [] if module.device.type == "cpu" else [module.device]
    with unchanged_random_state(devices), _in_mode(module, mode):
        seed_everything(seed, devices)
        return curvature(
            loss_of(module),
            module.parameters(),
            _first_steps(module, data, batches)[0],
            leading=leading,
            tolerance=tolerance,
            max_products=max_products,
            module=module,
            seed=seed,
        )


def measure_gradient_noise(
    module: pl.LightningModule, data: Any, *, batches: int = 128, products: int = 4, mode: Mode = "train", seed: int = 0
) -> GradientNoise:
    """How noisy the gradients of a LightningModule's batches are, outside of a fit.

    Args:
        module, data, mode, seed: as for :func:`measure_curvature`; the batches are of the size that one worker trains on.
        batches: how many gradients are compared; all of an epoch's if there are fewer.
        products: see :func:`~lightning_gossip.analysis.curvature.gradient_noise.gradient_noise`.

    Raises:
        ConfigurationError: as for :func:`measure_curvature`, and for a single batch.
    """
    check_integer("batches", batches, at_least=2, example=16)
    check_choice("mode", mode, get_args(Mode))
    check_step(module)
    devices = [] if module.device.type == "cpu" else [module.device]
    with unchanged_random_state(devices), _in_mode(module, mode):
        seed_everything(seed, devices)
        steps, epoch = _first_steps(module, data, batches)
        return gradient_noise(
            loss_of(module), module.parameters(), steps, products=products, epoch=epoch, module=module, seed=seed
        )


def _kept(batch: Any, number: int) -> Step:
    """A copy of a batch's tensors; other objects are kept as they are."""
    return Step(apply_to_collection(batch, Tensor, lambda tensor: tensor.detach().clone()), number)


@contextmanager
def _in_mode(module: nn.Module, mode: Mode) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    if mode == "eval" or not module.training:
        module.train(mode == "train")
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _first_steps(module: pl.LightningModule, data: Any, count: int) -> tuple[list[Step], int | None]:
    """The first batches of an epoch, on the module's device, and how many it has; None if that is not known."""
    datamodule = data if isinstance(data, pl.LightningDataModule) else None
    if datamodule is not None:
        datamodule.prepare_data()
        datamodule.setup("fit")
        data = datamodule.train_dataloader()
    loader = CombinedLoader(data, "max_size_cycle")  # as in fit
    generators = _generators(loader)
    states = [generator.get_state() for generator in generators]
    try:
        with torch.no_grad():
            batches = itertools.islice(loader, count)
            steps = [Step(_on_device(module, datamodule, batch), number) for batch, number, _ in batches]
            epoch = _length(loader)
    finally:
        loader.reset()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if not steps:
        raise ConfigurationError("The data loader has no batch to measure the curvature on. Pass one that has data.")
    return steps, epoch


def _length(loader: CombinedLoader) -> int | None:
    try:
        length = len(loader)
    except TypeError:  # an iterable data set
        return None
    return length if isinstance(length, int) else None


def _generators(loader: CombinedLoader) -> list[torch.Generator]:
    """The user's random generators that an iteration draws from."""
    owners = [owner for part in loader.flattened for owner in (part, getattr(part, "sampler", None))]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}.values())


def _on_device(module: pl.LightningModule, datamodule: pl.LightningDataModule | None, batch: Any) -> Any:
    def hook(name: str) -> Callable[..., Any]:
        owner = datamodule if datamodule is not None and is_overridden(name, datamodule) else module
        method: Callable[..., Any] = getattr(owner, name)
        return method

    batch = hook("on_before_batch_transfer")(batch, 0)
    batch = hook("transfer_batch_to_device")(batch, module.device, 0)
    return hook("on_after_batch_transfer")(batch, 0)
