"""cluster.json, as the simulator reads it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gossip.doctor import cluster_file
from lightning_gossip.doctor.report import Training
from lightning_gossip.simulation.cluster.cluster_file import ClusterFile
from tests.doctor.reports import healthy, link, with_links


def read(report: object, folder: Path) -> ClusterFile:
    assert cluster_file.save(report, folder)  # type: ignore[arg-type]
    return ClusterFile.load(folder / "cluster.json")


def test_hosts_are_nodes_with_the_medians_of_their_workers(tmp_path: Path) -> None:
    report = healthy(2, 2)
    with_links(report, [0, 1], there=9e9, back=9e9, latency_s=1e-6)
    with_links(report, [2, 3], there=7e9, back=7e9, latency_s=3e-6)
    with_links(report, [0, 2], there=2e8)
    found = read(report, tmp_path)
    assert (list(found.sizes), list(found.names)) == ([2, 2], ["gpu00", "gpu01"])
    assert found.inside_bandwidth == 8e9
    assert found.inside_latency_s == pytest.approx(2e-6)
    assert found.latency_s == [[0.0, 5e-5], [5e-5, 0.0]]
    assert found.bandwidth == [[math.inf, 1.1e8], [1.2e8, math.inf]]  # from row to column
    assert found.step_s is None


def test_a_link_that_failed_is_taken_for_as_bad_as_the_worst_and_that_is_said(tmp_path: Path) -> None:
    report = with_links(healthy(3), [1, 2], there=None, back=None, latency_s=None, phase="connect", failed="refused")
    with_links(report, [0, 1], back=3e7)
    found = read(report, tmp_path)
    assert found.bandwidth[1][2] == found.bandwidth[2][1] == 3e7  # type: ignore[index]
    assert found.about["assumed_as_bad_as_the_worst"] == [[1, 2]]


def test_ranks_dealt_out_host_by_host_keep_their_step_times(tmp_path: Path) -> None:
    report = healthy(2, 2)
    report.workers = [replace(one, host=f"kernel-{one.rank % 2}", hostname=f"gpu{one.rank % 2}") for one in report.workers]
    steps = Training(
        step_s=[], parameters_bytes=4, batch_size=1, samples=9, optimizer="SGD", lr=0.1, momentum=0.0, backward_share=0.5
    )
    report.training = {rank: replace(steps, step_s=[0.1 + rank]) for rank in range(4)}
    found = read(report, tmp_path)
    assert found.about["ranks"] == [0, 2, 1, 3]
    assert [list(times) for times in found.step_s or ()] == [[0.1], [2.1], [1.1], [3.1]]
    del report.training[3]
    assert read(report, tmp_path).step_s is None


def test_workers_whose_links_are_unknown_make_no_cluster(tmp_path: Path) -> None:
    report = healthy(3)
    report.links = [link(0, 1, there=None, back=None, failed="refused", phase="connect")]
    assert not cluster_file.save(report, tmp_path)
    assert not (tmp_path / "cluster.json").exists()
    assert list(read(healthy(1), tmp_path).sizes) == [1]
