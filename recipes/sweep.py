"""What a sweep adds to its jobs: one that fails leaves a note and the others go on, and at the end somebody says so."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from torch.multiprocessing.spawn import ProcessRaisedException

from recipes.record import METRICS, RECORD
from recipes.summary import SUMMARY

FAILED = "failed.txt"

log = logging.getLogger(__name__)


def attempt(job: Callable[[], float], folder: Path, *, otherwise: float) -> float:
    """Run a job of a sweep; one that fails is written down, and the other jobs go on.

    Args:
        job: returns what a sweeper looks at.
        folder: of the job.
        otherwise: what it looks at if the job fails.
    """
    forget(folder)
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - whatever it is
        log.error("This job failed: %s (see %s)", note_failure(error, folder), folder / FAILED)
        return otherwise


def note_failure(error: Exception, folder: Path) -> str:
    """Write why a job failed, with the whole stack trace, into its folder.

    Returns:
        The reason in one line.
    """
    reason = _told(str(error)) if isinstance(error, ProcessRaisedException) else _named(error)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).write_text(f"{reason}\n\n{''.join(traceback.format_exception(error))}", encoding="utf-8")
    return reason


def forget(folder: Path) -> None:
    """A job begins: what an earlier one left in its folder must not pass for its result."""
    for name in (FAILED, SUMMARY, RECORD, METRICS):
        (folder / name).unlink(missing_ok=True)


def reason_of(folder: Path) -> str:
    """Why the job of this folder has no summary."""
    note = folder / FAILED
    return note.read_text(encoding="utf-8").splitlines()[0] if note.exists() else "it did not come to its end"


class EndOfSweep(Callback):
    """Says at the end of a sweep where its results are and which jobs failed; if some did, the exit status is 1.

    Launchers send it to other machines with each job: it holds nothing but the time at which the sweep began.
    """

    def __init__(self) -> None:
        self._began_s = 0.0

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Jobs of earlier sweeps in the same folder are not this one's."""
        self._began_s = time.time()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook."""
        console = Console()
        folder = Path(config.hydra.sweep.dir)
        notes = [path for path in folder.glob("**/.hydra/overrides.yaml") if path.stat().st_mtime >= self._began_s - 1.0]
        jobs = sorted((path.parent.parent for path in notes), key=lambda job: (len(job.name), job.name))
        failed = [job for job in jobs if (job / FAILED).exists() or not any(job.glob(f"**/{SUMMARY}"))]
        console.print(f"\n{len(jobs) - len(failed)} of {len(jobs)} jobs finished, in [bold]{folder}[/bold]", soft_wrap=True)
        for job in failed:
            console.print(f"  job {job.name} failed: {reason_of(job)}", soft_wrap=True, markup=False)
        if len(failed) < len(jobs):
            console.print(f"One page about all of them: python -m recipes.report {folder}", soft_wrap=True, markup=False)
        if failed:
            sys.exit(1)


def _told(text: str) -> str:
    """Of a worker's stack trace, which is all that has come here: the error at its end, in one line."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    rest = lines[frames[-1] + 1 :] if frames else lines[-1:]
    error = " ".join(" ".join(itertools.dropwhile(lambda line: line.startswith(" "), rest)).split())
    return re.sub(r"^[\w.]*\.(\w+:)", r"\1", error)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
