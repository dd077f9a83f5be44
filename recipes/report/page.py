"""The page: tables, pictures and words, put into page.html.

Jinja escapes whatever comes from a run. It is there because PyTorch needs it.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import matplotlib
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipes.plots import STYLE
from recipes.report import bars, curves, units
from recipes.report.curves import Picture
from recipes.report.runs import Runs
from recipes.report.sentences import headline, what_was_run
from recipes.report.units import Unit

_DPI = 150  # sharp where the page shows a picture at half its size


def write(runs: Runs, ranked: pd.DataFrame, unit: Unit, path: Path) -> list[Path]:
    """Write the page, and its pictures once more as files beside it.

    Args:
        runs: with the labels of their groups.
        ranked: the groups.
        unit: of times.
        path: of the page; its folder is made.

    Returns:
        The files, the page first.
    """
    pictures = draw(runs, ranked, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path]
    encoded = []
    for picture in pictures:
        png = _png(picture)
        files.append(path.with_name(f"{path.stem}_{picture.name}.png"))
        files[-1].write_bytes(png)
        encoded.append((picture, base64.b64encode(png).decode("ascii")))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        {name: getattr(units, name) for name in ("digits", "filesize", "percent", "points", "spread", "times")}
    )
    environment.tests["known"] = pd.notna
    recipes = ranked.groupby("recipe", sort=False)
    config = pd.DataFrame([each for each in runs.table.config if each])
    path.write_text(
        environment.get_template("page.html").render(
            summary=what_was_run(runs.table),
            headlines=[
                (recipe, headline(rows, unit)) for (recipe, _), rows in ranked.groupby(["recipe", "baseline"], sort=False)
            ],
            recipes={recipe: list(rows.itertuples()) for recipe, rows in recipes},
            baselines=ranked.baseline.unique().tolist(),
            pictures=encoded,
            unfinished=list(runs.unfinished.itertuples()),
            runs=list(runs.table.itertuples()),
            common={} if config.empty else config.loc[:, config.nunique(dropna=False) == 1].iloc[0].to_dict(),
            kept=len(config),
            unit=unit,
        ),
        encoding="utf-8",
    )
    return files


def draw(runs: Runs, ranked: pd.DataFrame, unit: Unit) -> list[Picture]:
    """Every picture for which there is something to show.

    Args:
        runs: with the labels of their groups.
        ranked: the groups, in the order in which they are listed.
        unit: of the time axes.
    """
    targets = sorted(ranked.target.dropna().unique())
    with matplotlib.rc_context(STYLE):
        found = [
            curves.accuracy(ranked, runs.epochs, "time", unit, targets),
            curves.accuracy(ranked, runs.epochs, "samples", unit, targets),
            curves.bits(ranked, runs.epochs, unit),
            curves.loss(ranked, runs.epochs, unit),
            bars.steps(ranked, runs.workers),
            bars.waiting(ranked),
            bars.bytes_sent(ranked),
            bars.staleness(ranked),
        ]
    return [picture for picture in found if picture is not None]


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(file, format="png", dpi=_DPI, metadata={"Title": picture.title})
    return file.getvalue()
