"""What a checkpoint of Fabric's holds beside the user's own: the means of optimizer states, and where the training stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning.fabric.utilities import rank_zero_warn

from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.batch_samplers import EpochPosition
from lightning_gossip.strategies.lightning.loop_progress import mean_step
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.worker_algorithm import Algorithm

KEY = "lightning_gossip_fabric"  # in the file, beside the user's


@dataclass(frozen=True)
class Position:
    """Where a loop over a loader was when all met in its middle.

    Args:
        loader: its number.
        plan: of its epoch.
        left: the batches that nobody has trained on.
    """

    loader: int
    plan: EpochPlan
    left: EpochPosition


@dataclass(frozen=True)
class Standing:
    """Where a training stands, for whoever goes on from a checkpoint.

    Args:
        epoch: of the user's loop, to go on with.
        passes: loops over loaders that have ended.
        steps: that a worker has made on average.
        position: in the middle of a loop over a loader; None between two, or where the batches are the user's own.
        trained: names of the parameters that are known to be trained.
    """

    epoch: int
    passes: int
    steps: int
    position: Position | None
    trained: list[str]


def mean_optimizers(strategy: DecentralizedStrategy, places: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """The states of these optimizers of the strategy's, averaged, on rank 0, by the optimizers' identities. Collective."""
    if strategy.workers == 1:
        return {}
    device, workers = strategy.collectives_device, strategy.all_workers
    optimizers = [strategy._optimizers[place] for place in places]
    return {
        id(one): checkpoint_contents.mean_optimizer_state(one.state_dict(), device, workers, keeps=lambda: strategy.writes)
        for one in optimizers
    }


def described(
    strategy: DecentralizedStrategy, standing: Standing, algorithm: Algorithm | None, tensors: dict[str, Any]
) -> dict[str, Any]:
    """A standing as plain values, with each worker's algorithm, on rank 0. Collective.

    Args:
        strategy: whose workers.
        standing: of this worker; the same on all, but for the steps.
        algorithm: of this worker.
        tensors: of the algorithm's state, one for all workers.
    """
    mine = (standing.steps, {} if algorithm is None else algorithm.state_dict())
    everyones = strategy.all_workers.gather_for(0, mine, kind="where the training stands") or [mine]
    return {
        **asdict(replace(standing, steps=mean_step([steps for steps, _ in everyones]))),
        "strategy": strategy.name,
        "world_size": strategy.world_size,
        "workers": [state for _, state in everyones],
        "tensors": tensors,
    }


class Restored:
    """Where the training stands that this one goes on from.

    Args:
        state: what :func:`described` has made.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        position = state["position"]
        if position is not None:
            position = Position(position["loader"], EpochPlan(**position["plan"]), EpochPosition(**position["left"]))
        self.standing = Standing(state["epoch"], state["passes"], state["steps"], position, state["trained"])

    def load_algorithm(self, algorithm: Algorithm, strategy: DecentralizedStrategy) -> None:
        """Put back what the algorithm had, as far as it fits the present workers."""
        state = self._state
        if state["strategy"] != strategy.name:
            rank_zero_warn(
                f"The checkpoint was written by the strategy {state['strategy']!r} and is loaded by {strategy.name!r},"
                " whose own state begins anew."
            )
            return
        algorithm.load_tensors(state["tensors"])
        if state["world_size"] == strategy.world_size and state["workers"][strategy.global_rank]:
            algorithm.load_state_dict(state["workers"][strategy.global_rank])

    def position_in(self, loader: int, plan: EpochPlan) -> EpochPosition | None:
        """The batches that are left of the loop over a loader that was under way; None if it was another loop.

        Args:
            loader: its number.
            plan: of its epoch now.
        """
        position = self.standing.position
        if position is None or position.loader != loader:
            return None
        if position.plan != plan:
            rank_zero_warn(
                f"The checkpoint was written with other data or batches ({position.plan}, now {plan}): the epoch under way"
                " begins anew."
            )
            return None
        return position.left
