"""Timelines as a trace that https://ui.perfetto.dev and chrome://tracing open: a process a worker, a track a thread of it.

The format is Chrome's Trace Event Format: complete events ("ph": "X") with times in microseconds, named by metadata ("M").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRACKS = {"exchange": "exchanges"}  # by activity: what goes on beside training
_TRAINING = "training"

Span = tuple[str, float, float, int | None]


def chrome_trace(workers: Mapping[int, Iterable[Span]]) -> dict[str, Any]:
    """The trace of several workers.

    Args:
        workers: by rank, what each did: activity, beginning and end in seconds of one clock, peer of an exchange or None.

    >>> trace = chrome_trace({0: [("compute", 10.0, 10.5, None), ("exchange", 10.1, 10.2, 1)]})
    >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    [('compute', 0.0, 500000.0), ('exchange with 1', 100000.0, 100000.0)]
    """
    spans = {rank: sorted(intervals, key=lambda span: span[1]) for rank, intervals in workers.items()}
    began_s = min((intervals[0][1] for intervals in spans.values() if intervals), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, intervals in sorted(spans.items()):
        numbers = {name: number for number, name in enumerate([_TRAINING, *TRACKS.values()])}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            for name, number in numbers.items()
        ]
        for activity, start_s, end_s, peer in intervals:
            event: dict[str, Any] = {
                "ph": "X",
                "name": activity if peer is None else f"{activity} with {peer}",
                "cat": activity,
                "pid": rank,
                "tid": numbers[TRACKS.get(activity, _TRAINING)],
                "ts": round(1e6 * (start_s - began_s), 3),
                "dur": round(1e6 * (end_s - start_s), 3),
            }
            events.append(event if peer is None else {**event, "args": {"peer": peer}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(workers: Mapping[int, Iterable[Span]], path: str | os.PathLike[str]) -> Path:
    """Write :func:`chrome_trace` of these workers as JSON; returns the file."""
    file = Path(path)
    file.write_text(json.dumps(chrome_trace(workers)), encoding="utf-8")
    return file
