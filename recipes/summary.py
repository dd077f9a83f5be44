"""The end of a run in numbers: ``summary.json`` for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gossip.algorithm.topology.generators import auto
from lightning_gossip.strategies import DecentralizedStrategy
from recipes.record import RunRecord

SUMMARY = "summary.json"
OF_WORKER = (
    *("rank", "steps", "samples", "exchanges", "bytes_sent"),
    *("staleness_mean", "staleness_p95", "staleness_max", "dropped", "busy_s", "wait_s"),
)

_ALSO_TESTED = {
    "test_bpc": ("bits per character of the test text", ".3f"),
    "test_perplexity": ("perplexity of the test text, of a byte", ".3f"),
}


def name_of(strategy: Strategy) -> str:
    """What a strategy is called on the command line."""
    if isinstance(strategy, DecentralizedStrategy):
        return strategy.name
    return "ddp" if type(strategy) is DDPStrategy else type(strategy).__name__


def summarize(record: RunRecord, *, strategy: Strategy, tested: Mapping[str, float]) -> dict[str, Any]:
    """The run as one JSON object; null where the strategy has no such thing.

    Args:
        record: of the fit.
        strategy: that it ran with.
        tested: what the recipe logged in the test of the mean model, by name: ``test_acc`` in [0, 1], and others.
    """
    report = record.report or {}
    reported = {worker["rank"]: worker for worker in report.get("workers", [])}
    samples, seconds = sum(worker.samples for worker in record.workers), record.train_s - record.before_s
    islands = getattr(strategy, "islands", None)  # the report has one line each, with the sums of their ranks
    members = list(reported) if islands is not None and reported else [worker.rank for worker in record.workers]
    workers = []
    for member in members:
        worker = record.workers[member]
        own = {"rank": worker.rank, "steps": worker.steps, "samples": worker.samples, "busy_s": worker.busy_s}
        own.update(reported.get(member, {}))
        workers.append({name: own.get(name) for name in OF_WORKER})
    topology = getattr(strategy, "topology", None)
    if topology == "auto":
        topology = auto(len(members))
    return {
        "strategy": name_of(strategy),
        "topology": getattr(topology, "name", topology),
        "world_size": len(record.workers),
        "island": 1 if islands is None else islands.size,
        "epochs": len(record.epochs),
        "train_loss": record.epochs[-1].get("train_loss") if record.epochs else None,
        **{name: float(value) for name, value in tested.items()},
        "train_s": record.train_s,
        "samples_per_s": samples / seconds if seconds > 0 else None,
        "consensus_distance": report.get("consensus_distance"),
        "period_mean": _of_first(reported, "period_mean"),
        "averagings": _of_first(reported, "averagings"),
        "collectives_in_training": record.collectives,
        "workers": workers,
    }


def _of_first(reported: dict[int, dict[str, Any]], name: str) -> Any:
    """What is the same on all workers."""
    return reported[0].get(name) if reported else None


def save(summary: dict[str, Any], folder: Path) -> None:
    """Write ``summary.json``."""
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def show(summary: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print the run as two tables.

    Args:
        summary: of :func:`summarize`.
        folder: where the run's files are; printed below.
        console: where to print; standard output if None.
    """
    console = console or Console()
    console.print()
    console.print(_workers_table(summary["workers"], what="Workers" if summary["island"] == 1 else "Islands"))
    console.print(_run_table(summary))
    console.print(f"Everything else is in [bold]{folder}[/bold]", soft_wrap=True)


def _workers_table(workers: list[dict[str, Any]], *, what: str) -> Table:
    table = Table(title=what, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("rank", "steps", "samples", "exchanges", "sent", "staleness", "p95", "max", "busy", "waited"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        sent = worker["bytes_sent"]
        table.add_row(
            str(worker["rank"]),
            str(worker["steps"]),
            str(worker["samples"]),
            text(worker["exchanges"], "d"),
            text(None if sent is None else sent / 1e6, ".1f", " MB"),
            text(worker["staleness_mean"], ".2f"),
            text(worker["staleness_p95"], ".0f"),
            text(worker["staleness_max"], "d"),
            text(worker["busy_s"], ".1f", " s"),
            text(worker["wait_s"], ".1f", " s"),
        )
    return table


def _run_table(summary: dict[str, Any]) -> Table:
    topology = summary["topology"]
    what = summary["strategy"] if topology is None else f"{summary['strategy']} on {topology}"
    title = f"{what}, {summary['world_size']} workers"
    if summary["island"] > 1:
        title += f" in islands of {summary['island']}"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=box.SIMPLE)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("test accuracy of the mean model", text(summary["test_acc"], ".4f"))
    for name, (words, form) in _ALSO_TESTED.items():
        if name in summary:
            table.add_row(words, text(summary[name], form))
    table.add_row("training time", text(summary["train_s"], ".1f", " s"))
    table.add_row("samples a second", text(summary["samples_per_s"], ".0f"))
    table.add_row("consensus distance before the last average", text(summary["consensus_distance"], ".3g"))
    if summary["averagings"] is not None:
        table.add_row("averagings", f"{summary['averagings']}, one in {text(summary['period_mean'], '.1f')} steps")
    dropped = sum(worker["dropped"] or 0 for worker in summary["workers"])
    if dropped:
        table.add_row("updates dropped as too stale", str(dropped))
    table.add_row("collectives inside epochs", text(summary["collectives_in_training"], "d"))
    return table


def text(value: Any, form: str, unit: str = "") -> str:
    """A cell of a table; a dash for None."""
    return "–" if value is None else f"{value:{form}}{unit}"
