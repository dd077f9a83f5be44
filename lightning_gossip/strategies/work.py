"""Work sharing in a Trainer: which batches this worker gets, and what the progress of all means for step counts.

One object a fit. It replaces the training DataLoader, follows which batch a step is about, moves step schedules to the
global count, and knows where an interrupted epoch stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import _extract_batch_size
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.connection import ReportingStore
from lightning_gossip.runtime.membership import Membership
from lightning_gossip.runtime.rendezvous import gather
from lightning_gossip.runtime.work_queue import Journal, Store
from lightning_gossip.strategies.data import (
    EpochBatches,
    EpochPosition,
    SharedBatches,
    StaticBatches,
    lookahead_of,
    plan_of,
    with_batch_sampler,
)
from lightning_gossip.strategies.options import WorkSharing
from lightning_gossip.strategies.patches import Patches
from lightning_gossip.strategies.preflight import why_static_shares
from lightning_gossip.strategies.schedulers import GlobalCount


class FitWork:
    """The batches of one worker in one fit.

    Args:
        trainer: whose fit.
        option: share the work, do not, or ``"auto"``: where it is possible.
        key: unique to this fit, the same on all workers.
        seed: of the permutations, the same on all workers.
        batch_s: asked for this worker's time a batch in seconds.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        option: WorkSharing,
        *,
        key: str,
        seed: int,
        batch_s: Callable[[], float | None],
    ) -> None:
        self.batches: EpochBatches | None = None
        self.samples = 0
        self._trainer = trainer
        self._option = option
        self._key = key
        self._seed = seed
        self._batch_s = batch_s
        self._loaders: list[Any] = []
        self._iterating = False  # whether an iteration over the training loader that begins now is the loop's own
        self._count: GlobalCount | None = None

    # -- the data loader ---------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Look at the training loaders before Lightning puts its own sampler into them."""
        source = self._trainer.fit_loop._data_source
        original = source.dataloader

        def observed() -> Any:
            loader = original()
            self._loaders = list(CombinedLoader(loader, "max_size_cycle").flattened) if loader is not None else []
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
    def _training_iterates(self) -> Iterator[None]:
        self._iterating = True
        try:
            yield
        finally:
            self._iterating = False

    def process(self, dataloader: Any) -> Any:
        """The loader that Lightning is to use, given what it would use under DDP."""
        loaders, self._loaders = self._loaders, []
        if not loaders:
            return dataloader  # not for training
        plan = plan_of(loaders[0], self._seed) if len(loaders) == 1 else "there are several training loaders"
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
            self.batches = None
            if self._option == "auto":
                rank_zero_info(f"Each worker keeps its static share of the data, as under DDP: {reason}.")
            return dataloader
        members = self._trainer.strategy.members  # type: ignore[attr-defined]
        options: dict[str, Any] = {
            "journal": None if members is None else Journal(ReportingStore(members.store), self._store_key, members),
            "rank": self._trainer.global_rank,
            "workers": self._trainer.world_size,
            "epoch": lambda: _epochs_processed(self._trainer),
            "training": lambda: self._iterating,
        }
        if reason is not None or self._option is False or self._trainer.world_size == 1:
            if self._option == "auto" and reason is not None:
                rank_zero_info(f"Each worker keeps an equal static share of the data: {reason}.")
            self.batches = StaticBatches(plan, **options)
        else:
            self.batches = SharedBatches(
                plan,
                store=cast(
                    Store,
                    ReportingStore(dist.distributed_c10d._get_default_store() if members is None else members.store),
                ),
                key=self._store_key,
                gone=frozenset if members is None else members.gone,
                lookahead=lookahead_of(loaders[0]),
                batch_s=self._batch_s,
                **options,
            )
        return with_batch_sampler(loaders[0], self.batches)

    @property
    def shared(self) -> SharedBatches | None:
        """The shared batches, if the work is shared."""
        return self.batches if isinstance(self.batches, SharedBatches) else None

    @contextmanager
    def nominal_batches(self) -> Iterator[None]:
        """While ``configure_optimizers`` runs, ``estimated_stepping_batches`` knows the nominal share of an epoch."""
        fit_loop = self._trainer.fit_loop
        original = fit_loop.setup_data

        def setup_data() -> None:
            original()
            if self.shared is not None:
                fit_loop.max_batches = self.shared.nominal_length

        patches = Patches()
        patches.set(fit_loop, "setup_data", setup_data)
        try:
            yield
        finally:
            patches.restore()
            if self.shared is not None:
                fit_loop.max_batches = float("inf")

    # -- progress ----------------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Lightning's state is loaded: step schedules follow the global count from here."""
        if self.batches is None or not self._trainer.lightning_module.automatic_optimization:
            return
        configs = self._trainer.lr_scheduler_configs
        plateaus = [config for config in configs if isinstance(config.scheduler, ReduceLROnPlateau)]
        if self.shared is not None and any(config.interval == "step" for config in plateaus):
            raise ConfigurationError(
                "ReduceLROnPlateau with interval='step' would follow each worker's own losses, and learning rates would"
                " part. Use interval='epoch'."
            )
        if self.shared is None and self._trainer.fit_loop.max_batches != self.batches.nominal_length:
            return  # limited by the user: each worker counts its own steps
        self._count = GlobalCount(self.batches.nominal_length)
        self._count.begin(self._trainer.global_step, [config for config in configs if config not in plateaus])

    def planned_steps(self) -> int | None:
        """Optimizer steps that each worker makes in the whole run, if all are equally fast; None if nobody can tell."""
        trainer = self._trainer
        batches = self.shared.nominal_length if self.shared is not None else trainer.fit_loop.max_batches
        by_epochs = by_steps = math.inf
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            by_epochs = trainer.max_epochs * (
                batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
            )
        if trainer.max_steps >= 0:
            manual = not trainer.lightning_module.automatic_optimization
            by_steps = trainer.max_steps / (max(1, len(trainer.optimizers)) if manual else 1)  # it counts each optimizer's
        steps = min(by_epochs, by_steps)
        return None if math.isinf(steps) else int(steps)

    def begin_batch(self, batch: Any) -> None:
        """A batch is about to be trained on."""
        # 1 where Lightning cannot tell its size either
        self.samples += next((size for size in _extract_batch_size(batch) if size is not None), 1)
        if self._count is not None and self.batches is not None and (progress := self.batches.progress) is not None:
            self._count.advance(progress, self._trainer.accumulate_grad_batches)

    def end_batch(self) -> None:
        """It has been."""
        if self.batches is not None:
            self.batches.step()

    # -- workers that come later ---------------------------------------------------------------------------------------

    @property
    def hands_out_again(self) -> bool:
        """Whether Lightning begins a new iteration for the coming epoch, so that others may take part in it."""
        loop = self._trainer.fit_loop
        return self._trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting

    def news(self) -> dict[str, Any]:
        """What a worker that comes later needs to take batches of the same epochs."""
        return {
            "key": self._key,
            "seed": self._seed,
            "plan": None if self.batches is None else asdict(self.batches.plan),
            "hand_outs": 0 if self.batches is None else self.batches.hand_outs,
            "count": None if self._count is None else self._count.state(Fraction(0)),
        }

    @property
    def about(self) -> str:
        """What must be equal on a worker that comes later."""
        return "its own" if self.batches is None else str({**asdict(self.batches.plan), "seed": 0})

    def follow(self, news: dict[str, Any]) -> None:
        """Take batches of the epochs that :meth:`news` tells of.

        Raises:
            ConfigurationError: if this worker was started with other data.
        """
        self._key, self._seed = news["key"], news["seed"]
        mine = None if self.batches is None else asdict(self.batches.plan)
        if (mine is None) != (news["plan"] is None) or (mine and {**mine, "seed": 0} != {**news["plan"], "seed": 0}):
            raise ConfigurationError(
                f"This worker came later, with other data or batches ({mine}) than the others ({news['plan']}). Start it with"
                " the same command."
            )
        if self.batches is not None:
            self.batches.plan = type(self.batches.plan)(**news["plan"])
            self.batches.hand_outs = news["hand_outs"]
            self.batches.move_to(self._store_key)
        if self._count is not None and news["count"] is not None:
            self._count.load(news["count"], Fraction(0))

    @property
    def _store_key(self) -> str:
        return f"lightning_gossip/{self._key}/work"

    # -- members that change -----------------------------------------------------------------------------------------

    def is_of(self, generation: int) -> bool:
        """Whether the batches under way were handed out to these members; True where they are Lightning's own."""
        journal = None if self.batches is None else self.batches.journal
        return journal is None or journal.generation == generation

    def inherit(self, members: Membership) -> None:
        """Workers have died in this hand-out: rank 0 holds from now on what they have not finished. Collective."""
        if self.batches is None or self.batches.journal is None:
            return
        finished = [position for worker in members.lost for position in self.batches.journal.read(str(worker))]
        self.batches.orphans = []  # of an earlier meeting in this hand-out: they are found again
        # the journal of a worker that was only taken for dead may grow: one worker's reading counts
        everyones = gather((self.batches.stepped() + self.batches.unstepped(), finished))
        orphans = self.batches.find_orphans([theirs for theirs, _ in everyones], everyones[0][1])
        self.batches.orphans = orphans if members.rank == 0 else []

    def go_on(self) -> bool:
        """Hand out again what is left of the epoch although all have ended it. Collective.

        Returns:
            Whether there was anything.
        """
        if self.batches is None or self._trainer.limit_train_batches != 1.0:
            return False  # of an epoch that is cut off, each worker's part is as good as another's
        unstepped = [position for theirs in gather(self.batches.unstepped()) for position in theirs]
        position = self.batches.position(unstepped)
        if not position.pending and not position.pieces:
            return False
        self.follow_members()
        loop = self._trainer.fit_loop
        fetcher = loop._data_fetcher
        assert fetcher is not None
        self.batches.resume(position)
        with self._training_iterates():
            iter(fetcher)
        if isinstance(self.batches, StaticBatches):
            self._align_progress(self.batches.nominal_length - self.batches.resumed_share(position))
            fetcher.fetched += loop.epoch_loop.batch_progress.current.ready  # so that it knows the last batch
        loop.epoch_loop.batch_progress.is_last_batch = False
        return True

    def follow_members(self) -> None:
        """The next hand-out is for the workers that are there now."""
        fit_loop = self._trainer.fit_loop
        if self.batches is None:
            fit_loop._combined_loader = None  # the loader is asked for again, and gets a sampler for these workers
            fit_loop.setup_data()
        else:
            self.batches.rank, self.batches.workers = self._trainer.global_rank, self._trainer.world_size
            if isinstance(self.batches, StaticBatches):
                self._resize(self.batches.nominal_length)
        fit_loop.epoch_loop.val_loop._combined_loader = None

    def _resize(self, length: int) -> None:
        """The share of each worker has another length: what Lightning's loop has reckoned from it follows."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        batches = _parse_num_batches(RunningStage.TRAINING, length, trainer.limit_train_batches)
        fit_loop.max_batches = batches
        assert fit_loop._combined_loader is not None
        fit_loop._combined_loader.limits = [batches]
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def end_epoch(self) -> None:
        """All workers have ended the epoch: schedules stand at the same count everywhere."""
        if self._count is not None:
            self._count.end_epoch()

    @property
    def left_early(self) -> bool:
        """Whether this worker left the last batches of the epoch to faster ones."""
        return self.shared is not None and self.shared.queue is not None and self.shared.queue.left_early

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self, unstepped: list[int]) -> dict[str, Any] | None:
        """Where the epoch stands, for a checkpoint; None if the batches are Lightning's own.

        Args:
            unstepped: positions that all workers together hold and have not trained on.
        """
        if self.batches is None:
            return None
        mid_epoch = not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        position = self.batches.position(unstepped) if mid_epoch else None
        done = self.batches.share(self.batches.batches - len(position.pending or position.pieces)) if position else Fraction(0)
        return {
            "plan": asdict(self.batches.plan),
            "position": asdict(position) if position else None,
            "count": self._count.state(done) if self._count is not None else None,
        }

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on where a checkpoint left off. Call after :meth:`begin_fit`, before the first batch."""
        if state is None or self.batches is None:
            return
        plan = asdict(self.batches.plan)
        if {**state["plan"], "seed": 0} != {**plan, "seed": 0}:
            rank_zero_warn(
                f"The checkpoint was written with other data or batches ({state['plan']}, now {plan}): the epoch under way"
                " begins anew."
            )
            self._load_count(state)
            return
        self.batches.plan = type(self.batches.plan)(**state["plan"])
        if state["position"] is not None:
            position = EpochPosition(**state["position"])
            self.batches.resume(position)
            if isinstance(self.batches, StaticBatches) and (position.pending or position.pieces):
                self._align_progress(self.batches.nominal_length - self.batches.resumed_share(position))
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None:
            with self._training_iterates():
                iter(fetcher)  # the first iterator was made before the state was known
        self._load_count(state)

    def _load_count(self, state: dict[str, Any]) -> None:
        if self._count is not None and self.batches is not None and state["count"] is not None:
            self._count.load(state["count"], self.batches.share(0))

    def _align_progress(self, done: int) -> None:
        """Workers may have been stopped at different batches; what is left is dealt out evenly, so all stand at one."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        shift = max(0, done) - current.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, max(0, getattr(current, name) + shift))


def _epochs_processed(trainer: pl.Trainer) -> int:
    """The number of the epoch under way; that of the next one between two."""
    progress = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)  # type: ignore[attr-defined]


def set_global_step(trainer: pl.Trainer, steps: int) -> None:
    """With shared work the workers' step counts differ; after a rendezvous all have one, as file names and limits need."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = loop.manual_optimization.optim_step_progress.total
    shift = steps - total.completed
    total.ready += shift
    total.completed += shift
