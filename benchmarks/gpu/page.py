"""The results as tables: on the screen, and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, select_autoescape

from benchmarks.harness import print_table


@dataclass(frozen=True)
class Table:
    """Args:
    title: what it shows.
    columns: the first one names the row.
    rows: of text.
    caption: what a reader needs to read it.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""


def tables(results: dict[str, Any]) -> list[Table]:
    """Those that the results have something for."""
    found = []
    if rows := results.get("overhead"):
        found.append(_overhead(rows))
    if strategies := results.get("training"):
        found.append(_training(strategies))
    if "recovery" in results:
        found.append(_recovery(results["recovery"]))
    if "trace" in results:
        found.append(_trace(results["trace"]))
    if "suite" in results:
        found.append(_suite(results["suite"]))
    return found


def _overhead(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "",
        "step, ms",
        "with gossip",
        "longer by, copies",
        "boundary, ms",
        "95th",
        "in copies",
        "host ahead",
        "exchanges a step",
    )
    cells = [
        (
            f"{row['precision']}, {'pinned' if row['pinned'] else 'pageable'} batches",
            f"{row['plain']['step_s'] * 1e3:.2f}",
            f"{row['gossip']['step_s'] * 1e3:.2f}",
            f"{row['copies']:.2f}",
            f"{row['gossip']['boundary_s'] * 1e3:.2f}",
            f"{row['gossip']['boundary_p95_s'] * 1e3:.2f}",
            f"{row['boundary_copies']:.2f}",
            f"{row['gossip']['ahead']:g}",
            f"{row['exchanges_per_step']:.2f}",
        )
        for row in rows
    ]
    first = rows[0]
    caption = (
        f"Two workers. The published model has {first['model_mb']:.1f} MB, and a copy of it from the device to the host takes"
        f" {first['copy_s'] * 1e3:.2f} ms. Boundary: seconds of the host in it. Ahead: steps launched and not done."
    )
    return Table("What a step boundary costs", columns, cells, caption)


def _training(strategies: dict[str, dict[str, Any]]) -> Table:
    columns = ("", "images/s", "loss, first and last", "exchanges a step", "staleness", "MB sent", "waited, s", "GiB")
    cells = []
    for name, result in strategies.items():
        reports = result["reports"]
        steps = sum(report["steps"] for report in reports)
        exchanges = [report["exchanges"] for report in reports if report["exchanges"] is not None]
        staleness = [report["staleness_mean"] for report in reports if report["staleness_mean"] is not None]
        cells.append(
            (
                name,
                f"{result['images_per_s']:.0f}",
                f"{result['first_loss']:.3f}, {result['last_loss']:.3f}",
                f"{sum(exchanges) / steps:.2f}" if exchanges else "",
                f"{sum(staleness) / len(staleness):.2f}" if staleness else "",
                f"{sum(report['bytes_sent'] or 0 for report in reports) / 1e6:.1f}" if reports else "",
                f"{max(report['wait_s'] for report in reports):.2f}" if reports else "",
                f"{result['memory_gib']:.2f}",
            )
        )
    return Table(
        "Training with Lightning", columns, cells, "Of all workers together, the first epoch left out; waited: the longest."
    )


def _recovery(found: dict[str, Any]) -> Table:
    rows = [
        ("from the kill to the others' next step, s", f"{found['next_step_s']:.2f}"),
        ("from the kill to its first step after its return, s", f"{found['back_s']:.2f}"),
        ("samples of whole epochs that nobody trained on", str(found["samples_missing"])),
        ("workers at the end", str(found["workers_at_the_end"])),
        ("all models equal at the end", "yes" if found["models_equal"] else "no"),
    ]
    return Table("One of three workers killed, and started again", ("", ""), rows)


def _trace(found: dict[str, Any]) -> Table:
    share = found["overlap"]
    rows = [
        ("copies of the model", str(found["copies"])),
        ("their time, ms", f"{found['copies_s'] * 1e3:.2f}"),
        ("of it while the device computed", "" if share is None else f"{share:.2f}"),
    ]
    return Table("Copies beside computing", ("", ""), rows, f"From {found['trace']}: open it at ui.perfetto.dev.")


def _suite(found: dict[str, Any]) -> Table:
    rows = [
        *((name, "failed", message) for name, message in found["failed"].items()),
        *((name, "skipped", reason) for name, reason in found["skipped"].items()),
        *((name, "passed", "") for name in found["passed"]),
    ]
    return Table("Tests marked gpu", ("", "", ""), rows)


def show(results: dict[str, Any]) -> None:
    """On the screen."""
    for table in tables(results):
        print_table(table.title, table.columns, table.rows, caption=table.caption)


def write(path: Path, page: Path) -> None:
    """Write a page.

    Args:
        path: of the results.
        page: where to.
    """
    results = json.loads(path.read_text())
    template = Path(__file__).with_name("page.html").read_text()
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True)
    page.write_text(environment.from_string(template).render(results=results, tables=tables(results)))
