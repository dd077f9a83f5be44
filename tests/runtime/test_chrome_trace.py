"""Timelines as a trace that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_gossip.runtime.chrome_trace import chrome_trace
from lightning_gossip.runtime.clock import Timeline, now_s


def test_each_worker_is_a_process_whose_exchanges_are_beside_its_training() -> None:
    trace = chrome_trace(
        {
            1: [("compute", 5.0, 5.5, None), ("exchange", 5.2, 5.3, 0), ("wait", 5.5, 6.0, None)],
            0: [("exchange", 5.2, 5.3, 1), ("compute", 4.0, 5.0, None)],
        }
    )
    events = trace["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"} == {(0, "worker 0"), (1, "worker 1")}
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in complete] == [
        (0, 0, "compute", 0.0, 1e6),
        (0, 1, "exchange with 1", 1.2e6, 1e5),
        (1, 0, "compute", 1e6, 5e5),
        (1, 1, "exchange with 0", 1.2e6, 1e5),
        (1, 0, "wait", 1.5e6, 5e5),
    ]
    for event in events:  # what the format asks of each, or Perfetto leaves it out
        assert {"ph", "name", "pid"} <= event.keys()
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)


def test_a_workers_own_timeline_can_be_saved(tmp_path: Path) -> None:
    timeline, began_s = Timeline(), now_s()
    timeline.record("compute", began_s, began_s + 0.25)
    events = json.loads(timeline.save(tmp_path / "timeline.json", rank=3).read_text())["traceEvents"]
    assert [(event["pid"], event["dur"]) for event in events if event["ph"] == "X"] == [(3, 250_000.0)]


def test_nothing_done_is_a_trace_too() -> None:
    assert [event["ph"] for event in chrome_trace({0: []})["traceEvents"]] == ["M"] * 4
