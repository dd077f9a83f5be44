"""Completion logs where stores are lost one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog


@dataclass
class Member:
    me: str
    generation: int = 0
    outside: bool = False


class Connection:
    """With a store; it may be cut, and the store may end."""

    def __init__(self, store: Host) -> None:
        self._host = store
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut or self._host.has_ended:
            raise dist.DistNetworkError("cut")
        return getattr(self._host.store, name)


class Host:
    """Of a store, and of all connections with it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.has_ended = False
        self.made: list[Connection] = []

    def connect(self) -> Connection:
        if self.has_ended:
            raise dist.DistNetworkError("refused")
        self.made.append(Connection(self))
        return self.made[-1]

    def cut(self) -> None:
        for connection in self.made:
            connection.is_cut = True


@dataclass
class Ended:
    """A store whose process has ended, and how often somebody tried to write to it."""

    attempts: list[str] = field(default_factory=list)

    def append(self, key: str, value: str) -> None:
        self.attempts.append(value)
        raise dist.DistNetworkError("Broken pipe")

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")

    def delete_key(self, key: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


@pytest.fixture
def first() -> Host:
    return Host()


@pytest.fixture
def second() -> Host:
    return Host()


def _logs(first: Host, second: Host) -> tuple[CompletionLog, CompletionLog]:
    """Of one that will be excluded, and of another one, in one assignment."""
    lost, left = (
        CompletionLog(first.connect(), "fit", Member(name), reserve=lambda: second.connect) for name in ("lost", "left")
    )
    for log in (lost, left):
        log.begin("0/1")
    return lost, left


def test_who_has_left_the_second_store_too_reads_there_by_another_connection(first: Host, second: Host) -> None:
    """The members go to it, and on to a third one, since it does not answer in time; that cuts what they had with it."""
    lost, left = _logs(first, second)
    lost.finished(4)
    lost.finished(7)
    first.has_ended = True
    second.cut()
    assert left.read("lost") == [4, 7]


def test_what_was_read_once_is_known_when_both_stores_have_ended(first: Host, second: Host) -> None:
    lost, left = _logs(first, second)
    lost.finished(4)
    first.has_ended = True
    assert left.read("lost") == [4]
    second.has_ended = True
    assert left.read("lost") == [4]
    left.begin("0/2")
    assert left.read("lost") == []


def test_a_batch_is_noted_without_waiting_for_another_connection(first: Host, second: Host) -> None:
    lost, left = _logs(first, second)
    second.cut()
    made = len(second.made)
    lost.finished(4)
    assert len(second.made) == made
    assert left.read("lost") == [4]  # the job's store has it


def test_a_second_store_that_has_ended_is_tried_once_in_an_assignment(first: Host) -> None:
    """Torch writes a stack of 2 kB to the log for each attempt, which would hide all else that a user should read."""
    second = Ended()
    log = CompletionLog(first.connect(), "fit", Member("me"), reserve=lambda: lambda: second)
    log.begin("0/1")
    for position in range(5):
        log.finished(position)
    assert second.attempts == ["0,"]
    assert log.read("me") == [0, 1, 2, 3, 4]
    log.begin("0/2")
    log.finished(7)
    assert second.attempts == ["0,", "7,"]


def test_one_that_does_not_answer_is_not_asked_for_each_worker(first: Host, second: Host) -> None:
    _, left = _logs(first, second)
    first.has_ended = second.has_ended = True
    asked: list[str] = []

    def refuses() -> Connection:
        asked.append("")
        raise dist.DistNetworkError("silent")

    assert left._second is not None
    left._second._connect = refuses
    assert [left.read(f"worker {number}") for number in range(5)] == [[]] * 5
    assert len(asked) == 1


def test_what_only_the_second_store_has_is_found(first: Host, second: Host) -> None:
    lost, left = _logs(first, second)
    lost.finished(3)
    first.store.delete_key("fit/finished/0/1/lost")
    assert left.read("lost") == [3]
