"""The loaders that Fabric has set up: while gradients are recorded their batches are an epoch's, else an evaluation's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gossip.algorithm.exact_evaluation import why_repeated
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.data.batch_samplers import EpochBatches
from lightning_gossip.strategies.data.dataloader import with_batch_sampler, with_epoch_batches
from lightning_gossip.strategies.data.exact_evaluation import EvaluationBatches, EvaluationSampler
from lightning_gossip.strategies.fabric.training import FabricTraining
from lightning_gossip.strategies.warning_cache import warning_cache


class EpochLoader:
    """A DataLoader of Fabric's, with this worker's batches.

    Args:
        loader: with the sampler that Fabric has put there, or the user's own with ``use_distributed_sampler=False``.
        training: whose batches.
    """

    def __init__(self, loader: DataLoader[Any], training: FabricTraining) -> None:
        self.__dict__.update(loader.__dict__)  # what users read of a loader
        self._loader = loader
        self._training = training
        self._number = training.work.next_loader(lambda: self._plan)  # the same on all workers
        self._batches: EpochBatches | None = None
        self._ours: DataLoader[Any] = loader  # with these batches

    def __len__(self) -> int:
        """Batches of this worker in an epoch, if all are equally fast."""
        plan = self._plan
        return len(self._loader) if plan is None else math.ceil(len(plan) / self._training.place[1])

    def __iter__(self) -> Iterator[Any]:
        return self._train() if torch.is_grad_enabled() else self._evaluate()

    @property
    def _plan(self) -> EpochPlan | None:
        """The epoch that the loader describes; None where the batches are the user's own."""
        sampler, loader = self._loader.sampler, self._loader
        if type(sampler) is not DistributedSampler or type(loader) is not DataLoader or loader.batch_size is None:
            return None
        samples = len(loader.dataset)  # type: ignore[arg-type]
        return EpochPlan(samples, loader.batch_size, sampler.shuffle, loader.drop_last, sampler.seed)

    def _train(self) -> Iterator[Any]:
        training, plan = self._training, self._plan
        if training.work.is_in_loop:
            yield from self._beside()
            return
        if not training.begin_pass():
            return
        if plan is None:
            yield from training.batches_of_pass(self._loader, None, self._number)
            return
        batches = training.work.assign(plan, self._loader, self._number)
        if self._batches is not batches:
            self._batches = batches
            self._ours = with_epoch_batches(self._loader, batches)
        yield from training.batches_of_pass(self._ours, batches, self._number)

    def _beside(self) -> Iterator[Any]:
        """The batches of a loader that is iterated inside the loop over another one: each worker's share, as under DDP."""
        if self._training.work.is_shared and self._plan is not None:
            raise ConfigurationError(
                "Two loaders are iterated at once, and workers claim the batches of the first, so that nobody knows how many of"
                " the second each would need. Write work_sharing=False, as FabricStrategy(ADPSGDStrategy(work_sharing=False)):"
                " then each worker gets an equal share of both, as under DDP."
            )
        yield from self._loader

    def _evaluate(self) -> Iterator[Any]:
        training = self._training
        if not training.work.is_in_loop:
            training.end_pass()
        elif not training.is_together("an evaluation", warns=False):
            warning_cache.warn(
                "Between two batches each worker is at a step of its own: an evaluation there is of this worker's own model, on"
                " its share of the data. Evaluate when the loader has ended, where all have the mean and each sample is seen"
                " once."
            )
        yield from self._exact()

    def _exact(self) -> DataLoader[Any]:
        """This worker's samples, none of them twice where that can be."""
        plan, rank, workers = self._plan, *self._training.place
        loader = self._loader
        if plan is None or why_repeated(plan.samples, plan.batch_size, workers, drop_last=plan.drop_last) is not None:
            return loader
        sampler = EvaluationSampler(loader.dataset, rank=rank, workers=workers, shuffle=plan.shuffle, seed=plan.seed)
        return with_batch_sampler(loader, EvaluationBatches(sampler, plan.batch_size, drop_last=plan.drop_last))
