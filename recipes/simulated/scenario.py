"""A training configuration as a scenario of the simulator: the same options mean the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    Cluster,
    Epochs,
    Links,
    Objective,
    Steps,
    Strategy,
    digits,
    make_strategy,
    mlp,
)
from lightning_gossip.simulation.problems.optimizers import InnerOptimizer
from recipes.digits import DigitsData, DigitsMLP
from recipes.job import plain_errors
from recipes.simulated.clusters import cluster_of, links_of
from recipes.simulated.modules import PlannedRun, trained
from recipes.summary import name_of
from recipes.text.data import TextData
from recipes.vision.data import CifarData, FashionMnistData, ImageNetData, MnistData

ISLANDS = "adpsgd_islands"
"""The strategy adpsgd with all ranks of a node together."""

_TRAINING_IMAGES = {  # published
    ImageNetData: 1_281_167,
    CifarData: 50_000,
    MnistData: 60_000,
    FashionMnistData: 60_000,
    DigitsData: 1277,
}


@dataclass(frozen=True)
class Problem:
    """What is minimised, and how.

    Args:
        objective: with real gradients; None for times only.
        optimizer: of each worker.
        times_only: why there is no objective, where one was asked for.
    """

    objective: Objective | None = None
    optimizer: InnerOptimizer | None = None
    times_only: str | None = None


@dataclass(frozen=True)
class Scenario:
    """Everything of a run but its strategy; see :func:`lightning_gossip.simulation.simulate`.

    Args:
        cluster: the workers.
        links: between them.
        work: of a run.
        problem: that they solve.
        model_bytes: of a model on its way.
    """

    cluster: Cluster
    links: Links
    work: Epochs | Steps
    problem: Problem
    model_bytes: int

    def slowed(self, rank: int, factor: float) -> Scenario:
        """This scenario for times only, with one slow worker and no other."""
        return replace(self, cluster=replace(self.cluster, slowdown={rank: factor}), problem=Problem())


def scenario_of(cfg: DictConfig) -> Scenario:
    """The scenario of a configuration.

    Args:
        cfg: composed from conf/simulate.yaml.

    Raises:
        ConfigurationError: naming the key, for what does not fit or cannot be simulated.
    """
    if cfg.trainer.accumulate_grad_batches != 1:
        raise ConfigurationError("trainer.accumulate_grad_batches is not simulated: leave it 1 and write a larger batch_size.")
    problem: Problem = instantiate(cfg.objective) or Problem()
    return Scenario(cluster_of(cfg), links_of(cfg), _work(cfg, problem), problem, _model_bytes(cfg, problem))


def strategy_of(cfg: DictConfig) -> Strategy:
    """The simulator's description of the strategy that a training run with this configuration has.

    Raises:
        ConfigurationError: for islands of a strategy that the simulator has none of.
    """
    options: dict[str, Any] = OmegaConf.to_container(cfg.strategy, resolve=True)  # type: ignore[assignment]
    island = options.pop("island", 1)
    real = instantiate(options)
    options.update({name: getattr(real, name) for name in ("period", "outer") if name in options and hasattr(real, name)})
    described = make_strategy(name_of(real), **options)
    if isinstance(described, ADPSGD):
        return replace(described, island=island if cfg.island is None else cfg.island)
    if island != 1:
        raise ConfigurationError(
            f"strategy.island={island!r}: islands of {described.name} are not simulated. Write strategy=adpsgd, or leave it"
            " out."
        )
    return described


def problem(objective: Objective, optimizer: SGD) -> Problem:
    """For conf/objective/."""
    return Problem(objective, optimizer)


def problem_of_recipe(
    model: DictConfig,
    data: DictConfig,
    *,
    epochs: int,
    steps: int | None,
    devices: int,
    nodes: int,
    clip_norm: float | None,
    held_out: int,
    largest: int,
) -> Problem:
    """For conf/objective/: what the recipe trains, with its own loss and optimizer; times only where that cannot be.

    Args:
        model: of the recipe, not instantiated.
        data: of the recipe, not instantiated.
        epochs: of the run.
        steps: of each worker, in place of the epochs; None for these.
        devices, nodes: workers are their product.
        clip_norm: of gradients.
        held_out: validation samples that the loss of a model is of, at most.
        largest: parameters of a model that is trained.
    """
    check_integer("objective.held_out", held_out, example=512)
    check_integer("objective.largest", largest, at_least=0, example=2_000_000)
    if get_class(model._target_) is DigitsMLP:
        optimizer = SGD(
            lr=model.lr, momentum=model.momentum, weight_decay=model.weight_decay, milestones=tuple(model.milestones)
        )
        return Problem(mlp(digits(), hidden=model.hidden), optimizer)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in instantiate(model).parameters())
    if numel > largest:
        return Problem(times_only=f"the model has {numel:,} parameters, and objective.largest={largest}")
    try:
        with plain_errors():
            module: LightningDataModule = instantiate(data)
    except ConfigurationError as error:
        if get_class(data._target_) not in _TRAINING_IMAGES:
            raise
        return Problem(times_only=str(error))  # how many images an epoch has is known without them
    module.prepare_data()
    module.setup("fit")
    samples = len(module.train_dataloader().dataset)
    if steps is None:
        steps = epochs * math.ceil(math.ceil(samples / data.batch_size) / (devices * nodes))
    planned = PlannedRun(steps, epochs, devices * nodes)
    return Problem(*trained(lambda: instantiate(model), module, planned, clip_norm=clip_norm, held_out=held_out))


def _work(cfg: DictConfig, problem: Problem) -> Epochs | Steps:
    batch_size, skew = cfg.recipe.data.batch_size, cfg.recipe.data.get("skew")
    skew_seed = None if skew is None else cfg.recipe.data.get("skew_seed")
    if skew is not None and (problem.objective is None or problem.objective.labels is None):
        raise ConfigurationError(
            f"recipe.data.skew={skew}: without the recipe's own loss only times are simulated, and those of static shares are"
            " had by strategy.work_sharing=false. Leave skew away."
        )
    if cfg.steps is not None:
        return Steps(number=cfg.steps, batch_size=batch_size, skew=skew, skew_seed=skew_seed)
    samples = None if problem.objective is None else problem.objective.samples
    if samples is None:
        samples = cfg.samples if cfg.samples is not None else _samples_of_recipe(cfg)
        check_integer("samples", samples, example=100_000)
    batches = math.ceil(samples / batch_size)
    ahead = cfg.recipe.data.get("num_workers", 0) * cfg.recipe.data.get("prefetch", 0)
    return Epochs(
        number=cfg.recipe.epochs,
        batches=batches,
        batch_size=batch_size,
        lookahead=1 + ahead,
        skew=skew,
        skew_seed=skew_seed,
    )


def _samples_of_recipe(cfg: DictConfig) -> int:
    if get_class(cfg.recipe.data._target_) is TextData:  # a text is as long as it is
        text: TextData = instantiate(cfg.recipe.data)
        return text.training_samples
    images = _TRAINING_IMAGES.get(get_class(cfg.recipe.data._target_))
    if images is None:
        raise ConfigurationError("samples: this recipe's data set is not known; write how many samples an epoch has.")
    return images - int(cfg.recipe.data.get("validation_images", 0))


def _model_bytes(cfg: DictConfig, problem: Problem) -> int:
    if cfg.model_bytes is not None:
        check_integer("model_bytes", cfg.model_bytes, at_least=0, example=100_000_000)
        return int(cfg.model_bytes)
    if problem.objective is not None:
        return problem.objective.numel * problem.objective.dtype.itemsize
    with torch.device("meta"):
        model: LightningModule = instantiate(cfg.recipe.model)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *buffers))
