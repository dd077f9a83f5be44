"""Connections that others ask for, made on a thread of their own, one after the other.

Whoever asks may have failed since, and making a connection with it then takes until a deadline. The thread that reads the inbox
has no time for that: behind it wait all others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)


class Connector:
    """The thread ``gossip-connector`` of one worker; it starts with the first peer that asks.

    One lock, held for a few instructions, guards who waits.

    Args:
        connect: makes the connection with a peer, or reports that it could not; bounded by deadlines.
    """

    def __init__(self, connect: Callable[[int], None]) -> None:
        self._connect = connect
        self._waiting: dict[int, None] = {}  # peers, in the order of their requests
        self._condition = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, peer: int) -> None:
        """Connect with a peer, unless that is about to be done."""
        with self._condition:
            if self._closed:
                return
            self._waiting[peer] = None
            self._condition.notify()
            if self._thread is None:
                self._thread = new_thread("gossip-connector", self._run)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Connect with nobody any more. May be called twice.

        Args:
            timeout_s: how long to wait for the connection under way.
        """
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("%s did not end within %.3g s", thread.name, timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                peer = next(iter(self._waiting))
                del self._waiting[peer]
            self._connect(peer)
