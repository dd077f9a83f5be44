"""What the benchmarks share: bounded processes, a table on the screen and a JSON file beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None) -> None:
    """A table whose first column names the row."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def against(value: float, aim: float, *, at_most: bool = False, digits: int = 2) -> str:
    """A number marked by whether it reaches its aim."""
    reached = value <= aim if at_most else value >= aim
    return f"{value:.{digits}f} {'✓' if reached else '✗'}"


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write ``results/<name>.json`` with when and where it was measured."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": when, "machine": machine(), **results}, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """What a reader needs to judge a time."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def bounded(function: Callable[..., None], *args: Any, timeout_s: float) -> None:
    """Run a function in a forked process group of its own, which does not outlive this call.

    Raises:
        TimeoutError: if it took longer.
        RuntimeError: if it failed.
    """
    process = multiprocessing.get_context("fork").Process(target=_as_group_leader, args=(function, *args))
    process.start()
    try:
        process.join(timeout_s)
        if process.is_alive():
            raise TimeoutError(f"A benchmark's processes did not end within {timeout_s:.0f} s.")
    finally:
        kill_group(process.pid)
        process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"A benchmark's processes failed with exit code {process.exitcode}; see its traceback above.")


def kill_group(leader: int | None) -> None:
    """Kill a process and whatever it started."""
    if leader is None:
        return
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _as_group_leader(function: Callable[..., None], *args: Any) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    function(*args)
