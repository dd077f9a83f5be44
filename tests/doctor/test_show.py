"""Tables and pictures of made-up visits."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from lightning_gossip.doctor import picture
from lightning_gossip.doctor.report import AllReduce, Report
from lightning_gossip.doctor.show import show
from lightning_gossip.doctor.verdicts import findings
from tests.doctor.reports import healthy, with_links


def shown(report: Report, width: int = 120) -> str:
    text = io.StringIO()
    show(report, findings(report), Console(file=text, width=width))
    return text.getvalue()


def test_a_page_has_every_part_and_ends_with_the_verdict() -> None:
    report = with_links(healthy(), [1, 2], there=None, back=None, latency_s=None, failed="connection refused", phase="connect")
    report.all_reduce = [AllReduce(nbytes=1 << 20, seconds=0.01)]
    report.left_out = ["No all-reduce of 64 MiB was made [too slow]."]
    text = shown(report)
    for part in ("gpu03", "10.0.0.1", "eth0, 1,000 Mb/s", "110 MB/s", "50 µs", "failed", "all-reduce of 1 MiB", "[too slow]"):
        assert part in text
    assert "Problem: No connection between ranks 1 and 2: connection refused." in text
    assert text.rstrip().endswith("1 problem (4 workers on 4 hosts, 12 s).")
    assert shown(healthy()).rstrip().endswith("No problem found (4 workers on 4 hosts, 12 s).")


def test_of_many_workers_each_has_a_row_in_place_of_a_matrix() -> None:
    text = shown(with_links(healthy(20), [7], there=1e6, back=1e6))
    assert "Links of each worker: median, and worst" in text
    assert "Bandwidth, from row to column" not in text


def test_the_picture_needs_links_and_takes_failed_ones(tmp_path: Path) -> None:
    path = tmp_path / picture.FIGURE
    assert picture.draw(with_links(healthy(5), [3], there=None, back=None, failed="refused", phase="connect"), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    alone = healthy(1)
    assert not picture.draw(alone, tmp_path / "none.png")
    assert shown(alone)
