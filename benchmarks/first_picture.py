"""The picture of the README, from what the benchmarks have measured: ``python -m benchmarks.first_picture``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, axes_of, console
from benchmarks.network.contenders import CONTENDERS
from benchmarks.time_to_loss.contenders import KNOWN
from benchmarks.time_to_loss.plan import SHOWN, SHOWN_MBIT
from benchmarks.time_to_loss.report import reported, targets
from benchmarks.time_to_loss.results import Results

_HOSTS, _SCENARIO = 4, "slow_worker"
_BARS = ("ddp", "adpsgd")
_SHARES = {"ddp": "share", "adpsgd": "share_on"}  # in the straggler's results


def draw(learned: Results, straggler: dict[str, Any], path: Path) -> Path:
    """Loss against time on slow links with a slow worker, and speed with a slow worker; returns the file.

    Args:
        learned: results of ``benchmarks.time_to_loss``.
        straggler: results of ``benchmarks.straggler``.
        path: of the picture.
    """
    figure, ((left, right),) = axes_of(1, 2, width=4.6, height=3.2)
    for name in ("ddp", SHOWN):
        runs = reported(learned, contender=name, hosts=_HOSTS, rate_mbit=SHOWN_MBIT, scenario=_SCENARIO)
        length = max(run["length"] for run in runs) if name == SHOWN else 1.0
        curves = [run["curve"] for run in runs if run["length"] == length]
        points = min(len(curve["loss"]) for curve in curves)
        hours, losses = (np.array([curve[key][:points] for curve in curves]) for key in ("s", "loss"))
        at = hours.mean(0)[1:] / 3600
        contender = KNOWN[name]
        said = contender.label + ("" if length == 1.0 else f", {length:g} × the samples")
        left.plot(at, losses.mean(0)[1:], color=contender.colour, marker=contender.marker, ms=4, markevery=3, label=said)
        left.fill_between(at, losses.min(0)[1:], losses.max(0)[1:], color=contender.colour, alpha=0.2, lw=0)
    target = targets(learned, _HOSTS)
    if target is not None:
        left.axhline(target.mean, color="black", lw=0.8, ls=":")
    left.set(
        title=f"{SHOWN_MBIT} Mb/s, one of four workers 4× slower",
        xlabel="virtual hours of training",
        ylabel="held-out loss, nats a byte",
    )
    left.set(xscale="log")
    left.legend(frameon=False)
    slowdowns = straggler["slowdowns"]
    for number, name in enumerate(_BARS):
        shares = [measured[name][_SHARES[name]] for measured in slowdowns.values()]
        places = [place + 0.4 * (number - 0.5) for place in range(len(shares))]
        bars = right.bar(places, shares, width=0.36, color=CONTENDERS[name].colour, label=CONTENDERS[name].label)
        right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set(title="one of four workers slower", ylabel="share of the ideal speed", ylim=(0, 1.3))
    right.set_xticks(range(len(slowdowns)), [f"{factor}×" for factor in slowdowns])
    right.legend(frameon=False, ncols=2, loc="upper center")
    figure.savefig(path, dpi=130)
    return path


def main() -> None:
    learned = Results(RESULTS / "time_to_loss.json", None)
    straggler = json.loads((RESULTS / "straggler.json").read_text())
    console.print(f"Written: {draw(learned, straggler, RESULTS / 'first.png')}")


if __name__ == "__main__":
    main()
