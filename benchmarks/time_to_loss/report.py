"""Tables and pictures of the runs that a file has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from benchmarks.harness import axes_of, console, print_table, spread
from benchmarks.time_to_loss.contenders import GRID, KNOWN, REFERENCE
from benchmarks.time_to_loss.results import Entry, Results
from benchmarks.time_to_loss.runs import TUNING_SEED
from benchmarks.time_to_loss.task import SCENARIOS, Condition
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_bytes, all_reduce_s

_HAS_ONE_MODEL = ("ddp", "ddp_bf16", "ddp_powersgd")
_CAPTION = (
    "Virtual hours; GB that a host sends. Half: to the mean of DDP's losses in the middle of its schedule. End: to the mean of"
    " those with which its seeds end, plus their standard deviation; medians of the seeds that come there, in brackets how many"
    " do; below: how many come to the mean minus it. × sooner, × fewer bytes: than DDP."
)

COLUMNS = (
    *("", "lr", "loss at the end", "exch. a step", "hours", "GB"),
    *("half: × sooner", "× fewer", "end: hours", "× sooner", "× fewer", "below"),
)


@dataclass(frozen=True)
class Reached:
    """A loss, when it was there: virtual seconds, steps of a worker, bytes that a host had sent."""

    s: float
    steps: float
    gb: float


@dataclass(frozen=True)
class Targets:
    """What is to be reached.

    Args:
        mean: of the losses with which DDP's seeds end.
        deviation: of these.
        half: mean of its losses in the middle of the schedule.
    """

    mean: float
    deviation: float
    half: float

    @property
    def within(self) -> float:
        """The spread of the seeds above the mean: the aim."""
        return self.mean + self.deviation

    @property
    def below(self) -> float:
        """The spread below it."""
        return self.mean - self.deviation


def reported(results: Results, **wanted: Any) -> list[Entry]:
    """Runs of the seeds that are reported."""
    return [run for run in results.of(**wanted) if run["seed"] != TUNING_SEED]


def targets(results: Results, hosts: int) -> Targets | None:
    """Of DDP's runs, which are the same on all links; None with fewer than two."""
    curves = {run["seed"]: run["curve"] for run in reported(results, contender=REFERENCE, hosts=hosts, length=1.0)}
    if len(curves) < 2:
        return None
    finals = [curve["loss"][-1] for curve in curves.values()]
    halves = [float(np.interp(curve["steps"][-1] / 2, curve["steps"], curve["loss"])) for curve in curves.values()]
    return Targets(statistics.fmean(finals), statistics.stdev(finals), statistics.fmean(halves))


def reached(run: Entry, target: float, *, model_bytes: int) -> Reached | None:
    """When a run's mean model was so good, in a line between two points; None if it never was.

    Where the models differ from worker to worker the mean is nobody's: the seconds and bytes of one all-reduce are added.
    """
    curve = run["curve"]
    losses = curve["loss"]
    place = next((number for number, loss in enumerate(losses) if loss <= target), None)
    if place is None:
        return None
    share = 0.0 if place == 0 else (losses[place - 1] - target) / (losses[place - 1] - losses[place])
    values = [_between(curve[name], place, share) for name in ("s", "steps", "gb")]
    if run["contender"] not in _HAS_ONE_MODEL and place < len(losses) - 1:
        condition = Condition(run["hosts"], run["rate_mbit"], run["scenario"])
        values[0] += all_reduce_s(condition.links, range(run["hosts"]), model_bytes)
        values[2] += all_reduce_bytes(run["hosts"], model_bytes) / 1e9
    return Reached(*values)


def _between(values: Sequence[float], place: int, share: float) -> float:
    return values[0] if place == 0 else values[place - 1] + share * (values[place] - values[place - 1])


@dataclass(frozen=True)
class Row:
    """A contender under one condition.

    Args:
        contender: its name.
        lr: its learning rate.
        length: samples over DDP's.
        runs: one a seed.
        hits: of those that reach the target.
        half: of those that reach DDP's loss half-way.
        below: how many reach the mean minus the spread.
    """

    contender: str
    lr: float
    length: float
    runs: list[Entry]
    hits: list[Reached]
    half: list[Reached]
    below: int

    @property
    def loss(self) -> list[float]:
        """At the end, by seed."""
        return [run["curve"]["loss"][-1] for run in self.runs]

    def median(self, of: str, *, half: bool = False) -> float | None:
        """Of the seeds that reach the target, or DDP's loss half-way."""
        hits = self.half if half else self.hits
        return statistics.median(getattr(hit, of) for hit in hits) if hits else None


def rows(results: Results, condition: Condition, target: Targets) -> list[Row]:
    """Of all contenders that have runs there, in the order of `KNOWN`."""
    where = {"hosts": condition.hosts, "rate_mbit": condition.rate_mbit, "scenario": condition.scenario}
    found: dict[tuple[str, float, float], list[Entry]] = {}
    for run in reported(results, **where):
        found.setdefault((run["contender"], run["length"], run["lr"]), []).append(run)
    names, model_bytes = list(KNOWN), results.settings["model_bytes"]
    made = []
    for (name, length, lr), runs in sorted(found.items(), key=lambda item: (names.index(item[0][0]), item[0][1:])):
        hits, half = (
            [hit for run in runs if (hit := reached(run, loss, model_bytes=model_bytes)) is not None]
            for loss in (target.within, target.half)
        )
        below = sum(min(run["curve"]["loss"]) <= target.below for run in runs)
        made.append(Row(name, lr, length, runs, hits, half, below))
    return made


