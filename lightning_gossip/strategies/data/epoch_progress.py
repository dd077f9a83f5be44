"""Work sharing in a Trainer: which batches this worker gets, and what the progress of all means for step counts.

One object a fit. It follows which batch a step is about, moves schedules by step to where all are, and knows where an
interrupted epoch stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.trainer import call

from lightning_gossip.algorithm.options import WorkSharing
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.data.batch_samplers import EpochBatches, EpochPosition, SharedBatches, StaticBatches
from lightning_gossip.strategies.data.dataloader import TrainingLoader, lookahead_of, plan_of, with_epoch_batches
from lightning_gossip.strategies.data.lr_schedulers import StepSchedules
from lightning_gossip.strategies.data.step_accounting import samples_in
from lightning_gossip.strategies.lightning.loop_progress import align_epoch, epochs_processed
from lightning_gossip.strategies.lightning.patches import Patches


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
        self.reloaded = False  # whether the loader is another one than that of the last epoch
        self.samples = 0
        self.loader = TrainingLoader(trainer, option)
        self._trainer = trainer
        self._key = key
        self._seed = seed
        self._batch_s = batch_s
        self._schedules: StepSchedules | None = None
        self._paused: StepSchedules | None = None
        self._share = Fraction(0)
        self._loaded = False

    # -- the data loader ---------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Take part in Lightning's loop over the training loader."""
        self.loader.install(patches)
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        fit_loop._combined_loader = None  # of Lightning's own, if somebody has asked for a length in setup()
        setup_data, reset, is_last = fit_loop.setup_data, loop.reset, loop._num_ready_batches_reached

        def setup_data_and_show_length() -> None:
            setup_data()
            self.show_nominal_length()

        def reset_without_length() -> None:  # where a worker stands in an epoch says nothing of the epoch's end
            with self._unlimited():
                reset()

        patches.set(fit_loop, "setup_data", setup_data_and_show_length)
        patches.set(loop, "reset", reset_without_length)
        patches.set(
            loop,
            "_num_ready_batches_reached",
            lambda: is_last() if self.shared is None else bool(loop.batch_progress.is_last_batch),
        )

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        fit_loop = self._trainer.fit_loop
        shown = fit_loop.max_batches
        if self.shared is not None:
            fit_loop.max_batches = math.inf
        try:
            yield
        finally:
            fit_loop.max_batches = shown

    def show_nominal_length(self) -> None:
        """``trainer.num_training_batches`` of an epoch without fixed owners of its batches: as if all were equally fast."""
        if self.shared is not None:
            self._trainer.fit_loop.max_batches = self.shared.nominal_length

    def show_length(self) -> None:
        """Show the length with a batch at hand: more if this worker has taken more, and right at its last one."""
        if self.shared is not None:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            ready = progress.current.ready
            self._trainer.fit_loop.max_batches = ready if progress.is_last_batch else max(self.shared.nominal_length, ready + 1)

    def process(self, dataloader: Any) -> Any:
        """The loader that Lightning is to use, given what it would use under DDP."""
        loaders = self.loader.look()
        if not loaders:
            return dataloader  # not for training
        self.reloaded, self._loaded = self._loaded, True
        self.batches = self.loader.batches(
            loaders, before=self.batches, key=self._store_key, seed=self._seed, batch_s=self._batch_s
        )
        if self.batches is None:
            return dataloader
        self._resize_epoch()
        return with_epoch_batches(loaders[0], self.batches)

    @property
    def shared(self) -> SharedBatches | None:
        """The shared batches, if the work is shared."""
        return self.batches if isinstance(self.batches, SharedBatches) else None

    # -- progress ----------------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Begin the fit, when Lightning's state is loaded: schedules by step follow the work of all from here."""
        if self.batches is None or not self._trainer.lightning_module.automatic_optimization:
            return
        if self.shared is not None and any(
            config.interval == "step" and config.reduce_on_plateau for config in self._trainer.lr_scheduler_configs
        ):
            raise ConfigurationError(
                "A schedule that follows a metric, as ReduceLROnPlateau, with interval='step' would follow each worker's own"
                " losses, and learning rates would part. Use interval='epoch'."
            )
        if self.shared is None and self._trainer.limit_train_batches != 1.0:
            return  # each worker counts its own steps
        self._schedules = StepSchedules(self.batches.positions, self.batches.workers, self._move)

    def _move(self, scheduler: Any) -> None:
        """Move a schedule by step once, as Lightning does: the module's hook may have its own way."""
        progress = self._trainer.fit_loop.epoch_loop.scheduler_progress
        progress.increment_ready()
        call._call_lightning_module_hook(self._trainer, "lr_scheduler_step", scheduler, None)
        progress.increment_completed()

    def move_schedules(self) -> bool:
        """Move schedules by step to where the epoch is, if the batch at hand ends a step; False: that is left to Lightning."""
        if self._schedules is None or self.batches is None:
            return False
        if not self._trainer.fit_loop._should_accumulate():
            self._schedules.move(self._trainer.lr_scheduler_configs)
        return True

    @property
    def share(self) -> Fraction:
        """Which share of the epoch under way is done with the batch at hand, of all workers as far as this one knows; 0 before
        the first one, and where schedules follow each worker's own steps."""
        if self._schedules is None or self._schedules.epoch != epochs_processed(self._trainer):
            return Fraction(0)
        return self._share

    def pause_schedules(self) -> None:
        """Steps from now on are not the fit's: schedules are Lightning's."""
        self._paused, self._schedules = self._schedules, None

    def resume_schedules(self) -> None:
        """Steps are the fit's again."""
        self._schedules, self._paused = self._paused, None

    def planned_steps(self, *, epochs_done: int = 0, steps_done: int = 0) -> int | None:
        """Optimizer steps that each worker makes, if all are equally fast; None if nobody can tell.

        Args:
            epochs_done, steps_done: not counted any more, default: of the whole run.
        """
        trainer = self._trainer
        batches = self.shared.nominal_length if self.shared is not None else trainer.fit_loop.max_batches
        by_epochs = by_steps = math.inf
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            by_epochs = (trainer.max_epochs - epochs_done) * (
                batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
            )
        if trainer.max_steps >= 0:
            manual = not trainer.lightning_module.automatic_optimization
            # it counts each optimizer's
            by_steps = trainer.max_steps / (max(1, len(trainer.optimizers)) if manual else 1) - steps_done
        steps = min(by_epochs, by_steps)
        return None if math.isinf(steps) else int(steps)

    def _resize_epoch(self) -> None:
        if self._schedules is not None and self.batches is not None:
            self._schedules.resize(self.batches.positions)

    def begin_batch(self, batch: Any) -> None:
        """Note which share of the epoch is done with the batch that is about to be trained on."""
        self.samples += samples_in(batch)
        if self._schedules is None or self.batches is None or (progress := self.batches.progress) is None:
            return
        # Lightning's own count says how far static shares are; of shared batches it is used where no state of ours was loaded
        done, nominal = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready, self.batches.nominal_length
        is_known = self.shared is not None and self._schedules.epoch is not None
        before = Fraction(0 if is_known else done - 1, nominal)
        self._share = Fraction(done, nominal) if self.shared is None else progress
        self._schedules.advance(
            epochs_processed(self._trainer), self._share, self._trainer.accumulate_grad_batches, before=before
        )

    def end_batch(self) -> None:
        """Mark the current batch as trained on."""
        if self.batches is not None:
            self.batches.step()

    def end_epoch(self, share: Fraction, *, left: bool, skipped: bool) -> None:
        """End the epoch, as all workers do: schedules by step have moved equally often everywhere.

        Args:
            share: of it that is done with the last batch of any worker; all of it, if shared batches were left by nobody.
            left: whether all have left it early, and a fit that resumes goes on with it.
            skipped: whether hooks have left out the rest of it.
        """
        if self._schedules is None:
            return
        done = Fraction(1) if self.shared is not None and not (left or skipped) else share
        configs = self._trainer.lr_scheduler_configs
        self._schedules.end_epoch(epochs_processed(self._trainer), done, configs, cut=skipped and not left)

    def close(self) -> None:
        """Take no batch any more. May be called twice."""
        if self.shared is not None:
            self.shared.close()

    @property
    def left_early(self) -> bool:
        """Whether this worker left the last batches of the epoch to faster ones."""
        return self.shared is not None and self.shared.queue is not None and self.shared.queue.left_early

    # -- joiners ------------------------------------------------------------------------------------------------------

    @property
    def assigns_anew(self) -> bool:
        """Whether Lightning begins a new iteration for the coming epoch, so that others may take part in it."""
        loop = self._trainer.fit_loop
        return self._trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting

    def snapshot(self) -> dict[str, Any]:
        """State that a joiner needs to take batches of the same epochs."""
        return {
            "key": self._key,
            "seed": self._seed,
            "plan": None if self.batches is None else asdict(self.batches.plan),
            "assignments": 0 if self.batches is None else self.batches.assignments,
            "loaded_at": self._trainer.fit_loop._last_train_dl_reload_epoch,
            "schedules": self._state_of_schedules,
        }

    @property
    def about(self) -> str:
        """The data and batches, which must be equal on a joiner."""
        if self.batches is None:
            return "its own"
        plan = {**asdict(self.batches.plan), "seed": 0}
        if self._trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            del plan["samples"]  # one that comes later reads the loader of its first epoch when it knows that
        return str(plan)

    def apply_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Take batches of the epochs that a :meth:`snapshot` describes.

        Raises:
            ConfigurationError: if this worker was started with other data.
        """
        self._key, self._seed = snapshot["key"], snapshot["seed"]
        if self._trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._trainer.fit_loop._last_train_dl_reload_epoch = snapshot["loaded_at"]
            self._read_again()
        mine = None if self.batches is None else asdict(self.batches.plan)
        if (mine is None) != (snapshot["plan"] is None) or (mine and {**mine, "seed": 0} != {**snapshot["plan"], "seed": 0}):
            raise ConfigurationError(
                f"This worker came later, with other data or batches ({mine}) than the others ({snapshot['plan']}). Start it"
                " with the same command."
            )
        if self.batches is not None:
            self.batches.plan = type(self.batches.plan)(**snapshot["plan"])
            self.batches.assignments = snapshot["assignments"]
            self.batches.move_to(self._store_key)
        self._load_schedules(snapshot["schedules"])

    def _read_again(self) -> None:
        """The user's loader as it is in this epoch. No collective, since the others have read theirs."""
        if self.batches is not None:
            loaders, combined = self.loader.read(), self._trainer.fit_loop._combined_loader
            plan = plan_of(loaders[0], self._seed)
            if isinstance(plan, str):
                raise ConfigurationError(f"This worker came later, and its training data cannot be shared: {plan}.")
            self.batches.read(plan, lookahead=lookahead_of(loaders[0]))
            assert combined is not None
            combined.flattened = [with_epoch_batches(loaders[0], self.batches)]
            _auto_add_worker_init_fn(combined.flattened[0], self._trainer.global_rank)

    @property
    def _store_key(self) -> str:
        return f"lightning_gossip/{self._key}/work"

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
        return {
            "plan": asdict(self.batches.plan),
            "position": asdict(position) if position else None,
            "schedules": self._state_of_schedules,
        }

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on where a checkpoint left off. Call after :meth:`begin_fit`, before the first batch."""
        if state is None or self.batches is None:
            return
        plan, theirs = asdict(self.batches.plan), state["plan"]
        self._seed = theirs["seed"]  # of loaders to come
        self.batches.plan = replace(self.batches.plan, seed=theirs["seed"])
        if {**theirs, "seed": 0} != {**plan, "seed": 0}:
            if state["position"] is not None or not self._trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
                rank_zero_warn(
                    f"The checkpoint was written with other data or batches ({theirs}, now {plan}): the epoch under way"
                    " begins anew."
                )
            self.loader.begin_again()
            self._load_schedules(state.get("schedules"))
            return
        if state["position"] is not None:
            position = EpochPosition(**state["position"])
            self.batches.resume(position)
            if isinstance(self.batches, StaticBatches) and (position.pending or position.pieces):
                align_epoch(self._trainer, self.batches.nominal_length - self.batches.resumed_share(position))
        self.loader.begin_again()  # the first iterator was made before the state was known
        self._load_schedules(state.get("schedules"))

    @property
    def _state_of_schedules(self) -> dict[str, Any] | None:
        return None if self._schedules is None else self._schedules.state(self._trainer.lr_scheduler_configs)

    def _load_schedules(self, state: dict[str, Any] | None) -> None:
        if self._schedules is not None and state is not None:
            self._schedules.load(state, self._trainer.lr_scheduler_configs)
            self._resize_epoch()
