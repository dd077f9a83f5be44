"""What a worker does between two rendezvous: the one thing in which the strategies differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from lightning_gossip.runtime.rendezvous import Rendezvous
from lightning_gossip.strategies.reports import WorkerReport


class Algorithm(ABC):
    """One worker's part of a decentralized algorithm during one fit of two workers or more.

    The calls come from the training thread in this order: ``start``, then per session ``open``, ``step`` …, ``settle``,
    ``average``, and at the end ``close``. Collectives are allowed in ``start`` and ``average`` only; there all workers are
    together.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin the fit: make groups, start threads."""

    @abstractmethod
    def open(self, model: nn.Module) -> None:
        """This worker begins to train after a rendezvous (or the start)."""

    @abstractmethod
    def step(self, *, forward_passes: int, step_s: float | None) -> None:
        """This worker's optimizers have stepped.

        Args:
            forward_passes: since the last step (gradient accumulation).
            step_s: this worker's time a step in seconds, if known.
        """

    @abstractmethod
    def settle(self) -> None:
        """All workers have arrived: nothing changes this worker's model any more until it is averaged or opened again."""

    @abstractmethod
    def average(self, meeting: Rendezvous) -> float:
        """Leave the exact mean of all models in this worker's.

        Returns:
            This worker's squared distance to the mean before, ‖x_i − x̄‖².
        """

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """End what ``start`` began; may be called twice, or without it.

        Args:
            together: all workers do so; otherwise (after a failure) this one alone, and it must not wait for the others.
        """

    @abstractmethod
    def shared(self) -> list[Tensor]:
        """The tensors that the open session averages."""

    @abstractmethod
    def call_meeting(self) -> None:
        """Ask the other workers to come to a rendezvous after their current step."""

    @abstractmethod
    def meeting_called(self) -> bool:
        """Whether another worker has asked for one in this session."""

    @abstractmethod
    def complete(self, report: WorkerReport) -> None:
        """Add what the algorithm counts to this worker's account."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This worker's state, plain values for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of the same rank."""