def label(row: Row) -> str:
    """In a table."""
    return _named(row.contender, row.length)


def _named(name: str, length: float) -> str:
    tuned = ", tuned" if name in GRID else ""
    return KNOWN[name].label + tuned + ("" if length == 1.0 else f", {length:g} × the samples")


def show(results: Results, hosts: int) -> None:
    """A table for each condition that has runs."""
    target = targets(results, hosts)
    if target is None:
        console.print(f"{hosts} hosts: DDP has fewer than two seeds, so there is no spread.")
        return
    conditions = sorted({(run["scenario"], -run["rate_mbit"]) for run in reported(results, hosts=hosts)})
    for scenario, negative in sorted(conditions, key=lambda pair: (list(SCENARIOS).index(pair[0]), pair[1])):
        condition = Condition(hosts, -negative, scenario)
        title = (
            f"{hosts} hosts, {condition.rate_mbit:g} Mb/s, {SCENARIOS[scenario]}; half: {target.half:.4f},"
            f" end: {target.mean:.4f} ± {target.deviation:.4f}"
        )
        print_table(title, COLUMNS, cells(results, condition, target), caption=_CAPTION)


def cells(results: Results, condition: Condition, target: Targets) -> list[list[str]]:
    """The lines below :data:`COLUMNS`: of all contenders that have runs there."""
    found = rows(results, condition, target)
    reference = next(row for row in found if row.contender == REFERENCE and row.length == 1.0)
    return [_cells(row, reference) for row in found]


def _cells(row: Row, reference: Row) -> list[str]:
    exchanges = [run["exchanges_per_step"] for run in row.runs if run["exchanges_per_step"]]
    hours, gigabytes = (statistics.fmean(run["curve"][key][-1] for run in row.runs) for key in ("s", "gb"))
    cells = [label(row), f"{row.lr:g}", spread(row.loss), f"{statistics.fmean(exchanges):.2f}" if exchanges else "–"]
    cells += [f"{hours / 3600:.2f}", f"{gigabytes:.1f}"]
    cells += [_ratio(reference, row, "s", half=True), _ratio(reference, row, "gb", half=True)]
    end_s = row.median("s")
    cells.append(f"{'never' if end_s is None else f'{end_s / 3600:.2f}'} ({len(row.hits)}/{len(row.runs)})")
    return [*cells, _ratio(reference, row, "s"), _ratio(reference, row, "gb"), str(row.below)]


def _ratio(reference: Row, row: Row, of: str, *, half: bool = False) -> str:
    found = ratio(reference, row, of, half=half)
    return "–" if found is None else f"{found:.1f}"


def ratio(reference: Row, row: Row, of: str, *, half: bool = False) -> float | None:
    """How many times less than the reference, medians of the seeds that come there; None if none of either does."""
    ours, theirs = row.median(of, half=half), reference.median(of, half=half)
    return theirs / ours if ours and theirs else None


def plot(results: Results, hosts: int, scenario: str, path: Path) -> None:
    """Loss against virtual time on each link, and against bytes; the mean over the seeds."""
    runs = reported(results, hosts=hosts, scenario=scenario)
    rates = sorted({run["rate_mbit"] for run in runs}, reverse=True)
    figure, panels = axes_of(2, len(rates), width=4.6, height=3.6)
    found = {(run["contender"], run["length"]) for run in runs}
    lines = sorted(found, key=lambda line: (list(KNOWN).index(line[0]), line[1]))
    target = targets(results, hosts)
    for column, rate_mbit in enumerate(rates):
        here = [run for run in runs if run["rate_mbit"] == rate_mbit]
        for line in lines:
            for axes, x in zip(panels[:, column], ("s", "gb"), strict=True):
                _draw(axes, [run["curve"] for run in here if (run["contender"], run["length"]) == line], x, *line)
        panels[0, column].set(title=f"{rate_mbit:g} Mb/s", xlabel="virtual hours", xscale="log")
        panels[1, column].set(xlabel="GB sent by a host", xscale="log")
        for axes in panels[:, column]:
            axes.set_ylabel("held-out loss, nats")
            if target is not None:
                axes.axhline(target.within, color="black", lw=0.8, ls=":")
    handles = [_handle(*line) for line in lines]
    handles.append(Line2D([], [], color="black", lw=0.8, ls=":", label="the target: DDP's loss at the end plus its spread"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{hosts} hosts, {SCENARIOS[scenario]}: means of the seeds")
    figure.savefig(path, dpi=110)


def _handle(name: str, length: float) -> Line2D:
    contender = KNOWN[name]
    style = {"color": contender.colour, "marker": contender.marker, "ms": 4, "ls": _style(length)}
    return Line2D([], [], label=_named(name, length), **style)  # type: ignore[arg-type]


def _style(length: float) -> str:
    return "-" if length == 1.0 else "--"


def _draw(axes: Any, curves: Sequence[dict[str, list[float]]], x: str, name: str, length: float) -> None:
    if not curves:
        return
    points = min(len(curve["loss"]) for curve in curves)
    at, loss = (np.mean([curve[key][:points] for curve in curves], axis=0) for key in (x, "loss"))
    at = at / 3600 if x == "s" else at
    kept = at > 0
    contender = KNOWN[name]
    style = {"color": contender.colour, "marker": contender.marker, "ls": _style(length)}
    axes.plot(at[kept], loss[kept], ms=3.5, markevery=4, lw=1.2, **style)
