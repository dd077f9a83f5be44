"""Workers as processes, connected by Gloo's point-to-point operations on groups of their own.

Two groups, because a time-out on any operation closes every connection of its Gloo group: *control* carries the inbox,
whose listener waits without a deadline, and *data* carries replies and vectors, which have one. Neither shares anything
with the default group, on which the training thread runs its collectives, so the two never wait for each other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport.base import WORDS, Message, Pending, Transport

_FOREVER = timedelta(days=3650)  # the listener ends by a message, never by a time-out
_REQUEST, _REPLY, _VECTOR = 1, 2, 3  # tags


class GlooTransport(Transport):
    """One process's end. Creating it is collective: every rank of the default group does so, in the same order.

    Args:
        timeout_s: deadline of a reply and of one vector, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout_s = timeout_s
        self._control: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._data: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def post(self, peer: int, message: Message) -> None:
        self._send(message, peer, self._control, _REQUEST, "message")

    def next_message(self) -> tuple[int, Message]:
        words = torch.zeros(WORDS, dtype=torch.int64)
        work = _started(dist.irecv(words, group=self._control, tag=_REQUEST))
        work.wait(_FOREVER)
        return int(work._source_rank()), _parse(words)

    def reply(self, peer: int, message: Message) -> None:
        self._send(message, peer, self._data, _REPLY, "reply")

    def await_reply(self, peer: int, timeout_s: float) -> Message:
        words = torch.zeros(WORDS, dtype=torch.int64)
        with _PeerTrouble(peer, "reply"):
            _started(dist.irecv(words, src=peer, group=self._data, tag=_REPLY)).wait(timedelta(seconds=timeout_s))
        return _parse(words)

    def swap(self, peer: int, mine: Tensor, theirs: Tensor) -> Pending:
        with _PeerTrouble(peer, "exchange"):
            receiving = _started(dist.irecv(theirs, src=peer, group=self._data, tag=_VECTOR))
            sending = _started(dist.isend(mine, dst=peer, group=self._data, tag=_VECTOR))
        return _GlooSwap(peer, receiving, sending)

    def close(self) -> None:
        """Destroy both groups. A listener still blocked on one keeps it alive until its STOP arrives."""
        for group in (self._control, self._data):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._control = self._data = None

    def _send(self, message: Message, peer: int, group: dist.ProcessGroup | None, tag: int, phase: str) -> None:
        words = torch.tensor(message.words(), dtype=torch.int64)
        with _PeerTrouble(peer, phase):
            _started(dist.isend(words, dst=peer, group=group, tag=tag)).wait(timedelta(seconds=self._timeout_s))


@dataclass
class _GlooSwap:
    peer: int
    receiving: dist.Work
    sending: dist.Work

    def wait(self, timeout_s: float) -> None:
        with _PeerTrouble(self.peer, "exchange"):
            self.receiving.wait(timedelta(seconds=timeout_s))
            self.sending.wait(timedelta(seconds=timeout_s))


class _PeerTrouble:
    """Turns Gloo's errors, which are bare RuntimeErrors, into a PeerError that names the peer, the phase and the wait."""

    def __init__(self, peer: int, phase: str) -> None:
        self._peer = peer
        self._phase = phase
        self._start = time.monotonic()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (PeerError, ProtocolError)):
            waited = time.monotonic() - self._start
            reason = str(error).strip().splitlines()[0]
            raise PeerError(
                f"The {self._phase} with rank {self._peer} failed after {waited:.1f} s: {reason}"
                f" Rank {self._peer} has probably ended; its own log says why.",
                rank=self._peer,
                phase=self._phase,
                seconds=waited,
            ) from error


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ProtocolError("This process is not a member of the group that it talks on.")
    return work


def _parse(words: Tensor) -> Message:
    try:
        return Message.from_words([int(word) for word in words])
    except ValueError as error:
        raise ProtocolError(f"Received {error}. Do all workers run the same version of lightning_gossip?") from error
