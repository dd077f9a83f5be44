"""Every thread of the package is on the CUDA device of whoever makes it."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from lightning_gossip.transport.threads import in_background, new_thread

PACKAGE = Path(__file__).parents[2] / "lightning_gossip"


def test_a_thread_is_on_the_device_of_whoever_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, device)))
    thread = new_thread("gossip-test", lambda *args: seen.append(args), 1, 2)
    thread.start()
    thread.join()
    assert seen == [("gossip-test", 3), (1, 2)]


def test_without_cuda_no_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("a context would be made"))
    thread = new_thread("gossip-test", ran.append, 1)
    thread.start()
    thread.join()
    assert ran == [1]


def test_what_runs_in_the_background_is_known_when_it_has_ended() -> None:
    waits = threading.Event()
    future = in_background("gossip-test", lambda number: (waits.wait(10.0), threading.current_thread().name, number), 3)
    assert not future.done()
    waits.set()
    assert future.result(10.0) == (True, "gossip-test", 3)


def test_what_ends_a_background_thread_is_raised_where_its_result_is_asked_for() -> None:
    class Ended(BaseException):
        """Which no handler of errors would catch."""

    def fails() -> None:
        raise Ended

    with pytest.raises(Ended):
        in_background("gossip-test", fails).result(10.0)


def threads_made(source: str) -> int:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sum(ast.unparse(function) in ("threading.Thread", "Thread", "Timer", "threading.Timer") for function in calls)


def test_no_thread_is_made_in_another_way() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    made = {path: threads_made(source) for path, source in sources.items() if "Thread" in source or "Timer" in source}
    assert {path for path, number in made.items() if number} == {"transport/threads.py"}
