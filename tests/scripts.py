"""Commands and scripts as a user starts them, to their end; their processes are forked (tests/warm)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
_OF_A_JOB = ("MASTER_", "WORLD_", "LOCAL_", "RANK", "GROUP_", "TORCHELASTIC", "HYDRA_FULL_ERROR")


@dataclass(frozen=True)
class Ended:
    """What a script leaves.

    Attributes:
        left: command lines of processes that have outlived it by ten seconds, and were killed.
    """

    returncode: int
    stdout: str
    stderr: str
    left: list[str]

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def start(*arguments: str, folder: Path = ROOT, python: str | None = None, **environment: str) -> subprocess.Popen[str]:
    """In a session of its own, so that what it leaves behind can be seen.

    Args:
        arguments: of Python.
        folder: where.
        python: default the one that forks.
        environment: beside that of this process.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [python or warm.python(), *arguments],
        cwd=folder,
        env={**clean, **ours, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 170.0) -> Ended:
    """Wait for its end; an AssertionError with its words and the stacks of its threads if it has none."""
    said: tuple[str, str] | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = process.communicate(timeout=timeout_s)
        late = said is None
        if late:
            os.killpg(process.pid, signal.SIGABRT)  # each process then says where its threads are
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=20)
    finally:
        _, orphans = psutil.wait_procs(_of_session(process.pid), timeout=10)
        left = [" ".join(orphan.cmdline()) for orphan in orphans if orphan.is_running()]
        for orphan in _of_session(process.pid):
            orphan.kill()
        process.kill()
        said = said or process.communicate()
    ended = Ended(process.returncode, *said, left)
    assert not late, f"{process.args!r} did not end within {timeout_s:g} s:\n{ended.output}\nLeft: {left}"
    return ended


def run(*arguments: str, timeout_s: float = 170.0, folder: Path = ROOT, **environment: str) -> Ended:
    """Both."""
    return finish(start(*arguments, folder=folder, **environment), timeout_s)


def _of_session(leader: int) -> list[psutil.Process]:
    """The processes that a script has started, and those that they have."""
    members, sessions = [], warm.sessions_of(leader)
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members
