"""The loaders that Fabric has set up: while gradients are recorded their batches are an epoch's, else an evaluation's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gossip.algorithm.exact_evaluation import why_repeated
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.strategies.data.batch_samplers import EpochBatches
from lightning_gossip.strategies.data.dataloader import with_batch_sampler, with_epoch_batches
from lightning_gossip.strategies.data.exact_evaluation import EvaluationBatches, EvaluationSampler
from lightning_gossip.strategies.fabric.training import FabricTraining


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
        if not training.begin_pass():
            return
        if plan is None:
            yield from training.session(self._loader, None, self._number)
            return
        batches = training.work.assign(plan, self._loader, self._number)
        if self._batches is not batches:
            self._batches = batches
            self._ours = with_epoch_batches(self._loader, batches)
        yield from training.session(self._ours, batches, self._number)

    def _evaluate(self) -> Iterator[Any]:
        self._training.end_pass()
        yield from self._exact()

    def _exact(self) -> DataLoader[Any]:
        """This worker's samples, none of them twice where that can be."""
        plan, rank, workers = self._plan, *self._training.place
        loader = self._loader
        if plan is None or why_repeated(plan.samples, plan.batch_size, workers, drop_last=plan.drop_last) is not None:
            return loader
        sampler = EvaluationSampler(loader.dataset, rank=rank, workers=workers, shuffle=plan.shuffle, seed=plan.seed)
        return with_batch_sampler(loader, EvaluationBatches(sampler, plan.batch_size, drop_last=plan.drop_last))
