"""The list of an island's claims: its first rank writes it, its mates follow."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.membership.stores import Stores, parse
from lightning_gossip.runtime.store_client import client, cut_connections
from lightning_gossip.runtime.work_sharing.island_claims import ClaimList, FollowedClaims
from lightning_gossip.transport.peer_errors import is_of_the_network


@pytest.fixture
def store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_mates_take_the_positions_in_order_until_the_end(store: dist.HashStore) -> None:
    told = ClaimList(store, "epoch0/island1")
    mates = [FollowedClaims(store, "epoch0/island1", 9) for _ in range(2)]
    for position in (4, 0, 7):
        told.tell(position)
    assert [next(mate) for mate in mates] == [4, 4]
    told.tell(None)
    told.tell(8)  # nothing comes after the end
    assert [list(mate) for mate in mates] == [[0, 7], [0, 7]]
    assert mates[0].queue.taken == 8
    assert mates[0].queue.batches == 9
    assert mates[0].queue.ledger.unstepped() == [4, 0, 7]
    with pytest.raises(StopIteration):
        next(mates[0])


def test_what_all_mates_have_read_is_deleted(store: dist.HashStore) -> None:
    told = ClaimList(store, "list")
    before = store.num_keys()
    for position in range(6):
        told.tell(position)
    told.stepped(2)
    assert store.num_keys() - before == 6  # a mate may be in the step before
    told.stepped(5)
    assert store.num_keys() - before == 3
    assert store.check(["list/3"])
    assert not store.check(["list/2"])


def test_a_mate_whose_first_rank_has_ended_takes_that_for_an_error_of_the_network() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    claims = FollowedClaims(client("127.0.0.1", served.port, timeout_s=20.0), "list", 4)
    served.set("list/0", "3")
    assert next(claims) == 3
    cut_connections("127.0.0.1", served.port)
    with pytest.raises(PeerError, match="The first rank of this island") as raised:
        next(claims)
    assert is_of_the_network(raised.value)  # so it waits for the verdict on that rank before it ends all


def test_who_leaves_the_jobs_store_where_that_is_its_own_first_ranks_keeps_its_island() -> None:
    stores, groups = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0), IslandGroups(Islands(2), 0, 5.0)
    address = groups.serve_island("127.0.0.1", None)
    assert groups.serve_island("127.0.0.1", None) == address
    told, mate = (client(*parse(address), timeout_s=20.0) for _ in range(2))
    claims = FollowedClaims(mate, "list", 4)
    stores.adopt(3, stores.own)
    stores.leave()
    ClaimList(told, "list").tell(2)
    assert next(claims) == 2
    claims.close()


def test_a_mate_that_is_closed_follows_no_more() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=20))  # its reader asks again, unless it is closed
    claims = FollowedClaims(store, "list", 4)
    ClaimList(store, "list").tell(2)
    assert next(claims) == 2
    claims.close()
    claims.close()
    assert list(claims) == []
