"""What the commands of this folder have in common: a user's mistake gets one sentence, and SIGTERM cleans up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_gossip import GossipError

_FULL_ERROR = "HYDRA_FULL_ERROR"


@contextmanager
def one_sentence() -> Iterator[None]:
    """End the command with status 2 and the error's own words; with ``HYDRA_FULL_ERROR=1`` with the whole stack trace."""
    try:
        yield
    except (GossipError, MisconfigurationException) as error:
        if os.environ.get(_FULL_ERROR) == "1":
            raise
        print(f"{type(error).__name__}: {error}\n(Set {_FULL_ERROR}=1 for the stack trace.)", file=sys.stderr)
        sys.exit(2)


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that processes and links are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may say what a signal does
        yield
        return

    def leave(signum: int, _: object) -> NoReturn:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
