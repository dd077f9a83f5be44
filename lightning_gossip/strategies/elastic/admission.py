"""Workers that come later, or come back, are taken into a training that has begun: by the members, and by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.strategies.elastic import state_transfer
from lightning_gossip.strategies.elastic.optimizer_transfer import copy_optimizers
from lightning_gossip.strategies.lightning.fault_tolerance import Survival
from lightning_gossip.strategies.lightning.worker_processes import WorkerProcesses
from lightning_gossip.strategies.state.shared_tensors import SharedModel


class Admission:
    """Admits workers, or lets this one be admitted. All members call :meth:`admit` at the same points, where they are together.

    Args:
        strategy: whose workers they are.
        model: of this worker.
        about: tells this worker's model and data, which must be equal on a joiner.
        start_equal: copies rank 0's model to all. Collective.
        optimizers: tells this worker's optimizers.
    """

    def __init__(
        self,
        strategy: WorkerProcesses,
        model: SharedModel,
        *,
        about: Callable[[], str],
        start_equal: Callable[[], None],
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._about = about
        self._start_equal = start_equal
        self._optimizers = optimizers

    def admit(self, members: Membership, take_snapshot: Callable[[], Any]) -> None:
        """Admit the workers that wait, as many as there may be; nothing if there are none.

        Args:
            members: of the job.
            take_snapshot: makes the state of the training that they get. Rank 0's counts.
        """
        free = self._survival.most(self._strategy.workers) - len(members.members)
        joiners = self._fitting(members)[: max(0, free)]
        if joiners:
            snapshot = members.broadcast((take_snapshot(), state_transfer.hyperparameters(self._optimizers())))
            members.admit(joiners, snapshot)
            self._share_state(members, receives=False)

    def join(self, members: Membership, apply: Callable[[Any], None]) -> None:
        """Wait until the others admit this worker, at the beginning of an epoch of theirs.

        Args:
            members: of the job.
            apply: puts this worker into the state that a snapshot says. Called again if it is excluded before it has all.
        """
        while members.outside:
            snapshot, groups = members.join(members.timeout_s, self._about())
            apply(snapshot)
            state_transfer.set_hyperparameters(self._optimizers(), groups)
            self._share_state(members, receives=True)

    def _fitting(self, members: Membership) -> list[WorkerId]:
        """The waiting workers that fit; rank 0, whose list counts, refuses the others, which would end the job as members."""
        fit = []
        about = self._about()
        for worker, theirs in members.waiting(self._initial_ranks).items():
            if theirs == about:
                fit.append(worker)
            elif members.rank == 0:
                members.refuse(
                    worker,
                    f"Rank {worker.initial_rank} came later with another model, data or batches ({theirs}) than the others"
                    f" ({about}), who go on without it. Start it with the same command.",
                )
        islands = self._strategy.islands
        if islands is None:
            return fit
        missing = islands.incomplete(worker.initial_rank for worker in fit)  # these wait for the rest of their island
        return sorted(worker for worker in fit if islands.island_of(worker.initial_rank) not in missing)

    def _share_state(self, members: Membership, *, receives: bool) -> None:
        """Send joiners the mean model, and by option an optimizer state, of rank 0, which is never a joiner; all take part."""
        self._start_equal()
        self._model.agree(members)
        if receives:
            members.check_admitters()
        if self._survival.joiner_optimizer == "copy":
            copy_optimizers(
                self._optimizers(),
                members,
                receives=receives,
                device=self._strategy.collectives_device,
                group=lambda: self._strategy.group_of_part,
            )

    @property
    def _survival(self) -> Survival:
        assert self._strategy.survival is not None
        return self._strategy.survival.of_ranks(self._strategy.islands)

    @property
    def _initial_ranks(self) -> range:
        """Ranks that a worker may have been started with."""
        return range(self._survival.most(self._strategy.workers))
