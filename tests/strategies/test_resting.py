"""Workers that rest between two uses of a Trainer while the others go to the next store."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.jobs import DIED, job, survivors
from tests.strategies.models import Net, loader, trainer

pytestmark = pytest.mark.processes


def _await(folder: str, *names: str) -> None:
    deadline_s = time.monotonic() + 60
    while not all(Path(folder, name).exists() for name in names):
        assert time.monotonic() < deadline_s, names
        time.sleep(0.01)  # nobody tells a file's coming


def _tell_moves(folder: str, members: Any) -> None:
    while not members.moves:
        time.sleep(0.01)
    Path(folder, "went on").touch()


def _two_uses(folder: str) -> tuple[int, list[tuple[int, int]]]:
    first = trainer(strategy="adpsgd", max_epochs=1)
    first.fit(Net(), loader(160, 8))
    members, rank = first.strategy.members, first.global_rank
    Path(folder, f"{rank} rests").touch()
    if rank == 0:
        _await(folder, "1 goes on", "2 rests")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        threading.Thread(target=_tell_moves, args=(folder, members), daemon=True).start()
        Path(folder, "1 goes on").touch()
    else:
        _await(folder, "went on")  # without a thread that could notice anything
    second = trainer(strategy="adpsgd", max_epochs=1)
    second.fit(Net(), loader(160, 8))
    members = second.strategy.members
    return members.moves, [tuple(worker) for worker in members.members]


def test_others_register_at_the_next_store_for_a_worker_that_rests(tmp_path: Path) -> None:
    with job(_two_uses, str(tmp_path), workers=3) as running:
        running.start_all()
        outcomes = running.outcomes(120)
    assert dict(outcomes)[0] == DIED
    assert survivors(outcomes) == [(1, [(1, 1), (2, 1)])] * 2  # under its first identity
