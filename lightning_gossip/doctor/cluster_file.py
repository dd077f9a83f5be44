"""A visit as cluster.json, which recipes.plan and recipes.simulate read (``cluster_file=``); the format is the simulator's."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_gossip.doctor.report import Link, Report
from lightning_gossip.simulation.cluster.cluster_file import ClusterFile

FILE = "cluster.json"


def cluster_of(report: Report) -> ClusterFile | None:
    """Hosts as nodes, with the median of what their workers have measured.

    The format lets ranks count up from node to node; where a launcher has dealt them out otherwise, they are numbered anew and
    ``about`` says so. Links that failed are taken for as bad as the worst one that did not, which ``about`` says too.

    Args:
        report: of the visit.

    Returns:
        The cluster; None if no link was measured.
    """
    hosts = report.hosts
    order = [rank for ranks in hosts for rank in ranks]
    between = _rates(report.between)
    if (len(hosts) > 1 and not between) or (len(order) > 1 and len(hosts) == 1 and not _rates(report.inside)):
        return None
    about: dict[str, Any] = {
        "written_by": "lightning_gossip.doctor",
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": dict(report.workers[0].versions),
    }
    if order != list(range(len(order))):
        about["ranks"] = order
    latency_s, bandwidth, assumed = _matrices(report)
    if assumed:
        about["assumed_as_bad_as_the_worst"] = assumed
    inside = _rates(report.inside)
    names = [next(worker.hostname for worker in report.workers if worker.rank == ranks[0]) for ranks in hosts]
    return ClusterFile(
        sizes=[len(ranks) for ranks in hosts],
        names=names if len(set(names)) == len(names) else [f"{name}-{place}" for place, name in enumerate(names)],
        inside_latency_s=_median(_latencies(report.inside), 0.0),
        inside_bandwidth=_median(inside, math.inf),
        latency_s=latency_s if len(hosts) > 1 else 0.0,
        bandwidth=bandwidth if len(hosts) > 1 else math.inf,
        step_s=[report.training[rank].step_s for rank in order] if set(order) <= set(report.training) else None,
        about=about,
    )


def save(report: Report, folder: Path) -> bool:
    """Write the file; whether there was something to write."""
    cluster = cluster_of(report)
    if cluster is None:
        return False
    cluster.save(folder / FILE)
    return True


def _matrices(report: Report) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
    """Seconds of a message and bytes a second from each host to each other, and those pairs of hosts that are assumed."""
    number = len(report.hosts)
    latency_s = [[0.0] * number for _ in range(number)]
    bandwidth = [[math.inf] * number for _ in range(number)]
    worst_s, worst = max(_latencies(report.between), default=0.0), min(_rates(report.between), default=math.inf)
    pairs: dict[tuple[int, int], list[Link]] = {}
    host_of = report.host_of
    for link in report.between:
        pairs.setdefault((host_of[link.i], host_of[link.j]), []).append(link)
    assumed = []
    for one in range(number):
        for other in range(one + 1, number):
            ahead, turned = pairs.get((one, other), []), pairs.get((other, one), [])
            there = _known([*(link.there for link in ahead), *(link.back for link in turned)])
            back = _known([*(link.back for link in ahead), *(link.there for link in turned)])
            latency_s[one][other] = latency_s[other][one] = _median(_latencies([*ahead, *turned]), worst_s)
            bandwidth[one][other], bandwidth[other][one] = _median(there, worst), _median(back, worst)
            if not there or not back:
                assumed.append([one, other])
    return latency_s, bandwidth, assumed


def _latencies(links: Iterable[Link]) -> list[float]:
    return _known(link.latency_s for link in links)


def _rates(links: Iterable[Link]) -> list[float]:
    return _known(rate for link in links for rate in (link.there, link.back))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float], otherwise: float) -> float:
    return statistics.median(values) if values else otherwise
