"""The DataLoader that Lightning is given for training: over the user's data set, with a batch sampler of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lightning_gossip.algorithm.options import WorkSharing
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.membership.job_store import JobStore
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.store_client import ReportingStore, another
from lightning_gossip.runtime.work_sharing.claim_counter import Store
from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog
from lightning_gossip.strategies.data.batch_samplers import EpochBatches, NominalSampler, SharedBatches, StaticBatches
from lightning_gossip.strategies.lightning.loop_progress import epochs_processed
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.lightning.validation import why_static_shares
from lightning_gossip.strategies.lightning.worker_processes import WorkerProcesses, processes_of


class TrainingLoader:
    """What the user's training loader says of the epoch, and whose iterations over ours hand batches out.

    Args:
        trainer: whose fit.
        option: share the work, do not, or ``"auto"``: where it is possible.
    """

    def __init__(self, trainer: pl.Trainer, option: WorkSharing) -> None:
        self._trainer = trainer
        self._option = option
        self._seen: list[Any] = []
        self._iterating = False  # whether an iteration over the training loader that begins now is the loop's own

    def install(self, patches: Patches) -> None:
        """Look at the training loaders before Lightning puts its own sampler into them."""
        source = self._trainer.fit_loop._data_source
        original = source.dataloader

        def observed() -> Any:
            with self._training_iterates(False):  # the user's hook may look at the loader of before
                loader = users_own(original())
            combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
            self._seen = list(combined.flattened) if loader is not None else []
            return loader

        patches.set(source, "dataloader", observed)
        # only the loop's own iterations hand batches out
        for target, name in ((self._trainer.fit_loop, "setup_data"), (self._trainer.fit_loop.epoch_loop, "on_run_start")):
            patches.set(target, name, self._handing_out(getattr(target, name)))

    def _handing_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with every iteration over the loader that begins in it being the training loop's."""

        def wrapped(*args: Any) -> Any:
            with self._training_iterates():
                return call(*args)

        return wrapped

    @contextmanager
    def _training_iterates(self, iterates: bool = True) -> Iterator[None]:
        before, self._iterating = self._iterating, iterates
        try:
            yield
        finally:
            self._iterating = before

    def begin_again(self) -> None:
        """Begin the loop's own iteration anew; nothing before there was one."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None:
            with self._training_iterates():
                iter(fetcher)

    def look(self) -> list[Any]:
        """The training loaders that Lightning is about to put its own sampler into; none if it is not about those."""
        seen, self._seen = self._seen, []
        return seen

    def read(self) -> list[Any]:
        """The training loaders as the user's hook makes them now."""
        self._trainer.fit_loop._data_source.dataloader()
        return self.look()

    def plan(self, loaders: list[Any], seed: int) -> EpochPlan | str:
        """The epoch that these loaders describe, or the reason why its batches cannot be assigned by us.

        Args:
            loaders: that :meth:`look` has told.
            seed: of the permutations, unless the user's sampler has a generator. The same on all workers.
        """
        if len(loaders) != 1:
            return "there are several training loaders"
        plan = plan_of(loaders[0], seed)
        generator = getattr(getattr(loaders[0], "sampler", None), "generator", None)
        if isinstance(plan, str) or generator is None:
            return plan
        return replace(plan, seed=self._trainer.strategy.broadcast(generator.initial_seed()))

    def batches(
        self,
        loaders: list[Any],
        *,
        before: EpochBatches | None,
        key: str,
        seed: int,
        batch_s: Callable[[], float | None],
    ) -> EpochBatches | None:
        """This worker's batches of the epochs that these loaders describe; None where they stay Lightning's own.

        Args:
            loaders: that :meth:`look` has told.
            before: those of the loaders that these take the place of, if there were any: they go on with other data, since what
                workers have told each other of their speeds stays true.
            key: prefix of the fit's keys in the store.
            seed: of the permutations, the same on all workers.
            batch_s: asked for this worker's time a batch in seconds.

        Raises:
            ConfigurationError: if the work must be shared, and cannot.
        """
        plan = self.plan(loaders, seed)
        reason = plan if isinstance(plan, str) else why_static_shares(self._trainer)
        if self._option is True and reason is not None:
            raise ConfigurationError(
                f"work_sharing=True is not possible: {reason}. Use work_sharing='auto', which then gives each worker an equal"
                " static share, or change that."
            )
        if (
            isinstance(plan, str)
            or self._trainer.overfit_batches  # type: ignore[attr-defined]
            or not self._trainer._accelerator_connector.use_distributed_sampler
        ):
            if self._option == "auto":
                rank_zero_info(f"Each worker keeps its static share of the data, as under DDP: {reason}.")
            return None
        static = reason is not None or self._option is False
        if self._option == "auto" and reason is not None:
            rank_zero_info(f"Each worker keeps an equal static share of the data: {reason}.")
        lookahead = lookahead_of(loaders[0])
        if before is not None and isinstance(before, StaticBatches) == (static or before.workers == 1):
            before.read(plan, lookahead=lookahead)
            return before
        return assigned_batches(
            processes_of(self._trainer),
            plan,
            static=static,
            key=key,
            lookahead=lookahead,
            batch_s=batch_s,
            epoch=lambda: epochs_processed(self._trainer),
            training=lambda: self._iterating,
        )


