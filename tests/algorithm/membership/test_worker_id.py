"""What the workers of a job are called."""

from __future__ import annotations

from lightning_gossip.algorithm.membership.worker_id import WorkerId


def test_a_worker_is_called_by_its_rank_and_by_its_start_if_it_came_back() -> None:
    assert WorkerId(0, 1).spoken == "rank 0"
    assert WorkerId(3, 2).spoken == "rank 3 (second start)"
    assert WorkerId(3, 7).spoken == "rank 3 (7th start)"
    assert str(WorkerId(3, 2)) == "3.2"  # the store's keys hold it
