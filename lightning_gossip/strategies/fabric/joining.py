"""Workers that come later under Fabric, or come back: what they get of the user's loop, and of the training under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.wrappers import _unwrap_objects
from torch import nn
from torch.optim import Optimizer

from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.elastic.admission import Admission
from lightning_gossip.strategies.state.shared_tensors import SharedModel, fingerprint, start_equal


class Snapshot(NamedTuple):
    """Where a training stands: plain values.

    Args:
        key: of the training in the store.
        epoch: of the user's loop, that begins.
        passes: loops over loaders that have ended.
        steps: that the members have made.
        loaders: that were set up.
        assignments: how often the batches of each loader were assigned, by the loader's number.
    """

    key: str
    epoch: int
    passes: int
    steps: int
    loaders: int
    assignments: dict[int, int]


class Joined(Protocol):
    """A training that is joined."""

    def snapshot(self) -> Snapshot:
        """Where it stands."""

    def apply(self, snapshot: Snapshot) -> None:
        """Stand there."""


class Joining:
    """Admits workers to a training, or lets this one be admitted.

    Args:
        strategy: whose workers.
        training: of this worker.
        about: tells what its data are.
        modules: that were set up.
        model: what of them is shared.
    """

    def __init__(
        self,
        strategy: DecentralizedStrategy,
        training: Joined,
        *,
        about: Callable[[], str],
        modules: nn.ModuleList,
        model: SharedModel,
    ) -> None:
        self._strategy = strategy
        self._training = training
        self._modules = modules
        self._others = nn.ModuleList()  # of the user's state, that were not set up
        self._admission = Admission(
            strategy,
            model,
            about=lambda: f"model {fingerprint(modules):x}, data {about()}",
            start_equal=lambda: start_equal(nn.ModuleList([self._modules, self._others]), strategy.all_workers),
            optimizers=lambda: strategy._optimizers,
        )

    def admit(self, members: Membership, state: dict[str, Any]) -> None:
        """Take in the workers that wait. All members call it.

        Args:
            members: of the job.
            state: of the user's, that they get too.
        """
        self._look(state)
        self._admission.admit(members, lambda: (self._training.snapshot(), dict(self._values(state))))

    def join(self, members: Membership, state: dict[str, Any]) -> None:
        """Wait to be taken in.

        Args:
            members: of the job.
            state: of the user's, to be put where the others' is.
        """
        self._look(state)

        def apply(both: tuple[Snapshot, dict[str, Any]]) -> None:
            snapshot, values = both
            self._training.apply(snapshot)
            mine = _unwrap_objects(state)
            for name, value in values.items():
                if isinstance(mine.get(name), _Stateful):
                    mine[name].load_state_dict(value)
                else:
                    state[name] = value

        self._admission.join(members, apply)

    def _look(self, state: dict[str, Any]) -> None:
        """Find the modules of the user's state that were not set up, as an average of the weights: they go the model's way."""
        known = {id(module) for module in self._modules.modules()}
        modules = [value for value in _unwrap_objects(state).values() if isinstance(value, nn.Module)]
        self._others = nn.ModuleList(module for module in modules if id(module) not in known)

    def _values(self, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in _unwrap_objects(state).items():
            if isinstance(value, nn.Module) or (isinstance(value, Optimizer) and value in self._strategy._optimizers):
                continue
            yield name, value.state_dict() if isinstance(value, _Stateful) else value
