"""Lightning's launchers, with one thing before: the strategy checks what it was given while there is only one process."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
    multiprocessing,
    subprocess_script,
)
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.strategies.lightning.patches import Patches

log = logging.getLogger(__name__)

_STOPPED = "stopped by SIGTERM"
_GRACE_S = 10.0  # for workers to end when this process has failed, before each stronger word
_POLL_S = 1  # how soon the others are told that a process has ended
_launches = itertools.count()  # by this process; where several machines launch, each one makes the same ones
Preflight = Callable[[pl.Trainer, pl.LightningModule], None]


class _Process:
    """What belongs to this process, and not to a launcher: that would keep its Trainer and the model until the process ends."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []  # the workers
    observer: PatientObserver | None = None
    failed = False  # whether the last use of the workers was ended by an exception
    registered_in: int | None = None  # its id: a forked child has inherited the registration, and not the workers


class StartedWorkers:
    """The workers that a launcher has started by running the script again, until this process ends.

    When an exception ends this process, the workers that it has started end by the same one, or by its word; one that has not
    yet met it would wait for it, and is ended when this process ends.
    """

    cluster_environment: Any
    num_processes: int
    procs: list[subprocess.Popen[bytes]]

    def observe(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Watch them, as :class:`PatientObserver` does."""
        first = self.cluster_environment.node_rank() * self.num_processes + 1
        _Process.observer = PatientObserver(os.getpid(), children, first=first)
        _Process.observer.start()

    @contextmanager
    def ending_workers(self) -> Iterator[None]:
        """If what happens inside ends by an exception, they end with this process."""
        if _Process.registered_in != os.getpid():
            _Process.registered_in, _Process.started = os.getpid(), []
            atexit.unregister(_end_workers)
            atexit.register(_end_workers)  # before the groups' own, which end before it
        _Process.failed = True
        try:
            yield
        finally:
            _Process.started.extend(process for process in self.procs if process not in _Process.started)
        _Process.failed = False


def _end_workers() -> None:
    if not _Process.failed or _Process.registered_in != os.getpid():
        return
    if _Process.observer is not None:
        _Process.observer._finished = True
    for action, patience_s in ((None, _GRACE_S), (signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        alive = [process for process in _Process.started if process.poll() is None]
        if alive and action is not None:
            log.warning("%d workers had not ended %.3g s after rank 0; sent them %s", len(alive), patience_s, action.name)
            for process in alive:
                process.send_signal(action)
        end_s = now_s() + patience_s
        for process in alive:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - now_s()))


class CheckedSubprocessLauncher(StartedWorkers, _SubprocessScriptLauncher):
    """Runs the user's script once more for each further worker (``start_method="popen"``)."""

    preflight: Preflight
    survives = False  # whether the others go on when one is killed

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _check(self.preflight, function, args, trainer)
        patches = Patches()
        if self.survives:
            patches.set(subprocess_script, "_launch_process_observer", self.observe)
        try:
            with self.ending_workers():
                return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            patches.restore()


class PatientObserver(_ChildProcessObserver):
    """Watches the workers that this process has started. One that is killed by a signal is told to the others, which go on.

    One that ends by itself with an error ends all, as with Lightning's own observer. All Trainers of a process have the same
    workers, so a process has one observer, and ``members`` follows its Trainers.

    Args:
        main_pid: of the process that has started them.
        children: the workers.
        first: rank that the first of them was started with.
    """

    members: ClassVar[Membership | None] = None  # of this process's present Trainer, if its strategy survives failures

    def __init__(self, main_pid: int, children: list[subprocess.Popen[bytes]], *, first: int) -> None:
        super().__init__(main_pid, children, sleep_period=_POLL_S)
        self._first = first
        self._told: set[int] = set()

    @override
    def _run(self) -> bool:
        for number, child in enumerate(self._child_processes, start=self._first):
            code = child.poll()
            members = self.members
            if code is not None and code < 0 and number not in self._told and members is not None:
                self._told.add(number)
                members.monitor.process_ended(WorkerId(number, 1))  # one that came back was started by somebody else
                self._end_mates(number, members)
                log.warning(
                    "Rank %d was killed by %s; the others go on. To bring it back: MASTER_ADDR=%s MASTER_PORT=%s WORLD_SIZE=%s"
                    " NODE_RANK=%s LOCAL_RANK=%d %s",
                    number,
                    signal.Signals(-code).name,
                    *(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK")),
                    number - self._first + 1,
                    " ".join([sys.executable, *sys.argv]),
                )
            if code is not None and code > 0:
                return bool(super()._run())
        return all(child.returncode is not None for child in self._child_processes)

    def _end_mates(self, number: int, members: Membership) -> None:
        """The island of a rank that was killed is dead: end what is left of it, which may wait in a device's collective."""
        if isinstance(members.groups, IslandGroups):
            for mate in members.groups.islands.mates(number):
                if 0 <= mate - self._first < len(self._child_processes):
                    self._child_processes[mate - self._first].kill()


class CheckedMultiProcessingLauncher(_MultiProcessingLauncher):
    """Starts the workers by spawn, fork or forkserver, and brings rank 0's report back to the user's process.

    A worker that is stopped by SIGTERM ends with status 0 and has no result; Lightning's launcher would wait for that for ever.
    Here the workers call the callbacks' ``on_exception``, rank 0 says so, and the user's process raises what the workers did.
    """

    preflight: Preflight
    survives = False  # whether the others go on when one is killed

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _check(self.preflight, function, args, trainer)
        self._strategy.launch = next_launch()  # type: ignore[attr-defined]
        patches = Patches()
        if self.survives:
            patches.set(multiprocessing, "mp", PatientStart())
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            patches.restore()

    @override
    def _wrapping_function(self, process_idx: int, *arguments: Any) -> None:
        try:
            super()._wrapping_function(process_idx, *arguments)
        except SIGTERMException as stop:
            trainer, return_queue = arguments[0], arguments[4]
            _interrupt(trainer, stop)  # Lightning would call the callbacks in the user's process, which has not trained
            if process_idx == 0:
                return_queue.put(_STOPPED)
            if trainer.strategy.members is not None:
                trainer.strategy.members.rest()  # rank 0 may hold the store: it does not leave before the others
            raise

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output == _STOPPED:
            trainer.callbacks = []  # type: ignore[attr-defined]  # the workers have called them
            raise SIGTERMException
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "report": trainer.strategy.report}  # type: ignore[attr-defined]

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.strategy.report = extra["report"]  # type: ignore[attr-defined]


class PatientStart:
    """Stands in for ``torch.multiprocessing`` in a launcher of the Trainer's or Fabric's."""

    get_context = staticmethod(mp.get_context)
    current_process = staticmethod(mp.current_process)

    def start_processes(self, *args: Any, join: bool = True, **options: Any) -> PatientContext:
        """Start the workers, to wait for them patiently; here, if ``join``."""
        started = mp.start_processes(*args, **options, join=False)  # type: ignore[attr-defined, misc, no-untyped-call]
        context = PatientContext(started)
        while join and not context.join():
            continue
        return context


class PatientContext:
    """Waits for the workers that the user's process has started. One that is killed by a signal does not end the others.

    Args:
        context: torch's, which ends all with the first that fails.
    """

    def __init__(self, context: Any) -> None:
        self.processes: list[Any] = context.processes
        self._context = context
        self._told: set[int] = set()

    def join(self) -> bool:
        """Wait until another worker has ended; returns whether all have.

        Raises:
            PeerError: if rank 0 was killed: its results are what this process waits for.
            Exception: of a worker that has failed.
        """
        if alive := [process.sentinel for process in self.processes if process.is_alive()]:
            wait(alive)  # for nobody it would be for ever
        for number, process in enumerate(self.processes):
            if process.exitcode is not None and process.exitcode < 0 and number not in self._told:
                self._told.add(number)
                log.warning("Rank %d was killed by %s; the others go on.", number, signal.Signals(-process.exitcode).name)
        if any(process.exitcode for number, process in enumerate(self.processes) if number not in self._told):
            return bool(self._context.join())
        ended = all(not process.is_alive() for process in self.processes)
        if ended and 0 in self._told:
            raise PeerError(
                "Worker 0 was killed, and the results with it. If the others have ended well, their last checkpoint has the"
                " model.",
                rank=0,
                phase="launch",
            )
        return ended


def next_launch() -> int:
    """The number of a launch by this process."""
    return next(_launches)


def _check(preflight: Preflight, function: Callable[..., Any], args: Any, trainer: pl.Trainer | None) -> None:
    model = next((arg for arg in args if isinstance(arg, pl.LightningModule)), None)
    if trainer is not None and model is not None and function.__name__ == "_fit_impl":
        preflight(trainer, model)
