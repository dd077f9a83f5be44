"""From what the processes have measured to tables and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.control_plane.phases import STEP_S
from benchmarks.harness import against, axes_of, print_table
from lightning_gossip.runtime.membership.monitor import HEARTBEAT_S

ROUND_MS, STORE_SHARE = {256: 100.0, 1024: 1000.0}, {256: 0.05, 1024: 0.25}
CALLS_A_ROUND, CALLS_A_TICK = 8.0, 3.0


def summarize(workers: int, of_each: list[dict[str, Any]]) -> dict[str, Any]:
    """One number of workers.

    Args:
        workers: how many.
        of_each: what each process has returned.
    """
    rounds = [_summed(workers, list(one)) for one in zip(*(each["rounds"] for each in of_each), strict=True)]
    epoch = [each["epoch"] for each in of_each]
    seconds = statistics.mean(one["at_s"] for one in epoch)
    ticks, steps = (sum(one[name] for one in epoch) for name in ("ticks", "steps"))
    traffic = {name: [sum(column) for column in zip(*(one[name] for one in epoch), strict=True)] for name in _CONNECTIONS}
    deaths = [list(one) for one in zip(*(each["deaths"] for each in of_each), strict=True)]
    joins = [[each["join"] for each in one] for one in deaths]
    return {
        "workers": workers,
        "start": _summed(workers, [each["start"] for each in of_each]),
        "round": {name: statistics.median(one[name] for one in rounds) for name in rounds[0]},
        "round_s": [one["seconds"] for one in rounds],
        "tick": {"calls": traffic["monitoring"][0] / ticks, "bytes": sum(traffic["monitoring"][1:]) / ticks},
        "claim": {"calls": traffic["training"][0] / steps, "bytes": sum(traffic["training"][1:]) / steps},
        "epoch": {
            "store_share": max(one["store_s"] for one in epoch) / seconds,
            "clients_share": sum(one["clients_s"] for one in epoch) / seconds,
            "pace": steps / (workers * seconds / STEP_S),
            "heartbeats_pace": ticks / (workers * seconds / HEARTBEAT_S),
        },
        "death_s": [_known_s(one) for one in deaths],
        "first_s": [min(each["first_s"] for each in one) - min(each["began_s"] for each in one) for one in deaths],
        "excluding": [_summed(workers, [each["excluding"] for each in one]) for one in deaths],
        "join_s": [max(each["ended_s"] for each in one) - min(each["began_s"] for each in one) for one in joins],
        "admitting": [_summed(workers, [each["members"] for each in one]) for one in joins],
    }


_CONNECTIONS = ("training", "monitoring")


def _known_s(of_each: list[dict[str, Any]]) -> float:
    return max(each["known_s"] for each in of_each) - min(each["began_s"] for each in of_each)


def _summed(workers: int, of_each: list[dict[str, Any]]) -> dict[str, float]:
    """Something that all workers did together."""
    calls, sent, received = (sum(column) for column in zip(*(each["traffic"] for each in of_each), strict=True))
    return {
        "seconds": max(each["ended_s"] for each in of_each) - min(each["began_s"] for each in of_each),
        "store_s": max(each["store_s"] for each in of_each),
        "client_s": sum(each["clients_s"] for each in of_each) / workers,
        "calls": calls / workers,
        "bytes": (sent + received) / workers,
    }


def show(found: list[dict[str, Any]]) -> None:
    """The tables."""
    print_table(
        "A round, all arriving at once and saying something different",
        ("workers", "ms", "store, ms of CPU", "a worker, ms of CPU", "calls a worker", "kB a worker"),
        [
            [
                f"{of['workers']:,}",
                _aimed(1e3 * of["round"]["seconds"], ROUND_MS.get(of["workers"]), digits=1),
                f"{1e3 * of['round']['store_s']:.1f}",
                f"{1e3 * of['round']['client_s']:.2f}",
                against(of["round"]["calls"], CALLS_A_ROUND, at_most=True, digits=1),
                f"{1e-3 * of['round']['bytes']:.1f}",
            ]
            for of in found
        ],
        caption="Medians. All workers share this machine's cores with the store: on hosts of their own they would not.",
    )
    print_table(
        f"The middle of an epoch: a heartbeat every {HEARTBEAT_S:g} s, a step every {STEP_S:g} s",
        ("workers", "store, of a core", "workers, cores", "steps, of due", "calls a tick", "bytes", "calls a step", "bytes"),
        [
            [
                f"{of['workers']:,}",
                _aimed(of["epoch"]["store_share"], STORE_SHARE.get(of["workers"]), digits=3),
                f"{of['epoch']['clients_share']:.2f}",
                f"{of['epoch']['pace']:.2f}",
                against(of["tick"]["calls"], CALLS_A_TICK, at_most=True, digits=1),
                f"{of['tick']['bytes']:.0f}",
                f"{of['claim']['calls']:.1f}",
                f"{of['claim']['bytes']:.0f}",
            ]
            for of in found
        ],
    )
    print_table(
        "Start, death, return: seconds",
        (
            "workers",
            "start",
            "store's CPU",
            "a worker's",
            "a death known",
            "round without it",
            "store's CPU",
            "back",
            "all admit",
        ),
        [
            [
                f"{of['workers']:,}",
                f"{of['start']['seconds']:.2f}",
                f"{of['start']['store_s']:.3f}",
                f"{of['start']['client_s']:.4f}",
                f"{statistics.median(of['death_s']):.2f}",
                f"{_median(of['excluding'], 'seconds'):.2f}",
                f"{_median(of['excluding'], 'store_s'):.3f}",
                f"{statistics.median(of['join_s']):.2f}",
                f"{_median(of['admitting'], 'seconds'):.2f}",
            ]
            for of in found
        ],
        caption="A death: heartbeats stop, one neighbour tells of a lost connection; until all others know.",
    )


def _aimed(value: float, aim: float | None, *, digits: int) -> str:
    return f"{value:.{digits}f}" if aim is None else against(value, aim, at_most=True, digits=digits)


def _median(of: list[dict[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in of)


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Growth with the number of workers."""
    figure, ((rounds, epoch, changes),) = axes_of(1, 3, width=4.2)
    workers = [of["workers"] for of in found]

    def line(axes: Any, values: list[float], label: str, colour: str) -> None:
        axes.loglog(workers, values, "o-", color=colour, label=label)

    line(rounds, [1e3 * of["round"]["seconds"] for of in found], "as measured, on this machine", "#c8553d")
    line(rounds, [1e3 * of["round"]["store_s"] for of in found], "CPU time of the store", "#1b7f5c")
    line(rounds, [1e3 * of["round"]["client_s"] for of in found], "CPU time of one worker", "#3d5a80")
    rounds.set(title="a round", ylabel="ms")
    line(epoch, [100 * of["epoch"]["store_share"] for of in found], "store", "#1b7f5c")
    line(epoch, [100 * of["epoch"]["clients_share"] / of["workers"] for of in found], "one worker", "#3d5a80")
    epoch.set(title="the middle of an epoch", ylabel="% of a core")
    line(changes, [statistics.median(of["death_s"]) for of in found], "a death is known to all", "#c8553d")
    line(changes, [_median(of["excluding"], "store_s") for of in found], "round without it: store's CPU", "#1b7f5c")
    line(changes, [_median(of["admitting"], "store_s") for of in found], "taking it back: store's CPU", "#3d5a80")
    changes.set(title="a worker dies, and comes back", ylabel="s")
    for axes in (rounds, epoch, changes):
        axes.set_xlabel("workers")
        axes.set_xticks(workers, [f"{number:,}" for number in workers], minor=False)
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
