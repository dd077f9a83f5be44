"""Admission of workers that come later: how the members admit them, and how a worker outside waits for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.membership.join_requests import Grant, JoinRequests
from lightning_gossip.runtime.membership.round_store import WorkerId
from lightning_gossip.runtime.store_client import store_lost

if TYPE_CHECKING:
    from lightning_gossip.runtime.membership.membership import Membership

log = logging.getLogger(__name__)


class Admission:
    """Admission as one worker sees it, as a member or from outside.

    Args:
        members: its view of the membership.
        requests: the join protocol in the store.
    """

    def __init__(self, members: Membership, requests: JoinRequests) -> None:
        self._members = members
        self._requests = requests
        self._admitters: tuple[WorkerId, ...] = ()  # the members that have admitted this worker

    # -- as a member -------------------------------------------------------------------------------------------------

    def waiting(self, initial_ranks: Sequence[int]) -> dict[WorkerId, str]:
        """The workers that wait to be admitted, as far as is known, and what each says of its model and data."""
        requests = self._members.monitor.join_requests(initial_ranks)
        # one that was excluded asks again as a new incarnation
        return {worker: about for worker, about in requests.items() if worker not in self._members.excluded}

    def admit(self, joiners: Sequence[WorkerId], snapshot: Any) -> None:
        """Admit workers that wait, at the end of the ranks. All members call it with the same joiners and snapshot.

        Args:
            joiners: the workers to admit.
            snapshot: state of the training, for them.
        """
        members, admitters = self._members, self._members.members
        members.grow(joiners)
        grant = Grant(members.round, members.generation, admitters, tuple(joiners), members.excluded, snapshot)
        self._requests.grant(grant)
        members.make_groups()

    def refuse(self, worker: WorkerId, reason: str) -> None:
        """Tell a worker that waits that it will not be admitted."""
        self._requests.refuse(worker, reason)

    def close(self) -> None:
        """Admit nobody any more, since the job ends. All members write it down, since each may be killed before.

        A worker that is outside says that its model is its own. It does not raise: the launchers would end the others.
        """
        if not self._members.outside:
            self._requests.close()
            return
        log.error(
            "Rank %d was excluded (peer_timeout_s) and has not joined the others again before its fit ended: its model is its"
            " own. Take theirs, from their last checkpoint.",
            self._members.me.initial_rank,
        )

    def open(self) -> None:
        """Admit workers again, since another fit begins. Rank 0 writes it down."""
        if self._members.rank == 0 and not self._members.outside:
            self._requests.open()

    # -- from outside ------------------------------------------------------------------------------------------------

    def join(self, timeout_s: float, about: str = "") -> Any:
        """Wait to be admitted, as a member at the end of the ranks.

        Args:
            timeout_s: how long to wait while no member sends heartbeats. While one does there is no deadline: workers are
                admitted when an epoch begins, and an epoch lasts as long as it lasts.
            about: this worker's model and data, for the members, who decide whether they fit.

        Returns:
            The snapshot.

        Raises:
            PeerError: if nobody admits this worker.
            ConfigurationError: if it does not fit.
        """
        members = self._members
        while True:
            try:
                grant = self._requests.await_grant(members.me, about, self._look, timeout_s)
            except dist.DistError as error:
                raise store_lost() from error
            self._admitters = grant.admitters
            everybody = (*grant.admitters, *grant.joiners)
            members.take_part(everybody, generation=grant.generation, round_=grant.round, excluded=grant.excluded)
            if not members.outside:  # else it was frozen after its request, and was excluded again
                self.check_admitters()
                return grant.snapshot

    def check_admitters(self) -> None:
        """Check that an admitter is left; a joiner calls it until it has the state of the training.

        Raises:
            PeerError: if none of the members that have admitted it is left: then nobody has the model that was trained.
        """
        members = self._members
        if not members.outside and not set(self._admitters) & set(members.members):
            raise PeerError(
                f"All the workers that admitted rank {members.me.initial_rank} have failed before it had their model. Start all"
                " of the job, with a new store if it has one, from its last checkpoint.",
                rank=members.me.initial_rank,
                phase="join",
            )

    def _look(self) -> bool:
        self._members.monitor.raise_failure()
        return self._members.monitor.hears_a_member()
