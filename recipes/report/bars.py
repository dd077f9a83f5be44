"""What the workers did, one row a group: steps, waiting, bytes, staleness."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recipes.report.figures import WIDTH, Picture, colour, safe
from recipes.report.groups import Group
from recipes.report.units import digits, percent, unit_of_bytes

_ROW = 0.34  # inches, of a bar


def steps(groups: list[Group]) -> Picture:
    """Optimizer steps of each worker."""
    most = max(len(job.workers) for group in groups for job in group.jobs)
    figure = Figure(figsize=(WIDTH, 1.0 + len(groups) * min(max(0.16 * most, 0.5), 1.2)), layout="constrained")
    axes = figure.subplots()
    said = []
    for row, group in enumerate(groups):
        counts = _by_rank(group, "steps")
        height = 0.8 / len(counts)
        for rank, value in enumerate(counts):
            axes.barh(row - 0.4 + (rank + 0.5) * height, value, height * 0.88, color=colour(group))
        said.append(f"{group.label} {min(counts):,.0f} to {max(counts):,.0f}")
    _rows(axes, groups, "optimizer steps of a worker")
    return Picture(
        name="steps",
        title="Steps per worker",
        caption="One bar a worker, rank 0 at the top; mean over the seeds. "
        "Where the bars of a strategy are unequal, its fast workers took over work of the slow ones.",
        alt=f"Bars of the steps of each worker. Fewest and most: {', '.join(said)}.",
        figure=figure,
    )


def waiting(groups: list[Group]) -> Picture | None:
    """Share of the training time."""
    return _bars(
        groups,
        lambda group: None if group.waiting is None else 100 * group.waiting,
        name="waiting",
        title="Share of the time spent waiting",
        axis="of the training time [%]",
        caption="Seconds that a worker stood still until the last one came, mean over workers and seeds.",
        text=lambda value: percent(value / 100),
    )


def bytes_sent(groups: list[Group]) -> Picture | None:
    """By one worker."""
    unit = unit_of_bytes(value for group in groups if (value := group.of_workers("bytes_sent")) is not None)
    return _bars(
        groups,
        lambda group: group.of_workers("bytes_sent"),
        name="bytes",
        title="Bytes sent by a worker",
        axis=f"sent in the whole run [{unit.name}]",
        caption="Payload that one worker sent in the whole run, mean over workers and seeds.",
        text=unit.text,
        scale=unit.size,
    )


def _bars(
    groups: list[Group],
    value_of: Callable[[Group], float | None],
    *,
    name: str,
    title: str,
    axis: str,
    caption: str,
    text: Callable[[float], str],
    scale: float = 1.0,
) -> Picture | None:
    values = [(group, value) for group in groups if (value := value_of(group)) is not None]
    if not values:
        return None
    figure = Figure(figsize=(WIDTH, 1.0 + _ROW * 1.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    for row, (group, value) in enumerate(values):
        axes.barh(row, value / scale, 0.62, color=colour(group))
        axes.annotate(text(value), (value / scale, row), (4, 0), textcoords="offset points", va="center")
    _rows(axes, [group for group, _ in values], axis)
    axes.set_xlim(0.0, 1.18 * max(value / scale for _, value in values) or 1.0)
    said = ", ".join(f"{group.label} {text(value)}" for group, value in values)
    return Picture(name, title, caption + _missing(groups, [group for group, _ in values]), f"{title}: {said}.", figure)


def staleness(groups: list[Group]) -> Picture | None:
    """Mean, 95th percentile and largest, on one line a group."""
    known = [(group, values) for group in groups if (values := group.staleness) is not None]
    if not known:
        return None
    figure = Figure(figsize=(WIDTH, 1.3 + _ROW * 1.6 * len(known)), layout="constrained")
    axes = figure.subplots()
    markers = {"mean": "o", "95th percentile": "D", "largest": "|"}
    for row, (group, values) in enumerate(known):
        axes.plot([0.0, values[2]], [row, row], color=colour(group), lw=2.0, alpha=0.4)
        for marker, value in zip(markers.values(), values, strict=True):
            axes.plot(
                [value], [row], marker, color=colour(group), ms=11 if marker == "|" else 7, mew=2.5 if marker == "|" else 1
            )
    _rows(axes, [group for group, _ in known], "changes of the model between reading it and updating it")
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.05 * max(values[2] for _, values in known) or 1.0)
    handles = [
        Line2D([], [], color="#555555", ls="", marker=marker, ms=11 if marker == "|" else 7, label=label)
        for label, marker in markers.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    said = [f"{group.label} mean {digits(m)}, 95th percentile {digits(p)}, largest {digits(x)}" for group, (m, p, x) in known]
    return Picture(
        name="staleness",
        title="Staleness of the updates",
        caption="By how many changes the model was out of date when a step updated it."
        + _missing(groups, [group for group, _ in known]),
        alt=f"Staleness: {'; '.join(said)}.",
        figure=figure,
    )


def _missing(groups: list[Group], known: list[Group]) -> str:
    names = [group.label for group in groups if group not in known]
    return f" Not counted by {'; '.join(names)}." if names else ""


def _folded(label: str) -> str:
    return textwrap.fill(label, 28, break_long_words=max(map(len, label.split())) > 40, break_on_hyphens=False)


def _by_rank(group: Group, name: str) -> list[float]:
    ranks = range(max(len(job.workers) for job in group.jobs))
    return [statistics.fmean(job.workers[r][name] for job in group.jobs if r < len(job.workers)) for r in ranks]


def _rows(axes: Axes, groups: list[Group], label: str) -> None:
    axes.set_yticks(range(len(groups)), [safe(_folded(group.label)) for group in groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
