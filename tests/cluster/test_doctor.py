"""A doctor's visit to hosts of which one is ill."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Network, Process, network
from lightning_gossip.simulation.cluster.cluster_file import ClusterFile

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("hosts")]

_PORT, _HOSTS, _RATE_MBIT = 29400, 3, 100.0
_END_S = 100.0


def visit(
    net: Network, folder: Path, *arguments: str, interface: str | None = "eth0", shut_out: int | None = None
) -> tuple[list[int], list[Process], dict[str, Any]]:
    """Exit statuses and processes by rank, and what rank 0 has written."""
    ranks = []
    for host in net.hosts:
        environment = {
            "RANK": str(host.number),
            "WORLD_SIZE": str(len(net.hosts)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": net.hosts[0].address,
            "MASTER_PORT": str(_PORT + (host.number == shut_out)),
            "OMP_NUM_THREADS": "1",
            **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface}),
        }
        options = ("--folder", str(folder), "--seconds", "30", *arguments)
        process = Process(host, "lightning_gossip.doctor", options, environment=environment, log=folder / f"{host.number}.log")
        process.start()
        ranks.append(process)
    codes = [process.wait(_END_S) for process in ranks]
    written = folder / "doctor.json"
    return codes, ranks, json.loads(written.read_text()) if written.exists() else {}


def problems(found: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(one["kind"], one["ranks"]) for one in found["findings"] if one["grave"]]


def rates(found: dict[str, Any]) -> dict[tuple[int, int], float]:
    return {(one["i"], one["j"]): min(one["there"], one["back"]) for one in found["links"]}


def test_hosts_of_one_rate_are_well_and_their_file_says_that_rate(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        codes, _, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([0, 0, 0], [])
    assert len(found["hosts"]) == _HOSTS
    measured = ClusterFile.load(tmp_path / "cluster.json")
    between = [rate for row, known in enumerate(measured.bandwidth) for column, rate in enumerate(known) if row != column]  # type: ignore[arg-type]
    assert all(rate == pytest.approx(_RATE_MBIT / 8 * 1e6, rel=0.25) for rate in between)


def test_a_slow_link_is_named_with_its_factor(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.set_rate(net.hosts[1], _RATE_MBIT / 10)
        codes, ranks, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([1, 0, 0], [("slow host", [1])])
    assert ranks[0].said(r"The host of rank 1: its link is (9\.\d|1[01]) times slower than the others': 1\.\d+ MB/s beside 1\d")
    assert rates(found)[0, 1] == pytest.approx(_RATE_MBIT / 80 * 1e6, rel=0.25)


def test_a_link_that_loses_packets_is_named(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.lose(net.hosts[2], 0.05)
        codes, ranks, found = visit(net, tmp_path)
    assert codes[0] == 1
    kinds = problems(found)
    assert kinds
    assert {kind for kind, _ in kinds} <= {"lossy host", "lossy link", "store"}  # whose calls wait for lost packets too
    assert all(2 in of for _, of in kinds)
    assert ranks[0].said("its link loses packets|Packets between ranks")


def test_a_host_whose_firewall_lets_only_the_store_in_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    """Gloo connects with the lower address. The doctor once connected with the higher one, and found no fault."""
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.close_ports(net.hosts[0], but=_PORT)
        codes, ranks, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([1, 0, 0], [("closed", [0])])
    assert ranks[0].said("No other host can connect with the host of rank 0: nothing came back within")
    assert ranks[0].said("No all-reduce was made")
    measured = {(one["i"], one["j"]) for one in found["links"] if one["failed"] is None}
    assert measured == {(1, 2)}


def test_a_host_with_which_gloo_does_not_connect_may_be_closed(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.close_ports(net.hosts[2], but=_PORT)
        codes, _, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([0, 0, 0], [])
    assert found["all_reduce"]


def test_a_closed_port_of_the_store_names_who_did_not_come(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        codes, ranks, found = visit(net, tmp_path, "--join", "4", shut_out=2)
    assert codes == [1, 0, 2]
    assert problems(found) == [("missing", [2])]
    assert ranks[2].said(r"The store of the job at 10\.213\.0\.1:29401 could not be reached within 4 s")
    assert rates(found)[0, 1] > 1e6


def test_a_switch_that_loses_large_packets_is_told_as_such(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.set_mtu(net.hosts[2], 1280, at_switch=True)
        codes, ranks, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([1, 0, 0], [("MTU", [0, 1, 2])])
    assert ranks[0].said("Small messages pass between ranks .* and 16 kB do not: something on the way loses large packets")
    assert [(one["i"], one["j"]) for one in found["links"] if one["failed"] is None] == [(0, 1)]


def test_one_host_with_a_smaller_mtu_is_a_note_since_tcp_agrees_on_it(tmp_path: Path) -> None:
    with network(_HOSTS, rate_mbit=_RATE_MBIT) as net:
        net.set_mtu(net.hosts[2], 1280)
        codes, ranks, found = visit(net, tmp_path)
    assert (codes, problems(found)) == ([0, 0, 0], [])
    assert ranks[0].said("The MTUs of the interfaces differ: 1280 bytes on rank 2, 1500 bytes on ranks 0, 1")
    paths = {(one["i"], one["j"]): one["path_mtu"] for one in found["links"]}
    assert paths[0, 1] == 1500


_SILENT = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 53))
print("up", flush=True)
sys.stdin.read()
"""


