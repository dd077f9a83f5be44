"""Connections are opened in the direction in which Gloo opens its own."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gossip.doctor.measure import pair
from lightning_gossip.doctor.report import Link
from tests.doctor.reports import link, worker


def at(rank: int, address: str) -> Any:
    one = worker(rank, 0)
    return replace(one, listening=replace(one.listening, address=address))


def connections() -> set[tuple[str, int, str, int]]:
    """Of this process: own address and port, and those of the other end."""
    inodes = {os.readlink(name) for name in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(name)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]

    def ends(cell: str) -> tuple[str, int]:
        address, port = cell.split(":")
        return ".".join(map(str, reversed(bytes.fromhex(address)))), int(port, 16)

    return {(*ends(row[1]), *ends(row[2])) for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in inodes}


def listens(*addresses: str) -> str:
    """With which of two addresses Gloo connects; none is 127.0.0.1, from where the kernel connects with its own."""
    store, before = dist.HashStore(), connections()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=addresses[rank])]
        options._timeout = timedelta(seconds=20)
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)
        groups[rank].allreduce([torch.ones(1)]).wait()

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (listening,) = {own for own, _, _, _ in connections() - before} - {"127.0.0.1"}
    return listening


@pytest.mark.parametrize("addresses", [("127.0.0.9", "127.0.0.10"), ("127.0.0.10", "127.0.0.9"), ("127.0.1.2", "127.0.0.200")])
def test_who_connects_is_who_does_in_gloo(addresses: tuple[str, str]) -> None:
    """It was the lower rank: where addresses ascend with ranks, the other one than in Gloo, in every pair."""
    one, other = (at(rank, address) for rank, address in enumerate(addresses))
    answers = other if pair.connects(one, other) else one
    assert answers.listening.address == listens(*addresses)
    assert pair.connects(other, one) is not pair.connects(one, other)


def test_at_one_address_it_is_the_higher_rank() -> None:
    assert pair.connects(at(1, "10.0.0.1"), at(0, "10.0.0.1"))
    assert not pair.connects(at(0, "10.0.0.1"), at(1, "10.0.0.1"))
    assert pair.connects(at(0, "fe80::2%eth0"), at(1, "fe80::1%eth0"))


def test_what_the_higher_rank_has_measured_is_told_from_the_lower_one_s_side() -> None:
    seen = link(0, 1, there=1.0, back=2.0, clock_s=0.5, resent=0.25)
    assert seen.turned() == link(0, 1, there=2.0, back=1.0, clock_s=-0.5, resent=0.25)
    assert Link(i=0, j=1, failed="refused", phase="connect").turned() == Link(i=0, j=1, failed="refused", phase="connect")
