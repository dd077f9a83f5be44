"""The one server of this process, started with the first use; forked from that of the process that has started this one."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
HELPER = "warm-helper"  # name of a process of multiprocessing itself
VARIABLE = "WARM_PYTHON"
_END_S = 10.0  # milliseconds, but for a busy machine


class _Server:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self.log = self.folder / "log"
        self.python = self.folder / "python"
        text = Path(__file__).with_name("command.py").read_text()
        address = self.folder / "socket"
        self.python.write_text(f"#!{sys.executable} -IS\n" + text.replace('ADDRESS = ""', f"ADDRESS = {str(address)!r}"))
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:  # requests wait there until everything is imported
            listener.bind(str(address))
            listener.listen(64)
            listener.set_inheritable(True)
            begin = os.environ.get(VARIABLE, sys.executable)
            line = [begin, "-m", "tests.warm.server", str(listener.fileno()), str(self.python), str(self.log)]
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            self.process = subprocess.Popen(
                line,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """Of the server; that of the command, if it is forked, is another one."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.log.with_name("pid").read_text())
        return self.process.pid

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a process that was forked from this one has the other end of its input, too
            with contextlib.suppress(psutil.NoSuchProcess):
                forks = psutil.Process(self.pid)
                for process in (*forks.children(recursive=True), forks):
                    process.kill()
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_servers: list[_Server] = []


def python() -> str:
    """Path of the command that takes the place of ``sys.executable``."""
    if not _servers:
        _servers.append(_Server())
        atexit.register(close)
    return str(_servers[0].python)


def share() -> None:
    """Let the processes that this one starts fork theirs from its server."""
    os.environ[VARIABLE] = python()


def close() -> None:
    """End the server and whatever runs below it."""
    while _servers:
        server = _servers.pop()
        if os.environ.get(VARIABLE) == str(server.python):
            del os.environ[VARIABLE]
        server.close()


def sessions_of(leader: int) -> set[int]:
    """The session of a command, and those of all scripts that were started from it and from one another."""
    sessions = {leader}
    if _servers and _servers[0].log.exists():
        for line in _servers[0].log.read_text().splitlines():  # by time
            asked, made = map(int, line.split())
            if asked in sessions:
                sessions.add(made)
    return sessions


def server() -> int | None:
    """Number of the process below which all scripts are."""
    return _servers[0].pid if _servers else None


def is_helper(process: psutil.Process) -> bool:
    """Whether it is the server, or a process of multiprocessing itself that this process has started by it."""
    if not _servers:
        return False
    mine, forked = _servers[0].process.pid, _servers[0].pid
    return process.pid in (mine, forked) or (process.ppid() == forked and process.name() == HELPER)
