"""How many of the members have to be there so that they may go on as the job, and nobody else may."""

from __future__ import annotations

from collections.abc import Collection

from lightning_gossip.algorithm.membership.worker_id import WorkerId


def has_quorum(
    present: Collection[WorkerId],
    members: Collection[WorkerId],
    ended: Collection[WorkerId],
    *,
    at_store: bool,
    least: int | None = None,
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

    Args:
        present: those that are here.
        members: that all agreed on last.
        ended: workers whose processes are known to have ended.
        at_store: whether they have the job's store, and do not look for another one.
        least: how many are enough, if the user has said so.

    >>> one, other = members = [WorkerId(0, 1), WorkerId(1, 1)]
    >>> [has_quorum([one], members, ended, at_store=store) for ended, store in (([], True), ([], False), ([other], False))]
    [True, False, True]
    >>> four = [WorkerId(rank, 1) for rank in range(4)]
    >>> [has_quorum(four[:2], four, ended, at_store=False) for ended in ([], [four[3]])]
    [False, True]
    """
    here = set(members).intersection(present)
    if here and here.issuperset(set(members).difference(ended)):
        return True
    if least is not None:
        return len(here) >= least
    half_is_enough = at_store or not here.issuperset(set(members).intersection(ended))
    return 2 * len(here) >= len(members) + (not half_is_enough)


def witnesses(present: int, members: int) -> int:
    """How many of those present have to know a result before one of them acts by it: of any later quorum one then knows it.

    >>> [witnesses(present, 5) for present in (5, 4, 3, 2)]
    [3, 3, 3, 2]
    """
    return min(members // 2 + 1, present)