def assigned_batches(
    strategy: WorkerProcesses,
    plan: EpochPlan,
    *,
    static: bool,
    key: str,
    lookahead: int,
    batch_s: Callable[[], float | None],
    epoch: Callable[[], int],
    training: Callable[[], bool],
) -> EpochBatches:
    """One worker's batches of the epochs of a plan.

    Args:
        strategy: whose workers they are.
        plan: of the epoch, the same on all workers.
        static: whether each worker has an equal share; else each claims the next batch.
        key: prefix of these batches' keys in the store.
        lookahead: see :func:`lookahead_of`.
        batch_s, epoch, training: see :class:`~lightning_gossip.strategies.data.batch_samplers.SharedBatches`.
    """
    members, islands = strategy.members, strategy.islands
    rank, workers = strategy.share_of_work
    options: dict[str, Any] = {
        "completion_log": None
        if members is None
        else CompletionLog(JobStore(members, own=False), key, members, reserve=members.log_reserve),
        "rank": rank,
        "workers": workers,
        "epoch": epoch,
        "training": training,
    }
    if islands is not None:
        options |= asdict(strategy.batches_of_rank)
    if static or workers == 1:
        return StaticBatches(plan, **options)
    shared: Any
    listed: Any = None if strategy.groups is None else another(strategy.groups.island_store)
    if members is None:
        shared, renew = ReportingStore(dist.distributed_c10d._get_default_store()), lambda: False
    elif options.get("leads") is False:  # it follows the first rank's claims, by torch's errors
        shared, renew = listed, lambda: False
    else:
        listed = None if listed is None else ReportingStore(listed)
        shared = JobStore(members, own=True)
        renew = shared.renew
    return SharedBatches(
        plan,
        store=cast(Store, shared),
        listed=listed,
        renew=renew,
        key=key,
        failed_ranks=(lambda: frozenset) if members is None else _failed(members, 1 if islands is None else islands.size),
        lookahead=lookahead,
        batch_s=batch_s,
        **options,
    )


def _failed(members: Membership, size: int) -> Callable[[], Callable[[], frozenset[int]]]:
    """Which workers, or islands of this size, have failed since an assignment, by their places in it."""

    def since() -> Callable[[], frozenset[int]]:
        failed_ranks = members.failed_ranks()
        return lambda: frozenset(rank // size for rank in failed_ranks())

    return members.failed_ranks if size == 1 else since


def plan_of(loader: object, seed: int) -> EpochPlan | str:
    """The epoch that a DataLoader describes, or the reason why its batches cannot be assigned by us."""
    if type(loader) is not DataLoader:
        return f"the training loader is a {type(loader).__name__}, not a plain DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: it has no index to share"
    if type(loader.batch_sampler) is not BatchSampler:
        return "the DataLoader has a batch_sampler of its own, or no automatic batching"
    shuffle = _shuffles(loader.sampler)
    if shuffle is None:
        return f"the DataLoader has a sampler of its own ({type(loader.sampler).__name__})"
    return EpochPlan(len(loader.dataset), loader.batch_sampler.batch_size, shuffle, loader.drop_last, seed)  # type: ignore[arg-type]


def is_ordinary(loader: DataLoader[Any]) -> bool:
    """Whether a loader batches the samples of a map-style data set, once each, in their order or a random one."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and _shuffles(loader.sampler) is not None
    )


def _shuffles(sampler: object) -> bool | None:
    """Whether a sampler draws each sample once in a random order, or once in their own; None if it does neither."""
    if isinstance(sampler, RandomSampler) and not (sampler.replacement or sampler._num_samples):
        return True
    return False if isinstance(sampler, SequentialSampler) else None


def with_epoch_batches(loader: DataLoader[Any], batches: EpochBatches) -> DataLoader[Any]:
    """A copy of a loader whose batches are those of the epoch; it reads as the user's does under DDP."""
    batches.sampler = NominalSampler(loader.dataset, batches)
    return reading_like(with_batch_sampler(loader, batches), loader, batches.sampler)


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """A copy of a plain loader whose batches are drawn from another sampler."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def reading_like(made: DataLoader[Any], users: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """A loader with a batch sampler of ours, with what the user's says of its batches.

    Args:
        made: whose batch sampler determines the batches.
        users: from which it was made.
        sampler: to be shown as its sampler.
    """
    # Torch sets them to None, to nothing of use and to False where there is a batch sampler, and refuses another assignment. It
    # reads them itself only without one, or with an iterable data set.
    vars(made).update(batch_size=users.batch_size, drop_last=users.drop_last, sampler=sampler, users_own=users)
    return made


def users_own(loaders: Any) -> Any:
    """The user's loaders, where a CombinedLoader of the user's that is passed again holds those of an earlier call."""
    if isinstance(loaders, CombinedLoader):
        loaders.flattened = [getattr(loader, "users_own", loader) for loader in loaders.flattened]
    return loaders


def lookahead_of(loader: DataLoader[Any]) -> int:
    """Batches claimed ahead of the one in training: Lightning's own, and what the loader's processes prefetch."""
    return 1 + loader.num_workers * (loader.prefetch_factor or 0)
