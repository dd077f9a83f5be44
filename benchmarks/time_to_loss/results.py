"""The file that keeps the runs, one a line, so that a command that was stopped goes on."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.time_to_loss.runs import Run

Entry = dict[str, Any]


class Results:
    """A JSON file: date, machine, settings, and one run a line.

    Args:
        path: of the file.
        settings: what must be equal for runs to be compared; None to take what the file has.
    """

    def __init__(self, path: Path, settings: dict[str, Any] | None) -> None:
        self.path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings or {}))
        self.runs: list[Entry] = []
        if path.exists():
            kept = json.loads(path.read_text())
            if settings is None or kept["settings"] == self.settings:
                self.settings, self.runs = kept["settings"], kept["runs"]

    def has(self, run: Run) -> bool:
        """Whether it is there; one that waits with any condition of its hosts."""
        wanted = run.described()
        if run.waits:
            del wanted["rate_mbit"], wanted["scenario"]
        return any(wanted.items() <= kept.items() for kept in self.runs)

    def add(self, entries: Sequence[Entry]) -> None:
        """Write them down, at once and whole."""
        self.runs += entries
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        head = {"date": when, "machine": machine(), "settings": self.settings}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append('"runs": [\n' + ",\n".join(map(json.dumps, self.runs)) + "\n]")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(beside, self.path)

    def of(self, **wanted: Any) -> list[Entry]:
        """Runs with these values."""
        return [run for run in self.runs if wanted.items() <= run.items()]

    def best(self, of: Callable[[Entry], Any], **wanted: Any) -> Any:
        """Of the runs with these values, the group of the least mean loss at the end; None without any.

        Args:
            of: the group of a run.
            wanted: values.
        """
        groups: dict[Any, list[float]] = {}
        for run in self.of(**wanted):
            loss = run["curve"]["loss"][-1] if run["ended"] == "done" else float("inf")
            groups.setdefault(of(run), []).append(loss)
        return min(groups, key=lambda group: statistics.fmean(groups[group]), default=None)
