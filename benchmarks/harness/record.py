"""What a worker writes down while it trains, so that it counts whenever the worker is stopped.

All clocks are one: the machine's monotonic clock.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.workers import rank


class Recorder:
    """Writes one line of JSON after the other into ``<kind>-<rank>``.

    Args:
        folder: that all workers share.
        kind: of what happens, for example steps.
    """

    def __init__(self, folder: Path, kind: str = "steps") -> None:
        self._path = folder / f"{kind}-{rank()}"

    def note(self, **values: Any) -> None:
        """Something has happened now."""
        with open(self._path, "a") as file:
            file.write(json.dumps({"at_s": time.monotonic(), **values}) + "\n")


def recorded(folder: Path, kind: str = "steps") -> pd.DataFrame:
    """What all workers have written: one row a line, by rank and time."""
    rows = []
    for path in folder.glob(f"{kind}-*"):
        whole = path.read_text().rpartition("\n")[0].splitlines()  # the last line may be half of one
        rows += [{"rank": int(path.name.rpartition("-")[2]), **json.loads(line)} for line in whole]
    return pd.DataFrame(rows, columns=None if rows else ["rank", "at_s"]).sort_values(["rank", "at_s"], ignore_index=True)
