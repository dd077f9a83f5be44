"""How many files and sockets a process may have open at once, and how many a worker of a job needs.

The usual soft limit is 1,024, and the process that holds the store has a socket for each connection of each worker. A process
may raise its soft limit up to the hard one.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from lightning_gossip.errors import ConfigurationError

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

STORE_CONNECTIONS = 6  # of a worker that survives failures: training, monitor, claims, and three of the gossip
_SPARE = 128  # the interpreter, data loaders, loggers, edges with neighbours


def needed(workers: int, *, connections: int, serves: bool) -> int:
    """Open files that one worker of a job needs at most.

    Args:
        workers: of the job.
        connections: of each worker to the store.
        serves: whether this worker holds the store, or may come to.

    >>> needed(256, connections=6, serves=True)
    2435
    """
    mesh = 3 * (workers - 1)  # Gloo connects all with all: the default group, and up to two of an algorithm
    return _SPARE + connections + mesh + (connections * workers if serves else 0)


def raise_limit() -> int | None:
    """Raise this process's limit of open files as far as the system lets it.

    Returns:
        The limit; None where the system has none or does not tell.
    """
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else soft


def check(workers: int, *, connections: int, serves: bool) -> None:
    """Refuse a job whose worker would run out of open files, as far as this process can tell.

    Raises:
        ConfigurationError: with the number that is needed, and how to raise the limit.
    """
    limit, need = raise_limit(), needed(workers, connections=connections, serves=serves)
    if limit is not None and limit < need:
        whose = "the worker that holds the store" if serves else "a worker"
        raise ConfigurationError(
            f"A job of {workers} workers needs up to {need} open files in {whose}, and this system"
            f" allows {limit} (`ulimit -Hn`). Raise the limit (as root: `ulimit -n {need}` before the job, LimitNOFILE= of a"
            " service, --ulimit nofile= of a container)"
            + (
                ', or hold the store in a process of its own: `python -m lightning_gossip.store`, store="tcp://<host>:29400".'
                if serves and connections > 1 and limit >= needed(workers, connections=connections, serves=False)
                else ", or start fewer workers."
            )
        )


def warn_of_agent(workers: int, *, connections: int) -> None:
    """Warn if torchrun's agent, which holds the store and has started this process, has not enough open files for it.

    Args:
        workers, connections: as for :func:`needed`.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # of another user's process the system tells nothing
        limit, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != limit < (need := connections * workers + _SPARE):
            log.warning(
                "torchrun's agent holds the store of %d workers, which needs up to %d open files, and may have %d. Write"
                " `ulimit -n %d` before torchrun.",
                workers,
                need,
                limit,
                need,
            )
