"""How all workers meet: they wait for each other, form the exact mean of their models, and tell what they have done.

A Trainer's fit and a loop under Fabric meet in the same way; what they do before and afterwards differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_gossip.runtime.sync_point import Agreement, Arrival, SyncPoint
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.state.nonfinite import warn_of_mean
from lightning_gossip.strategies.state.one_model import Rest, United, compare_rest
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.worker_algorithm import Algorithm


class Meeting(NamedTuple):
    """What all workers know after they have met.

    Attributes:
        agreement: what each came for.
        told: what each has told, by rank.
        flag: whether some worker has raised the flag.
    """

    agreement: Agreement
    told: list[Any]
    flag: bool


class Parts(NamedTuple):
    """Which part of the model this rank averages: all of it, unless ranks train together in an island.

    Args:
        sync_point: the collectives of those that have the same part.
        size: how many parts there are.
        is_first: whether distances of what a whole island has count on this rank.
    """

    sync_point: SyncPoint
    size: int = 1
    is_first: bool = True


def meet(
    algorithm: Algorithm,
    model: SharedModel,
    account: Account,
    sync_point: SyncPoint,
    arrival: Arrival,
    *,
    arrived_s: float,
    tell: Callable[[], Any],
    parts: Parts | None = None,
    flag: bool = False,
    before: Callable[[Rest], None] = lambda _: None,
) -> Meeting:
    """Meet all workers: the model becomes the exact mean. Collective; made again with the others if a worker fails meanwhile.

    Args:
        algorithm: whose session ends.
        model: of the session.
        account: of this worker; it counts the wait and the distance to the mean.
        sync_point: the collectives of all workers.
        arrival: what this worker came for.
        arrived_s: when it came.
        tell: what it tells the others, asked when the mean is there.
        parts: of the model, with islands.
        flag: said to all workers.
        before: called before the mean replaces anything, with what the session does not share and differs.
    """
    own = parts or Parts(sync_point)
    algorithm.arrive()
    agreement = sync_point.agree(arrival)
    account.waited(arrived_s, algorithm)
    algorithm.settle()

    def average() -> tuple[Rest, United, float]:  # changes nothing that is needed if it has to be made again
        rest = compare_rest(model, sync_point, parts=own.sync_point, flag=flag)
        before(rest)
        distance = algorithm.average(own.sync_point)
        united = rest.unite(counts=own.is_first)
        account.own.distance = distance + united.distance
        return rest, united, own.size * sync_point.mean(account.own.distance)

    (rest, united, account.report.consensus_distance), told = sync_point.workers.attempt_and_tell(average, tell)
    algorithm.adopt()
    model.hand_round_all()
    united.write()
    if not math.isfinite(account.own.distance or 0.0):
        warn_of_mean(model.tensors)
    return Meeting(agreement, told, rest.flag)
