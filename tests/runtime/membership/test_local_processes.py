"""What the kernel says about the processes of this machine, and what it does not say."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.membership import local_processes, store_operations
from lightning_gossip.runtime.membership.local_processes import has_ended, identity
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor


@pytest.mark.parametrize(
    ("number", "ended"),
    [(errno.EMFILE, False), (errno.ENFILE, False), (errno.EIO, False), (errno.ENOENT, True), (errno.ESRCH, True)],
)
def test_only_the_kernels_word_that_there_is_no_such_process_is_its_end(
    number: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = identity()
    assert name is not None
    read_text = Path.read_text

    def troubled(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "stat":
            raise OSError(number, os.strerror(number))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", troubled)
    assert has_ended(name) is ended


def test_a_process_without_a_file_to_spare_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity() is not None

    def troubled(path: Path, *_: Any, **__: Any) -> str:
        raise OSError(errno.EMFILE, "no file to spare")

    monkeypatch.setattr(Path, "read_text", troubled)
    assert identity() is None


def test_the_end_of_a_worker_takes_one_file_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    name, reads, read_text = identity(), [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args: reads.append(path) or read_text(path, *args))
    for _ in range(10):
        assert not has_ended(name)
    assert len(reads) == 10


def test_the_monitor_asks_the_kernel_while_its_lock_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = dist.HashStore(), WorkerId(1, 1)
    there = HeartbeatMonitor(store, "p", other, fail_after_s=60.0)
    there.observe([WorkerId(0, 1), other])
    there._drive(there.protocol.send())
    here = HeartbeatMonitor(store, "p", WorkerId(0, 1), fail_after_s=60.0)
    here.observe([WorkerId(0, 1), other])
    waited: list[bool] = []

    def slow(name: str | None) -> bool:
        asks = threading.Thread(target=here.verdict, args=(other,), daemon=True)
        asks.start()
        asks.join(2.0)
        waited.append(asks.is_alive())
        return local_processes.has_ended(name)

    monkeypatch.setattr(store_operations, "has_ended", slow)
    here._drive(here.protocol.tick())
    assert waited == [False]
