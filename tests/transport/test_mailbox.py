"""Letters come once, in order, to whom they are for, whether they or their reader wait."""

from __future__ import annotations

import threading

from torch.distributed import PrefixStore, TCPStore

from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport.mailbox import Inbox


def test_letters_come_once_and_in_order() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine = Inbox(another(store, timeout_s=1e6), "test", 0)
    letters: list[bytes] = []
    thread = threading.Thread(target=lambda: letters.extend(mine.pop() for _ in range(20)), daemon=True)
    thread.start()
    sender = PrefixStore("test", another(store))
    for number in range(20):
        Inbox.push(sender, 0, b"%d" % number)
        if number % 4 == 0:  # now and then the listener waits, now and then letters wait
            thread.join(0.02)
    thread.join(10.0)
    assert letters == [b"%d" % number for number in range(20)]


def test_a_letter_is_for_one_worker() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (Inbox(another(store, timeout_s=1e6), "test", rank) for rank in (0, 1))
    sender = PrefixStore("test", store)
    Inbox.push(sender, 1, b"for the second")
    Inbox.push(sender, 0, b"for the first")
    assert (first.pop(), second.pop()) == (b"for the first", b"for the second")
