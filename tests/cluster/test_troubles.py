"""Workers on hosts of their own, over real links: what breaks, and what the others do (docs/survival.md, decisions/005)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.chaos import run
from tests.cluster.job import Job, job

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("hosts")]


_CUT_S = 2.5  # how long a link is cut; not a wait for something


def _check(running: Job, numbers: list[int], *, lost: list[int]) -> None:
    """These end all epochs with one model, and between them and the lost every sample was trained on."""
    results = [running.result(number) for number in numbers]
    for result in results:
        assert (result["epochs"], result["lost"]) == (running.epochs, lost)
        assert result["model"] == results[0]["model"]
    assert results[0]["exchanges"][str(numbers[0])] > 10
    assert running.missing() == {}
    assert (running.folder / "last.ckpt").exists()


def test_the_others_end_every_epoch_when_a_host_loses_its_worker(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        running.await_epoch(1)
        running.workers[2].kill()
        _check(running, [0, 1], lost=[2])
        assert running.orphans() == []


@pytest.mark.slow
def test_the_others_end_every_epoch_when_a_host_is_gone_and_nobody_hears_of_it(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        running.await_epoch(1)
        running.net.cut(running.hosts[0])  # no packet tells that its connections have closed
        running.workers[0].kill()
        _check(running, [1, 2], lost=[0])


@pytest.mark.slow
def test_a_worker_that_was_killed_comes_back_to_its_host(tmp_path: Path) -> None:
    with job(tmp_path, epochs=40) as running:
        running.await_epoch(1)
        running.workers[2].kill()
        running.workers[0].await_line("with 2 workers", 30)
        running.start(2)
        _check(running, [0, 1, 2], lost=[2])


def test_a_link_that_is_cut_and_healed_within_the_timeout_costs_nobody_the_job(tmp_path: Path) -> None:
    with job(tmp_path, peer_timeout_s=30.0) as running:
        running.await_epoch(1)
        running.net.cut(running.hosts[2])
        time.sleep(_CUT_S)
        running.net.heal()
        _check(running, [0, 1, 2], lost=[])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "part", "stop"])
def test_a_worker_that_is_away_for_longer_is_taken_in_again(how: str, tmp_path: Path) -> None:
    with job(tmp_path, epochs=40, peer_timeout_s=4.0) as running:
        running.await_epoch(1)
        trouble = {
            "cut": lambda: running.net.cut(running.hosts[2]),
            "part": lambda: running.net.part([running.hosts[2]]),
            "stop": running.workers[2].stop,
        }
        trouble[how]()
        running.workers[0].await_line("with 2 workers", 30)
        running.net.heal()
        running.workers[2].go_on()
        running.workers[0].await_line("epoch [2-9].* with 3 workers", 30)
        _check(running, [0, 1, 2], lost=[2])


@pytest.mark.slow
def test_one_slow_link_costs_the_other_workers_little(tmp_path: Path) -> None:
    with job(tmp_path, rate_mbit=1000, samples=1797, epochs=2, step_s=0.04) as running:
        begin_s = running.await_step(10)
        slow_s = running.await_step(30)
        running.net.set_rate(running.hosts[2], 10)
        end_s = running.await_step(60)
        _check(running, [0, 1, 2], lost=[])
        before = running.rate([0, 1], begin_s, slow_s)
        assert running.rate([0, 1], slow_s, end_s) > 0.75 * before


def test_of_two_halves_the_one_with_the_store_goes_on_and_the_other_ends(tmp_path: Path) -> None:
    with job(tmp_path, peer_timeout_s=2.5) as running:
        running.await_epoch(1)
        running.net.part([running.hosts[2]])
        _check(running, [0, 1], lost=[2])
        assert running.workers[2].wait(60) == 1
        assert running.workers[2].said("PeerError")


@pytest.mark.slow
def test_a_short_chaos_ends_well(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = run(1, 0.4, tmp_path, lines.append)
    assert outcome.failures == [], "\n".join(lines)
