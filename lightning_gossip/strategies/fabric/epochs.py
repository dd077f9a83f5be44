"""The user's loop over epochs: where one begins, workers that come later, or come back, are taken in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.wrappers import _unwrap_objects
from torch import nn
from torch.optim import Optimizer

from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.elastic.admission import Admission
from lightning_gossip.strategies.fabric.work import LoopWork
from lightning_gossip.strategies.state.shared_tensors import SharedModel, start_equal

LOOP = "for epoch in fabric.strategy.epochs_left(EPOCHS, state)"  # how a script says where its epochs begin


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


class UserEpochs:
    """The epochs of the user's loop, as far as it says where they begin (``epochs_left``).

    Args:
        strategy: whose workers.
        work: this worker's batches.
        account: its counts.
        modules: that were set up.
        model: what of them is shared.

    Attributes:
        epoch: under way; None where the script does not say.
    """

    def __init__(
        self, strategy: DecentralizedStrategy, work: LoopWork, account: Account, *, modules: nn.ModuleList, model: SharedModel
    ) -> None:
        self.epoch: int | None = None
        self._strategy = strategy
        self._work = work
        self._account = account
        self._modules = modules
        self._others = nn.ModuleList()  # of the user's state, that were not set up
        self._admission = Admission(
            strategy,
            model,
            about=lambda: f"model {model.fingerprint():x}, data {work.about}",
            start_equal=lambda: start_equal(nn.ModuleList([self._modules, self._others]), strategy.all_workers),
            optimizers=lambda: strategy._optimizers,
        )

    def begin(self, epoch: int, state: dict[str, Any]) -> bool:
        """Begin an epoch: take in the workers that wait, or wait to be taken in. All workers call it.

        Args:
            epoch: that would be the next one; who is taken in goes on with that of the others.
            state: of the user's: what a worker that is taken in gets beside the model and the optimizers' states.

        Returns:
            Whether this worker was taken in.
        """
        members, is_first = self._strategy.members, self.epoch is None
        self.epoch, self._work.passes_in_epoch = epoch, 0
        if members is None:
            return False
        if members.outside:
            self._join(members, state)
            return True
        if is_first:
            members.open_admission()
        else:
            self._admit(members, state)
        return False

    def end(self) -> None:
        """End the loop: nobody is taken in any more."""
        if self._strategy.members is not None:
            self._strategy.members.close_admission()

    def _admit(self, members: Membership, state: dict[str, Any]) -> None:
        self._look(state)
        self._admission.admit(members, lambda: (self._take_snapshot(), dict(self._values(state))))

    def _join(self, members: Membership, state: dict[str, Any]) -> None:
        self._look(state)

        def apply(both: tuple[Snapshot, dict[str, Any]]) -> None:
            snapshot, values = both
            self.epoch, self._account.steps = snapshot.epoch, snapshot.steps
            self._work.follow(snapshot.key, snapshot.passes, snapshot.loaders, snapshot.assignments)
            mine = _unwrap_objects(state)
            for name, value in values.items():
                if isinstance(mine.get(name), _Stateful):
                    mine[name].load_state_dict(value)
                else:
                    state[name] = value

        self._admission.join(members, apply)

    def _take_snapshot(self) -> Snapshot:
        work = self._work
        assert self.epoch is not None
        return Snapshot(work.key, self.epoch, work.passes, self._account.steps, work.loaders, work.assignments())

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
