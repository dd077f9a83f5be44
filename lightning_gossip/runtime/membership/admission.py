"""Those who come later: how the members take them in, and how they wait for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.membership.join_requests import Door, Invitation
from lightning_gossip.runtime.membership.round_store import Worker
from lightning_gossip.runtime.store_client import store_lost

if TYPE_CHECKING:
    from lightning_gossip.runtime.membership.membership import Membership

log = logging.getLogger(__name__)


class Entrance:
    """One worker's, inside or outside.

    Args:
        members: its view.
        door: by which it comes in.
    """

    def __init__(self, members: Membership, door: Door) -> None:
        self._members = members
        self._door = door
        self._hosts: tuple[Worker, ...] = ()  # who took this worker in

    # -- inside ------------------------------------------------------------------------------------------------------

    def waiting(self, numbers: Sequence[int]) -> dict[Worker, str]:
        """Who waits to be taken in, as far as is known, and what each says about itself."""
        knocking = self._members.watch.knocking(numbers)
        return {worker: about for worker, about in knocking.items() if worker not in self._members.lost}  # it has a new name

    def admit(self, joiners: Sequence[Worker], news: Any) -> None:
        """Take in workers that wait, at the end of the ranks. All members call it with the same workers and news.

        Args:
            joiners: who.
            news: told to them.
        """
        members, hosts = self._members, self._members.members
        members.grow(joiners)
        self._door.invite(Invitation(members.round, members.generation, hosts, tuple(joiners), members.lost, news))
        members.make_groups()

    def refuse(self, worker: Worker, reason: str) -> None:
        """Tell a worker that waits that it will not be taken in."""
        self._door.refuse(worker, reason)

    def close(self) -> None:
        """The job ends: nobody is taken in any more. All say so, since each may be killed before.

        A worker that was left behind says that its model is its own. It does not fail: the launchers would end the others.
        """
        if not self._members.alone:
            self._door.close()
            return
        log.error(
            "Rank %d was left behind (peer_timeout_s) and has not met the others again before its fit ended: its model is"
            " its own. Take theirs, from their last checkpoint.",
            self._members.me.number,
        )

    def open(self) -> None:
        """Another fit begins. Rank 0 says so."""
        if self._members.rank == 0 and not self._members.alone:
            self._door.open()

    # -- outside -----------------------------------------------------------------------------------------------------

    def join(self, timeout_s: float, about: str = "") -> Any:
        """Wait to be taken in, as a member at the end of the ranks.

        Args:
            timeout_s: how long while no member beats. While one does there is no deadline: workers are taken in when an epoch
                begins, and an epoch lasts as long as it lasts.
            about: this worker, for those who decide whether it fits.

        Returns:
            The news.

        Raises:
            PeerError: if nobody takes this worker in.
            ConfigurationError: if it does not fit.
        """
        members = self._members
        while True:
            try:
                invitation = self._door.await_invitation(members.me, about, self._look, timeout_s)
            except dist.DistError as error:
                raise store_lost() from error
            self._hosts = invitation.hosts
            everybody = (*invitation.hosts, *invitation.joiners)
            members.take_part(everybody, generation=invitation.generation, round_=invitation.round, lost=invitation.lost)
            if not members.alone:  # else it was frozen after its knock, and the others have gone on without it
                self.check_hosts()
                return invitation.news

    def check_hosts(self) -> None:
        """To be called by those who have just come, until they have what they came for.

        Raises:
            PeerError: if none of those who took them in is left: then nobody has the model that was trained.
        """
        members = self._members
        if not members.alone and not set(self._hosts) & set(members.members):
            raise PeerError(
                f"All the workers that took rank {members.me.number} in have died before it had their model. Start all of the"
                " job, with a new store if it has one, from its last checkpoint.",
                rank=members.me.number,
                phase="join",
            )

    def _look(self) -> bool:
        self._members.watch.raise_failure()
        return self._members.watch.somebody_is_inside()
