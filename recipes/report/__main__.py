"""The command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_gossip import ConfigurationError
from recipes.report import page, ranking, runs
from recipes.report.ranking import Ranking
from recipes.report.units import Unit, percent, times

_PAGE = "report.html"


def main(arguments: list[str] | None = None) -> None:
    """Read the folders, write the page, print the ranking.

    Args:
        arguments: of the command line; the process's own if None.
    """
    parser = argparse.ArgumentParser(prog="python -m recipes.report", description="One HTML page over many runs.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run or of a sweep")
    parser.add_argument("--out", type=Path, help=f"the page, or a folder for it; if not given, {_PAGE} in the first FOLDER")
    parser.add_argument("--baseline", help="strategy that the others are compared with; if not given ddp, or the first")
    parser.add_argument("--target", type=float, help="validation accuracy to which times are taken, for example 0.9")
    chosen = parser.parse_args(arguments)
    path = _path(chosen.out, chosen.folders[0])
    try:
        jobs, unfinished = runs.load(chosen.folders)
        groups = ranking.group(jobs)
        rankings = ranking.rank(groups, baseline=chosen.baseline, target=chosen.target)
    except ConfigurationError as error:
        print(f"ConfigurationError: {error}", file=sys.stderr)
        sys.exit(2)
    files = page.write(groups, rankings, unfinished, path)
    console = Console()
    for each in rankings:
        console.print(table(each, page.time_unit(groups)))
    if unfinished:
        console.print(
            f"{len(unfinished)} more without a result: {', '.join(job.folder.name for job in unfinished)}", markup=False
        )
    console.print(f"The page is {files[0]}, its {len(files) - 1} pictures lie beside it.", markup=False, soft_wrap=True)


def table(of: Ranking, unit: Unit) -> Table:
    """The ranking for a terminal."""
    titled = Table(title=Text(f"Ranking, {of.recipe}"), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    titled.add_column("strategy", overflow="fold")
    target = "–" if of.target is None else percent(of.target)
    for heading in ("test", "time", "speed-up", f"to {target}", "speed-up", "sent"):
        titled.add_column(heading, justify="right")
    for row in of.rows:
        titled.add_row(
            Text(row.group.label),
            percent(row.group.mean("test_acc")),
            unit.text(row.group.mean("train_s")),
            times(row.speedup),
            "not reached" if row.reached is None and of.target is not None else unit.text(row.reached),
            times(row.speedup_to_target),
            times(row.bytes_ratio),
        )
    return titled


def _path(out: Path | None, first: Path) -> Path:
    if out is None:
        return first / _PAGE
    return out / _PAGE if out.is_dir() or out.suffix not in (".html", ".htm") else out


if __name__ == "__main__":
    main()
