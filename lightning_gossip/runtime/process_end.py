"""The end of a worker's process: what outlives a Trainer is ended before the interpreter begins to end.

The default process group and the failure detector stay after ``Trainer.fit``, for a second fit or a ``validate``. A thread of
Gloo may still hold the last reference to a tensor that Python has made, and needs the interpreter to free it. If the
interpreter ends meanwhile, that thread is ended inside a C++ destructor, and the process aborts after a training that went
well: ``terminate called without an active exception``, exit status −6. On a busy machine that happened once in eight fits.
Destroying the groups joins their threads; so it has to happen while the interpreter is whole: in an ``atexit`` function.

What outlives a Trainer, each in the attributes of a class ``_Process`` of its module:

| module | keeps |
|---|---|
| ``runtime/membership/membership.py`` | the membership, and by it the failure detector and the groups of the members |
| ``runtime/membership/uses.py`` | the number of the present use of a Trainer |
| ``runtime/islands/groups.py`` | the groups of islands, and the store, where there is no membership |
| ``runtime/causes.py`` | the hook that tells an exception's cause, and the one that it stands for |
| ``strategies/fabric/strategy.py`` | the training of the last Fabric |
| ``strategies/lightning/launchers.py`` | the workers that the shell's process has started, and who watches them |
| ``runtime/process_end.py`` | what is called before the interpreter ends |
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from lightning_gossip.runtime.clock import now_s
from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)

_END_S = 10.0  # for an operation that is still under way, after a failure


class _Process:
    """What belongs to this process."""

    registered_in: int | None = None  # its id: a forked child has inherited the registration, and not the groups
    ends: list[Callable[[], None]]


_Process.ends = []


def end_groups_at_exit() -> None:
    """End this process's groups, and what was given to :func:`call_at_exit`, before the interpreter ends.

    ``atexit`` calls what was registered last first. So call this when the group has been made: then it ends before anything
    that libraries have registered when they were imported.
    """
    if _Process.registered_in != os.getpid():
        _Process.registered_in = os.getpid()
        atexit.unregister(_end)
        atexit.register(_end)


def call_at_exit(end: Callable[[], None]) -> None:
    """Have something ended before the groups: a thread that uses them.

    Args:
        end: may be called when there is nothing left to end; has a deadline of its own. What is given twice is called once.
    """
    forget_at_exit(end)
    _Process.ends.append(end)


def forget_at_exit(end: Callable[[], None]) -> None:
    """What was given to :func:`call_at_exit` has ended: it is not held any more, nor what belongs to it."""
    if end in _Process.ends:
        _Process.ends.remove(end)


def end_at_once(why: str) -> None:
    """End this process as if it were killed, so that whoever has started it knows that nothing here has gone wrong.

    From any thread, whatever the others wait for. Nothing is tidied up but what is written.

    Args:
        why: for the log.
    """
    log.error(why)
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # closed
            stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _join_threads() -> None:
    """Wait for threads of ours that are about to end: each may be inside a call of torch, where the interpreter must be whole.

    A listener that only a message can wake is left: it sleeps until the process has ended (after a failure).
    """
    end_s = now_s() + _END_S
    for thread in threading.enumerate():
        if thread.name.startswith("gossip-") and thread.name != "gossip-listener" and thread.ident != threading.get_ident():
            thread.join(max(0.0, end_s - now_s()))


def _end() -> None:
    if _Process.registered_in != os.getpid():
        return
    while _Process.ends:
        _Process.ends.pop()()
    _join_threads()
    if not dist.is_available() or not dist.is_initialized():
        return
    # An operation that waits for a worker that has ended holds the group up: after a failure only, and then not for long.
    thread = new_thread("gossip-end", dist.destroy_process_group)
    thread.start()
    thread.join(_END_S)
    if thread.is_alive():
        log.warning("The process group did not end within %.3g s: an operation on it is still waiting.", _END_S)
