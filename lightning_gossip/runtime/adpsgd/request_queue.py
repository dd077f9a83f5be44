"""Requests for an exchange that wait for their turn: read by the listener, answered by the responder, one after the other."""

from __future__ import annotations

import threading

from lightning_gossip.transport.messages import Message


class Requests:
    """A queue in the order of arrival, with one place a peer: a worker asks one peer at a time, so a later request replaces.

    One condition, held for a few instructions, guards it.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Message] = {}  # by peer, in order
        self._is_answering = False
        self._closed = False
        self._condition = threading.Condition()

    def ahead(self, peer: int) -> int:
        """How many exchanges come before that of a peer that asks now, the one under way included; none after :meth:`close`."""
        with self._condition:
            order = list(self._waiting)
            if self._closed:
                return 0
            return self._is_answering + (order.index(peer) if peer in order else len(order))

    def put(self, peer: int, request: Message) -> bool:
        """Wait for a turn, at the end or in the place that the peer has; False after :meth:`close`."""
        with self._condition:
            if not self._closed:
                self._waiting[peer] = request
                self._condition.notify()
            return not self._closed

    def take(self) -> tuple[int, Message] | None:
        """The next one; the one taken before has been dealt with. Waits for it; None if none waits and none will come."""
        with self._condition:
            self._is_answering = False
            self._condition.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            peer = next(iter(self._waiting))
            self._is_answering = True
            return peer, self._waiting.pop(peer)

    def close(self) -> None:
        """None is put any more; those that wait are still taken."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
