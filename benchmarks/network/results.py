"""The file that keeps what was measured, run by run, so that a table that was stopped can go on."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.network.runner import Run
from benchmarks.network.summary import summarize


class Results:
    """A JSON file: date, machine, settings, summary, and one run a line.

    Args:
        path: of the file.
        settings: what must be equal for runs to be compared.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self.runs: list[dict[str, Any]] = []

    def load(self, *, any_settings: bool = False) -> None:
        """Keep what the file has of runs under the same settings, or under whatever settings it has."""
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if any_settings or kept["settings"] == self._settings:
                self.runs = kept["runs"]

    def forget(self, scenario: str, work: str) -> None:
        """A scenario is measured anew."""
        self.runs = [run for run in self.runs if (run["scenario"], run["work"]) != (scenario, work)]

    def of(self, scenario: str, work: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if (run["scenario"], run["work"]) == (scenario, work)]

    def has(self, run: Run) -> bool:
        return any(describe(run).items() <= kept.items() for kept in self.runs)

    def add(self, run: Run, undisturbed: str, measured: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Write it down, at once and whole."""
        entry = {**describe(run), "undisturbed": undisturbed, "seconds": round(seconds, 1), **measured}
        self.runs.append(entry)
        self.write()
        return entry

    def write(self) -> None:
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        head = {"date": when, "machine": machine(), "settings": self._settings}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines += [_listed("summary", summarize(self.runs)), _listed("runs", self.runs)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(beside, self.path)


def describe(run: Run) -> dict[str, Any]:
    """A run by what it was told."""
    return {
        "scenario": run.scenario,
        "work": run.work,
        "condition": run.condition.label,
        "rate_mbit": run.condition.rate_mbit,
        "contender": run.contender,
        "seed": run.seed,
        "steps": run.steps,
    }


def _listed(name: str, entries: list[dict[str, Any]]) -> str:
    return f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, entries)) + "\n]"
