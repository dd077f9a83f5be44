"""Collectives that users, callbacks and Lightning make through the strategy, of workers that are together.

Lightning makes them on the default group, which with islands is the island's. Here they are of all workers, and where failures
are survived they are made again with those that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.islands.host_collectives import gathered_from, reduced
from lightning_gossip.runtime.process_groups import lacks_mean
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.data.exact_evaluation import equally_long
from lightning_gossip.strategies.lightning.worker_processes import WorkerProcesses

Op = ReduceOp | str | None


class UserCollectives:
    """The collectives of one strategy's workers. All of them call the same methods in the same order.

    Args:
        strategy: whose workers.
    """

    def __init__(self, strategy: WorkerProcesses) -> None:
        self._strategy = strategy

    @property
    def _workers(self) -> Workers:
        return self._strategy.all_workers

    def barrier(self) -> None:
        """Wait for all workers."""
        self._workers.gather(None, kind="a barrier")

    def broadcast(self, obj: TBroadcast, src: int) -> TBroadcast:
        """The value of one rank, on all."""
        return self._workers.broadcast(obj, src)

    def decide(self, decision: bool, *, all_have_to: bool) -> bool:
        """Whether all workers say yes, or any of them."""
        decisions = self._workers.gather(bool(decision), kind="a decision")
        return False not in decisions if all_have_to else True in decisions

    def reduce(
        self, tensor: Tensor, group: Any | None, op: Op, *, by_lightning: Callable[[Tensor, Any | None, Op], Tensor]
    ) -> Tensor:
        """The sum or mean of all workers' tensors; the argument stays as it is, if there is no group.

        Args:
            tensor: of this worker.
            group: of the user's own; None for all workers.
            op: as for Lightning.
            by_lightning: what Lightning does, on a group.
        """
        if group is not None or not isinstance(tensor, Tensor):
            return by_lightning(tensor, group, op)
        self._wait_for_all()
        if self._strategy.islands is not None:
            return self._workers.attempt(lambda: reduced(tensor, self._workers, op))
        if op in ("mean", "avg") and lacks_mean(tensor.device):
            total = self._workers.attempt(lambda: by_lightning(tensor.clone(), None, "sum"))
            return total.copy_(total / self._strategy.world_size)
        return self._workers.attempt(lambda: by_lightning(tensor.clone(), None, op))

    def all_gather(
        self,
        tensor: Tensor,
        group: Any | None,
        sync_grads: bool,
        *,
        by_lightning: Callable[[Tensor, Any | None, bool], Tensor],
    ) -> Tensor:
        """The tensors of all workers, stacked by rank; where lengths differ, the shorter ones begin again at their end.

        Args:
            tensor: of this worker.
            group: of the user's own; None for all workers.
            sync_grads: whether gradients go back to all workers.
            by_lightning: what Lightning does, on a group.

        Raises:
            ConfigurationError: for gradients through islands.
        """
        if group is not None:
            return by_lightning(tensor, group, sync_grads)
        if _distributed_is_initialized():
            tensor = equally_long(tensor, self._workers)  # a round, in which a worker that comes late is waited for
        if self._strategy.islands is not None and _distributed_is_initialized():
            if sync_grads:
                raise ConfigurationError(
                    "all_gather(sync_grads=True) goes through all islands, and a backward pass belongs to one. Gather inside"
                    " the island: torch.distributed.nn.all_gather(tensor), on the default group."
                )
            return self._workers.attempt(lambda: gathered_from(tensor, self._workers))
        if sync_grads:
            return by_lightning(tensor, None, sync_grads)
        return self._workers.attempt(lambda: by_lightning(tensor, None, sync_grads))

    def _wait_for_all(self) -> None:
        """Wait for workers that come late; then a collective is not waited for as long."""
        if self._strategy.members is not None:
            self._workers.gather(None, kind="a collective")
