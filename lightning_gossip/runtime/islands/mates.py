"""How the ranks of an island that comes back find each other: each is started by itself, and perhaps more than once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.monitor import replaced
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.clock import Deadline
from lightning_gossip.runtime.store_client import look_up

log = logging.getLogger(__name__)

_LOOK_S = 0.1  # between two looks
_SAY_S = 10.0  # after which it is said for whom this rank waits


def meet_mates(
    store: Store,
    prefix: str,
    keys: str,
    islands: Islands,
    me: WorkerId,
    said: str,
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """Wait until all ranks of this island are here, in the processes that were started last. Each calls it.

    One that ends while it waits, and is started again, is another process: then all that are here meet anew, with that one.

    Args:
        store: the job's.
        prefix: of its members' keys.
        keys: prefix of this island's keys.
        islands: how ranks are islands.
        me: this rank.
        said: what one of them tells the others; nothing by all others.
        timeout_s: how long to wait, in seconds.
        check: called now and then; raises what ends this rank.

    Returns:
        The keys of these processes alone, and what that one has told.

    Raises:
        PeerError: if they do not come, or another process of this rank has.
    """
    ranks = sorted([me.initial_rank, *islands.mates(me.initial_rank)])
    deadline, say, has_said = Deadline.after(timeout_s), Deadline.after(_SAY_S), False
    before: list[int] = []
    place, here = "", store
    while True:
        counts = [int(look_up(store, f"{prefix}/incarnation/{rank}") or 0) for rank in ranks]
        if counts[ranks.index(me.initial_rank)] != me.incarnation:
            raise replaced(me)
        if counts != before:
            before, place = counts, f"{keys}/{'-'.join(map(str, counts))}"
            here = PrefixStore(place, store)
            if said:
                here.set("said", said)
            if here.add("here", 1) == islands.size:
                here.set("all", "")
        if here.check(["all"]):
            return place, (look_up(here, "said") or b"").decode()
        check()
        mates = ", ".join(map(str, islands.mates(me.initial_rank)))
        if not has_said and not say.left_s:
            has_said = True
            log.warning(
                "%s: waits for the others of its island (rank %s), which comes back whole: start each.", me.spoken, mates
            )
        if not deadline.left_s:
            raise PeerError(
                f"Rank {me.initial_rank} has waited {timeout_s:.3g} s for the others of its island (rank {mates}). An island"
                " comes back whole: start all its ranks again.",
                rank=me.initial_rank,
                phase="join",
                seconds=timeout_s,
            )
        time.sleep(_LOOK_S)
