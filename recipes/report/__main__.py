"""The command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.commands import one_sentence
from recipes.report import groups, page, runs
from recipes.report.units import UNKNOWN, Unit, digits, filesize, percent, unit_of_time

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
    with one_sentence():
        found = groups.group(runs.load(chosen.folders))
        ranked = groups.rank(found, baseline=chosen.baseline, target=chosen.target)
    unit = unit_of_time(found.table.train_s.max())
    files = page.write(found, ranked, unit, _path(chosen.out, chosen.folders[0]))
    console = Console()
    for _, rows in ranked.groupby("recipe", sort=False):
        console.print(table(rows, unit))
    if names := [folder.name for folder in found.unfinished.folder]:
        console.print(f"{len(names)} more without a result: {', '.join(names)}", markup=False)
    console.print(f"The page is {files[0]}, its {len(files) - 1} pictures lie beside it.", markup=False, soft_wrap=True)


def table(rows: pd.DataFrame, unit: Unit) -> Table:
    """The ranking of one recipe for a terminal."""
    title = Text(f"Ranking, {rows.recipe.iloc[0]}")
    titled = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    titled.add_column("strategy", overflow="fold")
    target = rows.target.iloc[0]
    goal = "to target" if pd.isna(target) else f"to {percent(target, 0)}"
    for heading in ("test [%]", f"time [{unit.name}]", "×", goal, "×", "sent"):
        titled.add_column(Text(heading), justify="right")
    for row in rows.itertuples():
        reached = unit.number(row.reached_s)
        titled.add_row(
            Text(row.label),
            f"{100 * row.test_acc:.2f}",
            unit.number(row.train_s),
            digits(row.speedup),
            "not reached" if reached == UNKNOWN and pd.notna(target) else reached,
            digits(row.speedup_to_target),
            filesize(row.bytes_sent),
        )
    baselines = rows.baseline.unique()
    against = baselines[0] if len(baselines) == 1 else "the baseline with most of the same options"
    titled.caption = Text(f"×: speed-up against {against}; sent: by a worker")
    titled.caption_justify = "left"
    return titled


def _path(out: Path | None, first: Path) -> Path:
    if out is None:
        return first / _PAGE
    return out / _PAGE if out.is_dir() or out.suffix not in (".html", ".htm") else out


if __name__ == "__main__":
    main()
