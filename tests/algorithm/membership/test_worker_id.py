"""What the workers of a job are called."""

from __future__ import annotations

from lightning_gossip.algorithm.membership.worker_id import Span, WorkerId, spans_of, workers_of


def test_a_worker_is_called_by_its_rank_and_by_its_start_if_it_came_back() -> None:
    assert WorkerId(0, 1).spoken == "rank 0"
    assert WorkerId(3, 2).spoken == "rank 3 (second start)"
    assert WorkerId(3, 7).spoken == "rank 3 (7th start)"
    assert str(WorkerId(3, 2)) == "3.2"  # the store's keys hold it


def test_many_workers_are_few_spans_in_the_same_order() -> None:
    members = [*(WorkerId(rank, 1) for rank in range(1000) if rank not in (7, 8)), WorkerId(8, 2), WorkerId(7, 3)]
    assert workers_of(spans_of(members)) == tuple(members)
    assert spans_of(members) == (Span(0, 7, 1), Span(9, 991, 1), Span(8, 1, 2), Span(7, 1, 3))
    assert spans_of([]) == workers_of([]) == ()
