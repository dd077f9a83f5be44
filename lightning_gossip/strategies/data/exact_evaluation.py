"""Validation, test and prediction on each sample once, where Lightning's DistributedSampler repeats some (decisions/015)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from lightning_gossip.algorithm.exact_evaluation import batches_each, deal, why_repeated
from lightning_gossip.algorithm.work_sharing import Batch
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.data.dataloader import is_ordinary, reading_like, with_batch_sampler
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.lightning.worker_processes import processes_of
from lightning_gossip.strategies.warning_cache import warning_cache


class EvaluationSampler(DistributedSampler[Any]):
    """Sampler of one worker's evaluation samples, none of them repeated.

    Args:
        dataset: of the loader.
        rank: this worker.
        workers: how many there are.
        shuffle: another order in each epoch.
        seed: of the orders, the same on all workers.
    """

    def __init__(self, dataset: Dataset[Any], *, rank: int, workers: int, shuffle: bool, seed: int) -> None:
        super().__init__(dataset, num_replicas=workers, rank=rank, shuffle=shuffle, seed=seed)

    @property
    def order(self) -> list[int]:
        """All samples, the same on all workers."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(samples))
        return torch.randperm(samples, generator=torch.Generator().manual_seed(self.seed + self.epoch), device="cpu").tolist()

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.order[self.rank :: self.num_replicas])

    @override
    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class EvaluationBatches(Sampler[Batch]):
    """Batch sampler of one worker's evaluation batches, equally many on all workers.

    Args:
        sampler: of the samples.
        batch_size: the largest batch.
        drop_last: full batches only.
    """

    def __init__(self, sampler: EvaluationSampler, batch_size: int, *, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    @override
    def __iter__(self) -> Iterator[Batch]:
        of = self.sampler
        return iter(deal(of.order, self.batch_size, rank=of.rank, workers=of.num_replicas, drop_last=self.drop_last))

    def __len__(self) -> int:
        samples = len(self.sampler.dataset)  # type: ignore[arg-type]
        return batches_each(samples, self.batch_size, self.sampler.num_replicas, drop_last=self.drop_last)


def share_evaluation(trainer: pl.Trainer, patches: Patches) -> None:
    """Give Lightning's evaluation loops loaders with each sample once; validation inside a fit follows changes of the ranks."""
    connector, loop = trainer._data_connector, trainer.fit_loop.epoch_loop.val_loop
    prepare, setup_data = connector._prepare_dataloader, loop.setup_data
    generation = _generation(trainer)

    def prepared(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.TRAINING:
            return prepare(dataloader, shuffle=shuffle, mode=mode)
        users = getattr(dataloader, "users_own", dataloader)  # a CombinedLoader of the user's may come with one of ours
        made = exact_loader(trainer, users, mode) if isinstance(users, DataLoader) else None
        return prepare(users, shuffle=shuffle, mode=mode) if made is None else made

    def setup_data_for_these_ranks() -> None:
        nonlocal generation
        if generation != _generation(trainer):
            generation = _generation(trainer)
            loop._combined_loader = None
        setup_data()

    patches.set(connector, "_prepare_dataloader", prepared)
    patches.set(loop, "setup_data", setup_data_for_these_ranks)


def exact_loader(trainer: pl.Trainer, users: DataLoader[Any], mode: RunningStage) -> DataLoader[Any] | None:
    """The user's loader with this worker's samples; None where it stays Lightning's.

    Args:
        trainer: whose evaluation.
        users: the loader.
        mode: validating, testing, predicting or sanity checking.

    Raises:
        ConfigurationError: if there is nothing to predict for some worker.
    """
    if not trainer._data_connector._requires_distributed_sampler(users) or not is_ordinary(users):
        return None
    batch_sampler, predicting = users.batch_sampler, mode == RunningStage.PREDICTING
    assert isinstance(batch_sampler, BatchSampler)
    ranks: dict[str, int] = trainer.distributed_sampler_kwargs  # type: ignore[assignment]
    samples, workers, batch_size = len(users.dataset), ranks["num_replicas"], batch_sampler.batch_size  # type: ignore[arg-type]
    drop_last = users.drop_last and not predicting
    reason = why_repeated(samples, batch_size, workers, drop_last=drop_last)
    if reason is not None:
        if predicting and samples < workers:
            raise ConfigurationError(f"Each worker needs a sample to predict, and {reason}. Predict with fewer workers.")
        if not predicting:  # Lightning repeats none there, and may give a worker one batch more
            warning_cache.warn(
                f"Some samples of the {mode.dataloader_prefix} set are evaluated twice, as under DDP, since {reason}. For exact"
                " metrics use a batch_size of at least 2 and as many samples as workers, or evaluate in one process."
            )
        return None
    sampler = EvaluationSampler(
        users.dataset,
        rank=ranks["rank"],
        workers=workers,
        shuffle=isinstance(users.sampler, RandomSampler) and not trainer.overfit_batches,  # type: ignore[attr-defined]
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
    )
    batches: Any = EvaluationBatches(sampler, batch_size, drop_last=drop_last)
    if predicting:
        batches = _IndexBatchSamplerWrapper(batches)  # from which Lightning reads the samples' numbers
    made = with_batch_sampler(users, batches) if type(users) is DataLoader else _of_its_class(users, batches)
    return None if made is None else reading_like(made, users, sampler)


def _of_its_class(users: DataLoader[Any], batches: Any) -> DataLoader[Any] | None:
    """A loader of the user's own class with another batch sampler, made as Lightning does; None if it takes none."""
    try:
        values, named = _get_dataloader_init_args_and_kwargs(users, SequentialSampler(users.dataset))  # type: ignore[arg-type]
        names = getattr(users, "__pl_saved_arg_names", ())
        named = {**dict(zip(names, values, strict=False)), **named}
        named.update(sampler=None, shuffle=False, batch_sampler=batches, batch_size=1, drop_last=False)
        made: DataLoader[Any] = _reinstantiate_wrapped_cls(users, *values[len(names) :], **named)
    except (TypeError, MisconfigurationException):
        return None  # Lightning then says what it lacks, or gives it a sampler
    return made if made.batch_sampler is batches else None


def equally_long(tensor: Tensor, workers: Workers) -> Tensor:
    """What a worker gathers, its first entries again at its end if another one gathers more. Collective.

    Workers that evaluate each sample once have numbers of them that differ by one, and a gathered tensor has one length.

    Raises:
        ConfigurationError: on all workers, if some of them have none.
    """
    lengths = workers.gather(tensor.shape[0] if tensor.dim() else None, kind="all_gather")
    if len(set(lengths)) == 1:
        return tensor
    if not min(lengths):
        raise ConfigurationError(f"all_gather of nothing on some workers (lengths by rank: {lengths}). Gather a sum instead.")
    warning_cache.warn(
        f"all_gather of tensors of different lengths ({lengths} by rank): the first entries of the shorter ones come twice, as"
        " samples do under DDP. A metric of torchmetrics, or self.log, is exact."
    )
    most = max(lengths)
    return tensor[torch.arange(most, device=tensor.device) % tensor.shape[0]]


def _generation(trainer: pl.Trainer) -> int:
    members = processes_of(trainer).members
    return 0 if members is None else members.generation
