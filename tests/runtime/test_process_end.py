"""What happens before the interpreter ends; that nothing of Gloo is left then is seen in tests/strategies/test_launchers.py."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_gossip.runtime import process_end
from lightning_gossip.runtime.process_end import call_at_exit, end_groups_at_exit

PACKAGE = Path(__file__).parents[2] / "lightning_gossip"


def test_threads_end_before_the_groups_they_may_use() -> None:
    ended, may_end = [], threading.Event()

    def work() -> None:
        assert may_end.wait(10)
        ended.append("thread")

    thread = threading.Thread(target=work, name="gossip-of-a-test", daemon=True)
    thread.start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end_groups_at_exit()
    call_at_exit(may_end.set)
    call_at_exit(lambda: ended.append("called" if dist.is_initialized() else "too late"))
    process_end._end()
    assert ended == ["called", "thread"]
    assert not thread.is_alive()
    assert not dist.is_initialized()


def test_a_forked_child_leaves_its_parents_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    end_groups_at_exit()
    called: list[str] = []
    call_at_exit(lambda: called.append("in the child"))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        process_end._end()
    assert called == []
    process_end._end()
    assert called == ["in the child"]


def test_all_that_outlives_a_trainer_is_listed() -> None:
    keep = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "\nclass _Process" in path.read_text()}
    listed = re.findall(r"^\| ``(.+?)`` \|", process_end.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(keep)
