"""A process in a host, or on this machine: ``python -m module arguments``, with its log, and signals from here.

It is forked from a server that has imported torch and Lightning once, so that it begins in a fraction of a second. Two forks
make it: the first child enters the host, and only a child of that has a process number in there.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from benchmarks.cluster.namespaces import enter
from benchmarks.cluster.network import Host

_context = multiprocessing.get_context("forkserver")
_PRELOADED = ("lightning.pytorch", "torchmetrics", "lightning_gossip")
_context.set_forkserver_preload(list(_PRELOADED))
_LOOK_S = 0.02  # into a log, until it has a line
_START_S = 60.0  # the first one waits for the server's imports


def preload(*modules: str) -> None:
    """Let the server import these too; before the first process starts."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


class Process:
    """One process; can be started once.

    Args:
        host: where it runs; None for this machine.
        module: what runs, as ``__main__``.
        arguments: ``sys.argv[1:]``.
        environment: beside that of this process.
        log: the file that its stdout and stderr go to, appended.
    """

    def __init__(
        self, host: Host | None, module: str, arguments: tuple[str, ...] = (), *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.host = host
        self.module = module
        self.pid = 0
        self._log = log
        self._log_from = log.stat().st_size if log.exists() else 0
        self._told, self._telling = _context.Pipe(duplex=False)
        self._how = (arguments, dict(environment))
        what = (host and host.namespaces.first, module, arguments, dict(environment))
        self._process = _context.Process(target=_first_child, args=(self._telling, log, *what), daemon=True)

    def start(self) -> None:
        """Start it; returns when it has a number."""
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # which the child need not import
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        self._telling.close()
        if not self._told.poll(_START_S):
            raise TimeoutError(f"{self} did not start within {_START_S:.0f} s.")
        self.pid = self._told.recv()

    def another(self) -> Process:
        """The same once more, not started: as its launcher would bring it back."""
        arguments, environment = self._how
        return Process(self.host, self.module, arguments, environment=environment, log=self._log)

    def kill(self) -> None:
        """End it without a word."""
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Freeze it."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Thaw it."""
        self.signal(signal.SIGCONT)

    @property
    def lines(self) -> list[str]:
        """What it has said so far."""
        with open(self._log, errors="replace") as log:
            log.seek(self._log_from)
            return log.readlines()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    @property
    def sentinel(self) -> int:
        """For ``multiprocessing.connection.wait``: ready when it has ended."""
        return self._process.sentinel

    def said(self, pattern: str) -> bool:
        """Whether a line of its has this regular expression."""
        return any(re.search(pattern, line) for line in self.lines)

    def last_words(self) -> str:
        """Its last line that says something."""
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "nothing")

    def await_line(self, pattern: str, timeout_s: float, *, after: int = 0) -> re.Match[str]:
        """Until it says something.

        Args:
            pattern: a regular expression to be found in a line.
            timeout_s: how long to wait.
            after: lines at the beginning that do not count.

        Raises:
            TimeoutError: if it does not, or has ended; with its last lines.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            runs, lines = self.runs, self.lines
            for line in lines[after:]:
                if match := re.search(pattern, line):
                    return match
            if not runs or time.monotonic() > until_s:
                when = f"within {timeout_s:.0f} s" if runs else "before it ended"
                raise TimeoutError(f"{self} did not say {pattern!r} {when}:\n{''.join(lines[-30:])}")
            self._process.join(_LOOK_S)

    def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal.

        Raises:
            TimeoutError: if it goes on; with its last lines.
        """
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"{self} did not end within {timeout_s:.0f} s:\n{''.join(self.lines[-30:])}")
        return code

    def close(self) -> None:
        """Kill it, if it has not ended. May be called twice."""
        if self.pid:
            self.kill()
            self._process.join()
        self._told.close()

    def __str__(self) -> str:
        return self.module if self.host is None else f"{self.module} on host {self.host.number}"

    def signal(self, number: int) -> None:
        """Send it any signal, if it runs."""
        if self._process.is_alive():  # and then its number is its own: the first child has not asked for its end yet
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def _first_child(
    telling: Connection, log: Path, first: int | None, module: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    with open(log, "ab") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
    if first is not None:
        enter(first)
    pid = os.fork()
    if pid == 0:
        telling.close()
        _run(module, arguments, environment)
    telling.send(pid)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str]) -> NoReturn:
    """As the interpreter would."""
    code = 1
    try:
        os.setsid()
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
        os.environ.update(environment)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter would print
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, as the interpreter does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
