"""The stores that workers keep: who listens, and what their owners say there."""

from __future__ import annotations

import socket

from lightning_gossip.algorithm.membership.store import Reached
from lightning_gossip.runtime.membership.stores import Stores, address_text, locate, reach_all


def test_a_worker_that_has_left_its_own_store_as_the_jobs_still_says_there_where_it_is() -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    one.adopt(2, one.own)
    store = one.connect()
    store.set("key", "value")
    one.leave()
    one.seek(3, "127.0.0.1 2")
    one.publish(3, "127.0.0.1 2")
    assert locate(one.own) == (3, "127.0.0.1 2")


def test_one_that_listens_one_that_has_ended_and_one_that_only_accepts_are_told_apart() -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    with socket.create_server(("127.0.0.1", 0)) as ended, socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [
            one.own,
            address_text("127.0.0.1", ended.getsockname()[1]),
            address_text("127.0.0.1", mute.getsockname()[1]),
        ]
        ended.close()
        assert reach_all(addresses) == [Reached.OPEN, Reached.REFUSED, Reached.SILENT]
    assert reach_all([]) == []
