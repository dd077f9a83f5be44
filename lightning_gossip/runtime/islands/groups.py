"""The process groups of a rank whose default group is its island's (decisions/028).

| group | of | made by |
|---|---|---|
| the default group | the island: what DDP, FSDP, device meshes and a user's code see | :meth:`IslandGroups.make_island`, once |
| ``everyone`` | all ranks of the job | :meth:`IslandGroups.make`, anew when members change |
| ``peers`` | the ranks of this index, one an island | the same |
| ``mates`` | the island, for our own words: in host memory, and never between DDP's collectives | with the first |

torch.distributed knows the default group only. So another island's end touches nothing that DDP or a user holds, and what is
made anew after it is ours alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from typing_extensions import override

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.runtime.membership.stores import address_text, serve
from lightning_gossip.runtime.process_groups import MemberGroups
from lightning_gossip.transport.gloo_group import host_group


class IslandGroups(MemberGroups):
    """The groups of one rank.

    Args:
        islands: how ranks are islands.
        rank: that this process was started with.
        timeout_s: of the collectives of our own groups, in seconds.

    Attributes:
        members: told by the owner: the ranks that the present members were started with, in the order of their present ranks.
    """

    def __init__(self, islands: Islands, rank: int, timeout_s: float) -> None:
        self.islands = islands
        self.place = islands.place(rank)
        self.members: Callable[[], Sequence[int]] = tuple
        self._rank = rank
        self._timeout_s = timeout_s
        self._everyone: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None
        self._mates: dist.ProcessGroup | None = None
        self._store: Store | None = None  # that the groups between islands were made with
        self._island_store: Store | None = None  # that the island's were made with
        self._served: TCPStore | None = None  # by the first rank of the island
        self._further = 0  # groups, so far

    def make(self, store: Store, rank: int, world_size: int) -> None:
        """Make the groups between islands. Collective.

        Args:
            store: with keys for these groups alone.
            rank: of this process among the members.
            world_size: how many members there are.
        """
        self.drop()
        index = self.place.index
        peers = [theirs for theirs in self.members() if self.islands.place(theirs).index == index]
        self._everyone = host_group(PrefixStore("everyone", store), rank, world_size, self._timeout_s)
        self._peers = host_group(PrefixStore(f"peers/{index}", store), peers.index(self._rank), len(peers), self._timeout_s)
        self._store = store

    def further(self, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Another group of the peers and one of all ranks, for an algorithm's own collectives. Collective.

        Args:
            timeout_s: of their collectives, in seconds.
        """
        if self._store is None:
            raise dist.DistBackendError("The process groups of the islands are not made.")
        self._further += 1
        store, everyone, peers = PrefixStore(f"further/{self._further}", self._store), self._made(self._everyone), self.peers
        mine = PrefixStore(f"peers/{self.place.index}", store)
        return (
            host_group(mine, peers.rank(), peers.size(), timeout_s),
            host_group(PrefixStore("everyone", store), everyone.rank(), everyone.size(), timeout_s),
        )

    def make_island(self, store: Store, make: Callable[[Store, int, int], None]) -> None:
        """Make the island's groups, the default group among them, in place of those before. Collective in the island.

        Args:
            store: with keys for this island alone; it lives as long as the island.
            make: makes the default group.
        """
        self._mates, self._island_store = None, store
        if dist.is_initialized():
            dist.destroy_process_group()
        index, size = self.place.index, self.islands.size
        make(PrefixStore("default", store), index, size)
        self._mates = host_group(PrefixStore("mates", store), index, size, self._timeout_s)

    def serve_island(self, host: str, interface: str | None) -> str:
        """Serve a store of the island's own, on its first rank, until this process ends; returns its address.

        It is another one than the one that this worker keeps in reserve: workers that leave the job's store cut all
        connections with that.

        Args:
            host: where the mates reach this process.
            interface: on which it listens; all if None.
        """
        self._served = self._served or serve(host, interface)
        return address_text(host, self._served.port)

    @property
    def island_store(self) -> Store:
        """Where the ranks of this island tell each other something; a connection for whoever makes another one of it."""
        if self._island_store is None:
            raise dist.DistBackendError("The process groups of the island are not made.")
        return self._island_store

    @property
    @override
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(group for group in (self._everyone, self._peers) if group is not None)

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return self._made(self._everyone)

    @property
    def peers(self) -> dist.ProcessGroup:
        """The ranks of this index, in the order of their islands."""
        return self._made(self._peers)

    @property
    def mates(self) -> dist.ProcessGroup:
        """The ranks of this island, in host memory."""
        return self._made(self._mates)

    @override
    def drop(self) -> None:
        """Destroy the groups between islands; the island's stay."""
        self._everyone = self._peers = None

    def drop_all(self) -> None:
        """Destroy all groups, before the interpreter ends: one that is destroyed later ends the process by SIGABRT."""
        self.drop()
        self._mates = self._island_store = None

    def _made(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise dist.DistBackendError("The process groups of the islands are not made, or were dropped after a failure.")
        return group


class _Process:
    """What belongs to this process, as its default group does."""

    kept: tuple[str, Store, IslandGroups] | None = None  # between two Trainers


def kept(prefix: str) -> tuple[Store, IslandGroups] | None:
    """The store and the groups of an earlier Trainer of this process, if they are of the job whose keys have this prefix."""
    return _Process.kept[1:] if _Process.kept is not None and _Process.kept[0] == prefix else None


def keep(prefix: str, store: Store, groups: IslandGroups) -> None:
    """Keep them for the next Trainer of this process, where no membership does."""
    _Process.kept = prefix, store, groups
