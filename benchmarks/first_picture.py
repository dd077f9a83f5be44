"""The picture of the README, from what the benchmarks have measured: ``python -m benchmarks.first_picture``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness import RESULTS, axes_of, console
from benchmarks.network.contenders import CONTENDERS

RATE_MBIT = 200
_SHOWN = ("ddp", "adpsgd")
_SHARES = {"ddp": "share", "adpsgd": "share_on"}  # in the straggler's results


def draw(network: dict[str, Any], straggler: dict[str, Any], path: Path) -> Path:
    """Loss against time on slow links, and speed with a slow worker; returns the file.

    Args:
        network: results of ``benchmarks.network``, scenario ``rates``.
        straggler: results of ``benchmarks.straggler``.
        path: of the picture.
    """
    figure, ((left, right),) = axes_of(1, 2, width=4.4, height=3.0)
    for name in _SHOWN:
        contender = CONTENDERS[name]
        runs = [run for run in network["runs"] if run["contender"] == name and run["scenario"] == "rates"]
        curves = [pd.DataFrame(run["curve"]) for run in runs if run["rate_mbit"] == RATE_MBIT]
        points = min(map(len, curves))
        medians = pd.concat([curve[:points] for curve in curves]).groupby(level=0).median()[1:]
        left.plot(medians.s, medians.loss, color=contender.colour, marker=contender.marker, markersize=4, label=contender.label)
    left.set(title=f"{RATE_MBIT} Mb/s between four hosts", xlabel="seconds of training", ylabel="test loss")
    left.set(xscale="log", yscale="log")
    slowdowns = straggler["slowdowns"]
    for number, name in enumerate(_SHOWN):
        shares = [measured[name][_SHARES[name]] for measured in slowdowns.values()]
        places = [place + 0.4 * (number - 0.5) for place in range(len(shares))]
        bars = right.bar(places, shares, width=0.36, color=CONTENDERS[name].colour, label=CONTENDERS[name].label)
        right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set(title="one of four workers slower", ylabel="share of the ideal speed", ylim=(0, 1.12))
    right.set_xticks(range(len(slowdowns)), [f"{factor}×" for factor in slowdowns])
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    return path


def main() -> None:
    network = json.loads((RESULTS / "network.json").read_text())
    straggler = json.loads((RESULTS / "straggler.json").read_text())
    console.print(f"Written: {draw(network, straggler, RESULTS / 'first.png')}")


if __name__ == "__main__":
    main()
