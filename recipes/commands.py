"""What the commands of this folder have in common: a user's mistake gets one sentence, and SIGTERM cleans up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_gossip.errors import GossipError
from recipes.ranges import check_folder

_FULL_ERROR = "HYDRA_FULL_ERROR"


@contextmanager
def one_sentence() -> Iterator[None]:
    """End the command with status 2 and the error's own words; with ``HYDRA_FULL_ERROR=1`` with the whole stack trace."""
    try:
        yield
    except Exception as error:
        if os.environ.get(_FULL_ERROR) == "1" or not isinstance(error, _mistakes()):
            raise
        words = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else str(error)
        print(f"{type(error).__name__}: {words}\n(Set {_FULL_ERROR}=1 for the stack trace.)", file=sys.stderr)
        sys.exit(2)


def _mistakes() -> tuple[type[Exception], ...]:
    """Errors that are the user's; Lightning's only where it has been imported, since importing it takes seconds."""
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    of_lightning = () if lightning is None else (lightning.MisconfigurationException,)
    return (GossipError, OmegaConfBaseException, *of_lightning)


class WritableFolder(Callback):
    """Says in a sentence that the folder of a run cannot be written to, before Hydra fails on it."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook, before it makes the folder."""
        self._look("hydra.run.dir", config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook, before it makes the folder of a sweep."""
        self._look("hydra.sweep.dir", config.hydra.sweep.dir)

    def _look(self, key: str, folder: str) -> None:
        with one_sentence():  # its exit passes Hydra, which turns any other exception of a callback into a warning
            check_folder(key, folder)


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
