"""Workers as processes, connected by Gloo's point-to-point operations on groups of their own.

Two groups, because a time-out on any operation closes every connection of its Gloo group: *control* carries the inbox,
whose listener waits without a deadline, and *data* carries replies and vectors, which have one. Neither shares anything
with the default group, on which the training thread runs its collectives, so the two never wait for each other.

Gloo drops a send whose Work object is freed before the peer has received it. So posting to an inbox does not wait, and keeps
the object: until the reply for a request, until close for STOP and sync requests.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_gossip.errors import ProtocolError
from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.messages import REPLY, WORDS, Kind, Message
from lightning_gossip.transport.peer_errors import peer_errors

log = logging.getLogger(__name__)

FOREVER = timedelta(days=3650)  # the listener ends by a message, never by a time-out
_REQUEST, _REPLY, _VECTOR = 1, 2, 3  # tags
RUN_BITS = 63
SHORTEST_S = 0.001  # to Gloo 0 is no deadline at all
GROUP_S = 20.0  # to make a group of workers that have just met: milliseconds, if nobody fails meanwhile
_FLUSH_S = 10.0  # for the peers' listeners to read the last messages when all close together


class GlooTransport(Transport):
    """One process's end. Creating it is collective: every rank of the default group does so, in the same order.

    Args:
        timeout_s: deadline of a reply and of one vector, in seconds.
        listens: whether anybody posts a message; without it there is one group.
    """

    def __init__(self, timeout_s: float, *, listens: bool = True) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout_s = timeout_s
        self._control: dist.ProcessGroup | None = new_group(timeout_s) if listens else None
        self._data: dist.ProcessGroup | None = new_group(timeout_s)
        run = torch.tensor([secrets.randbits(RUN_BITS)], device="cpu")
        with peer_errors("setup", 0):
            dist.broadcast(run, src=0, group=self._data)
        self.run = int(run)
        self._requests: dict[int, list[tuple[dist.Work, Tensor]]] = {}  # by peer: read in order, so a reply frees all before it
        self._others: list[tuple[Kind, dist.Work, Tensor]] = []  # a few in a run: sync requests, stop

    def post(self, peer: int, message: Message) -> None:
        words = torch.tensor(message.words(self.run), dtype=torch.int64, device="cpu")
        with peer_errors("message", peer):
            work = _started(dist.isend(words, dst=peer, group=_open(self._control), tag=_REQUEST))
        if message.kind in (Kind.SYNC, Kind.STOP, Kind.FAILED):
            self._others.append((message.kind, work, words))
        else:
            self._requests.setdefault(peer, []).append((work, words))

    def next_message(self) -> tuple[int, Message]:
        while True:
            words = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
            work = _started(dist.irecv(words, group=_open(self._control), tag=_REQUEST))
            work.wait(FOREVER)
            sender = int(work._source_rank())
            message = self.admit(sender, words.tolist())
            if message is not None:
                return sender, message

    def reply(self, peer: int, message: Message) -> None:
        words = torch.tensor(message.words(self.run), dtype=torch.int64, device="cpu")
        with peer_errors("reply", peer):
            sending = _started(dist.isend(words, dst=peer, group=_open(self._data), tag=_REPLY))
            sending.wait(timedelta(seconds=self._timeout_s))

    def await_reply(self, peer: int, timeout_s: float) -> Message:
        message, end_s = None, time.monotonic() + timeout_s
        while message is None:
            words = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
            with peer_errors("reply", peer):
                receiving = _started(dist.irecv(words, src=peer, group=_open(self._data), tag=_REPLY))
                receiving.wait(timedelta(seconds=max(SHORTEST_S, end_s - time.monotonic())))
            message = self.admit(peer, words.tolist(), REPLY)
        self._requests.pop(peer, None)
        return message

    def send(self, peer: int, vector: Tensor) -> Pending:
        errors = partial(peer_errors, "exchange", peer)
        with errors():
            return Transfer(_started(dist.isend(vector, dst=peer, group=_open(self._data), tag=_VECTOR)), errors)

    def receive(self, peer: int, vector: Tensor) -> Pending:
        errors = partial(peer_errors, "exchange", peer)
        with errors():
            return Transfer(_started(dist.irecv(vector, src=peer, group=_open(self._data), tag=_VECTOR)), errors)

    def close(self) -> None:
        """Destroy both groups, once the peers have read this worker's STOP and FAILED messages.

        A listener still blocked on a group keeps it alive until its STOP arrives.
        """
        flush(self._others, self.rank)
        self._requests.clear()
        self._others.clear()
        for group in (self._control, self._data):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._control = self._data = None


def flush(posted: list[tuple[Kind, dist.Work, Tensor]], rank: int) -> None:
    """Wait until the peers have read that this worker has ended, a few seconds at most."""
    for kind, work, _ in posted:
        if kind in (Kind.STOP, Kind.FAILED):
            try:
                work.wait(timedelta(seconds=_FLUSH_S))
            except RuntimeError:
                log.warning(
                    "rank %d: another worker has not read that this one has ended; it will find the connection closed", rank
                )


@dataclass
class Transfer(Pending):
    """A vector being sent or received.

    Args:
        work: torch's.
        errors: makes PeerErrors of those of a wait.
    """

    work: dist.Work
    errors: Callable[[], AbstractContextManager[None]]

    @override
    def wait(self, timeout_s: float) -> None:
        with self.errors():
            self.work.wait(timedelta(seconds=timeout_s))


def new_group(timeout_s: float, *, backend: str | None = "gloo") -> dist.ProcessGroup:
    """A group of all workers, which have just met: one that fails now is waited for :data:`GROUP_S` at most. Collective.

    Args:
        timeout_s: deadline of its operations, in seconds, where they have none of their own.
        backend: of torch.distributed; that of the default group if None.
    """
    with peer_errors("connecting"):
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=min(GROUP_S, timeout_s)))
    if not isinstance(group, dist.ProcessGroup):
        raise ProtocolError("This process is not a member of the group that it has just created.")
    set_timeout(timeout_s, group)
    return group


def host_group(store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """A group for tensors in host memory that torch.distributed does not know of. Collective.

    It is no subgroup of the default group and outlives that; nobody destroys it but who drops the last reference, which has to
    happen before the interpreter ends. The functions of torch.distributed take it as ``group``, with ``group_src`` for ``src``.

    Args:
        store: with keys for this group alone.
        rank: of this process in it.
        size: number of its processes.
        timeout_s: deadline of its operations, in seconds.
    """
    with peer_errors("connecting"):
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=min(GROUP_S, timeout_s)))
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    set_timeout(timeout_s, group)
    return group


def set_timeout(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of a group, the default group if None; torch's function has become public in 2.13 or so."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=timeout_s), group)
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _open(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group; never None, which torch.distributed takes for the default group."""
    if group is None:
        raise ProtocolError("The transport is used after it was closed.")
    return group


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ProtocolError("This process is not a member of the group that it talks on.")
    return work
