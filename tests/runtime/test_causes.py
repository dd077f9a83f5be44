from __future__ import annotations

import socket
import sys
import time
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime import causes
from lightning_gossip.runtime.causes import Cause, kind_of, tell_once


def store() -> dist.HashStore:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=0.2))
    return found


def test_the_first_of_several_with_the_same_mistake_tells_of_it() -> None:
    shared = store()
    told = [Cause(ConfigurationError(f"Rank {rank} has no data."), shared, "fit", rank) for rank in (2, 0, 1)]
    assert [cause.is_told_here for cause in told] == [True, False, False]
    told[0].printed()
    assert told[1].await_printed()
    assert told[2].await_printed()
    assert told[1].line() == "Rank 0 has ended too; rank 2 says why. (ConfigurationError: Rank 0 has no data.)"


def test_different_mistakes_are_all_told() -> None:
    shared = store()
    assert Cause(ValueError("a"), shared, "fit", 0).is_told_here
    assert Cause(ValueError("b"), shared, "fit", 1).is_told_here
    assert Cause(KeyError("a"), shared, "fit", 2).is_told_here


def test_who_ends_since_another_has_ended_leaves_it_to_that_one() -> None:
    shared = store()
    reason = Cause(OSError("disk full"), shared, "fit", 3)
    follows = Cause(PeerError("Rank 3 has failed"), shared, "fit", 1)
    assert reason.is_told_here
    assert not follows.is_told_here
    assert "rank 3 says why" in follows.line()


def test_of_a_worker_that_was_killed_the_first_neighbour_tells() -> None:
    shared = store()
    first, second = (Cause(PeerError(f"rank {rank}: Rank 2 has ended"), shared, "fit", rank) for rank in (1, 0))
    assert first.is_told_here
    assert not second.is_told_here


def test_another_use_of_a_trainer_tells_again() -> None:
    shared = store()
    assert Cause(ValueError("a"), shared, "fit 1", 0).is_told_here
    assert Cause(ValueError("a"), shared, "fit 2", 1).is_told_here


def test_a_worker_that_writes_to_another_file_tells_all_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = store()
    assert Cause(ValueError("a"), shared, "fit", 0).is_told_here
    monkeypatch.setattr(causes, "terminal", lambda: "elsewhere")
    assert Cause(ValueError("a"), shared, "fit", 1).is_told_here


@pytest.mark.parametrize("printed", [True, False], ids=["printed", "never printed"])
def test_the_hook_prints_a_line_only_if_the_traceback_is_there(
    printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    shared, error = store(), ValueError("a")
    first = Cause(ValueError("a"), shared, "fit", 0)
    if printed:
        first.printed()
    tell_once(error, shared, "fit", 1)
    sys.excepthook(ValueError, error, None)
    assert seen == ([] if printed else [error])
    assert ("rank 0 says why" in capsys.readouterr().err) == printed
    other = ValueError("a")
    sys.excepthook(ValueError, other, None)  # of something else
    assert seen[-1] is other


def test_the_first_one_prints_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    shared, error = store(), ValueError("a")
    tell_once(error, shared, "fit", 0)
    sys.excepthook(ValueError, error, None)
    assert seen == [error]
    assert Cause(ValueError("a"), shared, "fit", 1).await_printed()


class Pruned(Exception):
    """Can be referred to weakly."""


def test_an_error_that_was_caught_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[type] = []
    monkeypatch.setattr(sys, "excepthook", print_it := lambda kind, error, traceback: before.append(kind))
    shared, kept = store(), []
    for use in range(3):
        causes.forget()
        assert sys.excepthook is print_it
        error = Pruned("a trial")
        kept.append(weakref.ref(error))
        tell_once(error, shared, f"use {use}", 0)
        tell_once(error, shared, f"use {use}", 0)  # a hook each would print it as often
        sys.excepthook(Pruned, error, None)
        assert before == [Pruned] * (use + 1)
        del error
        assert [found() for found in kept] == [None] * (use + 1)


def test_a_hook_that_others_have_wrapped_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    first, second = ValueError("a"), ValueError("b")
    tell_once(first, store(), "fit", 0)
    ours = sys.excepthook
    sys.excepthook = wraps = lambda *of: ours(*of)
    causes.forget()
    assert sys.excepthook is wraps
    tell_once(second, store(), "fit", 0)
    sys.excepthook(ValueError, second, None)
    assert seen == [second]


def test_errors_of_the_same_kind_differ_by_what_they_say() -> None:
    assert kind_of(ValueError("worker 1: 3 batches")) == kind_of(ValueError("worker 4: 3 batches"))
    assert kind_of(ValueError("worker 1: 3 batches")) != kind_of(ValueError("worker 1: 4 batches"))
    assert kind_of(ValueError("a")) != kind_of(TypeError("a"))


def test_a_store_that_ends_while_it_is_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 closes its groups, and then the store: who fails by the first may find the second."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    monkeypatch.setattr(socket, "create_connection", lambda *_: socket.socket())  # it still answered a moment ago
    monkeypatch.setattr(causes, "_CONNECT_S", 0.1)
    monkeypatch.setattr(sys, "excepthook", before := sys.excepthook)
    del server
    began_s = time.monotonic()
    tell_once(PeerError("Rank 1 has failed"), mine, "fit", 2)
    assert time.monotonic() - began_s < 4
    assert sys.excepthook is before
