"""Predictions along one knob at a time, with links that take no time and with the given ones; and their figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from lightning_gossip.simulation import APSGD
from recipes.planning.choice import Candidate, News, Planner
from recipes.planning.refinement import bounds, counts
from recipes.plots import STYLE

FIGURE = "plan.png"

Line = Sequence[tuple[float, float | None]]
Curves = Mapping[str, Mapping[str, Line]]
"""Knob → what is drawn → pairs of the knob's value and seconds to the target (or 1/s); None where it never gets there."""

_RATES = 33  # learning rates of a curve


def curves_of(
    planner: Planner, candidates: Sequence[Candidate], best: Candidate, step: Callable[[str], News]
) -> dict[str, dict[str, Line]]:
    """All curves.

    Args:
        planner: predicts.
        candidates: that were planned; those with the best one's number of workers are drawn against the learning rate.
        best: what is recommended.
        step: begins a new part of the work.
    """
    alike = {one.name: one for one in candidates if one.workers == best.workers and one.name != best.name} | {best.name: best}
    highest = 1.3 * max(one.dynamics.limit for one in alike.values())
    lowest = 0.02 * min(one.dynamics.limit for one in alike.values())
    rates = [float(lr) for lr in np.geomspace(lowest, highest, _RATES)]
    step("learning rates")
    decays: dict[str, Line] = {name: [(lr, _finite(one.dynamics.decay(lr))) for lr in rates] for name, one in alike.items()}
    times: dict[str, Line] = {
        name: [(lr, _finite(one.dynamics.time_s(lr, best.target))) for lr in rates] for name, one in alike.items()
    }
    machines = {"with these links": planner.known.machines}
    if planner.known.machines.take_time:
        ideal = planner.known.machines.ideal()
        machines["ideal"] = ideal
        other = planner.candidate(best.strategy, best.workers, machines=ideal)
        times[f"{best.name}, ideal links"] = [(lr, _finite(other.dynamics.time_s(lr, best.target))) for lr in rates]
    else:
        machines = {"ideal": planner.known.machines}
    own = best.strategy if isinstance(best.strategy, APSGD) else planner.known.strategy
    server = replace(own if isinstance(own, APSGD) else APSGD(), active_workers=None, max_staleness=None, on_stale="drop")
    most = max(one.workers for one in candidates)
    n = best.workers if best.workers > 1 else most
    by_workers: dict[str, Line] = {}
    by_bound: dict[str, Line] = {}
    for name, links in machines.items():
        step(f"active workers, {name}")
        made = [(k, replace(server, active_workers=k)) for k in counts(most)]
        by_workers[name] = [(k, _finite(planner.candidate(one, most, machines=links).time_s)) for k, one in made]
        step(f"staleness bounds, {name}")
        limited = [(s, replace(server, max_staleness=s)) for s in sorted({max(0, n // 2 - 1), n // 2, n - 1, *bounds(n)})]
        by_bound[name] = [(s, _finite(planner.candidate(one, n, machines=links).time_s)) for s, one in limited]
    return {
        f"active workers of {most} (apsgd)": by_workers,
        f"learning rate, {best.workers} workers": times,
        f"staleness bound, {n} workers (apsgd)": by_bound,
        f"learning rate, {best.workers} workers: decay": decays,
    }


def draw(curves: Curves, best: Candidate, now: Candidate, path: Path) -> None:
    """One picture of four.

    Args:
        curves: of :func:`curves_of`.
        best: whose learning rate is marked.
        now: whose is, too.
        path: of the picture.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 8), layout="constrained")
        for axes, (knob, lines) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
            decay = knob.endswith("decay")
            drawn = _together({name: [(x, y) for x, y in line if y is not None and y > 0.0] for name, line in lines.items()})
            for name, known in drawn.items():
                axes.plot(*zip(*known, strict=True), "o-", ms=3, lw=1.4, label=name)
            label, _, _ = knob.partition(":")
            logarithmic = "learning rate" in knob
            axes.set(xlabel=label, xscale="log" if logarithmic else "linear", yscale="log" if drawn else "linear")
            if not logarithmic:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_formatter("{x:g}")
            if drawn:
                axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.4)))
            else:
                axes.text(
                    0.5, 0.5, "diverges everywhere with the present\nlearning rate", transform=axes.transAxes, ha="center"
                )
                axes.set(xticks=[], yticks=[])
            axes.set(title="Dominant decay" if decay else "Time to the target", ylabel="1/s" if decay else "s")
            if logarithmic:
                _mark(axes, {"recommended": best.best_lr, "now": now.lr})
            axes.grid(alpha=0.25)
            if drawn:
                axes.legend(fontsize=7, loc="lower left" if logarithmic and not decay else "best")
        figure.suptitle(f"Where a line ends it diverges; target: {best.target:g} of the loss's excess", x=0.01, ha="left")
        figure.savefig(path, dpi=120)


def _together(lines: Mapping[str, Line]) -> dict[str, Line]:
    """Lines that lie upon each other as one, with all their names; those without a point are left out."""
    drawn: list[tuple[list[str], Line]] = []
    for name, line in lines.items():
        same = next((names for names, other in drawn if _alike(line, other)), None)
        if same is not None:
            same.append(name)
        elif line:
            drawn.append(([name], line))
    return {" = ".join(names): line for names, line in drawn}


def _alike(line: Line, other: Line) -> bool:
    return len(line) == len(other) > 0 and bool(np.allclose(np.array(line, float), np.array(other, float), rtol=0.02, atol=0.0))


def _mark(axes: Axes, rates: Mapping[str, float]) -> None:
    for (name, lr), style in zip(rates.items(), ("-", ":"), strict=True):
        axes.axvline(lr, color="black", lw=0.8, ls=style, label=f"{name}: {lr:.2g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
