"""The list of an island's claims: its first rank writes it, its mates follow."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_gossip.runtime.work_sharing.island_claims import ClaimList, FollowedClaims


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


def test_a_mate_that_is_closed_follows_no_more() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=20))  # its reader asks again, unless it is closed
    claims = FollowedClaims(store, "list", 4)
    claims.close()
    claims.close()
    assert list(claims) == []
