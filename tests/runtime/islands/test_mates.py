"""The ranks of an island that comes back find each other, in whatever order and however often they are started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.islands import mates
from lightning_gossip.runtime.islands.mates import meet_mates

Met = tuple[str, str]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(mates, "_LOOK_S", 0.005)
    return dist.HashStore()


def _started(store: Store, rank: int) -> WorkerId:
    return WorkerId(rank, store.add(f"members/incarnation/{rank}", 1))


def _meet(store: Store, me: WorkerId, *, timeout_s: float = 20.0, check: Callable[[], None] = lambda: None) -> Met:
    said = f"served by {me}" if me.initial_rank == 2 else ""
    return meet_mates(store, "members", "island/1", Islands(2), me, said, timeout_s=timeout_s, check=check)


def test_all_ranks_of_an_island_get_keys_of_their_own_and_what_the_first_one_says(store: Store) -> None:
    for rank in (2, 3):
        _started(store, rank)  # that were lost
    with ThreadPoolExecutor() as threads:
        met = [threads.submit(_meet, store, _started(store, rank)) for rank in (3, 2)]
        assert [one.result() for one in met] == [("island/1/2-2", f"served by {WorkerId(2, 2)}")] * 2


def test_a_rank_that_ended_while_its_mate_waited_and_is_started_again_is_waited_for(store: Store) -> None:
    """It was counted as there, and its successor had another number than its mate: both waited until ``timeout``."""

    def end() -> None:
        raise InterruptedError

    first = _started(store, 2)
    mate = _started(store, 3)
    with ThreadPoolExecutor() as threads:
        with pytest.raises(InterruptedError):
            _meet(store, first, check=end)
        again = _started(store, 2)
        waiting: Future[Met] = threads.submit(_meet, store, mate)
        assert _meet(store, again) == waiting.result() == ("island/1/2-1", f"served by {again}")


def test_the_older_one_of_two_processes_of_a_rank_ends(store: Store) -> None:
    me = _started(store, 3)
    _started(store, 3)
    with pytest.raises(PeerError, match=r"has been started again\. This process, the older one, ends"):
        _meet(store, me)


def test_who_waits_in_vain_is_told_for_whom(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mates, "_SAY_S", 0.0)
    with pytest.raises(PeerError, match=r"waited 0\.05 s for the others of its island \(rank 3\)"):
        _meet(store, _started(store, 2), timeout_s=0.05)
    assert caplog.text.count("waits for the others of its island (rank 3)") == 1
