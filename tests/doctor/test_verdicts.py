"""Each verdict from measurements made up for it, and none from those of a healthy cluster."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.doctor.report import Copies, Interface, Listening, Report, Store
from lightning_gossip.doctor.verdicts import Finding, findings, name_of_host, status
from tests.doctor.reports import VERSIONS, healthy, link, with_links, with_worker

GB = 1e9


def only(report: Report) -> Finding:
    found = findings(report)
    assert len(found) == 1, [one.sentence for one in found]
    return found[0]


@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (5, 3)])
def test_a_healthy_cluster_has_no_problem(hosts: int, each: int) -> None:
    report = healthy(hosts, each)
    assert findings(report) == []
    assert status([]) == 0


@given(st.integers(3, 8), st.integers(1, 3), st.data())
def test_one_slow_host_is_found_whichever_it_is_and_nobody_else(hosts: int, each: int, data: st.DataObject) -> None:
    report, slow = healthy(hosts, each), data.draw(st.integers(0, hosts - 1))
    for place, one in enumerate(report.links):
        ends = one.i // each, one.j // each
        if ends[0] != ends[1] and slow in ends:
            report.links[place] = link(one.i, one.j, there=1.1e7, back=1.2e7)
    found = [one for one in findings(report) if one.grave]
    assert [(one.kind, list(one.ranks)) for one in found] == [("slow host", report.hosts[slow])]
    assert re.search(rf"^Host gpu{slow:02}.*: its link is (9.2|10|11) times slower than the others'", found[0].sentence)


def test_a_host_that_is_slow_in_one_direction_only_is_told_which() -> None:
    report = healthy()
    with_links(report, [3], there=1.1e7)  # the others send to rank 3
    finding = only(report)
    assert finding.kind == "slow host"
    assert "its link receives 11 times slower" in finding.sentence


def test_one_slow_link_between_fast_hosts_is_the_links() -> None:
    finding = only(with_links(healthy(), [1, 2], there=1e7, back=1.1e8))
    assert finding.kind == "slow link"
    assert "ranks 1 and 2 is 11 times slower" in finding.sentence


def test_a_full_link_drops_packets_and_is_slow_not_lossy() -> None:
    finding = only(with_links(healthy(), [2], there=1e7, back=1e7, resent=0.15, resent_idle=0))
    assert finding.kind == "slow host"


def test_a_link_that_loses_packets_is_lossy_and_not_slow_besides() -> None:
    finding = only(with_links(healthy(), [2], there=1e7, back=1e7, resent=0.05, resent_idle=3))
    assert (finding.kind, list(finding.ranks)) == ("lossy host", [2])
    assert "5.0%" in finding.sentence
    finding = only(with_links(healthy(), [1, 3], there=1e7, back=1e7, resent=0.05, resent_idle=3))
    assert (finding.kind, list(finding.ranks)) == ("lossy link", [1, 3])


def test_a_host_that_nobody_can_connect_with_is_named_once() -> None:
    shut = {"phase": "connect", "failed": "nothing came back within 3.5 s", "latency_s": None, "there": None, "back": None}
    report = with_links(healthy(), [1], **shut, clock_s=None, clock_error_s=None, resent=None, path_mtu=None)
    finding = only(report)
    assert (finding.kind, list(finding.ranks)) == ("closed", [1])
    assert finding.sentence == "No other host can connect with host gpu01 (rank 1): nothing came back within 3.5 s."
    finding = only(with_links(healthy(), [0, 2], **shut))
    assert "No connection between ranks 0 and 2" in finding.sentence


def test_an_all_reduce_that_fails_where_all_pairs_connect_is_a_problem() -> None:
    """It was a line above "No problem found"."""
    report = healthy()
    report.all_reduce_failed = "Another worker has ended or does not answer (all-reduce, after 22.5 s)."
    finding = only(report)
    assert (finding.kind, finding.grave, list(finding.ranks)) == ("all-reduce", True, [0, 1, 2, 3])
    assert finding.sentence.endswith("failed: Another worker has ended or does not answer (all-reduce, after 22.5 s).")


def test_large_messages_that_pass_one_way_are_no_mtu() -> None:
    """Whoever has measured the pair: the first transfer has passed."""
    for passed in ({"there": 1e8, "back": None}, {"there": None, "back": 1e8}):
        report = with_links(healthy(), [0, 3], **passed, phase="bandwidth", failed="nothing came back within 3 s")
        assert not [finding for finding in findings(report) if finding.kind == "MTU"]


def test_large_messages_that_do_not_pass_are_an_mtu() -> None:
    report = with_links(healthy(), [0, 3], there=None, back=None, phase="bandwidth", failed="nothing came back within 3 s")
    with_worker(report, 3, interfaces=(Interface(name="eth0", address="10.0.0.4", mtu=9000, mbit=1000, up=True),))
    finding = only(report)
    assert finding.kind == "MTU"
    assert finding.grave
    assert "1500 bytes on ranks 0 to 2, 9000 bytes on rank 3" in finding.sentence


def test_mtus_that_differ_without_harm_are_a_remark() -> None:
    report = with_worker(healthy(), 3, interfaces=(Interface(name="eth0", address="10.0.0.4", mtu=9000, mbit=1000, up=True),))
    finding = only(report)
    assert (finding.kind, finding.grave, list(finding.ranks)) == ("MTU", False, [3])
    assert status([finding]) == 0


def loopback(report: Report, rank: int) -> Report:
    because = f"the host's name 'gpu0{rank}' leads there"
    listening = Listening(address="127.0.0.1", interface="lo", because=because, towards_store="eth0")
    return with_worker(report, rank, listening=listening)


def test_gloo_on_the_loopback_is_told_with_the_interface_to_write_and_not_as_a_firewall() -> None:
    report = loopback(with_links(healthy(), [2], phase="connect", failed="connection refused"), 2)
    finding = only(report)
    assert finding.kind == "interface"
    assert "GLOO_SOCKET_IFNAME=eth0" in finding.advice
    assert findings(loopback(healthy(1, 2), 0)) == []  # on one host it is right


def test_a_bridge_inside_the_host_and_a_slower_interface_than_there_is() -> None:
    docker = Listening(address="172.17.0.1", interface="docker0", because="GLOO_SOCKET_IFNAME=docker0", towards_store="eth0")
    inside = Interface(name="docker0", address="172.17.0.1", mtu=1500, mbit=None, up=True)
    finding = only(with_worker(healthy(), 1, listening=docker, interfaces=(inside,)))
    assert "docker0, a network inside the host" in finding.sentence
    fast = Interface(name="ib0", address="10.1.0.2", mtu=2044, mbit=100_000, up=True)
    report = healthy()
    finding = only(with_worker(report, 1, interfaces=(*report.workers[1].interfaces, fast)))
    assert "ib0 (100,000 Mb/s) is up" in finding.sentence
    assert finding.advice == "Set GLOO_SOCKET_IFNAME=ib0 there."
    bridge = Interface(name="docker0", address="172.17.0.1", mtu=1500, mbit=10 * 10_000, up=True)  # as fast as its ports say
    report = healthy()
    assert findings(with_worker(report, 1, interfaces=(*report.workers[1].interfaces, bridge))) == []


def test_versions_that_differ_are_a_problem_where_they_must_agree() -> None:
    finding = only(with_worker(healthy(), 2, versions={**VERSIONS, "torch": "2.8.0"}))
    assert (finding.kind, finding.grave, list(finding.ranks)) == ("versions", True, [2])
    assert finding.sentence == "torch differs: 2.9.0 on ranks 0, 1, 3, 2.8.0 on rank 2."
    assert not only(with_worker(healthy(), 2, versions={**VERSIONS, "numpy": "2.1.0"})).grave


def test_too_few_open_files_name_the_number_that_is_needed() -> None:
    finding = only(with_worker(healthy(16), 5, files=160))
    assert (finding.kind, list(finding.ranks)) == ("open files", [5])
    assert "160 files, and a job of 16 workers needs up to 275" in finding.sentence
    finding = only(with_worker(healthy(16), 0, agent_files=200))
    assert "torchrun's agent" in finding.sentence


def test_clocks_apart_name_the_host() -> None:
    report = healthy(3)
    with_links(report, [0, 2], clock_s=-2.0)
    with_links(report, [1, 2], clock_s=-2.0)
    finding = only(report)
    assert (finding.kind, list(finding.ranks)) == ("clock", [2])
    assert "2 s behind" in finding.sentence


def test_a_missing_rank_a_slow_store_and_few_cores() -> None:
    report = healthy()
    report.world_size = 6
    finding = only(report)
    assert (finding.kind, list(finding.ranks)) == ("missing", [4, 5])
    report = healthy()
    report.store[2] = Store(median_s=0.05, p95_s=0.1, calls=20)
    finding = only(report)
    assert (finding.kind, list(finding.ranks)) == ("store", [2])
    report = healthy(2, 4)
    for rank in range(4):
        with_worker(report, rank, cores=2)
    finding = only(report)
    assert (finding.kind, finding.grave) == ("cores", False)


def test_a_far_host_and_one_below_its_interfaces_speed() -> None:
    finding = only(with_links(healthy(), [3], latency_s=0.01))
    assert (finding.kind, list(finding.ranks)) == ("latency", [3])
    report = healthy(2)
    with_links(report, [0, 1], there=1e6, back=1e6)
    assert [(one.kind, one.grave) for one in findings(report)] == [("below speed", False)] * 2


def test_a_gpu_whose_copies_are_slow_and_devices_that_differ() -> None:
    report = healthy()
    for rank in range(4):
        with_worker(report, rank, gpu="H200" if rank else "H100")
        rate = 50 * GB if rank != 1 else 6 * GB
        report.copies[rank] = Copies(
            nbytes=1 << 26, pin_s=0.01, to_device=rate, from_device=rate, pageable=5 * GB, on_device=2e12
        )
    assert [(one.kind, one.grave, list(one.ranks)) for one in findings(report)] == [
        ("GPU copies", True, [1]),
        ("GPUs", False, [0, 1, 2, 3]),
    ]


def test_a_model_that_fails_is_a_problem() -> None:
    report = healthy()
    report.failed[1] = "ValueError: no"
    assert only(report).sentence == "The model could not be trained on rank 1: ValueError: no"


def test_problems_come_before_remarks_and_decide_the_status() -> None:
    report = with_worker(healthy(), 2, versions={**VERSIONS, "numpy": "2.1.0", "torch": "2.8.0"})
    found = findings(report)
    assert [one.grave for one in found] == [True, False]
    assert status(found) == 1


def test_hosts_of_one_name_are_named_by_their_ranks() -> None:
    report = healthy(2, 2)
    assert name_of_host(report, 1) == "host gpu01 (ranks 2, 3)"
    for rank in range(4):
        with_worker(report, rank, hostname="vm")
    assert name_of_host(report, 1) == "the host of ranks 2, 3"


@pytest.mark.parametrize(
    "break_it",
    [
        lambda report: report.links.clear(),
        lambda report: with_links(report, [0], latency_s=None, there=None, back=None, resent=None, failed="x", phase="latency"),
        lambda report: [loopback(report, rank) for rank in range(4)],
        lambda report: report.store.clear(),
    ],
)
def test_whatever_is_lacking_verdicts_are_sentences(break_it: Callable[[Report], object]) -> None:
    report = healthy()
    break_it(report)
    for one in findings(report):
        assert one.sentence[0].isupper()
        assert one.sentence.endswith((".", ")"))
        assert one.advice.endswith(".")
    assert len(list(itertools.chain(*(one.ranks for one in findings(report))))) <= 16


def test_a_host_that_looks_its_own_name_up_for_long_is_told_of() -> None:
    slow = replace(healthy().workers[2].listening, lookup_s=10.1)
    finding = only(with_worker(healthy(), 2, listening=slow))
    assert (finding.kind, finding.grave, list(finding.ranks)) == ("name server", False, [2])
    assert "up to 10.1 s to look the host's own name 'gpu02' up" in finding.sentence
    assert "/etc/hosts" in finding.advice
