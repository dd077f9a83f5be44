"""Reports as a visit to a healthy cluster would give them, to be made ill."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gossip.doctor.report import Interface, Link, Listening, Report, Store, Worker

VERSIONS = {"python": "3.11.7", "torch": "2.9.0", "lightning": "2.6.1", "numpy": "2.0.0"}


def worker(rank: int, host: int, **changes: Any) -> Worker:
    address = f"10.0.0.{host + 1}"
    whole = Worker(
        rank=rank,
        host=f"kernel-{host}",
        hostname=f"gpu{host:02}",
        versions=VERSIONS,
        interfaces=(
            Interface(name="lo", address="127.0.0.1", mtu=65536, mbit=None, up=True),
            Interface(name="eth0", address=address, mtu=1500, mbit=1000, up=True),
        ),
        listening=Listening(address=address, interface="eth0", because="GLOO_SOCKET_IFNAME=eth0", towards_store="eth0"),
        port=40000 + rank,
        files=524288,
        agent_files=None,
        cores=8,
    )
    return replace(whole, **changes)


def healthy(hosts: int = 4, each: int = 1) -> Report:
    workers = [worker(rank, rank // each) for rank in range(hosts * each)]
    return Report(
        world_size=len(workers),
        workers=workers,
        links=[link(i, j) for i, j in itertools.combinations(range(len(workers)), 2)],
        pairs=len(workers) * (len(workers) - 1) // 2,
        store={one.rank: Store(median_s=2e-4, p95_s=4e-4, calls=200) for one in workers},
        seconds=12.0,
    )


def link(i: int, j: int, **changes: Any) -> Link:
    whole = Link(
        i=i,
        j=j,
        latency_s=5e-5,
        worst_s=1e-4,
        there=1.1e8,
        back=1.2e8,
        resent=0.0,
        resent_idle=0,
        clock_s=1e-4,
        clock_error_s=5e-5,
        path_mtu=1500,
    )
    return replace(whole, **changes)


def with_links(report: Report, of: Sequence[int], **changes: Any) -> Report:
    """The same with other links to and from these ranks; two ranks mean the link between them."""
    for place, one in enumerate(report.links):
        ends = {one.i, one.j}
        if ends == set(of) or (len(of) == 1 and set(of) <= ends):
            report.links[place] = replace(one, **changes)
    return report


def with_worker(report: Report, rank: int, **changes: Any) -> Report:
    report.workers[rank] = replace(report.workers[rank], **changes)
    return report
