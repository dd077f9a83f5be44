"""A recipe's own LightningModule on its own data, as a problem of the simulator's: its loss, its optimizer, its schedule.

What is asked of the module is ``training_step`` and ``configure_optimizers``, as the Trainer asks them. The loss of a model is
what ``training_step`` returns on validation batches, in evaluation mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

from lightning_gossip import ConfigurationError
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.torch_optimizers import TorchOptimizer
from recipes.skew import LabelledData

TIMES_ONLY = "objective=none simulates times only"


@dataclass(frozen=True)
class PlannedRun:
    """What a module asks of its Trainer when it makes its optimizer.

    Args:
        estimated_stepping_batches: steps of each worker if all are equally fast.
        max_epochs: of the run.
        world_size: workers.
    """

    estimated_stepping_batches: int
    max_epochs: int
    world_size: int
    max_steps: int = -1
    accumulate_grad_batches: int = 1


def trained(
    build: Callable[[], LightningModule],
    data: LightningDataModule,
    planned: PlannedRun,
    *,
    clip_norm: float | None,
    held_out: int,
) -> tuple[ModuleObjective, TorchOptimizer]:
    """A module's loss on a data module's samples, and its optimizer.

    Args:
        build: makes the module.
        data: that has been set up.
        planned: how long the run is.
        clip_norm: of gradients; None for no clipping.
        held_out: validation samples that the loss of a model is of, at most.

    Raises:
        ConfigurationError: for what only a real run can do.
    """

    def quiet() -> LightningModule:
        module = build()
        module.log = module.log_dict = _say_nothing  # type: ignore[method-assign]
        return module

    reference = quiet()
    if not reference.automatic_optimization:
        raise ConfigurationError(f"{type(reference).__name__} makes its optimizer steps by itself; {TIMES_ONLY}.")
    reference.trainer = planned  # type: ignore[assignment]
    optimizer, schedulers = _configured(reference)
    names = {id(parameter): name for name, parameter in reference.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [(sum(parameter.numel() for parameter in group["params"]), _settings(group)) for group in optimizer.param_groups]
    training = data.train_dataloader()
    samples, collate = training.dataset, training.collate_fn or default_collate
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise ConfigurationError(f"recipe.data: its training samples cannot be had by their numbers; {TIMES_ONLY}.")

    def batch(indices: Sequence[int]) -> Any:
        return _ready(data, collate([samples[index] for index in indices]))

    objective = ModuleObjective(
        quiet,
        loss_of,
        samples=len(samples),
        batch=batch,
        held_out=[_ready(data, one) for one in _first(data.val_dataloader(), held_out)],
        parameters=order,
        labels=data.training_labels if isinstance(data, LabelledData) else None,
    )
    lrs = _learning_rates(optimizer, schedulers, planned)
    return objective, TorchOptimizer(kind=type(optimizer), groups=groups, lrs=lrs, clip_norm=clip_norm)


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    """What ``training_step`` returns.

    Raises:
        ConfigurationError: for a step that has no loss.
    """
    assert isinstance(module, LightningModule)
    result = module.training_step(batch, 0)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"training_step of {type(module).__name__} returned no loss; {TIMES_ONLY}.")
    return loss


def _say_nothing(*_: Any, **__: Any) -> None:
    """There is no logger."""


def _ready(data: LightningDataModule, batch: Any) -> Any:
    return data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)


def _first(batches: Iterable[Any], samples: int) -> Iterator[Any]:
    """Whole batches, until there are so many samples; at least one."""
    left = samples
    for batch in batches:
        yield batch
        left -= len(batch[0] if isinstance(batch, (list, tuple)) else next(iter(batch.values())))
        if left <= 0:
            return


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    return {**settings, "lr": group.get("initial_lr", group["lr"])}


def _configured(module: LightningModule) -> tuple[Optimizer, list[dict[str, Any]]]:
    """The optimizer, and its schedules as Lightning's dictionaries.

    Raises:
        ConfigurationError: for more than one optimizer, or a schedule that follows a metric.
    """
    try:
        made = module.configure_optimizers()
    except AttributeError as error:
        raise ConfigurationError(
            f"configure_optimizers of {type(module).__name__} needs what only a real run has ({error}); {TIMES_ONLY}."
        ) from error
    schedulers: Any = []
    if isinstance(made, Mapping):
        schedulers = made.get("lr_scheduler", [])
        made = made["optimizer"]
    elif isinstance(made, (list, tuple)) and len(made) == 2 and isinstance(made[0], (list, tuple)):
        made, schedulers = made
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ConfigurationError(f"{type(module).__name__} has not one optimizer, as is simulated; {TIMES_ONLY}.")
    schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    schedules = [dict(one) if isinstance(one, Mapping) else {"scheduler": one} for one in schedulers]
    if any(isinstance(one["scheduler"], ReduceLROnPlateau) or one.get("reduce_on_plateau") for one in schedules):
        raise ConfigurationError(
            f"a schedule of {type(module).__name__} follows a metric, which is not simulated; {TIMES_ONLY}."
        )
    return optimizers[0], schedules


def _learning_rates(optimizer: Optimizer, schedules: Sequence[Mapping[str, Any]], planned: PlannedRun) -> list[float]:
    """Of the first group, at each step."""
    steps, lrs = planned.estimated_stepping_batches, []
    an_epoch = -(-steps // planned.max_epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself makes no step
        for step in range(1, steps + 1):
            lrs.append(float(optimizer.param_groups[0]["lr"]))
            for schedule in schedules:
                by_step = schedule.get("interval", "epoch") == "step"
                of_epoch = (step - 1) % an_epoch + 1  # the frequency begins anew in each, as in Lightning
                each = schedule.get("frequency", 1)
                if of_epoch % each == 0 if by_step else step % (each * an_epoch) == 0:
                    schedule["scheduler"].step()
    return lrs
