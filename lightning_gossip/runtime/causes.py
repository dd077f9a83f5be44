"""One traceback on a terminal for what ends several workers: the first one's.

A mistake that all ranks make ends each of them with the same traceback, and a worker that fails ends the others with a
:class:`~lightning_gossip.errors.PeerError`. Where they write to one terminal, the first one prints its traceback, and each
other one a line that says where to look. Workers that write to files of their own print all they have.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.store_client import another

_PRINTED_S = 5.0  # for the first one to print its traceback
_CONNECT_S = 1.0  # with a store that may be ending; torch tries twice as long
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_ATTRIBUTE = "_lightning_gossip_cause"  # of an error: kept as long as that is, and no longer


class _Process:
    """What belongs to this process."""

    hook: Hook | None = None  # ours, and the one that it stands for
    before: Hook = sys.__excepthook__


def terminal() -> str:
    """What names the file that this process writes its errors to, among those of all hosts."""
    try:
        file = os.fstat(2)
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{file.st_dev}/{file.st_ino}/{file.st_rdev}"


def kind_of(error: BaseException) -> str:
    """Equal for the errors of all workers that have the same reason: ``"peer"`` if that is another worker's end.

    >>> kind_of(ValueError("rank 1 has 3 batches")) == kind_of(ValueError("rank 2 has 3 batches"))
    True
    """
    if isinstance(error, PeerError):
        return "peer"
    said = re.sub(r"\b([Rr]ank|[Ww]orker) \d+", r"\1", str(error))
    return hashlib.sha256(f"{type(error).__qualname__}: {said}".encode()).hexdigest()[:16]


class Cause:
    """What has ended this worker, and who tells of it. It holds no error: that would keep the frames of its traceback alive.

    Args:
        error: what has ended it.
        store: a connection of this cause's own, to the store of the job.
        prefix: of the keys there, of one use of a Trainer.
        rank: of this worker.

    Raises:
        RuntimeError: if the store cannot be reached.
    """

    def __init__(self, error: BaseException, store: Store, prefix: str, rank: int) -> None:
        first = str(error).split("\n")[0]
        self._what = f"{type(error).__name__}: {first}"
        self._store = PrefixStore(f"{prefix}/causes/{terminal()}", store)
        self._rank = rank
        mine, kind = str(rank), kind_of(error)
        self._teller = self._claim(kind, mine)
        if kind == "peer":  # the reason is told by the worker that had another one, if one has
            self._teller = self._claim("reason", "") or self._teller
        else:
            self._claim("reason", mine)

    def _claim(self, key: str, mine: str) -> str:
        """Who was first; with ``""`` only asks."""
        return str(self._store.compare_set(key, "", mine), encoding="utf-8")

    @property
    def is_told_here(self) -> bool:
        """Whether this worker prints the traceback for all."""
        return self._teller == str(self._rank)

    def printed(self) -> None:
        """Note that the traceback has been printed."""
        with contextlib.suppress(dist.DistError):  # the store has ended: whoever asks prints its own
            self._store.set(f"{self._rank}/printed", "1")

    def await_printed(self) -> bool:
        """Wait a little for the one that tells of it; False if it has not."""
        try:
            self._store.get(f"{self._teller}/printed")
        except dist.DistError:
            return False
        return True

    def line(self) -> str:
        """The line that stands for the traceback on the other workers."""
        return f"Rank {self._rank} has ended too; rank {self._teller} says why. ({self._what})"


def tell_once(error: BaseException, store: Store, prefix: str, rank: int) -> None:
    """If the error ends this process, print its traceback, unless another worker prints the same on this terminal.

    Args:
        error: that has ended a use of a Trainer.
        store: of the job.
        prefix: of the keys in it, of this use.
        rank: of this worker.
    """
    try:
        cause = Cause(error, another(store, timeout_s=_PRINTED_S, connect_s=_CONNECT_S), prefix, rank)
    except (dist.DistError, PeerError):  # the store has ended with its host
        return
    with contextlib.suppress(AttributeError, TypeError):  # of an error that takes no attribute the traceback is printed
        setattr(error, _ATTRIBUTE, cause)
    if sys.excepthook is not _Process.hook:
        _Process.before = sys.excepthook
        _Process.hook = sys.excepthook = _telling(_Process.before)


def forget() -> None:
    """Another use of a Trainer begins, so what ended those before has not ended this process: the hook is taken off."""
    if _Process.hook is not None and sys.excepthook is _Process.hook:
        sys.excepthook = _Process.before
    _Process.hook, _Process.before = None, sys.__excepthook__


def _telling(before: Hook) -> Hook:
    """A hook that prints the line of an error that is told elsewhere, and hands all others on."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        cause: Cause | None = getattr(error, _ATTRIBUTE, None)
        if cause is not None and not cause.is_told_here and cause.await_printed():
            print(cause.line(), file=sys.stderr)
            return
        before(kind, error, traceback)
        if cause is not None:
            cause.printed()

    return hook
