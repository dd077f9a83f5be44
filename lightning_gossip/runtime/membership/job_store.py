"""The job's store for what is not membership's own: claims of batches, notes of finished ones."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.store_client import ReportingStore, another

log = logging.getLogger(__name__)


class JobStore:
    """A connection with the job's store; its methods are those of torch's.

    Where the store may be lost they raise StoreLostError then, else a PeerError.

    Args:
        members: who knows where the store is.
        own: whether this is a connection of its own, which stays lost until :meth:`renew`; else the training thread's.
    """

    def __init__(self, members: Membership, *, own: bool) -> None:
        self._members = members
        self._moves = members.moves
        self._store = another(members.store) if own else None
        self._reporting: ReportingStore | None = None

    def renew(self) -> bool:
        """Go to the store where the members are now; whether it is another one. Call it on the training thread."""
        if self._store is None or self._moves == self._members.moves:
            return False
        try:
            self._store = another(self._members.store)
        except dist.DistError as error:
            log.info("%s: this store is lost, too: %s", self._members.me.spoken, error)
            return False
        self._moves = self._members.moves
        return True

    def __getattr__(self, name: str) -> Any:
        store = self._members.store if self._store is None else self._store
        if self._reporting is None or self._reporting.store is not store:
            self._reporting = ReportingStore(store, survives=self._members.survives_store)
        return getattr(self._reporting, name)
