"""How many of the members have to be there so that they may go on as the job, and nobody else may."""

from __future__ import annotations

from collections.abc import Collection

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.worker_id import WorkerId


def whole(workers: Collection[WorkerId], islands: Islands | None) -> frozenset[WorkerId]:
    """The workers whose islands are among them with all their ranks: an island trains with all of them or not at all.

    >>> [worker.initial_rank for worker in sorted(whole([WorkerId(rank, 1) for rank in (0, 1, 3)], Islands(2)))]
    [0, 1]
    """
    if islands is None:
        return frozenset(workers)
    missing = set(islands.incomplete(worker.initial_rank for worker in workers))
    return frozenset(worker for worker in workers if islands.island_of(worker.initial_rank) not in missing)


def with_mates(workers: Collection[WorkerId], members: Collection[WorkerId], islands: Islands | None) -> frozenset[WorkerId]:
    """Some workers, and those members that are in an island with a member among them.

    >>> members = [WorkerId(rank, 1) for rank in range(4)]
    >>> [worker.initial_rank for worker in sorted(with_mates([WorkerId(3, 1)], members, Islands(2)))]
    [2, 3]
    """
    if islands is None:
        return frozenset(workers)
    touched = {islands.island_of(worker.initial_rank) for worker in set(workers).intersection(members)}
    return frozenset((*workers, *(worker for worker in members if islands.island_of(worker.initial_rank) in touched)))


def has_quorum(
    present: Collection[WorkerId],
    members: Collection[WorkerId],
    ended: Collection[WorkerId],
    *,
    at_store: bool,
    least: int | None = None,
    islands: Islands | None = None,
) -> bool:
    """Whether those present may go on without the other members.

    A worker that is silent may be on the other side of a partition, and go on there; one whose process is known to have
    ended does nothing any more. So they may if

    - all are present but those whose processes have ended,
    - they are more than half of the members,
    - they are half of them, and have the job's store: the others would need more than half to open another one;
    - they are half of them, and one of the others has ended: the rest is fewer than half.

    Of any two groups that may, one has a living worker of the other, or nobody is left of the other. Where the user has said
    how many workers are enough, that many are though others are silent: two sides may both go on, if it is not more than half.

    Islands are present with all their ranks, and have ended with the first of them: what is left of one goes on nowhere.

    Args:
        present: those that are here.
        members: that all agreed on last.
        ended: workers whose processes are known to have ended.
        at_store: whether they have the job's store, and do not look for another one.
        least: how many are enough, if the user has said so.
        islands: how ranks are islands; None where each is a worker.

    >>> one, other = members = [WorkerId(0, 1), WorkerId(1, 1)]
    >>> [has_quorum([one], members, ended, at_store=store) for ended, store in (([], True), ([], False), ([other], False))]
    [True, False, True]
    >>> four = [WorkerId(rank, 1) for rank in range(4)]
    >>> [has_quorum(four[:2], four, ended, at_store=False) for ended in ([], [four[3]])]
    [False, True]
    """
    members = whole(members, islands)
    here = whole(members.intersection(present), islands)
    ended = with_mates(ended, members, islands)
    if here and here.issuperset(members.difference(ended)):
        return True
    if least is not None:
        return len(here) >= least
    half_is_enough = at_store or not here.issuperset(members.intersection(ended))
    return 2 * len(here) >= len(members) + (not half_is_enough)


def witnesses(present: int, members: int) -> int:
    """How many of those present have to know a result before one of them acts by it: of any later quorum one then knows it.

    >>> [witnesses(present, 5) for present in (5, 4, 3, 2)]
    [3, 3, 3, 2]
    """
    return min(members // 2 + 1, present)
