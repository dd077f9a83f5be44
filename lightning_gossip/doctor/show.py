"""What a visit has found, as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_gossip.doctor.clocks import offsets
from lightning_gossip.doctor.matrices import matrix
from lightning_gossip.doctor.report import Report
from lightning_gossip.doctor.verdicts import Finding
from lightning_gossip.doctor.words import at_rate, duration, size

_MATRIX = 16  # workers whose pairs fit on a page


def show(report: Report, found: Sequence[Finding], console: Console) -> None:
    """Print all of it; the verdict last, where a reader looks."""
    for table in (_workers(report), *_pairs(report), _together(report), _copies(report), _training(report)):
        if table is not None and table.row_count:
            console.print(table)
    for sentence in report.left_out:
        console.print(escape(sentence), soft_wrap=True)
    console.print()
    for finding in found:
        colour = "red" if finding.grave else "yellow"
        console.print(f"[{colour}]{'Problem' if finding.grave else 'Note'}[/]: {escape(finding.sentence)}", soft_wrap=True)
        console.print(f"  {escape(finding.advice)}", soft_wrap=True)
    problems = sum(finding.grave for finding in found)
    hosts = len(report.hosts)
    what = f"{len(report.workers)} workers on {hosts} host{'s' if hosts != 1 else ''}, {duration(report.seconds)}"
    if problems:
        console.print(f"[bold red]{problems} problem{'s' if problems > 1 else ''}[/] ({what}).")
    else:
        console.print(f"[bold green]No problem found[/] ({what}).")


def _workers(report: Report) -> Table:
    table = _table("Workers", "rank", "host", "Gloo listens at", "interface", "MTU", "open files", "clock", "device")
    clocks = offsets(report.world_size, report.links)
    for worker in report.workers:
        used, clock = worker.interface, clocks[worker.rank]
        name = worker.listening.interface or "?"
        table.add_row(
            str(worker.rank),
            escape(worker.hostname),
            worker.listening.address,
            f"{name}, {used.mbit:,} Mb/s" if used is not None and used.mbit else name,
            "?" if used is None else str(used.mtu),
            "no limit" if worker.files is None else f"{worker.files:,}",
            "?" if clock is None else _clock(*clock),
            worker.gpu or f"{worker.cores} cores",
        )
    versions = report.workers[0].versions
    table.caption = ", ".join(f"{name} {version}" for name, version in versions.items()) + " on rank 0"
    return table


def _clock(ahead_s: float, error_s: float) -> str:
    if error_s == 0.0:
        return "0"
    return f"{'+' if ahead_s >= 0 else '−'}{duration(abs(ahead_s))} ± {duration(error_s)}"


def _pairs(report: Report) -> list[Table]:
    if not report.links:
        return []
    if report.world_size > _MATRIX:
        return [_by_worker(report)]
    rates = matrix(report, lambda link: (link.there, link.back))
    latencies = matrix(report, lambda link: (link.latency_s, link.latency_s))
    failed = {(link.i, link.j) for link in report.links if link.failed}
    return [
        _matrix("Bandwidth, from row to column", rates, lambda rate: at_rate(rate), failed),
        _matrix("Latency, one way", latencies, duration, failed),
    ]


def _matrix(title: str, values: NDArray[np.float64], word: Callable[[float], str], failed: set[tuple[int, int]]) -> Table:
    table = _table(title, "rank", *map(str, range(len(values))))
    for row, known in enumerate(values):
        cells = []
        for column, value in enumerate(known):
            broken = (min(row, column), max(row, column)) in failed
            cells.append("" if row == column else "[red]failed[/]" if np.isnan(value) and broken else _or_dot(value, word))
        table.add_row(str(row), *cells)
    return table


def _or_dot(value: float, word: Callable[[float], str]) -> str:
    return "·" if np.isnan(value) else word(float(value))


def _by_worker(report: Report) -> Table:
    rates = matrix(report, lambda link: (link.there, link.back))
    latencies = matrix(report, lambda link: (link.latency_s, link.latency_s))
    table = _table(
        "Links of each worker: median, and worst", "rank", "sends", "worst", "receives", "worst", "latency", "worst", "failed"
    )
    for worker in report.workers:
        rank = worker.rank
        failed = sum(1 for link in report.links if link.failed and rank in (link.i, link.j))
        cells = []
        for values, worst, word in (
            (rates[rank], np.min, at_rate),
            (rates[:, rank], np.min, at_rate),
            (latencies[rank], np.max, duration),
        ):
            known = values[~np.isnan(values)]
            cells += [word(float(np.median(known))), word(float(worst(known)))] if known.size else ["·", "·"]
        table.add_row(str(rank), *cells, str(failed) if failed else "")
    return table


def _together(report: Report) -> Table:
    table = _table("Together", "what", "seconds", "")
    if report.store:
        medians = {rank: calls.median_s for rank, calls in report.store.items()}
        worst = max(medians, key=lambda rank: medians[rank])
        tail = max(calls.p95_s for calls in report.store.values())
        note = f"slowest of all ranks: {worst}; 95 % below {duration(tail)}"
        table.add_row("a call to the store, all calling", duration(medians[worst]), note)
    n = report.world_size
    for one in report.all_reduce:
        rate = 2 * (n - 1) / n * one.nbytes / one.seconds
        table.add_row(f"all-reduce of {size(one.nbytes)} (Gloo)", duration(one.seconds), f"{at_rate(rate)} sent by each worker")
    return table


def _copies(report: Report) -> Table | None:
    if not report.copies:
        return None
    table = _table("GPU copies", "rank", "to device", "from device", "pageable", "on device", "to pin 64 MiB")
    for rank, one in report.copies.items():
        rates = (one.to_device, one.from_device, one.pageable, one.on_device)
        table.add_row(str(rank), *map(at_rate, rates), duration(one.pin_s))
    return table


def _training(report: Report) -> Table | None:
    if not report.training:
        return None
    table = _table("The model", "rank", "median step", "longest", "steps timed", "batch")
    for rank, one in report.training.items():
        batch = "?" if one.batch_size is None else str(one.batch_size)
        times = sorted(one.step_s)
        table.add_row(str(rank), duration(float(np.median(times))), duration(times[-1]), str(len(times)), batch)
    first = next(iter(report.training.values()))
    told = [f"{first.parameters_bytes / 1e6:.3g} MB", first.optimizer]
    if report.landscape is not None:
        told.append(f"largest curvature {report.landscape.eigenvalues[0]:.3g}")
    table.caption = ", ".join(told)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("host", "what", "", "interface", "device") else "right")
    return table
