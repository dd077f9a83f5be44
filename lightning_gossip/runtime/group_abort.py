"""Ends the collectives of a process group when one of its workers has failed, so that nobody waits for it in one.

A collective waits for all workers, inside torch. Gloo notices that one has ended when its connection closes: not if its machine
is gone or frozen, nor while a process that it has forked, as a loader's, holds the socket. NCCL does not notice over NVLink or
shared memory, and torch then ends *every* process when the time-out is over. From another thread

- Gloo's collectives are ended by a receive from anybody that is over its time: it closes all connections of the group
  (``ProcessGroup.abort`` does nothing);
- NCCL's by ``Backend.abort``: their kernels return, with whatever is in their buffers.

So whoever has made collectives here asks afterwards (:meth:`GroupGuard.check`) whether what came of them counts.

Not yet run with NCCL: the tests end Gloo's collectives, and that one call of ``Backend.abort`` is read, not tried.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)

_TAG = 1 << 20  # of a message that nobody sends
_AT_ONCE = timedelta(milliseconds=1)  # to Gloo 0 is no deadline at all
_RELEASE_S = 10.0  # for an abort that is under way

# What torch's NCCL group does when a collective fails or is over its time, where others survive that (docs/gpu.md)
NCCL_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicators; 3, the default, ends the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else one error stays in the job's store, and ends every process minutes later
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else torch first sleeps for four times 15 s
}
# Set by a user, one of these decides how failures are handled, and none of ours is set
_USERS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare_nccl(backend: str) -> dict[str, str | None]:
    """Set what NCCL's groups read when they are made, so that a failure ends no process; nothing that a user has set.

    Args:
        backend: of the default group that is about to be made.

    Returns:
        The environment variables as they were, for :func:`~lightning_gossip.transport.network_interface.restore`.
    """
    if "nccl" not in backend.lower() or any(name in os.environ for name in _USERS):
        return {}
    missing = {name: value for name, value in NCCL_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    return dict.fromkeys(missing)


def abort_group(group: dist.ProcessGroup) -> None:
    """End all operations of this process on a group: those under way and those that come. From any thread.

    The group is good for nothing afterwards but to be destroyed.
    """
    for backend in _backends(group):
        if backend.name() == "gloo":
            _close_connections(group)
        else:
            backend.abort()


def _close_connections(group: dist.ProcessGroup) -> None:
    work = group.recv_anysource([torch.zeros(1, device="cpu")], _TAG)
    try:
        work.wait(_AT_ONCE)
    except RuntimeError as expected:
        log.debug("The connections of a group are closed: %s", expected)


class GroupGuard:
    """Aborts groups of one process when a worker in them has failed.

    The abort has a thread of its own: what NCCL does for it may take seconds, and heartbeats go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # held, a group's connections and threads would outlive its destruction
        self._groups: tuple[Callable[[], dist.ProcessGroup | None], ...] = ()
        self._has_failed: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None

    def guard(self, groups: Sequence[dist.ProcessGroup], has_failed: Callable[[], bool]) -> None:
        """Guard groups from now on, in place of those before.

        Args:
            groups: of the present members.
            has_failed: whether a worker in them has failed, or all end.
        """
        self.release()
        with self._lock:
            self._groups, self._has_failed = tuple(weakref.ref(group) for group in groups), has_failed

    def look(self) -> None:
        """Abort the groups if one of their workers has failed. Called by the failure detector's thread; returns at once."""
        with self._lock:
            refs, has_failed = self._groups, self._has_failed
        groups = _alive(refs)
        if not groups or not has_failed():
            return
        with self._lock:
            if self._groups is refs and self._thread is None:
                self._thread = new_thread("gossip-abort", _abort, groups)
                self._thread.start()

    @property
    def is_aborted(self) -> bool:
        """Whether the groups have been aborted, or are being; by this guard, or by a backend after an error."""
        with self._lock:
            return self._thread is not None or any(map(_has_error, _alive(self._groups)))

    def check(self) -> None:
        """Make sure that the collectives of this thread have not merely returned because the group was aborted.

        Waits until the device has done what it was given: a collective's kernel returns later than the call.

        Raises:
            DistBackendError: if they have.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        if self.is_aborted:
            raise dist.DistBackendError("A worker has failed, and the collective that waited for it was ended.")

    def release(self) -> None:
        """Let go of the groups, which are about to be destroyed: after an abort that is under way, 10 s at most."""
        self.join()
        with self._lock:
            self._groups, self._thread = (), None

    def join(self) -> None:
        """Wait for an abort that is under way, 10 s at most."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_RELEASE_S)
            if thread.is_alive():
                log.warning("The abort of a process group has not ended within %.3g s.", _RELEASE_S)


def _alive(refs: Sequence[Callable[[], dist.ProcessGroup | None]]) -> list[dist.ProcessGroup]:
    return [group for ref in refs if (group := ref()) is not None]


def _abort(groups: list[dist.ProcessGroup]) -> None:
    log.info("A worker has failed: what is under way on the process groups is ended.")
    while groups:  # none is held when this thread ends
        _try_to_abort(groups.pop())


def _try_to_abort(group: dist.ProcessGroup) -> None:
    try:
        abort_group(group)
    except Exception as error:  # noqa: BLE001 - the group is given up anyway, and its collectives have time-outs of their own
        log.warning("The collectives of a group in which a worker has failed could not be ended: %s", error)


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """Each once, though it may work on several kinds of devices."""
    return list({backend.name(): backend for backend in map(group._get_backend, group._device_types)}.values())


def _has_error(group: dist.ProcessGroup) -> bool:
    """Whether the watchdog of a backend has seen an error, and so has aborted its communicators."""
    return any(backend.get_error() != ErrorType.SUCCESS for backend in _backends(group) if backend.name() == "nccl")
