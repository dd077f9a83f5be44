"""The page: tables, pictures and words, put into page.html.

Jinja escapes whatever comes from a run. It is there because PyTorch needs it.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipes.plots import STYLE
from recipes.report import bars, curves
from recipes.report.figures import Picture
from recipes.report.groups import Group
from recipes.report.ranking import Ranking
from recipes.report.runs import Job, Unfinished
from recipes.report.sentences import headline, what_was_run
from recipes.report.tables import speed_table, traffic_table
from recipes.report.units import Unit, percent, unit_of_time

_DPI = 150  # sharp where the page shows a picture at half its size


def write(groups: list[Group], rankings: list[Ranking], unfinished: list[Unfinished], path: Path) -> list[Path]:
    """Write the page, and its pictures once more as files beside it.

    Args:
        groups: all of them.
        rankings: theirs, one a recipe.
        unfinished: runs without a result.
        path: of the page; its folder is made.

    Returns:
        The files, the page first.
    """
    unit = time_unit(groups)
    listed = [row.group for ranking in rankings for row in ranking.rows]
    pictures = draw(listed, rankings, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path]
    encoded = []
    for picture in pictures:
        png = _png(picture)
        files.append(path.with_name(f"{path.stem}_{picture.name}.png"))
        files[-1].write_bytes(png)
        encoded.append((picture, base64.b64encode(png).decode("ascii")))
    jobs = [job for group in groups for job in group.jobs]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path.write_text(
        environment.get_template("page.html").render(
            summary=what_was_run(groups),
            headlines=[[headline(part, unit) for part in ranking.parts()] for ranking in rankings],
            rankings=[(ranking, speed_table(ranking, unit), traffic_table(ranking)) for ranking in rankings],
            baselines=list(dict.fromkeys(row.baseline.label for ranking in rankings for row in ranking.rows)),
            pictures=encoded,
            unfinished=unfinished,
            runs=_runs_table(groups, unit),
            common=_common(jobs),
            kept=sum(bool(job.config) for job in jobs),
            jobs=jobs,
            recipes=[ranking.recipe for ranking in rankings],
        ),
        encoding="utf-8",
    )
    return files


def draw(groups: list[Group], rankings: list[Ranking], unit: Unit) -> list[Picture]:
    """Every picture for which there is something to show.

    Args:
        groups: in the order in which they are listed.
        rankings: theirs, for the targets.
        unit: of the time axes.
    """
    targets = sorted({ranking.target for ranking in rankings if ranking.target is not None})
    with matplotlib.rc_context(STYLE):
        found = [
            curves.accuracy(groups, "time", unit, targets),
            curves.accuracy(groups, "samples", unit, targets),
            curves.loss(groups, unit),
            bars.steps(groups),
            bars.waiting(groups),
            bars.bytes_sent(groups),
            bars.staleness(groups),
        ]
    return [picture for picture in found if picture is not None]


def time_unit(groups: list[Group]) -> Unit:
    """One for the whole page."""
    return unit_of_time(value for group in groups for value in group.values("train_s"))


def _runs_table(groups: list[Group], unit: Unit) -> list[tuple[Job, Group, str, str, str]]:
    return [
        (job, group, percent(job.summary["test_acc"], 2), unit.text(job.summary["train_s"]), " ".join(_said(job)))
        for group in groups
        for job in group.jobs
    ]


def _said(job: Job) -> list[str]:
    return [f"{name}={value}" for name, value in job.options.items()]


def _common(jobs: list[Job]) -> dict[str, str]:
    """The part of the configuration that all runs share."""
    kept = [job.config for job in jobs if job.config]
    if not kept:
        return {}
    return {name: value for name, value in kept[0].items() if all(config.get(name) == value for config in kept)}


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(file, format="png", dpi=_DPI, metadata={"Title": picture.title})
    return file.getvalue()
