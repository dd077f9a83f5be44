"""What a decentralized strategy is to Fabric.

Translate, delegate, return: processes, groups and the algorithm are those of the Trainer's strategy, which this one holds; what
lasts while a model trains is in :class:`~lightning_gossip.strategies.fabric.training.FabricTraining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import TBroadcast, _BackwardSyncControl
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.fabric import checkpoint
from lightning_gossip.strategies.fabric.launchers import FabricMultiProcessingLauncher, FabricSubprocessLauncher
from lightning_gossip.strategies.fabric.loaders import EpochLoader
from lightning_gossip.strategies.fabric.training import FabricTraining
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.lightning.validation import check_model
from lightning_gossip.strategies.report import FitReport
from lightning_gossip.strategies.state.atomic_checkpoint_io import WritesWholeFiles
from lightning_gossip.strategies.state.shared_tensors import start_equal


class _Asked(NamedTuple):
    """A checkpoint that all workers take part in.

    Args:
        places: of the optimizers whose states are averaged for it.
        is_inside: whether all have met for it in the middle of a loop over a loader.
    """

    places: tuple[int, ...]
    is_inside: bool


class _Process:
    """What belongs to this process, as its default group does."""

    training: FabricTraining | None = None  # of the last Fabric, which a script may leave by an exception and make another one


@clear_arguments
class FabricStrategy(WritesWholeFiles, DDPStrategy):
    """A strategy of this package for ``Fabric(strategy=...)``. ``Fabric(strategy="adpsgd")`` makes one by name.

    A session begins with the first batch of a loader that Fabric has set up, and ends with its last one at the latest: then all
    workers meet, and the model is the exact mean. ``optimizer.step()`` is where a worker publishes its model and takes over
    merges. A loader that is iterated under ``torch.no_grad()`` evaluates: each sample once, and nobody trains.

    Args:
        strategy: with the options, for example ``ADPSGDStrategy(wire="int8")``.
        epochs: how many the run has, for options that are shares of the run (``dense_share``, ``AdaptivePeriod(sample=0.25)``).

    Raises:
        ConfigurationError: if it is another kind of object, or has options that need a Trainer.

    Example::

        fabric = Fabric(accelerator="cpu", devices=4, strategy=FabricStrategy(ADPSGDStrategy(topology="exponential")))
    """

    def __init__(self, strategy: DecentralizedStrategy, *, epochs: int | None = None, **options: Any) -> None:
        if options:
            name, value = next(iter(options.items()))
            raise ConfigurationError(
                f"FabricStrategy has no argument {name!r}. Options are the strategy's that it takes: write for example"
                f" FabricStrategy(ADPSGDStrategy({name}={value!r}))."
            )
        if epochs is not None:
            check_integer("epochs", epochs, example=10, otherwise=", or None if nobody knows")
        if not isinstance(strategy, DecentralizedStrategy):
            raise ConfigurationError(
                f"FabricStrategy({strategy!r}) takes a strategy of this package. Write for example"
                " FabricStrategy(ADPSGDStrategy())."
            )
        if not isinstance(strategy, ReplicatedProcesses) or strategy.island != 1:
            raise ConfigurationError(
                "Islands (island=..., sharded models) need the Trainer of lightning.pytorch. Leave them out with Fabric: there"
                " each process is a worker."
            )
        if strategy.fit_options.at_rendezvous != "adopt" or strategy.fit_options.checkpoint != "mean":
            raise ConfigurationError(
                "at_rendezvous='evaluate' and checkpoint='replicas' need the Trainer of lightning.pytorch. Leave them out with"
                " Fabric: all workers go on from the mean, and it is what a checkpoint holds."
            )
        super().__init__(start_method=strategy._start_method, process_group_backend=strategy._process_group_backend)
        self.decentralized = strategy
        self.epochs = epochs
        self._backward_sync_control = _AccumulationControl(self)
        self._training: FabricTraining | None = None
        self._mean_states: dict[int, dict[str, Any]] = {}  # of optimizers, while a checkpoint is written
        self._has_saved = False  # since the last barrier: all have heard that it is written
        self._own_call: Callable[[dict[str, Any]], None] | None = None  # the last checkpoint asked for between two batches

    # -- processes ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._delegate()
        launcher: FabricSubprocessLauncher | FabricMultiProcessingLauncher
        if self._start_method == "popen":
            launcher = FabricSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            launcher = FabricMultiProcessingLauncher(self, start_method=self._start_method)
        launcher.preflight = self.decentralized.check_processes
        survival = self.decentralized.survival
        launcher.survives = survival is not None and survival.survives
        self._launcher = launcher

    def _delegate(self) -> None:
        """Tell the strategy that is held what Fabric has found out."""
        held = self.decentralized
        held.cluster_environment, held.parallel_devices = self.cluster_environment, self.parallel_devices
        held.num_nodes = self._num_nodes

    @override
    def _setup_distributed(self) -> None:
        self._delegate()
        if _Process.training is not None:
            _Process.training.close(None)
        self.decentralized.setup_distributed()
        self._training = _Process.training = FabricTraining(
            self.decentralized, lambda asked: self._save(asked, self._own_call), epochs=lambda: self.epochs
        )
        self._training.start()

    @property
    @override
    def global_rank(self) -> int:
        return self.decentralized.global_rank if self.decentralized.members is not None else super().global_rank

    @property
    @override
    def world_size(self) -> int:
        return self.decentralized.world_size if self.decentralized.members is not None else super().world_size

    @property
    def training(self) -> FabricTraining:
        """The training of this worker.

        Raises:
            ConfigurationError: before ``fabric.launch()``.
        """
        if self._training is None:
            raise ConfigurationError("The workers have not been started yet. Call fabric.launch() first.")
        return self._training

    def leave(self, error: BaseException | None) -> None:
        """Leave the job, since this worker's process ends; by an exception, if there is one."""
        if self._training is not None:
            self._training.close(error)

    @override
    def teardown(self) -> None:
        self.leave(None)
        super().teardown()

    # -- model, optimizers, data ---------------------------------------------------------------------------------------

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        check_model(module, sync_batchnorm=False)
        self.training.add(module)
        if self.decentralized.workers > 1:
            start_equal(module, self.decentralized.all_workers)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.decentralized._optimizers.append(optimizer)
        return optimizer

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        return EpochLoader(dataloader, self.training)

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        self.training.before_backward()
        super().backward(tensor, module, *args, **kwargs)
        self.training.after_backward()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        self.training.step(optimizer)
        return output

    # -- what users see --------------------------------------------------------------------------------------------------

    @property
    def report(self) -> FitReport:
        """What each worker has done, as of the last synchronisation."""
        return self.training.account.report

    @property
    def progress(self) -> float:
        """Epochs that all workers together have trained, with :attr:`share_of_epoch`; one that was left early counts."""
        return self.training.work.progress

    @property
    def share_of_epoch(self) -> float:
        """Which share of the epoch under way all workers together have done with the batch at hand, in [0, 1]: what a schedule
        of the learning rate should follow, since fast workers make more steps than slow ones."""
        return self.training.work.share

    def epochs_left(self, epochs: int, state: dict[str, Any] | None = None) -> Iterator[int]:
        """The epochs that are left of a run, by number: for the loop over epochs, in place of ``range(epochs)``.

        It begins with 0, or with the epoch of a checkpoint that was loaded with its optimizer. Where an epoch begins, workers
        that have come later, or have come back, are taken in; such a worker waits here for the others, and goes on with their
        epoch. And it says how long the run is, for options that are shares of it (``self.epochs``).

        Args:
            epochs: of the whole run.
            state: what such a worker gets besides the models and optimizers that were set up: a dictionary as ``fabric.save``
                takes it, of schedules, counters, an average of the weights. What cannot be loaded in place is put into it.

        Example::

            state = {"model": model, "optimizer": optimizer, "schedule": schedule, "best": math.inf}
            for epoch in fabric.strategy.epochs_left(10, state):
                for batch in train:
                    ...
                schedule.step()
                fabric.save("last.ckpt", state)
        """
        check_integer("epochs", epochs, example=10)
        if state is not None and not isinstance(state, dict):
            raise ConfigurationError(
                f"epochs_left({epochs}, {state!r}): the second argument is a dictionary as fabric.save takes it. Write for"
                f" example epochs_left({epochs}, {{'model': model, 'optimizer': optimizer, 'schedule': schedule}})."
            )
        training, self.epochs = self.training, epochs
        epoch = training.first_epoch
        while epoch < epochs:
            epoch = training.begin_epoch(epoch, {} if state is None else state)
            yield epoch
            epoch = training.end_epoch()
        training.end_epochs()

    def synchronize(self) -> None:
        """Meet all workers, so that the model is the exact mean. Every worker calls it; nothing where none has trained since.

        The end of a loader does it. Call it where a loop is left before that, or iterates over something else.
        """
        self.training.end_pass()

    # -- collectives -----------------------------------------------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        has_saved, self._has_saved = self._has_saved, False
        if not has_saved and self.training.is_together("a barrier"):
            self.decentralized.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return self.decentralized.broadcast(obj, src) if self.training.is_together("a broadcast") else obj

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        return self.decentralized.reduce(tensor, group, reduce_op) if self.training.is_together("all_reduce") else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if not self.training.is_together("all_gather", warns=False):
            raise ConfigurationError(
                "all_gather between two batches needs all workers, and each is at a step of its own. Use what this worker has,"
                " or gather when the loader has ended."
            )
        return self.decentralized.all_gather(tensor, group, sync_grads)

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        known = self.decentralized._optimizers
        places = tuple(known.index(optimizer) for optimizer in optimizers if optimizer in known)
        is_inside, self._has_saved = self.training.is_inside, True

        def write(part: dict[str, Any]) -> None:
            super(FabricStrategy, self).save_checkpoint(path, {**state, **part}, storage_options, filter)

        if is_inside:
            self._own_call = write
        self.training.do_together(lambda: self._save(_Asked(places, is_inside), write), _Asked(places, is_inside))

    def _save(self, asked: _Asked, write: Callable[[dict[str, Any]], None] | None) -> None:
        """Rank 0 writes a checkpoint; if it is killed meanwhile, the next one. Collective.

        Args:
            asked: what is to be written.
            write: writes it; None where this worker has never been asked for one between two batches.
        """
        held = self.decentralized

        def collect() -> dict[str, Any]:
            self._mean_states = checkpoint.mean_optimizers(held, asked.places)
            if not asked.places:  # it is not for going on
                return {}
            standing, tensors = self.training.standing(is_inside=asked.is_inside)
            return {checkpoint.KEY: checkpoint.described(held, standing, self.training.algorithm, tensors)}

        def write_or_warn(part: dict[str, Any]) -> None:
            if write is not None:
                write(part)
            elif self.is_global_zero:
                rank_zero_warn(
                    "Rank 0 was killed while it saved a checkpoint between two batches, for which this rank was not asked yet:"
                    " that one is lost. Call fabric.save on every rank, and the next rank 0 writes it."
                )
            self._mean_states = {}

        held.all_workers.write_by_first(collect, write_or_warn)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, strict, weights_only)
        known = self.decentralized._optimizers
        if isinstance(state, dict) and any(value is optimizer for value in state.values() for optimizer in known):
            stands = rest.pop(checkpoint.KEY, None)
            if stands is not None:
                self.training.resume(stands)
        return rest

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return self._mean_states.get(id(optimizer)) or super().get_optimizer_state(optimizer)

    def __repr__(self) -> str:
        # the Trainer prints this when it refuses the object
        name = type(self.decentralized).__name__
        return f"<FabricStrategy({name}(...)), for Fabric; for the Trainer of lightning.pytorch write {name}(...)>"


class _AccumulationControl(_BackwardSyncControl):
    """``fabric.no_backward_sync``: a backward pass whose gradients are not a whole step's yet."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return self._accumulating() if enabled else nullcontext()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        training = self._strategy.training
        before, training.accumulates = training.accumulates, True
        try:
            yield
        finally:
            training.accumulates = before
