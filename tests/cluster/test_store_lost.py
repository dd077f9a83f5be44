"""The job's store in rank 0, whose host is lost or parted from the others: who goes on, and how one comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.job import Job, job

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("hosts"), pytest.mark.slow]

_SILENT_S = 2.5  # peer_timeout_s


def _check(running: Job, go_on: list[int], *, lost: list[int]) -> None:
    """These end all epochs with one model, and missed no sample; the others end with one sentence."""
    results = [running.result(number, 90.0) for number in go_on]
    for result in results:
        assert (result["epochs"], sorted(result["lost"])) == (running.epochs, lost)
        assert result["model"] == results[0]["model"]
    assert running.missing() == {}
    assert (running.folder / "last.ckpt").exists()
    for number in lost:
        assert running.workers[number].wait(90.0) == 1
        assert running.workers[number].said("PeerError.* reaches .* and ends")


def test_more_than_half_go_on_without_the_store_and_the_one_that_has_it_ends(tmp_path: Path) -> None:
    with job(tmp_path, store_apart=False, epochs=6, peer_timeout_s=_SILENT_S) as running:
        running.await_epoch(1)
        running.net.part([running.hosts[0]])
        _check(running, [1, 2], lost=[0])


def test_of_two_halves_the_one_with_the_store_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, workers=4, store_apart=False, epochs=6, peer_timeout_s=_SILENT_S) as running:
        running.await_epoch(1)
        running.net.part(running.hosts[2:])
        _check(running, [0, 1], lost=[2, 3])


def test_with_min_workers_both_sides_go_on(tmp_path: Path) -> None:
    with job(tmp_path, store_apart=False, epochs=6, peer_timeout_s=_SILENT_S, min_workers=1) as running:
        running.await_epoch(1)
        running.net.part([running.hosts[0]])
        results = [running.result(number, 90.0) for number in range(3)]
        assert [result["epochs"] for result in results] == [6, 6, 6]
        assert [sorted(result["lost"]) for result in results] == [[1, 2], [0], [0]]


def test_rank_0_comes_back_by_the_address_that_another_one_says(tmp_path: Path) -> None:
    with job(tmp_path, store_apart=False, epochs=1000, peer_timeout_s=_SILENT_S) as running:
        running.await_epoch(1)
        running.net.cut(running.hosts[0])  # its host is lost: nobody hears of the end of its process
        running.workers[0].kill()
        running.workers[1].await_line("with 2 workers", 60)
        running.net.heal()
        by = running.way_back(0)
        assert by is not None
        assert by[0] in {running.hosts[1].address, running.hosts[2].address}
        running.start(0, by=by).await_line("epoch .* begins with 3 workers", 90)


def test_of_two_the_one_that_was_out_of_touch_when_the_other_one_ended_ends(tmp_path: Path) -> None:
    """It cannot know whether that one has gone on without it, to the job's end (decisions/025)."""
    with job(tmp_path, workers=2, store_apart=False, epochs=1000, peer_timeout_s=_SILENT_S) as running:
        running.await_epoch(1)
        running.net.part([running.hosts[0]])
        running.workers[1].await_line("has lost the job's store", 60)
        running.workers[0].kill()
        running.net.heal()
        assert running.workers[1].wait(90.0) == 1
        assert running.workers[1].said("PeerError.* reaches .* and ends")
