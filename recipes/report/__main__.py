"""The command."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.commands import one_sentence
from recipes.report import groups, page, ranking, runs
from recipes.report.ranking import Ranking
from recipes.report.units import Unit, digits, percent, unit_of_bytes

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
    with one_sentence():
        jobs, unfinished = runs.load(chosen.folders)
        together = groups.group(jobs)
        rankings = ranking.rank(together, baseline=chosen.baseline, target=chosen.target)
    files = page.write(together, rankings, unfinished, path)
    console = Console()
    for each in rankings:
        console.print(table(each, page.time_unit(together)))
    if unfinished:
        console.print(
            f"{len(unfinished)} more without a result: {', '.join(job.folder.name for job in unfinished)}", markup=False
        )
    console.print(f"The page is {files[0]}, its {len(files) - 1} pictures lie beside it.", markup=False, soft_wrap=True)


def table(of: Ranking, unit: Unit) -> Table:
    """The ranking for a terminal."""
    titled = Table(title=Text(f"Ranking, {of.recipe}"), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    titled.add_column("strategy", overflow="fold")
    goal = "to target" if of.target is None else f"to {percent(of.target, 0)}"
    sent = unit_of_bytes(value for row in of.rows if (value := row.group.of_workers("bytes_sent")) is not None)
    for heading in ("test [%]", f"time [{unit.name}]", "×", goal, "×", f"sent [{sent.name}]"):
        titled.add_column(Text(heading), justify="right")
    for row in of.rows:
        titled.add_row(
            Text(row.group.label),
            f"{100 * (row.group.mean('test_acc') or 0.0):.2f}",
            unit.number(row.group.mean("train_s")),
            digits(row.speedup),
            "not reached" if row.reached is None and of.target is not None else unit.number(row.reached),
            digits(row.speedup_to_target),
            sent.number(row.group.of_workers("bytes_sent")),
        )
    parts = of.parts()
    baseline = parts[0].rows[0].baseline.label if len(parts) == 1 else "the baseline with most of the same options"
    titled.caption = Text(f"×: speed-up against {baseline}; sent: by a worker")
    titled.caption_justify = "left"
    return titled


def _path(out: Path | None, first: Path) -> Path:
    if out is None:
        return first / _PAGE
    return out / _PAGE if out.is_dir() or out.suffix not in (".html", ".htm") else out


if __name__ == "__main__":
    main()