def test_a_host_whose_name_server_is_silent_is_measured_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    with network(2, rate_mbit=_RATE_MBIT) as net, contextlib.ExitStack() as ends:
        for host in net.hosts:
            for name in ("resolv.conf", "hosts"):  # the host has mounts of its own
                subprocess.run([*host.prefix, "mount", "--bind", str(tmp_path / name), f"/etc/{name}"], check=True)
            pipe = subprocess.PIPE
            silent = ends.enter_context(
                subprocess.Popen([*host.prefix, sys.executable, "-c", _SILENT], stdin=pipe, stdout=pipe)
            )
            assert silent.stdout is not None
            assert silent.stdout.readline() == b"up\n"
        monkeypatch.setenv("RES_OPTIONS", "timeout:2 attempts:1")  # 10 s otherwise
        codes, ranks, found = visit(net, tmp_path, interface=None)
    assert (codes, problems(found)) == ([1, 0], [("interface", [0, 1])])
    assert ranks[0].said("On the hosts of ranks 0, 1 it took up to [0-9.]+ s to look the host's own name")


def test_gloo_on_the_loopback_is_told_with_what_to_write(tmp_path: Path) -> None:
    with network(2, rate_mbit=_RATE_MBIT) as net:
        codes, ranks, found = visit(net, tmp_path, interface="lo")
    assert (codes, problems(found)) == ([1, 0], [("interface", [0, 1])])
    assert ranks[0].said("Set GLOO_SOCKET_IFNAME=eth0 there")


def test_an_interface_that_is_none_is_refused_on_each_rank(tmp_path: Path) -> None:
    with network(2, rate_mbit=_RATE_MBIT) as net:
        codes, ranks, _ = visit(net, tmp_path, "--join", "3", interface="eth7")
    assert codes == [2, 2]
    assert all(rank.said("interface='eth7' is not one of this machine's: lo, eth0") for rank in ranks)


def test_sixteen_workers_take_less_than_two_minutes(tmp_path: Path) -> None:
    with network(16, rate_mbit=_RATE_MBIT) as net:
        net.set_rate(net.hosts[5], _RATE_MBIT / 10)
        codes, _, found = visit(net, tmp_path, "--seconds", "100")
    assert codes[0] == 1
    assert ("slow host", [5]) in problems(found)
    assert len(found["links"]) == 120
    assert found["seconds"] < 120.0
