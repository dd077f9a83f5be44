"""The seam between the strategies: what a worker does between two synchronisation points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.state.step_watch import largest_lr


@dataclass(frozen=True)
class Step:
    """One step of this worker's optimizers.

    Args:
        number: of the step since the fit began, from 1.
        forward_passes: that led to it (gradient accumulation).
        seconds: how long it took this worker, if all of it was seen.
        lr: the learning rate that it was made with; 0 where the algorithm does not read it.
        epoch: in which, from 0.
        progress: share of the run's steps done, in [0, 1]; None if the run's length is unknown.
    """

    number: int
    forward_passes: int
    seconds: float | None
    lr: float
    epoch: int
    progress: float | None


def lr_read_by(algorithm: Algorithm | None, optimizers: Iterable[Optimizer], *, default: float) -> float:
    """The learning rate of a step, where an algorithm reads it; else 0, and no optimizer is asked.

    Args:
        algorithm: None with a single worker.
        optimizers, default: as for :func:`~lightning_gossip.strategies.state.step_watch.largest_lr`.
    """
    return largest_lr(optimizers, default=default) if algorithm is not None and algorithm.reads_lr else 0.0


class Algorithm(ABC):
    """A decentralized algorithm on one worker, during one fit of two workers or more.

    All calls come from the training thread, in this order. Collectives on the default group are allowed where the last column
    says so, since all workers make the call together; an algorithm may have groups of its own for the others.

    | call | when | collectives |
    |---|---|---|
    | ``load_tensors``, ``load_state_dict`` | the fit goes on from a checkpoint | |
    | ``start`` | the fit begins | yes |
    | ``open`` | a session begins | |
    | ``begin_step``, ``reduce_gradients``, ``step`` | a step of this worker; ``gather`` in it, if the user does | |
    | ``sync_requested`` | after each step | |
    | ``request_sync`` | this worker wants all to meet after their current step, and arrives next | |
    | ``arrive`` | this worker has come to the synchronisation point; others may train on | |
    | ``settle`` | all workers have arrived | |
    | ``average``, ``complete`` | then; again with those that are left, if a worker fails meanwhile | in ``average`` |
    | ``adopt`` | that has worked on all; the session has ended | |
    | ``state_dict``, ``common_tensors``, ``own_tensors`` | a checkpoint is written, between sessions | in ``common_tensors`` |
    | ``begin_anew`` | between sessions: the others have given this worker their model | |
    | ``follow_members`` | between sessions: the members or their store are others than before | yes |
    | ``close`` | the fit has ended; perhaps twice, or without ``start`` | |

    Attributes:
        is_lockstep: whether all workers make their steps together, so that what a user calls on every rank at the same step is
            called by all at the same time.
        reads_lr: whether it reads the learning rate of a step; that of some optimizers is a tensor on a device, which the host
            would wait for.
        was_given: whether the last mean took the place of a model of this worker's that was of no use.
    """

    is_lockstep: ClassVar[bool] = False
    reads_lr: ClassVar[bool] = False
    was_given = False

    @property
    def waited_s(self) -> float:
        """Seconds that the training thread has waited for other workers in these calls, ``start`` and ``average`` apart."""
        return 0.0

    @property
    def lost_store(self) -> bool:
        """Whether it has lost the job's store, and waits for :meth:`follow_members`."""
        return False

    @property
    def collectives_made(self) -> int:
        """Collectives of its own, on a group of its own, so far."""
        return 0

    @abstractmethod
    def start(self) -> None:
        """Begin the fit: make groups, start threads."""

    @abstractmethod
    def open(self, model: SharedModel) -> None:
        """Begin to train after a synchronisation point (or the start).

        Args:
            model: just opened too; the same object in each session.
        """

    def begin_step(self) -> None:
        """Begin a step: its first batch has been fetched, and the forward pass comes next.

        May change the model in the first step of a session only.
        """
        return

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backward has left of a whole step; clipping and the optimizer come next."""
        return

    @abstractmethod
    def step(self, step: Step) -> None:
        """Follow a step of this worker's optimizers."""

    def gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor | None:
        """The tensors of all workers, stacked, in the middle of a step of this worker.

        Args:
            tensor: of the same shape and type on all workers.
            sync_grads: whether gradients go back to all workers.

        Returns:
            The tensors of the workers that make this step too; None where nobody can be sure that the others come to the same
            call.
        """
        return None

    def arrive(self) -> None:
        """Arrive at a synchronisation point: serve the others until they need this worker no more."""
        return

    @abstractmethod
    def settle(self) -> None:
        """Stop all that changes this worker's model, until it is averaged or opened again: all workers have arrived."""

    @abstractmethod
    def average(self, sync_point: SyncPoint) -> float:
        """Form the exact mean of all models, of the tensors that the session shares. Collective.

        Where failures are survived it may be called again, before :meth:`adopt`.

        Returns:
            This worker's squared distance to the mean before, ‖x_i − x̄‖².
        """

    def adopt(self) -> None:
        """Leave the mean in this worker's model, where :meth:`average` has not done so."""
        return

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """End what ``start`` began; may be called twice, or without it.

        Args:
            together: all workers do so; otherwise (after a failure) this one alone, and it must not wait for the others.
        """

    def follow_members(self) -> None:
        """Follow a change of the members; called between two sessions, by all members."""
        return

    @abstractmethod
    def request_sync(self) -> None:
        """Ask the other workers to come to a synchronisation point after their current step."""

    @abstractmethod
    def sync_requested(self) -> bool:
        """Whether another worker has asked for a synchronisation point in this session."""

    @abstractmethod
    def complete(self, report: WorkerReport) -> None:
        """Add what the algorithm counts to this worker's account."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This worker's state, plain values for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of the same rank. Comes before ``start``."""

    def common_tensors(self, sync_point: SyncPoint, *, adopts: bool, keeps: Callable[[], bool]) -> dict[str, Tensor]:
        """What of the algorithm's state is as large as the model, one for all workers: once in a checkpoint. Collective.

        In host memory: on a device there need not be room for a second one.

        Args:
            sync_point: the collectives.
            adopts: whether this worker goes on from what is returned, as all will that resume from it.
            keeps: whether this worker, or this rank's island, needs it; for the others nothing is returned. Asked anew when a
                worker has failed meanwhile.
        """
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        """What of this worker's own state is as large as the model, for a checkpoint of its own."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what :meth:`common_tensors` or :meth:`own_tensors` has returned; what is missing begins anew.

        Comes before ``start``.
        """
        return

    def begin_anew(self) -> None:
        """Forget what goes with the model before: this worker's has been given to it by others."""
        return
